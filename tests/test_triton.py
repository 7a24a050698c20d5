"""The GPU's quantisers and exact GEMM in Triton's interpreter: bits of the codec, products of float64, invariant rows.

What the interpreter does otherwise than a GPU: it casts to E4M3 and bfloat16 without the carry of a mantissa (kernels
round to E4M3 with integers there), decodes the code of NaN as 480, and adds up a tile's product in the order of BLAS.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from trtl_rl.errors import UserError
from trtl_rl.kernels.coded import Coded
from trtl_rl.recipe.codec import decode, encode
from trtl_rl.recipe.formats import BlockFormat, Rounding, Scale

pytest.importorskip("triton")

from trtl_rl.kernels.triton.gemm import TILE, block_gemm
from trtl_rl.kernels.triton.quantise import quantise_along_tokens, quantise_both, quantise_rows, quantise_weight

FORMULAS: list[tuple[Scale, Rounding]] = [(s, r) for s in ("amax_over_448", "inverse") for r in ("fp32", "pow2")]
SHAPES = [(1, 1), (1, 300), (200, 1), (33, 128), (130, 257)]
ROWS, TOKENS, SQUARE = (1, 128), (128, 1), (128, 128)


def matrix(m: int, k: int, seed: int = 0) -> torch.Tensor:
    """Rows from 1e-12 to 1e12, zeros in a row and in a corner, one column of numbers that float32 calls subnormal."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(m, k, generator=generator) * 10 ** (torch.rand(m, 1, generator=generator) * 24 - 12)
    x = x * 10 ** (torch.rand(1, k, generator=generator) * 3)
    x[m // 2] = 0
    x[: m // 3, : k // 3] = 0
    x[:, k // 2] = 1e-40
    x[-1, -1] = -3e4
    return x


def assert_same(coded: Coded, expected: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Equal bits of codes and scales."""
    codes, scales = expected
    assert coded.codes.dtype == torch.float8_e4m3fn and coded.scales.dtype == torch.float32
    assert coded.scales.shape == scales.shape
    assert torch.equal(coded.codes.contiguous().view(torch.uint8), codes.contiguous().view(torch.uint8))
    assert torch.equal(coded.scales.contiguous().view(torch.int32), scales.contiguous().view(torch.int32))


def transposed(expected: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return expected[0].view(torch.uint8).t().contiguous().view(torch.float8_e4m3fn), expected[1].t()


def decoded(coded: Coded) -> torch.Tensor:
    """What an operand stands for, float64."""
    (rows, columns), (m, k) = coded.block, coded.codes.shape
    scales = coded.scales.double().repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    return coded.codes.float().double() * scales[:m, :k]


@pytest.mark.parametrize("formula", FORMULAS, ids="-".join)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_codes_and_scales_are_those_of_the_codec(formula: tuple[Scale, Rounding], shape: tuple[int, int]) -> None:
    x = matrix(*shape)
    rows, tokens, square = (BlockFormat(block, *formula) for block in (ROWS, TOKENS, SQUARE))
    one = quantise_rows(x, rows)
    assert_same(one, encode(x, rows))
    assert one.scales.stride() == (1, shape[0])
    two = quantise_along_tokens(x, tokens)
    assert_same(two, transposed(encode(x, tokens)))
    both = quantise_both(x, rows)
    assert_same(both[0], one[:2])
    assert_same(both[1], two[:2])
    forward, backward = quantise_weight(x, square)
    assert_same(forward, encode(x, square))
    assert_same(backward, transposed(encode(x, square)))
    assert backward.codes.data_ptr() == forward.codes.data_ptr()
    forward, backward = quantise_weight(x, square, transposed=True)
    assert_same(forward, encode(x, square))
    assert_same(backward, transposed(encode(x, square)))
    assert backward.codes.is_contiguous() and backward.scales.is_contiguous()


@pytest.mark.parametrize("formula", FORMULAS, ids="-".join)
def test_kept_codes_are_quantised_again_from_what_a_gemm_saw(formula: tuple[Scale, Rounding]) -> None:
    rows, tokens = BlockFormat(ROWS, *formula), BlockFormat(TOKENS, *formula)
    kept = quantise_rows(matrix(150, 200, seed=1), rows)
    again = quantise_along_tokens(kept, tokens)
    assert_same(again, transposed(encode(decode(kept.codes, kept.scales, rows), tokens)))


def test_rounding_is_right_at_every_tie_and_next_to_it() -> None:
    grid = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = (grid[:-1] + grid[1:]) / 2
    near = [torch.nextafter(ties, torch.tensor(direction)) for direction in (0.0, 1e9)]
    values = torch.cat([grid, ties, *near, torch.tensor([1e-40, 2.0**-10, 1e-8])])
    values = torch.cat([values, -values, torch.tensor([-0.0])])
    x = torch.zeros(-(-len(values) // 127), 128)
    x[:, 0] = 448  # a scale of one
    x[:, 1:] = torch.nn.functional.pad(values, (0, -len(values) % 127)).reshape(-1, 127)
    for formula in FORMULAS:
        format = BlockFormat(ROWS, *formula)
        coded = quantise_rows(x, format)
        assert torch.equal(coded.scales, torch.ones_like(coded.scales))
        assert_same(coded, encode(x, format))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning", "ignore:divide by zero:RuntimeWarning")
def test_nan_and_infinity_stay_visible_where_the_codec_shows_them() -> None:
    x = torch.ones(3, 256)
    x[0, 5] = float("nan")
    x[1, 200] = -float("inf")
    for formula in FORMULAS:
        format = BlockFormat(ROWS, *formula)
        coded = quantise_rows(x, format)
        codes, scales = encode(x, format)
        assert torch.equal(coded.scales, scales)
        assert torch.equal(coded.codes.float().nan_to_num(9e9), codes.float().nan_to_num(9e9))
        assert coded.codes.float().isnan().any(1).tolist()[0]


def test_a_block_without_a_value_has_scale_one() -> None:
    x = torch.full((3, 130), 1e-31)
    x[1] = 0
    for formula in FORMULAS:
        for coded in (
            *quantise_both(x, BlockFormat(ROWS, *formula)),
            *quantise_weight(x, BlockFormat(SQUARE, *formula)),
        ):
            assert torch.equal(coded.scales, torch.ones_like(coded.scales))
            assert not coded.codes.view(torch.uint8).any()


def test_bfloat16_and_views_are_read_by_their_logical_rows() -> None:
    format = BlockFormat(ROWS, "inverse")
    x = matrix(140, 90).bfloat16()
    for source in (x, x.t(), x[3:, 1:], x.t()[::2]):
        assert_same(quantise_rows(source, format), encode(source.float().contiguous(), format))
        assert_same(quantise_both(source, format)[0], encode(source.float().contiguous(), format))
    square = BlockFormat(SQUARE, "amax_over_448")
    assert_same(quantise_weight(x.t(), square)[0], encode(x.t().float().contiguous(), square))


def operands(m: int, n: int, k: int, seed: int = 0) -> dict[str, tuple[Coded, Coded]]:
    """A and B of the three GEMMs of a linear [N, K] on M tokens."""
    generator = torch.Generator().manual_seed(seed)
    x, w, dy = (torch.randn(*shape, generator=generator) for shape in ((m, k), (n, k), (m, n)))
    x, dy = x * 10 ** (4 * torch.rand(m, 1, generator=generator)), dy * 1e-6
    format = BlockFormat(ROWS, "inverse")
    kept = quantise_rows(x, format)
    forward, backward = quantise_weight(w, BlockFormat(SQUARE, "amax_over_448"))
    dy_rows, dy_tokens = quantise_both(dy, format)
    x_tokens = quantise_along_tokens(kept, BlockFormat(TOKENS, "inverse"))
    return {"fprop": (kept, forward), "dgrad": (dy_rows, backward), "wgrad": (dy_tokens, x_tokens)}


@pytest.mark.parametrize("shape", [(1, 130, 257), (70, 96, 300), (33, 1, 1), (130, 256, 128)], ids=str)
def test_products_are_those_of_float64(shape: tuple[int, int, int]) -> None:
    for a, b in operands(*shape).values():
        y = block_gemm(a, b)
        exact, size = decoded(a) @ decoded(b).t(), decoded(a).abs() @ decoded(b).abs().t()
        # A float32 sum of n terms, in any order, errs by less than n units of rounding of the sum of their sizes: 128
        # products of codes (each exact), the product of the scales, that with the sum, and one addition for each block.
        bound = (128 + 2 + a.scales.shape[1]) * 2.0**-24 * size
        assert y.dtype == torch.float32 and ((y - exact).abs() <= bound).all()
        rounded = block_gemm(a, b, torch.bfloat16)
        assert ((rounded.float() - y).abs() <= 2.0**-7 * y.abs()).all()  # the interpreter cuts off where a GPU rounds


def test_a_bias_is_added_once_to_its_column() -> None:
    a, b = operands(70, 130, 300)["fprop"]
    bias = torch.randn(130)
    assert torch.equal(block_gemm(a, b, bias=bias), block_gemm(a, b) + bias)


def rows_of(a: Coded, rows: torch.Tensor) -> Coded:
    return Coded(a.codes.view(torch.uint8)[rows].view(torch.float8_e4m3fn), a.scales[rows], a.block)


def test_a_row_has_the_same_bits_in_any_company(monkeypatch: pytest.MonkeyPatch) -> None:
    # The interpreter multiplies tiles by numpy, whose library may place rows of one tile in different loops.
    monkeypatch.setattr(np, "matmul", lambda a, b, dtype: np.einsum("mk,kn->mn", a, b, dtype=dtype))
    for a, b in list(operands(150, 130, 300).values())[:2]:
        whole = block_gemm(a, b)
        for row in (0, TILE.m - 1, TILE.m, 149):
            assert torch.equal(block_gemm(rows_of(a, torch.tensor([row])), b)[0], whole[row])
        generator = torch.Generator().manual_seed(0)
        for count in (63, 65, 150):
            rows = torch.randperm(150, generator=generator)[:count]
            assert torch.equal(block_gemm(rows_of(a, rows), b), whole[rows])


def test_what_no_kernel_can_take_is_refused_with_a_remedy() -> None:
    x = torch.randn(4, 256)
    a, b = quantise_rows(x, BlockFormat(ROWS, "inverse")), quantise_weight(x, BlockFormat(SQUARE, "inverse"))[0]
    with pytest.raises(UserError, match="blocks of 1×128; the format says"):
        quantise_rows(x, BlockFormat(SQUARE, "inverse"))
    with pytest.raises(UserError, match=r"float32 or bfloat16, got torch.float16"):
        quantise_rows(x.half(), BlockFormat(ROWS, "inverse"))
    with pytest.raises(UserError, match=r"got torch.float32 \[0, 256\]"):
        quantise_both(x[:0], BlockFormat(ROWS, "inverse"))
    with pytest.raises(UserError, match="blocks of 1×128 are quantised again"):
        quantise_along_tokens(b, BlockFormat(TOKENS, "inverse"))
    with pytest.raises(UserError, match=r"got \(128, 128\) and \(128, 128\)"):
        block_gemm(b, b)
    with pytest.raises(UserError, match=r"must share K"):
        block_gemm(a, b.t())
    with pytest.raises(UserError, match=r"needs scales \[1, 2\]"):
        block_gemm(a, b._replace(scales=b.scales[:, :1]))
    with pytest.raises(UserError, match="codes in float8_e4m3fn"):
        block_gemm(a, b._replace(codes=x))
    with pytest.raises(UserError, match=r"not torch.float16"):
        block_gemm(a, b, torch.float16)
    with pytest.raises(UserError, match=r"bias must be \[4\]"):
        block_gemm(a, b, bias=torch.zeros(5))
