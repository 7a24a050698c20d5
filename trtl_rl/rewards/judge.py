"""``judge``: a language model writes a verdict about each completion; its FLOPs are feedback FLOPs.

This file is what does not depend on the engine: the question, the verdict, the cost. ``engines/judge.py`` answers with the
embedded engine.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter, Signature
from typing import TYPE_CHECKING, Any, Protocol

from trtl_rl.errors import UserError
from trtl_rl.flops import formulas
from trtl_rl.flops.formulas import ModelShape
from trtl_rl.rewards.reward import text_of
from trtl_rl.rollout import Completion, Request, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FIELD = re.compile(r"\{(\w+)\}")
_SHOWN = 200  # characters of an answer without a verdict that a message quotes


class Answering(Protocol):
    """The part of a ``RolloutEngine`` that a judge needs."""

    def probe(self, requests: Sequence[Request]) -> list[Completion]: ...


@dataclass(frozen=True)
class Seated:
    """A judge that is loaded.

    Attributes:
        context: Tokens of the longest question and answer.
    """

    engine: Answering
    tokenizer: PreTrainedTokenizerBase
    shape: ModelShape
    context: int


class Judge(ABC):
    """The number that a model's verdict on a completion stands for. Subclasses say, in :meth:`seat`, which engine answers.

    The answer is the likeliest one (greedy): the same question gets the same verdict. The question goes through the
    model's chat template as a user's message where there is one, and is plain text otherwise.

    Args:
        template: The question. ``{prompt}``, ``{completion}`` and ``{NAME}`` of any column of the data stand for their text.
        pattern: A regular expression, as in Python's ``re``. Its last match in the answer is the verdict: its first group, or
            all of it where it has none.
        values: What verdicts are worth, in any case of letters; default: the verdict is a number itself.
        no_verdict: What an answer without a verdict, or with one that ``values`` lacks, is worth; default: it is a fault.
        system: A system message, for models with a chat template.
        max_new_tokens: Of an answer; one that is cut off may lack its verdict.

    A fault, such as a question that does not fit, is of that one completion, and ``on_error`` handles it.

    Raises:
        UserError: the template lacks ``{completion}``, or pattern or values are none.
    """

    def __init__(
        self,
        template: str,
        pattern: str,
        values: Mapping[str, float] | None = None,
        no_verdict: float | None = None,
        system: str | None = None,
        max_new_tokens: int = 256,
    ) -> None:
        fields = dict.fromkeys(_FIELD.findall(str(template)))
        if "completion" not in fields:
            raise UserError(
                "Reward 'judge': template must contain '{completion}', where the answer that is judged goes."
            )
        try:
            self._pattern = re.compile(pattern)
        except (re.error, TypeError) as error:
            raise UserError(f"Reward 'judge': pattern {pattern!r} is no regular expression: {error}.") from None
        self._values = None if values is None else _checked(values)
        if no_verdict is not None:
            _check_number(no_verdict, "no_verdict is")
        self.template, self.system, self.no_verdict = template, system, no_verdict
        self._sampling = Sampling(1.0, max_new_tokens, greedy=True)
        self._asked = self._flops = 0
        self._seated: Seated | None = None
        # So that columns that the template names are looked for in the data before anything is loaded.
        names = ["prompts", "completions", *(name for name in fields if name not in ("prompt", "completion"))]
        self.__signature__ = Signature([Parameter(name, Parameter.KEYWORD_ONLY) for name in names])

    @abstractmethod
    def seat(self) -> Seated:
        """Load the model and its engine; called once, in the process that judges."""

    def prepare(self) -> None:
        """Load the model. A worker process does so before its first call."""
        if self._seated is not None:
            return
        seated = self.seat()
        if self.system is not None and not seated.tokenizer.chat_template:
            raise UserError(
                "Reward 'judge': system needs a chat template, and the model has none. Use template instead."
            )
        self._seated = seated

    def __call__(self, prompts: list[Any], completions: list[Any], **columns: list[Any]) -> list[float | Exception]:
        self.prepare()
        assert self._seated is not None
        seated, room = self._seated, self._seated.context - self._sampling.max_new_tokens
        found: list[float | Exception] = []
        requests: dict[int, tuple[int, Request]] = {}  # by id, with the completion's position
        for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            fields = {name: str(column[i]) for name, column in columns.items()}
            ids = self._ids(seated.tokenizer, {**fields, "prompt": _said(prompt), "completion": text_of(completion)})
            found.append(
                ValueError(
                    f"the question has {len(ids)} tokens, and beside an answer of {self._sampling.max_new_tokens} there is room "
                    f"for {room}: raise max_context or lower max_new_tokens"
                )
            )
            if len(ids) <= room:
                self._asked += 1
                requests[-self._asked] = i, Request(-self._asked, ids, 1, self._sampling, (0, self._asked, 0))
        for answer in seated.engine.probe([request for _, request in requests.values()]) if requests else []:
            i, request = requests[answer.request_id]
            told = answer.prefills or None  # an engine that does not tell computes a question once
            self._flops += formulas.rollout(seated.shape, len(request.ids), [len(answer.ids)], told)
            found[i] = self.verdict(str(seated.tokenizer.decode(answer.ids, skip_special_tokens=True)))
        return found

    def verdict(self, text: str) -> float | Exception:
        """What an answer is worth; an exception where that cannot be said."""
        found = self._read(text)
        return float(self.no_verdict) if isinstance(found, Exception) and self.no_verdict is not None else found

    def _read(self, text: str) -> float | Exception:
        matches = list(self._pattern.finditer(text))
        if not matches:
            return ValueError(f"the judge's answer has no verdict like {self._pattern.pattern!r}: {text[-_SHOWN:]!r}")
        word = (matches[-1].group(1 if self._pattern.groups else 0) or "").strip()
        if self._values is not None and word.casefold() in self._values:
            return self._values[word.casefold()]
        if self._values is not None:
            return ValueError(f"values has no verdict {word!r}; it has: {', '.join(self._values)}")
        try:
            return float(word)
        except ValueError:
            return ValueError(f"the verdict {word!r} is no number, and no values say what it is worth")

    def take_flops(self) -> int:
        """FLOPs of questions and answers since the last call, counted as those of rollouts."""
        taken, self._flops = self._flops, 0
        return taken

    def _ids(self, tokenizer: PreTrainedTokenizerBase, fields: Mapping[str, str]) -> list[int]:
        text = _FIELD.sub(lambda match: fields[match[1]], self.template)  # once: what completions say stays as it is
        if not tokenizer.chat_template:
            return list(tokenizer.encode(text))
        messages: Any = [{"role": "user", "content": text}]
        if self.system is not None:
            messages.insert(0, {"role": "system", "content": self.system})
        rendered = str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
        return list(tokenizer.encode(rendered, add_special_tokens=False))


def _checked(values: Any) -> dict[str, float]:
    """``values`` by their verdicts in lower case."""
    if not isinstance(values, Mapping) or not values:
        raise UserError(
            f"Reward 'judge': values={values!r} must say what verdicts are worth, such as {{good: 1, bad: 0}}."
        )
    for word, value in values.items():
        if not isinstance(word, str):  # YAML reads yes and no as true and false
            raise UserError(f"Reward 'judge': values has the verdict {word!r}, which is no text. Put it in quotes.")
        _check_number(value, f"values gives {word!r} the worth")
    return {word.strip().casefold(): float(value) for word, value in values.items()}


def _check_number(value: Any, said: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UserError(f"Reward 'judge': {said} {value!r}, which is no number.")


def _said(prompt: Any) -> str:
    """A prompt as text; of a conversation, who says what."""
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1:
        return str(prompt[0]["content"])
    return "\n".join(f"{message['role']}: {message['content']}" for message in prompt)
