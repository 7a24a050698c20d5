"""Groups and metrics: groups without a signal are told of and end the run; what is logged is what is optimised."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from drill import drill
from run_files import Trained, digits, rows_of

from trtl_rl.trainer.loop import NO_SIGNAL_LIMIT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def test_rewards_that_are_all_equal_are_told_of_and_end_the_run(tmp_path: Path) -> None:
    def constant(completions: list[str], **rest: Any) -> list[float]:
        return [1.0] * len(completions)

    outcome = drill(tmp_path / "run", reward=constant, steps=50)
    assert outcome.error is None and len(outcome.steps) == NO_SIGNAL_LIMIT
    assert any("all rewards are equal, so the loss is 0" in text for text in outcome.messages)
    (end,) = rows_of(outcome.run_dir, "end")
    assert "no group had answers of different reward" in end["text"]
    for step in outcome.steps:
        assert step["flops/wasted/zero_signal"] > 0 and step["flops/learning"] == 0


def test_the_reward_that_is_logged_is_the_one_that_is_optimised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = Trained(monkeypatch)
    outcome = drill(tmp_path / "run", reward=digits)
    outcome.assert_done(3)
    for groups, step in zip(trained.groups, outcome.steps, strict=True):
        rewards = [reward for group in groups for _, reward in group.scored()]
        assert step["reward"] == pytest.approx(sum(rewards) / len(rewards), rel=1e-6)
