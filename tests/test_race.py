"""RACE: the response that it fits, the plan, and a whole small race."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from demo import small
from metric_rows import write
from run_files import rows_of

from trtl_rl.cli.race import RaceOptions
from trtl_rl.cli.race import race as race_command
from trtl_rl.cli.race_curve import curve
from trtl_rl.config import RunConfig, load_config, validate_config
from trtl_rl.config_parts import LossConfig
from trtl_rl.errors import UserError
from trtl_rl.flops.formulas import ModelShape, forward, learning, recompute, rollout
from trtl_rl.flops.response import Response, fit_response
from trtl_rl.rewards.loading import InWorker
from trtl_rl.rewards.reward import Reward
from trtl_rl.rollout import Completion, Group, Prompt
from trtl_rl.trainer.learner import learning_rate_factor
from trtl_rl.trainer.race import NATIVE, Outcome, Race, disagreements
from trtl_rl.trainer.race_plan import Cell, Lengths, Split, default_axes, parse_axes, predict, spread
from trtl_rl.trainer.trainer import Trainer

RHO = np.linspace(0.4, 0.92, 8)


def response(optimum: float | None, noise: float, seed: int, rho: Any = RHO) -> Response:
    rng = np.random.default_rng(seed)
    base = 0.6 if optimum is None else 0.6 - 1.5 * (rho - optimum) ** 2
    return fit_response(rho, base + rng.normal(scale=noise, size=len(rho)))


# --- the response ---


@pytest.mark.parametrize(("optimum", "regime"), [(0.45, "low-update"), (0.8, "high-update")])
def test_a_known_optimum_is_missed_or_lies_on_the_other_side(optimum: float, regime: str) -> None:
    found = [response(optimum, 0.02, seed) for seed in range(10)]
    assert sum(r.regime == regime for r in found) >= 9
    assert all(r.regime in (regime, "undecided") for r in found)
    assert all(r.interval is not None and r.interval[0] <= r.interval[1] for r in found if r.regime == regime)


def test_noise_alone_names_a_regime() -> None:
    found = [response(None, 0.05, seed) for seed in range(30)]
    undecided = [r for r in found if r.regime == "undecided"]
    assert len(undecided) >= 24
    assert {r.optimum for r in undecided if r.best == "constant"} == {None}
    assert all(r.reason == "the constant predicts a left-out cell best" for r in undecided if r.best == "constant")


def test_an_optimum_in_the_middle_is_put_on_a_side() -> None:
    found = [response(float(RHO.mean()), 0.02, seed) for seed in range(8)]
    assert sum(r.regime == "undecided" for r in found) >= 6
    assert any("of the resampled fits" in r.reason for r in found)


def test_the_leave_one_out_error_is_not_that_of_cells_that_were_left_out() -> None:
    r = response(0.6, 0.05, 1)
    rho, score = np.array(r.rho), np.array(r.score)
    errors = []
    for i in range(len(rho)):
        keep = np.arange(len(rho)) != i
        errors.append(score[i] - np.polyval(np.polyfit(rho[keep], score[keep], 2), rho[i]))
    assert r.fits["quadratic"].loo == pytest.approx(float(np.sqrt(np.mean(np.square(errors)))), rel=1e-6)
    assert r.fits["constant"].coefficients[0] == pytest.approx(score.mean())
    assert r.fits["log_linear"].coefficients == pytest.approx(np.polyfit(np.log(rho), score, 1)[::-1])


def test_equal_scores_or_too_few_cells_break_the_fit() -> None:
    assert fit_response([0.4, 0.5, 0.6, 0.7], [0.5] * 4).regime == "undecided"
    three = fit_response([0.4, 0.5, 0.6], [0.1, 0.2, 0.3])
    assert three.fits["quadratic"].loo == float("inf") and three.regime == "undecided"
    assert json.loads(json.dumps(three.to_json()))["fits"]["quadratic"]["leave_one_out"] is None
    assert fit_response([0.5] * 4, [0.1, 0.2, 0.3, 0.4]).best == "constant"  # all cells at one rho


def test_a_curve_is_wider_than_its_terminal_or_leaves_cells_out() -> None:
    for r in (response(0.8, 0.01, 0), response(None, 0.01, 0), fit_response([0.5] * 4, [1.0] * 4)):
        for width in (40, 76):
            lines = [line.plain for line in curve(r, "judge: exact_match", width, ascii_only=True)]
            assert all(len(line) <= width for line in lines[:-1])
            assert any("o" in line for line in lines[1:-2]) and r.regime in lines[-1]


def test_targets_that_disagree_are_not_named() -> None:
    high, low, none = response(0.85, 0.01, 0), response(0.42, 0.01, 0), response(None, 0.05, 1)
    assert (high.regime, low.regime, none.regime) == ("high-update", "low-update", "undecided")
    (line,) = disagreements({"rule": {"a": high, "b": none}, "judge": {"a": low}})
    assert line == "rule, a: high-update; but judge, a: low-update"
    assert not disagreements({"rule": {"a": high, "b": none}, "judge": {"a": high}})


# --- the plan ---

SHAPE = ModelShape(layers=1, hidden=4, heads=2, kv_heads=1, head_dim=2, intermediate=8, vocab=10)


def config(**keys: Any) -> RunConfig:
    return validate_config({"task": {"held_out": 64}, "evaluation": {"prompts": 16}, **keys})


def test_the_planned_split_forgets_updates_or_samples_that_are_not_trained_on() -> None:
    c = config(batch={"prompts": 3, "group_size": 4, "train_group_size": 2, "updates": 5})
    split = predict(c, SHAPE, Lengths(3, 2), [])
    assert split.search == 3 * rollout(SHAPE, 3, [2] * 4)
    old = predict(
        c.model_copy(update={"loss": LossConfig(name="grpo", behaviour="recomputed")}), SHAPE, Lengths(3, 2), []
    )
    assert old.learning - split.learning == 3 * 2 * forward(SHAPE, 3, 2)  # once for all five updates
    assert split.learning == 3 * 5 * 2 * (learning(SHAPE, 3, 2) + recompute(SHAPE, 3, 2))
    assert split.feedback == 0 and split.update_fraction == split.learning / (split.search + split.learning)


def test_a_reward_model_is_planned_as_free() -> None:
    class Fake:
        def __call__(self, completions: list[str]) -> list[float]:
            return [0.0] * len(completions)

        def take_flops(self) -> int:
            return 7

    class Telling(Fake):
        def expected_flops(self, prompt_tokens: int, answer_tokens: int) -> int:
            return 100 * prompt_tokens + answer_tokens

    c = config(batch={"prompts": 3, "group_size": 4})
    assert predict(c, SHAPE, Lengths(3, 2), [Reward("fake", Fake())]).feedback is None
    assert predict(c, SHAPE, Lengths(3, 2), [Reward("fake", Telling())]).feedback == 12 * 302
    assert predict(c, SHAPE, Lengths(3, 2), [Reward("fake", InWorker(Fake))]).feedback is None


def test_axes_are_no_product_or_lose_their_types() -> None:
    assert parse_axes(["batch.updates=1,2", "model=a,b"]) == [
        {"batch.updates": 1, "model": "a"},
        {"batch.updates": 1, "model": "b"},
        {"batch.updates": 2, "model": "a"},
        {"batch.updates": 2, "model": "b"},
    ]
    for wrong in (["batch.updates"], ["batch.updates="], ["=1"], ["seed=1", "seed=2"], ["seed=[1"]):
        with pytest.raises(UserError, match="--axis"):
            parse_axes(wrong)


def test_cells_are_not_spread_over_the_range() -> None:
    some = [({"n": i}, Split(100 - r, r)) for i, r in enumerate((90, 50, 51, 52, 70, 89))]
    assert [split.learning for _, split in spread(some, 3)] == [50, 70, 90]
    assert len(spread(some, 10)) == 6
    assert [axis["batch.train_group_size"] for axis in default_axes(config(batch={"group_size": 8}))] == [2, 4] + [
        None
    ] * 4


def test_a_race_that_cannot_be_scored_is_planned(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"evaluation\.prompts"):
        Race.plan(tmp_path / "r", validate_config({}), budget=1e9, count=6)
    with pytest.raises(UserError, match="2 cells for each reward system are too few"):
        Race.plan(tmp_path / "r", config(), budget=1e9, count=6, axes=["batch.updates=1,2"])
    with pytest.raises(UserError, match="unknown key"):
        Race.plan(tmp_path / "r", config(), budget=1e9, count=6, axes=["batch.update=1,2,3,4"])
    with pytest.raises(UserError, match="same settings"):
        Race.plan(tmp_path / "r", config(), budget=1e9, count=6, axes=["seed=1,1,1,1"])
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="race --resume"):
        Race.plan(tmp_path, config(), budget=1e9, count=6)
    with pytest.raises(UserError, match=r"no race\.json"):
        Race.open(tmp_path)


def test_an_axis_of_ranks_is_planned_as_if_all_weights_were_trained(tmp_path: Path) -> None:
    race = Race.plan(tmp_path / "r", config(), budget=1e11, count=4, axes=["lora.rank=0,2,8,64"], answer_tokens=20)
    rho = {cell.overrides["lora.rank"]: cell.split.update_fraction for cell in race.cells}
    # 6N against 2N for each token; without gradients of frozen weights 4N, and the larger the adapters the more of their own
    assert rho[2] < rho[8] < rho[64] < rho[0] and rho[0] - rho[2] > 0.05
    assert race.config_of(next(cell for cell in race.cells if cell.name == "exact_match-lora8")).lora.rank == 8


def test_cells_have_other_budgets_or_forget_their_reward(tmp_path: Path) -> None:
    rewards = [["exact_match"], {"name": "exact_match", "weight": 2.0}]
    race = Race.plan(tmp_path / "r", config(), budget=1e11, count=4, rewards=rewards, answer_tokens=20)
    assert race.labels == ["exact_match", "exact_match_2"] and len(race.cells) == 8
    assert not (tmp_path / "r").exists()  # nothing is written before it is confirmed
    race.save()
    again = Race.open(tmp_path / "r")
    assert again.cells == race.cells and again.lengths == Lengths(6, 20)
    for cell in again.cells:
        c = again.config_of(cell)
        assert c.budget.flops == 1e11 and c.steps == 4 * cell.steps
        assert c.run_dir == str(tmp_path / "r" / "cells" / cell.name)
        assert c.rewards[0].weight == [1.0, 2.0][cell.reward]
        assert c.batch.updates == cell.overrides["batch.updates"]
        assert c.batch.train_group_size == cell.overrides["batch.train_group_size"]
    ratios = [cell.split.update_fraction for cell in race.cells[:4]]
    assert ratios == sorted(ratios) and ratios[0] < 0.5 and ratios[-1] > 0.95


def outcome(rho: float, score: float) -> Outcome:
    return Outcome(3, {"search": 1, "learning": 1, "feedback": 0}, rho, 1.0, {NATIVE: 0.5, "target": score})


def test_the_recommendation_is_the_best_cell_s_though_nothing_was_shown(tmp_path: Path) -> None:
    rhos = [0.3, 0.45, 0.6, 0.75, 0.9]
    cells = [Cell(f"c{i}", 0, {"batch.updates": i + 1}, 1, Split(1, 1)) for i in range(5)]
    race = Race(tmp_path, config().model_dump(mode="json"), 1e9, ["exact_match"], ["rule"], Lengths(1, 1), cells)
    for scores, updates in (([0.1, 0.2, 0.3, 0.4, 0.5], 5), ([0.3, 0.5, 0.1, 0.5, 0.3], 1)):
        outcomes = {cell.name: outcome(r, s) for cell, r, s in zip(cells, rhos, scores, strict=True)}
        (path,) = race.recommend(outcomes, race.responses(outcomes))
        text = path.read_text()
        assert validate_config(yaml.safe_load(text)).batch.updates == updates
        assert "not a guarantee" in text and ("undecided" in text) == (updates == 1)


def test_a_cell_that_ended_early_passes_for_one_of_equal_flops(tmp_path: Path) -> None:
    cells = [Cell("c", 0, {}, 1, Split(1, 1))]
    race = Race(tmp_path, {}, 100, ["exact_match"], ["rule"], Lengths(1, 1), cells)
    run = race.run_dir(cells[0])
    assert race.outcome(cells[0]) is None
    write(run, [
        *({"kind": "step", "step": i, "metrics": {"reward": i / 20}} for i in range(1, 21)),
        {"kind": "evaluation", "step": 20, "metrics": {
            "eval/exact_match": 0.7, "eval/exact_match/ci_low": 0.6, "eval/exact_match/ci_high": 0.8, "eval/version_first": 20,
        }},
    ])  # fmt: skip
    for total, early in ((99, True), (100, False)):
        flops = {"search": 30, "learning": 60, "feedback": total - 90}
        ledger = {"flops": {**flops, "total": total}, "update_fraction": 60 / total, "updates_per_rollout": 1.0}
        (run / "ledger.json").write_text(json.dumps(ledger))
        if early:
            assert race.outcome(cells[0]) is None  # it has not ended
            write(run, [{"kind": "end", "status": "done", "step": 20, "text": ""}])
        scores = {NATIVE: pytest.approx((19 + 20) / 40), "exact_match": 0.7}
        assert race.outcome(cells[0]) == Outcome(20, flops, 60 / total, 1.0, scores, early)


# --- its knobs ---


def group(rewards: list[float | None]) -> Group:
    completions = [Completion(0, i, [i, 1], "stop", 0, 0) for i in range(len(rewards))]
    return Group(0, 0, Prompt(0, 0, [1], "p"), completions, rewards, texts=["t"] * len(rewards))


def test_the_trained_part_of_a_group_is_not_the_most_varied_one() -> None:
    chosen = group([0.0, 1.0, None, 0.0, 1.0, 1.0, 0.5]).most_varied(4)
    assert [(c.sample, r) for c, r in chosen.scored()] == [(0, 0.0), (3, 0.0), (4, 1.0), (5, 1.0)]
    assert [r for _, r in group([0.9, 1.0, 0.0, 0.95]).most_varied(3).scored()] in ([1.0, 0.0, 0.95], [0.9, 1.0, 0.0])
    one = group([1.0, 1.0, 1.0, 0.0, 1.0]).most_varied(2)
    assert [r for _, r in one.scored()] == [0.0, 1.0] and one.has_signal()
    assert not group([1.0] * 5).most_varied(2).has_signal()
    whole = group([0.0, 1.0, None])
    assert whole.most_varied(2) is whole


def test_a_schedule_goes_on_after_its_budget_is_spent() -> None:
    c = validate_config({"optimizer": {"schedule": "linear", "warmup_steps": 2}}).optimizer
    assert learning_rate_factor(c, 0, 100, 0.9) == 1 / 3  # the warm-up is by steps
    assert learning_rate_factor(c, 10, 100, 0.75) == 0.25
    assert learning_rate_factor(c, 75, 102, 0.1) == 1 - 73 / 100
    assert learning_rate_factor(c, 10, 100, 1.2) == 0.0


def test_a_smaller_group_than_its_trained_part_is_accepted() -> None:
    with pytest.raises(UserError, match=r"batch.train_group_size=9 is more than the batch.group_size=8"):
        validate_config({"batch": {"train_group_size": 9}})


class CountingReward:
    """Rewards by the first token, and claims to have spent 10 FLOPs on each completion."""

    spent = 0

    def __call__(self, completion_ids: list[list[int]], **rest: Any) -> list[float]:
        self.spent += 10 * len(completion_ids)
        return [float(ids[0] % 3) + len(ids) / 10 for ids in completion_ids]

    def take_flops(self) -> int:
        spent, self.spent = self.spent, 0
        return spent


@pytest.mark.slow
def test_updates_on_a_batch_or_a_reward_s_flops_are_not_counted_or_break_parity(tmp_path: Path) -> None:
    keys = {"batch": {"prompts": 4, "group_size": 4, "train_group_size": 2, "updates": 3}, "budget": {"flops": 1e13}}
    config = small(tmp_path / "run", steps=2, optimizer={"lr": 1e-3, "schedule": "linear"}, **keys)
    Trainer(reward_funcs=CountingReward(), args=config).train()
    ledger = json.loads((tmp_path / "run" / "ledger.json").read_text())
    steps = [row["metrics"] for row in rows_of(tmp_path / "run", "step")]
    trained, generated = ledger["tokens"]["trained"], ledger["tokens"]["generated"]
    assert generated == steps[-1]["num_tokens"]
    assert ledger["flops"]["feedback"] == 10 * 2 * 4 * 4 == sum(m["flops/feedback"] for m in steps)
    # two of four completions, three times, of the groups with a signal
    assert 0 < trained <= 3 * generated * 0.75 and trained % 3 == 0
    assert all(m["mismatch/differing_tokens"] == 0 for m in steps)
    assert ledger["updates_per_rollout"] == trained / generated
    assert 0 < ledger["recomputed"]["learning"] < ledger["flops"]["learning"]
    assert 0.5 < ledger["fp8_share"]["search"] < 1 and ledger["mfu"]["search"] == "unknown"
    assert ledger["apart"]["padding"]["flops"] > 0
    assert ledger["budget"]["budget.flops"]["left"] == 1e13 - ledger["flops"]["total"]
    assert steps[-1]["budget/left/steps"] == 0
    assert "Left of the budget: steps 0 of 2, budget.flops" in rows_of(tmp_path / "run", "end")[0]["text"]


# --- a whole race ---


def race_settings(tmp_path: Path) -> list[str]:
    parts = {"task": {"held_out": 32}, "evaluation": {"prompts": 8}, "optimizer": {"lr": 1e-6}, "parity": {"every": 0}}
    keys = small(tmp_path / "race", **parts).model_dump(mode="json")
    file = tmp_path / "race.yaml"
    file.write_text(yaml.safe_dump(keys))
    return [str(file)]


@pytest.mark.slow
def test_a_race_does_not_go_on_where_it_was_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = RaceOptions(budget=6e9, cells=4, answer_tokens=19)
    with pytest.raises(UserError, match="--yes"):
        race_command(race_settings(tmp_path), options, None)
    assert not (tmp_path / "race").exists()
    race = Race.plan(tmp_path / "race", load_config(race_settings(tmp_path)[0]), budget=6e9, count=4, answer_tokens=19)
    race.save()

    def interrupt() -> None:
        end = time.monotonic() + 600
        second = race.run_dir(race.cells[1]) / "metrics.jsonl"
        while time.monotonic() < end and not (second.exists() and '"kind": "step"' in second.read_text()):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    assert race_command([], RaceOptions(), race.directory) == 130
    thread.join()
    assert "race --resume" in capsys.readouterr().out
    first = (race.run_dir(race.cells[0]) / "ledger.json").read_text()
    assert race_command([], RaceOptions(), race.directory) == 0
    shown = capsys.readouterr().out
    assert first == (race.run_dir(race.cells[0]) / "ledger.json").read_text()
    found = json.loads((race.directory / "race.json").read_text())
    for cell in race.cells:
        total = sum(found["outcomes"][cell.name]["flops"].values())
        assert 6e9 <= total < 6e9 + 2 * cell.split.total, "a cell ends at the first step over its budget"
        assert cell.name in shown
    assert set(found["responses"]["exact_match"]) == {NATIVE, "exact_match", "greedy_exact_match"}
    assert not any(outcome["early"] for outcome in found["outcomes"].values()) and "before its budget" not in shown
    assert "not a guarantee" in shown and (race.directory / "race.png").stat().st_size > 10_000
    validate_config(yaml.safe_load((race.directory / "recommended-exact_match.yaml").read_text()))
