"""Shared memory: versions lie where the learner wrote them, and nobody writes there while somebody may read."""

from __future__ import annotations

import gc
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from models import tiny
from refit_parts import payload
from test_refit_channel import same
from torch import Tensor

from trtl_rl.kernels.kernel_set import KernelSet
from trtl_rl.model.bind import TrainableDecoder
from trtl_rl.refit.channel import Channel, Receiver, open_channel
from trtl_rl.refit.manifest import Bucket, Manifest, buckets, tensor_digest
from trtl_rl.refit.shared_memory import VersionMemory


def version(seed: int) -> Bucket:
    return Bucket({**payload(seed), "z.large": random_bytes(100_000, seed)})


def random_bytes(count: int, seed: int) -> torch.Tensor:
    return torch.randint(256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def manifest(bucket: Bucket) -> Manifest:
    return Manifest.of(bucket.tensors, 1, "recipe")


def test_a_whole_version_stays_where_it_was_packed_until_the_next_but_one() -> None:
    """Versions that never went live, and changes in between, included: a receiver that kept it anyway loses nothing."""
    with both_ends() as (channel, receiver):
        whole_versions(channel, receiver)


@contextmanager
def both_ends() -> Iterator[tuple[Channel, Receiver]]:
    ours, theirs = socket.socketpair()
    channel = open_channel("shared_memory", ours)
    try:
        yield channel, Receiver(theirs.makefile("rb", buffering=0))
    finally:
        channel.close()
        ours.close()
        theirs.close()


def whole_versions(channel: Channel, receiver: Receiver) -> None:
    def begin(bucket: Bucket, whole: bool = True) -> Bucket:
        channel.begin(manifest(bucket), whole)
        return receiver.receive(channel.pack(bucket))

    first, failed, second, third = (version(seed) for seed in range(4))
    live = begin(first)
    channel.finished()
    assert live.stays
    for attempt in (failed, second):  # the first of them is given up, or went live without the sender's knowledge
        taken = begin(attempt)
        same(live, first)
        same(taken, attempt)
    channel.finished()
    small = Bucket({"a": torch.arange(9, dtype=torch.uint8)}, frozenset({"a"}))
    for _ in range(3):
        assert not begin(small, whole=False).stays
        channel.finished()
    again = begin(third)
    same(taken, second)
    same(again, third)
    kept = begin(failed)  # given up once more: the one before it may be live
    same(again, third)
    same(kept, failed)
    same(taken, second)
    channel.close()
    same(kept, failed)  # also when the sender is gone


def test_two_whole_versions_take_turns_in_two_files() -> None:
    paths = []
    with both_ends() as (channel, _):
        for seed in range(4):
            bucket = version(seed)
            channel.begin(manifest(bucket), True)
            about = [channel.pack(part) for part in buckets(bucket.tensors, 60_000)]
            assert len({part["path"] for part in about}) == 1 and len(about) > 1
            paths.append(about[0]["path"])
            channel.finished()
    assert paths[0] == paths[2] != paths[1] == paths[3]


def written(bucket: Bucket, memory: VersionMemory) -> Bucket:
    """As a learner writes a version."""
    kept = memory.take((name, tensor.dtype, tuple(tensor.shape)) for name, tensor in bucket.tensors.items())
    return Bucket({name: kept[name].copy_(tensor) for name, tensor in bucket.tensors.items()})


def where(bucket: Bucket) -> int:
    return next(iter(bucket.tensors.values())).untyped_storage().data_ptr()


def test_memory_is_used_again_when_nobody_holds_a_tensor_of_it() -> None:
    memory = VersionMemory()
    first = written(version(0), memory)
    place, one = where(first), first.tensors["z.large"][10:20]
    second = written(version(1), memory)
    assert where(second) != place
    same(first, version(0))
    del first
    third = written(version(2), memory)
    assert where(third) != place, "a view of the first version is left"
    assert torch.equal(one, version(0).tensors["z.large"][10:20])
    del one
    fourth = written(version(3), memory)
    assert where(fourth) == place
    same(second, version(1))
    same(third, version(2))
    same(fourth, version(3))
    larger = written(Bucket({"a": torch.ones(10**6)}), memory)
    assert torch.equal(larger.tensors["a"], torch.ones(10**6))


def test_a_version_is_read_where_the_learner_wrote_it_and_kept_from_being_overwritten() -> None:
    memory = VersionMemory()
    places = []
    with both_ends() as (channel, receiver):
        live: Bucket | None = None
        for seed in range(5):
            bucket = written(version(seed), memory)
            channel.begin(manifest(bucket), True)
            found = [receiver.receive(channel.pack(part)) for part in buckets(bucket.tensors, 60_000)]
            assert all(part.stays for part in found)
            taken = Bucket({name: tensor for part in found for name, tensor in part.tensors.items()})
            same(taken, version(seed))
            if live is not None:
                same(live, version(seed - 1))
            channel.finished()
            bucket.tensors["z.large"][0] ^= 1
            assert taken.tensors["z.large"][0] == bucket.tensors["z.large"][0], "both are the same memory"
            bucket.tensors["z.large"][0] ^= 1
            live = taken
            places.append(where(bucket))
    assert len(set(places)) == 2, "the live version and the next"


def test_what_a_receiver_may_have_taken_is_never_written_again() -> None:
    memory = VersionMemory()
    with both_ends() as (channel, receiver):
        given_up = written(version(0), memory)
        channel.begin(manifest(given_up), True)
        taken = receiver.receive(channel.pack(given_up))
        del given_up
        for seed in range(1, 5):
            bucket = written(version(seed), memory)
            channel.begin(manifest(bucket), True)
            channel.pack(bucket)
            channel.finished()
        same(taken, version(0))


def test_what_lies_here_and_there_is_copied_together() -> None:
    memory = VersionMemory()
    with both_ends() as (channel, receiver):
        one, other = written(version(0), memory), version(0)
        mixed = Bucket({**one.tensors, "z.large": other.tensors["z.large"]})
        channel.begin(manifest(mixed), True)
        taken = receiver.receive(channel.pack(mixed))
        channel.finished()
        same(taken, version(0))
        one.tensors[next(iter(one.tensors))].zero_()
        same(taken, version(0))


def test_a_learner_writes_the_same_version_there_as_anywhere_and_closes_what_it_used() -> None:
    decoder = TrainableDecoder(tiny("qwen3"), KernelSet(False, backward=True), 32)
    expected = {name: tensor_digest(tensor) for name, tensor in decoder.refresh(0).items()}
    gc.collect()
    files = len(os.listdir("/proc/self/fd"))
    decoder.memory = VersionMemory()
    held: list[dict[str, Tensor]] = []
    for number in range(6):
        held = [*held[-1:], decoder.refresh(number)]
        assert {name: tensor_digest(tensor) for name, tensor in held[-1].items()} == expected
        assert len({tensor.untyped_storage().data_ptr() for tensor in held[-1].values()}) == 1
    assert len(os.listdir("/proc/self/fd")) == files + 3, "one before, one now, one that is written meanwhile"
    held.clear()
    decoder.memory, decoder.snapshot = None, {}
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == files
