"""Linears with a common input, forward and backward: the recipe's three GEMMs, and low-rank adapters beside them.

Arguments that describe weights come flat, as units take them. For each spec: the operand [sum N, K], float32 or with
``compute: bf16`` bfloat16; with a bias, that bias [sum N] float32; with adapters, the A of all parts one above the other
[ranks, K], then for each part that has one its B [N, rank] with the adapter's scaling folded in, like the operand.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trtl_rl.kernels import ops
from trtl_rl.kernels.spec import LinearSpec
from trtl_rl.recipe.codec import quantise_dequantise
from trtl_rl.recipe.formats import BlockFormat


def project(x: Tensor, specs: Sequence[LinearSpec], weights: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Linears with a common input: quantise it once for each format, multiply, add biases and adapters.

    Args:
        x: [M, K] float32. Adapters see it unquantised (``peft``: y = W x + b + scaling B A x).
        weights: Of each spec, flat.

    Returns:
        All outputs side by side, [M, sum N], and for each spec what backward keeps of its input: codes and scales, or
        the operand.
    """
    outputs: list[Tensor] = []
    kept: list[Tensor] = []
    seen: dict[tuple[BlockFormat | None, str], tuple[Tensor, tuple[Tensor, ...]]] = {}
    rest = list(weights)
    for spec in specs:
        key = spec.format.forward_activation, spec.format.compute
        if key not in seen:
            seen[key] = ops.quantise_rows(x, spec.format)
        operand, parts = seen[key]
        y = ops.gemm(operand, rest.pop(0))
        if spec.bias:
            y = ops.round_result(y + rest.pop(0), spec.format)
        if spec.adapted:
            y = ops.round_result(y + _adapt(x, spec, _take_adapters(rest, spec)), spec.format)
        outputs.append(y)
        kept += parts
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)), kept


