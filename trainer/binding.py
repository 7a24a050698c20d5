"""The learner's side of a run: the model bound to its operators."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from trtl_rl.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from trtl_rl.config import RunConfig
    from trtl_rl.engines.directory import EngineDirectory
    from trtl_rl.kernels.kernel_set import KernelSet
    from trtl_rl.metrics import MetricsWriter
    from trtl_rl.model.bind import TrainableDecoder


def bind(
    config: RunConfig, directory: EngineDirectory | None, metrics: MetricsWriter, model: PreTrainedModel, context: int
) -> tuple[TrainableDecoder, KernelSet]:
    """The model with its forward replaced by ours, and the operators that both sides will call.

    Args:
        directory: The run's engine directory, whose operators are looked into before the cache.
        context: Tokens of the longest prompt and answer.

    Raises:
        UserError: the directory holds another model, or a compiler is asked for and absent.
    """
    from trtl_rl.kernels.kernel_set import KernelSet, find_compiler
    from trtl_rl.model.bind import TrainableDecoder, describe

    if directory is not None and directory.description != replace(describe(model), adapters=()):
        raise UserError(
            f"engine.path={directory.path} was built from a model with another config.json than model={config.model}. "
            "Build an engine from this one."
        )
    if config.device == "cuda":
        return _bind_cuda(metrics, model, context)
    compiler = find_compiler()
    if config.compile and compiler is None:
        raise UserError("compile=true needs a C++ compiler (g++ or clang++, or the CXX variable), and none was found.")
    compiled = compiler is not None if config.compile is None else config.compile
    if not compiled and config.compile is None:
        metrics.message(
            "warning",
            "No C++ compiler was found: operators run eagerly on both sides, exact but several times slower.",
        )
    kernels = KernelSet(
        compiled,
        backward=True,
        packages=None if directory is None else directory.packages,
        progress=lambda text, done, total: metrics.progress(text, done, total, "units"),
    )
    decoder = TrainableDecoder(model, kernels, context)
    embedded = config.engine.backend == "torch"
    if embedded and directory is not None and directory.kernels["identity"] != kernels.identity:
        metrics.message(
            "warning",
            f"The operators in {directory.path} ({directory.kernels['description']}) are not those of this run "
            f"({kernels.description}): they were built with other versions, on another machine or with another "
            "choice of compile. The run uses its own.",
        )
    if kernels.compile_seconds:
        metrics.message(
            "info", f"Compiled the operators in {kernels.compile_seconds:.0f} s; they are kept for the next run."
        )
    return decoder, kernels


def _bind_cuda(metrics: MetricsWriter, model: PreTrainedModel, context: int) -> tuple[TrainableDecoder, KernelSet]:
    from trtl_rl.kernels.kernel_set import KernelSet
    from trtl_rl.model.bind import TrainableDecoder

    metrics.message(
        "warning",
        "On CUDA operators run eagerly and FP8 is emulated: made to be exact, not fast; never tried on a GPU.",
    )
    kernels = KernelSet(False, backward=True, device="cuda")
    on_device: Any = model.to("cuda")  # type: ignore[arg-type]
    return TrainableDecoder(on_device, kernels, context), kernels
