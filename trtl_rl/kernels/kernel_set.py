"""``KernelSet``: one implementation of all units for a run, with an identity that trainer and engine compare.

Compiled units are AOTInductor packages in a cache directory. Both processes load the same file, so they run the same
machine code; a package loads in milliseconds and its call costs a few microseconds. Without a C++ compiler the units run
eagerly: still exact, with another identity.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trtl_rl.errors import EngineError
from trtl_rl.kernels import linear, ops, spec, units
from trtl_rl.kernels.eager import Run, as_bytes, eager, row_inputs
from trtl_rl.kernels.gil_free import load_gil_free
from trtl_rl.kernels.self_check import PassedChecks, check
from trtl_rl.kernels.spec import HeadSpec, LayerSpec
from trtl_rl.recipe import codec, formats

CUDA_ROWS = 256
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class LayerUnits:
    """The units of one kind of decoder layer; the backward ones are None in an engine."""

    before: Run
    attention: Run
    after: Run
    before_backward: Run | None = None
    after_backward: Run | None = None


@dataclass(frozen=True)
class HeadUnits:
    """The units after the last layer: final norm with head, logprobs, and drawing tokens."""

    head: Run
    logprob: Run
    sample: Run


def cache_directory() -> Path:
    """Where compiled operators are kept: ``TRTL_RL_CACHE``, or trtl-rl in the user's cache directory."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(os.environ.get("TRTL_RL_CACHE") or Path(base) / "trtl-rl") / "kernels"


def find_compiler() -> str | None:
    """The C++ compiler that AOTInductor will call, or None."""
    return shutil.which(os.environ.get("CXX") or "g++") or (None if os.environ.get("CXX") else shutil.which("clang++"))


class KernelSet:
    """All units of a run, compiled or eager.

    Args:
        compiled: Compile the units (needs a C++ compiler), or run them eagerly.
        backward: Also provide the learner's backward units.
        build: Compile what the cache lacks; False in an engine, which only loads what the trainer compiled.
        packages: Directory whose compiled units are taken before those of the cache (an engine directory's).
        progress: Called with a text, the number of units done and their total while units are compiled.
        device: ``cpu``, or a CUDA device: there units run eagerly, on a fixed number of rows a call, since CUDA's libraries
            choose algorithms by shape.

    Attributes:
        identity: Hash of the units' sources, torch, instruction set and compiler. Equal identities give equal bits.
        fixed_rows: Rows of every call of a shared unit, or None where any number of whole tiles has the same bits.
        compile_seconds: Time spent compiling, 0 with a warm cache.
        gil_free: Whether an engine's compiled units run without Python's lock: while another thread decodes weights.
    """

    def __init__(
        self,
        compiled: bool,
        *,
        backward: bool = False,
        build: bool = True,
        packages: Path | None = None,
        progress: Progress | None = None,
        device: str = "cpu",
    ) -> None:
        self.device = torch.device(device)
        assert not (compiled and self.device.type == "cuda"), "units are compiled for CPUs only"
        self.fixed_rows = CUDA_ROWS if self.device.type == "cuda" else None
        self.compiled = compiled
        self.backward = backward
        self.build = build
        self.packages = packages
        self.compile_seconds = 0.0
        self.gil_free = False
        self._progress = progress or (lambda text, done, total: None)
        self._passed = PassedChecks(cache_directory() / "checked")
        self._loaded: dict[tuple[str, LayerSpec | HeadSpec], Run] = {}
        self._files: list[Path] = []
        self.identity = _identity(compiled, self.device)

    @property
    def description(self) -> str:
        """For people: how the operators run."""
        kind = "compiled" if self.compiled else "eager"
        name = "CUDA operators (FP8 emulated)" if self.device.type == "cuda" else "CPU operators"
        return f"{kind} {name} {self.identity[:12]}"

    def prepare(self, layers: Sequence[LayerSpec], head: HeadSpec) -> None:
        """Compile or load every unit that these specs need, then check that their rows are invariant."""
        jobs: list[tuple[type[units.Unit], LayerSpec | HeadSpec]] = []
        for layer in dict.fromkeys(layers):
            jobs += [(unit, layer) for unit in (units.BeforeAttention, units.Attention, units.AfterAttention)]
            if self.backward:
                jobs += [(units.BeforeAttentionBackward, layer), (units.AfterAttentionBackward, layer)]
        jobs += [(units.Head, head), (units.TokenLogprob, head), (units.Sample, head)]
        missing = [job for job in jobs if self.compiled and not self._path(*job).exists()]
        start = time.perf_counter()
        if missing and self.build:
            self._compile(missing)
            self.compile_seconds = time.perf_counter() - start
        for unit, kind in jobs:
            self._unit(unit, kind)
        for unit, kind in jobs:
            self._check(unit, kind)

    def layer(self, kind: LayerSpec) -> LayerUnits:
        before, attention, after = (
            self._unit(unit, kind) for unit in (units.BeforeAttention, units.Attention, units.AfterAttention)
        )
        if not self.backward:
            return LayerUnits(before, attention, after)
        return LayerUnits(
            before,
            attention,
            after,
            self._unit(units.BeforeAttentionBackward, kind),
            self._unit(units.AfterAttentionBackward, kind),
        )

    def head(self, kind: HeadSpec) -> HeadUnits:
        return HeadUnits(*(self._unit(unit, kind) for unit in (units.Head, units.TokenLogprob, units.Sample)))

    def copy_packages(self, directory: Path) -> None:
        """Copy the compiled units that were loaded so far, so that ``packages=directory`` finds them."""
        for path in self._files:
            target = directory / self.identity[:24] / path.name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)

    def _unit(self, unit: type[units.Unit], kind: Any) -> Run:
        key = (unit.__name__, kind)
        if key not in self._loaded:
            run = self._load(unit, kind) if self.compiled else eager(unit, kind)
            shared = unit not in (units.BeforeAttentionBackward, units.AfterAttentionBackward)
            if self.fixed_rows is not None and shared:
                run = in_fixed_rows(run, row_inputs(unit, kind), self.fixed_rows)
            self._loaded[key] = run
        return self._loaded[key]

    def _check(self, unit: type[units.Unit], kind: LayerSpec | HeadSpec) -> None:
        """Check a unit, once for each package on a machine and number of threads."""
        package = self._path(unit, kind) if self.compiled else None
        if package is not None and self._passed.has(package):
            return
        check(unit, kind, self._unit(unit, kind), self.device, self.compiled)
        if package is not None:
            self._passed.add(package)

    def _path(self, unit: type[units.Unit], kind: LayerSpec | HeadSpec) -> Path:
        name = hashlib.sha256(repr(kind).encode()).hexdigest()[:16]
        file = Path(self.identity[:24]) / f"{unit.__name__}-{name}.pt2"
        if self.packages is not None and (self.packages / file).exists():
            return self.packages / file
        return cache_directory() / file

    def _load(self, unit: type[units.Unit], kind: LayerSpec | HeadSpec) -> Run:
        path = self._path(unit, kind)
        if not path.exists():
            raise EngineError(f"The compiled operator {path} is missing; the trainer's process makes it at its start.")
        self._files.append(path)
        loader = torch._C._aoti.AOTIModelPackageLoader(str(path), "model", True, 1, -1)
        gil_free = None if self.backward else load_gil_free(path)

        is_rows = row_inputs(unit, kind)

        def run(inputs: Sequence[Tensor]) -> list[Tensor]:
            # A package reads memory by the strides of its example: everything must be contiguous. Weights always are.
            given = [x.contiguous() if rows else x for x, rows in zip(inputs, is_rows, strict=True)]
            return gil_free(given) if gil_free is not None and self.gil_free else loader.run(given)

        return run

    def _compile(self, jobs: Sequence[tuple[type[units.Unit], LayerSpec | HeadSpec]]) -> None:
        from trtl_rl.kernels.compile import compile_units

        self._progress("compiling operators", 0, len(jobs))
        work = [(unit.__name__, kind, self._path(unit, kind)) for unit, kind in jobs]
        for done, _ in enumerate(compile_units(work), 1):
            self._progress("compiling operators", done, len(jobs))


