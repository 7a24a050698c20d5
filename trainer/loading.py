"""Loading for a run: the model with its quantisers, new or as a checkpoint has them, and the phases before the first step."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtl_rl.errors import UserError
from trtl_rl.metrics import MetricsWriter
from trtl_rl.model.loading import read_model
from trtl_rl.model.source import ModelSource
from trtl_rl.recipe import modelopt_state
from trtl_rl.recipe.coverage import Coverage
from trtl_rl.recipe.recipe import NONE, Recipe, expand
from trtl_rl.trainer import lora
from trtl_rl.trainer.checkpoint import read_state

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Phases:
    """The phases before the first step, as progress rows."""

    def __init__(self, metrics: MetricsWriter, total: int) -> None:
        self.metrics, self.total, self.done = metrics, total, 0
        metrics.progress("starting", 0, total)

    def next(self) -> None:
        """One more is done."""
        self.done += 1
        self.metrics.progress("starting", self.done, self.total)


def load_model(path: Path, recipe: Recipe, checkpoint: Path | None = None) -> PreTrainedModel:
    """The model in float32, with the recipe's quantisers.

    Args:
        checkpoint: Of a run that goes on: its quantisers are restored, not inserted anew.

    Raises:
        UserError: weights that cannot be read; a checkpoint whose quantisers are not what it says it ran, or not what the
            recipe asks for. The message names the modules.
    """
    model = read_model(path)
    if checkpoint is None:
        recipe.apply(model)
        return model
    if recipe.name != NONE:
        modelopt_state.restore(model, checkpoint)
    restored = expand(model)
    for wanted, source in (
        (Coverage.from_json(read_state(checkpoint)["coverage"]), "what it ran"),
        (_coverage_of(recipe, model), f"what recipe {recipe.name} asks for"),
    ):
        differences = restored.difference(wanted)
        if differences:
            raise UserError(
                f"The quantisers in {checkpoint} are not {source}, in {len(differences)} linears: "
                + "; ".join(differences[:8])
            )
    return model


def _coverage_of(recipe: Recipe, model: PreTrainedModel) -> Coverage:
    """What ``recipe`` expands to on a model like ``model``, found on a copy without weights."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        make: Any = AutoModelForCausalLM.from_config
        skeleton: PreTrainedModel = make(copy.deepcopy(model.config))
    recipe.apply(skeleton)
    return expand(skeleton)


def load_policy(source: ModelSource, recipe: Recipe, checkpoint: Path | None) -> PreTrainedModel:
    """The model that a run began with, or with the weights or adapters of its ``checkpoint``; outside of the run.

    Raises:
        UserError: as :func:`load_model` does; the checkpoint does not belong to this model.
    """
    model = load_model(source.path, recipe, checkpoint)
    if checkpoint is None:
        return model
    if lora.holds_adapters(checkpoint):
        lora.of_checkpoint(model, source, checkpoint)
    else:
        _load_weights(model, checkpoint / "model.safetensors")
    return model


def _load_weights(model: PreTrainedModel, file: Path) -> None:
    from safetensors.torch import load_file

    missing, unexpected = model.load_state_dict(load_file(file), strict=False)
    tied = ["lm_head.weight"] if model.config.tie_word_embeddings else []
    wrong = [*(set(missing) - set(tied)), *unexpected]
    if wrong:
        raise UserError(f"{file} does not belong to this model: {min(wrong)} is only on one side.")
