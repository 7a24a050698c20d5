"""Engine directories: the trainer's own codes, whole or not there, and refused by name when anything is wrong."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from engine_dirs import build, checkpoint_of, edit, flip
from models import CONTEXT, bind, tiny
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from trtl_rl.engines import build as build_module
from trtl_rl.engines.directory import EngineDirectory
from trtl_rl.engines.torch_engine.engine import TorchEngine
from trtl_rl.errors import UserError
from trtl_rl.kernels.kernel_set import KernelSet, find_compiler
from trtl_rl.model.source import find_model, weights_digest
from trtl_rl.recipe.codec import decode
from trtl_rl.refit.manifest import Manifest


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model's engine directory; tests that change it take a copy."""
    path = tmp_path_factory.mktemp("built") / "engine"
    build("demo", path)
    return path


@pytest.fixture
def copy(built: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(built, tmp_path / "copy"))


# --- what is built ---


@pytest.mark.parametrize(("family", "tied"), [("qwen2", True), ("qwen3", False), ("llama", True)])
def test_codes_are_the_trainers_bit_for_bit(tmp_path: Path, family: str, tied: bool) -> None:
    model = checkpoint_of(tmp_path / "model", family, tied=tied)
    directory = build(model, tmp_path / "engine", shard_bytes=20_000)
    decoder = bind(tiny(family, tied=tied), "fp8_block")
    tensors = EngineDirectory.open(directory.path).tensors()
    assert tensors.keys() == decoder.snapshot.keys()
    for name, tensor in decoder.snapshot.items():
        assert tensor.dtype == tensors[name].dtype and tensor.shape == tensors[name].shape
        assert torch.equal(tensor.view(torch.uint8), tensors[name].view(torch.uint8)), name
    assert len(list(directory.path.glob("model-*.safetensors"))) > 2, "several shards"
    assert directory.description == decoder.description
    assert directory.weights_digest == Manifest.of(decoder.snapshot, 5, "any").digest


def test_an_engine_starts_from_it_at_version_0(built: Path) -> None:
    directory = EngineDirectory.open(built)
    engine = TorchEngine(directory.description, KernelSet(False), slots=1, context=64, stop_ids=directory.stop_ids)
    result = directory.load_into(engine)
    assert (engine.version, result.digest) == (0, directory.weights_digest)
    assert not directory.description.coverage.difference(engine.coverage())


def test_stock_transformers_reads_the_checkpoint_and_decodes_it_to_the_same_weights(built: Path) -> None:
    fp8 = transformers.FineGrainedFP8Config(dequantize=True)  # type: ignore[no-untyped-call]
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(built, quantization_config=fp8, dtype=torch.float32)
    directory = EngineDirectory.open(built)
    tensors, state = directory.tensors(), model.state_dict()
    for linear in directory.description.coverage.linears:
        name, format = f"{linear.name}.weight", linear.format.forward_weight
        if format is not None:
            assert torch.equal(state[name], decode(tensors[name], tensors[f"{name}_scale_inv"], format)), name
        else:
            assert torch.equal(state[name], tensors[name].float()), name


def test_the_configuration_says_fp8_as_other_engines_read_it(built: Path, tmp_path: Path) -> None:
    config = json.loads((built / "config.json").read_text())
    assert config["quantization_config"] == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head"],
    }
    assert config["architectures"] == ["Qwen3ForCausalLM"] and config["dtype"] == "bfloat16"
    plain = build("demo", tmp_path / "plain", recipe="none").path
    assert "quantization_config" not in json.loads((plain / "config.json").read_text())
    assert {load_file(file)["model.embed_tokens.weight"].dtype for file in plain.glob("*.safetensors")} == {
        torch.bfloat16
    }


@pytest.mark.parametrize(("where", "scheme"), [("", "none"), ("down_proj.", "mixed")])
def test_activations_that_stay_in_high_precision_are_not_called_dynamic(
    tmp_path: Path, where: str, scheme: str
) -> None:
    text = (Path(build_module.__file__).parent.parent / "recipe" / "fp8_block.yaml").read_text()
    (tmp_path / "recipe.yaml").write_text(
        f"{text.rstrip()}\n    - quantizer_name: '*{where}input_quantizer'\n      enable: false\n"
    )
    path = build("demo", tmp_path / "engine", recipe=str(tmp_path / "recipe.yaml")).path
    quantised = json.loads((path / "config.json").read_text())["quantization_config"]
    assert quantised["activation_scheme"] == scheme
    with pytest.raises(ValueError, match=scheme):
        transformers.FineGrainedFP8Config(**quantised)  # type: ignore[no-untyped-call]


