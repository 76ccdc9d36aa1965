"""``pseudograd toy`` and ``pseudograd curve``: the paper's toy example and its Figure 2."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from pseudograd.cli.options import add_k, add_picture, file, number, whole

if TYPE_CHECKING:
    from pseudograd.cli.options import Commands


def toy(commands: Commands) -> None:
    """``pseudograd toy``: the paper's toy example."""
    about = "run the paper's toy example: how k moves the threshold of a tiny network"
    parser = commands.add_parser("toy", help=about, description=about.capitalize() + ".")
    parser.add_argument("--seed", type=whole(0), default=0, help="seed of all data (%(default)s)")
    parser.add_argument("--runs", type=whole(1), default=10, help="runs for each k (%(default)s)")
    parser.add_argument("--alpha", type=_alpha, default=0.95, help="end of class +1 (%(default)s)")
    add_k(parser)
    parser.add_argument("--csv", type=file, metavar="FILE", help="write all runs to this file")
    add_picture(parser, "toy.png")

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
    add_k(parser)
    add_picture(parser, "curve.png")

    def run(options: argparse.Namespace) -> None:
        from pseudograd.report.pictures import curve_picture
        from pseudograd.reproduce.toy import KS

        curve_picture(options.k or KS, options.picture)
        print(f"picture: {options.picture}")

    parser.set_defaults(run=run)


def _alpha(text: str) -> float:
    if not 0.5 < (value := number(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number between 0.5 and 1, like 0.95")
    return value
