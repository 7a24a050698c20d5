"""Slots: the state of every completion that is being generated, as arrays, so that a step is a few calls."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trtl_rl.rollout import Completion, FinishReason, Request


@dataclass
class Occupant:
    """Who holds a slot."""

    request: Request
    sample: int
    version_first: int


class Slots:
    """Arrays indexed by slot.

    Attributes:
        last: Newest token id, not yet fed to the model.
        position: Position that ``last`` will have.
        generated: Tokens generated so far.
        limit: Tokens allowed.
        ids, logprobs: Generated tokens and, where asked for, their logprobs, [slots, context].
        uniform: The random stream, [slots, context].
    """

    def __init__(self, count: int, context: int) -> None:
        self.count = count
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
        self.occupants: list[Occupant | None] = [None] * count
        self.free = list(range(count))[::-1]

    def active(self) -> np.ndarray:
        """Indices of occupied slots, ascending."""
        return np.array([i for i, occupant in enumerate(self.occupants) if occupant is not None], np.int64)

    def take(self, request: Request, sample: int, version: int, uniform: np.ndarray) -> int:
        """Occupy a free slot."""
        slot = self.free.pop()
        self.occupants[slot] = Occupant(request, sample, version)
        self.position[slot] = len(request.ids)
        self.generated[slot] = 0
        self.limit[slot] = request.sampling.max_new_tokens
        self.temperature[slot] = request.sampling.temperature
        self.greedy[slot] = request.sampling.greedy
        self.wants_logprobs[slot] = request.logprobs
        self.uniform[slot, : len(uniform)] = uniform
        return slot

    def append(self, slots: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray | None) -> None:
        """Store one new token for each of ``slots``."""
        at = self.generated[slots]
        self.ids[slots, at] = tokens
        if logprobs is not None:
            self.logprobs[slots, at] = logprobs
        self.last[slots] = tokens
        self.generated[slots] = at + 1

    def release(self, slot: int, reason: FinishReason, version: int) -> Completion:
        """Free a slot and hand out its completion."""
        occupant = self.occupants[slot]
        assert occupant is not None
        n = int(self.generated[slot])
        self.occupants[slot] = None
        self.free.append(slot)
        request = occupant.request
        return Completion(
            request.id,
            occupant.sample,
            self.ids[slot, :n].tolist(),
            reason,
            occupant.version_first,
            version,
            self.logprobs[slot, :n].tolist() if request.logprobs else None,
        )
