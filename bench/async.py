"""Asynchronous beside synchronous training, and what behaviour logprobs cost: the same real runs, in turns, on two cores.

    python bench/async.py [overlap] [logprobs] [--settings demo long] [--steps 40] [--repeats 3]

**overlap**: with r the time that a synchronous step waits for rollouts and l the rest of it, the ideal asynchronous step
takes max(r, l): a gain of (r + l) / max(r, l). ``share_of_ideal`` is the gain that was measured over that, which is
max(r, l) over the asynchronous step. It is given against synchronous steps with one thread in each process, as the
asynchronous runs have, and against ones that may use both cores in each phase (``threads=2 engine.threads=2``), with r
and l of those.

**logprobs**: ASymPO beside GRPO with the engine's logprobs: bytes that came from the engine's process, seconds that the
engine generated and that the learner took, for each step; and what a pass of the learner over the same batch costs,
which is how they are recomputed; ``learn`` and ``step`` hold that pass in these runs. They are synchronous, so that no
phase shares the machine with the other.

Every run goes through ``Trainer`` in a process of its own and is read from its ``metrics.jsonl``; the learning rate is so
small that the work stays the same over a run. Parity probes, evaluation and checkpoints are off. The first steps and the
last two do not count. Turns are added to those in ``results/async.json``; ``--fresh`` begins anew.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

SKIP = 5

# With `small` batches, 64 answers instead of 256, rollouts and learning take about as long as each other. Answers of `long` end
# at 64 tokens: the demo's model goes on after its answer where the end is not a stop.
SETTINGS: dict[str, dict[str, Any]] = {
    "demo": {},
    "small": {"batch": {"prompts": 8}},
    "short": {"sampling": {"temperature": 1.0, "max_new_tokens": 8}},
    "long": {"sampling": {"temperature": 2.0, "max_new_tokens": 64}},
}
OVERLAP: dict[str, dict[str, Any]] = {
    "synchronous": {"buffer": {"max_staleness": 0}},
    "synchronous, both cores in each phase": {
        "buffer": {"max_staleness": 0},
        "threads": 2,
        "engine": {"threads": 2},
    },
    "asynchronous": {"buffer": {"max_staleness": 1}},
}
LOGPROBS: dict[str, dict[str, Any]] = {
    "asympo": {"buffer": {"max_staleness": 0}, "loss": {"name": "asympo"}},
    "grpo, received": {"buffer": {"max_staleness": 0}, "loss": {"name": "grpo"}},
}


def merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """``base`` with the keys of ``over``, part by part."""
    out = dict(base)
    for key, value in over.items():
        out[key] = merged(out[key], value) if isinstance(value, dict) and isinstance(out.get(key), dict) else value
    return out


def worker(job: dict[str, Any]) -> None:
    """One run in this process; prints what ``metrics.jsonl`` does not hold as JSON on the last line."""
    import trtl_rl.engines.host
    from trtl_rl import Trainer
    from trtl_rl.config import validate_config
    from trtl_rl.trainer.learner import Learner

    received = {"bytes": 0}
    passes: list[float] = []

    class Counting(Connection):
        def recv_bytes(self, maxlength: int | None = None) -> bytes:
            data = super().recv_bytes(maxlength)
            received["bytes"] += len(data)
            return data

    trtl_rl.engines.host.Connection = Counting  # type: ignore[misc]
    update = Learner.update

    def with_a_pass(self: Learner, groups: Any, version: int) -> Any:
        start = time.perf_counter()
        rows = [(group.prompt.ids, done) for group in groups if group.has_signal() for done, _ in group.scored()]
        self.logprobs([ids for ids, _ in rows], [done for _, done in rows])
        passes.append(time.perf_counter() - start)
        return update(self, groups, version)

    if job["time_a_pass"]:
        Learner.update = with_a_pass  # type: ignore[method-assign]

    def signal(completions: list[str], completion_ids: list[list[int]], **columns: Any) -> list[float]:
        """Answers that differ have different rewards: every group is trained on."""
        return [sum(ids) % 101 / 101 for ids in completion_ids]

    more = {} if job["exact_match"] else {"reward_funcs": signal}
    Trainer(args=validate_config(job["config"]), **more).train()
    print(json.dumps({**received, "passes": passes}))


def run(
    settings: dict[str, Any], side: dict[str, Any], steps: int, exact_match: bool, time_a_pass: bool
) -> dict[str, float]:
    """Train once; mean seconds and counts of a step."""
    from trtl_rl.demo.defaults import demo_settings

    config = merged(merged(demo_settings(), settings), side)
    with tempfile.TemporaryDirectory() as directory:
        run_dir = Path(directory) / "run"
        config |= {"run_dir": str(run_dir), "steps": steps, "optimizer": {"lr": 1e-7}, "task": {}}
        config |= {"parity": {"every": 0}, "evaluation": {"prompts": 0}, "checkpoint": {"every": 0}}
        job = {"config": config, "exact_match": exact_match, "time_a_pass": time_a_pass}
        command = [sys.executable, __file__, "--worker", json.dumps(job)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"A run failed:\n{done.stdout[-1000:]}{done.stderr[-3000:]}")
        counted = json.loads(done.stdout.splitlines()[-1])
        rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        ledger = json.loads((run_dir / "ledger.json").read_text())
    rows = [row for row in rows if row["kind"] == "step"]
    counting = rows[SKIP:-2]
    metrics = [row["metrics"] for row in counting]

    def mean(name: str) -> float:
        return statistics.fmean(m.get(name, 0.0) for m in metrics)

    return {
        "step": (counting[-1]["time"] - rows[SKIP - 1]["time"]) / len(counting),
        "rollout_wait": mean("timing_s/rollout_wait"),
        "learn": mean("timing_s/learn"),
        "refit": mean("timing_s/refit"),
        "refit_pause": mean("timing_s/refit/pause"),
        "engine_busy": ledger["seconds"]["search"] / len(rows),
        "tokens": rows[-1]["metrics"]["num_tokens"] / len(rows),
        "staleness": mean("off_policy/mean"),
        "without_signal": mean("frac_reward_zero_std"),
        "bytes": counted["bytes"] / len(rows),
        "logprob_pass": statistics.fmean(counted["passes"][SKIP:]) if counted["passes"] else 0.0,
    }


def turns(sides: dict[str, dict[str, Any]], repeats: int, **options: Any) -> dict[str, list[dict[str, float]]]:
    """Every side ``repeats`` times, in turns."""
    out: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, side in sides.items():
            out[name].append(run(side=side, **options))
            print(f"  {name}: { ({k: round(v, 4) for k, v in out[name][-1].items()}) }", flush=True)
    return out


def summary(runs: list[dict[str, float]]) -> dict[str, Any]:
    """Medians, and the least and largest step."""
    values: dict[str, Any] = {key: round(statistics.median(r[key] for r in runs), 4) for key in runs[0]}
    if values["logprob_pass"]:
        passes = [r["learn"] - r["logprob_pass"] for r in runs]
        values["learn_without_the_pass"] = round(statistics.median(passes), 4)
    return {**values, "step_min_max": [round(min(r["step"] for r in runs), 4), round(max(r["step"] for r in runs), 4)]}


def compare(found: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Gain and share of the ideal, turn by turn against each synchronous side; medians with least and largest."""
    asynchronous = found["asynchronous"]
    idle = [run["rollout_wait"] / run["step"] for run in asynchronous]
    busy = [run["engine_busy"] / run["step"] for run in asynchronous]
    out: dict[str, Any] = {
        "learner_idle_share": round(statistics.median(idle), 3),
        "engine_idle_share": round(1 - statistics.median(busy), 3),
    }
    for name in found:
        if name == "asynchronous":
            continue
        gains, shares = [], []
        for ours, theirs in zip(asynchronous, found[name], strict=True):
            longer = max(theirs["rollout_wait"], theirs["step"] - theirs["rollout_wait"])
            gains.append(theirs["step"] / ours["step"])
            shares.append(longer / ours["step"])
        ideals = [gain / share for gain, share in zip(gains, shares, strict=True)]
        out[f"against {name}"] = {
            "gain": round(statistics.median(gains), 3),
            "ideal_gain": round(statistics.median(ideals), 3),
            "share_of_ideal": round(statistics.median(shares), 3),
            "share_min_max": [round(min(shares), 3), round(max(shares), 3)],
        }
    return out


