from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from demo import PROMPT, ask, load, make_decoder, make_engine
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch import Tensor

from trtl_rl.engines.torch_engine.engine import TorchEngine
from trtl_rl.errors import EngineError, RefitError
from trtl_rl.model.bind import TrainableDecoder
from trtl_rl.model.weights import SCALE_SUFFIX, TensorSpec
from trtl_rl.refit.channel import SharedMemorySender, unpack
from trtl_rl.refit.manifest import Bucket, Manifest, RefitResult, buckets, joined_digest, tensor_bytes, tensor_digest
from trtl_rl.refit.receiver import RefitReceiver
from trtl_rl.refit.sender import send

E4M3 = torch.float8_e4m3fn
WEIGHT = "model.layers.0.mlp.up_proj.weight"
SCALE = WEIGHT + SCALE_SUFFIX
NORM = "model.norm.weight"
SPECS = [
    TensorSpec(WEIGHT, E4M3, (256, 384)),
    TensorSpec(SCALE, torch.float32, (2, 3)),
    TensorSpec(NORM, torch.bfloat16, (384,)),
]


def payload(seed: int = 0) -> dict[str, Tensor]:
    """One version of the three tensors in SPECS."""
    generator = torch.Generator().manual_seed(seed)
    return {
        WEIGHT: torch.randn(256, 384, generator=generator).to(E4M3),
        SCALE: torch.rand(2, 3, generator=generator) + 0.1,
        NORM: torch.randn(384, generator=generator).bfloat16(),
    }


def receiver() -> RefitReceiver:
    return RefitReceiver(SPECS, "recipe")


def deliver(target: RefitReceiver, tensors: dict[str, Tensor], announced: dict[str, Tensor] | None = None) -> None:
    target.begin(Manifest.of(tensors if announced is None else announced, 1, "recipe"))
    target.write(Bucket(tensors))
    target.finish()
    target.loaded()


# --- what is refused, with the name of the tensor ---


def without(name: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {key: value for key, value in tensors.items() if key != name}


def changed(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {**tensors, name: change(tensors[name])}


def with_value(value: float) -> Callable[[Tensor], Tensor]:
    def change(scale: Tensor) -> Tensor:
        out = scale.clone()
        out[1, 2] = value
        return out

    return change


def flipped(tensor: Tensor, at: int = 7) -> Tensor:
    """The same tensor with one bit of one byte flipped."""
    data = tensor_bytes(tensor).clone()
    data[at] ^= 1
    return data.view(tensor.dtype).reshape(tensor.shape)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (without(NORM), f"lacks {NORM}"),
        (without(SCALE), f"lacks {SCALE}"),
        (lambda tensors: {**tensors, "model.extra": torch.zeros(2)}, "model.extra, which the model does not have"),
        (changed(WEIGHT, lambda w: w.float().to(torch.float8_e5m2)), f"{WEIGHT}: .*float8_e5m2.*float8_e4m3fn"),
        (changed(NORM, lambda w: w.float()), f"{NORM}: .*float32.*bfloat16"),
        (changed(WEIGHT, lambda w: w.view(384, 256)), rf"{WEIGHT}: .*\[384, 256\].*\[256, 384\]"),
        # One scale for a whole weight would broadcast over its blocks without a complaint.
        (changed(SCALE, lambda s: s.view(-1)[:1]), rf"{SCALE}: .*\[1\].*\[2, 3\]"),
        (changed(SCALE, lambda s: s.view(-1)[0]), rf"{SCALE}: .*\[\].*\[2, 3\]"),
        (changed(SCALE, with_value(0.0)), f"{SCALE} holds a scale that is zero"),
        (changed(SCALE, with_value(-1.0)), f"{SCALE} holds a scale that is zero"),
        (changed(SCALE, with_value(float("nan"))), f"{SCALE} holds a scale that is zero"),
        (changed(SCALE, with_value(float("inf"))), f"{SCALE} holds a scale that is zero"),
    ],
)
def test_a_version_that_does_not_fit_the_model_is_refused_by_name(
    change: Callable[[dict[str, Tensor]], dict[str, Tensor]], named: str
) -> None:
    target = receiver()
    with pytest.raises(RefitError, match=named):
        deliver(target, change(payload()))
    assert target.state in ("empty", "broken")
    deliver(target, payload())
    assert target.state == "ready"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (without(NORM), f"1 of 3 announced tensors never arrived, first {NORM}"),
        (lambda tensors: {**tensors, "model.extra": torch.zeros(2)}, "model.extra was not announced"),
        (changed(WEIGHT, lambda w: w.view(torch.uint8)), f"{WEIGHT}: announced .*, arrived uint8"),
        (changed(WEIGHT, lambda w: w[:128]), rf"{WEIGHT}: .*arrived float8_e4m3fn \[128, 384\]"),
        (changed(SCALE, lambda s: s.view(-1)[:1]), rf"{SCALE}: .*arrived float32 \[1\]"),
        (changed(WEIGHT, flipped), f"{WEIGHT}: its bytes are not those"),
        (changed(SCALE, flipped), f"{SCALE}: its bytes are not those"),
        (changed(NORM, flipped), f"{NORM}: its bytes are not those"),
        (changed(NORM, lambda w: -w.abs()), f"{NORM}: its bytes are not those"),
    ],
)
def test_what_arrives_otherwise_than_announced_breaks_the_refit_by_name(
    change: Callable[[dict[str, Tensor]], dict[str, Tensor]], named: str
) -> None:
    target, good = receiver(), payload()
    deliver(target, good)
    with pytest.raises(RefitError, match=named):
        deliver(target, change(good), announced=good)
    assert target.state == "broken"
    with pytest.raises(RefitError, match="state broken"):
        target.write(Bucket(good))
    with pytest.raises(RefitError, match="state broken"):
        target.finish()
    deliver(target, good)
    assert target.state == "ready"


