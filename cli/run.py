"""``trtl-rl run``: configuration, Ctrl-C, the screen; the work is the Trainer's."""

from __future__ import annotations

import signal
from pathlib import Path
from types import FrameType
from typing import Any

from trtl_rl.config import RunConfig, load_config
from trtl_rl.errors import UserError
from trtl_rl.trainer.checks import read_config
from trtl_rl.trainer.trainer import Trainer


def run(settings: list[str], resume: Path | None) -> int:
    """Train as ``settings`` say: an optional file, then ``key=value``. Returns the exit code."""
    config = configuration(settings, resume)
    trainer = Trainer(args=config, resume=resume is not None)
    trainer.logs = False  # the screen shows it
    from trtl_rl.cli.dashboard import Screen

    presses = 0

    def interrupted(number: int, frame: FrameType | None) -> None:
        """Save and stop; a second Ctrl-C stops at once. Schedulers send SIGTERM more than once, and want the run saved."""
        nonlocal presses
        presses += number == signal.SIGINT
        if presses > 1:
            raise KeyboardInterrupt
        if not trainer.stop_requested:
            trainer.stop()

    before = {number: signal.signal(number, interrupted) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        trainer.prepare()
        with Screen(trainer.run_dir):
            result = trainer.train()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 130 if result.status == "interrupted" else 0


def configuration(settings: list[str], resume: Path | None) -> RunConfig:
    """What the command line asks for: a file, the run that goes on, or the demo, then single keys."""
    file = None
    if settings and "=" not in settings[0]:
        file, settings = settings[0], settings[1:]
    base: dict[str, Any] = {}
    if resume is not None:
        if file is not None:
            raise UserError("--resume takes the run's own configuration; leave the file out (key=value may follow).")
        if not resume.is_dir():
            raise UserError(f"There is no run directory {resume}.")
        base = {**read_config(resume), "run_dir": str(resume)}
    elif file is None and not _names_own_work(settings):
        from trtl_rl.demo.defaults import demo_settings

        base = demo_settings()
    return load_config(file, settings, base)


def _names_own_work(settings: list[str]) -> bool:
    """Whether the command line names a model, data or a preset: then the demo's settings do not apply."""
    pairs = [text.partition("=") for text in settings]
    return any(key in ("model", "data", "task.preset") and value != "demo" for key, _, value in pairs)
