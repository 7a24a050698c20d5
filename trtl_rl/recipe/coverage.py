"""``Coverage``: every linear with its format. Trainer and engine each report theirs, and a run starts only if they agree."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from trtl_rl.recipe.formats import LinearFormat


@dataclass(frozen=True)
class CoveredLinear:
    """One linear: its checkpoint name, weight shape (out, in), format, and why it is not quantised if it is not."""

    name: str
    shape: tuple[int, int]
    format: LinearFormat
    reason: str = ""

    @property
    def role(self) -> str:
        """Which of a layer's linears it is (``q_proj`` …), or ``lm_head``."""
        return self.name.rpartition(".")[2]


@dataclass(frozen=True)
class Coverage:
    """The expanded recipe: all linears in name order."""

    linears: tuple[CoveredLinear, ...]

    @property
    def digest(self) -> str:
        """Hash of names, shapes and formats; reasons are for people and do not count."""
        rows = [[item.name, list(item.shape), item.format.to_json()] for item in self.linears]
        return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()

    def difference(self, other: Coverage) -> list[str]:
        """One line for each linear that is missing or runs another format on one side."""
        mine, theirs = ({item.name: item for item in side.linears} for side in (self, other))
        lines = [f"{name}: only on one side" for name in sorted(mine.keys() ^ theirs.keys())]
        for name in sorted(mine.keys() & theirs.keys()):
            a, b = mine[name], theirs[name]
            if a.shape != b.shape:
                lines.append(f"{name}: shape {a.shape} against {b.shape}")
            elif a.format != b.format:
                lines.append(f"{name}: {a.format} against {b.format}")
        return lines

    def to_json(self) -> list[dict[str, Any]]:
        return [
            {"name": i.name, "shape": list(i.shape), "format": i.format.to_json(), "reason": i.reason}
            for i in self.linears
        ]

    @classmethod
    def from_json(cls, data: list[dict[str, Any]]) -> Coverage:
        return cls(
            tuple(
                CoveredLinear(
                    i["name"], (i["shape"][0], i["shape"][1]), LinearFormat.from_json(i["format"]), i["reason"]
                )
                for i in data
            )
        )
