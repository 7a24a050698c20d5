"""The demo's task with six digits: answers of 60 tokens with their carries written out, judged exactly, and a start model.

    python bench/long_addition.py DIRECTORY

>>> answer(905, 38)
'5+8=13,0+3+1=04,9+0+0=09,0+0+0=00,0+0+0=00,0+0+0=00,0000943'
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

from trtl_rl.demo.make import make_model, make_tokenizer

DIGITS = 6
NEW_TOKENS = 64  # an answer has 60 with the end of the sequence
STEPS = 260
BATCH = 64
LEARNING_RATE = 3e-3
SMOOTHING = 0.02


def answer(a: int, b: int) -> str:
    """Digit by digit from the ones on, with the carry and a sum of two digits; then the result, with leading zeros."""
    parts, carry = [], 0
    for place in range(DIGITS):
        x, y = a // 10**place % 10, b // 10**place % 10
        total = x + y + carry
        parts.append(f"{x}+{y}=" * (place == 0) + f"{x}+{y}+{carry}=" * (place > 0) + f"{total:02d}")
        carry = total // 10
    return ",".join([*parts, f"{a + b:0{DIGITS + 1}d}"])


def rows(count: int, seed: int) -> list[dict[str, str]]:
    """Random sums ``a+b=`` and their answers."""
    drawn = random.Random(seed)
    pairs = [(drawn.randrange(10**DIGITS), drawn.randrange(10**DIGITS)) for _ in range(count)]
    return [{"prompt": f"{a:0{DIGITS}d}+{b:0{DIGITS}d}=", "answer": answer(a, b)} for a, b in pairs]


def identity() -> str:
    """Changes with this file: start models of other versions of it are not taken for this one's."""
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]


def make(directory: Path, steps: int = STEPS, smoothing: float = SMOOTHING, seed: int = 0) -> None:
    """Write a model of the demo's sizes that has seen the task for a short time: it is sampled right about once in four."""
    torch.manual_seed(seed)
    tokenizer = make_tokenizer()
    model = make_model(len(tokenizer))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    prompt = 2 * DIGITS + 2
    for step in range(steps):
        texts = [row["prompt"] + row["answer"] for row in rows(BATCH, 1_000_000 + step)]
        ids = torch.tensor([[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts])
        logits = model(input_ids=ids[:, :-1]).logits[:, prompt - 1 :]
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, prompt:].flatten(), label_smoothing=smoothing)
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * min(1.0, (step + 1) / 20) * (1 - step / steps)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 49 and "-v" in sys.argv:
            right = (logits.argmax(-1) == ids[:, prompt:]).all(-1).float().mean()
            p = torch.log_softmax(logits, -1).gather(-1, ids[:, prompt:, None])[..., 0].sum(-1).exp().mean()
            print(step + 1, round(float(loss.detach()), 4), round(float(right), 3), round(float(p), 3), flush=True)
    model.bfloat16().save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    generation = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    make(Path(sys.argv[1]))
