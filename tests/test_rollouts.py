from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from trtl_rl.buffer import GroupBuffer
from trtl_rl.engines.supervisor import WorkLost
from trtl_rl.errors import EngineError, RewardError, UserError
from trtl_rl.flops import formulas
from trtl_rl.flops.formulas import ModelShape
from trtl_rl.flops.ledger import Ledger
from trtl_rl.rewards.reward import Reward
from trtl_rl.rewards.runner import RewardRunner
from trtl_rl.rollout import Completion, Group, Prompt, Request, Sampling
from trtl_rl.trainer import signs
from trtl_rl.trainer.rollout_state import Cost
from trtl_rl.trainer.rollouts import DISCARD_LIMIT, RolloutWorker
from trtl_rl.trainer.signs import Signs

SHAPE = ModelShape(layers=1, hidden=8, heads=1, kv_heads=1, head_dim=8, intermediate=8, vocab=16)


class FakeTask:
    """Prompt ``id`` is drawn as number ``id``, for ever."""

    def prompt(self, id: int, occurrence: int) -> Prompt:
        return Prompt(id, occurrence, [1, 2], str(id), {"id": id})

    def order(self, seed: int) -> FakeTask:
        return self

    def at(self, index: int) -> tuple[int, int]:
        return index, 0


class FakeEngine:
    """Answers every request at once, the last sample first; a silent one never answers.

    Attributes:
        asked, cancelled: Prompts.
        forgets: How often each of these prompts is taken and forgotten.
        keeps: Of these prompts only the first answer comes.
        lost: Raised by the next poll, once.
    """

    silent = False
    holds: dict[int, list[int]] = {}  # noqa: RUF012  # replaced, never changed

    def __init__(self) -> None:
        self.done: list[Completion] = []
        self.requests: dict[int, Request] = {}
        self.asked: list[int] = []
        self.cancelled: list[int] = []
        self.forgets: dict[int, int] = {}
        self.keeps: set[int] = set()
        self.lost: WorkLost | None = None
        self.failed: list[str] = []

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            assert request.id not in self.requests, "ids are unique"
            self.requests[request.id] = request
            prompt = request.seed[1]
            self.asked.append(prompt)
            if self.silent:
                continue
            if self.forgets.get(prompt, 0):
                self.forgets[prompt] -= 1
                continue
            answers = [Completion(request.id, i, [i], "stop", 0, 0) for i in reversed(range(request.samples))]
            self.done += answers[:1] if prompt in self.keeps else answers

    def poll(self, timeout: float) -> list[Completion]:
        if self.lost is not None:
            lost, self.lost = self.lost, None
            raise lost
        done, self.done = self.done, []
        if not done:
            time.sleep(timeout)
        return done

    def cancel(self, ids: Sequence[int]) -> None:
        self.cancelled += [self.requests[id].seed[1] for id in ids]
        for id in ids:
            if self.requests[id].seed[1] in self.keeps:
                self.done += [
                    Completion(id, i, [7, 7], "cancelled", 0, 0) for i in range(self.requests[id].samples - 1)
                ]

    def progress(self) -> dict[int, list[int]]:
        return self.holds

    def fail(self, error: EngineError) -> None:
        self.failed.append(str(error))


def worker(
    buffer: GroupBuffer, engine: FakeEngine, reward: Callable[..., list[float | None]], **rest: Any
) -> RolloutWorker:
    fakes: Any = (engine, FakeTask())
    return RolloutWorker(
        *fakes,
        RewardRunner([Reward("fake", reward, in_process=True)]),
        buffer,
        Ledger(parameters=1, reward_system="fake"),
        shape=SHAPE,
        decode=str,
        sampling=Sampling(1.0, 4),
        group_size=3,
        seed=0,
        **rest,
    )


def by_sample(completion_ids: list[list[int]], **rest: Any) -> list[float | None]:
    return [float(ids[0]) for ids in completion_ids]


def nothing(completions: list[str], **rest: Any) -> list[float | None]:
    return [None] * len(completions)


def place(rollouts: RolloutWorker) -> tuple[int, list[int]]:
    """Where a checkpoint would go on."""
    position = rollouts.position()
    return position.next_index, position.again


def test_what_an_interrupted_run_had_begun_comes_first_and_is_never_forgotten() -> None:
    buffer, engine = GroupBuffer(1, 1, version=4), FakeEngine()
    engine.silent = True
    rollouts = worker(buffer, engine, by_sample, start=20, again=[11, 13, 17, 19])
    before = 20, [11, 13, 17, 19]
    assert place(rollouts) == before  # a run that is stopped before its first rollout
    rollouts.start()
    while len(engine.asked) < 2:
        time.sleep(0.01)
    assert place(rollouts) == before  # two under way, and no room for the others
    rollouts.stop()
    assert engine.asked == [11, 13] == engine.cancelled


