"""The claim of arXiv 2601.14243 at laptop size: BF16 training with FP8 rollouts is off-policy in disguise, one recipe is not.

    python bench/precision.py [--quick]     # goes on with results/precision.json; remove it to begin anew

Three arms, from the same start models, prompts and random streams, differ in precision alone:

* ``bf16``: trainer and engine in BF16;
* ``mixed``: the trainer as in ``bf16``, the engine with the FP8 recipe;
* ``unified``: the FP8 recipe on both sides, in all three GEMMs.

A run refuses ``mixed``, so learner and engine are driven here. Every arm rounds to BF16 what is not FP8 (``compute: bf16``),
and the engine of ``mixed`` gets the codes of the BF16-rounded weights, as a careful user of two precisions would send them.
What remains of the difference is FP8 alone.

Part one lets the engine write 2,000 tokens and the trainer score them, without training. Part two trains on answers of a
fixed length (``recurrence.py``), synchronously, with a learning rate that falls to 0.

What it cannot show: the paper saw failures at 8,000 tokens and more, with billions of parameters; this model has a third of a
million, and trains on answers of at most 64 tokens. BF16 rounding concerns what linears read and write; attention, norms and
the residual stream are FP32 in every arm, so the ``bf16`` arm is finer than a GPU's.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import recurrence
import torch
from common import RESULTS, write_result
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from trtl_rl.config_parts import LossConfig, OptimizerConfig
from trtl_rl.demo.task import demo_rows
from trtl_rl.engines.torch_engine.engine import TorchEngine
from trtl_rl.flops.formulas import ModelShape
from trtl_rl.kernels.kernel_set import KernelSet, find_compiler
from trtl_rl.losses.loss import Loss, LossInputs, LossOutputs, make_loss
from trtl_rl.model.bind import TrainableDecoder, describe
from trtl_rl.model.description import DecoderDescription
from trtl_rl.model.source import find_model
from trtl_rl.model.weights import SCALE_SUFFIX, tensor_specs
from trtl_rl.recipe.codec import encode
from trtl_rl.recipe.recipe import Recipe
from trtl_rl.refit.sender import send
from trtl_rl.rollout import Completion, Group, Prompt, Request, Sampling
from trtl_rl.trainer.learner import Learner

ARMS = {"bf16": ("bf16", "bf16"), "mixed": ("bf16", "fp8"), "unified": ("fp8", "fp8")}  # trainer, engine
SETTING = ("arm", "seed", "length", "loss", "lr")  # what tells one run from another
LAST = 10  # steps at the end of training whose mean reward is the final one


def recipe(precision: str) -> Recipe:
    """The bundled recipe with BF16 between its GEMMs, and all GEMMs in ``precision``."""
    text = Recipe.load("fp8_block").text.replace("compute: fp32", "compute: bf16")
    for gemm in ("fprop", "dgrad", "wgrad"):
        text = text.replace(f"{gemm}: fp8", f"{gemm}: {precision}")
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / f"{precision}.yaml"
        path.write_text(text)
        return Recipe.load(str(path))


def engine_tensors(snapshot: Mapping[str, Tensor], description: DecoderDescription) -> dict[str, Tensor]:
    """A trainer's BF16 version as the engine of another recipe takes it: the same tensors, quantised where it wants codes."""
    formats = {item.name: item.format.forward_weight for item in description.coverage.linears}
    out: dict[str, Tensor] = {}
    for spec in tensor_specs(description):
        if spec.name.endswith(SCALE_SUFFIX):
            continue
        format = formats.get(spec.name.rpartition(".")[0]) if spec.dtype == torch.float8_e4m3fn else None
        if format is None:
            out[spec.name] = snapshot[spec.name]
        else:
            out[spec.name], out[spec.name + SCALE_SUFFIX] = encode(snapshot[spec.name].float(), format)
    return out


class Pair:
    """A trainer's decoder and an engine, each with its own recipe, over a copy of one model."""

    def __init__(self, start: PreTrainedModel, arm: str, kernels: KernelSet, slots: int, context: int) -> None:
        models = {name: copy.deepcopy(start) for name in set(ARMS[arm])}
        for name, model in models.items():
            recipe(name).apply(model)
        trainer, engine = ARMS[arm]
        self.description = describe(models[engine])  # before the trainer's forward replaces the model's
        self.decoder = TrainableDecoder(models[trainer], kernels, context)
        self.engine = TorchEngine(self.description, kernels, slots=slots, context=context, stop_ids=[])
        self.same = trainer == engine

    def refit(self, version: int) -> None:
        """Bring both sides to the masters as they are now."""
        tensors = self.decoder.refresh(version)
        if not self.same:
            tensors = engine_tensors(tensors, self.description)
        coverage = self.description.coverage.digest
        send(self.engine, tensors, version=version, coverage=coverage, bucket_bytes=1 << 26)


