"""LoRA through a whole run: configured, trained, refitted, resumed, and left as peft's adapters."""

from __future__ import annotations

import importlib.util
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import peft
import pytest
import torch
import transformers
from demo import ask, make_engine, small
from engine_dirs import build
from run_files import rows_of, same
from safetensors.torch import load_file, save_file
from test_adapters import adapted, bound

import trtl_rl.trainer.loop as loop_module
from trtl_rl import Callback, Trainer
from trtl_rl.config import load_config, validate_config
from trtl_rl.config_parts import Linear, LoraConfig
from trtl_rl.engines.directory import EngineDirectory
from trtl_rl.errors import UserError
from trtl_rl.flops import formulas
from trtl_rl.flops.formulas import ModelShape
from trtl_rl.kernels.kernel_set import KernelSet
from trtl_rl.model.bind import TrainableDecoder
from trtl_rl.model.description import LINEARS
from trtl_rl.model.source import find_model
from trtl_rl.model.weights import LORA_A, LORA_B
from trtl_rl.recipe.recipe import Recipe
from trtl_rl.refit.manifest import Manifest
from trtl_rl.refit.sender import send
from trtl_rl.trainer import lora
from trtl_rl.trainer.reference import freeze

BF16_BYTES = 2 * 34_816  # of adapters of rank 8 on every linear of the bundled model


def base_of(tensors: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in tensors.items() if not name.endswith((LORA_A, LORA_B))}


# --- configuration ---


def test_targets_are_the_linears_of_the_kernels() -> None:
    assert get_args(Linear) == LINEARS and LoraConfig().targets == list(LINEARS)
    assert load_config(None, ["lora.rank=4", "lora.targets=q_proj"]).lora.targets == ["q_proj"]
    assert load_config(None, ["lora.rank=4", "lora.targets=all-linear"]).lora.targets == list(LINEARS)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["lora.rank=8", "lora.dropout=0.1"], "there is no lora.dropout: dropout in training and none in rollouts"),
        (["lora.rank=8", "lora.use_dora=true"], "DoRA divides by norms"),
        (["lora.rank=8", "lora.targets=[q_proj, lm_head]"], "lm_head takes no adapter"),
        (["lora.rank=8", "lora.targets=[qq_proj]"], "lora.targets.0: .*'q_proj'"),
        (["lora.rank=8", "lora.targets=[]"], "lora.targets: .*at least 1"),
        (["lora.alpha=16"], "lora.alpha needs lora.rank"),
        (["lora.targets=q_proj"], "lora.targets needs lora.rank"),
        (["lora=8"], r"lora takes keys of its own \(rank, alpha, targets\)"),
        (["lora.rank=8", "engine={backend: tensorrt-llm, path: x}"], "lora.rank=8 does not go with .*takes the checkpoint's"),
    ],
)  # fmt: skip
def test_a_setting_of_lora_that_cannot_act_is_taken(settings: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        load_config(None, settings)


def test_beside_adapters_a_refit_sends_changes() -> None:
    assert load_config(None, ["lora.rank=8"]).refit_mode == "delta"
    assert load_config(None, ["lora.rank=8", "refit.mode=full"]).refit_mode == "full"


def test_what_a_lora_config_of_peft_says_is_lost() -> None:
    given = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["v_proj", "q_proj"], task_type="CAUSAL_LM")
    assert lora.from_peft(given, "qwen3") == LoraConfig(rank=4, alpha=8, targets=["q_proj", "v_proj"])
    assert lora.from_peft(peft.LoraConfig(target_modules="all-linear"), "qwen3") == LoraConfig(rank=8, alpha=8)
    assert lora.from_peft(peft.LoraConfig(), "qwen3").targets == ["q_proj", "v_proj"]  # as peft has it for Qwen3
    rooted = lora.from_peft(peft.LoraConfig(r=16, lora_alpha=8, use_rslora=True, target_modules=["q_proj"]), "qwen3")
    model = peft.get_peft_model(adapted("qwen3").unload(), peft.LoraConfig(r=16, lora_alpha=8, use_rslora=True))
    (scaling,) = {m.scaling["default"] for m in model.modules() if hasattr(m, "lora_A")}
    assert rooted.alpha / rooted.rank == scaling


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (peft.LoraConfig(lora_dropout=0.1), "lora_dropout=0.1: dropout in training and none in rollouts"),
        (peft.LoraConfig(use_dora=True, bias="all"), "bias='all': .*; use_dora=True: "),
        (peft.LoraConfig(modules_to_save=["lm_head"]), "modules_to_save=.*: beside adapters everything is frozen"),
        (peft.LoraConfig(init_lora_weights="pissa"), "others begin by changing the base"),
        (peft.LoraConfig(rank_pattern={"q_proj": 2}), "rank_pattern=.*: adapters have one rank, in every layer"),
        (peft.LoraConfig(task_type="SEQ_CLS"), "task_type=SEQ_CLS: the policy is a causal language model"),
        (peft.LoraConfig(target_modules=r".*\.q_proj"), "is a pattern"),
        (peft.LoraConfig(target_modules=["lm_head"]), "lm_head takes no adapter"),
        (peft.IA3Config(), "peft_config is a IA3Config"),
    ],
    ids=str,
)
def test_what_is_not_computed_of_peft_is_dropped_without_a_word(given: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        lora.from_peft(given, "qwen3")


def test_a_trainer_takes_a_lora_config_as_trl_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = peft.LoraConfig(r=4, target_modules=["q_proj"])
    trainer = Trainer(args=small(tmp_path / "run"), peft_config=given)
    assert trainer.config.lora == LoraConfig(rank=4, alpha=8, targets=["q_proj"]) and trainer.config.steps == 3
    with pytest.raises(UserError, match="say the same thing"):
        Trainer(args=small(tmp_path / "run", lora={"rank": 4}), peft_config=given)
    with pytest.raises(UserError, match="no trained adapters"):
        trainer.save_pretrained(tmp_path / "saved")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"lora.rank=4 needs peft: pip install 'trtl-rl\[lora\]'"):
        Trainer(args=small(tmp_path / "run", lora={"rank": 4}))


