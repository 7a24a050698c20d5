"""The picture of ``bench/staleness.py``: reward, imbalance and collapse, one row of panels for each task."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Runs = dict[str, dict[str, Any]]
COLOURS = {"naive": "C3", "grpo": "C2", "spo": "C1", "asympo": "C0"}


def plot(done: Runs, path: Path) -> None:
    """Draw what there is; panels of runs that are missing stay empty."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    runs = {name: run for name, run in done.items() if "/sweep/" not in name}
    parts = [_parts(name) for name in runs]
    tasks = sorted({task for task, *_ in parts})
    levels = sorted({staleness for _, _, staleness, _ in parts})
    if not runs:
        return
    columns = len(levels) + 2
    figure, axes = pyplot.subplots(len(tasks) * 2, columns, figsize=(3.1 * columns, 5.2 * len(tasks)), squeeze=False)
    for row, task in enumerate(tasks):
        upper, lower = axes[2 * row], axes[2 * row + 1]
        for column, level in enumerate(levels):
            _curves(upper[column], runs, task, level, _evaluations)
            _curves(lower[column], runs, task, level, _imbalances)
            upper[column].set_title(f"{task}, max_staleness {level}", fontsize=9)
            upper[column].set_ylim(-0.02, 1.02)
            lower[column].set_yscale("log")
            lower[column].set_xlabel("update", fontsize=8)
        upper[0].set_ylabel("sampled exact match, held out", fontsize=8)
        lower[0].set_ylabel("S̄_N / S̄_P", fontsize=8)
        upper[0].legend(fontsize=7, loc="lower right")
        _against_staleness(upper[-2], runs, task, levels, lambda run: run["evaluations"][-1][1])
        upper[-2].set_title("last evaluation, every seed and mean", fontsize=9)
        upper[-2].set_ylim(-0.02, 1.02)
        _against_staleness(lower[-2], runs, task, levels, _collapsed)
        lower[-2].set_title("share of collapsed seeds", fontsize=9)
        lower[-2].set_ylim(-0.02, 1.02)
        _against_staleness(upper[-1], runs, task, levels, lambda run: run["off_policy_mean_second_half"])
        upper[-1].set_title("real staleness, second half", fontsize=9)
        upper[-1].set_yscale("symlog")
        upper[-1].set_ylim(bottom=0)
        _against_staleness(lower[-1], runs, task, levels, _median_imbalance)
        lower[-1].set_title("median S̄_N / S̄_P of a run", fontsize=9)
        lower[-1].set_yscale("log")
    for axis in axes.flat:
        axis.grid(alpha=0.3)
        axis.tick_params(labelsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def _parts(name: str) -> tuple[str, str, int, int]:
    task, objective, staleness, seed = name.split("/")
    return task, objective, int(staleness), int(seed)


def _of(runs: Runs, task: str, objective: str, staleness: int) -> list[dict[str, Any]]:
    return [run for name, run in sorted(runs.items()) if _parts(name)[:3] == (task, objective, staleness)]


def _curves(axis: Any, runs: Runs, task: str, staleness: int, curve: Callable[[dict[str, Any]], Any]) -> None:
    for objective, colour in COLOURS.items():
        for i, run in enumerate(_of(runs, task, objective, staleness)):
            x, y = curve(run)
            axis.plot(x, y, color=colour, alpha=0.7, lw=1.1, label=objective if i == 0 else None)


def _evaluations(run: dict[str, Any]) -> tuple[list[int], list[float]]:
    return [step for step, _, _ in run["evaluations"]], [exact for _, exact, _ in run["evaluations"]]


def _imbalances(run: dict[str, Any]) -> tuple[list[int], list[float]]:
    """Medians of ten updates: single batches jump by factors."""
    x, y = [], []
    for start in range(0, len(run["imbalance"]), 10):
        known = [value for value in run["imbalance"][start : start + 10] if value]
        if known:
            x.append(start + 5)
            y.append(statistics.median(known))
    return x, y


def _against_staleness(
    axis: Any, runs: Runs, task: str, levels: Sequence[int], value: Callable[[dict[str, Any]], float | None]
) -> None:
    for objective, colour in COLOURS.items():
        means: list[tuple[int, float]] = []
        for i, level in enumerate(levels):
            found = [value(run) for run in _of(runs, task, objective, level)]
            known = [item for item in found if item is not None]
            axis.plot([i] * len(known), known, ".", color=colour, ms=3, alpha=0.6)
            if known:
                means.append((i, statistics.mean(known)))
        axis.plot([i for i, _ in means], [mean for _, mean in means], color=colour, lw=1.4, label=objective)
    axis.set_xticks(range(len(levels)), [str(level) for level in levels])
    axis.set_xlabel("max_staleness", fontsize=8)


def _collapsed(run: dict[str, Any]) -> float:
    return float(run["collapsed"])


def _median_imbalance(run: dict[str, Any]) -> float | None:
    known = [value for value in run["imbalance"] if value]
    return statistics.median(known) if known else None
