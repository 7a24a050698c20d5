"""What changed in a tensor since a version that the receiver holds, losslessly packed; and that applied.

A packed change is uint8 [n], in the machine's byte order: 0 or 1 (gaps or bitmap) and the number of changed elements, both int64;
the new elements; then where they are. Elements are compared and stored as bits.

* **gaps**: for each changed element the number of unchanged ones before it, one byte each; 255 says "255, and go on".
* **bitmap**: one bit for each element, where that is shorter: from about every eighth element on.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trtl_rl.refit.manifest import tensor_bytes

_HEADER = 16
_GAPS, _BITMAP = 0, 1
_ESCAPE = 255
_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def changed_elements(new: Tensor, old: Tensor) -> int:
    """How many elements of two tensors of the same dtype and shape differ in any bit."""
    return int(np.count_nonzero(_words(new) != _words(old)))


def pack(new: Tensor, old: Tensor) -> tuple[int, Tensor | None]:
    """Compare tensors of the same dtype and shape.

    Returns:
        How many elements differ, and uint8 [n] from which :func:`apply` makes ``new`` out of ``old``; None instead where the
        whole tensor is no longer than that.
    """
    words = _words(new)
    differs = words != _words(old)
    count = int(np.count_nonzero(differs))
    bitmap = -(-words.size // 8)
    if _HEADER + count * words.itemsize + min(count, bitmap) >= words.nbytes:  # a gap takes at least a byte
        return count, None
    at = np.flatnonzero(differs)
    places, kind = _pack_gaps(np.diff(at, prepend=-1) - 1), _GAPS
    if places.size > bitmap:
        places, kind = np.packbits(differs), _BITMAP
    parts = [np.array([kind, count], np.int64), words[at], places]
    packed = np.concatenate([part.view(np.uint8) for part in parts])
    return count, torch.from_numpy(packed) if packed.nbytes < words.nbytes else None


def apply(old: Tensor, packed: Tensor, out: Tensor) -> None:
    """Make the tensor that was packed in ``out``, which has the dtype and shape of ``old`` and lies in CPU memory.

    Raises:
        ValueError: ``packed`` is no change of such a tensor.
    """
    data = tensor_bytes(packed).cpu().numpy()
    if packed.dtype != torch.uint8 or data.size < _HEADER:
        raise ValueError("it has no header")
    kind, count = (int(value) for value in data[:_HEADER].view(np.int64))
    words = _words(out)
    end = _HEADER + count * words.itemsize
    if kind not in (_GAPS, _BITMAP) or not 0 <= count <= words.size or end > data.size:
        raise ValueError("its header does not fit")
    if kind == _GAPS:
        at = _unpack_gaps(data[end:])
    elif data.size - end == -(-words.size // 8):
        at = np.flatnonzero(np.unpackbits(data[end:], count=words.size))
    else:
        raise ValueError("its bitmap does not fit")
    if at.size != count or (count and at[-1] >= words.size):
        raise ValueError("its places do not fit")
    out.copy_(old)
    words[at] = data[_HEADER:end].view(words.dtype)


def _words(tensor: Tensor) -> NDArray[np.unsignedinteger]:
    """A tensor's elements as unsigned integers [n]: in place for a contiguous one in CPU memory."""
    return tensor_bytes(tensor).cpu().numpy().view(_WORDS[tensor.element_size()])


def _pack_gaps(gaps: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Each gap as ``gap // 255`` bytes of 255, then ``gap % 255``."""
    escapes, rest = np.divmod(gaps, _ESCAPE)
    ends = np.cumsum(escapes + 1) - 1
    out = np.full(int(ends[-1]) + 1 if ends.size else 0, _ESCAPE, np.uint8)
    out[ends] = rest
    return out


def _unpack_gaps(data: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Positions of the changed elements, ascending."""
    last = data != _ESCAPE
    at: NDArray[np.int64] = np.cumsum(data, dtype=np.int64)[last]
    at += np.arange(at.size)
    return at
