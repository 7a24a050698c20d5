"""Stale rollouts: naive, GRPO, SPO and ASymPO with rollouts up to 0, 1, 4, 16 and 64 weight versions old, on two tasks.

    python bench/staleness.py [--only REGEX] [--jobs 1] [--plot] [--list]

Every run is a real one, through ``Trainer`` with its asynchronous engine: ``buffer.max_staleness`` bounds how old rollouts
are, the engine keeps the buffer full, and how old they really were is recorded. First each objective's learning rate is
chosen on each task (a grid, one staleness, a seed of its own), by the last evaluation; then the grid runs with it.

Runs are named ``TASK/sweep/OBJECTIVE/LR`` and ``TASK/OBJECTIVE/STALENESS/SEED``; ``--only`` takes those that it matches. A run that
is done is a line in ``results/staleness_runs.jsonl``, and is not done again while its settings are the same. At the end, or
with ``--plot`` of what there is, ``results/staleness.json`` and ``results/staleness.png`` are made.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import long_addition
from common import RESULTS, write_result
from staleness_plot import plot

from trtl_rl.demo.task import demo_rows

OBJECTIVES = ("naive", "grpo", "spo", "asympo")
STALENESS = (0, 1, 4, 16, 64)
SEEDS = (1, 2, 3)
SWEEP_STALENESS, SWEEP_SEED = 4, 0
RATES = (1e-4, 3e-4, 1e-3)
COLLAPSE = (
    "The last evaluation (sampled answers of the last weights to held-out prompts) is less than half as often right as the run's "
    "best one, that of the start model included; or the gradient was not finite in 20 updates in a row."
)
# Constant learning rate after five updates, so that the end of a schedule does not hide what happens.
SETTINGS: dict[str, Any] = {
    "optimizer": {"warmup_steps": 5},
    "batch": {"prompts": 8, "group_size": 8},
    "rewards": ["exact_match"],
    "task": {"held_out": 256},
    "evaluation": {"prompts": 128, "every": 30},
    "parity": {"every": 0},
    "checkpoint": {"every": 0},
    # Where the machine is busy with other work, a slow engine is no hung one.
    "engine": {"timeout": 3600},
    "refit": {"timeout": 1800},
}
TASKS: dict[str, dict[str, Any]] = {
    "demo": {"steps": 120, "sampling": {"max_new_tokens": 24}},
    "long": {"steps": 120, "sampling": {"max_new_tokens": long_addition.NEW_TOKENS}},
}
RUNS = RESULTS / "staleness_runs.jsonl"


def settings_of(task: str, objective: str, staleness: int, seed: int, lr: float) -> dict[str, Any]:
    """The configuration of a run, without its directory."""
    return {
        **SETTINGS,
        **TASKS[task],
        "optimizer": {**SETTINGS["optimizer"], "lr": lr},
        "loss": {"name": objective},
        "buffer": {"max_staleness": staleness},
        "seed": seed,
    }


def start_model(task: str) -> str:
    """Name or directory of the model that every run of a task begins with; made once."""
    if task == "demo":
        return "demo"
    from trtl_rl.kernels.kernel_set import cache_directory

    directory = cache_directory().parent / f"long_addition-{long_addition.identity()}"
    if not directory.exists():
        with tempfile.TemporaryDirectory(dir=_made(directory.parent)) as scratch:
            long_addition.make(Path(scratch) / "model")
            (Path(scratch) / "model").rename(directory)
    return str(directory)


def one_run(name: str, task: str, settings: dict[str, Any], model: str) -> dict[str, Any]:
    """Train once; what it did, in a few curves."""
    import torch

    from trtl_rl import Trainer
    from trtl_rl.config import validate_config
    from trtl_rl.metrics import read_rows

    torch.set_num_threads(1)
    rows = demo_rows() if task == "demo" else long_addition.rows(20_000, 0)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        run = Path(directory) / "run"
        config = validate_config({**settings, "run_dir": str(run)})
        try:
            reason = Trainer(model=model, train_dataset=rows, args=config).train().reason
        except FloatingPointError:
            reason = "not finite"
        found = list(read_rows(run / "metrics.jsonl"))
    steps = [row["metrics"] for row in found if row["kind"] == "step"]

    def curve(metric: str, digits: int) -> list[float | None]:
        values = [m.get(metric) for m in steps]
        return [None if value is None else float(f"{value:.{digits}g}") for value in values]

    stale = [m["off_policy/mean"] for m in steps]
    return {
        "name": name,
        "settings": settings,
        "ended": reason,
        "reward": curve("reward", 3),
        "imbalance": curve("asympo/imbalance", 3),
        "nll_positive": curve("asympo/nll_positive", 3),
        "entropy": curve("entropy", 3),
        "grad_norm": curve("grad_norm", 3),
        "floor_frac": curve("asympo/floor_frac", 3),
        "clip_frac": curve("grpo/clip_frac", 3),
        "off_policy_mean": round(statistics.mean(stale), 2),
        "off_policy_mean_second_half": round(statistics.mean(stale[len(stale) // 2 :]), 2),
        "off_policy_max": max(m["off_policy/max"] for m in steps),
        "evaluations": [
            [row["step"], row["metrics"]["eval/exact_match"], row["metrics"]["eval/greedy_exact_match"]]
            for row in found
            if row["kind"] == "evaluation"
        ],
        "seconds": round(time.perf_counter() - began, 1),
    }


def collapsed(run: dict[str, Any]) -> bool:
    """See ``COLLAPSE``."""
    sampled = [exact for _, exact, _ in run["evaluations"]]
    return run["ended"] == "not finite" or sampled[-1] < 0.5 * max(sampled)


def sweep() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Name, task and settings of the runs that choose learning rates."""
    for task in TASKS:
        for objective in OBJECTIVES:
            for lr in RATES:
                settings = settings_of(task, objective, SWEEP_STALENESS, SWEEP_SEED, lr)
                yield f"{task}/sweep/{objective}/{lr:g}", task, settings


