"""What becomes known only with the data and the reward functions: steps of a number of epochs, and their weights."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from trtl_rl.errors import UserError
from trtl_rl.rewards.reward import Reward
from trtl_rl.trainer_config import TrainerConfig

if TYPE_CHECKING:
    from trtl_rl.config import RunConfig
    from trtl_rl.tasks.rows import Rows


def with_steps(config: RunConfig, rows: Rows, args: RunConfig | None) -> RunConfig:
    """``epochs`` as steps, and TRL's ``warmup_ratio`` as warm-up steps.

    Raises:
        UserError: the data is a stream, so that nobody knows how long an epoch is.
    """
    if config.epochs is not None:
        try:
            count = len(rows) - config.task.held_out
        except TypeError:
            raise UserError("epochs needs data of a known length, and this is a stream: set steps.") from None
        steps = max(1, math.ceil(config.epochs * count / config.batch.prompts))
        config = config.model_copy(update={"steps": steps})
    if isinstance(args, TrainerConfig) and args.translated.warmup_ratio is not None:
        warmup = math.ceil(args.translated.warmup_ratio * config.steps)
        config = config.model_copy(update={"optimizer": config.optimizer.model_copy(update={"warmup_steps": warmup})})
    return config


def weighted(rewards: list[Reward], weights: list[float] | None) -> list[Reward]:
    """The rewards with TRL's ``reward_weights``.

    Raises:
        UserError: there is another number of weights.
    """
    if weights is None:
        return rewards
    if len(weights) != len(rewards):
        raise UserError(f"reward_weights has {len(weights)} values for {len(rewards)} reward functions.")
    return [dataclasses.replace(reward, weight=weight) for reward, weight in zip(rewards, weights, strict=True)]
