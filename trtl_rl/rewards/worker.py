"""The worker process of a reward function: ``python -m trtl_rl.rewards.worker``, started by ``process.py``.

It is started by module name, not by ``multiprocessing``: a user's script needs no ``__main__`` guard, and nothing is forked.
A function runs in the main thread, where signals work. When the trainer is gone, the process ends, whatever the function does.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import queue
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any

from trtl_rl.config_data import RewardConfig
from trtl_rl.rewards.call import call, call_async, explain
from trtl_rl.rewards.reward import Outcome, RewardFunction, is_async

Message = tuple[int, dict[str, Any], int, float | None]  # number, arguments, samples, seconds allowed


class Worker:
    """Answers calls until the trainer hangs up."""

    def __init__(self, connection: Connection, function: RewardFunction) -> None:
        self._connection, self._function = connection, function
        self._calls: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._lock = threading.Lock()

    def serve(self) -> None:
        loop = asyncio.new_event_loop() if is_async(self._function) else None
        threading.Thread(target=self._read, args=[loop], name="calls", daemon=True).start()
        if loop is not None:
            loop.run_forever()
        while True:
            number, arguments, count, _ = self._calls.get()
            self._answer(number, call(self._function, arguments, count))

    def _read(self, loop: asyncio.AbstractEventLoop | None) -> None:
        while True:
            try:
                message: Message = pickle.loads(self._connection.recv_bytes())
            except (EOFError, OSError):
                os._exit(0)  # the trainer is gone, and a function may be hanging
            if loop is None:
                self._calls.put(message)
            else:
                asyncio.run_coroutine_threadsafe(self._await(*message), loop)

    async def _await(self, number: int, arguments: dict[str, Any], count: int, limit: float | None) -> None:
        self._answer(number, await call_async(self._function, arguments, count, limit))

    def _answer(self, number: int, outcome: Outcome) -> None:
        with self._lock:
            self._connection.send_bytes(pickle.dumps((number, outcome)))


def main() -> None:
    """Load the function, say whether that worked, and serve, over the socket whose number is the first argument."""
    connection = Connection(int(sys.argv[1]))
    try:
        setup = pickle.loads(connection.recv_bytes())
        sys.path[:] = setup["path"]
        if setup["config"] is not None:
            from trtl_rl.rewards.loading import load_function

            function = load_function(RewardConfig.model_validate(setup["config"]))
        else:
            import cloudpickle

            function = cloudpickle.loads(setup["function"])
        getattr(function, "prepare", lambda: None)()  # what takes long and belongs to no call's time limit
    except BaseException as error:
        connection.send_bytes(pickle.dumps(explain(error)))
        return
    connection.send_bytes(pickle.dumps(None))
    Worker(connection, function).serve()


if __name__ == "__main__":
    main()
