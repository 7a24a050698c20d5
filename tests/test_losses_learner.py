"""Objectives in the true learner: what it computes for them, what it asks the engine for, and how a batch may be cut."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from demo import PROMPT, ask, drain, make_decoder, ready, small
from hypothesis import given, settings
from hypothesis import strategies as st
from run_files import Trained, digits, metrics_of, same, weights
from test_precision_flow import variant
from test_rollouts import FakeEngine, by_sample, worker

from trtl_rl import Trainer
from trtl_rl.buffer import GroupBuffer
from trtl_rl.config_parts import LossConfig, OptimizerConfig
from trtl_rl.flops import formulas
from trtl_rl.flops.formulas import ModelShape
from trtl_rl.kernels.kernel_set import KernelSet
from trtl_rl.losses.loss import LossInputs, LossOutputs, make_loss
from trtl_rl.metrics import Accumulator
from trtl_rl.model.bind import TrainableDecoder
from trtl_rl.rollout import Completion, Group, Prompt, Request
from trtl_rl.trainer.learner import Learner
from trtl_rl.trainer.reference import freeze

# The learner that keeps gradients takes no optimizer step, and the schedule remarks on that.
pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
LONGEST = 20


class KeepsGradients(Learner):
    """A learner that keeps the gradient of the last update and leaves its weights where they are."""

    gradients: dict[str, torch.Tensor]

    def _step(self, metrics: Accumulator) -> bool:
        self.gradients = {n: p.grad.clone() for n, p in self.model.named_parameters() if p.grad is not None}
        self.optimizer.zero_grad()
        return True


def learner(loss: LossConfig, decoder: TrainableDecoder, kind: type[Learner] = Learner, **optimizer: Any) -> Any:
    made = make_loss(loss, LONGEST)
    return kind(
        decoder,
        made,
        OptimizerConfig(**{"lr": 1e-2, **optimizer}),
        shape=ModelShape.from_hf_config(decoder.model.config),
        temperature=1.0,
        steps=10,
        reference=freeze(decoder, KernelSet(False)) if made.needs_reference_logprobs else None,
    )


def group(index: int, lengths: list[int], rewards: list[float], seed: int = 0) -> Group:
    """Random answers of these lengths, with logprobs near those of a wide policy."""
    generator = torch.Generator().manual_seed(100 * seed + index)

    def draw(n: int) -> list[int]:
        return torch.randint(3, 16, (n,), generator=generator).tolist()

    completions = [
        Completion(index, i, draw(n), "stop", 0, 0, [-2.0 - 0.1 * j for j in range(n)]) for i, n in enumerate(lengths)
    ]
    return Group(index, 0, Prompt(index, 0, draw(6), ""), completions, list(rewards))


GROUPS = [group(0, [20, 3, 9], [1, 0, 0]), group(1, [1, 17], [0, 1]), group(2, [12, 12], [1, 1])]


def distance(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest relative difference of one parameter's gradient."""
    assert found.keys() == expected.keys()
    return max(float((found[name] - grad).norm() / grad.norm()) for name, grad in expected.items())


# --- how a batch is cut and packed ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def decoders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TrainableDecoder]:
    folder = tmp_path_factory.mktemp("recipes")
    switches = {"wgrad": {"wgrad": "bf16"}, "both": {"wgrad": "bf16", "dgrad": "bf16"}}
    return {"fp8": make_decoder()} | {name: make_decoder(variant(folder, **items)) for name, items in switches.items()}


