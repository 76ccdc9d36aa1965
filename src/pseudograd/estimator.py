"""The tuner as a scikit-learn classifier."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy.stats import rankdata
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_array, check_consistent_length, check_random_state, column_or_1d
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from pseudograd.data import Dataset, Encoder
from pseudograd.data.columns import named, read_column
from pseudograd.data.dataset import FOLDS
from pseudograd.data.features import Scale
from pseudograd.fleet import Ramp, Trial
from pseudograd.fleet.devices import all_devices, check_device
from pseudograd.fleet.mlp.bins import quantiles
from pseudograd.fleet.ramp import as_k
from pseudograd.search import Bagging, Cell, table_recipe
from pseudograd.search.bagging import bagging_for
from pseudograd.search.display import Display
from pseudograd.search.ensemble import METRICS, calibrated, mixture, select, train_candidates
from pseudograd.words import renamed

_FLOATS = (np.float64, np.float32)  # dtypes that are kept; others become float64
_DATA = "examples"


class TunableMLPClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]  # untyped
    """An ensemble of multi-layer perceptrons with different sensitivities to large errors.

    This is the model that ``pseudograd tune`` trains. The examples are split into five stratified
    folds. For each pair of k and learning rate, five networks are trained, each on four folds; the
    fifth fold validates the network and determines the epoch to keep. The ensemble has up to three
    pairs, chosen and weighted by the error of its out-of-fold predictions. A temperature, fitted on
    the same predictions, calibrates the probabilities.

    Identical examples are merged into one with their total weight, and the order of the examples
    does not matter. So a weight of 2 equals a second copy, a weight of 0 removes the example, and
    no copy of a training example is in the validation fold. There are three exceptions, which
    appear in every fold with a fifth of their weight: a row that occurs with several labels, so
    that the network learns their frequencies; an example with a far larger weight than the rest of
    its class, so that every fold has it; and all examples, if there are fewer than five distinct
    ones.

    Numbers are scaled by their median and quartiles, and squashed into (-3, 3). Data frames may
    also have categories, strings, dates and missing values, which are encoded as in
    ``pseudograd tune``. No column is left out: drop ids and names first.

    Args:
        hidden_layer_sizes: The widths of the hidden layers; a single number for one layer, () for
            none; "auto" for two of 32 to 128, depending on the number of examples.
        k: The sensitivity to large errors (Eq. 5), 1 for cross-entropy; "0.5→2" or a
            `pseudograd.fleet.Ramp` to change it linearly during training; "auto" to choose one
            or several from ``ks``.
        learning_rate: The learning rate; "auto" to choose it.
        ks: The values that "auto" chooses k from, numbers or ramps; None for 2, 1 and 1/2.
        metric: The criterion for choosing the ensemble or the pair: "error", "balanced" (all
            classes have the same weight) or "log-loss".
        repetitions: The number of networks per pair, a multiple of five.
        ensemble: Whether to keep the ensemble. False keeps one network, the first of the best pair
            by the metric, which is smaller and predicts faster.
        activation: "relu", "tanh" or "sigmoid".
        weight_decay: The weight decay of AdamW.
        batch_size: Examples per step; "auto" for 32 to 1024, depending on the number of examples.
        clip: The gradient norm to clip at; None for no clipping.
        max_iter: The number of epochs; "auto" for 4 to 60, depending on the number of examples.
        device: "cpu", "cuda", ...; "auto" for a GPU if there is one.
        random_state: The random seed of the folds, the initial weights and the shuffling.
        verbose: Whether to show progress.

    Attributes:
        ensemble_: The networks, their weights and the temperature; a single network if
            ``ensemble`` is False.
        k_: The k of the best single pair; if ``ensemble`` is False, the network's k.
        learning_rate_: The learning rate of the same pair.
        members_: The pairs of the ensemble: (k, learning rate, weight), by decreasing weight.
        cv_results_: The accuracies of all pairs, with the keys of
            `sklearn.model_selection.GridSearchCV`, except for the times, because networks train
            concurrently.
        best_index_: The index of the best single pair.
        classes_: The labels.
        n_iter_: The number of epochs.
        encoder_: The encoder of a data frame with non-numeric columns or missing values; None
            otherwise.
        n_features_in_: The number of features.
        feature_names_in_: Their names, if they had any.

    Example:
        >>> from sklearn.datasets import load_iris
        >>> from pseudograd.estimator import TunableMLPClassifier
        >>> X, y = load_iris(return_X_y=True)
        >>> model = TunableMLPClassifier((16,), ks=(0.5, 1), max_iter=20, random_state=0).fit(X, y)
        >>> bool(model.score(X, y) > 0.9), len(model.ensemble_.networks) % 5
        (True, 0)

    """

    def __init__(
        self,
        hidden_layer_sizes: int | Sequence[int] | str = "auto",
        k: float | str | Ramp = "auto",
        learning_rate: float | str = "auto",
        *,
        ks: Sequence[float | str | Ramp] | None = None,
        metric: str = "error",
        repetitions: int = 5,
        ensemble: bool = True,
        activation: str = "relu",
        weight_decay: float = 0.1,
        batch_size: int | str = "auto",
        clip: float | None = None,
        max_iter: int | str = "auto",
        device: str = "auto",
        random_state: int | np.random.RandomState | None = None,
        verbose: bool = False,
    ) -> None:
        self.hidden_layer_sizes = hidden_layer_sizes
        self.k = k
        self.learning_rate = learning_rate
        self.ks = ks
        self.metric = metric
        self.repetitions = repetitions
        self.ensemble = ensemble
        self.activation = activation
        self.weight_decay = weight_decay
        self.batch_size = batch_size
        self.clip = clip
        self.max_iter = max_iter
        self.device = device
        self.random_state = random_state
        self.verbose = verbose

    def fit(
        self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None
    ) -> TunableMLPClassifier:
        """Choose k and the learning rate where they are "auto", and train the ensemble.

        Args:
            X: Features, one row per example: an array of numbers, or a pandas or polars data frame,
                whose columns may also be categories, strings or dates.
            y: Labels, numbers or strings.
            sample_weight: The weight of each example; None if all are equal. For a data frame with
                non-numeric columns or missing values, scaling and rare categories ignore weights.

        """
        if self.metric not in METRICS:
            raise ValueError(f"metric must be one of {METRICS}, not {self.metric!r}")
        if not isinstance(self.ensemble, bool | np.bool_):
            raise ValueError(f"ensemble must be True or False, not {self.ensemble!r}")
        self._protocol(100, 0)  # validates the parameters first
        frame = _mixed_frame(X)
        if frame is None:
            rows, targets = validate_data(self, X, y, dtype=_FLOATS)
        else:
            _, targets = validate_data(self, X, y, skip_check_array=True)
            rows, targets = frame, column_or_1d(targets)
            check_consistent_length(rows, targets)
        _check_labels(targets)
        weights = _weights(sample_weight, targets)
        if not weights.all():
            counting = weights > 0
            rows, targets, weights = rows[counting], targets[counting], weights[counting]
        if not len(rows):
            raise ValueError("X must have at least one row, not 0")
        self.classes_, labels = np.unique(targets, return_inverse=True)
        if len(self.classes_) < 2:
            (only,) = self.classes_.tolist()
            raise ValueError(f"y must have two classes or more; there is only one class, {only!r}")
        self.encoder_ = None
        if frame is not None:
            rows, self.encoder_ = _encoded(rows, labels)
        else:
            self._scales = [_scale(column, weights) for column in rows.T]
        seed = check_random_state(self.random_state).randint(2**31 - 1)
        data = _dataset(self._features(rows), labels, weights)
        self._train(data, self._protocol(data.train_size, seed))
        return self

    def predict(self, X: ArrayLike) -> NDArray[Any]:
        """Return the most probable label of each row."""
        likeliest = self._probabilities(X).argmax(-1).numpy()
        labels: NDArray[Any] = self.classes_[likeliest]
        return labels

    def predict_proba(self, X: ArrayLike) -> NDArray[np.float64]:
        """Return the probability of each class, in the order of ``classes_``."""
        return self._probabilities(X).numpy()

    def predict_log_proba(self, X: ArrayLike) -> NDArray[np.float64]:
        """Return the logarithm of the probability of each class."""
        return self._probabilities(X).log().numpy()

    def _probabilities(self, X: ArrayLike) -> Tensor:
        check_is_fitted(self, "ensemble_")
        if self.encoder_ is None:
            rows = validate_data(self, X, dtype=_FLOATS, reset=False)
        else:
            validate_data(self, X, reset=False, skip_check_array=True)
            rows = _as_frame(X)
        return self.ensemble_.probabilities(torch.from_numpy(self._features(rows)))

    def _features(self, rows: Any) -> NDArray[np.float32]:
        if self.encoder_ is not None:
            return self.encoder_.transform(rows)
        columns = [scale.apply(column) for scale, column in zip(self._scales, rows.T, strict=True)]
        return np.stack(columns, 1).astype(np.float32)

    def _protocol(self, train_size: int, seed: int) -> Bagging:
        """Return the search over k and learning rate; each has a single value unless "auto"."""
        sizes: Any = self.hidden_layer_sizes
        if not _is_auto(sizes):
            sizes = _as_tuple([sizes] if isinstance(sizes, Integral) else sizes)
        k: Any = 1.0 if _is_auto(self.k) else as_k(self.k)
        rate: Any = 1.0 if _is_auto(self.learning_rate) else self.learning_rate
        with renamed(max_epochs="max_iter"):
            recipe = table_recipe(
                _DATA,
                train_size,
                hidden_layer_sizes=_unless_auto(sizes),
                activation=self.activation,
                weight_decay=self.weight_decay,
                batch_size=_unless_auto(self.batch_size),
                clip=self.clip,
                max_epochs=_unless_auto(self.max_iter),
            )
            Trial(recipe, k, rate)  # checks the two
            settings: dict[str, Any] = {"repetitions": self.repetitions, "seed": seed}
            if self.ks is not None:
                settings["ks"] = _as_tuple(self.ks)
            protocol = bagging_for(recipe, train_size, **settings)
            if not _is_auto(self.k):
                protocol = replace(protocol, ks=(k,))
            if not _is_auto(self.learning_rate):
                protocol = replace(protocol, learning_rates=(rate,), most_extensions=0)
        return protocol

    def _train(self, data: Dataset, protocol: Bagging) -> None:
        """Run the study, choose the ensemble, and keep the results."""
        device = _checked_device(self.device)
        if self.verbose:
            with Display(protocol, {}) as display:
                found = train_candidates(protocol, data, device, display.show)
        else:
            found = train_candidates(protocol, data, device)
        labels = data.labels[found.rows]
        weights = None if data.weights is None else data.weights[found.rows]
        most = {} if self.ensemble else {"picks": 1}
        shares = select(found.out_of_fold, labels, self.metric, weights, **most)
        ensemble = calibrated(found, shares, labels, weights)
        if not self.ensemble:
            # Valid, since out-of-fold probabilities are those of single networks.
            ensemble = replace(ensemble, networks=ensemble.networks[:1], weights=(1.0,))
        if not all(network.is_finite for network in ensemble.networks):
            self.__dict__.pop("ensemble_", None)  # of an earlier fit
            raise ValueError("training diverged: lower learning_rate or weight_decay")
        self.ensemble_ = ensemble
        best = protocol.best(found.cells) if self.ensemble else found.cells[int(shares.argmax())]
        self.k_, self.learning_rate_ = best.k, best.learning_rate
        self.members_ = [
            (cell.k, cell.learning_rate, round(share, 6))  # float32: 0.3, not 0.30000001
            for cell, share in mixture(found.cells, shares)
        ]
        self.cv_results_ = _cv_results(list(found.cells))
        self.best_index_ = found.cells.index(best)
        self.n_iter_ = getattr(protocol.recipe, "max_epochs", 1)


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


def _mixed_frame(X: Any) -> Any:
    """Return a data frame with missing values or non-numeric columns as pandas; else None."""
    if not hasattr(X, "columns") or not hasattr(X, "dtypes"):
        return None
    from pandas.api.types import is_bool_dtype, is_numeric_dtype

    X = _as_frame(X)
    plain = all(is_numeric_dtype(kind) or is_bool_dtype(kind) for kind in X.dtypes)
    return None if plain and not X.isna().any(axis=None) else X


def _as_frame(X: Any) -> Any:
    """Return a pandas or polars data frame, or an array, as a pandas data frame."""
    import pandas as pd

    return pd.DataFrame(X.to_pandas() if hasattr(X, "to_pandas") else X).reset_index(drop=True)


def _encoded(frame: Any, labels: NDArray[np.int64]) -> tuple[Any, Encoder]:
    """Return a data frame with parsed entries, and its encoder; warn about doubtful columns."""
    import pandas as pd

    frame = named(frame)
    readings = {name: read_column(name, frame[name]) for name in frame}
    for name, reading in readings.items():
        if reading.kind == "other":
            raise ValueError(f"column {name!r} of X must hold numbers, texts or dates: drop it")
        for doubt in reading.doubts:
            said = re.sub(r" \(--[^)]*\)", "", doubt)  # names an option of the command
            warnings.warn(f"column {name!r} {said}", stacklevel=3)
    parsed = pd.DataFrame({name: reading.entries for name, reading in readings.items()})
    target = "y"
    while target in parsed.columns:
        target += "_"
    return parsed, Encoder.fit(parsed.assign(**{target: labels}), target, readings=readings)


def _scale(column: NDArray[Any], weights: NDArray[np.float64]) -> Scale:
    """Return the robust scaling of a column; a weight of 2 equals a second copy."""
    values = torch.from_numpy(column.astype(np.float64))
    shares = torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0], dtype=torch.float64)
    ends = quantiles(values, torch.from_numpy(weights), shares).tolist()
    return Scale.of(*ends)


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
    index, total = index[pieces_of], (total / pieces)[pieces_of]
    return Dataset(
        _DATA,
        torch.from_numpy(features[index]),
        torch.from_numpy(labels[index]),
        len(index),
        (-1.0, 1.0),
        None if (total == total[0]).all() else torch.from_numpy(total),
        pieces_of=torch.from_numpy(pieces_of) if pieces.max() > 1 else None,
    )


def _in_every_fold(
    row: NDArray[np.int64], label: NDArray[np.int64], weight: NDArray[np.float64]
) -> NDArray[np.bool_]:
    """Return which of these distinct examples appear in every fold (see `TunableMLPClassifier`).

    A "far larger weight" is above five times the class's mean weight; this limit is clipped to
    between a fifth of a fold's weight and all of it.
    """
    if len(row) < FOLDS:  # or a fold would be empty
        return np.ones(len(row), bool)
    several = np.bincount(row)[row] > 1
    mean = np.bincount(label, weight) / np.bincount(label)
    fold = weight.sum() / FOLDS
    limit = np.clip(FOLDS * mean, fold / FOLDS, fold)[label]
    heavy = weight > limit * (1 + 1e-9)  # tolerance for rounding
    return np.asarray(several | heavy)


def _cv_results(cells: list[Cell]) -> dict[str, Any]:
    """Return the cells in the format of `GridSearchCV.cv_results_`, without times."""
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


def _is_auto(value: Any) -> bool:
    return isinstance(value, str) and value == "auto"


def _unless_auto(value: Any) -> Any:
    return None if _is_auto(value) else value


def _as_tuple(values: Any) -> Any:
    several = isinstance(values, Iterable) and not isinstance(values, str)
    return tuple(values) if several else values


def _checked_device(given: Any) -> torch.device:
    try:
        return torch.device(check_device(all_devices()[0] if _is_auto(given) else given))
    except (ValueError, RuntimeError, TypeError):
        raise ValueError(
            f"device must be 'auto' or a device that can be used, such as 'cpu', not {given!r}"
        ) from None
