"""Whole runs that fail, resume with other settings, differ in objective, or are interrupted."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from demo import small
from run_files import Trained, checkpoints, digits, metrics_of, rows_of

from trtl_rl import Trainer
from trtl_rl.errors import RewardError, UserError
from trtl_rl.kernels.kernel_set import find_compiler

ROOT = Path(__file__).resolve().parent.parent
STEPS = 6


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
    with pytest.raises(UserError, match=r"^Not as in the run that was saved: seed\."):
        Trainer(reward_funcs=digits, args=small(run_dir, steps=3, seed=7), resume=True).train()
    changed = small(run_dir, steps=3, optimizer={"lr": 0.125})
    Trainer(reward_funcs=digits, args=changed, resume=True).train()
    assert metrics_of(run_dir)[-1]["learning_rate"] == 0.125


def test_a_learning_rate_of_zero_moves_no_weight_and_says_so(tmp_path: Path) -> None:
    trainer = Trainer(reward_funcs=digits, args=small(tmp_path / "run", steps=2, optimizer={"lr": 0.0}))
    trainer.train()
    assert any("no weight moves" in row["text"] for row in rows_of(trainer.run_dir, "message"))
    assert [metrics["refit/changed_frac"] for metrics in metrics_of(trainer.run_dir)] == [0.0, 0.0]


def test_buffers_larger_than_their_budget_are_refused_before_they_are_made(tmp_path: Path) -> None:
    config = small(tmp_path / "run", engine={"slots": 64, "cache_gib": 1e-5})
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
@pytest.mark.parametrize("signals", [[signal.SIGINT], [signal.SIGTERM] * 3])  # schedulers repeat theirs
def test_one_interrupt_saves_and_says_how_to_resume(signals: list[signal.Signals], tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with start(run_dir, "steps=100000") as process:
        wait_for_step(run_dir, 1)
        for number in signals:
            process.send_signal(number)
        out, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert f"trtl-rl run --resume {run_dir}" in out and "Traceback" not in errors
    assert "Stopping: the step under way" in out
    assert checkpoints(run_dir)


@pytest.mark.slow
def test_a_second_interrupt_stops_at_once(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with start(run_dir, "steps=100000") as process:
        wait_for_step(run_dir, 1)
        process.send_signal(signal.SIGINT)
        end = time.monotonic() + 60
        while not any(row["text"].startswith("Stopping") for row in rows_of(run_dir, "message")):
            assert time.monotonic() < end
            time.sleep(0.002)
        process.send_signal(signal.SIGINT)  # before the step has ended and was saved
        _, errors = process.communicate(timeout=60)
    assert process.returncode in (130, -signal.SIGINT)  # to a shell both are 130
    assert "stopped at once" in errors and "Traceback" not in errors
    assert rows_of(run_dir, "end")[-1]["status"] == "failed"
