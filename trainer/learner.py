"""One update: logprobs of the answers through the engine's operators, the objective, AdamW on the FP32 masters."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin
from torch import Tensor

from trtl_rl.config_parts import OptimizerConfig
from trtl_rl.flops import formulas
from trtl_rl.flops.precision import Fp8Products
from trtl_rl.kernels.autograd import head_is_recomputed
from trtl_rl.kernels.spec import ROW_TILE, TOKEN_TILE
from trtl_rl.losses.loss import Loss, LossInputs, advantages, finish_metrics
from trtl_rl.metrics import Accumulator
from trtl_rl.model.bind import TrainableDecoder
from trtl_rl.rollout import Completion, Group

if TYPE_CHECKING:
    from trtl_rl.flops.formulas import ModelShape


@dataclass(frozen=True)
class Fixed:
    """Logprobs [tokens] of a micro-batch that all updates on it have in common; ``None`` where the objective needs none.

    Attributes:
        old: Of the weights before the first update.
        reference: Of the model that the run began with.
    """

    old: Tensor | None
    reference: Tensor | None


@dataclass
class Update:
    """What one update did.

    Attributes:
        stepped: False when no group carried signal or the gradient was not finite: the weights did not move.
        flops: Of forward and backward passes that ran, with what backward computes again and the forward passes whose logprobs
            the objective asks for.
        counts: Items behind the means among ``metrics``.
        recomputed: Of ``flops``, what backward computes again.
        fp8: Of ``flops``, the products of two FP8 operands.
        padding: FLOPs of the rows that fill up tiles, not in ``flops``.
        tokens: Answer tokens that were trained on.
        wasted: Of ``flops``, those of a gradient that was not finite.
        fixed: One for each micro-batch.
    """

    metrics: dict[str, float]
    stepped: bool
    flops: int
    counts: dict[str, int] = field(default_factory=dict)
    recomputed: int = 0
    fp8: int = 0
    padding: int = 0
    tokens: int = 0
    wasted: int = 0
    fixed: list[Fixed] = field(default_factory=list)

    def count(self, other: Update) -> None:
        """Add another's FLOPs and tokens to one's own."""
        self.flops += other.flops
        self.recomputed += other.recomputed
        self.fp8 += other.fp8
        self.padding += other.padding
        self.tokens += other.tokens
        self.wasted += other.wasted


class Learner:
    """Owns the optimizer and schedule. Accelerate places, accumulates, clips and saves; precision is the recipe's alone.

    Args:
        decoder: The bound model; its masters are trained.
        temperature: Of the rollouts: logprobs are of ``logits / temperature``.
        steps: Length of the learning-rate schedule, in optimizer steps.
        reference: The model that the run began with (``reference.freeze``), for objectives that need its logprobs.

    Attributes:
        spent: Share of the run's budget that is used: the schedule ends with the budget if that ends before its steps.
    """

    def __init__(
        self,
        decoder: TrainableDecoder,
        loss: Loss,
        config: OptimizerConfig,
        *,
        shape: ModelShape,
        temperature: float,
        steps: int,
        reference: TrainableDecoder | None = None,
    ) -> None:
        assert reference is not None or not loss.needs_reference_logprobs, "the KL penalty needs a reference"
        # Said in full, since a launcher's variables would speak otherwise. No mixed precision: autocast would round after the
        # quantiser; a number of accumulation steps would divide the loss.
        self.accelerator = Accelerator(
            mixed_precision="no",
            cpu=decoder.weights.device.type == "cpu",
            dynamo_backend="no",
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
        )
        self.decoder, self.loss, self.config, self.shape = decoder, loss, config, shape
        self.fp8 = Fp8Products.of(decoder.description.coverage, frozen=bool(decoder.description.adapters))
        decoder.gradient_checkpointing = config.gradient_checkpointing
        self.temperature, self.reference = temperature, reference
        parameters = [p for p in decoder.model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(
            parameters,
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )
        self.spent = 0.0
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: learning_rate_factor(config, step, steps, self.spent)
        )
        # A first batch without signal takes no step, and the schedule goes on all the same.
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
        self.model, self.optimizer, self.schedule = self.accelerator.prepare(decoder.model, optimizer, schedule)

    def configure_optimizer(self, step: int) -> None:
        """The configuration's values at ``step`` optimizer steps, not those that a checkpoint was trained with."""
        schedule = self.schedule.scheduler
        schedule.base_lrs = [self.config.lr for _ in schedule.base_lrs]
        for group in self.optimizer.param_groups:
            group.update(betas=self.config.betas, eps=self.config.eps, weight_decay=self.config.weight_decay)
            group["initial_lr"] = self.config.lr
            group["lr"] = self.config.lr * schedule.lr_lambdas[0](step)
        schedule.last_epoch = step  # batch.updates may have changed

    def update(self, groups: Sequence[Group], version: int, after: Update | None = None) -> Update:
        """Train on whole groups at weight ``version``, one optimizer step; where it is not the first on them, ``after`` the first.

        Groups whose rewards are all equal have zero gradient, unless there are terms beside the objective, and are then not
        computed; they count in the mean over groups.
        """
        metrics = Accumulator()
        useful = [group for group in groups if group.has_signal()]
        metrics.add("frac_reward_zero_std", len(groups) - len(useful), count=len(groups))
        if self.loss.trains_without_signal:
            useful = list(groups)
        spent = Update({}, False, 0)
        for i, part in enumerate(micro_batches(useful, self.config.micro_batch_tokens)):
            spent.fixed.append(self._fixed(part) if after is None else after.fixed[i])
            loss = self._loss(part, spent.fixed[i], len(groups), metrics)
            self.accelerator.backward(loss)
            spent.count(self._spent(part, after is None))
        stepped = self._step(metrics) if useful else False
        self.schedule.step()
        for group in groups:
            for completion, _ in group.scored():
                metrics.add("off_policy/mean", version - completion.version_first)
                metrics.add("off_policy/max", version - completion.version_first, how="max")
        metrics = metrics.over_processes()
        spent.metrics, spent.counts, spent.stepped = finish_metrics(metrics.reduce()), metrics.counts(), stepped
        spent.wasted = 0 if stepped else spent.flops
        return spent

    def train(self, groups: Sequence[Group], version: int, updates: int) -> Update:
        """``updates`` optimizer steps on the same groups, each through operands quantised from the masters as they are then.

        Returns:
            Metrics of the first one, which saw the weights that a batch was taken at, and what all of them have spent.
        """
        first = self.update(groups, version)
        for _ in range(updates - 1):
            if first.stepped:
                self.decoder.refresh(version)
            first.count(self.update(groups, version, first))
        return first

    @torch.no_grad()
    def logprobs(
        self, prompts: Sequence[list[int]], completions: Sequence[Completion], temperature: float | None = None
    ) -> Tensor:
        """Logprobs [tokens] float32 of completions under the loaded version, one after another, in CPU memory.

        Args:
            temperature: Of ``logits / temperature``; None: the run's.
        """
        sequences = [[*prompt, *completion.ids] for prompt, completion in zip(prompts, completions, strict=True)]
        lengths = [len(completion.ids) for completion in completions]
        return self.decoder.forward(sequences, lengths, temperature or self.temperature)[0].cpu()

    @torch.no_grad()
    def _fixed(self, groups: Sequence[Group]) -> Fixed:
        """The logprobs of a micro-batch that its updates have in common; before the first of them."""
        if not (self.loss.needs_old_logprobs or self.loss.needs_reference_logprobs):
            return Fixed(None, None)
        rows = [(group, completion) for group in groups for completion, _ in group.scored()]
        sequences = [[*group.prompt.ids, *completion.ids] for group, completion in rows]
        lengths = [len(completion.ids) for _, completion in rows]
        old = reference = None
        if self.loss.needs_old_logprobs:  # all micro-batches come before the optimizer step
            old = self.decoder.forward(sequences, lengths, self.temperature)[0]
        if self.loss.needs_reference_logprobs:
            assert self.reference is not None
            reference = self.reference.forward(sequences, lengths, self.temperature)[0]
        return Fixed(old, reference)

    def _loss(self, groups: Sequence[Group], fixed: Fixed, groups_in_batch: int, metrics: Accumulator) -> Tensor:
        rows = [
            (i, group, completion, reward) for i, group in enumerate(groups) for completion, reward in group.scored()
        ]
        sequences = [[*group.prompt.ids, *completion.ids] for _, group, completion, _ in rows]
        lengths = [len(completion.ids) for _, _, completion, _ in rows]
        logprobs, entropy = self.model(sequences, lengths, self.temperature)
        device = logprobs.device
        owners = torch.tensor([i for i, *_ in rows], device=device)
        behaviour = None
        if self.loss.needs_behaviour_logprobs:
            values = [value for _, _, completion, _ in rows for value in completion.logprobs or []]
            behaviour = torch.tensor(values, device=device)
        inputs = LossInputs(
            logprobs=logprobs,
            lengths=torch.tensor(lengths, device=device),
            groups=owners,
            advantages=advantages(torch.tensor([reward for *_, reward in rows], device=device), owners),
            groups_in_batch=groups_in_batch,
            behaviour_logprobs=behaviour,
            old_logprobs=fixed.old,
            reference_logprobs=fixed.reference,
            entropy=entropy,
        )
        out = self.loss(inputs)
        metrics.merge(out.metrics)
        metrics.add("loss", float(out.loss.detach()), how="sum")
        metrics.add("entropy", float(entropy.detach().sum()), count=entropy.numel())
        return out.loss

    def _spent(self, groups: Sequence[Group], first: bool) -> Update:
        """FLOPs and tokens of one forward and backward over ``groups``, and where it is the ``first`` one, of the forward passes
        whose logprobs the objective asks for."""
        pairs = [(len(group.prompt.ids), len(done.ids)) for group in groups for done, _ in group.scored()]
        positions, tokens = sum(p + a - 1 for p, a in pairs), sum(a for _, a in pairs)
        rows = -(-tokens // ROW_TILE) * ROW_TILE
        again = head_is_recomputed(rows, self.shape.vocab)
        checkpointing = self.config.gradient_checkpointing
        recomputed = sum(
            formulas.recompute(self.shape, p, a, checkpointing=checkpointing, head_again=again) for p, a in pairs
        )
        asked = first * (self.loss.needs_old_logprobs + self.loss.needs_reference_logprobs)
        fp8 = (1 + asked) * self.fp8.forward_flops(positions, tokens) + self.fp8.backward_flops(positions, tokens)
        fp8 += self.fp8.forward_flops(positions if checkpointing else 0, tokens if again else 0)
        padding = formulas.padding(
            self.shape,
            -positions % TOKEN_TILE,
            rows - tokens,
            scored=asked,
            checkpointing=checkpointing,
            head_again=again,
        )
        flops = recomputed + sum(
            formulas.learning(self.shape, p, a) + asked * formulas.forward(self.shape, p, a) for p, a in pairs
        )
        return Update({}, False, flops, recomputed=recomputed, fp8=fp8, padding=padding, tokens=tokens)

    def _step(self, metrics: Accumulator) -> bool:
        """Clip and step; a gradient that is not finite is reported and never reaches the weights."""
        norm = float(self.accelerator.clip_grad_norm_(self.model.parameters(), self.config.max_grad_norm))
        metrics.add("grad_norm", norm, how="last")
        metrics.add("learning_rate", self.optimizer.param_groups[0]["lr"], how="last")
        finite = math.isfinite(norm)
        if finite:
            self.optimizer.step()
        self.optimizer.zero_grad()
        return finite


def micro_batches(groups: Sequence[Group], limit: int) -> Iterator[list[Group]]:
    """Join groups while prompt and answer tokens stay within ``limit``; a group is never cut, its balance would break."""
    part: list[Group] = []
    filled = 0
    for group in groups:
        size = sum(len(group.prompt.ids) + len(completion.ids) for completion, _ in group.scored())
        if part and filled + size > limit:
            yield part
            part, filled = [], 0
        part.append(group)
        filled += size
    if part:
        yield part


def learning_rate_factor(config: OptimizerConfig, step: int, steps: int, spent: float = 0.0) -> float:
    """Factor on the learning rate at ``step`` (0 is the first): linear warm-up, then the schedule down to 0 at ``steps``, or
    where the share ``spent`` of a budget reaches 1 before."""
    if step < config.warmup_steps:
        return (step + 1) / (config.warmup_steps + 1)
    if config.schedule == "constant":
        return 1.0
    progress = min(1.0, max(spent, (step - config.warmup_steps) / max(1, steps - config.warmup_steps)))
    if config.schedule == "wsd":
        return min(1.0, (1.0 - progress) / config.decay_fraction)
    return 1.0 - progress if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
