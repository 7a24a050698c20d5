"""Loads reward functions, checks that the data fits them, calls them, and checks what they return.

Functions run in this process and without a time limit: isolation in processes of their own is not there yet, so a
function that hangs stops the run, and one that calls ``os._exit`` ends it.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import importlib.util
import inspect
import math
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from trtl_rl.config_parts import RewardConfig
from trtl_rl.errors import RewardError, UserError, nearest
from trtl_rl.rewards.builtin import FACTORIES, FUNCTIONS, RewardFunction
from trtl_rl.rollout import Prompt

RESERVED = ("prompts", "completions", "completion_ids")


@dataclass(frozen=True)
class Reward:
    """One reward function.

    Attributes:
        name: Of the metric ``rewards/{name}/mean``; unique in a run.
        function: Called with keyword lists, one item per completion: ``prompts`` and ``completions`` (text),
            ``completion_ids``, and every column of the data; of these it gets what it has parameters for.
            It returns, or as ``async def`` awaits, one number or ``None`` for each completion. A reward model has a method
            ``take_flops() -> int`` beside: what it has spent since that was last called; the ledger counts it as feedback.
        weight: Factor in the total.
    """

    name: str
    function: RewardFunction
    weight: float = 1.0


@dataclass(frozen=True)
class ScoredBatch:
    """Rewards of a batch of completions.

    Attributes:
        total: Weighted sum over the functions [completions]; ``None`` where any function gave ``None``.
        components: What each function gave, before weighting [completions].
    """

    total: list[float | None]
    components: dict[str, list[float | None]]


def load_rewards(configs: Sequence[RewardConfig]) -> list[Reward]:
    """Find the functions. A name that occurs twice is numbered: ``format_match``, ``format_match_2``.

    Raises:
        UserError: there is no such function, it cannot be imported, or its arguments do not fit.
    """
    if not configs:
        raise UserError("rewards is empty: name at least one reward function.")
    rewards: list[Reward] = []
    for config in configs:
        base = config.name.rpartition(":")[2]
        name, count = base, 1
        while any(reward.name == name for reward in rewards):
            count += 1
            name = f"{base}_{count}"
        rewards.append(Reward(name, _load(config), config.weight))
    return rewards


def check_columns(rewards: Sequence[Reward], columns: Sequence[str]) -> None:
    """Check, before a model is loaded, that each function's required parameters are columns of the data.

    Raises:
        UserError: a parameter without a default is no column, or a column has a reserved name.
    """
    shown = ", ".join(columns) or "none"
    for column in columns:
        if column in RESERVED:
            raise UserError(f"The data's column '{column}' has a name that reward functions use otherwise. Rename it.")
    for reward in rewards:
        for parameter in _parameters(reward):
            if parameter.kind is parameter.POSITIONAL_ONLY:
                raise UserError(f"Reward '{reward.name}': '{parameter.name}' is positional only; rewards get keywords.")
            variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
            if variadic or parameter.default is not parameter.empty or parameter.name in (*RESERVED, *columns):
                continue
            raise UserError(
                f"Reward '{reward.name}' needs the column '{parameter.name}', which the data does not have."
                f"{nearest(parameter.name, columns)} Columns: {shown}."
            )


class RewardRunner:
    """Scores completions; any thread may call it.

    ``async def`` functions run together on one event loop in a thread of its own, so that clients which they keep
    between calls stay bound to a living loop.
    """

    def __init__(self, rewards: Sequence[Reward]) -> None:
        self.rewards = list(rewards)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        if any(inspect.iscoroutinefunction(reward.function) for reward in rewards):
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="async rewards", daemon=True)
            self._thread.start()

    def score(self, prompts: list[Prompt], texts: list[str], completion_ids: list[list[int]]) -> ScoredBatch:
        """Score completions; item ``i`` of each list belongs to completion ``i``.

        Raises:
            RewardError: a function raised, or did not return one finite number or ``None`` per completion.
        """
        assert len(prompts) == len(texts) == len(completion_ids)
        if not prompts:
            return ScoredBatch([], {reward.name: [] for reward in self.rewards})
        pending = {}
        for reward in self.rewards:
            if self._loop is not None and inspect.iscoroutinefunction(reward.function):
                call = self._await(reward, _arguments(reward, prompts, texts, completion_ids), prompts)
                pending[reward.name] = asyncio.run_coroutine_threadsafe(call, self._loop)
        results: dict[str, Any] = {}
        for reward in self.rewards:
            if reward.name in pending:
                continue
            try:
                results[reward.name] = reward.function(**_arguments(reward, prompts, texts, completion_ids))
            except Exception as error:
                raise _failure(reward, prompts, error) from error
        results.update({name: future.result() for name, future in pending.items()})
        components = {reward.name: _check(reward, results[reward.name], prompts) for reward in self.rewards}
        total: list[float | None] = []
        for i in range(len(prompts)):
            parts = [(reward.weight, components[reward.name][i]) for reward in self.rewards]
            known = [weight * value for weight, value in parts if value is not None]
            total.append(math.fsum(known) if len(known) == len(parts) else None)
        return ScoredBatch(total, components)

    def take_flops(self) -> int:
        """FLOPs that the functions have spent since the last call: of those that have a method ``take_flops() -> int``."""
        takes = (getattr(_unbound(reward.function), "take_flops", None) for reward in self.rewards)
        return sum(int(take()) for take in takes if take is not None)

    def close(self) -> None:
        """Stop the event loop. Safe to call twice."""
        if self._loop is not None and self._thread is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(2.0)
            if not self._thread.is_alive():  # else a reward blocks its loop; the thread ends with the process
                self._loop.close()
            self._loop = self._thread = None

    @staticmethod
    async def _await(reward: Reward, arguments: dict[str, Any], prompts: list[Prompt]) -> Any:
        try:
            return await reward.function(**arguments)
        except Exception as error:
            raise _failure(reward, prompts, error) from error


def _unbound(function: RewardFunction) -> RewardFunction:
    """A function without the arguments that a configuration gave it."""
    return function.func if isinstance(function, functools.partial) else function


def _arguments(
    reward: Reward, prompts: list[Prompt], texts: list[str], completion_ids: list[list[int]]
) -> dict[str, Any]:
    """Fresh lists for one call: a function that changes its lists changes no other's."""
    names = dict.fromkeys(name for prompt in prompts for name in prompt.columns)
    values: dict[str, Any] = {name: [prompt.columns.get(name) for prompt in prompts] for name in names}
    values["prompts"] = [prompt.text for prompt in prompts]
    values["completions"] = list(texts)
    values["completion_ids"] = [list(ids) for ids in completion_ids]
    parameters = _parameters(reward)
    bound = reward.function.keywords if isinstance(reward.function, functools.partial) else {}
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    taken = {parameter.name for parameter in parameters}
    return {name: value for name, value in values.items() if (takes_all or name in taken) and name not in bound}


