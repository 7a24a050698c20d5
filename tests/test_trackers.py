"""Trackers get the rows of metrics.jsonl, all of them, and never harm a run."""

from __future__ import annotations

import importlib.util
import json
import sqlite3
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import accelerate
import pytest

from trtl_rl.config import load_config
from trtl_rl.errors import UserError
from trtl_rl.metrics import MetricsWriter, read_rows
from trtl_rl.trainer import tracking
from trtl_rl.trainer.tracking import Tracking, check_installed, make_tracker, run_id


class FakeTracker:
    """Keeps what it is given; fails from the call ``fails_at`` on."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.given: list[dict[str, Any]] = []
        self.steps: list[int | None] = []
        self.finished = False
        self.fails_at = fails_at

    def log(self, values: dict[str, Any], step: int | None = None) -> None:
        if self.fails_at is not None and len(self.given) >= self.fails_at:
            raise ConnectionError("no route to host")
        self.given.append(values)
        self.steps.append(step)

    def finish(self) -> None:
        self.finished = True


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "_POLL_SECONDS", 0.01)
    accelerate.PartialState(cpu=True)  # as the learner makes it


def follow(
    run_dir: Path, *trackers: FakeTracker, names: tuple[str, ...] = ("wandb",)
) -> tuple[MetricsWriter, Tracking]:
    metrics = MetricsWriter(run_dir / "metrics.jsonl")
    made = dict(zip(names, trackers, strict=True))

    def make(name: str, directory: Path, config: Mapping[str, Any]) -> FakeTracker:
        return made[name]

    return metrics, Tracking(names, run_dir, {"steps": 3}, metrics, make)


def until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not done():
        assert time.monotonic() < end
        time.sleep(0.005)


def messages(run_dir: Path) -> list[str]:
    return [row["text"] for row in read_rows(run_dir / "metrics.jsonl") if row["kind"] == "message"]


def test_a_tracker_gets_every_step_and_evaluation_with_our_step(tmp_path: Path) -> None:
    tracker = FakeTracker()
    metrics, following = follow(tmp_path, tracker)
    with following:
        metrics.write("evaluation", step=0, metrics={"eval/exact_match": 0.25})
        for step in range(1, 51):
            metrics.step(step, {"reward": step / 100, "loss": float("nan")})
        metrics.message("info", "no number")
    assert tracker.given[0] == {"eval/exact_match": 0.25, "step": 0}
    assert tracker.given[1:] == [{"reward": step / 100, "step": step} for step in range(1, 51)]
    assert set(tracker.steps) == {None}, "a counter of the tracker's own would drop steps that come again"
    assert tracker.finished


def test_a_resumed_run_hands_on_what_the_killed_one_could_not(tmp_path: Path) -> None:
    first, second = FakeTracker(), FakeTracker()
    metrics, following = follow(tmp_path, first)
    with following:
        metrics.step(1, {"reward": 0.1})
    metrics.step(2, {"reward": 0.2})  # after the tracker's end: as if the process was killed before it got this
    metrics._file.write(b'{"kind": "step", "st')
    metrics.close()
    metrics, following = follow(tmp_path, second)
    with following:
        metrics.step(2, {"reward": 0.3})  # the resumed run does it again
        metrics.step(3, {"reward": 0.4})
    assert [row["step"] for row in first.given] == [1]
    assert [(row["step"], row["reward"]) for row in second.given] == [(2, 0.2), (2, 0.3), (3, 0.4)]


def test_rows_that_a_tracker_had_not_written_at_a_kill_are_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """wandb writes a row 15 seconds after it got it, or never if its process dies before."""
    first, second = FakeTracker(), FakeTracker()
    monkeypatch.setattr(first, "finish", lambda: 1 / 0)  # the process is killed: nothing is finished
    metrics, following = follow(tmp_path, first)
    with following:
        metrics.step(1, {"reward": 0.1})
        until(lambda: len(first.given) == 1)
        monkeypatch.setattr(tracking, "_SETTLED_SECONDS", 0.0)
        until(lambda: (tmp_path / "trackers.json").exists())
        monkeypatch.setattr(tracking, "_SETTLED_SECONDS", 60.0)
        metrics.step(2, {"reward": 0.2})
        until(lambda: len(first.given) == 2)
    metrics.close()
    metrics, following = follow(tmp_path, second)
    with following:
        metrics.step(3, {"reward": 0.3})
    assert [row["step"] for row in first.given] == [1, 2]
    assert [row["step"] for row in second.given] == [2, 3]


def test_trackio_gets_a_value_by_a_name_that_it_keeps_for_itself(tmp_path: Path) -> None:
    tracker = FakeTracker()
    metrics, following = follow(tmp_path, tracker, names=("trackio",))
    with following:
        metrics.step(7, {"reward": 0.5})
    assert tracker.given == [{"reward": 0.5}] and tracker.steps == [7]


def test_a_tracker_that_fails_is_told_once_and_the_other_goes_on(tmp_path: Path) -> None:
    bad, good = FakeTracker(fails_at=2), FakeTracker()
    metrics, following = follow(tmp_path, bad, good, names=("wandb", "trackio"))
    with following:
        for step in range(1, 6):
            metrics.step(step, {"reward": 0.0})
            time.sleep(0.02)
    assert good.steps == [1, 2, 3, 4, 5]
    (text,) = messages(tmp_path)
    assert "wandb failed" in text and "ConnectionError: no route to host" in text and "the run goes on" in text
    again = FakeTracker()
    metrics.close()
    metrics, following = follow(tmp_path, again)
    with following:
        pass
    assert {3, 4, 5} <= {row["step"] for row in again.given}, "after a resume it gets what it has missed"


def test_a_tracker_that_cannot_be_made_does_not_end_the_run(tmp_path: Path) -> None:
    metrics = MetricsWriter(tmp_path / "metrics.jsonl")

    def make(name: str, directory: Path, config: Mapping[str, Any]) -> FakeTracker:
        raise RuntimeError("not logged in")

    with Tracking(["wandb"], tmp_path, {}, metrics, make):
        metrics.step(1, {"reward": 0.0})
    assert "not logged in" in messages(tmp_path)[0]


def test_a_tracker_that_hangs_at_the_end_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class FakeHang(FakeTracker):
        def finish(self) -> None:
            time.sleep(5)

    monkeypatch.setattr(tracking, "_CLOSE_SECONDS", 0.3)
    metrics, following = follow(tmp_path, FakeHang())
    start = time.monotonic()
    with following:
        metrics.step(1, {"reward": 0.0})
    assert time.monotonic() - start < 4
    assert "left behind" in messages(tmp_path)[0]


def test_a_tracker_that_is_not_installed_is_refused_with_its_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install wandb"):
        check_installed(["wandb"])


def test_trackers_are_named_in_the_configuration_and_others_are_refused() -> None:
    assert load_config(None, ["trackers=tensorboard"]).trackers == ["tensorboard"]
    assert load_config(None, ["trackers=[wandb, trackio]"]).trackers == ["wandb", "trackio"]
    with pytest.raises(UserError, match=r"trackers\.0.*mlflow"):
        load_config(None, ["trackers=mlflow"])


def test_a_resumed_run_is_the_same_run_to_a_tracker(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    first = run_id(tmp_path)
    assert run_id(tmp_path) == first != run_id(tmp_path / "other")
    metrics, following = follow(tmp_path, FakeTracker())
    with following:
        metrics.step(1, {"reward": 0.0})
    assert run_id(tmp_path) == first and json.loads((tmp_path / "trackers.json").read_text())["given"]["wandb"] > 0


# ------------------------------------------------------------------------------------------- real trackers


def events(directory: Path) -> Iterator[tuple[int, str, float]]:
    """Step, name and value of every scalar in TensorBoard's files: records of length, checksum, event, checksum."""
    from tensorboard.compat.proto.event_pb2 import Event

    for file in sorted(directory.rglob("events.out.tfevents.*")):
        data = file.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            event = Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]
            for value in event.summary.value:
                number = value.simple_value or (value.tensor.float_val[0] if value.tensor.float_val else 0.0)
                yield event.step, value.tag, number


