"""Prompts that teach: groups without signal are refilled or passed over, and both are counted with their FLOPs."""

from __future__ import annotations

from typing import Any

import pytest
from test_rollouts import FakeEngine, FakeTask, worker

from trtl_rl.buffer import GroupBuffer
from trtl_rl.config import validate_config
from trtl_rl.errors import UserError
from trtl_rl.trainer.teaching import Teaching


def every_third(completion_ids: list[list[int]], id: list[int], **rest: Any) -> list[float | None]:
    """Signal in every third prompt; the first prompt is solved, the second never."""
    return [
        ids[0] / 2 if number % 3 == 0 else float(number % 3 == 1)
        for ids, number in zip(completion_ids, id, strict=True)
    ]


def test_groups_without_signal_are_refilled_in_the_same_order_every_time() -> None:
    config = validate_config({"batch": {"prompts": 2, "zero_signal": "refill"}})
    for _ in range(3):
        buffer, engine = GroupBuffer(2, 0, needed=20), FakeEngine()
        rollouts = worker(buffer, engine, every_third, teaching=Teaching(config))
        rollouts.start()
        trained: list[int] = []
        for version in range(1, 11):
            batch = buffer.take(30)
            assert batch is not None and all(group.has_signal() for group in batch)
            trained += [group.index for group in batch]
            buffer.advance(version)
        rollouts.stop()
        assert trained == [3 * i for i in range(20)]
        metrics = rollouts.teaching.take_metrics()
        assert metrics["sampling/refilled_groups"] == 2 * 19
        flops = rollouts.ledger.step_metrics()
        assert (
            metrics["sampling/refilled_flops"] == flops["flops/wasted/zero_signal"] == flops["flops/search"] * 38 / 58
        )
        assert rollouts.teaching.take_metrics()["sampling/refilled_groups"] == 0


def test_a_run_in_which_nothing_can_be_learned_does_not_generate_for_ever() -> None:
    def constant(completions: list[str], **rest: Any) -> list[float | None]:
        return [1.0] * len(completions)

    config = validate_config({"batch": {"prompts": 2, "zero_signal": "refill", "refill_limit": 3}})
    buffer = GroupBuffer(2, 0)
    rollouts = worker(buffer, FakeEngine(), constant, teaching=Teaching(config))
    rollouts.start()
    assert [group.index for group in buffer.take(30) or []] == [6, 7]  # after three batches, for the loop to see
    rollouts.stop()
    assert buffer.discarded == {"no signal": 6}


class Epochs(FakeTask):
    """Nine prompts, over and over."""

    def order(self, seed: int) -> Epochs:
        return self

    def at(self, index: int) -> tuple[int, int]:
        return index % 9, index // 9


def test_prompts_are_passed_over_once_by_their_last_reward_and_then_tried_again() -> None:
    config = validate_config({"batch": {"prompts": 9}, "task": {"skip_below": 0.0, "skip_above": 1.0}})
    buffer, engine = GroupBuffer(9, 0), FakeEngine()
    rollouts = worker(buffer, engine, every_third, teaching=Teaching(config))
    rollouts.task = Epochs()  # type: ignore[assignment]
    rollouts._order = Epochs()
    rollouts.start()

    def batch(version: int) -> list[int]:
        groups = buffer.take(30)
        assert groups is not None
        buffer.advance(version)
        return [group.index for group in groups]

    assert batch(1) == list(range(9))
    # epoch 1: prompts 0, 3, 6 have a mean within the limits; epoch 2: all again
    assert batch(2) == [9, 12, 15, *range(18, 24)]
    kept = rollouts.teaching.state()
    taken = rollouts.teaching.take_metrics()
    assert taken["sampling/skipped_prompts"] == 6 and taken["sampling/skipped_flops"] > 0
    rollouts.stop()
    resumed = Teaching(config, kept)
    assert resumed.skips(1, kept["1"][0] + 1) and not resumed.skips(1, kept["1"][0] + 2) and not resumed.skips(0, 1)


def test_keys_that_cannot_act_are_refused() -> None:
    with pytest.raises(UserError, match=r"batch\.refill_limit belongs to batch\.zero_signal=refill"):
        validate_config({"batch": {"refill_limit": 3}})
    with pytest.raises(UserError, match=r"task\.skip_below=1 must be less than task\.skip_above=0"):
        validate_config({"task": {"skip_below": 1, "skip_above": 0}})
    assert Teaching(validate_config({})).take_metrics() == {}
