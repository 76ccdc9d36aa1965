"""The assessment of a model: measures, baselines, importance of columns."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from threadpoolctl import threadpool_info, threadpool_limits

from pseudograd.data import Dataset, Encoder, open_data
from pseudograd.data.features import Categories, Numbers
from pseudograd.search import baselines as baselines_module
from pseudograd.search.assessment import assess, share_of
from pseudograd.search.baselines import baselines, permutation_importance
from pseudograd.search.examples import suspects
from pseudograd.search.measures import (
    balanced_error,
    compare_on_rows,
    confusion,
    effective_count,
    expected_calibration_error,
    fit_temperature,
    log_loss,
    log_loss_difference,
    reliability,
    wilson,
)

RANDOM = np.random.default_rng(0)


# --- measures --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "count", "ends"),
    [
        (10, 100, (0.0552, 0.1744)),  # Wilson's interval as statsmodels has it
        (0, 100, (0.0, 0.0370)),
        (100, 100, (0.9630, 1.0)),
        (0, 0, (0.0, 1.0)),
    ],
)
def test_wilsons_interval(wrong: int, count: int, ends: tuple[float, float]) -> None:
    assert wilson(wrong, count) == pytest.approx(ends, abs=1e-4)


def test_measures_agree_with_scikit_learn() -> None:
    from sklearn import metrics

    probabilities = RANDOM.dirichlet([1, 1, 1], 200)
    labels = RANDOM.integers(0, 3, 200)
    predicted = probabilities.argmax(1)
    assert log_loss(probabilities, labels) == pytest.approx(metrics.log_loss(labels, probabilities))
    assert 1 - balanced_error(predicted, labels) == pytest.approx(
        metrics.balanced_accuracy_score(labels, predicted)
    )
    np.testing.assert_array_equal(
        confusion(predicted, labels, 3), metrics.confusion_matrix(labels, predicted)
    )


def test_a_class_without_predictions_has_a_column_in_the_matrix() -> None:
    assert confusion(np.array([0, 0]), np.array([0, 1]), 3).tolist() == [
        [1, 0, 0],
        [1, 0, 0],
        [0] * 3,
    ]


def test_the_log_loss_of_certainty_that_is_wrong_is_finite() -> None:
    assert log_loss(np.array([[1.0, 0.0]], np.float32), np.array([1])) == pytest.approx(
        34.5, abs=0.1
    )


def test_confidence_of_1_falls_into_the_last_bin() -> None:
    sure = np.array([[1.0, 0.0], [0.99, 0.01]])
    (found,) = reliability(sure, np.array([0, 1]), bins=10)
    assert found == {"confidence": pytest.approx(0.995), "accuracy": 0.5, "count": 2}


def test_calibration_error_is_the_mean_gap_weighted_by_examples() -> None:
    probabilities = np.array([[0.95, 0.05]] * 4 + [[0.65, 0.35]])
    labels = np.array([0, 0, 0, 1, 1])  # 3 of 4 right at 0.95; 0 of 1 at 0.65
    assert expected_calibration_error(probabilities, labels) == pytest.approx(
        (4 * 0.20 + 1 * 0.65) / 5
    )


@pytest.mark.parametrize("temperature", [0.4, 1.0, 3.0])
def test_the_temperature_that_made_predictions_too_sure_is_found(temperature: float) -> None:
    true = RANDOM.dirichlet([0.7] * 4, 20_000)
    labels = (true.cumsum(1) > RANDOM.random((20_000, 1))).argmax(1)
    found = fit_temperature(temperature * np.log(true), labels)  # flattened or sharpened
    assert found == pytest.approx(temperature, rel=0.06)


@pytest.mark.parametrize("wrong", [0, 20])
def test_few_predictions_move_the_temperature_little(wrong: int) -> None:
    """Both if all are right, which calls for certainty, and if most are wrong."""
    labels = (np.arange(30) < wrong).astype(int)
    logits = np.array([[4.0, 0.0]] * 30)
    few, many = (
        fit_temperature(logits, labels),
        fit_temperature(np.tile(logits, (50, 1)), np.tile(labels, 50)),
    )
    assert 0.5 < few < 1 if not wrong else 1 < few < 7
    assert many < few if not wrong else many > 15


@pytest.mark.parametrize("labels", [[0, 0, 1], [1, 1, 0]])
def test_a_temperature_is_found_for_any_probabilities(labels: list[int]) -> None:
    with np.errstate(divide="ignore"):
        extreme = np.log(np.array([[1, 0], [1, 1e-30], [0, 1]], np.float32))
    assert 0.05 <= fit_temperature(extreme, np.array(labels)) <= 20.01


def test_intervals_hold_if_an_example_has_several_labels() -> None:
    """Errors vary from example to example, so labels are worth less than their number."""
    random = np.random.default_rng(0)
    examples, hits = np.arange(40).repeat(25), {True: 0, False: 0}
    for _ in range(400):
        wrong = random.random(1000) < random.beta(1, 4, 40)[examples]
        for grouped in hits:
            found = share_of(wrong, examples if grouped else None)
            hits[grouped] += found["low"] <= 0.2 <= found["high"]
    assert hits[True] >= 0.92 * 400
    assert hits[False] < 0.7 * 400
    wrong = random.random(1000) < 0.2
    assert effective_count(wrong, examples) > 500  # where labels are independent, little is lost
    which = examples < 10
    assert share_of(wrong, examples, which) == share_of(wrong[which], examples[which])
    assert share_of(wrong, examples, examples < 0)["error"] is None


def test_examples_of_several_labels_are_the_unit_of_a_comparison() -> None:
    rows = np.arange(200)
    alone = compare_on_rows(rows < 20, rows < 5)
    assert compare_on_rows(rows < 20, rows < 5, rows)["p"] == alone["p"]
    grouped = compare_on_rows(rows < 20, rows < 5, rows // 5)  # three examples are no proof
    assert (grouped["verdict"], grouped["p"], alone["verdict"]) == ("level", 0.25, "worse")
    assert grouped["difference"] == alone["difference"]
    assert grouped["low"] < 0 < alone["low"]
    one = compare_on_rows(rows < 20, rows < 5, 0 * rows)
    assert (one["low"], one["high"], one["verdict"]) == (-1, 1, "level")
    # Most examples are better with the first, but the second has fewer mistakes in all.
    first, second = rows < 40, (rows >= 40) & (rows < 48)
    opposed = compare_on_rows(first, second, np.where(rows < 40, 0, rows))
    assert opposed["p"] < 0.05
    assert opposed["verdict"] == "level"
    random = np.random.default_rng(0)
    hits = 0
    for _ in range(300):
        chances = random.beta(1, 4, (2, 40)).repeat(25, axis=1)
        one, other = random.random((2, 1000)) < chances
        found = compare_on_rows(one, other, np.arange(40).repeat(25))
        hits += found["low"] <= 0 <= found["high"]
    assert hits >= 0.92 * 300


def test_two_classifiers_are_compared_on_the_rows_where_they_differ() -> None:
    rows = np.arange(200)
    found = compare_on_rows(rows < 20, (rows >= 10) & (rows < 25))
    assert (found["only_first_right"], found["only_second_right"]) == (5, 10)
    assert found["difference"] == pytest.approx(0.025)
    assert found["p"] == pytest.approx(0.3018, abs=1e-4)  # binomtest(5, 15)
    assert found["verdict"] == "level"
    # Agresti and Min: (10 - 5) / 202 ± 1.96 sqrt(16 - 25 / 202) / 202
    assert (found["low"], found["high"]) == pytest.approx((-0.0139, 0.0634), abs=1e-4)
    assert compare_on_rows(rows < 20, rows < 5)["verdict"] == "worse"
    assert compare_on_rows(rows < 5, rows < 20)["verdict"] == "better"
    equal = compare_on_rows(rows < 5, rows < 5)
    assert (equal["p"], equal["verdict"]) == (1.0, "level")
    assert equal["low"] < 0 < equal["high"]


def test_the_interval_of_a_difference_in_log_loss() -> None:
    labels = np.array([0, 0])
    found = log_loss_difference(np.array([[0.5, 0.5], [0.25, 0.75]]), np.full((2, 2), 0.5), labels)
    half = np.log(2) / 2
    assert (found.mean, found.high) == pytest.approx((half, half + 1.96 * half), rel=1e-4)


# --- baselines and columns -------------------------------------------------------------------


def blobs(rows: int = 300, seed: int = 0) -> tuple[Dataset, Encoder]:
    """Return two classes that only the number "signal" separates; "noise" and "hue" are random."""
    random = np.random.default_rng(seed)
    labels = random.random(rows) < 0.3
    signal = np.clip(labels * 1.0 - 0.5 + random.normal(0, 0.2, rows), -1, 1)
    hue = np.eye(3)[random.integers(0, 3, rows)]
    features = np.column_stack([random.uniform(-1, 1, rows), hue, signal]).astype(np.float32)
    columns = (
        Numbers("noise", 0.0, 1.0, 0.5, 2.0, missing=False),
        Categories("hue", ("blue", "green", "red"), missing=False),
        Numbers("signal", 0.0, 10.0, 5.0, 0.2, missing=False),
    )
    encoder = Encoder("ill", ("no", "yes"), columns)
    tensors = torch.from_numpy(features), torch.from_numpy(labels.astype(np.int64))
    return Dataset("blobs", *tensors, rows * 2 // 3, (-1.0, 1.0)), encoder


def by_signal(features: NDArray[Any]) -> NDArray[np.float64]:
    yes = 1 / (1 + np.exp(-8.0 * features[:, 4].astype(np.float64)))
    return np.column_stack([1 - yes, yes])


def test_baselines_are_trained_on_the_training_part_alone() -> None:
    data, _ = blobs()
    found = baselines(data)
    assert list(found) == ["majority", "logistic regression", "gradient boosting"]
    labels = data.labels[data.train_size :].numpy()
    share = float((data.labels[: data.train_size] == 1).double().mean())
    np.testing.assert_allclose(found["majority"][0], [[1 - share, share]] * len(labels))
    for name in ("logistic regression", "gradient boosting"):
        probabilities, rows = found[name]
        assert rows == data.train_size
        np.testing.assert_allclose(probabilities.sum(1), 1)
        assert (probabilities.argmax(1) != labels).mean() < 0.1


def test_large_data_are_thinned_and_wide_data_not_boosted(monkeypatch: pytest.MonkeyPatch) -> None:
    data, _ = blobs()
    monkeypatch.setattr(baselines_module, "_MOST_ROWS", 50)
    monkeypatch.setattr(baselines_module, "_BOOSTING_WIDTH", 4)
    found = baselines(data)
    assert {name: rows for name, (_, rows) in found.items()} == {
        "majority": 200,
        "logistic regression": 50,
    }


def test_small_data_take_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine, boosting 400 rows with two threads took 56 s, with one 2 s."""
    threads: list[int] = []

    class Counting(LogisticRegression):  # type: ignore[misc]  # untyped
        def fit(self, *given: Any) -> Any:
            threads.extend(pool["num_threads"] for pool in threadpool_info())
            return super().fit(*given)

    monkeypatch.setattr(baselines_module, "_classifier", lambda *_: Counting())
    with threadpool_limits(2):
        baselines(blobs()[0])
        assert set(threads) == {1}
        monkeypatch.setattr(baselines_module, "_THREADED_WORK", 0)
        baselines(blobs()[0])
        assert 2 in threads


