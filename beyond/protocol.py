"""The search of a method's parameter and learning rate, as PLAN.md describes it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

from pseudograd.data.dataset import FOLDS
from pseudograd.fleet import Ramp, Trial
from pseudograd.search import Cell, Protocol
from pseudograd.search.protocol import Outcomes, trial_at

_FINAL = 100  # the first repetition of final networks, so that no seed was used for tuning


@dataclass(frozen=True)
class MethodProtocol(Protocol):
    """Every value at every rate, more rates while the best one is on an edge, then final networks.

    Attributes:
        ks: The values of the method's parameter.
        repetitions: The number of networks per configuration.
        retrainings: The number of final networks per choice.
        most_extensions: How often the rates of one value may be extended.
        factor: The ratio of neighbouring rates.
        stops: Whether the validation split also chooses the epoch.
        each: Whether every value is searched and has final networks, not only the best one.
        folds: Whether the final networks are those of five folds, each tested on its held-out fold.

    """

    kind: ClassVar[str] = "method"
    repetitions: int = 1
    most_extensions: int = 3
    factor: float = 2.0
    stops: bool = False
    each: bool = False
    folds: bool = False

    def _check(self) -> None:
        if not self.ks or not self.learning_rates:
            raise ValueError("ks and learning_rates must be at least one number each")

    @property
    def step(self) -> float:
        """The factor between neighbouring learning rates."""
        return self.factor

    @property
    def _is_given(self) -> bool:
        """Whether there is only one configuration, so nothing to search."""
        return len(self.ks) * len(self.learning_rates) == 1 and not self.most_extensions

    def searched(self, outcomes: Outcomes) -> dict[float | Ramp, list[float]]:
        """Return the rates of each value, extended while the best one is on an edge."""
        if self.each:
            return {k: super(MethodProtocol, self).rates(k, outcomes) for k in self.ks}
        rates = {k: sorted(self.learning_rates) for k in self.ks}
        extended: Counter[float | Ramp] = Counter()
        while True:
            cells = [cell for k in self.ks for cell in self._cells(k, rates[k], outcomes)]
            if len(cells) < sum(map(len, rates.values())):
                return rates
            best = self.best(cells)
            own = rates[best.k]
            if extended[best.k] == self.most_extensions:
                return rates
            if best.learning_rate == own[0]:
                own.insert(0, own[0] / self.factor)
            elif best.learning_rate == own[-1]:
                own.append(own[-1] * self.factor)
            else:
                return rates
            extended[best.k] += 1

    def rates(self, k: float | Ramp, outcomes: Outcomes) -> list[float]:
        """Return the rates to try for this value."""
        return self.searched(outcomes)[k]

    def cells(self, outcomes: Outcomes) -> list[Cell]:
        """Return all configurations tried so far."""
        searched = self.searched(outcomes)
        return [cell for k in self.ks for cell in self._cells(k, searched[k], outcomes)]

    def _grid(self, outcomes: Outcomes) -> list[Trial]:
        if self._is_given:
            return []
        searched = self.searched(outcomes)
        numbers = range(self.repetitions)
        return [self._at(k, rate, at) for k in self.ks for rate in searched[k] for at in numbers]

    def chosen_cells(self, outcomes: Outcomes) -> list[tuple[float | Ramp, float]]:
        """Return the configurations of final networks; complete only after the search."""
        if self._is_given:
            return [(self.ks[0], self.learning_rates[0])]
        best = self.best_of_each_k(outcomes)
        found = best if self.each else [self.best(best)]
        return [(cell.k, cell.learning_rate) for cell in found]

    def final_trials(self, outcomes: Outcomes) -> list[Trial]:
        """Return the trials of final networks."""
        if not self.retrainings:
            return []
        return [
            trial
            for k, rate in self.chosen_cells(outcomes)
            for trial in self.retrainings_of(k, rate)
        ]

    def retrainings_of(self, k: float | Ramp, rate: float) -> list[Trial]:
        """Return the final trials of one configuration."""
        if self.folds:
            return [self._at(k, rate, fold) for fold in range(FOLDS)]
        numbers = range(_FINAL, _FINAL + self.retrainings)
        return [self._at(k, rate, number, retrain=True) for number in numbers]

    def _at(self, k: float | Ramp, rate: float, repetition: int, **judged: bool) -> Trial:
        if self.stops and not judged:
            judged = {"bagged": True}  # one validation split for early stopping and evaluation
        return trial_at(self.recipe, self.seed, k, rate, repetition, **judged)

    @property
    def foretold(self) -> int:
        """The number of trials if no rates need to be extended."""
        grid = 0 if self._is_given else len(self.ks) * len(self.learning_rates) * self.repetitions
        return grid + self.retrainings * (len(self.ks) if self.each else 1)
