"""Evaluation: estimators, intervals, stamps, and running beside training."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from trtl_rl.config import validate_config
from trtl_rl.config_data import EvaluationConfig
from trtl_rl.errors import RewardError, UserError
from trtl_rl.flops.formulas import ModelShape
from trtl_rl.flops.ledger import Ledger
from trtl_rl.model.source import find_model
from trtl_rl.rewards.builtin import final_answer_of
from trtl_rl.rewards.reward import Reward
from trtl_rl.rewards.runner import RewardRunner
from trtl_rl.rollout import Completion, Prompt, Request, Sampling
from trtl_rl.tasks.rows import Rows
from trtl_rl.tasks.task import Task
from trtl_rl.trainer.estimates import estimate, maj_at_k, pass_at_k, powers_up_to
from trtl_rl.trainer.evaluate import Evaluations, Evaluator, evaluation_prompts

SHAPE = ModelShape(layers=1, hidden=8, heads=1, kv_heads=1, head_dim=8, intermediate=8, vocab=16)


def test_pass_at_k_is_the_mean_over_all_choices_of_k_answers() -> None:
    for n in range(1, 7):
        for correct in range(n + 1):
            answers = [i < correct for i in range(n)]
            for k in range(1, n + 1):
                chosen = list(itertools.combinations(answers, k))
                assert pass_at_k(n, correct, k) == pytest.approx(sum(map(any, chosen)) / len(chosen))


def majority(answers: Sequence[str | None], right: Sequence[bool]) -> float:
    """One vote, counted out; ties are drawn by lot."""
    said = [answer for answer in answers if answer is not None]
    leaders = [answer for answer in set(said) if said.count(answer) == max(map(said.count, said))]
    judged = [[good for other, good in zip(answers, right, strict=True) if other == answer] for answer in leaders]
    return sum(sum(goods) / len(goods) for goods in judged) / len(leaders) if leaders else 0.0


def test_maj_at_k_is_the_mean_over_all_choices_of_k_answers() -> None:
    draw = random.Random(0)
    for _ in range(60):
        answers = [draw.choice(["a", "a", "b", "c", "d", None]) for _ in range(draw.randint(1, 8))]
        right = [answer in ("a", "d") and draw.random() < 0.9 for answer in answers]  # sometimes judged differently
        for k in range(1, len(answers) + 1):
            every = [
                majority([answers[i] for i in some], [right[i] for i in some])
                for some in itertools.combinations(range(len(answers)), k)
            ]
            assert maj_at_k(answers, right, k) == pytest.approx(sum(every) / len(every), abs=1e-12)


def test_a_majority_is_of_answers_and_not_of_right_ones() -> None:
    assert maj_at_k(["a", "b", "b"], [True, False, False], 3) == 0.0
    assert maj_at_k(["a", "b"], [True, False], 2) == 0.5  # undecided
    assert maj_at_k([None, None, "a"], [False, False, True], 3) == 1.0  # no answer is no vote
    assert maj_at_k([None], [True], 1) == 0.0
    many = [str(min(i // 30, 9)) for i in range(400)]  # beyond what floats hold of numbers of choices
    assert 0.0 < maj_at_k(many, [answer == "9" for answer in many], 200) <= 1.0


def test_intervals_cover_the_truth_and_do_not_vanish_at_the_ends() -> None:
    draw = random.Random(0)
    covered, trials = 0, 2000
    for _ in range(trials):
        values = []
        for _ in range(30):  # prompts differ in difficulty; four answers each
            rate = draw.random() ** 2
            values.append(sum(draw.random() < rate for _ in range(4)) / 4)
        found = estimate(values)
        covered += found.low <= 1 / 3 <= found.high
    assert covered / trials == pytest.approx(0.95, abs=0.02)  # 4 standard deviations
    one = estimate([1.0] * 20)
    assert one.mean == one.high == 1.0 and one.low == pytest.approx(0.839, abs=1e-3)  # Wilson's, 20 of 20
    zero = estimate([0.0])
    assert zero.low == 0.0 and zero.high > 0.7
    wide = estimate([-3.0, 5.0, 1.0])
    assert wide.low < 1.0 < wide.high and wide.mean == 1.0
    assert estimate([0.0, 1.0] * 50).high == pytest.approx(0.5962, abs=2e-3)


def test_intervals_are_those_of_a_bootstrap_over_prompts_away_from_the_ends() -> None:
    draw = np.random.default_rng(0)
    values = []
    for _ in range(80):
        rate = draw.beta(1, 1)
        answers = draw.choice(["right", "a", "b"], size=8, p=[rate, 0.7 * (1 - rate), 0.3 * (1 - rate)])
        values.append(maj_at_k(answers.tolist(), (answers == "right").tolist(), 4))
    means = np.array(values)[draw.integers(0, 80, (4000, 80))].mean(1)
    found = estimate(values)
    assert found.low == pytest.approx(np.quantile(means, 0.025), abs=0.01)
    assert found.high == pytest.approx(np.quantile(means, 0.975), abs=0.01)


def test_answers_of_one_prompt_count_as_one_observation() -> None:
    same = estimate([0.0, 1.0] * 5)
    spread = estimate([0.5] * 10)  # as many answers right, but every prompt half
    assert same.high - same.low == pytest.approx(spread.high - spread.low, rel=0.1)
    assert powers_up_to(1) == [1] and powers_up_to(8) == [1, 2, 4, 8]


class FakeEngine:
    """Answers sample s of the prompt with id i by the id 10·i + s; greedy by 10·i. A refit comes after ``refit_after``."""

    def __init__(self, refit_after: int = 10**9) -> None:
        self.requests: list[Request] = []
        self.given, self.refit_after = 0, refit_after
        self.release = threading.Event()
        self.release.set()

    def probe(self, requests: Sequence[Request]) -> list[Completion]:
        self.release.wait(30)
        self.requests += requests
        out = []
        for request in requests:
            for sample in range(request.samples):
                version = 3 + (self.given >= self.refit_after)
                self.given += 1
                out.append(Completion(request.id, sample, [10 * request.ids[0] + sample], "stop", 3, version))
        return out[::-1]  # the order of arrival means nothing


def right(completions: list[str], answer: list[str]) -> list[float | None]:
    return [None if text == "21" else float(text in gold) for text, gold in zip(completions, answer, strict=True)]


def evaluator(
    engine: FakeEngine, samples: int = 4, scorer: Any = right, more: Sequence[Reward] = (), **keys: Any
) -> Evaluator:
    golds = ["[1] 0 1", "[2] 10", "[3] 20 22"]
    prompts = [Prompt(i, 0, [i], "", {"answer": gold[4:].split()}) for i, gold in enumerate(golds)]
    fake: Any = engine
    return Evaluator(
        RewardRunner([Reward("right", scorer, in_process=True), *more]),
        prompts,
        fake,
        Ledger(parameters=1, reward_system="fake"),
        config=EvaluationConfig(prompts=3, samples=samples, **keys),
        shape=SHAPE,
        decode=lambda ids: str(ids[0]),
        sampling=Sampling(0.7, 4),
        seed=5,
        final_answers={"right": lambda text: text[0]},
    )


def test_every_figure_with_its_interval_and_the_versions() -> None:
    engine = FakeEngine()
    made = evaluator(engine)
    out = made.run()
    # sampled: 0 1 of 0..3, 10 of 10..13, 20 22 of 20 22 23 (21 was excluded); greedy: 0, 10 and 20
    assert out["eval/right"] == pytest.approx((2 / 4 + 1 / 4 + 2 / 3) / 3)
    assert out["eval/greedy_right"] == 1.0
    assert out["eval/right/pass_at_1"] == pytest.approx(out["eval/right"])
    assert out["eval/right/pass_at_2"] == pytest.approx(((1 - 1 / 6) + (1 - 3 / 6) + 1) / 3)
    assert out["eval/right/pass_at_4"] == 1.0  # over the two prompts with four scored answers
    # The first digit is the answer: 0, 1, 2, 3 in the first prompt, all the same in the others, half of them judged right.
    assert out["eval/right/maj_at_4"] == pytest.approx((0.5 + 1 / 4) / 2)
    assert out["eval/right/maj_at_2"] == pytest.approx((0.5 + 1 / 4 + 2 / 3) / 3)
    assert "eval/right/maj_at_1" not in out
    assert (out["eval/version_first"], out["eval/version_last"]) == (3, 3)
    for name in [name for name in out if "ci_low" in name]:
        base = name.removesuffix("/ci_low")
        assert out[name] <= out[base] <= out[f"{base}/ci_high"]
    assert all(request.id < 0 for request in engine.requests)
    assert len({request.id for request in engine.requests}) == 6
    assert [r.sampling.greedy for r in engine.requests] == [False] * 3 + [True] * 3
    assert made.ledger.report()["apart"]["evaluation"]["flops"] > 0
    assert made.ledger.total() == 0  # of no role
    single = evaluator(FakeEngine(), samples=1).run()
    assert not any("pass" in name or "maj" in name for name in single) and "eval/right/ci_high" in single


def test_another_target_asks_for_other_answers_or_takes_the_first_one_s_exclusions() -> None:
    def short(completions: list[str], **rest: Any) -> list[float]:
        return [float(len(text) == 1) for text in completions]

    engine = FakeEngine()
    out = evaluator(engine, more=[Reward("short", short, in_process=True)]).run()
    alone = evaluator(FakeEngine()).run()
    assert {name: out[name] for name in alone} == alone
    assert len(engine.requests) == 6 and out["eval/short"] == out["eval/greedy_short"] == pytest.approx(1 / 3)
    assert out["eval/short/pass_at_4"] == pytest.approx(1 / 3)  # over all three, with the answer that "right" excluded
    assert "eval/short/maj_at_4" not in out
    keys = {"prompts": 3, "scorer": ["exact_match", "math_answer"], "arguments": {"x": 1}}
    with pytest.raises(UserError, match=r"evaluation\.arguments belongs to a single evaluation\.scorer"):
        validate_config({"evaluation": keys})


def test_an_evaluation_that_a_refit_crossed_says_so() -> None:
    out = evaluator(FakeEngine(refit_after=7)).run()
    assert (out["eval/version_first"], out["eval/version_last"]) == (3, 4)


def test_partial_credit_counts_in_the_mean_and_passes_only_by_its_score() -> None:
    def half(completions: list[str], **rest: Any) -> list[float]:
        return [0.5] * len(completions)

    assert evaluator(FakeEngine(), scorer=half).run()["eval/right/pass_at_4"] == 0.0
    assert evaluator(FakeEngine(), scorer=half, pass_score=0.5).run()["eval/right/pass_at_4"] == 1.0


def test_an_evaluation_beside_training_is_waited_for_by_the_next_one() -> None:
    engine, rows = FakeEngine(), []
    evaluations = Evaluations(
        evaluator(engine), lambda done, total: None, lambda step, out, beside: rows.append((step, out))
    )
    engine.release.clear()
    evaluations.beside(10)
    assert rows == []  # and here the next update would begin
    threading.Timer(0.2, engine.release.set).start()
    evaluations.now(20)
    assert [step for step, _ in rows] == [10, 20] and rows[0][1]["eval/right"] == rows[1][1]["eval/right"]


def test_a_scorer_that_fails_beside_training_is_told_at_the_next_evaluation() -> None:
    def broken(completions: list[str], **rest: Any) -> list[float]:
        raise KeyError("own words")

    evaluations = Evaluations(evaluator(FakeEngine(), scorer=broken), lambda *n: None, lambda *row: None)
    evaluations.beside(10)
    with pytest.raises(RewardError, match=r"(?s)The evaluation's scorer: Reward 'right' failed .*own words"):
        evaluations.wait()
    evaluations.wait()


def test_an_evaluation_with_rows_of_its_own_makes_no_task_of_the_run_s() -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(find_model("demo").path)
    config = validate_config({"evaluation": {"prompts": 2, "data": "x"}, "task": {"held_out": 1}})
    rows = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(3)]
    made: list[int] = []

    def task() -> Task:
        made.append(1)
        return Task(Rows(rows, "rows"), config, tokenizer, 20)

    own = evaluation_prompts(config, Rows(rows[1:], "own"), task, tokenizer, 20)
    assert {prompt.text for prompt in own} == {"1+1=", "2+1="} and not made
    config = config.model_copy(update={"evaluation": EvaluationConfig(prompts=1)})
    assert len(evaluation_prompts(config, None, task, tokenizer, 20)) == 1 and made


def test_synchronous_runs_stop_for_evaluation_since_they_repeat() -> None:
    assert validate_config({}).overlaps_evaluation
    assert not validate_config({"buffer": {"max_staleness": 0}}).overlaps_evaluation
    assert not validate_config({"buffer": {"in_flight": "finish"}}).overlaps_evaluation
    assert validate_config({"buffer": {"max_staleness": 0}, "evaluation": {"overlap": True}}).overlaps_evaluation


def test_built_in_scorers_say_what_the_answer_is() -> None:
    found = final_answer_of("math_answer")
    assert found is not None and found(r"so \boxed{\frac{1}{2}}") == found("#### 1/2") and found("no idea") is None
    assert final_answer_of("exact_match") is not None and final_answer_of("mine.py:f") is None
    found = final_answer_of("reasoning_gym")
    assert found is not None and found("<answer>1</answer> <answer> 2 </answer>") == "2" and found("3") is None
