"""Rows, and the key/value buffers that they attend to: one layout for training (sequences) and decoding (slots).

Keys and values of a layer lie in one arena of positions. A sequence owns an aligned part of it and uses that part's start
as a block whose length it doubles as it grows, so that short sequences lie densely whatever they may grow to. All blocks of
one length are one tensor, a view of the arena; attention is called once for each length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from trtl_rl.kernels.kernel_set import LayerUnits
from trtl_rl.kernels.spec import KEY_TILE, ROW_TILE

SHORTEST = 128  # positions of the shortest block
_ROWS_APART = 64  # so many rows are worth a call of their own when they need fewer keys
_SCORES = 1 << 20  # of one call, bounding its memory: rows * heads * keys


class HeadShape(Protocol):
    """The part of a ``DecoderDescription`` that says how large a position is."""

    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def key_value_dtypes(self) -> list[torch.dtype]: ...


@dataclass(frozen=True)
class Blocks:
    """Where each sequence's keys and values lie in the arena, and how long its block is now.

    Attributes:
        start: [S] int64, first position; a multiple of the length.
        length: [S] int64.
    """

    start: np.ndarray
    length: np.ndarray

    @classmethod
    def packed(cls, lengths: Sequence[int]) -> Blocks:
        """Blocks for sequences of these lengths that do not grow, one after the other."""
        start, end = [], 0
        sizes = [block_length(n, KEY_TILE) for n in lengths]
        for size in sizes:
            start.append(round_up(end, size))
            end = start[-1] + size
        return cls(np.array(start, np.int64), np.array(sizes, np.int64))

    @property
    def positions(self) -> int:
        """Positions of an arena that holds all of them."""
        return int((self.start + self.length).max())


@dataclass(frozen=True)
class _Sharing:
    """Rows whose blocks have one length.

    Attributes:
        rows: [n] int64; None: all real rows.
        block, position: [n] int64 arrays.
    """

    length: int
    rows: np.ndarray | None
    block: np.ndarray
    position: np.ndarray


@dataclass(frozen=True)
class AttentionCall:
    """Rows that attend in one call.

    Attributes:
        length: Of their blocks.
        rows: [m] int64, m a multiple of the row tile, the last ones repeated; None: all rows in order.
        count: How many of ``rows`` are not repeated.
        block, position: [m] int64.
        window: [W] int64, 0..W-1: the keys that are visited, in whole key tiles.
    """

    length: int
    rows: Tensor | None
    count: int
    block: Tensor
    position: Tensor
    window: Tensor


@dataclass(frozen=True)
class Rows:
    """The tokens of one forward pass, filled up to whole row tiles.

    A row is one token of one sequence at one position: a decode step has one row for each slot, a prefill or a training
    batch has all tokens of its sequences one after the other. Filling rows are never written to buffers.

    Attributes:
        ids, sequence, position: [M] int64, M a multiple of the tile.
        count: Rows that are real.
        cos, sin: [M, head_dim] float32.
        key_index: Where in a layer's arena each number of the rows' keys goes, [count * kv_heads * D] int64.
        value_index: The same for rows of D numbers of the values, [count * kv_heads] int64.
        calls: How they are attended to, once keys and values are stored.
    """

    ids: Tensor
    sequence: Tensor
    position: Tensor
    count: int
    cos: Tensor
    sin: Tensor
    key_index: Tensor
    value_index: Tensor
    calls: tuple[AttentionCall, ...]

    @classmethod
    def make(
        cls,
        ids: np.ndarray,
        sequence: np.ndarray,
        position: np.ndarray,
        blocks: Blocks,
        rope: RopeTables,
        *,
        shape: HeadShape,
        tile: int = ROW_TILE,
    ) -> Rows:
        """Rows of the int64 arrays ``ids``, ``sequence`` (an index into ``blocks``) and ``position`` [n].

        ``tile`` is 8, or 128 for training.
        """
        count = len(ids)
        device = rope.cos.device
        fill = (0, -count % tile)
        index = _places(sequence, position, blocks, shape, device)
        calls = [
            call for sharing in _by_length(sequence, position, blocks) for call in _calls(sharing, shape.heads, device)
        ]
        if len(calls) == 1 and calls[0].rows is None:
            calls = [_filled(calls[0], fill[1])]
        tensors = [torch.from_numpy(x) for x in (ids, sequence, position)]
        if fill[1]:
            tensors = [F.pad(x, fill) for x in tensors]
        padded = [x.to(device) for x in tensors]
        cos, sin = rope.rows(padded[2])
        return cls(padded[0], padded[1], padded[2], count, cos, sin, *index, tuple(calls))


class RopeTables:
    """cos and sin for every position, [positions, head_dim] float32, from the checkpoint's inverse frequencies.

    Tables are made for the longest context asked for, and on the CPU, so that a position has the same bits on both sides.
    """

    def __init__(
        self, inverse_frequencies: Sequence[float], scaling: float, positions: int, device: torch.device | None = None
    ) -> None:
        frequencies = torch.tensor(inverse_frequencies, dtype=torch.float32)
        angles = torch.arange(positions, dtype=torch.float32)[:, None] * frequencies
        angles = torch.cat((angles, angles), -1)
        self.cos, self.sin = (angles.cos() * scaling).to(device), (angles.sin() * scaling).to(device)

    def rows(self, position: Tensor) -> tuple[Tensor, Tensor]:
        return self.cos[position], self.sin[position]


class KeyValueBuffers:
    """Keys and values of all layers: an arena of positions each, of the layer's ``LayerSpec.key_value_dtype``.

    In blocks of length L keys are [blocks, kv_heads, L / 32, D, 32], tiles of 32 keys, and values [blocks, kv_heads, L, D].
    What an earlier occupant left behind a sequence's last position has weight exactly zero.
    """

    def __init__(
        self,
        dtypes: Sequence[torch.dtype],
        positions: int,
        kv_heads: int,
        head_dim: int,
        device: torch.device | None = None,
    ) -> None:
        self.positions = round_up(positions, SHORTEST)
        self._shape = kv_heads, head_dim
        size = self.positions * kv_heads
        self._keys = [torch.zeros(size * head_dim, dtype=dtype, device=device) for dtype in dtypes]
        self._values = [torch.zeros(size, head_dim, dtype=dtype, device=device) for dtype in dtypes]
        self._views: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def view(self, layer: int, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer in blocks of ``length``."""
        if (layer, length) not in self._views:
            heads, d = self._shape
            blocks = self.positions // length
            used = blocks * heads * length
            keys, values = self._keys[layer][: used * d], self._values[layer][:used]
            tiled = keys.view(blocks, heads, length // KEY_TILE, d, KEY_TILE)
            self._views[layer, length] = tiled, values.view(blocks, heads, length, d)
        return self._views[layer, length]

    def attend(self, layer: int, units: LayerUnits, q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> Tensor:
        """Store the rows' keys and values, then attend: q [M, heads, D] → [M, heads * D]."""
        n = rows.count
        dtype = self._keys[layer].dtype
        key, value = k[:n].to(dtype), v[:n].to(dtype)
        # scatter_ would copy all of a bfloat16 tensor
        self._keys[layer].index_copy_(0, rows.key_index, key.reshape(-1))
        self._values[layer].index_copy_(0, rows.value_index, value.reshape(-1, value.shape[-1]))
        if rows.calls[0].rows is None:
            return self._attend(layer, units, q, rows.calls[0])
        out = q.new_zeros(q.shape[0], q.shape[1] * q.shape[2])
        for call in rows.calls:
            assert call.rows is not None
            attended = self._attend(layer, units, q[call.rows], call)
            out.index_copy_(0, call.rows[: call.count], attended[: call.count])
        return out

    def _attend(self, layer: int, units: LayerUnits, q: Tensor, call: AttentionCall) -> Tensor:
        keys, values = self.view(layer, call.length)
        return units.attention([q, keys, values, call.block, call.position, call.window])[0]

    def copy_prefix(self, source: tuple[int, int], targets: Blocks, count: int) -> None:
        """Give blocks the first ``count`` positions of the block ``source`` (start, length): one prefill for a whole group.

        Keys are copied in whole tiles: what lies behind ``count`` is written before a row sees it.
        """
        start, length = source
        tiles = -(-count // KEY_TILE)
        sizes = np.unique(targets.length).tolist()
        indices = [torch.from_numpy(targets.start[targets.length == size] // size) for size in sizes]
        for layer in range(len(self._keys)):
            keys, values = self.view(layer, length)
            # Copies: where all of a block is meant, torch takes it for a part of what is written to.
            key, value = keys[start // length, :, :tiles].clone(), values[start // length, :, :count].clone()
            for size, index in zip(sizes, indices, strict=True):
                keys, values = self.view(layer, size)
                keys[index, :, :tiles] = key
                values[index, :, :count] = value

    def lengthen(self, start: np.ndarray, length: int, longer: int) -> None:
        """Lay out the blocks at ``start`` [n], of ``length``, as blocks of ``longer``; their content stays."""
        before, after = torch.from_numpy(start // length), torch.from_numpy(start // longer)
        for layer in range(len(self._keys)):
            keys, values = self.view(layer, length)
            key, value = keys[before], values[before]  # copies: old and new layout overlap
            keys, values = self.view(layer, longer)
            keys[after, :, : length // KEY_TILE] = key
            values[after, :, :length] = value


def block_length(positions: int, shortest: int = SHORTEST) -> int:
    """The shortest block that holds so many positions: ``shortest`` times a power of two or, of whole tiles, 3/4 of that."""
    power = shortest
    while power < positions:
        power *= 2
    shorter = power // 4 * 3
    return shorter if power > shortest and positions <= shorter and shorter % KEY_TILE == 0 else power


def first_length(positions: int, whole: int) -> int:
    """Length of the block in which a sequence that may fill ``whole`` positions (a block length) starts with ``positions``."""
    length = whole
    while length % 2 == 0 and length // 2 >= max(positions, SHORTEST):
        length //= 2
    return length


def bytes_per_position(shape: HeadShape) -> int:
    """Memory of one position's keys and values in all layers."""
    return 2 * sum(dtype.itemsize for dtype in shape.key_value_dtypes) * shape.kv_heads * shape.head_dim


def positions_within(size: float, shape: HeadShape, slots: int, context: int) -> int:
    """Positions for ``slots`` sequences of ``context`` tokens, or as many as ``size`` bytes hold: below ``block_length(context)``
    not even one sequence fits."""
    return min(int(size / bytes_per_position(shape)), slots * block_length(context))


def round_up(n: int, multiple: int) -> int:
    """The least multiple that is not below ``n``."""
    return -(-n // multiple) * multiple


def _places(
    sequence: np.ndarray, position: np.ndarray, blocks: Blocks, shape: HeadShape, device: torch.device
) -> tuple[Tensor, Tensor]:
    """``Rows.key_index`` and ``Rows.value_index``."""
    length, d = blocks.length[sequence], shape.head_dim
    first = blocks.start[sequence] * shape.kv_heads  # of a block in the arena, in rows of D numbers
    head = first[:, None] + np.arange(shape.kv_heads) * length[:, None]
    tile, lane = np.divmod(position, KEY_TILE)
    keys = ((head + (tile * KEY_TILE)[:, None]) * d + lane[:, None])[..., None] + np.arange(d) * KEY_TILE
    values = head + position[:, None]
    index = [torch.from_numpy(x.reshape(-1)).to(device) for x in (keys, values)]
    return index[0], index[1]


def _by_length(sequence: np.ndarray, position: np.ndarray, blocks: Blocks) -> Iterator[_Sharing]:
    """One entry for each length of blocks."""
    lengths, start = blocks.length[sequence], blocks.start[sequence]
    different = np.unique(lengths).tolist()
    for length in different:
        rows = None if len(different) == 1 else np.flatnonzero(lengths == length)
        chosen = slice(None) if rows is None else rows
        yield _Sharing(length, rows, start[chosen] // length, position[chosen])


def _calls(sharing: _Sharing, heads: int, device: torch.device) -> Iterator[AttentionCall]:
    """Cut rows of one block length where that saves visiting keys, and so that no call holds too many scores."""
    position = sharing.position
    n, largest = len(position), int(position.max()) + 1
    window = round_up(largest, KEY_TILE)
    if sharing.rows is None and (n < 2 * _ROWS_APART or largest <= SHORTEST) and n * heads * window <= _SCORES:
        block, at = torch.from_numpy(sharing.block).to(device), torch.from_numpy(position).to(device)
        yield AttentionCall(sharing.length, None, n, block, at, torch.arange(window, device=device))
        return
    order = np.argsort(position, kind="stable")
    ordered = position[order]
    step = max(SHORTEST, sharing.length // 8)
    begin = 0
    for end in [*(np.flatnonzero(np.diff(ordered // step)) + 1).tolist(), n]:
        if end - begin < _ROWS_APART and end < n:
            continue
        most = _SCORES // (heads * round_up(int(ordered[end - 1]) + 1, KEY_TILE)) // ROW_TILE * ROW_TILE
        for first in range(begin, end, max(most, ROW_TILE)):
            last = min(first + max(most, ROW_TILE), end)
            yield _call(sharing, order[first:last], round_up(int(ordered[last - 1]) + 1, KEY_TILE), device)
        begin = end


def _call(sharing: _Sharing, chosen: np.ndarray, window: int, device: torch.device) -> AttentionCall:
    count = len(chosen)
    index = np.concatenate([chosen, np.repeat(chosen[-1:], -count % ROW_TILE)])
    whole = index if sharing.rows is None else sharing.rows[index]
    rows, block, position = (
        torch.from_numpy(x).to(device) for x in (whole, sharing.block[index], sharing.position[index])
    )
    return AttentionCall(sharing.length, rows, count, block, position, torch.arange(window, device=device))


def _filled(call: AttentionCall, fill: int) -> AttentionCall:
    """The one call of all rows, with those that fill up the last tile."""
    if not fill:
        return call
    block, position = F.pad(call.block, (0, fill)), F.pad(call.position, (0, fill))
    return AttentionCall(call.length, None, call.count, block, position, call.window)
