from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trtl_rl.config_data import RewardConfig
from trtl_rl.errors import RewardError, UserError
from trtl_rl.rewards.builtin import FormatMatch, LengthPenalty, exact_match
from trtl_rl.rewards.loading import check_columns, load_rewards
from trtl_rl.rewards.math_answer import math_answer
from trtl_rl.rewards.reward import Reward, Sample, ScoredBatch
from trtl_rl.rewards.runner import RewardRunner
from trtl_rl.rollout import Prompt

GOLD = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\n#### 1,072"


def prompts(count: int, **columns: Any) -> list[Prompt]:
    return [Prompt(id=10 + i, occurrence=0, ids=[1], text=f"question {i}", columns=dict(columns)) for i in range(count)]


def samples(prompts: list[Prompt], texts: list[str], ids: list[list[int]]) -> list[Sample]:
    return [Sample((0, i), *item) for i, item in enumerate(zip(prompts, texts, ids, strict=True))]


def run(rewards: list[Reward], prompts: list[Prompt], texts: list[str], ids: list[list[int]]) -> ScoredBatch:
    """One call, in this process."""
    runner = RewardRunner([dataclasses.replace(reward, in_process=True) for reward in rewards])
    try:
        return runner.submit(samples(prompts, texts, ids)).result(30)
    finally:
        runner.close()


def score(function: Callable[..., Any], count: int = 3, **columns: Any) -> list[float | None]:
    rewards = [Reward("fake", function)]
    batch = run(rewards, prompts(count, **columns), [f"text {i}" for i in range(count)], [[i] for i in range(count)])
    assert batch.total == batch.components["fake"]
    return batch.total


def judge(text: str, gold: Any = GOLD) -> float | None:
    return math_answer(completions=[text], answer=[gold])[0]


def test_exact_match_ignores_only_outer_white_space() -> None:
    assert exact_match(completions=[" 7 8\n", "78", "78"], answer=["7 8", 78, None]) == [1.0, 1.0, None]
    assert exact_match(completions=["7 8"], answer=["78"]) == [0.0]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("48 + 1024 = 1072\n#### 1072", 1.0),
        ("#### 1,072", 1.0),
        ("#### $1072.00", 1.0),
        ("#### 1072 clips", 1.0),
        ("#### 5\nWait.\n#### 1072", 1.0),  # the last mark counts
        ("#### 1072\nProblem: 3 boxes hold 4 pens.", 1.0),  # only its line
        ("1072\n#### 5", 0.0),  # not the number before the mark
        ("1072 ####", 0.0),  # nothing after the mark
        ("#### " + "1 + " * 60 + "1012", 0.0),  # too long
        ("It is \\boxed{1072}, not 9.", 1.0),
        ("First 3, so the answer is 1072.", 1.0),
        ("First 1072, so the answer is 3.", 0.0),
        ("I do not know.", 0.0),
        ("", 0.0),
    ],
)
def test_math_answer_judges_the_final_answer_and_not_another_number(text: str, value: float) -> None:
    assert judge(text) == value


def test_math_answer_reads_latex_gold_without_delimiters() -> None:
    assert judge("so \\boxed{0.5}", "\\frac{1}{2}") == 1.0
    assert judge("so \\boxed{0.25}", "\\frac{1}{2}") == 0.0


@pytest.mark.parametrize("gold", [None, "", "####"])
def test_math_answer_excludes_a_sample_without_gold(gold: str | None) -> None:
    assert judge("#### 1072", gold) is None


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "answer",
    [
        "9^9^9^9",
        "$9^{9^{9^{9}}}$",
        "$((9^{999})^{999})^{999}$",
        "$99999999!$",
        "$\\sum_{n=1}^{100000000} n^{-2}$",
        "$(x+1)^{99999}$",
    ],
)
def test_math_answer_does_not_hang_on_an_answer_that_is_a_calculation(answer: str) -> None:
    assert judge(f"#### {answer}") == 0.0
    assert judge(f"It is {answer}") == 0.0


def test_math_answer_works_outside_the_main_thread() -> None:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(score(math_answer, 2, answer="#### 1")))
    thread.start()
    thread.join()
    assert found == [[0.0, 1.0]]  # the texts are "text 0" and "text 1"


def test_format_match_searches_and_refuses_a_broken_pattern() -> None:
    assert FormatMatch(r"####\s*\d+$")(completions=["x\n#### 12", "#### 12 pens"]) == [1.0, 0.0]
    with pytest.raises(UserError, match=r"'\('.*no regular expression"):
        FormatMatch("(")


