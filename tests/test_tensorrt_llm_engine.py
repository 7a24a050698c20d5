"""The adapter against the FAKE TensorRT-LLM: its silent loader, its life cycles, and what happens when a refit fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from demo import CONTEXT, PROMPT, ask, make_decoder
from engine_dirs import checkpoint_of
from fake_engine import FAKES, built, fake_engine
from models import ALIGNED
from torch import Tensor

from trtl_rl.engines.directory import EngineDirectory
from trtl_rl.engines.tensorrt_llm.engine import TensorrtLlmEngine
from trtl_rl.engines.tensorrt_llm.worker import _State
from trtl_rl.errors import EngineError, RefitError, UserError
from trtl_rl.model.bind import TrainableDecoder
from trtl_rl.refit.manifest import Manifest
from trtl_rl.refit.sender import Mode, Sent, send
from trtl_rl.rollout import Completion
from trtl_rl.trainer.parity import compare
from trtl_rl.trainer.verify_tensorrt_llm import perturbed

SOON = 60.0
Start = Callable[..., TensorrtLlmEngine]


@pytest.fixture(scope="module")
def decoder() -> TrainableDecoder:
    return make_decoder()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> EngineDirectory:
    return built(tmp_path_factory.mktemp("engine") / "engine")


@pytest.fixture
def start(directory: EngineDirectory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Makes engines over the fake, in this process, and ends them."""
    monkeypatch.syspath_prepend(FAKES)
    made: list[TensorrtLlmEngine] = []

    def make(variant: str = "", place: EngineDirectory = directory, **rest: Any) -> TensorrtLlmEngine:
        monkeypatch.setenv("FAKE_TENSORRT_LLM", variant)
        made.append(fake_engine(place, **rest))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def bring(
    engine: TensorrtLlmEngine,
    decoder: TrainableDecoder,
    tensors: dict[str, Tensor] | None = None,
    version: int = 0,
    mode: Mode = "full",
    previous: Sent | None = None,
) -> Sent:
    return send(
        engine,
        tensors or decoder.snapshot,
        version=version,
        coverage=decoder.description.coverage.digest,
        bucket_bytes=2**16,
        mode=mode,
        previous=previous,
    ).sent


def state(engine: TensorrtLlmEngine) -> list[dict[str, Any]]:
    """What the fake's workers have seen."""
    return engine._driver.workers("fake_state")


def mismatch(engine: TensorrtLlmEngine, decoder: TrainableDecoder, tensors: dict[str, Tensor]) -> dict[str, float]:
    """The engine's answers beside the trainer's logprobs with ``tensors``."""
    requests = [ask(-1 - i, PROMPT[: 3 + i], samples=2, new=8, logprobs=True, temperature=0.7) for i in range(2)]
    completions = sorted(engine.probe(requests), key=lambda item: (-item.request_id, item.sample))
    decoder.load(dict(tensors), 0)
    sequences = [[*requests[-1 - item.request_id].ids, *item.ids] for item in completions]
    lengths = [len(item.ids) for item in completions]
    with torch.no_grad():
        ours = decoder.forward(sequences, lengths, 0.7)[0]
    return compare(ours, torch.tensor([value for item in completions for value in item.logprobs or []]), lengths)


def collect(engine: TensorrtLlmEngine, count: int) -> list[Completion]:
    done: list[Completion] = []
    end = time.monotonic() + SOON
    while len(done) < count:
        assert time.monotonic() < end, f"{len(done)} of {count}"
        done += engine.poll(0.1)
    return sorted(done, key=lambda item: (item.request_id, item.sample))


# --- generating ---


def test_weights_arrive_and_logprobs_are_the_trainers(start: Start, decoder: TrainableDecoder) -> None:
    engine = start()
    with pytest.raises(EngineError, match="has no weights yet"):
        engine.submit([ask(0)])
    assert decoder.description.coverage.difference(engine.coverage()) == []
    first = decoder.snapshot
    sent = bring(engine, decoder)
    assert mismatch(engine, decoder, first)["mismatch/differing_tokens"] == 0

    second = perturbed(first, share=0.3, seed=1)
    sent = bring(engine, decoder, second, 1, "full", sent)
    assert mismatch(engine, decoder, second)["mismatch/differing_tokens"] == 0
    assert mismatch(engine, decoder, first)["mismatch/differing_tokens"] > 0

    third = perturbed(second, share=0.01, seed=2)
    sent = bring(engine, decoder, third, 2, "delta", sent)
    assert engine.version == 2 and sent.manifest.digest == Manifest.of(third, 0, "").digest
    assert mismatch(engine, decoder, third)["mismatch/differing_tokens"] == 0
    assert [item["resets"] for item in state(engine)] == [3], "the prefix cache is reset with every version"
    assert engine._driver.llm.salts == {"version 0", "version 1", "version 2"}


