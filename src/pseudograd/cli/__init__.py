"""The command ``pseudograd``.

Each subcommand is a function that adds its parser and sets the function to run. To add one, write
its function and list it in ``COMMANDS``. Import heavy packages inside the functions that need them.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from pseudograd import __version__
from pseudograd.cli.data import data
from pseudograd.cli.options import Parser
from pseudograd.cli.results import predict, report, runs
from pseudograd.cli.tune import tune
from pseudograd.extras import needed_for
from pseudograd.words import renamed

if TYPE_CHECKING:
    from pseudograd.cli.options import Commands

ABOUT = "Cross-entropy with one more knob, k: find the k that suits your data or your network."
COMMANDS: tuple[Callable[[Commands], None], ...] = (tune, predict, report, runs, data)


# Shown at the end of --help, by command; "" is the program itself.
EXAMPLES = {
    "": """
  pseudograd tune digits                                  try it without any data
  pseudograd tune patients.csv --target diagnosis         find k for your table
  pseudograd predict runs/patients-... new.csv            apply the model to new rows
  pseudograd tune images/ --network nets:net              find k for your network

pseudograd COMMAND --help shows the options of a command.
""",
    "tune": """
  pseudograd tune digits
  pseudograd tune patients.csv --target diagnosis --group patient_id --drop comment
  pseudograd tune patients.csv --target diagnosis --k 1 1/2 2 4 --time-limit 10
  pseudograd tune images/ --network nets:net --augment nets:flip --validation 0.1
  pseudograd tune mnist --protocol paper --hidden 400 --momentum 0.5

Run the same command again to resume a search that was stopped.
""",
    "predict": """
  pseudograd predict runs/patients-32x32-1f0c2a9b new.csv --keep patient_id
  pseudograd predict runs/patients-32x32-1f0c2a9b new.csv --k 1 --out predictions.csv
""",
    "data": """
  pseudograd data fetch mnist cifar10
  pseudograd data list
""",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``pseudograd`` with these arguments and return its exit status."""
    return run_command("pseudograd", ABOUT, COMMANDS, arguments, EXAMPLES)


def parser() -> Parser:
    """Return the parser of ``pseudograd``, for tools such as shtab."""
    return parser_of("pseudograd", ABOUT, COMMANDS, EXAMPLES)


def parser_of(
    program: str,
    about: str,
    commands: Sequence[Callable[[Commands], None]],
    examples: Mapping[str, str],
) -> Parser:
    """Return the parser of a program with subcommands; see `run_command`."""
    parser = Parser(prog=program, description=about)
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    parsers = parser.add_subparsers(
        title="commands", metavar="COMMAND", dest="command", required=True
    )
    for command in commands:
        command(parsers)
    for name, one in {"": parser, **parsers.choices}.items():
        one.set_defaults(parser=one)
        if name in examples:
            one.epilog = f"examples:{examples[name].rstrip()}"
    return parser


def run_command(
    program: str,
    about: str,
    commands: Sequence[Callable[[Commands], None]],
    arguments: Sequence[str] | None = None,
    examples: Mapping[str, str] | None = None,
) -> int:
    """Run the command line of a program with subcommands.

    Args:
        program: The program's name, the prefix of its messages.
        about: One sentence for ``--help``.
        commands: Functions that add a subcommand's parser and set its default ``run``, a function
            that may return an exit status.
        arguments: The arguments after the program's name; by default those of ``sys.argv``.
        examples: Command lines for the end of ``--help``, by command; "" for the program's own.

    Returns:
        The exit status: 0 on success, 1 after an error (printed as one line), 130 after Ctrl-C. Bad
        options raise ``SystemExit(2)``.

    """
    parser = parser_of(program, about, commands, examples or {})
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        options.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    options.arguments = sys.argv[1:] if arguments is None else arguments
    try:
        names = _names(options.parser)
        with _plain_warnings(), needed_for(f"pseudograd {options.command}"), renamed(**names):
            status = options.run(options) or 0
        sys.stdout.flush()
    except KeyboardInterrupt as stop:
        print(f"{program}: {str(stop) or 'stopped by Ctrl-C before the end'}", file=sys.stderr)
        if any(thread.name.startswith("fleet-") for thread in threading.enumerate()):
            # A second Ctrl-C while workers finish an epoch: a normal exit would crash in them.
            sys.stderr.flush()
            os._exit(130)
        return 130
    except BrokenPipeError:
        # The reader closed the pipe, as ``| head`` does; silence the flush at exit, too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError, ImportError) as problem:
        print(f"{program}: {problem}", file=sys.stderr)
        return 1
    return int(status)


def _names(parser: Parser) -> dict[str, str]:
    """Return the option that sets each argument, to name it in errors."""
    options = [option for option in parser._option_string_actions if option.startswith("--")]
    return {option[2:].replace("-", "_"): option for option in options} | {
        "hidden_layer_sizes": "--hidden",
        "ks": "--k",
        "max_epochs": "--epochs",
    }


@contextlib.contextmanager
def _plain_warnings() -> Iterator[None]:
    """Print warnings as one line without a source location, and notes without a prefix."""
    usual = warnings.formatwarning

    def plain(message: Warning | str, category: type[Warning], *_: object, **__: object) -> str:
        return f"{'' if category.__name__ == 'Note' else 'warning: '}{message}\n"

    warnings.formatwarning = plain
    try:
        yield
    finally:
        warnings.formatwarning = usual
