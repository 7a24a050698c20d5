"""``trtl-rl verify-engine`` for TensorRT-LLM: run an engine directory on a GPU machine, refit it, and write down what was found.

Every check stands by itself: one that fails does not end the others, as far as they can go on. The report is made to be sent back
by whoever has the machine.
"""

from __future__ import annotations

import json
import random
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trtl_rl.engines.directory import EngineDirectory
from trtl_rl.engines.environment import choose_channel, divide_gpus, read_environment
from trtl_rl.engines.host import HostedEngine
from trtl_rl.engines.tensorrt_llm.versions import check_machine
from trtl_rl.engines.tensorrt_llm.worker import random_activations
from trtl_rl.errors import EngineError, UserError
from trtl_rl.kernels.kernel_set import KernelSet
from trtl_rl.model.bind import TrainableDecoder
from trtl_rl.model.loading import empty_model
from trtl_rl.model.source import find_model
from trtl_rl.recipe.codec import encode
from trtl_rl.recipe.recipe import Recipe
from trtl_rl.refit.manifest import Manifest, buckets
from trtl_rl.refit.sender import Mode, Sent, send
from trtl_rl.rollout import Completion, Request, Sampling
from trtl_rl.trainer.parity import compare
from trtl_rl.versions import versions

_BUCKET_BYTES = 64 * 2**20
_TIMEOUT = 3600.0
_LONGEST_PROMPT = 64
_QUANTISED = (64, 512)  # rows and columns of the activations that are compared
# A refit may not make the mismatch worse: a rule of thumb, for K3-KL, until figures of GPUs are there.
_WORSE, _NOISE = 2.0, 1e-3

Progress = Callable[[str, int, int], None]


def write_report(
    directory: EngineDirectory, place: Path, *, prompts: int, new: int, python: str | None, progress: Progress
) -> dict[str, Any]:
    """Run all checks and write ``place``; returns the report, as plain values.

    Args:
        prompts: How many, of random tokens.
        new: Tokens of each answer.
        python: Interpreter of the environment that has TensorRT-LLM; None: this one.

    Raises:
        UserError: this machine or environment cannot run it, or the directory's files were changed.
    """
    contract = directory.contract()
    contract.check_model()
    environment = read_environment(python)
    check_machine(environment)
    (gpus,) = divide_gpus(1, contract.tensor_parallel)
    directory.check(progress)
    channel, reason = choose_channel(None, "cpu", environment)
    verification = _Verification(directory, prompts=prompts, new=new, progress=progress)
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "engine.log"
        limits: dict[str, Any] = {"threads": 1, "timeout": _TIMEOUT, "refit_timeout": _TIMEOUT}
        engine = HostedEngine(log, channel=channel, python=python, gpus=gpus, **limits)
        try:
            verification.run(engine)
        finally:
            engine.close()
            written = log.read_text(errors="replace").splitlines()[-200:] if log.exists() else []
    checks = verification.checks
    report = {
        "passed": all(check["passed"] for check in checks.values()),
        "checks": checks,
        "engine": verification.about,
        "channel": f"{channel}: {reason}",
        "directory": {
            "model": directory.model,
            "recipe": directory.recipe["name"],
            "serving": directory.serving,
            "weights_digest": directory.weights_digest,
        },
        "environment": environment.versions,
        "trainer": versions(),
        "log": written,
    }
    place.write_text(json.dumps(report, indent=1) + "\n")
    return report


