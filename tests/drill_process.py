"""The process that the kill drill kills: ``python drill_process.py RUN_DIR STALENESS SEED STEPS``, one attempt of a run.

``SEED`` chooses when it kills its whole process group (kill -9): in one of the calls of a save, at any of the calls that
change the disk, or after some time. ``SEED`` −1 lets it live. It prints ``DONE`` only where the run is complete.

It is forked from a process that has imported everything, since imports would take most of the drill's time.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import threading
from pathlib import Path
from typing import Any


def kill() -> None:
    os.killpg(0, signal.SIGKILL)


def arm(seed: int) -> None:
    """Choose the moment."""
    from trtl_rl.metrics import MetricsWriter
    from trtl_rl.trainer import checkpoint
    from trtl_rl.trainer.learner import Learner

    draw = random.Random(seed)
    kind = draw.choice(["save", "save", "disk", "time"])
    if kind == "time":
        threading.Timer(draw.uniform(0.3, 4.0), kill).start()
        return
    left = draw.randint(1, 60 if kind == "save" else 150)
    saving = False
    lock = threading.Lock()

    def watched(original: Any, *, always: bool) -> Any:
        def call(*args: Any, **rest: Any) -> Any:
            nonlocal left
            with lock:
                if always or saving:
                    left -= 1
                    if left == 0:
                        kill()
            return original(*args, **rest)

        return call

    for owner, name in ((os, "fsync"), (os, "replace"), (shutil, "rmtree"), (Path, "write_text"), (Path, "mkdir")):
        setattr(owner, name, watched(getattr(owner, name), always=kind == "disk"))
    if kind == "disk":
        for owner, name in ((MetricsWriter, "write"), (Learner, "update")):
            setattr(owner, name, watched(getattr(owner, name), always=True))
    save = checkpoint.save

    def saved(*args: Any, **rest: Any) -> Any:
        nonlocal saving
        saving = True
        try:
            return save(*args, **rest)
        finally:
            saving = False

    checkpoint.save = saved


def reward(completion_ids: list[list[int]], **rest: Any) -> list[float]:
    """Nearly always different within a group, so that every step moves the weights."""
    return [float(sum(ids) % 11) for ids in completion_ids]


def attempt(run_dir: Path, staleness: int, seed: int, steps: int) -> None:
    from trtl_rl import Trainer
    from trtl_rl.config import validate_config
    from trtl_rl.demo.task import demo_rows

    config = validate_config(
        {
            "run_dir": str(run_dir),
            "recipe": "none",
            "compile": False,
            "steps": steps,
            "batch": {"prompts": 2, "group_size": 2},
            "sampling": {"max_new_tokens": 4},
            "optimizer": {"lr": 1e-3},
            "buffer": {"max_staleness": staleness},
            "checkpoint": {"every": 2, "keep": 2},
            "rollouts": {"keep": 1000},
            "parity": {"every": 5},
        }
    )
    resume = (run_dir / "config.yaml").exists()
    if not resume:
        shutil.rmtree(run_dir, ignore_errors=True)  # killed before the run had begun
    trainer = Trainer("demo", reward, config, demo_rows()[:17], resume=resume)
    if seed >= 0:
        arm(seed)
    result = trainer.train()
    print("DONE" if result.status == "done" else result.status, flush=True)


def serve() -> None:
    """Fork an attempt for each line of arguments, and print how it ended."""
    import accelerate  # noqa: F401
    import torch
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401

    import trtl_rl.trainer.assembly
    import trtl_rl.trainer.learner
    import trtl_rl.trainer.loop  # noqa: F401

    torch.set_num_threads(1)
    for line in sys.stdin:
        run_dir, *numbers = line.split()
        child = os.fork()
        if child == 0:
            os.setsid()
            try:
                attempt(Path(run_dir), *map(int, numbers))
                os._exit(0)
            except BaseException:
                import traceback

                traceback.print_exc()
                os._exit(1)
        _, status = os.waitpid(child, 0)
        print(f"ENDED {os.waitstatus_to_exitcode(status)}", flush=True)


if __name__ == "__main__":
    serve()