def test_adapters_given_as_a_model_are_told_from_one(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has adapters of peft already"):
        Trainer(model=adapted("qwen3"), args=small(tmp_path / "run"))
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match="holds adapters of peft, and no model: name the base"):
        find_model(str(tmp_path))


# --- parts ---


def test_a_refit_of_adapters_decodes_the_base_again() -> None:
    """Packing it anew would cost as much as a full refit, at every step."""
    decoder = bound(adapted("qwen3", "fp8_block"))
    engine = make_engine(decoder, context=96, stop_ids=())
    arguments: dict[str, Any] = {"coverage": decoder.description.coverage.digest, "bucket_bytes": 2**16}
    first = send(engine, decoder.snapshot, version=0, **arguments)
    packed = {name: operand.packed for name, operand in engine.weights._operands.items()}
    parameter = decoder.parameters["model.layers.1.mlp.up_proj.lora_B.weight"]
    with torch.no_grad():
        parameter.add_(0.25)
    before = first.sent
    tensors = decoder.refresh(1)
    frozen = base_of(tensors)
    assert all(tensors[name] is before.tensors[name] for name in frozen)
    assert before.digests_in(tensors).keys() == frozen.keys()
    second = send(engine, tensors, version=1, mode="delta", previous=before, **arguments)
    assert second.bytes <= 2 * parameter.numel() < first.bytes / 50
    for name, operand in engine.weights._operands.items():
        assert operand.packed is packed[name] and operand.values.numel() == 0, name
    # and it still has the trainer's bits, which a base of another version would not
    (done,) = engine.probe([ask(-1, ids=[5, 9, 2, 30], new=12, logprobs=True)])
    with torch.no_grad():
        ours, _ = decoder.forward([[5, 9, 2, 30, *done.ids]], [len(done.ids)], 1.0)
    assert torch.equal(ours, torch.tensor(done.logprobs))


