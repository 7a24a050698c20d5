"""Rows, and the key/value buffers that they attend to: one layout for training (sequences) and decoding (slots)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from trtl_rl.kernels.kernel_set import LayerUnits
from trtl_rl.kernels.spec import KEY_TILE, ROW_TILE


@dataclass(frozen=True)
class Rows:
    """The tokens of one forward pass, filled up to whole row tiles.

    A row is one token of one sequence at one position: a decode step has one row for each slot, a prefill or a training
    batch has all tokens of its sequences one after the other. Filling rows are never written to buffers.

    Attributes:
        ids, sequence, position: [M] int64, M a multiple of the tile.
        count: Rows that are real.
        cos, sin: [M, head_dim] float32.
        window: [W] int64, 0..W-1: the keys that are visited, in whole key tiles.
    """

    ids: Tensor
    sequence: Tensor
    position: Tensor
    count: int
    cos: Tensor
    sin: Tensor
    window: Tensor

    @classmethod
    def make(cls, ids: Tensor, sequence: Tensor, position: Tensor, rope: RopeTables, tile: int = ROW_TILE) -> Rows:
        """Rows of the int64 tensors ``ids``, ``sequence``, ``position`` [n] in CPU memory, on the device of ``rope``.

        ``tile`` is 32, or 128 for training.
        """
        count = ids.shape[0]
        window = torch.arange(round_up(int(position.max()) + 1, KEY_TILE))
        if count % tile:
            fill = (0, -count % tile)
            ids, sequence, position = F.pad(ids, fill), F.pad(sequence, fill), F.pad(position, fill)
        device = rope.cos.device
        ids, sequence, position, window = (x.to(device) for x in (ids, sequence, position, window))
        cos, sin = rope.rows(position)
        return cls(ids, sequence, position, count, cos, sin, window)


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
    """Keys and values by layer, slot and position: keys [S, kv_heads, D, L], values [S, kv_heads, L, D], float32.

    What an earlier occupant left in a slot lies after the new one's position and has weight exactly zero.
    """

    def __init__(
        self, layers: int, slots: int, kv_heads: int, head_dim: int, length: int, device: torch.device | None = None
    ) -> None:
        length = round_up(length, KEY_TILE)
        self.length = length
        self.keys = [torch.zeros(slots, kv_heads, head_dim, length, device=device) for _ in range(layers)]
        self.values = [torch.zeros(slots, kv_heads, length, head_dim, device=device) for _ in range(layers)]

    def attend(self, layer: int, units: LayerUnits, q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> Tensor:
        """Store the rows' keys and values, then attend: q [M, heads, D] → [M, heads * D]."""
        n = rows.count
        sequence, position = rows.sequence[:n], rows.position[:n]
        self.keys[layer][sequence, :, :, position] = k[:n]
        self.values[layer][sequence, :, position] = v[:n]
        inputs = [q, self.keys[layer], self.values[layer], rows.sequence, rows.position, rows.window]
        return units.attention(inputs)[0]

    def copy_prefix(self, source: int, targets: Sequence[int], length: int) -> None:
        """Give the slots ``targets`` the first ``length`` positions of ``source``: one prefill for a whole group."""
        index = torch.tensor(list(targets))
        for keys, values in zip(self.keys, self.values, strict=True):
            keys[index, :, :, :length] = keys[source, :, :, :length]
            values[index, :, :length] = values[source, :, :length]


def bytes_per_slot(layers: int, kv_heads: int, head_dim: int, length: int) -> int:
    """Memory of one slot's keys and values over ``length`` positions."""
    return 2 * 4 * layers * kv_heads * head_dim * round_up(length, KEY_TILE)


def round_up(n: int, multiple: int) -> int:
    """The least multiple that is not below ``n``."""
    return -(-n // multiple) * multiple
