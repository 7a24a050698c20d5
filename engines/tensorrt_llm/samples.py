"""``Samples``: the completions that were asked for, those that wait here and those that AsyncLLM generates.

At most ``slots`` are handed to AsyncLLM: so a drain ends what has begun and begins nothing, and a completion's first version is
known. What is aborted with its tokens goes on from them later: the rest is asked for with a longer prompt.
"""

from __future__ import annotations

import asyncio
import queue
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from trtl_rl.engines.tensorrt_llm.arguments import sampling_arguments
from trtl_rl.engines.tensorrt_llm.driver import Driver
from trtl_rl.errors import EngineError
from trtl_rl.rollout import Completion, FinishReason, Request


@dataclass(eq=False)
class Sample:
    """One completion, and what there is of it.

    Attributes:
        version_first: None before it has begun.
        handle: AsyncLLM's, of the request that runs.
        again: Forget what comes of it, and begin anew.
        prefills: As of a completion. TensorRT-LLM does not tell them: the prompt counts once for all samples of a request, and
            what was interrupted counts again, with its tokens.
    """

    request: Request
    index: int
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    version_first: int | None = None
    handle: Any = None
    cancelled: bool = False
    again: bool = False
    prefills: list[int] = field(default_factory=list)

    def completion(self, reason: FinishReason, version: int) -> Completion:
        first = version if self.version_first is None else self.version_first
        logprobs = list(self.logprobs) if self.request.logprobs else None
        return Completion(
            self.request.id, self.index, list(self.ids), reason, first, version, logprobs, list(self.prefills)
        )


