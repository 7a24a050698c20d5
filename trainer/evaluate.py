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

_CHUNK = 256  # prompts between two signs of progress


class Evaluator:
    """Scores a greedy and a sampled answer of every prompt at the engine's current version.

    FLOPs are counted apart from the three roles.

    Args:
        scorer: The targets; each has the metrics ``eval/<name>`` (sampled) and ``eval/greedy_<name>``.
    """

    def __init__(
        self,
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
        self.scorer, self.prompts = scorer, prompts
        self.engine, self.ledger, self.shape, self.decode = engine, ledger, shape, decode
        self.sampling, self.seed = sampling, seed
        self._asked = 10**9  # ids of its requests, apart from those of parity probes

    def run(self, progress: Callable[[int, int], None] = lambda done, total: None) -> dict[str, float]:
        """``eval/…`` metrics; answers without a score are left out of the mean, and a mean of nothing is left out.

        Args:
            progress: Called with the answers that are there and their total.
        """
        greedy = Sampling(self.sampling.temperature, self.sampling.max_new_tokens, greedy=True)
        out: dict[str, float] = {}
        total = 2 * len(self.prompts)
        for i, (prefix, sampling) in enumerate([("", self.sampling), ("greedy_", greedy)]):
            known: dict[str, list[float]] = {reward.name: [] for reward in self.scorer.rewards}
            for start in range(0, len(self.prompts), _CHUNK):
                progress(i * len(self.prompts) + start, total)
                for name, scores in self._score(self.prompts[start : start + _CHUNK], sampling).items():
                    known[name] += [score for score in scores if score is not None]
            out.update({f"eval/{prefix}{name}": sum(scores) / len(scores) for name, scores in known.items() if scores})
        progress(total, total)
        return out

    def _score(self, prompts: list[Prompt], sampling: Sampling) -> dict[str, list[float | None]]:
        start = time.perf_counter()
        requests = []
        for prompt in prompts:
            self._asked += 1
            requests.append(Request(-self._asked, prompt.ids, 1, sampling, (self.seed, prompt.id, -1)))
        answers = {completion.request_id: completion for completion in self.engine.probe(requests)}
        completions = [answers[request.id] for request in requests]
        pairs = zip(prompts, completions, strict=True)
        flops = sum(
            formulas.rollout(self.shape, len(prompt.ids), [len(done.ids)], done.prefills) for prompt, done in pairs
        )
        self.ledger.apart("evaluation", flops, time.perf_counter() - start)
        texts = [self.decode(completion.ids) for completion in completions]
        scores = self.scorer.score(prompts, texts, [completion.ids for completion in completions]).components
        self.ledger.apart("evaluation", self.scorer.take_flops())
        return scores
