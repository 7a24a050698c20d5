from __future__ import annotations

import random
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trtl_rl.buffer import GroupBuffer
from trtl_rl.rollout import Group, Prompt


def group(index: int) -> Group:
    return Group(index, -1, Prompt(index, 0, [1], ""))


class Simulation:
    """A rollout side and a learner that take turns by chance, without threads."""

    def __init__(self, batch: int, staleness: int, chances: random.Random, discard: float, lost: float) -> None:
        self.buffer = GroupBuffer(batch, staleness)
        self.lost = lost
        self.staleness, self.chances, self.discard = staleness, chances, discard
        self.version = self.next = 0
        self.in_flight: list[Group] = []
        self.started: list[int] = []
        self.discarded: list[int] = []
        self.trained: list[list[Group]] = []

    def start(self) -> None:
        for _ in range(self.chances.randint(0, self.buffer.room())):
            new = group(self.next)
            self.buffer.start(new)
            assert new.version == self.version
            self.in_flight.append(new)
            self.started.append(self.next)
            self.next += 1

    def end_one(self) -> None:
        if not self.in_flight:
            return
        ended = self.in_flight.pop(self.chances.randrange(len(self.in_flight)))
        if self.chances.random() < self.lost:  # with its engine
            self.buffer.give_back(ended, "engine restarted")
            self.in_flight.append(ended)
        elif self.chances.random() < self.discard:
            self.buffer.discard(ended, "no score")
            self.discarded.append(ended.index)
        else:
            self.buffer.complete(ended)

    def learn(self) -> None:
        taken = self.buffer.take(0)
        if taken is not None:
            self.trained.append(taken)
            assert len(taken) == self.buffer.batch
            assert all(0 <= self.version - item.version <= self.staleness for item in taken)
            assert [item.index for item in taken] == sorted(item.index for item in taken)
            self.version += 1
            self.buffer.advance(self.version)

    def run(self, batches: int) -> None:
        for _ in range(200 * batches * self.buffer.batch):
            if len(self.trained) == batches:
                return
            self.chances.choice([self.start, self.end_one, self.end_one, self.learn])()
        raise AssertionError(f"no progress: {self.buffer.counts()}, room {self.buffer.room()}")


@settings(max_examples=150, deadline=None)
@given(
    batch=st.integers(1, 5),
    staleness=st.integers(0, 4),
    seed=st.integers(0, 2**32),
    discard=st.sampled_from([0.0, 0.2, 0.6]),
    lost=st.sampled_from([0.0, 0.5]),
)
def test_no_group_is_too_stale_lost_or_trained_twice(
    batch: int, staleness: int, seed: int, discard: float, lost: float
) -> None:
    run = Simulation(batch, staleness, random.Random(seed), discard, lost)
    run.run(batches=12)
    trained = [item.index for part in run.trained for item in part]
    left = [item.index for item in run.buffer.untrained()]
    assert sorted([*trained, *left, *run.discarded]) == run.started
    assert run.buffer.discarded.total() == len(run.discarded)
    # every discarded group is replaced, so that what may be started never shrinks
    assert len(run.started) - len(run.discarded) + run.buffer.room() == (12 + staleness + 1) * batch
    if staleness == 0:
        kept = [index for index in run.started if index not in run.discarded]
        assert trained == kept[: len(trained)]


@given(batch=st.integers(1, 4), staleness=st.integers(0, 3))
def test_no_more_is_started_than_can_be_trained_in_time(batch: int, staleness: int) -> None:
    buffer = GroupBuffer(batch, staleness)
    groups = [group(i) for i in range((staleness + 1) * batch)]
    for item in groups:
        buffer.start(item)
    assert buffer.room() == 0 and not buffer.wait_for_room(0)
    with pytest.raises(AssertionError):
        buffer.start(group(99))
    buffer.discard(groups[-1], "no score")
    assert buffer.room() == 1 and buffer.wait_for_room(0)


