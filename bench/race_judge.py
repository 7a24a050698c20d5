"""A small reward model for the demo's task, and a second evaluation target, as ``bench/race.py`` gives them to a run.

``judge`` is a Qwen3 of 2.7 times the policy's size that was trained on right answers: its reward is the least probability that it
gives to any token of an answer, as process reward models take the worst step's. Right answers are unique here, so that is
near 1 for them and near 0 for others. It reports its FLOPs, which a run's ledger counts as feedback, and says beforehand how
many they will be. ``final_sum`` looks at the last number of an answer only.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from trtl_rl.flops import formulas
from trtl_rl.flops.formulas import ModelShape

BATCH = 64
LEARNING_RATE = 3e-3


def final_sum(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    """1 where the number after the last comma is right, whatever stands before it."""
    pairs = zip(completions, answer, strict=True)
    return [float(text.strip().rpartition(",")[2] == right.rpartition(",")[2]) for text, right in pairs]


def sizes() -> Any:
    """The judge's configuration, 0.89 M parameters."""
    from transformers import Qwen3Config

    from trtl_rl.demo.task import SYMBOLS

    return Qwen3Config(
        vocab_size=3 + len(SYMBOLS), hidden_size=192, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, head_dim=48, max_position_embeddings=256, tie_word_embeddings=False, initializer_range=0.08,
        pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip


@functools.cache
def shape() -> ModelShape:
    """What fixes its FLOPs."""
    return ModelShape.from_hf_config(sizes())


@functools.cache
def load(model: str) -> Any:
    """The judge with its tokenizer. One thread, since it works beside the engine and the learner."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(model).eval(), AutoTokenizer.from_pretrained(model)


def least_probability(model: Any, tokenizer: Any, prompts: list[str], answers: list[str]) -> tuple[list[float], int]:
    """For each answer the least probability of any of its tokens, its end included; and the FLOPs of this."""
    import torch

    starts = [len(tokenizer(prompt)["input_ids"]) for prompt in prompts]
    texts = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    rows = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts]
    width = max(map(len, rows))
    ids = torch.tensor([row + [tokenizer.pad_token_id] * (width - len(row)) for row in rows])
    places, ends = torch.arange(1, width), torch.tensor(list(map(len, rows)))[:, None]
    judged = (places >= torch.tensor(starts)[:, None]) & (places < ends)
    with torch.inference_mode():  # filled up on the right: nothing before it attends to that
        probabilities = model(input_ids=ids[:, :-1]).logits.softmax(-1)
    given = probabilities.gather(-1, ids[:, 1:, None])[..., 0].masked_fill(~judged, 1.0)
    flops = sum(formulas.forward(shape(), start, len(row) - start) for start, row in zip(starts, rows, strict=True))
    return given.amin(1).tolist(), flops


class Judge:
    """A reward function that spends FLOPs and says so."""

    __name__ = "judge"

    def __init__(self) -> None:
        self._spent = 0

    def __call__(self, prompts: list[str], completions: list[str], model: str) -> list[float]:
        """How sure the judge is of the worst token of each answer."""
        rewards, flops = least_probability(*load(model), prompts, completions)
        self._spent += flops
        return rewards

    def take_flops(self) -> int:
        """What was spent since the last call."""
        spent, self._spent = self._spent, 0
        return spent

    def expected_flops(self, prompt_tokens: int, answer_tokens: int) -> int:
        """What one completion will cost; an answer's tokens include its end."""
        return formulas.forward(shape(), prompt_tokens, answer_tokens)


judge = Judge()


def train(directory: Path, steps: int, seed: int = 0) -> dict[str, float]:
    """Train a judge; returns its mean reward for right answers and for those with one wrong digit, and how often a threshold
    between the two would be right (``accuracy``)."""
    import random

    import torch
    import torch.nn.functional as F
    from transformers import Qwen3ForCausalLM

    from trtl_rl.demo.make import make_tokenizer
    from trtl_rl.demo.task import demo_rows

    torch.manual_seed(seed)
    torch.set_num_threads(1)
    tokenizer, rows = make_tokenizer(), demo_rows()
    prompt = len(rows[0]["prompt"])
    encoded = [[*tokenizer(row["prompt"] + row["answer"])["input_ids"], tokenizer.eos_token_id] for row in rows]
    width = max(map(len, encoded))
    inputs = torch.tensor([ids + [0] * (width - len(ids)) for ids in encoded])
    targets = torch.tensor([[-100] * prompt + ids[prompt:] + [-100] * (width - len(ids)) for ids in encoded])
    model = Qwen3ForCausalLM(sizes())
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(steps):
        chosen = torch.randint(len(rows), (BATCH,))
        logits = model(input_ids=inputs[chosen, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), targets[chosen, 1:].flatten(), ignore_index=-100)
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * min(1.0, (step + 1) / 20) * (1 - step / steps)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval().save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    rng = random.Random(seed)
    some = rng.sample(rows, 512)
    prompts, answers = [row["prompt"] for row in some], [row["answer"] for row in some]
    good, _ = least_probability(model, tokenizer, prompts, answers)
    bad, _ = least_probability(model, tokenizer, prompts, [spoil(answer, rng) for answer in answers])
    return {
        "accuracy": (sum(r > 0.5 for r in good) + sum(r <= 0.5 for r in bad)) / (len(good) + len(bad)),
        "reward_of_right": sum(good) / len(good),
        "reward_of_wrong": sum(bad) / len(bad),
    }


def spoil(answer: str, rng: Any) -> str:
    """The answer with one digit changed."""
    at = rng.choice([i for i, char in enumerate(answer) if char.isdigit()])
    return f"{answer[:at]}{(int(answer[at]) + rng.randint(1, 9)) % 10}{answer[at + 1 :]}"
