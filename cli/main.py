"""``trtl-rl``: the commands. Heavy modules are imported inside them, so that ``--help`` answers at once.

Exit codes: 0 done, 1 failed, 2 wrong input, 130 interrupted and saved.
"""

from __future__ import annotations

import sys
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer


class Backend(str, Enum):
    """Values of ``--backend``."""

    torch = "torch"
    tensorrt_llm = "tensorrt-llm"


class Gpu(str, Enum):
    """Values of ``--gpu``."""

    hopper = "hopper"
    blackwell = "blackwell"


app = typer.Typer(
    help="Reinforcement learning for language models, with rollouts and training in one FP8 precision.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def main() -> None:
    """Reinforcement learning for language models, with rollouts and training in one FP8 precision."""


@app.command()
def run(
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="[CONFIG.yaml] [key=value ...]", help="A configuration file, then single keys."),
    ] = None,
    resume: Annotated[Path | None, typer.Option(metavar="RUN", help="Continue this run directory.")] = None,
) -> None:
    """Train. Without arguments: the bundled demo, in about two minutes on two cores."""
    from trtl_rl.cli.run import run as start

    raise typer.Exit(_guard(lambda: start(list(settings or []), resume)))


@app.command()
def watch(
    directories: Annotated[
        list[Path], typer.Argument(metavar="RUN [RUN ...]", help="Directories of live or finished runs.")
    ],
) -> None:
    """Show the dashboard of a run, or of several beside each other. Key h: help."""
    from trtl_rl.cli.watch import watch as show

    raise typer.Exit(_guard(lambda: show(directories)))


@app.command()
def report(
    directories: Annotated[list[Path], typer.Argument(metavar="RUN [RUN ...]", help="Directories of runs.")],
    output: Annotated[
        Path | None, typer.Option(help="Directory to write; default: RUN/report, or ./report for several runs.")
    ] = None,
) -> None:
    """Write one HTML file and PNG plots about a run, or comparing several."""
    from trtl_rl.cli.report.command import report as write

    raise typer.Exit(_guard(lambda: write(directories, output)))


@app.command()
def build_engine(
    model: Annotated[str, typer.Option(help="A directory, a hub name, or demo.")],
    output: Annotated[Path, typer.Option(help="The directory to make; it must not exist.")],
    backend: Annotated[Backend, typer.Option(help="What will run it.")] = Backend.torch,
    recipe: Annotated[str, typer.Option(help="A recipe's name or file.")] = "fp8_block",
    max_context: Annotated[
        int | None, typer.Option(min=2, help="Longest prompt plus answer; default: the model's.")
    ] = None,
    no_compile: Annotated[bool, typer.Option("--no-compile", help="Leave the compiled operators out.")] = False,
    tensor_parallel: Annotated[
        int | None, typer.Option(min=1, help="tensorrt-llm: GPUs that share the model; default 1.")
    ] = None,
    gpu: Annotated[Gpu | None, typer.Option(help="tensorrt-llm: the kind of GPU; default hopper.")] = None,
) -> None:
    """Quantise a model and compile its operators once, into a directory from which engines start."""
    from trtl_rl.cli.engine import build

    serving = {"tensor_parallel": tensor_parallel, "gpu": None if gpu is None else gpu.value}
    raise typer.Exit(_guard(lambda: build(model, output, backend.value, recipe, max_context, not no_compile, serving)))


@app.command()
def inspect_engine(
    directory: Annotated[Path, typer.Argument(metavar="ENGINE", help="An engine directory.")],
    json: Annotated[bool, typer.Option("--json", help="Print JSON, every linear included.")] = False,
) -> None:
    """Print what an engine directory holds."""
    from trtl_rl.cli.engine import inspect

    raise typer.Exit(_guard(lambda: inspect(directory, json)))


