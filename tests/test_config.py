from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from trtl_rl.config import RunConfig, load_config, validate_config
from trtl_rl.config_parts import Part
from trtl_rl.demo.defaults import demo_settings
from trtl_rl.errors import UserError


def refused(*overrides: str) -> str:
    """The message for overrides that are wrong."""
    with pytest.raises(UserError) as caught:
        load_config(None, list(overrides))
    return str(caught.value)


@pytest.mark.parametrize(
    ("override", "key", "meant"),
    [
        ("stepps=3", "stepps", "steps"),
        ("batch.promts=3", "batch.promts", "prompts"),
        ("optimizer.learning_rate=1", "optimizer.learning_rate", ""),
        ("optimizer.warmup=1", "optimizer.warmup", "warmup_steps"),
        ("sampling.max_tokens=4", "sampling.max_tokens", "max_new_tokens"),
        ("rewards=[{name: exact_match, wieght: 2}]", "rewards.0.wieght", "weight"),
        ("rewards=[exact_match, {nam: x, name: y}]", "rewards.1.nam", "name"),
        ("zzz.qqq=1", "zzz", ""),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest(override: str, key: str, meant: str) -> None:
    text = refused(override)
    assert f"unknown key '{key}'" in text
    assert (f"Did you mean '{meant}'?" in text) if meant else ("Did you mean" not in text)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("steps=0", "steps: .*greater than or equal to 1.*got 0"),
        ("steps=3.5", "steps: .*integer.*got 3.5"),
        ("steps=many", "steps: .*integer.*'many'"),
        ("steps=", "steps: .*None"),
        ("seed=-1", "seed: .*0"),
        ("batch.group_size=1", "batch.group_size: .*2"),
        (
            "sampling.temperature=0",
            "sampling.temperature=0 makes the answers of a group all the same.*evaluation.prompts",
        ),
        ("optimizer.lr=-1e-5", "optimizer.lr: .*greater than or equal to 0.*-1e-05"),
        ("optimizer.lr=.inf", "optimizer.lr: .*finite"),
        ("optimizer.max_grad_norm=.nan", "optimizer.max_grad_norm"),
        ("optimizer.betas=[0.9, 1.0]", "optimizer.betas.1: .*less than 1"),
        ("optimizer.betas=[0.9]", "optimizer.betas.1: Field required"),
        ("optimizer.schedule=cosin", "optimizer.schedule: .*'cosine'.*got 'cosin'"),
        ("buffer.max_staleness=-1", "buffer.max_staleness"),
        ("buffer.in_flight=stop", "buffer.in_flight: .*'finish' or 'continue'"),
        ("compile=maybe", "compile: .*boolean"),
        ("budget.tokens=0", "budget.tokens"),
        ("loss.name=ppo", "loss.name: .*'asympo'"),
        ("loss.alpha=2", "loss.alpha"),
        ("loss=spo", r"loss takes keys of its own \(name, floor, .*got 'spo'"),
        ("rewards=3", r"rewards.0 takes keys of its own \(name, weight, arguments, .*\)"),
        ("model.path=x", "model: .*string"),
    ],
)
def test_a_wrong_value_is_named_with_its_range_or_type(override: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        load_config(None, [override])


def test_all_faults_are_in_one_message() -> None:
    text = refused("steps=0", "batch.promts=3", "optimizer.lr=fast", "loss.name=ppo")
    for part in ("steps:", "'batch.promts'", "optimizer.lr:", "loss.name:"):
        assert text.count(part) == 1
    assert "\n" not in text


@pytest.mark.parametrize(
    ("key", "owner", "other"),
    [
        ("floor", "asympo", "spo"),
        ("p_low", "asympo", "naive"),
        ("alpha", "spo", "asympo"),
        ("clip", "grpo or dr_grpo", "spo"),
    ],
)
def test_a_key_of_another_objective_is_refused(key: str, owner: str, other: str) -> None:
    assert f"loss.{key} belongs to loss.name={owner}, but loss.name is {other}" in refused(
        f"loss.{key}=0.1", f"loss.name={other}"
    )
    for name in owner.split(" or "):
        assert getattr(load_config(None, [f"loss.name={name}", f"loss.{key}=0.1"]).loss, key) == 0.1


def test_bounds_that_cross_are_refused() -> None:
    assert "loss.p_low (0.5) must be less than loss.p_high (0.1)" in refused("loss.p_low=0.5", "loss.p_high=0.1")


def test_any_mismatch_stops_a_run_unless_it_is_told_otherwise() -> None:
    assert load_config(None, []).parity.stop == 0
    assert load_config(None, ["parity.stop=null", "parity.warn=1e-3"]).parity.warn == 1e-3
    assert "parity.warn=0.001 cannot act: the run stops above parity.stop=0" in refused("parity.warn=1e-3")


@pytest.mark.parametrize("override", ["compile=true", "engine.path=somewhere"])
def test_compiled_operators_are_refused_on_cuda(override: str) -> None:
    assert f"{override} does not go with device=cuda: compiled operators are CPU code" in refused(
        "device=cuda", override
    )
    assert load_config(None, ["device=cuda", "compile=false"]).device == "cuda"


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("optimizer.lr=1e-5", ("optimizer", "lr"), 1e-5),  # YAML 1.1 reads this as text
        ("optimizer.lr=2E-6", ("optimizer", "lr"), 2e-6),
        ("optimizer.lr=3.e-4", ("optimizer", "lr"), 3e-4),
        ("optimizer.lr=1", ("optimizer", "lr"), 1.0),
        ("budget.flops=1e12", ("budget", "flops"), 1e12),
        ("steps=1e3", ("steps",), 1000),
        ("optimizer.betas=[0.8, 0.99]", ("optimizer", "betas"), (0.8, 0.99)),
        ("compile=false", ("compile",), False),
        ("task.shuffle=no", ("task", "shuffle"), False),
        ("parity.stop=null", ("parity", "stop"), None),
        ("parity.stop=", ("parity", "stop"), None),
        ("run_dir=a=b", ("run_dir",), "a=b"),
        ("run_dir=nan", ("run_dir",), "nan"),
        ("run_dir=infinity", ("run_dir",), "infinity"),
        ("model=org/name", ("model",), "org/name"),
        ("task.template={prompt} = ", ("task", "template"), "{prompt} = "),
    ],
)
def test_an_override_reads_as_what_it_means(override: str, path: tuple[str, ...], value: Any) -> None:
    found: Any = load_config(None, [override])
    for name in path:
        found = getattr(found, name)
    assert found == value and type(found) is type(value)


