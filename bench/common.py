"""What the benches share: interleaved timing, one result file each, a description of the machine."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def interleaved(works: Mapping[str, Callable[[], object]], repeats: int = 5, warmup: int = 2) -> dict[str, list[float]]:
    """Wall seconds of each piece of work, taken in turns so that a slow moment of the machine hits all of them."""
    for _ in range(warmup):
        for work in works.values():
            work()
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(repeats):
        for name, work in works.items():
            start = time.perf_counter()
            work()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def medians(seconds: Mapping[str, list[float]]) -> dict[str, float]:
    """Median seconds of each piece of work."""
    return {name: statistics.median(values) for name, values in seconds.items()}


def spread(seconds: Mapping[str, list[float]]) -> dict[str, list[float]]:
    """Least and largest seconds of each piece of work."""
    return {name: [round(min(values), 4), round(max(values), 4)] for name, values in seconds.items()}


def machine() -> dict[str, Any]:
    """Date, processor and versions."""
    import torch

    return {
        "date": time.strftime("%Y-%m-%d"),
        "device": f"CPU {platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, {os.cpu_count()} cores",
        "load_average": round(os.getloadavg()[0], 1),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def write_result(name: str, result: dict[str, Any]) -> Path:
    """Write ``bench/results/<name>.json`` with date and machine, and print it."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({**machine(), **result}, indent=1) + "\n")
    print(f"{path}: {str(result)[:2000]}", flush=True)
    return path
