"""``rollouts/``: what each step has trained on, for people and for accounts: ``step-N.jsonl``, one group a line.

A line has ``index`` (the group's order in the run), ``prompt_id`` and ``occurrence`` (row of the data, and epoch), ``fate``:
``trained``, or ``discarded`` with a ``reason``; and, where known, ``version``, ``prompt``, and lists with one item per
answer: ``completions`` (text), ``tokens`` (lengths), ``finish_reasons``, ``versions`` (first and last token's),
``rewards``, and ``components`` by reward function.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from trtl_rl.disk import sync
from trtl_rl.errors import DiskError
from trtl_rl.rollout import Group


class RolloutRecord:
    """Writes the files and keeps the newest.

    Args:
        directory: Made when the first step is written.
        keep: Steps whose files stay; 0: none are written.
    """

    def __init__(self, directory: Path, keep: int) -> None:
        self.directory, self.keep = directory, keep
        self._unsynced: list[Path] = []

    def write(self, step: int, trained: list[Group], discarded: list[tuple[Group, str]]) -> None:
        """Write what ``step`` trained on, and what was discarded since the step before. Raises DiskError."""
        if not self.keep:
            return
        lines = [_line(group, fate="trained") for group in trained]
        lines += [_line(group, fate="discarded", reason=reason) for group, reason in discarded]
        path = self._path(step)
        part = path.with_name(path.name + ".partial")
        try:
            self.directory.mkdir(exist_ok=True)
            part.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
            os.replace(part, path)
            self._path(step - self.keep).unlink(missing_ok=True)
        except OSError as error:
            raise DiskError(f"{path} cannot be written: {error.strerror}.") from error
        self._unsynced.append(path)

    def sync(self) -> None:
        """Bring what was written to the disk, before a checkpoint relies on it."""
        for path in self._unsynced:
            if path.exists():
                sync(path)
        if self._unsynced:
            sync(self.directory)
        self._unsynced = []

    def rewind(self, step: int) -> None:
        """Remove the files of steps after ``step``, which are done again, those of too many steps, and what a kill left."""
        if not self.directory.is_dir():
            return
        for path in self.directory.glob("step-*"):
            number = int(path.name.removeprefix("step-").split(".")[0])
            if path.suffix == ".partial" or number > step or number <= step - self.keep:
                path.unlink()

    def _path(self, step: int) -> Path:
        return self.directory / f"step-{step:08d}.jsonl"


def _line(group: Group, **fate: str) -> dict[str, Any]:
    return {
        "index": group.index,
        "prompt_id": group.prompt.id,
        "occurrence": group.prompt.occurrence,
        **fate,
        "version": group.version,
        "prompt": group.prompt.text,
        "completions": group.texts,
        "tokens": [len(completion.ids) for completion in group.completions],
        "finish_reasons": [completion.finish_reason for completion in group.completions],
        "versions": [[completion.version_first, completion.version_last] for completion in group.completions],
        "rewards": group.rewards,
        "components": group.components,
    }
