"""An engine that fails is replaced, whoever meets the failure: with fake processes, which fail when they are told to."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from trtl_rl.engines.supervisor import HEALTHY_STEPS, SupervisedEngine, WorkLost
from trtl_rl.errors import EngineError, RefitError, UserError
from trtl_rl.rollout import Completion, Request, Sampling

SAMPLING = Sampling(1.0, 4)


def request(id: int) -> Request:
    return Request(id, [1], 1, SAMPLING, (0, id, 0))


class FakeProcess:
    """An engine whose every call fails once ``failure`` is set."""

    def __init__(self) -> None:
        self.failure: EngineError | None = None
        self.version, self.busy_seconds, self.closed = -1, 0.0, False
        self.asked: list[int] = []
        self.left: list[Completion] = []

    def _check(self) -> None:
        if self.closed:
            raise EngineError("it was closed")
        if self.failure is not None:
            raise self.failure

    def submit(self, requests: Sequence[Request]) -> None:
        self._check()
        self.asked += [item.id for item in requests]

    def poll(self, timeout: float) -> list[Completion]:
        self._check()
        return self.arrived()

    def arrived(self) -> list[Completion]:
        left, self.left = self.left, []
        return left

    def progress(self) -> dict[int, list[int]]:
        return {id: [3] for id in self.asked}

    def probe(self, requests: Sequence[Request]) -> list[Completion]:
        self._check()
        return [Completion(item.id, 0, [5], "stop", self.version, self.version) for item in requests]

    def begin_refit(self, manifest: Any) -> bool:
        self._check()
        return False

    def abort_refit(self) -> None:
        self._check()

    def resume(self) -> None:
        self._check()

    def close(self) -> None:
        self.closed = True


class Made:
    """The fake processes so far, and how they start."""

    def __init__(self, restarts: int = 3) -> None:
        self.processes: list[FakeProcess] = []
        self.started: list[tuple[int, bool]] = []
        self.said: list[str] = []
        self.trouble: list[Exception | Callable[[FakeProcess], None]] = []  # of the next starts
        make: Any = self.make
        self.engine = SupervisedEngine(
            make, restarts=restarts, delay=0.01, tell=lambda level, text: self.said.append(text)
        )
        start: Any = self.start
        self.engine.start(start, {}, 7)

    def make(self) -> FakeProcess:
        self.processes.append(FakeProcess())
        return self.processes[-1]

    def start(self, process: FakeProcess, tensors: object, version: int, *, restarted: bool) -> None:
        assert all(other.closed for other in self.processes if other is not process), "two engines at once"
        if restarted and self.trouble:
            trouble = self.trouble.pop(0)
            if isinstance(trouble, Exception):
                raise trouble
            trouble(process)
        process.version = version
        self.started.append((version, restarted))


def dead(text: str = "its process ended with status -9") -> EngineError:
    return EngineError(text, log=" Its log ends with: ...")


def test_the_rollout_thread_hears_once_that_its_work_is_lost_and_gets_what_had_arrived() -> None:
    made = Made()
    engine = made.engine
    engine.submit([request(1), request(2)])
    made.processes[0].left = [Completion(1, 0, [5], "stop", 7, 7)]
    made.processes[0].failure = dead()
    made.processes[0].busy_seconds = 2.0
    with pytest.raises(WorkLost) as lost:
        engine.poll(0)
    assert [item.request_id for item in lost.value.completions] == [1]
    assert lost.value.progress == {1: [3], 2: [3]}
    assert engine.poll(0) == [] and engine.restarts == 1
    assert made.started == [(7, False), (7, True)]
    made.processes[1].busy_seconds = 1.0
    assert engine.busy_seconds == 3.0, "time does not go back"
    engine.submit([request(3)])
    assert made.processes[1].asked == [3]
    assert "status -9 The engine is started anew in 0.01 s (restart 1 of 3)" in made.said[0]
    assert "its log" not in made.said[0].lower() and "at version 7" in made.said[1]


def test_a_probe_that_meets_a_dying_engine_is_repeated_and_the_rollout_thread_is_told() -> None:
    made = Made()
    engine = made.engine
    engine.submit([request(1)])
    made.processes[0].failure = dead()
    assert len(engine.probe([request(-1)])) == 1
    with pytest.raises(WorkLost):
        engine.submit([request(2)])
    engine.submit([request(2)])
    assert engine.restarts == 1


def test_a_failed_refit_ends_with_a_new_engine_at_the_new_version() -> None:
    made = Made()
    engine = made.engine
    engine.hold({}, 8)
    failure = RefitError("14 of 39 announced tensors never arrived")
    manifest: Any = None
    engine.begin_refit(manifest)
    engine.bring_up(failure)
    assert engine.version == 8 and made.started[-1] == (8, True)
    engine.resume()  # of the new one, which is not paused
    with pytest.raises(WorkLost):
        engine.poll(0)


def test_a_refit_that_the_rollout_threads_restart_has_interrupted_needs_no_other() -> None:
    made = Made()
    engine = made.engine
    manifest: Any = None
    engine.hold({}, 8)
    engine.begin_refit(manifest)
    made.processes[0].failure = dead()
    with pytest.raises(WorkLost):
        engine.poll(0)
    assert engine.version == 8
    with pytest.raises(EngineError, match="was closed"):
        engine.abort_refit()  # of the old one; nothing of the refit may reach the new one
    engine.bring_up(EngineError("it was closed"))
    assert engine.restarts == 1 and len(made.processes) == 2


def test_an_engine_that_keeps_failing_ends_with_one_message_and_every_attempt_waits_longer() -> None:
    made = Made(restarts=3)
    made.trouble = [dead("first"), dead("second"), dead("third")]
    made.processes[0].failure = dead()
    with pytest.raises(EngineError, match=r"restarted 3 times in a row \(engine\.restarts=3\) .* third Its log ends"):
        made.engine.poll(0)
    assert [text.rpartition(" in ")[2].split()[0] for text in made.said] == ["0.01", "0.02", "0.04"]
    assert len(made.processes) == 4 and all(process.closed for process in made.processes)
    with pytest.raises(EngineError, match="restarted 3 times"):  # whoever asks later; nothing is started again
        made.engine.probe([request(-1)])
    assert len(made.processes) == 4


def test_steps_that_go_well_forgive_older_failures() -> None:
    made = Made(restarts=2)
    for number in range(6):
        made.processes[-1].failure = dead()
        with pytest.raises(WorkLost):
            made.engine.poll(0)
        for _ in range(HEALTHY_STEPS):
            made.engine.step_done()
        assert made.engine.restarts == number + 1
    for _ in range(2):
        made.processes[-1].failure = dead()
        made.engine.step_done()
        with pytest.raises(WorkLost):
            made.engine.poll(0)
    made.processes[-1].failure = dead()
    with pytest.raises(EngineError, match="restarted 2 times"):
        made.engine.poll(0)


@pytest.mark.parametrize(
    "failure", [EngineError("activations overflow", repeats=True), UserError("Request 1 has an empty prompt.")]
)
def test_what_would_fail_again_for_certain_is_not_tried_again(failure: Any) -> None:
    made = Made()
    made.processes[0].failure = failure
    with pytest.raises(type(failure), match=str(failure)):
        made.engine.submit([request(1)])
    assert len(made.processes) == 1 and made.said == []


def test_a_new_engine_that_does_not_fit_the_trainer_ends_the_attempts() -> None:
    made = Made()
    made.trouble = [UserError("The recipe and what runs differ in: q_proj")]
    made.processes[0].failure = dead()
    with pytest.raises(EngineError, match="differ in: q_proj"):
        made.engine.poll(0)
    assert len(made.processes) == 2 and made.processes[1].closed


def test_without_restarts_the_engines_own_error_is_raised() -> None:
    made = Made(restarts=0)
    made.processes[0].failure = dead()
    with pytest.raises(EngineError, match=r"^its process ended with status -9 Its log ends with"):
        made.engine.poll(0)
    assert len(made.processes) == 1


def test_both_threads_that_meet_a_dead_engine_make_one_new_one() -> None:
    made = Made()
    made.trouble = [lambda process: time.sleep(0.2)]
    made.processes[0].failure = dead()
    lost: list[WorkLost] = []

    def rollouts() -> None:
        with pytest.raises(WorkLost) as caught:
            made.engine.poll(0)
        lost.append(caught.value)

    thread = threading.Thread(target=rollouts)
    thread.start()
    assert len(made.engine.probe([request(-1)])) == 1
    thread.join(10)
    assert len(lost) == 1 and made.engine.restarts == 1 and len(made.processes) == 2


def test_a_run_that_is_interrupted_does_not_wait_for_a_restart() -> None:
    made = Made()
    hangs = threading.Event()

    def hang(process: FakeProcess) -> None:
        hangs.set()
        while not process.closed:
            time.sleep(0.01)
        raise EngineError("it was closed")

    made.trouble = [hang]
    made.processes[0].failure = dead()
    raised: list[EngineError] = []

    def rollouts() -> None:
        with pytest.raises(EngineError, match="status -9") as caught:
            made.engine.poll(0)
        raised.append(caught.value)

    thread = threading.Thread(target=rollouts)
    thread.start()
    assert hangs.wait(10) and made.engine.doing is not None
    made.engine.give_up()
    thread.join(10)
    assert len(raised) == 1 and made.engine.doing is None
    assert len(made.processes) == 2
