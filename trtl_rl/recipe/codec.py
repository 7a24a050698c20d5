"""FP8 block quantisation and its inverse: the one function for trainer and engine, weights, activations and gradients."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from trtl_rl.recipe.formats import BlockFormat

E4M3_MAX = 448.0
_TINY = 1e-30  # below this amax a block counts as zero: 448/amax must stay finite


def round_e4m3(x: Tensor) -> Tensor:
    """Round float32 values to the E4M3 grid, ties to even, saturating at 448; equals the cast to ``float8_e4m3fn``.

    A Veltkamp split keeps 4 significant bits of normal values; below 2**-6 the grid is uniform with step 2**-9, and
    adding 24576 = 1.5 * 2**14 leaves exactly those bits. Pure float arithmetic compiles to a few vector instructions.
    """
    x = x.clamp(-E4M3_MAX, E4M3_MAX)
    t = x * 1048577.0
    normal = t - (t - x)
    subnormal = (x + 24576.0) - 24576.0
    return torch.where(x.abs() < 2.0**-6, subnormal, normal)


def quantise(x: Tensor, format: BlockFormat) -> tuple[Tensor, Tensor]:
    """Quantise a matrix.

    Args:
        x: [M, K] float32.

    Returns:
        Values on the E4M3 grid, [M, K] float32, and scales [ceil(M/rows), ceil(K/columns)] float32, with
        ``x`` close to ``values * scale``. Blocks at the edges are what is left of them.
    """
    blocks, scale = _quantise_blocks(x, format)
    return _unblock(blocks, x.shape), scale[:, 0, :, 0]


def quantise_dequantise(x: Tensor, format: BlockFormat) -> Tensor:
    """``values * scale`` of :func:`quantise`, [M, K] float32: the operand that a GEMM sees."""
    blocks, scale = _quantise_blocks(x, format)
    return _unblock(blocks * scale, x.shape)


def encode(x: Tensor, format: BlockFormat) -> tuple[Tensor, Tensor]:
    """Codes [M, K] ``float8_e4m3fn`` and scales [ceil(M/rows), ceil(K/columns)] float32 of ``x`` [M, K] float32."""
    values, scale = quantise(x, format)
    return values.to(torch.float8_e4m3fn), scale


def decode(codes: Tensor, scale: Tensor, format: BlockFormat) -> Tensor:
    """The inverse of :func:`encode`: [M, K] float32, equal bit for bit to :func:`quantise_dequantise` of the source.

    Codes are looked up in a table of 256 values, which on a CPU is eight times faster than the cast.
    """
    rows, columns = format.block
    m, k = codes.shape
    values = torch.index_select(_table(codes.device), 0, codes.view(torch.uint8).int().reshape(-1)).reshape(m, k)
    return _unblock(_block(values, rows, columns) * scale[:, None, :, None], codes.shape)


def _quantise_blocks(x: Tensor, format: BlockFormat) -> tuple[Tensor, Tensor]:
    blocks = _block(x, *format.block)
    amax = blocks.abs().amax((1, 3), keepdim=True)
    one = torch.ones_like(amax)
    full = amax > _TINY
    amax = torch.where(full, amax, one)
    if format.round == "pow2":
        scale = torch.where(full, _ceil_pow2(amax / E4M3_MAX), one)
        return round_e4m3(blocks / scale), scale
    if format.scale == "amax_over_448":
        scale = torch.where(full, amax / E4M3_MAX, one)
        return round_e4m3(blocks / scale), scale
    factor = torch.where(full, E4M3_MAX / amax, one)
    return round_e4m3(blocks * factor), 1.0 / factor


def _ceil_pow2(x: Tensor) -> Tensor:
    """The least power of two that is not below a positive normal float32."""
    return ((x.contiguous().view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)


def _block(x: Tensor, rows: int, columns: int) -> Tensor:
    """[M, K] → [ceil(M/rows), rows, ceil(K/columns), columns], filled with zeros at the edges."""
    m, k = x.shape
    if k % columns or (rows > 1 and m % rows):
        x = F.pad(x, (0, -k % columns, 0, -m % rows if rows > 1 else 0))
    return x.reshape(-1, rows, x.shape[1] // columns, columns)


def _unblock(blocks: Tensor, shape: torch.Size) -> Tensor:
    flat = blocks.reshape(blocks.shape[0] * blocks.shape[1], -1)
    return flat[: shape[0], : shape[1]]


_TABLES: dict[torch.device, Tensor] = {}


def _table(device: torch.device) -> Tensor:
    if device not in _TABLES:
        _TABLES[device] = torch.arange(256, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn).float()
    return _TABLES[device]
