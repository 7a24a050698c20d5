"""TRL's names of settings, so that a script written for ``GRPOTrainer`` ports by changing two names.

Four tables say everything: what is renamed, what already is so and may be said, what is meant in another way, and what is refused
with a reason. TRL's defaults are not taken over: a setting that a script leaves out has the default of ``RunConfig``.

>>> translate({"learning_rate": 1e-5, "num_generations": 4, "per_device_train_batch_size": 16}).tree
{'optimizer': {'lr': 1e-05}, 'batch': {'group_size': 4, 'prompts': 4}}
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trtl_rl.errors import UserError


def _all(names: str, reason: str) -> dict[str, str]:
    """Names that have one reason."""
    return dict.fromkeys(names.split(), reason)


RENAMED = {
    "learning_rate": "optimizer.lr",
    "weight_decay": "optimizer.weight_decay",
    "adam_epsilon": "optimizer.eps",
    "max_grad_norm": "optimizer.max_grad_norm",
    "warmup_steps": "optimizer.warmup_steps",
    "activation_checkpointing": "optimizer.gradient_checkpointing",
    "gradient_checkpointing": "optimizer.gradient_checkpointing",
    "num_generations": "batch.group_size",
    "max_completion_length": "sampling.max_new_tokens",
    "temperature": "sampling.temperature",
    "max_steps": "steps",
    "num_train_epochs": "epochs",
    "output_dir": "run_dir",
    "shuffle_dataset": "task.shuffle",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "eval_steps": "evaluation.every",
    "beta": "loss.kl_coefficient",
}
"""TRL's name → the key here. A value of None is left to the default."""

SCHEDULES = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "warmup_stable_decay": "wsd",
}
"""``lr_scheduler_type`` → ``optimizer.schedule``."""

LOSSES = {"grpo": "grpo", "dr_grpo": "dr_grpo"}
"""``loss_type`` → ``loss.name``. Left out, the objective is this project's default, ASymPO."""

ALREADY_SO: dict[str, tuple[tuple[Any, ...], str]] = {
    "top_p": ((1.0,), "a truncated sampler draws from another distribution than the one that is trained"),
    "top_k": ((0, None), "a truncated sampler draws from another distribution than the one that is trained"),
    "min_p": ((None, 0.0), "a truncated sampler draws from another distribution than the one that is trained"),
    "repetition_penalty": ((1.0,), "a penalty draws from another distribution than the one that is trained"),
    "scale_rewards": (
        (False, "none"),
        "advantages have the group's mean taken off and are not scaled (ASymPO, Dr. GRPO)",
    ),
    "num_iterations": ((1,), "a batch is trained on once"),
    "steps_per_generation": (
        (None, 1),
        "rollouts never wait for steps; buffer.max_staleness bounds how far they run ahead",
    ),
    "importance_sampling_level": (("token",), "ratios are of tokens"),
    "multi_objective_aggregation": (("sum_then_normalize",), "rewards are weighted and summed"),
    "mask_truncated_completions": ((False,), "return None from a reward function for answers that shall not count"),
    "remove_unused_columns": ((False,), "every column of the data goes to the reward functions"),
    "logging_strategy": (("steps",), "every step is written to metrics.jsonl"),
    "save_strategy": (("steps",), "checkpoints are written every checkpoint.every steps, and at the end"),
    "use_vllm": ((False,), "rollouts come from the project's own engine, which runs the trainer's precision recipe"),
    "use_transformers_paged": ((False,), "rollouts come from the project's own engine"),
    "fp16": ((False,), "precision is the recipe's alone: set recipe"),
    "tf32": ((None, False), "precision is the recipe's alone: set recipe"),
    "disable_dropout": ((True, False), "the decoder has no dropout"),
    "dataloader_drop_last": ((True, False), "the order of prompts has no end: epochs follow one another"),
    "optim": (("adamw_torch", "adamw_torch_fused"), "the optimizer is AdamW"),
    "sync_ref_model": ((False,), "the reference is the start model"),
    "top_entropy_quantile": ((1.0,), "all tokens are trained on"),
    "log_completions": ((True, False), "a sample is written to metrics.jsonl at every step"),
    "push_to_hub": ((False,), "use save_pretrained() and huggingface_hub"),
    "eval_strategy": (("steps", "no"), "an evaluation comes every eval_steps updates, at the start and at the end"),
    "eval_on_start": ((True,), "the start model is evaluated too"),
    "eval_delay": ((0, None), "an evaluation comes every eval_steps updates, at the start and at the end"),
    "save_only_model": ((False,), "checkpoints hold the whole run; save_pretrained() writes a model alone"),
    "resume_from_checkpoint": ((None, False), "Trainer(..., resume=True) goes on with the run in output_dir"),
    "data_seed": ((None,), "one seed decides about everything: seed"),
    "torch_compile": ((False,), "operators are compiled by themselves: compile"),
    "use_liger_kernel": ((False,), "operators are the project's own, the same in trainer and engine"),
    "cast_lm_head_to_fp32": ((False,), "the head's products are FP32 unless the recipe says otherwise"),
    "use_bias_correction_kl": ((False,), "the KL term is an estimate by samples"),
    "label_smoothing_factor": ((0, None), "there are no labels"),
    "train_sampling_strategy": (("random",), "task.shuffle and task.curriculum decide about the order"),
    "metric_for_best_model": ((None,), "choose a checkpoint by its evaluation rows in metrics.jsonl"),
    "greater_is_better": ((None,), "choose a checkpoint by its evaluation rows in metrics.jsonl"),
    "ignore_data_skip": ((False,), "a resume goes on in the order of the data"),
    "neftune_noise_alpha": ((None,), "noise would make another model than the one that generates"),
    "optim_args": ((None,), "the optimizer is AdamW, with the keys of optimizer"),
    "optim_target_modules": ((None,), "the optimizer is AdamW, for all weights"),
    "lr_scheduler_kwargs": ((None, {}), "optimizer has the schedules' keys"),
    "log_completions_hub_repo": ((None,), "completions are in rollouts/ of the run directory"),
}
"""TRL's name → the values that say what happens here anyway, and the reason why no other is taken."""

