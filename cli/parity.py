"""``trtl-rl parity`` and ``verify-engine``: the engine's logprobs beside the trainer's, as a table or JSON."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from trtl_rl.cli.figures import clean
from trtl_rl.cli.progress import progress_bars
from trtl_rl.engines.directory import EngineDirectory
from trtl_rl.trainer.parity_check import Parity
from trtl_rl.trainer.parity_subject import Checked, Options, Subject


def parity(target: str, options: Options, as_json: bool = False) -> int:
    """Check and print. Returns 0 when nothing differs, 1 when something does."""
    subject = Subject(target, options)
    with progress_bars() as progress:
        checked = subject.check(progress)
    _print(checked, as_json)
    return int(not checked.parity.exact)


def verify_engine(directory: Path, options: Options, as_json: bool = False) -> int:
    """Check an engine directory's files, load it, and compare what it generates. Returns 0 or 1 as :func:`parity`."""
    EngineDirectory.open(directory)  # a model or a run is no engine directory
    return parity(str(directory), options, as_json)


def _print(checked: Checked, as_json: bool) -> None:
    if as_json:
        print(json.dumps({**checked.about, **checked.parity.to_json()}, indent=1))
        return
    console = Console(highlight=False)
    for rows in (checked.about, _rows(checked.parity)):
        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column(style="dim", no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in rows.items():
            table.add_row(name, clean(value))
        console.print(table)
        console.print()
    console.print("exact: nothing differs" if checked.parity.exact else "NOT EXACT: trainer and engine differ")


def _rows(found: Parity) -> dict[str, str]:
    """The table's lines."""
    rows = {
        "answers": str(found.answers),
        "tokens compared": str(found.tokens),
        "differing": str(found.differing),
        "max |Δ logprob|": f"{found.max_abs:.3g}",
        "K3-KL, mean / max": f"{found.kl_mean:.3g} / {found.kl_max:.3g}",
        "mean exp|Δ|": f"{found.mean_exp_abs:.9g}",
        "first divergence": "none" if found.first_divergence < 0 else f"token {found.first_divergence} of an answer",
        "worst sample": "none",
    }
    if (w := found.worst) is not None:
        rows["worst sample"] = (
            f"prompt {w.prompt}, sample {w.sample}, position {w.position}, token {w.token}: "
            f"trainer {w.trainer:.9g}, engine {w.engine:.9g}"
        )
    if (full := found.full_vocabulary) is not None:
        rows["full vocabulary"] = (
            f"{full.differing} of {full.values} log-probabilities differ, max |Δ| {full.max_abs:.3g}, "
            f"KL mean {full.kl_mean:.3g}, max {full.kl_max:.3g}"
        )
    return rows
