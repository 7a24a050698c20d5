"""Named tasks that fill in what the user left unset. A preset is data: task keys and rewards, nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trtl_rl.config import RunConfig
from trtl_rl.config_data import RewardConfig
from trtl_rl.errors import UserError, nearest

# The instruction comes last and asks for short sentences, so that small models reach the mark before they are cut off.
GSM8K_TEMPLATE = """\
{prompt}

Think step by step in at most four short sentences. \
Then end with a last line that has '#### ' and the final number, for example '#### 42'."""


MATH_TEMPLATE = "{prompt}\n\nReason step by step, and put your final answer within \\boxed{}."

REASONING_GYM = "reasoning-gym/"
REASONING_GYM_TEMPLATE = """\
{prompt}

Think step by step. Then give the final answer, and nothing else, between <answer> and </answer>."""


@dataclass(frozen=True)
class Preset:
    """Defaults of a task.

    Attributes:
        task: Values of ``TaskConfig`` by key.
        rewards: Names of built-in rewards.
        scorer: The evaluation target.
        data: Where the user names no data; ``None``: the user has to.
    """

    task: dict[str, Any] = field(default_factory=dict)
    rewards: tuple[str, ...] = ("exact_match",)
    scorer: str = "exact_match"
    data: str | None = None


PRESETS = {
    "demo": Preset(),
    "gsm8k": Preset(
        {"prompt_column": "question", "template": GSM8K_TEMPLATE}, ("math_answer",), "math_answer", "openai/gsm8k:main"
    ),
    # The answer is the last \boxed{} of the column solution, in every edition of this data set.
    "math": Preset(
        {"prompt_column": "problem", "template": MATH_TEMPLATE, "columns": {"answer": "solution"}},
        ("math_answer",),
        "math_answer",
        "DigitalLearningGmbH/MATH-lighteval",
    ),
}


def find_preset(name: str) -> Preset:
    """The preset of that name; ``reasoning-gym/NAME`` is one for every task of reasoning-gym.

    Raises:
        UserError: there is none.
    """
    if name.startswith(REASONING_GYM):
        keys = {"prompt_column": "question", "template": REASONING_GYM_TEMPLATE}
        return Preset(keys, ("reasoning_gym",), "reasoning_gym", name)
    if name not in PRESETS:
        known = ", ".join([*PRESETS, f"{REASONING_GYM}NAME"])
        raise UserError(f"There is no preset '{name}' (task.preset).{nearest(name, PRESETS)} Known: {known}.")
    return PRESETS[name]


def apply_preset(config: RunConfig) -> RunConfig:
    """Return ``config`` with the preset's values in every key that the user did not set.

    ``data: demo`` and ``data: reasoning-gym/NAME`` imply their presets. Applying it twice changes nothing.

    Raises:
        UserError: there is no preset of that name.
    """
    name = config.task.preset
    if name is None and not config.task.mixture:
        implied = config.data == "demo" or config.data.startswith(REASONING_GYM)
        name = config.data if implied else None
    if name is None:
        return config
    preset = find_preset(name)
    unset = {key: value for key, value in preset.task.items() if key not in config.task.model_fields_set}
    task = config.task.model_copy(update={**unset, "preset": name})
    update: dict[str, Any] = {"task": task}
    if preset.data is not None and config.data == "demo" and "data" not in config.model_fields_set:
        update["data"] = preset.data
    if "rewards" not in config.model_fields_set:
        update["rewards"] = [RewardConfig(name=reward) for reward in preset.rewards]
    if "scorer" not in config.evaluation.model_fields_set:
        update["evaluation"] = config.evaluation.model_copy(update={"scorer": preset.scorer})
    return config.model_copy(update=update)
