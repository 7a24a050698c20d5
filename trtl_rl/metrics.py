"""``metrics.jsonl``: every part of a run writes rows here, and dashboard, ``watch``, reports and trackers read nothing else.

Each row is one JSON object with ``kind`` and ``time`` (Unix seconds). The kinds of rows with their fields, and every metric
with unit and meaning, stand in :mod:`trtl_rl.metric_table`, for people in ``docs/metrics.md``.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trtl_rl.errors import DiskError
from trtl_rl.metric_table import Kind as Reduction

Level = Literal["info", "warning", "error"]
Tell = Callable[[Level, str], None]  # how parts of a run speak to people
Row = dict[str, Any]
State = list[tuple[str, float, float, Reduction]]


class Accumulator:
    """Metrics of one step as (sum, count), reduced once at its end.

    >>> metrics = Accumulator()
    >>> metrics.add("reward", 3.0, count=4)
    >>> metrics.add("reward", 1.0, count=4)
    >>> metrics.reduce()
    {'reward': 0.5}
    """

    def __init__(self) -> None:
        self._values: dict[str, tuple[float, float, Reduction]] = {}

    def add(self, name: str, value: float, *, count: float = 1.0, how: Reduction = "mean") -> None:
        """Add ``value``, a sum over ``count`` items, to the metric ``name``."""
        total, seen, known = self._values.get(name, (0.0, 0.0, how))
        assert known == how, f"{name} is reduced both by {known} and by {how}"
        if how == "max" and seen > 0:  # noqa: SIM108 - three cases read better than nested ternaries
            total = max(total, value)
        else:
            total = total + value if how in ("mean", "sum") else value
        self._values[name] = (total, seen + count, how)

    def update(self, values: Mapping[str, float]) -> None:
        """Set single values that need no reduction."""
        for name, value in values.items():
            self.add(name, float(value), how="last")

    def merge(self, other: Accumulator) -> None:
        """Add another's sums and counts: those of a micro-batch to its step's."""
        for name, (total, count, how) in other._values.items():
            self.add(name, total, count=count, how=how)

    def over_processes(self) -> Accumulator:
        """The same over all processes of the run, equal in each of them; of ``last`` values the main process's count."""
        from accelerate.utils import gather_object

        return self.joined(gather_object([self.state()]))

    def state(self) -> State:
        """Everything, unreduced, as plain values: name, total, count, how."""
        return [(name, *value) for name, value in self._values.items()]

    @classmethod
    def joined(cls, states: Iterable[State]) -> Accumulator:
        """One of several, the main process's first.

        >>> one, other = Accumulator(), Accumulator()
        >>> one.add("reward", 3.0, count=3), other.add("reward", 0.0, count=1)
        (None, None)
        >>> Accumulator.joined([one.state(), other.state()]).reduce()
        {'reward': 0.75}
        """
        out = cls()
        for state in states:
            for name, total, count, how in state:
                if how != "last" or name not in out._values:
                    out.add(name, total, count=count, how=how)
        return out

    def counts(self) -> dict[str, int]:
        """How many items stand behind each mean of more than one."""
        return {name: int(count) for name, (_, count, how) in self._values.items() if how == "mean" and count > 1}

    def reduce(self) -> dict[str, float]:
        """One number per metric. A mean over no items is left out."""
        out: dict[str, float] = {}
        for name, (total, count, how) in self._values.items():
            if how == "mean" and count == 0:
                continue
            out[name] = total / count if how == "mean" else total
        return out


@dataclass(frozen=True)
class Rewound:
    """What a resume found in the rows before it.

    Attributes:
        steps: Steps whose rows were dropped.
        lost_flops: FLOPs of all roles in steps that are done again, also those of earlier resumes from there.
        evaluated: Steps that have an evaluation.
    """

    steps: int = 0
    lost_flops: int = 0
    evaluated: frozenset[int] = frozenset()


