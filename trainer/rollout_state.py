"""What the rollout thread keeps, and what a checkpoint and the loop's metrics read of it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from trtl_rl.flops import formulas
from trtl_rl.flops.formulas import ModelShape
from trtl_rl.rollout import Completion, Group, Prompt


@dataclass
class Counters:
    """What the thread has done since the loop last took it for its metrics."""

    tokens: int = 0
    reward_seconds: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self) -> tuple[int, float]:
        """Tokens and seconds of reward functions, which begin at 0 again."""
        with self.lock:
            taken = self.tokens, self.reward_seconds
            self.tokens, self.reward_seconds = 0, 0.0
        return taken


@dataclass(frozen=True)
class Position:
    """Where the rollout side is at one instant.

    Attributes:
        next_index: Of the first prompt that was never started.
        again: Indices before it that were started and are not finished; what they cost is in no counter yet.
        ready: Groups that wait to be trained on; what they cost is counted.
        discarded: Groups that were discarded and not yet reported, with the reasons; ``discards`` counts all.
        tokens: Generated since the loop last took the counters.
        recent_prompts: How prompts fared, of those that may be passed over.
        ledger: State of the ledger.
    """

    next_index: int
    again: list[int]
    ready: list[Group]
    discarded: list[tuple[Group, str]]
    discards: dict[str, int]
    tokens: int
    recent_prompts: dict[str, Any]
    ledger: dict[str, Any]


@dataclass
class Attempt:
    """One time that a group is asked for.

    Attributes:
        id: Of the request.
        group: Its completions are those of this attempt, until there is another one.
    """

    id: int
    group: Group
    completions: list[Completion] = field(default_factory=list)


@dataclass(frozen=True)
class Cost:
    """What was computed for answers to one prompt.

    Attributes:
        prompt: Its tokens.
        tokens: Of each answer.
        prefills: Lengths of the prompt's beginnings that were computed.
    """

    prompt: int
    tokens: list[int]
    prefills: list[int]

    @classmethod
    def of(cls, prompt: Prompt, completions: Sequence[Completion], unfinished: Sequence[int] = ()) -> Cost:
        """Of completions, and of others that have begun and of which so many tokens are known. An engine tells its prefills with
        completions; where none was told and something has begun, the prompt was computed once."""
        told = [tokens for completion in completions for tokens in completion.prefills]
        tokens = [*(len(completion.ids) for completion in completions), *unfinished]
        once = [len(prompt.ids) - 1] if any(tokens) or unfinished else []
        return cls(len(prompt.ids), tokens, told or once)

    def flops(self, shape: ModelShape) -> int:
        return formulas.rollout(shape, self.prompt, self.tokens, self.prefills)
