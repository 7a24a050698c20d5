"""What ``scale.py`` measures: rollout throughput and refit time against the number of engines, as processes and as Ray actors."""

from __future__ import annotations

import contextlib
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import slow_engine
import torch
import transformers
from refit_models import Tensors, changed, in_shared_memory, random_version, sized

from trtl_rl.config import RunConfig, validate_config
from trtl_rl.engines.pool import EnginePool, Engines
from trtl_rl.engines.supervisor import EngineProcess
from trtl_rl.kernels.kernel_set import KernelSet
from trtl_rl.model.bind import TrainableDecoder
from trtl_rl.model.description import DecoderDescription
from trtl_rl.model.source import find_model
from trtl_rl.recipe.recipe import Recipe
from trtl_rl.refit.manifest import Manifest, buckets
from trtl_rl.refit.sender import Mode, Sent, send
from trtl_rl.refit.shared_memory import VersionMemory
from trtl_rl.rollout import Request, Sampling
from trtl_rl.trainer.engine_place import find_place, make_engines

REPLICAS = (1, 2, 4)
HOSTS = ("process", "ray")
SLOTS = 16  # of each engine
STEP = 0.25  # seconds that a slow engine's step lasts
PROMPTS = 8  # for each engine
SAMPLES = 4  # of each prompt
LENGTHS = (24, 72)  # tokens of an answer, uniform over prompts
CONTEXT = 128
CHANGED = 0.0038  # share of codes that a delta changes: what bench/refit.py found after AdamW steps at lr 1e-6
PATIENCE = 1800.0  # seconds, of everything: the machine may be busy
_TICKS = os.sysconf("SC_CLK_TCK")

Host = Literal["process", "ray"]


class Model:
    """A description and two versions of its weights, which lie where a learner writes them."""

    def __init__(self, name: str, description: DecoderDescription, versions: tuple[Tensors, Tensors]) -> None:
        self.name, self.description = name, description
        memory = VersionMemory()
        self.versions = tuple(in_shared_memory(tensors, memory) for tensors in versions)

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.versions[0].values())


def demo() -> Model:
    """The bundled model at its own weights."""
    model = transformers.AutoModelForCausalLM.from_pretrained(find_model("demo").path, dtype=torch.float32)
    Recipe.load("fp8_block").apply(model)
    decoder = TrainableDecoder(model, KernelSet(False, backward=True), CONTEXT)
    tensors = {name: tensor.clone() for name, tensor in decoder.refresh(0).items()}
    return Model("demo", decoder.description, (tensors, changed(tensors, CHANGED)))


def random_model(name: str, like: DecoderDescription, **sizes: Any) -> Model:
    """A model of these sizes with the formats of ``like``, and random weights."""
    description = sized(like, **sizes)
    tensors = random_version(description)
    return Model(name, description, (tensors, changed(tensors, CHANGED)))


def models() -> Iterator[Model]:
    """The demo's, and random ones up to the sizes of SmolLM2-135M; one at a time, since two of them may not fit."""
    first = demo()
    like = first.description
    yield first
    small: dict[str, Any] = {"head_dim": 64, "tied": True}
    yield random_model("1 M", like, layers=4, hidden=128, heads=2, kv_heads=2, intermediate=512, vocab=1024, **small)
    yield random_model("21 M", like, layers=6, hidden=448, heads=7, kv_heads=7, intermediate=1792, vocab=4096, **small)
    yield random_model(
        "135 M", like, layers=30, hidden=576, heads=9, kv_heads=3, intermediate=1536, vocab=49152, **small
    )


@contextlib.contextmanager
def running(model: Model, host: Host, replicas: int, *, compiled: bool, slots: int = SLOTS) -> Iterator[Engines]:
    """So many engines at version 0, as a run makes them."""
    keys: dict[str, Any] = {"engine": {"replicas": replicas, "timeout": PATIENCE}, "refit": {"timeout": PATIENCE}}
    if host == "ray":
        keys["ray"] = {"address": "local", "resources": {"num_cpus": 0.1}}
    config: RunConfig = validate_config(keys)
    description, kernels = model.description, KernelSet(compiled)

    def start(engine: EngineProcess, tensors: Mapping[str, torch.Tensor], version: int, *, restarted: bool) -> None:
        assert not restarted, "an engine failed"
        sizes = {"slots": slots, "context": CONTEXT, "stop_ids": []}
        engine.configure(description.to_json(), kernels.identity, compiled, **sizes)
        _send(engine, model, tensors, version, "full", None)

    with tempfile.TemporaryDirectory() as directory:
        engines = make_engines(
            config, find_place(config, None), Path(directory), lambda level, text: print(level, text)
        )
        try:
            engines.start(start, model.versions[0], 0)
            yield engines
        finally:
            engines.close()


