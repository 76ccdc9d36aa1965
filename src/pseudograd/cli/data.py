"""``pseudograd data``: download and list the benchmark sets."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from pseudograd.cli.options import add_command

if TYPE_CHECKING:
    from pseudograd.cli.options import Commands
    from pseudograd.data import Dataset


def data(commands: Commands) -> None:
    """``pseudograd data fetch`` and ``pseudograd data list``."""
    from pseudograd.data.benchmarks import BENCHMARKS

    about = "download benchmark sets, and list those you have"
    parser = add_command(commands, "data", about)
    actions = parser.add_subparsers(metavar="ACTION", required=True)

    about = "download missing sets, check them, and cache them as plain arrays"
    fetching = add_command(actions, "fetch", about)
    names = ", ".join(BENCHMARKS)
    fetching.add_argument("names", nargs="+", choices=[*BENCHMARKS], metavar="NAME", help=names)

    about = "list the sets you have, with their hashes"
    listing = add_command(actions, "list", about)

    for action in (fetching, listing):
        action.add_argument(
            "--data-dir",
            type=Path,
            metavar="DIR",
            help="folder of all sets, which may already contain official files (PSEUDOGRAD_DATA, "
            "or else the user's cache directory)",
        )

    def run_fetch(options: argparse.Namespace) -> None:
        from pseudograd.data import fetch

        for name in options.names:
            print(_row(fetch(name, options.data_dir, progress=True)))

    def run_list(options: argparse.Namespace) -> None:
        from pseudograd.data import data_folder, load

        print(f"folder: {data_folder(options.data_dir)}")
        print(f"{'set':14}{'train + test':>16}{'features':>10}{'MB':>6}  {'content':12}SHA-256")
        for name in BENCHMARKS:
            try:
                print(_row(load(name, options.data_dir)))
            except FileNotFoundError:
                print(f"{name:14}not found")
            except ValueError as problem:
                print(f"{name:14}{problem}")

    fetching.set_defaults(run=run_fetch)
    listing.set_defaults(run=run_list)


def _row(data: Dataset) -> str:
    from pseudograd.data import variant

    sha256 = data.sha256
    # Unlisted data are loaded only from files with the official checksums.
    called = variant(data.name, sha256) or "official"
    examples = f"{data.train_size} + {data.test_size}"
    size = f"{data.features.shape[1]:10}{data.features.nbytes / 1e6:6.0f}"
    return f"{data.name:14}{examples:>16}{size}  {called:12}{sha256}"
