"""Low-rank adapters that ``peft`` wrapped around a model's linears, read as plain values.

``peft`` keeps the adapters' parameters and their checkpoints; the kernels compute them. A wrapped linear is named as before:
``model.layers.0.mlp.up_proj`` stands for peft's ``model.layers.0.mlp.up_proj.base_layer``.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from trtl_rl.errors import UserError
from trtl_rl.model.description import LINEARS, Adapter


def without_wrapper(model: Any) -> Any:
    """The Hugging Face model inside a ``PeftModel``, adapters included; any other model as it is."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def base_linear(module: Any) -> nn.Linear:
    """The linear inside an adapted one."""
    linear: nn.Linear = getattr(module, "base_layer", module)
    return linear


def read_adapters(model: nn.Module) -> tuple[Adapter, ...]:
    """Every adapter of ``model``, in name order.

    Raises:
        UserError: an adapter that the kernels do not compute, or parameters that are trained beside adapters.
    """
    found = []
    for name, module in model.named_modules():
        if not hasattr(module, "base_layer"):
            continue
        if name.rpartition(".")[2] not in LINEARS or not hasattr(module, "lora_A"):
            raise UserError(
                f"{name} is wrapped by {type(module).__name__}; the kernels compute LoRA adapters of {', '.join(LINEARS)} only."
            )
        key = _active(name, module)
        found.append(Adapter(name, int(module.r[key]), float(module.scaling[key])))
    if found:
        trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        others = [name for name in trained if ".lora_A." not in name and ".lora_B." not in name]
        if others:
            raise UserError(
                f"{others[0]} would be trained beside adapters (modules_to_save?): with adapters all else is frozen."
            )
    return tuple(sorted(found, key=lambda adapter: adapter.name))


def masters(model: nn.Module) -> dict[str, Tensor]:
    """The model's parameters by their names in checkpoints: of a wrapped linear as if it were bare, of its active adapter
    ``<linear>.lora_A.weight`` and ``<linear>.lora_B.weight``."""
    out: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        for kind in (".lora_A.", ".lora_B."):
            linear, found, rest = name.partition(kind)
            if found:
                if rest.removesuffix(".weight") in _active_names(model.get_submodule(linear)):
                    out[f"{linear}{kind}weight"] = parameter
                break
        else:
            out[name.replace(".base_layer.", ".")] = parameter
    return out


def _active_names(module: Any) -> list[str]:
    return [key for key in module.active_adapters if key in module.lora_A]


def _active(name: str, module: Any) -> str:
    """The name of the one active adapter of a wrapped linear."""
    active = _active_names(module)
    problem = None
    if module.merged or module.disable_adapters:
        problem = "is merged or disabled: unmerge and enable it"
    elif len(active) != 1:
        problem = f"has {len(active)} active adapters: set one with set_adapter"
    elif not isinstance(module.lora_dropout[active[0]], nn.Identity):
        problem = "has dropout, which would differ between rollout and training: set lora_dropout=0"
    elif active[0] in (getattr(module, "lora_variant", None) or {}) or (getattr(module, "use_dora", None) or {}).get(
        active[0]
    ):
        problem = "is a variant of LoRA (DoRA and others) that the kernels do not compute: use plain LoRA"
    elif module.lora_B[active[0]].bias is not None:
        problem = "has a bias in lora_B: set lora_bias=False"
    if problem:
        raise UserError(f"The adapter of {name} {problem}.")
    return active[0]
