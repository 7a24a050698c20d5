"""The recipe: one YAML file decides what both sides run, and nothing else does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest
import torch

import trtl_rl.recipe
from trtl_rl.errors import UserError
from trtl_rl.kernels.kernel_set import KernelSet
from trtl_rl.model.bind import TrainableDecoder, describe
from trtl_rl.model.weights import DecoderWeights
from trtl_rl.recipe.coverage import Coverage, CoveredLinear
from trtl_rl.recipe.formats import HIGH_PRECISION, BlockFormat, LinearFormat
from trtl_rl.recipe.recipe import BACKEND, Recipe, expand

BUNDLED = (Path(trtl_rl.recipe.__file__).parent / "fp8_block.yaml").read_text()
FP8 = LinearFormat(BlockFormat((128, 128), "amax_over_448"), BlockFormat((1, 128), "inverse"), "fp8", "fp8", "fp8")


@pytest.fixture
def recipe(tmp_path: Path) -> Callable[..., str]:
    """Writes a variant of the bundled recipe: pairs (old, new) of text, and entries that are added at the end."""

    def write(*changes: tuple[str, str], entry: str = "") -> str:
        text = BUNDLED
        for old, new in changes:
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        file = tmp_path / "variant.yaml"
        file.write_text(text + entry)
        return str(file)

    return write


def exclude(pattern: str) -> str:
    return f"    - quantizer_name: '{pattern}'\n      enable: false\n"


def applied(name: str, family: str = "qwen3", **options: Any) -> Any:
    model = models.tiny(family, **options)
    Recipe.load(name).apply(model)
    return model


def excluded(coverage: Coverage) -> set[str]:
    return {item.name for item in coverage.linears if not item.format.quantised}


def engine_coverage(decoder: TrainableDecoder) -> Coverage:
    """What an engine reports that got the description as JSON and the tensors of a refit."""
    description = type(decoder.description).from_json(json.loads(json.dumps(decoder.description.to_json())))
    weights = DecoderWeights(description, KernelSet(False))
    weights.load(decoder.snapshot)
    return weights.coverage()


def test_the_bundled_recipe_is_expanded_to_every_linear_but_the_head() -> None:
    coverage = expand(applied("fp8_block"))
    assert [item.name for item in coverage.linears] == sorted(item.name for item in coverage.linears)
    assert len(coverage.linears) == 2 * 7 + 1 and excluded(coverage) == {"lm_head"}
    assert {item.format for item in coverage.linears if item.name != "lm_head"} == {FP8}
    shapes = {item.name: item.shape for item in coverage.linears}
    assert shapes["model.layers.1.mlp.down_proj"] == (96, 160) and shapes["lm_head"] == (61, 96)


def test_coverage_survives_json() -> None:
    coverage = expand(applied("fp8_block"))
    again = Coverage.from_json(json.loads(json.dumps(coverage.to_json())))
    assert again == coverage and again.digest == coverage.digest and again.difference(coverage) == []


def test_the_digest_is_stable_and_ignores_comments_and_the_order_of_keys(recipe: Callable[..., str]) -> None:
    digest = Recipe.load("fp8_block").digest
    assert digest == Recipe.load("fp8_block").digest and len(digest) == 64
    swapped = (
        "{block: [128, 128], scale: amax_over_448, round: fp32, fprop: fp8}",
        "{fprop: fp8, round: fp32, scale: amax_over_448, block: [128, 128]} # moved",
    )
    assert Recipe.load(recipe(swapped, entry="# a comment\n")).digest == digest
    assert Recipe.load(recipe(("block: [1, 128]", "block: [1, 64]"))).digest != digest
    assert Recipe.load("none").digest != digest


def test_modelopt_really_inserts_the_quantisers() -> None:
    import modelopt.torch.opt as mto
    from modelopt.torch.quantization.nn import TensorQuantizer

    model = applied("fp8_block")
    enabled = {n for n, m in model.named_modules() if isinstance(m, TensorQuantizer) and m.is_enabled}
    linears = [item.name for item in expand(model).linears if item.name != "lm_head"]
    assert enabled == {f"{name}.{kind}" for name in linears for kind in ("weight_quantizer", "input_quantizer")}
    assert all(model.get_submodule(name).backend == BACKEND for name in enabled)
    assert mto.ModeloptStateManager.is_converted(model)


def test_nothing_is_calibrated(monkeypatch: pytest.MonkeyPatch) -> None:
    from modelopt.torch.quantization.nn import TensorQuantizer
    from modelopt.torch.quantization.nn.modules import tensor_quantizer

    applied("fp8_block")  # registers the backend
    calls = []
    registered = tensor_quantizer._QUANT_FUNCTIONAL_BACKENDS[BACKEND]

    def counted(x: torch.Tensor, quantiser: Any) -> torch.Tensor:
        calls.append(tuple(x.shape))
        return registered(x, quantiser)

    monkeypatch.setitem(tensor_quantizer._QUANT_FUNCTIONAL_BACKENDS, BACKEND, counted)
    model = models.tiny("qwen3")
    stock = model.forward
    before = {name: p.clone() for name, p in model.named_parameters()}
    decoder = models.bind(model, "fp8_block")
    models.logprobs(decoder)
    assert calls == []
    for name, module in model.named_modules():
        if isinstance(module, TensorQuantizer):
            assert module.amax is None, name
    assert not [name for name in model.state_dict() if "quantizer" in name]
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    stock(torch.tensor([[1, 2, 3]]))
    assert len(calls) == 2 * 14  # the counter counts


@pytest.mark.parametrize("line", ["algorithm: max", "algorithm: {method: max}", ""])
def test_a_recipe_that_calibrates_is_refused(recipe: Callable[..., str], line: str) -> None:
    name = recipe(("algorithm: null # nothing is calibrated, ever", line or "# nothing"))
    with pytest.raises(UserError, match="algorithm"):
        Recipe.load(name).apply(models.tiny("llama"))


CHANGES: dict[str, tuple[tuple[tuple[str, str], ...], str]] = {
    "weight block": ((("block: [128, 128]", "block: [64, 64]"),), ""),
    "weight scale": ((("scale: amax_over_448, round", "scale: inverse, round"),), ""),
    "weight rounding": ((("amax_over_448, round: fp32", "amax_over_448, round: pow2"),), ""),
    "activation block": ((("block: [1, 128]", "block: [1, 64]"),), ""),
    "activation scale": ((("scale: inverse, round", "scale: amax_over_448, round"),), ""),
    "activation rounding": ((("inverse, round: fp32", "inverse, round: pow2"),), ""),
    "results in bfloat16": ((("compute: fp32", "compute: bf16"),), ""),
    "excluded module": ((), exclude("*q_proj*")),
    "excluded layer": ((), exclude("*layers.1.mlp.down_proj*")),
    "excluded activations": ((), exclude("*up_proj.input_quantizer")),
    "quantised head": (
        (("quantizer_name: '*lm_head*'\n      enable: false", "quantizer_name: '*none*'\n      enable: false"),),
        "",
    ),
}


@pytest.fixture(scope="module")
def bundled_decoder() -> TrainableDecoder:
    return models.bind(models.tiny("qwen3", aligned=True), "fp8_block")


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_one_line_of_the_recipe_changes_the_forward_and_both_coverages(
    recipe: Callable[..., str], bundled_decoder: TrainableDecoder, change: str, tied: bool
) -> None:
    changes, entry = CHANGES[change]
    name = recipe(*changes, entry=entry)
    decoder = models.bind(models.tiny("qwen3", aligned=True, tied=tied), name)
    before = bundled_decoder if not tied else models.bind(models.tiny("qwen3", aligned=True, tied=True), "fp8_block")
    assert not torch.equal(models.logprobs(decoder), models.logprobs(before))
    trainer = decoder.description.coverage
    assert trainer.difference(decoder.weights.coverage()) == [] and trainer == decoder.weights.coverage()
    assert trainer == engine_coverage(decoder)
    different = trainer.difference(before.description.coverage)
    assert different and trainer.digest != before.description.coverage.digest
    if entry:
        pattern = entry.split("'")[1].strip("*").partition(".input")[0]
        assert all(pattern in line for line in different)
    assert len(different) == {
        "excluded module": 2,
        "excluded layer": 1,
        "excluded activations": 2,
        "results in bfloat16": 15,
    }.get(change, 1 if change == "quantised head" else 14)


@pytest.mark.parametrize("quantiser", ["self_attn.v_proj.input_quantizer", "mlp.down_proj.weight_quantizer"])
def test_a_quantiser_that_is_disabled_in_the_model_is_off_on_both_sides(
    bundled_decoder: TrainableDecoder, quantiser: str
) -> None:
    model = applied("fp8_block", aligned=True)
    model.get_submodule(f"model.layers.0.{quantiser}").disable()
    decoder = TrainableDecoder(model, KernelSet(False, backward=True), models.CONTEXT)
    decoder.refresh(0)
    assert not torch.equal(models.logprobs(decoder), models.logprobs(bundled_decoder))
    trainer, before = decoder.description.coverage, bundled_decoder.description.coverage
    assert trainer == decoder.weights.coverage() == engine_coverage(decoder)
    (line,) = trainer.difference(before)
    assert line.startswith(f"model.layers.0.{quantiser.rpartition('.')[0]}:")


def test_a_quantiser_that_changes_under_a_bound_model_is_noticed() -> None:
    model = models.tiny("llama")
    decoder = models.bind(model, "fp8_block")
    model.model.layers[1].mlp.up_proj.input_quantizer.disable()
    with pytest.raises(RuntimeError, match=r"model\.layers\.1\.mlp\.up_proj"):
        decoder.refresh(1)
    assert decoder.weights.version == 0


@pytest.mark.parametrize("family", models.FAMILIES)
def test_fused_parts_of_different_formats_equal_an_unfused_computation(recipe: Callable[..., str], family: str) -> None:
    """q in pow2 blocks of 32, k off, v as the rest; gate without activations: yet y is the linears' own result."""
    other = """    - quantizer_name: '*q_proj.input_quantizer'
      cfg:
        num_bits: e4m3
        type: dynamic
        backend: trtl_fp8_block
        backend_extra_args: {block: [1, 32], scale: amax_over_448, round: pow2}
"""
    name = recipe(entry=other + exclude("*k_proj*") + exclude("*gate_proj.input_quantizer"))
    model = models.tiny(family)
    decoder = models.bind(model, name)
    layer = decoder.weights.layers[0]
    assert len(layer.qkv) == 3 and len(layer.gate_up) == 2
    assert decoder.description.coverage == engine_coverage(decoder)
    from trtl_rl.kernels.linear import project
    from trtl_rl.kernels.ops import gemm
    from trtl_rl.recipe.codec import quantise_dequantise

    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(0))
    y, _ = project(x, layer.spec.qkv, [t for operand in layer.qkv for t in operand.tensors()])
    expected = []
    for role in ("q_proj", "k_proj", "v_proj"):
        module = getattr(model.model.layers[0].self_attn, role)
        format = decoder.description.format(f"model.layers.0.self_attn.{role}")
        weight = module.weight.detach().bfloat16().float()
        weight = weight if format.forward_weight is None else quantise_dequantise(weight, format.forward_weight)
        left = x if format.forward_activation is None else quantise_dequantise(x, format.forward_activation)
        out = gemm(left, weight)
        expected.append(out if module.bias is None else out + module.bias.detach().bfloat16().float())
    assert torch.equal(y, torch.cat(expected, -1))


