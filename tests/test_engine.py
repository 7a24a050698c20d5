from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from demo import CONTEXT, EOS, PROMPT, ask, drain, load, make_decoder, make_engine, ready
from hypothesis import given, settings
from hypothesis import strategies as st

import trtl_rl.engines.torch_engine.scheduler as scheduler_module
from trtl_rl.engines.torch_engine.sampler import random_stream
from trtl_rl.errors import EngineError, UserError
from trtl_rl.kernels.ops import sample_tokens
from trtl_rl.model.bind import TrainableDecoder
from trtl_rl.rollout import Completion, Request


@pytest.fixture(scope="module")
def decoder() -> TrainableDecoder:
    return make_decoder()


def prompts(lengths: tuple[int, ...], seed: int = 3) -> list[list[int]]:
    """Random token ids of the demo's vocabulary, without special tokens."""
    draw = random.Random(seed)
    return [[draw.randint(3, 15) for _ in range(n)] for n in lengths]


MIXED = prompts((6, 1, 23, 6, 40, 11, 33, 2))


def mixed_requests() -> list[Request]:
    """Lengths, samples, temperatures and limits of every kind; two of them greedy."""
    temperatures = (1.0, 0.7, 1.3, 1.0, 1.0, 2.0, 0.4, 1.0)
    return [
        ask(i, ids, samples=1 + i % 3, new=(17, 5, 24, 1)[i % 4], temperature=t, greedy=i in (3, 6), logprobs=True)
        for i, (ids, t) in enumerate(zip(MIXED, temperatures, strict=True))
    ]


def one_at_a_time(decoder: TrainableDecoder, requests: list[Request]) -> list[Completion]:
    """Every sample alone in an engine with one slot: nothing shares a batch or a prefill."""
    engine = ready(decoder, slots=1)
    done = []
    for request in requests:
        engine.submit([request])
        done += drain(engine)
    return done


@pytest.fixture(scope="module")
def alone(decoder: TrainableDecoder) -> list[Completion]:
    return one_at_a_time(decoder, mixed_requests())


# --- neither company, order, slots nor prefill change a completion ---


@pytest.mark.parametrize("slots", [1, 2, 5, 16])
def test_company_and_slots_do_not_change_a_completion(
    decoder: TrainableDecoder, alone: list[Completion], slots: int
) -> None:
    assert len({completion.finish_reason for completion in alone}) == 2
    engine = ready(decoder, slots=slots)
    engine.submit(mixed_requests())
    assert drain(engine) == alone


def test_the_order_of_submission_does_not_change_a_completion(
    decoder: TrainableDecoder, alone: list[Completion]
) -> None:
    requests = mixed_requests()
    random.Random(0).shuffle(requests)
    engine = ready(decoder, slots=4)
    done: list[Completion] = []
    for request in requests:  # one more while others are under way
        engine.submit([request])
        engine.step()
        done += engine.take_done()
    done += drain(engine)
    assert sorted(done, key=lambda item: (item.request_id, item.sample)) == alone


def test_a_prompt_that_is_prefilled_in_parts_gives_the_same_tokens(
    decoder: TrainableDecoder, alone: list[Completion], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler_module, "PREFILL_ROWS", 9)
    monkeypatch.setattr(scheduler_module, "ALONE_ROWS", 13)
    engine = ready(decoder, slots=6)
    engine.submit(mixed_requests())
    assert drain(engine) == alone


def test_samples_of_a_prompt_differ_and_do_not_depend_on_their_number(decoder: TrainableDecoder) -> None:
    engine = ready(decoder, slots=3)  # fewer than samples
    engine.submit([ask(7, samples=8)])
    eight = drain(engine)
    assert [completion.sample for completion in eight] == list(range(8))
    assert len({tuple(completion.ids) for completion in eight}) > 3
    engine.submit([ask(7, samples=2)])
    assert drain(engine) == eight[:2]


def test_a_slots_former_occupant_leaves_no_trace(decoder: TrainableDecoder) -> None:
    engine = ready(decoder, slots=1)
    engine.submit([ask(0, new=4, greedy=True)])
    fresh = drain(engine)
    engine.submit([ask(1, prompts((40,))[0], new=20)])
    drain(engine)
    engine.submit([ask(0, new=4, greedy=True)])
    assert drain(engine) == fresh


# --- random streams ---


def test_a_random_stream_depends_on_everything_that_names_a_completion() -> None:
    names = [
        ((s, p, o), sample, v) for s in (0, 1) for p in (0, 1) for o in (0, 1) for sample in (0, 1) for v in (0, 1)
    ]
    streams = [tuple(random_stream(*name, 4)) for name in names]
    assert len(set(streams)) == len(names)
    assert all(0 <= u < 1 for stream in streams for u in stream)
    # (1, 11) and (11, 1) must not be joined to the same text, and a longer answer begins as a shorter one does
    assert not np.array_equal(random_stream((1, 11, 1), 1, 1, 4), random_stream((11, 1, 1), 1, 1, 4))
    assert np.array_equal(random_stream((1, 2, 3), 4, 5, 100)[:4], random_stream((1, 2, 3), 4, 5, 4))


