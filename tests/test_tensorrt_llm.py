from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from demo import ask
from fake_engine import FAKES
from test_refit_validate import describe, payload

from trtl_rl.config import validate_config
from trtl_rl.engines import environment
from trtl_rl.engines.environment import Environment, check_same_operators, choose_channel, read_environment
from trtl_rl.engines.host import HostedEngine
from trtl_rl.engines.tensorrt_llm import arguments, imports, versions
from trtl_rl.engines.tensorrt_llm.layout import held_part, own_part, same_bytes
from trtl_rl.errors import RefitError, UserError
from trtl_rl.refit.validate import BlockScaleContract
from trtl_rl.trainer import engine_place

HERE = read_environment(None)


def having(**found: str) -> Environment:
    plain = {name: version for name, version in HERE.versions.items() if name not in ("ray", "tensorrt_llm")}
    return Environment("/env/bin/python", {**plain, **found})


# --- versions: what a user is told who does not have it ---


@pytest.mark.parametrize("version", ["1.3.0rc26", "1.3.0", "1.4.0rc1", "1.4.2", "1.3.0rc26+fake"])
def test_versions_in_the_stated_range_are_taken(version: str) -> None:
    versions.check_version(version)


@pytest.mark.parametrize("version", ["1.2.1", "1.3.0rc22", "1.3.0rc9", "0.21.0", "1.5.0", "1.5.0rc1", "2.0"])
def test_other_versions_are_refused_with_the_install_line(version: str) -> None:
    with pytest.raises(UserError, match=r"(?s)not supported.*https://pypi\.nvidia\.com") as refused:
        versions.check_version(version)
    assert versions.RANGE in str(refused.value)


def test_a_machine_that_cannot_run_it_is_told_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "gpu_count", lambda: 1)
    with pytest.raises(UserError, match=r"(?s)has no TensorRT-LLM.*extra-index-url https://pypi\.nvidia\.com"):
        versions.check_machine(having())
    with pytest.raises(UserError, match=r"1\.2\.1 is not supported"):
        versions.check_machine(having(tensorrt_llm="1.2.1", ray="2.50"))
    with pytest.raises(UserError, match="no Ray"):
        versions.check_machine(having(tensorrt_llm="1.3.0"))
    versions.check_machine(having(tensorrt_llm="1.3.0", ray="2.50"))
    monkeypatch.setattr(environment, "gpu_count", lambda: 0)
    with pytest.raises(UserError, match=r"needs an NVIDIA GPU.*https://pypi\.nvidia\.com"):
        versions.check_machine(having(tensorrt_llm="1.3.0", ray="2.50"))
    with pytest.raises(UserError, match=r"(?s)has no TensorRT-LLM.*needs an NVIDIA GPU, too"):
        versions.check_machine(having())
    versions.check_machine(having(tensorrt_llm="1.3.0", ray="2.50"), here=False)  # it runs on a node of a cluster


def test_importing_says_whether_it_is_absent_or_cannot_run_here(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("tensorrt_llm")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != str(FAKES)])  # tests before this one need it
    with pytest.raises(UserError, match="There is no TensorRT-LLM"):
        imports.load()
    monkeypatch.syspath_prepend(FAKES)
    monkeypatch.setenv("FAKE_TENSORRT_LLM", "no_gpu")
    with pytest.raises(UserError, match=r"cannot be imported on this machine: FAKE: Failed to initialize NVML"):
        imports.load()


# --- arguments ---


