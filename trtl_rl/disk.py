"""Bring what was written to the disk, so that a rename after it makes whole files visible, whatever happens to the machine."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from trtl_rl.errors import UserError


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


def replace_file(path: Path, data: str | bytes) -> None:
    """Write a whole file. A kill leaves the old file or the new one, never half of one.

    Raises:
        OSError: it cannot be written; the old file stays, and nothing is left beside it.
    """
    part = path.with_name(path.name + ".partial")
    try:
        with open(part, "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
        sync(path.parent)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def alone_in(directory: Path) -> Iterator[None]:
    """Hold a lock on a directory, which ends with the process at the latest.

    Raises:
        UserError: another process holds it. File systems that know no locks let everybody in.
    """
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"Another process is running {directory}: wait for its end, or stop it. `trtl-rl watch {directory}` shows it."
            ) from None
        except OSError:
            pass
        yield
    finally:
        os.close(descriptor)
