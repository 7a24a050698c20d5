"""Several engines as one, with fake processes: none is forgotten, none generates with another version than it should."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from trtl_rl.engines.pool import EnginePool
from trtl_rl.engines.supervisor import SupervisedEngine, WorkLost
from trtl_rl.errors import EngineError, UserError
from trtl_rl.refit.manifest import RefitResult
from trtl_rl.rollout import Completion, Request, Sampling

SAMPLING = Sampling(1.0, 4)


def request(id: int, samples: int = 2) -> Request:
    return Request(id, [1], samples, SAMPLING, (0, id, 0))


class FakeProcess:
    """Answers what it is asked when it is told to; every call fails once ``failure`` is set."""

    def __init__(self, number: int) -> None:
        self.number, self.version, self.busy_seconds = number, -1, 1.0
        self.failure: EngineError | None = None
        self.refit_failure: EngineError | None = None
        self.refuses: UserError | None = None
        self.closed = False
        self.asked: dict[int, Request] = {}
        self.seen: list[int] = []
        self.cancelled: list[int] = []
        self.answering = False
        self.next_version = -1
        self.digest = "d"
        self.paused = False

    def _check(self) -> None:
        if self.closed or self.failure is not None:
            raise self.failure or EngineError("it was closed")

    def submit(self, requests: Sequence[Request]) -> None:
        self._check()
        if self.refuses is not None:
            raise self.refuses
        self.asked.update({item.id: item for item in requests})
        self.seen += [item.id for item in requests]

    def poll(self, timeout: float) -> list[Completion]:
        self._check()
        time.sleep(0.001)
        return self.arrived() if self.answering else []

    def arrived(self) -> list[Completion]:
        if not self.answering:
            return []
        asked, self.asked = self.asked, {}
        v = self.version
        return [Completion(id, n, [5], "stop", v, v) for id, item in asked.items() for n in range(item.samples)]

    def progress(self) -> dict[int, list[int]]:
        return {id: [3] for id in self.asked}

    def cancel(self, ids: Sequence[int]) -> None:
        self.cancelled += ids

    def probe(self, requests: Sequence[Request]) -> list[Completion]:
        self._check()
        return [Completion(item.id, 0, [self.number], "stop", self.version, self.version) for item in requests]

    def begin_refit(self, manifest: Any) -> bool:
        self._check()
        if self.refit_failure is not None:
            raise self.refit_failure
        self.next_version = manifest.version
        return True

    def write(self, bucket: Any) -> None:
        self._check()

    def finish_refit(self) -> RefitResult:
        self._check()
        self.version = self.next_version
        return RefitResult(self.version, self.digest, 0.25 * (1 + self.number), 0.5)

    def abort_refit(self) -> None:
        self._check()

    def pause(self, policy: str) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False

    def close(self) -> None:
        self.closed = True


class FakeManifest:
    def __init__(self, version: int) -> None:
        self.version, self.digest = version, "d"


class Made:
    """A pool of fakes; ``restart`` may fail or wait for the next starts of an engine that failed."""

    def __init__(self, count: int, restarts: int = 3) -> None:
        self.processes: list[list[FakeProcess]] = [[] for _ in range(count)]
        self.said: list[str] = []
        self.restart: Callable[[], None] = lambda: None
        engines = [
            SupervisedEngine(self._maker(number), restarts=restarts, delay=0.01, tell=lambda *_: None)
            for number in range(count)
        ]
        self.pool = EnginePool(engines, lambda level, text: self.said.append(text))
        start: Any = self._start
        self.pool.start(start, {}, 7)

    def _maker(self, number: int) -> Any:
        def make() -> FakeProcess:
            self.processes[number].append(FakeProcess(number))
            return self.processes[number][-1]

        return make

    def _start(self, process: FakeProcess, tensors: object, version: int, *, restarted: bool) -> None:
        if restarted:
            self.restart()
        process.version = version

    @property
    def now(self) -> list[FakeProcess]:
        return [made[-1] for made in self.processes]

    def refit(self, version: int) -> RefitResult:
        self.pool.hold({}, version)
        manifest: Any = FakeManifest(version)
        bucket: Any = None
        self.pool.begin_refit(manifest)
        self.pool.write(bucket)
        return self.pool.finish_refit()


@pytest.fixture
def made_pools() -> Any:
    pools: list[Made] = []

    def make(count: int, **settings: int) -> Made:
        pools.append(Made(count, **settings))
        return pools[-1]

    yield make
    for made in pools:
        made.pool.close()


def until(holds: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < end, what
        time.sleep(0.002)


def collect(pool: EnginePool, count: int) -> list[Completion]:
    found: list[Completion] = []
    until(lambda: len(found.extend(pool.poll(0.01)) or found) >= count, "completions are missing")  # type: ignore[func-returns-value]
    return found


def test_prompts_go_where_the_fewest_answers_are_to_come(made_pools: Any) -> None:
    made = made_pools(3)
    made.pool.submit([request(0, samples=8)])
    made.pool.submit([request(id) for id in range(1, 9)])
    until(lambda: sum(len(p.seen) for p in made.now) == 9, "requests are missing")
    assert Counter(len(p.seen) for p in made.now) == {1: 1, 4: 2}
    assert made.pool.sizes == {"engine/replicas": 3, "engine/load_min": 8, "engine/load_max": 8}
    for process in made.now:
        process.answering = True
    done = collect(made.pool, 24)
    assert sorted((c.request_id, c.sample) for c in done)[:8] == [(0, n) for n in range(8)]
    assert made.pool.sizes["engine/load_max"] == 0


def test_only_the_work_of_the_engine_that_died_is_lost(made_pools: Any) -> None:
    made = made_pools(2)
    made.pool.submit([request(id) for id in range(6)])
    until(lambda: sum(len(p.seen) for p in made.now) == 6, "requests are missing")
    first, second = made.now
    second.answering = True
    first.failure = EngineError("its process ended")
    done: list[Completion] = []
    with pytest.raises(WorkLost) as lost:
        until(lambda: done.extend(made.pool.poll(0.01)) is not None, "nobody said so")
    assert lost.value.ids == set(first.seen)
    assert lost.value.progress == {id: [3] for id in first.seen}
    done += lost.value.completions
    made.pool.submit([request(id) for id in sorted(lost.value.ids)])
    until(lambda: len(made.processes[0]) == 2 and made.pool.restarts == 1, "no restart")
    made.now[0].answering = True
    done += collect(made.pool, 12 - len(done))
    assert Counter(c.request_id for c in done) == dict.fromkeys(range(6), 2)


def test_an_engine_that_is_being_replaced_gets_no_prompts_and_holds_up_nobody(made_pools: Any) -> None:
    made = made_pools(2)
    gate = threading.Event()
    made.restart = lambda: gate.wait(20) and None  # type: ignore[assignment, return-value]
    first, second = made.now
    second.answering = True
    made.refit(8)
    first.failure = EngineError("its process ended")
    until(lambda: made.pool.doing is not None, "the failure was not met")
    made.refit(9)  # while it is away
    assert made.pool.sizes["engine/replicas"] == 1
    made.pool.submit([request(id) for id in range(4)])
    assert {c.version_first for c in collect(made.pool, 8)} == {9}
    assert sorted(second.seen) == [0, 1, 2, 3]
    gate.set()
    with pytest.raises(WorkLost) as lost:
        until(lambda: made.pool.poll(0.01) is None, "it never came back")
    assert lost.value.ids == frozenset()
    until(lambda: made.pool.sizes["engine/replicas"] == 2, "it never came into rotation")
    assert [p.version for p in made.now] == [9, 9]


def test_an_engine_that_fails_in_a_refit_is_brought_to_the_version_while_the_others_go_on(made_pools: Any) -> None:
    made = made_pools(3)
    broken = made.now[1]
    broken.refit_failure = EngineError("the refit hangs")
    result = made.refit(8)
    assert (result.version, result.decode_seconds, result.pause_seconds) == (8, 0.75, 0.5)
    until(lambda: made.pool.sizes["engine/replicas"] == 3, "it never came back")
    assert broken.closed
    assert [p.version for p in made.now] == [8, 8, 8]


def test_an_engine_with_another_digest_is_not_believed(made_pools: Any) -> None:
    made = made_pools(2)
    wrong = made.now[0]
    wrong.digest = "another"
    made.refit(8)
    until(lambda: made.pool.sizes["engine/replicas"] == 2, "it never came back")
    assert wrong.closed
    assert not made.now[1].closed


def test_a_refit_that_fails_everywhere_is_said_and_all_are_brought_up(made_pools: Any) -> None:
    made = made_pools(2)
    for process in made.now:
        process.refit_failure = EngineError("the refit hangs")
    with pytest.raises(EngineError, match="the refit hangs") as error:
        made.refit(8)
    made.pool.bring_up(error.value)
    assert [p.version for p in made.now] == [8, 8]
    assert made.pool.sizes["engine/replicas"] == 2


def test_an_engine_that_cannot_be_replaced_is_left_out_and_the_last_one_ends_the_run(made_pools: Any) -> None:
    made = made_pools(2, restarts=1)

    def fails() -> None:
        raise EngineError("no memory")

    made.restart = fails
    made.pool.submit([request(0), request(1)])
    until(lambda: sum(len(p.seen) for p in made.now) == 2, "requests are missing")
    lost_id = made.now[0].seen[0]
    made.now[0].failure = EngineError("its process ended")
    with pytest.raises(WorkLost) as lost:
        until(lambda: made.pool.poll(0.01) is None, "nobody said so")
    assert lost.value.ids == {lost_id}
    assert "Engine 0 is left out of the run, which goes on with 1" in made.said[0]
    made.refit(8)
    made.pool.submit([request(7)])
    until(lambda: 7 in made.now[1].seen, "the other one does not get it")
    made.now[1].failure = EngineError("its process ended")
    with pytest.raises(EngineError, match=r"restarted once in a row.*no memory"):
        until(lambda: made.pool.poll(0.01) is None, "nobody said so")


def test_wrong_input_that_an_engine_refuses_reaches_whoever_polls(made_pools: Any) -> None:
    made = made_pools(2)
    for process in made.now:
        process.refuses = UserError("Request 3 has an empty prompt.")
    made.pool.submit([request(3)])
    with pytest.raises(UserError, match="Request 3"):
        until(lambda: made.pool.poll(0.01) is None, "nobody said so")


def test_few_probes_go_to_the_engines_by_turns_and_many_to_all(made_pools: Any) -> None:
    made = made_pools(2)
    asked = [[c.ids[0] for c in made.pool.probe([request(-1, 1), request(-2, 1)])] for _ in range(3)]
    assert asked == [[0, 0], [1, 1], [0, 0]]
    many = made.pool.probe([request(-id, 1) for id in range(1, 21)])
    assert Counter(c.ids[0] for c in many) == {0: 10, 1: 10}
    assert len({c.request_id for c in many}) == 20


def test_what_waits_in_an_inbox_is_with_an_engine_as_seen_from_outside(made_pools: Any) -> None:
    made = made_pools(1)
    made.pool.submit([request(4)])
    assert 4 in made.pool.progress()
    made.pool.cancel([4, 5])
    until(lambda: made.now[0].cancelled == [4], "it was not cancelled")
