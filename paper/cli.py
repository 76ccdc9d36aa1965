"""The command ``python -m paper``: the paper's tables, its toy example and its Figure 2."""

from __future__ import annotations

import argparse
import contextlib
import functools
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from paper import PROGRAM
from pseudograd.cli import run_command
from pseudograd.cli.options import add_k, add_time_limit, deadline, number
from pseudograd.cli.place import Place, add_place

if TYPE_CHECKING:
    from paper.rows import Experiment
    from pseudograd.cli.options import Commands
    from pseudograd.data import Dataset
    from pseudograd.search import Progress, Study

RESULTS = Path("paper/results")  # the committed ledgers, from the root of a clone
SMOKE = Path("runs/smoke")
# Several fleets, because one leaves a GPU mostly idle while its last trials end.
FLEETS_ON_A_GPU = 3

_TABLES = ("table1", "table3", "table4", "supplement", "all", "unprinted")
_PICTURE_SUFFIXES = (".png", ".pdf", ".svg")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line of ``python -m paper`` and return its exit status."""
    about = "Run the paper's experiments again and report the results."
    return run_command(PROGRAM, about, (run, status, report, toy, curve), arguments)


# --- the tables ----------------------------------------------------------------------------------


def run(commands: Commands) -> None:
    """``python -m paper run``: train the rows of the paper's tables."""
    parser = _add(commands, "run", "run rows of the paper's tables with its full protocol")
    parser.add_argument(
        "table",
        choices=_TABLES,
        metavar="TABLE",
        help="table1, table3, table4, supplement, all (of these), or unprinted (rows that are "
        "comments in the paper's source)",
    )
    _add_rows(parser)
    add_time_limit(parser)
    parser.add_argument("--data-dir", metavar="FOLDER", help="folder of the data sets")
    add_place(parser)

    def run(options: argparse.Namespace) -> None:
        from paper.run import run as run_studies
        from pseudograd.search.display import Display, tell_set_aside

        folder = _folder(options)
        wanted = _selected(options, [options.table])

        def watch(experiment: Experiment, study: Study) -> Callable[[Progress], None]:
            tell_set_aside(study.ledger)
            return Display(study.protocol, study.ledger, name=experiment.name).show

        try:
            with Place(options) as place:
                at_once = fleets_at_once(place.devices)
                finished = run_studies(
                    wanted,
                    folder,
                    _data(options),
                    functools.partial(place.runner, memory=1 / at_once),
                    command=shlex.join([*PROGRAM.split(), *options.arguments]),
                    devices=place.devices,
                    smoke=options.smoke,
                    stop=deadline(options),
                    at_once=at_once,
                    workplace=functools.partial(_workplace, place.devices[0], at_once),
                    watch=watch,
                )
        except KeyboardInterrupt:
            raise KeyboardInterrupt(
                "stopped by Ctrl-C; finished trials are kept, and the same command resumes"
            ) from None
        if not finished:
            print("time limit reached; the same command resumes from here", file=sys.stderr)
        _print_status(wanted, folder, options.smoke)
        print(f"studies: {folder}")

    parser.set_defaults(run=run)


def fleets_at_once(devices: Sequence[str]) -> int:
    """Return how many fleets to run concurrently: several on a single GPU, otherwise one."""
    return FLEETS_ON_A_GPU if len(devices) == 1 and devices[0].startswith("cuda") else 1


def _workplace(device: str, at_once: int) -> contextlib.AbstractContextManager[object]:
    """Return the context for a thread that runs one of several fleets: its own CUDA stream.

    On the default stream, which all threads share, fleets would wait for each other.
    """
    if at_once == 1:
        return contextlib.nullcontext()
    import torch

    return torch.cuda.stream(torch.cuda.Stream(device))


