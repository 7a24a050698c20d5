"""The watchdog: when a step takes very long, it says what is missing, whoever it is that hangs."""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from trtl_rl.buffer import GroupBuffer
from trtl_rl.metrics import Tell

STALL_FACTOR = 30.0  # a step that takes so many times the median step ...
STALL_SECONDS = 60.0  # ... and at least so long is told of, and again each time that it has taken twice as long


class Watchdog:
    """A thread that watches the learner's thread from outside.

    Args:
        describe: What is missing right now, for people; called with the stage that the learner's thread is in.
        first: Seconds for the first step, which has nothing to be compared with.
        tell: Takes messages.
    """

    def __init__(self, describe: Callable[[str], str], *, first: float, tell: Tell) -> None:
        self._describe, self._first, self._tell = describe, first, tell
        self._recent: deque[float] = deque(maxlen=50)
        self._stages: list[str] = []
        self._silent = 0.0  # counted in turns: while this process is stopped itself, nothing hangs
        self._limit = first
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """The learner's thread does this now."""
        self._stages.append(name)
        try:
            yield
        finally:
            self._stages.pop()

    def step_done(self, seconds: float | None = None) -> None:
        """Something has ended: a step that took ``seconds``, or what is done between two steps."""
        if seconds is not None:
            self._recent.append(seconds)
        usual = statistics.median(self._recent) if self._recent else None
        self._limit = self._first if usual is None else max(STALL_SECONDS, STALL_FACTOR * usual)
        self._silent = 0.0

    def _run(self) -> None:
        before = time.monotonic()
        turn = min(1.0, STALL_SECONDS / 4)
        while not self._stop.wait(turn):
            now = time.monotonic()
            self._silent += min(now - before, 2 * turn)
            before = now
            if self._silent > self._limit:
                self._limit *= 2
                self._look()

    def _look(self) -> None:
        stages = list(self._stages)
        text = self._describe(stages[-1] if stages else "between two steps")
        self._tell("warning", f"No step for {self._silent:.0f} s. {text}")


def missing_groups(buffer: GroupBuffer, group_size: int, progress: dict[int, list[int]]) -> str:
    """What keeps a batch from being whole, the groups that are due first.

    Args:
        progress: Tokens of unfinished answers by index of the group.
    """
    counts = buffer.counts()
    text = f"{counts['ready']} groups are ready, {buffer.batch} make a batch, {counts['in_flight']} are in flight"
    named = []
    for group, silent in buffer.in_flight()[:4]:
        begun = progress.get(group.index)
        where = "not seen in the engine" if begun is None else f"{len(begun)} of {group_size} answers under way"
        named.append(f"prompt {group.prompt.id} ({where}, no sign of life for {silent:.0f} s)")
    return f"{text}{': ' if named else ''}{', '.join(named)}."
