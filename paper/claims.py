"""The paper's claims, and what it takes to confirm them.

The rules were set before any row was run in full, but after sketches of four architectures. Added
later: claim 3 needs a mean below 0, claims 2a and 2c a share above chance, which changed no
verdict; and `can_be_confirmed`.

All p-values but that of the toy example are two-sided. Rows share data sets, and those that differ
in the momentum alone share folds and initial weights too, so they are not independent, and p-values
are too small rather than too large. Where figures can be averaged over the rows of an architecture,
they are.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from paper.findings import Finding, side
from paper.rows import Row
from paper.toy import ToyRun, summarize
from pseudograd.search import DEEP_KS, SHALLOW_KS, Difference, Protocol, paired_difference
from pseudograd.search.comparison import sign_test

LEVEL = 0.05
CONFIRMED, PARTLY, NOT, OPEN = "confirmed", "partly", "not confirmed", "open"
_PERMUTATIONS = 9_999


@dataclass(frozen=True)
class Point:
    """A row as the claims see it.

    Attributes:
        row: The row.
        k: The selected k.
        common_k: The k selected among those that are tried at every depth.
        error: The test error at the selected k minus that at k = 1, in percentage points.
        cross_entropy: The same for the test cross-entropy.

    Example:
        >>> from paper.rows import rows
        >>> Point(rows("table1")[0], 0.125, 0.25, -0.02, 0.089).k
        0.125

    """

    row: Row
    k: float
    common_k: float
    error: float
    cross_entropy: float


def our_points(findings: Iterable[Finding], mnist: tuple[float, float]) -> list[Point]:
    """Give our rows with ReLU, and of MNIST those of one scaling.

    Args:
        findings: Finished experiments.
        mnist: What MNIST's pixels are scaled to.

    Example:
        >>> our_points([], mnist=(-1, 1))
        []

    """
    return [
        Point(
            finding.experiment.row,
            finding.k,
            Protocol.best(c for c in finding.result.best_of_each_k if c.k in DEEP_KS).k,
            # Rounded, so that no difference is none, however it was computed.
            round(100 * finding.result.comparison.error.mean, 9),
            finding.result.comparison.cross_entropy.mean,
        )
        for finding in findings
        if finding.experiment.activation == "relu"
        and (finding.experiment.row.data != "mnist" or finding.experiment.feature_range == mnist)
    ]


def paper_points(rows: Iterable[Row]) -> list[Point]:
    """Give the paper's rows; where it selected k = 1, it prints no figures and there is no change.

    What it would have selected among fewer k is not known, so ``common_k`` is what it selected.

    Args:
        rows: The rows.

    Example:
        >>> from paper.rows import rows
        >>> [round(point.error, 2) for point in paper_points(rows("table3", "svhn*"))]
        [0.0, 0.0]

    """

    def change(selected: float | None, plain: float | None) -> float:
        return 0.0 if selected is None or plain is None else round(selected - plain, 9)

    return [
        Point(
            row,
            row.selected_k,
            row.selected_k,
            change(row.error_selected_pct, row.error_k1_pct),
            change(row.ce_selected, row.ce_k1),
        )
        for row in rows
    ]


@dataclass(frozen=True)
class Judgement:
    """What the figures say to a claim.

    Attributes:
        verdict: "confirmed", "partly" or "not confirmed"; "open" without any row.
        rows: How many rows went in.
        figures: What was found, in words.
        p: The p-value of the claim's test; None for one that is judged by an interval.
        p_of_architectures: The same test's where each architecture counts once, if it was made.

    Example:
        >>> Judgement(CONFIRMED, 33, "below 1 in 32 rows, 1 in 0, above in 1", 8e-9).verdict
        'confirmed'

    """

    verdict: str
    rows: int
    figures: str
    p: float | None = None
    p_of_architectures: float | None = None


@dataclass(frozen=True)
class Claim:
    """A claim of the paper about its rows.

    Attributes:
        name: Short, such as "2a".
        depths: Of which numbers of hidden layers.
        statement: What is claimed.
        test: Which test is used.
        rule: What confirms it, and what does so partly.
        apply: Applies the rule to one row or more.

    Example:
        >>> from paper.rows import rows
        >>> CLAIMS[0].statement
        'One hidden layer: the selected k is below 1.'
        >>> judge(CLAIMS[0], paper_points(rows())).verdict
        'confirmed'

    """

    name: str
    depths: tuple[int, ...]
    statement: str
    test: str
    rule: str
    apply: Callable[[Sequence[Point]], Judgement]


def _signed(value: float) -> str:
    return f"{round(value, 2) + 0.0:+.2f}".replace("-", "−")


def _verdict(confirmed: bool, partly: bool) -> str:
    return CONFIRMED if confirmed else PARTLY if partly else NOT


# --- 1: the toy example --------------------------------------------------------------------------

TOY_STATEMENT = "Toy example: the test error falls as k does."
TOY_TEST = "Page's trend test (one-sided) over runs, each of which has the same data for all k"
TOY_RULE = (
    f"Confirmed: the mean error falls at every step to a smaller k, and p < {LEVEL}. "
    f"Partly: it is lower at the smallest k than at the largest, and p < {LEVEL}."
)


def judge_toy(runs: Sequence[ToyRun]) -> Judgement:
    """Judge whether the toy example's error falls with k.

    Args:
        runs: All runs, each with the same set of k.

    Example:
        >>> runs = [ToyRun(k, run, 0, 0.95, 1, 1.0, 0.0, 0.0, 4 + k + run, 0.3)
        ...         for k in (4.0, 1.0, 0.25) for run in range(5)]
        >>> judge_toy(runs).verdict
        'confirmed'

    """
    from scipy.stats import page_trend_test

    summaries = sorted(summarize(runs), key=lambda summary: summary.k)
    errors: dict[tuple[float, int, int], dict[float, float]] = {}
    for run in runs:
        errors.setdefault((run.alpha, run.seed, run.run), {})[run.k] = run.error_pct
    if len(summaries) < 3 or len(errors) < 2:
        return Judgement(OPEN, 0, "not run yet, or not often enough for the test")
    whole = len(errors) * len(summaries)
    if not len(runs) == sum(map(len, errors.values())) == whole:
        return Judgement(OPEN, 0, "not each run has each k once")
    table = np.array([[of_k[summary.k] for summary in summaries] for of_k in errors.values()])
    p = float(page_trend_test(table, method="asymptotic").pvalue)
    means = [summary.error_pct.mean for summary in summaries]
    falls = all(low < high for low, high in pairwise(means))
    figures = ", ".join(
        f"{mean:.2f}% at k = {summary.k:g}" for mean, summary in zip(means, summaries, strict=True)
    )
    trend = p < LEVEL and means[0] < means[-1]
    return Judgement(_verdict(falls and trend, trend), len(table), figures, p)


# --- 2: the selected k and depth -----------------------------------------------------------------


def _sides(ks: Iterable[float]) -> tuple[int, int, int]:
    """How many k are below 1, 1, and above 1."""
    sides = [side(k) for k in ks]
    return sides.count(-1), sides.count(0), sides.count(1)


def _told(sides: tuple[int, int, int]) -> str:
    return "below 1 in {}, 1 in {}, above 1 in {}".format(*sides)


def _on_one_side(wanted: int, ks: Sequence[float]) -> Callable[[Sequence[Point]], Judgement]:
    sides = [side(k) for k in ks if k != 1]
    chance = sides.count(wanted) / len(sides)

    def test(sides: tuple[int, int, int]) -> tuple[int, int, float]:
        on, off = sides[1 + wanted], sides[1 - wanted]
        return on, off, sign_test(on, off, chance)

    def judge(points: Sequence[Point]) -> Judgement:
        sides = _sides(point.k for point in points)
        on, off, p = test(sides)
        # The test is two-sided: more than half can still be fewer than by chance.
        confirmed = on > len(points) / 2 and on > chance * (on + off) and p < LEVEL
        means = _sides(_mean_k(group) for group in _by_architecture(points))
        p_of_means = test(means)[2]
        figures = (
            f"{_told(sides)}; of architectures, by the geometric mean of k over the rows of each, "
            f"{_told(means)} (p = {p_of_means:.2g})"
        )
        return Judgement(_verdict(confirmed, on > off), len(points), figures, p, p_of_means)

    return judge


def _mean_k(points: Sequence[Point]) -> float:
    """The geometric mean: as far from 1 as the k are on average, up or down."""
    mean: float = 2.0 ** round(statistics.fmean(math.log2(point.k) for point in points), 9)
    return mean


def _near_one(points: Sequence[Point]) -> Judgement:
    from scipy.stats import binomtest

    near = sum(0.5 <= point.k <= 2 for point in points)
    median = 2.0 ** statistics.median(math.log2(point.k) for point in points)
    centred = median == 1
    p = float(binomtest(near, len(points), 3 / 5).pvalue)
    mostly = near > 3 / 5 * len(points) and p < LEVEL
    sides = _told(_sides(point.k for point in points))
    figures = f"{sides}; the median is {median:g}, and 1/2, 1 or 2 in {near}"
    return Judgement(_verdict(centred and mostly, centred or mostly), len(points), figures, p)


def _grows_with_depth(points: Sequence[Point]) -> Judgement:
    def correlation(points: Sequence[Point]) -> tuple[float, float]:
        return rank_correlation(
            [point.row.hidden_layers for point in points],
            [point.common_k for point in points],
            [point.row.data for point in points],
        )

    def vary(points: Sequence[Point]) -> bool:
        return len({point.row.hidden_layers for point in points}) > 1

    if not vary(points):
        return Judgement(OPEN, 0, "rows of one depth only")
    rho, p = correlation(points)
    figures = f"Spearman's ρ = {_signed(rho)}"
    for data in dict.fromkeys(point.row.data for point in points):
        own = [point for point in points if point.row.data == data]
        if vary(own) and len(own) < len(points):
            figures += f", within {data} {_signed(correlation(own)[0])}"
    return Judgement(_verdict(rho > 0 and p < LEVEL, rho > 0), len(points), figures, p)


def rank_correlation(
    first: Sequence[float], second: Sequence[float], groups: Sequence[str]
) -> tuple[float, float]:
    """Give Spearman's ρ and its p-value, by permutations within groups.

    Args:
        first: Some values.
        second: As many others, in the same order.
        groups: Values are exchanged only with others of their group.

    Example:
        >>> rho, p = rank_correlation([1, 3, 5] * 9, [0.25, 1, 2] * 9, ["mnist"] * 27)
        >>> rho, p
        (1.0, 0.0001)

    """
    from scipy.stats import rankdata

    ranks = [rankdata(values) - (len(values) + 1) / 2 for values in (first, second)]
    size = math.sqrt((ranks[0] @ ranks[0]) * (ranks[1] @ ranks[1]))
    if not size:  # one of the two does not vary
        return 0.0, 1.0
    permuted = np.tile(ranks[0], (_PERMUTATIONS, 1))
    generator = np.random.default_rng(0)
    for group in sorted(set(groups)):
        members = np.flatnonzero(np.array(groups) == group)
        permuted[:, members] = generator.permuted(permuted[:, members], axis=1)
    # Ranks are multiples of 1/2, so these sums are exact, and equal ones are seen to be equal.
    found, others = ranks[0] @ ranks[1], permuted @ ranks[1]
    p = (1 + np.count_nonzero(np.abs(others) >= abs(found))) / (1 + _PERMUTATIONS)
    return float(found / size), float(p)


# --- 3 and 6: the test error ---------------------------------------------------------------------


def _lower_error(points: Sequence[Point]) -> Judgement:
    from scipy.stats import wilcoxon

    errors, means = [point.error for point in points], _means_of_architectures(points)
    lower, higher = sum(error < 0 for error in errors), sum(error > 0 for error in errors)
    mean = statistics.fmean(means)
    p = float(wilcoxon(means, method="approx").pvalue) if any(means) else 1.0
    figures = (
        f"lower in {lower}, equal in {len(points) - lower - higher}, higher in {higher}; mean "
        f"{_signed(mean)} percentage points, over single rows "
        f"{_signed(statistics.fmean(errors))}"
    )
    # More rows can be lower although the mean, and what the test finds, is higher.
    verdict = _verdict(lower > higher and mean < 0 and p < LEVEL, lower > higher)
    return Judgement(verdict, len(points), figures, p)


def pooled(points: Sequence[Point]) -> Difference:
    """Give the mean over rows of the difference in test error, with its 95% interval.

    Each row is one number, the mean of its pairs of networks; the interval is Student's over rows.

    Args:
        points: The rows.

    Example:
        >>> from paper.rows import rows
        >>> round(pooled(paper_points(rows("table1"))).mean, 2)
        -0.51

    """
    return paired_difference([point.error for point in points], [0.0] * len(points))


def pooled_by_architecture(points: Sequence[Point]) -> Difference:
    """Give the same with the rows of an architecture, which differ in the momentum, averaged first.

    Args:
        points: The rows.

    Example:
        >>> from paper.rows import rows
        >>> round(pooled_by_architecture(paper_points(rows())).mean, 2)
        -0.39

    """
    means = _means_of_architectures(points)
    return paired_difference(means, [0.0] * len(means))


def _means_of_architectures(points: Sequence[Point]) -> list[float]:
    groups = _by_architecture(points)
    return [round(statistics.fmean(point.error for point in group), 9) for group in groups]


def _by_architecture(points: Iterable[Point]) -> list[list[Point]]:
    """The rows of each, which differ in the momentum."""
    groups: dict[tuple[str, int, int], list[Point]] = {}
    for point in points:
        architecture = (point.row.data, point.row.hidden_layers, point.row.width)
        groups.setdefault(architecture, []).append(point)
    return list(groups.values())


def _with_interval(mean: Difference) -> str:
    if math.isnan(mean.low):  # of a single one
        return _signed(mean.mean)
    return f"{_signed(mean.mean)} ({_signed(mean.low)} to {_signed(mean.high)})"


def _pooled_lower(points: Sequence[Point]) -> Judgement:
    rows, architectures = pooled(points), pooled_by_architecture(points)
    figures = (
        f"mean {_with_interval(architectures)}, in percentage points; over single rows "
        f"{_with_interval(rows)}"
    )
    verdict = _verdict(architectures.high < 0, architectures.mean < 0)
    return Judgement(verdict, len(points), figures)


# --- 4 and 5: the cross-entropy ------------------------------------------------------------------


def _better_and_worse(points: Iterable[Point]) -> tuple[int, int]:
    changes = [point.cross_entropy for point in points if point.k != 1]
    return sum(change < 0 for change in changes), sum(change > 0 for change in changes)


def _ones(points: Iterable[Point]) -> int:
    return sum(point.k == 1 for point in points)


def _worse_cross_entropy(points: Sequence[Point]) -> Judgement:
    better, worse = _better_and_worse(points)
    p = sign_test(worse, better)
    figures = f"worse in {worse}, better in {better}, k = 1 in {_ones(points)}"
    verdict = _verdict(worse > better and p < LEVEL, worse > better)
    return Judgement(verdict, len(points), figures, p)


def _better_cross_entropy(points: Sequence[Point]) -> Judgement:
    better, worse = _better_and_worse(points)
    above = _better_and_worse(point for point in points if point.k > 1)
    p = sign_test(better, worse)
    p_above = sign_test(*above)
    figures = (
        f"better in {better}, worse in {worse}, k = 1 in {_ones(points)}; where k > 1, better "
        f"in {above[0]}, worse in {above[1]} (p = {p_above:.2g})"
    )
    confirmed = better > worse and p < LEVEL
    partly = above[0] > above[1] and p_above < LEVEL
    return Judgement(_verdict(confirmed, partly), len(points), figures, p)


# --- all of them ---------------------------------------------------------------------------------

_ONE_SIDE = (
    "Confirmed: so in more than half of all rows, and in more of those tested than by chance with "
    f"p < {LEVEL}. Partly: so in more rows than the opposite."
)
_SIGN_TEST = "exact sign test, rows with k = 1 left out"
_ARCHITECTURES = (
    "architectures (a data set and its layers; the rows of each, which differ in the momentum, "
    "averaged)"
)

CLAIMS = (
    Claim(
        "2a",
        (1,),
        "One hidden layer: the selected k is below 1.",
        f"{_SIGN_TEST}, against the four of the six other k that are below 1",
        _ONE_SIDE,
        _on_one_side(-1, SHALLOW_KS),
    ),
    Claim(
        "2b",
        (3,),
        "Three hidden layers: the selected k is near 1.",
        "exact binomial test of the share of k = 1/2, 1 or 2 against three of the five k tried",
        f"Confirmed: the median is k = 1, and 1/2, 1 or 2 in more than 3/5 of the rows with "
        f"p < {LEVEL}. Partly: one of the two.",
        _near_one,
    ),
    Claim(
        "2c",
        (5,),
        "Five hidden layers: the selected k is above 1.",
        f"{_SIGN_TEST}, against the two of the four other k that are above 1",
        _ONE_SIDE,
        _on_one_side(1, DEEP_KS),
    ),
    Claim(
        "2d",
        (1, 3, 5),
        "The selected k grows with depth.",
        f"Spearman's rank correlation, {_PERMUTATIONS:,} permutations of depths within data sets; "
        "of k that are tried at every depth, 1/4 to 4, the best is taken (of the paper's rows only "
        "the best of all is known)",
        f"Confirmed: ρ > 0 and p < {LEVEL}. Partly: ρ > 0.",
        _grows_with_depth,
    ),
    Claim(
        "3",
        (1, 3, 5),
        "The selected k has a lower test error than k = 1.",
        f"Wilcoxon's signed-rank test (normal approximation) over {_ARCHITECTURES}; where k = 1 "
        "was selected the difference is 0, and the test leaves out architectures with 0",
        f"Confirmed: lower in more rows than higher, p < {LEVEL} over architectures, and the mean "
        "over them is below 0. Partly: lower in more rows than higher.",
        _lower_error,
    ),
    Claim(
        "4",
        (1,),
        "One hidden layer: the test cross-entropy is worse at the selected k.",
        _SIGN_TEST,
        f"Confirmed: worse in more rows than better, and p < {LEVEL}. Partly: worse in more rows.",
        _worse_cross_entropy,
    ),
    Claim(
        "5",
        (3, 5),
        "Three and five hidden layers: the test cross-entropy is better at the selected k.",
        _SIGN_TEST,
        f"Confirmed: better in more rows than worse, and p < {LEVEL}. Partly: this holds for the "
        "rows with k > 1.",
        _better_cross_entropy,
    ),
    Claim(
        "6",
        (1, 3, 5),
        "Pooled over all rows, the test error is lower at the selected k.",
        f"mean over {_ARCHITECTURES}, with Student's 95% interval; where k = 1 was selected the "
        "difference is 0, and it counts",
        "Confirmed: the interval lies below 0. Partly: the mean does.",
        _pooled_lower,
    ),
)


def judge(claim: Claim, points: Sequence[Point]) -> Judgement:
    """Judge a claim; it is open if there is no row for it.

    Args:
        claim: The claim.
        points: All rows.

    Example:
        >>> judge(CLAIMS[0], []).verdict
        'open'

    """
    points = [point for point in points if point.row.hidden_layers in claim.depths]
    return claim.apply(points) if points else Judgement(OPEN, 0, "no row is finished")


def can_be_confirmed(claim: Claim, points: Iterable[Point]) -> bool:
    """Tell whether there are rows enough to confirm a claim, if only all were as the paper claims.

    Args:
        claim: The claim.
        points: All rows; what came of them does not matter.

    Example:
        >>> from paper.rows import rows
        >>> can_be_confirmed(CLAIMS[0], paper_points(rows("table1", "svhn*")))  # three of them
        False

    """
    rows = [point.row for point in points if point.row.hidden_layers in claim.depths]

    def wished(row: Row, middle: float) -> Point:
        k = {1: 0.25, 3: middle, 5: 4.0}[row.hidden_layers]
        return Point(row, k, k, error=-1.0, cross_entropy=1.0 if row.hidden_layers == 1 else -1.0)

    # With three hidden layers k should be near 1, but where it is 1 there is nothing to compare.
    return any(
        judge(claim, [wished(row, middle) for row in rows]).verdict == CONFIRMED
        for middle in (1.0, 2.0)
    )
