"""ModelOpt's own numbers: the codes and scales that its exporter writes are those that the trainer quantises.

The exporter converts a model in place and needs ModelOpt's own static quantisers, so it gets copies of the model. Sizes are
such that no weight is a single block: of q, k, v and of gate, up the exporter joins the scales where they are.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from trtl_rl.recipe.codec import encode
from trtl_rl.recipe.formats import BlockFormat
from trtl_rl.recipe.recipe import Recipe

STATIC: dict[str, Any] = {
    "quant_cfg": [
        {"quantizer_name": "*", "enable": False},
        {
            "parent_class": "nn.Linear",
            "quantizer_name": "*weight_quantizer",
            "cfg": {"num_bits": (4, 3), "block_sizes": {-1: 128, -2: 128}},
        },
        {"quantizer_name": "*lm_head*", "enable": False},
    ],
    "algorithm": "max",
}
SIZES = {
    "aligned": {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64},
    "ragged": {"hidden_size": 200, "intermediate_size": 328, "head_dim": 40},
}
WEIGHT = BlockFormat((128, 128), "amax_over_448")
POW2 = BlockFormat((128, 128), "amax_over_448", "pow2")
ZERO = "model.layers.1.mlp.up_proj.weight"  # its first block holds zeros only, another a negative value near zero


def bits(tensor: Tensor) -> Tensor:
    """So that zeros of different sign count as different codes."""
    return tensor.contiguous().view(torch.uint8)


@dataclass
class Exported:
    """What one model's copies became.

    Attributes:
        model: The float32 model, without quantisers.
        tensors: Of the checkpoint that ModelOpt wrote.
        fake: Fake-quantised weights by parameter name, float32.
    """

    model: Any
    tensors: dict[str, Tensor]
    fake: dict[str, Tensor]
    config: dict[str, Any]

    @property
    def quantised(self) -> list[str]:
        return [name.removesuffix("_scale") for name in self.tensors if name.endswith("weight_scale")]

    def rounded(self, name: str) -> Tensor:
        return self.model.get_parameter(name).detach().bfloat16().float()


def export(model: Any, directory: Path, change: Callable[[Any], None] = lambda quantiser: None) -> Exported:
    """Quantise and export a copy of ``model``; ``change`` gets every weight quantiser before."""
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint

    converted = copy.deepcopy(model).bfloat16()
    mtq.quantize(converted, STATIC, forward_loop=None)
    fake = {}
    for name, module in converted.named_modules():
        quantiser = getattr(module, "weight_quantizer", None)
        if quantiser is not None and quantiser.is_enabled:
            change(quantiser)
            fake[f"{name}.weight"] = quantiser(module.weight.detach().float())
    export_hf_checkpoint(converted, export_dir=directory)
    tensors: dict[str, Tensor] = {}
    for file in directory.glob("*.safetensors"):
        tensors.update(load_file(file))
    return Exported(model, tensors, fake, json.loads((directory / "config.json").read_text()))


def source(family: str, size: str) -> Any:
    model = models.tiny(family, **SIZES[size])
    with torch.no_grad():
        model.get_parameter(ZERO)[:128, :128] = 0
        model.get_parameter(ZERO)[130, 130] = -1e-9
    return model


@pytest.fixture(
    scope="module",
    params=[("qwen3", "aligned"), ("qwen3", "ragged"), ("llama", "aligned"), ("llama", "ragged")],
    ids="-".join,
)
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    return export(source(*request.param), tmp_path_factory.mktemp("export"))


def test_what_the_trainer_quantises_is_what_modelopt_exports(exported: Exported) -> None:
    """Codes and scales of a refit equal those of ``export_hf_checkpoint``: those of zero blocks too."""
    assert exported.config["quantization_config"]["quant_algo"] == "fp8_pb_wo"
    assert len(exported.quantised) == 14
    snapshot = models.bind(copy.deepcopy(exported.model), "fp8_block").snapshot
    for name in exported.quantised:
        codes, scale = snapshot[name], snapshot[name + "_scale_inv"]
        theirs = exported.tensors[name + "_scale"]
        assert theirs.dtype == torch.float32 and theirs.dim() == 4 and theirs.shape[1] == theirs.shape[3] == 1, name
        assert torch.equal(scale, theirs[:, 0, :, 0]), name
        assert codes.dtype == exported.tensors[name].dtype == torch.float8_e4m3fn
        assert torch.equal(codes.float(), exported.tensors[name].float()), name
    assert snapshot[ZERO + "_scale_inv"][0, 0] == 1


def test_a_negative_weight_that_rounds_to_zero_keeps_its_sign(exported: Exported) -> None:
    for name in exported.quantised:
        codes, _ = encode(exported.rounded(name), WEIGHT)
        assert torch.equal(bits(codes), bits(exported.tensors[name])), name


def test_codes_follow_the_export_where_modelopts_fake_quantiser_differs_from_it(exported: Exported) -> None:
    """Fake-quantisation multiplies by 448/amax, the exporter divides by amax/448: last bits move some codes by a step."""
    differing = total = 0
    for name in exported.quantised:
        codes, scale = encode(exported.rounded(name), WEIGHT)
        grid = scale.repeat_interleave(128, 0)[: codes.shape[0]].repeat_interleave(128, 1)[:, : codes.shape[1]]
        fake = (exported.fake[name] / grid).to(torch.float8_e4m3fn)  # a code times about its scale: the code again
        differing += int((fake.float() != codes.float()).sum())
        total += codes.numel()
        assert int((bits(fake).int() - bits(codes).int()).abs().where(codes.float() != 0, 0).max()) <= 1, name
    print(f"{differing / total:.4%} of {total} codes differ")
    assert 0 < differing < 0.01 * total


def to_power_of_two(quantiser: Any) -> None:
    """Raise amax so that amax/448 is a power of two."""
    amax = torch.where(quantiser._amax > 0, quantiser._amax.float(), torch.full_like(quantiser._amax, 448).float())
    quantiser._amax = 448 * torch.exp2(torch.ceil(torch.log2(amax / 448)))


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("size", SIZES)
def test_with_powers_of_two_fake_quantiser_export_and_both_of_our_formulas_agree(
    family: str, size: str, tmp_path: Path
) -> None:
    exported = export(source(family, size), tmp_path, to_power_of_two)
    for name in exported.quantised:
        weight = exported.rounded(name)
        codes, scale = encode(weight, POW2)
        other = encode(weight, BlockFormat((128, 128), "inverse", "pow2"))
        assert torch.equal(codes.float(), other[0].float()) and torch.equal(scale, other[1]), name
        assert torch.equal(codes.float(), exported.tensors[name].float()), name
        assert torch.equal(scale, exported.tensors[name + "_scale"][:, 0, :, 0]), name
        grid = scale.repeat_interleave(128, 0)[: codes.shape[0]].repeat_interleave(128, 1)[:, : codes.shape[1]]
        assert torch.equal(codes.float() * grid, exported.fake[name]), name


def test_the_exporter_cannot_take_the_recipe_itself(tmp_path: Path) -> None:
    """It wants a stored amax. When that changes, the comparison above can use the recipe's own quantisers."""
    from modelopt.torch.export import export_hf_checkpoint

    model = source("llama", "aligned").bfloat16()
    Recipe.load("fp8_block").apply(model)
    with pytest.raises(AttributeError, match="_amax"):
        export_hf_checkpoint(model, export_dir=tmp_path)
