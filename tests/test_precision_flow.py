"""The switches of the recipe for a whole model: fprop, dgrad, wgrad, compute; and the ways to cut a training batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import models
import pytest
import torch
from test_row_invariance import engine_logprobs
from torch.utils.checkpoint import set_checkpoint_early_stop

from trtl_rl.recipe.codec import decode, encode, round_bf16
from trtl_rl.recipe.recipe import Recipe

BUNDLED = Recipe.load("fp8_block").text


def variant(directory: Path, **switches: str) -> str:
    """A file with the bundled recipe in which each of ``switches`` has another value."""
    text = BUNDLED
    for key, value in switches.items():
        for old in ("fp8", "fp32"):
            text = text.replace(f"{key}: {old}", f"{key}: {value}")
    path = directory / f"{'-'.join(f'{k}_{v}' for k, v in switches.items())}.yaml"
    path.write_text(text)
    return str(path)


def gradients(recipe: str, family: str = "qwen3", **options: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logprobs of the standard sequences, and the gradients of a fixed combination of them."""
    model = models.tiny(family, **options)
    decoder = models.bind(model, recipe)
    logprob, _ = decoder.forward(models.sequences(decoder.description.vocab), list(models.ANSWERS), 0.7)
    generator = torch.Generator().manual_seed(5)
    (logprob * torch.randn(logprob.shape, generator=generator)).sum().backward()
    return logprob.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> dict[str, float]:
    return {name: float((a[name] - b[name]).norm() / b[name].norm()) for name in b}


def test_rounding_to_bf16_is_the_cast() -> None:
    special = [
        0.0,
        -0.0,
        float("inf"),
        -float("inf"),
        float("nan"),
        1e-45,
        -1e-40,
        3.4e38,
        65535.0,
        1.00390625,
        1.01171875,
    ]
    x = torch.cat((torch.tensor(special), torch.randn(100_000, generator=torch.Generator().manual_seed(0)) * 1e3))
    got, expected = round_bf16(x), x.bfloat16().float()
    same = got.view(torch.int32) == expected.view(torch.int32)
    assert bool((same | (got.isnan() & expected.isnan())).all())


@pytest.mark.parametrize("family", models.FAMILIES)
def test_fprop_bf16_is_the_forward_pass_without_a_recipe(tmp_path: Path, family: str) -> None:
    """With all three switches off, nothing of the recipe is left; with dgrad or wgrad on, only gradients change."""
    plain, gradient = gradients("none", family)
    off, off_gradient = gradients(variant(tmp_path, fprop="bf16", dgrad="bf16", wgrad="bf16"), family)
    assert torch.equal(off, plain) and all(torch.equal(off_gradient[name], gradient[name]) for name in gradient)
    backward, backward_gradient = gradients(variant(tmp_path, fprop="bf16"), family)
    assert torch.equal(backward, plain)
    changed = distance(backward_gradient, gradient)
    assert all(0 < changed[name] < 0.3 for name in changed if "layers" in name and "proj.weight" in name)
    assert max(changed.values()) < 0.6


@pytest.mark.parametrize("switch", ["dgrad", "wgrad"])
def test_each_switch_of_the_backward_pass_acts_alone(tmp_path: Path, switch: str) -> None:
    logprob, both = gradients("fp8_block")
    other, one = gradients(variant(tmp_path, **{switch: "bf16"}))
    assert torch.equal(logprob, other)
    changed = distance(one, both)
    # WGrad ends in the weight's gradient; what DGrad changes reaches all that lies before the linear.
    last = changed["model.layers.1.mlp.down_proj.weight"]
    first = changed["model.embed_tokens.weight"]
    assert (last > 0, first > 0) == ((False, True) if switch == "dgrad" else (True, False))


