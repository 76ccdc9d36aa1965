"""How figures, rates and data sets are written, the same in all parts."""

from __future__ import annotations

from pseudograd import words
from pseudograd.reproduce.findings import Finding
from pseudograd.reproduce.rows import Experiment
from pseudograd.reproduce.toy import Spread
from pseudograd.words import DASH as DASH  # TODO(merge): these three stand in words.py
from pseudograd.words import interval as interval
from pseudograd.words import rates as rates

STATED, OTHER = (-1.0, 1.0), (0.0, 1.0)  # MNIST as the paper says, and as fits its rates
# What § says of a row, as `may_be_the_rate` finds it.
MARKED = (
    "the search did not try k = 1 at the selected k’s rate, and k = 1 does better there than at "
    "its own, or has yet to be tried there"
)


def data_of(experiment: Experiment) -> str:
    """Name the data set, and what is changed if it is run otherwise than the paper says.

    Args:
        experiment: The experiment.

    Example:
        >>> from pseudograd.reproduce.rows import rows
        >>> data_of(Experiment(rows("table1", "mnist*")[0], feature_range=(0.0, 1.0)))
        'mnist [0,1]'

    """
    data, _, *changes = experiment.network.split()
    return " ".join([data, *changes])


def mean_and_sd(spread: Spread, form: str) -> str:
    """Write a mean and its standard deviation.

    Args:
        spread: Both; that of a single number, which is NaN, is left out.
        form: How to format them.

    Example:
        >>> mean_and_sd(Spread(1.761, 0.052), ".2f")
        '1.76 ± 0.05'

    """
    return words.mean_and_sd(spread.mean, spread.sd, form)  # TODO(merge): call it directly


def rates_tried(finding: Finding, k: float) -> str:
    """Write the lowest and the highest rate that a k was tried at.

    Args:
        finding: A finished experiment.
        k: The sensitivity.

    Example:
        >>> from pseudograd.reproduce.rows import rows
        >>> from pseudograd.search import Cell, Result
        >>> cells = Cell(1.0, 0.25, (0.2,)), Cell(1.0, 0.5, (0.3,)), Cell(0.5, 1.0, (0.3,))
        >>> search = Result(cells, cells[1:], cells[0], cells[0], (), (), None)
        >>> rates_tried(Finding(Experiment(rows("table1")[0]), search, ((), ())), 1.0)
        '1/4 to 1/2'

    """
    return rates(*(cell.learning_rate for cell in finding.result.cells if cell.k == k))
