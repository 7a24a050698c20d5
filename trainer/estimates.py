"""Estimates from several answers per prompt, with confidence intervals over prompts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

_Z = 1.959963984540054  # of a 95 % interval


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts with its 95 % confidence interval."""

    mean: float
    low: float
    high: float


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Unbiased estimate of the chance that of k answers at least one is right, from n answers of which some were.

    1 - C(n - c, k) / C(n, k): Chen et al., Evaluating Large Language Models Trained on Code, arXiv 2107.03374, equation 1.

    >>> round(pass_at_k(4, 1, 2), 3)
    0.5
    """
    assert 0 <= correct <= n and 1 <= k <= n
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def majority(answers: Sequence[str | None], right: Sequence[bool]) -> float:
    """Whether the most frequent answer is right; among equally frequent ones, the share of right ones.

    Completions without an answer (``None``) have no vote. Self-consistency: Wang et al., arXiv 2203.11171.

    Args:
        right: Per completion. Where completions of one answer were judged differently, their mean counts.
    """
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0.0
    most = max(votes.values())
    leaders = [answer for answer, count in votes.items() if count == most]
    judged = {a: [good for answer, good in zip(answers, right, strict=True) if answer == a] for a in leaders}
    return sum(sum(goods) / len(goods) for goods in judged.values()) / len(leaders)


def estimate(values: Sequence[float]) -> Estimate:
    """The mean over prompts, and an interval that treats prompts, not answers, as independent.

    The standard error is that of the means of prompts (clustered: Miller, Adding Error Bars to Evals, arXiv 2411.00640,
    section 2.2). For values in [0, 1] the interval is Wilson's with the number of trials that has this error, so that it
    does not vanish where every prompt is right or wrong; for other values it is the normal one.
    """
    n = len(values)
    assert n > 0
    mean = math.fsum(values) / n
    variance = math.fsum((value - mean) ** 2 for value in values) / max(n - 1, 1) / n
    if not all(0.0 <= value <= 1.0 for value in values):
        half = _Z * math.sqrt(variance)
        return Estimate(mean, mean - half, mean + half)
    spread = mean * (1.0 - mean)
    trials = max(n, spread / variance) if variance > 0 else float(n)
    scale = 1.0 + _Z**2 / trials
    centre = (mean + _Z**2 / (2 * trials)) / scale
    half = _Z / scale * math.sqrt(spread / trials + _Z**2 / (4 * trials**2))
    return Estimate(mean, max(0.0, min(mean, centre - half)), min(1.0, max(mean, centre + half)))


def powers_up_to(n: int) -> list[int]:
    """1, 2, 4, … and n itself.

    >>> powers_up_to(6)
    [1, 2, 4, 6]
    """
    powers = [2**i for i in range(n.bit_length()) if 2**i < n]
    return [*powers, n]