@pytest.mark.parametrize("other", [(1, 5, 0), (0, 6, 0), (0, 5, 1)])
def test_another_seed_prompt_or_epoch_draws_other_tokens(
    decoder: TrainableDecoder, other: tuple[int, int, int]
) -> None:
    engine = ready(decoder)
    engine.submit([ask(0, samples=4, seed=(0, 5, 0)), ask(1, samples=4, seed=other), ask(2, samples=4, seed=(0, 5, 0))])
    done = [completion.ids for completion in drain(engine)]
    assert done[:4] != done[4:8]
    assert done[:4] == done[8:]  # whatever the request's id is


# --- the sampler ---


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_tokens_are_drawn_from_the_softmax_at_the_temperature(temperature: float) -> None:
    n = 200_000
    logits = torch.tensor([1.5, -float("inf"), 0.0, -1.0, 2.0, -3.0, -float("inf")])
    uniform = torch.from_numpy(np.random.Generator(np.random.Philox(key=1)).random(n))
    tokens, _ = sample_tokens(
        logits.expand(n, -1), torch.full((n,), temperature), uniform, torch.zeros(n, dtype=torch.bool)
    )
    counts = torch.bincount(tokens, minlength=len(logits)).double()
    expected = torch.softmax(logits.double() / temperature, -1) * n
    possible = expected > 0
    assert counts[~possible].sum() == 0
    chi_square = float(((counts - expected)[possible] ** 2 / expected[possible]).sum())
    assert chi_square < 20.5  # 4 degrees of freedom: exceeded once in 2500


@settings(max_examples=100, deadline=None)
@given(
    logits=st.lists(st.one_of(st.just(-float("inf")), st.floats(-30, 30, width=32)), min_size=1, max_size=40),
    uniform=st.one_of(st.sampled_from([0.0, 1 - 2**-53]), st.floats(0, 1, exclude_max=True)),
    temperature=st.floats(0.125, 4, width=32),
)
def test_a_token_of_probability_zero_is_never_drawn(logits: list[float], uniform: float, temperature: float) -> None:
    row = torch.tensor([[*logits, 0.0, -float("inf")]])
    chosen, _ = sample_tokens(row, torch.tensor([temperature]), torch.tensor([uniform]), torch.tensor([False]))
    assert float(torch.softmax(row / temperature, -1)[0, chosen]) > 0


def test_greedy_rows_take_the_largest_logit_beside_sampled_ones() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0]] * 2)
    drawn, _ = sample_tokens(logits, torch.ones(2), torch.tensor([0.01, 0.01]).double(), torch.tensor([True, False]))
    assert drawn.tolist() == [1, 0]


# --- how completions end ---


def test_every_stop_id_ends_an_answer(decoder: TrainableDecoder) -> None:
    plain = one_at_a_time(decoder, [ask(0, samples=8, new=24)])
    comma = 15
    engine = ready(decoder, stop_ids=[EOS, comma])
    engine.submit([ask(0, samples=8, new=24)])
    cut = drain(engine)
    assert any(comma in completion.ids for completion in plain)
    for before, after in zip(plain, cut, strict=True):
        ends = [i for i, id in enumerate(before.ids) if id in (EOS, comma)]
        assert after.ids == (before.ids[: ends[0] + 1] if ends else before.ids)
        assert after.finish_reason == ("stop" if ends else "length")


def test_an_answer_that_stops_with_its_last_token_did_stop(decoder: TrainableDecoder) -> None:
    (full,) = one_at_a_time(decoder, [ask(0, new=40, greedy=True)])
    assert full.finish_reason == "stop" and full.ids[-1] == EOS
    for new, reason in ((len(full.ids), "stop"), (len(full.ids) - 1, "length"), (1, "length")):
        (done,) = one_at_a_time(decoder, [ask(0, new=new, greedy=True)])
        assert done.ids == full.ids[:new] and done.finish_reason == reason


def test_a_request_may_fill_the_context_and_not_exceed_it(decoder: TrainableDecoder) -> None:
    ids = prompts((CONTEXT - 3,))[0]
    engine = ready(decoder)
    engine.submit([ask(0, ids, new=3)])
    (done,) = drain(engine)
    assert 1 <= len(done.ids) <= 3
    with pytest.raises(UserError, match=f"needs {CONTEXT + 1} tokens .*engine.max_context"):
        engine.submit([ask(1, new=4), ask(2, ids, new=4)])
    with pytest.raises(UserError, match="Request 4 has an empty prompt"):
        engine.submit([ask(3, new=4), ask(4, [], new=4)])
    assert not engine.has_work()  # nothing of a refused batch was taken


# --- cancel, pause, refit under way ---


