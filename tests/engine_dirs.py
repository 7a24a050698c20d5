"""Small checkpoints and the engine directories that are built from them, for tests."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from models import tiny

from trtl_rl.engines import directory as directory_module
from trtl_rl.engines.build import build_engine
from trtl_rl.engines.directory import EngineDirectory
from trtl_rl.model.source import find_model
from trtl_rl.recipe.recipe import Recipe


def checkpoint_of(path: Path, family: str = "qwen3", **config: Any) -> Path:
    """A tiny random checkpoint with the bundled tokenizer."""
    tiny(family, **config).save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(find_model("demo").path / name, path / name)
    return path


def build(model: Path | str, output: Path, recipe: str = "fp8_block", **rest: Any) -> EngineDirectory:
    """An engine directory with eager operators."""
    return build_engine(find_model(str(model)), Recipe.load(recipe), output, **{"compiled": False, **rest})


def edit(path: Path, **values: Any) -> None:
    """Change engine.json as its own writer would have: the checksum is right."""
    file = path / "engine.json"
    content = {**json.loads(file.read_text()), **values}
    del content["checksum"]
    file.write_text(json.dumps(directory_module._sealed(content)))


def flip(path: Path) -> None:
    """Change the last byte."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
