"""Low-rank adapters: the same model as peft's, on both sides, and nothing else trained."""

from __future__ import annotations

from typing import Any

import models
import peft
import pytest
import torch
from test_row_invariance import engine_logprobs

from trtl_rl.errors import UserError
from trtl_rl.kernels.kernel_set import KernelSet
from trtl_rl.model.adapters import read_adapters
from trtl_rl.model.bind import TrainableDecoder, describe
from trtl_rl.model.description import DecoderDescription
from trtl_rl.model.weights import tensor_specs
from trtl_rl.recipe.recipe import Recipe

SOME = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
ALL = [*SOME, "k_proj", "gate_proj"]


def adapted(family: str, recipe: str = "none", targets: Any = SOME, **options: Any) -> Any:
    """A peft model whose adapters are not zero; weights and adapters hold bfloat16 values."""
    model = models.tiny(family)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    Recipe.load(recipe).apply(model)
    rank = {"r": 6, "lora_alpha": 9, "rank_pattern": {"up_proj": 3}, **options}
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=targets, task_type="CAUSAL_LM", **rank))
    torch.manual_seed(7)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if ".lora_" in name:
                parameter.copy_((torch.randn_like(parameter) * 0.2).bfloat16())
    return wrapped


def bound(model: Any) -> TrainableDecoder:
    decoder = TrainableDecoder(model, KernelSet(False, backward=True), models.CONTEXT)
    decoder.refresh(0)
    return decoder


def stock_logprobs(model: Any, ids: list[list[int]]) -> torch.Tensor:
    out = []
    for sequence, answer in zip(ids, models.ANSWERS, strict=True):
        logits = model(torch.tensor([sequence])).logits[0, :-1]
        logprob = torch.log_softmax(logits, -1).gather(-1, torch.tensor(sequence[1:])[:, None])[:, 0]
        out.append(logprob[-answer:])
    return torch.cat(out)


