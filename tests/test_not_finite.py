"""NaN and infinite values: of weights, before an engine hears of them, and of activations, by the module they come from."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
import torch
from demo import ask, load, make_decoder, make_engine, small
from run_files import checkpoints, digits, rows_of
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from trtl_rl import Trainer
from trtl_rl.cli.main import app
from trtl_rl.errors import EngineError
from trtl_rl.kernels import autograd
from trtl_rl.kernels.kernel_set import KernelSet
from trtl_rl.kernels.ops import pack
from trtl_rl.model import finite
from trtl_rl.model.bind import TrainableDecoder
from trtl_rl.model.kv import Blocks, Rows
from trtl_rl.model.layer import decoder_layer
from trtl_rl.model.source import find_model
from trtl_rl.refit.sender import send
from trtl_rl.rollout import Group
from trtl_rl.trainer.learner import Learner

# Weights that are finite in bfloat16, and the module where products or sums of them overflow float32.
OVERFLOWS: dict[str, dict[str, float]] = {
    "model.layers.1.self_attn.q_proj": {"model.layers.1.self_attn.q_proj.weight": 3e38},
    "model.layers.1.self_attn.v_proj": {"model.layers.1.self_attn.v_proj.weight": 3e38},
    "model.layers.0.self_attn.o_proj": {"model.layers.0.self_attn.o_proj.weight": 3e38},
    "model.layers.1.mlp.gate_proj": {"model.layers.1.mlp.gate_proj.weight": 3e38},
    "model.layers.0.mlp.up_proj": {"model.layers.0.mlp.up_proj.weight": 3e38},
    "model.layers.1.mlp.act_fn": {
        "model.layers.1.mlp.gate_proj.weight": 1e20,
        "model.layers.1.mlp.up_proj.weight": 1e20,
    },
    "model.layers.1.mlp.down_proj": {"model.layers.1.mlp.down_proj.weight": 3e38},
    # Finite states whose squares overflow: a norm would make zeros of them.
    "model.layers.1.input_layernorm": {"model.layers.0.mlp.down_proj.weight": 1e25},
    "model.layers.1.post_attention_layernorm": {"model.layers.1.self_attn.o_proj.weight": 1e25},
    "model.norm": {"model.layers.1.mlp.down_proj.weight": 1e25},
    "model.layers.0.input_layernorm": {"model.embed_tokens.weight": 1e25},
    "lm_head": {"lm_head.weight": 3e38},
}


def overflowing(weights: dict[str, float], family: str = "llama", recipe: str = "fp8_block") -> TrainableDecoder:
    model = models.tiny(family)
    with torch.no_grad():
        for name, size in weights.items():
            parameter = model.get_parameter(name)
            parameter.copy_(parameter.sign() * size)
    return models.bind(model, recipe)


@pytest.mark.parametrize("recipe", ["fp8_block", "none"])
@pytest.mark.parametrize("module", OVERFLOWS)
def test_a_forward_pass_of_the_learner_that_overflows_names_the_module(module: str, recipe: str) -> None:
    decoder = overflowing(OVERFLOWS[module], recipe=recipe)
    with pytest.raises(FloatingPointError, match=rf"^{module} gives NaN or infinite values .* version 0"):
        models.logprobs(decoder)
    with pytest.raises(FloatingPointError, match=rf"^{module} gives"):  # with gradients too
        decoder.forward(models.sequences(61), list(models.ANSWERS), 1.0)


@pytest.mark.parametrize("module", OVERFLOWS)
def test_an_engine_whose_activations_overflow_names_the_module_and_draws_nothing(module: str) -> None:
    decoder = overflowing(OVERFLOWS[module])
    engine = make_engine(decoder, stop_ids=[2])
    load(engine, decoder)
    engine.submit([ask(0, samples=2), ask(1, [5, 6])])
    with pytest.raises(EngineError, match=rf"^{module} gives NaN or infinite values while weight version 0 generates"):
        for _ in range(2):  # the prompt, then its last token
            engine.step()
    assert engine.take_done() == []


def test_an_overflow_that_begins_in_a_later_decode_step_is_named() -> None:
    decoder = make_decoder()
    engine = make_engine(decoder, stop_ids=[])
    load(engine, decoder)
    engine.submit([ask(0, samples=3)])
    for _ in range(4):
        engine.step()
    layer = engine.weights.layers[1]
    layer.down.packed = pack(torch.full((layer.spec.down.columns, layer.spec.intermediate), 3e38))
    layer.changed()
    with pytest.raises(EngineError, match=r"^model\.layers\.1\.mlp\.down_proj gives"):
        engine.step()


@pytest.mark.parametrize("family", models.FAMILIES)
def test_the_repetition_finds_every_module_of_every_architecture_finite_when_it_is(family: str) -> None:
    """And it computes what the forward pass does: its names cover every module that has weights."""
    decoder = models.bind(models.tiny(family), "fp8_block")
    names: list[str] = []

    def attend(layer: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: Rows) -> torch.Tensor:
        return autograd.attention(q, k, v, layer, rows, blocks)

    blocks, ids = Blocks.packed([3]), np.array([5, 6, 7])
    rows = Rows.make(ids, np.zeros(3, np.int64), np.arange(3), blocks, decoder.rope, shape=decoder.description)
    last = torch.zeros(0)
    with torch.no_grad():
        for name, value in finite._outputs(decoder.weights, attend, rows):
            assert bool(value.isfinite().all()), name
            names.append(name)
            last = value if name == "model.layers.1" else last
        assert finite.first_not_finite(decoder.weights, [rows], attend) == "lm_head"
        hidden = torch.nn.functional.embedding(rows.ids, decoder.weights.embedding)
        for layer in decoder.weights.layers:
            hidden = decoder_layer(hidden, layer, attend, rows)
    assert torch.equal(last, hidden)
    weighted = {name.rpartition(".")[0] for name, _ in decoder.model.named_parameters()}
    assert weighted - set(names) == {"lm_head"}


def test_the_check_costs_no_repetition_when_all_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*arguments: Any) -> Any:
        raise AssertionError("the pass was repeated")

    monkeypatch.setattr("trtl_rl.model.bind.first_not_finite", never)
    monkeypatch.setattr("trtl_rl.engines.torch_engine.runner.first_not_finite", never)
    decoder = overflowing({"model.layers.1.mlp.down_proj.weight": 1e12})  # large, and still finite everywhere
    assert bool(models.logprobs(decoder).isfinite().all())
    engine = make_engine(decoder, stop_ids=[2])
    load(engine, decoder)
    engine.submit([ask(0, samples=2, new=4)])
    while engine.has_work():
        engine.step()
    assert len(engine.take_done()) == 2


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_one_value_in_any_place_is_noticed_and_large_sums_are_no_fault(value: float) -> None:
    hidden, logits = torch.ones(40, 8), torch.ones(40, 9)
    assert finite.is_finite(hidden, logits) and finite.is_finite(hidden[:0], logits[:0])
    for tensor in (hidden, logits):
        tensor[17, 5] = value
        assert not finite.is_finite(hidden, logits)
        tensor[17, 5] = 1.0
    assert finite.is_finite(torch.full((40, 8), 4e18), torch.full((40, 9), 3e38))  # every row is finite
    assert not finite.is_finite(torch.full((1, 8), 1e19), logits)  # its squares are not


# --- whole runs ---


def changed_model(directory: Path, name: str, value: float) -> Path:
    """The bundled model with one of its weights filled with ``value``."""
    path = Path(shutil.copytree(find_model("demo").path, directory / "model"))
    tensors = load_file(path / "model.safetensors")
    tensors[name] = torch.full_like(tensors[name], value)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def run(model: Path, run_dir: Path) -> tuple[int, str]:
    """``trtl-rl run`` on the demo's data: exit code and what it says at its end."""
    settings = [
        "data=demo",
        "compile=false",
        "steps=2",
        "batch.prompts=2",
        "batch.group_size=4",
        "evaluation.prompts=0",
    ]
    result = CliRunner().invoke(app, ["run", f"model={model}", f"run_dir={run_dir}", *settings])
    assert isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stderr


