"""FP8 block quantisation once more, from the definition of E4M3 and in float64: shares no line with the codec."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

Array = Any


def e4m3(code: int) -> float:
    """Value of a code below 128: 4 bits of exponent with bias 7, 3 bits of mantissa, exponent 0 for subnormals."""
    exponent, mantissa = code >> 3, code & 7
    return math.ldexp(mantissa, -9) if exponent == 0 else math.ldexp(8 + mantissa, exponent - 10)


GRID = np.array([e4m3(code) for code in range(127)])  # code 127 is NaN
_BETWEEN = (GRID[:-1] + GRID[1:]) / 2


def to_grid(x: Array) -> Array:
    """The nearest values of E4M3, ties to the even mantissa, saturated at 448. float64 in and out."""
    magnitude = np.minimum(np.abs(np.asarray(x, np.float64)), 448.0)
    code = np.searchsorted(_BETWEEN, magnitude, side="left")
    tie = magnitude == _BETWEEN[np.minimum(code, 125)]
    code = np.where(tie & (code < 126) & (code % 2 == 1), code + 1, code)
    return np.copysign(GRID[code], x)


def f32(x: Array) -> Array:
    """Round to float32 and go on in float64: one correctly rounded float32 operation if ``x`` is exact or nearly so."""
    return np.asarray(x, np.float64).astype(np.float32).astype(np.float64)


def quantise(x: Array, block: tuple[int, int], scale: str, round: str) -> tuple[Array, Array]:
    """Values on the grid [M, K] and scales of the blocks, block by block."""
    x = np.asarray(x, np.float64)
    rows, columns = block
    m, k = x.shape
    values = np.zeros_like(x)
    scales = np.zeros((-(-m // rows), -(-k // columns)))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            part = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
            amax = float(np.abs(x[part]).max())
            if amax <= 1e-30:
                scales[i, j] = 1.0
                values[part] = to_grid(x[part])
            elif round == "pow2":
                mantissa, exponent = math.frexp(float(f32(amax / 448)))
                s = math.ldexp(1.0, exponent - 1 if mantissa == 0.5 else exponent)
                scales[i, j] = s
                values[part] = to_grid(x[part] / s)
            elif scale == "amax_over_448":
                s = float(f32(amax / 448))
                scales[i, j] = s
                values[part] = to_grid(f32(x[part] / s))
            else:
                factor = float(f32(448 / amax))
                scales[i, j] = float(f32(1 / factor))
                values[part] = to_grid(f32(x[part] * factor))
    return values, scales


def dequantised(x: Array, block: tuple[int, int], scale: str = "inverse", round: str = "fp32") -> Array:
    """The operand that a GEMM sees: values times scales, rounded to float32, [M, K] float64."""
    values, scales = quantise(x, block, scale, round)
    grown = np.repeat(np.repeat(scales, block[0], 0), block[1], 1)
    return f32(values * grown[: values.shape[0], : values.shape[1]])
