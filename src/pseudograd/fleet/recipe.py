"""Recipes: everything about a training that stays fixed during a search."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from pseudograd.rules import reweighted
from pseudograd.words import shown

ACTIVATIONS = ("relu", "tanh", "sigmoid")
OPTIMIZERS = ("sgd", "adam", "rmsprop")
SCHEDULES = ("constant", "cosine")
STOP_BY = ("error", "error and cross-entropy")
TIES = ("first", "last")
PRECISIONS = ("float32", "tf32", "bf16")
_FINGERPRINT_LENGTH = 12


class Recipe:
    """The settings that a search keeps fixed: data, network, optimizer, batch size, early stopping.

    A search varies only k, the learning rate, the split and the seed. Recipes with the same
    fingerprint give the same outcome for the same trial.
    """

    kind: ClassVar[str]

    def fields(self) -> dict[str, Any]:
        """Return the settings that differ from their defaults, in a form that JSON can hold."""
        return {
            field.name: list(value) if isinstance(value, tuple) else value
            for field in dataclasses.fields(self)  # type: ignore[arg-type]  # subclasses are dataclasses
            if (value := getattr(self, field.name)) != field.default
        }

    def shortened(self, epochs: int) -> Self:
        """Return the recipe with at most ``epochs`` epochs, for a sweep of learning rates."""
        raise ValueError(
            "initial_rate or learning_rates must be given: a sweep for the first learning rate "
            "needs a recipe whose training can be cut short"
        )

    @property
    def architecture(self) -> tuple[object, ...]:
        """The settings that trials must share to be given to a runner together."""
        return (self.kind,)

    @functools.cached_property
    def fingerprint(self) -> str:
        """A hash of the settings that differ from their defaults."""
        text = json.dumps([self.kind, self.fields()], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:_FINGERPRINT_LENGTH]

    # By fingerprint for speed: a search compares thousands of trials.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Recipe) and self.fingerprint == other.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def to_json(self) -> dict[str, Any]:
        """Return the recipe as a dictionary for `recipe_from_json`."""
        return {"kind": self.kind, **self.fields()}


@dataclass(frozen=True, eq=False)
class OwnRecipe(Recipe):
    """A training loop of your own, identified only by its description.

    Attributes:
        description: A description of the training. Change it when you change the training, so that
            outcomes of the two are not mixed.

    Example:
        >>> OwnRecipe("ResNet-18, AdamW, 30 epochs").fingerprint
        'd37b37a21d44'

    """

    kind: ClassVar[str] = "own"
    description: str

    def __post_init__(self) -> None:
        if not isinstance(self.description, str) or not self.description:
            raise ValueError(f"description must be a text, not {self.description!r}")


@dataclass(frozen=True, eq=False)
class MLPRecipe(Recipe):
    """A fully connected network on a data set, and how it is trained.

    Attributes:
        data: The name of the data set.
        hidden_layer_sizes: The widths of the hidden layers.
        data_hash: The first 16 digits of the data set's hash, checked before training; "" skips
            the check.
        optimizer: "sgd", "adam" or "rmsprop", as in `torch.optim`.
        momentum: Classical momentum, for "sgd".
        weight_decay: Decoupled weight decay, only for "adam", which becomes AdamW.
        schedule: "constant", or "cosine" to decay the learning rate from its full value in the
            first epoch to 0 after ``max_epochs``.
        activation: "relu", "tanh" or "sigmoid".
        feature_range: The interval that features are scaled to, linearly.
        bins: The number of bins per numeric feature, for a piecewise-linear encoding
            (`pseudograd.fleet.mlp.bins`); 0 for none.
        sample: Train on at most this many examples, evenly spaced in the training folds; 0 for all.
        batch_size: Examples per step.
        clip: The largest norm of a step's gradient over all parameters; None for no limit.
        patience: Stop after this many epochs without a better one on the early-stopping part.
        stop_by: The early-stopping criterion: "error", or "error and cross-entropy" for the error
            plus a quarter of the cross-entropy, which is less noisy if that part is small.
        ties: Which of several equally good epochs to keep, the "first" or the "last". On a small
            early-stopping part many epochs tie, and the last one has learned more.
        max_epochs: Stop after this many epochs in any case.
        stratified: Whether all five folds have the same class proportions.
        rule: "tunable" for the paper's (Eq. 5), or the name of a `pseudograd.rules.Reweighted`
            rule, whose parameter then takes k's place: see `pseudograd.rules.reweighted`.

    Example:
        >>> recipe = MLPRecipe("digits", (400,), momentum=0.5)
        >>> recipe.optimizer, recipe.fields()
        ('sgd', {'data': 'digits', 'hidden_layer_sizes': [400], 'momentum': 0.5})

    """

    kind: ClassVar[str] = "mlp"
    data: str
    hidden_layer_sizes: tuple[int, ...]
    data_hash: str = ""
    optimizer: str = "sgd"
    momentum: float = 0.0
    weight_decay: float = 0.0
    schedule: str = "constant"
    activation: str = "relu"
    feature_range: tuple[float, float] = (-1.0, 1.0)
    bins: int = 0
    sample: int = 0
    batch_size: int = 128
    clip: float | None = None
    patience: int = 15
    stop_by: str = "error"
    ties: str = "first"
    max_epochs: int = 1000
    stratified: bool = False
    rule: str = "tunable"

    def __post_init__(self) -> None:
        make_plain(self)
        require = functools.partial(check_setting, self)

        for name in ("data", "data_hash"):
            require(isinstance(getattr(self, name), str), name, "a text")
        require(
            isinstance(self.hidden_layer_sizes, tuple)
            and all(is_whole(size, 1, math.inf) for size in self.hidden_layer_sizes),
            "hidden_layer_sizes",
            "a tuple of whole numbers above 0, or () for no hidden layer",
        )
        require(
            are_numbers(self.momentum) and 0 <= self.momentum < 1, "momentum", "a number in [0, 1)"
        )
        require(
            are_numbers(self.weight_decay) and 0 <= self.weight_decay < math.inf,
            "weight_decay",
            "a finite number of at least 0",
        )
        require(
            self.weight_decay == 0 or self.optimizer == "adam",
            "weight_decay",
            "0 for optimizers other than 'adam'",
        )
        require(self.schedule in SCHEDULES, "schedule", f"one of {SCHEDULES}")
        require(self.optimizer in OPTIMIZERS, "optimizer", f"one of {OPTIMIZERS}")
        require(self.activation in ACTIVATIONS, "activation", f"one of {ACTIVATIONS}")
        require(
            isinstance(self.feature_range, tuple)
            and len(self.feature_range) == 2
            and are_numbers(*self.feature_range)
            and -math.inf < self.feature_range[0] < self.feature_range[1] < math.inf,
            "feature_range",
            "a tuple (low, high), two finite numbers, low below high",
        )
        require(
            self.clip is None or (are_numbers(self.clip) and 0 < self.clip < math.inf),
            "clip",
            "a finite number above 0, or None",
        )
        require(self.ties in TIES, "ties", f"one of {TIES}")
        require(self.stop_by in STOP_BY, "stop_by", f"one of {STOP_BY}")
        for name in ("bins", "sample"):
            require(is_whole(getattr(self, name), 0, math.inf), name, "a whole number, 0 or more")
        for name in ("batch_size", "max_epochs", "patience"):
            require(is_whole(getattr(self, name), 1, math.inf), name, "a whole number above 0")
        if self.rule != "tunable":
            reweighted(self.rule)
        # 1 and 1.0 are the same setting, and must have the same fingerprint.
        for name in ("momentum", "weight_decay"):
            object.__setattr__(self, name, float(getattr(self, name)))
        object.__setattr__(self, "feature_range", tuple(map(float, self.feature_range)))
        if self.clip is not None:
            object.__setattr__(self, "clip", float(self.clip))

    def shortened(self, epochs: int) -> Self:
        """Return the recipe with at most ``epochs`` epochs, for a sweep of learning rates."""
        epochs = min(epochs, self.max_epochs)
        return dataclasses.replace(self, max_epochs=epochs, patience=epochs)

    @property
    def architecture(self) -> tuple[object, ...]:
        """The settings that trials must share to be trained in one stack."""
        return (
            self.data,
            self.data_hash,
            self.hidden_layer_sizes,
            self.optimizer,
            self.schedule,
            self.activation,
            self.feature_range,
            self.bins,
            self.sample,
            self.batch_size,
            self.clip is None,
            self.weight_decay == 0,
            self.stratified,
            self.rule,
        )


@dataclass(frozen=True, eq=False)
class ModuleRecipe(Recipe):
    """The description of any network, its data set and its training, in a form that JSON can hold.

    `pseudograd.fleet.modules.Training` holds the functions described here and makes the recipe.

    Attributes:
        network: Its class, its number of parameters, and a hash of its structure.
        data: The name of the data set.
        epochs: How long a training lasts, at most.
        batch_size: Examples per step.
        data_hash: The first 16 digits of the data's hash.
        optimizer: The optimizer and its settings.
        schedule: The learning rate schedule.
        clip: The largest norm of a step's gradient over all parameters; None for no limit.
        patience: Stop after this many epochs without a better one; None to keep the last epoch.
        validation: The fraction of the training examples held out; None for five folds; or, as a
            whole number, the size of a validation set of its own.
        augment: The augmentation of a batch of inputs in training.
        precision: "float32", "tf32" or "bf16".
        label_smoothing: As for the loss.
        class_weights: As for the loss; () for none.
        ignore_index: As for the loss.
        rule: "tunable" for the paper's (Eq. 5), or the name and code hash of a function that
            returns another rule, whose parameter then takes k's place.

    Example:
        >>> ModuleRecipe("ResNet", "cifar10", epochs=30, batch_size=256, clip=1.0).fields()
        {'network': 'ResNet', 'data': 'cifar10', 'epochs': 30, 'batch_size': 256, 'clip': 1.0}

    """

    kind: ClassVar[str] = "module"
    stop_by: ClassVar[str] = "error"
    ties: ClassVar[str] = "first"
    network: str
    data: str
    epochs: int
    batch_size: int
    data_hash: str = ""
    optimizer: str = ""
    schedule: str = "constant"
    clip: float | None = None
    patience: int | None = None
    validation: float | None = None
    augment: str = ""
    precision: str = "float32"
    label_smoothing: float = 0.0
    class_weights: tuple[float, ...] = ()
    ignore_index: int = -100
    rule: str = "tunable"

    def __post_init__(self) -> None:
        make_plain(self)
        require = functools.partial(check_setting, self)

        for name in ("epochs", "batch_size"):
            require(is_whole(getattr(self, name), 1, math.inf), name, "a whole number above 0")
        require(
            self.clip is None or (are_numbers(self.clip) and 0 < self.clip < math.inf),
            "clip",
            "a finite number above 0, or None",
        )
        require(
            self.patience is None or is_whole(self.patience, 1, math.inf),
            "patience",
            "a whole number above 0, or None",
        )
        require(
            self.validation is None
            or is_whole(self.validation, 1, math.inf)
            or (are_numbers(self.validation) and 0 < self.validation < 1),
            "validation",
            "a fraction between 0 and 1, such as 0.1, or None for five folds",
        )
        require(
            are_numbers(self.label_smoothing) and 0 <= self.label_smoothing <= 1,
            "label_smoothing",
            "a number in [0, 1]",
        )
        require(is_whole(self.ignore_index, -(2**63), 2**63), "ignore_index", "a whole number")
        weights = self.class_weights
        require(
            not weights or (all(0 <= weight < math.inf for weight in weights) and any(weights)),
            "class_weights",
            "finite numbers of at least 0",
        )

    @property
    def max_epochs(self) -> int:
        """The number of epochs, by its name in an `MLPRecipe`."""
        return self.epochs

    def shortened(self, epochs: int) -> Self:
        """Return the recipe with at most ``epochs`` epochs, for a sweep of learning rates."""
        return dataclasses.replace(self, epochs=min(epochs, self.epochs), patience=None)

    @property
    def architecture(self) -> tuple[object, ...]:
        """The settings that trials must share to be trained side by side."""
        return (self.kind, self.fingerprint)


def check_data(recipe: MLPRecipe | ModuleRecipe, data: Any) -> None:
    """Raise ValueError unless the recipe has the name and the hash of the data."""
    if recipe.data != data.name:
        raise ValueError(f"trials need the data {recipe.data!r}, but the fleet has {data.name!r}")
    if recipe.data_hash and not data.sha256.startswith(recipe.data_hash):
        raise ValueError(
            f"trials need the data {recipe.data!r} with a hash that begins with "
            f"{recipe.data_hash}, but the fleet's begins with {data.sha256[:16]}: use the same data"
        )


_KINDS: dict[str, type[MLPRecipe] | type[ModuleRecipe] | type[OwnRecipe]] = {
    recipe.kind: recipe for recipe in (MLPRecipe, ModuleRecipe, OwnRecipe)
}


def recipe_from_json(fields: Mapping[str, Any]) -> Recipe:
    """Return the recipe that `Recipe.to_json` described.

    Example:
        >>> recipe = MLPRecipe("digits", (400,), momentum=0.5)
        >>> recipe_from_json(recipe.to_json()) == recipe
        True

    """
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()
    }
    return _KINDS[values.pop("kind")](**values)


# --- checks, for recipes and trials alike --------------------------------------------------------


def check_setting(settings: object, holds: bool, name: str, wanted: str) -> None:
    """Raise ValueError unless the condition on the setting of this name holds."""
    if not holds:
        raise ValueError(f"{name} must be {wanted}, not {shown(getattr(settings, name))}")


def is_whole(number: object, least: int, beyond: float) -> bool:
    """Return whether this is a whole number, at least ``least`` and less than ``beyond``."""
    return isinstance(number, numbers.Integral) and least <= int(number) < beyond


def are_numbers(*values: object) -> bool:
    """Return whether all values are real numbers."""
    return all(isinstance(value, numbers.Real) for value in values)


def make_plain(settings: Any) -> None:
    """Replace NumPy numbers in a frozen dataclass with Python numbers, which JSON can hold."""
    # Leave Python values alone: reading a ledger makes thousands of trials.
    for name, value in list(vars(settings).items()):
        if isinstance(value, np.generic | np.ndarray) and not value.shape:
            object.__setattr__(settings, name, value.item())
        elif isinstance(value, tuple) and any(isinstance(one, np.generic) for one in value):
            object.__setattr__(settings, name, tuple(np.array(value).tolist()))
