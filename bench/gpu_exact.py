"""What ``gpu.py`` checks: quantisers against the codec, products against float64, rows against their company."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trtl_rl.kernels.coded import Coded
from trtl_rl.kernels.cuda_linear import LinearWeight, fprop
from trtl_rl.kernels.scaled_mm import scaled_gemm, unsupported
from trtl_rl.kernels.triton.gemm import block_gemm
from trtl_rl.kernels.triton.quantise import (
    ROWS_BUILD,
    TILE_BUILD,
    quantise_along_tokens,
    quantise_both,
    quantise_rows,
    quantise_weight,
)
from trtl_rl.recipe.codec import decode, encode
from trtl_rl.recipe.formats import BlockFormat

DEVICE = torch.device("cuda", 0)
SIZES = ((4096, 4096), (14336, 4096), (4096, 14336))  # N, K
ACTIVATION = BlockFormat((1, 128), "inverse")
ALONG_TOKENS = BlockFormat((128, 1), "inverse")
WEIGHT = BlockFormat((128, 128), "amax_over_448")
Result = dict[str, Any]


@contextmanager
def poisoned() -> Iterator[None]:
    """Whatever is allocated holds NaN until a kernel writes it: what is left unwritten cannot look right by luck."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.use_deterministic_algorithms(False)


