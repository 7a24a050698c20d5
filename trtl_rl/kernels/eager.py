"""Units without a compiler, and what a caller must know of any unit's inputs and outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from trtl_rl.kernels import units

Run = Callable[[Sequence[Tensor]], list[Tensor]]


def eager(unit: type[units.Unit], kind: Any) -> Run:
    """The unit as plain operators."""
    module = (units.AttentionByTiles if unit is units.Attention else unit)(kind)

    def run(inputs: Sequence[Tensor]) -> list[Tensor]:
        return list(module.forward(*inputs))

    return run


def row_inputs(unit: type[units.Unit], kind: Any) -> list[bool]:
    """Which inputs of a unit have one entry a row."""
    if unit is units.Attention:
        return [True, False, False, True, True, False]
    return [dynamic is not None for dynamic in unit(kind).example().dynamic]


def as_bytes(x: Tensor) -> Tensor:
    """``torch.equal`` and indexing take no float8."""
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x