def test_arguments_of_a_directory_and_a_run_are_as_written_down() -> None:
    base = arguments.directory_arguments(tensor_parallel=2, max_context=4096)
    assert base == {
        "dtype": "bfloat16",
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 1,
        "max_seq_len": 4096,
        "max_input_len": 4095,
        "max_batch_size": 256,
        "max_num_tokens": 8192,
        "enable_chunked_prefill": True,
        "skip_tokenizer_init": True,
        "sampler_type": "TorchSampler",
        "kv_cache_config": {"enable_block_reuse": True, "free_gpu_memory_fraction": 0.5},
        "cuda_graph_config": {"enable_padding": True, "max_batch_size": 256},
    }
    before = yaml.safe_dump(base)
    overrides = {"kv_cache_config": {"free_gpu_memory_fraction": 0.2}, "cuda_graph_config": None, "max_num_tokens": 512}
    run = arguments.run_arguments(
        base, model="/engine", slots=32, context=1024, load_format="dummy", overrides=overrides
    )
    assert run == {
        "dtype": "bfloat16",
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 1,
        "max_seq_len": 1024,
        "max_input_len": 1023,
        "max_batch_size": 32,
        "max_num_tokens": 512,
        "enable_chunked_prefill": True,
        "skip_tokenizer_init": True,
        "sampler_type": "TorchSampler",
        "kv_cache_config": {"enable_block_reuse": True, "free_gpu_memory_fraction": 0.2},
        "cuda_graph_config": None,
        "model": "/engine",
        "load_format": "dummy",
        "ray_worker_extension_cls": "trtl_rl.engines.tensorrt_llm.extension.RefitExtension",
    }
    assert yaml.safe_dump(base) == before, "the directory's own were changed"


@pytest.mark.parametrize("name", ["tensor_parallel_size", "load_format", "ray_worker_extension_cls", "model"])
def test_arguments_that_the_adapter_needs_as_they_are_cannot_be_overridden(name: str) -> None:
    base = arguments.directory_arguments(tensor_parallel=1, max_context=64)
    with pytest.raises(UserError, match=f"engine.arguments.{name} cannot be set"):
        arguments.run_arguments(base, model="m", slots=1, context=64, load_format="dummy", overrides={name: 1})


def test_a_run_longer_than_the_directory_was_built_for_is_refused() -> None:
    base = arguments.directory_arguments(tensor_parallel=1, max_context=64)
    with pytest.raises(UserError, match="--max-context 65"):
        arguments.run_arguments(base, model="m", slots=1, context=65, load_format="dummy", overrides={})


NEW = ["logprobs", "logprobs_mode", "logprobs_simple_format"]


def test_completions_are_asked_for_without_logprobs_and_probes_with_those_of_the_temperature() -> None:
    request = ask(3, new=20, temperature=0.7)
    plain = arguments.sampling_arguments(request, 1, generated=4, version=2, stop_ids=[5, 9], known=NEW)
    assert plain == {
        "max_tokens": 16,
        "temperature": 0.7,
        "top_p": 1.0,
        "top_k": 0,
        "seed": arguments.seed_of((0, 3, 0), 1, 2),
        "end_id": 5,
        "pad_id": 5,
        "stop_token_ids": [5, 9],
        "include_stop_str_in_output": True,
        "detokenize": False,
    }
    probe = replace(request, logprobs=True)
    assert arguments.sampling_arguments(probe, 1, generated=4, version=2, stop_ids=[5, 9], known=NEW) == {
        **plain,
        "logprobs": 0,
        "logprobs_mode": "processed",
        "logprobs_simple_format": True,
    }
    with pytest.raises(UserError, match="logits, not of logits / temperature"):
        arguments.sampling_arguments(probe, 1, generated=0, version=2, stop_ids=[5], known=["logprobs"])
    hot = replace(ask(3, temperature=1.0), logprobs=True)
    assert "logprobs_mode" not in arguments.sampling_arguments(
        hot, 0, generated=0, version=0, stop_ids=[5], known=["logprobs"]
    )


def test_random_streams_differ_between_samples_versions_and_prompts_and_repeat() -> None:
    seeds = {
        arguments.seed_of((7, prompt, 0), sample, version)
        for prompt in range(4)
        for sample in range(4)
        for version in range(4)
    }
    assert len(seeds) == 64 and all(0 <= seed < 2**63 for seed in seeds)
    assert arguments.seed_of((7, 1, 0), 2, 3) == arguments.seed_of((7, 1, 0), 2, 3)


# --- configuration ---


