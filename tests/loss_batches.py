"""Batches of logprobs for the tests of objectives, drawn by hypothesis or written out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from trtl_rl.losses.loss import Loss, LossInputs, LossOutputs, advantages

quick = settings(max_examples=25, deadline=None)


@st.composite
def batches(draw: st.DrawFn, least_length: int = 1, most_groups: int = 3) -> LossInputs:
    """Whole groups of two to four responses in mixed order, float64, with different rewards."""
    groups: list[int] = []
    for index in range(draw(st.integers(1, most_groups))):
        groups += [index] * draw(st.integers(2, 4))
    groups = draw(st.permutations(groups))
    lengths = [draw(st.integers(least_length, 5)) for _ in groups]
    rewards = torch.tensor([draw(st.sampled_from([0.0, 0.3, 1.0, -2.0])) for _ in groups])
    nll = [draw(st.floats(1e-3, 8.0)) for _ in range(sum(lengths))]
    drift = [draw(st.floats(-1.0, 1.0)) for _ in nll]
    logprobs = -torch.tensor(nll, dtype=torch.float64)
    ids = torch.tensor(groups)
    return LossInputs(
        logprobs=logprobs.requires_grad_(),
        lengths=torch.tensor(lengths),
        groups=ids,
        advantages=advantages(rewards, ids).double(),
        groups_in_batch=len(set(groups)),
        behaviour_logprobs=logprobs.detach() + torch.tensor(drift, dtype=torch.float64),
        old_logprobs=logprobs.detach() + torch.tensor(drift[::-1], dtype=torch.float64) / 2,
        reference_logprobs=logprobs.detach() - torch.tensor(drift, dtype=torch.float64) * 2,
        entropy=torch.tensor(nll[::-1], dtype=torch.float64),
    )


Rows = list[list[float]]


def one_group(logprobs: Rows, rewards: list[float], behaviour: Rows | None = None) -> LossInputs:
    """One group, written out: a list of token logprobs per response."""
    groups = torch.zeros(len(logprobs), dtype=torch.int64)
    flat = torch.tensor([x for row in logprobs for x in row], dtype=torch.float64)
    old = None if behaviour is None else torch.tensor([x for row in behaviour for x in row], dtype=torch.float64)
    return LossInputs(
        logprobs=flat.requires_grad_(),
        lengths=torch.tensor([len(row) for row in logprobs]),
        groups=groups,
        advantages=advantages(torch.tensor(rewards), groups).double(),
        groups_in_batch=1,
        behaviour_logprobs=old,
        old_logprobs=old,
        reference_logprobs=old,
        entropy=None if old is None else -old,
    )


def gradient(loss: Loss, inputs: LossInputs) -> Tensor:
    (grad,) = torch.autograd.grad(loss(inputs).loss, inputs.logprobs)
    return grad


def value(output: LossOutputs) -> float:
    return float(output.loss.detach())


def subset(inputs: LossInputs, order: Tensor, groups: Tensor | None = None) -> LossInputs:
    """The responses ``order`` of a batch, in that order."""
    starts = inputs.lengths.cumsum(0) - inputs.lengths
    tokens = [torch.arange(int(starts[r]), int(starts[r] + inputs.lengths[r])) for r in order]
    index = torch.cat(tokens) if tokens else torch.zeros(0, dtype=torch.int64)
    of_tokens: dict[str, Any] = {}
    for name in ("behaviour_logprobs", "old_logprobs", "reference_logprobs", "entropy"):
        value = getattr(inputs, name)
        of_tokens[name] = None if value is None else value[index]
    return replace(
        inputs,
        logprobs=inputs.logprobs[index],
        lengths=inputs.lengths[order],
        groups=inputs.groups[order] if groups is None else groups,
        advantages=inputs.advantages[order],
        **of_tokens,
    )
