"""Engines as actors of a Ray cluster, really run: on this machine, with a second node, with an actor that is killed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import demo
import pytest
import torch
from run_files import rows_of

from trtl_rl.engines import ray_engine
from trtl_rl.engines.ray_engine import BucketStore, RayEngine, connect
from trtl_rl.errors import EngineError, UserError
from trtl_rl.kernels.kernel_set import KernelSet
from trtl_rl.refit.manifest import Bucket
from trtl_rl.rollout import Request, Sampling
from trtl_rl.trainer.callbacks import Callback
from trtl_rl.trainer.trainer import Trainer

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A cluster of one node here; Ray's own helper adds and removes others."""
    from ray.cluster_utils import Cluster

    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "object_store_memory": 200 * 2**20})
    ray.init(address=found.address, log_to_driver=False, logging_level="warning")
    yield found
    ray.shutdown()
    found.shutdown()


def start_engine(log: Path, store: BucketStore, **options: Any) -> RayEngine:
    """An engine with the bundled model, eager, at version 0."""
    decoder = demo.make_decoder()
    engine = RayEngine(log, store, threads=1, timeout=120, refit_timeout=60, options=options or {"num_cpus": 1})
    engine.configure(
        decoder.description.to_json(),
        KernelSet(False).identity,
        False,
        slots=8,
        context=demo.CONTEXT,
        stop_ids=[demo.EOS],
    )
    demo.load(engine, decoder)
    return engine


def completions(engine: Any, count: int) -> list[Any]:
    found: list[Any] = []
    end = time.monotonic() + 120
    while len(found) < count:
        assert time.monotonic() < end
        found += engine.poll(0.1)
    return sorted(found, key=lambda item: (item.request_id, item.sample))


def test_an_actor_generates_what_an_engine_in_this_process_does(cluster: Any, tmp_path: Path) -> None:
    request = Request(3, demo.PROMPT, 4, Sampling(1.0, 24), (0, 3, 0))
    here = demo.ready(demo.make_decoder())
    here.submit([request])
    there = start_engine(tmp_path / "engine.log", BucketStore())
    try:
        there.submit([request])
        assert completions(there, 4) == demo.drain(here)
        assert there.version == 0
        assert there.busy_seconds > 0
    finally:
        there.close()
        there.close()


def test_a_bucket_is_put_once_for_all_engines(cluster: Any) -> None:
    store = BucketStore()
    bucket, other = (Bucket({"w": torch.full((4,), i, dtype=torch.uint8)}, frozenset()) for i in range(2))
    references = [store.reference(bucket) for _ in range(4)]
    assert len(set(references)) == 1
    assert store.reference(other) != references[0]
    assert (store.puts, store.bytes) == (2, 8)
    plain = ray.get(references[0])
    assert torch.equal(ray_engine._from_plain(plain).tensors["w"], bucket.tensors["w"])


def test_an_actor_that_finds_no_node_is_said_within_the_time(cluster: Any, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"did not answer within .* `ray status`"):
        engine = RayEngine(
            tmp_path / "engine.log", BucketStore(), threads=1, timeout=1, refit_timeout=1, options={"num_cpus": 64}
        )
        engine.coverage()


def test_the_engine_ends_with_its_actor(cluster: Any, tmp_path: Path) -> None:
    engine = start_engine(tmp_path / "engine.log", BucketStore())
    process = engine.process_id
    ray.kill(engine._actor)
    with pytest.raises(EngineError, match="actor is gone"):
        engine.coverage()
    end = time.monotonic() + 30
    while alive(process):
        assert time.monotonic() < end, "an engine without an owner goes on"
        time.sleep(0.1)


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_run_on_two_actors_one_of_which_is_killed_goes_on_and_stays_exact(cluster: Any, tmp_path: Path) -> None:
    class Kill(Callback):
        """After the first step; the third waits until the actor is replaced, so that the rest is rolled out by both."""

        def on_step(self, trainer: Trainer, step: int, metrics: dict[str, float]) -> None:
            pool: Any = trainer._run._engine  # type: ignore[union-attr]
            if step == 1:
                ray.kill(pool._members[0].engine._now[0]._actor)
            end = time.monotonic() + 60
            while step == 3 and not pool.restarts:
                assert time.monotonic() < end, "a lost actor is not replaced"
                time.sleep(0.1)

    run_dir = tmp_path / "run"
    trainer = Trainer(
        args=demo.small(
            run_dir,
            steps=6,
            batch={"prompts": 4, "group_size": 4},
            buffer={"max_staleness": 1},
            engine={"replicas": 2, "restart_delay": 0.1, "timeout": 60},
            ray={"address": cluster.address, "resources": {"num_cpus": 0.5}},
        ),
        callbacks=[Kill()],
    )
    result = trainer.train()
    rows = [row["metrics"] for row in rows_of(run_dir, "step")]
    assert result.step == len(rows) == 6
    assert rows[-1]["engine/restarts"] >= 1
    assert all(row["mismatch/differing_tokens"] == 0 for row in rows)
    assert all(row["off_policy/max"] <= 1 for row in rows)


def test_engines_move_to_the_nodes_that_are_there(cluster: Any, tmp_path: Path) -> None:
    """A second node joins, gets the engine of the run, and is taken away: the engine starts again on the first."""
    node = cluster.add_node(num_cpus=1, resources={"rollout": 1}, object_store_memory=100 * 2**20)
    cluster.wait_for_nodes()
    store = BucketStore()
    engine = start_engine(tmp_path / "engine.log", store, num_cpus=0, resources={"rollout": 1})
    node_id = ray.get(engine._actor.__ray_call__.remote(lambda self: ray.get_runtime_context().get_node_id()))
    assert node_id != ray.get_runtime_context().get_node_id()
    cluster.remove_node(node)
    with pytest.raises(EngineError, match="actor is gone"):
        for _ in range(100):
            engine.coverage()
            time.sleep(0.2)
    engine.close()
    another = start_engine(tmp_path / "engine.log", store, num_cpus=1)
    try:
        assert another.version == 0
    finally:
        another.close()


def test_a_cluster_that_is_not_there_is_said_before_a_model_is_loaded() -> None:
    begun = time.monotonic()
    with pytest.raises(UserError, match=r"ray\.address=127\.0\.0\.1:1: no Ray cluster answers there .*refused"):
        connect("127.0.0.1:1")
    assert time.monotonic() - begun < 20
