"""Endurance: thousands of asynchronous steps with ``optimizer.lr=0``, so that whatever moves is a fault.

    python bench/soak.py [--steps 3000]

A real run through ``Trainer``: the demo's model, 2 prompts × 2 samples of at most 8 tokens, a full refit after every step,
parity probes every tenth, a checkpoint every 250th. Every answer has a reward of its own, so that every group is trained
on. The parent process samples resident memory of trainer and engine and the size of the run's files. At the end it is
checked, and written with ``ok``, that mismatch is 0 in all probes; that the last checkpoint holds the weights that the run
began with, bit for bit; that the counters of steps, buffer, tokens and ledger add up to what the rows say and to what the
reward function saw; that staleness stays within ``buffer.max_staleness``; that no more checkpoints are kept than asked for;
that rows do not grow; and that memory in the last quarter of the steps is that of the second, within 2 %. Results are in
``results/soak.json`` and ``results/soak.png``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

MAX_STALENESS, PROMPTS, SAMPLES, KEEP = 2, 2, 2, 2


def worker(run_dir: Path, steps: int) -> None:
    """The run itself; writes what the reward function saw beside the run's directory."""
    from trtl_rl import Trainer
    from trtl_rl.config import validate_config
    from trtl_rl.demo.task import demo_rows
    from trtl_rl.rewards.reward import Reward

    seen = {"completions": 0, "tokens": 0}

    def distinct(completion_ids: list[list[int]], **columns: Any) -> list[float]:
        """Nearly every answer has a reward of its own; the answer's place breaks ties."""
        seen["completions"] += len(completion_ids)
        seen["tokens"] += sum(map(len, completion_ids))
        return [(sum(ids) % 97 + 0.25 * (i % SAMPLES)) / 97 for i, ids in enumerate(completion_ids)]

    config = validate_config(
        {
            "model": "demo",
            "run_dir": str(run_dir),
            "steps": steps,
            "sampling": {"max_new_tokens": 8},
            "batch": {"prompts": PROMPTS, "group_size": SAMPLES},
            "optimizer": {"lr": 0.0},
            "buffer": {"max_staleness": MAX_STALENESS},
            "parity": {"every": 10},
            "checkpoint": {"every": 250, "keep": KEEP},
        }
    )
    Trainer(reward_funcs=Reward("distinct", distinct, in_process=True), train_dataset=demo_rows(), args=config).train()
    run_dir.with_name("seen.json").write_text(json.dumps(seen))


def resident(process: psutil.Process) -> int:
    """Bytes of resident memory; 0 when the process is gone."""
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0


def watch(process: subprocess.Popen[bytes], run_dir: Path, every: float) -> list[dict[str, float]]:
    """Sample memory and files until the run ends."""
    from trtl_rl.metrics import MetricsReader

    trainer, reader, step = psutil.Process(process.pid), MetricsReader(run_dir / "metrics.jsonl"), 0
    samples: list[dict[str, float]] = []
    start = time.monotonic()
    while process.poll() is None:
        time.sleep(every)
        step = max([step, *(row["step"] for row in reader.poll() if row["kind"] == "step")])
        try:
            children = trainer.children()
        except psutil.Error:
            break
        files = [file for file in run_dir.rglob("*") if file.is_file()]
        samples.append(
            {
                "seconds": round(time.monotonic() - start, 1),
                "step": step,
                "trainer_mb": round(resident(trainer) / 2**20, 1),
                "engine_mb": round(sum(map(resident, children)) / 2**20, 1),
                "files_mb": round(sum(_size(file) for file in files) / 2**20, 2),
                "open_files": _open_files(trainer),
                "threads": _threads(trainer),
            }
        )
        if len(samples) % 20 == 0:
            print(samples[-1], flush=True)
    return samples


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:  # an old checkpoint, removed meanwhile
        return 0


def _open_files(process: psutil.Process) -> int:
    try:
        return int(process.num_fds())
    except psutil.Error:
        return 0


def _threads(process: psutil.Process) -> int:
    try:
        return int(process.num_threads())
    except psutil.Error:
        return 0


def quarter(samples: list[dict[str, float]], key: str, which: int) -> float:
    """Median of ``key`` over a quarter of the run's steps, from 0."""
    last = samples[-1]["step"]
    chosen = [s[key] for s in samples if which * last / 4 < s["step"] <= (which + 1) * last / 4]
    return statistics.median(chosen)


def same_weights(checkpoint: Path) -> bool:
    """Whether the checkpoint's FP32 weights are those of the bundled model, bit for bit."""
    import torch
    from safetensors.torch import load_file

    from trtl_rl.model.source import find_model

    start = load_file(find_model("demo").path / "model.safetensors")
    now = load_file(checkpoint / "model.safetensors")
    return all(torch.equal(now[name], tensor.float()) for name, tensor in start.items())


