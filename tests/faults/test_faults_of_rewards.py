"""Rewards: one that raises, or returns nothing, NaN, or the wrong number. One that hangs: see waiting for ever."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from drill import drill
from run_files import digits

from trtl_rl.errors import RewardError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def from_call(number: int, wrong: Callable[[list[float]], Any]) -> Callable[..., Any]:
    """A reward called ``judge`` whose results are changed by ``wrong`` from its ``number``-th call on."""
    calls: list[int] = []

    def judge(completions: list[str], completion_ids: list[list[int]], answer: list[str], **rest: Any) -> Any:
        calls.append(len(completions))
        values = digits(completions, completion_ids, answer)
        return wrong(values) if len(calls) >= number else values

    return judge


def explode(values: list[float]) -> list[float]:
    raise ZeroDivisionError("the judge divides by zero")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (explode, "ZeroDivisionError: the judge divides by zero"),
        (lambda values: None, "returned NoneType on prompt"),
        (lambda values: [float("nan"), *values[1:]], "returned nan"),
        (lambda values: values[1:], "there are 4 completions"),
        (lambda values: "1.0", "returned str on prompt"),
    ],
)
def test_a_reward_that_fails_ends_the_run_with_its_name_and_keeps_the_steps_before(
    wrong: Callable[[list[float]], Any], said: str, tmp_path: Path
) -> None:
    outcome = drill(tmp_path / "run", reward=from_call(5, wrong), steps=50)
    assert isinstance(outcome.error, RewardError) and "Reward 'judge'" in str(outcome.error)
    assert 1 <= len(outcome.steps) <= 5
    outcome.assert_ended_with(said, steps=len(outcome.steps))


def test_answers_that_a_reward_cannot_judge_are_left_out_and_counted(tmp_path: Path) -> None:
    def only_some(values: list[float]) -> list[float | None]:
        return [None if i % 4 == 3 else value for i, value in enumerate(values)]

    outcome = drill(tmp_path / "run", reward=from_call(1, only_some))
    outcome.assert_done(3)

    outcome = drill(tmp_path / "none", reward=from_call(1, lambda values: [None for _ in values]), steps=3)
    outcome.assert_ended_with("32 groups in a row had to be left out", steps=0)
    assert "judge returned None" in str(outcome.error)