def test_the_backend_needs_a_directory_and_measures_parity_instead_of_demanding_it() -> None:
    with pytest.raises(UserError, match=r"engine\.backend=tensorrt-llm starts from a directory"):
        validate_config({"engine": {"backend": "tensorrt-llm"}})
    with pytest.raises(UserError, match=r"engine\.arguments belongs to"):
        validate_config({"engine": {"arguments": {"max_num_tokens": 1}}})
    with pytest.raises(UserError, match=r"engine\.cache_gib belongs to engine.backend=torch"):
        validate_config({"engine": {"backend": "tensorrt-llm", "path": "x", "cache_gib": 2}})
    served = {"backend": "tensorrt-llm", "path": "x"}
    measured = validate_config({"engine": served}).parity
    assert measured.stop is None and measured.warn > 0
    bounded = validate_config({"engine": served, "parity": {"stop": 0.25, "every": 3}}).parity
    assert (bounded.stop, bounded.warn, bounded.every) == (0.25, 0.0, 3)
    assert validate_config({"engine": {"python": "/env/bin/python"}}).parity.stop == 0.0


# --- the engine's environment ---


def test_memory_of_the_gpu_is_shared_only_between_equal_versions_of_torch() -> None:
    other = having(torch="2.99.0")
    assert choose_channel(None, "cpu", HERE)[0] == "shared_memory"
    assert choose_channel(None, "cuda", HERE)[0] == "cuda_ipc"
    channel, reason = choose_channel(None, "cuda", other)
    assert channel == "shared_memory" and "2.99.0" in reason
    assert choose_channel("stream", "cuda", other)[0] == "stream"
    with pytest.raises(UserError, match=r"refit\.channel=cuda_ipc needs one version of torch"):
        choose_channel("cuda_ipc", "cuda", other)


