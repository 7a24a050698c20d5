"""Configuration classes of the FAKE."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class KvCacheConfig:
    enable_block_reuse: bool = True
    free_gpu_memory_fraction: float = 0.9


@dataclass
class CudaGraphConfig:
    enable_padding: bool = False
    max_batch_size: int = 0
