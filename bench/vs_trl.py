"""trtl-rl beside TRL's ``GRPOTrainer``: time until 0.9 of the sampled answers are right, and tokens per second.

    python -m venv TRL && TRL/bin/pip install -c constraints.txt torch trl==1.16.0    # an environment of its own
    python bench/vs_trl.py sweep --trl-python TRL/bin/python                          # learning rates, steps to 0.9
    python bench/vs_trl.py options --trl-python TRL/bin/python                        # which options make TRL fastest
    python bench/vs_trl.py race --trl-python TRL/bin/python                           # step times, in turns
    python bench/vs_trl.py report --trl-python TRL/bin/python                         # time to 0.9, from the two
    python bench/vs_trl.py steps --trl-python TRL/bin/python                          # step times of the 1.09 M model

Both sides train the demo's model on the same rows with the same reward, batch (32 prompts × 8 samples), length, AdamW,
clip and constant learning rate after the same warm-up; each at its own best learning rate of three, TRL with its own best
loss type too. They run on the same cores, one after the other: with two cores trtl-rl has one thread in each of its two
processes, TRL two threads; with one core all share it. TRL computes in FP32 without gradient checkpointing; its other
options are its defaults, or what ``options`` finds faster.

``sweep`` counts the optimizer steps to the goal: the weights of every fifth step are kept, and evaluated when training is
over by one sampled answer to each of 512 held-out prompts, all by the same function, which is trtl-rl's engine with the
recipe that the weights were trained with (``none`` for TRL). Steps do not depend on what else the machine does. ``race``
takes the times of steps in short runs of both sides in turns; time to the goal is steps times the mean step, with loading
of models and evaluation left out.

Every command adds to ``results/vs_trl.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported

import torch
from common import RESULTS, write_result
from rollout import save_small_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from trtl_rl.config import validate_config
from trtl_rl.demo.defaults import demo_settings
from trtl_rl.demo.task import demo_rows
from trtl_rl.engines.torch_engine.engine import TorchEngine
from trtl_rl.kernels.kernel_set import KernelSet, find_compiler
from trtl_rl.model.bind import TrainableDecoder
from trtl_rl.model.source import find_model
from trtl_rl.recipe.recipe import Recipe
from trtl_rl.refit.sender import send
from trtl_rl.rewards.builtin import exact_match
from trtl_rl.rollout import Prompt, Request, Sampling
from trtl_rl.tasks.rows import Rows
from trtl_rl.tasks.task import Task

GOAL = 0.9
EVALUATED = 512  # held-out prompts; the standard error at 0.9 is 0.013
STEPS, WARMUP = 120, 10
SNAPSHOTS = 5  # steps between two evaluations
RATES = (2e-4, 4e-4, 8e-4)
LOSSES = ("dapo", "dr_grpo", "grpo")
SIDES: dict[str, tuple[str, dict[str, Any]]] = {
    "trtl-rl, fp8_block": ("ours", {}),
    "trtl-rl, recipe none": ("ours", {"recipe": "none"}),
    "TRL": ("trl", {}),
}
SCRIPT = Path(__file__).with_name("vs_trl_sides.py")
Job = dict[str, Any]


@cache
def task() -> Task:
    """The demo's task: which rows are trained on, and which are held out."""
    config = validate_config(demo_settings())
    tokenizer = AutoTokenizer.from_pretrained(find_model("demo").path)
    return Task(Rows(demo_rows(), "demo"), config, tokenizer, 64)


def demo_job(steps: int, rate: float, *, loss: str = "dapo", cores: int = 2, snapshots: int = 0, **ours: Any) -> Job:
    """What both sides are told about the demo.

    Args:
        loss: TRL's ``loss_type``.
        cores: Which the side may use.
        snapshots: Steps between two snapshots of the weights; such a run ends when its own reward is beyond the goal.
        ours: More keys of trtl-rl's configuration.
    """
    held_out = {prompt.id for prompt in task().held_out_prompts(1024)}
    settings = demo_settings()
    settings |= {"task": {}, "steps": steps, "evaluation": {"prompts": 0}, "checkpoint": {"every": 0}}
    settings |= {"optimizer": {"lr": rate, "warmup_steps": WARMUP}, **ours}
    return {
        "model": str(find_model("demo").path),
        "rows": [row for i, row in enumerate(demo_rows()) if i not in held_out],
        "reward": "exact_match",
        "cores": cores,
        "trl_threads": cores,
        "snapshot_every": snapshots,
        "stop_at": GOAL + 0.04 if snapshots else None,
        "ours": settings,
        "trl": trl_arguments(steps, rate, loss, settings["sampling"]["max_new_tokens"]),
    }


