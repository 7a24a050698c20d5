"""One side of ``rollout.py`` in a process of its own, perhaps under another interpreter: a line of JSON in, a line out.

The process loads its model once, is told a work, finds the best plan for it (see ``rollout_sides.py``), and then runs the work
whenever it is told to, so that sides take turns. Its memory is its own. Only the standard library is needed to start.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Work:
    """Prompts of equal length with random ids, and how many tokens to generate for each: no id ends an answer.

    Attributes:
        least, most: New tokens of a prompt, drawn uniformly between the two.
    """

    prompts: int
    prompt_tokens: int
    least: int
    most: int

    def ids(self, vocabulary: int) -> list[list[int]]:
        """The prompts."""
        draw = random.Random(1)
        return [[draw.randrange(3, vocabulary) for _ in range(self.prompt_tokens)] for _ in range(self.prompts)]

    def new(self) -> list[int]:
        """New tokens of each prompt."""
        draw = random.Random(2)
        return [draw.randint(self.least, self.most) for _ in range(self.prompts)]

    def first(self) -> Work:
        """The same prompts with one new token each."""
        return replace(self, least=1, most=1)

    @property
    def context(self) -> int:
        """Longest prompt with its answer."""
        return self.prompt_tokens + self.most


class WorkerError(Exception):
    """A side that did not start, or that failed; the text is the end of what it said."""


class Worker:
    """The bench's end: starts the process and asks it, one question at a time."""

    def __init__(self, python: str, side: str, **options: Any) -> None:
        log, self._log = tempfile.mkstemp(suffix=".log")
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        # As engines/host.py starts its child, and so for every side: memory that a step gave back is kept.
        environment |= {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**40)}
        self._process = subprocess.Popen(
            [python, __file__, side, json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environment,
        )
        os.close(log)
        self._answer()

    def ask(self, do: str, **what: Any) -> dict[str, Any]:
        """Send a command and wait for its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **what}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def plan(self, work: Work, only_first: bool = False) -> dict[str, Any]:
        """Make ready for a work: the chosen plan, and the seconds of each that was tried; or all prompts at once."""
        return self.ask("plan", work=asdict(work), only_first=only_first)

    def seconds(self, first: bool = False) -> float:
        """Wall seconds of the whole work, or of one token a prompt."""
        return float(self.ask("run", first=first)["seconds"])

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
        os.unlink(self._log)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            said = [text for text in Path(self._log).read_text().splitlines() if text.strip()]
            raise WorkerError(f"{said[-1] if said else 'nothing said'} (exit code {self._process.returncode})")
        answer: dict[str, Any] = json.loads(line)
        return answer


def memory_mb(field: str) -> int:
    """``VmRSS`` or ``VmHWM`` (its highest value) of this process, in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) // 1000


def forget_peak() -> None:
    """Give freed memory back and let ``VmHWM`` start from what is in use now (Linux: 5 in clear_refs)."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def choose(side: Any, work: Work, only_first: bool) -> dict[str, Any]:
    """Run every plan of a side once, keep the fastest, and leave the side warm with it.

    The first plan takes all prompts at once; ``only_first`` takes it without a run of the whole work.
    """
    trials: dict[str, float] = {}
    plans = side.plans(work)[: 1 if only_first else None]
    for plan in plans:
        side.prepare(work, plan)
        side.run(work.first())
        start = time.perf_counter()
        if not only_first:
            side.run(work)
        trials[plan] = round(time.perf_counter() - start, 4)
    best = min(trials, key=lambda plan: trials[plan])
    if best != plans[-1]:
        side.prepare(work, best)
        side.run(work.first())
    forget_peak()
    return {"plan": best, "seconds_of_plans": trials, "rest_mb": memory_mb("VmRSS")}


def main() -> None:
    """Answer commands until standard input ends."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print where they like; answers have a channel of their own

    def answer(**what: Any) -> None:
        out.write(json.dumps(what) + "\n")
        out.flush()

    from rollout_sides import SIDES

    side = SIDES[sys.argv[1]](**json.loads(sys.argv[2]))
    answer(ready=True)
    work = None
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "plan":
            work = Work(**command["work"])
            answer(**choose(side, work, command["only_first"]))
        elif command["do"] == "run":
            assert work is not None
            now = work.first() if command["first"] else work
            start = time.perf_counter()
            tokens = side.run(now)
            seconds = time.perf_counter() - start
            assert tokens == sum(now.new()), f"{tokens} tokens, not {sum(now.new())}"
            answer(seconds=seconds)
        elif command["do"] == "describe":
            answer(**side.describe(work), peak_mb=memory_mb("VmHWM"))
    side.close()


if __name__ == "__main__":
    main()
