"""The report: one file that fetches nothing and runs nothing, right numbers, and runs in every state."""

from __future__ import annotations

import json
import re
import struct
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from metric_rows import NOW, run_rows, write

from trtl_rl.cli.report.charts import LIGHT, _figure
from trtl_rl.cli.report.command import _check, _name_apart, report
from trtl_rl.cli.report.history import History, Series, compare, smooth
from trtl_rl.cli.report.page import _evaluations, _held_out
from trtl_rl.cli.report.plots import all_charts
from trtl_rl.errors import UserError


class Page(HTMLParser):
    """Text, tags and attributes of a page; every open tag must be closed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(html)
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("p", "li"):
            while self.open and self.open[-1] in ("p", "li"):
                self.open.pop()
        assert self.open and self.open[-1] == tag, (tag, self.open[-5:])
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.text += data + " "


def made(run_dir: Path, rows: list[dict[str, Any]]) -> Page:
    write(run_dir, rows)
    assert report([run_dir]) == 0
    return Page((run_dir / "report" / "index.html").read_text())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with its report."""
    run_dir = tmp_path_factory.mktemp("runs") / "whole"
    rows = run_rows(120, end=True)
    for row in rows:
        if row["kind"] == "step":
            step = row["step"]
            row["metrics"] |= {"refit/bytes": 338e3, "refit/changed_frac": 0.05, "timing_s/refit/move": 0.01}
            rows[step]["note"] = "a field of a later version"
    sample = {"kind": "sample", "time": NOW, "prompt": "<script>alert(1)</script>", "finish_reason": "<i>"}
    rows[5:5] = [
        sample | {"step": 1, "completion": '</pre><img src="http://x/y.png" onerror=alert(1)>\u202e', "reward": 0.0}
    ]
    made(run_dir, rows)
    return run_dir


def test_the_page_holds_everything_and_fetches_nothing(whole: Path) -> None:
    html = (whole / "report" / "index.html").read_text()
    page = Page(html)
    tags = {tag for tag, _ in page.tags}
    assert not tags & {"script", "link", "img", "iframe", "object", "embed", "base", "form"}
    for _, attributes in page.tags:
        for name, value in attributes.items():
            assert name not in ("src", "srcset", "action") and not name.startswith("on"), (name, value)
            if name in ("href", "xlink:href"):
                assert (value or "").startswith("#"), value
    assert not re.search(r"url\((?!#)", html) and "@import" not in html
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids)), "drawings do not share ids"
    references = set(re.findall(r'(?:href="#|url\(#)([^")]+)', html))
    assert references and references <= set(ids), "every reference of a drawing is inside it"


def test_the_page_shows_the_runs_numbers(whole: Path) -> None:
    text = " ".join(Page((whole / "report" / "index.html").read_text()).text.split())
    for part in (
        "whole done",
        "0.31 → 0.93",
        "14.3 TFLOP",
        "ρ 0.69",
        "0 in all 12 probes",
        "learning 9.8 TFLOP 69%",
        "of it zero signal 2.4 TFLOP 17%",
        "exact_match 0.31 0.93",
        "47+85=",
        "Imbalance S̄_N / S̄_P",
        "Refit bytes",
        "Throughput",
        "Staleness",
        "Entropy",
    ):
        assert part in text, part


def test_what_a_model_wrote_is_text_and_not_markup(whole: Path) -> None:
    html = (whole / "report" / "index.html").read_text()
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in html and "onerror=alert(1)&gt;" in html
    assert "\u202e" not in html, "nor does it turn the direction of the page's text"


def test_plots_lie_beside_the_page_as_png(whole: Path) -> None:
    plots = {path.name: path.read_bytes() for path in (whole / "report").glob("*.png")}
    wanted = ["reward", "lengths", "truncation", "entropy", "mismatch", "staleness", "imbalance", "refit_times"]
    assert {f"{name}.png" for name in [*wanted, "refit_bytes", "flops", "time", "throughput"]} <= plots.keys()
    for data in plots.values():
        assert data[:8] == b"\x89PNG\r\n\x1a\n"
        width, height = struct.unpack(">II", data[16:24])
        assert width > 800 and height > 200


