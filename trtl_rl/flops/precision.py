"""How many of a run's FLOPs are products of two FP8 operands. FP8 changes no FLOPs: these are a share of those counted."""

from __future__ import annotations

from dataclasses import dataclass

from trtl_rl.recipe.coverage import Coverage
from trtl_rl.recipe.formats import LinearFormat


@dataclass(frozen=True)
class Fp8Products:
    """Weights of the linears whose products take FP8 operands, summed over the decoder layers, and the head's.

    Attributes:
        forward, dgrad, wgrad: Weights of the layers' linears for Y = X Wᵀ, dX = dY W, dW = dYᵀ X.
        head_forward, head_dgrad, head_wgrad: The head's, 0 where it is not quantised.
    """

    forward: int = 0
    dgrad: int = 0
    wgrad: int = 0
    head_forward: int = 0
    head_dgrad: int = 0
    head_wgrad: int = 0

    @classmethod
    def of(cls, coverage: Coverage, *, frozen: bool = False) -> Fp8Products:
        """Read them off an expanded recipe.

        Args:
            frozen: Weights take no gradient, as under adapters; those are high precision.
        """
        sums = {True: [0, 0, 0], False: [0, 0, 0]}
        for linear in coverage.linears:
            weights = linear.shape[0] * linear.shape[1]
            for i, quantised in enumerate(_products(linear.format, frozen)):
                sums[linear.role == "lm_head"][i] += weights if quantised else 0
        return cls(*sums[False], *sums[True])

    def forward_flops(self, tokens: int, head_positions: int) -> int:
        """Of a forward pass: so many positions through the layers, so many through the head."""
        return 2 * (self.forward * tokens + self.head_forward * head_positions)

    def backward_flops(self, tokens: int, head_positions: int) -> int:
        """Of the backward pass after it."""
        head = self.head_dgrad + self.head_wgrad
        return 2 * ((self.dgrad + self.wgrad) * tokens + head * head_positions)


def _products(format: LinearFormat, frozen: bool) -> tuple[bool, bool, bool]:
    """Whether FProp, DGrad and WGrad take two FP8 operands."""
    both = format.weight is not None and format.activation is not None
    wgrad = format.activation is not None and format.wgrad == "fp8" and not frozen
    return both and format.fprop == "fp8", both and format.dgrad == "fp8", wgrad