def test_length_penalty_follows_the_published_formula_at_its_corners() -> None:
    lengths = [0, 6, 7, 8, 10, 11, 50]
    values = LengthPenalty(max_tokens=10, buffer_tokens=4)(completion_ids=[[0] * n for n in lengths])
    assert values == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0, -1.0]
    with pytest.raises(UserError, match="buffer_tokens <= max_tokens"):
        LengthPenalty(max_tokens=10, buffer_tokens=11)


def test_a_mistyped_built_in_names_the_nearest() -> None:
    with pytest.raises(UserError, match="Did you mean 'math_answer'"):
        load_rewards([RewardConfig(name="math_anser")])
    with pytest.raises(UserError, match="rewards is empty"):
        load_rewards([])


def test_arguments_that_do_not_fit_are_refused_before_the_run() -> None:
    with pytest.raises(UserError, match="missing a required argument: 'pattern'"):
        load_rewards([RewardConfig(name="format_match")])
    with pytest.raises(UserError, match=r"max_tokens, buffer_tokens"):
        load_rewards([RewardConfig(name="length_penalty", arguments={"max": 3, "buffer": 1})])
    with pytest.raises(UserError, match="no argument 'tolerance'"):
        load_rewards([RewardConfig(name="exact_match", arguments={"tolerance": 1})])


def test_a_function_is_loaded_from_a_file_and_from_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "neighbour_of_rewards.py").write_text("SCALE = 2.0\n")
    (tmp_path / "my_rewards.py").write_text(
        "from neighbour_of_rewards import SCALE\n"
        "def length(completions, bonus=0.0, **columns):\n"
        "    return [SCALE * len(text) + bonus for text in completions]\n"
    )
    monkeypatch.chdir(tmp_path)
    configs = [
        RewardConfig(name=f"{tmp_path}/my_rewards.py:length", weight=0.5, arguments={"bonus": 3.0}),
        RewardConfig(name="my_rewards:length", arguments={"bonus": 1.0}),
    ]
    rewards = load_rewards(configs)
    assert [reward.name for reward in rewards] == ["length", "length_2"]
    batch = run(rewards, prompts(1, bonus=99.0), ["abc"], [[1]])
    assert batch.components == {"length": [9.0], "length_2": [7.0]}  # an argument wins over a column
    assert batch.total == [0.5 * 9.0 + 7.0]


def test_a_function_that_cannot_be_loaded_is_named_with_the_reason(tmp_path: Path) -> None:
    file = tmp_path / "rewards.py"
    file.write_text("def correct(completions):\n    return []\nanswer = 3\n")
    broken = tmp_path / "broken.py"
    broken.write_text("x = 1\ny = undefined\n")
    for name, message in {
        f"{tmp_path}/reward.py:correct": r"no file .*reward\.py.*Did you mean 'rewards\.py'",
        f"{file}:corect": "Did you mean 'correct'",
        f"{file}:answer": "is int, not a function",
        f"{broken}:f": r"NameError: name 'undefined'.*broken\.py, line 2",
        "no_such_package.rewards:f": "No module named 'no_such_package'",
    }.items():
        with pytest.raises(UserError, match=message):
            load_rewards([RewardConfig(name=name)])


def test_a_missing_column_is_found_before_a_model_is_loaded() -> None:
    def correct(completions: list[str], solution: list[str], limit: int = 3, **columns: Any) -> list[float]:
        raise AssertionError("not called")

    rewards = [Reward("correct", correct)]
    check_columns(rewards, ["prompt", "solution"])
    with pytest.raises(UserError, match=r"'correct' needs the column 'solution'.*mean 'solutions'.*prompt, solutions"):
        check_columns(rewards, ["prompt", "solutions"])
    with pytest.raises(UserError, match="'completions' has a name"):
        check_columns(rewards, ["solution", "completions"])
    with pytest.raises(UserError, match="'exact_match' needs the column 'answer'"):
        check_columns(load_rewards([RewardConfig(name="exact_match")]), ["question"])


def test_a_function_without_catch_all_gets_only_what_it_names() -> None:
    def picky(completions: list[str], answer: list[str]) -> list[float]:
        return [float(len(answer))] * len(completions)

    assert score(picky, 3, answer="a", other="b") == [3.0, 3.0, 3.0]


