"""A response curve as text: the cells, and the fit where one is believed."""

from __future__ import annotations

from rich.text import Text

from trtl_rl.cli.figures import clean, number
from trtl_rl.flops.response import Response

HEIGHT = 8
_LABEL = 9


def curve(response: Response, title: str, width: int, ascii_only: bool = False) -> list[Text]:
    """Lines of at most ``width`` columns: title, axes, cells as dots over the best fit, and the verdict.

    A constant is drawn as the line that it is: nothing else was shown to be there.
    """
    columns = max(width - _LABEL, 10)
    dot, line = ("o", ".") if ascii_only else ("●", "·")
    left, right = response.grid[0], response.grid[-1]
    drawn = response.curve if response.regime != "undecided" else response.fits["constant"].coefficients * 2
    low, high = min(*response.score, *drawn), max(*response.score, *drawn)
    span, wide = (high - low) or 1.0, (right - left) or 1.0
    cells = [[" "] * columns for _ in range(HEIGHT)]

    def put(rho: float, score: float, mark: str) -> None:
        x = round((rho - left) / wide * (columns - 1))
        y = HEIGHT - 1 - round((score - low) / span * (HEIGHT - 1))
        cells[y][x] = mark

    for x in range(columns):
        share = x / (columns - 1)
        at = share * (len(drawn) - 1)
        i = min(int(at), len(drawn) - 2)
        put(left + share * wide, drawn[i] + (at - i) * (drawn[i + 1] - drawn[i]), line)
    for rho, score in zip(response.rho, response.score, strict=True):
        put(rho, score, dot)
    labels = [number(high, 3), *[""] * (HEIGHT - 2), number(low, 3)]
    rows = [
        Text.assemble((f"{label:>{_LABEL - 1}} ", "dim"), "".join(row))
        for label, row in zip(labels, cells, strict=True)
    ]
    ends = f"rho {number(left, 2)}"
    axis = ends + f"{number(right, 2):>{max(columns - len(ends), 5)}}"
    verdict = f"{response.regime}: {response.reason}"
    return [
        Text(clean(title), style="bold"),
        *rows,
        Text(" " * _LABEL + axis, style="dim"),
        Text(" " * _LABEL + verdict),
    ]
