"""``DecoderDescription``: what both sides must know to build the same decoder, as plain values.

The trainer reads it off a Hugging Face model (``model/bind.py``); an engine gets it as JSON and needs neither transformers
nor ModelOpt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trtl_rl.kernels.spec import HeadSpec, LayerSpec, fuse
from trtl_rl.recipe.coverage import Coverage
from trtl_rl.recipe.formats import LinearFormat

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class DecoderDescription:
    """Sizes, rope and the format of every linear of a Qwen2, Qwen3 or Llama decoder.

    Attributes:
        biases: Roles of linears (``q_proj`` …) that have a bias, the same in all layers.
        qk_norm: Whether heads of q and k are normalised (Qwen3).
        tied: Whether the output head is the embedding.
        inverse_frequencies: Of the rotary embedding, [head_dim / 2].
        attention_scaling: Factor on the rotary tables (YaRN), 1.0 otherwise.
        coverage: The expanded recipe, in checkpoint names.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    eps: float
    qk_norm: bool
    biases: tuple[str, ...]
    tied: bool
    inverse_frequencies: tuple[float, ...]
    attention_scaling: float
    coverage: Coverage

    def linear_name(self, layer: int, role: str) -> str:
        """Checkpoint name of a linear, for example ``model.layers.0.mlp.up_proj``."""
        block = "self_attn" if role in LINEARS[:4] else "mlp"
        return f"model.layers.{layer}.{block}.{role}"

    def format(self, name: str) -> LinearFormat:
        for item in self.coverage.linears:
            if item.name == name:
                return item.format
        raise KeyError(name)

    def layer_spec(self, layer: int) -> LayerSpec:
        """What the kernels of one layer are specialised for."""
        formats = {item.name: item.format for item in self.coverage.linears}
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        sizes = dict(
            zip(LINEARS, (q, kv, kv, self.hidden, self.intermediate, self.intermediate, self.hidden), strict=True)
        )

        def part(role: str) -> tuple[int, LinearFormat, bool]:
            return sizes[role], formats[self.linear_name(layer, role)], role in self.biases

        return LayerSpec(
            self.hidden,
            self.heads,
            self.kv_heads,
            self.head_dim,
            self.intermediate,
            self.eps,
            self.qk_norm,
            fuse([part(role) for role in LINEARS[:3]], self.hidden),
            fuse([part("o_proj")], q)[0],
            fuse([part("gate_proj"), part("up_proj")], self.hidden),
            fuse([part("down_proj")], self.intermediate)[0],
        )

    def head_spec(self) -> HeadSpec:
        linear = fuse([(self.vocab, self.format("lm_head"), False)], self.hidden)[0]
        return HeadSpec(self.hidden, self.vocab, self.eps, linear)

    def to_json(self) -> dict[str, Any]:
        return {**self.__dict__, "coverage": self.coverage.to_json()}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> DecoderDescription:
        values = dict(data)
        values["coverage"] = Coverage.from_json(values["coverage"])
        values["biases"] = tuple(values["biases"])
        values["inverse_frequencies"] = tuple(values["inverse_frequencies"])
        return cls(**values)
