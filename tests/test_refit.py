from __future__ import annotations

import io
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
from refit_parts import NORM, SCALE, WEIGHT, changes, deliver, flipped, payload, receiver, sent
from torch import Tensor

from trtl_rl.engines.torch_engine.engine import TorchEngine
from trtl_rl.errors import EngineError, RefitError
from trtl_rl.model.bind import TrainableDecoder
from trtl_rl.refit.channel import Receiver
from trtl_rl.refit.manifest import Bucket, Manifest, RefitResult, buckets, joined_digest, tensor_digest
from trtl_rl.refit.sender import send
from trtl_rl.refit.shared_memory import SharedMemorySender

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
    assert target.state == "empty" and not target.generates
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
def test_what_arrives_otherwise_than_announced_ends_the_refit_by_name(
    change: Callable[[dict[str, Tensor]], dict[str, Tensor]], named: str
) -> None:
    target, good = receiver(), payload()
    deliver(target, good)
    with pytest.raises(RefitError, match=named):
        deliver(target, change(good), announced=good)
    assert target.state == "ready" and target.generates
    with pytest.raises(RefitError, match="state ready"):
        target.write(Bucket(good))
    with pytest.raises(RefitError, match="state ready"):
        target.check()
    # the version before is still what a delta would build on, whole
    assert target.begin(replace(Manifest.of(good, 2, "recipe"), base=Manifest.of(good, 1, "recipe").digest))
    assert target.complete and all(torch.equal(target.check()[0][name], good[name]) for name in good)


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
    staged, manifest = target.check()
    assert torch.equal(staged[NORM], good[NORM])
    assert manifest.digest == joined_digest({name: tensor_digest(t) for name, t in staged.items()})


# --- digest and buckets ---


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

    def begin_refit(self, manifest: Manifest) -> bool:
        self.manifest = manifest
        self._call("begin")
        return False

    def write(self, bucket: Bucket) -> None:
        self._call("write")

    def finish_refit(self) -> RefitResult:
        self._call("finish")
        assert self.manifest is not None
        return RefitResult(self.manifest.version, self.digest or self.manifest.digest, 0.0, 0.0)

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
    report = send_to(FakeTarget(), previous=sent({**before, WEIGHT: codes}))
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
        """A model of the engine beside the engine, under any order of calls; weights come through shared memory."""

        @initialize()
        def new(self) -> None:
            self.engine = make_engine(decoder, slots=1)
            self.open, self.version, self.target = False, -1, -1
            self.left: list[Bucket] = []
            self.channel, self.receiver = SharedMemorySender(), Receiver(io.BytesIO())

        def teardown(self) -> None:
            self.channel.close()

        def send(self, bucket: Bucket) -> None:
            self.engine.write(self.receiver.receive(self.channel.pack(bucket)))

        @precondition(lambda self: not self.open)
        @rule(version=st.integers(0, 2), fits=st.booleans(), base=st.integers(-1, 2))
        def begin(self, version: int, fits: bool, base: int) -> None:
            manifest = Manifest.of(whole[version], version, coverage)
            if not fits:
                with pytest.raises(RefitError, match="lacks"):
                    self.engine.begin_refit(replace(manifest, tensors=manifest.tensors[1:]))
                return
            digest = Manifest.of(whole[base], base, coverage).digest if base >= 0 else None
            takes_changes = self.engine.begin_refit(replace(manifest, base=digest))
            assert takes_changes == (self.version >= 0 and base == self.version)
            self.channel.begin(manifest, not takes_changes)
            self.open, self.target, self.left = True, version, list(buckets(whole[version], 2**16))
            if takes_changes:
                everything = changes(whole[version], whole[base])
                self.left = list(buckets(everything.tensors, 2**16, everything.packed))

        @precondition(lambda self: self.open)
        @rule()
        def begin_twice(self) -> None:
            with pytest.raises(RefitError, match=f"version {self.target} is still open"):
                self.engine.begin_refit(Manifest.of(whole[0], 0, coverage))

        @precondition(lambda self: self.open and self.left)
        @rule(everything=st.booleans())
        def write(self, everything: bool) -> None:
            for _ in range(len(self.left) if everything else 1):
                self.send(self.left.pop(0))

        @precondition(lambda self: self.open and self.left)
        @rule()
        def write_of_another_version(self) -> None:
            other = whole[(self.target + 1) % 3]
            with pytest.raises(RefitError, match="its bytes are not those"):
                self.send(Bucket({name: other[name] for name in self.left[0].tensors}))
            self.open = False

        @precondition(lambda self: self.open and not self.left)
        @rule()
        def decode(self) -> None:
            assert self.engine.refit.arrived
            self.engine.refit.decode()

        @precondition(lambda self: self.open)
        @rule()
        def finish(self) -> None:
            self.open = False
            if self.left:
                with pytest.raises(RefitError, match="never arrived"):
                    self.engine.finish_refit()
                return
            result = self.engine.finish_refit()
            self.channel.finished()
            self.version = self.target
            assert (result.version, result.digest) == (self.version, Manifest.of(whole[self.version], 0, "").digest)

        @rule()
        def abort(self) -> None:
            self.engine.abort_refit()
            self.open = False

        @precondition(lambda self: not self.open)
        @rule()
        def out_of_order(self) -> None:
            state = "empty" if self.version < 0 else "ready"
            with pytest.raises(RefitError, match=f"state {state}"):
                self.engine.write(Bucket({}))
            with pytest.raises(RefitError, match=f"state {state}"):
                self.engine.finish_refit()

        @invariant()
        def generates_with_the_last_whole_version(self) -> None:
            assert self.engine.version == self.version
            if self.version >= 0:
                assert answer(self.engine) == expected[self.version]
                return
            assert not self.engine.has_work()
            with pytest.raises(EngineError, match="no weights yet"):
                self.engine.step()

    quiet = settings(max_examples=15, stateful_step_count=12, deadline=None, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(Machine, settings=quiet)


def test_an_aborted_refit_leaves_an_engine_that_goes_on(decoder: TrainableDecoder) -> None:
    engine = make_engine(decoder)
    with pytest.raises(EngineError, match="no weights yet"):
        engine.submit([ask(0)])
    manifest = Manifest.of(decoder.snapshot, 1, decoder.description.coverage.digest)
    engine.begin_refit(manifest)
    with pytest.raises(EngineError, match="no weights yet"):
        engine.submit([ask(0)])
    engine.abort_refit()
    load(engine, decoder)
    before = answer(engine)
    engine.begin_refit(manifest)
    engine.submit([ask(0, new=3)])  # a refit is open: nobody waits for it
    assert [done.request_id for done in engine.poll(5.0)] == [0]
    engine.abort_refit()
    assert answer(engine) == before and engine.version == decoder.weights.version
