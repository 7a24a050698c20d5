"""The errors that a user can act on. Everything else is a bug and keeps its traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Wrong input. The message says what is wrong and what to do; the command line exits with 2."""


class EngineError(RuntimeError):
    """The rollout engine failed, died or did not answer in time. Carries the engine's own text.

    Attributes:
        brief, log: The message, and the end of the engine's log, which stands after it.
        repeats: Whether a new engine would fail alike for certain, so that a restart cannot help.
    """

    def __init__(self, text: str, *, log: str = "", repeats: bool = False) -> None:
        super().__init__(text + log)
        self.brief, self.log, self.repeats = text, log, repeats


class RefitError(EngineError):
    """A refit was refused or left incomplete. The engine stays at the version before, if it has one."""


class RewardError(RuntimeError):
    """A reward function raised, or did not return one finite number or ``None`` for each completion."""


class ParityError(RuntimeError):
    """Trainer and engine disagree more than ``parity.stop`` allows."""


class DiskError(RuntimeError):
    """A file of the run could not be written, for example for want of room. The message says what is kept."""


def nearest(name: str, choices: Iterable[str]) -> str:
    """Return `` Did you mean 'x'?`` for the closest of ``choices``, or an empty string.

    >>> nearest("losss", ["loss", "seed"])
    " Did you mean 'loss'?"
    """
    match = closest(name, choices)
    return "" if match is None else f" Did you mean '{match}'?"


def closest(name: str, choices: Iterable[str]) -> str | None:
    """The one of ``choices`` that is spelt most like ``name``, or None when all are far from it."""
    match = difflib.get_close_matches(name, list(choices), n=1, cutoff=0.5)
    return match[0] if match else None