def _check(reward: Reward, result: Any, prompts: list[Prompt]) -> list[float | None]:
    """The function's result as floats, or a RewardError that says what is wrong with it."""
    values = result.tolist() if hasattr(result, "tolist") else result  # arrays and tensors
    if not isinstance(values, list | tuple):
        kind = type(result).__name__
        raise RewardError(f"Reward '{reward.name}' returned {kind}, not a list of {len(prompts)} numbers.")
    if len(values) != len(prompts):
        raise RewardError(f"Reward '{reward.name}' returned {len(values)} values for {len(prompts)} completions.")
    checked: list[float | None] = []
    for sample, (value, prompt) in enumerate(zip(values, prompts, strict=True)):
        where = f"for sample {sample} (prompt {prompt.id})"
        plain = value.item() if getattr(value, "shape", None) == () else value  # scalars of numpy and torch
        if plain is None:
            checked.append(None)
            continue
        if not isinstance(plain, bool | int | float):
            raise RewardError(f"Reward '{reward.name}' returned {type(value).__name__} {where}, not a number or None.")
        if not -sys.float_info.max <= plain <= sys.float_info.max:  # also false for NaN
            shown = str(plain)[:40]
            raise RewardError(f"Reward '{reward.name}' returned {shown} {where}: rewards must be finite, or None.")
        checked.append(float(plain))
    return checked


