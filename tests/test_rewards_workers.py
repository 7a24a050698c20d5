"""Reward functions in processes of their own: limits that kill, crashes, pickling, and what a policy makes of them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from trtl_rl.config import validate_config
from trtl_rl.config_data import RewardConfig
from trtl_rl.errors import RewardError, UserError
from trtl_rl.rewards import process as process_module
from trtl_rl.rewards.loading import check_columns, given_rewards, load_rewards
from trtl_rl.rewards.reward import Reward, Sample
from trtl_rl.rewards.runner import RewardRunner
from trtl_rl.rollout import Prompt

FUNCTIONS = """
import asyncio, os, signal, subprocess, sys, time

class Judge:
    '''Does what the texts say; remembers how often it was called.'''

    def __init__(self, base=0.0):
        self.base, self.calls = base, 0

    def __call__(self, completions, answer):
        self.calls += 1
        text = completions[0]
        if text == "hang":
            while True:
                try:
                    time.sleep(60)
                except BaseException:
                    pass
        if text == "exit":
            os._exit(3)
        if text == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if text == "quit":
            sys.exit(1)
        if text == "raise":
            raise KeyError("the judge's own words")
        if text == "nan":
            return [float("nan"), 1.0]
        if text == "child":
            self.child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            open(answer[0], "w").write(str(self.child.pid))
            time.sleep(600)
        return [self.base + self.calls] * len(completions)

    def take_flops(self):
        return 1000 * self.calls

class Spender:
    __name__ = "spender"

    def __call__(self, completions, base):
        return [base] * len(completions)

    def take_flops(self):
        return 7

spender = Spender()

async def patient(completions):
    if completions[0] == "block":
        time.sleep(600)
    await asyncio.sleep(600 if completions[0] == "hang" else 0.3)
    return [float(len(text)) for text in completions]

class Broken:
    def __init__(self):
        raise OSError("no weights here")
    def __call__(self, completions):
        return []
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "judges.py"
    path.write_text(FUNCTIONS)
    return path


@pytest.fixture
def make() -> Iterator[Callable[..., RewardRunner]]:
    made: list[RewardRunner] = []

    def make(rewards: list[Reward], *rest: Any) -> RewardRunner:
        made.append(RewardRunner(rewards, *rest))
        return made[-1]

    yield make
    for runner in made:
        runner.close()


def samples(*texts: str, group: int = 0, answer: Any = "") -> list[Sample]:
    prompt = Prompt(10 + group, 0, [1], "question", {"answer": answer})
    return [Sample((group, i), prompt, text, [i]) for i, text in enumerate(texts)]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


def test_a_call_that_hangs_is_killed_and_its_late_answer_meets_no_other_call(
    file: Path, make: Callable[..., RewardRunner]
) -> None:
    told: list[str] = []
    config = RewardConfig(name=f"{file}:Judge", timeout=0.5, on_error="exclude", arguments={"base": 10.0})
    runner = make(load_rewards([config]), None, told.append)
    futures = [runner.submit(samples(text, "b", group=i)) for i, text in enumerate(("a", "hang", "c"))]
    batches = [future.result(30) for future in futures]
    assert [batch.total for batch in batches] == [
        [11.0, 11.0],
        [None, None],
        [11.0, 11.0],
    ]  # a new process, a new object
    assert [batch.ids for batch in batches] == [[(i, 0), (i, 1)] for i in range(3)]
    assert "'Judge' gave no answer within 0.5 s on prompt 11 (samples 0 to 1): its process was killed" in told[0]
    assert runner.take_faults() == {"rewards/Judge/failed/timeout": 2}
    assert runner.take_faults() == {}
    assert batches[0].flops == 1000 and batches[1].flops == 0


@pytest.mark.parametrize("in_process", [True, False])
def test_a_reward_with_arguments_spends_nothing(
    file: Path, make: Callable[..., RewardRunner], in_process: bool
) -> None:
    config = RewardConfig(name=f"{file}:spender", arguments={"base": 2.0}, in_process=in_process)
    batch = make(load_rewards([config])).score(samples("a", "b"))
    assert batch.total == [2.0, 2.0] and batch.flops == 7


