"""The command ``python -m beyond``: run the studies, show their progress, report them."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from beyond import PROGRAM
from paper.cli import publish
from pseudograd.cli import run_command
from pseudograd.cli.options import add_time_limit, deadline

if TYPE_CHECKING:
    from beyond.questions import Experiment
    from pseudograd.cli.options import Commands

RESULTS = Path("beyond/results")  # the committed ledgers, from the root of a clone
SMOKE = Path("runs/smoke-beyond")
_QUESTIONS = tuple("1234567")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line of ``python -m beyond`` and return its exit status."""
    about = "Run the studies beyond the paper and report their results."
    return run_command(PROGRAM, about, (run, status, report), arguments)


def run(commands: Commands) -> None:
    """``python -m beyond run``: train the networks of PLAN.md."""
    parser = _add(
        commands, "run", "run the studies of one question or of all, as PLAN.md describes them"
    )
    add_time_limit(parser)
    parser.add_argument(
        "--reserve", action="store_true", help="include the settings that PLAN.md keeps in reserve"
    )
    parser.add_argument("--data-dir", metavar="FOLDER", help="folder of the data sets")
    parser.add_argument(
        "--cifar-n",
        metavar="FOLDER",
        help="folder of the human labels, such as cifar10-worst.npy (PSEUDOGRAD_CIFAR_N)",
    )
    parser.add_argument(
        "--device", default="auto", help="cpu or cuda (default: a GPU if there is one)"
    )
    parser.add_argument("--slots", type=int, help="number of trainings at once on a GPU")

    def run(options: argparse.Namespace) -> None:
        import torch

        from beyond.data import Place
        from beyond.run import run as run_studies

        device = options.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        place = Place(options.data_dir, options.cifar_n, options.smoke)
        finished = run_studies(
            _selected(options, reserve=options.reserve),
            _folder(options),
            place,
            device=device,
            slots=options.slots,
            stop=deadline(options),
            command=shlex.join([*PROGRAM.split(), *options.arguments]),
            tell=lambda line: print(line, flush=True),
        )
        if not finished:
            print("time limit reached; the same command resumes from here", file=sys.stderr)

    parser.set_defaults(run=run)


def status(commands: Commands) -> None:
    """``python -m beyond status``: the progress of each study."""
    parser = _add(commands, "status", "show the progress of each study")

    def run(options: argparse.Namespace) -> None:
        from beyond.run import opened

        finished = 0
        wanted = _selected(options)
        for experiment in wanted:
            study = opened(experiment, _folder(options))
            state = "not begun"
            if study is not None:
                state = f"{len(study.ledger)} of about {study.protocol.foretold} trainings"
                if study.finished:
                    state, finished = f"{len(study.ledger)} trainings, finished", finished + 1
            print(f"{experiment.name:<44}{state}")
        print(f"{finished} of {len(wanted)} studies finished")

    parser.set_defaults(run=run)


def report(commands: Commands) -> None:
    """``python -m beyond report``: write BEYOND.md and its pictures."""
    parser = _add(
        commands,
        "report",
        "write BEYOND.md and its pictures beside the studies; for beyond/results, into the root of "
        "the clone",
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail if the files are not up to date"
    )

    def run(options: argparse.Namespace) -> None:
        from beyond.report import documents, not_reported

        publish(documents(_folder(options), smoke=options.smoke), options.check)
        if left := not_reported(_folder(options)):
            print(f"not in the report: {', '.join(left)}", file=sys.stderr)

    parser.set_defaults(run=run)


def _add(commands: Commands, name: str, about: str) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=about, description=about[0].upper() + about[1:] + ".")
    if name != "report":
        parser.add_argument(
            "question", nargs="?", choices=_QUESTIONS, metavar="QUESTION", help="1 to 7 (all)"
        )
        parser.add_argument(
            "--only",
            default="*",
            metavar="PATTERN",
            help='names of studies as status prints them, such as "5/cifar10-worst/*"',
        )
    parser.add_argument(
        "--smoke", action="store_true", help="a small version of everything, as a test"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help=f"folder of the studies ({RESULTS}; {SMOKE} with --smoke)",
    )
    return parser


def _folder(options: argparse.Namespace) -> Path:
    out: Path | None = options.out
    return out or (SMOKE if options.smoke else RESULTS)


def _selected(options: argparse.Namespace, reserve: bool = True) -> list[Experiment]:
    from beyond.questions import experiments

    found = experiments(options.question, options.only, smoke=options.smoke, reserve=reserve)
    if not found:
        raise ValueError(
            f"no study is called {options.only!r}: `{PROGRAM} status` prints their names"
        )
    return found
