"""The command ``pseudograd``.

Each subcommand is one function, which adds its parser and contains the code it runs. To add one,
write its function and list it in ``COMMANDS``. Import what only some commands need when they run.
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
from pseudograd.cli.results import predict, report, runs
from pseudograd.cli.tune import tune
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
    """Run the command line of a program with subcommands.

    Args:
        program: The program's name, which begins its messages.
        about: One sentence for ``--help``.
        commands: Functions that add a subcommand's parser and set the function it runs as ``run``,
            which may return an exit status.
        arguments: The arguments after the program's name; by default those of ``sys.argv``.

    Returns:
        The exit status: 0 on success, 1 after an error (printed as one line), 130 after Ctrl-C. Bad
        options raise ``SystemExit(2)``.

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
            status = options.run(options) or 0
        sys.stdout.flush()
    except KeyboardInterrupt as stop:
        print(f"{program}: {str(stop) or 'stopped by Ctrl-C before the end'}", file=sys.stderr)
        if any(thread.name.startswith("fleet-") for thread in threading.enumerate()):
            # A second Ctrl-C while workers finish their epoch: Python's shutdown would abort them.
            sys.stderr.flush()
            os._exit(130)
        return 130
    except BrokenPipeError:
        # The reader has closed the pipe, as ``| head`` does; keep Python's shutdown quiet, too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError, ImportError) as problem:
        print(f"{program}: {problem}", file=sys.stderr)
        return 1
    return int(status)


@contextlib.contextmanager
def _plain_warnings() -> Iterator[None]:
    """Print warnings as one line, without a location in the sources; notes as they are."""
    usual = warnings.formatwarning

    def plain(message: Warning | str, category: type[Warning], *_: object, **__: object) -> str:
        return f"{'' if category.__name__ == 'Note' else 'warning: '}{message}\n"

    warnings.formatwarning = plain
    try:
        yield
    finally:
        warnings.formatwarning = usual
