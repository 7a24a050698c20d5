"""Trackers: Accelerate's, fed from ``metrics.jsonl`` like every other reader, so that all of them tell the same.

A thread follows the file and hands rows on; the run never waits for a tracker. How far each tracker has come stands in
``trackers.json`` of the run's directory: whatever was written and not handed on, because the process was killed or the
tracker failed, is handed on when the run is resumed. So is the last minute before a kill: wandb writes rows 15 seconds
after it got them, Trackio after half a second, and a row that a tracker has twice is better than one that it never kept.
The step is ours. wandb gets it as a value, ``step``, since its own counter refuses to go back, and would drop the steps that a
resumed run does again; Trackio, which keeps that name for itself, and TensorBoard get it as their step.
"""

from __future__ import annotations

import importlib.util
import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from trtl_rl.errors import UserError
from trtl_rl.metrics import MetricsReader, MetricsWriter, Row

_POLL_SECONDS = 1.0
_CLOSE_SECONDS = 60.0  # a tracker that uploads may take a while at the end
_CHUNK_BYTES = 2**20
_SETTLED_SECONDS = 60.0  # after so long a tracker has written what it was given, also if it is killed
PROJECT = "trtl-rl"

# Modules, one of which must be there, by tracker; the name is also that of the package.
_MODULES: dict[str, tuple[str, ...]] = {
    "tensorboard": ("tensorboard", "tensorboardX"),
    "wandb": ("wandb",),
    "trackio": ("trackio",),
}


class Tracker(Protocol):
    """What is needed of one of Accelerate's trackers."""

    def log(self, values: dict[str, Any], step: int | None = None) -> None:
        """Hand on the values of a step."""

    def finish(self) -> None:
        """Hand on what is left."""


def check_installed(names: Sequence[str]) -> None:
    """Raise UserError for a tracker whose package is missing, with the line that installs it."""
    for name in names:
        if not any(importlib.util.find_spec(module) for module in _MODULES[name]):
            raise UserError(f"trackers={name}, but {name} is not installed: pip install {name}. Or leave trackers out.")


class Tracking:
    """Follows a run's rows for its trackers, as a context manager around the run.

    Args:
        names: Of ``RunConfig.trackers``.
        config: The run's configuration, resolved, for trackers that show one.
        metrics: Where a failure is told; the run goes on.
        make: Makes a tracker by name; replaced in tests.
    """

    def __init__(
        self,
        names: Sequence[str],
        run_dir: Path,
        config: Mapping[str, Any],
        metrics: MetricsWriter,
        make: Callable[[str, Path, Mapping[str, Any]], Tracker] | None = None,
    ) -> None:
        self._make = make or make_tracker
        self._run_dir, self._config, self._metrics = run_dir, config, metrics
        self._positions = _Positions(run_dir / "trackers.json")
        self._readers = {
            name: MetricsReader(metrics.path, self._positions.get(name, metrics.path)) for name in dict.fromkeys(names)
        }
        self._trackers: dict[str, Tracker] = {}
        self._given: dict[str, deque[tuple[float, int]]] = {name: deque() for name in self._readers}
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="trackers", daemon=True)

    def __enter__(self) -> Tracking:
        if self._readers:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        if not self._readers:
            return
        seconds = 2.0 if kind is KeyboardInterrupt else _CLOSE_SECONDS
        self._thread.join(seconds)
        if self._thread.is_alive():
            names = ", ".join(self._readers)
            self._metrics.message(
                "warning", f"Trackers ({names}) did not finish within {seconds:.0f} s and are left behind."
            )

    def _follow(self) -> None:
        started = False
        while True:
            last = self._done.wait(_POLL_SECONDS)
            # Made once the run describes itself: Accelerate's own state must be the learner's, not a tracker's.
            started = started or self._has_started()
            for name in list(self._readers) if started else []:
                self._guard(name, lambda name=name: self._hand_on(name))  # type: ignore[misc]
            if last:
                break
        for name in list(self._trackers):
            self._guard(name, lambda name=name: self._finish(name))  # type: ignore[misc]

    def _has_started(self) -> bool:
        import accelerate.state

        return bool(accelerate.state.PartialState._shared_state)

    def _hand_on(self, name: str) -> None:
        if name not in self._trackers:
            self._trackers[name] = self._make(name, self._run_dir, self._config)
        reader, tracker = self._readers[name], self._trackers[name]
        while rows := reader.poll(_CHUNK_BYTES):
            for row in rows:
                found = values_of(row)
                if found is not None:
                    step, values = found
                    if name == "wandb":
                        tracker.log({**values, "step": step}, None)
                    else:
                        tracker.log(values, step)
            self._given[name].append((time.monotonic(), reader.offset))
        settled = None
        while self._given[name] and self._given[name][0][0] <= time.monotonic() - _SETTLED_SECONDS:
            settled = self._given[name].popleft()[1]
        if settled is not None:
            self._positions.set(name, settled)

    def _finish(self, name: str) -> None:
        self._trackers[name].finish()
        self._positions.set(name, self._readers[name].offset)

    def _guard(self, name: str, action: Callable[[], None]) -> None:
        """A tracker that fails is told once and left out from then on."""
        try:
            action()
        except Exception as error:
            self._readers.pop(name, None)
            self._trackers.pop(name, None)
            self._metrics.message(
                "warning",
                f"The tracker {name} failed and gets nothing more now; the run goes on. {type(error).__name__}: {error}. "
                "If the run is resumed, the tracker gets what it has missed.",
            )


