"""The operators of the decoder, each row-invariant: a row's bits depend on that row alone.

Neither the number of rows, nor their order and company, nor the length of the key buffer changes a bit. That holds
because GEMMs add a row's products in the order of K whatever the number of rows, reductions go over one row in a fixed
order, and masked keys add exact zeros. Units (``units.py``) are made of these operators; nothing else computes the
forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from trtl_rl.kernels.spec import KEY_TILE
from trtl_rl.recipe.codec import decode_rows, quantise_encode, round_bf16
from trtl_rl.recipe.formats import LinearFormat

ONEDNN = torch.backends.mkldnn.is_available()
ONEDNN_BF16 = ONEDNN and torch.ops.mkldnn._is_mkldnn_bf16_supported()
BLAS_ROWS = 32  # of one BLAS call: fewer than 7 have other bits


def quantise_rows(x: Tensor, format: LinearFormat) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The operand that the forward GEMM sees of activations ``x`` [M, K] float32, and what backward keeps of it.

    Returns:
        [M, K] float32, and either codes [M, K] ``float8_e4m3fn`` with scales [M, blocks] float32, or the operand itself.
    """
    if format.forward_activation is None:
        operand = round_result(x, format)
        return operand, (operand,)
    operand, codes, scale = quantise_encode(x, format.forward_activation)
    return operand.contiguous(), (codes, scale)


def kept_rows(kept: Sequence[Tensor], format: LinearFormat) -> Tensor:
    """The operand [M, K] float32 again, bit for bit, from what :func:`quantise_rows` kept."""
    return kept[0] if format.forward_activation is None else decode_rows(kept[0], kept[1], format.forward_activation)


def round_result(x: Tensor, format: LinearFormat) -> Tensor:
    """``x`` as the recipe's ``compute`` stores it: float32 values, rounded to bfloat16 or not (GEMMs round their result)."""
    return round_bf16(x) if format.compute == "bf16" else x


def gemm(x: Tensor, operand: Tensor) -> Tensor:
    """``x @ operandᵀ``: [M, K] float32 and [N, K] → [M, N] float32, M a multiple of 8.

    A bfloat16 operand makes it a BF16 GEMM: x is rounded, products are summed in float32, the result is rounded.

    oneDNN's linear has the same bits for any number of rows from two on, for any number of threads, and for a weight that
    was packed beforehand (:func:`pack`), which saves packing it at every call: a decode step is 1.1 to 2 times faster than
    with a BLAS. Where torch comes without it, rows go through a BLAS in tiles of 32. On CUDA the kernel set calls with one
    number of rows.
    """
    rounded = operand.dtype == torch.bfloat16
    if x.is_cuda:
        return (x.to(operand.dtype) @ operand.t()).float()
    if rounded and not ONEDNN_BF16:
        return round_bf16(gemm(round_bf16(x), operand.float()))
    if ONEDNN:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x.to(operand.dtype), operand, None, "none", [], "")
        return y.float()
    padded = F.pad(x, (0, 0, 0, -x.shape[0] % BLAS_ROWS))
    batch = padded.reshape(-1, BLAS_ROWS, x.shape[1])
    return torch.bmm(batch, operand.t().expand(batch.shape[0], -1, -1)).reshape(-1, operand.shape[0])[: x.shape[0]]


def pack(operand: Tensor) -> Tensor:
    """``operand`` [N, K] in the layout that decoding multiplies fastest; :func:`gemm` has the same bits with it.

    The result has no strides and no values that can be read: keep it beside the codes that it came from.
    """
    if operand.is_cuda or not ONEDNN or (operand.dtype == torch.bfloat16 and not ONEDNN_BF16):
        return operand.clone()
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(operand, BLAS_ROWS)
    return packed


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension, in the order of operations of transformers."""
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of heads ``x`` [M, heads, D] with tables [M, D]; the two halves of D form the pairs."""
    first, second = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None]


