"""The trainer's end of a child's second connection: a refit's calls and weights, beside everything else that it does."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import struct
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

from trtl_rl.errors import EngineError, RefitError
from trtl_rl.refit.channel import ChannelName, open_channel
from trtl_rl.refit.manifest import Bucket, Manifest


class RefitLine:
    """Calls in order, for one thread. While the child reads a bucket, the next is packed.

    Args:
        connection: A connected socket, which this closes. A stream's buckets follow their calls on it.
        timeout: Seconds for each send and each answer; then TimeoutError is raised, and EOFError or OSError when the child is gone.
    """

    def __init__(self, connection: socket.socket, channel: ChannelName, timeout: float) -> None:
        self._socket = connection
        self.set_timeout(timeout)
        self._connection = Connection(os.dup(connection.fileno()))
        self._channel = open_channel(channel, connection)
        self._numbers = itertools.count()
        self._writing: int | None = None
        self._broken = False

    def set_timeout(self, timeout: float) -> None:
        limit = struct.pack("@ll", int(timeout), int(timeout % 1 * 1e6))
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            self._socket.setsockopt(socket.SOL_SOCKET, option, limit)

    def call(self, method: str, **parameters: Any) -> Any:
        """Ask and wait for the answer, and for that of a bucket that is under way. Raises the child's error."""
        if method == "abort_refit":
            self._writing = None  # whatever became of it
        self.await_write()
        return self._answer(self._start(method, **parameters))

    def begin(self, manifest: Manifest) -> bool:
        """Open a version; returns whether changes to its base will do."""
        takes_changes = bool(self.call("begin_refit", manifest=manifest.to_json()))
        self._channel.begin(manifest, whole=not takes_changes)
        return takes_changes

    def finished(self) -> None:
        """The version is live."""
        self._channel.finished()

    def write(self, bucket: Bucket) -> None:
        """Send a bucket. Its error, if there is one, is raised by the next call."""
        description = self._channel.pack(bucket)
        self.await_write()
        self._writing = self._start("write", bucket=description)
        with self._sending():
            self._channel.push(bucket)

    def hang_up(self) -> None:
        """End a call that another thread is in. Safe to call twice."""
        with contextlib.suppress(OSError):  # closed before
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.hang_up()
        self._connection.close()
        self._socket.close()
        self._channel.close()

    def await_write(self) -> None:
        """Take the answer of the bucket that is under way, if one is. Raises its error."""
        number, self._writing = self._writing, None
        if number is not None:
            self._answer(number)

    def _start(self, method: str, **parameters: Any) -> int:
        number = next(self._numbers)
        with self._sending():
            data = {"id": number, "method": method, "parameters": parameters}
            self._connection.send_bytes(json.dumps(data).encode())
        return number

    @contextlib.contextmanager
    def _sending(self) -> Iterator[None]:
        """A part of what could not be sent in time is in the socket, so nothing may follow."""
        if self._broken:
            raise TimeoutError
        try:
            yield
        except BlockingIOError:
            self._broken = True
            raise TimeoutError from None

    def _answer(self, number: int) -> Any:
        while True:
            try:
                answer = json.loads(self._connection.recv_bytes())
            except BlockingIOError:
                raise TimeoutError from None
            if answer["id"] == number:  # others came after their callers gave up
                break
        if "error" in answer:
            kind = RefitError if answer["error"] == "RefitError" else EngineError
            raise kind(answer["text"], repeats=answer["repeats"])
        return answer["result"]
