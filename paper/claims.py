"""The paper's claims and the rules that judge them; RESULTS.md.jinja states both in words.

The rules were set before any row was run in full, but after preliminary runs of four
architectures. Added later: claim 3 needs a mean below 0, claims 2a and 2c a share above chance,
which changed no verdict; and `can_be_confirmed`.

All p-values except the toy example's are two-sided. Rows share data sets, and rows that differ only
in momentum also share folds and initial weights, so they are not independent and p-values are too
small rather than too large. Where figures can be averaged over the rows of an architecture, they
are.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from paper.findings import Finding, side
from paper.rows import Row
from paper.toy import ToyRun, summarize
from pseudograd.fleet.ramp import level
from pseudograd.search import DEEP_KS, SHALLOW_KS, Difference, Protocol, paired_difference
from pseudograd.search.comparison import sign_test

LEVEL = 0.05
CONFIRMED, PARTLY, NOT, OPEN = "confirmed", "partly", "not confirmed", "open"
PERMUTATIONS = 9_999


@dataclass(frozen=True)
class Point:
    """The figures of a row that claims are judged by.

    Attributes:
        row: The row.
        k: The selected k.
        common_k: The k selected among those tried at every depth.
        error: The test error at the selected k minus that at k = 1, in percentage points.
        cross_entropy: The same for the test cross-entropy.

    """

    row: Row
    k: float
    common_k: float
    error: float
    cross_entropy: float


def our_points(findings: Iterable[Finding], mnist: tuple[float, float]) -> list[Point]:
    """Return our rows with ReLU, those of MNIST in one scaling."""
    return [
        Point(
            finding.experiment.row,
            finding.k,
            level(Protocol.best(c for c in finding.result.best_of_each_k if c.k in DEEP_KS).k),
            # Rounded, so that a difference of rounding errors is 0.
            round(100 * finding.result.comparison.error.mean, 9),
            finding.result.comparison.cross_entropy.mean,
        )
        for finding in findings
        if finding.experiment.activation == "relu"
        and (finding.experiment.row.data != "mnist" or finding.experiment.feature_range == mnist)
    ]


def paper_points(rows: Iterable[Row]) -> list[Point]:
    """Return the paper's rows; where it selected k = 1, it prints no figures and nothing changes.

    Its selection among fewer k is unknown, so ``common_k`` is the k that it selected.
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
    """The verdict on a claim, with its numbers.

    Attributes:
        verdict: "confirmed", "partly" or "not confirmed"; "open" without any row.
        rows: The number of rows.
        p: The p-value of the claim's test; None for a claim judged by an interval.
        numbers: The figures, by the names that the template uses.
        reason: Why the claim is open, if it is.

    """

    verdict: str
    rows: int
    p: float | None = None
    numbers: Mapping[str, Any] = field(default_factory=dict)
    reason: str = ""


@dataclass(frozen=True)
class Claim:
    """A claim about rows of some depths, and the rule that judges one row or more.

    Example:
        >>> from paper.rows import rows
        >>> judge(CLAIMS[0], paper_points(rows())).verdict  # 2a: k < 1 with one hidden layer
        'confirmed'

    """

    name: str
    depths: tuple[int, ...]
    apply: Callable[[Sequence[Point]], Judgement]


def _verdict(confirmed: bool, partly: bool) -> str:
    return CONFIRMED if confirmed else PARTLY if partly else NOT


# --- 1: the toy example --------------------------------------------------------------------------


def judge_toy(runs: Sequence[ToyRun]) -> Judgement:
    """Judge whether the toy example's error falls with k, by Page's trend test over runs."""
    from scipy.stats import page_trend_test

    summaries = sorted(summarize(runs), key=lambda summary: summary.k)
    errors: dict[tuple[float, int, int], dict[float, float]] = {}
    for run in runs:
        errors.setdefault((run.alpha, run.seed, run.run), {})[run.k] = run.error_pct
    if len(summaries) < 3 or len(errors) < 2:
        return Judgement(OPEN, 0, reason="not run yet, or not often enough for the test")
    whole = len(errors) * len(summaries)
    if not len(runs) == sum(map(len, errors.values())) == whole:
        return Judgement(OPEN, 0, reason="not every run has each k once")
    table = np.array([[of_k[summary.k] for summary in summaries] for of_k in errors.values()])
    p = float(page_trend_test(table, method="asymptotic").pvalue)
    means = {summary.k: summary.error_pct.mean for summary in summaries}
    lowest, *_, highest = means.values()
    falls = all(low < high for low, high in pairwise(means.values()))
    trend = p < LEVEL and lowest < highest
    return Judgement(_verdict(falls and trend, trend), len(table), p, {"errors": means})


