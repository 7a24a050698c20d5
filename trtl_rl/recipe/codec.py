"""FP8 block quantisation and its inverse: the one function for trainer and engine, weights, activations and gradients."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from trtl_rl.recipe.formats import BlockFormat

E4M3_MAX = 448.0
_AT_ONCE = 2**19  # values that are decoded together: what stays in a cache
_TINY = 1e-30  # below this amax a block counts as zero: 448/amax must stay finite


def round_e4m3(x: Tensor) -> Tensor:
    """Round float32 values to the E4M3 grid, ties to even, saturating at 448; equals the cast to ``float8_e4m3fn``.

    A Veltkamp split keeps 4 significant bits of normal values; below 2**-6 the grid is uniform with step 2**-9, and
    adding 24576 = 1.5 * 2**14 leaves exactly those bits. Pure float arithmetic compiles to a few vector instructions. What
    rounds to zero keeps its sign, as in the cast.
    """
    x = x.clamp(-E4M3_MAX, E4M3_MAX)
    t = x * 1048577.0
    normal = t - (t - x)
    subnormal = torch.copysign((x + 24576.0) - 24576.0, x)
    return torch.where(x.abs() < 2.0**-6, subnormal, normal)


def quantise(x: Tensor, format: BlockFormat) -> tuple[Tensor, Tensor]:
    """Quantise a matrix.

    Args:
        x: [M, K] float32.

    Returns:
        Values on the E4M3 grid, [M, K] float32, and scales [ceil(M/rows), ceil(K/columns)] float32, with
        ``x`` close to ``values * scale``. Blocks at the edges are what is left of them.
    """
    parts = [_scale_blocks(part, format) for part in _whole_blocks(x, format)]
    values = _join([_unblock(round_e4m3(blocks), x.shape[0]) for blocks, _ in parts])
    return values, _join([scale[:, 0, :, 0] for _, scale in parts])


def quantise_dequantise(x: Tensor, format: BlockFormat) -> Tensor:
    """``values * scale`` of :func:`quantise`, [M, K] float32: the operand that a GEMM sees."""
    parts = [_scale_blocks(part, format) for part in _whole_blocks(x, format)]
    return _join([_unblock(round_e4m3(blocks) * scale, x.shape[0]) for blocks, scale in parts])


def quantise_encode(x: Tensor, format: BlockFormat) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`quantise_dequantise` and :func:`encode` in one pass: operand, codes and scales of ``x`` [M, K] float32."""
    parts = [_scale_blocks(part, format) for part in _whole_blocks(x, format)]
    parts = [(round_e4m3(blocks), scale) for blocks, scale in parts]
    m = x.shape[0]
    operand = _join([_unblock(blocks * scale, m) for blocks, scale in parts])
    codes = _join([_unblock(blocks, m).to(torch.float8_e4m3fn) for blocks, _ in parts])
    return operand, codes, _join([scale[:, 0, :, 0] for _, scale in parts])


def encode(x: Tensor, format: BlockFormat) -> tuple[Tensor, Tensor]:
    """Codes [M, K] ``float8_e4m3fn`` and scales [ceil(M/rows), ceil(K/columns)] float32 of ``x`` [M, K] float32.

    The codes of :func:`quantise`'s values. The cast rounds, since scaled values stay below 464, where it would saturate to NaN;
    outside of compiled code it is four times faster than :func:`round_e4m3`.
    """
    parts = [_scale_blocks(part, format) for part in _whole_blocks(x, format)]
    codes = _join([_unblock(blocks.to(torch.float8_e4m3fn), x.shape[0]) for blocks, _ in parts])
    return codes, _join([scale[:, 0, :, 0] for _, scale in parts])


