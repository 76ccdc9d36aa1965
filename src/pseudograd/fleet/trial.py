"""Trials and outcomes: the input and the result of one training run."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from pseudograd.fleet.ramp import Ramp
from pseudograd.fleet.recipe import Recipe, are_numbers, check_setting, is_whole, make_plain
from pseudograd.rules.checks import check_k

if TYPE_CHECKING:
    from torch import Tensor

    from pseudograd.fleet.splits import Parts

Stop = Callable[[], bool]
"""Called between epochs or outcomes; a runner returns soon after it returns True."""


def never() -> bool:
    """Return False: the `Stop` of a run without a limit."""
    return False


class Deadline:
    """A `Stop` that returns True after the given number of seconds; never if it is None.

    Example:
        >>> Deadline(60)(), Deadline(0)(), Deadline(None)()
        (False, True, False)

    """

    def __init__(self, seconds: float | None) -> None:
        self.end = math.inf if seconds is None else time.monotonic() + seconds

    def __call__(self) -> bool:
        """Return whether the time is over."""
        return time.monotonic() >= self.end


def mixed_score(error: float, cross_entropy: float) -> float:
    """Return the error plus a quarter of the cross-entropy, less noisy than either on small sets.

    Example:
        >>> mixed_score(0.1, 0.4)
        0.2

    """
    return error + (0.25 * cross_entropy if math.isfinite(cross_entropy) else 1e9)


@dataclass(frozen=True)
class Split:
    """The examples a trial uses for training, early stopping and evaluation.

    The training set is split at random into five equal folds; ``plan`` is the seed of that split.
    In each repetition of cross-validation, three folds are for training, one for early stopping and
    one for validation, and the roles rotate: every fold validates once in five repetitions, and a
    pair of roles repeats after twenty. With ``retrain``, the network is trained on four folds,
    stopped early by the fifth, and evaluated on the test set. With ``test``, it is trained as in
    cross-validation but evaluated on the test set. With ``bagged``, it is trained on four folds and
    evaluated on the fifth; after five repetitions, the folds are drawn again.

    Attributes:
        plan: The seed of the split into five folds.
        repetition: The number of the assignment of roles, from 0.
        retrain: Whether this is a final training, evaluated on the test set.
        test: Whether a network of cross-validation is evaluated on the test set.
        bagged: Whether only one fold is held out, for evaluation.

    """

    plan: int = 0
    repetition: int = 0
    retrain: bool = False
    test: bool = False
    bagged: bool = False

    def __post_init__(self) -> None:
        make_plain(self)
        # Beyond this, the seed of the folds would exceed 64 bits.
        if not is_whole(self.repetition, 0, 20 * 2**31):
            raise ValueError(
                f"repetition must be a whole number in [0, 20 · 2^31), not {self.repetition}"
            )
        if not is_whole(self.plan, 0, 2**32):
            raise ValueError(f"plan must be a whole number in [0, 2^32), not {self.plan}")
        if self.test and self.retrain:
            raise ValueError("test must be left out with retrain, which already uses the test set")
        if self.bagged and (self.test or self.retrain):
            raise ValueError("bagged must be left out with test or retrain: it has its own folds")

    @property
    def may_be_kept(self) -> bool:
        """Whether the network may become part of the model."""
        return self.retrain or self.bagged

    def indices(
        self, count: int, *, early_stopping: bool = True, held_out: float | None = None
    ) -> Parts:
        """Return the indices of your training examples by role, for a training loop of your own.

        They depend only on the arguments and the split: every k and learning rate is trained and
        evaluated on the same examples.

        Args:
            count: How many training examples you have, not counting the test set.
            early_stopping: Whether your loop stops early. If so, one fold is set aside for it
                (``stop``); otherwise ``stop`` is empty and that fold is trained on.
            held_out: The fraction of the examples to evaluate on, and as many again for early
                stopping, drawn anew in each repetition; by default a fifth, in rotating folds.

        Returns:
            ``train``, ``stop`` and ``judge``. With ``retrain`` or ``test``, ``judge`` is empty:
            evaluate on your test set.

        Example:
            >>> part = Split(repetition=0).indices(1000)
            >>> len(part.train), len(part.stop), len(part.judge)
            (600, 200, 200)
            >>> part = Split(repetition=0).indices(1000, early_stopping=False)
            >>> len(part.train), len(part.stop), len(part.judge)
            (800, 0, 200)
            >>> part = Split(retrain=True).indices(1000, early_stopping=False)
            >>> len(part.train), len(part.stop), len(part.judge)
            (1000, 0, 0)
            >>> part = Split(repetition=0).indices(1000, early_stopping=False, held_out=0.1)
            >>> part.judge[:4].tolist(), len(part.train)
            ([59, 169, 214, 165], 900)

        """
        from pseudograd.fleet.splits import indices

        return indices(self, count, early_stopping=early_stopping, held_out=held_out)


@dataclass(frozen=True)
class Trial:
    """One training: a recipe, and the four things that a search varies.

    Attributes:
        recipe: All other settings that the outcome depends on.
        k: The sensitivity to large errors (Eq. 5), or the parameter of another rule: a number, or a
            `Ramp` over the training.
        learning_rate: The step size.
        split: The role of each example.
        seed: Determines the initial weights and the order of the examples.

    Example:
        >>> from pseudograd.fleet import MLPRecipe
        >>> trial = Trial(MLPRecipe("digits", (400,)), k=0.5, learning_rate=0.1)
        >>> trial.split.repetition, trial.seed
        (0, 0)

    """

    recipe: Recipe
    k: float | Ramp
    learning_rate: float
    split: Split = Split()
    seed: int = 0

    def __post_init__(self) -> None:
        make_plain(self)
        require = functools.partial(check_setting, self)

        require(isinstance(self.recipe, Recipe), "recipe", "a Recipe")
        require(are_numbers(self.learning_rate), "learning_rate", "a number")
        if not isinstance(self.k, Ramp):
            require(are_numbers(self.k), "k", "a number or a Ramp")
            if self.recipe.kind == "mlp" or getattr(self.recipe, "rule", "") == "tunable":
                check_k(self.k)  # other rules check their parameter themselves
            require(-math.inf < self.k < math.inf, "k", "a finite number")
        require(0 < self.learning_rate < math.inf, "learning_rate", "a finite number above 0")
        require(is_whole(self.seed, -(2**63), 2**63), "seed", "a whole number of 64 bits")

    def __str__(self) -> str:
        """Return the trial with its recipe's fingerprint, short enough for a message."""
        varied = ", ".join(
            f"{name}={value}" for name, value in vars(self).items() if name != "recipe"
        )
        return f"Trial({self.recipe.fingerprint}, {varied})"


