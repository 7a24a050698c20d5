"""What a unit of kernels is specialised for: sizes and formats of one decoder layer, as plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trtl_rl.recipe.formats import LinearFormat

ROW_TILE = 32  # rows of one GEMM call and of one unit; fewer than 7 rows change the bits of a CPU GEMM
TOKEN_TILE = 128  # rows of a training batch: WGrad's groups of 128 tokens
KEY_TILE = 32  # keys of one step of attention


@dataclass(frozen=True)
class LinearSpec:
    """A linear, or several with the same input, activation format and bias that run as one GEMM.

    Attributes:
        in_features: K.
        out_features: N of each part, in order; the operand is [K, sum(N)].
        format: Formats shared by the parts. The weight's format never enters a unit: units get decoded operands.
    """

    in_features: int
    out_features: tuple[int, ...]
    format: LinearFormat
    bias: bool

    @property
    def columns(self) -> int:
        return sum(self.out_features)

    @property
    def kept(self) -> int:
        """How many tensors backward keeps of the input: codes and scales, or the operand."""
        return 1 if self.format.forward_activation is None else 2


@dataclass(frozen=True)
class LayerSpec:
    """One decoder layer of Qwen2, Qwen3 or Llama.

    Attributes:
        qkv, gate_up: The linears of q, k, v and of gate, up; one entry each unless the recipe treats parts differently.
        qk_norm: Whether q and k heads are normalised before rope (Qwen3).
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    eps: float
    qk_norm: bool
    qkv: tuple[LinearSpec, ...]
    o: LinearSpec
    gate_up: tuple[LinearSpec, ...]
    down: LinearSpec


@dataclass(frozen=True)
class HeadSpec:
    """Final norm and output head."""

    hidden: int
    vocab: int
    eps: float
    linear: LinearSpec


def fuse(parts: list[tuple[int, LinearFormat, bool]], in_features: int) -> tuple[LinearSpec, ...]:
    """Join neighbouring parts (N, format, bias) which share everything but the weight's format."""
    specs: list[LinearSpec] = []
    keys: list[Any] = []
    for n, format, bias in parts:
        shared = LinearFormat(None, format.activation, format.fprop, format.dgrad, format.wgrad, format.compute)
        key = (shared, bias)
        if keys and keys[-1] == key:
            last = specs[-1]
            specs[-1] = LinearSpec(in_features, (*last.out_features, n), last.format, bias)
        else:
            specs.append(LinearSpec(in_features, (n,), shared, bias))
            keys.append(key)
    return tuple(specs)
