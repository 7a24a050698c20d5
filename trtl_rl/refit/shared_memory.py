"""Shared memory between a trainer and the engines on its machine: whole versions that stay, and changes that pass by.

The files have no names in any directory: a killed process leaves nothing behind, and a small ``/dev/shm`` (64 MB in many
containers) is no limit. A process of the same user opens them through ``/proc`` while the trainer lives.
"""

from __future__ import annotations

import ctypes
import math
import os
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from trtl_rl.refit.channel import aligned, fill, layout, view
from trtl_rl.refit.manifest import Bucket, Manifest, dtype_name, tensor_bytes

Spec = tuple[str, torch.dtype, tuple[int, ...]]


class VersionMemory:
    """Where whole versions are written, so that engines on this machine read them where they are: nobody copies them again.

    A version's tensors lie in one file. When nobody in this process holds any of them, the file is used for a later version: new
    memory costs more than to write to it. Who sends tensors keeps hold of them as long as a receiver may read them.

    Example::

        memory = VersionMemory()
        kept = memory.take([("model.norm.weight", torch.bfloat16, (64,))])
        kept["model.norm.weight"].copy_(norm)
    """

    def __init__(self) -> None:
        self._free: list[_MemoryFile] = []

    def take(self, specs: Iterable[Spec]) -> dict[str, Tensor]:
        """Tensors for one version, with whatever values, by their names."""
        places, size = [], 0
        for name, dtype, shape in specs:
            places.append((name, dtype, shape, size))
            size += aligned(math.prod(shape) * dtype.itemsize)
        whole = self._file(size).lend(self._free)
        return {name: view(whole, dtype, shape, start) for name, dtype, shape, start in places}

    def _file(self, size: int) -> _MemoryFile:
        while self._free:
            file = self._free.pop()
            if file.size >= size:  # a smaller one is given up
                return file
        return _MemoryFile(size)


class SharedMemorySender:
    """Implements ``Channel``: a whole version stays where it lies, changes pass through two files by turns.

    A whole version that does not lie in a :class:`VersionMemory` is copied to one. The last version that came whole, and the next,
    are held here, since the receiver reads them where they are. One that began and was never seen live is left to the
    receiver, which may have taken it all the same. Of the files for changes one is filled while the receiver reads the other.
    """

    def __init__(self) -> None:
        self._memory = VersionMemory()
        self._passing: list[_MemoryFile] = []
        self._whole: Manifest | None = None  # the version that has begun, if it comes whole
        self._own: dict[str, Tensor] = {}  # where it is copied to
        self._live: list[Tensor] = []  # one tensor of every file that the receiver may read
        self._next: list[Tensor] = []

    def begin(self, manifest: Manifest, whole: bool) -> None:
        for tensor in self._next:
            file = _home([tensor])
            assert file is not None
            file.leave()
        self._next, self._own = [], {}
        self._whole = manifest if whole else None

    def finished(self) -> None:
        if self._whole is not None:
            self._live, self._next = self._next, []
        self._whole, self._own = None, {}

    def pack(self, bucket: Bucket) -> dict[str, Any]:
        if self._whole is None or bucket.packed:
            return self._pass_by(bucket)
        tensors = bucket.tensors
        file = _home(tensors.values())
        if file is None:
            if not self._own:
                self._own = self._memory.take((e.name, getattr(torch, e.dtype), e.shape) for e in self._whole.tensors)
            for name, tensor in tensors.items():
                tensor_bytes(self._own[name]).copy_(tensor_bytes(tensor))
            tensors = {name: self._own[name] for name in tensors}
            file = _home(tensors.values())
            assert file is not None
        self._next.append(next(iter(tensors.values())))
        places = [
            (name, dtype_name(tensor.dtype), list(tensor.shape), tensor.data_ptr() - file.address)
            for name, tensor in tensors.items()
        ]
        return {**file.about(), "stays": True, "tensors": places, "packed": []}

    def _pass_by(self, bucket: Bucket) -> dict[str, Any]:
        places, size = layout(bucket)
        file = self._passing.pop(0) if len(self._passing) == 2 else _MemoryFile(size)
        if file.size < size:
            file = _MemoryFile(size)
        self._passing.append(file)
        fill(file.memory, bucket, places)
        return {**file.about(), "stays": False, "tensors": places, "packed": sorted(bucket.packed)}

    def push(self, bucket: Bucket) -> None:
        """Nothing is left: the bucket lies in shared memory."""

    def close(self) -> None:
        self._passing, self._live, self._next, self._own = [], [], [], {}
        self._memory = VersionMemory()  # the files of the one before are closed


class _MemoryFile:
    """A file in memory, mapped; closed when nobody refers to this.

    Attributes:
        memory: Its bytes, uint8 [size].
    """

    def __init__(self, size: int) -> None:
        self.size = max(size, 1)
        file = os.memfd_create("trtl-rl-refit")
        weakref.finalize(self, os.close, file)
        os.ftruncate(file, self.size)
        self.path = f"/proc/{os.getpid()}/fd/{file}"
        self.number = os.fstat(file).st_ino  # a later file may get the same path
        self.memory = torch.from_file(self.path, shared=True, size=self.size, dtype=torch.uint8)
        self.address = self.memory.data_ptr()
        self._left = False
        _FILES[self.address] = self

    def about(self) -> dict[str, Any]:
        """What a receiver needs to map it."""
        return {"path": self.path, "file": self.number, "size": self.size}

    def lend(self, free: list[_MemoryFile]) -> Tensor:
        """``memory``, uint8 [size]; when nobody holds that tensor or a view of it any more, this file is put into ``free``."""
        lent = (ctypes.c_ubyte * self.size).from_address(self.address)

        def back() -> None:
            if not self._left:
                free.append(self)

        weakref.finalize(lent, back).atexit = False
        return torch.frombuffer(lent, dtype=torch.uint8)

    def leave(self) -> None:
        """Nothing else is written here: somebody out of sight may read it."""
        self._left = True


_FILES: weakref.WeakValueDictionary[int, _MemoryFile] = weakref.WeakValueDictionary()  # by where they are mapped


def _home(tensors: Iterable[Tensor]) -> _MemoryFile | None:
    """The file in which all of these tensors lie, if there is one."""
    found = {tensor.untyped_storage().data_ptr() if tensor.is_contiguous() else 0 for tensor in tensors}
    return _FILES.get(found.pop()) if len(found) == 1 else None