def check(run_dir: Path, samples: list[dict[str, float]], steps: int) -> dict[str, Any]:
    """Every promise: what was found, and whether it holds."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_bytes().splitlines()]
    ledger = json.loads((run_dir / "ledger.json").read_text())
    seen = json.loads(run_dir.with_name("seen.json").read_text())
    metrics = [row["metrics"] for row in rows if row["kind"] == "step"]
    probes = [m for m in metrics if "mismatch/max_abs" in m]
    kept = sorted((run_dir / "checkpoints").glob("step-*"))
    memory = {
        name: [quarter(samples, f"{name}_mb", 1), quarter(samples, f"{name}_mb", 3)] for name in ("trainer", "engine")
    }
    lines = (run_dir / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    half = len(lines) // 2
    per_step = [
        sum(map(len, part)) / sum(b'"kind": "step"' in line for line in part) for part in (lines[:half], lines[half:])
    ]
    found: dict[str, tuple[Any, bool]] = {
        "steps": (len(metrics), len(metrics) == steps),
        "probes": (len(probes), len(probes) > steps // 10),
        "largest_mismatch": (
            max(m["mismatch/max_abs"] for m in probes),
            all(m["mismatch/max_abs"] == 0 == m["mismatch/differing_tokens"] for m in probes),
        ),
        "weights_unchanged": (same_weights(kept[-1]), same_weights(kept[-1])),
        "steps_with_gradient": (
            sum(m.get("grad_norm", 0) > 0 for m in metrics),
            sum(m.get("grad_norm", 0) > 0 for m in metrics) > 0.9 * steps,
        ),
        "largest_staleness": (
            max(m["off_policy/max"] for m in metrics),
            max(m["off_policy/max"] for m in metrics) <= MAX_STALENESS,
        ),
        "most_groups_in_buffer": (
            max(m["buffer/ready"] + m["buffer/in_flight"] for m in metrics),
            max(m["buffer/ready"] + m["buffer/in_flight"] for m in metrics) <= (MAX_STALENESS + 1) * PROMPTS,
        ),
        "groups_left_at_the_end": (
            metrics[-1]["buffer/ready"] + metrics[-1]["buffer/in_flight"],
            metrics[-1]["buffer/ready"] + metrics[-1]["buffer/in_flight"] == 0,
        ),
        "groups_discarded": (metrics[-1]["buffer/discarded"], metrics[-1]["buffer/discarded"] == 0),
        "completions": (seen["completions"], seen["completions"] == steps * PROMPTS * SAMPLES),
        "tokens": ([metrics[-1]["num_tokens"], seen["tokens"]], metrics[-1]["num_tokens"] == seen["tokens"]),
        "ledger_beside_rows": (
            {role: ledger["flops"][role] for role in ("search", "learning", "feedback")},
            all(
                ledger["flops"][role] == sum(m[f"flops/{role}"] for m in metrics)
                for role in ("search", "learning", "feedback")
            ),
        ),
        "flops_wasted": (ledger["wasted"], all(value == 0 for value in ledger["wasted"].values())),
        "metrics_bytes_per_step": ([round(value) for value in per_step], per_step[1] < 1.02 * per_step[0] + 16),
        "checkpoints_kept": (len(kept), len(kept) <= KEEP),
        "files_mb": (samples[-1]["files_mb"], True),
        "warnings": (
            [row["text"] for row in rows if row["kind"] == "message" and row["level"] != "info"],
            sum(row["kind"] == "message" and row["level"] != "info" for row in rows) <= 2,  # lr is 0; answers are cut
        ),
        "open_files": (
            [quarter(samples, "open_files", 1), quarter(samples, "open_files", 3)],
            quarter(samples, "open_files", 3) <= quarter(samples, "open_files", 1),
        ),
        **{
            f"{name}_mb_second_and_last_quarter": (values, values[1] < 1.02 * values[0])
            for name, values in memory.items()
        },
    }
    return {name: {"found": value, "ok": bool(ok)} for name, (value, ok) in found.items()}


def rates(run_dir: Path, parts: int = 10) -> list[float]:
    """Steps per second in each tenth of the run."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_bytes().splitlines()]
    times = [row["time"] for row in rows if row["kind"] == "step"]
    cuts = [round(i * (len(times) - 1) / parts) for i in range(parts + 1)]
    return [round((b - a) / (times[b] - times[a]), 2) for a, b in itertools.pairwise(cuts)]


def plot(samples: list[dict[str, float]], path: Path) -> None:
    """Memory of both processes and the rate, against steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.2))
    steps = [s["step"] for s in samples]
    for key, label in (("trainer_mb", "trainer"), ("engine_mb", "engine")):
        left.plot(steps, [s[key] for s in samples], label=label)
    left.set_ylim(bottom=0)
    left.set_ylabel("resident memory, MB")
    left.legend()
    window = max(1, len(samples) // 50)
    pairs = list(zip(samples, samples[window:], strict=False))
    right.plot(
        [b["step"] for a, b in pairs],
        [(b["step"] - a["step"]) / (b["seconds"] - a["seconds"]) for a, b in pairs],
        color="C2",
    )
    right.set_ylim(bottom=0)
    right.set_ylabel("steps per second")
    for axis in (left, right):
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Run, check, write JSON and plot; exit status 1 when something does not hold."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--sample-seconds", type=float, default=2.0)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.worker:
        worker(Path(a.worker), a.steps)
        return
    from common import RESULTS, write_result

    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory() as directory:
        run_dir = Path(directory) / "run"
        process = subprocess.Popen([sys.executable, __file__, "--worker", str(run_dir), "--steps", str(a.steps)])
        samples = watch(process, run_dir, a.sample_seconds)
        if process.wait():
            sys.exit(f"The run failed with status {process.returncode}.")
        samples = [sample for sample in samples if sample["step"] and sample["engine_mb"]]  # while the engine lived
        checks = check(run_dir, samples, a.steps)
        rate = rates(run_dir)
    thin = samples[:: max(1, len(samples) // 100)]
    write_result(
        "soak",
        {
            "work": f"{a.steps} steps of {PROMPTS} prompts x {SAMPLES} samples x 8 tokens, max_staleness {MAX_STALENESS}, lr 0",
            "ok": all(item["ok"] for item in checks.values()),
            "checks": checks,
            "steps_per_second_by_tenth": rate,
            "samples": thin,
        },
    )
    plot(samples, RESULTS / "soak.png")
    if not all(item["ok"] for item in checks.values()):
        sys.exit("Not as promised: " + ", ".join(name for name, item in checks.items() if not item["ok"]))


if __name__ == "__main__":
    main()