# --- 2: the selected k and depth -----------------------------------------------------------------


def sides(ks: Iterable[float]) -> tuple[int, int, int]:
    """Count the k below 1, equal to 1, and above 1.

    >>> sides([0.5, 0.25, 1.0])
    (2, 1, 0)
    """
    found = [side(k) for k in ks]
    return found.count(-1), found.count(0), found.count(1)


def _on_one_side(wanted: int, ks: Sequence[float]) -> Callable[[Sequence[Point]], Judgement]:
    chance = sum(side(k) == wanted for k in ks) / sum(k != 1 for k in ks)

    def test(counts: tuple[int, int, int]) -> tuple[int, int, float]:
        on, off = counts[1 + wanted], counts[1 - wanted]
        return on, off, sign_test(on, off, chance)

    def judge(points: Sequence[Point]) -> Judgement:
        of_rows = sides(point.k for point in points)
        of_architectures = sides(_mean_k(group) for group in _by_architecture(points))
        on, off, p = test(of_rows)
        # The test is two-sided: more than half can still be fewer than by chance.
        confirmed = on > len(points) / 2 and on > chance * (on + off) and p < LEVEL
        numbers = {
            "sides": of_rows,
            "architectures": of_architectures,
            "p_of_architectures": test(of_architectures)[2],
        }
        return Judgement(_verdict(confirmed, on > off), len(points), p, numbers)

    return judge


def _mean_k(points: Sequence[Point]) -> float:
    """Return the geometric mean, in which k and 1/k cancel."""
    mean: float = 2.0 ** round(statistics.fmean(math.log2(point.k) for point in points), 9)
    return mean


def _near_one(points: Sequence[Point]) -> Judgement:
    from scipy.stats import binomtest

    near = sum(0.5 <= point.k <= 2 for point in points)
    median = 2.0 ** statistics.median(math.log2(point.k) for point in points)
    p = float(binomtest(near, len(points), 3 / 5).pvalue)
    centred, mostly = median == 1, near > 3 / 5 * len(points) and p < LEVEL
    numbers = {"sides": sides(point.k for point in points), "median": median, "near": near}
    return Judgement(_verdict(centred and mostly, centred or mostly), len(points), p, numbers)


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
        return Judgement(OPEN, 0, reason="rows of one depth only")
    rho, p = correlation(points)
    within = {}
    for data in dict.fromkeys(point.row.data for point in points):
        own = [point for point in points if point.row.data == data]
        if vary(own) and len(own) < len(points):
            within[data] = correlation(own)[0]
    verdict = _verdict(rho > 0 and p < LEVEL, rho > 0)
    return Judgement(verdict, len(points), p, {"rho": rho, "within": within})


def rank_correlation(
    first: Sequence[float], second: Sequence[float], groups: Sequence[str]
) -> tuple[float, float]:
    """Return Spearman's ρ and its p-value by permutations within groups.

    SciPy's permutation test cannot permute within groups.

    Example:
        >>> rank_correlation([1, 3, 5] * 9, [0.25, 1, 2] * 9, ["mnist"] * 27)
        (1.0, 0.0001)

    """
    from scipy.stats import rankdata

    ranks = [rankdata(values) - (len(values) + 1) / 2 for values in (first, second)]
    size = math.sqrt((ranks[0] @ ranks[0]) * (ranks[1] @ ranks[1]))
    if not size:  # one of them is constant
        return 0.0, 1.0
    permuted = np.tile(ranks[0], (PERMUTATIONS, 1))
    generator = np.random.default_rng(0)
    for group in sorted(set(groups)):
        members = np.flatnonzero(np.array(groups) == group)
        permuted[:, members] = generator.permuted(permuted[:, members], axis=1)
    # Ranks are multiples of 1/2, so these sums are exact and ties are seen.
    found, others = ranks[0] @ ranks[1], permuted @ ranks[1]
    p = (1 + np.count_nonzero(np.abs(others) >= abs(found))) / (1 + PERMUTATIONS)
    return float(found / size), float(p)


# --- 3 and 6: the test error ---------------------------------------------------------------------


