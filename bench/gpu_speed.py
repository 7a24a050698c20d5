"""What ``gpu.py`` times: a linear against BF16, the quantisers against a copy, other tiles of the exact GEMM."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from gpu_exact import ACTIVATION, ALONG_TOKENS, DEVICE, SIZES, WEIGHT, Result, matrix, operands
from torch import Tensor

from trtl_rl.kernels.coded import Coded
from trtl_rl.kernels.cuda_linear import LinearWeight, Mode, dgrad, fprop, wgrad
from trtl_rl.kernels.scaled_mm import unsupported
from trtl_rl.kernels.triton.gemm import TILE, Tile, block_gemm
from trtl_rl.kernels.triton.quantise import (
    ROWS_BUILD,
    TILE_BUILD,
    Build,
    quantise_along_tokens,
    quantise_both,
    quantise_rows,
    quantise_weight,
)

TOKENS = (8192, 64, 1024, 256, 4096, 16384)  # what counts most comes first
Work = Callable[[], object]


class Timer:
    """Medians of milliseconds of pieces of work that are taken in turns."""

    def __init__(self) -> None:
        self.flush = torch.empty(1 << 28, dtype=torch.int32, device=DEVICE)

    def __call__(self, works: Mapping[str, Work], repeats: int = 12, warmup: int = 2) -> dict[str, list[float]]:
        """Median, least and largest milliseconds of each piece of work."""
        events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in works}
        for repeat in range(warmup + repeats):
            for name, work in works.items():
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                self.flush.zero_()
                start.record()
                work()
                end.record()
                if repeat >= warmup:
                    events[name].append((start, end))
        torch.cuda.synchronize()
        out = {}
        for name, pairs in events.items():
            times = [start.elapsed_time(end) for start, end in pairs]
            out[name] = [round(statistics.median(times), 4), round(min(times), 4), round(max(times), 4)]
        return out


def speed(result: Result) -> None:
    """A linear's passes in milliseconds [median, least, largest], quantisation included; and BF16's times over ours."""
    timer = Timer()
    modes: list[Mode] = ["exact"] if unsupported(DEVICE) else ["exact", "fast"]
    for tokens in TOKENS:
        for n, k in SIZES:
            x, dy = matrix(tokens, k, 0, torch.bfloat16), matrix(tokens, n, 1, torch.bfloat16)
            w = matrix(n, k, 2, torch.bfloat16)
            works: dict[str, Work] = {
                "BF16 forward": lambda x=x, w=w: F.linear(x, w),
                "BF16 dgrad": lambda dy=dy, w=w: dy @ w,
                "BF16 wgrad": lambda dy=dy, x=x: dy.t() @ x,
                "BF16 all": lambda x=x, w=w, dy=dy: (F.linear(x, w), dy @ w, dy.t() @ x),
            }
            for mode in modes:
                works |= passes(x, dy, w, mode)
            times = timer(works, 12 if tokens <= 8192 else 6)
            entry: Result = {"ms": times}
            flops = 2 * tokens * n * k
            for name, (median, *_) in times.items():
                count = 3 if name.endswith("all") or name.endswith("weight") else 1
                entry.setdefault("TFLOP/s", {})[name] = round(count * flops / median / 1e9, 1)
            for mode in modes:
                for part in ("forward", "dgrad", "wgrad", "all", "all and weight"):
                    base = times[f"BF16 {part.removesuffix(' and weight')}"][0]
                    entry.setdefault("BF16 time over ours", {})[f"{mode} {part}"] = round(
                        base / times[f"{mode} {part}"][0], 3
                    )
            result[f"{tokens} tokens, {[n, k]}"] = entry
            print(f"  {tokens} tokens, {[n, k]}: {entry['BF16 time over ours']}", flush=True)


def passes(x: Tensor, dy: Tensor, w: Tensor, mode: Mode) -> dict[str, Work]:
    """The passes of a linear; ``all and weight`` also quantises the weight, which a run does once for each version."""
    weight = LinearWeight.of(w, WEIGHT, mode)
    kept = quantise_rows(x, ACTIVATION)
    dy_rows, dy_tokens = quantise_both(dy, ACTIVATION)
    x_tokens = quantise_along_tokens(kept, ALONG_TOKENS)
    dtype = torch.bfloat16

    def forward() -> Coded:
        coded = quantise_rows(x, ACTIVATION)
        fprop(coded, weight, dtype)
        return coded

    def backward_input() -> Coded:
        rows, tokens = quantise_both(dy, ACTIVATION)
        dgrad(rows, weight, dtype)
        return tokens

    def backward_weight(tokens: Coded = dy_tokens, coded: Coded = kept) -> None:
        wgrad(tokens, quantise_along_tokens(coded, ALONG_TOKENS), mode, dtype)

    def everything() -> None:
        coded = forward()
        backward_weight(backward_input(), coded)

    def with_weight() -> None:
        LinearWeight.of(w, WEIGHT, mode)
        everything()

    return {
        f"{mode} forward": forward,
        f"{mode} dgrad": backward_input,
        f"{mode} wgrad": backward_weight,
        f"{mode} all": everything,
        f"{mode} all and weight": with_weight,
        f"{mode} forward, product alone": lambda: fprop(kept, weight, dtype),
        f"{mode} dgrad, product alone": lambda: dgrad(dy_rows, weight, dtype),
        f"{mode} wgrad, product alone": lambda: wgrad(dy_tokens, x_tokens, mode, dtype),
    }


def bandwidth(result: Result) -> None:
    """Bytes read and written per second by each quantiser, and by a copy that moves as many."""
    timer = Timer()
    for m, k in ((8192, 4096), (16384, 14336)):
        x = matrix(m, k, 0, torch.bfloat16)
        kept = quantise_rows(x, ACTIVATION)
        size = x.numel()
        builds = {"": TILE_BUILD, ", integers": TILE_BUILD._replace(integers=True)}
        builds |= {", 8 warps, any registers": Build(8), ", 16 warps": Build(16)}
        works: dict[str, tuple[int, Work]] = {}
        for name, build in {
            "": ROWS_BUILD,
            ", integers": ROWS_BUILD._replace(integers=True),
            ", 8 warps": Build(8),
        }.items():
            works[f"rows{name}"] = (3 * size, lambda x=x, b=build: quantise_rows(x, ACTIVATION, build=b))
        for name, build in builds.items():
            works[f"both{name}"] = (4 * size, lambda x=x, b=build: quantise_both(x, ACTIVATION, build=b))
            works[f"again{name}"] = (2 * size, lambda c=kept, b=build: quantise_along_tokens(c, ALONG_TOKENS, build=b))
            works[f"weight{name}"] = (
                4 * size,
                lambda x=x, b=build: quantise_weight(x, WEIGHT, transposed=True, build=b),
            )
        times = timer({name: work for name, (_, work) in works.items()})
        copies = {}
        for moved in {moved for moved, _ in works.values()}:
            source = torch.empty(moved // 2, dtype=torch.uint8, device=DEVICE).random_()
            target = torch.empty_like(source)
            copies[moved] = timer({"copy": lambda s=source, t=target: t.copy_(s)})["copy"][0]
        for name, (moved, _) in works.items():
            result[f"{name} {[m, k]}"] = {
                "ms": times[name],
                "GB/s": round(moved / times[name][0] / 1e6),
                "of a copy": round(copies[moved] / times[name][0], 3),
            }


def tiles(result: Result) -> None:
    """Milliseconds of the exact GEMM with other tiles, and whether they have the bits of the one that is used."""
    timer = Timer()
    for m in (8192, 64):
        for kind, (a, b) in operands(m, 4096, 4096, 0, False).items():
            works = {
                str(tile): lambda t=tile, a=a, b=b: block_gemm(a, b, torch.bfloat16, tile=t)
                for tile in (TILE, Tile(64, 128, 4, 3), Tile(128, 128, 8, 3), Tile(128, 128, 4, 3), Tile(64, 64, 4, 4))
            }
            base = block_gemm(a, b, torch.bfloat16)
            for name, times in timer(works, 8).items():
                equal = bool(torch.equal(works[name](), base))
                result[f"{kind} {m} tokens, {name}"] = {"ms": times, "bits equal": equal}
