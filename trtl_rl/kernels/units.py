"""The few compiled units that trainer and engine call: before attention, attention, after attention, head, logprob.

A unit takes any number of row tiles, so that one artefact serves a decode step of 32 rows and a training batch of
thousands; weights come in as decoded operands. Units also return what backward saves. The two backward units belong to
the learner alone: backward need not be shared with an engine.

Example inputs describe a unit for export: each is a tensor and the meaning of its first dimension.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trtl_rl.kernels import ops
from trtl_rl.kernels.spec import KEY_TILE, ROW_TILE, TOKEN_TILE, HeadSpec, LayerSpec, LinearSpec
from trtl_rl.recipe.codec import quantise_dequantise
from trtl_rl.recipe.formats import BlockFormat

Dynamic = dict[int, Any] | None


@dataclass(frozen=True)
class Example:
    """Inputs for export, and which of their dimensions vary."""

    inputs: tuple[Tensor, ...]
    dynamic: tuple[Dynamic, ...]


class Unit(nn.Module, ABC):
    """A function of tensors without state of its own."""

    @abstractmethod
    def example(self) -> Example:
        """Inputs from which the unit is exported."""


def project(x: Tensor, specs: Sequence[LinearSpec], operands: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Linears with a common input: quantise it once for each format, multiply, add biases.

    Args:
        x: [M, K] float32.
        operands: For each spec its operand [K, N] and, with a bias, that bias [N].

    Returns:
        All outputs side by side, [M, sum N], and for each spec what backward keeps of its input: codes and scales, or
        the operand.
    """
    outputs: list[Tensor] = []
    kept: list[Tensor] = []
    seen: dict[tuple[BlockFormat | None, str], tuple[Tensor, tuple[Tensor, ...]]] = {}
    rest = list(operands)
    for spec in specs:
        key = spec.format.forward_activation, spec.format.compute
        if key not in seen:
            seen[key] = ops.quantise_rows(x, spec.format)
        operand, parts = seen[key]
        y = ops.block_gemm(operand.contiguous(), rest.pop(0))
        outputs.append(ops.round_result(y + rest.pop(0) if spec.bias else y, spec.format))
        kept += parts
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)), kept


