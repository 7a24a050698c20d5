"""A checkpoint is whole or it is passed over, whatever happened while it was written, and reading one runs nobody's code."""

from __future__ import annotations

import errno
import json
import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3Config

from trtl_rl.errors import DiskError, UserError
from trtl_rl.trainer import checkpoint

PARTS = checkpoint.ModelParts(Qwen3Config(), None, "recipe: text\n")


class FakeAccelerator:
    """Saves two files, of which one changes from save to save."""

    def __init__(self) -> None:
        self.saves = 0

    def save_state(self, path: str, **rest: Any) -> None:
        self.saves += 1
        (Path(path) / "model.safetensors").write_bytes(bytes([self.saves]) * 100)
        (Path(path) / "optimizer.bin").write_bytes(b"optimizer")


class Killed(BaseException):
    """As a kill: nothing catches it."""


def save(directory: Path, step: int, keep: int = 2, accelerator: Any = None, **more: Any) -> Path:
    return checkpoint.save(directory, accelerator or FakeAccelerator(), {"step": step, **more}, PARTS, keep)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def real_accelerator(seed: int = 0) -> Any:
    from accelerate import Accelerator

    torch.manual_seed(seed)
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    accelerator.prepare(model, optimizer, schedule)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        schedule.step()
    return accelerator


# --- whole, torn, foreign ---


def test_the_newest_whole_checkpoint_is_used_and_a_torn_one_is_named(tmp_path: Path) -> None:
    old, new = save(tmp_path, 1), save(tmp_path, 2)
    assert checkpoint.newest(tmp_path) == (new, [])
    shutil.copytree(new, tmp_path / "copy")

    def torn(change: Callable[[Path], Any]) -> str:
        shutil.rmtree(new)
        shutil.copytree(tmp_path / "copy", new)
        change(new)
        found, (reason,) = checkpoint.newest(tmp_path)
        assert found == old and str(new) in reason
        return reason

    assert "model.safetensors has 99 bytes, not 100" in torn(lambda p: os.truncate(p / "model.safetensors", 99))
    assert "model.safetensors is missing" in torn(lambda p: (p / "model.safetensors").unlink())
    assert "manifest.json is missing" in torn(lambda p: (p / "manifest.json").unlink())
    assert "state.json is missing" in torn(lambda p: (p / "state.json").unlink())
    assert "recipe.yaml does not have the content" in torn(lambda p: (p / "recipe.yaml").write_text("recipe: tixt\n"))
    assert "JSONDecodeError" in torn(lambda p: (p / "state.json").write_text('{"format": 3, "sta'))
    assert "state.json does not have" in torn(
        lambda p: (p / "state.json").write_text((p / "state.json").read_text().replace('"step": 2', '"step": 7'))
    )
    assert "another version of trtl-rl wrote it (format 2" in torn(
        lambda p: (p / "state.json").write_text('{"format": 2}')
    )
    assert "was not written by trtl-rl" in torn(lambda p: (p / "state.json").write_text('{"epoch": 2}'))
    with pytest.raises(UserError, match="was not written by trtl-rl"):
        checkpoint.read_state(new)
    checkpoint.check_any(tmp_path)
    (old / "model.safetensors").unlink()
    with pytest.raises(
        UserError, match=r"no whole checkpoint .*step-00000001: model\.safetensors is missing; step-00000002: "
    ):
        checkpoint.check_any(tmp_path)


def test_latest_leads_to_the_newest_and_the_last_ones_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3, 10):
        target = save(tmp_path, step, keep=2)
        assert (tmp_path / "latest").resolve() == target.resolve()
    assert names(tmp_path) == ["latest", "step-00000003", "step-00000010"]


def test_a_second_save_of_a_step_keeps_the_weights_and_replaces_the_state(tmp_path: Path) -> None:
    accelerator = FakeAccelerator()
    target = save(tmp_path, 5, accelerator=accelerator, ready=[1])
    save(tmp_path, 5, accelerator=accelerator, ready=[1, 2])
    assert accelerator.saves == 1
    assert (
        checkpoint.read_state(target) == {"step": 5, "ready": [1, 2]} and checkpoint.damage(target, hashes=True) is None
    )
    (target / "model.safetensors").write_bytes(b"torn")
    save(tmp_path, 5, accelerator=accelerator, ready=[])
    assert accelerator.saves == 2 and checkpoint.newest(tmp_path) == (target, [])
    assert names(tmp_path) == ["latest", "step-00000005"]


# --- kills and full disks, at every single call that changes the disk ---


def interrupt_at(patch: pytest.MonkeyPatch, at: int, error: BaseException) -> list[str]:
    """The ``at``-th call (from 0) that changes the disk raises; returns the names of the calls."""
    calls: list[str] = []
    for module, name in (
        (os, "fsync"),
        (os, "replace"),
        (Path, "write_text"),
        (Path, "symlink_to"),
        (Path, "mkdir"),
        (shutil, "rmtree"),
    ):
        original: Any = getattr(module, name)

        def counted(*args: Any, _original: Any = original, _name: str = name, **rest: Any) -> Any:
            calls.append(_name)
            if len(calls) - 1 == at:
                raise error
            return _original(*args, **rest)

        patch.setattr(module, name, counted)
    return calls


