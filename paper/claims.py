"""The paper's claims and the rules that judge them; RESULTS.md.jinja states both in words.

The rules were set before any row was run in full, but after preliminary runs of four
architectures. Added later: claim 3 needs a mean below 0, claims 2a and 2c a share above chance,
which changed no verdict; and `can_be_confirmed`. After all results were known, the unit of every
claim became the architecture, which was that of claims 3 and 6 alone; the verdict by row stands
beside it.

A rule takes groups of rows and counts each group once, so the same rule judges by architecture and
by row. All p-values except the toy example's are two-sided. Rows that differ only in momentum share
folds and initial weights, and architectures still share data sets, so p-values are too small rather
than too large.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import pairwise
from typing import Any, TypeAlias

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


Groups: TypeAlias = Sequence[Sequence[Point]]


def by_row(points: Iterable[Point]) -> list[list[Point]]:
    """Return each row as a group."""
    return [[point] for point in points]


def by_architecture(points: Iterable[Point]) -> list[list[Point]]:
    """Return the rows of each architecture: a data set with its layers, in several momenta."""
    groups: dict[tuple[str, int, int], list[Point]] = {}
    for point in points:
        architecture = (point.row.data, point.row.hidden_layers, point.row.width)
        groups.setdefault(architecture, []).append(point)
    return list(groups.values())


@dataclass(frozen=True)
class Judgement:
    """The verdict on a claim, with its numbers.

    Attributes:
        verdict: "confirmed", "partly" or "not confirmed"; "open" without any row.
        rows: The number of rows.
        units: The number of groups of rows that count once each: architectures, or rows.
        p: The p-value of the claim's test; None for a claim judged by an interval.
        numbers: The figures, by the names that the template uses.
        reason: Why the claim is open, if it is.
        by_row: The judgement by the same rule with each row as a unit.

    """

    verdict: str
    rows: int
    units: int = 0
    p: float | None = None
    numbers: Mapping[str, Any] = field(default_factory=dict)
    reason: str = ""
    by_row: Judgement | None = None


@dataclass(frozen=True)
class Claim:
    """A claim about rows of some depths, and the rule that judges one group of rows or more.

    Example:
        >>> from paper.rows import rows
        >>> judge(CLAIMS[0], paper_points(rows())).verdict  # 2a: k < 1 with one hidden layer
        'confirmed'

    """

    name: str
    depths: tuple[int, ...]
    rule: Callable[[Groups], Judgement]


def _judgement(
    groups: Groups, confirmed: bool, partly: bool, p: float | None, numbers: Mapping[str, Any]
) -> Judgement:
    return Judgement(_verdict(confirmed, partly), sum(map(len, groups)), len(groups), p, numbers)


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
    verdict = _verdict(falls and trend, trend)
    return Judgement(verdict, len(table), len(table), p, {"errors": means})


# --- votes ---------------------------------------------------------------------------------------


def sides(ks: Iterable[float]) -> tuple[int, int, int]:
    """Count the k below 1, equal to 1, and above 1.

    >>> sides([0.5, 0.25, 1.0])
    (2, 1, 0)
    """
    found = [side(k) for k in ks]
    return found.count(-1), found.count(0), found.count(1)


@dataclass(frozen=True)
class Votes:
    """Groups of rows with one vote each, which the rows of a group share equally.

    Attributes:
        of_groups: For each group, its rows: 1 is for, -1 against, and 0 abstains.

    Example:
        >>> found = Votes([[1, 1, 0], [1, -1]])
        >>> found.on, found.off, found.abstained
        (Fraction(7, 6), Fraction(1, 2), Fraction(1, 3))

    """

    of_groups: Sequence[Sequence[int]]

    @classmethod
    def of(cls, groups: Groups, side_of: Callable[[Point], int]) -> Votes:
        """Return the votes of rows."""
        return cls([[side_of(point) for point in group] for group in groups])

    def _share(self, wanted: int) -> Fraction:
        return sum((Fraction(g.count(wanted), len(g)) for g in self.of_groups), Fraction(0))

    @property
    def on(self) -> Fraction:
        """The votes for."""
        return self._share(1)

    @property
    def off(self) -> Fraction:
        """The votes against."""
        return self._share(-1)

    @property
    def abstained(self) -> Fraction:
        """The votes of rows that abstain."""
        return self._share(0)

    def p(self, chance: Fraction = Fraction(1, 2)) -> float:
        """Return the two-sided p-value of the split, abstentions left out.

        Under the null hypothesis the rows of a group that do not abstain always agree: all are for
        with this chance, else all are against. No dependence within groups is stronger. If each
        group is one row, this is the sign test.

        Args:
            chance: The probability of a vote for.

        Example:
            >>> Votes([[1, 1, 1]] * 6).p()  # six groups, not 18 independent rows
            0.03125

        """
        if all(len(group) == 1 for group in self.of_groups):
            return sign_test(int(self.on), int(self.off), float(chance))
        law = {Fraction(0): 1.0}  # of the votes for
        for group in self.of_groups:
            share, found = 1 - Fraction(group.count(0), len(group)), dict[Fraction, float]()
            for votes, p in law.items():
                for more, times in ((share, float(chance)), (Fraction(0), 1 - float(chance))):
                    found[votes + more] = found.get(votes + more, 0.0) + p * times
            law = found
        expected = chance * (self.on + self.off)
        distance = abs(self.on - expected)
        return min(1.0, sum(p for on, p in law.items() if abs(on - expected) >= distance))


# --- 2: the selected k and depth -----------------------------------------------------------------


def _on_one_side(wanted: int, ks: Sequence[float]) -> Callable[[Groups], Judgement]:
    chance = Fraction(sum(side(k) == wanted for k in ks), sum(k != 1 for k in ks))

    def rule(groups: Groups) -> Judgement:
        votes = Votes.of(groups, lambda point: wanted * side(point.k))
        on, off, p = votes.on, votes.off, votes.p(chance)
        # The test is two-sided: more than half can still be fewer than by chance.
        confirmed = on > len(groups) / 2 and on > chance * (on + off) and p < LEVEL
        return _judgement(groups, confirmed, on > off, p, {"sides": _sides(groups)})

    return rule


def _sides(groups: Groups) -> tuple[Fraction, Fraction, Fraction]:
    """Return the votes for k below 1, equal to 1, and above 1."""
    votes = Votes.of(groups, lambda point: side(point.k))
    return votes.off, votes.abstained, votes.on


def _near_one(groups: Groups) -> Judgement:
    votes = Votes.of(groups, lambda point: 1 if 0.5 <= point.k <= 2 else -1)
    chance = Fraction(3, 5)
    median, near, p = _median_k(groups), votes.on, votes.p(chance)
    centred, mostly = median == 1, near > chance * len(groups) and p < LEVEL
    numbers = {"sides": _sides(groups), "median": median, "near": near}
    return _judgement(groups, centred and mostly, centred or mostly, p, numbers)


def _median_k(groups: Groups) -> float:
    """Return the median k, each row weighted by its share of its group's vote."""
    # With as many copies of each k as its weight demands, the weighted median is the plain one.
    whole = math.lcm(*map(len, groups))
    copies = [
        math.log2(point.k)
        for group in groups
        for point in group
        for _ in range(whole // len(group))
    ]
    median: float = 2.0 ** statistics.median(copies)
    return median


def _grows_with_depth(groups: Groups) -> Judgement:
    def correlation(groups: Groups) -> tuple[float, float]:
        return rank_correlation(
            [group[0].row.hidden_layers for group in groups],
            # Rounded, so that equal means are ties.
            [round(statistics.fmean(math.log2(p.common_k) for p in group), 9) for group in groups],
            [group[0].row.data for group in groups],
        )

    def vary(groups: Groups) -> bool:
        return len({group[0].row.hidden_layers for group in groups}) > 1

    if not vary(groups):
        return Judgement(OPEN, 0, reason="rows of one depth only")
    rho, p = correlation(groups)
    within = {}
    for data in dict.fromkeys(group[0].row.data for group in groups):
        own = [group for group in groups if group[0].row.data == data]
        if vary(own) and len(own) < len(groups):
            within[data] = correlation(own)[0]
    return _judgement(groups, rho > 0 and p < LEVEL, rho > 0, p, {"rho": rho, "within": within})


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


def _mean_errors(groups: Groups) -> list[float]:
    return [round(statistics.fmean(point.error for point in group), 9) for group in groups]


def _lower_error(groups: Groups) -> Judgement:
    from scipy.stats import wilcoxon

    means = _mean_errors(groups)
    lower, higher = sum(mean < 0 for mean in means), sum(mean > 0 for mean in means)
    mean = statistics.fmean(means)
    p = float(wilcoxon(means, method="approx").pvalue) if any(means) else 1.0
    numbers = {
        "lower": lower,
        "equal": len(means) - lower - higher,
        "higher": higher,
        "mean": mean,
    }
    # Most can be lower even if the mean is higher and the test significant.
    confirmed = lower > higher and mean < 0 and p < LEVEL
    return _judgement(groups, confirmed, lower > higher, p, numbers)


def pooled(points: Iterable[Point]) -> Difference:
    """Return the mean change of the test error over rows, with Student's 95% interval."""
    return _pooled(by_row(points))


def pooled_by_architecture(points: Iterable[Point]) -> Difference:
    """Return the same over architectures: rows that differ only in momentum are averaged first."""
    return _pooled(by_architecture(points))


def pooled_by_data_set(points: Iterable[Point]) -> Difference:
    """Return the same over data sets, each the mean of its architectures."""
    of_sets: dict[str, list[list[Point]]] = {}
    for group in by_architecture(points):
        of_sets.setdefault(group[0].row.data, []).append(group)
    means = [statistics.fmean(_mean_errors(groups)) for groups in of_sets.values()]
    return paired_difference(means, [0.0] * len(means))


def _pooled(groups: Groups) -> Difference:
    means = _mean_errors(groups)
    return paired_difference(means, [0.0] * len(means))


def _pooled_lower(groups: Groups) -> Judgement:
    mean = _pooled(groups)
    points = [point for group in groups for point in group]
    numbers = {
        "mean": mean,
        "of_sets": pooled_by_data_set(points),
        "sets": len({point.row.data for point in points}),
    }
    return _judgement(groups, mean.high < 0, mean.mean < 0, None, numbers)


# --- 4 and 5: the cross-entropy ------------------------------------------------------------------


def _worse(point: Point) -> int:
    """Return 1 if the cross-entropy is worse, -1 if it is better, and 0 if there is no other k."""
    return (point.k != 1) * ((point.cross_entropy > 0) - (point.cross_entropy < 0))


def _ones(groups: Groups) -> Fraction:
    return Votes.of(groups, lambda point: int(point.k == 1)).on


def _worse_cross_entropy(groups: Groups) -> Judgement:
    votes = Votes.of(groups, _worse)
    worse, better, p = votes.on, votes.off, votes.p()
    numbers = {"worse": worse, "better": better, "ones": _ones(groups)}
    return _judgement(groups, worse > better and p < LEVEL, worse > better, p, numbers)


def _better_cross_entropy(groups: Groups) -> Judgement:
    votes = Votes.of(groups, lambda point: -_worse(point))
    above = Votes.of(groups, lambda point: -_worse(point) * (point.k > 1))
    p, p_above = votes.p(), above.p()
    numbers = {
        "better": votes.on,
        "worse": votes.off,
        "ones": _ones(groups),
        "above": (above.on, above.off),
        "p_above": p_above,
    }
    confirmed = votes.on > votes.off and p < LEVEL
    partly = above.on > above.off and p_above < LEVEL
    return _judgement(groups, confirmed, partly, p, numbers)


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
    """Judge a claim by the architectures of its depths, and by row; it is open if there is none."""
    points = [point for point in points if point.row.hidden_layers in claim.depths]
    if not points:
        return Judgement(OPEN, 0, reason="no row is finished")
    return replace(claim.rule(by_architecture(points)), by_row=claim.rule(by_row(points)))


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
