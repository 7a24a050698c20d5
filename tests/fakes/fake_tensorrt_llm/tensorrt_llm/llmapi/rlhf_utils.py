"""The extension that the FAKE's workers have unless another is named."""

from __future__ import annotations

from typing import Any


class WorkerExtension:
    engine: Any

    def update_weights(self, ipc_handles: dict[str, Any] | None = None) -> None:
        assert ipc_handles is None, "the fake takes no handles of GPU memory"
        with self.engine.control_action():
            assert hasattr(self.engine.model_engine.model, "first_pre_reload_weights"), "nothing was loaded"
            self.engine.finalised()
            self.engine.reset_prefix_cache()
            del self.engine.model_engine.model.first_pre_reload_weights

    def wait_for_engine_idle(self) -> None:
        with self.engine.control_action():
            pass

    def reset_prefix_cache(self) -> None:
        self.engine.reset_prefix_cache()
