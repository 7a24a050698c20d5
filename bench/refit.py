"""Refits: moving one beside a plain copy, the engine's pause, deltas after real RL steps, growing models, and checkpoints.

    python bench/refit.py MODEL_DIRECTORY GSM8K_TRAIN.jsonl [--parts moving generating growing] [--largest 1000]

MODEL_DIRECTORY holds SmolLM2-135M (``bench/prepare_smollm2.py``). What is compared is taken in turns in one run, one thread for
each process, medians of five; times are ratios to one copy of the same bytes between two buffers that were used before.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, machine, write_result
from refit_models import Tensors, changed, grown, in_shared_memory, random_version
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from trtl_rl.config_parts import LossConfig, OptimizerConfig
from trtl_rl.engines.host import MEMORY, HostedEngine
from trtl_rl.engines.torch_engine.engine import TorchEngine
from trtl_rl.flops.formulas import ModelShape
from trtl_rl.kernels.kernel_set import KernelSet, find_compiler
from trtl_rl.losses.loss import make_loss
from trtl_rl.model.bind import TrainableDecoder
from trtl_rl.model.description import DecoderDescription
from trtl_rl.model.weights import SCALE_SUFFIX, DecoderWeights, tensor_specs
from trtl_rl.recipe.recipe import Recipe
from trtl_rl.refit import delta
from trtl_rl.refit.channel import Receiver
from trtl_rl.refit.manifest import Bucket, Manifest, buckets
from trtl_rl.refit.receiver import RefitReceiver
from trtl_rl.refit.sender import Sent, choose, send
from trtl_rl.refit.shared_memory import SharedMemorySender, VersionMemory
from trtl_rl.rollout import Group, Prompt, Request, Sampling
from trtl_rl.trainer.learner import Learner

REPEATS = 5
PARTS = ["moving", "generating", "growing"]
BUCKET = 16 * 2**20  # the default of refit.bucket_bytes


def turns(works: Mapping[str, Callable[[], float]], repeats: int = REPEATS) -> dict[str, list[float]]:
    """Seconds that each work says it took, taken in turns after two rounds that do not count."""
    taken: dict[str, list[float]] = {name: [] for name in works}
    for round in range(repeats + 2):
        for name, work in works.items():
            seconds = work()
            if round >= 2:
                taken[name].append(seconds)
    return taken


def timed(work: Callable[[], object]) -> Callable[[], float]:
    """The same work, which says how many seconds it took."""

    def run() -> float:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    return run


def ratios(taken: Mapping[str, list[float]], base: str) -> dict[str, Any]:
    """Medians, their spread, and what they are against ``base``."""
    medians = {name: statistics.median(values) for name, values in taken.items()}
    return {
        "ms": {name: round(value * 1e3, 2) for name, value in medians.items()},
        "ms_min_max": {name: [round(1e3 * f(v), 2) for f in (min, max)] for name, v in taken.items()},
        "against_copy": {name: round(value / medians[base], 2) for name, value in medians.items()},
    }


def size(tensors: Mapping[str, Tensor]) -> int:
    """In bytes."""
    return sum(tensor.nbytes for tensor in tensors.values())


def copying(tensors: Tensors, into: Tensors) -> Callable[[], float]:
    """One copy of the same bytes."""
    return timed(lambda: [into[name].copy_(tensor) for name, tensor in tensors.items()])


def through_a_checkpoint(tensors: Tensors, into: Tensors, directory: Path) -> Callable[[], float]:
    """Write a safetensors file and read every byte of it; not synced, so that it is the page cache that is timed."""
    path = directory / "model.safetensors"

    def work() -> None:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
        for name, tensor in load_file(path).items():
            into[name].copy_(tensor)

    return timed(work)


def deliver(
    new: Tensors,
    before: Sent,
    mode: str,
    begin: Callable[[Manifest], bool],
    write: Callable[[Bucket], None],
    opened: Callable[[Manifest, bool], None] = lambda manifest, whole: None,
) -> Sent:
    """As ``send`` does, up to the last bucket."""
    manifest = Manifest.of(new, before.manifest.version + 1, before.manifest.coverage)
    base = before.manifest.digest if mode == "delta" else None
    takes_changes = begin(replace(manifest, base=base))
    opened(manifest, not takes_changes)
    chosen, _ = choose(new, manifest, before if takes_changes else None)
    for bucket in buckets(chosen.tensors, BUCKET, chosen.packed):
        write(bucket)
    return Sent(new, manifest)


# --- one model through a child ---


def moving(old: Tensors, new: Tensors, description: DecoderDescription, scratch: Path) -> dict[str, Any]:
    """Full and delta to an idle child, until the child has checked the last bucket; decoding and the swap are not in it.

    A learner writes its versions into shared memory (what that costs is in ``quantising``), where the child reads them;
    ``elsewhere`` is what becomes of versions that lie in other memory.
    """
    coverage = description.coverage.digest
    memory = VersionMemory()
    shared = [in_shared_memory(tensors, memory) for tensors in (old, new)]
    result: dict[str, Any] = {"bytes": size(new)}
    into = {name: torch.empty_like(tensor) for name, tensor in new.items()}
    works: dict[str, Callable[[], float]] = {
        "one copy": copying(new, into),
        "digests, one side": timed(lambda: Manifest.of(new, 1, coverage)),
        "safetensors": through_a_checkpoint(new, into, scratch),
        "pack a delta": timed(lambda: [delta.pack(tensor, old[name]) for name, tensor in new.items()]),
    }
    engines = []
    for channel in ("shared_memory", "stream"):
        engine = HostedEngine(scratch / f"{channel}.log", threads=1, timeout=600, refit_timeout=600, channel=channel)  # type: ignore[arg-type]
        engines.append(engine)
        sizes = {"slots": 1, "context": 64, "stop_ids": []}
        engine.configure(description.to_json(), KernelSet(False).identity, False, **sizes)
        # What the child is at: the old and the new version by turns.
        live = [send(engine, old, version=0, coverage=coverage, bucket_bytes=BUCKET).sent]

        def work(
            mode: str, versions: Sequence[Tensors] = (old, new), engine: HostedEngine = engine, live: list[Sent] = live
        ) -> float:
            tensors = versions[live[0].manifest.version % 2 == 0]
            start = time.perf_counter()
            sent = deliver(tensors, live[0], mode, engine.begin_refit, engine.write)
            engine._line.await_write()
            seconds = time.perf_counter() - start
            engine.finish_refit()
            live[0] = sent
            return seconds

        if channel == "shared_memory":
            works["full"] = lambda work=work: work("full", shared)  # type: ignore[misc]
        works[f"full, elsewhere, {channel}"] = lambda work=work: work("full")  # type: ignore[misc]
        works[f"delta, {channel}"] = lambda work=work: work("delta")  # type: ignore[misc]
    try:
        return {**result, **ratios(turns(works), "one copy")}
    finally:
        for engine in engines:
            engine.close()


# --- the pause ---


def pausing(versions: list[Tensors], description: DecoderDescription) -> dict[str, Any]:
    """Gaps between steps of an engine that decodes new versions beside generation, as the child of a host does."""
    kernels = KernelSet(find_compiler() is not None)
    engine = TorchEngine(description, kernels, slots=8, context=4096, stop_ids=[])
    coverage = description.coverage.digest
    send(engine, versions[0], version=0, coverage=coverage, bucket_bytes=BUCKET)
    engine.submit([Request(0, [5, 6, 7], 8, Sampling(1.0, 4000), (0, 0, 0))])

    def steps(until: Callable[[], bool]) -> list[float]:
        gaps, last = [], time.perf_counter()
        while not until():
            engine.step()
            gaps.append((now := time.perf_counter()) - last)
            last = now
        return gaps

    def arrive(tensors: Tensors, version: int) -> None:
        engine.begin_refit(Manifest.of(tensors, version, coverage))
        for bucket in buckets(tensors, BUCKET):
            engine.write(bucket)
        engine.refit.decode()

    rows = []
    for version in range(1, 3 + REPEATS):
        count = iter(range(12))
        quiet = steps(lambda count=count: next(count, None) is None)  # type: ignore[misc]
        thread = threading.Thread(target=arrive, args=(versions[version % len(versions)], version))
        kernels.gil_free = True
        thread.start()
        beside = steps(lambda thread=thread: not thread.is_alive())  # type: ignore[misc]
        kernels.gil_free = False
        start = time.perf_counter()
        result = engine.finish_refit()
        engine.step()
        first = time.perf_counter() - start
        median = statistics.median(quiet)
        rows.append(
            {
                "median_step": median,
                "longest_quiet_step": max(quiet),
                "median_step_beside_a_refit": statistics.median(beside),
                "gap_of_the_swap_less_median": first - median,
                "longest_gap_less_median": max([*beside, first]) - median,
                "swap": result.pause_seconds,
                "decode_beside": result.decode_seconds,
            }
        )
    rows = rows[2:]
    return {f"{name}_ms": round(1e3 * statistics.median(row[name] for row in rows), 2) for name in rows[0]}


# --- deltas after real steps ---


def quantising(decoder: TrainableDecoder) -> dict[str, Any]:
    """A learner's quantising and loading of a version, written into memory of its own and into shared memory."""
    memory = VersionMemory()

    def refresh(memory: VersionMemory | None) -> None:
        decoder.memory = memory
        decoder.refresh(0)

    works = {"own memory": timed(lambda: refresh(None)), "shared memory": timed(lambda: refresh(memory))}
    found = ratios(turns(works), "own memory")
    decoder.memory = None
    return {**found, "against_own": found.pop("against_copy")}


