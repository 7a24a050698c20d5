"""The dashboard: reads ``metrics.jsonl`` and draws it, live on a terminal, as plain lines elsewhere.

    run process:   with Screen(run_dir): train()       a daemon thread, which cannot stop the run
    trtl-rl watch: Display, driven by the command      another process, a live or a finished run

On a terminal the frame fills the alternate screen, so that resizing leaves no debris; the summary goes to the normal
screen at the end and stays in its history. What other code prints meanwhile goes to the run's ``logs/console.log``.
"""

from __future__ import annotations

import io
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import TextIO

from rich.console import Console, ConsoleDimensions, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from trtl_rl.cli.aside import Aside
from trtl_rl.cli.closing import print_closing
from trtl_rl.cli.panels import frame
from trtl_rl.cli.plain import PlainLines
from trtl_rl.cli.view import View
from trtl_rl.metrics import MetricsReader, Row

POLL_SECONDS = 0.25  # the shortest time between two redraws
_CLOCK_SECONDS = 1.0  # redraw this often without news: ETA and the stall rule move on
_CHUNK_BYTES = 4 * 2**20  # read a long history in parts


class Display:
    """One view of one run on one output stream: ``load``, ``begin``, ``tick`` …, ``close``.

    Args:
        run_dir: The run's directory; it may not exist yet.
        file: Where to draw; standard output by default.

    Attributes:
        view: The run as known so far.
        live: Whether this draws on a terminal; otherwise it prints plain lines.
        gone: Whether nobody reads the output any more.
    """

    def __init__(self, run_dir: Path | str, file: TextIO | None = None) -> None:
        self.file: TextIO = file or sys.stdout
        self.view = View(str(run_dir))
        self.live = live_terminal(self.file)
        self.gone = False
        self._reader = MetricsReader(Path(run_dir) / "metrics.jsonl")
        self._plain = PlainLines(self.view)
        self._backlog: list[Row] = []
        self._drawn: tuple[float, os.terminal_size] | None = None
        if not _utf8(self.file) and isinstance(self.file, io.TextIOWrapper):
            self.file.reconfigure(errors="replace")
        self._console = Console(
            file=self.file,
            force_terminal=self.live,  # whatever FORCE_COLOR says of pipes
            no_color=None if self.live else True,
            highlight=False,
        )
        self._live = Live(
            _Frame(self.view),
            console=self._console,
            screen=True,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def load(self) -> None:
        """Take what the file holds already, without drawing."""
        rest: deque[Row] = deque(maxlen=100)
        last_step: Row | None = None
        for row in self._new_rows():
            kind = row.get("kind")
            if kind == "start":
                rest.clear()
                last_step = None
            if kind == "step":
                last_step = row
            elif kind in ("start", "message", "evaluation"):
                rest.append(row)
        self._backlog = [*rest, *([last_step] if last_step else [])]

    def begin(self) -> None:
        """Begin to draw. Plain lines begin with what came since the last ``start``, of the steps only the last."""
        if self.live:
            self._fit()
            self._live.start(refresh=True)
        elif self.view.end is None:
            for row in self._backlog:
                self.print(self._plain.feed(row))

    def tick(self, now: float) -> None:
        """Read new rows and draw if there is news, a new size, or a second has passed."""
        if not self.live:
            self._print_new()
            self.print(self._plain.tick(now))
            return
        news = sum(1 for _ in self._new_rows())
        size = self._fit()
        if news or self._drawn is None or size != self._drawn[1] or now - self._drawn[0] >= _CLOCK_SECONDS:
            self._drawn = (now, size)
            self._live.refresh()

    def leave(self) -> None:
        """Read the last rows and give the terminal back. Safe to call twice."""
        self._live.stop()
        if self.live:
            for _ in self._new_rows():
                pass
        else:
            self._print_new()

    def summarise(self) -> None:
        """Print the summary, if the run had begun."""
        if not self.view.facts or self.gone:
            return
        try:
            print_closing(self.view, self._console)
            self.file.flush()
        except (BrokenPipeError, SystemExit):  # rich turns a closed pipe into SystemExit
            self._lose()

    def print(self, lines: list[str]) -> None:
        """Print whole lines now; nothing once the reader is gone."""
        if self.gone or not lines:
            return
        try:
            self.file.write("".join(f"{line}\n" for line in lines))
            self.file.flush()
        except BrokenPipeError:
            self._lose()

    def _fit(self) -> os.terminal_size:
        """Take the size of this very terminal: rich would ask the environment and standard input first."""
        size = os.get_terminal_size(self.file.fileno())
        if 0 in size:  # a terminal that does not know its size
            size = os.terminal_size((80, 24))
        self._console.size = ConsoleDimensions(size.columns, size.lines)
        return size

    def _new_rows(self) -> Iterator[Row]:
        """New rows, each handed out as soon as the view has taken it."""
        while chunk := self._reader.poll(_CHUNK_BYTES):
            for row in chunk:
                self.view.apply(row)
                if isinstance(row, dict):
                    yield row
        self.view.torn = self._reader.torn

    def _print_new(self) -> None:
        for row in self._new_rows():
            self.print(self._plain.feed(row))

    def _lose(self) -> None:
        """The reader of the pipe went away (``| head``): the run goes on unseen."""
        self.gone = True
        if self.file is sys.stdout:  # Python flushes it once more at exit, and would complain
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Screen:
    """Shows a run from within its own process: ``with Screen(run_dir): ...``.

    A daemon thread polls the file. Whatever ends the block (the end, an exception, Ctrl-C), the terminal is given back
    and the summary printed before the exception goes on. A fault of the drawing ends the drawing, not the run.
    """

    def __init__(self, run_dir: Path | str, file: TextIO | None = None) -> None:
        self._run_dir = Path(run_dir)
        self._display = Display(run_dir, file)
        self._aside = Aside(self._run_dir / "logs" / "console.log")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="dashboard", daemon=True)

    def __enter__(self) -> Screen:
        self._display.load()
        self._display.begin()
        if self._display.live:
            self._aside.take()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        try:
            self._thread.join()
        finally:
            self._display.leave()
            self._aside.give_back()
            self._display.print(self._aside.report())
            self._display.summarise()

    def _follow(self) -> None:
        try:
            while not self._stop.wait(POLL_SECONDS):
                self._display.tick(time.time())
        except Exception:
            self._display.leave()
            self._aside.give_back()
            attach = f"The dashboard failed; the run goes on. `trtl-rl watch {self._run_dir}` attaches again."
            print(f"{attach}\n{traceback.format_exc()}", file=sys.stderr)


class _Frame:
    """Draws the view at the size that the terminal has at that moment."""

    def __init__(self, view: View) -> None:
        self._view = view

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = frame(self._view, options.max_width, options.height or console.height, time.time())
        yield Text("\n", no_wrap=True, overflow="crop", end="").join(lines)


def live_terminal(file: TextIO) -> bool:
    """Whether ``file`` is a terminal that can redraw and show block characters: no pipe, not ``TERM=dumb``."""
    return file.isatty() and os.environ.get("TERM", "dumb") not in ("", "dumb", "unknown") and _utf8(file)


def _utf8(file: TextIO) -> bool:
    return (file.encoding or "utf-8").lower().replace("-", "").startswith("utf")
