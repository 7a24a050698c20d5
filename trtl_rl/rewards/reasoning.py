"""``reasoning_gym``: the scorers of reasoning-gym's tasks."""

from __future__ import annotations

import re
from typing import Any

from trtl_rl.rewards.reward import text_of

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class ReasoningGym:
    """What the task's own scorer gives for the text in the last ``<answer>…</answer>``, from 0 to 1; 0 without one.

    The columns ``answer`` and ``metadata`` are those of reasoning-gym's entries. ``None``, which leaves this reward out,
    where ``metadata`` names no task of it.
    """

    def __call__(
        self, completions: list[Any], answer: list[Any], metadata: list[Any], **columns: Any
    ) -> list[float | None]:
        gym = self.prepare()
        values: list[float | None] = []
        questions = columns.get("question") or [""] * len(answer)
        for item, gold, about, question in zip(completions, answer, metadata, questions, strict=True):
            if not isinstance(about, dict) or "source_dataset" not in about:
                values.append(None)
                continue
            found = final_answer(text_of(item))
            entry = {"question": question, "answer": gold, "metadata": about}
            score = gym.get_score_answer_fn(about["source_dataset"])
            values.append(0.0 if found is None else float(score(answer=found, entry=entry)))
        return values

    def prepare(self) -> Any:
        """Import reasoning-gym, which takes seconds. A worker process does so before its first call."""
        import reasoning_gym

        return reasoning_gym


def final_answer(text: str) -> str | None:
    """The text in the last ``<answer>…</answer>``."""
    found = _ANSWER.findall(text)
    return found[-1].strip() if found else None