SAID = {
    "logging_steps": "every step is written to metrics.jsonl",
    "bf16": "precision is the recipe's: FP32 masters, rounded to BF16 and quantised on both sides",
    "logging_first_step": "every step is written to metrics.jsonl",
    "disable_tqdm": "the terminal shows a dashboard; without a terminal there is a line a step",
    "dataloader_num_workers": "prompts are tokenised once, at the start",
    "ds3_gather_for_generation": "there is no ZeRO-3 here",
    "run_name": "a run has the name of its directory, output_dir",
    "logging_dir": "metrics and logs are in the run directory",
    "gradient_checkpointing_kwargs": "whole layers are computed again",
    "activation_checkpointing_kwargs": "whole layers are computed again",
    "average_tokens_across_devices": "the learner runs in one process",
    "num_completions_to_print": "a sample is written to metrics.jsonl at every step",
    "log_unique_prompts": "a sample is written to metrics.jsonl at every step",
    "torch_empty_cache_steps": "memory is bounded by optimizer.micro_batch_tokens",
    "full_determinism": "a run with buffer.max_staleness=0 repeats bit for bit",
    "use_cache": "the engine keeps keys and values, the learner none",
    "ref_model_mixup_alpha": "the reference is the start model",
    "ref_model_sync_steps": "the reference is the start model",
    "do_train": "call train()",
    "do_eval": "call evaluate()",
    "do_predict": "call generate()",
    **_all(
        "dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor dataloader_multiprocessing_context "
        "dataloader_in_order",
        "prompts are tokenised once, at the start",
    ),
    **_all(
        "ddp_backend ddp_timeout ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph local_rank "
        "log_on_each_node save_on_each_node",
        "the learner runs in one process",
    ),
    **_all(
        "log_level log_level_replica logging_nan_inf_filter include_num_input_tokens_seen include_for_metrics "
        "skip_memory_metrics",
        "every step is written to metrics.jsonl",
    ),
    **_all(
        "eval_accumulation_steps eval_do_concat_batches eval_use_gather_object batch_eval_metrics prediction_loss_only "
        "bf16_full_eval fp16_full_eval",
        "evaluation has keys of its own, see evaluation",
    ),
    **_all("label_names length_column_name restore_callback_states_from_checkpoint", "nothing here needs it"),
}
"""TRL's name → what is so instead; the value has no effect, and a run says that."""

