"""How a bucket gets to an engine in another process: through shared memory, a stream of bytes, or a GPU's memory.

The sender's side is a :class:`Channel`. A call to the engine carries the plain description that ``pack`` returns; what does
not fit into a description follows with ``push``. The other side has a :class:`Receiver`.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor

from trtl_rl.refit.manifest import Bucket, Manifest, dtype_name, tensor_bytes

if TYPE_CHECKING:
    from trtl_rl.refit.stream import Readable

ChannelName = Literal["shared_memory", "stream", "cuda_ipc"]
Place = tuple[str, str, list[int], int]

_ALIGN = 64


class Channel(Protocol):
    """Carries buckets in order. The receiver has copied a bucket before the next but one is packed, unless it stays."""

    def begin(self, manifest: Manifest, whole: bool) -> None:
        """A version follows; ``whole`` says that all of its tensors do."""

    def finished(self) -> None:
        """The version that began is live on the other side."""

    def pack(self, bucket: Bucket) -> dict[str, Any]:
        """Prepare a bucket; returns the description that goes to the engine with the call."""

    def push(self, bucket: Bucket) -> None:
        """Send the rest, after the call."""

    def close(self) -> None:
        """Release everything. Safe to call twice."""


def open_channel(name: ChannelName, connection: socket.socket) -> Channel:
    """The sender's end; ``connection`` is the socket on which calls go, and a stream's bytes after them."""
    if name == "stream":
        from trtl_rl.refit.stream import StreamSender

        return StreamSender(connection)
    if name == "cuda_ipc":
        from trtl_rl.refit.cuda_ipc import CudaIpcSender

        return CudaIpcSender()
    from trtl_rl.refit.shared_memory import SharedMemorySender

    return SharedMemorySender()


class Receiver:
    """The engine's end of any channel.

    Args:
        stream: Where a stream's bytes come from, unbuffered.
    """

    def __init__(self, stream: Readable) -> None:
        self._stream = stream
        self._mapped: dict[str, tuple[int, Tensor]] = {}  # path → which file that was, its memory

    def receive(self, description: Mapping[str, Any]) -> Bucket:
        """The bucket that was packed; its tensors may be views of the sender's memory."""
        if not description:
            from trtl_rl.refit.stream import read_frame

            return read_frame(self._stream)
        if "handle" in description:
            from trtl_rl.refit import cuda_ipc

            return cuda_ipc.unpack(description)
        path, size = description["path"], description["size"]
        file, memory = self._mapped.get(path, (None, None))
        if memory is None or file != description["file"] or memory.numel() != size:  # mapping costs as much as a copy
            memory = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
            self._mapped[path] = description["file"], memory
        return views(memory, description)


def layout(bucket: Bucket) -> tuple[list[Place], int]:
    """Where each tensor lies in a buffer (name, dtype, shape, first byte), and where the last one ends."""
    places: list[Place] = []
    end = 0
    for name, tensor in bucket.tensors.items():
        places.append((name, dtype_name(tensor.dtype), list(tensor.shape), end))
        end += aligned(tensor.nbytes)
    return places, end


def fill(buffer: Tensor, bucket: Bucket, places: list[Place]) -> None:
    """Copy a bucket's tensors to their places in ``buffer`` [size] uint8."""
    for (_, _, _, start), tensor in zip(places, bucket.tensors.values(), strict=True):
        buffer[start : start + tensor.nbytes].copy_(tensor_bytes(tensor))


def views(buffer: Tensor, description: Mapping[str, Any]) -> Bucket:
    """The tensors in ``buffer`` [size] uint8, without a copy."""
    tensors = {
        name: view(buffer, getattr(torch, dtype), shape, start) for name, dtype, shape, start in description["tensors"]
    }
    return Bucket(tensors, frozenset(description["packed"]), description.get("stays", False))


def view(buffer: Tensor, dtype: torch.dtype, shape: Sequence[int], start: int) -> Tensor:
    """The tensor that begins at byte ``start`` of ``buffer`` [size] uint8, without a copy."""
    return buffer[start : start + math.prod(shape) * dtype.itemsize].view(dtype).reshape(tuple(shape))


def aligned(size: int) -> int:
    """Bytes from the start of a tensor to that of the next."""
    return -(-size // _ALIGN) * _ALIGN
