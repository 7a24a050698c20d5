"""The dashboard: what it draws from ``metrics.jsonl``, on screens of several sizes, in a terminal and in a pipe."""

from __future__ import annotations

import fcntl
import io
import json
import math
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

import pexpect
import pyte
import pytest
from rich.cells import cell_len
from rich.console import Console

from trtl_rl.cli.closing import print_closing
from trtl_rl.cli.dashboard import Display, Screen
from trtl_rl.cli.figures import bar, bounds, chart, clean, duration, quantity, resample, squeeze, wrap
from trtl_rl.cli.panels import frame
from trtl_rl.cli.rules import RULES, RULES_TEXT, style_of
from trtl_rl.cli.view import Curve, View
from trtl_rl.cli.watch import watch
from trtl_rl.errors import UserError
from trtl_rl.metrics import MetricsReader, MetricsWriter

STEPS = 300
NOW = 1_800_000_000.0
ESCAPE = "\x1b"
SIZES = [(80, 24), (160, 50), (110, 30), (200, 24), (60, 20), (40, 12), (20, 5), (8, 1)]


def step_metrics(step: int, **over: Any) -> dict[str, Any]:
    reward = 0.3 + 0.6 * (1 - math.exp(-step / 90))
    flops = {"search": 3.7e10, "learning": 8.2e10, "feedback": 0.0}
    metrics: dict[str, Any] = {
        "reward": reward,
        "reward_std": 0.3,
        "rewards/exact_match/mean": reward,
        "frac_reward_zero_std": 0.22,
        "completions/mean_length": 19.8,
        "completions/clipped_ratio": 0.01,
        "entropy": 0.2,
        "loss": 0.0,
        "grad_norm": 0.8,
        "learning_rate": 1e-4,
        "num_tokens": 5069.0 * step,
        "off_policy/mean": 1.0,
        "off_policy/max": 1,
        "asympo/imbalance": 8.2,
        "timing_s/step": 0.35,
        "timing_s/rollout_wait": 0.18,
        "timing_s/learn": 0.15,
        "timing_s/refit": 0.02,
        "timing_s/refit/quantise": 0.19,
        "perf/tokens_per_second": 14480.0,
        "flops/wasted/stale": 0.0,
        "flops/wasted/zero_signal": 2e10,
        "flops/total": sum(flops.values()),
    }
    for role, spent in flops.items():
        metrics[f"flops/{role}"] = spent
        metrics[f"flops/cumulative/{role}"] = spent * step
    if step % 10 == 0:
        metrics |= {"mismatch/differing_tokens": 0, "mismatch/max_abs": 0.0, "mismatch/tokens": 320}
    return metrics | over


def run_rows(steps: int = 120, *, end: bool = False, **over: Any) -> list[dict[str, Any]]:
    """Rows as a run writes them, the last one at ``NOW``."""
    start = {
        "model": "demo",
        "parameters": 344_064,
        "steps": STEPS,
        "task": "addition",
        "loss": "asympo",
        "recipe": "fp8_block",
        "kernels": "torch-1f2e3d4c",
    }
    rows: list[dict[str, Any]] = [
        {"kind": "start", **start},
        {"kind": "progress", "name": "compiling operators", "done": 0, "total": 4, "unit": "units"},
        {"kind": "progress", "name": "compiling operators", "done": 4, "total": 4, "unit": "units"},
        {"kind": "evaluation", "step": 0, "metrics": {"eval/exact_match": 0.31, "eval/greedy_exact_match": 0.75}},
    ]
    for step in range(1, steps + 1):
        rows.append({"kind": "step", "step": step, "metrics": step_metrics(step, **over)})
    sample = {"prompt": "47+85=", "completion": "7+5=12,4+8+1=13,132", "reward": 1.0, "finish_reason": "stop"}
    rows += [
        {"kind": "sample", "step": steps, **sample},
        {"kind": "message", "level": "info", "text": "checkpoint saved"},
    ]
    if end:
        metrics = {"eval/exact_match": 0.93, "eval/greedy_exact_match": 0.98}
        rows.append({"kind": "evaluation", "step": steps, "metrics": metrics})
        rows.append({"kind": "end", "status": "done", "step": steps, "text": "Your own model:\n  model: PATH"})
    for index, row in enumerate(rows):
        row["time"] = NOW - 0.35 * (len(rows) - 1 - index)
    return rows


