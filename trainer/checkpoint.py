"""Checkpoints: written beside, brought to the disk, renamed when whole; ``latest`` names the newest one and moves last.

A checkpoint ``step-N`` holds Accelerate's state (FP32 weights as safetensors; optimizer, schedule and random states), the
model's ``config.json``, the recipe's text, ModelOpt's state of the quantised modules, ``manifest.json`` with size and hash
of each of those, and ``state.json``: step, counters, ledger, configuration, where in the data the run is, and the groups
that are ready to be trained on. ``state.json`` carries a hash of its own, since it alone may be replaced later. With LoRA
it holds peft's files of the adapters in the weights' place (``lora.py``).

Whose files these are: Accelerate and ModelOpt write pickles. They are read with ``weights_only``, which runs no code, and
not at all when they belong to another user.

ModelOpt and transformers read its directory without a run, the quantisers included::

    import modelopt.torch.opt as mto
    from transformers import AutoModelForCausalLM

    mto.enable_huggingface_checkpointing()
    model = AutoModelForCausalLM.from_pretrained("runs/.../checkpoints/latest")

Its stock forward calls our quantiser; call ``trtl_rl.recipe.recipe.register_backend()`` before it. Transformers alone
(without the second import) reads the weights as a model without quantisers.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtl_rl.disk import replace_file, sync, sync_tree
from trtl_rl.errors import DiskError, UserError
from trtl_rl.recipe import modelopt_state

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedConfig

_FORMAT = 3
_STATE, _MANIFEST, _LATEST = "state.json", "manifest.json", "latest"
_PICKLES = (".bin", ".pkl", ".pth")
_LEFTOVERS = (".partial", ".removed")


@dataclass(frozen=True)
class ModelParts:
    """What makes a model of a checkpoint's weights; it does not change in a run.

    Attributes:
        config: None for a run that saves adapters, whose base has one: beside another, transformers would take the directory for
            a whole model.
        quantisers: ModelOpt's state, None for a run without quantisers.
        recipe: Text of the recipe.
    """

    config: PreTrainedConfig | None
    quantisers: modelopt_state.State | None
    recipe: str


def save(directory: Path, accelerator: Accelerator, state: dict[str, Any], parts: ModelParts, keep: int) -> Path:
    """Write ``directory/step-N``, move ``latest`` to it and remove all but the newest ``keep``.

    Where that checkpoint is there already, the weights are the same, and only ``state.json`` is replaced.

    Raises:
        DiskError: it could not be written, for example for want of room. What was saved before is as it was.
    """
    target = path_of(directory, state["step"])
    state = json.loads(json.dumps(state))  # as it will be read
    try:
        directory.mkdir(parents=True, exist_ok=True)
        remove_leftovers(directory)
        _prune(directory, keep)  # where keep is less than it was, that makes room
        if target in whole(directory):
            replace_file(target / _STATE, _state_text(state))
        else:
            _write(target, accelerator, state, parts)
        _point_to(target)
    except (OSError, RuntimeError, _safetensors_error()) as error:  # torch raises RuntimeError when it cannot write
        with contextlib.suppress(OSError):
            remove_leftovers(directory)
        kept = whole(directory)
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
        raise DiskError(
            f"The checkpoint of step {state['step']} could not be written: {reason}. "
            + (f"Kept: {kept[-1]}." if kept else "There is no checkpoint yet.")
        ) from error
    _prune(directory, keep)
    return target


def path_of(directory: Path, step: int) -> Path:
    """Where the checkpoint of ``step`` is, if there is one."""
    return directory / f"step-{step:08d}"


def whole(directory: Path) -> list[Path]:
    """Checkpoints that are whole as far as names and sizes show, oldest first."""
    return [path for path in saved(directory) if damage(path) is None]


def saved(directory: Path) -> list[Path]:
    """Every checkpoint, whole or not, oldest first."""
    return sorted(path for path in directory.glob("step-*") if path.suffix not in _LEFTOVERS)


def newest(directory: Path) -> tuple[Path | None, list[str]]:
    """The newest whole checkpoint, every byte of it compared with its hash, and what is wrong with those that are newer."""
    passed_over: list[str] = []
    for path in reversed(saved(directory)):
        found = damage(path, hashes=True)
        if found is None:
            return path, passed_over
        passed_over.append(f"{path} is not whole: {found}.")
    return None, passed_over


def check_any(directory: Path) -> None:
    """Raise UserError when there are checkpoints and none is whole; where there are none, a run may still begin."""
    if saved(directory) and not whole(directory):
        reasons = [f"{path.name}: {damage(path)}" for path in saved(directory)]
        raise UserError(f"{directory} has no whole checkpoint to resume from ({'; '.join(reasons)}). Start a new run.")


def damage(path: Path, *, hashes: bool = False) -> str | None:
    """What is wrong with a checkpoint, or None.

    Args:
        hashes: Read all of it, not only names and sizes.
    """
    try:
        state = _read_json(path / _STATE)
        if state.get("format") != _FORMAT:
            return _other_version(state)
        files = _read_json(path / _MANIFEST)["files"]
        for name, known in files.items():
            size = (path / name).stat().st_size
            if size != known["bytes"]:
                return f"{name} has {size:,} bytes, not {known['bytes']:,}"
            if hashes and _hash(path / name) != known["xxh3_128"]:
                return f"{name} does not have the content that was saved"
        if hashes and state["xxh3_128"] != _state_hash(state["state"]):
            return f"{_STATE} does not have the content that was saved"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def read_state(path: Path) -> dict[str, Any]:
    """What :func:`save` was given as ``state``. Raises UserError when it is of another format, or none."""
    try:
        content = _read_json(path / _STATE)
    except (OSError, ValueError) as error:
        raise UserError(f"{path / _STATE} cannot be read: {error}. Resume from another checkpoint.") from None
    if content.get("format") != _FORMAT:
        raise UserError(f"{path / _STATE} cannot be resumed: {_other_version(content)}.")
    state: dict[str, Any] = content["state"]
    return state


def check_owner(path: Path) -> None:
    """Refuse pickles of other users, before any of them is opened. Raises UserError."""
    ours = os.geteuid()
    for file in sorted(path.iterdir()):
        if file.suffix in _PICKLES and (owner := file.stat().st_uid) != ours:
            raise UserError(
                f"{file} belongs to user {owner}, and this run to user {ours}: pickles of other users are not opened. If you "
                f"trust them, make them yours (chown -R {ours} {path}) and resume again."
            )


def load(path: Path, accelerator: Accelerator) -> None:
    """Bring weights, optimizer, schedule and random states back. Raises UserError for files that hold anything else."""
    from accelerate.utils import load as load_plain

    check_owner(path)
    try:
        for file in path.glob("random_states_*.pkl"):
            load_plain(file)  # Accelerate passes over what it cannot read here, without a word
        accelerator.load_state(str(path))
    except (pickle.UnpicklingError, RuntimeError, ValueError, KeyError, EOFError, OSError) as error:
        raise UserError(
            f"{path} cannot be loaded into this run: {str(error) or type(error).__name__}\nIts files hold something else than "
            "what a run saves, or belong to another model. Nothing of them was run."
        ) from None


def remove_leftovers(directory: Path) -> None:
    """Remove what a killed process was writing or removing."""
    for path in directory.iterdir() if directory.is_dir() else ():
        if path.suffix in _LEFTOVERS:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _says_something(record: logging.LogRecord) -> bool:
    """False for Accelerate's remark about a head that is the embedding: such a model is saved once, and loaded tied."""
    return "Removed shared tensor" not in str(record.msg)


