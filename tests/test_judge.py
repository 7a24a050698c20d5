"""The generative judge: what it asks, how its verdict is read, what it costs; and the demo's model as a judge in a run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import demo
import pytest
from transformers import AutoTokenizer

from trtl_rl.config_data import RewardConfig
from trtl_rl.errors import RewardError, UserError
from trtl_rl.flops.formulas import ModelShape
from trtl_rl.model.source import find_model
from trtl_rl.rewards.judge import Judge, Seated
from trtl_rl.rewards.loading import check_columns, load_rewards
from trtl_rl.rewards.reward import Reward, Sample
from trtl_rl.rewards.runner import RewardRunner
from trtl_rl.rollout import Completion, Prompt, Request

SHAPE = ModelShape(layers=1, hidden=8, heads=2, kv_heads=1, head_dim=4, intermediate=16, vocab=32)


class Scripted:
    """Answers questions with prepared texts, the last question first."""

    def __init__(self, tokenizer: Any, answers: Sequence[str]) -> None:
        self.tokenizer, self.answers, self.seen = tokenizer, list(answers), list[Request]()

    def probe(self, requests: Sequence[Request]) -> list[Completion]:
        self.seen += requests
        said = zip(requests, self.answers, strict=True)
        return [
            Completion(request.id, 0, self.tokenizer.encode(text), "stop", 0, 0, prefills=[len(request.ids) - 1])
            for request, text in reversed(list(said))
        ]


class ScriptedJudge(Judge):
    def __init__(self, *answers: str, context: int = 60, chat: str | None = None, **rest: Any) -> None:
        super().__init__(
            **{"template": "{prompt}?{completion}={answer}", "pattern": r"\d", "max_new_tokens": 8, **rest}
        )
        tokenizer: Any = AutoTokenizer.from_pretrained(find_model("demo").path)
        tokenizer.chat_template = chat
        self.engine = Scripted(tokenizer, answers)
        self._context = context

    def seat(self) -> Seated:
        return Seated(self.engine, self.engine.tokenizer, SHAPE, self._context)

    @property
    def questions(self) -> list[str]:
        return [self.engine.tokenizer.decode(request.ids) for request in self.engine.seen]


def test_a_verdict_is_the_last_match_and_what_a_completion_says_fills_no_field() -> None:
    judge = ScriptedJudge("1 2", "3", pattern=r"\d", template="{prompt}{completion}{answer}")
    found = judge(prompts=["1+1=", "2+2="], completions=["{answer}", "4"], answer=["2", "4"])
    assert found == [2.0, 3.0]
    tokenizer = judge.engine.tokenizer
    asked = [tokenizer.encode("1+1={answer}2"), tokenizer.encode("2+2=44")]  # the demo's tokenizer knows no letters
    assert [request.ids for request in judge.engine.seen] == asked
    assert all(request.sampling.greedy and request.samples == 1 for request in judge.engine.seen)


def test_conversations_go_through_the_chat_template_with_the_system_message() -> None:
    chat = "{% for m in messages %}{{ m.role | length }}{{ m.content }},{% endfor %}="
    judge = ScriptedJudge("1", chat=chat, system="7", template="{prompt}+{completion}")
    prompt = [{"role": "user", "content": "12"}]
    judge(prompts=[prompt], completions=[[{"role": "assistant", "content": "34"}]])
    assert judge.questions == ["67,412+34,="]  # "system" has 6 letters, "user" 4
    with pytest.raises(UserError, match="system needs a chat template"):
        ScriptedJudge("1", system="7")(prompts=["1"], completions=["1"], answer=["1"])


@pytest.mark.parametrize(
    ("pattern", "values", "text", "worth"),
    [
        (r"Verdict: (\w+)", {"Good": 1, "bad": -1}, "Verdict: bad? No. Verdict: GOOD", 1.0),
        (r"\d+", None, "7 of 10", 10.0),
        (r"Verdict: (\w+)", {"good": 1, "bad": 0}, "Verdict: fair", "values has no verdict 'fair'; it has: good, bad"),
        (r"Score: (\S+)", None, "Score: high", "'high' is no number"),
        (r"Score: (\S+)", None, "I cannot say", r"no verdict like 'Score: .*'I cannot say'"),
        (r"Score: (\d)?", None, "Score: ", "'' is no number"),
    ],
)
def test_what_a_verdict_is_worth(pattern: str, values: Any, text: str, worth: float | str) -> None:
    found = ScriptedJudge(pattern=pattern, values=values).verdict(text)
    if isinstance(worth, float):
        assert found == worth
    else:
        with pytest.raises(ValueError, match=worth):
            raise found  # type: ignore[misc]


def test_an_answer_without_a_verdict_may_have_a_worth_of_its_own() -> None:
    judge = ScriptedJudge(pattern=r"Verdict: (\w+)", values={"good": 1}, no_verdict=-2)
    assert [judge.verdict(text) for text in ("Verdict: good", "Verdict: fair", "")] == [1.0, -2.0, -2.0]


def test_the_policy_decides_about_answers_without_a_verdict_and_questions_that_do_not_fit() -> None:
    prompt = Prompt(10, 0, [1], "1+1=", {"answer": "2"})
    samples = [Sample((0, i), prompt, text, [i]) for i, text in enumerate(("1", "2", "3" * 60))]

    def scored(**policy: Any) -> Any:
        judge = ScriptedJudge("5", "=")
        runner = RewardRunner([Reward("judge", judge, in_process=True, **policy)])
        batch = runner.score(samples)
        failed = runner.take_faults()
        runner.close()
        return batch.total, failed

    failed = {"rewards/judge/failed/exception": 2.0}
    assert scored(on_error="exclude") == ([5.0, None, None], failed)
    assert scored(on_error="value", error_value=-1.0) == ([5.0, -1.0, -1.0], failed)
    with pytest.raises(RewardError, match=r"'judge' failed for sample 1 \(prompt 10\): ValueError: .* no verdict"):
        scored()


def test_questions_and_answers_cost_what_rollouts_of_the_judge_cost() -> None:
    judge = ScriptedJudge("12", "3", template="{prompt}{completion}")
    judge(prompts=["1+1="] * 2, completions=["2", "22"])
    linears = 2 * (8 * 4 * (2 * 2 + 2 * 1) + 3 * 8 * 16)
    flops = 0
    for question, answer in ((5, 2), (6, 1)):
        positions = question + answer - 1  # the last token of an answer is not fed back
        flops += linears * positions + 4 * 2 * 4 * positions * (positions + 1) // 2 + 2 * 8 * 32 * answer
    assert judge.take_flops() == flops
    assert judge.take_flops() == 0


def test_what_a_judge_lacks_is_said_before_anything_is_loaded() -> None:
    good = {"model": "demo", "template": "{prompt}{completion}{answr}", "pattern": "x", "max_new_tokens": 8}

    def load(**change: Any) -> Any:
        return load_rewards([RewardConfig(name="judge", arguments={**good, **change})])

    with pytest.raises(UserError, match=r"needs the column 'answr'.*Did you mean 'answer'"):
        check_columns(load(), ["prompt", "answer"])
    for change, said in [
        ({"model": "no/such/model"}, "There is no model 'no/such/model'"),
        ({"template": "{prompt}"}, "template must contain '{completion}'"),
        ({"pattern": "("}, "is no regular expression"),
        ({"values": {True: 1, False: 0}}, "verdict True, which is no text. Put it in quotes"),
        ({"values": {"good": "1"}}, "gives 'good' the worth '1', which is no number"),
        ({"no_verdict": "0"}, "no_verdict is '0', which is no number"),
        ({"max_new_tokens": 4096}, "leave no room for a question"),
        ({"recipe": "fp8_blok"}, "Did you mean 'fp8_block'"),
        ({"patern": "x"}, "unexpected keyword argument 'patern'"),
    ]:
        with pytest.raises(UserError, match=said):
            load(**change)


@pytest.mark.slow
def test_the_demos_model_judges_in_a_run_and_its_flops_are_feedback(tmp_path: Path) -> None:
    """Its verdict is its own greedy answer to the completion's prompt, as transformers generates it."""
    import torch
    from transformers import AutoModelForCausalLM

    from trtl_rl.trainer.trainer import Trainer

    # "…=" makes it add; the last digit of what it writes is the verdict.
    arguments = {
        "model": "demo",
        "template": "{prompt}{completion}{prompt}",
        "pattern": r"\d(?=\D*$)",
        "max_new_tokens": 16,
        "compile": False,
    }
    judge = {"name": "judge", "arguments": arguments, "on_error": "value", "error_value": 0}
    config = demo.small(tmp_path / "run", steps=1, rewards=[judge], parity={"every": 0})
    Trainer(args=config).train()
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    step = next(row["metrics"] for row in rows if row["kind"] == "step")
    assert step["flops/feedback"] > 0
    tokenizer = AutoTokenizer.from_pretrained(find_model("demo").path)
    model = AutoModelForCausalLM.from_pretrained(find_model("demo").path, dtype=torch.bfloat16).float().eval()
    asker = ScriptedJudge(**{key: arguments[key] for key in ("template", "pattern")})
    rollouts = [json.loads(line) for file in (tmp_path / "run" / "rollouts").iterdir() for line in file.open()]
    seen = set()
    for group in rollouts:
        for text, reward in zip(group["completions"], group["rewards"], strict=True):
            ids = tokenizer(group["prompt"] + text + group["prompt"], return_tensors="pt")["input_ids"]
            out = model.generate(ids, max_new_tokens=16, do_sample=False)[0, ids.shape[1] :]
            verdict = asker.verdict(tokenizer.decode(out, skip_special_tokens=True))
            assert reward == (verdict if isinstance(verdict, float) else 0)
            seen.add(reward)
    assert len(seen) > 1
