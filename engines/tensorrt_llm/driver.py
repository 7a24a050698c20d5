"""``Driver``: AsyncLLM on an event loop in a thread of its own, called from any other."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

from trtl_rl.engines.tensorrt_llm.imports import TensorrtLlm
from trtl_rl.errors import EngineError, UserError

_T = TypeVar("_T")


class Driver:
    """Starts AsyncLLM, and ends it.

    Args:
        arguments: Of AsyncLLM.
        timeout: Seconds for the start, and for each call.

    Raises:
        EngineError: it does not start, with its own text.
    """

    def __init__(self, modules: TensorrtLlm, arguments: Mapping[str, Any], timeout: float) -> None:
        self.modules, self.timeout = modules, timeout
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="tensorrt-llm", daemon=True)
        self._thread.start()
        self._closed = False
        try:
            self.llm = self.run(self._start(arguments))
        except BaseException:
            self._end_loop()
            raise

    async def _start(self, arguments: Mapping[str, Any]) -> Any:
        llm = self.modules.llm(arguments)
        await llm.setup_async()
        return llm

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run something on the loop and wait for it. Raises EngineError with what it raised."""
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result(self.timeout)
        except (UserError, EngineError):
            raise
        except Exception as error:
            raise EngineError(f"TensorRT-LLM failed: {type(error).__name__}: {error}") from error

    def workers(self, method: str, *args: Any) -> list[dict[str, Any]]:
        """Answers of all ranks to a call of ``worker.py``."""
        answers: list[dict[str, Any]] = self.run(self.llm.collective_rpc(method, args=args))
        return answers

    def results(self, method: str, *args: Any) -> list[Any]:
        """Results of all ranks. Raises EngineError when one failed."""
        answers = self.workers(method, *args)
        for answer in answers:
            if "error" in answer:
                raise EngineError(f"TensorRT-LLM's worker: {answer['error']}")
        return [answer["result"] for answer in answers]

    def abort_all(self) -> None:
        """End what is generated, with the tokens that it has, and wait until the workers are idle."""
        self.run(self.llm.pause_generation())
        self.run(self.llm.collective_rpc("wait_for_engine_idle"))  # older versions of the former do not wait
        self.run(self.llm.resume_generation())  # nobody but this process submits

    def close(self) -> None:
        """End the workers. Safe to call twice."""
        if not self._closed:
            self._closed = True
            self.llm.shutdown()
            self._end_loop()

    def _end_loop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10.0)
