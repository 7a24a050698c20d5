"""Decode speed beside transformers ``generate``, recipe on and off: one thread, one process, taken in turns.

    python bench/rollout.py [MODEL_DIRECTORY] [--prompts 32] [--new-tokens 64]

Every side generates exactly ``new-tokens`` tokens for each prompt; no end-of-sequence token stops it. The engine's rows
are ratios to ``generate`` of the same model in FP32 on the same machine in the same run.
"""

from __future__ import annotations

import argparse
import copy

import torch
from common import interleaved, medians, spread, write_result
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from trtl_rl.engines.torch_engine.engine import TorchEngine
from trtl_rl.kernels.kernel_set import KernelSet, find_compiler
from trtl_rl.model.bind import TrainableDecoder
from trtl_rl.recipe.recipe import Recipe
from trtl_rl.refit.sender import send
from trtl_rl.rollout import Request, Sampling


def small_model() -> Qwen3ForCausalLM:
    """Qwen3 of 1.09 M parameters with random weights: hidden 160, 4 layers, feed-forward 400."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=160,
        intermediate_size=400,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=40,
        tie_word_embeddings=False,
        architectures=["Qwen3ForCausalLM"],
    )
    return Qwen3ForCausalLM(config).float()


def engine_for(model: torch.nn.Module, recipe: str, kernels: KernelSet, slots: int, context: int) -> TorchEngine:
    """The embedded engine at version 0 of a copy of ``model``."""
    bound = copy.deepcopy(model)
    Recipe.load(recipe).apply(bound)
    decoder = TrainableDecoder(bound, kernels, context)
    tensors = decoder.refresh(0)
    engine = TorchEngine(decoder.description, kernels, slots=slots, context=context, stop_ids=[])
    coverage = decoder.description.coverage.digest
    send(engine, tensors, version=0, coverage=coverage, bucket_bytes=1 << 30)
    return engine


def main() -> None:
    """Measure and write ``results/rollout-<model>.json``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    a = parser.parse_args()
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(a.model, dtype=torch.float32) if a.model else small_model()
    vocabulary = model.config.vocab_size
    prompts = torch.randint(3, vocabulary, (a.prompts, a.prompt_tokens), generator=torch.Generator().manual_seed(1))
    context = a.prompt_tokens + a.new_tokens
    model.eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0

    kernels = KernelSet(find_compiler() is not None)
    engines = {recipe: engine_for(model, recipe, kernels, a.prompts, context) for recipe in ("fp8_block", "none")}
    sampling = Sampling(1.0, a.new_tokens)
    requests = [Request(-1 - i, prompt, 1, sampling, (0, i, 0)) for i, prompt in enumerate(prompts.tolist())]

    def generate() -> None:
        torch.manual_seed(0)
        out = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=True,
            top_k=0,
            top_p=1.0,
            max_new_tokens=a.new_tokens,
            min_new_tokens=a.new_tokens,
        )
        assert out.shape[1] == context

    def ours(recipe: str) -> None:
        done = engines[recipe].probe(requests)
        assert sum(len(completion.ids) for completion in done) == a.prompts * a.new_tokens

    works = {
        "transformers generate, FP32": generate,
        "engine, FP8 recipe, exact": lambda: ours("fp8_block"),
        "engine, recipe off, exact": lambda: ours("none"),
    }
    taken = interleaved(works, a.repeats)
    seconds = medians(taken)
    base = seconds["transformers generate, FP32"]
    tokens = a.prompts * a.new_tokens
    write_result(
        f"rollout-{'small' if a.model is None else 'model'}",
        {
            "model": (a.model and a.model.rstrip("/").split("/")[-1]) or "Qwen3, 1.09 M parameters, random weights",
            "work": f"{a.prompts} prompts of {a.prompt_tokens} tokens, {a.new_tokens} new tokens each, 1 thread",
            "kernels": kernels.description,
            "seconds_min_max": spread(taken),
            "tokens_per_second": {name: round(tokens / value) for name, value in seconds.items()},
            "ratio_to_generate": {name: round(base / value, 2) for name, value in seconds.items()},
        },
    )


if __name__ == "__main__":
    main()
