"""Numbers, bars and curves as text. Nothing here knows about runs or terminals."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence

from rich.cells import cell_len, chop_cells, set_cell_size

BLOCKS = " ▁▂▃▄▅▆▇█"
ASCII_BLOCKS = " ..::||##"
_EIGHTHS = "▏▎▍▌▋▊▉█"


def number(value: float | None, decimals: int = 1) -> str:
    """A number in at most eight characters: ``0.41``, ``19.8``, ``5120``, ``1.2e-05``; a dash for one that is missing.

    >>> [number(v) for v in (None, 0.0, 0.4142, 19.84, 5120.3, 1.2e-5)]
    ['-', '0', '0.41', '19.8', '5120', '1.2e-05']
    """
    if value is None:
        return "-"
    size = abs(value)
    if size == 0:
        return "0"
    if size >= 1e7 or size < 1e-2:
        return f"{value:.1e}"
    if size >= 1000:
        return f"{value:.0f}"
    return f"{value:.{decimals if size >= 1 else 2}f}"


def percent(value: float | None) -> str:
    """A share of one as a whole percentage; what is above 0 never reads ``0%``, nor below 1 ``100%``."""
    if value is None:
        return "-"
    if 0 < value < 0.005:
        return "<1%"
    if 0.995 <= value < 1:
        return ">99%"
    return f"{100 * value:.0f}%"


def quantity(value: float, unit: str = "") -> str:
    """A non-negative quantity with a decimal prefix: ``3.2 TFLOP``, ``340 k``.

    >>> quantity(3.21e12, "FLOP"), quantity(999_960, "B"), quantity(12)
    ('3.2 TFLOP', '1.0 MB', '12')
    """
    prefixes = ["", "k", "M", "G", "T", "P", "E", "Z", "Y", "R", "Q"]
    scaled, index = float(value), 0
    while abs(scaled) >= (999.5 if index == 0 else 999.95) and index < len(prefixes) - 1:
        scaled, index = scaled / 1000, index + 1
    digits = f"{scaled:.0f}" if index == 0 or abs(scaled) >= 99.95 else f"{scaled:.1f}"
    return f"{digits} {prefixes[index]}{unit}".rstrip()


def duration(seconds: float) -> str:
    """A time span in seconds as one word: ``0.35 s``, ``42 s``, ``1m40s``, ``2h05m``, ``3d04h``."""
    if seconds < 9.995:
        return f"{max(seconds, 0):.2f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def clean(text: object, newline: str = "↵") -> str:
    """Text that cannot steer a terminal: control, format and surrogate characters become ``·``."""
    out = []
    for char in str(text).replace("\r\n", "\n"):
        if char == "\n":
            out.append(newline)
        elif char == "\t":
            out.append(" ")
        else:
            # Cc control, Cf format (bidirectional overrides), Cs surrogates, Zl/Zp line and paragraph separators
            out.append("·" if unicodedata.category(char) in ("Cc", "Cf", "Cs", "Zl", "Zp") else char)
    return "".join(out)


def squeeze(text: str, cells: int) -> str:
    """Cut the middle out of ``text`` so that it takes at most ``cells`` columns: both ends of an answer matter."""
    if cells < 1:
        return ""
    # A character that shows takes a column or two: what lies outside these ends cannot be reached by either half.
    if len(text) > 4 * cells:
        text = text[: 2 * cells] + "…" + text[-2 * cells :]
    if cell_len(text) <= cells:
        return text
    tail, room = "", cells // 2
    for char in reversed(text):
        if cell_len(char + tail) > room:
            break
        tail = char + tail
    head = set_cell_size(text, cells - 1 - cell_len(tail)).rstrip()
    return f"{head}…{tail}"


def wrap(text: str, width: int, lines: int) -> list[str]:
    """``text`` in at most ``lines`` lines of at most ``width`` columns, its middle cut out where that is too little."""
    if width < 2 or lines < 1:  # one column cannot hold every character
        return []
    return chop_cells(squeeze(text, width * lines), width)[:lines] or [""]


def bar(fraction: float, width: int) -> str:
    """A bar of ``fraction`` (0 to 1) of ``width`` columns in steps of an eighth; above 0 at least one eighth shows."""
    eighths = round(min(max(fraction, 0.0), 1.0) * width * 8)
    if fraction > 0:
        eighths = max(eighths, 1)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (_EIGHTHS[rest - 1] if rest else ""))[:width]


def resample(values: Sequence[float], width: int) -> list[float]:
    """Exactly ``width`` values: means of equal stretches, or each value repeated where there are fewer."""
    count = len(values)
    out = []
    for column in range(width if count else 0):
        first = column * count // width
        last = max((column + 1) * count // width, first + 1)
        out.append(sum(values[first:last]) / (last - first))
    return out


def bounds(values: Sequence[float]) -> tuple[float, float]:
    """The range of the vertical axis. It starts at 0 unless values are negative: the area under the curve is drawn."""
    low = min(0.0, *values) if values else 0.0
    high = max(values) if values else 1.0
    return low, high if high > low else low + 1.0


def chart(values: Sequence[float], height: int, levels: str = BLOCKS) -> list[str]:
    """The area under ``values``, one column each, as ``height`` lines from top to bottom, over ``bounds(values)``.

    Every value shows at least the lowest level, so that a reward of 0 differs from no reward.
    """
    low, high = bounds(values)
    top = len(levels) - 1
    units = [max(1, round((value - low) / (high - low) * height * top)) for value in values]
    rows = []
    for line in range(height - 1, -1, -1):
        rows.append("".join(levels[min(max(unit - line * top, 0), top)] for unit in units))
    return rows


def scores(metrics: Mapping[str, float]) -> dict[str, float]:
    """The targets' values of an evaluation, without intervals and versions.

    >>> scores({"eval/exact": 0.5, "eval/exact/ci_low": 0.4, "eval/version_first": 3})
    {'eval/exact': 0.5}
    """
    return {
        name: value
        for name, value in metrics.items()
        if not name.endswith(("/ci_low", "/ci_high")) and "version" not in name
    }


def teaching(chosen: Mapping[str, float]) -> dict[str, float]:
    """What choosing prompts that teach has cost and saved, from sums of ``sampling/…``: FLOPs by label.

    >>> teaching({"sampling/refilled_groups": 3, "sampling/refilled_flops": 2e9})
    {'thrown away: 3 groups': 2000000000.0}
    """
    labels = {
        "refilled_groups": "thrown away: {:.0f} groups",
        "skipped_prompts": "saved by passing over {:.0f} prompts",
    }
    return {
        label.format(chosen[f"sampling/{name}"]): chosen.get(f"sampling/{name.partition('_')[0]}_flops", 0.0)
        for name, label in labels.items()
        if f"sampling/{name}" in chosen
    }


def evaluation_cells(metrics: Mapping[str, float]) -> dict[str, str]:
    """The figures of an evaluation by name, each with its interval where it has one.

    >>> evaluation_cells({"eval/exact": 0.5, "eval/exact/ci_low": 0.4, "eval/exact/ci_high": 0.6})
    {'exact': '0.50 [0.40, 0.60]'}
    """
    cells = {}
    for name, value in metrics.items():
        if name.endswith(("/ci_low", "/ci_high")):
            continue
        low, high = metrics.get(f"{name}/ci_low"), metrics.get(f"{name}/ci_high")
        interval = "" if low is None or high is None else f" [{number(low, 2)}, {number(high, 2)}]"
        cells[name.removeprefix("eval/")] = number(value, 0 if "version" in name else 2) + interval
    return cells
