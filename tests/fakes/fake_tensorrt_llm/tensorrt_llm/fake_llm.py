"""AsyncLLM of the FAKE: one embedded engine that computes with what lies in the modules of all ranks."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tensorrt_llm.fake_worker import FUSED, make_worker, variant
from tensorrt_llm.sampling_params import LogprobMode, SamplingParams
from trtl_rl.engines.directory import EngineDirectory
from trtl_rl.engines.torch_engine.engine import TorchEngine
from trtl_rl.kernels.kernel_set import KernelSet
from trtl_rl.model.weights import DecoderWeights, tensor_specs
from trtl_rl.recipe.codec import encode
from trtl_rl.recipe.formats import BlockFormat
from trtl_rl.rollout import Request, Sampling

KNOWN = {
    "model", "dtype", "tensor_parallel_size", "pipeline_parallel_size", "max_seq_len", "max_input_len", "max_batch_size",
    "max_num_tokens", "enable_chunked_prefill", "skip_tokenizer_init", "sampler_type", "kv_cache_config", "cuda_graph_config",
    "load_format", "ray_worker_extension_cls", "sleep_config",
}  # fmt: skip


@torch.library.custom_op("trtllm::fp8_quantize_1x128", mutates_args=())
def fp8_quantize_1x128(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [M, K] and scales [K / 128, M filled up to fours], as the original lays them out."""
    codes, scales = encode(x.float(), BlockFormat((1, 128), "inverse"))
    filled = torch.zeros(scales.shape[1], -(-scales.shape[0] // 4) * 4)
    filled[:, : scales.shape[0]] = scales.T
    return codes, filled


class _Shared:
    """The computing part: an embedded engine whose weights come out of the workers' modules."""

    def __init__(self, directory: EngineDirectory, slots: int, context: int) -> None:
        self.description = directory.description
        kernels = KernelSet(bool(variant("compiled")), build=False)
        self.engine: Any = TorchEngine(self.description, kernels, slots=slots, context=context, stop_ids=[])
        self.engine.refit = SimpleNamespace(generates=True)
        self.workers: list[Any] = []
        self.sweeps = 0
        self.lock = threading.Lock()  # not reentrant: a control action within one would hang, as in the original

    @contextlib.contextmanager
    def stopped(self, drain: bool) -> Iterator[None]:
        while True:
            self.lock.acquire()
            if not drain or not self.engine.unfinished:
                break
            self.lock.release()
            time.sleep(0.001)
        try:
            yield
        finally:
            self.lock.release()

    def take_weights(self) -> None:
        """The modules of all ranks, put together again; the last rank's call counts."""
        live: DecoderWeights = self.engine.weights
        following = live.successor() if live.version >= 0 else live
        following.load(self.unfused())
        if following is not live:
            live.exchange(following)
        self.sweeps += 1
        live.version = self.sweeps
        self.engine._scheduler.restart_prompts()

    def unfused(self) -> dict[str, Tensor]:
        tensors = {}
        for spec in tensor_specs(self.description):
            owner, _, leaf = spec.name.rpartition(".")
            attribute = "weight_scale" if leaf == "weight_scale_inv" else leaf
            parts, divided = [], None
            for worker in self.workers:
                modules = dict(worker.engine.model_engine.model.named_modules())
                parent, _, role = owner.rpartition(".")
                fused = next((f"{parent}.{name}" for name, roles in FUSED.items() if role in roles), owner)
                module = modules[fused]
                divided, start = module.divided, 0
                for source, rows in module.sources.items():
                    if source == owner:
                        break
                    start += rows
                unit = 128 if attribute == "weight_scale" else 1
                held = getattr(module, attribute)
                parts.append(held[-(-start // unit) : -(-start // unit) + -(-rows // unit)])
            whole = parts[0] if divided is None or parts[0].dim() <= divided else torch.cat(_bytes(parts), divided)
            tensors[spec.name] = whole.view(spec.dtype).clone()
        return tensors


def _bytes(parts: list[Tensor]) -> list[Tensor]:
    """torch has no cat for FP8."""
    return [part.view(torch.uint8) if part.dtype == torch.float8_e4m3fn else part for part in parts]


class FakeRequestOutput:
    """Awaitable, as the original's."""

    def __init__(self, llm: AsyncLLM, number: int) -> None:
        self._llm, self._number = llm, number
        self._future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.outputs: list[Any] = []

    def __await__(self) -> Any:
        yield from self._future.__await__()
        return self

    def abort(self) -> None:
        self._llm._abort([self._number])

    def _ended(self, completion: Any) -> None:
        self.outputs = [
            SimpleNamespace(
                token_ids=completion.ids,
                finish_reason=completion.finish_reason,
                stop_reason=None,
                logprobs=completion.logprobs,
            )
        ]
        self._future.set_result(None)


class _Base:
    """Where the original's ``generate_async`` stands: in a base class."""

    def generate_async(
        self, inputs: Any, sampling_params: Any = None, streaming: bool = False, cache_salt: str | None = None
    ) -> Any:
        raise NotImplementedError


class AsyncLLM(_Base):
    """The original's interface."""

    def __init__(
        self,
        placement_groups: Any = None,
        placement_bundle_indices: Any = None,
        per_worker_gpu_share: float | None = None,
        **arguments: Any,
    ) -> None:
        unknown = arguments.keys() - KNOWN
        if unknown:
            raise ValueError(f"FAKE: LlmArgs has no {', '.join(sorted(unknown))}")
        self._arguments = arguments
        self._paused = False
        self._requests: dict[int, FakeRequestOutput] = {}
        self._numbers = 0
        self.salts: set[str | None] = set()

    async def setup_async(self) -> AsyncLLM:
        a = self._arguments
        assert os.environ.get("TLLM_RAY_FORCE_LOCAL_CLUSTER") == "1", (
            "FAKE: workers would join any Ray cluster that is found"
        )
        directory = EngineDirectory.open(a["model"])
        self._shared = _Shared(directory, a["max_batch_size"], a["max_seq_len"])
        ranks = a["tensor_parallel_size"]
        extension = a["ray_worker_extension_cls"]
        self._shared.workers = [
            make_worker(extension, directory.description, rank, ranks, self._shared) for rank in range(ranks)
        ]
        if a["load_format"] == "auto":
            tensors = directory.tensors()
            for worker in self._shared.workers:
                loader = worker.engine.model_engine.model_loader
                loader.reload(worker.engine.model_engine.model, tensors, allow_partial_loading=True)
                loader.sweeps, loader.open = 0, False
            self._shared.take_weights()
        self._work = asyncio.Event()
        self._pump_task = asyncio.get_running_loop().create_task(self._pump())
        return self

    def generate_async(
        self, inputs: Any, sampling_params: Any = None, streaming: bool = False, cache_salt: str | None = None
    ) -> FakeRequestOutput:
        if self._paused:
            raise RuntimeError("AsyncLLM is paused. Call resume_generation() before submitting new requests.")
        s: SamplingParams = sampling_params
        assert s.top_p == 1.0 and s.include_stop_str_in_output and not streaming
        assert s.logprobs is None or s.logprobs_mode is LogprobMode.PROCESSED
        self.salts.add(cache_salt)
        self._numbers += 1
        sampling = Sampling(s.temperature or 1.0, s.max_tokens, s.top_k == 1)
        request = Request(
            self._numbers, list(inputs), 1, sampling, (s.seed or 0, 0, 0), logprobs=s.logprobs is not None
        )
        output = self._requests[self._numbers] = FakeRequestOutput(self, self._numbers)
        with self._shared.lock:
            self._shared.engine._stops = np.isin(np.arange(self._shared.description.vocab), s.stop_token_ids or [])
            self._shared.engine.submit([request])
        self._work.set()
        return output

    async def pause_generation(self) -> None:
        self._paused = True
        self._abort(list(self._requests))

    async def resume_generation(self) -> None:
        self._paused = False

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = (), kwargs: Any = None) -> list[Any]:
        loop = asyncio.get_running_loop()
        answers = []
        for worker in self._shared.workers:
            answers.append(await loop.run_in_executor(None, getattr(worker, method), *args))
        return answers

    async def release(self, tags: list[str]) -> None:
        """Memory of weights loses what it held."""
        if "model_weights" in tags:
            for worker in self._shared.workers:
                for parameter in worker.engine.model_engine.model.parameters():
                    parameter.data.view(torch.uint8).zero_()

    async def resume(self, tags: list[str]) -> None: ...

    def shutdown(self) -> None:
        self._pump_task.get_loop().call_soon_threadsafe(self._pump_task.cancel)

    def _abort(self, numbers: list[int]) -> None:
        with self._shared.lock:
            self._shared.engine.cancel(numbers)
        self._work.set()

    async def _pump(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._work.wait()
            self._work.clear()
            busy = True
            while busy:
                busy = await loop.run_in_executor(None, self._step)
                with self._shared.lock:
                    done = self._shared.engine.take_done()
                for completion in done:
                    self._requests.pop(completion.request_id)._ended(completion)

    def _step(self) -> bool:
        with self._shared.lock:
            if self._shared.engine.has_work():
                self._shared.engine.step()
            return bool(self._shared.engine.has_work())
