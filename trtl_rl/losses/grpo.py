"""GRPO with clipped ratios (a baseline of arXiv 2606.03070): the objective that needs logprobs from before the update."""

from __future__ import annotations

import torch
from torch import Tensor

from trtl_rl.losses.loss import (
    Loss,
    LossInputs,
    LossOutputs,
    add_share,
    imbalance_metrics,
    mean_over_groups,
    mean_per_response,
)
from trtl_rl.metrics import Accumulator


class GRPO(Loss):
    """``L = -mean over groups of (1/G) sum_g (1/m_g) sum_i w_i min(rho_i A_g, clip(rho_i, 1 - c, 1 + c) A_g)``.

    The token mean is per response, and the advantage is the one of the other objectives here (the group's mean taken
    off, no deviation). Two choices of the denominator of ``rho_i`` and of the weight ``w_i``:

    * *received*: ``rho_i = pi(a_i) / pi_b(a_i)``, the current over the behaviour policy [P: arXiv 2606.03070], whose
      logprobs come with the rollouts; ``w_i = 1``. The clip bounds how far the policy goes from the one that sampled.
    * *recomputed*: ``rho_i = pi(a_i) / pi_old(a_i)``; the learner computes ``pi_old`` in a pass of its own at the
      weights before the update (the proximal policy of decoupled PPO, arXiv 2110.00641 and 2505.24298). With one
      optimizer step a batch rho is 1 where the gradient is taken: nothing is clipped, the gradient is the naive one, and
      what the clip bounds elsewhere, several steps on one batch, does not occur here. With a cap C the rollouts carry
      logprobs too, and ``w_i = min(pi_old(a_i) / pi_b(a_i), C)``, without gradient: truncated importance sampling, as
      TRL (``vllm_importance_sampling_cap``) and verl (``tis_imp_ratio_cap``) have it.

    Log-ratios are clamped to ±20, so that a stale logprob cannot overflow; there a token has no gradient [D].

    Args:
        clip: c, the range of the ratio; 0.2 [D: the usual value, the paper's is not known].
        recompute: Take ``pi_old`` instead of the behaviour policy.
        importance_cap: C, only with ``recompute``; None: ``w_i = 1``.

    Metrics, beside the imbalance: ``grpo/clip_frac``, and of it ``grpo/clip_low_frac`` and ``grpo/clip_high_frac``
    (shares of the tokens whose gradient the clip takes away, below and above its range, among the tokens with A != 0);
    ``grpo/ratio_max``; with a cap ``importance_weight/{mean,max}`` (before truncation) and
    ``importance_weight/capped_frac``.
    """

    CLIP = 0.2
    LOG_RATIO_BOUND = 20.0

    def __init__(self, clip: float = CLIP, *, recompute: bool = False, importance_cap: float | None = None) -> None:
        assert 0 < clip < 1
        assert importance_cap is None or (recompute and importance_cap > 0)
        self.clip = clip
        self.importance_cap = importance_cap
        self.needs_old_logprobs = recompute
        self.needs_behaviour_logprobs = not recompute or importance_cap is not None

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        if self.needs_behaviour_logprobs:
            assert inputs.behaviour_logprobs is not None, "GRPO needs behaviour_logprobs: rollouts must carry logprobs"
        denominator = inputs.old_logprobs if self.needs_old_logprobs else inputs.behaviour_logprobs
        assert denominator is not None, "GRPO with recompute needs old_logprobs"
        metrics = imbalance_metrics(inputs)
        advantages_t = inputs.token_advantages()
        ratio_t = self._ratio(inputs.logprobs, denominator)
        free_t = ratio_t * advantages_t
        bound_t = ratio_t.clamp(1 - self.clip, 1 + self.clip) * advantages_t
        clipped = bound_t < free_t
        terms_t = torch.where(clipped, bound_t, free_t) * self._weights(inputs, metrics)
        loss = -mean_over_groups(self.per_response(terms_t, inputs), inputs)

        counts = advantages_t != 0
        add_share(metrics, "grpo/clip_frac", clipped, counts)
        add_share(metrics, "grpo/clip_low_frac", clipped & (advantages_t < 0), counts)
        add_share(metrics, "grpo/clip_high_frac", clipped & (advantages_t > 0), counts)
        if ratio_t.numel():
            metrics.add("grpo/ratio_max", float(ratio_t.detach().max()), how="max")
        return LossOutputs(loss, metrics)

    def per_response(self, values_t: Tensor, inputs: LossInputs) -> Tensor:
        """[tokens] → [responses]: how the length of a response enters."""
        return mean_per_response(values_t, inputs)

    def _weights(self, inputs: LossInputs, metrics: Accumulator) -> Tensor:
        """[tokens] or a scalar 1: what each token's term is multiplied with, without gradient."""
        if self.importance_cap is None:
            return inputs.logprobs.new_ones(())
        assert inputs.old_logprobs is not None and inputs.behaviour_logprobs is not None
        weight_t = self._ratio(inputs.old_logprobs, inputs.behaviour_logprobs).detach().to(inputs.logprobs.dtype)
        capped = weight_t > self.importance_cap
        add_share(metrics, "importance_weight/capped_frac", capped, torch.ones_like(capped))
        if weight_t.numel():
            metrics.add("importance_weight/mean", float(weight_t.sum()), count=weight_t.numel())
            metrics.add("importance_weight/max", float(weight_t.max()), how="max")
        return weight_t.clamp(max=self.importance_cap)

    def _ratio(self, above: Tensor, below: Tensor) -> Tensor:
        """Probabilities of ``above`` over those of ``below``, of their logprobs."""
        log_ratio = above - below.to(above.dtype)
        return log_ratio.clamp(-self.LOG_RATIO_BOUND, self.LOG_RATIO_BOUND).exp()