def test_colours_of_the_page_follow_light_and_dark(whole: Path) -> None:
    html = (whole / "report" / "index.html").read_text()
    assert "prefers-color-scheme: dark" in html
    drawings = html[html.index("<figure") : html.rindex("</figure>")]
    assert set(re.findall(r"#[0-9a-f]{6}\b", drawings)) <= set(), "drawings take every colour from the page"
    used = set(re.findall(r"var\((--\w+)\)", html))
    defined = set(re.findall(r"(--\w+):", html))
    assert used <= defined


SLOW = [pytest.param(state, marks=pytest.mark.slow) for state in ("unfinished", "failed", "resumed", "no probes")]


@pytest.mark.parametrize("state", ["started", "one step", *SLOW])
def test_runs_in_every_state_have_a_report(state: str, tmp_path: Path) -> None:
    rows = run_rows({"started": 0, "one step": 1}.get(state, 8))
    wanted = "unfinished"
    if state == "failed":
        rows.append({"kind": "end", "status": "failed", "step": 8, "text": "EngineError: died", "time": NOW})
        wanted = "EngineError: died"
    elif state == "resumed":
        again = [row | {"step": row["step"], "time": NOW} for row in rows if row["kind"] == "step" and row["step"] > 5]
        rows += [rows[0] | {"resumed_from": 5}, *again]
        wanted = "Resumed after step 5."
    elif state == "started":
        wanted = "No step was finished"
    elif state == "no probes":
        for row in rows:
            row["metrics"] = {"reward": 0.5} if row["kind"] == "step" else row.get("metrics", {})
        wanted = "No FLOPs were counted"
    page = made(tmp_path / "run", rows)
    assert wanted in " ".join(page.text.split())


def test_a_resumed_runs_lost_steps_count_once(tmp_path: Path) -> None:
    first = run_rows(20)
    resumed = [{"kind": "start", "resumed_from": 10, "time": NOW}]
    again = [row | {"metrics": row["metrics"] | {"reward": 9.0}} for row in first if row["kind"] == "step"][10:15]
    lost = {"kind": "evaluation", "step": 15, "metrics": {"eval/exact_match": 0.9}, "time": NOW}
    write(tmp_path, [*first, lost, *resumed, *again])
    run = History.read(tmp_path)
    assert list(run.steps) == list(range(1, 16)) and run.resumes == [10]
    assert run.series("reward").values[10:] == [9.0] * 5
    assert run.wasted() == {"zero_signal": 15 * 2e10} and 15 not in run.evaluations
    assert run.spent().values[-1] == pytest.approx(15 * 1.19e11)


def two_runs(tmp_path: Path) -> tuple[Path, Path]:
    long, short = tmp_path / "long", tmp_path / "short"
    write(long, run_rows(100))
    rows = run_rows(40)
    for row in rows:
        if row["kind"] == "step":
            row["metrics"] = {"reward": 1.0, "flops/total": 2.38e11, "flops/learning": 2.38e11, "timing_s/step": 1.0}
    write(short, rows)
    return long, short


def test_runs_are_compared_where_the_least_has_ended(tmp_path: Path) -> None:
    long, short = two_runs(tmp_path)
    one, other = compare([History.read(long), History.read(short)])
    assert one.flops == other.flops == pytest.approx(40 * 2.38e11)
    assert one.step == 80 and other.step == 40, "a step of the first costs half as much"
    assert one.window == 4 and other.reward == 1.0 and other.seconds == pytest.approx(40.0)


def test_runs_of_one_budget_are_compared_before_their_last_evaluation(tmp_path: Path) -> None:
    """A budget ends a run at the first step over it, so none of two spends just what the other did."""
    write(tmp_path / "a", run_rows(100, end=True))
    rows = run_rows(50, end=True)
    for row in rows:
        if row["kind"] == "step":  # twice the FLOPs, and 2 % more in the end
            row["metrics"]["flops/total"] *= 2.04
    write(tmp_path / "b", rows)
    found = compare([History.read(tmp_path / "a"), History.read(tmp_path / "b")])
    assert [(at.step, at.evaluation and at.evaluation[0]) for at in found] == [(100, 100), (50, 50)]