def grid(done: dict[str, dict[str, Any]]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """The same of the grid, as far as learning rates are known; seed after seed, so that half a grid tells something."""
    for seed in SEEDS:
        for task in TASKS:
            for staleness in STALENESS:
                for objective in OBJECTIVES:
                    lr = best_rate(done, task, objective)
                    if lr is not None:
                        settings = settings_of(task, objective, staleness, seed, lr)
                        yield f"{task}/{objective}/{staleness}/{seed}", task, settings


def best_rate(done: dict[str, dict[str, Any]], task: str, objective: str) -> float | None:
    """The rate of the highest last evaluation, of equals the lower one; None until all have run."""
    found = [done.get(f"{task}/sweep/{objective}/{lr:g}") for lr in RATES]
    if any(run is None for run in found):
        return None
    last = [run["evaluations"][-1][1] for run in found if run is not None]
    return RATES[last.index(max(last))]


def read_done() -> dict[str, dict[str, Any]]:
    """Runs that were made, by name; the last one counts."""
    if not RUNS.exists():
        return {}
    return {run["name"]: run for run in map(json.loads, RUNS.read_text().splitlines())}


def run_all(work: list[tuple[str, str, dict[str, Any]]], jobs: int, only: str) -> None:
    """Do what is not done yet, ``jobs`` at a time, each a process that goes on to the next run."""
    done = read_done()
    left = [item for item in work if re.search(only, item[0]) and done.get(item[0], {}).get("settings") != item[2]]
    models = {task: start_model(task) for task in {task for _, task, _ in left}}
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(one_run, name, task, settings, models[task]) for name, task, settings in left]
        for count, future in enumerate(as_completed(futures), 1):
            try:
                run = future.result()
            except Exception as error:  # it is left to do; the others go on
                print(f"{count}/{len(left)} failed: {error!r}", flush=True)
                continue
            with open(RUNS, "a") as file:
                file.write(json.dumps(run) + "\n")
            at = run["evaluations"][-1]
            print(
                f"{count}/{len(left)} {run['name']}: exact match {at[1]:.2f}, greedy {at[2]:.2f}, staleness "
                f"{run['off_policy_mean']:.1f}, {run['seconds']:.0f} s",
                flush=True,
            )


def summary(done: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What the runs say, without their curves."""
    cells = []
    for task in TASKS:
        for objective in OBJECTIVES:
            for staleness in STALENESS:
                runs = [done[name] for seed in SEEDS if (name := f"{task}/{objective}/{staleness}/{seed}") in done]
                if not runs:
                    continue
                known = [[value for value in run["imbalance"] if value is not None] for run in runs]
                cells.append(
                    {
                        "task": task,
                        "objective": objective,
                        "max_staleness": staleness,
                        "lr": runs[0]["settings"]["optimizer"]["lr"],
                        "seeds": len(runs),
                        "off_policy_mean": [run["off_policy_mean"] for run in runs],
                        "off_policy_mean_second_half": [run["off_policy_mean_second_half"] for run in runs],
                        "off_policy_max": [run["off_policy_max"] for run in runs],
                        "start": [round(run["evaluations"][0][1], 3) for run in runs],
                        "exact_match": [round(run["evaluations"][-1][1], 3) for run in runs],
                        "greedy_exact_match": [round(run["evaluations"][-1][2], 3) for run in runs],
                        "collapsed": [collapsed(run) for run in runs],
                        "imbalance_median": [float(f"{statistics.median(values):.3g}") for values in known],
                        "imbalance_max": [float(f"{max(values):.3g}") for values in known],
                    }
                )
    rates = {task: {objective: best_rate(done, task, objective) for objective in OBJECTIVES} for task in TASKS}
    swept = {name: round(run["evaluations"][-1][1], 3) for name, run in done.items() if "/sweep/" in name}
    return {
        "settings": {**SETTINGS, "tasks": TASKS},
        "collapse": COLLAPSE,
        "sweep": {"rates": RATES, "max_staleness": SWEEP_STALENESS, "seed": SWEEP_SEED, "exact_match": swept},
        "learning_rates": rates,
        "cells": cells,
    }


def _made(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def main() -> None:
    """Run, then write JSON and plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="runs whose names this expression is found in")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once; each takes two cores")
    parser.add_argument("--plot", action="store_true", help="run nothing; write JSON and plot of what is done")
    parser.add_argument("--list", action="store_true", help="name what is left to do")
    a = parser.parse_args()
    RESULTS.mkdir(exist_ok=True)
    if a.list:
        done = read_done()
        for name, _, settings in [*sweep(), *grid(done)]:
            if done.get(name, {}).get("settings") != settings:
                print(name)
        return
    if not a.plot:
        run_all(list(sweep()), a.jobs, a.only)
        run_all(list(grid(read_done())), a.jobs, a.only)
    done = read_done()
    write_result("staleness", summary(done))
    plot({name: {**run, "collapsed": collapsed(run)} for name, run in done.items()}, RESULTS / "staleness.png")


if __name__ == "__main__":
    main()
