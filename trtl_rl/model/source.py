"""Find a model's directory and check its configuration before anything heavy is loaded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import xxhash

from trtl_rl.errors import UserError, nearest

DEMO = "demo"
_PART = 2**24  # bytes read at once


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
    if (path / "adapter_config.json").is_file():
        raise UserError(
            f"{path} holds adapters of peft, and no model: name the base, or what save_pretrained(DIR, merge=True) writes."
        )
    if not file.is_file():
        raise UserError(f"{path} holds no config.json, so it is no Hugging Face checkpoint directory.")
    try:
        config = json.loads(file.read_text())
    except ValueError as error:
        raise UserError(f"{file} is not valid JSON: {error}") from None
    if not any(path.glob("*.safetensors")) and not any(path.glob("*.bin")):
        raise UserError(f"{path} has a config.json, but no weights (*.safetensors).")
    return ModelSource(name, path, config)


def weights_digest(path: Path) -> str:
    """Hash of a checkpoint's weights: names, dtypes, shapes and bytes of its tensors, however they are split into files.

    Files of another kind than safetensors count as they are. No tensor is kept in memory.

    Raises:
        UserError: a file is no whole safetensors file.
    """
    lines = []
    files = sorted(path.glob("*.safetensors"))
    for file in files:
        lines += [f"{name} {digest}" for name, digest in _tensor_digests(file)]
    if not files:
        lines = [f"{file.name} {file_digest(file)}" for file in sorted(path.glob("*.bin"))]
    return xxhash.xxh3_128_hexdigest("\n".join(sorted(lines)).encode())


def file_digest(path: Path) -> str:
    """Hash of a file's bytes (xxh3, 128 bit)."""
    state = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while part := file.read(_PART):
            state.update(part)
    return state.hexdigest()


def _tensor_digests(file: Path) -> Iterator[tuple[str, str]]:
    """Each tensor's name, and the hash of its dtype, shape and bytes."""
    with open(file, "rb") as stream:
        try:
            size = int.from_bytes(stream.read(8), "little")
            if size > file.stat().st_size:
                raise ValueError("its header is longer than the file")
            header: dict[str, Any] = json.loads(stream.read(size))
        except ValueError as error:
            raise UserError(f"{file} is no whole safetensors file: {error}.") from None
        header.pop("__metadata__", None)
        for name, entry in header.items():
            start, end = entry["data_offsets"]
            if 8 + size + end > file.stat().st_size:
                raise UserError(f"{file} is truncated: {name} reaches beyond its end.")
            state = xxhash.xxh3_128(f"{entry['dtype']} {entry['shape']}".encode())
            stream.seek(8 + size + start)
            left = end - start
            while left:
                part = stream.read(min(left, _PART))
                state.update(part)
                left -= len(part)
            yield name, state.hexdigest()


def _download(name: str) -> Path:
    looks_like_path = name.startswith((".", "/", "~")) or name.count("/") != 1
    if looks_like_path:
        path = Path(name).expanduser()
        siblings = [item.name for item in path.parent.iterdir() if item.is_dir()] if path.parent.is_dir() else []
        raise UserError(
            f"There is no model '{name}': neither a directory nor a hub name such as Qwen/Qwen3-0.6B, nor '{DEMO}'."
            f"{nearest(path.name, [*siblings, DEMO])}"
        )
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]))
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"There is no directory '{name}', and the hub does not give a model of that name: {reason}"
        ) from None
