"""The FP8 block codec against a float64 computation from the definition of E4M3 (``reference.py``)."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trtl_rl.recipe.codec import decode, encode, quantise, quantise_dequantise, round_e4m3
from trtl_rl.recipe.formats import BlockFormat

BLOCKS = [(1, 128), (128, 128), (128, 1), (64, 64)]
FORMATS = [
    BlockFormat(block, scale, round)  # type: ignore[arg-type]
    for block in BLOCKS
    for scale in ("amax_over_448", "inverse")
    for round in ("fp32", "pow2")
]
SHAPES = [(1, 1), (3, 128), (128, 128), (130, 257), (200, 96), (64, 320)]


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.int32)


def matrix(m: int, k: int, seed: int = 0) -> torch.Tensor:
    """Values of all magnitudes: rows from 1e-12 to 1e12, a row and a square of zeros, single large values."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(m, k, generator=generator) * 10 ** (torch.rand(m, 1, generator=generator) * 24 - 12)
    x = x * 10 ** (torch.rand(1, k, generator=generator) * 3)
    x[m // 2] = 0
    x[: m // 3, : k // 3] = 0
    x[-1, -1] = 3e4
    return x


def identifier(format: BlockFormat) -> str:
    return f"{format.block[0]}x{format.block[1]}-{format.scale}-{format.round}"


def test_the_reference_is_e4m3() -> None:
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy()
    assert np.array_equal(codes, reference.GRID) and reference.GRID[-1] == 448


@pytest.mark.parametrize("format", FORMATS, ids=identifier)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_scales_are_those_of_float64(format: BlockFormat, shape: tuple[int, int]) -> None:
    x = matrix(*shape)
    values, scales = quantise(x, format)
    expected, expected_scales = reference.quantise(x.numpy(), format.block, format.scale, format.round)
    assert scales.shape == expected_scales.shape
    assert np.array_equal(scales.double().numpy(), expected_scales)
    assert np.array_equal(values.double().numpy(), expected)
    assert np.array_equal(
        quantise_dequantise(x, format).double().numpy(),
        reference.dequantised(x.numpy(), format.block, format.scale, format.round),
    )


@pytest.mark.parametrize("format", FORMATS, ids=identifier)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_decoding_gives_the_bits_that_a_gemm_saw(format: BlockFormat, shape: tuple[int, int]) -> None:
    x = matrix(*shape, seed=1)
    codes, scales = encode(x, format)
    assert codes.dtype == torch.float8_e4m3fn and codes.shape == x.shape and scales.dtype == torch.float32
    assert torch.equal(bits(decode(codes, scales, format)), bits(quantise_dequantise(x, format)))


@pytest.mark.parametrize("format", FORMATS, ids=identifier)
def test_a_transposed_view_is_quantised_by_its_logical_rows(format: BlockFormat) -> None:
    x = matrix(96, 200, seed=2).t()
    for a, b in zip(quantise(x, format), quantise(x.contiguous(), format), strict=True):
        assert torch.equal(bits(a), bits(b))


@pytest.mark.parametrize("scale", ["amax_over_448", "inverse"])
def test_scales_of_pow2_are_the_least_powers_of_two_that_hold_the_block(scale: str) -> None:
    amax = torch.cat([matrix(500, 1).abs() + 1e-20, torch.tensor([[448.0], [447.9999], [448.00003], [1.0], [7e-30]])])
    scales = quantise(amax, BlockFormat((1, 128), scale, "pow2"))[1]  # type: ignore[arg-type]
    for value, s in zip(amax.flatten().tolist(), scales.flatten().tolist(), strict=True):
        exact = Fraction(value) / 448
        assert Fraction(s).numerator == 1 or Fraction(s).denominator == 1
        assert np.frexp(s)[0] == 0.5
        # the division is rounded to float32 first, so a value may exceed 448 by one unit in the last place
        assert Fraction(s) * (1 + Fraction(1, 2**23)) >= exact > Fraction(s) / 2


def test_with_pow2_both_formulas_agree() -> None:
    x = matrix(130, 257)
    a, b = (quantise(x, BlockFormat((1, 128), scale, "pow2")) for scale in ("amax_over_448", "inverse"))
    assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])


def test_the_two_formulas_are_not_the_same() -> None:
    x = torch.randn(4096, 128, generator=torch.Generator().manual_seed(0))
    a, b = (quantise(x, BlockFormat((1, 128), scale)) for scale in ("amax_over_448", "inverse"))
    assert 0.05 < (a[1] != b[1]).float().mean() < 0.95
    assert (a[0] != b[0]).float().mean() < 0.01


@pytest.mark.parametrize("format", FORMATS, ids=identifier)
def test_a_block_without_a_value_has_scale_one(format: BlockFormat) -> None:
    x = torch.full((3, 130), 1e-31)
    x[1] = 0
    for tensor in (x, torch.zeros(3, 130), -x):
        values, scales = quantise(tensor, format)
        assert torch.equal(scales, torch.ones_like(scales)) and not values.any()


