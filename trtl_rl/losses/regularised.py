"""A KL penalty and an entropy bonus beside any objective."""

from __future__ import annotations

import torch
from torch import Tensor

from trtl_rl.losses.loss import Loss, LossInputs, LossOutputs, mean_over_groups


class Regularised(Loss):
    """``L = L_objective + beta K - eta H``, K and H being means over groups of ``(1/G) sum_g`` of a response's tokens.

    A response's tokens are joined as the objective joins them: their mean, or for Dr. GRPO their sum over a constant.

    ``K`` is the K3 estimator of KL(policy ‖ reference) for the sampled token, ``k_i = e^d - d - 1`` with
    ``d = log pi_ref(a_i) - log pi(a_i)`` (arXiv 2402.03300, equation 4): never negative, 0 where both agree. The
    reference is the model that the run began with. ``d`` is clamped from above at 20, so that e^d cannot overflow [D].
    It is unbiased for tokens that the current policy sampled; on stale tokens it is the same expression, uncorrected.

    ``H`` is the entropy of the whole distribution at each answer token, not an estimate from the sampled one; its
    gradient is exact.

    Groups of equal rewards take part: these terms have a gradient there.

    Args:
        objective: What is trained beside them.
        kl_coefficient: beta, >= 0; with 0 no reference is needed.
        entropy_coefficient: eta, >= 0.

    Metrics, beside the objective's: ``kl`` (mean of k_i over tokens).
    """

    LOG_RATIO_BOUND = 20.0
    trains_without_signal: bool = True

    def __init__(self, objective: Loss, *, kl_coefficient: float = 0.0, entropy_coefficient: float = 0.0) -> None:
        assert kl_coefficient >= 0 and entropy_coefficient >= 0 and kl_coefficient + entropy_coefficient > 0
        self.objective = objective
        self.kl_coefficient = kl_coefficient
        self.entropy_coefficient = entropy_coefficient
        self.needs_behaviour_logprobs = objective.needs_behaviour_logprobs
        self.needs_old_logprobs = objective.needs_old_logprobs
        self.needs_reference_logprobs = kl_coefficient > 0

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        out = self.objective(inputs)
        terms_t = torch.zeros_like(inputs.logprobs)
        if self.kl_coefficient > 0:
            kl_t = self._kl(inputs)
            terms_t = terms_t + self.kl_coefficient * kl_t
            out.metrics.add("kl", float(kl_t.detach().sum()), count=kl_t.numel())
        if self.entropy_coefficient > 0:
            assert inputs.entropy is not None, "the entropy bonus needs the entropy of every token"
            terms_t = terms_t - self.entropy_coefficient * inputs.entropy
        terms = mean_over_groups(self.objective.per_response(terms_t, inputs), inputs)
        return LossOutputs(out.loss + terms, out.metrics)

    def _kl(self, inputs: LossInputs) -> Tensor:
        """[tokens]: k_i."""
        assert inputs.reference_logprobs is not None, "the KL penalty needs reference_logprobs"
        d = (inputs.reference_logprobs.to(inputs.logprobs.dtype) - inputs.logprobs).clamp(max=self.LOG_RATIO_BOUND)
        return torch.expm1(d) - d
