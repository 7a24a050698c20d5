"""The parts of ``RunConfig`` that say how a run generates, learns and ends; see ``config_data.py`` for what it learns from."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]
Probability = Annotated[float, Field(gt=0, lt=1)]
Share = Annotated[float, Field(ge=0, lt=1)]
Linear = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

LORA_REFUSED = {
    "dropout": "dropout in training and none in rollouts would be two policies, and logprobs would differ",
    "use_dora": "the kernels compute plain LoRA; DoRA divides by norms of the merged weight",
    "lora_bias": "the kernels compute plain LoRA, whose B has no bias",
    "bias": "beside adapters everything is frozen: the base's codes never change",
    "modules_to_save": "beside adapters everything is frozen: the base's codes never change",
    "trainable_token_indices": "beside adapters everything is frozen: the base's codes never change",
    "init_lora_weights": "adapters begin as peft's default has them, A random and B zero; others begin by changing the base",
}
"""Settings of peft that do not go with one policy on both sides and a base that never changes, and why."""


class Part(BaseModel):
    """Base of all parts: unknown keys are errors, values are checked on assignment too."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True, allow_inf_nan=False)


class EngineConfig(Part):
    """The rollout engine."""

    backend: Literal["torch", "tensorrt-llm"] = Field(
        "torch",
        description="torch: the embedded engine. tensorrt-llm: TensorRT-LLM, started from engine.path; it needs a GPU.",
    )
    python: str | None = Field(
        None, description="Interpreter of the engine's process, with packages of its own; default: the trainer's."
    )
    arguments: dict[str, Any] = Field(
        default_factory=dict,
        description="tensorrt-llm: arguments that replace those in the engine directory's llm_args.yaml.",
    )
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
    replicas: Count = Field(1, description="Engines that generate side by side; each takes whole prompts.")
    timeout: Positive = Field(600.0, description="Seconds without an answer after which the engine counts as hung.")
    restarts: Annotated[int, Field(ge=0)] = Field(
        3, description="Restarts in a row of an engine that died, hung or broke; 0: the run ends at once."
    )
    restart_delay: Positive = Field(
        1.0, description="Seconds before the first restart, doubled before each further one."
    )
    fault: str | None = Field(
        None, description="A drill: the engine fails on purpose, MODE[:STEP[:always]] (see engines/faulty.py)."
    )

    @model_validator(mode="after")
    def _keys_of_a_backend(self) -> EngineConfig:
        if self.backend == "torch":
            if self.arguments:
                raise ValueError("engine.arguments belongs to engine.backend=tensorrt-llm")
            return self
        if self.path is None:
            raise ValueError(
                "engine.backend=tensorrt-llm starts from a directory: make one with trtl-rl build-engine --backend "
                "tensorrt-llm, and name it as engine.path"
            )
        for key, instead in (
            ("cache_gib", "engine.arguments={kv_cache_config: {free_gpu_memory_fraction: 0.5}} bounds it there"),
            ("threads", "it computes on the GPU"),
        ):
            if key in self.model_fields_set and getattr(self, key) != EngineConfig.model_fields[key].default:
                raise ValueError(f"engine.{key} belongs to engine.backend=torch: {instead}")
        return self


class RayConfig(Part):
    """Where engines run as actors of a Ray cluster."""

    address: str | None = Field(
        None,
        description="host:port or auto: join that cluster; local: start one here. Default: no Ray, engines are processes here.",
    )
    resources: dict[str, float] = Field(
        default_factory=lambda: {"num_cpus": 1.0},
        description="What one engine takes of a node: num_cpus, num_gpus, or custom resources by name. For tensorrt-llm num_gpus "
        "follows from engine.path.",
    )

    @property
    def options(self) -> dict[str, Any]:
        """``resources`` as Ray takes them."""
        own = {name: value for name, value in self.resources.items() if name in ("num_cpus", "num_gpus")}
        return {**own, "resources": {name: value for name, value in self.resources.items() if name not in own}}


