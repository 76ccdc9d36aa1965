"""The choice against k = 1: retrained networks, on the test set."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pseudograd.fleet import Outcome


@dataclass(frozen=True)
class Difference:
    """The mean of paired differences, and its 95% interval by Student's t.

    Attributes:
        mean: The mean difference.
        low: The lower end of the interval; NaN for a single pair, and for infinite values.
        high: The upper end.

    Example:
        >>> difference = paired_difference([0.10, 0.12, 0.11], [0.11, 0.13, 0.12])
        >>> round(difference.mean, 3)
        -0.01

    """

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class ByClass:
    """The test examples of one class, and how many of them a network gets wrong.

    Attributes:
        label: The class, as the user calls it.
        count: Its test examples.
        wrong: Those that the network gets wrong.

    Example:
        >>> ByClass("spam", count=10, wrong=3).wrong
        3

    """

    label: str | int | bool
    count: int
    wrong: int


@dataclass(frozen=True)
class Comparison:
    """Networks of the chosen k beside those of k = 1, pair by pair of equal seeds.

    Attributes:
        chosen: Outcomes of the choice, one for each seed.
        plain: Outcomes of k = 1, in the same order.
        error: The difference of test errors, chosen minus plain.
        cross_entropy: The difference of cross-entropies.
        only_plain_right: Predictions, pooled over the pairs, that only k = 1 got right.
        only_chosen_right: Those that only the choice got right.
        mcnemar_p: The probability of so uneven a split of these by chance (exact McNemar test). An
            example counts once for each pair, as if pairs were independent, so it is too small.
        better_on: Test examples that more networks of the choice get right than of k = 1.
        worse_on: Those that fewer do.
        sign_p: The probability of so uneven a split of these by chance (exact sign test).
        by_class: What the network that is kept gets wrong, class by class; empty where the labels
            of the test set are not at hand.

    Example:
        >>> from pseudograd.fleet import MLPRecipe, Trial
        >>> trial = Trial(MLPRecipe("digits", (4,)), k=1, learning_rate=0.1)
        >>> plain = Outcome(trial, 0.1, 1, 0.50, 0.3, 1, "limit", (), wrong=(0, 1))
        >>> chosen = Outcome(trial, 0.1, 1, 0.25, 0.2, 1, "limit", (), wrong=(1,))
        >>> compare([chosen], [plain]).only_chosen_right
        1

    """

    chosen: tuple[Outcome, ...]
    plain: tuple[Outcome, ...]
    error: Difference
    cross_entropy: Difference
    only_plain_right: int
    only_chosen_right: int
    mcnemar_p: float
    better_on: int
    worse_on: int
    sign_p: float
    by_class: tuple[ByClass, ...] = ()

    @property
    def kept(self) -> Outcome:
        """The network of the choice that becomes the model."""
        return best_stopped(self.chosen)


def compare(chosen: list[Outcome], plain: list[Outcome]) -> Comparison:
    """Compare networks of equal seeds, pair by pair.

    Args:
        chosen: Outcomes of the choice, with the test examples they got wrong.
        plain: Outcomes of k = 1, in the same order.

    Example:
        >>> from pseudograd.fleet import MLPRecipe, Trial
        >>> trial = Trial(MLPRecipe("digits", (4,)), k=1, learning_rate=0.1)
        >>> plain = Outcome(trial, 0.1, 1, 0.50, 0.3, 1, "limit", (), wrong=(0, 1))
        >>> compare([plain], [plain]).error.mean
        0.0

    """
    only_plain = only_chosen = 0
    gain: Counter[int] = Counter()  # of each example: how many networks more are right
    for one, other in zip(chosen, plain, strict=True):
        wrong, wrong_plain = set(one.wrong or ()), set(other.wrong or ())
        only_plain += len(wrong - wrong_plain)
        only_chosen += len(wrong_plain - wrong)
        gain.update(wrong_plain)
        gain.subtract(wrong)
    better_on = sum(networks > 0 for networks in gain.values())
    worse_on = sum(networks < 0 for networks in gain.values())
    return Comparison(
        chosen=tuple(chosen),
        plain=tuple(plain),
        error=paired_difference([o.error for o in chosen], [o.error for o in plain]),
        cross_entropy=paired_difference(
            [o.cross_entropy for o in chosen], [o.cross_entropy for o in plain]
        ),
        only_plain_right=only_plain,
        only_chosen_right=only_chosen,
        mcnemar_p=sign_test(only_plain, only_chosen),
        better_on=better_on,
        worse_on=worse_on,
        sign_p=sign_test(better_on, worse_on),
    )


def best_stopped(outcomes: Iterable[Outcome]) -> Outcome:
    """Give the network to keep, by its early-stopping error.

    To choose by the test error would make that error no test any more.

    Args:
        outcomes: Of final networks.

    Example:
        >>> from pseudograd.fleet import MLPRecipe, Trial
        >>> trial = Trial(MLPRecipe("mail", (4,)), k=1, learning_rate=0.1)
        >>> some = [Outcome(trial, e, 1, 0.25, 0.3, 1, "limit", ()) for e in (0.2, 0.1)]
        >>> best_stopped(some).stop_error
        0.1

    """
    return min(outcomes, key=lambda outcome: outcome.stop_error)


def by_class(
    outcome: Outcome, labels: Sequence[int], names: Sequence[str | int | bool]
) -> tuple[ByClass, ...]:
    """Count what a network gets wrong of each class of the test set.

    Args:
        outcome: Of the network, with the test examples it got wrong.
        labels: Of the test examples, as numbers from 0.
        names: What the user calls the classes.

    Example:
        >>> from pseudograd.fleet import MLPRecipe, Trial
        >>> trial = Trial(MLPRecipe("mail", (4,)), k=1, learning_rate=0.1)
        >>> outcome = Outcome(trial, 0.1, 1, 0.25, 0.3, 1, "limit", (), wrong=(1,))
        >>> by_class(outcome, [0, 1, 0, 0], ["ham", "spam"])
        (ByClass(label='ham', count=3, wrong=0), ByClass(label='spam', count=1, wrong=1))

    """
    counts, wrong = Counter(labels), Counter(labels[at] for at in outcome.wrong or ())
    return tuple(ByClass(name, counts[at], wrong[at]) for at, name in enumerate(names))


def paired_difference(first: list[float], second: list[float]) -> Difference:
    """Give the mean of first - second with its 95% interval.

    Args:
        first: Some values.
        second: As many others, in the same order.

    Example:
        >>> paired_difference([1.0, 2.0], [0.0, 1.0])
        Difference(mean=1.0, low=1.0, high=1.0)

    """
    from scipy.stats import t

    differences = [a - b for a, b in zip(first, second, strict=True)]
    # A network that diverged has no finite value, and infinities of both signs have no mean.
    endless = {difference for difference in differences if not math.isfinite(difference)}
    if endless:
        return Difference(endless.pop() if len(endless) == 1 else math.nan, math.nan, math.nan)
    mean, count = statistics.fmean(differences), len(differences)
    if count < 2:
        return Difference(mean, math.nan, math.nan)
    reach = float(t.ppf(0.975, count - 1)) * statistics.stdev(differences) / count**0.5
    return Difference(mean, mean - reach, mean + reach)


def sign_test(one: int, other: int, chance: float = 0.5) -> float:
    """Give the probability of a split that is as uneven, or more, by chance (two-sided).

    Args:
        one: How many are on one side.
        other: How many on the other.
        chance: Of each, to be on the first side.

    Example:
        >>> round(sign_test(9, 1), 4)
        0.0215

    """
    from scipy.stats import binomtest

    return float(binomtest(one, one + other, chance).pvalue) if one + other else 1.0