def test_dgrad_takes_the_codes_of_the_weight_when_the_forward_pass_does_not(tmp_path: Path) -> None:
    model = models.tiny("qwen3")
    decoder = models.bind(model, variant(tmp_path, fprop="bf16"))
    name = "model.layers.0.mlp.up_proj"
    format = decoder.description.format(name)
    assert decoder.snapshot[f"{name}.weight"].dtype == torch.bfloat16
    operand = next(o for o in decoder.weights.layers[0].gate_up if name in o.names)
    weight = model.get_submodule(name).weight.detach().bfloat16().float()
    assert format.weight is not None
    assert torch.equal(operand.tensors()[0][-160:], weight)
    assert torch.equal(operand.gradient_tensors()[0][-160:], decode(*encode(weight, format.weight), format.weight))
    assert decoder.weights.coverage() == decoder.description.coverage


def test_weights_of_dgrad_are_those_of_the_newest_version(tmp_path: Path) -> None:
    """Of a linear too whose own weight is not quantised, but which runs as one GEMM with others whose is."""
    file = Path(variant(tmp_path, fprop="bf16"))
    file.write_text(file.read_text() + "    - quantizer_name: '*q_proj.weight_quantizer'\n      enable: false\n")
    decoder = models.bind(models.tiny("qwen3"), str(file))
    with torch.no_grad():
        for parameter in decoder.model.parameters():
            parameter.mul_(2)
    decoder.refresh(1)
    for layer in decoder.weights.layers:
        for operand in layer.operands():
            forward, backward = operand.tensors()[0], operand.gradient_tensors()[0]
            assert float((forward - backward).norm() / forward.norm()) < 0.05
        assert torch.equal(layer.qkv[0].tensors()[0][:96], layer.qkv[0].gradient_tensors()[0][:96])


def test_compute_bf16_rounds_what_each_linear_returns(tmp_path: Path) -> None:
    recipe = variant(tmp_path, compute="bf16")
    decoder = models.bind(models.tiny("qwen2"), recipe)
    layer = decoder.weights.layers[0]
    x = torch.randn(32, layer.spec.hidden)
    cos = torch.ones(32, layer.spec.head_dim)
    _, _, v, *_ = layer.units.before([x, *layer.before_weights(), cos, torch.zeros_like(cos)])
    assert torch.equal(v, v.bfloat16().float()) and not torch.equal(x, x.bfloat16().float())
    logprob, gradient = gradients(recipe)
    fp32, fp32_gradient = gradients("fp8_block")
    assert 0 < float((logprob - fp32).abs().max()) < 0.5
    assert max(distance(gradient, fp32_gradient).values()) < 0.3


@pytest.mark.parametrize(
    "switches", [{"compute": "bf16"}, {"round": "pow2"}, {"fprop": "bf16", "compute": "bf16"}], ids=str
)
@pytest.mark.parametrize("family", models.FAMILIES)
def test_an_engine_has_the_bits_of_the_trainer_under_every_recipe(
    tmp_path: Path, family: str, switches: dict[str, str]
) -> None:
    """Decoded token by token from weights that were received, against one packed training pass."""
    decoder = models.bind(models.tiny(family), variant(tmp_path, **switches))
    ids = models.sequences(decoder.description.vocab)
    prompts = [len(sequence) - answer for sequence, answer in zip(ids, models.ANSWERS, strict=True)]
    theirs = engine_logprobs(decoder, ids, prompts, models.CONTEXT)
    assert torch.equal(models.logprobs(decoder, 0.7), torch.cat(theirs))


@pytest.mark.parametrize("recipe", ["none", "fp8_block"])
@pytest.mark.parametrize("family", models.FAMILIES)
def test_gradient_checkpointing_changes_no_bit_and_computes_layers_again(family: str, recipe: str) -> None:
    results, calls = [], []
    for checkpointing in (False, True):
        model = models.tiny(family)
        decoder = models.bind(model, recipe)
        decoder.gradient_checkpointing = checkpointing
        count = 0
        layer = decoder.weights.layers[0]

        def counted(inputs: Any, run: Any = layer.units.after) -> Any:
            nonlocal count
            count += 1
            return run(inputs)

        object.__setattr__(layer.units, "after", counted)
        kept = 0

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal kept
            kept += tensor.numel() * tensor.element_size()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), set_checkpoint_early_stop(False):
            logprob, _ = decoder.forward(models.sequences(61), list(models.ANSWERS), 1.0)
            forward_bytes = kept
            logprob.sum().backward()
        results.append((logprob.detach(), {n: p.grad for n, p in model.named_parameters()}))
        calls.append((count, forward_bytes))
    assert torch.equal(results[0][0], results[1][0])
    assert all(torch.equal(results[0][1][name], grad) for name, grad in results[1][1].items())
    (once, much), (twice, little) = calls
    assert (once, twice) == (1, 2) and little < much / 2


