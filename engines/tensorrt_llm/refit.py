"""A refit of TensorRT-LLM, seen from the driver: one version on all ranks, or the version before on all of them.

::

    begin   every rank announces the version to its receiver
    write   every rank copies the bucket out of shared memory
    finish  1. every rank loads what has arrived into its modules, and reads it back
            2. all have succeeded: every rank forgets the version before
               one has failed: what is in flight is aborted, and every rank loads the version before again

Where the second half of that fails too, or there was no version before, nothing is generated until a whole refit succeeds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from trtl_rl.errors import EngineError, RefitError
from trtl_rl.refit.manifest import RefitResult

if TYPE_CHECKING:
    from trtl_rl.refit.manifest import Manifest

MEMORY_GROWTH = 0.1  # of the version's bytes: above this a refit has kept more than it should


class Workers(Protocol):
    """Calls a method of all ranks."""

    def __call__(self, method: str, *args: Any) -> list[dict[str, Any]]: ...


class WorkerRefit:
    """Brings all ranks from version to version.

    Args:
        workers: Calls a method of every rank and returns their answers.
        quiesce: Stops generation, and starts again what was in flight from its beginning.
    """

    def __init__(self, workers: Workers, quiesce: Callable[[], None]) -> None:
        self._workers, self._quiesce = workers, quiesce
        self.version = -1
        self.arrived = False  # nothing is decoded beside generation: workers take codes as they are
        self.broken: str | None = None
        self.memory_growth = 0
        self._manifest: Manifest | None = None

    @property
    def generates(self) -> bool:
        """Whether there is one whole version on all ranks."""
        return self.version >= 0 and self.broken is None

    def begin(self, manifest: Manifest) -> bool:
        takes_changes = all(self._all("trtl_begin", manifest.to_json()))
        self._manifest = manifest
        return takes_changes

    def write(self, description: dict[str, Any]) -> None:
        """Take a bucket that lies in memory which all ranks can open."""
        self._all("trtl_write", description)

    def decode(self) -> None:
        """Refuse a version that is not whole, while generation still goes on."""
        self._all("trtl_check")

    def finish(self, drain: bool) -> RefitResult:
        """Make the version live. Raises RefitError when that failed; then the version before is, if there was one."""
        assert self._manifest is not None or self.version < 0
        self.decode()
        manifest = self._manifest
        assert manifest is not None
        start = time.perf_counter()
        answers = self._workers("trtl_load", drain)
        faults = _faults(answers)
        digests = {answer["result"]["digest"] for answer in answers if "result" in answer}
        if not faults and digests != {manifest.digest}:
            faults = [f"ranks report the digests {', '.join(sorted(digests))}, not {manifest.digest}"]
        if faults:
            self._restore("; ".join(faults))
        self._all("trtl_commit")
        self.memory_growth = max(answer["result"]["memory_growth"] for answer in answers)
        self.version, self.broken, self._manifest = manifest.version, None, None
        return RefitResult(manifest.version, manifest.digest, 0.0, time.perf_counter() - start)

    def adopted(self, version: int) -> None:
        """All ranks were loaded with a version by other means."""
        self.version = version

    def abort(self) -> None:
        self._manifest = None
        self._all("trtl_abort")

    def restore(self) -> None:
        """Load the live version again, after its memory was given away."""
        self._all("trtl_restore")

    def _restore(self, fault: str) -> None:
        """After a fault: the version before on all ranks. Always raises RefitError."""
        version = self._manifest.version if self._manifest else -1
        self._manifest = None
        self._quiesce()
        undone = _faults(self._workers("trtl_restore"))
        if undone:
            self.broken = (
                f"a refit to version {version} failed ({fault}), and ranks hold a mixture ({'; '.join(undone)})"
            )
            raise RefitError(
                f"The refit to version {version} failed: {fault}. Nothing is generated until a whole refit succeeds."
            )
        raise RefitError(
            f"The refit to version {version} failed: {fault}. All ranks are back at version {self.version}."
        )

    def _all(self, method: str, *args: Any) -> list[Any]:
        """Results of every rank. Raises RefitError when one failed; then what all have of a version is forgotten."""
        answers = self._workers(method, *args)
        faults = _faults(answers)
        if faults:
            self._manifest = None
            if method != "trtl_abort":
                self._workers("trtl_abort")
            raise RefitError("; ".join(faults))
        return [answer["result"] for answer in answers]


def _faults(answers: list[dict[str, Any]]) -> list[str]:
    """What ranks complain of; once, where all say the same."""
    if not answers:
        raise EngineError("TensorRT-LLM's workers do not answer.")
    texts = [answer["error"] for answer in answers if "error" in answer]
    return list(dict.fromkeys(texts))