REFUSED = {
    "vllm_mode": "rollouts come from the project's own engine",
    "loss_weights": "there is one objective",
    "delta": "GRPO is clipped on one side here; use loss.importance_cap for stale rollouts",
    "epsilon_high": "the ratio is clipped symmetrically: loss.clip",
    "generation_kwargs": "tokens are drawn from softmax(logits / temperature) alone",
    "chat_template_kwargs": "render the prompts before, as text",
    "model_init_kwargs": "pass a model, or its directory",
    "cache_implementation": "the engine keeps its own keys and values",
    "max_prompt_length": "prompts are never cut; set task.too_long=skip to leave long ones out",
    "off_policy_mask_threshold": "staleness is bounded by buffer.max_staleness instead",
    "per_device_eval_batch_size": "the engine fills its own batches; evaluation.prompts says how many prompts",
    "num_generations_eval": "evaluation has keys of its own, see evaluation",
    "deepspeed": "the learner runs in one process",
    "fsdp": "the learner runs in one process",
    "auto_find_batch_size": "optimizer.micro_batch_tokens bounds the memory of a step",
    "load_best_model_at_end": "choose a checkpoint by its evaluation rows in metrics.jsonl",
    "max_tool_calling_iterations": "an answer is one turn, and calls no tools",
    "sapo_temperature_neg": "of TRL's objectives there are grpo, dr_grpo",
    "sapo_temperature_pos": "of TRL's objectives there are grpo, dr_grpo",
    **_all("accelerator_config parallelism_config fsdp_config", "the learner runs in one process"),
    **_all("torch_compile_backend torch_compile_mode", "operators are compiled by themselves: compile"),
    **_all("liger_kernel_config", "operators are the project's own, the same in trainer and engine"),
    **_all(
        "project trackio_space_id trackio_bucket_id trackio_static_space_id",
        "a tracker is told the run's name and its configuration, and nothing else",
    ),
    **_all(
        "hub_model_id hub_token hub_private_repo hub_strategy hub_always_push hub_revision",
        "use save_pretrained() and huggingface_hub",
    ),
    **_all("debug enable_jit_checkpoint", "there is no such mode"),
}
"""TRL's name → why it is not taken. Names beginning with ``vllm_`` are refused as ``vllm_mode`` is."""

TRAINER_ARGUMENTS = {
    "reward_processing_classes": "a reward model brings its own tokenizer",
    "optimizers": "the optimizer is AdamW, with the keys of args.optimizer",
    "quantization_config": "precision is the recipe's alone: set args.recipe",
    "tools": "an answer is one turn, and calls no tools",
    "rollout_func": "rollouts come from an engine: give engine=, as examples/custom_engine.py does",
    "environment_factory": "an answer is one turn, in no environment",
}
"""Arguments of TRL's ``GRPOTrainer`` → why ``Trainer`` does not take them."""

_COUNTS = ("per_device_train_batch_size", "gradient_accumulation_steps", "generation_batch_size")
_OTHER = {*_COUNTS, "lr_scheduler_type", "loss_type", "epsilon", "adam_beta1", "adam_beta2", "warmup_ratio", "report_to",
          "use_cpu", "reward_weights"}  # fmt: skip
NAMES = {*RENAMED, *ALREADY_SO, *SAID, *REFUSED, *_OTHER}


@dataclass
class Translated:
    """Settings in the words of ``RunConfig``.

    Attributes:
        tree: Keys of ``RunConfig``, nested.
        lines: What was mapped to what, for people.
        reward_weights: For reward functions that are given to ``Trainer``.
        warmup_ratio: Share of the steps that warms up; turned into steps when those are known.
    """

    tree: dict[str, Any] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    reward_weights: list[float] | None = None
    warmup_ratio: float | None = None

    def put(self, key: str, value: Any, said: str) -> None:
        """Set a dotted key; ``said`` is TRL's name for it."""
        tree = self.tree
        *parents, last = key.split(".")
        for parent in parents:
            tree = tree.setdefault(parent, {})
            if not isinstance(tree, dict):
                raise UserError(f"{said} sets {key}, and {parent} is given as an object: set it there.")
        if last in tree:
            raise UserError(f"{said} and {key} say the same thing: give one of them.")
        tree[last] = value
        self.lines.append(f"{said} → {key}={value}")


