"""The results of the reproduction as a document, RESULTS.md, and as a page with the same content.

Both are made from the ledgers and the manifest, and from the benchmark of the fleet, which says
what a plain loop takes; nothing is computed here but means and intervals.
The parts are in `verdicts` (in short, and the claims), `effort` (what was run), `tables`,
`questions` (what a reader would ask next) and `choices`; `document` writes them down.
"""

from __future__ import annotations

import os
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from paper.findings import Reproduction, read
from paper.report.choices import the_choices
from paper.report.document import Figure, markdown, page
from paper.report.effort import what_was_run
from paper.report.figures import standalone
from paper.report.questions import asked_next
from paper.report.tables import the_tables
from paper.report.verdicts import in_short, the_claims
from paper.report.wording import data_of
from paper.rows import UNPRINTED, Experiment

__all__ = ["documents", "is_committed"]


def is_committed(folder: Path) -> bool:
    """Tell whether a folder is a clone's ``paper/results``, whose RESULTS.md is at its root."""
    return folder.resolve().parts[-2:] == ("paper", "results")


def documents(
    experiments: Sequence[Experiment],
    folder: Path,
    *,
    smoke: bool = False,
    selected_by: Sequence[str] = (),
) -> dict[Path, str]:
    """Give the files of the results: RESULTS.md, a page and figures.

    All lie in the folder, but the RESULTS.md of ``paper/results`` lies in the root of the clone.

    Args:
        experiments: What was to be run.
        folder: Of the ledgers and the manifest.
        smoke: Whether they were run in small.
        selected_by: The options of the command that selected the experiments.

    Returns:
        The content of each file, by its path.

    Example:
        >>> import tempfile
        >>> from paper.rows import experiments, rows
        >>> folder = Path(tempfile.mkdtemp()) / "paper" / "results"
        >>> folder.mkdir(parents=True)
        >>> files = documents(experiments(rows("table1", "svhn 1x400*")), folder)
        >>> [path.name for path in files]
        ['RESULTS.md', 'results.html']
        >>> "not run yet" in files[folder.parents[1] / "RESULTS.md"]
        True

    """
    if not folder.is_dir():
        raise ValueError(f"{folder} holds no ledgers: run `python -m paper run all` first")
    found = read(experiments, folder, smoke=smoke)
    # What the paper claims, it claims of what it prints.
    of_paper = {e: finding for e, finding in found.found.items() if e.row.printed}
    printed = replace(found, found=of_paper)
    beside = is_committed(folder)
    root = Path(os.path.normpath(folder / "../..")) if beside else folder
    said = "paper/results" if beside else Path(os.path.relpath(folder)).as_posix()
    title, lead = "Results", _lead(found, smoke)
    parts = [
        in_short(printed),
        what_was_run(found, root, smoke=smoke),
        the_claims(printed, said),
        the_tables(found),
        asked_next(found),
        the_choices(experiments[0].protocol()),
    ]
    figures = [block for part in parts for block in part.blocks if isinstance(block, Figure)]
    options = [*selected_by, *["--smoke"] * smoke, *["--out", said] * (smoke or not beside)]
    command = shlex.join(["python", "-m", "paper", "report", *options])
    if not all(experiment.row.of_paper for experiment in experiments):
        command = f"{__name__}.documents"  # the command knows the paper's rows only
    made = f"*Made from the ledgers in `{said}` by `{command}`. Change that, not this file.*"
    return {
        root / "RESULTS.md": markdown(title, made, lead, parts, "paper/results/" * beside),
        folder / "results.html": page(title, lead, parts),
        **{folder / figure.name: standalone(figure.svg) for figure in figures},
    }


def _lead(found: Reproduction, smoke: bool) -> str:
    """How many rows are finished, and of what data others are missing."""
    unprinted = [e for e in found.found if e.row.table == UNPRINTED]
    own = [e for e in found.found if not e.row.of_paper]
    printed = [e for e in found.found if e.row.printed]
    as_printed = [e for e in printed if e.as_printed]
    others = [e for e in printed if not e.as_printed]

    def finished(some: Sequence[Experiment]) -> str:
        return f"{sum(found.found[e] is not None for e in some)} of {len(some)}"

    kinds = {
        "": as_printed,
        " that are run beside the paper’s (MNIST in [0, 1], and some rows with tanh)": others,
        " that stand in its source as comments": unprinted,
        " that are not the paper’s": own,
    }
    first, *more = [(finished(some), which) for which, some in kinds.items() if some]
    text = (
        "The experiments of Keren, Sabato and Schuller, “Tunable Sensitivity to Large Errors in "
        "Neural Network Training” (AAAI 2017), run again with its whole protocol. k says how much "
        f"large errors count in training; k = 1 is cross-entropy. {first[0]} rows{first[1]} "
    )
    text += "are finished" + "".join(f", and {number}{which}" for number, which in more)
    if unprinted or own:
        text += "; no claim is judged by rows that the paper does not print"
    if smoke:
        text = f"Run in small, to see that all works: the figures mean nothing. {text}"
    text = f"{text}. What contradicts the paper stands beside what confirms it."
    if missing := Counter(data_of(e) for e in (*as_printed, *others) if found.found[e] is None):
        rows = ", ".join(f"{number} of {data}" for data, number in missing.items())
        of = "verdicts, means and intervals are of the finished rows alone"
        if all(found.found[e] for e in as_printed):
            of = "what is said of these is of the finished ones"
        text += f" **Rows that are not finished yet: {rows}.** Until they are, {of}."
    return text
