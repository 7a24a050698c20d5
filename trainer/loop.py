"""The loop of a run: rollout → buffer → update → refit.

::

     rollout thread                    buffer                      main thread (this file)
    ┌─────────────────────┐   start   ┌────────┐      take       ┌──────────────────────────┐
    │ prompts → engine    │──────────▶│ admits │────────────────▶│ update: forward, backward│
    │ completions→rewards │──────────▶│ paces  │                 │ refresh: quantise        │
    └─────────▲───────────┘ complete  │ leases │                 │ refit: codes → engine    │
              │ completions           └───▲────┘                 │ probe: parity            │
    ┌─────────┴───────────┐               │ advance              │ metrics, checkpoint      │
    │ engine (own process)│◀─────────── refit ───────────────────└──────────────────────────┘
    └─────────────────────┘                                        watchdog: looks at both threads

=================  =============================================================================================
who                waits for
=================  =============================================================================================
engine             requests; nothing else: a refit is received and decoded beside generation
rollout thread     room in the buffer (``max_staleness``); completions; reward functions; an engine that is restarted
learner            a batch: B complete groups, and first of all those that would be too stale for the next one
refit              the engine's checks and decoding, then its current step, or its unfinished completions (``in_flight``);
                   an engine that is restarted
probe              the engine's answer, every ``parity.every`` updates
=================  =============================================================================================

Nobody else waits: rewards are scored while the engine generates, the engine generates while the learner updates. How long
they wait is in ``timing_s/rollout_wait`` (the learner for a batch) and ``timing_s/engine_wait`` (the engine, with nothing to
generate), and how much lies between them in ``buffer/ready`` and ``buffer/in_flight``.

Whoever waits for somebody else waits with a limit: calls of the engine (``engine.timeout``, ``refit.timeout``), prompts
(``buffer.lease``). What fails is done again by a new engine (``engines/supervisor.py``), and what cannot be is raised here.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from trtl_rl.buffer import GroupBuffer
from trtl_rl.config import RunConfig
from trtl_rl.engines.pool import Engines
from trtl_rl.errors import EngineError, ParityError, RewardError, UserError
from trtl_rl.flops.ledger import Budget, Ledger
from trtl_rl.metrics import Accumulator, MetricsWriter
from trtl_rl.refit.manifest import Manifest
from trtl_rl.refit.sender import Sent, send
from trtl_rl.refit.validate import BlockScaleContract
from trtl_rl.rollout import Group
from trtl_rl.trainer.callbacks import Callbacks
from trtl_rl.trainer.learner import Learner, Update
from trtl_rl.trainer.parity import ParityCheck
from trtl_rl.trainer.rollouts import RolloutWorker
from trtl_rl.trainer.slow_parts import SlowParts
from trtl_rl.trainer.state import RunState
from trtl_rl.trainer.watchdog import Watchdog, missing_groups

NO_SIGNAL_LIMIT = 20  # so many steps in a row without any signal end the run
NOT_FINITE_LIMIT = 20  # so many left-out steps in a row end it too


class Loop:
    """Runs updates until steps or budget are used up, or ``stop`` is set.

    Args:
        save: Called with the state when a checkpoint is due.
        record: Called with the step, its groups and those discarded since the step before.
        evaluate: Called with the step when an evaluation is due.
        probes: Prompts of the parity check, as token ids.
        contract: What every refit must comply with, if the engine does not check that itself.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        engine: Engines,
        learner: Learner,
        worker: RolloutWorker,
        buffer: GroupBuffer,
        ledger: Ledger,
        metrics: MetricsWriter,
        state: RunState,
        save: Callable[[RunState], None],
        record: Callable[[int, list[Group], list[tuple[Group, str]]], None],
        evaluate: Callable[[int], None],
        probes: list[list[int]],
        contract: BlockScaleContract | None = None,
        callbacks: Callbacks,
    ) -> None:
        self.config, self.engine, self.learner, self.worker = config, engine, learner, worker
        self.buffer, self.ledger, self.metrics, self.state = buffer, ledger, metrics, state
        self.save, self.record, self.evaluate = save, record, evaluate
        self.contract, self.callbacks = contract, callbacks
        self.budget = Budget(config.budget, config.steps)
        self._limited = any(vars(config.budget).values())
        self.parity = ParityCheck(config, engine, learner, ledger, worker.sampling, probes)
        self.stop = False
        self._busy, self._busy_at = engine.busy_seconds, time.perf_counter()
        self.watchdog = Watchdog(self._missing, first=config.engine.timeout, tell=metrics.message)
        self.parts = SlowParts(metrics)
        self._sent: Sent | None = None  # what the engine holds

    def run(self) -> str:
        """Train. Returns why it ended: ``steps``, ``budget.flops`` …, ``interrupted``, ``no signal``.

        Raises:
            EngineError, RewardError, UserError, ParityError: somebody else has failed. The learner is whole, and was saved.
        """
        try:
            with self.watchdog, self.parts:
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
            self.engine.step_done()
            self.watchdog.step_done(self.state.step_seconds[-1])
            reason = self._ended()
            every = self.config.checkpoint.every
            if every and self.state.step % every == 0 and reason is None:
                with self.watchdog.stage("saving a checkpoint"):
                    self.save(self.state)
            every = self.config.evaluation.every
            if every and self.state.step % every == 0 and reason is None:
                with self.watchdog.stage("evaluation"):
                    self.evaluate(self.state.step)
                self._probed(self.buffer.counts()["in_flight"])
                self.watchdog.step_done()
        return reason or "interrupted"

    def _missing(self, stage: str) -> str:
        """What a step that takes very long is waiting for, for people."""
        parts = [f"The learner is at: {stage}; the rollout thread: {self.worker.doing}."]
        if (engine := self.engine.doing) is not None:
            parts.append(f"Engine: {engine}.")
        parts.append(missing_groups(self.buffer, self.config.batch.group_size, self.worker.under_way()))
        return " ".join(parts)

    def _ended(self) -> str | None:
        if self.stop:
            return "interrupted"
        if self.state.no_signal >= NO_SIGNAL_LIMIT:
            return "no signal"
        s = self.state
        return self.budget.reached(self.ledger, s.tokens, s.seconds, s.step)

    def _next_batch(self) -> list[Group] | None:
        self.parts.enter("rollout_wait")
        self._waited_from = time.perf_counter()
        with self.watchdog.stage("waiting for a batch"):
            while not self.stop:
                try:
                    groups = self.buffer.take(timeout=0.25)
                except EngineError:
                    if self.stop:  # which ended a restart that was under way
                        break
                    raise
                if groups is not None:
                    return groups
        return None

    def _step(self, groups: list[Group]) -> None:
        s, start = self.state, self._waited_from
        version = s.step + 1
        out = Accumulator()
        taken = time.perf_counter()
        self.parts.enter("learn")
        self._remember_sent()
        with self.watchdog.stage(f"the update of step {version}"):
            update = self._learn(groups)
        learned = time.perf_counter()
        self._count_learning(update, learned - taken)
        failure: Exception | None = None  # of the engine; the learner is whole, and its step is told first
        self.parts.enter("refit")
        try:
            self._refit(version, out)
        except EngineError as error:
            failure = error
        s.step = version
        # Counted before the next rollouts may begin, so that the counts of a synchronous run repeat too.
        self._describe(groups, out)
        counts = self.buffer.counts()
        refitted = time.perf_counter()
        busy = max(self._busy, self.engine.busy_seconds)
        self.ledger.add("search", 0, busy - self._busy)
        idle = max(0.0, refitted - self._busy_at - (busy - self._busy))
        self._busy, self._busy_at = busy, refitted
        out.update(self.ledger.step_metrics())
        out.update({f"buffer/{name}": count for name, count in counts.items()})
        for counted in (
            self.worker.rewards.take_faults(),
            self.worker.teaching.take_metrics(),
            self.worker.task.metrics(),
        ):
            out.update(counted)
        tokens, rewarded = self.worker.counters.take()
        s.tokens += tokens
        if failure is None:
            self.buffer.advance(version)
            self.parts.enter("parity")
            try:
                with self.watchdog.stage("parity probe"):
                    self.parity.after_refit(version, self.metrics, out)
            except (EngineError, ParityError) as error:
                failure = error
            self._probed(counts["in_flight"])
        self.parts.enter(None)  # what follows writes progress rows of its own
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
                "timing_s/engine_wait": idle,
                "engine/restarts": self.engine.restarts,
                **self.engine.sizes,
            }
        )
        if self._limited:
            out.update({"flops/budget_frac": self.budget.fraction(self.ledger, s.tokens, s.seconds, s.step)})
            report = self.budget.report(self.ledger, s.tokens, s.seconds, s.step)
            out.update({f"budget/left/{key.removeprefix('budget.')}": value["left"] for key, value in report.items()})
        self.record(s.step, groups, self.buffer.report_discarded())
        row = out.reduce()
        self.metrics.step(s.step, row, {**out.counts(), **update.counts})
        self.callbacks.step(s.step, row)
        if failure is not None and not (self.stop and isinstance(failure, EngineError)):
            raise failure
        self._watch_signal(groups, update.stepped)

    def _learn(self, groups: list[Group]) -> Update:
        s, batch = self.state, self.config.batch
        if self._limited:
            self.learner.spent = self.budget.fraction(self.ledger, s.tokens, s.seconds, s.step)
            self.learner.configure_optimizer(s.step * batch.updates)
        size = batch.train_group_size
        chosen = groups if size is None else [group.most_varied(size) for group in groups]
        return self.learner.train(chosen, s.step, batch.updates)

    def _count_learning(self, update: Update, seconds: float) -> None:
        self.ledger.add("learning", update.flops, seconds, fp8=update.fp8, recomputed=update.recomputed)
        self.ledger.count_tokens(trained=update.tokens)
        self.ledger.apart("padding", update.padding)
        self.ledger.waste("failed", update.wasted)

    def _remember_sent(self) -> None:
        """Before the first update: the engine began with the learner's first version."""
        if self._sent is None:
            decoder = self.learner.decoder
            coverage = decoder.description.coverage.digest
            self._sent = Sent(decoder.snapshot, Manifest.of(decoder.snapshot, decoder.weights.version, coverage))

    def _probed(self, in_flight: int) -> None:
        """The engine's time for probes and evaluations is apart from search, where it did nothing else meanwhile."""
        if not in_flight:
            busy = max(self._busy, self.engine.busy_seconds)
            self._busy_at += busy - self._busy  # nor did it wait meanwhile
            self._busy = busy

    def _refit(self, version: int, out: Accumulator) -> None:
        decoder = self.learner.decoder
        coverage = decoder.description.coverage.digest
        start = time.perf_counter()
        with self.watchdog.stage("refit: quantise"):
            tensors = decoder.refresh(version)
        quantised = time.perf_counter()
        out.update({"timing_s/refit/quantise": quantised - start})
        self.engine.hold(tensors, version)
        finish = self.config.buffer.in_flight == "finish"

        def arrived() -> None:
            if finish:
                stages.enter_context(
                    self.watchdog.stage("refit: waiting for unfinished answers (buffer.in_flight=finish)")
                )
                self.engine.pause("finish")
            stages.enter_context(self.watchdog.stage("refit: finish"))

        with contextlib.ExitStack() as stages:
            stages.enter_context(self.watchdog.stage("refit: move"))
            try:
                report = send(
                    self.engine,
                    tensors,
                    version=version,
                    coverage=coverage,
                    bucket_bytes=self.config.refit.bucket_bytes,
                    mode=self.config.refit_mode,
                    previous=self._sent,
                    before_finish=arrived,
                    contract=self.contract,
                )
                if finish:
                    self.engine.resume()
            except EngineError as error:
                self.engine.bring_up(error)
                self._sent = Sent(tensors, Manifest.of(tensors, version, coverage))
                return
        self._sent = report.sent
        told = {
            "refit/bytes": report.bytes,
            "refit/changed_frac": report.changed_frac,
            "timing_s/refit/move": report.move,
            "timing_s/refit/decode": report.decode,
            "timing_s/refit/finish": report.finish,
            "timing_s/refit/pause": report.pause,
        }
        out.update(told)
        self.callbacks.refit(version, told)

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
                self.ledger.waste("zero_signal", self.worker.unwasted_flops(group))
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
