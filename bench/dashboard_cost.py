"""What the dashboard costs: CPU time of drawing a run on a real terminal, as a share of one core.

python bench/dashboard_cost.py [STEPS_PER_SECOND] [SECONDS]

A process of its own writes a step's rows so many times a second; ``trtl-rl watch`` follows them on a pseudo-terminal of
80×24 and of 200×50, in the first half of the time to warm up. CPU time is the watching process's own, user and system.
"""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from trtl_rl.metrics import MetricsWriter
from trtl_rl.versions import versions

WATCH = "import sys; from trtl_rl.cli.watch import watch; sys.exit(watch(sys.argv[1]))"


def measure(width: int, height: int, rate: float, seconds: float) -> float:
    """Share of a core, between half of ``seconds`` and their end."""
    import fcntl
    import struct
    import termios

    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder)
        writer = MetricsWriter(run_dir / "metrics.jsonl")
        writer.write("start", model="demo", parameters=344_064, steps=100_000, task="demo", loss="asympo", recipe="fp8")
        master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
        environment = {**os.environ, "TERM": "xterm-256color", "PYTHONUTF8": "1"}
        command = [sys.executable, "-c", WATCH, folder]
        child = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True
        )
        done = threading.Event()

        def drain() -> None:
            while not done.is_set():
                if select.select([master], [], [], 0.1)[0]:
                    os.read(master, 65536)

        reader = threading.Thread(target=drain)
        reader.start()
        began = time.monotonic()
        before, step = None, 0
        while (passed := time.monotonic() - began) < seconds:
            if before is None and passed >= seconds / 2:
                before = (cpu_seconds(child.pid), time.monotonic())
            step += 1
            writer.write("sample", step=step, prompt="47+85=", completion="7+5=12,4+8+1=13,132", reward=1.0)
            writer.step(step, {**METRICS, "reward": 0.5 + step % 7 / 20})
            time.sleep(1 / rate)
        assert before is not None
        share = (cpu_seconds(child.pid) - before[0]) / (time.monotonic() - before[1])
        child.terminate()
        child.wait()
        done.set()
        reader.join()
        return share


def cpu_seconds(pid: int) -> float:
    """User and system time so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


METRICS = {
    **{f"flops/{role}": 3e10 for role in ("search", "learning", "feedback", "total")},
    **{f"flops/cumulative/{role}": 3e12 for role in ("search", "learning", "feedback")},
    **{f"timing_s/{part}": 0.1 for part in ("step", "rollout_wait", "learn", "refit", "rewards", "parity")},
    "reward_std": 0.3,
    "asympo/imbalance": 8.2,
    "completions/mean_length": 19.8,
    "completions/clipped_ratio": 0.01,
    "frac_reward_zero_std": 0.2,
    "off_policy/mean": 1.0,
    "perf/tokens_per_second": 14480.0,
}

if __name__ == "__main__":
    rate = float(sys.argv[1]) if len(sys.argv) > 1 else 1.0
    seconds = float(sys.argv[2]) if len(sys.argv) > 2 else 30.0
    shares = {f"{w}x{h}": round(measure(w, h, rate, seconds), 4) for w, h in ((80, 24), (200, 50))}
    print(json.dumps({"share_of_a_core": shares, "steps_per_second": rate, "seconds": seconds, "versions": versions()}))
