"""One run that is being followed: its file, what is known of it, its plain lines."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path

from trtl_rl.cli.plain import PlainLines
from trtl_rl.cli.view import View
from trtl_rl.metrics import MetricsReader, Row

_CHUNK_BYTES = 4 * 2**20  # read a long history in parts


class Followed:
    """Reads a run's rows as they come.

    Args:
        run_dir: It may not exist yet.
        prefix: Before each plain line, where several runs are followed.
    """

    def __init__(self, run_dir: Path, prefix: str = "") -> None:
        self.view = View(str(run_dir))
        self._reader = MetricsReader(run_dir / "metrics.jsonl")
        self._plain = PlainLines(self.view)
        self._prefix = prefix
        self._backlog: list[Row] = []

    @property
    def name(self) -> str:
        """The directory's name."""
        return Path(self.view.run_dir).name or self.view.run_dir

    def load(self) -> None:
        """Take what the file holds already."""
        rest: deque[Row] = deque(maxlen=100)
        last_step: Row | None = None
        for row in self.rows():
            kind = row.get("kind")
            if kind == "start":
                rest.clear()
                last_step = None
            if kind == "step":
                last_step = row
            elif kind in ("start", "message", "evaluation"):
                rest.append(row)
        self._backlog = [*rest, *([last_step] if last_step else [])]

    def rows(self) -> Iterator[Row]:
        """New rows, each handed out as soon as the view has taken it."""
        while chunk := self._reader.poll(_CHUNK_BYTES):
            for row in chunk:
                self.view.apply(row)
                yield row
        self.view.torn = self._reader.torn

    def backlog(self) -> list[str]:
        """Plain lines of what came since the last ``start``, of the steps only the last."""
        return [self._prefix + line for row in self._backlog for line in self._plain.feed(row)]

    def lines(self, now: float) -> Iterator[list[str]]:
        """Plain lines of each new row, and of a stall."""
        for row in self.rows():
            yield [self._prefix + line for line in self._plain.feed(row)]
        yield [self._prefix + line for line in self._plain.tick(now)]
