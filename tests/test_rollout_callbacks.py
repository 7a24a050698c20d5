"""``on_group``: called outside of the rollout thread's lock, one group after another, before anybody trains on the group."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future

from test_rollouts import FakeEngine, by_sample, worker

from trtl_rl.buffer import GroupBuffer
from trtl_rl.rewards.reward import Sample, ScoredBatch
from trtl_rl.rollout import Group


def test_a_callback_that_looks_long_at_a_group_holds_up_no_checkpoint_and_is_waited_for_at_a_stop() -> None:
    looking, release, told = threading.Event(), threading.Event(), list[int]()

    def on_group(group: Group) -> None:
        looking.set()
        assert release.wait(30)
        told.append(group.index)

    buffer = GroupBuffer(1, 2)
    rollouts = worker(buffer, FakeEngine(), by_sample, on_group=on_group)
    rollouts.start()
    assert looking.wait(10)
    position = rollouts.position()  # the group is charged: it is among those that a resume need not generate again
    assert [group.index for group in position.ready] == [0] and 0 not in position.again
    assert position.ledger["flops"]["search"] == rollouts.search_flops(position.ready[0])
    assert buffer.take(0) is None  # nobody trains on it before the callback has seen it
    stopping = threading.Thread(target=rollouts.stop)
    stopping.start()
    stopping.join(0.2)
    assert stopping.is_alive() and told == []
    release.set()
    stopping.join(10)
    assert not stopping.is_alive() and told == sorted(told) and told[0] == 0
    assert [group.index for group in buffer.ready()] == told


def test_callbacks_see_one_group_after_another_though_several_threads_score() -> None:
    inside, order, lock = list[int](), list[int](), threading.Lock()

    def on_group(group: Group) -> None:
        with lock:
            inside.append(group.index)
            assert len(inside) == 1
        time.sleep(0.001)
        with lock:
            inside.clear()
        order.append(group.index)

    buffer = GroupBuffer(4, 3)
    rollouts = worker(buffer, FakeEngine(), by_sample, on_group=on_group)
    submit = rollouts.rewards.submit

    def submit_and_answer_in_another_thread(samples: Sequence[Sample]) -> Future[ScoredBatch]:
        answered = Future[ScoredBatch]()
        threading.Thread(target=lambda: answered.set_result(submit(samples).result())).start()
        return answered

    rollouts.rewards.submit = submit_and_answer_in_another_thread  # type: ignore[method-assign]
    rollouts.start()
    for _ in range(4):
        assert buffer.take(30)
    rollouts.stop()
    assert sorted(order)[:16] == list(range(16))
