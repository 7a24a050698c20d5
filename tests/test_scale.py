"""The simulation of ``bench/scale.py`` against sums by hand, and the slow engine that its measurements stand on."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_refit_validate import describe, payload

from trtl_rl.flops.formulas import ModelShape
from trtl_rl.recipe.formats import HIGH_PRECISION

FEW = {"prompts": 8, "samples": 4, "answer_mean": 200, "answer_limit": 800}


@pytest.fixture(scope="module")
def paper() -> Iterator[Any]:
    place = str(Path(__file__).parent.parent / "bench")
    sys.path.insert(0, place)
    import scale_paper

    yield scale_paper
    sys.path.remove(place)


@pytest.mark.parametrize("tied", [True, False])
def test_a_version_has_the_bytes_that_a_refit_really_sends(paper: Any, tied: bool) -> None:
    sizes = {"heads": 3, "kv_heads": 1, "head_dim": 64, "hidden": 200, "intermediate": 384, "layers": 2, "tied": tied}
    shape = ModelShape(2, 200, 3, 1, 64, 384, 16)
    for precision, format in (("fp8", {}), ("bf16", {"format": HIGH_PRECISION})):
        sent = sum(tensor.nbytes for tensor in payload(describe(**sizes, **format)).values())  # type: ignore[arg-type]
        assert paper.version_bytes(shape, precision, tied=tied) == sent


def test_a_decode_step_reads_weights_and_keys_once_or_computes_whichever_takes_longer(paper: Any) -> None:
    a, gpu, shape = paper.Assumptions(), paper.FLEET[1], paper.MODELS["Qwen3-8B"]
    engine = paper.Engine(gpu, shape, "bf16", 1, a)
    linears, vocabulary, norms = 36 * 4096 * (128 * 80 + 3 * 12288), 151936 * 4096, 36 * (2 * 4096 + 2 * 128) + 4096
    read = 2 * (linears + vocabulary + norms) + 36 * 2 * 8 * 128 * 2 * 1000
    assert engine.step(1, 1000) == pytest.approx(read / (4.8e12 * 0.6) + 1e-3)
    flops = 4000 * (2 * (linears + vocabulary) + 4 * 36 * 32 * 128 * 1001)
    keys_are_free = replace(a, memory_share=1e9)
    assert paper.Engine(gpu, shape, "bf16", 1, keys_are_free).step(4000, 1000) == pytest.approx(
        flops / (989.5e12 * 0.5) + 1e-3
    )
    two = paper.Engine(gpu, shape, "bf16", 2, a).step(1, 1000)
    joined = 2 * 36 * (15e-6 + 2 * 4096 * 2 / 2 / (0.8 * 450e9))
    assert two == pytest.approx(read / (2 * 4.8e12 * 0.6) + joined + 1e-3)


def test_answers_take_what_a_loop_over_tokens_says(paper: Any) -> None:
    a = paper.Assumptions(**FEW, slots=5)
    engine = paper.Engine(paper.FLEET[0], paper.MODELS["Qwen3-8B"], "fp8", 1, a)
    lengths = paper.answers(a, 32)
    waiting, running, seconds = list(lengths), list[list[int]](), engine.prefill(8)
    while waiting or running:
        while waiting and len(running) < 5:
            running.append([waiting.pop(0), 0])
        seconds += engine.step(len(running), 512 + 0.5 + sum(done for _, done in running) / len(running))
        running = [[left - 1, done + 1] for left, done in running if left > 1]
    assert engine.all_of(lengths) == pytest.approx(seconds, rel=1e-3)


def test_more_gpus_are_never_slower_and_a_slower_refit_never_helps(paper: Any) -> None:
    a = paper.Assumptions(**FEW)
    for mode in ("sync", "async"):
        steps = {
            path: [paper.best_split(paper.FLEET[2], "Qwen3-8B", "fp8", mode, path, gpus, a) for gpus in (8, 16, 64)]
            for path in ("broadcast_bound", "broadcast_published", "store_full")
        }
        for rows in steps.values():
            assert [row.step for row in rows] == sorted((row.step for row in rows), reverse=True)
        for best, published, store in zip(*steps.values(), strict=True):
            assert best.step <= published.step <= store.step
            assert best.refit < published.refit < store.refit
    row = steps["store_full"][0]
    assert row.step == max(row.rollout, row.longest, row.learn + row.refit)
    together = replace(row, mode="sync")
    assert together.step == row.rollout + row.learn + row.refit


def test_the_refit_is_in_the_way_from_where_a_step_lasts_a_tenth_longer(paper: Any) -> None:
    import scale

    def rows(*steps: float) -> list[list[Any]]:
        return [
            [gpus, 1, 1, 1, 0.0, 0.0, 0.0, 0.0, step, "refit"] for gpus, step in zip((8, 16, 32), steps, strict=True)
        ]

    table = {"x broadcast_bound": rows(9, 5, 3), "x slow": rows(9.5, 5.6, 4), "x fast": rows(9, 5, 3.1)}
    assert scale.in_the_way(table) == {"x slow": 16, "x fast": None}


def test_a_slow_engine_steps_as_slowly_as_it_is_told_and_changes_nothing_else(paper: Any) -> None:
    import slow_engine

    class Inner:
        version, steps = 3, 0

        def step(self) -> None:
            self.steps += 1

    inner = Inner()
    engine = slow_engine.SlowEngine(inner, 0.03)
    start = time.perf_counter()
    engine.step()
    engine.step()
    assert time.perf_counter() - start >= 0.06 and inner.steps == 2 and engine.version == 3
