"""Runs that start from an engine directory, and the commands around it."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from demo import small
from engine_dirs import build, edit, flip
from run_files import metrics_of, rows_of
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner, Result

import trtl_rl.trainer.engine_start as engine_start
from trtl_rl import Trainer
from trtl_rl.cli.main import app
from trtl_rl.engines.directory import EngineDirectory
from trtl_rl.errors import UserError
from trtl_rl.kernels.kernel_set import KernelSet
from trtl_rl.model.source import find_model, weights_digest
from trtl_rl.recipe import recipe as recipe_module
from trtl_rl.recipe.recipe import Recipe
from trtl_rl.trainer import checkpoint, parity_subject
from trtl_rl.trainer.parity_check import Parity, Worst
from trtl_rl.trainer.parity_subject import Checked, Options, Subject


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model's engine directory, with eager operators."""
    return build("demo", tmp_path_factory.mktemp("built") / "engine").path


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model with one weight changed."""
    path = Path(shutil.copytree(find_model("demo").path, tmp_path_factory.mktemp("other") / "model"))
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][0, 0] += 1
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def trtl(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def refused(*arguments: object) -> str:
    """What a command says that refuses its input."""
    result = trtl(*arguments)
    assert result.exit_code == 2 and isinstance(result.exception, SystemExit), (result.output, result.exception)
    return result.stderr


# --- runs ---


def test_an_engine_that_is_not_of_the_run_is_refused_before_a_model_is_loaded(
    built: Path, other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_model(*arguments: Any, **rest: Any) -> Any:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", no_model)

    def said(**keys: Any) -> str:
        with pytest.raises(UserError) as error:
            Trainer(args=small(tmp_path / "run", engine={"path": str(built)}, **keys)).train()
        assert not (tmp_path / "run").exists()
        return str(error.value)

    assert f"engine.path={built} was built from other weights (demo) than those of model={other}" in said(
        model=str(other)
    )
    assert "was built with the recipe fp8_block, and recipe=none is another one" in said(recipe="none")
    for name, change, text in (
        (
            "edited",
            lambda path: flip(path / "model-00001-of-00001.safetensors"),
            "was changed after the engine was built",
        ),
        ("truncated", lambda path: os.truncate(path / "tokenizer.json", 9), "tokenizer.json has 9 bytes"),
        ("newer", lambda path: edit(path, format=9), r"built by a newer version of trtl-rl (format 9"),
        (
            "another",
            lambda path: edit(path, architecture="LlamaForCausalLM"),
            "holds a LlamaForCausalLM, and model=demo is a",
        ),
    ):
        change(Path(shutil.copytree(built, tmp_path / name)))
        with pytest.raises(UserError) as error:
            Trainer(args=small(tmp_path / "run", engine={"path": str(tmp_path / name)}))
        assert text in str(error.value) and "uild" in str(error.value), "it says what to do"
    with pytest.raises(UserError, match=r"engine\.max_context=300 is more than .* was built for \(256\)"):
        Trainer(args=small(tmp_path / "run", engine={"path": str(built), "max_context": 300}))
    with pytest.raises(UserError, match="is no engine directory"):
        Trainer(args=small(tmp_path / "run", engine={"path": str(other)}))


def test_a_run_from_an_engine_directory_sends_nothing_first_and_is_the_same_run(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []
    send = engine_start.send

    def counted(*arguments: Any, version: int, **rest: Any) -> Any:
        sent.append(version)
        return send(*arguments, version=version, **rest)

    monkeypatch.setattr(engine_start, "send", counted)
    keys: dict[str, Any] = {"steps": 2, "checkpoint": {"every": 1}}
    Trainer(args=small(tmp_path / "plain", **keys)).train()
    assert sent == [0]
    config = small(tmp_path / "run", engine={"path": str(built)}, **keys)
    Trainer(args=config).train()
    assert sent == [0], "the engine took version 0 from the directory"
    assert metrics_of(tmp_path / "run") == metrics_of(tmp_path / "plain")
    assert not rows_of(tmp_path / "run", "message")
    resumed = Trainer(args=config.model_copy(update={"steps": 3}), resume=True).train()
    assert resumed.step == 3 and sent == [0, 2], "at a later version an ordinary refit follows"
    assert rows_of(tmp_path / "run", "step")[-1]["metrics"]["mismatch/differing_tokens"] == 0


@pytest.mark.slow
def test_an_engine_of_another_configuration_or_with_other_codes_is_refused(
    other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Path(shutil.copytree(find_model("demo").path, tmp_path / "model"))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-4}))
    engine = build(model, tmp_path / "eps").path
    with monkeypatch.context() as patch, pytest.raises(UserError, match=r"another config\.json than model=demo"):
        patch.setattr(KernelSet, "__init__", None)  # nothing is compiled before
        Trainer(args=small(tmp_path / "one", engine={"path": str(engine)})).train()
    engine = build(other, tmp_path / "codes").path
    edit(engine, source_digest=weights_digest(find_model("demo").path))
    with pytest.raises(UserError, match="holds other codes than the trainer computes from model=demo"):
        Trainer(args=small(tmp_path / "two", engine={"path": str(engine)})).train()


# --- commands ---


def test_build_inspect_and_verify_from_the_command_line(tmp_path: Path) -> None:
    engine = tmp_path / "engine"
    result = trtl("build-engine", "--model", "demo", "--output", engine, "--no-compile", "--max-context", 128)
    assert result.exit_code == 0, result.output
    assert "FP8 in 14 of 15 linears" in result.stdout and f"trtl-rl verify-engine {engine}" in result.stdout
    inspected = trtl("inspect-engine", engine)
    assert inspected.exit_code == 0 and not inspected.stderr
    assert set(inspected.stdout.splitlines()) < set(result.stdout.splitlines())
    for part in ("demo (Qwen3ForCausalLM, 333 k parameters)", "context         128 tokens", "excluded: lm_head"):
        assert part in inspected.stdout
    values = json.loads(trtl("inspect-engine", engine, "--json").stdout)
    assert values["audit"]["quantised"] == 14 and values["same_operators"] is True
    assert len(values["description"]["coverage"]) == 15

    verified = trtl("verify-engine", engine, "--prompts", 4, "--max-new-tokens", 8, "--json")
    assert verified.exit_code == 0, verified.output
    values = json.loads(verified.stdout)
    assert values["exact"] is True and values["differing"] == 0 and values["tokens"] >= 8 + 3
    assert values["trainer's weights"] == "quantised anew from demo"

    edit(engine, kernels={**EngineDirectory.open(engine).kernels, "identity": "0" * 64})
    assert "this machine would run other operators" in trtl("inspect-engine", engine).stderr


def test_wrong_input_of_the_commands_is_one_message(built: Path, other: Path, tmp_path: Path) -> None:
    assert "There is no model 'nowhere'" in refused("build-engine", "--model", "nowhere", "--output", tmp_path / "new")
    assert "exists and is not an empty directory" in refused("build-engine", "--model", "demo", "--output", built)
    served = ("build-engine", "--model", "demo", "--output", tmp_path / "new", "--tensor-parallel", 2)
    assert "--tensor-parallel belongs to --backend tensorrt-llm" in refused(*served)
    assert "--python belongs to --backend tensorrt-llm" in refused("verify-engine", built, "--python", "python3")
    assert "was built for the embedded engine" in refused("verify-engine", built, "--backend", "tensorrt-llm")
    recipe = refused("build-engine", "--model", "demo", "--output", tmp_path / "new", "--recipe", "fp8_blok")
    assert "Did you mean 'fp8_block'?" in recipe
    assert "has no engine.json" in refused("inspect-engine", other)
    assert "has no engine.json" in refused("verify-engine", other)
    copy = Path(shutil.copytree(built, tmp_path / "copy"))
    (copy / "tokenizer.json").write_bytes((copy / "tokenizer.json").read_bytes()[::-1])
    assert "tokenizer.json was changed after the engine was built" in refused("verify-engine", copy)
    assert "an engine directory has a recipe of its own" in refused("parity", built, "--recipe", "none")
    assert "leave no room for a prompt" in refused("parity", "demo", "--max-new-tokens", 256)
    assert "There is no model" in refused("parity", tmp_path / "nothing")
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.yaml").write_text(yaml.safe_dump({"model": "demo"}))
    assert "has no whole checkpoint yet" in refused("parity", run)
    assert not (tmp_path / "new").exists()


def test_a_difference_is_shown_with_its_place_and_ends_with_1(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worst = Worst(prompt=3, sample=0, position=7, token=11, trainer=-1.25, engine=-1.5)
    found = Parity(4, 80, 2, 0.25, 1.001, 1e-4, 0.01, first_divergence=6, worst=worst)
    monkeypatch.setattr(parity_subject.Subject, "check", lambda self, progress: Checked({"model": "demo"}, found))
    result = trtl("verify-engine", built)
    assert result.exit_code == 1 and "NOT EXACT" in result.stdout
    assert "token 6 of an answer" in result.stdout
    assert "prompt 3, sample 0, position 7, token 11: trainer -1.25, engine -1.5" in " ".join(result.stdout.split())
    assert json.loads(trtl("verify-engine", built, "--json").stdout)["worst"]["position"] == 7


def test_parity_of_a_run_is_checked_as_it_ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = tmp_path / "run" / "checkpoints" / "step-00000002"
    whole.mkdir(parents=True)
    (whole / "state.json").write_text(checkpoint._state_text({}))
    (whole / "manifest.json").write_text('{"files": {}}')
    text = (Path(recipe_module.__file__).parent / "fp8_block.yaml").read_text()

    def subject(recipe: str, text: str, **keys: Any) -> Subject:
        (whole / "recipe.yaml").write_text(text)
        values = {"model": "demo", "recipe": recipe, **keys}
        (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump(values))
        return Subject(str(tmp_path / "run"), Options())

    ran = subject("my/recipe.yaml", text, compile=False)
    assert ran.recipe.name == "my/recipe.yaml" and ran.recipe.digest == Recipe.load("fp8_block").digest
    assert ran._compiled() is False and ran._device() == "cpu"
    assert subject("none", "").recipe.name == "none"
    monkeypatch.setenv("CXX", str(tmp_path / "no compiler"))
    assert subject("none", "")._compiled() is False
    with pytest.raises(UserError, match=r"its operators are compiled, which needs a C\+\+ compiler"):
        subject("none", "", compile=True).check()
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="ran with device=cuda, and torch finds no CUDA device"):
            subject("none", "", device="cuda").check()


@pytest.mark.slow
def test_parity_of_a_model_a_run_and_an_engine_whose_model_is_gone(other: Path, tmp_path: Path) -> None:
    few = ("--prompts", 3, "--max-new-tokens", 12, "--no-compile", "--json")
    model = json.loads(trtl("parity", other, *few, "--full-vocabulary", "--temperature", 0.7).stdout)
    assert model["exact"] is True and model["full_vocabulary"]["values"] == 16 * model["tokens"] > 0

    Trainer(args=small(tmp_path / "run", steps=2, optimizer={"lr": 1e-2})).train()
    run = json.loads(trtl("parity", tmp_path / "run", *few).stdout)
    assert run["exact"] is True and run["prompts"].startswith("3 of the run's data")
    assert run["model"].endswith("step-00000002") and run["tokens"] == 36

    gone = Path(shutil.copytree(other, tmp_path / "gone"))
    engine = build(gone, tmp_path / "engine").path
    shutil.rmtree(gone)
    found = json.loads(trtl("parity", engine, *few).stdout)
    assert found["exact"] is True and "own codes" in found["trainer's weights"]
