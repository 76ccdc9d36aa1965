"""What the commands share: options, their types, and messages."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from pseudograd.words import sentence

if TYPE_CHECKING:
    from pseudograd.fleet import Ramp
    from pseudograd.search import Deadline, Study

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
    """Add ``--k``, which takes several values of k and, optionally, ramps."""
    others = "; '0.5→2' or '0.5->2' for one that changes during training" if ramps else ""
    parser.add_argument(
        "--k",
        type=number_or_ramp if ramps else number,
        nargs="+",
        metavar="K",
        help=f"values of k to try{others} ({default})",
    )


def add_time_limit(parser: argparse._ActionsContainer) -> None:
    """Add ``--time-limit``."""
    about = "stop after this many minutes; the same command resumes from there"
    parser.add_argument("--time-limit", type=minutes, metavar="MINUTES", help=about)


def minutes(text: str) -> float:
    """Return the minutes of a time limit, which must be above 0."""
    if (found := number(text)) <= 0:
        raise argparse.ArgumentTypeError(f"must be a number of minutes above 0, not {text}")
    return found


def deadline(options: argparse.Namespace) -> Deadline:
    """Return a `Stop` that ends the run after ``--time-limit``, starting now."""
    from pseudograd.search import Deadline

    return Deadline(None if options.time_limit is None else 60 * options.time_limit)


def number(text: str) -> float:
    """Return a number or a fraction, like 0.25 or 1/4."""
    try:
        return float(Fraction(text))
    except ArithmeticError as problem:  # argparse reports only ValueError
        raise ValueError(str(problem)) from problem


def number_or_ramp(text: str) -> float | Ramp:
    """Return a number, or a ramp of k like 0.5→2."""
    if "→" not in text and "->" not in text:
        return number(text)
    from pseudograd.fleet import Ramp

    try:
        return Ramp.parse(text)
    except ValueError as problem:  # argparse would not say why
        raise argparse.ArgumentTypeError(str(problem)) from problem


def is_same_file(one: str | Path, other: str | Path) -> bool:
    """Return whether two paths lead to one file."""
    return Path(one).exists() and Path(other).exists() and Path(one).samefile(other)


# --- messages ------------------------------------------------------------------------------------


def kept(trials: int) -> str:
    """Return how many trials are saved after a stop, for the end of a sentence."""
    from pseudograd.words import counted

    return f"{counted(trials, 'trial')} kept, and the same command resumes from there"


def tell_if_trained_on(run: Study, file: str, count: int) -> None:
    """Report that the error is partly on training examples, if the file is that of the run."""
    known = run.data
    if Path(file).name == known["name"] and count == known["train_size"] + known["test_size"]:
        print(
            "by name and size, this is the data of the search: the model was trained on "
            f"{known['train_size']:,} of these examples, so the error on new ones may be higher",
            file=sys.stderr,
        )


def tell_resumed(study: Study) -> None:
    """Report finished trials, and ledger lines that could not be read."""
    from pseudograd.search.display import tell_set_aside

    tell_set_aside(study.ledger)
    if done := len(study.ledger):
        print(f"resuming {study.folder}: {done} trials are done", file=sys.stderr)


@contextlib.contextmanager
def told_if_stopped(study: Study, lower: str) -> Iterator[None]:
    """Turn Ctrl-C and out-of-memory errors into one sentence; ``lower`` names what to lower."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"stopped by Ctrl-C; {kept(len(study.ledger))}") from None
    except (MemoryError, RuntimeError) as problem:
        if not lacks_memory(problem):
            raise
        raise ValueError(f"not enough memory for these networks: lower {lower}") from problem


def tell_found(study: Study, made: str | None) -> None:
    """Print the result and where it is saved; ``made`` names the model, None if unfinished."""
    from pseudograd.report.summary import study_summary

    print(study_summary(study) if made else f"time limit reached; {kept(len(study.ledger))}")
    if study.ledger:
        print(f"page: {study.report()}")
    print(f"{f'{made}, ledger' if made else 'ledger'} and everything else: {study.folder}")


def lacks_memory(problem: Exception) -> bool:
    """Return whether an error means that memory ran out."""
    import torch

    said = str(problem)  # PyTorch has no exception class for this on a CPU
    return isinstance(problem, MemoryError | torch.OutOfMemoryError) or (
        "can't allocate memory" in said or "not enough memory" in said
    )
