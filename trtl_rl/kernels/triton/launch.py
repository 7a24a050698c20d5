"""Where kernels may run: on CUDA, or on a CPU when Triton was imported as an interpreter."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from trtl_rl.errors import UserError


def check_device(kernel: Any, *tensors: Tensor) -> None:
    """Refuse tensors that ``kernel`` cannot reach.

    Raises:
        UserError: tensors lie on several devices; on a CPU without the interpreter; on a GPU without E4M3 conversions.
    """
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        raise UserError(f"All operands must lie on one device, got {', '.join(sorted(map(str, devices)))}.")
    (device,) = devices
    if not isinstance(kernel, triton.JITFunction):  # the interpreter copies operands to the host and back
        return
    if device.type != "cuda":
        raise UserError(
            f"Triton's kernels run on CUDA; these operands lie on '{device}'. Move them, or set TRITON_INTERPRET=1 before "
            "triton is imported, to run the kernels slowly on the CPU."
        )
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 9):
        raise UserError(
            f"{torch.cuda.get_device_name(device)} has compute capability {capability[0]}.{capability[1]}; E4M3 needs 8.9. "
            "Use the emulated operators (trtl_rl/kernels/ops.py) there."
        )
