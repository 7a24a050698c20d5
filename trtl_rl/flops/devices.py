"""Published peaks of devices, for the utilisation of a role (MFU). A device that is not listed is unknown: no guess is made.

Dense products without sparsity, FLOP/s of one device, from NVIDIA's data sheet of each product. Where a sheet prints the figure
with 2:4 sparsity alone, which is twice the dense one, half of it stands here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

UNKNOWN = "unknown"


@dataclass(frozen=True)
class Device:
    """A device and its peaks.

    Attributes:
        bf16, fp8: FLOP/s; ``None`` where the device's peak is not known, or it has no such units.
    """

    name: str
    bf16: float | None = None
    fp8: float | None = None

    def ideal_seconds(self, flops: int, fp8_flops: int) -> float | None:
        """How long ``flops``, of which ``fp8_flops`` run in FP8, take at the peak. Without FP8 units those run in BF16."""
        if self.bf16 is None:
            return None
        return (flops - fp8_flops) / self.bf16 + fp8_flops / (self.fp8 or self.bf16)


# The first pattern that is found in torch.cuda.get_device_name() counts.
# Behind each what its data sheet prints, read in public copies; * marks figures with sparsity. Variants of which no copy was
# found (H100 NVL, H200 NVL, GB200) stay unknown.
_PEAKS: list[tuple[str, float, float | None]] = [
    (r"\bB200\b", 4.5e15 / 2, 9e15 / 2),  # NVIDIA HGX B200 data sheet: BF16 4.5* PFLOPS, FP8 9* PFLOPS a GPU
    (r"\bH200\b(?! NVL)", 1.979e15 / 2, 3.958e15 / 2),  # NVIDIA H200 data sheet, SXM: BF16 1,979*, FP8 3,958* TFLOPS
    (r"\bH100 PCIe\b", 1.513e15 / 2, 3.026e15 / 2),  # NVIDIA H100 data sheet, PCIe: BF16 1,513*, FP8 3,026* TFLOPS
    (r"\bH100\b.*\bHBM3\b", 1.979e15 / 2, 3.958e15 / 2),  # NVIDIA H100 data sheet, SXM: BF16 1,979*, FP8 3,958* TFLOPS
    (r"\bA100\b", 0.312e15, None),  # NVIDIA A100 data sheet, PCIe and SXM alike: BF16 312 | 624* TFLOPS
    (r"\bL40S\b", 0.36205e15, 0.733e15),  # NVIDIA L40S data sheet: BF16 362.05 | 733*, FP8 733 | 1,466* TFLOPS
    (r"\bL4\b", 0.242e15 / 2, 0.485e15 / 2),  # NVIDIA L4 data sheet: BF16 242*, FP8 485* TFLOPS
]


def device_named(name: str) -> Device:
    """The device of this name, with its peaks if they are known.

    >>> device_named("NVIDIA H100 80GB HBM3").fp8, device_named("a CPU").bf16
    (1979000000000000.0, None)
    """
    for pattern, bf16, fp8 in _PEAKS:
        if re.search(pattern, name) and "MIG" not in name:
            return Device(name, bf16, fp8)
    return Device(name)


def this_device(kind: str) -> Device:
    """The device that a run with ``device=kind`` computes on. The peak of a CPU is not known."""
    if kind == "cuda":
        import torch

        return device_named(torch.cuda.get_device_name())
    return Device("CPU")
