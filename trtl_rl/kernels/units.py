"""The few compiled units that trainer and engine call: before attention, attention, after attention, head, logprob, sample.

A unit takes any number of rows that is a multiple of 8, so that one artefact serves a decode step of 8 rows and a training
batch of thousands; weights come in as decoded operands, packed or not. Units also return what backward saves. The two
backward units belong to the learner alone: backward need not be shared with an engine.

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
from trtl_rl.kernels.linear import example_kept, example_weights, pad_rows, project, project_backward, take_kept
from trtl_rl.kernels.spec import KEY_TILE, ROW_TILE, TOKEN_TILE, HeadSpec, LayerSpec

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
        weights = example_weights(s.qkv)
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
        saved, operands = take_kept(rest, s.qkv)
        dq, dk = ops.rope(dq, cos, -sin), ops.rope(dk, cos, -sin)  # the transpose of a rotation is its inverse
        norm_grads: list[Tensor] = []
        if s.qk_norm:
            q_norm, k_norm, y = normed
            q, k, _ = _heads(y, s)
            dq, dq_norm = rms_norm_backward(dq, q, q_norm, s.eps)
            dk, dk_norm = rms_norm_backward(dk, k, k_norm, s.eps)
            norm_grads = [dq_norm, dk_norm]
        dy = torch.cat([part.reshape(x.shape[0], -1) for part in (dq, dk, dv)], -1)
        dn, grads = project_backward(dy, s.qkv, saved, operands, ops.rms_norm(x, norm, s.eps))
        dx, dnorm = rms_norm_backward(dn, x, norm, s.eps)
        return (dx, dnorm, *norm_grads, *grads)

    def example(self) -> Example:
        s, m = self.spec, 2 * TOKEN_TILE
        rows, fixed = {0: TOKEN_TILE * torch.export.Dim("tiles", min=1, max=1 << 18)}, None
        weights = example_weights(s.qkv)
        head = [torch.ones(m, n, s.head_dim) for n in (s.heads, s.kv_heads, s.kv_heads)]
        columns = sum(spec.columns for spec in s.qkv)
        normed = (torch.ones(s.head_dim), torch.ones(s.head_dim), torch.ones(m, columns)) if s.qk_norm else ()
        tables = (torch.ones(m, s.head_dim), torch.ones(m, s.head_dim))
        saved = example_kept(s.qkv, m)
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
        tiles = dim("capacity", min=1, max=1 << 15)
        capacity, visited = KEY_TILE * tiles, KEY_TILE * dim("window", min=1, max=1 << 15)
        inputs = (
            torch.ones(m, s.heads, s.head_dim),
            torch.ones(n, s.kv_heads, length // KEY_TILE, s.head_dim, KEY_TILE, dtype=s.key_value_dtype),
            torch.ones(n, s.kv_heads, length, s.head_dim, dtype=s.key_value_dtype),
            torch.zeros(m, dtype=torch.int64),
            torch.zeros(m, dtype=torch.int64),
            torch.arange(window),
        )
        dynamic = ({0: rows}, {0: slots, 2: tiles}, {0: slots, 2: capacity}, {0: rows}, {0: rows}, {0: visited})
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
        if (
            s.o.kept == 1
        ):  # unquantised, it would be multiplied and returned as it is: export refuses views of inputs there
            attended = attended.clone(memory_format=torch.contiguous_format)
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

    Inputs: d(next x), attended if the output linear has adapters, then the saved tensors in the order of the forward's
    outputs, then the weights in the order of its inputs. Outputs: dx, d(attended), gradients of o, dnorm, gradients of
    gate/up and of down.
    """

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__()
        self.spec = spec

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        s = self.spec
        dout, *rest = inputs
        attended = rest.pop(0) if s.o.adapted else None
        middle, *rest = rest
        o_in, rest = take_kept(rest, (s.o,))
        wide_in, (wide, *rest) = take_kept(rest, s.gate_up)
        down_in, weights = take_kept(rest, (s.down,))
        o, norm, gate_up, down = _split_after(weights, s)
        gate, up = wide.chunk(2, -1)
        dh, down_grads = project_backward(dout, (s.down,), down_in, down, ops.silu_mul(wide))
        sigmoid = torch.sigmoid(gate)
        silu = gate * sigmoid
        dwide = torch.cat((dh * up * (sigmoid * (1 + gate - silu)), dh * silu), -1)
        dn, wide_grads = project_backward(dwide, s.gate_up, wide_in, gate_up, ops.rms_norm(middle, norm, s.eps))
        dmiddle, dnorm = rms_norm_backward(dn, middle, norm, s.eps)
        dmiddle = dmiddle + dout
        dattended, o_grads = project_backward(dmiddle, (s.o,), o_in, o, attended)
        return (dmiddle, dattended, *o_grads, dnorm, *wide_grads, *down_grads)

    def example(self) -> Example:
        s, m = self.spec, 2 * TOKEN_TILE
        rows, fixed = {0: TOKEN_TILE * torch.export.Dim("tiles", min=1, max=1 << 18)}, None
        weights = _example_after(s)
        attended = [torch.ones(m, s.heads * s.head_dim)] if s.o.adapted else []
        saved = (
            *attended,
            torch.ones(m, s.hidden),
            *example_kept((s.o,), m),
            *example_kept(s.gate_up, m),
            torch.ones(m, 2 * s.intermediate),
            *example_kept((s.down,), m),
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
        weights = example_weights((self.spec.linear,))
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


class Sample(Unit):
    """:func:`ops.sample_tokens`."""

    def __init__(self, spec: HeadSpec) -> None:
        super().__init__()
        self.spec = spec

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return ops.sample_tokens(*inputs)

    def example(self) -> Example:
        rows, m = {0: ROW_TILE * torch.export.Dim("tiles", min=1, max=1 << 20)}, 2 * ROW_TILE
        uniform, greedy = torch.zeros(m, dtype=torch.float64), torch.zeros(m, dtype=torch.bool)
        return Example((torch.ones(m, self.spec.vocab), torch.ones(m), uniform, greedy), (rows, rows, rows, rows))


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
    kept = [pad_rows(tensor, pad[3]) for tensor in kept]
    dn, grads = project_backward(dlogits, (spec.linear,), kept, operands)
    dx, dnorm = rms_norm_backward(dn[:rows], x, norm, spec.eps)
    return (dx, dnorm, *grads)


def _heads(y: Tensor, s: LayerSpec) -> tuple[Tensor, Tensor, Tensor]:
    """[M, N] → q [M, heads, D], k and v [M, kv_heads, D]."""
    q, k, v = y.split((s.heads * s.head_dim, s.kv_heads * s.head_dim, s.kv_heads * s.head_dim), -1)
    m = y.shape[0]
    shape = (m, s.kv_heads, s.head_dim)
    return q.reshape(m, s.heads, s.head_dim), k.reshape(shape), v.reshape(shape)


def _split_after(weights: Sequence[Tensor], s: LayerSpec) -> tuple[list[Tensor], Tensor, list[Tensor], list[Tensor]]:
    rest = list(weights)
    o = [rest.pop(0) for _ in range(s.o.tensors)]
    norm = rest.pop(0)
    wide = [rest.pop(0) for _ in range(sum(spec.tensors for spec in s.gate_up))]
    return o, norm, wide, rest


def _example_after(s: LayerSpec) -> tuple[Tensor, ...]:
    return (*example_weights((s.o,)), torch.ones(s.hidden), *example_weights((*s.gate_up, s.down)))
