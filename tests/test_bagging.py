"""The bagging protocol: the trials it needs, and that a search can be resumed anywhere."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pseudograd.data import Dataset
from pseudograd.fleet import Fleet, MLPRecipe, Outcome, OwnRecipe, Split, Trial
from pseudograd.fleet.ramp import level
from pseudograd.fleet.trial import mixed_score
from pseudograd.search import Bagging, Cell, Study
from pseudograd.search.bagging import bagging_for, epochs_for, table_recipe
from trials import recipe_of, replace

pytestmark = pytest.mark.usefixtures("one_thread")

RECIPE = MLPRecipe("blobs", (6,), optimizer="adam", weight_decay=0.1, schedule="cosine",
                   batch_size=32, max_epochs=4, stratified=True)  # fmt: skip
SMALL = Bagging(RECIPE)
World = Callable[[Trial], Outcome]


def world(best_k: float = 0.5, best_rate: float = 0.01) -> World:
    """Errors that grow with the distance from (best_k, best_rate), and with the repetition."""

    def outcome(trial: Trial) -> Outcome:
        distance = abs(math.log2(level(trial.k) / best_k))
        distance += abs(math.log(trial.learning_rate / best_rate))
        error = 0.02 + 0.01 * distance + 0.001 * trial.split.repetition
        return Outcome(trial, error, 3, error, 2 * error, 4, "limit", (error,))

    return outcome


def finished(
    protocol: Bagging, outcome_of: World, known: dict[Trial, Outcome] | None = None
) -> dict[Trial, Outcome]:
    outcomes = dict(known or {})
    while wanted := protocol.wanted(outcomes):
        assert len(set(wanted)) == len(wanted)
        assert all(map(protocol.covers, wanted))
        outcomes |= {trial: outcome_of(trial) for trial in wanted}
    return outcomes


def pairs(trials: Any) -> set[tuple[float, float]]:
    return {(trial.k, trial.learning_rate) for trial in trials}


# --- which trials it wants -------------------------------------------------------------------


def test_every_pair_has_a_network_for_every_fold() -> None:
    protocol = Bagging(RECIPE, repetitions=10, seed=3)
    trials = protocol.wanted({})
    assert len(trials) == len(set(trials)) == 3 * 3 * 10
    assert pairs(trials) == {(k, rate) for k in (2, 1, 0.5) for rate in (0.003, 0.01, 0.03)}
    assert {t.split for t in trials} == {Split(3, number, bagged=True) for number in range(10)}
    # Weights, order and folds are the same for every pair, so that differences are paired.
    assert len({(t.seed, t.split) for t in trials}) == 10
    assert {protocol.stage_of(t) for t in trials} == {"search"}
    assert len(finished(protocol, world())) == protocol.foretold == 3 * 3 * 10
    assert protocol.plan() == "90 networks or more: 3 values of k × 3 learning rates × 10 folds"


@pytest.mark.parametrize(("best", "beyond"), [(1e-9, 0.001), (1e9, 0.09)])
def test_a_best_rate_on_the_edge_brings_one_more(best: float, beyond: float) -> None:
    outcomes = finished(SMALL, world(best_rate=best))
    assert len(outcomes) == 3 * 4 * 5
    for k in SMALL.ks:
        (added,) = {rate for pair_k, rate in pairs(outcomes) if pair_k == k} - {0.003, 0.01, 0.03}
        assert added == pytest.approx(beyond)
    assert SMALL.open_ks(outcomes) == [2.0, 1.0, 0.5]  # the best rate may lie further out


def test_only_the_k_on_the_edge_gets_another_rate() -> None:
    def outcome(trial: Trial) -> Outcome:
        return world(best_rate=1e9 if trial.k == 2 else 0.01)(trial)

    outcomes = finished(SMALL, outcome)
    assert {k for k, rate in pairs(outcomes) if rate > 0.03} == {2.0}
    assert len(outcomes) == 50
    assert len(finished(replace(SMALL, most_extensions=0), outcome)) == 45


def test_pairs_are_compared_by_error_and_cross_entropy() -> None:
    """The same mistakes everywhere, but one pair has the better probabilities."""

    def outcome(trial: Trial) -> Outcome:
        value = 0.3 if (trial.k, trial.learning_rate) == (2.0, 0.01) else 0.4
        return Outcome(trial, 0.1, 1, 0.1, value, 4, "limit", (0.1,))

    outcomes = finished(replace(SMALL, most_extensions=0), outcome)
    chosen, plain = SMALL.chosen(outcomes)
    assert (chosen.k, chosen.learning_rate) == (2.0, 0.01)
    assert (plain.k, plain.learning_rate) == (1.0, 0.003)
    assert chosen.score == pytest.approx(mixed_score(0.1, 0.3))
    assert SMALL.trials_of(chosen) == [t for t in SMALL.wanted({}) if pairs([t]) == {(2.0, 0.01)}]
    assert Cell(1.0, 0.1, (0.1,), (math.inf,)).score > 1e8  # a network that diverged


def test_only_finalists_go_on() -> None:
    protocol = replace(SMALL, finalists=1)
    first = protocol.wanted({})
    assert len(first) == 9
    assert {t.split.repetition for t in first} == {0}
    outcomes = {trial: world(best_k=0.5)(trial) for trial in first}
    going_on = protocol.wanted(outcomes)
    # The best pair of k = 1 is kept for comparison. One of five folds is trained already.
    assert pairs(going_on) == {(0.5, 0.01), (1.0, 0.01)}
    assert {t.split.repetition for t in going_on} == {1, 2, 3, 4}
    outcomes = finished(protocol, world(best_k=0.5), outcomes)
    assert {(c.k, c.learning_rate) for c in protocol.cells(outcomes)} == pairs(going_on)
    assert protocol.chosen(outcomes)[0].k == 0.5
    assert len(outcomes) == protocol.foretold == 9 + 2 * 4
    # No rate is added, even if the best is on the edge.
    assert len(finished(protocol, world(best_rate=1e9))) == protocol.foretold
    # First looks also count when telling whether the best rate is on the edge.
    assert protocol.open_ks(outcomes) == []
    assert protocol.open_ks(finished(protocol, world(best_rate=1e9))) == [1.0, 0.5]
    without_1 = replace(protocol, ks=(2.0, 0.5))
    assert pairs(t for t in finished(without_1, world()) if t.split.repetition) == {(0.5, 0.01)}


def test_the_best_of_k_1_is_not_there_twice() -> None:
    outcomes = finished(replace(SMALL, finalists=2), world(best_k=1.0))
    assert len(pairs(trial for trial in outcomes if trial.split.repetition)) == 2


def test_first_looks_may_be_at_a_sample() -> None:
    protocol = replace(SMALL, finalists=1, sample=40)
    first = protocol.wanted({})
    assert {recipe_of(trial).sample for trial in first} == {40}
    assert {protocol.stage_of(trial) for trial in first} == {"first look"}
    outcomes = finished(protocol, world())
    later = [trial for trial in outcomes if trial not in first]
    assert {trial.recipe for trial in later} == {RECIPE}
    assert {protocol.stage_of(trial) for trial in later} == {"search"}
    assert len(later) == 2 * 5  # the best pair and that of k = 1, none trained on the sample
    assert len(protocol.recipes) == 2
    assert len(outcomes) == protocol.foretold == 9 + 10
    assert protocol.plan() == (
        "about 19 networks: first 3 values of k × 3 learning rates on 40 training examples, then "
        "the best 1 pair and the best of k = 1 × 5 folds"
    )


@pytest.mark.parametrize(
    "protocol",
    [SMALL, replace(SMALL, finalists=2), replace(SMALL, finalists=3, sample=40)],
    ids=["all", "finalists", "sample"],
)
def test_a_search_can_be_resumed_anywhere(protocol: Bagging) -> None:
    whole = finished(protocol, world(best_rate=1e9))
    done = list(whole.items())
    for count in range(0, len(done), 4):
        before = dict(done[:count])
        assert protocol.wanted(before) == protocol.wanted(before)
        again = finished(protocol, world(best_rate=1e9), before)
        assert again.keys() == whole.keys()
    assert protocol.wanted(whole) == []


def test_bad_settings_are_named(subtests: pytest.Subtests) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"repetitions": 7}, "repetitions must be a multiple of 5, .* not 7"),
        ({"repetitions": 0}, "repetitions must be 1 or more.*, not 0"),
        ({"ks": ()}, "ks must be at least one number"),
        ({"learning_rates": ()}, "learning_rates must be at least one number"),
        ({"finalists": 0}, "finalists must be 1 or more, or None, not 0"),
        ({"sample": -1}, "sample must be a whole number, 0 or more, not -1"),
        ({"retrainings": 1}, "retrainings must be 0: the networks of the folds are the model"),
    ]
    for change, said in cases:
        with subtests.test(said=said), pytest.raises(ValueError, match=said):
            replace(SMALL, **change)


def test_a_sample_needs_a_recipe_that_can_be_sampled() -> None:
    protocol = Bagging(OwnRecipe("mine"), finalists=1, sample=10)
    with pytest.raises(ValueError, match="sample must be 0 for recipes other than MLPRecipe"):
        protocol.wanted({})


def test_larger_tables_have_fewer_finalists() -> None:
    found = [bagging_for(RECIPE, size) for size in (1999, 2000, 99_999, 100_000)]
    assert [(p.finalists, p.sample) for p in found] == [(None, 0), (4, 0), (4, 0), (1, 50_000)]
    small = bagging_for(RECIPE, 100)
    assert max(small.learning_rates) < max(found[0].learning_rates)  # large steps overfit
    given = bagging_for(RECIPE, 5000, finalists=3, ks=None, seed=4)
    assert (given.finalists, given.ks, given.seed) == (3, (2.0, 1.0, 0.5), 4)


def test_the_recipe_follows_the_size_of_the_table() -> None:
    sizes = (20, 100, 1000, 10_000, 200_000, 10**7)
    recipes = [table_recipe("any", size) for size in sizes]
    widths = [recipe.hidden_layer_sizes[0] for recipe in recipes]
    assert widths == sorted(widths)
    assert (widths[0], widths[-1]) == (32, 128)
    batches = [recipe.batch_size for recipe in recipes]
    assert batches == [32, 32, 64, 256, 1024, 1024]
    assert [bool(recipe.bins) for recipe in recipes] == [False, False, True, True, True, True]
    assert [recipe.max_epochs for recipe in recipes] == [epochs_for(size) for size in sizes]
    assert all(recipe.patience == recipe.max_epochs for recipe in recipes)
    given = table_recipe("any", 1000, "ab", max_epochs=7, batch_size=None, bins=0)
    assert (given.max_epochs, given.patience, given.bins, given.data_hash) == (7, 7, 0, "ab")
    assert table_recipe("any", 1000, pixels=True).bins == 0


# --- in a folder, and on a fleet -------------------------------------------------------------


def test_a_study_is_reopened_from_its_folder(tmp_path: Path) -> None:
    protocol = replace(SMALL, finalists=2, sample=40, seed=9)
    study = Study(tmp_path / "run", protocol)
    outcome_of = world()
    assert study.run(lambda trials, stop: map(outcome_of, list(trials)))
    again = Study.open(tmp_path / "run")
    assert again.protocol == protocol
    assert isinstance(again.protocol, Bagging)
    assert dict(again.ledger) == finished(protocol, outcome_of)
    assert again.finished
    assert json.loads((tmp_path / "run/run.json").read_text())["protocol"]["kind"] == "bagging"


def blobs() -> Dataset:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(3, (143,), generator=generator)
    features = torch.randn(143, 5, generator=generator) + labels.unsqueeze(1)
    return Dataset("blobs", features, labels, 113, (-3.0, 6.0))


def same(ours: Outcome, theirs: Outcome) -> bool:
    assert ours.parameters is not None
    assert theirs.parameters is not None
    return ours == theirs and all(
        torch.equal(a, b)
        for one, other in zip(ours.parameters, theirs.parameters, strict=True)
        for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("bins", [0, 5])
def test_a_trial_gives_the_same_bits_alone_and_among_others(bins: int) -> None:
    """Whatever the other trials, the number of slots, and the slot's previous network.

    So a lost network can be trained again without changing the model.
    """
    recipe = replace(RECIPE, bins=bins, stop_by="error and cross-entropy")
    trials = replace(SMALL, recipe=recipe, ks=(1.0, 0.5), learning_rates=(0.003, 0.1)).wanted({})
    longer = [replace(trial, max_epochs=9) for trial in trials[::3]]
    assert len(trials) == 20

    def outcomes(slots: int, trials: list[Trial]) -> dict[Trial, Outcome]:
        fleet = Fleet(blobs(), slots=slots, keep_parameters=True)
        return {outcome.trial: outcome for outcome in fleet.run(trials)}

    together = outcomes(8, trials)
    refilled = outcomes(3, [*longer, *trials[::-1]])
    for trial in trials[::4]:
        (alone,) = outcomes(1, [trial]).values()
        assert same(alone, together[trial])
        assert same(alone, refilled[trial])


def test_a_sample_trains_on_that_many_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    from pseudograd.fleet.mlp.stack import Stack

    seen: list[torch.Tensor] = []
    train = Stack.train

    def watch(stack: Stack, order: torch.Tensor, *arguments: Any) -> None:
        seen.append(order)
        train(stack, order, *arguments)

    monkeypatch.setattr(Stack, "train", watch)
    trial = SMALL.wanted({})[0]
    list(Fleet(blobs()).run([replace(trial, sample=40)]))
    assert {order.shape for order in seen} == {(1, 40)}
    assert len(torch.cat(seen).unique()) == 40  # the same ones in every epoch
    seen.clear()
    list(Fleet(blobs()).run([replace(trial, sample=1000)]))
    assert {order.shape for order in seen} == {(1, 113 - 22)}  # there are no more


def test_the_epoch_of_the_least_mixed_score_is_kept() -> None:
    from pseudograd.fleet.course import Course

    trial = replace(
        SMALL.wanted({})[0], stop_by="error and cross-entropy", patience=3, max_epochs=9
    )
    run = Course(trial, recipe_of(trial))
    figures = [(0.3, 1.0), (0.2, 1.6), (0.25, 1.0), (0.25, math.nan), (0.25, 1.0)]
    kept = [run.note(*epoch) for epoch in figures]
    assert kept == [True, False, True, False, False]
    assert (run.best_epoch, run.best_error, run.since) == (3, 0.25, 3)
    assert run.stopped_by(finite=True) is None
    run.note(0.3, 1.0)
    assert run.stopped_by(finite=True) == "patience"
