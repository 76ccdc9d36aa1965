"""Bagging: the default search, whose networks of cross-validation are themselves the model.

Each pair of k and learning rate trains one network per fold, on all the other folds. So every
training example has a prediction by a network that has not seen it, and an ensemble can be chosen
by these (`pseudograd.search.ensemble`) without training anything more.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from pseudograd.data.dataset import FOLDS
from pseudograd.fleet import MLPRecipe, Outcome, Trial
from pseudograd.fleet.trial import mixed_score
from pseudograd.search.protocol import Cell, Outcomes, Protocol, trial_at

KS = (2.0, 1.0, 0.5)
LEARNING_RATES = (0.003, 0.01, 0.03)
_LARGE = 2000  # training examples from which on bad pairs are dropped after one fold


@dataclass(frozen=True)
class Bagging(Protocol):
    """Cross-validation of every pair of k and learning rate, and an ensemble of its networks.

    Attributes:
        ks: The values of k to try.
        learning_rates: The rates to start from. While the best rate of a k is the first or last,
            another one is tried, up to ``most_extensions`` times.
        repetitions: Networks of each pair, a multiple of five: every fold is held out equally often.
        drop_early: Whether pairs are dropped that are not in the better half after their first
            network.

    Example:
        >>> from pseudograd.fleet import MLPRecipe
        >>> protocol = Bagging(MLPRecipe("digits", (64, 64)))
        >>> len(protocol.wanted({}))  # 3 k, 3 rates, 5 folds
        45

    """

    kind: ClassVar[str] = "bagging"
    ks: tuple[float, ...] = KS
    learning_rates: tuple[float, ...] = LEARNING_RATES
    repetitions: int = FOLDS
    retrainings: int = 0
    most_extensions: int = 1
    drop_early: bool = False

    def _check(self) -> None:
        super()._check()
        if self.repetitions % FOLDS:
            raise ValueError(
                f"repetitions must be a multiple of {FOLDS}, so that every fold is held out "
                f"equally often, not {self.repetitions}"
            )
        if self.retrainings:
            raise ValueError("retrainings must be 0: the networks of the folds are the model")
        if 1.0 not in self.ks:
            raise ValueError(f"ks must contain 1, which the choice is compared with, not {self.ks}")

    @property
    def step(self) -> float:
        """The factor between neighbouring learning rates beyond the first ones."""
        rates = sorted(self.learning_rates)
        return rates[-1] / rates[-2] if len(rates) > 1 else super().step

    def _at(self, k: float, rate: float, repetition: int, **judged: bool) -> Trial:
        return trial_at(self.recipe, self.seed, k, rate, repetition, bagged=True)

    def _cell(self, k: float, rate: float, outcomes: Iterable[Outcome]) -> Cell:
        outcomes = list(outcomes)
        losses = tuple(outcome.cross_entropy for outcome in outcomes)
        return Cell(k, rate, tuple(outcome.error for outcome in outcomes), losses)

    def _grid(self, outcomes: Outcomes) -> list[Trial]:
        if not self.drop_early:
            return super()._grid(outcomes)
        pairs = [(k, rate) for k in self.ks for rate in self.first_rates(outcomes)]
        first = [self._at(k, rate, 0) for k, rate in pairs]
        if any(trial not in outcomes for trial in first):
            return first
        return [
            self._at(k, rate, repetition)
            for k, rate in self._better_half(pairs, outcomes)
            for repetition in range(self.repetitions)
        ]

    def _better_half(
        self, pairs: list[tuple[float, float]], outcomes: Outcomes
    ) -> list[tuple[float, float]]:
        """Return the better half of the pairs by their first network, the best of k = 1 included."""

        def score(pair: tuple[float, float]) -> float:
            outcome = outcomes[self._at(*pair, 0)]
            return mixed_score(outcome.error, outcome.cross_entropy)

        ranked = sorted(pairs, key=score)
        plain = next(pair for pair in ranked if pair[0] == 1)
        kept = {*ranked[: math.ceil(len(pairs) / 2)], plain}
        return [pair for pair in pairs if pair in kept]

    def trials_of(self, cell: Cell) -> list[Trial]:
        """Return the trials of a pair."""
        return [self._at(cell.k, cell.learning_rate, number) for number in range(self.repetitions)]


def table_recipe(data: str, train_size: int, data_hash: str = "", **settings: Any) -> MLPRecipe:
    """Return the recipe for tables: what measured best on real ones (docs/notes/tables.md).

    Two hidden layers that grow with the data, AdamW, a learning rate that falls along a cosine, and
    the epoch that is best on the held-out fold.

    Example:
        >>> recipe = table_recipe("patients.csv", 800)
        >>> recipe.hidden_layer_sizes, recipe.batch_size, recipe.max_epochs
        ((64, 64), 64, 60)

    """
    width = 32 if train_size < 700 else 64 if train_size < 10_000 else 128
    defaults: dict[str, Any] = {
        "hidden_layer_sizes": (width, width),
        "optimizer": "adam",
        "weight_decay": 0.1,
        "schedule": "cosine",
        "batch_size": 32 if train_size < 400 else 64 if train_size < 1200 else 128,
        "max_epochs": epochs_for(train_size),
        "stop_by": "error and cross-entropy",
        "stratified": True,
        "bins": 8 if train_size < 700 else 16,
    }
    settings = {name: value for name, value in settings.items() if value is not None}
    recipe = defaults | settings
    recipe.setdefault("patience", recipe["max_epochs"])
    return MLPRecipe(data, data_hash=data_hash, **recipe)


def epochs_for(train_size: int) -> int:
    """Return the number of epochs: fewer for more examples, since an epoch then has more steps.

    Example:
        >>> [epochs_for(size) for size in (100, 2_000, 20_000, 1_000_000)]
        [60, 40, 20, 4]

    """
    return max(4, min(60, round(40 * (2000 / train_size) ** 0.3)))
