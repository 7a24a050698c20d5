"""``Recipe``: one ModelOpt YAML file, applied once to a Hugging Face model and expanded to a list of linears.

ModelOpt inserts and owns the quantisers; the bound forward (``model/bind.py``) takes its formats from those modules, so
what is switched off in the model is off in the forward, in the coverage and in the engine. ModelOpt is imported in the
trainer's process only, by this file and its neighbours: its import takes seconds, and the engine needs plain values only.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from trtl_rl.errors import UserError, nearest
from trtl_rl.recipe.coverage import Coverage, CoveredLinear
from trtl_rl.recipe.formats import HIGH_PRECISION, BlockFormat, LinearFormat

if TYPE_CHECKING:
    from torch import Tensor, nn

BACKEND = "trtl_fp8_block"
NONE = "none"
_ATTRIBUTES = {"num_bits", "type", "backend", "backend_extra_args"}  # all that the kernels act on
_ARGUMENTS = {"block", "scale", "round", "fprop", "dgrad", "wgrad", "compute"}
_OF_INPUT = ("dgrad", "wgrad", "compute")  # of the linear as a whole, so named once


@dataclass(frozen=True)
class Recipe:
    """A recipe file that was read and checked, but not yet applied.

    Attributes:
        name: As the user gave it; ``none`` is the recipe without quantisers.
        text: The YAML, kept in checkpoints.
        digest: sha256 of the parsed content: comments and order of keys do not count.
    """

    name: str
    text: str
    digest: str

    @classmethod
    def load(cls, name: str) -> Recipe:
        """Read a bundled recipe (``fp8_block``), a file, or ``none``. Light: no torch, no ModelOpt.

        Raises:
            UserError: no such recipe, or it is not YAML with ``metadata`` and ``quantize``.
        """
        if name == NONE:
            return cls.parse(name, "")
        items = sorted(files(__package__).iterdir(), key=str)
        bundled = {Path(str(item)).stem: item for item in items if str(item).endswith(".yaml")}
        if name in bundled:
            text = bundled[name].read_text()
        elif Path(name).is_file():
            text = Path(name).read_text()
        else:
            choices = [*bundled, NONE]
            raise UserError(
                f"There is no recipe '{name}': neither a file nor one of {', '.join(choices)}.{nearest(name, choices)}"
            )
        return cls.parse(name, text)

    @classmethod
    def parse(cls, name: str, text: str) -> Recipe:
        """A recipe from its YAML, checked. Raises UserError, which calls it ``name``."""
        if name == NONE:
            return cls(name, "", hashlib.sha256(b"").hexdigest())
        try:
            content = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise UserError(f"Recipe {name} is not valid YAML: {error}") from None
        if not isinstance(content, dict) or not {"metadata", "quantize"} <= content.keys():
            raise UserError(f"Recipe {name} needs the sections 'metadata' and 'quantize' of a ModelOpt recipe.")
        quantize = content["quantize"]
        entries = quantize.get("quant_cfg") if isinstance(quantize, dict) else None
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise UserError(f"Recipe {name}: 'quantize' needs 'quant_cfg', a list of entries with a 'quantizer_name'.")
        for entry in entries:
            _check_entry(name, entry)
        digest = hashlib.sha256(json.dumps(_with_text_keys(content), sort_keys=True).encode()).hexdigest()
        return cls(name, text, digest)

    def apply(self, model: nn.Module) -> None:
        """Let ModelOpt insert the recipe's quantisers into ``model``, in place. Nothing is calibrated.

        Raises:
            UserError: ModelOpt refuses the recipe.
        """
        if self.name == NONE:
            return
        import contextlib
        import io
        import tempfile
        import warnings

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import modelopt.torch.quantization as mtq
            from modelopt.recipe import load_recipe

            register_backend()
            with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file, contextlib.redirect_stdout(io.StringIO()):
                file.write(self.text)
                file.flush()
                try:
                    quantize: Any = load_recipe(file.name).quantize
                except Exception as error:
                    raise UserError(f"ModelOpt refuses recipe {self.name}: {error}") from None
                if quantize.algorithm is not None:
                    raise UserError(
                        f"Recipe {self.name} asks for calibration (algorithm: {quantize.algorithm}); block scales are "
                        "computed from each tensor. Write 'algorithm: null'."
                    )
                try:
                    mtq.quantize(model, quantize.model_dump(exclude_unset=True), forward_loop=None)
                except (ValueError, KeyError) as error:
                    raise UserError(f"ModelOpt cannot apply recipe {self.name}: {error}") from None


def register_backend() -> None:
    """Make our quantiser known to ModelOpt, which a process needs once before it quantises or restores a model with it."""
    from modelopt.torch.quantization.nn.modules.tensor_quantizer import (
        is_registered_quant_backend,
        register_quant_backend,
    )

    if not is_registered_quant_backend(BACKEND):
        register_quant_backend(BACKEND, _backend)


def expand(model: nn.Module) -> Coverage:
    """List every linear of ``model`` with the format that its quantisers ask for now.

    A linear without quantisers computes as the others do, if they all do the same (``compute``).

    Raises:
        UserError: a quantiser that our kernels cannot run; the message names the module.
    """
    from torch import nn

    linears = []
    runnable = set()
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear) or ".lora_A." in name or ".lora_B." in name:
            continue
        runnable |= {f"{name}.{kind}_quantizer" for kind in ("weight", "input")}
        name = name.removesuffix(".base_layer")  # of a linear that peft wrapped
        format = _format_of(name, module)
        reason = ""
        if not format.quantised:
            reason = "no enabled quantiser" if format == HIGH_PRECISION else "fprop is bf16"
        linears.append(CoveredLinear(name, (module.out_features, module.in_features), format, reason))
    for name, module in model.named_modules():
        if name.endswith("_quantizer") and getattr(module, "is_enabled", False) and name not in runnable:
            raise UserError(
                f"{name}: the kernels quantise weights and inputs of linears only. Exclude it in the recipe: "
                f"quantizer_name: '*{name.rpartition('.')[2]}' with enable: false."
            )
    asked = {item.format.compute for item in linears if item.format != HIGH_PRECISION}
    if asked == {"bf16"}:
        other = replace(HIGH_PRECISION, compute="bf16")
        linears = [replace(item, format=other) if item.format == HIGH_PRECISION else item for item in linears]
    return Coverage(tuple(sorted(linears, key=lambda item: item.name)))


def _format_of(name: str, module: nn.Module) -> LinearFormat:
    weight = _enabled(name, module, "weight_quantizer")
    activation = _enabled(name, module, "input_quantizer")
    if weight is None and activation is None:
        return HIGH_PRECISION
    for key in _OF_INPUT:
        if weight is not None and key in weight:
            raise UserError(f"{name}.weight_quantizer: {key} belongs to the entry of the input_quantizer.")
    fprop = {operand.get("fprop", "fp8") for operand in (weight, activation) if operand is not None}
    if len(fprop) > 1:
        raise UserError(f"{name}: fprop must be the same for the weight_quantizer and the input_quantizer.")
    extra = activation or {}
    if activation is not None and activation["block"][0] != 1:
        raise UserError(f"{name}: activation blocks must be one row high (block: [1, n]), got {activation['block']}.")
    return LinearFormat(
        _block_format(weight),
        _block_format(activation),
        fprop.pop(),
        extra.get("dgrad", "bf16"),
        extra.get("wgrad", "bf16"),
        extra.get("compute", "fp32"),
    )


def _enabled(name: str, module: nn.Module, attribute: str) -> dict[str, Any] | None:
    quantiser: Any = getattr(module, attribute, None)
    if quantiser is None or not quantiser.is_enabled:
        return None
    asked = {"backend": quantiser.backend, "num_bits": quantiser.num_bits}
    if quantiser.block_sizes:
        asked["block_sizes"] = quantiser.block_sizes
    if quantiser.backend != BACKEND or quantiser.num_bits != (4, 3) or quantiser.block_sizes:
        raise UserError(
            f"{name}.{attribute}: {', '.join(f'{key} {value!r}' for key, value in asked.items())} cannot run here: the kernels "
            f"have E4M3 codes with one FP32 scale a block. Use num_bits: e4m3 and backend: {BACKEND}, with the block in its "
            "backend_extra_args (see trtl_rl/recipe/fp8_block.yaml)."
        )
    if not quantiser._dynamic:
        raise UserError(
            f"{name}.{attribute}: type 'static' cannot run here: scales are computed from each tensor, and none is stored. "
            "Use type: dynamic."
        )
    return dict(quantiser.backend_extra_args)


def _block_format(arguments: dict[str, Any] | None) -> BlockFormat | None:
    if arguments is None:
        return None
    rows, columns = arguments["block"]
    return BlockFormat((int(rows), int(columns)), arguments["scale"], arguments.get("round", "fp32"))


def _with_text_keys(value: Any) -> Any:
    """``value`` with every key as text, so that keys can be sorted: those of ``block_sizes`` are numbers and words."""
    if isinstance(value, dict):
        return {str(key): _with_text_keys(item) for key, item in value.items()}
    return [_with_text_keys(item) for item in value] if isinstance(value, list) else value


def _check_entry(name: str, entry: dict[str, Any]) -> None:
    cfg = entry.get("cfg")
    where = f"Recipe {name}, {entry.get('quantizer_name')}"
    if isinstance(cfg, list):
        raise UserError(f"{where}: cfg is a list, but the kernels apply one quantiser to an operand. Give one.")
    if not isinstance(cfg, dict) or cfg.get("backend") != BACKEND:
        return
    for key in cfg.keys() - _ATTRIBUTES:
        raise UserError(f"{where}: '{key}' has no effect on backend {BACKEND}.{nearest(key, _ATTRIBUTES)}")
    arguments = cfg.get("backend_extra_args") or {}
    if not isinstance(arguments, dict):
        raise UserError(f"{where}: backend_extra_args must be keys and values, got {arguments!r}.")
    for key in arguments.keys() - _ARGUMENTS:
        raise UserError(f"{where}: unknown backend argument '{key}'.{nearest(key, _ARGUMENTS)}")
    block = arguments.get("block")
    if not (isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)):
        raise UserError(f"{where}: block must be two positive integers [rows, columns], got {block!r}.")
    allowed = {
        "scale": {"amax_over_448", "inverse"},
        "round": {"fp32", "pow2"},
        "fprop": {"fp8", "bf16"},
        "dgrad": {"fp8", "bf16"},
        "wgrad": {"fp8", "bf16"},
        "compute": {"fp32", "bf16"},
    }
    for key, values in allowed.items():
        if (key in arguments or key == "scale") and arguments.get(key) not in sorted(values):
            raise UserError(f"{where}: {key} must be one of {', '.join(sorted(values))}, got {arguments.get(key)!r}.")


def _backend(x: Tensor, quantiser: Any) -> Tensor:
    """What ModelOpt's own stock forward calls: the same codec, with a straight-through gradient.

    A run never comes here, since the bound forward replaces the stock one; it serves whoever calls ModelOpt's model.
    """
    from trtl_rl.recipe.codec import quantise_dequantise

    format = _block_format(quantiser.backend_extra_args)
    assert format is not None
    if quantiser.backend_extra_args.get("fprop") == "bf16":
        return x
    flat = x.detach().reshape(-1, x.shape[-1]).float()
    rounded = quantise_dequantise(flat, format).reshape(x.shape).to(x.dtype)
    return rounded + (x - x.detach())
