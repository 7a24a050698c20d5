"""Memory of one GPU as channel, for a trainer and an engine on the same GPU with the same torch. Never executed so far.

What crosses is torch's handle of one buffer on the GPU, as ``torch.multiprocessing`` makes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from trtl_rl.refit.channel import fill, layout, views
from trtl_rl.refit.manifest import Bucket, Manifest

_FIXED = 6  # of rebuild_cuda_tensor's arguments: class, size, strides, offset, storage class and dtype of a tensor


class CudaIpcSender:
    """Implements ``Channel`` by a buffer on the GPU that grows to the largest bucket; each bucket overwrites the one before."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8, device="cuda")

    def begin(self, manifest: Manifest, whole: bool) -> None:
        """The same for every version."""

    def finished(self) -> None:
        """Nothing of it is kept here."""

    def pack(self, bucket: Bucket) -> dict[str, Any]:
        places, size = layout(bucket)
        if size > self._buffer.numel():
            self._buffer = torch.empty(size, dtype=torch.uint8, device="cuda")
        fill(self._buffer, bucket, places)
        torch.cuda.synchronize()
        _, arguments = reduce_tensor(self._buffer)
        handle = [value.hex() if isinstance(value, bytes) else value for value in arguments[_FIXED:]]
        about = {"size": self._buffer.numel(), "offset": arguments[3], "handle": handle}
        return {**about, "tensors": places, "packed": sorted(bucket.packed)}

    def push(self, bucket: Bucket) -> None:
        """Nothing is left: the bucket lies in the GPU's memory."""

    def close(self) -> None:
        self._buffer = self._buffer[:0].clone()
        torch.cuda.ipc_collect()


def unpack(description: Mapping[str, Any]) -> Bucket:
    """The bucket that was packed, as views of the sender's memory: valid until it packs the next."""
    handle = [bytes.fromhex(value) if isinstance(value, str) else value for value in description["handle"]]
    buffer = rebuild_cuda_tensor(
        torch.Tensor,
        torch.Size([description["size"]]),
        (1,),
        description["offset"],
        torch.storage.TypedStorage,
        torch.uint8,
        *handle,
    )
    return views(buffer, description)
