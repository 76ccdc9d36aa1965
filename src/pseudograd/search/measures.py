"""Quality of predictions: errors with intervals, calibration, and paired comparisons.

Probabilities have one row for each example and one column for each class; labels are class indices.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pseudograd.extras import needed_for
from pseudograd.search.comparison import Difference, sign_test

Floats = NDArray[np.floating[Any]]
Indices = NDArray[np.integer[Any]]

BINS = 15
_Z = 1.959964  # the normal quantile of a 95% interval
_LEAST = 1e-15  # as in scikit-learn's log_loss
_LEVEL = 0.05
_TOWARDS_1 = 4.0  # strength of the prior that pulls a temperature to 1 (docs/page.md)
_UNEQUAL = 1.5  # times as many examples in the largest class as in the smallest


def wilson(wrong: float, count: float) -> tuple[float, float]:
    """Return the 95% Wilson score interval of an error rate.

    >>> [round(end, 3) for end in wilson(0, 20)], [round(end, 3) for end in wilson(5, 20)]
    ([0.0, 0.161], [0.112, 0.469])
    """
    if not count:
        return 0.0, 1.0
    share, weight = wrong / count, _Z * _Z / count
    middle = (share + weight / 2) / (1 + weight)
    reach = _Z * math.sqrt(share * (1 - share) / count + weight / (4 * count)) / (1 + weight)
    return max(0.0, middle - reach), min(1.0, middle + reach)


def effective_count(wrong: NDArray[np.bool_], groups: Indices) -> float:
    """Return the effective sample size: how many independent labels are as informative as these.

    Labels of one group are correlated, so the variance of the error is estimated between groups (a
    ratio estimate). If all predictions are right, or all wrong, each group counts as one.

    >>> at = np.arange(6) // 3
    >>> effective_count(np.array([0, 1, 0, 1, 0, 0], bool), at)  # no correlation within groups
    6.0
    >>> effective_count(np.zeros(6, bool), at)
    2.0
    """
    _, groups = np.unique(groups, return_inverse=True)
    sizes = np.bincount(groups)
    error = wrong.mean() if len(wrong) else 0.0
    if len(sizes) < 2 or error in (0, 1):
        return float(len(sizes))
    variance = _variance_between(np.bincount(groups, wrong) - error * sizes, len(wrong))
    return min(float(len(wrong)), error * (1 - error) / variance if variance else math.inf)


def _variance_between(deviations: Floats, count: int) -> float:
    """Return the variance of a mean over all labels, from the deviations of the groups' sums."""
    groups = len(deviations)
    return float((deviations**2).sum()) * groups / (groups - 1) / count**2


def log_loss(probabilities: Floats, labels: Indices) -> float:
    """Return the mean of -log p of the true class.

    >>> log_loss(np.array([[0.5, 0.5], [1.0, 0.0]]), np.array([1, 0])) == math.log(2) / 2
    True
    """
    return float(_losses(probabilities, labels).mean())


def log_loss_difference(
    first: Floats, second: Floats, labels: Indices, groups: Indices | None = None
) -> Difference:
    """Return the mean difference of two log losses on the same rows, with its 95% interval.

    The interval is computed over groups of rows, if there are any.

    >>> even, sure = np.array([[0.5, 0.5]] * 4), np.array([[0.75, 0.25]] * 4)
    >>> log_loss_difference(sure, even, np.array([0, 0, 0, 0]))
    Difference(mean=-0.405..., low=-0.405..., high=-0.405...)
    """
    differences = _losses(first, labels) - _losses(second, labels)
    mean, reach = float(differences.mean()), math.nan
    _, at = np.unique(np.arange(len(labels)) if groups is None else groups, return_inverse=True)
    sums = np.bincount(at, differences) - mean * np.bincount(at)
    if len(sums) > 1:
        reach = _Z * math.sqrt(_variance_between(sums, len(labels)))
    return Difference(mean, mean - reach, mean + reach)


