"""RACE: a pilot grid of runs at equal FLOPs that shows in which regime of the update fraction a score is best.

Reward-Aware Compute Allocation of arXiv 2607.13389: run a few cells, log the split, fit the response per reward system *and*
per evaluation target, name the regime. A diagnostic, not a guarantee of held-out improvement.

``RACE_DIR`` holds ``race.json`` (the plan, then what was found), ``cells/`` with an ordinary run directory each, ``race.png``, and
``recommended-<reward system>.yaml``.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

from trtl_rl.config import RunConfig
from trtl_rl.errors import UserError
from trtl_rl.flops.formulas import ModelShape
from trtl_rl.flops.response import Response, fit_response
from trtl_rl.metrics import read_rows
from trtl_rl.trainer import checkpoint
from trtl_rl.trainer.race_plan import (
    HEADROOM,
    Cell,
    Lengths,
    Split,
    budget_for,
    cell_config,
    cell_name,
    default_axes,
    parse_axes,
    planned_steps,
    predict,
    spread,
)
from trtl_rl.trainer.race_time import Speed
from trtl_rl.trainer.trainer import Trainer

CAUTION = (
    "A diagnostic, not a guarantee of held-out improvement: it says where to spend, for these models, rewards and targets, "
    "at this budget."
)
NATIVE = "native reward"
_NO_SPLIT = Split(1.0, 1.0)
FEWEST = 4  # cells that a fit needs: the quadratic has three terms, and one cell is left out
_FORMAT = 1
_BESIDE = re.compile(r"/ci_(low|high)$|^eval/version_(first|last)$")  # of an evaluation: no scores


@dataclass(frozen=True)
class Outcome:
    """What a cell has done.

    Attributes:
        flops: By role.
        scores: By target: the native reward (mean of the last tenth of the steps), and every evaluation metric at the end.
        updates_per_rollout: Trained over generated tokens.
        early: Whether it ended before its budget, for want of signal or steps: then it is not at equal FLOPs.
    """

    steps: int
    flops: dict[str, int]
    update_fraction: float
    updates_per_rollout: float
    scores: dict[str, float]
    early: bool = False


class Race:
    """A planned grid in its directory.

    Attributes:
        base: The configuration that cells override, as a tree of plain values.
        rewards: Reward systems, each the value of ``rewards``; ``labels`` are their names.
        cells: In the order in which they run.
        speed: What an earlier run measured, to tell the time of cells; None: it is unknown.
    """

    def __init__(
        self,
        directory: Path,
        base: dict[str, Any],
        budget: float,
        rewards: list[Any],
        labels: list[str],
        lengths: Lengths,
        cells: list[Cell],
    ) -> None:
        self.directory, self.base, self.budget = directory, base, budget
        self.rewards, self.labels, self.lengths, self.cells = rewards, labels, lengths, cells
        self.speed: Speed | None = None
        self._trainer: Trainer | None = None
        self._stopped = False

    @classmethod
    def plan(
        cls,
        directory: Path,
        config: RunConfig,
        *,
        budget: float | None,
        count: int,
        rewards: Sequence[Any] = (),
        axes: Sequence[str] = (),
        answer_tokens: int | None = None,
    ) -> Race:
        """Choose the cells and check every one of their configurations; nothing is written or run.

        Args:
            budget: FLOPs of each cell; None: what ``STEPS`` steps of the costliest cell take.
            count: Cells of each reward system.
            rewards: Values of ``rewards``; none: the configuration's own.
            axes: ``key=v1,v2`` …; none: updates per rollout from few to many.
            answer_tokens: Mean length that the prediction assumes; default: ``sampling.max_new_tokens``, the longest.

        Raises:
            UserError: no held-out prompts, too few cells, or a cell that could not run; says what to do.
        """
        if not config.evaluation.prompts:
            raise UserError(
                "A RACE scores its cells on held-out prompts, and the configuration has none: set evaluation.prompts and "
                "task.held_out, for example task.held_out=512 evaluation.prompts=512."
            )
        if directory.exists() and any(directory.iterdir()):
            raise UserError(
                f"{directory} exists and is not empty. Choose another run_dir, or: trtl-rl race --resume {directory}"
            )
        base = config.model_dump(mode="json")
        base["run_dir"] = None
        systems = list(rewards) or [base["rewards"]]
        lengths = Lengths(_prompt_tokens(config), answer_tokens or config.sampling.max_new_tokens)
        race = cls(directory, base, budget or 1.0, systems, _labels(systems), lengths, [])
        candidates = parse_axes(axes) if axes else default_axes(config)
        chosen = []
        for index in range(len(systems)):
            known = [(overrides, race._predicted(index, overrides)) for overrides in candidates]
            chosen += [(index, overrides, split) for overrides, split in spread(known, count)]
        race.budget = budget or budget_for([split for _, _, split in chosen])
        for index, overrides, split in chosen:
            steps = planned_steps(race.budget, split)
            race.cells.append(Cell(cell_name(race.labels[index], overrides), index, overrides, steps, split))
        if len(race.cells) < FEWEST * len(systems):
            raise UserError(
                f"{len(race.cells) // len(systems)} cells for each reward system are too few for a fit: at least {FEWEST} are "
                "needed. Give --axis more values, or leave it out, and raise --cells."
            )
        names = [cell.name for cell in race.cells]
        if len(set(names)) < len(names):
            raise UserError("Two cells have the same settings: remove values that an --axis or --rewards repeats.")
        return race

    @classmethod
    def open(cls, directory: Path) -> Race:
        """A race that was planned before. Raises UserError where there is none."""
        file = directory / "race.json"
        if not file.is_file():
            raise UserError(f"{directory} is no RACE directory: it has no race.json.")
        data = json.loads(file.read_text())
        if data.get("format") != _FORMAT:
            raise UserError(f"{file} was written by another version of trtl-rl.")
        return cls(
            directory,
            data["base"],
            data["budget"],
            data["rewards"],
            data["labels"],
            Lengths(**data["lengths"]),
            [Cell.from_json(cell) for cell in data["cells"]],
        )

    def config_of(self, cell: Cell) -> RunConfig:
        """What the cell runs: its overrides, its reward system, the budget; the schedule ends with the budget."""
        fixed = {
            "run_dir": str(self.run_dir(cell)),
            "budget.flops": self.budget,
            "steps": HEADROOM * cell.steps,
        }
        return cell_config({**self.base, "rewards": self.rewards[cell.reward]}, {**cell.overrides, **fixed})

    def run_dir(self, cell: Cell) -> Path:
        return self.directory / "cells" / cell.name

    def seconds(self, cell: Cell) -> float | None:
        """How long a cell will take by ``speed``; None: unknown."""
        return None if self.speed is None else self.speed.seconds(self.config_of(cell), cell.split, cell.steps)

    def save(self, **found: Any) -> None:
        """Write ``race.json``: the plan, and what was found so far."""
        self.directory.mkdir(parents=True, exist_ok=True)
        data = {
            "format": _FORMAT,
            "caution": CAUTION,
            "budget": self.budget,
            "labels": self.labels,
            "lengths": vars(self.lengths),
            "cells": [cell.to_json() for cell in self.cells],
            **found,
            "rewards": self.rewards,
            "base": self.base,
        }
        part = self.directory / "race.json.part"
        part.write_text(json.dumps(data, indent=1) + "\n")
        os.replace(part, self.directory / "race.json")

    def outcome(self, cell: Cell) -> Outcome | None:
        """What a finished cell has done, from its run directory; None for one that has not finished."""
        run = self.run_dir(cell)
        if not (run / "ledger.json").is_file():
            return None
        rows = list(read_rows(run / "metrics.jsonl"))
        ends = [row for row in rows if row["kind"] == "end"]
        if not ends or ends[-1]["status"] != "done":
            return None
        steps = [row["metrics"]["reward"] for row in rows if row["kind"] == "step" and "reward" in row["metrics"]]
        last = steps[-max(1, len(steps) // 10) :]
        evaluations = [row["metrics"] for row in rows if row["kind"] == "evaluation"]
        ledger = json.loads((run / "ledger.json").read_text())
        targets = {
            name.removeprefix("eval/"): value for name, value in evaluations[-1].items() if not _BESIDE.search(name)
        }
        return Outcome(
            steps=ends[-1]["step"],
            flops={role: flops for role, flops in ledger["flops"].items() if role != "total"},
            update_fraction=ledger["update_fraction"],
            updates_per_rollout=ledger["updates_per_rollout"],
            scores={NATIVE: sum(last) / len(last), **targets},
            early=ledger["flops"]["total"] < self.budget,
        )

    def run(self, begun: Callable[[Cell], None], ended: Callable[[Cell, Outcome], None]) -> bool:
        """Run what is left of the grid; a cell that was interrupted goes on from its checkpoint.

        Args:
            begun, ended: Called for each cell; one that had finished before only ends.

        Returns:
            Whether all cells have finished: False after :meth:`stop`.
        """
        for cell in self.cells:
            if self._stopped:
                return False
            outcome = self.outcome(cell)
            if outcome is None:
                begun(cell)
                self._run(cell)
                outcome = self.outcome(cell)
                if outcome is None:
                    return False  # interrupted and saved
            ended(cell, outcome)
        return True

    def stop(self) -> None:
        """Finish the step under way, save and return from :meth:`run`."""
        self._stopped = True
        if self._trainer is not None:
            self._trainer.stop()

    def responses(self, outcomes: Mapping[str, Outcome]) -> dict[str, dict[str, Response]]:
        """Fits by reward system and target, over the rho that the cells really had."""
        found: dict[str, dict[str, Response]] = {}
        for index, label in enumerate(self.labels):
            done = [outcomes[cell.name] for cell in self.cells if cell.reward == index]
            rho = [outcome.update_fraction for outcome in done]
            targets = [name for name in done[0].scores if all(name in outcome.scores for outcome in done)]
            found[label] = {name: fit_response(rho, [outcome.scores[name] for outcome in done]) for name in targets}
        return found

    def recommend(self, outcomes: Mapping[str, Outcome], responses: Mapping[str, Mapping[str, Response]]) -> list[Path]:
        """Write a configuration for each reward system: that of the cell nearest to the best rho of the first held-out target,
        without the race's budget; where that is undecided, the base configuration as it is."""
        written = []
        for index, label in enumerate(self.labels):
            target = next(name for name in responses[label] if name != NATIVE)
            response = responses[label][target]
            overrides: dict[str, Any] = {}
            why = f"{target} is undecided ({response.reason}): nothing was shown to be better, so this is the base"
            if response.regime != "undecided" and response.optimum is not None:
                best = response.optimum
                cells = [cell for cell in self.cells if cell.reward == index]
                cell = min(cells, key=lambda item: abs(outcomes[item.name].update_fraction - best))
                overrides = cell.overrides
                why = f"{target}: {response.regime} regime, {response.reason}; the settings are those of {cell.name}"
            values = cell_config({**self.base, "rewards": self.rewards[index]}, overrides).model_dump(mode="json")
            del values["run_dir"]
            path = self.directory / f"recommended-{label}.yaml"
            comment = f"# {why}.\n# {CAUTION}\n# steps is the base's: set it, or budget.flops with many steps.\n"
            path.write_text(comment + yaml.safe_dump(values, sort_keys=False))
            written.append(path)
        return written

    def _predicted(self, index: int, overrides: dict[str, Any]) -> Split:
        """The split of a cell; its whole configuration is checked on the way, as a run would."""
        cell = Cell("check", index, overrides, 1, _NO_SPLIT)
        trainer = Trainer(args=self.config_of(cell))
        shape, c = ModelShape.from_hf_config(SimpleNamespace(**trainer.source.config)), trainer.config
        if c.lora.rank:
            shape = shape.adapted(c.lora.rank, c.lora.targets)
        return predict(c, shape, self.lengths, trainer.rewards)

    def _run(self, cell: Cell) -> None:
        run = self.run_dir(cell)
        resume = bool(checkpoint.whole(run / "checkpoints"))
        if run.exists() and not resume:
            shutil.rmtree(run)  # killed before its first checkpoint
        self._trainer = Trainer(args=self.config_of(cell), resume=resume)
        self._trainer.logs = False
        if not self._stopped:
            self._trainer.train()


