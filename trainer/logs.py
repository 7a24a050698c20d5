"""A run as lines of Python's ``logging``, for scripts and notebooks, where no dashboard reads ``metrics.jsonl``."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trtl_rl.metrics import MetricsWriter

LOGGER = logging.getLogger("trtl_rl")
_LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


class LoggedMetrics(MetricsWriter):
    """Writes rows, and logs those that a person wants to see: steps, evaluations, messages, and what is under way.

    Where nobody has set logging up, lines go to standard error; ``logging.getLogger("trtl_rl")`` is the place for other wishes,
    such as ``setLevel(logging.WARNING)``.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._begun = {"checkpoint"}  # work that is not told, or was

    def write(self, kind: str, **fields: Any) -> None:
        super().write(kind, **fields)
        if kind == "message":
            LOGGER.log(_LEVELS[fields["level"]], "%s: %s", fields["level"], fields["text"])
        elif kind == "step":
            LOGGER.info("%s", step_line(fields["step"], fields["metrics"]))
        elif kind == "evaluation":
            LOGGER.info("evaluation at step %d: %s", fields["step"], _evaluated(fields["metrics"]))
        elif kind == "start":
            where = fields["run_dir"]
            LOGGER.info("run %s, %d steps; to look on: trtl-rl watch %s", where, fields["steps"], where)
        elif kind == "end" and fields["status"] != "failed":  # a failure is raised
            LOGGER.info("%s", fields["text"])
        elif kind == "progress" and fields["name"] not in self._begun:
            self._begun.add(fields["name"])
            LOGGER.info("%s ...", fields["name"])


def show_lines() -> None:
    """Let lines be seen where nobody has set logging up."""
    if LOGGER.hasHandlers():
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    LOGGER.addHandler(handler)
    if LOGGER.level == logging.NOTSET:
        LOGGER.setLevel(logging.INFO)


def step_line(step: int, metrics: Mapping[str, float]) -> str:
    """A step in one line."""
    parts = [
        f"{name.removeprefix('rewards/').removesuffix('/mean')} {value:.3g}"
        for name, value in metrics.items()
        if name == "reward" or (name.startswith("rewards/") and name.endswith("/mean"))
    ]
    parts.append(f"length {metrics['completions/mean_length']:.3g}")
    return f"step {step}: {', '.join(parts)}, {metrics['timing_s/step']:.3g} s"


def _evaluated(metrics: Mapping[str, float]) -> str:
    plain = {name.removeprefix("eval/"): value for name, value in metrics.items() if "/ci_" not in name}
    return ", ".join(f"{name} {value:.3g}" for name, value in plain.items() if not name.startswith("version_"))