def generate(engine: TorchEngine, prompts: Sequence[list[int]], sampling: Sampling, seed: int) -> list[Completion]:
    """One answer to each prompt, in their order, with logprobs."""
    requests = [Request(-1 - i, ids, 1, sampling, (seed, i, 0), logprobs=True) for i, ids in enumerate(prompts)]
    return sorted(engine.probe(requests), key=lambda done: -done.request_id)


def difference_statistics(trainer: Tensor, engine: Tensor) -> dict[str, float]:
    """Mismatch of logprobs [answers, tokens] float32, with d = trainer − engine in float64.

    ``sequence_*`` is of the sum of d over an answer: its exponential is the importance weight that a trainer which believes
    to be on-policy leaves out. ``effective_samples`` is (Σ w)² / Σ w² of those weights, as a share of the answers.
    """
    d = trainer.double() - engine.double()
    total = d.sum(1)
    weight = total.exp()
    return {
        "differing_tokens": int((trainer != engine).sum()),
        "mean_abs": float(d.abs().mean()),
        "mean_exp_abs": float(d.abs().exp().mean()),
        "k3_kl": float((torch.expm1(d) - d).mean()),
        "sequence_mean": float(total.mean()),
        "sequence_std": float(total.std()),
        "weight_variance": float(weight.var()),
        "effective_samples": float(weight.sum() ** 2 / weight.square().sum() / len(weight)),
    }


def first_differences(a: Sequence[Completion], b: Sequence[Completion]) -> list[int]:
    """For each pair of answers the position of the first token that differs, their length if none does."""
    out = []
    for left, right in zip(a, b, strict=True):
        wrong = (i for i, (x, y) in enumerate(zip(left.ids, right.ids, strict=True)) if x != y)
        out.append(next(wrong, len(left.ids)))
    return out


def mismatch(
    start: PreTrainedModel, kernels: KernelSet, prompts: Sequence[list[int]], lengths: Sequence[int]
) -> dict[str, Any]:
    """Let each arm's engine write the longest of ``lengths`` and its trainer score that, without training."""
    longest = max(lengths)
    sampled: dict[str, list[dict[str, float]]] = {}
    greedy: dict[str, list[Completion]] = {}
    for arm in ARMS:
        pair = Pair(start, arm, kernels, len(prompts), max(map(len, prompts)) + longest)
        pair.refit(0)
        answers = generate(pair.engine, prompts, Sampling(1.0, longest), seed=0)
        scores = []
        with torch.no_grad():
            for prompt, done in zip(prompts, answers, strict=True):
                scores.append(pair.decoder.forward([[*prompt, *done.ids]], [longest], 1.0)[0])
        ours, theirs = torch.stack(scores), torch.tensor([done.logprobs for done in answers])
        sampled[arm] = [{"length": n, **difference_statistics(ours[:, :n], theirs[:, :n])} for n in lengths]
        if arm != "mixed":  # its two sides are the engines of the other two
            greedy[arm] = generate(pair.engine, prompts, Sampling(1.0, longest, greedy=True), seed=0)
    first = first_differences(greedy["bf16"], greedy["unified"])
    agree = [{"length": n, "share": sum(at >= n for at in first) / len(first)} for n in lengths]
    return {
        "answers": len(prompts),
        "sampled": sampled,
        "greedy_first_difference": sorted(first),
        "greedy_still_equal": agree,
    }


class WatchedLoss(Loss):
    """A loss that also compares the learner's logprobs with the engine's, on the very tokens that are trained on."""

    needs_behaviour_logprobs = True

    def __init__(self, loss: Loss) -> None:
        self.loss = loss
        self.rows: list[tuple[Tensor, Tensor]] = []

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        assert inputs.behaviour_logprobs is not None
        shape = (len(inputs.lengths), -1)  # all answers have one length
        self.rows.append((inputs.logprobs.detach().view(shape), inputs.behaviour_logprobs.view(shape)))
        return self.loss(inputs)

    def take(self) -> list[dict[str, float]]:
        """Statistics of the update since the last call; none if no group had signal."""
        rows, self.rows = self.rows, []
        if not rows:
            return []
        return [difference_statistics(torch.cat([ours for ours, _ in rows]), torch.cat([theirs for _, theirs in rows]))]


