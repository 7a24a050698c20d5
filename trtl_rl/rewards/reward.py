"""``Reward``: a function with its weight, its place and its policy; what is scored, and what comes back."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from trtl_rl.config_data import RewardConfig
from trtl_rl.rollout import Prompt

RewardFunction = Callable[..., Any]
SampleId = tuple[int, int]
FaultKind = Literal["exception", "timeout", "died", "wrong_length", "wrong_type", "not_finite"]
OnError = Literal["error", "exclude", "value"]

RESERVED = ("prompts", "completions", "completion_ids")
CALL_SECONDS = 60.0  # of a call in a worker process where the user sets no limit


@dataclass(frozen=True)
class Reward:
    """One reward function.

    Attributes:
        name: Of the metric ``rewards/{name}/mean``; unique in a run.
        function: Called with keyword lists, one item per completion: ``prompts`` and ``completions`` (text, or messages
            where the data holds messages), ``completion_ids``, and every column of the data; of these it gets what it has
            parameters for. It returns, or as ``async def`` awaits, one number or ``None`` for each completion, or an exception
            in the place of one that it failed to judge. An
            optional method ``take_flops()`` gives the FLOPs that it has used since the last call, which count as feedback; with
            ``expected_flops(prompt_tokens, answer_tokens)`` beside (of one completion, or ``None``), a RACE knows them before.
        weight: Factor in the total.
        in_process: Whether it runs in the trainer's process; ``None`` leaves that to the loader: only the two cheapest
            built-in ones do.
        timeout: Seconds for one call; ``None``: 60 in a worker process, no limit in the trainer's.
        workers: Processes that score at the same time, each with a copy of the function's state.
        on_error: What a call without a valid result means: ``error`` ends the run, ``exclude`` leaves the samples out,
            ``value`` gives them ``error_value``.
        config: How a worker process finds the function by itself; without it the function travels by cloudpickle.
    """

    name: str
    function: RewardFunction
    weight: float = 1.0
    in_process: bool | None = None
    timeout: float | None = None
    workers: int = 1
    on_error: OnError = "error"
    error_value: float = 0.0
    config: RewardConfig | None = None

    @property
    def limit(self) -> float | None:
        """Seconds for one call, or None."""
        return self.timeout if self.timeout is not None or self.in_process else CALL_SECONDS


@dataclass(frozen=True)
class Sample:
    """One completion to score.

    Attributes:
        id: Group and sample; a result is matched by it, never by the order of arrival.
        text: The completion, decoded once.
    """

    id: SampleId
    prompt: Prompt
    text: str
    ids: list[int]


@dataclass(frozen=True)
class Fault:
    """Why samples have no valid value.

    Attributes:
        position: Of the sample in the call; ``None``: all of them.
        text: What went wrong, with the traceback of an exception.
    """

    kind: FaultKind
    position: int | None
    text: str


@dataclass(frozen=True)
class Outcome:
    """What one call gave.

    Attributes:
        values: One per sample; ``None`` too where a fault is.
        flops: From ``take_flops``.
        seconds: That the function took.
    """

    values: list[float | None]
    faults: list[Fault] = field(default_factory=list)
    flops: int = 0
    seconds: float = 0.0

    @classmethod
    def failed(cls, count: int, kind: FaultKind, text: str, seconds: float = 0.0) -> Outcome:
        """No sample of ``count`` has a value."""
        return cls([None] * count, [Fault(kind, None, text)], seconds=seconds)


@dataclass(frozen=True)
class ScoredBatch:
    """Rewards of a batch of samples.

    Attributes:
        ids: The samples that the other lists belong to.
        total: Weighted sum over the functions that judge the sample's prompt; ``None`` excludes the sample.
        components: What each function gave, before weighting.
        flops, seconds: Of all functions together.
    """

    ids: list[SampleId]
    total: list[float | None]
    components: dict[str, list[float | None]]
    flops: int = 0
    seconds: float = 0.0


def unbound(function: RewardFunction) -> RewardFunction:
    """A function without the ``arguments`` that the configuration gave it."""
    return function.func if isinstance(function, functools.partial) else function


def is_async(function: RewardFunction) -> bool:
    """Whether a call gives a coroutine: an ``async def``, or an object whose ``__call__`` is one."""
    inner = unbound(function)
    if hasattr(inner, "asynchronous"):
        return bool(inner.asynchronous)
    return inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(getattr(type(inner), "__call__", None))  # noqa: B004


def bound_names(function: RewardFunction) -> set[str]:
    """Parameters that ``arguments`` of the configuration have filled."""
    return set(function.keywords) if isinstance(function, functools.partial) else set()


def parameters(function: RewardFunction) -> list[inspect.Parameter]:
    """Parameters that a call still has to fill."""
    bound = bound_names(function)
    return [p for p in inspect.signature(function).parameters.values() if p.name not in bound]


def arguments(function: RewardFunction, samples: list[Sample]) -> dict[str, Any]:
    """Fresh keyword lists for one call: a function that changes its lists changes no other's."""
    prompts = [sample.prompt for sample in samples]
    names = dict.fromkeys(name for prompt in prompts for name in prompt.columns)
    values: dict[str, Any] = {name: [prompt.columns.get(name) for prompt in prompts] for name in names}
    values["prompts"] = [
        prompt.text if prompt.messages is None else [dict(m) for m in prompt.messages] for prompt in prompts
    ]
    values["completions"] = [
        sample.text if sample.prompt.messages is None else [{"role": "assistant", "content": sample.text}]
        for sample in samples
    ]
    values["completion_ids"] = [list(sample.ids) for sample in samples]
    wanted = parameters(function)
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in wanted)
    taken, bound = {parameter.name for parameter in wanted}, bound_names(function)
    return {name: value for name, value in values.items() if (takes_all or name in taken) and name not in bound}


def text_of(completion: Any) -> str:
    """The text of a completion, which is a list of messages where the data is conversational."""
    return completion if isinstance(completion, str) else "".join(str(message["content"]) for message in completion)