def project_backward(
    dy: Tensor,
    specs: Sequence[LinearSpec],
    kept: Sequence[Tensor],
    weights: Sequence[Tensor],
    x: Tensor | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """DGrad and WGrad of :func:`project` (arXiv 2601.14243, section on the precision flow).

    DGrad: dX = dY W with dY in 1×128 blocks along N and the weight codes of the forward pass. WGrad: dW = dYᵀ X with both
    operands in blocks of 128 tokens (dYᵀ 1×128, X 128×1); X is the quantised input of the forward pass, quantised again.
    Where the recipe says bf16, that GEMM takes unquantised gradients, and X as the forward pass saw it. With
    ``compute: bf16`` unquantised operands and dX are rounded to bfloat16; dW stays float32.

    Args:
        kept: What :func:`project` kept of each spec's input.
        weights: Of each spec, flat; the operand is that of codes where DGrad is FP8.
        x: [M, K] float32, the input itself; adapters need it.

    Returns:
        dX [M, K], and for each spec dW [N, K] and, with a bias, db [N], unless the spec is frozen; then, with adapters, the
        gradients of A [sum of ranks, K] and of each B [N, rank].
    """
    dx: Tensor | None = None
    grads: list[Tensor] = []
    rest, inputs = list(weights), list(kept)
    start = 0
    for spec in specs:
        operand = rest.pop(0)
        quantised = [inputs.pop(0) for _ in range(spec.kept)]
        part = dy[:, start : start + spec.columns]
        start += spec.columns
        format = spec.format.activation
        left = rounded = ops.round_result(part, spec.format)
        if format is not None and spec.format.dgrad == "fp8":
            left = _quantise_parts(part, spec, format)
        step = _matmul(left, operand)
        dx = step if dx is None else dx + step
        if spec.bias:
            rest.pop(0)
        if not spec.frozen:
            dy_t, x_t = rounded, ops.kept_rows(quantised, spec.format)
            if format is not None and spec.format.wgrad == "fp8":
                tokens = BlockFormat((format.block[1], 1), format.scale, format.round)
                dy_t, x_t = quantise_dequantise(part, tokens), quantise_dequantise(x_t, tokens)
            grads.append(dy_t.t() @ x_t)
            if spec.bias:
                grads.append(part.sum(0))
        if spec.adapted:
            assert x is not None
            adapters = _take_adapters(rest, spec)
            step, more = _adapt_backward(rounded, ops.round_result(x, spec.format), spec, adapters)
            dx = dx + step
            grads += more
    assert dx is not None
    return dx, grads


def _adapt(x: Tensor, spec: LinearSpec, adapters: Sequence[Tensor]) -> Tensor:
    """What the adapters of all parts add, [M, sum N]; zeros where a part has none."""
    down, *ups = adapters
    ranks = [rank for rank in spec.ranks if rank]
    hidden = ops.gemm(x, down).split(ranks, -1)
    products = [ops.gemm(h.contiguous(), up) for h, up in zip(hidden, ups, strict=True)]
    columns = [
        products.pop(0) if rank else x.new_zeros(x.shape[0], n)
        for rank, n in zip(spec.ranks, spec.out_features, strict=True)
    ]
    return torch.cat(columns, -1)


def _adapt_backward(dy: Tensor, x: Tensor, spec: LinearSpec, adapters: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    down, *ups = adapters
    ranks = [rank for rank in spec.ranks if rank]
    hidden = ops.gemm(x, down).split(ranks, -1)
    parts = [part for part, rank in zip(dy.split(spec.out_features, -1), spec.ranks, strict=True) if rank]
    dhidden = torch.cat([_matmul(part, up) for part, up in zip(parts, ups, strict=True)], -1)
    dups = [part.t() @ h for h, part in zip(hidden, parts, strict=True)]
    return _matmul(dhidden, down), [dhidden.t() @ x, *dups]


def _matmul(x: Tensor, operand: Tensor) -> Tensor:
    """``x @ operand``, [M, N] float32 and [N, K] → [M, K] float32; a bfloat16 operand makes it a BF16 GEMM as in the forward."""
    return (x.to(operand.dtype) @ operand).float()


def _take_adapters(rest: list[Tensor], spec: LinearSpec) -> list[Tensor]:
    return [rest.pop(0) for _ in range(spec.adapter_tensors)]


def _quantise_parts(dy: Tensor, spec: LinearSpec, format: BlockFormat) -> Tensor:
    """Quantise dY of each linear by itself: a block never spans two of the linears that run as one GEMM."""
    if all(n % format.block[1] == 0 for n in spec.out_features[:-1]):
        return quantise_dequantise(dy, format)
    return torch.cat([quantise_dequantise(part, format) for part in dy.split(spec.out_features, -1)], -1)


def take_kept(tensors: Sequence[Tensor], specs: Sequence[LinearSpec]) -> tuple[list[Tensor], list[Tensor]]:
    """Split off what the inputs of ``specs`` keep."""
    count = sum(spec.kept for spec in specs)
    return list(tensors[:count]), list(tensors[count:])


def pad_rows(x: Tensor, rows: int) -> Tensor:
    """Append rows of zeros; ``F.pad`` takes no float8."""
    return x if rows == 0 else torch.cat((x, torch.zeros(rows, *x.shape[1:], dtype=x.dtype, device=x.device)))


def example_kept(specs: Sequence[LinearSpec], rows: int) -> tuple[Tensor, ...]:
    """What the inputs of ``specs`` keep, to export a unit with."""
    out: list[Tensor] = []
    for spec in specs:
        _, kept = ops.quantise_rows(torch.ones(rows, spec.in_features), spec.format)
        out += kept
    return tuple(out)


def example_weights(specs: Sequence[LinearSpec]) -> tuple[Tensor, ...]:
    """Weights of ``specs``, flat, to export a unit with."""
    out = []
    for spec in specs:
        dtype = spec.operand_dtype
        out.append(torch.ones(spec.columns, spec.in_features, dtype=dtype))
        if spec.bias:
            out.append(torch.ones(spec.columns))
        if spec.adapted:
            out.append(torch.ones(sum(spec.ranks), spec.in_features, dtype=dtype))
            pairs = zip(spec.ranks, spec.out_features, strict=True)
            out += [torch.ones(n, rank, dtype=dtype) for rank, n in pairs if rank]
    return tuple(out)