def test_inputs_of_quantised_linears_are_kept_as_codes() -> None:
    """Kept as decoded float32 they would take four times the memory."""
    decoder = models.bind(models.tiny("qwen3"), "fp8_block")
    shapes: dict[torch.dtype, list[tuple[int, ...]]] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        shapes.setdefault(tensor.dtype, []).append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        decoder.forward(models.sequences(61), list(models.ANSWERS), 1.0)
    # q/k/v, o, gate/up and down of two layers; 96 wide but for down's 160
    assert sorted(width for _, width in shapes[torch.float8_e4m3fn]) == [96] * 6 + [160] * 2


def split_gradients(recipe: str, cuts: list[list[int]]) -> dict[str, torch.Tensor]:
    """Gradients of the standard sequences, accumulated over micro-batches of the given sequences."""
    model = models.tiny("qwen3", aligned=True)
    decoder = models.bind(model, recipe)
    lengths = (60, 33, 90, 75)
    ids = models.sequences(decoder.description.vocab, lengths)
    answers = [n - 5 for n in lengths]
    generator = torch.Generator().manual_seed(5)
    factors = [torch.randn(n, generator=generator) for n in answers]
    for part in cuts:
        logprob, _ = decoder.forward([ids[i] for i in part], [answers[i] for i in part], 1.0)
        (logprob * torch.cat([factors[i] for i in part])).sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


CUTS = [[[0, 1], [2, 3]], [[0], [1], [2], [3]], [[3, 1], [0, 2]]]


@pytest.mark.parametrize("cuts", CUTS, ids=str)
def test_cutting_a_batch_changes_nothing_beyond_rounding_without_fp8_gradients(tmp_path: Path, cuts: Any) -> None:
    recipe = variant(tmp_path, wgrad="bf16", dgrad="bf16")
    whole = split_gradients(recipe, [[0, 1, 2, 3]])
    assert max(distance(split_gradients(recipe, cuts), whole).values()) < 2e-6


@pytest.mark.parametrize("cuts", CUTS, ids=str)
def test_cutting_a_batch_moves_the_groups_of_wgrad_within_a_bound(cuts: Any) -> None:
    """WGrad quantises dY and X in groups of 128 tokens of the packed batch, so other cuts give other groups.

    Rounding to three bits of mantissa is off by at most 1/16 of a value, 1/38 in the root mean square. Two operands under
    two cuts make sqrt(4)/38 = 5.3 % of a sum of independent products, and less where products add up.
    """
    whole = split_gradients("fp8_block", [[0, 1, 2, 3]])
    changed = distance(split_gradients("fp8_block", cuts), whole)
    weights = [value for name, value in changed.items() if "proj.weight" in name]
    assert 0.001 < max(weights) < 0.053


def test_no_grad_builds_no_graph_and_has_the_same_bits() -> None:
    decoder = models.bind(models.tiny("llama"), "fp8_block")
    ids = models.sequences(61)
    with torch.no_grad():
        quiet, _ = decoder.forward(ids, list(models.ANSWERS), 1.0)
    loud, _ = decoder.forward(ids, list(models.ANSWERS), 1.0)
    assert not quiet.requires_grad and loud.requires_grad and torch.equal(quiet, loud.detach())


def test_masters_are_quantised_once_for_a_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once for a forward pass: that alone would cost a third of a training step."""
    import trtl_rl.model.bind as bind

    decoder = models.bind(models.tiny("qwen3"), "fp8_block")
    calls: list[int] = []
    monkeypatch.setattr(bind, "encode", lambda *arguments: calls.append(1) or encode(*arguments))
    for _ in range(3):
        decoder.forward(models.sequences(61), list(models.ANSWERS), 1.0)[0].sum().backward()
    assert not calls
    decoder.refresh(1)
    assert len(calls) == 14
