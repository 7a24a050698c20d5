"""Drawing with matplotlib: a chart as SVG whose colours the page chooses, and as PNG on white."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, MaxNLocator, NullFormatter

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

SERIES = 8  # colours of lines; further ones begin again, dashed
_SIZE = (5.6, 2.9)  # inches
_LABEL = 70  # characters
_FONT = ["Inter", "Helvetica", "Arial", "DejaVu Sans"]


@dataclass(frozen=True)
class Palette:
    """Colours of one drawing."""

    ink: str
    faint: str
    grid: str
    series: tuple[str, ...]

    def line(self, at: int) -> str:
        """The colour of the ``at``-th line."""
        return self.series[at % SERIES]


# After Okabe and Ito: told apart with the usual colour blindnesses, and dark enough for lines on white.
LIGHT = Palette(
    "#1f2328",
    "#656d76",
    "#d8dee4",
    ("#0a66a8", "#c8501e", "#0a8060", "#a3468c", "#8a6d00", "#2f8fc6", "#5b5bd6", "#6b7280"),
)
DARK = Palette(
    "#e6edf3",
    "#9aa4af",
    "#30363d",
    ("#58b4f0", "#f08a5d", "#3fcf9f", "#e08ac8", "#e2c044", "#8fd3ff", "#a5a5ff", "#b0b8c2"),
)


@dataclass(frozen=True)
class Chart:
    """One drawing.

    Attributes:
        name: Of its file, without the suffix.
        title, note: Above it: what it shows, in which unit; what a reader must know.
        draw: Draws into axes with a palette.
        height: In inches.
    """

    name: str
    title: str
    note: str
    draw: Callable[[Axes, Palette], None]
    height: float = _SIZE[1]

    def render(self) -> tuple[str, bytes]:
        """As SVG for a page that defines the colours as ``--ink``, ``--faint``, ``--grid``, ``--c0`` and so on; as PNG on white."""
        svg, png = io.StringIO(), io.BytesIO()
        with _figure(self) as figure:
            figure.savefig(svg, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
            figure.set_layout_engine("none")  # what was found for the SVG stays; finding it takes the longest
            figure.text(0.02, 1.02, self.title, fontsize=10, fontweight="bold", color=LIGHT.ink)
            figure.savefig(png, format="png", dpi=160, facecolor="white", bbox_inches="tight", pad_inches=0.15)
        return _themed(svg.getvalue(), self.name), png.getvalue()


@contextmanager
def _figure(chart: Chart) -> Iterator[Figure]:
    palette = LIGHT
    settings: dict[Any, Any] = {
        "svg.fonttype": "none",  # text stays text
        "svg.hashsalt": chart.name,  # the same drawing is the same file
        "font.family": "sans-serif",
        "font.sans-serif": _FONT,
        "font.size": 9,
        "axes.edgecolor": palette.faint,
        "axes.labelcolor": palette.faint,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.grid.axis": "y",
        "axes.axisbelow": True,
        "grid.color": palette.grid,
        "grid.linewidth": 0.7,
        "xtick.color": palette.faint,
        "ytick.color": palette.faint,
        "text.color": palette.ink,
        "legend.frameon": False,
        "legend.fontsize": 8.5,
        "legend.labelcolor": palette.ink,
        "lines.linewidth": 1.6,
        "axes.formatter.useoffset": False,
    }
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(_SIZE[0], chart.height), layout="constrained")
        axes = figure.add_subplot()
        chart.draw(axes, palette)
        yield figure


def _themed(svg: str, name: str) -> str:
    """The ``<svg>`` element with the page's colours and font, and ids of its own beside other drawings."""
    svg = svg[svg.index("<svg") :]
    names = {LIGHT.ink: "ink", LIGHT.faint: "faint", LIGHT.grid: "grid"}
    names |= {colour: f"c{at}" for at, colour in enumerate(LIGHT.series)}
    svg = re.sub(r"#[0-9a-f]{6}\b", lambda found: f"var(--{names[found[0]]})" if found[0] in names else found[0], svg)
    svg = re.sub(r"font-family: [^;\"]+", "font-family: var(--font)", svg)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'(href="#|url\(#)', rf"\g<1>{name}-", svg)
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    return re.sub(r'<svg [^>]*?viewBox="([^"]*)"[^>]*>', r'<svg viewBox="\1" role="img">', svg, count=1)


def steps_axis(axes: Axes, last: int) -> None:
    """The horizontal axis of all drawings over steps: whole numbers, from the start."""
    axes.set_xlabel("step")
    axes.set_xlim(0, max(last, 1) * 1.02)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))


def from_zero(axes: Axes, values: list[float]) -> None:
    """A vertical axis for amounts: it begins at 0."""
    top = max(values, default=0.0)
    axes.set_ylim(0, top * 1.08 if top > 0 else 1)


def shares(axes: Axes, values: list[float]) -> None:
    """A vertical axis for shares of one, as percentages, from 0 to what there is, at most 100 %."""
    top = max(values, default=0.0)
    axes.set_ylim(0, 1.0 if top > 0.5 else max(top * 1.15, 0.05))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g}%"))


def prefixed(axis: Axis, unit: str) -> None:
    """Decimal prefixes: ``40 GFLOP``."""
    axis.set_major_locator(MaxNLocator(nbins=5))
    axis.set_major_formatter(EngFormatter(unit=unit, sep=" "))


def plain(axis: Axis) -> None:
    """Numbers without exponents, on a logarithmic axis: 1, 2, 5, 10 and so on."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_minor_formatter(NullFormatter())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def legend(axes: Axes) -> None:
    """Above the drawing, where it hides nothing, in as many columns as the labels leave room for."""
    handles, labels = axes.get_legend_handles_labels()
    labels = [label if len(label) <= _LABEL else label[: _LABEL - 1] + "…" for label in labels]
    widest = 0.4 + 0.055 * max(map(len, labels), default=0)  # inches: the handle, and letters of 8.5 points
    figure = axes.get_figure()
    assert isinstance(figure, Figure)
    columns = max(1, min(len(labels), int(_SIZE[0] / widest)))
    figure.legend(handles, labels, loc="outside upper left", ncols=columns, borderaxespad=0.2, handlelength=1.4)
