"""The classifier: scikit-learn's own checks, and what they do not cover."""

from __future__ import annotations

import itertools
import math
import pickle
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from numpy.typing import NDArray
from sklearn.base import clone
from sklearn.datasets import load_digits, load_iris
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_score, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from pseudograd.estimator import TunableMLPClassifier, _dataset
from pseudograd.fleet import Fleet, Outcome, Split, Stop, Trial, never, parts
from pseudograd.search import table_recipe
from trials import recipe_of

pytestmark = pytest.mark.usefixtures("one_thread")

X, Y = load_iris(return_X_y=True)


def trained(**parameters: Any) -> TunableMLPClassifier:
    """Return a classifier with a given k and learning rate: it only trains five networks."""
    given = {"k": 0.5, "learning_rate": 0.1, "random_state": 0, "max_iter": 12, **parameters}
    return TunableMLPClassifier((8,), **given)


def tuned(**parameters: Any) -> TunableMLPClassifier:
    """Return a classifier with a quick search."""
    given = {"ks": (0.5, 1), "random_state": 0, "max_iter": 4, **parameters}
    return TunableMLPClassifier((8,), **given)


@parametrize_with_checks([trained(random_state=None), tuned(random_state=None, learning_rate=0.1)])
def test_scikit_learns_checks(estimator: TunableMLPClassifier, check: Callable[..., None]) -> None:
    check(estimator)


# --- with the rest of scikit-learn -----------------------------------------------------------


def test_in_a_pipeline_with_texts_as_labels() -> None:
    names = load_iris().target_names[Y]
    model = make_pipeline(StandardScaler(), trained()).fit(X, names)
    assert set(model.predict(X)) == set(model.classes_) == set(names)
    assert model.score(X, names) > 0.9
    likeliest = model.predict_proba(X).argmax(1)
    assert (model.classes_[likeliest] == model.predict(X)).all()


def test_cross_validation_is_the_same_in_other_processes() -> None:
    alone = cross_val_score(trained(), X, Y, cv=3)
    assert alone.mean() > 0.9
    assert (cross_val_score(trained(), X, Y, cv=3, n_jobs=2) == alone).all()


def test_a_clone_and_a_pickle_do_the_same() -> None:
    model = tuned().fit(X, Y)
    again = clone(model)
    assert again.get_params() == model.get_params()
    assert not hasattr(again, "k_")
    expected = model.predict_proba(X)
    assert (again.fit(X, Y).predict_proba(X) == expected).all()
    assert (pickle.loads(pickle.dumps(model)).predict_proba(X) == expected).all()


@pytest.mark.parametrize("metric", ["error", "log-loss"])
def test_a_single_network_in_place_of_the_ensemble(metric: str) -> None:
    several = tuned(metric=metric).fit(X, Y)
    model = tuned(metric=metric, ensemble=False).fit(X, Y)
    assert len(model.ensemble_.networks) == 1
    assert model.ensemble_.weights == (1.0,)
    assert len(several.ensemble_.networks) >= 5
    assert model.members_ == [(model.k_, model.learning_rate_, 1.0)]
    assert model.cv_results_["params"][model.best_index_] == {
        "k": model.k_, "learning_rate": model.learning_rate_
    }  # fmt: skip
    assert model.score(X, Y) > 0.8
    assert np.allclose(model.predict_proba(X).sum(1), 1)
    # It is one of the networks of an ensemble of only that pair.
    pair = tuned(k=model.k_, learning_rate=model.learning_rate_, metric=metric).fit(X, Y)
    first = pair.ensemble_.networks[0].parameters[0][0]
    assert torch.equal(model.ensemble_.networks[0].parameters[0][0], first)
    assert model.ensemble_.temperature == pytest.approx(pair.ensemble_.temperature)


def test_in_a_grid_search_over_k() -> None:
    search = GridSearchCV(trained(), {"k": [0.25, 1, 4]}, cv=3).fit(X, Y)
    assert search.best_params_["k"] == search.best_estimator_.k_
    assert len(set(search.cv_results_["mean_test_score"])) > 1


