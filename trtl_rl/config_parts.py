"""The parts of ``RunConfig``: their keys, ranges and defaults."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]
Probability = Annotated[float, Field(gt=0, lt=1)]
Share = Annotated[float, Field(ge=0, lt=1)]


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
    train_group_size: Annotated[int, Field(ge=2)] | None = Field(
        None,
        description="Completions of a prompt that are trained on: those whose rewards vary most. Default: all of them.",
    )
    updates: Count = Field(1, description="Optimizer steps on each batch, every one over the whole of it.")

    @model_validator(mode="after")
    def _trains_on_what_it_generates(self) -> BatchConfig:
        if self.train_group_size is not None and self.train_group_size > self.group_size:
            raise ValueError(
                f"batch.train_group_size={self.train_group_size} is more than the batch.group_size={self.group_size} completions "
                "that are generated"
            )
        return self


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

    flops: Positive | None = Field(None, description="Of search, learning and feedback together.")
    tokens: Count | None = Field(None, description="Generated tokens.")
    seconds: Positive | None = Field(None, description="Of steps, without starting, evaluations and checkpoints.")


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
    scorer: str | list[str] = Field(
        "exact_match",
        description="The evaluation target: a reward function, but never the reward itself. A list: several targets.",
    )

    @property
    def scorers(self) -> list[str]:
        """``scorer`` as a list."""
        return [self.scorer] if isinstance(self.scorer, str) else self.scorer
