"""The ledger by role, and the budget."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from trtl_rl.config_parts import BudgetConfig
from trtl_rl.errors import UserError
from trtl_rl.flops.devices import Device
from trtl_rl.flops.ledger import ROLES, WASTES, Budget, Ledger


def new_ledger() -> Ledger:
    return Ledger(parameters=7, reward_system="exact_match", evaluation_target="held-out exact match")


@pytest.fixture
def switching() -> Iterator[None]:
    """Threads take turns so often that a missing lock shows."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(usual)


# --- the ledger ------------------------------------------------------------------------------------------------------


def test_waste_or_evaluation_becomes_a_fourth_addend() -> None:
    ledger = new_ledger()
    ledger.add("search", 30)
    ledger.add("learning", 60)
    ledger.add("feedback", 10)
    ledger.waste("stale", 20)
    ledger.apart("evaluation", 1000, seconds=2.0)
    metrics = ledger.step_metrics()
    assert metrics["flops/total"] == 100 == ledger.total()
    assert metrics["flops/update_fraction"] == 0.6 == ledger.update_fraction()
    assert {name: metrics[f"flops/wasted/{name}"] for name in WASTES} == dict.fromkeys(WASTES, 0) | {"stale": 20}
    assert Budget(BudgetConfig(flops=101), 9).reached(ledger, 0, 0.0, 0) is None


def test_step_counters_run_on_into_the_next_step() -> None:
    ledger = new_ledger()
    ledger.add("search", 10)
    ledger.waste("failed", 3)
    ledger.step_metrics()
    ledger.add("learning", 30)
    metrics = ledger.step_metrics()
    assert {role: metrics[f"flops/{role}"] for role in ROLES} == {"search": 0, "learning": 30, "feedback": 0}
    assert metrics["flops/total"] == 30 and metrics["flops/wasted/failed"] == 0
    assert metrics["flops/cumulative/search"] == 10 and metrics["flops/cumulative/total"] == 40
    assert metrics["flops/update_fraction"] == 0.75  # of the run, not of the step


def test_update_fraction_of_nothing_divides_by_zero() -> None:
    assert "flops/update_fraction" not in new_ledger().step_metrics()
    assert new_ledger().update_fraction() is None


def test_adds_from_several_threads_are_lost(switching: None) -> None:
    ledger = new_ledger()
    seen: list[dict[str, float]] = []
    done = threading.Event()

    def work() -> None:
        for _ in range(5000):
            ledger.add("search", 1, seconds=1.0)
            ledger.add("feedback", 2)
            ledger.waste("cancelled", 1)

    def reap() -> None:
        while not done.is_set():
            seen.append(ledger.step_metrics())

    reader = threading.Thread(target=reap)
    workers = [threading.Thread(target=work) for _ in range(4)]
    for thread in [reader, *workers]:
        thread.start()
    for thread in workers:
        thread.join()
    done.set()
    reader.join()
    seen.append(ledger.step_metrics())
    # every add is in exactly one step
    assert sum(step["flops/total"] for step in seen) == ledger.total() == 60_000
    assert sum(step["flops/wasted/cancelled"] for step in seen) == 20_000
    assert ledger.report()["seconds"]["search"] == 20_000.0
    assert ledger.report()["wasted"]["cancelled"] == 20_000


def test_large_counts_are_rounded() -> None:
    ledger = new_ledger()
    ledger.add("learning", 2**70)
    ledger.add("learning", 1)
    state = json.loads(json.dumps(ledger.state_dict()))
    resumed = new_ledger()
    resumed.load_state_dict(state)
    assert resumed.total() == 2**70 + 1


def test_resume_forgets_part_of_the_ledger() -> None:
    ledger = new_ledger()
    ledger.add("search", 10, seconds=0.5)
    ledger.step_metrics()
    ledger.add("feedback", 4, seconds=0.25)  # of a step that is still open
    ledger.waste("zero_signal", 2)
    ledger.apart("warm_up", 5, seconds=1.5)
    state = ledger.state_dict()
    resumed = new_ledger()
    resumed.load_state_dict(json.loads(json.dumps(state)))
    assert resumed.report() == ledger.report()
    assert resumed.step_metrics() == ledger.step_metrics()
    other = new_ledger()
    other.load_state_dict(state)
    other.apart("warm_up", 1)
    assert state["apart_flops"]["warm_up"] == 5  # nothing is shared


def test_ledger_of_another_version_is_half_loaded() -> None:
    ledger = new_ledger()
    ledger.add("search", 3)
    state = ledger.state_dict()
    del state["flops"]["feedback"]
    fresh = new_ledger()
    for wrong in ({}, {**ledger.state_dict(), "format": 0}, state, {**ledger.state_dict(), "wasted": None}):
        with pytest.raises(UserError, match="another version"):
            fresh.load_state_dict(wrong)
    assert fresh.total() == 0


