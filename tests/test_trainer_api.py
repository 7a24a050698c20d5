"""What a program does with a ``Trainer`` beside training: callbacks, objects, answers, evaluation, a checkpoint for others."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from demo import make_decoder, small
from run_files import digits, rows_of
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from trtl_rl import Callback, Trainer, TrainerConfig
from trtl_rl.config import RunConfig
from trtl_rl.config_data import EvaluationConfig
from trtl_rl.demo.task import demo_rows
from trtl_rl.engines.directory import EngineDirectory
from trtl_rl.errors import UserError
from trtl_rl.model.source import find_model
from trtl_rl.trainer.checks import check_one_process, launcher_notes
from trtl_rl.trainer.logs import LoggedMetrics

pytestmark = pytest.mark.timeout(300)
ROWS = demo_rows()[::25]


class Recorder(Callback):
    def __init__(self, stop_at: int = 0) -> None:
        self.steps: list[int] = []
        self.groups: list[int] = []
        self.refits: list[int] = []
        self.saved: list[str] = []
        self.stop_at = stop_at

    def on_step(self, trainer: Trainer, step: int, metrics: dict[str, float]) -> None:
        assert "reward" in metrics and "timing_s/step" in metrics
        self.steps.append(step)
        if step == self.stop_at:
            trainer.stop()

    def on_group(self, trainer: Trainer, group: Any) -> None:
        assert len(group.rewards) == len(group.completions) == 4
        self.groups.append(group.index)

    def on_refit(self, trainer: Trainer, version: int, metrics: dict[str, float]) -> None:
        assert metrics["refit/bytes"] > 0
        self.refits.append(version)

    def on_checkpoint(self, trainer: Trainer, path: Path) -> None:
        assert (path / "state.json").exists()
        self.saved.append(path.name)


@pytest.mark.slow
def test_callbacks_follow_a_run_and_stop_it(tmp_path: Path) -> None:
    seen = Recorder(stop_at=2)
    args = TrainerConfig(
        **small(tmp_path / "run").model_dump(exclude={"steps", "run_dir"}),
        max_steps=9,
        output_dir=str(tmp_path / "run"),
    )
    result = Trainer(reward_funcs=digits, args=args, callbacks=[seen]).train()
    assert (result.status, result.step) == ("interrupted", 2)
    said = [row["text"] for row in rows_of(tmp_path / "run", "message")]
    assert any("max_steps → steps=9; output_dir → run_dir=" in text for text in said)
    assert seen.steps == seen.refits == [1, 2]
    assert seen.groups[:4] == [0, 1, 2, 3] and seen.saved == ["step-00000002"]

    class StopsFromAnotherThread(Recorder):
        def on_group(self, trainer: Trainer, group: Any) -> None:
            super().on_group(trainer, group)
            trainer.stop()

    again = StopsFromAnotherThread()
    result = Trainer(reward_funcs=digits, args=args, callbacks=again, resume=True).train()
    assert result.status == "interrupted" and result.step < 9 and again.groups and again.saved


@pytest.mark.slow
def test_a_model_object_its_answers_its_evaluation_and_its_checkpoints(tmp_path: Path) -> None:
    source = find_model("demo").path
    model = AutoModelForCausalLM.from_pretrained(source)
    trainer = Trainer(
        model=model,
        processing_class=AutoTokenizer.from_pretrained(source),
        reward_funcs=digits,
        train_dataset=ROWS,
        eval_dataset=ROWS[100:116],
        args=small(tmp_path / "run", steps=2),
    )
    with trainer:
        before = trainer.generate(["12+13=", "20+21="], samples=3)
        again = trainer.generate(["12+13=", "20+21="], samples=3)
        assert [len(answers) for answers in before] == [3, 3] and before == again
        assert 0.2 < trainer.evaluate()["eval/greedy_exact_match"] <= 1
        trainer.train()
        assert trainer.generate(["12+13="], greedy=True)[0][0]
    assert (tmp_path / "run" / "start_model" / "model.safetensors").exists()
    assert rows_of(tmp_path / "run", "evaluation")[-1]["step"] == 2

    plain = trainer.save_pretrained(tmp_path / "plain")
    found = AutoModelForCausalLM.from_pretrained(plain).state_dict()
    trained = load_file(trainer.newest_checkpoint() / "model.safetensors")  # type: ignore[operator]
    assert all(torch.equal(found[name].float(), value.bfloat16().float()) for name, value in trained.items())
    assert AutoTokenizer.from_pretrained(plain).encode("12+13=") == AutoTokenizer.from_pretrained(source).encode(
        "12+13="
    )

    coded = EngineDirectory.open(trainer.save_pretrained(tmp_path / "fp8", fp8=True))
    coded.check()
    assert "trained" in coded.model
    names = {name for name in coded.tensors() if name.endswith("weight_scale_inv")}
    assert names, "no FP8 codes were written"
    with pytest.raises(UserError, match="not an empty directory"):
        trainer.save_pretrained(tmp_path / "fp8")


def test_epochs_become_steps_once_the_data_is_known(tmp_path: Path) -> None:
    args = TrainerConfig(
        run_dir=str(tmp_path / "run"), num_train_epochs=2, per_device_train_batch_size=80, warmup_ratio=0.5
    )
    trainer = Trainer(reward_funcs=digits, train_dataset=ROWS, args=args)
    assert trainer.config.steps == 80 == 2 * len(ROWS) // 10
    assert trainer.config.optimizer.warmup_steps == 40


def test_weights_of_rewards_as_trl_gives_them(tmp_path: Path) -> None:
    args = TrainerConfig(run_dir=str(tmp_path / "run"), reward_weights=[1.0, 0.25])
    trainer = Trainer(reward_funcs=[digits, digits], train_dataset=ROWS, args=args)
    assert [reward.weight for reward in trainer.rewards] == [1.0, 0.25]
    with pytest.raises(UserError, match="2 values for 1 reward functions"):
        Trainer(reward_funcs=digits, train_dataset=ROWS, args=args)


def test_objects_of_the_wrong_kind_are_refused_with_what_to_give(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict
    from transformers import TrainerCallback

    args = RunConfig(run_dir=str(tmp_path / "run"))
    good: dict[str, Any] = {"reward_funcs": digits, "train_dataset": ROWS, "args": args}
    for wrong, said in [
        ({"args": {"steps": 1}}, "args is of type dict.*give TrainerConfig"),
        ({"args": ROWS}, "args is a list of rows.*Rows go to train_dataset"),
        ({"train_dataset": ["12+13="]}, "train_dataset holds str '12.13='"),
        ({"train_dataset": {"prompt": ["12+13="]}}, "mapping with the keys prompt: give rows"),
        ({"train_dataset": DatasetDict(test=Dataset.from_list(ROWS))}, r"give one of its splits, such as .*\['test'\]"),
        ({"train_dataset": 7}, "train_dataset is of type int"),
        ({"callbacks": [TrainerCallback()]}, "callbacks holds TrainerCallback.*on_step"),
        ({"callbacks": print}, "callbacks holds print"),
        ({"model": 3}, "model is of type int"),
        ({"processing_class": object()}, "processing_class is of type object"),
        ({"optimizers": (1, 2)}, r"optimizers is not taken: the optimizer is AdamW"),
    ]:
        with pytest.raises(UserError, match=said):
            Trainer(**{**good, **wrong})
    with pytest.raises(TypeError, match="unexpected keyword argument 'optimisers'"):
        Trainer(**good, optimisers=None)
    Trainer("demo", digits, args, ROWS, optimizers=None)  # in TRL's order; None asks for nothing


def test_names_stand_for_data_and_tokenizer(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    args = RunConfig(run_dir=str(tmp_path / "run"), evaluation=EvaluationConfig(prompts=3))
    demo_model = find_model("demo").path
    trainer = Trainer(
        "demo", digits, args, str(file), eval_dataset=file, processing_class=demo_model, callbacks=Recorder()
    )
    assert (trainer.config.data, trainer.config.evaluation.data) == (str(file), str(file))
    assert len(trainer.rows) == len(ROWS) and trainer.resume_by.startswith("the same Trainer")


def test_nothing_to_evaluate_on_is_said(tmp_path: Path) -> None:
    trainer = Trainer(reward_funcs=digits, train_dataset=ROWS, args=RunConfig(run_dir=str(tmp_path / "run")))
    with pytest.raises(UserError, match="There is nothing to evaluate on"):
        trainer.evaluate()


def test_several_learners_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="started 2 processes, and the learner runs in one"):
        check_one_process()
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(UserError, match=r"asks for FSDP \(ACCELERATE_USE_FSDP\)"):
        check_one_process()


def test_what_a_launcher_sets_for_accelerate_neither_acts_nor_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accumulation steps would divide the loss, and dynamo would compile operators that are packages already."""
    from accelerate.state import AcceleratorState

    from trtl_rl.config_parts import OptimizerConfig
    from trtl_rl.flops.formulas import ModelShape
    from trtl_rl.losses.asympo import ASymPO
    from trtl_rl.trainer.learner import Learner

    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR")
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    AcceleratorState._reset_state(True)
    decoder = make_decoder("none")
    shape = ModelShape.from_model(decoder.model)
    made = Learner(decoder, ASymPO(), OptimizerConfig(), shape=shape, temperature=1.0, steps=1).accelerator
    found = made.gradient_accumulation_steps, made.mixed_precision, made.state.dynamo_plugin.backend.value
    AcceleratorState._reset_state(True)
    assert found == (1, "no", "NO")
    said = launcher_notes()
    assert [text.partition(" has")[0].rpartition(" ")[2] for text in said] == [
        "mixed_precision=bf16",
        "dynamo_backend=INDUCTOR",
        "gradient_accumulation_steps=4",
    ]


def test_a_script_sees_steps_and_messages_of_its_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "trtl_rl")
    metrics = LoggedMetrics(tmp_path / "metrics.jsonl")
    for done in range(3):
        metrics.progress("compiling operators", done, 3)
        metrics.progress("checkpoint", done, 3)
    metrics.message("warning", "something is odd")
    step = {"reward": 0.5, "rewards/right/mean": 0.25, "completions/mean_length": 16.0, "timing_s/step": 1.5}
    metrics.step(3, step)
    metrics.write("evaluation", step=3, metrics={"eval/right": 0.5, "eval/right/ci_low": 0.1})
    metrics.close()
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", "compiling operators ..."),
        ("WARNING", "warning: something is odd"),
        ("INFO", "step 3: reward 0.5, right 0.25, length 16, 1.5 s"),
        ("INFO", "evaluation at step 3: right 0.5"),
    ]
