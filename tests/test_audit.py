"""The audit of a recipe: counts and shares by hand, and the same words wherever it is shown."""

from __future__ import annotations

from pathlib import Path

import pytest
from metric_rows import NOW, draw, view_of
from models import tiny

from trtl_rl.cli.plain import PlainLines
from trtl_rl.flops.formulas import ModelShape
from trtl_rl.recipe.audit import audit, audit_lines
from trtl_rl.recipe.recipe import Recipe, expand

# By hand, for the tiny models of 2 layers: hidden 96, 4 heads and 2 key/value heads of 24, feed-forward 160, 61 tokens.
LAYERS = 2 * (96 * 24 * (4 + 2 + 2 + 4) + 3 * 96 * 160)
HEAD = 61 * 96


def found(recipe: str, tokens: int = 10) -> dict[str, object]:
    model = tiny("qwen3")
    Recipe.load(recipe).apply(model)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return audit(expand(model), ModelShape.from_hf_config(model.config), parameters, tokens)


def variant(tmp_path: Path, old: str, new: str) -> str:
    text = (Path(__file__).parent.parent / "trtl_rl" / "recipe" / "fp8_block.yaml").read_text()
    assert old in text
    (tmp_path / "recipe.yaml").write_text(text.replace(old, new))
    return str(tmp_path / "recipe.yaml")


def test_shares_of_parameters_and_flops_are_those_computed_by_hand() -> None:
    values = found("fp8_block", tokens=10)
    norms = 2 * (2 * 96 + 2 * 24) + 96
    assert values["fp8_parameter_share"] == LAYERS / (LAYERS + 2 * HEAD + norms)
    attention = 2 * 4 * 24 * 4 * 55  # two layers, four heads of 24, 4 FLOPs for each of 55 pairs of query and key
    total = 2 * LAYERS * 10 + attention + 2 * HEAD * 9
    assert values["fp8_flop_share"] == pytest.approx(2 * LAYERS * 10 / total, rel=1e-12)
    assert (values["linears"], values["quantised"], values["tokens"]) == (15, 14, 10)


def test_every_linear_is_in_one_group_with_its_format_or_its_reason() -> None:
    lines = audit_lines(found("fp8_block"))
    roles = "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj"
    assert lines[1:] == [
        f"quantised: 14 of {roles}: weights 128×128, fp32 scales; activations 1×128, fp32 scales",
        "excluded: lm_head: no enabled quantiser",
    ]
    assert lines[0].startswith("FP8 in 14 of 15 linears: 92.3% of the parameters, ")
    off = audit_lines(found("none"))
    assert off[0].startswith("FP8 in 0 of 15 linears: 0.0% of the parameters, 0.0% of the FLOPs")
    assert off[1:] == [f"excluded: 15 of {roles}, lm_head: no enabled quantiser"]


def test_a_linear_with_one_operand_in_fp8_counts_no_fp8_flops(tmp_path: Path) -> None:
    one = "    - quantizer_name: '*down_proj.input_quantizer'\n      enable: false\n    - quantizer_name: '*lm_head*'"
    values = found(variant(tmp_path, "    - quantizer_name: '*lm_head*'", one))
    full = found("fp8_block")
    assert values["fp8_parameter_share"] == full["fp8_parameter_share"]
    assert float(str(values["fp8_flop_share"])) < float(str(full["fp8_flop_share"]))
    assert "quantised: 2 of down_proj: weights 128×128, fp32 scales; activations bf16" in audit_lines(values)


def test_what_only_the_backward_pass_quantises_is_no_fp8_of_the_forward_pass(tmp_path: Path) -> None:
    values = found(variant(tmp_path, "fprop: fp8", "fprop: bf16"))
    assert values["quantised"] == values["fp8_flop_share"] == values["fp8_parameter_share"] == 0
    assert any(line.endswith("fprop is bf16") for line in audit_lines(values))


def test_a_run_says_it_at_its_start_and_not_over_its_steps() -> None:
    start = {"kind": "start", "model": "demo", "steps": 3, "coverage": found("fp8_block"), "time": NOW}
    view = view_of([start])
    said = [line for line in PlainLines(view).feed(start) if "FP8 in 14 of 15 linears" in line]
    assert len(said) == 1
    assert any("FP8 in 14 of 15 linears" in line for line in draw(view))
    view.apply({"kind": "step", "step": 1, "metrics": {}, "time": NOW})
    assert not any("linears" in line for line in draw(view))


def test_a_start_row_of_an_older_version_is_drawn_without_it() -> None:
    start = {"kind": "start", "coverage": {"quantised": 14, "excluded": {}}, "time": NOW}
    assert PlainLines(view_of([start])).feed(start)
