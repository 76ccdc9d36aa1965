"""The rules that judge the claims."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from made_up_results import write
from scipy.stats import binom, binomtest

from paper.claims import (
    CLAIMS,
    CONFIRMED,
    NOT,
    OPEN,
    PARTLY,
    Judgement,
    Point,
    Votes,
    can_be_confirmed,
    judge,
    judge_toy,
    our_points,
    paper_points,
    pooled,
    pooled_by_architecture,
    pooled_by_data_set,
    rank_correlation,
)
from paper.findings import read, side
from paper.rows import Experiment, Row, experiments, rows
from paper.toy import ToyRun
from pseudograd.search import DEEP_KS, SHALLOW_KS

BY_NAME = {claim.name: claim for claim in CLAIMS}
OF_DEPTH = {depth: [row for row in rows() if row.hidden_layers == depth] for depth in (1, 3, 5)}


def points(
    depth: int, ks: Iterable[float], error: float = -1.0, cross_entropy: float = 1.0
) -> list[Point]:
    """Return rows of a depth with the given k; where k is 1, all differences are 0."""
    return [
        Point(row, k, max(k, 0.25), error * (k != 1), cross_entropy * (k != 1))
        for row, k in zip(OF_DEPTH[depth], ks, strict=False)
    ]


def verdict(name: str, rows: list[Point]) -> str:
    return judge(BY_NAME[name], rows).verdict


# --- the paper's own figures ---------------------------------------------------------------------


def test_of_the_paper(subtests: pytest.Subtests) -> None:
    """By row, and by architecture."""
    cases: list[tuple[str, int, tuple[str, float | None], tuple[str, float | None]]] = [
        # 11 2/3 of 12 votes, 8 of them by chance.
        ("2a", 33, (CONFIRMED, binomtest(32, 33, 4 / 6).pvalue),
         (CONFIRMED, (2 / 3) ** 12 + binom.cdf(4, 12, 2 / 3))),
        # 7 1/2 of 8, 4.8 by chance.
        ("2b", 18, (CONFIRMED, None), (PARTLY, 0.6**8 + binom.cdf(2, 8, 0.6))),
        # 5 1/2 of 7, two of which are half votes: 6 and 1/2, 6 and 0, or 5 1/2 and more.
        ("2c", 16, (PARTLY, 2 * (1 + 14 + 91 + 364) / 2**14), (PARTLY, 2 * 22 / 2**8)),
        ("2d", 67, (CONFIRMED, 1e-4), (CONFIRMED, 1e-4)),
        ("3", 67, (CONFIRMED, None), (CONFIRMED, None)),
        ("4", 33, (CONFIRMED, 2 * 34 / 2**33), (CONFIRMED, 2 / 2**12)),
        ("5", 34, (PARTLY, None), (PARTLY, None)),
        ("6", 67, (CONFIRMED, None), (CONFIRMED, None)),
    ]  # fmt: skip
    for name, rows_in, of_rows, of_architectures in cases:
        with subtests.test(name=name):
            found = judge(BY_NAME[name], paper_points(rows()))
            assert found.by_row is not None
            for judgement, (expected, p) in ((found.by_row, of_rows), (found, of_architectures)):
                assert (judgement.verdict, judgement.rows) == (expected, rows_in)
                if p is not None:
                    assert judgement.p == pytest.approx(p)


# --- the votes -----------------------------------------------------------------------------------


def test_rows_of_an_architecture_share_its_vote() -> None:
    first, second = [row for row in OF_DEPTH[5] if (row.data, row.width) == ("svhn", 400)]
    third = next(row for row in OF_DEPTH[5] if row.data == "cifar10")
    ks = {first: 0.25, second: 8.0, third: 4.0}
    found = judge(BY_NAME["2c"], [Point(row, k, k, -1.0, -1.0) for row, k in ks.items()])
    assert (found.units, found.numbers) == (2, {"sides": (0.5, 0, 1.5)})
    assert found.p == 0.5  # that both votes fall on the same side
    assert found.by_row is not None
    assert (found.by_row.units, found.by_row.numbers) == (3, {"sides": (1, 0, 2)})


def test_one_row_in_each_group_gives_the_sign_test() -> None:
    votes = Votes([[1]] * 10 + [[-1]] * 2 + [[0]] * 3)
    assert votes.p(Fraction(2, 3)) == binomtest(10, 12, 2 / 3).pvalue


def test_votes_against_all_splits() -> None:
    """Each group falls on one side as a whole, with the part of its vote that is not abstained."""
    groups = [[1, 1, 1], [1, 0, 1], [1, 1, -1], [0, 0, 0], [1, 0], [-1, -1]]
    shares = [Fraction(3, 3), Fraction(2, 3), Fraction(3, 3), Fraction(1, 2), Fraction(2, 2)]
    chance, found = Fraction(2, 3), Votes(groups).on
    expected = chance * sum(shares)
    p = Fraction(0)
    for sides in itertools.product((True, False), repeat=5):
        on = sum(share for share, side in zip(shares, sides, strict=True) if side)
        if abs(on - expected) >= abs(found - expected):
            p += math.prod((chance if side else 1 - chance for side in sides), start=Fraction(1))
    assert found == 1 + Fraction(2, 3) + Fraction(2, 3) + Fraction(1, 2)
    assert Votes(groups).p(chance) == pytest.approx(float(p))


@pytest.mark.parametrize("agreeing", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(("ks", "wanted"), [(SHALLOW_KS, -1), (DEEP_KS, 1)])
def test_chance_alone_is_rarely_significant(
    agreeing: float, ks: tuple[float, ...], wanted: int
) -> None:
    """However much the rows of an architecture depend on each other: k is uniform in each."""
    generator = np.random.default_rng(0)
    chance = Fraction(sum(wanted * side(k) > 0 for k in ks), sum(k != 1 for k in ks))
    sides = np.array([wanted * side(k) for k in ks])
    significant = 0
    for _ in range(400):
        of_groups = []
        for size in [3] * 9 + [2] * 3:
            drawn = generator.choice(sides, size)
            if generator.random() < agreeing:
                drawn[:] = drawn[0]
            of_groups.append(drawn.tolist())
        significant += Votes(of_groups).p(chance) < 0.05
    assert significant / 400 < 0.06


def test_rows_of_the_paper_without_figures_change_nothing() -> None:
    found = paper_points(rows("table3", "mnist*"))
    assert [(point.k, point.error, point.cross_entropy) for point in found] == [(1, 0, 0)] * 2


def test_all_claims_are_open_without_rows() -> None:
    assert {judge(claim, []).verdict for claim in CLAIMS} == {OPEN}


def test_a_claim_takes_the_rows_of_its_depths() -> None:
    mixed = points(1, [0.5] * 10) + points(5, [4.0] * 8)
    assert judge(BY_NAME["2a"], mixed).rows == 10
    assert judge(BY_NAME["2c"], mixed).rows == 8
    assert judge(BY_NAME["2b"], mixed).verdict == OPEN


# --- each rule from all sides --------------------------------------------------------------------


def test_k_above_1(subtests: pytest.Subtests) -> None:
    cases: list[tuple[list[float], str]] = [
        ([2.0] * 6, CONFIRMED),
        ([2.0] * 6 + [1.0] * 6, PARTLY),  # significant, but not in more than half
        ([2.0] * 5, PARTLY),  # p = 1/16
        ([2.0] * 4 + [0.5] * 3, PARTLY),
        ([2.0] * 3 + [0.5] * 3, NOT),
        ([0.5] * 8, NOT),  # significant, but in the opposite direction
        ([1.0] * 8, NOT),
    ]
    for ks, expected in cases:
        with subtests.test(expected=expected):
            assert verdict("2c", points(5, ks)) == expected


def test_k_below_1(subtests: pytest.Subtests) -> None:
    cases: list[tuple[list[float], str]] = [
        ([0.5] * 12, CONFIRMED),
        ([0.5] * 12 + [1.0] * 21, PARTLY),  # significant, but with 4.5 of 12 votes
        ([0.5] * 6, PARTLY),  # 4 of the 6 other k are below 1, so this may be chance
        ([0.5] * 4 + [2.0] * 3, PARTLY),
        ([0.5] * 3 + [2.0] * 3, NOT),
        ([2.0] * 8, NOT),
        ([1.0] * 8, NOT),
    ]
    for ks, expected in cases:
        with subtests.test(expected=expected):
            assert verdict("2a", points(1, ks)) == expected


def test_fewer_than_by_chance_do_not_confirm() -> None:
    """31 of 60 rows are more than half, but chance alone would give 40."""
    both = points(1, [0.5] * 31) + points(1, [2.0] * 29)
    found = judge(BY_NAME["2a"], both).by_row
    assert found is not None
    assert found.p == binomtest(31, 60, 4 / 6).pvalue < 0.05
    assert found.verdict == PARTLY


@pytest.mark.parametrize(
    ("ks", "expected"),
    [
        ([0.5] * 3 + [1.0] * 5 + [2.0] * 3, CONFIRMED),
        ([2.0] * 11, PARTLY),  # near 1, but on one side of it
        ([0.25] * 4 + [1.0] * 3 + [4.0] * 4, PARTLY),  # around 1, but not near it
        ([4.0] * 11, NOT),
    ],
)
def test_k_near_1(ks: list[float], expected: str) -> None:
    assert verdict("2b", points(3, ks)) == expected


def test_k_grows_with_depth() -> None:
    rising = points(1, [0.25] * 33) + points(3, [1.0] * 18) + points(5, [4.0] * 16)
    falling = points(1, [4.0] * 33) + points(3, [1.0] * 18) + points(5, [0.25] * 16)
    assert verdict("2d", rising) == CONFIRMED
    assert verdict("2d", falling) == NOT
    assert verdict("2d", points(1, [0.25, 0.5]) + points(3, [1.0])) == PARTLY
    assert verdict("2d", points(1, [0.25, 0.5])) == OPEN  # there is no other depth to compare with
    # Values of k tried only with one hidden layer must not count as lower.
    shallow, deep = points(1, [0.0625] * 33), points(3, [0.25] * 18)
    assert verdict("2d", shallow + deep) == NOT


def test_correlations_within_data_sets_are_reported() -> None:
    """A set with rows of one depth has none; a single set has that of all rows."""

    def of(data: str, *ks: float, depths: tuple[int, ...] = (1, 3, 5)) -> list[Point]:
        some = [Row("table1", data, depth, 400, 0.5) for depth in depths]
        return [Point(row, k, k, 0.0, 0.0) for row, k in zip(some, ks, strict=True)]

    claim = BY_NAME["2d"]
    both = of("mnist", 4, 1, 0.25) + of("cifar10", 0.25, 1, 2)
    numbers = judge(claim, both + of("svhn", 1.0, depths=(3,))).numbers
    assert numbers["within"] == pytest.approx({"mnist": -1.0, "cifar10": 1.0})
    assert judge(claim, of("cifar10", 0.25, 1, 2)).numbers == {"rho": 1.0, "within": {}}


def test_lower_error(subtests: pytest.Subtests) -> None:
    cases: list[tuple[list[float], str]] = [
        ([-0.5, -0.4, -0.3, -0.2, -0.1, -0.6, -0.7, 0.05], CONFIRMED),
        ([-0.5, -0.4, 0.3, 0.0], PARTLY),
        ([-0.5, 0.4, 0.0], NOT),
        ([0.0] * 5, NOT),
        ([0.5, 0.4, 0.3, 0.2, 0.1, 0.6, 0.7], NOT),
    ]
    for errors, expected in cases:
        with subtests.test(expected=expected):
            found = [
                Point(row, 0.5 if error else 1.0, 0.5 if error else 1.0, error, 0)
                for row, error in zip(OF_DEPTH[1], errors, strict=False)
            ]
            assert verdict("3", found) == expected


def test_an_error_that_is_higher_on_average_is_not_confirmed_to_be_lower() -> None:
    """One of 28 architectures is much higher, the others are a bit lower."""
    last = rows()[-1]
    architecture = (last.data, last.hidden_layers, last.width)
    found = [
        Point(row, 0.5, 0.5, 4.0 if one == architecture else -0.1, 0)
        for row in rows()
        for one in [(row.data, row.hidden_layers, row.width)]
    ]
    judgement = judge(BY_NAME["3"], found)
    assert judgement.p is not None
    assert judgement.p < 0.05
    assert judgement.verdict == PARTLY
    assert (judgement.numbers["lower"], judgement.numbers["higher"]) == (27, 1)
    assert judgement.numbers["mean"] == pytest.approx((4 - 27 * 0.1) / 28)


def test_the_test_of_errors_leaves_out_rows_with_k_1() -> None:
    some = points(1, [0.5] * 8)
    more = some + points(3, [1.0] * 8)
    one, other = judge(BY_NAME["3"], some), judge(BY_NAME["3"], more)
    assert one.p == other.p
    assert one.p is not None
    assert one.p < 0.05
    assert (one.rows, other.rows) == (8, 16)
    assert other.numbers["equal"] == 8


@pytest.mark.parametrize(
    ("errors", "expected"),
    [([-0.5, -0.4, -0.6, -0.5], CONFIRMED), ([-0.9, 0.1, 0.1], PARTLY), ([0.1, 0.2, 0.0], NOT),
     ([-0.5], PARTLY)],
)  # fmt: skip
def test_pooled_errors(errors: list[float], expected: str) -> None:
    found = [Point(row, 0.5, 0.5, e, 0) for row, e in zip(OF_DEPTH[1], errors, strict=False)]
    judgement = judge(BY_NAME["6"], found)
    assert judgement.verdict == expected
    assert judgement.p is None


def test_rows_with_k_1_count_in_the_pooled_error() -> None:
    found = pooled(points(1, [0.5, 1.0, 1.0, 0.5]))
    assert found.mean == -0.5
    from scipy.stats import ttest_1samp

    interval = ttest_1samp([-1, 0, 0, -1], 0).confidence_interval()
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high))


def test_rows_of_an_architecture_are_averaged_first() -> None:
    same = [row for row in rows() if row.name.startswith("svhn 1x400")]
    other = [row for row in rows() if row.name == "svhn 3x400 m0.5"]
    found = [Point(row, 0.5, 0.5, -1.0, 0) for row in same]
    found += [Point(row, 2.0, 2.0, -3.0, 0) for row in other]
    assert len(same) == 3
    assert pooled(found).mean == -1.5
    assert pooled_by_architecture(found).mean == -2
    assert pooled_by_data_set(found).mean == -2
    mnist = next(row for row in rows() if row.data == "mnist")
    found.append(Point(mnist, 0.5, 0.5, 0.0, 0))
    over_sets = pooled_by_data_set(found)  # the means of two architectures, and of one: -2 and 0
    assert over_sets.mean == -1
    assert over_sets.high == pytest.approx(-1 + 12.7062, abs=1e-3)  # Student's t for two


def test_worse_cross_entropy(subtests: pytest.Subtests) -> None:
    cases: list[tuple[list[float], str]] = [
        ([1.0] * 6, CONFIRMED),
        ([1.0] * 4 + [-1.0], PARTLY),
        ([1.0, -1.0], NOT),
        ([-1.0] * 6, NOT),
        ([math.inf] * 6, CONFIRMED),
    ]
    for changes, expected in cases:
        with subtests.test(expected=expected):
            found = [
                Point(row, 0.5, 0.5, 0, c) for row, c in zip(OF_DEPTH[1], changes, strict=False)
            ]
            assert verdict("4", found) == expected


def test_better_cross_entropy() -> None:
    better = points(3, [2.0] * 6, cross_entropy=-1.0)
    worse = points(5, [0.5] * 4, cross_entropy=1.0)
    assert verdict("5", better) == CONFIRMED
    assert verdict("5", better + points(5, [1.0] * 9)) == CONFIRMED
    assert verdict("5", better + worse) == PARTLY
    assert verdict("5", worse) == NOT
    assert verdict("5", points(3, [2.0] * 5, cross_entropy=-1.0)) == NOT  # p = 1/16


def test_how_many_rows_a_claim_needs(subtests: pytest.Subtests) -> None:
    """Whatever the results."""
    cases: list[tuple[str, tuple[int, ...], int, int]] = [
        ("2a", (1,), 8, 9),
        ("2b", (3,), 6, 7),
        ("2c", (5,), 5, 6),
        ("2d", (1, 3), 3, 4),
        ("3", (1,), 3, 4),
        ("4", (1,), 5, 6),
        ("5", (3,), 5, 6),
        ("5", (3, 5), 2, 3),
        ("6", (1,), 1, 2),
    ]
    for name, depths, too_few, enough in cases:
        with subtests.test(name=name, too_few=too_few, enough=enough):
            for number, expected in ((too_few, False), (enough, True)):
                found = [point for depth in depths for point in points(depth, [1.0] * number)]
                assert can_be_confirmed(BY_NAME[name], found) is expected


def test_other_depths_are_not_claimed_about() -> None:
    other = Point(Row("mine", "mnist", 2, 400, 0.5), 4.0, 4.0, 9.0, 9.0)
    some = paper_points(rows())
    for claim in CLAIMS:
        assert judge(claim, [*some, other]) == judge(claim, some)
        assert can_be_confirmed(claim, [*some, other])
        assert not can_be_confirmed(claim, [other])


def test_all_rows_are_enough_for_all_claims() -> None:
    assert all(can_be_confirmed(claim, paper_points(rows())) for claim in CLAIMS)
    assert not any(can_be_confirmed(claim, []) for claim in CLAIMS)


# --- the rank correlation ------------------------------------------------------------------------


def test_rank_correlation_is_spearmans() -> None:
    from scipy.stats import spearmanr

    generator = np.random.default_rng(0)
    first, second = generator.integers(0, 4, (2, 30)).tolist()
    rho, _ = rank_correlation(first, second, ["one"] * 30)
    assert rho == pytest.approx(spearmanr(first, second).statistic)


def test_permutations_stay_within_groups() -> None:
    first, second = [1, 3, 5, 1, 3, 5, 5], [1, 2, 3, 2, 1, 9, 8]
    groups = ["one"] * 3 + ["two"] * 4
    rho, p = rank_correlation(first, second, groups)
    at_least = total = 0
    for one in itertools.permutations(first[:3]):
        for two in itertools.permutations(first[3:]):
            other, _ = rank_correlation([*one, *two], second, groups)
            at_least += abs(other) >= abs(rho) - 1e-12
            total += 1
    assert p == pytest.approx(at_least / total, abs=0.02)
    # Constant groups leave nothing to permute.
    assert rank_correlation([1, 1, 2, 2], [1, 1, 2, 2], ["a", "a", "b", "b"]) == (1.0, 1.0)


def test_without_variation_there_is_no_correlation() -> None:
    assert rank_correlation([1, 1, 1], [1, 2, 3], ["a"] * 3) == (0.0, 1.0)


# --- the toy example -----------------------------------------------------------------------------


def toy(errors: dict[float, float], runs: int = 10) -> Judgement:
    return judge_toy([
        ToyRun(k, run, 0, 0.95, 7000, 6.4, -0.3, 0.05, error + 0.5 * run, 0.28)
        for k, error in errors.items()
        for run in range(runs)
    ])  # fmt: skip


def test_toy() -> None:
    found = toy({4.0: 8.4, 1.0: 5.0, 0.25: 4.0})
    assert (found.verdict, found.rows) == (CONFIRMED, 10)
    assert found.p is not None
    assert found.p < 0.001
    assert toy({4.0: 8.4, 1.0: 5.0, 0.25: 5.1}).verdict == PARTLY
    assert toy({4.0: 4.0, 1.0: 5.0, 0.25: 8.4}).verdict == NOT
    assert toy({4.0: 8.4, 1.0: 5.0, 0.25: 4.0}, runs=1).verdict == OPEN
    assert toy({4.0: 8.4, 0.25: 4.0}).verdict == OPEN
    assert judge_toy([]).verdict == OPEN


def test_toy_of_two_seeds_and_of_runs_that_are_not_whole() -> None:
    runs = [
        ToyRun(k, run, seed, 0.95, 7000, 6.4, -0.3, 0.05, k + 9 * seed + run, 0.28)
        for seed in range(2)
        for k in (4.0, 1.0, 0.25)
        for run in range(3)
    ]
    found = judge_toy(runs)
    assert (found.verdict, found.rows) == (CONFIRMED, 6)
    as_one_seed = [replace(run, seed=0, run=10 * run.seed + run.run) for run in runs]
    assert found.p == judge_toy(as_one_seed).p
    for some in (runs[1:], [*runs, runs[0]], [*runs[1:], runs[1]]):
        assert judge_toy(some).verdict == OPEN
        assert judge_toy(some).reason == "not every run has each k once"


# --- our rows ------------------------------------------------------------------------------------


def test_our_points(tmp_path: Path) -> None:
    wanted = experiments(rows("table1", "mnist 1x400*")) + [
        Experiment(row) for row in rows("table1", "svhn 1x400*")
    ]
    write(tmp_path, wanted)
    findings = read(wanted, tmp_path).finished
    assert len(findings) == 4  # MNIST in two scalings and with tanh, and SVHN
    stated, other = our_points(findings, (-1, 1)), our_points(findings, (0, 1))
    assert [point.row.data for point in stated] == ["mnist", "svhn"]
    assert [point.row.data for point in other] == ["mnist", "svhn"]
    assert stated[0] != other[0]
    assert stated[1] == other[1]
    finding = findings[0]
    difference = finding.error_pct.mean - finding.error_k1_pct.mean
    assert stated[0].error == pytest.approx(difference)
    assert stated[0].error < 0 < stated[0].cross_entropy
