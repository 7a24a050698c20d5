"""How operands and linears are quantised, as plain values that cross process borders."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Scale = Literal["amax_over_448", "inverse"]
Rounding = Literal["fp32", "pow2"]
Precision = Literal["fp8", "bf16"]
Compute = Literal["fp32", "bf16"]


@dataclass(frozen=True)
class BlockFormat:
    """E4M3 codes with one FP32 scale per block of ``block`` = (rows, columns) values.

    Attributes:
        scale: ``amax_over_448``: q = x / s, s = amax/448. ``inverse``: k = 448/amax, q = x*k, s = 1/k. A block without a
            value above 1e-30 has scale 1. The two differ in the last bit of about a third of the scales.
        round: ``pow2`` rounds s up to a power of two; then both formulas agree.
    """

    block: tuple[int, int]
    scale: Scale
    round: Rounding = "fp32"


@dataclass(frozen=True)
class LinearFormat:
    """How one linear computes its three GEMMs (arXiv 2601.14243, section on the precision flow).

    Attributes:
        weight, activation: Formats of W, and of X and dY; ``None`` is high precision in all three GEMMs.
        fprop: Whether Y = X Wᵀ takes both operands as FP8: what an engine runs, so also whether weights travel as codes.
        dgrad: Whether dX = dY W quantises dY, and takes the codes of W even when the forward pass does not.
        wgrad: Whether dW = dYᵀ X quantises both operands along tokens.
        compute: ``fp32``: operands and results keep float32. ``bf16``: all three GEMMs take bfloat16 operands (decoded FP8
            codes times their scale are rounded too; with ``pow2`` scales they are exact) and results are rounded, as a
            GPU without FP8 units does; products are summed in float32 either way, and dW is float32.
    """

    weight: BlockFormat | None = None
    activation: BlockFormat | None = None
    fprop: Precision = "bf16"
    dgrad: Precision = "bf16"
    wgrad: Precision = "bf16"
    compute: Compute = "fp32"

    @property
    def forward_weight(self) -> BlockFormat | None:
        """Format of W in the forward pass, in checkpoints and in refits."""
        return self.weight if self.fprop == "fp8" else None

    @property
    def forward_activation(self) -> BlockFormat | None:
        """Format of X in the forward pass."""
        return self.activation if self.fprop == "fp8" else None

    @property
    def quantised(self) -> bool:
        """Whether the forward pass has an FP8 operand."""
        return self.forward_weight is not None or self.forward_activation is not None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> LinearFormat:
        def block(value: dict[str, Any] | None) -> BlockFormat | None:
            return (
                BlockFormat((value["block"][0], value["block"][1]), value["scale"], value["round"]) if value else None
            )

        return cls(
            block(data["weight"]),
            block(data["activation"]),
            data["fprop"],
            data["dgrad"],
            data["wgrad"],
            data["compute"],
        )


HIGH_PRECISION = LinearFormat()