def view_of(rows: list[dict[str, Any]], run_dir: str = "runs/2026-11-30-1910") -> View:
    view = View(run_dir)
    for row in rows:
        view.apply(row)
    return view


def draw(view: View, width: int = 80, height: int = 24, now: float = NOW) -> list[str]:
    """The frame through a console of that size, as a terminal would show it."""
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=True, record=True)
    for line in frame(view, width, height, now):
        console.print(line, no_wrap=True, crop=False)
    return console.export_text().rstrip("\n").split("\n")


def closing(view: View, **console: Any) -> str:
    out = io.StringIO()
    print_closing(view, Console(file=out, width=80, highlight=False, **console))
    return out.getvalue()


def write(run_dir: Path, rows: list[dict[str, Any]]) -> None:
    run_dir.mkdir(parents=True, exist_ok=True)
    with open(run_dir / "metrics.jsonl", "a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


# ---------------------------------------------------------------------------------------------- the frame


@pytest.mark.parametrize(("width", "height"), SIZES)
@pytest.mark.parametrize("steps", [0, 1, 120])
def test_no_line_is_wider_and_no_frame_higher_than_the_window(width: int, height: int, steps: int) -> None:
    rows = run_rows(steps, **{"asympo/imbalance": 31.0, "completions/clipped_ratio": 0.5, "frac_reward_zero_std": 0.9})
    rows[-2] |= {"prompt": "界" * 500, "completion": "word " * 500}
    rows[-1]["text"] = "a very long message " * 50
    view = view_of(rows, run_dir="/a/very/long/path" * 12)
    lines = draw(view, width, height, NOW + 100)
    assert len(lines) <= height
    assert max(map(cell_len, lines)) <= width


@pytest.mark.parametrize(("width", "height"), [(80, 24), (160, 50)])
def test_the_frame_shows_what_it_promises(width: int, height: int) -> None:
    text = "\n".join(draw(view_of(run_rows()), width, height))
    for part in (
        "demo (344 k parameters) · addition · asympo · fp8_block",
        "runs/2026-11-30-1910 · kernels torch-1f2e3d4c",
        "step 120/300",
        "ETA 1m02s",
        "reward 0.74",
        "search",
        "31%   4.4 TFLOP",
        "69%   9.8 TFLOP",
        "S̄_N/S̄_P  8.2",
        "0 tokens, max 0",
        "19.8",
        "47+85=",
        "7+5=12,4+8+1=13,132",
        "sample  reward 1.0",
        "checkpoint saved",
        "█",
    ):
        assert part in text, part


@pytest.mark.parametrize(("width", "height"), [(80, 24), (160, 50)])
def test_the_first_screen_has_at_most_sixteen_numbers(width: int, height: int) -> None:
    """An entry counts once: "31%  4.4 TFLOP", "120/300", "0 tokens, max 0", "axis 0 to 1"."""
    lines = draw(view_of(run_rows()), width, height)[2:]
    text = "\n".join(line for line in lines if not line.startswith("  ") or "FLOP" in line or "█" in line)
    text = re.sub(r"\d+% +[\d.]+ .?FLOP", "#", text)
    text = re.sub(r"0 tokens, max 0", "#", text)
    text = re.sub(r"\d+/\d+|axis \S+ to \S+", "#", text)
    text = re.sub(r"\d+m\d+s", "#", text)
    found = re.findall(r"#|\d+(?:\.\d+)?(?:e[+-]\d+)?", text)
    assert 12 <= len(found) <= 16, found


def test_a_long_run_directory_keeps_its_end() -> None:
    line = draw(view_of(run_rows(2), run_dir="/data/" + "x" * 100 + "/second-try"))[1]
    assert line.startswith("/data/x") and "…" in line and line.endswith("second-try · kernels torch-1f2e3d4c")


def test_missing_metrics_are_a_dash_and_never_a_crash() -> None:
    rows = run_rows(0)
    rows += [{"kind": "step", "time": NOW, "step": 1, "metrics": {}}, {"kind": "step"}, {"kind": "step", "metrics": 3}]
    wrong = {"reward": None, "asympo/imbalance": "high", "off_policy/mean": True}
    rows += [{"kind": "step", "step": 4, "metrics": wrong}]
    rows += [{"kind": "news from a later version"}, {"kind": "sample"}, {"kind": "message"}, {"kind": "progress"}, {}]
    view = view_of(rows)
    text = "\n".join(draw(view))
    assert "reward -" in text
    assert re.search(r"S̄_P +- ", text) and re.search(r"mismatch +- ", text) and re.search(r"staleness +- ", text)
    view.apply({"kind": "evaluation"})
    view.apply({"kind": "end"})
    assert "ended after 4 steps" in closing(view)


def test_rows_that_are_no_objects_are_passed_over(tmp_path: Path) -> None:
    write(tmp_path, [*run_rows(3), 7, [1], "text", None])  # type: ignore[list-item]
    out = io.StringIO()
    display = Display(tmp_path, out)
    display.load()
    assert display.view.step == 3


def test_mismatch_keeps_the_last_probe_between_probes() -> None:
    rows = run_rows(21)
    rows[4 + 19]["metrics"] |= {"mismatch/differing_tokens": 7, "mismatch/max_abs": 0.012}
    text = "\n".join(draw(view_of(rows)))
    assert "7 tokens, max 0.01" in text
    summary = closing(view_of(rows))
    assert "2 probes, at most 7 differing tokens" in summary


@pytest.mark.parametrize(
    ("rule", "over", "colour"),
    [
        ("mismatch", {"mismatch/differing_tokens": 1}, "red"),
        ("mismatch", {"mismatch/max_abs": 1e-6}, "red"),
        ("imbalance", {"asympo/imbalance": 20.1}, "yellow"),
        ("truncated", {"completions/clipped_ratio": 0.21}, "yellow"),
        ("zero-signal", {"frac_reward_zero_std": 0.51}, "yellow"),
    ],
)
def test_colour_comes_only_from_a_broken_rule(rule: str, over: dict[str, float], colour: str) -> None:
    calm, alarmed = view_of(run_rows(20)), view_of(run_rows(20, **over))
    for known in RULES:
        assert style_of(known.name, calm, NOW) == ""
        assert style_of(known.name, alarmed, NOW) == (colour if known.name == rule else "")
    assert not any(span.style in ("red", "yellow") for line in frame(calm, 80, 24, NOW) for span in line.spans)
    lines = frame(alarmed, 80, 24, NOW)
    assert any(span.style == colour for line in lines for span in line.spans), "the entry"
    assert any(line.style == colour and line.plain.startswith(rule) for line in lines), "the alert, in words"
    assert all(cell_len(line.plain) <= 80 and "…" not in line.plain for line in lines[-2:]), "alerts fit 80 columns"
    assert rule in RULES_TEXT


def test_a_stall_names_what_is_missed_and_ends_with_the_next_row() -> None:
    view = view_of(run_rows(20))
    assert view.stalled(NOW + 29) is None, "ten median steps are 3.5 s, but 30 s are the least"
    text = "\n".join(draw(view, now=NOW + 42))
    assert "ETA -" in text
    assert "no step for 42 s; last: step 20, mostly rollout wait" in text
    view.apply({"kind": "progress", "name": "evaluation", "done": 3, "total": 10, "unit": "prompts", "time": NOW + 43})
    assert view.stalled(NOW + 44) is None
    assert view.stalled(NOW + 99) == "last: evaluation, 3 of 10 prompts"
    slow = view_of(run_rows(20, **{"timing_s/step": 60.0}))
    assert slow.stalled(NOW + 599) is None and slow.stalled(NOW + 601) is not None
    assert view_of(run_rows(20, end=True)).stalled(NOW + 9999) is None


def test_a_resumed_run_is_not_stalled_while_it_loads() -> None:
    view = view_of([*run_rows(20), {"kind": "start", "steps": 300, "time": NOW + 3600}])
    assert view.stalled(NOW + 3700) is None


def test_work_before_the_first_step_shows_its_name_and_a_bar() -> None:
    view = view_of([{"kind": "start", "model": "demo"}])
    view.apply({"kind": "progress", "name": "compiling operators", "done": 1, "total": 4, "unit": "units"})
    line = draw(view)[2]
    assert line.startswith("compiling operators") and line.endswith("1/4 units") and "━" in line
    view.apply({"kind": "progress", "name": "loading model", "done": 0, "total": 0, "unit": ""})
    assert draw(view)[2] == "loading model …"


def test_budget_and_steps_the_nearer_end_gives_the_eta() -> None:
    rows = run_rows(100)
    for row in rows:
        if row["kind"] == "step":
            row["metrics"]["flops/budget_frac"] = row["step"] / 120
    seconds, by = view_of(rows).eta(NOW) or (0.0, "")
    assert by == "budget" and seconds == pytest.approx(20 * 0.35 - 0.7, abs=0.1)
    assert "(FLOP budget)" in "\n".join(draw(view_of(rows)))
    seconds, by = view_of(run_rows(100)).eta(NOW) or (0.0, "")
    assert by == "steps" and seconds == pytest.approx(200 * 0.35 - 0.7, abs=0.1)


def test_control_characters_of_a_model_cannot_steer_the_terminal() -> None:
    evil = "\x1b[2J\x1b]0;owned\x07\r\x9b31m\u202etxt\ud800 [bold red]no markup[/]"
    rows = run_rows(1, end=True)
    rows[-4] |= {"prompt": evil, "completion": evil, "finish_reason": evil}
    rows[-3]["text"] = evil
    rows[-1] |= {"text": evil, "status": evil}
    rows[0] |= {"model": evil, "kernels": evil}
    rows.insert(1, {"kind": "progress", "name": evil, "done": 1, "total": 2, "unit": evil, "time": NOW})
    for count in range(1, len(rows) + 1):
        view = view_of(rows[:count], run_dir=evil)
        text = "\n".join(line.plain for line in frame(view, 80, 24, NOW + 99))
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e\ud800]", text)
    assert "[bold red]no markup[/]" in closing(view)
    assert ESCAPE not in closing(view) and "\u202e" not in closing(view)


