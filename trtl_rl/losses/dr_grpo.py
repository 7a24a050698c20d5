"""Dr. GRPO: GRPO whose token sums are divided by a constant, not by each response's length (arXiv 2503.20783)."""

from __future__ import annotations

from torch import Tensor

from trtl_rl.losses.grpo import GRPO
from trtl_rl.losses.loss import LossInputs, sum_per_response


class DrGRPO(GRPO):
    """:class:`GRPO` with ``(1/M) sum_i`` in the place of ``(1/m_g) sum_i``, M being the longest answer that is allowed.

    Dividing by ``m_g`` makes a token of a long wrong answer weigh less than one of a short one, so that wrong answers
    grow long; a constant takes that bias away (arXiv 2503.20783, section 3.2; M as in its code and in TRL's
    ``loss_type="dr_grpo"``). The paper's other change, no division of the advantage by the group's deviation, holds
    for every objective here.

    Args:
        max_tokens: M, in tokens: ``sampling.max_new_tokens``.
        rest: As for :class:`GRPO`.
    """

    def __init__(
        self,
        max_tokens: int,
        clip: float = GRPO.CLIP,
        *,
        recompute: bool = False,
        importance_cap: float | None = None,
    ) -> None:
        super().__init__(clip, recompute=recompute, importance_cap=importance_cap)
        assert max_tokens >= 1
        self.max_tokens = max_tokens

    def per_response(self, values_t: Tensor, inputs: LossInputs) -> Tensor:
        """[tokens] → [responses]: the sum over each response's tokens over M."""
        return sum_per_response(values_t, inputs) / self.max_tokens
