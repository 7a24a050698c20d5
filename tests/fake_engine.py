"""An engine of the FAKE TensorRT-LLM for tests: directories, interpreters that find it, engines in this process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from engine_dirs import build

from trtl_rl.engines.build import Serving
from trtl_rl.engines.directory import EngineDirectory
from trtl_rl.engines.tensorrt_llm.engine import TensorrtLlmEngine

FAKES = Path(__file__).parent / "fakes" / "fake_tensorrt_llm"


def built(place: Path, model: str = "demo", *, ranks: int = 1, **rest: Any) -> EngineDirectory:
    return build(model, place, serving=Serving(ranks), **rest)


def fake_python(place: Path, variant: str = "") -> Path:
    """An interpreter whose ``import tensorrt_llm`` finds the fake."""
    script = place / "python-with-fake-tensorrt-llm"
    script.write_text(
        f'#!/bin/sh\nPYTHONPATH="{FAKES}:$PYTHONPATH" FAKE_TENSORRT_LLM="{variant}" exec "{sys.executable}" "$@"\n'
    )
    script.chmod(0o755)
    return script


def fake_engine(directory: EngineDirectory, overrides: dict[str, Any] | None = None, **rest: Any) -> TensorrtLlmEngine:
    """In this process; ``tensorrt_llm`` must be importable."""
    values = {"slots": 4, "context": 64, "stop_ids": [1], "timeout": 60.0, **rest}
    return TensorrtLlmEngine(directory.description, str(directory.path), overrides or {}, **values)
