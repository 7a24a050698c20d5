"""Who generates in ``rollout.py``: transformers ``generate``, its continuous batching, vLLM, and the embedded engine.

Each side says which plans are worth a try for a work (how it is batched), and the bench measures the fastest of them.
All draw from the whole softmax at temperature 1. Libraries are imported by the side that needs them.
"""

from __future__ import annotations

import gc
import os
import pickle
import tempfile
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Protocol

from rollout_worker import Work

SMALL_BATCH = 32  # prompts of a batch where not all are taken together


class Side(Protocol):
    """One engine with its model loaded."""

    def plans(self, work: Work) -> list[str]:
        """Ways to run a work that are worth a try."""

    def prepare(self, work: Work, plan: str) -> None:
        """Make ready for runs of a work."""

    def run(self, work: Work) -> int:
        """Generate, and return the number of tokens that were asked for and came."""

    def describe(self, work: Work) -> dict[str, Any]:
        """What a reader should know: versions, what was checked."""

    def close(self) -> None:
        """Release what would keep the process alive."""


def load_transformers(model: str, dtype: str) -> Any:
    """A checkpoint for generation that nothing stops."""
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
    loaded.generation_config.eos_token_id = None
    loaded.generation_config.pad_token_id = 0
    return loaded


class Generate:
    """``model.generate``: a batch runs until its longest answer is complete, so one plan sorts by length.

    A user doesn't know the lengths of answers beforehand: sorting is more than ``generate`` would get in practice.
    """

    def __init__(self, model: str, dtype: str) -> None:
        self.model = load_transformers(model, dtype)
        self.size: int | None = None

    def plans(self, work: Work) -> list[str]:
        return ["one batch"] + [f"batches of {SMALL_BATCH}, sorted by length"] * (work.prompts > SMALL_BATCH)

    def prepare(self, work: Work, plan: str) -> None:
        self.size = None if plan == "one batch" else SMALL_BATCH

    def run(self, work: Work) -> int:
        import torch

        new, prompts = work.new(), work.ids(self.model.config.vocab_size)
        order = sorted(range(work.prompts), key=lambda i: new[i])
        size = self.size or work.prompts
        for start in range(0, work.prompts, size):
            batch = order[start : start + size]
            ids = torch.tensor([prompts[i] for i in batch])
            longest = max(new[i] for i in batch)
            out = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, top_p=1.0, max_new_tokens=longest
            )
            assert out.shape[1] == work.prompt_tokens + longest
        return sum(new)

    def describe(self, work: Work) -> dict[str, Any]:
        import transformers

        return {"version": transformers.__version__, "attention": self.model.config._attn_implementation}

    def close(self) -> None:
        pass


