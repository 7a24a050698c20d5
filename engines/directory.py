"""An engine directory: what ``trtl-rl build-engine`` writes, read and checked.

::

    engine.json                     what this is: recipe, linears, digests, limits, checksums of all other files
    config.json, generation_config.json, tokenizer files
    model-0000i-of-0000n.safetensors, model.safetensors.index.json     the FP8 block-scale checkpoint
    kernels/IDENTITY/*.pt2          operators compiled for this model (absent with --no-compile)
    llm_args.yaml, hf_quant_config.json     for TensorRT-LLM (built with --backend tensorrt-llm)
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import xxhash

from trtl_rl.errors import UserError
from trtl_rl.model.architectures import ARCHITECTURES
from trtl_rl.model.description import DecoderDescription
from trtl_rl.model.source import file_digest

if TYPE_CHECKING:
    from torch import Tensor

    from trtl_rl.refit.manifest import RefitResult
    from trtl_rl.refit.sender import RefitTarget
    from trtl_rl.refit.validate import BlockScaleContract

FORMAT = 2
MANIFEST = "engine.json"
LLM_ARGUMENTS = "llm_args.yaml"
INDEX = "model.safetensors.index.json"
_BUCKET_BYTES = 64 * 2**20

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class FileEntry:
    """Size in bytes and hash of a file."""

    size: int
    digest: str


@dataclass(frozen=True)
class EngineDirectory:
    """The content of ``engine.json``.

    Attributes:
        path: The directory.
        model: As it was named when the engine was built.
        source_digest: Of the weights that it was made from (:func:`trtl_rl.model.source.weights_digest`).
        parameters: Of the whole model.
        recipe: ``name``, ``digest`` and ``text``.
        weights_digest: Of the version's tensors: what the engine reports after a refit to them.
        kernels: ``identity``, ``compiled``, ``description`` of the operators.
        backend: ``torch``, or ``tensorrt-llm``: then the embedded engine can run it too.
        serving: What it was checked for: ``tensor_parallel`` and ``gpu`` of TensorRT-LLM; empty for the embedded engine.
        max_context: Longest prompt plus answer.
        stop_ids: Every id that ends an answer.
        versions: Of what built it.
        files: All others, by their path in the directory.
    """

    path: Path
    model: str
    architecture: str
    source_digest: str
    parameters: int
    recipe: dict[str, str]
    description: DecoderDescription
    weights_digest: str
    kernels: dict[str, Any]
    backend: str
    serving: dict[str, Any]
    max_context: int
    stop_ids: list[int]
    versions: dict[str, str]
    files: dict[str, FileEntry]

    @property
    def packages(self) -> Path:
        """Where the compiled operators are, for ``KernelSet(packages=...)``."""
        return self.path / "kernels"

    @property
    def bytes(self) -> int:
        """Size of all files."""
        return sum(entry.size for entry in self.files.values())

    def contract(self) -> BlockScaleContract:
        """What weights for TensorRT-LLM must comply with. Raises UserError when the directory was not built for that."""
        from trtl_rl.refit.validate import BlockScaleContract

        if self.backend != "tensorrt-llm":
            raise UserError(
                f"{self.path} was built for the embedded engine. Build one with: trtl-rl build-engine --backend tensorrt-llm "
                f"--model {self.model} --output DIR"
            )
        return BlockScaleContract(self.description, self.serving["tensor_parallel"], self.serving["gpu"])

    def llm_arguments(self) -> dict[str, Any]:
        """``llm_args.yaml``: the arguments of TensorRT-LLM's AsyncLLM, but for the model's path."""
        import yaml

        arguments: dict[str, Any] = yaml.safe_load((self.path / LLM_ARGUMENTS).read_text())
        return arguments

    def to_json(self) -> dict[str, Any]:
        """``engine.json``, with a checksum of itself."""
        values = {**self.__dict__, "description": self.description.to_json()}
        values["files"] = {name: asdict(entry) for name, entry in sorted(self.files.items())}
        del values["path"]
        return _sealed({"format": FORMAT, **values})

    @classmethod
    def open(cls, path: Path | str) -> EngineDirectory:
        """Read ``engine.json`` and look whether every file is there in its size; contents are read by :meth:`check`.

        Raises:
            UserError: no engine directory, one of a newer format or of an architecture that this version does not compute, an
                edited ``engine.json``, a file that is missing or truncated.
        """
        path = Path(path)
        values = _read(path)
        if values["architecture"] not in ARCHITECTURES:
            raise UserError(
                f"{path} holds a {values['architecture']}, which this version does not compute. Supported are "
                f"{', '.join(ARCHITECTURES)}."
            )
        values["description"] = DecoderDescription.from_json(values["description"])
        values["files"] = {name: FileEntry(**entry) for name, entry in values["files"].items()}
        found = cls(path, **values)
        for name, entry in found.files.items():
            file = found._file(name)
            if not file.is_file():
                raise UserError(f"{path} is not whole: {name} is missing. Build it again with trtl-rl build-engine.")
            if file.stat().st_size != entry.size:
                raise UserError(
                    f"{path} is not whole: {name} has {file.stat().st_size} bytes, {entry.size} were written. Build it again "
                    "with trtl-rl build-engine."
                )
        listed = {found._file(name) for name in found.files}
        for file in (path / "kernels").rglob("*"):
            if file.is_file() and file not in listed:
                raise UserError(
                    f"{file} was put into {path} after the engine was built; operators are code. Remove it."
                )
        return found

    def check(self, progress: Progress | None = None) -> None:
        """Compare the checksums of all files. Raises UserError for one that differs."""
        for done, name in enumerate(self.files, 1):
            if file_digest(self._file(name)) != self.files[name].digest:
                raise UserError(
                    f"{self.path}: {name} was changed after the engine was built: its checksum differs. Build it again with "
                    "trtl-rl build-engine."
                )
            if progress is not None:
                progress("checksums", done, len(self.files))

    def tensors(self) -> dict[str, Tensor]:
        """The checkpoint in the layout of ``tensor_specs``. Raises UserError when its digest is not the one that was built."""
        from safetensors.torch import load_file

        from trtl_rl.refit.manifest import Manifest

        index: dict[str, str] = json.loads((self.path / INDEX).read_text())["weight_map"]
        tensors: dict[str, Tensor] = {}
        for file in sorted(set(index.values())):
            tensors.update(load_file(self._file(file)))
        if Manifest.of(tensors, 0, "").digest != self.weights_digest:
            raise UserError(f"{self.path}: its weights were changed after the engine was built: their digest differs.")
        return tensors

    def load_into(self, engine: RefitTarget, description: DecoderDescription | None = None) -> RefitResult:
        """Bring an engine to version 0, which is the checkpoint.

        Args:
            description: What the engine runs, where that has adapters beside this model: they are zeros then.
        """
        from trtl_rl.model.weights import zero_adapters
        from trtl_rl.refit.manifest import Manifest, buckets

        tensors = {**self.tensors(), **zero_adapters(description or self.description)}
        engine.begin_refit(Manifest.of(tensors, 0, self.description.coverage.digest))
        for bucket in buckets(tensors, _BUCKET_BYTES):
            engine.write(bucket)
        return engine.finish_refit()

    def _file(self, name: str) -> Path:
        place = PurePosixPath(name)
        if place.is_absolute() or ".." in place.parts:
            raise UserError(f"{self.path}: {MANIFEST} names {name}, which lies outside of it.")
        return self.path / place


def is_engine_directory(path: Path) -> bool:
    """Whether ``path`` claims to be one."""
    return (path / MANIFEST).is_file()


def _read(path: Path) -> dict[str, Any]:
    """``engine.json`` without format and checksum, which are as they should be."""
    file = path / MANIFEST
    if not path.is_dir():
        raise UserError(
            f"There is no engine directory {path}. Build one with: trtl-rl build-engine --model M --output DIR"
        )
    if not file.is_file():
        raise UserError(f"{path} is no engine directory: it has no {MANIFEST}. trtl-rl build-engine makes one.")
    try:
        values: dict[str, Any] = json.loads(file.read_text())
        format = int(values["format"])
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{file} is no whole JSON file of an engine: build the engine again.") from None
    if format != FORMAT:
        age = "a newer" if format > FORMAT else "an older"
        raise UserError(
            f"{path} was built by {age} version of trtl-rl (format {format}; this one reads {FORMAT}). Build it again with "
            "this version."
        )
    if _sealed({name: value for name, value in values.items() if name != "checksum"}) != values:
        raise UserError(f"{file} was edited: its own checksum differs. Build the engine again.")
    del values["format"], values["checksum"]
    return values


def _sealed(values: dict[str, Any]) -> dict[str, Any]:
    text = json.dumps(values, sort_keys=True)
    return {**values, "checksum": xxhash.xxh3_128_hexdigest(text.encode())}
