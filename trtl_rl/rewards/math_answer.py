"""``math_answer``: mathematical equality of final answers, by math-verify.

math-verify limits its time by signals, which only a main thread may use. Its limits are off here: what would take long is
refused beforehand, and by default the reward runs in a process that can be killed.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from trtl_rl.rewards.reward import text_of

MARK = "####"
# Longest answer that is judged, in characters: answers are short, and the judge's time grows with length.
_LONGEST_ANSWER = 200
# Powers that are worked out; 9^(9^9) would take the judge forever.
_LARGEST_POWER, _LARGEST_SYMBOLIC_POWER = 1000, 20


def math_answer(completions: list[Any], answer: list[Any], **columns: Any) -> list[float | None]:
    """1 where the completion's answer equals the gold answer mathematically (by math-verify), else 0.

    Gold is the column ``answer``: what follows ``####`` if it is there (GSM8K), else all of it. The completion's
    answer is the line after its last ``####``; without the mark its last ``\\boxed{}``, else its last formula or
    number. An answer that asks for a long calculation (a sum, an integral, a factorial, a power beyond 1000) or has
    over 200 characters is wrong: math-verify would work on it without end, and its time limit needs the main thread.
    ``None``, which excludes the sample, where gold is missing or cannot be parsed.
    """
    return [_equals(text_of(item), gold) for item, gold in zip(completions, answer, strict=True)]


def final_answer(text: str) -> str | None:
    """What majority votes compare: the judge's reading of the completion's answer, ``None`` where it has none."""
    found = _parse(_answer(text))
    return str(found[0]) if found and _is_quick(found[0]) else None


def _equals(text: str, gold: Any) -> float | None:
    expected = _gold(str(gold)) if gold is not None else ()
    if not expected:
        return None
    found = _parse(_answer(text))
    if not found or not _is_quick(found[0]):
        return 0.0
    return float(_judge().verify(list(expected), list(found), timeout_seconds=None))


def _answer(text: str) -> str:
    """The part of a completion that holds its answer; empty when the mark is followed by nothing or by too much."""
    if MARK not in text:
        return text
    lines = text.rsplit(MARK, 1)[1].strip().splitlines()
    return lines[0] if lines and len(lines[0]) <= _LONGEST_ANSWER else ""


@lru_cache(maxsize=4096)
def _gold(text: str) -> tuple[Any, ...]:
    text = text.rsplit(MARK, 1)[-1].strip()
    # math-verify reads LaTeX only between delimiters, which gold columns often leave out.
    return _parse(text) or _parse(f"${text}$")


def _parse(text: str) -> tuple[Any, ...]:
    """math-verify's reading of the last answer in ``text``: a sympy expression and its source text; empty if none."""
    judge = _judge()
    targets = [judge.LatexExtractionConfig(boxed_match_priority=0), judge.ExprExtractionConfig()]
    found: list[Any] = judge.parse(text, extraction_config=targets, parsing_timeout=None)
    return tuple(item for item in found if not isinstance(item, str) or len(item) <= _LONGEST_ANSWER)


def _is_quick(expression: Any) -> bool:
    """Whether the judge can compare ``expression`` in moderate time."""
    import sympy
    from sympy.concrete.expr_with_limits import ExprWithLimits
    from sympy.functions.combinatorial.factorials import CombinatorialFunction

    if not isinstance(expression, sympy.Basic):
        return True
    power = symbolic_power = 1.0
    for node in sympy.preorder_traversal(expression):
        if isinstance(node, ExprWithLimits | CombinatorialFunction | sympy.Limit | sympy.Derivative):
            return False
        if isinstance(node, sympy.Pow) and node.exp.is_Number:
            size = max(1.0, abs(float(node.exp)))
            power *= size
            symbolic_power *= size if node.base.free_symbols else 1.0
        elif isinstance(node, sympy.Pow) and not node.exp.free_symbols:
            return False  # a power in the exponent, or another number that is not worked out yet
    return power <= _LARGEST_POWER and symbolic_power <= _LARGEST_SYMBOLIC_POWER


@lru_cache(maxsize=1)
def _judge() -> Any:
    """The module math_verify; its warning that time limits are off is silenced, since they are off on purpose."""
    import logging

    import math_verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return math_verify
