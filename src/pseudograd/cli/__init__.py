"""The command ``pseudograd``: options in, one call, a table and a file out.

Each command is one function, which adds its parser to the commands and holds what the command runs.
To add one, write its function and name it in ``COMMANDS``. What only some commands need is
imported when they run.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from pseudograd import __version__
from pseudograd.cli.data import data
from pseudograd.cli.options import Parser
from pseudograd.cli.tune import predict, report, runs, tune
from pseudograd.extras import needed_for

if TYPE_CHECKING:
    from pseudograd.cli.options import Commands

COMMANDS: tuple[Callable[[Commands], None], ...] = (tune, predict, report, runs, data)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line of ``pseudograd`` and return its exit status."""
    about = "Train with tunable sensitivity to large errors."
    return run_command("pseudograd", about, COMMANDS, arguments)


def run_command(
    program: str,
    about: str,
    commands: Sequence[Callable[[Commands], None]],
    arguments: Sequence[str] | None = None,
) -> int:
    """Run a command line of a program that has several commands.

    Args:
        program: The program's name, which its messages begin with.
        about: One sentence for ``--help``.
        commands: Each adds its parser, with what it runs as the default of ``run``.
        arguments: What follows the program's name; ``sys.argv`` unless given.

    Returns:
        The exit status: 0; 1 if it cannot be done, for a reason said in one line; 130 after Ctrl-C.
        Bad options end in ``SystemExit(2)``.

    """
    parser = Parser(prog=program, description=about)
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    parsers = parser.add_subparsers(metavar="COMMAND", dest="command", required=True)
    for command in commands:
        command(parsers)
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        parsers.choices[options.command].error(f"unrecognized arguments: {' '.join(unknown)}")
    options.arguments = sys.argv[1:] if arguments is None else arguments
    try:
        with _plain_warnings(), needed_for(f"pseudograd {options.command}"):
            options.run(options)
        sys.stdout.flush()
    except KeyboardInterrupt as stop:
        print(f"{program}: {str(stop) or 'stopped by Ctrl-C before the end'}", file=sys.stderr)
        if any(thread.name.startswith("fleet-") for thread in threading.enumerate()):
            # Ctrl-C again, while workers ended their epoch: Python's own end would abort in them.
            sys.stderr.flush()
            os._exit(130)
        return 130
    except BrokenPipeError:
        # Whoever reads has enough, as in ``| head``; Python must not complain at its end, either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError, ImportError) as problem:
        print(f"{program}: {problem}", file=sys.stderr)
        return 1
    return 0


@contextlib.contextmanager
def _plain_warnings() -> Iterator[None]:
    """Have warnings look like those of the commands, without a place in our sources."""
    usual = warnings.formatwarning
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    try:
        yield
    finally:
        warnings.formatwarning = usual
