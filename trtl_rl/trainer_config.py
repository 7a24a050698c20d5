"""``TrainerConfig``: the settings of a run as Python keyword arguments, in this project's words or in TRL's."""

from __future__ import annotations

from typing import Any

from pydantic import PrivateAttr, ValidationError

from trtl_rl.config import RunConfig, explain
from trtl_rl.errors import UserError
from trtl_rl.trl_names import Translated, translate


class TrainerConfig(RunConfig):
    """Every key of ``RunConfig``; a part is an object, a mapping, or dotted keys in a mapping passed by ``**``.

    TRL's common names are taken too (``trtl_rl/trl_names.py`` holds the mapping, and the run says what it mapped), so that the
    arguments of a ``GRPOConfig`` can be passed as they are.

    Raises:
        UserError: names every wrong key and value, and every setting of TRL that is not taken, with the reason.

    Example:

    >>> TrainerConfig(steps=3, batch={"prompts": 4}).batch.group_size
    8
    >>> TrainerConfig(max_steps=3, learning_rate=1e-5, per_device_train_batch_size=32).batch.prompts
    4
    """

    _translated: Translated = PrivateAttr(default_factory=Translated)

    def __init__(self, **settings: Any) -> None:
        translated = translate(_nested(settings))
        try:
            super().__init__(**translated.tree)
        except ValidationError as error:
            raise UserError("TrainerConfig: " + explain(error)) from None
        self._translated = translated

    @property
    def translated(self) -> Translated:
        """What was said in TRL's words."""
        return self._translated


def _nested(settings: dict[str, Any]) -> dict[str, Any]:
    """Dotted keys as mappings in mappings."""
    tree: dict[str, Any] = {}
    for key, value in settings.items():
        *parents, last = key.split(".")
        place = tree
        for parent in parents:
            place = place.setdefault(parent, {})
            if not isinstance(place, dict):
                raise UserError(f"TrainerConfig: {key} and {parent} say the same thing twice: give one of them.")
        place[last] = value
    return tree
