"""Where other output goes while a dashboard owns the terminal: that of Python, of libraries in C, and of child processes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

_TAIL_LINES = 20
_TAIL_BYTES = 64 * 1024
_LINE_CHARS = 2000


class Aside:
    """Points the descriptors of standard output and error at a log, and says at the end what came in.

    Args:
        path: The log; continued when it exists, and removed again if it stays empty.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._saved: tuple[int, int] | None = None
        self._began = 0

    def take(self) -> None:
        """Begin. Whoever draws must have a descriptor of its own by now."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        log = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._began = os.fstat(log).st_size
        _flush()
        self._saved = (os.dup(1), os.dup(2))
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)

    def give_back(self) -> None:
        """Put both descriptors back. Safe to call twice."""
        if self._saved is None:
            return
        _flush()
        for number, saved in zip((1, 2), self._saved, strict=True):
            os.dup2(saved, number)
            os.close(saved)
        self._saved = None
        if self.path.exists() and self.path.stat().st_size == 0:
            self.path.unlink()

    def report(self) -> list[str]:
        """Lines that say what came in; none if nothing did."""
        if not self.path.exists() or self.path.stat().st_size <= self._began:
            return []
        count = 0
        with open(self.path, "rb") as file:
            file.seek(self._began)
            last = b""
            while block := file.read(2**20):
                count += block.count(b"\n")
                last = block
            file.seek(max(self._began, self.path.stat().st_size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
        count += not last.endswith(b"\n")
        # of a line that was rewritten in place, such as a progress bar, only the last state counts
        lines = [line.rstrip("\r").rsplit("\r", 1)[-1][:_LINE_CHARS] for line in text.rstrip("\n").split("\n")]
        title = f"{count} line{'' if count == 1 else 's'} of other output in {self.path}, the last:"
        return [title, *(f"  {line}" for line in lines[-_TAIL_LINES:])]


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            stream.flush()