def test_features_have_names() -> None:
    table = pd.DataFrame(X, columns=["a", "b", "c", "d"])
    model = trained().fit(table, Y)
    assert model.feature_names_in_.tolist() == ["a", "b", "c", "d"]
    assert model.score(table, Y) > 0.9
    with pytest.raises(ValueError, match="feature names"):
        model.predict(table[["b", "a", "c", "d"]])


def pets(rows: int = 120) -> tuple[pd.DataFrame, NDArray[Any]]:
    """Return weights with gaps, and colours: cats are light or grey, dogs heavy or black."""
    random = np.random.RandomState(0)
    dog = random.rand(rows) < 0.5
    weight = np.where(dog, 20, 4) + random.randn(rows)
    weight[random.rand(rows) < 0.2] = np.nan
    colour = np.where(dog, "black", "grey").astype(object)
    return pd.DataFrame({"weight": weight, "colour": colour}), np.where(dog, "dog", "cat")


def test_a_frame_may_have_texts_and_gaps() -> None:
    frame, labels = pets()
    model = trained().fit(frame, labels)
    assert model.score(frame, labels) > 0.95
    assert model.feature_names_in_.tolist() == ["weight", "colour"]
    new = pd.DataFrame({"weight": [np.nan, 4.0], "colour": ["black", "blue"]}, index=[7, 7])
    assert model.predict(new).tolist() == ["dog", "cat"]
    with pytest.raises(ValueError, match="feature names"):
        model.predict(new[["colour", "weight"]])
    again = pickle.loads(pickle.dumps(model))
    assert (again.predict_proba(frame) == model.predict_proba(frame)).all()


def test_doubtful_columns_of_a_frame_cause_warnings() -> None:
    frame, labels = pets()
    frame.loc[:2, "weight"] = -999
    frame["born"] = [f"{1 + at % 12}/{1 + at % 7}/2020" for at in range(len(frame))]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trained().fit(frame, labels)
    assert [str(warning.message) for warning in told] == [
        "column 'weight' has -999, far from all other numbers, which is treated as missing",
        "column 'born' holds dates that may be read in two ways: they are read as %m/%d/%Y",
    ]


def test_frames_that_cannot_be_used() -> None:
    frame, labels = pets()
    with pytest.raises(ValueError, match="column 'toys' of X must hold numbers, texts or dates"):
        trained().fit(frame.assign(toys=[["ball"]] * len(frame)), labels)
    with pytest.raises(ValueError, match="X must have at least one row, not 0"):
        trained().fit(frame[:0], labels[:0])


def test_a_frame_of_numbers_with_gaps() -> None:
    frame, labels = pets()
    only = frame[["weight"]]
    model = trained().fit(only, labels)
    known = only["weight"].notna()
    assert model.score(only[known], labels[known]) > 0.95
    assert model.predict_proba(only.fillna(5.0)).shape == (120, 2)  # new rows need not have gaps


def test_frames_of_polars() -> None:
    polars = pytest.importorskip("polars")
    frame, labels = pets()
    theirs = polars.DataFrame({"weight": frame["weight"].tolist(), "colour": [*frame["colour"]]})
    ours = trained().fit(frame, labels)
    assert (trained().fit(theirs, labels).predict_proba(theirs) == ours.predict_proba(frame)).all()


def test_scores_have_the_form_of_a_grid_searchs() -> None:
    theirs = GridSearchCV(trained(), {"k": [0.5, 1], "learning_rate": [0.1]}, cv=5).fit(X, Y)
    model = tuned().fit(X, Y)
    ours = model.cv_results_
    assert ours.keys() == {key for key in theirs.cv_results_ if not key.endswith("_time")}
    for key, column in ours.items():
        assert len(column) == len(ours["params"])
        assert type(column) is type(theirs.cv_results_[key])
        assert getattr(column, "dtype", None) == getattr(theirs.cv_results_[key], "dtype", None)
    folds = np.stack([ours[f"split{fold}_test_score"] for fold in range(5)])
    np.testing.assert_allclose(ours["mean_test_score"], folds.mean(0))
    np.testing.assert_allclose(ours["std_test_score"], folds.std(0))
    best = ours["mean_test_score"].max()
    assert ((ours["rank_test_score"] == 1) == (ours["mean_test_score"] == best)).all()
    assert ours["params"][model.best_index_] == {
        "k": model.k_,
        "learning_rate": model.learning_rate_,
    }
    for at, pair in enumerate(ours["params"]):
        assert pair["k"] == ours["param_k"][at]
        assert pair["learning_rate"] == ours["param_learning_rate"][at]


