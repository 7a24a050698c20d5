"""Plain lines for pipes, CI and dumb terminals: one per step, and one for what else happens. No escape codes."""

from __future__ import annotations

from trtl_rl.cli.figures import clean, duration, evaluation_cells, number, percent
from trtl_rl.cli.panels import coverage, facts, place
from trtl_rl.cli.view import ROLES, View, progress_of
from trtl_rl.metrics import Row


class PlainLines:
    """Turns rows into lines. ``view`` has taken each row before ``feed`` sees it."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._under_way: set[str] = set()
        self._stall_told = False

    def feed(self, row: Row) -> list[str]:
        """The lines for ``row``: none for samples and for progress that neither begins nor ends."""
        self._stall_told = self._stall_told and row.get("kind") in ("message", "part")
        match row.get("kind"):
            case "start":
                about = (place(self._view), facts(self._view), *coverage(self._view))
                return [f"run  {line}".replace(" · ", "  ") for line in about]
            case "progress":
                return self._progress(row)
            case "step":
                return [step_line(self._view)]
            case "message":
                return [f"{clean(row.get('level', 'info'))}: {clean(row.get('text', ''), newline=' ')}"]
            case "evaluation":
                return [self._evaluation()]
        return []

    def tick(self, now: float) -> list[str]:
        """A line when the run has stalled, once per stall."""
        missed = self._view.stalled(now)
        if missed is None or self._stall_told:
            return []
        self._stall_told = True
        return [f"warning: no progress for {duration(self._view.age(now))}; {clean(missed)}"]

    def _progress(self, row: Row) -> list[str]:
        work = progress_of(row)
        name = clean(work.name)
        if not work.finished:
            if name in self._under_way:
                return []
            self._under_way.add(name)
            return [f"{name} ..."]
        self._under_way.discard(name)
        return [f"{name}: done, {work.total:g} {clean(work.unit)}".rstrip()]

    def _evaluation(self) -> str:
        assert self._view.last_evaluation is not None, "the view has taken the row"
        step, metrics = self._view.last_evaluation
        values = (f"{clean(name)} {cell}" for name, cell in evaluation_cells(metrics).items())
        return f"evaluation at step {step}  " + "  ".join(values)


def step_line(view: View) -> str:
    """The last step as one line; a dash for what it lacks."""
    get = view.metrics.get
    parts = [f"step {view.step:>4}" + (f"/{view.steps}" if view.steps is not None else "")]
    parts.append(f"reward {number(get('reward'), 2)}")
    for name, value in view.metrics.items():
        if name.startswith("rewards/") and name.endswith("/mean"):
            parts.append(f"{clean(name.removeprefix('rewards/').removesuffix('/mean'))} {number(value, 2)}")
    parts.append(f"length {number(get('completions/mean_length'))}")
    parts.append(f"imbalance {number(get('asympo/imbalance'))}")
    parts.append(f"staleness {number(get('off_policy/mean'))}")
    tokens, largest = view.probe.get("mismatch/differing_tokens"), view.probe.get("mismatch/max_abs")
    mismatch = number(tokens, 0)
    parts.append(f"mismatch {mismatch}" + (f" (max {largest:.1e})" if largest else ""))
    spent = {role: get(f"flops/{role}", 0.0) for role in ROLES}
    total = get("flops/total", sum(spent.values()))
    if total > 0:
        shares = " ".join(f"{role} {percent(value / total)}" for role, value in spent.items())
        parts.append(f"flops {total:.1e} ({shares})")
    else:
        parts.append("flops -")
    seconds = get("timing_s/step")
    parts.append("-" if seconds is None else duration(seconds))
    return "  ".join(parts)
