"""The dashboard in a real terminal and in a pipe; ``watch``; incremental reading."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

import pexpect
import pyte
import pytest
from metric_rows import ESCAPE, NOW, draw, run_rows, step_metrics, view_of, write
from rich.cells import cell_len

from trtl_rl.cli.dashboard import Display, Screen
from trtl_rl.cli.watch import watch
from trtl_rl.errors import UserError
from trtl_rl.metrics import MetricsReader, MetricsWriter


def test_a_pipe_gets_one_line_per_step_and_no_escape_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = run_rows(5, end=True)
    many = [{"kind": "progress", "name": "loading", "done": i, "total": 500, "unit": "files"} for i in range(501)]
    warning = {"kind": "message", "level": "warning", "text": "two\nlines"}
    with Screen(tmp_path):
        write(tmp_path, [rows[0], *many, warning, *rows[1:]])
    out = capsys.readouterr().out
    assert ESCAPE not in out
    lines = out.splitlines()
    assert [line for line in lines if line.startswith("loading")] == ["loading ...", "loading: done, 500 files"]
    assert "warning: two lines" in lines
    assert "evaluation at step 0  exact_match 0.31  greedy_exact_match 0.75" in lines
    steps = [line for line in lines if line.startswith("step ")][:5]
    assert [line.split("/")[0] for line in steps] == [f"step    {n}" for n in range(1, 6)]
    assert steps[0] == (
        "step    1/300  reward 0.31  exact_match 0.31  length 19.8  imbalance 8.2  staleness 1.0  mismatch -  "
        "flops 1.2e+11 (search 31% learning 69% feedback 0%)  0.35 s"
    )
    assert any(line.startswith("done after 5 steps") for line in lines)


def test_a_resumed_run_in_a_pipe_does_not_repeat_its_past(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, run_rows(50, end=True))
    with Screen(tmp_path):
        write(tmp_path, [{"kind": "start", "model": "demo", "time": NOW}])
        write(tmp_path, [{"kind": "step", "step": 51, "metrics": {"reward": 0.5}, "time": NOW}])
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert printed[0].startswith("step   51") and len(printed) == 2, "the step, and the summary's last state"


def test_the_summary_comes_before_the_exception_that_ends_a_run(tmp_path: Path) -> None:
    out = io.StringIO()
    with pytest.raises(RuntimeError, match="engine died"), Screen(tmp_path, out):
        write(tmp_path, run_rows(3))
        raise RuntimeError("engine died")
    assert "not finished: the last row came after 3 steps" in out.getvalue()


def test_attaching_to_a_resumed_run_in_a_pipe_tells_only_its_present_life(tmp_path: Path) -> None:
    old = {"kind": "message", "level": "warning", "text": "of the first life", "time": NOW}
    now = [{"kind": "start", "model": "second", "time": NOW}, {"kind": "message", "text": "of the second", "time": NOW}]
    write(tmp_path, [*run_rows(9), old, *now])
    out = io.StringIO()
    display = Display(tmp_path, out)
    display.load()
    display.begin()
    assert "second" in out.getvalue() and "info: of the second" in out.getvalue()
    assert "first life" not in out.getvalue() and "step " not in out.getvalue()


def test_a_run_that_never_began_prints_no_summary(tmp_path: Path) -> None:
    out = io.StringIO()
    with pytest.raises(UserError), Screen(tmp_path / "new", out):
        raise UserError("no such model")
    assert out.getvalue() == ""


def test_a_fault_of_the_drawing_does_not_end_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class FakeFullDisk(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError("no space left")

    write(tmp_path, [{"kind": "message", "text": "hello"}])
    screen = Screen(tmp_path, FakeFullDisk())
    screen._display.load()
    write(tmp_path, run_rows(1))
    screen._follow()
    error = capsys.readouterr().err
    assert "the run goes on" in error and "no space left" in error


# ------------------------------------------------------------------------------------------- reader and watch


def test_a_row_that_is_being_written_is_read_once_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    whole = json.dumps({"kind": "step", "step": 1, "metrics": {"reward": 1.0}})
    path.write_text(whole[:20])
    display = Display(tmp_path, io.StringIO())
    display.load()
    assert display.view.step == 0
    with open(path, "a") as file:
        file.write(whole[20:] + "\n" + whole[:15])
    display.tick(time.time())
    assert display.view.step == 1 and display.view.torn == 0
    writer = MetricsWriter(path)  # a kill tore the last row; the run is resumed
    writer.step(2, {"reward": 1.0})
    writer.close()
    display.tick(time.time())
    assert display.view.step == 2 and display.view.torn == 1


def test_a_long_file_read_in_parts_loses_no_row(tmp_path: Path) -> None:
    write(tmp_path, run_rows(40))
    expected = MetricsReader(tmp_path / "metrics.jsonl").poll()
    reader = MetricsReader(tmp_path / "metrics.jsonl")
    parts: list[Any] = []
    while chunk := reader.poll(1500):
        parts += chunk
    assert parts == expected
    tiny = MetricsReader(tmp_path / "metrics.jsonl")
    assert tiny.poll(10) == expected, "a row longer than the part is still read"


def test_watching_what_is_no_run_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere does not exist.*run's directory"):
        watch(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file"):
        watch(tmp_path / "file")


def test_a_finished_run_is_drawn_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, run_rows(30, end=True))
    assert watch(tmp_path) == 0
    out = capsys.readouterr().out
    assert out.count("run directory") == 1 and "done after 30 steps" in out and ESCAPE not in out
    assert len(re.findall(r"^step ", out, re.M)) == 1


WATCH = "import sys; from trtl_rl.cli.watch import watch; sys.exit(watch(sys.argv[1]))"


def environment(**over: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "LINES")}
    return kept | {"PYTHONPATH": os.pathsep.join(sys.path), "TERM": "xterm-256color", "PYTHONUTF8": "1"} | over


def set_size(terminal: int, height: int, width: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))


class Terminal:
    """A program in a real terminal: what it wrote, as the screen shows it."""

    def __init__(self, *arguments: str, width: int = 80, height: int = 24, **env: str) -> None:
        size = (height, width)
        self.child = pexpect.spawn(sys.executable, list(arguments), dimensions=size, env=environment(**env), timeout=10)
        self.screen = pyte.Screen(width, height)
        self.stream = pyte.ByteStream(self.screen)
        self.raw = b""

    def pump(self) -> bool:
        try:
            data = self.child.read_nonblocking(65536, timeout=0.05)
        except pexpect.TIMEOUT:
            return True
        except pexpect.EOF:
            return False
        self.raw += data
        self.stream.feed(data)
        return True

    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.screen.display)

    def until(self, wanted: str, seconds: float = 8.0) -> str:
        end = time.monotonic() + seconds
        while wanted not in self.text():
            assert time.monotonic() < end, f"no {wanted!r} in\n{self.text()}"
            self.pump()
        return self.text()

    def finish(self) -> tuple[int | None, str]:
        while self.pump():
            pass
        self.child.close()
        return self.child.exitstatus, self.raw.decode(errors="replace")  # the echo of Ctrl-C may fall into a character

    def resize(self, width: int, height: int) -> None:
        self.child.setwinsize(height, width)
        self.screen.resize(height, width)


def test_watch_in_a_terminal_waits_follows_resizes_and_leaves_it_clean(tmp_path: Path) -> None:
    terminal = Terminal("-c", WATCH, str(tmp_path))
    terminal.until("waiting for the first row")
    now = time.time()
    rows = [row | {"time": now} for row in run_rows(12)]
    write(tmp_path, rows)
    shown = terminal.until("checkpoint saved")  # the last line of the frame
    assert "step 12/300" in shown and "7+5=12,4+8+1=13,132" in shown and "FLOPs by role" in shown
    write(tmp_path, [{"kind": "step", "step": 13, "metrics": step_metrics(13), "time": now}])
    terminal.until("step 13/300")
    terminal.resize(150, 40)
    wide = terminal.until("FLOPs by role").splitlines()
    end = time.monotonic() + 5
    while not (any("reward" in line and "FLOPs by role" in line for line in wide) or time.monotonic() > end):
        terminal.pump()
        wide = terminal.text().splitlines()
    assert any("reward" in line and "FLOPs by role" in line for line in wide), "two columns after the resize"
    terminal.child.sendintr()
    code, raw = terminal.finish()
    assert code == 130
    assert raw.count("\x1b[?1049h") == raw.count("\x1b[?1049l") == 1, "the alternate screen is left"
    assert raw.rindex("\x1b[?25h") > raw.rindex("\x1b[?25l"), "the cursor is back"
    after = raw[raw.rindex("\x1b[?1049l") :]
    assert "not finished: the last row came after 13 steps" in after and "Traceback" not in raw


def test_a_pipe_says_that_nothing_has_come_yet(tmp_path: Path) -> None:
    command = [sys.executable, "-u", "-c", WATCH, str(tmp_path)]
    child = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == f"waiting for the first row of {tmp_path}/metrics.jsonl\n"
    write(tmp_path, run_rows(2, end=True))
    assert "done after 2 steps" in child.communicate(timeout=10)[0]
    assert child.returncode == 0


def test_keys_show_details_and_the_terminal_is_whole_afterwards(tmp_path: Path) -> None:
    write(tmp_path, [row | {"time": time.time()} for row in run_rows(12)])
    terminal = Terminal("-c", WATCH, str(tmp_path))
    terminal.until("h help")
    for key, part in (
        ("h", "one of these rules is broken"),
        ("s", "7+5=12,4+8+1=13,132"),
        ("t", "median's share of a step"),
        ("l", "ρ, learning over total"),
        ("c", "parity: 1 probe, at most 0 differing tokens"),
        ("m", "checkpoint saved"),
        ("\x1b", "FLOPs by role"),
    ):
        terminal.child.send(key)
        terminal.until(part)
    terminal.child.send("h")
    terminal.until("stall no progress")
    terminal.child.send("\x1b[B" * 5)  # down
    terminal.until("lines 6 to")
    terminal.child.send("q")
    code, raw = terminal.finish()
    assert code == 0 and "not finished" in raw, "q leaves the watch, the run goes on"
    assert raw.count("\x1b[?1049h") == raw.count("\x1b[?1049l") == 1


def test_the_mode_of_the_terminal_comes_back_after_ctrl_c(tmp_path: Path) -> None:
    write(tmp_path, [row | {"time": time.time()} for row in run_rows(3)])
    show = 'os.system(\'stty -a | grep -o ".icanon\\|.echo " | tr -d "\\n"\')'
    program = (
        f"import os, sys; from trtl_rl.cli.watch import watch; watch(sys.argv[1]); print('mode:', flush=True); {show}"
    )
    terminal = Terminal("-c", program, str(tmp_path))
    terminal.until("step 3/300")
    terminal.child.sendintr()
    _, raw = terminal.finish()
    mode = raw[raw.rindex("mode:") :]
    assert "-icanon" not in mode and "-echo" not in mode and "icanon" in mode


def test_a_finished_run_can_be_looked_at_until_q(tmp_path: Path) -> None:
    write(tmp_path, run_rows(20, end=True))
    terminal = Terminal("-c", WATCH, str(tmp_path))
    terminal.until("step 20/300  done")
    terminal.child.send("s")
    terminal.until("step 20  reward 1.00")
    terminal.child.send("q")
    code, raw = terminal.finish()
    assert code == 0 and "done after 20 steps" in raw[raw.rindex("\x1b[?1049l") :]


def test_several_runs_are_watched_beside_each_other_and_one_by_one(tmp_path: Path) -> None:
    now = time.time()
    for name, steps in (("first", 30), ("second", 7)):
        write(tmp_path / name, [row | {"time": now} for row in run_rows(steps)])
    code = "import sys; from pathlib import Path; from trtl_rl.cli.watch import watch; sys.exit(watch([*map(Path, sys.argv[1:])]))"
    terminal = Terminal("-c", code, str(tmp_path / "first"), str(tmp_path / "second"))
    shown = terminal.until("tab or 1 to 9 one run")
    assert "1 first" in shown and "2 second" in shown and "30/300" in shown and "7/300" in shown
    terminal.child.send("2")
    terminal.until("step 7/300")
    terminal.child.send("\x1b")
    terminal.until("2 second")
    write(tmp_path / "second", [{"kind": "step", "step": 8, "metrics": step_metrics(8), "time": now}])
    terminal.until("8/300")
    for name in ("first", "second"):
        write(tmp_path / name, [{"kind": "end", "status": "done", "step": 30, "time": now}])
    code_of_exit, raw = terminal.finish()
    after = raw[raw.rindex("\x1b[?1049l") :]
    assert code_of_exit == 0 and re.search(r"first +30 +done", after) and re.search(r"second +8 +done", after)


def test_several_runs_in_a_pipe_have_their_names_before_their_lines(tmp_path: Path) -> None:
    for name in ("a", "longer"):
        write(tmp_path / name, run_rows(3))
    out = io.StringIO()
    display = Display([tmp_path / "a", tmp_path / "longer"], out)
    display.load()
    display.begin()
    write(tmp_path / "a", [{"kind": "step", "step": 4, "metrics": step_metrics(4), "time": NOW}])
    display.tick(NOW)
    assert re.search(r"^a       step    4/300", out.getvalue(), re.M)
    assert re.search(r"^longer  step    3/300", out.getvalue(), re.M)


def test_a_watch_in_the_background_prints_lines_and_is_not_stopped(tmp_path: Path) -> None:
    """A process that is not in its terminal's foreground is stopped when it changes the terminal's mode."""
    write(tmp_path, run_rows(3))
    (tmp_path / "watch.py").write_text(WATCH)
    shell = f"set -m; {sys.executable} {tmp_path}/watch.py {tmp_path} & read line; wait"
    size = (24, 80)
    child = pexpect.spawn("bash", ["-c", shell], dimensions=size, env=environment(), timeout=20)
    child.expect(r"step    3/300")
    write(tmp_path, [{"kind": "end", "status": "done", "step": 3}])
    child.expect("done after 3 steps")
    assert b"\x1b[?1049h" not in (child.before or b"")
    child.close(force=True)


def test_watch_ends_by_itself_when_the_run_ends(tmp_path: Path) -> None:
    write(tmp_path, run_rows(3))
    terminal = Terminal("-c", WATCH, str(tmp_path), NO_COLOR="1")
    terminal.until("step 3/300")
    write(tmp_path, [{"kind": "end", "status": "done", "step": 3, "text": "bye"}])
    code, raw = terminal.finish()
    assert code == 0 and "done after 3 steps" in raw and "bye" in raw
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", raw), "NO_COLOR takes the colours, not the screen"


def test_a_dumb_terminal_gets_plain_lines(tmp_path: Path) -> None:
    write(tmp_path, run_rows(3))
    terminal = Terminal("-c", WATCH, str(tmp_path), TERM="dumb")
    terminal.until("step    3/300")
    write(tmp_path, [{"kind": "end", "status": "done", "step": 3}])
    code, raw = terminal.finish()
    assert code == 0 and "done after 3 steps" in raw and ESCAPE not in raw


def test_a_resize_is_drawn_at_the_next_tick_whatever_the_environment_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "33")
    monkeypatch.setenv("TERM", "xterm-256color")
    write(tmp_path, run_rows(3))
    master, slave = pty.openpty()
    with open(slave, "w", encoding="utf-8") as file, open(master, "rb", buffering=0) as seen:
        set_size(slave, 24, 80)
        display = Display(tmp_path, file)
        display.load()
        display.begin()
        widths = []
        for width in (80, 80, 60):
            set_size(slave, 24, width)
            file.flush()
            while select.select([seen], [], [], 0.1)[0]:
                seen.read(65536)
            display.tick(NOW)
            drawn = b""
            while select.select([seen], [], [], 0.1)[0]:
                drawn += seen.read(65536)
            rule = re.search("reward .*axis 0 to [0-9.]+", re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", drawn.decode()))
            widths.append(cell_len(rule.group()) if rule else None)
        display.leave()
    assert widths == [80, None, 60], "drawn, nothing new at the same moment, drawn at the new width"


RUN = """
import os, subprocess, sys, time
from pathlib import Path
from trtl_rl.cli.dashboard import Screen
from trtl_rl.metrics import MetricsWriter
run = Path(sys.argv[1])
writer = MetricsWriter(run / "metrics.jsonl")
with Screen(run):
    writer.write("start", model="demo", steps=2)
    print("printed by a reward function")
    os.write(2, b"printed by a library in C\\n")
    subprocess.run([sys.executable, "-c", "print('printed by a child')"], stdout=sys.stdout)
    writer.step(1, {"reward": 0.5})
    time.sleep(1.6)
    writer.step(2, {"reward": 0.7})
    writer.write("end", status="done", step=2, text="last words")
