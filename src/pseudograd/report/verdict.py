"""The evidence for the chosen k from the test set, as numbers for the templates."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from pseudograd.fleet.recipe import ModuleRecipe
from pseudograd.search import Comparison, Difference, paired_difference


@dataclass(frozen=True)
class Verdict:
    """Whether k matters, by the interval over networks and the sign test over examples.

    Attributes:
        kind: `Comparison.verdict`, but "proof" for "better" and "worse".
        pairs: How many networks of each k were compared.
        errors: The mean test error with the chosen k and with k = 1.
        cross_entropies: The same for the cross-entropy.
        error: The difference of the errors. Its interval is clipped to [-1, 1], since Student's t
            is unbounded and very wide with two or three pairs.
        by_networks: Whether that interval excludes 0.
        opposed: Whether the sign test is significant in the opposite direction. It counts each
            example once, however many networks get it wrong, so the two can disagree.
        probabilities: "better", "worse" or "noise": the chosen k's probabilities, judged by the
            cross-entropy; empty for a single pair.

    """

    kind: str
    pairs: int
    errors: tuple[float, float]
    cross_entropies: tuple[float, float]
    error: Difference
    by_networks: bool
    opposed: bool
    probabilities: str


def verdict(comparison: Comparison) -> Verdict:
    """Return the verdict on the chosen k against k = 1."""
    groups = comparison.chosen, comparison.plain
    errors, cross_entropies = (
        tuple(statistics.fmean(getattr(outcome, name) for outcome in group) for group in groups)
        for name in ("error", "cross_entropy")
    )
    found = comparison.verdict
    cross_entropy = comparison.cross_entropy
    probabilities = "worse" if cross_entropy.low > 0 else "better" if cross_entropy.high < 0 else ""
    if cross_entropy.low <= 0 <= cross_entropy.high:
        probabilities = "noise"
    return Verdict(
        kind="proof" if found in ("better", "worse") else found,
        pairs=len(comparison.chosen),
        errors=(errors[0], errors[1]),
        cross_entropies=(cross_entropies[0], cross_entropies[1]),
        error=possible(comparison.error),
        by_networks=comparison.by_networks,
        opposed=comparison.by_examples * comparison.error.mean < 0,
        probabilities=probabilities,
    )


@dataclass(frozen=True)
class Unfinished:
    """The number of final networks that reached the epoch limit, their total, and the limit."""

    count: int
    total: int
    epochs: int


def diverged(comparison: Comparison) -> tuple[int, int] | None:
    """Return the number of diverged final networks and of all; None if none diverged."""
    final = {*comparison.chosen, *comparison.plain}
    lost = sum(math.isinf(outcome.cross_entropy) for outcome in final)
    return (lost, len(final)) if lost else None


def unfinished(comparison: Comparison) -> Unfinished | None:
    """Return how many final networks were still improving at the epoch limit; None if none were.

    Networks without early stopping, or with a schedule, are meant to train for all epochs.
    """
    recipe = comparison.chosen[0].trial.recipe
    if isinstance(recipe, ModuleRecipe) and not (recipe.patience and recipe.schedule == "constant"):
        return None
    final = {*comparison.chosen, *comparison.plain}
    cut = [outcome for outcome in final if outcome.stopped_by == "limit"]
    return Unfinished(len(cut), len(final), cut[0].epochs) if cut else None


def error_interval(errors: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95% interval of a mean error by Student's t, within [0, 1]; None for one value.

    >>> error_interval([0.1, 0.1])
    (0.1, 0.1)
    """
    if len(errors) < 2:
        return None
    found = paired_difference(list(errors), [0.0] * len(errors))
    return max(found.low, 0.0), min(found.high, 1.0)


def possible(difference: Difference) -> Difference:
    """Return a difference of two errors with its interval clipped to [-1, 1]."""
    low, high = max(difference.low, -1.0), min(difference.high, 1.0)  # NaN stays NaN
    return Difference(difference.mean, low, high)
