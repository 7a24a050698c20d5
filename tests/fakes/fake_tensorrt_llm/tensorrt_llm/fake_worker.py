"""A worker of the FAKE: fused modules of one rank, the silent loader, and the executor's control actions."""

from __future__ import annotations

import contextlib
import importlib
import math
import os
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

BLOCK = 128
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def variant(name: str) -> int:
    """Whether a variant was chosen, or its number."""
    for part in os.environ.get("FAKE_TENSORRT_LLM", "").split(","):
        word, _, number = part.partition(":")
        if word == name:
            return int(number or 1)
    return 0


class FP8BlockScalesLinearMethod: ...


class UnquantizedLinearMethod: ...


class Part(nn.Module):
    """A linear, a norm or an embedding: rows of ``sources``, one above the other, and the columns of this rank."""

    def __init__(
        self, sources: dict[str, int], shape: tuple[int, ...], fp8: bool, bias: bool, divided: int | None
    ) -> None:
        super().__init__()
        self.sources, self.divided = sources, divided
        self.quant_method = FP8BlockScalesLinearMethod() if fp8 else UnquantizedLinearMethod()
        dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16
        self.weight = nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)
        if fp8:
            grid = [math.ceil(size / BLOCK) for size in shape]
            self.weight_scale = nn.Parameter(torch.ones(grid), requires_grad=False)
        if bias:
            self.bias = nn.Parameter(torch.zeros(shape[0], dtype=torch.bfloat16), requires_grad=False)

    def pre_reload_weights(self) -> None:
        """The original registers its parameters anew here where they were laid out otherwise."""
        if variant("moves"):
            self.weight = nn.Parameter(self.weight.data.view(torch.uint8).clone().view(self.weight.dtype), False)


