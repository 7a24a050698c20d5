"""The failing engine does what its mode says, and nothing else. What a run makes of it: ``tests/faults``."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from demo import ask, load, make_decoder, make_engine, small

from trtl_rl import Trainer
from trtl_rl.engines.engine import RolloutEngine
from trtl_rl.engines.faulty import Fault, FaultyEngine
from trtl_rl.engines.unanswered import Unanswered
from trtl_rl.errors import EngineError, RefitError, UserError
from trtl_rl.model.bind import TrainableDecoder
from trtl_rl.refit.sender import send
from trtl_rl.rollout import Completion


@pytest.fixture(scope="module")
def decoder() -> TrainableDecoder:
    return make_decoder()


def faulty(decoder: TrainableDecoder, fault: str) -> FaultyEngine:
    """An engine at version 0 that no token stops."""
    engine = FaultyEngine(make_engine(decoder, stop_ids=()), Fault.parse(fault))
    load(engine, decoder)
    return engine


def next_version(engine: RolloutEngine, decoder: TrainableDecoder, version: int) -> None:
    """A refit with other weights."""
    tensors = {**decoder.snapshot, "model.norm.weight": decoder.snapshot["model.norm.weight"] * (1 + version / 8)}
    send(engine, tensors, version=version, coverage=decoder.description.coverage.digest, bucket_bytes=2**14)


@pytest.mark.parametrize("mode", ["skip_scales", "partial_refit", "reply_error"])
def test_a_refit_that_fails_leaves_the_version_before(decoder: TrainableDecoder, mode: str) -> None:
    engine = faulty(decoder, f"{mode}:2")
    next_version(engine, decoder, 1)
    assert engine.version == 1 and len(engine.probe([ask(-1)])) == 1
    with pytest.raises(RefitError, match=r"never arrived|no memory left"):
        next_version(engine, decoder, 2)
    assert engine.version == 1
    (done,) = engine.probe([ask(-2)])
    assert done.version_last == 1


def test_answers_from_older_weights_look_like_new_ones(decoder: TrainableDecoder) -> None:
    engine = faulty(decoder, "stale_prefix_cache")
    engine.submit([ask(0, samples=2)])
    first = sorted(engine.poll(10) + engine.poll(10), key=lambda item: item.sample)
    assert [item.logprobs for item in first] == [None, None] and len(first) == 2
    next_version(engine, decoder, 1)
    stale = engine.probe([ask(-1, samples=4, logprobs=True)])
    assert {(item.request_id, item.sample, item.version_first, item.version_last) for item in stale} == {
        (-1, sample, 1, 1) for sample in range(4)
    }
    assert {tuple(item.ids) for item in stale} == {tuple(item.ids) for item in first}
    assert all(len(item.logprobs or []) == len(item.ids) for item in stale)
    other = [7, 8, 9]
    assert engine.probe([ask(-2, other)])[0].ids != stale[0].ids
    assert faulty(decoder, "stale_prefix_cache:5").probe([ask(-2, other)])


def test_a_permuted_weight_hides_behind_the_right_digest(decoder: TrainableDecoder) -> None:
    engine, sound = faulty(decoder, "permute_after_refit"), make_engine(decoder, stop_ids=())
    load(sound, decoder)
    asked = [ask(-1, logprobs=True, greedy=True)]
    assert engine.probe(asked) == sound.probe(asked), "before the fault strikes"
    for target in (engine, sound):
        next_version(target, decoder, 1)  # raises when the digest is not the trainer's
    assert engine.version == 1 and engine.probe(asked)[0].logprobs != sound.probe(asked)[0].logprobs


def test_a_dead_engine_in_this_process_answers_nothing_more(decoder: TrainableDecoder) -> None:
    engine = faulty(decoder, "die_at_step")
    assert engine.probe([ask(-1)]), "a probe belongs to the step before"
    for call in (
        lambda: engine.submit([ask(0)]),
        lambda: engine.poll(0),
        lambda: engine.probe([ask(-2)]),
        engine.resume,
    ):
        with pytest.raises(EngineError, match=r"died \(on purpose: engine\.fault=die_at_step:1\)"):
            call()


def test_an_engine_that_dies_in_a_refit_has_taken_its_requests(decoder: TrainableDecoder) -> None:
    engine = faulty(decoder, "die_in_refit")
    engine.submit([ask(0)])
    with pytest.raises(EngineError, match=r"died \(on purpose: engine\.fault=die_in_refit:1\)"):
        next_version(engine, decoder, 1)


@pytest.mark.parametrize(("mode", "lost"), [("lose_request", [0]), ("lose_prompt", [0, 2])])
def test_a_lost_request_is_taken_and_never_answered(decoder: TrainableDecoder, mode: str, lost: list[int]) -> None:
    engine = faulty(decoder, mode)
    assert engine.probe([ask(-1)]), "a probe is no request of the run"
    engine.submit([ask(0), ask(1, [7, 8, 9])])
    engine.submit([ask(2)])
    done: list[int] = []
    while engine.has_work():
        done += [item.request_id for item in engine.poll(1.0)]
    assert sorted([*done, *lost]) == [0, 1, 2]
    assert engine.progress() == {}, "the report does not have it either"


def test_a_call_that_is_never_answered_ends_with_close(decoder: TrainableDecoder) -> None:
    engine = faulty(decoder, "never_reply")
    engine.submit([ask(0)])
    assert engine.poll(0.1) == [] and not engine.has_work()
    raised: list[BaseException] = []

    def refit() -> None:
        try:
            next_version(engine, decoder, 1)
        except EngineError as error:
            raised.append(error)

    thread = threading.Thread(target=refit)
    thread.start()
    thread.join(0.3)
    assert thread.is_alive()
    engine.close()
    thread.join(10)
    assert not thread.is_alive() and "closed before it answered" in str(raised[0])


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            {"engine": {"fault": "skip_scale"}},
            r"no engine\.fault 'skip_scale'\. Did you mean 'skip_scales'\? Known: skip_",
        ),
        ({"engine": {"fault": "die_at_step:0"}}, r"after the colon stands a step"),
        ({"engine": {"fault": "die_at_step:x"}}, r"after the colon stands a step"),
        ({"engine": {"fault": "die_at_step:2:often"}}, r"after the step may stand 'always'"),
        ({"engine": {"fault": "die_at_step:9"}}, r"die_at_step:9 cannot happen: the run has 3 steps"),
        ({"engine": {"fault": "raw_logprobs"}}, r"changes nothing at sampling\.temperature=1"),
        ({"engine": {"fault": "stale_prefix_cache"}, "parity": {"every": 0}}, r"parity\.every=0 makes none"),
    ],
)
def test_a_fault_that_cannot_happen_is_refused(keys: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said):
        Trainer(args=small(tmp_path / "run", **keys))


# --- an engine that lives and answers nothing ---


def test_an_engine_that_computes_for_long_is_not_taken_for_one_that_lost_a_request() -> None:
    unanswered = Unanswered()
    assert unanswered.overdue(0) is None, "nothing was asked"
    unanswered.ask([ask(3, samples=2), ask(4)])
    unanswered.came([], busy_seconds=0.5)
    assert unanswered.overdue(5) is None
    time.sleep(0.02)
    unanswered.came([], busy_seconds=0.5)
    assert "2 requests wait for answers: 3, 4" in str(unanswered.overdue(0.01))
    unanswered.came([], busy_seconds=0.6)
    assert unanswered.overdue(0.01) is None, "it computes"
    unanswered.came([Completion(3, sample, [5], "length", 0, 0) for sample in range(2)], busy_seconds=0.6)
    time.sleep(0.02)
    assert "1 request waits for an answer: 4" in str(unanswered.overdue(0.01))
    unanswered.withdraw([4])
    assert unanswered.overdue(0.01) is None


def test_what_is_under_way_is_known_between_two_reports() -> None:
    unanswered = Unanswered()
    unanswered.ask([ask(3, samples=4), ask(4)])
    unanswered.came([], 0.1, [(3, [5, 9, 7]), (4, [])])
    assert unanswered.progress() == {3: [5, 9, 7], 4: []}
    unanswered.came([Completion(3, 0, [1] * 8, "stop", 0, 0)], 0.2)
    assert unanswered.progress() == {3: [5, 9], 4: []}, "the one of 7 has ended with 8"
    unanswered.came([], 0.2, [])
    assert unanswered.progress() == {}
