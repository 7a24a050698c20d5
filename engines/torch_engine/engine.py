"""The embedded engine: continuous batching over slots, with the trainer's own decoder and operators.

``scheduler.py`` says which rows run next, ``runner.py`` runs them, ``slots.py`` holds the state of completions.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch

from trtl_rl.engines.engine import InFlight
from trtl_rl.engines.torch_engine.refit import EngineRefit
from trtl_rl.engines.torch_engine.runner import Runner
from trtl_rl.engines.torch_engine.scheduler import Scheduler
from trtl_rl.engines.torch_engine.slots import Slots
from trtl_rl.errors import EngineError
from trtl_rl.kernels.kernel_set import KernelSet
from trtl_rl.model.description import DecoderDescription
from trtl_rl.model.kv import block_length
from trtl_rl.model.weights import DecoderWeights
from trtl_rl.recipe.coverage import Coverage
from trtl_rl.refit.manifest import Bucket, Manifest, RefitResult
from trtl_rl.rollout import Completion, Request


class TorchEngine:
    """Implements ``RolloutEngine`` in this process; it has no weights until the first refit.

    Args:
        slots: Completions generated at the same time.
        context: Longest prompt plus answer, in tokens.
        stop_ids: All end-of-sequence ids of the checkpoint.
        positions: Positions of keys and values that all completions share; default: the longest for every slot.
    """

    def __init__(
        self,
        description: DecoderDescription,
        kernels: KernelSet,
        *,
        slots: int,
        context: int,
        stop_ids: Sequence[int],
        positions: int | None = None,
    ) -> None:
        d = description
        self.weights = DecoderWeights(d, kernels, packed=True)
        self.busy_seconds = 0.0
        self.context = context
        positions = positions or slots * block_length(context)
        assert positions >= block_length(context), "no request of the whole context would ever fit"
        self._slots = Slots(slots, context, positions)
        self._scheduler = Scheduler(self._slots)
        self._runner = Runner(self.weights, self._slots, context=context, positions=positions)
        self._stops = np.zeros(d.vocab, bool)
        self._stops[list(stop_ids)] = True
        self.refit = EngineRefit(self.weights)
        self._done: list[Completion] = []
        self._paused = False
        self._draining = False

    @property
    def version(self) -> int:
        return self.weights.version

    def coverage(self) -> Coverage:
        return self.weights.coverage()

    def submit(self, requests: Sequence[Request]) -> None:
        if not self.refit.generates:
            raise EngineError(f"The engine refuses to generate: {self._refusal()}")
        for request in requests:
            request.check_fits(self.context)
        self._scheduler.submit(requests)

    def poll(self, timeout: float) -> list[Completion]:
        """Generate until something is finished or ``timeout`` seconds are over."""
        end = time.monotonic() + timeout
        while not self._done and self.has_work() and time.monotonic() < end:
            self.step()
        return self.take_done()

    def cancel(self, ids: Sequence[int]) -> None:
        self._done += self._scheduler.cancel(set(ids), self.version)

    def pause(self, policy: InFlight) -> None:
        if policy == "continue":
            self._paused = True
            return
        self.drain()
        while self.unfinished:
            self.step()
        self._paused = True

    def drain(self) -> None:
        """Start no more completions; those that have begun go on."""
        self._draining = True

    def resume(self) -> None:
        self._paused = self._draining = False

    def probe(self, requests: Sequence[Request]) -> list[Completion]:
        self.submit(requests)
        wanted = {request.id for request in requests}
        count = sum(request.samples for request in requests)
        found: list[Completion] = []
        while len(found) < count:
            if not self.has_work():
                raise EngineError(f"The engine cannot answer a probe: {self._refusal()}")
            self.step()
            found += [done for done in self._done if done.request_id in wanted]
            self._done = [done for done in self._done if done.request_id not in wanted]
        return found

    def begin_refit(self, manifest: Manifest) -> bool:
        return self.refit.begin(manifest)

    def write(self, bucket: Bucket) -> None:
        self.refit.write(bucket)

    def finish_refit(self) -> RefitResult:
        result = self.refit.finish()
        self._scheduler.restart_prompts()
        return result

    def abort_refit(self) -> None:
        self.refit.abort()

    def close(self) -> None:
        self._scheduler.waiting.clear()

    @property
    def unfinished(self) -> int:
        """Completions that have begun."""
        return self._slots.occupied

    def progress(self) -> dict[int, list[int]]:
        """Tokens of every unfinished completion that has begun, by request; an empty list for a request that waits."""
        slots = self._slots
        waiting: dict[int, list[int]] = {request.id: [] for request, _ in self._scheduler.waiting}
        begun = {id: slots.generated[owned].tolist() for id, owned in slots.by_request.items()}
        return {**waiting, **begun}

    def has_work(self) -> bool:
        """Whether a step would generate something."""
        if self._paused or not self.refit.generates:
            return False
        return self.unfinished > 0 or (bool(self._scheduler.waiting) and not self._draining)

    def take_done(self) -> list[Completion]:
        done, self._done = self._done, []
        return done

    @torch.inference_mode()
    def step(self) -> None:
        """Start what fits, then generate one token for every completion that runs."""
        if not self.refit.generates:
            raise EngineError(f"The engine refuses to generate: {self._refusal()}")
        start = time.perf_counter()
        if not self._draining:
            self._runner.copy(self._scheduler.admit(self.version))
        step = self._scheduler.step()
        if step is not None:
            tokens, logprobs = self._runner.forward(step)
            self._emit(step.slots, tokens.numpy(), None if logprobs is None else logprobs.numpy())
            self._runner.copy(self._scheduler.prefilled())
        self.busy_seconds += time.perf_counter() - start

    def _emit(self, slots: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray | None) -> None:
        """Store one drawn token for each slot, and hand out what has ended."""
        state = self._slots
        state.append(slots, tokens, logprobs)
        stopped = self._stops[tokens]
        ended = stopped | (state.generated[slots] >= state.limit[slots])
        for slot, stop in zip(slots[ended].tolist(), stopped[ended].tolist(), strict=True):
            self._done.append(state.complete(slot, "stop" if stop else "length", self.version))

    def _refusal(self) -> str:
        return "it is paused or has nothing to do." if self.refit.generates else "it has no weights yet."
