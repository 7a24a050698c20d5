"""Autograd around the units: forward calls the engine's artefacts, backward is the learner's own.

Gradients reach the FP32 master parameters straight through rounding and quantisation (arXiv 2601.14243, section on the
precision flow). Backward of attention recomputes it densely; backward need not have the forward's bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from trtl_rl.kernels.units import head_backward

if TYPE_CHECKING:
    from trtl_rl.model.kv import Blocks, Rows
    from trtl_rl.model.operand import Operand
    from trtl_rl.model.weights import DecoderWeights, LayerWeights


def before_attention(x: Tensor, layer: LayerWeights, rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
    """q [M, heads, D], k and v [M, kv_heads, D] of x [M, hidden], M a multiple of 128."""
    return cast("tuple[Tensor, Tensor, Tensor]", _Before.apply(x, layer, rows, *layer.before_parameters))  # type: ignore[no-untyped-call]


def after_attention(x: Tensor, attended: Tensor, layer: LayerWeights) -> Tensor:
    """The layer's output [M, hidden] of its input and attention's output [M, heads * D]."""
    return cast("Tensor", _After.apply(x, attended, layer, *layer.after_parameters))  # type: ignore[no-untyped-call]


def attention(q: Tensor, k: Tensor, v: Tensor, layer: LayerWeights, rows: Rows, blocks: Blocks) -> Tensor:
    """Attention [M, heads * D] of packed training sequences, through the engine's unit; zeros for filling rows."""
    return cast("Tensor", _Attention.apply(q, k, v, layer, rows, blocks))  # type: ignore[no-untyped-call]


def embedding(rows: Rows, weights: DecoderWeights, parameter: Tensor, padding: int | None) -> Tensor:
    """Rows [M, hidden] of the rounded embedding; the gradient goes straight to the FP32 ``parameter``.

    Filling rows are zeros, and so stay outside of the largest values by which WGrad scales groups of tokens.
    """
    return cast("Tensor", _Embedding.apply(rows, weights, parameter, padding))  # type: ignore[no-untyped-call]


def head_logprob(
    x: Tensor, weights: DecoderWeights, ids: Tensor, temperature: Tensor, norm: Tensor, head: Tensor
) -> tuple[Tensor, Tensor]:
    """Logprob and entropy [M] of token ``ids`` [M] after hidden states x [M, hidden], M a multiple of 8.

    Both are differentiable. Logits are kept for one chunk of rows: where there are more, backward computes them again.

    Args:
        norm, head: The FP32 master parameters of the final norm [hidden] and the head [V, hidden].
    """
    out = _HeadLogprob.apply(x, weights, ids, temperature, norm, head)  # type: ignore[no-untyped-call]
    return cast("tuple[Tensor, Tensor]", out)


class _Before(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: LayerWeights, rows: Rows, *parameters: Tensor) -> tuple[Tensor, ...]:
        q, k, v, *saved = layer.units.before([x, *layer.before_weights(), rows.cos, rows.sin])
        ctx.layer, ctx.rows = layer, rows
        ctx.save_for_backward(x, *saved)
        return q, k, v

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        layer, rows = ctx.layer, ctx.rows
        x, *saved = ctx.saved_tensors
        qk = [layer.q_norm, layer.k_norm, saved.pop(0)] if layer.spec.qk_norm else []
        operands = [tensor for operand in layer.qkv for tensor in operand.gradient_tensors()]
        run = layer.units.before_backward
        dx, dnorm, *rest = run([*grads, x, layer.input_norm, *qk, rows.cos, rows.sin, *saved, *operands])
        norms = [rest.pop(0), rest.pop(0)] if layer.spec.qk_norm else []
        return (dx, None, None, dnorm, *norms, *_split(layer.qkv, rest))


