"""What stands beside an objective or changes GRPO's ratio: recomputed logprobs, importance weights, lengths, KL, entropy."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loss_batches import batches, gradient, one_group, quick, subset, value

from trtl_rl.config import load_config
from trtl_rl.config_parts import LossConfig
from trtl_rl.errors import UserError
from trtl_rl.losses.asympo import ASymPO
from trtl_rl.losses.dr_grpo import DrGRPO
from trtl_rl.losses.grpo import GRPO
from trtl_rl.losses.loss import Loss, LossInputs, make_loss
from trtl_rl.losses.naive import Naive
from trtl_rl.losses.regularised import Regularised
from trtl_rl.losses.spo import SPO


def log(*rows: list[float]) -> list[list[float]]:
    return [[math.log(p) for p in row] for row in rows]


# --- recomputed logprobs and importance weights --------------------------------------------------------------------


@quick
@given(batches())
def test_recomputed_logprobs_of_the_same_weights_clip_something(inputs: LossInputs) -> None:
    fresh = replace(inputs, old_logprobs=inputs.logprobs.detach(), behaviour_logprobs=None)
    loss = GRPO(recompute=True)
    torch.testing.assert_close(gradient(loss, fresh), gradient(Naive(), fresh), rtol=1e-9, atol=1e-12)
    metrics = loss(fresh).metrics.reduce()
    assert metrics["grpo/ratio_max"] == 1.0 and metrics.get("grpo/clip_frac", 0.0) == 0.0


@quick
@given(batches())
def test_importance_weights_are_not_the_ratio_to_the_behaviour_policy(inputs: LossInputs) -> None:
    """At the weights before the update, a weight without truncation and the unclipped ratio have one gradient."""
    fresh = replace(inputs, old_logprobs=inputs.logprobs.detach())
    assert fresh.behaviour_logprobs is not None
    now = inputs.logprobs.detach()
    near = replace(fresh, behaviour_logprobs=now - (now - fresh.behaviour_logprobs) / 4)
    weighted, ratio = GRPO(recompute=True, importance_cap=1e9), GRPO(clip=0.5)  # drift of at most 0.25: e^0.25 < 1.5
    torch.testing.assert_close(gradient(weighted, near), gradient(ratio, near), rtol=1e-9, atol=1e-12)


def test_importance_weight_beyond_its_cap_is_not_truncated_or_not_counted() -> None:
    new = log([0.4, 0.6], [0.5, 0.1])
    inputs = replace(
        one_group(new, [1.0, 0.0], behaviour=log([0.1, 0.5], [0.5, 0.2])),
        old_logprobs=torch.tensor([math.log(p) for p in (0.4, 0.6, 0.5, 0.1)], dtype=torch.float64),
    )
    loss = GRPO(recompute=True, importance_cap=2.0)
    slope = 0.5 / 2 / 2
    expected = torch.tensor([-2.0 * slope, -1.2 * slope, slope, 0.5 * slope], dtype=torch.float64)
    torch.testing.assert_close(gradient(loss, inputs), expected)
    metrics = loss(inputs).metrics.reduce()
    assert metrics["importance_weight/mean"] == pytest.approx((4.0 + 1.2 + 1.0 + 0.5) / 4)
    assert metrics["importance_weight/max"] == pytest.approx(4.0)
    assert metrics["importance_weight/capped_frac"] == 0.25
    assert "importance_weight/mean" not in GRPO(recompute=True)(inputs).metrics.reduce()


def test_clipping_below_is_counted_as_clipping_above() -> None:
    ratios = [[1.5, 1.1, 0.5], [1.5, 0.7, 0.5]]
    new = [[math.log(r) - 1.0 for r in row] for row in ratios]
    metrics = GRPO()(one_group(new, [1.0, 0.0], behaviour=[[-1.0] * 3] * 2)).metrics.reduce()
    assert metrics["grpo/clip_high_frac"] == pytest.approx(1 / 6)
    assert metrics["grpo/clip_low_frac"] == pytest.approx(2 / 6)
    assert metrics["grpo/clip_frac"] == pytest.approx(3 / 6)


@pytest.mark.parametrize("missing", ["behaviour_logprobs", "old_logprobs"])
def test_a_missing_logprob_is_invented(missing: str) -> None:
    inputs = one_group(log([0.5], [0.25]), [1.0, 0.0], behaviour=log([0.5], [0.25]))
    lacking = replace(inputs, **{missing: None})  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match=missing):
        GRPO(recompute=True, importance_cap=2.0)(lacking)


# --- the length of a response --------------------------------------------------------------------------------------


@quick
@given(batches())
def test_dr_grpo_divides_by_each_length(inputs: LossInputs) -> None:
    """It is GRPO's gradient, every response's multiplied by its length over the constant."""
    share = inputs.lengths.double()[inputs.rows()] / 7
    torch.testing.assert_close(gradient(DrGRPO(7), inputs), gradient(GRPO(), inputs) * share, rtol=1e-9, atol=1e-12)


def test_a_token_of_a_long_answer_weighs_less_in_dr_grpo() -> None:
    rows = log([0.5], [0.5, 0.5, 0.5, 0.5])
    grad = gradient(DrGRPO(8), one_group(rows, [1.0, 0.0], behaviour=rows))
    torch.testing.assert_close(grad, torch.tensor([-1.0, *[1.0] * 4], dtype=torch.float64) * 0.5 / 2 / 8)


# --- the KL penalty and the entropy bonus --------------------------------------------------------------------------


@quick
@given(batches())
def test_kl_penalty_is_not_the_k3_estimator(inputs: LossInputs) -> None:
    """Beside an objective whose own gradient is taken off; by autograd of the formula, written differently."""
    assert inputs.reference_logprobs is not None
    loss = Regularised(Naive(), kl_coefficient=0.3)
    starts = (inputs.lengths.cumsum(0) - inputs.lengths).tolist()
    rows = [slice(start, start + n) for start, n in zip(starts, inputs.lengths.tolist(), strict=True)]
    sizes = torch.bincount(inputs.groups)[inputs.groups]
    ratio = inputs.reference_logprobs.exp() / inputs.logprobs.exp()
    k3 = ratio - ratio.log() - 1
    term = torch.stack([k3[row].mean() for row in rows]) / sizes
    expected = 0.3 * term.sum() / inputs.groups_in_batch
    output = loss(inputs)
    assert value(output) - value(Naive()(inputs)) == pytest.approx(float(expected.detach()), rel=1e-6, abs=1e-9)
    (wanted,) = torch.autograd.grad(expected, inputs.logprobs)
    torch.testing.assert_close(gradient(loss, inputs) - gradient(Naive(), inputs), wanted, rtol=1e-6, atol=1e-9)
    assert output.metrics.reduce()["kl"] == pytest.approx(float(k3.detach().mean()), rel=1e-6, abs=1e-9)
    assert output.metrics.reduce()["kl"] >= 0


def test_kl_penalty_pulls_where_both_agree_or_overflows_where_they_do_not() -> None:
    rows = log([0.5, 0.25], [0.25])
    same = one_group(rows, [1.0, 1.0], behaviour=rows)
    loss = Regularised(ASymPO(), kl_coefficient=1.0)
    assert gradient(loss, same).tolist() == [0.0] * 3 and value(loss(same)) == 0.0
    far = one_group([[-900.0], [-0.1]], [1.0, 1.0], behaviour=[[-0.1], [-900.0]])
    grad = gradient(loss, far)
    assert math.isfinite(value(loss(far))) and bool(grad.isfinite().all())
    assert float(grad[1]) == pytest.approx(0.5)  # certain where the reference was not: pulled back with full weight


def test_kl_penalty_of_dr_grpo_divides_by_each_length() -> None:
    rows = log([0.5], [0.5, 0.5, 0.5])
    inputs = one_group(rows, [1.0, 1.0], behaviour=log([0.25], [0.25, 0.25, 0.25]))
    grad = gradient(Regularised(DrGRPO(6), kl_coefficient=1.0), inputs)
    torch.testing.assert_close(grad, torch.full((4,), (1 - 0.5) / 6 / 2, dtype=torch.float64))


@quick
@given(batches(), st.floats(0.01, 2.0))
def test_entropy_bonus_lowers_the_entropy(inputs: LossInputs, coefficient: float) -> None:
    """Every token's entropy has the weight of that token in the mean, and the sign of a reward."""
    entropy = torch.rand(inputs.logprobs.shape, dtype=torch.float64).requires_grad_()
    inputs = replace(inputs, entropy=entropy)
    (grad,) = torch.autograd.grad(Regularised(SPO(), entropy_coefficient=coefficient)(inputs).loss, entropy)
    sizes = torch.bincount(inputs.groups)[inputs.groups]
    weight = coefficient / (inputs.lengths * sizes * inputs.groups_in_batch).double()
    torch.testing.assert_close(grad, -weight[inputs.rows()], rtol=1e-9, atol=1e-12)


