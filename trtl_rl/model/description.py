"""``DecoderDescription``: what both sides must know to build the same decoder, as plain values.

The trainer reads it off a Hugging Face model (``model/bind.py``); an engine gets it as JSON and needs neither transformers
nor ModelOpt.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from trtl_rl.kernels.spec import HeadSpec, LayerSpec, Part, fuse
from trtl_rl.recipe.coverage import Coverage
from trtl_rl.recipe.formats import LinearFormat

if TYPE_CHECKING:
    import torch

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Adapter:
    """A low-rank adapter of one linear: W x + scaling B A x, with A [rank, in] and B [out, rank] (LoRA)."""

    name: str
    rank: int
    scaling: float


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
        adapters: In name order; with any, everything else is frozen.
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
    adapters: tuple[Adapter, ...] = ()

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

        ranks = {adapter.name: adapter.rank for adapter in self.adapters}
        frozen = bool(self.adapters)

        def part(role: str) -> Part:
            name = self.linear_name(layer, role)
            return Part(sizes[role], formats[name], role in self.biases, ranks.get(name, 0))

        return LayerSpec(
            self.hidden,
            self.heads,
            self.kv_heads,
            self.head_dim,
            self.intermediate,
            self.eps,
            self.qk_norm,
            fuse([part(role) for role in LINEARS[:3]], self.hidden, frozen=frozen),
            fuse([part("o_proj")], q, frozen=frozen)[0],
            fuse([part("gate_proj"), part("up_proj")], self.hidden, frozen=frozen),
            fuse([part("down_proj")], self.intermediate, frozen=frozen)[0],
        )

    @property
    def key_value_dtypes(self) -> list[torch.dtype]:
        """What each layer's keys and values are stored in."""
        return [self.layer_spec(i).key_value_dtype for i in range(self.layers)]

    def head_spec(self) -> HeadSpec:
        part = Part(self.vocab, self.format("lm_head"), False)
        linear = fuse([part], self.hidden, frozen=bool(self.adapters))[0]
        return HeadSpec(self.hidden, self.vocab, self.eps, linear)

    def to_json(self) -> dict[str, Any]:
        adapters = [asdict(adapter) for adapter in self.adapters]
        return {**self.__dict__, "coverage": self.coverage.to_json(), "adapters": adapters}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> DecoderDescription:
        values = dict(data)
        values["coverage"] = Coverage.from_json(values["coverage"])
        values["adapters"] = tuple(Adapter(**adapter) for adapter in values["adapters"])
        values["biases"] = tuple(values["biases"])
        values["inverse_frequencies"] = tuple(values["inverse_frequencies"])
        return cls(**values)
