"""The cost of exactness: a training step in the recipe's precision beside the plain FP32 step of the same model.

    python bench/precision_cost.py                      # the demo's model
    python bench/precision_cost.py --model DIRECTORY    # for example SmolLM2, see prepare_smollm2.py

A step is the forward pass, backward, AdamW, and for ours the quantisation of the new weights; the same tokens, one thread, one
process, taken in turns. ``plain`` is transformers with SDPA and float32 weights. ``rounded`` turns DGrad and WGrad of the recipe
off: FP8 forward with float32 gradients. The parts of our step are timed in turns with the steps.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import interleaved, medians, spread, write_result
from transformers import AutoModelForCausalLM

from trtl_rl.kernels.kernel_set import KernelSet, find_compiler
from trtl_rl.model.bind import TrainableDecoder
from trtl_rl.model.source import find_model
from trtl_rl.recipe.recipe import Recipe

LR = 1e-6


def plain_step(start: Any, ids: torch.Tensor, prompt: int) -> Callable[[], None]:
    """One step of stock transformers; logits only where an answer is predicted, as ours."""
    model = copy.deepcopy(start)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)

    def step() -> None:
        logits = model(ids[:, :-1], logits_to_keep=ids.shape[1] - prompt).logits
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, prompt:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def our_step(start: Any, recipe: str, ids: torch.Tensor, prompt: int) -> dict[str, Callable[[], object]]:
    """One step with ``recipe``, and two of its parts by themselves."""
    model = copy.deepcopy(start)
    Recipe.load(recipe).apply(model)
    kernels = KernelSet(find_compiler() is not None, backward=True)
    decoder = TrainableDecoder(model, kernels, ids.shape[1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    decoder.refresh(0)
    sequences, answers = ids.tolist(), [ids.shape[1] - prompt] * ids.shape[0]

    def step() -> None:
        logprobs, _ = decoder.forward(sequences, answers, 1.0)
        optimizer.zero_grad()
        (-logprobs.mean()).backward()
        optimizer.step()
        decoder.refresh(decoder.weights.version + 1)

    def forward() -> None:
        with torch.no_grad():
            decoder.forward(sequences, answers, 1.0)

    return {
        "": step,
        ", forward alone": forward,
        ", quantising alone": lambda: decoder.refresh(decoder.weights.version),
    }


def main() -> None:
    """Measure and write ``results/precision_cost-<model>.json``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=48, help="of prompt and answer; a third is prompt")
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    start = AutoModelForCausalLM.from_pretrained(find_model(arguments.model).path, dtype=torch.float32)
    shape = (arguments.sequences, arguments.tokens)
    ids = torch.randint(3, start.config.vocab_size, shape, generator=torch.Generator().manual_seed(0))
    prompt = arguments.tokens // 3

    with tempfile.TemporaryDirectory() as directory:
        rounded = Path(directory) / "rounded.yaml"
        text = Recipe.load("fp8_block").text
        assert text.count("dgrad: fp8, wgrad: fp8") == 1
        rounded.write_text(text.replace("dgrad: fp8, wgrad: fp8", "dgrad: bf16, wgrad: bf16"))
        recipes = {"fp8": "fp8_block", "fp8 forward, fp32 backward": str(rounded), "recipe off": "none"}
        works: dict[str, Callable[[], object]] = {"plain": plain_step(start, ids, prompt)}
        for name, recipe in recipes.items():
            works |= {name + part: work for part, work in our_step(start, recipe, ids, prompt).items()}
        taken = interleaved(works, arguments.repeats, warmup=1)
    seconds = medians(taken)
    label = "demo" if arguments.model == "demo" else Path(arguments.model).name
    write_result(
        f"precision_cost-{label}",
        {
            "work": f"{shape[0]} sequences of {shape[1]} tokens, one optimizer step, 1 thread",
            "parameters": sum(p.numel() for p in start.parameters()),
            "seconds": {name: round(value, 4) for name, value in seconds.items()},
            "seconds_min_max": spread(taken),
            "times_plain": {name: round(value / seconds["plain"], 2) for name, value in seconds.items()},
        },
    )


if __name__ == "__main__":
    main()
