"""What travels between tasks, engine, rewards, buffer and learner: token ids, lengths, versions, rewards.

No logprobs travel for training: ASymPO needs tokens and a reward only (arXiv 2606.03070).
Masks come from lengths, never from comparing ids with a padding id.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from trtl_rl.errors import UserError

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True)
class Prompt:
    """One row of a task, tokenised once.

    Attributes:
        id: Index of the row in the task; stable over epochs and resumes.
        occurrence: How often the row was drawn before (the epoch).
        ids: Token ids of the whole prompt.
        text: The prompt as the model reads it, for rewards and people.
        columns: Every column of the row, handed to reward functions.
        messages: The row's chat messages, where it holds messages and not text: what reward functions get then.
    """

    id: int
    occurrence: int
    ids: list[int]
    text: str
    columns: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, Any]] | None = None


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn: from ``softmax(logits / temperature)``, or the largest logit when ``greedy``."""

    temperature: float
    max_new_tokens: int
    greedy: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise UserError(
                f"temperature={self.temperature:g} must be a number above 0. For the likeliest tokens: greedy=True."
            )
        if self.max_new_tokens < 1:
            raise UserError(f"max_new_tokens={self.max_new_tokens} must be at least 1.")


@dataclass(frozen=True)
class Request:
    """Asks an engine for ``samples`` completions of one prompt, which share one prefill.

    Attributes:
        id: Unique among the requests of a run; negative for probes, which go first.
        seed: The run's seed, the prompt's id and its occurrence. With the sample's index and the weight version at its
            first token they fix a completion's random stream.
        logprobs: Whether sampled-token logprobs come back too (probes only).
    """

    id: int
    ids: list[int]
    samples: int
    sampling: Sampling
    seed: tuple[int, int, int]
    logprobs: bool = False

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise UserError(f"Request {self.id} asks for {self.samples} samples: ask for at least 1.")
        if self.sampling.greedy and self.samples > 1:
            warnings.warn(
                f"Request {self.id} asks for {self.samples} greedy samples, which are all the same: one is enough, and a group "
                "of them has no signal.",
                stacklevel=3,
            )

    def check_fits(self, context: int) -> None:
        """Raise UserError when the prompt is empty, or does not fit beside its answer into ``context`` tokens."""
        need = len(self.ids) + self.sampling.max_new_tokens
        if not self.ids:
            raise UserError(f"Request {self.id} has an empty prompt.")
        if need > context:
            raise UserError(
                f"Request {self.id} needs {need} tokens ({len(self.ids)} of prompt), the engine's context has "
                f"{context}: raise engine.max_context or lower sampling.max_new_tokens."
            )


@dataclass(frozen=True)
class Completion:
    """One sampled answer.

    Attributes:
        request_id, sample: Which request, and which of its samples.
        ids: The generated ids, with the end-of-sequence id where one was generated.
        version_first, version_last: Weight versions at the first and the last token.
        logprobs: Of ``ids`` under ``logits / temperature``; ``None`` unless the request asked for them.
        prefills: Lengths of the beginnings of the prompt that were computed since the last completion of this request, for
            whichever of its samples: none where keys were shared, several where new weights made it begin again.
    """

    request_id: int
    sample: int
    ids: list[int]
    finish_reason: FinishReason
    version_first: int
    version_last: int
    logprobs: list[float] | None = None
    prefills: list[int] = field(default_factory=list, compare=False)


@dataclass
class Group:
    """All completions of one prompt. It is trained on whole, or not at all.

    Attributes:
        index: Order of the group in the run; batches are filled in this order.
        version: Weight version when the group was admitted.
        rewards: One per completion; ``None`` excludes the completion. Empty until scored.
        components: The same per reward function, before weighting.
    """

    index: int
    version: int
    prompt: Prompt
    completions: list[Completion] = field(default_factory=list)
    rewards: list[float | None] = field(default_factory=list)
    components: dict[str, list[float | None]] = field(default_factory=dict)
    texts: list[str] = field(default_factory=list)

    def scored(self) -> list[tuple[Completion, float]]:
        """The completions that count, each with its reward, in sample order."""
        return [(c, r) for c, r in zip(self.completions, self.rewards, strict=True) if r is not None]

    def most_varied(self, size: int) -> Group:
        """A group of the ``size`` scored completions whose rewards have the largest variance, in sample order: the lowest and
        the highest ones, as many of each as that takes (max-variance down-sampling of PODS, arXiv 2504.13818). It is a whole group
        by itself: advantages are differences from its own mean, so that they add up to zero.
        """
        scored = self.scored()
        if len(scored) <= size:
            return self
        order = sorted(range(len(scored)), key=lambda i: scored[i][1])

        def spread(low: int) -> tuple[float, float]:
            chosen = [scored[i][1] for i in (*order[:low], *order[len(order) - size + low :])]
            mean = math.fsum(chosen) / size
            return math.fsum((reward - mean) ** 2 for reward in chosen), -abs(2 * low - size)

        low = max(range(size + 1), key=spread)
        chosen = [scored[i] for i in sorted((*order[:low], *order[len(order) - size + low :]))]
        return replace(
            self, completions=[c for c, _ in chosen], rewards=[r for _, r in chosen], components={}, texts=[]
        )

    def has_signal(self) -> bool:
        """Whether the scored rewards differ: a group of equal rewards has zero advantage everywhere."""
        return len({reward for _, reward in self.scored()}) > 1
