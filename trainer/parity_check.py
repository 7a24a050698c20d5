"""A parity check on demand: an engine's logprobs beside the trainer's forward, token by token, and the full vocabulary.

The engine generates through its normal path; the trainer scores the answers at the same weight version through its own.
``trtl-rl parity``, ``bench/parity.py`` and the tests call this; the probes of a run are in ``parity.py``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trtl_rl.engines.engine import RolloutEngine
from trtl_rl.engines.torch_engine.scheduler import PREFILL_ROWS
from trtl_rl.kernels.kernel_set import KernelSet
from trtl_rl.model.bind import TrainableDecoder
from trtl_rl.model.kv import Blocks, KeyValueBuffers, RopeTables, Rows
from trtl_rl.model.layer import forward_rows, head_logits
from trtl_rl.model.weights import DecoderWeights
from trtl_rl.rollout import Completion, Request
from trtl_rl.trainer.parity import compare

BATCH_TOKENS = 4096  # of one forward of the trainer
_LOGITS = 2**26  # of the trainer, kept at once for the full vocabulary

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Worst:
    """The token with the largest difference: its prompt (the request's id), sample, position in the answer, both values."""

    prompt: int
    sample: int
    position: int
    token: int
    trainer: float
    engine: float


@dataclass(frozen=True)
class FullVocabulary:
    """All log-probabilities at every position of the answers: ``values`` compared, and what :class:`Parity` says of tokens.

    ``kl`` is KL(engine ‖ trainer) over the whole vocabulary, in float64 (nats).
    """

    values: int
    differing: int
    max_abs: float
    kl_mean: float
    kl_max: float


@dataclass(frozen=True)
class Parity:
    """What a check found.

    Attributes:
        differing: Tokens whose two logprobs are not the same float32; a NaN differs from everything.
        kl_mean, kl_max: K3 estimates, see :func:`trtl_rl.trainer.parity.compare`.
        first_divergence: The least position in an answer that differs; -1 if none.
        worst: None when nothing differs.
    """

    answers: int
    tokens: int
    differing: int
    max_abs: float
    mean_exp_abs: float
    kl_mean: float
    kl_max: float
    first_divergence: int
    worst: Worst | None
    full_vocabulary: FullVocabulary | None = None

    @property
    def exact(self) -> bool:
        """Whether nothing differs."""
        return not self.differing and not (self.full_vocabulary and self.full_vocabulary.differing)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "exact": self.exact}


def check(
    decoder: TrainableDecoder,
    engine: RolloutEngine,
    requests: Sequence[Request],
    *,
    kernels: KernelSet | None = None,
    threads: tuple[int, int] | None = None,
    gradients: bool = False,
    progress: Progress | None = None,
) -> Parity:
    """Let the engine answer ``requests`` and the trainer score the answers.

    Args:
        decoder: Loaded at the engine's version.
        requests: With ``logprobs=True`` and negative ids. Temperatures may differ.
        kernels: Compare all log-probabilities too, with an engine's forward over these kernels.
        threads: Threads of this process while the engine generates (if it runs here) and while the trainer scores.
        gradients: Score in the way of an update, through the autograd functions.
        progress: Called with a text, how many are done, and the total.
    """
    assert engine.version == decoder.weights.version, "both sides are at one version"
    progress = progress or (lambda text, done, total: None)
    by_id = {request.id: request for request in requests}
    answers = sum(request.samples for request in requests)
    progress("engine: answers", 0, answers)
    with _threads(threads[0] if threads else None):
        completions = sorted(engine.probe(requests), key=lambda item: (-item.request_id, item.sample))
    progress("engine: answers", len(completions), answers)
    batches = list(_batches(by_id, completions))
    ours = []
    done = 0
    with _threads(threads[1] if threads else None), torch.set_grad_enabled(gradients):
        for part in batches:
            ours.append(_score(decoder, by_id, part))
            done += len(part)
            progress("trainer: answers scored", done, answers)
        full = None if kernels is None else _full_vocabulary(decoder, kernels, by_id, completions, progress)
    order = [item for part in batches for item in part]
    theirs = torch.tensor([value for item in order for value in item.logprobs or []])
    return _report(by_id, order, torch.cat(ours), theirs, full)


def _score(decoder: TrainableDecoder, by_id: dict[int, Request], part: Sequence[Completion]) -> Tensor:
    """Logprobs [tokens] of completions with one temperature."""
    sequences = [[*by_id[item.request_id].ids, *item.ids] for item in part]
    temperature = by_id[part[0].request_id].sampling.temperature
    return decoder.forward(sequences, [len(item.ids) for item in part], temperature)[0].detach().cpu()


def _batches(
    by_id: dict[int, Request], completions: Sequence[Completion], limit: int = BATCH_TOKENS
) -> Iterator[list[Completion]]:
    """Completions of one temperature, at most ``limit`` tokens together or a single one."""
    temperatures = dict.fromkeys(by_id[item.request_id].sampling.temperature for item in completions)
    for temperature in temperatures:
        part: list[Completion] = []
        filled = 0
        for item in completions:
            if by_id[item.request_id].sampling.temperature != temperature:
                continue
            size = len(by_id[item.request_id].ids) + len(item.ids)
            if part and filled + size > limit:
                yield part
                part, filled = [], 0
            part.append(item)
            filled += size
        yield part


