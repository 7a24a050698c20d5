"""What a run leaves for others: a Hugging Face checkpoint of a policy, in BF16 or as FP8 codes."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from trtl_rl.errors import UserError
from trtl_rl.model.source import ModelSource, find_model
from trtl_rl.recipe.recipe import Recipe


def save_pretrained(weights: Path, source: ModelSource, recipe: Recipe, directory: Path, *, fp8: bool = False) -> Path:
    """Write the policy of ``weights`` to ``directory``, which appears whole or not at all.

    Args:
        weights: A checkpoint of a run, or the model that it began with.
        source: The model that the run began with: its tokenizer and generation settings.
        fp8: Write FP8 block-scale codes instead, as the run's engine generated with: an engine directory, whose layout serving
            engines load as a checkpoint (``quantization_config`` of the kind ``fp8``). The codes are those of the last refit.

    Returns:
        The directory.

    Raises:
        UserError: the directory exists and is not empty, or the recipe quantises nothing and ``fp8`` is asked for.
    """
    from trtl_rl.engines.build import build_engine, copy_tokenizer
    from trtl_rl.recipe.recipe import NONE

    if fp8 and recipe.name == NONE:
        raise UserError("fp8=True, but the recipe is none: there are no codes. Leave fp8 out.")
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UserError(f"{directory} exists and is not an empty directory: choose another one.")
    directory.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(".partial", f"{directory.name}.", directory.parent))
    try:
        _write_plain(weights, source, beside)
        copy_tokenizer(source, beside)
        if fp8:
            plain = find_model(str(beside))
            build_engine(
                ModelSource(f"{source.name}, trained", plain.path, plain.config), recipe, directory, compiled=False
            )
        else:
            beside.chmod(0o755)
            beside.replace(directory)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return directory


def _write_plain(weights: Path, source: ModelSource, directory: Path) -> None:
    """The FP32 masters rounded to BF16, which is what both sides of a run quantise."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.bfloat16)
    model.save_pretrained(directory)
    generation = source.path / "generation_config.json"
    if generation.is_file():
        shutil.copyfile(generation, directory / generation.name)
