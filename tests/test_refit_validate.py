from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trtl_rl.errors import RefitError, UserError
from trtl_rl.model.description import LINEARS, DecoderDescription
from trtl_rl.model.weights import tensor_specs
from trtl_rl.recipe.coverage import Coverage, CoveredLinear
from trtl_rl.recipe.formats import HIGH_PRECISION, BlockFormat, LinearFormat
from trtl_rl.refit.validate import BlockScaleContract

Payload = dict[str, Tensor]
Break = Callable[[Payload, str], str]
FP8 = LinearFormat(BlockFormat((128, 128), "amax_over_448"), BlockFormat((1, 128), "inverse"), "fp8", "fp8", "fp8")
POW2 = replace(
    FP8,
    weight=BlockFormat((128, 128), "amax_over_448", "pow2"),
    activation=BlockFormat((1, 128), "inverse", "pow2"),
)


def describe(
    *,
    heads: int = 2,
    kv_heads: int = 2,
    head_dim: int = 128,
    hidden: int = 128,
    intermediate: int = 256,
    format: LinearFormat = FP8,
    layers: int = 1,
    tied: bool = False,
) -> DecoderDescription:
    rows = (heads * head_dim, kv_heads * head_dim, kv_heads * head_dim, hidden, intermediate, intermediate, hidden)
    columns = (hidden, hidden, hidden, heads * head_dim, hidden, hidden, intermediate)
    d = DecoderDescription(
        layers, hidden, heads, kv_heads, head_dim, intermediate, 16, 1e-6, True, (), tied, (1.0,), 1.0, Coverage(())
    )
    linears = [
        CoveredLinear(d.linear_name(layer, role), (rows[i], columns[i]), format)
        for layer in range(layers)
        for i, role in enumerate(LINEARS)
    ]
    linears.append(CoveredLinear("lm_head", (16, hidden), HIGH_PRECISION, "no enabled quantiser"))
    return replace(d, coverage=Coverage(tuple(sorted(linears, key=lambda item: item.name))))


def payload(description: DecoderDescription) -> Payload:
    """Right in every name, dtype and shape; scales are powers of two."""
    return {spec.name: torch.ones(spec.shape).to(spec.dtype) for spec in tensor_specs(description)}


def smollm2() -> DecoderDescription:
    """The sizes of SmolLM2-135M."""
    return describe(heads=9, kv_heads=3, head_dim=64, hidden=576, intermediate=1536)


# --- each way in which the loader is known to accept what is wrong ---


def set_to(change: Callable[[Tensor], Tensor], suffix: str) -> Break:
    def broken(tensors: Payload, linear: str) -> str:
        name = f"{linear}.{suffix}"
        tensors[name] = change(tensors[name])
        return name

    return broken


def without(suffix: str) -> Break:
    def broken(tensors: Payload, linear: str) -> str:
        del tensors[f"{linear}.{suffix}"]
        return f"{linear}.{suffix}"

    return broken


def misspelt(tensors: Payload, linear: str) -> str:
    name = f"{linear}.weight"
    wrong = name.replace("_proj", "_porj")
    tensors[wrong] = tensors.pop(name)
    return wrong


def extra(tensors: Payload, linear: str) -> str:
    name = f"{linear}.input_scale"
    tensors[name] = torch.ones(1)
    return name


def fused(tensors: Payload, linear: str) -> str:
    layer = linear.split(".self_attn.")[0].split(".mlp.")[0]
    roles, name = ("q_proj", "k_proj", "v_proj"), f"{layer}.self_attn.qkv_proj.weight"
    parts = [tensors.pop(f"{layer}.self_attn.{role}.weight").view(torch.uint8) for role in roles]
    tensors[name] = torch.cat(parts).view(torch.float8_e4m3fn)
    return name


def with_value(value: float) -> Callable[[Tensor], Tensor]:
    def change(scale: Tensor) -> Tensor:
        changed = scale.clone()
        changed[-1, -1] = value
        return changed

    return change


BREAKS: dict[str, Break] = {
    "bfloat16 in an FP8 module": set_to(lambda x: x.to(torch.bfloat16), "weight"),
    "float32 in an FP8 module": set_to(lambda x: x.float(), "weight"),
    "codes as bytes": set_to(lambda x: x.view(torch.uint8), "weight"),
    "other FP8 format": set_to(lambda x: x.float().to(torch.float8_e5m2), "weight"),
    "missing scales": without("weight_scale_inv"),
    "missing weight": without("weight"),
    "misspelt name": misspelt,
    "name that is fused already": fused,
    "tensor of another kind": extra,
    "scale of shape [1]": set_to(lambda x: x.flatten()[:1], "weight_scale_inv"),
    "scale of shape [1, 1, 1, 1]": set_to(lambda x: x[:, None, :, None], "weight_scale_inv"),
    "scale for each row": set_to(lambda x: x.repeat_interleave(128, 0), "weight_scale_inv"),
    "bfloat16 scale": set_to(lambda x: x.to(torch.bfloat16), "weight_scale_inv"),
    "scale of 0": set_to(with_value(0.0), "weight_scale_inv"),
    "negative scale": set_to(with_value(-1.0), "weight_scale_inv"),
    "scale that is NaN": set_to(with_value(float("nan")), "weight_scale_inv"),
    "scale that is infinite": set_to(with_value(float("inf")), "weight_scale_inv"),
    "a row less": set_to(lambda x: x[:-1], "weight"),
    "a column more": set_to(lambda x: torch.cat([x.view(torch.uint8)] * 2, 1).view(x.dtype), "weight"),
}


