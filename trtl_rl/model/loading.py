"""Loading a checkpoint: tokenizer, model, the ids that end an answer; every fault is said in the user's words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtl_rl.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """The checkpoint's tokenizer. Raises UserError when there is none that transformers can read."""
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{path} holds no tokenizer that transformers can read: {_first_line(error)}") from None
    return tokenizer


def read_model(path: Path) -> PreTrainedModel:
    """The model in float32, without quantisers. Raises UserError for weights that cannot be read."""
    import torch
    from transformers import AutoModelForCausalLM, logging

    quiet: Any = logging.disable_progress_bar
    quiet()
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    except Exception as error:  # safetensors and transformers raise kinds of their own
        raise UserError(f"The weights in {path} cannot be read: {_first_line(error)}") from None
    return model


def empty_model(config: dict[str, Any]) -> PreTrainedModel:
    """A model of ``config.json`` in float32 whose weights mean nothing."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    values = dict(config)
    described = AutoConfig.for_model(values.pop("model_type"), **values)
    make: Any = AutoModelForCausalLM.from_config
    model: PreTrainedModel = make(described, dtype=torch.float32)
    return model


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
