"""Which Hugging Face architectures the decoder computes; checked from ``config.json`` alone, before weights are read."""

from __future__ import annotations

from typing import Any

from trtl_rl.errors import UserError

ARCHITECTURES = ("Qwen2ForCausalLM", "Qwen3ForCausalLM", "LlamaForCausalLM")
_ROPE_TYPES = {"default", "linear", "llama3", "yarn"}


def check_architecture(config: Any) -> None:
    """Refuse what the decoder does not compute, from the configuration alone.

    Raises:
        UserError: names the supported architectures, or the unsupported feature.
    """
    names = getattr(config, "architectures", None) or []
    if not any(name in ARCHITECTURES for name in names):
        raise UserError(
            f"The model's architecture {', '.join(names) or 'is not named in its config.json and so'} is not supported. "
            f"Supported are {', '.join(ARCHITECTURES)}."
        )
    if "sliding_attention" in (getattr(config, "layer_types", None) or []):
        raise UserError("The model uses sliding-window attention, which is not supported: use one with full attention.")
    if getattr(config, "hidden_act", "silu") != "silu":
        raise UserError(f"The model's activation {config.hidden_act!r} is not supported; it must be silu.")
    if getattr(config, "attention_dropout", 0.0):
        raise UserError("The model asks for attention_dropout, which is not supported: set it to 0 in its config.json.")
    if getattr(config, "quantization_config", None):
        raise UserError(
            "The model's weights are quantised (quantization_config): start from its high-precision checkpoint."
        )
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in _ROPE_TYPES:
        raise UserError(f"Rope type {kind!r} is not supported; supported are {', '.join(sorted(_ROPE_TYPES))}.")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise UserError("The model rotates only a part of each head, which is not supported.")