def test_a_class_that_the_training_part_lacks_has_no_probability() -> None:
    data, _ = blobs()
    labels = data.labels.clone()
    labels[-1] = 2
    found = baselines(Dataset("blobs", data.features, labels, data.train_size, (-1.0, 1.0)))
    assert all((probabilities[:, 2] == 0).all() for probabilities, _ in found.values())


def test_the_informative_column_is_the_most_important() -> None:
    data, encoder = blobs(600)
    found = permutation_importance(by_signal, data, encoder)
    assert found is not None
    signal, *others = found["columns"]
    assert signal["column"] == "signal"
    assert signal["increase"] > 0.2
    assert 0 < signal["spread"] < 0.1
    assert signal["log_loss_increase"] > 0.3
    assert {one["column"] for one in others} == {"noise", "hue"}
    assert all(one["increase"] == one["log_loss_increase"] == 0 for one in others)


def test_a_columns_features_are_shuffled_together() -> None:
    data, encoder = blobs(90)

    def check(features: NDArray[Any]) -> NDArray[np.float64]:
        assert (features[:, 1:4].sum(1) == 1).all()  # still one hue in each row
        return by_signal(features)

    assert permutation_importance(check, data, encoder) is not None


def test_pixels_have_no_columns() -> None:
    data, encoder = open_data("digits")
    assert permutation_importance(by_signal, data, encoder) is None


