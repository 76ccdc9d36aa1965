"""The paper's protocol with the two additions that RESULTS.md reports on."""

from __future__ import annotations

from dataclasses import dataclass, fields

from pseudograd.fleet import Ramp, Trial
from pseudograd.search import Cell, Protocol
from pseudograd.search.protocol import Outcomes, Stage


@dataclass(frozen=True)
class PaperProtocol(Protocol):
    """The search, with two additions that do not affect the choice.

    - The cross-validation networks of the choice and of k = 1, trained again for evaluation on the
      test set: the paper's test errors may be those of such networks.
    - k = 1 at the choice's learning rate, if the search never tried it: an apparent effect of k may
      be an effect of the rate.
    """

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages of the search, and the two additions."""
        return (*super().stages, self.tested_trials, self.control_trials)

    @property
    def searched(self) -> Protocol:
        """The search alone."""
        return Protocol(**{field.name: getattr(self, field.name) for field in fields(self)})

    def is_searched(self, outcomes: Outcomes) -> bool:
        """Return whether all but the control is done."""
        stages = (*super().stages, self.tested_trials)  # a stage needs those before it
        return all(trial in outcomes for stage in stages for trial in stage(outcomes))

    def tested_trials(self, outcomes: Outcomes) -> list[Trial]:
        """Return the cross-validation trials that are evaluated on the test set."""
        pairs = {(cell.k, cell.learning_rate): None for cell in self.chosen(outcomes)}
        return [trial for pair in pairs for trial in self.tested_of(*pair)]

    def tested_of(self, k: float | Ramp, rate: float) -> list[Trial]:
        """Return the trials of one pair's cross-validation, evaluated on the test set."""
        return [self._at(k, rate, number, test=True) for number in range(self.repetitions)]

    def control_trials(self, outcomes: Outcomes) -> list[Trial]:
        """Return the trials of k = 1 at the choice's rate, unless the search has tried it.

        They are cross-validation trials and retrained networks.
        """
        rate = self.chosen(outcomes)[0].learning_rate
        if rate in self.rates(1.0, outcomes):
            return []
        validated = [self._at(1.0, rate, repetition) for repetition in range(self.repetitions)]
        return validated + self.retrainings_of(1.0, rate)

    def control_cell(self, outcomes: Outcomes) -> Cell | None:
        """Return k = 1 at the choice's rate, once it has been tried in full; otherwise None."""
        return next(
            iter(self._cells(1.0, [self.chosen(outcomes)[0].learning_rate], outcomes)), None
        )