def trl_arguments(steps: int, rate: float, loss: str, tokens: int) -> dict[str, Any]:
    """``GRPOConfig`` for the batch and the optimizer of the demo."""
    return {
        "max_steps": steps,
        "per_device_train_batch_size": 256,
        "num_generations": 8,
        "max_completion_length": tokens,
        "temperature": 1.0,
        "beta": 0.0,
        "loss_type": loss,
        "learning_rate": rate,
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": WARMUP,
    }


def run(side: str, trl_python: str, job: Job, keep: Path | None = None) -> dict[str, Any]:
    """Train in a process of its own and read what it noted. Weights go to ``keep``.

    Raises:
        SystemExit: the side failed; its last lines are printed.
    """
    with tempfile.TemporaryDirectory() as temporary:
        directory = keep or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        file = directory / "job.json"
        file.write_text(json.dumps(job))
        environment = {**os.environ, "PYTHONPATH": str(SCRIPT.parent.parent)}
        done = subprocess.run(
            [trl_python if side == "trl" else sys.executable, str(SCRIPT), side, str(file)],
            capture_output=True,
            text=True,
            env=environment,
            cwd=directory,
        )
        if done.returncode:
            sys.exit(f"{side} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
        result: dict[str, Any] = json.loads((directory / "result.json").read_text())
    return result


def speed(result: dict[str, Any], skip: int = 5) -> dict[str, float]:
    """Median seconds of a step and generated tokens a second, the first ``skip`` steps left out."""
    ends = result["step_ends"]
    seconds = [b - a for a, b in zip(ends[skip - 1 :], ends[skip:], strict=False)]
    tokens = sum(batch[1] for batch in result["batches"]) / sum(batch[0] for batch in result["batches"]) * 256
    return {
        "step_seconds": round(statistics.median(seconds), 4),
        "step_seconds_mean": round(statistics.mean(seconds), 4),
        "tokens_per_second": round(tokens / statistics.mean(seconds)),
    }


class Evaluation:
    """Exact match of a sampled answer to each held-out prompt, through one engine with one recipe."""

    def __init__(self, recipe: str) -> None:
        torch.set_num_threads(1)
        kernels = KernelSet(find_compiler() is not None)
        path = find_model("demo").path
        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        Recipe.load(recipe).apply(self._model)
        self._decoder = TrainableDecoder(self._model, kernels, 64)
        self._tokenizer = AutoTokenizer.from_pretrained(path)
        self._prompts: list[Prompt] = task().held_out_prompts(EVALUATED)
        stops = [self._tokenizer.eos_token_id]
        self._engine = TorchEngine(self._decoder.description, kernels, slots=256, context=64, stop_ids=stops)
        self._version = -1

    def score(self, weights: Path | None) -> float:
        """Share of right answers with these weights, or with those of the demo's start model."""
        if weights is not None:
            parameters = dict(self._model.named_parameters())
            with torch.no_grad():
                for name, tensor in load_file(weights).items():
                    parameters[name].copy_(tensor)
        self._version += 1
        tensors = self._decoder.refresh(self._version)
        coverage = self._decoder.description.coverage.digest
        send(self._engine, tensors, version=self._version, coverage=coverage, bucket_bytes=1 << 26)
        sampling = Sampling(1.0, demo_settings()["sampling"]["max_new_tokens"])
        requests = [Request(-1 - i, p.ids, 1, sampling, (12345, p.id, 0)) for i, p in enumerate(self._prompts)]
        answers = {done.request_id: done.ids for done in self._engine.probe(requests)}
        texts = [self._tokenizer.decode(answers[r.id], skip_special_tokens=True) for r in requests]
        scores = exact_match(texts, [p.columns["answer"] for p in self._prompts])
        return sum(score or 0.0 for score in scores) / len(scores)


@cache
def evaluation(recipe: str) -> Evaluation:
    """One for each recipe."""
    return Evaluation(recipe)


def curve(result: dict[str, Any], directory: Path, recipe: str) -> dict[str, Any]:
    """Score of every snapshot, and the step and second of the first at the goal, None where none got there."""
    steps = sorted(int(file.stem.split("-")[1]) for file in directory.glob("weights-*.safetensors"))
    scores = {step: round(evaluation(recipe).score(directory / f"weights-{step}.safetensors"), 4) for step in steps}
    first = next((step for step in steps if scores[step] >= GOAL), None)
    return {
        "scores": scores,
        "steps_to_goal": first,
        "seconds_to_goal": None if first is None else round(result["step_ends"][first - 1], 2),
        **speed(result),
    }


def trained(side: str, trl_python: str, job: Job) -> dict[str, Any]:
    """Train and evaluate."""
    with tempfile.TemporaryDirectory() as temporary:
        result = run(side, trl_python, job, Path(temporary))
        recipe = job["ours"].get("recipe", "fp8_block") if side == "ours" else "none"
        out = curve(result, Path(temporary), recipe)
    print(f"  {side}: {out}", flush=True)
    return out | {"versions": result.get("versions")} if side == "trl" else out


def small_job(tokens: int, cores: int, steps: int, directory: Path) -> Job:
    """The 1.09 M model of ``rollout.py``, 256 completions of exactly ``tokens`` tokens: its head never gives the end."""
    path = directory / "small"
    if not path.exists():
        shutil.copytree(save_small_model(directory, 40), path)
        demo = find_model("demo").path
        for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            shutil.copy(demo / name, path / name)
        file = path / "model.safetensors"
        weights = load_file(file)
        weights["model.embed_tokens.weight"][:, 0] = 0.2  # positive in every hidden state, far above the rest
        weights["lm_head.weight"][1, 0] = -100.0  # so the end's logit is far below all others
        save_file(weights, file, metadata={"format": "pt"})
    settings = demo_settings()
    settings |= {"steps": steps, "evaluation": {"prompts": 0}, "checkpoint": {"every": 0}, "task": {}}
    settings |= {"model": str(path), "sampling": {"temperature": 1.0, "max_new_tokens": tokens}}
    settings["optimizer"] = {"lr": 1e-6}
    return {
        "model": str(path),
        "rows": [{"prompt": row["prompt"], "answer": row["answer"]} for row in demo_rows()[:2000]],
        "reward": "signal",
        "cores": cores,
        "trl_threads": cores,
        "snapshot_every": 0,
        "stop_at": None,
        "ours": settings,
        "trl": trl_arguments(steps, 1e-6, "dapo", tokens),
    }


def add(**part: Any) -> None:
    """Add a part to the result file, or replace it there."""
    file = RESULTS / "vs_trl.json"
    known = json.loads(file.read_text()) if file.exists() else {}
    write_result("vs_trl", {**known, **part})


def known(part: str, empty: Any) -> Any:
    """A part of the result file, or ``empty``."""
    file = RESULTS / "vs_trl.json"
    return json.loads(file.read_text()).get(part, empty) if file.exists() else empty


def command_sweep(a: argparse.Namespace) -> None:
    """Every learning rate, and every loss type of TRL, once: scores of the snapshots. What is known already is kept."""
    wanted = [("ours", "asympo", rate) for rate in a.rates]
    wanted += [("trl", loss, rate) for loss in a.losses for rate in a.rates]
    for side, loss, rate in wanted:
        same = [r for r in known("sweep", []) if (r["side"], r["loss"], r["rate"]) == (side, loss, rate)]
        finished = any(
            r["steps_to_goal"] or max(map(int, r["scores"])) >= a.steps // SNAPSHOTS * SNAPSHOTS for r in same
        )
        if side not in a.sides or finished:
            continue
        print(f"{side}, {loss}, {rate:g}", flush=True)
        job = demo_job(a.steps, rate, loss=loss if side == "trl" else "dapo", cores=a.cores, snapshots=SNAPSHOTS)
        out = trained(side, a.trl_python, job | {"trl_threads": 1})
        one = {"side": side, "loss": loss, "rate": rate, **{k: out[k] for k in ("scores", "steps_to_goal")}}
        others = [r for r in known("sweep", []) if any(r[k] != one[k] for k in ("side", "loss", "rate"))]
        add(sweep=[*others, one])


TRL_OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "eager attention": {"attention": "eager"},
    "static cache": {"trl": {"cache_implementation": "static"}},
    "continuous batching": {"trl": {"use_transformers_continuous_batching": True}},
    "torch.compile": {"trl": {"torch_compile": True}},
}


