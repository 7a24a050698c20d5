"""Which engine a child runs: the embedded one, or TensorRT-LLM."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from trtl_rl.errors import EngineError

if TYPE_CHECKING:
    from trtl_rl.kernels.kernel_set import KernelSet

Backend = Literal["torch", "tensorrt-llm"]


@dataclass(frozen=True)
class Made:
    """An engine, its operators if they are ours, and what it is, as plain values."""

    engine: Any
    kernels: KernelSet | None
    about: dict[str, Any]


def make_engine(
    backend: Backend,
    description: dict[str, Any],
    *,
    kernels: str,
    compiled: bool,
    packages: str | None,
    device: str,
    fault: str | None,
    other_operators: bool,
    serving: dict[str, Any] | None,
    slots: int,
    context: int,
    stop_ids: list[int],
    positions: int | None = None,
) -> Made:
    """Build an engine in this process; ``HostedEngine.configure`` describes the arguments.

    Raises:
        EngineError: this environment's operators are not the trainer's, and have to be.
    """
    from trtl_rl.model.description import DecoderDescription

    decoder = DecoderDescription.from_json(description)
    if backend == "tensorrt-llm":
        from trtl_rl.engines.tensorrt_llm.engine import TensorrtLlmEngine

        assert serving is not None
        served = TensorrtLlmEngine(decoder, slots=slots, context=context, stop_ids=stop_ids, **serving)
        made = Made(served, None, served.about())
    else:
        made = _embedded(
            decoder,
            _operators(kernels, compiled, packages, device, other_operators),
            slots=slots,
            context=context,
            positions=positions,
            stop_ids=stop_ids,
        )
    if fault is None:
        return made
    from trtl_rl.engines.faulty import Fault, FaultyEngine

    return Made(FaultyEngine(made.engine, Fault.parse(fault), own_process=True), made.kernels, made.about)


def _embedded(decoder: Any, operators: KernelSet, **sizes: Any) -> Made:
    import torch

    from trtl_rl.engines.torch_engine.engine import TorchEngine

    about = {"backend": "torch", "torch": torch.__version__, "operators": operators.identity}
    return Made(TorchEngine(decoder, operators, **sizes), operators, about)


def _operators(kernels: str, compiled: bool, packages: str | None, device: str, other_operators: bool) -> KernelSet:
    """The trainer's operators, as the cache or ``packages`` has them; or, where that is allowed, this environment's own."""
    import torch

    from trtl_rl.kernels.kernel_set import KernelSet

    place = None if packages is None else Path(packages)
    own = KernelSet(compiled, build=False, packages=place, device=device)
    if own.identity == kernels:
        return own
    if not other_operators:
        raise EngineError(
            f"Trainer and engine would run different operators ({kernels[:12]} and {own.identity[:12]}): the two "
            f"Python environments differ in torch (the engine's is {torch.__version__}), Python or compiler, so logprobs would "
            "differ in their last bits and more. Exactness needs one environment; with parity.stop=null, or a bound above 0, the "
            "run goes on and measures the difference.",
            repeats=True,
        )
    return KernelSet(compiled, build=True, device=device)  # compiled here, and kept in the cache under its own identity