def test_a_model_whose_weights_are_not_finite_never_reaches_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*arguments: Any, **rest: Any) -> Any:
        raise AssertionError("the engine was told")

    monkeypatch.setattr("trtl_rl.engines.host.HostedEngine.configure", never)
    monkeypatch.setattr("trtl_rl.trainer.engine_start.send", never)
    model = changed_model(tmp_path, "model.layers.1.mlp.up_proj.weight", float("nan"))
    code, text = run(model, tmp_path / "run")
    assert code == 1 and text.startswith("trtl-rl: model.layers.1.mlp.up_proj.weight holds NaN or infinite values")
    (end,) = rows_of(tmp_path / "run", "end")
    assert end["status"] == "failed" and "model.layers.1.mlp.up_proj.weight" in end["text"]


@pytest.mark.slow
def test_a_model_that_overflows_ends_the_run_with_the_modules_name(tmp_path: Path) -> None:
    model = changed_model(tmp_path, "model.layers.1.mlp.down_proj.weight", 3e38)
    code, text = run(model, tmp_path / "run")
    assert code == 1 and "model.layers.1.mlp.down_proj gives NaN or infinite values while weight version 0" in text
    (end,) = rows_of(tmp_path / "run", "end")
    assert end["status"] == "failed" and "model.layers.1.mlp.down_proj" in end["text"]


