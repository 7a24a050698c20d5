"""The child of ``HostedEngine``: serves calls between decode steps, and those of a refit beside them.

One thread generates and answers; another receives, checks and decodes the weights of a refit. Only the swap to a new version
takes place between two steps.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from trtl_rl.engines.engine import InFlight
from trtl_rl.engines.host import HEARTBEAT
from trtl_rl.errors import EngineError, UserError
from trtl_rl.refit.channel import Receiver
from trtl_rl.refit.manifest import Manifest
from trtl_rl.rollout import Request

if TYPE_CHECKING:
    from trtl_rl.engines.backends import Backend
    from trtl_rl.kernels.kernel_set import KernelSet
    from trtl_rl.model.description import DecoderDescription


class Child:
    """The other side of a host.

    Args:
        connection: For everything but refits.
        refits: For refits; the host's ``RefitLine``.
    """

    def __init__(self, connection: Connection, refits: socket.socket) -> None:
        self._connection = connection
        self._refits = Connection(os.dup(refits.fileno()))
        self._receiver = Receiver(refits.makefile("rb", buffering=0))  # what follows a bucket is the next message
        self._engine: Any = None  # a RolloutEngine that is stepped: see backends.py
        self._kernels: KernelSet | None = None
        self._description: DecoderDescription | None = None
        self._waiting_pause: list[int] = []
        self._sent = self._told = 0.0  # when this said anything, and how far unfinished requests have got
        self._beside = threading.Lock()  # held by the thread of refits while it works
        self._refit_error: BaseException | None = None

    def serve(self) -> None:
        """Until the trainer hangs up, which ends this with EOFError."""
        threading.Thread(target=self._serve_refits, name="refit", daemon=True).start()
        while True:
            engine = self._engine
            working = engine is not None and engine.has_work()
            if self._connection.poll(0 if working else HEARTBEAT):
                self._handle(json.loads(self._connection.recv_bytes()))
            elif engine is not None and working:
                engine.step()
            self._report()

    def close(self) -> None:
        """End processes that the engine has started."""
        if self._engine is not None:
            with contextlib.suppress(Exception):  # why this ends was said before
                self._engine.close()

    def _serve_refits(self) -> None:
        try:
            while True:
                message = json.loads(self._refits.recv_bytes())
                with self._beside, self._without_lock():
                    self._refits.send_bytes(json.dumps(self._result(message)).encode())
                    if self._engine is not None and self._engine.refit.arrived:
                        self._engine.refit.decode()  # while the trainer may wait for unfinished completions
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return  # the trainer is gone
        except BaseException as error:
            self._refit_error = error

    @contextlib.contextmanager
    def _without_lock(self) -> Iterator[None]:
        """Meanwhile generation leaves Python's lock to the thread of refits."""
        kernels = self._kernels
        if kernels is None:
            yield
            return
        kernels.gil_free = True
        try:
            yield
        finally:
            kernels.gil_free = False

    def _report(self) -> None:
        """Say what has finished, or from time to time just that this lives."""
        if self._refit_error is not None:
            raise self._refit_error
        engine = self._engine
        done = engine.take_done() if engine is not None else []
        now = time.monotonic()
        if done or now - self._sent > HEARTBEAT:
            busy = engine.busy_seconds if engine is not None else 0.0
            message = {"completions": [asdict(completion) for completion in done], "busy_seconds": busy}
            if engine is not None and now - self._told > HEARTBEAT:
                message["progress"] = list(engine.progress().items())
                self._told = now
            self._send(message)
        if engine is not None and self._waiting_pause and engine.unfinished == 0:
            engine.pause("continue")
            for number in self._waiting_pause:
                self._send({"id": number, "result": None})
            self._waiting_pause = []

    def _handle(self, message: dict[str, Any]) -> None:
        engine = self._engine
        pauses = message["method"] == "pause" and message["parameters"]["policy"] == "finish"
        if pauses and engine is not None and engine.unfinished:
            engine.drain()  # answered when the last completion has ended
            self._waiting_pause.append(message["id"])
            return
        self._send(self._result(message))

    def _result(self, message: dict[str, Any]) -> dict[str, Any]:
        """Do what a message asks for; returns the answer."""
        number = message["id"]
        try:
            return {"id": number, "result": getattr(self, f"_do_{message['method']}")(**message["parameters"])}
        except (UserError, EngineError) as error:
            repeats = isinstance(error, EngineError) and error.repeats
            return {"id": number, "error": type(error).__name__, "text": str(error), "repeats": repeats}

    def _do_configure(self, backend: Backend, description: dict[str, Any], **rest: Any) -> dict[str, Any]:
        from trtl_rl.engines.backends import make_engine
        from trtl_rl.model.description import DecoderDescription

        self._description = DecoderDescription.from_json(description)
        made = make_engine(backend, description, **rest)
        self._engine, self._kernels = made.engine, made.kernels
        return made.about

    def _do_load(self, directory: str) -> dict[str, Any]:
        from trtl_rl.engines.directory import EngineDirectory

        return asdict(EngineDirectory.open(directory).load_into(self._running(), self._description))

    def _do_quantiser(self, seed: int, rows: int, columns: int) -> Any:
        return self._running().quantiser(seed, rows, columns)

    def _do_coverage(self) -> Any:
        return self._running().coverage().to_json()

    def _do_submit(self, requests: list[dict[str, Any]]) -> None:
        from trtl_rl.rollout import Sampling

        self._running().submit(
            [
                Request(**{**fields, "sampling": Sampling(**fields["sampling"]), "seed": tuple(fields["seed"])})
                for fields in requests
            ]
        )

    def _do_cancel(self, ids: list[int]) -> None:
        self._running().cancel(ids)

    def _do_pause(self, policy: InFlight) -> None:
        self._running().pause(policy)

    def _do_resume(self) -> None:
        self._running().resume()

    def _do_begin_refit(self, manifest: dict[str, Any]) -> bool:
        return bool(self._running().begin_refit(Manifest.from_json(manifest)))

    def _do_write(self, bucket: dict[str, Any]) -> None:
        if bucket and hasattr(type(self._engine), "write_packed"):
            self._running().write_packed(bucket)  # its workers read the trainer's memory themselves
            return
        received = self._receiver.receive(bucket)  # whatever follows: nothing of it may stay in a stream
        self._running().write(received)

    def _do_decode_refit(self) -> None:
        self._running().refit.decode()

    def _do_finish_refit(self) -> dict[str, Any]:
        with self._beside:
            return asdict(self._running().finish_refit())

    def _do_abort_refit(self) -> None:
        self._running().abort_refit()

    def _running(self) -> Any:
        if self._engine is None:
            raise EngineError("The engine was not configured yet.")
        return self._engine

    def _send(self, message: dict[str, Any]) -> None:
        self._connection.send_bytes(json.dumps(message).encode())
        self._sent = time.monotonic()


def main() -> None:
    """Serve the trainer with as many threads as the first argument says, over the sockets whose numbers follow."""
    import traceback

    import torch

    torch.set_num_threads(int(sys.argv[1]))
    connection = Connection(int(sys.argv[2]))
    child = Child(connection, socket.socket(fileno=int(sys.argv[3])))
    try:
        child.serve()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the trainer is gone
    except BaseException as error:
        traceback.print_exc()
        repeats = isinstance(error, EngineError) and error.repeats
        failed = {"failed": f"{type(error).__name__}: {error}", "repeats": repeats}
        connection.send_bytes(json.dumps(failed).encode())
        raise
    finally:
        child.close()


if __name__ == "__main__":
    main()
