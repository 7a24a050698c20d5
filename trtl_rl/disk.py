"""Bring what was written to the disk, so that a rename after it makes whole files visible, whatever happens to the machine."""

from __future__ import annotations

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Bring one file, or the names in one directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(directory: Path) -> None:
    """Bring all files of a directory to the disk, and the names of all of them."""
    for path in directory.rglob("*"):
        sync(path)
    sync(directory)
