"""The tuner as a scikit-learn classifier."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from numbers import Integral
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
from pseudograd.fleet import Fleet, MLPRecipe, Network, Trial
from pseudograd.search import Cell, Protocol, Study, batch_size_for, clip_for, ks_for
from pseudograd.search.display import Display

_FLOATS = (np.float64, np.float32)  # kept as they are; other features become float64
_DATA = "examples"


class TunableMLPClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]  # untyped
    """A multi-layer perceptron that chooses its sensitivity to large errors, and its learning rate.

    ``k="auto"`` and ``learning_rate="auto"`` are chosen as in the paper. The examples are cut into
    five equal, stratified folds. Three train a network, one stops its training early and one
    validates it; this is repeated ``repetitions`` times with the roles rotated. Each k has its own
    learning rates, halved or doubled until the best one is inside. The pair with the lowest mean
    validation error trains the final network on four folds, stopped by the fifth. If you give both
    k and the learning rate, only this last step is done.

    Equal examples are merged into one with their total weight, and the order of the examples does
    not matter. So a weight of 2 equals a second copy, a weight of 0 equals none, and no copy of a
    training example judges the network. Three exceptions appear in every fold with a fifth of their
    weight: a row with several labels, so that the labels' frequencies are learned; an example far
    heavier than the rest of its class, so that no fold lacks its kind; and all examples, if there
    are fewer than five different ones.

    Each feature is scaled linearly so that the training data fill ``feature_range``; values outside
    are clipped when predicting.

    Args:
        hidden_layer_sizes: The widths of the hidden layers; a single number for one layer, () for
            none.
        k: The sensitivity to large errors (Eq. 5), 1 for cross-entropy; "auto" to choose it.
        learning_rate: The step size; "auto" to choose it.
        ks: The values that "auto" chooses k from; None for the paper's: 1/16 to 4 with up to one
            hidden layer, 1/4 to 4 with more.
        repetitions: How many networks validate each pair of k and learning rate. The paper uses 7,
            and 10 for MNIST.
        activation: "relu", "tanh" or "sigmoid".
        optimizer: "sgd", "adam" or "rmsprop".
        momentum: The momentum of "sgd".
        batch_size: Examples per step; "auto" for 128, or less if an epoch would then have fewer
            than five steps (`pseudograd.search.protocol.batch_size_for`).
        clip: The largest norm of a step's gradient; None for no limit; "auto" for the paper's: 100
            with two or more hidden layers, none with fewer.
        feature_range: The interval that features are scaled to; (0, 1) is better if most of them
            are indicators, as from `sklearn.preprocessing.OneHotEncoder`.
        patience: Stop training after this many epochs without a lower error on the early-stopping
            fold.
        max_iter: Stop training after this many epochs in any case.
        device: "cpu", "cuda", ...; "auto" for a GPU if there is one.
        random_state: Determines the folds, the initial weights and the order of the examples.
        verbose: Whether to show progress.

    Attributes:
        k_: The sensitivity of the final network.
        learning_rate_: Its learning rate.
        cv_results_: If k or the learning rate was chosen: the accuracies of all pairs tried, with
            the keys of `sklearn.model_selection.GridSearchCV`, except for the times, since networks
            are trained together.
        best_index_: The index of the chosen pair. Ties go to the k nearest 1, then to the smaller
            rate.
        classes_: The labels.
        n_iter_: The number of epochs that the final network was trained for.
        validation_scores_: The accuracy on the early-stopping fold after each of these epochs.
        best_validation_score_: The highest of them; the network is from the last epoch with it.
        coefs_: The weights of each layer, shape (in, out).
        intercepts_: The biases of each layer.
        network_: The final network; its input is the output of ``scaler_``.
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
        """Choose k and the learning rate where they are "auto", and train the network.

        Args:
            X: Features, one row per example.
            y: Labels, numbers or strings.
            sample_weight: How much each example counts; None if all count the same.

        """
        recipe = self._recipe()
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
        self.scaler_ = MinMaxScaler(recipe.feature_range, clip=True).fit(rows)
        features = self.scaler_.transform(rows).astype(np.float32, copy=False)
        seed = check_random_state(self.random_state).randint(2**31 - 1)
        data = _dataset(features, labels, weights, recipe.feature_range)
        self._train(data, self._protocol(recipe, data.train_size, seed))
        return self

    def predict(self, X: ArrayLike) -> NDArray[Any]:
        """Return the most probable label of each row."""
        best = self._logits(X).argmax(-1)
        labels: NDArray[Any] = self.classes_[best.numpy()]
        return labels

    def predict_proba(self, X: ArrayLike) -> NDArray[np.float64]:
        """Return the probability of each class, in the order of ``classes_``."""
        return self._logits(X).softmax(-1).numpy()

    def predict_log_proba(self, X: ArrayLike) -> NDArray[np.float64]:
        """Return the logarithm of the probability of each class."""
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

    def _recipe(self) -> MLPRecipe:
        """Return the recipe; `_protocol` completes what is "auto"."""
        sizes: Any = self.hidden_layer_sizes
        given = {name: getattr(self, name) for name in ("batch_size", "clip")}
        with _own_names():
            return MLPRecipe(
                data=_DATA,
                hidden_layer_sizes=_as_tuple([sizes] if isinstance(sizes, Integral) else sizes),
                momentum=self.momentum,
                optimizer=self.optimizer,
                activation=self.activation,
                feature_range=_as_tuple(self.feature_range),
                patience=self.patience,
                ties="last",
                max_epochs=self.max_iter,
                stratified=True,
                **{name: value for name, value in given.items() if not _is_auto(value)},
            )

    def _protocol(self, recipe: MLPRecipe, train_size: int, seed: int) -> Protocol:
        """Return the search for what is "auto"; k or the learning rate alone if it is given."""
        layers = len(recipe.hidden_layer_sizes)
        if _is_auto(self.batch_size):
            recipe = replace(recipe, batch_size=batch_size_for(train_size))
        if _is_auto(self.clip):
            recipe = replace(recipe, clip=clip_for(layers))
        k: Any = 1.0 if _is_auto(self.k) else self.k
        rate: Any = 1.0 if _is_auto(self.learning_rate) else self.learning_rate
        rates: dict[str, Any] = {}
        if not _is_auto(self.learning_rate):
            rates = {"learning_rates": (rate,), "most_extensions": 0}
        with _own_names():
            Trial(recipe, k, rate)  # checks the two
            protocol = Protocol(
                recipe,
                ks=ks_for(layers) if self.ks is None else _as_tuple(self.ks),
                repetitions=self.repetitions,
                retrainings=0,
                seed=seed,
                **rates,
            )
        return protocol if _is_auto(self.k) else replace(protocol, ks=(k,))

    def _train(self, data: Dataset, protocol: Protocol) -> None:
        device = _checked_device(self.device)
        for name in ("cv_results_", "best_index_", "network_"):  # of an earlier fit
            if hasattr(self, name):
                delattr(self, name)
        if _is_auto(self.k) or _is_auto(self.learning_rate):
            self.k_, self.learning_rate_ = self._choose(protocol, Fleet(data, device))
        else:
            (self.k_,), (self.learning_rate_,) = protocol.ks, protocol.learning_rates
        (final,) = protocol.retrainings_of(self.k_, self.learning_rate_)
        (outcome,) = Fleet(data, device, keep_parameters=True).run([final])
        network = Network.of(outcome, data)
        if outcome.stopped_by == "diverged":
            problem = f"training diverged: lower learning_rate={self.learning_rate_:g}"
            if not network.is_finite:
                raise ValueError(problem)
            warnings.warn(problem, ConvergenceWarning, stacklevel=3)
        elif outcome.stopped_by == "limit":
            problem = f"training did not converge: raise max_iter={self.max_iter}"
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
            raise ValueError(
                "y must be all numbers or all strings, not both: make all of them strings"
            )
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
    """Return the data set: sorted, equal examples merged into one with their total weight.

    Each example that `_in_every_fold` selects becomes five pieces, one per fold.
    """
    features = np.ascontiguousarray(features)
    as_bytes = features.view(np.dtype((np.void, features[0].nbytes))).ravel()
    _, row = np.unique(as_bytes, return_inverse=True)
    _, index, example = np.unique(
        row * (labels.max() + 1) + labels, return_index=True, return_inverse=True
    )
    total = np.bincount(example, weights).astype(np.float64, copy=False)
    pieces = np.where(_in_every_fold(row[index], labels[index], total), FOLDS, 1)
    pieces_of = np.arange(len(index)).repeat(pieces)
    # The final training is judged on a test set; a copy of an example stands in for it.
    pieces_of = np.append(pieces_of, 0)
    index, total = index[pieces_of], (total / pieces)[pieces_of]
    return Dataset(
        _DATA,
        torch.from_numpy(features[index]),
        torch.from_numpy(labels[index]),
        len(index) - 1,
        value_range,
        None if (total == total[0]).all() else torch.from_numpy(total),
        pieces_of=torch.from_numpy(pieces_of) if pieces.max() > 1 else None,
    )


