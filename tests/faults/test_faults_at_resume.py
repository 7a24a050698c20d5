"""Resume: what a failed engine leaves behind is a run that goes on as if nothing had happened.

Kills of the trainer's own process, torn checkpoints and full disks: see the tests of checkpoints.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from demo import small
from drill import drill
from run_files import rows_of, same, weights

from trtl_rl import Trainer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def test_a_run_that_its_engine_ended_resumes_to_the_same_weights_with_a_sound_engine(tmp_path: Path) -> None:
    sound = drill(tmp_path / "sound")
    outcome = drill(tmp_path / "run", engine={"fault": "die_at_step:2", "restarts": 0})
    outcome.assert_ended_with("status -9", steps=1)
    resumed = Trainer(args=small(outcome.run_dir), resume=True).train()
    assert resumed.step == 3
    steps = [row["metrics"] for row in rows_of(outcome.run_dir, "step")]
    assert len(steps) == 3
    assert all(step["mismatch/max_abs"] == 0 for step in steps[1:]), "the engine has the resumed weights"
    assert all(step["off_policy/max"] == 0 for step in steps)
    assert same(weights(outcome.run_dir), weights(sound.run_dir))
