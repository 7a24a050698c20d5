"""The curriculum hook: a row's difficulty, by a column or by the user's own function."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from trtl_rl.errors import UserError, nearest
from trtl_rl.tasks.order import Ids
from trtl_rl.tasks.rows import Rows


def difficulties(rows: Rows, ids: Ids, curriculum: str | None) -> npt.NDArray[np.float64] | None:
    """The difficulty of each of ``ids``, in the same order; ``None`` without a curriculum.

    Args:
        curriculum: A column with numbers, or ``file.py:function`` (or ``package.module:function``), called with a row.

    Raises:
        UserError: there is no such column or function, or a row has no finite number.
    """
    if curriculum is None:
        return None
    if ":" in curriculum:
        from trtl_rl.rewards.loading import import_named

        measure: Any = import_named(curriculum, "task.curriculum")
    elif curriculum in rows.columns:
        measure = lambda row: row[curriculum]  # noqa: E731
    else:
        raise UserError(
            f"task.curriculum={curriculum} is no column of {rows.source}.{nearest(curriculum, rows.columns)} It has: "
            f"{', '.join(rows.columns)}. Your own function is written file.py:function."
        )
    found = np.zeros(len(ids))
    for i, id in enumerate(ids):
        value = measure(rows[int(id)])
        number = value if isinstance(value, int | float) else None
        if number is None or not math.isfinite(number):
            raise UserError(
                f"Row {id} (counted from 0) of {rows.source}: task.curriculum={curriculum} gives {value!r}, not a finite number."
            )
        found[i] = number
    return found
