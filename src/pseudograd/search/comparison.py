"""The result of a study: its choice, compared with k = 1 by retrained networks on the test set."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from pseudograd.extras import needed_for
from pseudograd.fleet import Outcome, Ramp
from pseudograd.search.protocol import Cell, Outcomes, Protocol

_LEVEL = 0.05  # of the sign test; the intervals are 95% ones


@dataclass(frozen=True)
class Difference:
    """The mean of paired differences, with a 95% confidence interval by Student's t.

    Attributes:
        mean: The mean difference.
        low: The lower end of the interval; NaN for a single pair, for infinite values, or if there
            is nothing to compare.
        high: The upper end.

    """

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Comparison:
    """Networks of the chosen k and of k = 1, paired by seed.

    Attributes:
        chosen: Outcomes of the chosen k, one per seed.
        plain: Outcomes of k = 1, in the same order.
        error: The difference of test errors, chosen minus plain.
        cross_entropy: The difference of cross-entropies.
        only_plain_right: Predictions, pooled over the pairs, that only k = 1 got right.
        only_chosen_right: Predictions that only the chosen k got right.
        mcnemar_p: The p-value of the exact McNemar test on these two. It is too small, because each
            example counts once per pair, as if the pairs were independent.
        better_on: Test examples that more networks of the chosen k get right than of k = 1; for
            examples with several labels, those on which they get more labels right.
        worse_on: Test examples that fewer of them get right.
        sign_p: The p-value of the exact sign test on these two.

    """

    chosen: tuple[Outcome, ...] = field(repr=False)
    plain: tuple[Outcome, ...] = field(repr=False)
    error: Difference
    cross_entropy: Difference
    only_plain_right: int
    only_chosen_right: int
    mcnemar_p: float
    better_on: int
    worse_on: int
    sign_p: float

    @property
    def verdict(self) -> str:
        """Whether the chosen k is better than k = 1 on the test set, in one word.

        - "same": k = 1 was chosen, so there is nothing to compare.
        - "better", "worse": by the interval over networks and by the sign test over test examples.
        - "hint": by one of the two, such as the interval if no mistakes on examples were told.
        - "noise": by neither.

        Keep k = 1 unless it is "better".
        """
        if self.chosen == self.plain:
            return "same"
        evidence = self.by_networks + (self.by_examples * self.error.mean > 0)
        return ("noise", "hint", "better" if self.error.mean < 0 else "worse")[evidence]

    @property
    def by_networks(self) -> bool:
        """Whether the interval of the difference of test errors excludes 0."""
        return self.error.low > 0 or self.error.high < 0  # False if NaN

    @property
    def by_examples(self) -> int:
        """The result of the sign test: -1 if the chosen k is better, 1 if worse, 0 if neither."""
        if self.sign_p < _LEVEL:
            return 1 if self.worse_on > self.better_on else -1
        return 0

    @property
    def kept(self) -> Outcome:
        """The network of the chosen k that becomes the model."""
        return best_stopped(self.chosen)


def compare(chosen: list[Outcome], plain: list[Outcome], positions: int = 1) -> Comparison:
    """Compare networks with the same seeds, pair by pair.

    Args:
        chosen: Outcomes of the chosen k, with the test examples they got wrong.
        plain: Outcomes of k = 1, in the same order.
        positions: The number of labels per test example.

    Example:
        >>> from pseudograd.fleet import MLPRecipe, Trial
        >>> trial = Trial(MLPRecipe("digits", (4,)), k=1, learning_rate=0.1)
        >>> plain = Outcome(trial, 0.1, 1, 0.50, 0.3, 1, "limit", (), wrong=(0, 1))
        >>> chosen = Outcome(trial, 0.1, 1, 0.25, 0.2, 1, "limit", (), wrong=(1,))
        >>> found = compare([chosen], [plain])
        >>> found.error.mean, found.only_chosen_right, found.verdict
        (-0.25, 1, 'noise')

    """
    known = all(outcome.wrong is not None for outcome in (*chosen, *plain))
    only_plain = only_chosen = 0
    gain: Counter[int] = Counter()  # per example: how many more networks get it right
    for one, other in zip(chosen, plain, strict=True):
        wrong, wrong_plain = set(one.wrong or ()), set(other.wrong or ())
        only_plain += len(wrong - wrong_plain)
        only_chosen += len(wrong_plain - wrong)
        gain.update(at // positions for at in wrong_plain)
        gain.subtract(at // positions for at in wrong)
    better_on = sum(networks > 0 for networks in gain.values())
    worse_on = sum(networks < 0 for networks in gain.values())
    same = chosen == plain  # a difference of 0 that was not measured has no interval
    error, cross_entropy = (
        Difference(0.0, math.nan, math.nan)
        if same
        else paired_difference(*([getattr(o, name) for o in group] for group in (chosen, plain)))
        for name in ("error", "cross_entropy")
    )
    return Comparison(
        chosen=tuple(chosen),
        plain=tuple(plain),
        error=error,
        cross_entropy=cross_entropy,
        only_plain_right=only_plain,
        only_chosen_right=only_chosen,
        mcnemar_p=sign_test(only_plain, only_chosen) if known else math.nan,
        better_on=better_on,
        worse_on=worse_on,
        sign_p=sign_test(better_on, worse_on) if known else math.nan,
    )


def best_stopped(outcomes: Iterable[Outcome]) -> Outcome:
    """Return the final network to keep: the one with the lowest early-stopping error.

    Selecting by the test error would bias it. A diverged network is kept only if all diverged.
    """
    return min(outcomes, key=lambda one: (math.isinf(one.cross_entropy), one.stop_error))


def paired_difference(first: list[float], second: list[float]) -> Difference:
    """Return the mean of first - second, with its 95% interval.

    Example:
        >>> paired_difference([1.0, 2.0], [0.0, 1.0])
        Difference(mean=1.0, low=1.0, high=1.0)

    """
    with needed_for("comparing networks"):
        from scipy.stats import t

    differences = [a - b for a, b in zip(first, second, strict=True)]
    # Diverged networks have infinite values, and infinities of both signs have no mean.
    endless = {difference for difference in differences if not math.isfinite(difference)}
    if endless:
        return Difference(endless.pop() if len(endless) == 1 else math.nan, math.nan, math.nan)
    mean, count = statistics.fmean(differences), len(differences)
    if count < 2:
        return Difference(mean, math.nan, math.nan)
    reach = float(t.ppf(0.975, count - 1)) * statistics.stdev(differences) / count**0.5
    return Difference(mean, mean - reach, mean + reach)


def sign_test(one: int, other: int, chance: float = 0.5) -> float:
    """Return the two-sided p-value of a split, by the exact binomial test.

    Args:
        one: The number on one side.
        other: The number on the other side.
        chance: The probability of the first side under the null hypothesis.

    Example:
        >>> round(sign_test(9, 1), 4)
        0.0215

    """
    with needed_for("comparing networks"):
        from scipy.stats import binomtest

    return float(binomtest(one, one + other, chance).pvalue) if one + other else 1.0


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
