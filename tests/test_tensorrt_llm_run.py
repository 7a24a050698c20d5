"""Directories for TensorRT-LLM: built, refused, verified and run, against the FAKE."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from demo import small
from engine_dirs import build, checkpoint_of
from fake_engine import built, fake_python
from run_files import metrics_of, rows_of

from trtl_rl.cli.engine import verify
from trtl_rl.engines import environment
from trtl_rl.engines.build import Serving
from trtl_rl.engines.directory import EngineDirectory
from trtl_rl.errors import UserError
from trtl_rl.trainer.trainer import Trainer


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> EngineDirectory:
    return built(tmp_path_factory.mktemp("engine") / "engine")


def test_a_directory_for_tensorrt_llm_says_its_quantisation_twice_alike(directory: EngineDirectory) -> None:
    config = json.loads((directory.path / "config.json").read_text())["quantization_config"]
    other = json.loads((directory.path / "hf_quant_config.json").read_text())["quantization"]
    assert config["weight_block_size"] == [128, 128] and config["quant_method"] == "fp8"
    assert config["activation_scheme"] == "dynamic" and config["modules_to_not_convert"] == ["lm_head"]
    assert other["quant_algo"] == "FP8_BLOCK_SCALES" and other["exclude_modules"] == config["modules_to_not_convert"]
    assert directory.llm_arguments()["max_seq_len"] == 256
    assert directory.contract().tensor_parallel == 1
    assert {"llm_args.yaml", "hf_quant_config.json"} <= directory.files.keys(), "they have checksums as all others"


def test_a_model_that_cannot_be_served_is_refused_and_a_directory_of_the_other_backend_too(tmp_path: Path) -> None:
    small = checkpoint_of(
        tmp_path / "model",
        "llama",
        hidden_size=576,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        intermediate_size=1536,
        num_hidden_layers=1,
        tie_word_embeddings=True,
    )
    with pytest.raises(UserError, match=r"k_proj\.weight has 192 rows, which are 1\.5 blocks of 128"):
        built(tmp_path / "engine", str(small))
    assert not (tmp_path / "engine").exists()
    with pytest.raises(UserError, match="does not divide the 4 key/value heads"):
        built(tmp_path / "engine", "demo", ranks=8)
    with pytest.raises(UserError, match="fp8_block_pow2"):
        build("demo", tmp_path / "engine", serving=Serving(1, "blackwell"))


def test_power_of_two_scales_are_built_for_blackwell(tmp_path: Path) -> None:
    place = build("demo", tmp_path / "engine", "fp8_block_pow2", serving=Serving(1, "blackwell"))
    scales = [tensor for name, tensor in place.tensors().items() if name.endswith("_scale_inv")]
    assert all(bool((scale.frexp().mantissa == 0.5).all()) for scale in scales)
    assert json.loads((place.path / "config.json").read_text())["quantization_config"]["scale_fmt"] == "ue8m0"


@pytest.mark.slow
def test_the_same_directory_is_exact_on_the_embedded_engine(
    directory: EngineDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify(directory.path, 4, 8, True, backend="torch") == 0
    assert json.loads(capsys.readouterr().out)["exact"] is True


def served_run(tmp_path: Path, directory: EngineDirectory, **keys: Any) -> Any:
    engine = {
        "backend": "tensorrt-llm",
        "path": str(directory.path),
        "python": str(fake_python(tmp_path)),
        "timeout": 120,
        **keys.pop("engine", {}),
    }
    return small(tmp_path / "run", engine=engine, **keys)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_thirty_steps_run_against_the_fake_with_weights_that_really_arrive(
    tmp_path: Path, directory: EngineDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "gpu_count", lambda: 1)
    batch = {"prompts": 8, "group_size": 4}
    config = served_run(tmp_path, directory, steps=30, refit={"mode": "delta"}, batch=batch)
    assert Trainer(args=config).train().step == 30
    steps = metrics_of(tmp_path / "run")
    assert len(steps) == 30 and all(step["mismatch/differing_tokens"] == 0 for step in steps)
    assert sum(step["refit/changed_frac"] > 0 for step in steps) > 20
    said = " ".join(row["text"] for row in rows_of(tmp_path / "run", "message"))
    assert "TensorRT-LLM 1.3.0rc26+fake" in said and "through shared_memory" in said


def test_a_run_needs_a_machine_that_can_serve_it(
    tmp_path: Path, directory: EngineDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "gpu_count", lambda: 0)
    with pytest.raises(UserError, match="needs an NVIDIA GPU"):
        Trainer(args=served_run(tmp_path, directory)).train()
    with pytest.raises(UserError, match="has no TensorRT-LLM"):
        Trainer(args=served_run(tmp_path, directory, engine={"python": sys.executable})).train()
    embedded = build("demo", tmp_path / "embedded")
    with pytest.raises(UserError, match="was built for the embedded engine"):
        Trainer(args=served_run(tmp_path, embedded)).train()


@pytest.mark.slow
def test_verification_passes_on_the_fake_and_finds_a_loader_that_forgets(
    tmp_path: Path, directory: EngineDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(environment, "gpu_count", lambda: 1)

    def verified(variant: str) -> tuple[int, dict[str, Any]]:
        place = tmp_path / "report.json"
        python = str(fake_python(tmp_path, variant))
        status = verify(directory.path, 4, 12, False, python=python, report=place)
        report: dict[str, Any] = json.loads(place.read_text())
        return status, report

    status, report = verified("")
    assert (
        status == 0
        and report["passed"]
        and set(report["checks"])
        == {
            "load",
            "coverage",
            "quantiser of activations",
            "generate",
            "refit, all tensors",
            "refit, changes only",
            "refit, aborted",
        }
    )
    assert report["checks"]["refit, changes only"]["bytes"] < report["checks"]["refit, all tensors"]["bytes"]
    assert "1.3.0rc26+fake" in report["engine"]["text"]
    status, report = verified("forget:2")
    assert status == 1 and not report["checks"]["refit, changes only"]["passed"]
    assert "k_proj.weight: after loading" in report["checks"]["refit, changes only"]["text"]
    assert "FAIL refit, changes only" in capsys.readouterr().out