def disagreements(responses: Mapping[str, Mapping[str, Response]]) -> list[str]:
    """Where the regime depends on what is measured, or on what rewards: one line each."""
    decided = [
        (label, target, response.regime)
        for label, targets in responses.items()
        for target, response in targets.items()
        if response.regime != "undecided"
    ]
    return [
        f"{label}, {target}: {regime}; but {other}, {another}: {else_}"
        for i, (label, target, regime) in enumerate(decided)
        for other, another, else_ in decided[i + 1 :]
        if regime != else_
    ]


def _labels(systems: Sequence[Any]) -> list[str]:
    """A short name for each reward system."""
    labels: list[str] = []
    for system in systems:
        items = system if isinstance(system, list) else [system]
        names = [str(item["name"] if isinstance(item, dict) else item).rpartition(":")[2] for item in items]
        base = "+".join(names)
        label, number = base, 1
        while label in labels:
            number += 1
            label = f"{base}_{number}"
        labels.append(label)
    return labels


def _prompt_tokens(config: RunConfig) -> int:
    """Mean length of the run's first prompts."""
    from trtl_rl.model.loading import load_tokenizer
    from trtl_rl.tasks.stream_task import make_task

    trainer = Trainer(args=config.model_copy(update={"run_dir": None}))
    task = make_task(trainer.rows, trainer.config, load_tokenizer(trainer.source.path), trainer.prompt_room)
    order = task.order(config.seed)
    lengths = [len(task.prompt(*order.at(i)).ids) for i in range(64)]
    return round(sum(lengths) / len(lengths))
