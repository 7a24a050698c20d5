"""Streams of many requests through few slots: whatever happens around it, a completion has the tokens that it has alone."""

from __future__ import annotations

import random
from typing import Any

import models
import pytest
import torch
from demo import CONTEXT, EOS, ask, drain, load, make_decoder, ready

from trtl_rl.engines.torch_engine.engine import TorchEngine
from trtl_rl.kernels.kernel_set import KernelSet
from trtl_rl.model.bind import TrainableDecoder
from trtl_rl.rollout import Completion, Request

COMMA = 15  # of the bundled tokenizer: a second id that ends an answer


@pytest.fixture(scope="module")
def decoder() -> TrainableDecoder:
    return make_decoder()


def stream(count: int, vocab: int = 16, seed: int = 0) -> list[Request]:
    """Requests of mixed prompt lengths, limits, temperatures and samples; some are greedy, some give logprobs."""
    draw = random.Random(seed)
    return [
        ask(
            id,
            [draw.randrange(3, vocab) for _ in range(draw.choice((1, 2, 6, 6, 15, 38)))],
            samples=draw.choice((1, 1, 1, 2, 3)),
            new=draw.choice((1, 2, 5, 9, 24)),
            temperature=draw.choice((0.5, 1.0, 1.6)),
            greedy=draw.random() < 0.1,
            logprobs=draw.random() < 0.2,
        )
        for id in range(count)
    ]


def alone(engine: TorchEngine, requests: list[Request]) -> list[Completion]:
    """One request at a time; with one slot each of its samples, too."""
    out: list[Completion] = []
    for request in requests:
        engine.submit([request])
        out += drain(engine)
    return out


def only(done: list[Completion], requests: list[Request]) -> list[Completion]:
    """The completions of some requests."""
    ids = {request.id for request in requests}
    return [item for item in done if item.request_id in ids]


def in_portions(engine: TorchEngine, requests: list[Request], seed: int = 0) -> list[Completion]:
    """Submit a few at a time, in another order, with steps in between."""
    draw = random.Random(seed)
    rest, done = draw.sample(requests, len(requests)), []
    while rest:
        count = draw.randint(1, 12)
        engine.submit(rest[:count])
        rest = rest[count:]
        for _ in range(draw.randint(0, 4)):
            if engine.has_work():
                engine.step()
        done += engine.take_done()
    return sorted([*done, *drain(engine)], key=lambda item: (item.request_id, item.sample))


@pytest.mark.parametrize(
    ("count", "slots", "every"),
    [(1, 4, 1), (7, 3, 1), (60, 5, 3), pytest.param(1000, 24, 20, marks=pytest.mark.slow)],
)
def test_a_stream_gives_each_request_the_tokens_that_it_gets_alone(
    decoder: TrainableDecoder, count: int, slots: int, every: int
) -> None:
    requests = stream(count)
    engine = ready(decoder, slots=slots, stop_ids=[EOS, COMMA])
    engine.submit(requests)
    together = drain(engine)
    assert [(item.request_id, item.sample) for item in together] == [
        (request.id, sample) for request in requests for sample in range(request.samples)
    ]
    chosen = requests[::every]
    assert only(together, chosen) == alone(ready(decoder, slots=1, stop_ids=[EOS, COMMA]), chosen)
    assert in_portions(engine, requests) == together
    if count >= 60:
        ends = {item.ids[-1] if item.finish_reason == "stop" else item.finish_reason for item in together}
        assert ends == {EOS, COMMA, "length"}, "the stream does not try every end of an answer"


@pytest.mark.parametrize("family", models.FAMILIES)
def test_a_stream_is_the_same_alone_in_every_architecture(family: str) -> None:
    decoder = models.bind(models.tiny(family), "fp8_block")
    requests = stream(24, decoder.description.vocab, seed=1)
    engines = [
        TorchEngine(decoder.description, KernelSet(False), slots=slots, context=CONTEXT, stop_ids=[2])
        for slots in (4, 1)
    ]
    for engine in engines:
        load(engine, decoder, decoder.refresh(0))
    engines[0].submit(requests)
    assert only(drain(engines[0]), requests[::3]) == alone(engines[1], requests[::3])


def test_a_group_larger_than_the_slots_is_whole_and_the_same(decoder: TrainableDecoder) -> None:
    group, others = ask(100, samples=21, new=20), stream(12)
    roomy = ready(decoder, slots=21)
    roomy.submit([group])
    expected = drain(roomy)
    assert [item.sample for item in expected] == list(range(21)) and len({tuple(item.ids) for item in expected}) > 10
    for order in ([group, *others], [*others, group]):
        engine = ready(decoder, slots=4)
        engine.submit(order)
        done = drain(engine)
        assert only(done, [group]) == expected
        assert only(done, others) == alone(ready(decoder, slots=1), others)


