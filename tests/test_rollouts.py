from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from trtl_rl.buffer import GroupBuffer
from trtl_rl.errors import RewardError, UserError
from trtl_rl.flops.formulas import ModelShape
from trtl_rl.flops.ledger import Ledger
from trtl_rl.rewards.reward import Reward
from trtl_rl.rewards.runner import RewardRunner
from trtl_rl.rollout import Completion, Group, Prompt, Request, Sampling
from trtl_rl.trainer.rollouts import DISCARD_LIMIT, RolloutWorker

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
    """Answers every request at once, the last sample first; a silent one never answers."""

    silent = False

    def __init__(self) -> None:
        self.done: list[Completion] = []
        self.asked: list[int] = []
        self.cancelled: list[int] = []

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.asked.append(request.id)
            if not self.silent:
                self.done += [Completion(request.id, i, [i], "stop", 0, 0) for i in reversed(range(request.samples))]

    def poll(self, timeout: float) -> list[Completion]:
        done, self.done = self.done, []
        if not done:
            time.sleep(timeout)
        return done

    def cancel(self, ids: Sequence[int]) -> None:
        self.cancelled += ids


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


def test_what_an_interrupted_run_had_begun_comes_first_and_is_never_forgotten() -> None:
    buffer, engine = GroupBuffer(1, 1, version=4), FakeEngine()
    engine.silent = True
    rollouts = worker(buffer, engine, by_sample, start=20, again=[11, 13, 17, 19])
    before = {"next_index": 20, "untrained": [11, 13, 17, 19], "untrained_flops": 0, "recent_prompts": {}}
    assert rollouts.position() == before  # a run that is stopped before its first rollout
    rollouts.start()
    while len(engine.asked) < 2:
        time.sleep(0.01)
    assert rollouts.position() == before  # two under way, and no room for the others
    rollouts.stop()
    assert engine.asked == [11, 13] == engine.cancelled


def test_a_checkpoint_at_any_moment_knows_every_group() -> None:
    buffer, engine = GroupBuffer(2, 2), FakeEngine()
    rollouts = worker(buffer, engine, by_sample)
    assert rollouts.position() == {"next_index": 0, "untrained": [], "untrained_flops": 0, "recent_prompts": {}}
    rollouts.start()
    trained: list[Group] = []
    for version in range(1, 60):
        batch = None
        while batch is None:
            batch = buffer.take(0.001)
            seen = rollouts.position()
            known = [*seen["untrained"], *(group.index for group in [*trained, *(batch or [])])]
            assert sorted(known) == list(range(seen["next_index"]))
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
    with pytest.raises(RewardError, match=rf"{DISCARD_LIMIT} groups in a row .*: fake returned None"):
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