def _failure(reward: Reward, prompts: list[Prompt], error: Exception) -> RewardError:
    text = "".join(traceback.format_exception(error)).rstrip()
    return RewardError(f"Reward '{reward.name}' failed on a batch that begins with prompt {prompts[0].id}:\n{text}")


def _parameters(reward: Reward) -> list[inspect.Parameter]:
    """Parameters that a call still has to fill: those given by ``arguments`` are left out."""
    bound = reward.function.keywords if isinstance(reward.function, functools.partial) else {}
    return [p for p in inspect.signature(reward.function).parameters.values() if p.name not in bound]


def _load(config: RewardConfig) -> RewardFunction:
    if config.name in FACTORIES:
        return _call_factory(config, FACTORIES[config.name])
    if config.name in FUNCTIONS:
        if config.name == "math_answer" and importlib.util.find_spec("math_verify") is None:
            raise UserError("Reward 'math_answer' needs the package math-verify: pip install 'trtl-rl[math]'.")
        function = FUNCTIONS[config.name]
    elif ":" in config.name:
        function = _import(config.name)
    else:
        known = [*FUNCTIONS, *FACTORIES]
        raise UserError(
            f"There is no built-in reward '{config.name}'.{nearest(config.name, known)} Built in: {', '.join(known)}. "
            "Your own is written file.py:function or package.module:function."
        )
    return _bind(config, function) if config.arguments else function


def _call_factory(config: RewardConfig, factory: Callable[..., RewardFunction]) -> RewardFunction:
    signature = inspect.signature(factory)
    try:
        signature.bind(**config.arguments)
    except TypeError as error:
        needed = ", ".join(signature.parameters)
        raise UserError(f"Reward '{config.name}': {error}. Its arguments are: {needed}.") from None
    return factory(**config.arguments)


def _bind(config: RewardConfig, function: RewardFunction) -> RewardFunction:
    parameters = inspect.signature(function).parameters
    named = [p.name for p in parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    for key in config.arguments:
        if key not in named or key in RESERVED:
            raise UserError(f"Reward '{config.name}' has no argument '{key}'.{nearest(key, named)}")
    return functools.partial(function, **config.arguments)


def _import(name: str) -> RewardFunction:
    place, _, attribute = name.rpartition(":")
    module = _import_file(Path(place).expanduser(), name) if place.endswith(".py") else _import_module(place, name)
    function = getattr(module, attribute, None)
    if function is None:
        functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise UserError(f"Reward '{name}': {place} defines no '{attribute}'.{nearest(attribute, functions)}")
    if not callable(function):
        raise UserError(f"Reward '{name}': '{attribute}' is {type(function).__name__}, not a function.")
    try:
        inspect.signature(function)
    except (TypeError, ValueError):
        raise UserError(f"Reward '{name}': Python cannot tell its parameters. Wrap it in a `def`.") from None
    return function  # type: ignore[no-any-return]


def _import_file(path: Path, name: str) -> ModuleType:
    if not path.is_file():
        siblings = [item.name for item in path.parent.iterdir()] if path.parent.is_dir() else []
        raise UserError(f"Reward '{name}': there is no file {path}.{nearest(path.name, siblings)}")
    _make_importable(path.resolve().parent)  # as for a script: the file may import its neighbours
    spec = importlib.util.spec_from_file_location(f"_trtl_rl_rewards_{path.stem}", path.resolve())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look modules up by name
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise _not_importable(name, error) from error
    return module


def _import_module(place: str, name: str) -> ModuleType:
    _make_importable(Path.cwd())
    try:
        return importlib.import_module(place)
    except Exception as error:
        raise _not_importable(name, error) from error


def _make_importable(directory: Path) -> None:
    if str(directory) not in sys.path:
        sys.path.append(str(directory))  # last: it hides no installed package


def _not_importable(name: str, error: Exception) -> UserError:
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1] if frames and "importlib" not in frames[-1].filename else None
    where = f" ({last.filename}, line {last.lineno})" if last else ""
    return UserError(f"Reward '{name}' cannot be imported: {type(error).__name__}: {error}{where}.")