class _Verification:
    """The checks, in order; each sees what those before it left."""

    def __init__(self, directory: EngineDirectory, *, prompts: int, new: int, progress: Progress) -> None:
        self.directory, self.new, self.progress = directory, new, progress
        self.checks: dict[str, dict[str, Any]] = {}
        self.about: dict[str, Any] = {}
        longest = min(_LONGEST_PROMPT, directory.max_context - new)
        if longest < 1:
            raise UserError(
                f"{new} new tokens leave no room for a prompt: the context has {directory.max_context} tokens."
            )
        self.requests = _requests(directory, prompts, new, longest)
        self.context = longest + new
        self.before: dict[str, float] = {}  # the mismatch before any refit

    def run(self, engine: HostedEngine) -> None:
        self.engine = engine
        if not self._check("load", self._load):
            return
        self._check("coverage", self._coverage)
        self._check("quantiser of activations", self._quantiser)
        if not self._check("generate", self._generate):
            return
        one = perturbed(self.tensors, share=0.2, seed=1)
        # So few that it is short to send; each by a factor of two, or its effect would be lost among differences of kernels.
        two = perturbed(one, share=0.002, seed=2, flip=0x08)
        self._check("refit, all tensors", lambda: self._refit(one, 1, "full"))
        self._check("refit, changes only", lambda: self._refit(two, 2, "delta"))
        self._check("refit, aborted", lambda: self._aborted(perturbed(two, share=0.2, seed=3)))

    def _check(self, name: str, check: Callable[[], tuple[bool, str, dict[str, Any]]]) -> bool:
        self.progress(name, 0, 1)
        try:
            passed, text, values = check()
        except EngineError as error:
            passed, text, values = False, str(error).splitlines()[0], {"error": str(error)}
        except Exception as error:  # of this code, on a machine where it never ran: the others are still worth having
            passed, text = False, f"{type(error).__name__}: {error}"
            values = {"error": traceback.format_exc()}
        self.checks[name] = {"passed": passed, "text": text, **values}
        self.progress(name, 1, 1)
        return passed

    def _load(self) -> tuple[bool, str, dict[str, Any]]:
        """The trainer's side, and the engine loaded by TensorRT-LLM itself from the directory's files."""
        d = self.directory
        source = find_model(str(d.path))
        model = empty_model({name: value for name, value in source.config.items() if name != "quantization_config"})
        Recipe.parse(d.recipe["name"], d.recipe["text"]).apply(model)
        self.decoder = TrainableDecoder(model, KernelSet(False), self.context)
        self.tensors = d.tensors()
        self.decoder.load(self.tensors, 0)
        self.about = self.engine.configure(
            d.description.to_json(),
            "",
            False,
            backend="tensorrt-llm",
            serving={"directory": str(d.path), "overrides": {}, "load_format": "auto"},
            slots=64,
            context=self.context,
            stop_ids=[],  # answers go on, so that there are as many tokens as were asked for
        )
        self.sent = Sent(self.tensors, Manifest.of(self.tensors, 0, d.description.coverage.digest))
        return True, self.about["text"], {}

    def _coverage(self) -> tuple[bool, str, dict[str, Any]]:
        found = self.engine.coverage()
        differences = self.directory.description.coverage.difference(found)
        quantised = sum(item.format.quantised for item in found.linears)
        text = (
            "; ".join(differences[:4])
            or f"{quantised} of {len(found.linears)} linears run in FP8 blocks, as the recipe says"
        )
        return not differences, text, {"differences": differences}

    def _quantiser(self) -> tuple[bool, str, dict[str, Any]]:
        """Codes and scales of the engine's 1×128 quantiser beside those of the codec."""
        formats = {item.format.forward_activation for item in self.directory.description.coverage.linears} - {None}
        if not formats:
            return True, "the recipe quantises no activations", {}
        (format,) = formats
        assert format is not None
        theirs = self.engine.quantiser(0, *_QUANTISED)
        codes, scales = encode(random_activations(0, *_QUANTISED).float(), format)
        other = torch.frombuffer(bytearray.fromhex(theirs["codes"]), dtype=torch.uint8).reshape(codes.shape)
        wrong = float((codes.view(torch.uint8) != other).float().mean())
        off = float((scales != torch.tensor(theirs["scales"])).float().mean())
        text = f"{wrong:.3%} of the codes and {off:.1%} of the scales differ from the codec's formula ({format.scale})"
        return wrong == off == 0, text, {"codes_differing_frac": wrong, "scales_differing_frac": off}

    def _generate(self) -> tuple[bool, str, dict[str, Any]]:
        self.before, _ = self._measure()
        return True, _mismatch_text(self.before), self.before

    def _refit(self, tensors: dict[str, Tensor], version: int, mode: Mode) -> tuple[bool, str, dict[str, Any]]:
        """To a version of other codes; the engine's answers must fit these better than those before."""
        report = send(
            self.engine,
            tensors,
            version=version,
            coverage=self.directory.description.coverage.digest,
            bucket_bytes=_BUCKET_BYTES,
            mode=mode,
            previous=self.sent,
            contract=self.directory.contract(),
        )
        old = self.sent.tensors
        self.sent = report.sent
        self.decoder.load(dict(tensors), version)
        found, completions = self._measure()
        self.decoder.load(dict(old), version)
        stale = self._compare(completions)
        self.decoder.load(dict(tensors), version)
        arrived = found["mismatch_kl/mean"] < stale["mismatch_kl/mean"]
        size = sum(tensor.nbytes for tensor in tensors.values())
        text = (
            f"{report.bytes} of {size} bytes sent, digest {report.sent.manifest.digest[:12]}; {_mismatch_text(found)}"
        )
        if not arrived:
            text += "; the answers do not fit the new weights better than the old ones"
        values = {**found, "stale": stale, "bytes": report.bytes, "move_s": report.move, "pause_s": report.pause}
        fewer = mode == "full" or report.bytes < size
        return arrived and fewer and self._no_worse(found), text, values

    def _aborted(self, tensors: dict[str, Tensor]) -> tuple[bool, str, dict[str, Any]]:
        """Half of a version is sent and given up: the engine goes on with the one before."""
        version = self.engine.version
        manifest = Manifest.of(tensors, version + 1, self.directory.description.coverage.digest)
        self.engine.begin_refit(replace(manifest, base=None))
        parts = list(buckets(tensors, _BUCKET_BYTES // 64))
        for bucket in parts[: max(1, len(parts) // 2)]:
            self.engine.write(bucket)
        self.engine.abort_refit()
        found, _ = self._measure()
        text = f"still at version {self.engine.version}; {_mismatch_text(found)}"
        return self.engine.version == version and self._no_worse(found), text, found

    def _no_worse(self, found: Mapping[str, float]) -> bool:
        return found["mismatch_kl/mean"] <= _WORSE * self.before["mismatch_kl/mean"] + _NOISE

    def _measure(self) -> tuple[dict[str, float], list[Completion]]:
        """The engine's logprobs beside the trainer's, at the version that both are at."""
        answers = self.engine.probe(self.requests)
        completions = sorted(answers, key=lambda item: (-item.request_id, item.sample))
        return self._compare(completions), completions

    def _compare(self, completions: Sequence[Completion]) -> dict[str, float]:
        prompts = {request.id: request.ids for request in self.requests}
        sequences = [[*prompts[item.request_id], *item.ids] for item in completions]
        lengths = [len(item.ids) for item in completions]
        with torch.no_grad():
            ours = self.decoder.forward(sequences, lengths, self.requests[0].sampling.temperature)[0]
        theirs = torch.tensor([value for item in completions for value in item.logprobs or []])
        return compare(ours.detach().cpu(), theirs, lengths)


def perturbed(tensors: Mapping[str, Tensor], *, share: float, seed: int, flip: int = 0x01) -> dict[str, Tensor]:
    """A version in which about ``share`` of the FP8 codes differ in the bits ``flip``; nothing becomes NaN."""
    generator = torch.Generator().manual_seed(seed)
    changed = dict(tensors)
    for name, tensor in tensors.items():
        if tensor.dtype != torch.float8_e4m3fn:
            continue
        codes = tensor.view(torch.uint8)
        flipped = codes ^ flip
        chosen = (torch.rand(codes.shape, generator=generator) < share) & (flipped & 0x7F != 0x7F)
        changed[name] = torch.where(chosen, flipped, codes).view(torch.float8_e4m3fn)
    return changed


def _requests(directory: EngineDirectory, prompts: int, new: int, longest: int) -> list[Request]:
    generator = random.Random(0)
    vocab = directory.description.vocab
    lengths = [1, *(generator.randint(1, longest) for _ in range(prompts - 1))]
    ids = [[generator.randrange(vocab) for _ in range(length)] for length in lengths]
    return [Request(-1 - i, item, 1, Sampling(0.8, new), (0, i, 0), logprobs=True) for i, item in enumerate(ids)]


def _mismatch_text(found: Mapping[str, float]) -> str:
    return (
        f"{found['mismatch/differing_tokens']:.0f} of {found['mismatch/tokens']:.0f} logprobs differ, by up to "
        f"{found['mismatch/max_abs']:.3g} (K3-KL {found['mismatch_kl/mean']:.3g})"
    )
