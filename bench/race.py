"""RACE: does it find a known optimum, does noise fool it, and how a reward model shifts the demo's split.

    python bench/race.py [--parts synthetic demo] [--trials 300] [--budget 4e11] [--cells 6] [--settings key=value ...]

First synthetic responses with known optima and noise alone, through the same fit as a race's. Then the demo's own race by the
command line: rule reward against a reward model that this script trains first. Writes ``results/race.json`` and
``results/race.png``. With ``--directory`` the race is kept there, and goes on where it was interrupted.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from common import RESULTS, write_result

from trtl_rl.flops.response import fit_response

COMMAND = [sys.executable, "-c", "from trtl_rl.cli.main import app; app()", "race"]
JUDGE = Path(__file__).parent / "race_judge.py"
SETTINGS = ["batch.prompts=16", "optimizer.warmup_steps=4"]  # many steps in cells that are short
RANGE = (0.35, 0.93)  # of rho, about what the demo's cells span


def synthetic(trials: int, cells: int) -> list[dict[str, Any]]:
    """Scores with their best at a known rho, 1.5 (rho - optimum)² lower elsewhere, under noise; and noise alone."""
    rng = np.random.default_rng(0)
    rho = np.linspace(*RANGE, cells)
    middle = sum(RANGE) / 2
    out = []
    for optimum, noise in ((0.45, 0.02), (0.45, 0.05), (0.72, 0.02), (0.8, 0.02), (0.8, 0.05), (None, 0.05)):
        base = np.full(cells, 0.6) if optimum is None else 0.6 - 1.5 * (rho - optimum) ** 2
        found = [
            fit_response(rho.tolist(), (base + rng.normal(scale=noise, size=cells)).tolist()) for _ in range(trials)
        ]
        row: dict[str, Any] = {"cells": cells, "optimum": optimum, "noise": noise, "trials": trials}
        row["undecided"] = sum(r.regime == "undecided" for r in found) / trials
        if optimum is not None:
            right = "high-update" if optimum > middle else "low-update"
            spans = [r.interval for r in found if r.interval is not None]
            row["right"] = sum(r.regime == right for r in found) / trials
            row["wrong"] = sum(r.regime not in (right, "undecided") for r in found) / trials
            row["interval_holds_optimum"] = sum(a <= optimum <= b for a, b in spans) / max(1, len(spans))
        out.append(row)
    return out


def demo(directory: Path, budget: float, cells: int, judge_steps: int, settings: list[str]) -> dict[str, Any]:
    """The demo's race under both reward systems, in ``directory``."""
    sys.path.insert(0, str(JUDGE.parent))
    import race_judge

    model, place = directory / "judge", directory / "race"
    if (place / "race.json").exists():
        accuracy = json.loads((directory / "judge.json").read_text())
        run = [*COMMAND, "--resume", str(place)]
    else:
        accuracy = race_judge.train(model, judge_steps)
        (directory / "judge.json").write_text(json.dumps(accuracy))
        system = f"{{name: '{JUDGE}:judge', arguments: {{model: '{model}'}}}}"
        targets = f"evaluation.scorer=[exact_match, '{JUDGE}:final_sum']"
        options = ["--budget", str(budget), "--cells", str(cells), "--rewards", "exact_match", "--rewards", system]
        run = [*COMMAND, *options, "--answer-tokens", "20", "--yes", f"run_dir={place}", targets, *SETTINGS, *settings]
    subprocess.run(run, check=True)
    race = json.loads((place / "race.json").read_text())
    shutil.copy(place / "race.png", RESULTS / "race.png")
    rows = []
    for cell in race["cells"]:
        outcome = race["outcomes"][cell["name"]]
        total = sum(outcome["flops"].values())
        split = cell["split"]
        rows.append(
            {
                "cell": cell["name"],
                "steps": outcome["steps"],
                "flops": total,
                "share": {role: round(flops / total, 4) for role, flops in outcome["flops"].items()},
                "planned_update_fraction": split["learning"]
                / (split["search"] + split["learning"] + (split["feedback"] or 0)),
                "update_fraction": outcome["update_fraction"],
                "updates_per_rollout": outcome["updates_per_rollout"],
                "scores": outcome["scores"],
            }
        )
    return {
        "budget": race["budget"],
        "settings": [*SETTINGS, *settings],
        "judge_accuracy": accuracy,
        "cells": rows,
        "responses": race["responses"],
    }


def main() -> None:
    """Both parts; the demo's is the long one."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=300)
    parser.add_argument("--budget", type=float, default=4e11)
    parser.add_argument("--cells", type=int, default=6)
    parser.add_argument("--judge-steps", type=int, default=150)
    parser.add_argument("--directory", type=Path, help="of the demo's race; default: one that is thrown away")
    parser.add_argument("--parts", nargs="+", default=["synthetic", "demo"], help="what is known of the other is kept")
    parser.add_argument("--settings", nargs="*", default=[], help="key=value for the demo's cells")
    a = parser.parse_args()
    RESULTS.mkdir(exist_ok=True)
    if "synthetic" in a.parts:
        keep(synthetic=[row for cells in (6, 12) for row in synthetic(a.trials, cells)])
    if "demo" in a.parts:
        with tempfile.TemporaryDirectory() as thrown_away:
            directory = a.directory or Path(thrown_away)
            directory.mkdir(parents=True, exist_ok=True)
            keep(demo=demo(directory.resolve(), a.budget, a.cells, a.judge_steps, a.settings))


def keep(**part: Any) -> None:
    """Write a part's result beside what is known of the other."""
    file = RESULTS / "race.json"
    known = json.loads(file.read_text()) if file.exists() else {}
    write_result("race", {**{name: known[name] for name in ("synthetic", "demo") if name in known}, **part})


if __name__ == "__main__":
    main()
