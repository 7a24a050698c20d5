"""The engine's side of a refit: ``begin → write* → finish``, or ``abort``.

The engine is wholly at one version, or refuses to generate: what arrives is kept apart from the version that is live, and
takes its place when it is whole. So a refit that is aborted, or that fails at any point, leaves the version before it.

=========  =====================  =========================  ==================================================
state      may be followed by     a failure or abort         generates
                                  leads to
=========  =====================  =========================  ==================================================
``empty``  begin                  ``empty``                  no: no weights yet
``ready``  begin                  ``ready``                  yes, the live version
``open``   write, finish, abort   ``ready``, or ``empty``    yes, the version before; no, if there is none
                                  if there was no version
=========  =====================  =========================  ==================================================
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from trtl_rl.errors import RefitError
from trtl_rl.model.weights import SCALE_SUFFIX, TensorSpec
from trtl_rl.refit import delta
from trtl_rl.refit.manifest import Bucket, Manifest, TensorEntry, dtype_name, tensor_digest

State = Literal["empty", "ready", "open"]


class RefitReceiver:
    """Checks and keeps the tensors of one version, and of the next while a refit is open.

    Args:
        expected: Every tensor that the model needs.
        coverage: Digest of the expanded recipe that this engine runs.
    """

    def __init__(self, expected: Sequence[TensorSpec], coverage: str) -> None:
        self._expected = {spec.name: spec for spec in expected}
        self._coverage = coverage
        self._live: Manifest | None = None
        self._held: dict[str, Tensor] = {}  # tensors of the live version, in CPU memory: a delta's base
        self._lent: set[str] = set()  # those of them whose memory is the sender's
        self._room: dict[str, Tensor] = {}  # where the next ones go: new memory costs more than a copy
        self._manifest: Manifest | None = None
        self._entries: dict[str, TensorEntry] = {}
        self._takes_changes = False
        self._staged: dict[str, Tensor] = {}
        self._arrived: set[str] = set()
        self._staying: set[str] = set()  # of what has arrived: what stays in the sender's memory

    @property
    def state(self) -> State:
        if self._manifest is not None:
            return "open"
        return "ready" if self.generates else "empty"

    @property
    def generates(self) -> bool:
        """Whether there is a whole version to generate with."""
        return self._live is not None

    @property
    def held(self) -> Mapping[str, Tensor]:
        """The tensors of the live version, in CPU memory, the sender's or this process's own."""
        return self._held

    @property
    def version(self) -> int:
        """The live version, or -1."""
        return -1 if self._live is None else self._live.version

    def begin(self, manifest: Manifest) -> bool:
        """Open a version. Raises RefitError, and changes nothing, when it cannot become a whole one.

        Returns:
            Whether changes to the manifest's base will do; otherwise every tensor must come whole.
        """
        if self._manifest is not None:
            raise RefitError(f"A refit to version {self._manifest.version} is still open: finish or abort it first.")
        if manifest.coverage != self._coverage:
            raise RefitError(
                "Trainer and engine run different recipes: the digests of their module lists differ.", repeats=True
            )
        entries = {entry.name: entry for entry in manifest.tensors}
        for name in sorted(self._expected.keys() - entries.keys()):
            raise RefitError(f"The refit lacks {name}.", repeats=True)
        for name, entry in sorted(entries.items()):
            spec = self._expected.get(name)
            if spec is None:
                raise RefitError(f"The refit has {name}, which the model does not have.", repeats=True)
            if entry.dtype != dtype_name(spec.dtype) or entry.shape != spec.shape:
                raise RefitError(
                    f"{name}: the refit announces {entry.dtype} {list(entry.shape)}, the model needs "
                    f"{dtype_name(spec.dtype)} {list(spec.shape)}.",
                    repeats=True,
                )
        self._manifest, self._entries = manifest, entries
        self._staged, self._arrived, self._staying = {}, set(), set()
        self._takes_changes = self._live is not None and manifest.base == self._live.digest
        if self._takes_changes:
            assert self._live is not None
            same = self._live.digests.items() & manifest.digests.items()
            self._staged = {name: self._held[name] for name, _ in same}
        return self._takes_changes

    def write(self, bucket: Bucket) -> None:
        """Copy a bucket that does not stay, or apply its changes. A fault ends the refit: nothing of it will be loaded."""
        if self._manifest is None:
            raise RefitError(f"No refit is open (state {self.state}): begin comes before write.")
        try:
            for name, tensor in bucket.tensors.items():
                self._stage(name, tensor, name in bucket.packed, bucket.stays)
            self._check_scales([name for name in bucket.tensors if name.endswith(SCALE_SUFFIX)])
        except RefitError:
            self.abort()
            raise

    @property
    def complete(self) -> bool:
        """Whether a refit is open and has all of its tensors."""
        return self._manifest is not None and self._staged.keys() == self._entries.keys()

    def check(self) -> tuple[Mapping[str, Tensor], Manifest]:
        """The whole version that has arrived; the caller decodes it, then calls :meth:`finish`. A fault ends the refit."""
        if self._manifest is None:
            raise RefitError(f"No refit is open (state {self.state}): begin comes before finish.")
        missing = sorted(self._entries.keys() - self._staged.keys())
        if missing:
            self.abort()
            raise RefitError(
                f"{len(missing)} of {len(self._entries)} announced tensors never arrived, first {missing[0]}."
            )
        return self._staged, self._manifest

    def finish(self) -> None:
        """The version that was checked is live."""
        assert self._manifest is not None and self.complete
        self._live, self._manifest = self._manifest, None
        self._room.update(
            {name: tensor for name, tensor in self._held.items() if name in self._arrived and name not in self._lent}
        )
        if self._staying == self._staged.keys():
            self._room.clear()  # whole versions come into the sender's memory
        self._lent = (self._lent - self._arrived) | self._staying
        self._held = self._staged

    def abort(self) -> None:
        """Forget the open refit, if there is one; the live version stays."""
        if self._manifest is not None:
            self._manifest = None
            self._room.update({name: self._staged[name] for name in self._arrived - self._staying})

    def _stage(self, name: str, tensor: Tensor, packed: bool, stays: bool) -> None:
        entry = self._entries.get(name)
        if entry is None:
            raise RefitError(f"{name} was not announced by the manifest.")
        if name in self._arrived:
            raise RefitError(f"{name} arrived twice.")
        if packed and not self._takes_changes:
            raise RefitError(f"{name} arrived as a change to a version that this engine does not hold.")
        if not packed and (dtype_name(tensor.dtype) != entry.dtype or tuple(tensor.shape) != entry.shape):
            arrived = f"{dtype_name(tensor.dtype)} {list(tensor.shape)}"
            raise RefitError(f"{name}: announced {entry.dtype} {list(entry.shape)}, arrived {arrived}.")
        if packed:
            kept = self._own(name)
            try:
                delta.apply(self._held[name], tensor, kept)
            except ValueError as error:
                raise RefitError(f"{name} arrived as a change that cannot be applied: {error}.") from None
        elif stays:
            kept = tensor
            self._staying.add(name)
        else:
            kept = self._own(name).copy_(tensor)
        if tensor_digest(kept) != entry.digest:
            raise RefitError(f"{name}: its bytes are not those that the trainer announced.")
        self._staged[name] = kept
        self._arrived.add(name)

    def _own(self, name: str) -> Tensor:
        """Memory of this process for a tensor."""
        spec = self._expected[name]
        kept = self._room.pop(name, None)
        return torch.empty(spec.shape, dtype=spec.dtype) if kept is None else kept

    def _check_scales(self, names: Sequence[str]) -> None:
        scales = [self._staged[name] for name in names]
        if scales and not _positive(torch.cat([scale.flatten() for scale in scales])):
            name = next(name for name, scale in zip(names, scales, strict=True) if not _positive(scale))
            raise RefitError(f"{name} holds a scale that is zero, negative or not finite.", repeats=True)


def _positive(scale: Tensor) -> bool:
    return bool((scale.isfinite() & (scale > 0)).all())