class LossConfig(Part):
    """The objective. Keys that the chosen objective does not have are refused."""

    name: Literal["asympo", "spo", "naive", "grpo", "dr_grpo"] = Field("asympo", description="The objective.")
    floor: Annotated[float, Field(ge=0)] | None = Field(None, description="asympo: least S in the denominator.")
    alpha: Annotated[float, Field(ge=0, le=1)] | None = Field(None, description="spo: weight of negative answers.")
    p_low: Probability | None = Field(None, description="asympo: least probability of a negative answer's token.")
    p_high: Probability | None = Field(None, description="asympo: largest probability of a positive answer's token.")
    clip: Annotated[float, Field(gt=0, lt=1)] | None = Field(None, description="grpo, dr_grpo: range of the ratio.")
    behaviour: Literal["received", "recomputed"] | None = Field(
        None,
        description="grpo, dr_grpo: what the ratio is taken to. received (default): logprobs that come with the rollouts. "
        "recomputed: the learner's own, before the update.",
    )
    importance_cap: Positive | None = Field(
        None,
        description="grpo, dr_grpo with behaviour=recomputed: weigh tokens by min(recomputed / received probability, this).",
    )
    kl_coefficient: Annotated[float, Field(ge=0)] = Field(
        0.0,
        description="Weight of the KL penalty against the model that the run began with (a second copy in memory, unless there "
        "are adapters).",
    )
    entropy_coefficient: Annotated[float, Field(ge=0)] = Field(0.0, description="Weight of the entropy bonus.")

    @model_validator(mode="after")
    def _only_its_own(self) -> LossConfig:
        clipped = ("grpo", "dr_grpo")
        owners: dict[str, tuple[str, ...]] = {key: ("asympo",) for key in ("floor", "p_low", "p_high")}
        owners |= {"alpha": ("spo",), "clip": clipped, "behaviour": clipped, "importance_cap": clipped}
        for key, names in owners.items():
            if getattr(self, key) is not None and self.name not in names:
                raise ValueError(f"loss.{key} belongs to loss.name={' or '.join(names)}, but loss.name is {self.name}")
        if self.importance_cap is not None and self.behaviour != "recomputed":
            raise ValueError(
                "loss.importance_cap corrects the learner's own logprobs: it needs loss.behaviour=recomputed. With received "
                "ones the ratio itself is that correction, and loss.clip bounds it"
            )
        if self.p_low is not None and self.p_high is not None and self.p_low >= self.p_high:
            raise ValueError(f"loss.p_low ({self.p_low}) must be less than loss.p_high ({self.p_high})")
        return self


class SamplingConfig(Part):
    """Tokens are drawn from softmax(logits / temperature): truncating samplers would train on another distribution."""

    temperature: Annotated[float, Field(ge=0)] = Field(
        1.0, description="Divides the logits, in rollouts and in training."
    )
    max_new_tokens: Count = Field(32, description="Tokens after which an answer is cut off.")

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
    zero_signal: Literal["train", "refill"] = Field(
        "train",
        description="Groups whose rewards are all equal. train: they take their place in the batch, with loss 0. refill: they are "
        "thrown away, and other prompts take their place (dynamic sampling).",
    )
    refill_limit: Count = Field(10, description="refill: batches of such groups in a row after which they are trained.")
    train_group_size: Annotated[int, Field(ge=2)] | None = Field(
        None,
        description="Completions of a prompt that are trained on: those whose rewards vary most. Default: all of them.",
    )
    updates: Count = Field(1, description="Optimizer steps on each batch, every one over the whole of it.")

    @model_validator(mode="after")
    def _only_refill_has_a_limit(self) -> BatchConfig:
        if self.zero_signal != "refill" and self.refill_limit != BatchConfig.model_fields["refill_limit"].default:
            raise ValueError("batch.refill_limit belongs to batch.zero_signal=refill")
        return self

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

    lr: Annotated[float, Field(ge=0)] = Field(
        1e-6, description="Learning rate; 0 moves no weight, for endurance runs and measurements of the machine."
    )
    betas: tuple[Share, Share] = Field((0.9, 0.95), description="AdamW's averages of the gradient and of its square.")
    eps: Positive = Field(1e-8, description="AdamW's addend in the denominator.")
    weight_decay: Annotated[float, Field(ge=0)] = Field(0.0, description="AdamW's decoupled weight decay.")
    warmup_steps: Annotated[int, Field(ge=0)] = Field(0, description="Steps of linear warm-up.")
    schedule: Literal["constant", "linear", "cosine", "wsd"] = Field(
        "constant", description="After the warm-up. wsd: constant, then linear decay over the last decay_fraction."
    )
    decay_fraction: Annotated[float, Field(gt=0, le=1)] = Field(0.3, description="wsd: share of the steps that decay.")
    max_grad_norm: Positive = Field(1.0, description="Gradients are scaled down to this L2 norm.")
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


