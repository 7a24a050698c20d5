"""Single keys from the terminal, without waiting for Enter; Ctrl-C stays the signal that it is."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import time
from typing import Any

_NAMES = {
    b"\x1b[A": "up",
    b"\x1b[B": "down",
    b"\x1b[C": "right",
    b"\x1b[D": "left",
    b"\x1b[5~": "page up",
    b"\x1b[6~": "page down",
    b"\x1b": "escape",
    b"\t": "tab",
}


class Keys:
    """Reads standard input where that is a terminal and this process is in its foreground; otherwise only waits.

    A process in the background that touches the terminal is stopped by the system, and a run must not be.
    """

    def __init__(self) -> None:
        self._fd: int | None = None
        self._before: list[Any] | None = None
        try:
            if os.isatty(sys.stdin.fileno()):
                self._fd = sys.stdin.fileno()
        except (AttributeError, ValueError, OSError):  # closed, or no file at all
            pass

    def begin(self) -> None:
        """Take lines and echo off."""
        if self._fd is None or self._before is not None or not self._in_foreground():
            return
        try:
            self._before = termios.tcgetattr(self._fd)
            now = termios.tcgetattr(self._fd)
            now[3] &= ~(termios.ICANON | termios.ECHO)
            now[6][termios.VMIN], now[6][termios.VTIME] = 0, 0
            termios.tcsetattr(self._fd, termios.TCSADRAIN, now)
        except termios.error:
            self._fd = None

    @property
    def active(self) -> bool:
        """Whether keys are read."""
        return self._before is not None

    def wait(self, seconds: float) -> list[str]:
        """Names of the keys that are pressed within ``seconds``; returns at the first."""
        if self._fd is None or self._before is None or not self._in_foreground():
            time.sleep(seconds)
            return []
        try:
            if not select.select([self._fd], [], [], seconds)[0]:
                return []
            data = os.read(self._fd, 1024)
        except OSError:
            data = b""
        if not data:  # the terminal is gone
            self._fd = None
        return split(data)

    def end(self) -> None:
        """Put the terminal's mode back. Safe to call twice."""
        if self._fd is not None and self._before is not None and self._in_foreground():
            with contextlib.suppress(termios.error):
                termios.tcsetattr(self._fd, termios.TCSADRAIN, self._before)
        self._before = None

    def _in_foreground(self) -> bool:
        assert self._fd is not None
        try:
            return os.tcgetpgrp(self._fd) == os.getpgrp()
        except OSError:
            return False


def split(data: bytes) -> list[str]:
    """The keys in what a terminal sent.

    >>> split(b"s\\x1b[B\\x1b")
    ['s', 'down', 'escape']
    """
    keys = []
    while data:
        for code in sorted(_NAMES, key=len, reverse=True):
            if data.startswith(code):
                keys.append(_NAMES[code])
                data = data[len(code) :]
                break
        else:
            keys.append(data[:1].decode("latin-1"))
            data = data[1:]
    return keys