def test_a_checkpoint_at_any_moment_knows_every_group() -> None:
    buffer, engine = GroupBuffer(2, 2), FakeEngine()
    rollouts = worker(buffer, engine, by_sample)
    assert place(rollouts) == (0, [])
    rollouts.start()
    trained: list[Group] = []
    for version in range(1, 60):
        batch = None
        while batch is None:
            batch = buffer.take(0.001)
            seen = rollouts.position()
            known = [*seen.again, *(group.index for group in [*seen.ready, *trained, *(batch or [])])]
            assert sorted(known) == list(range(seen.next_index))
        trained += batch
        buffer.advance(version)
    rollouts.stop()
    for group in trained:  # samples in order, whoever came first
        assert [item.sample for item in group.completions] == [0, 1, 2] == group.rewards
    tokens, _ = rollouts.counters.take()
    assert tokens >= 3 * len(trained) and tokens % 3 == 0
    assert rollouts.counters.take()[0] == 0


def test_a_reward_that_never_scores_ends_the_run_with_its_name() -> None:
    buffer = GroupBuffer(2, 0)
    rollouts = worker(buffer, FakeEngine(), nothing)
    rollouts.start()
    with pytest.raises(RewardError, match=rf"{DISCARD_LIMIT} groups in a row .*since fake returned None"):
        buffer.take(30)
    rollouts.stop()
    assert buffer.discarded.total() == DISCARD_LIMIT


def test_some_groups_without_a_score_are_replaced_and_counted_as_waste() -> None:
    def every_third(completion_ids: list[list[int]], id: list[int], **rest: Any) -> list[float | None]:
        return [None if number % 3 and ids[0] else 1.0 for ids, number in zip(completion_ids, id, strict=True)]

    buffer = GroupBuffer(2, 0)
    rollouts = worker(buffer, FakeEngine(), every_third)
    rollouts.start()
    trained: list[int] = []
    for version in range(1, 30):
        batch = buffer.take(30)
        assert batch is not None
        trained += [group.index for group in batch]
        buffer.advance(version)
    rollouts.stop()
    assert trained == [3 * i for i in range(2 * 29)]
    metrics = rollouts.ledger.step_metrics()
    assert 0.5 * metrics["flops/search"] < metrics["flops/wasted/failed"] < 0.75 * metrics["flops/search"]


def test_stopping_what_was_never_started_does_not_wait() -> None:
    worker(GroupBuffer(1, 0), FakeEngine(), by_sample).stop()


def test_a_failing_engine_reaches_the_learner() -> None:
    class Broken(FakeEngine):
        def poll(self, timeout: float) -> list[Completion]:
            raise OSError("the engine is gone")

    buffer = GroupBuffer(1, 0)
    rollouts = worker(buffer, Broken(), by_sample)
    rollouts.start()
    with pytest.raises(OSError, match="the engine is gone"):
        buffer.take(30)
    rollouts.stop()


def test_requests_that_make_no_sense_are_refused_and_greedy_groups_are_warned_about() -> None:
    for temperature in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(UserError, match=r"must be a number above 0\. For the likeliest tokens: greedy=True"):
            Sampling(temperature, 4)
    with pytest.raises(UserError, match="max_new_tokens=0"):
        Sampling(1.0, 0)
    with pytest.raises(UserError, match="Request 7 asks for 0 samples"):
        Request(7, [1], 0, Sampling(1.0, 4), (0, 0, 0))
    greedy = Sampling(1.0, 4, greedy=True)
    with pytest.warns(UserWarning, match="Request 7 asks for 3 greedy samples, which are all the same"):
        Request(7, [1], 3, greedy, (0, 0, 0))
    Request(8, [1], 1, greedy, (0, 0, 0))


