from __future__ import annotations

import threading

import pytest

from trtl_rl.buffer import GroupBuffer
from trtl_rl.rollout import Group, Prompt
from trtl_rl.trainer import watchdog
from trtl_rl.trainer.watchdog import Watchdog, missing_groups


def test_a_step_that_hangs_is_told_of_with_its_stage_and_again_when_it_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "STALL_SECONDS", 0.1)
    said: list[str] = []
    told = threading.Event()

    def tell(level: str, text: str) -> None:
        said.append(text)
        if len(said) == 2:
            told.set()

    with Watchdog(lambda stage: f"The learner is at: {stage}.", first=0.1, tell=tell) as dog:
        with dog.stage("refit: move"), dog.stage("refit: finish"):
            assert told.wait(20)
        with dog.stage("between"):
            pass
    assert all("The learner is at: refit: finish." in text for text in said)
    assert said[0].startswith("No step for 0 s")


def test_the_limit_follows_the_median_step() -> None:
    dog = Watchdog(str, first=600, tell=print)
    dog.step_done()  # an evaluation before any step
    assert dog._limit == 600
    for seconds in (1.0, 4.0, 400.0):
        dog.step_done(seconds)
    assert dog._limit == watchdog.STALL_FACTOR * 4.0
    dog._silent = 5.0
    for _ in range(3):
        dog.step_done(0.1)
    assert dog._limit == watchdog.STALL_SECONDS and dog._silent == 0


def test_what_is_missing_names_the_prompts_that_are_due_first() -> None:
    buffer = GroupBuffer(2, 2, lease=100)
    for index in range(6):
        buffer.start(Group(index, -1, Prompt(index + 40, 0, [1], "")))
    for group, _ in buffer.in_flight()[4:]:
        buffer.complete(group)
    buffer.expired(30)
    buffer.renew([1])
    text = missing_groups(buffer, 8, {1: [5, 6], 2: []})
    assert text.startswith("2 groups are ready, 2 make a batch, 4 are in flight: ")
    assert "prompt 40 (not seen in the engine, no sign of life for 30 s)" in text
    assert "prompt 41 (2 of 8 answers under way, no sign of life for 0 s)" in text
    assert "prompt 42 (0 of 8 answers under way, no sign of life for 30 s)" in text
