"""``trtl-rl watch RUN [RUN …]``: attach to live runs, or look at finished ones."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TextIO

from trtl_rl.errors import UserError


def watch(run_dirs: Path | str | Sequence[Path], file: TextIO | None = None) -> int:
    """Draw until all runs have ended, or until ``q`` or Ctrl-C, which leave them alone.

    Runs that had ended before stay on a terminal until ``q``, so that samples and ledger can be looked at; in a pipe only
    the summary is printed.

    Returns:
        The exit code: 0 when the runs have ended (however they ended) or after ``q``, 130 after Ctrl-C.

    Raises:
        UserError: one of ``run_dirs`` is no directory.
    """
    paths = [Path(run_dirs)] if isinstance(run_dirs, Path | str) else list(dict.fromkeys(run_dirs))
    for path in paths:
        if not path.is_dir():
            kind = "is a file" if path.exists() else "does not exist"
            raise UserError(f"{path} {kind}. `trtl-rl watch` takes a run's directory, such as those in runs/.")
    from trtl_rl.cli.dashboard import POLL_SECONDS, Display  # rich's live display is slow to import

    display = Display(paths, file)
    before = signal.signal(signal.SIGTERM, _terminate)
    finished = False
    try:
        display.load()
        finished = display.ended
        if not finished or display.live:
            display.begin()
            if not display.live:
                empty = [run.view.run_dir for run in display.runs if run.view.rows == 0]
                display.print([f"waiting for the first row of {Path(path) / 'metrics.jsonl'}" for path in empty])
        while not display.gone and not display.look.quit and not (display.ended and (not finished or not display.live)):
            display.tick(time.time())
            display.wait(POLL_SECONDS)
        return 0
    except KeyboardInterrupt:
        return 0 if finished else 130
    finally:
        display.leave()
        display.summarise()
        signal.signal(signal.SIGTERM, before)


def _terminate(number: int, stack: FrameType | None) -> None:
    """Unwind on SIGTERM too, so that the terminal comes back whole."""
    raise SystemExit(128 + number)
