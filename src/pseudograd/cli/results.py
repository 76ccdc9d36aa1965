"""``pseudograd predict``, ``report`` and ``runs``: the results of searches."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pseudograd.cli.options import add_command, is_same_file, number_or_ramp, tell_if_trained_on

if TYPE_CHECKING:
    from pandas import DataFrame

    from pseudograd.cli.options import Commands
    from pseudograd.data import Encoder
    from pseudograd.search import Study

MIXED = "mixed"  # in place of k: an ensemble across several values of k


def predict(commands: Commands) -> None:
    """``pseudograd predict``: apply the model of a run to new rows."""
    about = "apply the model of a run to new rows: labels and probabilities as CSV"
    parser = add_command(commands, "predict", about)
    parser.add_argument("run_folder", type=Path, metavar="RUN", help="folder of the run")
    parser.add_argument(
        "file",
        metavar="FILE",
        help="new rows, such as a .csv or .parquet table, or - for standard input; for your own "
        "network an .npz file, an image or a folder of images. If they have labels, the error "
        "is printed",
    )
    parser.add_argument(
        "--k",
        type=lambda text: text if text == MIXED else number_or_ramp(text),
        metavar="K",
        help="apply the model with this k instead of the chosen one: 1, or, with --ensemble and "
        "your own network, mixed",
    )
    parser.add_argument(
        "--keep",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME",
        help="columns of FILE to copy into the predictions, such as an id",
    )
    parser.add_argument(
        "--ensemble",
        action="store_true",
        help="average the final networks of --protocol paper or --network",
    )
    parser.add_argument(
        "--network",
        metavar="MODULE:FUNCTION",
        help="the function that returns your own network, if it has moved",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write here instead of printing")
    parser.set_defaults(run=_run_predict)


def _run_predict(options: argparse.Namespace) -> None:
    from pseudograd.fleet.recipe import ModuleRecipe
    from pseudograd.search import Study

    if options.out and is_same_file(options.out, options.file):
        raise ValueError(f"--out {options.out} is the input file itself: name another")
    if options.out and options.out.suffix.lower() in (".parquet", ".npz"):
        raise ValueError(f"--out {options.out} must end in .csv: predictions are CSV")
    run = Study.open(options.run_folder)
    if isinstance(run.protocol.recipe, ModuleRecipe):
        from pseudograd.cli.networks import predict_network

        table = predict_network(options, run, run.protocol.recipe)
    else:
        table = _predicted(options, run)
    if options.out:
        _write(options.out, table.to_csv(index=False, float_format="%.6g"))
        print(f"{len(table)} predictions: {options.out}")
    else:
        table.to_csv(sys.stdout, index=False, float_format="%.6g")


def _predicted(options: argparse.Namespace, run: Study) -> DataFrame:
    """Return the predictions of the model of a table."""
    import pandas as pd
    import torch

    from pseudograd.data import read_rows
    from pseudograd.data.survey import new_categories, out_of_range
    from pseudograd.search import Bagging, load_model

    if options.network is not None:
        raise ValueError("--network must be left out: this run did not train your own network")
    if options.k == MIXED:
        raise ValueError("--k mixed must be left out: it is only for your own networks")
    ensemble = options.ensemble
    if ensemble and isinstance(run.protocol, Bagging):
        print("the model of this run is already an ensemble", file=sys.stderr)
        ensemble = False
    model, encoder = load_model(options.run_folder, options.k, ensemble=ensemble)
    names = [f"p({label})" for label in encoder.labels]
    keep = [*dict.fromkeys(options.keep)]
    for name in keep:
        if name in (encoder.target, *names):
            raise ValueError(f"--keep names {name!r}, a column of the predictions: leave it out")
    frame, kept = read_rows(options.file, encoder, keep)
    probabilities = model.probabilities(torch.from_numpy(encoder.transform(frame)))
    for line in new_categories(frame, encoder) + out_of_range(frame, encoder):
        print(line, file=sys.stderr)
    table = pd.DataFrame(probabilities.numpy(), columns=names)
    labels = [encoder.labels[at] for at in probabilities.argmax(1).tolist()]
    table.insert(0, encoder.target, labels)
    if count := _tell_error(frame, encoder, labels):
        tell_if_trained_on(run, options.file, count)
    if kept is not None:
        # `float_format` does not round objects.
        table = pd.concat([kept.astype(object), table], axis=1)
    return table


def _tell_error(frame: DataFrame, encoder: Encoder, predicted: list[Any]) -> int:
    """Print the error on the rows that have a label; return how many have."""
    import numpy as np

    from pseudograd.data.columns import labels_in, unlabelled
    from pseudograd.search.measures import are_unequal, balanced_error
    from pseudograd.words import counted, listed, percent

    if encoder.target not in frame.columns:
        return 0
    known = ~unlabelled(frame[encoder.target])
    if not known.any():
        return 0
    try:
        places, found = labels_in(encoder.target, frame[encoder.target][known].infer_objects())
    except ValueError as problem:
        print(f"no error is computed: {problem}", file=sys.stderr)
        return 0
    if unseen := [label for label in found if label not in encoder.labels]:
        print(
            f"target {encoder.target!r} has labels that were never seen in training, "
            f"{listed(unseen)}; they count as errors",
            file=sys.stderr,
        )
    # The labels in this file first, then the remaining ones of the model.
    codes = {label: at for at, label in enumerate(dict.fromkeys([*found, *encoder.labels]))}
    guessed = np.array([codes[label] for label in predicted])[known]
    wrong, count = int((guessed != places).sum()), len(places)
    said = f"error {percent(wrong / count)}% ({wrong:,} of {counted(count, 'row')} with a label)"
    if len(found) > 1 and are_unequal(np.bincount(places)):
        said += f", balanced error {percent(balanced_error(guessed, places))}%"
    print(said, file=sys.stderr)
    return count


def _write(path: Path, text: str) -> None:
    """Write a file atomically; write directly to a pipe or device."""
    from pseudograd.files import write_whole, writing

    with writing(path):
        if path.exists() and not path.is_file():
            with path.open("w", encoding="utf-8") as out:
                out.write(text)
        else:
            write_whole(path.resolve(), text)  # the target of a symlink, not the link


def report(commands: Commands) -> None:
    """``pseudograd report``: regenerate the page of a run."""
    about = "regenerate the page of a run from its ledger"
    parser = add_command(commands, "report", about)
    parser.add_argument("run_folder", type=Path, metavar="RUN", help="folder of the run")

    def run(options: argparse.Namespace) -> None:
        from pseudograd.search import Study
        from pseudograd.search.display import tell_set_aside

        study = Study.open(options.run_folder)
        tell_set_aside(study.ledger)
        print(f"page: {study.report()}")

    parser.set_defaults(run=run)


def runs(commands: Commands) -> None:
    """``pseudograd runs``: list runs."""
    about = "list the runs in a folder"
    parser = add_command(commands, "runs", about)
    parser.add_argument(
        "folder",
        nargs="?",
        type=Path,
        default=Path("runs"),
        metavar="FOLDER",
        help="the folder (%(default)s)",
    )
    parser.set_defaults(run=_run_runs)


def _run_runs(options: argparse.Namespace) -> int:
    """List the runs; return 1 if one could not be read."""
    from pseudograd.report.summary import RUNS_HEAD, line_of_run
    from pseudograd.search import Study

    if not options.folder.is_dir():
        raise FileNotFoundError(f"{options.folder} is not a folder: name one that contains runs")
    found = sorted(path.parent for path in options.folder.glob("*/run.json"))
    if not found:
        print(f"no runs in {options.folder}")
        return 0
    print(RUNS_HEAD)
    status = 0
    for folder in found:
        try:
            print(line_of_run(Study.open(folder)))
        except (ValueError, OSError) as problem:
            print(f"pseudograd: {problem}", file=sys.stderr)
            status = 1
    return status
