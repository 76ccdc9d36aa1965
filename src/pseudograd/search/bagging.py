"""Bagging: the default search, whose model is an ensemble of the cross-validation networks.

Each pair of k and learning rate trains one network per fold, on all the other folds. The ensemble
is chosen by out-of-fold predictions (`pseudograd.search.ensemble`), and nothing is retrained.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from pseudograd.data.dataset import FOLDS
from pseudograd.fleet import MLPRecipe, Outcome, Ramp, Recipe, Trial
from pseudograd.fleet.recipe import is_whole
from pseudograd.fleet.trial import mixed_score
from pseudograd.search.protocol import Cell, Outcomes, Protocol, Stage, rates_in, trial_at
from pseudograd.words import counted

KS = (2.0, 1.0, 0.5)
LEARNING_RATES = (0.003, 0.01, 0.03)
_LOW_RATES = (0.001, 0.003, 0.01)
_SMALL = 600  # training examples below which bins and large steps overfit
_LARGE = 2_000  # training examples from which bad pairs are dropped after one fold
_BATCHES = (400, 1_500, 6_000, 50_000, 200_000)  # training examples at which batches double
_SAMPLE = 50_000  # training examples of the first networks on a very large table


@dataclass(frozen=True)
class Bagging(Protocol):
    """Cross-validation of every pair of k and learning rate, and an ensemble of its networks.

    Attributes:
        ks: The values of k to try, numbers or ramps, as in `Protocol`.
        learning_rates: The rates to start from. While the best rate of a k is the lowest or the
            highest, another one is tried, up to ``most_extensions`` times.
        repetitions: Networks per pair, a multiple of five, so that every fold is held out equally
            often.
        finalists: How many pairs are trained on all folds after a first network of each, in
            addition to the best pair of k = 1. None for all.
        sample: The maximum number of training examples of these first networks; 0 for all.

    Example:
        >>> from pseudograd.fleet import MLPRecipe
        >>> protocol = Bagging(MLPRecipe("digits", (64, 64)))
        >>> len(protocol.wanted({}))  # 3 k, 3 rates, 5 folds
        45

    """

    kind: ClassVar[str] = "bagging"
    ks: tuple[float | Ramp, ...] = KS
    learning_rates: tuple[float, ...] = LEARNING_RATES
    repetitions: int = FOLDS
    retrainings: int = 0
    most_extensions: int = 1
    finalists: int | None = None
    sample: int = 0

    def _check(self) -> None:
        super()._check()
        if self.repetitions % FOLDS:
            raise ValueError(
                f"repetitions must be a multiple of {FOLDS}, so that every fold is held out "
                f"equally often, not {self.repetitions}"
            )
        if self.retrainings:
            raise ValueError("retrainings must be 0: the networks of the folds are the model")
        if not self.learning_rates:
            raise ValueError("learning_rates must be at least one number, not ()")
        if self.finalists is not None and not is_whole(self.finalists, 1, math.inf):
            raise ValueError(f"finalists must be 1 or more, or None, not {self.finalists!r}")
        if not is_whole(self.sample, 0, math.inf):
            raise ValueError(f"sample must be a whole number, 0 or more, not {self.sample!r}")

    @property
    def foretold(self) -> int:
        """The number of trials if no best learning rate is at an end of the range."""
        pairs = len(self.ks) * len(self.learning_rates)
        if self.finalists is None:
            return pairs * self.repetitions
        finalists = min(self.finalists + 1, pairs)
        again = pairs if self.sample else pairs - finalists
        return again + finalists * self.repetitions

    def plan(self) -> str:
        """Return a line that describes what will be trained."""
        rates = counted(len(self.learning_rates), "learning rate")
        pairs = f"{counted(len(self.ks), 'value')} of k × {rates}"
        if self.finalists is None:
            return f"{self.foretold} networks or more: {pairs} × {self.repetitions} folds"
        on = f" on {self.sample:,} training examples" if self.sample else ""
        return (
            f"about {self.foretold} networks: first {pairs}{on}, then the best "
            f"{counted(self.finalists, 'pair')} and the best of k = 1 × {self.repetitions} folds"
        )

    @property
    def step(self) -> float:
        """The factor between neighbouring learning rates outside the initial range."""
        rates = sorted(self.learning_rates)
        return rates[-1] / rates[-2] if len(rates) > 1 else super().step

    @functools.cached_property
    def sampled(self) -> Recipe:
        """The recipe of the first networks."""
        if not self.sample:
            return self.recipe
        if not isinstance(self.recipe, MLPRecipe):
            raise ValueError("sample must be 0 for recipes other than MLPRecipe")
        return replace(self.recipe, sample=self.sample)

    @functools.cached_property
    def recipes(self) -> list[Recipe]:
        """The recipes of all trials."""
        return [*dict.fromkeys((self.sampled, self.recipe))]

    def stage_of(self, trial: Trial) -> str:
        """Return "first look" or "search"."""
        return "first look" if trial.recipe == self.sampled != self.recipe else "search"

    def _at(self, k: float | Ramp, rate: float, repetition: int, **judged: bool) -> Trial:
        return trial_at(self.recipe, self.seed, k, rate, repetition, bagged=True)

    def _earlier_rates(self, k: float | Ramp, outcomes: Outcomes) -> set[float]:
        return rates_in(outcomes, self.recipe, k)

    def _cell(self, k: float | Ramp, rate: float, outcomes: Iterable[Outcome]) -> Cell:
        outcomes = list(outcomes)
        losses = tuple(outcome.cross_entropy for outcome in outcomes)
        return Cell(k, rate, tuple(outcome.error for outcome in outcomes), losses)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The first looks, if any, and the grid."""
        return (lambda _: list(self._first_looks().values()), self._grid)

    def _first_looks(self) -> dict[tuple[float | Ramp, float], Trial]:
        if self.finalists is None:
            return {}
        return {
            (k, rate): trial_at(self.sampled, self.seed, k, rate, 0, bagged=True)
            for k in self.ks
            for rate in sorted(self.learning_rates)
        }

    def _grid(self, outcomes: Outcomes) -> list[Trial]:
        if self.finalists is None:
            return super()._grid(outcomes)
        pairs = self._going_on(outcomes)
        return [self._at(*pair, number) for pair in pairs for number in range(self.repetitions)]

    def _going_on(self, outcomes: Outcomes) -> list[tuple[float | Ramp, float]]:
        """Return the best pairs by their first network, including the best of k = 1."""
        looks = self._first_looks()

        def score(pair: tuple[float | Ramp, float]) -> float:
            outcome = outcomes[looks[pair]]
            return mixed_score(outcome.error, outcome.cross_entropy)

        ranked = sorted(looks, key=score)
        plain = [pair for pair in ranked if pair[0] == 1]
        return [*dict.fromkeys((*ranked[: self.finalists], *plain[:1]))]

    def open_ks(self, outcomes: Outcomes) -> list[float | Ramp]:
        """Return each k whose best rate is the lowest or the highest one tried."""
        if self.finalists is None:
            return super().open_ks(outcomes)
        ends = min(self.learning_rates), max(self.learning_rates)
        best = self.best_of_each_k(outcomes)
        return [cell.k for cell in best if cell.error and cell.learning_rate in ends]


