"""ModelOpt's state of a quantised model: which quantisers it inserted and how they are set, kept with every checkpoint.

The state is plain data (names, numbers, our backend's arguments; no tensors, since nothing is calibrated). It is stored
under the name that ModelOpt's own support of transformers looks for, and read with ``weights_only``: it runs no code.
"""

from __future__ import annotations

import contextlib
import copy
import io
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtl_rl.errors import UserError
from trtl_rl.recipe.recipe import register_backend

if TYPE_CHECKING:
    from torch import nn

STATE_FILE = "modelopt_state.pth"

State = dict[str, Any]


def capture(model: nn.Module) -> State | None:
    """ModelOpt's state of ``model`` as it is now, or None for a model that it never touched."""
    if "modelopt.torch.opt" not in sys.modules:
        return None  # recipe none: nothing is worth its import
    with _quiet():
        import modelopt.torch.opt as mto

        if not mto.ModeloptStateManager.is_converted(model):
            return None
        state: State = copy.deepcopy(mto.modelopt_state(model))
        return state


def write(state: State, directory: Path) -> None:
    """Write ``state`` to ``directory/modelopt_state.pth``."""
    import torch

    torch.save(state, directory / STATE_FILE)


def restore(model: nn.Module, directory: Path) -> None:
    """Insert the quantisers of ``directory/modelopt_state.pth`` into ``model``, in place; weights stay as they are.

    Raises:
        UserError: the file is missing or unreadable, or belongs to a model with other modules.
    """
    path = directory / STATE_FILE
    if not path.is_file():
        raise UserError(f"{path} is missing: the checkpoint is not whole. Resume from another one.")
    with _quiet():
        import modelopt.torch.opt as mto

        register_backend()
        try:
            mto.restore_from_modelopt_state(model, mto.load_modelopt_state(path, weights_only=True))
        except Exception as error:  # pickle, torch and ModelOpt raise kinds of their own
            raise UserError(
                f"The quantisers of {path} cannot be restored into this model: {str(error) or type(error).__name__}"
            ) from None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """ModelOpt counts what it inserts on stdout, and warns of versions of transformers."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield
