"""Where rows come from: files, directories, the hub, reasoning-gym, the demo."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trtl_rl.config import RunConfig
from trtl_rl.errors import UserError, nearest
from trtl_rl.tasks.presets import REASONING_GYM
from trtl_rl.tasks.rows import Row
from trtl_rl.tasks.stream import StreamRows

SUFFIXES = (".jsonl", ".json", ".parquet", ".csv")
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?")
_BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}

Opened = tuple[Any, str]  # rows, and what messages call them


def read(data: str, split: str, arguments: Mapping[str, Any], seed: int) -> Opened:
    """The rows of ``data`` and its name. Raises UserError as ``open_rows``."""
    if data.startswith(REASONING_GYM):
        return _open_reasoning_gym(data.removeprefix(REASONING_GYM), arguments, seed)
    if arguments:
        raise UserError(f"task.arguments are parameters of a reasoning-gym task, and data={data} is none.")
    if data == "demo":
        from trtl_rl.demo.task import demo_rows

        return demo_rows(), "the demo's data"
    path = Path(data).expanduser()
    if path.is_dir():
        return _open_directory(path, split)
    if path.is_file():
        return _open_file(path)
    return _open_hub(data, path, split)


def _open_file(path: Path) -> Opened:
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise UserError(f"{path}: data files end in {', '.join(SUFFIXES)}; this one in '{path.suffix}'.")
    if suffix == ".parquet":
        import pyarrow.parquet

        try:
            return pyarrow.parquet.read_table(path).to_pylist(), str(path)
        except Exception as error:  # pyarrow raises OSError, ArrowInvalid and others for a broken file
            raise UserError(f"{path} cannot be read as Parquet: {error}") from None
    content = path.read_bytes().removeprefix(b"\xef\xbb\xbf")  # the byte-order mark that some editors write
    if suffix == ".csv":
        return _parse_csv(content, path), str(path)
    if suffix == ".json" and content.lstrip().startswith(b"["):
        return _parse_json(content, path), str(path)
    return _parse_json_lines(content, path), str(path)


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


def _open_directory(path: Path, split: str) -> Opened:
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
    return found, str(path)


def _open_hub(data: str, path: Path, split: str, streaming: bool = False) -> Opened:
    siblings = [item.name for item in path.parent.iterdir()] if path.parent.is_dir() else []
    if path.suffix.lower() in SUFFIXES or not _HUB_NAME.fullmatch(data):
        raise UserError(f"There is no data at {data}.{nearest(path.name, siblings)}")
    import datasets

    name, _, subset = data.partition(":")
    how: dict[str, Any] = {"streaming": True} if streaming else {}
    try:
        return datasets.load_dataset(name, subset or None, split=split, **how), f"{data} ({split})"
    except Exception as error:  # connection, unknown name, unknown subset or split: all for the user to act on
        raise UserError(
            f"There is no file or directory {data}, and the hub did not give a data set of that name with a split "
            f"'{split}': {_first_line(error)} Check data and task.split; a subset is written name:subset."
        ) from None


def open_stream(config: RunConfig) -> StreamRows:
    """``config.data`` as a stream: a file, a directory with files of the split, or a hub name.

    Raises:
        UserError: as ``open_rows``, or the data cannot be streamed.
    """
    data, task = config.data, config.task
    path = Path(data).expanduser()
    if data == "demo" or data.startswith(REASONING_GYM) or task.arguments:
        raise UserError(f"data={data} is made in memory and cannot be streamed. Leave task.streaming out.")
    if path.is_dir():
        found = [path / f"{task.split}{suffix}" for suffix in SUFFIXES]
        path = next((file for file in found if file.is_file()), path)
        if path.is_dir():
            names = ", ".join(file.name for file in found)
            raise UserError(f"The directory {path} cannot be streamed: it holds none of {names}.")
    if not path.is_file():
        dataset, source = _open_hub(data, path, task.split, streaming=True)
        return StreamRows(dataset, source, task.columns)
    builder = _BUILDERS.get(path.suffix.lower())
    if builder is None:
        raise UserError(f"{path}: data files end in {', '.join(SUFFIXES)}; this one in '{path.suffix}'.")
    import datasets

    try:
        dataset = datasets.load_dataset(builder, data_files=str(path), split="train", streaming=True)
        return StreamRows(dataset, str(path), task.columns)
    except UserError:
        raise
    except Exception as error:  # datasets has no common base for what a broken file can cause
        raise UserError(f"{path} cannot be streamed: {_first_line(error)}") from None


def _open_reasoning_gym(name: str, arguments: Mapping[str, Any], seed: int) -> Opened:
    try:
        import reasoning_gym as gym
        from reasoning_gym.factory import DATASETS
    except ImportError:
        raise UserError(
            f"data={REASONING_GYM}{name} needs the package reasoning-gym: pip install 'trtl-rl[reasoning-gym]'."
        ) from None
    if name not in DATASETS:
        raise UserError(f"reasoning-gym has no task '{name}'.{nearest(name, DATASETS)} It has {len(DATASETS)} tasks.")
    try:
        made = gym.create_dataset(name, **{"seed": seed, "size": 1000, **arguments})
        return [dict(entry) for entry in made], f"{REASONING_GYM}{name}"
    except (TypeError, AssertionError, ValueError) as error:  # its configurations check themselves by assert
        keys = ", ".join(DATASETS[name][1].__dataclass_fields__)
        raise UserError(
            f"reasoning-gym's task {name} refuses task.arguments={dict(arguments)}: {_first_line(error)} It takes: {keys}."
        ) from None


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".strip().splitlines()[0]
