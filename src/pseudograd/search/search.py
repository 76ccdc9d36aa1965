"""From a protocol and a ledger to a result."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableSequence
from dataclasses import dataclass

from pseudograd.fleet import Outcome, Trial
from pseudograd.search.comparison import Comparison, compare
from pseudograd.search.ledger import Ledger
from pseudograd.search.protocol import Cell, Protocol

# Trains trials and gives their outcomes in any order. A deque may be added to meanwhile.
Runner = Callable[[MutableSequence[Trial]], Iterable[Outcome]]


@dataclass(frozen=True)
class Progress:
    """Where a search stands after a trial.

    Attributes:
        stage: "sweep", "search" or "retraining".
        round: How many times trials were asked for, from 1.
        done: Trials of this round with an outcome.
        total: All trials of this round.
        outcome: The latest outcome.

    Example:
        >>> trial = Trial("digits", (400,), k=0.5, learning_rate=0.1)
        >>> outcome = Outcome(trial, 0.02, 12, 0.03, 0.1, 27, "patience", ())
        >>> Progress("search", 1, 3, 147, outcome).done
        3

    """

    stage: str
    round: int
    done: int
    total: int
    outcome: Outcome


@dataclass(frozen=True)
class Result:
    """What a finished search has found.

    Attributes:
        cells: All pairs of k and learning rate, with their validation errors.
        best_of_each_k: The best rate of each k.
        chosen: (k*, η*).
        plain: (1, η₁*).
        ties: Pairs as good as the chosen one that lost to the rule for ties.
        open_ks: Each k whose best rate may lie beyond those tried.
        comparison: The choice against k = 1 on the test set.

    Example:
        >>> trial = Trial("digits", (4,), k=1, learning_rate=0.1)
        >>> outcome = Outcome(trial, 0.1, 1, 0.50, 0.3, 1, "limit", (), wrong=(0, 1))
        >>> cell, same = Cell(1.0, 0.1, (0.02, 0.04)), compare([outcome], [outcome])
        >>> Result((cell,), (cell,), cell, cell, (), (), same).comparison.mcnemar_p
        1.0

    """

    cells: tuple[Cell, ...]
    best_of_each_k: tuple[Cell, ...]
    chosen: Cell
    plain: Cell
    ties: tuple[Cell, ...]
    open_ks: tuple[float, ...]
    comparison: Comparison


def advance(protocol: Protocol, ledger: Ledger, run: Runner) -> Iterator[Progress]:
    """Run what the protocol wants until it wants nothing more, each outcome into the ledger first.

    Args:
        protocol: What to search, and how.
        ledger: What is known, and where what comes to be known is written.
        run: Trains trials and gives their outcomes in any order, for example a `Fleet`'s ``run``.

    Raises:
        RuntimeError: If ``run`` gives no outcome of any trial.

    Example:
        >>> import tempfile
        >>> from pseudograd.data import digits
        >>> from pseudograd.fleet import Fleet
        >>> template = Trial("digits", (8,), k=1, learning_rate=1, max_epochs=2)
        >>> protocol = Protocol(template, ks=(1.0,), initial_rate=0.2, repetitions=1, retrainings=1,
        ...                     most_extensions=1)
        >>> ledger = Ledger(tempfile.mkdtemp() + "/ledger.jsonl")
        >>> steps = list(advance(protocol, ledger, Fleet(digits()).run))
        >>> steps[0].stage, steps[-1].stage
        ('search', 'retraining')
        >>> result(protocol, ledger).chosen.k
        1.0

    """
    turn = 0
    while wanted := protocol.wanted(ledger):
        turn += 1
        stage = _stage(protocol, wanted[0])
        known = len(ledger)
        for done, outcome in enumerate(run(wanted), 1):
            ledger.append(outcome)
            yield Progress(stage, turn, done, len(wanted), outcome)
        if len(ledger) == known:
            raise RuntimeError(f"run gave no outcome of {len(wanted)} trials, such as {wanted[0]}")


def result(protocol: Protocol, ledger: Ledger) -> Result:
    """Read the result of a finished search from its ledger.

    Args:
        protocol: What was searched, and how.
        ledger: Everything found.

    Example:
        >>> protocol = Protocol(Trial("digits", (8,), k=1, learning_rate=1), initial_rate=0.2)
        >>> result(protocol, Ledger("nothing-here.jsonl"))
        Traceback (most recent call last):
        ...
        ValueError: the search is not finished: 147 trials have no outcome yet

    """
    if wanted := protocol.wanted(ledger):
        raise ValueError(f"the search is not finished: {len(wanted)} trials have no outcome yet")
    chosen, plain = protocol.chosen(ledger)

    def retrained(cell: Cell) -> list[Outcome]:
        return [ledger[trial] for trial in protocol.retrainings_of(cell.k, cell.learning_rate)]

    return Result(
        cells=tuple(protocol.cells(ledger)),
        best_of_each_k=tuple(protocol.best_of_each_k(ledger)),
        chosen=chosen,
        plain=plain,
        ties=tuple(protocol.ties(ledger)),
        open_ks=tuple(protocol.open_ks(ledger)),
        comparison=compare(retrained(chosen), retrained(plain)),
    )


def _stage(protocol: Protocol, trial: Trial) -> str:
    if trial.split.retrain:
        return "retraining"
    return "sweep" if trial in protocol.sweep else "search"
