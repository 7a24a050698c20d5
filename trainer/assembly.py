"""``Run``: builds the parts of one training run in the order that fails early and waits least, and takes them down."""

from __future__ import annotations

import time
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from trtl_rl.buffer import GroupBuffer
from trtl_rl.engines.pool import Engines
from trtl_rl.errors import UserError
from trtl_rl.flops.ledger import Budget, Ledger
from trtl_rl.flops.precision import Fp8Products
from trtl_rl.metrics import MetricsWriter, Rewound, evaluated_steps
from trtl_rl.model.loading import load_tokenizer, stop_ids
from trtl_rl.recipe.audit import audit
from trtl_rl.rollout import Prompt, Sampling
from trtl_rl.tasks.stream_task import make_task
from trtl_rl.tasks.task import Task
from trtl_rl.trainer import buffer_state, checkpoint, lora, resume
from trtl_rl.trainer.checks import launcher_notes
from trtl_rl.trainer.engine_place import EnginePlace, find_place, make_engines
from trtl_rl.trainer.engine_start import EngineStart
from trtl_rl.trainer.evaluate import Evaluations, evaluation_prompts, make_evaluator
from trtl_rl.trainer.loading import Phases
from trtl_rl.trainer.policy import Policy, Saved, make_policy
from trtl_rl.trainer.record import RolloutRecord
from trtl_rl.trainer.rollouts import RolloutWorker, make_decode
from trtl_rl.trainer.saver import Saver
from trtl_rl.trainer.state import RunState
from trtl_rl.trainer.teaching import Teaching
from trtl_rl.trainer.trainer import Trainer, TrainResult
from trtl_rl.versions import versions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from trtl_rl.trainer.loop import Loop


@dataclass(frozen=True)
class Data:
    """The prompts of a run.

    Attributes:
        held_out: To evaluate on.
        context: Tokens of the longest prompt and answer.
        identity: What a resumed run must share with the one that was saved.
    """

    tokenizer: PreTrainedTokenizerBase
    task: Task
    held_out: list[Prompt]
    context: int
    identity: dict[str, Any]