def learning(
    path: str, data: str, steps: int = 5
) -> tuple[list[Tensors], DecoderDescription, list[dict[str, float]], dict[str, Any]]:
    """AdamW steps at lr 1e-6 on GSM8K prompts; the reward is how many digits an answer has, which every model can learn."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    shape, parameters = ModelShape.from_hf_config(model.config), model.num_parameters()
    Recipe.load("fp8_block").apply(model)
    rows = [json.loads(line) for line in Path(data).read_text().splitlines()[: 2 * steps]]
    kernels = KernelSet(find_compiler() is not None, backward=True)
    decoder = TrainableDecoder(model, kernels, 512)
    quantised = quantising(decoder)
    versions = [decoder.refresh(0)]
    d = decoder.description
    optimizer = OptimizerConfig(lr=1e-6)
    learner = Learner(decoder, make_loss(LossConfig()), optimizer, shape=shape, temperature=1.0, steps=steps)
    engine = TorchEngine(d, kernels, slots=16, context=512, stop_ids=[tokenizer.eos_token_id])
    sent = send(engine, versions[0], version=0, coverage=d.coverage.digest, bucket_bytes=BUCKET).sent
    out = []
    for step in range(steps):
        texts = [row["question"] for row in rows[2 * step : 2 * step + 2]]
        groups = [Group(i, step, Prompt(i, 0, tokenizer(text)["input_ids"], text)) for i, text in enumerate(texts)]
        requests = [Request(-1 - i, g.prompt.ids, 4, Sampling(1.0, 48), (0, i, step)) for i, g in enumerate(groups)]
        for completion in engine.probe(requests):
            groups[-1 - completion.request_id].completions.append(completion)
        for group in groups:
            answers = tokenizer.batch_decode([item.ids for item in group.completions])
            group.rewards = [sum(map(str.isdigit, text)) / 10 for text in answers]
        update = learner.update(groups, step)
        versions.append(decoder.refresh(step + 1))
        report = send(
            engine, versions[-1], version=step + 1, coverage=d.coverage.digest, bucket_bytes=BUCKET, mode="delta", previous=sent
        )  # fmt: skip
        sent = report.sent
        out.append(
            {
                "stepped": update.stepped,
                "bytes": report.bytes,
                "share_of_bf16_full": round(report.bytes / (2 * parameters), 5),
                "share_of_fp8_full": round(report.bytes / size(versions[-1]), 5),
                "changed_frac": round(report.changed_frac, 5),
            }
        )
    return versions, d, out, quantised


# --- growing models ---


def growing(like: DecoderDescription, largest: float, scratch: Path) -> list[dict[str, Any]]:
    """Growing models with random weights, up to ``largest`` million parameters."""
    rows = []
    for layers, hidden, vocab in ((4, 128, 2048), (6, 384, 4096), (12, 832, 16384), (15, 2048, 16384)):
        description = grown(like, layers, hidden, vocab)
        shapes = [spec.shape for spec in tensor_specs(description) if not spec.name.endswith(SCALE_SUFFIX)]
        parameters = sum(map(math.prod, shapes))
        if parameters <= largest * 1.1e6:
            rows.append({"parameters": parameters, **at_size(description, scratch)})
            print(rows[-1], flush=True)
    return rows


def at_size(description: DecoderDescription, scratch: Path) -> dict[str, Any]:
    """Both sides in one process, one after the other: digests, packing, checks; and decoding apart."""
    memory = VersionMemory()
    old = in_shared_memory(random_version(description), memory)
    new = in_shared_memory(changed(old, 0.005), memory)
    before = Sent(old, Manifest.of(old, 0, description.coverage.digest))
    target = RefitReceiver(tensor_specs(description), description.coverage.digest)
    ours, theirs = socket.socketpair()  # shared memory needs none
    channel, reader = SharedMemorySender(), Receiver(theirs.makefile("rb"))
    weights = DecoderWeights(description, KernelSet(False))
    target.begin(before.manifest)
    target.write(Bucket(old))
    target.finish()
    live = [before]

    def move(mode: str) -> None:
        def write(bucket: Bucket) -> None:
            target.write(reader.receive(channel.pack(bucket)))

        tensors = old if live[0].tensors is new else new
        live[0] = deliver(tensors, live[0], mode, target.begin, write, channel.begin)
        target.check()
        target.finish()
        channel.finished()

    into = {name: torch.empty_like(tensor) for name, tensor in new.items()}
    works = {
        "one copy": copying(new, into),
        "full": timed(lambda: move("full")),
        "delta of 0.5 %": timed(lambda: move("delta")),
        "decode": timed(lambda: weights.load(new)),
        "safetensors": through_a_checkpoint(new, into, scratch),
    }
    taken = ratios(turns(works), "one copy")
    channel.close()
    ours.close()
    theirs.close()
    per_byte = {name: round(value * 1e6 / size(new), 3) for name, value in taken["ms"].items()}
    return {"bytes": size(new), "ns_per_byte": per_byte, **taken}


def generating(versions: list[Tensors], description: DecoderDescription, scratch: Path) -> dict[str, Any]:
    """:func:`pausing` in a process whose memory is kept as that of a host's child is."""
    for number, tensors in enumerate(versions):
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, scratch / f"{number}.safetensors")
    (scratch / "description.json").write_text(json.dumps(description.to_json()))
    command = [sys.executable, __file__, "--generating", str(scratch)]
    done = subprocess.run(command, env={**os.environ, **MEMORY}, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Measure and write ``results/refit.json``; what other parts have found stays in it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?")
    parser.add_argument("data", nargs="?")
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    parser.add_argument("--largest", type=float, default=1000, help="millions of parameters")
    parser.add_argument("--generating", type=Path, help=argparse.SUPPRESS)
    a = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if a.generating is not None:
        versions = [load_file(path) for path in sorted(a.generating.glob("*.safetensors"))]
        description = DecoderDescription.from_json(json.loads((a.generating / "description.json").read_text()))
        print(json.dumps(pausing(versions, description)))
        return
    path = RESULTS / "refit.json"
    before: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    result = {name: value for name, value in before.items() if name not in machine()}
    versions, description, steps, quantised = learning(a.model, a.data)
    result |= {"model": "SmolLM2-135M, FP8 block scales; codes, scales and the BF16 rest"}
    result |= {"delta_after_steps_at_lr_1e-6": steps, "quantising": quantised}
    with tempfile.TemporaryDirectory() as scratch:
        if "moving" in a.parts:
            result["moving_to_an_idle_child"] = moving(versions[-2], versions[-1], description, Path(scratch))
        if "generating" in a.parts:
            result["generating_meanwhile"] = generating(versions[-3:], description, Path(scratch))
        if "growing" in a.parts:
            result["growing_random_models"] = growing(description, a.largest, Path(scratch))
    write_result("refit", result)


if __name__ == "__main__":
    main()
