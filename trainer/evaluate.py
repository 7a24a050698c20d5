"""Evaluation on held-out prompts, with a scorer of its own: a reward may be gamed, the evaluation target is not it."""

from __future__ import annotations

import time
from collections.abc import Callable

from trtl_rl.engines.engine import RolloutEngine
from trtl_rl.flops import formulas
from trtl_rl.flops.formulas import ModelShape
from trtl_rl.flops.ledger import Ledger
from trtl_rl.rewards.runner import RewardRunner
from trtl_rl.rollout import Prompt, Request, Sampling


class Evaluator:
    """Scores a greedy and a sampled answer of every prompt at the engine's current version.

    FLOPs are counted apart from the three roles.

    Args:
        name: What is measured, for metric names: ``eval/<name>`` (sampled) and ``eval/greedy_<name>``.
    """

    def __init__(
        self,
        name: str,
        scorer: RewardRunner,
        prompts: list[Prompt],
        engine: RolloutEngine,
        ledger: Ledger,
        *,
        shape: ModelShape,
        decode: Callable[[list[int]], str],
        sampling: Sampling,
        seed: int,
    ) -> None:
        self.name, self.scorer, self.prompts = name, scorer, prompts
        self.engine, self.ledger, self.shape, self.decode = engine, ledger, shape, decode
        self.sampling, self.seed = sampling, seed
        self._asked = 10**9  # ids of its requests, apart from those of parity probes

    def run(self) -> dict[str, float]:
        """``eval/…`` metrics; a prompt whose answer gets no score is left out of the mean."""
        greedy = Sampling(self.sampling.temperature, self.sampling.max_new_tokens, greedy=True)
        return {
            f"eval/{self.name}": self._score(self.sampling),
            f"eval/greedy_{self.name}": self._score(greedy),
        }

    def _score(self, sampling: Sampling) -> float:
        start = time.perf_counter()
        requests = []
        for prompt in self.prompts:
            self._asked += 1
            requests.append(Request(-self._asked, prompt.ids, 1, sampling, (self.seed, prompt.id, -1)))
        answers = {completion.request_id: completion for completion in self.engine.probe(requests)}
        completions = [answers[request.id] for request in requests]
        flops = sum(
            formulas.prefill(self.shape, len(prompt.ids)) + formulas.decode(self.shape, len(prompt.ids), len(done.ids))
            for prompt, done in zip(self.prompts, completions, strict=True)
        )
        self.ledger.apart("evaluation", flops, time.perf_counter() - start)
        texts = [self.decode(completion.ids) for completion in completions]
        scores = self.scorer.score(self.prompts, texts, [completion.ids for completion in completions]).total
        known = [score for score in scores if score is not None]
        return sum(known) / max(1, len(known))
