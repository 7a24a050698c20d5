"""Which requests an engine in another process has yet to answer, and when it last got anywhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from trtl_rl.rollout import Completion, Request


class Unanswered:
    """Tells an engine that computes for long from one that lives and never answers. Methods may be called by any thread."""

    def __init__(self) -> None:
        self.busy_seconds = 0.0  # as the engine reports
        self._samples: dict[int, int] = {}  # still to come, by request
        self._moved = time.monotonic()
        self._lock = threading.Lock()

    def ask(self, requests: Sequence[Request]) -> None:
        """These are to be answered from now on."""
        with self._lock:
            self._samples.update({request.id: request.samples for request in requests})

    def withdraw(self, requests: Sequence[Request]) -> None:
        """These were refused."""
        with self._lock:
            for request in requests:
                self._samples.pop(request.id, None)

    def moved(self) -> None:
        """The engine has done what it was told."""
        self._moved = time.monotonic()

    def came(self, done: Sequence[Completion], busy_seconds: float) -> None:
        """Completions have come, perhaps none, and the engine has computed for so long."""
        with self._lock:
            if done or busy_seconds > self.busy_seconds:
                self.moved()
            self.busy_seconds = busy_seconds
            for completion in done:
                left = self._samples.get(completion.request_id, 1) - 1
                self._samples[completion.request_id] = left
                if left == 0:
                    del self._samples[completion.request_id]

    def overdue(self, limit: float) -> str | None:
        """What is missing when the engine has got nowhere for ``limit`` seconds, in words."""
        with self._lock:
            numbers = sorted(self._samples)
            if not numbers or time.monotonic() - self._moved <= limit:
                return None
        some = ", ".join(map(str, numbers[:8])) + (" …" if len(numbers) > 8 else "")
        wait = "1 request waits for an answer" if len(numbers) == 1 else f"{len(numbers)} requests wait for answers"
        return f"The engine lives, but it has computed nothing for {limit:g} s, and {wait}: {some}"
