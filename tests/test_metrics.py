"""The table of metrics, what the code writes, and docs/metrics.md are the same; metrics are reduced once."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trtl_rl.metric_table import METRICS, PARTS, ROWS, find, markdown
from trtl_rl.metrics import Accumulator, MetricsReader, MetricsWriter, read_rows

ROOT = Path(__file__).resolve().parent.parent
SPACES = sorted({metric.name.split("/")[0] for metric in METRICS if "/" in metric.name})


def sources() -> Iterator[tuple[Path, ast.AST]]:
    """What can write metrics: everything but the command line and the table itself."""
    for folder in ("trtl_rl", "trainer", "engines"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if "cli" not in path.relative_to(ROOT).parts and path.name != "metric_table.py":
                yield path, ast.parse(path.read_text())


def metric_names() -> dict[str, str]:
    """Every string in the code that looks like a metric's name, and where; what an f-string fills in reads ``{}``."""
    found = {}
    pattern = re.compile(rf"(?:{'|'.join(SPACES)})/[a-z0-9_/{{}}]+")
    for path, tree in sources():
        for node in ast.walk(tree):
            text = None
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                text = node.value
            elif isinstance(node, ast.JoinedStr):
                text = "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
            if text is not None and pattern.fullmatch(text) and not text.endswith("/"):
                found[text] = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
    return found


def test_every_metric_that_the_code_names_is_in_the_table() -> None:
    names = metric_names()
    assert {"flops/cumulative/total", "flops/{}", "timing_s/learn", "asympo/imbalance"} <= names.keys()
    known = [metric.name for metric in METRICS]

    def is_known(name: str) -> bool:
        fixed = name.split("{}")[0]  # what an f-string fills in, the run of a test must show
        return find(name) is not None or (fixed != name and any(other.startswith(fixed) for other in known))

    unknown = {name: where for name, where in names.items() if not is_known(name)}
    assert unknown == {}, "add a line to trtl_rl/metric_table.py"


def test_every_line_of_the_table_is_written_somewhere() -> None:
    names = {re.sub(r"\{[^}]*\}", "{}", name) for name in metric_names()}
    text = "\n".join(path.read_text() for path, _ in sources())
    missing = []
    for metric in METRICS:
        general = re.sub(r"\{[^}]*\}", "{}", metric.name)
        family = general.rsplit("/", 1)[0] + "/{}"
        if not ({general, family} & names or f'"{metric.name}"' in text):
            missing.append(metric.name)
    assert missing == []


def test_the_table_has_each_name_once_in_the_projects_form() -> None:
    names = [metric.name for metric in METRICS]
    assert len(names) == len(set(names)) == sum(map(len, PARTS.values()))
    assert all(re.fullmatch(r"[a-z0-9_]+(/([a-z0-9_]+|[a-z_]*\{[a-z]+\}))*", name) for name in names)
    assert all(metric.unit == "s" for metric in METRICS if metric.name.startswith("timing_s/"))
    assert all(metric.unit == "share" for metric in METRICS if metric.name.endswith(("_frac", "_ratio")))


def test_the_document_is_the_table() -> None:
    assert (ROOT / "docs" / "metrics.md").read_text() == markdown(), "python -m trtl_rl.metric_table > docs/metrics.md"


def test_a_name_with_a_users_part_is_found_and_a_wrong_one_is_not() -> None:
    found = find("rewards/my reward.py:f/mean")
    assert found is not None and found.name == "rewards/{fn}/mean"
    assert find("eval/greedy_x") is not None and find("rewards//mean") is None and find("lossy") is None
    exact = find("eval/greedy_exact_match")
    assert exact is not None and exact.meaning.startswith("score of greedy")


# ------------------------------------------------------------------------------------------- reduced once


def parts() -> list[Accumulator]:
    one, other = Accumulator(), Accumulator()
    one.add("reward", 3.0, count=4)
    other.add("reward", 0.0, count=1)
    one.add("off_policy/max", 2, how="max")
    other.add("off_policy/max", 5, how="max")
    one.add("loss", 0.25, how="sum")
    other.add("loss", 0.5, how="sum")
    one.add("grad_norm", 1.5, how="last")
    other.add("grad_norm", 9.0, how="last")
    other.add("asympo/floor_frac", 0, count=0)
    return [one, other]


def test_means_of_unequal_parts_are_weighted_and_the_main_process_tells_the_state() -> None:
    joined = Accumulator.joined(part.state() for part in parts())
    assert joined.reduce() == {"reward": 0.6, "off_policy/max": 5, "loss": 0.75, "grad_norm": 1.5}
    assert joined.counts() == {"reward": 5}


