"""The ledger: FLOPs by role, what became of them, and the budget (arXiv 2607.13389).

``C_total = C_search + C_learning + C_feedback`` and the update fraction ``rho = C_learning / C_total`` [R]: search is
generating rollouts, learning is updating the policy, feedback is reward models and verifiers. Waste is a fate of FLOPs
that a role counts already, never a fourth addend; so are the parts that were recomputed and that ran in FP8. Work outside
the training loop (evaluation, warm-up, filling rows) is kept apart: it is in no total and in no budget.
"""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any, Literal, get_args

from trtl_rl.config_parts import BudgetConfig
from trtl_rl.errors import UserError
from trtl_rl.flops.devices import UNKNOWN, Device
from trtl_rl.flops.formulas import CONVENTIONS

Role = Literal["search", "learning", "feedback"]
Waste = Literal["stale", "failed", "zero_signal", "cancelled", "engine_death", "lease_expired"]

ROLES: tuple[Role, ...] = get_args(Role)
WASTES: tuple[Waste, ...] = get_args(Waste)
_FORMAT = 2
_TOKENS = ("generated", "trained")
_KEPT = (
    "flops", "seconds", "fp8", "recomputed", "wasted", "tokens", "apart_flops", "apart_seconds", "step_flops", "step_seconds",
    "step_fp8", "step_recomputed", "step_wasted",
)  # fmt: skip


