"""The command ``pseudograd``: options in, one call, a table and a file out.

Each command is one function, which adds its parser to the commands and holds what the command runs.
To add one, write its function and name it in ``COMMANDS``. What only some commands need is
imported when they run.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from pseudograd import __version__

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction["_Parser"]

_PICTURE_SUFFIXES = (".png", ".pdf", ".svg")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line.

    Args:
        arguments: What follows the program's name; ``sys.argv`` unless given.

    Returns:
        The exit status: 0, or 130 after Ctrl-C. Bad options end in ``SystemExit(2)``.

    """
    parser = _Parser(
        prog="pseudograd", description="Train with tunable sensitivity to large errors."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        command(commands)
    options = parser.parse_args(arguments)
    try:
        options.run(options)
    except KeyboardInterrupt:
        print("pseudograd: stopped by Ctrl-C before the end", file=sys.stderr)
        return 130
    return 0


def toy(commands: Commands) -> None:
    """``pseudograd toy``: the paper's toy example."""
    about = "run the paper's toy example: how k moves the threshold of a tiny network"
    parser = commands.add_parser("toy", help=about, description=about.capitalize() + ".")
    parser.add_argument("--seed", type=_whole(0), default=0, help="seed of all data (%(default)s)")
    parser.add_argument("--runs", type=_whole(1), default=10, help="runs for each k (%(default)s)")
    parser.add_argument("--alpha", type=_alpha, default=0.95, help="end of class +1 (%(default)s)")
    _add_k(parser)
    parser.add_argument("--csv", type=_file, metavar="FILE", help="write all runs to this file")
    _add_picture(parser, "toy.png")

    def run(options: argparse.Namespace) -> None:
        from pseudograd.report.pictures import toy_picture
        from pseudograd.reproduce.toy import KS, run_toy, table, write_csv

        results = run_toy(
            options.k or KS, options.runs, alpha=options.alpha, seed=options.seed, progress=True
        )
        print(table(results))
        print("ours: mean ± sd over runs; limit: at rest on an endless sample; -: not in the paper")
        if options.csv:
            write_csv(results, options.csv)
            print(f"runs: {options.csv}")
        toy_picture(results, options.picture)
        print(f"picture: {options.picture}")

    parser.set_defaults(run=run)


def curve(commands: Commands) -> None:
    """``pseudograd curve``: the paper's Figure 2."""
    about = "draw how hard an example pulls against how wrong it is, for several k"
    parser = commands.add_parser("curve", help=about, description=about.capitalize() + ".")
    _add_k(parser)
    _add_picture(parser, "curve.png")

    def run(options: argparse.Namespace) -> None:
        from pseudograd.report.pictures import curve_picture
        from pseudograd.reproduce.toy import KS

        curve_picture(options.k or KS, options.picture)
        print(f"picture: {options.picture}")

    parser.set_defaults(run=run)


COMMANDS: tuple[Callable[[Commands], None], ...] = (toy, curve)


class _Parser(argparse.ArgumentParser):
    """A parser whose complaints are one line long. Its commands' parsers are of the same kind."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong, and leave."""
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def _add_k(parser: argparse.ArgumentParser) -> None:
    """Add ``--k``, several different sensitivities."""
    parser.add_argument(
        "--k",
        type=_positive,
        nargs="+",
        action=_Different,
        metavar="K",
        help="sensitivities to large errors (the paper's: 4 2 1 0.5 0.25 0.125 0.0625)",
    )


def _add_picture(parser: argparse.ArgumentParser, name: str) -> None:
    """Add ``--picture``, a file to draw to."""
    about = "draw to this file (%(default)s)"
    parser.add_argument("--picture", type=_picture, default=name, metavar="FILE", help=about)


class _Different(argparse.Action):
    """Store a list, none of which may be given twice."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        """Check, and store."""
        assert isinstance(values, list)
        if len(set(values)) < len(values):
            raise argparse.ArgumentError(self, "a value is given twice, but each may stand once")
        setattr(namespace, self.dest, values)


def _whole(least: int) -> Callable[[str], int]:
    """The type of an option that takes whole numbers from some number up."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least {least}")
        return value

    return parse


def _number(text: str) -> float:
    """A number, or NaN, which no range contains."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def _alpha(text: str) -> float:
    if not 0.5 < (value := _number(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number between 0.5 and 1, like 0.95")
    return value


def _positive(text: str) -> float:
    if not 0 < (value := _number(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number above 0, like 0.25")
    return value


def _file(text: str) -> Path:
    """A file that can be written: found out by opening it, before a long run and not after it."""
    path = Path(text)
    existed = path.exists()
    try:
        with path.open("ab"):
            pass
        if not existed:
            path.unlink()
    except OSError as problem:
        reason = (problem.strerror or str(problem)).lower()
        raise argparse.ArgumentTypeError(
            f"{text!r} cannot be written ({reason}): name a file in a folder you may write to"
        ) from problem
    return path


def _picture(text: str) -> Path:
    if Path(text).suffix.lower() not in _PICTURE_SUFFIXES:
        known = ", ".join(_PICTURE_SUFFIXES)
        raise argparse.ArgumentTypeError(f"{text!r} must end in one of {known}")
    return _file(text)