@pytest.mark.parametrize("fault", ["weights", pytest.param("activations", marks=pytest.mark.slow)])
def test_a_fault_in_mid_run_keeps_what_was_saved(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    update, sent = Learner.update, []

    def faulty(learner: Learner, groups: Sequence[Group], version: int) -> Any:
        decoder = learner.decoder
        if version == 2 and fault == "activations":
            decoder.weights.layers[1].down.values.fill_(3e38)
        done = update(learner, groups, version)
        if version == 2:
            with torch.no_grad():
                decoder.parameters["model.layers.0.mlp.up_proj.weight"][3, 3] = float("nan")
        return done

    def watched(*arguments: Any, version: int, **rest: Any) -> Any:
        sent.append(version)
        return send(*arguments, version=version, **rest)

    monkeypatch.setattr(Learner, "update", faulty)
    monkeypatch.setattr("trtl_rl.trainer.loop.send", watched)
    config = small(tmp_path / "run", steps=5, checkpoint={"every": 1, "keep": 3})
    said = {
        "weights": r"model\.layers\.0\.mlp\.up_proj\.weight holds NaN or infinite values",
        "activations": r"model\.layers\.1\.mlp\.down_proj gives NaN or infinite values .* weight version 2",
    }[fault]
    with pytest.raises(FloatingPointError, match=said):
        Trainer(reward_funcs=digits, args=config).train()
    assert sent == [1, 2]
    assert checkpoints(tmp_path / "run") == ["step-00000001", "step-00000002"]
    assert [row["step"] for row in rows_of(tmp_path / "run", "step")] == [1, 2]
    (end,) = rows_of(tmp_path / "run", "end")
    assert end["status"] == "failed" and "kept: " in end["text"] and "step-00000002" in end["text"]


def test_a_value_that_bfloat16_cannot_hold_is_refused_by_name() -> None:
    """3.4e38 is finite in the master, and infinite in what is sent."""
    model = models.tiny("llama")
    decoder = TrainableDecoder(model, KernelSet(False, backward=True), models.CONTEXT)
    with torch.no_grad():
        model.get_parameter("model.layers.0.mlp.up_proj.weight")[0, 0] = 3.4e38
    with pytest.raises(FloatingPointError, match=r"model\.layers\.0\.mlp\.up_proj\.weight"):
        decoder.refresh(0)