def test_cancelled_requests_end_whether_waiting_or_running(decoder: TrainableDecoder) -> None:
    engine = ready(decoder, slots=3)
    engine.submit([ask(0, samples=2, new=30), ask(1, samples=2, new=30), ask(2, new=4)])
    for _ in range(4):
        engine.step()
    engine.cancel([0, 1])
    done = {(item.request_id, item.sample): item for item in drain(engine)}
    assert sorted(done) == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]
    assert {key: item.finish_reason for key, item in done.items() if key[0] < 2} == dict.fromkeys(
        [(0, 0), (0, 1), (1, 0), (1, 1)], "cancelled"
    )
    # the first step computes prompts; one sample of the second request finds room
    assert [len(done[key].ids) for key in sorted(done)[:4]] == [3, 3, 3, 0]
    assert done[2, 0] == one_at_a_time(decoder, [ask(2, new=4)])[0]
    assert engine.unfinished == 0
    engine.cancel([0, 99])  # gone, and never there
    assert drain(engine) == []


def test_pause_finish_ends_what_has_begun_and_starts_nothing(decoder: TrainableDecoder) -> None:
    engine = ready(decoder, slots=2)
    engine.submit([ask(0, samples=2, new=10), ask(1, samples=2, new=10)])
    engine.step()
    engine.pause("finish")
    assert {item.request_id for item in engine.take_done()} == {0}
    assert engine.unfinished == 0 and engine.poll(0.01) == []
    engine.resume()
    assert {item.request_id for item in drain(engine)} == {1}


def test_pause_continue_stops_at_once_and_goes_on_with_the_same_tokens(decoder: TrainableDecoder) -> None:
    request = ask(0, samples=2, new=16)
    engine = ready(decoder)
    engine.submit([request])
    engine.step()
    engine.pause("continue")
    assert engine.unfinished == 2 and not engine.has_work() and engine.poll(0.01) == []
    with pytest.raises(EngineError, match="cannot answer a probe: it is paused"):
        engine.probe([ask(-1)])
    engine.resume()
    engine.cancel([-1])
    mine = [item for item in drain(engine) if item.request_id == 0]
    assert mine == one_at_a_time(decoder, [request])


def test_a_completion_under_way_knows_both_versions(decoder: TrainableDecoder) -> None:
    engine = ready(decoder, slots=1)
    engine.submit([ask(0, new=10), ask(1, new=10, temperature=3.0)])
    engine.step()
    engine.step()
    decoder.weights.version = 5  # the same weights under another number
    try:
        load(engine, decoder)
        first, second = drain(engine)
        old = one_at_a_time(decoder, [ask(1, new=10, temperature=3.0)])[0]  # at version 5 too
    finally:
        decoder.weights.version = 0
    assert (first.version_first, first.version_last) == (0, 5)
    assert (second.version_first, second.version_last) == (5, 5)
    assert second == old
    assert first.ids == one_at_a_time(decoder, [ask(0, new=10)])[0].ids  # its stream is that of its first token
    assert (
        second.ids != one_at_a_time(decoder, [ask(1, new=10, temperature=3.0)])[0].ids
    )  # and so another than at version 0


def test_a_probe_leaves_other_completions_alone(decoder: TrainableDecoder) -> None:
    engine = ready(decoder, slots=4)
    engine.submit([ask(0, samples=3, new=3)])
    probed = engine.probe([ask(-1, samples=2, new=20, logprobs=True)])
    assert {item.request_id for item in probed} == {-1} and all(item.logprobs for item in probed)
    rest = drain(engine)
    assert [(item.request_id, item.sample) for item in rest] == [(0, 0), (0, 1), (0, 2)]
    assert all(item.logprobs is None for item in rest)


# --- exactness against the trainer, over real updates ---


@pytest.mark.parametrize("recipe", ["fp8_block", "none"])
def test_logprobs_are_those_of_the_trainer_before_and_after_updates(recipe: str) -> None:
    decoder = make_decoder(recipe)
    engine = make_engine(decoder, slots=5)
    optimizer = torch.optim.AdamW(decoder.model.parameters(), lr=1e-3)
    seen = []
    for version in range(3):
        load(engine, decoder)
        engine.submit([request for request in mixed_requests() if request.id != 0])
        engine.submit([ask(0, samples=4, new=20, temperature=0.8, logprobs=True)])
        done = drain(engine)
        by_id = {0: ask(0, temperature=0.8), **{request.id: request for request in mixed_requests() if request.id}}
        for temperature in sorted({request.sampling.temperature for request in by_id.values()}):
            part = [item for item in done if by_id[item.request_id].sampling.temperature == temperature]
            sequences = [[*by_id[item.request_id].ids, *item.ids] for item in part]
            lengths = [len(item.ids) for item in part]
            ours = decoder.forward(sequences, lengths, temperature)[0]
            theirs = torch.tensor([value for item in part for value in item.logprobs or []])
            assert torch.equal(ours.detach(), theirs), f"version {version}, temperature {temperature}"
            if temperature == 0.8:
                (-ours.mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        decoder.refresh(version + 1)
        seen.append(tuple(decoder.forward([[*PROMPT, 3, 4]], [2], 1.0)[0].tolist()))
    assert len(set(seen)) == 3  # the updates did move the weights
