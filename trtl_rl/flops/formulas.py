"""FLOPs of a decoder-only transformer, by the shape of its matrix products; every role's formula is in this file.

Conventions (also in ``CONVENTIONS``, which the ledger prints):

* A multiply-add is 2 FLOPs. Only matrix products count: the linears of the decoder layers, Q Kᵀ and P V of attention,
  and the head. Embedding look-ups, norms, rotary embedding, softmax, activations and quantisation do not.
* The head (vocabulary projection) counts at the positions where it is computed, whether its weights are tied or not.
* The last token of an answer is never fed back: an answer of A tokens to a prompt of P passes P + A - 1 positions, in
  search and in learning alike.
* Attention of one query over k keys takes ``4 · layers · heads · head_dim · k`` FLOPs; grouped key and value heads
  change nothing. ``causal`` counts the keys that are really attended: the token at position p attends to p + 1, so T
  tokens make ``T (T + 1) / 2`` pairs, to leading order ``2 · layers · d · T²`` FLOPs as in [D]. ``full`` counts ``T²``
  pairs wherever whole sequences are processed, masked pairs included: what eager attention computes and
  ``torch.utils.flop_counter`` reports for it. A KV cache removes recomputation, not attention: decoding attends to p + 1
  keys under both.
* Backward takes twice the forward, attention included. With low-rank adapters (LoRA) the rest is frozen and takes no
  gradient of weights. What backward computes a second time is :func:`recompute`: a part of learning, with a figure of
  its own.
* Mixtures of experts count the experts that a token passes, the router, and what all tokens share.
* FP8 does not change FLOPs; :mod:`trtl_rl.flops.precision` counts how many of them run in it.

Section 3 of arXiv 2607.13389 gives the roles [R]; the accounting is our own derivation [D].
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from trtl_rl.errors import UserError

Attention = Literal["causal", "full"]

CONVENTIONS = (
    "A multiply-add is 2 FLOPs. Counted: the linears of the decoder layers, QK^T and PV of attention over the keys "
    "that are attended (position p: p + 1 keys, about half of T^2), and the head where it is computed (at every answer "
    "token, in search and in learning). An answer's last token is never fed back. Not counted: embeddings, norms, rotary "
    "embedding, softmax, activations, quantisation, the engine's filling rows; the learner's stand apart as padding. A "
    "prompt is prefilled up to its last token once a group, and again where new weights or a cancelled request made that "
    "necessary. Backward is twice the forward, and learning holds besides what backward computes again (its figure stands "
    "beside: attention, the head where logits are not kept, LoRA's A, whole layers with gradient checkpointing). With LoRA "
    "the frozen weights take no gradient. FP8 does not change FLOPs."
)


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder that fix its FLOPs. Gated feed-forward (three products), as in Qwen2, Qwen3 and Llama.

    Attributes:
        experts, experts_per_token, expert_intermediate: Of the layers with a mixture of experts; 0 for a dense model.
        sparse_layers: How many layers have one; the others have a feed-forward of ``intermediate``.
        shared_intermediate: Of the expert that every token passes, with a gate of one column (Qwen2-MoE); 0: there is none.
        lora_down, lora_up: Weights of all A [rank, in] and of all B [out, rank] of adapters; with any, the rest is frozen.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0
    sparse_layers: int = 0
    shared_intermediate: int = 0
    lora_down: int = 0
    lora_up: int = 0

    @classmethod
    def from_hf_config(cls, config: Any) -> ModelShape:
        """Read the sizes from a Hugging Face configuration of the Qwen2, Qwen3 or Llama kind, their mixtures of experts and
        Mixtral included.

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
        dense = cls(
            layers=size("num_hidden_layers"),
            hidden=hidden,
            heads=heads,
            kv_heads=size("num_key_value_heads", heads),
            head_dim=size("head_dim", hidden // heads),
            intermediate=size("intermediate_size"),
            vocab=size("vocab_size"),
        )
        experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
        if not experts:
            return dense
        every, without = getattr(config, "decoder_sparse_step", 1), getattr(config, "mlp_only_layers", None) or []
        return replace(
            dense,
            experts=experts,
            experts_per_token=size("num_experts_per_tok"),
            expert_intermediate=size("moe_intermediate_size", dense.intermediate),
            sparse_layers=sum((i + 1) % every == 0 and i not in without for i in range(dense.layers)),
            shared_intermediate=getattr(config, "shared_expert_intermediate_size", None) or 0,
        )

    @classmethod
    def from_model(cls, model: Any) -> ModelShape:
        """Sizes of a Hugging Face model, with the adapters that ``peft`` may have wrapped around its linears."""
        from trtl_rl.model.adapters import masters, without_wrapper

        model = without_wrapper(model)
        sizes = {name: parameter.numel() for name, parameter in masters(model).items()}
        return replace(
            cls.from_hf_config(model.config),
            lora_down=sum(n for name, n in sizes.items() if name.endswith(".lora_A.weight")),
            lora_up=sum(n for name, n in sizes.items() if name.endswith(".lora_B.weight")),
        )

    def adapted(self, rank: int, roles: Collection[str]) -> ModelShape:
        """The same decoder with an adapter of ``rank`` (0: none) on the linears ``roles`` of each layer (``q_proj`` …)."""
        assert not self.experts, "adapters of experts are not computed here"
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        sizes = {
            "q_proj": (self.hidden, q),
            "k_proj": (self.hidden, kv),
            "v_proj": (self.hidden, kv),
            "o_proj": (q, self.hidden),
            "gate_proj": (self.hidden, self.intermediate),
            "up_proj": (self.hidden, self.intermediate),
            "down_proj": (self.intermediate, self.hidden),
        }
        chosen = [sizes[role] for role in roles]
        times = self.layers * rank
        return replace(self, lora_down=times * sum(k for k, _ in chosen), lora_up=times * sum(n for _, n in chosen))

    @property
    def linear_parameters(self) -> int:
        """Weights that a token passes in all linears of the decoder layers, biases and adapters left out."""
        attention = self.layers * self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        dense = (self.layers - self.sparse_layers) * 3 * self.hidden * self.intermediate
        passed = 3 * (self.experts_per_token * self.expert_intermediate + self.shared_intermediate)
        columns = self.experts + (self.shared_intermediate > 0)  # of the router, and of the shared expert's gate
        return attention + dense + self.sparse_layers * self.hidden * (passed + columns)

    @property
    def inactive_parameters(self) -> int:
        """Weights of the experts that a token does not pass."""
        skipped = self.experts - self.experts_per_token
        return self.sparse_layers * 3 * self.hidden * skipped * self.expert_intermediate

    @property
    def lora_parameters(self) -> int:
        """Weights of all adapters."""
        return self.lora_down + self.lora_up

    @property
    def head_parameters(self) -> int:
        """Weights of the vocabulary projection, tied or not."""
        return self.hidden * self.vocab


def layers(shape: ModelShape, tokens: int, *, start: int = 0, attention: Attention = "causal") -> int:
    """FLOPs of the decoder layers over ``tokens`` positions from ``start`` on, those before it being in a KV cache."""
    assert tokens >= 0 and start >= 0
    pairs = _pairs(start + tokens) - _pairs(start) if attention == "causal" else tokens * (start + tokens)
    return 2 * (shape.linear_parameters + shape.lora_parameters) * tokens + _attention(shape, pairs)


def head(shape: ModelShape, positions: int) -> int:
    """FLOPs of the vocabulary projection at so many positions."""
    return 2 * shape.head_parameters * positions


# --- search ---


def prefill(shape: ModelShape, prompt_tokens: int, *, attention: Attention = "causal") -> int:
    """FLOPs to process a prompt as engines with one request a sample do: with the head at its last position, where the
    first token is sampled from."""
    assert prompt_tokens >= 1
    return layers(shape, prompt_tokens, attention=attention) + head(shape, 1)


def decode(shape: ModelShape, start: int, new_tokens: int) -> int:
    """FLOPs of one answer of ``new_tokens`` after :func:`prefill` of ``start`` tokens, with a KV cache.

    The prefill gave the first token. The other n - 1 take one forward each, at positions ``start`` to
    ``start + n - 2``, with the head: n head positions in all, one of them in ``prefill``.
    """
    assert start >= 1 and new_tokens >= 0
    return _generate(shape, start, max(new_tokens - 1, 0))


def rollout(
    shape: ModelShape, prompt_tokens: int, answers: Iterable[int], prefills: Sequence[int] | None = None
) -> int:
    """FLOPs of generating ``answers`` (tokens of each) to one prompt, as the embedded engine runs it.

    The prompt's keys are computed once for the group, up to its last token. From that token on every sample takes one
    forward with the head for each token that it draws; a cancelled sample takes those that it had. One sample therefore
    costs what :func:`prefill` and :func:`decode` cost.

    Args:
        prefills: Lengths of the prompt's beginnings that were really computed; default: once, up to the last token. Retried
            and cancelled prefills are further entries, a prefix that was in a cache already is none.
    """
    assert prompt_tokens >= 1
    answered = sum(_generate(shape, prompt_tokens - 1, tokens) for tokens in answers)
    done = [prompt_tokens - 1] if prefills is None else prefills
    return answered + sum(layers(shape, tokens) for tokens in done)


# --- learning ---


def forward(shape: ModelShape, prompt_tokens: int, answer_tokens: int, *, attention: Attention = "causal") -> int:
    """FLOPs of scoring an answer: an old-logprob pass, a pass of the reference model, and the forward of learning.

    All positions but the last pass the layers, the head is computed where the answer's tokens are predicted.
    """
    assert prompt_tokens >= 1 and answer_tokens >= 0
    return layers(shape, prompt_tokens + answer_tokens - 1, attention=attention) + head(shape, answer_tokens)


def learning(shape: ModelShape, prompt_tokens: int, answer_tokens: int, *, attention: Attention = "causal") -> int:
    """FLOPs of forward and backward over one prompt with its answer, without what backward computes again.

    Backward has two products for each of the forward's: a gradient for the input and one for the weight of each linear, and
    two for each of attention's. With adapters, the frozen linears and the head only have the first:
    ``4N·T + 6·N_lora·T + attention`` [D]. Gradients of the first layer's input are counted: the learner computes them, and so
    does stock code whose embeddings are trained or ``enable_input_require_grads`` was called.
    """
    once = forward(shape, prompt_tokens, answer_tokens, attention=attention)
    if not shape.lora_parameters:
        return 3 * once
    tokens = prompt_tokens + answer_tokens - 1
    return 3 * once - 2 * shape.linear_parameters * tokens - head(shape, answer_tokens)


def recompute(
    shape: ModelShape, prompt_tokens: int, answer_tokens: int, *, checkpointing: bool = False, head_again: bool = False
) -> int:
    """FLOPs that this learner's backward computes a second time over one prompt with its answer.

    Always: attention, whose backward runs the fused form again (Q Kᵀ, P V) and, inside the fused gradient, Q Kᵀ once more; and
    x Aᵀ of each adapter.

    Args:
        checkpointing: One more forward of all layers (``optimizer.gradient_checkpointing``).
        head_again: The logits were too many to keep.
    """
    tokens = prompt_tokens + answer_tokens - 1
    again = _attention(shape, _pairs(tokens)) * 3 // 2 + 2 * shape.lora_down * tokens
    again += layers(shape, tokens) if checkpointing else 0
    return again + (head(shape, answer_tokens) if head_again else 0)


def padding(
    shape: ModelShape,
    positions: int,
    head_rows: int,
    *,
    scored: int = 0,
    checkpointing: bool = False,
    head_again: bool = False,
) -> int:
    """FLOPs of rows that fill up the tiles of :func:`learning`: they pass the linears as all others do, and attend to nothing.

    Args:
        positions, head_rows: Filling rows of the layers, and of the head.
        scored: Forward passes beside, see :func:`forward`.
        checkpointing, head_again: As for :func:`recompute`.
    """
    passes = 2 if shape.lora_parameters else 3  # forward and dX, and dW where weights are trained
    again = scored + checkpointing
    weights = (passes + again) * shape.linear_parameters + (3 + again) * shape.lora_parameters + shape.lora_down
    return 2 * weights * positions + (passes + scored + head_again) * head(shape, head_rows)


def critic(shape: ModelShape, prompt_tokens: int, answer_tokens: int) -> int:
    """FLOPs of forward and backward of a value model: the decoder of ``shape`` with one output at every answer token."""
    assert prompt_tokens >= 1 and answer_tokens >= 0
    return 3 * (layers(shape, prompt_tokens + answer_tokens - 1) + 2 * shape.hidden * answer_tokens)


# --- feedback ---


def reward_model(
    shape: ModelShape, tokens: int, *, outputs: int = 1, scored: int | None = None, attention: Attention = "causal"
) -> int:
    """FLOPs of a classifier's forward over ``tokens`` tokens of prompt and answer.

    Args:
        outputs: Columns of the score head.
        scored: Positions where the score head is computed; default: all, as transformers' sequence classifiers do, which pick
            the last one afterwards. A process reward model scores the ends of steps.
    """
    positions = tokens if scored is None else scored
    return layers(shape, tokens, attention=attention) + 2 * shape.hidden * outputs * positions


def _generate(shape: ModelShape, start: int, forwards: int) -> int:
    """Forwards of one token each from position ``start`` on, with the head."""
    return layers(shape, forwards, start=start) + head(shape, forwards)


def _attention(shape: ModelShape, pairs: int) -> int:
    return 4 * shape.layers * shape.heads * shape.head_dim * pairs


def _pairs(tokens: int) -> int:
    """Pairs of a query and a key that it attends to, over the first ``tokens`` positions."""
    return tokens * (tokens + 1) // 2
