"""A run on a real disk that becomes full."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from demo import small
from run_files import checkpoints, digits, rows_of

from trtl_rl import Trainer
from trtl_rl.errors import DiskError
from trtl_rl.trainer import checkpoint


@pytest.fixture
def little(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for two checkpoints of the demo (4.2 MB each), not for three."""
    place = tmp_path / "little"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=11m", "none", str(place)]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("this user cannot mount a small file system")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.slow
def test_a_full_disk_stops_no_step_and_the_last_whole_checkpoint_is_kept(little: Path, tmp_path: Path) -> None:
    run_dir = little / "run"
    config = small(run_dir, steps=8, recipe="none", checkpoint={"every": 2, "keep": 2}, parity={"every": 0})
    with pytest.raises(DiskError, match=r"The checkpoint of step 8 could not be written: .*Kept: .*/step-00000004\."):
        Trainer(reward_funcs=digits, args=config).train()
    assert [row["step"] for row in rows_of(run_dir, "step")] == list(range(1, 9)), "the run went on"
    (text,) = [row["text"] for row in rows_of(run_dir, "message") if row["level"] == "warning"]
    assert "The checkpoint of step 6 could not be written" in text and "The run goes on" in text
    assert "step-00000004" in rows_of(run_dir, "end")[-1]["text"]
    assert checkpoints(run_dir) == ["step-00000002", "step-00000004"], "nothing half written stays"
    assert checkpoint.newest(run_dir / "checkpoints") == (run_dir / "checkpoints" / "step-00000004", [])

    config = config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"keep": 1})})
    assert Trainer(reward_funcs=digits, args=config, resume=True).train().step == 8
    assert checkpoints(run_dir) == ["step-00000008"], "with fewer kept there is room"
