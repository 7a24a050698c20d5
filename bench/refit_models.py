"""Models of given sizes with random weights, and the version after, for benches of refits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from trtl_rl.model.description import LINEARS, DecoderDescription
from trtl_rl.model.weights import SCALE_SUFFIX, tensor_specs
from trtl_rl.recipe.coverage import Coverage, CoveredLinear
from trtl_rl.refit.shared_memory import VersionMemory

Tensors = dict[str, Tensor]


def sized(like: DecoderDescription, **sizes: Any) -> DecoderDescription:
    """A decoder of these sizes, without biases and norms of heads, with the formats of ``like``."""
    d = replace(like, **sizes, biases=(), qk_norm=False)
    q, kv, h, wide = d.heads * d.head_dim, d.kv_heads * d.head_dim, d.hidden, d.intermediate
    shapes = dict(zip(LINEARS, ((q, h), (kv, h), (kv, h), (h, q), (wide, h), (wide, h), (h, wide)), strict=True))
    format = like.format(like.linear_name(0, "q_proj"))
    linears = [CoveredLinear(d.linear_name(i, role), shapes[role], format) for i in range(d.layers) for role in LINEARS]
    linears.append(CoveredLinear("lm_head", (d.vocab, h), like.format("lm_head")))
    frequencies = tuple(1.0 / 10000 ** (i / d.head_dim) for i in range(0, d.head_dim, 2))
    coverage = Coverage(tuple(sorted(linears, key=lambda item: item.name)))
    return replace(d, coverage=coverage, inverse_frequencies=frequencies)


def grown(like: DecoderDescription, layers: int, hidden: int, vocab: int) -> DecoderDescription:
    """A decoder as wide as it is usual for so many layers."""
    heads: dict[str, int] = {"heads": hidden // 64, "kv_heads": hidden // 64, "head_dim": 64}
    return sized(like, layers=layers, hidden=hidden, intermediate=4 * hidden, vocab=vocab, **heads)


def random_version(description: DecoderDescription) -> Tensors:
    """Codes and scales drawn at once."""
    out: Tensors = {}
    for spec in tensor_specs(description):
        if spec.name.endswith(SCALE_SUFFIX):
            out[spec.name] = torch.rand(spec.shape) + 0.5
        else:
            kind = torch.uint8 if spec.dtype == torch.float8_e4m3fn else torch.int16
            out[spec.name] = torch.randint(0, 0x7E, spec.shape, dtype=kind).view(spec.dtype)
    return out


def changed(tensors: Tensors, share: float) -> Tensors:
    """The version after: about ``share`` of the FP8 codes differs in the lowest bit."""
    new = dict(tensors)
    for name, tensor in tensors.items():
        if tensor.dtype == torch.float8_e4m3fn:
            codes = tensor.view(torch.uint8).clone()
            codes[torch.rand(codes.shape) < share] ^= 1
            new[name] = codes.view(tensor.dtype)
    return new


def in_shared_memory(tensors: Tensors, memory: VersionMemory) -> Tensors:
    """The same values where a learner writes them."""
    kept = memory.take((name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items())
    return {name: kept[name].copy_(tensor) for name, tensor in tensors.items()}
