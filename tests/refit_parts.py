"""Small versions of three tensors, and how tests of refits change and deliver them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from trtl_rl.model.weights import SCALE_SUFFIX, TensorSpec
from trtl_rl.refit import delta
from trtl_rl.refit.manifest import Bucket, Manifest, tensor_bytes
from trtl_rl.refit.receiver import RefitReceiver
from trtl_rl.refit.sender import Sent

E4M3 = torch.float8_e4m3fn
WEIGHT = "model.layers.0.mlp.up_proj.weight"
SCALE = WEIGHT + SCALE_SUFFIX
NORM = "model.norm.weight"
SPECS = [
    TensorSpec(WEIGHT, E4M3, (256, 384)),
    TensorSpec(SCALE, torch.float32, (2, 3)),
    TensorSpec(NORM, torch.bfloat16, (384,)),
]


def payload(seed: int = 0) -> dict[str, Tensor]:
    """One version of the three tensors in SPECS."""
    generator = torch.Generator().manual_seed(seed)
    return {
        WEIGHT: torch.randn(256, 384, generator=generator).to(E4M3),
        SCALE: torch.rand(2, 3, generator=generator) + 0.1,
        NORM: torch.randn(384, generator=generator).bfloat16(),
    }


def sent(tensors: Mapping[str, Tensor], version: int = 1, coverage: str = "recipe") -> Sent:
    """What a sender knows after it sent ``tensors``."""
    return Sent(tensors, Manifest.of(tensors, version, coverage))


def receiver() -> RefitReceiver:
    return RefitReceiver(SPECS, "recipe")


def deliver(target: RefitReceiver, tensors: dict[str, Tensor], announced: dict[str, Tensor] | None = None) -> None:
    target.begin(Manifest.of(tensors if announced is None else announced, 1, "recipe"))
    target.write(Bucket(tensors))
    target.check()
    target.finish()


def flipped(tensor: Tensor, at: int = 7) -> Tensor:
    """The same tensor with one bit of one byte flipped."""
    data = tensor_bytes(tensor).clone()
    data[at] ^= 1
    return data.view(tensor.dtype).reshape(tensor.shape)


def edited(tensor: Tensor, share: float, seed: int = 0) -> Tensor:
    """A copy in which about ``share`` of the elements have other bits; no finite value becomes NaN."""
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]
    bits = tensor_bytes(tensor).clone().view(words)
    chosen = torch.rand(bits.shape, generator=torch.Generator().manual_seed(seed)) < share
    bits[chosen] ^= torch.where(bits & 1 == 1, 1, 2).to(words)[chosen]
    return bits.view(tensor.dtype).reshape(tensor.shape)


def changes(new: Mapping[str, Tensor], old: Mapping[str, Tensor]) -> Bucket:
    """A delta between two versions as one bucket."""
    tensors: dict[str, Tensor] = {}
    packed = set()
    for name, tensor in new.items():
        count, small = delta.pack(tensor, old[name])
        if small is not None:
            packed.add(name)
        if count:
            tensors[name] = tensor if small is None else small
    return Bucket(tensors, frozenset(packed & tensors.keys()))