print("after")
"""


def test_output_of_other_code_neither_spoils_the_screen_nor_is_lost(tmp_path: Path) -> None:
    terminal = Terminal("-c", RUN, str(tmp_path))
    shown = terminal.until("step 1/2")
    assert "printed by" not in shown
    code, raw = terminal.finish()
    assert code == 0
    after = raw[raw.rindex("\x1b[?1049l") :]
    assert "printed by a reward function" in after and "last words" in after and after.rstrip().endswith("after")
    log = (tmp_path / "logs" / "console.log").read_text()
    assert "printed by a child" in log and "printed by a library in C" in log
    assert "3 lines of other output" in after


def test_a_run_outlives_the_reader_of_its_pipe(tmp_path: Path) -> None:
    quiet = "\n".join(line for line in RUN.splitlines() if "print" not in line)
    (tmp_path / "run.py").write_text(quiet)
    command = f"{sys.executable} {tmp_path}/run.py {tmp_path} | head -n 1; echo code ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], env=environment(), capture_output=True, text=True, timeout=20)
    assert "code 0" in done.stdout and "Error" not in done.stderr, done.stderr
    assert '"end"' in (tmp_path / "metrics.jsonl").read_text()


def test_the_view_is_cheap_and_needs_no_torch() -> None:
    code = "import sys, trtl_rl.cli.dashboard, trtl_rl.cli.watch; print({'torch', 'transformers'} & set(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "set()"
    view = view_of(run_rows(3000))
    start = time.perf_counter()
    for _ in range(10):
        draw(view)
    assert (time.perf_counter() - start) / 10 < 0.1
