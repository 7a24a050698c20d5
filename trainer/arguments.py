"""What ``Trainer`` is given: names become keys of the configuration, and objects of another kind are refused with what to give."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtl_rl.config import RunConfig
from trtl_rl.errors import UserError
from trtl_rl.trainer.callbacks import Callback
from trtl_rl.trl_names import TRAINER_ARGUMENTS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    Rows = Iterable[Mapping[str, Any]]


def read_args(args: Any) -> RunConfig:
    """The configuration; the default one without ``args``."""
    if args is None:
        return RunConfig()
    if not isinstance(args, RunConfig):
        kind = "a list of rows" if isinstance(args, list) else f"of type {type(args).__name__}"
        raise UserError(f"args is {kind}, and not a configuration: give TrainerConfig(...). Rows go to train_dataset.")
    return args


def check_model(model: Any) -> None:
    """Refuse what is neither a name nor a model."""
    if model is not None and not isinstance(model, str | Path) and not hasattr(model, "save_pretrained"):
        raise UserError(
            f"model is of type {type(model).__name__}: give a model of transformers, a directory or a hub name."
        )


def read_rows(config: RunConfig, train: Any, evaluation: Any) -> tuple[RunConfig, Rows | None, Rows | None]:
    """Rows to train on and to evaluate on, or ``None`` where a name or nothing was given; names go into the configuration."""
    if isinstance(train, str | Path):
        config = config.model_copy(update={"data": str(train)})
    if isinstance(evaluation, str | Path):
        config = config.model_copy(
            update={"evaluation": config.evaluation.model_copy(update={"data": str(evaluation)})}
        )
    return config, _rows(train, "train_dataset"), _rows(evaluation, "eval_dataset")


def read_tokenizer(given: Any) -> PreTrainedTokenizerBase | None:
    """The tokenizer, loaded where it is named."""
    from trtl_rl.model.loading import load_tokenizer

    if isinstance(given, str | Path):
        return load_tokenizer(Path(given).expanduser())
    if given is not None and not hasattr(given, "apply_chat_template"):
        raise UserError(
            f"processing_class is of type {type(given).__name__}: give a tokenizer of transformers, or its name."
        )
    tokenizer: PreTrainedTokenizerBase | None = given
    return tokenizer


def read_callbacks(given: Any) -> list[Callback]:
    """The callbacks as a list."""
    found = [] if given is None else list(given) if isinstance(given, Sequence) else [given]
    for item in found:
        if not isinstance(item, Callback):
            raise UserError(
                f"callbacks holds {getattr(item, '__name__', type(item).__name__)}, which is no object of a trtl_rl.Callback: "
                "its methods are on_step, on_group, on_refit and on_checkpoint."
            )
    return found


def refuse_others(others: Mapping[str, Any]) -> None:
    """Refuse arguments of TRL's trainer that mean something; ``None`` means nothing."""
    unknown = [name for name in others if name not in TRAINER_ARGUMENTS]
    if unknown:
        raise TypeError(f"Trainer() got an unexpected keyword argument '{unknown[0]}'")
    said = [f"{name} is not taken: {TRAINER_ARGUMENTS[name]}" for name, value in others.items() if value is not None]
    if said:
        raise UserError("; ".join(said) + ".")


def _rows(given: Any, name: str) -> Rows | None:
    """Rows of an object; they are checked for their columns later."""
    if given is None or isinstance(given, str | Path):
        return None
    if isinstance(given, Mapping):  # of splits, or of columns
        keys = ", ".join(map(str, list(given)[:8]))
        splits = all(hasattr(value, "column_names") for value in given.values())
        what = (
            f"give one of its splits, such as {name}['{next(iter(given), 'train')}']"
            if splits
            else "give rows: a list of mappings, or datasets.Dataset.from_dict(...)"
        )
        raise UserError(f"{name} is a mapping with the keys {keys or 'none'}: {what}.")
    if isinstance(given, Sequence):
        wrong = next((row for row in given if not isinstance(row, Mapping)), None)
        if wrong is not None:
            raise UserError(
                f"{name} holds {type(wrong).__name__} {str(wrong)[:40]!r}: rows are mappings of column names to values."
            )
    elif not isinstance(given, Iterable):
        raise UserError(
            f"{name} is of type {type(given).__name__}: give rows, a datasets.Dataset, or the name of data."
        )
    rows: Rows = given
    return rows
