"""The bound forward against computations that share nothing with it: stock transformers, and float64 products."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import models
import numpy as np
import pytest
import reference
import torch

from trtl_rl.errors import UserError
from trtl_rl.kernels.kernel_set import KernelSet
from trtl_rl.kernels.linear import project
from trtl_rl.model.architectures import check_architecture
from trtl_rl.model.bind import TrainableDecoder, describe
from trtl_rl.model.weights import SCALE_SUFFIX, tensor_specs

LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {}),
    "qwen2 tied": ("qwen2", {"tied": True}),
    "qwen3": ("qwen3", {}),
    "qwen3 tied aligned": ("qwen3", {"tied": True, "aligned": True}),
    "qwen3 biases": ("qwen3", {"attention_bias": True}),
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tied": True}),
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "a head for each query": ("qwen3", {"num_key_value_heads": 4}),
    "one key head": ("llama", {"num_key_value_heads": 1, "num_hidden_layers": 3}),
    "other base of rope": ("qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "rope llama3": (
        "llama",
        {"rope_parameters": {**LLAMA3, "rope_theta": 5e5, "original_max_position_embeddings": 32}},
    ),
    "rope linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}),
    "rope yarn": (
        "qwen3",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "rope_theta": 1e4,
                "original_max_position_embeddings": 32,
            }
        },
    ),
}


def rounded(model: Any) -> Any:
    """A copy for stock transformers, with the weights rounded to BF16."""
    plain = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.copy_(parameter.bfloat16().float())
    return plain


def stock_logprobs(plain: Any, ids: list[list[int]], answers: tuple[int, ...], temperature: float) -> torch.Tensor:
    out = []
    for sequence, answer in zip(ids, answers, strict=True):
        logits = plain(torch.tensor([sequence])).logits[0, :-1] / temperature
        logprob = torch.log_softmax(logits, -1).gather(-1, torch.tensor(sequence[1:])[:, None])[:, 0]
        out.append(logprob[-answer:])
    return torch.cat(out)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("case", CASES)
def test_without_a_recipe_logprobs_and_gradients_are_those_of_transformers(case: str, temperature: float) -> None:
    family, options = CASES[case]
    model = models.tiny(family, **options)
    plain = rounded(model)
    decoder = models.bind(model)
    ids = models.sequences(decoder.description.vocab)
    logprob, entropy = model(ids, list(models.ANSWERS), temperature)
    expected = stock_logprobs(plain, ids, models.ANSWERS, temperature)
    assert logprob.shape == entropy.shape == (sum(models.ANSWERS),)
    assert (logprob - expected).norm() < 3e-6 * expected.norm()
    assert (logprob - expected).abs().max() < 3e-5
    weights = torch.randn(logprob.shape, generator=torch.Generator().manual_seed(2))
    (logprob * weights).sum().backward()
    (expected * weights).sum().backward()
    mine, theirs = dict(model.named_parameters()), dict(plain.named_parameters())
    assert mine.keys() == theirs.keys()
    for name, parameter in theirs.items():
        got = mine[name].grad
        assert got is not None and got.dtype == torch.float32, name
        # the bias of k shifts all scores of a row alike, so its true gradient is zero: compare with that of q
        scale = theirs[name.replace("k_proj.bias", "q_proj.bias")].grad.norm()
        assert scale > 0 and (got - parameter.grad).norm() < 1e-5 * scale, name


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside a logprob"])
def test_the_entropy_and_its_gradient_are_those_of_the_distribution(beside: bool) -> None:
    model = models.tiny("qwen3")
    plain = rounded(model)
    models.bind(model)
    ids = models.sequences(61)
    logprob, entropy = model(ids, list(models.ANSWERS), 0.7)
    parts = []
    for sequence, answer in zip(ids, models.ANSWERS, strict=True):
        logits = plain(torch.tensor([sequence])).logits[0, :-1] / 0.7
        parts.append(torch.distributions.Categorical(logits=logits).entropy()[-answer:])
    expected = torch.cat(parts)
    assert torch.allclose(entropy, expected, atol=1e-5)
    weights = torch.randn(entropy.shape, generator=torch.Generator().manual_seed(2))
    mine, theirs = (entropy * weights).sum(), (expected * weights).sum()
    if beside:
        mine = mine + (logprob * weights.flip(0)).sum()
        theirs = theirs + (stock_logprobs(plain, ids, models.ANSWERS, 0.7) * weights.flip(0)).sum()
    mine.backward()
    theirs.backward()
    found = dict(model.named_parameters())
    for name, parameter in plain.named_parameters():
        got = found[name].grad
        assert got is not None and (got - parameter.grad).norm() < 1e-5 * parameter.grad.norm(), name


@pytest.mark.parametrize("aligned", [False, True], ids=["ragged", "aligned"])
@pytest.mark.parametrize("family", models.FAMILIES)
def test_with_the_recipe_each_linear_is_the_product_of_quantised_operands(family: str, aligned: bool) -> None:
    options: dict[str, Any] = {"attention_bias": True, "mlp_bias": True} if family == "llama" else {}
    model = models.tiny(family, aligned=aligned, **options)
    decoder = models.bind(model, "fp8_block")
    generator = torch.Generator().manual_seed(3)
    for operand in [*(o for layer in decoder.weights.layers for o in layer.operands()), decoder.weights.head]:
        x = torch.randn(64, operand.spec.in_features, generator=generator) * 3
        y, _ = project(x, (operand.spec,), operand.tensors())
        expected = []
        for name in operand.names:
            module = model.get_submodule(name)
            weight = module.weight.detach().bfloat16().double().numpy()
            left = x.double().numpy()
            if name != "lm_head":
                weight = reference.dequantised(weight, (128, 128), "amax_over_448")
                left = reference.dequantised(left, (1, 128), "inverse")
            bias = 0 if module.bias is None else module.bias.detach().bfloat16().double().numpy()
            expected.append(left @ weight.T + bias)
        got, want = y.double().numpy(), np.concatenate(expected, -1)
        assert np.linalg.norm(got - want) < 1e-6 * np.linalg.norm(want), operand.names


@pytest.mark.parametrize("family", models.FAMILIES)
def test_with_the_recipe_the_model_is_transformers_with_independently_quantised_linears(family: str) -> None:
    """Statistically: where float64 and float32 sums fall on two sides of a boundary, a code flips (6 % of a value)."""
    model = models.tiny(family)
    plain = rounded(model)
    without = copy.deepcopy(plain)
    decoder = models.bind(model, "fp8_block")
    for name, module in plain.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            module.forward = quantised_linear(module)
    lengths, answers = (60,) * 6, (59,) * 6
    ids = models.sequences(61, lengths)
    with torch.no_grad():
        mine = decoder.forward(ids, list(answers), 1.0)[0]
        difference = (mine - stock_logprobs(plain, ids, answers, 1.0)).abs()
        effect = (mine - stock_logprobs(without, ids, answers, 1.0)).abs()
    assert difference.mean() < 0.2 * effect.mean() and difference.median() < 0.1 * effect.median()


def quantised_linear(module: torch.nn.Linear) -> Any:
    weight = reference.dequantised(module.weight.detach().double().numpy(), (128, 128), "amax_over_448")

    def forward(x: torch.Tensor) -> torch.Tensor:
        left = reference.dequantised(x.reshape(-1, x.shape[-1]).double().numpy(), (1, 128), "inverse")
        y = torch.from_numpy(left @ weight.T).float().reshape(*x.shape[:-1], -1)
        return y if module.bias is None else y + module.bias

    return forward


@pytest.mark.parametrize("recipe", ["none", "fp8_block"])
@pytest.mark.parametrize("family", models.FAMILIES)
def test_gradients_packing_and_order_change_no_bit_of_a_logprob(family: str, recipe: str) -> None:
    decoder = models.bind(models.tiny(family), recipe)
    ids = models.sequences(61, (5, 17, 90, 9, 33))
    answers = [3, 10, 89, 1, 32]
    with torch.no_grad():
        whole = decoder.forward(ids, answers, 0.7)[0]
    trained = decoder.forward(ids, answers, 0.7)[0]
    assert trained.requires_grad and torch.equal(trained.detach(), whole)
    parts = whole.split(answers)
    with torch.no_grad():
        for order in ([4, 3, 2, 1, 0], [2, 0], [1, 4], [3], [2], [3, 3, 1]):
            out = decoder.forward([ids[i] for i in order], [answers[i] for i in order], 0.7)[0]
            assert torch.equal(out, torch.cat([parts[i] for i in order])), order
        fewer = decoder.forward(ids, [1] * 5, 0.7)[0]  # how many answer tokens are asked for changes none of them
        assert torch.equal(fewer, torch.stack([part[-1] for part in parts]))


@pytest.mark.parametrize("recipe", ["none", "fp8_block"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", models.FAMILIES)
def test_a_version_holds_the_tensors_that_the_layout_names(family: str, tied: bool, recipe: str) -> None:
    model = models.tiny(family, tied=tied)
    decoder = models.bind(model, recipe)
    layout = {spec.name: (spec.dtype, spec.shape) for spec in tensor_specs(decoder.description)}
    assert {name: (t.dtype, tuple(t.shape)) for name, t in decoder.snapshot.items()} == layout
    weights = {name for name in layout if not name.endswith(SCALE_SUFFIX)}
    assert weights == dict(model.named_parameters()).keys() and ("lm_head.weight" in weights) == (not tied)
    assert len(layout) - len(weights) == (14 if recipe == "fp8_block" else 0)
    before = {name: tensor.clone() for name, tensor in decoder.snapshot.items()}
    kept = decoder.snapshot
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    assert all(torch.equal(kept[name].float(), before[name].float()) for name in kept)  # no view of the masters


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight", "lm_head.weight"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_refused_by_name(name: str, value: float) -> None:
    model = models.tiny("llama")
    decoder = models.bind(model, "fp8_block")
    before = {key: tensor.clone() for key, tensor in decoder.snapshot.items()}
    with torch.no_grad():
        model.get_parameter(name).view(-1)[3] = value
    with pytest.raises(FloatingPointError, match=name):
        decoder.refresh(1)
    assert decoder.weights.version == 0 and decoder.snapshot.keys() == before.keys()


def test_an_answer_without_a_token_before_it_is_refused() -> None:
    decoder = models.bind(models.tiny("llama"))
    with pytest.raises(AssertionError, match="a token before it"):
        decoder.forward([[1, 2, 3], [4, 5]], [1, 2], 1.0)


def test_nothing_runs_before_a_version_is_loaded() -> None:
    decoder = TrainableDecoder(models.tiny("llama"), KernelSet(False, backward=True), models.CONTEXT)
    with pytest.raises(AssertionError, match="refresh"):
        decoder.forward([[1, 2, 3]], [1], 1.0)


DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
SLIDING = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("llama", {"rope_parameters": DYNAMIC}, "Rope type 'dynamic' is not supported; supported are default, linear"),
        ("llama", {"rope_parameters": PARTIAL}, "rotates only a part of each head"),
        ("qwen2", SLIDING, "sliding-window attention"),
        ("qwen3", SLIDING, "sliding-window attention"),
        ("llama", {"hidden_act": "gelu"}, "activation 'gelu' is not supported"),
    ],
)
def test_what_the_decoder_does_not_compute_is_refused(family: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        describe(models.tiny(family, **options))


@pytest.mark.parametrize("architectures", [["GPT2LMHeadModel"], ["Qwen3MoeForCausalLM"], [], None])
def test_another_architecture_is_refused_with_those_that_are_supported(architectures: list[str] | None) -> None:
    with pytest.raises(UserError, match="Qwen2ForCausalLM, Qwen3ForCausalLM, LlamaForCausalLM") as error:
        check_architecture(SimpleNamespace(architectures=architectures))
    if architectures:
        assert architectures[0] in str(error.value)
