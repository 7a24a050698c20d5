"""A simulation on paper, not a measurement: step times of 8 to 1,024 GPUs from formulas, published figures and assumptions.

::

    rollout   answers of drawn lengths through a roofline of one engine: weights and keys/values from memory, FLOPs of
              ``trtl_rl/flops/formulas.py`` at a share of the peak
    learn     the same formulas' FLOPs of learning and recomputing, at a share of the peak, over the learner's GPUs
    refit     bytes of a version over the links on its way, for four ways of sending it
    step      synchronous: rollout + learn + refit. Asynchronous: the longest of rollout, of learn + refit, and of the time that
              the longest answer may take with ``max_staleness``

The GPUs are divided into engines and learner as makes the step shortest. What a learner of several GPUs needs is assumed: this
project's has one. Nothing here was compared with a run on GPUs.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from statistics import NormalDist
from typing import Any, Literal

from trtl_rl.flops.devices import device_named
from trtl_rl.flops.formulas import ModelShape, head, layers, learning, recompute, rollout

NODE = 8  # GPUs
GPUS = (8, 16, 32, 64, 128, 256, 512, 1024)
Precision = Literal["fp8", "bf16"]
Mode = Literal["sync", "async"]
PRECISIONS: tuple[Precision, ...] = ("fp8", "bf16")
MODES: tuple[Mode, ...] = ("sync", "async")
PATHS = ("store_full", "store_delta", "broadcast_published", "broadcast_bound")


@dataclass(frozen=True)
class Gpu:
    """A GPU in a node of eight.

    Attributes:
        device: Name by which ``trtl_rl/flops/devices.py`` knows its peaks.
        memory, bandwidth: Bytes, and bytes a second.
        nvlink, nic: Bytes a second in one direction.
    """

    name: str
    device: str
    memory: float
    bandwidth: float
    nvlink: float
    nic: float


FLEET = (
    Gpu("H100", "NVIDIA H100 80GB HBM3", 80e9, 3.35e12, 450e9, 50e9),
    Gpu("H200", "NVIDIA H200", 141e9, 4.8e12, 450e9, 50e9),
    Gpu("B200", "NVIDIA B200", 180e9, 8e12, 900e9, 50e9),
)
MODELS = {  # layers, hidden, heads, key/value heads, head size, feed-forward, vocabulary
    "Qwen3-8B": ModelShape(36, 4096, 32, 8, 128, 12288, 151936),
    "Qwen3-32B": ModelShape(64, 5120, 64, 8, 128, 25600, 151936),
}
SOURCES = {
    "peaks": "trtl_rl/flops/devices.py, after NVIDIA's data sheets, dense: H100 and H200 SXM 989.5 TFLOP/s in BF16 and 1,979 in "
    "FP8, B200 2,250 and 4,500",
    "memory": "NVIDIA's data sheets: H100 SXM 80 GB at 3.35 TB/s, H200 SXM 141 GB at 4.8 TB/s, HGX B200 180 GB at 8 TB/s; read "
    "in other pages' copies, not in the sheets; sizes of H200 and B200 also in system descriptions of MLPerf Inference, closed "
    "division: v4.1 H200-SXM-141GBx8, v6.0 nebius_b200_n1",
    "NVLink": "the same: 900 GB/s (Hopper) and 1.8 TB/s (B200) in both directions together, so half of it in one",
    "InfiniBand": "one ConnectX-7 of 400 Gb/s for each of eight GPUs, as in DGX H100 and B200 and in nebius_b200_n1",
    "models": "config.json of Qwen/Qwen3-8B and Qwen/Qwen3-32B: embedding and head are not tied",
    "learner_share_bf16": "38 to 43 % of the BF16 peak on 8,192 to 16,384 H100: The Llama 3 Herd of Models, arXiv 2407.21783",
    "store_out": "Ray's release benchmark: 1 GiB to 50 nodes in 16.94 s, from a machine with 20 Gb/s to ones with up to 10: "
    "ray-project/ray, release/perf_metrics/scalability/object_store.json and release/benchmarks/object_store.yaml",
    "broadcast_seconds, broadcast_rate": "README of MoonshotAI/checkpoint-engine, 256 H20: 11.33 + 0.80 s for DeepSeek-V3.1 in FP8 "
    "(about 689 GB), 16.04 + 1.22 s for Kimi-K2 (about 1,029 GB): the straight line through both",
    "delta_share": "bench/results/refit.json: SmolLM2-135M after AdamW steps at learning rate 1e-6",
    "store_host": "a guess, not measured: refits of the 135 M model to one Ray actor (`scale.py refits`) take its place where "
    "results/scale.json has them",
}


@dataclass(frozen=True)
class Assumptions:
    """Everything that is neither published nor measured, and what this project has measured (``store_*``, ``delta_*``).

    Attributes:
        prompts, samples, prompt_tokens: Of a step, whatever the number of GPUs.
        answer_mean, answer_sigma, answer_limit: Tokens of an answer: log-normal, cut off.
        staleness: ``buffer.max_staleness`` of an asynchronous run.
        memory_share, compute_share: Of bandwidth and peak that an engine reaches.
        engine_overhead: Seconds of a decode step that are neither.
        allreduce: Seconds of one all-reduce beside its bytes, two in each layer with tensor parallelism.
        slots: Most completions at once on one engine.
        engine_memory: Share of a GPU's memory for weights, keys and values; weights get half of it at most.
        learner_share_fp8: Of the FP8 peak, for products of FP8 operands.
        state_bytes: Of the learner for each parameter: master, two moments, gradient, BF16.
        learner_memory: Share of a GPU's memory for them, the rest being activations.
        store_host: Seconds for each byte of a version that the two hosts take, full and delta: digests, comparison, packing, the
            object store, copies and checks, with one thread each.
        delta_share: Bytes of a delta for each byte of an FP8 version.
        store_out: Bytes a second that leave Ray's store for all nodes together.
        pcie: Bytes a second between a GPU and its host.
        broadcast_seconds, broadcast_rate: Of the line through what was published.
        network_share: Of a link that a collective reaches.
    """

    prompts: int = 512
    samples: int = 16
    prompt_tokens: int = 512
    answer_mean: int = 4096
    answer_sigma: float = 0.8
    answer_limit: int = 16384
    staleness: int = 1
    memory_share: float = 0.6
    compute_share: float = 0.5
    engine_overhead: float = 1e-3
    allreduce: float = 15e-6
    slots: int = 256
    engine_memory: float = 0.9
    learner_share_bf16: float = 0.4
    learner_share_fp8: float = 0.3
    state_bytes: int = 18
    learner_memory: float = 0.7
    store_host: tuple[float, float] = (1e-9, 1.7e-9)
    delta_share: float = 0.0083
    store_out: float = 50 * 2**30 / 16.94
    pcie: float = 50e9
    broadcast_seconds: float = 1.7
    broadcast_rate: float = 66e9
    network_share: float = 0.8


@dataclass(frozen=True)
class Row:
    """One step on so many GPUs, seconds of its parts.

    Attributes:
        ranks: GPUs of each engine.
        longest: What the longest answer demands of an asynchronous step: it may last ``staleness + 1`` of them.
    """

    gpus: int
    learners: int
    engines: int
    ranks: int
    rollout: float
    longest: float
    learn: float
    refit: float
    mode: Mode

    @property
    def step(self) -> float:
        if self.mode == "sync":
            return self.rollout + self.learn + self.refit
        return max(self.rollout, self.longest, self.learn + self.refit)

    @property
    def bound(self) -> str:
        """What lasts longest."""
        busy = "learn" if self.learn >= self.refit else "refit"
        parts = {"rollout": self.rollout, "longest answer": self.longest, busy: self.learn + self.refit}
        if self.mode == "sync":
            parts = {"rollout": self.rollout, "learn": self.learn, "refit": self.refit}
        return max(parts, key=lambda name: parts[name])


def answers(a: Assumptions, count: int) -> list[int]:
    """Lengths of ``count`` answers: quantiles of the distribution in the middle of equal parts, shuffled."""
    plain = NormalDist(math.log(a.answer_mean) - a.answer_sigma**2 / 2, a.answer_sigma)
    found = [min(a.answer_limit, max(1, round(math.exp(plain.inv_cdf((i + 0.5) / count))))) for i in range(count)]
    random.Random(0).shuffle(found)
    return found


def version_bytes(shape: ModelShape, precision: Precision, *, tied: bool = False, qk_norm: bool = True) -> int:
    """Of what a refit sends: FP8 codes with a scale for each 128×128, or BF16; embedding, head and norms are BF16."""
    linears, head_tensors = shape.linear_parameters, 1 if tied else 2
    heads = shape.layers * 2 * shape.head_dim if qk_norm else 0
    rest = head_tensors * shape.head_parameters + heads + (2 * shape.layers + 1) * shape.hidden
    if precision == "bf16":
        return 2 * (linears + rest)
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    h, wide = shape.hidden, shape.intermediate
    rows = ((q, h), (kv, h), (kv, h), (h, q), (wide, h), (wide, h), (h, wide))
    scales = shape.layers * sum(math.ceil(n / 128) * math.ceil(k / 128) for n, k in rows)
    return linears + 4 * scales + 2 * rest


class Engine:
    """One rollout engine on ``ranks`` GPUs that share the model.

    Attributes:
        slots: Completions at once for which there is memory; 0 where weights alone take too much of it.
    """

    def __init__(self, gpu: Gpu, shape: ModelShape, precision: Precision, ranks: int, a: Assumptions) -> None:
        self.gpu, self.shape, self.precision, self.ranks, self.a = gpu, shape, precision, ranks, a
        self.weights = version_bytes(shape, precision)
        self.kv = 2 * shape.layers * shape.kv_heads * shape.head_dim * 2  # bytes for each token, BF16
        room = a.engine_memory * gpu.memory * ranks - self.weights
        self.slots = max(0, min(a.slots, int(room / (self.kv * (a.prompt_tokens + a.answer_mean)))))

    def step(self, batch: float, context: float) -> float:
        """Seconds of a decode step of so many completions, each with so many tokens before it on average."""
        a, shape = self.a, self.shape
        read = self.weights - 2 * shape.head_parameters + self.kv * batch * context  # the embedding is not read
        moved = read / (self.ranks * self.gpu.bandwidth * a.memory_share)
        flops = batch * (layers(shape, 1, start=round(context)) + head(shape, 1))
        linears = 2 * shape.linear_parameters * batch if self.precision == "fp8" else 0
        computed = self._compute(flops, linears)
        joined = 0.0
        if self.ranks > 1:
            bytes_each = 2 * batch * shape.hidden * 2 * (self.ranks - 1) / self.ranks  # a ring sends each part twice
            joined = 2 * shape.layers * (a.allreduce + bytes_each / (a.network_share * self.gpu.nvlink))
        return max(moved, computed) + joined + a.engine_overhead

    def prefill(self, prompts: float) -> float:
        """Seconds of so many prompts."""
        flops = layers(self.shape, self.a.prompt_tokens - 1)
        linears = 2 * self.shape.linear_parameters * (self.a.prompt_tokens - 1) if self.precision == "fp8" else 0
        return prompts * self._compute(flops, linears)

    def all_of(self, lengths: list[int]) -> float:
        """Seconds until the last of these answers has ended, with a place taken by the next one at once."""
        waiting = list(reversed(lengths))
        running: list[tuple[int, int]] = []  # a heap of (step of the last token, step of the first)
        now = begun = 0  # steps so far; the sum of the first steps of those that run
        seconds = self.prefill(len(lengths) / self.a.samples)
        while waiting or running:
            while waiting and len(running) < self.slots:
                heapq.heappush(running, (now + waiting.pop(), now))
                begun += now
            end = running[0][0]
            context = self.a.prompt_tokens + (now + end) / 2 - begun / len(running)
            seconds += (end - now) * self.step(len(running), context)
            now = end
            while running and running[0][0] == now:
                begun -= heapq.heappop(running)[1]
        return seconds

    def steady(self, lengths: list[int], in_flight: float) -> float:
        """Seconds for each token of this engine while its places are always taken, prefill included."""
        mean = sum(lengths) / len(lengths)
        context = self.a.prompt_tokens + sum(n * n for n in lengths) / len(lengths) / (2 * mean)  # as seen by a token
        batch = min(self.slots, in_flight)
        return self.step(batch, context) / batch + self.prefill(1 / self.a.samples) / mean

    def _compute(self, flops: float, linears: float) -> float:
        device = device_named(self.gpu.device)
        seconds = device.ideal_seconds(int(flops), int(linears))
        assert seconds is not None
        return seconds / (self.ranks * self.a.compute_share)


@cache
def step_flops(model: str, a: Assumptions) -> tuple[int, int, int]:
    """FLOPs of a step's learning with everything that is computed again; those of them that are products of the layers' linears;
    and of the search for the same answers."""
    shape, lengths = MODELS[model], answers(a, a.prompts * a.samples)
    tokens = sum(a.prompt_tokens + n - 1 for n in lengths)
    p = a.prompt_tokens
    total = sum(learning(shape, p, n) + recompute(shape, p, n, checkpointing=True) for n in lengths)
    groups = [lengths[i :: a.prompts] for i in range(a.prompts)]
    search = sum(rollout(shape, a.prompt_tokens, group) for group in groups)
    return total, 4 * 2 * shape.linear_parameters * tokens, search


def learn_seconds(gpu: Gpu, model: str, precision: Precision, gpus: int, a: Assumptions) -> float:
    """Of one update."""
    total, linears, _ = step_flops(model, a)
    device = device_named(gpu.device)
    assert device.bf16 is not None and device.fp8 is not None
    eight = linears if precision == "fp8" else 0
    high = (total - eight) / (device.bf16 * a.learner_share_bf16)
    return (high + eight / (device.fp8 * a.learner_share_fp8)) / gpus


def refit_seconds(gpu: Gpu, size: int, path: str, engine_gpus: int, a: Assumptions) -> float:
    """From the learner's version to all engines."""
    nodes = math.ceil(engine_gpus / NODE)
    if path == "broadcast_bound":  # each node takes the version in once, over all of its ports, and hands it round
        between = size / (min(engine_gpus, NODE) * gpu.nic) if nodes > 1 else 0.0
        return (between + size / gpu.nvlink) / a.network_share
    if path == "broadcast_published":
        return a.broadcast_seconds + size / a.broadcast_rate
    delta = path == "store_delta"
    sent = size * a.delta_share if delta else size
    return size / a.pcie + a.store_host[delta] * size + nodes * sent / a.store_out + size / a.pcie


