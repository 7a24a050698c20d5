"""ModelOpt's quantisers go with a checkpoint: a resume restores them, and plain ModelOpt and transformers can too."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import models
import pytest
import torch
import transformers
from demo import small
from run_files import ROOT, checkpoints, digits, rows_of
from safetensors.torch import load_file

import trtl_rl.recipe
from trtl_rl import Trainer
from trtl_rl.errors import UserError
from trtl_rl.model.source import find_model
from trtl_rl.recipe import modelopt_state
from trtl_rl.recipe.recipe import BACKEND, Recipe, expand, register_backend
from trtl_rl.trainer.loading import load_model

BUNDLED = Path(trtl_rl.recipe.__file__).parent / "fp8_block.yaml"
MODEL = find_model("demo").path


@pytest.fixture(scope="module")
def calibrations() -> Iterator[list[str]]:
    """Every step of a calibration that ModelOpt's quantisers take while this module's tests run, and every stock quantisation."""
    from modelopt.torch.quantization.nn import TensorQuantizer
    from modelopt.torch.quantization.nn.modules import tensor_quantizer

    calls: list[str] = []

    def watched(name: str, function: Any) -> Any:
        def call(*arguments: Any, **rest: Any) -> Any:
            calls.append(name)
            return function(*arguments, **rest)

        return call

    register_backend()
    backends = tensor_quantizer._QUANT_FUNCTIONAL_BACKENDS
    with pytest.MonkeyPatch.context() as patch:
        for name in ("enable_calib", "load_calib_amax", "collect"):
            patch.setattr(TensorQuantizer, name, watched(name, getattr(TensorQuantizer, name)))
        patch.setitem(backends, BACKEND, watched(BACKEND, backends[BACKEND]))
        yield calls


@pytest.fixture(scope="module")
def run_dir(calibrations: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of one step."""
    path = tmp_path_factory.mktemp("state") / "run"
    Trainer(reward_funcs=digits, args=small(path, steps=1)).train()
    return path


@pytest.fixture
def saved(run_dir: Path, tmp_path: Path) -> Path:
    """A copy of its checkpoint that a test may damage."""
    return Path(shutil.copytree(run_dir / "checkpoints" / "step-00000001", tmp_path / "step-00000001"))


def change_quantiser(checkpoint: Path, name: str, **attributes: Any) -> None:
    """Set attributes of a quantiser in ModelOpt's state."""
    state = torch.load(checkpoint / modelopt_state.STATE_FILE, weights_only=True)
    for _, mode in state["modelopt_state_dict"]:
        mode["metadata"]["quantizer_state"][name].update(attributes)
    torch.save(state, checkpoint / modelopt_state.STATE_FILE)


