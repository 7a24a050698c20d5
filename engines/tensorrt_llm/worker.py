"""What runs inside TensorRT-LLM's workers: takes a version as a whole, loads it into the modules, and reads it back.

A version is staged in the host's memory, where changes to the version before are expanded, and checked there against its
manifest. Only then are modules touched, within one control action of the executor: no token is computed meanwhile. After each
layer the parameters are read back and compared with what was sent, bit for bit, before ``post_load_weights`` may lay them
out anew (Blackwell). The version before stays in the host's memory until all ranks have the new one: see ``refit.py``.

Each rank keeps one version on the host, and two during a refit.
"""

from __future__ import annotations

import contextlib
import functools
import io
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from trtl_rl.engines.tensorrt_llm.layout import held_part, module_of, modules_of, own_part, same_bytes
from trtl_rl.errors import RefitError
from trtl_rl.model.description import DecoderDescription
from trtl_rl.model.weights import tensor_specs
from trtl_rl.refit.channel import Receiver
from trtl_rl.refit.manifest import Manifest
from trtl_rl.refit.receiver import RefitReceiver

LifeCycle = Literal["transaction", "update_weights"]
_LATCH = "first_pre_reload_weights"  # by which update_weights knows that a refit has begun


def _answer(method: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    """Errors as plain values: exceptions of a worker would arrive wrapped, and on some ranks only."""

    @functools.wraps(method)
    def answered(self: RefitWorker, *args: Any) -> dict[str, Any]:
        try:
            return {"result": method(self, *args)}
        except Exception as error:
            return {"error": f"{error}" if isinstance(error, RefitError) else f"{type(error).__name__}: {error}"}

    return answered


class RefitWorker:
    """Methods for ``AsyncLLM.collective_rpc``. A mixin: TensorRT-LLM's worker has ``engine`` and ``device_id``.

    Every method returns ``{"result": ...}`` or ``{"error": text}``.
    """

    engine: Any
    device_id: int

    @_answer
    def trtl_open(self, description: dict[str, Any], graphs: bool) -> dict[str, Any]:
        """Begin; returns what this worker is.

        Args:
            graphs: Whether CUDA graphs are captured, so that parameters must stay where they are.
        """
        self._trtl = _State(self, DecoderDescription.from_json(description), graphs)
        return self._trtl.about()

    @_answer
    def trtl_begin(self, manifest: dict[str, Any]) -> bool:
        """Announce a version; returns whether changes to its base will do."""
        return self._trtl.receiver.begin(Manifest.from_json(manifest))

    @_answer
    def trtl_write(self, bucket: dict[str, Any]) -> None:
        """Copy a bucket that a channel has packed."""
        self._trtl.receiver.write(self._trtl.channel.receive(bucket))

    @_answer
    def trtl_check(self) -> None:
        """Refuse a version that is not whole."""
        self._trtl.receiver.check()

    @_answer
    def trtl_load(self, drain: bool) -> dict[str, Any]:
        """Load what has arrived into the modules, and read it back; returns digest and growth of memory.

        Args:
            drain: Wait until nothing is generated; otherwise load between two steps.
        """
        return self._trtl.load_arrived(drain)

    @_answer
    def trtl_commit(self) -> None:
        """All ranks have the new version: forget the one before."""
        self._trtl.receiver.finish()

    @_answer
    def trtl_restore(self) -> int:
        """Load the version before again; returns which that is, or raises when there is none."""
        return self._trtl.restore()

    @_answer
    def trtl_abort(self) -> None:
        """Forget what has arrived."""
        self._trtl.receiver.abort()

    @_answer
    def trtl_adopt(self, directory: str) -> dict[str, Any]:
        """Take the checkpoint that the engine was loaded from as version 0, and compare the modules with it."""
        return self._trtl.adopt(directory)

    @_answer
    def trtl_coverage(self) -> list[list[str]]:
        """Name, dtype of the weight and quantisation method of every linear that runs here."""
        return self._trtl.coverage()

    @_answer
    def trtl_quantise(self, seed: int, rows: int, columns: int) -> dict[str, Any]:
        """Codes (as bytes, in hex) and scales [rows, blocks] of the 1×128 quantiser of activations for random bfloat16 values."""
        return _quantise(seed, rows, columns)


class _State:
    """A worker's side of refits."""

    def __init__(self, worker: RefitWorker, description: DecoderDescription, graphs: bool) -> None:
        self.worker, self.description, self.graphs = worker, description, graphs
        self.receiver = RefitReceiver(tensor_specs(description), description.coverage.digest)
        self.channel = Receiver(io.BytesIO())  # a stream ends in the driver, which hands on shared memory
        mapping = self.model.model_config.mapping
        self.rank, self.ranks = int(mapping.tp_rank), int(mapping.tp_size)
        self.life_cycle = self._life_cycle()
        self._sizes = {linear.name: linear.shape[0] for linear in description.coverage.linears}

    @property
    def model(self) -> Any:
        return self.worker.engine.model_engine.model

    @property
    def loader(self) -> Any:
        return self.worker.engine.model_engine.model_loader

    def about(self) -> dict[str, Any]:
        on_gpu = torch.cuda.is_available()
        return {
            "rank": self.rank,
            "ranks": self.ranks,
            "life_cycle": self.life_cycle,
            "in_flight": self._can_load_in_flight(),
            "torch": torch.__version__,
            "capability": list(torch.cuda.get_device_capability(self.worker.device_id)) if on_gpu else None,
            "device": torch.cuda.get_device_name(self.worker.device_id) if on_gpu else "no GPU",
        }

    def load_arrived(self, drain: bool) -> dict[str, Any]:
        tensors, manifest = self.receiver.check()
        before = self._memory()
        self._load(tensors, drain)
        after = self._memory()
        return {
            "digest": manifest.digest,
            "version": manifest.version,
            "memory": after,
            "memory_growth": after - before,
        }

    def restore(self) -> int:
        self.receiver.abort()
        if not self.receiver.generates:
            raise RefitError("there is no version before this one")
        self._load(self.receiver.held, drain=True)
        return self.receiver.version

    def adopt(self, directory: str) -> dict[str, Any]:
        from trtl_rl.engines.directory import EngineDirectory

        tensors = EngineDirectory.open(directory).tensors()
        manifest = Manifest.of(tensors, 0, self.description.coverage.digest)
        self.receiver.begin(manifest)
        from trtl_rl.refit.manifest import Bucket

        self.receiver.write(Bucket(tensors))
        self.receiver.check()
        self.receiver.finish()
        relaid = torch.cuda.is_available() and torch.cuda.get_device_capability(self.worker.device_id)[0] >= 10
        if not relaid:
            self._read_back(tensors)
        return {"digest": manifest.digest, "compared": not relaid}

    def coverage(self) -> list[list[str]]:
        modules = modules_of(self.model)
        rows = []
        for linear in self.description.coverage.linears:
            if linear.name == "lm_head" and self.description.tied and linear.name not in modules:
                module = modules["model.embed_tokens"]
            else:
                module, _ = module_of(modules, linear.name)
            method = type(getattr(module, "quant_method", None)).__name__
            rows.append([linear.name, str(module.weight.dtype).removeprefix("torch."), method])
        return rows

    def _load(self, tensors: Mapping[str, Tensor], drain: bool) -> None:
        """One sweep over the whole model. Raises RefitError, or what TensorRT-LLM raised; then the modules hold a mixture."""
        with self._control(drain):
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # a step that was scheduled before may still be running
            self._around("unwrap_compiled_model_for_refit")
            places = self._places()
            try:
                self._reload(tensors)
                if self.life_cycle == "transaction":
                    self._finalise()
                    self.worker.engine.reset_prefix_cache()
            except BaseException:
                self._give_up()
                raise
            finally:
                self._around("restore_compiled_model_after_refit", self.worker.engine)
            if self.graphs and self._places() != places:
                raise RefitError(
                    "parameters have moved while CUDA graphs were captured, which read the old ones (TensorRT-LLM #10456). Set "
                    "engine.arguments={cuda_graph_config: null}."
                )
        if self.life_cycle == "update_weights":
            update: Any = self.worker
            update.update_weights(None)  # finalises and resets the prefix cache, in a control action of its own

    def _reload(self, tensors: Mapping[str, Tensor]) -> None:
        """Load and read back, one layer at a time: parts of a fused module come together."""
        if self.life_cycle == "transaction":
            self.loader.begin_update_weights()
        elif not hasattr(self.model, _LATCH):
            setattr(self.model, _LATCH, True)
        for module in self._hooked("pre_reload_weights"):
            module.pre_reload_weights()
        for group in _by_layer(tensors):
            self.loader.reload(self.model, dict(group), allow_partial_loading=True)
            self._read_back(group)

    def _read_back(self, tensors: Mapping[str, Tensor]) -> None:
        modules = modules_of(self.model)
        for name, tensor in tensors.items():
            held = held_part(modules, name, self._sizes, self.ranks)
            if not same_bytes(held, own_part(tensor, held, self.rank)):
                raise RefitError(
                    f"{name}: after loading, rank {self.rank} holds other bytes than were sent ({held.dtype} {list(held.shape)})."
                )

    def _finalise(self) -> None:
        finalise = getattr(self.worker, "finalize_weight_update", None)
        if finalise is not None:
            finalise()
            return
        self.loader.finalize_update_weights()
        for name in ("process_weights_after_loading", "post_load_weights"):
            for module in self._hooked(name):
                getattr(module, name)()

    def _give_up(self) -> None:
        """After a fault: release what the loader keeps for a refit. The modules hold a mixture until a whole sweep."""
        if self.life_cycle == "transaction":
            self.loader.abort_update_weights()
        elif hasattr(self.model, _LATCH):
            delattr(self.model, _LATCH)

    def _hooked(self, name: str) -> Iterator[Any]:
        for module in self.model.modules():
            if hasattr(module, name) and not getattr(module, "_weights_removed", False):
                yield module

    def _around(self, name: str, *engine: Any) -> None:
        """A hook of newer versions around torch.compile's wrappers, which hide modules from the loader."""
        hook = getattr(self.worker.engine.model_engine, name, None)
        if hook is not None:
            hook(*[item.resource_manager for item in engine])

    def _control(self, drain: bool) -> contextlib.AbstractContextManager[Any]:
        control: contextlib.AbstractContextManager[Any]
        if self._can_load_in_flight():
            control = self.worker.engine.control_action(drain=drain)
        else:
            control = self.worker.engine.control_action()  # always waits for what is in flight
        return control

    def _can_load_in_flight(self) -> bool:
        import inspect

        return "drain" in inspect.signature(self.worker.engine.control_action).parameters

    def _life_cycle(self) -> LifeCycle:
        hooks = ("begin_update_weights", "finalize_update_weights", "abort_update_weights")
        missing = [name for name in hooks if not callable(getattr(self.loader, name, None))]
        if not missing:
            return "transaction"
        if callable(getattr(self.worker, "update_weights", None)):
            return "update_weights"
        raise RefitError(
            f"this TensorRT-LLM cannot be refitted: its loader lacks {', '.join(missing)}, its worker update_weights"
        )

    def _places(self) -> list[int]:
        return [parameter.data_ptr() for parameter in self.model.parameters()] if self.graphs else []

    def _memory(self) -> int:
        return torch.cuda.memory_allocated(self.worker.device_id) if torch.cuda.is_available() else 0


def _by_layer(tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Tensors of one layer together, and all others."""
    groups: dict[str, dict[str, Tensor]] = {}
    for name in sorted(tensors):
        parts = name.split(".")
        key = ".".join(parts[:3]) if parts[1:2] == ["layers"] else ""
        groups.setdefault(key, {})[name] = tensors[name]
    return list(groups.values())


def _quantise(seed: int, rows: int, columns: int) -> dict[str, Any]:
    values = random_activations(seed, rows, columns)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    codes, scales = torch.ops.trtllm.fp8_quantize_1x128(values.to(device))
    blocks = -(-columns // 128)
    scales = scales.float().cpu()
    if scales.shape != (rows, blocks):  # stored by columns, rows filled up to a multiple of 4
        scales = scales.reshape(blocks, -1)[:, :rows].T
    return {
        "codes": codes[:rows].contiguous().view(torch.uint8).cpu().numpy().tobytes().hex(),
        "scales": scales.tolist(),
    }


def random_activations(seed: int, rows: int, columns: int) -> Tensor:
    """[rows, columns] bfloat16 of several magnitudes, with a block of zeros: the same on both sides."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, columns, generator=generator) * torch.exp(2 * torch.randn(rows, 1, generator=generator))
    values[0, :128] = 0
    return values.bfloat16()
