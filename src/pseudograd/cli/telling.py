"""Messages of ``pseudograd tune``: resumed trials, results, reasons for stopping."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pseudograd.cli.options import kept

if TYPE_CHECKING:
    from pseudograd.search import Study


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