def _send(
    engine: Any, model: Model, tensors: Mapping[str, Any], version: int, mode: Mode, previous: Sent | None
) -> Any:
    return send(
        engine,
        tensors,
        version=version,
        coverage=model.description.coverage.digest,
        bucket_bytes=RunConfig().refit.bucket_bytes,
        mode=mode,
        previous=previous,
    )


# --- rollouts ---


def rollouts(turns: int, keep: Callable[[dict[str, Any]], None]) -> None:
    """Tokens a second of slow engines, all configurations in turns; kept after each of them.

    Args:
        keep: Takes everything so far.
    """
    model = demo()
    KernelSet(True).prepare(
        [model.description.layer_spec(i) for i in range(model.description.layers)], model.description.head_spec()
    )  # engines only load what is compiled
    runs: list[dict[str, Any]] = []
    for _ in range(turns):
        for host in HOSTS:
            for replicas in REPLICAS:
                with running(model, host, replicas, compiled=True) as engines:
                    generate(engines, 2 * replicas, seed=0)  # warm
                    found = generate(engines, replicas * PROMPTS, seed=1)
                load = round(os.getloadavg()[0], 1)
                runs.append({"host": host, "replicas": replicas, **found, "load_average": load})
                print(runs[-1], flush=True)
                keep(summary(runs))


