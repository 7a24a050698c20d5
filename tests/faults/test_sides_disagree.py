"""Two sides disagree: what a refit leaves out is made good by a new engine; what differs afterwards ends the run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from drill import drill
from run_files import same, weights

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("skip_scales", r"14 of \d+ announced tensors never arrived, first .*_scale_inv"),
        ("partial_refit", r"\d+ of \d+ announced tensors never arrived, first model"),
    ],
)
def test_a_refit_that_leaves_something_out_is_named_and_done_again(fault: str, said: str, tmp_path: Path) -> None:
    sound = drill(tmp_path / "sound")
    outcome = drill(tmp_path / "run", engine={"fault": f"{fault}:2"})
    outcome.assert_done(3)
    assert outcome.restarts == 1 and any(re.search(said, text) for text in outcome.messages)
    assert same(weights(outcome.run_dir), weights(sound.run_dir))
    assert all(step["mismatch/max_abs"] == 0 for step in outcome.steps)

    lasting = drill(tmp_path / "lasting", engine={"fault": f"{fault}:2:always", "restarts": 1})
    lasting.assert_ended_with("restarted once in a row (engine.restarts=1) and failed again", steps=2)
    assert re.search(said, str(lasting.error))


@pytest.mark.parametrize(
    ("fault", "said", "temperature"),
    [
        ("permute_after_refit", "prompts that it never saw differ too", 1.0),
        ("raw_logprobs", "without the division by sampling.temperature=0.7", 0.7),
    ],
)
def test_logprobs_that_differ_end_the_run_at_once(fault: str, said: str, temperature: float, tmp_path: Path) -> None:
    outcome = drill(
        tmp_path / "run",
        engine={"fault": f"{fault}:2"},
        sampling={"max_new_tokens": 20, "temperature": temperature},
    )
    outcome.assert_ended_with(said, steps=2)
    assert outcome.restarts == 0 and "At version 2 trainer and engine differ" in str(outcome.error)
