"""What is renamed was brought to the disk before: a machine that loses power keeps whole checkpoints."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3Config

from trtl_rl.trainer import checkpoint


class FakeAccelerator:
    """Saves a file, and one in a directory."""

    def save_state(self, path: str, **rest: Any) -> None:
        (Path(path) / "deep").mkdir()
        (Path(path) / "deep" / "part.bin").write_bytes(b"1")
        (Path(path) / "model.safetensors").write_bytes(b"2")


def test_every_file_and_name_is_on_the_disk_before_a_checkpoint_is_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    fsync, replace = os.fsync, os.replace

    def synced(descriptor: int) -> None:
        events.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def replaced(source: Path, target: Path) -> None:
        events.append(f"{source} becomes {target}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    fake: Any = FakeAccelerator()
    parts = checkpoint.ModelParts(Qwen3Config(), None, "")
    target = checkpoint.save(tmp_path, fake, {"step": 3}, parts, keep=1)
    partial = f"{target}.partial"
    renamed = events.index(f"{partial} becomes {target}")
    names = [path.relative_to(target).as_posix() for path in target.rglob("*")]
    assert {"deep", "deep/part.bin", "model.safetensors", "state.json", "manifest.json", "recipe.yaml"} < set(names)
    assert {partial, *(f"{partial}/{name}" for name in names)} <= set(events[:renamed])
    latest = f"{tmp_path}/latest.partial becomes {tmp_path}/latest"
    assert events[renamed + 1 :] == [str(tmp_path), latest, str(tmp_path)], (
        "and the new name itself, before latest moves"
    )
    assert json.loads((target / "state.json").read_text())["state"]["step"] == 3