# -------------------------------------------------------------------------------------- curves and figures


def test_a_long_run_keeps_a_bounded_curve_with_the_right_means() -> None:
    curve = Curve(limit=200)
    for step in range(1, 100_001):
        curve.add(step, float(step))
    values = curve.values()
    assert len(values) <= 200
    assert values == sorted(values) and values[0] < 1000 and values[-1] > 99_000


def test_a_resumed_run_replaces_the_steps_that_it_repeats() -> None:
    rows = run_rows(20)
    again = [{"kind": "step", "step": step, "metrics": {"reward": 9.0}} for step in (11, 12)]
    view = view_of([*rows, {"kind": "start", "time": NOW}, *again])
    assert view.step == 12
    assert len(view.curve.values()) == 12 and view.curve.values()[-2:] == [9.0, 9.0]


def test_figures_round_across_units() -> None:
    assert [quantity(v, "FLOP") for v in (0, 999.4, 999.6, 99_960, 3.21e12)] == [
        "0 FLOP",
        "999 FLOP",
        "1.0 kFLOP",
        "100 kFLOP",
        "3.2 TFLOP",
    ]
    assert [duration(s) for s in (0.349, 9.999, 59.6, 3599.7, 90_000)] == ["0.35 s", "10 s", "1m00s", "1h00m", "1d01h"]