# --- the choice ------------------------------------------------------------------------------


def test_digits() -> None:
    pixels, labels = load_digits(return_X_y=True)
    seen, unseen, y_seen, y_unseen = train_test_split(pixels, labels, random_state=0)
    model = TunableMLPClassifier(
        (64,), learning_rate=0.01, ks=(0.25, 1), max_iter=12, random_state=0
    )
    model.fit(seen, y_seen)
    assert model.k_ in (0.25, 1)
    assert set(model.cv_results_["param_k"]) == {0.25, 1}
    assert model.score(unseen, y_unseen) > 0.95
    assert model.n_iter_ == 12
    assert len(model.ensemble_.networks) == 5 * len(model.members_)
    assert {k for k, _, _ in model.members_} <= {0.25, 1}
    assert sum(share for _, _, share in model.members_) == pytest.approx(1)
    assert all(len(str(share)) <= 4 for _, _, share in model.members_)  # multiples of 1/20


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> list[Trial]:
    """Return a list that collects the trials that are run."""
    asked: list[Trial] = []
    run = Fleet.run

    def watch(fleet: Fleet, wanted: Iterable[Trial], stop: Stop = never) -> Iterator[Outcome]:
        for outcome in run(fleet, wanted, stop):
            asked.append(outcome.trial)
            yield outcome

    monkeypatch.setattr(Fleet, "run", watch)
    return asked


def test_given_parameters_are_not_searched(trials: list[Trial]) -> None:
    model = tuned(learning_rate=0.2).fit(X, Y)
    assert {(trial.k, trial.learning_rate) for trial in trials} == {(0.5, 0.2), (1, 0.2)}
    assert len(trials) == 2 * 5
    model = tuned(k=4.0).fit(X, Y)
    assert set(model.cv_results_["param_k"]) == {4.0}
    assert len(set(model.cv_results_["param_learning_rate"])) >= 3
    assert model.k_ == 4.0


def test_fixed_k_and_rate_train_one_pair(trials: list[Trial]) -> None:
    model = tuned().fit(X, Y)
    trials.clear()
    model.set_params(k=0.5, learning_rate=0.1, repetitions=10).fit(X, Y)
    assert {(trial.k, trial.learning_rate) for trial in trials} == {(0.5, 0.1)}
    assert {trial.split.repetition for trial in trials if trial.split.bagged} == {*range(10)}
    assert (model.k_, model.learning_rate_, model.best_index_) == (0.5, 0.1, 0)
    assert model.members_ == [(0.5, 0.1, 1.0)]
    assert model.ensemble_.weights == (0.1,) * 10


def test_settings_follow_the_number_of_examples(trials: list[Trial]) -> None:
    TunableMLPClassifier(learning_rate=0.1, max_iter=1).fit(X, Y)
    expected = table_recipe("examples", 147, max_epochs=1)  # 3 flowers are duplicates
    assert {trial.recipe for trial in trials} == {expected}
    assert {trial.k for trial in trials} == {2.0, 1.0, 0.5}
    assert len(trials) == 3 * 5
    assert expected.hidden_layer_sizes == (32, 32)


def test_parameters_reach_the_trials(trials: list[Trial]) -> None:
    trained(activation="tanh", batch_size=7, clip=2.0, weight_decay=0.3, max_iter=3).fit(X, Y)
    (recipe,) = {recipe_of(trial) for trial in trials}
    assert recipe == table_recipe(
        "examples", 147, hidden_layer_sizes=(8,), activation="tanh", batch_size=7, clip=2.0,
        weight_decay=0.3, max_epochs=3,
    )  # fmt: skip


def test_the_metric_decides_about_the_ensemble() -> None:
    """Predicting a rare, hard class pays only under the balanced metric."""
    random = np.random.RandomState(0)
    rare = random.rand(300) < 0.15
    rows = (rare + 0.9 * random.randn(300))[:, None]
    found = {
        metric: tuned(ks=(1, 8), learning_rate=0.02, max_iter=8, metric=metric).fit(rows, rare)
        for metric in ("error", "balanced")
    }
    assert found["error"].members_ != found["balanced"].members_
    recalled = {metric: model.predict(rows)[rare].mean() for metric, model in found.items()}
    assert recalled["balanced"] >= recalled["error"]


