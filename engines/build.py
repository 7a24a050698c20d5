"""Build an engine directory: quantise a checkpoint once, as the trainer would, and compile its operators.

The codes are those of the trainer's version 0: the same ModelOpt recipe is applied to the same model, and the same
function quantises. Nothing is calibrated.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from trtl_rl.disk import sync, sync_tree
from trtl_rl.engines.directory import INDEX, LLM_ARGUMENTS, MANIFEST, EngineDirectory, FileEntry, Progress
from trtl_rl.errors import UserError
from trtl_rl.flops.formulas import ModelShape
from trtl_rl.model.architectures import check_architecture
from trtl_rl.model.source import ModelSource, file_digest, weights_digest
from trtl_rl.recipe.recipe import NONE, Recipe
from trtl_rl.refit.validate import BlockScaleContract, Gpu
from trtl_rl.versions import versions

if TYPE_CHECKING:
    from torch import Tensor

    from trtl_rl.model.description import DecoderDescription

SHARD_BYTES = 4 * 2**30
_PACKAGE_BYTES = 2 * 2**20  # of one compiled unit, about
_OS_ERROR = re.compile(r"\(os error (\d+)\)")
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
    "tokenizer.model", "chat_template.jinja", "chat_template.json",
)  # fmt: skip


@dataclass(frozen=True)
class Serving:
    """For which machine an engine directory of TensorRT-LLM is checked: ranks that share the model, and kind of GPU."""

    tensor_parallel: int = 1
    gpu: Gpu = "hopper"


def build_engine(
    source: ModelSource,
    recipe: Recipe,
    output: Path,
    *,
    max_context: int | None = None,
    compiled: bool = True,
    serving: Serving | None = None,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress | None = None,
) -> EngineDirectory:
    """Write ``output``. It appears whole or not at all: everything is written beside it, synced and renamed.

    Args:
        serving: For TensorRT-LLM, and how; None: for the embedded engine, which runs the others too.
        max_context: Longest prompt plus answer; by default what the checkpoint was made for.
        compiled: Also put operators compiled for this model into it.
        progress: Called with a text, how much is done, and the total.

    Raises:
        UserError: ``output`` exists or cannot be made, there is no room for it, the model is not supported or holds NaN or
            infinite weights.
    """
    progress = progress or (lambda text, done, total: None)
    output = _place(output)
    context = _checked(source, recipe, output, max_context, serving)
    with _beside(output) as partial:
        return _build(source, recipe, output, partial, context, compiled, serving, shard_bytes, progress)


def _build(
    source: ModelSource,
    recipe: Recipe,
    output: Path,
    partial: Path,
    context: int,
    compiled: bool,
    serving: Serving | None,
    shard_bytes: int,
    progress: Progress,
) -> EngineDirectory:
    """Write everything into ``partial``, engine.json last."""
    progress("loading the model", 0, 1)
    from trtl_rl.kernels.kernel_set import KernelSet
    from trtl_rl.model.bind import describe, quantise_parameters
    from trtl_rl.model.loading import load_tokenizer, read_model, stop_ids
    from trtl_rl.refit.manifest import Manifest

    tokenizer = load_tokenizer(source.path)
    model = read_model(source.path)
    recipe.apply(model)
    description = describe(model)
    quantised = quantization_config(description)
    stops = stop_ids(source.path, model, tokenizer)
    progress("loading the model", 1, 1)
    progress("quantising", 0, 1)
    try:
        tensors = quantise_parameters(dict(model.named_parameters()), description)
    except FloatingPointError as error:
        raise UserError(f"{source.name}: {error}") from None
    if serving is not None:
        BlockScaleContract(description, serving.tensor_parallel, serving.gpu).check(tensors)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    del model
    progress("quantising", 1, 1)
    kernels = KernelSet(compiled, progress=progress)
    kernels.prepare([description.layer_spec(i) for i in range(description.layers)], description.head_spec())
    _write_shards(tensors, partial, shard_bytes, progress)
    _write_configuration(source, partial, quantised, stops)
    if serving is not None:
        _write_serving(partial, quantised, serving.tensor_parallel, context)
    kernels.copy_packages(partial / "kernels")
    files = _checksums(partial, progress)
    directory = EngineDirectory(
        path=output,
        model=str(source.path.resolve()) if Path(source.name).is_dir() else source.name,
        architecture=source.config["architectures"][0],
        source_digest=weights_digest(source.path),
        parameters=parameters,
        recipe={"name": recipe.name, "digest": recipe.digest, "text": recipe.text},
        description=description,
        weights_digest=Manifest.of(tensors, 0, "").digest,
        kernels={"identity": kernels.identity, "compiled": compiled, "description": kernels.description},
        backend="torch" if serving is None else "tensorrt-llm",
        serving={} if serving is None else asdict(serving),
        max_context=context,
        stop_ids=stops,
        versions=versions(),
        files=files,
    )
    _write(partial / MANIFEST, directory.to_json())
    sync_tree(partial)
    return directory


def _place(output: Path) -> Path:
    """Where the engine will be: links followed. Raises UserError for what another directory cannot take the place of."""
    try:
        place = output.expanduser().resolve()
    except (OSError, RuntimeError) as error:  # links that go round in a circle
        raise UserError(f"--output {output} leads nowhere: {error}.") from None
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise UserError(f"{output} exists and is not an empty directory: name another --output, or remove it first.")
    if place.is_mount() or Path.cwd().is_relative_to(place):
        raise UserError(
            f"--output {output} is in use as a directory: name one that is to be made in it, such as {output}/engine."
        )
    return place


def _checked(
    source: ModelSource, recipe: Recipe, output: Path, max_context: int | None, serving: Serving | None
) -> int:
    """Refuse what would fail later, before weights are read; returns the context."""
    check_architecture(SimpleNamespace(**source.config))
    if serving is not None:
        from accelerate import init_empty_weights

        from trtl_rl.model.bind import describe
        from trtl_rl.model.loading import empty_model

        with init_empty_weights():  # sizes are enough
            model = empty_model(source.config)
        recipe.apply(model)
        BlockScaleContract(describe(model), serving.tensor_parallel, serving.gpu).check_model()
    if max_context is not None and max_context > source.context:
        raise UserError(
            f"--max-context {max_context} is more than the {source.context} tokens that {source.name} was made for."
        )
    shape = ModelShape.from_hf_config(SimpleNamespace(**source.config))
    heads = 1 if source.config.get("tie_word_embeddings") else 2
    need = shape.linear_parameters * (2 if recipe.name == NONE else 1) + 2 * heads * shape.head_parameters
    place = next(path for path in output.absolute().parents if path.exists())
    free = shutil.disk_usage(place).free
    if free < need + 16 * _PACKAGE_BYTES:
        raise UserError(
            f"{place} has {free / 2**30:.1f} GiB free, the engine needs about {need / 2**30:.1f} GiB: choose an --output "
            "with more room."
        )
    return max_context or source.context


@contextlib.contextmanager
def _beside(output: Path) -> Iterator[Path]:
    """A directory beside ``output`` that takes its place when the block ends well, and vanishes when it does not."""
    from safetensors import SafetensorError

    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(".partial", f"{output.name}.", output.parent))
    except OSError as error:
        raise UserError(f"No directory can be made in {output.parent}: {error.strerror}.") from None
    try:
        partial.chmod(0o755)
        yield partial
        os.replace(partial, output)
        sync(output.parent)
    except (OSError, SafetensorError) as error:
        # safetensors has no errno: "... No space left on device (os error 28)"
        number = error.errno if isinstance(error, OSError) else int((*_OS_ERROR.findall(str(error)), "0")[0])
        if number in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(f"There was no room left for {output}: nothing was kept of it.") from None
        if number in (errno.ENOTEMPTY, errno.EEXIST):
            raise UserError(f"{output} was made by somebody else meanwhile: it was left as it is.") from None
        raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_shards(tensors: dict[str, Tensor], directory: Path, size: int, progress: Progress) -> None:
    """Safetensors shards of at most ``size`` bytes, and their index."""
    from safetensors.torch import save_file

    from trtl_rl.refit.manifest import buckets

    shards = [dict(bucket.tensors) for bucket in buckets(tensors, size)]
    placed = {}
    for number, shard in enumerate(shards, 1):
        progress("writing weights", number - 1, len(shards))
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        # An embedding that is also the head would be stored twice; contiguous copies share nothing.
        save_file({key: tensor.contiguous() for key, tensor in shard.items()}, directory / name, {"format": "pt"})
        (directory / name).chmod(0o644)  # as the other files; safetensors lets only the owner read
        placed.update(dict.fromkeys(shard, name))
    progress("writing weights", len(shards), len(shards))
    total = sum(tensor.nbytes for tensor in tensors.values())
    _write(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": placed})


def _write_configuration(
    source: ModelSource, directory: Path, quantised: dict[str, Any] | None, stops: list[int]
) -> None:
    """config.json with its quantisation, generation_config.json and the tokenizer's files."""
    config: dict[str, Any] = {key: value for key, value in source.config.items() if key != "torch_dtype"}
    config["dtype"] = "bfloat16"  # of what is not quantised
    if quantised is not None:
        config["quantization_config"] = quantised
    _write(directory / "config.json", config)
    generation = source.path / "generation_config.json"
    values = json.loads(generation.read_text()) if generation.is_file() else {}
    _write(directory / "generation_config.json", {**values, "eos_token_id": stops})
    copy_tokenizer(source, directory)