def test_curve_ends_and_extremes_are_drawn() -> None:
    assert resample([1.0, 2.0, 3.0, 4.0], 2) == [1.5, 3.5] and resample([1.0, 2.0], 4) == [1.0, 1.0, 2.0, 2.0]
    assert bounds([0.25, 0.5]) == (0.0, 0.5) and bounds([0.0]) == (0.0, 1.0) and bounds([-2.0, -1.0]) == (-2.0, -1.0)
    assert chart([0.0, 0.5, 1.0], 2) == ["  █", "▁██"]
    assert bar(0, 8) == "" and bar(1e-9, 8) == "▏" and bar(1, 8) == "█" * 8 and bar(7, 8) == "█" * 8


@pytest.mark.parametrize("text", ["short", "x" * 1000, "界" * 300, "a界" * 99, "e\u0301" * 200, ""])
@pytest.mark.parametrize("cells", [1, 2, 7, 40])
def test_cropped_text_fits_and_keeps_both_ends(text: str, cells: int) -> None:
    short = squeeze(text, cells)
    assert cell_len(short) <= cells
    assert short == text or "…" in short
    assert cells < 7 or not text or (short[0] == text[0] and short[-1] == text[-1])
    lines = wrap(clean(text), cells, 3)
    assert len(lines) <= 3 and all(cell_len(line) <= cells for line in lines)


