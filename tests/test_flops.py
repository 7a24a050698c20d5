"""FLOP accounting: the formulas against torch's counter on stock models and by hand, the ledger and the budget."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trtl_rl.config_parts import BudgetConfig
from trtl_rl.errors import UserError
from trtl_rl.flops.formulas import Attention, ModelShape, decode, learning, prefill
from trtl_rl.flops.ledger import ROLES, WASTES, Budget, Ledger

SMALL = ModelShape(layers=1, hidden=4, heads=2, kv_heads=1, head_dim=2, intermediate=8, vocab=10)
SIZES: dict[str, Any] = dict(
    vocab_size=53,
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    max_position_embeddings=64,
    use_cache=True,
    attn_implementation="eager",
)


def new_ledger() -> Ledger:
    return Ledger(parameters=7, reward_system="exact_match", evaluation_target="held-out exact match")


# --- formulas, by hand -----------------------------------------------------------------------------------------------
# Linears: q 4·4, k 4·2, v 4·2, o 4·4, three of 4·8 = 144. Head: 4·10 = 40. Attention: 4·heads·head_dim = 16 a pair.


def test_prefill_computes_the_head_at_every_position() -> None:
    assert (SMALL.linear_parameters, SMALL.head_parameters) == (144, 40)
    assert prefill(SMALL, 3) == 2 * 144 * 3 + 16 * (1 + 2 + 3) + 2 * 40 == 1040
    assert prefill(SMALL, 3, attention="full") == 2 * 144 * 3 + 16 * 9 + 2 * 40 == 1088


def test_decode_counts_a_forward_for_the_last_token() -> None:
    assert decode(SMALL, 3, 3) == 2 * (2 * 144 + 2 * 40) + 16 * (4 + 5) == 880
    assert decode(SMALL, 3, 1) == 0  # the prefill gave it
    assert decode(SMALL, 3, 0) == 0  # a cancelled sample


def test_learning_computes_the_head_at_prompt_positions() -> None:
    forward = 2 * 144 * 5 + 16 * (1 + 2 + 3 + 4 + 5)
    assert learning(SMALL, 3, 2) == 3 * (forward + 2 * 40 * 2) == 5520
    assert learning(SMALL, 3, 2, recompute=True) == 5520 + forward
    assert learning(SMALL, 3, 2, attention="full") == 3 * (2 * 144 * 5 + 16 * 25 + 2 * 40 * 2)


shapes = st.builds(ModelShape, *[st.integers(1, 9) for _ in range(7)])


@settings(max_examples=50, deadline=None)
@given(shapes, st.integers(1, 20), st.integers(1, 20), st.integers(1, 20))
def test_decode_in_two_parts_costs_something_else(shape: ModelShape, start: int, first: int, second: int) -> None:
    # a part of n tokens runs n - 1 forwards, so that two parts share the token between them
    parts = decode(shape, start, first) + decode(shape, start + first - 1, second)
    assert parts == decode(shape, start, first + second - 1)


@settings(max_examples=50, deadline=None)
@given(shapes, st.integers(1, 20), st.integers(1, 20))
def test_decoding_costs_less_than_one_forward_over_the_same_tokens(shape: ModelShape, start: int, new: int) -> None:
    extra_heads = 2 * shape.head_parameters * (new - 1)
    generated = prefill(shape, start) + decode(shape, start, new)
    assert generated == prefill(shape, start + new - 1) + extra_heads  # a KV cache saves no FLOPs of attention
    forward = generated - 2 * shape.head_parameters * new
    # one update of a rollout that shares nothing costs nearly three times its search
    assert learning(shape, start, new) >= 3 * (forward + 2 * shape.head_parameters * new)


# --- formulas, against torch's counter on stock models ---------------------------------------------------------------


def stock_model(name: str) -> tuple[Any, ModelShape]:
    transformers = pytest.importorskip("transformers")
    # Qwen3 and Llama: heads · head_dim differs from hidden, and the head is tied
    extra = {"Qwen2": {}, "Qwen3": {"head_dim": 8, "tie_word_embeddings": True}, "Llama": {"head_dim": 6}}[name]
    config = getattr(transformers, f"{name}Config")(**SIZES, **extra)
    return getattr(transformers, f"{name}ForCausalLM")(config), ModelShape.from_hf_config(config)


def counted(work: Callable[[], Any]) -> int:
    """What torch's counter sees in ``work()``, without the rotary embedding's angles: some releases of transformers
    write them as a matrix product of inner size 1."""
    from torch.utils.flop_counter import FlopCounterMode

    counter = FlopCounterMode(display=False)
    with counter:
        work()
    by_module = counter.get_flop_counts()
    angles = sum(sum(ops.values()) for name, ops in by_module.items() if name.endswith("rotary_emb"))
    return int(counter.get_total_flops() - angles)


@pytest.mark.parametrize("name", ["Qwen2", "Qwen3", "Llama"])
def test_search_flops_differ_from_a_stock_model(name: str) -> None:
    import torch

    model, shape = stock_model(name)
    prompt, new = 7, 5
    ids = torch.arange(prompt)[None]
    assert prefill(shape, prompt, attention="full") == counted(lambda: model(ids, logits_to_keep=1))

    def generate() -> None:
        answer = model.generate(ids, max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0)
        assert answer.shape == (1, prompt + new)

    assert prefill(shape, prompt, attention="full") + decode(shape, prompt, new) == counted(generate)


@pytest.mark.parametrize("name", ["Qwen2", "Qwen3", "Llama"])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
def test_learning_flops_differ_from_a_stock_model(name: str, recompute: bool) -> None:
    import torch

    model, shape = stock_model(name)
    if recompute:  # the reentrant form runs whole layers again; the other one stops before a layer's last product
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": True})
        model.enable_input_require_grads()
    prompt, answer = 7, 5
    ids = torch.arange(prompt + answer)[None]
    predicting = torch.arange(prompt - 1, prompt + answer - 1)

    def forward() -> Any:
        return model(ids, logits_to_keep=predicting, use_cache=False).logits

    def both() -> None:
        forward().sum().backward()

    if not recompute:
        full = learning(shape, prompt, answer, attention="full")
        assert full == 3 * counted(forward)
    assert learning(shape, prompt, answer, recompute=recompute, attention="full") == counted(both)


def test_causal_and_full_attention_are_mixed_up() -> None:
    def pairs(attention: Attention) -> int:
        linears = 2 * SMALL.linear_parameters * 100 + 2 * SMALL.head_parameters
        return (prefill(SMALL, 100, attention=attention) - linears) // 16

    assert pairs("full") == 100 * 100 and pairs("causal") == 100 * 101 // 2


class FakeConfig:
    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)


def test_shape_ignores_an_explicit_head_dim_or_its_absence() -> None:
    fields = dict(SIZES, num_key_value_heads=None)
    shape = ModelShape.from_hf_config(FakeConfig(**fields))
    assert (shape.head_dim, shape.kv_heads) == (4, 6)
    assert ModelShape.from_hf_config(FakeConfig(**fields, head_dim=16)).head_dim == 16


def test_other_architecture_is_counted_with_wrong_sizes() -> None:
    fields = {key: value for key, value in SIZES.items() if key != "intermediate_size"}
    with pytest.raises(UserError, match="intermediate_size=None"):
        ModelShape.from_hf_config(FakeConfig(**fields))


@pytest.fixture
def switching() -> Iterator[None]:
    """Threads take turns so often that a missing lock shows."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(usual)


