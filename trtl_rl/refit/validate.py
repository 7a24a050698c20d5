"""What a refit to TensorRT-LLM may hold: its loader accepts wrong tensors without a word, so the sender refuses them first.

``reload`` copies what it finds by name and casts and broadcasts on the way. Each of these loads there and computes something
else: a bfloat16 weight in an FP8 module, a weight without its scales, a misspelt or already fused name, a scale of shape [1], a
part of a fused module whose rows on a rank are no multiple of 128 (scales have one row for 128 of the weight's).

A module may be served if (:meth:`BlockScaleContract.check_model`)

* its weights have 128×128 blocks and its activations 1×128, or neither is quantised;
* the parts of a fused module (q, k, v; gate, up) have one format, and whole blocks on every rank;
* tensor parallelism divides the key/value heads: copies of a head would need scales of a part of a block.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from trtl_rl.errors import RefitError, UserError, nearest
from trtl_rl.model.description import LINEARS, DecoderDescription
from trtl_rl.model.weights import SCALE_SUFFIX, tensor_specs
from trtl_rl.recipe.coverage import CoveredLinear
from trtl_rl.recipe.formats import BlockFormat
from trtl_rl.refit.manifest import dtype_name

Gpu = Literal["hopper", "blackwell"]

BLOCK = 128
FUSED = {"qkv_proj": LINEARS[:3], "gate_up_proj": LINEARS[4:6]}  # a fused module and its parts, from top to bottom
ROW_PARALLEL = (LINEARS[3], LINEARS[6])  # these divide their input among the ranks, all others their output


@dataclass(frozen=True)
class BlockScaleContract:
    """The FP8 block-scale layout as TensorRT-LLM reads it.

    Attributes:
        tensor_parallel: How many ranks share the model.
        gpu: ``hopper`` takes float32 scales as they are loaded. ``blackwell`` turns weights to power-of-two scales after
            loading, so only a recipe that has those computes the same on both sides.
    """

    description: DecoderDescription
    tensor_parallel: int = 1
    gpu: Gpu = "hopper"

    def check_model(self) -> None:
        """Raise UserError when TensorRT-LLM could not serve this model with this recipe on so many ranks."""
        d, ranks = self.description, self.tensor_parallel
        if d.adapters:
            raise UserError(
                f"{d.adapters[0].name} has an adapter, which a refit of TensorRT-LLM cannot carry: merge it first."
            )
        self._check_heads(UserError)
        for what, size in (("heads", d.heads), ("rows of gate_proj", d.intermediate)):
            if size % ranks:
                raise UserError(f"--tensor-parallel {ranks} does not divide the {size} {what}. Take a divisor.")
        linears = {linear.name: linear for linear in d.coverage.linears}
        for linear in d.coverage.linears:
            self._check_format(linear)
            if linear.format.forward_weight is not None:
                self._check_alignment(linear)
        for layer in range(d.layers):
            for fused, roles in FUSED.items():
                formats = {linears[d.linear_name(layer, role)].format.forward_weight for role in roles}
                if len(formats) > 1:
                    raise UserError(
                        f"{d.linear_name(layer, roles[0])} and its neighbours have several formats, but TensorRT-LLM joins "
                        f"{', '.join(roles)} in one module, {fused}. Give them one format in the recipe."
                    )

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise RefitError, with the name, for the first tensor that the loader would take and should not.

        Args:
            tensors: A whole version in the layout of ``tensor_specs``.
        """
        expected = {spec.name: spec for spec in tensor_specs(self.description)}
        for name in sorted(tensors.keys() - expected.keys()):
            raise RefitError(f"{name}: {_foreign(name, expected)}")
        for name in sorted(expected.keys() - tensors.keys()):
            scales = name.endswith(SCALE_SUFFIX)
            of = (
                f": {name.removesuffix(SCALE_SUFFIX)} would be multiplied with scales of another version"
                if scales
                else ""
            )
            raise RefitError(f"{name} is missing{of}.")
        for name, spec in expected.items():
            tensor = tensors[name]
            if tensor.dtype != spec.dtype:
                raise RefitError(
                    f"{name} is {dtype_name(tensor.dtype)}, and must be {dtype_name(spec.dtype)}: the loader would cast it."
                )
            if tuple(tensor.shape) != spec.shape:
                raise RefitError(
                    f"{name} has the shape {list(tensor.shape)}, and must have {list(spec.shape)}: the loader would broadcast "
                    "it, or copy a part."
                )
            if name.endswith(SCALE_SUFFIX):
                self._check_scale(name, tensor)
        self._check_heads(RefitError)
        for linear in self.description.coverage.linears:
            if linear.format.forward_weight is not None:
                self._check_alignment(linear, RefitError)

    def _check_heads(self, error: type[UserError] | type[RefitError]) -> None:
        ranks, heads = self.tensor_parallel, self.description.kv_heads
        if ranks > heads or heads % ranks:
            raise error(
                f"{self.description.linear_name(0, 'k_proj')}.weight: --tensor-parallel {ranks} does not divide the {heads} "
                "key/value heads. With FP8 block scales TensorRT-LLM would share one head's blocks between ranks, and silently "
                "read wrong scales. Take a divisor."
            )

    def _check_format(self, linear: CoveredLinear) -> None:
        weight, activation = linear.format.forward_weight, linear.format.forward_activation
        if weight is None and activation is None:
            return
        rounding = "pow2" if self.gpu == "blackwell" else "fp32"
        wanted_weight = (BLOCK, BLOCK), "amax_over_448"
        wanted_activation = (1, BLOCK), "inverse"
        reason = None
        if weight is None or activation is None:
            reason = "only one of weights and activations is quantised"
        elif _kind(weight) != wanted_weight:
            reason = f"weights have blocks of {weight.block} and scale {weight.scale}, not 128×128 and amax_over_448"
        elif _kind(activation) != wanted_activation:
            reason = (
                f"activations have blocks of {activation.block} and scale {activation.scale}, not 1×128 and inverse"
            )
        elif activation.round != rounding or (rounding == "pow2" and weight.round != "pow2"):
            reason = (
                f"on {self.gpu.capitalize()} GPUs scales are {rounding} ones, and the recipe rounds those of weights to "
                f"{weight.round} and of activations to {activation.round}"
            )
        if reason is not None:
            raise UserError(
                f"{linear.name}: {reason}; TensorRT-LLM would compute something else than the trainer. The recipe fp8_block is "
                "made for Hopper, fp8_block_pow2 for Blackwell."
            )

    def _check_alignment(self, linear: CoveredLinear, error: type[UserError] | type[RefitError] = UserError) -> None:
        ranks, role, (rows, columns) = self.tensor_parallel, linear.role, linear.shape
        fused = next((name for name, roles in FUSED.items() if role in roles), None)
        if role in ROW_PARALLEL:
            what, size, aligned = "columns", columns, ranks == 1 or columns % (ranks * BLOCK) == 0
        else:
            what, size, aligned = "rows", rows, rows % (ranks * BLOCK) == 0 or (fused is None and ranks == 1)
        if aligned:
            return
        where = f"joins it with others in {fused}" if fused else f"divides it among {ranks} ranks"
        each = f" on each of {ranks} ranks" if ranks > 1 else ""
        raise error(
            f"{linear.name}.weight has {size} {what}, which are {size / ranks / BLOCK:g} blocks of {BLOCK}{each}: TensorRT-LLM "
            f"{where}, and would silently read wrong scales. Such a model can be served by the embedded engine (--backend "
            "torch), which knows blocks that are cut off."
        )

    def _check_scale(self, name: str, scale: Tensor) -> None:
        if not bool((scale.isfinite() & (scale > 0)).all()):
            raise RefitError(f"{name} holds a scale that is zero, negative or not finite.")
        if self.gpu == "blackwell" and bool((scale.frexp().mantissa != 0.5).any()):
            raise RefitError(
                f"{name} holds scales that are no powers of two, which Blackwell would round after loading."
            )


def _kind(format: BlockFormat) -> tuple[tuple[int, int], str]:
    """Blocks and formula; power-of-two scales are the same by both formulas."""
    if format.round == "pow2":
        return format.block, "inverse" if format.block[0] == 1 else "amax_over_448"
    return format.block, format.scale


def _foreign(name: str, expected: Mapping[str, object]) -> str:
    """Why the model has no such tensor."""
    for fused, roles in FUSED.items():
        if f".{fused}." in name:
            return f"the loader fuses {', '.join(roles)} itself, and ignores what is fused already. Send the parts."
    return f"the model has no such tensor, and the loader would ignore it.{nearest(name, expected)}"