# ------------------------------------------------------------------------------------- summary, plain lines


def test_the_summary_has_status_curve_ledger_evaluation_and_last_words() -> None:
    text = closing(view_of(run_rows(120, end=True)))
    for part in (
        r"done after 120 steps in 44 s",
        r"reward  0\.31 -> 0\.74",
        r"learning +9\.8 TFLOP +69%",
        r"total +14\.3 TFLOP +100%",
        r"of it zero signal +2\.4 TFLOP +17%",
        r"before +step 120",
        r"exact_match +0\.31 +0\.93",
        r"12 probes, at most 0 differing tokens",
        r"^runs/2026-11-30-1910 · kernels torch-1f2e3d4c$",
        r"run directory: runs/2026-11-30-1910",
        r"Your own model:\n  model: PATH",
        "█",
    ):
        assert re.search(part, text, re.M), part
    assert ESCAPE not in text


def test_paths_in_the_summary_are_not_broken_by_newlines() -> None:
    run_dir = "/data/" + "x" * 150
    assert f"run directory: {run_dir}\n" in closing(view_of(run_rows(2, end=True), run_dir=run_dir))


def test_a_pipe_gets_one_line_per_step_and_no_escape_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = run_rows(5, end=True)
    many = [{"kind": "progress", "name": "loading", "done": i, "total": 500, "unit": "files"} for i in range(501)]
    warning = {"kind": "message", "level": "warning", "text": "two\nlines"}
    with Screen(tmp_path):
        write(tmp_path, [rows[0], *many, warning, *rows[1:]])
    out = capsys.readouterr().out
    assert ESCAPE not in out
    lines = out.splitlines()
    assert [line for line in lines if line.startswith("loading")] == ["loading ...", "loading: done, 500 files"]
    assert "warning: two lines" in lines
    assert "evaluation at step 0  exact_match 0.31  greedy_exact_match 0.75" in lines
    steps = [line for line in lines if line.startswith("step ")][:5]
    assert [line.split("/")[0] for line in steps] == [f"step    {n}" for n in range(1, 6)]
    assert steps[0] == (
        "step    1/300  reward 0.31  exact_match 0.31  length 19.8  imbalance 8.2  staleness 1.0  mismatch -  "
        "flops 1.2e+11 (search 31% learning 69% feedback 0%)  0.35 s"
    )
    assert any(line.startswith("done after 5 steps") for line in lines)


