"""Where keys and values lie: blocks of an arena, their growth, and which rows attend in one call."""

from __future__ import annotations

import models
import numpy as np
import pytest
import torch

from trtl_rl.engines.torch_engine.slots import Arena
from trtl_rl.model.kv import Blocks, KeyValueBuffers, RopeTables, Rows, block_length, first_length


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def dense(keys: torch.Tensor) -> torch.Tensor:
    """Tiles of keys [blocks, heads, L / 32, D, 32] as [blocks, heads, L, D]."""
    return keys.transpose(3, 4).flatten(2, 3)


def views(buffers: KeyValueBuffers, layer: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = buffers.view(layer, length)
    return dense(keys), values


def filled_buffers() -> tuple[KeyValueBuffers, list[torch.Tensor]]:
    """Two layers of 1,536 positions with random numbers, and a copy of them in blocks of 128."""
    buffers = KeyValueBuffers([torch.float32, torch.bfloat16], 1536, 2, 8)
    for layer in range(2):
        for i, tensor in enumerate(buffers.view(layer, 128)):
            tensor.copy_(random(*tensor.shape, seed=2 * layer + i))
    return buffers, [tensor.clone() for layer in range(2) for tensor in views(buffers, layer, 128)]


@pytest.mark.parametrize("count", [33, 102, 128])
def test_buffers_copy_a_prefix_for_a_whole_group(count: int) -> None:
    buffers, before = filled_buffers()
    buffers.copy_prefix((128, 128), Blocks(np.array([0, 512]), np.array([128, 256])), count)
    after = [tensor for layer in range(2) for tensor in views(buffers, layer, 128)]
    for i, (old, new) in enumerate(zip(before, after, strict=True)):
        copied = count if i % 2 else -(-count // 32) * 32  # whole tiles of keys
        assert torch.equal(new[0, :, :copied], old[1, :, :copied])
        assert torch.equal(new[0, :, copied:], old[0, :, copied:])
        untouched = [1, 2, 3, *range(6, 12)]
        assert torch.equal(new[untouched], old[untouched])
    for layer in range(2):
        for tensor, old in zip(views(buffers, layer, 256), before[2 * layer :], strict=False):
            assert torch.equal(tensor[2, :, :count], old[1, :, :count])


def test_a_block_that_is_lengthened_keeps_its_content_and_its_neighbours() -> None:
    buffers, before = filled_buffers()
    buffers.lengthen(np.array([0, 768]), 128, 256)
    for layer in range(2):
        for new, old in zip(views(buffers, layer, 256), before[2 * layer :], strict=False):
            for block, first in ((0, 0), (3, 6)):
                assert torch.equal(new[block, :, :128], old[first])
        short = views(buffers, layer, 128)
        for new, old in zip(short, before[2 * layer :], strict=False):
            rest = [2, 3, 4, 5, 8, 9, 10, 11]
            assert torch.equal(new[rest], old[rest])


@pytest.mark.parametrize("length", [1, 127, 128, 129, 192, 193, 256, 257, 700, 1025, 16384])
def test_blocks_hold_a_sequence_with_little_room_to_spare_and_start_short(length: int) -> None:
    whole = block_length(length)
    assert length <= whole and (whole == 128 or whole * 3 < length * 5)
    first = first_length(min(length, 50), whole)
    assert 128 <= first < 256 and whole % first == 0 and (whole // first).bit_count() == 1


def test_rows_that_need_few_keys_do_not_visit_many() -> None:
    """And each row is in exactly one call, whose keys reach its position."""
    decoder = models.bind(models.tiny("qwen3"))
    lengths = [2000, 40, 150, 129, 1]
    blocks = Blocks.packed(lengths)
    assert all(start % length == 0 for start, length in zip(blocks.start, blocks.length, strict=True))
    ends = np.sort(np.stack([blocks.start, blocks.start + blocks.length], 1), 0).ravel()
    assert (np.diff(ends) >= 0).all()  # none overlap
    owner, position = np.repeat(np.arange(5), lengths), np.concatenate([np.arange(n) for n in lengths])
    rope = RopeTables(decoder.description.inverse_frequencies, 1.0, 2048)
    rows = Rows.make(np.zeros(len(owner), np.int64), owner, position, blocks, rope, shape=decoder.description)
    seen = torch.cat([call.rows[: call.count] for call in rows.calls if call.rows is not None])
    assert torch.equal(seen.sort().values, torch.arange(len(owner)))
    for call in rows.calls:
        assert call.position.max() < len(call.window) <= call.length
        assert len(call.position) % 8 == 0
    visited = sum(len(call.position) * len(call.window) for call in rows.calls)
    assert visited < 0.65 * (2000 * 2048 + 40 * 128 + 150 * 192 + 129 * 192 + 128)


def test_the_arena_hands_out_every_position_once_and_takes_it_back() -> None:
    """Against a plain map of positions, over many lengths in random order."""
    draw = np.random.default_rng(0)
    arena, owner = Arena(6144), np.zeros(6144, np.int64)
    held: dict[int, tuple[int, int]] = {}
    refused = 0
    for number in range(1, 3000):
        if held and draw.random() < 0.45:
            start, length = held.pop(int(draw.choice(list(held))))
            arena.release(start, length)
            owner[start : start + length] = 0
            continue
        length = block_length(int(draw.integers(1, 1500)))
        start = arena.allocate(length)
        if start is None:
            refused += 1
            free = [(owner[i : i + length] == 0).all() for i in range(0, 6144 - length + 1, length)]
            assert not any(free), "there was room"
            continue
        assert start % length == 0 and not owner[start : start + length].any()
        owner[start : start + length] = number
        held[number] = start, length
    assert refused > 50
    for start, length in held.values():
        arena.release(start, length)
    assert arena.allocate(6144) == 0
