"""Leases: how long a prompt may be in flight without a sign of life, and how often its answers may get lost."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass
class Lease:
    """Of one group that is being generated.

    Attributes:
        silent: Seconds without a sign of life.
        failed: How many attempts have come to nothing.
    """

    silent: float = 0.0
    failed: int = 0


class Leases:
    """By index of the group. Time is what :meth:`pass_time` is told: it stands still while the trainer itself is stopped.

    Args:
        seconds: Without a sign of life, after which a lease runs out.
        attempts: How often a group is generated before it is given up.

    >>> leases = Leases(seconds=10, attempts=2)
    >>> leases.grant(3)
    >>> leases.pass_time(6)
    []
    >>> leases.renew([3])
    >>> leases.pass_time(6), leases.pass_time(6)
    ([], [3])
    >>> leases.fail(3), leases.fail(3)
    (True, False)
    """

    def __init__(self, seconds: float, attempts: int) -> None:
        assert seconds > 0 and attempts >= 1
        self.seconds, self.attempts = seconds, attempts
        self._held: dict[int, Lease] = {}

    def grant(self, index: int) -> None:
        """A group is asked for."""
        self._held[index] = Lease()

    def renew(self, indices: Iterable[int]) -> None:
        """There is news of these; those without a lease are passed over."""
        for index in indices:
            if index in self._held:
                self._held[index].silent = 0.0

    def end(self, index: int) -> None:
        """A group is complete, or given up."""
        self._held.pop(index, None)

    def pass_time(self, seconds: float) -> list[int]:
        """Let time pass; returns the groups whose lease has run out, each of which begins a new one."""
        out = []
        for index, lease in self._held.items():
            lease.silent += seconds
            if lease.silent > self.seconds:
                lease.silent = 0.0
                out.append(index)
        return out

    def fail(self, index: int) -> bool:
        """An attempt came to nothing; returns whether there is another."""
        self._held[index].failed += 1
        return self._held[index].failed < self.attempts

    def silent(self, index: int) -> float:
        """Seconds since the last sign of life of a group; 0 without a lease."""
        lease = self._held.get(index)
        return 0.0 if lease is None else lease.silent
