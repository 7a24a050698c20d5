"""The self-check of units: rows must not see each other, and compiled code must agree with eager code.

Parity rests on both, and neither is promised by a compiler or a BLAS: so every package is run on random inputs before its first
use on a machine. Who passed is remembered by the package's bytes, the processor, torch and the number of threads.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import xxhash

from trtl_rl.errors import EngineError
from trtl_rl.kernels import ops, units
from trtl_rl.kernels.eager import Run, as_bytes, eager
from trtl_rl.kernels.spec import KEY_TILE, TOKEN_TILE

CHECKED_ROWS = (8, 24, 32, 64, 128)  # the self-check cuts 256 rows into calls of these


def check(unit: type[units.Unit], kind: Any, run: Run, device: torch.device, compiled: bool) -> None:
    """Run a unit on random inputs.

    Raises:
        EngineError: rows depend on their company, or the compiled unit computes other values than the eager one.
    """
    if unit is units.Attention:
        _check_attention(kind, run, device)
    elif unit in (units.TokenLogprob, units.Sample):
        _check_logits(unit, kind, run, device)
    else:
        _check_rows(unit, kind, run, device, compiled)


class PassedChecks:
    """Which packages passed on this machine, as empty files.

    Args:
        directory: Where they are kept.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def has(self, package: Path) -> bool:
        """Whether this very package passed, with this processor, torch and number of threads."""
        return self._file(package).exists()

    def add(self, package: Path) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        self._file(package).touch()

    def _file(self, package: Path) -> Path:
        about = (
            f"{torch.__version__} {processor()} {torch.get_num_threads()} {os.environ.get('ONEDNN_MAX_CPU_ISA', '')}"
        )
        return self._directory / xxhash.xxh3_128_hexdigest(package.read_bytes() + about.encode())


def processor() -> str:
    """The processor's name and features; what ``-march=native`` and libraries choose by."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        import platform

        return platform.processor()
    return " ".join(dict.fromkeys(line for line in lines if line.startswith(("model name", "flags", "Features"))))


def _check_rows(unit: type[units.Unit], kind: Any, run: Run, device: torch.device, compiled: bool) -> None:
    """Run a unit on random inputs: compiled code must agree with eager code, and rows must not see each other."""
    example = unit(kind).example()
    generator = torch.Generator().manual_seed(1)
    backward = unit in (units.BeforeAttentionBackward, units.AfterAttentionBackward)
    rows_checked = 2 * TOKEN_TILE if backward else sum(CHECKED_ROWS)
    wide = []
    for tensor, dynamic in zip(example.inputs, example.dynamic, strict=True):
        shape = [rows_checked, *tensor.shape[1:]] if dynamic else list(tensor.shape)
        scale = 1.0 if dynamic or tensor.dim() < 2 else tensor.shape[1] ** -0.5
        wide.append((torch.randn(shape, generator=generator) * scale).to(device, tensor.dtype))
    with torch.inference_mode():
        whole = run(wide)
        # Last bits differ, and FP8 turns some of them into whole steps of the grid; wrong code is far off.
        expected = eager(unit, kind)(wide) if compiled else whole
        correct = all(
            (a.float() - b.float()).abs().mean() <= 0.02 * b.float().abs().mean() + 1e-6
            for a, b in zip(whole, expected, strict=True)
        )
        invariant = True
        if not backward:
            pairs = list(zip(wide, example.dynamic, strict=True))
            packed = [x if d or x.dim() < 2 else ops.pack(x) for x, d in pairs]
            for rows in torch.randperm(rows_checked, generator=generator).split(CHECKED_ROWS):
                for weights in (wide, packed):
                    part = run([x[rows] if d else w for (x, d), w in zip(pairs, weights, strict=True)])
                    invariant &= all(
                        torch.equal(as_bytes(a)[rows], as_bytes(b)) for a, b in zip(whole, part, strict=True)
                    )
    _require(unit, invariant, correct)


def _check_attention(kind: Any, run: Run, device: torch.device) -> None:
    """A row's bits must not depend on its company, on the capacity of the buffers or on how many keys are visited."""
    generator = torch.Generator().manual_seed(1)
    slots, length, m = 4, 4 * KEY_TILE, 64
    q = torch.randn(m, kind.heads, kind.head_dim, generator=generator)
    keys = torch.randn(slots, kind.kv_heads, length // KEY_TILE, kind.head_dim, KEY_TILE, generator=generator)
    values = torch.randn(slots, kind.kv_heads, length, kind.head_dim, generator=generator)
    sequence = torch.randint(slots, (m,), generator=generator)
    position = torch.randint(2 * KEY_TILE, (m,), generator=generator)
    keys, values = keys.to(kind.key_value_dtype), values.to(kind.key_value_dtype)
    q, keys, values, sequence, position = (x.to(device) for x in (q, keys, values, sequence, position))
    with torch.inference_mode():
        window = torch.arange(length, device=device)
        (whole,) = run([q, keys, values, sequence, position, window])
        rows = torch.randperm(m, generator=generator)[: m // 2]
        short = [x.contiguous() for x in (keys[:, :, :3], values[:, :, : 3 * KEY_TILE])]
        (part,) = run([q[rows], *short, sequence[rows], position[rows], window[: 2 * KEY_TILE]])
        expected = ops.attention_by_tiles(q, keys, values, sequence, position, window)
    _require(units.Attention, torch.equal(whole[rows], part), torch.allclose(whole, expected, atol=1e-4, rtol=1e-4))


def _check_logits(unit: type[units.Unit], kind: Any, run: Run, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(1)
    m = 64
    logits = torch.randn(m, kind.vocab, generator=generator)
    temperature = torch.rand(m, generator=generator) + 0.5
    if unit is units.TokenLogprob:
        wide = [logits, torch.randint(kind.vocab, (m,), generator=generator), temperature]
    else:
        uniform = torch.rand(m, generator=generator, dtype=torch.float64)
        wide = [logits, temperature, uniform, torch.arange(m) % 4 == 0]
    rows = torch.randperm(m, generator=generator)[: m // 2].to(device)
    wide = [x.to(device) for x in wide]
    with torch.inference_mode():
        whole, part = run(wide), run([x[rows] for x in wide])
        expected = eager(unit, kind)(wide)
    same = all(torch.equal(a[rows], b) for a, b in zip(whole, part, strict=True))
    # A sum's last bit may turn a draw into its neighbour.
    close = all(
        bool((torch.isclose(a, b, atol=1e-4, rtol=1e-4) | (a.dtype == torch.int64)).all())
        and float((a != b).float().mean()) * (a.dtype == torch.int64) <= 0.05
        for a, b in zip(whole, expected, strict=True)
    )
    _require(unit, same, close)


def _require(unit: type[units.Unit], invariant: bool, correct: bool) -> None:
    if not correct:
        raise EngineError(
            f"The compiled {unit.__name__} computes other values than the eager one: the compiler of this torch is at "
            "fault. Run with compile=false, and report it with the output of `trtl-rl env`."
        )
    if not invariant:
        raise EngineError(
            f"{unit.__name__} is not row-invariant on this machine: a row's bits depend on the batch. Use one thread "
            "(threads=1 engine.threads=1); if that does not help, compile=false."
        )
