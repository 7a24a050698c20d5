"""The trainer's side of a refit: announce, send in buckets, finish, and check the engine's digest; or abort."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Protocol

from torch import Tensor

from trtl_rl.errors import EngineError, RefitError
from trtl_rl.refit import delta
from trtl_rl.refit.manifest import Bucket, Manifest, RefitResult, buckets

if TYPE_CHECKING:
    from trtl_rl.refit.validate import BlockScaleContract

Mode = Literal["full", "delta"]


class RefitTarget(Protocol):
    """The part of an engine that takes weights."""

    def begin_refit(self, manifest: Manifest) -> bool: ...
    def write(self, bucket: Bucket) -> None: ...
    def finish_refit(self) -> RefitResult: ...
    def abort_refit(self) -> None: ...


@dataclass(frozen=True)
class Sent:
    """A version that was sent: what the next one is compared with."""

    tensors: Mapping[str, Tensor]
    manifest: Manifest

    def digests_in(self, tensors: Mapping[str, Tensor]) -> dict[str, str]:
        """Digests of those ``tensors`` that are this version's very objects, as a frozen base's are: they have not changed."""
        known = self.manifest.digests
        return {name: known[name] for name, tensor in tensors.items() if self.tensors.get(name) is tensor}


@dataclass(frozen=True)
class RefitReport:
    """What a refit moved, and how long its stages took in seconds.

    Attributes:
        bytes: Of what was sent.
        changed_frac: Share of the version's bytes whose elements differ from the version before.
        move: Digests, of a delta the comparison too, and transport with the engine's checks of it.
        decode: The engine's codes to operands, beside generation.
        finish: From the last bucket until the version was live, ``decode`` included.
        pause: The part of ``finish`` in which the engine could not generate.
    """

    bytes: int
    changed_frac: float
    move: float
    decode: float
    finish: float
    pause: float
    sent: Sent


def send(
    target: RefitTarget,
    tensors: Mapping[str, Tensor],
    *,
    version: int,
    coverage: str,
    bucket_bytes: int,
    mode: Mode = "full",
    previous: Sent | None = None,
    before_finish: Callable[[], None] = lambda: None,
    contract: BlockScaleContract | None = None,
) -> RefitReport:
    """Bring ``target`` to ``version``, whose tensors are given in the layout of ``tensor_specs``.

    Args:
        mode: ``delta`` sends what changed since ``previous``, tensor by tensor where that is shorter; and everything when there
            is no ``previous`` or the engine holds another version.
        previous: The version before, also to report which share of bytes has changed.
        before_finish: Called when everything has arrived, while the engine still generates with the version before.
        contract: What the tensors must comply with, checked before the engine hears of them; for one that checks nothing itself.

    Raises:
        RefitError: the contract was broken, or the engine refused, and is at the version before; or it ended at another digest.
    """
    start = time.perf_counter()
    if contract is not None:
        contract.check(tensors)
    manifest = Manifest.of(tensors, version, coverage, {} if previous is None else previous.digests_in(tensors))
    base = previous if mode == "delta" else None
    takes_changes = target.begin_refit(replace(manifest, base=None if base is None else base.manifest.digest))
    try:
        chosen, changed = choose(tensors, manifest, previous if takes_changes else None)
        for bucket in buckets(chosen.tensors, bucket_bytes, chosen.packed):
            target.write(bucket)
        moved = time.perf_counter()
        if changed is None:  # while the engine decodes
            changed = count_changed(tensors, manifest, previous)
        before_finish()
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
    return RefitReport(
        bytes=sum(tensor.nbytes for tensor in chosen.tensors.values()),
        changed_frac=changed / sum(tensor.nbytes for tensor in tensors.values()),
        move=moved - start,
        decode=result.decode_seconds,
        finish=finished - moved,
        pause=result.pause_seconds,
        sent=Sent(tensors, manifest),
    )


def choose(tensors: Mapping[str, Tensor], manifest: Manifest, previous: Sent | None) -> tuple[Bucket, int | None]:
    """What to send, and how many bytes of the version changed, which nobody knows where all of it is sent.

    Args:
        previous: What the engine holds, if it takes changes to that. Each tensor whose digest differs is compared once.
    """
    if previous is None:
        return Bucket(tensors), None
    before = previous.manifest.digests
    chosen: dict[str, Tensor] = {}
    packed: set[str] = set()
    total = 0
    for name, digest in manifest.digests.items():
        if before.get(name) == digest:
            continue
        tensor = tensors[name]
        changed, small = delta.pack(tensor, previous.tensors[name])
        total += changed * tensor.element_size()
        if small is not None:
            chosen[name] = small
            packed.add(name)
        elif changed:
            chosen[name] = tensor
    return Bucket(chosen, frozenset(packed)), total


def count_changed(tensors: Mapping[str, Tensor], manifest: Manifest, previous: Sent | None) -> int:
    """How many bytes of a version differ from the version before, by elements; all of them where there is none."""
    if previous is None:
        return sum(tensor.nbytes for tensor in tensors.values())
    before = previous.manifest.digests
    total = 0
    for name, digest in manifest.digests.items():
        if before.get(name) != digest:
            total += delta.changed_elements(tensors[name], previous.tensors[name]) * tensors[name].element_size()
    return total
