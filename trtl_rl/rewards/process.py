"""The trainer's side of a reward's worker process: it starts it, sends calls, and kills it at the time limit.

One thread per process waits for it, so that nobody else does. A killed or dead process is replaced at the next call.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from trtl_rl.rewards.call import explain
from trtl_rl.rewards.reward import FaultKind, Outcome, Reward, is_async

WORKER = "trtl_rl.rewards.worker"
START_SECONDS = 300.0  # to import the function and what it loads
ASYNC_CALLS = 64  # that one process awaits at once
_GRACE = 2.0  # an event loop cancels its calls itself; one that is blocked so much longer is killed


@dataclass
class Call:
    """One call of one function.

    Attributes:
        future: Takes the outcome; it never takes an exception.
    """

    arguments: dict[str, Any]
    count: int
    future: Future[Outcome] = field(default_factory=Future)
    deadline: float = 0.0
    started: float = 0.0


class ProcessPool:
    """The worker processes of one reward.

    Args:
        payload: The function by cloudpickle; ``None`` where workers find it by ``reward.config``.
        log: Takes what the function prints; ``None``: it goes where this process's own errors go.
    """

    def __init__(self, reward: Reward, payload: bytes | None, log: Path | None) -> None:
        self.reward, self.payload = reward, payload
        self.output: Any = open(log, "ab") if log is not None else None  # noqa: SIM115 - closed by close()
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._lines = [_Line(self, self._calls) for _ in range(reward.workers)]

    def submit(self, call: Call) -> None:
        self._calls.put(call)

    def wait_ready(self) -> str | None:
        """Wait until the processes have loaded the function; returns what went wrong."""
        return next((text for line in self._lines if (text := line.ready.result()) is not None), None)

    def close(self) -> None:
        """Kill the processes, whatever they do. Safe to call twice."""
        for line in self._lines:
            line.close()
        for _ in self._lines:
            self._calls.put(None)
        if self.output is not None:
            self.output.close()


class _Line:
    """One process and the thread that waits for it."""

    def __init__(self, pool: ProcessPool, calls: queue.SimpleQueue[Call | None]) -> None:
        self._pool, self._calls = pool, calls
        self._many = ASYNC_CALLS if is_async(pool.reward.function) else 1
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._flying: dict[int, Call] = {}
        self._number = 0
        self._closed = False
        self._lock = threading.Lock()  # nobody starts a process after close()
        self.ready: Future[str | None] = Future()
        self._thread = threading.Thread(target=self._run, name=f"reward {pool.reward.name}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._kill()

    def _run(self) -> None:
        self.ready.set_result(self._start())
        while True:
            while len(self._flying) < self._many:
                try:
                    call = self._calls.get(block=not self._flying)
                except queue.Empty:
                    break
                if call is None or self._closed:
                    return
                self._send(call)
            if self._flying:
                self._receive()

    def _start(self) -> str | None:
        """Start a process and load the function there; returns what went wrong."""
        pool = self._pool
        ours, theirs = socket.socketpair()
        with self._lock:
            if self._closed:
                return "the runner was closed"
            # A function's own thread pools get one thread: the cores belong to trainer and engine.
            environment = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **os.environ}
            self._process = subprocess.Popen(
                [sys.executable, "-m", WORKER, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=pool.output if pool.output is not None else 2,  # this process's own errors
                stderr=pool.output,
                pass_fds=[theirs.fileno()],
                env=environment,
                start_new_session=True,  # Ctrl-C reaches the trainer only; and what the function starts dies with it
            )
        theirs.close()
        self._connection = Connection(ours.detach())
        config = pool.reward.config
        setup = {
            "path": [item or os.getcwd() for item in sys.path],
            "config": None if config is None else config.model_dump(),
            "function": pool.payload,
        }
        try:
            self._connection.send_bytes(pickle.dumps(setup))
            if not self._connection.poll(START_SECONDS):
                self._kill()
                return f"could not be loaded in its process within {START_SECONDS:g} s"
            text: str | None = pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            text = f"could not be loaded: its process {self._ending()}"
        if text is not None:
            self._kill()
        return text

    def _send(self, call: Call) -> None:
        if self._connection is None and (text := self._start()) is not None:
            call.future.set_result(Outcome.failed(call.count, "died", text))
            return
        assert self._connection is not None
        limit = self._pool.reward.limit
        self._number += 1
        try:
            data = pickle.dumps((self._number, call.arguments, call.count, limit))
        except Exception as error:
            text = f"cannot be given its columns, which have to be pickled for its process. It {explain(error)}"
            call.future.set_result(Outcome.failed(call.count, "exception", text))
            return
        call.started = time.monotonic()
        call.deadline = call.started + (limit or 1e9) + (_GRACE if self._many > 1 else 0.0)
        self._flying[self._number] = call
        try:
            self._connection.send_bytes(data)
        except OSError:
            self._lost("died", f"lost its process: it {self._ending()}")

    def _receive(self) -> None:
        """Wait for an answer, the first time limit, or (for async functions) a little while."""
        assert self._connection is not None
        first = min(call.deadline for call in self._flying.values())
        wait = max(0.0, first - time.monotonic())
        try:
            if self._connection.poll(min(wait, 0.02) if self._many > 1 else wait):
                number, outcome = pickle.loads(self._connection.recv_bytes())
                self._flying.pop(number).future.set_result(outcome)
                return
        except (EOFError, OSError):
            self._lost("died", f"lost its process: it {self._ending()}")
            return
        if first <= time.monotonic():
            self._lost("timeout", f"gave no answer within {self._pool.reward.limit:g} s: its process was killed")

    def _lost(self, kind: FaultKind, text: str) -> None:
        """The process is dead or has to die. Of several calls any may be to blame: each begins again, alone."""
        self._kill()
        calls = list(self._flying.values())
        self._flying.clear()
        for call in calls:
            if len(calls) == 1 or self._closed:
                call.future.set_result(Outcome.failed(call.count, kind, text, time.monotonic() - call.started))
                continue
            self._send(call)
            while self._flying:
                self._receive()

    def _ending(self) -> str:
        """How the process ended, in words."""
        process = self._process
        if process is None:
            return "was ended"
        try:
            status = process.wait(5.0)
        except subprocess.TimeoutExpired:
            return "does not answer"
        name = signal.Signals(-status).name if status < 0 else ""
        return f"was ended by {name}" if name else f"ended with status {status}"

    def _kill(self) -> None:
        """End the process and whatever it has started."""
        process, connection = self._process, self._connection
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # it leads a session of its own, so this is its group
            process.wait()
            self._process = None
        if connection is not None and threading.current_thread() is self._thread:
            connection.close()  # by nobody else: its number may belong to another file a moment later
            self._connection = None
