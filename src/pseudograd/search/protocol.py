"""The paper's protocol (supplement, "Choosing the value of k"), a function of the outcomes so far.

`Protocol.wanted` returns the trials needed next, and none when the search is finished. A protocol
is stateless, so a search can be stopped and resumed at any point with the same result.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from numbers import Integral
from typing import Any, ClassVar

from pseudograd.fleet import Outcome, Ramp, Recipe, Split, Trial
from pseudograd.fleet.ramp import as_k, level, plain_k
from pseudograd.fleet.recipe import are_numbers
from pseudograd.fleet.trial import mixed_score
from pseudograd.rules.checks import check_k
from pseudograd.words import counted, fraction

SHALLOW_KS = (4.0, 2.0, 1.0, 0.5, 0.25, 0.125, 0.0625)
"""The paper's k grid for networks with one hidden layer."""
DEEP_KS = (4.0, 2.0, 1.0, 0.5, 0.25)
"""The paper's k grid for networks with several hidden layers."""

# Settings that may change between sessions: the range of the search.
RANGE = ("ks", "initial_rate", "learning_rates", "most_extensions", "baseline")

_MOST = 100_000  # bound on repetitions, retrainings and extensions
_SWEPT = 5  # epochs of a trial in the preliminary sweep

Outcomes = Mapping[Trial, Outcome]
Stage = Callable[[Outcomes], list[Trial]]


@dataclass(frozen=True)
class Cell:
    """One pair of k and learning rate, and its validation errors.

    Attributes:
        k: The sensitivity, a number or a `pseudograd.fleet.Ramp`.
        learning_rate: The step size.
        errors: The error of each repetition, a fraction.
        losses: The cross-entropy of each repetition, if they count for the selection.

    Example:
        >>> cell = Cell(0.5, 0.1, (0.02, 0.04))
        >>> round(cell.error, 3), round(cell.standard_error, 3)
        (0.03, 0.01)

    """

    k: float | Ramp
    learning_rate: float
    errors: tuple[float, ...]
    losses: tuple[float, ...] = ()

    @property
    def score(self) -> float:
        """The selection criterion: the error, or `mixed_score` if there are losses."""
        if not self.losses:
            return self.error
        return round(mixed_score(self.error, statistics.fmean(self.losses)), 12)

    @property
    def error(self) -> float:
        """The mean validation error, err_{k,η}."""
        # Rounded, so that equal numbers of mistakes tie whatever the order of summation.
        return round(statistics.fmean(self.errors), 12)

    @property
    def standard_error(self) -> float:
        """The standard error of that mean."""
        if len(self.errors) < 2:
            return math.nan
        return statistics.stdev(self.errors) / math.sqrt(len(self.errors))


