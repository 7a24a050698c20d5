"""Draw tokens; each completion has a random stream of its own, whoever shares the batch."""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch import Tensor


def random_stream(seed: tuple[int, int, int], sample: int, version: int, count: int) -> np.ndarray:
    """``count`` uniform float64 numbers in [0, 1) of one completion.

    They depend on the run's seed, the prompt and its occurrence, the sample and the weight version at the first token;
    so a synchronous run repeats, and a resumed group is not a copy of an earlier one.
    """
    digest = hashlib.blake2b(repr((*seed, sample, version)).encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little"))).random(count)


def sample_tokens(logits: Tensor, temperature: Tensor, uniform: Tensor, greedy: Tensor) -> Tensor:
    """Draw one token a row from ``softmax(logits / temperature)`` by inverting the cumulative distribution.

    Args:
        logits: [M, V] float32.
        temperature: [M] float32.
        uniform: [M] float64 in [0, 1).
        greedy: [M] bool: take the largest logit instead.

    Returns:
        [M] int64. Each row depends on its own inputs only.
    """
    cumulative = torch.softmax(logits / temperature[:, None], -1).double().cumsum(-1)
    total = cumulative[:, -1]
    # The product may be rounded up to the total, beyond which there is no token.
    target = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    drawn = torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]
    return torch.where(greedy, logits.argmax(-1), drawn) if bool(greedy.any()) else drawn
