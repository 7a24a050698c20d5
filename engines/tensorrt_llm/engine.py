"""``TensorrtLlmEngine``: TensorRT-LLM as a ``RolloutEngine`` that a child process steps.

Methods are called by the child's main thread, those of a refit before ``finish_refit`` by its thread of refits.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from trtl_rl.engines.directory import EngineDirectory
from trtl_rl.engines.engine import InFlight
from trtl_rl.engines.tensorrt_llm import arguments, imports
from trtl_rl.engines.tensorrt_llm.driver import Driver
from trtl_rl.engines.tensorrt_llm.refit import MEMORY_GROWTH, WorkerRefit
from trtl_rl.engines.tensorrt_llm.samples import Samples
from trtl_rl.errors import EngineError, UserError
from trtl_rl.model.description import DecoderDescription
from trtl_rl.model.weights import tensor_specs
from trtl_rl.recipe.coverage import Coverage, CoveredLinear
from trtl_rl.recipe.formats import HIGH_PRECISION
from trtl_rl.refit.manifest import Bucket, Manifest, RefitResult
from trtl_rl.refit.shared_memory import SharedMemorySender
from trtl_rl.rollout import Completion, Request

_TURN = 0.005  # seconds that a step waits for something to end
SLEEP_TAGS = ("kv_cache", "model_weights")


class TensorrtLlmEngine:
    """Implements ``RolloutEngine``; has no weights until the first refit, unless they are loaded with it.

    Args:
        directory: An engine directory that was built for TensorRT-LLM.
        overrides: ``engine.arguments``.
        slots: Completions at once.
        context: Longest prompt plus answer, in tokens.
        stop_ids: All end-of-sequence ids of the checkpoint.
        load_format: ``dummy``: weights arrive by refit. ``auto``: version 0 is loaded from the directory.
        timeout: Seconds for the start, and for each call of the workers.

    Raises:
        UserError: TensorRT-LLM is absent or of another version, arguments do not fit, or the GPU is not the one built for.
        EngineError: it does not start.
    """

    def __init__(
        self,
        description: DecoderDescription,
        directory: str,
        overrides: dict[str, Any],
        *,
        slots: int,
        context: int,
        stop_ids: Sequence[int],
        load_format: str = "dummy",
        timeout: float = 3600.0,
    ) -> None:
        os.environ.update({name: value for name, value in arguments.ENVIRONMENT.items() if name not in os.environ})
        self.description, self.context = description, context
        modules = imports.load()
        place = EngineDirectory.open(directory)
        self.arguments = arguments.run_arguments(
            place.llm_arguments(),
            model=str(place.path.resolve()),
            slots=slots,
            context=context,
            load_format=load_format,
            overrides=overrides,
        )
        self._driver = Driver(modules, self.arguments, timeout)
        graphs = self.arguments.get("cuda_graph_config") is not None
        try:
            self._ranks: list[dict[str, Any]] = self._driver.results("trtl_open", description.to_json(), graphs)
            self._check_gpu(place.contract().gpu)
        except BaseException:
            self._driver.close()
            raise
        self.refit = WorkerRefit(self._driver.workers, self._start_again)
        self._samples = Samples(self._driver, slots=slots, stop_ids=stop_ids, version=lambda: self.refit.version)
        self._channel = SharedMemorySender()
        if load_format != "dummy":
            self._driver.results("trtl_adopt", directory)
            self.refit.adopted(0)

    def about(self) -> dict[str, Any]:
        """What runs, as plain values; ``text`` for people."""
        first = self._ranks[0]
        hooks = "begin, finalise and abort hooks" if first["life_cycle"] == "transaction" else "update_weights(None)"
        when = "between two steps" if first["in_flight"] else "when what is in flight has ended"
        version, ranks = self._driver.modules.version, len(self._ranks)
        return {
            "backend": "tensorrt-llm",
            "version": version,
            "torch": first["torch"],
            "ranks": self._ranks,
            "arguments": self.arguments,
            "text": f"TensorRT-LLM {version}, torch {first['torch']}, {ranks} × {first['device']}; refits by {hooks}, {when}",
        }

    # --- RolloutEngine ---

    @property
    def version(self) -> int:
        return self.refit.version

    @property
    def busy_seconds(self) -> float:
        return self._samples.busy_seconds

    def progress(self) -> dict[int, list[int]]:
        """Tokens of every unfinished completion that has begun, by request; an empty list for a request that waits."""
        return self._samples.progress()

    def coverage(self) -> Coverage:
        """As the modules of all ranks are: quantised ones have the recipe's format, all others none."""
        linears = []
        for rows in zip(*self._driver.results("trtl_coverage"), strict=True):
            linears.append(self._covered(rows[0][0], [(dtype, method) for _, dtype, method in rows]))
        return Coverage(tuple(linears))

    def submit(self, requests: Sequence[Request]) -> None:
        self._check_generates()
        for request in requests:
            request.check_fits(self.context)
        self._samples.add(requests)
        self._begin()

    def poll(self, timeout: float) -> list[Completion]:
        """Completions that have ended; waits up to ``timeout`` seconds for the first."""
        if not self._samples.done and self.has_work():
            self._turn(timeout)
        return self.take_done()

    def cancel(self, ids: Sequence[int]) -> None:
        self._samples.cancel(set(ids))

    def pause(self, policy: InFlight) -> None:
        """``continue``: what is in flight is aborted with its tokens, and goes on from them after :meth:`resume`."""
        if policy == "finish":
            self.drain()
            while self.unfinished:
                self.step()
        self._samples.paused = True
        self._samples.interrupt()

    def drain(self) -> None:
        """Start no more completions; those that have begun go on."""
        self._samples.draining = True

    def resume(self) -> None:
        self._samples.paused = self._samples.draining = False
        self._begin()

    def probe(self, requests: Sequence[Request]) -> list[Completion]:
        self.submit(requests)
        wanted = {request.id for request in requests}
        missing = sum(request.samples for request in requests)
        found: list[Completion] = []
        while len(found) < missing:
            if not self.has_work():
                raise EngineError("The engine cannot answer a probe: it is paused.")
            self.step()
            done = self._samples.done
            found += [item for item in done if item.request_id in wanted]
            self._samples.done = [item for item in done if item.request_id not in wanted]
        return found

    def begin_refit(self, manifest: Manifest) -> bool:
        return self.refit.begin(manifest)

    def write(self, bucket: Bucket) -> None:
        self.write_packed(self._channel.pack(bucket))

    def write_packed(self, description: dict[str, Any]) -> None:
        """Take a bucket that lies in shared memory or on a GPU: the workers open it themselves."""
        self.refit.write(description)

    def finish_refit(self) -> RefitResult:
        """Make the version live: between two steps where the workers can, else what is in flight is interrupted and goes on."""
        self._samples.collect()
        first = self._ranks[0]
        in_flight = first["in_flight"] and first["life_cycle"] == "transaction"
        paused = self._samples.paused
        if not in_flight:
            self._samples.paused = True
            self._samples.interrupt()
        try:
            result = self.refit.finish(drain=not self._samples.active)
        finally:
            self._samples.paused = paused
        self._begin()
        self._tell_growth()
        return result

    def abort_refit(self) -> None:
        self.refit.abort()

    def sleep(self, tags: Sequence[str] = SLEEP_TAGS) -> None:
        """Give memory of the GPU back; what is in flight goes on after :meth:`wake`. Needs ``sleep_config`` in the arguments."""
        self.pause("continue")
        self._driver.run(self._driver.llm.collective_rpc("reset_prefix_cache"))  # its blocks are released with the rest
        self._driver.run(self._driver.llm.release(tags=list(tags)))

    def wake(self, tags: Sequence[str] = SLEEP_TAGS) -> None:
        """Take the memory again and load the live version from the workers' own copies."""
        self._driver.run(self._driver.llm.resume(tags=list(tags)))
        if "model_weights" in tags and self.refit.generates:
            self.refit.restore()
        self.resume()

    def close(self) -> None:
        self._driver.close()
        self._channel.close()

    # --- what a child calls between messages ---

    @property
    def unfinished(self) -> int:
        """Completions that have begun."""
        return self._samples.unfinished

    def has_work(self) -> bool:
        """Whether a step would get anywhere."""
        return self.refit.generates and self._samples.has_work()

    def take_done(self) -> list[Completion]:
        done, self._samples.done = self._samples.done, []
        return done

    def step(self) -> None:
        """Wait a moment for completions to end, and begin others in their places."""
        self._turn(_TURN)

    def quantiser(self, seed: int, rows: int, columns: int) -> dict[str, Any]:
        """The first worker's quantiser of activations on random values, see ``worker.py``."""
        result: dict[str, Any] = self._driver.results("trtl_quantise", seed, rows, columns)[0]
        return result

    # --- inner parts ---

    def _turn(self, timeout: float) -> None:
        self._begin()
        self._samples.collect(timeout)
        self._begin()

    def _begin(self) -> None:
        if self.refit.generates:
            self._samples.begin()

    def _start_again(self) -> None:
        """What is in flight may have tokens of a mixture of versions: it begins anew."""
        self._samples.paused = True  # until the refit has ended: see finish_refit
        self._samples.interrupt(anew=True)

    def _check_generates(self) -> None:
        if not self.refit.generates:
            raise EngineError(f"The engine refuses to generate: {self.refit.broken or 'it has no weights yet'}.")

    def _covered(self, name: str, found: list[tuple[str, str]]) -> CoveredLinear:
        """A linear as all ranks run it: (dtype, quantisation method) of each."""
        linears = self.description.coverage.linears
        linear = next(item for item in linears if item.name == name)
        eight_bit = [dtype == "float8_e4m3fn" for dtype, _ in found]
        if not any(eight_bit):
            other = HIGH_PRECISION if linear.format.quantised else linear.format
            return replace(linear, format=other, reason=f"TensorRT-LLM runs it in {found[0][0]}")
        methods = sorted({method for _, method in found})
        if not all(eight_bit) or not all("FP8BlockScales" in method for method in methods):
            return replace(linear, format=HIGH_PRECISION, reason=f"TensorRT-LLM runs it by {', '.join(methods)}")
        if not linear.format.quantised:
            first = next(item.format for item in linears if item.format.quantised)
            return replace(linear, format=first, reason="TensorRT-LLM quantises it")
        return linear

    def _check_gpu(self, gpu: str) -> None:
        capability = self._ranks[0]["capability"]
        if capability is None:
            return
        found = "hopper" if capability[0] == 9 else "blackwell" if capability[0] >= 10 else "older than Hopper"
        if found != gpu:
            raise UserError(
                f"The engine directory was built for {gpu} GPUs, and this one ({self._ranks[0]['device']}, compute capability "
                f"{capability[0]}.{capability[1]}) is {found}. Build one for it: trtl-rl build-engine --gpu ..."
            )

    def _tell_growth(self) -> None:
        size = sum(spec.dtype.itemsize * math.prod(spec.shape) for spec in tensor_specs(self.description))
        if self.refit.memory_growth > MEMORY_GROWTH * size / len(self._ranks):
            print(
                f"warning: the refit to version {self.version} left {self.refit.memory_growth / 2**20:.0f} MiB more allocated on a "
                "GPU (TensorRT-LLM #14330)",
                flush=True,
            )