def test_progress_is_shown_if_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    tuned(learning_rate=0.1).fit(X, Y)
    assert capsys.readouterr().err == ""
    tuned(learning_rate=0.1, verbose=True).fit(X, Y)
    assert "search: 10 of 10 trials" in capsys.readouterr().err


# --- examples --------------------------------------------------------------------------------


def shuffled(*arrays: NDArray[Any]) -> list[NDArray[Any]]:
    order = np.random.RandomState(1).permutation(len(arrays[0]))
    return [array[order] for array in arrays]


def assert_same(one: TunableMLPClassifier, other: TunableMLPClassifier) -> None:
    assert (one.k_, one.learning_rate_) == (other.k_, other.learning_rate_)
    assert (one.predict_proba(X) == other.predict_proba(X)).all()


@pytest.mark.parametrize("model", [trained(), tuned()], ids=["trained", "tuned"])
def test_a_weight_is_a_number_of_copies(model: TunableMLPClassifier) -> None:
    counts = np.random.RandomState(0).randint(4, size=len(Y))
    weighted = clone(model).fit(X, Y, sample_weight=counts)
    repeated = clone(model).fit(*shuffled(X.repeat(counts, 0), Y.repeat(counts)))
    assert_same(weighted, repeated)
    unweighted = clone(model).fit(X, Y)
    assert not (unweighted.predict_proba(X) == weighted.predict_proba(X)).all()


def test_the_weights_unit_does_not_matter() -> None:
    model = trained()
    weights = np.arange(len(Y)) % 3 + 1.0
    assert_same(clone(model).fit(X, Y, weights), clone(model).fit(X, Y, 4 * weights))
    assert_same(clone(model).fit(X, Y), clone(model).fit(X, Y, np.full(len(Y), 0.25)))


def test_weights_decide_between_labels() -> None:
    """Every flower has a right and a wrong label; the heavier one is learned."""
    wrong = (Y + 1) % 3
    rows, labels = np.concatenate([X, X]), np.concatenate([Y, wrong])
    for weight, expected in ((0.05, Y), (20, wrong)):
        weights = np.concatenate([np.ones(len(Y)), np.full(len(Y), weight)])
        model = trained(max_iter=30).fit(rows, labels, sample_weight=weights)
        assert model.score(X, expected) > 0.9


def test_neither_order_nor_threads_matter() -> None:
    model = tuned().fit(X, Y)
    torch.set_num_threads(3)
    assert_same(model, tuned().fit(*shuffled(X, Y)))
    assert torch.get_num_threads() == 3


def test_the_seed_matters() -> None:
    one, other = trained().fit(X, Y), trained(random_state=1).fit(X, Y)
    assert not (one.predict_proba(X) == other.predict_proba(X)).all()


@pytest.mark.parametrize("count", [2, 3, 4, 5, 9])
@pytest.mark.parametrize("model", [trained(), tuned()], ids=["trained", "tuned"])
def test_few_examples(count: int, model: TunableMLPClassifier) -> None:
    rows = np.linspace(0, 1, count)[:, None]
    model = clone(model).fit(rows, rows[:, 0] > 0.4)
    assert model.classes_.tolist() == [False, True]
    assert np.isfinite(model.predict_proba(rows)).all()


def test_a_class_may_have_one_member() -> None:
    labels = np.where(np.arange(len(Y)) == 7, 9, Y)
    assert trained().fit(X, labels).predict_proba(X).shape == (150, 4)


# Passengers of the Titanic: class (0 the crew), a woman, a child; how many died and survived.
TITANIC = """
    1 0 1 0 5  2 0 1 0 11  3 0 1 35 13  1 1 1 0 1  2 1 1 0 13  3 1 1 17 14  1 0 0 118 57
    2 0 0 154 14  3 0 0 387 75  0 0 0 670 192  1 1 0 4 140  2 1 0 13 80  3 1 0 89 76  0 1 0 3 20
"""