def train(
    start: PreTrainedModel,
    kernels: KernelSet,
    arm: str,
    seed: int,
    length: int,
    *,
    steps: int,
    batch: tuple[int, int],
    lr: float,
    loss: str,
    held_out: int,
) -> dict[str, Any]:
    """Train synchronously on answers of ``length`` tokens; ``batch`` is (prompts, answers to each)."""
    count, samples = batch
    began = time.perf_counter()
    pair = Pair(start, arm, kernels, max(count * samples, held_out), recurrence.PROMPT + length)
    pair.refit(0)
    watched = WatchedLoss(make_loss(LossConfig(name=loss)))
    optimizer = OptimizerConfig(lr=lr, warmup_steps=min(5, steps - 1), schedule="linear")
    shape = ModelShape.from_hf_config(start.config)
    learner = Learner(pair.decoder, watched, optimizer, shape=shape, temperature=1.0, steps=steps)
    starts = recurrence.prompts()
    order = torch.randperm(len(starts), generator=torch.Generator().manual_seed(seed)).tolist()
    kept, training = order[:held_out], order[held_out:]
    drawing = torch.Generator().manual_seed(seed)

    def evaluate() -> dict[str, float]:
        prompts = [starts[i] for i in kept]
        done = generate(pair.engine, prompts, Sampling(1.0, length, greedy=True), seed)
        scores = [recurrence.right_share(ids, answer.ids) for ids, answer in zip(prompts, done, strict=True)]
        return {"share": statistics.mean(scores), "exact": statistics.mean(score == 1 for score in scores)}

    before = evaluate()
    sampling = Sampling(1.0, length)
    rewards, differences = [], []
    rollout = 0.0
    trained = time.perf_counter()
    for step in range(steps):
        chosen = [training[i] for i in torch.randperm(len(training), generator=drawing)[:count].tolist()]
        groups = [Group(i, step, Prompt(i, step, starts[i], "")) for i in chosen]
        requests = [Request(i, g.prompt.ids, samples, sampling, (seed, i, step), True) for i, g in enumerate(groups)]
        at = time.perf_counter()
        for done in sorted(pair.engine.probe(requests), key=lambda item: item.sample):
            groups[done.request_id].completions.append(done)
        rollout += time.perf_counter() - at
        for group in groups:
            group.rewards = [recurrence.right_share(group.prompt.ids, done.ids) for done in group.completions]
        rewards.append(statistics.mean(reward for group in groups for _, reward in group.scored()))
        learner.update(groups, step)
        differences += watched.take()
        pair.refit(step + 1)
    trained = time.perf_counter() - trained
    return {
        "arm": arm,
        "seed": seed,
        "length": length,
        "loss": loss,
        "lr": lr,
        "final_reward": statistics.mean(rewards[-LAST:]),
        "greedy_before": before,
        "greedy_after": evaluate(),
        "reward": [round(value, 4) for value in rewards],
        "mismatch_mean_abs": [round(found["mean_abs"], 5) for found in differences],
        "mismatch": {key: statistics.mean(found[key] for found in differences) for key in differences[0]},
        "rollout_share": rollout / trained,
        "step_seconds": trained / steps,
        "seconds": time.perf_counter() - began,
    }


