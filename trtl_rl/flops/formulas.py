"""FLOPs of a decoder-only transformer, by the shape of its matrix products.

Conventions (also in ``CONVENTIONS``, which the ledger prints):

* A multiply-add is 2 FLOPs. Only matrix products count: the linears of the decoder layers, Q Kᵀ and P V of attention,
  and the head. Embedding look-ups, norms, rotary embedding, softmax and activations do not.
* The head (vocabulary projection) counts at the positions where it is computed, whether its weights are tied or not.
* Attention of one query over k keys takes ``4 · layers · heads · head_dim · k`` FLOPs; grouped key and value heads
  change nothing. ``causal`` counts the keys that are really attended: the token at position p attends to p + 1, so T
  tokens make ``T (T + 1) / 2`` pairs, to leading order ``2 · layers · d · T²`` FLOPs as in [D]. ``full`` counts ``T²``
  pairs wherever whole sequences are processed, masked pairs included: what eager attention computes and
  ``torch.utils.flop_counter`` reports for it. Decoding with a KV cache attends to p + 1 keys under both.
* Backward takes twice the forward, attention included. Formulas: section 3 of arXiv 2607.13389 gives the roles [R], the
  accounting is our own derivation [D]. FP8 does not change FLOPs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from trtl_rl.errors import UserError

Attention = Literal["causal", "full"]

CONVENTIONS = (
    "A multiply-add is 2 FLOPs. Counted: the linears of the decoder layers, QK^T and PV of attention over the keys "
    "that are attended (position p: p + 1 keys, about half of T^2), and the head where it is computed (search: the "
    "prompt's last position and every generated token but the last; learning: every answer token). Not counted: "
    "embeddings, norms, rotary embedding, softmax, activations, quantisation. Backward is twice the forward. The "
    "prompt's prefill is charged once a group. FP8 does not change FLOPs."
)


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder that fix its FLOPs. Gated feed-forward (three products), as in Qwen2, Qwen3 and Llama."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int

    @classmethod
    def from_hf_config(cls, config: Any) -> ModelShape:
        """Read the sizes from a Hugging Face configuration of the Qwen2, Qwen3 or Llama kind.

        Raises:
            UserError: a size is missing or is no positive integer; the message names it.
        """

        def size(name: str, default: int | None = None) -> int:
            value = getattr(config, name, None)
            value = default if value is None else value
            if not isinstance(value, int) or value < 1:
                raise UserError(
                    f"The model's configuration has {name}={value!r}: FLOPs need a positive integer there. "
                    "Qwen2, Qwen3 and Llama configurations carry it."
                )
            return value

        hidden, heads = size("hidden_size"), size("num_attention_heads")
        return cls(
            layers=size("num_hidden_layers"),
            hidden=hidden,
            heads=heads,
            kv_heads=size("num_key_value_heads", heads),
            head_dim=size("head_dim", hidden // heads),
            intermediate=size("intermediate_size"),
            vocab=size("vocab_size"),
        )

    @property
    def linear_parameters(self) -> int:
        """Weights of all linears of the decoder layers, biases left out."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def head_parameters(self) -> int:
        """Weights of the vocabulary projection, tied or not."""
        return self.hidden * self.vocab


def prefill(shape: ModelShape, prompt_tokens: int, *, attention: Attention = "causal") -> int:
    """FLOPs to process a prompt, with the head at its last position only: there the first token is sampled from.

    Charge it once a group where the samples share their prompt's keys and values, and again, over prompt and answer so
    far, where a cache is rebuilt.
    """
    assert prompt_tokens >= 1
    return _layers(shape, prompt_tokens, attention) + 2 * shape.head_parameters


def decode(shape: ModelShape, start: int, new_tokens: int) -> int:
    """FLOPs of one answer of ``new_tokens`` after a prefill of ``start`` tokens, with a KV cache.

    The prefill gave the first token. The other n - 1 take one forward each, at positions ``start`` to
    ``start + n - 2``, with the head: n head positions in all, one of them in ``prefill``. The last token is never fed
    back.
    """
    assert start >= 1 and new_tokens >= 0
    forwards = max(new_tokens - 1, 0)
    keys = _pairs(start + forwards) - _pairs(start)
    return forwards * 2 * (shape.linear_parameters + shape.head_parameters) + _attention(shape, keys)


def rollout(shape: ModelShape, prompt_tokens: int, answers: Iterable[int]) -> int:
    """FLOPs of generating ``answers`` (tokens of each) to one prompt, which is prefilled once."""
    return prefill(shape, prompt_tokens) + sum(decode(shape, prompt_tokens, tokens) for tokens in answers)


def forward(shape: ModelShape, prompt_tokens: int, answer_tokens: int, *, attention: Attention = "causal") -> int:
    """FLOPs of scoring an answer: all positions pass the layers, the head is computed where the answer is predicted."""
    assert prompt_tokens >= 1 and answer_tokens >= 0
    return _layers(shape, prompt_tokens + answer_tokens, attention) + 2 * shape.head_parameters * answer_tokens


def learning(
    shape: ModelShape,
    prompt_tokens: int,
    answer_tokens: int,
    *,
    recompute: bool = False,
    attention: Attention = "causal",
) -> int:
    """FLOPs of forward and backward over one prompt with its answer.

    Backward is twice :func:`forward`: a gradient for the input and one for the weight of each linear, and two products
    for each of attention's.

    Args:
        recompute: Add one more forward of the layers (full activation checkpointing); the head is not recomputed.
    """
    again = _layers(shape, prompt_tokens + answer_tokens, attention) if recompute else 0
    return 3 * forward(shape, prompt_tokens, answer_tokens, attention=attention) + again


def _layers(shape: ModelShape, tokens: int, attention: Attention) -> int:
    pairs = _pairs(tokens) if attention == "causal" else tokens * tokens
    return 2 * shape.linear_parameters * tokens + _attention(shape, pairs)


def _attention(shape: ModelShape, pairs: int) -> int:
    return 4 * shape.layers * shape.heads * shape.head_dim * pairs


def _pairs(tokens: int) -> int:
    """Pairs of a query and a key that it attends to, over the first ``tokens`` positions."""
    return tokens * (tokens + 1) // 2
