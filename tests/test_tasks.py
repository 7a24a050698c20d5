from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trtl_rl.config import RunConfig, load_config, validate_config
from trtl_rl.errors import UserError
from trtl_rl.rewards.loading import check_columns, load_rewards
from trtl_rl.rewards.reward import Sample
from trtl_rl.rewards.runner import RewardRunner
from trtl_rl.tasks.presets import apply_preset
from trtl_rl.tasks.rows import Rows, check_rows, open_rows
from trtl_rl.tasks.task import Task

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SYSTEM_FREE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
USER = {"role": "user", "content": "x"}
ANSWERED = [USER, {"role": "assistant", "content": "y"}]
SYSTEM = {"role": "system", "content": "s"}


def tokenizer(chat_template: str | None = None) -> Any:
    """One token per character, and <s> before plain text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<s>": 0, "<user>": 1, "<assistant>": 2, "<system>": 3} | {chr(c): c for c in range(32, 127)}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    inner.add_special_tokens(["<s>", "<user>", "<assistant>", "<system>"])
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", chat_template=chat_template)


def configure(**keys: Any) -> RunConfig:
    return validate_config({"data": "fake", **keys})


def task(prompts: list[Any], chat_template: str | None = None, limit: int = 100, seed: int = 0, **keys: Any) -> Task:
    rows = Rows([{"prompt": prompt, "answer": i} for i, prompt in enumerate(prompts)], "fake rows")
    return Task(rows, configure(task=keys, seed=seed), tokenizer(chat_template), limit)


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, str], str]:
    def write(name: str, text: str) -> str:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


def opened(data: str, **keys: Any) -> Rows:
    return open_rows(configure(data=data, **keys))


# --- rows ---


def test_the_same_rows_have_one_fingerprint_in_every_format(write: Callable[[str, str], str], tmp_path: Path) -> None:
    import datasets

    items = [{"prompt": "1+1=", "answer": "2"}, {"prompt": 'a,b\n"c"', "answer": "ü"}]
    saved = datasets.Dataset.from_list(items)
    saved.save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict({"train": saved}).save_to_disk(str(tmp_path / "saved_dict"))
    saved.to_parquet(str(tmp_path / "a.parquet"))
    saved.to_csv(str(tmp_path / "a.csv"))
    lines = "".join(json.dumps(item) + "\n\n" for item in items)
    places = [
        write("a.jsonl", lines),
        write("marked.jsonl", "\ufeff" + lines),
        write("windows.jsonl", lines.replace("\n", "\r\n")),
        write("a.json", json.dumps(items, indent=1)),
        write("lines.json", lines),
        str(tmp_path / "a.parquet"),
        str(tmp_path / "a.csv"),
        str(tmp_path / "saved"),
        str(tmp_path / "saved_dict"),
    ]
    write("folder/train.jsonl", lines)
    for place in [*places, str(tmp_path / "folder")]:
        rows = opened(place)
        assert list(rows) == items, place
        assert rows.fingerprint == Rows(items, "").fingerprint, place
    changed = [items[0], {"prompt": items[1]["prompt"], "answer": "u"}]
    for other in (changed, items[:1], items[::-1], [{**item, "more": None} for item in items]):
        assert Rows(other, "").fingerprint != Rows(items, "").fingerprint


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "a"}\n\n{"prompt": "b"\n', r"bad\.jsonl, line 3: not valid JSON: .*column 15"),
        ('{"prompt": "a"}\n["b"]\n', r"bad\.jsonl, line 2: a list, but a row is a JSON object"),
        ('"prompt"\n', r"line 1: text, but"),
        ("{'prompt': 1}\n", r"line 1: not valid JSON: Expecting property name enclosed in double quotes"),
        ('{"prompt": "a"}{"prompt": "b"}\n', r"line 1: not valid JSON: Extra data"),
        ("\n\n", r"bad\.jsonl holds no rows"),
        ("", r"bad\.jsonl holds no rows"),
    ],
)
def test_malformed_json_lines_are_named_by_file_and_line(
    write: Callable[[str, str], str], text: str, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        opened(write("bad.jsonl", text))


def test_other_malformed_files_are_named_too(write: Callable[[str, str], str], tmp_path: Path) -> None:
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "a"}\n{"prompt": "caf\xe9"}\n')
    for data, message in {
        str(tmp_path / "latin.jsonl"): r"latin\.jsonl, line 2: not UTF-8 text \(byte 16",
        write("bad.json", '[{"prompt": "a"},\n oops]'): r"bad\.json, line 2: not valid JSON",
        write("items.json", '[{"prompt": "a"}, 3]'): r"items\.json, item 2: a number",
        write("bad.csv", "prompt,answer\na,1\nb\n"): r"bad\.csv, line 3: a row needs 2 values",
        write("bad.parquet", "text"): r"bad\.parquet cannot be read as Parquet",
        write("rows.txt", "text"): r"data files end in \.jsonl",
    }.items():
        with pytest.raises(UserError, match=message):
            opened(data)


def test_a_missing_path_is_not_looked_up_on_the_hub(
    write: Callable[[str, str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("train.jsonl", '{"prompt": "a"}\n')
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"There is no data at trian\.jsonl\. Did you mean 'train\.jsonl'"):
        opened("trian.jsonl")
    with pytest.raises(UserError, match=r"There is no data at .*trian\.jsonl\. Did you mean 'train\.jsonl'"):
        opened(str(tmp_path / "trian.jsonl"))
    with pytest.raises(UserError, match="There is no data at"):
        opened(str(tmp_path / "nothing" / "here"))
    with pytest.raises(UserError, match=r"no data set with a split 'test'.*test\.jsonl"):
        opened(str(tmp_path), task={"split": "test"})


def test_a_name_that_the_hub_does_not_know_is_the_users_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked: list[tuple[Any, ...]] = []

    def fake_load_dataset(*names: Any, split: str) -> None:
        asked.append((*names, split))
        raise ConnectionError("no network\nand more")

    monkeypatch.setattr(datasets, "load_dataset", fake_load_dataset)
    with pytest.raises(UserError, match=r"no file or directory openai/gsm8k:main, and the hub.*no network Check"):
        opened("openai/gsm8k:main")
    assert asked == [("openai/gsm8k", "main", "train")]


def test_a_missing_prompt_column_names_those_that_exist(write: Callable[[str, str], str]) -> None:
    data = write("a.jsonl", '{"prompts": "a", "answer": 1}\n')
    with pytest.raises(UserError, match=r"no column 'prompt'.*Did you mean 'prompts'.*It has: prompts, answer"):
        opened(data)
    assert len(opened(data, task={"prompt_column": "prompts"})) == 1


def test_a_column_that_a_row_lacks_is_none_and_not_missing(write: Callable[[str, str], str]) -> None:
    rows = opened(write("a.jsonl", '{"prompt": "a"}\n{"prompt": "b", "level": 3}\n'))
    assert rows.columns == ["prompt", "level"]
    assert rows[0] == {"prompt": "a", "level": None}
    assert rows[-1:] == [{"prompt": "b", "level": 3}]


def test_held_out_rows_that_do_not_fit_are_refused_early() -> None:
    rows = Rows([{"prompt": "a"}] * 3, "fake rows")
    check_rows(rows, configure(task={"held_out": 2}, evaluation={"prompts": 2}))
    with pytest.raises(UserError, match="leaves nothing to train on: fake rows has 3 rows"):
        check_rows(rows, configure(task={"held_out": 3}))
    with pytest.raises(UserError, match=r"Set task\.held_out to at least 2"):
        check_rows(rows, configure(evaluation={"prompts": 2}, task={"held_out": 1}))


# --- presets ---


def test_a_preset_never_overrides_what_the_user_set() -> None:
    plain = apply_preset(configure(task={"preset": "gsm8k"}))
    assert plain.task.prompt_column == "question"
    assert "####" in (plain.task.template or "") and "{prompt}" in (plain.task.template or "")
    assert [reward.name for reward in plain.rewards] == ["math_answer"]
    assert apply_preset(plain) == plain
    own = configure(task={"preset": "gsm8k", "template": None, "prompt_column": "prompt"}, rewards="exact_match")
    assert apply_preset(own).task == own.task
    assert apply_preset(own).rewards == own.rewards
    assert validate_config(plain.model_dump()) == plain  # a resolved configuration reads back as it is


def test_the_gsm8k_example_fits_the_published_files(write: Callable[[str, str], str]) -> None:
    data = write("train.jsonl", '{"question": "How many are 2 and 3?", "answer": "2+3 = <<2+3=5>>5\\n#### 5"}\n')
    example = Path(__file__).parents[1] / "examples" / "gsm8k.yaml"
    config = apply_preset(load_config(example, ["model=fake", f"data={data}"]))
    rows, rewards = open_rows(config), load_rewards(config.rewards)
    check_columns(rewards, rows.columns)
    prompt = Task(rows, config, tokenizer(), 1000).prompt(0, 0)
    assert prompt.text.startswith("<s>How many are 2 and 3?")
    texts = ["2 + 3 = 5\n#### 5", "2 + 3 = 6\n#### 6", "It is 5."]
    runner = RewardRunner(rewards)
    scored = runner.score([Sample((0, i), prompt, text, [i]) for i, text in enumerate(texts)])
    runner.close()
    assert scored.components == {"math_answer": [1.0, 0.0, 1.0], "format_match": [1.0, 1.0, 0.0]}


def test_an_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(UserError, match="Did you mean 'gsm8k'"):
        apply_preset(configure(task={"preset": "gsm8"}))


def test_the_demo_has_prompts_and_answers() -> None:
    config = apply_preset(RunConfig())
    assert (config.task.preset, config.rewards[0].name) == ("demo", "exact_match")
    assert {"prompt", "answer"} <= set(open_rows(config).columns)


# --- prompts ---


def test_plain_text_keeps_the_tokenizers_own_special_tokens() -> None:
    prompt = task(["a{b}"], template="Q: {prompt}? {x}").prompt(0, 3)
    assert prompt.text == "<s>Q: a{b}? {x}"
    assert prompt.ids == [0, *map(ord, "Q: a{b}? {x}")]
    assert (prompt.id, prompt.occurrence, prompt.columns) == (0, 3, {"prompt": "a{b}", "answer": 0})


def test_a_chat_template_is_tokenised_once_without_a_second_start_token() -> None:
    made = task(["ab"], TEMPLATE, system="be kind", template="[{prompt}]").prompt(0, 0)
    assert made.ids == [3, *map(ord, "be kind"), 1, *map(ord, "[ab]"), 2]
    assert made.text == "<system>be kind<user>[ab]<assistant>"
    assert task(["ab"], TEMPLATE, chat=False).prompt(0, 0).text == "<s>ab"
    assert task([[*ANSWERED, USER]], TEMPLATE).prompt(0, 0).text == "<user>x<assistant>y<user>x<assistant>"


def test_a_change_to_a_prompt_does_not_reach_the_next_draw() -> None:
    made = task(["ab"])
    made.prompt(0, 0).ids.append(7)
    made.prompt(0, 0).columns["answer"] = "other"
    assert made.prompt(0, 1).ids == [0, 97, 98]
    assert made.prompt(0, 1).columns["answer"] == 0


def test_a_prompt_longer_than_the_context_names_row_length_and_limit() -> None:
    assert task(["abc", "abcd"], limit=5).longest == 5
    with pytest.raises(
        UserError, match=r"Row 1 \(counted from 0\) of fake rows makes a prompt of 6 tokens, but at most 5 fit"
    ):
        task(["abc", "abcde"], limit=5)


def test_a_large_data_set_is_checked_as_it_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trtl_rl.tasks.task.CHECKED_ROWS", 1)
    made = task(["abc", "abcde"], limit=5)
    assert made.longest is None
    assert made.prompt(0, 0).text == "<s>abc"
    with pytest.raises(UserError, match=r"Row 1 .* 6 tokens"):
        made.prompt(1, 0)


def test_prompts_that_are_too_long_are_counted_and_left_out_only_when_told_so() -> None:
    prompts = ["abcdefg", "ab", "abcdefghij", "abc", "abcd", "a"]
    with pytest.raises(
        UserError, match=r"Row 0 .* 8 tokens, but at most 5 fit.* So do 2 of 6 rows, the longest with 11\."
    ):
        task(prompts, limit=5)
    made = task(prompts, limit=5, too_long="skip", held_out=1)
    assert (made.skipped, made.longest) == (2, 5)
    order = made.order(0)
    drawn = {order.at(i)[0] for i in range(6)}
    assert drawn | {made.held_out_prompts(1)[0].id} == {1, 3, 4, 5} and len(drawn) == 3
    whole = task(prompts, limit=11, too_long="skip", held_out=1)
    assert whole.skipped == 0 and whole.held_out_prompts(1) == task(prompts, limit=11, held_out=1).held_out_prompts(1)
    with pytest.raises(
        UserError, match=r"Of 6 rows of fake rows 0 have prompts of at most 1 tokens, .* nothing to train on"
    ):
        task(prompts, limit=1, too_long="skip")
    with pytest.raises(UserError, match=r"Row 1 .* makes an empty prompt"):
        task(["abc", ""], SYSTEM_FREE, too_long="skip")


def test_all_rows_of_a_large_set_are_measured_before_some_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trtl_rl.tasks.task.CHECKED_ROWS", 2)
    made = task(["ab", "abcdefg", "abc"], limit=5, too_long="skip")
    assert (made.skipped, made.longest) == (1, 4)


@pytest.mark.parametrize(
    ("prompt", "chat_template", "keys", "message"),
    [
        (None, None, {}, r"Row 0 .*'prompt' holds nothing; it must be text"),
        (17, None, {}, "holds int '17'"),
        ([], TEMPLATE, {}, "it must be text, or a list of messages"),
        ([{"role": "user"}], TEMPLATE, {}, "list of messages with role and content"),
        ([USER], None, {}, "holds chat messages, but the chat template is off or missing"),
        (ANSWERED, TEMPLATE, {}, "ends with an assistant's message"),
        ([USER], TEMPLATE, {"template": "{prompt}!"}, "which task.template cannot change"),
        ([SYSTEM, USER], TEMPLATE, {"system": "t"}, "has a system message already"),
        ("a", "{{ raise_exception('no roles') }}", {}, "refuses these messages: no roles"),
        (
            "a",
            "a\n{{ messages }",
            {},
            r"chat template cannot be read: line 2: unexpected '\}'\. Mend it, or task\.chat=false",
        ),
        ("a", None, {"chat": True}, "has no chat template"),
        ("a", None, {"system": "s"}, "task.system needs a chat template"),
        ("a", TEMPLATE, {"system": "s", "chat": False}, "task.system needs a chat template"),
        ("a", None, {"template": "no place"}, r"must contain '\{prompt\}'"),
    ],
)
def test_what_cannot_become_a_prompt_is_refused(
    prompt: Any, chat_template: str | None, keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        task([prompt], chat_template, **keys)


def test_an_empty_prompt_is_refused() -> None:
    plain = tokenizer()
    plain.backend_tokenizer.post_processor = None
    with pytest.raises(UserError, match=r"Row 1 .* makes an empty prompt"):
        Task(Rows([{"prompt": "a"}, {"prompt": ""}], "fake rows"), configure(), plain, 10)


# --- order ---


def test_each_epoch_draws_every_row_once_in_its_own_order() -> None:
    order = task(["a"] * 50).order(seed=3)
    epochs = [[order.at(i) for i in range(start, start + 50)] for start in (0, 50, 100)]
    for number, epoch in enumerate(epochs):
        assert sorted(id for id, _ in epoch) == list(range(50))
        assert {occurrence for _, occurrence in epoch} == {number}
    assert len({tuple(id for id, _ in epoch) for epoch in epochs}) == 3


def test_a_resumed_run_continues_the_order_from_an_index_alone() -> None:
    made = task(["a"] * 20)
    whole = [made.order(seed=1).at(i) for i in range(70)]
    order = task(["a"] * 20).order(seed=1)
    assert [order.at(i) for i in reversed(range(70))] == whole[::-1]
    assert whole != [made.order(seed=2).at(i) for i in range(70)]


def test_the_order_is_the_same_on_every_machine() -> None:
    order = task(["a"] * 8).order(seed=5)
    assert [order.at(i)[0] for i in range(16)] == [3, 6, 2, 4, 5, 7, 0, 1, 2, 0, 6, 1, 5, 7, 4, 3]


def test_without_shuffle_rows_come_as_they_are() -> None:
    order = task(["a"] * 3, shuffle=False).order(seed=1)
    assert [order.at(i) for i in range(5)] == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1)]


def test_held_out_rows_are_never_trained_on_and_depend_on_the_runs_seed() -> None:
    made = task(["a"] * 40, held_out=10)
    held_out = [prompt.id for prompt in made.held_out_prompts(10)]
    order = made.order(seed=9)
    assert sorted(held_out + [order.at(i)[0] for i in range(30)]) == list(range(40))
    assert [prompt.id for prompt in made.held_out_prompts(4)] == held_out[:4]
    assert held_out != list(range(30, 40))
    assert held_out != [prompt.id for prompt in task(["a"] * 40, held_out=10, seed=1).held_out_prompts(10)]
