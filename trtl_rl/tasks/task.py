"""``Task``: rows become prompts, in an order that is fixed by the seed alone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from trtl_rl.config import RunConfig
from trtl_rl.errors import UserError
from trtl_rl.rollout import Prompt
from trtl_rl.tasks.curriculum import difficulties
from trtl_rl.tasks.mixture import MixedRows
from trtl_rl.tasks.order import HELD_OUT, Draws, Ids, MixtureOrder, Order, permutation
from trtl_rl.tasks.presets import apply_preset
from trtl_rl.tasks.rows import Row, Rows, check_rows
from trtl_rl.tasks.template import template_warning

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHECKED_ROWS = 20_000
_CHUNK = 1000


class Task:
    """Makes prompts from rows. A row's id is its index in ``rows``.

    Args:
        rows: The data; checked again here, so that rows from Python are held to the same rules.
        config: Its ``task``, ``seed`` and ``evaluation`` matter.
        tokenizer: Of the model that is trained.
        max_prompt_tokens: The longest prompt that leaves room for the answer, in tokens.

    Attributes:
        longest: Tokens of the longest prompt; ``None`` for more than 20 000 rows, which are checked as they are drawn.
        skipped: Rows that are left out since their prompts are too long (``task.too_long=skip``, which checks all rows,
            however many) or outside ``task.min_prompt_tokens`` and ``task.max_prompt_tokens``.
        notes: What a user should be told: rows that are left out, and what the chat template does.

    Raises:
        UserError: a row makes no prompt, or one that is too long; a key of ``task`` cannot act.
    """

    def __init__(
        self, rows: Rows, config: RunConfig, tokenizer: PreTrainedTokenizerBase, max_prompt_tokens: int
    ) -> None:
        config = apply_preset(config)
        check_rows(rows, config)
        self.rows = rows
        self.config = config.task
        self.max_prompt_tokens = max_prompt_tokens
        self._tokenizer: Any = tokenizer
        self._chat = self._uses_chat_template()
        warning = template_warning(tokenizer) if self._chat else None
        self.notes: list[str] = [] if warning is None else [warning]
        self._prompt = lru_cache(maxsize=1024)(self._make)
        self.longest: int | None = None
        self.skipped = 0
        self._seed = config.seed
        self._prepare(config)

    def _prepare(self, config: RunConfig) -> None:
        """Measure the rows, and choose those that are held out and those that are trained on."""
        rows, task = self.rows, self.config
        fitting = np.arange(len(rows), dtype=np.int64)
        limited = task.min_prompt_tokens is not None or task.max_prompt_tokens is not None
        if len(rows) <= CHECKED_ROWS or task.too_long == "skip" or limited:
            lengths = self._lengths()
            low, high = task.min_prompt_tokens or 0, task.max_prompt_tokens or lengths.max()
            wanted = (lengths >= low) & (lengths <= high)
            fits = lengths <= self.max_prompt_tokens
            self._check_lengths(lengths[wanted], fitting[wanted], int((wanted & fits).sum()))
            for count, why in (
                ((lengths < low).sum(), f"their prompts have fewer than task.min_prompt_tokens={low} tokens"),
                ((lengths > high).sum(), f"their prompts have more than task.max_prompt_tokens={high} tokens"),
                (
                    (wanted & ~fits).sum(),
                    f"their prompts have more than {self.max_prompt_tokens} tokens, which is what fits beside "
                    "sampling.max_new_tokens (task.too_long=skip)",
                ),
            ):
                if count:
                    self.notes.append(f"{count} of {len(rows)} rows are left out: {why}.")
            fitting = fitting[wanted & fits]
            self.longest = int(lengths[fitting].max())
        self.skipped = len(rows) - len(fitting)
        shuffled = fitting[permutation(len(fitting), config.seed, 0, HELD_OUT)]
        cut = len(fitting) - task.held_out
        self._held_out = [int(i) for i in shuffled[cut:]]
        self._trained = np.sort(shuffled[:cut])
        self._difficulty = difficulties(rows, self._trained, task.curriculum)

    def prompt(self, id: int, occurrence: int) -> Prompt:
        """Row ``id`` as a prompt. Its ids come from one tokenisation; its text is those ids decoded.

        Raises:
            UserError: the row makes no prompt, or one that is too long.
        """
        ids, text, columns = self._prompt(id)
        value = columns[self.config.prompt_column]
        messages = value if isinstance(value, list) else None
        return Prompt(id, occurrence, list(ids), text, dict(columns), messages)

    def order(self, seed: int) -> Draws:
        """The order in which training draws rows; held-out rows are not among them."""
        shuffle, difficulty = self.config.shuffle, self._difficulty
        if not isinstance(self.rows, MixedRows):
            return Order(self._trained, seed, shuffle, difficulty)
        orders = []
        parts = np.array([self.rows.part(int(id)) for id in self._trained])
        for i, part in enumerate(self.rows.parts):
            own = parts == i
            if not own.any():
                raise UserError(
                    f"No row of {part.source} is left to train on after task.held_out and the length limits."
                )
            among = None if difficulty is None else difficulty[own]
            orders.append(Order(self._trained[own], seed + i, shuffle, among))
        return MixtureOrder(orders, self.rows.weights, seed)

    def held_out_prompts(self, count: int) -> list[Prompt]:
        """The first ``count`` of the ``task.held_out`` rows that are never trained on; fixed by the run's seed."""
        assert count <= len(self._held_out), f"{count} held-out prompts asked for, {len(self._held_out)} kept"
        return [self.prompt(id, 0) for id in self._held_out[:count]]

    def fixed_prompts(self, count: int) -> list[Prompt]:
        """``count`` prompts of the rows that are not held out, fixed by the run's seed: for data that is only evaluated on.

        Raises:
            UserError: there are fewer.
        """
        if count > len(self._trained):
            raise UserError(
                f"evaluation.prompts={count}, but {self.rows.source} has {len(self._trained)} rows that fit. Lower it."
            )
        chosen = self._trained[permutation(len(self._trained), self._seed, 0, HELD_OUT)[:count]]
        return [self.prompt(int(id), 0) for id in chosen]

    def metrics(self) -> dict[str, float]:
        """Counts that grow while rows are drawn; none where all rows were measured before."""
        return {}

    def _uses_chat_template(self) -> bool:
        has_template = bool(self._tokenizer.chat_template)
        if self.config.chat and not has_template:
            raise UserError("task.chat is on, but the model's tokenizer has no chat template. Leave task.chat out.")
        chat = has_template and self.config.chat is not False
        if self.config.system is not None and not chat:
            raise UserError("task.system needs a chat template, which is off or missing. Use task.template instead.")
        if self.config.template is not None and "{prompt}" not in self.config.template:
            raise UserError("task.template must contain '{prompt}', where the text of the prompt column goes.")
        return chat

    def _make(self, id: int) -> tuple[list[int], str, Row]:
        row = self._row(id)
        ids = self._tokenise([self._render(id, row)])[0]
        if not 0 < len(ids) <= self.max_prompt_tokens:
            raise self._wrong_length(id, len(ids))
        text = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return ids, text, row

    def _row(self, id: int) -> Row:
        return self.rows[id]

    def _lengths(self) -> Ids:
        """Tokens of every row's prompt. Raises UserError for an empty one."""
        lengths = np.zeros(len(self.rows), np.int64)
        for start in range(0, len(self.rows), _CHUNK):
            chunk = range(start, min(start + _CHUNK, len(self.rows)))
            for id, ids in zip(chunk, self._tokenise([self._render(id, self.rows[id]) for id in chunk]), strict=True):
                if not ids:
                    raise self._wrong_length(id, 0)
                lengths[id] = len(ids)
        return lengths

    def _check_lengths(self, lengths: Ids, ids: Ids, fitting: int) -> None:
        """Refuse rows that are too long for the context, unless they are to be skipped, and too few that are left."""
        if fitting < len(lengths) and self.config.too_long == "refuse":
            first = int(np.argmax(lengths > self.max_prompt_tokens))
            raise self._wrong_length(int(ids[first]), int(lengths[first]), len(lengths) - fitting, int(lengths.max()))
        if fitting <= self.config.held_out and fitting < len(self.rows):
            raise UserError(
                f"Of {len(self.rows)} rows of {self.rows.source} {fitting} have prompts of at most {self.max_prompt_tokens} "
                f"tokens, and of a length that the task allows; task.held_out={self.config.held_out} leaves nothing to train on. "
                "Lower sampling.max_new_tokens, or raise "
                "engine.max_context as far as the model allows."
            )

    def _wrong_length(self, id: int, length: int, count: int = 1, longest: int = 0) -> UserError:
        where = f"Row {id} (counted from 0) of {self.rows.source}"
        if length == 0:
            return UserError(f"{where} makes an empty prompt: remove the row, or add a task.template.")
        others = f" So do {count} of {len(self.rows)} rows, the longest with {longest}." if count > 1 else ""
        return UserError(
            f"{where} makes a prompt of {length} tokens, but at most {self.max_prompt_tokens} fit the context beside "
            f"the answer.{others} Shorten or remove the rows, leave them out with task.too_long=skip, lower "
            "sampling.max_new_tokens, or raise engine.max_context as far as the model allows."
        )

    def _render(self, id: int, row: Row) -> str:
        """The text that is tokenised, with the chat template's markers where the model has one."""
        value = row[self.config.prompt_column]
        where = f"Row {id} (counted from 0) of {self.rows.source}: the column '{self.config.prompt_column}'"
        if isinstance(value, str):
            text = self.config.template.replace("{prompt}", value) if self.config.template else value
            if not self._chat:
                return text
            messages = [{"role": "user", "content": text}]
        else:
            messages = self._messages(value, where)
        if self.config.system is not None:
            if messages[0]["role"] == "system":
                raise UserError(f"{where} has a system message already. Remove it, or leave task.system out.")
            messages = [{"role": "system", "content": self.config.system}, *messages]
        from jinja2 import TemplateSyntaxError

        try:
            return str(self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
        except Exception as error:  # a template refuses roles by raising jinja2's TemplateError
            if isinstance(error, TemplateSyntaxError):
                at = f"line {error.lineno}"
                raise UserError(
                    f"The model's chat template cannot be read: {at}: {error}. Mend it, or task.chat=false."
                ) from None
            raise UserError(f"{where}: the model's chat template refuses these messages: {error}") from None

    def _messages(self, value: Any, where: str) -> list[dict[str, Any]]:
        items = value if isinstance(value, list) else []
        if not items or not all(isinstance(item, dict) and {"role", "content"} <= item.keys() for item in items):
            shown = "nothing" if value is None else f"{type(value).__name__} {str(value)[:40]!r}"
            raise UserError(f"{where} holds {shown}; it must be text, or a list of messages with role and content.")
        if not self._chat:
            raise UserError(f"{where} holds chat messages, but the chat template is off or missing. Use plain text.")
        if self.config.template is not None:
            raise UserError(f"{where} holds chat messages, which task.template cannot change. Leave task.template out.")
        if items[-1]["role"] == "assistant":
            raise UserError(f"{where} ends with an assistant's message: the answer would be shown to the model.")
        return items

    def _tokenise(self, texts: Sequence[str]) -> list[list[int]]:
        # A chat template writes its own special tokens; to plain text the tokenizer adds those that the model expects.
        encoded = self._tokenizer(
            list(texts), add_special_tokens=not self._chat, return_attention_mask=False, verbose=False
        )
        return [list(ids) for ids in encoded["input_ids"]]
