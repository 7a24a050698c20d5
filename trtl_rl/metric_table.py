"""Every row and every metric of ``metrics.jsonl``: the one table behind ``docs/metrics.md``, tests and reports.

Whoever adds a metric adds one line here; a test compares the table with what runs write and with the names in the code,
another compares ``docs/metrics.md``, which is made by ``python -m trtl_rl.metric_table > docs/metrics.md``.

Kinds: ``mean`` is the mean over items of the step (tokens, answers, groups), whose number stands in the row's ``counts``;
``sum`` adds up over the step, ``max`` is the largest of the step, ``last`` is the state when the step's row was written.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Literal

Kind = Literal["mean", "sum", "max", "last"]


@dataclass(frozen=True)
class Metric:
    """One metric.

    Attributes:
        name: ``{…}`` stands for a name of the user's or of a part of the run.
        kind: How the values of a step become one number.
        unit: ``1`` for a plain number, ``share`` for 0 to 1.
    """

    name: str
    kind: Kind
    unit: str
    meaning: str

    @functools.cached_property
    def pattern(self) -> re.Pattern[str]:
        """Matches the names that this line stands for."""
        parts = re.split(r"\{[^}]*\}", self.name)
        return re.compile(".+".join(map(re.escape, parts)))


def _part(*lines: tuple[str, Kind, str, str]) -> tuple[Metric, ...]:
    return tuple(Metric(*line) for line in lines)


PARTS: dict[str, tuple[Metric, ...]] = {
    "Rewards": _part(
        ("reward", "mean", "1", "total reward of the scored answers"),
        ("reward_std", "mean", "1", "standard deviation of the rewards within a group; the mean over groups"),
        ("rewards/{fn}/mean", "mean", "1", "what the reward function gave, before its weight"),
        ("frac_reward_zero_std", "mean", "share", "groups whose rewards are all equal: they teach nothing"),
        (
            "rewards/{fn}/failed/{kind}",
            "sum",
            "samples",
            "without a valid value since the step before, by what went wrong",
        ),
        ("sampling/refilled_groups", "sum", "groups", "thrown away for another prompt (batch.zero_signal=refill)"),
        ("sampling/refilled_flops", "sum", "FLOP", "that they cost; flops/wasted/zero_signal counts them too"),
        ("sampling/skipped_prompts", "sum", "prompts", "passed over (task.skip_below, task.skip_above)"),
        ("sampling/skipped_flops", "sum", "FLOP", "that they cost the last time: an estimate of what is saved"),
        ("task/left_out_rows", "last", "rows", "of a stream, left out so far for their length"),
    ),
    "Answers": _part(
        ("completions/mean_length", "mean", "tokens", "length of the scored answers"),
        ("completions/clipped_ratio", "mean", "share", "answers that were cut off at sampling.max_new_tokens"),
        ("entropy", "mean", "nats", "entropy of the trainer's distribution, over trained tokens"),
        ("num_tokens", "last", "tokens", "generated in the whole run"),
    ),
    "Learning": _part(
        ("loss", "sum", "1", "the objective; the micro-batches' shares add up to it"),
        ("grad_norm", "last", "1", "L2 norm of the gradient before clipping"),
        ("learning_rate", "last", "1", "of the step that was made"),
        ("asympo/imbalance", "last", "1", "S̄_N / S̄_P: negative over positive answers, in the next two lines' measure"),
        ("asympo/nll_positive", "mean", "nats per token", "S̄_P: mean token NLL of answers with positive advantage"),
        ("asympo/nll_negative", "mean", "nats per token", "S̄_N: mean token NLL of answers with negative advantage"),
        ("asympo/floor_frac", "mean", "share", "answers whose S lies below loss.floor"),
        ("asympo/bound_low_frac", "mean", "share", "tokens of negative answers below loss.p_low"),
        ("asympo/bound_high_frac", "mean", "share", "tokens of positive answers above loss.p_high"),
        ("grpo/clip_frac", "mean", "share", "tokens whose ratio was clipped"),
        ("grpo/clip_low_frac", "mean", "share", "tokens of negative answers whose ratio was clipped from below"),
        ("grpo/clip_high_frac", "mean", "share", "tokens of positive answers whose ratio was clipped from above"),
        ("kl", "mean", "nats", "K3 estimate of the divergence from the start model, over trained tokens"),
        ("importance_weight/mean", "mean", "1", "trainer's over engine's probability of a token, before the cap"),
        ("importance_weight/max", "max", "1", "the largest of them"),
        ("importance_weight/capped_frac", "mean", "share", "tokens whose weight is above loss.importance_cap"),
        ("grpo/ratio_max", "max", "1", "largest ratio of the trainer's probability to the engine's"),
    ),
    "Staleness and the buffer": _part(
        ("off_policy/mean", "mean", "weight versions", "between an answer's first token and its update"),
        ("off_policy/max", "max", "weight versions", "the largest of them"),
        ("buffer/ready", "last", "groups", "complete and waiting for an update"),
        ("buffer/in_flight", "last", "groups", "being generated or scored"),
        ("buffer/discarded", "last", "groups", "left out so far, for whatever reason"),
        ("buffer/regenerated", "last", "groups", "generated again so far, since their work was lost"),
    ),
    "Mismatch (steps with a probe)": _part(
        ("mismatch/tokens", "last", "tokens", "compared by the probe"),
        ("mismatch/differing_tokens", "last", "tokens", "whose logprob differs between trainer and engine in any bit"),
        ("mismatch/max_abs", "last", "nats", "largest absolute difference of two logprobs"),
        ("mismatch/mean_exp_abs", "last", "1", "mean of exp(|difference|); 1 where nothing differs"),
        ("mismatch/first_divergence", "last", "tokens", "least position in an answer that differs; -1: none"),
        ("mismatch_kl/mean", "last", "nats", "K3 estimate of KL(engine ‖ trainer), mean over tokens"),
        ("mismatch_kl/max", "last", "nats", "its largest value at one token"),
    ),
    "Refit": _part(
        ("refit/bytes", "last", "bytes", "sent to the engine"),
        ("refit/changed_frac", "last", "share", "bytes of the weights that differ from the version before"),
        ("timing_s/refit/quantise", "last", "s", "learner: quantise the new weights"),
        ("timing_s/refit/move", "last", "s", "move codes and scales"),
        ("timing_s/refit/decode", "last", "s", "engine: decode and check them, beside generation"),
        ("timing_s/refit/finish", "last", "s", "engine: digest and switch"),
        ("timing_s/refit/pause", "last", "s", "in which the engine generated nothing"),
    ),
    "FLOPs": _part(
        ("flops/search", "sum", "FLOP", "generating answers, counted in this step"),
        ("flops/learning", "sum", "FLOP", "forward and backward of updates"),
        ("flops/feedback", "sum", "FLOP", "reward models"),
        ("flops/total", "sum", "FLOP", "of the three roles"),
        ("flops/recomputed", "sum", "FLOP", "of the total: what backward computed a second time"),
        ("flops/fp8_frac", "last", "share", "of the step's total: products of two FP8 operands"),
        ("flops/cumulative/{role}", "last", "FLOP", "the same since the run began, resumes included; also total"),
        ("flops/wasted/{fate}", "sum", "FLOP", "of the total: what served no update, by reason"),
        ("flops/update_fraction", "last", "share", "ρ: learning over the total, since the run began"),
        ("flops/updates_per_rollout", "last", "1", "trained over generated answer tokens, since the run began"),
        ("flops/budget_frac", "last", "share", "used of the nearest limit (steps or a budget); runs with a budget"),
        (
            "budget/left/{limit}",
            "last",
            "the limit's",
            "not used yet of steps, flops, tokens or seconds; runs with a budget",
        ),
    ),
    "Time and speed": _part(
        ("timing_s/step", "last", "s", "from waiting for the batch to the end of the step"),
        ("timing_s/rollout_wait", "last", "s", "the learner waited for a batch"),
        ("timing_s/engine_wait", "last", "s", "the engine had nothing to do"),
        ("engine/restarts", "last", "1", "engines that were replaced so far"),
        ("engine/replicas", "last", "1", "engines in rotation, of several"),
        ("engine/load_min", "last", "answers", "to come of the engine with the least to do"),
        ("engine/load_max", "last", "answers", "to come of the engine with the most to do"),
        ("timing_s/learn", "last", "s", "update: forward, backward, optimizer"),
        ("timing_s/refit", "last", "s", "quantise, send, switch"),
        ("timing_s/rewards", "sum", "s", "in reward functions, beside the learner"),
        ("timing_s/parity", "last", "s", "probe: the engine's answers and the trainer's logprobs"),
        ("timing_s/role/{role}", "sum", "s", "busy time of search, learning or feedback, which may overlap"),
        ("perf/tokens_per_second", "last", "tokens/s", "generated tokens over the time of the step"),
        ("perf/flops_per_second/{role}", "last", "FLOP/s", "FLOPs of a role over its busy time"),
        ("perf/mfu/{role}", "last", "share", "of the device's peak, without what was recomputed; known devices only"),
    ),
    "Evaluation (rows of kind evaluation)": _part(
        (
            "eval/{scorer}",
            "mean",
            "1",
            "score of sampled answers to held-out prompts; below it pass_at_k, maj_at_k, ci_low and ci_high",
        ),
        ("eval/greedy_{scorer}", "mean", "1", "score of greedy answers to the same prompts"),
    ),
}

METRICS: tuple[Metric, ...] = tuple(metric for part in PARTS.values() for metric in part)

# Fields of each kind of row, beside ``kind`` and ``time`` (Unix seconds).
ROWS: dict[str, tuple[str, dict[str, str]]] = {
    "start": (
        "what the run is; a resumed run writes one more",
        {
            "model": "as configured",
            "parameters": "of the model",
            "steps": "planned",
            "task": "preset or data",
            "loss": "the objective's name",
            "recipe": "name and digest",
            "coverage": "what runs in FP8, what does not and why, and the shares",
            "kernels": "identity of the operators",
            "compile_seconds": "of the operators; 0 from the cache",
            "start_seconds": "from the command to the first step",
            "run_dir": "the directory, as the run knew it",
            "versions": "of Python and packages, by name",
            "resumed_from": "step of the checkpoint, or null",
            "lost_flops": "of steps that were not saved, which are done again",
        },
    ),
    "progress": (
        "long work before or between steps",
        {"name": "of the work", "done": "so much", "total": "of so much; 0: unknown", "unit": "of both"},
    ),
    "part": (
        "a part of a step that takes very long",
        {"name": "rollout_wait, learn, refit or parity", "seconds": "so far"},
    ),
    "step": (
        "one update",
        {
            "step": "1 is the first",
            "metrics": "metric name to number; null: not finite",
            "counts": "number of items behind each mean of more than one item",
        },
    ),
    "sample": (
        "one answer of the step's batch",
        {
            "step": "the update that trained on it",
            "prompt": "text",
            "completion": "text",
            "reward": "total, or null",
            "finish_reason": "stop, length, …",
            "version": "of the weights at its first token",
        },
    ),
    "message": (
        "something for people",
        {"level": "info, warning or error", "text": "what and, where useful, what to do"},
    ),
    "evaluation": (
        "scores of held-out prompts",
        {"step": "0: before training", "metrics": "eval/… name to number"},
    ),
    "end": (
        "the process ends",
        {"status": "done, interrupted or failed", "step": "the last one", "text": "for people: what is next"},
    ),
}


def find(name: str) -> Metric | None:
    """The line of the table for a metric's full name, or None; of several patterns the one that says most.

    >>> find("flops/cumulative/search").unit
    'FLOP'
    """
    found = [metric for metric in METRICS if metric.pattern.fullmatch(name)]
    return max(found, key=lambda metric: len(re.sub(r"\{[^}]*\}", "", metric.name)), default=None)


_HEAD = """\
# metrics.jsonl

