"""Checkpoints: written beside, renamed when whole, so that the newest directory without ``.partial`` is a whole one.

A checkpoint holds Accelerate's state (FP32 weights as safetensors, optimizer, schedule), the model's ``config.json``, the
recipe's text, ModelOpt's state of the quantised modules, and ``state.json``: step, counters, ledger, coverage, and which
prompts were started but not trained on.

ModelOpt and transformers read its directory without a run, the quantisers included::

    import modelopt.torch.opt as mto
    from transformers import AutoModelForCausalLM

    mto.enable_huggingface_checkpointing()
    model = AutoModelForCausalLM.from_pretrained("runs/.../checkpoints/step-00000100")

Its stock forward calls our quantiser; call ``trtl_rl.recipe.recipe.register_backend()`` before it. Transformers alone
(without the second import) reads the weights as a model without quantisers.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtl_rl.disk import sync, sync_tree
from trtl_rl.errors import UserError
from trtl_rl.recipe import modelopt_state

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedConfig

_FORMAT = 2


@dataclass(frozen=True)
class ModelParts:
    """What makes a model of a checkpoint's weights; it does not change in a run.

    Attributes:
        quantisers: ModelOpt's state, None for a run without quantisers.
        recipe: Text of the recipe.
    """

    config: PreTrainedConfig
    quantisers: modelopt_state.State | None
    recipe: str


def save(directory: Path, accelerator: Accelerator, state: dict[str, Any], parts: ModelParts, keep: int) -> Path:
    """Write ``directory/step-N`` and remove all but the newest ``keep``."""
    target = directory / f"step-{state['step']:08d}"
    if target in whole(directory):
        return target  # saved before, and nothing was trained since
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    accelerator.save_state(str(partial), safe_serialization=True)
    parts.config.save_pretrained(partial)
    (partial / "recipe.yaml").write_text(parts.recipe)
    if parts.quantisers is not None:
        modelopt_state.write(parts.quantisers, partial)
    (partial / "state.json").write_text(json.dumps({"format": _FORMAT, **state}))
    sync_tree(partial)
    shutil.rmtree(target, ignore_errors=True)
    os.replace(partial, target)
    sync(directory)
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