def test_every_file_is_listed_and_readable_by_others(built: Path) -> None:
    listed = set(EngineDirectory.open(built).files)
    there = {path.relative_to(built).as_posix() for path in built.rglob("*") if path.is_file()}
    assert there == listed | {"engine.json"}
    assert {"tokenizer.json", "generation_config.json", "model.safetensors.index.json"} <= listed
    assert all(path.stat().st_mode & 0o044 for path in built.rglob("*"))


# --- a build that fails ---


@pytest.mark.parametrize("when", ["writing weights", "checksums"])
def test_an_interrupted_build_leaves_nothing_that_looks_whole(tmp_path: Path, when: str) -> None:
    output = tmp_path / "engine"

    def progress(text: str, done: int, total: int) -> None:
        for path in tmp_path.iterdir():  # what a kill at this moment would leave
            assert path.name != "engine" and not (path / "engine.json").exists()
        if text == when:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build("demo", output, progress=progress)
    assert not list(tmp_path.iterdir())


def test_a_build_touches_no_directory_that_it_did_not_make(tmp_path: Path) -> None:
    theirs = tmp_path / "engine.partial"
    theirs.mkdir()
    (theirs / "notes").write_text("of somebody else")
    assert "notes" not in build("demo", tmp_path / "engine").files
    assert sorted(path.name for path in tmp_path.iterdir()) == ["engine", "engine.partial"]
    assert (theirs / "notes").read_text() == "of somebody else"

    def progress(text: str, done: int, total: int) -> None:
        if text == "checksums":
            (tmp_path / "other").mkdir(exist_ok=True)
            (tmp_path / "other" / "file").write_text("made meanwhile")

    with pytest.raises(UserError, match="other was made by somebody else meanwhile"):
        build("demo", tmp_path / "other", progress=progress)
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["file"]
    assert len(list(tmp_path.iterdir())) == 3


