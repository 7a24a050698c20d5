"""Compile units side by side in processes of their own: ``python -m trtl_rl.kernels.compile`` reads its jobs from stdin."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

Job = tuple[str, Any, Path]


def compile_units(jobs: Sequence[Job], workers: int | None = None) -> Iterator[Path]:
    """Compile (unit name, spec, package path) jobs; yields each path when it is done.

    Compiling is mostly a C++ compiler at work, so each worker takes one core.

    Raises:
        RuntimeError: a unit did not compile; carries the compiler's text.
    """
    workers = max(1, min(workers or len(os.sched_getaffinity(0)), len(jobs)))
    shares = [list(jobs[i::workers]) for i in range(workers)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    running = [
        subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
        )
        for _ in shares
    ]
    try:
        for process, share in zip(running, shares, strict=True):
            assert process.stdin is not None
            process.stdin.write(pickle.dumps(share))
            process.stdin.close()
        for process, share in zip(running, shares, strict=True):
            assert process.stdout is not None and process.stderr is not None
            for line in process.stdout:
                if line.startswith(b"done "):
                    yield Path(line[5:].decode().strip())
            error = process.stderr.read().decode()
            if process.wait() != 0 or not all(path.exists() for _, _, path in share):
                raise RuntimeError(
                    f"An operator did not compile; run with compile=false to go on without.\n{error[-4000:]}"
                )
    finally:
        for process in running:
            process.kill()


def main() -> None:
    """Compile the jobs that stdin holds, one after another."""
    jobs: list[Job] = pickle.load(sys.stdin.buffer)
    output = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what the compiler prints must not mix with the answers

    import torch

    from trtl_rl.kernels import kernel_set, units

    torch.set_num_threads(1)
    for name, spec, path in jobs:
        kernel_set.write_package(getattr(units, name)(spec), path)
        output.write(f"done {path}\n".encode())


if __name__ == "__main__":
    main()
