"""Rewards that somebody else computes: a server, a reward model, reasoning-gym."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trtl_rl.config_data import RewardConfig
from trtl_rl.errors import RewardError, UserError
from trtl_rl.model.source import find_model
from trtl_rl.rewards.http import HttpReward
from trtl_rl.rewards.loading import check_columns, given_rewards, load_rewards
from trtl_rl.rewards.reward import Reward, Sample
from trtl_rl.rewards.reward_model import RewardModel
from trtl_rl.rewards.runner import RewardRunner
from trtl_rl.rollout import Prompt


class Server(http.server.ThreadingHTTPServer):
    """Gives each completion's length; first the answers of ``script``: statuses, texts, or an event to wait for."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.script: list[Any] = []
        self.seen: list[tuple[dict[str, str], Any]] = []
        self.url = f"http://127.0.0.1:{self.server_port}/score"


class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        server: Any = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server.seen.append((dict(self.headers), body))
        step = server.script.pop(0) if server.script else 200
        if isinstance(step, threading.Event):
            step.wait(30)
            step = 200
        if step == "hang up":
            self.connection.close()
            return
        answer = {"rewards": [float(len(text)) for text in body["completions"]]}
        data = step.encode() if isinstance(step, str) else json.dumps(answer).encode()
        self.send_response(step if isinstance(step, int) else 200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *rest: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        threading.Thread(target=server.serve_forever, args=[0.05], daemon=True).start()
        yield server
        server.shutdown()


def samples(*texts: str, **columns: Any) -> list[Sample]:
    prompt = Prompt(10, 0, [1], "question ", {"answer": "a", **columns})
    return [Sample((0, i), prompt, text, [i]) for i, text in enumerate(texts)]


def score(reward: Any, *texts: str, **columns: Any) -> list[float | None]:
    runner = RewardRunner([Reward("fake", reward, in_process=True)])
    try:
        return runner.score(samples(*texts, **columns)).total
    finally:
        runner.close()


def test_a_server_that_stumbles_is_asked_again(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    server.script = [503, "hang up", 429]
    reward = HttpReward(server.url, backoff=0.01, headers={"Authorization": "Bearer $JUDGE_KEY"}, columns=["answer"])
    assert score(reward, "a", "bcd", level=3) == [1.0, 3.0]
    assert len(server.seen) == 4
    headers, body = server.seen[-1]
    assert headers["Authorization"] == "Bearer secret"
    assert body == {"prompts": ["question "] * 2, "completions": ["a", "bcd"], "columns": {"answer": ["a", "a"]}}


def test_a_slow_server_runs_into_the_limit_of_an_attempt(server: Server) -> None:
    release = threading.Event()
    server.script = [release]
    assert score(HttpReward(server.url, timeout=0.2, retries=1, backoff=0.01), "ab") == [2.0]
    release.set()


@pytest.mark.parametrize(
    ("script", "retries", "said", "asked"),
    [
        ([500] * 9, 2, "answered 500", 3),
        ([400], 3, "answered 400 Bad Request", 1),  # asking again would not help
        (["[1.0]"], 3, "returned a list of 1 .*there are 2 completions", 1),
        (["[1.0, NaN]"], 3, r"returned nan for sample 1", 1),
        (["nothing"], 3, "JSONDecodeError", 1),
    ],
)
def test_a_server_that_fails_is_named(script: list[Any], retries: int, said: str, asked: int, server: Server) -> None:
    server.script = script
    with pytest.raises(RewardError, match=f"(?s)'fake' .*{said}"):
        score(HttpReward(server.url, retries=retries, backoff=0.01), "a", "b")
    assert len(server.seen) == asked


def test_a_server_that_is_not_there_is_named() -> None:
    with pytest.raises(RewardError, match=r"(?s)ConnectionError.*127\.0\.0\.1"):
        score(HttpReward("http://127.0.0.1:9/", retries=1, backoff=0.01), "a")


def test_wrong_arguments_of_a_server_are_refused_at_once() -> None:
    with pytest.raises(UserError, match="must begin with http"):
        load_rewards([RewardConfig(name="http", arguments={"url": "localhost:80"})])
    with pytest.raises(UserError, match="variable NO_SUCH_KEY of a header is not set"):
        HttpReward("http://x", headers={"Authorization": "Bearer $NO_SUCH_KEY"})


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny classification model with the demo's tokenizer."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

    path = tmp_path_factory.mktemp("classifier")
    tokenizer = AutoTokenizer.from_pretrained(find_model("demo").path)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(tokenizer), num_labels=1, pad_token_id=0, **sizes)
    LlamaForSequenceClassification(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.mark.parametrize("known", [True, False])
def test_a_reward_model_gives_the_logits_of_transformers_and_its_flops(
    classifier: Path, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    prompt = Prompt(0, 0, [1], "1+2=", {})
    texts = ["3", "1234567", "33"]
    if not known:
        monkeypatch.setattr("trtl_rl.rewards.reward_model._KNOWN", ())
    reward = RewardModel(str(classifier), batch_size=2)
    runner = RewardRunner([Reward("model", reward, in_process=True)])
    batch = runner.score([Sample((0, i), prompt, text, []) for i, text in enumerate(texts)])
    runner.close()
    model = AutoModelForSequenceClassification.from_pretrained(classifier).eval()
    tokenizer = AutoTokenizer.from_pretrained(classifier)
    lengths = []
    for text, value in zip(texts, batch.total, strict=True):
        ids = tokenizer("1+2=" + text, return_tensors="pt")
        lengths.append(ids["input_ids"].shape[1])
        with torch.inference_mode():
            assert value == pytest.approx(model(**ids).logits.item(), abs=1e-5)  # padded batches round otherwise
    # Two layers with 4·16·16 weights of attention and 3·16·32 of feed-forward, and one label at every position.
    if known:
        tokens, pairs = sum(lengths), sum(n * (n + 1) // 2 for n in lengths)
    else:  # what torch runs: padded, and without regard to the mask
        tokens = 2 * max(lengths[:2]) + lengths[2]
        pairs = 2 * max(lengths[:2]) ** 2 + lengths[2] ** 2
    linears = 2 * tokens * (2 * (4 * 16 * 16 + 3 * 16 * 32) + 16)
    assert batch.flops == linears + 4 * 2 * 16 * pairs
    assert reward.take_flops() == 0
    # what a plan is told before: as if each had its length, or that nobody knows
    told = [reward.expected_flops(4, n - 4) for n in lengths]
    assert told == [None] * 3 if not known else sum(filter(None, told)) == batch.flops


@pytest.mark.slow
def test_a_reward_models_flops_come_back_from_its_process(classifier: Path) -> None:
    (reward,) = load_rewards([RewardConfig(name="reward_model", arguments={"model": str(classifier), "sigmoid": True})])
    runner = RewardRunner([reward])
    batch = runner.score(samples("3", "1234567"))
    assert all(value is not None and 0 < value < 1 for value in batch.total) and batch.flops > 0
    runner.close()


def test_a_hub_name_among_functions_is_a_reward_model_as_in_trl() -> None:
    (reward, match) = given_rewards(["owner/model", "exact_match"])
    assert reward.config is not None and reward.config.arguments == {"model": "owner/model"} and not reward.in_process
    assert match.in_process


def test_a_missing_extra_is_named_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trtl_rl.rewards.loading.importlib.util.find_spec", lambda name: None)
    for name, extra in {"math_answer": "math", "reasoning_gym": "reasoning-gym"}.items():
        with pytest.raises(UserError, match=rf"Reward '{name}' needs .*pip install 'trtl-rl\[{extra}\]'"):
            load_rewards([RewardConfig(name=name)])


@pytest.mark.slow
def test_reasoning_gym_scores_with_the_tasks_own_scorer() -> None:
    gym = pytest.importorskip("reasoning_gym")
    entry = gym.create_dataset("chain_sum", seed=1, size=1)[0]
    rewards = load_rewards([RewardConfig(name="reasoning_gym", in_process=True)])
    check_columns(rewards, ["question", "answer", "metadata"])
    texts = [f"<answer>9</answer> no, <answer> {entry['answer']} </answer>", "<answer>77777</answer>", entry["answer"]]
    assert score(rewards[0].function, *texts, **entry) == [1.0, 0.0, 0.0]
    assert score(rewards[0].function, "x", **{**entry, "metadata": None}) == [None]
