"""What a person is told at the end of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trtl_rl.trainer.trainer import Trainer, TrainResult


def closing_text(trainer: Trainer, result: TrainResult) -> str:
    """What a person does next."""
    where = f"Everything is in {trainer.run_dir}: metrics.jsonl, ledger.json, checkpoints/, rollouts/, logs/."
    if result.nothing_to_do:
        again = trainer.resume_by.format(run_dir=trainer.run_dir)
        return (
            f"Nothing to do: the run had reached {result.reason} at step {result.step}. {where}\n"
            f"With more steps or a larger budget it goes on: {again}"
            + (f" steps={2 * result.step}" if again.startswith("trtl-rl") and result.reason == "steps" else "")
        )
    if len(result.budget) > 1:  # more than the number of steps was limited
        left = ", ".join(f"{key} {part['left']:.4g} of {part['limit']:.4g}" for key, part in result.budget.items())
        where = f"Left of the budget: {left}. {where}"
    if result.status == "interrupted":
        again = trainer.resume_by.format(run_dir=trainer.run_dir)
        return f"Interrupted after step {result.step} and saved. {where}\nGo on with: {again}"
    if result.reason == "no signal":
        from trtl_rl.trainer.loop import NO_SIGNAL_LIMIT

        return (
            f"Ended after step {result.step}: for {NO_SIGNAL_LIMIT} steps in a row no group had answers of different reward, "
            f"so there was nothing to learn from. {where}"
        )
    if trainer.config.lora.rank:
        where += (
            f"\nThe adapters are in {trainer.run_dir}/checkpoints/latest: PeftModel.from_pretrained(BASE, DIRECTORY) loads them, "
            "and Trainer.save_pretrained(DIRECTORY, merge=True) adds them to the base."
        )
    if trainer.config.model != "demo":
        return f"Reached {result.reason} after step {result.step}. {where}"
    return (
        f"Reached {result.reason} after step {result.step}. {where}\n"
        "Your own model and data: trtl-rl run examples/gsm8k.yaml model=DIRECTORY data=FILE.jsonl, where these lines of the\n"
        "file change: model, data, task.prompt_column, rewards, sampling.max_new_tokens, optimizer.lr.\n"
        "On a GPU: device=cuda emulates FP8 there, untried so far; the kernels for it are in no run yet (see the README)."
    )