def values_of(row: Row) -> tuple[int, dict[str, float]] | None:
    """Step and values that a tracker gets of a row: of steps and evaluations; else None.

    >>> values_of({"kind": "step", "step": 3, "metrics": {"reward": 0.5, "loss": None}})
    (3, {'reward': 0.5})
    """
    if row.get("kind") not in ("step", "evaluation") or not isinstance(row.get("metrics"), dict):
        return None
    return int(row["step"]), {name: value for name, value in row["metrics"].items() if isinstance(value, int | float)}


def make_tracker(name: str, run_dir: Path, config: Mapping[str, Any]) -> Tracker:
    """One of Accelerate's trackers, begun, named after the run's directory; a resumed run continues it."""
    from accelerate import tracking

    run = run_dir.resolve().name
    tracker: Any
    if name == "tensorboard":
        tracker = tracking.TensorBoardTracker(run, logging_dir=str(run_dir / "tensorboard"))
    elif name == "wandb":
        tracker = tracking.WandBTracker(PROJECT, name=run, id=run_id(run_dir), resume="allow", dir=str(run_dir))
    else:
        tracker = tracking.TrackioTracker(PROJECT, name=run, resume="allow")
    tracker.start()
    if name == "wandb":
        tracker.tracker.define_metric("step")
        tracker.tracker.define_metric("*", step_metric="step")
    if name != "tensorboard":  # its hyperparameters would be a second, empty run
        tracker.store_init_configuration(dict(config))
    made: Tracker = tracker
    return made


def run_id(run_dir: Path) -> str:
    """The run's identity with a tracker, kept in its directory: the same after a resume, and that of no other run."""
    file = run_dir / "trackers.json"
    known = _read(file)
    if not isinstance(known.get("id"), str):
        known["id"] = os.urandom(6).hex()
        _write(file, known)
    return str(known["id"])


class _Positions:
    """How many bytes of the rows each tracker was given."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def get(self, name: str, rows: Path) -> int:
        """0 where the file of rows has become shorter than that: it is another one."""
        known = _read(self._file).get("given", {})
        given = known.get(name, 0) if isinstance(known, dict) else 0
        size = rows.stat().st_size if rows.exists() else 0
        return given if isinstance(given, int) and given <= size else 0

    def set(self, name: str, given: int) -> None:
        known = _read(self._file)
        known["given"] = {**known.get("given", {}), name: given}
        _write(self._file, known)


def _read(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _write(file: Path, values: dict[str, Any]) -> None:
    part = file.with_name(file.name + ".part")
    part.write_text(json.dumps(values))
    os.replace(part, file)
