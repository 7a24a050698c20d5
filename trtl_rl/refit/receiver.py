"""The engine's side of a refit: ``begin → write* → finish``, or ``abort``.

The engine is wholly at one version, or refuses to generate.

==========  =====================  =============================================
state       may be followed by     generates
==========  =====================  =============================================
``empty``   begin                  no: no weights yet
``ready``   begin                  yes
``open``    write, finish, abort   no
``broken``  begin                  no: until a full refit succeeds
==========  =====================  =============================================
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from trtl_rl.errors import RefitError
from trtl_rl.model.weights import SCALE_SUFFIX, TensorSpec
from trtl_rl.refit.manifest import Bucket, Manifest, TensorEntry, dtype_name, joined_digest, tensor_digest

State = Literal["empty", "ready", "open", "broken"]


class RefitReceiver:
    """Checks and stages the tensors of one version.

    Args:
        expected: Every tensor that the model needs.
        coverage: Digest of the expanded recipe that this engine runs.
    """

    def __init__(self, expected: Sequence[TensorSpec], coverage: str) -> None:
        self.state: State = "empty"
        self._expected = {spec.name: spec for spec in expected}
        self._coverage = coverage
        self._manifest: Manifest | None = None
        self._entries: dict[str, TensorEntry] = {}
        self._staged: dict[str, Tensor] = {}
        self._digests: dict[str, str] = {}

    def begin(self, manifest: Manifest) -> None:
        """Open a version. Raises RefitError, and changes nothing, when it cannot become a whole one."""
        if self.state == "open":
            assert self._manifest is not None
            raise RefitError(f"A refit to version {self._manifest.version} is still open: finish or abort it first.")
        if manifest.coverage != self._coverage:
            raise RefitError("Trainer and engine run different recipes: the digests of their module lists differ.")
        entries = {entry.name: entry for entry in manifest.tensors}
        for name in sorted(self._expected.keys() - entries.keys()):
            raise RefitError(f"The refit lacks {name}.")
        for name, entry in sorted(entries.items()):
            spec = self._expected.get(name)
            if spec is None:
                raise RefitError(f"The refit has {name}, which the model does not have.")
            if entry.dtype != dtype_name(spec.dtype) or entry.shape != spec.shape:
                raise RefitError(
                    f"{name}: the refit announces {entry.dtype} {list(entry.shape)}, the model needs "
                    f"{dtype_name(spec.dtype)} {list(spec.shape)}."
                )
        self.state = "open"
        self._manifest, self._entries = manifest, entries
        self._staged, self._digests = {}, {}

    def write(self, bucket: Bucket) -> None:
        """Copy a bucket. A fault breaks the refit: nothing of it will be loaded."""
        if self.state != "open":
            raise RefitError(f"No refit is open (state {self.state}): begin comes before write.")
        try:
            for name, tensor in bucket.tensors.items():
                self._stage(name, tensor)
        except RefitError:
            self.state = "broken"
            raise

    def finish(self) -> tuple[dict[str, Tensor], Manifest, str]:
        """The staged tensors, their manifest and joined digest; the caller loads them, then calls :meth:`loaded`."""
        if self.state != "open":
            raise RefitError(f"No refit is open (state {self.state}): begin comes before finish.")
        assert self._manifest is not None
        self.state = "broken"  # until every check has passed and the caller has loaded
        missing = sorted(self._entries.keys() - self._staged.keys())
        if missing:
            raise RefitError(
                f"{len(missing)} of {len(self._entries)} announced tensors never arrived, first {missing[0]}."
            )
        digest = joined_digest(self._digests)
        if digest != self._manifest.digest:
            raise RefitError("The digest of what arrived differs from the manifest's.")
        staged, self._staged = self._staged, {}
        return staged, self._manifest, digest

    def loaded(self) -> None:
        """The version is live."""
        self.state = "ready"

    def abort(self) -> None:
        """Give up an open refit. The engine may hold no half version, so it waits for a full one."""
        if self.state == "open":
            self.state = "broken"
            self._staged, self._digests = {}, {}

    def _stage(self, name: str, tensor: Tensor) -> None:
        entry = self._entries.get(name)
        if entry is None:
            raise RefitError(f"{name} was not announced by the manifest.")
        if name in self._staged:
            raise RefitError(f"{name} arrived twice.")
        if dtype_name(tensor.dtype) != entry.dtype or tuple(tensor.shape) != entry.shape:
            arrived = f"{dtype_name(tensor.dtype)} {list(tensor.shape)}"
            raise RefitError(f"{name}: announced {entry.dtype} {list(entry.shape)}, arrived {arrived}.")
        copy = tensor.clone(memory_format=torch.contiguous_format)
        digest = tensor_digest(copy)
        if digest != entry.digest:
            raise RefitError(f"{name}: its bytes are not those that the trainer announced.")
        if name.endswith(SCALE_SUFFIX) and not bool((copy.isfinite() & (copy > 0)).all()):
            raise RefitError(f"{name} holds a scale that is zero, negative or not finite.")
        self._staged[name], self._digests[name] = copy, digest
