"""What ``trtl-rl parity`` compares: a model, the newest checkpoint of a run, or an engine directory, with its prompts."""

from __future__ import annotations

import contextlib
import random
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from trtl_rl.config import RunConfig, validate_config
from trtl_rl.engines.directory import EngineDirectory, is_engine_directory
from trtl_rl.engines.host import HostedEngine
from trtl_rl.errors import ParityError, UserError
from trtl_rl.kernels.kernel_set import KernelSet, find_compiler
from trtl_rl.model.architectures import check_architecture
from trtl_rl.model.bind import TrainableDecoder
from trtl_rl.model.kv import block_length, positions_within
from trtl_rl.model.loading import empty_model, load_tokenizer
from trtl_rl.model.source import DEMO, ModelSource, find_model, weights_digest
from trtl_rl.recipe.recipe import Recipe
from trtl_rl.refit.manifest import Manifest
from trtl_rl.refit.sender import send
from trtl_rl.rollout import Request, Sampling
from trtl_rl.tasks.rows import open_rows
from trtl_rl.tasks.stream_task import make_task
from trtl_rl.trainer import checkpoint
from trtl_rl.trainer.checks import read_config
from trtl_rl.trainer.loading import load_model, load_policy
from trtl_rl.trainer.parity_check import Parity, Progress, check
from trtl_rl.trainer.trainer import GIVEN

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LONGEST_PROMPT = 300
_SLOTS = 64
_CACHE_BYTES = 4 * 2**30  # of keys and values
_BUCKET_BYTES = 64 * 2**20
_TIMEOUT = 3600.0  # answers may all end at the same time


@dataclass(frozen=True)
class Options:
    """How to check; None takes what the run has, or a default.

    Attributes:
        prompts: How many.
        threads: Of each side.
        recipe: A name or file; a run and an engine directory have their own.
        full_vocabulary: Also compare all log-probabilities, with an engine's forward in this process.
        compiled: None: as the run was, or as an engine directory was built; else when a C++ compiler is found.
    """

    prompts: int = 32
    max_new_tokens: int | None = None
    temperature: float | None = None
    recipe: str | None = None
    threads: int = 1
    seed: int = 0
    full_vocabulary: bool = False
    compiled: bool | None = None


@dataclass(frozen=True)
class Checked:
    """A check and what was checked.

    Attributes:
        about: Rows of name and value for people: model, recipe, prompts, operators, sampling.
    """

    about: dict[str, str]
    parity: Parity


