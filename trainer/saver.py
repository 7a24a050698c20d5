"""``Saver``: everything that one checkpoint holds, put together at one instant."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtl_rl.errors import DiskError
from trtl_rl.flops.ledger import Budget, Ledger
from trtl_rl.metrics import MetricsWriter
from trtl_rl.trainer import buffer_state, checkpoint
from trtl_rl.trainer.record import RolloutRecord
from trtl_rl.trainer.rollouts import RolloutWorker
from trtl_rl.trainer.state import RunState

if TYPE_CHECKING:
    from accelerate import Accelerator


@dataclass
class Saver:
    """Saves a run.

    Attributes:
        constant: What every checkpoint of the run says: identity, configuration, versions.
        made_with: See :func:`trtl_rl.trainer.buffer_state.dependences`.
    """

    run_dir: Path
    keep: int
    metrics: MetricsWriter
    record: RolloutRecord
    accelerator: Accelerator
    parts: checkpoint.ModelParts
    worker: RolloutWorker
    ledger: Ledger
    budget: Budget
    constant: dict[str, Any]
    made_with: dict[str, Any]
    on_saved: Callable[[Path], None]

    def save(self, state: RunState) -> None:
        """Write a checkpoint. Raises DiskError, which names the one that is kept."""
        self.metrics.progress("checkpoint", 0, 1)
        self.metrics.sync()
        self.record.sync()
        position = self.worker.position()
        values = {
            "step": state.step,
            "run": vars(state),
            **self.constant,
            "ledger": position.ledger,
            "rollouts": buffer_state.to_json(position, self.made_with),
        }
        self.write_ledger(state)
        path = checkpoint.save(self.run_dir / "checkpoints", self.accelerator, values, self.parts, self.keep)
        self.metrics.progress("checkpoint", 1, 1)
        self.on_saved(path)

    def try_to_save(self, state: RunState) -> None:
        """Write a checkpoint; when the disk does not take it, say so and let the run go on."""
        try:
            self.save(state)
        except DiskError as error:
            self.metrics.progress("checkpoint", 1, 1)
            self.metrics.message("warning", f"{error} The run goes on, and tries again at the next checkpoint.")

    def add_to(self, state: RunState) -> None:
        """Let the checkpoint of this step, if there is one, know what has been counted since."""
        if checkpoint.path_of(self.run_dir / "checkpoints", state.step).exists():
            self.try_to_save(state)

    def write_ledger(self, state: RunState) -> dict[str, dict[str, float]]:
        """Bring ``ledger.json`` up to date. Returns what is used and left of the budget. Raises DiskError."""
        path = self.run_dir / "ledger.json"
        budget = self.budget.report(self.ledger, state.tokens, state.seconds, state.step)
        try:
            self.ledger.write(path, budget=budget)
        except OSError as error:
            raise DiskError(f"{path} cannot be written: {error.strerror}.") from error
        return budget
