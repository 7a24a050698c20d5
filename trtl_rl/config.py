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
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from trtl_rl.errors import UserError, nearest

Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]
Probability = Annotated[float, Field(gt=0, lt=1)]
Share = Annotated[float, Field(ge=0, lt=1)]
_EXPONENT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")


class Part(BaseModel):
    """Base of all parts: unknown keys are errors, values are checked on assignment too."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True, allow_inf_nan=False)


class TaskConfig(Part):
    """How prompts and answers are made from the rows of ``data``."""

    preset: str | None = Field(None, description="A named task that fills in the rest: demo, gsm8k.")
    split: str = Field("train", description="Split of a Hugging Face data set.")
    prompt_column: str = Field("prompt", description="Column with the prompt: text, or a list of chat messages.")
    template: str | None = Field(None, description="Text around the prompt: '{prompt}' stands for the column's text.")
    system: str | None = Field(None, description="System message, for models with a chat template.")
    chat: bool | None = Field(None, description="Apply the chat template; by default when the tokenizer has one.")
    shuffle: bool = True
    held_out: Annotated[int, Field(ge=0)] = Field(0, description="Rows kept for evaluation, never trained on.")
    too_long: Literal["refuse", "skip"] = Field(
        "refuse", description="Rows whose prompt leaves no room for the answer; skip: leave them out, and say how many."
    )


class RewardConfig(Part):
    """One reward function: a built-in's name, or ``file.py:function``, or ``package.module:function``."""

    name: str
    weight: float = 1.0
    arguments: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments given to the function.")


class EngineConfig(Part):
    """The rollout engine."""

    path: str | None = Field(
        None,
        description="An engine directory (trtl-rl build-engine) made from this model with this recipe, to start from.",
    )
    slots: Count | None = Field(
        None, description="Completions generated at once; default: what is in flight, at most 256."
    )
    cache_gib: Positive = Field(4.0, description="Memory for keys and values, in GiB; it bounds slots and context.")
    max_context: Count | None = Field(None, description="Longest prompt plus answer; default: what the run needs.")
    threads: Count = Field(1, description="Threads of the engine's process.")
    timeout: Positive = Field(600.0, description="Seconds without an answer after which the engine counts as hung.")
    fault: str | None = Field(
        None, description="A drill: the engine fails on purpose, MODE or MODE:STEP (see engines/faulty.py)."
    )


class LossConfig(Part):
    """The objective. Keys that the chosen objective does not have are refused."""

    name: Literal["asympo", "spo", "naive", "grpo"] = "asympo"
    floor: Annotated[float, Field(ge=0)] | None = Field(None, description="asympo: least S in the denominator.")
    alpha: Annotated[float, Field(ge=0, le=1)] | None = Field(None, description="spo: weight of negative answers.")
    p_low: Probability | None = Field(None, description="asympo: least probability of a negative answer's token.")
    p_high: Probability | None = Field(None, description="asympo: largest probability of a positive answer's token.")
    clip: Annotated[float, Field(gt=0, lt=1)] | None = Field(None, description="grpo: range of the ratio.")

    @model_validator(mode="after")
    def _only_its_own(self) -> LossConfig:
        owner = {"floor": "asympo", "p_low": "asympo", "p_high": "asympo", "alpha": "spo", "clip": "grpo"}
        for key, name in owner.items():
            if getattr(self, key) is not None and self.name != name:
                raise ValueError(f"loss.{key} belongs to loss.name={name}, but loss.name is {self.name}")
        if self.p_low is not None and self.p_high is not None and self.p_low >= self.p_high:
            raise ValueError(f"loss.p_low ({self.p_low}) must be less than loss.p_high ({self.p_high})")
        return self


class SamplingConfig(Part):
    """Tokens are drawn from softmax(logits / temperature): truncating samplers would train on another distribution."""

    temperature: Annotated[float, Field(ge=0)] = 1.0
    max_new_tokens: Count = 32

    @field_validator("temperature")
    @classmethod
    def _not_greedy(cls, value: float) -> float:
        if value == 0:
            raise ValueError(
                "sampling.temperature=0 makes the answers of a group all the same, so no group would carry a signal and nothing "
                "would be learned. Choose one above 0; evaluation.prompts measures greedy answers beside sampled ones"
            )
        return value


class BatchConfig(Part):
    """What one update trains on."""

    prompts: Count = Field(32, description="Groups in one update.")
    group_size: Annotated[int, Field(ge=2)] = Field(8, description="Completions of a prompt.")


class OptimizerConfig(Part):
    """AdamW over FP32 master weights."""

    lr: Positive = 1e-6
    betas: tuple[Share, Share] = (0.9, 0.95)
    eps: Positive = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    schedule: Literal["constant", "linear", "cosine", "wsd"] = Field(
        "constant", description="After the warm-up. wsd: constant, then linear decay over the last decay_fraction."
    )
    decay_fraction: Annotated[float, Field(gt=0, le=1)] = Field(0.3, description="wsd: share of the steps that decay.")
    max_grad_norm: Positive = 1.0
    micro_batch_tokens: Count = Field(16384, description="Tokens per forward and backward; a group is never cut.")
    gradient_checkpointing: bool = Field(
        False,
        description="Keep only each layer's input for backward and compute the layer again: less memory, same bits.",
    )

    @model_validator(mode="after")
    def _only_wsd_decays_late(self) -> OptimizerConfig:
        if self.schedule != "wsd" and self.decay_fraction != OptimizerConfig.model_fields["decay_fraction"].default:
            raise ValueError("optimizer.decay_fraction belongs to optimizer.schedule=wsd")
        return self


