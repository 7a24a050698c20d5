"""A task whose answers have a length dial, judged exactly: continue three digits by a[t] = (a[t-1] + 3 a[t-3]) mod 7.

The right answer to a prompt is unique for every length. Each digit follows from digits that were written before, so an early
mistake spoils an exact match; partial credit is for every digit that follows from what the model itself wrote. All 342 states
but 0, 0, 0 lie on one cycle of that length: no short loop obeys the rule, and zeros, which would, get no credit. A loop with one
mistake in it still earns most of the reward, so exact matches are reported beside it. A start model takes half
a minute of supervised training.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from transformers import Qwen3ForCausalLM

from trtl_rl.demo.make import make_model, make_tokenizer

PROMPT = 3
BASE = 7
LEARNING_RATE = 3e-3
SMOOTHING = 0.06
TOKENIZER = make_tokenizer()
DIGITS: list[int] = TOKENIZER("0123456")["input_ids"]


def prompts() -> list[list[int]]:
    """Token ids of all 342 starts but 0, 0, 0."""
    return [[DIGITS[i // 49], DIGITS[i // 7 % 7], DIGITS[i % 7]] for i in range(1, BASE**3)]


def answer(prompt: Sequence[int], length: int) -> list[int]:
    """Token ids of the one right answer of ``length`` digits."""
    values = [DIGITS.index(token) for token in prompt]
    while len(values) < PROMPT + length:
        values.append((values[-1] + 3 * values[-3]) % BASE)
    return [DIGITS[value] for value in values[PROMPT:]]


def right_share(prompt: Sequence[int], completion: Sequence[int]) -> float:
    """Reward: share of the digits that obey the rule, given those before them; 1 is an exact match."""
    ids = [*prompt, *completion]
    right = 0
    for t in range(PROMPT, len(ids)):
        before = ids[t - PROMPT : t]
        known = all(token in DIGITS for token in before) and set(before) != {DIGITS[0]}
        right += known and ids[t] == answer(before, 1)[0]
    return right / len(completion)


def start_model(seed: int, steps: int = 250, length: int = 256, batch: int = 8) -> Qwen3ForCausalLM:
    """A Qwen3 of the demo's sizes, trained for a short time to go on by the rule after ``length`` digits or fewer; float32.

    One digit in ten of its texts is drawn at random, so that it goes on after a mistake too. Label smoothing keeps its
    distribution wide: a sampled digit is wrong now and then even where the likeliest is right.
    """
    torch.manual_seed(seed)
    model = make_model(len(TOKENIZER))
    model.config.architectures = ["Qwen3ForCausalLM"]
    generator, tokens = torch.Generator().manual_seed(seed), torch.tensor(DIGITS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(steps):
        digits = torch.randint(BASE, (batch, PROMPT + length), generator=generator)
        astray = torch.rand(digits.shape, generator=generator) < 0.1
        rule = torch.zeros_like(digits)
        for t in range(PROMPT, PROMPT + length):
            rule[:, t] = (digits[:, t - 1] + 3 * digits[:, t - 3]) % BASE
            digits[:, t] = torch.where(astray[:, t], digits[:, t], rule[:, t])
        logits = model(input_ids=tokens[digits[:, :-1]]).logits[:, PROMPT - 1 :]
        targets = tokens[rule[:, PROMPT:]].flatten()
        loss = F.cross_entropy(logits.flatten(0, 1), targets, label_smoothing=SMOOTHING)
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * min(1.0, (step + 1) / 20) * (1 - step / steps)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model.eval()