def test_one_process_is_joined_with_nobody() -> None:
    one, _ = parts()
    assert one.over_processes().state() == one.state()


PROCESS = """
import os, sys; sys.path.insert(0, {tests!r})
import accelerate
from test_metrics import parts
state = accelerate.PartialState(cpu=True)
line = f"{{state.num_processes}} {{parts()[state.process_index].over_processes().reduce()}}\\n"
os.write(1, line.encode())  # at once: both processes have the same pipe
state.destroy_process_group()  # or the threads of gloo now and then abort a process that ends
"""


@pytest.mark.slow
def test_metrics_of_two_processes_are_reduced_once_and_equal_in_both(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text(PROCESS.format(tests=str(ROOT / "tests")))
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        "--standalone",
        str(tmp_path / "one.py"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    expected = "2 {'reward': 0.6, 'off_policy/max': 5, 'loss': 0.75, 'grad_norm': 1.5}"
    assert done.returncode == 0 and [line for line in done.stdout.splitlines() if line] == [expected] * 2, done.stderr


# ------------------------------------------------------------------------------------------- rows


def test_rows_have_counts_beside_means(tmp_path: Path) -> None:
    metrics, (one, _) = MetricsWriter(tmp_path / "metrics.jsonl"), parts()
    metrics.step(1, one.reduce(), one.counts())
    metrics.close()
    (row,) = read_rows(tmp_path / "metrics.jsonl")
    assert row["counts"] == {"reward": 4} and row["metrics"]["reward"] == 0.75


def test_a_reader_goes_on_where_another_stopped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "step", "step": 1}\n17\n{"kind": "step", "st\n')
    first = MetricsReader(path)
    assert [row["step"] for row in first.poll()] == [1]
    assert first.torn == 2, "a torn line, and one that is no object"
    with open(path, "a") as file:
        file.write('{"kind": "step", "step": 2}\n{"kind"')
    second = MetricsReader(path, first.offset)
    assert [row["step"] for row in second.poll()] == [2] and second.poll() == []


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["asympo", "grpo"])
def test_a_real_run_writes_only_rows_and_metrics_of_the_table(
    loss: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from demo import small

    from trtl_rl import Trainer

    kinds: dict[str, set[str]] = {}
    add = Accumulator.add

    def recorded(self: Accumulator, name: str, value: float, *, count: float = 1.0, how: Any = "mean") -> None:
        kinds.setdefault(name, set()).add(how)
        add(self, name, value, count=count, how=how)

    monkeypatch.setattr(Accumulator, "add", recorded)
    keys = {"task": {"held_out": 8}, "evaluation": {"prompts": 4}, "budget": {"tokens": 10**9}}
    Trainer(args=small(tmp_path / "run", loss={"name": loss}, **keys)).train()
    seen = set()
    for row in read_rows(tmp_path / "run" / "metrics.jsonl"):
        kind = row.pop("kind")
        assert isinstance(row.pop("time"), float)
        seen.add(kind)
        assert row.keys() <= ROWS[kind][1].keys(), f"{kind}: add the field to trtl_rl/metric_table.py"
        for name in row.get("metrics", {}):
            assert find(name) is not None, f"add {name} to trtl_rl/metric_table.py"
        for name, count in row.get("counts", {}).items():
            assert count > 1 and name in row["metrics"] and find(name).kind == "mean"  # type: ignore[union-attr]
    assert {"start", "progress", "step", "sample", "evaluation", "end"} <= seen
    for name, how in kinds.items():
        known = find(name)
        assert known is not None and how - {"last"} <= {known.kind}, f"{name} is reduced by {how}"


# ------------------------------------------------------------------------------------------- slow parts


def test_a_part_that_takes_long_names_itself_until_it_ends(tmp_path: Path) -> None:
    from trtl_rl.trainer.slow_parts import SlowParts

    metrics = MetricsWriter(tmp_path / "metrics.jsonl")
    with SlowParts(metrics, after=0.08) as slow:
        for name in ("learn", "refit", "learn"):
            slow.enter(name)
        slow.enter("rollout_wait")
        end = time.monotonic() + 20
        while len(list(read_rows(metrics.path))) < 2 and time.monotonic() < end:
            time.sleep(0.01)
        slow.enter(None)
        told = len(list(read_rows(metrics.path)))
        time.sleep(0.3)
    rows = list(read_rows(metrics.path))
    assert len(rows) == told and {row["name"] for row in rows} == {"rollout_wait"}
    assert rows[0]["seconds"] >= 0.1 or (rows[0]["seconds"] == 0.1 and rows[1]["seconds"] > rows[0]["seconds"])
