"""``pseudograd reproduce``: the paper's tables, row by row."""

from __future__ import annotations

import argparse
import functools
import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pseudograd.cli.options import positive
from pseudograd.cli.place import Place, add_place

if TYPE_CHECKING:
    from collections.abc import Callable

    from pseudograd.cli.options import Commands
    from pseudograd.data import Dataset
    from pseudograd.reproduce.rows import Experiment, Row
    from pseudograd.reproduce.run import Step
    from pseudograd.search import Ledger

_SECONDS_BETWEEN_LINES = 10.0
_TABLES = ("table1", "table3", "table4", "supplement", "all", "unprinted")


def reproduce(commands: Commands) -> None:
    """``pseudograd reproduce``: run rows of the paper's tables, or tell what came of them."""
    about = "run the experiments of the paper's tables, with its whole protocol"
    parser = commands.add_parser("reproduce", help=about, description=about.capitalize() + ".")
    parser.add_argument(
        "what",
        choices=(*_TABLES, "status", "report"),
        metavar="TABLE",
        help="table1, table3, table4, supplement, all of them, or unprinted (rows that the paper's "
        "source has as comments); status says how far all are, and those of unprinted that were "
        "begun; report writes RESULTS.md beside the folder results, or into any other, and a page "
        "into the folder",
    )
    parser.add_argument(
        "--rows",
        default="*",
        metavar="PATTERN",
        help='a name as status prints it, such as "mnist 1x400 m0.5 [0,1]", for it alone; a '
        'pattern of rows such as "cifar10 1x400*", with what is run beside them; or a pattern of '
        'what is run beside, such as "* tanh" (all rows)',
    )
    parser.add_argument(
        "--as-printed",
        action="store_true",
        help="of a pattern: without MNIST in [0, 1] and without tanh, which are run beside the "
        "paper's rows",
    )
    parser.add_argument("--smoke", action="store_true", help="in small, to see that it runs")
    parser.add_argument(
        "--check", action="store_true", help="of a report: fail if its files are not up to date"
    )
    parser.add_argument(
        "--time-limit",
        type=positive,
        metavar="MINUTES",
        help="end after the epoch that is then under way; the same command goes on",
    )
    parser.add_argument("--data-dir", metavar="FOLDER", help="where the data sets are kept")
    add_place(parser)
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="of the ledgers (results; runs/smoke with --smoke)",
    )

    def run(options: argparse.Namespace) -> None:
        from pseudograd.cli.display import tell_set_aside
        from pseudograd.data import open_data
        from pseudograd.reproduce import rows as paper
        from pseudograd.reproduce.run import TimeIsUp, reproduce

        folder = options.out or Path("runs/smoke" if options.smoke else "results")
        if options.check and options.what != "report":
            raise ValueError(f"--check goes with report, not with {options.what}")
        rows = paper.rows(options.what if options.what in _TABLES else "all")
        if options.what not in _TABLES:
            rows += _begun(paper.rows(paper.UNPRINTED), folder)
        there = [paper.Experiment(row) for row in rows]
        if not options.as_printed:
            there = paper.experiments(rows)
        wanted = paper.select(there, options.rows)
        if options.what == "status":
            if options.out and not folder.is_dir():
                raise FileNotFoundError(f"{folder} is not a folder: name one that holds ledgers")
            _check_size(folder, options.smoke)
            _print_status(wanted, folder, options.smoke, tell_set_aside)
            return
        if options.what == "report":
            selected_by = ["--rows", options.rows] * (options.rows != "*")
            selected_by += ["--as-printed"] * options.as_printed
            _report(wanted, folder, selected_by, options.smoke, options.check)
            return

        @functools.cache
        def data(name: str) -> Dataset:
            found = open_data(name, data_dir=options.data_dir)[0]
            return _part_of(found) if options.smoke else found

        with Place(options) as place:
            lines = _Lines()
            try:
                reproduce(
                    wanted,
                    folder,
                    data,
                    place.runner,
                    command=shlex.join(["pseudograd", *options.arguments]),
                    devices=place.devices,
                    smoke=options.smoke,
                    time_limit=60 * options.time_limit if options.time_limit else None,
                    at_once=place.at_once,
                    workplace=place.workplace,
                    begin=lines.begin,
                    watch=lines.show,
                )
            except TimeIsUp:
                goes_on = "the same command goes on from here"
                if not lines.done:
                    goes_on = "no trial has ended in it: give more"
                print(f"the time is up; {goes_on}", file=sys.stderr)
            except KeyboardInterrupt:
                raise KeyboardInterrupt(
                    "stopped by Ctrl-C; finished trials are kept, and the same command goes on"
                ) from None
            finally:
                lines.close()
        _print_status(wanted, folder, options.smoke)
        print(f"ledgers: {folder}")

    parser.set_defaults(run=run)


