"""The loop of a run: rollout → buffer → update → refit.

::

     rollout thread                    buffer                      main thread (this file)
    ┌─────────────────────┐   start   ┌────────┐      take       ┌──────────────────────────┐
    │ prompts → engine    │──────────▶│ admits │────────────────▶│ update: forward, backward│
    │ completions→rewards │──────────▶│ paces  │                 │ refresh: quantise        │
    └─────────▲───────────┘ complete  └───▲────┘                 │ refit: codes → engine    │
              │ completions               │ advance              │ probe: parity            │
    ┌─────────┴───────────┐               └──────────────────────│ metrics, checkpoint      │
    │ engine (own process)│◀─────────── refit ───────────────────└──────────────────────────┘
    └─────────────────────┘

=================  =============================================================================================
who                waits for
=================  =============================================================================================
engine             requests; nothing else: a refit is received and decoded beside generation
rollout thread     room in the buffer (``max_staleness``); completions; reward functions
learner            a batch: B complete groups, and first of all those that would be too stale for the next one
refit              the engine's checks and decoding, then its current step, or its unfinished completions (``in_flight``)
probe              the engine's answer, every ``parity.every`` updates
=================  =============================================================================================

Nobody else waits: rewards are scored while the engine generates, the engine generates while the learner updates.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from trtl_rl.buffer import GroupBuffer
from trtl_rl.config import RunConfig
from trtl_rl.engines.engine import RolloutEngine
from trtl_rl.errors import EngineError, ParityError, RewardError, UserError
from trtl_rl.flops.ledger import Budget, Ledger
from trtl_rl.metrics import Accumulator, MetricsWriter
from trtl_rl.refit.manifest import Manifest
from trtl_rl.refit.sender import Sent, send
from trtl_rl.rollout import Group
from trtl_rl.trainer.learner import Learner, Update
from trtl_rl.trainer.parity import ParityCheck
from trtl_rl.trainer.rollouts import RolloutWorker
from trtl_rl.trainer.state import RunState

STALL_FACTOR = 30.0  # a batch that takes so many times the median step is named
NO_SIGNAL_LIMIT = 20  # so many steps in a row without any signal end the run
NOT_FINITE_LIMIT = 20  # so many left-out steps in a row end it too


class Loop:
    """Runs updates until steps or budget are used up, or ``stop`` is set.

    Args:
        save: Called with the state when a checkpoint is due.
        evaluate: Called with the step when an evaluation is due.
        probes: Prompts of the parity check, as token ids.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        engine: RolloutEngine,
        learner: Learner,
        worker: RolloutWorker,
        buffer: GroupBuffer,
        ledger: Ledger,
        metrics: MetricsWriter,
        state: RunState,
        save: Callable[[RunState], None],
        evaluate: Callable[[int], None],
        probes: list[list[int]],
    ) -> None:
        self.config, self.engine, self.learner, self.worker = config, engine, learner, worker
        self.buffer, self.ledger, self.metrics, self.state = buffer, ledger, metrics, state
        self.save, self.evaluate = save, evaluate
        self.budget = Budget(config.budget, config.steps)
        self._limited = any(vars(config.budget).values())
        self.parity = ParityCheck(config, engine, learner, ledger, worker.sampling, probes)
        self.stop = False
        self._busy = engine.busy_seconds
        self._sent: Sent | None = None  # what the engine holds

    def run(self) -> str:
        """Train. Returns why it ended: ``steps``, ``budget.flops`` …, ``interrupted``, ``no signal``.

        Raises:
            EngineError, RewardError, UserError, ParityError: somebody else has failed. The learner is whole, and was saved.
        """
        try:
            return self._run()
        except (EngineError, RewardError, UserError, ParityError):
            if self.state.step:
                self.save(self.state)
            raise

    def _run(self) -> str:
        reason = self._ended()
        if reason is None:
            self.worker.start()
        while reason is None:
            groups = self._next_batch()
            if groups is None:
                break  # stopped while waiting
            self._step(groups)
            reason = self._ended()
            every = self.config.checkpoint.every
            if every and self.state.step % every == 0 and reason is None:
                self.save(self.state)
            every = self.config.evaluation.every
            if every and self.state.step % every == 0 and reason is None:
                self.evaluate(self.state.step)
                self._probed(self.buffer.counts()["in_flight"])
        return reason or "interrupted"

    def _ended(self) -> str | None:
        if self.stop:
            return "interrupted"
        if self.state.no_signal >= NO_SIGNAL_LIMIT:
            return "no signal"
        s = self.state
        return self.budget.reached(self.ledger, s.tokens, s.seconds, s.step)

    def _next_batch(self) -> list[Group] | None:
        """Wait for a batch; name what is missing when that takes very long."""
        self._waited_from = time.perf_counter()
        recent = self.state.step_seconds[-50:]
        limit = max(60.0, STALL_FACTOR * statistics.median(recent)) if recent else self.config.engine.timeout
        warned = False
        while not self.stop:
            groups = self.buffer.take(timeout=0.25)
            if groups is not None:
                return groups
            waited = time.perf_counter() - self._waited_from
            if waited > limit and not warned:
                counts = self.buffer.counts()
                self.metrics.message(
                    "warning",
                    f"No batch for {waited:.0f} s: {counts['ready']} groups ready, {counts['in_flight']} in flight, "
                    f"{self.config.batch.prompts} needed. The engine or a reward function is slow or hung; see logs/.",
                )
                warned = True
        return None

    def _step(self, groups: list[Group]) -> None:
        s, start = self.state, self._waited_from
        version = s.step + 1
        out = Accumulator()
        taken = time.perf_counter()
        self._remember_sent()
        if self._limited:
            self.learner.spent = self.budget.fraction(self.ledger, s.tokens, s.seconds, s.step)
            self.learner.configure_optimizer(s.step * self.config.batch.updates)
        size = self.config.batch.train_group_size
        chosen = groups if size is None else [group.most_varied(size) for group in groups]
        update = self.learner.train(chosen, s.step, self.config.batch.updates)
        learned = time.perf_counter()
        self._count_learning(update, learned - taken)
        failure: Exception | None = None  # of the engine; the learner is whole, and its step is told first
        try:
            self._refit(version, out)
        except EngineError as error:
            failure = error
        s.step = version
        # Counted before the next rollouts may begin, so that the counts of a synchronous run repeat too.
        self._describe(groups, out)
        busy = self.engine.busy_seconds
        self.ledger.add("search", 0, max(0.0, busy - self._busy))
        self._busy = busy
        out.update(self.ledger.step_metrics())
        counts = self.buffer.counts()
        out.update({f"buffer/{name}": count for name, count in counts.items()})
        tokens, rewarded = self.worker.counters.take()
        s.tokens += tokens
        refitted = time.perf_counter()
        if failure is None:
            self.buffer.advance(version)
            try:
                self.parity.after_refit(version, self.metrics, out)
            except (EngineError, ParityError) as error:
                failure = error
            self._probed(counts["in_flight"])
        end = time.perf_counter()
        s.seconds += end - start
        s.step_seconds = [*s.step_seconds[-199:], end - start]
        out.update(update.metrics)
        out.update(
            {
                "num_tokens": s.tokens,
                "perf/tokens_per_second": tokens / (end - start),
                "timing_s/step": end - start,
                "timing_s/rollout_wait": taken - start,
                "timing_s/learn": learned - taken,
                "timing_s/refit": refitted - learned,
                "timing_s/rewards": rewarded,
                "timing_s/parity": end - refitted,
            }
        )
        if self._limited:
            out.update({"flops/budget_frac": self.budget.fraction(self.ledger, s.tokens, s.seconds, s.step)})
            report = self.budget.report(self.ledger, s.tokens, s.seconds, s.step)
            out.update({f"budget/left/{key.removeprefix('budget.')}": value["left"] for key, value in report.items()})
        self.metrics.step(s.step, out.reduce())
        if failure is not None:
            raise failure
        self._watch_signal(groups, update.stepped)

    def _count_learning(self, update: Update, seconds: float) -> None:
        self.ledger.add("learning", update.flops, seconds, fp8=update.fp8, recomputed=update.recomputed)
        self.ledger.count_tokens(trained=update.tokens)
        self.ledger.apart("padding", update.padding)
        if not update.stepped:  # the gradient was not finite
            self.ledger.waste("failed", update.flops)

    def _remember_sent(self) -> None:
        """Before the first update: the engine began with the learner's first version."""
        if self._sent is None:
            decoder = self.learner.decoder
            coverage = decoder.description.coverage.digest
            self._sent = Sent(decoder.snapshot, Manifest.of(decoder.snapshot, decoder.weights.version, coverage))

    def _probed(self, in_flight: int) -> None:
        """The engine's time for probes and evaluations is apart from search, where it did nothing else meanwhile."""
        if not in_flight:
            self._busy = self.engine.busy_seconds

    def _refit(self, version: int, out: Accumulator) -> None:
        decoder = self.learner.decoder
        coverage = decoder.description.coverage.digest
        start = time.perf_counter()
        tensors = decoder.refresh(version)
        quantised = time.perf_counter()
        finish = self.config.buffer.in_flight == "finish"
        report = send(
            self.engine,
            tensors,
            version=version,
            coverage=coverage,
            bucket_bytes=self.config.refit.bucket_bytes,
            mode=self.config.refit.chosen_mode,
            previous=self._sent,
            before_finish=(lambda: self.engine.pause("finish")) if finish else (lambda: None),
        )
        if finish:
            self.engine.resume()
        self._sent = report.sent
        out.update(
            {
                "refit/bytes": report.bytes,
                "refit/changed_frac": report.changed_frac,
                "timing_s/refit/quantise": quantised - start,
                "timing_s/refit/move": report.move,
                "timing_s/refit/decode": report.decode,
                "timing_s/refit/finish": report.finish,
                "timing_s/refit/pause": report.pause,
            }
        )

    def _describe(self, groups: list[Group], out: Accumulator) -> None:
        """Metrics of the batch as it was trained, and one sample for people."""
        for group in groups:
            scored = group.scored()
            mean = sum(reward for _, reward in scored) / len(scored)
            spread = (sum((reward - mean) ** 2 for _, reward in scored) / len(scored)) ** 0.5
            out.add("reward", sum(reward for _, reward in scored), count=len(scored))
            out.add("reward_std", spread)
            for name, values in group.components.items():
                known = [value for value in values if value is not None]
                out.add(f"rewards/{name}/mean", sum(known), count=len(known))
            for completion, _ in scored:
                out.add("completions/mean_length", len(completion.ids))
                out.add("completions/clipped_ratio", completion.finish_reason == "length")
            if not group.has_signal():
                self.ledger.waste("zero_signal", self.worker.search_flops(group))
        group = groups[self.state.step % len(groups)]
        at = self.state.step % len(group.completions)
        self.metrics.write(
            "sample",
            step=self.state.step,
            prompt=group.prompt.text,
            completion=group.texts[at],
            reward=group.rewards[at],
            finish_reason=group.completions[at].finish_reason,
            version=group.completions[at].version_first,
        )

    def _watch_signal(self, groups: list[Group], stepped: bool) -> None:
        """Say it when nothing can be learned, and when most answers are cut off."""
        s = self.state
        signal = any(group.has_signal() for group in groups)
        s.no_signal = 0 if signal else s.no_signal + 1
        if s.no_signal == 3:
            self.metrics.message(
                "warning",
                "Three steps in a row without signal: in every group all rewards are equal, so the loss is 0 and nothing is "
                "learned. Are the prompts too hard or too easy, or is sampling.max_new_tokens too small?",
            )
        s.not_finite = s.not_finite + 1 if signal and not stepped else 0
        if s.not_finite >= NOT_FINITE_LIMIT:
            raise FloatingPointError(
                f"The gradient was not finite in {s.not_finite} steps in a row; the weights are those before them. Lower "
                "optimizer.lr, or look for extreme rewards."
            )
        if signal and not stepped:
            self.metrics.message(
                "warning", f"Step {s.step}: the gradient is not finite; the optimizer step was left out."
            )
        completions = [completion for group in groups for completion, _ in group.scored()]
        cut = sum(completion.finish_reason == "length" for completion in completions) / len(completions)
        if s.step == 1 and cut > 0.5:
            limit = self.config.sampling.max_new_tokens
            self.metrics.message(
                "warning",
                f"{cut:.0%} of the answers were cut off at sampling.max_new_tokens={limit}, and a cut answer can rarely be "
                f"right. Try sampling.max_new_tokens={2 * limit}.",
            )