# --- the ledger ------------------------------------------------------------------------------------------------------


def test_waste_or_evaluation_becomes_a_fourth_addend() -> None:
    ledger = new_ledger()
    ledger.add("search", 30)
    ledger.add("learning", 60)
    ledger.add("feedback", 10)
    ledger.waste("stale", 20)
    ledger.apart("evaluation", 1000, seconds=2.0)
    metrics = ledger.step_metrics()
    assert metrics["flops/total"] == 100 == ledger.total()
    assert metrics["flops/update_fraction"] == 0.6 == ledger.update_fraction()
    assert {name: metrics[f"flops/wasted/{name}"] for name in WASTES} == dict.fromkeys(WASTES, 0) | {"stale": 20}
    assert Budget(BudgetConfig(flops=101), 9).reached(ledger, 0, 0.0, 0) is None


def test_step_counters_run_on_into_the_next_step() -> None:
    ledger = new_ledger()
    ledger.add("search", 10)
    ledger.waste("failed", 3)
    ledger.step_metrics()
    ledger.add("learning", 30)
    metrics = ledger.step_metrics()
    assert {role: metrics[f"flops/{role}"] for role in ROLES} == {"search": 0, "learning": 30, "feedback": 0}
    assert metrics["flops/total"] == 30 and metrics["flops/wasted/failed"] == 0
    assert metrics["flops/cumulative/search"] == 10 and metrics["flops/cumulative/total"] == 40
    assert metrics["flops/update_fraction"] == 0.75  # of the run, not of the step


def test_update_fraction_of_nothing_divides_by_zero() -> None:
    assert "flops/update_fraction" not in new_ledger().step_metrics()
    assert new_ledger().update_fraction() is None


