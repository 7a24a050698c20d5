"""The audit of a recipe on a model: what runs in FP8, what does not and why, and what share of a forward pass that is."""

from __future__ import annotations

from typing import Any

from trtl_rl.flops import formulas
from trtl_rl.flops.formulas import ModelShape
from trtl_rl.model.description import LINEARS
from trtl_rl.recipe.coverage import Coverage, CoveredLinear
from trtl_rl.recipe.formats import LinearFormat


def audit(coverage: Coverage, shape: ModelShape, parameters: int, tokens: int) -> dict[str, Any]:
    """Counts and shares, as plain values.

    Args:
        parameters: Of the whole model, embeddings and norms included.
        tokens: Length of the sequence whose forward pass is counted: every token but the first is predicted.

    Returns:
        ``linears`` and ``quantised`` (how many), ``formats`` and ``excluded`` (each with ``roles``, ``count`` and the format
        or the reason), ``fp8_parameter_share`` of all parameters, ``fp8_flop_share`` of the matrix products' FLOPs (those
        of linears with both operands in FP8, over those of all layers and the head, attention included), ``tokens``.
    """
    on = [item for item in coverage.linears if item.format.quantised]
    off = [item for item in coverage.linears if not item.format.quantised]
    stored = sum(_size(item) for item in on if item.format.forward_weight is not None)
    both = [
        item for item in on if item.format.forward_weight is not None and item.format.forward_activation is not None
    ]
    flops = sum(2 * _size(item) * (tokens - 1 if item.role == "lm_head" else tokens) for item in both)
    return {
        "linears": len(coverage.linears),
        "quantised": len(on),
        "formats": _grouped("format", [(_format_text(item.format), item) for item in on]),
        "excluded": _grouped("reason", [(item.reason, item) for item in off]),
        "fp8_parameter_share": stored / parameters,
        "fp8_flop_share": flops / (formulas.layers(shape, tokens) + formulas.head(shape, tokens - 1)),
        "tokens": tokens,
    }


def audit_lines(found: dict[str, Any]) -> list[str]:
    """What :func:`audit` found, for people."""
    shares = (
        f"{100 * found['fp8_parameter_share']:.1f}% of the parameters, {100 * found['fp8_flop_share']:.1f}% of the FLOPs of a "
        f"forward pass over {found['tokens']} tokens"
    )
    lines = [f"FP8 in {found['quantised']} of {found['linears']} linears: {shares}"]
    lines += [f"quantised: {_group_text(group)}: {group['format']}" for group in found["formats"]]
    return [*lines, *(f"excluded: {_group_text(group)}: {group['reason']}" for group in found["excluded"])]


def _size(item: CoveredLinear) -> int:
    return item.shape[0] * item.shape[1]


def _grouped(key: str, items: list[tuple[str, CoveredLinear]]) -> list[dict[str, Any]]:
    """Linears by format or reason; their roles in the order of a layer."""
    groups: dict[str, list[CoveredLinear]] = {}
    for text, item in items:
        groups.setdefault(text, []).append(item)
    order = [*LINEARS, "lm_head"]
    return [
        {key: text, "count": len(members), "roles": sorted({item.role for item in members}, key=order.index)}
        for text, members in groups.items()
    ]


def _group_text(group: dict[str, Any]) -> str:
    roles = ", ".join(group["roles"])
    return roles if group["count"] == 1 else f"{group['count']} of {roles}"


def _format_text(format: LinearFormat) -> str:
    parts = []
    for name, block in (("weights", format.forward_weight), ("activations", format.forward_activation)):
        sizes = "bf16" if block is None else f"{block.block[0]}×{block.block[1]}, {block.round} scales"
        parts.append(f"{name} {sizes}")
    return "; ".join(parts)