def fewest_learners(gpu: Gpu, model: str, a: Assumptions) -> int:
    """GPUs that hold the learner's state."""
    shape = MODELS[model]
    parameters = shape.linear_parameters + 2 * shape.head_parameters
    return math.ceil(a.state_bytes * parameters / (a.learner_memory * gpu.memory))


Key = tuple[str, str, Precision, Mode, str]  # GPU, model, precision, mode, path


def best_split(
    gpu: Gpu, model: str, precision: Precision, mode: Mode, path: str, gpus: int, a: Assumptions
) -> Row | None:
    """The division of so many GPUs, and the GPUs of each engine, whose step is the shortest; None: it does not fit."""
    found: list[Row] = []
    for ranks in (1, 2, 4, 8):
        engine = Engine(gpu, MODELS[model], precision, ranks, a)
        for learners in sorted({round(gpus * i / 16) for i in range(1, 16)} - {0, gpus}):
            engines = (gpus - learners) // ranks
            if not engine.slots or not engines or learners < fewest_learners(gpu, model, a):
                continue
            roll, longest = generation(engine, engines, mode)
            learn = learn_seconds(gpu, model, precision, learners, a)
            refit = refit_seconds(gpu, engine.weights, path, engines * ranks, a)
            found.append(Row(gpus, learners, engines, ranks, roll, longest, learn, refit, mode))
    return min(found, key=lambda row: row.step, default=None)


