"""Tiny random models of every supported architecture, and their bound decoders: shared by the tests of the forward pass."""

from __future__ import annotations

from typing import Any

import torch

from trtl_rl.kernels.kernel_set import KernelSet
from trtl_rl.model.bind import TrainableDecoder
from trtl_rl.recipe.recipe import Recipe

FAMILIES = ("qwen2", "qwen3", "llama")
CONTEXT = 96
# No size is a multiple of 128 or 32, so that every block and every tile has a ragged edge.
RAGGED = {"hidden_size": 96, "intermediate_size": 160, "head_dim": 24, "vocab_size": 61}
ALIGNED = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "vocab_size": 128}
SEQUENCES = (5, 17, 40, 9)  # lengths of packed sequences; 71 tokens, so the last row tile is filled up
ANSWERS = (3, 10, 39, 1)


def tiny(family: str, *, tied: bool = False, aligned: bool = False, seed: int = 0, **config: Any) -> Any:
    """A float32 model of 2 layers with 4 query and 2 key/value heads; ``config`` overrides sizes or adds options.

    Weights are large enough that attention is far from uniform and logits differ; norms and biases are not trivial.
    """
    import transformers

    prefix = {"qwen2": "Qwen2", "qwen3": "Qwen3", "llama": "Llama"}[family]
    values: dict[str, Any] = {
        **(ALIGNED if aligned else RAGGED),
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": tied,
        **config,
    }
    torch.manual_seed(seed)
    model = getattr(transformers, f"{prefix}ForCausalLM")(getattr(transformers, f"{prefix}Config")(**values)).float()
    model.config.architectures = [f"{prefix}ForCausalLM"]  # what a checkpoint's config.json says
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.3)
            elif parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.mul_(3)
    return model


def bind(model: Any, recipe: str = "none") -> TrainableDecoder:
    """Apply a recipe, bind the model to eager operators and load its weights as version 0."""
    Recipe.load(recipe).apply(model)
    decoder = TrainableDecoder(model, KernelSet(False, backward=True), CONTEXT)
    decoder.refresh(0)
    return decoder


def sequences(vocab: int, lengths: tuple[int, ...] = SEQUENCES, seed: int = 1) -> list[list[int]]:
    """Random token ids; the first token of the first sequence is the padding id, which is a token as any other."""
    generator = torch.Generator().manual_seed(seed)
    out = [torch.randint(0, vocab, (n,), generator=generator).tolist() for n in lengths]
    out[0][0] = 0
    return out


def logprobs(decoder: TrainableDecoder, temperature: float = 1.0) -> torch.Tensor:
    """Logprobs of the standard sequences' answers, without gradients."""
    with torch.no_grad():
        ids = sequences(decoder.description.vocab)
        return decoder.forward(ids, list(ANSWERS), temperature)[0]


def in_tiles(keys: torch.Tensor) -> torch.Tensor:
    """[S, kv_heads, D, L] in the layout of ``ops.attention``."""
    return keys.unflatten(-1, (-1, 32)).transpose(2, 3).contiguous()