def command_options(a: argparse.Namespace) -> None:
    """Step time of TRL with each option alone."""
    out: dict[str, Any] = known("options", {})
    for name, option in TRL_OPTIONS.items():
        if a.only and name not in a.only:
            continue
        job = demo_job(a.steps, 4e-4, cores=a.cores)
        job |= {**option, "trl": job["trl"] | option.get("trl", {})}
        try:
            out[name] = speed(run("trl", a.trl_python, job))
        except SystemExit as error:
            out[name] = str(error).strip().splitlines()[-1]
        print(f"  {name}: {out[name]}", flush=True)
        add(options=out)


def command_race(a: argparse.Namespace) -> None:
    """Step times in short runs that take turns, added to those that are known."""
    job = demo_job(a.steps, 4e-4, cores=a.cores)
    key = f"{a.cores} cores"
    for name, (side, more) in SIDES.items():
        if a.only and name not in a.only:
            continue
        found = speed(run(side, a.trl_python, job | {"ours": job["ours"] | more}))
        print(f"  {key}, {name}: {found}", flush=True)
        race: dict[str, Any] = known("race", {})
        race.setdefault(key, {}).setdefault(name, []).append(found)
        add(race=race)


def command_report(a: argparse.Namespace) -> None:
    """Time to the goal: steps of the sweep's best runs times step times of the race; ratios are to TRL.

    With the recipe off trtl-rl is given the steps that it needs with FP8: the sweep trains with FP8 only.
    """
    steps: dict[str, Any] = {}
    for side in ("ours", "trl"):
        runs = [run for run in known("sweep", []) if run["side"] == side and run["steps_to_goal"]]
        if not runs:
            sys.exit(f"No run of {side} has reached the goal yet: `vs_trl.py sweep` comes first.")
        steps[side] = min(runs, key=lambda run: run["steps_to_goal"])
    out: dict[str, Any] = {"best": steps}
    for key, found in known("race", {}).items():
        out[key] = {}
        for name, (side, _) in SIDES.items():
            goal = [steps[side]["steps_to_goal"] * turn["step_seconds_mean"] for turn in found[name]]
            theirs = [steps["trl"]["steps_to_goal"] * turn["step_seconds_mean"] for turn in found["TRL"]]
            faster = [them / us for them, us in zip(theirs, goal, strict=False)]
            rates = [turn["tokens_per_second"] for turn in found[name]]
            ratios = [us / them["tokens_per_second"] for us, them in zip(rates, found["TRL"], strict=False)]
            out[key][name] = {
                "seconds_to_goal": round(statistics.median(goal), 1),
                "faster_to_goal": round(statistics.median(faster), 2),
                "faster_min_max": [round(min(faster), 2), round(max(faster), 2)],
                "tokens_per_second": round(statistics.median(rates)),
                "tokens_per_second_ratio": round(statistics.median(ratios), 2),
                "step_seconds": round(statistics.median(turn["step_seconds_mean"] for turn in found[name]), 3),
                "turns": len(faster),
            }
    add(report=out)


