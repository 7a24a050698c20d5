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
    ``begin_refit``, ``write`` for every bucket, then ``finish_refit`` or ``abort_refit``; meanwhile, and after an abort, the
    engine goes on with the version before. Without a version it refuses to generate.
    """

    @property
    def version(self) -> int:
        """Weight version that the engine generates with; -1 before the first refit."""

    @property
    def busy_seconds(self) -> float:
        """Time spent generating so far."""

    def progress(self) -> dict[int, list[int]]:
        """Tokens of every unfinished completion that has begun, by request; an empty list for a request that waits.

        It may be some seconds old. A request that is missing here and never comes back was lost.
        """

    def coverage(self) -> Coverage:
        """The linears that the engine really runs, and the format of each."""

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests. All are refused, or none.

        Raises:
            UserError: a prompt is empty or longer than the context allows.
            EngineError: there are no weights yet.
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

    def begin_refit(self, manifest: Manifest) -> bool:
        """Announce a version. Raises RefitError when recipe, tensors or order do not fit.

        Returns:
            Whether the engine holds ``manifest.base``, so that changes to it will do; otherwise every tensor must come whole.
        """

    def write(self, bucket: Bucket) -> None:
        """Take one bucket of the announced tensors.

        Raises RefitError, at the latest in the next call, when something is wrong with it; that ends the refit.
        """

    def finish_refit(self) -> RefitResult:
        """Make the version live. Raises RefitError, and ends the refit, when a tensor never arrived.

        Completions that go on (``buffer.in_flight=continue``) keep the keys and values of their earlier tokens; a prompt
        that starts afterwards never meets any of an older version.
        """

    def abort_refit(self) -> None:
        """Give up an open refit; the version before stays."""

    def close(self) -> None:
        """Release everything. Safe to call twice."""