# --- work that is lost ---


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases are looked at in every turn."""
    monkeypatch.setattr(signs, "LOOK", 0.02)


def train(rollouts: RolloutWorker, buffer: GroupBuffer, batches: int) -> list[int]:
    """Take batches; returns the prompts."""
    trained: list[int] = []
    for version in range(1, batches + 1):
        batch = buffer.take(30)
        assert batch is not None
        assert all([item.sample for item in group.completions] == [0, 1, 2] for group in batch)
        trained += [group.prompt.id for group in batch]
        buffer.advance(version)
    return trained


def wasted(rollouts: RolloutWorker, reason: str) -> float:
    return rollouts.ledger.report()["wasted"][reason] / formulas.rollout(SHAPE, 2, [1])


@pytest.mark.usefixtures("hasty")
def test_a_prompt_that_the_engine_forgets_is_asked_for_again_with_the_same_stream() -> None:
    buffer, engine, said = GroupBuffer(2, 0, lease=0.2, attempts=3), FakeEngine(), []
    engine.forgets = {3: 2}
    rollouts = worker(buffer, engine, by_sample, tell=lambda level, text: said.append(text))
    rollouts.start()
    assert train(rollouts, buffer, 4) == list(range(8))
    rollouts.stop()
    assert engine.asked.count(3) == 3 and buffer.regenerated.total() == 2 and not buffer.discarded
    assert len({request.seed for request in engine.requests.values() if request.seed[1] == 3}) == 1
    assert said == ["Prompt 3: no sign of life for 0.2 s (buffer.lease); generated again."] * 2


@pytest.mark.usefixtures("hasty")
def test_a_prompt_that_never_comes_back_is_left_out_by_name_and_another_takes_its_place() -> None:
    buffer, engine, said = GroupBuffer(2, 1, lease=0.2, attempts=2), FakeEngine(), []
    engine.forgets = {3: 99}
    rollouts = worker(buffer, engine, by_sample, tell=lambda level, text: said.append(text))
    rollouts.start()
    assert train(rollouts, buffer, 4) == [0, 1, 2, *range(4, 9)]
    rollouts.stop()
    assert engine.asked.count(3) == 2 and buffer.discarded.total() == 1
    assert "Prompt 3: no sign of life for 0.2 s (buffer.lease), 2 times (buffer.attempts); left out" in said[-1]


@pytest.mark.usefixtures("hasty")
def test_what_a_prompt_without_a_sign_of_life_has_cost_is_counted_when_it_comes_back_cancelled() -> None:
    buffer, engine = GroupBuffer(1, 0, lease=0.2, attempts=9), FakeEngine()
    engine.keeps = {1}
    rollouts = worker(buffer, engine, by_sample)
    rollouts.start()
    first = buffer.take(30)
    assert first is not None
    buffer.advance(1)
    while not rollouts.ledger.report()["wasted"]["lease_expired"]:
        time.sleep(0.01)
    engine.keeps = set()
    assert [group.prompt.id for group in buffer.take(30) or []] == [1]
    rollouts.stop()
    lost = formulas.rollout(SHAPE, 2, [1, 2, 2])
    assert rollouts.ledger.report()["wasted"]["lease_expired"] % lost == 0


@pytest.mark.usefixtures("hasty")
def test_an_engine_that_works_on_nothing_is_replaced_and_not_blamed_on_its_prompts() -> None:
    buffer, engine = GroupBuffer(1, 0, lease=0.1, attempts=9), FakeEngine()
    engine.silent = True
    engine.holds = {0: [3], 1: [3]}  # it has the requests, and gets no further
    rollouts = worker(buffer, engine, by_sample)
    rollouts.start()
    while not engine.failed:
        time.sleep(0.01)
    engine.silent = False
    engine.lost = WorkLost([], {})
    assert train(rollouts, buffer, 2) == [0, 1]
    rollouts.stop()
    assert "nothing has come of its work for 0.1 s" in engine.failed[0]


@pytest.mark.usefixtures("hasty")
def test_an_engine_that_loses_every_prompt_ends_the_run() -> None:
    buffer, engine = GroupBuffer(40, 0, lease=0.1, attempts=1), FakeEngine()
    engine.silent = True
    rollouts = worker(buffer, engine, by_sample)
    rollouts.start()
    with pytest.raises(EngineError, match=rf"{DISCARD_LIMIT} groups in a row .*no sign of life for 0.1 s"):
        buffer.take(30)
    rollouts.stop()


def test_work_that_dies_with_its_engine_is_counted_and_done_again_in_order() -> None:
    buffer, engine = GroupBuffer(2, 1), FakeEngine()
    engine.silent = True
    rollouts = worker(buffer, engine, by_sample)
    rollouts.start()
    while len(engine.asked) < 4:
        time.sleep(0.01)
    of = {request.seed[1]: id for id, request in engine.requests.items()}
    whole = [Completion(of[0], i, [i], "stop", 0, 0) for i in range(3)]
    part = [Completion(of[1], 2, [5, 5], "stop", 0, 0)]
    engine.silent = False
    engine.lost = WorkLost([*whole, *part], {of[1]: [4], of[2]: [], of[3]: [6, 6, 6], 99: [1]})
    assert train(rollouts, buffer, 3) == list(range(6))
    rollouts.stop()
    assert engine.asked[:8] == [0, 1, 2, 3, 1, 2, 3, 4], "group 0 had arrived"
    assert buffer.regenerated == {"engine restarted": 3} and not buffer.discarded
    expected = formulas.rollout(SHAPE, 2, [2, 4]) + formulas.rollout(SHAPE, 2, [6, 6, 6])
    report = rollouts.ledger.report()
    assert report["wasted"]["engine_death"] == expected
    assert report["flops"]["search"] >= 6 * formulas.rollout(SHAPE, 2, [1, 1, 1]) + expected


def test_an_attempt_that_is_lost_pays_no_prefill_or_one_that_was_told_pays_it_twice() -> None:
    prompt = Prompt(0, 0, list(range(9)), "")

    def done(ids: list[int], *prefills: int) -> Completion:
        return Completion(0, 0, ids, "stop", 0, 0, prefills=list(prefills))

    answers = [done([1, 2], 8), done([1])]
    assert Cost.of(prompt, answers, [4]) == Cost(9, [2, 1, 4], [8])
    assert Cost.of(prompt, [done([1, 2]), done([1], 3, 8)]).prefills == [3, 8]
    assert Cost.of(prompt, [done([1, 2])]).prefills == [8]  # an engine that does not tell
    assert Cost.of(prompt, [], [0, 0]).prefills == [8]  # it has begun
    assert Cost.of(prompt, [done([])]).prefills == [] == Cost.of(prompt, []).prefills  # it has not
    assert Cost.of(prompt, [done([], 5)]).flops(SHAPE) == formulas.layers(SHAPE, 5)


def test_an_answer_that_is_left_out_is_wasted_twice() -> None:
    def without_the_last(completion_ids: list[list[int]], **rest: Any) -> list[float | None]:
        return [None if ids[0] == 2 else 1.0 for ids in completion_ids]

    buffer = GroupBuffer(1, 0)
    rollouts = worker(buffer, FakeEngine(), without_the_last)
    rollouts.start()
    (group,) = buffer.take(30) or []
    rollouts.stop()
    one = formulas.rollout(SHAPE, 2, [1], [])
    assert rollouts.ledger.report()["wasted"]["failed"] == one
    assert rollouts.unwasted_flops(group) == formulas.rollout(SHAPE, 2, [1, 1]) == rollouts.search_flops(group) - one


def test_a_group_with_an_answer_that_the_engine_cancelled_is_never_trained_on() -> None:
    class Cancels(FakeEngine):
        def submit(self, requests: Sequence[Request]) -> None:
            first = not self.asked
            super().submit(requests)
            if first:
                self.done[0] = Completion(self.done[0].request_id, 2, [], "cancelled", 0, 0)

    buffer, engine = GroupBuffer(1, 0, attempts=2), Cancels()
    rollouts = worker(buffer, engine, by_sample)
    rollouts.start()
    assert train(rollouts, buffer, 2) == [0, 1]
    rollouts.stop()
    assert engine.asked[:3] == [0, 0, 1] and wasted(rollouts, "failed") > 0

    buffer, engine = GroupBuffer(1, 0, attempts=1), Cancels()
    rollouts = worker(buffer, engine, by_sample)
    rollouts.start()
    assert train(rollouts, buffer, 2) == [1, 2]
    rollouts.stop()
    assert buffer.discarded == {"cancelled by the engine": 1}


def test_what_a_stopped_run_had_under_way_is_counted_even_when_the_engine_is_dead() -> None:
    buffer, engine = GroupBuffer(1, 0), FakeEngine()
    engine.keeps = {0}
    rollouts = worker(buffer, engine, by_sample)
    rollouts.start()
    while engine.done or not engine.asked:
        time.sleep(0.01)

    def cancel(ids: Sequence[int]) -> None:
        raise WorkLost([], {0: [3]})

    engine.cancel = cancel  # type: ignore[method-assign]
    rollouts.stop()
    assert rollouts.ledger.report()["wasted"]["cancelled"] == formulas.rollout(SHAPE, 2, [1, 3])


def test_signs_of_life_come_from_completions_and_from_what_the_engine_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Signs()
    assert seen.of_life({1: [3], 2: [], 3: [1]}) == {1, 2, 3}
    assert seen.of_life({1: [4], 2: [], 3: [1]}) == {1, 2}, "3 is stuck, 2 waits behind 1"
    assert seen.of_life({1: [4], 2: [], 3: [1]}) == set(), "nothing moves, so nobody waits for his turn"
    seen.came(3)
    assert seen.of_life({1: [4], 2: []}) == {2, 3}
    monkeypatch.setattr(signs, "LOOK", 0.01)
    seen._looked -= 100  # this process was stopped
    assert seen.passed() == 0.02 == seen.silent_for