def command_steps(a: argparse.Namespace) -> None:
    """Step time of the 1.09 M model with 256 completions of 8 and of 64 tokens."""
    out: dict[str, Any] = known("small_model", {})
    with tempfile.TemporaryDirectory() as temporary:
        for tokens in a.tokens:
            job = small_job(tokens, a.cores, a.steps, Path(temporary))
            for name, (side, more) in SIDES.items():
                if a.only and name not in a.only:
                    continue
                found = speed(run(side, a.trl_python, job | {"ours": job["ours"] | more}), skip=2)
                out.setdefault(f"{tokens} tokens, {a.cores} cores", {})[name] = found
                print(f"  {tokens} tokens, {name}: {found}", flush=True)
                add(small_model=out)


def main() -> None:
    """One command, see above."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = {"sweep": command_sweep, "options": command_options, "race": command_race, "steps": command_steps}
    commands["report"] = command_report
    parser.add_argument("command", choices=list(commands))
    parser.add_argument("--trl-python", required=True, help="interpreter of an environment with TRL")
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--sides", nargs="+", default=["ours", "trl"], help="sweep: of these sides")
    parser.add_argument("--rates", type=float, nargs="+", default=list(RATES), help="sweep: learning rates")
    parser.add_argument("--losses", nargs="+", default=list(LOSSES), help="sweep: loss types of TRL")
    parser.add_argument("--tokens", type=int, nargs="+", default=[8, 64], help="steps: length of the answers")
    parser.add_argument("--only", nargs="+", help="sides or options by name")
    a = parser.parse_args()
    if shutil.which(a.trl_python) is None:
        sys.exit(f"There is no interpreter {a.trl_python}: give --trl-python the python of an environment with TRL.")
    commands[a.command](a)


if __name__ == "__main__":
    main()
