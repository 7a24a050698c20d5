"""Where other code's output goes while a dashboard owns the terminal."""

from __future__ import annotations

import io
import sys
import threading
from collections import deque
from pathlib import Path
from typing import IO, TextIO

_TAIL_LINES = 20
_LINE_CHARS = 2000


class Aside(io.TextIOBase):
    """Stands in for standard output and error: writes a log, and says at the end what came in.

    Handlers that were made meanwhile keep it; after ``give_back`` it passes their text on to the real standard error.

    Args:
        path: The log; made at the first output, continued when it exists.
    """

    encoding = "utf-8"

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: IO[str] | None = None
        self._streams: tuple[TextIO, TextIO] | None = None
        self._forward: TextIO | None = None
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._lines = 0
        self._part = ""
        self._lock = threading.Lock()

    def take(self) -> None:
        """Become ``sys.stdout`` and ``sys.stderr``."""
        self._streams = (sys.stdout, sys.stderr)
        sys.stdout = sys.stderr = self

    def give_back(self) -> None:
        """Put both streams back. Safe to call twice."""
        if self._streams is not None:
            sys.stdout, sys.stderr = self._streams
            self._forward, self._streams = sys.stderr, None

    def write(self, text: str) -> int:
        if self._forward is not None:
            return self._forward.write(text)
        with self._lock:
            self._log().write(text)
            *whole, part = (self._part + text).split("\n")
            self._part = part[-_LINE_CHARS:]
            # of a line that was rewritten in place, such as a progress bar, only the last state counts
            self._tail.extend(line.rstrip("\r").rsplit("\r", 1)[-1][:_LINE_CHARS] for line in whole)
            self._lines += len(whole)
        return len(text)

    def flush(self) -> None:
        if self._forward is not None:
            self._forward.flush()

    def fileno(self) -> int:
        """The log's descriptor, so that child processes that are given this stream write there too."""
        return self._forward.fileno() if self._forward is not None else self._log().fileno()

    def writable(self) -> bool:
        return True

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        super().close()

    def report(self) -> list[str]:
        """Lines that say what came in; none if nothing did."""
        with self._lock:
            lines = [*self._tail, *([self._part] if self._part else [])]
            count = self._lines + bool(self._part)
        if not count:
            return []
        title = f"{count} line{'' if count == 1 else 's'} of other output in {self.path}, the last:"
        return [title, *(f"  {line}" for line in lines[-_TAIL_LINES:])]

    def _log(self) -> IO[str]:
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self.path, "a", encoding="utf-8", errors="replace", buffering=1)  # noqa: SIM115 - kept
        return self._file
