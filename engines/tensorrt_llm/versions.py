"""Which TensorRT-LLM this is written for, and what to tell a user who does not have it."""

from __future__ import annotations

from trtl_rl.engines import environment as environment_module
from trtl_rl.engines.environment import Environment
from trtl_rl.errors import UserError

# The first whose sources hold everything that is used here, and the first that was not read.
FIRST, BEYOND = "1.3.0rc26", "1.5"
RANGE = f">={FIRST},<{BEYOND}"
INSTALL = f'pip install "tensorrt-llm{RANGE}" ray xxhash safetensors --extra-index-url https://pypi.nvidia.com'
_WHERE = (
    "Install it into an environment of its own, since it pins another torch than the trainer may have, and name that "
    f"environment's interpreter as engine.python:\n  {INSTALL}"
)


def check_version(version: str) -> None:
    """Raise UserError unless this version is in the supported range. Works in every environment: no packaging needed.

    >>> check_version("1.3.0rc26")
    """
    if (
        _key(version) < _key(FIRST) or _key(version)[:2] >= _key(BEYOND)[:2]
    ):  # candidates of the latter were not read either
        raise UserError(
            f"TensorRT-LLM {version} is not supported: this is written for {RANGE}, and refits of FP8 weights differ between "
            f"versions. {_WHERE}"
        )


def check_machine(environment: Environment, *, here: bool = True) -> None:
    """Raise UserError when TensorRT-LLM cannot run in this environment; nothing is imported.

    Args:
        here: Whether it shall run on this machine, which needs a GPU then.
    """
    found = environment.versions.get("tensorrt_llm")
    no_gpu = here and environment_module.gpu_count() == 0
    if found is None:
        needed = "\nIt needs an NVIDIA GPU, too, and the driver of this machine finds none." if no_gpu else ""
        raise UserError(
            f"{environment.executable} has no TensorRT-LLM. {_WHERE}\n(The package of that name on PyPI alone only looks for "
            f"NVIDIA's index, and may hang.){needed}"
        )
    check_version(found)
    if "ray" not in environment.versions:
        raise UserError(
            f"{environment.executable} has TensorRT-LLM {found}, but no Ray, which its workers run on: "
            f"{environment.executable} -m pip install ray"
        )
    if no_gpu:
        raise UserError(
            "TensorRT-LLM needs an NVIDIA GPU, and the driver of this machine finds none. engine.backend=torch, the embedded "
            f"engine, runs here, from the same engine directory. On a machine with a GPU: {INSTALL}"
        )


def _key(version: str) -> tuple[int, int, int, int]:
    """Order of versions such as 1.3.0rc26 and 1.4.0; what follows a plus sign does not count."""
    numbers, _, candidate = version.partition("+")[0].partition("rc")
    parts = [int("".join(c for c in part if c.isdigit()) or 0) for part in numbers.split(".")[:3]]
    major, minor, patch = [*parts, 0, 0, 0][:3]
    return major, minor, patch, int("".join(c for c in candidate if c.isdigit())) if candidate else 10**6
