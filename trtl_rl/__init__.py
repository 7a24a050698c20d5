"""Reinforcement learning for language models: rollouts and training through one FP8 block-scale recipe.

``Trainer``, ``TrainerConfig`` and ``Callback`` are loaded at their first use, so that ``import trtl_rl`` does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trtl_rl.trainer.callbacks import Callback
    from trtl_rl.trainer.trainer import Trainer
    from trtl_rl.trainer_config import TrainerConfig

__version__ = "0.1.0"
__all__ = ["Callback", "Trainer", "TrainerConfig", "__version__"]
_PLACES = {
    "Callback": "trtl_rl.trainer.callbacks",
    "Trainer": "trtl_rl.trainer.trainer",
    "TrainerConfig": "trtl_rl.trainer_config",
}


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        return getattr(import_module(_PLACES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
