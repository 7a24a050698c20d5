"""``RayEngine``: an engine on a node of a Ray cluster, driven as if it were here.

The actor there hosts the engine as a process of its own (``host.py``), so time limits, heartbeats and logs are those of one
machine. Requests and completions go as arguments of calls. A refit's bucket is put into Ray's object store once for all engines;
Ray brings it to each node once, and the actor hands it to its engine through shared memory.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtl_rl.engines.engine import InFlight
from trtl_rl.engines.host import HostedEngine
from trtl_rl.errors import EngineError, RefitError, UserError
from trtl_rl.recipe.coverage import Coverage
from trtl_rl.refit.manifest import Bucket, Manifest, RefitResult
from trtl_rl.rollout import Completion, Request

if TYPE_CHECKING:
    from torch import Tensor

ANSWER_SECONDS = 10.0  # for a cluster's address to take a connection
GRACE = 10.0  # seconds that a call may take beside what it asks its engine for
CALLS = 8  # calls that an actor serves at once: polls, refits and questions must not wait for each other


def connect(address: str) -> None:
    """Join the cluster at ``address``, or start one on this machine for ``local``. Safe to call twice.

    Raises:
        UserError: Ray is not installed, or no cluster answers.
    """
    try:
        import ray
    except ImportError:
        raise UserError(
            "ray.address needs Ray: pip install 'trtl-rl[ray]'. Without it, engine.replicas starts engines on this machine."
        ) from None
    try:
        _check_answers(address)
        if ray.is_initialized():
            return
        ray.init(
            address=None if address == "local" else address,
            include_dashboard=False if address == "local" else None,
            logging_level=logging.WARNING,
            log_to_driver=False,
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(
            f"ray.address={address}: no Ray cluster answers there ({str(error).splitlines()[0]}). Start one with `ray start "
            "--head`, or use ray.address=local."
        ) from None


def _check_answers(address: str) -> None:
    """Raise OSError where nothing listens at ``host:port``: Ray itself goes on trying for minutes."""
    host, _, port = address.rpartition(":")
    if host and "/" not in address and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), ANSWER_SECONDS).close()


class BucketStore:
    """Puts each bucket into the object store once, for all engines that are written to. Methods may be called by any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: tuple[Bucket, Any] | None = None
        self.puts = 0
        self.bytes = 0

    def reference(self, bucket: Bucket) -> Any:
        import ray

        with self._lock:
            if self._last is None or self._last[0] is not bucket:
                self._last = bucket, ray.put(_to_plain(bucket))
                self.puts += 1
                self.bytes += sum(tensor.nbytes for tensor in bucket.tensors.values())
            return self._last[1]


class EngineActor:
    """What runs on the node: a hosted engine behind calls. Errors go back as plain tuples: their classes hold more than text."""

    def __init__(self, log: str, limits: dict[str, Any]) -> None:
        self._engine = HostedEngine(Path(log), **limits)

    def call(self, method: str, *arguments: Any, **named: Any) -> tuple[str, Any]:
        """Call the engine; returns ("result", what it returned) or (an error's class, what it carries)."""
        try:
            return "result", getattr(self._engine, method)(*arguments, **named)
        except UserError as error:
            return "UserError", str(error)
        except EngineError as error:
            return type(error).__name__, (error.brief, error.log, error.repeats)

    def write(self, plain: dict[str, Any]) -> tuple[str, Any]:
        return self.call("write", _from_plain(plain))

    def state(self) -> tuple[int, float, dict[int, list[int]], int]:
        """Version, busy seconds, progress, and the engine's process id."""
        engine = self._engine
        return engine.version, engine.busy_seconds, engine.progress(), engine.process_id


