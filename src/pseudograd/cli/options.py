"""Command-line options: their types, and one-line errors for bad values."""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from pseudograd.files import reason
from pseudograd.words import sentence

if TYPE_CHECKING:
    from pseudograd.fleet import Ramp
    from pseudograd.search import Deadline

    Commands = argparse._SubParsersAction["Parser"]


class Parser(argparse.ArgumentParser):
    """A parser with one-line errors; argparse uses it for the subcommands, too."""

    def __init__(self, **settings: Any) -> None:
        # Keeps the line breaks of the examples.
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **settings)

    def error(self, message: str) -> NoReturn:
        """Print the error, and exit."""
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def add_command(commands: Commands, name: str, about: str) -> Parser:
    """Add a subcommand with a one-line description."""
    return commands.add_parser(name, help=about, description=sentence(about))


def add_values(
    parser: argparse._ActionsContainer, *options: tuple[str, Callable[[str], object], str, str]
) -> None:
    """Add options that take one value: name, type, metavar and help."""
    for name, kind, metavar, about in options:
        parser.add_argument(name, type=kind, metavar=metavar, help=about)


def add_k(
    parser: argparse._ActionsContainer,
    default: str = "4 2 1 1/2 1/4 1/8 1/16",
    *,
    ramps: bool = False,
) -> None:
    """Add ``--k``, which takes several distinct values of k and, optionally, ramps."""
    others = "; '0.5→2' or '0.5->2' for one that changes during training" if ramps else ""
    parser.add_argument(
        "--k",
        type=or_ramp(sensitivity) if ramps else sensitivity,
        nargs="+",
        action=Different,
        metavar="K",
        help=f"values of k to try{others} ({default})",
    )


def add_time_limit(parser: argparse._ActionsContainer) -> None:
    """Add ``--time-limit``."""
    about = "stop after this many minutes; the same command resumes from there"
    parser.add_argument("--time-limit", type=positive, metavar="MINUTES", help=about)


def deadline(options: argparse.Namespace) -> Deadline:
    """Return a `Stop` that ends the run after ``--time-limit``, starting now."""
    from pseudograd.search import Deadline

    return Deadline(None if options.time_limit is None else 60 * options.time_limit)


class Different(argparse.Action):
    """Store a list of distinct values."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        """Check and store the values."""
        assert isinstance(values, list)
        if len(set(values)) < len(values):
            raise argparse.ArgumentError(self, "a value is repeated: give each once")
        setattr(namespace, self.dest, values)


def whole(least: int, beyond: int = 2**63) -> Callable[[str], int]:
    """Return the type of an option that takes integers from ``least`` to below ``beyond``."""

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
    """Return a number or fraction; NaN, which is outside every range, if it cannot be parsed."""
    over, stroke, under = text.partition("/")
    try:
        return int(over) / int(under) if stroke else float(text)
    except (ValueError, ArithmeticError):  # not a number, division by 0, or overflow
        return math.nan


def numbers(allowed: Callable[[float], bool], which: str) -> Callable[[str], float]:
    """Return the type of an option that takes numbers in a range; ``which`` describes it."""

    def parse(text: str) -> float:
        if not allowed(value := number(text)):
            raise argparse.ArgumentTypeError(f"{text!r} must be a number {which}")
        return value

    return parse


positive = numbers(lambda value: 0 < value < math.inf, "above 0, like 0.25 or 1/4")
share = numbers(lambda value: 0 < value < 1, "between 0 and 1, like 0.2")


def sensitivity(text: str) -> float:
    """Return a value of k; the type of ``--k``."""
    from pseudograd.rules.checks import check_k

    value = positive(text)
    try:
        check_k(value)
    except ValueError as problem:
        advice = f"{text!r} must be from 2^-100 to 2^100, like 0.25 or 1/4"
        raise argparse.ArgumentTypeError(advice) from problem
    return value


def or_ramp(number: Callable[[str], float]) -> Callable[[str], float | Ramp]:
    """Return the type of an option that takes a number or a ramp of k, like 0.5→2."""

    def parse(text: str) -> float | Ramp:
        if "→" not in text and "->" not in text:
            return number(text)
        from pseudograd.fleet import Ramp

        try:
            return Ramp.parse(text)
        except ValueError as problem:
            raise argparse.ArgumentTypeError(str(problem)) from problem

    return parse


def file(text: str) -> Path:
    """Return the path of a writable file, checked before a long run rather than after it."""
    path = Path(text)
    existed = path.exists()
    try:
        with path.open("ab"):
            pass
        if not existed:
            path.resolve().unlink()  # the target of a link, not the link
    except OSError as problem:
        raise argparse.ArgumentTypeError(
            f"{text!r} cannot be written ({reason(problem)}): name a file in a folder you may "
            "write to"
        ) from problem
    return path


def is_same_file(one: str | Path, other: str | Path) -> bool:
    """Return whether two paths lead to one file."""
    return Path(one).exists() and Path(other).exists() and Path(one).samefile(other)


def typed(name: str) -> str:
    """Return an option as the user types it.

    >>> typed("max_epochs")
    '--max-epochs'
    """
    return "--" + name.replace("_", "-")


@contextlib.contextmanager
def as_typed() -> Iterator[None]:
    """Name the options in errors of the data as the user types them."""
    from pseudograd.data.columns import OptionError

    try:
        yield
    except OptionError as problem:
        option = problem.option.removesuffix("_path")
        raise ValueError(f"{typed(option)} {problem.complaint}") from problem


def kept(trials: int) -> str:
    """Return how many trials are saved after a stop, for the end of a sentence."""
    from pseudograd.words import counted

    return f"{counted(trials, 'trial')} kept, and the same command resumes from there"
