"""The next version beside the one that is live: what changed is decoded into tensors of its own, the rest is shared."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from trtl_rl.model.weights import DecoderWeights


class DoubleBuffer:
    """Decodes a version beside the one that is live, and makes it live at once.

    Between refits there is one set of operands. An attempt that ends early leaves nothing behind.

    Args:
        live: The packed operands that generate; the object stays the same, its content is exchanged.
    """

    def __init__(self, live: DecoderWeights) -> None:
        self._live = live
        self._next: DecoderWeights | None = None
        self._digests: dict[str, str] = {}  # of the tensors that the live operands were decoded from

    def decode(self, tensors: Mapping[str, Tensor], digests: Mapping[str, str]) -> None:
        """Decode what differs from the live version; another thread may generate with that meanwhile."""
        self._next = None  # of an attempt that ended early
        following = self._live.successor()
        names = {name for name, digest in digests.items() if self._digests.get(name) != digest}
        following.load({name: tensors[name] for name in sorted(following.with_parts(names, digests))})
        self._next = following

    def swap(self, version: int, digests: Mapping[str, str]) -> None:
        """Make what was decoded last live, as ``version``. No token may be under way."""
        assert self._next is not None
        self._live.exchange(self._next)
        self._live.version = version
        self._digests = dict(digests)
        self._next = None  # gives back the memory of the version before
