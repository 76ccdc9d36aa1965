"""What goes into a training run, and what comes out: plain values, the currency of the project."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from pseudograd.rules.checks import check_k

if TYPE_CHECKING:
    from torch import Tensor

ACTIVATIONS = ("relu", "tanh", "sigmoid")
OPTIMIZERS = ("sgd", "adam", "rmsprop")
TIES = ("first", "last")
_NUMPY = (np.generic, np.ndarray)


def _whole(number: object, least: int, beyond: float) -> bool:
    """Whether this is a whole number, ``least`` or more and less than ``beyond``."""
    return isinstance(number, numbers.Integral) and least <= int(number) < beyond


def _are_numbers(*values: object) -> bool:
    """Whether these can be compared with numbers."""
    return all(isinstance(value, numbers.Real) for value in values)


def _make_plain(settings: Split | Trial) -> None:
    """Make Python's own numbers of NumPy's, which a ledger could not write."""

    # A ledger makes thousands of trials, so what is plain already is left alone.
    for name, value in list(vars(settings).items()):
        if isinstance(value, _NUMPY) and not value.shape:
            object.__setattr__(settings, name, value.item())
        elif isinstance(value, tuple) and any(isinstance(one, _NUMPY) for one in value):
            object.__setattr__(settings, name, tuple(np.array(value).tolist()))


@dataclass(frozen=True)
class Split:
    """Which examples a trial trains on, stops by and is judged on.

    The training set is cut at random into five equal parts; ``plan`` is the seed of that cut, and
    with ``stratified`` all classes have the same share of each part, as nearly as they can. In
    each repetition of cross-validation three parts are trained on, one stops the training early and
    one validates, and the roles go round: every part validates once in five repetitions, and twenty
    repetitions pass before a pair of roles comes again. With ``retrain`` the network is trained on
    four parts, stopped by the fifth, and judged on the test set. With ``test`` it is trained as in
    cross-validation, and judged on the test set all the same.

    Attributes:
        plan: The seed of the cut into five parts.
        repetition: Which assignment of the roles, from 0.
        retrain: Whether this is the final training, judged on the test set.
        stratified: Whether the parts have equal shares of each class.
        test: Whether a network of cross-validation is judged on the test set.

    Example:
        >>> Split(plan=0, repetition=3).retrain
        False

    """

    plan: int = 0
    repetition: int = 0
    retrain: bool = False
    stratified: bool = False
    test: bool = False

    def __post_init__(self) -> None:
        _make_plain(self)
        # Beyond, the seed of the cut that a repetition has would exceed 64 bits.
        if not _whole(self.repetition, 0, 20 * 2**31):
            raise ValueError(
                f"repetition must be a whole number in [0, 20 · 2^31), not {self.repetition}"
            )
        if not _whole(self.plan, 0, 2**32):
            raise ValueError(f"plan must be a whole number in [0, 2^32), not {self.plan}")
        if self.test and self.retrain:
            raise ValueError("test must be left out with retrain, which is judged on the test set")


@dataclass(frozen=True)
class Trial:
    """One training run: all that its outcome depends on.

    Attributes:
        data: The name of the data set.
        hidden_layer_sizes: The widths of the hidden layers.
        k: The sensitivity to large errors (Eq. 5).
        learning_rate: The step size.
        momentum: Of classical momentum, for the optimizer "sgd".
        optimizer: "sgd", "adam" or "rmsprop", as in `torch.optim`.
        activation: "relu", "tanh" or "sigmoid".
        feature_range: What the features are scaled to, linearly.
        batch_size: Examples a step.
        clip: The largest norm of a step's gradient over all parameters; None for no limit.
        split: Which examples have which role.
        patience: Stop after so many epochs without a lower error on the early-stopping part.
        ties: Of the epochs that had the lowest one, the "first" or the "last" counts. Where that
            part is small, many have, and the last has learned more.
        max_epochs: Stop after so many epochs in any case.
        seed: Determines the initial weights and the order of the examples, and nothing else does.

    Example:
        >>> Trial("digits", (400,), k=0.5, learning_rate=0.1).momentum
        0.0

    """

    data: str
    hidden_layer_sizes: tuple[int, ...]
    k: float
    learning_rate: float
    momentum: float = 0.0
    optimizer: str = "sgd"
    activation: str = "relu"
    feature_range: tuple[float, float] = (-1.0, 1.0)
    batch_size: int = 128
    clip: float | None = None
    split: Split = field(default_factory=Split)
    patience: int = 15
    ties: str = "first"
    max_epochs: int = 1000
    seed: int = 0

    def __post_init__(self) -> None:
        _make_plain(self)

        def require(holds: bool, name: str, wanted: str) -> None:
            if not holds:
                raise ValueError(f"{name} must be {wanted}, not {getattr(self, name)!r}")

        require(
            isinstance(self.hidden_layer_sizes, tuple)
            and all(_whole(size, 1, math.inf) for size in self.hidden_layer_sizes),
            "hidden_layer_sizes",
            "a tuple of whole numbers above 0",
        )
        for name in ("k", "learning_rate", "momentum"):
            require(_are_numbers(getattr(self, name)), name, "a number")
        check_k(self.k)
        require(0 < self.learning_rate < math.inf, "learning_rate", "a finite number above 0")
        require(0 <= self.momentum < 1, "momentum", "in [0, 1)")
        require(self.optimizer in OPTIMIZERS, "optimizer", f"one of {OPTIMIZERS}")
        require(self.activation in ACTIVATIONS, "activation", f"one of {ACTIVATIONS}")
        require(
            isinstance(self.feature_range, tuple)
            and len(self.feature_range) == 2
            and _are_numbers(*self.feature_range)
            and -math.inf < self.feature_range[0] < self.feature_range[1] < math.inf,
            "feature_range",
            "a tuple (low, high), both finite",
        )
        require(
            self.clip is None or (_are_numbers(self.clip) and 0 < self.clip < math.inf),
            "clip",
            "a finite number above 0, or None",
        )
        require(self.ties in TIES, "ties", f"one of {TIES}")
        for name in ("batch_size", "patience", "max_epochs"):
            require(_whole(getattr(self, name), 1, math.inf), name, "a whole number above 0")
        require(_whole(self.seed, -(2**63), 2**63), "seed", "a whole number of 64 bits")

    @property
    def architecture(self) -> tuple[object, ...]:
        """What all trials of one fleet must share."""
        return (
            self.data,
            self.hidden_layer_sizes,
            self.optimizer,
            self.activation,
            self.feature_range,
            self.batch_size,
            self.clip is None,
            self.split.retrain,
        )


@dataclass(frozen=True)
class Outcome:
    """What came of a trial.

    Attributes:
        trial: The trial.
        stop_error: The lowest error on the early-stopping part, a fraction.
        best_epoch: The epoch that had it, from 1; of several as the trial's ``ties`` says.
        error: The error on the validation part (with ``retrain``, on the test set) of the network
            of that epoch.
        cross_entropy: Its mean cross-entropy there.
        epochs: How many epochs were run.
        stopped_by: "patience", "limit" (of epochs) or "diverged".
        curve: The error on the early-stopping part after each epoch.
        wrong: With ``retrain``, which examples of the test set that network got wrong.
        parameters: The weights (in, out) and biases (out) of each layer at the best epoch, if they
            were asked for.

    Example:
        >>> trial = Trial("digits", (400,), k=0.5, learning_rate=0.1)
        >>> Outcome(trial, 0.02, 12, 0.03, 0.1, 27, "patience", (0.5, 0.1)).error
        0.03

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
