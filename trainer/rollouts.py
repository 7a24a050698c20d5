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
from trtl_rl.flops.precision import Fp8Products
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


class RolloutWorker:
    """Keeps the engine busy as far as the buffer admits.

    Args:
        start: Index of the first prompt in the task's order; a resumed run goes on where it stopped.
        again: Indices that an interrupted run had started but not trained on: they come first.
        needs_logprobs: Whether the objective wants behaviour logprobs.
        fp8: Which products of the engine are in FP8, for the ledger.
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
        fp8: Fp8Products | None = None,
    ) -> None:
        self.engine, self.task, self.rewards, self.buffer, self.ledger = engine, task, rewards, buffer, ledger
        self.shape, self.decode, self.sampling = shape, decode, sampling
        self.group_size, self.seed, self.needs_logprobs = group_size, seed, needs_logprobs
        self.fp8 = fp8 or Fp8Products()
        self.counters = Counters()
        self.next_index = start
        self._again = deque(again)
        self._order = task.order(seed)
        self._open: dict[int, Group] = {}
        self._discards = 0
        self._lock = threading.Lock()  # an index leaves the order and enters the buffer at once, seen from outside
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rollouts", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float | None = None) -> None:
        """End the thread, if it was started, and wait for it at most ``timeout`` seconds; open requests are cancelled."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(timeout)

    def position(self) -> dict[str, Any]:
        """What a checkpoint keeps: ``next_index``, the indices before it that are ``untrained``, and what those have cost."""
        with self._lock:
            waiting = [group.index for group in self.buffer.untrained()]
            spent = sum(self.search_flops(group) for group in self.buffer.ready())
            return {
                "next_index": self.next_index,
                "untrained": sorted([*self._again, *waiting]),
                "untrained_flops": spent,
            }

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
                if len(group.completions) == self.group_size:
                    del self._open[group.index]
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
            self._charge(group)
            group.texts = [self.decode(completion.ids) for completion in group.completions]
        start = time.perf_counter()
        scored = self.rewards.score(
            [group.prompt for group in groups for _ in group.completions],
            [text for group in groups for text in group.texts],
            [completion.ids for group in groups for completion in group.completions],
        )
        seconds = time.perf_counter() - start
        self.ledger.add("feedback", self.rewards.take_flops(), seconds)
        with self.counters.lock:
            self.counters.reward_seconds += seconds
        at = 0
        for group in groups:
            n = len(group.completions)
            group.rewards = scored.total[at : at + n]
            group.components = {name: values[at : at + n] for name, values in scored.components.items()}
            at += n
            if len(group.scored()) < 2:
                self.ledger.waste("failed", self.search_flops(group))
                self.buffer.discard(group, "fewer than two scored samples")
                self._discards += 1
                self._check_discards(group)
            else:
                self._discards = 0
                lost = [c for c, reward in zip(group.completions, group.rewards, strict=True) if reward is None]
                answers = [len(completion.ids) for completion in lost]
                self.ledger.waste("failed", formulas.rollout(self.shape, len(group.prompt.ids), answers, []))
                self.buffer.complete(group)

    def _check_discards(self, group: Group) -> None:
        """A reward that scores nothing would let the engine generate for ever without a batch."""
        if self._discards >= DISCARD_LIMIT:
            silent = [name for name, values in group.components.items() if None in values]
            raise RewardError(
                f"{self._discards} groups in a row had fewer than two scored samples: {', '.join(silent)} returned None, "
                f"last for prompt {group.prompt.id}. Can the reward judge this data?"
            )

    def _charge(self, group: Group) -> None:
        drawn = sum(len(completion.ids) for completion in group.completions)
        positions = drawn + sum(sum(completion.prefills) for completion in group.completions)
        self.ledger.add("search", self.search_flops(group), fp8=self.fp8.forward_flops(positions, drawn))
        self.ledger.count_tokens(generated=drawn)
        with self.counters.lock:
            self.counters.tokens += drawn

    def search_flops(self, group: Group) -> int:
        """FLOPs of generating a group: what was computed of its prompt, then every token."""
        answers = (len(completion.ids) for completion in group.completions)
        prefills = [tokens for completion in group.completions for tokens in completion.prefills]
        return formulas.rollout(self.shape, len(group.prompt.ids), answers, prefills)


def make_decode(tokenizer: PreTrainedTokenizerBase) -> Callable[[list[int]], str]:
    """Text of generated ids, for rewards and people; it is never tokenised again."""

    def decode(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=True))

    return decode
