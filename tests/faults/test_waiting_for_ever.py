"""Waiting for ever: an engine that dies, hangs or loses prompts; the run goes on, or ends with what it waits for."""

from __future__ import annotations

import os
import re
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from demo import small
from drill import drill, process_of, stop_in_mid_group, wait_until, worker_of
from run_files import digits, metrics_of, rows_of, same, weights

from trtl_rl import Trainer
from trtl_rl.metrics import read_rows
from trtl_rl.rewards.reward import Reward
from trtl_rl.trainer import signs, watchdog

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

NOT_COMPARED = ("engine/", "refit/", "buffer/regenerated")


def learned(run_dir: Path) -> list[dict[str, float]]:
    """Metrics that a restart must not change."""
    return [
        {name: value for name, value in step.items() if not name.startswith(NOT_COMPARED)}
        for step in metrics_of(run_dir)
    ]


def test_a_synchronous_run_whose_engine_dies_learns_the_same_bits(tmp_path: Path) -> None:
    sound = drill(tmp_path / "sound", steps=4)
    failed = drill(tmp_path / "failed", steps=4, engine={"fault": "die_at_step:2"})
    refit = drill(tmp_path / "refit", steps=4, engine={"fault": "die_in_refit:2"})
    for outcome in (sound, failed, refit):
        outcome.assert_done(4)
        assert outcome.restarts == (outcome is not sound)
        assert learned(outcome.run_dir) == learned(sound.run_dir)
        assert same(weights(outcome.run_dir), weights(sound.run_dir))
    assert any("status -9" in text and "restart 1 of 3" in text for text in failed.messages)
    assert any("at version 1; what it had" in text for text in failed.messages)
    assert any("at version 2; what it had" in text for text in refit.messages), "the new version, at once"


@pytest.mark.parametrize("in_flight", ["continue", "finish"])
def test_an_engine_that_is_killed_again_and_again_costs_only_its_unfinished_work(
    in_flight: str, tmp_path: Path
) -> None:
    steps = 8

    def kill_three_times(trainer: Trainer) -> None:
        for restarts in range(3):
            process = stop_in_mid_group(trainer)
            os.kill(process, signal.SIGKILL)
            engine = worker_of(trainer).engine
            wait_until(lambda: engine.restarts > restarts)  # noqa: B023 - it is called in this turn

    outcome = drill(
        tmp_path / "run",
        kill_three_times,
        steps=steps,
        batch={"prompts": 2, "group_size": 8},
        buffer={"max_staleness": 2, "in_flight": in_flight},
    )
    outcome.assert_done(steps)
    assert outcome.restarts == 3
    wasted = outcome.ledger["wasted"]
    assert wasted["engine_death"] > 0 and wasted["engine_death"] < outcome.ledger["flops"]["search"]
    assert sum(step["flops/wasted/engine_death"] for step in outcome.steps) == wasted["engine_death"]
    assert outcome.steps[-1]["buffer/regenerated"] >= 3
    assert max(step["off_policy/max"] for step in outcome.steps) <= 2
    assert all(step["mismatch/max_abs"] == 0 for step in outcome.steps)


def test_an_engine_that_is_stopped_is_killed_and_replaced(tmp_path: Path) -> None:
    stopped: list[int] = []
    outcome = drill(
        tmp_path / "run",
        lambda trainer: stopped.append(stop_in_mid_group(trainer)),
        steps=5,
        batch={"prompts": 2, "group_size": 8},
        buffer={"max_staleness": 1},
        engine={"timeout": 20},
        refit={"timeout": 20},
    )
    outcome.assert_done(5)
    assert outcome.restarts == 1 and not Path(f"/proc/{stopped[0]}").exists()
    assert any(re.search(r"silent for 20 s|did not answer '\w+' within 20 s", text) for text in outcome.messages)


@pytest.mark.parametrize("fault", ["never_reply:2", "reply_error:2"])
def test_an_engine_that_answers_nothing_or_with_errors_is_replaced(fault: str, tmp_path: Path) -> None:
    outcome = drill(tmp_path / "run", engine={"fault": fault, "timeout": 20}, refit={"timeout": 20})
    outcome.assert_done(3)
    assert outcome.restarts == 1