class _After(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, attended: Tensor, layer: LayerWeights, *parameters: Tensor) -> Tensor:
        out, *saved = layer.units.after([x, attended, *layer.after_weights()])
        ctx.layer = layer
        ctx.save_for_backward(*([attended] if layer.spec.o.adapted else []), *saved)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        layer = ctx.layer
        dx, dattended, *rest = layer.units.after_backward([*grads, *ctx.saved_tensors, *layer.after_gradient_weights()])
        o = _split([layer.o], rest)
        dnorm = rest.pop(0)
        return (dx, dattended, None, *o, dnorm, *_split([*layer.gate_up, layer.down], rest))


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, layer: LayerWeights, rows: Rows, blocks: Blocks) -> Tensor:
        from trtl_rl.model.kv import KeyValueBuffers

        ctx.rows, ctx.sequences = rows, len(blocks.start)
        dtype = layer.spec.key_value_dtype
        ctx.save_for_backward(q, k.to(dtype), v.to(dtype))
        buffers = KeyValueBuffers([dtype], blocks.positions, k.shape[1], k.shape[2], k.device)
        out = buffers.attend(0, layer.units, q, k, v, rows)
        out[rows.count :] = 0
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        rows, n = ctx.rows, ctx.rows.count
        index = rows.sequence[:n], rows.position[:n]
        length = int(index[1].max()) + 1

        def dense(rows: Tensor) -> Tensor:  # [M, h, D] → [S, h, T, D]
            out = torch.zeros(ctx.sequences, length, *rows.shape[1:], device=rows.device)
            out[index] = rows[:n].float()
            return out.transpose(1, 2)

        def packed(dense: Tensor, like: Tensor) -> Tensor:
            out = torch.zeros(like.shape, device=like.device)
            out[:n] = dense.transpose(1, 2)[index]
            return out

        saved = ctx.saved_tensors
        q, k, v = (dense(tensor).requires_grad_() for tensor in saved)
        with torch.enable_grad():
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        dense_grads = torch.autograd.grad(out, (q, k, v), dense(grads[0].reshape(saved[0].shape)))
        return (*[packed(g, like) for g, like in zip(dense_grads, saved, strict=True)], None, None, None)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Rows, weights: DecoderWeights, parameter: Tensor, padding: int | None) -> Tensor:
        ctx.save_for_backward(rows.ids)
        ctx.shape, ctx.padding = parameter.shape, padding
        out = F.embedding(rows.ids, weights.embedding)
        out[rows.count :] = 0
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        if not ctx.needs_input_grad[2]:
            return None, None, None, None
        (ids,) = ctx.saved_tensors
        grad = grads[0].new_zeros(ctx.shape).index_add_(0, ids, grads[0])
        if ctx.padding is not None:  # as torch's own embedding does
            grad[ctx.padding] = 0
        return None, None, grad, None


class _HeadLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weights: DecoderWeights,
        ids: Tensor,
        temperature: Tensor,
        norm: Tensor,
        head: Tensor,
    ) -> tuple[Tensor, Tensor]:
        ctx.weights = weights
        chunks = _chunks(x.shape[0], weights.description.vocab)
        parts = []
        for rows in chunks:
            logits, *kept = weights.head_units.head([x[rows], weights.norm, *weights.head.tensors()])
            parts.append(weights.head_units.logprob([logits, ids[rows], temperature[rows]]))
        ctx.save_for_backward(x, ids, temperature, *([logits, *kept] if len(chunks) == 1 else []))
        logprob, _, entropy = (torch.cat(column) for column in zip(*parts, strict=True))
        ctx.set_materialize_grads(False)  # without an entropy term its gradient is None, and costs nothing
        return logprob, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, ids, temperature, *saved = ctx.saved_tensors
        weights, (dlogprob, dentropy) = ctx.weights, grads
        if dlogprob is None:
            dlogprob = torch.zeros_like(temperature)
        operands, gradient = weights.head.tensors(), weights.head.gradient_tensors()
        dx = torch.empty_like(x)
        totals: list[Tensor] = []
        for rows in _chunks(x.shape[0], weights.description.vocab):
            logits, *kept = saved or weights.head_units.head([x[rows], weights.norm, *operands])
            scale = (dlogprob[rows] / temperature[rows])[:, None]
            scaled = logits / temperature[rows, None]
            dlogits = torch.softmax(scaled, -1).mul_(-scale)
            dlogits.scatter_add_(-1, ids[rows, None], scale)
            if dentropy is not None:
                dlogits += _entropy_gradient(scaled) * (dentropy[rows] / temperature[rows])[:, None]
            spec = weights.description.head_spec()
            dx[rows], *chunk = head_backward(spec, dlogits, x[rows], kept, weights.norm, gradient)
            totals = chunk if not totals else [a + b for a, b in zip(totals, chunk, strict=True)]
        dnorm, dhead = totals if len(totals) == 2 else (totals[0], None)
        return dx, None, None, None, dnorm, dhead


def _entropy_gradient(logits: Tensor) -> Tensor:
    """[M, V]: of the entropy H of softmax(logits) by the logits, ``-p (log p + H)``."""
    logs = torch.log_softmax(logits, -1)
    p = logs.exp()
    return -p * (logs - (p * logs).sum(-1, keepdim=True))


def head_is_recomputed(rows: int, vocab: int) -> bool:
    """Whether :func:`head_logprob` of so many rows keeps no logits, so that backward computes them again."""
    return len(_chunks(rows, vocab)) > 1


def _chunks(rows: int, vocab: int) -> list[slice]:
    """Slices of whole groups of 128 rows with at most about 2**24 logits."""
    step = max(128, 2**24 // vocab // 128 * 128)
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def _split(operands: list[Operand], grads: list[Tensor]) -> list[Tensor]:
    """Take the operands' gradients off the front of ``grads``, in the order of the masters (``LayerWeights``)."""
    out: list[Tensor] = []
    for operand in operands:
        spec = operand.spec
        if not spec.frozen:
            out += grads.pop(0).split(spec.out_features)
            if spec.bias:
                out += grads.pop(0).split(spec.out_features)
        if spec.adapted:
            out += grads.pop(0).split([rank for rank in spec.ranks if rank])
            # The up projections carry the scaling, so their masters' gradient does too.
            out += [grads.pop(0) * operand.scalings[name] for name in operand.ups]
    return out