def test_a_resumed_run_in_a_pipe_does_not_repeat_its_past(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, run_rows(50, end=True))
    with Screen(tmp_path):
        write(tmp_path, [{"kind": "start", "model": "demo", "time": NOW}])
        write(tmp_path, [{"kind": "step", "step": 51, "metrics": {"reward": 0.5}, "time": NOW}])
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert printed[0].startswith("step   51") and len(printed) == 2, "the step, and the summary's last state"


def test_the_summary_comes_before_the_exception_that_ends_a_run(tmp_path: Path) -> None:
    out = io.StringIO()
    with pytest.raises(RuntimeError, match="engine died"), Screen(tmp_path, out):
        write(tmp_path, run_rows(3))
        raise RuntimeError("engine died")
    assert "not finished: the last row came after 3 steps" in out.getvalue()


def test_attaching_to_a_resumed_run_in_a_pipe_tells_only_its_present_life(tmp_path: Path) -> None:
    old = {"kind": "message", "level": "warning", "text": "of the first life", "time": NOW}
    now = [{"kind": "start", "model": "second", "time": NOW}, {"kind": "message", "text": "of the second", "time": NOW}]
    write(tmp_path, [*run_rows(9), old, *now])
    out = io.StringIO()
    display = Display(tmp_path, out)
    display.load()
    display.begin()
    assert "second" in out.getvalue() and "info: of the second" in out.getvalue()
    assert "first life" not in out.getvalue() and "step " not in out.getvalue()


def test_a_run_that_never_began_prints_no_summary(tmp_path: Path) -> None:
    out = io.StringIO()
    with pytest.raises(UserError), Screen(tmp_path / "new", out):
        raise UserError("no such model")
    assert out.getvalue() == ""


def test_a_fault_of_the_drawing_does_not_end_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class FakeFullDisk(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError("no space left")

    write(tmp_path, [{"kind": "message", "text": "hello"}])
    screen = Screen(tmp_path, FakeFullDisk())
    screen._display.load()
    screen._stop.wait = lambda timeout=None: False  # type: ignore[method-assign]
    write(tmp_path, run_rows(1))
    screen._follow()
    error = capsys.readouterr().err
    assert "the run goes on" in error and "no space left" in error


# ------------------------------------------------------------------------------------------- reader and watch


def test_a_row_that_is_being_written_is_read_once_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    whole = json.dumps({"kind": "step", "step": 1, "metrics": {"reward": 1.0}})
    path.write_text(whole[:20])
    display = Display(tmp_path, io.StringIO())
    display.load()
    assert display.view.step == 0
    with open(path, "a") as file:
        file.write(whole[20:] + "\n" + whole[:15])
    display.tick(time.time())
    assert display.view.step == 1 and display.view.torn == 0
    writer = MetricsWriter(path)  # a kill tore the last row; the run is resumed
    writer.step(2, {"reward": 1.0})
    writer.close()
    display.tick(time.time())
    assert display.view.step == 2 and display.view.torn == 1


def test_a_long_file_read_in_parts_loses_no_row(tmp_path: Path) -> None:
    write(tmp_path, run_rows(40))
    expected = MetricsReader(tmp_path / "metrics.jsonl").poll()
    reader = MetricsReader(tmp_path / "metrics.jsonl")
    parts: list[Any] = []
    while chunk := reader.poll(1500):
        parts += chunk
    assert parts == expected
    tiny = MetricsReader(tmp_path / "metrics.jsonl")
    assert tiny.poll(10) == expected, "a row longer than the part is still read"


def test_watching_what_is_no_run_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere does not exist.*run's directory"):
        watch(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file"):
        watch(tmp_path / "file")


def test_a_finished_run_is_drawn_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, run_rows(30, end=True))
    assert watch(tmp_path) == 0
    out = capsys.readouterr().out
    assert out.count("run directory") == 1 and "done after 30 steps" in out and ESCAPE not in out
    assert len(re.findall(r"^step ", out, re.M)) == 1


WATCH = "import sys; from trtl_rl.cli.watch import watch; sys.exit(watch(sys.argv[1]))"


def environment(**over: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "LINES")}
    return kept | {"PYTHONPATH": os.pathsep.join(sys.path), "TERM": "xterm-256color", "PYTHONUTF8": "1"} | over


