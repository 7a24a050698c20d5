"""Name the module whose output first holds NaN or infinite values.

A forward pass is checked at its end only, on a few values a row. When they are not finite, the pass is repeated module by
module, in eager operators, to find out where that began.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from trtl_rl.kernels import ops
from trtl_rl.kernels.linear import project
from trtl_rl.model.description import LINEARS
from trtl_rl.model.kv import Rows
from trtl_rl.model.layer import Attend
from trtl_rl.model.operand import Operand
from trtl_rl.model.weights import DecoderWeights, LayerWeights


def is_finite(hidden: Tensor, *outputs: Tensor) -> bool:
    """Whether a pass went well.

    Args:
        hidden: States before the final norm, [M, hidden] float32. Their squares count too: where those overflow, a norm
            returns zeros, which are finite and wrong.
        outputs: What was computed of them, of any shape.
    """
    # Two cheap operators in nearly every case: what is not finite makes a sum so.
    hidden, outputs = hidden.detach(), tuple(output.detach() for output in outputs)
    totals = [torch.linalg.vector_norm(hidden), *[output.sum() for output in outputs]]
    if all(math.isfinite(total.item()) for total in totals):
        return True
    return all(bool(value.isfinite().all()) for value in (_squares(hidden), *outputs))


@torch.no_grad()
def first_not_finite(weights: DecoderWeights, passes: Sequence[Rows], attend: Attend) -> str:
    """Checkpoint name of the first module that gives NaN or infinite values.

    Args:
        passes: The rows of one forward pass, or of several one after the other.
        attend: As for ``decoder_layer``.
    """
    for rows in passes:
        for name, value in _outputs(weights, attend, rows):
            if not bool(value[: rows.count].isfinite().all()):
                return name
    return "lm_head"  # everything before it is finite


def _outputs(weights: DecoderWeights, attend: Attend, rows: Rows) -> Iterator[tuple[str, Tensor]]:
    """Every module's name and output [M, ...] in the order of computation, up to the final norm."""
    x = F.embedding(rows.ids, weights.embedding)
    yield "model.embed_tokens", x
    for layer in weights.layers:
        for name, value in _layer(x, layer, attend, rows):
            yield f"model.layers.{layer.index}{name}", value
            x = value if name == "" else x
    yield "model.norm", _squares(x)


def _layer(x: Tensor, layer: LayerWeights, attend: Attend, rows: Rows) -> Iterator[tuple[str, Tensor]]:
    """The same for one layer: names without its prefix; residuals have none."""
    s = layer.spec
    m = x.shape[0]
    yield ".input_layernorm", _squares(x)
    normal = ops.rms_norm(x, layer.input_norm, s.eps)
    yield ".input_layernorm", normal
    y = _project(normal, layer.qkv)
    sizes = (s.heads * s.head_dim, s.kv_heads * s.head_dim, s.kv_heads * s.head_dim)
    parts = y.split(sizes, -1)
    for role, part in zip(LINEARS[:3], parts, strict=True):
        yield f".self_attn.{role}", part
    q, k, v = (part.reshape(m, -1, s.head_dim) for part in parts)
    if s.qk_norm:
        yield ".self_attn.q_norm", _squares(q)
        yield ".self_attn.k_norm", _squares(k)
        q, k = ops.rms_norm(q, layer.q_norm, s.eps), ops.rms_norm(k, layer.k_norm, s.eps)
    attended = attend(layer, ops.rope(q, rows.cos, rows.sin), ops.rope(k, rows.cos, rows.sin), v.contiguous(), rows)
    yield ".self_attn", attended
    y = _project(attended, [layer.o])
    yield ".self_attn.o_proj", y
    x = x + y
    yield "", x
    yield ".post_attention_layernorm", _squares(x)
    normal = ops.rms_norm(x, layer.post_norm, s.eps)
    yield ".post_attention_layernorm", normal
    wide = _project(normal, layer.gate_up)
    gate, up = wide.chunk(2, -1)
    yield ".mlp.gate_proj", gate
    yield ".mlp.up_proj", up
    product = ops.silu_mul(wide)
    yield ".mlp.act_fn", product
    y = _project(product, [layer.down])
    yield ".mlp.down_proj", y
    yield "", x + y


def _project(x: Tensor, operands: Sequence[Operand]) -> Tensor:
    tensors = [tensor for operand in operands for tensor in operand.tensors()]
    return project(x, [operand.spec for operand in operands], tensors)[0]


def _squares(x: Tensor) -> Tensor:
    """What a norm takes the root of, up to a factor: sums over the last dimension."""
    return x.square().sum(-1)
