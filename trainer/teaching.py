"""Which prompts teach: groups of equal rewards have no advantage anywhere (DAPO's dynamic sampling, arXiv 2503.14476, section 3.2).

Two remedies, each with its FLOPs. Refilling throws such a group away and starts another prompt in its place: what that cost is
waste. Skipping passes over a prompt ahead, by the mean reward of its last group: what that group cost is an estimate of
what is saved. A skipped prompt is tried again an epoch later, since the model has changed.
"""

from __future__ import annotations

import threading
from typing import Any

from trtl_rl.config import RunConfig
from trtl_rl.rollout import Group

Recent = tuple[int, float, int]  # occurrence, mean reward and search FLOPs of a prompt's last group


class Teaching:
    """Decides on groups and prompts, and counts. All methods may be called from several threads.

    Args:
        config: Its ``batch.zero_signal``, ``batch.refill_limit``, ``task.skip_below`` and ``task.skip_above`` matter.
        recent: What :meth:`state` gave before a resume.
    """

    def __init__(self, config: RunConfig, recent: dict[str, Any] | None = None) -> None:
        self._refill = config.batch.zero_signal == "refill"
        self._limit = config.batch.refill_limit * config.batch.prompts
        self._below, self._above = config.task.skip_below, config.task.skip_above
        self._skips = self._below is not None or self._above is not None
        self._recent: dict[int, Recent] = {int(id): tuple(item) for id, item in (recent or {}).items()}
        self._in_a_row = 0
        self._counts: dict[str, float] = {}
        self._lock = threading.Lock()

    def refill(self, group: Group, flops: int) -> bool:
        """Note a scored group; whether it is to be thrown away for another prompt.

        After ``batch.refill_limit`` batches without any signal it is not, so that the loop sees that nothing can be learned.
        """
        with self._lock:
            if self._skips:
                rewards = [reward for _, reward in group.scored()]
                self._recent[group.prompt.id] = (group.prompt.occurrence, sum(rewards) / len(rewards), flops)
            if group.has_signal():
                self._in_a_row = 0
                return False
            self._in_a_row += 1
            if not self._refill or self._in_a_row > self._limit:
                return False
            self._count("refilled", "groups", flops)
            return True

    def skips(self, id: int, occurrence: int) -> bool:
        """Whether to pass over a prompt this time."""
        with self._lock:
            if id not in self._recent:
                return False
            seen, mean, flops = self._recent[id]
            out = (self._below is not None and mean <= self._below) or (self._above is not None and mean >= self._above)
            if not out or occurrence != seen + 1:
                return False
            self._count("skipped", "prompts", flops)
            return True

    def take_metrics(self) -> dict[str, float]:
        """``sampling/{refilled_groups,refilled_flops,skipped_prompts,skipped_flops}`` since the last call."""
        names = []
        if self._refill:
            names += ["sampling/refilled_groups", "sampling/refilled_flops"]
        if self._skips:
            names += ["sampling/skipped_prompts", "sampling/skipped_flops"]
        with self._lock:
            taken, self._counts = self._counts, {}
        return {name: taken.get(name, 0) for name in names}

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        with self._lock:
            return {str(id): list(item) for id, item in self._recent.items()}

    def _count(self, what: str, unit: str, flops: int) -> None:
        for name, value in ((f"sampling/{what}_{unit}", 1), (f"sampling/{what}_flops", flops)):
            self._counts[name] = self._counts.get(name, 0) + value