def test_a_tensor_that_arrives_twice_is_refused() -> None:
    target, good = receiver(), payload()
    target.begin(Manifest.of(good, 1, "recipe"))
    target.write(Bucket({NORM: good[NORM]}))
    with pytest.raises(RefitError, match=f"{NORM} arrived twice"):
        target.write(Bucket(good))


def test_another_recipe_is_refused_and_leaves_the_engine_as_it_was() -> None:
    target, good = receiver(), payload()
    deliver(target, good)
    with pytest.raises(RefitError, match="different recipes"):
        target.begin(Manifest.of(good, 2, "another recipe"))
    assert target.state == "ready"


def test_a_staged_tensor_does_not_change_with_the_memory_it_came_in() -> None:
    target, good = receiver(), payload()
    shared = {name: tensor.clone() for name, tensor in good.items()}
    target.begin(Manifest.of(good, 1, "recipe"))
    target.write(Bucket(shared))
    shared[NORM].zero_()  # the next bucket overwrites shared memory
    staged, manifest, digest = target.finish()
    assert torch.equal(staged[NORM], good[NORM])
    assert digest == manifest.digest == joined_digest({name: tensor_digest(t) for name, t in good.items()})


# --- digest, buckets, channel ---


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 3), name=st.sampled_from([WEIGHT, SCALE, NORM]), at=st.integers(0, 23))
def test_the_digest_of_a_version_changes_with_any_byte(seed: int, name: str, at: int) -> None:
    tensors = payload(seed)
    before = Manifest.of(tensors, 1, "recipe")
    after = Manifest.of({**tensors, name: flipped(tensors[name], at)}, 1, "recipe")
    assert before.digest != after.digest
    assert Manifest.from_json(before.to_json()) == before
    assert Manifest.of(dict(reversed(tensors.items())), 1, "recipe") == before


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(st.integers(0, 50), max_size=12), limit=st.integers(1, 80))
def test_buckets_hold_every_tensor_once_within_their_size(sizes: list[int], limit: int) -> None:
    tensors = {f"t{i:02d}": torch.zeros(n, dtype=torch.uint8) for i, n in enumerate(sizes)}
    parts = list(buckets(tensors, limit))
    assert [name for part in parts for name in part.tensors] == sorted(tensors)
    for part in parts:
        assert part.tensors
        filled = sum(tensor.nbytes for tensor in part.tensors.values())
        assert filled <= limit or len(part.tensors) == 1
    for first, second in itertools.pairwise(parts):  # none could have taken what the next begins with
        filled = sum(tensor.nbytes for tensor in first.tensors.values())
        assert filled + next(iter(second.tensors.values())).nbytes > limit