@dataclass(frozen=True)
class Protocol:
    """The paper's search for k and the learning rate, and its comparison of the choice with k = 1.

    Attributes:
        recipe: The settings that all trials share.
        ks: The values of k to try; by default the paper's for one hidden layer. A string like
            "0.5→2" or a `pseudograd.fleet.Ramp` is a k that changes linearly over ``max_epochs``.
        initial_rate: The learning rate to start from, together with its half and double; by default
            a short sweep finds it.
        learning_rates: The rates to start from, instead of ``initial_rate``.
        repetitions: How often each pair is trained, each time with other roles of the folds.
        retrainings: How many final networks to train for the choice and for k = 1; 0 for none.
        seed: Determines the folds, the initial weights and the order of the examples.
        most_extensions: How many rates the search may add for each k by halving or doubling; a k
            that needs more is reported in ``open_ks``.
        baseline: The value of k that the choice is compared with, instead of 1.
        parameter: What reports call k, if it is the parameter of another rule.

    Example:
        >>> from pseudograd.fleet import MLPRecipe
        >>> protocol = Protocol(MLPRecipe("digits", (400,)), initial_rate=0.1)
        >>> len(protocol.wanted({})), protocol.ks[-1]  # 7 k, 3 rates, 7 repetitions
        (147, 0.0625)

    """

    kind: ClassVar[str] = "paper"
    grows: ClassVar[tuple[str, ...]] = ()  # settings that a later session may raise
    recipe: Recipe
    ks: tuple[float | Ramp, ...] = SHALLOW_KS
    initial_rate: float | None = None
    learning_rates: tuple[float, ...] = ()
    repetitions: int = 7
    retrainings: int = 5
    seed: int = 0
    most_extensions: int = 12
    baseline: float = 1.0
    parameter: str = "k"

    def __post_init__(self) -> None:
        # Convert NumPy numbers to Python numbers, since JSON holds no others.
        object.__setattr__(self, "ks", _ks(self.ks))
        rates = self.learning_rates
        numbers = isinstance(rates, Iterable) and are_numbers(*rates)
        if not numbers or len(set(rates)) < len(rates):
            raise ValueError(f"learning_rates must be distinct numbers, not {rates!r}")
        object.__setattr__(self, "learning_rates", tuple(map(float, rates)))
        if self.initial_rate is not None:
            object.__setattr__(self, "initial_rate", float(self.initial_rate))
        if not are_numbers(self.baseline):
            raise ValueError(f"baseline must be a number, not {self.baseline!r}")
        object.__setattr__(self, "baseline", float(self.baseline))
        for name in ("repetitions", "retrainings", "seed", "most_extensions"):
            value = getattr(self, name)
            if not isinstance(value, Integral):
                raise ValueError(f"{name} must be a whole number, not {value!r}")
            object.__setattr__(self, name, int(value))
        self._check()

    def _check(self) -> None:
        if not self.ks:
            raise ValueError("ks must be at least one number, not ()")
        other = self.parameter != "k" or getattr(self.recipe, "rule", "tunable") != "tunable"
        free = other and self.recipe.kind != "mlp"
        for k in self.ks:
            try:
                check_k(1.0 if free and math.isfinite(level(k)) else level(k))
            except ValueError as problem:
                wanted = "finite numbers" + " above 0 (2^-100 to 2^100)" * (not free)
                raise ValueError(f"ks must be {wanted}, not {self.ks}") from problem
        if self.retrainings and self.baseline not in self.ks:
            raise ValueError(
                f"ks must contain {fraction(self.baseline)}, because the chosen {self.parameter} "
                f"is compared with it, not {self.ks}"
            )
        if self.learning_rates and self.initial_rate is not None:
            raise ValueError("initial_rate must be left out if learning_rates are given")
        for rate in (*self.learning_rates, self.initial_rate):
            if rate is not None and not 0 < rate < math.inf:
                raise ValueError(f"learning_rates must be finite numbers above 0, not {rate}")
        for name, least in {"repetitions": 1, "retrainings": 0, "most_extensions": 0}.items():
            if (value := getattr(self, name)) < least:
                raise ValueError(f"{name} must be {least} or more, not {value}")
            if value >= _MOST:
                raise ValueError(f"{name} must be below {_MOST}, not {value}")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must be a whole number in [0, 2^32), not {self.seed}")
        _ = self.sweep  # raises now if the recipe cannot be swept

    # --- trials ------------------------------------------------------------------------------

    def wanted(self, outcomes: Outcomes) -> list[Trial]:
        """Return the trials that are needed next and have no outcome yet."""
        for stage in self.stages:
            missing = [trial for trial in stage(outcomes) if trial not in outcomes]
            if missing:
                return missing
        return []

    @property
    def foretold(self) -> int:
        """The expected number of trials, if no best learning rate lies on an edge."""
        rates = len(self.learning_rates) or 3
        finals = self.retrainings * (2 if len(self.ks) > 1 else 1)
        return len(self.sweep) + len(self.ks) * rates * self.repetitions + finals

    def plan(self) -> str:
        """Return a one-line description of the networks to train."""
        more = f", more where the best learning rate of a {self.parameter} is the lowest or highest"
        return (
            f"about {self.foretold} networks{more * bool(self.most_extensions)}: "
            f"{counted(len(self.ks), 'value')} of {self.parameter} × "
            f"{counted(len(self.learning_rates) or 3, 'learning rate')} × "
            f"{counted(self.repetitions, 'repetition')}, and "
            f"{counted(self.retrainings, 'final network')} each of the choice and of "
            f"{self.parameter} = {fraction(self.baseline)}"
        )

    @property
    def step(self) -> float:
        """The factor by which the range of learning rates is extended."""
        return 2.0

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages of the search; each starts when the previous one is finished."""
        return (lambda _: self.sweep, self._grid, self.final_trials)

    @functools.cached_property
    def sweep(self) -> list[Trial]:
        """The trials of the short preliminary sweep of the baseline: rates a factor of 4 apart."""
        if self.initial_rate is not None or self.learning_rates:
            return []
        short = self.recipe.shortened(_SWEPT)
        return [trial_at(short, self.seed, self.baseline, 4.0**power, 0) for power in range(-6, 2)]

    @functools.cached_property  # used for every line of a ledger
    def recipes(self) -> list[Recipe]:
        """The recipes of all trials: the protocol's, and its short form for a sweep."""
        try:
            return [*dict.fromkeys((self.recipe.shortened(_SWEPT), self.recipe))]
        except ValueError:  # a user's own training cannot be shortened
            return [self.recipe]

    def _grid(self, outcomes: Outcomes) -> list[Trial]:
        """Return the trials of every k and its rates, including a new rate if an edge is best."""
        pairs = [(k, rate) for k in self.ks for rate in self.rates(k, outcomes)]
        return [self._at(*pair, number) for pair in pairs for number in range(self.repetitions)]

    def final_trials(self, outcomes: Outcomes) -> list[Trial]:
        """Return the trials that retrain the choice and k = 1, to be evaluated on the test set."""
        if not self.retrainings:
            return []
        pairs = {(cell.k, cell.learning_rate): None for cell in self.chosen(outcomes)}
        return [trial for pair in pairs for trial in self.retrainings_of(*pair)]

    def trials_of(self, cell: Cell) -> list[Trial]:
        """Return the trials that validate a pair of k and rate."""
        return [self._at(cell.k, cell.learning_rate, number) for number in range(self.repetitions)]

    def retrainings_of(self, k: float | Ramp, rate: float) -> list[Trial]:
        """Return the final trials of one pair."""
        count = max(1, self.retrainings)
        return [self._at(k, rate, number, retrain=True) for number in range(count)]

    def _at(self, k: float | Ramp, rate: float, repetition: int, **judged: bool) -> Trial:
        return trial_at(self.recipe, self.seed, k, rate, repetition, **judged)

    def settings(self) -> dict[str, Any]:
        """Return all settings except the recipe, in a form that JSON can hold."""
        kind = {"kind": self.kind} if self.kind != Protocol.kind else {}
        return kind | {
            field.name: list(map(plain_k, value)) if isinstance(value, tuple) else value
            for field in fields(self)
            if field.name != "recipe"
            for value in [getattr(self, field.name)]
            if field.name not in ("baseline", "parameter") or value != field.default
        }

    def covers(self, trial: Trial) -> bool:
        """Return whether a trial can belong to this search."""
        return trial.k in (*self.ks, self.baseline) and self.admits(trial)

    def admits(self, trial: Trial) -> bool:
        """Return whether a trial can belong to this search with another `RANGE`."""
        return trial.split.plan == self.seed and trial.recipe in self.recipes

    def stage_of(self, trial: Trial) -> str:
        """Return "sweep", "search" or "retraining"."""
        if trial.split.retrain:
            return "retraining"
        return "sweep" if trial.recipe != self.recipe else "search"

    # --- results so far ----------------------------------------------------------------------

    def first_rate(self, outcomes: Outcomes) -> float:
        """Return the initial learning rate: the given one, or the best of the sweep.

        Ties, which are common on easy data, go to the rate with the lowest cross-entropy.
        """
        if self.initial_rate is not None:
            return self.initial_rate
        swept = [outcomes[trial] for trial in self.sweep]
        best = min(swept, key=lambda one: (round(one.stop_error, 12), one.cross_entropy))
        return best.trial.learning_rate

    def first_rates(self, outcomes: Outcomes) -> list[float]:
        """Return the rates that every k starts with, smallest first."""
        if self.learning_rates:
            return sorted(self.learning_rates)
        middle = self.first_rate(outcomes)
        return [middle / 2, middle, middle * 2]

    def rates(self, k: float | Ramp, outcomes: Outcomes) -> list[float]:
        """Return the rates to try for this k: the first ones, and more while an edge is best."""
        return self._tried(k, outcomes)[0]

    def cells(self, outcomes: Outcomes) -> list[Cell]:
        """Return all pairs of k and rate whose repetitions are complete."""
        if any(trial not in outcomes for trial in self.sweep):
            return []
        return [cell for k in self.ks for cell in self._tried(k, outcomes)[1]]

    def _tried(self, k: float | Ramp, outcomes: Outcomes) -> tuple[list[float], list[Cell]]:
        """Return the rates to try for this k, and the cells of those that are complete."""
        first = self.first_rates(outcomes)
        cells = self._cells(k, sorted({*first, *self._earlier_rates(k, outcomes)}), outcomes)
        rates = sorted({*first, *(cell.learning_rate for cell in cells)})
        extensions = sum(not first[0] <= rate <= first[-1] for rate in rates)
        for _ in range(self.most_extensions - extensions):
            if len(cells) < len(rates):
                break
            edge = self._best_edge(cells, outcomes)
            if edge == "low":
                rates = [rates[0] / self.step, *rates]
                cells = self._cells(k, rates[:1], outcomes) + cells
            elif edge == "high":
                rates = [*rates, rates[-1] * self.step]
                cells = cells + self._cells(k, rates[-1:], outcomes)
            else:
                break
        return rates, cells

    def _earlier_rates(self, k: float | Ramp, outcomes: Outcomes) -> set[float]:
        """Return rates tried in earlier sessions with other first rates; none in the paper."""
        return set()

    def _cells(self, k: float | Ramp, rates: Iterable[float], outcomes: Outcomes) -> list[Cell]:
        cells = []
        for rate in rates:
            trials = [self._at(k, rate, repetition) for repetition in range(self.repetitions)]
            if all(trial in outcomes for trial in trials):
                cells.append(self._cell(k, rate, [outcomes[trial] for trial in trials]))
        return cells

    def _cell(self, k: float | Ramp, rate: float, outcomes: Iterable[Outcome]) -> Cell:
        return Cell(k, rate, tuple(outcome.error for outcome in outcomes))

    def best_of_each_k(self, outcomes: Outcomes) -> list[Cell]:
        """Return the cell of the best rate of each k."""
        tried = self.cells(outcomes)
        by_k = [[cell for cell in tried if cell.k == k] for k in self.ks]
        return [self.best(cells, self.baseline) for cells in by_k if cells]

    def chosen(self, outcomes: Outcomes) -> tuple[Cell, Cell]:
        """Return (k*, η*) and (1, η₁*): the lowest mean validation error of all, and at k = 1."""
        cells = self.cells(outcomes)
        plain = [cell for cell in cells if cell.k == self.baseline]
        return self.best(cells, self.baseline), self.best(plain, self.baseline)

    def ties(self, outcomes: Outcomes) -> list[Cell]:
        """Return the pairs that are as good as the chosen one but lost the tie-break."""
        best, _ = self.chosen(outcomes)
        return [c for c in self.cells(outcomes) if c.score == best.score and c != best]

    def open_ks(self, outcomes: Outcomes) -> list[float | Ramp]:
        """Return each k whose best rate is still on an edge after ``most_extensions``."""
        tried = self.cells(outcomes)
        by_k = {k: [cell for cell in tried if cell.k == k] for k in self.ks}
        return [k for k, cells in by_k.items() if cells and self._best_edge(cells, outcomes)]

    @staticmethod
    def best(cells: Iterable[Cell], baseline: float = 1.0) -> Cell:
        """Return the cell of lowest score; ties go to the k nearest 1, then to the smaller rate.

        A ramp ranks by the geometric mean of its ends, after a constant k of that value. With
        another baseline, ties go to the k nearest that: by their ratio if both are above 0.
        """

        def rank(cell: Cell) -> tuple[float, ...]:
            k = level(cell.k)
            distance = abs(k - baseline)
            if baseline > 0:
                distance = abs(math.log2(k / baseline)) if k > 0 else math.inf
            return cell.score, distance, isinstance(cell.k, Ramp), cell.learning_rate

        return min(cells, key=rank)

    def _best_edge(self, cells: list[Cell], outcomes: Outcomes) -> str | None:
        """Return the edge of a k's rates that the best one is on, "low" or "high", or None.

        If no rate has learned anything, it is "low", since a lower rate may learn.
        """
        best = self.best(cells)
        if best.error == 0:
            return None  # no rate can be better
        if best == cells[0]:
            return "low"
        if best == cells[-1]:
            return "high"
        # Networks that always predict the majority class make the same mistakes at every rate;
        # guessing between two classes already has a cross-entropy of log 2.
        alike = [cell for cell in cells if cell.errors == best.errors]
        learned = len(alike) == 1 or not all(
            outcomes[self._at(cell.k, cell.learning_rate, repetition)].cross_entropy >= math.log(2)
            for cell in alike
            for repetition in range(self.repetitions)
        )
        return None if learned else "low"


