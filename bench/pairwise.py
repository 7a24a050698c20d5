"""A small all-pairs design: cases in which every pair of values of every two factors occurs at least once."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Case = dict[str, Any]


def pairwise(
    factors: Mapping[str, Sequence[Any]], allowed: Callable[[Case], bool] = lambda case: True, tries: int = 50
) -> list[Case]:
    """Choose cases greedily: each begins with a pair that is still missing and is filled up to cover most others.

    Args:
        allowed: Refuses whole cases; a pair that only occurs in refused ones is left out.
        tries: Random fillings from which each case is chosen. The same arguments give the same cases.
    """
    generator = random.Random(0)
    names = list(factors)
    places = [(a, x, b, y) for a, b in itertools.combinations(names, 2) for x in factors[a] for y in factors[b]]
    missing = dict.fromkeys(places)
    cases: list[Case] = []
    while missing:
        first = next(iter(missing))
        best: Case | None = None
        for _ in range(tries):
            case = {name: generator.choice(list(factors[name])) for name in names}
            case[first[0]], case[first[2]] = first[1], first[3]
            for name in generator.sample(names, len(names)):
                if name not in (first[0], first[2]):
                    values = generator.sample(list(factors[name]), len(factors[name]))  # ties go to any
                    case = max(({**case, name: v} for v in values), key=lambda c: _value(c, missing, allowed))
            if allowed(case) and (best is None or _gain(case, missing) > _gain(best, missing)):
                best = case
        if best is None:
            del missing[first]
            continue
        cases.append(best)
        for place in _pairs(best):
            missing.pop(place, None)
    return cases


def _pairs(case: Case) -> list[tuple[str, Any, str, Any]]:
    return [(a, case[a], b, case[b]) for a, b in itertools.combinations(case, 2)]


def _gain(case: Case, missing: Mapping[Any, Any]) -> int:
    return sum(place in missing for place in _pairs(case))


def _value(case: Case, missing: Mapping[Any, Any], allowed: Callable[[Case], bool]) -> tuple[bool, int]:
    return allowed(case), _gain(case, missing)