def test_completions_have_their_lengths_reasons_and_versions(start: Start, decoder: TrainableDecoder) -> None:
    engine = start(slots=3)
    bring(engine, decoder)
    with pytest.raises(UserError, match="needs 70 tokens"):
        engine.submit([ask(9, new=CONTEXT)])
    engine.submit([ask(0, samples=5, new=6), ask(1, samples=2, new=3)])
    assert engine.unfinished == 3, "no more than there are slots"
    assert sorted(engine.progress()) == [0, 1]
    done = collect(engine, 7)
    assert [(item.request_id, item.sample) for item in done] == [(0, i) for i in range(5)] + [(1, 0), (1, 1)]
    for item in done:
        assert (item.version_first, item.version_last, item.logprobs) == (0, 0, None)
        assert (item.ids[-1] == 1) == (item.finish_reason == "stop")
        assert item.finish_reason == "stop" or len(item.ids) == (6 if item.request_id == 0 else 3)
    assert len({tuple(item.ids) for item in done[:5]}) > 1, "samples of a prompt have streams of their own"
    prefills = [item.prefills for item in done if item.sample == 0]
    assert prefills == [[len(ask(0).ids) - 1]] * 2 and not any(item.prefills for item in done if item.sample)
    assert not engine.has_work() and engine.busy_seconds > 0


def test_cancelled_and_waiting_completions_come_back_once(start: Start, decoder: TrainableDecoder) -> None:
    engine = start(slots=2, stop_ids=[])
    bring(engine, decoder)
    engine.submit([ask(0, samples=4, new=50), ask(1, new=4)])
    engine.cancel([0])
    done = collect(engine, 5)
    assert [item.finish_reason for item in done] == ["cancelled"] * 4 + ["length"]


def test_a_pause_keeps_tokens_and_a_drain_begins_nothing(start: Start, decoder: TrainableDecoder) -> None:
    engine = start(slots=2, stop_ids=[], context=256)
    bring(engine, decoder)
    engine.submit([ask(0, samples=3, new=120)])
    engine.pause("continue")
    assert len(engine.progress()[0]) == 2 and not engine.has_work()
    engine.resume()
    done = collect(engine, 3)
    assert [len(item.ids) for item in done] == [120, 120, 120]
    prompt = len(ask(0).ids)
    assert done[0].prefills[0] == prompt - 1 and all(tokens >= prompt - 1 for item in done for tokens in item.prefills)
    assert len(done[0].prefills) + len(done[1].prefills) + len(done[2].prefills) <= 3, "two were interrupted at most"

    engine.submit([ask(1, samples=3, new=30)])
    engine.pause("finish")
    assert len(engine.take_done()) == 2 and not engine.has_work()
    engine.resume()
    assert len(collect(engine, 1)) == 1


def test_probes_go_first_and_do_not_mix_with_completions(start: Start, decoder: TrainableDecoder) -> None:
    engine = start(slots=1, stop_ids=[])
    bring(engine, decoder)
    engine.submit([ask(0, samples=2, new=4)])
    found = engine.probe([ask(-1, new=4, logprobs=True)])
    assert [item.request_id for item in found] == [-1] and len(found[0].logprobs or []) == 4
    assert [item.request_id for item in collect(engine, 2)] == [0, 0]


def test_versions_for_a_verification_differ_as_said_and_hold_no_nan() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    known = codes[codes & 0x7F != 0x7F].repeat(100)
    for flip in (0x01, 0x08):
        new = perturbed({"w": known.view(torch.float8_e4m3fn)}, share=0.3, seed=1, flip=flip)["w"]
        assert not bool(new.float().isnan().any())
        changed = new.view(torch.uint8) ^ known
        assert set(changed.tolist()) == {0, flip} and 0.28 < float((changed != 0).float().mean()) < 0.31


# --- refits that go wrong ---


def test_an_aborted_refit_leaves_modules_and_version_alone(start: Start, decoder: TrainableDecoder) -> None:
    engine = start()
    first = decoder.snapshot
    bring(engine, decoder)
    following = Manifest.of(perturbed(first, share=0.3, seed=1), 1, decoder.description.coverage.digest)
    engine.begin_refit(following)
    engine.abort_refit()
    assert engine.version == 0 and state(engine)[0]["sweeps"] == 1, "nothing was loaded"
    assert mismatch(engine, decoder, first)["mismatch/differing_tokens"] == 0