def _losses(probabilities: Floats, labels: Indices) -> NDArray[np.float64]:
    right = probabilities[np.arange(len(labels)), labels].astype(np.float64)
    losses: NDArray[np.float64] = -np.log(right.clip(_LEAST, 1.0))
    return losses


def balanced_error(predicted: Indices, labels: Indices) -> float:
    """Return the mean error rate of the classes that have examples.

    >>> balanced_error(np.array([0, 0, 0, 0]), np.array([0, 0, 0, 1]))
    0.5
    """
    return float(np.mean([(predicted[labels == at] != at).mean() for at in np.unique(labels)]))


def are_unequal(counts: Indices) -> bool:
    """Return whether one class has over 1.5 times as many examples as another.

    >>> are_unequal(np.array([30, 20])), are_unequal(np.array([31, 20]))
    (False, True)
    """
    return bool(counts.max() > _UNEQUAL * counts.min())


def confusion(predicted: Indices, labels: Indices, classes: int) -> NDArray[np.int64]:
    """Return how many examples of each class (row) are predicted as each class (column).

    >>> confusion(np.array([0, 1, 1]), np.array([0, 0, 1]), 2).tolist()
    [[1, 1], [0, 1]]
    """
    flat = np.bincount(labels.astype(np.int64) * classes + predicted, minlength=classes * classes)
    return flat.reshape(classes, classes)


def reliability(
    probabilities: Floats, labels: Indices, bins: int = BINS, fewest: int = 1
) -> list[dict[str, float | int]]:
    """Return the mean confidence and the accuracy in bins of equal width.

    Confidence is the probability of the predicted class. Bins with fewer than ``fewest`` examples
    are merged with their neighbour.

    >>> reliability(np.array([[0.9, 0.1], [0.8, 0.2], [0.4, 0.6]]), np.array([0, 1, 1]), bins=2)
    [{'confidence': 0.7666..., 'accuracy': 0.6666..., 'count': 3}]
    """
    confidence, right = probabilities.max(1).astype(np.float64), probabilities.argmax(1) == labels
    place = np.minimum((confidence * bins).astype(np.int64), bins - 1)
    groups = [place == at for at in np.unique(place)]
    joined = groups[:1]
    for group in groups[1:]:
        if min(joined[-1].sum(), group.sum()) < fewest:
            joined[-1] = joined[-1] | group
        else:
            joined.append(group)
    return [
        {
            "confidence": float(confidence[group].mean()),
            "accuracy": float(right[group].mean()),
            "count": int(group.sum()),
        }
        for group in joined
    ]


def expected_calibration_error(probabilities: Floats, labels: Indices) -> float:
    """Return the expected calibration error (ECE).

    >>> round(expected_calibration_error(np.array([[0.9, 0.1]] * 2), np.array([0, 1])), 6)
    0.4
    """
    found = reliability(probabilities, labels)
    gaps = (abs(one["confidence"] - one["accuracy"]) * one["count"] for one in found)
    return sum(gaps) / len(labels)


def fit_temperature(
    log_probabilities: Floats, labels: Indices, weights: Floats | None = None
) -> float:
    """Return the temperature that minimizes the log loss of softmax(log p / temperature).

    Fit it on out-of-fold predictions. It lies between 1/20 and 20. The penalty 4 (log temperature)²
    keeps it near 1 if there are few examples; without it, predictions that are all right would
    lead to a temperature near 0, and overconfidence.

    Args:
        log_probabilities: Logarithms of probabilities, or logits.
        labels: The true classes.
        weights: The sample weights; None if all are equal.

    """
    with needed_for("fitting a temperature"):
        from scipy.optimize import minimize_scalar

    logits = np.maximum(log_probabilities.astype(np.float64), -100.0 + log_probabilities.max())
    logits -= logits.max(1, keepdims=True)
    right = logits[np.arange(len(labels)), labels]
    counts = np.ones(len(labels)) if weights is None else weights / weights.mean()

    def loss(power: float) -> float:
        inverse = math.exp(power)
        losses = np.log(np.exp(inverse * logits).sum(1)) - inverse * right
        return float(counts @ losses + _TOWARDS_1 * power**2)

    found = minimize_scalar(loss, bounds=(-math.log(20), math.log(20)), method="bounded")
    return math.exp(-float(found.x))


