"""The page of a report: what its template says about each run, as text."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from trtl_rl import __version__, metric_table
from trtl_rl.cli import panels
from trtl_rl.cli.figures import clean, duration, evaluation_cells, number, percent, quantity, scores, teaching
from trtl_rl.cli.report.charts import DARK, LIGHT, Chart, Palette
from trtl_rl.cli.report.history import SAME, History, compare, mean
from trtl_rl.cli.view import finite
from trtl_rl.metrics import Row

_MESSAGES = 12
_STATES = ("done", "interrupted", "failed", "unfinished")


@dataclass(frozen=True)
class Figure:
    """One of the large numbers at the top."""

    label: str
    value: str
    note: str = ""
    tone: str = ""


def page(runs: Sequence[History], charts: Sequence[tuple[Chart, str]]) -> str:
    """The HTML. Everything that comes from a run is escaped; drawings and style are inside, nothing is fetched.

    Args:
        charts: Each with its SVG.
    """
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html.j2").render(
        title=" · ".join(clean(run.name) for run in runs),
        runs=[_run(run) for run in runs],
        equal=_equal(runs),
        charts=[{"title": c.title, "note": c.note, "svg": Markup(svg)} for c, svg in charts],
        resumed=any(run.resumes for run in runs),
        light=Markup(_variables(LIGHT)),
        dark=Markup(_variables(DARK)),
        version=__version__,
        made=time.strftime("%Y-%m-%d %H:%M"),
        places=", ".join(clean(str(run.directory)) for run in runs),
    )


def _variables(palette: Palette) -> str:
    named = [f"--ink: {palette.ink}; --faint: {palette.faint}; --grid: {palette.grid};"]
    return " ".join([*named, *(f"--c{at}: {colour};" for at, colour in enumerate(palette.series))])


def _run(run: History) -> dict[str, Any]:
    flops = run.flops()
    total = sum(flops.values())
    seconds = _role_seconds(run.directory)
    return {
        "name": clean(run.name),
        "status": run.status if run.status in _STATES else "unfinished",
        "facts": panels.facts(run.view),
        "ended": _ended(run),
        "figures": _figures(run),
        "roles": [
            {
                "name": role,
                "flops": quantity(spent, "FLOP"),
                "share": percent(spent / total),
                "width": round(100 * spent / total, 2),
                "seconds": duration(seconds[role]) if role in seconds else "-",
            }
            for role, spent in flops.items()
        ]
        if total > 0
        else [],
        "role_seconds": bool(seconds),
        "total": quantity(total, "FLOP"),
        "wasted": [
            {
                "name": clean(fate).replace("_", " "),
                "flops": quantity(spent, "FLOP"),
                "share": percent(spent / total) if total else "-",
            }
            for fate, spent in run.wasted().items()
        ],
        "teaching": [
            {"name": label, "flops": quantity(spent, "FLOP")} for label, spent in teaching(run.view.chosen).items()
        ],
        "evaluations": _evaluations(run),
        "messages": [clean(f"{row['level']}: {row.get('text', '')}") for row in run.messages[-_MESSAGES:]],
        "more_messages": max(len(run.messages) - _MESSAGES, 0),
        "samples": _samples(run),
        "metrics": _metrics(run),
        "coverage": [*panels.coverage(run.view), clean(f"kernels: {run.view.facts.get('kernels', '-')}")],
        "versions": _versions(run),
        "configuration": _configuration(run.directory),
    }


def _ended(run: History) -> str:
    """Why a run that is not done ended, and where it was resumed."""
    view, parts = run.view, []
    if view.end is None:
        heard = "" if view.heard is None else time.strftime(" at %Y-%m-%d %H:%M:%S", time.localtime(view.heard))
        parts.append(f"Still running, or killed: the last row came after step {view.step}{heard}.")
    elif run.status != "done":
        parts.append(clean(view.end.get("text", ""), newline=" "))
    if run.resumes:
        parts.append(f"Resumed after step {', '.join(map(str, run.resumes))}.")
    return " ".join(parts)


def _figures(run: History) -> list[Figure]:
    view, last = run.view, run.steps[max(run.steps)] if run.steps else {}
    flops = run.flops()
    total = sum(flops.values())
    planned = f"of {view.steps}" if view.steps is not None else ""
    seconds = run.total("timing_s/step")
    probes = run.series("mismatch/max_abs")
    worst = max(probes.values, default=None)
    tokens = last.get("num_tokens")
    wasted = sum(run.wasted().values())
    return [
        _first_and_last(run, "reward", "reward"),
        _held_out(run),
        Figure("steps", str(view.step), planned),
        Figure("time of steps", duration(seconds) if seconds else "-", _per_step(run)),
        Figure("generated tokens", "-" if tokens is None else quantity(tokens), _speed(run)),
        Figure(
            "FLOPs",
            quantity(total, "FLOP") if total else "-",
            f"ρ {number(flops['learning'] / total)}: share of learning" if total else "",
        ),
        Figure("wasted", percent(wasted / total) if total else "-", "of the FLOPs served no update" if total else ""),
        Figure(
            "mismatch",
            number(worst),
            f"nats, the largest of {len(probes.values)} probes" if probes else "no probes",
            "" if worst is None else ("done" if worst == 0 else "failed"),
        ),
        _first_and_last(run, "asympo/imbalance", "imbalance S̄_N/S̄_P"),
        _first_and_last(run, "completions/mean_length", "answer length", "tokens"),
        _first_and_last(run, "entropy", "entropy", "nats per token"),
        Figure("staleness", number(_mean(run, "off_policy/mean")), "weight versions, mean"),
    ]


def _first_and_last(run: History, name: str, label: str, unit: str = "") -> Figure:
    """Means over the first and the last tenth of the steps."""
    values = run.series(name).values
    if not values:
        return Figure(label, "-")
    part = max(1, len(values) // 10)
    first, last = mean(values[:part]), mean(values[-part:])
    if len(values) == 1:
        return Figure(label, number(last, 2), unit)
    words = "step" if part == 1 else f"{part} steps"
    return Figure(label, f"{_short(first)} → {_short(last)}", f"{unit}, first and last {words}".lstrip(", "))


def _short(value: float | None) -> str:
    return number(value, 2 if value is not None and abs(value) < 10 else 1)


def _held_out(run: History) -> Figure:
    found = sorted(run.evaluations.items())
    if not found or not scores(found[-1][1]):
        return Figure("held out", "-", "no evaluation")
    (first, before), (last, after) = found[0], found[-1]
    name, value = next(iter(scores(after).items()))
    label = clean(name.removeprefix("eval/")).replace("_", " ")
    if first == last:
        return Figure("held out", number(value, 2), f"{label}, step {last}")
    return Figure(
        "held out", f"{number(before.get(name), 2)} → {number(value, 2)}", f"{label}, step {first} and {last}"
    )


def _mean(run: History, name: str) -> float | None:
    values = run.series(name).values
    return mean(values) if values else None


def _per_step(run: History) -> str:
    values = run.series("timing_s/step").values
    return f"median {duration(median(values))} a step" if values else ""


def _speed(run: History) -> str:
    values = run.series("perf/tokens_per_second").values
    return f"median {number(median(values), 0)} tokens/s" if values else ""


def _role_seconds(directory: Path) -> dict[str, float]:
    """Busy time by role from ``ledger.json``: rows carry the learner's time only. Nothing while a run has not saved yet."""
    try:
        seconds = json.loads((directory / "ledger.json").read_text())["seconds"]
        return {str(role): float(value) for role, value in seconds.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _evaluations(run: History) -> dict[str, Any]:
    found = sorted(run.evaluations.items())
    if len(found) > 6:
        found = [*found[:2], *found[-4:]]
    cells = [evaluation_cells(metrics) for _, metrics in found]
    names = dict.fromkeys(name.removeprefix("eval/") for _, metrics in found for name in scores(metrics))
    return (
        {
            "steps": ["before" if step == 0 else f"step {step}" for step, _ in found],
            "rows": [{"name": clean(name), "cells": [c.get(name, "-") for c in cells]} for name in names],
        }
        if names
        else {}
    )


def _samples(run: History) -> list[dict[str, Any]]:
    parts = [("At the start", run.first_samples), ("At the end", run.last_samples)]
    return [{"title": title, "rows": [_sample(row) for row in rows]} for title, rows in parts if rows]


def _sample(row: Row) -> dict[str, str]:
    version = finite(row.get("version"))
    return {
        "step": number(finite(row.get("step")), 0),
        "reward": number(finite(row.get("reward")), 2),
        "finish": clean(row.get("finish_reason", "-")),
        "version": "" if version is None else f"{version:.0f}",
        "prompt": clean(row.get("prompt", ""), newline="\n"),
        "completion": clean(row.get("completion", ""), newline="\n"),
    }


def _metrics(run: History) -> list[dict[str, Any]]:
    rows = []
    for name in run.names():
        values = run.series(name).values
        known = metric_table.find(name)
        cells = [number(value, 2) for value in (values[0], values[-1], min(values), max(values))]
        unit, meaning = (known.unit, known.meaning) if known is not None else ("", "")
        rows.append({"name": clean(name), "cells": cells, "unit": unit, "meaning": meaning})
    return rows


def _versions(run: History) -> list[tuple[str, str]]:
    found = run.view.facts.get("versions")
    return [(clean(name), clean(value)) for name, value in found.items()] if isinstance(found, dict) else []


def _configuration(directory: Path) -> str:
    try:
        return clean((directory / "config.yaml").read_text(errors="replace"), newline="\n")
    except OSError:
        return ""


def _equal(runs: Sequence[History]) -> dict[str, Any] | None:
    found = compare(runs)
    if not found:
        return None
    rows = []
    for at in found:
        evaluation = "-"
        if at.evaluation is not None:
            step, metrics = at.evaluation
            evaluation = f"{number(next(iter(scores(metrics).values()), None), 2)} at step {step}"
        rows.append(
            {
                "name": clean(at.run.name),
                "step": at.step,
                "reward": number(at.reward, 2),
                "evaluation": evaluation,
                "tokens": "-" if at.tokens is None else quantity(at.tokens),
                "time": duration(at.seconds),
            }
        )
    least = min(runs, key=lambda run: run.spent().values[-1])
    return {"flops": quantity(found[0].flops, "FLOP"), "least": clean(least.name), "same": percent(SAME), "rows": rows}
