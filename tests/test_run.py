from __future__ import annotations

import json
import math
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from demo import small
from run_files import Trained, checkpoints, digits, metrics_of, rows_of, same, weights
from safetensors.torch import load_file

import trtl_rl.trainer.loop as loop_module
import trtl_rl.trainer.rollouts as rollouts_module
from trtl_rl import Trainer
from trtl_rl.config import RunConfig
from trtl_rl.demo.task import demo_rows
from trtl_rl.errors import RewardError, UserError
from trtl_rl.model.source import find_model
from trtl_rl.trainer import checkpoint
from trtl_rl.trainer.trainer import TrainResult

ROOT = Path(__file__).resolve().parent.parent
STEPS = 6


def stop_after(trainer: Trainer, step: int) -> threading.Thread:
    """Calls ``stop`` from another thread when ``step`` is written."""

    def watch() -> None:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            if len(rows_of(trainer.run_dir, "step")) >= step:
                return trainer.stop()
            time.sleep(0.01)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def untrained(run_dir: Path) -> list[int]:
    """Indices of the groups that were started and not trained on, by the newest checkpoint; none is missing."""
    saved = checkpoint.read_state(run_dir / "checkpoints" / "latest")["rollouts"]
    left = sorted([*saved["again"], *(group["index"] for group in saved["ready"])])
    assert all(index < saved["next_index"] for index in left)
    return left


@pytest.fixture(scope="module")
def synchronous(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TrainResult]:
    """One whole synchronous run."""
    run_dir = tmp_path_factory.mktemp("synchronous") / "run"
    return run_dir, Trainer(args=small(run_dir, steps=STEPS)).train()


# --- what a run leaves ---


def test_a_run_leaves_its_files_and_says_how_it_ended(synchronous: tuple[Path, TrainResult]) -> None:
    run_dir, result = synchronous
    assert (result.status, result.reason, result.step) == ("done", "steps", STEPS)
    assert {path.name for path in run_dir.iterdir()} == {
        "config.yaml", "metrics.jsonl", "ledger.json", "checkpoints", "rollouts", "logs",
    }  # fmt: skip
    assert checkpoints(run_dir) == [f"step-{STEPS:08d}"]
    resolved = yaml.safe_load((run_dir / "config.yaml").read_text())
    assert RunConfig.model_validate(resolved).steps == STEPS and resolved["run_dir"] == str(run_dir)
    (start,), (end,) = rows_of(run_dir, "start"), rows_of(run_dir, "end")
    assert start["model"] == "demo" and start["coverage"]["quantised"] == 14 and "eager" in start["kernels"]
    assert end["status"] == "done" and str(run_dir) in end["text"]
    assert len(rows_of(run_dir, "sample")) == STEPS
    assert not rows_of(run_dir, "evaluation")


def test_every_step_has_its_metrics_and_trainer_and_engine_agree(synchronous: tuple[Path, TrainResult]) -> None:
    steps = rows_of(synchronous[0], "step")
    assert [row["step"] for row in steps] == list(range(1, STEPS + 1))
    expected = {
        "reward", "reward_std", "rewards/exact_match/mean", "frac_reward_zero_std", "completions/mean_length",
        "completions/clipped_ratio", "learning_rate", "num_tokens", "off_policy/mean", "off_policy/max", "refit/bytes",
        "refit/changed_frac", "mismatch/differing_tokens", "mismatch/max_abs", "flops/search", "flops/learning",
        "flops/feedback", "flops/total", "flops/update_fraction", "timing_s/step", "timing_s/learn", "timing_s/refit",
        "timing_s/refit/quantise", "timing_s/refit/move", "timing_s/refit/decode", "timing_s/refit/finish", "timing_s/refit/pause",
        "perf/tokens_per_second", "loss", "grad_norm", "entropy",
    }  # fmt: skip
    learned = [row["metrics"] for row in steps if row["metrics"]["frac_reward_zero_std"] < 1]
    assert learned, "no step had a group with different rewards"
    assert all(expected <= metrics.keys() for metrics in learned)
    for row in steps:
        metrics = row["metrics"]
        assert all(isinstance(v, int | float) and math.isfinite(v) for v in metrics.values()), metrics
        assert metrics["mismatch/differing_tokens"] == metrics["mismatch/max_abs"] == 0
        assert metrics["mismatch/tokens"] > 0
        assert metrics["off_policy/max"] == 0
        assert metrics["flops/search"] + metrics["flops/learning"] + metrics["flops/feedback"] == metrics["flops/total"]
    assert steps[-1]["metrics"]["num_tokens"] > STEPS * 8