def compare_on_rows(
    first_wrong: NDArray[np.bool_],
    second_wrong: NDArray[np.bool_],
    groups: Indices | None = None,
) -> dict[str, Any]:
    """Compare the mistakes of two classifiers on the same examples.

    Args:
        first_wrong: The mistakes of the first.
        second_wrong: The mistakes of the second.
        groups: The group of each label, if there are groups, such as the labels of one example. The
            test is then a sign test over groups, on which classifier gets more labels right, and
            the interval is computed over groups, never narrower than for independent labels.

    Returns:
        The difference of errors, first minus second, and its 95% interval (Agresti and Min's
        adjusted Wald interval for matched pairs); the number of examples that only the first and
        only the second gets right; the p-value of the exact McNemar test on these; and the verdict
        on the first: "better" or "worse" if p < 0.05, else "level".

    Example:
        >>> first, second = np.arange(40) < 2, np.arange(40) < 12
        >>> found = compare_on_rows(first, second)
        >>> found["difference"], found["only_first_right"], found["verdict"]
        (-0.25, 10, 'better')

    """
    found = compare_counts(
        int((~first_wrong & second_wrong).sum()),
        int((first_wrong & ~second_wrong).sum()),
        len(first_wrong),
    )
    return found if groups is None else _compare_groups(found, first_wrong, second_wrong, groups)


def _compare_groups(
    found: dict[str, Any],
    first_wrong: NDArray[np.bool_],
    second_wrong: NDArray[np.bool_],
    groups: Indices,
) -> dict[str, Any]:
    with needed_for("comparing networks"):
        from scipy.stats import t

    _, groups = np.unique(groups, return_inverse=True)
    more = np.bincount(groups, first_wrong.astype(np.float64) - second_wrong)
    mean, sizes = found["difference"], np.bincount(groups)
    p = sign_test(int((more < 0).sum()), int((more > 0).sum()))
    agree = mean * ((more > 0).sum() - (more < 0).sum()) > 0
    verdict = "level" if p >= _LEVEL or not agree else "better" if mean < 0 else "worse"
    low, high = -1.0, 1.0
    if len(sizes) > 1:
        variance = _variance_between(more - mean * sizes, len(first_wrong))
        reach = float(t.ppf(0.975, len(sizes) - 1)) * math.sqrt(variance)
        low = max(low, min(found["low"], mean - reach))
        high = min(high, max(found["high"], mean + reach))
    return {**found, "low": low, "high": high, "p": p, "verdict": verdict}


def compare_counts(only_first: int, only_second: int, count: int) -> dict[str, Any]:
    """Compare two classifiers like `compare_on_rows`, from the counts of discordant examples."""
    p = sign_test(only_first, only_second)
    interval = _matched_pairs(only_second, only_first, count)
    verdict = "level"
    if p < _LEVEL:
        verdict = "better" if only_first > only_second else "worse"
    return {
        "difference": interval.mean,
        "low": interval.low,
        "high": interval.high,
        "only_first_right": only_first,
        "only_second_right": only_second,
        "p": p,
        "verdict": verdict,
    }


def _matched_pairs(more: int, fewer: int, count: int) -> Difference:
    """Return the interval of (more - fewer) / count, with half an example added to each cell."""
    difference, discordant, total = more - fewer, more + fewer + 1, count + 2
    reach = _Z * math.sqrt(discordant - difference**2 / total) / total
    middle = difference / total
    return Difference(difference / count, max(middle - reach, -1.0), min(middle + reach, 1.0))