def matrix(m: int, k: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values like activations: each row and each column has a size of its own, one row is zeros."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    x = torch.randn(m, k, generator=generator, device=DEVICE)
    x = x * 10 ** (torch.rand(m, 1, generator=generator, device=DEVICE) * 4 - 2)
    x = x * 10 ** torch.rand(1, k, generator=generator, device=DEVICE)
    if m > 2:
        x[m // 2] = 0
    return x.to(dtype)


def rows_of(a: Coded, rows: Tensor | slice) -> Coded:
    """Some rows of an operand."""
    return Coded(a.codes.view(torch.uint8)[rows].view(torch.float8_e4m3fn), a.scales[rows], a.block)


def float64(operand: Coded) -> Tensor:
    """What an operand stands for."""
    (rows, columns), (m, k) = operand.block, operand.codes.shape
    scales = operand.scales.double().repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    return operand.codes.float().double() * scales[:m, :k]


def operands(m: int, n: int, k: int, seed: int, transposed: bool) -> dict[str, tuple[Coded, Coded]]:
    """A and B of the three GEMMs of a linear [N, K] on M tokens."""
    x, w, dy = matrix(m, k, seed), matrix(n, k, seed + 1), matrix(m, n, seed + 2)
    kept = quantise_rows(x, ACTIVATION)
    forward, backward = quantise_weight(w, WEIGHT, transposed=transposed)
    dy_rows, dy_tokens = quantise_both(dy, ACTIVATION)
    x_tokens = quantise_along_tokens(kept, ALONG_TOKENS)
    return {"fprop": (kept, forward), "dgrad": (dy_rows, backward), "wgrad": (dy_tokens, x_tokens)}


def differing(coded: Coded, codes: Tensor, scales: Tensor) -> list[int]:
    """How many codes and scales have other bits than those of the codec, which are on the CPU."""
    ours = coded.codes.cpu().contiguous().view(torch.uint8)
    theirs = codes.contiguous().view(torch.uint8)
    bits = coded.scales.cpu().contiguous().view(torch.int32) != scales.contiguous().view(torch.int32)
    return [int((ours != theirs).sum()), int(bits.sum())]


def turned(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """The transpose of codes and scales."""
    return codes.view(torch.uint8).t().contiguous().view(torch.float8_e4m3fn), scales.t()


def not_nearest(coded: Coded, x: Tensor) -> int:
    """How many codes are not the nearest to x / scale in float64; what rounds twice at a tie counts."""
    grid = torch.arange(127, dtype=torch.uint8, device=DEVICE).view(torch.float8_e4m3fn).double()
    scales = coded.scales.double().repeat_interleave(128, 1)[:, : x.shape[1]]
    scaled = (x.double() / scales).abs().clamp_max(448)
    nearest = grid[torch.bucketize(scaled, (grid[1:] + grid[:-1]) / 2)]
    ours = coded.codes.float().double().abs()
    return int(((ours - scaled).abs() > (nearest - scaled).abs()).sum())


@poisoned()
def quantisers(result: Result) -> None:
    """Codes and scales against the codec on the CPU: [codes, scales] that differ, of how many."""
    cases = [(scale, rounding, (512, 640)) for scale in ("amax_over_448", "inverse") for rounding in ("fp32", "pow2")]
    for scale, rounding, shape in [*cases, ("inverse", "fp32", (130, 257)), ("inverse", "fp32", (1, 640))]:
        default = (scale, rounding) == ("inverse", "fp32")
        row, token, square = (BlockFormat(block, scale, rounding) for block in ((1, 128), (128, 1), (128, 128)))
        x = matrix(*shape, seed=0) * torch.tensor([1.0, 1e-9, 1e-39], device=DEVICE).repeat(shape[1])[: shape[1]]
        host = x.cpu()
        for integers in (False, True) if default else (False,):
            rows_build, tile_build = ROWS_BUILD._replace(integers=integers), TILE_BUILD._replace(integers=integers)
            one = quantise_rows(x, row, build=rows_build)
            both = quantise_both(x, row, build=tile_build)
            kept, kept_scales = encode(host, row)
            weight = quantise_weight(x, square, transposed=True, build=tile_build)
            again = turned(*encode(decode(kept, kept_scales, row), token))
            name = f"{list(shape)} {scale} {rounding} {'integers' if integers else 'hardware cast'}"
            result[name] = {
                "rows": differing(one, kept, kept_scales),
                "along tokens": differing(
                    quantise_along_tokens(x, token, build=tile_build), *turned(*encode(host, token))
                ),
                "both: rows": differing(both[0], kept, kept_scales),
                "both: along tokens": differing(both[1], *turned(*encode(host, token))),
                "again along tokens": differing(quantise_along_tokens(one, token, build=tile_build), *again),
                "weight": differing(weight[0], *encode(host, square)),
                "weight, transposed": differing(weight[1], *turned(*encode(host, square))),
                "rows, codes not nearest in float64": not_nearest(one, x),
                "of": [x.numel(), one.scales.numel()],
            }
    result["all bits equal"] = all(
        not any(value)
        for case in result.values()
        if isinstance(case, dict)
        for name, value in case.items()
        if isinstance(value, list) and name != "of"
    )


@poisoned()
def products(result: Result) -> None:
    """GEMMs against float64 products of the decoded operands, and the fast mode against the exact one."""
    fast = unsupported(DEVICE)
    result["fast mode"] = fast or "supported"
    for m, n, k in ((512, 4096, 4096), (64, 1024, 14336), (130, 272, 400)):
        for kind, (a, b) in operands(m, n, k, 0, transposed=True).items():
            reference, size = float64(a) @ float64(b).t(), float64(a).abs() @ float64(b).abs().t()
            exact = block_gemm(a, b)
            entry = {"exact, float32": against(exact, reference, size)}
            exact_bf16 = block_gemm(a, b, torch.bfloat16)
            entry["exact, bfloat16"] = against(exact_bf16, reference, size)
            if kind == "dgrad":  # the codes of W read where they lie, not the transposed copy
                where_it_lies = block_gemm(a, Coded(b.codes.t().contiguous().t(), b.scales, b.block))
                entry["exact, float32, elements that differ when W is not copied"] = int((where_it_lies != exact).sum())
            result[f"{kind} {[m, n, k]}"] = entry
            if fast or a.codes.shape[1] % 16 or b.codes.shape[0] % 16:
                continue
            for dtype, other in ((torch.float32, exact), (torch.bfloat16, exact_bf16)):
                out = scaled_gemm(a, b, dtype)
                entry[f"fast, {str(dtype)[6:]}"] = against(out, reference, size)
                entry[f"fast against exact, {str(dtype)[6:]}"] = {
                    "differing": float((out != other).float().mean()),
                    "relative": float((out.double() - other.double()).norm() / other.double().norm()),
                }
            if (m, n, k) == (512, 4096, 4096) and kind == "fprop":
                bias = matrix(1, n, 9)[0]
                added = scaled_gemm(a, b, torch.float32, bias=bias).double()
                entry["fast, bias, relative error"] = float(
                    (scaled_gemm(a, b, torch.bfloat16, bias=bias).double() - added).norm() / added.norm()
                )
    if fast is None:  # layouts that torch accepts, and cuBLASLt perhaps does not
        n, k = 512, 1024
        weight = quantise_weight(matrix(n, k, 1), WEIGHT)[0]
        for m in (1, 2, 3, 5, 63):
            a = quantise_rows(matrix(m, k, 2), ACTIVATION)
            try:
                out, reference = scaled_gemm(a, weight, torch.float32).double(), float64(a) @ float64(weight).t()
                result[f"fast, {m} rows"] = {"relative": float((out - reference).norm() / reference.norm())}
            except RuntimeError as refusal:
                result[f"fast, {m} rows"] = str(refusal).splitlines()[0]


def against(out: Tensor, reference: Tensor, size: Tensor) -> Result:
    """Relative error in the Frobenius norm; in float32 also the largest error in 2**-24 of the sum of the terms' sizes."""
    error = out.double() - reference
    entry: Result = {"relative": float(error.norm() / reference.norm())}
    if out.dtype == torch.float32:
        entry["largest, in 2^-24 of its terms"] = round(float((error.abs() / size.clamp_min(1e-300)).max()) * 2**24, 2)
    return entry


@poisoned()
def rows(result: Result) -> None:
    """Elements of the exact GEMM that change with M or the order of rows; the same counts for the libraries' GEMMs."""
    fast = unsupported(DEVICE) is None
    a, b = operands(4096, 512, 1024, 0, False)["fprop"]
    whole, changed = block_gemm(a, b), torch.zeros((), dtype=torch.int64, device=DEVICE)
    for m in range(1, 4097):
        changed += (block_gemm(rows_of(a, slice(m)), b) != whole[:m]).sum()
    result["every M from 1 to 4096, [512, 1024]"] = int(changed)
    for n, k in SIZES:
        x, w = matrix(4096, k, 1, torch.bfloat16), matrix(n, k, 2, torch.bfloat16)
        a, weight = quantise_rows(x, ACTIVATION), LinearWeight.of(w, WEIGHT, "exact")
        works: dict[str, Callable[[Tensor], Tensor]] = {
            "exact": lambda some, a=a, w=weight: fprop(rows_of(a, some), w, torch.bfloat16),
            "BF16 F.linear": lambda some, x=x, w=w: F.linear(x[some], w),
        }
        if fast:
            works["fast"] = lambda some, a=a, w=weight: fprop(rows_of(a, some), w._replace(mode="fast"), torch.bfloat16)
        generator = torch.Generator(DEVICE).manual_seed(3)
        for name, work in works.items():
            all_rows = work(torch.arange(4096, device=DEVICE))
            counts = {}
            for m in (1, 2, 8, 16, 63, 64, 65, 128, 200, 512, 1000, 2048, 4095, 4096):
                if name == "fast" and m % 4:
                    continue
                some = torch.randperm(4096, generator=generator, device=DEVICE)[:m]
                counts[str(m)] = int((work(some) != all_rows[some]).sum())
            result[f"{name} {[n, k]}: elements of M times N that changed, by M"] = counts