def test_the_ledger_adds_up_over_steps_and_roles(synchronous: tuple[Path, TrainResult]) -> None:
    run_dir, _ = synchronous
    ledger = json.loads((run_dir / "ledger.json").read_text())
    flops = ledger["flops"]
    assert flops["search"] > 0 and flops["learning"] > 0
    assert flops["search"] + flops["learning"] + flops["feedback"] == flops["total"]
    assert ledger["update_fraction"] == flops["learning"] / flops["total"]
    assert sum(row["metrics"]["flops/learning"] for row in rows_of(run_dir, "step")) == flops["learning"]


def test_training_moves_the_weights(synchronous: tuple[Path, TrainResult]) -> None:
    before, after = load_file(find_model("demo").path / "model.safetensors"), weights(synchronous[0])
    moved = [name for name in before if not torch.equal(before[name].float(), after[name])]
    assert len(moved) == len(before)
    assert all(after[name].dtype == torch.float32 and bool(after[name].isfinite().all()) for name in before)


# --- repeat, interrupt, resume ---


def test_a_synchronous_run_repeats_bit_for_bit(synchronous: tuple[Path, TrainResult], tmp_path: Path) -> None:
    first, _ = synchronous
    Trainer(args=small(tmp_path / "run", steps=STEPS)).train()
    assert metrics_of(tmp_path / "run") == metrics_of(first)
    assert same(weights(tmp_path / "run"), weights(first))
    samples = [
        [{key: value for key, value in row.items() if key != "time"} for row in rows_of(run_dir, "sample")]
        for run_dir in (first, tmp_path / "run")
    ]
    assert samples[0] == samples[1]


def test_an_interrupted_synchronous_run_goes_on_as_if_it_had_not_been(
    synchronous: tuple[Path, TrainResult], tmp_path: Path
) -> None:
    first, _ = synchronous
    config = small(tmp_path / "run", steps=STEPS)
    trainer = Trainer(args=config)
    stopper = stop_after(trainer, 2)
    result = trainer.train()
    stopper.join()
    assert result.status == "interrupted" and 2 <= result.step < STEPS
    assert checkpoints(trainer.run_dir) == [f"step-{result.step:08d}"]
    end = rows_of(trainer.run_dir, "end")[-1]
    assert end["status"] == "interrupted" and f"trtl-rl run --resume {trainer.run_dir}" in end["text"]
    assert any("Stopping" in row["text"] for row in rows_of(trainer.run_dir, "message"))

    again = Trainer(args=config, resume=True).train()
    assert (again.status, again.step) == ("done", STEPS)
    assert [row["step"] for row in rows_of(trainer.run_dir, "step")] == list(range(1, STEPS + 1))
    assert rows_of(trainer.run_dir, "start")[-1]["resumed_from"] == result.step
    assert same(weights(trainer.run_dir), weights(first))
    parts = ("reward", "loss", "grad_norm", "mismatch/max_abs", "num_tokens", "flops/cumulative/learning")
    for ours, theirs in zip(metrics_of(trainer.run_dir), metrics_of(first), strict=True):
        assert [ours.get(name) for name in parts] == [theirs.get(name) for name in parts]