def status(commands: Commands) -> None:
    """``python -m paper status``: the progress of each row."""
    parser = _add(
        commands, "status", "show the progress of each row and about how long the rest takes"
    )
    _add_rows(parser)

    def run(options: argparse.Namespace) -> None:
        from pseudograd.search.display import tell_set_aside

        folder = _folder(options)
        if options.out and not folder.is_dir():
            raise FileNotFoundError(f"{folder} is not a folder: name one that holds studies")
        wanted = _selected(options, ["all"], folder)
        _print_status(wanted, folder, options.smoke, lambda study: tell_set_aside(study.ledger))

    parser.set_defaults(run=run)


def report(commands: Commands) -> None:
    """``python -m paper report``: write RESULTS.md, its page and its figures."""
    parser = _add(
        commands,
        "report",
        "write RESULTS.md and a page beside the studies; for paper/results, RESULTS.md goes into "
        "the root of the clone",
    )
    _add_rows(parser)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail if the files are not up to date"
    )

    def run(options: argparse.Namespace) -> None:
        selected_by = ["--rows", options.rows] * (options.rows != "*")
        selected_by += ["--as-printed"] * options.as_printed
        folder = _folder(options)
        wanted = _selected(options, ["all"], folder)
        _report(wanted, folder, selected_by, options.smoke, options.check)

    parser.set_defaults(run=run)


def _add(commands: Commands, name: str, about: str) -> argparse.ArgumentParser:
    return commands.add_parser(name, help=about, description=about[0].upper() + about[1:] + ".")


