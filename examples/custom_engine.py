"""An engine of one's own: one class with the methods of ``EngineProcess``. Here, the embedded engine in the trainer's process.

python examples/custom_engine.py
"""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trtl_rl import Trainer, TrainerConfig
from trtl_rl.engines.backends import make_engine
from trtl_rl.engines.engine import InFlight
from trtl_rl.engines.torch_engine.engine import TorchEngine
from trtl_rl.recipe.coverage import Coverage
from trtl_rl.refit.manifest import Bucket, Manifest, RefitResult
from trtl_rl.rollout import Completion, Request


class InProcessEngine:
    """Generates when it is polled. Learner and rollouts take turns, so it is slower than an engine in a process of its own."""

    def __init__(self, log: Path, number: int) -> None:
        self.number, self.busy_seconds = number, 0.0
        self._lock = threading.RLock()
        self._engine: Any = None

    @property
    def engine(self) -> TorchEngine:
        found: TorchEngine = self._engine
        return found

    def configure(self, description: dict[str, Any], kernels: str, compiled: bool, **rest: Any) -> dict[str, Any]:
        backend = rest.pop("backend")
        made = make_engine(backend, description, kernels=kernels, compiled=compiled, **rest)
        self._engine = made.engine
        return made.about

    def load(self, directory: Path) -> RefitResult:
        raise NotImplementedError("this engine starts from the trainer's weights")

    @property
    def version(self) -> int:
        return self.engine.version

    def coverage(self) -> Coverage:
        return self.engine.coverage()

    def submit(self, requests: Sequence[Request]) -> None:
        with self._lock:
            self.engine.submit(requests)

    def poll(self, timeout: float) -> list[Completion]:
        with self._lock:
            return self.engine.poll(timeout)

    def arrived(self) -> list[Completion]:
        return []

    def progress(self) -> dict[int, list[int]]:
        with self._lock:
            return self.engine.progress()

    def cancel(self, ids: Sequence[int]) -> None:
        with self._lock:
            self.engine.cancel(ids)

    def pause(self, policy: InFlight) -> None:
        with self._lock:
            self.engine.pause(policy)

    def resume(self) -> None:
        with self._lock:
            self.engine.resume()

    def probe(self, requests: Sequence[Request]) -> list[Completion]:
        with self._lock:
            return self.engine.probe(requests)

    def begin_refit(self, manifest: Manifest) -> bool:
        return self.engine.begin_refit(manifest)

    def write(self, bucket: Bucket) -> None:
        self.engine.write(bucket)

    def finish_refit(self) -> RefitResult:
        with self._lock:
            return self.engine.finish_refit()

    def abort_refit(self) -> None:
        self.engine.abort_refit()

    def close(self) -> None:
        """Nothing outlives the process."""


if __name__ == "__main__":
    args = TrainerConfig(steps=2, batch={"prompts": 4, "group_size": 4}, optimizer={"lr": 1e-4})
    print(Trainer(model="demo", args=args, engine=InProcessEngine).train())
