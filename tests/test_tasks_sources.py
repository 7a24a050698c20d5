"""Mixtures, streams, curricula, length limits, presets, chat templates, reasoning-gym."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from test_tasks import TEMPLATE, USER, configure, task, tokenizer

from trtl_rl.config import RunConfig, load_config, validate_config
from trtl_rl.errors import UserError
from trtl_rl.rewards.loading import load_rewards
from trtl_rl.rewards.math_answer import math_answer
from trtl_rl.tasks.mixture import MixedRows
from trtl_rl.tasks.presets import apply_preset
from trtl_rl.tasks.rows import Rows, given_rows, open_evaluation_rows, open_rows
from trtl_rl.tasks.stream import StreamRows
from trtl_rl.tasks.stream_task import StreamTask, make_task
from trtl_rl.tasks.task import Task


def lines(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def numbered(count: int, name: str = "q") -> list[dict[str, Any]]:
    return [{"prompt": f"{name}{i}", "answer": str(i)} for i in range(count)]


# --- columns ---


def test_columns_get_the_names_that_rewards_expect() -> None:
    config = configure(task={"columns": {"answer": "solution", "prompt": "question"}})
    rows = given_rows([{"question": "1+1", "solution": "2", "answer": "no"}], config)
    assert rows.columns == ["question", "solution", "answer", "prompt"]
    assert rows[0] == {"question": "1+1", "solution": "2", "answer": "2", "prompt": "1+1"}
    with pytest.raises(UserError, match=r"no column 'solutions' \(task.columns\)\. Did you mean 'solution'"):
        given_rows([{"prompt": "a", "solution": "2"}], configure(task={"columns": {"answer": "solutions"}}))


# --- limits and curriculum ---


def test_length_limits_leave_rows_out_and_count_them() -> None:
    prompts = ["abcdefgh", "a", "abc", "abcd", "ab", "abcdefghijkl"]
    made = task(prompts, min_prompt_tokens=3, max_prompt_tokens=5, held_out=1)
    assert made.skipped == 3 and made.longest == 5
    assert made.notes == [
        "1 of 6 rows are left out: their prompts have fewer than task.min_prompt_tokens=3 tokens.",
        "2 of 6 rows are left out: their prompts have more than task.max_prompt_tokens=5 tokens.",
    ]
    drawn = {made.order(0).at(i)[0] for i in range(4)} | {made.held_out_prompts(1)[0].id}
    assert drawn == {2, 3, 4}
    with pytest.raises(UserError, match=r"0 have prompts .* nothing to train on"):
        task(prompts, min_prompt_tokens=50)
    with pytest.raises(UserError, match=r"Row 5 .* 13 tokens, but at most 10 fit"):
        task(prompts, limit=10, min_prompt_tokens=3)
    with pytest.raises(UserError, match="min_prompt_tokens=5 is more than"):
        configure(task={"min_prompt_tokens": 5, "max_prompt_tokens": 4})


def test_a_curriculum_goes_from_easy_to_hard_in_every_epoch(tmp_path: Path) -> None:
    prompts = ["aaa", "a", "aa", "aaa", "aa", "a"]
    (tmp_path / "hard.py").write_text("def length(row):\n    return len(row['prompt'])\n")
    made = task(prompts, curriculum=f"{tmp_path}/hard.py:length")
    order = made.order(3)
    epochs = [[order.at(6 * epoch + i)[0] for i in range(6)] for epoch in range(4)]
    assert all([len(prompts[id]) for id in epoch] == [1, 1, 2, 2, 3, 3] for epoch in epochs)
    assert all(sorted(epoch) == list(range(6)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1  # shuffled among equals
    by_column = task(prompts, curriculum="answer").order(0)
    assert [by_column.at(i)[0] for i in range(6)] == list(range(6))
    with pytest.raises(UserError, match=r"is no column of fake rows\. Did you mean 'answer'"):
        task(prompts, curriculum="anser")
    with pytest.raises(UserError, match=r"Row 0 .*curriculum=prompt gives 'aaa', not a finite number"):
        task(prompts, curriculum="prompt")
    with pytest.raises(UserError, match=r"task.curriculum: there is no file"):
        task(prompts, curriculum=f"{tmp_path}/easy.py:length")


# --- mixtures ---


def mixture(tmp_path: Path, **keys: Any) -> RunConfig:
    parts = [
        {"data": lines(tmp_path / "a.jsonl", numbered(10)), "weight": 3.0},
        {
            "data": lines(tmp_path / "b.jsonl", [{"text": f"t{i}", "level": i} for i in range(4)]),
            "prompt_column": "text",
            "columns": {"answer": "level"},
        },
    ]
    return validate_config({"task": {"mixture": parts, **keys}})


def test_a_mixture_draws_by_weight_and_resumes_from_an_index_alone(tmp_path: Path) -> None:
    config = mixture(tmp_path)
    rows = open_rows(config)
    assert rows.columns == ["prompt", "answer", "text", "level", "source"]
    assert rows[11] == {"prompt": "t1", "text": "t1", "level": 1, "answer": 1, "source": f"{tmp_path}/b.jsonl"}
    made = Task(rows, config, tokenizer(), 100)
    order = made.order(5)
    draws = [order.at(i) for i in range(10_000)]
    share = sum(id < 10 for id, _ in draws) / len(draws)
    assert share == pytest.approx(0.75, abs=0.02)  # 4.6 standard deviations
    again = Task(open_rows(config), config, tokenizer(), 100).order(5)
    assert [again.at(i) for i in (9_999, 0, 4_096, 4_095)] == [draws[i] for i in (9_999, 0, 4_096, 4_095)]
    second = [draw for draw in draws if draw[0] >= 10]
    for epoch in range(3):  # each part goes through epochs of its own
        assert sorted(id for id, seen in second if seen == epoch) == [10, 11, 12, 13]
    assert Counter(draws).most_common(1)[0][1] == 1
    assert draws[:50] != [made.order(6).at(i) for i in range(50)]


def test_what_a_mixture_cannot_be_is_refused(tmp_path: Path) -> None:
    config = mixture(tmp_path)
    with pytest.raises(UserError, match=r"task\.mixture names the data of the run, and so does data=x\.jsonl"):
        open_rows(validate_config({**config.model_dump(exclude_unset=True), "data": "x.jsonl"}))
    with pytest.raises(UserError, match="give each part its own"):
        open_rows(mixture(tmp_path, columns={"a": "b"}))
    assert isinstance(open_rows(config), MixedRows)
    lines(tmp_path / "b.jsonl", [{"text": "x", "level": 1, "source": "y"}])
    with pytest.raises(UserError, match="has a column 'source'"):
        open_rows(config)
    with pytest.raises(UserError, match=r"task\.curriculum needs all rows|task\.mixture needs all rows"):
        mixture(tmp_path, streaming=True)


# --- streams ---


def stream(tmp_path: Path, count: int = 20, **keys: Any) -> StreamTask:
    config = configure(data=lines(tmp_path / "a.jsonl", numbered(count)), task={"streaming": True, **keys})
    made = make_task(open_rows(config), config, tokenizer(), 100)
    assert isinstance(made, StreamTask)
    return made


def test_a_stream_draws_every_row_once_in_an_epoch_and_repeats(tmp_path: Path) -> None:
    made = stream(tmp_path, shuffle_buffer=7, held_out=3)
    order = made.order(1)
    draws = []
    for i in range(51):
        id, epoch = order.at(i)
        assert made.prompt(id, epoch).text == f"<s>q{id}"  # the prompt of a draw is there
        draws.append((id, epoch))
    epochs = [[id for id, seen in draws if seen == epoch] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(3, 20)) for epoch in epochs)
    assert epochs[0] != sorted(epochs[0]) and epochs[0] != epochs[1]
    assert [prompt.text for prompt in made.held_out_prompts(2)] == ["<s>q0", "<s>q1"]
    resumed = stream(tmp_path, shuffle_buffer=7, held_out=3).order(1)
    assert [resumed.at(i) for i in (40, 20, 5, 50)] == [draws[i] for i in (40, 20, 5, 50)]
    plain = stream(tmp_path, shuffle=False).order(1)
    assert [plain.at(i) for i in range(22)] == [*((i, 0) for i in range(20)), (0, 1), (1, 1)]


def test_a_stream_forgets_old_draws_and_reads_them_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trtl_rl.tasks.stream._KEPT", 4)
    order = stream(tmp_path, shuffle_buffer=7).order(1)
    draws = [order.at(i) for i in range(50)]
    assert [order.at(i) for i in (3, 45, 21)] == [draws[i] for i in (3, 45, 21)]


def test_a_stream_applies_limits_as_it_is_drawn(tmp_path: Path) -> None:
    made = stream(tmp_path, shuffle=False, max_prompt_tokens=3)  # <s>q9 has three tokens, <s>q10 four
    order = made.order(0)
    assert [order.at(i)[0] for i in range(12)] == [*range(10), 0, 1]
    assert made.metrics() == {"task/left_out_rows": 10}
    with pytest.raises(UserError, match="no row is left to train on"):
        stream(tmp_path, max_prompt_tokens=1).order(0).at(0)


def test_formats_and_objects_are_streamed_and_what_cannot_be_is_refused(tmp_path: Path) -> None:
    import datasets

    saved = datasets.Dataset.from_list(numbered(5))
    saved.to_parquet(str(tmp_path / "train.parquet"))
    for place in (tmp_path / "train.parquet", tmp_path):
        rows = open_rows(configure(data=str(place), task={"streaming": True, "columns": {"gold": "answer"}}))
        assert isinstance(rows, StreamRows) and rows.columns == ["prompt", "answer", "gold"]
    given = given_rows(saved.to_iterable_dataset(), configure())
    assert isinstance(given, StreamRows) and given.fingerprint == given.fingerprint
    with pytest.raises(UserError, match="has no column 'prompt' for the prompts"):
        given_rows(saved.rename_column("prompt", "q").to_iterable_dataset(), configure())
    with pytest.raises(UserError, match="made in memory and cannot be streamed"):
        open_rows(validate_config({"task": {"streaming": True}}))
    with pytest.raises(UserError, match=r"holds none of test\.jsonl"):
        open_rows(configure(data=str(tmp_path), task={"streaming": True, "split": "test"}))
    with pytest.raises(UserError, match=r"task\.shuffle_buffer belongs to task\.streaming=true"):
        configure(task={"shuffle_buffer": 3})


# --- chat ---


def test_a_template_that_does_not_preserve_prefixes_is_named_at_the_start() -> None:
    assert task(["a"], TEMPLATE).notes == []
    hides = (
        "{% for m in messages %}{% if m['role'] == 'user' or loop.last %}[{{ m['content'] }}]{% endif %}{% endfor %}"
    )
    assert "renders an earlier answer otherwise" in task(["a"], hides).notes[0]
    counts = "{{ messages | length }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    assert "does not preserve prefixes: a prompt with its answer" in task(["a"], counts).notes[0]


def test_messages_reach_rewards_as_they_are_and_text_stays_text() -> None:
    assert task([[USER]], TEMPLATE).prompt(0, 0).messages == [USER]
    assert task(["x"], TEMPLATE).prompt(0, 0).messages is None


# --- presets and reasoning-gym ---


def test_presets_bring_data_prompt_answer_and_reward() -> None:
    made = apply_preset(validate_config({"task": {"preset": "math"}}))
    assert made.data == "DigitalLearningGmbH/MATH-lighteval"
    assert (made.task.prompt_column, made.task.columns) == ("problem", {"answer": "solution"})
    assert apply_preset(made) == made and [reward.name for reward in made.rewards] == ["math_answer"]
    own = apply_preset(validate_config({"task": {"preset": "gsm8k"}, "data": "mine.jsonl"}))
    assert own.data == "mine.jsonl"
    assert apply_preset(validate_config({"task": {"preset": "gsm8k"}})).data == "openai/gsm8k:main"
    rows = given_rows([{"problem": "Half of 1?", "solution": r"It is $\frac12$, so \boxed{\frac{1}{2}}."}], made)
    gold = [rows[0]["answer"]] * 3
    assert math_answer([r"\boxed{0.5}", r"\boxed{\frac{1}{3}}", r"$\frac{2}{4}$"], gold) == [1.0, 0.0, 1.0]


def test_reasoning_gym_is_a_preset_by_its_name() -> None:
    made = apply_preset(validate_config({"data": "reasoning-gym/chain_sum"}))
    assert (made.task.preset, made.task.prompt_column) == ("reasoning-gym/chain_sum", "question")
    assert (made.rewards[0].name, made.evaluation.scorer) == ("reasoning_gym", "reasoning_gym")
    assert apply_preset(validate_config({"task": {"preset": "reasoning-gym/chain_sum"}})).data == made.data
    with pytest.raises(UserError, match=r"task\.arguments are parameters of a reasoning-gym task"):
        open_rows(validate_config({"task": {"arguments": {"size": 3}}}))


@pytest.mark.slow
def test_reasoning_gym_by_name_and_parameters() -> None:
    pytest.importorskip("reasoning_gym")
    keys = {"size": 5, "min_terms": 2, "max_terms": 2}
    config = apply_preset(validate_config({"data": "reasoning-gym/chain_sum", "task": {"arguments": keys}}))
    rows = open_rows(config)
    assert len(rows) == 5 and rows.columns == ["question", "answer", "metadata"]
    assert all(row["metadata"]["num_terms"] == 2 for row in rows)
    assert open_rows(config).fingerprint == rows.fingerprint  # from the run's seed
    assert open_rows(config.model_copy(update={"seed": 1})).fingerprint != rows.fingerprint
    load_rewards(config.rewards)
    with pytest.raises(UserError, match=r"no task 'chain_sums'\. Did you mean 'chain_sum'"):
        open_rows(validate_config({"data": "reasoning-gym/chain_sums"}))
    with pytest.raises(UserError, match=r"refuses task\.arguments=.*It takes: .*min_terms"):
        open_rows(validate_config({"data": "reasoning-gym/chain_sum", "task": {"arguments": {"terms": 1}}}))
    with pytest.raises(UserError, match=r"refuses task\.arguments"):
        open_rows(validate_config({"data": "reasoning-gym/chain_sum", "task": {"arguments": {"min_terms": -1}}}))


# --- data of evaluation ---


def test_evaluation_has_rows_of_its_own(tmp_path: Path) -> None:
    lines(tmp_path / "train.jsonl", numbered(4))
    lines(tmp_path / "test.jsonl", numbered(30, "e"))
    config = configure(data=str(tmp_path), evaluation={"prompts": 10, "split": "test"})
    assert len(open_rows(config)) == 4  # nothing has to be held out
    rows = open_evaluation_rows(config)
    prompts = Task(rows, config, tokenizer(), 100).fixed_prompts(10)
    assert len({prompt.id for prompt in prompts}) == 10 and all(prompt.text.startswith("<s>e") for prompt in prompts)
    assert [p.id for p in Task(rows, config, tokenizer(), 100).fixed_prompts(3)] == [p.id for p in prompts[:3]]
    with pytest.raises(UserError, match=r"evaluation\.prompts=31, but .* has 30 rows"):
        open_evaluation_rows(configure(data=str(tmp_path), evaluation={"prompts": 31, "split": "test"}))
    assert isinstance(rows, Rows)
    with pytest.raises(
        UserError, match="is one file, which has no splits"
    ):  # it would be evaluated on what it trains on
        open_evaluation_rows(configure(data=f"{tmp_path}/train.jsonl", evaluation={"prompts": 1, "split": "test"}))


@pytest.mark.parametrize("file", sorted((Path(__file__).parents[1] / "examples").glob("*.yaml")), ids=lambda f: f.stem)
def test_every_example_is_a_valid_configuration(file: Path) -> None:
    config = apply_preset(load_config(file))
    if any(reward.name == "reasoning_gym" for reward in config.rewards):
        pytest.importorskip("reasoning_gym")
    assert load_rewards(config.rewards)
    assert apply_preset(config) == config
