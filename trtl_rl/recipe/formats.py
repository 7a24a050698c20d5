"""How operands and linears are quantised, as plain values that cross process borders."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Scale = Literal["amax_over_448", "inverse"]
Rounding = Literal["fp32", "pow2"]
Precision = Literal["fp8", "bf16"]


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
    """Formats of one linear: weight and input operands (``None`` is high precision), and the two backward GEMMs."""

    weight: BlockFormat | None = None
    activation: BlockFormat | None = None
    dgrad: Precision = "bf16"
    wgrad: Precision = "bf16"

    @property
    def quantised(self) -> bool:
        return self.weight is not None or self.activation is not None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> LinearFormat:
        def block(value: dict[str, Any] | None) -> BlockFormat | None:
            return (
                BlockFormat((value["block"][0], value["block"][1]), value["scale"], value["round"]) if value else None
            )

        return cls(block(data["weight"]), block(data["activation"]), data["dgrad"], data["wgrad"])


HIGH_PRECISION = LinearFormat()
