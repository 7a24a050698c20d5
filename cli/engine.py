"""``trtl-rl build-engine`` and ``inspect-engine``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from trtl_rl.cli.figures import clean, quantity
from trtl_rl.cli.progress import progress_bars
from trtl_rl.engines.directory import EngineDirectory
from trtl_rl.errors import UserError
from trtl_rl.flops.formulas import ModelShape
from trtl_rl.model.source import find_model
from trtl_rl.recipe.audit import audit, audit_lines
from trtl_rl.recipe.recipe import Recipe


def build(model: str, output: Path, backend: str, recipe: str, max_context: int | None, compiled: bool) -> int:
    """Build an engine directory and print what it holds."""
    if backend == "tensorrt-llm":
        raise UserError(
            "This version builds no engine for TensorRT-LLM: the adapter that would start one, hand it the checkpoint and refit "
            "it is missing, and nothing here was ever run with TensorRT-LLM. --backend torch is the embedded engine."
        )
    chosen, source = Recipe.load(recipe), find_model(model)
    from trtl_rl.engines.build import build_engine
    from trtl_rl.kernels.kernel_set import find_compiler

    if compiled and find_compiler() is None:
        raise UserError(
            "The operators cannot be compiled: there is no C++ compiler (g++ or clang++, or the CXX variable). With "
            "--no-compile the engine is built without them, and runs them eagerly."
        )
    with progress_bars() as progress:
        directory = build_engine(source, chosen, output, max_context=max_context, compiled=compiled, progress=progress)
    for line in describe(directory):
        print(line)
    print(f"Verify it: trtl-rl verify-engine {output}\nRun with it: trtl-rl run model={model} engine.path={output} ...")
    return 0


def inspect(path: Path, as_json: bool) -> int:
    """Print what an engine directory holds, and whether this machine would run the same operators."""
    directory = EngineDirectory.open(path)
    found = _audit(directory)
    if as_json:
        values = directory.to_json()
        print(
            json.dumps(
                {**values, "audit": found, "bytes": directory.bytes, "same_operators": _same(directory)}, indent=1
            )
        )
        return 0
    for line in describe(directory):
        print(line)
    if not _same(directory):
        print(
            "warning: this machine would run other operators (another processor, torch, compiler or trtl-rl): an engine "
            "here compiles its own, and its bits differ from those where the directory was built.",
            file=sys.stderr,
        )
    return 0


def describe(directory: EngineDirectory) -> list[str]:
    """An engine directory in lines of name and value."""
    weights = sum(entry.size for name, entry in directory.files.items() if name.endswith(".safetensors"))
    packages = [entry.size for name, entry in directory.files.items() if name.endswith(".pt2")]
    rows = {
        "engine": directory.path,
        "model": f"{directory.model} ({directory.architecture}, {quantity(directory.parameters)} parameters)",
        "source weights": directory.source_digest,
        "recipe": f"{directory.recipe['name']} {directory.recipe['digest'][:12]}",
        "weights": f"{quantity(weights, 'B')}, digest {directory.weights_digest}",
        "operators": f"{directory.kernels['description']}, {len(packages)} packages, {quantity(sum(packages), 'B')}",
        "context": f"{directory.max_context} tokens",
        "answers end at": f"token {', '.join(map(str, directory.stop_ids))}",
        "size": f"{quantity(directory.bytes, 'B')} in {len(directory.files) + 1} files",
        "versions": ", ".join(f"{name} {version}" for name, version in directory.versions.items()),
    }
    lines = [f"{name:<15} {clean(value)}" for name, value in rows.items()]
    return lines + [clean(line) for line in audit_lines(_audit(directory))]


def _audit(directory: EngineDirectory) -> dict[str, object]:
    d = directory.description
    shape = ModelShape(d.layers, d.hidden, d.heads, d.kv_heads, d.head_dim, d.intermediate, d.vocab)
    return audit(d.coverage, shape, directory.parameters, directory.max_context)


def _same(directory: EngineDirectory) -> bool:
    from trtl_rl.kernels.kernel_set import KernelSet, find_compiler

    compiled = bool(directory.kernels["compiled"])
    if compiled and find_compiler() is None:
        return False
    return KernelSet(compiled).identity == str(directory.kernels["identity"])