@pytest.mark.parametrize(
    ("variant", "said"),
    [
        ("forget:2", r"k_proj\.weight: after loading, rank 0 holds other bytes"),
        ("raise:2", "FAKE: out of memory"),
    ],
)
def test_a_refit_that_fails_in_the_middle_brings_the_version_before_back(
    start: Start, decoder: TrainableDecoder, variant: str, said: str
) -> None:
    engine = start(variant, stop_ids=[])
    first = {name: tensor.clone() for name, tensor in decoder.snapshot.items()}
    bring(engine, decoder)
    engine.submit([ask(0, samples=2, new=50)])
    second = perturbed(first, share=0.3, seed=1)
    with pytest.raises(RefitError, match=rf"{said}.*All ranks are back at version 0"):
        bring(engine, decoder, second, 1)
    assert state(engine)[0]["hooks"][:5] == ["begin", "finalise", "begin", "abort", "begin"]
    done = collect(engine, 2)
    assert [(item.version_first, item.version_last, len(item.ids)) for item in done] == [(0, 0, 50)] * 2
    assert mismatch(engine, decoder, first)["mismatch/differing_tokens"] == 0
    bring(engine, decoder, second, 1)
    assert mismatch(engine, decoder, second)["mismatch/differing_tokens"] == 0


def test_nothing_is_generated_with_a_mixture_that_could_not_be_undone(start: Start, decoder: TrainableDecoder) -> None:
    engine = start("stuck:2")
    bring(engine, decoder)
    with pytest.raises(RefitError, match="Nothing is generated until a whole refit succeeds"):
        bring(engine, decoder, perturbed(decoder.snapshot, share=0.3, seed=1), 1)
    assert not engine.has_work()
    with pytest.raises(EngineError, match="ranks hold a mixture"):
        engine.submit([ask(0)])


def test_a_payload_that_the_loader_would_take_does_not_get_past_the_worker(
    start: Start, decoder: TrainableDecoder
) -> None:
    engine = start()
    first = decoder.snapshot
    name = "model.layers.0.mlp.up_proj.weight_scale_inv"
    for wrong in (
        {**first, name: first[name].flatten()[:1]},
        {key: value for key, value in first.items() if key != name},
    ):
        with pytest.raises(RefitError, match=r"up_proj\.weight_scale_inv"):
            bring(engine, decoder, wrong)
    assert engine.version == -1 and state(engine)[0]["sweeps"] == 0


def test_the_fakes_own_loader_is_as_silent_as_the_one_it_stands_for(start: Start, decoder: TrainableDecoder) -> None:
    """Without this the tests above would prove nothing."""
    engine = start()
    first = {name: tensor.clone() for name, tensor in decoder.snapshot.items()}
    bring(engine, decoder)
    shared = engine._driver.llm._shared
    model_engine = shared.workers[0].engine.model_engine
    name = "model.layers.0.self_attn.k_proj.weight"
    for wrong in (
        {name: torch.ones(first[name].shape, dtype=torch.bfloat16)},
        {f"{name}_scale_inv": torch.full((1,), 3.0)},
        {"model.layers.0.self_attn.qkv_proj.weight": first[name]},
        {"model.layers.0.self_attn.k_porj.weight": first[name]},
    ):
        model_engine.model_loader.reload(model_engine.model, wrong, allow_partial_loading=True)
    held = shared.unfused()
    assert torch.equal(held[name].float(), torch.ones(first[name].shape))
    assert held[f"{name}_scale_inv"].flatten().tolist() == [3.0] * first[f"{name}_scale_inv"].numel()


# --- faults of TensorRT-LLM that are known: each guard of the table in engines/tensorrt_llm/__init__.py that has no test above ---


def test_parameters_that_move_under_captured_graphs_fail_the_refit(start: Start, decoder: TrainableDecoder) -> None:
    with pytest.raises(RefitError, match=r"parameters have moved while CUDA graphs were captured.*#10456"):
        bring(start("moves"), decoder)
    engine = start("moves", overrides={"cuda_graph_config": None})
    bring(engine, decoder)
    assert mismatch(engine, decoder, decoder.snapshot)["mismatch/differing_tokens"] == 0


