"""The learner's side of a run: the model bound to its operators, its ledger, its objective and its optimizer, new or as saved."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtl_rl.flops.devices import this_device
from trtl_rl.flops.formulas import ModelShape
from trtl_rl.flops.ledger import Ledger
from trtl_rl.losses.loss import Loss, make_loss
from trtl_rl.metrics import MetricsWriter
from trtl_rl.recipe import modelopt_state
from trtl_rl.recipe.patterns import unmatched
from trtl_rl.refit.shared_memory import VersionMemory
from trtl_rl.trainer import checkpoint, lora, resume
from trtl_rl.trainer.binding import bind
from trtl_rl.trainer.loading import Phases, load_model
from trtl_rl.trainer.state import RunState
from trtl_rl.versions import versions

if TYPE_CHECKING:
    from trtl_rl.kernels.kernel_set import KernelSet
    from trtl_rl.model.bind import TrainableDecoder
    from trtl_rl.trainer.engine_place import EnginePlace
    from trtl_rl.trainer.learner import Learner
    from trtl_rl.trainer.trainer import Trainer


@dataclass(frozen=True)
class Saved:
    """What a resumed run goes on from; of a run that begins, nothing.

    Attributes:
        path: The checkpoint.
        state: Its ``state.json``.
    """

    path: Path | None = None
    state: dict[str, Any] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return self.path is not None


@dataclass(frozen=True)
class Policy:
    """The learner's side of a run at the version that it begins with.

    Attributes:
        state: Of the run, as saved.
        parts: Of the model, for checkpoints.
        parameters: How many, frozen ones included.
    """

    state: RunState
    decoder: TrainableDecoder
    kernels: KernelSet
    learner: Learner
    loss: Loss
    ledger: Ledger
    parts: checkpoint.ModelParts
    shape: ModelShape
    parameters: int


def make_policy(
    trainer: Trainer, metrics: MetricsWriter, saved: Saved, context: int, place: EnginePlace, phases: Phases
) -> Policy:
    """Load the model, bind it, make its optimizer, and bring all of it to where the run was saved.

    Args:
        context: Tokens of the longest prompt and answer.
        place: Where the engines are: some read versions where the learner writes them.
        phases: Three of them are done here.

    Raises:
        UserError: as ``load_model``, ``bind`` and ``checkpoint.load``.
    """
    c = trainer.config
    model = load_model(trainer.source.path, trainer.recipe, saved.path)
    for text in unmatched(trainer.recipe, model):
        metrics.message("warning", text)
    config = None if c.lora.rank else model.config
    parts = checkpoint.ModelParts(config, modelopt_state.capture(model), trainer.recipe.text)
    adapters = None
    if c.lora.rank:  # after the capture: ModelOpt's state is the base's, on which a resume puts them again
        adapters = lora.Adapters(model, c.lora, seed=c.seed, base=lora.base_name(trainer.source))
    phases.next()
    decoder, kernels = bind(c, trainer.directory, metrics, model, context)
    decoder.memory = VersionMemory() if place.reads_in_place else None
    if saved and saved.state["kernels"] != kernels.identity:
        changed = resume.changed_versions(saved.state["versions"], versions())
        metrics.message(
            "warning",
            f"The operators are not those of the run that was saved ({changed}): it goes on, and differs in last bits from "
            "what it would have been.",
        )
    phases.next()
    shape = ModelShape.from_model(model)
    parameters = sum(p.numel() for p in model.parameters())
    ledger = Ledger(
        parameters=parameters,
        active_parameters=parameters - shape.inactive_parameters,
        trained_parameters=sum(p.numel() for p in model.parameters() if p.requires_grad),
        device=this_device(c.device),
        reward_system=", ".join(reward.name for reward in trainer.rewards),
        evaluation_target=", ".join(c.evaluation.scorers) if c.evaluation.prompts else "none",
    )
    # accelerate comes with these; the engine's process is starting meanwhile.
    from trtl_rl.trainer.learner import Learner
    from trtl_rl.trainer.reference import freeze

    loss = trainer.loss or make_loss(c.loss, c.sampling.max_new_tokens)
    learner = Learner(
        decoder,
        loss,
        c.optimizer,
        shape=shape,
        temperature=c.sampling.temperature,
        steps=c.steps * c.batch.updates,
        # Before a checkpoint is loaded: a resumed run keeps to the model that the run began with.
        reference=freeze(decoder, kernels) if loss.needs_reference_logprobs else None,
    )
    if adapters is not None:
        adapters.save_with(learner.accelerator)
    state = RunState()
    if saved.path is not None:
        checkpoint.load(saved.path, learner.accelerator)
        ledger.load_state_dict(saved.state["ledger"])
        state = RunState.resumed(saved.state["run"])
        learner.configure_optimizer(state.step * c.batch.updates)
    decoder.refresh(state.step)
    if adapters is not None:
        metrics.message("info", lora.summary(decoder))
    phases.next()
    return Policy(state, decoder, kernels, learner, loss, ledger, parts, shape, parameters)
