"""The built-in rewards, called as TRL calls rewards: keyword lists with one item per completion in, one value each out.

A function is a reward; a class makes one from its arguments.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from typing import Any

from trtl_rl.errors import UserError
from trtl_rl.rewards.math_answer import math_answer
from trtl_rl.rewards.reward import text_of

Values = list[float | None]


def exact_match(completions: list[Any], answer: list[Any], **columns: Any) -> Values:
    """1 where the completion, stripped of white space, is the column ``answer``, else 0; ``None`` without an answer."""
    return [
        None if gold is None else float(text_of(item).strip() == str(gold).strip())
        for item, gold in zip(completions, answer, strict=True)
    ]


class FormatMatch:
    """1 where the regular expression ``pattern`` is found in the completion, else 0.

    Args:
        pattern: As in Python's ``re``.
        whole: It must match all of the completion, and its dot matches newlines too.

    Raises:
        UserError: the pattern is no regular expression.
    """

    def __init__(self, pattern: str, whole: bool = False) -> None:
        try:
            self._compiled = re.compile(pattern, re.DOTALL if whole else 0)
        except (re.error, TypeError) as error:
            raise UserError(f"Reward 'format_match': {pattern!r} is no regular expression: {error}.") from None
        self._search = self._compiled.fullmatch if whole else self._compiled.search

    def __call__(self, completions: list[Any], **columns: Any) -> Values:
        return [float(self._search(text_of(item)) is not None) for item in completions]


class LengthPenalty:
    """DAPO's soft overlong punishment (arXiv 2503.14476, equation 13), with n the tokens of a completion:

    0 for n <= max - buffer; then ((max - buffer) - n) / buffer, down to -1 at n = max; -1 beyond.

    Raises:
        UserError: not 0 < ``buffer_tokens`` <= ``max_tokens``.
    """

    def __init__(self, max_tokens: int, buffer_tokens: int) -> None:
        whole = all(isinstance(value, int) for value in (max_tokens, buffer_tokens))
        if not whole or not 0 < buffer_tokens <= max_tokens:
            raise UserError(
                f"Reward 'length_penalty' needs whole numbers with 0 < buffer_tokens <= max_tokens, "
                f"but they are {buffer_tokens!r} and {max_tokens!r}."
            )
        self._free, self._buffer = max_tokens - buffer_tokens, buffer_tokens

    def __call__(self, completion_ids: list[list[int]], **columns: Any) -> Values:
        return [max(-1.0, min(0.0, (self._free - len(ids)) / self._buffer)) for ids in completion_ids]


# A function, a class, or where to find one that needs more than the standard library.
BUILT_IN: dict[str, Any] = {
    "exact_match": exact_match,
    "math_answer": math_answer,
    "format_match": FormatMatch,
    "length_penalty": LengthPenalty,
    "reasoning_gym": ("trtl_rl.rewards.reasoning", "ReasoningGym"),
    "reward_model": ("trtl_rl.rewards.reward_model", "RewardModel"),
    "judge": ("trtl_rl.engines.judge", "EngineJudge"),
    "http": ("trtl_rl.rewards.http", "HttpReward"),
}
# So cheap and safe that a process of their own would only cost.
IN_PROCESS = ("exact_match", "length_penalty")
# Packages that a reward needs beside the base installation, and the extra that brings them.
NEEDED_PACKAGES: dict[str, dict[str, str]] = {
    "math_answer": {"math_verify": "math"},
    "reasoning_gym": {"reasoning_gym": "reasoning-gym"},
}
# How the answer is found in a completion, for majority votes.
FINAL_ANSWER: dict[str, Any] = {
    "exact_match": str.strip,
    "math_answer": ("trtl_rl.rewards.math_answer", "final_answer"),
    "reasoning_gym": ("trtl_rl.rewards.reasoning", "final_answer"),
}


def final_answer_of(name: str) -> Callable[[str], str | None] | None:
    """How the answer that the reward ``name`` judges is found in a completion; ``None`` for a reward of the user's own."""
    found = FINAL_ANSWER.get(name)
    if not isinstance(found, tuple):
        return found
    module, attribute = found
    function: Callable[[str], str | None] = getattr(importlib.import_module(module), attribute)
    return function
