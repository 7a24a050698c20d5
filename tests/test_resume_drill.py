"""kill -9 at many moments, saves included, and resume, until the run is complete: nothing is lost, doubled or left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from run_files import ROOT, checkpoints, metrics_of, rows_of, same, weights

STEPS = 12
KILLS = 11  # of each of two runs


class Drill:
    """The forking process."""

    def __init__(self) -> None:
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / "tests" / "drill_process.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )

    def attempt(self, run_dir: Path, staleness: int, seed: int) -> tuple[bool, int]:
        """Whether the run was completed, and the exit code of its process (−9: killed)."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{run_dir} {staleness} {seed} {STEPS}\n")
        self.process.stdin.flush()
        lines = []
        while not (line := self.process.stdout.readline()).startswith("ENDED"):
            assert line, "the forking process has died"
            lines.append(line.strip())
        return "DONE" in lines, int(line.split()[1])

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)


@pytest.fixture(scope="module")
def drill() -> Iterator[Drill]:
    process = Drill()
    yield process
    process.close()


def engines_of(run_dir: Path) -> list[int]:
    """Engine processes whose log is in the run's directory."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                if os.readlink(process / "fd" / "1") == str(run_dir / "logs" / "engine.log"):
                    found.append(int(process.name))
            except OSError:
                continue
    return found


def wait_for_no_engine(run_dir: Path) -> None:
    end = time.monotonic() + 120
    while engines_of(run_dir):
        assert time.monotonic() < end, "an engine goes on without its trainer"
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("staleness", [0, 2])
def test_killed_at_any_moment_a_run_is_completed_and_nothing_is_lost(
    staleness: int, drill: Drill, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    kills = torn = 0
    seed = 1000 * staleness
    while True:
        seed += 1
        done, code = drill.attempt(run_dir, staleness, seed if kills < KILLS else -1)
        assert code in (0, -9), f"seed {seed}: exit code {code}"
        if code == -9:
            kills += 1
            saves = run_dir / "checkpoints"
            torn += saves.is_dir() and any(path.suffix in (".partial", ".removed") for path in saves.iterdir())
            wait_for_no_engine(run_dir)
        elif kills >= KILLS:
            assert done
            break
        elif done:  # faster than its killers: from an earlier checkpoint
            newest = run_dir / "checkpoints" / checkpoints(run_dir)[-1]
            (newest / "state.json").write_text("torn")
    print(f"{kills} kills, {torn} of them within a save")
    assert torn >= 2, "some kills were within a save"

    assert [row["step"] for row in rows_of(run_dir, "step")] == list(range(1, STEPS + 1))
    assert all(row["metrics"]["off_policy/max"] <= staleness for row in rows_of(run_dir, "step"))
    files = sorted((run_dir / "rollouts").iterdir())
    assert [path.name for path in files] == [f"step-{n:08d}.jsonl" for n in range(1, STEPS + 1)]
    lines: list[dict[str, Any]] = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    indices = [line["index"] for line in lines]
    assert len(set(indices)) == len(indices), "no group is trained on twice"
    state = json.loads((run_dir / "checkpoints" / "latest" / "state.json").read_text())["state"]["rollouts"]
    left = [*state["again"], *(entry["index"] for entry in state["ready"])]
    assert sorted([*indices, *left]) == list(range(state["next_index"])), "none is lost"
    assert sum(line["fate"] == "trained" for line in lines) == 2 * STEPS

    assert not list(run_dir.rglob("*.partial")) and not list(run_dir.rglob("*.removed"))
    assert {path.name for path in run_dir.iterdir()} == {
        "config.yaml", "metrics.jsonl", "ledger.json", "checkpoints", "rollouts", "logs",
    }  # fmt: skip
    wait_for_no_engine(run_dir)

    if staleness == 0:
        plain = tmp_path / "plain"
        assert drill.attempt(plain, staleness, -1) == (True, 0)
        assert metrics_of(run_dir) == metrics_of(plain)
        assert same(weights(run_dir), weights(plain))
        for path in files:
            assert path.read_text() == (plain / "rollouts" / path.name).read_text()
