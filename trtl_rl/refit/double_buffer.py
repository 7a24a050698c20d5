"""Two sets of operands: one generates, the other takes the next version meanwhile."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from trtl_rl.model.weights import SCALE_SUFFIX, DecoderWeights


class DoubleBuffer:
    """Decodes a version beside the one that is live, and makes it live at once.

    The second set is made when the first version after the start arrives, and takes as much memory as the first. Each set
    knows by digest what it was decoded from, so only tensors that differ are decoded, whichever version it held before and
    wherever an earlier attempt ended.

    Args:
        live: The operands that generate; the object stays the same, its content is exchanged.
    """

    def __init__(self, live: DecoderWeights) -> None:
        self._live, self._spare = live, live  # without a version nothing generates: the first goes into the live set
        self._live_digests: dict[str, str] = {}
        self._spare_digests = self._live_digests

    def decode(self, tensors: Mapping[str, Tensor], digests: Mapping[str, str]) -> None:
        """Bring the set that does not generate to a whole version; another thread may generate with the live one."""
        if self._spare is self._live and self._live.version >= 0:
            self._spare, self._spare_digests = self._live.twin(), {}
        held = self._spare_digests
        names = {name for name, digest in digests.items() if held.get(name) != digest}
        for name in list(names):  # a weight and its scale are decoded together
            other = name.removesuffix(SCALE_SUFFIX) if name.endswith(SCALE_SUFFIX) else name + SCALE_SUFFIX
            names |= {other} & digests.keys()
        for name in names:
            held.pop(name, None)
        self._spare.load({name: tensors[name] for name in sorted(names)})
        held.update(digests)

    def swap(self, version: int) -> None:
        """Make what was decoded last live, as ``version``. No token may be under way."""
        if self._spare is not self._live:
            self._live.exchange(self._spare)
            self._live_digests, self._spare_digests = self._spare_digests, self._live_digests
        self._live.version = version