def test_tensorboard_holds_every_step_of_a_resumed_run(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    for steps in ((1, 2, 3), (2, 3, 4)):
        metrics = MetricsWriter(tmp_path / "metrics.jsonl")
        with Tracking(["tensorboard"], tmp_path, {"steps": 4}, metrics):
            for step in steps:
                metrics.step(step, {"reward": step / 4, "flops/total": 1e9})
        metrics.close()
    found = list(events(tmp_path / "tensorboard"))
    rewards = [(step, value) for step, name, value in found if name == "reward"]
    assert rewards == [(1, 0.25), (2, 0.5), (3, 0.75), (2, 0.5), (3, 0.75), (4, 1.0)]
    assert {name for _, name, _ in found} == {"reward", "flops/total"}
    assert not messages(tmp_path)


def wandb_records(data: bytes) -> Iterator[bytes]:
    """Records of a .wandb file: LevelDB's log format (blocks of 32 KiB; checksum, length, type, part) after 7 bytes."""
    at, record = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def test_wandb_offline_holds_every_step_of_a_resumed_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    for steps in ((1, 2, 3), (2, 3, 4)):
        metrics = MetricsWriter(tmp_path / "metrics.jsonl")
        with Tracking(["wandb"], tmp_path, {"steps": 4}, metrics):
            for step in steps:
                metrics.step(step, {"reward": step / 4})
        metrics.close()
    assert not messages(tmp_path)
    from wandb.proto import wandb_internal_pb2

    rows, ids = [], set()
    for file in sorted(tmp_path.rglob("*.wandb"), key=lambda path: path.stat().st_mtime):
        for data in wandb_records(file.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.run.run_id:
                ids.add(record.run.run_id)
            if record.history.item:
                item = {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in record.history.item}
                rows.append((item["step"], item["reward"]))
    assert rows == [(1, 0.25), (2, 0.5), (3, 0.75), (2, 0.5), (3, 0.75), (4, 1.0)]
    assert ids == {run_id(tmp_path)}


def test_trackio_holds_every_step_of_a_resumed_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    trackio = pytest.importorskip("trackio")
    for steps in ((1, 2, 3), (2, 3, 4)):
        metrics = MetricsWriter(tmp_path / "metrics.jsonl")
        with Tracking(["trackio"], tmp_path, {"steps": 4}, metrics):
            for step in steps:
                metrics.step(step, {"reward": step / 4})
        metrics.close()
    assert not messages(tmp_path)
    (run,) = trackio.Api().runs(tracking.PROJECT)
    assert run.name == tmp_path.resolve().name
    (file,) = (tmp_path / "trackio").glob("*.db")
    with sqlite3.connect(file) as database:
        rows = database.execute("select step, metrics from metrics order by id").fetchall()
    found = [(step, json.loads(values)["reward"]) for step, values in rows]
    assert found == [(1, 0.25), (2, 0.5), (3, 0.75), (2, 0.5), (3, 0.75), (4, 1.0)]


def test_trackers_are_made_by_accelerate(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    made = make_tracker("tensorboard", tmp_path, {})
    made.finish()
    assert isinstance(made, accelerate.tracking.TensorBoardTracker)