def test_the_channel_keeps_bits_and_grows() -> None:
    channel = SharedMemorySender()
    odd = torch.tensor([float("nan"), float("inf"), -0.0, 1e-45])
    try:
        for seed, extra in enumerate((torch.zeros(3), torch.zeros(0), odd, torch.randn(70_000), torch.tensor(2.5))):
            tensors = {**payload(seed), "b.transposed": torch.randn(5, 3).t(), "a.odd": extra}
            found = unpack(channel.pack(Bucket(tensors))).tensors
            assert list(found) == list(tensors)
            for name, tensor in tensors.items():
                assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
                assert torch.equal(tensor_bytes(found[name]), tensor_bytes(tensor)), name
                assert found[name].data_ptr() % 64 == 0 or not found[name].numel()
    finally:
        channel.close()


# --- the sender ---


class FakeTarget:
    """Takes weights and remembers the calls; raises at one of them."""

    def __init__(self, fail_at: str = "", digest: str | None = None) -> None:
        self.calls: list[str] = []
        self.fail_at, self.digest = fail_at, digest
        self.manifest: Manifest | None = None

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name == self.fail_at:
            raise EngineError(f"failed at {name}")

    def begin_refit(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self._call("begin")

    def write(self, bucket: Bucket) -> None:
        self._call("write")

    def finish_refit(self) -> RefitResult:
        self._call("finish")
        assert self.manifest is not None
        return RefitResult(self.manifest.version, self.digest or self.manifest.digest, 0.0)

    def abort_refit(self) -> None:
        self._call("abort")


def send_to(target: Any, **rest: Any) -> Any:
    return send(target, payload(), version=3, coverage="recipe", bucket_bytes=1000, **rest)


@pytest.mark.parametrize("fail_at", ["write", "finish"])
def test_a_failed_refit_is_aborted(fail_at: str) -> None:
    target = FakeTarget(fail_at)
    with pytest.raises(EngineError, match=f"failed at {fail_at}"):
        send_to(target)
    assert target.calls[-1] == "abort"


def test_a_refused_beginning_needs_no_abort() -> None:
    target = FakeTarget("begin")
    with pytest.raises(EngineError, match="failed at begin"):
        send_to(target)
    assert target.calls == ["begin"]


def test_an_engine_that_dies_in_a_refit_is_told_by_its_first_error() -> None:
    class Dead(FakeTarget):
        def _call(self, name: str) -> None:
            if name in ("write", "abort"):
                raise EngineError(f"dead at {name}")

    with pytest.raises(EngineError, match="dead at write"):
        send_to(Dead())


def test_another_digest_after_the_refit_is_an_error() -> None:
    with pytest.raises(RefitError, match="digest differs"):
        send_to(FakeTarget(digest="0" * 32))


def test_the_report_counts_bytes_and_changes() -> None:
    before = payload()
    codes = before[WEIGHT].clone()
    codes[:16] = 448.0  # the largest code, which no draw reaches
    assert not bool((codes[:16] == before[WEIGHT][:16]).any())
    report = send_to(FakeTarget(), previous={**before, WEIGHT: codes})
    assert report.bytes == 256 * 384 + 2 * 3 * 4 + 384 * 2
    assert report.changed_frac == 16 * 384 / report.bytes
    assert send_to(FakeTarget()).changed_frac == 1.0


# --- the engine is wholly at one version, or refuses to generate ---


@pytest.fixture(scope="module")
def decoder() -> TrainableDecoder:
    return make_decoder()


def versions(decoder: TrainableDecoder) -> list[dict[str, Tensor]]:
    """Three whole versions that differ in every tensor."""
    first = decoder.snapshot
    return [first] + [
        {name: (tensor.float() * factor).to(tensor.dtype) for name, tensor in first.items()} for factor in (0.5, 0.25)
    ]


def answer(engine: TorchEngine) -> tuple[list[int], list[float]]:
    """Ids and logprobs of a greedy answer: they differ between any two versions."""
    (done,) = engine.probe([ask(-1, new=2, greedy=True, logprobs=True)])
    assert done.logprobs is not None and done.version_first == done.version_last == engine.version
    return done.ids, done.logprobs


def test_the_engine_is_wholly_at_one_version_or_refuses(decoder: TrainableDecoder) -> None:
    whole = versions(decoder)
    expected = []
    coverage = decoder.description.coverage.digest
    for i, tensors in enumerate(whole):
        engine = make_engine(decoder, slots=1)
        send(engine, tensors, version=i, coverage=coverage, bucket_bytes=2**20)
        expected.append(answer(engine))
        ids, values = expected[-1]
        decoder.weights.load(tensors)
        with torch.no_grad():
            assert decoder.forward([[*PROMPT, *ids]], [len(ids)], 1.0)[0].tolist() == values
    decoder.weights.load(decoder.snapshot)
    assert len({tuple(values) for _, values in expected}) == 3

    class Machine(RuleBasedStateMachine):
        """A model of the engine beside the engine, under any order of calls."""

        @initialize()
        def new(self) -> None:
            self.engine = make_engine(decoder, slots=1)
            self.state, self.version, self.target = "empty", -1, -1
            self.left: list[Bucket] = []
            self.spoiled = False

        @precondition(lambda self: self.state != "open")
        @rule(version=st.integers(0, 2), fits=st.booleans())
        def begin(self, version: int, fits: bool) -> None:
            manifest = Manifest.of(whole[version], version, coverage)
            if not fits:
                with pytest.raises(RefitError, match="lacks"):
                    self.engine.begin_refit(replace(manifest, tensors=manifest.tensors[1:]))
                return
            self.engine.begin_refit(manifest)
            self.state, self.target, self.left = "open", version, list(buckets(whole[version], 2**16))

        @precondition(lambda self: self.state == "open")
        @rule()
        def begin_twice(self) -> None:
            with pytest.raises(RefitError, match=f"version {self.target} is still open"):
                self.engine.begin_refit(Manifest.of(whole[0], 0, coverage))

        @precondition(lambda self: self.state == "open" and self.left)
        @rule(everything=st.booleans())
        def write(self, everything: bool) -> None:
            for _ in range(len(self.left) if everything else 1):
                self.engine.write(self.left.pop(0))

        @precondition(lambda self: self.state == "open" and self.left)
        @rule()
        def write_of_another_version(self) -> None:
            other = whole[(self.target + 1) % 3]
            with pytest.raises(RefitError, match="its bytes are not those"):
                self.engine.write(Bucket({name: other[name] for name in self.left[0].tensors}))
            self.state = "broken"

        @precondition(lambda self: self.state == "open")
        @rule()
        def finish(self) -> None:
            if self.left:
                with pytest.raises(RefitError, match="never arrived"):
                    self.engine.finish_refit()
                self.state = "broken"
                return
            assert self.engine.finish_refit().version == self.target
            self.state, self.version = "ready", self.target

        @rule()
        def abort(self) -> None:
            self.engine.abort_refit()
            self.state = "broken" if self.state == "open" else self.state

        @precondition(lambda self: self.state != "open")
        @rule()
        def out_of_order(self) -> None:
            with pytest.raises(RefitError, match=f"state {self.state}"):
                self.engine.write(Bucket({}))
            with pytest.raises(RefitError, match=f"state {self.state}"):
                self.engine.finish_refit()

        @invariant()
        def generates_only_when_whole(self) -> None:
            if self.state == "ready":
                assert self.engine.version == self.version
                assert answer(self.engine) == expected[self.version]
                return
            assert not self.engine.has_work()
            with pytest.raises(EngineError, match=r"weights yet|refit is open|refit failed"):
                self.engine.step()

    quiet = settings(max_examples=15, stateful_step_count=12, deadline=None, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(Machine, settings=quiet)


def test_a_broken_engine_takes_no_requests_until_a_full_refit(decoder: TrainableDecoder) -> None:
    engine = make_engine(decoder)
    with pytest.raises(EngineError, match="no weights yet"):
        engine.submit([ask(0)])
    load(engine, decoder)
    before = answer(engine)
    engine.begin_refit(Manifest.of(decoder.snapshot, 1, decoder.description.coverage.digest))
    engine.submit([ask(0, new=3)])  # waits for the refit's end
    assert engine.poll(0.01) == []
    engine.abort_refit()
    with pytest.raises(EngineError, match="refit failed or was aborted"):
        engine.probe([ask(-1)])
    load(engine, decoder)
    assert [done.request_id for done in engine.poll(5.0)] == [0]
    assert answer(engine) == before
