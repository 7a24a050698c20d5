"""Where the engines of a run will be: their environment, what carries weights there, and their processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtl_rl.engines.environment import (
    Environment,
    check_same_operators,
    choose_channel,
    divide_gpus,
    read_environment,
)
from trtl_rl.engines.host import HostedEngine
from trtl_rl.engines.pool import EnginePool, Engines
from trtl_rl.engines.ray_engine import BucketStore, RayEngine, connect
from trtl_rl.engines.supervisor import EngineProcess, SupervisedEngine
from trtl_rl.errors import UserError
from trtl_rl.metrics import Tell
from trtl_rl.refit.channel import ChannelName
from trtl_rl.refit.validate import BlockScaleContract

if TYPE_CHECKING:
    from trtl_rl.config import RunConfig
    from trtl_rl.engines.directory import EngineDirectory


@dataclass(frozen=True)
class EnginePlace:
    """Where the engine of a run will run, how weights get there, and what they must comply with.

    Attributes:
        channel_reason: Why this channel, in words.
        contract: For an engine that does not check weights itself.
        gpus: Of each engine that TensorRT-LLM runs on this machine.
        reads_in_place: Whether engines read the memory of a learner on the CPU.
    """

    environment: Environment
    channel: ChannelName
    channel_reason: str
    contract: BlockScaleContract | None = None
    gpus: Sequence[str] | None = None
    reads_in_place: bool = False


def find_place(config: RunConfig, directory: EngineDirectory | None) -> EnginePlace:
    """Look at the engine's environment before anything is started or loaded.

    Raises:
        UserError: what ``engine.python`` names cannot run this engine, or TensorRT-LLM cannot run this directory on this machine.
    """
    environment = read_environment(config.engine.python)
    contract = gpus = None
    here = config.ray.address is None
    if config.engine.backend == "tensorrt-llm":
        from trtl_rl.engines.tensorrt_llm.versions import check_machine

        assert directory is not None
        contract = directory.contract()
        contract.check_model()
        check_machine(environment, here=here)
        if here:
            gpus = divide_gpus(config.engine.replicas, contract.tensor_parallel)
        else:
            _ray_options(config, contract)
    elif config.parity.stop == 0:
        check_same_operators(environment)
    apart = gpus is not None and len(gpus) > 1
    channel, reason = choose_channel(config.refit.channel, config.device, environment, apart=apart)
    in_place = here and channel == "shared_memory" and config.device == "cpu"
    return EnginePlace(environment, channel, reason, contract, gpus, in_place)


def make_engines(
    config: RunConfig,
    place: EnginePlace,
    run_dir: Path,
    tell: Tell,
    own: Callable[[Path, int], EngineProcess] | None = None,
) -> Engines:
    """Start the processes of a run's engines: one, or ``engine.replicas`` of them, here or on the nodes of a Ray cluster.

    Args:
        own: Makes an engine of the user's from its log file and its number.

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
        if own is not None:
            return own(log, number)
        limits: dict[str, Any] = {
            "threads": c.engine.threads,
            "timeout": c.engine.timeout,
            "refit_timeout": c.refit.timeout,
            "python": c.engine.python,
            "number": number,
        }
        if store is not None:
            return RayEngine(log, store, options=_ray_options(c, place.contract), **limits)
        gpus = None if place.gpus is None else place.gpus[number]
        return HostedEngine(log, channel=place.channel, gpus=gpus, **limits)

    def supervised(number: int) -> SupervisedEngine:
        said = tell if c.engine.replicas == 1 else (lambda level, text: tell(level, f"Engine {number}: {text}"))
        return SupervisedEngine(
            lambda: make(number), restarts=c.engine.restarts, delay=c.engine.restart_delay, tell=said
        )

    engines = [supervised(number) for number in range(c.engine.replicas)]
    return engines[0] if len(engines) == 1 else EnginePool(engines, tell)


def _ray_options(config: RunConfig, contract: BlockScaleContract | None) -> dict[str, Any]:
    """What one engine takes of a node: TensorRT-LLM as many GPUs as its directory was built for."""
    options = config.ray.options
    if contract is not None:
        gpus = options.setdefault("num_gpus", contract.tensor_parallel)
        if gpus != contract.tensor_parallel:
            raise UserError(
                f"ray.resources={{num_gpus: {gpus:g}}}: {config.engine.path} was built for {contract.tensor_parallel} GPUs "
                "(--tensor-parallel). Leave num_gpus out."
            )
    return options
