"""Runs the rows of a step: keys and values, the trainer's own decoder, and drawing tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from trtl_rl.engines.torch_engine.scheduler import Copy, Step
from trtl_rl.engines.torch_engine.slots import Slots
from trtl_rl.errors import EngineError
from trtl_rl.kernels.spec import ROW_TILE
from trtl_rl.model.finite import first_not_finite, is_finite
from trtl_rl.model.kv import Blocks, KeyValueBuffers, RopeTables, Rows
from trtl_rl.model.layer import forward_rows, head_logits
from trtl_rl.model.weights import DecoderWeights, LayerWeights


class Runner:
    """Owns keys and values. ``positions`` bounds their memory, ``context`` the longest sequence."""

    def __init__(self, weights: DecoderWeights, slots: Slots, *, context: int, positions: int) -> None:
        d = weights.description
        self.weights, self.slots = weights, slots
        self._rope = RopeTables(d.inverse_frequencies, d.attention_scaling, context, weights.device)
        self._buffers = KeyValueBuffers(d.key_value_dtypes, positions, d.kv_heads, d.head_dim, weights.device)

    def copy(self, copies: Sequence[Copy]) -> None:
        """Copy the keys of prompts."""
        blocks = self.slots.blocks
        for copy in copies:
            source = int(blocks.start[copy.source]), int(blocks.length[copy.source])
            targets = Blocks(blocks.start[copy.targets], blocks.length[copy.targets])
            self._buffers.copy_prefix(source, targets, copy.count)

    def forward(self, step: Step) -> tuple[Tensor, Tensor | None]:
        """Run all rows of a step.

        Returns:
            Tokens drawn for ``step.slots`` [n] int64, and their logprobs [n] float32 where one of the slots wants them.

        Raises:
            EngineError: something is not finite; names the module where that began.
        """
        self._lengthen(step)
        shape = self.weights.description
        rows = Rows.make(step.ids, step.owner, step.position, self.slots.blocks, self._rope, shape=shape)
        hidden = forward_rows(self.weights, self._buffers, rows)
        n = len(step.slots)
        if n == 0:
            self._check(rows, hidden)
            return torch.empty(0, dtype=torch.int64), None
        slots = np.concatenate([step.slots, np.repeat(step.slots[-1:], -n % ROW_TILE)])
        logits = head_logits(self.weights, hidden[: len(slots)])
        s, device = self.slots, logits.device
        temperature = torch.from_numpy(s.temperature[slots]).to(device)
        uniform = torch.from_numpy(s.uniform[slots, s.generated[slots]]).to(device)
        greedy = torch.from_numpy(s.greedy[slots]).to(device)
        tokens, total = self.weights.head_units.sample([logits, temperature, uniform, greedy])
        self._check(rows, hidden, total)
        logprobs = None
        if s.wants_logprobs[step.slots].any():
            logprobs = self.weights.head_units.logprob([logits, tokens, temperature])[0][:n].cpu()
        return tokens[:n].cpu(), logprobs

    def _lengthen(self, step: Step) -> None:
        """Double the blocks that the step's rows outgrow."""
        blocks, owner = self.slots.blocks, step.slots
        full = owner[self.slots.position[owner] >= blocks.length[owner]]
        for length in np.unique(blocks.length[full]).tolist():
            chosen = full[blocks.length[full] == length]
            self._buffers.lengthen(blocks.start[chosen], length, 2 * length)
            blocks.length[chosen] = 2 * length

    def _check(self, rows: Rows, hidden: Tensor, *totals: Tensor) -> None:
        if is_finite(hidden[: rows.count], *totals):
            return

        def attend(layer: LayerWeights, q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> Tensor:
            return self._buffers.attend(layer.index, layer.units, q, k, v, rows)

        raise EngineError(
            f"{first_not_finite(self.weights, [rows], attend)} gives NaN or infinite values while weight version "
            f"{self.weights.version} generates; the weights are finite, so activations overflow. Lower optimizer.lr, and "
            "resume from a checkpoint before that.",
            repeats=True,
        )
