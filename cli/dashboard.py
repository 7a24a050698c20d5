"""The dashboard: reads ``metrics.jsonl`` and draws it, live on a terminal, as plain lines elsewhere.

    run process:   with Screen(run_dir): train()       a daemon thread, which cannot stop the run
    trtl-rl watch: Display, driven by the command      another process, a live or a finished run

On a terminal the frame fills the alternate screen, so that resizing leaves no debris; the summary goes to the normal
screen at the end and stays in its history. What other code prints meanwhile, libraries in C and child processes
included, goes to the run's ``logs/console.log``. Keys change what is shown, and never what the run does.
"""

from __future__ import annotations

import io
import os
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TextIO

from rich.console import Console, ConsoleDimensions, RenderableType
from rich.live import Live
from rich.text import Text

from trtl_rl.cli.aside import Aside
from trtl_rl.cli.closing import print_closing, print_several
from trtl_rl.cli.follow import Followed
from trtl_rl.cli.keys import Keys
from trtl_rl.cli.screens import Look, screen
from trtl_rl.cli.several import beside
from trtl_rl.cli.view import View

POLL_SECONDS = 0.25  # between two looks at the file and the window's size; a key is seen at once
_REDRAW_SECONDS = 1.0  # drawing costs the most: news wait for the next second, keys and new sizes do not


class Display:
    """One run or several on one output stream: ``load``, ``begin``, then ``wait`` and ``tick`` …, ``leave``, ``summarise``.

    Args:
        run_dirs: The runs' directories; they may not exist yet.
        file: Where to draw; standard output by default.

    Attributes:
        runs: What is followed.
        live: Whether this draws on a terminal; otherwise it prints plain lines.
        look: What a person has chosen to see.
        gone: Whether nobody reads the output any more.
    """

    def __init__(self, run_dirs: Path | str | Sequence[Path], file: TextIO | None = None) -> None:
        self.file: TextIO = file or sys.stdout
        paths = [Path(run_dirs)] if isinstance(run_dirs, Path | str) else list(run_dirs)
        names = _names_apart(paths)
        width = max(map(len, names))
        self.names = names
        self.runs = [
            Followed(path, f"{name:<{width}}  " if len(paths) > 1 else "")
            for path, name in zip(paths, names, strict=True)
        ]
        self.live = live_terminal(self.file)
        self.gone = False
        self.look = Look()
        self.keys = Keys()
        self._pressed = False
        self._drawn: tuple[float, os.terminal_size] | None = None
        if not _utf8(self.file) and isinstance(self.file, io.TextIOWrapper):
            self.file.reconfigure(errors="replace")
        # A descriptor of its own: standard output may be pointed elsewhere meanwhile.
        self._terminal = _duplicate(self.file) if self.live else self.file
        self._console = Console(
            file=self._terminal,
            force_terminal=self.live,  # whatever FORCE_COLOR says of pipes
            no_color=None if self.live else True,
            highlight=False,
        )
        self._live = Live(
            console=self._console,
            get_renderable=self._frame,
            screen=True,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )

    @property
    def view(self) -> View:
        """Of the first run."""
        return self.runs[0].view

    @property
    def ended(self) -> bool:
        """Whether every run has ended."""
        return all(run.view.end is not None for run in self.runs)

    def load(self) -> None:
        """Take what the files hold already, without drawing."""
        for run in self.runs:
            run.load()

    def begin(self) -> None:
        """Begin to draw. Plain lines begin with what came since the last ``start``, of the steps only the last."""
        if self.live:
            self._fit()
            self.keys.begin()
            self._live.start(refresh=True)
            return
        for run in self.runs:
            if run.view.end is None:
                self.print(run.backlog())

    def wait(self, seconds: float) -> None:
        """Wait so long, or until a key is pressed."""
        if not self.live:
            time.sleep(seconds)
            return
        for key in self.keys.wait(seconds):
            self.look.press(key, max(self._console.height - 3, 1), len(self.runs))
            self._pressed = True

    def tick(self, now: float) -> None:
        """Read new rows, and draw if a second has passed, a key was pressed, or the window has a new size."""
        if not self.live:
            self._print_new(now)
            return
        for run in self.runs:
            for _ in run.rows():
                pass
        size = self._fit()
        due = self._drawn is None or size != self._drawn[1] or now - self._drawn[0] >= _REDRAW_SECONDS
        if due or self._pressed:
            self._drawn, self._pressed = (now, size), False
            self._live.refresh()

    def leave(self) -> None:
        """Read the last rows and give the terminal back. Safe to call twice."""
        self._live.stop()
        self.keys.end()
        if self.live:
            for run in self.runs:
                for _ in run.rows():
                    pass
        else:
            self._print_new(0.0)

    def summarise(self) -> None:
        """Print the summary, if a run had begun."""
        known = [(name, run.view) for name, run in zip(self.names, self.runs, strict=True) if run.view.facts]
        if not known or self.gone:
            return
        try:
            if len(self.runs) == 1:
                print_closing(self.view, self._console)
            else:
                print_several(known, self._console)
            self._terminal.flush()
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

    def _frame(self) -> RenderableType:
        width, height, now, look = self._console.width, self._console.height, time.time(), self.look
        if len(self.runs) > 1 and look.run is None and not look.screen:
            lines = beside([run.view for run in self.runs], self.names, look, width, height, now)
        else:
            lines = screen(self.runs[look.run or 0].view, look, width, height, now, self.keys.active)
        return Text("\n", no_wrap=True, overflow="crop", end="").join(lines)

    def _fit(self) -> os.terminal_size:
        """Take the size of this very terminal: rich would ask the environment and standard input first."""
        size = os.get_terminal_size(self._terminal.fileno())
        if 0 in size:  # a terminal that does not know its size
            size = os.terminal_size((80, 24))
        self._console.size = ConsoleDimensions(size.columns, size.lines)
        return size

    def _print_new(self, now: float) -> None:
        for run in self.runs:
            for lines in run.lines(now):
                self.print(lines)

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
            while not self._stop.is_set():
                self._display.wait(POLL_SECONDS)
                self._display.tick(time.time())
        except Exception:
            self._display.leave()
            self._aside.give_back()
            attach = f"The dashboard failed; the run goes on. `trtl-rl watch {self._run_dir}` attaches again."
            print(f"{attach}\n{traceback.format_exc()}", file=sys.stderr)


def live_terminal(file: TextIO) -> bool:
    """Whether ``file`` is a terminal to draw on: no pipe, not ``TERM=dumb``, and not that of a shell whose job is behind."""
    capable = file.isatty() and os.environ.get("TERM", "dumb") not in ("", "dumb", "unknown") and _utf8(file)
    return capable and _in_foreground(file)


def _in_foreground(file: TextIO) -> bool:
    try:
        return os.tcgetpgrp(file.fileno()) == os.getpgrp()
    except OSError:  # a terminal that is not this process's own
        return True


def _duplicate(file: TextIO) -> TextIO:
    file.flush()
    return open(os.dup(file.fileno()), "w", encoding=file.encoding, errors="replace")


def _names_apart(paths: Sequence[Path]) -> list[str]:
    """Each directory's name; of equal names, the paths."""
    names = [path.resolve().name for path in paths]
    return [str(path) if names.count(name) > 1 else name for path, name in zip(paths, names, strict=True)]


def _utf8(file: TextIO) -> bool:
    return (file.encoding or "utf-8").lower().replace("-", "").startswith("utf")
