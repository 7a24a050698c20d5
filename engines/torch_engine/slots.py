"""Slots: the state of every completion that is being generated, as arrays, so that a step is a few calls."""

from __future__ import annotations

import bisect
from dataclasses import dataclass

import numpy as np

from trtl_rl.model.kv import Blocks, block_length, first_length, round_up
from trtl_rl.rollout import Completion, FinishReason, Request


@dataclass
class Occupant:
    """Who holds a slot.

    Attributes:
        version_first: Weight version of the prompt's keys and values, and of the first token.
        whole: Positions reserved in the arena.
    """

    request: Request
    sample: int
    version_first: int
    whole: int


class Arena:
    """Hands out parts of a range of positions: each a block length, at a multiple of it."""

    def __init__(self, positions: int) -> None:
        self._free = [(0, positions)]

    def allocate(self, length: int) -> int | None:
        """The first free place of ``length`` positions, or None."""
        for i, (start, end) in enumerate(self._free):
            first = round_up(start, length)
            if first + length <= end:
                rest = [(start, first), (first + length, end)]
                self._free[i : i + 1] = [(a, b) for a, b in rest if a < b]
                return first
        return None

    def release(self, start: int, length: int) -> None:
        """Give a place back."""
        end = start + length
        i = bisect.bisect(self._free, (start, end))
        if i < len(self._free) and self._free[i][0] == end:
            end = self._free.pop(i)[1]
        if i and self._free[i - 1][1] == start:
            i -= 1
            start = self._free.pop(i)[0]
        self._free.insert(i, (start, end))


class Slots:
    """Arrays indexed by slot.

    Attributes:
        running: Whether the slot takes part in the next decode step; others are empty or wait for their prompt's keys.
        last: Newest token id, not yet fed to the model: of a new completion the last one of the prompt.
        position: Position of ``last``.
        generated: Tokens generated so far.
        limit: Tokens allowed.
        ids, logprobs: Generated tokens and, where asked for, their logprobs, [slots, context].
        uniform: The random stream, [slots, context].
        blocks: Where keys and values lie.
        prefills: By request: ``Completion.prefills`` of the next one that is handed out.
    """

    def __init__(self, count: int, context: int, positions: int) -> None:
        self.count = count
        self.running = np.zeros(count, bool)
        self.last = np.zeros(count, np.int64)
        self.position = np.zeros(count, np.int64)
        self.generated = np.zeros(count, np.int64)
        self.limit = np.zeros(count, np.int64)
        self.temperature = np.ones(count, np.float32)
        self.greedy = np.zeros(count, bool)
        self.wants_logprobs = np.zeros(count, bool)
        self.ids = np.zeros((count, context), np.int64)
        self.logprobs = np.zeros((count, context), np.float32)
        self.uniform = np.zeros((count, context))
        self.blocks = Blocks(np.zeros(count, np.int64), np.ones(count, np.int64))
        self.occupants: list[Occupant | None] = [None] * count
        self.by_request: dict[int, list[int]] = {}
        self.prefills: dict[int, list[int]] = {}
        self._free = list(range(count))[::-1]
        self._arena = Arena(positions)

    @property
    def occupied(self) -> int:
        """How many completions have begun."""
        return self.count - len(self._free)

    def occupant(self, slot: int) -> Occupant:
        occupant = self.occupants[slot]
        assert occupant is not None
        return occupant

    def take(self, request: Request, sample: int, version: int) -> int | None:
        """Occupy a slot and a part of the arena; None where there is no room. The slot is not running yet, and has no stream."""
        prompt, whole = len(request.ids), block_length(len(request.ids) + request.sampling.max_new_tokens)
        start = self._arena.allocate(whole) if self._free else None
        if start is None:
            return None
        slot = self._free.pop()
        self.occupants[slot] = Occupant(request, sample, version, whole)
        self.by_request.setdefault(request.id, []).append(slot)
        self.blocks.start[slot], self.blocks.length[slot] = start, first_length(prompt, whole)
        self.last[slot] = request.ids[-1]
        self.position[slot] = prompt - 1
        self.generated[slot] = 0
        self.limit[slot] = request.sampling.max_new_tokens
        self.temperature[slot] = request.sampling.temperature
        self.greedy[slot] = request.sampling.greedy
        self.wants_logprobs[slot] = request.logprobs
        return slot

    def append(self, slots: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray | None) -> None:
        """Store one new token for each of ``slots``."""
        at = self.generated[slots]
        self.ids[slots, at] = tokens
        if logprobs is not None:
            self.logprobs[slots, at] = logprobs
        self.last[slots] = tokens
        self.position[slots] += 1
        self.generated[slots] = at + 1

    def release(self, slot: int) -> Occupant:
        """Empty a slot."""
        occupant = self.occupant(slot)
        self.occupants[slot] = None
        self.running[slot] = False
        self._free.append(slot)
        self._arena.release(int(self.blocks.start[slot]), occupant.whole)
        siblings = self.by_request[occupant.request.id]
        siblings.remove(slot)
        if not siblings:
            del self.by_request[occupant.request.id]
        return occupant

    def complete(self, slot: int, reason: FinishReason, version: int) -> Completion:
        """Empty a slot and hand out its completion."""
        n = int(self.generated[slot])
        occupant = self.release(slot)
        request = occupant.request
        return Completion(
            request.id,
            occupant.sample,
            self.ids[slot, :n].tolist(),
            reason,
            occupant.version_first,
            version,
            self.logprobs[slot, :n].tolist() if request.logprobs else None,
            self.prefills.pop(request.id, []),
        )