def test_rows_with_several_labels_are_learned_by_their_counts() -> None:
    kinds = np.array(TITANIC.split(), int).reshape(-1, 5)
    rows = np.column_stack([kinds[:, [0]] == [0, 1, 2, 3], kinds[:, 1:3]]).astype(float)
    died, survived = kinds[:, 3:].T
    best = np.maximum(died, survived).sum() / kinds[:, 3:].sum()
    for seed in range(4):
        model = trained(k=1, random_state=seed, max_iter=40).fit(
            np.concatenate([rows, rows]), np.arange(28) // 14, np.concatenate([died, survived])
        )
        right = np.where(model.predict(rows) == 1, survived, died).sum() / kinds[:, 3:].sum()
        assert right > best - 0.02


def parts_of(
    rows: NDArray[Any], labels: NDArray[Any], weights: NDArray[Any], begin: int = 0
) -> list[set[Any]]:
    """Return the distinct examples in each of the five parts, starting at a repetition."""
    data = _dataset(rows.astype(np.float32), labels, weights)
    assert data.weights is None or data.weights[: data.train_size].sum() == weights.sum()
    turns = [Split(plan=5, repetition=begin + turn, bagged=True) for turn in range(5)]
    cuts = [parts(data, turn, stratified=True) for turn in turns]
    pairs = torch.column_stack([data.features, data.labels])
    return [{tuple(pairs[at].tolist()) for at in cut.judge} for cut in cuts]


@pytest.mark.parametrize("begin", [0, 5], ids=["first cut", "second cut"])
def test_a_row_with_several_labels_is_in_every_part(begin: int) -> None:
    rows = np.array([7, 7, 7, *range(20, 42)])[:, None]
    labels = np.array([0, 1, 1, *[0, 1] * 11])
    found = parts_of(rows, labels, np.ones(25), begin)
    assert all({(7, 0), (7, 1)} <= part for part in found)
    for one, other in itertools.combinations(found, 2):
        assert one & other == {(7, 0), (7, 1)}


def test_a_dominant_example_is_in_every_part() -> None:
    rows, labels = np.arange(40)[:, None], np.arange(40) % 2
    weights = np.where(np.arange(40) == 3, 20.0, 1.0)
    found = parts_of(rows, labels, weights)
    assert set.intersection(*found) == {(3, 1)}
    # All examples of a rare class may be heavy: copies of one are never in two parts.
    rare = (np.arange(40) % 8 == 0).astype(int)
    apart = parts_of(rows, rare, np.where(rare == 1, 7.0, 1.0))
    assert sum(map(len, apart)) == len(set.union(*apart)) == 40


@pytest.mark.parametrize("model", [trained(), tuned()], ids=["trained", "tuned"])
def test_weights_are_copies_where_labels_differ(model: TunableMLPClassifier) -> None:
    rows, labels = X.round().clip(2, 4), Y
    counts = np.random.RandomState(0).randint(4, size=len(Y))
    weighted = clone(model).fit(rows, labels, sample_weight=4.0 * counts)
    repeated = clone(model).fit(*shuffled(rows.repeat(counts, 0), labels.repeat(counts)))
    assert_same(weighted, repeated)


# --- the network -----------------------------------------------------------------------------


def test_predictions_are_those_of_the_ensemble() -> None:
    """On features that are scaled by median and quartiles, then squashed."""
    rows = np.random.RandomState(0).permutation(101.0 * np.arange(101))[:, None] ** 2
    labels = rows[:, 0] > np.median(rows)
    model = trained().fit(rows, labels)
    first, median, third = np.sort(rows[:, 0])[[25, 50, 75]]
    scaled = (rows - median) / (third - first)
    features = torch.from_numpy(scaled / np.sqrt(1 + (scaled / 3) ** 2)).float()
    expected = model.ensemble_.probabilities(features).numpy()
    np.testing.assert_allclose(model.predict_proba(rows), expected, rtol=1e-5)
    np.testing.assert_allclose(model.predict_log_proba(rows), np.log(expected), rtol=1e-5)
    assert (model.predict(rows) == model.classes_[expected.argmax(1)]).all()


def test_units_do_not_matter() -> None:
    factor, offset = np.array([1e-9, 1, 1e9, -3]), np.array([0, 1e3, -5, 1e-3])
    model, other = trained().fit(X, Y), trained().fit(X * np.abs(factor) + offset, Y)
    difference = other.predict_proba(X * np.abs(factor) + offset) - model.predict_proba(X)
    assert np.abs(difference).max() < 0.01


