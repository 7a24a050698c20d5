"""Start-up: ``trtl-rl --help``, and the demo's first step with warm compiled operators.

python bench/startup.py
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import write_result

COMMAND = [sys.executable, "-c", "from trtl_rl.cli.main import app; app()"]


def main() -> None:
    """Measure and write ``results/startup.json``."""
    helps = []
    for _ in range(5):
        start = time.perf_counter()
        subprocess.run([*COMMAND, "--help"], check=True, capture_output=True)
        helps.append(time.perf_counter() - start)
    firsts, compiled = [], []
    for _ in range(4):
        with tempfile.TemporaryDirectory() as directory:
            run = Path(directory) / "run"
            start = time.time()
            arguments = ["run", f"run_dir={run}", "steps=1", "evaluation.prompts=0"]
            subprocess.run([*COMMAND, *arguments], check=True, capture_output=True)
            rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
            firsts.append(next(row["time"] for row in rows if row["kind"] == "step") - start)
            compiled.append(next(row["compile_seconds"] for row in rows if row["kind"] == "start"))
    write_result(
        "startup",
        {
            "help_seconds": round(statistics.median(helps), 2),
            "first_step_seconds": round(statistics.median(firsts[1:]), 1),
            "compile_seconds_of_first_run": compiled[0],
            "compile_seconds_after": compiled[1:],
        },
    )


if __name__ == "__main__":
    main()