# With FP8 in DGrad alone, a last bit moves a value of dY over a boundary of its grid now and then.
@pytest.mark.parametrize(("recipe", "tolerance"), [("both", 5e-6), ("wgrad", 1e-2)])
@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_micro_batches_or_packing_change_the_gradient(
    decoders: dict[str, TrainableDecoder], recipe: str, tolerance: float, data: st.DataObject
) -> None:
    config = LossConfig.model_validate(data.draw(st.sampled_from([{"name": "asympo"}, {"name": "spo"}])))
    sizes = data.draw(st.lists(st.lists(st.integers(1, LONGEST), min_size=2, max_size=4), min_size=3, max_size=5))
    groups = [group(i, lengths, [1.0, *[0.0] * (len(lengths) - 1)], seed=7) for i, lengths in enumerate(sizes)]
    whole = learner(config, decoders[recipe], KeepsGradients, micro_batch_tokens=10**6)
    one = whole.update(groups, 0)
    cut = learner(config, decoders[recipe], KeepsGradients, micro_batch_tokens=data.draw(st.integers(1, 150)))
    other = cut.update(data.draw(st.permutations(groups)), 0)
    assert distance(cut.gradients, whole.gradients) < tolerance
    assert other.flops == one.flops
    for name, value in one.metrics.items():
        assert other.metrics[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


def test_the_comparison_of_cuts_sees_nothing(decoders: dict[str, TrainableDecoder]) -> None:
    """With FP8 in WGrad the groups of tokens do change: what the test above would find."""
    batch = [group(i, [20, 20, 20, 20], [1.0, 0.0, 0.0, 0.0]) for i in range(4)]
    kept = []
    for tokens in (10**6, 1):
        made = learner(LossConfig(), decoders["fp8"], KeepsGradients, micro_batch_tokens=tokens)
        made.update(batch, 0)
        kept.append(made.gradients)
    assert distance(kept[1], kept[0]) > 1e-3


# --- passes beside the update --------------------------------------------------------------------------------------


class Recorded:
    """Wraps a learner's objective and keeps what it was given."""

    def __init__(self, made: Learner) -> None:
        self.given: list[LossInputs] = []
        self._loss = made.loss
        made.loss = self  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loss, name)

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        self.given.append(inputs)
        return self._loss(inputs)


def test_recomputed_logprobs_are_of_other_weights_or_carry_a_gradient() -> None:
    made = learner(LossConfig(name="grpo", behaviour="recomputed"), make_decoder(), micro_batch_tokens=1)
    recorded = Recorded(made)
    made.update(GROUPS, 0)
    assert len(recorded.given) == 2  # the third group has no signal
    for inputs in recorded.given:
        assert inputs.old_logprobs is not None and not inputs.old_logprobs.requires_grad
        assert torch.equal(inputs.old_logprobs, inputs.logprobs.detach())  # one optimizer step: bit for bit the same
        assert inputs.behaviour_logprobs is None


def test_passes_beside_the_update_are_not_counted() -> None:
    decoder = make_decoder()
    shape = ModelShape.from_hf_config(decoder.model.config)
    answers = [20, 3, 9, 1, 17]

    def learning(tokens: int) -> int:
        return formulas.learning(shape, 6, tokens) + formulas.recompute(shape, 6, tokens)

    trained = sum(map(learning, answers))
    forward = sum(formulas.forward(shape, 6, n) for n in answers)
    silent = [12, 12]  # trained on where a term beside the objective acts
    more = sum(map(learning, silent))
    with_kl = trained + more + forward + sum(formulas.forward(shape, 6, n) for n in silent)
    for config, expected in (
        (LossConfig(), trained),
        (LossConfig(name="grpo"), trained),
        (LossConfig(name="grpo", behaviour="recomputed"), trained + forward),
        (LossConfig(entropy_coefficient=0.1), trained + more),
        (LossConfig(kl_coefficient=0.1), with_kl),
    ):
        once = learner(config, decoder, KeepsGradients).update(GROUPS, 0)
        assert once.flops == expected, config
        # Two updates of one batch have these passes in common, and nothing else.
        twice = learner(config, decoder, KeepsGradients).train(GROUPS, 0, 2)
        passes = forward * (config.behaviour == "recomputed")
        if config.kl_coefficient:
            passes = with_kl - trained - more
        assert twice.flops == 2 * expected - passes and twice.tokens == 2 * once.tokens


def test_a_second_update_on_a_batch_takes_its_ratio_to_itself() -> None:
    config = LossConfig(name="grpo", behaviour="recomputed", kl_coefficient=0.1)
    made = learner(config, make_decoder(), micro_batch_tokens=1)
    recorded = Recorded(made)
    made.train(GROUPS, 0, 2)
    first, second = recorded.given[:3], recorded.given[3:]
    assert len(second) == 3
    for before, after in zip(first, second, strict=True):
        old, reference = after.old_logprobs, after.reference_logprobs
        assert old is not None and before.old_logprobs is not None and reference is not None
        assert torch.equal(old, before.old_logprobs) and torch.equal(reference, old)
        assert not torch.equal(old, after.logprobs.detach())


def test_reference_moves_with_the_policy() -> None:
    decoder = make_decoder()
    made = learner(LossConfig(kl_coefficient=0.1), decoder)
    recorded = Recorded(made)
    first = made.update(GROUPS, 0)
    assert first.metrics["kl"] == 0.0 and first.stepped
    decoder.refresh(1)
    second = made.update(GROUPS, 1)
    assert second.metrics["kl"] > 1e-3
    before, after = (inputs.reference_logprobs for inputs in recorded.given)
    assert before is not None and after is not None and torch.equal(before, after)
    assert not torch.equal(recorded.given[0].logprobs, recorded.given[1].logprobs)
    assert torch.equal(before, recorded.given[0].logprobs.detach())


