"""Streams: data that is read as it is drawn, for what fits no memory or has no known length."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

from trtl_rl.errors import UserError
from trtl_rl.tasks.rows import Row, Rows, rename

_HASHED = 256
_KEPT = 8192  # draws that are remembered: those of a batch, and those that a resumed run takes up again


class StreamRows(Rows):
    """Rows behind a ``datasets.IterableDataset``. They have no length, and an index only in passing.

    Args:
        dataset: Read anew for every epoch.
        columns: New column names and the data's own.
    """

    def __init__(self, dataset: Any, source: str, columns: dict[str, str] | None = None) -> None:
        self.dataset, self.source, self._names = dataset, source, columns or {}
        first = next(iter(dataset), None)
        if first is None:
            raise UserError(f"{source} holds no rows.")
        self.columns = list(rename(dict(first), self._names, source))

    def __len__(self) -> int:
        raise TypeError(f"{self.source} is a stream, which has no length")

    def first(self, count: int) -> list[Row]:
        """The first rows, or as many as there are."""
        return [self._row(row) for row in itertools.islice(iter(self.dataset), count)]

    def epoch(self, epoch: int, seed: int, buffer: int, skip: int) -> Iterator[tuple[int, Row]]:
        """(id, row) of one epoch; the id is the row's place in the unshuffled stream, the first ``skip`` left out.

        Args:
            buffer: Rows among which each draw chooses at random; 0 keeps the stream's order.
        """
        stream = self.dataset.map(lambda row, index: {**row, _INDEX: index}, with_indices=True).skip(skip)
        if buffer:
            stream = stream.shuffle(seed=seed, buffer_size=buffer)
            stream.set_epoch(epoch)
        for row in stream:
            index = row.pop(_INDEX)
            yield int(index), self._row(row)

    @property
    def fingerprint(self) -> str:
        """SHA-256 over column names and the first rows."""
        digest = hashlib.sha256(json.dumps(self.columns).encode())
        for row in self.first(_HASHED):
            digest.update(json.dumps(row, sort_keys=True, default=str).encode())
        return digest.hexdigest()

    def _row(self, row: Any) -> Row:
        renamed = rename(dict(row), self._names, self.source)
        return {name: renamed.get(name) for name in self.columns}


class StreamOrder:
    """The draws of a stream, in its order or through a shuffle buffer.

    An index that was drawn before is remembered for a while; beyond that, and after a resume, the stream is read again up to
    there.

    Args:
        fits: Whether a row makes a prompt that can be used; others are passed over.
    """

    def __init__(self, rows: StreamRows, seed: int, buffer: int, skip: int, fits: Callable[[int, Row], bool]) -> None:
        self._rows, self._seed, self._buffer, self._skip, self._fits = rows, seed, buffer, skip, fits
        self._starts = [0]  # index of the first draw of each epoch that was reached
        self._drawn: OrderedDict[int, tuple[int, int, Row]] = OrderedDict()
        self._go_to(0)

    def at(self, index: int) -> tuple[int, int]:
        """The ``index``-th draw of the run, from 0: (row id, epoch)."""
        id, epoch, _ = self._find(index)
        return id, epoch

    def row(self, id: int) -> Row | None:
        """The row of a recent draw."""
        return next((row for found, _, row in reversed(self._drawn.values()) if found == id), None)

    def _find(self, index: int) -> tuple[int, int, Row]:
        if index not in self._drawn and index < self._next:
            self._go_to(max(epoch for epoch, start in enumerate(self._starts) if start <= index))
        while index not in self._drawn:
            self._advance()
        return self._drawn[index]

    def _go_to(self, epoch: int) -> None:
        self._epoch, self._next = epoch, self._starts[epoch]
        self._iterator = self._rows.epoch(epoch, self._seed, self._buffer, self._skip)

    def _advance(self) -> None:
        for id, row in self._iterator:
            if self._fits(id, row):
                self._drawn[self._next] = (id, self._epoch, row)
                self._drawn.move_to_end(self._next)
                self._next += 1
                while len(self._drawn) > _KEPT:
                    self._drawn.popitem(last=False)
                return
        if self._next == self._starts[self._epoch]:
            raise UserError(
                f"{self._rows.source}: no row is left to train on after task.held_out and the length limits."
            )
        if len(self._starts) == self._epoch + 1:
            self._starts.append(self._next)
        self._go_to(self._epoch + 1)


_INDEX = "__trtl_rl_index"
