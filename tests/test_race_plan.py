"""RACE before it runs: the budget where none is given, and the time that cells will take."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import yaml
from metric_rows import write

from trtl_rl.cli.race import RaceOptions
from trtl_rl.cli.race import race as race_command
from trtl_rl.config import RunConfig, validate_config
from trtl_rl.errors import UserError
from trtl_rl.trainer.race import Race
from trtl_rl.trainer.race_plan import STEPS, Split
from trtl_rl.trainer.race_time import Speed


def config(**keys: Any) -> RunConfig:
    return validate_config({"task": {"held_out": 64}, "evaluation": {"prompts": 16}, **keys})


def earlier(run: Path, steps: int = 5, start: float = 10.0, **keys: Any) -> Path:
    """Each step searched 200 GFLOP in 2 busy seconds and learned 900 in 3; it took 4 seconds, the first one 12."""
    busy = {"timing_s/role/search": 2.0, "timing_s/role/learning": 3.0, "timing_s/role/feedback": 0.1}
    flops = {"flops/search": 2e11, "flops/learning": 9e11, "flops/feedback": 0.0}
    rows: list[dict[str, Any]] = [{"kind": "start", "time": 100.0, "start_seconds": start}]
    for step in range(1, steps + 1):
        seconds = 12.0 if step == 1 else 4.0
        rows.append({"kind": "step", "step": step, "metrics": {**busy, **flops, "timing_s/step": seconds}})
        rows[-1]["time"] = rows[-2]["time"] + seconds
    rows.append({"kind": "end", "time": rows[-1]["time"] + 7.0, "status": "done", "step": steps, "text": ""})
    write(run, rows)
    (run / "config.yaml").write_text(yaml.safe_dump(config(**keys).model_dump(mode="json")))
    return run


def test_the_time_of_a_cell_is_its_flops_over_one_speed_for_all_roles(tmp_path: Path) -> None:
    fresh = {"buffer": {"max_staleness": 0}}
    one_after_another = Speed.of(earlier(tmp_path / "a", **fresh))
    assert one_after_another.rates == {"search": 1e11, "learning": 3e11} and one_after_another.fixed == 17
    split = Split(search=4e11, learning=3e11)  # 4 s and 1 s
    assert one_after_another.seconds(config(**fresh), split, 10) == pytest.approx(17 + 10 * (4 / 5.1) * 5)
    beside = Speed.of(earlier(tmp_path / "b", buffer={"max_staleness": 1}))
    assert beside.seconds(config(buffer={"max_staleness": 1}), split, 10) == pytest.approx(17 + 10 * (4 / 3) * 4)


def test_a_time_is_guessed_where_nothing_was_measured(tmp_path: Path) -> None:
    speed = Speed.of(earlier(tmp_path / "run"))
    split = Split(1e11, 1e11)
    assert speed.seconds(config(), split, 3) is not None
    assert speed.seconds(config(), Split(1e11, 1e11, 1e9), 3) is None  # it had no reward model
    assert speed.seconds(config(), Split(1e11, 1e11, None), 3) is None
    for keys in (
        {"threads": 2},
        {"recipe": "none"},
        {"evaluation": {"prompts": 32}},
        {"lora": {"rank": 4}},
        {"buffer": {"max_staleness": 0}},
    ):
        assert speed.seconds(config(**keys), split, 3) is None
    assert speed.differs(config(threads=2, buffer={"max_staleness": 0})) == ["threads", "buffer.max_staleness"]
    with pytest.raises(UserError, match=r"tells no speed.*has 3"):
        Speed.of(earlier(tmp_path / "short", steps=3))
    with pytest.raises(UserError, match=r"no config\.yaml"):
        Speed.of(tmp_path)


def test_a_resumed_run_s_break_counts_as_time_of_its_start(tmp_path: Path) -> None:
    run = earlier(tmp_path / "run", start=1e4)
    write(run, [{"kind": "start", "time": 9e5, "start_seconds": 10.0}])
    rows = [(1, 12.0, 9e5 + 12), *((2 + i, 4.0, 9e5 + 16 + 4 * i) for i in range(4))]
    metrics = {"timing_s/role/search": 2.0, "timing_s/role/learning": 3.0, "timing_s/role/feedback": 0.1}
    metrics |= {"flops/search": 2e11, "flops/learning": 9e11, "flops/feedback": 0.0}
    write(run, [
        {"kind": "step", "step": 5 + i, "time": time, "metrics": {**metrics, "timing_s/step": seconds}} for i, seconds, time in rows
    ])  # fmt: skip
    assert Speed.of(run).fixed == 10


def test_a_budget_that_nobody_gave_lets_a_cell_do_nothing(tmp_path: Path) -> None:
    race = Race.plan(tmp_path / "r", config(), budget=None, count=4, answer_tokens=20)
    most = max(cell.split.total for cell in race.cells)
    assert STEPS * most <= race.budget <= 1.1 * STEPS * most
    assert min(cell.steps for cell in race.cells) in (STEPS, STEPS + 1, STEPS + 2)
    assert all(race.config_of(cell).budget.flops == race.budget for cell in race.cells)


def test_the_plan_does_not_say_how_long_it_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def plan(**options: Any) -> str:
        settings = ["task.held_out=64", "evaluation.prompts=16", f"run_dir={tmp_path / 'race'}"]
        with pytest.raises(UserError, match="--yes"):
            race_command(settings, RaceOptions(cells=4, **options), None)
        return capsys.readouterr().out

    unknown = plan()
    assert (
        unknown.count("  unknown\n") == 4
        and "--timed-by RUN tells it" in unknown
        and "20 steps of the costliest" in unknown
    )
    from trtl_rl.cli.run import configuration

    like = configuration(["task.held_out=64", "evaluation.prompts=16"], None).model_dump(mode="json")
    known = plan(timed_by=earlier(tmp_path / "run", **like), budget=1e13)
    assert "unknown" not in known and known.count("~") == 4 and "in all" in known.split("Time: by what")[1]
    assert "costliest" not in known and "Few steps" not in known
    assert "Few steps: a cell takes 1." in plan(budget=1e9)


def test_the_question_loses_its_choices_or_no_means_yes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class FakeTerminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr("sys.stdin", FakeTerminal("\n"))
    settings = ["task.held_out=64", "evaluation.prompts=16", f"run_dir={tmp_path / 'race'}"]
    assert race_command(settings, RaceOptions(cells=4), None) == 0
    shown = capsys.readouterr().out
    assert "Run it? [y/N]" in shown and "Nothing was run." in shown and not (tmp_path / "race").exists()
