"""What can be tested of the CUDA path without a GPU: calls with a fixed number of rows, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from test_row_invariance import engine_logprobs

from trtl_rl.errors import UserError
from trtl_rl.kernels.kernel_set import KernelSet, in_fixed_rows
from trtl_rl.model.bind import TrainableDecoder
from trtl_rl.recipe.coverage import Coverage
from trtl_rl.recipe.recipe import Recipe, expand


def test_every_call_has_the_same_rows() -> None:
    """A library that chooses its algorithm by shape then chooses the same one each time."""
    shapes = []

    def run(inputs: Any) -> list[torch.Tensor]:
        shapes.append([tuple(x.shape) for x in inputs])
        return [inputs[0] + inputs[1].sum(), inputs[0].to(torch.float8_e4m3fn)]

    x = torch.arange(140.0).reshape(70, 2)
    whole, codes = in_fixed_rows(run, [True, False], 32)([x, torch.ones(3)])
    assert shapes == [[(32, 2), (3,)]] * 3
    assert torch.equal(whole, x + 3) and torch.equal(codes.float(), x.to(torch.float8_e4m3fn).float())


def fixed(recipe: str, family: str, rows: int | None) -> TrainableDecoder:
    model = models.tiny(family)
    Recipe.load(recipe).apply(model)
    kernels = KernelSet(False, backward=True)
    kernels.fixed_rows = rows
    decoder = TrainableDecoder(model, kernels, models.CONTEXT)
    decoder.refresh(0)
    return decoder


@pytest.mark.parametrize("recipe", ["none", "fp8_block"])
@pytest.mark.parametrize("family", models.FAMILIES)
def test_fixed_rows_change_no_bit_of_a_logprob(family: str, recipe: str) -> None:
    ids = models.sequences(61)
    results = []
    for rows in (None, 64, 256):
        decoder = fixed(recipe, family, rows)
        logprob, _ = decoder.forward(ids, list(models.ANSWERS), 0.7)
        logprob.sum().backward()
        gradient = decoder.parameters["model.layers.0.mlp.up_proj.weight"].grad
        results.append((logprob.detach(), gradient))
    for logprob, gradient in results[1:]:
        assert torch.equal(logprob, results[0][0]) and torch.equal(gradient, results[0][1])
    prompts = [len(sequence) - answer for sequence, answer in zip(ids, models.ANSWERS, strict=True)]
    assert torch.equal(torch.cat(engine_logprobs(decoder, ids, prompts, models.CONTEXT)), results[0][0])


@pytest.mark.slow
def test_the_bench_compares_trainer_and_engine_with_the_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU it runs once and unattended; here on the CPU, with short answers."""
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "bench")
    import gpu_parity

    assert expand_with(gpu_parity.quantise) == expand_with(Recipe.load("fp8_block").apply)
    result: dict[str, Any] = {}
    gpu_parity.parity(result, "cpu", 40, ["Qwen3"])
    assert [(found["differing"], found["tokens"] > 200) for found in result.values()] == [(0, True)] * 2


def expand_with(quantise: Callable[[Any], None]) -> Coverage:
    model = models.tiny("qwen3")
    quantise(model)
    return expand(model)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_run_on_cuda_is_refused_where_there_is_none(tmp_path: Path) -> None:
    from trtl_rl.config import load_config
    from trtl_rl.demo.defaults import demo_settings
    from trtl_rl.trainer.trainer import Trainer

    config = load_config(None, ["device=cuda", f"run_dir={tmp_path / 'run'}"], demo_settings())
    with pytest.raises(UserError, match="no CUDA device"):
        Trainer(args=config).train()
