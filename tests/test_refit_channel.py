from __future__ import annotations

import contextlib
import io
import itertools
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from demo import EOS, PROMPT, ask, drain, load, make_decoder, make_engine
from refit_parts import WEIGHT, edited, payload
from torch import Tensor

from trtl_rl.config import load_config
from trtl_rl.engines.host import HostedEngine
from trtl_rl.errors import EngineError, UserError
from trtl_rl.kernels.kernel_set import KernelSet
from trtl_rl.model.bind import TrainableDecoder
from trtl_rl.refit.channel import ChannelName, Receiver, open_channel
from trtl_rl.refit.manifest import Bucket, Manifest, buckets, tensor_bytes
from trtl_rl.refit.sender import Sent, send
from trtl_rl.refit.stream import read_frame, write_frame
from trtl_rl.rollout import Completion

CHANNELS: list[ChannelName] = ["shared_memory", "stream"]


def same(found: Bucket, bucket: Bucket) -> None:
    assert list(found.tensors) == list(bucket.tensors) and found.packed == bucket.packed
    for name, tensor in bucket.tensors.items():
        assert found.tensors[name].dtype == tensor.dtype and found.tensors[name].shape == tensor.shape
        assert torch.equal(tensor_bytes(found.tensors[name]).cpu(), tensor_bytes(tensor).cpu()), name


def odd_buckets() -> list[Bucket]:
    """Empty, scalar, transposed, large, NaN; and one that is packed."""
    odd = torch.tensor([float("nan"), float("inf"), -0.0, 1e-45])
    extras = (torch.zeros(3), torch.zeros(0), odd, torch.randn(70_000), torch.tensor(2.5))
    out = [
        Bucket({**payload(seed), "b.transposed": torch.randn(5, 3).t(), "a.odd": extra})
        for seed, extra in enumerate(extras)
    ]
    return [*out, Bucket({"a": torch.arange(7, dtype=torch.uint8), "b": torch.ones(3)}, frozenset({"a"})), Bucket({})]


def carry(name: ChannelName, sent: list[Bucket]) -> None:
    ours, theirs = socket.socketpair()
    channel, receiver = open_channel(name, ours), Receiver(theirs.makefile("rb", buffering=0))
    try:
        for bucket in sent:
            about = channel.pack(bucket)
            pushing = threading.Thread(target=channel.push, args=(bucket,))
            pushing.start()
            same(receiver.receive(about), bucket)
            pushing.join()
    finally:
        channel.close()
        ours.close()
        theirs.close()


@pytest.mark.parametrize("name", CHANNELS)
def test_a_channel_keeps_bits_and_grows(name: ChannelName) -> None:
    carry(name, odd_buckets())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; a handle opens in another process only")
def test_memory_of_a_gpu_keeps_bits_in_another_process() -> None:
    from multiprocessing import get_context

    from trtl_rl.refit.cuda_ipc import CudaIpcSender

    channel, context = CudaIpcSender(), get_context("spawn")
    try:
        for bucket in odd_buckets()[:-1]:
            ours, theirs = context.Pipe()
            child = context.Process(target=receive_elsewhere, args=(channel.pack(bucket), theirs))
            child.start()
            assert ours.poll(60)
            found = {name: bytes(data) for name, data in ours.recv().items()}
            child.join()
            assert found == {name: bytes(tensor_bytes(tensor).numpy()) for name, tensor in bucket.tensors.items()}
    finally:
        channel.close()


def receive_elsewhere(about: dict[str, object], connection: object) -> None:
    from trtl_rl.refit.cuda_ipc import unpack

    found = unpack(about).tensors
    connection.send({name: bytes(tensor_bytes(x).cpu().numpy()) for name, x in found.items()})  # type: ignore[attr-defined]


def test_a_bucket_stays_as_it_was_while_the_next_one_is_packed() -> None:
    ours, theirs = socket.socketpair()
    channel, receiver = open_channel("shared_memory", ours), Receiver(theirs.makefile("rb", buffering=0))
    parts = [Bucket({"a": torch.full((1000,), float(i))}) for i in range(6)]
    found = receiver.receive(channel.pack(parts[0]))
    for before, bucket in itertools.pairwise(parts):
        about = channel.pack(bucket)
        same(found, before)  # an engine may still read it
        found = receiver.receive(about)
    channel.close()
    ours.close()
    theirs.close()


