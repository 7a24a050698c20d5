"""The self-check of units finds what would break parity, and is repeated when anything that it depends on changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from trtl_rl.errors import EngineError
from trtl_rl.kernels import units
from trtl_rl.kernels.eager import Run, eager
from trtl_rl.kernels.self_check import PassedChecks, check
from trtl_rl.kernels.spec import HeadSpec, LayerSpec, LinearSpec, Part, fuse
from trtl_rl.recipe.formats import LinearFormat

PLAIN = LinearFormat()


def linears(*outs: int) -> tuple[LinearSpec, ...]:
    return fuse([Part(n, PLAIN, False) for n in outs], 16)


HEAD = HeadSpec(16, 24, 1e-6, linears(24)[0])
LAYER = LayerSpec(16, 2, 2, 8, 16, 1e-6, False, linears(16, 16, 16), linears(16)[0], linears(16, 16), linears(16)[0])
UNITS: list[tuple[type[units.Unit], LayerSpec | HeadSpec]] = [
    (units.Attention, LAYER),
    (units.BeforeAttention, LAYER),
    (units.AfterAttention, LAYER),
    (units.Head, HEAD),
    (units.TokenLogprob, HEAD),
    (units.Sample, HEAD),
]
CPU = torch.device("cpu")


def floats(run: Run, change: Callable[[torch.Tensor], torch.Tensor]) -> Run:
    """``run`` with its floating-point results changed."""

    def changed(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [change(x) if x.dtype.is_floating_point and x.itemsize > 1 else x for x in run(inputs)]

    return changed


@pytest.mark.parametrize(("unit", "kind"), UNITS)
def test_a_right_unit_passes(unit: type[units.Unit], kind: LayerSpec | HeadSpec) -> None:
    check(unit, kind, eager(unit, kind), CPU, compiled=True)


@pytest.mark.parametrize(("unit", "kind"), UNITS)
def test_rows_that_see_their_company_are_found(unit: type[units.Unit], kind: LayerSpec | HeadSpec) -> None:
    fake = floats(eager(unit, kind), lambda x: x * (1 + 2e-7 * x.shape[0]))
    with pytest.raises(EngineError, match=f"{unit.__name__} is not row-invariant"):
        check(unit, kind, fake, CPU, compiled=True)


@pytest.mark.parametrize(("unit", "kind"), UNITS)
def test_a_wrong_compilation_is_found(unit: type[units.Unit], kind: LayerSpec | HeadSpec) -> None:
    fake = floats(eager(unit, kind), lambda x: x * 1.1)
    with pytest.raises(EngineError, match=f"The compiled {unit.__name__} computes other values"):
        check(unit, kind, fake, CPU, compiled=True)


def test_another_package_or_another_number_of_threads_is_checked_again(tmp_path: Path) -> None:
    package = tmp_path / "Head-1.pt2"
    package.write_bytes(b"one")
    passed = PassedChecks(tmp_path / "checked")
    assert not passed.has(package)
    passed.add(package)
    assert PassedChecks(tmp_path / "checked").has(package)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        assert not passed.has(package)
    finally:
        torch.set_num_threads(threads)
    package.write_bytes(b"another")
    assert not passed.has(package)
