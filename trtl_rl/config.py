"""``RunConfig``: every key of a run, its range and its default. An unknown key is an error that names the nearest one.

A configuration is a YAML file, then ``key=value`` overrides with dotted keys, in that order:

>>> load_config(None, ["steps=3", "batch.prompts=4"]).batch.prompts
4
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, ValidationError, field_validator, model_validator

from trtl_rl.config_data import EvaluationConfig, RewardConfig, TaskConfig
from trtl_rl.config_parts import (
    BatchConfig,
    BudgetConfig,
    BufferConfig,
    CheckpointConfig,
    Count,
    EngineConfig,
    LoraConfig,
    LossConfig,
    OptimizerConfig,
    ParityConfig,
    Part,
    Positive,
    RayConfig,
    RefitConfig,
    RolloutsConfig,
    SamplingConfig,
)
from trtl_rl.errors import UserError, nearest

MEASURED_WARN = 0.5  # parity.warn where parity is measured only: |difference of logprobs|; not yet tuned on a GPU
_EXPONENT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")


class RunConfig(Part):
    """A whole run."""

    model: str = Field("demo", description="A directory, a hub name, or demo: the bundled model.")
    data: str = Field("demo", description="A JSON Lines, JSON, Parquet or CSV file, a hub name, or demo.")
    task: TaskConfig = Field(default_factory=TaskConfig)
    rewards: list[RewardConfig] = Field(
        default_factory=lambda: [RewardConfig(name="exact_match")],
        description="Reward functions; their weighted sum counts.",
    )
    steps: Count = Field(100, description="Updates of the policy.")
    epochs: Positive | None = Field(None, description="Passes over the data that is trained on, instead of steps.")
    seed: Annotated[int, Field(ge=0, lt=2**31)] = Field(
        0, description="Of the order of prompts and of all random streams."
    )
    run_dir: str | None = Field(None, description="Where the run keeps its files; default: runs/ and the time.")
    recipe: str = Field("fp8_block", description="A recipe's name or file; none: no FP8.")
    device: Literal["cpu", "cuda"] = Field(
        "cpu", description="Where both sides compute. cuda: operators run eagerly, FP8 is emulated."
    )
    compile: bool | None = Field(None, description="Compile the operators; default: when a C++ compiler is found.")
    threads: Count = Field(1, description="Threads of the learner's process.")
    engine: EngineConfig = Field(default_factory=EngineConfig)
    loss: LossConfig = Field(default_factory=LossConfig)
    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    batch: BatchConfig = Field(default_factory=BatchConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    lora: LoraConfig = Field(default_factory=LoraConfig)
    buffer: BufferConfig = Field(default_factory=BufferConfig)
    refit: RefitConfig = Field(default_factory=RefitConfig)
    ray: RayConfig = Field(default_factory=RayConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    rollouts: RolloutsConfig = Field(default_factory=RolloutsConfig)
    budget: BudgetConfig = Field(default_factory=BudgetConfig)
    parity: ParityConfig = Field(default_factory=ParityConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    trackers: list[Literal["tensorboard", "wandb", "trackio"]] = Field(
        default_factory=list, description="Where else the metrics go, through Accelerate; one or several."
    )

    @model_validator(mode="after")
    def _steps_or_epochs(self) -> RunConfig:
        if self.epochs is not None and "steps" in self.model_fields_set:
            raise ValueError(f"steps={self.steps} and epochs={self.epochs:g} say the same thing: give one of them")
        return self

    @model_validator(mode="before")
    @classmethod
    def _measured_parity(cls, values: Any) -> Any:
        """TensorRT-LLM computes with other operators than the trainer: unless told otherwise, parity is measured, not demanded."""
        engine = values.get("engine") or {}
        backend = engine.get("backend") if isinstance(engine, dict) else engine.backend
        if backend != "tensorrt-llm":
            return values
        given = values.get("parity") or {}
        parity = given if isinstance(given, dict) else {name: getattr(given, name) for name in given.model_fields_set}
        return {
            **values,
            "parity": {"warn": MEASURED_WARN if parity.get("stop") is None else 0.0, "stop": None, **parity},
        }

    @model_validator(mode="after")
    def _gpu_memory_needs_a_gpu(self) -> RunConfig:
        if self.refit.channel == "cuda_ipc" and self.device != "cuda":
            raise ValueError("refit.channel=cuda_ipc needs device=cuda; on a CPU use shared_memory")
        return self

    @model_validator(mode="after")
    def _ray_carries_weights_itself(self) -> RunConfig:
        if self.ray.address is not None and self.refit.channel not in (None, "shared_memory"):
            raise ValueError(
                f"refit.channel={self.refit.channel} does not go with ray.address: weights go through Ray's object store, and from "
                "there through shared memory. Leave refit.channel out"
            )
        return self

    @model_validator(mode="after")
    def _adapters_stay_here(self) -> RunConfig:
        if self.lora.rank and self.engine.backend == "tensorrt-llm":
            raise ValueError(
                f"lora.rank={self.lora.rank} does not go with engine.backend=tensorrt-llm: what reloads weights there takes the "
                "checkpoint's tensors and no adapters. Use engine.backend=torch, or lora.rank=0"
            )
        return self

    @property
    def refit_mode(self) -> Literal["full", "delta"]:
        """``refit.mode``, where ``auto`` is decided: beside adapters nothing changes, and what crosses a network is worth
        comparing."""
        if self.refit.mode == "auto":
            changes = self.lora.rank or self.refit.channel == "stream" or self.ray.address is not None
            return "delta" if changes else "full"
        return self.refit.mode

    @field_validator("rewards", mode="before")
    @classmethod
    def _rewards(cls, value: Any) -> Any:
        """``rewards=exact_match`` and ``rewards=[exact_match, format]`` are short for full entries."""
        items = value if isinstance(value, list) else [value]
        return [{"name": item} if isinstance(item, str) else item for item in items]

    @property
    def overlaps_evaluation(self) -> bool:
        """Whether training goes on during an evaluation between steps."""
        if self.evaluation.overlap is not None:
            return self.evaluation.overlap
        return self.buffer.max_staleness > 0 and self.buffer.in_flight == "continue"

    @field_validator("trackers", mode="before")
    @classmethod
    def _trackers(cls, value: Any) -> Any:
        """``trackers=wandb`` is short for ``trackers=[wandb]``."""
        return [value] if isinstance(value, str) else value

    @model_validator(mode="after")
    def _what_cuda_cannot(self) -> RunConfig:
        embedded = self.engine.path is not None and self.engine.backend == "torch"
        if self.device == "cuda" and (self.compile or embedded):
            key = "compile=true" if self.compile else f"engine.path={self.engine.path}"
            raise ValueError(
                f"{key} does not go with device=cuda: compiled operators are CPU code. Leave it out, or use device=cpu"
            )
        return self


def load_config(
    path: Path | str | None, overrides: list[str] | None = None, base: dict[str, Any] | None = None
) -> RunConfig:
    """Read a configuration and apply ``key=value`` overrides; values are YAML.

    Raises:
        UserError: the file is missing or no mapping, or a key or value is wrong; the message names all of them.
    """
    tree: dict[str, Any] = dict(base or {})
    source = "the command line"
    if path is not None:
        source = str(path)
        if not os.path.isfile(path):
            key = str(path).partition(".")[0]
            as_key = f" A key is written {path}=VALUE." if key in RunConfig.model_fields else ""
            raise UserError(
                f"There is no configuration file {path}.{as_key} Without one, `trtl-rl run` starts the demo."
            )
        try:
            loaded = yaml.safe_load(Path(path).read_text())
        except yaml.YAMLError as error:
            raise UserError(f"{path} is not valid YAML: {error}") from None
        if not isinstance(loaded, dict):
            raise UserError(f"{path} holds no keys: a configuration is a mapping such as 'model: demo'.")
        tree = _merge(tree, loaded)
        source = f"{path} and the command line" if overrides else str(path)
    for text in overrides or []:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise UserError(f"'{text}' is no override: write key=value, for example steps=10 or optimizer.lr=1e-5.")
        try:
            parsed = yaml.safe_load(value) if value else None
        except yaml.YAMLError:
            parsed = value
        tree = _merge(tree, _nest(key.split("."), _number(parsed)))
    return validate_config(tree, source)


def validate_config(tree: dict[str, Any], source: str = "the configuration") -> RunConfig:
    """Check a tree of keys; every wrong key and value is named in one message."""
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        raise UserError(f"{source}: {explain(error)}") from None


def explain(error: ValidationError) -> str:
    """Every wrong key and value in one line."""
    return "; ".join(_explain(dict(item)) for item in error.errors())


def _explain(item: dict[str, Any]) -> str:
    where = [str(part) for part in item["loc"]]
    key = ".".join(where)
    if item["type"] == "extra_forbidden":
        model: Any = RunConfig
        for part in where[:-1]:
            field = model.model_fields.get(part)
            inner = field.annotation if field else None
            if not (isinstance(inner, type) and issubclass(inner, Part)):
                model = RewardConfig if "rewards" in where else model
                break
            model = inner
        return f"unknown key '{key}'.{nearest(where[-1], model.model_fields)}"
    if item["type"] == "model_type":
        parts = {part.__name__: part for part in Part.__subclasses__()}
        keys = ", ".join(parts[item["ctx"]["class_name"]].model_fields)
        return f"{key} takes keys of its own ({keys}), not a value (got {item['input']!r})"
    message = str(item["msg"]).removeprefix("Value error, ")
    return f"{key}: {message} (got {item['input']!r})" if key and item["type"] != "value_error" else message


def _nest(keys: list[str], value: Any) -> dict[str, Any]:
    return {keys[0]: value if len(keys) == 1 else _nest(keys[1:], value)}


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    out = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(out.get(key), dict)
        out[key] = _merge(out[key], value) if both else value
    return out


def _number(value: Any) -> Any:
    """YAML 1.1 reads ``1e-5`` as text; a command line means the number."""
    return float(value) if isinstance(value, str) and _EXPONENT.fullmatch(value) else value
