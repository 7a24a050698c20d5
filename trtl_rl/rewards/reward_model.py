"""``reward_model``: a Hugging Face sequence-classification model as a reward; its FLOPs are feedback FLOPs."""

from __future__ import annotations

import contextlib
from typing import Any

from trtl_rl.errors import UserError
from trtl_rl.flops import formulas
from trtl_rl.flops.formulas import ModelShape
from trtl_rl.rewards.reward import text_of

# Of these the formulas know every matrix product; of others torch counts what it runs.
_KNOWN = ("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")


class RewardModel:
    """The single logit of a classification model for prompt and completion.

    With a chat template the model reads the conversation through it; otherwise the prompt's text followed by the
    completion's. The model is loaded in the process that calls, before its first call.

    Args:
        model: A directory or hub name with one label.
        batch_size: Sequences in one forward.
        max_tokens: Longer sequences lose tokens at their beginning; default: what the tokenizer allows.
        device: For torch, for example ``cuda:1``.
        sigmoid: Map the logit to (0, 1).
    """

    def __init__(
        self,
        model: str,
        batch_size: int = 16,
        max_tokens: int | None = None,
        device: str = "cpu",
        sigmoid: bool = False,
    ) -> None:
        if batch_size < 1:
            raise UserError(f"Reward 'reward_model': batch_size={batch_size} must be at least 1.")
        self.name, self.batch_size, self.max_tokens = model, batch_size, max_tokens
        self.device, self.sigmoid = device, sigmoid
        self._flops = 0
        self._model: Any = None
        self._shape: ModelShape | None = None
        self._tokenizer: Any = None

    def __call__(self, prompts: list[Any], completions: list[Any], **columns: Any) -> list[float | None]:
        import torch

        self.prepare()
        texts = [self._text(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)]
        values: list[float | None] = []
        for start in range(0, len(texts), self.batch_size):
            batch = self._tokenizer(
                texts[start : start + self.batch_size],
                return_tensors="pt",
                padding=True,
                truncation=True,
                max_length=self.max_tokens,
                add_special_tokens=not self._tokenizer.chat_template,
            ).to(self.device)
            counter: Any = contextlib.nullcontext() if self._shape is not None else _counter()
            with torch.inference_mode(), counter:
                logits = self._model(**batch).logits[:, 0].float()
            if self._shape is None:
                self._flops += counter.get_total_flops()
            else:
                lengths = batch["attention_mask"].sum(1).tolist()
                self._flops += sum(formulas.reward_model(self._shape, tokens) for tokens in lengths)
            values += (torch.sigmoid(logits) if self.sigmoid else logits).tolist()
        return values

    def take_flops(self) -> int:
        """FLOPs since the last call: of decoders of the Qwen2, Qwen3 and Llama kind as the ledger counts them, without padding; of
        other models, of every matrix product that torch ran, padding included."""
        taken, self._flops = self._flops, 0
        return taken

    def expected_flops(self, prompt_tokens: int, answer_tokens: int) -> int | None:
        """What one completion will cost, by the sizes of the model alone, if its tokens are as many as the policy's; ``None``
        for a model of another kind. A RACE plans with it."""
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(self.name)
        if config.model_type not in _KNOWN:
            return None
        tokens = min(prompt_tokens + answer_tokens, self.max_tokens or prompt_tokens + answer_tokens)
        return formulas.reward_model(ModelShape.from_hf_config(config), tokens)

    def _text(self, prompt: Any, completion: Any) -> str:
        if not self._tokenizer.chat_template:
            return (prompt if isinstance(prompt, str) else text_of(prompt)) + text_of(completion)
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        answer = {"role": "assistant", "content": text_of(completion)}
        return str(self._tokenizer.apply_chat_template([*messages, answer], tokenize=False))

    def prepare(self) -> None:
        """Load the model. A worker process does so before its first call."""
        if self._model is not None:
            return
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(self.name)
        self._tokenizer.truncation_side = "left"
        model = AutoModelForSequenceClassification.from_pretrained(self.name)
        if model.config.num_labels != 1:
            raise ValueError(f"{self.name} has {model.config.num_labels} labels; a reward model has 1")
        if model.config.pad_token_id is None:
            if self._tokenizer.pad_token_id is None:
                self._tokenizer.pad_token = self._tokenizer.eos_token
            model.config.pad_token_id = self._tokenizer.pad_token_id
        if model.config.model_type in _KNOWN:
            self._shape = ModelShape.from_hf_config(model.config)
        self._model = model.eval().to(self.device)


def _counter() -> Any:
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # torch counts its counterparts on a GPU only
    return FlopCounterMode(display=False, custom_mapping={fused: _attention})


def _attention(query: Any, key: Any, value: Any, *rest: Any, **named: Any) -> int:
    """FLOPs of fused attention by the shapes of its inputs, masked pairs included as torch counts them."""
    from torch.utils.flop_counter import sdpa_flop_count

    return int(sdpa_flop_count(query, key, value))
