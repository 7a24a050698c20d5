"""What the dashboard draws from ``metrics.jsonl``, on screens of several sizes."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from metric_rows import ESCAPE, NOW, SIZES, closing, draw, run_rows, view_of, write
from rich.cells import cell_len

from trtl_rl.cli.dashboard import Display
from trtl_rl.cli.figures import bar, bounds, chart, clean, duration, quantity, resample, squeeze, wrap
from trtl_rl.cli.panels import frame
from trtl_rl.cli.rules import RED, RULES, YELLOW, style_of
from trtl_rl.cli.screens import SCREENS, Look, screen
from trtl_rl.cli.several import beside
from trtl_rl.cli.view import Curve

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


@pytest.mark.parametrize("budget", [False, True])
@pytest.mark.parametrize(("width", "height"), [(80, 24), (160, 50)])
def test_the_first_screen_has_at_most_sixteen_numbers(width: int, height: int, budget: bool) -> None:
    """An entry counts once: "31%  4.4 TFLOP", "120/300", both ETAs, "0 tokens, max 0", "axis 0 to 1"."""
    rows = run_rows()
    for row in rows:
        if row["kind"] == "step" and budget:
            row["metrics"]["flops/budget_frac"] = row["step"] / 500
    lines = draw(view_of(rows), width, height)[2:]
    assert any("by budget" in line for line in lines) == budget
    text = "\n".join(line for line in lines if not line.startswith("  ") or "FLOP" in line or "█" in line)
    text = re.sub(r"\d+% +[\d.]+ .?FLOP", "#", text)
    text = re.sub(r"0 tokens, max 0", "#", text)
    text = re.sub(r"\d+/\d+|axis \S+ to \S+", "#", text)
    time = r"(?:\d+ s|\d+m\d+s)"
    text = re.sub(rf"ETA {time} by \w+, {time} by \w+|ETA {time}", "#", text)
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
        ("mismatch", {"mismatch/differing_tokens": 1}, RED),
        ("mismatch", {"mismatch/max_abs": 1e-6}, RED),
        ("imbalance", {"asympo/imbalance": 4.0}, YELLOW),
        ("truncated", {"completions/clipped_ratio": 0.21}, YELLOW),
        ("zero-signal", {"frac_reward_zero_std": 0.51}, YELLOW),
    ],
)
def test_colour_comes_only_from_a_broken_rule(rule: str, over: dict[str, float], colour: str) -> None:
    rows, calm = run_rows(40, **over), view_of(run_rows(40))
    if rule == "imbalance":  # it has fallen from where it began; a low one alone is no alarm
        assert style_of(rule, view_of(rows), NOW) == ""
        for row, before in zip(rows, run_rows(40), strict=True):
            if row["kind"] == "step" and row["step"] <= 20:
                row["metrics"] = before["metrics"]
    alarmed = view_of(rows)
    for known in RULES:
        assert style_of(known.name, calm, NOW) == ""
        assert style_of(known.name, alarmed, NOW) == (colour if known.name == rule else "")
    assert not any(span.style in (RED, YELLOW) for line in frame(calm, 80, 24, NOW) for span in line.spans)
    lines = frame(alarmed, 80, 24, NOW)
    assert any(span.style == colour for line in lines for span in line.spans), "the entry"
    assert any(line.style == colour and line.plain.startswith(rule) for line in lines), "the alert, in words"
    assert all(cell_len(line.plain) <= 80 and "…" not in line.plain for line in lines[-2:]), "alerts fit 80 columns"
    help_text = "\n".join(line.plain for line in screen(alarmed, Look("h"), 80, 99, NOW, True))
    known = next(known for known in RULES if known.name == rule)
    assert f"{rule} {known.when}" in help_text and known.meaning in help_text


def test_a_stall_names_what_is_missed_and_ends_with_the_next_row() -> None:
    view = view_of(run_rows(20))
    assert view.stalled(NOW + 29) is None, "ten median steps are 3.5 s, but 30 s are the least"
    text = "\n".join(draw(view, now=NOW + 42))
    assert "ETA -" in text
    assert "no progress for 42 s; last: step 20, mostly rollout wait" in text
    view.apply({"kind": "progress", "name": "evaluation", "done": 3, "total": 10, "unit": "prompts", "time": NOW + 43})
    assert view.stalled(NOW + 44) is None
    assert view.stalled(NOW + 99) == "last: evaluation, 3 of 10 prompts"
    slow = view_of(run_rows(20, **{"timing_s/step": 60.0}))
    assert slow.stalled(NOW + 599) is None and slow.stalled(NOW + 601) is not None
    assert view_of(run_rows(20, end=True)).stalled(NOW + 9999) is None


def test_a_stalled_part_is_named_and_messages_do_not_hide_the_stall() -> None:
    view = view_of(run_rows(20))
    view.apply({"kind": "part", "name": "rollout_wait", "seconds": 20.0, "time": NOW + 20})
    view.apply({"kind": "message", "level": "warning", "text": "No batch for 60 s", "time": NOW + 60})
    text = "\n".join(draw(view, now=NOW + 61))
    assert "no progress for 1m01s; in waiting for rollouts (engine or reward functions)" in text
    timings = "\n".join(line.plain for line in screen(view, Look("t"), 80, 24, NOW + 61, True))
    assert "now: waiting for rollouts (engine or reward functions), 1m01s so far" in timings
    view.apply({"kind": "step", "step": 21, "metrics": {}, "time": NOW + 62})
    assert view.stalled(NOW + 63) is None and view.part is None


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


def test_the_eta_is_given_by_steps_and_by_budget_the_nearer_first() -> None:
    rows = run_rows(100)
    for row in rows:
        if row["kind"] == "step":
            row["metrics"]["flops/budget_frac"] = row["step"] / 120
    ends = view_of(rows).eta(NOW)
    assert ends == pytest.approx({"steps": 200 * 0.35 - 0.7, "budget": 20 * 0.35 - 0.7}, abs=0.1)
    assert "ETA 6 s by budget, 1m09s by steps" in "\n".join(draw(view_of(rows)))
    ends = view_of(run_rows(100)).eta(NOW)
    assert ends == pytest.approx({"steps": 200 * 0.35 - 0.7}, abs=0.1)
    assert "ETA 1m09s" in "\n".join(draw(view_of(run_rows(100))))


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


# ------------------------------------------------------------------------------- other screens, several runs


@pytest.mark.parametrize("key", list(SCREENS))
@pytest.mark.parametrize(("width", "height"), SIZES)
@pytest.mark.parametrize("steps", [0, 120])
def test_every_screen_fits_every_window(key: str, width: int, height: int, steps: int) -> None:
    rows = run_rows(steps)
    rows[-2] |= {"prompt": "界" * 500, "completion": "word\n" * 500}
    rows[-1]["text"] = "a very long message " * 50
    view = view_of(rows, run_dir="/a/very/long/path" * 12)
    lines = screen(view, Look(key), width, height, NOW, keys=True)
    assert len(lines) <= height and max(cell_len(line.plain) for line in lines) <= width


@pytest.mark.parametrize(
    ("key", "parts"),
    [
        ("s", ["step 120  reward 1.00  stop", "47+85=", "7+5=12,4+8+1=13,132"]),
        ("t", ["step", "0.35 s", "rollout wait", "quantise", "51%"]),
        ("l", ["search", "4.4 TFLOP", "31%", "zero signal", "17%", "0.689", "608 k", "exact_match 0.31"]),
        ("c", ["kernels torch-1f2e3d4c", "12 probes, at most 0 differing tokens"]),
        ("m", ["checkpoint saved"]),
        ("h", ["rules is broken", "stall no progress for 10 median steps", "S̄_N/S̄_P", "samples", "Ctrl-C"]),
    ],
)
def test_each_screen_shows_what_it_is_for(key: str, parts: list[str]) -> None:
    text = "\n".join(line.plain for line in screen(view_of(run_rows()), Look(key), 80, 60, NOW, keys=True))
    for part in parts:
        assert part in text, f"{part} in\n{text}"


def test_what_dynamic_sampling_cost_and_saved_is_on_the_ledger_screen_in_the_summary_and_survives_a_resume() -> None:
    rows = run_rows(20, end=True)
    for row in rows:
        if row["kind"] == "step":
            row["metrics"] |= {"sampling/refilled_groups": 2, "sampling/refilled_flops": 1e9}
            row["metrics"] |= {"sampling/skipped_prompts": 3, "sampling/skipped_flops": 5e8}
    again = [row for row in rows if row["kind"] == "step" and row["step"] > 10]
    view = view_of([*rows[:-1], *again, rows[-1]])  # ten steps are done again, and count once
    screen_lines = [line.plain.split() for line in screen(view, Look("l"), 80, 60, NOW, keys=True)]
    for words in (
        ["thrown", "away:", "40", "groups", "20.0", "GFLOP"],
        ["saved", "by", "passing", "over", "60", "prompts", "10.0", "GFLOP"],
    ):
        assert words in screen_lines
        assert words in [line.split() for line in closing(view).splitlines()]
    assert not [
        line for line in screen(view_of(run_rows()), Look("l"), 80, 60, NOW, keys=True) if "passing" in line.plain
    ]


def test_the_ledger_screen_cuts_off_evaluations_or_hides_what_is_left() -> None:
    rows = run_rows()
    for row in rows:
        if row["kind"] == "evaluation":
            row["metrics"] = {f"eval/target_{i}{end}": 0.5 for i in range(9) for end in ("", "/ci_low", "/ci_high")}
        if row["kind"] == "step":
            row["metrics"] |= {"budget/left/flops": 3.2e12, "budget/left/steps": 180}
    text = [line.plain.strip() for line in screen(view_of(rows), Look("l"), 80, 60, NOW, keys=True)]
    assert [line for line in text if "target" in line] == [f"target_{i} 0.50 [0.50, 0.50]" for i in range(9)]
    assert [line.split() for line in text if line.startswith("left")] == [
        ["left:", "flops", "3.2", "TFLOP"],
        ["left:", "steps", "180"],
    ]


def test_keys_open_and_close_screens_and_scrolling_stops_at_the_end() -> None:
    look, view = Look(), view_of(run_rows())
    look.press("h", 10)
    screen(view, look, 80, 12, NOW, keys=True)
    for _ in range(50):
        look.press("page down", 10)
        shown = screen(view, look, 80, 12, NOW, keys=True)
    assert "Ctrl-C" in shown[-2].plain, "the last line of the help"
    look.press("h", 10)
    assert look == Look(), "the same key leads back"
    look.press("t", 10)
    look.press("escape", 10)
    assert look.screen == ""
    look.press("9", 10)
    look.press("tab", 10)
    assert look.run is None, "one run has no neighbours"
    look.press("q", 10)
    assert look.quit


@pytest.mark.parametrize(("width", "height"), SIZES)
@pytest.mark.parametrize("count", [2, 5])
def test_several_runs_fit_every_window(width: int, height: int, count: int) -> None:
    views = [view_of(run_rows(30 * at)) for at in range(count)]
    names = [f"run-{at}-" + "x" * 40 for at in range(count)]
    lines = beside(views, names, Look(), width, height, NOW)
    assert len(lines) <= height and max(cell_len(line.plain) for line in lines) <= width


def test_several_runs_stand_beside_each_other_on_one_axis() -> None:
    good, poor = run_rows(60), run_rows(40, **{"asympo/imbalance": 30.0})
    poor[4]["metrics"] |= {"asympo/imbalance": 90.0}
    for row in poor[5:24]:
        row["metrics"] |= {"asympo/imbalance": 90.0}
    for row in poor:
        if row["kind"] == "step":
            row["metrics"]["reward"] = 0.01
    poor[0]["loss"] = "naive"
    look = Look()
    lines = beside([view_of(good), view_of(poor)], ["good", "poor"], look, 80, 30, NOW)
    text = "\n".join(line.plain for line in lines)
    assert re.search(r"1 good +2 poor", text)
    assert re.search(r"step +60/300 +40/300", text) and re.search(r"imbalance S̄_N/S̄_P +8.2 +30.0", text)
    assert re.search(r"broken rules +none +imbalance", text)
    top = lines[1].plain
    assert "█" in top[:50] or "▇" in top[:50] or "▆" in top[:50], "the better run reaches the top"
    assert not top[50:].strip(), "the poor one does not: both have one axis"
    assert any(span.style == YELLOW for line in lines for span in line.spans)
    look.press("2", 10, runs=2)
    assert look.run == 1
    look.press("escape", 10, runs=2)
    assert look.run is None
    many = [view_of(run_rows(9))] * 6
    look.press("right", 10, runs=6)
    shown = "\n".join(line.plain for line in beside(many, list("abcdef"), look, 80, 30, NOW))
    assert "2 b" in shown and " 1 a  " not in shown and "runs 2 to 3 of 6" in shown


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


def test_flops_of_steps_that_a_resumed_run_does_again_count_once() -> None:
    rows = run_rows(20)
    again = [{**row} for row in rows if row["kind"] == "step" and row["step"] > 10]
    view, straight = view_of([*rows, {"kind": "start", "time": NOW}, *again]), view_of(rows)
    assert view.wasted == straight.wasted and view.flops == straight.flops


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
