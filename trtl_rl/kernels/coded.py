"""``Coded``: a matrix as E4M3 codes and block scales, which is how operands reach the GEMMs of a GPU."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from trtl_rl.errors import UserError


class Coded(NamedTuple):
    """An operand of a block GEMM: what it stands for is ``codes * scales``, each scale for its block.

    Attributes:
        codes: [R, C] ``float8_e4m3fn``; GEMMs contract over the columns.
        scales: [ceil(R/rows), ceil(C/columns)] float32. In blocks of 1×128 the scales of a column of blocks lie next to
            each other (strides (1, R)), as ``scaled_mm`` reads them and as a tile of rows loads them fastest.
        block: (rows, columns) of one scale.
    """

    codes: Tensor
    scales: Tensor
    block: tuple[int, int]

    def t(self) -> Coded:
        """The transpose as a view: the same codes and scales."""
        return Coded(self.codes.t(), self.scales.t(), (self.block[1], self.block[0]))


def check_operands(a: Coded, b: Coded, dtype: torch.dtype, bias: Tensor | None) -> None:
    """Refuse operands that no block GEMM ``A @ Bᵀ`` takes.

    Args:
        a: [M, K] in blocks of 1×128.
        b: [N, K] in blocks of 128×128 or 1×128.
        dtype: Of the result, float32 or bfloat16.
        bias: [N] or None.

    Raises:
        UserError: says which operand is wrong and what fits.
    """
    if a.block != (1, 128) or b.block not in ((1, 128), (128, 128)):
        raise UserError(
            f"A block GEMM takes A in blocks of 1×128 and B in blocks of 1×128 or 128×128, got {a.block} and {b.block}."
        )
    for name, operand in (("A", a), ("B", b)):
        shape, (rows, columns) = operand.codes.shape, operand.block
        if operand.codes.dtype != torch.float8_e4m3fn or operand.scales.dtype != torch.float32 or len(shape) != 2:
            raise UserError(
                f"{name} needs a matrix of codes in float8_e4m3fn and scales in float32, got {operand.codes.dtype} "
                f"{list(shape)} and {operand.scales.dtype}; quantise it with trtl_rl.kernels.triton.quantise."
            )
        expected = (-(-shape[0] // rows), -(-shape[1] // columns))
        if operand.scales.shape != expected:
            raise UserError(
                f"{name} {list(shape)} in blocks of {rows}×{columns} needs scales {list(expected)}, "
                f"got {list(operand.scales.shape)}."
            )
    if a.codes.shape[1] != b.codes.shape[1] or not a.codes.numel() or not b.codes.numel():
        raise UserError(
            f"A [M, K] and B [N, K] must share K and hold a value, got {list(a.codes.shape)} and {list(b.codes.shape)}; "
            "DGrad takes the weight's transpose, Coded.t()."
        )
    if dtype not in (torch.float32, torch.bfloat16):
        raise UserError(f"A block GEMM returns float32 or bfloat16, not {dtype}.")
    if bias is not None and bias.shape != b.codes.shape[:1]:
        raise UserError(f"The bias must be [{b.codes.shape[0]}], one for each row of B, got {list(bias.shape)}.")
