"""Assessment of a model: all facts about it that the page shows, as plain values for JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pseudograd.fleet.ramp import Ramp, plain_k
from pseudograd.search.baselines import Predict, baselines, permutation_importance
from pseudograd.search.examples import shown_suspects
from pseudograd.search.measures import (
    Floats,
    are_unequal,
    balanced_error,
    compare_on_rows,
    confusion,
    effective_count,
    expected_calibration_error,
    log_loss,
    log_loss_difference,
    reliability,
    wilson,
)

if TYPE_CHECKING:
    from pandas import DataFrame

    from pseudograd.data import Dataset, Encoder

_MATRIX = 20  # classes up to which a confusion matrix is readable
_PAIRS = 12  # most confused pairs
_FEWEST = 20  # examples per point of the reliability diagram


class EnsembleOf(NamedTuple):
    """The k of an ensemble's networks, and their mean test probabilities."""

    ks: Sequence[float | Ramp]
    probabilities: Floats


def assess(
    *,
    data: Dataset,
    encoder: Encoder,
    test: Mapping[str, Floats],
    suspects: DataFrame | None = None,
    predict: Predict | None = None,
    members: Mapping[str, Any] | None = None,
    ensembles: Mapping[str, EnsembleOf] | None = None,
) -> dict[str, Any]:
    """Return the assessment of a model on the test set, and the training labels that look wrong.

    Args:
        data: The data set.
        encoder: Its encoder, for the names of classes and columns.
        test: Test probabilities of the "model" and, if available, of the "uncalibrated" model and
            of the model of k = 1, "plain".
        suspects: The training rows whose label looks wrong, from
            `pseudograd.search.examples.suspects`.
        predict: Returns the model's probabilities for rows of features; without it, permutation
            importance is not computed.
        members: The composition of the model: the number of "networks", "ks" (a list of [k, number
            of networks]), "temperature".
        ensembles: Ensembles to compare the model with, if that is one network; see
            `assess_ensembles`.

    Returns:
        JSON-able values: classes, model, uncalibrated, plain, baselines, unequal, by_class,
        confusion, confused, reliability, comparison, importance, suspects, members and combined;
        None if unknown. With groups of test rows, intervals and tests are computed over groups, and
        "groups" is their number.

    """
    labels = data.labels[data.train_size :].numpy()
    wrong = test["model"].argmax(1) != labels
    groups = None if data.groups is None else data.groups[data.train_size :].numpy()
    if groups is not None and (groups < 0).any():  # unknown in a test file
        groups = None
    return assess_probabilities(labels, encoder.labels, test, groups) | {
        "groups": None if groups is None else len(np.unique(groups)),
        "baselines": _baselines(data, encoder, wrong, groups),
        "importance": None if predict is None else permutation_importance(predict, data, encoder),
        "suspects": None if suspects is None else shown_suspects(suspects, data, encoder),
        "members": members,
        "combined": ensembles and assess_ensembles(ensembles, labels, wrong, groups),
    }


def assess_ensembles(
    ensembles: Mapping[str, EnsembleOf],
    labels: NDArray[np.int64],
    wrong_one: NDArray[np.bool_],
    groups: NDArray[np.int64] | None = None,
) -> list[dict[str, Any]]:
    """Return the assessment of each ensemble, compared with one network and with that of k = 1.

    Args:
        ensembles: The ensembles by name: "plain" (of k = 1) and perhaps "chosen" and "mixed".
        labels: The class indices of the test examples.
        wrong_one: Whether the selected network predicts each label wrongly.
        groups: The group of each label, if there are groups.

    """
    wrong = {name: one.probabilities.argmax(1) != labels for name, one in ensembles.items()}
    return [
        {
            "name": name,
            "ks": [plain_k(k) for k in one.ks],
            "log_loss": log_loss(one.probabilities, labels),
            **share_of(wrong[name], groups),
            "against_one": compare_on_rows(wrong[name], wrong_one, groups),
            "against_plain": compare_on_rows(wrong[name], wrong["plain"], groups),
        }
        for name, one in ensembles.items()
    ]


