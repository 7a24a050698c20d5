"""SPO: the naive objective with negative responses scaled down (a baseline of arXiv 2606.03070)."""

from __future__ import annotations

import torch

from trtl_rl.losses.loss import Loss, LossInputs, LossOutputs, imbalance_metrics, mean_nll, mean_over_groups


class SPO(Loss):
    """``L = mean over groups of (1/G) sum_g A'_g S_g``, with ``A' = A`` where A >= 0 and ``alpha A`` elsewhere [P].

    Args:
        alpha: Weight of the negative responses; 0.2 as in the paper [P].
    """

    ALPHA = 0.2

    def __init__(self, alpha: float = ALPHA) -> None:
        assert 0 <= alpha <= 1
        self.alpha = alpha

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        nll_r = mean_nll(inputs.logprobs, inputs)
        advantages_r = inputs.advantages.to(nll_r.dtype)
        scaled_r = torch.where(advantages_r >= 0, advantages_r, self.alpha * advantages_r)
        return LossOutputs(mean_over_groups(scaled_r * nll_r, inputs), imbalance_metrics(inputs))