def test_intervals_and_versions_are_drawn_as_targets(tmp_path: Path) -> None:
    rows = run_rows(30, end=True)
    for row in rows:
        if row["kind"] == "evaluation":
            score = row["metrics"]["eval/exact_match"]
            row["metrics"] = {
                "eval/version_first": 3, "eval/exact_match": score,
                "eval/exact_match/ci_low": score - 0.05, "eval/exact_match/ci_high": score + 0.05,
            }  # fmt: skip
    write(tmp_path / "run", rows)
    run = History.read(tmp_path / "run")
    chart = next(chart for chart in all_charts([run]) if chart.name == "evaluation")
    axes = Figure().add_subplot()
    chart.draw(axes, LIGHT)
    assert [line.get_label() for line in axes.get_lines()] == ["exact_match"] and axes.get_ylim()[1] < 1.2
    (band,) = axes.collections
    assert band.get_paths()[0].get_extents().y1 == pytest.approx(0.98)
    assert _evaluations(run)["rows"] == [{"name": "exact_match", "cells": ["0.31 [0.26, 0.36]", "0.93 [0.88, 0.98]"]}]
    assert _held_out(run).value == "0.31 → 0.93"


def test_a_legend_is_wider_than_its_drawing(tmp_path: Path) -> None:
    for name in ("one", "another-" + "long-" * 8 + "name"):
        write(tmp_path / name, run_rows(30))
    runs = [History.read(tmp_path / "one"), History.read(tmp_path / ("another-" + "long-" * 8 + "name"))]
    for chart in all_charts(runs):
        with _figure(chart) as figure:
            figure.canvas.draw()
            for legend in figure.legends:
                box = legend.get_window_extent()
                assert box.x0 >= 0 and box.x1 <= figure.bbox.x1, chart.name


@pytest.mark.slow
def test_the_page_of_several_runs_compares_them(tmp_path: Path) -> None:
    long, short = two_runs(tmp_path)
    out = tmp_path / "both"
    assert report([long, short], out) == 0
    text = " ".join(Page((out / "index.html").read_text()).text.split())
    assert "At equal FLOPs" in text and "Each run up to 9.5 TFLOP, which is all that short spent" in text
    assert re.search(r"long 80 0\.6\d 0\.31 at step 0", text) and (out / "equal_flops.png").exists()


def test_runs_of_the_same_name_are_told_apart(tmp_path: Path) -> None:
    runs = [
        History.read(path) for path in (tmp_path / "a" / "run", tmp_path / "b" / "run") if not write(path, run_rows(1))
    ]
    _name_apart(runs)
    assert [run.name for run in runs] == ["a/run", "b/run"]


def test_a_report_never_overwrites_other_files(tmp_path: Path, whole: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "thesis.tex").write_text("precious")
    with pytest.raises(UserError, match="holds other files"):
        report([whole], tmp_path / "notes")
    (tmp_path / "web").mkdir()
    (tmp_path / "web" / "index.html").write_text("my own page")
    with pytest.raises(UserError, match="holds other files"):
        report([whole], tmp_path / "web")
    assert (tmp_path / "web" / "index.html").read_text() == "my own page"
    _check(whole / "report")  # its own report is replaced


def test_what_is_no_run_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run directory"):
        report([tmp_path])
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(UserError, match="holds no rows yet"):
        report([tmp_path])


def test_a_long_run_is_drawn_as_means_that_keep_its_level() -> None:
    series = Series(list(range(1, 10_001)), [float(step % 2) for step in range(10_000)])
    binned, size = series.binned(500)
    assert len(binned.steps) == 500 and size == 20 and set(binned.values) == {0.5}
    assert binned.steps == sorted(binned.steps) and binned.steps[-1] <= 10_000


def test_smoothing_keeps_length_level_and_ends() -> None:
    assert smooth([1.0, 1.0, 1.0], 3) == [1.0, 1.0, 1.0]
    assert smooth([0.0, 3.0, 0.0, 3.0], 3) == [1.5, 1.0, 2.0, 1.5]
    assert smooth([], 5) == [] and smooth([2.0], 1) == [2.0]


def test_the_dashboard_and_the_report_tell_the_same(whole: Path) -> None:
    run = History.read(whole)
    assert run.view.flops == run.flops() and run.view.wasted["zero_signal"] == run.wasted()["zero_signal"]
    assert run.view.step == max(run.steps) and json.loads(json.dumps(run.view.metrics)) == run.steps[run.view.step]
