"""``trtl-rl report RUN [RUN …]``: reads the runs, draws, writes the page and its plots."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trtl_rl.errors import UserError

if TYPE_CHECKING:
    from trtl_rl.cli.report.history import History

_PAGE = "index.html"


def report(runs: Sequence[Path], output: Path | None = None) -> int:
    """Write ``index.html`` and the plots, and say where.

    Args:
        output: Directory; by default ``report`` in the directory of the one run, or ``./report`` for several. A report that
            is there already is replaced.

    Raises:
        UserError: a directory is no run, ``output`` holds something else, or a package is missing.
    """
    missing = [name for name in ("matplotlib", "jinja2") if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"trtl-rl report needs {' and '.join(missing)}: pip install 'trtl-rl[report]'")
    from trtl_rl.cli.report.history import History
    from trtl_rl.cli.report.page import page
    from trtl_rl.cli.report.plots import all_charts

    histories = [History.read(run) for run in dict.fromkeys(runs)]
    _name_apart(histories)
    target = output or (runs[0] / "report" if len(histories) == 1 else Path("report"))
    _check(target)
    charts = [(chart, *chart.render()) for chart in all_charts(histories)]
    html = page(histories, [(chart, svg) for chart, svg, _ in charts])
    try:
        target.mkdir(parents=True, exist_ok=True)
        for old in target.glob("*.png"):
            old.unlink()
        for chart, _, png in charts:
            (target / f"{chart.name}.png").write_bytes(png)
        part = target / f"{_PAGE}.part"
        part.write_text(html, encoding="utf-8")
        os.replace(part, target / _PAGE)
    except OSError as error:
        raise UserError(f"The report cannot be written to {target}: {error.strerror}. Name another --output.") from None
    print(f"{target / _PAGE}  ({len(html.encode()) / 1e6:.1f} MB, one file; {len(charts)} plots as PNG beside it)")
    return 0


def _check(target: Path) -> None:
    """Refuse to write among files that are no report."""
    if not target.exists():
        return
    if not target.is_dir():
        raise UserError(f"--output {target} is a file: name a directory.")
    others = [path.name for path in target.iterdir() if path.suffix not in (".png", ".html", ".part")]
    page = target / _PAGE
    ours = page.is_file() and 'content="trtl-rl report"' in page.read_text(encoding="utf-8", errors="replace")[:2000]
    if others or (any(target.iterdir()) and not ours):
        raise UserError(f"{target} holds other files than a report: name another directory with --output.")


def _name_apart(runs: Sequence[History]) -> None:
    """Runs whose directories have the same name are called by their parents' too."""
    names = [run.name for run in runs]
    for run in runs:
        if names.count(run.name) > 1:
            run.name = "/".join(run.directory.resolve().parts[-2:])
