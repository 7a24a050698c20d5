"""``Run``: builds the parts of one training run in the order that fails early and waits least, and takes them down."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING, Any

from trtl_rl.buffer import GroupBuffer
from trtl_rl.engines.host import HostedEngine
from trtl_rl.errors import UserError
from trtl_rl.flops.devices import this_device
from trtl_rl.flops.formulas import ModelShape
from trtl_rl.flops.ledger import Budget, Ledger
from trtl_rl.flops.precision import Fp8Products
from trtl_rl.losses.loss import make_loss
from trtl_rl.metrics import MetricsWriter
from trtl_rl.model.loading import load_tokenizer, stop_ids
from trtl_rl.recipe import modelopt_state
from trtl_rl.recipe.audit import audit
from trtl_rl.recipe.patterns import unmatched
from trtl_rl.rewards.runner import RewardRunner
from trtl_rl.rollout import Sampling
from trtl_rl.tasks.task import Task
from trtl_rl.trainer import checkpoint
from trtl_rl.trainer.binding import bind
from trtl_rl.trainer.engine_start import start_engine
from trtl_rl.trainer.evaluate import Evaluator
from trtl_rl.trainer.loading import Phases, load_model
from trtl_rl.trainer.rollouts import RolloutWorker, make_decode
from trtl_rl.trainer.state import RunState
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
        self._engine: HostedEngine | None = None
        self._rewards = RewardRunner(trainer.rewards)
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

    def train(self) -> TrainResult:
        c, run_dir = self.config, self.trainer.run_dir
        found = checkpoint.whole(run_dir / "checkpoints") if self.trainer.resume else []
        saved = checkpoint.read_state(found[-1]) if found else {}
        identity = self._identity()
        _check_same_run(identity, saved.get("identity", identity))

        # The engine's process starts while this one loads tokenizer and model.
        engine = self._engine = HostedEngine(
            run_dir / "logs" / "engine.log",
            threads=c.engine.threads,
            timeout=c.engine.timeout,
            refit_timeout=c.refit.timeout,
            channel=c.refit.channel,
        )
        phases = Phases(self.metrics, 5)
        if c.engine.fault is not None:
            self.metrics.message(
                "warning",
                f"The engine will fail on purpose (engine.fault={c.engine.fault}); engine.fault=null ends that.",
            )
        import torch

        if c.device == "cuda":
            _check_cuda()
        torch.set_num_threads(c.threads)
        tokenizer = load_tokenizer(self.trainer.source.path)
        task = self._make_task(tokenizer)
        identity["task.too_long skips"] = task.skipped
        _check_same_run(identity, saved.get("identity", identity))
        context = self._context(task)
        phases.next()
        recipe = self.trainer.recipe
        model = load_model(self.trainer.source.path, recipe, found[-1] if saved else None)
        for text in unmatched(recipe, model):
            self.metrics.message("warning", text)
        parts = checkpoint.ModelParts(model.config, modelopt_state.capture(model), recipe.text)
        phases.next()
        decoder, kernels = bind(c, self.trainer.directory, self.metrics, model, context)
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

        loss = make_loss(c.loss)
        updates = c.batch.updates
        learner = Learner(
            decoder, loss, c.optimizer, shape=shape, temperature=c.sampling.temperature, steps=c.steps * updates
        )
        if saved:
            learner.accelerator.load_state(str(found[-1]))
            ledger.load_state_dict(saved["ledger"])
            # Whoever resumes a run that ended without signal has changed something, and gets as many steps again.
            self.state = RunState(**{**saved["run"], "no_signal": 0, "not_finite": 0})
            learner.configure_optimizer(self.state.step * updates)
            ledger.waste("cancelled", saved["untrained_flops"])  # those answers are generated again
        first = self.state.step
        decoder.refresh(first)
        phases.next()
        start_engine(
            engine,
            c,
            self.trainer.directory,
            decoder,
            kernels,
            context=context,
            stop_ids=stop_ids(self.trainer.source.path, decoder.model, tokenizer),
        )
        phases.next()

        buffer = GroupBuffer(
            c.batch.prompts, c.buffer.max_staleness, first, needed=c.batch.prompts * max(0, c.steps - first)
        )
        decode = make_decode(tokenizer)
        sampling = Sampling(c.sampling.temperature, c.sampling.max_new_tokens)
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
            start=saved.get("next_index", 0),
            again=saved.get("untrained", []),
            needs_logprobs=loss.needs_behaviour_logprobs,
            fp8=Fp8Products.of(decoder.description.coverage),
        )
        evaluator = Evaluator(
            self._scorer,
            task.held_out_prompts(c.evaluation.prompts),
            engine,
            ledger,
            shape=shape,
            decode=decode,
            sampling=sampling,
            seed=c.seed,
        )
        last: dict[str, float] = {}

        def evaluate(step: int) -> None:
            if not c.evaluation.prompts:
                return
            last.update(evaluator.run(lambda done, total: self.metrics.progress("evaluation", done, total, "answers")))
            self.metrics.write("evaluation", step=step, metrics=last)

        def write_ledger() -> dict[str, dict[str, float]]:
            s = self.state
            budget = Budget(c.budget, c.steps).report(ledger, s.tokens, s.seconds, s.step)
            ledger.write(run_dir / "ledger.json", budget=budget)
            return budget

        def save(state: RunState) -> None:
            self.metrics.progress("checkpoint", 0, 1)
            values = {
                "step": state.step,
                "run": vars(state),
                "identity": identity,
                "coverage": decoder.description.coverage.to_json(),
                "ledger": ledger.state_dict(),
                **worker.position(),
            }
            checkpoint.save(run_dir / "checkpoints", learner.accelerator, values, parts, c.checkpoint.keep)
            write_ledger()
            self.metrics.progress("checkpoint", 1, 1)

        self._describe(decoder, kernels, shape, parameters, first)
        if not saved and not self._stopped:
            evaluate(0)
        loop = self._loop = Loop(
            c,
            engine=engine,
            learner=learner,
            worker=worker,
            buffer=buffer,
            ledger=ledger,
            metrics=self.metrics,
            state=self.state,
            save=save,
            evaluate=evaluate,
            probes=[task.prompt(*task.order(c.seed).at(i)).ids for i in range(c.parity.prompts)],
        )
        loop.stop = self._stopped
        reason = loop.run()
        worker.stop()
        save(self.state)
        if reason != "interrupted":
            evaluate(self.state.step)
        status = "interrupted" if reason == "interrupted" else "done"
        return TrainResult(status, reason, self.state.step, run_dir, last, write_ledger())

    def _make_task(self, tokenizer: PreTrainedTokenizerBase) -> Task:
        task = Task(self.trainer.rows, self.config, tokenizer, self.trainer.prompt_room)
        if task.skipped:
            self.metrics.message(
                "warning",
                f"{task.skipped} of {len(self.trainer.rows)} rows are left out (task.too_long=skip): their prompts have more than "
                f"{self.trainer.prompt_room} tokens, which is what fits beside sampling.max_new_tokens.",
            )
        return task

    def _context(self, task: Task) -> int:
        """Tokens that the longest prompt and answer need; key/value buffers are made for it."""
        c = self.config
        if c.engine.max_context is not None:
            return c.engine.max_context
        if task.longest is None:
            return self.trainer.source.context if self.trainer.directory is None else self.trainer.directory.max_context
        return task.longest + c.sampling.max_new_tokens

    def _identity(self) -> dict[str, Any]:
        """What a resumed run must share with the one that was saved."""
        c = self.config
        return {
            "seed": c.seed,
            "data": self.trainer.rows.fingerprint,
            "task": c.task.model_dump(mode="json"),
            "recipe": self.trainer.recipe.digest,
            "batch.group_size": c.batch.group_size,
        }

    def _describe(
        self, decoder: TrainableDecoder, kernels: KernelSet, shape: ModelShape, parameters: int, first: int
    ) -> None:
        c = self.config
        self.metrics.write(
            "start",
            model=c.model,
            parameters=parameters,
            steps=c.steps,
            task=c.task.preset or c.data,
            loss=c.loss.name,
            recipe=f"{self.trainer.recipe.name} {self.trainer.recipe.digest[:12]}",
            coverage=audit(decoder.description.coverage, shape, parameters, decoder.context),
            kernels=kernels.description,
            compile_seconds=round(kernels.compile_seconds, 1),
            start_seconds=round(time.monotonic() - self.started, 1),
            run_dir=str(self.trainer.run_dir),
            versions=versions(),
            resumed_from=first or None,
        )


def _check_same_run(now: dict[str, Any], saved: dict[str, Any]) -> None:
    """Raise UserError for what may not change on resume: order of prompts, held-out rows or precision would."""
    changed = [key for key in now if now[key] != saved.get(key)]
    if changed:
        digests = f" (recipe digest {saved.get('recipe')} in the checkpoint, {now['recipe']} now)"
        raise UserError(
            f"Not as in the run that was saved: {', '.join(changed)}{digests if 'recipe' in changed else ''}. It cannot go on so. "
            "Leave them as they were, or start a new run from its model."
        )


def _check_cuda() -> None:
    """Raise UserError when there is no device, before anything is loaded."""
    import torch

    if not torch.cuda.is_available():
        raise UserError("device=cuda, but torch finds no CUDA device here. Use device=cpu, or a CUDA build of torch.")
