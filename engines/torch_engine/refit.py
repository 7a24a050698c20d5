"""The embedded engine's weights: what arrives is checked, decoded beside generation, and swapped in."""

from __future__ import annotations

import time

from trtl_rl.model.weights import DecoderWeights, tensor_specs
from trtl_rl.refit.double_buffer import DoubleBuffer
from trtl_rl.refit.manifest import Bucket, Manifest, RefitResult
from trtl_rl.refit.receiver import RefitReceiver


class EngineRefit:
    """Brings ``weights`` from version to version. All but :meth:`finish` may run in another thread than the one that generates.

    Args:
        weights: The operands that generate. Their content is exchanged by :meth:`finish`, and by nothing else once there is a
            version.
    """

    def __init__(self, weights: DecoderWeights) -> None:
        description = weights.description
        self._receiver = RefitReceiver(tensor_specs(description), description.coverage.digest)
        self._buffer = DoubleBuffer(weights)
        self._decode_seconds: float | None = None  # of the open refit, once it is decoded

    @property
    def generates(self) -> bool:
        """Whether there is a whole version to generate with."""
        return self._receiver.generates

    @property
    def arrived(self) -> bool:
        """Whether a refit is open and all of its tensors have arrived."""
        return self._receiver.complete

    def begin(self, manifest: Manifest) -> bool:
        takes_changes = self._receiver.begin(manifest)
        self._decode_seconds = None
        return takes_changes

    def write(self, bucket: Bucket) -> None:
        self._receiver.write(bucket)

    def decode(self) -> None:
        """Decode what has arrived, unless that was done. Raises RefitError, and ends the refit, when something is missing."""
        tensors, manifest = self._receiver.check()
        if self._decode_seconds is None:
            start = time.perf_counter()
            self._buffer.decode(tensors, manifest.digests)
            self._decode_seconds = time.perf_counter() - start

    def finish(self) -> RefitResult:
        """Make the version live, between two steps; decodes first what was not decoded before."""
        start = time.perf_counter()
        self.decode()
        _, manifest = self._receiver.check()
        assert self._decode_seconds is not None
        self._buffer.swap(manifest.version, manifest.digests)
        self._receiver.finish()
        return RefitResult(manifest.version, manifest.digest, self._decode_seconds, time.perf_counter() - start)

    def abort(self) -> None:
        self._receiver.abort()
