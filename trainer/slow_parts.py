"""Names the part of a step that takes very long, while it does: a hang is told by who hangs."""

from __future__ import annotations

import threading
import time
from types import TracebackType

from trtl_rl.metrics import MetricsWriter


class SlowParts:
    """Writes a ``part`` row once a part of a step lasts ``after`` seconds, and again each time that has doubled.

    As a context manager it runs a thread that looks once a second; the loop itself only notes a name and a time.
    """

    def __init__(self, metrics: MetricsWriter, after: float = 10.0) -> None:
        self.metrics, self.after = metrics, after
        self._now: tuple[str, float] | None = None  # replaced as a whole: read by the thread without a lock
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="slow parts", daemon=True)

    def __enter__(self) -> SlowParts:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()

    def enter(self, name: str | None) -> None:
        """The loop is in this part from now on; None: in none."""
        self._now = None if name is None else (name, time.monotonic())

    def _watch(self) -> None:
        told, limit = None, self.after
        while not self._done.wait(min(1.0, self.after / 4)):
            now = self._now
            if now is None:
                continue
            if now is not told:
                told, limit = now, self.after
            seconds = time.monotonic() - now[1]
            if seconds >= limit:
                limit = 2 * seconds
                self.metrics.part(now[0], seconds)
