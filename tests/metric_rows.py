"""Rows of a realistic run and what the dashboard makes of them, for tests."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

from rich.console import Console

from trtl_rl.cli.closing import print_closing
from trtl_rl.cli.panels import frame
from trtl_rl.cli.view import View

STEPS = 300
NOW = 1_800_000_000.0
ESCAPE = "\x1b"
SIZES = [(80, 24), (160, 50), (110, 30), (200, 24), (60, 20), (40, 12), (20, 5), (8, 1)]


def step_metrics(step: int, **over: Any) -> dict[str, Any]:
    reward = 0.3 + 0.6 * (1 - math.exp(-step / 90))
    flops = {"search": 3.7e10, "learning": 8.2e10, "feedback": 0.0}
    metrics: dict[str, Any] = {
        "reward": reward,
        "reward_std": 0.3,
        "rewards/exact_match/mean": reward,
        "frac_reward_zero_std": 0.22,
        "completions/mean_length": 19.8,
        "completions/clipped_ratio": 0.01,
        "entropy": 0.2,
        "loss": 0.0,
        "grad_norm": 0.8,
        "learning_rate": 1e-4,
        "num_tokens": 5069.0 * step,
        "off_policy/mean": 1.0,
        "off_policy/max": 1,
        "asympo/imbalance": 8.2,
        "timing_s/step": 0.35,
        "timing_s/rollout_wait": 0.18,
        "timing_s/learn": 0.15,
        "timing_s/refit": 0.02,
        "timing_s/refit/quantise": 0.19,
        "perf/tokens_per_second": 14480.0,
        "flops/wasted/stale": 0.0,
        "flops/wasted/zero_signal": 2e10,
        "flops/total": sum(flops.values()),
    }
    for role, spent in flops.items():
        metrics[f"flops/{role}"] = spent
        metrics[f"flops/cumulative/{role}"] = spent * step
    if step % 10 == 0:
        metrics |= {"mismatch/differing_tokens": 0, "mismatch/max_abs": 0.0, "mismatch/tokens": 320}
    return metrics | over


def run_rows(steps: int = 120, *, end: bool = False, **over: Any) -> list[dict[str, Any]]:
    """Rows as a run writes them, the last one at ``NOW``."""
    start = {
        "model": "demo",
        "parameters": 344_064,
        "steps": STEPS,
        "task": "addition",
        "loss": "asympo",
        "recipe": "fp8_block",
        "kernels": "torch-1f2e3d4c",
    }
    rows: list[dict[str, Any]] = [
        {"kind": "start", **start},
        {"kind": "progress", "name": "compiling operators", "done": 0, "total": 4, "unit": "units"},
        {"kind": "progress", "name": "compiling operators", "done": 4, "total": 4, "unit": "units"},
        {"kind": "evaluation", "step": 0, "metrics": {"eval/exact_match": 0.31, "eval/greedy_exact_match": 0.75}},
    ]
    for step in range(1, steps + 1):
        rows.append({"kind": "step", "step": step, "metrics": step_metrics(step, **over)})
    sample = {"prompt": "47+85=", "completion": "7+5=12,4+8+1=13,132", "reward": 1.0, "finish_reason": "stop"}
    rows += [
        {"kind": "sample", "step": steps, **sample},
        {"kind": "message", "level": "info", "text": "checkpoint saved"},
    ]
    if end:
        metrics = {"eval/exact_match": 0.93, "eval/greedy_exact_match": 0.98}
        rows.append({"kind": "evaluation", "step": steps, "metrics": metrics})
        rows.append({"kind": "end", "status": "done", "step": steps, "text": "Your own model:\n  model: PATH"})
    for index, row in enumerate(rows):
        row["time"] = NOW - 0.35 * (len(rows) - 1 - index)
    return rows


def view_of(rows: list[dict[str, Any]], run_dir: str = "runs/2026-11-30-1910") -> View:
    view = View(run_dir)
    for row in rows:
        view.apply(row)
    return view


def draw(view: View, width: int = 80, height: int = 24, now: float = NOW) -> list[str]:
    """The frame through a console of that size, as a terminal would show it."""
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=True, record=True)
    for line in frame(view, width, height, now):
        console.print(line, no_wrap=True, crop=False)
    return console.export_text().rstrip("\n").split("\n")


def closing(view: View, **console: Any) -> str:
    out = io.StringIO()
    print_closing(view, Console(file=out, width=80, highlight=False, **console))
    return out.getvalue()


def write(run_dir: Path, rows: list[dict[str, Any]]) -> None:
    run_dir.mkdir(parents=True, exist_ok=True)
    with open(run_dir / "metrics.jsonl", "a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
