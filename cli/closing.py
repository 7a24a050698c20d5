"""The summary at the end of a run, the same for ``run`` and ``watch``, terminal and pipe."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from trtl_rl.cli.figures import (
    ASCII_BLOCKS,
    BLOCKS,
    bounds,
    chart,
    clean,
    duration,
    evaluation_cells,
    number,
    percent,
    quantity,
    resample,
    teaching,
)
from trtl_rl.cli.panels import facts, place
from trtl_rl.cli.plain import step_line
from trtl_rl.cli.view import ROLES, View

_CHART_WIDTH, _CHART_HEIGHT = 76, 6


def print_closing(view: View, console: Console) -> None:
    """Print status, reward curve, FLOP ledger, evaluations, parity, the run directory and the run's own last words.

    Free text and paths are left to the terminal to wrap, so that they can be copied.
    """
    ascii_only = console.options.ascii_only
    console.print()
    console.print(_headline(view))
    for fact in (facts(view), place(view)):
        console.print(Text(fact.replace(" · ", ", ") if ascii_only else fact), soft_wrap=True)
    if values := view.curve.values():
        console.print()
        console.print(Text(f"reward  {number(values[0], 2)} -> {number(values[-1], 2)}"))
        for line in _curve(values, min(console.width - 1, _CHART_WIDTH), ASCII_BLOCKS if ascii_only else BLOCKS):
            console.print(line, no_wrap=True)
    for table in (_ledger(view), _evaluations(view)):
        if table is not None:
            console.print()
            console.print(table)
    console.print()
    for line in _remarks(view):
        console.print(line, soft_wrap=True)
    console.print(Text(f"run directory: {clean(view.run_dir)}"), soft_wrap=True)
    if view.end is not None and view.end.get("text"):
        console.print()
        console.print(Text(clean(view.end["text"], newline="\n")), soft_wrap=True)


def print_several(runs: Sequence[tuple[str, View]], console: Console) -> None:
    """One line a run: how it ended, and its main numbers."""
    table = _table("run", "steps", "status", "reward", "held out", "FLOPs", "learning")
    for name, view in runs:
        values, found = view.curve.values(), view.last_evaluation
        total = sum(view.flops.values())
        table.add_row(
            Text(clean(name), overflow="fold"),
            str(view.step),
            clean("not finished" if view.end is None else view.end.get("status", "ended")),
            f"{number(values[0], 2)} -> {number(values[-1], 2)}" if values else "-",
            number(next(iter(found[1].values()), None), 2) if found is not None else "-",
            quantity(total, "FLOP") if total > 0 else "-",
            percent(view.share("learning")),
        )
    console.print()
    console.print(table)


def _headline(view: View) -> Text:
    after = f"after {view.step} step{'' if view.step == 1 else 's'}"
    took = f" in {duration(view.heard - view.began)}" if view.heard is not None and view.began is not None else ""
    if view.end is None:
        return Text(f"not finished: the last row came {after}{took}", style="bold")
    status = clean(view.end.get("status", "ended"))
    return Text(f"{status} {after}{took}", style="bold red" if status == "failed" else "bold")


def _curve(values: list[float], width: int, levels: str) -> list[Text]:
    """The reward over all steps, with the ends of its vertical axis."""
    shown = resample(values, max(width - 9, 1))
    low, high = bounds(shown)
    labels = [number(high, 2), *[""] * (_CHART_HEIGHT - 2), number(low, 2)]
    rows = chart(shown, _CHART_HEIGHT, levels)
    return [Text.assemble((f"{label:>8} ", "dim"), row) for label, row in zip(labels, rows, strict=True)]


def _ledger(view: View) -> Table | None:
    total = sum(view.flops.values())
    if total <= 0:
        return None
    table = _table("role", "FLOPs", "share")
    for role in ROLES:
        table.add_row(role, quantity(view.flops[role], "FLOP"), percent(view.share(role)))
    table.add_row("total", quantity(total, "FLOP"), percent(1.0))
    for fate, spent in view.wasted.items():
        if spent > 0:
            table.add_row(f"  of it {clean(fate).replace('_', ' ')}", quantity(spent, "FLOP"), percent(spent / total))
    for label, flops in teaching(view.chosen).items():
        table.add_row(label, quantity(flops, "FLOP"), "")
    return table


def _evaluations(view: View) -> Table | None:
    first, last = view.first_evaluation, view.last_evaluation
    if first is None or last is None:
        return None
    columns = [first] if first[0] == last[0] else [first, last]
    found = [evaluation_cells(metrics) for _, metrics in columns]
    names = list(dict.fromkeys(name for cells in found for name in cells))
    table = _table("evaluation", *("before" if step == 0 else f"step {step}" for step, _ in columns))
    for name in names:
        table.add_row(clean(name), *(cells.get(name, number(None)) for cells in found))
    return table


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="right")
    return table


def _remarks(view: View) -> list[Text]:
    lines = [Text(step_line(view))] if view.step else []
    if view.probes:
        probes = f"parity: {view.probes} probe{'' if view.probes == 1 else 's'}"
        worst = f"at most {view.worst_tokens:.0f} differing tokens, largest difference {number(view.worst_abs)}"
        lines.append(Text(f"{probes}, {worst}", style="red" if view.worst_tokens or view.worst_abs else ""))
    if view.warnings:
        count = f"{view.warnings} warning{'' if view.warnings == 1 else 's'}; the last message: "
        lines.append(Text(count + clean((view.message or {}).get("text", ""))))
    if view.torn:
        lines.append(Text(f"{view.torn} torn line{'' if view.torn == 1 else 's'} of metrics.jsonl passed over"))
    return lines
