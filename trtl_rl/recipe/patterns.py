"""Entries of a recipe that match nothing in a model: often a misspelt name, so that a module runs in another precision."""

from __future__ import annotations

import fnmatch
import re
from typing import TYPE_CHECKING, Any

import yaml

from trtl_rl.errors import closest
from trtl_rl.recipe.recipe import NONE, Recipe

if TYPE_CHECKING:
    from torch import nn


def unmatched(recipe: Recipe, model: nn.Module) -> list[str]:
    """One sentence for each entry of ``recipe`` that matches no quantiser of ``model``, which has the recipe's quantisers.

    Patterns are matched as ModelOpt does: whole names of quantisers (``model.layers.0.mlp.up_proj.weight_quantizer``), so
    ``*.mlp.up_proj`` matches nothing and ``*.mlp.up_proj.*`` does.
    """
    if recipe.name == NONE:
        return []
    from modelopt.torch.quantization.nn import QuantModuleRegistry, SequentialQuantizer, TensorQuantizer

    quantisers = [
        name for name, module in model.named_modules() if isinstance(module, TensorQuantizer | SequentialQuantizer)
    ]
    lines = []
    for entry in yaml.safe_load(recipe.text)["quantize"]["quant_cfg"]:
        pattern, parent = str(entry.get("quantizer_name")), entry.get("parent_class")
        matching = fnmatch.filter(quantisers, pattern)
        if not matching:
            lines.append(
                f"Recipe {recipe.name}: quantizer_name '{pattern}' matches no quantiser of the model, so that entry does "
                f"nothing.{_suggestion(pattern, quantisers)}"
            )
        elif parent and not any(_belongs(model, name, QuantModuleRegistry[parent]) for name in matching):
            lines.append(
                f"Recipe {recipe.name}: quantizer_name '{pattern}' with parent_class '{parent}' matches no quantiser of the "
                f"model, so that entry does nothing; without parent_class it matches {len(matching)}."
            )
    return lines


def _belongs(model: nn.Module, quantiser: str, parent: Any) -> bool:
    return isinstance(model.get_submodule(quantiser.rpartition(".")[0]), parent)


def _suggestion(pattern: str, quantisers: list[str]) -> str:
    """The pattern with the part that occurs nowhere replaced by the nearest of the names, and made to match whole names."""
    literals = [part.strip(".") for part in re.split(r"[*?]|\[[^]]*\]", pattern) if part.strip(".")]
    if not literals:
        return ""
    literal = next((part for part in literals if not fnmatch.filter(quantisers, f"*{part}*")), literals[-1])
    count = literal.count(".") + 1
    parts = [name.split(".") for name in quantisers]
    choices = {".".join(words[i : i + count]) for words in parts for i in range(len(words) - count + 1)}
    near = literal if literal in choices else closest(literal, sorted(choices))
    if near is None:
        return ""
    candidate = pattern.replace(literal, near)
    for proposed in (candidate, f"{candidate}.*", f"*{candidate}", f"*{candidate}.*"):
        if fnmatch.filter(quantisers, proposed):
            return f" Did you mean '{proposed}'?"
    return ""