def test_every_column_and_the_ids_reach_a_function() -> None:
    seen: dict[str, Any] = {}

    def keep(**columns: Any) -> list[float]:
        seen.update(columns)
        return [0.0, 0.0]

    score(keep, 2, answer="a", level=4)
    assert seen == {
        "prompts": ["question 0", "question 1"],
        "completions": ["text 0", "text 1"],
        "completion_ids": [[0], [1]],
        "answer": ["a", "a"],
        "level": [4, 4],
    }


def test_a_function_that_empties_its_lists_does_not_starve_the_next() -> None:
    def greedy(completions: list[str], completion_ids: list[list[int]], **columns: Any) -> list[float]:
        completions.clear()
        completion_ids[0].append(5)
        return [0.0, 0.0]

    def count(completions: list[str], completion_ids: list[list[int]], **columns: Any) -> list[float]:
        return [float(len(completions)), float(len(completion_ids[0]))]

    ids = [[1], [2]]
    batch = run([Reward("greedy", greedy), Reward("count", count)], prompts(2), ["a", "b"], ids)
    assert batch.components["count"] == [2.0, 1.0]
    assert ids == [[1], [2]]


def test_numbers_of_all_kinds_become_floats() -> None:
    assert score(lambda **c: [True, 2, np.float32(0.5)]) == [1.0, 2.0, 0.5]
    assert score(lambda **c: np.array([1, 0, 2])) == [1.0, 0.0, 2.0]
    assert all(type(value) is float for value in score(lambda **c: (np.int64(1), np.bool_(True), 0)))


def test_none_from_any_function_excludes_the_sample() -> None:
    rewards = [Reward("a", lambda **c: [1.0, None, 3.0], weight=2.0), Reward("b", lambda **c: [None, 1.0, -1.0])]
    batch = run(rewards, prompts(3), ["", "", ""], [[], [], []])
    assert batch.total == [None, None, 5.0]
    assert batch.components == {"a": [1.0, None, 3.0], "b": [None, 1.0, -1.0]}


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ([1.0, 2.0], r"returned a list of 2 on prompt 10 \(samples 0 to 2\): there are 3"),
        ([1.0, 2.0, 3.0, 4.0], "returned a list of 4 .* there are 3 completions"),
        (1.0, "returned float .* not a list of 3"),
        (None, "returned NoneType .* not a list of 3"),
        ("100", "returned str .* not a list"),
        ({0: 1.0, 1: 1.0, 2: 1.0}, "returned dict .* not a list"),
        ([0.0, float("nan"), 0.0], r"returned nan for sample 1 \(prompt 11\)"),
        ([0.0, 0.0, float("-inf")], r"returned -inf for sample 2 \(prompt 12\)"),
        ([10**400, 0.0, 0.0], r"returned 1000.* for sample 0 \(prompt 10\): rewards must be finite"),
        ([0.0, "1", 0.0], r"returned str for sample 1 \(prompt 11\)"),
        ([0.0, [1.0], 0.0], r"returned list for sample 1"),
    ],
)
def test_a_result_of_the_wrong_shape_is_refused_with_function_and_sample(result: Any, message: str) -> None:
    with pytest.raises(RewardError, match="Reward 'fake' " + message):
        score(lambda **c: result)


def test_an_exception_names_the_function_the_prompt_and_the_line() -> None:
    def broken(**columns: Any) -> list[float]:
        return [1 / 0]

    with pytest.raises(RewardError, match=r"(?s)'fake' failed.*prompt 10.*return \[1 / 0\].*ZeroDivisionError"):
        score(broken)

    async def broken_later(**columns: Any) -> list[float]:
        return [1 / 0]

    with pytest.raises(RewardError, match=r"(?s)'fake' failed.*prompt 10.*ZeroDivisionError"):
        score(broken_later)


def test_async_functions_wait_together_on_one_living_loop() -> None:
    loops: set[int] = set()

    async def slow(completions: list[str], **columns: Any) -> list[float]:
        loops.add(id(asyncio.get_running_loop()))
        await asyncio.sleep(0.2)
        return [1.0] * len(completions)

    runner = RewardRunner([Reward(f"slow_{i}", slow, in_process=True) for i in range(4)])
    start = time.monotonic()
    assert runner.score(samples(prompts(2), ["a", "b"], [[1], [2]])).total == [4.0, 4.0]
    assert time.monotonic() - start < 0.6  # one after another they take 0.8 s

    async def from_a_running_loop() -> list[float | None]:
        return runner.score(samples(prompts(1), ["a"], [[1]])).total

    assert asyncio.run(from_a_running_loop()) == [4.0]
    assert len(loops) == 1
    runner.close()
    runner.close()