def test_adds_from_several_threads_are_lost(switching: None) -> None:
    ledger = new_ledger()
    seen: list[dict[str, float]] = []
    done = threading.Event()

    def work() -> None:
        for _ in range(5000):
            ledger.add("search", 1, seconds=1.0)
            ledger.add("feedback", 2)
            ledger.waste("cancelled", 1)

    def reap() -> None:
        while not done.is_set():
            seen.append(ledger.step_metrics())

    reader = threading.Thread(target=reap)
    workers = [threading.Thread(target=work) for _ in range(4)]
    for thread in [reader, *workers]:
        thread.start()
    for thread in workers:
        thread.join()
    done.set()
    reader.join()
    seen.append(ledger.step_metrics())
    # every add is in exactly one step
    assert sum(step["flops/total"] for step in seen) == ledger.total() == 60_000
    assert sum(step["flops/wasted/cancelled"] for step in seen) == 20_000
    assert ledger.report()["seconds"]["search"] == 20_000.0
    assert ledger.report()["wasted"]["cancelled"] == 20_000


def test_large_counts_are_rounded() -> None:
    ledger = new_ledger()
    ledger.add("learning", 2**70)
    ledger.add("learning", 1)
    state = json.loads(json.dumps(ledger.state_dict()))
    resumed = new_ledger()
    resumed.load_state_dict(state)
    assert resumed.total() == 2**70 + 1


def test_resume_forgets_part_of_the_ledger() -> None:
    ledger = new_ledger()
    ledger.add("search", 10, seconds=0.5)
    ledger.step_metrics()
    ledger.add("feedback", 4, seconds=0.25)  # of a step that is still open
    ledger.waste("zero_signal", 2)
    ledger.apart("warm_up", 5, seconds=1.5)
    state = ledger.state_dict()
    resumed = new_ledger()
    resumed.load_state_dict(json.loads(json.dumps(state)))
    assert resumed.report() == ledger.report()
    assert resumed.step_metrics() == ledger.step_metrics()
    other = new_ledger()
    other.load_state_dict(state)
    other.apart("warm_up", 1)
    assert state["apart_flops"]["warm_up"] == 5  # nothing is shared


def test_ledger_of_another_version_is_half_loaded() -> None:
    ledger = new_ledger()
    ledger.add("search", 3)
    state = ledger.state_dict()
    del state["flops"]["feedback"]
    fresh = new_ledger()
    for wrong in ({}, {**ledger.state_dict(), "format": 0}, state, {**ledger.state_dict(), "wasted": None}):
        with pytest.raises(UserError, match="another version"):
            fresh.load_state_dict(wrong)
    assert fresh.total() == 0


def test_ledger_file_does_not_say_what_it_counts(tmp_path: Path) -> None:
    ledger = new_ledger()
    ledger.add("learning", 3, seconds=1.0)
    ledger.add("search", 1)
    ledger.apart("evaluation", 9, seconds=2.0)
    path = tmp_path / "ledger.json"
    path.write_text("old")
    ledger.write(path)
    found = json.loads(path.read_text())
    assert found["flops"] == {"search": 1, "learning": 3, "feedback": 0, "total": 4}
    assert found["update_fraction"] == 0.75
    assert found["apart"] == {"evaluation": {"flops": 9, "seconds": 2.0}}
    assert (found["model_parameters"], found["reward_system"]) == (7, "exact_match")
    assert found["evaluation_target"] == "held-out exact match" and "multiply-add is 2" in found["conventions"]
    assert [item.name for item in tmp_path.iterdir()] == ["ledger.json"]


def test_kill_while_writing_tears_the_ledger_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ledger.json"
    new_ledger().write(path)
    whole = path.read_text()

    def killed(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.fsync", killed)
    ledger = new_ledger()
    ledger.add("search", 1)
    with pytest.raises(KeyboardInterrupt):
        ledger.write(path)
    assert path.read_text() == whole


# --- the budget ------------------------------------------------------------------------------------------------------


def test_budget_ends_late_or_names_another_limit() -> None:
    ledger = new_ledger()
    ledger.add("search", 99)
    budget = Budget(BudgetConfig(flops=100, tokens=50, seconds=10), steps=4)
    assert budget.reached(ledger, 49, 9.9, 3) is None
    assert budget.fraction(ledger, 0, 0.0, 0) == 0.99
    assert budget.fraction(ledger, 0, 0.0, 5) == 1.25
    assert budget.reached(ledger, 49, 9.9, 4) == "steps"
    assert budget.reached(ledger, 50, 9.9, 3) == "budget.tokens"
    assert budget.reached(ledger, 49, 10.0, 3) == "budget.seconds"
    ledger.add("feedback", 1)
    assert budget.reached(ledger, 49, 9.9, 3) == "budget.flops"


def test_limit_that_is_not_set_ends_the_run() -> None:
    ledger = new_ledger()
    ledger.add("learning", 10**30)
    budget = Budget(BudgetConfig(), steps=10)
    assert budget.reached(ledger, 10**12, 1e9, 9) is None
    assert budget.fraction(ledger, 10**12, 1e9, 5) == 0.5
