"""Checkpoints: written beside, renamed when whole, so that the newest directory without ``.partial`` is a whole one.

A checkpoint holds Accelerate's state (weights as safetensors, optimizer, schedule), the recipe's text, and ``state.json``:
step, counters, ledger, and which prompts were started but not trained on.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtl_rl.errors import UserError

if TYPE_CHECKING:
    from accelerate import Accelerator

_FORMAT = 1


def save(directory: Path, accelerator: Accelerator, state: dict[str, Any], recipe: str, keep: int) -> Path:
    """Write ``directory/step-N`` and remove all but the newest ``keep``."""
    target = directory / f"step-{state['step']:08d}"
    if target in whole(directory):
        return target  # saved before, and nothing was trained since
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    accelerator.save_state(str(partial), safe_serialization=True)
    (partial / "recipe.yaml").write_text(recipe)
    (partial / "state.json").write_text(json.dumps({"format": _FORMAT, **state}))
    for path in partial.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
    shutil.rmtree(target, ignore_errors=True)
    os.replace(partial, target)
    for old in whole(directory)[:-keep]:
        shutil.rmtree(old)
    return target


def whole(directory: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    return sorted(
        path for path in directory.glob("step-*") if path.suffix != ".partial" and (path / "state.json").exists()
    )


def read_state(path: Path) -> dict[str, Any]:
    """``state.json`` of a checkpoint. Raises UserError when it is of another format."""
    state: dict[str, Any] = json.loads((path / "state.json").read_text())
    if state.get("format") != _FORMAT:
        raise UserError(
            f"{path} was written by another version of trtl-rl (format {state.get('format')!r}); it cannot be resumed."
        )
    return state