def test_an_engine_that_keeps_dying_ends_the_run_with_its_own_text(tmp_path: Path) -> None:
    outcome = drill(tmp_path / "run", engine={"fault": "die_at_step:2:always", "restarts": 2})
    outcome.assert_ended_with("The engine was restarted 2 times in a row (engine.restarts=2) and failed again", steps=1)
    assert "The engine kills itself on purpose (engine.fault=die_at_step:2:always)" in str(outcome.error)
    assert sum("restart" in text and "anew" in text for text in outcome.messages) == 2


def test_an_engine_that_dies_in_an_evaluation_is_asked_again(tmp_path: Path) -> None:
    def kill(trainer: Trainer) -> None:
        log = trainer.run_dir / "metrics.jsonl"
        wait_until(lambda: log.exists() and any(row.get("name") == "evaluation" for row in read_rows(log)))
        os.kill(process_of(trainer), signal.SIGKILL)

    keys: dict[str, Any] = {"task": {"held_out": 400}, "evaluation": {"prompts": 400}, "steps": 1}
    sound = drill(tmp_path / "sound", **keys)
    outcome = drill(tmp_path / "run", kill, **keys)
    outcome.assert_done(1)
    assert outcome.restarts == 1
    first, other = (rows_of(directory, "evaluation")[0]["metrics"] for directory in (sound.run_dir, outcome.run_dir))
    assert first == other, "the same answers"


def test_a_prompt_that_never_leaves_the_engine_is_generated_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signs, "LOOK", 0.2)
    outcome = drill(
        tmp_path / "run", steps=4, buffer={"max_staleness": 1, "lease": 3}, engine={"fault": "lose_request:2"}
    )
    outcome.assert_done(4)
    assert any(re.search(r"Prompt \d+: no sign of life for 3 s .*generated again", text) for text in outcome.messages)
    assert max(step["off_policy/max"] for step in outcome.steps) <= 1


def test_a_prompt_that_is_lost_each_time_is_left_out_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signs, "LOOK", 0.2)
    outcome = drill(
        tmp_path / "run",
        steps=4,
        buffer={"max_staleness": 1, "lease": 10, "attempts": 2},
        engine={"fault": "lose_prompt:2:always"},
    )
    (said,) = [text for text in outcome.messages if "left out of the run" in text]
    assert re.match(r"Prompt \d+: no sign of life for 10 s \(buffer.lease\), 2 times", said)
    left_out = [index for index in range(9) if index not in outcome.indices]
    assert len(left_out) == 1
    outcome.assert_done(4, left_out=left_out)
    assert outcome.steps[-1]["buffer/discarded"] == 1


def test_a_reward_that_hangs_is_named_while_it_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "STALL_SECONDS", 2.0)
    monkeypatch.setattr(watchdog, "STALL_FACTOR", 1.0)
    go = threading.Event()
    calls: list[int] = []

    def hanging(completion_ids: list[list[int]], **rest: Any) -> list[float]:
        calls.append(len(completion_ids))
        if len(calls) == 4:
            go.wait(300)
        return digits(completion_ids=completion_ids, **rest)

    def see(trainer: Trainer) -> None:
        def told() -> bool:
            log = trainer.run_dir / "metrics.jsonl"
            return log.exists() and any("reward functions (hanging)" in str(row.get("text")) for row in read_rows(log))

        wait_until(told)
        go.set()

    # In this process, where no time limit can kill it.
    outcome = drill(tmp_path / "run", see, Reward("hanging", hanging, in_process=True), steps=5)
    outcome.assert_done(5)
    (said, *_) = [text for text in outcome.messages if "reward functions (hanging)" in text]
    assert "The learner is at: waiting for a batch" in said and re.search(r"prompt \d+ \(not seen in the engine", said)


def test_a_run_that_is_interrupted_while_its_engine_is_dead_ends_at_once_and_can_go_on(tmp_path: Path) -> None:
    def interrupt(trainer: Trainer) -> None:
        engine = worker_of(trainer).engine
        wait_until(lambda: engine.doing is not None)
        trainer.stop()

    outcome = drill(tmp_path / "run", interrupt, engine={"fault": "die_at_step:2", "restart_delay": 300})
    assert outcome.error is None and outcome.checkpoints == ["step-00000001"]
    (stopping,) = [row for row in rows_of(outcome.run_dir, "message") if row["text"].startswith("Stopping")]
    assert rows_of(outcome.run_dir, "end")[0]["time"] - stopping["time"] < 200, "it did not wait for the restart"
    resumed = Trainer(args=small(outcome.run_dir), resume=True).train()
    assert resumed.status == "done" and resumed.step == 3
