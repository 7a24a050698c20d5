"""``trtl-rl race``: prints the plan, asks, runs the grid, and shows what it says about the update fraction."""

from __future__ import annotations

import contextlib
import importlib.util
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table
from rich.text import Text

from trtl_rl.cli.figures import clean, duration, number, percent, quantity
from trtl_rl.cli.progress import progress_bars
from trtl_rl.cli.race_curve import curve
from trtl_rl.cli.run import configuration
from trtl_rl.config import RunConfig
from trtl_rl.errors import UserError
from trtl_rl.flops.response import MODELS, Response
from trtl_rl.metrics import MetricsReader
from trtl_rl.trainer.race import CAUTION, Outcome, Race, disagreements
from trtl_rl.trainer.race_plan import STEPS, Cell
from trtl_rl.trainer.race_time import Speed

FEW_STEPS = 10
_POLL_SECONDS = 0.5


@dataclass(frozen=True)
class RaceOptions:
    """What the command line gives beside the configuration; see ``Race.plan``."""

    budget: float | None = None
    cells: int = 6
    rewards: tuple[str, ...] = ()
    axes: tuple[str, ...] = ()
    answer_tokens: int | None = None
    timed_by: Path | None = None
    yes: bool = False


def race(settings: list[str], options: RaceOptions, resume: Path | None) -> int:
    """Plan or take up a race, run it, show it. Returns the exit code."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("A RACE ends with a picture, and matplotlib is missing: pip install 'trtl-rl[report]'")
    if resume is None:
        speed = None if options.timed_by is None else Speed.of(options.timed_by)
        grid = _planned(configuration(settings, None), options)
        grid.speed = speed
    elif settings or options != RaceOptions(yes=options.yes):
        raise UserError("--resume goes on with the race's own plan: leave everything else out.")
    else:
        grid = Race.open(resume)
        grid.speed = _speed_of_a_cell(grid)
    console = Console(highlight=False)
    _print_plan(grid, console)
    if resume is None:
        if options.budget is None:
            console.print(
                f"The budget is what {STEPS} steps of the costliest cell take; --budget sets another.", soft_wrap=True
            )
        if not options.yes and not _confirmed(console):
            console.print("Nothing was run.")
            return 0
        grid.save()
    outcomes: dict[str, Outcome] = {}
    if not _run(grid, outcomes, console):
        console.print(
            Text(f"Interrupted and saved. Go on with: trtl-rl race --resume {grid.directory}"), soft_wrap=True
        )
        return 130
    show(grid, outcomes, console)
    return 0


def show(grid: Race, outcomes: dict[str, Outcome], console: Console) -> None:
    """Fit, print, draw and write everything that a finished grid says."""
    from trtl_rl.cli.race_picture import draw

    responses = grid.responses(outcomes)
    configurations = grid.recommend(outcomes, responses)
    draw(responses, grid.directory / "race.png", f"RACE at {quantity(grid.budget, 'FLOP')} a cell")
    found = {label: {name: r.to_json() for name, r in targets.items()} for label, targets in responses.items()}
    grid.save(outcomes={name: vars(outcome) for name, outcome in outcomes.items()}, responses=found)
    for table in (*_split_tables(grid, outcomes), *_score_tables(grid, outcomes)):
        console.print()
        console.print(table)
    for label, targets in responses.items():
        for target, response in targets.items():
            console.print()
            for drawn in curve(response, f"{label}: {target}", min(console.width - 1, 76), console.options.ascii_only):
                console.print(drawn, no_wrap=True)
    for table in (_regime_table(responses), _error_table(responses)):
        console.print()
        console.print(table)
    differ = disagreements(responses)
    console.print()
    for line in differ:
        console.print(Text(f"disagreement: {clean(line)}", style="bold"), soft_wrap=True)
    if not differ:
        console.print("No two targets or reward systems name different regimes.")
    console.print(Text(CAUTION), soft_wrap=True)
    for path in (*configurations, grid.directory / "race.png", grid.directory / "race.json"):
        console.print(Text(f"wrote {clean(path)}"), soft_wrap=True)


def _planned(config: RunConfig, options: RaceOptions) -> Race:
    directory = Path(config.run_dir or f"races/{time.strftime('%Y%m%d-%H%M%S')}-{Path(config.model).name or 'model'}")
    try:
        rewards: list[Any] = [yaml.safe_load(text) for text in options.rewards]
    except yaml.YAMLError as error:
        raise UserError(f"--rewards takes what the key rewards takes, for example '[exact_match]': {error}") from None
    return Race.plan(
        directory.expanduser(),
        config,
        budget=options.budget,
        count=options.cells,
        rewards=rewards,
        axes=options.axes,
        answer_tokens=options.answer_tokens,
    )


def _speed_of_a_cell(grid: Race) -> Speed | None:
    """What the last cell that has finished measured, if it says anything."""
    for cell in reversed(grid.cells):
        if grid.outcome(cell) is not None:
            with contextlib.suppress(UserError):
                return Speed.of(grid.run_dir(cell))
    return None


def _confirmed(console: Console) -> bool:
    """Ask on a terminal; without one, --yes is needed."""
    if not sys.stdin.isatty():
        raise UserError("Nothing was run: there is no terminal to ask on. Give --yes to run the plan above.")
    return console.input("Run it? [y/N] ", markup=False).strip().lower() in ("y", "yes")


def _print_plan(grid: Race, console: Console) -> None:
    lengths = grid.lengths
    total = quantity(grid.budget * len(grid.cells), "FLOP")
    done = {cell.name for cell in grid.cells if grid.outcome(cell) is not None}
    seconds = [0.0 if cell.name in done else grid.seconds(cell) for cell in grid.cells]
    console.print(
        f"RACE: {len(grid.cells)} cells of {quantity(grid.budget, 'FLOP')} each, {total} together; evaluations come on top. "
        f"Predicted for prompts of {lengths.prompt} tokens and answers of {lengths.answer}, every group with a signal:",
        soft_wrap=True,
    )
    table = _table("cell", "steps", "search", "learning", "feedback", "rho", "time")
    unknown = False
    for cell, taken in zip(grid.cells, seconds, strict=True):
        split = cell.split
        unknown |= split.feedback is None
        feedback = "?" if split.feedback is None else percent(split.feedback / split.total)
        shares = [percent(part / split.total) for part in (split.search, split.learning)]
        rho = number(split.update_fraction, 2) + ("?" if split.feedback is None else "")
        table.add_row(
            clean(cell.name), str(cell.steps), *shares, feedback, rho, "done" if cell.name in done else _time(taken)
        )
    console.print(table)
    if unknown:
        console.print("?: a reward model that does not say what it will spend; it is measured when it runs.")
    if len(done) < len(grid.cells):
        console.print(Text(_timing(grid, seconds)), soft_wrap=True)
    if (fewest := min(cell.steps for cell in grid.cells)) < FEW_STEPS:
        console.print(
            Text(f"Few steps: a cell takes {fewest}. A larger --budget would show more than a run's start."),
            soft_wrap=True,
        )
    console.print(Text(f"{CAUTION} Directory: {clean(grid.directory)}"), soft_wrap=True)


def _time(seconds: float | None) -> str:
    return "unknown" if seconds is None else f"~{duration(seconds)}"


def _timing(grid: Race, seconds: Sequence[float | None]) -> str:
    """Where predicted times come from, or how to get some."""
    if grid.speed is None:
        return "Time: unknown. --timed-by RUN tells it from a run of this configuration on this machine; steps=5 are enough."
    known = [taken for taken in seconds if taken is not None]
    text = f"Time: by what {clean(grid.speed.source)} measured, on a machine as busy as then; "
    if len(known) == len(seconds):
        return f"{text}about {duration(sum(known))} in all."
    differs = sorted({key for cell in grid.cells for key in grid.speed.differs(grid.config_of(cell))})
    why = f"{', '.join(differs)} differ" if differs else "a reward spends FLOPs of which it shows nothing"
    return f"{text}unknown where {why}."


def _run(grid: Race, outcomes: dict[str, Outcome], console: Console) -> bool:
    """Run the cells with a bar each, or a line each without a terminal. Returns whether all have finished."""
    presses = 0

    def interrupted(number: int, frame: FrameType | None) -> None:
        nonlocal presses
        presses += 1
        if presses > 1:
            raise KeyboardInterrupt
        grid.stop()

    def ended(cell: Cell, outcome: Outcome) -> None:
        outcomes[cell.name] = outcome
        grid.save(outcomes={name: vars(item) for name, item in outcomes.items()})
        if not sys.stderr.isatty():
            console.print(
                f"{clean(cell.name)}: {outcome.steps} steps, {quantity(sum(outcome.flops.values()), 'FLOP')}, rho "
                f"{number(outcome.update_fraction, 2)}, "
                + ", ".join(f"{clean(name)} {number(score, 2)}" for name, score in outcome.scores.items()),
                soft_wrap=True,
            )

    before = {number: signal.signal(number, interrupted) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with progress_bars() as progress:
            for cell in grid.cells:
                progress(clean(cell.name), 0, 100)
            follower = _Follower(progress)
            try:
                return grid.run(lambda cell: follower.follow(cell, grid.run_dir(cell)), ended)
            finally:
                follower.close()
    finally:
        for number_, handler in before.items():
            signal.signal(number_, handler)


class _Follower:
    """Moves the bar of the cell that runs, from what its ``metrics.jsonl`` says of the budget."""

    def __init__(self, progress: Callable[[str, int, int], None]) -> None:
        self._progress = progress
        self._stop = threading.Event()
        self._current: tuple[str, MetricsReader] | None = None
        self._thread = threading.Thread(target=self._run, name="race progress", daemon=True)
        self._thread.start()

    def follow(self, cell: Cell, run_dir: Path) -> None:
        if self._current is not None:
            self._progress(self._current[0], 100, 100)
        self._current = clean(cell.name), MetricsReader(run_dir / "metrics.jsonl")

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(_POLL_SECONDS):
            if self._current is None:
                continue
            name, reader = self._current
            for row in reader.poll():
                if row.get("kind") == "step":
                    share = float(row["metrics"].get("flops/budget_frac") or 0.0)
                    self._progress(name, min(100, round(100 * share)), 100)


def _split_tables(grid: Race, outcomes: dict[str, Outcome]) -> list[Table]:
    """What each cell spent, by reward system."""
    tables = []
    for label, cells in _by_reward(grid):
        table = _table(label, "steps", "FLOPs", "search", "learning", "feedback", "rho", "updates")
        for name, cell in cells:
            outcome = outcomes[cell.name]
            total = sum(outcome.flops.values())
            table.add_row(
                name,
                str(outcome.steps),
                quantity(total) + ("!" if outcome.early else ""),
                *(percent(outcome.flops[role] / total) for role in ("search", "learning", "feedback")),
                number(outcome.update_fraction, 2),
                number(outcome.updates_per_rollout, 2),
            )
        tables.append(table)
    early = any(outcome.early for outcome in outcomes.values())
    tables[-1].caption = "updates: trained over generated tokens" + (
        ". !: ended before its budget, for want of signal or steps: not at equal FLOPs" if early else ""
    )
    return tables


def _score_tables(grid: Race, outcomes: dict[str, Outcome]) -> list[Table]:
    """What each cell reached, by reward system."""
    targets = list(dict.fromkeys(name for outcome in outcomes.values() for name in outcome.scores))
    tables = []
    for label, cells in _by_reward(grid):
        table = _table(label, "rho", *(target.replace("_", " ") for target in targets))  # may be broken between words
        for name, cell in cells:
            outcome = outcomes[cell.name]
            scores = (number(outcome.scores.get(target), 3) for target in targets)
            table.add_row(name, number(outcome.update_fraction, 2), *scores)
        tables.append(table)
    return tables


def _by_reward(grid: Race) -> Iterator[tuple[str, list[tuple[str, Cell]]]]:
    """Each reward system with its cells, whose names are short beside its own."""
    for index, label in enumerate(grid.labels):
        cells = [cell for cell in grid.cells if cell.reward == index]
        yield label, [(clean(cell.name.removeprefix(f"{label}-")), cell) for cell in cells]


def _regime_table(responses: dict[str, dict[str, Response]]) -> Table:
    table = _table("rewards: target", "regime", "best rho", "95%", "p")
    for label, targets in responses.items():
        for target, r in targets.items():
            interval = "-" if r.interval is None else "–".join(number(end, 2) for end in r.interval)
            table.add_row(clean(f"{label}: {target}"), r.regime, number(r.optimum, 2), interval, number(r.p_value, 2))
    table.caption = "p: how often shuffled scores look as good"
    return table


def _error_table(responses: dict[str, dict[str, Response]]) -> Table:
    """Leave-one-out errors of the four fits."""
    table = _table("error at a left-out cell", *(name.replace("_", "-") for name in MODELS))
    for label, targets in responses.items():
        for target, r in targets.items():
            errors = (f"{r.fits[name].loo:.2g}" + ("*" if name == r.best else "") for name in MODELS)
            table.add_row(clean(f"{label}: {target}"), *errors)
    table.caption = "*: the least of the four"
    return table


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim", caption_style="dim")
    table.add_column(clean(first), no_wrap=True)
    columns: Sequence[str] = others
    for name in columns:
        table.add_column(clean(name), justify="right", overflow="fold")
    return table
