"""How long a cell of a RACE will take, from what an earlier run measured. Without one it is unknown: nothing is guessed.

FLOPs do not tell time: search, learning and feedback run at very different FLOP/s, and side by side where rollouts are
asynchronous. So a cell's FLOPs by role are divided by what each role did a second in the earlier run, and joined as that run's
steps are: the slowest role where they overlap, their sum where they do not, times what the run's steps took beyond that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtl_rl.config import RunConfig, load_config
from trtl_rl.errors import UserError
from trtl_rl.flops.ledger import ROLES
from trtl_rl.metrics import read_rows
from trtl_rl.trainer.checks import read_config
from trtl_rl.trainer.race_plan import Split

FEWEST = 3  # steps after the first, which holds what happens once

# What a speed depends on: a cell that differs in one of these has an unknown time.
_ALIKE = (
    "model",
    "device",
    "compile",
    "recipe",
    "threads",
    "engine",
    "ray",
    "evaluation.prompts",
    "evaluation.samples",
)


@dataclass(frozen=True)
class Speed:
    """What a run measured.

    Attributes:
        source: The run, for messages.
        rates: FLOP/s of a role while it is busy; a role that did nothing is left out.
        stretch: Wall seconds of its steps over those that ``rates`` explain.
        fixed: Seconds outside steps: start, evaluations, the last checkpoint.
    """

    source: str
    config: RunConfig
    rates: dict[str, float]
    stretch: float
    fixed: float

    @classmethod
    def of(cls, run: Path) -> Speed:
        """Read ``run``'s files; its newest session counts.

        Raises:
            UserError: it is no run, or has too few steps.
        """
        config = load_config(None, [], read_config(run))
        rows: list[dict[str, Any]] = []
        begun = 0.0
        for row in read_rows(run / "metrics.jsonl"):
            if row["kind"] == "start":
                rows, begun = [], row["time"] - row["start_seconds"]
            rows.append(row)
        every = [row["metrics"] for row in rows if row["kind"] == "step"]
        steps = [step for step in every[1:] if "timing_s/step" in step]
        if len(steps) < FEWEST:
            raise UserError(
                f"{run} tells no speed: {FEWEST + 1} steps in one go are needed, and its newest session has {len(every)}. "
                "A short one will do: trtl-rl run CONFIG steps=5"
            )
        flops = {role: _sum(steps, f"flops/{role}") for role in ROLES}
        busy = {role: _sum(steps, f"timing_s/role/{role}") for role in ROLES}
        rates: dict[str, float] = {role: flops[role] / busy[role] for role in ROLES if flops[role] and busy[role]}
        wall = rows[-1]["time"] - begun
        return cls(
            str(run),
            config,
            rates,
            _sum(steps, "timing_s/step") / _joined(config, list(busy.values())),
            max(0.0, wall - sum(step.get("timing_s/step", 0.0) for step in every)),
        )

    def differs(self, config: RunConfig) -> list[str]:
        """The keys in which a configuration differs so that this speed does not tell its time."""
        keys = [key for key in _ALIKE if _get(self.config, key) != _get(config, key)]
        keys += ["lora.rank"] * (
            bool(self.config.lora.rank) != bool(config.lora.rank)
        )  # the rank itself matters little
        return keys + ["buffer.max_staleness"] * (_overlaps(self.config) != _overlaps(config))

    def seconds(self, config: RunConfig, split: Split, steps: int) -> float | None:
        """Wall seconds of ``steps`` steps of ``split`` FLOPs each, start and evaluations included; ``None``: unknown, since the
        configuration differs, or a role works of which this run shows nothing.
        """
        by_role = {"search": split.search, "learning": split.learning, "feedback": split.feedback}
        if self.differs(config) or any(
            flops is None or (flops and role not in self.rates) for role, flops in by_role.items()
        ):
            return None
        times = [(flops or 0.0) / self.rates.get(role, 1.0) for role, flops in by_role.items()]
        return self.fixed + steps * self.stretch * _joined(config, times)


def _joined(config: RunConfig, times: Sequence[float]) -> float:
    return max(times) if _overlaps(config) else sum(times)


def _overlaps(config: RunConfig) -> bool:
    return config.buffer.max_staleness > 0


def _sum(steps: Sequence[dict[str, float]], name: str) -> float:
    return sum(step.get(name, 0.0) for step in steps)


def _get(config: RunConfig, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value
