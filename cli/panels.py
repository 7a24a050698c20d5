"""The first screen: at most sixteen numbers, a reward curve, bars for the FLOPs, a sample.

``frame`` returns lines that fit: never more than ``height``, none wider than ``width``. From top to bottom:

    header        what runs and where           step      n/N and ETA, or the long work under way
    reward        the curve of all steps        FLOPs     one bar per role
    numbers       eight of them                 sample    a prompt and its completion
    alerts        broken rules                  message   the last one, and the keys
"""

from __future__ import annotations

from collections.abc import Iterable

from rich.cells import cell_len
from rich.text import Text

from trtl_rl.cli.figures import bar, bounds, chart, clean, duration, number, percent, quantity, resample, squeeze, wrap
from trtl_rl.cli.rules import broken_rules, style_of
from trtl_rl.cli.view import PARTS, ROLES, View, finite
from trtl_rl.recipe.audit import audit_lines

_WIDE = 110  # columns from which numbers stand beside the curve
_LABEL = 19


def frame(view: View, width: int, height: int, now: float, hint: str = "") -> list[Text]:
    """Draw ``view`` at ``now`` (Unix seconds) into at most ``height`` lines of at most ``width`` columns.

    Args:
        hint: The last line, where there is room: which keys there are.
    """
    top = [*_header(view, width), _step_line(view, width, now)]
    bottom = _bottom(view, width, now)
    if hint and height >= 20:
        bottom.append(Text(hint, style="dim"))
    room = height - len(top) - len(bottom)
    if view.rows == 0:
        middle: list[Text] = []
    elif width >= _WIDE:
        middle = _wide(view, width, room, now)
    else:
        middle = _narrow(view, width, room, now)
    lines = [*top, *middle[: max(room, 0)], *bottom]
    if len(lines) > height:  # tiny windows keep the step line and what is wrong
        lines = [top[-1], *bottom][:height]
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return lines


