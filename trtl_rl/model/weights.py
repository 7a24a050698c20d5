"""The weights of one version as the kernels read them: decoded operands and the high-precision rest.

Trainer and engine fill the same structure from the same codes and scales, by the same function; so their operands are
equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trtl_rl.kernels.kernel_set import HeadUnits, KernelSet, LayerUnits
from trtl_rl.kernels.ops import pack
from trtl_rl.kernels.spec import LayerSpec, LinearSpec
from trtl_rl.model.description import LINEARS, DecoderDescription
from trtl_rl.recipe.codec import decode, encode
from trtl_rl.recipe.coverage import Coverage, CoveredLinear
from trtl_rl.recipe.formats import BlockFormat

SCALE_SUFFIX = "_scale_inv"  # of FP8 block-scale checkpoints: weight and weight_scale_inv


LORA_A, LORA_B = ".lora_A.weight", ".lora_B.weight"  # of adapter checkpoints


@dataclass(frozen=True)
class TensorSpec:
    """A tensor of the checkpoint layout in which weights travel: name, dtype, shape."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


def tensor_specs(description: DecoderDescription) -> list[TensorSpec]:
    """Every tensor of a version in name order: e4m3 ``*.weight`` with float32 scales, bfloat16 for the rest."""
    d = description
    bf16 = torch.bfloat16
    specs = [TensorSpec("model.embed_tokens.weight", bf16, (d.vocab, d.hidden))]
    specs.append(TensorSpec("model.norm.weight", bf16, (d.hidden,)))
    for i in range(d.layers):
        prefix = f"model.layers.{i}."
        norms = [("input_layernorm", d.hidden), ("post_attention_layernorm", d.hidden)]
        if d.qk_norm:
            norms += [("self_attn.q_norm", d.head_dim), ("self_attn.k_norm", d.head_dim)]
        specs += [TensorSpec(f"{prefix}{name}.weight", bf16, (n,)) for name, n in norms]
    for linear in d.coverage.linears:
        if linear.name == "lm_head" and d.tied:
            continue
        name, weight = f"{linear.name}.weight", linear.format.forward_weight
        if weight is None:
            specs.append(TensorSpec(name, bf16, linear.shape))
        else:
            grid = (-(-linear.shape[0] // weight.block[0]), -(-linear.shape[1] // weight.block[1]))
            specs.append(TensorSpec(name, torch.float8_e4m3fn, linear.shape))
            specs.append(TensorSpec(name + SCALE_SUFFIX, torch.float32, grid))
        if linear.name.rpartition(".")[2] in d.biases:
            specs.append(TensorSpec(f"{linear.name}.bias", bf16, (linear.shape[0],)))
    shapes = {linear.name: linear.shape for linear in d.coverage.linears}
    for adapter in d.adapters:
        out, wide = shapes[adapter.name]
        specs.append(TensorSpec(f"{adapter.name}{LORA_A}", bf16, (adapter.rank, wide)))
        specs.append(TensorSpec(f"{adapter.name}{LORA_B}", bf16, (out, adapter.rank)))
    return sorted(specs, key=lambda spec: spec.name)


class Operand:
    """What one GEMM needs: the weight [sum N, K], bias and adapters; parts are checkpoint linears one above the other.

    Attributes:
        values: The decoded weight, float32 or with ``compute: bf16`` bfloat16.
        down: A of all parts, [ranks, K], or None.
        ups: For each part with an adapter scaling·B, [N, rank].
    """

    def __init__(self, spec: LinearSpec, names: Sequence[str], device: torch.device) -> None:
        self.spec = spec
        self.names = list(names)
        dtype = spec.operand_dtype
        self.values = torch.zeros(spec.columns, spec.in_features, dtype=dtype, device=device)
        self.bias = torch.zeros(spec.columns, device=device) if spec.bias else None
        self.packed: Tensor | None = None  # an engine's: ``values`` as decoding multiplies them fastest
        self.gradient_values: Tensor | None = None  # a learner's, where DGrad and the forward pass see other weights
        self.down = torch.zeros(sum(spec.ranks), spec.in_features, dtype=dtype, device=device) if spec.adapted else None
        self.ups = {
            name: torch.zeros(n, rank, dtype=dtype, device=device)
            for name, rank, n in zip(names, spec.ranks or (0,) * len(names), spec.out_features, strict=True)
            if rank
        }
        self.scalings: dict[str, float] = {}
        self.formats: dict[str, BlockFormat | None] = {}
        self._rank_starts = dict(zip(self.ups, _starts([rank for rank in spec.ranks if rank]), strict=True))
        self._starts = dict(zip(names, _starts(spec.out_features), strict=True))

    def tensors(self) -> list[Tensor]:
        """What a unit takes: the operand; the bias, if there is one; the adapters' down and up projections."""
        return self._with(self.values if self.packed is None else self.packed)

    def gradient_tensors(self) -> list[Tensor]:
        """What a backward unit takes."""
        return self._with(self.values if self.gradient_values is None else self.gradient_values)

    def _with(self, values: Tensor) -> list[Tensor]:
        bias = [] if self.bias is None else [self.bias]
        return [values, *bias] if self.down is None else [values, *bias, self.down, *self.ups.values()]

    def fill(self, name: str, values: Tensor) -> None:
        """Store the decoded weight [N, K] float32 of the part ``name``."""
        start = self._starts[name]
        for operand in (self.values, self.gradient_values):  # fill_gradient comes after, for the parts that differ
            if operand is not None:
                operand[start : start + values.shape[0]].copy_(values)

    def fill_gradient(self, name: str, values: Tensor) -> None:
        """Store the weight [N, K] float32 that DGrad sees of the part ``name``, where the forward pass sees another."""
        if self.gradient_values is None:
            self.gradient_values = self.values.clone()
        start = self._starts[name]
        self.gradient_values[start : start + values.shape[0]].copy_(values)

    def fill_adapter(self, name: str, a: Tensor | None, b: Tensor | None, scaling: float) -> None:
        """Store A [rank, K] or B [N, rank] of the part ``name``; scaling goes into B."""
        if a is not None:
            assert self.down is not None
            start = self._rank_starts[name]
            self.down[start : start + a.shape[0]].copy_(a)
        if b is not None:
            self.ups[name].copy_(b * scaling)
            self.scalings[name] = scaling

    def fill_bias(self, name: str, values: Tensor) -> None:
        assert self.bias is not None
        start = self._starts[name]
        self.bias[start : start + values.shape[0]].copy_(values)


class LayerWeights:
    """One decoder layer's operands, norms and units."""

    def __init__(self, description: DecoderDescription, index: int, units: LayerUnits, device: torch.device) -> None:
        d = description
        self.index = index
        self.units = units
        self.spec: LayerSpec = d.layer_spec(index)
        self.input_norm = torch.ones(d.hidden, device=device)
        self.post_norm = torch.ones(d.hidden, device=device)
        self.q_norm = torch.ones(d.head_dim, device=device)
        self.k_norm = torch.ones(d.head_dim, device=device)
        names = {role: d.linear_name(index, role) for role in LINEARS}
        self.qkv = _operands(self.spec.qkv, [names[role] for role in LINEARS[:3]], device)
        self.o = Operand(self.spec.o, [names["o_proj"]], device)
        self.gate_up = _operands(self.spec.gate_up, [names["gate_proj"], names["up_proj"]], device)
        self.down = Operand(self.spec.down, [names["down_proj"]], device)
        self._before: list[Tensor] | None = None  # what units take, gathered once
        self._after: list[Tensor] | None = None
        # FP32 masters of a trainer in the order in which autograd returns their gradients: norms where the units take them;
        # of each operand weights and biases, unless frozen, then every A, then every B. Empty in an engine.
        self.before_parameters: list[Tensor] = []
        self.after_parameters: list[Tensor] = []

    def operands(self) -> Iterator[Operand]:
        yield from self.qkv
        yield self.o
        yield from self.gate_up
        yield self.down

    def before_weights(self) -> list[Tensor]:
        """Weight inputs of the unit before attention, norms of heads last."""
        if self._before is None:
            norms = [self.q_norm, self.k_norm] if self.spec.qk_norm else []
            self._before = [self.input_norm, *_tensors(self.qkv), *norms]
        return self._before

    def after_weights(self) -> list[Tensor]:
        """Weight inputs of the unit after attention."""
        if self._after is None:
            wide = _tensors(self.gate_up)
            self._after = [*self.o.tensors(), self.post_norm, *wide, *self.down.tensors()]
        return self._after

    def pack(self) -> None:
        """Pack all operands anew."""
        for operand in self.operands():
            operand.packed = pack(operand.values)
        self._before = self._after = None

    def after_gradient_weights(self) -> list[Tensor]:
        """:meth:`after_weights` for the backward unit."""
        wide = [tensor for operand in self.gate_up for tensor in operand.gradient_tensors()]
        return [*self.o.gradient_tensors(), self.post_norm, *wide, *self.down.gradient_tensors()]


class DecoderWeights:
    """All weights of one version, in the form that the kernels read.

    Args:
        packed: Keep a packed copy of every operand for decoding (an engine's).

    Attributes:
        embedding: [V, hidden] float32 holding bfloat16 values.
        version: -1 until a version was loaded.
    """

    def __init__(self, description: DecoderDescription, kernels: KernelSet, *, packed: bool = False) -> None:
        d = self.description = description
        specs = [d.layer_spec(i) for i in range(d.layers)]
        kernels.prepare(specs, d.head_spec())
        self.device = kernels.device
        self.head_units: HeadUnits = kernels.head(d.head_spec())
        self._layer_units = [kernels.layer(spec) for spec in specs]
        self._formats = {item.name: item.format.forward_weight for item in d.coverage.linears}
        self._scalings = {adapter.name: adapter.scaling for adapter in d.adapters}
        self._packed = packed
        self._allocate()

    def twin(self) -> DecoderWeights:
        """Another set of operands, still without a version, for the same units."""
        other = copy(self)
        other._allocate()
        return other

    def exchange(self, other: DecoderWeights) -> None:
        """Trade places with a twin, in microseconds: who holds this object computes with the other's tensors from now on.

        No tensor moves, so a captured graph stays valid for the set that it was captured with.
        """
        self.__dict__, other.__dict__ = other.__dict__, self.__dict__

    def _allocate(self) -> None:
        d, device = self.description, self.device
        self.embedding = torch.zeros(d.vocab, d.hidden, device=device)
        self.layers = [LayerWeights(d, i, units, device) for i, units in enumerate(self._layer_units)]
        self.norm = torch.ones(d.hidden, device=device)
        self.head = Operand(d.head_spec().linear, ["lm_head"], device)
        self.version = -1
        self._operands = {name: op for layer in self.layers for op in layer.operands() for name in op.names}
        self._operands["lm_head"] = self.head
        self._vectors = {"model.norm.weight": self.norm}
        for layer in self.layers:
            prefix = f"model.layers.{layer.index}."
            self._vectors[f"{prefix}input_layernorm.weight"] = layer.input_norm
            self._vectors[f"{prefix}post_attention_layernorm.weight"] = layer.post_norm
            if d.qk_norm:
                self._vectors[f"{prefix}self_attn.q_norm.weight"] = layer.q_norm
                self._vectors[f"{prefix}self_attn.k_norm.weight"] = layer.k_norm

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Decode a whole or partial version, given in the layout of :func:`tensor_specs`, into the operands."""
        for name, given in tensors.items():
            if name.endswith(SCALE_SUFFIX):
                continue
            tensor = given.to(self.device)
            if name in self._vectors:
                self._vectors[name].copy_(tensor)
                continue
            adapter = next((suffix for suffix in (LORA_A, LORA_B) if name.endswith(suffix)), None)
            if adapter is not None:
                module = name.removesuffix(adapter)
                a, b = (tensor.float(), None) if adapter == LORA_A else (None, tensor.float())
                self._operands[module].fill_adapter(module, a, b, self._scalings[module])
                continue
            module, _, kind = name.rpartition(".")
            if name == "model.embed_tokens.weight":
                self.embedding.copy_(tensor)
                if self.description.tied:
                    self._fill("lm_head", tensor, None)
            elif kind == "bias":
                self._operands[module].fill_bias(module, tensor.float())
            else:
                self._fill(module, tensor, tensors.get(name + SCALE_SUFFIX))
        if self._packed:
            for layer in self.layers:
                layer.pack()
            self.head.packed = pack(self.head.values)

    def _fill(self, module: str, tensor: Tensor, scale: Tensor | None) -> None:
        format = self._formats[module]
        operand = self._operands[module]
        operand.formats[module] = format if tensor.dtype == torch.float8_e4m3fn else None
        if format is None:
            operand.fill(module, tensor.float())
        elif tensor.dtype == torch.float8_e4m3fn:
            assert scale is not None
            operand.fill(module, decode(tensor, scale.to(self.device), format))
        else:  # a quantised head that shares the high-precision embedding
            assert module == "lm_head" and self.description.tied, f"{module} came without codes"
            operand.fill(module, decode(*encode(tensor.float(), format), format))
            operand.formats[module] = format

    def fill_gradient(self, module: str, values: Tensor) -> None:
        """Give DGrad of a linear an operand of its own: ``values`` [N, K] float32."""
        self._operands[module].fill_gradient(module, values)

    def coverage(self) -> Coverage:
        """The linears that these weights really run: the format of the codes that were loaded, the kernels' activations."""
        out = []
        linears = {item.name: item for item in self.description.coverage.linears}
        for name, operand in self._operands.items():
            shape, reason, asked = linears[name].shape, linears[name].reason, linears[name].format.weight
            kernel = operand.spec.format
            # With a forward pass in high precision the weight's format concerns a learner alone.
            weight = operand.formats.get(name) if kernel.fprop == "fp8" else asked
            out.append(CoveredLinear(name, shape, replace(kernel, weight=weight), reason))
        return Coverage(tuple(sorted(out, key=lambda item: item.name)))


def _operands(specs: Sequence[LinearSpec], names: Sequence[str], device: torch.device) -> list[Operand]:
    rest = list(names)
    return [Operand(spec, [rest.pop(0) for _ in spec.out_features], device) for spec in specs]


def _tensors(operands: Sequence[Operand]) -> list[Tensor]:
    return [tensor for operand in operands for tensor in operand.tensors()]


def _starts(sizes: Sequence[int]) -> list[int]:
    out, total = [], 0
    for n in sizes:
        out.append(total)
        total += n
    return out
