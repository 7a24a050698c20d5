"""What the objectives share: their inputs and outputs, the advantage, segment sums and the imbalance statistic.

Notation, as in arXiv 2606.03070 [P]: a group holds G scored responses to one prompt; response g has m_g answer tokens,
the advantage A_g and ``S_g = -(1/m_g) sum_i log pi(a_i)``, its mean token NLL under the current policy. An objective is
the mean over the groups of a batch of ``(1/G) sum_g term_g``.

Suffixes in the code: ``_t`` is one value per answer token, ``_r`` one value per response.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from trtl_rl.config_parts import LossConfig
from trtl_rl.metrics import Accumulator

NLL_POSITIVE = "asympo/nll_positive"
NLL_NEGATIVE = "asympo/nll_negative"
IMBALANCE = "asympo/imbalance"


@dataclass(frozen=True)
class LossInputs:
    """A micro-batch: whole groups, all on one device.

    Attributes:
        logprobs: [tokens] float32, differentiable: log softmax(logits / temperature) of every answer token under the
            current policy, the responses one after another.
        lengths: [responses] int64, answer tokens of each response; 0 is allowed and contributes nothing.
        groups: [responses] int64, the group of each response: 0 .. n-1 within this micro-batch, in any order.
        advantages: [responses] float32, see ``advantages``.
        groups_in_batch: Groups of the whole update. The losses of its micro-batches add up to the batch's loss.
        behaviour_logprobs: [tokens] float32 of the policy that sampled; only for objectives that need it.
        old_logprobs: [tokens] float32 of the weights before the update, likewise.
        reference_logprobs: [tokens] float32 of the model that the run began with, likewise.
        entropy: [tokens] float32, differentiable: of softmax(logits / temperature) at every answer token, in nats.
    """

    logprobs: Tensor
    lengths: Tensor
    groups: Tensor
    advantages: Tensor
    groups_in_batch: int
    behaviour_logprobs: Tensor | None = None
    old_logprobs: Tensor | None = None
    reference_logprobs: Tensor | None = None
    entropy: Tensor | None = None

    def __post_init__(self) -> None:
        assert self.logprobs.dim() == 1, f"logprobs have the shape {tuple(self.logprobs.shape)}, not [tokens]"
        assert self.lengths.shape == self.groups.shape == self.advantages.shape, "one value per response each"
        total, tokens = int(self.lengths.sum()), self.logprobs.numel()
        assert total == tokens, f"lengths add up to {total}, but there are {tokens} logprobs"
        for name in ("behaviour_logprobs", "old_logprobs", "reference_logprobs", "entropy"):
            value: Tensor | None = getattr(self, name)
            assert value is None or value.shape == self.logprobs.shape, f"{name}: one value per answer token"

    def rows(self) -> Tensor:
        """[tokens] int64: the response that each token belongs to."""
        index = torch.arange(self.lengths.numel(), device=self.lengths.device)
        return torch.repeat_interleave(index, self.lengths, output_size=self.logprobs.numel())

    def token_advantages(self) -> Tensor:
        """[tokens]: the advantage of each token's response, in the dtype of ``logprobs``."""
        return self.advantages.to(self.logprobs.dtype)[self.rows()]


@dataclass(frozen=True)
class LossOutputs:
    """The scalar to call ``backward`` on, and this micro-batch's share of the metrics (detached)."""

    loss: Tensor
    metrics: Accumulator


class Loss(Protocol):
    """An objective.

    Attributes:
        needs_behaviour_logprobs: Whether rollouts must carry the logprobs that their tokens were sampled with.
        needs_old_logprobs: Whether the learner must compute logprobs before the update, in a forward pass of its own.
        needs_reference_logprobs: The same of the model that the run began with.
        trains_without_signal: Whether a group of equal rewards has a gradient.
    """

    needs_behaviour_logprobs: bool = False
    needs_old_logprobs: bool = False
    needs_reference_logprobs: bool = False
    trains_without_signal: bool = False

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """The micro-batch's part of the batch's loss."""
        ...

    def per_response(self, values_t: Tensor, inputs: LossInputs) -> Tensor:
        """[tokens] → [responses]: how the length of a response enters terms beside the objective; here, the mean."""
        return mean_per_response(values_t, inputs)


def make_loss(config: LossConfig, max_tokens: int | None = None) -> Loss:
    """The objective that ``loss.name`` names, with the terms beside it. A key left at ``None`` takes its default.

    Args:
        max_tokens: Longest answer that is allowed (``sampling.max_new_tokens``); only ``dr_grpo`` needs it.
    """
    # Imported here: the objectives import this module.
    from trtl_rl.losses.regularised import Regularised

    objective = _objective(config, max_tokens)
    kl, entropy = config.kl_coefficient, config.entropy_coefficient
    if kl == 0 and entropy == 0:
        return objective
    return Regularised(objective, kl_coefficient=kl, entropy_coefficient=entropy)


