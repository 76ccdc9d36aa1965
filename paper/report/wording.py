"""How figures, rates and data sets are written, the same in all parts."""

from __future__ import annotations

import math

from paper.findings import Finding
from paper.rows import Experiment
from paper.toy import Spread
from pseudograd.report.figures import signed
from pseudograd.report.summary import fraction
from pseudograd.search import Difference

DASH = "–"  # where there is nothing to write
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
        >>> from paper.rows import rows
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
        >>> mean_and_sd(Spread(1.761, 0.052), ".2f"), mean_and_sd(Spread(math.inf, math.nan), ".2f")
        ('1.76 ± 0.05', 'infinite')

    """
    if not math.isfinite(spread.mean):
        return "infinite"
    sd = "" if math.isnan(spread.sd) else f" ± {spread.sd:{form}}"
    return f"{spread.mean:{form}}{sd}"


def interval(difference: Difference, form: str, times: float = 1) -> str:
    """Write a difference and its interval.

    Args:
        difference: Both; the interval of a single pair, which is NaN, is left out.
        form: How to format them.
        times: What to multiply them by.

    Example:
        >>> interval(Difference(-0.003, -0.005, 0.001), ".2f", 100)
        '−0.30 (−0.50 to +0.10)'

    """
    if not math.isfinite(difference.mean):
        return DASH
    mean = signed(times * difference.mean, form)
    if math.isnan(difference.low):
        return mean
    low, high = signed(times * difference.low, form), signed(times * difference.high, form)
    return f"{mean} ({low} to {high})"


def rates(*values: float) -> str:
    """Write a learning rate, or the lowest and the highest of several.

    Args:
        values: The rates.

    Example:
        >>> rates(0.0625), rates(0.5, 0.0625, 0.25), rates(2.0**-14)
        ('1/16', '1/16 to 1/2', '6.104e-05')

    """
    ends = dict.fromkeys(_rate(end) for end in (min(values), max(values)))
    return " to ".join(ends)  # one if both are written alike


def _rate(rate: float) -> str:
    """A rate, exactly where that is short: most are powers of two."""
    text = fraction(rate)
    digits = sum(map(str.isdigit, text.removeprefix("1/")))
    return text if digits <= 4 else f"{rate:.4g}"


def rates_tried(finding: Finding, k: float) -> str:
    """Write the lowest and the highest rate that a k was tried at.

    Args:
        finding: A finished experiment.
        k: The sensitivity.

    Example:
        >>> from paper.rows import rows
        >>> from pseudograd.search import Cell, Result
        >>> cells = Cell(1.0, 0.25, (0.2,)), Cell(1.0, 0.5, (0.3,)), Cell(0.5, 1.0, (0.3,))
        >>> search = Result(cells, cells[1:], cells[0], cells[0], (), (), None)
        >>> rates_tried(Finding(Experiment(rows("table1")[0]), search, ((), ())), 1.0)
        '1/4 to 1/2'

    """
    return rates(*(cell.learning_rate for cell in finding.result.cells if cell.k == k))
