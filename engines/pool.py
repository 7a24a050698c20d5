"""``EnginePool``: several engines as one. Prompts go where least is under way; a refit goes to all, behind one barrier.

::

    rollout thread ──submit──▶ inbox of the engine with the least to do ──▶ its thread: submit, poll ──▶ one queue ──poll──▶
    learner ──refit──▶ all engines in rotation, side by side ──▶ barrier: each is at the new version, or out of rotation

An engine that fails is replaced by its own :class:`SupervisedEngine` while the others go on: until it is at the version that the
others have, it is out of rotation and gets no prompts. What it had in flight is asked for again, of any engine. One that cannot
be replaced stays out; when none is left, the last error is raised.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from torch import Tensor

from trtl_rl.engines.engine import InFlight
from trtl_rl.engines.supervisor import Start, SupervisedEngine, WorkLost
from trtl_rl.errors import EngineError, RefitError, UserError
from trtl_rl.metrics import Tell
from trtl_rl.recipe.coverage import Coverage
from trtl_rl.refit.manifest import Bucket, Manifest, RefitResult
from trtl_rl.rollout import Completion, Request

TURN = 0.01  # seconds of one wait of an engine's thread
Result = TypeVar("Result")


@dataclass
class Member:
    """One engine of a pool.

    Attributes:
        rotation: Whether it gets prompts.
        left: Its last error; it takes part in nothing any more.
        samples: Completions to come, by request.
        inbox: What its thread shall do before it polls again.
    """

    number: int
    engine: SupervisedEngine
    rotation: bool = True
    left: EngineError | None = None
    samples: dict[int, int] = field(default_factory=dict)
    inbox: queue.SimpleQueue[Callable[[], None]] = field(default_factory=queue.SimpleQueue)
    told: threading.Event = field(default_factory=threading.Event)  # that the rollout thread knows of lost work

    @property
    def load(self) -> int:
        return sum(self.samples.values())


class EnginePool:
    """Has the interface of :class:`SupervisedEngine`, and for one rollout thread and one learner's thread as that has.

    Args:
        engines: The members, each of which replaces its engine when that fails.
        tell: Takes messages for people: level and text.
    """

    def __init__(self, engines: Sequence[SupervisedEngine], tell: Tell) -> None:
        assert engines
        self._members = [Member(number, engine) for number, engine in enumerate(engines)]
        self._tell = tell
        self._came: queue.SimpleQueue[tuple[Member, list[Completion] | WorkLost | EngineError | UserError]] = (
            queue.SimpleQueue()
        )
        self._lock = threading.Lock()  # of the members' fields
        self._refitting: list[Member] = []
        self._digest = ""  # of the version that is being sent
        self._failed: dict[int, EngineError] = {}  # in the refit that is open
        self._version = -1
        self._turn = itertools.count()
        self._closed = threading.Event()
        self._beside = ThreadPoolExecutor(len(engines), thread_name_prefix="engines")
        self._repair = ThreadPoolExecutor(len(engines), thread_name_prefix="engine-repair")
        self._threads = [
            threading.Thread(target=self._serve, args=[member], name=f"engine-{member.number}", daemon=True)
            for member in self._members
        ]

    def start(self, start: Start, tensors: Mapping[str, Tensor], version: int) -> None:
        """Bring all engines to ``version``, side by side; what fails here is not tried again."""
        errors = self._side_by_side(self._members, lambda member: member.engine.start(start, tensors, version))[1]
        for error in errors.values():
            raise error
        self._version = version
        for thread in self._threads:
            thread.start()

    def hold(self, tensors: Mapping[str, Tensor], version: int) -> None:
        for member in self._members:
            member.engine.hold(tensors, version)
        self._version = version

    def step_done(self) -> None:
        for member in self._members:
            member.engine.step_done()

    def bring_up(self, error: EngineError) -> None:
        """After a refit that failed everywhere. Raises the error that remains when no engine comes up."""
        members = self._present()
        _, errors = self._side_by_side(members, lambda member: member.engine.bring_up(error))
        for member in members:
            if member.number in errors:
                self._leave(member, errors[member.number])
        self._barrier([member for member in members if member.number not in errors])

    def fail(self, error: EngineError) -> None:
        """Its user has found that nothing comes from any engine."""
        for member in self._present():
            member.inbox.put(lambda member=member: member.engine.fail(error))  # type: ignore[misc]

    def give_up(self) -> None:
        for member in self._members:
            member.engine.give_up()

    def close(self) -> None:
        """End all engines. Safe to call twice."""
        self._closed.set()
        for member in self._members:
            member.engine.give_up()
        with ThreadPoolExecutor(len(self._members)) as closing:
            list(closing.map(lambda member: member.engine.close(), self._members))
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(2.0)
        self._beside.shutdown(wait=False)
        self._repair.shutdown(wait=False)

    # --- the rollout thread ---

    def submit(self, requests: Sequence[Request]) -> None:
        """Give each request to the engine with the fewest completions to come. Errors come with :meth:`poll`."""
        shares: dict[int, list[Request]] = {}
        with self._lock:
            members = [member for member in self._members if member.rotation]
            if not members:  # all are being replaced: the first that comes back has these waiting
                members = [member for member in self._members if member.left is None]
            if not members:
                raise self._none_left()
            for request in requests:
                member = min(members, key=lambda member: member.load)
                member.samples[request.id] = request.samples
                shares.setdefault(member.number, []).append(request)
        for number, share in shares.items():
            member = self._members[number]
            member.inbox.put(lambda member=member, share=share: member.engine.submit(share))  # type: ignore[misc]

    def poll(self, timeout: float) -> list[Completion]:
        done: list[Completion] = []
        lost: WorkLost | None = None
        end = time.monotonic() + timeout
        while lost is None:
            try:
                member, news = self._came.get(timeout=0 if done else max(0.0, end - time.monotonic()))
            except queue.Empty:
                break
            if isinstance(news, WorkLost):
                done += self._counted(member, news.completions)
                lost = self._lost(member, news.progress)
            elif isinstance(news, UserError):
                raise news
            elif isinstance(news, EngineError):
                self._leave(member, news)
                lost = self._lost(member, {})
            else:
                done += self._counted(member, news)
        if lost is not None:
            lost.completions = done
            raise lost
        return done

    def cancel(self, ids: Sequence[int]) -> None:
        wanted = set(ids)
        for member in self._present():
            with self._lock:
                theirs = sorted(wanted & member.samples.keys())
            if theirs:
                member.inbox.put(lambda member=member, theirs=theirs: member.engine.cancel(theirs))  # type: ignore[misc]

    def progress(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for member in self._present():
            found.update(member.engine.progress())
            with self._lock:  # what waits in an inbox is with an engine too
                found.update({id: [] for id in member.samples if id not in found})
        return found

    # --- the learner's thread ---

    def probe(self, requests: Sequence[Request]) -> list[Completion]:
        """Of the engines in rotation by turns, or of all of them side by side where each gets several."""
        members = self._in_rotation()
        if len(requests) < 4 * len(members):
            return members[next(self._turn) % len(members)].engine.probe(requests)
        shares = {member.number: requests[i :: len(members)] for i, member in enumerate(members)}
        found, errors = self._side_by_side(members, lambda member: member.engine.probe(shares[member.number]))
        for error in errors.values():
            raise error
        return [completion for share in found.values() for completion in share]

    def coverage(self) -> Coverage:
        return self._in_rotation()[0].engine.coverage()

    def begin_refit(self, manifest: Manifest) -> bool:
        """All engines that are not being replaced take part."""
        self._refitting = [member for member in self._present() if member.engine.doing is None]
        if not self._refitting:
            raise EngineError("All engines are being replaced.")
        self._failed, self._digest = {}, manifest.digest
        answers = self._refit(lambda member: member.engine.begin_refit(manifest))
        return all(answers.values())  # an engine that has the base takes a whole version too

    def write(self, bucket: Bucket) -> None:
        self._refit(lambda member: member.engine.write(bucket))

    def finish_refit(self) -> RefitResult:
        """The barrier. Whoever did not come through is brought to the version out of rotation.

        Raises:
            EngineError: none came through.
        """
        results = self._refit(self._finish)
        self._barrier([self._members[number] for number in results])
        found = list(results.values())
        return RefitResult(
            found[0].version,
            found[0].digest,
            decode_seconds=max(result.decode_seconds for result in found),
            pause_seconds=max(result.pause_seconds for result in found),
        )

    def _finish(self, member: Member) -> RefitResult:
        result = member.engine.finish_refit()
        if result.digest != self._digest:
            raise RefitError(f"After the refit engine {member.number} has another digest than what was sent.")
        return result

    def abort_refit(self) -> None:
        self._side_by_side(self._refitting, lambda member: member.engine.abort_refit())

    def pause(self, policy: InFlight) -> None:
        self._refit(lambda member: member.engine.pause(policy))

    def resume(self) -> None:
        self._side_by_side(self._in_rotation(), lambda member: member.engine.resume())

    @property
    def version(self) -> int:
        return min((member.engine.version for member in self._members if member.rotation), default=-1)

    @property
    def busy_seconds(self) -> float:
        """Of all engines together."""
        return sum(member.engine.busy_seconds for member in self._members)

    @property
    def restarts(self) -> int:
        return sum(member.engine.restarts for member in self._members)

    @property
    def doing(self) -> str | None:
        """For people: the restarts that are under way."""
        said = [
            f"engine {member.number}: {text}" for member in self._members if (text := member.engine.doing) is not None
        ]
        return "; ".join(said) or None

    @property
    def sizes(self) -> dict[str, int]:
        """For metrics: engines in rotation, and completions to come of the engine with the least and the most of them."""
        with self._lock:
            loads = [member.load for member in self._members if member.rotation]
        return {
            "engine/replicas": len(loads),
            "engine/load_min": min(loads, default=0),
            "engine/load_max": max(loads, default=0),
        }

    # --- inside ---

    def _serve(self, member: Member) -> None:
        """The thread of one engine: to it this is the rollout thread."""
        while not self._closed.is_set() and member.left is None:
            try:
                try:
                    while True:
                        member.inbox.get_nowait()()
                except queue.Empty:
                    pass
                done = member.engine.poll(TURN)
                if done:
                    self._came.put((member, done))
            except WorkLost as lost:
                self._came.put((member, lost))
                while not member.told.wait(TURN) and not self._closed.is_set():
                    pass  # until then what is in the inbox is of before
                member.told.clear()
                self._rejoin(member)
            except (EngineError, UserError) as error:
                self._came.put((member, error))
                return

    def _rejoin(self, member: Member) -> None:
        """A new engine has taken the place: it gets prompts when it is at the version of the others."""
        with self._lock:
            member.rotation = member.left is None and member.engine.version == self._version

    def _barrier(self, through: Sequence[Member]) -> None:
        with self._lock:
            for member in self._members:
                member.rotation = member in through
        for member in self._present():
            if member not in through:
                error = self._failed.get(member.number) or EngineError("It was being replaced during the refit.")
                self._repair.submit(self._bring_up, member, error)

    def _bring_up(self, member: Member, error: EngineError) -> None:
        try:
            member.engine.bring_up(error)
        except EngineError as last:
            self._came.put((member, last))
            return
        self._rejoin(member)

    def _counted(self, member: Member, completions: list[Completion]) -> list[Completion]:
        with self._lock:
            for completion in completions:
                left = member.samples.get(completion.request_id, 1) - 1
                member.samples[completion.request_id] = left
                if left <= 0:
                    del member.samples[completion.request_id]
        return completions

    def _lost(self, member: Member, progress: dict[int, list[int]]) -> WorkLost:
        """What this engine had in flight when it was replaced, and what its thread had not yet asked it."""
        with self._lock:
            ids, member.samples = frozenset(member.samples), {}
        with contextlib.suppress(queue.Empty):
            while True:
                member.inbox.get_nowait()
        member.told.set()
        return WorkLost([], progress, ids)

    def _leave(self, member: Member, error: EngineError) -> None:
        """An engine takes part in nothing any more. Raises the error when it was the last."""
        with self._lock:
            member.rotation, member.left = False, error
            others = sum(other.left is None for other in self._members)
        if not others:
            raise error
        self._tell(
            "warning", f"Engine {member.number} is left out of the run, which goes on with {others}: {error.brief}"
        )

    def _present(self) -> list[Member]:
        return [member for member in self._members if member.left is None]

    def _in_rotation(self) -> list[Member]:
        members = [member for member in self._members if member.rotation] or self._present()
        if not members:
            raise self._none_left()
        return members

    def _none_left(self) -> EngineError:
        return next(member.left for member in self._members if member.left is not None)

    def _refit(self, call: Callable[[Member], Result]) -> dict[int, Result]:
        """Do a step of a refit on all that are still in it. Raises the first error when none is left."""
        members = [member for member in self._refitting if member.number not in self._failed]
        found, errors = self._side_by_side(members, call)
        self._failed.update(errors)
        if not found:
            raise next(iter(self._failed.values()))
        return found

    def _side_by_side(
        self, members: Sequence[Member], call: Callable[[Member], Result]
    ) -> tuple[dict[int, Result], dict[int, EngineError]]:
        """Call for each in a thread of its own: results and errors by the engine's number. Other errors are raised."""
        futures = {member.number: self._beside.submit(call, member) for member in members}
        found: dict[int, Result] = {}
        errors: dict[int, EngineError] = {}
        for number, future in futures.items():
            try:
                found[number] = future.result()
            except EngineError as error:
                errors[number] = error
        return found, errors


Engines = SupervisedEngine | EnginePool