def summary(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each setting what each arm reached, seed by seed, and its difference to ``bf16`` of the same seed."""

    def figures(run: Mapping[str, Any]) -> dict[str, float]:
        after = run["greedy_after"]
        return {"final_reward": run["final_reward"], "greedy_share": after["share"], "greedy_exact": after["exact"]}

    out = []
    for setting in dict.fromkeys((run["length"], run["loss"], run["lr"]) for run in runs):
        chosen = [run for run in runs if (run["length"], run["loss"], run["lr"]) == setting]
        base = {run["seed"]: figures(run) for run in chosen if run["arm"] == "bf16"}
        row: dict[str, Any] = dict(zip(("length", "loss", "lr"), setting, strict=True))
        for arm in ARMS:
            mine = [run for run in chosen if run["arm"] == arm and run["seed"] in base]
            if not mine:
                continue
            row[arm] = {key: [round(figures(run)[key], 4) for run in mine] for key in figures(mine[0])}
            row[arm]["rollout_share"] = round(statistics.mean(run["rollout_share"] for run in mine), 3)
            row[arm]["step_seconds"] = round(statistics.mean(run["step_seconds"] for run in mine), 3)
            row[arm]["mismatch"] = {
                key: float(f"{statistics.mean(run['mismatch'][key] for run in mine):.4g}")
                for key in mine[0]["mismatch"]
            }
            for key in ("final_reward", "greedy_share"):
                differences = [figures(run)[key] - base[run["seed"]][key] for run in mine]
                reached = statistics.mean(base[run["seed"]][key] for run in mine)
                row[arm][f"{key}_minus_bf16"] = {
                    "mean": round(statistics.mean(differences), 4),
                    "least": round(min(differences), 4),
                    "largest": round(max(differences), 4),
                    "within_1_percent": statistics.mean(differences) >= -0.01 * reached,
                }
        out.append(row)
    return out


def plot(result: Mapping[str, Any], length: int, loss: str, lr: float, path: Path) -> None:
    """Mismatch of ``mixed`` against the answer's length, and reward against steps in one setting."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.8))
    for i, (name, found) in enumerate(result["mismatch"].items()):
        rows = found["sampled"]["mixed"]
        at = [row["length"] for row in rows]
        for key, style, text in (("mean_abs", "--", "mean |d| of a token"), ("sequence_std", "-", "deviation of Σ d")):
            left.plot(at, [row[key] for row in rows], style, marker=".", color=f"C{i}", label=f"{name}: {text}")
    left.set(xscale="log", yscale="log", xlabel="tokens of the answer", ylabel="trainer − engine, nats")
    left.set_title("BF16 trainer, FP8 engine; one recipe: 0", fontsize=10)
    for colour, arm in enumerate(ARMS):
        chosen = [
            run
            for run in result["runs"]
            if (run["arm"], run["length"], run["loss"], run["lr"]) == (arm, length, loss, lr)
        ]
        for i, run in enumerate(chosen):
            right.plot(run["reward"], color=f"C{colour}", alpha=0.8, lw=1.2, label=arm if i == 0 else None)
    right.set(xlabel="step", ylabel="right digits of a sampled answer", ylim=(0.75, 1))
    right.set_title(f"answers of {length} tokens, {loss}", fontsize=10)
    for axis in (left, right):
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Run what the result file lacks, write it after every part, and plot."""
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--quick", action="store_true", help="eager operators, short answers, one seed; nothing is kept"
    )
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    kernels = KernelSet(not quick and find_compiler() is not None, backward=True)
    lengths = [16, 32] if quick else [16, 32, 64, 128, 256, 512, 1000, 2000]
    answers = 8 if quick else 64
    # length, steps, (prompts, answers to each), learning rate, objective, seeds
    settings: list[tuple[int, int, tuple[int, int], float, str, int]] = [
        (16, 40, (8, 8), 4e-4, "asympo", 3),
        (64, 40, (8, 8), 4e-4, "asympo", 3),
        (64, 40, (8, 8), 4e-4, "grpo", 3),
        (64, 30, (8, 8), 1e-3, "grpo", 3),
    ]
    if quick:
        settings = [(16, 2, (4, 4), 4e-4, "asympo", 1)]
    starts = {seed: recurrence.start_model(seed, **({"steps": 20} if quick else {})) for seed in range(settings[0][-1])}

    path = find_model("demo").path
    tokenizer, rows = AutoTokenizer.from_pretrained(path), demo_rows()
    demo = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    asked = [rows[i * len(rows) // answers]["prompt"] for i in range(answers)]
    numbers = recurrence.prompts()
    models = {
        "demo": (demo, [tokenizer(text)["input_ids"] for text in asked]),
        "recurrence": (starts[0], [numbers[i * len(numbers) // answers] for i in range(answers)]),
    }
    file = RESULTS / "precision.json"
    known: dict[str, Any] = json.loads(file.read_text()) if file.exists() and not quick else {}
    result = {"kernels": kernels.description, **{key: known.get(key, {}) for key in ("mismatch", "summary")}}
    result["runs"] = known.get("runs", [])

    def write() -> None:
        if not quick:
            result["summary"] = summary(result["runs"])
            write_result("precision", result)

    for name, (model, prompts) in models.items():
        if name in result["mismatch"]:
            continue
        result["mismatch"][name] = mismatch(model, kernels, prompts, lengths)
        write()
    for length, steps, batch, lr, loss, seeds in settings:
        for seed in range(seeds):
            for arm in ARMS:
                asked_for = (arm, seed, length, loss, lr)
                if any(asked_for == tuple(run[key] for key in SETTING) for run in result["runs"]):
                    continue
                options = {"steps": steps, "batch": batch, "lr": lr, "loss": loss, "held_out": 8 if quick else 64}
                result["runs"].append(train(starts[seed], kernels, arm, seed, length, **options))
                write()
        if not quick:
            plot(result, 64, "grpo", 1e-3, RESULTS / "precision.png")
    if quick:
        print({**result, "summary": summary(result["runs"])})


if __name__ == "__main__":
    main()
