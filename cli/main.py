"""``trtl-rl``: the commands. Heavy modules are imported inside them, so that ``--help`` answers at once.

Exit codes: 0 done, 1 failed, 2 wrong input, 130 interrupted and saved.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

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
    directory: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a live or finished run.")],
) -> None:
    """Show the dashboard of a run."""
    from trtl_rl.cli.watch import watch as show

    raise typer.Exit(_guard(lambda: show(directory)))


@app.command()
def env() -> None:
    """Print versions and the machine, for bug reports."""
    from trtl_rl.cli.env import env as show

    raise typer.Exit(_guard(show))


def _guard(command: object) -> int:
    """Run a command; errors that a user can act on become one message and exit code 2 or 1."""
    from trtl_rl.errors import EngineError, ParityError, RewardError, UserError

    assert callable(command)
    try:
        return int(command())
    except UserError as error:
        print(f"trtl-rl: {error}", file=sys.stderr)
        return 2
    except (EngineError, RewardError, ParityError, FloatingPointError) as error:
        print(f"trtl-rl: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("trtl-rl: stopped at once; what was saved before is kept.", file=sys.stderr)
        return 130
