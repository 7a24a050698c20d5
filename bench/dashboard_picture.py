"""Draw the picture of the README: the dashboard of a run after a given step, as SVG.

python bench/dashboard_picture.py RUN STEP docs/dashboard.svg
"""

from __future__ import annotations

import html
import io
import itertools
import re
import sys
from pathlib import Path

from rich.cells import cell_len
from rich.console import Console

from trtl_rl.cli.figures import _EIGHTHS, BLOCKS
from trtl_rl.cli.screens import Look, screen
from trtl_rl.cli.view import View
from trtl_rl.metrics import read_rows

WIDTH, HEIGHT = 88, 26
_CELL, _LINE, _ABOVE = 12.2, 24.4, 18.5  # of rich's SVG: a cell's width, a line's height, its top over the baseline
_TEXT = re.compile(
    r'<text class="([^"]*)" x="([\d.]+)" y="([\d.]+)" textLength="[\d.]+" clip-path="([^"]*)">(.*?)</text>', re.S
)


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
    svg = _TEXT.sub(_drawn, svg)
    picture.parent.mkdir(exist_ok=True)
    svg = svg.replace("Fira Code", "monospace").replace("<svg ", '<svg xml:space="preserve" ', 1)
    picture.write_text(svg)


def _drawn(found: re.Match[str]) -> str:
    """A piece of text with its blocks as rectangles: glyphs leave gaps between lines, another one in each font.

    Rich takes a combining mark for a cell of its own, which would stretch the words around it.
    """
    style, x, y, clip, text = found.groups()
    text, left, top = html.unescape(text), float(x), float(y) - _ABOVE
    shapes, at = [], 0
    for char, group in itertools.groupby(text):
        count = cell_len("".join(group))
        place = left + at * _CELL
        if char in BLOCKS[1:]:
            high = BLOCKS.index(char) / 8 * _LINE
            shapes.append((place, top + _LINE - high, count * _CELL, high))
        elif char in _EIGHTHS:
            shapes.append((place, top, count * _CELL * (_EIGHTHS.index(char) + 1) / 8, _LINE))
        at += count
    rest = "".join("\xa0" if char in BLOCKS[1:] or char in _EIGHTHS else char for char in text)
    drawn = "".join(
        f'<rect class="{style}" x="{a:.1f}" y="{b:.1f}" width="{w:.1f}" height="{h:.1f}" shape-rendering="crispEdges"/>'
        for a, b, w, h in shapes
    )
    if not rest.strip():
        return drawn
    words = html.escape(rest, quote=False).replace("\xa0", "&#160;").replace(" ", "&#160;")
    length = f"{cell_len(rest) * _CELL:.1f}"
    return f'{drawn}<text class="{style}" x="{x}" y="{y}" textLength="{length}" clip-path="{clip}">{words}</text>'


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
