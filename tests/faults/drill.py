"""A drill: a small run of the demo through the real loop, with something that goes wrong in it, and what came of it."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from demo import small
from run_files import Trained, checkpoints, rows_of

from trtl_rl import Trainer
from trtl_rl.trainer.rollouts import RolloutWorker

WITHIN = 600.0  # seconds for anything that a drill waits for, on a busy machine


@dataclass
class Outcome:
    """How a run ended: ``error`` is None where it ended well."""

    run_dir: Path
    error: Exception | None
    indices: list[int]
    seconds: float
    ledger: dict[str, Any] = field(default_factory=dict)

    @property
    def messages(self) -> list[str]:
        return [row["text"] for row in rows_of(self.run_dir, "message")]

    @property
    def steps(self) -> list[dict[str, float]]:
        return [row["metrics"] for row in rows_of(self.run_dir, "step")]

    @property
    def restarts(self) -> float:
        return self.steps[-1]["engine/restarts"]

    @property
    def checkpoints(self) -> list[str]:
        return checkpoints(self.run_dir) if (self.run_dir / "checkpoints").exists() else []

    def assert_done(self, steps: int, batch: int = 2, left_out: Sequence[int] = ()) -> None:
        """All steps were done, and every group was trained on once but for those that were left out."""
        if self.error is not None:
            raise self.error
        assert [row["step"] for row in rows_of(self.run_dir, "step")] == list(range(1, steps + 1))
        expected = [index for index in range(steps * batch + len(left_out)) if index not in left_out]
        assert sorted(self.indices) == expected

    def assert_ended_with(self, said: str, steps: int) -> None:
        """One message ended the run; what it had learned is saved."""
        assert self.error is not None, "the run ended well"
        (end,) = rows_of(self.run_dir, "end")
        for text in (str(self.error), end["text"]):
            assert said in text, text
        assert end["status"] == "failed" and len(self.steps) == steps
        assert self.checkpoints == ([f"step-{steps:08d}"] if steps else [])


def drill(
    run_dir: Path,
    during: Callable[[Trainer], None] | None = None,
    reward: Callable[..., Any] | None = None,
    **keys: Any,
) -> Outcome:
    """Run ``small`` with other ``keys``, and ``during`` beside it in a thread; its failure fails the drill."""
    engine = {"timeout": 120, "restart_delay": 0.1, **keys.pop("engine", {})}
    trainer = Trainer(args=small(run_dir, engine=engine, **keys), reward_funcs=reward)
    trouble: list[BaseException] = []

    def beside() -> None:
        try:
            assert during is not None
            during(trainer)
        except BaseException as error:
            trouble.append(error)
            trainer.stop()

    thread = threading.Thread(target=beside)
    if during is not None:
        thread.start()
    error: Exception | None = None
    start = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        trained = Trained(patch)
        try:
            trainer.train()
        except Exception as caught:
            error = caught
    seconds = time.monotonic() - start
    if during is not None:
        thread.join(WITHIN)
    if trouble:
        raise trouble[0]
    file = run_dir / "ledger.json"
    ledger = json.loads(file.read_text()) if file.exists() else {}
    _assert_in_time(trained, trainer.config.buffer.max_staleness)
    return Outcome(run_dir, error, trained.indices, seconds, ledger)


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + WITHIN
    while not condition():
        assert time.monotonic() < end, "what the drill waits for never came"
        time.sleep(0.002)


def worker_of(trainer: Trainer) -> RolloutWorker:
    """The run's rollout worker, once there is one."""
    wait_until(lambda: trainer._run is not None and trainer._run._worker is not None)
    assert trainer._run is not None and trainer._run._worker is not None
    return trainer._run._worker


def process_of(trainer: Trainer) -> int:
    """The engine's process."""
    assert trainer._run is not None and trainer._run._engine is not None
    engine: Any = trainer._run._engine._now[0]
    return int(engine.process_id)


def stop_in_mid_group(trainer: Trainer) -> int:
    """SIGSTOP the engine's process when a part of a group has arrived and the rest has not; returns its number."""
    worker = worker_of(trainer)
    while True:
        wait_until(lambda: _in_mid_group(worker))
        process = process_of(trainer)
        os.kill(process, signal.SIGSTOP)
        time.sleep(0.2)  # what it had sent is read meanwhile
        if _in_mid_group(worker):
            return process
        os.kill(process, signal.SIGCONT)


def _in_mid_group(worker: RolloutWorker) -> bool:
    return any(attempt.completions for attempt in list(worker._open.values()))


def _assert_in_time(trained: Trained, max_staleness: int) -> None:
    """No group was trained on staler than the buffer's bound, or with an answer that is none."""
    for version, groups in enumerate(trained.groups):
        for group in groups:
            assert 0 <= version - group.version <= max_staleness
            for completion in group.completions:
                assert group.version <= completion.version_first <= version
                assert completion.finish_reason != "cancelled"
