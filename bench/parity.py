"""Exact parity: the embedded engine's logprobs beside the trainer's, at least 100,000 tokens over an all-pairs design.

    python bench/parity.py [--smollm2 DIRECTORY] [--only eager] [--cases 4]

Every case is a model, a recipe and a way to generate and to score; a tiny model's answers go up to 1,000 tokens after
prompts of 1 to 300, by up to 64 at once in changing company. Cases with updates are compared before and after 20 of
them. ``--smollm2`` adds a real checkpoint (``bench/prepare_smollm2.py`` makes it). A difference is a finding: the
script ends with 1 and names the cases.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from common import write_result
from pairwise import Case, pairwise

from trtl_rl.config_parts import LossConfig, OptimizerConfig
from trtl_rl.engines.torch_engine.engine import TorchEngine
from trtl_rl.flops.formulas import ModelShape
from trtl_rl.kernels.kernel_set import KernelSet
from trtl_rl.losses.loss import make_loss
from trtl_rl.model.bind import TrainableDecoder
from trtl_rl.recipe.recipe import Recipe
from trtl_rl.refit.sender import send
from trtl_rl.rollout import Completion, Group, Prompt, Request, Sampling
from trtl_rl.trainer.learner import Learner
from trtl_rl.trainer.parity_check import Parity, check

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))
from models import tiny  # the tests' builder

CONTEXT = 1312
RECIPES: dict[str, dict[str, str]] = {
    "fp32 scales": {},
    "pow2 scales": {"round: fp32": "round: pow2"},
    "bf16 compute": {"compute: fp32": "compute: bf16"},
}
FACTORS: dict[str, list[Any]] = {
    "family": ["qwen2", "qwen3", "llama"],
    "tied": [False, True],
    "aligned": [False, True],
    "recipe": [*RECIPES, "none"],
    "operators": ["eager", "compiled"],
    "prompt": [20, 300],
    "answer": [20, 200, 1000],
    "slots": [1, 7, 64],
    "temperature": [0.6, 1.0, 1.2],
    "engine_threads": [1, 2],
    "trainer_threads": [1, 2],
    "gradients": [False, True],
    "updates": [0, 20],
}
# A compiled case has to compile its units first: one shape of each family is enough.
COMPILED = {
    ("qwen3", False, "fp32 scales"), ("qwen2", False, "pow2 scales"), ("llama", True, "bf16 compute"), ("qwen3", True, "none"),
}  # fmt: skip
TOKENS = {1: 1500, 7: 6000, 64: 20000}  # of one case, about, by slots


def allowed(case: Case) -> bool:
    """Whether a case is worth its compilation."""
    return case["operators"] == "eager" or (case["family"], case["aligned"], case["recipe"]) in COMPILED


def recipe_of(name: str) -> Recipe:
    """A recipe of the design: fp8_block.yaml with replacements."""
    if name == "none":
        return Recipe.load("none")
    text = files("trtl_rl.recipe").joinpath("fp8_block.yaml").read_text()
    for old, new in RECIPES[name].items():
        assert old in text, f"fp8_block.yaml does not contain {old}"
        text = text.replace(old, new)
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(text)
        file.flush()
        return Recipe.load(file.name)


def requests_of(case: Case, vocab: int, first: int, generator: random.Random, share: float = 1.0) -> list[Request]:
    """Requests whose answers have ``case['answer']`` tokens at most; some share a prompt's prefill."""
    slots, longest = case["slots"], case["answer"]
    tokens = case.get("tokens", TOKENS.get(slots)) * share
    out: list[Request] = []
    planned = answers = 0
    while planned < tokens or answers < 1.5 * slots * share or len(out) < 2:
        # The shortest and the longest prompt are always there, and an answer of full length.
        size = (1, case["prompt"])[len(out)] if len(out) < 2 else generator.randint(1, case["prompt"])
        prompt = [generator.randrange(vocab) for _ in range(size)]
        limit = longest if not out else 1 + int(longest * generator.random() ** 3)  # most are short
        samples = generator.choice((1, 1, 2, 4)) if slots > 1 else 1
        id = -1 - len(out) - first
        out.append(Request(id, prompt, samples, Sampling(case["temperature"], limit), (0, -id, 0), logprobs=True))
        planned += samples * limit
        answers += samples
    return out


def groups_of(vocab: int, generator: random.Random, index: int) -> list[Group]:
    """Synthetic groups with rewards that differ."""
    out = []
    for i in range(2):
        prompt = Prompt(i, index, [generator.randrange(vocab) for _ in range(generator.randint(2, 20))], "")
        answers = [[generator.randrange(vocab) for _ in range(generator.randint(1, 30))] for _ in range(4)]
        completions = [Completion(i, sample, ids, "stop", index, index) for sample, ids in enumerate(answers)]
        out.append(Group(index, index, prompt, completions, [1.0, 0.0, generator.random(), 0.5]))
    return out


