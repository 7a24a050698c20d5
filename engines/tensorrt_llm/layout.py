"""Where a checkpoint's tensor lies in TensorRT-LLM's modules, and which part of it a rank holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trtl_rl.errors import RefitError
from trtl_rl.model.weights import SCALE_SUFFIX
from trtl_rl.refit.validate import BLOCK, FUSED

_ATTRIBUTES = {"weight": "weight", f"weight{SCALE_SUFFIX}": "weight_scale", "bias": "bias"}


def modules_of(model: Any) -> dict[str, Any]:
    """Modules by their names without the wrappers of torch.compile."""
    return {name.replace("_orig_mod.", ""): module for name, module in model.named_modules()}


def module_of(modules: Mapping[str, Any], name: str) -> tuple[Any, int | None]:
    """The module that computes the linear ``name``, and which part of it that is where it is fused.

    Raises:
        RefitError: this version of TensorRT-LLM names its modules otherwise.
    """
    if name in modules:
        return modules[name], None
    parent, _, role = name.rpartition(".")
    for fused, roles in FUSED.items():
        if role in roles and f"{parent}.{fused}" in modules:
            return modules[f"{parent}.{fused}"], roles.index(role)
    raise RefitError(
        f"{name}: there is no such module, fused or not, in this version of TensorRT-LLM: what it holds is unknown."
    )


def held_part(modules: Mapping[str, Any], name: str, sizes: Mapping[str, int], ranks: int) -> Tensor:
    """What this rank holds of the tensor ``name``: a view of the module's parameter.

    Args:
        sizes: Rows of every linear of the model, by name: where one part ends and the next begins.

    Raises:
        RefitError: it is nowhere to be found.
    """
    owner, _, leaf = name.rpartition(".")
    module, part = module_of(modules, owner)
    parameter = getattr(module, _ATTRIBUTES[leaf], None)
    if parameter is None:
        raise RefitError(
            f"{name}: its module has no {_ATTRIBUTES[leaf]}: it does not run in the format that was announced."
        )
    tensor: Tensor = parameter.detach()
    if part is None:
        return tensor
    parent = owner.rpartition(".")[0]
    roles = next(roles for roles in FUSED.values() if owner.rpartition(".")[2] in roles)
    rows = [sizes[f"{parent}.{role}"] // ranks for role in roles]
    start, size = sum(rows[:part]), rows[part]
    if leaf.endswith(SCALE_SUFFIX):
        start, size = start // BLOCK, -(-size // BLOCK)
    return tensor[start : start + size]


def own_part(whole: Tensor, held: Tensor, rank: int) -> Tensor:
    """The part of a checkpoint's tensor that ``rank`` should hold, as the shape of what it ``held`` tells.

    The last rank's part of a vocabulary may be filled up: then ``held`` has more rows than there are.
    """
    for dimension in range(whole.dim()):
        size = held.shape[dimension]
        if size != whole.shape[dimension]:
            start = rank * size
            return whole.narrow(dimension, start, min(size, whole.shape[dimension] - start))
    return whole


def same_bytes(held: Tensor, sent: Tensor) -> bool:
    """Whether what is held is what was sent, bit for bit; rows beyond what was sent do not count."""
    if held.dtype != sent.dtype or held.dim() != sent.dim():
        return False
    for dimension, size in enumerate(sent.shape):
        if held.shape[dimension] < size:
            return False
        held = held.narrow(dimension, 0, size)
    here = held.contiguous().cpu().view(torch.uint8)
    return torch.equal(here, sent.contiguous().cpu().view(torch.uint8))