def test_far_outliers_are_clipped_alike() -> None:
    model = trained().fit(X, Y)
    edge = model.predict_proba(np.full((1, 4), 1e30))
    assert np.isfinite(edge).all()
    assert (model.predict_proba([[1e12, 1e50, 1e200, 1e300]]) == edge).all()


def test_a_constant_feature_is_harmless() -> None:
    rows = np.column_stack([X, np.full(len(X), 7.0)])
    assert trained().fit(rows, Y).score(rows, Y) > 0.9


def test_divergence_raises() -> None:
    model = trained().fit(X, Y).set_params(learning_rate=1e30)
    with pytest.raises(ValueError, match="training diverged: lower learning_rate or weight_decay"):
        model.fit(X, Y)
    with pytest.raises(NotFittedError):
        model.predict(X)


# --- errors ----------------------------------------------------------------------------------


def test_bad_parameters_are_named(subtests: pytest.Subtests) -> None:
    cases: list[tuple[str, list[Any], str]] = [
        (
            "hidden_layer_sizes",
            [0, [0], (4, -1), 2.5, "ab"],
            "a tuple of whole numbers above 0, or .. for",
        ),
        ("k", [0, -1, math.inf, math.nan, 1e300], "a finite number above 0"),
        ("k", ["best", None], "a number"),
        ("learning_rate", [0, math.inf], "a finite number above 0"),
        ("learning_rate", ["constant"], "a number"),
        ("ks", [(1, 1), 1.0, "auto"], "distinct numbers"),
        ("ks", [(0.5, 0), (1, 1e-200)], "finite numbers above 0"),
        ("ks", [()], "at least one number"),
        ("metric", ["accuracy", None], "one of .'error', 'balanced', 'log-loss'"),
        ("ensemble", ["no", None], "True or False"),
        ("repetitions", [2.5, "some"], "a whole number"),
        ("repetitions", [0], "1 or more"),
        ("repetitions", [7], "a multiple of 5"),
        ("activation", ["logistic"], "one of .'relu', 'tanh', 'sigmoid'"),
        ("weight_decay", [-1, math.inf, "auto"], "a finite number of at least 0"),
        ("batch_size", [0, 2.5, "all"], "a whole number above 0"),
        ("clip", [0, "none"], "a finite number above 0, or None"),
        ("max_iter", [0, 1.5], "a whole number above 0"),
        ("device", ["gpu", None, "cuda:99"], "'auto' or a device that can be used, such as 'cpu'"),
    ]
    for parameter, values, message in cases:
        with subtests.test(parameter=parameter, message=message):
            for value in values:
                with pytest.raises(ValueError, match=f"^{parameter} must be {message}.*, not "):
                    trained().set_params(**{parameter: value}).fit(X, Y)


def test_bad_labels_are_named(subtests: pytest.Subtests) -> None:
    cases: list[tuple[Any, str]] = [
        ([0.0] * 4, "there is only one class, 0.0"),
        (["a"] * 4, "there is only one class, 'a'"),
        (["a", None, "b", None], "y must have a label for each row; 2 are None"),
        (np.array(["a", 1, "b", 1], object), "y must be all numbers or all strings, not both"),
    ]
    for labels, message in cases:
        with subtests.test(message=message), pytest.raises(ValueError, match=message):
            trained().fit(np.eye(4), labels)


def test_bad_weights_are_named() -> None:
    for weights in (np.zeros(150), np.arange(150) - 1):
        with pytest.raises(ValueError, match="sample_weight must be zero or more, and not zero"):
            trained().fit(X, Y, sample_weight=weights)
    with pytest.raises(ValueError, match="sample_weight contains NaN"):
        trained().fit(X, Y, sample_weight=np.full(150, np.nan))


def test_a_single_class_is_refused() -> None:
    with pytest.raises(ValueError, match="y must have two classes or more; there is only one"):
        trained().fit(X, np.full(len(X), "same"))
    with pytest.raises(ValueError, match="y must have two classes or more; there is only one"):
        trained().fit(X, Y, sample_weight=Y == 1)
