"""What a chat template does to a conversation that goes on."""

from __future__ import annotations

from typing import Any

_USER = {"role": "user", "content": "q"}
_ANSWER = {"role": "assistant", "content": "a"}


def template_warning(tokenizer: Any) -> str | None:
    """Whether the template preserves prefixes, in words if not.

    What the model is trained on is the rendered prompt and then its own tokens. A template that renders a prompt with its
    answer otherwise shows the model other text later, in a conversation of several turns, than it was trained on.
    """
    try:
        prompt = tokenizer.apply_chat_template([_USER], add_generation_prompt=True, tokenize=False)
        answered = tokenizer.apply_chat_template([_USER, _ANSWER], tokenize=False)
        longer = tokenizer.apply_chat_template([_USER, _ANSWER, _USER], add_generation_prompt=True, tokenize=False)
    except Exception:  # a template may refuse such messages; the data's own are checked apart
        return None
    if not answered.startswith(prompt):
        return (
            "The chat template does not preserve prefixes: a prompt with its answer is not rendered as the prompt, then the "
            "answer. The run trains on the prompt as it is rendered and on the model's own tokens after it; a later turn of a "
            "conversation would show the model something else."
        )
    if not longer.startswith(answered):
        return (
            "The chat template does not preserve prefixes: it renders an earlier answer otherwise than the last one. Training is "
            "on last answers only, so nothing is wrong with it; conversations of several turns are another distribution."
        )
    return None
