"""An engine that fails on purpose: ``engine.fault=MODE[:STEP[:always]]``; STEP is one of the run, by default 1.

``FaultyEngine`` wraps any ``RolloutEngine`` and needs nothing but its methods. In a run it sits in the engine's own process,
where the embedded engine is, so that a call which is not answered is really not answered, and a death is one. Each mode
is an accident that users of systems like this have reported; what catches it is a check that every run has.

A drill shows how a run recovers: the engine that takes the failed one's place is sound. With ``always`` it fails alike, as an
engine with a lasting fault does, and the run ends after ``engine.restarts`` attempts with the message of the table.

======================  ========================================  =============================  ===========================
mode                    what goes wrong, from step N on           caught by                      the message
======================  ========================================  =============================  ===========================
``skip_scales``         the refit takes codes, never scales       the receiver's count           "14 of 39 announced tensors
                                                                  against the manifest           never arrived"
``partial_refit``       the refit takes half of each bucket       the same                       the same
``reply_error``         the refit is answered with an error       the call that was answered     the engine's own text
``never_reply``         requests and refits are never answered    ``engine.timeout`` (requests,  "did not answer", or
                                                                  probes), ``refit.timeout``     "computed nothing for 60 s"
``die_at_step``         the process kills itself                  the closed connection          "its process ended with
                                                                                                 status -9", end of its log
``die_in_refit``        the same with a part of the weights       the same                       the same
``lose_request``        one request is taken and forgotten        its lease (``buffer.lease``)   "Prompt 7 … no sign of life";
                                                                                                 the engine stays
``lose_prompt``         that prompt is forgotten whenever it      the same                       the prompt is left out after
                        is asked for                                                             ``buffer.attempts`` leases
``permute_after_refit`` the digest is right, then rows of a       the probe after the refit      "prompts that it never saw
                        weight change places                      (``parity.stop``)              differ too"; the run ends
``stale_prefix_cache``  a prompt that was answered before the     the same                       "only prompts that it had
                        refit is answered from the old weights                                   answered before"; it ends
``raw_logprobs``        logprobs are of logits, not of            the same                       "without the division by
                        logits / temperature                                                     sampling.temperature"; it ends
======================  ========================================  =============================  ===========================

Faults of generation (``never_reply``, ``die_at_step``, ``lose_…``) strike when step N asks for completions, all others at the
refit that ends step N. A probe follows every ``parity.every`` updates, so the last three are found at the next one. They end
the run at once: what disagrees once is no accident of a process.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trtl_rl.errors import EngineError, RefitError, UserError, nearest

if TYPE_CHECKING:
    from torch import Tensor

    from trtl_rl.engines.engine import InFlight, RolloutEngine
    from trtl_rl.recipe.coverage import Coverage
    from trtl_rl.refit.manifest import Bucket, Manifest, RefitResult
    from trtl_rl.rollout import Completion, Request, Sampling

    _Asked = tuple[tuple[int, ...], Sampling]

MODES = (
    "skip_scales",
    "never_reply",
    "reply_error",
    "stale_prefix_cache",
    "permute_after_refit",
    "raw_logprobs",
    "partial_refit",
    "die_at_step",
    "die_in_refit",
    "lose_request",
    "lose_prompt",
)
UNSEEN_WITHOUT_PROBES = ("permute_after_refit", "stale_prefix_cache", "raw_logprobs")
_SCALE = "_scale_inv"


@dataclasses.dataclass(frozen=True)
class Fault:
    """What goes wrong, and from which step of the run on (1 is the first).

    >>> Fault.parse("die_at_step:3")
    Fault(mode='die_at_step', step=3, always=False)

    Attributes:
        always: Whether an engine that takes the failed one's place fails, too.
    """

    mode: str
    step: int = 1
    always: bool = False

    @classmethod
    def parse(cls, text: str) -> Fault:
        """Read ``MODE[:STEP[:always]]``.

        Raises:
            UserError: the mode is unknown, with the nearest one; or no step from 1 on, or another word, follows.
        """
        mode, *rest = text.split(":")
        if mode not in MODES:
            raise UserError(f"There is no engine.fault '{mode}'.{nearest(mode, MODES)} Known: {', '.join(MODES)}.")
        if rest and not (rest[0].isdecimal() and int(rest[0]) >= 1):
            raise UserError(f"engine.fault={text}: after the colon stands a step of the run, 1 or later.")
        if rest[1:] not in ([], ["always"]):
            raise UserError(
                f"engine.fault={text}: after the step may stand 'always', so that each new engine fails too."
            )
        return cls(mode, int(rest[0]) if rest else 1, bool(rest[1:]))

    def __str__(self) -> str:
        return f"{self.mode}:{self.step}" + (":always" if self.always else "")


class FaultyEngine:
    """Implements ``RolloutEngine`` by ``inner``, but for one fault; what is not named here is ``inner``'s own.

    Args:
        own_process: Whether the process that this runs in is the engine's alone. Then ``die_at_step`` kills it; elsewhere
            every later call raises EngineError, as calls of a dead engine do. A call that ``never_reply`` does not answer
            returns in neither case before :meth:`close`.
    """

    def __init__(self, inner: RolloutEngine, fault: Fault, *, own_process: bool = False) -> None:
        self._inner, self._fault, self._own_process = inner, fault, own_process
        self._closed = threading.Event()
        self._dead = False
        self._manifest: Manifest | None = None  # of the open refit
        self._tensors: dict[str, Tensor] = {}  # what the refits so far have brought
        self._requests: dict[int, Request] = {}  # as they were asked
        self._answers: dict[_Asked, tuple[int, list[Completion]]] = {}  # the newest version's, of each prompt
        self._ready: list[Completion] = []
        self._lost: list[int] | None = None  # ids of the prompt that is lost

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    # --- generation ---

    def submit(self, requests: Sequence[Request]) -> None:
        self._check_alive()
        if self._strikes("die_at_step", self._inner.version + 1) and any(request.id >= 0 for request in requests):
            self._die()
        if self._strikes("never_reply", self._inner.version + 1):
            return
        taken = [request for request in requests if not self._loses(request)]
        self._inner.submit([self._changed(request) for request in taken if not self._served(request)])

    def poll(self, timeout: float) -> list[Completion]:
        self._check_alive()
        return self._outgoing(self._inner.poll(0.0 if self._ready else timeout))

    def take_done(self) -> list[Completion]:
        """What the engine's process sends between two steps."""
        inner: Any = self._inner
        return self._outgoing(inner.take_done())

    def probe(self, requests: Sequence[Request]) -> list[Completion]:
        self._check_alive()
        if self._strikes("never_reply", self._inner.version + 1):
            self._hang()
        answered = self._inner.probe([self._changed(request) for request in requests if not self._served(request)])
        return self._outgoing(answered)

    def _loses(self, request: Request) -> bool:
        """Whether a request is forgotten: the first of the step, or each of that prompt."""
        step = self._inner.version + 1
        if (
            request.id >= 0
            and self._lost is None
            and (self._strikes("lose_request", step) or self._strikes("lose_prompt", step))
        ):
            self._lost = request.ids
            return True
        return self._fault.mode == "lose_prompt" and request.id >= 0 and request.ids == self._lost

    def _changed(self, request: Request) -> Request:
        """What the inner engine is asked instead of ``request``."""
        if self._strikes("raw_logprobs", self._inner.version) and request.logprobs:
            # Logprobs of an engine at temperature 1 are those of its logits.
            return dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, temperature=1.0))
        if self._fault.mode == "stale_prefix_cache":
            self._requests[request.id] = request
            return dataclasses.replace(request, logprobs=True)  # what is kept must serve a probe, too
        return request

    def _served(self, request: Request) -> bool:
        """Answer a request from what older weights have left; False when they left nothing."""
        version = self._inner.version
        kept_version, kept = self._answers.get(_asked(request), (version, []))
        if not self._strikes("stale_prefix_cache", version) or kept_version == version:
            return False
        for sample in range(request.samples):
            old = kept[sample % len(kept)]
            self._ready.append(
                dataclasses.replace(
                    old,
                    request_id=request.id,
                    sample=sample,
                    version_first=version,
                    version_last=version,
                    logprobs=old.logprobs if request.logprobs else None,
                )
            )
        return True

    def _outgoing(self, done: list[Completion]) -> list[Completion]:
        """Completions as they leave, those from older weights first; what may serve later prompts is kept."""
        out, self._ready = self._ready, []
        for completion in done:
            request = self._requests.get(completion.request_id)
            if request is None:
                out.append(completion)
                continue
            version, kept = self._answers.get(_asked(request), (-1, []))
            if completion.finish_reason != "cancelled":
                newer = completion.version_first > version
                self._answers[_asked(request)] = (completion.version_first, [completion, *([] if newer else kept)])
            out.append(completion if request.logprobs else dataclasses.replace(completion, logprobs=None))
        return out

    # --- refits ---

    def begin_refit(self, manifest: Manifest) -> bool:
        self._check_alive()
        self._manifest = manifest
        if self._strikes("die_at_step", manifest.version):
            self._die()
        if self._strikes("never_reply", manifest.version):
            self._hang()
        return self._inner.begin_refit(manifest)

    def write(self, bucket: Bucket) -> None:
        self._check_alive()
        assert self._manifest is not None, "begin comes before write"
        version = self._manifest.version
        if self._strikes("reply_error", version):
            raise RefitError(
                f"The engine fails on purpose (engine.fault=reply_error): no memory left for version {version}."
            )
        if self._strikes("die_in_refit", version):
            self._die()
        tensors = dict(bucket.tensors)
        if self._strikes("skip_scales", version):
            tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith(_SCALE)}
        if self._strikes("partial_refit", version):
            tensors = dict(list(tensors.items())[: len(tensors) // 2])
        if self._fault.mode == "permute_after_refit":
            self._tensors.update(
                {name: tensor.clone() for name, tensor in tensors.items() if name not in bucket.packed}
            )
        self._inner.write(dataclasses.replace(bucket, tensors=tensors))

    def finish_refit(self) -> RefitResult:
        self._check_alive()
        result = self._inner.finish_refit()
        if self._strikes("permute_after_refit", result.version):
            self._permute()
        return result

    def _permute(self) -> None:
        """Turn the rows of one weight round, behind the back of whoever sent it: a second refit, whole in itself."""
        from trtl_rl.refit.manifest import Bucket, Manifest

        assert self._manifest is not None
        name = min(name for name in self._tensors if ".layers." in name and name.endswith("_proj.weight"))
        tensors = {**self._tensors, name: self._tensors[name].flip(0)}
        self._inner.begin_refit(Manifest.of(tensors, self._manifest.version, self._manifest.coverage))
        self._inner.write(Bucket(tensors))
        self._inner.finish_refit()

    # --- the rest ---

    def coverage(self) -> Coverage:
        return self._inner.coverage()

    def cancel(self, ids: Sequence[int]) -> None:
        self._check_alive()
        self._inner.cancel(ids)

    def pause(self, policy: InFlight) -> None:
        self._check_alive()
        self._inner.pause(policy)

    def resume(self) -> None:
        self._check_alive()
        self._inner.resume()

    def abort_refit(self) -> None:
        self._check_alive()
        self._inner.abort_refit()

    def close(self) -> None:
        self._closed.set()
        self._inner.close()

    @property
    def version(self) -> int:
        return self._inner.version

    @property
    def busy_seconds(self) -> float:
        return self._inner.busy_seconds

    def _strikes(self, mode: str, step: int) -> bool:
        return self._fault.mode == mode and step >= self._fault.step

    def _hang(self) -> None:
        self._closed.wait()
        raise EngineError("The engine was closed before it answered.")

    def _die(self) -> None:
        if self._own_process:
            print(f"The engine kills itself on purpose (engine.fault={self._fault}).", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        self._dead = True
        self._check_alive()

    def _check_alive(self) -> None:
        if self._dead:
            raise EngineError(f"The engine died (on purpose: engine.fault={self._fault}).")


def _asked(request: Request) -> _Asked:
    return tuple(request.ids), request.sampling
