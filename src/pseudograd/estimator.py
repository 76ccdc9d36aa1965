"""The tuner as a scikit-learn classifier."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy.stats import rankdata
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.preprocessing import MinMaxScaler
from sklearn.utils import check_array, check_consistent_length, check_random_state, column_or_1d
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from pseudograd.data import Dataset
from pseudograd.data.dataset import FOLDS
from pseudograd.fleet import Fleet, MLPRecipe, Network
from pseudograd.fleet.recipe import ACTIVATIONS, OPTIMIZERS
from pseudograd.rules.checks import check_k
from pseudograd.search import Cell, Protocol, Study, batch_size_for, clip_for, ks_for
from pseudograd.search.display import Display

_FLOATS = (np.float64, np.float32)  # what features may be; all else becomes float64


class TunableMLPClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]  # untyped
    """A multi-layer perceptron that chooses its sensitivity to large errors, and its learning rate.

    With ``k="auto"`` or ``learning_rate="auto"`` they are chosen as in the paper: the examples are
    cut into five equal parts, with the same share of each class; three train a network, one stops
    its training and one validates it, ``repetitions`` times with these roles permuted. Each k has
    learning rates of its own, halved or doubled until the best lies inside. The pair of the least
    mean validation error trains the final network on four of the parts, stopped by the fifth. With
    k and learning rate given, only this last step is left.

    Equal examples are one example of their total weight, and their order does not matter. So a
    weight of 2 is the same as a second copy, a weight of 0 the same as none, and no copy of an
    example that trains a network also judges it. There are exceptions, which stand in each of the
    five parts with a fifth of their weight: a row that comes with several labels, where what counts
    is how often each label does; an example far heavier than the others of its class, which would
    leave nothing like it to train on or to judge by; and all, if fewer than five examples differ.

    Features are scaled linearly, each for itself, so that those of the training data fill
    ``feature_range``; later values beyond are clipped to it.

    Args:
        hidden_layer_sizes: The widths of the hidden layers; a whole number for a single one, () for
            none.
        k: The sensitivity to large errors (Eq. 5), 1 for cross-entropy; "auto" to choose it.
        learning_rate: The step size; "auto" to choose it.
        ks: What "auto" chooses k from; None for the paper's values, 1/16 to 4 for up to one hidden
            layer, 1/4 to 4 for more.
        repetitions: How many networks validate each pair of k and learning rate. The paper has 7,
            and 10 for MNIST.
        activation: "relu", "tanh" or "sigmoid".
        optimizer: "sgd", "adam" or "rmsprop".
        momentum: Of "sgd".
        batch_size: Examples a step; "auto" for 128, or less if that would be less than five steps
            an epoch (`pseudograd.search.protocol.batch_size_for`).
        clip: The largest norm of a step's gradient; None for no limit; "auto" for the paper's: 100
            with two or more hidden layers, none with fewer.
        feature_range: What the features are scaled to; (0, 1) is better where most of them are
            indicators, as of `sklearn.preprocessing.OneHotEncoder`.
        patience: Stop training after so many epochs without a lower error on the part that stops.
        max_iter: Stop training after so many epochs in any case.
        device: "cpu", "cuda", ...; "auto" for a GPU if there is one.
        random_state: Determines the cut, the initial weights and the orders of the examples.
        verbose: Whether to show progress.

    Attributes:
        k_: The sensitivity of the final network.
        learning_rate_: Its learning rate.
        cv_results_: Where something was chosen: accuracies of all pairs that were tried, with the
            keys that `sklearn.model_selection.GridSearchCV` has. Networks are trained together, so
            there are no times.
        best_index_: Which of these pairs was chosen. Among equals it is the k nearest 1, then the
            smallest rate.
        classes_: The labels.
        n_iter_: The number of epochs that the final network was trained for.
        validation_scores_: The accuracy on the part that stops, after each of these epochs.
        best_validation_score_: The highest of them; the network is that of the last such epoch.
        coefs_: The weights of each layer, shape (in, out).
        intercepts_: The biases of each layer.
        network_: The final network; it takes what ``scaler_`` gives.
        scaler_: The scaling of the features, a `sklearn.preprocessing.MinMaxScaler`.
        n_features_in_: The number of features.
        feature_names_in_: Their names, if they had any.

    Example:
        >>> from sklearn.datasets import load_iris
        >>> from pseudograd.estimator import TunableMLPClassifier
        >>> X, y = load_iris(return_X_y=True)
        >>> model = TunableMLPClassifier((16,), ks=(0.5, 1), repetitions=3, random_state=0)
        >>> bool(model.fit(X, y).score(X, y) > 0.9), model.k_ in (0.5, 1)
        (True, True)

    """

    def __init__(
        self,
        hidden_layer_sizes: int | Sequence[int] = (400,),
        k: float | str = "auto",
        learning_rate: float | str = "auto",
        *,
        ks: Sequence[float] | None = None,
        repetitions: int = 7,
        activation: str = "relu",
        optimizer: str = "sgd",
        momentum: float = 0.9,
        batch_size: int | str = "auto",
        clip: float | str | None = "auto",
        feature_range: tuple[float, float] = (-1.0, 1.0),
        patience: int = 15,
        max_iter: int = 1000,
        device: str = "auto",
        random_state: int | np.random.RandomState | None = None,
        verbose: bool = False,
    ) -> None:
        self.hidden_layer_sizes = hidden_layer_sizes
        self.k = k
        self.learning_rate = learning_rate
        self.ks = ks
        self.repetitions = repetitions
        self.activation = activation
        self.optimizer = optimizer
        self.momentum = momentum
        self.batch_size = batch_size
        self.clip = clip
        self.feature_range = feature_range
        self.patience = patience
        self.max_iter = max_iter
        self.device = device
        self.random_state = random_state
        self.verbose = verbose

    def fit(
        self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None
    ) -> TunableMLPClassifier:
        """Choose what is to be chosen, and train the network.

        Args:
            X: One row of features an example.
            y: Labels: numbers or texts.
            sample_weight: How much each example counts; None if all count the same.

        """
        self._check_parameters()
        rows, targets = validate_data(self, X, y, dtype=_FLOATS)
        _check_labels(targets)
        weights = _weights(sample_weight, rows)
        if not weights.all():
            counting = weights > 0
            rows, targets, weights = rows[counting], targets[counting], weights[counting]
        self.classes_, labels = np.unique(targets, return_inverse=True)
        if len(self.classes_) < 2:
            (only,) = self.classes_.tolist()
            raise ValueError(f"y must have two classes or more; there is only one class, {only!r}")
        low, high = self.feature_range
        self.scaler_ = MinMaxScaler((low, high), clip=True).fit(rows)
        features = self.scaler_.transform(rows).astype(np.float32, copy=False)
        seed = check_random_state(self.random_state).randint(2**31 - 1)
        self._train(_dataset(features, labels, weights, (low, high)), seed)
        return self

    def predict(self, X: ArrayLike) -> NDArray[Any]:
        """Give the most probable label of each row."""
        best = self._logits(X).argmax(-1)
        labels: NDArray[Any] = self.classes_[best.numpy()]
        return labels

    def predict_proba(self, X: ArrayLike) -> NDArray[np.float64]:
        """Give the probability of each class, in the order of ``classes_``."""
        return self._logits(X).softmax(-1).numpy()

    def predict_log_proba(self, X: ArrayLike) -> NDArray[np.float64]:
        """Give the logarithms of these probabilities."""
        return self._logits(X).log_softmax(-1).numpy()

    @property
    def coefs_(self) -> list[NDArray[np.float32]]:
        """The weights of each layer, shape (in, out)."""
        return [weight.numpy() for weight, _ in self.network_.parameters]

    @property
    def intercepts_(self) -> list[NDArray[np.float32]]:
        """The biases of each layer."""
        return [bias.numpy() for _, bias in self.network_.parameters]

    def _logits(self, X: ArrayLike) -> Tensor:
        check_is_fitted(self, "network_")
        X = validate_data(self, X, dtype=_FLOATS, reset=False)
        return self.network_.logits(torch.from_numpy(self.scaler_.transform(X)))

    def _check_parameters(self) -> None:
        for name, (wanted, holds) in _WANTED.items():
            if not holds(getattr(self, name)):
                raise ValueError(f"{name} must be {wanted}, not {getattr(self, name)!r}")

    def _protocol(self, data: Dataset, seed: int) -> Protocol:
        """Return what to try, as the parameters say."""
        sizes: Any = self.hidden_layer_sizes
        sizes = (sizes,) if isinstance(sizes, Integral) else tuple(sizes)
        ks = self.ks if self.ks is not None else ks_for(len(sizes))
        recipe = MLPRecipe(
            data=data.name,
            hidden_layer_sizes=sizes,
            momentum=self.momentum,
            optimizer=self.optimizer,
            activation=self.activation,
            feature_range=data.value_range,
            batch_size=_unless_auto(self.batch_size, batch_size_for(data.train_size)),
            clip=_unless_auto(self.clip, clip_for(len(sizes))),
            patience=self.patience,
            ties="last",
            max_epochs=self.max_iter,
            stratified=True,
        )
        rates: dict[str, Any] = {}
        if not _is_auto(self.learning_rate):
            rates = {"learning_rates": (float(self.learning_rate),), "most_extensions": 0}
        return Protocol(
            recipe,
            ks=tuple(float(k) for k in (ks if _is_auto(self.k) else [self.k])),
            repetitions=self.repetitions,
            retrainings=0,
            seed=seed,
            **rates,
        )

    def _train(self, data: Dataset, seed: int) -> None:
        protocol = self._protocol(data, seed)
        device = _unless_auto(self.device, "cuda" if torch.cuda.is_available() else "cpu")
        for name in ("cv_results_", "best_index_", "network_"):  # of an earlier fit
            if hasattr(self, name):
                delattr(self, name)
        if _is_auto(self.k) or _is_auto(self.learning_rate):
            self.k_, self.learning_rate_ = self._choose(protocol, Fleet(data, device))
        else:
            self.k_, self.learning_rate_ = float(self.k), float(self.learning_rate)
        (final,) = protocol.retrainings_of(self.k_, self.learning_rate_)
        (outcome,) = Fleet(data, device, keep_parameters=True).run([final])
        network = Network.of(outcome, data)
        if outcome.stopped_by == "diverged":
            problem = f"training diverged: lower learning_rate={self.learning_rate_:g}"
            if not network.is_finite:
                raise ValueError(problem)
            warnings.warn(problem, ConvergenceWarning, stacklevel=3)
        elif outcome.stopped_by == "limit":
            problem = f"training had not ended: raise max_iter={self.max_iter}"
            warnings.warn(problem, ConvergenceWarning, stacklevel=3)
        self.network_ = network
        self.validation_scores_ = [1 - error for error in outcome.curve]
        self.best_validation_score_ = 1 - outcome.stop_error
        self.n_iter_ = outcome.epochs

    def _choose(self, protocol: Protocol, fleet: Fleet) -> tuple[float, float]:
        """Run the study, keep its results, and return the best k and its learning rate."""
        study = Study(None, protocol)
        with contextlib.ExitStack() as shown:
            watch: dict[str, Any] = {}
            if self.verbose:
                watch["watch"] = shown.enter_context(Display(protocol, {})).show
            study.run(fleet.run, **watch)
        cells = protocol.cells(study.ledger)
        best = protocol.best(cells)
        self.cv_results_, self.best_index_ = _cv_results(cells), cells.index(best)
        return best.k, best.learning_rate


def _check_labels(targets: NDArray[Any]) -> None:
    if targets.dtype == object:
        if count := sum(label is None for label in targets):
            raise ValueError(
                f"y must have a label for each row; {count} are None: fill them in, or remove "
                "these rows"
            )
        if len({isinstance(label, str) for label in targets}) > 1:
            raise ValueError("y must be all numbers or all texts, not both: make all of them texts")
    check_classification_targets(targets)


def _weights(given: ArrayLike | None, rows: NDArray[Any]) -> NDArray[np.float64]:
    if given is None:
        return np.ones(len(rows))
    checked = check_array(given, dtype=np.float64, ensure_2d=False, input_name="sample_weight")
    weights: NDArray[np.float64] = column_or_1d(checked)
    check_consistent_length(rows, weights)
    if (weights < 0).any() or not weights.any():
        raise ValueError("sample_weight must be zero or more, and not zero for all examples")
    return weights


def _dataset(
    features: NDArray[np.float32],
    labels: NDArray[np.int64],
    weights: NDArray[np.float64],
    value_range: tuple[float, float],
) -> Dataset:
    """The examples in an order of their own, equal ones as one of their total weight.

    What `_to_share` names becomes five pieces, one for each of the five parts.
    """
    features = np.ascontiguousarray(features)
    as_bytes = features.view(np.dtype((np.void, features[0].nbytes))).ravel()
    _, row = np.unique(as_bytes, return_inverse=True)
    _, index, example = np.unique(
        row * (labels.max() + 1) + labels, return_index=True, return_inverse=True
    )
    total = np.bincount(example, weights).astype(np.float64, copy=False)
    pieces = np.where(_to_share(row[index], labels[index], total), FOLDS, 1)
    pieces_of = np.arange(len(index)).repeat(pieces)
    # A final training is judged on a test set. There is none here; a copy of an example stands in.
    pieces_of = np.append(pieces_of, 0)
    index, total = index[pieces_of], (total / pieces)[pieces_of]
    return Dataset(
        "examples",
        torch.from_numpy(features[index]),
        torch.from_numpy(labels[index]),
        len(index) - 1,
        value_range,
        None if (total == total[0]).all() else torch.from_numpy(total),
        pieces_of=torch.from_numpy(pieces_of) if pieces.max() > 1 else None,
    )


def _to_share(
    row: NDArray[np.int64], label: NDArray[np.int64], weight: NDArray[np.float64]
) -> NDArray[np.bool_]:
    """Which of these different examples stand in every part: see `TunableMLPClassifier`.

    Far heavier than its class is five times the mean weight there, but no less than a fifth of a
    part's weight, and no more than a part's.
    """
    if len(row) < FOLDS:  # no part may be empty
        return np.ones(len(row), bool)
    several = np.bincount(row)[row] > 1
    mean = np.bincount(label, weight) / np.bincount(label)
    part = weight.sum() / FOLDS
    limit = np.clip(FOLDS * mean, part / FOLDS, part)[label]
    heavy = weight > limit * (1 + 1e-9)  # so that rounding does not decide
    return np.asarray(several | heavy)


def _cv_results(cells: list[Cell]) -> dict[str, Any]:
    """What `GridSearchCV` would say of these, but for the times."""
    scores = 1 - np.array([cell.errors for cell in cells])
    mean = 1 - np.array([cell.error for cell in cells])
    params = [{"k": cell.k, "learning_rate": cell.learning_rate} for cell in cells]
    return {
        **{
            f"param_{name}": np.ma.array([p[name] for p in params], mask=False)
            for name in params[0]
        },
        "params": params,
        **{f"split{at}_test_score": column for at, column in enumerate(scores.T)},
        "mean_test_score": mean,
        "std_test_score": scores.std(1),
        "rank_test_score": rankdata(-mean, "min").astype(np.int32),
    }


# --- what the parameters may be --------------------------------------------------------------


def _positive(value: Any, kind: type = Real) -> bool:
    right: bool = isinstance(value, kind)
    return right and 0 < value < math.inf


def _positives(values: Any, kind: type = Real) -> bool:
    return isinstance(values, Iterable) and all(_positive(value, kind) for value in values)


def _are_sensitivities(values: Any) -> bool:
    if not _positives(values):
        return False
    try:
        for value in values:
            check_k(value)
    except (TypeError, ValueError):
        return False
    return True


def _is_auto(value: Any) -> bool:
    return isinstance(value, str) and value == "auto"


def _unless_auto(value: Any, automatic: Any) -> Any:
    return automatic if _is_auto(value) else value


def _is_range(value: Any) -> bool:
    return (
        isinstance(value, Sequence)
        and len(value) == 2
        and all(isinstance(end, Real) for end in value)
        and -math.inf < value[0] < value[1] < math.inf
    )


def _is_device(value: Any) -> bool:
    if not isinstance(value, str | torch.device):
        return False
    try:
        torch.zeros(1, device=value).item()
    except (AssertionError, RuntimeError):
        return False
    return True


_WANTED: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "hidden_layer_sizes": (
        "whole numbers above 0, or () for no hidden layer",
        lambda value: _positive(value, Integral) or _positives(value, Integral),
    ),
    "k": (
        "'auto' or a number above 0 (2^-100 to 2^100)",
        lambda value: _is_auto(value) or _are_sensitivities([value]),
    ),
    "learning_rate": (
        "'auto' or a number above 0",
        lambda value: _is_auto(value) or _positive(value),
    ),
    "ks": (
        "None or different numbers above 0 (2^-100 to 2^100)",
        lambda value: (
            value is None
            or (
                isinstance(value, Sequence | np.ndarray)
                and _are_sensitivities(value)
                and 0 < len(value) == len(set(value))
            )
        ),
    ),
    "repetitions": ("a whole number above 0", lambda value: _positive(value, Integral)),
    "activation": (f"one of {ACTIVATIONS}", lambda value: value in ACTIVATIONS),
    "optimizer": (f"one of {OPTIMIZERS}", lambda value: value in OPTIMIZERS),
    "momentum": (
        "a number in [0, 1)",
        lambda value: isinstance(value, Real) and 0 <= float(value) < 1,
    ),
    "batch_size": (
        "'auto' or a whole number above 0",
        lambda value: _is_auto(value) or _positive(value, Integral),
    ),
    "clip": (
        "'auto', None or a number above 0",
        lambda value: value is None or _is_auto(value) or _positive(value),
    ),
    "feature_range": ("(low, high), two finite numbers, low below high", _is_range),
    "patience": ("a whole number above 0", lambda value: _positive(value, Integral)),
    "max_iter": ("a whole number above 0", lambda value: _positive(value, Integral)),
    "device": (
        "'auto' or a device that is there, such as 'cpu'",
        lambda value: _is_auto(value) or _is_device(value),
    ),
}
