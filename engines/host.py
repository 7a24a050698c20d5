"""An engine in a process of its own: ``HostedEngine`` here, ``python -m trtl_rl.engines.child`` there.

What crosses is plain: JSON messages over two socket pairs, one of them for refits, and weights through a channel (shared
memory, by default). The child is started by module name, so a user's script needs no ``__main__`` guard. Every call has a
time limit, and a dead or silent child raises with the last lines of its own log: between steps and when it has nothing to
do, a child says every second that it lives.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import queue
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from trtl_rl.engines.backends import Backend
from trtl_rl.engines.engine import InFlight
from trtl_rl.engines.environment import variables
from trtl_rl.engines.refit_line import RefitLine
from trtl_rl.engines.unanswered import Unanswered
from trtl_rl.errors import EngineError, RefitError, UserError
from trtl_rl.recipe.coverage import Coverage
from trtl_rl.refit.channel import ChannelName
from trtl_rl.refit.manifest import Bucket, Manifest, RefitResult
from trtl_rl.rollout import Completion, Request

_ERRORS = {"UserError": UserError, "RefitError": RefitError}
HEARTBEAT = 1.0  # seconds
CHILD = "trtl_rl.engines.child"

# glibc keeps what a step or a refit gives back, instead of returning it to the system and taking it anew, page by page.
MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**40)}


class HostedEngine:
    """Implements ``RolloutEngine`` by a child process that runs the embedded engine. Methods may be called by any thread.

    Probes have negative request ids; their completions never mix with those of ``poll``.

    Args:
        log: File that takes the child's output.
        threads: Threads of the child's GEMMs.
        timeout: Seconds without an answer after which the child counts as hung.
        refit_timeout: The same for each stage of a refit.
        channel: How weights travel. A stream goes through a socket, as it would to another machine.
        number: Of this engine among those of a run.
        python: Interpreter of the child, with an environment of its own (``environment.py``); None: this one.
        gpus: What the child sees of them, as ``CUDA_VISIBLE_DEVICES`` names them; None: what this process sees.
    """

    def __init__(
        self,
        log: Path,
        *,
        threads: int,
        timeout: float,
        refit_timeout: float,
        channel: ChannelName = "shared_memory",
        number: int = 0,
        python: str | None = None,
        gpus: str | None = None,
    ) -> None:
        self.number = number
        self._log, self._timeout, self._refit_timeout = log, timeout, refit_timeout
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log_begins = log.stat().st_size if log.exists() else 0  # what another process before this one has said
        self._socket, theirs = socket.socketpair()
        # A hung child does not read: a message that fills the socket must fail too, not block its caller for ever.
        limit = struct.pack("@ll", int(timeout), int(timeout % 1 * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        ours, refits = socket.socketpair()
        self._line = RefitLine(ours, channel, refit_timeout)
        descriptors = [theirs.fileno(), refits.fileno()]
        environment = {**MEMORY, **variables(python), "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        environment.update({} if gpus is None else {"CUDA_VISIBLE_DEVICES": gpus})
        with open(log, "ab") as output:
            self._process = subprocess.Popen(
                [python or sys.executable, "-m", CHILD, str(threads), *map(str, descriptors)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=descriptors,
                env=environment,
                start_new_session=True,  # Ctrl-C reaches the trainer only, which ends the child in order
            )
        theirs.close()
        refits.close()
        self._connection = Connection(os.dup(self._socket.fileno()))
        self._send_lock = threading.Lock()
        self._line_lock = threading.Lock()
        self._answers: dict[int, Future[Any]] = {}
        self._calls = itertools.count()
        self._completions: queue.SimpleQueue[list[Completion]] = queue.SimpleQueue()
        self._probes: dict[int, queue.SimpleQueue[Completion]] = {}  # of each request: several threads may probe
        self._version = -1
        self._patience = 2.0
        self._failure: str | None = None
        self._repeats = False
        self._heard = time.monotonic()
        self._unanswered = Unanswered()
        self._reader = threading.Thread(target=self._read, name="engine-reader", daemon=True)
        self._reader.start()

    def configure(
        self,
        description: dict[str, Any],
        kernels: str,
        compiled: bool,
        packages: str | None = None,
        device: str = "cpu",
        fault: str | None = None,
        backend: Backend = "torch",
        other_operators: bool = False,
        serving: dict[str, Any] | None = None,
        **limits: Any,
    ) -> dict[str, Any]:
        """Build the engine in the child: decoder, kernels (their identity must match), slots and limits.

        Args:
            packages: Directory of compiled operators that is looked into before the cache.
            fault: What goes wrong on purpose, see ``faulty.py``.
            other_operators: Where the child's environment would compute with other operators, let it, instead of refusing.
            serving: For TensorRT-LLM: see ``tensorrt_llm/engine.py``.

        Returns:
            What runs in the child: backend, versions, operators.
        """
        if backend == "tensorrt-llm":
            self._patience = 30.0  # its workers end before it does
        about = {"description": description, "kernels": kernels, "compiled": compiled, "device": device}
        how = {"backend": backend, "other_operators": other_operators, "serving": serving}
        made: dict[str, Any] = self._call("configure", **about, **how, packages=packages, fault=fault, **limits)
        return made

    def load(self, directory: Path) -> RefitResult:
        """Take version 0 from an engine directory; nothing is sent."""
        result = RefitResult(**self._call("load", directory=str(directory)))
        self._version = result.version
        return result

    @property
    def version(self) -> int:
        return self._version

    @property
    def busy_seconds(self) -> float:
        return self._unanswered.busy_seconds

    def progress(self) -> dict[int, list[int]]:
        return self._unanswered.progress()

    def coverage(self) -> Coverage:
        return Coverage.from_json(self._call("coverage"))

    def quantiser(self, seed: int, rows: int, columns: int) -> dict[str, Any]:
        """What TensorRT-LLM's quantiser of activations makes of random values, see ``tensorrt_llm/worker.py``."""
        found: dict[str, Any] = self._call("quantiser", seed=seed, rows=rows, columns=columns)
        return found

    def submit(self, requests: Sequence[Request]) -> None:
        self._unanswered.ask(requests)
        try:
            self._call("submit", requests=[asdict(request) for request in requests])
        except BaseException:
            self._unanswered.withdraw([request.id for request in requests])
            raise

    def poll(self, timeout: float) -> list[Completion]:
        self._check()
        try:
            done = self._completions.get(timeout=timeout)
        except queue.Empty:
            done = []
        done += self.arrived()
        if not done:
            self._check()
            self._check_heard()
            # Whoever waits for a call has a time limit of his own.
            if not self._answers and self._unanswered.overdue(self._timeout) is not None:
                time.sleep(
                    2 * HEARTBEAT
                )  # if this process was stopped itself, what the child did meanwhile is yet to come
                if (missing := self._unanswered.overdue(self._timeout)) is not None:
                    raise self._error(missing)
        return done

    def arrived(self) -> list[Completion]:
        """What the child has sent and nobody has polled; also after its death."""
        done: list[Completion] = []
        with contextlib.suppress(queue.Empty):
            while True:
                done += self._completions.get_nowait()
        return done

    def cancel(self, ids: Sequence[int]) -> None:
        self._call("cancel", ids=list(ids))
        self._unanswered.withdraw(ids)

    def pause(self, policy: InFlight) -> None:
        self._call("pause", policy=policy)

    def resume(self) -> None:
        self._call("resume")

    def probe(self, requests: Sequence[Request]) -> list[Completion]:
        assert all(request.id < 0 for request in requests), "probes have negative ids"
        mine: queue.SimpleQueue[Completion] = queue.SimpleQueue()
        self._probes.update({request.id: mine for request in requests})
        try:
            self.submit(requests)
            return self._probed(mine, sum(request.samples for request in requests))
        finally:
            for request in requests:
                del self._probes[request.id]

    def _probed(self, mine: queue.SimpleQueue[Completion], missing: int) -> list[Completion]:
        found: list[Completion] = []
        silent = (
            0.0  # by turns of waiting, not by the clock: while this process is stopped itself, nobody can answer it
        )
        while len(found) < missing:
            turn = min(HEARTBEAT, self._timeout)
            try:
                found.append(mine.get(timeout=turn))
                silent = 0.0
            except queue.Empty:
                self._check()
                silent += turn
                if silent >= self._timeout:
                    raise self._error(
                        f"The engine answered {len(found)} of {missing} probes, and then none for {self._timeout:g} s"
                    ) from None
        return found

    def begin_refit(self, manifest: Manifest) -> bool:
        with self._line_lock, self._explained("begin_refit"):
            return self._line.begin(manifest)

    def write(self, bucket: Bucket) -> None:
        with self._line_lock, self._explained("write"):
            self._line.write(bucket)

    def finish_refit(self) -> RefitResult:
        self._refit("decode_refit")  # beside generation; then only the swap is left
        result = RefitResult(**self._call("finish_refit", self._refit_timeout))
        with self._line_lock:
            self._line.finished()
        self._version = result.version
        return result

    def abort_refit(self) -> None:
        self._refit("abort_refit")

    def close(self) -> None:
        """End the child and what it has started: hang up, wait (for one with processes of its own half a minute, else two
        seconds), kill. Safe to call twice, and by any thread.

        Calls that other threads are in raise EngineError.
        """
        self._failure = self._failure or "it was closed"
        with contextlib.suppress(OSError):  # closed before
            self._socket.shutdown(socket.SHUT_RDWR)
        self._line.hang_up()
        try:
            self._process.wait(self._patience)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):  # it ended just now
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._reader.join()
        with self._send_lock:  # nobody may use a descriptor whose number belongs to another file by then
            self._connection.close()
            self._socket.close()
        with self._line_lock:
            self._line.close()

    @property
    def process_id(self) -> int:
        return self._process.pid

    def _refit(self, method: str, **parameters: Any) -> Any:
        """A call that the child answers beside generation."""
        with self._line_lock, self._explained(method):
            return self._line.call(method, **parameters)

    @contextlib.contextmanager
    def _explained(self, method: str) -> Iterator[None]:
        self._check()
        try:
            yield
        except TimeoutError:
            raise self._error(f"The engine did not answer '{method}' within {self._refit_timeout:g} s") from None
        except (EOFError, OSError):
            self._reader.join(HEARTBEAT)  # it finds out why
            raise self._error("The engine died") from None

    def _call(self, method: str, timeout: float | None = None, /, **parameters: Any) -> Any:
        limit = timeout or self._timeout
        number = next(self._calls)
        answer: Future[Any] = Future()
        self._answers[number] = answer
        try:
            self._send({"id": number, "method": method, "parameters": parameters})
            waited = 0.0  # by turns, not by the clock: while this process is stopped itself, nobody can answer it
            while True:
                turn = min(HEARTBEAT, limit - waited)
                try:
                    return answer.result(turn)
                except FutureTimeout:
                    waited += turn
                    if waited >= limit:
                        raise
        except (FutureTimeout, BlockingIOError):
            raise self._error(f"The engine did not answer '{method}' within {limit:g} s") from None
        except OSError:
            raise self._error("The engine's process is gone") from None
        finally:
            self._answers.pop(number, None)

    def _send(self, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode()
        with self._send_lock:
            self._check()
            try:
                self._connection.send_bytes(data)
            except BlockingIOError:  # the socket stayed full; a part of the message is in it, so nothing may follow
                self._failure = self._failure or "it stopped reading"
                raise

    def _read(self) -> None:
        """Hand answers to their callers and completions to their queues, until the child is gone."""
        try:
            while True:
                message = json.loads(self._connection.recv_bytes())
                self._heard = time.monotonic()
                if "completions" in message:
                    done = [Completion(**fields) for fields in message["completions"]]
                    self._unanswered.came(done, message["busy_seconds"], message.get("progress"))
                    for completion in done:
                        if completion.request_id in self._probes:  # else its caller gave up
                            self._probes[completion.request_id].put(completion)
                    if rollouts := [completion for completion in done if completion.request_id >= 0]:
                        self._completions.put(rollouts)
                elif "failed" in message:
                    self._failure, self._repeats = message["failed"], message["repeats"]
                else:
                    self._answer(message)
        except (EOFError, OSError):
            status = self._process.wait()
            self._failure = self._failure or f"its process ended with status {status}"
            for future in list(self._answers.values()):
                if not future.done():
                    future.set_exception(self._error("The engine died"))

    def _answer(self, message: dict[str, Any]) -> None:
        self._unanswered.moved()
        future = self._answers.get(message["id"])
        if future is None:
            return  # its caller gave up
        if "error" in message:
            kind = _ERRORS.get(message["error"], EngineError)
            about = {} if kind is UserError else {"repeats": message["repeats"]}
            future.set_exception(kind(message["text"], **about))
        else:
            future.set_result(message["result"])

    def _check(self) -> None:
        if self._failure is not None:
            raise self._error("The engine died")

    def _check_heard(self) -> None:
        if time.monotonic() - self._heard > self._timeout:
            # If this process was stopped itself, what the child said meanwhile is yet to be read.
            time.sleep(HEARTBEAT)
            if time.monotonic() - self._heard > self._timeout:
                raise self._error(f"The engine was silent for {self._timeout:g} s")

    def _error(self, text: str) -> EngineError:
        tail = ""
        if self._log.exists():
            with open(self._log, "rb") as log:
                log.seek(max(self._log_begins, self._log.stat().st_size - 2**16))
                tail = "\n".join(log.read().decode(errors="replace").splitlines()[-12:])
        reason = f" ({self._failure})" if self._failure else ""
        end = f" Its log {self._log} ends with:\n{tail or '(nothing)'}"
        return EngineError(f"{text}{reason}.", log=end, repeats=self._repeats)
