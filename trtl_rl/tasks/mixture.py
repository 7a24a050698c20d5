"""Mixtures: several data sets as one, drawn by weight."""

from __future__ import annotations

from bisect import bisect_right

from trtl_rl.config import RunConfig
from trtl_rl.errors import UserError
from trtl_rl.tasks.rows import Row, Rows, open_source

SOURCE = "source"  # the column that says which data set a row is from


class MixedRows(Rows):
    """The rows of all parts, one after another, with the columns of all and ``None`` where a part lacks one.

    Attributes:
        starts: Row id at which each part begins.
        weights: How often each part is drawn, relative to the others.
    """

    def __init__(self, parts: list[Rows], weights: list[float]) -> None:
        self.parts, self.weights = parts, weights
        self.source = " + ".join(part.source for part in parts)
        self.columns = [*dict.fromkeys(name for part in parts for name in part.columns), SOURCE]
        self.starts = [sum(len(part) for part in parts[:i]) for i in range(len(parts))]

    def __len__(self) -> int:
        return sum(len(part) for part in self.parts)

    def __getitem__(self, index: int | slice) -> Row | list[Row]:  # type: ignore[override]
        if isinstance(index, slice):
            return super().__getitem__(index)
        part = self.part(index)
        row = self.parts[part][index - self.starts[part]]
        return {**{name: row.get(name) for name in self.columns}, SOURCE: self.parts[part].source}

    def part(self, id: int) -> int:
        """The part that a row belongs to."""
        return bisect_right(self.starts, id) - 1


def open_mixture(config: RunConfig) -> MixedRows:
    """The parts of ``task.mixture``; each one's prompt column takes the name ``task.prompt_column``.

    Raises:
        UserError: as ``open_rows``; ``data`` names data too.
    """
    task = config.task
    if "data" in config.model_fields_set and config.data != "demo":
        raise UserError(
            f"task.mixture names the data of the run, and so does data={config.data}. Leave one of them out."
        )
    if task.columns or task.arguments:
        raise UserError("task.columns and task.arguments have no effect with task.mixture: give each part its own.")
    parts = []
    for item in task.mixture:
        columns = dict(item.columns)
        if item.prompt_column != task.prompt_column:
            columns[task.prompt_column] = item.prompt_column
        part = open_source(item.data, item.split, item.arguments, columns, config.seed)
        if SOURCE in part.columns:
            raise UserError(f"{part.source} has a column '{SOURCE}', which a mixture needs for itself. Rename it.")
        if task.prompt_column not in part.columns or len(part) == 0:
            raise UserError(
                f"{part.source} has no rows with a column '{item.prompt_column}' (prompt_column of its part of task.mixture)."
            )
        parts.append(part)
    return MixedRows(parts, [item.weight for item in task.mixture])