def test_each_engine_gets_gpus_of_its_own_and_too_few_are_said_before_one_waits_for_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(environment, "gpu_count", lambda: 4)
    assert environment.divide_gpus(2, 2) == ["0,1", "2,3"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-7e,1")
    assert environment.divide_gpus(3, 1) == ["3", "GPU-7e", "1"]
    with pytest.raises(UserError, match=r"2 × 2 GPUs are needed .* this machine shows 3"):
        environment.divide_gpus(2, 2)

    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\necho "$CUDA_VISIBLE_DEVICES" > {tmp_path}/seen\n')
    script.chmod(0o755)
    limits: dict[str, Any] = {"threads": 1, "timeout": 5, "refit_timeout": 5, "python": str(script)}
    for gpus, seen in (("GPU-7e", "GPU-7e"), (None, "3,GPU-7e,1")):
        engine = HostedEngine(tmp_path / "engine.log", gpus=gpus, **limits)
        engine._process.wait(10)
        engine.close()
        assert (tmp_path / "seen").read_text().strip() == seen


def test_several_engines_with_gpus_of_their_own_get_weights_through_the_hosts_memory() -> None:
    assert choose_channel(None, "cuda", HERE, apart=True) == ("shared_memory", "each engine has GPUs of its own")
    with pytest.raises(UserError, match=r"refit\.channel=cuda_ipc reaches an engine on the trainer's GPU"):
        choose_channel("cuda_ipc", "cuda", HERE, apart=True)


def test_an_engine_on_ray_takes_the_gpus_that_its_directory_was_built_for() -> None:
    contract = BlockScaleContract(describe(heads=4, kv_heads=2), 2)
    served = {"backend": "tensorrt-llm", "path": "x"}

    def options(**ray: Any) -> dict[str, Any]:
        return engine_place._ray_options(
            validate_config({"engine": served, "ray": {"address": "auto", **ray}}), contract
        )

    assert options() == {"num_cpus": 1.0, "num_gpus": 2, "resources": {}}
    assert options(resources={"num_cpus": 4, "num_gpus": 2, "fast": 1})["resources"] == {"fast": 1}
    with pytest.raises(UserError, match=r"num_gpus: 1.*was built for 2 GPUs"):
        options(resources={"num_gpus": 1})
    assert engine_place._ray_options(validate_config({"ray": {"address": "auto"}}), None) == {
        "num_cpus": 1.0,
        "resources": {},
    }


def test_another_torch_is_refused_where_equal_bits_are_demanded() -> None:
    check_same_operators(HERE)
    with pytest.raises(UserError, match=r"torch 2\.99\.0.*parity\.stop=null"):
        check_same_operators(having(torch="2.99.0"))
    with pytest.raises(UserError, match="with python 3"):
        check_same_operators(having(python="3.99.1"))


def test_an_interpreter_that_cannot_serve_is_refused_by_what_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not start"):
        read_environment(str(tmp_path / "absent"))
    script = tmp_path / "python"

    def says(text: str, status: int = 0) -> None:
        script.write_text(f"#!/bin/sh\necho '{text}'\necho 'a reason' >&2\nexit {status}\n")
        script.chmod(0o755)

    says("", 3)
    with pytest.raises(UserError, match="is no Python interpreter that runs: a reason"):
        read_environment(str(script))
    says(json.dumps({"python": "3.9.2"}))
    with pytest.raises(UserError, match=r"is Python 3\.9\.2"):
        read_environment(str(script))
    says(json.dumps({"python": "3.12.1", "torch": "2.14", "numpy": "2"}))
    with pytest.raises(UserError, match=r"lacks xxhash, safetensors.*-m pip install xxhash safetensors"):
        read_environment(str(script))


def test_another_interpreter_gets_this_source_and_no_other_packages(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere/packages")
    monkeypatch.setenv("TRTL_RL_CACHE", str(tmp_path))
    found = environment.variables("/env/bin/python")
    place = Path(found["PYTHONPATH"])
    assert [item.name for item in place.iterdir()] == ["trtl_rl"]
    assert (place / "trtl_rl" / "engines" / "child.py").is_file()
    assert environment.variables("/env/bin/python")["PYTHONPATH"] == str(place), "made once"
    assert environment.variables(None)["PYTHONPATH"] == "/somewhere/packages"


# --- layout ---


def test_parts_are_found_in_fused_modules_and_compared_bit_for_bit() -> None:
    d = describe(heads=4, kv_heads=2)
    tensors = payload(d)
    layer = "model.layers.0.self_attn"
    names = [f"{layer}.{role}.weight" for role in ("q_proj", "k_proj", "v_proj")]
    fused = torch.cat([tensors[name].view(torch.uint8) + i for i, name in enumerate(names)]).view(torch.float8_e4m3fn)
    scale = torch.arange(8.0)[:, None]
    sizes = {item.name: item.shape[0] for item in d.coverage.linears}
    modules = {f"{layer}.qkv_proj": SimpleNamespace(weight=fused, weight_scale=scale)}
    for i, name in enumerate(names):
        held = held_part(modules, name, sizes, 1)
        assert same_bytes(held, (tensors[name].view(torch.uint8) + i).view(torch.float8_e4m3fn))
        changed = held.clone().view(torch.uint8)
        changed[-1, -1] ^= 1
        assert not same_bytes(changed.view(torch.float8_e4m3fn), held)
    assert held_part(modules, f"{names[1]}_scale_inv", sizes, 1).flatten().tolist() == [4, 5]
    assert held_part(modules, f"{names[2]}_scale_inv", sizes, 1).flatten().tolist() == [6, 7]
    with pytest.raises(RefitError, match=r"o_proj: there is no such module"):
        held_part(modules, f"{layer}.o_proj.weight", sizes, 1)


def test_a_rank_is_compared_with_its_own_part_of_rows_columns_or_all() -> None:
    whole = torch.arange(24.0).reshape(6, 4)
    assert torch.equal(own_part(whole, torch.empty(3, 4), 1), whole[3:])
    assert torch.equal(own_part(whole, torch.empty(6, 2), 1), whole[:, 2:])
    assert torch.equal(own_part(whole, torch.empty(6, 4), 1), whole)
    assert torch.equal(own_part(whole, torch.empty(4, 4), 1), whole[4:]), "a vocabulary that was filled up"
    assert same_bytes(torch.cat([whole[4:], torch.zeros(2, 4)]), whole[4:])
    assert not same_bytes(whole.double(), whole) and not same_bytes(whole[:4], whole)
