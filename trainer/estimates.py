"""Estimates from several answers per prompt, with confidence intervals over prompts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

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


def maj_at_k(answers: Sequence[str | None], right: Sequence[bool], k: int) -> float:
    """Unbiased estimate of the chance that the most frequent of k answers is right, from n answers; ties are drawn by lot.

    It is the mean of that chance over all C(n, k) choices of k of the n answers (the U-statistic of the vote of
    self-consistency, Wang et al., arXiv 2203.11171, section 2; what :func:`pass_at_k` is for "at least one is right"), computed
    without listing them. Completions without an answer (``None``) have no vote; where nobody votes it is wrong. With k = n
    it is the vote of all.

    How many of each answer are among the k is multivariate hypergeometric: independent binomial numbers with p = k / n,
    given that they add up to k. For each number of votes t the product of their generating functions, cut off above t votes,
    says how often an answer leads with t votes and how many share that lead.

    Args:
        right: Per completion. Where completions of one answer were judged differently, their mean counts.

    >>> maj_at_k(["a", "a", "b"], [True, True, False], 3)
    1.0
    >>> round(maj_at_k(["a", "a", "b"], [True, True, False], 1), 3)
    0.667
    """
    n = len(answers)
    assert 1 <= k <= n == len(right)
    votes = Counter(answer for answer in answers if answer is not None)
    counts = Counter(votes.values())  # answers that occur as often have the same chance to lead
    p = k / n
    silent = _binomial(n - votes.total(), p)
    chance = 0.0
    for count in counts:
        goods = [good for answer, good in zip(answers, right, strict=True) if votes.get(answer) == count]  # type: ignore[arg-type]
        if not any(goods):
            continue
        others = counts - Counter([count])
        leads = math.fsum(
            _binomial(count, p)[t] * _shared_lead(others, silent, t, k, p) for t in range(1, min(count, k) + 1)
        )
        chance += sum(goods) / count * leads
    return float(chance / _binomial(n, p)[k])


def _shared_lead(others: Counter[int], silent: NDArray[np.float64], t: int, k: int, p: float) -> float:
    """Chance that k - t of the others are chosen, none with more than ``t`` votes, times this answer's share of the lead.

    Args:
        others: How many other answers occur how often.
        silent: Chances of how many completions without an answer are chosen.
    """
    ways = np.zeros((k - t + 1, k // t + 1))  # [chosen, answers with t votes]
    ways[: len(silent), 0] = silent[: k - t + 1]
    for count, times in others.items():
        chances = _binomial(count, p)[: t + 1]
        for _ in range(times):
            longer = np.zeros_like(ways)
            for chosen, one in enumerate(chances[: k - t + 1]):
                leads = chosen == t
                longer[chosen:, leads:] += one * ways[: len(ways) - chosen, : ways.shape[1] - leads]
            ways = longer
    return float(ways[-1] @ (1.0 / np.arange(1, ways.shape[1] + 1)))


@lru_cache(maxsize=4096)
def _binomial(n: int, p: float) -> NDArray[np.float64]:
    """Chances of 0 to ``n`` successes."""
    chances = np.ones(1)
    for _ in range(n):
        chances = np.convolve(chances, [1.0 - p, p])
    return chances


def estimate(values: Sequence[float]) -> Estimate:
    """The mean over prompts, and an interval that treats prompts, not answers, as independent.

    The standard error is that of the means of prompts (clustered: Miller, Adding Error Bars to Evals, arXiv 2411.00640,
    section 2.2). For values in [0, 1] the interval is Wilson's with the number of trials that has this error, so that it
    does not vanish where every prompt is right or wrong; for other values it is the normal one. Estimates of a prompt, such as
    :func:`pass_at_k` and :func:`maj_at_k`, are values too. Away from the ends this is the percentile bootstrap over prompts;
    near them that one is too narrow (covering 79 % where this covers 94 %: maj@8 of 30 prompts, 0.95 on average).
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
