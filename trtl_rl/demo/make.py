"""Make the bundled demo model: ``python -m trtl_rl.demo.make [DIRECTORY]``.

A tiny Qwen3 that has seen the task for a short time: it knows the form of an answer and most of its digits, but sampled at
temperature 1 it is right only about once in three times. Reinforcement learning does the rest. Supervised training
stops early, and label smoothing keeps the distribution wide. Deterministic for a seed and machine; about 20 seconds on one core.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtl_rl.demo.task import SYMBOLS, demo_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

STEPS = 140
BATCH = 64
LEARNING_RATE = 3e-3
SMOOTHING = 0.06
SEED = 0
PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {symbol: i for i, symbol in enumerate([PAD, EOS, UNKNOWN, *SYMBOLS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    make: Any = PreTrainedTokenizerFast
    fast: PreTrainedTokenizerFast = make(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, unk_token=UNKNOWN)
    return fast


def make_model(vocabulary: int) -> Qwen3ForCausalLM:
    """0.33 M parameters; hidden, query, key/value and feed-forward sizes are multiples of 128."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        initializer_range=0.09,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config)


def warm_start(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, steps: int = STEPS, seed: int = SEED
) -> float:
    """Train on prompts and answers for a short time; returns the last loss (nats per answer token)."""
    import torch
    import torch.nn.functional as F

    rows = demo_rows()
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    loss = torch.zeros(())
    for step in range(steps):
        chosen = [rows[int(i)] for i in torch.randint(len(rows), (BATCH,), generator=generator)]
        texts = [row["prompt"] + row["answer"] for row in chosen]
        ids = [tokenizer(text)["input_ids"] + [tokenizer.eos_token_id] for text in texts]
        width = max(map(len, ids))
        padded = torch.tensor([row + [-100] * (width - len(row)) for row in ids])
        targets = padded[:, 1:].clone()
        targets[:, : len(chosen[0]["prompt"]) - 1] = -100  # the prompt is not learned
        logits = model(input_ids=padded[:, :-1].clamp_min(0)).logits
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, label_smoothing=SMOOTHING)
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * min(1.0, (step + 1) / 20) * (1 - step / steps)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return float(loss)


def make(directory: Path) -> None:
    """Write the checkpoint: bfloat16 safetensors, tokenizer, generation config."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    tokenizer = make_tokenizer()
    model = make_model(len(tokenizer))
    loss = warm_start(model, tokenizer)
    model.bfloat16().save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    generation: dict[str, Any] = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    size = sum(path.stat().st_size for path in directory.iterdir())
    print(
        f"{directory}: {sum(p.numel() for p in model.parameters()):,} parameters, {size:,} bytes, last loss {loss:.3f}"
    )


if __name__ == "__main__":
    make(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "model")