@pytest.mark.slow
def test_an_asynchronous_run_of_ones_own_function_and_rows_loses_no_group_over_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = Trained(monkeypatch)
    rows = demo_rows()[:97]
    config = small(tmp_path / "run", steps=9, buffer={"max_staleness": 2})
    trainer = Trainer(model="demo", reward_funcs=digits, train_dataset=rows, args=config)
    stopper = stop_after(trainer, 3)
    result = trainer.train()
    stopper.join()
    assert result.status == "interrupted" and 3 <= result.step < 9
    assert "resume=True" in rows_of(trainer.run_dir, "end")[-1]["text"]
    left = untrained(trainer.run_dir)
    assert left and sorted([*trained.indices, *left]) == list(range(len(trained.indices) + len(left)))

    again = Trainer(model="demo", reward_funcs=digits, train_dataset=rows, args=config, resume=True).train()
    assert again.step == 9 and len(trained.groups) == 9
    assert len(set(trained.indices)) == len(trained.indices) == 18
    assert sorted([*trained.indices, *untrained(trainer.run_dir)]) == list(range(18))
    for step, groups in enumerate(trained.groups):
        assert all(step - group.version <= 2 for group in groups)
        assert all(len(group.completions) == 4 and group.prompt.columns["answer"] for group in groups)
    steps = rows_of(trainer.run_dir, "step")
    assert max(row["metrics"]["off_policy/max"] for row in steps) in (1, 2)
    assert all(row["metrics"]["mismatch/differing_tokens"] == 0 for row in steps)
    assert all("rewards/digits/mean" in row["metrics"] for row in steps)
    # the command line cannot know the function, and must not go on with another one
    assert "exact_match" not in str(yaml.safe_load((trainer.run_dir / "config.yaml").read_text())["rewards"])


# --- rewards that fail ---


def none(completions: list[str], **rest: Any) -> list[None]:
    return [None for _ in completions]


def not_a_number(completions: list[str], **rest: Any) -> list[float]:
    return [float("nan") for _ in completions]


def broken(completions: list[str], **rest: Any) -> list[float]:
    raise KeyError("the judge's own words")


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (
            none,
            r"5 groups in a row had to be left out, last prompt \d+: fewer than two scored samples, since none returned None",
        ),
        pytest.param(not_a_number, r"Reward 'not_a_number' returned nan for sample 0", marks=pytest.mark.slow),
        pytest.param(broken, r"(?s)Reward 'broken' failed .*the judge's own words", marks=pytest.mark.slow),
    ],
)
def test_a_reward_that_fails_ends_the_run_with_its_name(
    function: Any, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollouts_module, "DISCARD_LIMIT", 5)
    trainer = Trainer(reward_funcs=function, args=small(tmp_path / "run"))
    with pytest.raises(RewardError, match=said):
        trainer.train()
    (end,) = rows_of(trainer.run_dir, "end")
    assert end["status"] == "failed" and function.__name__ in end["text"]
    until = time.monotonic() + 30
    while [thread for thread in threading.enumerate() if thread.name in ("rollouts", "engine-reader")]:
        assert time.monotonic() < until, "a thread of the run goes on"
        time.sleep(0.05)


@pytest.mark.slow
def test_a_run_without_any_signal_ends_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "NO_SIGNAL_LIMIT", 4)

    def constant(completions: list[str], **rest: Any) -> list[float]:
        return [0.1] * len(completions)

    trainer = Trainer(reward_funcs=constant, args=small(tmp_path / "run", steps=50))
    result = trainer.train()
    assert (result.status, result.reason, result.step) == ("done", "no signal", 4)
    assert "for 4 steps in a row no group had answers of different reward" in rows_of(trainer.run_dir, "end")[0]["text"]
    assert sum("all rewards are equal" in row["text"] for row in rows_of(trainer.run_dir, "message")) == 1
    before, after = load_file(find_model("demo").path / "model.safetensors"), weights(trainer.run_dir)
    assert all(torch.equal(before[name].float(), after[name]) for name in before)
    ledger = json.loads((trainer.run_dir / "ledger.json").read_text())
    assert ledger["flops"]["learning"] == 0 and ledger["wasted"]["zero_signal"] > 0


def test_functions_of_one_name_keep_their_own_metrics(tmp_path: Path) -> None:
    trainer = Trainer(reward_funcs=[digits, none, digits], args=small(tmp_path / "run"))
    assert [reward.name for reward in trainer.rewards] == ["digits", "none", "digits_2"]
    with pytest.raises(UserError, match="reward_funcs is empty"):
        Trainer(reward_funcs=[], args=small(tmp_path / "run"))