class RayEngine:
    """Implements ``EngineProcess`` by an actor on some node. Methods may be called by any thread.

    Args:
        log: File for the engine's output, on the node where it runs.
        store: Shared by all engines of a run.
        options: What one engine takes of a node, as Ray's ``options`` take it.
        number: Of this engine among those of a run.
        timeout, refit_timeout: Seconds, as of ``HostedEngine``; an actor that finds no node within ``timeout`` is an error too.
    """

    def __init__(
        self,
        log: Path,
        store: BucketStore,
        *,
        threads: int,
        timeout: float,
        refit_timeout: float,
        options: dict[str, Any] | None = None,
        python: str | None = None,
        number: int = 0,
    ) -> None:
        import ray

        self.number = number

        self._ray, self._store, self._timeout, self._refit_timeout = ray, store, timeout, refit_timeout
        limits = {"threads": threads, "timeout": timeout, "refit_timeout": refit_timeout, "python": python}
        remote = ray.remote(EngineActor).options(max_concurrency=CALLS, **(options or {"num_cpus": 1}))
        self._actor: Any = remote.remote(str(log.absolute()), limits)
        self._poll: Any = None
        self._poll_lock = threading.Lock()
        self._version, self._busy, self._progress = -1, 0.0, dict[int, list[int]]()
        self._closed = False

    def configure(self, *arguments: Any, **named: Any) -> dict[str, Any]:
        about: dict[str, Any] = self._call("configure", *arguments, **named)
        return about

    def load(self, directory: Path) -> RefitResult:
        """Take version 0 from an engine directory, which the node must have under the same path."""
        result: RefitResult = self._call("load", directory)
        self._version = result.version
        return result

    @property
    def version(self) -> int:
        return self._version

    @property
    def busy_seconds(self) -> float:
        self._look()
        return self._busy

    def progress(self) -> dict[int, list[int]]:
        self._look()
        return self._progress

    @property
    def process_id(self) -> int:
        """Of the engine's process, on its node."""
        return int(self._get(self._actor.state.remote(), GRACE)[3])

    def coverage(self) -> Coverage:
        found: Coverage = self._call("coverage")
        return found

    def submit(self, requests: Sequence[Request]) -> None:
        self._call("submit", list(requests))

    def poll(self, timeout: float) -> list[Completion]:
        """One call is always under way at the actor, so that what has finished need not be asked for."""
        with self._poll_lock:
            if self._poll is None:
                self._poll = self._actor.call.remote("poll", 0.5)
            ready, _ = self._ray.wait([self._poll], timeout=timeout)
            if not ready:
                return []
            asked, self._poll = self._poll, None
            found: list[Completion] = self._result(self._get(asked, GRACE))
            return found

    def arrived(self) -> list[Completion]:
        """What the engine has sent and nobody has polled, if its actor still lives."""
        done: list[Completion] = []
        with contextlib.suppress(EngineError):
            if self._poll is not None:
                done += self._result(self._get(self._poll, GRACE))
            done += self._result(self._get(self._actor.call.remote("arrived"), GRACE))
        self._poll = None
        return done

    def cancel(self, ids: Sequence[int]) -> None:
        self._call("cancel", list(ids))

    def pause(self, policy: InFlight) -> None:
        self._call("pause", policy)

    def resume(self) -> None:
        self._call("resume")

    def probe(self, requests: Sequence[Request]) -> list[Completion]:
        answer = self._actor.call.remote("probe", list(requests))
        found: list[Completion] = self._result(self._wait(answer))
        return found

    def begin_refit(self, manifest: Manifest) -> bool:
        return bool(self._refit("begin_refit", manifest))

    def write(self, bucket: Bucket) -> None:
        self._result(self._get(self._actor.write.remote(self._store.reference(bucket)), self._refit_timeout + GRACE))

    def finish_refit(self) -> RefitResult:
        result: RefitResult = self._refit("finish_refit")
        self._version = result.version
        return result

    def abort_refit(self) -> None:
        self._refit("abort_refit")

    def close(self) -> None:
        """End the engine and its actor. Safe to call twice."""
        if self._closed:
            return
        self._look()
        self._closed = True
        with contextlib.suppress(EngineError):
            self._get(self._actor.call.remote("close"), GRACE)
        self._ray.kill(self._actor)  # its engine's process ends when it hears nothing more of it

    def _look(self) -> None:
        """Ask how far the engine is; after its death what was known last stays."""
        if not self._closed:
            with contextlib.suppress(EngineError):
                _, self._busy, self._progress, _ = self._get(self._actor.state.remote(), GRACE)

    def _call(self, method: str, *arguments: Any, **named: Any) -> Any:
        return self._result(self._get(self._actor.call.remote(method, *arguments, **named), self._timeout + GRACE))

    def _refit(self, method: str, *arguments: Any) -> Any:
        limit = 2 * self._refit_timeout + GRACE  # finishing has two stages
        return self._result(self._get(self._actor.call.remote(method, *arguments), limit))

    def _wait(self, answer: Any) -> Any:
        """Probes may take as long as they get somewhere: the engine's own host watches that."""
        while True:
            with contextlib.suppress(self._ray.exceptions.GetTimeoutError), self._explained():
                return self._ray.get(answer, timeout=1.0)

    def _get(self, answer: Any, timeout: float) -> Any:
        try:
            with self._explained():
                return self._ray.get(answer, timeout=timeout)
        except self._ray.exceptions.GetTimeoutError:
            raise EngineError(
                f"The engine's actor did not answer within {timeout:g} s. Has the cluster room for it? `ray status` says so."
            ) from None

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        exceptions = self._ray.exceptions
        try:
            yield
        except exceptions.GetTimeoutError:
            raise
        except exceptions.RayTaskError:
            raise  # a bug over there: its traceback says more
        except exceptions.RayError as error:
            raise EngineError(f"The engine's actor is gone: {str(error).splitlines()[0]}") from None

    def _result(self, answer: tuple[str, Any]) -> Any:
        kind, value = answer
        if kind == "result":
            return value
        if kind == "UserError":
            raise UserError(value)
        brief, log, repeats = value
        raise (RefitError if kind == "RefitError" else EngineError)(brief, log=log, repeats=repeats)


def _to_plain(bucket: Bucket) -> dict[str, Any]:
    """A bucket as bytes in numpy arrays, which actors of a node read in place."""
    from trtl_rl.refit.manifest import dtype_name, tensor_bytes

    return {
        "packed": sorted(bucket.packed),
        "tensors": {
            name: (tensor_bytes(tensor).cpu().numpy(), dtype_name(tensor.dtype), list(tensor.shape))
            for name, tensor in bucket.tensors.items()
        },
    }


def _from_plain(plain: dict[str, Any]) -> Bucket:
    """The bucket; its tensors are views of the object store."""
    import warnings

    import torch

    tensors: dict[str, Tensor] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nobody writes into them
        for name, (data, dtype, shape) in plain["tensors"].items():
            tensors[name] = torch.from_numpy(data).view(getattr(torch, dtype)).reshape(shape)
    return Bucket(tensors, frozenset(plain["packed"]))