def in_fixed_rows(run: Run, is_rows: Sequence[bool], rows: int) -> Run:
    """Call ``run`` on ``rows`` rows at a time, the last ones filled up with zeros: whatever it does, shapes never differ."""

    def chunked(inputs: Sequence[Tensor]) -> list[Tensor]:
        total = inputs[0].shape[0]
        parts = []
        for start in range(0, total, rows):
            part = [
                linear.pad_rows(x[start : start + rows], max(0, start + rows - total)) if is_row else x
                for x, is_row in zip(inputs, is_rows, strict=True)
            ]
            parts.append(run(part))
        return [
            torch.cat([as_bytes(piece) for piece in column])[:total].view(column[0].dtype)
            for column in zip(*parts, strict=True)
        ]

    return chunked


def _identity(compiled: bool, device: torch.device) -> str:
    parts = [inspect.getsource(item) for item in (ops, linear, units, spec, codec, formats, write_package)]
    parts += [torch.__version__, str(compiled), platform.machine(), torch.backends.cpu.get_cpu_capability()]
    parts.append(_processor_features())
    if device.type == "cuda":
        parts += [torch.cuda.get_device_name(device), str(torch.version.cuda), str(CUDA_ROWS)]
    parts += [f"python {sys.version_info[:2]}"]
    if compiled:
        import subprocess

        compiler = find_compiler()
        assert compiler is not None, "compiled operators need a C++ compiler"
        parts.append(subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _processor_features() -> str:
    """What ``-march=native`` looks at: two processors of one capability may differ in it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def write_package(unit: units.Unit, path: Path) -> None:
    """Export a unit and write its AOTInductor package; the file appears whole or not at all."""
    import logging
    import warnings

    from torch._inductor import ir, lowering, mkldnn_ir, mkldnn_lowerings
    from torch._inductor.fx_passes import mkldnn_fusion

    assert mkldnn_lowerings  # it registers a lowering that takes constant weights only, which ours replaces

    def lower(x: Any, weight: Any, bias: Any, *attributes: Any) -> Any:
        return ir.TensorBox.create(mkldnn_ir.LinearUnary.create(x, weight, bias, *attributes))

    lowering.lowerings[torch.ops.mkldnn._linear_pointwise.default] = lower
    mkldnn_fusion._mkldnn_fusion_init = lambda: None  # type: ignore[assignment]  # what it fuses takes constant weights only too
    path.parent.mkdir(parents=True, exist_ok=True)
    example = unit.example()
    logging.getLogger("torch").setLevel(logging.ERROR)
    with warnings.catch_warnings(), torch.no_grad(), tempfile.TemporaryDirectory() as scratch:
        warnings.simplefilter("ignore")
        # One named argument for all tensors: units take any number of them.
        program = torch.export.export(unit, example.inputs, dynamic_shapes=(tuple(example.dynamic),))
        made = torch._inductor.aoti_compile_and_package(
            program,
            package_path=str(Path(scratch) / path.name),
            # One thread: the artefact has no parallel reductions, whatever the process sets. Blocks are in range by
            # construction, and checking that in the innermost loop would cost attention a fifth of its time.
            inductor_configs={"cpp.threads": 1, "assert_indirect_indexing": False},
        )
        partial = path.with_name(f"{path.name}.{os.getpid()}")
        shutil.copyfile(made, partial)
        os.replace(partial, path)
