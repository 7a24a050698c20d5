"""Compile units side by side in processes of their own: ``python -m trtl_rl.kernels.compile`` reads its jobs from stdin."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from trtl_rl.errors import EngineError

Job = tuple[str, Any, Path]


def compile_units(jobs: Sequence[Job], workers: int | None = None) -> Iterator[Path]:
    """Compile (unit name, spec, package path) jobs; yields each path when it is done.

    Compiling is mostly a C++ compiler at work, so each worker takes one core.

    Raises:
        EngineError: a unit did not compile; carries the compiler's text.
    """
    workers = max(1, min(workers or len(os.sched_getaffinity(0)), len(jobs)))
    shares = [list(jobs[i::workers]) for i in range(workers)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    with contextlib.ExitStack() as stack:
        errors = [stack.enter_context(tempfile.TemporaryFile()) for _ in shares]
        running = [
            subprocess.Popen(
                [sys.executable, "-m", __name__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=error,
                env=environment,
                start_new_session=True,  # Ctrl-C is the trainer's; it ends the whole group, the C++ compiler included
            )
            for error in errors
        ]
        stack.callback(_end, running)
        for process, share in zip(running, shares, strict=True):
            assert process.stdin is not None
            process.stdin.write(pickle.dumps(share))
            process.stdin.close()
        for process, share, error in zip(running, shares, errors, strict=True):
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith(b"done "):
                    yield Path(line[5:].decode().strip())
            if process.wait() != 0 or not all(path.exists() for _, _, path in share):
                error.seek(0)
                text = error.read().decode(errors="replace")[-4000:]
                raise EngineError(f"An operator did not compile; run with compile=false to go on without.\n{text}")


def _end(running: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in running:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


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