@pytest.mark.parametrize(
    ("text", "kind", "said"),
    [
        ("exit", "died", "lost its process .*: it ended with status 3"),
        ("crash", "died", "lost its process .*: it was ended by SIGSEGV"),
        ("quit", "exception", "failed on prompt 10 .*SystemExit: 1"),
        ("raise", "exception", r"failed on prompt 10 .*raise KeyError\(\"the judge's own words\"\)"),
        ("nan", "not_finite", r"returned nan for sample 0 \(prompt 10\)"),
    ],
)
def test_every_way_to_fail_is_told_and_the_next_call_works(
    text: str, kind: str, said: str, file: Path, make: Callable[..., RewardRunner], tmp_path: Path
) -> None:
    told: list[str] = []
    config = RewardConfig(name=f"{file}:Judge", on_error="value", error_value=-1.0)
    log = tmp_path / "logs" / "rewards.log"
    runner = make(load_rewards([config]), log, told.append)
    batch = runner.score(samples(text, "b"))
    assert batch.total == ([-1.0, 1.0] if text == "nan" else [-1.0, -1.0])
    assert re.search(f"(?s)Reward 'Judge' {said}", told[0]) and "given -1 (on_error=value)" in told[0]
    assert re.search(f"(?s){said}", log.read_text())
    assert runner.take_faults() == {f"rewards/Judge/failed/{kind}": 1 if text == "nan" else 2}
    assert runner.score(samples("fine")).total[0] in (1.0, 2.0)


def test_what_a_killed_function_has_started_dies_with_it(
    file: Path, make: Callable[..., RewardRunner], tmp_path: Path
) -> None:
    runner = make(load_rewards([RewardConfig(name=f"{file}:Judge", timeout=3.0, on_error="exclude")]))
    note = tmp_path / "pid"
    assert runner.score(samples("child", answer=str(note))).total == [None]
    end = time.monotonic() + 10
    while alive(int(note.read_text())):
        assert time.monotonic() < end
        time.sleep(0.05)