def _report(
    by_id: dict[int, Request], order: Sequence[Completion], ours: Tensor, theirs: Tensor, full: FullVocabulary | None
) -> Parity:
    found = compare(ours, theirs, [len(item.ids) for item in order])
    worst = None
    if found["mismatch/differing_tokens"]:
        size = (ours.double() - theirs.double()).abs()
        at = int(torch.where(size.isnan(), torch.inf, size).argmax())
        places = [(item, position) for item in order for position in range(len(item.ids))]
        item, position = places[at]
        worst = Worst(
            -item.request_id - 1, item.sample, position, item.ids[position], float(ours[at]), float(theirs[at])
        )
    return Parity(
        answers=len(order),
        tokens=int(found["mismatch/tokens"]),
        differing=int(found["mismatch/differing_tokens"]),
        max_abs=found["mismatch/max_abs"],
        mean_exp_abs=found["mismatch/mean_exp_abs"],
        kl_mean=found["mismatch_kl/mean"],
        kl_max=found["mismatch_kl/max"],
        first_divergence=int(found["mismatch/first_divergence"]),
        worst=worst,
        full_vocabulary=full,
    )


def _full_vocabulary(
    decoder: TrainableDecoder,
    kernels: KernelSet,
    by_id: dict[int, Request],
    completions: Sequence[Completion],
    progress: Progress,
) -> FullVocabulary:
    """Compare all log-probabilities: the engine's forward, prefill and one token at a time, beside the trainer's."""
    d = decoder.description
    weights = DecoderWeights(d, kernels)
    weights.load(decoder.snapshot)
    rope = RopeTables(d.inverse_frequencies, d.attention_scaling, decoder.context, decoder.weights.device)
    values = differing = done = 0
    largest, kl = 0.0, [torch.zeros(0, dtype=torch.float64)]
    for part in _batches(by_id, completions, max(1, _LOGITS // d.vocab)):
        temperature = by_id[part[0].request_id].sampling.temperature
        sequences = [[*by_id[item.request_id].ids, *item.ids] for item in part]
        lengths = [len(item.ids) for item in part]
        with torch.no_grad():
            ours = head_logits(decoder.weights, decoder.hidden(sequences, lengths))[: sum(lengths)]
        for rows, theirs in _engine_logits(weights, rope, sequences, lengths):
            trainer = ours[rows]
            values += trainer.numel()
            if torch.equal(trainer, theirs):
                kl.append(torch.zeros(len(rows), dtype=torch.float64))
                continue
            one, other = (torch.log_softmax(side / temperature, -1) for side in (trainer, theirs))
            differing += int((one != other).sum())
            difference = one.double() - other.double()
            largest = max(largest, float(difference.abs().max()))
            kl.append(-(other.double().exp() * difference).sum(-1))
        done += len(part)
        progress("full vocabulary: answers", done, len(completions))
    joined = torch.cat(kl)
    return FullVocabulary(values, differing, largest, float(joined.mean()), float(joined.max()))


@torch.inference_mode()
def _engine_logits(
    weights: DecoderWeights, rope: RopeTables, sequences: Sequence[Sequence[int]], answers: Sequence[int]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Logits [n, V] that an engine computes for given sequences, and at which answer tokens, as indices into all of them."""
    d = weights.description
    starts = [sum(answers[:i]) for i in range(len(answers))]
    prompts = [len(sequence) - answer for sequence, answer in zip(sequences, answers, strict=True)]
    blocks = Blocks.packed([len(sequence) for sequence in sequences])
    buffers = KeyValueBuffers(d.key_value_dtypes, blocks.positions, d.kv_heads, d.head_dim, weights.device)

    def forward(ids: Sequence[int], owner: Sequence[int], position: Sequence[int]) -> Tensor:
        tokens, whose, at = (np.array(values, np.int64) for values in (ids, owner, position))
        return forward_rows(weights, buffers, Rows.make(tokens, whose, at, blocks, rope, shape=d))

    prefill = [(sequences[i][at], i, at) for i, n in enumerate(prompts) for at in range(n - 1)]
    for start in range(0, len(prefill), PREFILL_ROWS):
        ids, owner, position = zip(*prefill[start : start + PREFILL_ROWS], strict=True)
        forward(ids, owner, position)
    for step in range(max(answers)):
        who = [i for i, answer in enumerate(answers) if step < answer]
        at = [prompts[i] + step - 1 for i in who]
        hidden = forward([sequences[i][place] for i, place in zip(who, at, strict=True)], who, at)
        yield torch.tensor([starts[i] + step for i in who]), head_logits(weights, hidden)[: len(who)]


@contextlib.contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """Set torch's threads within a block; None leaves them."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