@st.composite
def served(draw: st.DrawFn) -> BlockScaleContract:
    """A model that can be served, on some ranks."""
    ranks = draw(st.sampled_from([1, 2]))
    kv_heads = ranks * draw(st.integers(1, 2))
    return BlockScaleContract(
        describe(
            heads=kv_heads * draw(st.integers(1, 2)),
            kv_heads=kv_heads,
            hidden=draw(st.sampled_from([128, 256])),
            intermediate=ranks * 128 * draw(st.integers(1, 2)),
            layers=draw(st.integers(1, 2)),
            tied=draw(st.booleans()),
        ),
        ranks,
    )


@settings(max_examples=60)
@given(served(), st.sampled_from(sorted(BREAKS)), st.data())
def test_no_wrong_payload_reaches_the_silent_loader(
    contract: BlockScaleContract, how: str, data: st.DataObject
) -> None:
    contract.check_model()
    tensors = payload(contract.description)
    contract.check(tensors)

    quantised = [item.name for item in contract.description.coverage.linears if item.format.quantised]
    name = BREAKS[how](tensors, data.draw(st.sampled_from(quantised)))
    with pytest.raises(RefitError) as refused:
        contract.check(tensors)
    assert name in str(refused.value)


@settings(max_examples=40)
@given(
    ranks=st.sampled_from([1, 2, 4]),
    kv_heads=st.sampled_from([1, 2, 4]),
    head_dim=st.sampled_from([32, 64, 96, 128, 192, 256]),
    intermediate=st.sampled_from([128, 192, 256, 320, 512, 1024]),
)
def test_parts_that_are_cut_through_a_block_are_refused_in_model_and_payload(
    ranks: int, kv_heads: int, head_dim: int, intermediate: int
) -> None:
    description = describe(heads=4, kv_heads=kv_heads, head_dim=head_dim, intermediate=intermediate)
    contract = BlockScaleContract(description, ranks)
    per_rank = [4 * head_dim / ranks, kv_heads * head_dim / ranks, intermediate / ranks]
    if ranks <= kv_heads and all(size % 128 == 0 for size in per_rank):
        contract.check_model()
        contract.check(payload(description))
        return
    with pytest.raises(UserError, match=r"_proj|--tensor-parallel"):
        contract.check_model()
    with pytest.raises(RefitError, match=r"model\.layers\.0\.\w+\.\w+_proj\.weight"):
        contract.check(payload(description))


def test_every_break_is_tried_and_each_alone_is_refused() -> None:
    contract = BlockScaleContract(describe())
    for how, broken in BREAKS.items():
        tensors = payload(contract.description)
        name = broken(tensors, "model.layers.0.mlp.up_proj")
        with pytest.raises(RefitError) as refused:
            contract.check(tensors)
        assert name in str(refused.value), how


def test_smollm2_is_refused_with_the_reason_and_what_to_do() -> None:
    with pytest.raises(UserError, match=r"q_proj|k_proj") as refused:
        BlockScaleContract(smollm2()).check_model()
    text = str(refused.value)
    assert "1.5 blocks of 128" in text and "qkv_proj" in text and "--backend torch" in text


def test_more_ranks_than_key_value_heads_are_refused_even_where_blocks_would_fit() -> None:
    wide = describe(heads=4, kv_heads=1, head_dim=256)
    with pytest.raises(UserError, match="does not divide the 1 key/value heads"):
        BlockScaleContract(wide, 2).check_model()
    with pytest.raises(RefitError, match=r"k_proj\.weight"):
        BlockScaleContract(wide, 2).check(payload(wide))


def test_blackwell_takes_powers_of_two_only_and_hopper_none_for_activations() -> None:
    plain, rounded = describe(), describe(format=POW2)
    BlockScaleContract(plain, gpu="hopper").check_model()
    BlockScaleContract(rounded, gpu="blackwell").check_model()
    with pytest.raises(UserError, match="fp8_block_pow2 for Blackwell"):
        BlockScaleContract(plain, gpu="blackwell").check_model()
    with pytest.raises(UserError, match="on Hopper GPUs"):
        BlockScaleContract(rounded, gpu="hopper").check_model()
    tensors = payload(rounded)
    contract = BlockScaleContract(rounded, gpu="blackwell")
    contract.check(tensors)
    tensors["model.layers.0.mlp.up_proj.weight_scale_inv"][0, 0] = 0.75
    with pytest.raises(RefitError, match=r"up_proj\.weight_scale_inv holds scales that are no powers of two"):
        contract.check(tensors)


@pytest.mark.parametrize(
    ("format", "said"),
    [
        (replace(FP8, activation=None), "only one of weights and activations"),
        (replace(FP8, weight=None), "only one of weights and activations"),
        (replace(FP8, weight=BlockFormat((64, 64), "amax_over_448")), "weights have blocks of"),
        (replace(FP8, activation=BlockFormat((1, 64), "inverse")), "activations have blocks of"),
        (replace(FP8, activation=BlockFormat((1, 128), "amax_over_448")), "activations have blocks of"),
    ],
)
def test_a_format_that_tensorrt_llm_does_not_compute_is_refused(format: LinearFormat, said: str) -> None:
    with pytest.raises(UserError, match=said):
        BlockScaleContract(describe(format=format)).check_model()


def test_parts_of_one_module_must_have_one_format() -> None:
    d = describe()
    mixed = [
        replace(item, format=HIGH_PRECISION) if item.name.endswith("k_proj") else item for item in d.coverage.linears
    ]
    with pytest.raises(UserError, match="several formats"):
        BlockScaleContract(replace(d, coverage=Coverage(tuple(mixed)))).check_model()