class MetricsWriter:
    """Appends rows to ``metrics.jsonl``; a row is one ``write``, so that readers and a kill never see half of two rows.

    Args:
        path: The file; it is created, and continued when it exists.

    Raises:
        DiskError: by every method that writes, when a row cannot be written; half a row does not stay in the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        torn = _ends_within_a_row(path)
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - closed by close()
        self._lock = threading.RLock()  # re-entrant: a signal handler may write while its thread is writing
        if torn:  # a kill in the middle of a row: close that line, readers pass over it
            self._file.write(b"\n")

    def write(self, kind: str, **fields: Any) -> None:
        """Append one row. Non-finite numbers become ``null``: JSON has no word for them."""
        row = {"kind": kind, "time": round(time.time(), 3), **fields}
        data = json.dumps(_finite(row), ensure_ascii=False).encode() + b"\n"
        with self._lock, self._explained():
            self._append(data)

    def step(self, step: int, metrics: Mapping[str, float], counts: Mapping[str, int] | None = None) -> None:
        self.write("step", step=step, metrics={k: _short(v) for k, v in metrics.items()}, counts=dict(counts or {}))

    def progress(self, name: str, done: float, total: float, unit: str = "") -> None:
        self.write("progress", name=name, done=done, total=total, unit=unit)

    def part(self, name: str, seconds: float) -> None:
        self.write("part", name=name, seconds=round(seconds, 1))

    def message(self, level: Level, text: str) -> None:
        self.write("message", level=level, text=text)

    def rewind(self, step: int) -> Rewound:
        """Blank the rows of all steps after ``step``, which are done again, and what a kill has torn.

        Rows that belong to no step (``start``, ``message`` …) stay: they tell what has happened. Lines are overwritten by
        spaces where they lie, so that whoever is reading the file keeps his place.
        """
        dropped: set[int] = set()
        evaluated: set[int] = set()
        lost = 0
        with self._lock, self._explained(), open(self.path, "r+b") as file:
            for line in iter(file.readline, b""):
                row = _row(line)
                kind, at = (row.get("kind"), int(row.get("step", -1))) if row is not None else (None, step + 1)
                if at > step:
                    end = file.tell()
                    file.seek(end - len(line))
                    file.write(b" " * (len(line) - 1) + b"\n")
                    file.seek(end)
                if row is None:
                    continue
                if kind == "start" and (row.get("resumed_from") or 0) >= step:
                    lost += row.get("lost_flops") or 0
                if kind == "step" and at > step:
                    dropped.add(at)
                    lost += int(row["metrics"].get("flops/total", 0))
                if kind == "evaluation" and at <= step:
                    evaluated.add(at)
        return Rewound(len(dropped), lost, frozenset(evaluated))

    def sync(self) -> None:
        """Bring all rows to the disk, so that a checkpoint that is there has its rows."""
        with self._explained():
            os.fsync(self._file.fileno())

    def close(self) -> None:
        try:
            self.sync()
        finally:
            self._file.close()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise DiskError(f"{self.path} cannot be written: {error.strerror}.") from error

    def _append(self, data: bytes) -> None:
        """Write all of ``data``, or nothing."""
        size = os.fstat(self._file.fileno()).st_size
        try:
            written = self._file.write(data) or 0
            while written < len(data):  # the disk had room for a part
                written += self._file.write(data[written:]) or 0
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file.fileno(), size)
            raise


class MetricsReader:
    """Reads rows as they appear. ``poll`` returns those that are new since the last call.

    A line that is not whole yet is left for the next call; a torn line, and one that is no object, is counted in ``torn``.

    Args:
        path: The file; it may not exist yet.
        offset: Where to begin, in bytes: the ``offset`` of a reader before this one.
    """

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path = path
        self.torn = 0
        self.offset = offset

    def poll(self, max_bytes: int = -1) -> list[Row]:
        """New rows; with ``max_bytes``, only those in about so many bytes, to read a long file in parts."""
        if not self.path.exists():
            return []
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            data = file.read(max_bytes)
            if b"\n" not in data:
                data += file.read()  # a row longer than max_bytes
        end = data.rfind(b"\n") + 1
        self.offset += end
        rows: list[Row] = []
        for line in data[:end].splitlines():
            if not line.strip():  # a step that was done again after a resume
                continue
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            if isinstance(row, dict):
                rows.append(row)
            else:
                self.torn += 1
        return rows


def read_rows(path: Path) -> Iterator[Row]:
    """All whole rows of a finished or running file."""
    yield from MetricsReader(path).poll()


def evaluated_steps(path: Path) -> frozenset[int]:
    """Steps that have an evaluation."""
    return frozenset(row["step"] for row in read_rows(path) if row.get("kind") == "evaluation")


def _short(value: float) -> float:
    """Keep seven significant digits of what is no whole number: enough for a float32, half the file."""
    if isinstance(value, int) or not math.isfinite(value) or value.is_integer():
        return value  # counts of tokens and FLOPs must still add up
    return float(f"{value:.7g}")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def _row(line: bytes) -> Row | None:
    """The row of a line, or None for one that is torn or blank."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step", -1), int) else None


def _ends_within_a_row(path: Path) -> bool:
    if not path.exists() or path.stat().st_size == 0:
        return False
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"
