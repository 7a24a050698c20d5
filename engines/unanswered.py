"""Which requests an engine in another process has yet to answer, how far they are, and when it last got anywhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence

from trtl_rl.rollout import Completion, Request


class Unanswered:
    """Tells an engine that computes for long from one that lives and never answers. Methods may be called by any thread."""

    def __init__(self) -> None:
        self.busy_seconds = 0.0  # as the engine reports
        self._samples: dict[int, int] = {}  # still to come, by request
        self._progress: dict[int, list[int]] = {}  # tokens of what is unfinished, by request, as the engine reports
        self._moved = time.monotonic()
        self._lock = threading.Lock()

    def ask(self, requests: Sequence[Request]) -> None:
        """These are to be answered from now on."""
        with self._lock:
            self._samples.update({request.id: request.samples for request in requests})

    def withdraw(self, ids: Iterable[int]) -> None:
        """These were refused, or cancelled: if they are answered nevertheless, well."""
        with self._lock:
            for id in ids:
                self._samples.pop(id, None)

    def moved(self) -> None:
        """The engine has done what it was told."""
        self._moved = time.monotonic()

    def came(
        self,
        done: Sequence[Completion],
        busy_seconds: float,
        progress: Iterable[tuple[int, list[int]]] | None = None,
    ) -> None:
        """Completions have come, perhaps none, and the engine has computed for so long.

        Args:
            progress: What :meth:`progress` is from now on; None: as before, without those completions.
        """
        with self._lock:
            if done or busy_seconds > self.busy_seconds:
                self.moved()
            self.busy_seconds = busy_seconds
            for completion in done:
                if completion.request_id in self._samples:
                    self._samples[completion.request_id] -= 1
                    if self._samples[completion.request_id] == 0:
                        del self._samples[completion.request_id]
            if progress is not None:
                self._progress = {id: list(lengths) for id, lengths in progress}
            else:
                for completion in done:
                    self._end(completion)

    def progress(self) -> dict[int, list[int]]:
        """Tokens of every unfinished completion that had begun at the last report, by request; none for one that waits."""
        with self._lock:
            return {id: list(lengths) for id, lengths in self._progress.items()}

    def overdue(self, limit: float) -> str | None:
        """What is missing when the engine has got nowhere for ``limit`` seconds, in words."""
        with self._lock:
            numbers = sorted(self._samples)
            if not numbers or time.monotonic() - self._moved <= limit:
                return None
        some = ", ".join(map(str, numbers[:8])) + (" …" if len(numbers) > 8 else "")
        wait = "1 request waits for an answer" if len(numbers) == 1 else f"{len(numbers)} requests wait for answers"
        return f"The engine lives, but it has computed nothing for {limit:g} s, and {wait}: {some}"

    def _end(self, completion: Completion) -> None:
        """Take the unfinished completion that this one was out of the report: the longest that is not longer."""
        lengths = self._progress.get(completion.request_id, [])
        shorter = [length for length in lengths if length <= len(completion.ids)]
        if shorter:
            lengths.remove(max(shorter))