# --- the whole -------------------------------------------------------------------------------


def test_an_assessment_of_a_good_model() -> None:
    data, encoder = blobs(600)
    probabilities = by_signal(data.features.numpy())
    train, test = probabilities[: data.train_size], probabilities[data.train_size :]
    flat = np.tile([0.9, 0.1], (data.test_size, 1))
    sharp, votes = test**5, train.argmax(1)[:, None]
    found = assess(
        data=data,
        encoder=encoder,
        test={"model": test, "uncalibrated": sharp / sharp.sum(1, keepdims=True), "plain": flat},
        suspects=suspects(data.labels[: data.train_size].numpy(), train, train, votes),
        predict=by_signal,
        members={"networks": 8},
    )
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    labels = data.labels[data.train_size :].numpy()
    wrong = int((test.argmax(1) != labels).sum())
    model = found["model"]
    assert (model["wrong"], model["count"]) == (wrong, 200)
    assert model["low"] < model["error"] < model["high"]
    assert found["unequal"]
    assert found["uncalibrated"]["error"] == model["error"]
    assert found["uncalibrated"]["log_loss"] != model["log_loss"]
    majority, *others = found["baselines"]
    assert majority["against"]["verdict"] == "better"
    assert majority["error"] == found["plain"]["error"]
    assert {one["against"]["verdict"] for one in others} == {"level"}
    no, yes = found["by_class"]
    assert (no["label"], no["count"] + yes["count"], no["wrong"] + yes["wrong"]) == (
        "no",
        200,
        wrong,
    )
    assert found["confusion"][0][1] == no["wrong"]
    assert {(one["label"], one["count"]) for one in found["confused"]} <= {
        (0, no["wrong"]),
        (1, yes["wrong"]),
    }
    assert found["comparison"]["kind"] == "proof"
    assert found["comparison"]["log_loss"]["high"] < 0
    assert found["importance"]["columns"][0]["column"] == "signal"
    given = data.labels[: data.train_size].numpy()
    assert found["suspects"]["count"] == (train.argmax(1) != given).sum()
    assert found["members"] == {"networks": 8}