def lora_gradients(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("targets", [SOME, ALL, ["k_proj"]], ids=["some", "all", "one"])
@pytest.mark.parametrize("family", models.FAMILIES)
def test_logprobs_and_gradients_are_those_of_peft(family: str, targets: list[str]) -> None:
    model = adapted(family, targets=targets)
    ids = models.sequences(61)
    expected = stock_logprobs(model, ids)
    factor = torch.randn(expected.shape, generator=torch.Generator().manual_seed(3))
    (expected * factor).sum().backward()
    gradients = lora_gradients(model)
    model.zero_grad()
    decoder = bound(model)
    logprob, _ = decoder.forward(ids, list(models.ANSWERS), 1.0)
    assert torch.allclose(logprob, expected, atol=2e-5)
    (logprob * factor).sum().backward()
    ours = lora_gradients(model)
    assert gradients.keys() == ours.keys() and len(ours) == 2 * 2 * len(targets)
    for name, gradient in gradients.items():
        assert float((ours[name] - gradient).norm() / gradient.norm()) < 1e-5, name


@pytest.mark.parametrize("family", models.FAMILIES)
def test_with_the_recipe_the_quantised_linear_is_adapted_as_peft_does_it(family: str) -> None:
    """ModelOpt's stock forward with our codec, wrapped by peft; FP8 turns differences of last bits into steps of its grid."""
    model = adapted(family, "fp8_block")
    ids = models.sequences(61)
    with torch.no_grad():
        expected = stock_logprobs(model, ids)
        logprob, _ = bound(model).forward(ids, list(models.ANSWERS), 1.0)
        without, _ = bound(adapted(family, "fp8_block", targets=["k_proj"])).forward(ids, list(models.ANSWERS), 1.0)
    assert float((logprob - expected).abs().mean()) < 0.02 < float((without - expected).abs().mean())


@pytest.mark.parametrize("recipe", ["none", "fp8_block"])
@pytest.mark.parametrize("family", models.FAMILIES)
def test_an_engine_with_adapters_has_the_bits_of_the_trainer(family: str, recipe: str) -> None:
    decoder = bound(adapted(family, recipe))
    ids = models.sequences(61)
    prompts = [len(sequence) - answer for sequence, answer in zip(ids, models.ANSWERS, strict=True)]
    theirs = engine_logprobs(decoder, ids, prompts, models.CONTEXT)
    assert torch.equal(models.logprobs(decoder, 0.7), torch.cat(theirs))


def test_a_description_with_adapters_survives_json_and_names_their_tensors() -> None:
    import json

    description = describe(adapted("qwen3").get_base_model())
    assert DecoderDescription.from_json(json.loads(json.dumps(description.to_json()))) == description
    shapes = {spec.name: spec.shape for spec in tensor_specs(description)}
    assert shapes["model.layers.1.mlp.up_proj.lora_A.weight"] == (3, 96)
    assert shapes["model.layers.1.mlp.up_proj.lora_B.weight"] == (160, 3)
    assert shapes["model.layers.1.mlp.up_proj.weight"] == (160, 96)
    assert not any("base_layer" in name or "k_proj.lora" in name for name in shapes)
    assert [linear.name for linear in description.coverage.linears] == [
        linear.name for linear in describe(models.tiny("qwen3")).coverage.linears
    ]


def test_with_adapters_backward_computes_no_gradient_of_a_frozen_weight() -> None:
    """It would cost as much as the forward pass and be thrown away."""
    decoder = bound(adapted("qwen3"))
    sizes: list[tuple[int, ...]] = []
    layer = decoder.weights.layers[0]
    run = layer.units.after_backward
    assert run is not None

    def watched(inputs: Any) -> Any:
        out = run(inputs)
        sizes.extend(tuple(tensor.shape) for tensor in out[2:])
        return out

    object.__setattr__(layer.units, "after_backward", watched)
    decoder.forward(models.sequences(61), list(models.ANSWERS), 1.0)[0].sum().backward()
    # A of o and its B; the norm's weight; A and B of up; A and B of down
    assert sizes == [(6, 96), (96, 6), (96,), (3, 96), (160, 3), (6, 160), (96, 6)]
    assert all(p.grad is None for name, p in decoder.model.named_parameters() if ".lora_" not in name)


def test_an_update_of_the_adapters_reaches_the_next_version() -> None:
    decoder = bound(adapted("llama"))
    before = models.logprobs(decoder)
    frozen = decoder.snapshot["model.layers.0.mlp.up_proj.weight"].clone()
    with torch.no_grad():
        decoder.parameters["model.layers.0.mlp.up_proj.lora_B.weight"].add_(0.5)
    decoder.refresh(1)
    assert not torch.equal(models.logprobs(decoder), before)
    assert torch.equal(decoder.snapshot["model.layers.0.mlp.up_proj.weight"], frozen)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lora_dropout": 0.1}, "lora_dropout=0"),
        ({"use_dora": True}, "plain LoRA"),
        ({"lora_bias": True}, "lora_bias=False"),
        ({"targets": ["embed_tokens", "q_proj"]}, "model.embed_tokens"),
        ({"targets": ["lm_head", "q_proj"]}, "lm_head"),
        ({"modules_to_save": ["norm"]}, "modules_to_save"),
    ],
    ids=str,
)
def test_what_the_kernels_do_not_compute_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_adapters(adapted("qwen2", **options).get_base_model())


def test_a_merged_or_second_adapter_is_refused() -> None:
    model = adapted("qwen2")
    model.merge_adapter()
    with pytest.raises(UserError, match=r"q_proj is merged"):
        read_adapters(model.get_base_model())
    model.unmerge_adapter()
    model.add_adapter("other", peft.LoraConfig(r=4, target_modules=SOME))
    model.base_model.set_adapter(["default", "other"])
    with pytest.raises(UserError, match="2 active adapters"):
        read_adapters(model.get_base_model())
    model.set_adapter("other")
    assert {adapter.rank for adapter in read_adapters(model.get_base_model())} == {4}


def test_adapters_that_change_under_a_bound_model_are_noticed() -> None:
    """Merged after binding, an adapter would count twice."""
    model = adapted("qwen2")
    decoder = bound(model)
    model.merge_adapter()
    with pytest.raises((RuntimeError, UserError), match="merged"):
        decoder.refresh(1)
    model.unmerge_adapter()
    decoder.model.model.layers[0].self_attn.q_proj.scale_layer(2.0)
    with pytest.raises(RuntimeError, match="adapters changed"):
        decoder.refresh(1)
