"""The built-in rewards, called as TRL calls rewards: keyword lists with one item per completion in, one value each out.

``exact_match`` and ``math_answer`` are reward functions; ``format_match`` and ``length_penalty`` make one from
arguments.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from trtl_rl.errors import UserError

Values = list[float | None]
RewardFunction = Callable[..., Any]

MARK = "####"
# Longest answer that is judged, in characters: answers are short, and the judge's time grows with length.
_LONGEST_ANSWER = 200
# Powers that are worked out; 9^(9^9) would take the judge forever.
_LARGEST_POWER, _LARGEST_SYMBOLIC_POWER = 1000, 20


def exact_match(completions: list[str], answer: list[Any], **columns: Any) -> Values:
    """1 where the completion, stripped of white space, is the column ``answer``, else 0; ``None`` without an answer."""
    return [
        None if gold is None else float(text.strip() == str(gold).strip())
        for text, gold in zip(completions, answer, strict=True)
    ]


def math_answer(completions: list[str], answer: list[Any], **columns: Any) -> Values:
    """1 where the completion's answer equals the gold answer mathematically (by math-verify), else 0.

    Gold is the column ``answer``: what follows ``####`` if it is there (GSM8K), else all of it. The completion's
    answer is the line after its last ``####``; without the mark its last ``\\boxed{}``, else its last formula or
    number. An answer that asks for a long calculation (a sum, an integral, a factorial, a power beyond 1000) or has
    over 200 characters is wrong: math-verify would work on it without end, and its time limit needs the main thread.
    ``None``, which excludes the sample, where gold is missing or cannot be parsed.
    """
    return [_equals(text, gold) for text, gold in zip(completions, answer, strict=True)]


def format_match(pattern: str) -> RewardFunction:
    """Make a reward: 1 where the regular expression ``pattern`` is found in the completion, else 0.

    Raises:
        UserError: the pattern is no regular expression.
    """
    try:
        compiled = re.compile(pattern)
    except (re.error, TypeError) as error:
        raise UserError(f"Reward 'format_match': {pattern!r} is no regular expression: {error}.") from None

    def format_match(completions: list[str], **columns: Any) -> Values:
        return [float(compiled.search(text) is not None) for text in completions]

    return format_match


def length_penalty(max_tokens: int, buffer_tokens: int) -> RewardFunction:
    """Make DAPO's soft overlong punishment (arXiv 2503.14476, equation 13), with n the tokens of a completion:

    0 for n <= max - buffer; then ((max - buffer) - n) / buffer, down to -1 at n = max; -1 beyond.

    Raises:
        UserError: not 0 < ``buffer_tokens`` <= ``max_tokens``.
    """
    if not all(isinstance(value, int) for value in (max_tokens, buffer_tokens)) or not 0 < buffer_tokens <= max_tokens:
        raise UserError(
            f"Reward 'length_penalty' needs whole numbers with 0 < buffer_tokens <= max_tokens, "
            f"but they are {buffer_tokens!r} and {max_tokens!r}."
        )

    def length_penalty(completion_ids: list[list[int]], **columns: Any) -> Values:
        free = max_tokens - buffer_tokens
        return [max(-1.0, min(0.0, (free - len(ids)) / buffer_tokens)) for ids in completion_ids]

    return length_penalty


FUNCTIONS: dict[str, RewardFunction] = {"exact_match": exact_match, "math_answer": math_answer}
FACTORIES: dict[str, Callable[..., RewardFunction]] = {"format_match": format_match, "length_penalty": length_penalty}


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
