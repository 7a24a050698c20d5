"""Loading for a run: tokenizer, model, the ids that end an answer; every fault is said in the user's words."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtl_rl.errors import UserError
from trtl_rl.metrics import MetricsWriter
from trtl_rl.recipe import modelopt_state
from trtl_rl.recipe.coverage import Coverage
from trtl_rl.recipe.recipe import NONE, Recipe, expand
from trtl_rl.trainer.checkpoint import read_state

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class Phases:
    """The phases before the first step, as progress rows."""

    def __init__(self, metrics: MetricsWriter, total: int) -> None:
        self.metrics, self.total, self.done = metrics, total, 0
        metrics.progress("starting", 0, total)

    def next(self) -> None:
        """One more is done."""
        self.done += 1
        self.metrics.progress("starting", self.done, self.total)


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """The checkpoint's tokenizer. Raises UserError when there is none that transformers can read."""
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{path} holds no tokenizer that transformers can read: {_first_line(error)}") from None
    return tokenizer


def load_model(path: Path, recipe: Recipe, checkpoint: Path | None = None) -> PreTrainedModel:
    """The model in float32, with the recipe's quantisers.

    Args:
        checkpoint: Of a run that goes on: its quantisers are restored, not inserted anew.

    Raises:
        UserError: weights that cannot be read; a checkpoint whose quantisers are not what it says it ran, or not what the
            recipe asks for. The message names the modules.
    """
    import torch
    from transformers import AutoModelForCausalLM, logging

    quiet: Any = logging.disable_progress_bar
    quiet()
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    except Exception as error:  # safetensors and transformers raise kinds of their own
        raise UserError(f"The weights in {path} cannot be read: {_first_line(error)}") from None
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


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def stop_ids(path: Any, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Every id that ends an answer: all of generation_config.json, of config.json, and the tokenizer's."""
    found: set[int] = set()
    file = path / "generation_config.json"
    listed = json.loads(file.read_text()).get("eos_token_id") if file.is_file() else None
    for value in (listed, getattr(model.config, "eos_token_id", None), tokenizer.eos_token_id):
        if isinstance(value, int):
            found.add(value)
        elif isinstance(value, list):
            found.update(value)
    beyond = sorted(id for id in found if id >= model.config.vocab_size)
    if beyond:
        raise UserError(
            f"{path} names the end-of-sequence ids {beyond}, but the vocabulary has {model.config.vocab_size}."
        )
    if not found:
        raise UserError(f"{path} names no end-of-sequence token: add eos_token_id to its generation_config.json.")
    return sorted(found)