def _add_rows(parser: argparse.ArgumentParser) -> None:
    """Add the options that select rows and the folder of their studies."""
    parser.add_argument(
        "--rows",
        default="*",
        metavar="PATTERN",
        help='a name as status prints it, such as "mnist 1x400 m0.5 [0,1]"; a pattern of rows, '
        'such as "cifar10 1x400*", which includes their variants; or a pattern of variants, such '
        'as "* tanh" (default: all rows)',
    )
    parser.add_argument(
        "--as-printed",
        action="store_true",
        help="leave out the variants (MNIST in [0, 1], tanh) of the paper's rows",
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


def _folder(options: argparse.Namespace) -> Path:
    return options.out or (SMOKE if options.smoke else RESULTS)


def _selected(
    options: argparse.Namespace, tables: Sequence[str], folder: Path | None = None
) -> list[Experiment]:
    """Return the selected experiments, and with a folder also unprinted rows begun there."""
    from paper.rows import UNPRINTED, Experiment, experiments, rows, select

    found = [row for table in tables for row in rows(table)]
    if folder:
        found += [row for row in rows(UNPRINTED) if _any_begun(experiments([row]), folder)]
    there = [Experiment(row) for row in found] if options.as_printed else experiments(found)
    return select(there, options.rows)


def _any_begun(experiments: Sequence[Experiment], folder: Path) -> bool:
    from paper.run import folder_of

    return any((folder_of(one, folder) / "ledger.jsonl").exists() for one in experiments)


def _data(options: argparse.Namespace) -> Callable[[str], Dataset]:
    """Return a function that opens a data set by name; with --smoke, a small part of it."""
    from pseudograd.data import open_data

    def data(name: str) -> Dataset:
        found = open_data(name, data_dir=options.data_dir)[0]
        return _part_of(found) if options.smoke else found

    return data


def _part_of(data: Dataset) -> Dataset:
    from dataclasses import replace

    import torch

    train, test = 1000, 500
    kept = torch.cat((torch.arange(train), torch.arange(data.train_size, data.train_size + test)))
    return replace(data, features=data.features[kept], labels=data.labels[kept], train_size=train)


def _print_status(
    experiments: Sequence[Experiment],
    folder: Path,
    smoke: bool,
    opened: Callable[[Study], None] = lambda _: None,
) -> None:
    from paper.run import status
    from pseudograd.words import counted, duration, fraction

    print(f"{'row':<28}{'done':>6}{'left':>7}{'time left':>14}   selected k (paper)")
    states = status(experiments, folder, smoke=smoke, opened=opened)
    for state in states:
        left = "" if state.seconds is None or not state.left else duration(state.seconds)
        selected = "" if state.k is None else fraction(state.k)
        row = state.experiment.row
        if row.of_paper:
            selected += f" ({fraction(row.selected_k)})"
        print(f"{state.experiment.name:<28}{state.done:>6}{state.left:>7}{left:>14}   {selected}")
    finished = sum(state.k is not None for state in states)
    trials = sum(state.left for state in states)
    seconds = [state.seconds for state in states if state.seconds is not None]
    time_left = f", about {duration(sum(seconds))}" if seconds and trials else ""
    controls = sum(state.k is not None and state.left > 0 for state in states)
    but = f" ({controls} but for k = 1 at the selected k's rate)" * bool(controls)
    print(
        f"{finished} of {len(states)} rows done{but}, about {counted(trials, 'trial')} "
        f"left{time_left}"
    )


def _report(
    experiments: Sequence[Experiment],
    folder: Path,
    selected_by: Sequence[str],
    smoke: bool,
    check: bool,
) -> None:
    from paper.report import documents, is_committed

    if is_committed(folder) and selected_by:
        raise ValueError(
            f"a report of {folder} covers all rows: leave out --rows and --as-printed, or name "
            "the folder of another run by --out"
        )
    if folder.is_dir() and not _any_begun(experiments, folder):
        raise ValueError(
            f"{folder} holds no study of these rows: run them first, `{PROGRAM} run all` with "
            "the same --rows and --out, or name another folder"
        )
    files = documents(experiments, folder, smoke=smoke, selected_by=selected_by)
    publish(files, check)


def publish(files: Mapping[Path, str], check: bool) -> None:
    """Write the files of a report, or only check that they are up to date."""
    from paper.report import same
    from pseudograd.files import write_whole, writing

    for path, text in files.items():
        if not check:
            with writing(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                write_whole(path, text)
            print(path)
        elif not path.exists() or not same(path.read_text(encoding="utf-8"), text):
            raise ValueError(
                f"{path} is not what the ledgers give: run the same command without --check"
            )


# --- the toy example and Figure 2 ----------------------------------------------------------------


def toy(commands: Commands) -> None:
    """``python -m paper toy``: the paper's toy example."""
    parser = _add(commands, "toy", "run the toy example: how k moves a tiny network's threshold")
    parser.add_argument("--seed", type=int, default=0, help="seed of all data (%(default)s)")
    parser.add_argument("--runs", type=int, default=10, help="runs for each k (%(default)s)")
    parser.add_argument("--alpha", type=number, default=0.95, help="end of class +1 (%(default)s)")
    add_k(parser)
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write all runs to this file")
    _add_picture(parser, "toy.png")

    def run(options: argparse.Namespace) -> None:
        from paper.pictures import toy_picture
        from paper.toy import KS, run_toy, table, write_csv

        results = run_toy(
            options.k or KS, options.runs, alpha=options.alpha, seed=options.seed, progress=True
        )
        print(table(results))
        print("ours: mean ± sd over runs; limit: on an infinite sample; -: not in the paper")
        if options.csv:
            write_csv(results, options.csv)
            print(f"runs: {options.csv}")
        toy_picture(results, options.picture)
        print(f"picture: {options.picture}")

    parser.set_defaults(run=run)


def curve(commands: Commands) -> None:
    """``python -m paper curve``: the paper's Figure 2."""
    parser = _add(
        commands,
        "curve",
        "draw the gradient at the true class's logit against 1 - p, for several k",
    )
    add_k(parser)
    _add_picture(parser, "curve.png")

    def run(options: argparse.Namespace) -> None:
        from paper.pictures import curve_picture
        from paper.toy import KS

        curve_picture(options.k or KS, options.picture)
        print(f"picture: {options.picture}")

    parser.set_defaults(run=run)


def _add_picture(parser: argparse.ArgumentParser, name: str) -> None:
    about = "draw to this file (%(default)s)"
    parser.add_argument("--picture", type=_picture, default=name, metavar="FILE", help=about)


def _picture(text: str) -> Path:
    if Path(text).suffix.lower() not in _PICTURE_SUFFIXES:
        known = ", ".join(_PICTURE_SUFFIXES)
        raise argparse.ArgumentTypeError(f"{text!r} must end in one of {known}")
    return Path(text)
