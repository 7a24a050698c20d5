"""GRPO with clipped ratios (a baseline of arXiv 2606.03070), the one objective that needs behaviour logprobs."""

from __future__ import annotations

import torch

from trtl_rl.losses.loss import (
    LossInputs,
    LossOutputs,
    add_share,
    imbalance_metrics,
    mean_over_groups,
    mean_per_response,
)


class GRPO:
    """``L = -mean over groups of (1/G) sum_g (1/m_g) sum_i min(rho_i A_g, clip(rho_i, 1 - c, 1 + c) A_g)``.

    ``rho_i = pi(a_i) / pi_b(a_i)``, the current over the behaviour policy [P]. The token mean is per response, the
    advantage is the one of the other objectives here (the group's mean taken off, no deviation), and there is no KL
    term. The log-ratio is clamped to ±20, so that a stale logprob cannot overflow; there a token has no gradient [D].

    Args:
        clip: c, the range of the ratio; 0.2 [D: the usual value, the paper's is not known].

    Metrics, beside the imbalance: ``grpo/clip_frac`` (share of the tokens whose gradient the clip takes away, among the
    tokens with A != 0) and ``grpo/ratio_max``.
    """

    CLIP = 0.2
    LOG_RATIO_BOUND = 20.0

    needs_behaviour_logprobs: bool = True

    def __init__(self, clip: float = CLIP) -> None:
        assert 0 < clip < 1
        self.clip = clip

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        assert inputs.behaviour_logprobs is not None, "GRPO needs behaviour_logprobs: rollouts must carry logprobs"
        metrics = imbalance_metrics(inputs)
        advantages_t = inputs.token_advantages()
        log_ratio_t = inputs.logprobs - inputs.behaviour_logprobs.to(inputs.logprobs.dtype)
        ratio_t = log_ratio_t.clamp(-self.LOG_RATIO_BOUND, self.LOG_RATIO_BOUND).exp()
        free_t = ratio_t * advantages_t
        bound_t = ratio_t.clamp(1 - self.clip, 1 + self.clip) * advantages_t
        clipped = bound_t < free_t
        terms_t = torch.where(clipped, bound_t, free_t)
        loss = -mean_over_groups(mean_per_response(terms_t, inputs), inputs)

        add_share(metrics, "grpo/clip_frac", clipped, advantages_t != 0)
        if ratio_t.numel():
            metrics.add("grpo/ratio_max", float(ratio_t.detach().max()), how="max")
        return LossOutputs(loss, metrics)