def bagging_for(recipe: Recipe, train_size: int, **settings: Any) -> Bagging:
    """Return the search for a table of this size; on more examples, fewer pairs train in full.

    Example:
        >>> bagging_for(table_recipe("patients.csv", 800), 800).finalists
        >>> bagging_for(table_recipe("visits.csv", 800_000), 800_000).finalists
        1

    """
    defaults: dict[str, Any] = {}
    if train_size < _SMALL:
        defaults = {"learning_rates": _LOW_RATES}
    if train_size >= _LARGE:
        defaults = {"finalists": 4}
    if train_size >= 2 * _SAMPLE:
        defaults = {"finalists": 1, "sample": _SAMPLE}
    settings = {name: value for name, value in settings.items() if value is not None}
    return Bagging(recipe, **defaults | settings)


def table_recipe(
    data: str, train_size: int, data_hash: str = "", *, pixels: bool = False, **settings: Any
) -> MLPRecipe:
    """Return the recipe for tables, tuned on real ones (docs/notes/tables.md).

    It has two hidden layers whose width depends on the number of examples, bins for numbers, AdamW,
    a cosine schedule, and keeps the epoch that is best on the held-out fold.

    Args:
        data: The name of the data set.
        train_size: The number of training examples.
        data_hash: The first digits of its hash.
        pixels: Whether the features are pixels, which are not binned.
        settings: Other settings of `MLPRecipe`; None means the default.

    Example:
        >>> recipe = table_recipe("patients.csv", 800)
        >>> recipe.hidden_layer_sizes, recipe.bins, recipe.batch_size, recipe.max_epochs
        ((64, 64), 16, 64, 53)

    """
    width = 32 if train_size < _SMALL else 64 if train_size < 10_000 else 128
    bins = 0 if train_size < _SMALL else 16
    defaults: dict[str, Any] = {
        "hidden_layer_sizes": (2 * width, 2 * width) if pixels else (width, width),
        "bins": 0 if pixels else bins,
        "optimizer": "adam",
        "weight_decay": 0.1,
        "schedule": "cosine",
        "batch_size": 32 << sum(train_size >= size for size in _BATCHES),
        "max_epochs": epochs_for(train_size),
        "stop_by": "error and cross-entropy",
        "stratified": True,
    }
    settings = {name: value for name, value in settings.items() if value is not None}
    recipe = defaults | settings
    recipe.setdefault("patience", recipe["max_epochs"])
    return MLPRecipe(data, data_hash=data_hash, **recipe)


def epochs_for(train_size: int) -> int:
    """Return the number of epochs: fewer for more examples, whose epochs have more steps.

    Example:
        >>> [epochs_for(size) for size in (100, 2_000, 20_000, 1_000_000)]
        [60, 40, 20, 6]

    """
    return max(4, min(60, round(40 * math.pow(2000 / train_size, 0.3))))
