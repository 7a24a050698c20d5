"""Finds reward functions by name, and checks before a model is loaded that they fit the data and can travel."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from trtl_rl.config_data import RewardConfig
from trtl_rl.errors import UserError, nearest
from trtl_rl.rewards.builtin import BUILT_IN, IN_PROCESS, NEEDED_PACKAGES
from trtl_rl.rewards.reward import RESERVED, Reward, RewardFunction, is_async, parameters


class InWorker:
    """Stands for a class that is made into an object in the worker process only: it may load much."""

    def __init__(self, kind: type) -> None:
        self.kind = kind
        function = kind.__call__
        self.__name__ = kind.__name__
        items = list(inspect.signature(function).parameters.values())[1:]  # without self
        self.__signature__ = inspect.Signature(items)
        self.asynchronous = inspect.iscoroutinefunction(function)
        if hasattr(kind, "take_flops"):
            self.take_flops = (
                kind.take_flops
            )  # it spends FLOPs: a RACE's plan should say that it does not know how many

    def __call__(self, **columns: Any) -> Any:
        raise AssertionError(f"{self.__name__} is called in its worker process only")


def load_rewards(configs: Sequence[RewardConfig]) -> list[Reward]:
    """Find the functions. A name that occurs twice is numbered: ``format_match``, ``format_match_2``.

    Raises:
        UserError: there is no such function, it cannot be imported, or its arguments do not fit.
    """
    if not configs:
        raise UserError("rewards is empty: name at least one reward function.")
    rewards: list[Reward] = []
    for config in configs:
        in_process = config.in_process if config.in_process is not None else config.name in IN_PROCESS
        reward = Reward(
            _unique(config.name.rpartition(":")[2], rewards),
            load_function(config, make=in_process),
            config.weight,
            in_process=in_process,
            timeout=config.timeout,
            workers=config.workers,
            on_error=config.on_error,
            error_value=config.error_value or 0.0,
            config=config,
        )
        _check_place(reward)
        rewards.append(reward)
    return rewards


def given_rewards(functions: Iterable[RewardFunction | Reward | str]) -> list[Reward]:
    """Rewards from Python: functions, :class:`Reward` objects with settings, names as in the configuration, or, as in TRL,
    names of sequence-classification models on the hub (``owner/model``).

    Raises:
        UserError: there are none, one is nothing that can be called, or it cannot travel to a worker process.
    """
    rewards: list[Reward] = []
    for item in functions:
        if isinstance(item, str):
            reward = load_rewards([_config_of(item)])[0]
        elif isinstance(item, Reward):
            reward = item
        elif callable(item):
            reward = Reward(str(getattr(item, "__name__", type(item).__name__)), item)
        else:
            raise UserError(
                f"reward_funcs holds {type(item).__name__} {str(item)[:40]!r}: give functions or their names."
            )
        reward = replace(reward, name=_unique(reward.name, rewards), in_process=bool(reward.in_process))
        _check_place(reward)
        pickled(reward)
        rewards.append(reward)
    if not rewards:
        raise UserError("reward_funcs is empty: give at least one reward function.")
    return rewards


def pickled(reward: Reward) -> bytes | None:
    """The function as its worker process gets it; ``None`` where it needs none.

    Raises:
        UserError: it cannot be pickled.
    """
    if reward.in_process or reward.config is not None:
        return None
    import cloudpickle

    try:
        return bytes(cloudpickle.dumps(reward.function))
    except Exception as error:  # whatever the objects that a function refers to may raise
        raise UserError(
            f"Reward '{reward.name}' runs in a process of its own, and cannot be pickled for it: {type(error).__name__}: "
            f"{error}. Make what it refers to (a client, a lock, an open file, a model) inside the function or in the "
            "__init__ of a class in a file, named file.py:Class; or run it in the trainer's process, without a time limit: "
            f"reward_funcs=Reward('{reward.name}', function, in_process=True), from trtl_rl.rewards.reward import Reward."
        ) from None


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
        for parameter in parameters(reward.function):
            if parameter.kind is parameter.POSITIONAL_ONLY:
                raise UserError(f"Reward '{reward.name}': '{parameter.name}' is positional only; rewards get keywords.")
            variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
            if variadic or parameter.default is not parameter.empty or parameter.name in (*RESERVED, *columns):
                continue
            raise UserError(
                f"Reward '{reward.name}' needs the column '{parameter.name}', which the data does not have."
                f"{nearest(parameter.name, columns)} Columns: {shown}. Another name is mapped with task.columns, for "
                f"example task.columns.{parameter.name}={columns[-1] if columns else 'COLUMN'}."
            )


def load_function(config: RewardConfig, make: bool = True) -> RewardFunction:
    """The function that ``config`` names, with its arguments.

    Args:
        make: Also make the object of a user's class; built-in ones are light, and always made.

    Raises:
        UserError: as ``load_rewards``.
    """
    if config.name in BUILT_IN:
        for package, extra in NEEDED_PACKAGES.get(config.name, {}).items():
            if importlib.util.find_spec(package) is None:
                raise UserError(
                    f"Reward '{config.name}' needs the package {package.replace('_', '-')}: pip install 'trtl-rl[{extra}]'."
                )
        found = BUILT_IN[config.name]
        found = found if callable(found) else _attribute(*found)
        return _make(config, found) if isinstance(found, type) else _bind(config, found)
    if ":" not in config.name:
        raise UserError(
            f"There is no built-in reward '{config.name}'.{nearest(config.name, BUILT_IN)} Built in: {', '.join(BUILT_IN)}. "
            "Your own is written file.py:function or package.module:function."
        )
    found = import_named(config.name, f"Reward '{config.name}'")
    if not isinstance(found, type):
        return _bind(config, found)
    if not callable(getattr(found, "__call__", None)) or found.__call__ is type.__call__:  # noqa: B004
        raise UserError(f"Reward '{config.name}': the class has no method __call__.")
    _check_arguments(config, found)
    return _make(config, found) if make else InWorker(found)


def _config_of(name: str) -> RewardConfig:
    if "/" in name and ":" not in name:
        return RewardConfig(name="reward_model", arguments={"model": name})
    return RewardConfig(name=name)


def _unique(base: str, rewards: Sequence[Reward]) -> str:
    name, count = base, 1
    while any(reward.name == name for reward in rewards):
        count += 1
        name = f"{base}_{count}"
    return name


def _check_place(reward: Reward) -> None:
    """Refuse settings that cannot act where the reward runs."""
    if not reward.in_process:
        return
    if reward.timeout is not None and not is_async(reward.function):
        raise UserError(
            f"Reward '{reward.name}': timeout cannot end a function in the trainer's process. Leave in_process or timeout out."
        )
    if reward.workers > 1:
        raise UserError(f"Reward '{reward.name}': workers={reward.workers} needs in_process=false.")


def _attribute(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def _make(config: RewardConfig, kind: Callable[..., Any]) -> RewardFunction:
    _check_arguments(config, kind)
    made: RewardFunction = kind(**config.arguments)
    return made


def _check_arguments(config: RewardConfig, kind: Callable[..., Any]) -> None:
    signature = inspect.signature(kind)
    try:
        signature.bind(**config.arguments)
    except TypeError as error:
        needed = ", ".join(signature.parameters)
        raise UserError(f"Reward '{config.name}': {error}. Its arguments are: {needed}.") from None


def _bind(config: RewardConfig, function: RewardFunction) -> RewardFunction:
    items = inspect.signature(function).parameters
    named = [p.name for p in items.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    for key in config.arguments:
        if key not in named or key in RESERVED:
            raise UserError(f"Reward '{config.name}' has no argument '{key}'.{nearest(key, named)}")
    return functools.partial(function, **config.arguments) if config.arguments else function


def import_named(name: str, what: str) -> Any:
    """What ``file.py:function`` or ``package.module:function`` names; ``what`` begins the messages of UserError."""
    place, _, attribute = name.rpartition(":")
    module = _import_file(Path(place).expanduser(), what) if place.endswith(".py") else _import_module(place, what)
    function = getattr(module, attribute, None)
    if function is None:
        functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise UserError(f"{what}: {place} defines no '{attribute}'.{nearest(attribute, functions)}")
    if not callable(function):
        raise UserError(f"{what}: '{attribute}' is {type(function).__name__}, not a function.")
    try:
        inspect.signature(function)
    except (TypeError, ValueError):
        raise UserError(f"{what}: Python cannot tell its parameters. Wrap it in a `def`.") from None
    return function


def _import_file(path: Path, what: str) -> ModuleType:
    if not path.is_file():
        siblings = [item.name for item in path.parent.iterdir()] if path.parent.is_dir() else []
        raise UserError(f"{what}: there is no file {path}.{nearest(path.name, siblings)}")
    _make_importable(path.resolve().parent)  # as for a script: the file may import its neighbours
    spec = importlib.util.spec_from_file_location(f"_trtl_rl_rewards_{path.stem}", path.resolve())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look modules up by name
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise _not_importable(what, error) from error
    return module


def _import_module(place: str, what: str) -> ModuleType:
    _make_importable(Path.cwd())
    try:
        return importlib.import_module(place)
    except Exception as error:
        raise _not_importable(what, error) from error


def _make_importable(directory: Path) -> None:
    if str(directory) not in sys.path:
        sys.path.append(str(directory))  # last: it hides no installed package


def _not_importable(what: str, error: Exception) -> UserError:
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1] if frames and "importlib" not in frames[-1].filename else None
    where = f" ({last.filename}, line {last.lineno})" if last else ""
    return UserError(f"{what} cannot be imported: {type(error).__name__}: {error}{where}.")
