"""The naive objective: policy gradient on rollouts as if they were fresh (the baseline of arXiv 2606.03070)."""

from __future__ import annotations

from trtl_rl.losses.loss import Loss, LossInputs, LossOutputs, imbalance_metrics, mean_nll, mean_over_groups


class Naive(Loss):
    """``L = mean over groups of (1/G) sum_g A_g S_g`` [P].

    It collapses on stale rollouts, where the negative responses' S outgrows the positive ones':
    ``L_naive - L_ASymPO = (B/G) (S_P-bar - S_N-bar)`` with ``B = sum over A > 0 of A`` [P]. Kept for comparison.
    """

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        nll_r = mean_nll(inputs.logprobs, inputs)
        loss = mean_over_groups(inputs.advantages.to(nll_r.dtype) * nll_r, inputs)
        return LossOutputs(loss, imbalance_metrics(inputs))
