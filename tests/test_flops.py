"""FLOP formulas against torch's counter on stock models, against what this learner and engine really run, and by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from demo import PROMPT, ask, drain, make_decoder, ready
from hypothesis import given, settings
from hypothesis import strategies as st
from models import bind, tiny
from torch.utils.flop_counter import FlopCounterMode

from trtl_rl.errors import UserError
from trtl_rl.flops import formulas
from trtl_rl.flops.devices import Device, device_named
from trtl_rl.flops.formulas import Attention, ModelShape, decode, forward, learning, prefill, recompute, rollout
from trtl_rl.flops.precision import Fp8Products
from trtl_rl.kernels.autograd import head_is_recomputed

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
STOCK = ["Qwen2", "Qwen3", "Llama"]


# --- by hand ---------------------------------------------------------------------------------------------------------
# Linears: q 4·4, k 4·2, v 4·2, o 4·4, three of 4·8 = 144. Head: 4·10 = 40. Attention: 4·heads·head_dim = 16 a pair.


def test_prefill_computes_the_head_at_every_position() -> None:
    assert (SMALL.linear_parameters, SMALL.head_parameters) == (144, 40)
    assert prefill(SMALL, 3) == 2 * 144 * 3 + 16 * (1 + 2 + 3) + 2 * 40 == 1040
    assert prefill(SMALL, 3, attention="full") == 2 * 144 * 3 + 16 * 9 + 2 * 40 == 1088


def test_decode_counts_a_forward_for_the_last_token() -> None:
    assert decode(SMALL, 3, 3) == 2 * (2 * 144 + 2 * 40) + 16 * (4 + 5) == 880
    assert decode(SMALL, 3, 1) == 0  # the prefill gave it
    assert decode(SMALL, 3, 0) == 0  # a cancelled sample


def test_a_group_shares_its_prompt_s_last_token_or_pays_for_the_prompt_again() -> None:
    # two prompt tokens once; then from position 2 on: two forwards of the first sample, one of the second
    once = 2 * 144 * 2 + 16 * (1 + 2)
    token = 2 * 144 + 2 * 40
    assert rollout(SMALL, 3, [2, 1]) == once + 3 * token + 16 * (3 + 4 + 3) == 1888
    assert rollout(SMALL, 3, [2]) == prefill(SMALL, 3) + decode(SMALL, 3, 2)
    # a prefill that was given up after one token, and done again; one that was in a cache
    assert rollout(SMALL, 3, [2, 1], prefills=[1, 2]) == 1888 + 2 * 144 + 16
    assert rollout(SMALL, 3, [2, 1], prefills=[]) == 1888 - once
    assert rollout(SMALL, 1, [1]) == token + 16  # a prompt of one token has nothing to prefill


def test_learning_computes_the_head_at_prompt_positions_or_feeds_the_last_token() -> None:
    once = 2 * 144 * 4 + 16 * (1 + 2 + 3 + 4)
    assert learning(SMALL, 3, 2) == 3 * (once + 2 * 40 * 2) == 4416
    assert learning(SMALL, 3, 2, attention="full") == 3 * (2 * 144 * 4 + 16 * 16 + 2 * 40 * 2)
    assert forward(SMALL, 3, 2) == once + 2 * 40 * 2 == rollout(SMALL, 3, [2])


def test_recomputation_is_left_out() -> None:
    attention = 16 * (1 + 2 + 3 + 4)
    assert recompute(SMALL, 3, 2) == attention * 3 // 2
    assert recompute(SMALL, 3, 2, checkpointing=True) == attention * 3 // 2 + 2 * 144 * 4 + attention
    assert recompute(SMALL, 3, 2, head_again=True) == attention * 3 // 2 + 2 * 40 * 2


def test_adapters_train_the_frozen_weights_too() -> None:
    shape = ModelShape(1, 4, 2, 1, 2, 8, 10, lora_down=12, lora_up=20)
    attention = 16 * (1 + 2 + 3 + 4)
    # 4N·T + 6·N_lora·T + three times attention, and the head forward and for its input
    assert learning(shape, 3, 2) == (4 * 144 + 6 * 32) * 4 + 3 * attention + 4 * 40 * 2
    assert recompute(shape, 3, 2) == attention * 3 // 2 + 2 * 12 * 4
    assert decode(shape, 3, 2) == decode(SMALL, 3, 2) + 2 * 32


def test_critic_and_reward_model_have_a_vocabulary() -> None:
    assert formulas.critic(SMALL, 3, 2) == 3 * (2 * 144 * 4 + 16 * 10 + 2 * 4 * 2)
    assert formulas.reward_model(SMALL, 5) == 2 * 144 * 5 + 16 * 15 + 2 * 4 * 5
    assert formulas.reward_model(SMALL, 5, outputs=2, scored=1) == 2 * 144 * 5 + 16 * 15 + 2 * 4 * 2


shapes = st.builds(ModelShape, *[st.integers(1, 9) for _ in range(7)])


@settings(max_examples=50, deadline=None)
@given(shapes, st.integers(1, 20), st.integers(1, 20), st.integers(1, 20))
def test_decode_in_two_parts_costs_something_else(shape: ModelShape, start: int, first: int, second: int) -> None:
    # a part of n tokens runs n - 1 forwards, so that two parts share the token between them
    parts = decode(shape, start, first) + decode(shape, start + first - 1, second)
    assert parts == decode(shape, start, first + second - 1)


@settings(max_examples=50, deadline=None)
@given(shapes, st.integers(1, 20), st.integers(1, 20))
def test_a_cache_saves_flops_of_attention(shape: ModelShape, prompt: int, answer: int) -> None:
    generated = prefill(shape, prompt) + decode(shape, prompt, answer)
    assert generated == forward(shape, prompt, answer) == rollout(shape, prompt, [answer])
    assert learning(shape, prompt, answer) == 3 * generated  # so rho is 3/4 where nothing is shared or recomputed


# --- against torch's counter on stock models -------------------------------------------------------------------------


def stock_model(name: str, kind: str = "ForCausalLM", **over: Any) -> tuple[Any, ModelShape]:
    transformers = pytest.importorskip("transformers")
    # Qwen3 and Llama: heads · head_dim differs from hidden, and the head is tied
    extra: dict[str, Any] = {"Qwen3": {"head_dim": 8, "tie_word_embeddings": True}, "Llama": {"head_dim": 6}}.get(
        name, {}
    )
    config = getattr(transformers, f"{name}Config")(**SIZES, **extra, **over)
    model = getattr(transformers, f"{name}{kind}")(config)
    return model, ModelShape.from_hf_config(config)


def counted(work: Callable[[], Any], custom: dict[Any, Any] | None = None) -> int:
    """What torch's counter sees in ``work()``, without the rotary embedding's angles: some releases of transformers
    write them as a matrix product of inner size 1."""
    counter = FlopCounterMode(display=False, custom_mapping=custom)
    with counter:
        work()
    by_module = counter.get_flop_counts()
    angles = sum(sum(ops.values()) for name, ops in by_module.items() if name.endswith("rotary_emb"))
    return int(counter.get_total_flops() - angles)


@pytest.mark.parametrize("name", STOCK)
@pytest.mark.parametrize("adapted", [False, True])
def test_search_flops_differ_from_a_stock_model(name: str, adapted: bool) -> None:
    model, shape = stock_model(name)
    if adapted:
        model, shape = with_adapters(model)
    prompt, new = 7, 5
    ids = torch.arange(prompt)[None]
    assert prefill(shape, prompt, attention="full") == counted(lambda: model(input_ids=ids, logits_to_keep=1))

    def generate() -> None:
        answer = model.generate(input_ids=ids, max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0)
        assert answer.shape == (1, prompt + new)

    assert prefill(shape, prompt, attention="full") + decode(shape, prompt, new) == counted(generate)


def with_adapters(model: Any) -> tuple[Any, ModelShape]:
    """LoRA of rank 3 around every linear of the layers."""
    peft = pytest.importorskip("peft")
    roles = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=3, target_modules=roles, lora_dropout=0.0))
    return wrapped, ModelShape.from_model(wrapped)


@pytest.mark.parametrize("name", STOCK)
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
def test_learning_flops_differ_from_a_stock_model(name: str, checkpointing: bool, adapted: bool) -> None:
    model, shape = stock_model(name)
    stock = model
    if adapted:
        model, shape = with_adapters(model)
    if checkpointing:  # the reentrant form runs whole layers again; the other one stops before a layer's last product
        stock.train()
        stock.gradient_checkpointing_enable({"use_reentrant": True})
    if checkpointing or adapted:
        stock.enable_input_require_grads()
    prompt, answer = 7, 5
    ids = torch.arange(prompt + answer - 1)[None]
    predicting = torch.arange(prompt - 1, prompt + answer - 1)

    def once() -> Any:
        return model(input_ids=ids, logits_to_keep=predicting, use_cache=False).logits

    def both() -> None:
        once().sum().backward()

    again = formulas.layers(shape, prompt + answer - 1, attention="full") if checkpointing else 0
    assert forward(shape, prompt, answer, attention="full") == counted(once)
    assert learning(shape, prompt, answer, attention="full") + again == counted(both)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("Qwen3Moe", {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 2}),
        ("Qwen2Moe", {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 8,
                      "shared_expert_intermediate_size": 12, "mlp_only_layers": [0]}),
        ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    ],
)  # fmt: skip
def test_experts_that_a_token_does_not_pass_are_counted(name: str, sizes: dict[str, Any]) -> None:
    model, shape = stock_model(name, experts_implementation="eager", **sizes)
    assert counted(lambda: model(torch.arange(9)[None], logits_to_keep=1)) == prefill(shape, 9, attention="full")
    # by another way than the shape's: all parameters that are no embedding, head, norm or bias, less the skipped experts
    weights = sum(
        p.numel() for n, p in model.named_parameters() if p.dim() > 1 and "embed_tokens" not in n and "lm_head" not in n
    )
    assert shape.linear_parameters == weights - shape.inactive_parameters and shape.inactive_parameters > 0


@pytest.mark.parametrize("name", STOCK)
def test_a_reward_model_is_counted_without_its_score(name: str) -> None:
    model, shape = stock_model(name, "ForSequenceClassification", num_labels=3, pad_token_id=0)
    ids = torch.arange(1, 12)[None]
    expected = formulas.reward_model(shape, 11, outputs=3, attention="full")
    assert expected == counted(lambda: model(input_ids=ids))


def test_causal_and_full_attention_are_mixed_up() -> None:
    def pairs(attention: Attention) -> int:
        linears = 2 * SMALL.linear_parameters * 100 + 2 * SMALL.head_parameters
        return (prefill(SMALL, 100, attention=attention) - linears) // 16

    assert pairs("full") == 100 * 100 and pairs("causal") == 100 * 101 // 2


# --- against what learner and engine really run -----------------------------------------------------------------------


def products(x: Any, w: Any, *rest: Any, **kwargs: Any) -> int:
    return 2 * int(x[0]) * int(x[1]) * int(w[0])


CUSTOM = {torch.ops.mkldnn._linear_pointwise: products}


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_learner_runs_products_that_are_not_counted(adapted: bool, checkpointing: bool) -> None:
    """Its linears and adapters, whose rows fill their tiles exactly. Attention is no matrix product in its forward pass; in
    backward the fused operator runs forward and backward once a layer."""
    model = tiny("qwen3")
    if adapted:
        model, shape = with_adapters(model)
    decoder = bind(model) if not adapted else bind_adapted(model)
    shape = ModelShape.from_model(model)
    decoder.gradient_checkpointing = checkpointing
    lengths = [64, 64]
    sequences = [[1 + i % 7 for i in range(n + 1)] for n in lengths]

    def both() -> None:
        decoder.forward(sequences, lengths, 1.0)[0].sum().backward()

    fused: list[str] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "attention" in func.__name__:
                fused.append("backward" if "backward" in func.__name__ else "forward")
            return func(*args, **(kwargs or {}))

    with Watch():
        seen = counted(both, CUSTOM)
    tokens = sum(lengths)
    linears = 2 * (shape.linear_parameters + shape.lora_parameters) * tokens
    attention = sum(formulas.layers(shape, n) for n in lengths) - linears
    expected = sum(learning(shape, 1, n) + recompute(shape, 1, n, checkpointing=checkpointing) for n in lengths)
    # forward once or twice, and 7 products of attention's backward for the 2 of its forward
    assert seen == expected - attention * (1 + checkpointing) - attention * 7 // 2
    assert fused.count("forward") == fused.count("backward") == shape.layers


def bind_adapted(model: Any) -> Any:
    from models import CONTEXT

    from trtl_rl.kernels.kernel_set import KernelSet
    from trtl_rl.model.bind import TrainableDecoder
    from trtl_rl.recipe.recipe import Recipe

    Recipe.load("none").apply(model.get_base_model())
    decoder = TrainableDecoder(model, KernelSet(False, backward=True), CONTEXT)
    decoder.refresh(0)
    return decoder


def test_a_head_of_more_logits_than_are_kept_is_counted_once() -> None:
    assert not head_is_recomputed(1024, 16)
    assert not head_is_recomputed(128, 150_000) and head_is_recomputed(256, 150_000)


def test_the_engine_prefills_more_or_less_than_is_counted() -> None:
    decoder = make_decoder()
    engine = ready(decoder, slots=8)
    engine.submit([ask(1, samples=3), ask(2, ids=PROMPT[:1], samples=2)])
    done = drain(engine)
    prefills = {id: [n for c in done if c.request_id == id for n in c.prefills] for id in (1, 2)}
    assert prefills == {1: [len(PROMPT) - 1], 2: []}  # once for all samples; one token needs none


def test_a_prompt_that_begins_again_after_a_refit_or_is_cancelled_is_counted_once() -> None:
    from demo import load

    decoder = make_decoder(context=512)
    engine = ready(decoder, slots=2, context=512)
    long = [3 + i % 10 for i in range(450)]
    engine.submit([ask(1, samples=1, new=4), ask(2, ids=long, new=4)])
    engine.step()  # both prompts are computed in this step
    engine.submit([ask(3, ids=long, new=4)])
    decoder.refresh(1)
    load(engine, decoder)  # neither has drawn a token: both begin again
    done = {c.request_id: c for c in drain(engine)}
    assert done[1].prefills == [len(PROMPT) - 1] * 2 and done[2].prefills == [449] * 2 and done[3].prefills == [449]
    engine.submit([ask(4, ids=long, new=4)])
    engine.step()
    engine.cancel([4])
    (cancelled,) = engine.poll(0)
    assert (cancelled.finish_reason, cancelled.prefills) == ("cancelled", [449])
    engine.submit([ask(5, ids=long, new=4)])
    engine.step()
    decoder.refresh(2)
    load(engine, decoder)
    engine.cancel([5])  # it waits again
    (cancelled,) = engine.poll(0)
    assert (cancelled.ids, cancelled.prefills) == ([], [449])


# --- precision and devices -------------------------------------------------------------------------------------------


def test_products_with_one_operand_in_fp8_count_as_fp8() -> None:
    decoder = make_decoder("fp8_block")
    shape = ModelShape.from_model(decoder.model)
    fp8 = Fp8Products.of(decoder.description.coverage)
    assert fp8 == Fp8Products(*[shape.linear_parameters] * 3)  # the bundled recipe leaves the head out
    assert fp8.forward_flops(5, 2) + fp8.backward_flops(5, 2) == 6 * shape.linear_parameters * 5
    assert Fp8Products.of(decoder.description.coverage, frozen=True).wgrad == 0
    assert Fp8Products.of(make_decoder("none").description.coverage) == Fp8Products()


def test_an_unknown_device_gets_a_peak() -> None:
    for name in (
        "CPU",
        "NVIDIA H800",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA GeForce RTX 4090",
        "AMD Instinct MI300X",
        "NVIDIA H200 NVL",
        "NVIDIA H100 NVL",
        "NVIDIA GB200",
    ):
        assert device_named(name).bf16 is None and device_named(name).ideal_seconds(10, 5) is None
    h200, a100 = device_named("NVIDIA H200"), device_named("NVIDIA A100-SXM4-80GB")
    assert (h200.bf16, h200.fp8, a100.fp8) == (989.5e12, 1979e12, None)
    assert Device("x", 10.0, 20.0).ideal_seconds(100, 60) == 40 / 10 + 60 / 20
    assert Device("x", 10.0).ideal_seconds(100, 60) == 10.0


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
