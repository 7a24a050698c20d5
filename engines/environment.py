"""The Python environment of an engine's process: what is installed there, and how it gets at this very source.

An engine may run in another interpreter than the trainer (``engine.python``), with another torch: TensorRT-LLM pins its own.
It needs torch, numpy, xxhash and safetensors; trtl-rl itself is not installed there, but found through a directory that
holds nothing but a link to the trainer's. So both sides always run the same source.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import trtl_rl
from trtl_rl.errors import UserError
from trtl_rl.refit.channel import ChannelName

_NEEDED = ("torch", "numpy", "xxhash", "safetensors")
_LOOK = """
import importlib.metadata as m, json, sys
found = {"python": ".".join(map(str, sys.version_info[:3]))}
for name in sys.argv[1:]:
    try: found[name] = m.version(name)
    except m.PackageNotFoundError: pass
print(json.dumps(found))
"""


@dataclass(frozen=True)
class Environment:
    """An interpreter and what is installed beside it.

    Attributes:
        versions: Of Python and packages, by name, as their metadata say: nothing was imported.
    """

    executable: str
    versions: dict[str, str]


def read_environment(python: str | None) -> Environment:
    """Look at the environment of ``python``, or of this process.

    Raises:
        UserError: it is no interpreter that starts, is too old, or lacks a package that every engine needs.
    """
    names = (*_NEEDED, "tensorrt_llm", "ray")
    if python is None:
        return Environment(sys.executable, {"python": platform.python_version(), **_installed(names)})
    executable = str(Path(python).expanduser())
    command = [executable, "-c", _LOOK, *names]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=variables(python))
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"engine.python={python} does not start: {error}") from None
    if done.returncode:
        tail = (done.stderr.strip().splitlines() or ["(it said nothing)"])[-1]
        raise UserError(f"engine.python={python} is no Python interpreter that runs: {tail}")
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    if tuple(map(int, found["python"].split(".")[:2])) < (3, 10):
        raise UserError(f"engine.python={python} is Python {found['python']}; an engine needs 3.10 or newer.")
    missing = [name for name in _NEEDED if name not in found]
    if missing:
        raise UserError(
            f"engine.python={python} lacks {', '.join(missing)}, which an engine needs: {executable} -m pip install "
            f"{' '.join(missing)}"
        )
    return Environment(executable, found)


def _installed(names: Sequence[str]) -> dict[str, str]:
    """Versions of those packages that are installed here."""
    found = {}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def variables(python: str | None) -> dict[str, str]:
    """Environment variables for a child of ``python``; those of this process where that is None."""
    if python is None:
        return dict(os.environ)
    # Of the two paths only ours goes along: a PYTHONPATH made for this interpreter would hide the other one's packages.
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    return {**kept, "PYTHONPATH": str(_source_path())}


def choose_channel(
    asked: ChannelName | None, device: str, engine: Environment, *, apart: bool = False
) -> tuple[ChannelName, str]:
    """What carries weights to the engine, and why, in words.

    Args:
        asked: ``refit.channel``; None leaves the choice.
        device: The trainer's.
        apart: Whether there are engines that do not see the trainer's GPU.

    Raises:
        UserError: memory of the GPU was asked for, and an engine does not see it, or the two sides have different versions of
            torch, whose handles differ.
    """
    ours, theirs = importlib.metadata.version("torch"), engine.versions["torch"]
    same = ours == theirs
    if asked == "cuda_ipc" and apart:
        raise UserError(
            "refit.channel=cuda_ipc reaches an engine on the trainer's GPU, and of several engines each has GPUs of its own. "
            "Take refit.channel=shared_memory."
        )
    if asked == "cuda_ipc" and not same:
        raise UserError(
            f"refit.channel=cuda_ipc needs one version of torch on both sides: the trainer has {ours}, the engine's environment "
            f"{theirs}. Take refit.channel=shared_memory."
        )
    if asked is not None:
        return asked, "as refit.channel says"
    if device != "cuda":
        return "shared_memory", "the trainer computes on the CPU"
    if apart:
        return "shared_memory", "each engine has GPUs of its own"
    if same:
        return "cuda_ipc", f"trainer and engine have torch {ours}"
    return "shared_memory", f"CUDA IPC needs one version of torch: the trainer has {ours}, the engine {theirs}"


def check_same_operators(engine: Environment) -> None:
    """Raise UserError where nothing says that operators of the two environments have the same bits: another torch or Python."""
    for name in ("torch", "python"):
        ours, theirs = read_environment(None).versions[name], engine.versions[name]
        if name == "python":
            ours, theirs = (version.rpartition(".")[0] for version in (ours, theirs))
        if ours != theirs:
            raise UserError(
                f"The trainer runs with {name} {ours}, engine.python with {name} {theirs}: nothing says that the operators of the "
                "two give the same bits, FP8 magnifies what differs, and parity.stop=0 demands equal bits. Take an environment "
                f"with {name} {ours}, or let the difference be measured instead: parity.stop=null, or a bound above 0."
            )


def gpu_count() -> int:
    """GPUs of NVIDIA on this machine, as the driver counts them; torch is not asked, since the trainer's may be a CPU build."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        count = ctypes.c_int()
        if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
            return 0
    except (OSError, AttributeError):
        return 0
    return count.value


def divide_gpus(engines: int, each: int) -> list[str]:
    """GPUs of this machine for each engine, as ``CUDA_VISIBLE_DEVICES`` names them.

    Raises:
        UserError: there are not so many.
    """
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = given.split(",") if given else [str(number) for number in range(gpu_count())]
    if engines * each > len(names):
        raise UserError(
            f"{engines} × {each} GPUs are needed (engine.replicas, and --tensor-parallel of the directory), and this machine "
            f"shows {len(names)}. Lower engine.replicas, build with a smaller --tensor-parallel, or add machines with ray.address."
        )
    return [",".join(names[i * each : (i + 1) * each]) for i in range(engines)]


def _source_path() -> Path:
    """A directory that holds this package, by a link, and nothing else."""
    package = Path(trtl_rl.__file__).resolve().parent
    base = os.environ.get("TRTL_RL_CACHE") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "trtl-rl"
    )
    place = Path(base) / "source" / hashlib.sha256(str(package).encode()).hexdigest()[:16]
    link = place / "trtl_rl"
    if not link.exists():
        place.mkdir(parents=True, exist_ok=True)
        partial = place / f"trtl_rl.{os.getpid()}"
        partial.symlink_to(package)
        os.replace(partial, link)  # whole or not at all: another process may be making it too
    return place