def test_a_head_that_shares_a_quantised_embedding_runs_its_format(recipe: Callable[..., str]) -> None:
    name = recipe(*CHANGES["quantised head"][0])
    decoder = models.bind(models.tiny("qwen2", tied=True, aligned=True), name)
    assert decoder.description.tied and decoder.description.format("lm_head") == FP8
    assert decoder.weights.head.formats == {"lm_head": FP8.weight}
    assert decoder.snapshot["model.embed_tokens.weight"].dtype == torch.bfloat16
    assert not torch.equal(decoder.weights.head.values, decoder.weights.embedding)


def test_an_engine_that_loaded_nothing_does_not_claim_the_recipe() -> None:
    description = models.bind(models.tiny("qwen3"), "fp8_block").description
    lines = description.coverage.difference(DecoderWeights(description, KernelSet(False)).coverage())
    assert len(lines) == 14 and not any(line.startswith("lm_head") for line in lines)


def test_patterns_of_exclusion_are_exact(recipe: Callable[..., str]) -> None:
    coverage = expand(applied(recipe(entry=exclude("*.mlp.gate") + exclude("*.mlp.gate.*") + exclude("gate_proj"))))
    assert excluded(coverage) == {"lm_head"}
    coverage = expand(applied(recipe(entry=exclude("*.mlp.gate_proj.*"))))
    assert excluded(coverage) == {"lm_head", *(f"model.layers.{i}.mlp.gate_proj" for i in range(2))}


