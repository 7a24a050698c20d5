"""The charts of a report: which metrics go together, and how their axes are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import TYPE_CHECKING

from trtl_rl.cli.figures import number, percent, quantity, scores
from trtl_rl.cli.report import charts
from trtl_rl.cli.report.charts import Chart, Palette
from trtl_rl.cli.report.history import History, Series, compare, smooth
from trtl_rl.cli.rules import IMBALANCE_FALL
from trtl_rl.cli.view import IMBALANCE_STEPS, ROLES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_STAGES = ("quantise", "move", "decode", "finish", "pause")
_PARTS = ("rollout_wait", "learn", "refit", "parity")

Scale = Callable[["Axes", list[float]], None]


def all_charts(runs: Sequence[History]) -> list[Chart]:
    """Those for which any of the runs has numbers, in the order of the page."""
    wanted = [
        _reward(runs),
        _equal_flops(runs),
        _evaluation(runs),
        _lines(runs, "lengths", "Answer length, tokens", {"completions/mean_length": ""}, charts.from_zero),
        _lines(
            runs,
            "truncation",
            "Truncated answers and zero-signal groups",
            {"completions/clipped_ratio": "truncated answers", "frac_reward_zero_std": "zero-signal groups"},
            charts.shares,
            "Share of a step's answers cut at the longest length; share of its groups whose rewards are all equal.",
        ),
        _lines(runs, "entropy", "Entropy, nats per token", {"entropy": ""}, charts.from_zero),
        _imbalance(runs),
        _mismatch(runs),
        _lines(
            runs,
            "staleness",
            "Staleness, weight versions",
            {"off_policy/mean": "mean", "off_policy/max": "largest"},
            charts.from_zero,
            "Versions between an answer's first token and the update that trained on it.",
        ),
        _flops(runs),
        _time(runs),
        _lines(
            runs,
            "throughput",
            "Throughput, generated tokens/s",
            {"perf/tokens_per_second": ""},
            charts.from_zero,
            "Generated tokens over the time of the step.",
        ),
        _refit_times(runs),
        _refit_bytes(runs),
        _lines(
            runs,
            "changed",
            "Weights changed by an update",
            {"refit/changed_frac": ""},
            charts.shares,
            "Share of the engine's bytes that differ from the version before.",
        ),
        _lines(
            runs,
            "gradient",
            "Gradient norm",
            {"grad_norm": ""},
            charts.from_zero,
            "Before clipping.",
        ),
        _lines(runs, "learning_rate", "Learning rate", {"learning_rate": ""}, charts.from_zero),
    ]
    return [chart for chart in wanted if chart is not None]


def _last_step(runs: Sequence[History]) -> int:
    return max((max(run.steps) for run in runs if run.steps), default=1)


def _resumes(axes: Axes, runs: Sequence[History], palette: Palette) -> None:
    for run in runs:
        for step in run.resumes:
            axes.axvline(step + 0.5, color=palette.faint, linewidth=0.9, linestyle=(0, (1, 2)))


def _plot(axes: Axes, series: Series, colour: str, label: str, dashed: bool = False) -> None:
    """A line over the steps; one alone is a point."""
    marker = "o" if len(series.steps) < 3 else None
    style = "--" if dashed else "-"
    axes.plot(series.steps, series.values, color=colour, label=label, linestyle=style, marker=marker, markersize=4)


def _binned_note(runs: Sequence[History], name: str) -> str:
    size = max(run.series(name).binned()[1] for run in runs)
    return f" Points are means of {size} steps." if size > 1 else ""


def _lines(
    runs: Sequence[History], name: str, title: str, metrics: dict[str, str], scale: Scale, note: str = ""
) -> Chart | None:
    """Metrics over steps: of one run a colour each, of several a colour a run and the second metric dashed."""
    if not any(run.series(metric) for run in runs for metric in metrics):
        return None
    several = len(runs) > 1

    def draw(axes: Axes, palette: Palette) -> None:
        seen: list[float] = []
        for at, run in enumerate(runs):
            for line, (metric, label) in enumerate(metrics.items()):
                series, _ = run.series(metric).binned()
                if not series:
                    continue
                seen += series.values
                text = " ".join(filter(None, [run.name if several else "", label]))
                _plot(
                    axes,
                    series,
                    palette.line(at if several else line),
                    text,
                    line > 0 and (several or "mean" in metrics.values()),
                )
        scale(axes, seen)
        charts.steps_axis(axes, _last_step(runs))
        _resumes(axes, runs, palette)
        if several or len(metrics) > 1:
            charts.legend(axes)

    return Chart(name, title, note + _binned_note(runs, next(iter(metrics))), draw)


def _reward(runs: Sequence[History]) -> Chart | None:
    if not any(run.series("reward") for run in runs):
        return None

    def draw(axes: Axes, palette: Palette) -> None:
        low, high = 0.0, 0.0
        for at, run in enumerate(runs):
            series, _ = run.series("reward").binned()
            if not series:
                continue
            colour = palette.line(at)
            window = _window(series)
            line = smooth(series.values, window)
            spread, _ = run.series("reward_std").binned()
            if spread.steps == series.steps and len(runs) == 1:
                width = smooth(spread.values, window)
                below = [value - half for value, half in zip(line, width, strict=True)]
                above = [value + half for value, half in zip(line, width, strict=True)]
                axes.fill_between(series.steps, below, above, color=colour, alpha=0.16, linewidth=0)
                low, high = min(low, *below), max(high, *above)
            if window > 1:
                axes.plot(series.steps, series.values, color=colour, alpha=0.35, linewidth=0.8)
            _plot(axes, Series(series.steps, line), colour, run.name)
            low, high = min(low, *series.values), max(high, *series.values)
        axes.set_ylim(low - 0.03 * (high - low) if low < 0 else 0, high + 0.05 * (high - low) if high > low else 1)
        charts.steps_axis(axes, _last_step(runs))
        _resumes(axes, runs, palette)
        if len(runs) > 1:
            charts.legend(axes)

    window = max(_window(run.series("reward").binned()[0]) for run in runs)
    note = f"Thin: each step. Thick: moving mean over {window} points. " if window > 1 else ""
    if len(runs) == 1 and runs[0].series("reward_std"):
        note += "Band: ± the mean standard deviation within a group."
    return Chart("reward", "Reward", (note + _binned_note(runs, "reward")).strip(), draw, 3.4)


def _window(series: Series) -> int:
    """Odd, about a fifteenth of the points; 1 for short runs."""
    count = len(series.steps) // 15
    return 1 if count < 2 else count | 1


def _equal_flops(runs: Sequence[History]) -> Chart | None:
    found = compare(runs)
    if not found:
        return None

    def draw(axes: Axes, palette: Palette) -> None:
        top = 0.0
        for at, run in enumerate(runs):
            spent, reward = run.spent(), run.series("reward")
            flops = dict(zip(spent.steps, spent.values, strict=True))
            binned, _ = reward.binned()
            line = smooth(binned.values, _window(binned))
            axes.plot([flops[step] for step in binned.steps], line, color=palette.line(at), label=run.name)
            top = max(top, *line)
        axes.axvline(found[0].flops, color=palette.faint, linewidth=1, linestyle="--")
        axes.set_ylim(0, top * 1.08 if top > 0 else 1)
        axes.set_xlim(left=0)
        charts.prefixed(axes.xaxis, "FLOP")
        axes.set_xlabel("FLOPs spent, all roles")
        charts.legend(axes)

    note = f"Dashed: {quantity(found[0].flops, 'FLOP')}, where the least spent; the table compares the runs there."
    return Chart("equal_flops", "Reward at equal FLOPs", note, draw, 3.4)


def _evaluation(runs: Sequence[History]) -> Chart | None:
    """From two evaluations on: of one run all targets, of several the first."""
    if max(len(run.evaluations) for run in runs) < 2:
        return None
    several = len(runs) > 1
    targets = list(
        dict.fromkeys(name for run in runs for metrics in run.evaluations.values() for name in scores(metrics))
    )
    targets = targets[:1] if several else targets

    def draw(axes: Axes, palette: Palette) -> None:
        seen: list[float] = []
        for at, (run, name) in enumerate((run, name) for run in runs for name in targets):
            points = [(step, metrics) for step, metrics in sorted(run.evaluations.items()) if name in metrics]
            colour = palette.line(at)
            label = run.name if several else name.removeprefix("eval/")
            steps, values = [step for step, _ in points], [metrics[name] for _, metrics in points]
            axes.plot(steps, values, color=colour, label=label, marker="o", markersize=4)
            low, high = (
                [metrics.get(f"{name}/ci_{end}", metrics[name]) for _, metrics in points] for end in ("low", "high")
            )
            axes.fill_between(steps, low, high, color=colour, alpha=0.12, linewidth=0)
            seen += values + low + high
        low_end, high_end = min(0.0, *seen), max(seen)
        axes.set_ylim(low_end, high_end * 1.08 if high_end > 0 else 1)
        charts.steps_axis(axes, _last_step(runs))
        charts.legend(axes)

    what = f"{targets[0].removeprefix('eval/')}. " if several and targets else ""
    note = f"{what}Step 0 is before training. Bands: 95 % over prompts."
    return Chart("evaluation", "Held-out evaluation", note, draw) if targets else None


def _imbalance(runs: Sequence[History]) -> Chart | None:
    name = "asympo/imbalance"
    if not any(run.series(name) for run in runs):
        return None
    start = runs[0].series(name).values[:IMBALANCE_STEPS] if len(runs) == 1 else []
    alarm = IMBALANCE_FALL * median(start) if start else None

    def draw(axes: Axes, palette: Palette) -> None:
        for at, run in enumerate(runs):
            series, _ = run.series(name).binned()
            positive = [(s, v) for s, v in zip(series.steps, series.values, strict=True) if v > 0]
            _plot(axes, Series([s for s, _ in positive], [v for _, v in positive]), palette.line(at), run.name)
        axes.set_yscale("log")
        charts.plain(axes.yaxis)
        axes.axhline(1, color=palette.faint, linewidth=0.9)
        if alarm is not None:
            axes.axhline(alarm, color=palette.faint, linewidth=0.9, linestyle="--")
        charts.steps_axis(axes, _last_step(runs))
        _resumes(axes, runs, palette)
        if len(runs) > 1:
            charts.legend(axes)

    note = "Mean token NLL of negative over positive answers, logarithmic. Line: balanced."
    if alarm is not None:
        note += f" Dashed: {number(IMBALANCE_FALL)} of its start; a median of {IMBALANCE_STEPS} steps below it is the alarm."
    return Chart("imbalance", "Imbalance S̄_N / S̄_P", note, draw)


def _mismatch(runs: Sequence[History]) -> Chart | None:
    name = "mismatch/max_abs"
    series = [run.series(name) for run in runs]
    if not any(series):
        return None
    probes = sum(len(found.steps) for found in series)
    worst = max(value for found in series for value in found.values)
    tokens = sum(run.total("mismatch/tokens") for run in runs)

    def draw(axes: Axes, palette: Palette) -> None:
        for at, (run, found) in enumerate(zip(runs, series, strict=True)):
            axes.scatter(found.steps, found.values, color=palette.line(at), s=16, label=run.name)
        charts.from_zero(axes, [worst])
        if worst == 0:
            axes.set_ylim(-0.05, 1)
            axes.set_yticks([0])
            text = f"0 in all {probes} probes, {tokens:.0f} tokens compared"
            axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", color=palette.faint)
        charts.steps_axis(axes, _last_step(runs))
        if len(runs) > 1:
            charts.legend(axes)

    note = "Largest difference of a token's logprob between trainer and engine, at the same weights, in each probe."
    return Chart("mismatch", "Mismatch, nats", note, draw)


def _flops(runs: Sequence[History]) -> Chart | None:
    if not any(sum(run.flops().values()) for run in runs):
        return None
    if len(runs) > 1:
        rows = [(run.name, [(role, run.flops()[role]) for role in ROLES]) for run in runs]
        return _bars("flops", "FLOPs by role", "Whole runs, with each role's share.", rows, "FLOP")
    layers = [(role, runs[0].series(f"flops/{role}")) for role in ROLES]
    note = "Counted in each step, stacked. Rollouts may run ahead of the updates that they serve."
    return _stack(
        "flops", "FLOPs by role, per step", note, runs[0], layers, lambda axes: charts.prefixed(axes.yaxis, "FLOP")
    )


def _time(runs: Sequence[History]) -> Chart | None:
    if not any(run.series("timing_s/step") for run in runs):
        return None
    if len(runs) > 1:
        rows = []
        for run in runs:
            parts = [(part.replace("_", " "), run.total(f"timing_s/{part}")) for part in _PARTS]
            rest = run.total("timing_s/step") - sum(spent for _, spent in parts)
            rows.append((run.name, [*parts, ("other", max(rest, 0.0))]))
        return _bars("time", "Time of the learner", "Sum over all steps, by what it did.", rows, "s")
    layers = [(part.replace("_", " "), runs[0].series(f"timing_s/{part}")) for part in _PARTS]
    note = "What the learner's time went to, stacked; rollouts and rewards run beside it."
    return _stack("time", "Time of a step, seconds", note, runs[0], layers, lambda axes: None)


def _refit_times(runs: Sequence[History]) -> Chart | None:
    name = "Refit times, seconds"
    if len(runs) > 1:
        return _lines(runs, "refit_times", name, {"timing_s/refit": ""}, charts.from_zero, "Quantise, send, switch.")
    metrics = {f"timing_s/refit/{stage}": stage for stage in _STAGES}
    note = "Stages by the clock; decoding runs beside generation, and only in the pause does the engine stand still."
    known = {metric: label for metric, label in metrics.items() if runs[0].series(metric)}
    return _lines(runs, "refit_times", name, known, charts.from_zero, note) if known else None


def _refit_bytes(runs: Sequence[History]) -> Chart | None:
    def scale(axes: Axes, values: list[float]) -> None:
        charts.from_zero(axes, values)
        charts.prefixed(axes.yaxis, "B")

    return _lines(runs, "refit_bytes", "Refit bytes", {"refit/bytes": ""}, scale, "Sent to the engine at each refit.")


def _stack(
    name: str, title: str, note: str, run: History, layers: list[tuple[str, Series]], finish: Callable[[Axes], None]
) -> Chart:
    """Layers over the steps that all of them know."""
    known = [(label, series) for label, series in layers if series]
    common = sorted(set.intersection(*(set(series.steps) for _, series in known)))
    rows: list[tuple[str, Series]] = []
    for label, series in known:
        values = dict(zip(series.steps, series.values, strict=True))
        rows.append((label, Series(common, [values[step] for step in common]).binned(200)[0]))
    size = Series(common, [0.0] * len(common)).binned(200)[1]

    def draw(axes: Axes, palette: Palette) -> None:
        base = [0.0] * len(rows[0][1].steps)
        for at, (label, series) in enumerate(rows):
            top = [low + value for low, value in zip(base, series.values, strict=True)]
            if len(base) < 3:
                axes.bar(series.steps, series.values, bottom=base, width=0.5, color=palette.line(at), label=label)
            else:
                axes.fill_between(series.steps, base, top, color=palette.line(at), label=label, linewidth=0, step="mid")
            base = top
        charts.from_zero(axes, base)
        charts.steps_axis(axes, _last_step([run]))
        _resumes(axes, [run], palette)
        finish(axes)
        charts.legend(axes)

    return Chart(name, title, note + (f" Points are means of {size} steps." if size > 1 else ""), draw)


def _bars(name: str, title: str, note: str, rows: list[tuple[str, list[tuple[str, float]]]], unit: str) -> Chart:
    """A horizontal bar a run."""

    def draw(axes: Axes, palette: Palette) -> None:
        labels = [label for label, _ in rows]
        left = [0.0] * len(rows)
        for at, (part, _) in enumerate(rows[0][1]):
            values = [parts[at][1] for _, parts in rows]
            totals = [sum(value for _, value in parts) or 1.0 for _, parts in rows]
            axes.barh(labels, values, left=left, color=palette.line(at), label=part, height=0.6)
            for y, (value, start, total) in enumerate(zip(values, left, totals, strict=True)):
                if value / max(totals) > 0.07:
                    text = percent(value / total)
                    axes.text(start + value / 2, y, text, ha="center", va="center", fontsize=8, color="white")
            left = [start + value for start, value in zip(left, values, strict=True)]
        axes.invert_yaxis()
        axes.set_xlim(0, max(left) * 1.02 or 1)
        charts.prefixed(axes.xaxis, unit)
        axes.grid(axis="y", visible=False)
        charts.legend(axes)

    return Chart(name, title, note, draw, 1.3 + 0.35 * len(rows))