def decode(codes: Tensor, scale: Tensor, format: BlockFormat, out: Tensor | None = None) -> Tensor:
    """The inverse of :func:`encode`: [M, K] float32, equal bit for bit to :func:`quantise_dequantise` of the source.

    A code's bits, moved by 7, are those of a half-precision number 256 times too small, whose cast is several times as fast on a
    CPU as that of E4M3 or a table. ``256 · scale`` is exact below 1e36, which is more than scales of BF16 reach. NaN stays NaN.

    Args:
        out: [M, K] float32 for the result, to save new memory.
    """
    m, k = codes.shape
    rows, columns = format.block
    values = torch.empty(m, k, device=codes.device) if out is None else out
    scales = (scale * 256.0).repeat_interleave(columns, 1)[:, :k]
    step = rows * max(1, _AT_ONCE // (rows * k))
    for start in range(0, m, step):
        part = codes[start : start + step]
        into = values[start : start + step]
        half = (
            part.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(-0x4001)
        )  # the sign without its copies
        into.copy_(half.view(torch.float16))
        first, whole = start // rows, into.shape[0] // rows
        into[: whole * rows].view(whole, rows, k).mul_(scales[first : first + whole, None])
        if into.shape[0] % rows:
            into[whole * rows :].mul_(scales[first + whole])
        magnitudes = part.view(torch.uint8) & 0x7F
        if magnitudes.amax() == 0x7F:
            into.masked_fill_(magnitudes == 0x7F, torch.nan)
    return values


def decode_rows(codes: Tensor, scale: Tensor, format: BlockFormat) -> Tensor:
    """:func:`decode` for blocks of one row, in a form that compiles: no table, one pass."""
    m, columns = codes.shape[0], format.block[1]
    out, at = [], 0
    for part in _whole_blocks(codes, format):
        width = min(columns, part.shape[1])
        count = part.shape[1] // width
        blocks = part.float().reshape(m, count, width) * scale[:, at : at + count, None]
        out.append(blocks.reshape(m, -1))
        at += count
    return _join(out)


def round_bf16(x: Tensor) -> Tensor:
    """Round float32 values to bfloat16, ties to even, and stay in float32; equals the cast there and back.

    Integer arithmetic: a compiler may drop a cast that is followed by its inverse.
    """
    bits = x.contiguous().view(torch.int32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
    return torch.where(x.isnan(), x, rounded.view(torch.float32))


def _join(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def _whole_blocks(x: Tensor, format: BlockFormat) -> list[Tensor]:
    """[M, K] → the columns in whole blocks, and the rest, a narrower block: padding it instead would cost a copy.

    (Inductor of torch 2.13 also compiled the padded form to wrong values in the last block.)
    """
    columns = format.block[1]
    full = x.shape[1] - x.shape[1] % columns
    return [part for part in (x[:, :full], x[:, full:]) if part.shape[1]]


def _scale_blocks(x: Tensor, format: BlockFormat) -> tuple[Tensor, Tensor]:
    """[M, K] → x / scale in blocks [M / rows, rows, K / columns, columns], not yet rounded, and the scales."""
    rows, columns = format.block[0], min(format.block[1], x.shape[1])
    if rows > 1 and x.shape[0] % rows:
        x = F.pad(x, (0, 0, 0, -x.shape[0] % rows))
    blocks = x.reshape(x.shape[0] // rows, rows, x.shape[1] // columns, columns)
    amax = blocks.abs().amax((1, 3), keepdim=True)
    one = torch.ones_like(amax)
    full = amax > _TINY
    amax = torch.where(full, amax, one)
    # A tensor over a tensor is one division everywhere; with a number on either side some backends multiply by a reciprocal.
    largest = torch.full_like(amax, E4M3_MAX)
    if format.round == "pow2":
        scale = torch.where(full, _ceil_pow2(amax / largest), one)
        return blocks / scale, scale
    if format.scale == "amax_over_448":
        scale = torch.where(full, amax / largest, one)
        return blocks / scale, scale
    factor = torch.where(full, largest / amax, one)
    return blocks * factor, 1.0 / factor


def _ceil_pow2(x: Tensor) -> Tensor:
    """The least power of two that is not below a positive normal float32."""
    return ((x.contiguous().view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)


def _unblock(blocks: Tensor, rows: int) -> Tensor:
    """[M / rows, rows, K / columns, columns] → the first ``rows`` rows, [rows, K]."""
    return blocks.reshape(blocks.shape[0] * blocks.shape[1], -1)[:rows]
