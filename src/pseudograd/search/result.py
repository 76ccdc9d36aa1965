"""The result of a finished study."""

from __future__ import annotations

from dataclasses import dataclass

from pseudograd.fleet import Outcome, Ramp
from pseudograd.search.comparison import Comparison, compare
from pseudograd.search.protocol import Cell, Outcomes, Protocol


@dataclass(frozen=True)
class Result:
    """The result of a finished study.

    Attributes:
        cells: All pairs of k and learning rate, with their validation errors.
        best_of_each_k: The best rate of each k.
        chosen: (k*, η*).
        plain: (1, η₁*).
        ties: Pairs that are as good as the chosen one but lost the tie-break.
        open_ks: Each k whose best rate may lie outside the range that was tried.
        comparison: The choice against k = 1 on the test set.
        parameter: What k is called; the baseline, ``plain.k``, may be another value than 1.

    """

    cells: tuple[Cell, ...]
    best_of_each_k: tuple[Cell, ...]
    chosen: Cell
    plain: Cell
    ties: tuple[Cell, ...]
    open_ks: tuple[float | Ramp, ...]
    comparison: Comparison
    parameter: str = "k"


def result(protocol: Protocol, outcomes: Outcomes, positions: int = 1) -> Result:
    """Return the result of a finished search.

    Args:
        protocol: The protocol of the search.
        outcomes: The outcomes of all its trials.
        positions: The number of labels per test example.

    """
    if not protocol.retrainings:
        raise ValueError("a study with retrainings=0 compares nothing: read study.best")
    if wanted := protocol.wanted(outcomes):
        raise ValueError(
            f"the study is not finished: {len(wanted)} trials have no outcome yet; "
            "run it, or tell their outcomes"
        )
    chosen, plain = protocol.chosen(outcomes)

    def retrained(cell: Cell) -> list[Outcome]:
        return [outcomes[trial] for trial in protocol.retrainings_of(cell.k, cell.learning_rate)]

    return Result(
        cells=tuple(protocol.cells(outcomes)),
        best_of_each_k=tuple(protocol.best_of_each_k(outcomes)),
        chosen=chosen,
        plain=plain,
        ties=tuple(protocol.ties(outcomes)),
        open_ks=tuple(protocol.open_ks(outcomes)),
        comparison=compare(retrained(chosen), retrained(plain), positions),
        parameter=protocol.parameter,
    )
