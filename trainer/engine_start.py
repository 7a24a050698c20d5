"""The engine's side of a run: configured, given its first version, and compared with the learner's side."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trtl_rl.engines.host import HostedEngine
from trtl_rl.errors import UserError
from trtl_rl.refit.manifest import Manifest
from trtl_rl.refit.sender import send

if TYPE_CHECKING:
    from trtl_rl.config import RunConfig
    from trtl_rl.engines.directory import EngineDirectory
    from trtl_rl.kernels.kernel_set import KernelSet
    from trtl_rl.model.bind import TrainableDecoder

MAX_SLOTS = 256


def start_engine(
    engine: HostedEngine,
    config: RunConfig,
    directory: EngineDirectory | None,
    decoder: TrainableDecoder,
    kernels: KernelSet,
    *,
    context: int,
    stop_ids: list[int],
) -> None:
    """Configure the engine, give it the learner's version, and compare what both sides run.

    Args:
        context: Tokens of the longest prompt and answer.

    Raises:
        UserError: the directory's codes are not those that the learner computes, or the two sides run different modules.
    """
    engine.configure(
        decoder.description.to_json(),
        kernels.identity,
        kernels.compiled,
        device=config.device,
        fault=config.engine.fault,
        packages=None if directory is None else str(directory.packages),
        **limits(config, decoder, context),
        context=context,
        stop_ids=stop_ids,
    )
    coverage = decoder.description.coverage.digest
    if directory is not None and decoder.weights.version == 0:
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
        )
    for one, other in (
        (decoder.description.coverage, decoder.weights.coverage()),
        (decoder.description.coverage, engine.coverage()),
    ):
        differences = one.difference(other)
        if differences:
            raise UserError("The recipe and what runs differ in: " + "; ".join(differences[:8]))


def limits(config: RunConfig, decoder: TrainableDecoder, context: int) -> dict[str, int]:
    """Slots: as many as are in flight, at most 256; positions of keys and values: what ``engine.cache_gib`` has room for.

    Raises:
        UserError: one completion alone does not fit.
    """
    from trtl_rl.model.kv import block_length, bytes_per_position

    d = decoder.description
    one = bytes_per_position(d.key_value_dtypes, d.kv_heads, d.head_dim)
    room, longest = int(config.engine.cache_gib * 2**30 / one), block_length(context)
    if longest > room:
        raise UserError(
            f"One completion of {context} tokens needs {longest * one / 2**30:.3g} GiB for keys and values, and "
            f"engine.cache_gib is {config.engine.cache_gib:g}. Raise engine.cache_gib, or lower engine.max_context."
        )
    in_flight = config.batch.prompts * config.batch.group_size * (config.buffer.max_staleness + 1)
    slots = config.engine.slots or min(MAX_SLOTS, in_flight)
    return {"slots": slots, "positions": min(room, slots * longest)}