def _in_every_fold(
    row: NDArray[np.int64], label: NDArray[np.int64], weight: NDArray[np.float64]
) -> NDArray[np.bool_]:
    """Return which of these different examples belong in every fold: see `TunableMLPClassifier`.

    "Far heavier than its class" means above five times the class's mean weight, a limit kept
    between a fifth of a fold's weight and the whole of it.
    """
    if len(row) < FOLDS:  # no fold may be empty
        return np.ones(len(row), bool)
    several = np.bincount(row)[row] > 1
    mean = np.bincount(label, weight) / np.bincount(label)
    fold = weight.sum() / FOLDS
    limit = np.clip(FOLDS * mean, fold / FOLDS, fold)[label]
    heavy = weight > limit * (1 + 1e-9)  # so that rounding does not decide
    return np.asarray(several | heavy)


def _cv_results(cells: list[Cell]) -> dict[str, Any]:
    """Return the cells in the format of `GridSearchCV`, without times."""
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


# --- parameters ------------------------------------------------------------------------------


@contextlib.contextmanager
def _own_names() -> Iterator[None]:
    """Let complaints of the recipe, the trial and the protocol name the classifier's parameters."""
    try:
        yield
    except ValueError as problem:
        said = re.sub("^max_epochs ", "max_iter ", str(problem))
        said = re.sub("^ks must be ", "ks must be None or ", said)
        said = re.sub("^(k|learning_rate|batch_size|clip) must be ", r"\1 must be 'auto' or ", said)
        raise ValueError(said) from None


def _is_auto(value: Any) -> bool:
    return isinstance(value, str) and value == "auto"


def _as_tuple(values: Any) -> Any:
    return tuple(values) if isinstance(values, Iterable) else values


def _checked_device(given: Any) -> torch.device:
    automatic = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(automatic if _is_auto(given) else given)
        torch.zeros(1, device=device).item()
    except (AssertionError, RuntimeError, TypeError):
        raise ValueError(
            f"device must be 'auto' or a device that is there, such as 'cpu', not {given!r}"
        ) from None
    return device
