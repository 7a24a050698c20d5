"""``trtl-rl env``: versions, machine and threads."""

from __future__ import annotations

import os
import platform

from trtl_rl.kernels.kernel_set import cache_directory, find_compiler
from trtl_rl.versions import versions


def env() -> int:
    """Print one ``name: value`` line each."""
    import torch

    rows = {
        **versions(),
        "platform": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "cores": str(len(os.sched_getaffinity(0))),
        "instruction set": torch.backends.cpu.get_cpu_capability(),
        "GPU": torch.cuda.get_device_name() if torch.cuda.is_available() else "none (or a CPU build of torch)",
        "C++ compiler": find_compiler() or "none: operators run eagerly",
        "compiled operators": str(cache_directory()),
    }
    for name, value in rows.items():
        print(f"{name}: {value}")
    return 0
