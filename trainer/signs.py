"""Signs of life: which requests an engine gets on with, as far as their user can tell."""

from __future__ import annotations

import time

LOOK = 1.0  # seconds between two looks at how far requests are


class Signs:
    """Signs of life of requests, from completions and from what the engine reports.

    Attributes:
        silent_for: Seconds in which no request at all has got any further.
    """

    def __init__(self) -> None:
        self.silent_for = 0.0
        self._came: set[int] = set()
        self._report: dict[int, list[int]] = {}
        self._looked = time.monotonic()

    def came(self, id: int) -> None:
        """A completion of this request has come."""
        self._came.add(id)

    def pause(self) -> None:
        """Nothing is in flight."""
        self._looked, self.silent_for = time.monotonic(), 0.0

    def passed(self) -> float | None:
        """Seconds since the last look, or None where it is too early for another one.

        At most a second each time: while rewards are scored, or this process is stopped itself, nobody listens.
        """
        passed = time.monotonic() - self._looked
        if passed < LOOK:
            return None
        self._looked += passed
        passed = min(passed, 2 * LOOK)
        self.silent_for += passed
        return passed

    def of_life(self, report: dict[int, list[int]]) -> set[int]:
        """Requests that got further since the last look; and if any did, those that wait for their turn in the engine."""
        moved = {id for id, lengths in report.items() if lengths and lengths != self._report.get(id)} | self._came
        self._report, self._came = report, set()
        if not moved:
            return moved
        self.silent_for = 0.0
        return moved | {id for id, lengths in report.items() if not lengths}