def test_a_link_is_followed_and_the_directory_one_stands_in_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "large").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "large")
    (tmp_path / "new link").symlink_to(tmp_path / "new")
    for link, place in (("link", "large"), ("new link", "new")):
        assert build("demo", tmp_path / link).path == tmp_path / place
        assert (tmp_path / link).is_symlink() and EngineDirectory.open(tmp_path / link).files
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    with pytest.raises(UserError, match=r"circle leads nowhere"):
        build("demo", tmp_path / "circle")
    (tmp_path / "empty" / "here").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "empty" / "here")
    with pytest.raises(UserError, match=r"--output \. is in use .* such as \./engine"):
        build("demo", Path())
    assert (tmp_path / "empty" / "here").is_dir()


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_disk_that_fills_up_is_said_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def full(*arguments: Any) -> None:
        raise error

    monkeypatch.setattr(build_module, "_write_configuration", full)
    with pytest.raises(UserError, match=r"no room left for .*engine: nothing was kept"):
        build("demo", tmp_path / "engine")
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_built_is_refused_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_model(*arguments: Any, **rest: Any) -> Any:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", no_model)
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").write_text("")
    with pytest.raises(UserError, match="there exists and is not an empty directory"):
        build("demo", tmp_path / "there")
    with pytest.raises(UserError, match="--max-context 300 is more than the 256 tokens"):
        build("demo", tmp_path / "new", max_context=300)
    other = tmp_path / "other"
    shutil.copytree(find_model("demo").path, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "architectures": ["MixtralForCausalLM"]}))
    with pytest.raises(UserError, match=r"MixtralForCausalLM is not supported.*Qwen2ForCausalLM"):
        build(other, tmp_path / "new")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1))
    with pytest.raises(UserError, match=r"has 0\.0 GiB free"):
        build("demo", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_weight_that_is_not_finite_is_named(tmp_path: Path) -> None:
    shutil.copytree(find_model("demo").path, tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = torch.nan
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(UserError, match=r"model: model\.layers\.1\.mlp\.up_proj\.weight holds NaN"):
        build(tmp_path / "model", tmp_path / "engine")
    assert not (tmp_path / "engine").exists()


def test_weights_in_two_block_formats_are_refused(tmp_path: Path) -> None:
    recipe = (Path(build_module.__file__).parent.parent / "recipe" / "fp8_block.yaml").read_text()
    entry = recipe[recipe.index("    - parent_class") : recipe.index("    - parent_class", recipe.index("nn.Linear"))]
    other = entry.replace("    parent_class: 'nn.Linear'\n  ", "").replace("[128, 128]", "[64, 64]")
    other = other.replace(
        "- parent_class: 'nn.Linear'\n      quantizer_name: '*weight", "- quantizer_name: '*down_proj.weight"
    )
    (tmp_path / "recipe.yaml").write_text(
        recipe.replace("    - quantizer_name: '*lm_head*'", other + "    - quantizer_name: '*lm_head*'")
    )
    with pytest.raises(UserError, match="several block formats"):
        build("demo", tmp_path / "engine", recipe=str(tmp_path / "recipe.yaml"))


# --- a directory that is wrong ---


class Wrong(NamedTuple):
    """What happens to a directory, and what opening or checking it says."""

    change: Callable[[Path], object]
    said: str


WEIGHTS = "model-00001-of-00001.safetensors"


def outside(path: Path) -> None:
    files = json.loads((path / "engine.json").read_text())["files"]
    edit(path, files={**files, "../other": {"size": 1, "digest": ""}})


def renamed(path: Path) -> None:
    text = (path / "engine.json").read_text()
    (path / "engine.json").write_text(text.replace('"max_context": 256', '"max_context": 512'))


WRONG = {
    "truncated": Wrong(lambda d: os.truncate(d / WEIGHTS, 1000), rf"not whole: {WEIGHTS} has 1000 bytes, \d+ were"),
    "a missing file": Wrong(lambda d: (d / "tokenizer.json").unlink(), r"not whole: tokenizer\.json is missing"),
    "edited weights": Wrong(lambda d: flip(d / WEIGHTS), rf"{WEIGHTS} was changed after the engine was built"),
    "an edited tokenizer": Wrong(lambda d: flip(d / "tokenizer.json"), r"tokenizer\.json was changed after"),
    "an edited engine.json": Wrong(renamed, r"engine\.json was edited"),
    "half an engine.json": Wrong(lambda d: os.truncate(d / "engine.json", 500), r"engine\.json is no whole JSON file"),
    "a newer format": Wrong(lambda d: edit(d, format=3), r"built by a newer version of trtl-rl \(format 3; this one reads 2"),
    "another architecture": Wrong(lambda d: edit(d, architecture="MixtralForCausalLM"), "holds a MixtralForCausalLM"),
    "a file outside": Wrong(outside, r"names \.\./other, which lies outside"),
    "a checkpoint": Wrong(lambda d: (d / "engine.json").unlink(), r"is no engine directory: it has no engine\.json"),
    "nothing": Wrong(shutil.rmtree, r"There is no engine directory .*copy"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_directory_is_refused_by_name(copy: Path, case: str) -> None:
    WRONG[case].change(copy)
    with pytest.raises(UserError, match=WRONG[case].said):
        EngineDirectory.open(copy).check()


def test_operators_that_were_put_there_later_are_refused(copy: Path) -> None:
    """Operators are code, and an engine would load them by their name."""
    foreign = copy / "kernels" / "x" / "BeforeAttention-0.pt2"
    foreign.parent.mkdir(parents=True, exist_ok=True)
    foreign.write_bytes(b"code")
    with pytest.raises(UserError, match="put into"):
        EngineDirectory.open(copy)


def test_edited_weights_are_not_loaded_even_when_nobody_checks_files(copy: Path) -> None:
    flip(copy / WEIGHTS)
    with pytest.raises(UserError, match="weights were changed"):
        EngineDirectory.open(copy).tensors()


# --- which weights ---


def test_the_digest_of_weights_depends_on_the_tensors_alone(tmp_path: Path) -> None:
    source = find_model("demo").path
    tensors = load_file(source / "model.safetensors")
    names = sorted(tensors)
    for folder in ("split", "changed"):
        (tmp_path / folder).mkdir()
    save_file({name: tensors[name] for name in names[:7]}, tmp_path / "split" / "a.safetensors", {"other": "header"})
    save_file({name: tensors[name] for name in names[7:]}, tmp_path / "split" / "b.safetensors")
    assert weights_digest(tmp_path / "split") == weights_digest(source)
    tensors[names[3]].view(-1)[0] += 1
    save_file(tensors, tmp_path / "changed" / "a.safetensors")
    assert weights_digest(tmp_path / "changed") != weights_digest(source)
    os.truncate(tmp_path / "split" / "b.safetensors", 5000)
    with pytest.raises(UserError, match=r"b\.safetensors is truncated"):
        weights_digest(tmp_path / "split")


# --- compiled operators ---


@pytest.mark.slow
@pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")
@pytest.mark.timeout(600)
def test_an_engine_needs_no_cache_and_no_compilation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = build("demo", tmp_path / "engine", compiled=True)
    monkeypatch.setenv("TRTL_RL_CACHE", str(tmp_path / "empty"))
    directory = EngineDirectory.open(directory.path)
    directory.check()
    kernels = KernelSet(True, build=False, packages=directory.packages)
    assert kernels.identity == directory.kernels["identity"]
    engine = TorchEngine(directory.description, kernels, slots=2, context=CONTEXT, stop_ids=[])
    directory.load_into(engine)
    from demo import ask

    (done,) = engine.probe([ask(-1, new=8)])
    assert len(done.ids) == 8 and not list((tmp_path / "empty").rglob("*.pt2"))
