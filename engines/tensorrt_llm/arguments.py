"""What TensorRT-LLM is told: arguments of ``AsyncLLM`` and of each completion, as plain dicts. Pure functions."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from trtl_rl.errors import UserError
from trtl_rl.rollout import Request

EXTENSION = "trtl_rl.engines.tensorrt_llm.extension.RefitExtension"
BATCH = 256  # completions at once, unless a run says otherwise

# Workers of one GPU each must see all GPUs of the node to open the trainer's memory, and must load one tensor after the other:
# a refit reads back what was written. They stay in a Ray cluster of their engine's own: TensorRT-LLM would else join the one that
# it finds, put workers on other nodes, where the engine's shared memory is not, and wait there for GPUs that its own actor holds.
ENVIRONMENT = {
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
    "TRT_LLM_DISABLE_LOAD_WEIGHTS_IN_PARALLEL": "1",
    "TLLM_RAY_FORCE_LOCAL_CLUSTER": "1",
}

# What this adapter needs as it sets it.
_FIXED = (
    "model", "load_format", "tensor_parallel_size", "pipeline_parallel_size", "skip_tokenizer_init", "ray_worker_extension_cls",
    "orchestrator_type", "max_seq_len", "max_input_len",
)  # fmt: skip


def directory_arguments(*, tensor_parallel: int, max_context: int) -> dict[str, Any]:
    """``llm_args.yaml`` of an engine directory: everything but the path of the model.

    >>> directory_arguments(tensor_parallel=2, max_context=4096)["max_seq_len"]
    4096
    """
    return {
        "dtype": "bfloat16",
        "tensor_parallel_size": tensor_parallel,
        "pipeline_parallel_size": 1,
        "max_seq_len": max_context,
        "max_input_len": max_context - 1,  # by default 1024, which refuses long prompts
        "max_batch_size": BATCH,
        "max_num_tokens": max(8192, max_context),
        "enable_chunked_prefill": True,
        "skip_tokenizer_init": True,  # token ids in, token ids out
        "sampler_type": "TorchSampler",
        "kv_cache_config": {"enable_block_reuse": True, "free_gpu_memory_fraction": 0.5},
        "cuda_graph_config": {"enable_padding": True, "max_batch_size": BATCH},
    }


def run_arguments(
    base: Mapping[str, Any],
    *,
    model: str,
    slots: int,
    context: int,
    load_format: str,
    overrides: Mapping[str, Any],
) -> dict[str, Any]:
    """Arguments of ``AsyncLLM`` for a run.

    Args:
        base: ``llm_args.yaml``.
        model: The engine directory, whose ``config.json`` names the quantisation.
        slots: Completions at once.
        context: Longest prompt plus answer of the run.
        load_format: ``dummy`` when all weights arrive by refit, ``auto`` to load the directory's.
        overrides: ``engine.arguments``; mappings are merged with those of ``base``.

    Raises:
        UserError: an override of what the adapter sets itself, or a context beyond the directory's.
    """
    for name in overrides:
        if name in _FIXED:
            raise UserError(f"engine.arguments.{name} cannot be set: it follows from the engine directory and the run.")
    if context > base["max_seq_len"]:
        raise UserError(
            f"The run needs {context} tokens of context, and {model} was built for {base['max_seq_len']}: build it again with "
            f"--max-context {context}, or lower sampling.max_new_tokens."
        )
    arguments = copy.deepcopy(dict(base))
    arguments.update({"max_seq_len": context, "max_input_len": max(1, context - 1), "max_batch_size": slots})
    if arguments.get("cuda_graph_config") is not None:
        arguments["cuda_graph_config"]["max_batch_size"] = slots
    for name, value in overrides.items():
        both = isinstance(value, Mapping) and isinstance(arguments.get(name), dict)
        arguments[name] = {**arguments[name], **value} if both else value
    fixed = {"model": model, "load_format": load_format, "ray_worker_extension_cls": EXTENSION}
    return {**arguments, **fixed}


def sampling_arguments(
    request: Request, sample: int, *, generated: int, version: int, stop_ids: Sequence[int], known: Sequence[str]
) -> dict[str, Any]:
    """Arguments of ``SamplingParams`` for one completion, or for the rest of one.

    Tokens are drawn from softmax(logits / temperature): nothing is truncated.

    Args:
        generated: Tokens of the completion that exist already.
        known: Fields that the installed version has.

    Raises:
        UserError: logprobs are asked for that this version cannot give at the sampling temperature.
    """
    sampling = request.sampling
    stops = list(stop_ids)
    arguments: dict[str, Any] = {
        "max_tokens": sampling.max_new_tokens - generated,  # by default 32
        "temperature": sampling.temperature,
        "top_p": 1.0,
        "top_k": 1 if sampling.greedy else 0,
        "seed": seed_of(request.seed, sample, version),
        "end_id": stops[0] if stops else -1,
        "pad_id": stops[0] if stops else 0,
        "stop_token_ids": stops or None,
        "include_stop_str_in_output": True,  # the end-of-sequence token is part of an answer
        "detokenize": False,
    }
    if request.logprobs:
        processed = "logprobs_mode" in known
        if sampling.greedy or (not processed and sampling.temperature != 1.0):
            raise UserError(
                "This version of TensorRT-LLM gives logprobs of logits, not of logits / temperature: parity cannot be measured. "
                "Take a newer one, or parity.every=0."
                if not sampling.greedy
                else "Logprobs of greedy answers are not available from TensorRT-LLM: it computes them after the choice."
            )
        arguments["logprobs"] = 0  # the sampled token's alone
        if processed:
            arguments["logprobs_mode"] = "processed"
        if "logprobs_simple_format" in known:
            arguments["logprobs_simple_format"] = True
    return arguments


def seed_of(seed: tuple[int, int, int], sample: int, version: int) -> int:
    """A completion's random stream, from what names it: 63 bits, equal on every machine."""
    import xxhash

    text = " ".join(map(str, (*seed, sample, version)))
    return int(xxhash.xxh3_64_intdigest(text.encode()) >> 1)
