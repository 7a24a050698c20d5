"""The class that TensorRT-LLM mixes into its workers (``ray_worker_extension_cls``); it can be imported only where that is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trtl_rl.engines.tensorrt_llm.imports import load
from trtl_rl.engines.tensorrt_llm.worker import RefitWorker

if TYPE_CHECKING:
    _Base: Any = object
else:
    _Base = load().items["WorkerExtension"]


class RefitExtension(RefitWorker, _Base):  # type: ignore[misc]
    """Our refit beside TensorRT-LLM's own extension, whose ``wait_for_engine_idle`` pausing needs."""
