"""ASymPO: asynchronous training without behaviour probabilities (arXiv 2606.03070)."""

from __future__ import annotations

import math

import torch

from trtl_rl.losses.loss import (
    Loss,
    LossInputs,
    LossOutputs,
    add_share,
    imbalance_metrics,
    mean_nll,
    mean_over_groups,
)


class ASymPO(Loss):
    """``L = mean over groups of (1/G) sum_g A_g S_g / sg(max(S_g, floor))``, sg being stop-gradient [P].

    All responses take part, of both signs. Every one contributes ``|A_g|`` to the forward value, so that stale negative
    responses, whose S is large, cannot drown the positive ones; the value of a complete group is 0 and says nothing.
    The gradient is that of ``(1/G) sum_g A_g log S_g``, and m_g cancels: the coefficient of each token's logprob is
    ``-A_g / sg(sum_i -log p_i)`` [D]. A whole group must be in one micro-batch.

    Stabiliser [P, appendix], off unless given: a token's logprob enters as ``min(log p, log p_high)`` where A >= 0 and
    as ``max(log p, log p_low)`` where A < 0, in numerator and denominator. A token at its bound stays in the mean and
    has no gradient.

    Args:
        floor: Least S in the denominator. The paper asks for one without a value [P]; 2e-4 is our choice [D]: there it
            binds only on nearly deterministic responses, whose 1/S explodes.
        p_low: Bound for tokens of negative responses, a probability; the paper takes 0.01 to 0.05 [P].
        p_high: Bound for tokens of positive responses, a probability; the paper takes 0.95 to 0.99 [P].

    Metrics, beside the imbalance: ``asympo/floor_frac`` (share of the responses on which the floor binds),
    ``asympo/bound_high_frac`` and ``asympo/bound_low_frac`` (share of the tokens of positive, and of negative,
    responses at their bound; only where the bound is set). Responses with A = 0 or without tokens do not count.
    """

    FLOOR = 2e-4

    def __init__(self, floor: float = FLOOR, p_low: float | None = None, p_high: float | None = None) -> None:
        assert floor >= 0
        assert all(bound is None or 0 < bound < 1 for bound in (p_low, p_high))
        self.floor = floor
        self.p_low = p_low
        self.p_high = p_high

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        metrics = imbalance_metrics(inputs)
        logprobs_t = inputs.logprobs
        advantages_t = inputs.token_advantages()
        # torch.where and not minimum or clamp: these pass half or all of the gradient at the bound itself.
        if self.p_high is not None:
            bound = logprobs_t.new_tensor(math.log(self.p_high))
            at_high = (advantages_t >= 0) & (logprobs_t >= bound)
            logprobs_t = torch.where(at_high, bound, logprobs_t)
            add_share(metrics, "asympo/bound_high_frac", at_high, advantages_t > 0)
        if self.p_low is not None:
            bound = logprobs_t.new_tensor(math.log(self.p_low))
            at_low = (advantages_t < 0) & (logprobs_t <= bound)
            logprobs_t = torch.where(at_low, bound, logprobs_t)
            add_share(metrics, "asympo/bound_low_frac", at_low, advantages_t < 0)

        nll_r = mean_nll(logprobs_t, inputs)
        below = nll_r.detach() < self.floor
        scale_r = nll_r.detach().clamp(min=self.floor)
        # S = 0 with floor = 0: an empty response, or one whose tokens are all certain. Its term is 0, never 0/0.
        scale_r = torch.where(scale_r > 0, scale_r, torch.ones_like(scale_r))
        advantages_r = inputs.advantages.to(nll_r.dtype)
        loss = mean_over_groups(advantages_r * nll_r / scale_r, inputs)
        add_share(metrics, "asympo/floor_frac", below, (advantages_r != 0) & (inputs.lengths > 0))
        return LossOutputs(loss, metrics)
