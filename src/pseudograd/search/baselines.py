"""Baseline classifiers on the same split, and permutation importance."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pseudograd.extras import needed_for
from pseudograd.search.measures import Floats, log_loss

if TYPE_CHECKING:
    from pseudograd.data import Dataset, Encoder

Predict = Callable[[NDArray[Any]], Floats]

MAJORITY, LOGISTIC, BOOSTING = "majority", "logistic regression", "gradient boosting"
_MOST_ROWS = 100_000
# Limits of rows × features × classes and, for boosting, features × classes: about 20 s on a core.
_LOGISTIC_WORK, _BOOSTING_WORK, _BOOSTING_WIDTH = 300_000_000, 40_000_000, 2_000
# Below this work, threads do not pay off: on a busy machine they took 20 times as long as one.
_THREADED_WORK = 5_000_000
_REPEATS = 5
_PREDICTIONS = 500_000  # maximum number of rows that permutation importance predicts
_FEWEST_ROWS = 100


def baselines(data: Dataset) -> dict[str, tuple[NDArray[np.float64], int]]:
    """Return the test probabilities of baselines, and how many rows each was trained on.

    They are the class frequencies of the training set (which predict the majority class), and
    scikit-learn's LogisticRegression and HistGradientBoostingClassifier with default settings, on
    the same features as the networks. Large data are subsampled for the latter two; boosting is
    skipped if features × classes exceed 2,000.
    """
    with needed_for("the baselines of a search"):
        from threadpoolctl import threadpool_limits

    features, labels, test = _arrays(data)
    shares = np.bincount(labels, minlength=data.classes) / len(labels)
    found = {MAJORITY: (np.tile(shares, (len(test), 1)), len(labels))}
    columns = features.shape[1] * (data.classes if data.classes > 2 else 1)
    for name, work in ((LOGISTIC, _LOGISTIC_WORK), (BOOSTING, _BOOSTING_WORK)):
        if name == BOOSTING and columns > _BOOSTING_WIDTH:
            continue
        rows = _some(len(labels), min(_MOST_ROWS, max(work // columns, 1_000)))
        if len(np.unique(labels[rows])) < 2:
            continue
        model = _classifier(name, labels[rows])
        threads = None if len(rows) * columns > _THREADED_WORK else 1
        with threadpool_limits(threads), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the defaults may not converge
            model.fit(features[rows], labels[rows])
            probabilities = np.zeros((len(test), data.classes))
            probabilities[:, model.classes_] = model.predict_proba(test)
        found[name] = probabilities, len(rows)
    return found


def _arrays(data: Dataset) -> tuple[NDArray[Any], NDArray[np.int64], NDArray[Any]]:
    """Return the training features, labels and test features, with pixels scaled to [0, 1]."""
    features = data.features.numpy()
    if features.dtype == np.uint8:
        low, high = data.value_range
        features = (features - np.float32(low)) / np.float32(high - low)
    size = data.train_size
    return features[:size], data.labels[:size].numpy(), features[size:]


def _classifier(name: str, labels: NDArray[np.int64]) -> Any:
    with needed_for("the baselines of a search"):
        from sklearn.ensemble import HistGradientBoostingClassifier
        from sklearn.linear_model import LogisticRegression

    if name == LOGISTIC:
        return LogisticRegression()
    # Its early stopping, on by default above 10,000 rows, needs two examples of each class.
    rarest = np.unique(labels, return_counts=True)[1].min()
    early_stopping: str | bool = "auto" if rarest > 1 else False
    return HistGradientBoostingClassifier(random_state=0, early_stopping=early_stopping)


def _some(count: int, most: int) -> NDArray[np.int64]:
    """Return the indices of all rows, or of a random sample of ``most``."""
    if count <= most:
        return np.arange(count)
    return np.sort(np.random.default_rng(0).choice(count, most, replace=False))


def permutation_importance(
    predict: Predict, data: Dataset, encoder: Encoder
) -> dict[str, Any] | None:
    """Return the increase of the test error when each column is shuffled.

    Args:
        predict: Returns the probabilities of rows of features.
        data: The data set; large test sets are subsampled.
        encoder: The encoder, which maps columns to features.

    Returns:
        The columns, the most important first, each with the mean increase of the error and of the
        log loss over the repeats, and the standard deviation of the error; None for pixels.

    """
    if encoder.pixels is not None or not data.test_size:
        return None
    columns = list(_feature_columns(encoder))
    most = max(_PREDICTIONS // (_REPEATS * len(columns)), _FEWEST_ROWS)
    rows = _some(data.test_size, most) + data.train_size
    features, labels = data.features.numpy()[rows], data.labels.numpy()[rows]

    def losses(rows: NDArray[Any]) -> tuple[float, float]:
        probabilities = predict(rows)
        return float((probabilities.argmax(1) != labels).mean()), log_loss(probabilities, labels)

    error, loss = losses(features)
    random = np.random.default_rng(0)
    found: list[dict[str, Any]] = []
    for name, place in columns:
        shuffled, increases = features.copy(), []
        for _ in range(_REPEATS):
            shuffled[:, place] = features[random.permutation(len(features)), place]
            increases.append(losses(shuffled))
        more_error, more_loss = np.array(increases).T
        found.append(
            {
                "column": name,
                "increase": float(more_error.mean() - error),
                "spread": float(more_error.std(ddof=1)),
                "log_loss_increase": float(more_loss.mean() - loss),
            }
        )
    found.sort(key=lambda one: (-one["increase"], -one["log_loss_increase"]))
    return {"columns": found, "rows": len(features), "repeats": _REPEATS}


def _feature_columns(encoder: Encoder) -> Iterator[tuple[str, slice]]:
    """Yield each column of the table and the slice of its features."""
    start = 0
    for column in encoder.columns:
        if column.width:
            yield column.name, slice(start, start + column.width)
        start += column.width
