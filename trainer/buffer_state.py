"""The rollout side in a checkpoint: where in the data the run is, and the groups that wait to be trained on, as plain JSON.

Prompts are not written, but made again from the data, whose fingerprint a resume compares.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from trtl_rl.errors import UserError
from trtl_rl.rollout import Completion, Group
from trtl_rl.tasks.task import Task

if TYPE_CHECKING:
    from trtl_rl.buffer import GroupBuffer
    from trtl_rl.config import RunConfig
    from trtl_rl.flops.ledger import Ledger
    from trtl_rl.trainer.rollout_state import Position
    from trtl_rl.trainer.rollouts import RolloutWorker


def to_json(position: Position, made_with: dict[str, Any]) -> dict[str, Any]:
    """What :func:`restore` reads.

    Args:
        made_with: What the groups depend on besides weights and data, see :func:`dependences`.
    """
    return {
        "next_index": position.next_index,
        "again": position.again,
        "ready": [_group_to_json(group) for group in position.ready],
        "discarded": [[*_names(group), reason] for group, reason in position.discarded],
        "discards": position.discards,
        "tokens": position.tokens,
        "recent_prompts": position.recent_prompts,
        "made_with": made_with,
    }


def dependences(config: RunConfig, logprobs: bool) -> dict[str, Any]:
    """What finished groups depend on besides weights and data; where a resume changes it, they are generated again.

    Args:
        logprobs: Whether the objective wants behaviour logprobs.
    """
    return {
        "sampling": config.sampling.model_dump(mode="json"),
        "rewards": [reward.model_dump(mode="json") for reward in config.rewards],
        "logprobs": logprobs,
    }


def start_indices(saved: dict[str, Any], made_with: dict[str, Any]) -> tuple[int, list[int]]:
    """The first index that was never started, and those before it that are generated again."""
    again = list(saved["again"])
    if saved["made_with"] != made_with:
        again += [group["index"] for group in saved["ready"]]
    return saved["next_index"], sorted(again)


def restore(
    saved: dict[str, Any],
    made_with: dict[str, Any],
    *,
    task: Task,
    seed: int,
    buffer: GroupBuffer,
    worker: RolloutWorker,
    ledger: Ledger,
) -> str | None:
    """Give buffer and worker, both new, what the checkpoint holds of them.

    Groups that are too stale for the buffer's rule are discarded and counted as wasted (``stale``); those that were sampled or
    rewarded with other settings are generated again, and count as wasted too (``cancelled``).

    Returns:
        What a person should know of it, or None.

    Raises:
        UserError: the tokenizer makes other prompts than before.
    """
    order = task.order(seed)
    prompts = {entry["index"]: task.prompt(*order.at(entry["index"])) for entry in saved["ready"]}
    groups = []
    for entry in saved["ready"]:
        prompt = prompts[entry["index"]]
        if prompt.ids != entry["prompt_ids"]:
            raise UserError(
                f"The tokenizer turns row {prompt.id} into other tokens than in the run that was saved. Resume with the "
                "tokenizer that it had."
            )
        completions = [Completion(**fields) for fields in entry["completions"]]
        groups.append(
            Group(
                entry["index"],
                entry["version"],
                prompt,
                completions,
                entry["rewards"],
                entry["components"],
                entry["texts"],
            )
        )
    buffer.discarded.update(saved["discards"])
    worker.counters.tokens = saved["tokens"]
    for index, id, occurrence, reason in saved["discarded"]:
        assert (id, occurrence) == order.at(index), "the order of prompts is the run's"
        buffer.note_discarded(Group(index, -1, task.prompt(id, occurrence)), reason)
    if saved["made_with"] != made_with:
        ledger.waste("cancelled", sum(worker.unwasted_flops(group) for group in groups))
        changed = ", ".join(key for key in made_with if made_with[key] != saved["made_with"].get(key))
        return f"{len(groups)} finished groups are generated again: {changed} changed." if groups else None
    stale = buffer.restore(groups)
    for group in stale:
        buffer.discarded["stale"] += 1
        buffer.note_discarded(group, "stale")
        ledger.waste("stale", worker.unwasted_flops(group))
    kept = len(groups) - len(stale)
    return (
        f"Of {len(groups)} finished groups {kept} are trained on, and {len(stale)} are discarded as too stale."
        if stale
        else None
    )


def _names(group: Group) -> tuple[int, int, int]:
    return group.index, group.prompt.id, group.prompt.occurrence


def _group_to_json(group: Group) -> dict[str, Any]:
    return {
        "index": group.index,
        "version": group.version,
        "prompt_ids": group.prompt.ids,
        "completions": [asdict(completion) for completion in group.completions],
        "rewards": group.rewards,
        "components": group.components,
        "texts": group.texts,
    }
