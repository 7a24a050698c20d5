"""A script for TRL ports by changing two names: every setting is mapped, already so, or refused with a reason."""

from __future__ import annotations

from typing import Any

import pytest

from trtl_rl import TrainerConfig
from trtl_rl.config import RunConfig
from trtl_rl.errors import UserError
from trtl_rl.trl_names import ALREADY_SO, NAMES, REFUSED, RENAMED, SAID, translate


def value_at(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = getattr(config, part)
    return config


def test_settings_of_a_grpo_script_arrive_where_they_belong() -> None:
    config = TrainerConfig(
        output_dir="out",
        learning_rate=2e-5,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=4,
        num_generations=4,
        max_completion_length=64,
        temperature=0.7,
        max_steps=30,
        warmup_ratio=0.1,
        lr_scheduler_type="cosine",
        loss_type="grpo",
        epsilon=0.1,
        beta=0.01,
        adam_beta2=0.99,
        reward_weights=[1, 0.5],
        scale_rewards=False,
        logging_steps=1,
        report_to="none",
        seed=3,
    )
    assert (config.run_dir, config.optimizer.lr, config.batch.prompts, config.batch.group_size) == ("out", 2e-5, 8, 4)
    assert (config.sampling.max_new_tokens, config.sampling.temperature, config.steps) == (64, 0.7, 30)
    assert (config.optimizer.schedule, config.loss.name, config.loss.clip) == ("cosine", "grpo", 0.1)
    assert (config.loss.kl_coefficient, config.optimizer.betas, config.trackers) == (0.01, (0.9, 0.99), [])
    assert (config.translated.reward_weights, config.translated.warmup_ratio, config.seed) == ([1.0, 0.5], 0.1, 3)
    assert any("logging_steps has no effect" in line for line in config.translated.lines)


def test_what_a_script_leaves_out_has_this_projects_default() -> None:
    config = TrainerConfig(learning_rate=1e-5)
    expected = RunConfig()
    assert (config.loss, config.batch, config.steps) == (expected.loss, expected.batch, expected.steps)


def test_own_names_dotted_keys_and_trls_go_together() -> None:
    config = TrainerConfig(**{"optimizer.weight_decay": 0.1, "learning_rate": 1e-5, "batch": {"prompts": 4}})
    assert (config.optimizer.weight_decay, config.optimizer.lr, config.batch.prompts) == (0.1, 1e-5, 4)


@pytest.mark.parametrize("name", sorted(RENAMED))
def test_every_renamed_setting_leads_to_a_key(name: str) -> None:
    assert value_at(RunConfig(), RENAMED[name]) is not NotImplemented


@pytest.mark.parametrize("name", sorted(ALREADY_SO))
def test_what_is_so_anyway_may_be_said_and_anything_else_is_refused(name: str) -> None:
    values, reason = ALREADY_SO[name]
    assert translate({name: values[0]}).tree == {}
    with pytest.raises(UserError, match="is not taken"):
        translate({name: "something else"})
    assert reason


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"use_vllm": True, "top_p": 0.9}, r"use_vllm=True is not taken: .*top_p=0.9 is not taken"),
        ({"vllm_gpu_memory_utilization": 0.3}, "rollouts come from the project's own engine"),
        ({"loss_type": "dapo"}, "of TRL's objectives there are grpo, dr_grpo"),
        ({"epsilon": 0.2}, "the objective is ASymPO, which has none"),
        (
            {"per_device_train_batch_size": 6, "num_generations": 4},
            "6 completions, which is no multiple of num_generations=4",
        ),
        ({"learning_rate": 1e-5, "optimizer.lr": 1e-5}, "say the same thing"),
        ({"num_train_epochs": 2, "steps": 5}, "steps=5 and epochs=2 say the same thing"),
        ({"lerning_rate": 1e-5}, "unknown key 'lerning_rate'"),
        ({"lr_scheduler_type": "polynomial"}, "optimizer.schedule knows constant, linear, cosine, wsd"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        TrainerConfig(**settings)


def test_max_steps_goes_before_epochs_as_in_trl() -> None:
    assert TrainerConfig(max_steps=7, num_train_epochs=3).steps == 7
    assert TrainerConfig(max_steps=-1, num_train_epochs=3).epochs == 3


def test_every_setting_of_transformers_trainer_has_its_place() -> None:
    import dataclasses

    from transformers import TrainingArguments

    names = {field.name for field in dataclasses.fields(TrainingArguments)} - {"seed"}
    assert names - NAMES == set()
    assert not {name for table in (SAID, REFUSED) for name in table if name in RENAMED or name in ALREADY_SO}


def test_no_name_of_trl_is_a_key_of_this_project() -> None:
    same = NAMES & set(RunConfig.model_fields)
    assert not same