def main() -> None:
    """Measure and write ``results/async.json``; parts that are not measured now are kept."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", default=["overlap", "logprobs"], help="overlap, logprobs")
    parser.add_argument("--settings", nargs="+", default=["demo", "short", "long"], choices=list(SETTINGS))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--fresh", action="store_true", help="forget the turns that the result file has")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.worker:
        worker(json.loads(a.worker))
        return
    from common import RESULTS, write_result

    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    file = RESULTS / "async.json"
    for name in a.settings:
        options = {"settings": SETTINGS[name], "steps": a.steps, "exact_match": name == "demo"}
        for part, sides in (("overlap", OVERLAP), ("logprobs", LOGPROBS)):
            if part not in a.parts:
                continue
            new = turns(sides, a.repeats, time_a_pass=part == "logprobs", **options)
            known = json.loads(file.read_text()) if file.exists() else {}
            result = {key: known.get(key, {}) for key in ("turns", "overlap", "logprobs")}
            found = result["turns"].setdefault(part, {}).setdefault(name, {})
            for side, runs in new.items():
                found[side] = ([] if a.fresh else found.get(side, [])) + runs
            whole = {side: summary(runs) for side, runs in found.items()}
            result[part][name] = whole | (compare(found) if part == "overlap" else {})
            write_result("async", result)


if __name__ == "__main__":
    main()
