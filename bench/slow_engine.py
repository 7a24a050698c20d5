"""An embedded engine whose steps last as long as they are told to: it sleeps for the rest, as a host does while its GPU computes.

So several engines fit on a few cores, and what is measured of them is everything around the computing: who gets which prompt, how
completions come back, how weights travel. Its tokens are the embedded engine's own.

``python -m slow_engine``, with ``SLOW_ENGINE_STEP`` seconds, takes the place of ``trtl_rl.engines.child``; :func:`install` sees to
that in this process and on Ray's actors, where this folder is on ``PYTHONPATH``.
"""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path
from typing import Any

from trtl_rl.engines import backends, child, host, ray_engine

SECONDS = "SLOW_ENGINE_STEP"


class SlowEngine:
    """The embedded engine ``inner``, none of whose steps ends before ``seconds`` have passed."""

    def __init__(self, inner: Any, seconds: float) -> None:
        self._inner, self._seconds = inner, seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def step(self) -> None:
        end = time.perf_counter() + self._seconds
        self._inner.step()
        time.sleep(max(0.0, end - time.perf_counter()))


class SlowActor(ray_engine.EngineActor):
    """An actor whose engine is slow."""

    def __init__(self, log: str, limits: dict[str, Any]) -> None:
        host.CHILD = "slow_engine"
        super().__init__(log, limits)


def install(seconds: float) -> None:
    """From now on, engines that this process starts here or on a Ray cluster that it starts have such steps; 0: as they are."""
    os.environ[SECONDS] = str(seconds)
    paths = [str(Path(__file__).parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(filter(None, paths)))
    host.CHILD = "slow_engine"
    ray_engine.EngineActor = SlowActor  # type: ignore[misc]


def main() -> None:
    """The child of a host."""
    plain = backends.make_engine

    def slow(*arguments: Any, **named: Any) -> backends.Made:
        made = plain(*arguments, **named)
        return dataclasses.replace(made, engine=SlowEngine(made.engine, float(os.environ[SECONDS])))

    backends.make_engine = slow
    child.main()


if __name__ == "__main__":
    main()
