"""``Run``: builds the parts of one training run in the order that fails early and waits least, and takes them down."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING, Any

from trtl_rl.buffer import GroupBuffer
from trtl_rl.engines.pool import Engines
from trtl_rl.errors import UserError
from trtl_rl.flops.devices import this_device
from trtl_rl.flops.formulas import ModelShape
from trtl_rl.flops.ledger import Budget, Ledger
from trtl_rl.flops.precision import Fp8Products
from trtl_rl.losses.loss import make_loss
from trtl_rl.metrics import MetricsWriter, Rewound, evaluated_steps
from trtl_rl.model.loading import load_tokenizer, stop_ids
from trtl_rl.recipe import modelopt_state
from trtl_rl.recipe.audit import audit
from trtl_rl.recipe.patterns import unmatched
from trtl_rl.rollout import Prompt, Sampling
from trtl_rl.tasks.stream_task import make_task
from trtl_rl.tasks.task import Task
from trtl_rl.trainer import buffer_state, checkpoint, lora, resume
from trtl_rl.trainer.binding import bind
from trtl_rl.trainer.checks import launcher_notes
from trtl_rl.trainer.engine_place import find_place, make_engines
from trtl_rl.trainer.engine_start import EngineStart
from trtl_rl.trainer.evaluate import Evaluations, evaluation_prompts, make_evaluator
from trtl_rl.trainer.loading import Phases, load_model
from trtl_rl.trainer.record import RolloutRecord
from trtl_rl.trainer.rollouts import RolloutWorker, make_decode
from trtl_rl.trainer.saver import Saver
from trtl_rl.trainer.state import RunState
from trtl_rl.trainer.teaching import Teaching
from trtl_rl.trainer.trainer import Trainer, TrainResult
from trtl_rl.versions import versions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from trtl_rl.kernels.kernel_set import KernelSet
    from trtl_rl.model.bind import TrainableDecoder
    from trtl_rl.trainer.loop import Loop


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
        c, run_dir = self.config, self.trainer.run_dir
        found = resume.find(run_dir / "checkpoints", self.metrics) if self.trainer.resume else None
        saved = checkpoint.read_state(found) if found else {}
        identity = self._identity()
        resume.check_same_run(identity, saved.get("identity", identity))
        if saved:
            known = evaluated_steps(run_dir / "metrics.jsonl")
            if (ended := resume.nothing_to_do(c, saved, known)) is not None:
                return TrainResult("done", ended, saved["step"], run_dir, {}, nothing_to_do=True)

        if c.device == "cuda":
            _check_cuda()
        place = find_place(c, self.trainer.directory)
        # The engine's process starts while this one loads tokenizer and model.
        engine = self._engine = make_engines(c, place, run_dir, self.metrics.message, self.trainer.engine)
        phases = Phases(self.metrics, 5)
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
        import torch

        torch.set_num_threads(c.threads)
        tokenizer = load_tokenizer(self.trainer.source.path)
        task = self._make_task(tokenizer)
        identity["task.too_long skips"] = task.skipped
        resume.check_same_run(identity, saved.get("identity", identity))
        held_out = evaluation_prompts(
            c, self.trainer.evaluation_rows, lambda: task, tokenizer, self.trainer.prompt_room
        )
        context = self._context(task, held_out)
        phases.next()
        recipe = self.trainer.recipe
        model = load_model(self.trainer.source.path, recipe, found)
        for text in unmatched(recipe, model):
            self.metrics.message("warning", text)
        config = None if c.lora.rank else model.config
        parts = checkpoint.ModelParts(config, modelopt_state.capture(model), recipe.text)
        adapters = None
        if c.lora.rank:  # after the capture: ModelOpt's state is the base's, on which a resume puts them again
            adapters = lora.Adapters(model, c.lora, seed=c.seed, base=lora.base_name(self.trainer.source))
        phases.next()
        decoder, kernels = bind(c, self.trainer.directory, self.metrics, model, context)
        if saved and saved["kernels"] != kernels.identity:
            changed = resume.changed_versions(saved["versions"], versions())
            self.metrics.message(
                "warning",
                f"The operators are not those of the run that was saved ({changed}): it goes on, and differs in last bits from "
                "what it would have been.",
            )
        phases.next()

        shape = ModelShape.from_model(model)
        parameters = sum(p.numel() for p in model.parameters())
        ledger = Ledger(
            parameters=parameters,
            active_parameters=parameters - shape.inactive_parameters,
            trained_parameters=sum(p.numel() for p in model.parameters() if p.requires_grad),
            device=this_device(c.device),
            reward_system=", ".join(reward.name for reward in self.trainer.rewards),
            evaluation_target=", ".join(c.evaluation.scorers) if c.evaluation.prompts else "none",
        )
        # accelerate comes with these; the engine's process is starting meanwhile.
        from trtl_rl.trainer.learner import Learner
        from trtl_rl.trainer.loop import Loop
        from trtl_rl.trainer.reference import freeze

        loss = self.trainer.loss or make_loss(c.loss, c.sampling.max_new_tokens)
        learner = Learner(
            decoder,
            loss,
            c.optimizer,
            shape=shape,
            temperature=c.sampling.temperature,
            steps=c.steps * c.batch.updates,
            # Before a checkpoint is loaded: a resumed run keeps to the model that the run began with.
            reference=freeze(decoder, kernels) if loss.needs_reference_logprobs else None,
        )
        if adapters is not None:
            adapters.save_with(learner.accelerator)
        if found is not None:
            checkpoint.load(found, learner.accelerator)
            ledger.load_state_dict(saved["ledger"])
            self.state = RunState.resumed(saved["run"])
            learner.configure_optimizer(self.state.step * c.batch.updates)
        first = self.state.step
        decoder.refresh(first)
        if adapters is not None:
            self.metrics.message("info", lora.summary(decoder))
        phases.next()
        bring_up = EngineStart(
            c,
            self.trainer.directory,
            decoder,
            kernels,
            context=context,
            stop_ids=stop_ids(self.trainer.source.path, decoder.model, tokenizer),
            place=place,
            tell=self.metrics.message,
        )
        engine.start(bring_up, decoder.snapshot, first)
        phases.next()

        buffer = GroupBuffer(
            c.batch.prompts,
            c.buffer.max_staleness,
            first,
            needed=c.batch.prompts * max(0, c.steps - first),
            lease=c.buffer.lease,
            attempts=c.buffer.attempts,
        )
        decode = make_decode(tokenizer)
        sampling = Sampling(c.sampling.temperature, c.sampling.max_new_tokens)
        made_with = buffer_state.dependences(c, loss.needs_behaviour_logprobs)
        start, again = buffer_state.start_indices(saved["rollouts"], made_with) if saved else (0, [])
        worker = self._worker = RolloutWorker(
            engine,
            task,
            self._rewards,
            buffer,
            ledger,
            shape=shape,
            decode=decode,
            sampling=sampling,
            group_size=c.batch.group_size,
            seed=c.seed,
            start=start,
            again=again,
            needs_logprobs=loss.needs_behaviour_logprobs,
            fp8=Fp8Products.of(decoder.description.coverage),
            tell=self.metrics.message,
            on_group=self.trainer.callbacks.group,
            teaching=Teaching(c, saved["rollouts"]["recent_prompts"] if saved else None),
        )
        if saved:
            about = buffer_state.restore(
                saved["rollouts"], made_with, task=task, seed=c.seed, buffer=buffer, worker=worker, ledger=ledger
            )
            if about is not None:
                self.metrics.message("info", about)
        record = RolloutRecord(run_dir / "rollouts", c.rollouts.keep)
        saver = Saver(
            run_dir,
            c.checkpoint.keep,
            self.metrics,
            record,
            learner.accelerator,
            parts,
            worker,
            ledger,
            Budget(c.budget, c.steps),
            {
                "identity": identity,
                "coverage": decoder.description.coverage.to_json(),
                "kernels": kernels.identity,
                "versions": versions(),
                "config": c.model_dump(mode="json"),
            },
            made_with,
            self.trainer.callbacks.checkpoint,
        )
        rewound = Rewound()
        if self.trainer.resume:  # nothing is refused from here on
            self.trainer.write_config()
            rewound = self._rewind(record, first if saved else -1)
            if rewound.lost_flops:
                ledger.apart("interrupted", rewound.lost_flops)
        evaluated = set(rewound.evaluated)
        last: dict[str, float] = {}

        def told(step: int, metrics: dict[str, float], beside: bool) -> None:
            last.update(metrics)
            if not beside:  # whoever finds the row finds what it cost
                saver.add_to(self.state)
                saver.write_ledger(self.state)
            self.metrics.write("evaluation", step=step, metrics=metrics)

        evaluations = Evaluations(
            make_evaluator(c, self._scorer, held_out, engine, ledger, shape=shape, decode=decode),
            lambda done, total: self.metrics.progress("evaluation", done, total, "answers"),
            told,
        )

        def evaluate(step: int, beside: bool = False) -> None:
            if c.evaluation.prompts and step not in evaluated:
                evaluated.add(step)
                evaluations.beside(step) if beside else evaluations.now(step)

        self._describe(decoder, kernels, shape, parameters, first if saved else None, rewound)
        self._rewards.wait_ready()
        self._scorer.wait_ready()
        due = first == 0 or (c.evaluation.every and first % c.evaluation.every == 0)
        if due and not self._stopped:
            evaluate(first)
        loop = self._loop = Loop(
            c,
            engine=engine,
            learner=learner,
            worker=worker,
            buffer=buffer,
            ledger=ledger,
            metrics=self.metrics,
            state=self.state,
            save=saver.try_to_save,
            record=record.write,
            evaluate=lambda step: evaluate(step, beside=c.overlaps_evaluation),
            contract=place.contract,
            callbacks=self.trainer.callbacks,
            probes=[task.prompt(*task.order(c.seed).at(i)).ids for i in range(c.parity.prompts)],
        )
        loop.stop = self._stopped
        if saved:
            loop.parity.after_resume(first, self.metrics)
        reason = loop.run()
        worker.stop(resumable=reason == "interrupted")
        saver.save(self.state)
        if reason != "interrupted":
            evaluate(self.state.step)
        status = "interrupted" if reason == "interrupted" else "done"
        return TrainResult(status, reason, self.state.step, run_dir, last, saver.write_ledger(self.state))

    def _rewind(self, record: RolloutRecord, step: int) -> Rewound:
        """Drop what was written after the checkpoint of ``step`` (-1: there is none), since it is done again."""
        rewound = self.metrics.rewind(step)
        record.rewind(step)
        if rewound.steps:
            after = f" after step {step}" if step > 0 else ""
            self.metrics.message("info", f"{rewound.steps} steps{after} were not saved: they are done again.")
        return rewound

    def _make_task(self, tokenizer: PreTrainedTokenizerBase) -> Task:
        task = make_task(self.trainer.rows, self.config, tokenizer, self.trainer.prompt_room)
        for text in task.notes:
            self.metrics.message("warning", text)
        return task

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

    def _describe(
        self,
        decoder: TrainableDecoder,
        kernels: KernelSet,
        shape: ModelShape,
        parameters: int,
        resumed_from: int | None,
        rewound: Rewound,
    ) -> None:
        c = self.config
        self.metrics.write(
            "start",
            model=c.model,
            parameters=parameters,
            steps=c.steps,
            task=c.task.preset or (self.trainer.rows.source if c.task.mixture else c.data),
            loss=c.loss.name,
            recipe=f"{self.trainer.recipe.name} {self.trainer.recipe.digest[:12]}",
            coverage=audit(decoder.description.coverage, shape, parameters, decoder.context),
            kernels=kernels.description,
            compile_seconds=round(kernels.compile_seconds, 1),
            start_seconds=round(time.monotonic() - self.started, 1),
            run_dir=str(self.trainer.run_dir),
            versions=versions(),
            resumed_from=resumed_from,
            lost_flops=rewound.lost_flops,
        )


def _check_cuda() -> None:
    """Raise UserError when there is no device, before anything is loaded."""
    import torch

    if not torch.cuda.is_available():
        raise UserError("device=cuda, but torch finds no CUDA device here. Use device=cpu, or a CUDA build of torch.")
