"""Evaluation on held-out prompts, with a scorer of its own: a reward may be gamed, the evaluation target is not it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trtl_rl.config import RunConfig
from trtl_rl.config_data import EvaluationConfig
from trtl_rl.engines.engine import RolloutEngine
from trtl_rl.errors import RewardError
from trtl_rl.flops.formulas import ModelShape
from trtl_rl.flops.ledger import Ledger
from trtl_rl.rewards.builtin import final_answer_of
from trtl_rl.rewards.reward import Sample
from trtl_rl.rewards.runner import RewardRunner
from trtl_rl.rollout import Completion, Prompt, Request, Sampling
from trtl_rl.tasks.rows import Rows, evaluation_config
from trtl_rl.tasks.task import Task
from trtl_rl.trainer.estimates import Estimate, estimate, maj_at_k, pass_at_k, powers_up_to
from trtl_rl.trainer.rollout_state import Cost

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CHUNK = 256  # prompts between two signs of progress

Progress = Callable[[int, int], None]
FinalAnswer = Callable[[str], str | None]


@dataclass
class _Answered:
    """A prompt's answers that one scorer has scored.

    Attributes:
        scores, texts: One per completion; those that the scorer excluded are left out.
    """

    scores: list[float]
    texts: list[str]


class Evaluator:
    """Scores a greedy answer and sampled answers of every prompt.

    Metrics, with n = ``config.samples`` and NAME each scorer, all of which judge the same answers:

    ``eval/NAME``, ``eval/greedy_NAME``
        mean score of sampled and of greedy answers (mean@n and mean@1), over prompts
    ``eval/NAME/pass_at_k``
        k = 1, 2, 4, …, n, where n > 1: unbiased (:func:`pass_at_k`)
    ``eval/NAME/maj_at_k``
        k = 2, 4, …, n: whether the majority of k answers is right, unbiased (:func:`maj_at_k`); of scorers among
        ``final_answers``. Of one answer it would be ``pass_at_1``
    ``…/ci_low``, ``…/ci_high``
        95 % interval of each of these (:func:`estimate`)
    ``eval/version_first``, ``eval/version_last``
        weight versions that the answers are from

    All answers are asked for at one version, and beside a training that goes on a refit may come in between: then
    completions under way finish with the new weights or the old ones, as ``buffer.in_flight`` says for rollouts, and those
    that begin later have the new ones. So the figure is stamped with the range of versions over all its tokens, never with
    one version that it does not have. FLOPs are counted apart from the three roles.

    Args:
        scorer: The targets: one reward function each, with its name.
        sampling: Of the sampled answers.
        final_answers: By scorer, finds the answer in a completion for majority votes; default: those of built-in scorers.
    """

    def __init__(
        self,
        scorer: RewardRunner,
        prompts: list[Prompt],
        engine: RolloutEngine,
        ledger: Ledger,
        *,
        config: EvaluationConfig,
        shape: ModelShape,
        decode: Callable[[list[int]], str],
        sampling: Sampling,
        seed: int,
        final_answers: Mapping[str, FinalAnswer] | None = None,
    ) -> None:
        self.scorer, self.prompts, self.config = scorer, prompts, config
        self.engine, self.ledger, self.shape, self.decode = engine, ledger, shape, decode
        self.sampling, self.seed = sampling, seed
        if final_answers is None:
            names = {reward.name: reward.config.name for reward in scorer.rewards if reward.config is not None}
            found = {name: final_answer_of(built_in) for name, built_in in names.items()}
            final_answers = {name: find for name, find in found.items() if find is not None}
        self.final_answers = final_answers
        self._asked = 10**9  # ids of its requests, apart from those of parity probes

    def run(self, progress: Progress = lambda done, total: None) -> dict[str, float]:
        """``eval/…`` metrics. Answers without a score are left out; prompts without any scored answer too.

        Args:
            progress: Called with the answers that are there and their total.

        Raises:
            RewardError: the scorer failed.
            EngineError: the engine did.
        """
        greedy = Sampling(self.sampling.temperature, self.sampling.max_new_tokens, greedy=True)
        out: dict[str, float] = {}
        versions: list[int] = []
        n = self.config.samples
        total, done = (n + 1) * len(self.prompts), 0
        for sampling, samples in ((self.sampling, n), (greedy, 1)):
            found: dict[str, list[_Answered]] = {reward.name: [] for reward in self.scorer.rewards}
            for start in range(0, len(self.prompts), _CHUNK):
                progress(done, total)
                chunk = self.prompts[start : start + _CHUNK]
                for name, answered in self._answer(chunk, sampling, samples, versions).items():
                    found[name] += [item for item in answered if item.scores]
                done += len(chunk) * samples
            for name, answered in found.items():
                metric = f"eval/greedy_{name}" if sampling.greedy else f"eval/{name}"
                out.update(self._figures(metric, answered, samples, self.final_answers.get(name)))
        progress(total, total)
        return {**out, "eval/version_first": min(versions), "eval/version_last": max(versions)}

    def _figures(
        self, name: str, found: list[_Answered], samples: int, final_answer: FinalAnswer | None
    ) -> dict[str, float]:
        if not found:
            return {}
        out = _entry(name, estimate([sum(item.scores) / len(item.scores) for item in found]))
        if samples == 1:
            return out
        right = [[score >= self.config.pass_score for score in item.scores] for item in found]
        for k in powers_up_to(samples):
            enough = [(item.texts, goods) for item, goods in zip(found, right, strict=True) if len(goods) >= k]
            if not enough:
                break
            out.update(_entry(f"{name}/pass_at_{k}", estimate([pass_at_k(len(g), sum(g), k) for _, g in enough])))
            if final_answer is not None and k > 1:
                votes = [maj_at_k([final_answer(text) for text in texts], goods, k) for texts, goods in enough]
                out.update(_entry(f"{name}/maj_at_{k}", estimate(votes)))
        return out

    def _answer(
        self, prompts: list[Prompt], sampling: Sampling, samples: int, versions: list[int]
    ) -> dict[str, list[_Answered]]:
        """Of each scorer, what it has scored of each prompt."""
        start = time.perf_counter()
        by_request: dict[int, list[Completion]] = {}
        requests = []
        for prompt in prompts:
            self._asked += 1
            by_request[-self._asked] = []
            requests.append(Request(-self._asked, prompt.ids, samples, sampling, (self.seed, prompt.id, -1)))
        for completion in self.engine.probe(requests):
            by_request[completion.request_id].append(completion)
            versions += [completion.version_first, completion.version_last]
        answers = [sorted(by_request[request.id], key=lambda item: item.sample) for request in requests]
        flops = sum(Cost.of(prompt, items).flops(self.shape) for prompt, items in zip(prompts, answers, strict=True))
        self.ledger.apart("evaluation", flops, time.perf_counter() - start)
        to_score = [
            Sample((i, item.sample), prompt, self.decode(item.ids), item.ids)
            for i, (prompt, items) in enumerate(zip(prompts, answers, strict=True))
            for item in items
        ]
        scored = self.scorer.score(to_score)
        if scored.flops:
            self.ledger.apart("evaluation", scored.flops, scored.seconds)
        found: dict[str, list[_Answered]] = {name: [_Answered([], []) for _ in prompts] for name in scored.components}
        for name, scores in scored.components.items():
            for sample, score in zip(to_score, scores, strict=True):
                if score is not None:
                    found[name][sample.id[0]].scores.append(score)
                    found[name][sample.id[0]].texts.append(sample.text)
        return found


def evaluation_prompts(
    config: RunConfig, rows: Rows | None, task: Callable[[], Task], tokenizer: PreTrainedTokenizerBase, room: int
) -> list[Prompt]:
    """The prompts that a run is evaluated on.

    Args:
        rows: The evaluation's own; ``None``: it takes those that the run's task keeps from training.
        task: Makes the run's task, which tokenises all of its rows: not called where the evaluation has its own.
        room: Tokens of the longest prompt.
    """
    if rows is None:
        return task().held_out_prompts(config.evaluation.prompts)
    return Task(rows, evaluation_config(config), tokenizer, room).fixed_prompts(config.evaluation.prompts)


def make_evaluator(
    config: RunConfig,
    scorer: RewardRunner,
    prompts: list[Prompt],
    engine: RolloutEngine,
    ledger: Ledger,
    *,
    shape: ModelShape,
    decode: Callable[[list[int]], str],
) -> Evaluator:
    """The evaluator that a run's configuration asks for."""
    sampling = config.sampling
    return Evaluator(
        scorer,
        prompts,
        engine,
        ledger,
        config=config.evaluation,
        shape=shape,
        decode=decode,
        sampling=Sampling(config.evaluation.temperature or sampling.temperature, sampling.max_new_tokens),
        seed=config.seed,
    )


