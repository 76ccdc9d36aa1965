"""The classifiers that the tuner is compared with, as functions from a task to probabilities.

For scikit-learn, numbers are imputed by the median with a missing-value indicator, and categories
are one-hot encoded or, for trees, ordinal. pytabkit gets categories as they are.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy import stats
from sklearn.compose import make_column_selector, make_column_transformer
from sklearn.dummy import DummyClassifier
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, RandomizedSearchCV, StratifiedKFold
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, OrdinalEncoder, StandardScaler


class Task(NamedTuple):
    """Features and labels (0, 1, ...) of the training rows, and features of the rows to predict."""

    x: pd.DataFrame
    y: np.ndarray
    new: pd.DataFrame
    seed: int


Method = Callable[[Task], np.ndarray]


def cores() -> int:
    """Return the number of cores that this process may use."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
    return available or os.cpu_count() or 1


def dense() -> Any:
    """Return a transformer: numbers imputed and standardized, categories one-hot encoded."""
    numbers = make_pipeline(
        SimpleImputer(strategy="median", add_indicator=True, keep_empty_features=True),
        StandardScaler(),
    )
    # Categories with fewer than five rows form one category; missing values form another.
    categories = OneHotEncoder(min_frequency=5, handle_unknown="infrequent_if_exist")
    return by_kind(numbers, categories, sparse_threshold=0)


def codes() -> Any:
    """Return a transformer: numbers passed through, up to 250 categories as ordinal codes."""
    encoder = OrdinalEncoder(
        handle_unknown="use_encoded_value", unknown_value=np.nan, max_categories=250
    )
    return by_kind("passthrough", encoder)


def by_kind(numbers: Any, categories: Any, **options: Any) -> Any:
    return make_column_transformer(
        (numbers, make_column_selector(dtype_include="number")),
        (categories, make_column_selector(dtype_include="category")),
        **options,
    )


def scikit(make: Callable[[Task], Any]) -> Method:
    def method(task: Task) -> np.ndarray:
        return np.asarray(make(task).fit(task.x, task.y).predict_proba(task.new))

    return method


def folds(task: Task) -> StratifiedKFold:
    return StratifiedKFold(5, shuffle=True, random_state=task.seed)


def logistic(task: Task) -> Any:
    return make_pipeline(dense(), LogisticRegression(max_iter=1000))


def tuned_logistic(task: Task) -> Any:
    grid = {"logisticregression__C": np.logspace(-3, 3, 7)}
    return GridSearchCV(logistic(task), grid, cv=folds(task), scoring="neg_log_loss")


def tuned_mlp(hidden: int) -> Callable[[Task], Any]:
    def make(task: Task) -> Any:
        network = MLPClassifier((hidden,), max_iter=500, random_state=task.seed)
        grid = {
            "mlpclassifier__alpha": (1e-4, 1e-2, 1.0),
            "mlpclassifier__learning_rate_init": (1e-3, 1e-2),
        }
        return GridSearchCV(make_pipeline(dense(), network), grid, cv=folds(task))

    return make


def forest(task: Task) -> Any:
    return make_pipeline(codes(), RandomForestClassifier(300, random_state=task.seed))


def boosting(task: Task) -> Any:
    numbers = len(task.x.select_dtypes("number").columns)
    categorical = list(range(numbers, task.x.shape[1]))
    model = HistGradientBoostingClassifier(categorical_features=categorical, random_state=task.seed)
    return make_pipeline(codes(), model)


def tuned_boosting(task: Task) -> Any:
    space = {
        "learning_rate": stats.loguniform(0.01, 0.3),
        "max_iter": stats.randint(50, 301),
        "max_leaf_nodes": (4, 8, 16, 31),
        "min_samples_leaf": (5, 10, 20, 40),
        "l2_regularization": stats.loguniform(1e-3, 10),
        "max_features": (0.5, 1.0),
    }
    return RandomizedSearchCV(
        boosting(task),
        {f"histgradientboostingclassifier__{name}": values for name, values in space.items()},
        n_iter=12,
        cv=folds(task),
        scoring="neg_log_loss",
        random_state=task.seed,
    )


def pytabkit(name: str) -> Method:
    """Return a pytabkit method with its defaults, bagged over five folds."""

    def method(task: Task) -> np.ndarray:
        import pytabkit

        x, new = filled(task.x, task.x), filled(task.new, task.x)
        model = getattr(pytabkit, name)(
            n_cv=5, device="cpu", n_threads=cores(), random_state=task.seed
        )
        return np.asarray(model.fit(x, task.y).predict_proba(new))

    return method


def filled(frame: pd.DataFrame, train: pd.DataFrame) -> pd.DataFrame:
    """Impute missing numbers and add indicators; pytabkit handles only missing categories."""
    frame = frame.copy()
    for column in train.select_dtypes("number"):
        if train[column].isna().any():
            frame[f"{column} missing"] = frame[column].isna().astype("float64")
        median = train[column].median()
        frame[column] = frame[column].fillna(0.0 if np.isnan(median) else median)
    return frame


# Name → (package, method).
PEERS: dict[str, tuple[str, Method]] = {
    "majority": ("scikit-learn", scikit(lambda task: DummyClassifier())),
    "logistic": ("scikit-learn", scikit(logistic)),
    "logistic, tuned": ("scikit-learn", scikit(tuned_logistic)),
    "forest": ("scikit-learn", scikit(forest)),
    "boosting": ("scikit-learn", scikit(boosting)),
    "boosting, tuned": ("scikit-learn", scikit(tuned_boosting)),
    "MLP of 32, tuned": ("scikit-learn", scikit(tuned_mlp(32))),
    "MLP of 100, tuned": ("scikit-learn", scikit(tuned_mlp(100))),
    "RealMLP-TD": ("pytabkit", pytabkit("RealMLP_TD_Classifier")),
    "TabM": ("pytabkit", pytabkit("TabM_D_Classifier")),
}