<!-- Made by `python -m trtl_rl.metric_table > docs/metrics.md`; change trtl_rl/metric_table.py. -->

Every part of a run writes rows to `metrics.jsonl` in the run's directory: one JSON object a line, each with `kind` and
`time` (Unix seconds). Dashboard, `watch`, `report` and trackers read nothing else. A resumed run continues the file:
rows of steps that the interruption lost are blanked, and those steps come again after its `start` row. Readers pass over
blank lines, over kinds and fields that they do not know, and over a torn line, which a kill may leave.

`trtl_rl.metrics.MetricsReader` reads the file, also while it grows.

## Rows
"""

_REDUCTION = """\
## Metrics

Values of a step are collected with their counts and reduced once, over micro-batches and processes alike, by kind:
`mean` over items (how many stands in `counts`), `sum` over the step, `max` of the step, `last`: the state when the row
was written. A metric that a step did not measure is absent. Units: `1` is a plain number, `share` runs from 0 to 1."""


def markdown() -> str:
    """The text of ``docs/metrics.md``."""
    lines = [*_HEAD.split("\n"), "| kind | what it tells | fields |", "| --- | --- | --- |"]
    for kind, (meaning, fields) in ROWS.items():
        told = "<br>".join(f"`{name}`: {text}" for name, text in fields.items())
        lines.append(f"| `{kind}` | {meaning} | {told} |")
    lines += ["", *_REDUCTION.split("\n")]
    for part, metrics in PARTS.items():
        lines += ["", f"### {part}", "", "| metric | kind | unit | meaning |", "| --- | --- | --- | --- |"]
        lines += [f"| `{m.name}` | {m.kind} | {m.unit} | {m.meaning} |" for m in metrics]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
