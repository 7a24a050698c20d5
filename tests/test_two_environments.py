"""Trainer and engine in two Python environments with two versions of torch; run where there is a second one.

``TRTL_RL_OTHER_PYTHON`` names its interpreter, which needs torch, numpy, xxhash and safetensors (see CONTRIBUTING.md).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from demo import small
from run_files import metrics_of, rows_of

from trtl_rl.engines.environment import read_environment
from trtl_rl.errors import UserError
from trtl_rl.trainer.trainer import Trainer

OTHER = os.environ.get("TRTL_RL_OTHER_PYTHON", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),  # both sides may have to compile their operators
    pytest.mark.skipif(not OTHER, reason="TRTL_RL_OTHER_PYTHON names no Python environment with another torch"),
]


def torches() -> tuple[str, str]:
    """The trainer's version, and the engine's."""
    ours, theirs = (read_environment(python).versions["torch"] for python in (None, OTHER))
    assert ours != theirs, f"{OTHER} has the trainer's torch {ours}: nothing is shown with it"
    return ours, theirs


def test_another_torch_is_refused_where_equal_bits_are_demanded(tmp_path: Path) -> None:
    ours, theirs = torches()
    with pytest.raises(UserError, match=r"parity\.stop=0 demands equal bits") as refused:
        Trainer(args=small(tmp_path / "run", engine={"python": OTHER})).train()
    assert ours in str(refused.value) and theirs in str(refused.value)
    assert not (tmp_path / "run" / "logs" / "engine.log").exists(), "before an engine was started"


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_run_with_another_torch_says_so_and_measures_the_difference(compiled: bool, tmp_path: Path) -> None:
    ours, theirs = torches()
    keys: dict[str, Any] = {
        "steps": 5,
        "batch": {"prompts": 4, "group_size": 4},
        "engine": {"python": OTHER, "timeout": 1500},
        "parity": {"every": 1, "prompts": 8, "stop": None},
    }
    config = small(tmp_path / "run", compile=compiled, **keys)
    assert Trainer(args=config).train().step == 5
    said = [row for row in rows_of(tmp_path / "run", "message") if "operators are not the trainer's" in row["text"]]
    assert len(said) == 1 and said[0]["level"] == "warning"
    assert f"torch {theirs}" in said[0]["text"] and f"{ours.partition('+')[0]}" in said[0]["text"]

    steps = metrics_of(tmp_path / "run")
    probed = [step for step in steps if "mismatch/tokens" in step]
    tokens, differing = (sum(step[f"mismatch/{name}"] for step in probed) for name in ("tokens", "differing_tokens"))
    largest = max(step["mismatch/max_abs"] for step in probed)
    print(
        f"\ntorch {ours} trains, {theirs} generates: {differing:.0f} of {tokens:.0f} logprobs differ, by {largest:.3g} at most"
    )
    assert tokens > 100
    # New weights every step: an engine that kept old ones would be off by far more than rounding that FP8 magnifies.
    assert sum(step["refit/changed_frac"] > 0 for step in steps) >= 3
    assert largest < 0.3
