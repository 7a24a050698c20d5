"""The embedded engine: continuous batching over slots, with the trainer's own decoder and operators."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import numpy as np
import torch

from trtl_rl.engines.engine import InFlight
from trtl_rl.engines.torch_engine.sampler import random_stream, sample_tokens
from trtl_rl.engines.torch_engine.slots import Slots
from trtl_rl.errors import EngineError, UserError
from trtl_rl.kernels.kernel_set import KernelSet
from trtl_rl.kernels.spec import ROW_TILE
from trtl_rl.model.description import DecoderDescription
from trtl_rl.model.finite import first_not_finite, is_finite
from trtl_rl.model.kv import KeyValueBuffers, RopeTables, Rows
from trtl_rl.model.layer import forward_rows, head_logits
from trtl_rl.model.weights import DecoderWeights, LayerWeights, tensor_specs
from trtl_rl.recipe.coverage import Coverage
from trtl_rl.refit.manifest import Bucket, Manifest, RefitResult
from trtl_rl.refit.receiver import RefitReceiver
from trtl_rl.rollout import Completion, Request

PREFILL_ROWS = 2048  # of one forward pass; longer prompts go in several


class TorchEngine:
    """Implements ``RolloutEngine`` in this process; it has no weights until the first refit.

    Args:
        slots: Completions generated at the same time.
        context: Longest prompt plus answer, in tokens.
        stop_ids: All end-of-sequence ids of the checkpoint.
    """

    def __init__(
        self,
        description: DecoderDescription,
        kernels: KernelSet,
        *,
        slots: int,
        context: int,
        stop_ids: Sequence[int],
    ) -> None:
        d = description
        self.weights = DecoderWeights(d, kernels)
        self.busy_seconds = 0.0
        self.context = context
        self._rope = RopeTables(d.inverse_frequencies, d.attention_scaling, context, kernels.device)
        self._buffers = KeyValueBuffers(d.layers, slots, d.kv_heads, d.head_dim, context, kernels.device)
        self._slots = Slots(slots, context)
        self._waiting: deque[tuple[Request, list[int]]] = deque()
        self._stops = np.zeros(d.vocab, bool)
        self._stops[list(stop_ids)] = True
        self._receiver = RefitReceiver(tensor_specs(d), d.coverage.digest)
        self._done: list[Completion] = []
        self._paused = False
        self._draining = False

    @property
    def version(self) -> int:
        return self.weights.version

    def coverage(self) -> Coverage:
        return self.weights.coverage()

    def submit(self, requests: Sequence[Request]) -> None:
        if self._receiver.state in ("empty", "broken"):
            raise EngineError(f"The engine refuses to generate: {self._refusal()}")
        for request in requests:
            need = len(request.ids) + request.sampling.max_new_tokens
            if not request.ids:
                raise UserError(f"Request {request.id} has an empty prompt.")
            if need > self.context:
                raise UserError(
                    f"Request {request.id} needs {need} tokens ({len(request.ids)} of prompt), the engine's context has "
                    f"{self.context}: raise engine.max_context or lower sampling.max_new_tokens."
                )
        self._waiting += [(request, list(range(request.samples))) for request in requests]
        self._waiting = deque(
            sorted(self._waiting, key=lambda item: item[0].id >= 0)
        )  # probes do not wait for rollouts

    def poll(self, timeout: float) -> list[Completion]:
        """Generate until something is finished or ``timeout`` seconds are over."""
        end = time.monotonic() + timeout
        while not self._done and self.has_work() and time.monotonic() < end:
            self.step()
        return self.take_done()

    def cancel(self, ids: Sequence[int]) -> None:
        cancelled = set(ids)
        for request, samples in [item for item in self._waiting if item[0].id in cancelled]:
            self._done += [
                Completion(request.id, sample, [], "cancelled", self.version, self.version) for sample in samples
            ]
        self._waiting = deque(item for item in self._waiting if item[0].id not in cancelled)
        for slot in self._slots.active():
            occupant = self._slots.occupants[slot]
            if occupant is not None and occupant.request.id in cancelled:
                self._done.append(self._slots.release(int(slot), "cancelled", self.version))

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

    def begin_refit(self, manifest: Manifest) -> None:
        self._receiver.begin(manifest)

    def write(self, bucket: Bucket) -> None:
        self._receiver.write(bucket)

    def finish_refit(self) -> RefitResult:
        tensors, manifest, digest = self._receiver.finish()
        start = time.perf_counter()
        self.weights.load(tensors)
        self.weights.version = manifest.version
        self._receiver.loaded()
        return RefitResult(manifest.version, digest, time.perf_counter() - start)

    def abort_refit(self) -> None:
        self._receiver.abort()

    def close(self) -> None:
        self._waiting.clear()

    @property
    def unfinished(self) -> int:
        """Completions that have begun."""
        return self._slots.count - len(self._slots.free)

    def has_work(self) -> bool:
        """Whether a step would generate something."""
        if self._paused or self._receiver.state != "ready":
            return False
        return self.unfinished > 0 or (bool(self._waiting) and not self._draining)

    def take_done(self) -> list[Completion]:
        done, self._done = self._done, []
        return done

    @torch.inference_mode()
    def step(self) -> None:
        """Start what fits, then generate one token for every completion."""
        if self._receiver.state != "ready":
            raise EngineError(f"The engine refuses to generate: {self._refusal()}")
        start = time.perf_counter()
        if not self._draining:
            self._start()
        slots = self._slots.active()
        if len(slots):
            rows = self._rows(self._slots.last[slots], slots, self._slots.position[slots])
            hidden = forward_rows(self.weights, self._buffers, rows)
            self._slots.position[slots] += 1
            self._emit(slots, hidden, [rows])
        self.busy_seconds += time.perf_counter() - start

    def _start(self) -> None:
        """Give free slots to waiting requests, prefill each prompt once, and draw the first tokens."""
        started: list[tuple[Request, list[int]]] = []
        while self._waiting and self._slots.free:
            request, samples = self._waiting[0]
            if len(samples) > len(self._slots.free) and len(samples) <= self._slots.count:
                break  # a group that fits waits for room, so that its prompt is prefilled once
            now = samples[: len(self._slots.free)]
            del samples[: len(now)]
            if not samples:
                self._waiting.popleft()
            started.append((request, [self._take(request, sample) for sample in now]))
        if not started:
            return
        ids = np.concatenate([np.array(request.ids, np.int64) for request, _ in started])
        owner = np.concatenate([np.full(len(request.ids), slots[0], np.int64) for request, slots in started])
        position = np.concatenate([np.arange(len(request.ids), dtype=np.int64) for request, _ in started])
        hidden, passes = [], []
        for start in range(0, len(ids), PREFILL_ROWS):
            part = slice(start, start + PREFILL_ROWS)
            rows = self._rows(ids[part], owner[part], position[part])
            hidden.append(forward_rows(self.weights, self._buffers, rows)[: rows.count])
            passes.append(rows)
        last = np.cumsum([len(request.ids) for request, _ in started]) - 1
        for request, slots in started:
            if len(slots) > 1:
                self._buffers.copy_prefix(slots[0], slots[1:], len(request.ids))
        repeated = np.repeat(last, [len(slots) for _, slots in started])
        drawing = np.array([slot for _, slots in started for slot in slots], np.int64)
        self._emit(drawing, torch.cat(hidden)[repeated], passes)

    def _take(self, request: Request, sample: int) -> int:
        uniform = random_stream(request.seed, sample, self.version, request.sampling.max_new_tokens)
        return self._slots.take(request, sample, self.version, uniform)

    def _rows(self, ids: np.ndarray, slots: np.ndarray, position: np.ndarray) -> Rows:
        return Rows.make(torch.from_numpy(ids), torch.from_numpy(slots), torch.from_numpy(position), self._rope)

    def _emit(self, slots: np.ndarray, hidden: torch.Tensor, passes: Sequence[Rows]) -> None:
        """Draw a token for each slot from its hidden state (filling rows follow), and release what has ended.

        ``passes`` are the rows that gave the hidden states: they are repeated to explain what is not finite.
        """
        state, n = self._slots, len(slots)
        if hidden.shape[0] % ROW_TILE:
            hidden = torch.nn.functional.pad(hidden, (0, 0, 0, -hidden.shape[0] % ROW_TILE))
        logits = head_logits(self.weights, hidden)
        if not is_finite(hidden[:n], logits[:n]):
            raise EngineError(
                f"{self._first_not_finite(passes)} gives NaN or infinite values while weight version {self.version} generates; "
                "the weights are finite, so activations overflow. Lower optimizer.lr, and resume from a checkpoint before that."
            )
        device = logits.device
        temperature = torch.from_numpy(state.temperature[slots]).to(device)
        uniform = torch.from_numpy(state.uniform[slots, state.generated[slots]]).to(device)
        greedy = torch.from_numpy(state.greedy[slots]).to(device)
        tokens = sample_tokens(logits[:n], temperature, uniform, greedy)
        logprobs = None
        if state.wants_logprobs[slots].any():
            fill = logits.shape[0] - n
            inputs = [
                logits,
                torch.nn.functional.pad(tokens, (0, fill)),
                torch.nn.functional.pad(temperature, (0, fill), value=1.0),
            ]
            logprobs = self.weights.head_units.logprob(inputs)[0][:n].cpu().numpy()
        drawn = tokens.cpu().numpy()
        state.append(slots, drawn, logprobs)
        stopped = self._stops[drawn]
        ended = stopped | (state.generated[slots] >= state.limit[slots])
        for slot, stop in zip(slots[ended], stopped[ended], strict=True):
            self._done.append(state.release(int(slot), "stop" if stop else "length", self.version))

    def _first_not_finite(self, passes: Sequence[Rows]) -> str:
        def attend(layer: LayerWeights, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: Rows) -> torch.Tensor:
            return self._buffers.attend(layer.index, layer.units, q, k, v, rows)

        return first_not_finite(self.weights, passes, attend)

    def _refusal(self) -> str:
        return {
            "empty": "it has no weights yet.",
            "open": "a refit is open.",
            "broken": "a refit failed or was aborted; send a full one.",
            "ready": "it is paused or has nothing to do.",
        }[self._receiver.state]