class FakeModel(nn.Module):
    """The modules of one rank, under the names of the original."""

    def __init__(self, description: Any, rank: int, ranks: int) -> None:
        super().__init__()
        d = description
        self.model_config = SimpleNamespace(mapping=SimpleNamespace(tp_rank=rank, tp_size=ranks))
        linears = {item.name: item for item in d.coverage.linears}

        def put(path: str, part: Part) -> None:
            *parents, leaf = path.split(".")
            place: nn.Module = self
            for name in parents:
                if name not in dict(place.named_children()):
                    place.add_module(name, nn.Module())
                place = place.get_submodule(name)
            place.add_module(leaf, part)

        def linear(path: str, names: list[str], divided: int | None) -> None:
            first = linears[names[0]]
            rows = {name: linears[name].shape[0] // (ranks if divided == 0 else 1) for name in names}
            columns = first.shape[1] // (ranks if divided == 1 else 1)
            fp8 = first.format.forward_weight is not None
            bias = names[0].rpartition(".")[2] in d.biases
            put(path, Part(rows, (sum(rows.values()), columns), fp8, bias, divided))

        def vector(path: str, size: int) -> None:
            put(path, Part({path: size}, (size,), False, False, None))

        put("model.embed_tokens", Part({"model.embed_tokens": d.vocab}, (d.vocab, d.hidden), False, False, None))
        vector("model.norm", d.hidden)
        for i in range(d.layers):
            at = f"model.layers.{i}"
            for name in ("input_layernorm", "post_attention_layernorm"):
                vector(f"{at}.{name}", d.hidden)
            if d.qk_norm:
                for name in ("q_norm", "k_norm"):
                    vector(f"{at}.self_attn.{name}", d.head_dim)
            for block, fused in (("self_attn", "qkv_proj"), ("mlp", "gate_up_proj")):
                linear(f"{at}.{block}.{fused}", [f"{at}.{block}.{role}" for role in FUSED[fused]], 0)
            linear(f"{at}.self_attn.o_proj", [f"{at}.self_attn.o_proj"], 1)
            linear(f"{at}.mlp.down_proj", [f"{at}.mlp.down_proj"], 1)
        if not d.tied:
            linear("lm_head", ["lm_head"], None)


class OldLoader:
    """``reload`` as it is: what has no home is left out, what is missing stays as it was, all else is cast and broadcast."""

    def __init__(self) -> None:
        self.sweeps = self.calls = 0
        self.open = False

    def reload(self, model: FakeModel, weights: Mapping[str, Tensor], allow_partial_loading: bool = False) -> None:
        assert allow_partial_loading
        if not self.open:
            self.open, self.sweeps = True, self.sweeps + 1
        weights = dict(weights)
        self.calls += 1
        if self.sweeps == variant("forget"):
            weights.pop("model.layers.1.self_attn.k_proj.weight", None)
        if any(".layers.1." in name for name in weights) and (
            self.sweeps == variant("raise") or (variant("stuck") and self.sweeps >= variant("stuck"))
        ):
            raise RuntimeError("FAKE: out of memory")
        mapping = model.model_config.mapping
        for module in model.modules():
            if not isinstance(module, Part):
                continue
            start = 0
            for source, rows in module.sources.items():
                for leaf, attribute, unit in (
                    ("weight", "weight", 1),
                    ("weight_scale_inv", "weight_scale", BLOCK),
                    ("weight_scale", "weight_scale", BLOCK),
                    ("bias", "bias", 1),
                ):
                    value = weights.get(f"{source}.{leaf}")
                    target = getattr(module, attribute, None)
                    if value is None or target is None:
                        continue
                    if module.divided is not None and value.dim() > module.divided and mapping.tp_size > 1:
                        size = value.shape[module.divided] // mapping.tp_size
                        value = value.narrow(module.divided, mapping.tp_rank * size, size)
                    first = math.ceil(start / unit)
                    room = target.data[first : first + math.ceil(rows / unit)]
                    room.copy_(value.to(target.dtype))  # broadcasts
                start += rows


class Loader(OldLoader):
    """With the hooks of newer versions."""

    def __init__(self) -> None:
        super().__init__()
        self.hooks: list[str] = []

    def begin_update_weights(self) -> None:
        self.open = False
        self.hooks.append("begin")

    def finalize_update_weights(self) -> None:
        self.hooks.append("finalise")

    def abort_update_weights(self) -> None:
        self.open = False
        self.hooks.append("abort")


class FakeExecutor:
    """A rank's PyExecutor: its modules, and the right to stop all others' steps."""

    def __init__(self, description: Any, rank: int, ranks: int, shared: Any) -> None:
        loader = OldLoader() if variant("old") else Loader()
        self.model_engine = SimpleNamespace(model=FakeModel(description, rank, ranks), model_loader=loader)
        self.prefix_cache_resets = 0
        self._shared = shared
        if variant("old"):
            self.control_action = self._always_drain  # type: ignore[method-assign]

    @contextlib.contextmanager
    def control_action(self, drain: bool = True) -> Iterator[None]:
        with self._shared.stopped(drain):
            yield

    @contextlib.contextmanager
    def _always_drain(self) -> Iterator[None]:
        with self._shared.stopped(True):
            yield

    def reset_prefix_cache(self) -> None:
        self.prefix_cache_resets += 1

    def finalised(self) -> None:
        """The modules hold a version: compute with it from now on."""
        if not variant("old"):
            self.model_engine.model_loader.finalize_update_weights()
        self.model_engine.model_loader.open = False
        self._shared.take_weights()


def make_worker(extension: str, description: Any, rank: int, ranks: int, shared: Any) -> Any:
    """A worker with the extension's methods; a name that both have is refused, as the original does."""

    class FakeRayWorker:
        def __init__(self) -> None:
            self.device_id, self.rank = rank, rank
            self.engine = FakeExecutor(description, rank, ranks, shared)

        def shutdown(self) -> None: ...

        def fake_state(self) -> dict[str, Any]:
            loader = self.engine.model_engine.model_loader
            hooks = getattr(loader, "hooks", [])
            return {"resets": self.engine.prefix_cache_resets, "sweeps": loader.sweeps, "hooks": list(hooks)}

    module, _, name = extension.rpartition(".")
    mixin: Any = getattr(importlib.import_module(module), name)
    for attribute in dir(mixin):
        if not attribute.startswith("__") and hasattr(FakeRayWorker, attribute):
            raise ValueError(f"FAKE: Worker class already defines '{attribute}'")
    make: Callable[..., Any] = type(
        f"FakeRayWorkerWith{name}", (FakeRayWorker, mixin), {"finalize_weight_update": _finalise}
    )
    return make()


def _finalise(self: Any) -> None:
    self.engine.finalised()
