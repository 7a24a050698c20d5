"""Probes: the engine's logprobs beside the trainer's, for the same weight version, through both normal paths."""

from __future__ import annotations

import math
import random
import time

import torch
from torch import Tensor

from trtl_rl.config import RunConfig
from trtl_rl.engines.engine import RolloutEngine
from trtl_rl.errors import ParityError
from trtl_rl.flops import formulas
from trtl_rl.flops.ledger import Ledger
from trtl_rl.metrics import Accumulator, MetricsWriter
from trtl_rl.rollout import Completion, Request, Sampling
from trtl_rl.trainer.learner import Learner


class ParityCheck:
    """Asks the engine after refits and lets the learner score its answers at that same version.

    Prompts are those of the run, so that a probe's path is the one that training rollouts take.
    """

    def __init__(
        self,
        config: RunConfig,
        engine: RolloutEngine,
        learner: Learner,
        ledger: Ledger,
        sampling: Sampling,
        prompts: list[list[int]],
    ) -> None:
        self.config, self.engine, self.learner, self.ledger = config.parity, engine, learner, ledger
        self.sampling, self.prompts = sampling, prompts
        self.seed = config.seed
        self._asked = 0

    def after_resume(self, version: int, metrics: MetricsWriter) -> None:
        """Compare before the first step: does the engine hold the weights of the checkpoint? Raises as ``after_refit``."""
        if self.config.every and self.prompts:
            out = Accumulator()
            self._compare(version, metrics, out)
            found = out.reduce()
            metrics.message(
                "info",
                f"Resumed at version {version}: of {found['mismatch/tokens']:.0f} logprobs of engine and trainer "
                f"{found['mismatch/differing_tokens']:.0f} differ.",
            )

    def after_refit(self, version: int, metrics: MetricsWriter, out: Accumulator) -> None:
        """Compare when it is due, and put what was found into ``out``. Raises ParityError above ``parity.stop``."""
        due = self.config.every and (version % self.config.every == 0 or version == 1)
        if due and self.prompts:
            self._compare(version, metrics, out)

    def _compare(self, version: int, metrics: MetricsWriter, out: Accumulator) -> None:
        found, raw = self._ask(self.prompts, version)
        out.update(found)
        largest = found["mismatch/max_abs"]
        if largest <= self.config.warn:
            return  # NaN does not
        text = (
            f"At version {version} trainer and engine differ in {found['mismatch/differing_tokens']:.0f} of "
            f"{found['mismatch/tokens']:.0f} logprobs, by up to {largest:.3g}, first at token "
            f"{found['mismatch/first_divergence']:.0f} of an answer."
        )
        if self.config.stop is None or largest <= self.config.stop:
            metrics.message("warning", text)
            return
        raise ParityError(f"{text} The run stops (parity.stop={self.config.stop:g}): {self._cause(version, raw)}")

    def _ask(self, prompts: list[list[int]], version: int) -> tuple[dict[str, float], bool]:
        """What differs in answers to ``prompts``, and whether it is all explained by a forgotten temperature."""
        start = time.perf_counter()
        requests = []
        for i, prompt in enumerate(prompts):
            self._asked += 1
            seed = (self.seed, -1 - i, version)  # not of what was asked before: a resumed run asks the same
            requests.append(Request(-self._asked, prompt, 4, self.sampling, seed, logprobs=True))
        by_id = {request.id: request for request in requests}
        completions = sorted(self.engine.probe(requests), key=lambda item: (-item.request_id, item.sample))
        asked = [by_id[c.request_id].ids for c in completions]
        ours = self.learner.logprobs(asked, completions)
        theirs = torch.tensor([value for completion in completions for value in completion.logprobs or []])
        found = compare(ours, theirs, [len(completion.ids) for completion in completions])
        raw = bool(found["mismatch/differing_tokens"]) and torch.equal(
            theirs, self.learner.logprobs(asked, completions, temperature=1.0)
        )
        self._charge(requests, completions, time.perf_counter() - start)
        return found, raw

    def _cause(self, version: int, raw: bool) -> str:
        """Where to look. The refit's digest was right, so what differs came after it."""
        if raw:
            return (
                "the engine's are those of its logits without the division by sampling.temperature="
                f"{self.sampling.temperature:g}."
            )
        draw = random.Random(version)
        vocab = self.learner.shape.vocab
        unseen = [[draw.randrange(vocab) for _ in prompt] for prompt in self.prompts]
        found, _ = self._ask(unseen, version)
        if found["mismatch/differing_tokens"]:
            return (
                "prompts that it never saw differ too, so the weights that the engine computes with are not those whose digest "
                "it reported (a tensor in another layout or order, or one that was not taken over), or its operators differ."
            )
        return (
            "only prompts that it had answered before differ, so it serves them from a cache that the refit did not reset "
            "(keys and values of older weights)."
        )

    def _charge(self, requests: list[Request], completions: list[Completion], seconds: float) -> None:
        """Count the probes apart from the roles: generating them, and the learner's forward passes."""
        shape = self.learner.shape
        flops = 0
        for request in requests:
            mine = [completion for completion in completions if completion.request_id == request.id]
            answers, prefills = [len(c.ids) for c in mine], [n for c in mine for n in c.prefills]
            flops += formulas.rollout(shape, len(request.ids), answers, prefills)
            flops += sum(formulas.forward(shape, len(request.ids), tokens) for tokens in answers)
        self.ledger.apart("parity", flops, seconds)


def compare(trainer: Tensor, engine: Tensor, lengths: list[int]) -> dict[str, float]:
    """Mismatch of two logprob vectors [tokens] float32 of completions with ``lengths`` tokens.

    ``mismatch_kl`` is the K3 estimator exp(d) − d − 1 of KL(engine ‖ trainer) with d = trainer − engine, in float64: in float32 it
    reads 0 up to differences of about 1e-4. ``first_divergence`` is the least position in an answer that differs, −1 if none.
    """
    difference = trainer.double() - engine.double()
    differs = trainer != engine
    kl = torch.expm1(difference) - difference
    position = torch.cat([torch.arange(n) for n in lengths]) if lengths else torch.zeros(0, dtype=torch.int64)
    return {
        "mismatch/tokens": float(trainer.numel()),
        "mismatch/differing_tokens": float(differs.sum()),
        "mismatch/max_abs": float(difference.abs().max()) if trainer.numel() else math.nan,
        "mismatch/mean_exp_abs": float(difference.abs().exp().mean()),
        "mismatch/first_divergence": float(position[differs].min()) if bool(differs.any()) else -1.0,
        "mismatch_kl/mean": float(kl.mean()),
        "mismatch_kl/max": float(kl.max()),
    }
