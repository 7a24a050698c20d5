"""The trainer's side of a refit: announce, send in buckets, finish, and check the engine's digest; or abort."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from trtl_rl.errors import EngineError, RefitError
from trtl_rl.refit.manifest import Bucket, Manifest, RefitResult, buckets


class RefitTarget(Protocol):
    """The part of an engine that takes weights."""

    def begin_refit(self, manifest: Manifest) -> None: ...
    def write(self, bucket: Bucket) -> None: ...
    def finish_refit(self) -> RefitResult: ...
    def abort_refit(self) -> None: ...


@dataclass(frozen=True)
class RefitReport:
    """What a refit moved and how long its stages took, in seconds; ``finish`` includes the engine's ``decode``."""

    bytes: int
    changed_frac: float
    move: float
    decode: float
    finish: float


def send(
    target: RefitTarget,
    tensors: Mapping[str, Tensor],
    *,
    version: int,
    coverage: str,
    bucket_bytes: int,
    previous: Mapping[str, Tensor] | None = None,
) -> RefitReport:
    """Bring ``target`` to ``version``, whose tensors are given in the layout of ``tensor_specs``.

    Args:
        previous: The version before, to report which share of bytes has changed.

    Raises:
        RefitError: the engine refused, or ended at another digest; it will not generate until a full refit succeeds.
    """
    start = time.perf_counter()
    manifest = Manifest.of(tensors, version, coverage)
    target.begin_refit(manifest)
    try:
        for bucket in buckets(tensors, bucket_bytes):
            target.write(bucket)
        moved = time.perf_counter()
        result = target.finish_refit()
        finished = time.perf_counter()
    except BaseException:
        with contextlib.suppress(EngineError):  # a dead engine needs no abort, and the first error is the one to tell
            target.abort_refit()
        raise
    if result.digest != manifest.digest or result.version != version:
        raise RefitError(
            f"After the refit to version {version} the engine is at {result.version}, or its digest differs."
        )
    total = sum(tensor.nbytes for tensor in tensors.values())
    changed = total
    if previous is not None:
        changed = sum(int((t != previous[n]).sum()) * t.element_size() for n, t in tensors.items())
    return RefitReport(total, changed / total, moved - start, result.decode_seconds, finished - moved)