class Subject:
    """A model at one version, to be checked with prompts of its own.

    Raises:
        UserError: the target is none of the three, or an option does not apply to it; no model was loaded then.
    """

    def __init__(self, target: str, options: Options) -> None:
        path = Path(target).expanduser()
        self.options = options
        self.config: RunConfig | None = None
        self.checkpoint: Path | None = None
        self.directory: EngineDirectory | None = None
        if is_engine_directory(path):
            self._open_engine(path)
        elif (path / "config.yaml").is_file():
            self._open_run(path)
        else:
            self.source = find_model(target)
            self.recipe = Recipe.load(options.recipe or "fp8_block")
            self.name = target
        check_architecture(SimpleNamespace(**self.source.config))

    def _open_run(self, path: Path) -> None:
        self._refuse_recipe("a run")
        whole = checkpoint.whole(path / "checkpoints")
        if not whole:
            raise UserError(f"{path} has no whole checkpoint yet: there are no weights to compare.")
        self.checkpoint = whole[-1]
        self.config = validate_config(read_config(path), str(path / "config.yaml"))
        self.source = find_model(self.config.model)
        self.recipe = Recipe.parse(self.config.recipe, (self.checkpoint / "recipe.yaml").read_text())
        self.name = f"{path}, {self.checkpoint.name}"

    def _open_engine(self, path: Path) -> None:
        self._refuse_recipe("an engine directory")
        self.directory = EngineDirectory.open(path)
        self.recipe = Recipe.parse(self.directory.recipe["name"], self.directory.recipe["text"])
        own = find_model(str(path))
        architectures = own.config.get("architectures") or []
        if self.directory.architecture not in architectures:
            raise UserError(
                f"{path}: engine.json says {self.directory.architecture}, config.json says {', '.join(architectures)}. Build it "
                "again with trtl-rl build-engine."
            )
        config = {name: value for name, value in own.config.items() if name != "quantization_config"}
        self.source = ModelSource(str(path), own.path, config)
        self.name = f"{path}, built from {self.directory.model}"

    def _refuse_recipe(self, what: str) -> None:
        if self.options.recipe is not None:
            raise UserError(f"--recipe applies to a model; {what} has a recipe of its own.")

    def check(self, progress: Progress | None = None) -> Checked:
        """Start an engine in a process of its own, let it answer, and score the answers with the trainer's forward."""
        o = self.options
        if self.directory is not None:
            self.directory.check(progress)
        requests, prompts = self._requests()
        context = max(len(request.ids) + request.sampling.max_new_tokens for request in requests)
        device, compiled = self._device(), self._compiled()
        packages = None if self.directory is None else self.directory.packages
        torch.set_num_threads(o.threads)
        with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
            log = Path(scratch) / "engine.log"
            engine = HostedEngine(log, threads=o.threads, timeout=_TIMEOUT, refit_timeout=_TIMEOUT)
            stack.callback(engine.close)
            if progress is not None:
                progress("loading the model", 0, 1)
            model, origin = self._load()
            if progress is not None:
                progress("loading the model", 1, 1)
            on_device: Any = model.to(device)  # type: ignore[arg-type]
            kernels = KernelSet(compiled, packages=packages, progress=progress, device=device)
            decoder = TrainableDecoder(on_device, kernels, context)
            d = decoder.description
            slots = min(_SLOTS, len(requests))
            engine.configure(
                d.to_json(),
                kernels.identity,
                compiled,
                device=device,
                packages=None if packages is None else str(packages),
                slots=slots,
                context=context,
                positions=max(block_length(context), positions_within(_CACHE_BYTES, d, slots, context)),
                stop_ids=[],  # answers go on, so that there are as many tokens as were asked for
            )
            self._equip(decoder, engine)
            full = KernelSet(compiled, build=False, packages=packages, device=device) if o.full_vocabulary else None
            found = check(decoder, engine, requests, kernels=full, progress=progress)
        sampling = requests[0].sampling
        about = {
            "model": self.name,
            "recipe": f"{self.recipe.name} {self.recipe.digest[:12]}",
            "trainer's weights": origin,
            "operators": f"{kernels.description}{self._whose(kernels)}, {o.threads} thread{'s' if o.threads > 1 else ''}",
            "prompts": f"{len(requests)} {prompts}, {slots} at once",
            "answers": f"up to {sampling.max_new_tokens} tokens at temperature {sampling.temperature:g}",
        }
        return Checked(about, found)

    def _compiled(self) -> bool:
        """As the options say, else as the subject ran or was built. Raises UserError when there is no compiler for it."""
        compiler = find_compiler()
        wanted = self.options.compiled
        if wanted is None and self.directory is not None:
            wanted = bool(self.directory.kernels["compiled"])
        if wanted is None and self.config is not None:
            wanted = self.config.compile
        if wanted is None:
            return self._device() == "cpu" and compiler is not None
        if wanted and compiler is None:
            raise UserError(
                f"{self.name}: its operators are compiled, which needs a C++ compiler (g++ or clang++, or the CXX variable), and "
                "none was found."
            )
        return wanted

    def _device(self) -> str:
        """The run's; a model and an engine directory are compared on the CPU."""
        device = "cpu" if self.config is None else self.config.device
        if device == "cuda" and not torch.cuda.is_available():
            raise UserError(f"{self.name} ran with device=cuda, and torch finds no CUDA device here.")
        return device

    def _whose(self, kernels: KernelSet) -> str:
        if self.directory is None or not kernels.compiled:
            return ""
        same = self.directory.kernels["identity"] == kernels.identity
        return (
            ", the directory's"
            if same
            else ", compiled here: the directory's are for other versions or another machine"
        )

    def _load(self) -> tuple[PreTrainedModel, str]:
        """The model with its quantisers, and where the trainer's weights come from."""
        if self.directory is None:
            model = load_policy(self.source, self.recipe, self.checkpoint)
            return model, "of the model" if self.checkpoint is None else "of the checkpoint"
        original = self._original(self.directory)
        if isinstance(original, ModelSource):
            return load_model(original.path, self.recipe), f"quantised anew from {original.name}"
        model = empty_model(self.source.config)
        self.recipe.apply(model)
        return model, f"the directory's own codes ({original})"

    def _original(self, directory: EngineDirectory) -> ModelSource | str:
        """What the directory was built from, or why that cannot be had (nothing is downloaded for it)."""
        if directory.model != DEMO and not Path(directory.model).expanduser().is_dir():
            return f"{directory.model} is not here"
        source = find_model(directory.model)
        if weights_digest(source.path) != directory.source_digest:
            return f"{directory.model} has other weights now"
        return source

    def _equip(self, decoder: TrainableDecoder, engine: HostedEngine) -> None:
        """Bring both sides to version 0."""
        coverage = decoder.description.coverage.digest
        if self.directory is None:
            decoder.refresh(0)
            send(engine, decoder.snapshot, version=0, coverage=coverage, bucket_bytes=_BUCKET_BYTES)
            return
        if decoder.description != self.directory.description:
            raise UserError(f"{self.directory.path}: config.json and engine.json describe different decoders.")
        if isinstance(self._original(self.directory), str):
            decoder.load(self.directory.tensors(), 0)
        else:
            decoder.refresh(0)
        result = engine.load(self.directory.path)
        if Manifest.of(decoder.snapshot, 0, coverage).digest != result.digest:
            raise ParityError(
                f"{self.directory.path} holds other codes than the trainer computes from {self.directory.model}."
            )

    def _requests(self) -> tuple[list[Request], str]:
        """Requests with logprobs, and what their prompts are."""
        o, config = self.options, self.config
        limit = self.directory.max_context if self.directory else self.source.context
        new = o.max_new_tokens or (config.sampling.max_new_tokens if config else 128)
        temperature = o.temperature or (config.sampling.temperature if config else 1.0)
        room = limit - new
        if room < 1:
            raise UserError(f"{new} new tokens leave no room for a prompt: the context has {limit} tokens.")
        generator = random.Random(o.seed)
        lengths = [new] * o.prompts
        if config is not None and config.data != GIVEN:
            prompts, what = self._task_prompts(config, room), "of the run's data"
        else:
            longest = min(_LONGEST_PROMPT, room)
            sizes = [1, longest, *(generator.randint(1, longest) for _ in range(o.prompts))][: o.prompts]
            vocab = int(self.source.config["vocab_size"])
            prompts = [[generator.randrange(vocab) for _ in range(size)] for size in sizes]
            lengths[1:] = [generator.randint(1, new) for _ in lengths[1:]]
            what = f"of 1 to {longest} random tokens"
        return [
            Request(-1 - i, ids, 1, Sampling(temperature, length), (o.seed, i, 0), logprobs=True)
            for i, (ids, length) in enumerate(zip(prompts, lengths, strict=True))
        ], what

    def _task_prompts(self, config: RunConfig, room: int) -> list[list[int]]:
        """The first prompts in the order of the run."""
        task = make_task(open_rows(config), config, load_tokenizer(self.source.path), room)
        order = task.order(config.seed)
        return [task.prompt(*order.at(i)).ids for i in range(self.options.prompts)]
