"""The two sides of ``vs_trl.py``, each a process of its own: ``python vs_trl_sides.py ours|trl JOB.json``.

Both read a job (a JSON object, see ``demo_job`` in ``vs_trl.py``), train, and write ``result.json`` beside it: seconds since
training began at the end of every optimizer step, and completions, tokens and rewards of every call of the reward. Where
the job asks for it they keep the weights of every n-th step in memory, and write them to ``weights-STEP.safetensors`` when
training is over. The side of TRL runs in an environment of its own and takes nothing from trtl-rl but the reward function.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

JOB = json.loads(Path(sys.argv[2]).read_text())
os.environ["OMP_NUM_THREADS"] = str(JOB["trl_threads"] if sys.argv[1] == "trl" else 1)
os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[: JOB["cores"]]))  # the engine's process inherits it

import torch  # noqa: E402

from trtl_rl.rewards.builtin import exact_match  # noqa: E402

ROWS: list[dict[str, Any]] = JOB["rows"]


class Record:
    """What a side notes while it trains."""

    def __init__(self) -> None:
        self.began = 0.0
        self.ends: list[float] = []
        self.batches: list[tuple[int, int, float]] = []  # completions, tokens, sum of rewards of a call of the reward
        self.weights: dict[int, dict[str, torch.Tensor]] = {}

    def begin(self) -> None:
        self.began = time.perf_counter()

    def end(self, model: torch.nn.Module) -> None:
        """An optimizer step has ended."""
        self.ends.append(time.perf_counter() - self.began)
        every = JOB["snapshot_every"]
        if every and len(self.ends) % every == 0:
            self.weights[len(self.ends)] = {name: p.detach().clone() for name, p in model.named_parameters()}

    def beyond_goal(self) -> bool:
        """Whether the last four batches of completions together reached the reward that the job stops at."""
        last = self.batches
        limit = JOB["stop_at"]
        if limit is None or sum(batch[0] for batch in last) < 1024:
            return False
        taken, right = 0, 0.0
        for completions, _, rewards in reversed(last):
            taken, right = taken + completions, right + rewards
            if taken >= 1024:
                break
        return right / taken >= limit and len(self.ends) % JOB["snapshot_every"] == 0

    def reward(self, completions: list[Any], completion_ids: list[list[int]], **columns: Any) -> list[float]:
        """The job's reward, in the convention that both sides share."""
        if JOB["reward"] == "exact_match":
            values = [float(v or 0) for v in exact_match(completions, **columns)]
        else:  # every group has a signal, so that no side can leave any out
            values = [sum(ids) % 7 / 7 for ids in completion_ids]
        self.batches.append((len(values), sum(map(len, completion_ids)), sum(values)))
        return values

    def write(self, **more: Any) -> None:
        from safetensors.torch import save_file

        directory = Path(sys.argv[2]).parent
        for step, tensors in self.weights.items():
            save_file(tensors, directory / f"weights-{step}.safetensors")
        result = {"step_ends": self.ends, "batches": self.batches, **more}
        (directory / "result.json").write_text(json.dumps(result))


def train_ours(record: Record) -> None:
    """``Trainer`` with the job's configuration."""
    from trtl_rl import Trainer
    from trtl_rl.config import validate_config
    from trtl_rl.rewards.reward import Reward
    from trtl_rl.trainer.learner import Learner
    from trtl_rl.trainer.rollouts import RolloutWorker

    update, start = Learner.update, RolloutWorker.start

    def observed_update(self: Learner, *arguments: Any) -> Any:
        done = update(self, *arguments)
        record.end(self.decoder.model)
        if record.beyond_goal():
            trainer.stop()
        return done

    def observed_start(self: RolloutWorker) -> None:
        record.begin()
        start(self)

    Learner.update, RolloutWorker.start = observed_update, observed_start  # type: ignore[method-assign]
    config = validate_config({**JOB["ours"], "run_dir": str(Path(sys.argv[2]).parent / "run")})
    reward = Reward("observed", record.reward, in_process=True)  # where it notes what it sees
    trainer = Trainer(reward_funcs=reward, train_dataset=ROWS, args=config)
    trainer.train()
    record.write()


def train_trl(record: Record) -> None:
    """``GRPOTrainer`` with the job's arguments."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class Observer(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            record.begin()

        def on_step_end(self, args: Any, state: Any, control: Any, model: torch.nn.Module, **more: Any) -> None:
            record.end(model)
            control.should_training_stop |= record.beyond_goal()

    torch.set_num_threads(JOB["trl_threads"])
    attention = JOB.get("attention", "sdpa")
    model = AutoModelForCausalLM.from_pretrained(JOB["model"], dtype=torch.float32, attn_implementation=attention)
    args = GRPOConfig(
        output_dir=str(Path(sys.argv[2]).parent / "trl"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to="none",
        logging_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        remove_unused_columns=False,
        **JOB["trl"],
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=record.reward,
        args=args,
        train_dataset=Dataset.from_list(ROWS),
        processing_class=AutoTokenizer.from_pretrained(JOB["model"]),
        callbacks=[Observer()],
    )
    trainer.train()
    import transformers
    import trl

    record.write(
        versions={"trl": trl.__version__, "transformers": transformers.__version__, "torch": torch.__version__}
    )


if __name__ == "__main__":
    {"ours": train_ours, "trl": train_trl}[sys.argv[1]](Record())