_generated: dict[tuple[Any, ...], tuple[float, float]] = {}


def generation(engine: Engine, engines: int, mode: Mode) -> tuple[float, float]:
    """Seconds of a step's answers on so many engines; and what the longest answer demands of a step, where steps overlap."""
    a = engine.a
    key = (engine.gpu.name, engine.shape, engine.precision, engine.ranks, engines, mode, a)
    if key not in _generated:
        total = a.prompts * a.samples
        if mode == "sync":
            share = answers(a, math.ceil(total / engines))
            share[share.index(max(share))] = max(answers(a, total))  # on one of the engines is the longest of all
            _generated[key] = engine.all_of(share), 0.0
        else:
            lengths, in_flight = answers(a, total), total * (a.staleness + 1) / engines
            token = engine.steady(lengths, in_flight)
            one = token * min(engine.slots, in_flight) * max(lengths)
            _generated[key] = token * sum(lengths) / engines, one / (a.staleness + 1)
    return _generated[key]


def series(a: Assumptions, fleet: tuple[Gpu, ...] = FLEET) -> Iterator[tuple[Key, list[Row]]]:
    """Every combination, and its rows for all numbers of GPUs on which it fits."""
    for gpu in fleet:
        for model in MODELS:
            for precision in PRECISIONS:
                for mode in MODES:
                    for path in PATHS:
                        if path == "store_delta" and precision == "bf16":
                            continue  # how much of BF16 weights changes was not measured
                        found = [best_split(gpu, model, precision, mode, path, gpus, a) for gpus in GPUS]
                        yield (gpu.name, model, precision, mode, path), [row for row in found if row is not None]


def described(a: Assumptions) -> dict[str, Any]:
    """For the result file: what this is, where figures come from, and what was assumed."""
    lengths = answers(a, a.prompts * a.samples)
    return {
        "what": "a simulation on paper, NOT a measurement: nothing of it was compared with a run on GPUs",
        "sources": SOURCES,
        "assumptions": {**asdict(a), "answer_mean_after_the_limit": round(sum(lengths) / len(lengths))},
        "step_exaflops": {
            model: dict(
                zip(
                    ("learning", "of it in linears", "search"),
                    (round(n / 1e18, 2) for n in step_flops(model, a)),
                    strict=True,
                )
            )
            for model in MODELS
        },
        "version_gigabytes": {
            f"{model} {precision}": round(version_bytes(shape, precision) / 1e9, 2)
            for model, shape in MODELS.items()
            for precision in PRECISIONS
        },
        "paths": {
            "store_full": "as this project does it with refit.mode=full: host memory, Ray's object store, host memory",
            "store_delta": "the same with refit.mode=delta, its default with Ray",
            "broadcast_published": "a broadcast between GPUs with the rate that checkpoint-engine published; not in this project",
            "broadcast_bound": "the least that such a broadcast takes over NVLink and InfiniBand; not in this project",
        },
    }