def test_frames_travel_in_any_file_and_a_cut_one_is_an_error() -> None:
    file, sent = io.BytesIO(), odd_buckets()
    for bucket in sent:
        write_frame(file.write, bucket)
    data = file.getvalue()
    back = io.BytesIO(data)
    for bucket in sent:
        same(read_frame(back), bucket)
    for end in (0, 3, 8, 60, 2000, 60_000):
        with pytest.raises(EOFError):
            read_frame(io.BytesIO(data[:end]))
    with pytest.raises(EOFError, match="no frame"):
        read_frame(io.BytesIO(b"\xff" * 100))


def test_memory_of_a_gpu_is_refused_without_one() -> None:
    with pytest.raises(UserError, match=r"refit\.channel=cuda_ipc needs device=cuda"):
        load_config(None, ["refit.channel=cuda_ipc"])
    with pytest.raises(UserError, match=r"refit\.mode"):
        load_config(None, ["refit.mode=some"])
    assert load_config(None, ["refit.channel=stream"]).refit_mode == "delta"
    assert load_config(None).refit_mode == load_config(None, ["refit.mode=full"]).refit_mode == "full"
    assert load_config(None, ["refit.mode=delta"]).refit_mode == "delta"


# --- through the child of a host ---


@pytest.fixture(scope="module")
def decoder() -> TrainableDecoder:
    return make_decoder()


@pytest.fixture
def host(tmp_path: Path, decoder: TrainableDecoder) -> Iterator[Callable[..., HostedEngine]]:
    """Makes configured engines at version 0, and ends them whatever the test did to them."""
    made: list[HostedEngine] = []

    def make(channel: ChannelName = "shared_memory", **limits: int) -> HostedEngine:
        log = tmp_path / f"engine{len(made)}.log"
        engine = HostedEngine(log, threads=1, timeout=60, refit_timeout=60, channel=channel)
        made.append(engine)
        sizes = {"slots": 4, "context": 64, **limits}
        engine.configure(decoder.description.to_json(), KernelSet(False).identity, False, stop_ids=[EOS], **sizes)
        load(engine, decoder)
        return engine

    yield make
    for engine in made:
        engine.close()


def changed(decoder: TrainableDecoder, seed: int) -> dict[str, Tensor]:
    return {
        name: tensor if tensor.dtype == torch.float32 else edited(tensor, 0.05, seed)
        for name, tensor in decoder.snapshot.items()
    }


def collect(engine: HostedEngine, count: int) -> list[Completion]:
    done: list[Completion] = []
    end = time.monotonic() + 30
    while len(done) < count:
        assert time.monotonic() < end, f"{len(done)} of {count}"
        done += engine.poll(0.1)
    return sorted(done, key=lambda item: (item.request_id, item.sample))