def silu_mul(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` of [M, 2F] → [M, F].

    Written out: eager ``F.silu`` has other last bits in the rest of a vector, whose place depends on threads.
    """
    gate, up = gate_up.chunk(2, -1)
    return gate / (1 + torch.exp(-gate)) * up


def attention(q: Tensor, keys: Tensor, values: Tensor, sequence: Tensor, position: Tensor, window: Tensor) -> Tensor:
    """Causal attention of single rows over the keys of their sequences, as fused multiply and sum.

    Each row reads its sequence's buffer and adds keys in order, so no row depends on another; keys after the row's
    position have weight exactly zero. On a CPU the compiled form beats SDPA in decoding and at training lengths. The heads
    of a group are written out one by one: the compiler then reads keys and values once for all of them.

    Args:
        q: [M, heads, D] float32.
        keys: [S, kv_heads, L / 32, D, 32] float32 or bfloat16: tiles of 32 keys, transposed so that the sum over D runs over
            whole vectors of keys, which lie one after the other in memory.
        values: [S, kv_heads, L, D], the same.
        sequence, position: [M] int64, each row's index into S and its position in the sequence.
        window: [W] int64, 0..W-1 with W ≤ L a multiple of 32 above every position: how many keys are visited.

    Returns:
        [M, heads * D] float32.
    """
    m, heads, d = q.shape
    kv_heads, w = keys.shape[1], window.shape[0]
    group = heads // kv_heads
    grouped = q.reshape(m, kv_heads, group, 1, d, 1)
    k = keys[sequence][:, :, : w // KEY_TILE].float()
    v = values[sequence][:, :, :w].float()
    visible = window <= position[:, None, None]
    out = []
    for head in range(group):
        scores = (grouped[:, :, head] * k).sum(-2).reshape(m, kv_heads, w) * d**-0.5
        scores = torch.where(visible, scores, -float("inf"))
        weights = torch.exp(scores - scores.amax(-1, keepdim=True))
        out.append((weights[..., None] * v).sum(-2) / weights.sum(-1, keepdim=True))
    return torch.stack(out, 2).reshape(m, heads * d)


def attention_by_tiles(
    q: Tensor, keys: Tensor, values: Tensor, sequence: Tensor, position: Tensor, window: Tensor
) -> Tensor:
    """:func:`attention` for eager mode, where a sum over a longer buffer would group its terms in another way.

    Keys go in tiles of 32, added one after the other; the arguments and the result are the same.
    """
    m, heads, d = q.shape
    kv_heads = keys.shape[1]
    grouped = q.reshape(m, kv_heads, heads // kv_heads, d)
    tiles = range(0, window.shape[0], KEY_TILE)
    scores = []
    for start in tiles:
        k = keys[:, :, start // KEY_TILE][sequence][:, :, None].float()
        tile = (grouped[..., None] * k).sum(-2) * d**-0.5
        visible = window[start : start + KEY_TILE] <= position[:, None, None, None]
        scores.append(torch.where(visible, tile, -float("inf")))
    largest = torch.stack([tile.amax(-1, keepdim=True) for tile in scores]).amax(0)
    total = torch.zeros_like(largest)
    out = torch.zeros_like(grouped)
    for start, tile in zip(tiles, scores, strict=True):
        weights = torch.exp(tile - largest)
        v = values[:, :, start : start + KEY_TILE][sequence][:, :, None].float()
        total = total + weights.sum(-1, keepdim=True)
        out = out + (weights[..., None] * v).sum(-2)
    return (out / total).reshape(m, heads * d)


def token_logprob(logits: Tensor, ids: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Logprob of one token a row under ``softmax(logits / temperature)``: the one definition of a logprob.

    Args:
        logits: [M, V] float32.
        ids: [M] int64.
        temperature: [M] float32.

    Returns:
        logprob, logsumexp and entropy of the scaled logits, each [M] float32 (nats).
    """
    scaled = logits / temperature[:, None]
    largest = scaled.amax(-1, keepdim=True)
    weights = torch.exp(scaled - largest)
    total = weights.sum(-1)
    logsumexp = largest[:, 0] + torch.log(total)
    logprob = scaled.gather(-1, ids[:, None])[:, 0] - logsumexp
    entropy = logsumexp - (weights * scaled).sum(-1) / total
    return logprob, logsumexp, entropy


def sample_tokens(logits: Tensor, temperature: Tensor, uniform: Tensor, greedy: Tensor) -> tuple[Tensor, Tensor]:
    """Draw one token a row from ``softmax(logits / temperature)`` by inverting the cumulative distribution.

    Sums of 128 tokens are searched first, then the tokens of one of them, so that few values are added in float64.

    Args:
        logits: [M, V] float32.
        temperature: [M] float32.
        uniform: [M] float64 in [0, 1).
        greedy: [M] bool: take the largest logit instead.

    Returns:
        Tokens [M] int64, and the sum of exp(logit / temperature - largest) [M] float64, which is not finite where a logit
        is NaN or infinite. A token of probability 0 is never drawn.
    """
    m, vocabulary = logits.shape
    width = min(vocabulary, 128)
    scaled = logits / temperature[:, None]
    weights = torch.exp(scaled - scaled.amax(-1, keepdim=True))
    blocks = F.pad(weights, (0, -vocabulary % width)).reshape(m, -1, width)
    cumulative = blocks.sum(-1).double().cumsum(-1)
    total = cumulative[:, -1]
    # The product may be rounded up to the total, beyond which there is no token.
    target = torch.minimum(uniform * total, total * (1 - 2.0**-52))[:, None]
    block = (cumulative <= target).sum(-1, keepdim=True).clamp(max=blocks.shape[1] - 1)
    before = torch.where(block > 0, cumulative.gather(-1, (block - 1).clamp(min=0)), 0.0)
    inside = blocks.gather(1, block[..., None].expand(-1, -1, width))[:, 0].double()
    reached = before + inside.cumsum(-1) <= target
    # The two sums of a block differ in last bits: never go beyond its last token that has a weight.
    places = torch.arange(width, device=logits.device)
    last = torch.where(inside > 0, places, 0).amax(-1)
    drawn = block[:, 0] * width + torch.minimum(reached.sum(-1), last)
    return torch.where(greedy, logits.argmax(-1), drawn), total