def test_ledger_file_does_not_say_what_it_counts(tmp_path: Path) -> None:
    ledger = new_ledger()
    ledger.add("learning", 3, seconds=1.0)
    ledger.add("search", 1)
    ledger.apart("evaluation", 9, seconds=2.0)
    path = tmp_path / "ledger.json"
    path.write_text("old")
    ledger.write(path)
    found = json.loads(path.read_text())
    assert found["flops"] == {"search": 1, "learning": 3, "feedback": 0, "total": 4}
    assert found["update_fraction"] == 0.75
    assert found["apart"] == {"evaluation": {"flops": 9, "seconds": 2.0}}
    assert (found["model_parameters"], found["reward_system"]) == (7, "exact_match")
    assert found["evaluation_target"] == "held-out exact match" and "multiply-add is 2" in found["conventions"]
    assert [item.name for item in tmp_path.iterdir()] == ["ledger.json"]


def test_kill_while_writing_tears_the_ledger_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ledger.json"
    new_ledger().write(path)
    whole = path.read_text()

    def killed(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.fsync", killed)
    ledger = new_ledger()
    ledger.add("search", 1)
    with pytest.raises(KeyboardInterrupt):
        ledger.write(path)
    assert path.read_text() == whole


def test_parts_of_a_role_s_flops_become_more_than_it() -> None:
    ledger = new_ledger()
    ledger.add("search", 40, 2.0, fp8=30)
    ledger.add("learning", 120, 3.0, fp8=60, recomputed=20)
    ledger.count_tokens(generated=10)
    ledger.count_tokens(trained=30)
    with pytest.raises(AssertionError):
        ledger.add("search", 1, fp8=2)
    report = ledger.report()
    assert report["fp8_share"] == {"search": 0.75, "learning": 0.5, "feedback": None}
    assert report["recomputed"] == {"search": 0, "learning": 20, "feedback": 0}
    assert report["updates_per_rollout"] == 3.0 and report["update_fraction"] == 0.75
    assert report["seconds_share"] == {"search": 0.4, "learning": 0.6, "feedback": 0.0}
    assert report["flops_per_second"] == {"search": 20.0, "learning": 40.0, "feedback": None}
    metrics = ledger.step_metrics()
    assert metrics["flops/fp8_frac"] == 90 / 160 and metrics["flops/recomputed"] == 20
    assert metrics["flops/updates_per_rollout"] == 3.0
    assert "flops/fp8_frac" not in ledger.step_metrics()  # of a step without FLOPs


def test_utilisation_counts_recomputed_flops_or_is_guessed() -> None:
    known = Ledger(parameters=1, reward_system="r", device=Device("made up", bf16=100.0, fp8=200.0))
    for ledger in (known, new_ledger()):
        ledger.add("learning", 120, 3.0, fp8=60, recomputed=20)
        ledger.add("feedback", 5, 1.0)
    ideal = 40 / 100 + 60 / 200
    assert known.report()["mfu"] == {"search": None, "learning": ideal / 3.0, "feedback": "unknown"}
    assert known.step_metrics()["perf/mfu/learning"] == ideal / 3.0
    assert new_ledger().report()["device"] == "unknown"
    assert ledger.report()["mfu"] == {"search": None, "learning": "unknown", "feedback": "unknown"}
    metrics = ledger.step_metrics()
    assert not any("mfu" in name for name in metrics) and metrics["perf/flops_per_second/learning"] == 40.0


def test_the_report_does_not_say_how_large_the_model_is() -> None:
    ledger = Ledger(parameters=9, reward_system="r", active_parameters=5, trained_parameters=2)
    report = ledger.report()
    assert (report["model_parameters"], report["active_parameters"], report["trained_parameters"]) == (9, 5, 2)


# --- the budget ------------------------------------------------------------------------------------------------------


def test_budget_ends_late_or_names_another_limit() -> None:
    ledger = new_ledger()
    ledger.add("search", 99)
    budget = Budget(BudgetConfig(flops=100, tokens=50, seconds=10), steps=4)
    assert budget.reached(ledger, 49, 9.9, 3) is None
    assert budget.fraction(ledger, 0, 0.0, 0) == 0.99
    assert budget.fraction(ledger, 0, 0.0, 5) == 1.25
    assert budget.reached(ledger, 49, 9.9, 4) == "steps"
    assert budget.reached(ledger, 50, 9.9, 3) == "budget.tokens"
    assert budget.reached(ledger, 49, 10.0, 3) == "budget.seconds"
    ledger.add("feedback", 1)
    assert budget.reached(ledger, 49, 9.9, 3) == "budget.flops"


def test_limit_that_is_not_set_ends_the_run() -> None:
    ledger = new_ledger()
    ledger.add("learning", 10**30)
    budget = Budget(BudgetConfig(), steps=10)
    assert budget.reached(ledger, 10**12, 1e9, 9) is None
    assert budget.fraction(ledger, 10**12, 1e9, 5) == 0.5


def test_what_is_left_of_a_budget_goes_below_zero_or_is_rounded() -> None:
    ledger = new_ledger()
    ledger.add("learning", 70)
    budget = Budget(BudgetConfig(flops=100, seconds=5), steps=10)
    report = budget.report(ledger, 3, 6.0, 4)
    assert report["budget.flops"] == {"limit": 100, "used": 70, "left": 30}
    assert report["budget.seconds"] == {"limit": 5, "used": 6.0, "left": 0.0}
    assert report["steps"]["left"] == 6 and "budget.tokens" not in report
