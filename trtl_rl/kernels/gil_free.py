"""Calls a compiled unit without Python's lock, so that another thread of the process works meanwhile.

torch's loader of packages holds the lock for as long as a unit computes; a thread that decodes weights beside generation would
wait for a whole unit at every small step. The package's shared library has a C interface of its own
(``torch/csrc/inductor/aoti_runtime/interface.h``), and ``ctypes`` calls that without the lock. It is the same machine code, so the
bits are the same; a call costs some 25 µs more.
"""

from __future__ import annotations

import ctypes
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor


def load_gil_free(path: Path) -> Callable[[list[Tensor]], list[Tensor]] | None:
    """A package's call, or None when it needs torch's own loader for operators that the C interface does not have."""
    with zipfile.ZipFile(path) as package, tempfile.TemporaryDirectory() as scratch:
        names = package.namelist()
        (library_name,) = [name for name in names if name.endswith(".wrapper.so")]
        if any(name.endswith("extern_kernel_nodes.json") for name in names):
            return None
        library = ctypes.CDLL(package.extract(library_name, scratch))  # stays mapped without its file
    container, count = ctypes.c_void_p(), ctypes.c_size_t()
    _check(library.AOTInductorModelContainerCreateWithDevice(ctypes.byref(container), ctypes.c_size_t(1), b"cpu", None))
    _check(library.AOTInductorModelContainerGetNumOutputs(container, ctypes.byref(count)))
    call, outputs = library.AOTInductorModelContainerRunSingleThreaded, count.value

    def run(inputs: list[Tensor]) -> list[Tensor]:
        # The call takes the inputs' handles away, and gives those of new outputs.
        handles = torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors(inputs)
        given = (ctypes.c_void_p * len(handles))(*[_pointer(handle, None) for handle in handles])
        made = (ctypes.c_void_p * outputs)()
        _check(call(container, given, ctypes.c_size_t(len(handles)), made, ctypes.c_size_t(outputs), None, None))
        return torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs([_capsule(at, None, None) for at in made])

    return run


def _check(status: int) -> None:
    if status:
        raise RuntimeError("A compiled operator failed; its message is above.")


_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype, _capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
