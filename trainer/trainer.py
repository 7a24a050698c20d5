"""``Trainer``: everything between a configuration and a trained model. ``trtl-rl run`` is a thin layer over it."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from trtl_rl.config import RunConfig
from trtl_rl.config_data import RewardConfig
from trtl_rl.disk import alone_in, replace_file
from trtl_rl.errors import DiskError, UserError
from trtl_rl.metrics import MetricsWriter
from trtl_rl.model.source import ModelSource, find_model
from trtl_rl.recipe.recipe import Recipe
from trtl_rl.rewards.loading import check_columns, given_rewards, load_rewards
from trtl_rl.rewards.reward import Reward, RewardFunction
from trtl_rl.rewards.runner import RewardRunner
from trtl_rl.rollout import Sampling
from trtl_rl.tasks.presets import apply_preset
from trtl_rl.tasks.rows import Rows, evaluation_config, given_rows, open_evaluation_rows, open_rows
from trtl_rl.trainer import arguments, checkpoint, lora
from trtl_rl.trainer.callbacks import Callback, Callbacks
from trtl_rl.trainer.checks import (
    check_architecture,
    check_fault,
    check_one_process,
    engine_directory,
    prompt_room,
    run_directory,
)
from trtl_rl.trainer.closing import closing_text
from trtl_rl.trainer.logs import LoggedMetrics, show_lines
from trtl_rl.trainer.objects import keep_model, written
from trtl_rl.trainer.steps import weighted, with_steps
from trtl_rl.trainer.tracking import Tracking, check_installed
from trtl_rl.trainer_config import TrainerConfig

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from trtl_rl.engines.supervisor import EngineProcess
    from trtl_rl.losses.loss import Loss
    from trtl_rl.trainer.assembly import Run
    from trtl_rl.trainer.session import Session

_GENERATE_CONTEXT = 4096  # tokens, where nobody says how many
GIVEN = "(given to Trainer)"  # stands for rows from Python in a run's config.yaml


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """How a run ended.

    Attributes:
        status: ``done``, or ``interrupted`` (saved, can be resumed).
        reason: The limit that was reached: ``steps``, ``budget.flops`` and so on.
        evaluation: Metrics of the last evaluation, if there was one.
        budget: Of each limit its ``limit``, and what is ``used`` and ``left`` of it.
        nothing_to_do: Whether a resume found the run complete, and loaded nothing.
    """

    status: str
    reason: str
    step: int
    run_dir: Path
    evaluation: dict[str, float]
    budget: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    nothing_to_do: bool = False


class Trainer:
    """Trains a model with verifiable rewards.

    Bad input is refused here, before a model is loaded.

    Args:
        model: A directory, a hub name, ``demo``, or a transformers model; overrides ``args.model``.
        reward_funcs: One function or several, in TRL's convention: keyword arguments ``prompts``, ``completions``,
            ``completion_ids`` and every column of the data, each a list; they return one float or None per completion.
            A built-in's name and a ``Reward`` (with weight, time limit and policy) are rewards too. A function runs in a
            process of its own: what it changes outside itself stays there, unless ``Reward(…, in_process=True)``.
        args: Every other setting: a ``TrainerConfig``.
        train_dataset: Rows as mappings (a ``datasets.Dataset`` is one such sequence), or what ``args.data`` may be: a file, a
            directory, a hub name.
        eval_dataset: The same to evaluate on, apart from what is trained on; of rows all, unless ``evaluation.prompts`` says how
            many.
        processing_class: The tokenizer, or its name; by default the model's.
        callbacks: Follow the run, and may stop it.
        peft_config: A ``peft.LoraConfig``, as TRL takes one, in place of the keys of ``args.lora``.
        engine: Makes an engine of your own from a log file and the engine's number: an object with the methods of
            ``EngineProcess`` (see ``examples/custom_engine.py``). By default the one that ``args.engine`` describes.
        loss: An objective of your own; overrides ``args.loss``, but for its KL and entropy terms, which it does without.
        resume: Continue the run in ``args.run_dir`` from its newest whole checkpoint, or from its beginning where it had
            not saved one yet.
        others: Arguments that TRL's trainer has and this one has not; refused with the reason unless they are ``None``.

    Attributes:
        logs: Whether a run logs its steps and messages (see :mod:`trtl_rl.trainer.logs`).

    Raises:
        UserError: with what is wrong and what to do.

    Example::

        from trtl_rl import Trainer, TrainerConfig

        def correct(completions, answer, **columns):
            return [float(c.strip() == a) for c, a in zip(completions, answer)]

        Trainer(model="demo", reward_funcs=correct, train_dataset=rows, args=TrainerConfig(steps=50)).train()
    """

    logs = True

    def __init__(
        self,
        model: str | Path | PreTrainedModel | None = None,
        reward_funcs: RewardFunction | Reward | str | Sequence[RewardFunction | Reward | str] | None = None,
        args: RunConfig | None = None,
        train_dataset: Iterable[Mapping[str, Any]] | str | Path | None = None,
        eval_dataset: Iterable[Mapping[str, Any]] | str | Path | None = None,
        processing_class: PreTrainedTokenizerBase | str | Path | None = None,
        *,
        callbacks: Callback | Sequence[Callback] = (),
        peft_config: LoraConfig | None = None,
        engine: Callable[[Path, int], EngineProcess] | None = None,
        loss: Loss | None = None,
        resume: bool = False,
        **others: Any,
    ) -> None:
        check_one_process()
        arguments.refuse_others(others)
        arguments.check_model(model)
        config, train_rows, eval_rows = arguments.read_rows(arguments.read_args(args), train_dataset, eval_dataset)
        self.resume_by = "trtl-rl run --resume {run_dir}"
        if train_rows is not None or reward_funcs is not None:
            self.resume_by = "the same Trainer(...) with run_dir='{run_dir}' in its args, and resume=True"
        self._object = written(model, arguments.read_tokenizer(processing_class), config.model)
        if self._object is not None or model is not None:
            config = config.model_copy(update={"model": str(self._object or model)})
        if train_rows is not None:
            config = config.model_copy(update={"data": GIVEN})
        if eval_rows is not None:
            evaluation = config.evaluation.model_copy(update={"data": GIVEN})
            config = config.model_copy(update={"evaluation": evaluation})
        self.config = apply_preset(config)
        self.recipe = Recipe.load(self.config.recipe)
        self.run_dir = run_directory(self.config, resume, self.resume_by)
        self.source: ModelSource = find_model(self.config.model)
        check_architecture(self.source)
        self.config = lora.checked(self.config, peft_config, self.source)
        self.directory = engine_directory(self.config, self.source, self.recipe)
        self.prompt_room = prompt_room(self.config, self.source, self.directory)
        check_fault(self.config)
        self.rows = given_rows(train_rows, self.config) if train_rows is not None else open_rows(self.config)
        if reward_funcs is None:
            self.rewards = load_rewards(self.config.rewards)
        else:
            one = callable(reward_funcs) or isinstance(reward_funcs, str | Reward)
            self.rewards = given_rewards([reward_funcs] if one else reward_funcs)  # type: ignore[list-item,arg-type]
            # So that the run's config.yaml does not claim another reward.
            given = [RewardConfig(name=f"({reward.name}, given to Trainer)") for reward in self.rewards]
            self.config = self.config.model_copy(update={"rewards": given})
        if isinstance(args, TrainerConfig):
            self.rewards = weighted(self.rewards, args.translated.reward_weights)
        self.config = with_steps(self.config, self.rows, args)
        check_columns(self.rewards, self.rows.columns)
        self._check_evaluation(eval_rows)
        self.loss, self.engine = loss, engine
        self.translated = args.translated.lines if isinstance(args, TrainerConfig) else []
        self.callbacks = Callbacks(self, arguments.read_callbacks(callbacks))
        check_installed(self.config.trackers)
        self.resume = resume
        self._run: Run | None = None
        self._session: Session | None = None
        self._keep_session = False
        self._prepared = self._made_directory = self.stop_requested = False

    def __enter__(self) -> Trainer:
        """Keep the engine of :meth:`generate` and :meth:`evaluate` running between calls, until the block ends."""
        self._keep_session = True
        return self

    def __exit__(self, *_: object) -> None:
        self._keep_session = False
        self._end_session()

    def train(self) -> TrainResult:
        """Run to the end of steps or budget, or until :meth:`stop`; everything is in ``run_dir`` afterwards.

        Raises:
            EngineError, RewardError, ParityError, DiskError: the run has failed; what it produced stays in ``run_dir``.
        """
        self.prepare()
        self._prepared = False
        with alone_in(self.run_dir):
            if not self.resume and (self.run_dir / "metrics.jsonl").exists():
                raise UserError(
                    f"This Trainer has run already, in {self.run_dir}: make a new one with another run_dir."
                )
            return self._train()

    def _train(self) -> TrainResult:
        from trtl_rl.trainer.assembly import Run

        if not self.resume:
            self.write_config()
        if self.logs:
            show_lines()
        metrics = (LoggedMetrics if self.logs else MetricsWriter)(self.run_dir / "metrics.jsonl")
        started = time.monotonic()
        run: Run | None = None
        try:
            tracking = Tracking(self.config.trackers, self.run_dir, self.config.model_dump(mode="json"), metrics)
            with tracking, Run(self, metrics, started) as run:
                self._run = run
                result = run.train()
            metrics.write("end", status=result.status, step=result.step, text=closing_text(self, result))
            return result
        except BaseException as error:
            step = run.state.step if run is not None else 0
            saved = checkpoint.whole(self.run_dir / "checkpoints")
            kept = f"kept: {saved[-1]}" if saved else "there is no checkpoint yet"
            text = "stopped at once" if isinstance(error, KeyboardInterrupt) else f"{type(error).__name__}: {error}"
            with contextlib.suppress(DiskError):
                metrics.write("end", status="failed", step=step, text=f"{text}\n{kept}")
            if isinstance(error, DiskError) and "ept: " not in str(error):
                raise DiskError(f"{error} The run ends at step {step}; {kept}.") from error
            if isinstance(error, UserError) and self._made_directory and step == 0:
                shutil.rmtree(self.run_dir)  # the corrected command shall find it absent
                if self.config.run_dir is None:
                    with contextlib.suppress(OSError):  # runs/ holds others
                        self.run_dir.parent.rmdir()
            raise
        finally:
            self._run = None
            with contextlib.suppress(DiskError):  # the run's own outcome is what matters
                metrics.close()

    def generate(
        self,
        prompts: Sequence[str | Sequence[Mapping[str, Any]]],
        samples: int = 1,
        *,
        max_new_tokens: int | None = None,
        temperature: float | None = None,
        greedy: bool = False,
        seed: int = 0,
        max_context: int | None = None,
    ) -> list[list[str]]:
        """Answers of the newest weights: those of the last checkpoint, or of the start model; on an engine as in a run.

        Args:
            prompts: Texts, or lists of chat messages.
            samples: Answers to each prompt.
            max_new_tokens, temperature: By default the run's.
            max_context: Longest prompt and answer; by default what the model was made for, at most 4,096 tokens.

        Returns:
            For each prompt its answers.

        Raises:
            UserError: a prompt does not fit.
        """
        c = self.config
        sampling = Sampling(temperature or c.sampling.temperature, max_new_tokens or c.sampling.max_new_tokens, greedy)
        context = max_context or c.engine.max_context or min(self.source.context, _GENERATE_CONTEXT)
        with self._open_session(context) as session:
            return session.generate(prompts, samples, sampling, seed)

    def evaluate(self) -> dict[str, float]:
        """``eval/…`` metrics of the newest weights, on the prompts of ``evaluation``.

        Raises:
            UserError: the configuration has no evaluation.
        """
        c = self.config
        if not c.evaluation.prompts:
            raise UserError(
                "There is nothing to evaluate on: set evaluation.prompts and task.held_out, or give eval_dataset."
            )
        with self._open_session(c.engine.max_context or min(self.source.context, _GENERATE_CONTEXT)) as session:
            return session.evaluate()

    def save_pretrained(self, directory: str | Path, *, fp8: bool = False, merge: bool = False) -> Path:
        """Write the newest weights as a Hugging Face checkpoint in BF16, which transformers loads; of a run with ``lora.rank``
        its adapters alone, which peft loads over the base.

        Args:
            fp8: Write FP8 block-scale codes instead, which serving engines load. Adapters are added to the base for that.
            merge: Add the adapters to the base, and write a whole checkpoint.

        Raises:
            UserError: the directory is in use, the recipe has no codes, or there are no adapters to merge or to write.
        """
        from trtl_rl.trainer.export import save_pretrained

        weights = self.newest_checkpoint()
        if weights is None and self.config.lora.rank:
            raise UserError(
                f"{self.run_dir} has no checkpoint yet, so there are no trained adapters: call train() first."
            )
        return save_pretrained(
            weights or self.source.path, self.source, self.recipe, Path(directory).expanduser(), fp8=fp8, merge=merge
        )

    def newest_checkpoint(self) -> Path | None:
        """The newest whole checkpoint of the run, if there is one."""
        whole = checkpoint.whole(self.run_dir / "checkpoints")
        return whole[-1] if whole else None

    @contextlib.contextmanager
    def _open_session(self, context: int) -> Iterator[Session]:
        from trtl_rl.trainer.session import Session

        newest = self.newest_checkpoint()
        kept = self._session
        if kept is None or kept.checkpoint != newest or kept.context < context:
            self._end_session()
            self._session = Session(self, newest, context)
        try:
            assert self._session is not None
            yield self._session
        finally:
            if not self._keep_session:
                self._end_session()

    def _end_session(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def prepare(self) -> None:
        """Make the run directory, under another name if another run has taken a default one meanwhile."""
        if self._prepared:
            return
        while True:
            try:
                self.run_dir.mkdir(parents=True)
                self._made_directory = True
                break
            except FileExistsError:
                if self.config.run_dir is not None:
                    break  # empty, as was checked, or that of the run that goes on
                self.run_dir = run_directory(self.config, False, self.resume_by)
            except OSError as error:
                raise UserError(f"The run directory {self.run_dir} cannot be made: {error.strerror}.") from None
        self._prepared = True
        if self._object is not None:  # the run can go on without the objects
            kept = keep_model(self._object, self.run_dir)
            self._object = None
            self.config = self.config.model_copy(update={"model": str(kept)})
            self.source = find_model(str(kept))

    def stop(self) -> None:
        """Finish the step under way, save and return from :meth:`train`; callable from a signal handler or a thread."""
        self.stop_requested = True
        if self._run is not None:
            self._run.stop()

    def reward_runner(self, metrics: MetricsWriter) -> RewardRunner:
        """The rewards with their processes, which start at once."""
        return RewardRunner(
            self.rewards, self.run_dir / "logs" / "rewards.log", lambda text: metrics.message("warning", text)
        )

    def evaluation_scorer(self) -> RewardRunner:
        """The evaluation target as a runner of its own."""
        scorer = self._scorer if self.config.evaluation.prompts else []
        return RewardRunner(scorer, self.run_dir / "logs" / "rewards.log")

    def _check_evaluation(self, given: Iterable[Mapping[str, Any]] | None) -> None:
        c = self.config
        self.evaluation_rows: Rows | None = None
        if given is not None:
            self.evaluation_rows = given_rows(given, evaluation_config(c))
            if not c.evaluation.prompts:
                evaluation = c.evaluation.model_copy(update={"prompts": len(self.evaluation_rows)})
                c = self.config = c.model_copy(update={"evaluation": evaluation})
        self._scorer = load_rewards(
            [RewardConfig(name=name, arguments=c.evaluation.arguments) for name in c.evaluation.scorers]
        )
        if c.evaluation.prompts:
            if c.evaluation.own_data and given is None:
                if c.data == GIVEN and c.evaluation.data is None:
                    raise UserError("evaluation.split says nothing about train_dataset: name evaluation.data too.")
                self.evaluation_rows = open_evaluation_rows(c)
            check_columns(self._scorer, (self.evaluation_rows or self.rows).columns)
        elif c.evaluation.own_data:
            raise UserError("evaluation.data and evaluation.split need evaluation.prompts: how many of their rows.")
        if c.evaluation.every and not c.evaluation.prompts:
            raise UserError("evaluation.every needs evaluation.prompts and task.held_out.")

    def write_config(self) -> None:
        """Write the resolved configuration, ``config.yaml``. Raises DiskError."""
        values = self.config.model_dump(mode="json")
        values["run_dir"] = str(self.run_dir)
        path = self.run_dir / "config.yaml"
        try:
            replace_file(path, yaml.safe_dump(values, sort_keys=False))
        except OSError as error:
            raise DiskError(f"{path} cannot be written: {error.strerror}.") from error


__all__ = ["TrainResult", "Trainer", "TrainerConfig"]
