"""Find a model's directory and check its configuration before anything heavy is loaded."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from trtl_rl.errors import UserError

DEMO = "demo"


@dataclass(frozen=True)
class ModelSource:
    """A model that was found.

    Attributes:
        name: As the user gave it.
        path: Its directory.
        config: Its ``config.json``.
    """

    name: str
    path: Path
    config: dict[str, Any]

    @property
    def context(self) -> int:
        """Tokens that the checkpoint was made for."""
        return int(self.config.get("max_position_embeddings", 2048))


def find_model(name: str) -> ModelSource:
    """The bundled model, a directory, or a model of the hub (downloaded).

    Raises:
        UserError: nothing is there, or it has no readable ``config.json``.
    """
    path = Path(str(files("trtl_rl.demo") / "model")) if name == DEMO else Path(name).expanduser()
    if not path.is_dir():
        path = _download(name)
    file = path / "config.json"
    if not file.is_file():
        raise UserError(f"{path} holds no config.json, so it is no Hugging Face checkpoint directory.")
    try:
        config = json.loads(file.read_text())
    except ValueError as error:
        raise UserError(f"{file} is not valid JSON: {error}") from None
    if not any(path.glob("*.safetensors")) and not any(path.glob("*.bin")):
        raise UserError(f"{path} has a config.json, but no weights (*.safetensors).")
    return ModelSource(name, path, config)


def _download(name: str) -> Path:
    looks_like_path = name.startswith((".", "/", "~")) or name.count("/") != 1
    if looks_like_path:
        raise UserError(
            f"There is no model '{name}': neither a directory nor a hub name such as Qwen/Qwen3-0.6B, nor '{DEMO}'."
        )
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]))
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"There is no directory '{name}', and the hub does not give a model of that name: {reason}"
        ) from None