def test_entropy_bonus_does_not_raise_the_entropy() -> None:
    decoder = make_decoder()
    made = learner(LossConfig(entropy_coefficient=1.0), decoder, lr=1e-3)
    equal = [replace(item, rewards=[0.0] * len(item.rewards)) for item in GROUPS]  # nothing but the bonus acts
    found = []
    for version in range(5):
        found.append(made.update(equal, version).metrics["entropy"])
        decoder.refresh(version + 1)
    assert found == sorted(found) and found[-1] > found[0] + 0.05


def test_groups_without_signal_move_the_weights_without_a_term_beside_the_objective() -> None:
    made = learner(LossConfig(), make_decoder())
    assert not made.update([GROUPS[2]], 0).stepped
    assert learner(LossConfig(kl_coefficient=0.1), make_decoder()).update([GROUPS[2]], 0).stepped


@pytest.mark.slow
def test_resumed_run_takes_the_checkpoint_for_its_reference(tmp_path: Path) -> None:
    """A synchronous run repeats bit for bit, its KL included, whether it was interrupted or not."""
    keys: dict[str, Any] = {"loss": {"kl_coefficient": 0.05}, "parity": {"every": 0}, "checkpoint": {"every": 2}}
    Trainer(reward_funcs=digits, args=small(tmp_path / "one", steps=4, **keys)).train()
    Trainer(reward_funcs=digits, args=small(tmp_path / "two", steps=2, **keys)).train()
    Trainer(reward_funcs=digits, args=small(tmp_path / "two", steps=4, **keys), resume=True).train()
    whole, parts = metrics_of(tmp_path / "one"), metrics_of(tmp_path / "two")
    assert [m["kl"] for m in parts] == [m["kl"] for m in whole] and whole[0]["kl"] == 0 < whole[-1]["kl"]
    assert same(weights(tmp_path / "one"), weights(tmp_path / "two"))


# --- what the engine is asked for ----------------------------------------------------------------------------------


class AskedEngine(FakeEngine):
    def __init__(self) -> None:
        super().__init__()
        self.wanted: list[bool] = []

    def submit(self, requests: Any) -> None:
        self.wanted += [request.logprobs for request in requests]
        super().submit(requests)


@pytest.mark.parametrize("name", ["asympo", "spo", "naive", "grpo"])
def test_engine_is_asked_for_behaviour_logprobs_that_nobody_uses(name: str) -> None:
    loss = make_loss(LossConfig.model_validate({"name": name}))
    buffer, engine = GroupBuffer(2, 0), AskedEngine()
    rollouts = worker(buffer, engine, by_sample, needs_logprobs=loss.needs_behaviour_logprobs)
    rollouts.start()
    assert buffer.take(30) is not None
    rollouts.stop()
    assert engine.wanted == [name == "grpo"] * 2


@pytest.mark.parametrize("wanted", [False, True])
def test_engine_computes_logprobs_that_it_was_not_asked_for(wanted: bool) -> None:
    engine = ready(make_decoder())
    calls = 0
    units = engine.weights.head_units

    def counted(inputs: Any, run: Any = units.logprob) -> Any:
        nonlocal calls
        calls += 1
        return run(inputs)

    object.__setattr__(units, "logprob", counted)
    request: Request = ask(0, PROMPT, samples=2, new=4, logprobs=wanted)
    engine.submit([request])
    done = drain(engine)
    assert (calls > 0) == wanted and all((item.logprobs is not None) == wanted for item in done)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "carried"),
    [
        ({"name": "asympo"}, False),
        ({"name": "spo", "kl_coefficient": 0.01}, False),
        ({"name": "grpo", "behaviour": "recomputed"}, False),
        ({"name": "dr_grpo", "behaviour": "recomputed", "importance_cap": 2.0}, True),
    ],
)
def test_rollouts_of_a_run_carry_logprobs_that_nobody_uses(
    loss: dict[str, Any], carried: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = Trained(monkeypatch)
    config = small(tmp_path / "run", loss=loss, buffer={"max_staleness": 1})
    assert Trainer(reward_funcs=digits, args=config).train().step == 3
    completions = [item for groups in trained.groups for group in groups for item in group.completions]
    assert completions and all((item.logprobs is not None) == carried for item in completions)
    for metrics in metrics_of(tmp_path / "run"):
        assert metrics["grad_norm"] > 0 and metrics["mismatch/max_abs"] == 0
        assert ("importance_weight/mean" in metrics) == carried
