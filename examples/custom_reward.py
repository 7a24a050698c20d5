"""A reward of one's own, beside a built-in one: right sums count, long answers cost a little.

python examples/custom_reward.py
"""

from trtl_rl import Trainer, TrainerConfig
from trtl_rl.demo.task import demo_rows


def last_number(completions: list[str], answer: list[str], **columns: object) -> list[float | None]:
    """1 where the sum at the end is right; None, which leaves the answer out, where there is no number at all."""
    rewards: list[float | None] = []
    for text, right in zip(completions, answer, strict=True):
        sums = [part for part in text.replace(",", " ").split() if part.isdigit()]
        rewards.append(float(right.endswith(sums[-1])) if sums else None)
    return rewards


if __name__ == "__main__":
    trainer = Trainer(
        model="demo",
        reward_funcs=[last_number, "exact_match"],
        train_dataset=demo_rows(),
        args=TrainerConfig(steps=2, batch={"prompts": 4, "group_size": 4}, optimizer={"lr": 1e-4}),
    )
    print(trainer.train())