def test_a_resume_inserts_quantisers_anew_instead_of_restoring_them(
    run_dir: Path, calibrations: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = tmp_path / "run"
    shutil.copytree(run_dir, again)
    applied, restored = [], []
    apply, restore = Recipe.apply, modelopt_state.restore

    def watched(recipe: Recipe, model: Any) -> None:
        applied.append(next(model.parameters()).device.type)
        apply(recipe, model)

    def watched_restore(model: Any, directory: Path) -> None:
        restored.append(directory.name)
        restore(model, directory)

    monkeypatch.setattr(Recipe, "apply", watched)
    monkeypatch.setattr(modelopt_state, "restore", watched_restore)
    Trainer(reward_funcs=digits, args=small(again, steps=2), resume=True).train()
    assert applied == ["meta"] and restored == ["step-00000001"]
    assert checkpoints(again) == ["step-00000001", "step-00000002"]
    one, two = (
        torch.load(path / "checkpoints" / f"step-0000000{n}" / modelopt_state.STATE_FILE, weights_only=True)
        for path, n in ((run_dir, 1), (again, 2))
    )
    assert one == two
    first, second = rows_of(again, "start")
    assert first["coverage"] == second["coverage"] and second["coverage"]["quantised"] == 14
    assert rows_of(again, "step")[-1]["metrics"]["mismatch/max_abs"] == 0
    assert calibrations == [], "start, refits or resume calibrated"


def test_the_watch_for_calibrations_sees_one(calibrations: list[str]) -> None:
    import modelopt.torch.quantization as mtq

    before = list(calibrations)
    mtq.quantize(
        models.tiny("llama"),
        {"quant_cfg": [{"quantizer_name": "*weight_quantizer", "cfg": {"num_bits": 8, "axis": 0}}], "algorithm": "max"},
        forward_loop=lambda model: model(torch.tensor([[5, 6]])),
    )
    model = models.tiny("llama")
    Recipe.load("fp8_block").apply(model)
    model(torch.tensor([[5, 6]]))
    assert {"enable_calib", "load_calib_amax", "collect", BACKEND} <= set(calibrations[len(before) :])
    calibrations[:] = before


def test_a_restored_model_computes_what_the_recipe_does(tmp_path: Path) -> None:
    one, other = models.tiny("qwen3"), models.tiny("qwen3")
    decoder = models.bind(one, "fp8_block")
    state = modelopt_state.capture(one)
    assert state is not None
    modelopt_state.write(state, tmp_path)
    modelopt_state.restore(other, tmp_path)
    assert expand(other) == decoder.description.coverage
    restored = models.bind(other)  # recipe none leaves the quantisers that are there
    assert torch.equal(models.logprobs(restored), models.logprobs(decoder))
    assert all(
        torch.equal(a.view(torch.uint8), restored.snapshot[n].view(torch.uint8)) for n, a in decoder.snapshot.items()
    )


def test_the_state_is_plain_data_that_runs_no_code(saved: Path) -> None:
    def plain(value: Any) -> bool:
        if isinstance(value, dict):
            return all(isinstance(key, str) and plain(item) for key, item in value.items())
        if isinstance(value, list | tuple):
            return all(plain(item) for item in value)
        return value is None or isinstance(value, str | int | float)

    assert plain(torch.load(saved / modelopt_state.STATE_FILE, weights_only=True))
    torch.save({"modelopt_state_dict": [os.system], "modelopt_version": "0"}, saved / modelopt_state.STATE_FILE)
    with pytest.raises(UserError, match=r"modelopt_state\.pth cannot be restored"):
        load_model(MODEL, Recipe.load("fp8_block"), saved)


def test_quantisers_that_were_changed_in_a_checkpoint_are_named(saved: Path) -> None:
    change_quantiser(saved, "model.layers.1.mlp.up_proj.input_quantizer", _disabled=True)
    with pytest.raises(UserError, match=r"not what it ran, in 1 linears: model\.layers\.1\.mlp\.up_proj: "):
        load_model(MODEL, Recipe.load("fp8_block"), saved)


def test_a_recipe_that_expands_to_something_else_than_the_checkpoint_ran_is_refused(
    saved: Path, tmp_path: Path
) -> None:
    file = tmp_path / "other.yaml"
    file.write_text(BUNDLED.read_text() + "    - quantizer_name: '*.0.self_attn.q_proj.*'\n      enable: false\n")
    with pytest.raises(
        UserError, match=r"not what recipe .*other\.yaml asks for, in 1 linears: .*\.0\.self_attn\.q_proj"
    ):
        load_model(MODEL, Recipe.load(str(file)), saved)


def test_a_checkpoint_without_its_quantisers_or_of_another_model_is_refused(saved: Path, tmp_path: Path) -> None:
    model = models.tiny("qwen3", num_hidden_layers=1)
    with pytest.raises(UserError, match=r"cannot be restored into this model: .*layers\.1"):
        modelopt_state.restore(model, saved)
    (saved / modelopt_state.STATE_FILE).unlink()
    with pytest.raises(UserError, match=r"modelopt_state\.pth is missing"):
        load_model(MODEL, Recipe.load("fp8_block"), saved)


def test_another_recipe_is_refused_with_both_digests_before_anything_is_loaded(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_model(*arguments: Any, **rest: Any) -> Any:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", no_model)
    file = tmp_path / "other.yaml"
    file.write_text(BUNDLED.read_text().replace("block: [1, 128]", "block: [1, 64]"))
    before, now = Recipe.load("fp8_block").digest, Recipe.load(str(file)).digest
    trainer = Trainer(reward_funcs=digits, args=small(run_dir, steps=2, recipe=str(file)), resume=True)
    with pytest.raises(UserError, match=f"recipe digest {before} in the checkpoint, {now} now"):
        trainer.train()


@pytest.mark.slow
def test_without_a_recipe_nothing_is_saved_and_nothing_restored(tmp_path: Path) -> None:
    config = small(tmp_path / "run", steps=1, recipe="none")
    Trainer(reward_funcs=digits, args=config).train()
    directory = tmp_path / "run" / "checkpoints" / "step-00000001"
    assert not (directory / modelopt_state.STATE_FILE).exists() and (directory / "config.json").exists()
    assert (
        Trainer(reward_funcs=digits, args=small(tmp_path / "run", steps=2, recipe="none"), resume=True).train().step
        == 2
    )


PLAIN = """
import json, sys
import modelopt.torch.opt as mto
import torch
from transformers import AutoModelForCausalLM

mto.enable_huggingface_checkpointing()
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
assert not [name for name in sys.modules if name.startswith("trtl_rl")]
from trtl_rl.recipe.recipe import expand, register_backend

print("restored", json.dumps([model.dtype == torch.float32, expand(model).to_json()]))
ids = torch.tensor([[5, 6, 7]])
try:
    model(ids)
except KeyError as error:
    print("unregistered", error)
register_backend()
with torch.no_grad():
    print("logits", float(model(ids).logits.double().sum()))
weights = {name: float(p.detach().double().sum()) for name, p in model.named_parameters()}
print("weights", json.dumps(weights))
"""

OURS = """
import sys
from pathlib import Path
from transformers import AutoModelForCausalLM
from trtl_rl.recipe import modelopt_state
import torch

model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
modelopt_state.restore(model, Path(sys.argv[1]))
with torch.no_grad():
    print("logits", float(model(torch.tensor([[5, 6, 7]])).logits.double().sum()))
"""


def in_a_fresh_process(code: str, checkpoint: Path) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-c", code, str(checkpoint)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr
    return dict(line.split(" ", 1) for line in done.stdout.splitlines() if " " in line)


@pytest.mark.slow
def test_plain_modelopt_and_transformers_load_a_checkpoint(saved: Path) -> None:
    found = in_a_fresh_process(PLAIN, saved)
    float32, coverage = json.loads(found["restored"])
    assert float32 and coverage == json.loads((saved / "state.json").read_text())["state"]["coverage"]
    written = load_file(saved / "model.safetensors")
    sums = json.loads(found["weights"])
    assert sums == {name: float(written[name].double().sum()) for name in sums} and len(sums) == len(written)
    assert "trtl_fp8_block" in found["unregistered"]
    assert found["logits"] == in_a_fresh_process(OURS, saved)["logits"]