def test_a_difference_names_the_modules() -> None:
    def coverage(**formats: LinearFormat) -> Coverage:
        return Coverage(tuple(CoveredLinear(name, (4, 4), format) for name, format in formats.items()))

    mine, theirs = coverage(a=FP8, b=FP8, c=FP8), coverage(b=HIGH_PRECISION, c=FP8, d=FP8)
    lines = mine.difference(theirs)
    assert [line.split(":")[0] for line in lines] == ["a", "d", "b"] and "only on one side" in lines[0]
    reshaped = Coverage((CoveredLinear("a", (4, 8), FP8),))
    assert "(4, 4) against (4, 8)" in coverage(a=FP8).difference(reshaped)[0]
    assert coverage(a=FP8).digest != reshaped.digest
    assert coverage(a=FP8) != Coverage((CoveredLinear("a", (4, 4), FP8, "why"),))
    assert coverage(a=FP8).digest == Coverage((CoveredLinear("a", (4, 4), FP8, "why"),)).digest


ARGUMENTS = "{block: [128, 128], scale: amax_over_448, round: fp32, fprop: fp8}"
TAIL = f"backend: trtl_fp8_block\n        backend_extra_args: {ARGUMENTS}"
WRONG = {
    "misspelt argument": ((ARGUMENTS, "{blok: [128, 128], scale: amax_over_448}"), r"'blok'.*Did you mean 'block'"),
    "unknown scale": ((ARGUMENTS, "{block: [128, 128], scale: max}"), r"scale must be one of amax_over_448, inverse"),
    "missing scale": ((ARGUMENTS, "{block: [128, 128]}"), "scale must be one of"),
    "missing block": ((ARGUMENTS, "{scale: inverse}"), "block must be two positive integers"),
    "zero block": ((ARGUMENTS, "{block: [0, 128], scale: inverse}"), "block must be two positive integers"),
    "block of a truth value": (
        (ARGUMENTS, "{block: [true, 128], scale: inverse}"),
        "block must be two positive integers",
    ),
    "an attribute that does nothing": (
        (
            "num_bits: e4m3\n        type: dynamic\n        " + TAIL,
            "num_bits: e4m3\n        block_sizes: {-1: 16}\n        " + TAIL,
        ),
        "'block_sizes' has no effect",
    ),
    "misspelt attribute": (
        ("type: dynamic\n        " + TAIL, "typ: dynamic\n        " + TAIL),
        "'typ'.*Did you mean 'type'",
    ),
    "quantisers one after another": (
        (
            "      cfg:\n        num_bits: e4m3\n        type: dynamic\n        " + TAIL,
            "      cfg: [{num_bits: 4}, {num_bits: e4m3}]",
        ),
        "cfg is a list",
    ),
    "arguments without keys": ((ARGUMENTS, "foo"), "must be keys and values"),
    "a list of precisions": (("compute: fp32", "compute: [fp32]"), "compute must be one of bf16, fp32"),
    "unknown precision": (("compute: fp32", "compute: fp16"), "compute must be one of bf16, fp32"),
    "unknown rounding": ((ARGUMENTS, "{block: [1, 1], scale: inverse, round: up}"), "round must be one of fp32, pow2"),
    "unknown gradient": (("dgrad: fp8", "dgrad: fp4"), "dgrad must be one of bf16, fp8"),
    "no quantizers": (("quantize:\n", "quantize:\nother:\n"), "quant_cfg"),
    "no section": (("quantize:\n", "quantise:\n"), "needs the sections"),
    "no YAML": (("metadata:", "metadata: ]"), "not valid YAML"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_recipe_is_refused_when_it_is_read(recipe: Callable[..., str], case: str) -> None:
    change, message = WRONG[case]
    with pytest.raises(UserError, match=message):
        Recipe.load(recipe(change))


def test_an_unknown_recipe_is_refused_with_the_nearest() -> None:
    with pytest.raises(
        UserError, match=r"no recipe 'fp8_blok'.*fp8_block, fp8_block_pow2, none.*Did you mean 'fp8_block'"
    ):
        Recipe.load("fp8_blok")


KV_CACHE = """    - quantizer_name: '*[kv]_bmm_quantizer'
      cfg: {num_bits: e4m3, type: dynamic, backend: trtl_fp8_block, backend_extra_args: {block: [1, 128], scale: inverse}}
"""
EMBEDDING = """    - quantizer_name: '*embed_tokens.weight_quantizer'
      cfg: {num_bits: e4m3, type: dynamic, backend: trtl_fp8_block, backend_extra_args: {block: [1, 128], scale: inverse}}
"""
OUTPUT = """    - quantizer_name: '*down_proj.output_quantizer'
      cfg: {num_bits: e4m3, type: dynamic, backend: trtl_fp8_block, backend_extra_args: {block: [1, 128], scale: inverse}}
"""
INT8 = """    - quantizer_name: '*down_proj.weight_quantizer'
      cfg: {num_bits: 8, axis: 0}
"""
UNRUNNABLE = {
    "activation of many rows": ((("block: [1, 128]", "block: [128, 128]"),), "", r"q_proj.*one row high"),
    "backward of a weight": (((ARGUMENTS, ARGUMENTS[:-1] + ", dgrad: fp8}"),), "", r"q_proj\.weight_quantizer: dgrad"),
    "two precisions of one product": (
        (("fp32, fprop: fp8}", "fp32, fprop: bf16}"),),
        "",
        r"q_proj: fprop must be the same",
    ),
    "results of a weight": (
        ((ARGUMENTS, ARGUMENTS[:-1] + ", compute: bf16}"),),
        "",
        r"q_proj\.weight_quantizer: compute",
    ),
    "another backend": ((), INT8, r"layers\.0\.mlp\.down_proj\.weight_quantizer.*num_bits: e4m3"),
    "outputs": ((), OUTPUT, r"layers\.0\.mlp\.down_proj\.output_quantizer"),
    "key/value cache": ((), KV_CACHE, r"layers\.0\.self_attn\.k_bmm_quantizer"),
    "embedding": ((), EMBEDDING, r"model\.embed_tokens\.weight_quantizer"),
}


@pytest.mark.parametrize("case", UNRUNNABLE)
def test_a_quantiser_that_the_kernels_do_not_run_is_refused_by_name(recipe: Callable[..., str], case: str) -> None:
    changes, entry, message = UNRUNNABLE[case]
    model = applied(recipe(*changes, entry=entry))
    with pytest.raises(UserError, match=message):
        describe(model)


def test_what_modelopt_refuses_is_a_user_error(recipe: Callable[..., str]) -> None:
    with pytest.raises(UserError, match="ModelOpt refuses recipe"):
        Recipe.load(recipe(("recipe_type: ptq", "recipe_type: magic"))).apply(models.tiny("llama"))


@pytest.mark.parametrize("family", models.FAMILIES)
def test_the_stock_forward_of_modelopt_is_the_same_model(family: str) -> None:
    """Statistically, not bit for bit: another order of sums moves a few values over a boundary of the FP8 grid.

    Such a flip is 6 % of one operand. So logprobs agree much better with the stock forward of the same recipe than
    with the model without a recipe.
    """
    model = models.tiny(family, aligned=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16().float())  # the bound forward quantises rounded weights
    stock = model.forward
    decoder = models.bind(model, "fp8_block")
    ids = models.sequences(128, (64,) * 8)
    with torch.no_grad():
        bound = decoder.forward(ids, [63] * 8, 1.0)[0]
        logits = stock(torch.tensor(ids)).logits[:, :-1]
        plain_decoder = models.bind(models.tiny(family, aligned=True))
        plain = plain_decoder.forward(ids, [63] * 8, 1.0)[0]
    reference = torch.log_softmax(logits, -1).gather(-1, torch.tensor(ids)[:, 1:, None]).flatten()
    assert not torch.equal(reference, bound)
    difference, effect = (bound - reference).abs(), (plain - reference).abs()
    print(family, difference.median(), difference.mean(), difference.max(), effect.median(), effect.mean())
    assert difference.mean() < 0.2 * effect.mean() and difference.median() < 0.1 * effect.median()


def test_weights_that_come_without_codes_are_not_quantised_on_arrival() -> None:
    decoder = models.bind(models.tiny("llama"), "fp8_block")
    name = "model.layers.0.mlp.up_proj.weight"
    with pytest.raises(AssertionError, match="without codes"):
        decoder.weights.load({name: decoder.parameters[name].detach().bfloat16()})
