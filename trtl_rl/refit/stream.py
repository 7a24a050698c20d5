"""A stream of bytes as channel: for an engine that shares no memory with the trainer, as on another machine.

A frame is one bucket: the length of its description (8 bytes, little-endian), the description (JSON), then the tensors'
bytes one after the other. Any ordered stream will do: sockets, pipes, files, bytes that something else carries.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Callable
from typing import Any, Protocol

import torch

from trtl_rl.refit.channel import fill, layout, views
from trtl_rl.refit.manifest import Bucket, Manifest

_LENGTH = struct.Struct("<Q")
_LONGEST_DESCRIPTION = 2**26


class Readable(Protocol):
    """A binary file that fills a buffer with what there is, and returns how many bytes that was; 0 at its end."""

    def readinto(self, buffer: memoryview, /) -> int | None: ...


class StreamSender:
    """Implements ``Channel`` over a connected socket, which stays its owner's."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def begin(self, manifest: Manifest, whole: bool) -> None:
        """The same for every version."""

    def finished(self) -> None:
        """Nothing of it is kept here."""

    def pack(self, bucket: Bucket) -> dict[str, Any]:
        """Nothing but that a frame follows."""
        return {}

    def push(self, bucket: Bucket) -> None:
        write_frame(self._connection.sendall, bucket)

    def close(self) -> None:
        """The socket is closed by its owner."""


def write_frame(write: Callable[[memoryview], object], bucket: Bucket) -> None:
    """Write a bucket with ``write``, which takes all that it is given (``socket.sendall``, ``write`` of a buffered file)."""
    places, size = layout(bucket)
    about = json.dumps({"tensors": places, "size": size, "packed": sorted(bucket.packed)}).encode()
    buffer = torch.zeros(size, dtype=torch.uint8)
    fill(buffer, bucket, places)
    write(memoryview(_LENGTH.pack(len(about)) + about))
    if size:
        write(buffer.numpy().data)


def read_frame(file: Readable) -> Bucket:
    """The next bucket of a stream, in memory of its own. Raises EOFError where the stream ends."""
    (length,) = _LENGTH.unpack(_read(file, memoryview(bytearray(_LENGTH.size))))
    if length > _LONGEST_DESCRIPTION:
        raise EOFError("The stream of a refit holds no frame where one should begin.")
    about = json.loads(bytes(_read(file, memoryview(bytearray(length)))))
    buffer = torch.empty(about["size"], dtype=torch.uint8)
    if about["size"]:
        _read(file, buffer.numpy().data)
    return views(buffer, about)


def _read(file: Readable, into: memoryview) -> memoryview:
    filled = 0
    while filled < len(into):
        count = file.readinto(into[filled:])
        if not count:
            raise EOFError("The stream of a refit ended within a frame.")
        filled += count
    return into