class Continuous:
    """transformers' continuous batching, its manager kept from run to run.

    On a CPU attention is one dense call of all rows with all their keys under a mask, so that fewer rows at a time may be
    faster. Blocks are given twice over: with fewer, the scheduler holds prompts back (its safety margin). Sharing of
    prefixes is off, since prompts repeat from run to run.
    """

    def __init__(self, model: str, dtype: str) -> None:
        self.model = load_transformers(model, dtype)
        self.manager: Any = None

    def plans(self, work: Work) -> list[str]:
        wide = [f"sdpa, {2 * SMALL_BATCH} at a time"] * (work.prompts > SMALL_BATCH)
        rows = min(work.prompts, SMALL_BATCH)
        return [f"sdpa, {rows} at a time", f"paged|eager, {rows} at a time", *wide]

    def prepare(self, work: Work, plan: str) -> None:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        self.close()
        attention, _, rows = plan.removesuffix(" at a time").partition(", ")
        self.model.set_attn_implementation(attention)
        page = 256  # tokens, the default
        config = ContinuousBatchingConfig(
            page_size=page,
            num_blocks=2 * int(rows) * -(-work.context // page),
            max_batch_tokens=2048,
            max_requests_per_batch=int(rows),
            allow_block_sharing=False,
            auto_switch_to_flash=False,
            use_async_batching=False,
        )
        sampling = GenerationConfig(
            do_sample=True, top_k=0, top_p=1.0, temperature=1.0, eos_token_id=-1, pad_token_id=0
        )
        self.manager = self.model.init_continuous_batching(sampling, config)
        self.manager.start()

    def run(self, work: Work) -> int:
        for ids, new in zip(work.ids(self.model.config.vocab_size), work.new(), strict=True):
            self.manager.add_request(ids, max_new_tokens=new)
        tokens = done = 0
        while done < work.prompts:
            result = self.manager.get_result(timeout=60)
            if result is not None and result.is_finished():
                tokens, done = tokens + len(result.generated_tokens), done + 1
            assert self.manager.is_running(), "the thread of continuous batching has ended"
        return tokens

    def describe(self, work: Work) -> dict[str, Any]:
        import transformers

        return {"version": transformers.__version__}

    def close(self) -> None:
        if self.manager is not None:
            self.manager.stop(block=True)
            self.manager = None


class Vllm:
    """vLLM's CPU backend, offline; the process must run in vLLM's environment. It compiles the model at its start."""

    def __init__(self, model: str, dtype: str, context: int, rows: int) -> None:
        os.environ |= {
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # OMP_NUM_THREADS decides, and no core is pinned
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
        }
        import torch
        from vllm import LLM

        self.model = LLM(
            model=model,
            dtype=dtype,
            skip_tokenizer_init=True,
            max_model_len=context,
            max_num_seqs=rows,
            kv_cache_memory_bytes=1 << 28,  # twice what the largest work needs
            enable_prefix_caching=False,
            disable_log_stats=True,
            seed=0,
        )
        self.threads = torch.get_num_threads()
        self.vocabulary = self.model.llm_engine.model_config.get_vocab_size()

    def plans(self, work: Work) -> list[str]:
        return ["all at once"]

    def prepare(self, work: Work, plan: str) -> None:
        pass

    def run(self, work: Work) -> int:
        from vllm import SamplingParams

        sampling = [
            SamplingParams(temperature=1.0, top_p=1.0, top_k=0, max_tokens=new, ignore_eos=True, detokenize=False)
            for new in work.new()
        ]
        prompts = [{"prompt_token_ids": ids} for ids in work.ids(self.vocabulary)]
        return sum(len(out.outputs[0].token_ids) for out in self.model.generate(prompts, sampling, use_tqdm=False))

    def describe(self, work: Work) -> dict[str, Any]:
        import vllm

        return {"version": vllm.__version__, "threads": self.threads}

    def close(self) -> None:
        pass


def write_version(model: str, recipe: str, weights: str, description: str) -> None:
    """Write version 0 of a checkpoint as a trainer sends it, and the decoder's description."""
    from safetensors.torch import save_file

    from trtl_rl.kernels.kernel_set import KernelSet, find_compiler
    from trtl_rl.model.bind import TrainableDecoder
    from trtl_rl.recipe.recipe import Recipe

    bound = load_transformers(model, "float32")
    Recipe.load(recipe).apply(bound)
    decoder = TrainableDecoder(bound, KernelSet(find_compiler() is not None), 1)
    save_file({name: tensor.clone() for name, tensor in decoder.refresh(0).items()}, weights)
    Path(description).write_bytes(pickle.dumps(decoder.description))


class Engine:
    """The embedded engine with one recipe; plans differ in its slots.

    A process that ends makes the weights, so that the memory of this one is that of an engine.
    """

    def __init__(self, model: str, recipe: str) -> None:
        import torch

        from trtl_rl.kernels.kernel_set import KernelSet, find_compiler

        torch.set_num_threads(1)
        self.directory = tempfile.TemporaryDirectory()
        self.weights = str(Path(self.directory.name) / "version-0.safetensors")
        description = str(Path(self.directory.name) / "description.pickle")
        trainer = get_context("spawn").Process(target=write_version, args=(model, recipe, self.weights, description))
        trainer.start()
        trainer.join()
        assert trainer.exitcode == 0, f"the process that makes the weights ended with exit code {trainer.exitcode}"
        self.description = pickle.loads(Path(description).read_bytes())
        self.kernels = KernelSet(find_compiler() is not None)
        self.engine: Any = None

    def plans(self, work: Work) -> list[str]:
        slots = sorted({work.prompts, 2 * SMALL_BATCH, SMALL_BATCH}, reverse=True)
        return [f"{n} slots" for n in slots if n == work.prompts or n < work.prompts]

    def prepare(self, work: Work, plan: str) -> None:
        from safetensors.torch import load_file

        from trtl_rl.engines.torch_engine.engine import TorchEngine
        from trtl_rl.refit.sender import send

        self.engine = None
        gc.collect()
        slots = int(plan.removesuffix(" slots"))
        self.engine = TorchEngine(self.description, self.kernels, slots=slots, context=work.context, stop_ids=[])
        coverage = self.description.coverage.digest
        send(self.engine, load_file(self.weights), version=0, coverage=coverage, bucket_bytes=1 << 26)

    def run(self, work: Work) -> int:
        return sum(len(item.ids) for item in self.generate(self.requests(work)))

    def requests(self, work: Work) -> list[Any]:
        """A request for each prompt."""
        from trtl_rl.rollout import Request, Sampling

        pairs = zip(work.ids(self.description.vocab), work.new(), strict=True)
        return [Request(i, ids, 1, Sampling(1.0, new), (0, i, 0)) for i, (ids, new) in enumerate(pairs)]

    def generate(self, requests: list[Any]) -> list[Any]:
        """All completions of some requests."""
        self.engine.submit(requests)
        done: list[Any] = []
        while len(done) < len(requests):
            done += self.engine.poll(60.0)
        return done

    def describe(self, work: Work) -> dict[str, Any]:
        """Also compares the tokens of three requests in the whole stream with the same ones alone."""
        requests = self.requests(work)
        together = {item.request_id: item.ids for item in self.generate(requests)}
        few = [requests[i] for i in sorted({0, len(requests) // 2, len(requests) - 1})]
        for request in few:
            (alone,) = self.generate([request])
            assert alone.ids == together[request.id], f"request {request.id} has other tokens alone than in company"
        return {"kernels": self.kernels.description, "same_tokens_alone": len(few)}

    def close(self) -> None:
        self.engine.close()
        self.directory.cleanup()


SIDES: dict[str, Callable[..., Side]] = {
    "generate": Generate,
    "continuous": Continuous,
    "vllm": Vllm,
    "engine": Engine,
}
