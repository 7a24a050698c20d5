"""The rollout thread: prompts → engine → completions → rewards → groups in the buffer."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trtl_rl.buffer import GroupBuffer
from trtl_rl.engines.engine import RolloutEngine
from trtl_rl.errors import RewardError
from trtl_rl.flops import formulas
from trtl_rl.flops.formulas import ModelShape
from trtl_rl.flops.ledger import Ledger
from trtl_rl.rewards.runner import RewardRunner
from trtl_rl.rollout import Completion, Group, Request, Sampling
from trtl_rl.tasks.task import Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DISCARD_LIMIT = 32  # so many groups in a row without two scored samples end the run


@dataclass
class Counters:
    """What the thread has done since the loop last took it for its metrics."""

    tokens: int = 0
    reward_seconds: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self) -> tuple[int, float]:
        """Tokens and seconds of reward functions, which begin at 0 again."""
        with self.lock:
            taken = self.tokens, self.reward_seconds
            self.tokens, self.reward_seconds = 0, 0.0
        return taken


@dataclass(frozen=True)
class Position:
    """Where the rollout side is at one instant.

    Attributes:
        next_index: Of the first prompt that was never started.
        again: Indices before it that were started and are not finished; what they cost is in no counter yet.
        ready: Groups that wait to be trained on; what they cost is counted.
        discarded: Groups that were discarded and not yet reported, with the reasons; ``discards`` counts all.
        tokens: Generated since the loop last took the counters.
        ledger: State of the ledger.
    """

    next_index: int
    again: list[int]
    ready: list[Group]
    discarded: list[tuple[Group, str]]
    discards: dict[str, int]
    tokens: int
    ledger: dict[str, Any]


class RolloutWorker:
    """Keeps the engine busy as far as the buffer admits.

    Args:
        start: Index of the first prompt in the task's order; a resumed run goes on where it stopped.
        again: Indices that an interrupted run had started but not trained on: they come first.
        needs_logprobs: Whether the objective wants behaviour logprobs.
    """

    def __init__(
        self,
        engine: RolloutEngine,
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
    ) -> None:
        self.engine, self.task, self.rewards, self.buffer, self.ledger = engine, task, rewards, buffer, ledger
        self.shape, self.decode, self.sampling = shape, decode, sampling
        self.group_size, self.seed, self.needs_logprobs = group_size, seed, needs_logprobs
        self.counters = Counters()
        self.next_index = start
        self._again = deque(again)
        self._order = task.order(seed)
        self._open: dict[int, Group] = {}
        self._discards = 0
        self._lock = threading.Lock()  # an index leaves the order and enters the buffer at once, seen from outside
        self._stop = threading.Event()
        self._resumable = False
        self._thread = threading.Thread(target=self._run, name="rollouts", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float | None = None, *, resumable: bool = False) -> None:
        """End the thread, if it was started, and wait for it at most ``timeout`` seconds; open requests are cancelled.

        Args:
            resumable: The run will go on and generate the same again: what that has cost is kept apart from the roles, so
                that an interrupted run counts as one that never was.
        """
        self._resumable = resumable
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(timeout)

    def position(self) -> Position:
        """What a checkpoint keeps of this side, all of one instant; for the thread that takes batches."""
        with self._lock, self.counters.lock:
            ready = self.buffer.ready()
            known = {group.index for group in ready}
            unfinished = [group.index for group in self.buffer.untrained() if group.index not in known]
            return Position(
                next_index=self.next_index,
                again=sorted([*self._again, *unfinished]),
                ready=ready,
                discarded=self.buffer.report_discarded(clear=False),
                discards=dict(self.buffer.discarded),
                tokens=self.counters.tokens,
                ledger=self.ledger.state_dict(),
            )

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._submit()
                if self._open:
                    self._collect(self.engine.poll(0.05))
                else:
                    self.buffer.wait_for_room(0.05)
            if self._open:
                self._cancel()
        except BaseException as error:
            self.buffer.fail(error)

    def _cancel(self) -> None:
        """Stop what is unfinished, and count what it cost."""
        self.engine.cancel(list(self._open))
        end = time.monotonic() + 2.0
        while self._open and time.monotonic() < end:
            for completion in self.engine.poll(0.05):
                group = self._open[completion.request_id]
                group.completions.append(completion)
                if len(group.completions) < self.group_size:
                    continue
                del self._open[group.index]
                if self._resumable:
                    self.ledger.apart("interrupted", self.search_flops(group))
                else:
                    self._charge(group)
                    self.ledger.waste("cancelled", self.search_flops(group))

    def _submit(self) -> None:
        requests = []
        for _ in range(self.buffer.room()):
            with self._lock:
                index = self._again[0] if self._again else self.next_index
                id, occurrence = self._order.at(index)
                group = Group(index, -1, self.task.prompt(id, occurrence))
                self.buffer.start(group)
                if self._again:
                    self._again.popleft()
                self.next_index = max(self.next_index, index + 1)
            self._open[index] = group
            seed = (self.seed, id, occurrence)
            requests.append(
                Request(index, group.prompt.ids, self.group_size, self.sampling, seed, logprobs=self.needs_logprobs)
            )
        if requests:
            self.engine.submit(requests)

    def _collect(self, completions: list[Completion]) -> None:
        finished = []
        for completion in completions:
            group = self._open[completion.request_id]
            group.completions.append(completion)
            if len(group.completions) == self.group_size:
                del self._open[group.index]
                group.completions.sort(key=lambda item: item.sample)
                finished.append(group)
        if finished:
            self._score(finished)

    def _score(self, groups: list[Group]) -> None:
        """Reward whole groups, and close each: ready for training, or discarded with the reason counted."""
        for group in groups:
            group.texts = [self.decode(completion.ids) for completion in group.completions]
        start = time.perf_counter()
        try:
            scored = self.rewards.score(
                [group.prompt for group in groups for _ in group.completions],
                [text for group in groups for text in group.texts],
                [completion.ids for group in groups for completion in group.completions],
            )
        except BaseException:  # the run ends; one that goes on with a better reward generates them again
            for group in groups:
                self.ledger.apart("interrupted", self.search_flops(group))
            raise
        seconds = time.perf_counter() - start
        self.ledger.add("feedback", 0, seconds)
        with self.counters.lock:
            self.counters.reward_seconds += seconds
        at = 0
        for group in groups:
            n = len(group.completions)
            group.rewards = scored.total[at : at + n]
            group.components = {name: values[at : at + n] for name, values in scored.components.items()}
            at += n
            with self._lock:  # counted when it is closed: a checkpoint sees both or neither
                self._charge(group)
                useful = len(group.scored()) >= 2
                if useful:
                    self.buffer.complete(group)
                else:
                    self.ledger.waste("failed", self.search_flops(group))
                    self.buffer.discard(group, "fewer than two scored samples")
            self._discards = 0 if useful else self._discards + 1
            self._check_discards(group)

    def _check_discards(self, group: Group) -> None:
        """A reward that scores nothing would let the engine generate for ever without a batch."""
        if self._discards >= DISCARD_LIMIT:
            silent = [name for name, values in group.components.items() if None in values]
            raise RewardError(
                f"{self._discards} groups in a row had fewer than two scored samples: {', '.join(silent)} returned None, "
                f"last for prompt {group.prompt.id}. Can the reward judge this data?"
            )

    def _charge(self, group: Group) -> None:
        self.ledger.add("search", self.search_flops(group))
        with self.counters.lock:
            self.counters.tokens += sum(len(completion.ids) for completion in group.completions)

    def search_flops(self, group: Group) -> int:
        """FLOPs of generating a group: its prompt once, then every token."""
        answers = (len(completion.ids) for completion in group.completions)
        return formulas.rollout(self.shape, len(group.prompt.ids), answers)


def make_decode(tokenizer: PreTrainedTokenizerBase) -> Callable[[list[int]], str]:
    """Text of generated ids, for rewards and people; it is never tokenised again."""

    def decode(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=True))

    return decode