def test_a_kill_at_any_moment_of_a_save_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    before, after, at = 0, 0, 0
    while True:
        directory = tmp_path / str(at)
        save(directory, 1, keep=1)
        with pytest.MonkeyPatch.context() as patch:
            interrupt_at(patch, at, Killed())
            try:
                save(directory, 2, keep=1)
            except Killed:
                pass
            else:
                break
        found, passed_over = checkpoint.newest(directory)
        assert found is not None and not passed_over, f"call {at}"
        before, after = before + found.name.endswith("1"), after + found.name.endswith("2")
        assert (directory / "latest").exists(), f"call {at}: latest leads nowhere"
        save(directory, 3, keep=1)
        assert names(directory) == ["latest", "step-00000003"], f"call {at} left something for ever"
        at += 1
    assert before >= 10 and after >= 4, "kills on both sides of the rename"


@pytest.mark.parametrize("first", [True, False])
def test_a_full_disk_costs_no_checkpoint_and_the_message_names_what_is_kept(first: bool, tmp_path: Path) -> None:
    at = refused = 0
    while True:
        directory = tmp_path / str(at)
        if not first:
            save(directory, 1, keep=1)
        with pytest.MonkeyPatch.context() as patch:
            calls = interrupt_at(patch, at, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
            try:
                save(directory, 2, keep=1)
            except DiskError as error:
                refused += 1
                text = str(error)
                assert "step 2 could not be written: No space left on device" in text
            else:
                if len(calls) <= at:
                    break
                text = ""  # what could not be removed is removed by the next save
        found, passed_over = checkpoint.newest(directory)
        assert not passed_over
        if found is None:
            assert first and "There is no checkpoint yet." in text
        elif text:
            assert f"Kept: {found}." in text
        if text:
            assert (
                not [name for name in names(directory) if name.endswith((".partial", ".removed"))]
                if directory.exists()
                else True
            )
        at += 1
    assert refused >= 10


# --- pickles ---


class Malicious:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.path),))


@pytest.mark.parametrize("name", ["optimizer.bin", "scheduler.bin", "random_states_0.pkl"])
@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_that_would_run_code_is_refused_and_does_not_run(name: str, zipped: bool, tmp_path: Path) -> None:
    target = save(tmp_path / "checkpoints", 1, accelerator=real_accelerator())
    evil = Malicious(tmp_path / "was here")
    if zipped:
        torch.save(evil, target / name)
    else:
        (target / name).write_bytes(pickle.dumps(evil))
    with pytest.raises(UserError, match="Nothing of them was run"):
        checkpoint.load(target, real_accelerator(1))
    assert not (tmp_path / "was here").exists()
    with open(target / name, "rb") as file:  # it would have
        _ = torch.load(file, weights_only=False) if zipped else pickle.load(file)
    assert (tmp_path / "was here").exists()


def test_pickles_of_another_user_are_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = save(tmp_path, 1, accelerator=real_accelerator())
    stranger = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: stranger)
    with pytest.raises(
        UserError, match=rf"optimizer\.bin belongs to user {stranger - 1}, and this run to user {stranger}.*chown"
    ):
        checkpoint.load(target, real_accelerator(1))


def test_weights_optimizer_schedule_and_random_states_come_back(tmp_path: Path) -> None:
    one = real_accelerator()
    target = save(tmp_path, 1, accelerator=one)
    drawn = random.random(), float(np.random.random()), float(torch.rand(()))
    other = real_accelerator(seed=5)
    random.seed(9), np.random.seed(9), torch.manual_seed(9)
    checkpoint.load(target, other)
    assert (random.random(), float(np.random.random()), float(torch.rand(()))) == drawn
    for mine, theirs in zip(one._models[0].parameters(), other._models[0].parameters(), strict=True):
        assert torch.equal(mine, theirs)
    ours, theirs = one._optimizers[0].state_dict(), other._optimizers[0].state_dict()
    assert json.dumps(ours["param_groups"]) == json.dumps(theirs["param_groups"])
    assert all(
        torch.equal(ours["state"][i][key], theirs["state"][i][key]) for i in ours["state"] for key in ours["state"][i]
    )
    assert one._schedulers[0].get_last_lr() == other._schedulers[0].get_last_lr()


def test_a_checkpoint_of_another_model_is_one_message(tmp_path: Path) -> None:
    from accelerate import Accelerator

    target = save(tmp_path, 1, accelerator=real_accelerator())
    other: Any = Accelerator(cpu=True)
    other.prepare(torch.nn.Linear(4, 2))
    with pytest.raises(UserError, match="belong to another model"):
        checkpoint.load(target, other)
