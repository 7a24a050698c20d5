"""Several runs beside each other: a column each, the same numbers as on the first screen of one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from trtl_rl.cli.figures import chart, clean, duration, number, percent, quantity, resample, squeeze
from trtl_rl.cli.panels import eta_text
from trtl_rl.cli.rules import broken_rules, style_of
from trtl_rl.cli.screens import Look
from trtl_rl.cli.view import ROLES, View

_LABEL = 19
_COLUMN = 22  # least width of a run's column


def beside(views: Sequence[View], names: Sequence[str], look: Look, width: int, height: int, now: float) -> list[Text]:
    """At most ``height`` lines of at most ``width`` columns; ``look.first`` is the first run that is shown."""
    fit = max((width - _LABEL) // _COLUMN, 1)
    look.first = min(look.first, max(len(views) - fit, 0))
    chosen = list(range(look.first, min(look.first + fit, len(views))))
    column = max((width - _LABEL) // len(chosen), 8)
    cells = [views[at] for at in chosen]
    rows = [(label, [value(view, now) for view in cells]) for label, value in _ROWS]
    tall = min(max(height - len(rows) - 4, 0), 8)
    # one axis for all, so that curves can be compared
    curves = [resample(view.curve.values(), column - 2) for view in cells]
    every = [value for curve in curves for value in curve]
    head = [_line("", [(f"{at + 1} {names[at]}", "bold") for at in chosen], column)]
    charts = [_on_axis(curve, every, tall) for curve in curves]
    drawn = [_line("reward" if at == 0 else "", [(lines[at], "") for lines in charts], column) for at in range(tall)]
    body = [_line(label, values, column) for label, values in rows]
    if len(chosen) < len(views):
        more = f"runs {chosen[0] + 1} to {chosen[-1] + 1} of {len(views)}, left and right for the others  "
    else:
        more = ""
    foot = Text(more + "tab or 1 to 9 one run  h help  q leave", style="dim")
    out = [*head, *drawn, *body][: max(height - 1, 1)]
    out += [Text()] * (height - 1 - len(out))
    out = [*out, foot][:height]
    for line in out:
        line.truncate(width, overflow="ellipsis")
    return out


def _on_axis(curve: list[float], every: list[float], height: int) -> list[str]:
    """The curve as :func:`chart` draws it over the range of all runs: two columns with its ends are drawn and cut off."""
    if height < 1 or not every:
        return [""] * height
    return [line[2:] for line in chart([min(every), max(every), *curve], height)]


def _line(label: str, values: Sequence[tuple[str, str]], column: int) -> Text:
    line = Text.assemble((set_cell_size(label, _LABEL), "dim"))
    for text, style in values:
        text = squeeze(text, column - 2)
        line.append(text, style=style)
        line.append(" " * (column - cell_len(text)))
    return line


def _state(view: View, now: float) -> tuple[str, str]:
    planned = f"/{view.steps}" if view.steps is not None else ""
    if view.end is not None:
        text = clean(view.end.get("status", "ended"))
    elif view.progress is not None:
        text = clean(view.progress.name)
    elif view.stalled(now):
        text = "stalled"
    else:
        text = "" if view.step else "starting"
    return f"{view.step}{planned} {text}".rstrip(), style_of("stall", view, now)


def _of(
    metric: str, rule: str = "", form: Callable[[float | None], str] = number
) -> Callable[[View, float], tuple[str, str]]:
    return lambda view, now: (form(view.metrics.get(metric)), style_of(rule, view, now))


def _reward(view: View, now: float) -> tuple[str, str]:
    values = view.curve.values()
    return (f"{number(values[0], 2)} → {number(values[-1], 2)}" if values else "-"), ""


def _mismatch(view: View, now: float) -> tuple[str, str]:
    tokens, largest = view.probe.get("mismatch/differing_tokens"), view.probe.get("mismatch/max_abs")
    text = "-" if tokens is None and largest is None else f"{number(tokens, 0)}, max {number(largest)}"
    return text, style_of("mismatch", view, now)


def _share(role: str) -> Callable[[View, float], tuple[str, str]]:
    def cell(view: View, now: float) -> tuple[str, str]:
        share = view.share(role)
        return ("-" if share is None else f"{percent(share):>4}  {quantity(view.flops[role], 'FLOP')}"), ""

    return cell


def _evaluation(view: View, now: float) -> tuple[str, str]:
    found = view.last_evaluation
    if found is None or not found[1]:
        return "-", ""
    return f"{number(next(iter(found[1].values())), 2)} at {found[0]}", ""


def _seconds(value: float | None) -> str:
    return "-" if value is None else duration(value)


_ROWS: list[tuple[str, Callable[[View, float], tuple[str, str]]]] = [
    ("step", _state),
    ("ETA", lambda view, now: ("-" if view.end is not None else eta_text(view, now), "")),
    ("reward", _reward),
    ("held out", _evaluation),
    ("imbalance S̄_N/S̄_P", _of("asympo/imbalance", "imbalance")),
    ("answer length", _of("completions/mean_length")),
    ("truncated", _of("completions/clipped_ratio", "truncated", percent)),
    ("zero-signal groups", _of("frac_reward_zero_std", "zero-signal", percent)),
    ("staleness", _of("off_policy/mean")),
    ("mismatch", _mismatch),
    *((role, _share(role)) for role in ROLES),
    ("step time", _of("timing_s/step", "", _seconds)),
    ("tokens/s", _of("perf/tokens_per_second")),
    ("broken rules", lambda view, now: (", ".join(rule.name for rule in broken_rules(view, now)) or "none", "")),
]
