"""What the rows of ``metrics.jsonl`` say about a run so far: the state behind every screen, line and summary.

Nothing is drawn here. Rows are applied in file order; what a row lacks stays unknown, and a row that this version
does not know is passed over, so that a newer run can be watched with an older command. Memory does not grow with it.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from trtl_rl.metrics import Row

ROLES = ("search", "learning", "feedback")
IMBALANCE_STEPS = 10
_RECENT = 64  # steps that the median step time and the ETA look at
_TOTALS = 512  # steps whose sums of FLOPs are kept, for a resumed run that does some again
_SAMPLES = 64
_MESSAGES = 200

# What the parts of a step wait for, for people.
PARTS = {
    "rollout_wait": "waiting for rollouts (engine or reward functions)",
    "learn": "the update (learner)",
    "refit": "the refit (engine takes new weights)",
    "parity": "the parity probe (engine answers)",
}


class Curve:
    """A value per step, kept as at most ``limit`` means over equally many steps each.

    >>> curve = Curve(limit=4)
    >>> for step in range(1, 7):
    ...     curve.add(step, float(step))
    >>> curve.values()
    [1.5, 3.5, 5.5]
    """

    def __init__(self, limit: int = 2000) -> None:
        assert limit >= 2 and limit % 2 == 0, "bins are merged in pairs"
        self.limit = limit
        self._stride = 1  # rows per bin
        self._bins: list[tuple[int, float, int]] = []  # first step, sum, rows

    def add(self, step: int, value: float) -> None:
        if self._bins and self._bins[-1][2] < self._stride:
            first, total, rows = self._bins[-1]
            self._bins[-1] = (first, total + value, rows + 1)
            return
        if len(self._bins) == self.limit:
            pairs = zip(self._bins[::2], self._bins[1::2], strict=True)
            self._bins = [(a[0], a[1] + b[1], a[2] + b[2]) for a, b in pairs]
            self._stride *= 2
        self._bins.append((step, value, 1))

    def drop_from(self, step: int) -> None:
        """Forget ``step`` and later ones: a resumed run does them again."""
        while self._bins and self._bins[-1][0] >= step:
            self._bins.pop()

    def values(self) -> list[float]:
        return [total / rows for _, total, rows in self._bins]


@dataclass(frozen=True)
class Progress:
    """Long work between or before steps; ``total`` is 0 where nobody knows how much there is."""

    name: str
    done: float
    total: float
    unit: str

    @property
    def finished(self) -> bool:
        return 0 < self.total <= self.done


@dataclass
class View:
    """The state of one run.

    Attributes:
        run_dir: The run's directory, for people.
        facts: The last ``start`` row: ``model``, ``parameters``, ``loss``, ``recipe``, ``kernels`` …; empty before it.
        step, steps: The last finished step, and how many are planned (``None``: unknown).
        metrics: Numbers of the last step only; what it lacks is absent.
        probe: The last known ``mismatch/…`` numbers: only steps with a parity probe carry them.
        flops: FLOPs so far by role.
        wasted: FLOPs so far by fate (``stale``, ``failed`` …), which the roles already count.
        chosen: Sums of ``sampling/…`` so far: prompts passed over, groups thrown away for others.
        curve: The reward of all steps, binned.
        progress: Long work under way, or ``None``.
        part: The part of a step that takes very long, and since when (Unix seconds); ``None`` when none does.
        probes, worst_tokens, worst_abs: How many probes there were, and the largest of what they found.
        samples, messages: The last rows of those kinds.
        warnings: Messages of level ``warning`` or ``error``.
        first_evaluation, last_evaluation: ``(step, metrics)``.
        end: The ``end`` row; ``None`` while the run goes on.
        rows, torn: Rows taken, and lines that were no JSON (a kill tears one).
        began, heard: Unix seconds of the last ``start`` row and of the last row.
        moved: Unix seconds of the last row that tells of work done: no message, no part that takes long.
    """

    run_dir: str
    facts: Row = field(default_factory=dict)
    step: int = 0
    steps: int | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    probe: dict[str, float] = field(default_factory=dict)
    probes: int = 0
    worst_tokens: float = 0.0
    worst_abs: float = 0.0
    flops: dict[str, float] = field(default_factory=lambda: dict.fromkeys(ROLES, 0.0))
    wasted: dict[str, float] = field(default_factory=dict)
    chosen: dict[str, float] = field(default_factory=dict)
    curve: Curve = field(default_factory=Curve)
    progress: Progress | None = None
    part: tuple[str, float] | None = None
    samples: deque[Row] = field(default_factory=lambda: deque(maxlen=_SAMPLES))
    messages: deque[Row] = field(default_factory=lambda: deque(maxlen=_MESSAGES))
    warnings: int = 0
    first_evaluation: tuple[int, dict[str, float]] | None = None
    last_evaluation: tuple[int, dict[str, float]] | None = None
    end: Row | None = None
    rows: int = 0
    torn: int = 0
    began: float | None = None
    heard: float | None = None
    moved: float | None = None
    _totals: deque[tuple[int, dict[str, float], dict[str, float], dict[str, float]]] = field(
        default_factory=lambda: deque(maxlen=_TOTALS)
    )
    _timings: dict[str, deque[float]] = field(default_factory=dict)
    _imbalance_first: list[float] = field(default_factory=list)
    _imbalance_last: deque[float] = field(default_factory=lambda: deque(maxlen=IMBALANCE_STEPS))
    _marks: deque[tuple[float, int, float | None]] = field(default_factory=lambda: deque(maxlen=_RECENT))
    _step_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))

    def apply(self, row: Any) -> None:
        """Take the next row of the file."""
        if not isinstance(row, dict):
            return
        self.rows += 1
        self.heard = finite(row.get("time")) or self.heard
        kind = row.get("kind")
        if kind not in ("message", "part"):
            self.moved, self.part = self.heard, None
        match kind:
            case "start":
                self._start(row)
            case "progress":
                progress = progress_of(row)
                if not progress.finished:
                    self.progress = progress
                elif self.progress is not None and self.progress.name == progress.name:
                    self.progress = None
            case "step":
                self._step(row)
            case "sample":
                self.samples.append(row)
            case "part":
                seconds = finite(row.get("seconds")) or 0.0
                self.part = (str(row.get("name", "")), (self.heard or 0.0) - seconds)
            case "message":
                self.messages.append(row)
                self.warnings += row.get("level") in ("warning", "error")
            case "evaluation":
                self.last_evaluation = (int(finite(row.get("step")) or 0), numbers(row.get("metrics")))
                self.first_evaluation = self.first_evaluation or self.last_evaluation
            case "end":
                self.end, self.progress = row, None

    def _start(self, row: Row) -> None:
        self.facts, self.end, self.progress = row, None, None
        steps = finite(row.get("steps"))
        self.steps = None if steps is None else int(steps)
        self.began = self.heard
        self._marks.clear()
        self._step_seconds.clear()

    @property
    def imbalance_change(self) -> float | None:
        """Median imbalance of the last ten steps over that of the first ten, from the twentieth on.

        A policy that learns pushes wrong answers away, and the ratio grows. Where it falls far below its start, right answers have
        become unlikely as well: that is what collapse looks like (``bench/staleness.py``).
        """
        if len(self._imbalance_last) < IMBALANCE_STEPS or self.step < 2 * IMBALANCE_STEPS:
            return None
        first = statistics.median(self._imbalance_first)
        return statistics.median(self._imbalance_last) / first if first > 0 else None

    def _step(self, row: Row) -> None:
        step = finite(row.get("step"))
        number = self.step + 1 if step is None else int(step)
        if number <= self.step:
            self._back_to(number)
        self.step, self.metrics, self.progress = number, numbers(row.get("metrics")), None
        if (reward := self.metrics.get("reward")) is not None:
            self.curve.add(number, reward)
        if (imbalance := self.metrics.get("asympo/imbalance")) is not None:
            if len(self._imbalance_first) < IMBALANCE_STEPS:
                self._imbalance_first.append(imbalance)
            self._imbalance_last.append(imbalance)
        if (seconds := self.metrics.get("timing_s/step")) is not None:
            self._step_seconds.append(seconds)
        elif self._marks and self.heard is not None:
            self._step_seconds.append(max(self.heard - self._marks[-1][0], 0.0))
        if self.heard is not None:
            self._marks.append((self.heard, number, self.metrics.get("flops/budget_frac")))
        for name, value in self.metrics.items():
            if name.startswith("timing_s/"):
                self._timings.setdefault(name, deque(maxlen=_RECENT)).append(value)
        self._probe()
        for role in ROLES:
            spent = self.metrics.get(f"flops/{role}", 0.0)
            self.flops[role] = self.metrics.get(f"flops/cumulative/{role}", self.flops[role] + spent)
        for name, value in self.metrics.items():
            if name.startswith("flops/wasted/"):
                fate = name.removeprefix("flops/wasted/")
                self.wasted[fate] = self.wasted.get(fate, 0.0) + value
            if name.startswith("sampling/"):
                self.chosen[name] = self.chosen.get(name, 0.0) + value
        self._totals.append((number, dict(self.flops), dict(self.wasted), dict(self.chosen)))

    def _back_to(self, step: int) -> None:
        """``step`` and later ones were lost with a process, and come again: what they had cost no longer counts."""
        self.curve.drop_from(step)
        self._marks.clear()
        oldest = self._totals[0] if len(self._totals) == self._totals.maxlen else None
        while self._totals and self._totals[-1][0] >= step:
            self._totals.pop()
        begin: dict[str, float] = dict.fromkeys(ROLES, 0.0)
        _, flops, wasted, chosen = self._totals[-1] if self._totals else oldest or (0, begin, {}, {})
        self.flops, self.wasted, self.chosen = dict(flops), dict(wasted), dict(chosen)

    def _probe(self) -> None:
        found = {name: value for name, value in self.metrics.items() if name.startswith("mismatch")}
        if found:
            self.probe, self.probes = found, self.probes + 1
            self.worst_tokens = max(self.worst_tokens, found.get("mismatch/differing_tokens", 0.0))
            self.worst_abs = max(self.worst_abs, found.get("mismatch/max_abs", 0.0))

    @property
    def step_seconds(self) -> float | None:
        """Median time of the recent steps."""
        return median(self._step_seconds) if self._step_seconds else None

    @property
    def sample(self) -> Row | None:
        """The last one."""
        return self.samples[-1] if self.samples else None

    @property
    def message(self) -> Row | None:
        """The last one."""
        return self.messages[-1] if self.messages else None

    def timings(self) -> dict[str, tuple[float, float, float]]:
        """Of each ``timing_s/…`` metric the last value, median and maximum of the recent steps, in seconds."""
        return {name: (values[-1], median(values), max(values)) for name, values in self._timings.items()}

    @property
    def budget(self) -> float | None:
        """Used share of the nearest limit, where the run has a budget."""
        return self.metrics.get("flops/budget_frac")

    def share(self, role: str) -> float | None:
        """``role``'s part of all FLOPs so far, 0 to 1."""
        total = sum(self.flops.values())
        return self.flops[role] / total if total > 0 else None

    def age(self, now: float) -> float:
        """Seconds since the last row that told of work done."""
        return 0.0 if self.moved is None else max(now - self.moved, 0.0)

    def eta(self, now: float) -> dict[str, float]:
        """Seconds to the ends that are known: by ``steps`` and by ``budget``."""
        if len(self._marks) < 2:
            return {}
        (first, first_step, first_used), (last, last_step, last_used) = self._marks[0], self._marks[-1]
        ends: dict[str, float] = {}
        if self.steps is not None and last_step > first_step:
            ends["steps"] = (last - first) / (last_step - first_step) * max(self.steps - last_step, 0)
        if first_used is not None and last_used is not None and last_used > first_used:
            ends["budget"] = (last - first) / (last_used - first_used) * max(1 - last_used, 0.0)
        return {by: max(seconds - max(now - last, 0.0), 0.0) for by, seconds in ends.items()}

    def stalled(self, now: float) -> str | None:
        """What is missed, when no work was done for ten median steps and at least 30 s; ``None`` when all is well."""
        usual = self.step_seconds
        if self.end is not None or usual is None or self.age(now) <= max(30.0, 10 * usual):
            return None
        if self.progress is not None:
            work = self.progress
            return f"last: {work.name}, {work.done:g} of {work.total:g} {work.unit}".rstrip()
        if self.part is not None:
            return f"in {PARTS.get(self.part[0], self.part[0])}"
        parts = {
            name.removeprefix("timing_s/"): seconds
            for name, seconds in self.metrics.items()
            if name.startswith("timing_s/") and name.count("/") == 1 and name != "timing_s/step"
        }
        longest = f", mostly {max(parts, key=lambda name: parts[name]).replace('_', ' ')}" if parts else ""
        return f"last: step {self.step}{longest}"


def progress_of(row: Row) -> Progress:
    """What a ``progress`` row says."""
    done, total = finite(row.get("done")) or 0.0, finite(row.get("total")) or 0.0
    return Progress(str(row.get("name", "")), done, total, str(row.get("unit") or ""))


def finite(value: Any) -> float | None:
    """``value`` as a float, or ``None`` where it is no finite number (the file writes NaN as ``null``)."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def numbers(metrics: Any) -> dict[str, float]:
    """The finite numbers of a row's ``metrics``."""
    if not isinstance(metrics, Mapping):
        return {}
    found = ((str(name), finite(value)) for name, value in metrics.items())
    return {name: value for name, value in found if value is not None}
