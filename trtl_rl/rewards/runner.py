"""``RewardRunner``: scores samples while the engine generates, matches results by sample id, and applies the policy.

Each function has its own place: worker processes, one thread in this process, or this process's event loop. A call scores one
group, so that a failure costs one group and its message names the prompt.
"""

from __future__ import annotations

import asyncio
import math
import queue
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

from trtl_rl.errors import RewardError
from trtl_rl.rewards.call import call, call_async
from trtl_rl.rewards.loading import pickled
from trtl_rl.rewards.process import Call, ProcessPool
from trtl_rl.rewards.reward import Fault, Outcome, Reward, Sample, ScoredBatch, arguments, is_async

TOLD = 3  # faults of one function and kind that are told in full


class RewardRunner:
    """Scores samples; any thread may call it. Worker processes start at once.

    Args:
        log: File for what functions print and for every fault's traceback.
        report: Told about faults, when the policy lets the run go on.

    Raises:
        UserError: a function cannot be pickled for its process.
    """

    def __init__(
        self, rewards: Sequence[Reward], log: Path | None = None, report: Callable[[str], None] = lambda text: None
    ) -> None:
        self.rewards = list(rewards)
        self._log, self._report = log, report
        self._faults: Counter[tuple[str, str]] = Counter()
        self._new_faults: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()
        self._closed = False
        payloads = [pickled(reward) for reward in rewards]
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
        self._loop: _EventLoop | None = None
        self._places = [self._place(reward, payload) for reward, payload in zip(rewards, payloads, strict=True)]

    def wait_ready(self) -> None:
        """Wait until the worker processes have loaded their functions.

        Raises:
            RewardError: one could not; the message carries its traceback.
        """
        for reward, place in zip(self.rewards, self._places, strict=True):
            if isinstance(place, ProcessPool) and (text := place.wait_ready()) is not None:
                raise RewardError(f"Reward '{reward.name}' could not be loaded in its process. It {text}")

    def submit(self, samples: Sequence[Sample]) -> Future[ScoredBatch]:
        """Score samples of one group, or of several; returns at once.

        The future raises RewardError where a function has failed and its policy is ``error``.
        """
        batch = _Batch(self, list(samples))
        for reward, place in zip(self.rewards, self._places, strict=True):
            made = Call(arguments(reward.function, batch.samples), len(batch.samples))
            made.future.add_done_callback(lambda done, name=reward.name: batch.take(name, done.result()))  # type: ignore[misc]
            place.submit(made)
        return batch.future

    def score(self, samples: Sequence[Sample]) -> ScoredBatch:
        """Score samples and wait, each prompt's in a call of its own. Raises RewardError as ``submit``."""
        groups: dict[tuple[int, int], list[Sample]] = {}
        for sample in samples:
            groups.setdefault((sample.prompt.id, sample.prompt.occurrence), []).append(sample)
        futures = [self.submit(group) for group in groups.values()]
        parts = [future.result() for future in futures]
        at = {id: (part, i) for part in parts for i, id in enumerate(part.ids)}
        found = [at[sample.id] for sample in samples]
        return ScoredBatch(
            [sample.id for sample in samples],
            [part.total[i] for part, i in found],
            {reward.name: [part.components[reward.name][i] for part, i in found] for reward in self.rewards},
            sum(part.flops for part in parts),
            sum(part.seconds for part in parts),
        )

    def take_faults(self) -> dict[str, float]:
        """Metrics of the step: ``rewards/{name}/failed/{kind}``, samples without a valid value since the last call."""
        with self._lock:
            taken, self._new_faults = self._new_faults, Counter()
        return {f"rewards/{name}/failed/{kind}": count for (name, kind), count in sorted(taken.items())}

    def close(self) -> None:
        """Kill worker processes and stop the event loop, whatever they do. Safe to call twice."""
        self._closed = True
        for place in self._places:
            place.close()
        if self._loop is not None:
            self._loop.close()

    def _place(self, reward: Reward, payload: bytes | None) -> ProcessPool | _Thread | _OnLoop:
        if not reward.in_process:
            return ProcessPool(reward, payload, self._log)
        if not is_async(reward.function):
            return _Thread(reward)
        self._loop = self._loop or _EventLoop()
        return _OnLoop(reward, self._loop)

    def _settle(self, reward: Reward, outcome: Outcome, samples: list[Sample]) -> tuple[list[float | None], set[int]]:
        """The function's values after its policy, and the positions that it excludes. Raises RewardError."""
        values, excluded = list(outcome.values), set[int]()
        for fault in outcome.faults:
            positions = range(len(samples)) if fault.position is None else [fault.position]
            self._count(reward, fault, samples, len(positions))
            for position in positions:
                if reward.on_error == "value":
                    values[position] = reward.error_value
                else:
                    excluded.add(position)
        return values, excluded

    def _count(self, reward: Reward, fault: Fault, samples: list[Sample], count: int) -> None:
        prompt = samples[fault.position or 0].prompt
        if fault.position is None:
            where = f"on prompt {prompt.id} (samples {samples[0].id[1]} to {samples[-1].id[1]})"
        else:
            where = f"for sample {samples[fault.position].id[1]} (prompt {prompt.id})"
        verb, colon, rest = fault.text.partition(":")
        text = f"Reward '{reward.name}' {verb} {where}{colon}{rest}"
        if self._closed:
            return
        with self._lock:
            self._new_faults[reward.name, fault.kind] += count
            self._faults[reward.name, fault.kind] += 1
            times = self._faults[reward.name, fault.kind]
            if self._log is not None:
                with open(self._log, "a", encoding="utf-8") as file:
                    file.write(text + "\n")
        if reward.on_error == "error":
            raise RewardError(text)
        meaning = "left out" if reward.on_error == "exclude" else f"given {reward.error_value:g}"
        if times <= TOLD or times in (10, 100, 1000, 10_000, 100_000):
            self._report(
                f"{text}\nThe samples are {meaning} (on_error={reward.on_error}); time {times} of {fault.kind}."
            )


