"""How a bucket gets to an engine in another process: through shared memory, a stream of bytes, or a GPU's memory.

The sender's side is a :class:`Channel`. A call to the engine carries the plain description that ``pack`` returns; what does
not fit into a description follows with ``push``. The other side has a :class:`Receiver`.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
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


class SharedMemorySender:
    """Packs what is whole to where it stays, and changes into two files in memory by turns.

    Each of two further files holds a whole version, one the last that came whole, the other the next: the receiver keeps the
    tensors where they are, so that nobody copies them again. A version that began and was never live leaves its file to the
    receiver, which may have taken it all the same. Of the files for changes one is filled while the receiver reads the other.

    The files have no names in any directory: a killed process leaves nothing behind, and a small ``/dev/shm`` (64 MB in
    many containers) is no limit. A receiver of the same user opens them through ``/proc`` while the sender lives.
    """

    def __init__(self) -> None:
        self._files = (_MemoryFile(), _MemoryFile())
        self._live, self._next = _MemoryFile(), _MemoryFile()
        self._filled: int | None = None  # bytes of the next version that lie in its file; None: it does not come whole

    def begin(self, manifest: Manifest, whole: bool) -> None:
        if self._filled is not None:
            self._next.close()
            self._next = _MemoryFile()
        self._filled = None
        if whole:
            self._next.grown_to(sum(_aligned(entry.nbytes) for entry in manifest.tensors))
            self._filled = 0

    def finished(self) -> None:
        if self._filled is not None:
            self._live, self._next = self._next, self._live
        self._filled = None

    def pack(self, bucket: Bucket) -> dict[str, Any]:
        stays = self._filled is not None and not bucket.packed
        if stays:
            assert self._filled is not None
            file, start = self._next, self._filled
        else:
            self._files = self._files[::-1]
            file, start = self._files[0], 0
        places, end = layout(bucket, start)
        buffer = file.grown_to(end)
        fill(buffer, bucket, places)
        if stays:
            self._filled = end
        about = {"path": file.path, "file": file.number, "size": buffer.numel(), "stays": stays}
        return {**about, "tensors": places, "packed": sorted(bucket.packed)}

    def push(self, bucket: Bucket) -> None:
        """Nothing is left: the bucket lies in shared memory."""

    def close(self) -> None:
        for file in (*self._files, self._live, self._next):
            file.close()


class _MemoryFile:
    """A file in memory, mapped."""

    def __init__(self) -> None:
        self._file: int | None = os.memfd_create("trtl-rl-refit")
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"
        self.number = os.fstat(self._file).st_ino  # a later file may get the same path
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def grown_to(self, size: int) -> Tensor:
        """At least ``size`` bytes, uint8 [n]."""
        if size > self._buffer.numel():
            assert self._file is not None, "the channel is closed"
            os.ftruncate(self._file, size)
            self._buffer = torch.from_file(self.path, shared=True, size=size, dtype=torch.uint8)
        return self._buffer

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file, self._buffer = None, torch.empty(0, dtype=torch.uint8)


def layout(bucket: Bucket, start: int = 0) -> tuple[list[Place], int]:
    """Where each tensor lies in a buffer (name, dtype, shape, first byte) from ``start`` on, and where the last one ends."""
    places: list[Place] = []
    end = start
    for name, tensor in bucket.tensors.items():
        places.append((name, dtype_name(tensor.dtype), list(tensor.shape), end))
        end += _aligned(tensor.nbytes)
    return places, end


def fill(buffer: Tensor, bucket: Bucket, places: list[Place]) -> None:
    """Copy a bucket's tensors to their places in ``buffer`` [size] uint8."""
    for (_, _, _, start), tensor in zip(places, bucket.tensors.values(), strict=True):
        buffer[start : start + tensor.nbytes].copy_(tensor_bytes(tensor))


def views(buffer: Tensor, description: Mapping[str, Any]) -> Bucket:
    """The tensors in ``buffer`` [size] uint8, without a copy."""
    tensors: dict[str, Tensor] = {}
    for name, dtype, shape, start in description["tensors"]:
        kind: torch.dtype = getattr(torch, dtype)
        count = int(torch.Size(shape).numel()) * kind.itemsize
        tensors[name] = buffer[start : start + count].view(kind).reshape(shape)
    return Bucket(tensors, frozenset(description["packed"]), description.get("stays", False))


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