def assess_probabilities(
    labels: NDArray[np.int64],
    classes: Sequence[Any],
    test: Mapping[str, Floats],
    groups: NDArray[np.int64] | None = None,
) -> dict[str, Any]:
    """Return an assessment of test probabilities alone, in the form of `assess`.

    Args:
        labels: The class indices of the test examples.
        classes: The names of the classes.
        test: As for `assess`.
        groups: The group of each label, if there are groups, such as the labels of one example.

    """
    wrong = {name: found.argmax(1) != labels for name, found in test.items()}
    found = {name: quality(one, labels, groups) for name, one in test.items()}
    counts = np.bincount(labels, minlength=len(classes))
    matrix = confusion(test["model"].argmax(1), labels, len(classes))
    return {
        "classes": list(classes),
        "model": found["model"],
        "uncalibrated": found.get("uncalibrated"),
        "plain": found.get("plain"),
        "baselines": [],
        "unequal": are_unequal(counts),
        "by_class": [
            share_of(wrong["model"], groups, labels == at) | {"label": name}
            for at, name in enumerate(classes)
        ],
        "confusion": matrix.tolist() if len(matrix) <= _MATRIX else None,
        "confused": _confused(matrix),
        "reliability": {
            name: reliability(test[name], labels, fewest=_FEWEST)
            for name in ("model", "uncalibrated")
            if name in test
        },
        "comparison": _comparison(wrong, test, labels, groups) if "plain" in test else None,
        "importance": None,
        "suspects": None,
        "members": None,
    }


def share(wrong: int, count: int) -> dict[str, Any]:
    """Return an error rate with its 95% interval."""
    low, high = wilson(wrong, count)
    error = wrong / count if count else None
    return {"wrong": wrong, "count": count, "error": error, "low": low, "high": high}


def share_of(
    wrong: NDArray[np.bool_],
    groups: NDArray[np.int64] | None = None,
    which: NDArray[np.bool_] | None = None,
) -> dict[str, Any]:
    """Return the error on some labels with its 95% interval.

    Args:
        wrong: Whether each label is predicted wrongly.
        groups: The group of each label, if there are groups.
        which: The labels to include; None for all.

    """
    rows = slice(None) if which is None else which
    wrong = wrong[rows]
    found = share(int(wrong.sum()), len(wrong))
    if groups is None or not len(wrong):
        return found
    size = effective_count(wrong, groups[rows])
    low, high = wilson(found["error"] * size, size)
    return {**found, "low": low, "high": high}


def quality(
    probabilities: Floats, labels: NDArray[np.int64], groups: NDArray[np.int64] | None = None
) -> dict[str, Any]:
    """Return the error with its interval, the balanced error, log loss and calibration error."""
    predicted = probabilities.argmax(1)
    return share_of(predicted != labels, groups) | {
        "balanced_error": balanced_error(predicted, labels),
        "log_loss": log_loss(probabilities, labels),
        "ece": expected_calibration_error(probabilities, labels),
    }


def _baselines(
    data: Dataset, encoder: Encoder, wrong: NDArray[np.bool_], groups: NDArray[np.int64] | None
) -> list[dict[str, Any]]:
    """Return the quality of each baseline, and the comparison of the model with it."""
    labels = data.labels[data.train_size :].numpy()
    found = [
        {
            "name": name,
            "trained_on": rows,
            **quality(probabilities, labels, groups),
            "against": compare_on_rows(wrong, probabilities.argmax(1) != labels, groups),
        }
        for name, (probabilities, rows) in baselines(data).items()
    ]
    most_common = int(data.labels[: data.train_size].bincount().argmax())
    found[0]["label"] = encoder.labels[most_common]
    return found


def _confused(matrix: NDArray[np.int64]) -> list[dict[str, int]]:
    """Return the most frequent mistakes: label and predicted, as class indices, and count."""
    mistakes = matrix.copy()
    np.fill_diagonal(mistakes, 0)
    order = np.argsort(-mistakes, axis=None, kind="stable")[:_PAIRS]
    pairs = [divmod(int(at), len(matrix)) for at in order]
    return [
        {"label": label, "predicted": predicted, "count": int(mistakes[label, predicted])}
        for label, predicted in pairs
        if mistakes[label, predicted]
    ]


def _comparison(
    wrong: Mapping[str, NDArray[np.bool_]],
    test: Mapping[str, Floats],
    labels: NDArray[np.int64],
    groups: NDArray[np.int64] | None,
) -> dict[str, Any]:
    """Return the comparison with the model of k = 1; "kind" as in `report.verdict`.

    It is "proof" if the interval excludes 0 and McNemar's test has p < 0.05, "hint" if one of the
    two holds, "noise" if neither does, and "same" if the probabilities are equal.
    """
    judged = compare_on_rows(wrong["model"], wrong["plain"], groups)
    told = (judged["low"] > 0 or judged["high"] < 0) + (judged["verdict"] != "level")
    same = np.array_equal(test["model"], test["plain"])
    loss = log_loss_difference(test["model"], test["plain"], labels, groups)
    return {
        **judged,
        "kind": "same" if same else ("noise", "hint", "proof")[told],
        # A single test example has no interval, and JSON has no NaN.
        "log_loss": {end: None if math.isnan(at) else at for end, at in vars(loss).items()},
    }
