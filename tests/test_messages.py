"""Wrong input through the command line: exit code 2 and one message that says what to do, before a model is loaded."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers
import yaml
from typer.testing import CliRunner

from trtl_rl.cli.main import app
from trtl_rl.model.source import find_model

ROOT = Path(__file__).resolve().parent.parent

Command = Callable[..., str]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Command]:
    """Runs ``trtl-rl run …``, expects that it is refused before weights are read, and returns the message."""

    def no_model(*arguments: Any, **rest: Any) -> Any:
        raise AssertionError("a model was loaded")

    def call(*arguments: str, code: int = 2) -> str:
        result = CliRunner().invoke(app, ["run", *arguments])
        assert result.exit_code == code, (result.exit_code, result.output, result.exception)
        assert isinstance(result.exception, SystemExit), "no traceback for what a user did wrong"
        text = result.stderr.strip()
        assert re.match(r"trtl-rl: \S", text) and text.count("trtl-rl: ") == 1, text
        assert "Traceback" not in result.output
        return text.removeprefix("trtl-rl: ")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", no_model)
    monkeypatch.chdir(tmp_path)
    yield call
    assert not (tmp_path / "runs").exists(), "a refused run leaves no directory"


@pytest.fixture
def data(tmp_path: Path) -> Callable[[str, str], str]:
    """Writes a data file and returns ``data=PATH``."""

    def write(text: str, name: str = "data.jsonl") -> str:
        (tmp_path / name).write_text(text)
        return f"data={tmp_path / name}"

    return write


def lines(*rows: dict[str, Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


GOOD = {"prompt": "1+1=", "answer": "2"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["stepps=3"], r"the command line: unknown key 'stepps'\. Did you mean 'steps'\?"),
        (["batch.promts=3"], r"unknown key 'batch.promts'\. Did you mean 'prompts'\?"),
        (["steps=0"], r"steps: Input should be greater than or equal to 1 \(got 0\)"),
        (["sampling.temperature=-1", "batch.group_size=1"], r"sampling.temperature: .*; batch.group_size: "),
        (["loss.name=ppo"], r"loss.name: Input should be 'asympo'"),
        (["model=./missing"], r"There is no model './missing': neither a directory nor a hub name"),
        (["model=org/missing"], r"no directory 'org/missing', and the hub does not give a model"),
        (["sampling.max_new_tokens=256"], r"leaves no room for a prompt: model=demo was made for 256 tokens"),
        (
            ["engine.max_context=20", "sampling.max_new_tokens=30"],
            r"no room for a prompt: engine.max_context=20\. Lower",
        ),
        (["engine.max_context=999"], r"engine.max_context=999 is more than model=demo was made for \(256\)"),
        (["engine.fault=skip_scale"], r"no engine.fault 'skip_scale'\. Did you mean 'skip_scales'\?"),
        (["data=missing.jsonl"], r"There is no data at missing.jsonl"),
        (["missing.yaml"], r"There is no configuration file missing.yaml\. Without"),
        (["model", "demo"], r"There is no configuration file model\. A key is written model=VALUE\."),
        (["model=demmo"], r"There is no model 'demmo'.*Did you mean 'demo'\?"),
        (["steps=3", "model"], r"'model' is no override: write key=value"),
        (["recipe=fp8_blok"], r"There is no recipe 'fp8_blok'.*Did you mean 'fp8_block'\?"),
        (["rewards=exact_mach"], r"no built-in reward 'exact_mach'\. Did you mean 'exact_match'\?"),
        (["rewards=missing.py:f"], r"there is no file missing.py"),
        (["task.preset=gsm9k"], r"no preset 'gsm9k'.*Did you mean 'gsm8k'\?"),
        (["evaluation.prompts=9", "task.held_out=3"], r"evaluation.prompts=9 needs as many rows kept from training"),
        (["task.held_out=10000"], r"task.held_out=10000 leaves nothing to train on"),
        (["--resume", "missing"], r"There is no run directory missing"),
        (["--resume", "missing", "a.yaml"], r"--resume takes the run's own configuration"),
    ],
)
def test_wrong_input_is_one_message(command: Command, arguments: list[str], said: str) -> None:
    assert re.search(said, command(*arguments))


@pytest.mark.parametrize(
    ("text", "keys", "said"),
    [
        ("", [], r"data\.jsonl holds no rows"),
        (lines(GOOD) + "{broken\n", [], r"data\.jsonl, line 2: not valid JSON"),
        (lines(GOOD, {"prompt": "x", "answer": "y"}) + "[1]\n", [], r"data\.jsonl, line 3: a list"),
        (lines({"prompt": "1+1=", "anwser": "2"}), [], r"Reward 'exact_match' needs the column 'answer'.*'anwser'\?"),
        (lines({"promt": "1+1=", "answer": "2"}), [], r"no column 'prompt'.*Did you mean 'promt'\?"),
        (
            lines(GOOD, {"prompt": "", "answer": "2"}),
            [],
            r"Row 1 \(counted from 0\) of .*data\.jsonl makes an empty prompt: remove the",
        ),
        (lines(GOOD), ["task.prompt_column=question"], r"no column 'question'"),
    ],
)
def test_wrong_data_is_named_with_its_place(
    command: Command, data: Callable[..., str], text: str, keys: list[str], said: str
) -> None:
    assert re.search(said, command(data(text), *keys))


def test_a_prompt_that_does_not_fit_is_named_and_leaves_no_run_directory(
    command: Command, data: Callable[..., str], tmp_path: Path
) -> None:
    rows = data(lines(GOOD, {"prompt": "1" * 300, "answer": "2"}))
    # What a run had written goes, so that the corrected command finds no directory in its way.
    for _ in range(2):
        text = command(rows, f"run_dir={tmp_path / 'run'}", "compile=false")
        assert re.search(r"Row 1 .*prompt of 300 tokens, but at most 224 fit", text)
        assert not (tmp_path / "run").exists()


def test_an_unsupported_architecture_names_the_supported_ones(command: Command, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(find_model("demo").path, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "architectures": ["MistralForCausalLM"]}))
    text = command(f"model={model}", "data=demo")
    assert "MistralForCausalLM is not supported" in text
    assert all(name in text for name in ("Qwen2ForCausalLM", "Qwen3ForCausalLM", "LlamaForCausalLM"))
    (model / "config.json").write_text("{")
    assert "config.json is not valid JSON" in command(f"model={model}", "data=demo")
    (model / "config.json").unlink()
    assert "holds no config.json" in command(f"model={model}", "data=demo")


def test_a_run_directory_that_exists_is_not_overwritten(command: Command, tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.mkdir()
    (old / "metrics.jsonl").write_text("mine\n")
    text = command(f"run_dir={old}")
    assert f"The run directory {old} exists and is not empty" in text
    assert f"trtl-rl run --resume {old}" in text
    assert [path.name for path in old.iterdir()] == ["metrics.jsonl"]
    assert "is a file: name a directory" in command(f"run_dir={old / 'metrics.jsonl'}")
    assert (old / "metrics.jsonl").read_text() == "mine\n"


def test_what_cannot_be_resumed_is_left_alone(command: Command, tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.mkdir()
    assert f"{old} is no run directory: it has no config.yaml" in command("--resume", str(old))
    (old / "config.yaml").write_text(yaml.safe_dump({"model": "demo", "steps": 3, "run_dir": "elsewhere"}))
    (old / "checkpoints" / "step-00000003").mkdir(parents=True)
    (old / "checkpoints" / "step-00000003" / "model.safetensors").write_bytes(b"")
    assert "no whole checkpoint to resume from (step-00000003: state.json is missing)" in command("--resume", str(old))
    (old / "checkpoints" / "step-00000003" / "state.json").write_text('{"format": 2}')
    assert "another version of trtl-rl wrote it (format 2" in command("--resume", str(old), "steps=9")
    assert "unknown key 'stps'" in command("--resume", str(old), "stps=9")
    assert sorted(path.name for path in old.iterdir()) == ["checkpoints", "config.yaml"]


def test_a_configuration_file_that_is_wrong_is_named(command: Command, tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    for content, said in (
        ("", "holds no keys"),
        ("- a", "holds no keys"),
        ("batch: {promts: 3}", "unknown key 'batch.promts'. Did you mean 'prompts'?"),
        ("steps: [", "is not valid YAML"),
    ):
        file.write_text(content)
        text = command(str(file))
        assert str(file) in text and said in text


def test_help_and_wrong_keys_load_no_torch() -> None:
    heavy = ["torch", "transformers", "datasets", "modelopt", "accelerate", "pyarrow", "numpy"]
    code = """
import sys
from trtl_rl.cli.main import app
try:
    app(sys.argv[2:])
except SystemExit as end:
    print("code", end.code)
print("loaded", *[name for name in sys.argv[1].split(",") if name in sys.modules])
"""
    for arguments, code_seen, allowed in (
        (["--help"], 0, set()),
        (["run", "--help"], 0, set()),
        (["run", "stepps=3"], 2, {"numpy"}),
        (["run", "engine.path=nowhere"], 2, {"numpy"}),
        (["inspect-engine", "nowhere"], 2, set()),
    ):
        done = subprocess.run(
            [sys.executable, "-c", code, ",".join(heavy), *arguments],
            cwd=ROOT, capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert f"code {code_seen}" in done.stdout, done.stdout + done.stderr
        loaded = set(done.stdout.splitlines()[-1].split()[1:])
        assert loaded <= allowed, f"trtl-rl {' '.join(arguments)} loads {loaded}"