class Evaluations:
    """Runs evaluations at once, or in a thread beside training, one at a time.

    Args:
        write: Takes the step at which an evaluation was asked for, its metrics, and whether it ran beside training.
    """

    def __init__(
        self, evaluator: Evaluator, progress: Progress, write: Callable[[int, dict[str, float], bool], None]
    ) -> None:
        self._evaluator, self._progress, self._write = evaluator, progress, write
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def now(self, step: int) -> None:
        """Evaluate and wait. Raises what the evaluation, or one before it, has raised."""
        self.wait()
        self._write(step, self._evaluator.run(self._progress), False)

    def beside(self, step: int) -> None:
        """Begin an evaluation, after the one before has ended. Raises what that one has raised."""
        self.wait()

        def work() -> None:
            try:
                self._write(step, self._evaluator.run(self._progress), True)
            except BaseException as error:
                self._failure = error

        self._thread = threading.Thread(target=work, name="evaluation", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait for the evaluation under way. Raises what it has raised."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            if isinstance(failure, RewardError):
                raise RewardError(f"The evaluation's scorer: {failure}") from failure
            raise failure


def _entry(name: str, value: Estimate) -> dict[str, float]:
    return {name: value.mean, f"{name}/ci_low": value.low, f"{name}/ci_high": value.high}
