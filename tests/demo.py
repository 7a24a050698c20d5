"""The bundled model with eager operators, as the tests of engines, refits and runs use it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trtl_rl.config import RunConfig, validate_config
from trtl_rl.engines.torch_engine.engine import TorchEngine
from trtl_rl.kernels.kernel_set import KernelSet
from trtl_rl.model.bind import TrainableDecoder
from trtl_rl.model.source import find_model
from trtl_rl.recipe.recipe import Recipe
from trtl_rl.refit.sender import RefitTarget, send
from trtl_rl.rollout import Completion, Request, Sampling

CONTEXT = 64
EOS = 1  # of the bundled tokenizer; digits are 3 to 12, then + = and the comma
PROMPT = [7, 10, 13, 11, 8, 14]  # "47+85="


def make_decoder(recipe: str = "fp8_block", context: int = CONTEXT) -> TrainableDecoder:
    """The bundled model, bound and loaded as version 0."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(find_model("demo").path, dtype=torch.float32)
    Recipe.load(recipe).apply(model)
    decoder = TrainableDecoder(model, KernelSet(False, backward=True), context)
    decoder.refresh(0)
    return decoder


def make_engine(
    decoder: TrainableDecoder, slots: int = 8, context: int = CONTEXT, stop_ids: Sequence[int] = (EOS,)
) -> TorchEngine:
    """An engine of the same sizes, still without weights."""
    kernels = KernelSet(False)
    return TorchEngine(decoder.description, kernels, slots=slots, context=context, stop_ids=stop_ids)


def load(engine: RefitTarget, decoder: TrainableDecoder, tensors: Mapping[str, Tensor] | None = None) -> None:
    """Bring the engine to the decoder's version."""
    send(
        engine,
        tensors or decoder.snapshot,
        version=decoder.weights.version,
        coverage=decoder.description.coverage.digest,
        bucket_bytes=2**16,
    )


def ready(decoder: TrainableDecoder, **sizes: Any) -> TorchEngine:
    """An engine at the decoder's version."""
    engine = make_engine(decoder, **sizes)
    load(engine, decoder)
    return engine


def ask(id: int, ids: Sequence[int] = PROMPT, samples: int = 1, new: int = 16, **rest: Any) -> Request:
    """A request; ``temperature`` and ``greedy`` go to its sampling."""
    sampling = Sampling(rest.pop("temperature", 1.0), new, rest.pop("greedy", False))
    return Request(id, list(ids), samples, sampling, rest.pop("seed", (0, id, 0)), **rest)


def drain(engine: TorchEngine) -> list[Completion]:
    """Everything that the engine still has to give, in order of request and sample."""
    done = engine.poll(0)
    while engine.has_work():
        done += engine.poll(1.0)
    return sorted(done, key=lambda item: (item.request_id, item.sample))


def small(run_dir: Path, **keys: Any) -> RunConfig:
    """A short run of the demo: two groups of four, one at a time."""
    return validate_config(
        {
            "run_dir": str(run_dir),
            "compile": False,
            "steps": 3,
            "batch": {"prompts": 2, "group_size": 4},
            "sampling": {"max_new_tokens": 20},
            "optimizer": {"lr": 1e-3},
            "buffer": {"max_staleness": 0},
            "parity": {"every": 1},
            "engine": {"timeout": 60},
            **keys,
        }
    )