@quick
@given(batches(most_groups=1))
def test_terms_beside_asympo_break_its_balance(inputs: LossInputs) -> None:
    """The objective's own part stays what it is: zero in value, with its gradient."""
    loss = Regularised(ASymPO(1e-6), kl_coefficient=0.5)
    alone = replace(inputs, reference_logprobs=inputs.logprobs.detach())
    assert abs(value(loss(alone))) < 1e-6
    torch.testing.assert_close(gradient(loss, alone), gradient(ASymPO(1e-6), alone), rtol=1e-9, atol=1e-12)
    order = torch.arange(inputs.lengths.numel() - 1, -1, -1)
    assert value(loss(subset(inputs, order))) == pytest.approx(value(loss(inputs)), rel=1e-9, abs=1e-12)


# --- from the configuration ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "behaviour", "old", "reference", "silent"),
    [
        ({"name": "asympo"}, False, False, False, False),
        ({"name": "spo"}, False, False, False, False),
        ({"name": "naive"}, False, False, False, False),
        ({"name": "grpo"}, True, False, False, False),
        ({"name": "dr_grpo", "behaviour": "received"}, True, False, False, False),
        ({"name": "grpo", "behaviour": "recomputed"}, False, True, False, False),
        ({"name": "dr_grpo", "behaviour": "recomputed", "importance_cap": 2.0}, True, True, False, False),
        ({"name": "asympo", "kl_coefficient": 0.1}, False, False, True, True),
        ({"name": "spo", "entropy_coefficient": 0.1}, False, False, False, True),
        ({"name": "grpo", "kl_coefficient": 0.1, "entropy_coefficient": 0.1}, True, False, True, True),
    ],
)
def test_objective_asks_for_a_pass_or_a_logprob_that_it_does_not_use(
    keys: dict[str, object], behaviour: bool, old: bool, reference: bool, silent: bool
) -> None:
    loss = make_loss(LossConfig.model_validate(keys), 16)
    assert loss.needs_behaviour_logprobs == behaviour and loss.needs_old_logprobs == old
    assert loss.needs_reference_logprobs == reference and loss.trains_without_signal == silent


def test_configuration_of_terms_does_not_reach_the_objective() -> None:
    config = LossConfig(name="dr_grpo", clip=0.3, behaviour="recomputed", importance_cap=1.5, kl_coefficient=0.25)
    loss = make_loss(config, 40)
    assert isinstance(loss, Regularised) and (loss.kl_coefficient, loss.entropy_coefficient) == (0.25, 0.0)
    inner: Loss = loss.objective
    assert isinstance(inner, DrGRPO)
    assert (inner.max_tokens, inner.clip, inner.importance_cap) == (40, 0.3, 1.5)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        (["loss.behaviour=recomputed"], "loss.behaviour belongs to loss.name=grpo or dr_grpo, but loss.name is asympo"),
        (["loss.name=grpo", "loss.importance_cap=2"], "loss.importance_cap .* needs loss.behaviour=recomputed"),
        (["loss.name=grpo", "loss.behaviour=guessed"], "'received' or 'recomputed'"),
        (["loss.kl_coefficient=-1"], "loss.kl_coefficient"),
    ],
)
def test_term_that_cannot_act_is_taken(override: list[str], says: str) -> None:
    with pytest.raises(UserError, match=says):
        load_config(None, override)
