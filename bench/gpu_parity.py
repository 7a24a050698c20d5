"""Section ``parity`` of ``gpu.py``: whole models on a device, the engine's logprobs beside the trainer's, bit for bit.

Operators run eagerly on a fixed number of rows a call, with FP8 emulated. A bare machine has no ModelOpt: stand-ins carry the
recipe's arguments where its quantisers would be.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
import yaml
from torch import nn

from trtl_rl.engines.torch_engine.engine import TorchEngine
from trtl_rl.kernels.kernel_set import KernelSet
from trtl_rl.model.bind import TrainableDecoder
from trtl_rl.recipe.recipe import Recipe
from trtl_rl.refit.sender import send
from trtl_rl.rollout import Request, Sampling

FAMILIES = {"Qwen2": {}, "Qwen3": {"head_dim": 32}, "Llama": {}}
CONTEXT = 512


@dataclass
class FakeQuantiser:
    """What the expansion of a recipe reads off one of ModelOpt's quantisers."""

    backend_extra_args: dict[str, Any]
    backend: str
    is_enabled: bool = True
    num_bits: tuple[int, int] = (4, 3)
    block_sizes: None = None
    _dynamic: bool = True


def quantise(model: nn.Module) -> None:
    """Put stand-ins with the bundled recipe's arguments on every linear but the head."""
    entries = yaml.safe_load(Recipe.load("fp8_block").text)["quantize"]["quant_cfg"]
    cfgs = {entry["quantizer_name"].strip("*"): entry["cfg"] for entry in entries if "cfg" in entry}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            for kind, cfg in cfgs.items():
                setattr(module, kind, FakeQuantiser(cfg["backend_extra_args"], cfg["backend"]))


def model_of(family: str, tied: bool, device: str) -> Any:
    """A small random model with sizes that are no multiples of 128."""
    sizes: dict[str, Any] = {
        "hidden_size": 160, "intermediate_size": 400, "num_hidden_layers": 3, "num_attention_heads": 5,
        "num_key_value_heads": 5, "vocab_size": 1000, "max_position_embeddings": CONTEXT, "tie_word_embeddings": tied,
        **FAMILIES[family],
    }  # fmt: skip
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**sizes)).float()
    model.config.architectures = [f"{family}ForCausalLM"]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3 if parameter.dim() > 1 else 1)
    return model.to(device)


def parity(
    result: dict[str, Any], device: str = "cuda", answer: int = 100, families: Sequence[str] = tuple(FAMILIES)
) -> None:
    """Logprobs that differ, of how many: before and after an update that moves every weight."""
    for family in families:
        for tied in (False, True):
            start = time.perf_counter()
            model = model_of(family, tied, device)
            quantise(model)
            decoder = TrainableDecoder(model, KernelSet(False, backward=True, device=device), CONTEXT)
            own = KernelSet(False, device=device)
            engine = TorchEngine(decoder.description, own, slots=24, context=CONTEXT, stop_ids=[])
            differing = tokens = 0
            for version in range(2):
                tensors = decoder.refresh(version)
                digest = decoder.description.coverage.digest
                send(engine, tensors, version=version, coverage=digest, bucket_bytes=1 << 26)
                generator = torch.Generator().manual_seed(version)
                prompts = [torch.randint(1000, (n,), generator=generator).tolist() for n in (1, 3, 17, 64, 130, 300)]
                requests = [
                    Request(-1 - i, prompt, 4, Sampling(1.0, answer - 7 * i), (0, i, version), logprobs=True)
                    for i, prompt in enumerate(prompts)
                ]
                done = sorted(engine.probe(requests), key=lambda item: (-item.request_id, item.sample))
                theirs = torch.tensor([value for item in done for value in item.logprobs or []])
                sequences = [[*prompts[-1 - item.request_id], *item.ids] for item in done]
                ours, _ = decoder.forward(sequences, [len(item.ids) for item in done], 1.0)
                differing += int((ours.detach().cpu() != theirs).sum())
                tokens += theirs.numel()
                ours.mean().backward()
                with torch.no_grad():
                    for parameter in model.parameters():
                        if parameter.grad is not None:
                            parameter.sub_(1e-3 * parameter.grad.sign())
                            parameter.grad = None
            seconds = round(time.perf_counter() - start, 1)
            result[f"{family}, {'tied' if tied else 'untied'}"] = {
                "differing": differing,
                "tokens": tokens,
                "seconds": seconds,
            }
