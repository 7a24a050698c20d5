"""The parity check on demand: it sees what differs, names the worst place, and compares the full vocabulary."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from demo import ask, load, make_decoder, make_engine
from models import tiny
from torch import Tensor

from trtl_rl.engines.torch_engine.engine import TorchEngine
from trtl_rl.kernels.kernel_set import KernelSet, find_compiler
from trtl_rl.model.bind import TrainableDecoder
from trtl_rl.rollout import Request
from trtl_rl.trainer import parity_check
from trtl_rl.trainer.parity_check import check

BENCH = Path(__file__).resolve().parent.parent / "bench"


@pytest.fixture(scope="module")
def decoder() -> TrainableDecoder:
    return make_decoder()


@pytest.fixture
def requests() -> list[Request]:
    """Six requests with three temperatures mixed up, different lengths, and groups that share a prefill."""
    out = []
    for i, temperature in enumerate((1.0, 0.6, 1.2, 0.6, 1.0, 1.2)):
        prompt = [3 + (i * 5 + j) % 10 for j in range(1 + 7 * i)]
        out.append(ask(-1 - i, prompt, samples=1 + i % 2, new=4 + i, temperature=temperature, logprobs=True))
    return out


def engine_of(decoder: TrainableDecoder, change: dict[str, Tensor] | None = None) -> TorchEngine:
    """An engine with three slots that no token stops, at the decoder's version but for ``change``."""
    engine = make_engine(decoder, slots=3, stop_ids=())
    load(engine, decoder, {**decoder.snapshot, **(change or {})})
    return engine


def shifted(decoder: TrainableDecoder) -> dict[str, Tensor]:
    """The final norm with one value changed by one bit of bfloat16."""
    norm = decoder.snapshot["model.norm.weight"].clone()
    norm[5] *= 1 + 2**-7
    return {"model.norm.weight": norm}


@pytest.mark.parametrize("gradients", [False, True])
def test_equal_weights_differ_nowhere_whatever_shares_the_batch(
    decoder: TrainableDecoder, requests: list[Request], gradients: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parity_check, "BATCH_TOKENS", 40)  # several batches for each temperature
    found = check(decoder, engine_of(decoder), requests, kernels=KernelSet(False), gradients=gradients)
    tokens = sum(request.samples * request.sampling.max_new_tokens for request in requests)
    assert (found.tokens, found.answers) == (tokens, 9)
    assert found.exact and found.worst is None and found.first_divergence == -1
    assert (found.max_abs, found.kl_max, found.mean_exp_abs) == (0.0, 0.0, 1.0)
    full = found.full_vocabulary
    assert full is not None and full.values == tokens * decoder.description.vocab
    assert (full.differing, full.max_abs, full.kl_max) == (0, 0.0, 0.0)


def test_one_bit_of_one_weight_is_seen_and_its_worst_place_is_named(
    decoder: TrainableDecoder, requests: list[Request]
) -> None:
    engine = engine_of(decoder, shifted(decoder))
    found = check(decoder, engine, requests)
    assert not found.exact and found.differing > found.tokens // 2
    assert 0 < found.max_abs < 0.5 and found.kl_max > 0 and found.mean_exp_abs > 1 and found.first_divergence == 0
    worst = found.worst
    assert worst is not None and abs(worst.trainer - worst.engine) == found.max_abs
    # The place is where the values really are: the engine answers the same again.
    again = {(-c.request_id - 1, c.sample): c for c in engine.probe(requests)}
    completion = again[worst.prompt, worst.sample]
    assert completion.ids[worst.position] == worst.token
    assert (completion.logprobs or [])[worst.position] == worst.engine


def test_a_difference_that_no_sampled_token_shows_is_seen_in_the_full_vocabulary(
    decoder: TrainableDecoder, requests: list[Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(decoder)
    monkeypatch.setattr(decoder, "snapshot", {**decoder.snapshot, **shifted(decoder)})
    found = check(decoder, engine, requests, kernels=KernelSet(False))
    assert found.differing == 0 and not found.exact
    full = found.full_vocabulary
    assert full is not None and full.differing > full.values // 2 and full.max_abs > 0
    assert 0 < full.kl_mean <= full.kl_max < 0.1, "a true KL: never negative"


def test_nan_counts_as_a_difference(decoder: TrainableDecoder, requests: list[Request]) -> None:
    engine = engine_of(decoder)

    class FakeEngine:
        """Answers as the engine does, with one logprob missing."""

        version = engine.version

        def probe(self, requests: Any) -> Any:
            first, *rest = engine.probe(requests)
            assert first.logprobs is not None
            return [dataclasses.replace(first, logprobs=[*first.logprobs[:-1], math.nan]), *rest]

    fake: Any = FakeEngine()
    found = check(decoder, fake, requests)
    assert found.differing == 1 and not found.exact and found.worst is not None and math.isnan(found.worst.engine)


def bench(name: str) -> Any:
    """A script of bench/ as a module."""
    sys.path.append(str(BENCH))
    try:
        spec = importlib.util.spec_from_file_location(f"bench_{name}", BENCH / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(BENCH))


def test_the_design_of_the_bench_has_every_pair_that_is_allowed() -> None:
    parity = bench("parity")
    cases = parity.pairwise(parity.FACTORS, parity.allowed)
    assert all(parity.allowed(case) for case in cases) and cases == parity.pairwise(parity.FACTORS, parity.allowed)
    seen = {(a, case[a], b, case[b]) for case in cases for a, b in itertools.combinations(case, 2)}
    deciding = ("family", "aligned", "recipe", "operators")
    choices = [dict(zip(deciding, v, strict=True)) for v in itertools.product(*(parity.FACTORS[n] for n in deciding))]
    for a, b in itertools.combinations(parity.FACTORS, 2):
        for x, y in itertools.product(parity.FACTORS[a], parity.FACTORS[b]):
            possible = any(parity.allowed({**choice, a: x, b: y}) for choice in choices)
            assert ((a, x, b, y) in seen) == possible


@pytest.mark.slow
@pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")
@pytest.mark.timeout(600)
def test_compiled_operators_are_exact_before_and_after_real_updates() -> None:
    case = {
        "family": "qwen2", "tied": True, "aligned": False, "recipe": "fp32 scales", "operators": "compiled",
        "prompt": 300, "answer": 200, "slots": 7, "temperature": 1.2, "engine_threads": 2, "trainer_threads": 1,
        "gradients": False, "updates": 20,
    }  # fmt: skip
    parity = bench("parity")
    model = tiny("qwen2", tied=True, max_position_embeddings=parity.CONTEXT)
    threads = torch.get_num_threads()
    try:
        found = parity.compared(case, model, share=0.4)
    finally:
        torch.set_num_threads(threads)
    assert sum(item.tokens for item in found) >= 2000
    assert [item.differing for item in found] == [0, 0]