def project_backward(
    dy: Tensor, specs: Sequence[LinearSpec], kept: Sequence[Tensor], operands: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """DGrad and WGrad of :func:`project` (arXiv 2601.14243, section on the precision flow).

    DGrad: dX = dY W with dY in 1×128 blocks along N and the weight codes of the forward pass. WGrad: dW = dYᵀ X with both
    operands in blocks of 128 tokens (dYᵀ 1×128, X 128×1); X is the quantised input of the forward pass, quantised again.
    Where the recipe says bf16, that GEMM takes unquantised gradients, and X as the forward pass saw it. With
    ``compute: bf16`` unquantised operands and dX are rounded to bfloat16; dW stays float32.

    Args:
        kept: What :func:`project` kept of each spec's input.
        operands: For each spec its operand [K, N] (of codes where DGrad is FP8) and, with a bias, that bias.

    Returns:
        dX [M, K], and for each spec dW [N, K] and, with a bias, db [N].
    """
    dx: Tensor | None = None
    grads: list[Tensor] = []
    rest, inputs = list(operands), list(kept)
    start = 0
    for spec in specs:
        operand = rest.pop(0)
        x = ops.kept_rows([inputs.pop(0) for _ in range(spec.kept)], spec.format)
        part = dy[:, start : start + spec.columns]
        start += spec.columns
        format = spec.format.activation
        left = dy_t = ops.round_result(part, spec.format)
        x_t = x
        if format is not None and spec.format.dgrad == "fp8":
            left = _quantise_parts(part, spec, format)
        if format is not None and spec.format.wgrad == "fp8":
            tokens = BlockFormat((format.block[1], 1), format.scale, format.round)
            dy_t, x_t = quantise_dequantise(part, tokens), quantise_dequantise(x, tokens)
        step = ops.round_result(left @ operand.t(), spec.format)
        dx = step if dx is None else dx + step
        grads.append(dy_t.t() @ x_t)
        if spec.bias:
            rest.pop(0)
            grads.append(part.sum(0))
    assert dx is not None
    return dx, grads


def _quantise_parts(dy: Tensor, spec: LinearSpec, format: BlockFormat) -> Tensor:
    """Quantise dY of each linear by itself: a block never spans two of the linears that run as one GEMM."""
    if all(n % format.block[1] == 0 for n in spec.out_features[:-1]):
        return quantise_dequantise(dy, format)
    return torch.cat([quantise_dequantise(part, format) for part in dy.split(spec.out_features, -1)], -1)


def rms_norm_backward(dy: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Gradient of :func:`ops.rms_norm`: dx like ``x``, and dweight summed over all leading dimensions."""
    inverse = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    normal = x * inverse
    scaled = dy * weight
    dx = inverse * (scaled - normal * (scaled * normal).mean(-1, keepdim=True))
    return dx, (dy * normal).sum(tuple(range(x.dim() - 1)))


class BeforeAttention(Unit):
    """Norm, q/k/v linears, q/k norms and rope.

    Inputs: x [M, hidden], norm [hidden], operands of q/k/v (with biases), q_norm and k_norm [D] (Qwen3 only), cos and sin
    [M, D]. Outputs: q [M, heads, D], k and v [M, kv_heads, D], the linears' output y [M, N] (Qwen3 only), and what backward
    keeps of each linear's input.
    """

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__()
        self.spec = spec

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        s = self.spec
        x, norm, *rest = inputs
        *rest, cos, sin = rest
        q_norm, k_norm = (rest.pop(-2), rest.pop(-1)) if s.qk_norm else (None, None)
        y, saved = project(ops.rms_norm(x, norm, s.eps), s.qkv, rest)
        q, k, v = _heads(y, s)
        if q_norm is not None and k_norm is not None:
            q, k = ops.rms_norm(q, q_norm, s.eps), ops.rms_norm(k, k_norm, s.eps)
        kept = [y] if s.qk_norm else []
        return (ops.rope(q, cos, sin), ops.rope(k, cos, sin), v.contiguous(), *kept, *saved)

    def example(self) -> Example:
        s, m = self.spec, 2 * ROW_TILE
        rows, fixed = {0: ROW_TILE * torch.export.Dim("tiles", min=1, max=1 << 20)}, None
        weights = _example_operands(s.qkv)
        norms = (torch.ones(s.head_dim), torch.ones(s.head_dim)) if s.qk_norm else ()
        tables = (torch.ones(m, s.head_dim), torch.ones(m, s.head_dim))
        inputs = (torch.ones(m, s.hidden), torch.ones(s.hidden), *weights, *norms, *tables)
        return Example(inputs, (rows, fixed, *[fixed] * (len(weights) + len(norms)), rows, rows))


class BeforeAttentionBackward(Unit):
    """Gradient of :class:`BeforeAttention`.

    Inputs: dq, dk, dv, x, norm, [q_norm, k_norm, y], cos, sin, the saved inputs, the operands. Outputs: dx, dnorm,
    [dq_norm, dk_norm], and dW (with db) of each linear.
    """

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__()
        self.spec = spec

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        s = self.spec
        dq, dk, dv, x, norm, *rest = inputs
        normed = [rest.pop(0) for _ in range(3)] if s.qk_norm else []
        cos, sin, *rest = rest
        saved, operands = _take(rest, s.qkv)
        dq, dk = ops.rope(dq, cos, -sin), ops.rope(dk, cos, -sin)  # the transpose of a rotation is its inverse
        norm_grads: list[Tensor] = []
        if s.qk_norm:
            q_norm, k_norm, y = normed
            q, k, _ = _heads(y, s)
            dq, dq_norm = rms_norm_backward(dq, q, q_norm, s.eps)
            dk, dk_norm = rms_norm_backward(dk, k, k_norm, s.eps)
            norm_grads = [dq_norm, dk_norm]
        dy = torch.cat([part.reshape(x.shape[0], -1) for part in (dq, dk, dv)], -1)
        dn, grads = project_backward(dy, s.qkv, saved, operands)
        dx, dnorm = rms_norm_backward(dn, x, norm, s.eps)
        return (dx, dnorm, *norm_grads, *grads)

    def example(self) -> Example:
        s, m = self.spec, 2 * TOKEN_TILE
        rows, fixed = {0: TOKEN_TILE * torch.export.Dim("tiles", min=1, max=1 << 18)}, None
        weights = _example_operands(s.qkv)
        head = [torch.ones(m, n, s.head_dim) for n in (s.heads, s.kv_heads, s.kv_heads)]
        columns = sum(spec.columns for spec in s.qkv)
        normed = (torch.ones(s.head_dim), torch.ones(s.head_dim), torch.ones(m, columns)) if s.qk_norm else ()
        tables = (torch.ones(m, s.head_dim), torch.ones(m, s.head_dim))
        saved = _example_kept(s.qkv, m)
        inputs = (*head, torch.ones(m, s.hidden), torch.ones(s.hidden), *normed, *tables, *saved, *weights)
        qk = (fixed, fixed, rows) if s.qk_norm else ()
        return Example(inputs, (*[rows] * 4, fixed, *qk, rows, rows, *[rows] * len(saved), *[fixed] * len(weights)))


class Attention(Unit):
    """:func:`ops.attention` over the key/value buffers of sequences (training) or slots (decoding)."""

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__()
        self.spec = spec

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return (ops.attention(*inputs),)

    def example(self) -> Example:
        s, m, n, length, window = self.spec, 2 * ROW_TILE, 5, 3 * KEY_TILE, 2 * KEY_TILE
        dim = torch.export.Dim
        rows, slots = ROW_TILE * dim("tiles", min=1, max=1 << 20), dim("slots", min=1, max=1 << 20)
        capacity, visited = KEY_TILE * dim("capacity", min=1, max=1 << 15), KEY_TILE * dim("window", min=1, max=1 << 15)
        inputs = (
            torch.ones(m, s.heads, s.head_dim),
            torch.ones(n, s.kv_heads, s.head_dim, length),
            torch.ones(n, s.kv_heads, length, s.head_dim),
            torch.zeros(m, dtype=torch.int64),
            torch.zeros(m, dtype=torch.int64),
            torch.arange(window),
        )
        dynamic = ({0: rows}, {0: slots, 3: capacity}, {0: slots, 2: capacity}, {0: rows}, {0: rows}, {0: visited})
        return Example(inputs, dynamic)


class AttentionByTiles(Attention):
    """The same in eager mode: :func:`ops.attention_by_tiles`."""

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return (ops.attention_by_tiles(*inputs),)


class AfterAttention(Unit):
    """Output linear, residual, norm, gate/up linears, silu·mul, down linear, residual.

    Inputs: x [M, hidden], attention's output [M, heads·D], the operand of o, norm, operands of gate/up, the operand of down
    (each with its bias). Outputs: the next x; then what backward saves: x after the first residual, the quantised input
    of o, of each of gate/up, the output of gate/up [M, 2F], the quantised input of down.
    """

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__()
        self.spec = spec

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        s = self.spec
        x, attended, *rest = inputs
        o, norm, gate_up, down = _split_after(rest, s)
        y, o_in = project(attended, (s.o,), o)
        middle = x + y
        wide, wide_in = project(ops.rms_norm(middle, norm, s.eps), s.gate_up, gate_up)
        y, down_in = project(ops.silu_mul(wide), (s.down,), down)
        return (middle + y, middle, *o_in, *wide_in, wide, *down_in)

    def example(self) -> Example:
        s, m = self.spec, 2 * ROW_TILE
        rows, fixed = {0: ROW_TILE * torch.export.Dim("tiles", min=1, max=1 << 20)}, None
        weights = _example_after(s)
        inputs = (torch.ones(m, s.hidden), torch.ones(m, s.heads * s.head_dim), *weights)
        return Example(inputs, (rows, rows, *[fixed] * len(weights)))


class AfterAttentionBackward(Unit):
    """Gradient of :class:`AfterAttention`.

    Inputs: d(next x), then the saved tensors in the order of the forward's outputs, then the weights in the order of its
    inputs. Outputs: dx, d(attended), dW of o, dnorm, dW of gate/up, dW of down (each with its db).
    """

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__()
        self.spec = spec

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        s = self.spec
        dout, middle, *rest = inputs
        o_in, rest = _take(rest, (s.o,))
        wide_in, (wide, *rest) = _take(rest, s.gate_up)
        down_in, weights = _take(rest, (s.down,))
        o, norm, gate_up, down = _split_after(weights, s)
        dh, down_grads = project_backward(dout, (s.down,), down_in, down)
        gate, up = wide.chunk(2, -1)
        sigmoid = torch.sigmoid(gate)
        silu = gate * sigmoid
        dwide = torch.cat((dh * up * (sigmoid * (1 + gate - silu)), dh * silu), -1)
        dn, wide_grads = project_backward(dwide, s.gate_up, wide_in, gate_up)
        dmiddle, dnorm = rms_norm_backward(dn, middle, norm, s.eps)
        dmiddle = dmiddle + dout
        dattended, o_grads = project_backward(dmiddle, (s.o,), o_in, o)
        return (dmiddle, dattended, *o_grads, dnorm, *wide_grads, *down_grads)

    def example(self) -> Example:
        s, m = self.spec, 2 * TOKEN_TILE
        rows, fixed = {0: TOKEN_TILE * torch.export.Dim("tiles", min=1, max=1 << 18)}, None
        weights = _example_after(s)
        saved = (
            torch.ones(m, s.hidden),
            *_example_kept((s.o,), m),
            *_example_kept(s.gate_up, m),
            torch.ones(m, 2 * s.intermediate),
            *_example_kept((s.down,), m),
        )
        inputs = (torch.ones(m, s.hidden), *saved, *weights)
        return Example(inputs, (*[rows] * (1 + len(saved)), *[fixed] * len(weights)))


class Head(Unit):
    """Final norm and output head: x [M, hidden], norm, operand (bias) → logits [M, V], and what backward keeps."""

    def __init__(self, spec: HeadSpec) -> None:
        super().__init__()
        self.spec = spec

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        x, norm, *operands = inputs
        logits, kept = project(ops.rms_norm(x, norm, self.spec.eps), (self.spec.linear,), operands)
        return (logits, *kept)

    def example(self) -> Example:
        rows, fixed = {0: ROW_TILE * torch.export.Dim("tiles", min=1, max=1 << 20)}, None
        weights = _example_operands((self.spec.linear,))
        inputs = (torch.ones(2 * ROW_TILE, self.spec.hidden), torch.ones(self.spec.hidden), *weights)
        return Example(inputs, (rows, fixed, *[fixed] * len(weights)))


class TokenLogprob(Unit):
    """:func:`ops.token_logprob`."""

    def __init__(self, spec: HeadSpec) -> None:
        super().__init__()
        self.spec = spec

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return ops.token_logprob(*inputs)

    def example(self) -> Example:
        rows, m = {0: ROW_TILE * torch.export.Dim("tiles", min=1, max=1 << 20)}, 2 * ROW_TILE
        inputs = (torch.ones(m, self.spec.vocab), torch.zeros(m, dtype=torch.int64), torch.ones(m))
        return Example(inputs, (rows, rows, rows))


def head_backward(
    spec: HeadSpec,
    dlogits: Tensor,
    x: Tensor,
    kept: Sequence[Tensor],
    norm: Tensor,
    operands: Sequence[Tensor],
) -> tuple[Tensor, ...]:
    """Gradient of :class:`Head`: dx, dnorm, dW (and db). Rows are padded to whole groups of 128 tokens."""
    rows = x.shape[0]
    pad = (0, 0, 0, -rows % TOKEN_TILE)
    dlogits = F.pad(dlogits, pad)
    kept = [_pad_rows(tensor, pad[3]) for tensor in kept]
    dn, grads = project_backward(dlogits, (spec.linear,), kept, operands)
    dx, dnorm = rms_norm_backward(dn[:rows], x, norm, spec.eps)
    return (dx, dnorm, *grads)


def _pad_rows(x: Tensor, rows: int) -> Tensor:
    """Append rows of zeros; ``F.pad`` takes no float8."""
    return x if rows == 0 else torch.cat((x, torch.zeros(rows, *x.shape[1:], dtype=x.dtype, device=x.device)))


def _take(tensors: Sequence[Tensor], specs: Sequence[LinearSpec]) -> tuple[list[Tensor], list[Tensor]]:
    """Split off what the inputs of ``specs`` keep."""
    count = sum(spec.kept for spec in specs)
    return list(tensors[:count]), list(tensors[count:])


def _heads(y: Tensor, s: LayerSpec) -> tuple[Tensor, Tensor, Tensor]:
    """[M, N] → q [M, heads, D], k and v [M, kv_heads, D]."""
    q, k, v = y.split((s.heads * s.head_dim, s.kv_heads * s.head_dim, s.kv_heads * s.head_dim), -1)
    m = y.shape[0]
    shape = (m, s.kv_heads, s.head_dim)
    return q.reshape(m, s.heads, s.head_dim), k.reshape(shape), v.reshape(shape)


def _split_after(weights: Sequence[Tensor], s: LayerSpec) -> tuple[list[Tensor], Tensor, list[Tensor], list[Tensor]]:
    rest = list(weights)
    o = [rest.pop(0) for _ in range(1 + s.o.bias)]
    norm = rest.pop(0)
    wide = [rest.pop(0) for _ in range(sum(1 + spec.bias for spec in s.gate_up))]
    return o, norm, wide, rest


def _example_after(s: LayerSpec) -> tuple[Tensor, ...]:
    return (*_example_operands((s.o,)), torch.ones(s.hidden), *_example_operands((*s.gate_up, s.down)))


def _example_kept(specs: Sequence[LinearSpec], rows: int) -> tuple[Tensor, ...]:
    out: list[Tensor] = []
    for spec in specs:
        _, kept = ops.quantise_rows(torch.ones(rows, spec.in_features), spec.format)
        out += kept
    return tuple(out)


def _example_operands(specs: Sequence[LinearSpec]) -> tuple[Tensor, ...]:
    out = []
    for spec in specs:
        out.append(torch.ones(spec.in_features, spec.columns))
        if spec.bias:
            out.append(torch.ones(spec.columns))
    return tuple(out)