def set_size(terminal: int, height: int, width: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))


class Terminal:
    """A program in a real terminal: what it wrote, as the screen shows it."""

    def __init__(self, *arguments: str, width: int = 80, height: int = 24, **env: str) -> None:
        size = (height, width)
        self.child = pexpect.spawn(sys.executable, list(arguments), dimensions=size, env=environment(**env), timeout=10)
        self.screen = pyte.Screen(width, height)
        self.stream = pyte.ByteStream(self.screen)
        self.raw = b""

    def pump(self) -> bool:
        try:
            data = self.child.read_nonblocking(65536, timeout=0.05)
        except pexpect.TIMEOUT:
            return True
        except pexpect.EOF:
            return False
        self.raw += data
        self.stream.feed(data)
        return True

    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.screen.display)

    def until(self, wanted: str, seconds: float = 8.0) -> str:
        end = time.monotonic() + seconds
        while wanted not in self.text():
            assert time.monotonic() < end, f"no {wanted!r} in\n{self.text()}"
            self.pump()
        return self.text()

    def finish(self) -> tuple[int | None, str]:
        while self.pump():
            pass
        self.child.close()
        return self.child.exitstatus, self.raw.decode(errors="replace")  # the echo of Ctrl-C may fall into a character

    def resize(self, width: int, height: int) -> None:
        self.child.setwinsize(height, width)
        self.screen.resize(height, width)


def test_watch_in_a_terminal_waits_follows_resizes_and_leaves_it_clean(tmp_path: Path) -> None:
    terminal = Terminal("-c", WATCH, str(tmp_path))
    terminal.until("waiting for the first row")
    now = time.time()
    rows = [row | {"time": now} for row in run_rows(12)]
    write(tmp_path, rows)
    shown = terminal.until("checkpoint saved")  # the last line of the frame
    assert "step 12/300" in shown and "7+5=12,4+8+1=13,132" in shown and "FLOPs by role" in shown
    write(tmp_path, [{"kind": "step", "step": 13, "metrics": step_metrics(13), "time": now}])
    terminal.until("step 13/300")
    terminal.resize(150, 40)
    wide = terminal.until("FLOPs by role").splitlines()
    end = time.monotonic() + 5
    while not (any("reward" in line and "FLOPs by role" in line for line in wide) or time.monotonic() > end):
        terminal.pump()
        wide = terminal.text().splitlines()
    assert any("reward" in line and "FLOPs by role" in line for line in wide), "two columns after the resize"
    terminal.child.sendintr()
    code, raw = terminal.finish()
    assert code == 130
    assert raw.count("\x1b[?1049h") == raw.count("\x1b[?1049l") == 1, "the alternate screen is left"
    assert raw.rindex("\x1b[?25h") > raw.rindex("\x1b[?25l"), "the cursor is back"
    after = raw[raw.rindex("\x1b[?1049l") :]
    assert "not finished: the last row came after 13 steps" in after and "Traceback" not in raw


def test_a_pipe_says_that_nothing_has_come_yet(tmp_path: Path) -> None:
    command = [sys.executable, "-u", "-c", WATCH, str(tmp_path)]
    child = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == f"waiting for the first row of {tmp_path}/metrics.jsonl\n"
    write(tmp_path, run_rows(2, end=True))
    assert "done after 2 steps" in child.communicate(timeout=10)[0]
    assert child.returncode == 0


