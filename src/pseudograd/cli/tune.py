"""``pseudograd tune``: run a search and save the model."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pseudograd.cli.networks import add_own_network, refuse_own, tune_network
from pseudograd.cli.options import (
    add_command,
    add_time_limit,
    add_values,
    deadline,
    is_same_file,
    number,
    tell_found,
    tell_resumed,
    told_if_stopped,
)
from pseudograd.cli.place import Place, add_place
from pseudograd.cli.protocols import add_network, add_search, protocol_of

if TYPE_CHECKING:
    from pseudograd.cli.options import Commands
    from pseudograd.data import Dataset, Encoder


def tune(commands: Commands) -> None:
    """``pseudograd tune``: find the best k and learning rate for a data set."""
    from pseudograd.data.benchmarks import BENCHMARKS

    about = "train networks with several k and learning rates, and keep the best ensemble"
    parser = add_command(commands, "tune", about)
    parser.description = f"{parser.description} Defaults are in parentheses."
    parser.add_argument(
        "data",
        nargs="?",
        default="digits",
        metavar="DATA",
        help=f"digits, {', '.join(BENCHMARKS)}, or a file such as a .csv or .parquet table, "
        "or - for standard input; for --network see below (%(default)s)",
    )
    _add_table(parser)
    add_network(parser)
    add_own_network(parser)
    add_search(parser)
    where = parser.add_argument_group("where it runs, and how long")
    add_place(where)
    add_time_limit(where)
    where.add_argument("--out", type=Path, metavar="FOLDER", help="folder of the run (runs/...)")
    parser.set_defaults(run=_run_tune)


def _add_table(parser: argparse.ArgumentParser) -> None:
    table = parser.add_argument_group("your own table")
    held_out = "fraction of the rows to hold out as the test set (0.2)"
    group = "column that identifies groups of rows, such as patients; no split divides a group"
    add_values(
        table,
        ("--target", str, "NAME", "column of labels"),
        ("--test-path", str, "FILE", "file with the test set, instead of held-out rows"),
        ("--test-fraction", number, "F", held_out),
        ("--group", str, "NAME", group),
    )
    for name, metavar, about in (
        ("--drop", "NAME", "columns to drop"),
        ("--categories", "NAME", "columns to treat as categories, such as numbers that are codes"),
        ("--numbers", "NAME", "columns to treat as numbers, even if they look like ids"),
        ("--missing", "VALUE", "entries that mark a missing value, besides NA, ? and the like"),
    ):
        table.add_argument(name, nargs="+", action="extend", metavar=metavar, help=about)
    strict = "refuse the table if a column is left out or doubtful"
    table.add_argument("--strict", action="store_true", default=None, help=strict)
    parser.add_argument("--data-dir", metavar="FOLDER", help="where the named data sets are kept")


def _run_tune(options: argparse.Namespace) -> None:
    from pseudograd.search import study_of
    from pseudograd.search import tune as run_study
    from pseudograd.search.display import Display

    if options.k and 1 not in options.k:
        raise ValueError("--k must include 1: the chosen k is compared with it")
    if options.retrainings == 0:
        raise ValueError("--retrainings must be 1 or more, or there is no model to save")
    if options.network is not None:
        tune_network(options)
        return
    refuse_own(options)
    place = Place(options)
    data, encoder = _opened(options)
    protocol = protocol_of(options, data, encoder)
    study = study_of(data, encoder, protocol, options.out)
    tell_resumed(study)
    if data.rows is not None:
        _tell_table(data, encoder)
    print(f"training {protocol.plan()}", file=sys.stderr)
    recipe = vars(protocol.recipe)
    sizes = " ".join(map(str, recipe["hidden_layer_sizes"])) or "0"
    lower = f"--hidden (now {sizes}) or --batch-size (now {recipe['batch_size']})"
    with told_if_stopped(study, lower), place, Display(protocol, study.ledger) as display:
        found = run_study(
            study,
            data,
            encoder,
            place.runner(data, keep_parameters=True),
            metric=options.metric,
            stop=deadline(options),
            command=shlex.join(["pseudograd", *options.arguments]),
            devices=place.devices,
            watch=display.show,
            tell=display.tell,
        )
    tell_found(study, None if found is None else "model")


def _opened(options: argparse.Namespace) -> tuple[Dataset, Encoder]:
    from pseudograd.data import open_data

    if options.test_path and is_same_file(options.test_path, options.data):
        raise ValueError(f"--test-path {options.test_path} is the training file: name another")
    return open_data(
        options.data,
        target=options.target,
        test_path=options.test_path,
        test_fraction=options.test_fraction,
        drop=options.drop,
        categories=options.categories,
        numbers=options.numbers,
        missing=options.missing,
        group=options.group,
        strict=options.strict,
        data_dir=options.data_dir,
    )


def _tell_table(data: Dataset, encoder: Encoder) -> None:
    """Print how the columns are read, the classes, and warnings."""
    from collections import Counter

    from pseudograd.data.dataset import FOLDS
    from pseudograd.words import listed, shortened

    if encoder.read_as:
        print(encoder.read_as, file=sys.stderr)
    counts = Counter(data.labels.tolist()).most_common()
    classes = [f"{encoder.labels[at]!r} ({count:,})" for at, count in counts]
    print(
        f"target {encoder.target!r}: {len(classes)} classes: {shortened(classes, 'down to')}",
        file=sys.stderr,
    )
    if few := [encoder.labels[at] for at, count in counts if count < FOLDS]:
        print(
            f"warning: fewer than {FOLDS} rows have the label {listed(few)}: that is too few to "
            "learn from or to test on; add rows, or remove these",
            file=sys.stderr,
        )
    for name, alike in encoder.look_alikes().items():
        more = f"; and {len(alike) - 4} more" * (len(alike) > 4)
        kind = "classes" if name == encoder.target else "categories"
        print(
            f"warning: column {name!r} has {'; '.join(map(listed, alike[:4]))}{more}, which differ "
            f"only in whitespace or case and are treated as different {kind}: if they mean the "
            "same, spell them the same way",
            file=sys.stderr,
        )
