"""``SupervisedEngine``: an engine that is replaced when it dies, hangs or breaks.

::

    a call fails ──▶ old process killed ──▶ wait ──▶ new process ──▶ configured, whole refit, coverage compared ──▶ in its place
                                             ▲                                  │ fails
                                             └──────── twice as long ───────────┘  up to ``restarts`` times in a row

Two threads use it. Whichever meets the failure restarts the engine; the other waits for that. The rollout thread (``submit``,
``poll``, ``cancel``) then gets :class:`WorkLost` once, with everything that the old engine had sent, and asks again. Probes are
repeated here. A refit that fails ends with :meth:`SupervisedEngine.bring_up`: the new engine gets the new version at once, so
that it never generates with an older one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from trtl_rl.engines.engine import InFlight, RolloutEngine
from trtl_rl.errors import EngineError, UserError
from trtl_rl.metrics import Tell
from trtl_rl.recipe.coverage import Coverage
from trtl_rl.refit.manifest import Bucket, Manifest, RefitResult
from trtl_rl.rollout import Completion, Request

HEALTHY_STEPS = 10  # after so many steps without a failure the next one counts as the first


class EngineProcess(RolloutEngine, Protocol):
    """An engine that can be configured and killed, and then still be asked what it had sent."""

    number: int

    def configure(self, *arguments: Any, **named: Any) -> dict[str, Any]:
        """Build the engine; see ``HostedEngine.configure``."""

    def load(self, directory: Path) -> RefitResult:
        """Take version 0 from an engine directory."""

    def arrived(self) -> list[Completion]:
        """What it has sent and nobody has polled."""


class Start(Protocol):
    """Brings a new engine to a version: configured, loaded, compared."""

    def __call__(
        self, engine: EngineProcess, tensors: Mapping[str, Tensor], version: int, *, restarted: bool
    ) -> None: ...


class WorkLost(EngineError):
    """The engine was restarted: what it had in flight for its caller will not come; ask again.

    Attributes:
        completions: What had arrived before.
        progress: How far the rest was, see :meth:`RolloutEngine.progress`.
        ids: The requests that are lost; None: all.
    """

    def __init__(
        self, completions: list[Completion], progress: dict[int, list[int]], ids: frozenset[int] | None = None
    ) -> None:
        super().__init__("The engine was restarted: what it had in flight is lost.")
        self.completions, self.progress, self.ids = completions, progress, ids


class SupervisedEngine:
    """Implements ``RolloutEngine`` by one that is made anew when it fails.

    Args:
        make: Starts an engine's process.
        restarts: Attempts in a row; then the failure is raised.
        delay: Seconds before the first attempt, doubled before each further one.
        tell: Takes messages for people: level and text.

    Attributes:
        restarts: How often a new engine has taken the place of another.
    """

    def __init__(
        self,
        make: Callable[[], EngineProcess],
        *,
        restarts: int,
        delay: float,
        tell: Tell,
    ) -> None:
        self._make, self._allowed, self._delay, self._tell = make, restarts, delay, tell
        self.restarts = 0
        self._in_a_row = 0
        self._healthy_steps = 0
        self._start: Start | None = None
        self._tensors: Mapping[str, Tensor] = {}
        self._version = -1
        self._now: tuple[EngineProcess, float] = (make(), 0.0)  # and the busy seconds of those before
        self._known = self._now[0]  # the one that the rollout thread has asked
        self._refitted = self._now[0]  # the one that an open refit has begun with
        self._starting: EngineProcess | None = None
        self._lost = WorkLost([], {})
        self._final: EngineError | None = None
        self._given_up = threading.Event()
        self._lock = threading.RLock()  # held while the engine is replaced
        self.doing: str | None = None  # for people: the restart that is under way

    def start(self, start: Start, tensors: Mapping[str, Tensor], version: int) -> None:
        """Bring the first engine to ``version``; what fails here is not tried again."""
        self._start = start
        self.hold(tensors, version)
        start(self._now[0], tensors, version, restarted=False)

    def hold(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """What an engine that is started from now on gets. The tensors may not change any more."""
        self._tensors, self._version = tensors, version

    def step_done(self) -> None:
        """A step has ended well."""
        self._healthy_steps += 1
        if self._healthy_steps >= HEALTHY_STEPS:
            self._in_a_row = 0

    def bring_up(self, error: EngineError) -> None:
        """After a refit that failed with ``error``: a sound engine at the version that is held, or the error."""
        self._replace(self._refitted, error)
        engine = self._engine()
        while engine.version != self._version:  # it was started before that version was held
            self._replace(engine, EngineError(f"The engine is at version {engine.version}, not {self._version}."))
            engine = self._engine()
        self._refitted = engine

    def fail(self, error: EngineError) -> None:
        """Its user has found that the engine does not work: replace it. Called by the rollout thread."""
        self._replace(self._known, error)

    def give_up(self) -> None:
        """Restart no more, and end a restart that is under way: the run ends."""
        self._given_up.set()
        if (starting := self._starting) is not None:
            starting.close()

    def close(self) -> None:
        self.give_up()
        self._now[0].close()

    # --- the rollout thread ---

    def submit(self, requests: Sequence[Request]) -> None:
        engine = self._known_engine()
        try:
            engine.submit(requests)
        except EngineError as error:
            raise self._after(engine, error) from error

    def poll(self, timeout: float) -> list[Completion]:
        engine = self._known_engine()
        try:
            return engine.poll(timeout)
        except EngineError as error:
            raise self._after(engine, error) from error

    def cancel(self, ids: Sequence[int]) -> None:
        engine = self._known_engine()
        try:
            engine.cancel(ids)
        except EngineError as error:
            raise self._after(engine, error) from error

    def progress(self) -> dict[int, list[int]]:
        return self._known.progress()

    # --- the learner's thread ---

    def probe(self, requests: Sequence[Request]) -> list[Completion]:
        """Of a new engine, if this one fails."""
        while True:
            engine = self._engine()
            try:
                return engine.probe(requests)
            except EngineError as error:
                self._replace(engine, error)

    def coverage(self) -> Coverage:
        return self._engine().coverage()

    def begin_refit(self, manifest: Manifest) -> bool:
        self._refitted = self._engine()
        return self._refitted.begin_refit(manifest)

    def write(self, bucket: Bucket) -> None:
        self._refitted.write(bucket)

    def finish_refit(self) -> RefitResult:
        return self._refitted.finish_refit()

    def abort_refit(self) -> None:
        self._refitted.abort_refit()

    def pause(self, policy: InFlight) -> None:
        self._refitted.pause(policy)

    def resume(self) -> None:
        self._refitted.resume()

    @property
    def version(self) -> int:
        return self._now[0].version

    @property
    def sizes(self) -> dict[str, int]:
        """For metrics; a pool of engines has some."""
        return {}

    @property
    def busy_seconds(self) -> float:
        """Of all engines so far."""
        engine, before = self._now
        return before + engine.busy_seconds

    # --- replacing ---

    def _engine(self) -> EngineProcess:
        """The engine; waits while it is replaced."""
        with self._lock:
            return self._now[0]

    def _known_engine(self) -> EngineProcess:
        """The same for the rollout thread. Raises WorkLost when it has asked another one."""
        engine = self._engine()
        if engine is not self._known:
            raise self._work_lost()
        return engine

    def _after(self, engine: EngineProcess, error: EngineError) -> WorkLost:
        self._replace(engine, error)
        return self._work_lost()

    def _work_lost(self) -> WorkLost:
        with self._lock:
            self._known = self._now[0]
            lost, self._lost = self._lost, WorkLost([], {})
        return lost

    def _replace(self, engine: EngineProcess, error: EngineError) -> None:
        """Put a new engine in the place of ``engine``, unless another thread has done so. Raises the error that remains."""
        with self._lock:
            if self._final is not None:
                raise self._final
            if self._now[0] is not engine:
                return
            try:
                self._try_until_one_starts(error)
            except EngineError as last:
                self._final = last
                raise
            finally:
                self.doing = None

    def _try_until_one_starts(self, error: EngineError) -> None:
        engine, before = self._now
        self._healthy_steps = 0
        tried = False
        while True:
            if error.repeats or self._start is None or not self._allowed or self._given_up.is_set():
                raise error
            if self._in_a_row >= self._allowed:
                count = f"{self._allowed} times" if self._allowed > 1 else "once"
                raise EngineError(
                    f"The engine was restarted {count} in a row (engine.restarts={self._allowed}) and failed again: "
                    f"{error.brief}",
                    log=error.log,
                ) from error
            self._in_a_row += 1
            wait = self._delay * 2 ** (self._in_a_row - 1)
            attempt = f"restart {self._in_a_row} of {self._allowed}"
            self.doing = f"the engine failed, {attempt} is under way"
            self._tell("warning", f"{error.brief} The engine is started anew in {wait:g} s ({attempt}).")
            start = time.monotonic()
            if not tried:
                engine.close()
                self._lost.completions.extend(engine.arrived())
                self._lost.progress.update(engine.progress())
                tried = True
            self._given_up.wait(wait)
            try:
                new = self._begin()
            except EngineError as another:
                error = error if self._given_up.is_set() else another
                continue
            except UserError as wrong:  # the two sides do not fit together
                error = EngineError(str(wrong), repeats=True)
                continue
            self._now = (new, before + engine.busy_seconds)
            self.restarts += 1
            self._tell(
                "info",
                f"The engine runs again after {time.monotonic() - start:.1f} s, at version {self._version}; what it had in "
                "flight is generated again.",
            )
            return

    def _begin(self) -> EngineProcess:
        """A new engine, at the version that is held."""
        assert self._start is not None
        if self._given_up.is_set():
            raise EngineError("No engine is started any more.")
        self._starting = new = self._make()
        try:
            if self._given_up.is_set():  # by another thread, which did not see this one
                raise EngineError("No engine is started any more.")
            self._start(new, self._tensors, self._version, restarted=True)
        except BaseException:
            new.close()
            raise
        finally:
            self._starting = None
        return new
