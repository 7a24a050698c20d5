"""Where the time of a decode step goes in the embedded engine (``rollout.py --profile``).

Two passes over the same work. The first times every call of a unit: the difference between their sum and the whole is the
rest (choosing rows, storing keys, bookkeeping). The second divides that rest by source file with ``cProfile``, whose
overhead makes everything slower, but not one file much more than another. A step is one new token of every prompt; the few
steps that run prompts are counted in.
"""

from __future__ import annotations

import cProfile
import pstats
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from rollout_sides import Engine
from rollout_worker import Work
from torch import Tensor

from trtl_rl.kernels.kernel_set import HeadUnits, KernelSet, LayerUnits
from trtl_rl.kernels.spec import HeadSpec, LayerSpec

ROOT = Path(__file__).resolve().parent.parent
KERNELS = "trtl_rl/kernels/kernel_set.py"  # the calls of units themselves


class TimedKernels:
    """A kernel set whose units add up the time that they take; everything else is the set's own."""

    def __init__(self, kernels: KernelSet) -> None:
        self._kernels = kernels
        self.seconds: dict[str, float] = defaultdict(float)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    def layer(self, kind: LayerSpec) -> LayerUnits:
        """The layer's units, timed."""
        return self._timed(self._kernels.layer(kind))

    def head(self, kind: HeadSpec) -> HeadUnits:
        """The head's units, timed."""
        return self._timed(self._kernels.head(kind))

    def _timed(self, units: Any) -> Any:
        runs = {field.name: getattr(units, field.name) for field in fields(units)}
        return replace(units, **{name: self._time(name, run) for name, run in runs.items() if run is not None})

    def _time(self, name: str, run: Callable[..., list[Tensor]]) -> Callable[..., list[Tensor]]:
        def timed(inputs: Sequence[Tensor]) -> list[Tensor]:
            start = time.perf_counter()
            out = run(inputs)
            self.seconds[name] += time.perf_counter() - start
            return out

        return timed


def profile(model: str, recipe: str, work: Work, repeats: int = 5) -> dict[str, Any]:
    """Milliseconds a step by unit, and of the rest by source file."""
    side = Engine(model, recipe)
    plan = side.plans(work)[0]
    steps = work.most
    side.prepare(work, plan)
    plain = _median_seconds(side, work, repeats)
    timed = TimedKernels(side.kernels)
    side.kernels = timed
    side.prepare(work, plan)
    side.run(work)
    totals, parts = [], []
    for _ in range(repeats):
        timed.seconds.clear()
        start = time.perf_counter()
        side.run(work)
        totals.append(time.perf_counter() - start)
        parts.append(dict(timed.seconds))
    middle = sorted(range(repeats), key=lambda i: totals[i])[repeats // 2]  # one whole run, so that its parts add up
    units = {name: round(seconds / steps * 1000, 4) for name, seconds in parts[middle].items()}
    side.kernels = timed._kernels
    side.prepare(work, plan)
    side.run(work)
    return {
        "plan": plan,
        "step_ms": round(plain / steps * 1000, 4),
        "step_ms_while_timed": round(totals[middle] / steps * 1000, 4),
        "units_ms": units,
        "rest_ms": round(totals[middle] / steps * 1000 - sum(units.values()), 4),
        "rest_by_file": _shares(side, work),
    }


def _median_seconds(side: Engine, work: Work, repeats: int) -> float:
    taken = []
    side.run(work)
    for _ in range(repeats):
        start = time.perf_counter()
        side.run(work)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def _shares(side: Engine, work: Work) -> dict[str, float]:
    """Share of the time outside units by file of this project; what a file calls in libraries counts as its own."""
    profiler = cProfile.Profile()
    profiler.enable()
    side.run(work)
    profiler.disable()
    own: dict[str, float] = defaultdict(float)
    stats: dict[Any, Any] = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
    for (path, _, _), (_, _, total, _, callers) in stats.items():
        if (file := _file(path)) is not None:
            own[file] += total
            continue
        for (caller, _, _), (_, _, part, _) in callers.items():
            own[_file(caller) or "libraries called by libraries"] += part
    own.pop(KERNELS, None)
    whole = sum(own.values())
    shares = sorted(own.items(), key=lambda item: -item[1])
    return {file: round(seconds / whole, 3) for file, seconds in shares if seconds / whole >= 0.005}


def _file(path: str) -> str | None:
    """A path as written in this project, or None for libraries."""
    full = Path(path)
    return str(full.resolve().relative_to(ROOT)) if full.is_absolute() and full.resolve().is_relative_to(ROOT) else None