def compared(case: Case, model: Any, share: float = 1.0) -> list[Parity]:
    """Run a case, or a ``share`` of its tokens: at version 0, and after its updates."""
    generator = random.Random(repr(case))
    recipe_of(case["recipe"]).apply(model)
    compiled = case["operators"] == "compiled"
    torch.set_num_threads(case["trainer_threads"])
    decoder = TrainableDecoder(model, KernelSet(compiled, backward=bool(case["updates"])), CONTEXT)
    decoder.refresh(0)
    torch.set_num_threads(case["engine_threads"])
    kernels = KernelSet(compiled)
    engine = TorchEngine(decoder.description, kernels, slots=case["slots"], context=CONTEXT, stop_ids=[])
    threads = (case["engine_threads"], case["trainer_threads"])
    vocab = decoder.description.vocab

    def compare(first: int, share: float) -> Parity:
        version, coverage = decoder.weights.version, decoder.description.coverage.digest
        send(engine, decoder.snapshot, version=version, coverage=coverage, bucket_bytes=1 << 30)
        requests = requests_of(case, vocab, first, generator, share)
        return check(decoder, engine, requests, threads=threads, gradients=case["gradients"])

    if not case["updates"]:
        return [compare(0, share)]
    found = [compare(0, 0.3 * share)]
    torch.set_num_threads(case["trainer_threads"])
    shape = ModelShape.from_hf_config(model.config)
    optimizer = OptimizerConfig(lr=1e-3)
    learner = Learner(decoder, make_loss(LossConfig()), optimizer, shape=shape, temperature=1.0, steps=case["updates"])
    for step in range(case["updates"]):
        update = learner.update(groups_of(vocab, generator, step), step)
        assert update.stepped, "every update moves the weights"
        decoder.refresh(step + 1)
    return [*found, compare(10_000, 0.7 * share)]


def smollm2(directory: str) -> list[tuple[Case, Any]]:
    """Cases with real weights: many short answers, and few that reach 1,300 tokens, with the threads exchanged."""
    from transformers import AutoModelForCausalLM

    common = {"recipe": "fp32 scales", "operators": "compiled", "temperature": 1.0, "gradients": False, "updates": 0}
    short = {"prompt": 100, "answer": 40, "slots": 64, "tokens": 800, "engine_threads": 1, "trainer_threads": 2}
    long = {"prompt": 1150, "answer": 150, "slots": 2, "tokens": 400, "engine_threads": 2, "trainer_threads": 1}
    cases = [{**common, **short}, {**common, **long}]

    def load() -> Any:
        return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)

    return [({"model": "SmolLM2-135M-Instruct", **case}, load) for case in cases]


def main() -> int:
    """Run the design, write ``results/parity.json``, and return 1 when anything differs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--smollm2", metavar="DIRECTORY")
    parser.add_argument("--only", choices=FACTORS["operators"])
    parser.add_argument("--cases", type=int, help="the first so many cases only")
    a = parser.parse_args()
    cases = pairwise(FACTORS, allowed)

    def tiny_model(case: Case) -> Any:
        kind = {"tied": case["tied"], "aligned": case["aligned"], "max_position_embeddings": CONTEXT}
        return lambda: tiny(case["family"], seed=cases.index(case), **kind)

    work = [(case, tiny_model(case)) for case in cases][: a.cases]
    work += smollm2(a.smollm2) if a.smollm2 else []
    rows = []
    for number, (case, build) in enumerate(work, 1):
        if a.only and case["operators"] != a.only:
            continue
        start = time.perf_counter()
        found = compared(case, build())
        row = {
            **case,
            "answers": sum(item.answers for item in found),
            "tokens": sum(item.tokens for item in found),
            "differing": sum(item.differing for item in found),
            "max_abs": max(item.max_abs for item in found),
            "seconds": round(time.perf_counter() - start, 1),
        }
        rows.append(row)
        print(f"{number}/{len(work)} {row}", flush=True)
        for item in found:
            if item.worst:
                print(f"  DIFFERS: {item}", flush=True)
    total = {name: sum(row[name] for row in rows) for name in ("answers", "tokens", "differing", "seconds")}
    write_result("parity", {"total": {"cases": len(rows), **total}, "cases": rows})
    return int(total["differing"] > 0)


if __name__ == "__main__":
    sys.exit(main())
