"""What tests of whole runs share: reading a run directory, watching what was trained, a reward."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from trtl_rl.metrics import read_rows
from trtl_rl.rollout import Group
from trtl_rl.trainer.learner import Learner

ROOT = Path(__file__).resolve().parent.parent
STEPS = 6


def rows_of(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    return [row for row in read_rows(run_dir / "metrics.jsonl") if row["kind"] == kind]


def metrics_of(run_dir: Path) -> list[dict[str, float]]:
    """Metrics by step, without times and speeds, which no two runs share."""
    timed = ("timing_s/", "perf/")
    steps = [row["metrics"] for row in rows_of(run_dir, "step")]
    return [{name: value for name, value in step.items() if not name.startswith(timed)} for step in steps]


def checkpoints(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir() if path.name != "latest")


def weights(run_dir: Path) -> dict[str, Tensor]:
    """Of the newest checkpoint."""
    return load_file(run_dir / "checkpoints" / checkpoints(run_dir)[-1] / "model.safetensors")


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


class Trained:
    """Records which groups every update got."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.groups: list[list[Group]] = []
        update = Learner.update

        def recorded(learner: Learner, groups: Sequence[Group], version: int) -> Any:
            self.groups.append(list(groups))
            return update(learner, groups, version)

        patch.setattr(Learner, "update", recorded)

    @property
    def indices(self) -> list[int]:
        return [group.index for groups in self.groups for group in groups]


def digits(completions: list[str], completion_ids: list[list[int]], answer: list[str], **rest: Any) -> list[float]:
    """A reward that nearly always differs within a group."""
    return [
        len(ids) / 100 + float(text == gold)
        for text, ids, gold in zip(completions, completion_ids, answer, strict=True)
    ]