class _Batch:
    """Samples whose functions answer one by one."""

    def __init__(self, runner: RewardRunner, samples: list[Sample]) -> None:
        self.runner, self.samples = runner, samples
        self.future: Future[ScoredBatch] = Future()
        self._outcomes: dict[str, Outcome] = {}
        self._lock = threading.Lock()

    def take(self, name: str, outcome: Outcome) -> None:
        with self._lock:
            self._outcomes[name] = outcome
            if len(self._outcomes) < len(self.runner.rewards):
                return
        try:
            scored = self._join()
        except BaseException as error:
            self.future.set_exception(error)
        else:
            self.future.set_result(scored)

    def _join(self) -> ScoredBatch:
        n = len(self.samples)
        components: dict[str, list[float | None]] = {}
        excluded: set[int] = set()
        total: list[float | None] = [None] * n
        judging = []  # None for every sample says that a function is not meant for this prompt, as in TRL
        for reward in self.runner.rewards:
            values, out = self.runner._settle(reward, self._outcomes[reward.name], self.samples)
            components[reward.name] = values
            excluded |= out
            if any(value is not None for value in values):
                judging.append((reward.weight, values))
        for i in range(n):
            parts = [(weight, values[i]) for weight, values in judging]
            known = [weight * value for weight, value in parts if value is not None]
            if known and len(known) == len(parts) and i not in excluded:
                total[i] = math.fsum(known)
        outcomes = self._outcomes.values()
        ids = [sample.id for sample in self.samples]
        return ScoredBatch(ids, total, components, sum(o.flops for o in outcomes), sum(o.seconds for o in outcomes))


class _Thread:
    """Calls a function in this process, one call after another."""

    def __init__(self, reward: Reward) -> None:
        self._function = reward.function
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=f"reward {reward.name}", daemon=True).start()

    def submit(self, call: Call) -> None:
        self._calls.put(call)

    def close(self) -> None:
        """The thread ends after the call under way; with the process, if that never ends."""
        self._calls.put(None)

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            item.future.set_result(call(self._function, item.arguments, item.count))


class _OnLoop:
    """Awaits a function on this process's loop, many calls at once; the time limit cancels a call."""

    def __init__(self, reward: Reward, loop: _EventLoop) -> None:
        self._reward, self._loop = reward, loop

    def submit(self, call: Call) -> None:
        asyncio.run_coroutine_threadsafe(self._await(call), self._loop.loop)

    async def _await(self, call: Call) -> None:
        call.future.set_result(await call_async(self._reward.function, call.arguments, call.count, self._reward.limit))

    def close(self) -> None:
        """The loop is closed by its runner."""


class _EventLoop:
    """One loop for all calls, so that clients which functions keep between calls stay bound to a living loop."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="async rewards", daemon=True)
        self._thread.start()

    def close(self) -> None:
        if self.loop.is_closed():
            return
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(2.0)
        if not self._thread.is_alive():  # else a reward blocks its loop; the thread ends with the process
            self.loop.close()