def translate(given: dict[str, Any]) -> Translated:
    """Replace TRL's names in ``given``; other keys are kept as they are.

    Raises:
        UserError: names every setting that is not taken, with the reason.
    """
    out = Translated({key: value for key, value in given.items() if key not in NAMES and not key.startswith("vllm_")})
    theirs = {key: value for key, value in given.items() if key not in out.tree}
    refused = []
    for name, value in theirs.items():
        reason = _refusal(name, value)
        if reason is not None:
            refused.append(f"{name}={value!r} is not taken: {reason}")
    if refused:
        raise UserError("; ".join(refused) + ".")
    for name, value in theirs.items():
        if name in RENAMED and value is not None and not (name == "max_steps" and value == -1):
            out.put(RENAMED[name], value, name)
        elif name in SAID:
            out.lines.append(f"{name} has no effect: {SAID[name]}")
    if theirs.get("max_steps", -1) != -1:
        out.tree.pop("epochs", None)  # as in TRL, where max_steps goes before num_train_epochs
    _batch(theirs, out)
    _special(theirs, out)
    return out


def _refusal(name: str, value: Any) -> str | None:
    if name.startswith("vllm_"):
        return REFUSED["vllm_mode"]
    if name in REFUSED:
        return None if value is None or value is False else REFUSED[name]
    if name in ALREADY_SO:
        values, reason = ALREADY_SO[name]
        return None if value in values else reason
    if name == "lr_scheduler_type" and str(getattr(value, "value", value)) not in SCHEDULES:
        return f"optimizer.schedule knows {', '.join(dict.fromkeys(SCHEDULES.values()))}"
    if name == "loss_type" and value not in LOSSES:
        return f"of TRL's objectives there are {', '.join(LOSSES)}; leave it out for ASymPO, or set loss.name"
    return None


def _batch(theirs: dict[str, Any], out: Translated) -> None:
    """TRL counts completions a device and accumulates; here a batch is prompts of ``group_size`` completions each."""
    if not any(name in theirs for name in _COUNTS):
        return
    from trtl_rl.config_parts import BatchConfig

    batch = out.tree.get("batch", {})
    size = batch.get("group_size") or BatchConfig.model_fields["group_size"].default
    if "generation_batch_size" in theirs:
        completions, said = int(theirs["generation_batch_size"]), "generation_batch_size"
    else:
        completions = int(theirs.get("per_device_train_batch_size", 8)) * int(
            theirs.get("gradient_accumulation_steps", 1)
        )
        said = "per_device_train_batch_size × gradient_accumulation_steps"
    if completions % size:
        raise UserError(
            f"{said} is {completions} completions, which is no multiple of num_generations={size}: a group is trained on whole."
        )
    out.put("batch.prompts", completions // size, said)


def _special(theirs: dict[str, Any], out: Translated) -> None:
    """What takes more than another name."""
    if "lr_scheduler_type" in theirs:
        value = theirs["lr_scheduler_type"]
        out.put("optimizer.schedule", SCHEDULES[str(getattr(value, "value", value))], "lr_scheduler_type")
    if "loss_type" in theirs:
        out.put("loss.name", LOSSES[theirs["loss_type"]], "loss_type")
    if "epsilon" in theirs:
        if theirs.get("loss_type") not in LOSSES:
            raise UserError(
                "epsilon is the clip range of GRPO, and the objective is ASymPO, which has none: leave it out."
            )
        out.put("loss.clip", theirs["epsilon"], "epsilon")
    if "adam_beta1" in theirs or "adam_beta2" in theirs:
        betas = (theirs.get("adam_beta1", 0.9), theirs.get("adam_beta2", 0.999))
        out.put("optimizer.betas", betas, "adam_beta1, adam_beta2")
    if theirs.get("warmup_ratio"):
        out.warmup_ratio = float(theirs["warmup_ratio"])
        out.lines.append(f"warmup_ratio → optimizer.warmup_steps={out.warmup_ratio:g} × steps")
    if "report_to" in theirs:
        names = theirs["report_to"]
        names = [names] if isinstance(names, str) else list(names or [])
        out.put("trackers", [name for name in names if name != "none"], "report_to")
    if "use_cpu" in theirs:
        out.put("device", "cpu" if theirs["use_cpu"] else "cuda", "use_cpu")
    if theirs.get("reward_weights") is not None:
        out.reward_weights = [float(weight) for weight in theirs["reward_weights"]]
        out.lines.append(f"reward_weights → weights of reward_funcs: {out.reward_weights}")
