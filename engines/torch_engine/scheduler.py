"""Who runs next: waiting requests, prompts whose keys are being computed, and the rows of one step.

A prompt's keys and values are computed once for all its samples, up to its last token. That token is the first row that
each sample decodes, so sampling has one path, and a sample that gets its slot later copies the keys of one that runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from trtl_rl.engines.torch_engine.sampler import random_stream
from trtl_rl.engines.torch_engine.slots import Slots
from trtl_rl.rollout import Completion, Request

PREFILL_ROWS = 512  # prompt tokens in one step, so that a long prompt does not hold up those that decode ...
ALONE_ROWS = 2048  # ... and where nothing decodes


@dataclass
class Prefill:
    """A prompt under way: ``done`` positions of ``slot`` are filled; ``followers`` wait for a copy."""

    slot: int
    request: Request
    done: int = 0
    followers: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Copy:
    """Keys and values of the first ``count`` positions, from one slot to others."""

    source: int
    targets: list[int]
    count: int


@dataclass(frozen=True)
class Step:
    """Rows of one forward pass: one for each of ``slots``, then prompt tokens. Arrays are int64 [rows]."""

    slots: np.ndarray
    ids: np.ndarray
    owner: np.ndarray
    position: np.ndarray


class Scheduler:
    """First come, first served; probes (negative ids) go first."""

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self.waiting: deque[tuple[Request, list[int]]] = deque()
        self._prefills: list[Prefill] = []

    def submit(self, requests: Sequence[Request]) -> None:
        self._queue([*self.waiting, *((request, list(range(request.samples))) for request in requests)])

    def cancel(self, ids: set[int], version: int) -> list[Completion]:
        """Drop requests, waiting or running; returns what has become of their completions."""
        prefills = self.slots.prefills
        done = [
            Completion(request.id, sample, [], "cancelled", version, version, prefills=prefills.pop(request.id, []))
            for request, samples in self.waiting
            if request.id in ids
            for sample in samples
        ]
        self._queue([item for item in self.waiting if item[0].id not in ids])
        self._end([prefill for prefill in self._prefills if prefill.request.id in ids])
        for id in ids & self.slots.by_request.keys():
            for slot in list(self.slots.by_request[id]):
                done.append(self.slots.complete(slot, "cancelled", version))
        return done

    def restart_prompts(self) -> None:
        """New weights: completions without a token go back to the queue, since their keys are of the old ones."""
        again: dict[int, tuple[Request, list[int]]] = {}
        for slots in list(self.slots.by_request.values()):
            for slot in [slot for slot in slots if self.slots.generated[slot] == 0]:
                occupant = self.slots.release(slot)
                again.setdefault(occupant.request.id, (occupant.request, []))[1].append(occupant.sample)
        self._end(self._prefills)
        rest = []
        for request, samples in self.waiting:
            if request.id in again:
                again[request.id][1].extend(samples)
            else:
                rest.append((request, samples))
        self._queue([*((request, sorted(samples)) for request, samples in again.values()), *rest])

    def admit(self, version: int) -> list[Copy]:
        """Give room to waiting samples; returns the copies to make before the next step."""
        copies = []
        while self.waiting:
            request, samples = self.waiting[0]
            running = self._of_this_version(request, version)
            new: list[int] = []
            while samples:
                slot = self.slots.take(request, samples[0], version)
                if slot is None:
                    break
                uniform = random_stream(request.seed, samples[0], version, request.sampling.max_new_tokens)
                self.slots.uniform[slot, : len(uniform)] = uniform
                new.append(slot)
                samples.pop(0)
            if new:
                copies += self._join(request, new, running)
            if samples:
                break
            self.waiting.popleft()
        return copies

    def step(self) -> Step | None:
        """The rows of the next forward pass, or None when there is nothing to do."""
        s = self.slots
        decoding = np.flatnonzero(s.running)
        ids, owner, position = [s.last[decoding]], [decoding], [s.position[decoding]]
        room = PREFILL_ROWS if len(decoding) else ALONE_ROWS
        for prefill in self._prefills:
            if room == 0:
                break
            part = prefill.request.ids[prefill.done : -1][:room]
            ids.append(np.array(part, np.int64))
            owner.append(np.full(len(part), prefill.slot, np.int64))
            position.append(np.arange(prefill.done, prefill.done + len(part), dtype=np.int64))
            prefill.done += len(part)
            room -= len(part)
        rows = np.concatenate(ids)
        return Step(decoding, rows, np.concatenate(owner), np.concatenate(position)) if len(rows) else None

    def prefilled(self) -> list[Copy]:
        """After a step: let samples run whose prompt is done; returns the copies to make first."""
        whole = [prefill for prefill in self._prefills if prefill.done == len(prefill.request.ids) - 1]
        self._end(whole)
        for prefill in whole:
            self.slots.running[[prefill.slot, *prefill.followers]] = True
        return [Copy(prefill.slot, prefill.followers, prefill.done) for prefill in whole if prefill.followers]

    def _join(self, request: Request, new: list[int], running: int | None) -> list[Copy]:
        """Let new slots of a request run, or wait for its prompt."""
        if len(request.ids) == 1 or running is not None:
            self.slots.running[new] = True
            return [] if running is None else [Copy(running, new, len(request.ids) - 1)]
        for prefill in self._prefills:
            if prefill.request.id == request.id:
                prefill.followers += new
                return []
        self._prefills.append(Prefill(new[0], request, followers=new[1:]))
        return []

    def _end(self, prefills: list[Prefill]) -> None:
        """Note what was computed for prompts that are done, or given up."""
        for prefill in prefills:
            if prefill.done:
                self.slots.prefills.setdefault(prefill.request.id, []).append(prefill.done)
        self._prefills = [prefill for prefill in self._prefills if prefill not in prefills]

    def _of_this_version(self, request: Request, version: int) -> int | None:
        """A slot that has the prompt's keys under these weights."""
        for slot in self.slots.by_request.get(request.id, []):
            if self.slots.running[slot] and self.slots.occupant(slot).version_first == version:
                return slot
        return None

    def _queue(self, items: Sequence[tuple[Request, list[int]]]) -> None:
        self.waiting = deque(sorted(items, key=lambda item: item[0].id >= 0))
