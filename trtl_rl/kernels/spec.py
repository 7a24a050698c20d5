"""What a unit of kernels is specialised for: sizes and formats of one decoder layer, as plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from trtl_rl.recipe.formats import LinearFormat

if TYPE_CHECKING:
    import torch

ROW_TILE = 8  # rows of a unit's call are a multiple of it; a single row would change the bits of a GEMM
TOKEN_TILE = 128  # rows of a training batch: WGrad's groups of 128 tokens
KEY_TILE = 32  # keys of one step of attention


@dataclass(frozen=True)
class LinearSpec:
    """A linear, or several with the same input, activation format and bias that run as one GEMM.

    Attributes:
        in_features: K.
        out_features: N of each part, in order; the operand is [sum(N), K].
        format: Formats shared by the parts. The weight's format never enters a unit: units get decoded operands.
        ranks: Rank of the low-rank adapter of each part, 0 for a part that has none; empty if no part has one.
        frozen: Weights and biases get no gradient; adapters do.
    """

    in_features: int
    out_features: tuple[int, ...]
    format: LinearFormat
    bias: bool
    ranks: tuple[int, ...] = ()
    frozen: bool = False

    @property
    def columns(self) -> int:
        return sum(self.out_features)

    @property
    def adapted(self) -> bool:
        """Whether some part has an adapter."""
        return any(self.ranks)

    @property
    def adapter_tensors(self) -> int:
        """The A of all parts in one tensor, and a B for each part that is adapted."""
        return 1 + sum(rank > 0 for rank in self.ranks) if self.adapted else 0

    @property
    def operand_dtype(self) -> torch.dtype:
        """What operands and adapters are stored in, and multiplied as."""
        import torch

        return torch.bfloat16 if self.format.compute == "bf16" else torch.float32

    @property
    def tensors(self) -> int:
        """How many tensors a unit takes for it."""
        return 1 + self.bias + self.adapter_tensors

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

    @property
    def key_value_dtype(self) -> torch.dtype:
        """What keys and values are stored in: bfloat16 where all of the layer's linears compute in it."""
        import torch

        dtypes = {spec.operand_dtype for spec in (*self.qkv, self.o, *self.gate_up, self.down)}
        return torch.bfloat16 if dtypes == {torch.bfloat16} else torch.float32


@dataclass(frozen=True)
class HeadSpec:
    """Final norm and output head."""

    hidden: int
    vocab: int
    eps: float
    linear: LinearSpec


@dataclass(frozen=True)
class Part:
    """One linear before it is joined with its neighbours."""

    out_features: int
    format: LinearFormat
    bias: bool
    rank: int = 0


def fuse(parts: Sequence[Part], in_features: int, *, frozen: bool = False) -> tuple[LinearSpec, ...]:
    """Join neighbouring parts which share everything but the weight's format and the adapters."""
    groups: list[tuple[LinearFormat, bool, list[Part]]] = []
    for part in parts:
        format = replace(part.format, weight=None)
        if groups and groups[-1][:2] == (format, part.bias):
            groups[-1][2].append(part)
        else:
            groups.append((format, part.bias, [part]))
    return tuple(
        LinearSpec(
            in_features,
            tuple(part.out_features for part in joined),
            format,
            bias,
            tuple(part.rank for part in joined) if any(part.rank for part in joined) else (),
            frozen,
        )
        for format, bias, joined in groups
    )
