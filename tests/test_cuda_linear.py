"""The GPU's linear: the three GEMMs of the recipe, layouts that ``scaled_mm`` accepts, kernels that compile for Hopper."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from trtl_rl.errors import UserError
from trtl_rl.kernels import scaled_mm
from trtl_rl.kernels.coded import Coded
from trtl_rl.kernels.linear import project, project_backward
from trtl_rl.kernels.spec import LinearSpec
from trtl_rl.recipe.codec import quantise_dequantise
from trtl_rl.recipe.formats import BlockFormat, LinearFormat

pytest.importorskip("triton")

from trtl_rl.kernels.cuda_linear import LinearWeight, linear
from trtl_rl.kernels.triton.quantise import quantise_rows

ACTIVATION, WEIGHT = BlockFormat((1, 128), "inverse"), BlockFormat((128, 128), "amax_over_448")
SCALING = F.ScalingType


def coded(m: int, k: int, square: bool = False, device: str = "meta") -> Coded:
    """An operand of this shape, with scales as the quantisers lay them out."""
    codes = torch.zeros(m, k, dtype=torch.float8_e4m3fn, device=device)
    if square:
        return Coded(codes, torch.ones(-(-m // 128), -(-k // 128), device=device), (128, 128))
    return Coded(codes, torch.ones(-(-k // 128), m, device=device).t(), (1, 128))


def fake_scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    recipe_a: object,
    scale_b: Tensor,
    recipe_b: object,
    *,
    bias: Tensor | None,
    output_dtype: torch.dtype,
) -> Tensor:
    """The same product on a CPU, from arguments that are laid out as ScaledBlas.cpp of torch 2.13 wants them."""
    (m, k), n = a.shape, b.shape[1]
    blocks = -(-k // 128)
    assert a.stride() == (k, 1) and b.stride() == (1, k) and recipe_a == SCALING.BlockWise1x128
    assert scale_a.shape == (m, blocks) and scale_a.stride(0) == 1 and scale_a.stride(1) == m
    if recipe_b == SCALING.BlockWise128x128:
        padded = -(-blocks // 4) * 4
        assert scale_b.shape == (padded, -(-n // 128)) and scale_b.stride(0) == 1
        assert scale_b.stride(1) == padded or scale_b.shape[1] == 1
        columns = scale_b[:blocks].t().repeat_interleave(128, 0)[:n]
    else:
        assert recipe_b == SCALING.BlockWise1x128
        assert scale_b.shape == (n, blocks) and scale_b.stride() == (1, n)
        columns = scale_b
    assert bias is None or (output_dtype == torch.bfloat16 and bias.dtype == torch.bfloat16)
    left = a.float() * scale_a.repeat_interleave(128, 1)[:, :k]
    right = b.t().float() * columns.repeat_interleave(128, 1)[:, :k]
    out = left @ right.t()
    return (out if bias is None else out + bias.float()).to(output_dtype)


def test_the_fast_mode_says_why_it_cannot_run() -> None:
    assert "this is 'cpu'" in str(scaled_mm.unsupported(torch.device("cpu")))
    with pytest.raises(UserError, match=r"fast mode cannot run here: .* Use the exact mode"):
        scaled_mm.scaled_gemm(coded(16, 128, device="cpu"), coded(128, 128, True, device="cpu"))


@pytest.mark.parametrize("square", [True, False])
@pytest.mark.parametrize("m, n, k", [(1, 128, 128), (48, 256, 640), (384, 128, 1280), (64, 384, 512)])
def test_layouts_are_those_that_torch_checks(
    monkeypatch: pytest.MonkeyPatch, square: bool, m: int, n: int, k: int
) -> None:
    monkeypatch.setattr(scaled_mm, "unsupported", lambda device: None)  # torch's own checks of shapes run without a GPU
    out = scaled_mm.scaled_gemm(coded(m, k), coded(n, k, square), torch.float32)
    assert out.shape == (m, n) and out.dtype == torch.float32
    rows = Coded(coded(m, k).codes, torch.ones(m, -(-k // 128), device="meta"), (1, 128))  # as the codec lays them out
    assert scaled_mm.scaled_gemm(rows, coded(n, k, square)).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        (coded(16, 120), coded(16, 120), "multiples of 16, got 120 and 16"),
        (coded(16, 128), coded(40, 128), "multiples of 16, got 128 and 40"),
        (coded(16, 128), coded(128, 256, True).t(), "contiguous along K"),
        (coded(16, 128), coded(128, 256, True), "must share K"),
    ],
    ids=str,
)
def test_what_scaled_mm_cannot_take_is_refused_before_a_launch(a: Coded, b: Coded, message: str) -> None:
    with pytest.raises(UserError, match=message):
        scaled_mm.scaled_gemm(a, b)


@pytest.mark.parametrize("mode", ["exact", "fast"])
@pytest.mark.parametrize("bias", [True, False])
def test_forward_and_gradients_are_those_of_the_emulated_linear(
    monkeypatch: pytest.MonkeyPatch, mode: str, bias: bool
) -> None:
    monkeypatch.setattr(scaled_mm, "unsupported", lambda device: None)
    monkeypatch.setattr(F, "scaled_mm", fake_scaled_mm)
    m, n, k = 160, 192, 272
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(m, k, generator=generator), torch.randn(n, k, generator=generator)
    dy = torch.randn(m, n, generator=generator) * 1e-3
    b = torch.randn(n, generator=generator)
    format = LinearFormat(WEIGHT, ACTIVATION, fprop="fp8", dgrad="fp8", wgrad="fp8")
    spec = LinearSpec(k, (n,), format, bias)
    weights = [quantise_dequantise(w, WEIGHT), *([b] if bias else [])]
    expected_y, kept = project(x, (spec,), weights)
    expected_dx, expected = project_backward(dy, (spec,), kept, weights)

    weight = LinearWeight.of(w, WEIGHT, mode)  # type: ignore[arg-type]
    x, w, b = x.requires_grad_(), w.requires_grad_(), b.requires_grad_()
    y = linear(x, w, weight, ACTIVATION, b if bias else None)
    y.backward(dy)
    for got, wanted in zip((y, x.grad, w.grad, b.grad), (expected_y, expected_dx, *expected), strict=False):
        assert got is not None and got.dtype == torch.float32
        assert (got - wanted).norm() <= 1e-6 * wanted.norm()  # the operands have the same bits; sums have another order


def test_only_codes_of_the_input_are_kept_for_the_backward_pass() -> None:
    x = torch.randn(150, 300, requires_grad=True)
    w = torch.randn(20, 300, requires_grad=True)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        linear(x, w, LinearWeight.of(w.detach(), WEIGHT, "exact"), ACTIVATION)
    coded = quantise_rows(x.detach(), ACTIVATION)
    assert [(tensor.dtype, tensor.shape) for tensor in kept] == [(part.dtype, part.shape) for part in coded[:2]]


def test_a_frozen_weight_keeps_nothing_and_changes_no_gradient_of_the_input() -> None:
    x, w = torch.randn(40, 300), torch.randn(20, 300)
    weight = LinearWeight.of(w, WEIGHT, "exact")
    grads = []
    for frozen in (True, False):
        leaf, parameter = x.clone().requires_grad_(), w.clone().requires_grad_(not frozen)
        y = linear(leaf, parameter, weight, ACTIVATION)
        assert len(y.grad_fn.saved_tensors) == (0 if frozen else 2)  # type: ignore[union-attr]
        y.backward(torch.ones_like(y))
        assert (parameter.grad is None) == frozen
        grads.append(leaf.grad)
    assert torch.equal(grads[0], grads[1])  # type: ignore[arg-type]


def test_the_exact_mode_keeps_one_copy_of_the_weight_and_the_fast_mode_two() -> None:
    w = torch.randn(150, 300)
    exact, fast = (LinearWeight.of(w, WEIGHT, mode) for mode in ("exact", "fast"))  # type: ignore[arg-type]
    assert exact.backward.codes.data_ptr() == exact.forward.codes.data_ptr()
    assert fast.backward.codes.is_contiguous() and fast.backward.scales.is_contiguous()


@pytest.mark.slow
def test_kernels_compile_for_hopper_with_exact_divisions_and_8_bit_products(tmp_path: Path) -> None:
    # In a process of its own: this one has Triton as an interpreter, which takes what the compiler refuses.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    script = Path(__file__).with_name("compile_kernels.py")
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    ptx = json.loads(done.stdout)
    for name in ("both", "again", "weight"):
        assert "div.rn.f32" in ptx[name] and "div.full" not in ptx[name] and "div.approx" not in ptx[name]
        assert "fma.rn.f32" not in ptx[name]  # contraction would change bits
        assert ".ftz" not in ptx[name]  # numbers that float32 calls subnormal would be lost
        assert "cvt.rn.satfinite.e4m3x2.f32" in ptx[name]
    assert "cvt.rn.satfinite" not in ptx["integers"]
    for name in ("fprop", "dgrad", "wgrad"):
        assert "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3" in ptx[name]
