"""Versions of what computes: for the start of a run, engine directories and bug reports."""

from __future__ import annotations

import platform
from importlib.metadata import version

from trtl_rl import __version__

_PACKAGES = ("torch", "transformers", "nvidia-modelopt", "accelerate")


def versions() -> dict[str, str]:
    """Versions of Python, trtl-rl and the packages that computations depend on, by name."""
    found = {"python": platform.python_version(), "trtl-rl": __version__}
    return {**found, **{name: version(name) for name in _PACKAGES}}