def summary(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the runs so far say."""

    def of(host: str, replicas: int, name: str) -> list[float]:
        return [run[name] for run in runs if (run["host"], run["replicas"]) == (host, replicas)]

    rows = []
    for host, replicas in dict.fromkeys((run["host"], run["replicas"]) for run in runs):
        speed, middle = of(host, replicas, "tokens_per_second"), statistics.median
        rows.append(
            {
                "host": host,
                "replicas": replicas,
                "tokens_per_second": round(middle(speed), 1),
                "min_max": [round(min(speed), 1), round(max(speed), 1)],
                "against_one": round(middle(speed) / middle(of(host, 1, "tokens_per_second")), 2),
                "cores_busy_in_engines": round(middle(of(host, replicas, "cores")), 3),
            }
        )
    return {
        "what": "answers of the bundled model by slow engines: each step lasts step_seconds, most of which the engine sleeps",
        "step_seconds": STEP,
        "slots_of_each": SLOTS,
        "prompts_for_each": PROMPTS,
        "samples_of_a_prompt": SAMPLES,
        "answer_tokens": LENGTHS,
        "rows": rows,
        "runs": [" ".join(f"{name} {value}" for name, value in run.items()) for run in runs],
    }


def generate(engines: Engines, prompts: int, *, seed: int) -> dict[str, float]:
    """Submit at once, and wait for all. The same prompts and lengths for the same number of them."""
    draw = random.Random(seed)
    requests = [
        Request(
            i, [draw.randrange(3, 13) for _ in range(6)], SAMPLES, Sampling(1.0, draw.randint(*LENGTHS)), (seed, i, 0)
        )
        for i in range(prompts)
    ]
    processes = [engine.process_id for engine in each(engines)]
    before, start = cpu_seconds(processes), time.perf_counter()
    engines.submit(requests)
    tokens, missing = 0, prompts * SAMPLES
    while missing:
        for completion in engines.poll(1.0):
            tokens += len(completion.ids)
            missing -= 1
    seconds = time.perf_counter() - start
    cores = (cpu_seconds(processes) - before) / seconds
    speed = round(tokens / seconds, 2)
    return {"tokens": tokens, "seconds": round(seconds, 2), "tokens_per_second": speed, "cores": round(cores, 3)}


def each(engines: Engines) -> list[Any]:
    """The hosted engines, or those of the actors."""
    members = [member.engine for member in engines._members] if isinstance(engines, EnginePool) else [engines]
    return [engine._now[0] for engine in members]


def put(engines: Engines) -> tuple[int, int]:
    """How many buckets, and bytes, went into Ray's object store so far; nothing does for processes."""
    store = getattr(each(engines)[0], "_store", None)  # all engines of a run have one
    return (store.puts, store.bytes) if store is not None else (0, 0)


def cpu_seconds(processes: Sequence[int]) -> float:
    """CPU time that these processes have taken."""
    total = 0.0
    for process in processes:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        total += (int(fields[11]) + int(fields[12])) / _TICKS
    return total


# --- refits ---


def refits(repeats: int, keep: Callable[[dict[str, Any]], None], done: Sequence[dict[str, Any]] = ()) -> None:
    """Seconds of a refit of idle engines, full and delta, by size, host and number of engines; kept after each.

    Args:
        keep: Takes everything so far.
        done: Rows of a call before this one, whose configurations are not run again.
    """
    rows = list(done)
    known = {(row["model"], row["host"], row["replicas"]) for row in done}
    for model in models():
        for host in HOSTS:
            for replicas in REPLICAS:
                if (model.name, host, replicas) in known:
                    continue
                with running(model, host, replicas, compiled=False, slots=1) as engines:
                    rows += [row(model, host, replicas, engines, mode, repeats) for mode in ("full", "delta")]
                print(*rows[-2:], sep="\n", flush=True)
                keep(
                    {
                        "what": "the learner's call until every engine is live at the new version; idle engines, a thread each. "
                        "The least of the repeats is the one that other work disturbed least; cpu_ms: of learner and engines.",
                        "bucket_bytes": RunConfig().refit.bucket_bytes,
                        "changed_codes_of_a_delta": CHANGED,
                        "rows": rows,
                    }
                )


def row(model: Model, host: Host, replicas: int, engines: Engines, mode: Mode, repeats: int) -> dict[str, Any]:
    """Versions by turns, so that each refit changes the same share."""
    previous = Sent(model.versions[0], Manifest.of(model.versions[0], 0, model.description.coverage.digest))
    processes = [os.getpid(), *(engine.process_id for engine in each(engines))]
    reports, seconds, counts, busy = [], [], [], 0.0
    for i in range(2 * (repeats + 1)):
        tensors = model.versions[(i + 1) % 2]
        version = engines.version + 1
        engines.hold(tensors, version)
        if i == 2:
            busy = cpu_seconds(processes)
        before = put(engines)
        start = time.perf_counter()
        report = _send(engines, model, tensors, version, mode, previous)
        seconds.append(time.perf_counter() - start)
        reports.append(report)
        counts.append(tuple(after - first for after, first in zip(put(engines), before, strict=True)))
        previous = report.sent
    reports, seconds = reports[2:], seconds[2:]  # the first of each version touch new memory
    expected = len(list(buckets(model.versions[0], RunConfig().refit.bucket_bytes))) if mode == "full" else 1
    if host == "ray":
        assert set(counts) == {(expected, reports[-1].bytes)}, f"each bucket is put once, not {counts}"
    median = statistics.median
    return {
        "model": model.name,
        "bytes": model.bytes,
        "host": host,
        "replicas": replicas,
        "mode": mode,
        "load_average": round(os.getloadavg()[0], 1),
        "bytes_sent": reports[-1].bytes,
        "least_ms": round(1e3 * min(seconds), 1),
        "median_ms": round(1e3 * median(seconds), 1),
        "cpu_ms": round(1e3 * (cpu_seconds(processes) - busy) / len(seconds), 1),
        "least_move_ms": round(1e3 * min(report.move for report in reports), 1),
        "least_decode_ms": round(1e3 * min(report.decode for report in reports), 1),
        "least_pause_ms": round(1e3 * min(report.pause for report in reports), 2),
        "puts": counts[-1][0],
        "bytes_put": counts[-1][1],
    }


def install() -> None:
    """Before anything is started: Ray's own processes inherit it."""
    slow_engine.install(STEP)
