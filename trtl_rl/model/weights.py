"""The weights of one version as the kernels read them: decoded operands and the high-precision rest.

Trainer and engine fill the same structure from the same codes and scales, by the same function; so their operands are
equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trtl_rl.kernels.kernel_set import HeadUnits, KernelSet, LayerUnits
from trtl_rl.kernels.spec import LayerSpec, LinearSpec
from trtl_rl.model.description import LINEARS, DecoderDescription
from trtl_rl.model.operand import Operand
from trtl_rl.recipe.codec import encode
from trtl_rl.recipe.coverage import Coverage, CoveredLinear

SCALE_SUFFIX = "_scale_inv"  # of FP8 block-scale checkpoints: weight and weight_scale_inv


LORA_A, LORA_B = ".lora_A.weight", ".lora_B.weight"  # of adapter checkpoints
EMBEDDING = "model.embed_tokens.weight"
_NORMS = {
    "input_layernorm": "input_norm",
    "post_attention_layernorm": "post_norm",
    "self_attn.q_norm": "q_norm",
    "self_attn.k_norm": "k_norm",
}


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


def zero_adapters(description: DecoderDescription) -> dict[str, Tensor]:
    """Adapters in the layout of :func:`tensor_specs` with which the model is its base."""
    specs = [spec for spec in tensor_specs(description) if spec.name.endswith((LORA_A, LORA_B))]
    return {spec.name: torch.zeros(spec.shape, dtype=spec.dtype) for spec in specs}


def _is_weight(name: str) -> bool:
    """Whether a tensor is a weight, or the scales of one, and no bias or adapter."""
    return name.endswith((".weight", SCALE_SUFFIX)) and not name.endswith((LORA_A, LORA_B))


class LayerWeights:
    """One decoder layer's operands, norms and units."""

    def __init__(
        self, description: DecoderDescription, index: int, units: LayerUnits, device: torch.device, packed: bool
    ) -> None:
        d = description
        self.index = index
        self.units = units
        self.spec: LayerSpec = d.layer_spec(index)
        self.input_norm = torch.ones(d.hidden, device=device)
        self.post_norm = torch.ones(d.hidden, device=device)
        self.q_norm = torch.ones(d.head_dim, device=device)
        self.k_norm = torch.ones(d.head_dim, device=device)
        names = {role: d.linear_name(index, role) for role in LINEARS}
        self.qkv = _operands(self.spec.qkv, [names[role] for role in LINEARS[:3]], device, packed)
        self.o = Operand(self.spec.o, [names["o_proj"]], device, packed)
        self.gate_up = _operands(self.spec.gate_up, [names["gate_proj"], names["up_proj"]], device, packed)
        self.down = Operand(self.spec.down, [names["down_proj"]], device, packed)
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

    def copy(self) -> LayerWeights:
        """The same tensors in an object of its own."""
        other = copy(self)
        other.qkv, other.gate_up = [copy(operand) for operand in self.qkv], [copy(operand) for operand in self.gate_up]
        other.o, other.down = copy(self.o), copy(self.down)
        return other

    def changed(self) -> None:
        """Gather the units' inputs anew."""
        self._before = self._after = None

    def after_gradient_weights(self) -> list[Tensor]:
        """:meth:`after_weights` for the backward unit."""
        wide = [tensor for operand in self.gate_up for tensor in operand.gradient_tensors()]
        return [*self.o.gradient_tensors(), self.post_norm, *wide, *self.down.gradient_tensors()]


