"""``trtl-rl watch RUN``: attach to a live run, or show how a finished one ended."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from types import FrameType
from typing import TextIO

from trtl_rl.errors import UserError


def watch(run_dir: Path | str, file: TextIO | None = None) -> int:
    """Draw the run until it ends, or until Ctrl-C, which leaves the run alone.

    Returns:
        The exit code: 0 when the run has ended (however it ended), 130 after Ctrl-C.

    Raises:
        UserError: ``run_dir`` is no directory.
    """
    path = Path(run_dir)
    if not path.is_dir():
        kind = "is a file" if path.exists() else "does not exist"
        raise UserError(f"{path} {kind}. `trtl-rl watch` takes a run's directory, such as those in runs/.")
    from trtl_rl.cli.dashboard import POLL_SECONDS, Display  # rich's live display is slow to import

    display = Display(path, file)
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        display.load()
        if display.view.end is None:
            display.begin()
            if display.view.rows == 0 and not display.live:
                display.print([f"waiting for the first row of {path / 'metrics.jsonl'}"])
        while display.view.end is None and not display.gone:
            display.tick(time.time())
            time.sleep(POLL_SECONDS)
        return 0
    except KeyboardInterrupt:
        return 130
    finally:
        display.leave()
        display.summarise()
        signal.signal(signal.SIGTERM, before)


def _terminate(number: int, stack: FrameType | None) -> None:
    """Unwind on SIGTERM too, so that the terminal comes back whole."""
    raise SystemExit(128 + number)
