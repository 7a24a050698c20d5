"""What a refit says before it sends: every tensor of a version with its dtype, shape and digest."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch import Tensor


@dataclass(frozen=True)
class TensorEntry:
    """One tensor in the checkpoint's layout: ``dtype`` as torch names it (``float8_e4m3fn``), digest of its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: str

    @property
    def nbytes(self) -> int:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return math.prod(self.shape) * dtype.itemsize


@dataclass(frozen=True)
class Manifest:
    """A whole version.

    Attributes:
        version: The weight version that the engine will be at.
        coverage: Digest of the expanded recipe; both sides must run the same.
        tensors: Every tensor of the version, in name order, whether it will be sent or not.
        base: Digest of the version whose tensors the sender counts on, or None where it will send all of them.
    """

    version: int
    coverage: str
    tensors: tuple[TensorEntry, ...]
    base: str | None = None

    @classmethod
    def of(
        cls, tensors: Mapping[str, Tensor], version: int, coverage: str, known: Mapping[str, str] | None = None
    ) -> Manifest:
        """Describe a version.

        Args:
            known: Digests of tensors that need not be read again.
        """
        known = known or {}
        entries = (
            TensorEntry(name, dtype_name(tensor.dtype), tuple(tensor.shape), known.get(name) or tensor_digest(tensor))
            for name, tensor in sorted(tensors.items())
        )
        return cls(version, coverage, tuple(entries))

    @property
    def digest(self) -> str:
        """One hash over the tensors' digests in name order."""
        return joined_digest(self.digests)

    @property
    def digests(self) -> dict[str, str]:
        """Each tensor's digest by its name."""
        return {entry.name: entry.digest for entry in self.tensors}

    def to_json(self) -> dict[str, Any]:
        rows = [[entry.name, entry.dtype, list(entry.shape), entry.digest] for entry in self.tensors]
        return {"version": self.version, "coverage": self.coverage, "tensors": rows, "base": self.base}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Manifest:
        entries = (TensorEntry(name, dtype, tuple(shape), digest) for name, dtype, shape, digest in data["tensors"])
        return cls(data["version"], data["coverage"], tuple(entries), data["base"])


@dataclass(frozen=True)
class Bucket:
    """Some of a manifest's tensors; the receiver copies what it keeps, unless they stay.

    Attributes:
        tensors: Whole tensors, and what :func:`trtl_rl.refit.delta.pack` made of others.
        packed: Names of the latter.
        stays: Their memory is not written to while they belong to the version that is live, or to the one that is to be live
            next: the receiver may keep them as they are.
    """

    tensors: Mapping[str, Tensor]
    packed: frozenset[str] = frozenset()
    stays: bool = False


@dataclass(frozen=True)
class RefitResult:
    """What a finished refit reports.

    Attributes:
        digest: Joined digest of the version's tensors as the engine holds them.
        decode_seconds: Time to decode codes into operands, beside generation.
        pause_seconds: Time that generation stood still for the version to become live.
    """

    version: int
    digest: str
    decode_seconds: float
    pause_seconds: float


def buckets(tensors: Mapping[str, Tensor], size: int, packed: frozenset[str] = frozenset()) -> Iterator[Bucket]:
    """Split tensors into buckets of at most ``size`` bytes, or one tensor where that is larger.

    A weight and its scale are neighbours in name order, but need not share a bucket: the engine loads whole versions.
    """
    part: dict[str, Tensor] = {}
    filled = 0
    for name, tensor in sorted(tensors.items()):
        if part and filled + tensor.nbytes > size:
            yield Bucket(part, packed & part.keys())
            part, filled = {}, 0
        part[name] = tensor
        filled += tensor.nbytes
    if part:
        yield Bucket(part, packed & part.keys())


def tensor_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, uint8 [n], without a copy when it is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def tensor_digest(tensor: Tensor) -> str:
    """Hash of a tensor's bytes in row-major order."""
    return xxhash.xxh3_128_hexdigest(tensor_bytes(tensor).cpu().numpy().data)


def joined_digest(digests: Mapping[str, str]) -> str:
    """One hash for a whole version: the tensors' digests in name order."""
    lines = (f"{name} {digests[name]}" for name in sorted(digests))
    return xxhash.xxh3_128_hexdigest("\n".join(lines).encode())


def dtype_name(dtype: torch.dtype) -> str:
    """``float8_e4m3fn``, ``bfloat16`` and so on."""
    return str(dtype).removeprefix("torch.")
