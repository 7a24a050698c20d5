"""A small reward model for the demo's task, and a second evaluation target, as ``bench/race.py`` gives them to a run.

``judge`` is a Qwen3 sequence classifier: its reward is the probability that an answer is right. It reports its FLOPs, which a
run's ledger counts as feedback. ``final_sum`` looks at the last number of an answer only.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from trtl_rl.flops import formulas
from trtl_rl.flops.formulas import ModelShape


def final_sum(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    """1 where the number after the last comma is right, whatever stands before it."""
    pairs = zip(completions, answer, strict=True)
    return [float(text.strip().rpartition(",")[2] == right.rpartition(",")[2]) for text, right in pairs]


@functools.cache
def load(model: str) -> Any:
    """The classifier with its tokenizer and sizes."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    classifier = AutoModelForSequenceClassification.from_pretrained(model).eval()
    return classifier, AutoTokenizer.from_pretrained(model), ModelShape.from_hf_config(classifier.config)


def pack(tokenizer: Any, texts: list[str]) -> tuple[Any, list[int]]:
    """Token ids [texts, longest], filled up on the right, and lengths; the end of sequence is what the score is read at."""
    import torch

    rows = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts]
    width = max(map(len, rows))
    ids = torch.tensor([row + [tokenizer.pad_token_id] * (width - len(row)) for row in rows])
    return ids, [len(row) for row in rows]


class Judge:
    """A reward function that spends FLOPs and says so."""

    __name__ = "judge"

    def __init__(self) -> None:
        self._spent = 0
        self._shape: ModelShape | None = None

    def __call__(self, prompts: list[str], completions: list[str], model: str) -> list[float]:
        """The probability that each answer is right."""
        import torch

        classifier, tokenizer, shape = load(model)
        ids, lengths = pack(tokenizer, [prompt + text for prompt, text in zip(prompts, completions, strict=True)])
        with torch.inference_mode():
            mask = torch.arange(ids.shape[1]) < torch.tensor(lengths)[:, None]
            logits = classifier(input_ids=ids, attention_mask=mask.long()).logits[:, 0]
        self._spent += sum(formulas.reward_model(shape, n) for n in lengths)
        out: list[float] = torch.sigmoid(logits).tolist()
        return out

    def take_flops(self) -> int:
        """What was spent since the last call."""
        spent, self._spent = self._spent, 0
        return spent


judge = Judge()


def train(directory: Path, steps: int, seed: int = 0) -> float:
    """Train a judge of 0.9 M parameters in its linears on right answers and ones with wrong digits; returns how often it is
    right on new ones."""
    import torch
    import torch.nn.functional as F
    from transformers import Qwen3Config, Qwen3ForSequenceClassification

    from trtl_rl.demo.make import make_tokenizer
    from trtl_rl.demo.task import demo_rows

    torch.manual_seed(seed)
    tokenizer, rows = make_tokenizer(), demo_rows()
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=192, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, head_dim=48, max_position_embeddings=256, num_labels=1, pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
    )  # fmt: skip
    model = Qwen3ForSequenceClassification(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    generator = torch.Generator().manual_seed(seed)

    def draw(count: int) -> tuple[Any, Any]:
        texts, right = [], torch.rand(count, generator=generator) < 0.5
        for i, good in zip(
            torch.randint(len(rows), (count,), generator=generator).tolist(), right.tolist(), strict=True
        ):
            text = rows[i]["answer"]
            if not good:
                places = [at for at, char in enumerate(text) if char.isdigit()]
                at = places[int(torch.randint(len(places), (1,), generator=generator))]
                other = (int(text[at]) + int(torch.randint(1, 10, (1,), generator=generator))) % 10
                text = f"{text[:at]}{other}{text[at + 1 :]}"
            texts.append(rows[i]["prompt"] + text)
        ids, _ = pack(tokenizer, texts)
        return model(input_ids=ids, attention_mask=(ids != tokenizer.pad_token_id).long()).logits[:, 0], right.float()

    for step in range(steps):
        logits, right = draw(96)
        loss = F.binary_cross_entropy_with_logits(logits, right)
        optimizer.param_groups[0]["lr"] = 2e-3 * min(1.0, (step + 1) / 30) * (1 - step / steps)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    with torch.no_grad():
        logits, right = draw(1024)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return float(((logits > 0) == right.bool()).float().mean())
