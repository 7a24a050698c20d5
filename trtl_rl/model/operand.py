"""``Operand``: what one GEMM needs, made of one or several linears of a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trtl_rl.kernels.ops import pack
from trtl_rl.kernels.spec import LinearSpec
from trtl_rl.recipe.codec import decode
from trtl_rl.recipe.formats import BlockFormat


class Operand:
    """What one GEMM needs: the weight [sum N, K], bias and adapters; parts are checkpoint linears one above the other.

    Args:
        packed: Keep the weight packed for decoding, as engines do: the values are gone once all parts were filled.

    Attributes:
        values: The decoded weight, float32 or with ``compute: bf16`` bfloat16.
        packed: The weight as decoding multiplies it fastest, or None.
        down: A of all parts, [ranks, K], or None.
        ups: For each part with an adapter scaling·B, [N, rank].
    """

    def __init__(self, spec: LinearSpec, names: Sequence[str], device: torch.device, packed: bool) -> None:
        self.spec = spec
        self.names = list(names)
        dtype = spec.operand_dtype
        self.packed = torch.zeros(0, dtype=dtype, device=device) if packed else None
        self.values = torch.zeros(0 if packed else spec.columns, spec.in_features, dtype=dtype, device=device)
        self.bias = torch.zeros(spec.columns, device=device) if spec.bias else None
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
        self._missing: set[str] = set()  # parts that a packed operand still waits for

    def begin(self, *, weights: bool) -> None:
        """Take new tensors in place of those that a packed operand shares with another version.

        Args:
            weights: The weights of all parts follow; otherwise biases and adapters alone.
        """
        assert self.packed is not None
        if weights:
            self.values = self.values.new_empty(self.spec.columns, self.spec.in_features)
            self._missing = set(self.names)
        self.bias = None if self.bias is None else self.bias.clone()
        self.down = None if self.down is None else self.down.clone()
        self.ups = {name: up.clone() for name, up in self.ups.items()}

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
        rows = self._rows(name, values)
        self.values[rows].copy_(values)
        self._filled(name, rows)

    def fill_codes(self, name: str, codes: Tensor, scale: Tensor, format: BlockFormat) -> None:
        """Store the weight of the part ``name`` that :func:`decode` makes of ``codes`` [N, K] and ``scale``."""
        rows = self._rows(name, codes)
        into = self.values[rows]
        if into.dtype == torch.float32:
            decode(codes, scale, format, into)
        else:
            into.copy_(decode(codes, scale, format))
        self._filled(name, rows)

    def _rows(self, name: str, tensor: Tensor) -> slice:
        start = self._starts[name]
        return slice(start, start + tensor.shape[0])

    def _filled(self, name: str, rows: slice) -> None:
        if self.gradient_values is not None:  # fill_gradient comes after, for the parts that differ
            self.gradient_values[rows].copy_(self.values[rows])
        if self.packed is not None:
            self._missing.remove(name)
            if not self._missing:
                self.packed, self.values = pack(self.values), self.values.new_empty(0, self.spec.in_features)

    def fill_gradient(self, name: str, values: Tensor) -> None:
        """Store the weight [N, K] float32 that DGrad sees of the part ``name``, where the forward pass sees another."""
        if self.gradient_values is None:
            self.gradient_values = self.values.clone()
        self.gradient_values[self._rows(name, values)].copy_(values)

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
        self.bias[self._rows(name, values)].copy_(values)


def _starts(sizes: Sequence[int]) -> list[int]:
    out, total = [], 0
    for n in sizes:
        out.append(total)
        total += n
    return out
