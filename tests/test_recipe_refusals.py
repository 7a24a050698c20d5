"""What a recipe asks for and the kernels or the model do not have is named, with the remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import models
import pytest
from demo import small
from run_files import digits, rows_of

import trtl_rl.recipe
from trtl_rl import Trainer
from trtl_rl.errors import UserError
from trtl_rl.model.bind import describe
from trtl_rl.recipe.patterns import unmatched
from trtl_rl.recipe.recipe import Recipe

BUNDLED = (Path(trtl_rl.recipe.__file__).parent / "fp8_block.yaml").read_text()
BACKEND = "type: dynamic, backend: trtl_fp8_block, backend_extra_args: {block: [1, 128], scale: inverse}"


def added(directory: Path, *lines: str) -> Recipe:
    """The bundled recipe with one more entry, given as lines of YAML."""
    file = directory / "added.yaml"
    file.write_text(BUNDLED + "    - " + "\n      ".join(lines) + "\n")
    return Recipe.load(str(file))


def applied(recipe: Recipe) -> Any:
    model = models.tiny("qwen3")
    recipe.apply(model)
    return model


# --- formats ---

FORMATS = {
    "e5m2": ("{num_bits: e5m2, " + BACKEND + "}", r"num_bits \(5, 2\) cannot run here.*Use num_bits: e4m3"),
    "int8 through our backend": ("{num_bits: 8, " + BACKEND + "}", r"num_bits 8 cannot run here.*Use num_bits: e4m3"),
    "MXFP8": (
        "{num_bits: e4m3, block_sizes: {-1: 32, type: dynamic, scale_bits: e8m0}}",
        r"backend None, .*block_sizes \{-1: 32.*cannot run here.*backend: trtl_fp8_block, with the block in its",
    ),
    "MXFP4": (
        "{num_bits: e2m1, block_sizes: {-1: 32, type: dynamic, scale_bits: e8m0}}",
        r"num_bits \(2, 1\).*cannot run here.*one FP32 scale a block",
    ),
    "NVFP4": (
        "{num_bits: e2m1, block_sizes: {-1: 16, type: dynamic, scale_bits: e4m3}}",
        r"num_bits \(2, 1\).*cannot run here",
    ),
    "ModelOpt's own static blocks": (
        "{num_bits: e4m3, block_sizes: {-1: 128, -2: 128}}",
        r"backend None, .*cannot run here.*backend: trtl_fp8_block",
    ),
    "one scale a tensor": ("{num_bits: e4m3}", r"backend None, .*cannot run here"),
    "a static type": (
        "{num_bits: e4m3, " + BACKEND.replace("dynamic", "static") + "}",
        r"type 'static'.*type: dynamic",
    ),
    "no type, which is static": (
        "{num_bits: e4m3, " + BACKEND.partition(", ")[2] + "}",
        r"type 'static'.*type: dynamic",
    ),
    "activation blocks of several rows": (
        "{num_bits: e4m3, " + BACKEND.replace("[1, 128]", "[2, 128]") + "}",
        r"one row high \(block: \[1, n\]\)",
    ),
}


@pytest.mark.parametrize("case", FORMATS)
def test_a_format_that_the_kernels_do_not_have_is_refused_with_module_and_remedy(case: str, tmp_path: Path) -> None:
    cfg, said = FORMATS[case]
    model = applied(added(tmp_path, "quantizer_name: '*.1.mlp.down_proj.input_quantizer'", f"cfg: {cfg}"))
    with pytest.raises(UserError, match=rf"^model\.layers\.1\.mlp\.down_proj(\.input_quantizer)?: .*{said}"):
        describe(model)


@pytest.mark.parametrize("kind", ["output_quantizer", "k_bmm_quantizer", "p_bmm_quantizer"])
def test_a_quantiser_of_something_else_than_a_linears_operand_is_refused(kind: str, tmp_path: Path) -> None:
    model = applied(added(tmp_path, f"quantizer_name: '*.1.*{kind}'", "cfg: {num_bits: e4m3, " + BACKEND + "}"))
    with pytest.raises(
        UserError, match=rf"^model\.layers\.1\..*{kind}: .*quantizer_name: '\*{kind}' with enable: false"
    ):
        describe(model)


# --- patterns that match nothing ---

PATTERNS = {
    "*.mlp.gate": "*.mlp.gate_proj.*",
    "gate_proj": "*gate_proj.*",
    "*.mlp.gate_proj": "*.mlp.gate_proj.*",
    "*lmhead*": "*lm_head*",
    "*.self_atn.q_proj.*": "*.self_attn.q_proj.*",
    "*.layers.*.mlp.gat_proj.*": "*.layers.*.mlp.gate_proj.*",
    "*input_quantiser": "*input_quantizer",
    "*.experts.*xyzzy*": None,
    "*.[xyz]_proj.*": None,
}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_that_matches_nothing_is_named_with_the_nearest_that_does(pattern: str, tmp_path: Path) -> None:
    recipe = added(tmp_path, f"quantizer_name: '{pattern}'", "enable: false")
    (line,) = unmatched(recipe, applied(recipe))
    assert f"quantizer_name '{pattern}' matches no quantiser of the model" in line
    proposed = PATTERNS[pattern]
    assert line.endswith(f"Did you mean '{proposed}'?") if proposed else "Did you mean" not in line
    if proposed:
        recipe = added(tmp_path, f"quantizer_name: '{proposed}'", "enable: false")
        assert unmatched(recipe, applied(recipe)) == []


@pytest.mark.parametrize("family", models.FAMILIES)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_the_bundled_recipe_has_no_entry_that_matches_nothing(family: str, tied: bool) -> None:
    recipe, model = Recipe.load("fp8_block"), models.tiny(family, tied=tied)
    recipe.apply(model)
    assert unmatched(recipe, model) == []
    assert unmatched(Recipe.load("none"), model) == []


def test_a_parent_class_that_holds_no_such_quantiser_is_named(tmp_path: Path) -> None:
    recipe = added(tmp_path, "parent_class: nn.Conv2d", "quantizer_name: '*.down_proj.*'", "enable: false")
    (line,) = unmatched(recipe, applied(recipe))
    assert "'*.down_proj.*' with parent_class 'nn.Conv2d' matches no quantiser" in line
    with pytest.raises(UserError, match=r"cannot apply recipe .*parent_class 'nn.Linaer' not found"):
        applied(added(tmp_path, "parent_class: nn.Linaer", "quantizer_name: '*'", "enable: false"))


def test_a_run_warns_of_a_pattern_that_matches_nothing(tmp_path: Path) -> None:
    added(tmp_path, "quantizer_name: '*.mlp.gate'", "enable: false")
    config = small(tmp_path / "run", steps=1, recipe=str(tmp_path / "added.yaml"))
    Trainer(reward_funcs=digits, args=config).train()
    warnings = [row["text"] for row in rows_of(tmp_path / "run", "message") if row["level"] == "warning"]
    assert sum("'*.mlp.gate' matches no quantiser" in text for text in warnings) == 1
    (start,) = rows_of(tmp_path / "run", "start")
    assert start["coverage"]["quantised"] == 14
