"""Models and tokenizers that are given as objects: written to a directory, since a run reads directories."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtl_rl.errors import UserError
from trtl_rl.model.source import find_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def written(
    model: str | Path | PreTrainedModel | None, tokenizer: PreTrainedTokenizerBase | None, default: str
) -> Path | None:
    """A directory with the objects that were given, or None where names do; ``default`` is the model if none is given."""
    if model is not None and not isinstance(model, str | Path):
        return write_model(model, tokenizer)
    if tokenizer is not None:
        return with_tokenizer(find_model(str(model or default)).path, tokenizer)
    return None


def write_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> Path:
    """A temporary directory with the checkpoint, until this process ends or :func:`keep_model` takes it.

    Raises:
        UserError: no tokenizer is given and the model's name leads to none; or the model has adapters.
    """
    if getattr(model, "peft_config", None):
        raise UserError(
            "The model has adapters of peft already, and a run begins with new ones: add them to the base (merge_and_unload()), "
            "or give the base and peft_config."
        )
    directory = Path(tempfile.mkdtemp(prefix="trtl-rl-model-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    model.save_pretrained(directory)
    (tokenizer or _tokenizer_of(model)).save_pretrained(directory)
    return directory


def keep_model(temporary: Path, run_dir: Path) -> Path:
    """Copy the checkpoint into the run's directory, so that the run can go on without the objects."""
    place = run_dir / "start_model"
    if not place.exists():
        shutil.copytree(temporary, place)
    return place


def with_tokenizer(path: Path, tokenizer: PreTrainedTokenizerBase) -> Path:
    """A directory like ``path``, with links to its files, and another tokenizer."""
    directory = Path(tempfile.mkdtemp(prefix="trtl-rl-model-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    for file in path.iterdir():
        if file.is_file():
            (directory / file.name).symlink_to(file.resolve())
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"):
        (directory / name).unlink(missing_ok=True)
    tokenizer.save_pretrained(directory)
    return directory


def _tokenizer_of(model: Any) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    name = getattr(model.config, "_name_or_path", "")
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(name)
    except Exception:
        raise UserError(
            "The model is given as an object, and no tokenizer with it (nor does its name lead to one): give processing_class."
        ) from None
    return tokenizer