class Run:
    """One training run. As a context manager it always ends the engine's process."""

    def __init__(self, trainer: Trainer, metrics: MetricsWriter, started: float) -> None:
        self.trainer, self.config, self.metrics, self.started = trainer, trainer.config, metrics, started
        self.state = RunState()
        self._engine: Engines | None = None
        self._rewards = trainer.reward_runner(metrics)
        self._loop: Loop | None = None
        self._worker: RolloutWorker | None = None
        self._scorer = trainer.evaluation_scorer()
        self._stopped = trainer.stop_requested
        self._evaluated: set[int] = set()  # steps that have an evaluation
        self._last: dict[str, float] = {}  # the last one's metrics

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._engine is not None:
            self._engine.close()
        if self._worker is not None:
            self._worker.stop(timeout=2.0)  # it may be inside a reward function that hangs
        self._rewards.close()
        self._scorer.close()

    def stop(self) -> None:
        if not self._stopped:
            self.metrics.message("info", "Stopping: the step under way is finished and saved first.")
        self._stopped = True
        if self._loop is not None:
            self._loop.stop = True
        if self._engine is not None:
            self._engine.give_up()  # a restart would be for nothing

    def train(self) -> TrainResult:
        """Build the run, do its steps, and save. Raises what :meth:`Trainer.train` does."""
        c, run_dir = self.config, self.trainer.run_dir
        saved = self._saved()
        if saved:
            known = evaluated_steps(run_dir / "metrics.jsonl")
            if (ended := resume.nothing_to_do(c, saved.state, known)) is not None:
                return TrainResult("done", ended, saved.state["step"], run_dir, {}, nothing_to_do=True)
        if c.device == "cuda":
            _check_cuda()
        place = find_place(c, self.trainer.directory)
        # The engine's process starts while this one loads tokenizer and model.
        engine = self._engine = make_engines(c, place, run_dir, self.metrics.message, self.trainer.engine)
        phases = Phases(self.metrics, 5)
        self._warn()
        data = self._make_data(saved)
        phases.next()
        policy = make_policy(self.trainer, self.metrics, saved, data.context, place, phases)
        self.state = policy.state
        first = self.state.step
        self._start_engine(engine, place, data, policy)
        phases.next()
        buffer, worker = self._make_rollouts(engine, data, policy, saved)
        record = RolloutRecord(run_dir / "rollouts", c.rollouts.keep)
        saver = self._make_saver(data, policy, worker, record)
        rewound = self._rewind(record, policy.ledger, first if saved else -1)
        evaluations = self._make_evaluations(engine, data, policy, saver)
        self._describe(policy, first if saved else None, rewound)
        self._rewards.wait_ready()
        self._scorer.wait_ready()
        due = first == 0 or (c.evaluation.every and first % c.evaluation.every == 0)
        if due and not self._stopped:
            self._evaluate(evaluations, first)
        from trtl_rl.trainer.loop import Loop

        loop = self._loop = Loop(
            c,
            engine=engine,
            learner=policy.learner,
            worker=worker,
            buffer=buffer,
            ledger=policy.ledger,
            metrics=self.metrics,
            state=self.state,
            save=saver.try_to_save,
            record=record.write,
            evaluate=lambda step: self._evaluate(evaluations, step, beside=c.overlaps_evaluation),
            contract=place.contract,
            callbacks=self.trainer.callbacks,
            probes=[data.task.prompt(*data.task.order(c.seed).at(i)).ids for i in range(c.parity.prompts)],
        )
        loop.stop = self._stopped
        if saved:
            loop.parity.after_resume(first, self.metrics)
        reason = loop.run()
        worker.stop(resumable=reason == "interrupted")
        saver.save(self.state)
        if reason != "interrupted":
            self._evaluate(evaluations, self.state.step)
        status = "interrupted" if reason == "interrupted" else "done"
        return TrainResult(status, reason, self.state.step, run_dir, self._last, saver.write_ledger(self.state))

    def _saved(self) -> Saved:
        """The checkpoint that the run goes on from. Raises UserError when it is of another run."""
        found = resume.find(self.trainer.run_dir / "checkpoints", self.metrics) if self.trainer.resume else None
        saved = Saved(found, checkpoint.read_state(found)) if found else Saved()
        _check_same_run(self._identity(), saved)
        return saved

    def _warn(self) -> None:
        """Say what a person may not expect of the settings."""
        c = self.config
        if c.engine.fault is not None:
            self.metrics.message(
                "warning",
                f"The engine will fail on purpose (engine.fault={c.engine.fault}); engine.fault=null ends that.",
            )
        if self.trainer.translated:
            self.metrics.message("info", "Said in TRL's words: " + "; ".join(self.trainer.translated) + ".")
        for text in launcher_notes():
            self.metrics.message("warning", text)
        if c.optimizer.lr == 0:
            self.metrics.message("warning", "optimizer.lr=0: every step runs in full, and no weight moves.")

    def _make_data(self, saved: Saved) -> Data:
        """Tokenise the prompts."""
        import torch

        torch.set_num_threads(self.config.threads)
        trainer = self.trainer
        tokenizer = load_tokenizer(trainer.source.path)
        task = make_task(trainer.rows, self.config, tokenizer, trainer.prompt_room)
        for text in task.notes:
            self.metrics.message("warning", text)
        identity = {**self._identity(), "task.too_long skips": task.skipped}
        _check_same_run(identity, saved)
        held_out = evaluation_prompts(
            self.config, trainer.evaluation_rows, lambda: task, tokenizer, trainer.prompt_room
        )
        return Data(tokenizer, task, held_out, self._context(task, held_out), identity)

    def _start_engine(self, engine: Engines, place: EnginePlace, data: Data, policy: Policy) -> None:
        """Bring the engine to the policy's version."""
        decoder = policy.decoder
        bring_up = EngineStart(
            self.config,
            self.trainer.directory,
            decoder,
            policy.kernels,
            context=data.context,
            stop_ids=stop_ids(self.trainer.source.path, decoder.model, data.tokenizer),
            place=place,
            tell=self.metrics.message,
        )
        engine.start(bring_up, decoder.snapshot, policy.state.step)

    def _make_rollouts(
        self, engine: Engines, data: Data, policy: Policy, saved: Saved
    ) -> tuple[GroupBuffer, RolloutWorker]:
        """The buffer and the thread that fills it, with the groups that were ready when the run was saved."""
        c, first = self.config, policy.state.step
        buffer = GroupBuffer(
            c.batch.prompts,
            c.buffer.max_staleness,
            first,
            needed=c.batch.prompts * max(0, c.steps - first),
            lease=c.buffer.lease,
            attempts=c.buffer.attempts,
        )
        made_with = buffer_state.dependences(c, policy.loss.needs_behaviour_logprobs)
        rollouts = saved.state.get("rollouts")
        start, again = (0, []) if rollouts is None else buffer_state.start_indices(rollouts, made_with)
        worker = self._worker = RolloutWorker(
            engine,
            data.task,
            self._rewards,
            buffer,
            policy.ledger,
            shape=policy.shape,
            decode=make_decode(data.tokenizer),
            sampling=Sampling(c.sampling.temperature, c.sampling.max_new_tokens),
            group_size=c.batch.group_size,
            seed=c.seed,
            start=start,
            again=again,
            needs_logprobs=policy.loss.needs_behaviour_logprobs,
            fp8=Fp8Products.of(policy.decoder.description.coverage),
            tell=self.metrics.message,
            on_group=self.trainer.callbacks.group,
            teaching=Teaching(c, None if rollouts is None else rollouts["recent_prompts"]),
        )
        if rollouts is not None:
            about = buffer_state.restore(
                rollouts, made_with, task=data.task, seed=c.seed, buffer=buffer, worker=worker, ledger=policy.ledger
            )
            if about is not None:
                self.metrics.message("info", about)
        return buffer, worker

    def _make_saver(self, data: Data, policy: Policy, worker: RolloutWorker, record: RolloutRecord) -> Saver:
        c = self.config
        return Saver(
            self.trainer.run_dir,
            c.checkpoint.keep,
            self.metrics,
            record,
            policy.learner.accelerator,
            policy.parts,
            worker,
            policy.ledger,
            Budget(c.budget, c.steps),
            {
                "identity": data.identity,
                "coverage": policy.decoder.description.coverage.to_json(),
                "kernels": policy.kernels.identity,
                "versions": versions(),
                "config": c.model_dump(mode="json"),
            },
            buffer_state.dependences(c, policy.loss.needs_behaviour_logprobs),
            self.trainer.callbacks.checkpoint,
        )

    def _make_evaluations(self, engine: Engines, data: Data, policy: Policy, saver: Saver) -> Evaluations:
        decode = make_decode(data.tokenizer)

        def told(step: int, metrics: dict[str, float], beside: bool) -> None:
            self._last.update(metrics)
            if not beside:  # whoever finds the row finds what it cost
                saver.add_to(self.state)
                saver.write_ledger(self.state)
            self.metrics.write("evaluation", step=step, metrics=metrics)

        return Evaluations(
            make_evaluator(
                self.config, self._scorer, data.held_out, engine, policy.ledger, shape=policy.shape, decode=decode
            ),
            lambda done, total: self.metrics.progress("evaluation", done, total, "answers"),
            told,
        )

    def _evaluate(self, evaluations: Evaluations, step: int, beside: bool = False) -> None:
        """Evaluate, unless that was done at this step."""
        if self.config.evaluation.prompts and step not in self._evaluated:
            self._evaluated.add(step)
            evaluations.beside(step) if beside else evaluations.now(step)

    def _rewind(self, record: RolloutRecord, ledger: Ledger, step: int) -> Rewound:
        """Drop what was written after the checkpoint of ``step`` (-1: there is none), since it is done again."""
        if not self.trainer.resume:
            return Rewound()
        self.trainer.write_config()  # nothing is refused from here on
        rewound = self.metrics.rewind(step)
        record.rewind(step)
        if rewound.steps:
            after = f" after step {step}" if step > 0 else ""
            self.metrics.message("info", f"{rewound.steps} steps{after} were not saved: they are done again.")
        if rewound.lost_flops:
            ledger.apart("interrupted", rewound.lost_flops)
        self._evaluated = set(rewound.evaluated)
        return rewound

    def _context(self, task: Task, held_out: list[Prompt]) -> int:
        """Tokens that the longest prompt and answer need; key/value buffers are made for it."""
        c = self.config
        if c.engine.max_context is not None:
            return c.engine.max_context
        if task.longest is None:
            return self.trainer.source.context if self.trainer.directory is None else self.trainer.directory.max_context
        return max(task.longest, *(len(prompt.ids) for prompt in held_out), 0) + c.sampling.max_new_tokens

    def _identity(self) -> dict[str, Any]:
        """What a resumed run must share with the one that was saved."""
        c = self.config
        return {
            "seed": c.seed,
            "data": self.trainer.rows.fingerprint,
            "task": c.task.model_dump(mode="json"),
            "recipe": self.trainer.recipe.digest,
            "batch.group_size": c.batch.group_size,
            **lora.identity(c.lora, self.trainer.source),
        }

    def _describe(self, policy: Policy, resumed_from: int | None, rewound: Rewound) -> None:
        c, decoder, kernels = self.config, policy.decoder, policy.kernels
        self.metrics.write(
            "start",
            model=c.model,
            parameters=policy.parameters,
            steps=c.steps,
            task=c.task.preset or (self.trainer.rows.source if c.task.mixture else c.data),
            loss=c.loss.name,
            recipe=f"{self.trainer.recipe.name} {self.trainer.recipe.digest[:12]}",
            coverage=audit(decoder.description.coverage, policy.shape, policy.parameters, decoder.context),
            kernels=kernels.description,
            compile_seconds=round(kernels.compile_seconds, 1),
            start_seconds=round(time.monotonic() - self.started, 1),
            run_dir=str(self.trainer.run_dir),
            versions=versions(),
            resumed_from=resumed_from,
            lost_flops=rewound.lost_flops,
        )


def _check_same_run(identity: dict[str, Any], saved: Saved) -> None:
    resume.check_same_run(identity, saved.state.get("identity", identity))


def _check_cuda() -> None:
    """Raise UserError when there is no device, before anything is loaded."""
    import torch

    if not torch.cuda.is_available():
        raise UserError("device=cuda, but torch finds no CUDA device here. Use device=cpu, or a CUDA build of torch.")
