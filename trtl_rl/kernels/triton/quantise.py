"""FP8 block quantisers: codes and scales have the bits of ``trtl_rl.recipe.codec.encode``.

Three shapes of blocks: 1×128 along a row (activations, dY), 128×1 along tokens (both operands of WGrad, written as the
transpose in blocks of 1×128, which is what a GEMM over tokens reads), and 128×128 (weights). DeepSeek-V3 (arXiv
2412.19437, 3.3.2) has the shapes, Jet-RL (arXiv 2601.14243) says which operand gets which.

Bits count here: divisions are ``div_rn`` (Triton's ``/`` is approximate on a GPU), contraction of multiply and add is off,
and a block's largest magnitude is found among the bits, whose order is that of the floats, with NaN on top. On a GPU its
own conversion rounds to E4M3 (``cvt.rn.satfinite``: nearest, ties to even, saturating); Triton's interpreter drops the
carry of a mantissa in that cast, so there, and where ``Build.integers`` asks for it, integers round.

A program takes a tile of 128 columns, and of 128 rows where a block has as many; loads and stores of aligned matrices are
16 bytes wide. Never tuned, or run, on a GPU.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trtl_rl.errors import UserError
from trtl_rl.kernels.coded import Coded
from trtl_rl.kernels.triton.launch import check_device
from trtl_rl.recipe.formats import BlockFormat

BLOCK = 128
_ROWS_OF_A_PROGRAM = 32


class Build(NamedTuple):
    """How Triton compiles a quantiser; nothing of it changes a bit.

    Attributes:
        warps: Of one program.
        registers: The most that a thread may have; more spill to memory.
        integers: Round with integers on a GPU too.
    """

    warps: int
    registers: int | None = None
    integers: bool = False


ROWS_BUILD = Build(4)
# 128 registers let two programs share a multiprocessor, one loading while the other computes; both layouts would take 181.
TILE_BUILD = Build(8, 128)


def quantise_rows(x: Tensor, format: BlockFormat, *, build: Build = ROWS_BUILD) -> Coded:
    """Quantise ``x`` [M, K] (float32 or bfloat16, any strides) in blocks of 1×128.

    Raises:
        UserError: a format of another block, a source which is no matrix of such values, or a device without Triton.
    """
    _check(_tiles, x, format, (1, BLOCK))
    rows = _empty(x.shape, x.device)
    _launch_tiles(x, None, rows, None, format, build)
    return rows


def quantise_along_tokens(x: Tensor | Coded, format: BlockFormat, *, build: Build = TILE_BUILD) -> Coded:
    """Quantise [M, K] in blocks of 128×1, and return the transpose [K, M] in blocks of 1×128.

    Args:
        x: float32 or bfloat16, or the codes of :func:`quantise_rows`, whose decoded values are quantised again (the X
            that forward kept, on its way into WGrad).
        format: Of blocks (128, 1).

    Raises:
        UserError: as :func:`quantise_rows`.
    """
    source, scales = (x.codes, x.scales) if isinstance(x, Coded) else (x, None)
    if isinstance(x, Coded) and x.block != (1, BLOCK):
        raise UserError(f"Only codes in blocks of 1×{BLOCK} are quantised again, got blocks of {x.block}.")
    _check(_tiles, source, format, (BLOCK, 1), coded=scales is not None)
    tokens = _empty((source.shape[1], source.shape[0]), source.device)
    _launch_tiles(source, scales, None, tokens, format, build)
    return tokens


def quantise_both(x: Tensor, format: BlockFormat, *, build: Build = TILE_BUILD) -> tuple[Coded, Coded]:
    """Both layouts of dY [M, N] from one reading: for DGrad and for WGrad.

    Args:
        format: Of blocks (1, 128); the second result has its scale formula and rounding in blocks of (128, 1).

    Returns:
        dY [M, N] and dYᵀ [N, M], each in blocks of 1×128.

    Raises:
        UserError: as :func:`quantise_rows`.
    """
    _check(_tiles, x, format, (1, BLOCK))
    m, k = x.shape
    rows, tokens = _empty((m, k), x.device), _empty((k, m), x.device)
    _launch_tiles(x, None, rows, tokens, format, build)
    return rows, tokens


def quantise_weight(
    weight: Tensor, format: BlockFormat, *, transposed: bool = False, build: Build = TILE_BUILD
) -> tuple[Coded, Coded]:
    """Quantise a weight [N, K] in blocks of 128×128; once for each version of the weights.

    Args:
        weight: float32 or bfloat16.
        transposed: Also write the codes transposed, for GEMMs that take contiguous contractions only (``scaled_mm``).

    Returns:
        W [N, K] for FProp and Wᵀ [K, N] for DGrad: a view of the same memory, or with ``transposed`` a copy.

    Raises:
        UserError: as :func:`quantise_rows`.
    """
    _check(_square, weight, format, (BLOCK, BLOCK))
    n, k = weight.shape
    codes = torch.empty((n, k), dtype=torch.float8_e4m3fn, device=weight.device)
    scales = torch.empty((triton.cdiv(n, BLOCK), triton.cdiv(k, BLOCK)), device=weight.device)
    forward = Coded(codes, scales, (BLOCK, BLOCK))
    backward = forward.t()
    if transposed:
        backward = backward._replace(codes=torch.empty((k, n), dtype=torch.float8_e4m3fn, device=weight.device))
    with torch.cuda.device_of(weight):  # Triton launches on the current device; on a CPU this does nothing
        _square[(scales.shape[1], scales.shape[0])](
            weight,
            codes.view(torch.uint8),
            scales,
            (backward.codes if transposed else codes).view(torch.uint8),
            n,
            k,
            *weight.stride(),
            COPY=transposed,
            **_flags(_square, format, build),
        )
    if transposed:
        backward = backward._replace(scales=backward.scales.contiguous())
    return forward, backward


def _launch_tiles(
    source: Tensor, scales: Tensor | None, rows: Coded | None, tokens: Coded | None, format: BlockFormat, build: Build
) -> None:
    some = rows or tokens
    assert some is not None
    row_out, token_out = rows or some, tokens or some  # a kernel writes only where its flag says so
    tile = BLOCK if tokens else _ROWS_OF_A_PROGRAM
    with torch.cuda.device_of(source):
        _tiles[(triton.cdiv(source.shape[1], BLOCK), triton.cdiv(source.shape[0], tile))](
            source,
            source if scales is None else scales,
            row_out.codes.view(torch.uint8),
            row_out.scales,
            token_out.codes.view(torch.uint8),
            token_out.scales,
            *source.shape,
            *source.stride(),
            *((0, 0) if scales is None else scales.stride()),
            TILE=tile,
            CODED=scales is not None,
            ROWS=rows is not None,
            TOKENS=tokens is not None,
            **_flags(_tiles, format, build),
        )


def _flags(kernel: Any, format: BlockFormat, build: Build) -> dict[str, Any]:
    return {
        "INVERSE": format.scale == "inverse",
        "POW2": format.round == "pow2",
        "INTEGERS": build.integers or not isinstance(kernel, triton.JITFunction),
        "num_warps": build.warps,
        "maxnreg": build.registers,
        "enable_fp_fusion": False,
    }


def _check(kernel: Any, x: Tensor, format: BlockFormat, block: tuple[int, int], coded: bool = False) -> None:
    if format.block != block:
        raise UserError(f"This quantiser makes blocks of {block[0]}×{block[1]}; the format says {format.block}.")
    allowed = (torch.float8_e4m3fn,) if coded else (torch.float32, torch.bfloat16)
    if x.dim() != 2 or not x.numel() or x.dtype not in allowed:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        raise UserError(f"Quantisers take a matrix [rows, columns] of {names}, got {x.dtype} {list(x.shape)}.")
    check_device(kernel, x)


def _empty(shape: tuple[int, ...], device: torch.device) -> Coded:
    m, k = shape
    scales = torch.empty((triton.cdiv(k, BLOCK), m), device=device).t()
    return Coded(torch.empty((m, k), dtype=torch.float8_e4m3fn, device=device), scales, (1, BLOCK))


@triton.jit
def _tiles(
    source: tl.tensor,
    source_scales: tl.tensor,
    row_codes: tl.tensor,
    row_scales: tl.tensor,
    token_codes: tl.tensor,
    token_scales: tl.tensor,
    m: tl.tensor,
    k: tl.tensor,
    stride_m: tl.tensor,
    stride_k: tl.tensor,
    scale_stride_m: tl.tensor,
    scale_stride_k: tl.tensor,
    TILE: tl.constexpr,
    CODED: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    INVERSE: tl.constexpr,
    POW2: tl.constexpr,
    INTEGERS: tl.constexpr,
) -> None:
    """One tile [TILE, 128]: its rows as blocks of 1×128, its columns as blocks of TILE×1, or both."""
    i, j = tl.program_id(1), tl.program_id(0)  # neighbours read on in the same rows
    row = (i * TILE + tl.arange(0, TILE)).to(tl.int64)  # M·K may pass 2**31
    column = (j * 128 + tl.arange(0, 128)).to(tl.int64)
    inside = (row < m)[:, None] & (column < k)[None, :]
    x = tl.load(source + row[:, None] * stride_m + column[None, :] * stride_k, mask=inside, other=0.0).to(tl.float32)
    if CODED:
        scale = tl.load(source_scales + row * scale_stride_m + j * scale_stride_k, mask=row < m, other=0.0)
        x = x * scale[:, None]
    magnitude = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    if ROWS:
        scale, factor = _scale(tl.max(magnitude, 1), INVERSE, POW2)
        codes = _codes(_scaled(x, scale[:, None], factor[:, None], INVERSE, POW2), INTEGERS)
        tl.store(row_codes + row[:, None] * k + column[None, :], codes, mask=inside)
        tl.store(row_scales + j.to(tl.int64) * m + row, scale, mask=row < m)
    if TOKENS:
        scale, factor = _scale(tl.max(magnitude, 0), INVERSE, POW2)
        codes = _codes(_scaled(x, scale[None, :], factor[None, :], INVERSE, POW2), INTEGERS)
        tl.store(token_codes + column[None, :] * m + row[:, None], codes, mask=inside)
        tl.store(token_scales + i.to(tl.int64) * k + column, scale, mask=column < k)


@triton.jit
def _square(
    source: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    copy: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    stride_n: tl.tensor,
    stride_k: tl.tensor,
    COPY: tl.constexpr,
    INVERSE: tl.constexpr,
    POW2: tl.constexpr,
    INTEGERS: tl.constexpr,
) -> None:
    """One block of 128×128 of a weight; with COPY its codes also go to the transpose."""
    i, j = tl.program_id(1), tl.program_id(0)  # neighbours read on in the same rows
    row = (i * 128 + tl.arange(0, 128)).to(tl.int64)
    column = (j * 128 + tl.arange(0, 128)).to(tl.int64)
    inside = (row < n)[:, None] & (column < k)[None, :]
    x = tl.load(source + row[:, None] * stride_n + column[None, :] * stride_k, mask=inside, other=0.0).to(tl.float32)
    magnitude = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    scale, factor = _scale(tl.max(tl.max(magnitude, 1), 0), INVERSE, POW2)
    values = _codes(_scaled(x, scale, factor, INVERSE, POW2), INTEGERS)
    tl.store(codes + row[:, None] * k + column[None, :], values, mask=inside)
    if COPY:
        tl.store(copy + column[None, :] * n + row[:, None], values, mask=inside)
    tl.store(scales + i * tl.cdiv(k, 128) + j, scale)


@triton.jit
def _scale(magnitude: tl.tensor, INVERSE: tl.constexpr, POW2: tl.constexpr) -> tl.tensor:
    """Scale and, where values are multiplied, the factor, from the bits of a block's largest magnitude.

    The bits of positive floats are ordered as the floats are; those of a NaN are above them all, and then, as for a block
    of zeros, the scale is 1.
    """
    amax = magnitude.to(tl.float32, bitcast=True)
    full = amax > 1e-30
    amax = tl.where(full, amax, 448.0)
    if POW2:
        bits = (tl.div_rn(amax, 448.0).to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
        scale = bits.to(tl.float32, bitcast=True)
        factor = tl.div_rn(1.0, scale)  # exact, so that multiplying with it is dividing by the scale
    elif INVERSE:
        factor = tl.div_rn(448.0, amax)
        scale = tl.div_rn(1.0, factor)
    else:
        scale = tl.div_rn(amax, 448.0)
        factor = scale
    return scale, factor


@triton.jit
def _scaled(x: tl.tensor, scale: tl.tensor, factor: tl.tensor, INVERSE: tl.constexpr, POW2: tl.constexpr) -> tl.tensor:
    return x * factor if INVERSE or POW2 else tl.div_rn(x, scale)


@triton.jit
def _codes(x: tl.tensor, INTEGERS: tl.constexpr) -> tl.tensor:
    """E4M3 codes of float32 values: nearest, ties to even, saturating; what rounds to zero keeps its sign."""
    if INTEGERS:
        bits = x.to(tl.int32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        # Normal numbers keep 3 bits of mantissa, and the bias goes from 127 to 7: (127 - 7) * 8 = 960.
        normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - 960
        # Below 2**-6 the grid has steps of 2**-9: those of a float32 next to 24576 = 1.5 * 2**14, whose bits are 0x46C00000.
        uniform = (magnitude.to(tl.float32, bitcast=True) + 24576.0).to(tl.int32, bitcast=True) - 0x46C00000
        code = tl.minimum(tl.where(magnitude < 0x3C800000, uniform, normal), 0x7E)
        code = tl.where(magnitude > 0x7F800000, 0x7F, code)
        return (code | ((bits >> 24) & 0x80)).to(tl.uint8)
    else:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
