"""The rows of ``data``: dictionaries of columns, opened and checked before any tokenizer or model is loaded."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, overload

from trtl_rl.config import RunConfig
from trtl_rl.errors import UserError, nearest
from trtl_rl.tasks.presets import apply_preset

Row = dict[str, Any]
SUFFIXES = (".jsonl", ".json", ".parquet", ".csv")
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?")
_HASHED_ROWS = 100_000


class Rows(Sequence[Row]):
    """A list of rows that all have the same columns; a column that a row lacks reads ``None``.

    Args:
        rows: Mappings of column name to value: a list, or a ``datasets.Dataset``.
        source: What messages call the data.
    """

    def __init__(self, rows: Iterable[Mapping[str, Any]], source: str) -> None:
        self.source = source
        names = getattr(rows, "column_names", None)  # a data set, which reads its rows when asked
        self._rows: Any = list(rows) if names is None else rows
        self.columns: list[str] = list(names or dict.fromkeys(name for row in self._rows for name in row))

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        row = self._rows[index]
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


def open_rows(config: RunConfig) -> Rows:
    """Open ``config.data`` and check it against the keys of ``config.task``; loads neither tokenizer nor model.

    ``data`` is ``demo``, a JSON Lines, JSON, Parquet or CSV file (CSV values stay text), a directory with
    ``<split>.jsonl`` and the like or with a saved ``datasets`` data set, or a hub name, optionally ``name:subset``.

    Raises:
        UserError: there is no such data, it cannot be parsed (with file and line), it is empty, it lacks the prompt
            column, or ``task.held_out`` and ``evaluation.prompts`` do not fit it.
    """
    config = apply_preset(config)
    rows = _open(config.data, config.task.split)
    check_rows(rows, config)
    return rows


def check_rows(rows: Rows, config: RunConfig) -> None:
    """Check that a task can be made from ``rows``; ``config`` has its preset applied.

    Raises:
        UserError: as ``open_rows``.
    """
    column, held_out = config.task.prompt_column, config.task.held_out
    if len(rows) == 0:
        raise UserError(f"{rows.source} holds no rows.")
    if column not in rows.columns:
        raise UserError(
            f"{rows.source} has no column '{column}' for the prompts.{nearest(column, rows.columns)} "
            f"It has: {', '.join(rows.columns) or 'none'}. Name the right one with task.prompt_column."
        )
    if held_out >= len(rows):
        raise UserError(f"task.held_out={held_out} leaves nothing to train on: {rows.source} has {len(rows)} rows.")
    if config.evaluation.prompts > held_out:
        raise UserError(
            f"evaluation.prompts={config.evaluation.prompts} needs as many rows kept from training, but "
            f"task.held_out={held_out}. Set task.held_out to at least {config.evaluation.prompts}."
        )


def _open(data: str, split: str) -> Rows:
    if data == "demo":
        from trtl_rl.demo.task import demo_rows

        return Rows(demo_rows(), "the demo's data")
    path = Path(data).expanduser()
    if path.is_dir():
        return _open_directory(path, split)
    if path.is_file():
        return _open_file(path)
    return _open_hub(data, path, split)


def _open_file(path: Path) -> Rows:
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise UserError(f"{path}: data files end in {', '.join(SUFFIXES)}; this one in '{path.suffix}'.")
    if suffix == ".parquet":
        import pyarrow.parquet

        try:
            return Rows(pyarrow.parquet.read_table(path).to_pylist(), str(path))
        except Exception as error:  # pyarrow raises OSError, ArrowInvalid and others for a broken file
            raise UserError(f"{path} cannot be read as Parquet: {error}") from None
    content = path.read_bytes().removeprefix(b"\xef\xbb\xbf")  # the byte-order mark that some editors write
    if suffix == ".csv":
        return Rows(_parse_csv(content, path), str(path))
    if suffix == ".json" and content.lstrip().startswith(b"["):
        return Rows(_parse_json(content, path), str(path))
    return Rows(_parse_json_lines(content, path), str(path))


def _parse_json_lines(content: bytes, path: Path) -> Iterator[Row]:
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = json.loads(line.decode())
        except UnicodeDecodeError as error:
            raise UserError(f"{where}: not UTF-8 text (byte {error.start + 1}: {error.reason}).") from None
        except json.JSONDecodeError as error:
            raise UserError(
                f"{where}: not valid JSON: {error.msg} at column {error.colno}. Each line is one JSON object."
            ) from None
        yield _object(row, where)


def _parse_json(content: bytes, path: Path) -> list[Row]:
    try:
        items = json.loads(content.decode())
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}, line {line}: not UTF-8 text ({error.reason}).") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{path}, line {error.lineno}: not valid JSON: {error.msg} at column {error.colno}.") from None
    return [_object(item, f"{path}, item {number}") for number, item in enumerate(items, start=1)]


def _object(value: Any, where: str) -> Row:
    if not isinstance(value, dict):
        names = {list: "a list", str: "text", bool: "true or false", type(None): "null"}
        raise UserError(f"{where}: {names.get(type(value), 'a number')}, but a row is a JSON object {{column: value}}.")
    return value


def _parse_csv(content: bytes, path: Path) -> Iterator[Row]:
    try:
        reader = csv.DictReader(io.StringIO(content.decode(), newline=""), strict=True)
        for row in reader:
            if None in row or None in row.values():
                raise UserError(f"{path}, line {reader.line_num}: a row needs {len(reader.fieldnames or [])} values.")
            yield row
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}, line {line}: not UTF-8 text ({error.reason}).") from None
    except csv.Error as error:
        raise UserError(f"{path}, line {reader.line_num}: not valid CSV: {error}.") from None


def _open_directory(path: Path, split: str) -> Rows:
    import datasets

    saved = (path / "state.json").exists() or (path / "dataset_dict.json").exists()
    if not saved:
        for suffix in SUFFIXES:
            if (path / f"{split}{suffix}").is_file():
                return _open_file(path / f"{split}{suffix}")
    try:
        found = datasets.load_from_disk(str(path)) if saved else datasets.load_dataset(str(path), split=split)
    except Exception as error:  # datasets has no common base for what a wrong directory can cause
        raise UserError(
            f"The directory {path} holds no data set with a split '{split}' ({_first_line(error)}). It should hold "
            f"{split}.jsonl, {split}.parquet or {split}.csv, or be written by datasets' save_to_disk."
        ) from None
    if isinstance(found, Mapping):
        if split not in found:
            raise UserError(f"{path} has no split '{split}'.{nearest(split, found)} It has: {', '.join(found)}.")
        found = found[split]
    return Rows(found, str(path))


def _open_hub(data: str, path: Path, split: str) -> Rows:
    siblings = [item.name for item in path.parent.iterdir()] if path.parent.is_dir() else []
    if path.suffix.lower() in SUFFIXES or not _HUB_NAME.fullmatch(data):
        raise UserError(f"There is no data at {data}.{nearest(path.name, siblings)}")
    import datasets

    name, _, subset = data.partition(":")
    try:
        return Rows(datasets.load_dataset(name, subset or None, split=split), f"{data} ({split})")
    except Exception as error:  # connection, unknown name, unknown subset or split: all for the user to act on
        raise UserError(
            f"There is no file or directory {data}, and the hub did not give a data set of that name with a split "
            f"'{split}': {_first_line(error)} Check data and task.split; a subset is written name:subset."
        ) from None


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".strip().splitlines()[0]