def _write(target: Path, accelerator: Accelerator, state: dict[str, Any], parts: ModelParts) -> None:
    partial = target.with_name(target.name + ".partial")
    partial.mkdir()
    logging.getLogger("accelerate.utils.other").addFilter(_says_something)
    accelerator.save_state(str(partial), safe_serialization=True)
    if parts.config is not None:
        parts.config.save_pretrained(partial)
    (partial / "recipe.yaml").write_text(parts.recipe)
    if parts.quantisers is not None:
        modelopt_state.write(parts.quantisers, partial)
    files = {
        str(file.relative_to(partial)): {"bytes": file.stat().st_size, "xxh3_128": _hash(file)}
        for file in sorted(partial.rglob("*"))
        if file.is_file()
    }
    (partial / _MANIFEST).write_text(json.dumps({"files": files}, indent=1))
    (partial / _STATE).write_text(_state_text(state))
    sync_tree(partial)
    if target.exists():  # torn, or of another version
        _remove(target)
    os.replace(partial, target)
    sync(target.parent)


def _point_to(target: Path) -> None:
    """Let ``latest`` lead to ``target``."""
    link, latest = target.with_name(f"{_LATEST}.partial"), target.with_name(_LATEST)
    link.unlink(missing_ok=True)
    link.symlink_to(target.name)
    if latest.is_dir() and not latest.is_symlink():  # the run was copied by something that follows links
        shutil.rmtree(latest)
    os.replace(link, latest)
    sync(target.parent)


def _prune(directory: Path, keep: int) -> None:
    """Remove what is older than the newest ``keep`` whole ones."""
    kept = whole(directory)[-keep:]
    for path in saved(directory):
        if kept and path < kept[0]:
            with contextlib.suppress(OSError):  # the next save tries again
                _remove(path)


def _remove(path: Path) -> None:
    """Rename first: a kill in the middle must not leave half a checkpoint under its name."""
    trash = path.with_name(path.name + ".removed")
    os.replace(path, trash)
    shutil.rmtree(trash, ignore_errors=True)  # what stays is removed by the next save


def _state_text(state: dict[str, Any]) -> str:
    return json.dumps({"format": _FORMAT, "xxh3_128": _state_hash(state), "state": state})


def _state_hash(state: dict[str, Any]) -> str:
    import xxhash

    return xxhash.xxh3_128_hexdigest(json.dumps(state, sort_keys=True).encode())


def _hash(path: Path) -> str:
    import xxhash

    digest = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while chunk := file.read(2**22):
            digest.update(chunk)
    return digest.hexdigest()


def _read_json(path: Path) -> dict[str, Any]:
    value = json.loads(path.read_text())
    if not isinstance(value, dict):
        raise ValueError(f"{path.name} holds no JSON object")
    return value


def _other_version(content: dict[str, Any]) -> str:
    """What is wrong with a state of another format."""
    written = content.get("format")
    if not isinstance(written, int):
        return f"its {_STATE} was not written by trtl-rl"
    return f"another version of trtl-rl wrote it (format {written}, this one reads {_FORMAT}), and can resume it"


def _safetensors_error() -> type[Exception]:
    from safetensors import SafetensorError

    error: type[Exception] = SafetensorError
    return error
