from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from demo import EOS, PROMPT, ask, drain, load, make_decoder, make_engine

from trtl_rl.engines.host import HostedEngine
from trtl_rl.errors import EngineError, RefitError, UserError
from trtl_rl.kernels.kernel_set import KernelSet
from trtl_rl.model.bind import TrainableDecoder
from trtl_rl.refit.manifest import Bucket, Manifest
from trtl_rl.rollout import Completion

SOON = 20.0  # seconds within which anything must have ended, on a busy machine


@pytest.fixture(scope="module")
def decoder() -> TrainableDecoder:
    return make_decoder()


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Callable[..., HostedEngine]]:
    """Makes hosted engines, and ends them whatever the test did to them."""
    made: list[HostedEngine] = []

    def make(timeout: float = 60.0, refit_timeout: float = 60.0) -> HostedEngine:
        log = tmp_path / "logs" / "engine.log"
        made.append(HostedEngine(log, threads=1, timeout=timeout, refit_timeout=refit_timeout))
        return made[-1]

    yield make
    for engine in made:
        with contextlib.suppress(ProcessLookupError):
            os.kill(engine.process_id, signal.SIGCONT)
        engine.close()


def configure(engine: HostedEngine, decoder: TrainableDecoder, **limits: Any) -> HostedEngine:
    """Build the engine in the child and give it the decoder's weights."""
    engine.configure(
        decoder.description.to_json(),
        KernelSet(False).identity,
        False,
        **{"slots": 4, "context": 64, "stop_ids": [EOS], **limits},
    )
    load(engine, decoder)
    return engine


def collect(engine: HostedEngine, count: int) -> list[Completion]:
    """``count`` completions, in order of request and sample."""
    done: list[Completion] = []
    end = time.monotonic() + SOON
    while len(done) < count:
        assert time.monotonic() < end, f"{len(done)} of {count}"
        done += engine.poll(0.1)
    return sorted(done, key=lambda item: (item.request_id, item.sample))


