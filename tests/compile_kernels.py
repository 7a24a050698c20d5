"""Compile the GPU's kernels for compute capability 9.0 without a GPU; prints their PTX by name as JSON."""

from __future__ import annotations

import json
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from trtl_rl.errors import UserError
from trtl_rl.kernels.triton.gemm import TILE, _gemm
from trtl_rl.kernels.triton.quantise import TILE_BUILD, _square, _tiles, quantise_rows
from trtl_rl.recipe.formats import BlockFormat


def compiled(kernel: Any, pointers: dict[str, str], constants: dict[str, Any], **options: Any) -> str:
    """PTX of a kernel; what is neither a pointer nor a constant is an integer divisible by 16."""
    signature = {
        name: f"*{pointers[name]}" if name in pointers else "constexpr" if name in constants else "i32"
        for name in kernel.arg_names
    }
    fixed = {parameter.name for parameter in kernel.params if parameter.do_not_specialize}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if name not in constants and name not in fixed
    }
    source = ASTSource(kernel, signature, constants, aligned)
    text: str = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    return text


def tiles(source: str, **flags: bool) -> str:
    constants = {"INVERSE": True, "POW2": False, "INTEGERS": False, "TILE": 128, "ROWS": False, "TOKENS": True, **flags}
    pointers = {"source": source, "source_scales": "fp32", "row_codes": "u8", "row_scales": "fp32"}
    pointers |= {"token_codes": "u8", "token_scales": "fp32"}
    options = {"num_warps": TILE_BUILD.warps, "maxnreg": TILE_BUILD.registers, "enable_fp_fusion": False}
    return compiled(_tiles, pointers, {**constants, "stride_k": 1}, **options)


def gemm(square: bool, **ones: int) -> str:
    constants = {"TILE_M": TILE.m, "TILE_N": TILE.n, "SQUARE": square, "BIAS": False, "a_stride_k": 1, **ones}
    pointers = {"a": "fp8e4nv", "b": "fp8e4nv", "a_scales": "fp32", "b_scales": "fp32", "out": "bf16", "bias": "bf16"}
    options = {"num_warps": TILE.warps, "num_stages": TILE.stages, "enable_fp_fusion": True}
    return compiled(_gemm, pointers, constants, **options)


def check_parameters() -> None:
    """What decides how a kernel is compiled when it is launched."""
    for kernel in (_gemm, _tiles, _square):
        typed = [parameter.name for parameter in kernel.params if parameter.annotation_type]
        assert not typed, f"Triton would not see that a stride is 1: {typed}"
    names = {parameter.name for parameter in _gemm.params if parameter.do_not_specialize}
    assert names >= {"m", "a_scale_stride_k"}, "the number of rows must not decide how the kernel is compiled"


def check_refusal() -> None:
    """A kernel that is not interpreted says so when it gets tensors on a CPU."""
    try:
        quantise_rows(torch.zeros(1, 1), BlockFormat((1, 128), "inverse"))
    except UserError as error:
        assert "TRITON_INTERPRET=1" in str(error)
    else:
        raise AssertionError("a tensor on a CPU reached a compiled kernel")


def main() -> None:
    """Check, compile, print."""
    check_parameters()
    check_refusal()
    weight = {"source": "bf16", "codes": "u8", "scales": "fp32", "copy": "u8"}
    flags = {"COPY": True, "INVERSE": False, "POW2": False, "INTEGERS": False, "stride_k": 1}
    ptx = {
        "both": tiles("bf16", ROWS=True, CODED=False),
        "again": tiles("fp8e4nv", CODED=True),
        "integers": tiles("fp32", INTEGERS=True, CODED=False),
        "weight": compiled(_square, weight, flags, num_warps=TILE_BUILD.warps, enable_fp_fusion=False),
        "fprop": gemm(True, b_stride_k=1, b_scale_stride_k=1),
        "dgrad": gemm(True, b_stride_n=1, b_scale_stride_n=1),
        "wgrad": gemm(False, b_stride_k=1, b_scale_stride_n=1),
    }
    print(json.dumps(ptx))


if __name__ == "__main__":
    main()