class BufferConfig(Part):
    """How far rollouts may run ahead of the learner."""

    max_staleness: Annotated[int, Field(ge=0)] = Field(
        1, description="Weight versions between a group's start and its update; 0 is the synchronous mode."
    )
    in_flight: Literal["finish", "continue"] = Field(
        "continue", description="What unfinished completions do at a refit: finish under the old weights, or go on."
    )


class RefitConfig(Part):
    """How new weights travel to the engine."""

    mode: Literal["auto", "full", "delta"] = Field(
        "auto",
        description="full: send every tensor. delta: what changed, where that is shorter and the engine has the base. auto: delta "
        "through a stream; memory is copied faster than versions are compared.",
    )
    channel: Literal["shared_memory", "stream", "cuda_ipc"] = Field(
        "shared_memory",
        description="What carries weights. stream: a socket. cuda_ipc: memory of the GPU that both use.",
    )
    bucket_bytes: Count = Field(16 * 2**20, description="Size of one bucket.")
    timeout: Positive = Field(120.0, description="Seconds for each stage of a refit.")

    @property
    def chosen_mode(self) -> Literal["full", "delta"]:
        """``mode``, where ``auto`` is decided."""
        if self.mode == "auto":
            return "delta" if self.channel == "stream" else "full"
        return self.mode


class CheckpointConfig(Part):
    """When to save, and how many to keep."""

    every: Annotated[int, Field(ge=0)] = Field(50, description="Steps between checkpoints; 0: at the end only.")
    keep: Count = 2


class BudgetConfig(Part):
    """The run ends at the first limit that it reaches; ``steps`` is one of them."""

    flops: Positive | None = None
    tokens: Count | None = Field(None, description="Generated tokens.")
    seconds: Positive | None = None


class ParityConfig(Part):
    """Probes after refits: the engine's logprobs beside the trainer's at the same weight version."""

    every: Annotated[int, Field(ge=0)] = Field(
        10, description="Updates between probes, the first update always; 0: never."
    )
    prompts: Count = 2
    warn: Annotated[float, Field(ge=0)] = Field(0.0, description="Warn when max |difference of logprobs| exceeds this.")
    stop: Annotated[float, Field(ge=0)] | None = Field(
        0.0,
        description="Stop the run above this. Both sides run the same operators: any difference is a fault. null: go on.",
    )

    @model_validator(mode="after")
    def _warns_before_it_stops(self) -> ParityConfig:
        if self.stop is not None and self.warn > self.stop:
            raise ValueError(
                f"parity.warn={self.warn:g} cannot act: the run stops above parity.stop={self.stop:g}. Raise parity.stop, or "
                "write parity.stop=null to go on whatever differs"
            )
        return self


class EvaluationConfig(Part):
    """Held-out prompts, answered greedily and sampled."""

    every: Annotated[int, Field(ge=0)] = Field(0, description="Updates between evaluations; 0: start and end only.")
    prompts: Annotated[int, Field(ge=0)] = Field(0, description="Held-out prompts to evaluate on; 0: none.")
    scorer: str = Field(
        "exact_match", description="The evaluation target: a reward function, but never the reward itself."
    )


class RunConfig(Part):
    """A whole run."""

    model: str = Field("demo", description="A directory, a hub name, or demo: the bundled model.")
    data: str = Field("demo", description="A JSON Lines, JSON, Parquet or CSV file, a hub name, or demo.")
    task: TaskConfig = Field(default_factory=TaskConfig)
    rewards: list[RewardConfig] = Field(default_factory=lambda: [RewardConfig(name="exact_match")])
    steps: Count = 100
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
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
    buffer: BufferConfig = Field(default_factory=BufferConfig)
    refit: RefitConfig = Field(default_factory=RefitConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    budget: BudgetConfig = Field(default_factory=BudgetConfig)
    parity: ParityConfig = Field(default_factory=ParityConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)

    @model_validator(mode="after")
    def _gpu_memory_needs_a_gpu(self) -> RunConfig:
        if self.refit.channel == "cuda_ipc" and self.device != "cuda":
            raise ValueError("refit.channel=cuda_ipc needs device=cuda; on a CPU use shared_memory")
        return self

    @field_validator("rewards", mode="before")
    @classmethod
    def _rewards(cls, value: Any) -> Any:
        """``rewards=exact_match`` and ``rewards=[exact_match, format]`` are short for full entries."""
        items = value if isinstance(value, list) else [value]
        return [{"name": item} if isinstance(item, str) else item for item in items]

    @model_validator(mode="after")
    def _what_cuda_cannot(self) -> RunConfig:
        if self.device == "cuda" and (self.compile or self.engine.path is not None):
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
            raise UserError(f"There is no configuration file {path}. Without one, `trtl-rl run` starts the demo.")
        try:
            loaded = yaml.safe_load(Path(path).read_text())
        except yaml.YAMLError as error:
            raise UserError(f"{path} is not valid YAML: {error}") from None
        if not isinstance(loaded, dict):
            raise UserError(f"{path} holds no keys: a configuration is a mapping such as 'model: demo'.")
        tree = _merge(tree, loaded)
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
        lines = [_explain(dict(item)) for item in error.errors()]
        raise UserError(f"{source}: " + "; ".join(lines)) from None


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
        keys = ", ".join(globals()[item["ctx"]["class_name"]].model_fields)
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