@pytest.mark.parametrize("channel", CHANNELS)
def test_a_hosted_engine_generates_while_it_is_refitted(
    host: Callable[..., HostedEngine], decoder: TrainableDecoder, channel: ChannelName
) -> None:
    engine = host(channel, context=2048)
    coverage = decoder.description.coverage.digest
    tensors = changed(decoder, 1)
    manifest = Manifest.of(tensors, 1, coverage)
    engine.begin_refit(manifest)
    parts = list(buckets(tensors, 2**16))
    for part in parts[:-1]:
        engine.write(part)
    # open, and not yet whole: the version before answers
    here = make_engine(decoder, slots=4)
    load(here, decoder)
    assert engine.probe([ask(-1, samples=2)]) == here.probe([ask(-1, samples=2)])
    here.submit([ask(1, samples=3)])
    engine.submit([ask(1, samples=3)])
    assert collect(engine, 3) == drain(here)
    # what has begun goes on under the next version, and says so
    engine.submit([ask(2, [7], samples=1, new=2000, greedy=False, seed=(0, 2, 0))])
    engine.write(parts[-1])
    result = engine.finish_refit()
    assert (result.version, result.digest) == (1, manifest.digest) and engine.version == 1
    # what starts afterwards never meets a key of an older version
    send(here, tensors, version=1, coverage=coverage, bucket_bytes=2**20)
    for i in range(4):
        request = ask(10 + i, PROMPT[: 3 + i % 3], samples=2, new=12)
        here.submit([request])
        engine.submit([request])
    engine.cancel([2])
    done = collect(engine, 9)
    assert [item for item in done if item.request_id >= 10] == drain(here)
    (long,) = [item for item in done if item.request_id == 2]
    assert long.version_last == 1 and (long.version_first == 0 or not long.ids)
    # changes alone, then a base that it does not hold
    report = send(
        engine, changed(decoder, 2), version=2, coverage=coverage, bucket_bytes=2**16, mode="delta",
        previous=Sent(tensors, manifest),
    )  # fmt: skip
    assert report.bytes < 0.3 * sum(tensor.nbytes for tensor in tensors.values())
    report = send(
        engine, tensors, version=3, coverage=coverage, bucket_bytes=2**16, mode="delta", previous=Sent(tensors, manifest)
    )  # fmt: skip
    assert report.bytes == sum(tensor.nbytes for tensor in tensors.values())
    assert report.pause <= report.finish
    # an abort in the middle of everything
    engine.begin_refit(manifest)
    engine.write(parts[0])
    engine.abort_refit()
    assert engine.probe([ask(-2)])[0].version_last == 3


@pytest.mark.parametrize("channel", CHANNELS)
def test_a_fault_in_a_bucket_is_told_and_the_next_refit_succeeds(
    host: Callable[..., HostedEngine], decoder: TrainableDecoder, channel: ChannelName
) -> None:
    engine = host(channel)
    coverage = decoder.description.coverage.digest
    name = next(iter(decoder.snapshot))
    wrong = {**decoder.snapshot, name: decoder.snapshot[name] * 2}
    engine.begin_refit(Manifest.of(decoder.snapshot, 1, coverage))
    with pytest.raises(EngineError, match=f"{name}: its bytes are not those"):
        for part in buckets(wrong, 2**16):
            engine.write(part)
        engine.finish_refit()
    engine.abort_refit()
    send(engine, changed(decoder, 3), version=1, coverage=coverage, bucket_bytes=2**16)
    assert engine.version == 1


@pytest.mark.parametrize("channel", CHANNELS)
def test_a_stopped_child_ends_a_refit_in_time(tmp_path: Path, decoder: TrainableDecoder, channel: ChannelName) -> None:
    engine = HostedEngine(tmp_path / "engine.log", threads=1, timeout=60, refit_timeout=1.5, channel=channel)
    with contextlib.suppress(EngineError):
        engine.coverage()  # it is not configured, but it has started
    os.kill(engine.process_id, signal.SIGSTOP)
    while Path(f"/proc/{engine.process_id}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.01)
    begun = time.monotonic()
    large = {WEIGHT: torch.zeros(64 * 2**20, dtype=torch.uint8)}
    with pytest.raises(EngineError, match=r"did not answer '(write|decode_refit)' within 1\.5 s"):
        engine.write(Bucket(large))
        engine.finish_refit()
    with pytest.raises(EngineError, match=r"did not answer 'abort_refit' within 1.5 s"):
        engine.abort_refit()
    assert time.monotonic() - begun < 10
    os.kill(engine.process_id, signal.SIGCONT)
    engine.close()


def test_a_killed_child_ends_a_refit_at_once(host: Callable[..., HostedEngine], decoder: TrainableDecoder) -> None:
    engine = host("stream")
    engine.begin_refit(Manifest.of(decoder.snapshot, 1, decoder.description.coverage.digest))
    os.kill(engine.process_id, signal.SIGKILL)
    with pytest.raises(EngineError, match=r"engine died \(its process ended with status -9\)|is gone"):
        for part in buckets(decoder.snapshot, 2**14):
            engine.write(part)
        engine.finish_refit()
    with pytest.raises(EngineError, match="died"):
        engine.abort_refit()
    engine.close()
