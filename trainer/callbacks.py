"""What a program can follow of a run while it goes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trtl_rl.rollout import Group
    from trtl_rl.trainer.trainer import Trainer


class Callback:
    """Override what you need. Every method may call ``trainer.stop()``: the step under way is finished and saved.

    An exception ends the run as any other does, with what was produced kept.

    Example::

        class StopAt(Callback):
            def on_step(self, trainer, step, metrics):
                if metrics["reward"] > 0.9:
                    trainer.stop()

        Trainer(..., callbacks=[StopAt()]).train()
    """

    def on_step(self, trainer: Trainer, step: int, metrics: dict[str, float]) -> None:
        """After a step, in the learner's thread. ``metrics`` is the row of ``metrics.jsonl``."""

    def on_group(self, trainer: Trainer, group: Group) -> None:
        """When all answers of a prompt are scored, before they are trained on, in the thread that scored them; one group after
        another.

        It must not change them. A checkpoint does not wait for it, the end of the run does.
        """

    def on_refit(self, trainer: Trainer, version: int, metrics: dict[str, float]) -> None:
        """When the engine is at ``version``, in the learner's thread; ``metrics`` holds ``refit/…`` and ``timing_s/refit/…``."""

    def on_checkpoint(self, trainer: Trainer, path: Path) -> None:
        """When a checkpoint is whole, in the learner's thread."""


class Callbacks:
    """The callbacks of a trainer, called in order."""

    def __init__(self, trainer: Trainer, callbacks: Sequence[Callback]) -> None:
        self._trainer, self._callbacks = trainer, callbacks

    def step(self, step: int, metrics: dict[str, float]) -> None:
        for callback in self._callbacks:
            callback.on_step(self._trainer, step, metrics)

    def group(self, group: Group) -> None:
        for callback in self._callbacks:
            callback.on_group(self._trainer, group)

    def refit(self, version: int, metrics: dict[str, float]) -> None:
        for callback in self._callbacks:
            callback.on_refit(self._trainer, version, metrics)

    def checkpoint(self, path: Path) -> None:
        for callback in self._callbacks:
            callback.on_checkpoint(self._trainer, path)
