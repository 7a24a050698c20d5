from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from demo import ask, make_decoder, make_engine
from hypothesis import given, settings
from hypothesis import strategies as st
from refit_parts import E4M3, NORM, SCALE, WEIGHT, changes, deliver, edited, payload, receiver, sent
from torch import Tensor

from trtl_rl.engines.torch_engine.engine import TorchEngine
from trtl_rl.errors import RefitError
from trtl_rl.kernels.ops import gemm
from trtl_rl.model.bind import TrainableDecoder
from trtl_rl.model.weights import SCALE_SUFFIX, DecoderWeights
from trtl_rl.refit import delta
from trtl_rl.refit.manifest import Bucket, Manifest, tensor_bytes
from trtl_rl.refit.sender import RefitReport, Sent, send

HEADER = 16


def bits(count: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Any bits at all: NaN of every kind, infinities, both zeros."""
    data = torch.randint(0, 256, (count * dtype.itemsize,), generator=torch.Generator().manual_seed(seed))
    return data.to(torch.uint8).view(dtype)


def applied(old: Tensor, packed: Tensor) -> Tensor:
    out = torch.empty_like(old)
    delta.apply(old, packed, out)
    return out


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(tensor_bytes(a), tensor_bytes(b))


# --- packing ---


@settings(max_examples=150, deadline=None)
@given(
    count=st.integers(0, 3000),
    dtype=st.sampled_from([E4M3, torch.bfloat16, torch.float32]),
    share=st.sampled_from([0.0, 0.0005, 0.01, 0.1, 0.3, 0.7, 1.0]),
    seed=st.integers(0, 99),
)
def test_a_change_is_lossless_and_never_longer_than_the_tensor(
    count: int, dtype: torch.dtype, share: float, seed: int
) -> None:
    old = bits(count, dtype, seed)
    new = edited(old, share, seed + 1)
    elements, packed = delta.pack(new, old)
    differs = (tensor_bytes(new) != tensor_bytes(old)).view(count, dtype.itemsize).any(1) if count else torch.empty(0)
    assert elements == delta.changed_elements(new, old) == int(differs.sum())
    bitmap = HEADER + elements * dtype.itemsize + -(-count // 8)
    if packed is None:
        assert bitmap >= old.nbytes or HEADER + elements * (dtype.itemsize + 1) >= old.nbytes
    else:
        assert packed.nbytes < old.nbytes and packed.nbytes <= bitmap
        assert same(applied(old, packed), new)


@pytest.mark.parametrize("gap", [0, 1, 253, 254, 255, 256, 509, 510, 511, 100_000])
def test_gaps_of_any_length_find_their_elements(gap: int) -> None:
    old = torch.zeros(300_000, dtype=torch.uint8)
    new = old.clone()
    at = torch.tensor([gap, 2 * gap + 1, 2 * gap + 2])
    new[at] = torch.tensor([7, 8, 9], dtype=torch.uint8)
    elements, packed = delta.pack(new, old)
    assert packed is not None and elements == 3
    assert torch.equal(applied(old, packed), new)
    assert packed.nbytes == HEADER + 3 + 3 + 2 * (gap // 255)


def test_a_change_takes_two_bytes_for_a_code() -> None:
    old = bits(1_000_000, E4M3, 0)
    new = edited(old, 0.005)
    elements, packed = delta.pack(new, old)
    assert packed is not None and packed.nbytes < 2.5 * elements


def corrupted(packed: Tensor, kind: int | None = None, count: int | None = None) -> Tensor:
    out = packed.clone()
    header = out[:HEADER].view(torch.int64)
    header[0] = header[0] if kind is None else kind
    header[1] = header[1] if count is None else count
    return out


@pytest.mark.parametrize("share", [0.01, 0.4])
def test_a_change_that_does_not_fit_is_refused_and_changes_nothing(share: float) -> None:
    old = payload()
    new = {**old, WEIGHT: edited(old[WEIGHT], share)}
    elements, packed = delta.pack(new[WEIGHT], old[WEIGHT])
    assert packed is not None
    short = payload()[WEIGHT][:2]
    longer = delta.pack(edited(torch.zeros(400_000, dtype=torch.uint8), share), torch.zeros(400_000, dtype=torch.uint8))
    assert longer[1] is not None
    for wrong in (
        packed[:-1], packed[:HEADER], packed[:3], packed.to(torch.int16), corrupted(packed, kind=7), corrupted(packed, count=-1),
        corrupted(packed, count=elements + 1), corrupted(packed, count=2**60), longer[1], short.view(torch.uint8).flatten(),
    ):  # fmt: skip
        target = receiver()
        deliver(target, old)
        assert target.begin(replace(Manifest.of(new, 2, "recipe"), base=Manifest.of(old, 1, "recipe").digest))
        with pytest.raises(RefitError, match=f"{WEIGHT} arrived as a change that cannot|{WEIGHT}: its bytes"):
            target.write(Bucket({WEIGHT: wrong}, frozenset({WEIGHT})))
        assert target.state == "ready"
        assert target.begin(replace(Manifest.of(new, 2, "recipe"), base=Manifest.of(old, 1, "recipe").digest))
        target.write(changes(new, old))
        assert same(target.check()[0][WEIGHT], new[WEIGHT]) and target.check()[0][NORM] is not new[NORM]


def test_a_change_to_a_version_that_is_not_held_is_refused() -> None:
    old, new = payload(), {**payload(), WEIGHT: edited(payload()[WEIGHT], 0.01)}
    target = receiver()
    assert not target.begin(replace(Manifest.of(new, 2, "recipe"), base=Manifest.of(old, 1, "recipe").digest))
    with pytest.raises(RefitError, match=f"{WEIGHT} arrived as a change to a version that this engine does not hold"):
        target.write(changes(new, old))
    deliver(target, {**old, SCALE: old[SCALE] * 2})
    assert not target.begin(replace(Manifest.of(new, 2, "recipe"), base=Manifest.of(old, 1, "recipe").digest))
    target.write(Bucket(new))  # everything will do
    assert target.complete


# --- an engine that gets changes is where an engine that gets everything is ---


@pytest.fixture(scope="module")
def decoder() -> TrainableDecoder:
    return make_decoder()


def history(first: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """Versions that change codes, scales or the rest, few or many, and one that changes nothing."""
    weights = [name for name in sorted(first) if name + SCALE_SUFFIX in first]
    scales = [name + SCALE_SUFFIX for name in weights]
    steps = [
        [weights[0]], [scales[1]], ["model.norm.weight"], [], ["model.embed_tokens.weight", weights[2]], [weights[0], scales[0]],
        list(first), [weights[3]],
    ]  # fmt: skip
    out = [first]
    for i, names in enumerate(steps):
        share = 0.9 if i == 4 else 0.02
        changed = {name: edited(out[-1][name], 1.0 if name in scales else share, i) for name in names}
        out.append({**out[-1], **changed})
    return out


def operands(weights: DecoderWeights) -> list[Tensor]:
    """Everything that a forward pass reads; of what is packed, its products with unit vectors."""
    linears = [operand for layer in weights.layers for operand in layer.operands()]
    norms = [x for layer in weights.layers for x in (layer.input_norm, layer.post_norm, layer.q_norm, layer.k_norm)]
    products = [gemm(torch.eye(one.spec.in_features), one.tensors()[0]) for one in [*linears, weights.head]]
    return [weights.embedding, weights.norm, *norms, *products]


def refit(engine: TorchEngine, tensors: dict[str, Tensor], version: int, **rest: object) -> RefitReport:
    coverage = engine.weights.description.coverage.digest
    return send(engine, tensors, version=version, coverage=coverage, bucket_bytes=2**16, **rest)  # type: ignore[arg-type]


def test_after_a_delta_an_engine_equals_one_that_got_everything(decoder: TrainableDecoder) -> None:
    one = make_engine(decoder, slots=1)
    previous: Sent | None = None
    for version, tensors in enumerate(history(decoder.snapshot)):
        if version == 5:  # an attempt that ends after decoding leaves nothing behind
            other = history(decoder.snapshot)[7]
            one.begin_refit(Manifest.of(other, 99, one.weights.description.coverage.digest))
            one.write(Bucket(other))
            one.refit.decode()
            one.abort_refit()
        report = refit(one, tensors, version, mode="delta", previous=previous)
        fresh = make_engine(decoder, slots=1)
        full = refit(fresh, tensors, version, previous=previous)
        assert report.sent.manifest.digest == full.sent.manifest.digest
        assert report.changed_frac == full.changed_frac
        assert one.version == version
        for a, b in zip(operands(one.weights), operands(fresh.weights), strict=True):
            assert torch.equal(a, b), f"version {version}"
        request = [ask(-1, new=3, logprobs=True)]
        assert one.probe(request) == fresh.probe(request)
        assert (report.bytes == full.bytes) if version == 0 else (report.bytes < full.bytes)
        if version == 4:
            assert report.bytes == report.changed_frac == 0
        previous = report.sent


def test_an_engine_without_the_base_gets_everything(decoder: TrainableDecoder) -> None:
    first, second, third = history(decoder.snapshot)[:3]
    restarted = make_engine(decoder, slots=1)
    report = refit(restarted, second, 1, mode="delta", previous=sent(first))
    assert report.bytes == sum(tensor.nbytes for tensor in second.values())
    assert 0 < report.changed_frac < 0.1  # of what the trainer had before, all the same
    elsewhere = make_engine(decoder, slots=1)
    refit(elsewhere, third, 0)
    report = refit(elsewhere, second, 1, mode="delta", previous=sent(first))
    assert report.bytes == sum(tensor.nbytes for tensor in second.values())
    assert all(torch.equal(a, b) for a, b in zip(operands(restarted.weights), operands(elsewhere.weights), strict=True))


def test_only_what_differs_is_decoded(decoder: TrainableDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(decoder, slots=1)
    versions = history(decoder.snapshot)
    loaded: list[set[str]] = []
    load = DecoderWeights.load

    def watched(weights: DecoderWeights, tensors: dict[str, Tensor]) -> None:
        loaded.append(set(tensors))
        load(weights, tensors)

    monkeypatch.setattr(DecoderWeights, "load", watched)
    for version in range(4):
        refit(engine, versions[version], version)
    assert loaded[0] == set(decoder.snapshot)
    for before, after, names in zip(versions, versions[1:], loaded[1:], strict=False):
        changed = {name for name in after if not same(after[name], before[name])}
        assert changed <= names < loaded[0]
        operands_touched = {engine.weights._operand_of(name) for name in changed} - {None}
        assert {engine.weights._operand_of(name) for name in names - changed} <= operands_touched  # their other parts


def test_the_live_operands_do_not_move_while_a_refit_is_open(decoder: TrainableDecoder) -> None:
    engine = make_engine(decoder, slots=1)
    versions = history(decoder.snapshot)
    refit(engine, versions[0], 0)
    before = operands(engine.weights)
    engine.begin_refit(Manifest.of(versions[6], 1, engine.weights.description.coverage.digest))
    engine.write(Bucket(versions[6]))
    engine.refit.decode()
    assert all(torch.equal(a, b) for a, b in zip(operands(engine.weights), before, strict=True))
    engine.finish_refit()
    after = operands(engine.weights)
    assert not all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


def test_an_operand_of_which_a_part_changed_is_made_of_the_same_version_throughout(decoder: TrainableDecoder) -> None:
    """A refit that was aborted after decoding leaves nothing of it in the parts that the next one does not change."""
    first = dict(decoder.snapshot)
    q, k = (f"model.layers.0.self_attn.{role}_proj.weight" for role in "qk")
    aborted, second = dict(first), dict(first)
    aborted[k] = edited(first[k], 0.01)
    second[q] = edited(first[q], 0.01)
    engine, fresh = make_engine(decoder, slots=1), make_engine(decoder, slots=1)
    refit(engine, first, 0)
    engine.begin_refit(Manifest.of(aborted, 1, engine.weights.description.coverage.digest))
    engine.write(Bucket(aborted))
    engine.refit.decode()
    engine.abort_refit()
    refit(engine, second, 2)
    refit(fresh, second, 2)
    assert all(torch.equal(a, b) for a, b in zip(operands(engine.weights), operands(fresh.weights), strict=True))


def test_packing_compares_bits_not_values() -> None:
    old = torch.tensor([0.0, float("nan"), 1.0])
    new = torch.tensor([-0.0, float("nan"), 1.0])
    assert delta.changed_elements(new, old) == 1
    assert np.isnan(old.numpy()[1])
