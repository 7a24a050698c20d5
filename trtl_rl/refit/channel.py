"""A shared-memory channel for buckets: the sender packs bytes, the receiver sees tensors without a copy."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trtl_rl.refit.manifest import Bucket, dtype_name, tensor_bytes

_ALIGN = 64


class SharedMemorySender:
    """Owns a file in memory that grows to the largest bucket; each bucket overwrites the one before.

    The file has no name in any directory: a killed process leaves nothing behind, and a small ``/dev/shm`` (64 MB in
    many containers) is no limit. A receiver of the same user opens it through ``/proc`` while the sender lives.
    """

    def __init__(self) -> None:
        self._file: int | None = os.memfd_create("trtl-rl-refit")
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def pack(self, bucket: Bucket) -> dict[str, Any]:
        """Write a bucket; returns the plain description from which :func:`unpack` finds its tensors."""
        places: list[tuple[str, str, list[int], int]] = []
        size = 0
        for name, tensor in bucket.tensors.items():
            places.append((name, dtype_name(tensor.dtype), list(tensor.shape), size))
            size += -(-tensor.nbytes // _ALIGN) * _ALIGN
        if size > self._buffer.numel():
            assert self._file is not None, "the channel is closed"
            os.ftruncate(self._file, size)
            self._buffer = torch.from_file(self.path, shared=True, size=size, dtype=torch.uint8)
        for (_, _, _, start), tensor in zip(places, bucket.tensors.values(), strict=True):
            self._buffer[start : start + tensor.nbytes].copy_(tensor_bytes(tensor))
        return {"path": self.path, "size": size, "tensors": places}

    def close(self) -> None:
        """Give the memory back. Safe to call twice."""
        if self._file is not None:
            os.close(self._file)
            self._file, self._buffer = None, torch.empty(0, dtype=torch.uint8)


def unpack(description: Mapping[str, Any]) -> Bucket:
    """The bucket that was packed, as views of shared memory: valid until the sender packs the next."""
    buffer = torch.from_file(description["path"], shared=True, size=description["size"], dtype=torch.uint8)
    tensors: dict[str, Tensor] = {}
    for name, dtype, shape, start in description["tensors"]:
        kind: torch.dtype = getattr(torch, dtype)
        count = int(torch.Size(shape).numel()) * kind.itemsize
        tensors[name] = buffer[start : start + count].view(kind).reshape(shape)
    return Bucket(tensors)