def test_the_reference_of_a_kl_penalty_follows_the_adapters() -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(find_model("demo").path, dtype=torch.float32)
    Recipe.load("fp8_block").apply(model)
    lora.Adapters(model, LoraConfig(rank=2), seed=3, base="demo")
    kernels = KernelSet(False, backward=True)
    decoder = TrainableDecoder(model, kernels, 64)
    reference = freeze(decoder, kernels)
    decoder.refresh(0)
    ids = ([[7, 10, 13, 11, 8, 14, 5, 6, 7]], [3], 1.0)
    with torch.no_grad():
        start, _ = decoder.forward(*ids)
        assert torch.equal(reference.forward(*ids)[0], start)
        for name, parameter in decoder.parameters.items():
            if name.endswith(LORA_B):
                parameter.normal_(std=0.05)
        decoder.refresh(1)
        assert not torch.equal(decoder.forward(*ids)[0], start)
        assert torch.equal(reference.forward(*ids)[0], start)
    assert reference.weights.layers[0].down.values is decoder.weights.layers[0].down.values, "a second copy of the base"


def test_flops_of_adapters_that_are_planned_are_not_those_that_run() -> None:
    model = adapted("qwen3", rank_pattern={}, targets=["q_proj", "v_proj", "o_proj", "down_proj"], r=3)
    plain = ModelShape.from_hf_config(model.config)
    assert plain.adapted(3, ["q_proj", "v_proj", "o_proj", "down_proj"]) == ModelShape.from_model(model)
    assert plain.adapted(0, ["q_proj"]) == plain


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("again", [False, True])
def test_a_filling_row_costs_something_else_than_a_row(rank: int, again: bool) -> None:
    """But for attention, which it takes no part in."""
    shape = replace(ModelShape(2, 8, 2, 1, 4, 16, 10).adapted(rank, LINEARS), heads=0)  # neither q and o, nor attention
    parts = {"checkpointing": again, "head_again": again}
    rows = formulas.learning(shape, 1, 7) + formulas.recompute(shape, 1, 7, **parts) + 2 * formulas.forward(shape, 1, 7)
    assert formulas.padding(shape, 7, 7, scored=2, **parts) == rows


# --- a whole run ---