def _ks(values: Any) -> tuple[float | Ramp, ...]:
    """Return the values of k as floats and ramps; strings are parsed as ramps."""
    refused = ValueError(f"ks must be distinct numbers, or ramps like '0.5→2', not {values!r}")
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise refused
    ks = [as_k(k) for k in values]
    if not all(isinstance(k, Ramp) or are_numbers(k) for k in ks) or len(set(ks)) < len(ks):
        raise refused
    return tuple(k if isinstance(k, Ramp) else float(k) for k in ks)


@dataclass(frozen=True)
class NetworkProtocol(Protocol):
    """The paper's search for any network, with an ensemble of mixed k and another rule for ties.

    Attributes:
        ks: The values of k to try.
        mixed: Whether to train final networks of other k too, for an ensemble of mixed k that is as
            large as those of the chosen k and of k = 1.

    """

    kind: ClassVar[str] = "network"
    grows: ClassVar[tuple[str, ...]] = ("repetitions", "retrainings")
    ks: tuple[float | Ramp, ...] = DEEP_KS
    repetitions: int = 5
    mixed: bool = True

    def final_trials(self, outcomes: Outcomes) -> list[Trial]:
        """Return the trials that retrain the choice, k = 1 and the ensemble of mixed k."""
        return [*dict.fromkeys((*super().final_trials(outcomes), *self.mixed_trials(outcomes)))]

    def mixed_trials(self, outcomes: Outcomes) -> list[Trial]:
        """Return the networks of the ensemble of mixed k: the best k first, one of each in turn."""
        if not self.mixed or not self.retrainings or len(self.ks) < 2:
            return []
        cells = sorted(self.best_of_each_k(outcomes), key=lambda cell: cell.score)
        turns = [(cells[at % len(cells)], at // len(cells)) for at in range(self.retrainings)]
        return [self.retrainings_of(c.k, c.learning_rate)[turn] for c, turn in turns]

    def _earlier_rates(self, k: float | Ramp, outcomes: Outcomes) -> set[float]:
        return rates_in(outcomes, self.recipe, k) - {trial.learning_rate for trial in self.sweep}

    def _best_edge(self, cells: list[Cell], outcomes: Outcomes) -> str | None:
        """Return the edge of a k's rates that the best one is on; cross-entropy breaks ties.

        The paper extends towards lower rates on a tie. But a network that learns nothing at a low
        rate makes the same mistakes at all lower ones, so that would waste a dozen trainings.
        """
        lowest = min(cell.error for cell in cells)
        if lowest == 0:
            return None  # no rate can be better

        def cross_entropy(cell: Cell) -> float:
            return statistics.fmean(outcomes[one].cross_entropy for one in self.trials_of(cell))

        best = min((cell for cell in cells if cell.error == lowest), key=cross_entropy)
        if best == cells[0]:
            return "low"
        return "high" if best == cells[-1] else None

    @property
    def foretold(self) -> int:
        """The expected number of trials, if no best learning rate lies on an edge."""
        others = min(self.retrainings, len(self.ks)) - 2 if self.mixed else 0
        return super().foretold + max(0, others)


@dataclass(frozen=True)
class OwnProtocol(Protocol):
    """The paper's search for a training loop of your own, where a tie never adds learning rates."""

    kind: ClassVar[str] = "own"
    grows: ClassVar[tuple[str, ...]] = ("repetitions", "retrainings")

    def _best_edge(self, cells: list[Cell], outcomes: Outcomes) -> str | None:
        """Return the edge that the best rate is on, or None if another rate is as good."""
        lowest = min(cell.error for cell in cells)
        if sum(cell.error == lowest for cell in cells) > 1:
            return None
        return super()._best_edge(cells, outcomes)


def rates_in(outcomes: Outcomes, recipe: Recipe, k: float | Ramp) -> set[float]:
    """Return the learning rates that a k was tried with."""
    return {
        trial.learning_rate
        for trial in outcomes
        if trial.k == k and not trial.split.retrain and trial.recipe == recipe
    }


# Cached: a search needs the same trials again after every few outcomes, while a device waits.
@functools.lru_cache(maxsize=4096)
def trial_at(
    recipe: Recipe, seed: int, k: float | Ramp, rate: float, repetition: int,
    retrain: bool = False, test: bool = False, bagged: bool = False,
) -> Trial:  # fmt: skip
    """Return the trial of a pair of k and rate in one repetition."""
    # Every k and rate gets the same initial weights, order and folds, so differences are paired.
    split = Split(seed, repetition, retrain, test, bagged)
    # With a validation set of its own, final networks train on the same examples as those of the
    # search, so only another seed makes them independent of the choice.
    own = isinstance(getattr(recipe, "validation", None), int)
    return Trial(recipe, k, rate, split, 1000 * seed + repetition + 500 * (own and retrain))
