"""The GPU kernels on a real GPU: right, row-invariant, how fast. One run of under five minutes on an H200.

    python bench/gpu.py [DIRECTORY]

Needs CUDA, torch 2.11 or later with its triton, and this repository; nothing is installed or downloaded. Writes
``gpu-<device>.json`` into DIRECTORY (bench/results) at every result, so that what was measured is never lost: sections
run in a process of their own, one that fails leaves its error in the file, and one that takes the process or the CUDA
context with it is followed by a fresh process for the rest. Exits with 2 where there is no CUDA, with 1 after a failure.

Sections: ``quantisers`` (bits of the codec, and the nearest values in float64), ``products`` (against float64, and fast
against exact), ``rows`` (a row's bits at every M from 1 to 4096), ``parity`` (whole models: trainer against engine),
``speed`` (forward, dgrad and wgrad of a linear against BF16), ``bandwidth`` (quantisers against a copy of as many bytes) and
``tiles`` (what tuning the exact GEMM could bring).
Work is taken in turns, each piece after a write of 1 GiB that empties the L2 cache and lets launches run ahead; times are
medians of CUDA events.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # a bare machine has the repository, not the installed package

import torch  # noqa: E402
import triton  # noqa: E402
from gpu_exact import Result, products, quantisers, rows  # noqa: E402
from gpu_parity import parity  # noqa: E402
from gpu_speed import bandwidth, speed, tiles  # noqa: E402

SECONDS = 280.0  # of the whole run
UNFINISHED = "not finished"
SECTIONS = {section.__name__: section for section in (quantisers, products, rows, parity, speed, bandwidth, tiles)}


def machine() -> Result:
    """Date, device and versions."""
    properties = torch.cuda.get_device_properties(0)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    query = ["nvidia-smi", "--query-gpu=driver_version,clocks.sm,clocks.mem,power.limit", "--format=csv,noheader"]
    try:
        driver = subprocess.run(query, capture_output=True, text=True).stdout.strip()
    except OSError:
        driver = "nvidia-smi is missing"
    return {
        "date": time.strftime("%Y-%m-%d"),
        "device": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "driver, clocks, power limit": driver,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "commit": commit or "not a git checkout",
    }


def write(path: Path, report: Result) -> None:
    """The whole file or the one before it, never a part."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(report, indent=1) + "\n")
    os.replace(partial, path)


class Section(dict[str, object]):
    """Results of a section; the file is written at each of them."""

    def __init__(self, path: Path, report: Result) -> None:
        super().__init__(error=UNFINISHED)
        self._path, self._report = path, report

    def __setitem__(self, key: str, value: object) -> None:
        super().__setitem__(key, value)
        write(self._path, self._report)


def work(path: Path, names: list[str]) -> int:
    """Run sections one after another; returns 3 when CUDA is unusable after one."""
    report = json.loads(path.read_text())
    report.setdefault("machine", machine())
    for name in names:
        start = time.perf_counter()
        result = report["sections"][name] = Section(path, report)
        print(f"{name} ...", flush=True)
        try:
            SECTIONS[name](result)
            torch.cuda.synchronize()
            del result["error"]
        except Exception:
            result["error"] = traceback.format_exc()[-3000:]
            print(result["error"], flush=True)
        result["seconds"] = round(time.perf_counter() - start, 1)
        print(f"{name}: {result['seconds']} s", flush=True)
        if "error" in result:
            try:
                torch.cuda.synchronize()
            except RuntimeError:
                return 3
    return 0


def main() -> int:
    """Run what is left in fresh processes until all sections have a result or time is over."""
    parser = argparse.ArgumentParser(description="Check and measure the GPU kernels on this machine's GPU.")
    parser.add_argument("directory", nargs="?", type=Path, default=ROOT / "bench" / "results")
    parser.add_argument("--sections", nargs="+", choices=list(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench/gpu.py needs an NVIDIA GPU that torch can use, and this machine has none.", file=sys.stderr)
        return 2
    if arguments.child:
        return work(arguments.child, arguments.sections)
    start = time.monotonic()
    name = torch.cuda.get_device_name(0).lower().replace(" ", "-").replace("/", "-")
    path = arguments.directory / f"gpu-{name}.json"
    arguments.directory.mkdir(parents=True, exist_ok=True)
    write(path, {"sections": {}})
    left = list(arguments.sections)
    while left and (seconds := SECONDS - (time.monotonic() - start)) > 10:
        command = [sys.executable, str(Path(__file__).resolve()), "--child", str(path), "--sections", *left]
        try:
            ended = f"the process ended with {subprocess.run(command, timeout=seconds).returncode}"
        except subprocess.TimeoutExpired:
            ended = f"stopped after {seconds:.0f} s, when the run's time was over"
        report = json.loads(path.read_text())
        report["sections"].setdefault(left[0], {"error": UNFINISHED})
        for section in report["sections"].values():
            if section.get("error") == UNFINISHED:
                section["error"] = ended
        write(path, report)
        left = [section for section in left if section not in report["sections"]]
    report = json.loads(path.read_text())
    report["seconds"] = round(time.monotonic() - start, 1)
    write(path, report)
    failed = [section for section in arguments.sections if "error" in report["sections"].get(section, {"error": ""})]
    print(
        f"{path}: {report['seconds']} s" + (f", failed or left out: {', '.join(failed)}" if failed else ""), flush=True
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
