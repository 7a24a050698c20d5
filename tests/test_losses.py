"""The objectives: the theorems of arXiv 2606.03070 as properties, and the faults that such losses have had."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loss_batches import batches, gradient, one_group, quick, subset, value
from torch import Tensor

from trtl_rl.config_parts import LossConfig
from trtl_rl.errors import UserError
from trtl_rl.losses.asympo import ASymPO
from trtl_rl.losses.dr_grpo import DrGRPO
from trtl_rl.losses.grpo import GRPO
from trtl_rl.losses.loss import Loss, LossInputs, advantages, finish_metrics, make_loss, mean_nll
from trtl_rl.losses.naive import Naive
from trtl_rl.losses.regularised import Regularised
from trtl_rl.losses.spo import SPO
from trtl_rl.metrics import Accumulator

FLOOR = 1e-6  # below every S that the strategy makes: the theorems hold where the floor does not bind
ALL: list[Callable[[], Loss]] = [
    ASymPO,
    SPO,
    Naive,
    GRPO,
    lambda: GRPO(recompute=True),
    lambda: GRPO(recompute=True, importance_cap=1.3),
    lambda: DrGRPO(5),
    lambda: ASymPO(p_low=0.05, p_high=0.95),
]
EVERY = [
    *ALL,
    lambda: Regularised(ASymPO(), kl_coefficient=0.1, entropy_coefficient=0.2),
    lambda: Regularised(DrGRPO(5), kl_coefficient=0.1),
]


# --- the advantage -------------------------------------------------------------------------------------------------


def test_advantage_is_divided_by_the_deviation() -> None:
    rewards, groups = torch.tensor([10.0, 0.0, 1.0, 0.0, 2.0]), torch.tensor([0, 1, 1, 0, 1])
    assert advantages(rewards, groups).tolist() == [5.0, -1.0, 0.0, -5.0, 1.0]


@quick
@given(st.floats(-1e6, 1e6), st.integers(1, 9))
def test_rounding_of_the_mean_gives_equal_rewards_an_advantage(reward: float, size: int) -> None:
    rewards = torch.full((size,), reward, dtype=torch.float64)
    assert advantages(rewards, torch.zeros(size, dtype=torch.int64)).tolist() == [0.0] * size


def test_advantage_of_an_unscored_reward_spreads_nan() -> None:
    with pytest.raises(AssertionError, match="finite"):
        advantages(torch.tensor([1.0, math.nan]), torch.tensor([0, 0]))


# --- ASymPO's theorems ---------------------------------------------------------------------------------------------


@quick
@given(batches())
def test_asympo_forward_value_is_not_zero(inputs: LossInputs) -> None:
    assert abs(value(ASymPO(FLOOR)(inputs))) < 1e-6


@quick
@given(batches(most_groups=1), st.data())
def test_asympo_lets_an_unlikely_answer_weigh_more_than_its_advantage(inputs: LossInputs, data: st.DataObject) -> None:
    size = inputs.lengths.numel()
    chosen = data.draw(st.integers(0, size - 1))
    alone = torch.where(torch.arange(size) == chosen, inputs.advantages, 0.0)
    found = value(ASymPO(FLOOR)(replace(inputs, advantages=alone)))
    assert found * size == pytest.approx(float(alone[chosen]), rel=1e-9)


@quick
@given(batches(most_groups=1))
def test_naive_and_asympo_do_not_differ_by_the_imbalance(inputs: LossInputs) -> None:
    up = inputs.advantages.clamp(min=0)
    down = (-inputs.advantages).clamp(min=0)
    if not bool(up.any()):
        return
    size, mass = inputs.lengths.numel(), float(up.sum())
    nll = mean_nll(inputs.logprobs.detach(), inputs)
    positive, negative = float((up * nll).sum()) / mass, float((down * nll).sum()) / float(down.sum())
    naive = Naive()(inputs)
    difference = value(naive) - value(ASymPO(FLOOR)(inputs))
    assert difference == pytest.approx(mass / size * (positive - negative), rel=1e-5, abs=1e-6)
    metrics = finish_metrics(naive.metrics.reduce())
    assert metrics["asympo/nll_positive"] == pytest.approx(positive)
    assert metrics["asympo/nll_negative"] == pytest.approx(negative)
    assert metrics["asympo/imbalance"] == pytest.approx(negative / positive)


@quick
@given(batches(most_groups=1))
def test_asympo_leaves_an_imbalance_between_the_signs(inputs: LossInputs) -> None:
    loss, held = ASymPO(FLOOR), inputs.advantages
    positive = value(loss(replace(inputs, advantages=held.clamp(min=0))))
    negative = -value(loss(replace(inputs, advantages=held.clamp(max=0))))
    if positive > 0:
        assert negative / positive == pytest.approx(1.0, rel=1e-6)


@quick
@given(batches())
def test_asympo_gradient_is_not_that_of_the_logarithm_of_s(inputs: LossInputs) -> None:
    groups = inputs.groups_in_batch
    sizes = torch.bincount(inputs.groups)[inputs.groups]
    starts = (inputs.lengths.cumsum(0) - inputs.lengths).tolist()
    rows = [slice(start, start + length) for start, length in zip(starts, inputs.lengths.tolist(), strict=True)]

    def log_form(logprobs: Tensor) -> Tensor:
        means = torch.stack([-logprobs[row].mean() for row in rows])
        return (inputs.advantages * means.log() / sizes).sum() / groups

    found = gradient(ASymPO(FLOOR), inputs)
    (expected,) = torch.autograd.grad(log_form(inputs.logprobs), inputs.logprobs)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)

    point, step = inputs.logprobs.detach(), 1e-6
    shifts = torch.eye(point.numel(), dtype=torch.float64) * step
    finite = torch.stack([(log_form(point + shift) - log_form(point - shift)) / (2 * step) for shift in shifts])
    torch.testing.assert_close(found, finite, rtol=1e-3, atol=1e-6)

    for r, row in enumerate(rows):  # the length cancels: A_g / sg(sum of -log p), for every token alike
        coefficient = -inputs.advantages[r] / -point[row].sum() / sizes[r] / groups
        torch.testing.assert_close(found[row], coefficient.expand(found[row].shape), rtol=1e-9, atol=1e-12)


# --- every objective -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", EVERY)
@quick
@given(inputs=batches(least_length=0))
def test_micro_batches_do_not_add_up_to_the_batch(make: Callable[[], Loss], inputs: LossInputs) -> None:
    whole = make()(inputs)
    merged, total = Accumulator(), inputs.logprobs.new_zeros(())
    for group in range(inputs.groups_in_batch):
        order = (inputs.groups == group).nonzero()[:, 0]
        part = make()(subset(inputs, order, torch.zeros_like(order)))
        total = total + part.loss
        merged.merge(part.metrics)
    assert float(total.detach()) == pytest.approx(value(whole), rel=1e-9, abs=1e-12)
    expected, found = finish_metrics(whole.metrics.reduce()), finish_metrics(merged.reduce())
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-12)
    (split,) = torch.autograd.grad(total, inputs.logprobs)
    torch.testing.assert_close(split, gradient(make(), inputs), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("make", EVERY)
@quick
@given(inputs=batches(least_length=0), data=st.data())
def test_order_of_responses_changes_the_loss(make: Callable[[], Loss], inputs: LossInputs, data: st.DataObject) -> None:
    order = torch.tensor(data.draw(st.permutations(range(inputs.lengths.numel()))))
    shuffled = make()(subset(inputs, order))
    expected = make()(inputs)
    assert value(shuffled) == pytest.approx(value(expected), rel=1e-9, abs=1e-12)
    assert shuffled.metrics.reduce() == pytest.approx(expected.metrics.reduce(), rel=1e-9)
    (grad,) = torch.autograd.grad(shuffled.loss, inputs.logprobs)
    torch.testing.assert_close(grad, gradient(make(), inputs), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("make", ALL)
def test_group_of_equal_rewards_moves_the_weights(make: Callable[[], Loss]) -> None:
    logprobs = [[-0.2, -3.0], [-1.0], [-0.001, -9.0, -0.5]]
    inputs = one_group(logprobs, [0.1, 0.1, 0.1], behaviour=[[-1.0] * len(row) for row in logprobs])
    assert gradient(make(), inputs).tolist() == [0.0] * 6
    assert "asympo/imbalance" not in finish_metrics(make()(inputs).metrics.reduce())


@pytest.mark.parametrize("make", [*EVERY, lambda: ASymPO(floor=0.0)])
def test_empty_response_spreads_nan(make: Callable[[], Loss]) -> None:
    logprobs: list[list[float]] = [[], [-0.5, -1.5], [], [-2.0]]
    inputs = one_group(logprobs, [0.0, 1.0, 1.0, 0.0], behaviour=logprobs)
    output = make()(inputs)
    grad = gradient(make(), inputs)
    assert math.isfinite(value(output)) and bool(torch.isfinite(grad).all()) and bool((grad != 0).any())
    metrics = output.metrics.reduce()
    assert metrics["asympo/nll_positive"] == 1.0 and metrics["asympo/nll_negative"] == 2.0
    if "asympo/floor_frac" in metrics:
        assert metrics["asympo/floor_frac"] == 0.0


@pytest.mark.parametrize("make", EVERY)
def test_micro_batch_without_tokens_fails(make: Callable[[], Loss]) -> None:
    inputs = one_group([[], []], [0.0, 1.0], behaviour=[[], []])
    output = make()(inputs)
    output.loss.backward()
    assert value(output) == 0.0


@pytest.mark.parametrize("make", ALL)
def test_loss_in_float32_is_promoted_or_detached(make: Callable[[], Loss]) -> None:
    wide = one_group([[-0.5, -1.5], [-2.0]], [0.0, 1.0], behaviour=[[-0.4, -1.4], [-2.1]])
    assert wide.behaviour_logprobs is not None
    narrow = replace(
        wide,
        logprobs=wide.logprobs.detach().float().requires_grad_(),
        advantages=wide.advantages.float(),
        behaviour_logprobs=wide.behaviour_logprobs.float(),
        old_logprobs=wide.behaviour_logprobs.float(),
    )
    output = make()(narrow)
    assert output.loss.dtype == torch.float32
    torch.testing.assert_close(gradient(make(), narrow).double(), gradient(make(), wide), rtol=1e-5, atol=1e-7)


def test_lengths_that_do_not_fit_are_read_as_other_responses() -> None:
    inputs = one_group([[-1.0], [-2.0]], [0.0, 1.0])
    with pytest.raises(AssertionError, match="add up to 3"):
        replace(inputs, lengths=torch.tensor([1, 2]))


# --- ASymPO's floor and bounds -------------------------------------------------------------------------------------


def test_certain_answer_explodes_without_the_floor() -> None:
    inputs = one_group([[-1e-9, -1e-9], [-1.0, -1.0]], [1.0, 0.0])
    grad = gradient(ASymPO(floor=0.01), inputs)
    # A / (G · m · floor) for the first response: its S is below the floor
    torch.testing.assert_close(grad[:2], torch.full((2,), -0.5 / (2 * 2 * 0.01), dtype=torch.float64))
    assert ASymPO(floor=0.01)(inputs).metrics.reduce()["asympo/floor_frac"] == 0.5
    assert float(gradient(ASymPO(floor=0.0), inputs)[0]) < -1e8


@pytest.mark.parametrize("certain", [0.0, 1e-8])
def test_rounding_above_probability_one_divides_by_zero(certain: float) -> None:
    inputs = one_group([[certain], [-1.0]], [1.0, 0.0])
    for floor in (0.0, 1e-3):
        assert bool(torch.isfinite(gradient(ASymPO(floor), inputs)).all())


def test_stabiliser_moves_tokens_that_are_beyond_their_bound() -> None:
    high, low = math.log(0.95), math.log(0.05)
    inputs = one_group([[-0.001, -1.0, high], [-0.001, -9.0, low, -2.0]], [1.0, 0.0])
    loss = ASymPO(FLOOR, p_low=0.05, p_high=0.95)
    positive = (-high + 1.0 - high) / 3
    negative = (0.001 - low - low + 2.0) / 4
    coefficients = [0.0, -0.5 / 2 / 3 / positive, 0.0, 0.5 / 2 / 4 / negative, 0.0, 0.0, 0.5 / 2 / 4 / negative]
    torch.testing.assert_close(gradient(loss, inputs), torch.tensor(coefficients, dtype=torch.float64))
    output = loss(inputs)
    assert abs(value(output)) < 1e-12
    metrics = output.metrics.reduce()
    assert metrics["asympo/bound_high_frac"] == pytest.approx(2 / 3)
    assert metrics["asympo/bound_low_frac"] == pytest.approx(2 / 4)
    assert metrics["asympo/nll_positive"] == pytest.approx((0.001 + 1.0 - high) / 3)  # of the policy, not of the bounds


def test_one_bound_acts_on_the_other_side_too() -> None:
    inputs = one_group([[-0.001, -9.0], [-0.001, -9.0]], [1.0, 0.0])
    for loss, still in ((ASymPO(p_high=0.95), 0), (ASymPO(p_low=0.05), 3)):
        assert (gradient(loss, inputs) == 0).nonzero()[:, 0].tolist() == [still]


def test_infinite_nll_at_a_bound_spreads_nan() -> None:
    inputs = one_group([[-1.0], [-math.inf, -1.0]], [1.0, 0.0])
    output = ASymPO(p_low=0.05)(inputs)
    assert math.isfinite(value(output))
    assert output.metrics.reduce()["asympo/nll_positive"] == 1.0
    assert bool(torch.isfinite(gradient(ASymPO(p_low=0.05), inputs)).all())


# --- the baselines -------------------------------------------------------------------------------------------------


@quick
@given(batches())
def test_spo_scales_positive_answers(inputs: LossInputs) -> None:
    plain, scaled = gradient(Naive(), inputs), gradient(SPO(alpha=0.2), inputs)
    expected = torch.where(inputs.token_advantages() >= 0, plain, 0.2 * plain)
    torch.testing.assert_close(scaled, expected, rtol=1e-9, atol=1e-12)


def test_naive_forgets_the_mean_over_tokens() -> None:
    inputs = one_group([[-1.0, -3.0], [-4.0]], [1.0, 0.0])
    assert value(Naive()(inputs)) == pytest.approx((0.5 * 2.0 - 0.5 * 4.0) / 2)
    torch.testing.assert_close(gradient(Naive(), inputs), torch.tensor([-0.125, -0.125, 0.25], dtype=torch.float64))


def test_grpo_clips_the_wrong_side() -> None:
    ratios = [[1.5, 1.1, 0.5], [1.5, 0.9, 0.5]]
    new = [[math.log(r) - 1.0 for r in row] for row in ratios]
    inputs = one_group(new, [1.0, 0.0], behaviour=[[-1.0] * 3] * 2)
    output = GRPO(clip=0.2)(inputs)
    positive = (1.2 + 1.1 + 0.5) / 3 * 0.5  # above the range a positive answer gains no more
    negative = (1.5 + 0.9 + 0.8) / 3 * -0.5  # below it a negative answer loses no more
    assert value(output) == pytest.approx(-(positive + negative) / 2)
    slope = 0.5 / 3 / 2
    expected = [0.0, -1.1 * slope, -0.5 * slope, 1.5 * slope, 0.9 * slope, 0.0]
    torch.testing.assert_close(gradient(GRPO(clip=0.2), inputs), torch.tensor(expected, dtype=torch.float64))
    metrics = output.metrics.reduce()
    assert metrics["grpo/clip_frac"] == pytest.approx(2 / 6)
    assert metrics["grpo/ratio_max"] == pytest.approx(1.5)


@quick
@given(batches())
def test_grpo_on_policy_is_not_the_policy_gradient(inputs: LossInputs) -> None:
    fresh = replace(inputs, behaviour_logprobs=inputs.logprobs.detach())
    torch.testing.assert_close(gradient(GRPO(), fresh), gradient(Naive(), fresh), rtol=1e-9, atol=1e-12)


def test_stale_behaviour_logprob_overflows_the_ratio() -> None:
    inputs = one_group([[-0.1], [-0.1]], [1.0, 0.0], behaviour=[[-900.0], [-900.0]])
    output = GRPO()(inputs)
    assert math.isfinite(value(output)) and output.metrics.reduce()["grpo/ratio_max"] == pytest.approx(math.exp(20))
    assert bool(torch.isfinite(gradient(GRPO(), inputs)).all())


def test_grpo_without_behaviour_logprobs_invents_them() -> None:
    with pytest.raises(AssertionError, match="behaviour_logprobs"):
        GRPO()(one_group([[-1.0], [-2.0]], [1.0, 0.0]))


# --- from the configuration ----------------------------------------------------------------------------------------


def test_configuration_does_not_reach_the_objective() -> None:
    asympo = make_loss(LossConfig(name="asympo", floor=0.5, p_low=0.02, p_high=0.97))
    assert isinstance(asympo, ASymPO)
    assert (asympo.floor, asympo.p_low, asympo.p_high) == (0.5, 0.02, 0.97)
    unset = make_loss(LossConfig())
    assert isinstance(unset, ASymPO) and (unset.floor, unset.p_low, unset.p_high) == (2e-4, None, None)
    zero = make_loss(LossConfig(name="spo", alpha=0.0))  # 0 is a value, not a missing one
    assert isinstance(zero, SPO) and zero.alpha == 0.0
    spo, grpo = make_loss(LossConfig(name="spo")), make_loss(LossConfig(name="grpo", clip=0.3))
    assert isinstance(spo, SPO) and spo.alpha == 0.2 and isinstance(grpo, GRPO) and grpo.clip == 0.3
    assert isinstance(make_loss(LossConfig(name="naive")), Naive)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        (["loss.name=spo", "loss.p_low=0.05"], "loss.p_low belongs to loss.name=asympo"),
        (["loss.p_low=0.95", "loss.p_high=0.05"], "must be less than loss.p_high"),
        (["loss.p_high=1.0"], "loss.p_high: Input should be less than 1"),
        (["loss.p_low=0"], "loss.p_low: Input should be greater than 0"),
    ],
)
def test_bound_that_cannot_act_is_taken(override: list[str], says: str) -> None:
    from trtl_rl.config import load_config

    with pytest.raises(UserError, match=says):
        load_config(None, override)
