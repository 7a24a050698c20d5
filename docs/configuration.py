"""The page of all configuration keys, from the models: ``python docs/configuration.py > docs/configuration.md``."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from typing import Any

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from trtl_rl.config import RunConfig
from trtl_rl.config_parts import Part
from trtl_rl.trl_names import ALREADY_SO, LOSSES, REFUSED, RENAMED, SAID, SCHEDULES

HEAD = """# Configuration

Every key of a run, its values and its default. A configuration is a YAML file, and `key=value` on the command line goes before
it; from Python, `TrainerConfig` takes the same keys. An unknown key is an error that names the nearest one.

This page is generated from the models that check a configuration.
"""

TRL = """
## Names of TRL

`TrainerConfig` also takes TRL's names, so that a script for `GRPOTrainer` ports by changing two names. The run says what was
mapped.

| TRL | here |
|---|---|
"""


def reference() -> str:
    """The page, as Markdown."""
    lines = [HEAD, *_section("The run", RunConfig, "")]
    for name, field in RunConfig.model_fields.items():
        part = _part(field.annotation)
        if part is not None:
            lines += _section(f"{name}", part, f"{name}[]." if _is_list(field) else f"{name}.")
    lines.append(TRL + "\n".join(_trl()))
    return "\n".join(lines) + "\n"


def _section(title: str, model: type[Part], prefix: str) -> list[str]:
    lines = [f"\n## {title}\n", (model.__doc__ or "").strip() + "\n"]
    rows = []
    for name, field in model.model_fields.items():
        if _part(field.annotation) is None:
            rows.append(
                f"| `{prefix}{name}` | {_values(field)} | {_default(field)} | {_cell(field.description or '')} |"
            )
    return [*lines, "| key | values | default | |", "|---|---|---|---|", *rows] if rows else lines


def _part(annotation: Any) -> type[Part] | None:
    """The model behind a key that has keys of its own, or a list of such."""
    for item in (annotation, *typing.get_args(annotation)):
        if isinstance(item, type) and issubclass(item, Part):
            return item
    return None


def _is_list(field: FieldInfo) -> bool:
    return typing.get_origin(field.annotation) is list


def _values(field: FieldInfo) -> str:
    text = _type(field.annotation)
    limits = [_limit(item) for item in [*field.metadata, *_metadata(field.annotation)]]
    return _cell(", ".join([text, *filter(None, limits)]))


def _metadata(annotation: Any) -> Iterator[Any]:
    """Limits inside of ``Annotated``, optional ones included."""
    for item in (annotation, *typing.get_args(annotation)):
        for data in getattr(item, "__metadata__", ()):
            yield from getattr(data, "metadata", [data])


def _limit(item: Any) -> str:
    for name, sign in (("gt", ">"), ("ge", "≥"), ("lt", "<"), ("le", "≤")):
        value = getattr(item, name, None)
        if value is not None:
            return f"{sign} {value:g}"
    return ""


def _type(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _type(arguments[0])
    if origin is typing.Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type(item) for item in arguments if item is not type(None))
    if origin is tuple:
        return "[" + ", ".join(_type(item) for item in arguments if item is not ...) + "]"
    if origin is list:
        return f"list of {_type(arguments[0])}"
    if origin is dict:
        return "mapping"
    return {int: "integer", float: "number", str: "text", bool: "`true` or `false`"}.get(annotation, str(annotation))


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "required"
    if value is None:
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{list(value) if isinstance(value, tuple) else value}`"


def _trl() -> Iterator[str]:
    for name, key in RENAMED.items():
        yield f"| `{name}` | `{key}` |"
    completions = "`per_device_train_batch_size` × `gradient_accumulation_steps`, or `generation_batch_size`"
    yield f"| {completions} | `batch.prompts` × `batch.group_size` |"
    yield f"| `lr_scheduler_type` | `optimizer.schedule`: {', '.join(f'{a} → {b}' for a, b in SCHEDULES.items())} |"
    yield f"| `loss_type` | `loss.name`: {', '.join(LOSSES)}; left out: `asympo` |"
    yield "| `epsilon` | `loss.clip`, with `loss_type` |"
    yield "| `adam_beta1`, `adam_beta2` | `optimizer.betas` |"
    yield "| `warmup_ratio` | `optimizer.warmup_steps`, once the steps are known |"
    yield "| `report_to` | `trackers` |"
    yield "| `use_cpu` | `device` |"
    yield "| `reward_weights` | weights of `reward_funcs` |"
    for name, (values, reason) in ALREADY_SO.items():
        yield f"| `{name}` | only {' or '.join(f'`{value}`' for value in values)}: {reason} |"
    for name, text in SAID.items():
        yield f"| `{name}` | no effect: {text} |"
    for name, reason in REFUSED.items():
        yield f"| `{name}` | refused: {reason} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    print(reference(), end="")