def _lower_error(points: Sequence[Point]) -> Judgement:
    from scipy.stats import wilcoxon

    errors, means = [point.error for point in points], _means_of_architectures(points)
    lower, higher = sum(error < 0 for error in errors), sum(error > 0 for error in errors)
    mean = statistics.fmean(means)
    p = float(wilcoxon(means, method="approx").pvalue) if any(means) else 1.0
    numbers = {
        "lower": lower,
        "equal": len(points) - lower - higher,
        "higher": higher,
        "mean": mean,
        "mean_of_rows": statistics.fmean(errors),
    }
    # Most rows can be lower even if the mean is higher and the test significant.
    verdict = _verdict(lower > higher and mean < 0 and p < LEVEL, lower > higher)
    return Judgement(verdict, len(points), p, numbers)


def pooled(points: Sequence[Point]) -> Difference:
    """Return the mean change of the test error over rows, with Student's 95% interval."""
    return paired_difference([point.error for point in points], [0.0] * len(points))


def pooled_by_architecture(points: Sequence[Point]) -> Difference:
    """Return the same over architectures: rows that differ only in momentum are averaged first."""
    means = _means_of_architectures(points)
    return paired_difference(means, [0.0] * len(means))


def _means_of_architectures(points: Sequence[Point]) -> list[float]:
    groups = _by_architecture(points)
    return [round(statistics.fmean(point.error for point in group), 9) for group in groups]


def _by_architecture(points: Iterable[Point]) -> list[list[Point]]:
    groups: dict[tuple[str, int, int], list[Point]] = {}
    for point in points:
        architecture = (point.row.data, point.row.hidden_layers, point.row.width)
        groups.setdefault(architecture, []).append(point)
    return list(groups.values())


def _pooled_lower(points: Sequence[Point]) -> Judgement:
    mean = pooled_by_architecture(points)
    numbers = {"mean": mean, "mean_of_rows": pooled(points)}
    return Judgement(_verdict(mean.high < 0, mean.mean < 0), len(points), None, numbers)


# --- 4 and 5: the cross-entropy ------------------------------------------------------------------


def _better_and_worse(points: Iterable[Point]) -> tuple[int, int]:
    changes = [point.cross_entropy for point in points if point.k != 1]
    return sum(change < 0 for change in changes), sum(change > 0 for change in changes)


def _worse_cross_entropy(points: Sequence[Point]) -> Judgement:
    better, worse = _better_and_worse(points)
    p = sign_test(worse, better)
    numbers = {"worse": worse, "better": better, "ones": sum(point.k == 1 for point in points)}
    return Judgement(
        _verdict(worse > better and p < LEVEL, worse > better), len(points), p, numbers
    )


def _better_cross_entropy(points: Sequence[Point]) -> Judgement:
    better, worse = _better_and_worse(points)
    above = _better_and_worse(point for point in points if point.k > 1)
    p, p_above = sign_test(better, worse), sign_test(*above)
    numbers = {
        "better": better,
        "worse": worse,
        "ones": sum(point.k == 1 for point in points),
        "above": above,
        "p_above": p_above,
    }
    confirmed = better > worse and p < LEVEL
    partly = above[0] > above[1] and p_above < LEVEL
    return Judgement(_verdict(confirmed, partly), len(points), p, numbers)


# --- all of them ---------------------------------------------------------------------------------

CLAIMS = (
    Claim("2a", (1,), _on_one_side(-1, SHALLOW_KS)),
    Claim("2b", (3,), _near_one),
    Claim("2c", (5,), _on_one_side(1, DEEP_KS)),
    Claim("2d", (1, 3, 5), _grows_with_depth),
    Claim("3", (1, 3, 5), _lower_error),
    Claim("4", (1,), _worse_cross_entropy),
    Claim("5", (3, 5), _better_cross_entropy),
    Claim("6", (1, 3, 5), _pooled_lower),
)


def judge(claim: Claim, points: Sequence[Point]) -> Judgement:
    """Judge a claim by the rows of its depths; it is open if there is none."""
    points = [point for point in points if point.row.hidden_layers in claim.depths]
    return claim.apply(points) if points else Judgement(OPEN, 0, reason="no row is finished")


def can_be_confirmed(claim: Claim, points: Iterable[Point]) -> bool:
    """Return whether there are enough rows to confirm a claim, whatever their results.

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
