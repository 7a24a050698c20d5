from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from demo import small
from safetensors.torch import load_file
from torch import Tensor

import trtl_rl.trainer.loop as loop_module
import trtl_rl.trainer.rollouts as rollouts_module
from trtl_rl import Trainer
from trtl_rl.config import RunConfig
from trtl_rl.demo.task import demo_rows
from trtl_rl.errors import RewardError, UserError
from trtl_rl.kernels.kernel_set import find_compiler
from trtl_rl.metrics import read_rows
from trtl_rl.model.source import find_model
from trtl_rl.rollout import Group
from trtl_rl.trainer.learner import Learner
from trtl_rl.trainer.trainer import TrainResult

ROOT = Path(__file__).resolve().parent.parent
STEPS = 6


def rows_of(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    return [row for row in read_rows(run_dir / "metrics.jsonl") if row["kind"] == kind]


def metrics_of(run_dir: Path) -> list[dict[str, float]]:
    """Metrics by step, without times and speeds, which no two runs share."""
    timed = ("timing_s/", "perf/")
    steps = [row["metrics"] for row in rows_of(run_dir, "step")]
    return [{name: value for name, value in step.items() if not name.startswith(timed)} for step in steps]


def checkpoints(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def weights(run_dir: Path) -> dict[str, Tensor]:
    """Of the newest checkpoint."""
    return load_file(run_dir / "checkpoints" / checkpoints(run_dir)[-1] / "model.safetensors")


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


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
        "config.yaml", "metrics.jsonl", "ledger.json", "checkpoints", "logs",
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


class Trained:
    """Records which groups every update got."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.groups: list[list[Group]] = []
        update = Learner.update

        def recorded(learner: Learner, groups: Sequence[Group], version: int) -> Any:
            self.groups.append(list(groups))
            return update(learner, groups, version)

        patch.setattr(Learner, "update", recorded)

    @property
    def indices(self) -> list[int]:
        return [group.index for groups in self.groups for group in groups]


def digits(completions: list[str], completion_ids: list[list[int]], answer: list[str], **rest: Any) -> list[float]:
    """A reward that nearly always differs within a group."""
    return [
        len(ids) / 100 + float(text == gold)
        for text, ids, gold in zip(completions, completion_ids, answer, strict=True)
    ]


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
    state = json.loads((trainer.run_dir / "checkpoints" / checkpoints(trainer.run_dir)[-1] / "state.json").read_text())
    assert sorted([*trained.indices, *state["untrained"]]) == list(range(state["next_index"]))
    assert state["untrained"]

    again = Trainer(model="demo", reward_funcs=digits, train_dataset=rows, args=config, resume=True).train()
    assert again.step == 9 and len(trained.groups) == 9
    assert len(set(trained.indices)) == len(trained.indices) == 18
    state = json.loads((trainer.run_dir / "checkpoints" / checkpoints(trainer.run_dir)[-1] / "state.json").read_text())
    assert sorted([*trained.indices, *state["untrained"]]) == list(range(state["next_index"]))
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
        (none, r"5 groups in a row had fewer than two scored samples: none returned None, last for prompt \d+"),
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
    assert not [thread for thread in threading.enumerate() if thread.name in ("rollouts", "engine-reader")]


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


# --- failures and resumes ---


def test_a_failing_reward_does_not_cost_the_updates_before_it(tmp_path: Path) -> None:
    calls = 0

    def fails_later(completion_ids: list[list[int]], **rest: Any) -> list[float]:
        nonlocal calls
        calls += len(completion_ids)
        if calls > 8 * 4:
            raise ValueError("broken")
        return [float(sum(ids) % 3) for ids in completion_ids]

    trainer = Trainer(reward_funcs=fails_later, args=small(tmp_path / "run", steps=50, buffer={"max_staleness": 0}))
    with pytest.raises(RewardError, match="broken"):
        trainer.train()
    done = len(rows_of(trainer.run_dir, "step"))
    assert done >= 1 and checkpoints(trainer.run_dir) == [f"step-{done:08d}"]
    assert "kept: " in rows_of(trainer.run_dir, "end")[0]["text"]


def test_a_resume_takes_a_new_learning_rate_and_refuses_another_seed(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    Trainer(reward_funcs=digits, args=small(run_dir, steps=2)).train()
    with pytest.raises(UserError, match=r"^seed differ from the run that was saved"):
        Trainer(reward_funcs=digits, args=small(run_dir, steps=3, seed=7), resume=True).train()
    changed = small(run_dir, steps=3, optimizer={"lr": 0.125})
    Trainer(reward_funcs=digits, args=changed, resume=True).train()
    assert metrics_of(run_dir)[-1]["learning_rate"] == 0.125


def test_buffers_larger_than_their_budget_are_refused_before_they_are_made(tmp_path: Path) -> None:
    config = small(tmp_path / "run", engine={"slots": 64, "cache_gib": 0.001})
    with pytest.raises(UserError, match=r"engine\.cache_gib"):
        Trainer(reward_funcs=digits, args=config).train()


# --- variants of a run ---


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["spo", "naive", "grpo"])
def test_every_objective_trains(loss: str, tmp_path: Path) -> None:
    config = small(tmp_path / "run", loss={"name": loss}, optimizer={"lr": 1e-3, "micro_batch_tokens": 1})
    trainer = Trainer(reward_funcs=digits, args=config)
    assert trainer.train().step == 3
    for metrics in metrics_of(trainer.run_dir):
        assert math.isfinite(metrics["loss"]) and metrics["grad_norm"] > 0
        assert metrics["mismatch/max_abs"] == 0


@pytest.mark.slow
def test_unfinished_answers_may_finish_before_a_refit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = Trained(monkeypatch)
    config = small(tmp_path / "run", steps=6, buffer={"max_staleness": 2, "in_flight": "finish"}, engine={"slots": 5})
    assert Trainer(reward_funcs=digits, args=config).train().step == 6
    completions = [item for groups in trained.groups for group in groups for item in group.completions]
    assert all(item.version_first == item.version_last for item in completions)
    assert len({item.version_first for item in completions}) > 1


@pytest.mark.slow
def test_a_token_budget_ends_the_run_cleanly(tmp_path: Path) -> None:
    trainer = Trainer(
        args=small(tmp_path / "run", steps=50, budget={"tokens": 300}, checkpoint={"every": 1, "keep": 2})
    )
    result = trainer.train()
    assert (result.status, result.reason) == ("done", "budget.tokens") and 1 < result.step < 50
    steps = rows_of(trainer.run_dir, "step")
    assert [row["metrics"]["num_tokens"] >= 300 for row in steps] == [False] * (len(steps) - 1) + [True]
    assert steps[-1]["metrics"]["flops/budget_frac"] >= 1
    assert checkpoints(trainer.run_dir) == [f"step-{n:08d}" for n in (result.step - 1, result.step)]


@pytest.mark.slow
@pytest.mark.timeout(600)  # with nothing in the cache, seven units are compiled first
@pytest.mark.skipif(find_compiler() is None, reason="operators are compiled where there is a C++ compiler")
@pytest.mark.parametrize("staleness", [0, 2])
def test_compiled_operators_of_trainer_and_engine_agree_bit_for_bit(staleness: int, tmp_path: Path) -> None:
    config = small(
        tmp_path / "run",
        steps=5,
        compile=True,
        batch={"prompts": 8, "group_size": 8},
        buffer={"max_staleness": staleness},
        parity={"every": 1, "prompts": 12},
    )
    trainer = Trainer(args=config)
    assert trainer.train().step == 5
    found = metrics_of(trainer.run_dir)
    assert all(m["mismatch/differing_tokens"] == m["mismatch/max_abs"] == 0 for m in found)
    assert sum(m["mismatch/tokens"] for m in found) > 2000
    assert sum(m["refit/changed_frac"] > 0 for m in found) >= 3, "the weights moved between the probes"
    assert "compiled" in rows_of(trainer.run_dir, "start")[0]["kernels"]


# --- Ctrl-C, through the command line ---


def start(run_dir: Path, *settings: str) -> subprocess.Popen[str]:
    """``trtl-rl run`` on the demo as a child process."""
    code = "from trtl_rl.cli.main import app; app()"
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    common = [f"run_dir={run_dir}", "compile=false", "evaluation.prompts=0", "batch.prompts=2", "batch.group_size=4"]
    return subprocess.Popen(
        [sys.executable, "-c", code, "run", *common, *settings],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        cwd=run_dir.parent,
    )


def wait_for_step(run_dir: Path, step: int) -> None:
    end = time.monotonic() + 90
    while not (run_dir / "metrics.jsonl").exists() or len(rows_of(run_dir, "step")) < step:
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.slow
def test_one_interrupt_saves_and_says_how_to_resume(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with start(run_dir, "steps=100000") as process:
        wait_for_step(run_dir, 1)
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert f"trtl-rl run --resume {run_dir}" in out and "Traceback" not in errors
    assert "Stopping: the step under way" in out
    assert checkpoints(run_dir)


@pytest.mark.slow
def test_a_second_interrupt_stops_at_once(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    (tmp_path / "judge.py").write_text("import time\ndef judge(completions, **rest):\n    time.sleep(300)\n")
    with start(run_dir, "rewards=judge.py:judge") as process:
        end = time.monotonic() + 90
        while not (run_dir / "metrics.jsonl").exists() or not rows_of(run_dir, "start"):
            assert time.monotonic() < end
            time.sleep(0.05)
        time.sleep(2.0)  # now the reward function hangs, and an orderly end waits for it
        process.send_signal(signal.SIGINT)
        time.sleep(1.0)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "stopped at once" in errors and "Traceback" not in errors
    assert rows_of(run_dir, "end")[-1]["status"] == "failed"
