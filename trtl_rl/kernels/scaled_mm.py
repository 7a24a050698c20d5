"""The fast mode of the block GEMM: ``torch.nn.functional.scaled_mm`` with block scales, which is cuBLASLt on Hopper.

It picks algorithms by shape, so a row's bits depend on its company: rollout and training agree nearly, not exactly.
Layouts as torch 2.13 checks them (aten/src/ATen/native/cuda/ScaledBlas.cpp): A [M, K] by rows, B [K, N] by columns, K and
N multiples of 16; scales of 1×128 are [rows, ceil(K/128)] with strides (1, rows), of both operands; those of 128×128 are
[ceil(K/128) rounded up to a multiple of 4, ceil(N/128)] with unit stride along K. Never run on a GPU.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType

from trtl_rl.errors import UserError
from trtl_rl.kernels.coded import Coded, check_operands


def unsupported(device: torch.device) -> str | None:
    """Why ``device`` cannot multiply with block scales; None if it can."""
    if device.type != "cuda":
        return f"block scales need an NVIDIA GPU of compute capability 9.0, and this is '{device}'"
    if torch.version.cuda is None or tuple(map(int, torch.version.cuda.split(".")[:2])) < (12, 9):
        return f"block scales need cublasLt of CUDA 12.9 or later, and torch was built with CUDA {torch.version.cuda}"
    capability = torch.cuda.get_device_capability(device)
    if capability[0] != 9:
        name = torch.cuda.get_device_name(device)
        return f"block scales need compute capability 9.0, and {name} has {capability[0]}.{capability[1]}"
    return None


def scaled_gemm(a: Coded, b: Coded, dtype: torch.dtype = torch.bfloat16, *, bias: Tensor | None = None) -> Tensor:
    """``A @ Bᵀ`` of the decoded operands: [M, K], [N, K] → [M, N].

    Args:
        a: In blocks of 1×128.
        b: In blocks of 128×128 or 1×128.
        dtype: bfloat16 or float32.
        bias: [N].

    Raises:
        UserError: operands that do not fit together, codes that are not contiguous along K, K or N no multiple of 16, or
            a device without block scales.
    """
    check_operands(a, b, dtype, bias)
    n, k = b.codes.shape
    if not (a.codes.is_contiguous() and b.codes.is_contiguous()):
        raise UserError(
            "scaled_mm takes codes that are contiguous along K; for DGrad, quantise_weight(..., transposed=True) writes them."
        )
    if k % 16 or n % 16:
        raise UserError(
            f"scaled_mm takes K and N that are multiples of 16, got {k} and {n}; pad, or use the exact mode."
        )
    if reason := unsupported(a.codes.device):
        raise UserError(f"The fast mode cannot run here: {reason}. Use the exact mode.")
    square = b.block[0] == 128
    out = F.scaled_mm(
        a.codes,
        b.codes.t(),
        _next_to_each_other(a.scales),
        ScalingType.BlockWise1x128,
        _padded(b.scales) if square else _next_to_each_other(b.scales),
        ScalingType.BlockWise128x128 if square else ScalingType.BlockWise1x128,
        bias=bias.to(dtype) if bias is not None and dtype == torch.bfloat16 else None,
        output_dtype=dtype,
    )
    return out.add_(bias) if bias is not None and dtype == torch.float32 else out  # torch refuses a bias for float32


def _next_to_each_other(scales: Tensor) -> Tensor:
    """[R, blocks] with strides (1, R): already so if the quantiser made them."""
    if scales.stride() == (1, scales.shape[0]):
        return scales
    return scales.t().clone(memory_format=torch.contiguous_format).t()


def _padded(scales: Tensor) -> Tensor:
    """[N/128, K/128] → [K/128 rounded up to a multiple of 4, N/128] with unit stride along K; a view if it has that size."""
    missing = -scales.shape[1] % 4
    return (F.pad(scales, (0, missing)) if missing else scales.contiguous()).t()
