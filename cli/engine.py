"""``trtl-rl build-engine``, ``inspect-engine`` and ``verify-engine``."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trtl_rl.cli.figures import clean, quantity
from trtl_rl.cli.progress import progress_bars
from trtl_rl.engines.directory import EngineDirectory
from trtl_rl.errors import UserError
from trtl_rl.flops.formulas import ModelShape
from trtl_rl.model.source import find_model
from trtl_rl.recipe.audit import audit, audit_lines
from trtl_rl.recipe.recipe import Recipe


def build(
    model: str,
    output: Path,
    backend: str,
    recipe: str,
    max_context: int | None,
    compiled: bool,
    serving: Mapping[str, Any] | None = None,
) -> int:
    """Build an engine directory and print what it holds.

    Args:
        serving: ``tensor_parallel`` and ``gpu`` for TensorRT-LLM; None takes the default.
    """
    given = {name: value for name, value in (serving or {}).items() if value is not None}
    if backend == "torch" and given:
        option = next(iter(given)).replace("_", "-")
        raise UserError(
            f"--{option} belongs to --backend tensorrt-llm; the embedded engine runs in one process on the CPU."
        )
    chosen, source = Recipe.load(recipe), find_model(model)
    from trtl_rl.engines.build import Serving, build_engine
    from trtl_rl.kernels.kernel_set import find_compiler

    if compiled and find_compiler() is None:
        raise UserError(
            "The operators cannot be compiled: there is no C++ compiler (g++ or clang++, or the CXX variable). With "
            "--no-compile the engine is built without them, and runs them eagerly."
        )
    with progress_bars() as progress:
        directory = build_engine(
            source,
            chosen,
            output,
            max_context=max_context,
            compiled=compiled,
            serving=Serving(**given) if backend == "tensorrt-llm" else None,
            progress=progress,
        )
    for line in describe(directory):
        print(line)
    run = f"trtl-rl run model={model} engine.path={output}"
    if backend == "torch":
        print(f"Verify it: trtl-rl verify-engine {output}\nRun with it: {run} ...")
        return 0
    print(
        f"Built here: the checkpoint, checked for whole blocks of 128 on every rank, and its arguments"
        f"{'; and CPU operators for the embedded engine' if compiled else ''}. "
        "TensorRT-LLM has no engine file: whenever it is started it loads the modules, tunes kernels and captures CUDA graphs.\n"
        f"Verify it here: trtl-rl verify-engine {output} --backend torch\n"
        f"Verify it on the GPU machine: trtl-rl verify-engine {output} --python ENVIRONMENT/bin/python\n"
        f"Run with it there: {run} engine.backend=tensorrt-llm engine.python=ENVIRONMENT/bin/python ..."
    )
    return 0


def verify(
    directory: Path,
    prompts: int,
    max_new_tokens: int,
    as_json: bool,
    *,
    backend: str | None = None,
    python: str | None = None,
    report: Path | None = None,
) -> int:
    """Check an engine directory by running it; returns 0 if all is well, else 1."""
    from trtl_rl.cli.parity import verify_engine
    from trtl_rl.trainer.parity_subject import Options

    opened = EngineDirectory.open(directory)
    chosen = backend or opened.backend
    if chosen == "torch":
        for option, value in (("--python", python), ("--report", report)):
            if value is not None:
                raise UserError(f"{option} belongs to --backend tensorrt-llm.")
        return verify_engine(directory, Options(prompts, max_new_tokens), as_json)
    from trtl_rl.trainer.verify_tensorrt_llm import write_report

    place = report or Path("verify-engine.json")
    with progress_bars() as progress:
        found = write_report(opened, place, prompts=prompts, new=max_new_tokens, python=python, progress=progress)
    if as_json:
        print(json.dumps(found, indent=1))
    else:
        for name, check in found["checks"].items():
            print(f"{'ok  ' if check['passed'] else 'FAIL'} {name:<28} {clean(check['text'])}")
        print(f"The report is {place}: send it with bug reports.")
    return int(not found["passed"])


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
        "built for": _built_for(directory),
        "operators": f"{directory.kernels['description']}, {len(packages)} packages, {quantity(sum(packages), 'B')}",
        "context": f"{directory.max_context} tokens",
        "answers end at": f"token {', '.join(map(str, directory.stop_ids))}",
        "size": f"{quantity(directory.bytes, 'B')} in {len(directory.files) + 1} files",
        "versions": ", ".join(f"{name} {version}" for name, version in directory.versions.items()),
    }
    lines = [f"{name:<15} {clean(value)}" for name, value in rows.items()]
    return lines + [clean(line) for line in audit_lines(_audit(directory))]


def _built_for(directory: EngineDirectory) -> str:
    if directory.backend == "torch":
        return "the embedded engine"
    ranks, gpu = directory.serving["tensor_parallel"], directory.serving["gpu"].capitalize()
    return f"TensorRT-LLM on {ranks} {gpu} GPU{'s' if ranks > 1 else ''}, and the embedded engine"


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
