"""``decoder_layer``: the only forward of Qwen2, Qwen3 and Llama, for training, prefill and decoding alike."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from trtl_rl.model.kv import KeyValueBuffers, Rows
from trtl_rl.model.weights import DecoderWeights, LayerWeights


class Attend(Protocol):
    """Stores the rows' keys and values and attends to them: a buffer of slots, or of training sequences."""

    def __call__(self, layer: LayerWeights, q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> Tensor: ...


def decoder_layer(x: Tensor, layer: LayerWeights, attend: Attend, rows: Rows) -> Tensor:
    """One layer over rows of any sequences: [M, hidden] → [M, hidden] float32.

    With gradients enabled the same units run inside autograd functions, which keep what the units return for backward.
    """
    from trtl_rl.kernels import autograd

    if torch.is_grad_enabled():
        q, k, v = autograd.before_attention(x, layer, rows)
        return autograd.after_attention(x, attend(layer, q, k, v, rows), layer)
    q, k, v = layer.units.before([x, *layer.before_weights(), rows.cos, rows.sin])[:3]
    return layer.units.after([x, attend(layer, q, k, v, rows), *layer.after_weights()])[0]


def forward_rows(weights: DecoderWeights, buffers: KeyValueBuffers, rows: Rows) -> Tensor:
    """Hidden states of ``rows`` before the final norm, [M, hidden] float32, without gradients (an engine's forward)."""

    def attend(layer: LayerWeights, q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> Tensor:
        return buffers.attend(layer.index, layer.units, q, k, v, rows)

    x = F.embedding(rows.ids, weights.embedding)
    for layer in weights.layers:
        x = decoder_layer(x, layer, attend, rows)
    return x


def head_logits(weights: DecoderWeights, x: Tensor) -> Tensor:
    """Logits [M, V] float32 of hidden states [M, hidden], M a multiple of the row tile."""
    return weights.head_units.head([x, weights.norm, *weights.head.tensors()])[0]