class Samples:
    """Queues and accounts. All methods but the coroutine run in the thread that steps the engine.

    Args:
        version: Says which version is live.
        stop_ids: All end-of-sequence ids.
    """

    def __init__(self, driver: Driver, *, slots: int, stop_ids: Sequence[int], version: Callable[[], int]) -> None:
        self._driver, self._slots, self._stop_ids, self._version = driver, slots, list(stop_ids), version
        self._fields = driver.modules.sampling_fields
        self._salts = driver.modules.salts
        self._waiting: deque[Sample] = deque()
        self._ended: queue.SimpleQueue[tuple[Sample, Any, int]] = queue.SimpleQueue()
        self._busy, self._busy_since = 0.0, 0.0
        self.active: list[Sample] = []
        self.done: list[Completion] = []
        self.paused = self.draining = False

    @property
    def busy_seconds(self) -> float:
        return self._busy + (time.monotonic() - self._busy_since if self.active else 0.0)

    @property
    def unfinished(self) -> int:
        """Completions that have begun."""
        return len(self.active) + sum(sample.version_first is not None for sample in self._waiting)

    def has_work(self) -> bool:
        """Whether something runs, has ended, or may begin."""
        if self.active or not self._ended.empty():
            return True
        return not self.paused and any(map(self._may_begin, self._waiting))

    def progress(self) -> dict[int, list[int]]:
        """Tokens of what is unfinished and has begun, by request; without those that AsyncLLM has not handed out yet."""
        found: dict[int, list[int]] = {}
        for sample in [*self._waiting, *self.active]:
            lengths = found.setdefault(sample.request.id, [])
            if sample.version_first is not None:
                lengths.append(len(sample.ids))
        return found

    def add(self, requests: Sequence[Request]) -> None:
        """Queue requests, probes first. All are refused, or none."""
        for request in requests:
            self._sampling(request, 0, 0)
        for request in requests:
            samples = [Sample(request, index) for index in range(request.samples)]
            if request.id < 0:
                self._waiting.extendleft(reversed(samples))
            else:
                self._waiting.extend(samples)

    def cancel(self, wanted: set[int]) -> None:
        for sample in [sample for sample in self._waiting if sample.request.id in wanted]:
            self._waiting.remove(sample)
            self.done.append(sample.completion("cancelled", self._version()))
        for sample in self.active:
            if sample.request.id in wanted:
                sample.cancelled = True
                self._driver.loop.call_soon_threadsafe(_abort, sample)

    def begin(self) -> None:
        """Hand completions to AsyncLLM as far as there are slots."""
        while not self.paused and len(self.active) < self._slots:
            sample = next(filter(self._may_begin, self._waiting), None)
            if sample is None:
                return
            self._waiting.remove(sample)
            if not self.active:
                self._busy_since = time.monotonic()
            if sample.version_first is None:
                sample.version_first = self._version()
            if sample.index == 0 or sample.ids:
                sample.prefills.append(len(sample.request.ids) + len(sample.ids) - 1)
            self.active.append(sample)
            built = self._sampling(sample.request, sample.index, len(sample.ids))
            asyncio.run_coroutine_threadsafe(self._generate(sample, built), self._driver.loop)

    def collect(self, timeout: float = 0.0) -> None:
        """Take in what has ended; waits so long for the first. Raises EngineError when AsyncLLM failed."""
        try:
            ended = [self._ended.get(timeout=timeout) if timeout else self._ended.get_nowait()]
            while not self._ended.empty():
                ended.append(self._ended.get_nowait())
        except queue.Empty:
            return
        for sample, outcome, version in ended:
            self.active.remove(sample)
            if not self.active:
                self._busy += time.monotonic() - self._busy_since
            self._end(sample, outcome, version)

    def interrupt(self, *, anew: bool = False) -> None:
        """Abort what runs; it waits, and goes on from its tokens, or with ``anew`` from its beginning. Call while paused."""
        assert self.paused
        if not self.active:
            return
        for sample in self.active:
            sample.again = anew
        self._driver.abort_all()
        end = time.monotonic() + self._driver.timeout
        while self.active:
            self.collect(0.1)
            if time.monotonic() > end:
                raise EngineError(f"TensorRT-LLM did not end {len(self.active)} requests that were aborted.")

    def _may_begin(self, sample: Sample) -> bool:
        return not self.draining or sample.version_first is not None

    async def _generate(self, sample: Sample, sampling: Any) -> None:
        try:
            salt = {"cache_salt": f"version {self._version()}"} if self._salts else {}
            prompt = [*sample.request.ids, *sample.ids]
            llm = self._driver.llm
            sample.handle = llm.generate_async(inputs=prompt, sampling_params=sampling, streaming=False, **salt)
            if sample.cancelled:
                _abort(sample)
            outcome = await sample.handle
        except Exception as error:
            outcome = error
        self._ended.put((sample, outcome, self._version()))

    def _end(self, sample: Sample, outcome: Any, version: int) -> None:
        if isinstance(outcome, Exception):
            raise EngineError(
                f"TensorRT-LLM failed on request {sample.request.id}: {type(outcome).__name__}: {outcome}"
            )
        if sample.again and not sample.cancelled:
            sample.ids, sample.logprobs, sample.version_first, sample.again = [], [], None, False
            self._waiting.appendleft(sample)
            return
        output = outcome.outputs[0]
        self._append(sample, output)
        reason = output.finish_reason
        full = len(sample.ids) >= sample.request.sampling.max_new_tokens
        if reason == "cancelled" and not sample.cancelled:
            if self.paused and not full:
                self._waiting.appendleft(sample)
                return
            reason = "length" if full else reason
        if reason not in ("stop", "length", "cancelled") or (reason == "cancelled" and not sample.cancelled):
            raise EngineError(
                f"TensorRT-LLM ended request {sample.request.id} with '{reason}', which nobody asked for."
            )
        self.done.append(sample.completion(reason, version))

    def _append(self, sample: Sample, output: Any) -> None:
        ids = list(output.token_ids)
        if output.finish_reason == "stop" and (not ids or ids[-1] not in self._stop_ids):
            stop = getattr(output, "stop_reason", None)
            if sample.request.logprobs or stop not in self._stop_ids:
                raise EngineError("TensorRT-LLM left the end-of-sequence token out, although it was asked to keep it.")
            ids.append(stop)
        sample.ids += ids
        if sample.request.logprobs:
            values = [_logprob(item) for item in output.logprobs or []]
            if len(values) != len(ids):
                raise EngineError(f"TensorRT-LLM gave {len(values)} logprobs for {len(ids)} tokens.")
            sample.logprobs += values

    def _sampling(self, request: Request, index: int, generated: int) -> Any:
        plain = sampling_arguments(
            request,
            index,
            generated=generated,
            version=self._version(),
            stop_ids=self._stop_ids,
            known=self._fields,
        )
        return self._driver.modules.sampling(plain)


def _abort(sample: Sample) -> None:
    if sample.handle is not None:
        sample.handle.abort()


def _logprob(item: Any) -> float:
    """A sampled token's: a number, or the only entry of a table."""
    return float(next(iter(item.values())).logprob if isinstance(item, dict) else item)
