"""``Trainer``: everything between a configuration and a trained model. ``trtl-rl run`` is a thin layer over it."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from trtl_rl.config import RunConfig
from trtl_rl.config_data import RewardConfig
from trtl_rl.disk import alone_in, replace_file
from trtl_rl.engines.directory import EngineDirectory
from trtl_rl.engines.faulty import UNSEEN_WITHOUT_PROBES, Fault
from trtl_rl.errors import DiskError, UserError
from trtl_rl.metrics import MetricsWriter
from trtl_rl.model.source import ModelSource, find_model, weights_digest
from trtl_rl.recipe.recipe import Recipe
from trtl_rl.rewards.loading import check_columns, given_rewards, load_rewards
from trtl_rl.rewards.reward import Reward, RewardFunction
from trtl_rl.rewards.runner import RewardRunner
from trtl_rl.tasks.presets import apply_preset
from trtl_rl.tasks.rows import Rows, given_rows, open_evaluation_rows, open_rows
from trtl_rl.trainer import checkpoint
from trtl_rl.trainer.tracking import Tracking, check_installed

if TYPE_CHECKING:
    from trtl_rl.trainer.assembly import Run

TrainerConfig = RunConfig
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
        model: A directory, a hub name, or ``demo``; overrides ``args.model``.
        reward_funcs: One function or several, in TRL's convention: keyword arguments ``prompts``, ``completions``,
            ``completion_ids`` and every column of the data, each a list; they return one float or None per completion.
            A built-in's name and a ``Reward`` (with weight, time limit and policy) are rewards too. A function runs in a
            process of its own: what it changes outside itself stays there, unless ``Reward(…, in_process=True)``.
        train_dataset: Rows as mappings (a ``datasets.Dataset`` is one such sequence); overrides ``args.data``.
        args: Every other setting.
        resume: Continue the run in ``args.run_dir`` from its newest whole checkpoint, or from its beginning where it had
            not saved one yet.

    Raises:
        UserError: with what is wrong and what to do.

    Example::

        from trtl_rl import Trainer, TrainerConfig

        def correct(completions, answer, **columns):
            return [float(c.strip() == a) for c, a in zip(completions, answer)]

        Trainer(model="demo", reward_funcs=correct, train_dataset=rows, args=TrainerConfig(steps=50)).train()
    """

    def __init__(
        self,
        model: str | None = None,
        reward_funcs: RewardFunction | Reward | str | Sequence[RewardFunction | Reward | str] | None = None,
        train_dataset: Iterable[Mapping[str, Any]] | None = None,
        args: RunConfig | None = None,
        *,
        resume: bool = False,
    ) -> None:
        config = args or RunConfig()
        self._resume_by = "trtl-rl run --resume {run_dir}"
        if train_dataset is not None or reward_funcs is not None:
            self._resume_by = "the same Trainer(...) with run_dir='{run_dir}' in its args, and resume=True"
        if model is not None:
            config = config.model_copy(update={"model": model})
        if train_dataset is not None:
            config = config.model_copy(update={"data": GIVEN})
        self.config = apply_preset(config)
        self.recipe = Recipe.load(self.config.recipe)
        self.run_dir = _run_directory(self.config, resume, self._resume_by)
        self.source: ModelSource = find_model(self.config.model)
        _check_architecture(self.source)
        self.directory = _engine_directory(self.config, self.source, self.recipe)
        self.prompt_room = _prompt_room(self.config, self.source, self.directory)
        _check_fault(self.config)
        self.rows = given_rows(train_dataset, self.config) if train_dataset is not None else open_rows(self.config)
        if reward_funcs is None:
            self.rewards = load_rewards(self.config.rewards)
        else:
            one = callable(reward_funcs) or isinstance(reward_funcs, str | Reward)
            self.rewards = given_rewards([reward_funcs] if one else reward_funcs)  # type: ignore[list-item,arg-type]
            # So that the run's config.yaml does not claim another reward.
            given = [RewardConfig(name=f"({reward.name}, given to Trainer)") for reward in self.rewards]
            self.config = self.config.model_copy(update={"rewards": given})
        check_columns(self.rewards, self.rows.columns)
        self._check_evaluation()
        check_installed(self.config.trackers)
        self.resume = resume
        self._run: Run | None = None
        self._prepared = self._made_directory = self.stop_requested = False

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
        metrics = MetricsWriter(self.run_dir / "metrics.jsonl")
        started = time.monotonic()
        run: Run | None = None
        try:
            tracking = Tracking(self.config.trackers, self.run_dir, self.config.model_dump(mode="json"), metrics)
            with tracking, Run(self, metrics, started) as run:
                self._run = run
                result = run.train()
            metrics.write("end", status=result.status, step=result.step, text=_closing_text(self, result))
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
                self.run_dir = _run_directory(self.config, False, self._resume_by)
            except OSError as error:
                raise UserError(f"The run directory {self.run_dir} cannot be made: {error.strerror}.") from None
        self._prepared = True

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

    def _check_evaluation(self) -> None:
        c = self.config
        self.evaluation_rows: Rows | None = None
        self._scorer = load_rewards(
            [RewardConfig(name=name, arguments=c.evaluation.arguments) for name in c.evaluation.scorers]
        )
        if c.evaluation.prompts:
            if c.evaluation.own_data:
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


