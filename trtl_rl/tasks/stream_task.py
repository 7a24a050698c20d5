"""``StreamTask``: a task whose rows are read as they are drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trtl_rl.config import RunConfig
from trtl_rl.rollout import Prompt
from trtl_rl.tasks.order import Draws
from trtl_rl.tasks.rows import Row, Rows
from trtl_rl.tasks.stream import StreamOrder, StreamRows
from trtl_rl.tasks.task import Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def make_task(rows: Rows, config: RunConfig, tokenizer: PreTrainedTokenizerBase, max_prompt_tokens: int) -> Task:
    """The task that fits the rows. Raises UserError as :class:`Task`."""
    kind = StreamTask if isinstance(rows, StreamRows) else Task
    return kind(rows, config, tokenizer, max_prompt_tokens)


class StreamTask(Task):
    """Rows have no length: limits are applied as rows are drawn, and the first ``task.held_out`` rows are held out."""

    def _prepare(self, config: RunConfig) -> None:
        assert isinstance(self.rows, StreamRows)
        self._kept: dict[int, Row] = dict(enumerate(self.rows.first(self.config.held_out)))
        self._held_out = list(self._kept)
        self._orders: list[StreamOrder] = []
        self._passed: set[int] = set()

    def order(self, seed: int) -> Draws:
        assert isinstance(self.rows, StreamRows)
        buffer = self.config.shuffle_buffer if self.config.shuffle else 0
        self._orders.append(StreamOrder(self.rows, seed, buffer, self.config.held_out, self._fits))
        return self._orders[-1]

    def held_out_prompts(self, count: int) -> list[Prompt]:
        return [self.prompt(id, 0) for id in self._held_out[:count]]

    def metrics(self) -> dict[str, float]:
        return {"task/left_out_rows": len(self._passed)}

    def _row(self, id: int) -> Row:
        if id in self._kept:
            return self._kept[id]
        found = next((row for order in self._orders if (row := order.row(id)) is not None), None)
        assert found is not None, f"row {id} was not drawn"
        return found

    def _fits(self, id: int, row: Row) -> bool:
        """Whether the row's prompt is within the limits. Raises UserError where the context is too short for it."""
        if self.config.too_long == "refuse" and not (self.config.min_prompt_tokens or self.config.max_prompt_tokens):
            return True  # its length is checked when its prompt is made
        length = len(self._tokenise([self._render(id, row)])[0])
        low, high = self.config.min_prompt_tokens or 1, self.config.max_prompt_tokens or length
        fits = low <= length <= high
        if fits and length > self.max_prompt_tokens:
            if self.config.too_long == "refuse":
                raise self._wrong_length(id, length)
            fits = False
        if not fits:
            self._passed.add(id)
        return fits
