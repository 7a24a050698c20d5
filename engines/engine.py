"""``RolloutEngine``: what the trainer asks of an engine, whatever runs behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from trtl_rl.recipe.coverage import Coverage
from trtl_rl.refit.manifest import Bucket, Manifest, RefitResult
from trtl_rl.rollout import Completion, Request

InFlight = Literal["finish", "continue"]


class RolloutEngine(Protocol):
    """Generates completions with one whole version of the weights.

    ``submit`` queues and returns at once; ``poll`` hands out what has finished since. A refit is
    ``begin_refit``, ``write`` for every bucket, then ``finish_refit`` or ``abort_refit``; between the first and the last
    of them, and after an abort, the engine refuses to generate.
    """

    @property
    def version(self) -> int:
        """Weight version that the engine generates with; -1 before the first refit."""

    @property
    def busy_seconds(self) -> float:
        """Time spent generating so far."""

    def coverage(self) -> Coverage:
        """The linears that the engine really runs, and the format of each."""

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests. All are refused, or none.

        Raises:
            UserError: a prompt is empty or longer than the context allows.
            EngineError: there are no weights, or a failed refit left none that are whole.
        """

    def poll(self, timeout: float) -> list[Completion]:
        """Completions finished since the last call; waits up to ``timeout`` seconds for the first."""

    def cancel(self, ids: Sequence[int]) -> None:
        """Stop requests; their unfinished completions come back with ``finish_reason="cancelled"``."""

    def pause(self, policy: InFlight) -> None:
        """Generate no more tokens: at once (``continue``), or when unfinished completions have ended (``finish``)."""

    def resume(self) -> None:
        """Go on after ``pause``."""

    def probe(self, requests: Sequence[Request]) -> list[Completion]:
        """Generate through the normal path, with logprobs, and wait for all."""

    def begin_refit(self, manifest: Manifest) -> None:
        """Announce a version. Raises RefitError when recipe, tensors or order do not fit."""

    def write(self, bucket: Bucket) -> None:
        """Take one bucket of the announced tensors."""

    def finish_refit(self) -> RefitResult:
        """Check that every tensor arrived and make the version live.

        Completions that go on (``buffer.in_flight=continue``) keep the keys and values of their earlier tokens; a prompt
        that starts afterwards never meets any of an older version.
        """

    def abort_refit(self) -> None:
        """Give up an open refit. The engine keeps refusing to generate until a full refit succeeds."""

    def close(self) -> None:
        """Release everything. Safe to call twice."""
