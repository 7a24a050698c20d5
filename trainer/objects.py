"""Models and tokenizers that are given as objects: written to a directory, since a run reads directories."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtl_rl.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def write_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> Path:
    """A temporary directory with the checkpoint, until this process ends or :func:`keep_model` takes it.

    Raises:
        UserError: no tokenizer is given and the model's name leads to none.
    """
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
