"""Settings of ``trtl-rl run`` without arguments; everything else has the default of a usual run."""

from __future__ import annotations

from typing import Any


def demo_settings() -> dict[str, Any]:
    """About one minute of training on two cores, through the path that any other run takes."""
    return {
        "model": "demo",
        "data": "demo",
        "task": {"held_out": 1024},
        "rewards": ["exact_match"],
        "steps": 150,
        "sampling": {"temperature": 1.0, "max_new_tokens": 24},
        "batch": {"prompts": 32, "group_size": 8},
        # Micro-batches whose activations fit into a core's caches: an update is a sixth faster than in one piece.
        "optimizer": {
            "lr": 4e-4,
            "warmup_steps": 10,
            "schedule": "wsd",
            "decay_fraction": 0.5,
            "micro_batch_tokens": 2048,
        },
        "buffer": {"max_staleness": 1},
        "parity": {"every": 10},
        "evaluation": {"prompts": 512},
    }