class Ledger:
    """Counts FLOPs per role, per step and in total. All methods may be called from several threads.

    FLOPs are integers, so that long runs add up exactly and resume to the same numbers.

    Args:
        parameters: Parameters of the model, for the report.
        active_parameters: Those that a token passes; default: all of them.
        trained_parameters: Those that learning moves; default: all of them.
        reward_system: What scores the answers: the names of the reward functions.
        evaluation_target: What evaluation measures; ``none`` where a run evaluates nothing.
        device: What search and learning run on; utilisation is told where its peak is known.
    """

    def __init__(
        self,
        *,
        parameters: int,
        reward_system: str,
        evaluation_target: str = "none",
        active_parameters: int | None = None,
        trained_parameters: int | None = None,
        device: Device | None = None,
    ) -> None:
        self.parameters = parameters
        self.active_parameters = parameters if active_parameters is None else active_parameters
        self.trained_parameters = parameters if trained_parameters is None else trained_parameters
        self.reward_system = reward_system
        self.evaluation_target = evaluation_target
        self.device = device or Device(UNKNOWN)
        self._lock = threading.Lock()
        self._flops: dict[str, int] = dict.fromkeys(ROLES, 0)
        self._seconds: dict[str, float] = dict.fromkeys(ROLES, 0.0)
        self._fp8: dict[str, int] = dict.fromkeys(ROLES, 0)
        self._recomputed: dict[str, int] = dict.fromkeys(ROLES, 0)
        self._wasted: dict[str, int] = dict.fromkeys(WASTES, 0)
        self._tokens: dict[str, int] = dict.fromkeys(_TOKENS, 0)
        self._apart_flops: dict[str, int] = {}
        self._apart_seconds: dict[str, float] = {}
        self._begin_step()

    def add(self, role: Role, flops: int, seconds: float = 0.0, *, fp8: int = 0, recomputed: int = 0) -> None:
        """Count ``flops`` and the ``seconds`` that they took (busy time of that role, which may overlap others').

        Args:
            fp8: Of ``flops``, the products of two FP8 operands.
            recomputed: Of ``flops``, what was computed a second time.
        """
        assert role in ROLES and flops >= 0 and seconds >= 0
        assert 0 <= fp8 <= flops and 0 <= recomputed <= flops
        with self._lock:
            for total, step, value in (
                (self._flops, self._step_flops, int(flops)),
                (self._fp8, self._step_fp8, int(fp8)),
                (self._recomputed, self._step_recomputed, int(recomputed)),
            ):
                total[role] += value
                step[role] += value
            self._seconds[role] += float(seconds)
            self._step_seconds[role] += float(seconds)

    def count_tokens(self, *, generated: int = 0, trained: int = 0) -> None:
        """Answer tokens that search drew, and that learning took a gradient from (each time that it did)."""
        assert generated >= 0 and trained >= 0
        with self._lock:
            self._tokens["generated"] += generated
            self._tokens["trained"] += trained

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
            return _share(self._flops["learning"], sum(self._flops.values()))

    def step_metrics(self) -> dict[str, float]:
        """The metrics of the step that ends now, and zero its counters.

        ``flops/{search,learning,feedback,total,recomputed}`` and ``flops/wasted/<reason>`` are this step's, and so are
        ``flops/fp8_frac``, ``timing_s/role/<role>`` (busy seconds), ``perf/flops_per_second/<role>`` and, where the device's
        peak is known, ``perf/mfu/<role>``. ``flops/cumulative/…``, ``flops/update_fraction`` (rho) and
        ``flops/updates_per_rollout`` are the run's. What nothing was counted for is left out. Whatever another thread adds
        meanwhile is in this step or in the next, never in both.
        """
        with self._lock:
            out: dict[str, float] = {f"flops/{role}": self._step_flops[role] for role in ROLES}
            total = sum(self._step_flops.values())
            out["flops/total"] = total
            out["flops/recomputed"] = sum(self._step_recomputed.values())
            out.update({f"flops/wasted/{reason}": self._step_wasted[reason] for reason in WASTES})
            out.update({f"flops/cumulative/{role}": self._flops[role] for role in ROLES})
            out["flops/cumulative/total"] = sum(self._flops.values())
            out.update({f"timing_s/role/{role}": self._step_seconds[role] for role in ROLES})
            maybe = {
                "flops/fp8_frac": _share(sum(self._step_fp8.values()), total),
                "flops/update_fraction": _share(self._flops["learning"], sum(self._flops.values())),
                "flops/updates_per_rollout": _share(self._tokens["trained"], self._tokens["generated"]),
            }
            for role in ROLES:
                flops, seconds, fp8 = self._step_flops[role], self._step_seconds[role], self._step_fp8[role]
                maybe[f"perf/flops_per_second/{role}"] = _share(flops, seconds) if flops else None
                if role != "feedback":  # it may run anywhere
                    maybe[f"perf/mfu/{role}"] = self._mfu(flops - self._step_recomputed[role], fp8, seconds)
            out.update({name: value for name, value in maybe.items() if value is not None})
            self._begin_step()
        return out

    def state_dict(self) -> dict[str, Any]:
        """Every counter, the open step's too, as plain JSON."""
        with self._lock:
            return {"format": _FORMAT, **{key: dict(getattr(self, f"_{key}")) for key in _KEPT}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state_dict``.

        Raises:
            UserError: the state is of another format; nothing is changed then.
        """
        keys = {key: set(getattr(self, f"_{key}")) for key in _KEPT if not key.startswith("apart_")}
        fits = (
            state.get("format") == _FORMAT
            and all(isinstance(state.get(key), dict) for key in _KEPT)
            and all(set(state[key]) == names for key, names in keys.items())
        )
        if not fits:
            raise UserError(
                "The checkpoint's FLOP ledger was written by another version of trtl-rl. Resume with that version, "
                "or start a new run from the checkpoint's model."
            )
        with self._lock:
            for key in _KEPT:
                setattr(self, f"_{key}", dict(state[key]))

    def report(self) -> dict[str, Any]:
        """What ``ledger.json`` holds: what the paper asks to report [P] (FLOPs by role, rho, model size, reward system,
        evaluation target), and beside it seconds, precision, recomputation, utilisation, waste, work apart, conventions.

        ``mfu`` is model FLOPs (without what was recomputed) over what the device's peak allows in a role's busy seconds.
        """
        with self._lock:
            total = sum(self._flops.values())
            busy = sum(self._seconds.values())
            return {
                "model_parameters": self.parameters,
                "active_parameters": self.active_parameters,
                "trained_parameters": self.trained_parameters,
                "reward_system": self.reward_system,
                "evaluation_target": self.evaluation_target,
                "flops": {**self._flops, "total": total},
                "flops_share": {role: _share(self._flops[role], total) for role in ROLES},
                "update_fraction": _share(self._flops["learning"], total),
                "tokens": dict(self._tokens),
                "updates_per_rollout": _share(self._tokens["trained"], self._tokens["generated"]),
                "recomputed": dict(self._recomputed),
                "fp8_share": {role: _share(self._fp8[role], self._flops[role]) for role in ROLES},
                "seconds": dict(self._seconds),
                "seconds_share": {role: _share(self._seconds[role], busy) for role in ROLES},
                "flops_per_second": {
                    role: _share(self._flops[role], self._seconds[role]) if self._flops[role] else None
                    for role in ROLES
                },
                "device": self.device.name,
                "mfu": {role: self._total_mfu(role) for role in ROLES},
                "wasted": dict(self._wasted),
                "wasted_share": _share(sum(self._wasted.values()), total),
                "apart": {
                    name: {"flops": flops, "seconds": self._apart_seconds[name]}
                    for name, flops in self._apart_flops.items()
                },
                "conventions": CONVENTIONS,
            }

    def write(self, path: Path, **more: Any) -> None:
        """Replace ``path`` by the report and ``more`` as JSON. A kill leaves the old file or the new one, never half of one."""
        part = path.with_name(path.name + ".part")
        with open(part, "w", encoding="utf-8") as file:
            json.dump({**self.report(), **more}, file, indent=2)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)

    def _begin_step(self) -> None:
        self._step_flops: dict[str, int] = dict.fromkeys(ROLES, 0)
        self._step_seconds: dict[str, float] = dict.fromkeys(ROLES, 0.0)
        self._step_fp8: dict[str, int] = dict.fromkeys(ROLES, 0)
        self._step_recomputed: dict[str, int] = dict.fromkeys(ROLES, 0)
        self._step_wasted: dict[str, int] = dict.fromkeys(WASTES, 0)

    def _mfu(self, flops: int, fp8: int, seconds: float) -> float | None:
        ideal = self.device.ideal_seconds(flops, min(fp8, flops))
        return None if ideal is None or not flops else _share(ideal, seconds)

    def _total_mfu(self, role: Role) -> float | str | None:
        """A share, ``None`` where nothing was counted, ``unknown`` without a peak; where feedback runs is not known."""
        if not self._flops[role]:
            return None
        if self.device.bf16 is None or role == "feedback":
            return UNKNOWN
        return self._mfu(self._flops[role] - self._recomputed[role], self._fp8[role], self._seconds[role])


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

    def report(self, ledger: Ledger, tokens: int, seconds: float, step: int) -> dict[str, dict[str, float]]:
        """``limit``, ``used`` and ``left`` (at least 0) of each limit that is set, by its key; arguments as in :meth:`reached`."""
        used = self._used(ledger, tokens, seconds, step)
        return {
            name: {"limit": limit, "used": used[name], "left": max(0.0, limit - used[name])}
            for name, limit in self._limits.items()
        }

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
        used = self._used(ledger, tokens, seconds, step)
        return {name: used[name] / limit for name, limit in self._limits.items()}

    @staticmethod
    def _used(ledger: Ledger, tokens: int, seconds: float, step: int) -> dict[str, float]:
        total = ledger.total()
        return {"steps": step, "budget.flops": total, "budget.tokens": tokens, "budget.seconds": seconds}


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None
