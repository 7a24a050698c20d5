"""Random numbers: each completion has a stream of its own, whoever shares the batch."""

from __future__ import annotations

import hashlib

import numpy as np


def random_stream(seed: tuple[int, int, int], sample: int, version: int, count: int) -> np.ndarray:
    """``count`` uniform float64 numbers in [0, 1) of one completion.

    They depend on the run's seed, the prompt and its occurrence, the sample and the weight version at the first token;
    so a synchronous run repeats, and a resumed group is not a copy of an earlier one.
    """
    digest = hashlib.blake2b(repr((*seed, sample, version)).encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little"))).random(count)
