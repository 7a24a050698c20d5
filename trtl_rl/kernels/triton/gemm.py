"""The block GEMM of the exact mode: a row's bits depend on that row alone, however many rows there are.

One tile for every M, edges masked; every program sums its blocks of 128 in order; nothing is split over K, nothing is
chosen by shape, and the number of rows takes no part in what Triton specialises a kernel for. One kernel serves FProp
(X 1×128, W 128×128), DGrad (dY 1×128, the same codes and scales of W read the other way round) and WGrad (dYᵀ and Xᵀ
1×128 along tokens): they differ in strides and in the shape of B's blocks.

For each 128 columns: a product of codes in one accumulator, times ``scale_a * scale_b``, added to the FP32 sum
(DeepSeek-V3, arXiv 2412.19437, 3.3.2, promotes at the same interval). On Hopper the accumulator of E4M3 products keeps
fewer bits than FP32 (about 14, ibid.), so a GPU's results are those of its tensor cores: equal to themselves, near those
of the CPU.

Tile: 64×128 codes of A and B for a step of K, four warps: 64 values of the sum and 64 of the product in each thread;
four stages of 24 KB, so two programs share a multiprocessor. 64 is the least M of Hopper's matrix instruction, and a
decode step has few rows. ``W`` read the other way round is not contiguous along the contraction, which the instruction
wants for 8-bit operands: Triton then transposes tiles in shared memory. Never tuned, or run, on a GPU.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trtl_rl.kernels.coded import Coded, check_operands
from trtl_rl.kernels.triton.launch import check_device


class Tile(NamedTuple):
    """Rows and columns of a program's output, and how Triton compiles it; part of what decides a result's bits."""

    m: int
    n: int
    warps: int
    stages: int


TILE = Tile(64, 128, 4, 4)


def block_gemm(
    a: Coded, b: Coded, dtype: torch.dtype = torch.float32, *, bias: Tensor | None = None, tile: Tile = TILE
) -> Tensor:
    """``A @ Bᵀ`` of the decoded operands, row-invariant: [M, K], [N, K] → [M, N].

    Args:
        a: In blocks of 1×128.
        b: In blocks of 128×128 or 1×128, any strides.
        dtype: float32 or bfloat16, rounded once at the end.
        bias: [N], added to the FP32 sum.
        tile: Runs that compare bits use one tile; N must not be above 128, the width of a block of B.

    Raises:
        UserError: operands that do not fit together, or a device without Triton.
    """
    (m, k), n = a.codes.shape, b.codes.shape[0]
    check_operands(a, b, dtype, bias)
    check_device(_gemm, *a[:2], *b[:2], *(() if bias is None else (bias,)))
    assert 128 % tile.n == 0, "a tile must lie within one block of B"
    out = torch.empty((m, n), dtype=dtype, device=a.codes.device)
    with torch.cuda.device_of(out):
        _gemm[(triton.cdiv(m, tile.m) * triton.cdiv(n, tile.n),)](
            a.codes,
            a.scales,
            b.codes,
            b.scales,
            out,
            out if bias is None else bias,
            m,
            n,
            k,
            *a.codes.stride(),
            *a.scales.stride(),
            *b.codes.stride(),
            *b.scales.stride(),
            TILE_M=tile.m,
            TILE_N=tile.n,
            SQUARE=b.block[0] == 128,
            BIAS=bias is not None,
            num_warps=tile.warps,
            num_stages=tile.stages,
            enable_fp_fusion=True,
        )
    return out


# Neither the number of rows nor the stride of A's scales, which equals it, may decide how the kernel is compiled.
@triton.jit(do_not_specialize=["m", "a_scale_stride_m", "a_scale_stride_k"])
def _gemm(
    a: tl.tensor,
    a_scales: tl.tensor,
    b: tl.tensor,
    b_scales: tl.tensor,
    out: tl.tensor,
    bias: tl.tensor,
    m: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    a_stride_m: tl.tensor,
    a_stride_k: tl.tensor,
    a_scale_stride_m: tl.tensor,
    a_scale_stride_k: tl.tensor,
    b_stride_n: tl.tensor,
    b_stride_k: tl.tensor,
    b_scale_stride_n: tl.tensor,
    b_scale_stride_k: tl.tensor,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    SQUARE: tl.constexpr,
    BIAS: tl.constexpr,
) -> None:
    # Eight tiles of rows share the tiles of B that are in the cache: only the order of programs depends on m.
    program, tiles_m, tiles_n = tl.program_id(0), tl.cdiv(m, TILE_M), tl.cdiv(n, TILE_N)
    group = program // (8 * tiles_n)
    height = tl.minimum(tiles_m - group * 8, 8)
    i = group * 8 + (program % (8 * tiles_n)) % height
    j = (program % (8 * tiles_n)) // height

    row = (i * TILE_M + tl.arange(0, TILE_M)).to(tl.int64)  # M·N may pass 2**31
    column = (j * TILE_N + tl.arange(0, TILE_N)).to(tl.int64)
    depth = tl.arange(0, 128)
    a_at = a + row[:, None] * a_stride_m + depth[None, :] * a_stride_k
    b_at = b + column[None, :] * b_stride_n + depth[:, None] * b_stride_k
    a_scale_at = a_scales + row * a_scale_stride_m
    b_scale_at = b_scales + (j * TILE_N // 128 if SQUARE else column) * b_scale_stride_n
    total = tl.zeros((TILE_M, TILE_N), tl.float32)
    for block in range(tl.cdiv(k, 128)):
        left = depth < k - block * 128
        x = tl.load(a_at, mask=(row < m)[:, None] & left[None, :], other=0.0)
        w = tl.load(b_at, mask=(column < n)[None, :] & left[:, None], other=0.0)
        product = tl.dot(x, w, out_dtype=tl.float32)
        x_scale = tl.load(a_scale_at, mask=row < m, other=0.0)
        if SQUARE:
            total += product * (x_scale * tl.load(b_scale_at))[:, None]
        else:
            w_scale = tl.load(b_scale_at, mask=column < n, other=0.0)
            total += product * (x_scale[:, None] * w_scale[None, :])
        a_at += 128 * a_stride_k
        b_at += 128 * b_stride_k
        a_scale_at += a_scale_stride_k
        b_scale_at += b_scale_stride_k
    if BIAS:
        total += tl.load(bias + column, mask=column < n, other=0.0).to(tl.float32)[None, :]
    inside = (row < m)[:, None] & (column < n)[None, :]
    tl.store(out + row[:, None] * n + column[None, :], total.to(out.dtype.element_ty), mask=inside)
