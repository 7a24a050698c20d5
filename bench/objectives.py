"""ASymPO beside SPO, GRPO and naive on the demo: same start, data, learning rate and steps; reward against steps.

    python bench/objectives.py [--seeds 2] [--staleness 1 8] [--steps 100]

Writes ``results/objectives.json`` and ``results/objectives.png``. One run after another, each the real command line. Stale
rollouts come from ``buffer.max_staleness``: the engine runs that many versions ahead when the learner is the slower side.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import RESULTS, write_result

COMMAND = [sys.executable, "-c", "from trtl_rl.cli.main import app; app()", "run"]
OBJECTIVES = ("asympo", "spo", "grpo", "naive")


def one_run(objective: str, staleness: int, seed: int, steps: int) -> dict[str, Any]:
    """Train once; returns reward by step and the evaluations before and after."""
    with tempfile.TemporaryDirectory() as directory:
        run = Path(directory) / "run"
        settings = [f"loss.name={objective}", f"buffer.max_staleness={staleness}", f"seed={seed}", f"steps={steps}"]
        done = subprocess.run([*COMMAND, f"run_dir={run}", "parity.every=0", *settings], capture_output=True, text=True)
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps_of = [row["metrics"] for row in rows if row["kind"] == "step"]
    evaluations = [row["metrics"] for row in rows if row["kind"] == "evaluation"]
    return {
        "objective": objective,
        "max_staleness": staleness,
        "seed": seed,
        "status": done.returncode,
        "reward": [round(m["reward"], 3) for m in steps_of],
        "imbalance": [round(m.get("asympo/imbalance") or 0.0, 2) for m in steps_of],
        "floor_frac": [round(m.get("asympo/floor_frac") or 0.0, 3) for m in steps_of],
        "mean_staleness": sum(m["off_policy/mean"] for m in steps_of) / len(steps_of),
        "step_seconds": sum(m["timing_s/step"] for m in steps_of) / len(steps_of),
        "before": evaluations[0],
        "after": evaluations[-1],
    }


def plot(runs: list[dict[str, Any]], path: Path) -> None:
    """Reward against steps, one panel for each staleness."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    levels = sorted({run["max_staleness"] for run in runs})
    figure, axes = pyplot.subplots(1, len(levels), figsize=(5 * len(levels), 3.6), sharey=True, squeeze=False)
    for axis, level in zip(axes[0], levels, strict=True):
        for colour, objective in enumerate(OBJECTIVES):
            chosen = [run for run in runs if run["max_staleness"] == level and run["objective"] == objective]
            for i, run in enumerate(chosen):
                axis.plot(run["reward"], color=f"C{colour}", alpha=0.8, lw=1.2, label=objective if i == 0 else None)
        axis.set_title(f"max_staleness {level}")
        axis.set_xlabel("step")
        axis.set_ylim(0, 1)
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("exact match of the batch")
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Run all, write JSON and plot."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--staleness", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--objectives", nargs="+", default=list(OBJECTIVES), help="runs of the others are kept")
    a = parser.parse_args()
    RESULTS.mkdir(exist_ok=True)
    file = RESULTS / "objectives.json"
    known = json.loads(file.read_text())["runs"] if file.exists() else []
    runs = [run for run in known if run["objective"] not in a.objectives]
    for staleness in a.staleness:
        for objective in a.objectives:
            for seed in range(a.seeds):
                runs.append(one_run(objective, staleness, seed, a.steps))
                write_result("objectives", {"runs": runs})
    plot(runs, RESULTS / "objectives.png")


if __name__ == "__main__":
    main()