def alive(process: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def gone_soon(process: int) -> bool:
    end = time.monotonic() + SOON
    while alive(process) and time.monotonic() < end:
        time.sleep(0.05)
    return not alive(process)


def raises_soon(call: Callable[[], Any]) -> EngineError:
    """The error of a call that must not hang; polled until it comes."""
    begun = time.monotonic()
    with pytest.raises(EngineError) as caught:
        while time.monotonic() - begun < SOON:
            call()
    assert time.monotonic() - begun < SOON
    return caught.value


# --- one child through a whole life ---


def test_a_hosted_engine_answers_as_one_in_process(
    host: Callable[..., HostedEngine], decoder: TrainableDecoder
) -> None:
    here = make_engine(decoder, slots=4)
    load(here, decoder)
    requests = [ask(i, PROMPT[: 2 + i], samples=3, new=6 + i, temperature=0.9) for i in range(4)]
    here.submit(requests)

    engine = host()
    with pytest.raises(EngineError, match="not configured yet"):
        engine.coverage()
    with pytest.raises(EngineError, match="different operators"):
        engine.configure(decoder.description.to_json(), "0" * 64, False, slots=1, context=64, stop_ids=[EOS])
    assert engine.version == -1
    configure(engine, decoder)
    assert engine.version == 0
    assert engine.coverage() == here.coverage()
    engine.submit(requests)
    assert collect(engine, 12) == drain(here)
    assert engine.busy_seconds > 0

    # probes come with logprobs, and never among the others
    engine.submit([ask(9, samples=4, new=12)])
    probed = sorted(engine.probe([ask(-1, samples=2, logprobs=True)]), key=lambda item: item.sample)
    assert probed == sorted(here.probe([ask(-1, samples=2, logprobs=True)]), key=lambda item: item.sample)
    assert {item.request_id for item in collect(engine, 4)} == {9}

    # errors keep their type and text
    with pytest.raises(UserError, match="Request 3 has an empty prompt"):
        engine.submit([ask(3, [])])
    with pytest.raises(UserError, match="needs 106 tokens"):
        engine.submit([ask(3, new=100)])
    with pytest.raises(RefitError, match="different recipes"):
        engine.begin_refit(Manifest.of(decoder.snapshot, 1, "another"))
    with pytest.raises(RefitError, match=r"No refit is open \(state ready\)"):
        engine.write(Bucket({}))
        engine.finish_refit()  # the answer to a bucket is taken by the next call

    # a refit that is aborted leaves the version before
    engine.begin_refit(Manifest.of(decoder.snapshot, 1, decoder.description.coverage.digest))
    engine.abort_refit()
    assert engine.probe([ask(-2)])[0].version_last == 0

    # pause "finish" answers when what has begun has ended, or was cancelled
    engine.submit([ask(20, samples=4, new=50), ask(21, samples=4, new=50)])
    engine.pause("finish")
    ended = engine.poll(1.0)
    assert len({(item.request_id, item.sample) for item in ended}) == len(ended) and len(ended) in (0, 4)
    engine.cancel([20, 21])
    engine.resume()
    rest = collect(engine, 8 - len(ended))
    assert {item.request_id for item in rest} <= {20, 21}

    engine.close()
    engine.close()
    assert not alive(engine.process_id)
    with pytest.raises(EngineError, match="was closed"):
        engine.poll(0)
    with pytest.raises(EngineError):
        engine.submit([ask(5)])


@pytest.mark.slow
def test_pause_is_answered_when_the_last_completion_is_cancelled(
    host: Callable[..., HostedEngine], decoder: TrainableDecoder
) -> None:
    engine = configure(host(), decoder, slots=2, context=4096, stop_ids=[EOS])
    engine.submit([ask(0, samples=2, new=4000, greedy=False)])
    done = threading.Event()

    def pause() -> None:
        engine.pause("finish")
        done.set()

    thread = threading.Thread(target=pause, daemon=True)
    thread.start()
    time.sleep(0.2)
    engine.cancel([0])
    assert done.wait(SOON)
    thread.join()
    assert len(collect(engine, 2)) == 2


# --- a child that dies or hangs ---


def test_a_killed_child_raises_with_the_end_of_its_log(
    host: Callable[..., HostedEngine], decoder: TrainableDecoder, tmp_path: Path
) -> None:
    engine = configure(host(), decoder)
    with open(tmp_path / "logs" / "engine.log", "a") as log:
        log.write("the last words of the engine\n")
    waiting = threading.Thread(target=lambda: raised.append(raises_soon(lambda: engine.probe([ask(-1, new=50)]))))
    raised: list[EngineError] = []
    waiting.start()
    os.kill(engine.process_id, signal.SIGKILL)
    polled = raises_soon(lambda: engine.poll(0.1))
    waiting.join(SOON)
    assert len(raised) == 1
    for error in (polled, raised[0], raises_soon(engine.coverage), raises_soon(engine.resume)):
        assert "status -9" in str(error) or "process is gone" in str(error)
        assert "the last words of the engine" in str(error)
    begun = time.monotonic()
    engine.close()
    assert time.monotonic() - begun < 2


@pytest.mark.slow
def test_a_child_that_fails_tells_its_error(host: Callable[..., HostedEngine], decoder: TrainableDecoder) -> None:
    engine = host()
    broken = {**decoder.description.to_json(), "hidden": "many"}
    error = raises_soon(
        lambda: engine.configure(broken, KernelSet(False).identity, False, slots=1, context=8, stop_ids=[EOS])
    )
    assert "TypeError" in str(error) and "Its log" in str(error)


def test_a_child_that_stops_is_named_and_can_be_closed(
    host: Callable[..., HostedEngine], decoder: TrainableDecoder
) -> None:
    engine = configure(host(), decoder)
    engine._timeout = engine._refit_timeout = 1.0  # loading torch took longer than a test wants to wait
    engine._line.set_timeout(1.0)
    os.kill(engine.process_id, signal.SIGSTOP)
    assert "did not answer 'coverage' within 1 s" in str(raises_soon(engine.coverage))
    manifest = Manifest.of(decoder.snapshot, 1, decoder.description.coverage.digest)
    assert "did not answer 'begin_refit' within 1 s" in str(raises_soon(lambda: engine.begin_refit(manifest)))
    assert "silent for 1 s" in str(raises_soon(lambda: engine.poll(0.1)))
    begun = time.monotonic()
    engine.close()
    assert time.monotonic() - begun < 8
    assert not alive(engine.process_id)


def test_a_message_that_a_stopped_child_does_not_read_cannot_block(host: Callable[..., HostedEngine]) -> None:
    engine = host(timeout=1.5)
    os.kill(engine.process_id, signal.SIGSTOP)
    large = [ask(i, [3] * 5000) for i in range(100)]  # more than a socket holds
    error = raises_soon(lambda: engine.submit(large))
    assert "did not answer 'submit' within 1.5 s" in str(error)
    assert "stopped reading" in str(raises_soon(engine.coverage))  # nothing may follow half a message
    engine.close()
    assert not alive(engine.process_id)


@pytest.mark.slow
def test_an_idle_child_is_not_taken_for_hung(host: Callable[..., HostedEngine], decoder: TrainableDecoder) -> None:
    engine = configure(host(), decoder)
    engine._timeout = 2.5  # its sign of life comes every second
    end = time.monotonic() + 4
    while time.monotonic() < end:
        assert engine.poll(0.2) == []


# --- what is left behind ---


def shared_memory(process: int) -> list[str]:
    """Descriptors of ``process`` that hold a refit's memory."""
    links = [os.readlink(path) for path in Path(f"/proc/{process}/fd").iterdir() if path.is_symlink()]
    return [link for link in links if "trtl-rl" in link]


def test_close_gives_memory_and_descriptors_back(host: Callable[..., HostedEngine], decoder: TrainableDecoder) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    threads = threading.active_count()
    engine = configure(host(), decoder)
    assert shared_memory(os.getpid())
    engine.close()
    assert shared_memory(os.getpid()) == []
    assert len(list(Path("/proc/self/fd").iterdir())) <= before
    assert threading.active_count() <= threads


@pytest.mark.slow
def test_the_child_ends_with_its_parent(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "import time\nfrom pathlib import Path\nfrom trtl_rl.engines.host import HostedEngine\n"
        f"engine = HostedEngine(Path({str(tmp_path)!r}) / 'engine.log', threads=1, timeout=60, refit_timeout=60)\n"
        "print(engine.process_id, flush=True)\ntime.sleep(600)\n"
    )
    root = str(Path(__file__).resolve().parent.parent)
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert alive(child)
        parent.kill()
    assert gone_soon(child)
