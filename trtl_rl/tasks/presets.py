"""Named tasks that fill in what the user left unset. A preset is data: task keys and rewards, nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trtl_rl.config import RewardConfig, RunConfig
from trtl_rl.errors import UserError, nearest

# The worked example gives small models the form to imitate; its last line shows where the answer stands.
GSM8K_TEMPLATE = """\
Solve the problem. Think step by step in short sentences, then write the final number on a line of its own after '####'.

Problem: Tom has 3 boxes with 4 pens each. He gives away 5 pens. How many pens are left?
Answer: Tom has 3 * 4 = 12 pens. After giving away 5 pens he has 12 - 5 = 7 pens.
#### 7

Problem: {prompt}
Answer:"""


@dataclass(frozen=True)
class Preset:
    """Defaults of a task.

    Attributes:
        task: Values of ``TaskConfig`` by key.
        rewards: Names of built-in rewards.
    """

    task: dict[str, Any] = field(default_factory=dict)
    rewards: tuple[str, ...] = ("exact_match",)


PRESETS = {
    "demo": Preset(),
    "gsm8k": Preset({"prompt_column": "question", "template": GSM8K_TEMPLATE}, ("math_answer",)),
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
    return config.model_copy(update=update)