def _run_directory(config: RunConfig, resume: bool, resume_by: str) -> Path:
    if config.run_dir is None and resume:
        raise UserError("resume=True needs args.run_dir: the directory of the run that goes on.")
    if config.run_dir is None:
        name = Path(config.model).name or "model"
        base = Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{name}"
        path, n = base, 1
        while path.exists():
            n += 1
            path = base.with_name(f"{base.name}-{n}")
        return path
    path = Path(config.run_dir).expanduser()
    if path.exists() and not path.is_dir():
        raise UserError(f"run_dir={path} is a file: name a directory.")
    if resume and not (path / "config.yaml").is_file():
        raise UserError(f"{path} is no run that could be resumed: it has no config.yaml. Start it without resume.")
    if resume:
        checkpoint.check_any(path / "checkpoints")
    if not resume and path.exists() and any(path.iterdir()):
        raise UserError(
            f"The run directory {path} exists and is not empty. Choose another run_dir, or continue that run with: "
            + resume_by.format(run_dir=path)
        )
    return path


def _check_architecture(source: ModelSource) -> None:
    from types import SimpleNamespace

    from trtl_rl.model.architectures import check_architecture

    check_architecture(SimpleNamespace(**source.config))


def _engine_directory(config: RunConfig, source: ModelSource, recipe: Recipe) -> EngineDirectory | None:
    """The directory of ``engine.path``, which must be of the run's model and recipe."""
    if config.engine.path is None:
        return None
    directory = EngineDirectory.open(Path(config.engine.path).expanduser())
    if directory.recipe["digest"] != recipe.digest:
        raise UserError(
            f"engine.path={directory.path} was built with the recipe {directory.recipe['name']}, and recipe={recipe.name} is "
            "another one. Build an engine with this recipe, or leave engine.path out."
        )
    if directory.architecture not in source.config["architectures"]:
        raise UserError(
            f"engine.path={directory.path} holds a {directory.architecture}, and model={source.name} is a "
            f"{', '.join(source.config['architectures'])}. Build one: trtl-rl build-engine --model {source.name} --output DIR"
        )
    if directory.source_digest != weights_digest(source.path):
        raise UserError(
            f"engine.path={directory.path} was built from other weights ({directory.model}) than those of model={source.name}. "
            f"Build one: trtl-rl build-engine --model {source.name} --output DIR"
        )
    directory.check()
    return directory


