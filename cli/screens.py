"""The screens behind the first one: help, samples, timings, ledger, coverage, messages. A key shows each.

Each is a function of the view that returns all its lines, none wider than asked; :func:`screen` cuts out what fits.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from rich.cells import cell_len
from rich.text import Text

from trtl_rl.cli.figures import bar, clean, duration, evaluation_cells, number, percent, quantity, teaching, wrap
from trtl_rl.cli.panels import coverage, facts, frame, place
from trtl_rl.cli.rules import RULES
from trtl_rl.cli.view import PARTS, ROLES, View, finite

_LEFT = "budget/left/"
_SAMPLE_LINES = 40  # of one prompt or answer


@dataclass
class Look:
    """What a person has chosen to see.

    Attributes:
        screen: A key of ``SCREENS``; empty: the first screen.
        scroll: Lines above the window.
        run: Of several runs, the one that fills the window; None: all beside each other.
        first: Of several runs, the first that is shown.
        quit: Whether the person has asked to leave.
    """

    screen: str = ""
    scroll: int = 0
    run: int | None = None
    first: int = 0
    quit: bool = False

    def press(self, key: str, page: int, runs: int = 1) -> None:
        """Take a key; ``page`` is how many lines a page key moves by."""
        moves = {"up": -1, "k": -1, "down": 1, "j": 1, "page up": -page, "page down": page, " ": page}
        if key in SCREENS:
            self.screen, self.scroll = ("" if self.screen == key else key), 0
        elif key == "?":
            self.screen, self.scroll = "h", 0
        elif key in moves:
            self.scroll = max(self.scroll + moves[key], 0)
        elif key == "escape":
            if not self.screen:
                self.run = None
            self.screen, self.scroll = "", 0
        elif key == "q":
            self.quit = True
        elif runs > 1:
            self._choose(key, runs)

    def _choose(self, key: str, runs: int) -> None:
        if key == "tab":
            self.run = 0 if self.run is None else (self.run + 1) % runs
        elif key.isdigit() and 0 < int(key) <= runs:
            self.run = int(key) - 1
        elif key in ("left", "right"):
            step = 1 if key == "right" else -1
            if self.run is None:
                self.first = min(max(self.first + step, 0), runs - 1)
            else:
                self.run = (self.run + step) % runs


def screen(view: View, look: Look, width: int, height: int, now: float, keys: bool) -> list[Text]:
    """At most ``height`` lines of the chosen screen; with ``keys``, its last line names them."""
    if not look.screen:
        return frame(view, width, height, now, hint() if keys else "")
    title, draw = SCREENS[look.screen]
    head = Text.assemble((f"trtl-rl  {title}", "bold"), ("  " + clean(view.run_dir), "dim"))
    lines = draw(view, width, now)
    room = max(height - 2, 1)
    look.scroll = min(look.scroll, max(len(lines) - room, 0))
    shown = lines[look.scroll : look.scroll + room]
    more = f"lines {look.scroll + 1} to {look.scroll + len(shown)} of {len(lines)}, arrows move  " * (len(lines) > room)
    shown += [Text()] * (room - len(shown))
    out = [head, *shown, Text(f"{more}escape back  {hint()}", style="dim")][-height:]
    for line in out:
        line.truncate(width, overflow="ellipsis")
    return out


def hint() -> str:
    """The keys in one line."""
    return "  ".join(f"{key} {title}" for key, (title, _) in SCREENS.items())


def _help(view: View, width: int, now: float) -> list[Text]:
    lines = [Text("Colour means that one of these rules is broken:")]
    for rule in RULES:
        lines.append(Text.assemble("  ", (rule.name, rule.style), f" {rule.when}"))
        lines += [Text(f"      {line}") for line in wrap(rule.meaning, width - 6, 3)]
    terms = [
        ("imbalance S̄_N/S̄_P", "mean NLL per token of negative answers over that of positive ones"),
        ("staleness", "weight versions between an answer's first token and its update"),
        ("truncated", "share of the answers that were cut off at their longest length"),
        ("mismatch", "logprobs that differ between trainer and engine in the last probe"),
        ("zero-signal groups", "share of the groups whose rewards are all equal"),
        ("search, learning, feedback", "generating answers; updates; reward models"),
        ("ETA", "to the planned steps and, where the run has a budget, to its end"),
    ]
    lines += [Text(), Text("Words of the first screen:")]
    for name, meaning in terms:
        lines += [Text(f"  {line}") for line in wrap(f"{name}: {meaning}", width - 2, 3)]
    lines += [Text(), Text("Keys:")]
    lines += [Text(f"  {key}  {title}") for key, (title, _) in SCREENS.items()]
    lines.append(Text("  escape  back    arrows, space  move    q  leave `watch` (a run goes on)"))
    lines.append(Text("  several runs: tab, 1 to 9  one of them    left, right  the next ones"))
    lines.append(Text("  Ctrl-C  in `run`: finish the step, save and stop"))
    return lines


def _samples(view: View, width: int, now: float) -> list[Text]:
    lines: list[Text] = []
    for row in reversed(view.samples):
        version = finite(row.get("version"))
        head = f"step {number(finite(row.get('step')), 0)}  reward {number(finite(row.get('reward')), 2)}"
        head += f"  {clean(row.get('finish_reason', ''))}"
        head += "" if version is None else f"  weights of version {version:.0f}"
        lines.append(Text.assemble(head, " ", ("─" * max(width - cell_len(head) - 1, 0), "dim")))
        for field, style in (("prompt", "dim"), ("completion", "")):
            for line in _paragraphs(row.get(field, ""), width - 2):
                lines.append(Text(f"  {line}", style=style))
    return lines or [Text("no sample yet")]


def _paragraphs(text: object, width: int) -> list[str]:
    """Line breaks of the text are kept; it is cut in the middle only where it is very long."""
    parts = clean(text, newline="\n").split("\n")
    out = [line for part in parts[:_SAMPLE_LINES] for line in wrap(part, width, _SAMPLE_LINES)]
    return out if len(parts) <= _SAMPLE_LINES else [*out, f"… {len(parts) - _SAMPLE_LINES} more lines"]


def _timings(view: View, width: int, now: float) -> list[Text]:
    found = view.timings()
    if not found:
        return [Text("no step yet")]
    whole = found.get("timing_s/step", (0.0, 0.0, 0.0))[1]
    lines = [Text(f"{'seconds':<24} {'last':>8} {'median':>8} {'largest':>8}  median's share of a step", style="dim")]
    room = max(width - 60, 0)
    for name, (last, middle, largest) in found.items():
        parts = name.removeprefix("timing_s/").split("/")
        label = "  " * (len(parts) - 1) + parts[-1].replace("_", " ")
        share = middle / whole if whole > 0 else 0.0
        row = (
            f"{clean(label):<24} {duration(last):>8} {duration(middle):>8} {duration(largest):>8}  {percent(share):>5} "
        )
        lines.append(Text(row + bar(share, room)))
    if view.part is not None:
        name, since = view.part
        lines += [Text(), Text(f"now: {clean(PARTS.get(name, name))}, {duration(max(now - since, 0.0))} so far")]
    lines += [Text(), Text("Of the last 64 steps. Rollouts and rewards run beside the learner.", style="dim")]
    return lines


def _ledger(view: View, width: int, now: float) -> list[Text]:
    total = sum(view.flops.values())
    last = {role: view.metrics.get(f"flops/{role}", 0.0) for role in ROLES}
    step = sum(last.values())
    lines = [Text(f"{'FLOPs by role':<26} {'so far':>12} {'share':>6} {'last step':>12} {'share':>6}", style="dim")]
    for role in ROLES:
        share = percent(last[role] / step) if step > 0 else "-"
        lines.append(
            Text(
                f"{role:<26} {quantity(view.flops[role], 'FLOP'):>12} {percent(view.share(role)):>6} "
                f"{quantity(last[role], 'FLOP'):>12} {share:>6}"
            )
        )
    lines.append(Text(f"{'total':<26} {quantity(total, 'FLOP'):>12} {'':>6} {quantity(step, 'FLOP'):>12}"))
    lines += [Text(), Text("of the total, what served no update:", style="dim")]
    for fate, spent in view.wasted.items():
        name = clean(fate).replace("_", " ")
        share = percent(spent / total) if total > 0 else "-"
        lines.append(Text(f"{name:<26} {quantity(spent, 'FLOP'):>12} {share:>6}"))
    if view.chosen:
        lines += [Text(), Text("prompts that teach (what was saved is what their groups cost last):", style="dim")]
        lines += [Text(f"{label:<36} {quantity(flops, 'FLOP'):>12}") for label, flops in teaching(view.chosen).items()]
    lines.append(Text())
    if (rho := view.share("learning")) is not None:
        lines.append(Text(f"ρ, learning over total     {rho:>12.3f}"))
    if view.budget is not None:
        lines.append(Text(f"used of the nearest limit  {percent(view.budget):>12}"))
    if (tokens := view.metrics.get("num_tokens")) is not None:
        lines.append(Text(f"generated tokens           {quantity(tokens):>12}"))
    for name, value in view.metrics.items():
        if name.startswith(_LEFT):
            left = quantity(value, "FLOP") if name == f"{_LEFT}flops" else quantity(value)
            lines.append(Text(f"{'left: ' + clean(name.removeprefix(_LEFT)):<26} {left:>12}"))
    before, after = view.first_evaluation, view.last_evaluation
    for label, found in (("first", before), ("last", None if after == before else after)):
        if found is not None:
            lines += [Text(), Text(f"{label} evaluation, step {found[0]}:", style="dim")]
            lines += [Text(f"{clean(name)} {cell}") for name, cell in evaluation_cells(found[1]).items()]
    return lines


def _coverage(view: View, width: int, now: float) -> list[Text]:
    texts = [facts(view), place(view), "", *(coverage(view) or ["This run has not said what runs in FP8."]), ""]
    versions = view.facts.get("versions")
    if isinstance(versions, dict):
        texts += [clean(f"{name} {value}") for name, value in versions.items()]
    if view.probes:
        worst = f"at most {view.worst_tokens:.0f} differing tokens, by up to {number(view.worst_abs)}"
        texts += ["", f"parity: {view.probes} probe{'' if view.probes == 1 else 's'}, {worst}"]
    return [Text(line) for text in texts for line in (wrap(text, width, 20) if text else [""])]


def _messages(view: View, width: int, now: float) -> list[Text]:
    lines: list[Text] = []
    for row in reversed(view.messages):
        level, at = str(row.get("level", "info")), finite(row.get("time"))
        clock = "" if at is None else time.strftime("%H:%M:%S  ", time.localtime(at))
        text = clock + ("" if level == "info" else f"{level}: ") + str(row.get("text", ""))
        lines += [Text(line) for line in wrap(clean(text), width, 20)]
    return lines or [Text("no message yet")]


SCREENS: dict[str, tuple[str, Callable[[View, int, float], list[Text]]]] = {
    "s": ("samples", _samples),
    "t": ("timings", _timings),
    "l": ("ledger", _ledger),
    "c": ("coverage", _coverage),
    "m": ("messages", _messages),
    "h": ("help", _help),
}
