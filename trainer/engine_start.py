"""The engine's side of a run: configured, given its first version, and compared with the learner's side."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trtl_rl.engines.faulty import Fault
from trtl_rl.errors import UserError
from trtl_rl.refit.manifest import Manifest
from trtl_rl.refit.sender import Sent, send
from trtl_rl.trainer.engine_place import EnginePlace

if TYPE_CHECKING:
    from torch import Tensor

    from trtl_rl.config import RunConfig
    from trtl_rl.engines.directory import EngineDirectory
    from trtl_rl.engines.supervisor import EngineProcess
    from trtl_rl.kernels.kernel_set import KernelSet
    from trtl_rl.metrics import Tell
    from trtl_rl.model.bind import TrainableDecoder

MAX_SLOTS = 256


class EngineStart:
    """Brings an engine's process to where it may generate, the first time and after a failure.

    Args:
        context: Tokens of the longest prompt and answer.
        tell: Takes messages: what runs in the engine's process, where that is not what runs here.
    """

    def __init__(
        self,
        config: RunConfig,
        directory: EngineDirectory | None,
        decoder: TrainableDecoder,
        kernels: KernelSet,
        *,
        context: int,
        stop_ids: list[int],
        place: EnginePlace,
        tell: Tell,
    ) -> None:
        self.config, self.directory, self.decoder, self.kernels = config, directory, decoder, kernels
        self.context, self.stop_ids, self.place, self.tell = context, stop_ids, place, tell

    def __call__(self, engine: EngineProcess, tensors: Mapping[str, Tensor], version: int, *, restarted: bool) -> None:
        """Configure the engine, give it ``version``, and compare what both sides run.

        Args:
            tensors: Of the version, in the layout of ``tensor_specs``.
            restarted: It takes the place of one that failed. What ``engine.fault`` stages does not happen again then, unless
                it says ``always``; and of several engines only the first fails.

        Raises:
            UserError: the directory's codes are not those that the learner computes, or the two sides run different modules.
        """
        from trtl_rl.model.weights import zero_adapters

        c, decoder, directory = self.config, self.decoder, self.directory
        fault = c.engine.fault
        if fault is not None and (engine.number or (restarted and not Fault.parse(fault).always)):
            fault = None
        served = c.engine.backend == "tensorrt-llm"
        about = engine.configure(
            decoder.description.to_json(),
            self.kernels.identity,
            self.kernels.compiled,
            device=c.device,
            fault=fault,
            packages=None if directory is None else str(directory.packages),
            backend=c.engine.backend,
            # Whoever lets logprobs differ lets operators differ.
            other_operators=c.parity.stop != 0.0,
            serving={"directory": str(directory.path), "overrides": c.engine.arguments}
            if directory and served
            else None,
            **limits(c, decoder, self.context),
            context=self.context,
            stop_ids=self.stop_ids,
        )
        if not restarted:
            self._describe(about, served)
        coverage = decoder.description.coverage.digest
        loaded: Sent | None = None
        adapters = zero_adapters(decoder.description)
        if directory is not None and version == 0 and not served:
            start = {**tensors, **adapters}
            loaded = Sent(start, Manifest.of(start, 0, coverage))
            if engine.load(directory.path).digest != loaded.manifest.digest:
                raise UserError(
                    f"engine.path={directory.path} holds other codes than the trainer computes from "
                    f"model={c.model}: it was built with other versions. Build it again."
                )
        if loaded is None or adapters:
            send(
                engine,
                tensors,
                version=version,
                coverage=coverage,
                bucket_bytes=c.refit.bucket_bytes,
                mode="full" if loaded is None else "delta",
                previous=loaded,
                contract=self.place.contract,
            )
        for one, other in (
            (decoder.description.coverage, decoder.weights.coverage()),
            (decoder.description.coverage, engine.coverage()),
        ):
            differences = one.difference(other)
            if differences:
                raise UserError("The recipe and what runs differ in: " + "; ".join(differences[:8]))

    def _describe(self, about: dict[str, Any], served: bool) -> None:
        """Say what runs in the engine's process, and how weights get there, where that is not as usual."""
        import torch

        if served:
            self.tell("info", f"Engine: {about['text']}")
        elif about["operators"] != self.kernels.identity:
            self.tell(
                "warning",
                f"The engine's operators are not the trainer's (torch {about['torch']} there, {torch.__version__} here): nothing "
                "says that its logprobs are the trainer's bit for bit. The difference is measured at every probe (mismatch/..., "
                "parity.every).",
            )
        place = self.place
        if place.environment.executable != sys.executable or served or self.config.device == "cuda":
            self.tell("info", f"Weights go to the engine through {place.channel}: {place.channel_reason}.")


def limits(config: RunConfig, decoder: TrainableDecoder, context: int) -> dict[str, int]:
    """Slots: as many as are in flight, at most 256; positions of keys and values: what ``engine.cache_gib`` has room for.

    Raises:
        UserError: one completion alone does not fit.
    """
    from trtl_rl.model.kv import block_length, bytes_per_position, positions_within

    in_flight = config.batch.prompts * config.batch.group_size * (config.buffer.max_staleness + 1)
    slots = config.engine.slots or min(MAX_SLOTS, -(-in_flight // config.engine.replicas))
    if config.engine.backend == "tensorrt-llm":
        return {"slots": slots}  # it takes memory for keys and values as its own arguments say
    d, longest = decoder.description, block_length(context)
    positions = positions_within(config.engine.cache_gib * 2**30, d, slots, context)
    if positions < longest:
        raise UserError(
            f"One completion of {context} tokens needs {longest * bytes_per_position(d) / 2**30:.3g} GiB for keys and values, and "
            f"engine.cache_gib is {config.engine.cache_gib:g}. Raise engine.cache_gib, or lower "
            f"{'sampling.max_new_tokens' if config.engine.max_context is None else 'engine.max_context'}."
        )
    return {"slots": slots, "positions": positions}
