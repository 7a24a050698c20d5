"""What the rollout thread keeps, and what a checkpoint and the loop's metrics read of it."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

from trtl_rl.rollout import Completion, Group


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
