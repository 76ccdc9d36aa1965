"""What options of the command line may be, and how bad ones are refused."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from pseudograd.search import Deadline

    Commands = argparse._SubParsersAction["Parser"]


class Parser(argparse.ArgumentParser):
    """A parser whose complaints are one line long. Its commands' parsers are of the same kind."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong, and leave."""
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def add_k(
    parser: argparse._ActionsContainer, default: str = "the paper's: 4 2 1 1/2 1/4 1/8 1/16"
) -> None:
    """Add ``--k``, several different sensitivities."""
    parser.add_argument(
        "--k",
        type=sensitivity,
        nargs="+",
        action=Different,
        metavar="K",
        help=f"sensitivities to large errors ({default})",
    )


def add_time_limit(parser: argparse._ActionsContainer) -> None:
    """Add ``--time-limit``."""
    about = "stop after so many minutes; the same command goes on from there"
    parser.add_argument("--time-limit", type=positive, metavar="MINUTES", help=about)


def deadline(options: argparse.Namespace) -> Deadline:
    """Return the `Stop` that ``--time-limit`` asks for, counting from now."""
    from pseudograd.search import Deadline

    return Deadline(None if options.time_limit is None else 60 * options.time_limit)


class Different(argparse.Action):
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


def whole(least: int, beyond: int = 2**63) -> Callable[[str], int]:
    """The type of an option that takes whole numbers from some number up, below another."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least {least}")
        if value >= beyond:
            raise argparse.ArgumentTypeError(f"{text!r} must be a whole number below {beyond}")
        return value

    return parse


def number(text: str) -> float:
    """A number, also as a fraction of whole ones, or NaN, which no range contains."""
    over, stroke, under = text.partition("/")
    try:
        return int(over) / int(under) if stroke else float(text)
    except (ValueError, ArithmeticError):  # no number, a division by 0, or beyond all floats
        return math.nan


def positive(text: str) -> float:
    """The type of an option that takes numbers above 0."""
    if not 0 < (value := number(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number above 0, like 0.25 or 1/4")
    return value


def sensitivity(text: str) -> float:
    """The type of an option that takes k."""
    from pseudograd.rules.checks import check_k

    value = positive(text)
    try:
        check_k(value)
    except ValueError as problem:
        advice = f"{text!r} must be from 2^-100 to 2^100, like 0.25 or 1/4"
        raise argparse.ArgumentTypeError(advice) from problem
    return value


def file(text: str) -> Path:
    """A file that can be written: found out by opening it, before a long run and not after it."""
    path = Path(text)
    existed = path.exists()
    try:
        with path.open("ab"):
            pass
        if not existed:
            path.resolve().unlink()  # what a link leads to, not the link
    except OSError as problem:
        reason = (problem.strerror or str(problem)).lower()
        raise argparse.ArgumentTypeError(
            f"{text!r} cannot be written ({reason}): name a file in a folder you may write to"
        ) from problem
    return path
