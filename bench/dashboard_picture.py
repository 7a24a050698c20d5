"""Draw the picture of the README: the dashboard of a run after a given step, as SVG.

python bench/dashboard_picture.py RUN STEP docs/dashboard.svg
"""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

from rich.console import Console

from trtl_rl.cli.screens import Look, screen
from trtl_rl.cli.view import View
from trtl_rl.metrics import read_rows

WIDTH, HEIGHT = 88, 26


def main(run: Path, step: int, picture: Path) -> None:
    """Feed the rows up to ``step`` to the dashboard and save its frame."""
    view = View("runs/demo")
    now = 0.0
    for row in read_rows(run / "metrics.jsonl"):
        if row["kind"] == "step" and row["step"] > step:
            break
        view.apply({**row, "run_dir": "runs/demo"} if row["kind"] == "start" else row)
        now = row["time"]
    console = Console(record=True, width=WIDTH, height=HEIGHT, file=io.StringIO(), force_terminal=True)
    for line in screen(view, Look(), WIDTH, HEIGHT, now, keys=True):
        console.print(line)
    svg = console.export_svg(title="trtl-rl run")
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)  # nothing is fetched to show it
    picture.parent.mkdir(exist_ok=True)
    svg = svg.replace("Fira Code", "monospace").replace("<svg ", '<svg xml:space="preserve" ', 1)
    picture.write_text(svg)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