@pytest.mark.parametrize("format", FORMATS, ids=identifier)
@pytest.mark.parametrize("size", [2e-30, 1e-20, 1.0, 1e20, 1e37])
def test_the_largest_value_of_a_block_keeps_its_size(format: BlockFormat, size: float) -> None:
    x = torch.tensor([[size, -size, size / 2, 0.0]])
    values, scales = quantise(x, format)
    assert values.isfinite().all() and scales.isfinite().all() and (scales > 0).all()
    assert values.abs().max() == 448 if format.round == "fp32" else 224 <= values.abs().max() <= 448
    assert torch.allclose(quantise_dequantise(x, format), x, rtol=0.07)


def cast(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).float()


def mantissas(exponent: int, step: int) -> torch.Tensor:
    """Every ``step``-th float32 with this exponent."""
    return (torch.arange(0, 2**23, step, dtype=torch.int32) | ((exponent + 127) << 23)).view(torch.float32)


@pytest.mark.parametrize("exponent", range(-14, 10))
def test_rounding_equals_the_cast_of_torch(exponent: int) -> None:
    x = mantissas(exponent, 61)
    ties = torch.tensor([reference.e4m3(c) + reference.e4m3(c + 1) for c in range(126)]) / 2
    near = torch.cat([torch.nextafter(ties, ties + direction) for direction in (1, -1)])
    for values in (x, ties, near):
        for sign in (1, -1):
            assert torch.equal(bits(round_e4m3(values * sign)), bits(cast(values * sign)))


@pytest.mark.slow
@pytest.mark.parametrize("exponent", [*range(-11, -4), 8])  # other exponents repeat these; beyond lie zero and 448 only
def test_rounding_equals_the_cast_of_torch_for_every_mantissa(exponent: int) -> None:
    x = mantissas(exponent, 1)
    assert torch.equal(bits(round_e4m3(x)), bits(cast(x))) and torch.equal(bits(round_e4m3(-x)), bits(cast(-x)))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=True), min_size=1, max_size=40))
def test_rounding_is_the_nearest_value_of_the_grid(values: list[float]) -> None:
    rounded = round_e4m3(torch.tensor(values)).double().numpy()
    assert np.array_equal(rounded, reference.to_grid(np.array(values)))


def test_values_beyond_448_saturate() -> None:
    x = torch.tensor([448.0, 449.0, 464.0, 480.0, 1e30, float("inf")])
    assert torch.equal(round_e4m3(x), torch.full_like(x, 448)) and torch.equal(round_e4m3(-x), torch.full_like(x, -448))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(1, 200), st.sampled_from(FORMATS), st.integers(0, 2**31))
def test_quantising_any_shape_agrees_with_the_reference(m: int, k: int, format: BlockFormat, seed: int) -> None:
    x = matrix(m, k, seed)
    assert np.array_equal(
        quantise_dequantise(x, format).double().numpy(),
        reference.dequantised(x.numpy(), format.block, format.scale, format.round),
    )
    codes, scales = encode(x, format)
    assert torch.equal(bits(decode(codes, scales, format)), bits(quantise_dequantise(x, format)))


def test_a_row_is_quantised_alike_in_any_company() -> None:
    x = matrix(64, 300)
    for format in FORMATS:
        if format.block[0] == 1:
            whole = quantise_dequantise(x, format)
            for i in (0, 31, 63):
                assert torch.equal(quantise_dequantise(x[i : i + 1], format)[0], whole[i])


@pytest.mark.parametrize("shape", [(1, 1), (130, 257), (200, 96), (700, 1500)], ids=str)
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_every_code_is_decoded_as_the_cast_does(block: tuple[int, int], shape: tuple[int, int]) -> None:
    """Zeros of both signs, subnormals and NaN too, with scales of all magnitudes, into given memory and new."""
    generator = torch.Generator().manual_seed(7)
    codes = torch.randint(256, shape, dtype=torch.uint8, generator=generator).view(torch.float8_e4m3fn)
    grid = [-(-n // wide) for n, wide in zip(shape, block, strict=True)]
    scales = 10 ** (torch.rand(*grid, generator=generator) * 60 - 30)
    each = scales.repeat_interleave(block[0], 0)[: shape[0]].repeat_interleave(block[1], 1)[:, : shape[1]]
    expected = codes.float() * each
    out = torch.full(shape, 5.0)
    assert decode(codes, scales, BlockFormat(block, "amax_over_448"), out) is out  # type: ignore[arg-type]
    for found in (out, decode(codes, scales, BlockFormat(block, "amax_over_448"))):  # type: ignore[arg-type]
        assert torch.equal(found.isnan(), expected.isnan())
        assert torch.equal(bits(found.nan_to_num(5.0)), bits(expected.nan_to_num(5.0)))