@app.command()
def verify_engine(
    directory: Annotated[Path, typer.Argument(metavar="ENGINE", help="An engine directory.")],
    prompts: Annotated[int, typer.Option(min=1, help="How many prompts.")] = 16,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 64,
    backend: Annotated[Backend | None, typer.Option(help="What runs it; default: what it was built for.")] = None,
    python: Annotated[
        str | None, typer.Option(help="tensorrt-llm: interpreter of the environment that has it; default: this one.")
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="tensorrt-llm: where the report goes; default: verify-engine.json.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check every checksum, load the engine, and compare what it generates with the trainer. Exit code 1: they differ.

    torch: every logprob must be the trainer's, bit for bit. tensorrt-llm: refits are checked too, differences are measured, and
    a report is written.
    """

    def start() -> int:
        from trtl_rl.cli.engine import verify

        chosen = None if backend is None else backend.value
        return verify(directory, prompts, max_new_tokens, json, backend=chosen, python=python, report=report)

    raise typer.Exit(_guard(start))


@app.command()
def parity(
    target: Annotated[
        str, typer.Argument(metavar="MODEL|RUN|ENGINE", help="A model, a run's directory, or an engine directory.")
    ],
    prompts: Annotated[int, typer.Option(min=1, help="How many prompts.")] = 32,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest answer; default: the run's, or 128.")
    ] = None,
    temperature: Annotated[float | None, typer.Option(min=1e-3, help="Default: the run's, or 1.")] = None,
    recipe: Annotated[str | None, typer.Option(help="A recipe's name or file; default: fp8_block.")] = None,
    threads: Annotated[int, typer.Option(min=1, help="Threads of each side.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Of prompts and answers.")] = 0,
    full_vocabulary: Annotated[
        bool, typer.Option("--full-vocabulary", help="Compare all log-probabilities too.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    no_compile: Annotated[bool, typer.Option("--no-compile", help="Run the operators eagerly.")] = False,
) -> None:
    """Compare the engine's logprobs with the trainer's. Exit code 0: equal bit for bit; 1: they differ."""

    def start() -> int:
        from trtl_rl.cli.parity import parity as check
        from trtl_rl.trainer.parity_subject import Options

        compiled = False if no_compile else None
        options = Options(prompts, max_new_tokens, temperature, recipe, threads, seed, full_vocabulary, compiled)
        return check(target, options, json)

    raise typer.Exit(_guard(start))


@app.command()
def race(
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="[CONFIG.yaml] [key=value ...]", help="As for run; run_dir names the race's directory."),
    ] = None,
    budget: Annotated[
        float | None, typer.Option(min=1.0, help="FLOPs of each cell; default: 20 steps of the costliest one.")
    ] = None,
    cells: Annotated[int, typer.Option(min=4, help="Cells of each reward system.")] = 6,
    rewards: Annotated[
        list[str] | None, typer.Option(metavar="REWARDS", help="A reward system, as the key rewards; may be repeated.")
    ] = None,
    axis: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=V1,V2", help="Values of a key; may be repeated. Default: updates per rollout."),
    ] = None,
    answer_tokens: Annotated[
        int | None, typer.Option(min=1, help="Mean answer that the plan assumes; default: the longest.")
    ] = None,
    timed_by: Annotated[
        Path | None, typer.Option(metavar="RUN", help="An earlier run whose speed tells the time of cells.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    resume: Annotated[Path | None, typer.Option(metavar="RACE", help="Continue this race.")] = None,
) -> None:
    """Run a pilot grid at equal FLOPs, and name the regime of the update fraction in which a score is best."""

    def start() -> int:
        from trtl_rl.cli.race import RaceOptions
        from trtl_rl.cli.race import race as begin

        options = RaceOptions(budget, cells, tuple(rewards or []), tuple(axis or []), answer_tokens, timed_by, yes)
        return begin(list(settings or []), options, resume)

    raise typer.Exit(_guard(start))


@app.command()
def env() -> None:
    """Print versions and the machine, for bug reports."""
    from trtl_rl.cli.env import env as show

    raise typer.Exit(_guard(show))


def _guard(command: object) -> int:
    """Run a command; errors that a user can act on become one message and exit code 2 or 1."""
    from trtl_rl.errors import DiskError, EngineError, ParityError, RewardError, UserError

    assert callable(command)
    try:
        return int(command())
    except UserError as error:
        print(f"trtl-rl: {error}", file=sys.stderr)
        return 2
    except (EngineError, RewardError, ParityError, DiskError, FloatingPointError) as error:
        print(f"trtl-rl: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("trtl-rl: stopped at once; what was saved before is kept.", file=sys.stderr)
        return 130