_Recipe = TypeVar("_Recipe", bound=Recipe)


def recipe_of(trial: Trial, kind: type[_Recipe]) -> _Recipe:
    """Return the trial's recipe, which must be of this kind."""
    if not isinstance(trial.recipe, kind):
        raise TypeError(f"trials must have a recipe of {kind.__name__}, not {trial.recipe!r}")
    return trial.recipe


@dataclass(frozen=True)
class Outcome:
    """The result of a trial.

    Attributes:
        trial: The trial.
        stop_error: The best epoch's error on the early-stopping fold, a fraction; 0 for a final
            training without early stopping.
        best_epoch: The epoch that was kept, from 1, by the recipe's ``stop_by`` and ``ties``.
        error: The error of that epoch's network on the validation fold, or on the test set with
            ``retrain``.
        cross_entropy: Its mean cross-entropy there; NaN if unknown.
        epochs: How many epochs were run.
        stopped_by: "patience", "limit" (of epochs) or "diverged".
        curve: The error on the early-stopping fold after each epoch.
        wrong: With ``retrain``, the indices of the test examples that the network got wrong.
        parameters: The weights (in, out) and biases (out) of each layer at the best epoch, if the
            fleet keeps them.
        state: The `state_dict` of a module at the best epoch.
        last_state: The `state_dict` after the last epoch, if that was not the best one.
        measures: Further measurements by name.

    """

    trial: Trial
    stop_error: float
    best_epoch: int
    error: float
    cross_entropy: float
    epochs: int
    stopped_by: str
    curve: tuple[float, ...]
    wrong: tuple[int, ...] | None = None
    parameters: tuple[tuple[Tensor, Tensor], ...] | None = field(
        default=None, compare=False, repr=False
    )
    state: Mapping[str, Tensor] | None = field(default=None, compare=False, repr=False)
    last_state: Mapping[str, Tensor] | None = field(default=None, compare=False, repr=False)
    measures: Mapping[str, float] | None = None