def _begun(rows: list[Row], folder: Path) -> list[Row]:
    """Those of which there is a ledger."""
    from pseudograd.reproduce.rows import experiments

    return [row for row in rows if _any_begun(experiments([row]), folder)]


def _any_begun(experiments: list[Experiment], folder: Path) -> bool:
    from pseudograd.reproduce.run import ledger_path

    return any(ledger_path(folder, one.network).exists() for one in experiments)


class _Lines:
    """A line when a network begins, some about those under way, one when what it asked for is done.

    Lines of its ledger that could not be used are told first.
    """

    def __init__(self) -> None:
        self.networks: dict[str, _Network] = {}

    def begin(self, name: str, ledger: Ledger, wanted: int) -> None:
        from pseudograd.cli.display import tell_set_aside
        from pseudograd.report.summary import counted

        now = time.monotonic()
        self.networks[name] = _Network(name, now, now)
        tell_set_aside(ledger)
        print(f"{name}: begun, {counted(wanted, 'trial')} asked for", file=sys.stderr, flush=True)

    def show(self, step: Step) -> None:
        now, network = time.monotonic(), self.networks[step.experiment.network]
        network.done, network.left, network.told = network.done + 1, step.left, False
        if not step.left or now - network.written >= _SECONDS_BETWEEN_LINES:
            network.write(now)

    @property
    def done(self) -> int:
        return sum(network.done for network in self.networks.values())

    def close(self) -> None:
        for network in self.networks.values():
            if not network.told:
                network.write(time.monotonic())


@dataclass
class _Network:
    """How far a network is, and what of it has been told."""

    name: str
    started: float
    written: float
    done: int = 0
    left: int = 0
    told: bool = True

    def write(self, now: float) -> None:
        from pseudograd.report.summary import counted, duration

        self.written, self.told = now, True
        print(
            f"{self.name}: {counted(self.done, 'trial')} in {duration(now - self.started)}, "
            f"{self.left} asked for",
            file=sys.stderr,
            flush=True,
        )


def _part_of(data: Dataset) -> Dataset:
    """A small part of a data set, for a look at whether all works."""
    from dataclasses import replace

    import torch

    train, test = 1000, 500
    kept = torch.cat((torch.arange(train), torch.arange(data.train_size, data.train_size + test)))
    return replace(data, features=data.features[kept], labels=data.labels[kept], train_size=train)


def _print_status(
    experiments: list[Experiment],
    folder: Path,
    smoke: bool,
    opened: Callable[[Ledger], None] = lambda _: None,
) -> None:
    from pseudograd.report.summary import counted, duration, fraction
    from pseudograd.reproduce.run import status

    print(f"{'row':<28}{'done':>6}{'left':>7}{'time left':>14}   selected k (paper)")
    states = status(experiments, folder, smoke, opened)
    for state in states:
        left = "" if state.seconds is None or not state.left else duration(state.seconds)
        selected = "" if state.selected_k is None else fraction(state.selected_k)
        row = state.experiment.row
        if row.of_paper:
            selected += f" ({fraction(row.selected_k)})"
        print(f"{state.experiment.name:<28}{state.done:>6}{state.left:>7}{left:>14}   {selected}")
    finished = sum(state.selected_k is not None for state in states)
    trials = sum(state.left for state in states)
    seconds = [state.seconds for state in states if state.seconds is not None]
    time_left = f", about {duration(sum(seconds))}" if seconds and trials else ""
    controls = sum(state.selected_k is not None and state.left > 0 for state in states)
    but = f" ({controls} but for k = 1 at the selected k's rate)" * bool(controls)
    print(
        f"{finished} of {len(states)} rows done{but}, about {counted(trials, 'trial')} "
        f"left{time_left}"
    )


def _check_size(folder: Path, smoke: bool) -> None:
    """Refuse a folder where all was run in small to those who ask for whole runs."""
    from pseudograd.reproduce.run import sessions

    if not smoke and sessions(folder, smoke=True) and not sessions(folder):
        raise ValueError(f"{folder} holds trials of --smoke alone: give that option here, too")


def _report(
    experiments: list[Experiment], folder: Path, selected_by: list[str], smoke: bool, check: bool
) -> None:
    from pseudograd.files import write_whole, writing
    from pseudograd.report.results import BESIDE, documents

    if folder.resolve().name == BESIDE and selected_by:
        raise ValueError(
            f"a report of {folder} is of all rows: leave out --rows and --as-printed, or name the "
            "folder of another run by --out"
        )
    if folder.is_dir() and not _any_begun(experiments, folder):
        raise ValueError(
            f"{folder} holds no ledger of these rows: run them first, `pseudograd reproduce all` "
            "with the same --rows and --out, or name another folder"
        )
    _check_size(folder, smoke)
    files = documents(experiments, folder, smoke=smoke, selected_by=selected_by)
    for path, text in files.items():
        if not check:
            with writing(path):
                write_whole(path, text)
            print(path)
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            raise ValueError(
                f"{path} is not what the ledgers give: run the same command without --check"
            )