class LoraConfig(Part):
    """Low-rank adapters (LoRA) that are trained in the model's place; it needs peft: ``pip install 'trtl-rl[lora]'``."""

    rank: Annotated[int, Field(ge=0)] = Field(
        0, description="Rank of every adapter; 0: no adapters, all weights are trained."
    )
    alpha: Positive = Field(
        32.0, description="Adapters are scaled by alpha / rank, so that one learning rate does for several ranks."
    )
    targets: Annotated[list[Linear], Field(min_length=1)] = Field(
        default_factory=lambda: list(get_args(Linear)),
        description="Linears of each layer with an adapter; default: all.",
    )

    @model_validator(mode="before")
    @classmethod
    def _what_adapters_cannot(cls, values: Any) -> Any:
        if isinstance(values, dict):
            for key in values.keys() & LORA_REFUSED.keys():
                raise ValueError(f"there is no lora.{key}: {LORA_REFUSED[key]}")
        return values

    @field_validator("targets", mode="before")
    @classmethod
    def _targets(cls, value: Any) -> Any:
        """``all-linear`` is peft's word for all of them; one name may stand without brackets."""
        if value == "all-linear":
            return list(get_args(Linear))
        names = [value] if isinstance(value, str) else value
        for name in names if isinstance(names, list) else ():
            if name in ("lm_head", "embed_tokens"):
                raise ValueError(
                    f"{name} takes no adapter: the kernels compute adapters of the decoder layers' linears, which are "
                    f"{', '.join(get_args(Linear))}"
                )
        return names

    @model_validator(mode="after")
    def _only_with_a_rank(self) -> LoraConfig:
        defaults = LoraConfig.model_fields
        for key in ("alpha", "targets"):
            if self.rank == 0 and getattr(self, key) != defaults[key].get_default(call_default_factory=True):
                raise ValueError(f"lora.{key} needs lora.rank: without one there are no adapters")
        return self


class BufferConfig(Part):
    """How far rollouts may run ahead of the learner."""

    max_staleness: Annotated[int, Field(ge=0)] = Field(
        1, description="Weight versions between a group's start and its update; 0 is the synchronous mode."
    )
    in_flight: Literal["finish", "continue"] = Field(
        "continue", description="What unfinished completions do at a refit: finish under the old weights, or go on."
    )
    lease: Positive = Field(
        600.0, description="Seconds without a sign of life of a prompt's answers, after which they are generated again."
    )
    attempts: Count = Field(3, description="How often a prompt's answers may get lost before the prompt is left out.")


class RefitConfig(Part):
    """How new weights travel to the engine."""

    mode: Literal["auto", "full", "delta"] = Field(
        "auto",
        description="full: send every tensor. delta: what changed, where that is shorter and the engine has the base. auto: delta "
        "of adapters and through a stream; memory is copied faster than versions are compared.",
    )
    channel: Literal["shared_memory", "stream", "cuda_ipc"] | None = Field(
        None,
        description="What carries weights. stream: a socket. cuda_ipc: memory of the GPU that both use. Default: cuda_ipc where "
        "both sides are on GPUs and have the same torch, else shared_memory.",
    )
    bucket_bytes: Count = Field(16 * 2**20, description="Size of one bucket.")
    timeout: Positive = Field(120.0, description="Seconds for each stage of a refit.")


class CheckpointConfig(Part):
    """When to save, and how many to keep."""

    every: Annotated[int, Field(ge=0)] = Field(50, description="Steps between checkpoints; 0: at the end only.")
    keep: Count = Field(
        2, description="Newest checkpoints that stay. With 1, a torn one leaves nothing to resume from."
    )


class RolloutsConfig(Part):
    """The trained answers, for people: ``rollouts/step-N.jsonl``, one group a line."""

    keep: Annotated[int, Field(ge=0)] = Field(100, description="Newest steps whose answers stay; 0: none are written.")


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
    prompts: Count = Field(2, description="Prompts of a probe; each gets four answers.")
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