class Watched:
    """Records what each refit sent."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.bases: list[str] = []

        def recorded(*arguments: Any, **rest: Any) -> Any:
            report = send(*arguments, **rest)
            self.bases.append(Manifest.of(base_of(dict(report.sent.tensors)), 0, "").digest)
            return report

        patch.setattr(loop_module, "send", recorded)


class StopAt(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, trainer: Trainer, step: int, metrics: dict[str, float]) -> None:
        if step == self.step:
            trainer.stop()


def logprobs_of(model: Any, ids: list[int], answer: int) -> torch.Tensor:
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, :-1]
    return torch.log_softmax(logits, -1).gather(-1, torch.tensor(ids[1:])[:, None])[-answer:, 0]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_with_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From an engine directory, with a KL penalty, interrupted and resumed; its adapters in peft, merged, and as FP8."""
    model = Path(shutil.copytree(find_model("demo").path, tmp_path / "model"))
    directory = build(model, tmp_path / "engine")
    keys: dict[str, Any] = {
        "model": str(model),
        "steps": 4,
        "lora": {"rank": 8},
        "engine": {"path": str(directory.path), "timeout": 60},
        "loss": {"kl_coefficient": 0.01},
    }
    watched = Watched(monkeypatch)
    config = small(tmp_path / "run", **keys)
    trainer = Trainer(args=config)
    trainer.train()
    steps = [row["metrics"] for row in rows_of(tmp_path / "run", "step")]
    assert all(row["mismatch/differing_tokens"] == 0 < row["mismatch/tokens"] for row in steps)
    assert all(0 < row["refit/bytes"] <= BF16_BYTES for row in steps)
    assert any(row.get("kl", 0) > 0 for row in steps)
    assert set(watched.bases) == {directory.weights_digest}, "the base's codes have changed"
    said = " ".join(row["text"] for row in rows_of(tmp_path / "run", "message"))
    assert "LoRA: 14 adapters of rank 8, 34,816 trained parameters." in said
    assert f"a refit sends at most {BF16_BYTES:,} of " in said
    assert "The adapters are in" in rows_of(tmp_path / "run", "end")[-1]["text"]
    assert json.loads((tmp_path / "run" / "ledger.json").read_text())["trained_parameters"] == 34_816

    # a checkpoint holds the adapters and not the base; a resume ends with the same bits
    saved = trainer.newest_checkpoint()
    assert saved is not None and not (saved / "model.safetensors").exists()
    stock = transformers.AutoModelForCausalLM.from_pretrained(saved)
    assert sum(".lora_" in name for name, _ in stock.named_parameters()) == 28
    trained = load_file(saved / lora.WEIGHTS)
    assert len(trained) == 28 and all(tensor.dtype == torch.float32 for tensor in trained.values())
    other = small(tmp_path / "other", **keys)
    assert Trainer(args=other, callbacks=[StopAt(2)]).train().step == 2
    assert Trainer(args=other, resume=True).train().step == 4
    assert same(load_file(tmp_path / "other" / "checkpoints" / "latest" / lora.WEIGHTS), trained)
    assert set(watched.bases) == {directory.weights_digest}
    with pytest.raises(UserError, match="Not as in the run that was saved: lora"):
        Trainer(args=small(tmp_path / "other", **{**keys, "steps": 5, "lora": {"rank": 4}}), resume=True).train()

    # peft's own forward over the base agrees with ours to float rounding, with the recipe off
    base = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    loaded = peft.PeftModel.from_pretrained(base, str(trainer.save_pretrained(tmp_path / "adapters")))
    ours = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    lora.Adapters(ours, config.lora, seed=0, base="").read(saved)
    decoder = TrainableDecoder(ours, KernelSet(False), 64)
    decoder.refresh(0)
    ids = [7, 10, 13, 11, 8, 14, 5, 6, 7, 9]
    with torch.no_grad():
        expected, _ = decoder.forward([ids], [4], 1.0)
    with loaded.disable_adapter():
        assert not torch.allclose(logprobs_of(loaded, ids, 4), expected, atol=1e-3), "nothing was trained"
    assert torch.allclose(logprobs_of(loaded, ids, 4), expected, atol=2e-5)

    # merged: the sum is rounded to BF16 (relative 2^-9 of each weight), and its FP8 codes are others
    merged = trainer.save_pretrained(tmp_path / "merged", merge=True)
    whole = transformers.AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)
    assert torch.allclose(logprobs_of(whole, ids, 4), expected, atol=0.05)
    with pytest.warns(UserWarning, match="Merging requantises"):
        coded = EngineDirectory.open(trainer.save_pretrained(tmp_path / "fp8", fp8=True))
    assert coded.model.endswith("trained, adapters merged") and coded.weights_digest != directory.weights_digest
    with trainer:
        assert trainer.generate(["12+13="], greedy=True)[0][0]

    # adapters of one base are not put on another
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][0, 0] += 1
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match="its weights are others now"):
        trainer.save_pretrained(tmp_path / "again")
    keys["engine"] = {"timeout": 60}
    with pytest.raises(UserError, match="Not as in the run that was saved: weights of model"):
        Trainer(args=small(tmp_path / "other", **{**keys, "steps": 5}), resume=True).train()


def test_a_run_without_adapters_has_none_to_merge(tmp_path: Path) -> None:
    trainer = Trainer(args=validate_config({"run_dir": str(tmp_path / "run")}))
    with pytest.raises(UserError, match="merge=True, but the run has no adapters"):
        trainer.save_pretrained(tmp_path / "merged", merge=True)