def copy_tokenizer(source: ModelSource, directory: Path) -> None:
    """Copy the files of a checkpoint's tokenizer."""
    for name in _TOKENIZER_FILES:
        if (source.path / name).is_file():
            shutil.copyfile(source.path / name, directory / name)


def _write_serving(directory: Path, quantised: dict[str, Any] | None, tensor_parallel: int, context: int) -> None:
    """What TensorRT-LLM starts with; and the quantisation once more, as ModelOpt's checkpoints say it."""
    import yaml

    from trtl_rl.engines.tensorrt_llm.arguments import directory_arguments

    text = yaml.safe_dump(directory_arguments(tensor_parallel=tensor_parallel, max_context=context), sort_keys=False)
    (directory / LLM_ARGUMENTS).write_text(text)
    if quantised is not None:
        quantisation = {
            "quant_algo": "FP8_BLOCK_SCALES",
            "kv_cache_quant_algo": None,
            "group_size": quantised["weight_block_size"][0],
            "exclude_modules": quantised["modules_to_not_convert"],
        }
        _write(directory / "hf_quant_config.json", {"producer": {"name": "trtl-rl"}, "quantization": quantisation})


def quantization_config(description: DecoderDescription) -> dict[str, Any] | None:
    """``quantization_config`` as transformers and vLLM read it from FP8 block-scale checkpoints; None without FP8 weights.

    Those know the activation schemes ``dynamic`` and ``static``. Where activations stay in high precision this says ``none``
    (or ``mixed``: in some linears), which they refuse: better than another precision than the recipe's.

    Raises:
        UserError: the recipe has weights in blocks of several sizes, for which such checkpoints have no words.
    """
    linears = description.coverage.linears
    quantised = [item.format for item in linears if item.format.forward_weight is not None]
    formats = {format.forward_weight for format in quantised if format.forward_weight is not None}
    activations = {format.forward_activation is not None for format in quantised}
    scheme = "mixed" if len(activations) > 1 else "dynamic" if True in activations else "none"
    if not formats:
        return None
    if len(formats) > 1:
        raise UserError("The recipe quantises weights in several block formats; an FP8 block-scale checkpoint has one.")
    (format,) = formats
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": scheme,
        "weight_block_size": list(format.block),
        **({"scale_fmt": "ue8m0"} if format.round == "pow2" else {}),
        "modules_to_not_convert": [item.name for item in linears if item.format.forward_weight is None],
    }


def _checksums(directory: Path, progress: Progress) -> dict[str, FileEntry]:
    """Size and hash of each file."""
    paths = sorted(path for path in directory.rglob("*") if path.is_file())
    entries = {}
    for done, path in enumerate(paths, 1):
        entries[path.relative_to(directory).as_posix()] = FileEntry(path.stat().st_size, file_digest(path))
        progress("checksums", done, len(paths))
    return entries


def _write(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=1) + "\n")
