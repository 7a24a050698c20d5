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


@dataclass(frozen=True)
class Coverage:
    """The expanded recipe: all linears in name order."""

    linears: tuple[CoveredLinear, ...]

    @property
    def digest(self) -> str:
        """Hash of names, shapes and formats; reasons are for people and do not count."""
        rows = [[item.name, list(item.shape), item.format.to_json()] for item in self.linears]
        return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()

    def summary(self) -> dict[str, Any]:
        """Counts for people: linears quantised and excluded, and the share of their parameters in FP8."""
        on = [item for item in self.linears if item.format.quantised]
        size = {True: 0, False: 0}
        for item in self.linears:
            size[item.format.quantised] += item.shape[0] * item.shape[1]
        return {
            "quantised": len(on),
            "excluded": {item.name: item.reason for item in self.linears if not item.format.quantised},
            "fp8_parameter_share": size[True] / max(1, size[True] + size[False]),
        }

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
