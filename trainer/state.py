"""What the loop carries from step to step, and a checkpoint keeps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class RunState:
    """What a checkpoint keeps beside weights and optimizer.

    Attributes:
        step: Updates done; also the weight version.
        tokens: Tokens generated.
        seconds: Wall time of the steps, without evaluations and checkpoints.
        no_signal: Steps in a row whose groups all had equal rewards.
        not_finite: Steps in a row that were left out because of a gradient that is not finite.
    """

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    no_signal: int = 0
    not_finite: int = 0
    step_seconds: list[float] = field(default_factory=list)

    @classmethod
    def resumed(cls, saved: dict[str, Any]) -> RunState:
        """From ``vars`` of an earlier one. Where no signal, or no finite gradient, ended the run, it gets as many steps again:
        whoever resumes it has changed something."""
        from trtl_rl.trainer.loop import NO_SIGNAL_LIMIT, NOT_FINITE_LIMIT

        state = cls(**saved)
        if state.no_signal >= NO_SIGNAL_LIMIT:
            state.no_signal = 0
        if state.not_finite >= NOT_FINITE_LIMIT:
            state.not_finite = 0
        return state
