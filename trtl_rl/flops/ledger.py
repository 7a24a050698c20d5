"""The ledger: FLOPs by role, what became of them, and the budget (arXiv 2607.13389).

``C_total = C_search + C_learning + C_feedback`` and the update fraction ``rho = C_learning / C_total`` [R]: search is
generating rollouts, learning is updating the policy, feedback is reward models and verifiers. Waste is a fate of FLOPs
that a role counts already, never a fourth addend. Work outside the training loop (evaluation, warm-up) is kept apart:
it is in no total and in no budget.
"""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any, Literal, get_args

from trtl_rl.config_parts import BudgetConfig
from trtl_rl.errors import UserError
from trtl_rl.flops.formulas import CONVENTIONS

Role = Literal["search", "learning", "feedback"]
Waste = Literal["stale", "failed", "zero_signal", "truncated_untrained", "cancelled", "engine_death", "lease_expired"]

ROLES: tuple[Role, ...] = get_args(Role)
WASTES: tuple[Waste, ...] = get_args(Waste)
_FORMAT = 1


class Ledger:
    """Counts FLOPs per role, per step and in total. All methods may be called from several threads.

    FLOPs are integers, so that long runs add up exactly and resume to the same numbers.

    Args:
        parameters: Parameters of the model, for the report.
        reward_system: What scores the answers: the names of the reward functions.
        evaluation_target: What evaluation measures; ``none`` where a run evaluates nothing.
    """

    def __init__(self, *, parameters: int, reward_system: str, evaluation_target: str = "none") -> None:
        self.parameters = parameters
        self.reward_system = reward_system
        self.evaluation_target = evaluation_target
        self._lock = threading.Lock()
        self._flops: dict[str, int] = dict.fromkeys(ROLES, 0)
        self._seconds: dict[str, float] = dict.fromkeys(ROLES, 0.0)
        self._wasted: dict[str, int] = dict.fromkeys(WASTES, 0)
        self._apart_flops: dict[str, int] = {}
        self._apart_seconds: dict[str, float] = {}
        self._step_flops: dict[str, int] = dict.fromkeys(ROLES, 0)
        self._step_wasted: dict[str, int] = dict.fromkeys(WASTES, 0)

    def add(self, role: Role, flops: int, seconds: float = 0.0) -> None:
        """Count ``flops`` and the ``seconds`` that they took (busy time of that role, which may overlap others')."""
        assert role in ROLES and flops >= 0 and seconds >= 0
        with self._lock:
            self._flops[role] += int(flops)
            self._step_flops[role] += int(flops)
            self._seconds[role] += float(seconds)

    def waste(self, reason: Waste, flops: int) -> None:
        """Note that FLOPs which a role counts already served no update."""
        assert reason in WASTES and flops >= 0
        with self._lock:
            self._wasted[reason] += int(flops)
            self._step_wasted[reason] += int(flops)

    def apart(self, name: str, flops: int, seconds: float = 0.0) -> None:
        """Count work outside the loop, such as ``evaluation`` or ``warm_up``."""
        assert name not in ROLES and flops >= 0 and seconds >= 0
        with self._lock:
            self._apart_flops[name] = self._apart_flops.get(name, 0) + int(flops)
            self._apart_seconds[name] = self._apart_seconds.get(name, 0.0) + float(seconds)

    def total(self) -> int:
        """FLOPs of all three roles so far."""
        with self._lock:
            return sum(self._flops.values())

    def update_fraction(self) -> float | None:
        """rho so far; ``None`` before anything is counted."""
        with self._lock:
            return _fraction(self._flops)

    def step_metrics(self) -> dict[str, float]:
        """The metrics of the step that ends now, and zero its counters.

        ``flops/{search,learning,feedback,total}`` and ``flops/wasted/<reason>`` are this step's, ``flops/cumulative/…``
        the run's, and ``flops/update_fraction`` is the run's rho, left out while nothing is counted. Whatever another
        thread adds meanwhile is in this step or in the next, never in both.
        """
        with self._lock:
            out: dict[str, float] = {f"flops/{role}": self._step_flops[role] for role in ROLES}
            out["flops/total"] = sum(self._step_flops.values())
            out.update({f"flops/wasted/{reason}": self._step_wasted[reason] for reason in WASTES})
            out.update({f"flops/cumulative/{role}": self._flops[role] for role in ROLES})
            out["flops/cumulative/total"] = sum(self._flops.values())
            fraction = _fraction(self._flops)
            if fraction is not None:
                out["flops/update_fraction"] = fraction
            self._step_flops = dict.fromkeys(ROLES, 0)
            self._step_wasted = dict.fromkeys(WASTES, 0)
        return out

    def state_dict(self) -> dict[str, Any]:
        """Every counter, the open step's too, as plain JSON."""
        with self._lock:
            return {
                "format": _FORMAT,
                "flops": dict(self._flops),
                "seconds": dict(self._seconds),
                "wasted": dict(self._wasted),
                "apart_flops": dict(self._apart_flops),
                "apart_seconds": dict(self._apart_seconds),
                "step_flops": dict(self._step_flops),
                "step_wasted": dict(self._step_wasted),
            }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state_dict``.

        Raises:
            UserError: the state is of another format; nothing is changed then.
        """
        kept = ("flops", "seconds", "wasted", "apart_flops", "apart_seconds", "step_flops", "step_wasted")
        fits = (
            state.get("format") == _FORMAT
            and all(isinstance(state.get(key), dict) for key in kept)
            and set(state["flops"]) == set(state["seconds"]) == set(state["step_flops"]) == set(ROLES)
            and set(state["wasted"]) == set(state["step_wasted"]) == set(WASTES)
        )
        if not fits:
            raise UserError(
                "The checkpoint's FLOP ledger was written by another version of trtl-rl. Resume with that version, "
                "or start a new run from the checkpoint's model."
            )
        with self._lock:
            for key in kept:
                setattr(self, f"_{key}", dict(state[key]))

    def report(self) -> dict[str, Any]:
        """What ``ledger.json`` holds: what the paper asks to report [P], seconds, waste, work apart, conventions."""
        with self._lock:
            return {
                "model_parameters": self.parameters,
                "reward_system": self.reward_system,
                "evaluation_target": self.evaluation_target,
                "flops": {**self._flops, "total": sum(self._flops.values())},
                "update_fraction": _fraction(self._flops),
                "seconds": dict(self._seconds),
                "wasted": dict(self._wasted),
                "apart": {
                    name: {"flops": flops, "seconds": self._apart_seconds[name]}
                    for name, flops in self._apart_flops.items()
                },
                "conventions": CONVENTIONS,
            }

    def write(self, path: Path) -> None:
        """Replace ``path`` by the report as JSON. A kill leaves the old file or the new one, never half of one."""
        part = path.with_name(path.name + ".part")
        with open(part, "w", encoding="utf-8") as file:
            json.dump(self.report(), file, indent=2)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)


class Budget:
    """The limits of a run: ``steps`` and whatever ``budget`` sets. The first that is reached ends it.

    Args:
        config: Limits in FLOPs of all roles, in generated tokens and in seconds; ``None`` is no limit.
        steps: Largest number of updates.
    """

    def __init__(self, config: BudgetConfig, steps: int) -> None:
        assert steps >= 1
        self._limits: dict[str, float] = {"steps": steps}
        for name in ("flops", "tokens", "seconds"):
            limit = getattr(config, name)
            if limit is not None:
                self._limits[f"budget.{name}"] = limit

    def fraction(self, ledger: Ledger, tokens: int, seconds: float, step: int) -> float:
        """The largest used share of any limit: 1 or more where the run ends."""
        return max(self._shares(ledger, tokens, seconds, step).values())

    def reached(self, ledger: Ledger, tokens: int, seconds: float, step: int) -> str | None:
        """The key of a reached limit (the most exceeded one, ``steps`` or ``budget.…``), or ``None``.

        Args:
            tokens: Generated so far in the whole run.
            seconds: Of the whole run, what came before a resume included.
            step: Updates done.
        """
        shares = self._shares(ledger, tokens, seconds, step)
        name = max(shares, key=lambda key: shares[key])
        return name if shares[name] >= 1 else None

    def _shares(self, ledger: Ledger, tokens: int, seconds: float, step: int) -> dict[str, float]:
        used: dict[str, float] = {
            "steps": step,
            "budget.flops": ledger.total(),
            "budget.tokens": tokens,
            "budget.seconds": seconds,
        }
        return {name: used[name] / limit for name, limit in self._limits.items()}


def _fraction(flops: dict[str, int]) -> float | None:
    total = sum(flops.values())
    return flops["learning"] / total if total else None
