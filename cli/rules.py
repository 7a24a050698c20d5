"""The only reasons for colour on a screen, in one table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from trtl_rl.cli.view import View


@dataclass(frozen=True)
class Rule:
    """Colours the entry ``name`` with ``style`` while ``broken(view, now)`` holds.

    Styles name the terminal's own colours, and each can be read on a light and on a dark background.
    """

    name: str
    style: str
    when: str
    meaning: str
    broken: Callable[[View, float], bool]


def _above(name: str, limit: float) -> Callable[[View, float], bool]:
    return lambda view, now: view.metrics.get(name, limit) > limit


IMBALANCE_FALL = 0.6
RED, YELLOW = "bold red", "black on yellow"

RULES: tuple[Rule, ...] = (
    Rule(
        "mismatch",
        RED,
        "above 0",
        "trainer and engine disagree at the same weights",
        lambda view, now: any(view.probe.get(f"mismatch/{part}", 0) > 0 for part in ("differing_tokens", "max_abs")),
    ),
    Rule(
        "stall",
        RED,
        "no progress for 10 median steps and 30 s",
        "the run hangs, was killed, or does a very long step",
        lambda view, now: view.stalled(now) is not None,
    ),
    Rule(
        "imbalance",
        YELLOW,
        f"below {IMBALANCE_FALL} of its start",
        "right answers become unlikely too",
        lambda view, now: (view.imbalance_change or 1.0) < IMBALANCE_FALL,
    ),
    Rule(
        "truncated",
        YELLOW,
        "above 20%",
        "answers end at sampling.max_new_tokens, incomplete",
        _above("completions/clipped_ratio", 0.2),
    ),
    Rule(
        "zero-signal",
        YELLOW,
        "above 50%",
        "most groups have equal rewards and teach nothing",
        _above("frac_reward_zero_std", 0.5),
    ),
)


def style_of(name: str, view: View, now: float) -> str:
    """The style of the entry ``name``: its rule's colour while the rule is broken, else none."""
    return next((rule.style for rule in RULES if rule.name == name and rule.broken(view, now)), "")


def broken_rules(view: View, now: float) -> list[Rule]:
    """The rules that are broken at ``now`` (Unix seconds), the gravest first."""
    return [rule for rule in RULES if rule.broken(view, now)]
