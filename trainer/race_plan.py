"""The plan of a RACE: cells of equal FLOPs that differ in their update fraction, and the split that accounting predicts.

What moves rho at equal FLOPs in this engine (per answer token search costs about 2N, learning 6N, so one update of each
rollout gives about 0.75 whatever the group's size):

=========================  ================================================================================================
``batch.updates``          optimizer steps on each batch: u of them give about 6u / (2 + 6u)
``batch.train_group_size`` trains on k of the group's n completions: about 6k / (2n + 6k)
``lora.rank``              adapters alone are trained: no gradient of weights, so one update costs about 4N and gives 0.67
a reward model             adds feedback, and lowers both other shares
groups without signal      are searched and not learned: rho falls below the plan where many groups are all right or wrong
=========================  ================================================================================================

Any configuration key can be an axis beside (``model``, ``seed``, ``optimizer.lr`` …): a cell is a set of overrides.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import yaml

from trtl_rl.config import RunConfig, load_config
from trtl_rl.errors import UserError
from trtl_rl.flops import formulas
from trtl_rl.flops.formulas import ModelShape
from trtl_rl.losses.loss import make_loss
from trtl_rl.rewards.reward import Reward, unbound

STEPS = 20  # of the costliest cell where no budget is given [D]: with fewer a run shows little but its start
HEADROOM = 4  # a cell may take so many times its planned steps: its budget ends it


@dataclass(frozen=True)
class Split:
    """FLOPs by role.

    Attributes:
        feedback: ``None`` where a reward spends FLOPs that nobody knows before it has run.
    """

    search: float
    learning: float
    feedback: float | None = 0.0

    @property
    def total(self) -> float:
        return self.search + self.learning + (self.feedback or 0.0)

    @property
    def update_fraction(self) -> float:
        return self.learning / self.total


@dataclass(frozen=True)
class Cell:
    """One run of the grid.

    Attributes:
        name: Of its directory under ``cells/``.
        reward: Index of its reward system.
        overrides: Dotted keys and values on top of the base configuration.
        steps: Planned; the budget ends the cell.
        split: What accounting predicts for one step, before anything has run.
    """

    name: str
    reward: int
    overrides: dict[str, Any]
    steps: int
    split: Split

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Cell:
        return cls(**{**data, "split": Split(**data["split"])})


@dataclass(frozen=True)
class Lengths:
    """Tokens that the plan assumes: of the mean prompt, of an answer."""

    prompt: int
    answer: int


def cell_config(base: Mapping[str, Any], overrides: Mapping[str, Any]) -> RunConfig:
    """The configuration of a cell."""
    settings = [f"{key}={yaml.safe_dump(value, default_flow_style=True).strip()}" for key, value in overrides.items()]
    return load_config(None, [text.removesuffix("\n...") for text in settings], dict(base))


def predict(config: RunConfig, shape: ModelShape, lengths: Lengths, rewards: Sequence[Reward]) -> Split:
    """FLOPs of one step if every group has a signal and all answers have the assumed length."""
    batch, p, a = config.batch, lengths.prompt, lengths.answer
    trained = batch.train_group_size or batch.group_size
    # The head's logits are kept unless a micro-batch has very many; the plan leaves that out.
    again = formulas.recompute(shape, p, a, checkpointing=config.optimizer.gradient_checkpointing)
    once = formulas.learning(shape, p, a) + again
    loss = make_loss(config.loss, config.sampling.max_new_tokens)
    asked = (loss.needs_old_logprobs + loss.needs_reference_logprobs) * formulas.forward(shape, p, a)
    return Split(
        search=batch.prompts * formulas.rollout(shape, p, [a] * batch.group_size),
        learning=batch.prompts * trained * (batch.updates * once + asked),
        feedback=_feedback(rewards, batch.prompts * batch.group_size, lengths),
    )


def _feedback(rewards: Sequence[Reward], completions: int, lengths: Lengths) -> float | None:
    """What reward functions say that they will spend (``expected_flops``); None where one spends and does not say."""
    total = 0.0
    for reward in rewards:
        function = unbound(reward.function)
        expected = getattr(function, "expected_flops", None)
        flops = None if expected is None else expected(lengths.prompt, lengths.answer)
        if flops is not None:
            total += completions * int(flops)
        elif hasattr(function, "take_flops"):
            return None
    return total


def default_axes(config: RunConfig) -> list[dict[str, Any]]:
    """From few updates per rollout to many: training on 2, 4 … of the group, on all of it, then two, four and eight times."""
    size = config.batch.group_size
    smaller = [2**i for i in range(1, size.bit_length()) if 2**i < size]
    below = [{"batch.train_group_size": k, "batch.updates": 1} for k in smaller]
    return [*below, *({"batch.train_group_size": None, "batch.updates": u} for u in (1, 2, 4, 8))]


def parse_axes(texts: Sequence[str]) -> list[dict[str, Any]]:
    """``key=v1,v2`` of each axis → all combinations as overrides.

    Raises:
        UserError: an axis has no values, or a key comes twice.
    """
    axes: dict[str, list[Any]] = {}
    for text in texts:
        key, equals, values = text.partition("=")
        try:
            parsed = yaml.safe_load(f"[{values}]")
        except yaml.YAMLError:
            parsed = None
        if not key or not equals or not parsed:
            raise UserError(f"--axis '{text}' is no axis: write key=value,value, for example batch.updates=1,2,4.")
        if key in axes:
            raise UserError(f"--axis {key} is given twice.")
        axes[key] = parsed
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def spread(candidates: Sequence[tuple[dict[str, Any], Split]], count: int) -> list[tuple[dict[str, Any], Split]]:
    """``count`` of the candidates, spread evenly over the range of rho, in its order; all of them if there are fewer."""
    left = sorted(candidates, key=lambda item: item[1].update_fraction)
    if len(left) <= count:
        return left
    low, high = left[0][1].update_fraction, left[-1][1].update_fraction
    chosen = []
    for i in range(count):
        target = low + (high - low) * i / (count - 1)
        nearest = min(left, key=lambda item: abs(item[1].update_fraction - target))
        left.remove(nearest)
        chosen.append(nearest)
    return sorted(chosen, key=lambda item: item[1].update_fraction)


def cell_name(reward: str, overrides: Mapping[str, Any]) -> str:
    """A readable directory name: ``exact_match-train4-updates1``."""
    short = {
        "lora.rank": "lora",
        "batch.train_group_size": "train",
        "batch.group_size": "group",
        "batch.updates": "updates",
    }
    parts = [reward]
    for key, value in overrides.items():
        if value is not None:
            text = str(value).rstrip("/").rpartition("/")[2]
            parts.append(f"{short.get(key, key.rpartition('.')[2])}{'-' if isinstance(value, str) else ''}{text}")
    name = "-".join(parts)
    return "".join(char if char.isalnum() or char in "-_." else "_" for char in name)


def planned_steps(budget: float, split: Split) -> int:
    """How many steps of ``split`` a budget pays for, at least one."""
    return max(1, math.ceil(budget / split.total))


def budget_for(splits: Sequence[Split]) -> float:
    """FLOPs of ``STEPS`` steps of the costliest cell, rounded up to two digits; what a reward model spends unsaid is not in it.

    >>> budget_for([Split(1e9, 3.2e9), Split(1e9, 7.63e9)])
    180000000000.0
    """
    most = STEPS * max(split.total for split in splits)
    digit = 10.0 ** (math.floor(math.log10(most)) - 1)
    return math.ceil(most / digit) * digit
