"""What a resume finds again, what it drops, and what it says."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from demo import small
from run_files import Trained, checkpoints, digits, metrics_of, rows_of, same, weights

import trtl_rl.trainer.saver as saver_module
from trtl_rl import Trainer
from trtl_rl.buffer import GroupBuffer
from trtl_rl.config import RunConfig
from trtl_rl.disk import alone_in
from trtl_rl.errors import DiskError, UserError
from trtl_rl.metrics import MetricsReader, MetricsWriter
from trtl_rl.rollout import Group, Prompt
from trtl_rl.trainer import checkpoint
from trtl_rl.trainer.learner import Learner
from trtl_rl.trainer.record import RolloutRecord

STEPS = 7
EVERY = 2


class Killed(BaseException):
    """As a kill: the run's own handlers save nothing for it."""


def group(index: int, version: int = 0) -> Group:
    return Group(index, version, Prompt(index, 0, [1], ""))


# --- parts ---


def test_rows_of_steps_that_are_done_again_are_dropped_and_a_torn_line_is_mended(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    writer, reader = MetricsWriter(path), MetricsReader(path)
    writer.write("start", resumed_from=None, lost_flops=0)
    for step in range(1, 6):
        writer.step(step, {"flops/total": 10 * step})
        writer.write("sample", step=step)
        writer.message("info", f"after {step}")
    writer.write("evaluation", step=3)
    writer.write("evaluation", step=5)
    writer.close()
    assert len(reader.poll()) == 18
    with open(path, "ab") as file:
        file.write(b'{"kind": "step", "st')

    writer = MetricsWriter(path)
    found = writer.rewind(3)
    assert (found.steps, found.lost_flops, found.evaluated) == (2, 90, {3})
    writer.write("start", resumed_from=3, lost_flops=found.lost_flops)
    writer.step(4, {"flops/total": 41})
    assert [row["kind"] for row in reader.poll()] == ["start", "step"] and reader.torn == 0, "a reader keeps its place"

    rows = [(row["kind"], row.get("step")) for row in MetricsReader(path).poll()]
    assert [at for kind, at in rows if kind == "step"] == [1, 2, 3, 4]
    assert [at for kind, at in rows if kind == "sample"] == [1, 2, 3]
    assert [kind for kind, _ in rows].count("message") == 5, "what belongs to no step stays"
    again = writer.rewind(3)
    assert (again.steps, again.lost_flops) == (1, 90 + 41), (
        "what an earlier resume from there has lost is not forgotten"
    )
    assert writer.rewind(2).lost_flops == 30 + 90
    assert writer.rewind(-1).evaluated == set()
    writer.close()


def test_a_full_disk_leaves_no_half_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    writer.write("start")

    class FakeFullDisk:
        def __init__(self, file: Any) -> None:
            self.file, self.fileno, self.room = file, file.fileno, 10

        def write(self, data: bytes) -> int:
            if self.room == 0:
                raise OSError(28, "No space left on device")
            written = self.file.write(data[: self.room])
            self.room -= written
            return int(written)

    monkeypatch.setattr(writer, "_file", FakeFullDisk(writer._file))
    with pytest.raises(DiskError, match=r"metrics\.jsonl cannot be written: No space left on device"):
        writer.write("message", text="long " * 10)
    assert [row["kind"] for row in MetricsReader(writer.path).poll()] == ["start"]
    assert writer.path.read_bytes().count(b"\n") == 1 and writer.path.read_bytes().endswith(b"\n")


def test_ready_groups_that_are_too_stale_for_the_buffers_rule_are_not_taken_back() -> None:
    # version 5, two groups a batch, staleness 2: places 0 and 1 are trained at 5, 2 and 3 at 6, 4 at 7
    ready = [group(0, 2), group(1, 3), group(2, 3), group(3, 4), group(4, 4), group(5, 5), group(6, 5)]
    buffer = GroupBuffer(2, 2, version=5, needed=100)
    stale = buffer.restore(reversed(ready))
    assert [item.index for item in stale] == [0]
    assert buffer.room() == 0, "six groups fill three versions"
    buffer = GroupBuffer(2, 1, version=5, needed=100)
    stale = buffer.restore(ready)
    assert [item.index for item in stale] == [0, 1, 2]
    for version in (5, 6):
        taken = buffer.take(0)
        assert taken is not None and all(item.version + 1 >= version for item in taken)
        buffer.advance(version + 1)
    assert buffer.room() == 4


def test_files_of_steps_that_are_done_again_are_removed(tmp_path: Path) -> None:
    record = RolloutRecord(tmp_path / "rollouts", keep=3)
    for step in range(1, 6):
        record.write(step, [group(step)], [(group(10 + step), "stale")] if step == 5 else [])
    names = [path.name for path in sorted((tmp_path / "rollouts").iterdir())]
    assert names == [f"step-0000000{n}.jsonl" for n in (3, 4, 5)]
    lines = [json.loads(line) for line in (tmp_path / "rollouts" / names[-1]).read_text().splitlines()]
    assert [(line["index"], line["fate"], line.get("reason")) for line in lines] == [
        (5, "trained", None),
        (15, "discarded", "stale"),
    ]
    (tmp_path / "rollouts" / "step-00000006.jsonl.partial").write_text("torn")
    record.rewind(4)
    assert [path.name for path in sorted((tmp_path / "rollouts").iterdir())] == names[:2]
    RolloutRecord(tmp_path / "none", keep=0).write(1, [group(1)], [])
    assert not (tmp_path / "none").exists()


def test_two_processes_do_not_write_one_run(tmp_path: Path) -> None:
    with alone_in(tmp_path), pytest.raises(UserError, match="Another process is running"), alone_in(tmp_path):
        pass
    with alone_in(tmp_path):
        pass


# --- whole runs ---


def config(run_dir: Path, **keys: Any) -> RunConfig:
    return small(
        run_dir,
        **{
            "steps": STEPS,
            "recipe": "none",
            "checkpoint": {"every": EVERY},
            "parity": {"every": 3},
            "task": {"held_out": 3},
            "evaluation": {"prompts": 3, "every": 2},
            **keys,
        },
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A synchronous run that nothing interrupted."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    Trainer(reward_funcs=digits, args=config(run_dir)).train()
    return run_dir


def kill(patch: pytest.MonkeyPatch, owner: Any, name: str, call: int, *, after: bool = False) -> None:
    """The run ends, without being able to do anything about it, in the ``call``-th call (from 1) of a method."""
    original, calls = getattr(owner, name), 0

    def killed(*args: Any, **rest: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call and not after:
            raise Killed
        result = original(*args, **rest)
        if calls == call:
            raise Killed
        return result

    patch.setattr(owner, name, killed)


def stop_in_update(patch: pytest.MonkeyPatch, trainer: Trainer, version: int) -> None:
    """As Ctrl-C during the update of that version."""
    update = Learner.update

    def stopping(learner: Learner, groups: Any, at: int) -> Any:
        if at == version:
            trainer.stop()
        return update(learner, groups, at)

    patch.setattr(Learner, "update", stopping)


def assert_same_run(run_dir: Path, whole: Path) -> None:
    assert metrics_of(run_dir) == metrics_of(whole)
    assert [row["step"] for row in rows_of(run_dir, "step")] == list(range(1, STEPS + 1))
    for kind in ("sample", "evaluation"):
        mine, theirs = rows_of(run_dir, kind), rows_of(whole, kind)
        assert [{**row, "time": 0} for row in mine] == [{**row, "time": 0} for row in theirs], kind
    assert checkpoints(run_dir) == checkpoints(whole)
    assert same(weights(run_dir), weights(whole))
    one, other = (run / "checkpoints" / checkpoints(run)[-1] for run in (run_dir, whole))
    for name in ("optimizer.bin", "scheduler.bin"):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
    for path in (whole / "rollouts").iterdir():
        assert (run_dir / "rollouts" / path.name).read_text() == path.read_text()
    roles = [json.loads((run / "ledger.json").read_text()) for run in (run_dir, whole)]
    assert roles[0]["flops"] == roles[1]["flops"] and roles[0]["wasted"] == roles[1]["wasted"]
    assert roles[0]["apart"]["evaluation"]["flops"] == roles[1]["apart"]["evaluation"]["flops"]


INTERRUPTIONS = {
    "in the middle of the update of step 4": (Learner, "update", 4, False),
    "before anything was saved": (Learner, "update", 2, False),
    "before the checkpoint of step 4 is renamed": (checkpoint, "sync_tree", 2, False),
    "after the checkpoint of step 4, before its evaluation": (saver_module.Saver, "save", 3, True),
    "after the last checkpoint, before the last evaluation": (saver_module.Saver, "save", 7, True),
}


@pytest.mark.slow
@pytest.mark.parametrize("where", INTERRUPTIONS)
def test_a_synchronous_run_that_was_killed_is_the_same_as_one_that_was_not(
    where: str, whole: Path, tmp_path: Path
) -> None:
    owner, name, call, after = INTERRUPTIONS[where]
    with pytest.MonkeyPatch.context() as patch:
        kill(patch, owner, name, call, after=after)
        with pytest.raises(Killed):
            Trainer(reward_funcs=digits, args=config(tmp_path / "run")).train()
    result = Trainer(reward_funcs=digits, args=config(tmp_path / "run"), resume=True).train()
    assert (result.status, result.step, result.nothing_to_do) == ("done", STEPS, False)
    assert_same_run(tmp_path / "run", whole)
    messages = [row["text"] for row in rows_of(tmp_path / "run", "message")]
    if "saved" in where:
        assert "The run had not saved a checkpoint yet: it begins again." in messages
    else:
        assert any("Resumed at version" in text and "0 differ" in text for text in messages)
    lost = json.loads((tmp_path / "run" / "ledger.json").read_text())["apart"].get("interrupted", {"flops": 0})
    assert (lost["flops"] > 0) == any("done again" in text for text in messages)


def test_a_resume_of_a_complete_run_says_so_and_loads_nothing(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*args: Any, **rest: Any) -> None:
        raise AssertionError("nothing is loaded")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trtl_rl.trainer.assembly.make_engines", refused)
        before = metrics_of(whole)
        result = Trainer(reward_funcs=digits, args=config(whole), resume=True).train()
        assert (result.status, result.reason, result.step, result.nothing_to_do) == ("done", "steps", STEPS, True)
        end = rows_of(whole, "end")[-1]
        assert end["status"] == "done" and f"Nothing to do: the run had reached steps at step {STEPS}." in end["text"]
        assert metrics_of(whole) == before
        with pytest.raises(UserError, match=f"steps=3, but the run has done {STEPS} already"):
            Trainer(reward_funcs=digits, args=config(whole, steps=3), resume=True).train()
    assert "steps: 7" in (whole / "config.yaml").read_text(), "what was refused is not kept"


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 2])
def test_a_stop_at_any_step_loses_and_doubles_no_prompt(staleness: int, whole: Path, tmp_path: Path) -> None:
    """Interrupted three times, at the end of an epoch too; an epoch has 7 rows here, and a run 14 groups."""
    from trtl_rl.demo.task import demo_rows

    keys: dict[str, Any] = {
        "buffer": {"max_staleness": staleness},
        "task": {},
        "evaluation": {},
        "rollouts": {"keep": 50},
    }
    run_dir = tmp_path / "run"
    made = 0
    for attempt in range(4):
        with pytest.MonkeyPatch.context() as patch:
            trainer = Trainer("demo", digits, config(run_dir, **keys), demo_rows()[:7], resume=attempt > 0)
            stop_in_update(patch, trainer, version=(1, 3, 4, -1)[attempt])
            trained = Trained(patch)
            result = trainer.train()
            made += len(trained.groups)
    assert (result.status, result.step, made) == ("done", STEPS, STEPS), "an orderly stop does no step twice"
    lines = [
        json.loads(line) for path in sorted((run_dir / "rollouts").iterdir()) for line in path.read_text().splitlines()
    ]
    assert all(line["fate"] == "trained" for line in lines)
    assert sorted(line["index"] for line in lines) == list(range(14))
    assert sorted((line["prompt_id"], line["occurrence"]) for line in lines) == [
        (i, n) for i in range(7) for n in range(2)
    ]
    steps = metrics_of(run_dir)
    assert all(row["off_policy/max"] <= staleness for row in steps), "the version goes on where it was"
    if staleness == 0:
        plain = tmp_path / "plain"
        Trainer("demo", digits, config(plain, **keys), demo_rows()[:7]).train()
        assert metrics_of(plain) == steps and same(weights(plain), weights(run_dir))


@pytest.mark.slow
def test_a_resume_trains_on_ready_groups_unless_they_are_stale_or_made_otherwise(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    keys: dict[str, Any] = {"buffer": {"max_staleness": 3}, "evaluation": {}, "rollouts": {"keep": 50}}
    trainer = Trainer(reward_funcs=digits, args=config(run_dir, **keys))
    with pytest.MonkeyPatch.context() as patch:
        position = saver_module.RolloutWorker.position

        def when_full(worker: Any) -> Any:
            for _ in range(600):
                if worker.buffer.counts()["in_flight"] == 0:
                    break
                __import__("time").sleep(0.05)
            return position(worker)

        patch.setattr(saver_module.RolloutWorker, "position", when_full)
        kill(patch, saver_module.Saver, "try_to_save", 1, after=True)
        with contextlib.suppress(Killed):
            trainer.train()
    saved = checkpoint.read_state(run_dir / "checkpoints" / "latest")
    ready = {entry["index"]: entry for entry in saved["rollouts"]["ready"]}
    assert len(ready) >= 6 and not saved["rollouts"]["again"]
    import shutil

    shutil.copytree(run_dir, tmp_path / "lower", symlinks=True)
    shutil.copytree(run_dir, tmp_path / "hotter", symlinks=True)

    def lines(run: Path) -> dict[int, dict[str, Any]]:
        found = [json.loads(line) for path in (run / "rollouts").iterdir() for line in path.read_text().splitlines()]
        assert len({line["index"] for line in found}) == len(found)
        return {line["index"]: line for line in found}

    Trainer(reward_funcs=digits, args=config(run_dir, **keys), resume=True).train()
    trained = lines(run_dir)
    for index, entry in ready.items():
        assert trained[index]["completions"] == entry["texts"] and trained[index]["version"] == entry["version"]
    assert json.loads((run_dir / "ledger.json").read_text())["wasted"]["stale"] == 0

    Trainer(
        reward_funcs=digits, args=config(tmp_path / "lower", **{**keys, "buffer": {"max_staleness": 0}}), resume=True
    ).train()
    fates = lines(tmp_path / "lower")
    stale = {index for index, line in fates.items() if line.get("reason") == "stale"}
    assert stale and stale <= set(ready) and all(entry["version"] < 2 for i, entry in ready.items() if i in stale)
    assert json.loads((tmp_path / "lower" / "ledger.json").read_text())["wasted"]["stale"] > 0

    hotter = config(tmp_path / "hotter", **keys, sampling={"max_new_tokens": 20, "temperature": 1.5})
    Trainer(reward_funcs=digits, args=hotter, resume=True).train()
    again = lines(tmp_path / "hotter")
    assert set(ready) <= set(again) and all(again[index]["version"] >= 2 for index in ready)
    assert any("generated again: sampling changed" in row["text"] for row in rows_of(tmp_path / "hotter", "message"))


@pytest.mark.slow
def test_a_torn_newest_checkpoint_is_named_and_the_one_before_it_used(whole: Path, tmp_path: Path) -> None:
    import os
    import shutil

    run_dir = tmp_path / "run"
    shutil.copytree(whole, run_dir, symlinks=True)
    newest = run_dir / "checkpoints" / checkpoints(run_dir)[-1]
    os.truncate(newest / "optimizer.bin", 100)
    result = Trainer(reward_funcs=digits, args=config(run_dir), resume=True).train()
    assert (result.status, result.step) == ("done", STEPS)
    (text,) = [row["text"] for row in rows_of(run_dir, "message") if "passed over" in row["text"]]
    assert str(newest) in text and "optimizer.bin has 100 bytes" in text
    assert rows_of(run_dir, "start")[-1]["resumed_from"] == STEPS - 1
    assert_same_run(run_dir, whole)