class DecoderWeights:
    """All weights of one version, in the form that the kernels read.

    Args:
        packed: Keep operands packed for decoding (an engine's). Then :meth:`load` replaces tensors, so that versions share
            what is the same in both (:meth:`successor`); otherwise it fills them.

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
        self._formats = {item.name: item.format.forward_weight for item in d.coverage.linears}
        self._scalings = {adapter.name: adapter.scaling for adapter in d.adapters}
        self._packed = packed
        self.embedding = torch.zeros(d.vocab, d.hidden, device=self.device)
        self.layers = [LayerWeights(d, i, kernels.layer(spec), self.device, packed) for i, spec in enumerate(specs)]
        self.norm = torch.ones(d.hidden, device=self.device)
        self.head = Operand(d.head_spec().linear, ["lm_head"], self.device, packed)
        self.version = -1
        self._operands = self._by_name()

    def successor(self) -> DecoderWeights:
        """Packed weights that share all tensors with these: what is loaded into them changes nothing here."""
        assert self._packed
        other = copy(self)
        other.layers, other.head = [layer.copy() for layer in self.layers], copy(self.head)
        other._operands = other._by_name()
        return other

    def base(self) -> DecoderWeights:
        """The same model with adapters of zeros. It shares all other tensors with these, also what is loaded into them later."""
        assert not self._packed
        other = copy(self)
        other.layers, other.head = [layer.copy() for layer in self.layers], copy(self.head)
        for layer in other.layers:
            for operand in layer.operands():
                operand.ups = {name: torch.zeros_like(up) for name, up in operand.ups.items()}
            layer.changed()
        other._operands = other._by_name()
        return other

    def exchange(self, other: DecoderWeights) -> None:
        """Trade places with a successor, in microseconds: who holds this object computes with the other's tensors from now on."""
        self.__dict__, other.__dict__ = other.__dict__, self.__dict__

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Decode a whole or partial version, given in the layout of :func:`tensor_specs`.

        Of a packed operand all weights must come or none, which :meth:`with_parts` sees to.
        """
        if self._packed:
            whole = {self._operand_of(name) for name in tensors if _is_weight(name)}
            touched = [self._operand_of(name) for name in tensors]
            for operand in dict.fromkeys(operand for operand in touched if operand is not None):
                operand.begin(weights=operand in whole)
        for name, given in tensors.items():
            if name.endswith(SCALE_SUFFIX):
                continue
            tensor = given.to(self.device)
            owner, attribute = self._vector(name)
            if owner is not None:
                self._put(owner, attribute, tensor)
                continue
            adapter = next((suffix for suffix in (LORA_A, LORA_B) if name.endswith(suffix)), None)
            if adapter is not None:
                module = name.removesuffix(adapter)
                a, b = (tensor.float(), None) if adapter == LORA_A else (None, tensor.float())
                self._operands[module].fill_adapter(module, a, b, self._scalings[module])
                continue
            module, _, kind = name.rpartition(".")
            if name == EMBEDDING:
                self._put(self, "embedding", tensor)
                if self.description.tied:
                    self._fill("lm_head", tensor, None)
            elif kind == "bias":
                self._operands[module].fill_bias(module, tensor.float())
            else:
                self._fill(module, tensor, tensors.get(name + SCALE_SUFFIX))
        for layer in self.layers:
            layer.changed()

    def with_parts(self, names: set[str], available: Iterable[str]) -> set[str]:
        """``names`` of tensors, and those among ``available`` that are decoded together with one of them.

        Adapters and biases are not: where they alone have changed, the packed weight goes on.
        """
        operands = {self._operand_of(name) for name in names if _is_weight(name)} - {None}
        return names | {name for name in available if _is_weight(name) and self._operand_of(name) in operands}

    def _operand_of(self, name: str) -> Operand | None:
        """The operand that a tensor is a part of; None for norms and an embedding that is not the head too."""
        if name == EMBEDDING:
            return self.head if self.description.tied else None
        for suffix in (f".weight{SCALE_SUFFIX}", LORA_A, LORA_B, ".weight", ".bias"):
            if name.endswith(suffix):
                return self._operands.get(name.removesuffix(suffix))
        raise KeyError(name)

    def _by_name(self) -> dict[str, Operand]:
        operands = [operand for layer in self.layers for operand in layer.operands()]
        return {name: operand for operand in [*operands, self.head] for name in operand.names}

    def _vector(self, name: str) -> tuple[LayerWeights | DecoderWeights | None, str]:
        """Whose attribute a norm's weight is."""
        if name == "model.norm.weight":
            return self, "norm"
        _, _, rest = name.partition("model.layers.")
        index, _, module = rest.partition(".")
        attribute = _NORMS.get(module.removesuffix(".weight"))
        return (self.layers[int(index)], attribute) if attribute else (None, "")

    def _put(self, owner: LayerWeights | DecoderWeights, attribute: str, tensor: Tensor) -> None:
        if self._packed:
            setattr(owner, attribute, tensor.to(torch.float32, copy=True))
        else:
            getattr(owner, attribute).copy_(tensor)

    def _fill(self, module: str, tensor: Tensor, scale: Tensor | None) -> None:
        format = self._formats[module]
        operand = self._operands[module]
        operand.formats[module] = format if tensor.dtype == torch.float8_e4m3fn else None
        if format is None:
            operand.fill(module, tensor.float())
        elif tensor.dtype == torch.float8_e4m3fn:
            assert scale is not None
            operand.fill_codes(module, tensor, scale.to(self.device), format)
        else:  # a quantised head that shares the high-precision embedding
            assert module == "lm_head" and self.description.tied, f"{module} came without codes"
            operand.fill_codes(module, *encode(tensor.float(), format), format)
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


def _operands(specs: Sequence[LinearSpec], names: Sequence[str], device: torch.device, packed: bool) -> list[Operand]:
    rest = list(names)
    return [Operand(spec, [rest.pop(0) for _ in spec.out_features], device, packed) for spec in specs]


def _tensors(operands: Sequence[Operand]) -> list[Tensor]:
    return [tensor for operand in operands for tensor in operand.tensors()]
