"""The rollout thread: prompts → engine → completions → rewards → groups in the buffer."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future
from concurrent.futures import wait as wait_for
from typing import TYPE_CHECKING

from trtl_rl.buffer import GroupBuffer
from trtl_rl.config import RunConfig
from trtl_rl.engines.pool import Engines
from trtl_rl.engines.supervisor import WorkLost
from trtl_rl.errors import EngineError, RewardError
from trtl_rl.flops import formulas
from trtl_rl.flops.formulas import ModelShape
from trtl_rl.flops.ledger import Ledger, Waste
from trtl_rl.flops.precision import Fp8Products
from trtl_rl.metrics import Tell
from trtl_rl.rewards.reward import Sample, ScoredBatch
from trtl_rl.rewards.runner import RewardRunner
from trtl_rl.rollout import Completion, Group, Request, Sampling
from trtl_rl.tasks.task import Task
from trtl_rl.trainer.rollout_state import Attempt, Cost, Counters, Position
from trtl_rl.trainer.signs import Signs
from trtl_rl.trainer.teaching import Teaching

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DISCARD_LIMIT = 32  # so many groups in a row without two scored samples end the run
TURN = 0.05  # seconds of one wait of the thread


class RolloutWorker:
    """Keeps the engine busy as far as the buffer admits.

    A group whose work is lost is asked for again, with the same random streams, before any new one: when the engine was
    restarted, when the group's lease ran out, or when the engine itself cancelled an answer. What the lost work has cost is
    counted.

    Args:
        start: Index of the first prompt in the task's order; a resumed run goes on where it stopped.
        again: Indices that an interrupted run had started but not trained on: they come first.
        needs_logprobs: Whether the objective wants behaviour logprobs.
        tell: Takes messages for people: level and text.
        teaching: Passes over prompts and refills groups; ``None``: neither.
        fp8: Which products of the engine are in FP8, for the ledger.
        on_group: Called with a group that is scored and will be trained on, in the thread that scored it, one group after
            another; no lock of this class is held meanwhile that anything else waits for.

    Attributes:
        doing: What the thread is at, for people.
    """

    def __init__(
        self,
        engine: Engines,
        task: Task,
        rewards: RewardRunner,
        buffer: GroupBuffer,
        ledger: Ledger,
        *,
        shape: ModelShape,
        decode: Callable[[list[int]], str],
        sampling: Sampling,
        group_size: int,
        seed: int,
        start: int = 0,
        again: Iterable[int] = (),
        needs_logprobs: bool = False,
        tell: Tell = lambda level, text: None,
        teaching: Teaching | None = None,
        fp8: Fp8Products | None = None,
        on_group: Callable[[Group], None] = lambda group: None,
    ) -> None:
        self.engine, self.task, self.rewards, self.buffer, self.ledger = engine, task, rewards, buffer, ledger
        self.shape, self.decode, self.sampling, self.tell = shape, decode, sampling, tell
        self.group_size, self.seed, self.needs_logprobs = group_size, seed, needs_logprobs
        self.teaching, self.on_group = teaching or Teaching(RunConfig()), on_group
        self.fp8 = fp8 or Fp8Products()
        self.counters = Counters()
        self.next_index = start
        self.doing = "it was not started"
        self._again = deque(again)
        self._order = task.order(seed)
        self._ids = itertools.count()
        self._open: dict[int, Attempt] = {}
        self._lost: dict[int, Attempt] = {}  # cancelled, and not yet all back
        self._repeat: list[Group] = []  # to be asked for again
        self._scoring: dict[Future[ScoredBatch], Group] = {}  # generated, not yet charged and closed
        self._telling: Group | None = None  # charged, and not yet in the buffer, since ``on_group`` looks at it
        self._failure: BaseException | None = None  # of a reward
        self._signs = Signs()
        self._discards = 0
        self._lock = threading.Lock()  # an index leaves the order and enters the buffer at once, seen from outside
        self._closing = threading.Lock()  # groups are closed one after another; taken before ``_lock``
        self._stop = threading.Event()
        self._resumable = False
        self._thread = threading.Thread(target=self._run, name="rollouts", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float | None = None, *, resumable: bool = False) -> None:
        """End the thread, if it was started, and wait at most ``timeout`` seconds for it, and as long for ``on_group``; open
        requests are cancelled.

        Args:
            resumable: The run will go on and generate the same again: what that has cost is kept apart from the roles, so
                that an interrupted run counts as one that never was.
        """
        self._resumable = resumable
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(timeout)
        if self._closing.acquire(timeout=-1 if timeout is None else timeout):
            self._closing.release()

    def position(self) -> Position:
        """What a checkpoint keeps of this side, all of one instant; for the thread that takes batches."""
        with self._lock, self.counters.lock:
            ready = self.buffer.ready()
            if self._telling is not None:
                ready.append(self._telling)
            known = {group.index for group in ready}
            unfinished = [group.index for group in self.buffer.untrained() if group.index not in known]
            return Position(
                next_index=self.next_index,
                again=sorted([*self._again, *unfinished]),
                ready=ready,
                discarded=self.buffer.report_discarded(clear=False),
                discards=dict(self.buffer.discarded),
                tokens=self.counters.tokens,
                recent_prompts=self.teaching.state(),
                ledger=self.ledger.state_dict(),
            )

    def under_way(self) -> dict[int, list[int]]:
        """Tokens of the answers that the engine is at, by index of the group; for any thread."""
        progress = self.engine.progress()
        return {attempt.group.index: progress[id] for id, attempt in list(self._open.items()) if id in progress}

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                try:
                    self._turn()
                except WorkLost as lost:
                    self._take_back(lost)
                if self._failure is not None:
                    raise self._failure
            self._cancel()
        except BaseException as error:
            self.buffer.fail(error)
        self.doing = "it has ended"

    def _turn(self) -> None:
        self._submit()
        if self._open or self._lost:
            self.doing = "it waits for the engine"
            completions = self.engine.poll(TURN)
            self._collect(completions)
            if (passed := self._signs.passed()) is not None:
                self._check_leases(passed)
        elif scoring := list(self._scoring):
            self.doing = self._awaits_rewards()
            self._signs.pause()
            wait_for(scoring, TURN, FIRST_COMPLETED)
        else:
            self.doing = "it waits for room in the buffer"
            self._signs.pause()
            self.buffer.wait_for_room(TURN)

    def _submit(self) -> None:
        groups, self._repeat = self._repeat, []
        for _ in range(self.buffer.room()):
            with self._lock:
                index = self._again[0] if self._again else self.next_index
                id, occurrence = self._order.at(index)
                while not self._again and self.teaching.skips(id, occurrence):
                    index += 1
                    id, occurrence = self._order.at(index)
                group = Group(index, -1, self.task.prompt(id, occurrence))
                self.buffer.start(group)
                if self._again:
                    self._again.popleft()
                self.next_index = max(self.next_index, index + 1)
            groups.append(group)
        requests = []
        for group in groups:
            attempt = Attempt(next(self._ids), group)
            self._open[attempt.id] = attempt
            prompt = group.prompt
            seed = (self.seed, prompt.id, prompt.occurrence)
            requests.append(
                Request(attempt.id, prompt.ids, self.group_size, self.sampling, seed, logprobs=self.needs_logprobs)
            )
        if requests:
            self.doing = "it waits until the engine has taken requests"
            self.engine.submit(requests)

    def _collect(self, completions: list[Completion]) -> None:
        """Sort completions into their groups, and have those scored that are whole."""
        for completion in completions:
            attempt = self._open.get(completion.request_id) or self._lost[completion.request_id]
            attempt.completions.append(completion)
            self._signs.came(completion.request_id)
            if len(attempt.completions) < self.group_size:
                continue
            if self._lost.pop(attempt.id, None) is not None:
                self._charge_lost(attempt, "lease_expired")
                continue
            del self._open[attempt.id]
            if any(item.finish_reason == "cancelled" for item in attempt.completions):
                self._charge_lost(attempt, "failed")
                self._retry([attempt.group], "cancelled by the engine")
                continue
            attempt.completions.sort(key=lambda item: item.sample)
            attempt.group.completions = attempt.completions
            self._score(attempt.group)

    # --- work that is lost ---

    def _check_leases(self, seconds: float) -> None:
        """Renew the leases of what the engine works on; ask again for groups that it has forgotten."""
        if self._repeat:
            return  # leases are of what the engine has
        known = self.engine.progress()
        alive = self._signs.of_life(known)
        self.buffer.renew(self._open[id].group.index for id in alive if id in self._open)
        with self._lock:  # rewards have time limits of their own
            scored = [*self._scoring.values(), *([self._telling] if self._telling else [])]
        self.buffer.renew(group.index for group in scored)
        groups = self.buffer.expired(seconds)
        if not groups:
            return
        ids = {attempt.group.index: id for id, attempt in self._open.items()}
        lost = [ids[group.index] for group in groups]
        self._lost.update({id: self._open.pop(id) for id in lost})
        self._retry(groups, f"no sign of life for {self.buffer.lease:g} s (buffer.lease)")
        # Not these prompts: the engine has them, and does nothing at all. What it has forgotten is asked for again.
        if self._signs.silent_for > self.buffer.lease and any(id in known for id in lost):
            self.engine.fail(
                EngineError(f"The engine answers calls, but nothing has come of its work for {self.buffer.lease:g} s.")
            )
        else:
            self.engine.cancel(lost)

    def _take_back(self, lost: WorkLost) -> None:
        """The engine was restarted: keep what had arrived, ask again for the rest."""
        self._collect(lost.completions)
        ids = lost.ids if lost.ids is not None else self._open.keys() | self._lost.keys()
        for id in ids & self._lost.keys():
            self._charge_lost(self._lost.pop(id), "lease_expired", lost.progress)
        attempts = [self._open.pop(id) for id in sorted(ids & self._open.keys())]
        self._signs = Signs()
        for attempt in attempts:
            self._charge_lost(attempt, "engine_death", lost.progress)
            self.buffer.give_back(attempt.group, "engine restarted")
        self._ask_again([attempt.group for attempt in attempts])

    def _retry(self, groups: list[Group], reason: str) -> None:
        """Ask again for groups that got lost while the engine went on, and leave those out that do so each time."""
        again = [group for group in groups if self.buffer.give_back(group, reason, blame=True)]
        self._ask_again(again)
        if again:
            self.tell("warning", f"{_named(again)}: {reason}; generated again.")
        spent = [group for group in groups if group not in again]
        if spent:
            times = f"{self.buffer.attempts} times (buffer.attempts)"
            self.tell("warning", f"{_named(spent)}: {reason}, {times}; left out of the run.")
        for group in spent:
            self.buffer.discard(group, reason)
            self._count_discard(group, EngineError, f"{reason}.")

    def _ask_again(self, groups: list[Group]) -> None:
        self._repeat = sorted([*self._repeat, *groups], key=lambda group: group.index)

    def _cancel(self) -> None:
        """Stop what is unfinished, and count what it cost."""
        progress: dict[int, list[int]] = {}
        if self._open:
            self.doing = "it cancels what is unfinished"
            try:
                self.engine.cancel(list(self._open))
                end = time.monotonic() + 2.0
                while self._missing() and time.monotonic() < end:
                    self._keep(self.engine.poll(TURN))
                progress = self.engine.progress()
            except WorkLost as lost:
                self._keep(lost.completions)
                progress = lost.progress
        with self._lock:
            scoring, self._scoring = self._scoring, {}
        whole = [Attempt(-1, group, group.completions) for group in scoring.values()]
        for attempt in (*self._open.values(), *self._lost.values(), *whole):
            if self._resumable:
                self.ledger.apart("interrupted", self._cost(attempt, progress).flops(self.shape))
            else:
                self._charge_lost(attempt, "cancelled", progress)
        self._open, self._lost = {}, {}

    def _missing(self) -> bool:
        return any(len(attempt.completions) < self.group_size for attempt in self._open.values())

    def _keep(self, completions: list[Completion]) -> None:
        for completion in completions:
            (self._open.get(completion.request_id) or self._lost[completion.request_id]).completions.append(completion)

    # --- groups that are whole ---

    def _score(self, group: Group) -> None:
        """Have a whole group rewarded; whichever thread has scored it closes it."""
        group.texts = [self.decode(completion.ids) for completion in group.completions]
        pairs = zip(group.completions, group.texts, strict=True)
        scored = self.rewards.submit([Sample((group.index, c.sample), group.prompt, text, c.ids) for c, text in pairs])
        with self._lock:
            self._scoring[scored] = group
        scored.add_done_callback(self._close)

    def _close(self, done: Future[ScoredBatch]) -> None:
        """A group is scored: it is ready for training, or discarded with the reason counted."""
        try:
            with self._closing:
                with self._lock:  # counted under the lock: a checkpoint sees the group and its cost, or neither
                    self._telling = group = self._settle(done)
                if group is not None:
                    self.on_group(group)
                    with self._lock:
                        self.buffer.complete(group)
                        self._telling = None
        except BaseException as error:
            self._failure = self._failure or error
            self.buffer.fail(self._failure)

    def _settle(self, done: Future[ScoredBatch]) -> Group | None:
        """Charge a scored group; returns it where it is to be trained on."""
        group = self._scoring.pop(done, None)
        if group is None or self._failure is not None:
            return None  # the run ends
        try:
            scored = done.result()
        except BaseException:  # one that goes on with a better reward generates the group again
            self.ledger.apart("interrupted", self.search_flops(group))
            raise
        self._take_rewards(group, scored)
        self._charge(Cost.of(group.prompt, group.completions))
        if len(group.scored()) < 2:
            self.ledger.waste("failed", self.search_flops(group))
            self.buffer.discard(group, "fewer than two scored samples")
            silent = ", ".join(name for name, values in group.components.items() if None in values)
            why = f"fewer than two scored samples, since {silent} returned None. Can the reward judge this data?"
            self._count_discard(group, RewardError, why)
            return None
        self._discards = 0
        if self.teaching.refill(group, self.search_flops(group)):
            self.ledger.waste("zero_signal", self.search_flops(group))
            self.buffer.discard(group, "no signal")
            return None
        self.ledger.waste("failed", self.search_flops(group) - self.unwasted_flops(group))
        return group

    def _take_rewards(self, group: Group, scored: ScoredBatch) -> None:
        self.ledger.add("feedback", scored.flops, scored.seconds)
        with self.counters.lock:
            self.counters.reward_seconds += scored.seconds
        at = {id: i for i, id in enumerate(scored.ids)}
        places = [at[group.index, completion.sample] for completion in group.completions]
        group.rewards = [scored.total[i] for i in places]
        group.components = {name: [values[i] for i in places] for name, values in scored.components.items()}

    def _awaits_rewards(self) -> str:
        prompts = ", ".join(str(group.prompt.id) for group in list(self._scoring.values())[:8])
        names = ", ".join(reward.name for reward in self.rewards.rewards)
        return f"it waits for reward functions ({names}) on prompts {prompts}"

    def _count_discard(self, group: Group, error: type[Exception], why: str) -> None:
        """A group was left out. With an engine or a reward that is good for nothing this would go on for ever without a batch."""
        self._discards += 1
        if self._discards >= DISCARD_LIMIT:
            raise error(f"{self._discards} groups in a row had to be left out, last prompt {group.prompt.id}: {why}")

    # --- what it costs ---

    def _charge(self, cost: Cost) -> int:
        flops, drawn = cost.flops(self.shape), sum(cost.tokens)
        self.ledger.add("search", flops, fp8=self.fp8.forward_flops(drawn + sum(cost.prefills), drawn))
        self.ledger.count_tokens(generated=drawn)
        with self.counters.lock:
            self.counters.tokens += drawn
        return flops

    def _charge_lost(self, attempt: Attempt, reason: Waste, progress: Mapping[int, list[int]] | None = None) -> None:
        """Count an attempt that nobody trains on."""
        cost = self._cost(attempt, progress or {})
        if any(cost.tokens) or any(cost.prefills):
            self.ledger.waste(reason, self._charge(cost))

    def _cost(self, attempt: Attempt, progress: Mapping[int, list[int]]) -> Cost:
        """Of answers that arrived, and as much of the rest as the engine had told of."""
        rest = progress.get(attempt.id, [])[: self.group_size - len(attempt.completions)]
        return Cost.of(attempt.group.prompt, attempt.completions, rest)

    def search_flops(self, group: Group) -> int:
        """FLOPs of generating a group: what was computed of its prompt, then every token."""
        return Cost.of(group.prompt, group.completions).flops(self.shape)

    def unwasted_flops(self, group: Group) -> int:
        """``search_flops`` without the answers that were left out: those count as wasted already, with no prefill."""
        pairs = zip(group.completions, group.rewards, strict=True)
        left_out = [len(completion.ids) for completion, reward in pairs if reward is None]
        return self.search_flops(group) - formulas.rollout(self.shape, len(group.prompt.ids), left_out, [])


def _named(groups: list[Group]) -> str:
    """Prompts by their numbers, for people."""
    names = ", ".join(str(group.prompt.id) for group in groups[:8]) + (" …" if len(groups) > 8 else "")
    return f"Prompt {names}" if len(groups) == 1 else f"Prompts {names}"


def make_decode(tokenizer: PreTrainedTokenizerBase) -> Callable[[list[int]], str]:
    """Text of generated ids, for rewards and people; it is never tokenised again."""

    def decode(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=True))

    return decode
