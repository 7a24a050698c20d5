"""All steps of a run, from ``metrics.jsonl``: what a report draws."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trtl_rl.cli.view import ROLES, View, finite, numbers
from trtl_rl.errors import UserError
from trtl_rl.metrics import MetricsReader, Row

_CHUNK_BYTES = 4 * 2**20
_SAMPLES = 4  # kept of the first steps, and of the last


@dataclass(frozen=True)
class Series:
    """Values of a metric at the steps that have it."""

    steps: list[int]
    values: list[float]

    def __bool__(self) -> bool:
        return bool(self.steps)

    def binned(self, limit: int = 600) -> tuple[Series, int]:
        """At most ``limit`` means over equally many values each, at their middle steps, and how many that is."""
        size = -(-len(self.steps) // limit) if self.steps else 1
        parts = range(0, len(self.steps), size)
        steps = [self.steps[min(at + size // 2, len(self.steps) - 1)] for at in parts]
        return Series(steps, [mean(self.values[at : at + size]) for at in parts]), size


@dataclass
class History:
    """One run.

    Attributes:
        name: For legends: the directory's name.
        view: Its state at the end of the file.
        steps: Metrics by step. A resumed run does some again: what came later counts.
        resumes: Steps after which the run was resumed.
        evaluations: Metrics by step.
        first_samples, last_samples: Rows.
        messages: Rows of level warning and error.
    """

    name: str
    directory: Path
    view: View
    steps: dict[int, dict[str, float]] = field(default_factory=dict)
    resumes: list[int] = field(default_factory=list)
    evaluations: dict[int, dict[str, float]] = field(default_factory=dict)
    first_samples: list[Row] = field(default_factory=list)
    last_samples: list[Row] = field(default_factory=list)
    messages: list[Row] = field(default_factory=list)

    @classmethod
    def read(cls, directory: Path) -> History:
        """Read a run's directory.

        Raises:
            UserError: it is none, or nothing was written yet.
        """
        file = directory / "metrics.jsonl"
        if not file.is_file():
            raise UserError(f"{directory} is no run directory: it has no metrics.jsonl. Runs lie in runs/ by default.")
        history = cls(directory.resolve().name, directory, View(str(directory)))
        reader = MetricsReader(file)
        while rows := reader.poll(_CHUNK_BYTES):
            for row in rows:
                history._apply(row)
        history.view.torn = reader.torn
        if not history.view.rows:
            raise UserError(f"{file} holds no rows yet; wait until the run has started.")
        return history

    def _apply(self, row: Row) -> None:
        before = self.view.step
        self.view.apply(row)
        match row.get("kind"):
            case "start":
                if (step := finite(row.get("resumed_from"))) is not None:
                    self.resumes.append(int(step))
                    self._forget(int(step) + 1)
            case "step":
                if self.view.step <= before:
                    self._forget(self.view.step)
                self.steps[self.view.step] = self.view.metrics
            case "evaluation":
                self.evaluations[int(finite(row.get("step")) or 0)] = numbers(row.get("metrics"))
            case "sample":
                if len(self.first_samples) < _SAMPLES:
                    self.first_samples.append(row)
                else:
                    self.last_samples = [*self.last_samples[-_SAMPLES + 1 :], row]
            case "message" if row.get("level") in ("warning", "error"):
                self.messages.append(row)

    def _forget(self, step: int) -> None:
        """Forget ``step`` and what follows: it was lost, and comes again."""
        self.steps = {n: metrics for n, metrics in self.steps.items() if n < step}
        self.evaluations = {n: metrics for n, metrics in self.evaluations.items() if n < step}
        self.first_samples = [row for row in self.first_samples if (finite(row.get("step")) or 0) < step]
        self.last_samples = [row for row in self.last_samples if (finite(row.get("step")) or 0) < step]

    def series(self, name: str) -> Series:
        """The metric where it was measured."""
        found = [(step, metrics[name]) for step, metrics in self.steps.items() if name in metrics]
        return Series([step for step, _ in found], [value for _, value in found])

    def names(self) -> list[str]:
        """Every metric that any step has, in order of appearance."""
        return list(dict.fromkeys(name for metrics in self.steps.values() for name in metrics))

    def total(self, name: str) -> float:
        """Sum over all steps."""
        return sum(metrics.get(name, 0.0) for metrics in self.steps.values())

    def flops(self) -> dict[str, float]:
        """By role, of the steps that count."""
        last = self.steps[max(self.steps)] if self.steps else {}
        return {role: last.get(f"flops/cumulative/{role}", self.total(f"flops/{role}")) for role in ROLES}

    def wasted(self) -> dict[str, float]:
        """FLOPs by fate, where any were."""
        prefix = "flops/wasted/"
        totals = {name.removeprefix(prefix): self.total(name) for name in self.names() if name.startswith(prefix)}
        return {fate: spent for fate, spent in totals.items() if spent > 0}

    def spent(self) -> Series:
        """FLOPs of all roles up to and with each step."""
        total, steps, values = 0.0, [], []
        for step, metrics in self.steps.items():
            total += metrics.get("flops/total", sum(metrics.get(f"flops/{role}", 0.0) for role in ROLES))
            total = metrics.get("flops/cumulative/total", total)
            steps.append(step)
            values.append(total)
        return Series(steps, values) if total > 0 else Series([], [])

    @property
    def status(self) -> str:
        """``done``, ``interrupted``, ``failed``, or ``unfinished``."""
        return "unfinished" if self.view.end is None else str(self.view.end.get("status", "ended"))


SAME = 0.05


@dataclass(frozen=True)
class AtEqualFlops:
    """What a run had when it had spent ``flops``.

    Attributes:
        step: Its last step within them.
        reward: The mean over the last ``window`` of those steps.
        seconds: Sum of their times.
        evaluation: The last one until then: its step and metrics.
    """

    run: History
    flops: float
    step: int
    reward: float | None
    window: int
    tokens: float | None
    seconds: float
    evaluation: tuple[int, dict[str, float]] | None


def compare(runs: Sequence[History]) -> list[AtEqualFlops]:
    """All runs where the one that spent the least has ended; none when a run has counted no FLOPs.

    One that spent up to ``SAME`` more counts whole: runs of one budget end at the first step over it.
    """
    spent = [run.spent() for run in runs]
    if len(runs) < 2 or not all(spent):
        return []
    flops = min(series.values[-1] for series in spent)
    return [_at(run, series, flops) for run, series in zip(runs, spent, strict=True)]


def _at(run: History, spent: Series, flops: float) -> AtEqualFlops:
    within = len(spent.values) if spent.values[-1] <= flops * (1 + SAME) else bisect_right(spent.values, flops)
    steps = spent.steps[:within]
    window = max(1, len(steps) // 20)
    rewards = [run.steps[step]["reward"] for step in steps[-window:] if "reward" in run.steps[step]]
    known = [step for step in run.evaluations if steps and step <= steps[-1]]
    return AtEqualFlops(
        run,
        flops,
        steps[-1] if steps else 0,
        mean(rewards) if rewards else None,
        window,
        run.steps[steps[-1]].get("num_tokens") if steps else None,
        sum(run.steps[step].get("timing_s/step", 0.0) for step in steps),
        (max(known), run.evaluations[max(known)]) if known else None,
    )


def mean(values: Sequence[float]) -> float:
    """Of at least one value."""
    return sum(values) / len(values)


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Centred moving mean; shorter at both ends."""
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    half = window // 2
    out = []
    for at in range(len(values)):
        first, last = max(at - half, 0), min(at + half + 1, len(values))
        out.append((sums[last] - sums[first]) / (last - first))
    return out
