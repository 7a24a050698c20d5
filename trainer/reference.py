"""The reference of the KL penalty: the model that a run began with, frozen, through the same operators."""

from __future__ import annotations

import copy

import torch

from trtl_rl.kernels.kernel_set import KernelSet
from trtl_rl.model.bind import TrainableDecoder, quantise_parameters
from trtl_rl.model.weights import DecoderWeights


@torch.no_grad()
def freeze(decoder: TrainableDecoder, kernels: KernelSet) -> TrainableDecoder:
    """A decoder that goes on computing with what the masters of ``decoder`` are now; only its ``forward`` is of use.

    It is quantised as every version is, so that it agrees bit for bit with the policy while that has not moved. It takes the
    memory of one more version's operands, and no gradient reaches it. Adapters begin by adding nothing: there the reference is
    the base, which never changes, and takes no memory of its own.
    """
    reference = copy.copy(decoder)
    if decoder.description.adapters:
        reference.weights = decoder.weights.base()
    else:
        reference.weights = DecoderWeights(decoder.description, kernels)
        reference.weights.load(quantise_parameters(decoder.parameters, decoder.description))
    reference.weights.version = 0
    reference.snapshot = {}
    reference.gradient_checkpointing = False
    return reference
