"""What a trainer refuses before anything heavy is loaded."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from trtl_rl.engines.directory import EngineDirectory
from trtl_rl.engines.faulty import UNSEEN_WITHOUT_PROBES, Fault
from trtl_rl.errors import UserError
from trtl_rl.model.source import ModelSource, weights_digest
from trtl_rl.trainer import checkpoint

if TYPE_CHECKING:
    from trtl_rl.config import RunConfig
    from trtl_rl.recipe.recipe import Recipe

_SHARDED = {
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "a parallelism",
}
# Variables of a launcher, what says nothing, the option that they come from, and why they are not followed.
_WITHOUT_EFFECT = {
    "ACCELERATE_MIXED_PRECISION": ("no", "mixed_precision", "precision is the recipe's alone"),
    "ACCELERATE_DYNAMO_BACKEND": ("no", "dynamo_backend", "operators are compiled by themselves (compile)"),
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": (
        "1",
        "gradient_accumulation_steps",
        "a batch is batch.prompts groups, in parts of optimizer.micro_batch_tokens",
    ),
}


def check_one_process() -> None:
    """Refuse a launcher that starts several learners: each would train a model of its own."""
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count > 1:
        raise UserError(
            f"The launcher started {count} processes, and the learner runs in one. Use `accelerate launch --num_processes 1`; "
            "rollouts are spread by engine.replicas."
        )
    for variable, kind in _SHARDED.items():
        if os.environ.get(variable, "").lower() in ("1", "true", "yes", "on"):
            raise UserError(
                f"The launcher asks for {kind} ({variable}), and the learner runs in one process, which shards nothing. "
                "Launch it without."
            )


def launcher_notes() -> list[str]:
    """What a launcher set for Accelerate that has no effect here."""
    notes = []
    for variable, (nothing, option, reason) in _WITHOUT_EFFECT.items():
        value = os.environ.get(variable, nothing)
        if value.lower() != nothing:
            notes.append(f"The launcher's {option}={value} has no effect: {reason}.")
    return notes


def run_directory(config: RunConfig, resume: bool, resume_by: str) -> Path:
    """Where the run's files go. Raises UserError when that place is taken, or holds nothing to resume."""
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


def check_architecture(source: ModelSource) -> None:
    """Raise UserError for a model that the decoder does not compute."""
    from types import SimpleNamespace

    from trtl_rl.model.architectures import check_architecture

    check_architecture(SimpleNamespace(**source.config))


def engine_directory(config: RunConfig, source: ModelSource, recipe: Recipe) -> EngineDirectory | None:
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


def prompt_room(config: RunConfig, source: ModelSource, directory: EngineDirectory | None) -> int:
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


def check_fault(config: RunConfig) -> None:
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


def read_config(run_dir: Path) -> dict[str, Any]:
    """The resolved configuration of a run. Raises UserError when there is none."""
    file = run_dir / "config.yaml"
    if not file.is_file():
        raise UserError(f"{run_dir} is no run directory: it has no config.yaml.")
    values: dict[str, Any] = yaml.safe_load(file.read_text())
    return values
