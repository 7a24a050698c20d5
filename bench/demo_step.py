"""The demo's step beside the same loop written with plain transformers: ``generate``, FP32 model, AdamW, one thread.

    python bench/demo_step.py

Both sides do one synchronous step on the same prompts, one after the other in one process: 32 prompts × 8 samples, exact
match, ASymPO, groups without signal left out, one optimizer step. Ours adds FP8 quantisation in forward and backward, and
the refit of its engine; the engine's process, the buffer and the files of a run are left out on both sides.
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from common import interleaved, medians, spread, write_result
from transformers import AutoModelForCausalLM, AutoTokenizer

from trtl_rl.config import load_config
from trtl_rl.demo.defaults import demo_settings
from trtl_rl.demo.task import demo_rows
from trtl_rl.engines.torch_engine.engine import TorchEngine
from trtl_rl.flops.formulas import ModelShape
from trtl_rl.kernels.kernel_set import KernelSet, find_compiler
from trtl_rl.losses.loss import LossInputs, advantages, make_loss
from trtl_rl.model.bind import TrainableDecoder
from trtl_rl.model.source import find_model
from trtl_rl.recipe.recipe import Recipe
from trtl_rl.refit.sender import send
from trtl_rl.rollout import Group, Prompt, Request, Sampling
from trtl_rl.trainer.learner import Learner

STEPS = 6


def engine_for(model: torch.nn.Module, recipe: str, kernels: KernelSet, slots: int, context: int) -> TorchEngine:
    """The embedded engine at version 0 of a copy of ``model``."""
    bound = copy.deepcopy(model)
    Recipe.load(recipe).apply(bound)
    decoder = TrainableDecoder(bound, kernels, context)
    tensors = decoder.refresh(0)
    engine = TorchEngine(decoder.description, kernels, slots=slots, context=context, stop_ids=[])
    coverage = decoder.description.coverage.digest
    send(engine, tensors, version=0, coverage=coverage, bucket_bytes=1 << 30)
    return engine


def main() -> None:
    """Measure and write ``results/demo_step.json``."""
    torch.set_num_threads(1)
    config = load_config(None, base=demo_settings())
    path = find_model("demo").path
    tokenizer = AutoTokenizer.from_pretrained(path)
    rows = demo_rows()
    chosen = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))[: config.batch.prompts].tolist()
    prompts = [Prompt(i, 0, tokenizer(rows[i]["prompt"])["input_ids"], rows[i]["prompt"], rows[i]) for i in chosen]
    n, limit = config.batch.group_size, config.sampling.max_new_tokens
    start = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)

    plain = copy.deepcopy(start)
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-6, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    loss = make_loss(config.loss)

    def plain_step() -> None:
        ids = torch.tensor([prompt.ids for prompt in prompts for _ in range(n)])
        width = ids.shape[1]
        with torch.no_grad():
            out = plain.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, top_p=1.0, max_new_tokens=limit
            )
        answers = out[:, width:]
        stops = (answers == tokenizer.eos_token_id).int()
        lengths = torch.where(stops.any(1), stops.argmax(1) + 1, answers.shape[1])
        texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
        owners = torch.arange(len(prompts)).repeat_interleave(n)
        golds = [prompt.columns["answer"] for prompt in prompts for _ in range(n)]
        rewards = torch.tensor([float(text == gold) for text, gold in zip(texts, golds, strict=True)])
        a = advantages(rewards, owners)
        useful = a != 0  # as our learner does, responses of groups without signal are left out
        out, answers, lengths, owners, a = out[useful], answers[useful], lengths[useful], owners[useful], a[useful]
        owners = torch.unique(owners, return_inverse=True)[1]
        plain.train()
        logits = plain(out[:, :-1]).logits[:, width - 1 :]
        logprobs = -F.cross_entropy(logits.flatten(0, 1), answers.flatten(), reduction="none").view(answers.shape)
        mask = torch.arange(answers.shape[1]) < lengths[:, None]
        inputs = LossInputs(logprobs[mask], lengths, owners, a, len(prompts))
        plain_optimizer.zero_grad()
        loss(inputs).loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        plain_optimizer.step()

    def our_step(recipe: str):
        kernels = KernelSet(find_compiler() is not None, backward=True)
        model = copy.deepcopy(start)
        Recipe.load(recipe).apply(model)
        decoder = TrainableDecoder(model, kernels, 64)
        decoder.refresh(0)
        engine = engine_for(start, recipe, kernels, len(prompts) * n, 64)
        engine._stops[tokenizer.eos_token_id] = True
        optimizer = config.optimizer.model_copy(update={"lr": 1e-6, "warmup_steps": 0, "schedule": "constant"})
        shape = ModelShape.from_hf_config(start.config)
        learner = Learner(decoder, loss, optimizer, shape=shape, temperature=1.0, steps=STEPS)
        sampling = Sampling(1.0, limit)
        version = 0

        def step() -> None:
            nonlocal version
            groups = [Group(i, version, prompt) for i, prompt in enumerate(prompts)]
            requests = [Request(i, g.prompt.ids, n, sampling, (0, i, version)) for i, g in enumerate(groups)]
            for completion in engine.probe(requests):
                groups[completion.request_id].completions.append(completion)
            for group in groups:
                texts = tokenizer.batch_decode([c.ids for c in group.completions], skip_special_tokens=True)
                group.rewards = [float(text == group.prompt.columns["answer"]) for text in texts]
            learner.update(groups, version)
            version += 1
            tensors = decoder.refresh(version)
            digest = decoder.description.coverage.digest
            send(engine, tensors, version=version, coverage=digest, bucket_bytes=1 << 26)

        return step

    works = {
        "plain transformers, FP32": plain_step,
        "trtl-rl, FP8 recipe": our_step("fp8_block"),
        "trtl-rl, recipe off": our_step("none"),
    }
    taken = interleaved(works, STEPS)
    seconds = medians(taken)
    base = seconds["plain transformers, FP32"]
    write_result(
        "demo_step",
        {
            "work": f"{len(prompts)} prompts x {n} samples, up to {limit} tokens, synchronous, 1 thread",
            "seconds_min_max": spread(taken),
            "seconds": {name: round(value, 3) for name, value in seconds.items()},
            "speed_against_plain": {name: round(base / value, 2) for name, value in seconds.items()},
        },
    )


if __name__ == "__main__":
    main()
