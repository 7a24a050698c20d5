"""The engine's side of a run: configured, given its first version, and compared with the learner's side."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trtl_rl.engines.environment import Environment, check_same_operators, choose_channel, read_environment
from trtl_rl.engines.host import HostedEngine
from trtl_rl.errors import UserError
from trtl_rl.refit.channel import ChannelName
from trtl_rl.refit.manifest import Manifest
from trtl_rl.refit.sender import send
from trtl_rl.refit.validate import BlockScaleContract

if TYPE_CHECKING:
    from trtl_rl.config import RunConfig
    from trtl_rl.engines.directory import EngineDirectory
    from trtl_rl.kernels.kernel_set import KernelSet
    from trtl_rl.metrics import MetricsWriter
    from trtl_rl.model.bind import TrainableDecoder

MAX_SLOTS = 256


@dataclass(frozen=True)
class EnginePlace:
    """Where the engine of a run will run, how weights get there, and what they must comply with.

    Attributes:
        channel_reason: Why this channel, in words.
        contract: For an engine that does not check weights itself.
    """

    environment: Environment
    channel: ChannelName
    channel_reason: str
    contract: BlockScaleContract | None = None


def find_place(config: RunConfig, directory: EngineDirectory | None) -> EnginePlace:
    """Look at the engine's environment before anything is started or loaded.

    Raises:
        UserError: what ``engine.python`` names cannot run this engine, or TensorRT-LLM cannot run this directory on this machine.
    """
    environment = read_environment(config.engine.python)
    contract = None
    if config.engine.backend == "tensorrt-llm":
        from trtl_rl.engines.tensorrt_llm.versions import check_machine

        assert directory is not None
        contract = directory.contract()
        contract.check_model()
        check_machine(environment)
    elif config.parity.stop == 0:
        check_same_operators(environment)
    return EnginePlace(environment, *choose_channel(config.refit.channel, config.device, environment), contract)


def start_engine(
    engine: HostedEngine,
    config: RunConfig,
    directory: EngineDirectory | None,
    decoder: TrainableDecoder,
    kernels: KernelSet,
    *,
    context: int,
    stop_ids: list[int],
    place: EnginePlace,
    metrics: MetricsWriter,
) -> None:
    """Configure the engine, give it the learner's version, and compare what both sides run.

    Args:
        context: Tokens of the longest prompt and answer.

    Raises:
        UserError: the directory's codes are not those that the learner computes, or the two sides run different modules.
    """
    served = config.engine.backend == "tensorrt-llm"
    about = engine.configure(
        decoder.description.to_json(),
        kernels.identity,
        kernels.compiled,
        device=config.device,
        fault=config.engine.fault,
        packages=None if directory is None else str(directory.packages),
        backend=config.engine.backend,
        # Whoever lets logprobs differ lets operators differ.
        other_operators=config.parity.stop != 0.0,
        serving={"directory": str(directory.path), "overrides": config.engine.arguments}
        if directory and served
        else None,
        **limits(config, decoder, context),
        context=context,
        stop_ids=stop_ids,
    )
    _tell(metrics, about, kernels)
    if place.environment.executable != sys.executable or served or config.device == "cuda":
        metrics.message("info", f"Weights go to the engine through {place.channel}: {place.channel_reason}.")
    coverage = decoder.description.coverage.digest
    if directory is not None and decoder.weights.version == 0 and not served:
        if engine.load(directory.path).digest != Manifest.of(decoder.snapshot, 0, coverage).digest:
            raise UserError(
                f"engine.path={directory.path} holds other codes than the trainer computes from "
                f"model={config.model}: it was built with other versions. Build it again."
            )
    else:
        send(
            engine,
            decoder.snapshot,
            version=decoder.weights.version,
            coverage=coverage,
            bucket_bytes=config.refit.bucket_bytes,
            contract=place.contract,
        )
    for one, other in (
        (decoder.description.coverage, decoder.weights.coverage()),
        (decoder.description.coverage, engine.coverage()),
    ):
        differences = one.difference(other)
        if differences:
            raise UserError("The recipe and what runs differ in: " + "; ".join(differences[:8]))


def _tell(metrics: MetricsWriter, about: dict[str, Any], kernels: KernelSet) -> None:
    """Say what runs in the engine's process, where that is not what runs here."""
    import torch

    if about["backend"] == "tensorrt-llm":
        metrics.message("info", f"Engine: {about['text']}")
    elif about["operators"] != kernels.identity:
        metrics.message(
            "warning",
            f"The engine's operators are not the trainer's (torch {about['torch']} there, {torch.__version__} here): nothing says "
            "that its logprobs are the trainer's bit for bit. The difference is measured at every probe (mismatch/..., "
            "parity.every).",
        )


def limits(config: RunConfig, decoder: TrainableDecoder, context: int) -> dict[str, int]:
    """Slots: as many as are in flight, at most 256; positions of keys and values: what ``engine.cache_gib`` has room for.

    Raises:
        UserError: one completion alone does not fit.
    """
    from trtl_rl.model.kv import block_length, bytes_per_position

    in_flight = config.batch.prompts * config.batch.group_size * (config.buffer.max_staleness + 1)
    slots = config.engine.slots or min(MAX_SLOTS, in_flight)
    if config.engine.backend == "tensorrt-llm":
        return {"slots": slots}  # it takes memory for keys and values as its own arguments say
    d = decoder.description
    one = bytes_per_position(d.key_value_dtypes, d.kv_heads, d.head_dim)
    room, longest = int(config.engine.cache_gib * 2**30 / one), block_length(context)
    if longest > room:
        raise UserError(
            f"One completion of {context} tokens needs {longest * one / 2**30:.3g} GiB for keys and values, and "
            f"engine.cache_gib is {config.engine.cache_gib:g}. Raise engine.cache_gib, or lower engine.max_context."
        )
    return {"slots": slots, "positions": min(room, slots * longest)}