def test_rows_of_a_group_do_not_count_as_independent() -> None:
    data, encoder = blobs(600)
    copies = torch.arange(600) // 10
    test = by_signal(data.features.numpy())[data.train_size :]
    test = test[np.arange(200) // 10 * 10]  # identical within a group
    flat = np.tile([0.9, 0.1], (200, 1))
    alone, grouped = (
        assess(data=each, encoder=encoder, test={"model": test, "plain": flat})
        for each in (data, replace(data, groups=copies))
    )
    assert (alone["groups"], grouped["groups"]) == (None, 20)
    for name in ("model", "plain"):
        assert grouped[name]["error"] == alone[name]["error"]
        assert grouped[name]["low"] <= alone[name]["low"]
        assert grouped[name]["high"] >= alone[name]["high"]
    one, other = grouped["baselines"][1]["against"], alone["baselines"][1]["against"]
    assert one["difference"] == other["difference"]
    assert one["p"] > other["p"]
    one, other = grouped["comparison"]["log_loss"], alone["comparison"]["log_loss"]
    assert one["mean"] == pytest.approx(other["mean"])
    assert one["high"] - one["low"] > other["high"] - other["low"]
    # The groups of a test file's rows are unknown.
    unknown = torch.where(torch.arange(600) < data.train_size, copies, -1)
    found = assess(data=replace(data, groups=unknown), encoder=encoder, test={"model": test})
    assert (found["groups"], found["model"]) == (None, alone["model"])


def test_of_many_classes_the_most_confused_pairs_are_kept() -> None:
    random = np.random.default_rng(0)
    labels = np.concatenate([np.arange(30), np.repeat(np.arange(30), 4)])
    features = torch.from_numpy(random.normal(size=(150, 2)).astype(np.float32))
    data = Dataset("many", features, torch.from_numpy(labels), 30, (-1.0, 1.0))
    columns = tuple(Numbers(name, 0.0, 1.0, 0.5, 2.0, missing=False) for name in "ab")
    encoder = Encoder("y", tuple(range(30)), columns)
    predicted = labels[30:].copy()
    predicted[:3], predicted[-1] = 7, 2  # three 0s taken for 7, a 29 for 2
    found = assess(data=data, encoder=encoder, test={"model": np.eye(30)[predicted]})
    assert found["confusion"] is None
    assert found["confused"] == [
        {"label": 0, "predicted": 7, "count": 3},
        {"label": 29, "predicted": 2, "count": 1},
    ]
    for unknown in ("plain", "uncalibrated", "comparison", "importance", "suspects"):
        assert found[unknown] is None
    assert not found["unequal"]


def test_equal_models_are_the_same() -> None:
    data, encoder = blobs(60)
    test = by_signal(data.features[data.train_size :].numpy())
    found = assess(data=data, encoder=encoder, test={"model": test, "plain": test.copy()})
    assert found["comparison"]["kind"] == "same"