def test_watch_ends_by_itself_when_the_run_ends(tmp_path: Path) -> None:
    write(tmp_path, run_rows(3))
    terminal = Terminal("-c", WATCH, str(tmp_path), NO_COLOR="1")
    terminal.until("step 3/300")
    write(tmp_path, [{"kind": "end", "status": "done", "step": 3, "text": "bye"}])
    code, raw = terminal.finish()
    assert code == 0 and "done after 3 steps" in raw and "bye" in raw
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", raw), "NO_COLOR takes the colours, not the screen"


def test_a_dumb_terminal_gets_plain_lines(tmp_path: Path) -> None:
    write(tmp_path, run_rows(3))
    terminal = Terminal("-c", WATCH, str(tmp_path), TERM="dumb")
    terminal.until("step    3/300")
    write(tmp_path, [{"kind": "end", "status": "done", "step": 3}])
    code, raw = terminal.finish()
    assert code == 0 and "done after 3 steps" in raw and ESCAPE not in raw


def test_a_resize_is_drawn_at_the_next_tick_whatever_the_environment_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "33")
    monkeypatch.setenv("TERM", "xterm-256color")
    write(tmp_path, run_rows(3))
    master, slave = pty.openpty()
    with open(slave, "w", encoding="utf-8") as file, open(master, "rb", buffering=0) as seen:
        set_size(slave, 24, 80)
        display = Display(tmp_path, file)
        display.load()
        display.begin()
        widths = []
        for width in (80, 80, 60):
            set_size(slave, 24, width)
            file.flush()
            while select.select([seen], [], [], 0.1)[0]:
                seen.read(65536)
            display.tick(NOW)
            drawn = b""
            while select.select([seen], [], [], 0.1)[0]:
                drawn += seen.read(65536)
            rule = re.search("reward .*axis 0 to [0-9.]+", re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", drawn.decode()))
            widths.append(cell_len(rule.group()) if rule else None)
        display.leave()
    assert widths == [80, None, 60], "drawn, nothing new at the same moment, drawn at the new width"


RUN = """
import subprocess, sys, time
from pathlib import Path
from trtl_rl.cli.dashboard import Screen
from trtl_rl.metrics import MetricsWriter
run = Path(sys.argv[1])
writer = MetricsWriter(run / "metrics.jsonl")
with Screen(run):
    writer.write("start", model="demo", steps=2)
    print("printed by a reward function")
    subprocess.run([sys.executable, "-c", "print('printed by a child')"], stdout=sys.stdout)
    writer.step(1, {"reward": 0.5})
    time.sleep(0.6)
    writer.step(2, {"reward": 0.7})
    writer.write("end", status="done", step=2, text="last words")
print("after")
"""


def test_output_of_other_code_neither_spoils_the_screen_nor_is_lost(tmp_path: Path) -> None:
    terminal = Terminal("-c", RUN, str(tmp_path))
    shown = terminal.until("step 1/2")
    assert "printed by" not in shown
    code, raw = terminal.finish()
    assert code == 0
    after = raw[raw.rindex("\x1b[?1049l") :]
    assert "printed by a reward function" in after and "last words" in after and after.rstrip().endswith("after")
    assert "printed by a child" in (tmp_path / "logs" / "console.log").read_text()


def test_a_run_outlives_the_reader_of_its_pipe(tmp_path: Path) -> None:
    quiet = "\n".join(line for line in RUN.splitlines() if "print" not in line)
    (tmp_path / "run.py").write_text(quiet)
    command = f"{sys.executable} {tmp_path}/run.py {tmp_path} | head -n 1; echo code ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], env=environment(), capture_output=True, text=True, timeout=20)
    assert "code 0" in done.stdout and "Error" not in done.stderr, done.stderr
    assert '"end"' in (tmp_path / "metrics.jsonl").read_text()


def test_the_view_is_cheap_and_needs_no_torch() -> None:
    code = "import sys, trtl_rl.cli.dashboard, trtl_rl.cli.watch; print({'torch', 'transformers'} & set(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "set()"
    view = view_of(run_rows(3000))
    start = time.perf_counter()
    for _ in range(10):
        draw(view)
    assert (time.perf_counter() - start) / 10 < 0.1