def _prompt_room(config: RunConfig, source: ModelSource, directory: EngineDirectory | None) -> int:
    """Tokens of the longest prompt that leaves room for the answer."""
    most = source.context if directory is None else directory.max_context
    what = f"model={source.name} was made" if directory is None else f"engine.path={directory.path} was built"
    wanted = config.engine.max_context
    if wanted is not None and wanted > most:
        raise UserError(f"engine.max_context={wanted} is more than {what} for ({most}).")
    room = (wanted or most) - config.sampling.max_new_tokens
    if room < 1:
        limit = f"engine.max_context={wanted}" if wanted is not None else f"{what} for {most} tokens"
        raise UserError(
            f"sampling.max_new_tokens={config.sampling.max_new_tokens} leaves no room for a prompt: {limit}. Lower "
            "sampling.max_new_tokens."
        )
    return room


def _check_fault(config: RunConfig) -> None:
    """Refuse a fault that cannot happen in this run."""
    if config.engine.fault is None:
        return
    fault = Fault.parse(config.engine.fault)
    if fault.step > config.steps:
        raise UserError(f"engine.fault={config.engine.fault} cannot happen: the run has {config.steps} steps.")
    if fault.mode == "raw_logprobs" and config.sampling.temperature == 1:
        raise UserError(
            "engine.fault=raw_logprobs changes nothing at sampling.temperature=1; choose another temperature for the drill."
        )
    if fault.mode in UNSEEN_WITHOUT_PROBES and not config.parity.every:
        raise UserError(f"engine.fault={fault.mode} is found by probes, and parity.every=0 makes none.")


def _closing_text(trainer: Trainer, result: TrainResult) -> str:
    """What a person does next."""
    where = f"Everything is in {trainer.run_dir}: metrics.jsonl, ledger.json, checkpoints/, rollouts/, logs/."
    if result.nothing_to_do:
        again = trainer._resume_by.format(run_dir=trainer.run_dir)
        return (
            f"Nothing to do: the run had reached {result.reason} at step {result.step}. {where}\n"
            f"With more steps or a larger budget it goes on: {again}"
            + (f" steps={2 * result.step}" if again.startswith("trtl-rl") and result.reason == "steps" else "")
        )
    if len(result.budget) > 1:  # more than the number of steps was limited
        left = ", ".join(f"{key} {part['left']:.4g} of {part['limit']:.4g}" for key, part in result.budget.items())
        where = f"Left of the budget: {left}. {where}"
    if result.status == "interrupted":
        again = trainer._resume_by.format(run_dir=trainer.run_dir)
        return f"Interrupted after step {result.step} and saved. {where}\nGo on with: {again}"
    if result.reason == "no signal":
        from trtl_rl.trainer.loop import NO_SIGNAL_LIMIT

        return (
            f"Ended after step {result.step}: for {NO_SIGNAL_LIMIT} steps in a row no group had answers of different reward, "
            f"so there was nothing to learn from. {where}"
        )
    if trainer.config.model != "demo":
        return f"Reached {result.reason} after step {result.step}. {where}"
    return (
        f"Reached {result.reason} after step {result.step}. {where}\n"
        "Your own model and data: trtl-rl run examples/gsm8k.yaml model=DIRECTORY data=FILE.jsonl, where these lines of the\n"
        "file change: model, data, task.prompt_column, rewards, sampling.max_new_tokens, optimizer.lr.\n"
        "On a GPU: device=cuda emulates FP8 there, untried so far; the kernels for it are in no run yet (see the README)."
    )


def read_config(run_dir: Path) -> dict[str, Any]:
    """The resolved configuration of a run. Raises UserError when there is none."""
    file = run_dir / "config.yaml"
    if not file.is_file():
        raise UserError(f"{run_dir} is no run directory: it has no config.yaml.")
    values: dict[str, Any] = yaml.safe_load(file.read_text())
    return values


__all__ = ["TrainResult", "Trainer", "TrainerConfig"]
