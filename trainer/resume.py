"""What a resume looks at before it loads anything: which checkpoint, the same run or not, and whether anything is left to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trtl_rl.config import RunConfig
from trtl_rl.errors import UserError
from trtl_rl.flops.ledger import Budget, Ledger
from trtl_rl.metrics import MetricsWriter
from trtl_rl.trainer import checkpoint


def find(directory: Path, metrics: MetricsWriter) -> Path | None:
    """The newest whole checkpoint in ``directory``; what is torn is named. None where the run never came to save one.

    Raises:
        UserError: there are checkpoints, and none is whole; or the newest is another version's or another user's.
    """
    found, passed_over = checkpoint.newest(directory)
    for text in passed_over:
        metrics.message("warning", f"{text} It is passed over.")
    if found is not None:
        checkpoint.check_owner(found)
    elif passed_over:
        raise UserError(f"No checkpoint in {directory} is whole, so there is nothing to go on from. Start a new run.")
    else:
        metrics.message("warning", "The run had not saved a checkpoint yet: it begins again.")
    return found


def check_same_run(now: dict[str, Any], saved: dict[str, Any]) -> None:
    """Raise UserError for what may not change on resume: order of prompts, held-out rows or precision would."""
    changed = [key for key in now if now[key] != saved.get(key)]
    if changed:
        digests = f" (recipe digest {saved.get('recipe')} in the checkpoint, {now['recipe']} now)"
        raise UserError(
            f"Not as in the run that was saved: {', '.join(changed)}{digests if 'recipe' in changed else ''}. It cannot go on so. "
            "Leave them as they were, or start a new run from its model."
        )


def nothing_to_do(config: RunConfig, saved: dict[str, Any], evaluated: frozenset[int]) -> str | None:
    """The limit that the run had reached already, its last evaluation included; None when something is left to do.

    Args:
        saved: State of the checkpoint.
        evaluated: Steps that were evaluated.

    Raises:
        UserError: ``steps`` is less than what was done.
    """
    run = saved["run"]
    if config.steps < run["step"]:
        raise UserError(
            f"steps={config.steps}, but the run has done {run['step']} already: ask for more, or leave it out."
        )
    ledger = Ledger(parameters=0, reward_system="")
    ledger.load_state_dict(saved["ledger"])
    reached = Budget(config.budget, config.steps).reached(ledger, run["tokens"], run["seconds"], run["step"])
    return None if config.evaluation.prompts and run["step"] not in evaluated else reached


def changed_versions(saved: dict[str, str], now: dict[str, str]) -> str:
    """Which versions differ, for people.

    >>> changed_versions({"torch": "2.12"}, {"torch": "2.13"})
    'torch 2.12 then, 2.13 now'
    """
    changed = [f"{name} {saved.get(name)} then, {value} now" for name, value in now.items() if saved.get(name) != value]
    return "; ".join(changed) or "another machine, or another choice of compile"
