"""A task of one's own: any iterable of rows. Here they are made while the program runs, with columns for the reward.

python examples/custom_task.py
"""

import random
from collections.abc import Iterator

from trtl_rl import Trainer, TrainerConfig


def sums(count: int, seed: int) -> Iterator[dict[str, object]]:
    """Rows with a prompt, and what the reward needs to judge it."""
    generator = random.Random(seed)
    for _ in range(count):
        a, b = generator.randrange(100), generator.randrange(100)
        yield {"prompt": f"{a:02d}+{b:02d}=", "total": a + b, "carry": a % 10 + b % 10 > 9}


def right(completions: list[str], total: list[int], carry: list[bool], **columns: object) -> list[float]:
    """Sums with a carry count double."""
    return [
        (1.0 + carried) * text.endswith(str(wanted))
        for text, wanted, carried in zip(completions, total, carry, strict=True)
    ]


if __name__ == "__main__":
    args = TrainerConfig(steps=2, batch={"prompts": 4, "group_size": 4}, optimizer={"lr": 1e-4})
    print(Trainer(model="demo", reward_funcs=right, train_dataset=list(sums(200, seed=0)), args=args).train())