def _narrow(view: View, width: int, room: int, now: float) -> list[Text]:
    figures = _pairs(_numbers(view, now), width)
    flops = _flops(view, width)
    flexible = room - len(figures) - len(flops)
    sample = _sample(view, width, max(flexible * 2 // 5, 0)) if flexible >= 8 else []
    return [*_reward(view, width, flexible - len(sample)), *flops, *figures, *sample]


def _wide(view: View, width: int, room: int, now: float) -> list[Text]:
    right_width = max(46, width * 2 // 5)
    left_width = width - right_width - 2
    right = [*_flops(view, right_width), Text(), *_numbers(view, now)]
    tall = max(len(right), room * 3 // 5)
    left = _reward(view, left_width, tall)
    right += [Text()] * (tall - len(right))
    joined = []
    for one, other in zip(left, right, strict=True):
        one.truncate(left_width, overflow="ellipsis", pad=True)
        joined.append(Text.assemble(one, "  ", other))
    return [*joined, *_sample(view, width, room - tall)]


def facts(view: View) -> str:
    """What runs, in one line: model, parameters, task, objective, recipe."""
    row = view.facts
    parameters = finite(row.get("parameters"))
    size = f" ({quantity(parameters)} parameters)" if parameters else ""
    parts = [f"{row['model']}{size}"] if row.get("model") else []
    parts += [f"{row[name]}" for name in ("task", "loss", "recipe") if row.get(name)]
    return clean(" · ".join(parts))


def place(view: View) -> str:
    """Where it runs: the run's directory and the kernels."""
    kernels = view.facts.get("kernels")
    return clean(f"{view.run_dir} · kernels {kernels}" if kernels else view.run_dir)


def coverage(view: View) -> list[str]:
    """What runs in FP8 and what does not; nothing for rows of versions that did not count it."""
    found = view.facts.get("coverage")
    if not isinstance(found, dict) or "fp8_flop_share" not in found:
        return []
    return [clean(line) for line in audit_lines(found)]


def _header(view: View, width: int) -> list[Text]:
    title = Text.assemble(("trtl-rl  ", "bold"), squeeze(facts(view), width - 9))
    # What runs in FP8 is said before the first step, when nothing else is there to see.
    start = [] if view.step else coverage(view)
    return [title, *(Text(squeeze(line, width), style="dim") for line in (place(view), *start))]


def _step_line(view: View, width: int, now: float) -> Text:
    if view.rows == 0:
        return Text(f"waiting for the first row of {clean(view.run_dir)}/metrics.jsonl")
    planned = f"/{view.steps}" if view.steps is not None else ""
    head = f"step {view.step}{planned}  " if view.step else ""
    if (work := view.progress) is not None:
        name = squeeze(clean(work.name), max(width // 3, 8))
        if work.total <= 0:
            return Text(f"{head}{name} …")
        tail = f"  {_count(work.done)}/{_count(work.total)} {clean(work.unit)}".rstrip()
        return _gauge(f"{head}{name}  ", work.done / work.total, tail, width)
    if view.end is not None:
        return Text(f"{head}{clean(view.end.get('status', 'ended'))}")
    shares = [view.step / view.steps] if view.steps else []
    shares += [view.budget] if view.budget is not None else []
    if not view.step:
        part = "" if view.part is None else f"  first step: {clean(PARTS.get(view.part[0], view.part[0]))}"
        return Text(f"starting …{part}")
    return _gauge(head, max(shares, default=0.0), f"  ETA {eta_text(view, now)}", width)


def eta_text(view: View, now: float) -> str:
    """The time to the planned steps and to the end of the budget; of a run with both, the nearer end first."""
    ends = {} if view.stalled(now) else view.eta(now)
    if not ends:
        return "-"
    texts = {by: f"{seconds:.0f} s" if seconds < 59.5 else duration(seconds) for by, seconds in ends.items()}
    if list(texts) == ["steps"]:
        return texts["steps"]
    return ", ".join(f"{texts[by]} by {by}" for by in sorted(texts, key=lambda by: ends[by]))


def _count(value: float) -> str:
    return f"{value:.0f}" if value < 1e5 else quantity(value)


def _gauge(head: str, fraction: float, tail: str, width: int) -> Text:
    room = max(width - cell_len(head) - cell_len(tail), 0)
    done = round(min(max(fraction, 0.0), 1.0) * room)
    return Text.assemble(head, "━" * done, ("─" * (room - done), "dim"), tail)


def _title(text: str, width: int) -> Text:
    return Text.assemble(text, " ", ("─" * max(width - cell_len(text) - 1, 0), "dim"))


def _reward(view: View, width: int, height: int) -> list[Text]:
    """The title, with the ends of the vertical axis, and a chart over all steps, ``height`` lines in all."""
    if height < 1:
        return []
    values = resample(view.curve.values(), width)
    axis = "  axis {} to {}".format(*(number(end, decimals=2) for end in bounds(values))) if values else ""
    title = _title(f"reward {number(view.metrics.get('reward'), decimals=2)}", width - len(axis))
    return [Text.assemble(title, (axis, "dim")), *map(Text, chart(values, height - 1))]


def _flops(view: View, width: int) -> list[Text]:
    lines = [_title("FLOPs by role", width)]
    room = max(width - 30, 4)
    for role in ROLES:
        share = view.share(role)
        drawn = bar(share or 0.0, room)
        total = quantity(view.flops[role], "FLOP") if share is not None else "-"
        lines.append(Text(f"{role:<9} {drawn}{' ' * (room - len(drawn))} {percent(share):>5} {total:>11}"))
    return lines


def _numbers(view: View, now: float) -> list[Text]:
    """Eight labelled entries. A dash stands for what the run has not measured."""
    get = view.metrics.get
    tokens, largest = view.probe.get("mismatch/differing_tokens"), view.probe.get("mismatch/max_abs")
    mismatch = "-" if tokens is None and largest is None else f"{number(tokens, 0)} tokens, max {number(largest)}"
    seconds = get("timing_s/step")
    entries = [
        ("imbalance", "imbalance S̄_N/S̄_P", number(get("asympo/imbalance"))),
        ("length", "answer length", number(get("completions/mean_length"))),
        ("staleness", "staleness", number(get("off_policy/mean"))),
        ("truncated", "truncated", percent(get("completions/clipped_ratio"))),
        ("mismatch", "mismatch", mismatch),
        ("zero-signal", "zero-signal groups", percent(get("frac_reward_zero_std"))),
        ("step time", "step time", "-" if seconds is None else duration(seconds)),
        ("tokens", "tokens/s", number(get("perf/tokens_per_second"))),
    ]
    lines = []
    for name, label, value in entries:
        padding = " " * max(_LABEL - cell_len(label), 1)
        lines.append(Text.assemble((label, "dim"), padding, (value, style_of(name, view, now))))
    return lines


def _pairs(entries: list[Text], width: int) -> list[Text]:
    half = (width - 2) // 2
    lines = [_title("now", width)]
    for one, other in zip(entries[::2], entries[1::2], strict=True):
        one.truncate(half, overflow="ellipsis", pad=True)
        lines.append(Text.assemble(one, "  ", other))
    return lines


def _sample(view: View, width: int, height: int) -> list[Text]:
    """A title, then prompt and completion with both ends kept, at most ``height`` lines."""
    row = view.sample
    if height < 3 or row is None:
        return []
    title = _title(f"sample  reward {number(finite(row.get('reward')), decimals=2)}", width)
    prompt = wrap(clean(row.get("prompt", "")), width - 2, max((height - 1) // 3, 1))
    answer = wrap(clean(row.get("completion", "")), width - 2, height - 1 - len(prompt))
    return [title, *(Text(f"  {line}", style="dim") for line in prompt), *(Text(f"  {line}") for line in answer)]


def _bottom(view: View, width: int, now: float) -> list[Text]:
    """Broken rules and the last message; always at least one line, so that nothing jumps when a message comes."""
    lines = [Text(text, style=style) for text, style in alerts(view, now)]
    if (row := view.message) is not None:
        level = str(row.get("level", "info"))
        prefix = "" if level == "info" else f"{level}: "
        lines.append(Text(squeeze(clean(prefix + str(row.get("text", ""))), width)))
    return lines or [Text()]


def alerts(view: View, now: float) -> Iterable[tuple[str, str]]:
    """One ``(text, style)`` per broken rule, the gravest first."""
    for rule in broken_rules(view, now):
        if rule.name == "stall":
            yield clean(f"no progress for {duration(view.age(now))}; {view.stalled(now)}"), rule.style
        else:
            yield f"{rule.name} {rule.when}: {rule.meaning}", rule.style
