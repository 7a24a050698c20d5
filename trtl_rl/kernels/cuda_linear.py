"""A linear on a GPU with all three GEMMs in FP8, as Jet-RL has them (arXiv 2601.14243, the precision flow).

FProp: X 1×128, W 128×128. DGrad: dY 1×128, the codes of W with the scale grid transposed. WGrad: dYᵀ 1×128 and X 128×1,
both along tokens; X is kept as the codes of the forward pass and quantised again. dY is read once for both its layouts.

``exact`` multiplies with the row-invariant Triton kernel: bits of a row do not depend on the batch. ``fast`` multiplies
with ``scaled_mm``: faster on Hopper, and rollout and training then agree only nearly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor

from trtl_rl.kernels.coded import Coded
from trtl_rl.kernels.scaled_mm import scaled_gemm
from trtl_rl.kernels.triton.gemm import block_gemm
from trtl_rl.kernels.triton.quantise import quantise_along_tokens, quantise_both, quantise_rows, quantise_weight
from trtl_rl.recipe.formats import BlockFormat

Mode = Literal["exact", "fast"]
_GEMM: dict[Mode, Callable[..., Tensor]] = {"exact": block_gemm, "fast": scaled_gemm}


class LinearWeight(NamedTuple):
    """One version of a linear's weight: W [N, K] for FProp and Wᵀ [K, N] for DGrad, in blocks of 128×128."""

    forward: Coded
    backward: Coded
    mode: Mode

    @classmethod
    def of(cls, weight: Tensor, format: BlockFormat, mode: Mode) -> LinearWeight:
        """Quantise ``weight`` [N, K] (bfloat16 or float32); the fast mode keeps a second, transposed copy of the codes."""
        return cls(*quantise_weight(weight, format, transposed=mode == "fast"), mode)


def fprop(x: Coded, weight: LinearWeight, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """Y = X Wᵀ + bias: [M, K] → [M, N]."""
    return _GEMM[weight.mode](x, weight.forward, dtype, bias=bias)


def dgrad(dy: Coded, weight: LinearWeight, dtype: torch.dtype) -> Tensor:
    """dX = dY W: [M, N] → [M, K]."""
    return _GEMM[weight.mode](dy, weight.backward, dtype)


def wgrad(dy_t: Coded, x_t: Coded, mode: Mode, dtype: torch.dtype) -> Tensor:
    """dW = dYᵀ X of dYᵀ [N, M] and Xᵀ [K, M], both in blocks of 128 tokens: [N, K]."""
    return _GEMM[mode](dy_t, x_t, dtype)


def linear(
    x: Tensor, parameter: Tensor, weight: LinearWeight, activation: BlockFormat, bias: Tensor | None = None
) -> Tensor:
    """``x @ Wᵀ + bias`` in FP8, with FP8 gradients that reach ``parameter`` straight through rounding.

    Args:
        x: [M, K] float32 or bfloat16; the result and dX have its dtype.
        parameter: The master weight [N, K], of which ``weight`` holds the codes; its gradient has its dtype.
        activation: Format of X, with blocks of 1×128; dY and both operands of WGrad have its scale formula and rounding.
        bias: [N] or None.

    Raises:
        UserError: shapes, formats or a device that the mode cannot do.
    """
    return cast("Tensor", _Linear.apply(x, parameter, weight, activation, bias))  # type: ignore[no-untyped-call]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, parameter: Tensor, weight: LinearWeight, activation: BlockFormat, bias: Tensor | None
    ) -> Tensor:
        coded = quantise_rows(x, activation)
        ctx.weight, ctx.activation, ctx.dtypes = weight, activation, (x.dtype, parameter.dtype)
        ctx.bias_dtype = None if bias is None else bias.dtype
        if ctx.needs_input_grad[1]:
            ctx.save_for_backward(coded.codes, coded.scales)
        return fprop(coded, weight, x.dtype, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,), weight, activation = grads, ctx.weight, ctx.activation
        wants_input, wants_weight = ctx.needs_input_grad[:2]
        dx = dw = db = None
        if wants_weight:
            rows, tokens = quantise_both(dy, activation)
            along_tokens = BlockFormat((activation.block[1], 1), activation.scale, activation.round)
            codes, scales = ctx.saved_tensors
            x_tokens = quantise_along_tokens(Coded(codes, scales, activation.block), along_tokens)
            dw = wgrad(tokens, x_tokens, weight.mode, ctx.dtypes[1])
        else:  # a frozen weight, as under low-rank adapters
            rows = quantise_rows(dy, activation)
        if wants_input:
            dx = dgrad(rows, weight, ctx.dtypes[0])
        if ctx.bias_dtype is not None:
            db = dy.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        return dx, dw, None, None, db