def _objective(config: LossConfig, max_tokens: int | None) -> Loss:
    from trtl_rl.losses.asympo import ASymPO
    from trtl_rl.losses.dr_grpo import DrGRPO
    from trtl_rl.losses.grpo import GRPO
    from trtl_rl.losses.naive import Naive
    from trtl_rl.losses.spo import SPO

    if config.name == "asympo":
        floor = ASymPO.FLOOR if config.floor is None else config.floor
        return ASymPO(floor=floor, p_low=config.p_low, p_high=config.p_high)
    if config.name == "spo":
        return SPO(alpha=SPO.ALPHA if config.alpha is None else config.alpha)
    clip = GRPO.CLIP if config.clip is None else config.clip
    recompute = config.behaviour == "recomputed"
    if config.name == "grpo":
        return GRPO(clip, recompute=recompute, importance_cap=config.importance_cap)
    if config.name == "dr_grpo":
        assert max_tokens is not None, "dr_grpo divides by the longest answer that is allowed"
        return DrGRPO(max_tokens, clip, recompute=recompute, importance_cap=config.importance_cap)
    return Naive()


def advantages(rewards: Tensor, groups: Tensor) -> Tensor:
    """``A_g = r_g - (1/G) sum_j r_j`` over the scored responses of a group; the mean only, no deviation [P].

    Args:
        rewards: [responses] float, scored responses only, finite.
        groups: [responses] int64, the group of each response.

    Returns:
        [responses] float32. Exactly 0 for a group of equal rewards, since the group's least reward is taken off first:
        the rounded mean of equal numbers may differ from them.
    """
    assert rewards.shape == groups.shape, "one group id per reward"
    assert bool(torch.isfinite(rewards).all()), "rewards are finite; an unscored response is left out before"
    rewards = rewards.double()
    sizes = torch.bincount(groups)
    least = rewards.new_zeros(sizes.numel()).scatter_reduce(0, groups, rewards, "amin", include_self=False)
    above = rewards - least[groups]
    mean = above.new_zeros(sizes.numel()).index_add(0, groups, above) / sizes
    return (above - mean[groups]).float()


def sum_per_response(values_t: Tensor, inputs: LossInputs) -> Tensor:
    """[tokens] → [responses]: the sum over each response's tokens."""
    return values_t.new_zeros(inputs.lengths.numel()).index_add(0, inputs.rows(), values_t)


def mean_per_response(values_t: Tensor, inputs: LossInputs) -> Tensor:
    """[tokens] → [responses]: the mean over each response's tokens, 0 for a response without any."""
    return sum_per_response(values_t, inputs) / inputs.lengths.clamp(min=1)


def mean_nll(logprobs: Tensor, inputs: LossInputs) -> Tensor:
    """[responses]: ``S_g``, the mean token NLL of each response, 0 for a response without tokens."""
    return mean_per_response(-logprobs, inputs)


def mean_over_groups(terms_r: Tensor, inputs: LossInputs) -> Tensor:
    """Scalar: the sum of ``(1/G) sum_g term_g`` over this micro-batch's groups, over the groups of the whole batch."""
    sizes = torch.bincount(inputs.groups)
    return (terms_r / (sizes[inputs.groups] * inputs.groups_in_batch)).sum()


@torch.no_grad()
def imbalance_metrics(inputs: LossInputs) -> Accumulator:
    """The two sides of the imbalance, as sums that micro-batches can add: (sum |A| S, sum |A|) for A > 0 and A < 0.

    Their means are S_P-bar and S_N-bar [P]; ``finish_metrics`` forms the ratio. Every objective reports them.
    """
    nll_r = mean_nll(inputs.logprobs, inputs)
    weight_r = inputs.advantages.abs().to(nll_r.dtype)
    zero = nll_r.new_zeros(())
    sums = []
    for side in (inputs.advantages > 0, inputs.advantages < 0):
        counts = side & (inputs.lengths > 0)
        # Chosen, not multiplied by 0: an infinite S stays on its own side.
        sums += [torch.where(counts, weight_r * nll_r, zero).sum(), torch.where(counts, weight_r, zero).sum()]
    values = torch.stack(sums).tolist()
    metrics = Accumulator()
    metrics.add(NLL_POSITIVE, values[0], count=values[1])
    metrics.add(NLL_NEGATIVE, values[2], count=values[3])
    return metrics


def finish_metrics(reduced: Mapping[str, float]) -> dict[str, float]:
    """Add ``asympo/imbalance`` = S_N-bar / S_P-bar [P: R_naive] to a step's reduced metrics.

    It is left out where a side is missing (no group with a signal) or S_P-bar is 0.
    """
    out = dict(reduced)
    positive, negative = reduced.get(NLL_POSITIVE), reduced.get(NLL_NEGATIVE)
    if positive is not None and negative is not None and positive > 0:
        out[IMBALANCE] = negative / positive
    return out


def add_share(metrics: Accumulator, name: str, hits: Tensor, among: Tensor) -> None:
    """Add the share of ``hits`` among the items where ``among`` holds; both are boolean and of one shape."""
    counts = torch.stack([(hits & among).sum(), among.sum()]).tolist()
    metrics.add(name, counts[0], count=counts[1])