def test_rewards_may_be_written_short() -> None:
    for text in ("exact_match", "[exact_match]", "[{name: exact_match}]"):
        assert [item.name for item in load_config(None, [f"rewards={text}"]).rewards] == ["exact_match"]
    both = load_config(None, ["rewards=[exact_match, {name: format_match, weight: 0.5, arguments: {pattern: x}}]"])
    assert [(item.name, item.weight, item.arguments) for item in both.rewards] == [
        ("exact_match", 1.0, {}),
        ("format_match", 0.5, {"pattern": "x"}),
    ]


@pytest.mark.parametrize("text", ["steps", "=3", "", "steps 3"])
def test_what_is_no_override_is_told_how_to_write_one(text: str) -> None:
    assert "write key=value, for example" in refused(text)


def test_a_file_is_read_then_overridden(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("steps: 5\nbatch:\n  prompts: 3\n  group_size: 4\noptimizer: {lr: 1e-5}\n")
    config = load_config(file, ["batch.prompts=7", "batch.prompts=8"], base={"seed": 3, "steps": 1})
    assert (config.steps, config.batch.prompts, config.batch.group_size, config.seed) == (5, 8, 4, 3)
    assert config.optimizer.lr == 1e-5


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "holds no keys"),
        ("- steps: 3", "holds no keys"),
        ("steps", "holds no keys"),
        ("steps: [3", "(?s)not valid YAML.*line 1"),
        ("batch: {promts: 3}", r"a\.yaml: unknown key 'batch.promts'"),
        ("steps: 3\n3: x", r"a\.yaml: "),
    ],
)
def test_a_file_that_is_no_configuration_is_named(tmp_path: Path, content: str, said: str) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(content)
    with pytest.raises(UserError, match=said):
        load_config(file)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no configuration file .*missing\.yaml"):
        load_config(tmp_path / "missing.yaml")


@given(st.sampled_from(sorted(RunConfig.model_fields)), st.integers(1, 5))
def test_a_resolved_configuration_reads_back_as_itself(key: str, steps: int) -> None:
    config = validate_config({**demo_settings(), "steps": steps})
    again = validate_config(yaml.safe_load(yaml.safe_dump(config.model_dump(mode="json"))))
    assert getattr(again, key) == getattr(config, key)


def test_every_part_refuses_unknown_keys_and_has_a_docstring() -> None:
    parts = [part for part in Part.__subclasses__() if part.__module__.startswith("trtl_rl.config")]
    assert len(parts) > 10
    for part in parts:
        assert part.__doc__
        assert part.model_config["extra"] == "forbid"


def test_a_value_that_is_assigned_later_is_checked_too() -> None:
    config = RunConfig()
    with pytest.raises(ValueError, match="greater than"):
        config.steps = 0
    config.optimizer.lr = 1e-4
    with pytest.raises(ValueError, match="finite"):
        config.optimizer.lr = float("inf")


def test_a_learning_rate_of_zero_is_allowed_and_a_negative_one_is_not() -> None:
    assert load_config(None, ["optimizer.lr=0"]).optimizer.lr == 0
    assert "greater than or equal to 0" in refused("optimizer.lr=-1e-6")
