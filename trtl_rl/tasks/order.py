"""The order in which rows are drawn: fixed by the seed alone, and found again from an index alone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]

EPOCH, HELD_OUT, MIXTURE = 0, 1, 2  # which permutation; see permutation
_BLOCK = 4096


class Draws(Protocol):
    """What the rollout side needs of an order."""

    def at(self, index: int) -> tuple[int, int]:
        """The ``index``-th draw of the run, from 0: (row id, occurrence)."""


class Order:
    """Which row is drawn when. It holds no position, so a run resumes from an index alone.

    Args:
        ids: The rows to draw from.
        seed: Every epoch has its own shuffle, derived from (seed, epoch).
        shuffle: Without it every epoch goes through ``ids`` as they are.
        difficulty: One number per row of ``ids``: every epoch goes from the smallest to the largest, shuffled among equals.
    """

    def __init__(self, ids: Ids, seed: int, shuffle: bool, difficulty: npt.NDArray[np.float64] | None = None) -> None:
        def epoch_ids(epoch: int) -> Ids:
            at = permutation(len(ids), seed, epoch, EPOCH) if shuffle else np.arange(len(ids))
            if difficulty is not None:
                at = at[np.argsort(difficulty[at], kind="stable")]
            return ids[at]

        self._length = len(ids)
        self._epoch = lru_cache(maxsize=2)(epoch_ids)

    def at(self, index: int) -> tuple[int, int]:
        """The ``index``-th draw of the run, from 0: (row id, occurrence); the occurrence is the epoch."""
        epoch, position = divmod(index, self._length)
        return int(self._epoch(epoch)[position]), epoch


class MixtureOrder:
    """Draws each row from one of several orders, by weight; each of them goes through its own epochs.

    Which of them is drawn comes from (seed, block of draws), so that an index alone is enough here too.

    Args:
        orders: One per part.
        weights: Positive; only their ratios matter.
    """

    def __init__(self, orders: Sequence[Order], weights: Sequence[float], seed: int) -> None:
        self._orders, self._seed = list(orders), seed
        self._edges = np.cumsum(weights) / np.sum(weights)
        self._before = [np.zeros(len(orders), np.int64)]  # draws of each part before each block
        self._block = lru_cache(maxsize=4)(self._draw)

    def at(self, index: int) -> tuple[int, int]:
        """The ``index``-th draw of the run, from 0: (row id, epoch of its part)."""
        block, position = divmod(index, _BLOCK)
        while len(self._before) <= block:
            drawn = np.bincount(self._block(len(self._before) - 1), minlength=len(self._orders))
            self._before.append(self._before[-1] + drawn)
        parts = self._block(block)
        part = int(parts[position])
        earlier = int(self._before[block][part]) + int(np.count_nonzero(parts[:position] == part))
        return self._orders[part].at(earlier)

    def _draw(self, block: int) -> Ids:
        raw = np.random.Philox(np.random.SeedSequence([self._seed, block, MIXTURE])).random_raw(_BLOCK)
        return np.searchsorted(self._edges, raw / 2.0**64, side="right").clip(max=len(self._edges) - 1)


def permutation(count: int, seed: int, epoch: int, purpose: int) -> Ids:
    """A shuffle of ``range(count)`` [count], fixed by its arguments whatever the version of numpy.

    ``Generator.permutation`` may change between versions of numpy; the raw draws of a bit generator may not.
    """
    draws = np.random.Philox(np.random.SeedSequence([seed, epoch, purpose])).random_raw(count)
    return np.argsort(draws, kind="stable").astype(np.int64)
