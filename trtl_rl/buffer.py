"""The asynchronous buffer: it admits groups so that none is born too stale, and hands out batches of complete ones.

With B groups in a batch and s = ``max_staleness``, at weight version v at most (v + s + 1)·B groups were ever started, net of
discarded ones (the admission rule of AReaL). A batch takes the oldest of the ready groups, if all that it leaves behind can
still be trained on in time: the i-th oldest (from 0) will be in the batch after i // B others. Otherwise it waits for
older ones; the oldest B are always such a batch. So every group is trained on within s versions of its start, by
construction, and the buffer paces the engine instead of throwing work away. With s = 0 each batch holds exactly the
groups that were started at its version, in order: the synchronous mode.

A group whose work is lost (its engine died, or gave no sign of life for as long as its lease) stays admitted under the version
of its start and is generated again: the bound holds as before, and what may be started does not change. A group that never
comes back is discarded after some attempts. So each is trained on once, or counted in ``discarded`` with the reason.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Iterable

from trtl_rl.leases import Leases
from trtl_rl.rollout import Group


class GroupBuffer:
    """Shared by the rollout thread (starts and completes groups) and the learner (takes batches).

    Args:
        batch: Groups of one update, B.
        max_staleness: s, in weight versions.
        version: Weight version to begin with.
        needed: Groups that the run will still train on; no more are started, so that its end wastes nothing. None: no end.
        lease: Seconds without a sign of life after which a group counts as lost.
        attempts: How often a group may get lost before it is given up.
    """

    def __init__(
        self,
        batch: int,
        max_staleness: int,
        version: int = 0,
        needed: int | None = None,
        *,
        lease: float = math.inf,
        attempts: int = 1,
    ) -> None:
        self.batch = batch
        self.max_staleness = max_staleness
        self.discarded: Counter[str] = Counter()
        self._unreported: list[tuple[Group, str]] = []
        self.regenerated: Counter[str] = Counter()
        self.lease, self.attempts = lease, attempts
        self._leases = Leases(lease, attempts)
        self._version = version
        self._budget = (max_staleness + 1) * batch  # groups that may be started now
        self._needed = needed
        self._in_flight: dict[int, Group] = {}
        self._ready: dict[int, Group] = {}
        self._changed = threading.Condition()
        self._failure: BaseException | None = None

    def room(self) -> int:
        """How many groups may be started now."""
        with self._changed:
            return self._room()

    def wait_for_room(self, timeout: float) -> bool:
        """Wait until a group may be started; False after ``timeout`` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._room() > 0, timeout)

    def start(self, group: Group) -> None:
        """Register a group that is being generated."""
        with self._changed:
            assert self._room() > 0, "start() needs room()"
            self._spend(1)
            group.version = self._version
            self._in_flight[group.index] = group
            self._leases.grant(group.index)

    def complete(self, group: Group) -> None:
        """A group is scored and may be trained on."""
        with self._changed:
            self._leases.end(group.index)
            self._ready[group.index] = self._in_flight.pop(group.index)
            self._changed.notify_all()

    def discard(self, group: Group, reason: str) -> None:
        """A group cannot be trained on; another may be started in its place."""
        with self._changed:
            del self._in_flight[group.index]
            self._leases.end(group.index)
            self.discarded[reason] += 1
            self._unreported.append((group, reason))
            self._spend(-1)
            self._changed.notify_all()

    def restore(self, ready: Iterable[Group]) -> list[Group]:
        """Take the ready groups of an interrupted run, in place of as many that would be started.

        Returns:
            Those that can no longer be trained on in time, since ``max_staleness`` or the batch has become smaller; they are
            not in the buffer.
        """
        with self._changed:
            assert not self._ready and not self._in_flight, "restore() comes first"
            stale = []
            for group in sorted(ready, key=lambda group: (group.version, group.index)):
                if group.version + self.max_staleness < self._version + len(self._ready) // self.batch:
                    stale.append(group)
                else:
                    self._ready[group.index] = group
                    self._spend(1)
            return stale

    def note_discarded(self, group: Group, reason: str) -> None:
        """A group that is in the buffer no more was discarded: it is yet to be reported."""
        with self._changed:
            self._unreported.append((group, reason))

    def report_discarded(self, clear: bool = True) -> list[tuple[Group, str]]:
        """Groups that were discarded since they were last reported, each with the reason."""
        with self._changed:
            reported = list(self._unreported)
            if clear:
                self._unreported.clear()
            return reported

    def give_back(self, group: Group, reason: str, *, blame: bool = False) -> bool:
        """A group's work is lost: it is generated again, under the admission that it has.

        Args:
            blame: Whether that counts as one of its ``attempts``: an engine that dies is no prompt's fault.

        Returns:
            False, and nothing was done, when it has had all its attempts: discard it.
        """
        with self._changed:
            assert group.index in self._in_flight
            if blame and not self._leases.fail(group.index):
                return False
            self._leases.renew([group.index])
            self.regenerated[reason] += 1
            return True

    def renew(self, indices: Iterable[int]) -> None:
        """There is a sign of life of these groups."""
        with self._changed:
            self._leases.renew(indices)

    def expired(self, seconds: float) -> list[Group]:
        """Let time pass; returns the groups whose lease has run out."""
        with self._changed:
            return [self._in_flight[index] for index in self._leases.pass_time(seconds)]

    def fail(self, error: BaseException) -> None:
        """The rollout side has failed: whoever waits for a batch raises this."""
        with self._changed:
            self._failure = error
            self._changed.notify_all()

    def take(self, timeout: float) -> list[Group] | None:
        """A batch in order of start, or None after ``timeout`` seconds. Raises what :meth:`fail` was given."""
        end = time.monotonic() + timeout
        with self._changed:
            while True:
                if self._failure is not None:
                    raise self._failure
                chosen = self._choose()
                if chosen is not None:
                    return [self._ready.pop(index) for index in chosen]
                if not self._changed.wait(max(0.0, end - time.monotonic())) and time.monotonic() >= end:
                    return None

    def advance(self, version: int) -> None:
        """The engine is at ``version``: as many groups more may be started as a batch holds."""
        with self._changed:
            assert version == self._version + 1, "versions follow one another"
            self._version = version
            self._budget += self.batch
            self._changed.notify_all()

    def counts(self) -> dict[str, int]:
        """Groups that are ready, that are being generated, and that were discarded or generated again so far."""
        with self._changed:
            return {
                "ready": len(self._ready),
                "in_flight": len(self._in_flight),
                "discarded": self.discarded.total(),
                "regenerated": self.regenerated.total(),
            }

    def in_flight(self) -> list[tuple[Group, float]]:
        """Groups that are being generated or scored, each with its seconds without a sign of life; those due first come first."""
        with self._changed:
            groups = sorted(self._in_flight.values(), key=lambda group: (group.version, group.index))
            return [(group, self._leases.silent(group.index)) for group in groups]

    def ready(self) -> list[Group]:
        """Groups that wait to be trained on."""
        with self._changed:
            return list(self._ready.values())

    def untrained(self) -> list[Group]:
        """Groups that were started and not yet handed out, in order: what a checkpoint must not forget."""
        with self._changed:
            both = {**self._in_flight, **self._ready}
            return [both[index] for index in sorted(both)]

    def _room(self) -> int:
        return self._budget if self._needed is None else min(self._budget, self._needed)

    def _spend(self, groups: int) -> None:
        self._budget -= groups
        if self._needed is not None:
            self._needed -= groups

    def _choose(self) -> list[int] | None:
        """Indices of the next batch, or None while it must be waited for."""
        if len(self._ready) < self.batch:
            return None
        chosen = sorted(self._ready, key=lambda index: (self._ready[index].version, index))[: self.batch]
        left = [group.version for group in self._in_flight.values()]
        left += [group.version for index, group in self._ready.items() if index not in chosen]
        for i, version in enumerate(sorted(left)):
            if version + self.max_staleness < self._version + 1 + i // self.batch:
                return None
        return sorted(chosen)
