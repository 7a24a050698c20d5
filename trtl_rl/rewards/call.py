"""One call of a reward function: run it, check what it returns, and put what is wrong into words."""

from __future__ import annotations

import asyncio
import sys
import time
import traceback
from typing import Any

from trtl_rl.rewards.reward import Fault, Outcome, RewardFunction, unbound


def call(function: RewardFunction, arguments: dict[str, Any], count: int) -> Outcome:
    """Call ``function`` for ``count`` samples. Nothing that it raises gets out."""
    start = time.perf_counter()
    try:
        result = function(**arguments)
    except BaseException as error:
        return Outcome.failed(count, "exception", explain(error), time.perf_counter() - start)
    return _outcome(function, result, count, time.perf_counter() - start)


async def call_async(function: RewardFunction, arguments: dict[str, Any], count: int, limit: float | None) -> Outcome:
    """Await ``function``; after ``limit`` seconds it is cancelled."""
    start = time.perf_counter()
    try:
        task = asyncio.ensure_future(function(**arguments))
    except Exception as error:  # its arguments do not fit
        return Outcome.failed(count, "exception", explain(error))
    done, _ = await asyncio.wait([task], timeout=limit)
    seconds = time.perf_counter() - start
    if not done:
        task.cancel()
        return Outcome.failed(count, "timeout", f"gave no answer within {limit:g} s", seconds)
    if task.cancelled():
        return Outcome.failed(count, "exception", "cancelled itself", seconds)
    failure = task.exception()
    if failure is not None:
        return Outcome.failed(count, "exception", explain(failure), seconds)
    return _outcome(function, task.result(), count, seconds)


def explain(error: BaseException) -> str:
    """The traceback as text."""
    return "failed:\n" + "".join(traceback.format_exception(error)).rstrip()


def _outcome(function: RewardFunction, result: Any, count: int, seconds: float) -> Outcome:
    take_flops = getattr(unbound(function), "take_flops", None)
    flops = int(take_flops()) if take_flops is not None else 0
    try:
        values, faults = check(result, count)
    except Exception as error:  # an object that cannot even be looked at
        values, faults = [None] * count, [Fault("wrong_type", None, explain(error))]
    return Outcome(values, faults, flops, seconds)


def check(result: Any, count: int) -> tuple[list[float | None], list[Fault]]:
    """A function's result as floats, with a fault for each that is none."""
    values = result.tolist() if hasattr(result, "tolist") else result  # arrays and tensors
    if not isinstance(values, list | tuple):
        text = f"returned {type(result).__name__}: not a list of {count} numbers"
        return [None] * count, [Fault("wrong_type", None, text)]
    if len(values) != count:
        text = f"returned a list of {len(values)}: there are {count} completions"
        return [None] * count, [Fault("wrong_length", None, text)]
    checked: list[float | None] = []
    faults: list[Fault] = []
    for position, value in enumerate(values):
        plain = value.item() if getattr(value, "shape", None) == () else value  # scalars of numpy and torch
        if plain is None:
            checked.append(None)
        elif isinstance(plain, Exception):  # this one could not be judged
            checked.append(None)
            faults.append(Fault("exception", position, f"failed: {type(plain).__name__}: {plain}"))
        elif not isinstance(plain, bool | int | float):
            checked.append(None)
            faults.append(Fault("wrong_type", position, f"returned {type(value).__name__}: not a number or None"))
        elif not -sys.float_info.max <= plain <= sys.float_info.max:  # also false for NaN
            checked.append(None)
            faults.append(Fault("not_finite", position, f"returned {str(plain)[:40]}: rewards must be finite, or None"))
        else:
            checked.append(float(plain))
    return checked, faults