def test_a_batch_waits_for_the_group_that_would_be_too_stale_for_the_next() -> None:
    buffer = GroupBuffer(2, 1)
    slow, *rest = (group(i) for i in range(4))
    for item in (slow, *rest):
        buffer.start(item)
    for item in rest:
        buffer.complete(item)
    first = buffer.take(0)  # three are ready, none is due
    assert first is not None and [item.index for item in first] == [1, 2]
    buffer.advance(1)
    for index in (4, 5):
        late = group(index)
        buffer.start(late)
        buffer.complete(late)
    assert buffer.counts() == {"ready": 3, "in_flight": 1, "discarded": 0, "regenerated": 0}
    assert buffer.take(0) is None  # two are ready, but group 0 would be two versions old in the batch after this
    buffer.complete(slow)
    second = buffer.take(0)
    assert second is not None and [item.index for item in second] == [0, 3]


def test_a_batch_that_waits_gets_the_group_that_comes() -> None:
    buffer = GroupBuffer(1, 0)
    late = group(0)
    buffer.start(late)
    timer = threading.Timer(0.05, buffer.complete, [late])
    timer.start()
    assert buffer.take(30) == [late]
    begun = time.monotonic()
    assert buffer.take(0.05) is None
    assert 0.04 <= time.monotonic() - begun < 5


def test_a_failure_reaches_the_learner_that_waits() -> None:
    buffer = GroupBuffer(1, 0)
    threading.Timer(0.05, buffer.fail, [KeyError("the engine is gone")]).start()
    begun = time.monotonic()
    with pytest.raises(KeyError, match="the engine is gone"):
        buffer.take(30)
    assert time.monotonic() - begun < 10
    with pytest.raises(KeyError):  # and whoever asks later
        buffer.take(0)


def test_versions_follow_one_another() -> None:
    buffer = GroupBuffer(1, 0, version=7)
    with pytest.raises(AssertionError, match="follow"):
        buffer.advance(9)
    buffer.advance(8)
    new = group(0)
    buffer.start(new)
    assert new.version == 8


def test_what_is_not_trained_is_known_whether_ready_or_under_way() -> None:
    buffer = GroupBuffer(2, 1)
    groups = [group(i) for i in range(4)]
    for item in groups:
        buffer.start(item)
    for i in (3, 1, 0):
        buffer.complete(groups[i])
    assert [item.index for item in buffer.untrained()] == [0, 1, 2, 3]
    taken = buffer.take(0)
    assert taken == [groups[0], groups[1]]
    assert [item.index for item in buffer.untrained()] == [2, 3]


def test_the_end_of_a_run_starts_no_group_that_nobody_trains_on() -> None:
    buffer = GroupBuffer(2, 3, needed=5)
    started = []
    while buffer.room():
        started.append(group(len(started)))
        buffer.start(started[-1])
    assert len(started) == 5, "eight would fit the staleness"
    buffer.discard(started[0], "test")
    assert buffer.room() == 1, "a discarded group is replaced"


def test_a_prompt_without_a_sign_of_life_is_generated_again_and_in_the_end_left_out() -> None:
    buffer = GroupBuffer(2, 0, lease=10, attempts=2)
    lost, slow = group(0), group(1)
    for item in (lost, slow):
        buffer.start(item)
    assert buffer.expired(6) == []
    buffer.renew([1])
    assert [(item.index, silent) for item, silent in buffer.in_flight()] == [(0, 6), (1, 0)]
    assert buffer.expired(6) == [lost]
    assert buffer.give_back(lost, "lost", blame=True)
    assert buffer.room() == 0 and lost.version == 0, "it stays admitted"
    buffer.renew([1])
    assert buffer.expired(9) == [], "each attempt has a whole lease"
    buffer.renew([1])
    assert buffer.expired(2) == [lost]
    assert not buffer.give_back(lost, "lost", blame=True)
    buffer.discard(lost, "lost")
    assert buffer.room() == 1 and buffer.expired(9) == [slow]
    buffer.complete(slow)
    assert buffer.expired(99) == [], "what is ready has no lease"
    assert buffer.discarded == {"lost": 1} == buffer.regenerated


def test_an_engine_that_dies_while_a_prompt_is_in_flight_is_not_the_prompts_fault() -> None:
    buffer = GroupBuffer(1, 0, lease=10, attempts=2)
    item = group(0)
    buffer.start(item)
    for _ in range(5):
        assert buffer.expired(9) == []
        assert buffer.give_back(item, "engine restarted")
    assert buffer.regenerated["engine restarted"] == 5