def test_cancelling_in_the_middle_frees_slots_and_changes_nothing_else(decoder: TrainableDecoder) -> None:
    requests = [ask(id, samples=1 + id % 3, new=24, temperature=1.5) for id in range(24)]
    engine = ready(decoder, slots=4, stop_ids=[])
    engine.submit(requests)
    whole = drain(engine)
    engine.submit(requests)
    gone, done = [], []
    for id in (0, 1, 5, 9, 23):  # running, then waiting ones
        for _ in range(3):
            engine.step()
        done += engine.take_done()
        before = engine.unfinished
        engine.cancel([id])
        cancelled = engine.take_done()
        assert sorted(item.sample for item in only(cancelled, [requests[id]])) == list(range(1 + id % 3))
        running = [item for item in cancelled if item.ids]
        assert engine.unfinished == before - len(running)
        gone += cancelled
    rest = [request for request in requests if request.id not in (0, 1, 5, 9, 23)]
    done = sorted([*done, *drain(engine)], key=lambda item: (item.request_id, item.sample))
    assert only(done, rest) == only(whole, rest)
    assert engine.unfinished == 0
    ended = {(item.request_id, item.sample): item for item in whole}
    assert {item.finish_reason for item in gone} == {"cancelled"}
    assert any(0 < len(item.ids) < 24 for item in gone) and any(not item.ids for item in gone)
    for item in gone:
        assert item.ids == ended[item.request_id, item.sample].ids[: len(item.ids)]
    engine.submit(requests)  # the slots that were freed in the middle leave no trace
    assert drain(engine) == whole


@pytest.mark.parametrize("policy", ["continue", "finish"])
def test_pauses_in_the_middle_change_nothing(decoder: TrainableDecoder, policy: Any) -> None:
    requests = stream(20)
    engine = ready(decoder, slots=3, stop_ids=[])
    engine.submit(requests)
    expected = drain(engine)
    engine.submit(requests)
    done: list[Completion] = []
    for steps in (0, 1, 3, 7, 2):
        for _ in range(steps):
            engine.step()
        engine.pause(policy)
        assert not engine.has_work() and (policy == "continue" or engine.unfinished == 0)
        done += engine.poll(0)
        assert engine.poll(0.01) == []
        engine.resume()
    assert engine.has_work(), "the pauses did not come in the middle"
    done += drain(engine)
    assert sorted(done, key=lambda item: (item.request_id, item.sample)) == expected


# --- long prompts, long contexts ---


@pytest.mark.parametrize("lengths", [(1537,), pytest.param((1700, 2010, 1537), marks=pytest.mark.slow)])
def test_long_prompts_beside_short_ones_are_the_same(decoder: TrainableDecoder, lengths: tuple[int, ...]) -> None:
    draw = random.Random(4)
    long = [ask(id, [draw.randrange(3, 16) for _ in range(n)], samples=2, new=4) for id, n in enumerate(lengths)]
    short = [ask(10 + id, new=12) for id in range(6)]
    engine = ready(decoder, slots=4, context=2048)
    engine.submit([short[0], long[0], *short[1:4], *long[1:], *short[4:]])
    assert drain(engine) == alone(ready(decoder, slots=2, context=2048), [*long, *short])


@pytest.mark.slow
def test_a_long_prompt_beside_short_ones_has_the_trainers_logprobs() -> None:
    decoder = make_decoder(context=2048)
    draw = random.Random(5)
    requests = [ask(0, [draw.randrange(3, 16) for _ in range(1537)], new=4, logprobs=True)]
    requests += [ask(id, new=12, logprobs=True) for id in (1, 2, 3)]
    engine = ready(decoder, slots=3, context=2048)
    engine.submit(requests)
    done = drain(engine)
    sequences = [[*request.ids, *item.ids] for request, item in zip(requests, done, strict=True)]
    with torch.no_grad():
        scored = decoder.forward(sequences, [len(item.ids) for item in done], 1.0)[0]
    assert torch.equal(scored, torch.tensor([value for item in done for value in item.logprobs or []]))


def test_short_requests_are_the_same_in_a_context_of_thousands(decoder: TrainableDecoder) -> None:
    requests = stream(16)
    results = []
    for context in (CONTEXT, 5000):
        engine = ready(decoder, slots=3, context=context)
        engine.submit(requests)
        results.append(drain(engine))
    assert results[0] == results[1]


@pytest.mark.parametrize("new", [150, pytest.param(700, marks=pytest.mark.slow)])
def test_a_long_answer_is_the_same_beside_others_that_come_and_go(decoder: TrainableDecoder, new: int) -> None:
    context = new + 16
    long = ask(0, new=new, temperature=1.2)
    others = [ask(id, new=(3, 40, 20)[id % 3]) for id in range(1, 16)]
    expected = alone(ready(decoder, slots=1, context=context, stop_ids=[]), [long])
    assert len(expected[0].ids) == new
    engine = ready(decoder, slots=3, context=context, stop_ids=[])
    engine.submit([long, *others])
    assert only(drain(engine), [long]) == expected
