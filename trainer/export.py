"""What a run leaves for others: a Hugging Face checkpoint of a policy, in BF16 or as FP8 codes, or its adapters."""

from __future__ import annotations

import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Any

from trtl_rl.errors import UserError
from trtl_rl.model.source import ModelSource, find_model
from trtl_rl.recipe.recipe import Recipe
from trtl_rl.trainer import lora

REQUANTISED = (
    "Merging requantises: the sum of base and adapters is quantised anew, so the codes are not the base's, and logprobs differ "
    "from those of the run's engine, which adds the adapters in high precision. Measure the exported model, or serve the base "
    "with the adapters."
)


def save_pretrained(
    weights: Path, source: ModelSource, recipe: Recipe, directory: Path, *, fp8: bool = False, merge: bool = False
) -> Path:
    """Write the policy of ``weights`` to ``directory``, which appears whole or not at all.

    Args:
        weights: A checkpoint of a run, or the model that it began with.
        source: The model that the run began with: its tokenizer and generation settings, and the base of adapters.
        fp8: Write FP8 block-scale codes instead, as the run's engine generated with: an engine directory, whose layout serving
            engines load as a checkpoint (``quantization_config`` of the kind ``fp8``). The codes are those of the last refit;
            with adapters they are others, and a warning says so: the sum of base and adapters is quantised anew.
        merge: Where ``weights`` are adapters, write their sum with the base instead of peft's files.

    Returns:
        The directory.

    Raises:
        UserError: the directory exists and is not empty, or the recipe quantises nothing and ``fp8`` is asked for, or there are
            no adapters and ``merge`` is.
    """
    from trtl_rl.engines.build import build_engine, copy_tokenizer
    from trtl_rl.recipe.recipe import NONE

    adapted = lora.holds_adapters(weights)
    if fp8 and recipe.name == NONE:
        raise UserError("fp8=True, but the recipe is none: there are no codes. Leave fp8 out.")
    if merge and not adapted:
        raise UserError("merge=True, but the run has no adapters: lora.rank is 0. Leave merge out.")
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UserError(f"{directory} exists and is not an empty directory: choose another one.")
    if adapted:
        lora.check_base(source, weights)
    directory.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(".partial", f"{directory.name}.", directory.parent))
    try:
        if adapted and not (merge or fp8):
            lora.write_rounded(weights, beside)
        else:
            _write_plain(weights, source, beside, adapted)
        copy_tokenizer(source, beside)
        if fp8:
            if adapted:
                warnings.warn(REQUANTISED, stacklevel=3)
            plain = find_model(str(beside))
            name = f"{source.name}, trained{', adapters merged' if adapted else ''}"
            build_engine(ModelSource(name, plain.path, plain.config), recipe, directory, compiled=False)
        else:
            beside.chmod(0o755)
            beside.replace(directory)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return directory


def _write_plain(weights: Path, source: ModelSource, directory: Path, adapted: bool) -> None:
    """The FP32 masters rounded to BF16, which is what both sides of a run quantise; adapters added to their base."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(source.path if adapted else weights, dtype=torch.bfloat16)
    if adapted:
        model = lora.merged(model, weights)
    model.save_pretrained(directory)
    generation = source.path / "generation_config.json"
    if generation.is_file():
        shutil.copyfile(generation, directory / generation.name)
