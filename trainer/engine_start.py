"""The engine's side of a run: configured, given its first version, and compared with the learner's side."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtl_rl.engines.faulty import Fault
from trtl_rl.engines.host import HostedEngine
from trtl_rl.engines.pool import EnginePool, Engines
from trtl_rl.engines.ray_engine import BucketStore, RayEngine, connect
from trtl_rl.engines.supervisor import EngineProcess, SupervisedEngine
from trtl_rl.errors import UserError
from trtl_rl.metrics import Tell
from trtl_rl.refit.manifest import Manifest
from trtl_rl.refit.sender import send

if TYPE_CHECKING:
    from torch import Tensor

    from trtl_rl.config import RunConfig
    from trtl_rl.engines.directory import EngineDirectory
    from trtl_rl.kernels.kernel_set import KernelSet
    from trtl_rl.model.bind import TrainableDecoder

MAX_SLOTS = 256


def make_engines(config: RunConfig, run_dir: Path, tell: Tell) -> Engines:
    """Start the processes of a run's engines: one, or ``engine.replicas`` of them, here or on the nodes of a Ray cluster.

    Raises:
        UserError: ``ray.address`` is given, and Ray is not there.
    """
    c = config
    store: BucketStore | None = None
    if c.ray.address is not None:
        connect(c.ray.address)
        store = BucketStore()

    def make(number: int) -> EngineProcess:
        log = run_dir / "logs" / ("engine.log" if c.engine.replicas == 1 else f"engine-{number}.log")
        limits: dict[str, Any] = {
            "threads": c.engine.threads,
            "timeout": c.engine.timeout,
            "refit_timeout": c.refit.timeout,
            "number": number,
        }
        if store is not None:
            return RayEngine(log, store, options=c.ray.options, **limits)
        return HostedEngine(log, channel=c.refit.channel, **limits)

    def supervised(number: int) -> SupervisedEngine:
        said = tell if c.engine.replicas == 1 else (lambda level, text: tell(level, f"Engine {number}: {text}"))
        return SupervisedEngine(
            lambda: make(number), restarts=c.engine.restarts, delay=c.engine.restart_delay, tell=said
        )

    engines = [supervised(number) for number in range(c.engine.replicas)]
    return engines[0] if len(engines) == 1 else EnginePool(engines, tell)


class EngineStart:
    """Brings an engine's process to where it may generate, the first time and after a failure.

    Args:
        context: Tokens of the longest prompt and answer.
    """

    def __init__(
        self,
        config: RunConfig,
        directory: EngineDirectory | None,
        decoder: TrainableDecoder,
        kernels: KernelSet,
        *,
        context: int,
        stop_ids: list[int],
    ) -> None:
        self.config, self.directory, self.decoder, self.kernels = config, directory, decoder, kernels
        self.context, self.stop_ids = context, stop_ids

    def __call__(self, engine: EngineProcess, tensors: Mapping[str, Tensor], version: int, *, restarted: bool) -> None:
        """Configure the engine, give it ``version``, and compare what both sides run.

        Args:
            tensors: Of the version, in the layout of ``tensor_specs``.
            restarted: It takes the place of one that failed. What ``engine.fault`` stages does not happen again then, unless
                it says ``always``; and of several engines only the first fails.

        Raises:
            UserError: the directory's codes are not those that the learner computes, or the two sides run different modules.
        """
        c, decoder, directory = self.config, self.decoder, self.directory
        fault = c.engine.fault
        if fault is not None and (engine.number or (restarted and not Fault.parse(fault).always)):
            fault = None
        engine.configure(
            decoder.description.to_json(),
            self.kernels.identity,
            self.kernels.compiled,
            device=c.device,
            fault=fault,
            packages=None if directory is None else str(directory.packages),
            **limits(c, decoder, self.context),
            context=self.context,
            stop_ids=self.stop_ids,
        )
        coverage = decoder.description.coverage.digest
        if directory is not None and version == 0:
            if engine.load(directory.path).digest != Manifest.of(tensors, 0, coverage).digest:
                raise UserError(
                    f"engine.path={directory.path} holds other codes than the trainer computes from "
                    f"model={c.model}: it was built with other versions. Build it again."
                )
        else:
            send(engine, tensors, version=version, coverage=coverage, bucket_bytes=c.refit.bucket_bytes)
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
    slots = config.engine.slots or min(MAX_SLOTS, -(-in_flight // config.engine.replicas))
    return {"slots": slots, "positions": min(room, slots * longest)}