def test_async_calls_share_a_process_and_a_blocked_one_takes_no_other_with_it(
    file: Path, make: Callable[..., RewardRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_module, "_GRACE", 0.3)
    runner = make(load_rewards([RewardConfig(name=f"{file}:patient", timeout=1.5, on_error="exclude")]))
    texts = ["a", "hang", *["bb"] * 20]
    start = time.monotonic()
    futures = [runner.submit(samples(text, group=i)) for i, text in enumerate(texts)]
    assert [future.result(30).total for future in futures] == [[1.0], [None], *[[2.0]] * 20]
    assert time.monotonic() - start < 6  # one after another they take 7.8 s
    futures = [runner.submit(samples(text, group=i)) for i, text in enumerate(("block", "a", "bb"))]
    assert [future.result(30).total for future in futures] == [[None], [1.0], [2.0]]
    assert runner.take_faults() == {"rewards/patient/failed/timeout": 2}


def test_a_function_from_a_script_or_notebook_travels_with_what_it_refers_to(make: Callable[..., RewardRunner]) -> None:
    scale, seen = 3.0, [0]

    def correct(completions: list[str], **columns: Any) -> list[float]:
        seen[0] += 1
        return [scale * len(text) + seen[0] for text in completions]

    runner = make(given_rewards([correct, lambda completions, **rest: [os.getppid()] * len(completions)]))
    batch = runner.score(samples("ab"))
    assert batch.components["correct"] == [7.0] and seen == [0]
    assert batch.components["<lambda>"] == [os.getpid()]


def test_a_function_that_cannot_be_pickled_is_refused_with_what_to_do() -> None:
    lock = threading.Lock()

    def guarded(completions: list[str]) -> list[float]:
        with lock:
            return [0.0 for _ in completions]

    with pytest.raises(
        UserError, match=r"'guarded' .* cannot be pickled .*lock.*Reward\('guarded', function, in_process=True"
    ):
        given_rewards([guarded])
    (reward,) = given_rewards([Reward("guarded", guarded, in_process=True)])
    assert reward.limit is None


def test_a_script_without_a_main_guard_starts_workers_once(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from trtl_rl.rewards.loading import given_rewards\n"
        "from trtl_rl.rewards.reward import Sample\n"
        "from trtl_rl.rewards.runner import RewardRunner\n"
        "from trtl_rl.rollout import Prompt\n"
        "print('started')\n"
        "def double(x):\n    return 2 * x\n"
        "def reward(completions):\n    return [double(len(text)) for text in completions]\n"
        "runner = RewardRunner(given_rewards([reward]))\n"
        "print(runner.score([Sample((0, 0), Prompt(0, 0, [1], ''), 'abc', [1])]).total)\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    assert done.stdout == "started\n[6.0]\n", done.stderr


@pytest.mark.slow
def test_no_worker_outlives_a_killed_trainer_even_if_it_hangs(file: Path, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    script = tmp_path / "script.py"
    script.write_text(
        "import time\n"
        "from trtl_rl.rewards.loading import given_rewards\n"
        "from trtl_rl.rewards.reward import Sample\n"
        "from trtl_rl.rewards.runner import RewardRunner\n"
        "from trtl_rl.rollout import Prompt\n"
        f"def reward(completions):\n    import os, time\n    open({str(note)!r}, 'w').write(str(os.getpid()))\n"
        "    while True:\n        time.sleep(1)\n"
        "runner = RewardRunner(given_rewards([reward]))\n"
        "runner.submit([Sample((0, 0), Prompt(0, 0, [1], ''), 'abc', [1])])\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, str(script)]) as trainer:
        end = time.monotonic() + 60
        while not (note.exists() and note.read_text()):
            assert time.monotonic() < end
            time.sleep(0.05)
        trainer.kill()
    while alive(int(note.read_text())):
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_class_that_cannot_be_made_is_told_before_the_first_step(
    file: Path, make: Callable[..., RewardRunner]
) -> None:
    rewards = load_rewards([RewardConfig(name=f"{file}:Broken")])  # not made here: it might load a model
    check_columns(rewards, ["prompt"])
    with pytest.raises(RewardError, match=r"(?s)'Broken' could not be loaded in its process.*OSError: no weights here"):
        make(rewards).wait_ready()
    with pytest.raises(UserError, match=r"'Judge' needs the column 'answer'.*task\.columns\.answer=prompt"):
        check_columns(load_rewards([RewardConfig(name=f"{file}:Judge")]), ["prompt"])
    with pytest.raises(UserError, match=r"unexpected keyword argument 'bas'.*arguments are: base"):
        load_rewards([RewardConfig(name=f"{file}:Judge", arguments={"bas": 1})])


def test_none_for_a_whole_group_leaves_the_function_out_and_for_some_of_it_the_samples(
    make: Callable[..., RewardRunner],
) -> None:
    # TRL's rewards for several tasks return None where a prompt is not theirs.
    def math(completions: list[str], answer: list[str]) -> list[float | None]:
        return [1.0 if task == "math" else None for task in answer]

    def code(completions: list[str], answer: list[str]) -> list[float | None]:
        return [2.0 if task == "code" and text else None for text, task in zip(completions, answer, strict=True)]

    runner = make([Reward("math", math, in_process=True), Reward("code", code, in_process=True, weight=2.0)])
    assert runner.score(samples("a", "b", answer="math")).total == [1.0, 1.0]
    assert runner.score(samples("a", "", answer="code")).total == [4.0, None]
    assert runner.score(samples("a", "b", answer="none")).total == [None, None]

    def fails(completions: list[str]) -> list[float]:
        raise ValueError

    runner = make([Reward("math", math, in_process=True), Reward("fails", fails, in_process=True, on_error="exclude")])
    assert runner.score(samples("a", "b", answer="math")).total == [None, None]  # a failure is no opinion


def test_conversational_data_gives_functions_messages(make: Callable[..., RewardRunner]) -> None:
    messages = [{"role": "user", "content": "1+1?"}]

    def polite(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float]:
        assert prompts == [messages] * 2
        return [float(len(message[0]["content"])) for message in completions if message[0]["role"] == "assistant"]

    runner = make([Reward("polite", polite, in_process=True), *load_rewards([RewardConfig(name="exact_match")])])
    prompt = Prompt(0, 0, [1], "<user>1+1?<assistant>", {"prompt": messages, "answer": "2"}, messages)
    batch = runner.score([Sample((0, i), prompt, text, [i]) for i, text in enumerate(("2", "two"))])
    assert batch.components == {"polite": [1.0, 3.0], "exact_match": [1.0, 0.0]}


def test_settings_that_cannot_act_are_refused() -> None:
    with pytest.raises(UserError, match="error_value and on_error=value belong together"):
        validate_config({"rewards": [{"name": "exact_match", "error_value": 1}]})
    with pytest.raises(UserError, match="'exact_match': timeout cannot end a function in the trainer's process"):
        load_rewards([RewardConfig(name="exact_match", timeout=3)])
    with pytest.raises(UserError, match="workers=2 needs in_process=false"):
        load_rewards([RewardConfig(name="exact_match", workers=2)])
    with pytest.raises(UserError, match="reward_funcs holds int '3'"):
        given_rewards([3])  # type: ignore[list-item]


def test_generation_goes_on_while_a_group_is_scored() -> None:
    from test_rollouts import FakeEngine, worker

    from trtl_rl.buffer import GroupBuffer

    release = threading.Event()

    def slow_first(completion_ids: list[list[int]], id: list[int], **rest: Any) -> list[float | None]:
        if id[0] == 0:
            release.wait(30)
        return [float(ids[0]) for ids in completion_ids]

    buffer, engine = GroupBuffer(1, 3), FakeEngine()
    rollouts = worker(buffer, engine, slow_first)
    rollouts.start()
    end = time.monotonic() + 10
    while len(engine.asked) < 4:  # all that the buffer admits, though not one is scored
        assert time.monotonic() < end
        time.sleep(0.01)
    time.sleep(0.1)
    assert rollouts.position().again == [0, 1, 2, 3]
    release.set()
    assert [group.index for group in buffer.take(30) or []] == [0]
    rollouts.stop()
