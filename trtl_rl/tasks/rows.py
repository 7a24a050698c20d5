"""The rows of ``data``: dictionaries of columns, opened and checked before any tokenizer or model is loaded."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, overload

from trtl_rl.config import RunConfig
from trtl_rl.errors import UserError, nearest
from trtl_rl.tasks.presets import apply_preset

Row = dict[str, Any]
_HASHED_ROWS = 100_000


class Rows(Sequence[Row]):
    """A list of rows that all have the same columns; a column that a row lacks reads ``None``.

    Args:
        rows: Mappings of column name to value: a list, or a ``datasets.Dataset``.
        source: What messages call the data.
        columns: New column names and the data's own.

    Raises:
        UserError: the data lacks a column that ``columns`` names.
    """

    def __init__(
        self, rows: Iterable[Mapping[str, Any]], source: str, columns: Mapping[str, str] | None = None
    ) -> None:
        self.source, self._names = source, dict(columns or {})
        names = getattr(rows, "column_names", None)  # a data set, which reads its rows when asked
        self._rows: Any = list(rows) if names is None else rows
        own = list(names or dict.fromkeys(name for row in self._rows for name in row))
        self.columns: list[str] = list(rename(dict.fromkeys(own), self._names, source) if own else own)

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        row = rename(dict(self._rows[index]), self._names)
        return {name: row.get(name) for name in self.columns}

    def __iter__(self) -> Iterator[Row]:
        return (self[i] for i in range(len(self)))

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over column names, number of rows and the rows themselves (beyond 100 000: as many, evenly spaced).

        It depends on what the rows hold, not on the format or place they came from.
        """
        digest = hashlib.sha256(json.dumps([len(self), self.columns]).encode())
        count = min(len(self), _HASHED_ROWS)
        for i in range(count):
            row = self[i * len(self) // count]
            digest.update(json.dumps(row, sort_keys=True, default=str).encode())
        return digest.hexdigest()


def rename(row: Row, columns: Mapping[str, str], source: str | None = None) -> Row:
    """``row`` with the columns of new names beside its own; with ``source``, an unknown name is an error."""
    added = {}
    for new, old in columns.items():
        if source is not None and old not in row:
            raise UserError(
                f"{source} has no column '{old}' (task.columns).{nearest(old, row)} It has: {', '.join(row) or 'none'}."
            )
        added[new] = row.get(old)
    return {**row, **added}


def given_rows(rows: Any, config: RunConfig) -> Rows:
    """Rows from Python: mappings in any iterable, a ``datasets.Dataset``, or an ``IterableDataset``, which is streamed.

    Raises:
        UserError: as ``check_rows``.
    """
    config = apply_preset(config)
    kind = type(rows)
    if kind.__name__ == "IterableDataset" and kind.__module__.startswith("datasets"):
        from trtl_rl.tasks.stream import StreamRows

        opened: Rows = StreamRows(rows, "train_dataset", config.task.columns)
    else:
        opened = Rows(rows, "train_dataset", config.task.columns)
    check_rows(opened, config)
    return opened


def open_rows(config: RunConfig) -> Rows:
    """Open ``config.data`` or ``task.mixture`` and check it against the keys of ``config.task``; loads neither tokenizer nor model.

    ``data`` is ``demo``, a JSON Lines, JSON, Parquet or CSV file (CSV values stay text), a directory with
    ``<split>.jsonl`` and the like or with a saved ``datasets`` data set, ``reasoning-gym/NAME``, or a hub name, optionally
    ``name:subset``.

    Raises:
        UserError: there is no such data, it cannot be parsed (with file and line), it is empty, it lacks the prompt
            column, or ``task.held_out`` and ``evaluation.prompts`` do not fit it.
    """
    config = apply_preset(config)
    task = config.task
    if task.mixture:
        from trtl_rl.tasks.mixture import open_mixture

        rows: Rows = open_mixture(config)
    elif task.streaming:
        from trtl_rl.tasks.sources import open_stream

        rows = open_stream(config)
    else:
        rows = open_source(config.data, task.split, task.arguments, task.columns, config.seed)
    check_rows(rows, config)
    return rows


def open_evaluation_rows(config: RunConfig) -> Rows:
    """The rows of ``evaluation.data`` and ``evaluation.split``, read as the run's are.

    Raises:
        UserError: as ``open_rows``, or there are fewer than ``evaluation.prompts``.
    """
    config, evaluation = apply_preset(config), config.evaluation
    if evaluation.data is None and config.task.mixture:
        raise UserError("evaluation.split does not say of which part of task.mixture: name evaluation.data too.")
    if evaluation.data is None and Path(config.data).expanduser().is_file():
        raise UserError(f"evaluation.split: {config.data} is one file, which has no splits. Name evaluation.data.")
    data = config.data if evaluation.data is None else evaluation.data
    split = config.task.split if evaluation.split is None else evaluation.split
    rows = open_source(data, split, config.task.arguments, config.task.columns, config.seed)
    check_rows(rows, evaluation_config(config))
    if len(rows) < evaluation.prompts:
        raise UserError(f"evaluation.prompts={evaluation.prompts}, but {rows.source} has {len(rows)} rows. Lower it.")
    return rows


def evaluation_config(config: RunConfig) -> RunConfig:
    """``config`` as a task of rows that are only evaluated on reads it."""
    only = {"held_out": 0, "mixture": [], "curriculum": None, "streaming": False}
    return config.model_copy(update={"task": apply_preset(config).task.model_copy(update=only)})


def check_rows(rows: Rows, config: RunConfig) -> None:
    """Check that a task can be made from ``rows``; ``config`` has its preset applied.

    Raises:
        UserError: as ``open_rows``.
    """
    column, held_out = config.task.prompt_column, config.task.held_out
    from trtl_rl.tasks.stream import StreamRows

    length = None if isinstance(rows, StreamRows) else len(rows)
    if length == 0:
        raise UserError(f"{rows.source} holds no rows.")
    if column not in rows.columns:
        raise UserError(
            f"{rows.source} has no column '{column}' for the prompts.{nearest(column, rows.columns)} "
            f"It has: {', '.join(rows.columns) or 'none'}. Name the right one with task.prompt_column, for example "
            f"task.prompt_column={rows.columns[0] if rows.columns else 'COLUMN'}."
        )
    if length is not None and held_out >= length:
        raise UserError(f"task.held_out={held_out} leaves nothing to train on: {rows.source} has {length} rows.")
    if config.evaluation.prompts > held_out and not config.evaluation.own_data:
        raise UserError(
            f"evaluation.prompts={config.evaluation.prompts} needs as many rows kept from training, but "
            f"task.held_out={held_out}. Set task.held_out to at least {config.evaluation.prompts}, or name other data with "
            "evaluation.data or evaluation.split."
        )


def open_source(data: str, split: str, arguments: Mapping[str, Any], columns: Mapping[str, str], seed: int) -> Rows:
    """Open one data set. Raises UserError as ``open_rows``."""
    from trtl_rl.tasks import sources

    rows, source = sources.read(data, split, arguments, seed)
    return Rows(rows, source, columns)