def test_memory_that_a_refit_keeps_is_said(
    start: Start, decoder: TrainableDecoder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = start()
    size = sum(tensor.nbytes for tensor in decoder.snapshot.values())
    for kept, said in ((size // 20, False), (size, True)):
        memory = iter((0, kept))
        monkeypatch.setattr(_State, "_memory", lambda state, memory=memory: next(memory))
        bring(engine, decoder, version=engine.version + 1)
        assert ("TensorRT-LLM #14330" in capsys.readouterr().out) == said


def test_a_pause_waits_until_the_workers_are_idle(
    start: Start, decoder: TrainableDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(stop_ids=[], context=256)
    bring(engine, decoder)
    engine.submit([ask(0, samples=2, new=120)])
    llm, called = engine._driver.llm, []
    call = llm.collective_rpc
    monkeypatch.setattr(llm, "collective_rpc", lambda name, **rest: (called.append(name), call(name, **rest))[1])
    engine.pause("continue")
    assert called == ["wait_for_engine_idle"], "TensorRT-LLM #13784"


def test_a_version_without_hooks_for_refits_does_not_start(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorrt_llm.llmapi.rlhf_utils import WorkerExtension

    monkeypatch.setattr(WorkerExtension, "update_weights", None)
    with pytest.raises(EngineError, match=r"cannot be refitted: its loader lacks begin_update_weights"):
        start("old")


# --- versions and ranks ---


def test_the_older_life_cycle_interrupts_what_is_in_flight_and_goes_on(start: Start, decoder: TrainableDecoder) -> None:
    engine = start("old", stop_ids=[], context=256)
    assert "update_weights(None)" in engine.about()["text"]
    first = decoder.snapshot
    bring(engine, decoder)
    engine.submit([ask(0, samples=2, new=120)])
    second = perturbed(first, share=0.3, seed=1)
    bring(engine, decoder, second, 1)
    done = collect(engine, 2)
    assert [(item.version_first, item.version_last, len(item.ids)) for item in done] == [(0, 1, 120)] * 2
    assert mismatch(engine, decoder, second)["mismatch/differing_tokens"] == 0
    assert state(engine)[0]["resets"] == 2


def test_completions_go_on_over_a_refit_between_two_steps(start: Start, decoder: TrainableDecoder) -> None:
    engine = start(stop_ids=[], context=256)
    bring(engine, decoder)
    engine.submit([ask(0, samples=2, new=120)])
    bring(engine, decoder, perturbed(decoder.snapshot, share=0.1, seed=1), 1)
    assert [(item.version_first, item.version_last, len(item.ids)) for item in collect(engine, 2)] == [(0, 1, 120)] * 2


def test_two_ranks_hold_their_parts_and_both_are_read_back(
    start: Start, decoder: TrainableDecoder, tmp_path: Path
) -> None:
    model = checkpoint_of(tmp_path / "model", **{**ALIGNED, "head_dim": 128, "intermediate_size": 512})
    place = built(tmp_path / "engine", str(model), ranks=2)
    engine = start("", place, context=32, stop_ids=[2])
    d = place.description
    tensors = place.tensors()

    def to(version: int, values: dict[str, Tensor]) -> None:
        send(engine, values, version=version, coverage=d.coverage.digest, bucket_bytes=2**18)

    to(0, tensors)
    shared = engine._driver.llm._shared
    assert [item["sweeps"] for item in state(engine)] == [1, 1]
    held = shared.unfused()
    assert all(torch.equal(held[name].view(torch.uint8), tensors[name].view(torch.uint8)) for name in tensors)
    engine.submit([ask(0, [3, 4, 5], new=4)])
    assert len(collect(engine, 1)) == 1
    part = shared.workers[1].engine.model_engine.model.get_submodule("model.layers.0.self_attn.o_proj")
    assert part.weight.shape == (128, 256)


def test_memory_that_was_given_away_is_filled_again_from_the_workers_copies(
    start: Start, decoder: TrainableDecoder
) -> None:
    engine = start(stop_ids=[])
    first = decoder.snapshot
    bring(engine, decoder)
    engine.submit([ask(0, new=40)])
    engine.sleep()
    assert not engine.has_work()
    engine.wake()
    assert len(collect(engine, 1)[0].ids) == 40
    assert mismatch(engine, decoder, first)["mismatch/differing_tokens"] == 0


def test_weights_that_tensorrt_llm_loaded_itself_are_compared_with_the_directory(
    start: Start, decoder: TrainableDecoder, directory: EngineDirectory
) -> None:
    engine = start(load_format="auto")
    assert engine.version == 0
    assert mismatch(engine, decoder, directory.tensors())["mismatch/differing_tokens"] == 0
