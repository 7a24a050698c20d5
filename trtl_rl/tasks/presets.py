"""Named tasks that fill in what the user left unset. A preset is data: task keys and rewards, nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trtl_rl.config import RunConfig
from trtl_rl.config_parts import RewardConfig
from trtl_rl.errors import UserError, nearest

# The instruction comes last and asks for short sentences, so that small models reach the mark before they are cut off.
GSM8K_TEMPLATE = """\
{prompt}

Think step by step in at most four short sentences. \
Then end with a last line that has '#### ' and the final number, for example '#### 42'."""


@dataclass(frozen=True)
class Preset:
    """Defaults of a task.

    Attributes:
        task: Values of ``TaskConfig`` by key.
        rewards: Names of built-in rewards.
        scorer: The evaluation target.
    """

    task: dict[str, Any] = field(default_factory=dict)
    rewards: tuple[str, ...] = ("exact_match",)
    scorer: str = "exact_match"


PRESETS = {
    "demo": Preset(),
    "gsm8k": Preset({"prompt_column": "question", "template": GSM8K_TEMPLATE}, ("math_answer",), "math_answer"),
}


def apply_preset(config: RunConfig) -> RunConfig:
    """Return ``config`` with the preset's values in every key that the user did not set.

    ``data: demo`` implies the preset ``demo``. Applying it twice changes nothing.

    Raises:
        UserError: there is no preset of that name.
    """
    name = config.task.preset or ("demo" if config.data == "demo" else None)
    if name is None:
        return config
    if name not in PRESETS:
        known = ", ".join(PRESETS)
        raise UserError(f"There is no preset '{name}' (task.preset).{nearest(name, PRESETS)} Known: {known}.")
    preset = PRESETS[name]
    unset = {key: value for key, value in preset.task.items() if key not in config.task.model_fields_set}
    task = config.task.model_copy(update={**unset, "preset": name})
    update: dict[str, Any] = {"task": task}
    if "rewards" not in config.model_fields_set:
        update["rewards"] = [RewardConfig(name=reward) for reward in preset.rewards]
    if "scorer" not in config.evaluation.model_fields_set:
        update["evaluation"] = config.evaluation.model_copy(update={"scorer": preset.scorer})
    return config.model_copy(update=update)
