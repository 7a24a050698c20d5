"""The only place that knows where TensorRT-LLM keeps things. Loaded in the engine's process and its workers alone."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trtl_rl.engines.tensorrt_llm.versions import INSTALL, check_version
from trtl_rl.errors import UserError

# Each thing where newer versions keep it, then where older ones did.
_PLACES = {
    "AsyncLLM": ("tensorrt_llm", "tensorrt_llm._torch.async_llm"),
    "SamplingParams": ("tensorrt_llm", "tensorrt_llm.sampling_params"),
    "KvCacheConfig": ("tensorrt_llm.llmapi",),
    "CudaGraphConfig": ("tensorrt_llm.llmapi",),
    "WorkerExtension": ("tensorrt_llm.llmapi.rlhf_utils",),
}
_OPTIONAL = {
    "SleepConfig": ("tensorrt_llm.llmapi.llm_args",),
    "SchedulerConfig": ("tensorrt_llm.llmapi",),
    "LogprobMode": ("tensorrt_llm.sampling_params",),
}
_PARTS = {
    "kv_cache_config": "KvCacheConfig",
    "cuda_graph_config": "CudaGraphConfig",
    "scheduler_config": "SchedulerConfig",
    "sleep_config": "SleepConfig",
}


@dataclass(frozen=True)
class TensorrtLlm:
    """What is used of TensorRT-LLM."""

    version: str
    items: Mapping[str, Any]

    def llm(self, arguments: Mapping[str, Any]) -> Any:
        """``AsyncLLM(**arguments)``, with plain dicts turned into the classes that it wants; not yet set up."""
        built = dict(arguments)
        for name, kind in _PARTS.items():
            if isinstance(built.get(name), Mapping):
                if kind not in self.items:
                    raise UserError(f"engine.arguments.{name}: TensorRT-LLM {self.version} has no {kind}.")
                built[name] = self.items[kind](**built[name])
        return self.items["AsyncLLM"](**built)

    def sampling(self, arguments: Mapping[str, Any]) -> Any:
        """``SamplingParams(**arguments)``."""
        built = dict(arguments)
        if "logprobs_mode" in built and "LogprobMode" in self.items:
            built["logprobs_mode"] = self.items["LogprobMode"](built["logprobs_mode"])
        return self.items["SamplingParams"](**built)

    @property
    def sampling_fields(self) -> list[str]:
        """What ``SamplingParams`` of this version knows."""
        import inspect

        return list(inspect.signature(self.items["SamplingParams"]).parameters)

    @property
    def salts(self) -> bool:
        """Whether a request can name the cache that it may reuse."""
        import inspect

        return "cache_salt" in inspect.signature(self.items["AsyncLLM"].__mro__[1].generate_async).parameters or (
            "cache_salt" in inspect.signature(self.items["AsyncLLM"].generate_async).parameters
        )


def load() -> TensorrtLlm:
    """Import TensorRT-LLM.

    Raises:
        UserError: it is absent, of another version, or cannot be imported here, for example without a GPU.
    """
    try:
        package = importlib.import_module("tensorrt_llm")
    except ModuleNotFoundError as error:
        if error.name == "tensorrt_llm":
            raise UserError(f"There is no TensorRT-LLM in the engine's environment: {INSTALL}") from None
        raise UserError(f"TensorRT-LLM cannot be imported: {error}. Install it anew: {INSTALL}") from None
    except (ImportError, RuntimeError, OSError) as error:  # what it raises without a GPU or a driver
        raise UserError(
            f"TensorRT-LLM cannot be imported on this machine: {_first_line(error)}. It needs an NVIDIA GPU with its driver, and "
            f"the packages that its installation brings: {INSTALL}"
        ) from None
    check_version(package.__version__)
    items = {name: _find(name, places) for name, places in _PLACES.items()}
    for name, places in _OPTIONAL.items():
        found = _look(name, places)
        if found is not None:
            items[name] = found
    return TensorrtLlm(str(package.__version__), items)


def _find(name: str, places: tuple[str, ...]) -> Any:
    found = _look(name, places)
    if found is None:
        raise UserError(f"This TensorRT-LLM has no {name} in {' or '.join(places)}, where it is looked for. {INSTALL}")
    return found


def _look(name: str, places: tuple[str, ...]) -> Any:
    for place in places:
        try:
            return getattr(importlib.import_module(place), name)
        except (ImportError, AttributeError):
            continue
    return None


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
