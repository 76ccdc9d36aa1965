"""The protocol, the ledger and the comparison, mostly with made-up outcomes."""

from __future__ import annotations

import json
import math
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import scipy.stats
import torch

from pseudograd.data import open_data
from pseudograd.files import locked
from pseudograd.fleet import Fleet, MLPRecipe, Outcome, OwnRecipe, Split, Stop, Trial
from pseudograd.fleet.ramp import level
from pseudograd.search import (
    DEEP_KS,
    SHALLOW_KS,
    Cell,
    Ledger,
    Progress,
    Protocol,
    Result,
    Runner,
    Study,
    batch_size_for,
    compare,
    ks_for,
    load_model,
    paired_difference,
    read_assessment,
    study_of,
    tune,
)
from pseudograd.search.ledger import outcome_from_json, outcome_to_json

RECIPE = MLPRecipe("digits", (400,))
RECIPES = {RECIPE.fingerprint: RECIPE}
TRIAL = Trial(RECIPE, k=1, learning_rate=1)


def made_up(trial: Trial, best_k: float = 0.5, best_rate: float = 0.1) -> Outcome:
    """An error that grows with the distance from (best_k, best_rate), and with the repetition."""
    distance = abs(math.log2(level(trial.k) / best_k))
    distance += abs(math.log2(trial.learning_rate / best_rate))
    error = 0.01 * distance + 0.001 * trial.split.repetition + 0.02
    wrong = tuple(range(round(1000 * error))) if trial.split.retrain else None
    return Outcome(trial, error, 3, error, 2 * error, 18, "patience", (0.5, error), wrong)


def taken(trials: deque[Trial], stop: Stop) -> Iterator[Trial]:
    """Take trials as a runner does."""
    while trials and not stop():
        yield trials.popleft()


def a_runner(outcome_of: Callable[[Trial], Outcome]) -> Runner:
    return lambda trials, stop: (outcome_of(trial) for trial in taken(trials, stop))


def finished(
    protocol: Protocol, folder: Path | None = None,
    outcome_of: Callable[[Trial], Outcome] | None = None, **world: float,
) -> Study:  # fmt: skip
    study = Study(folder, protocol)
    assert study.run(a_runner(outcome_of or (lambda trial: made_up(trial, **world))))
    return study


def line_of(outcome: Outcome) -> str:
    return json.dumps(outcome_to_json(outcome))


def test_lines_are_short_and_complete() -> None:
    plain = Trial(RECIPE, k=0.5, learning_rate=0.1, seed=3)
    assert len(line_of(Outcome(plain, 0.02, 12, 0.03, 0.1, 27, "patience", ()))) < 225
    other = replace(plain, split=Split(2, 3, True))
    for trial in (plain, other, replace(other, split=Split(1, test=True))):
        for wrong in (None, (), (0,), (7, 8, 15, 16, 9999), tuple(range(0, 26_032, 3))):
            outcome = Outcome(trial, 0.02, 12, 0.03, 0.1, 27, "patience", (0.5, 0.25), wrong)
            assert outcome_from_json(json.loads(line_of(outcome)), RECIPES) == outcome
    assert len(line_of(outcome)) < 5000


# --- the protocol ----------------------------------------------------------------------------


def test_lists_are_accepted_like_tuples() -> None:
    """Even when a run is resumed, which compares them."""
    expected = Protocol(RECIPE, ks=(1.0, 0.5), learning_rates=(0.1,))
    several: list[tuple[Any, Any]] = [([1, 0.5], [0.1]), (np.array([1, 0.5]), np.array([0.1]))]
    for ks, rates in several:
        listed = Protocol(RECIPE, ks=ks, learning_rates=rates)
        assert listed == expected
        assert {type(number) for number in listed.ks + listed.learning_rates} == {float}


def test_numpy_scalars_become_python_numbers() -> None:
    numpys: dict[str, Any] = {"initial_rate": np.float32(0.25), "repetitions": np.int64(3),
                              "seed": np.uint8(1)}  # fmt: skip
    protocol = Protocol(RECIPE, **numpys)
    assert protocol == Protocol(RECIPE, initial_rate=0.25, repetitions=3, seed=1)
    assert {type(getattr(protocol, name)) for name in numpys} == {float, int}


def test_the_papers_ks_follow_the_depth() -> None:
    assert Protocol(RECIPE).ks == ks_for(1) == SHALLOW_KS
    assert ks_for(3) == DEEP_KS


def test_batches_leave_five_steps_an_epoch() -> None:
    for size in (*range(1, 50), 426, 427, 854, 855, 60_000):
        batch, trained = batch_size_for(size), 3 * (size // 5)
        assert batch in {1, 2, 4, 8, 16, 32, 64, 128}, size
        assert batch == 1 or math.ceil(trained / batch) >= 5, size
        assert batch == 128 or math.ceil(trained / (2 * batch)) < 5, size


def test_first_round_is_three_rates_of_every_k_on_permuted_folds() -> None:
    protocol = Protocol(RECIPE, initial_rate=0.1, repetitions=10, seed=3)
    trials = protocol.wanted({})
    assert len(trials) == len(set(trials)) == 7 * 3 * 10
    assert {t.learning_rate for t in trials} == {0.05, 0.1, 0.2}
    assert {t.split for t in trials} == {Split(3, r) for r in range(10)}
    # Weights, order and folds are the same for every pair, so that differences are paired.
    assert len({(t.seed, t.split) for t in trials}) == 10


def test_rates_extend_for_every_k_until_the_best_is_inside() -> None:
    protocol = Protocol(RECIPE, initial_rate=0.1, repetitions=2)
    ledger = finished(protocol, best_rate=0.1 * 2**3).ledger
    for k in protocol.ks:
        rates = protocol.rates(k, ledger)
        assert rates == [0.1 * 2.0**power for power in range(-1, 5)]
    assert not protocol.open_ks(ledger)
    assert protocol.chosen(ledger)[0].learning_rate == pytest.approx(0.8)


def test_given_rates_are_where_the_search_starts() -> None:
    protocol = Protocol(RECIPE, learning_rates=(0.4, 0.1), repetitions=2)
    assert {trial.learning_rate for trial in protocol.wanted({})} == {0.1, 0.4}
    ledger = finished(protocol, best_rate=0.4).ledger
    assert protocol.rates(1.0, ledger) == [0.1, 0.4, 0.8]
    with pytest.raises(ValueError, match="initial_rate must be left out"):
        Protocol(RECIPE, learning_rates=(0.4,), initial_rate=0.1)
    with pytest.raises(ValueError, match="learning_rates must be distinct"):
        Protocol(RECIPE, learning_rates=(0.4, 0.4))


def test_no_results_before_the_sweep_ends() -> None:
    protocol = Protocol(RECIPE)
    first, *_ = protocol.wanted({})
    assert protocol.cells({first: made_up(first)}) == []


def test_a_network_without_a_finite_value_leaves_no_interval() -> None:
    difference = paired_difference([math.inf, 1.0], [0.5, 0.5])
    assert difference.mean == math.inf
    assert math.isnan(difference.low)
    assert math.isnan(difference.high)


def test_networks_without_finite_values_on_both_sides_have_no_mean() -> None:
    difference = paired_difference([math.inf, 1.0, 1.0], [0.5, math.inf, 0.5])
    assert all(map(math.isnan, (difference.mean, difference.low, difference.high)))


def test_a_runner_without_outcomes_raises() -> None:
    study = Study(None, Protocol(RECIPE, initial_rate=0.1))
    with pytest.raises(RuntimeError, match="returned no outcome for 147 trials, such as Trial"):
        study.run(lambda trials, stop: iter(()))


def test_a_ledger_holds_no_weights(tmp_path: Path) -> None:
    weights = ((torch.zeros(2, 2), torch.zeros(2)),)
    ledger = Ledger(tmp_path / "ledger", [RECIPE])
    ledger.append(replace(made_up(TRIAL), parameters=weights))
    assert ledger[TRIAL].parameters is None


def test_equal_errors_do_not_extend_the_rates() -> None:
    """Otherwise, without any errors, the smallest rate would be halved forever."""
    protocol = Protocol(RECIPE, repetitions=3)

    def easy(trial: Trial) -> Outcome:
        value = abs(trial.learning_rate - 0.25)
        return replace(made_up(trial), stop_error=0.0, error=0.0, cross_entropy=value)

    ledger = finished(protocol, outcome_of=easy).ledger
    assert {len(protocol.rates(k, ledger)) for k in protocol.ks} == {3}
    assert protocol.first_rate(ledger) == 0.25  # of equal errors, the lowest cross-entropy
    assert not protocol.open_ks(ledger)
    chosen, plain = protocol.chosen(ledger)
    assert chosen == plain
    assert chosen.learning_rate == 0.125
    assert len(protocol.ties(ledger)) == 20


def test_lower_rates_are_tried_if_no_rate_learned() -> None:
    """Collapsed networks make equal errors, too: they always predict one class."""
    protocol = Protocol(RECIPE, initial_rate=0.4, repetitions=2)

    def fragile(trial: Trial) -> Outcome:
        if trial.k == 0.25 and trial.learning_rate > 0.06:
            return replace(made_up(trial), error=0.811, cross_entropy=2.2)
        else:
            return made_up(trial, best_rate=0.4 if trial.k != 0.25 else 0.025)

    ledger = finished(protocol, outcome_of=fragile).ledger
    assert protocol.rates(0.25, ledger) == pytest.approx([0.0125, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8])
    assert protocol.rates(1.0, ledger) == pytest.approx([0.2, 0.4, 0.8])


def test_rates_go_down_past_one_that_is_worse_than_nothing() -> None:
    """The best networks still predict only one class, and the one at a lower rate is no better."""
    protocol = Protocol(RECIPE, ks=(1.0,), initial_rate=0.4, repetitions=2)

    def fragile(trial: Trial) -> Outcome:
        error = {0.2: 0.5, 0.4: 0.4, 0.8: 0.4}.get(trial.learning_rate, trial.learning_rate)
        return replace(made_up(trial), error=error, cross_entropy=1.0)

    ledger = finished(protocol, outcome_of=fragile).ledger
    assert len(protocol.rates(1.0, ledger)) == 3 + protocol.most_extensions
    assert protocol.chosen(ledger)[1].learning_rate < 0.2


def test_rates_go_down_where_the_lowest_is_among_the_best() -> None:
    """It would be chosen, and a lower one may be better."""
    protocol = Protocol(RECIPE, ks=(1.0,), initial_rate=0.4, repetitions=2)

    def alike(trial: Trial) -> Outcome:
        error = {0.05: 0.3, 0.1: 0.1, 0.8: 0.3}.get(trial.learning_rate, 0.2)
        return replace(made_up(trial), error=error)

    ledger = finished(protocol, outcome_of=alike).ledger
    assert protocol.rates(1.0, ledger) == [0.05, 0.1, 0.2, 0.4, 0.8]
    assert protocol.chosen(ledger)[1].learning_rate == 0.1


def test_equal_numbers_of_mistakes_are_equal_errors() -> None:
    """However they are distributed: sums of n/287 differ in the last bit."""
    chance = random.Random(0)
    for _ in range(200):
        mistakes = [chance.randrange(20) for _ in range(7)]
        first = Cell(1.0, 0.1, tuple(n / 287 for n in mistakes))
        chance.shuffle(mistakes)
        mistakes[0], mistakes[1] = mistakes[0] + 1, mistakes[1] - 1
        second = Cell(1.0, 0.1, tuple(n / 287 for n in mistakes))
        assert first.error == second.error


def test_the_sweep_keeps_to_the_limit_of_epochs() -> None:
    protocol = Protocol(replace(RECIPE, max_epochs=2))
    assert {trial.recipe for trial in protocol.wanted({})} == {RECIPE.shortened(2)}
    assert {trial.recipe for trial in Protocol(RECIPE).wanted({})} == {RECIPE.shortened(5)}
    assert RECIPE.shortened(5) == replace(RECIPE, max_epochs=5, patience=5)
    with pytest.raises(ValueError, match="seed must be a whole number"):
        Protocol(RECIPE, seed=2**32)


def test_the_limit_of_extensions_is_kept_and_reported() -> None:
    protocol = Protocol(RECIPE, initial_rate=0.1, repetitions=1, most_extensions=2)
    ledger = finished(protocol, best_rate=1e-6).ledger
    assert protocol.rates(1.0, ledger) == [0.0125, 0.025, 0.05, 0.1, 0.2]
    assert protocol.open_ks(ledger) == list(protocol.ks)


def test_the_sweep_finds_the_initial_rate_with_few_epochs() -> None:
    protocol = Protocol(RECIPE, repetitions=1)
    sweep = protocol.wanted({})
    assert {t.k for t in sweep} == {1.0}
    assert {t.recipe for t in sweep} == {RECIPE.shortened(5)}
    ledger = finished(protocol, best_rate=0.06).ledger
    assert protocol.first_rate(ledger) == 4.0**-2


def test_selection_is_the_argmin_of_the_mean_validation_error() -> None:
    protocol = Protocol(RECIPE, initial_rate=0.1, repetitions=4)
    ledger = finished(protocol, best_k=0.25, best_rate=0.1).ledger
    best, plain = protocol.chosen(ledger)
    assert (best.k, best.learning_rate) == (0.25, 0.1)
    assert (plain.k, plain.learning_rate) == (1.0, 0.1)
    assert best.error == pytest.approx(0.02 + 0.001 * 1.5)
    assert best.standard_error == pytest.approx(scipy.stats.sem([0, 0.001, 0.002, 0.003]))


def test_ties_go_to_the_k_nearest_1_then_to_the_smaller_rate() -> None:
    protocol = Protocol(RECIPE, initial_rate=0.1, repetitions=1)

    def level(trial: Trial) -> Outcome:
        inside = trial.k in (0.5, 0.25) and trial.learning_rate in (0.1, 0.05)
        return replace(made_up(trial), error=0.1 if inside else 0.2)

    ledger = finished(protocol, outcome_of=level).ledger
    best, _ = protocol.chosen(ledger)
    assert (best.k, best.learning_rate) == (0.5, 0.05)
    assert {(c.k, c.learning_rate) for c in protocol.ties(ledger)} == {
        (0.5, 0.1), (0.25, 0.05), (0.25, 0.1)
    }  # fmt: skip


def test_the_test_set_is_read_by_the_final_trials_alone() -> None:
    protocol = Protocol(RECIPE, initial_rate=0.1, repetitions=2, retrainings=3)
    study = finished(protocol)
    final = [trial for trial in study.ledger if trial.split.retrain]
    assert len(final) == 2 * 3
    assert {(t.k, t.learning_rate) for t in final} == {(0.5, 0.1), (1.0, 0.1)}
    assert [o.trial.k for o in study.result.comparison.chosen] == [0.5] * 3


def test_bad_settings_are_named(subtests: pytest.Subtests) -> None:
    cases: list[tuple[dict[str, object], str]] = [
        ({"most_extensions": -1}, "most_extensions must be 0 or more"),
        ({"initial_rate": -0.1}, "learning_rates must be finite numbers above 0, not -0.1"),
        ({"learning_rates": (0.1, math.inf)}, "learning_rates must be finite"),
        ({"ks": (2.0, 0.5)}, "ks"),
        ({"ks": (1.0, 1.0)}, "ks"),
        ({"ks": (1.0, 1e300)}, "ks must be finite numbers above 0"),
        ({"ks": 1.0}, "ks must be distinct numbers, or ramps like '0.5→2', not 1.0"),
        ({"repetitions": 0}, "repetitions"),
        ({"retrainings": -1}, "retrainings"),
        ({"repetitions": 2.5}, "repetitions must be a whole number, not 2.5"),
        ({"seed": 1.5}, "seed must be a whole number, not 1.5"),
    ]
    for change, word in cases:
        with subtests.test(word=word), pytest.raises(ValueError, match=word):
            Protocol(RECIPE, **change)  # type: ignore[arg-type]


def test_an_unfinished_study_has_no_result() -> None:
    with pytest.raises(ValueError, match="not finished: 147 trials have no outcome yet"):
        _ = Study(None, Protocol(RECIPE, initial_rate=0.1)).result


# --- the comparison --------------------------------------------------------------------------


def test_paired_difference_is_students() -> None:
    first, second = [0.1, 0.13, 0.12, 0.18], [0.12, 0.13, 0.15, 0.19]
    found = paired_difference(first, second)
    expected = scipy.stats.ttest_rel(first, second).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))


def test_mcnemar_counts_predictions_that_only_one_got_right() -> None:
    def outcome(wrong: set[int]) -> Outcome:
        return replace(made_up(replace(TRIAL, split=Split(retrain=True))), wrong=tuple(wrong))

    found = compare(
        [outcome({1, 2, 3}), outcome({9})], [outcome({3, 4, 5, 6, 7}), outcome({9, 10, 11})]
    )
    assert (found.only_plain_right, found.only_chosen_right) == (2, 6)
    assert found.mcnemar_p == pytest.approx(scipy.stats.binomtest(2, 8).pvalue)


def test_an_example_counts_once_in_the_sign_test() -> None:
    def outcome(*wrong: int) -> Outcome:
        return replace(made_up(replace(TRIAL, split=Split(retrain=True))), wrong=wrong)

    # Five pairs that all differ on the same two examples are no more evidence than one.
    found = compare([outcome(1)] * 5, [outcome(1, 2, 3)] * 5)
    assert found.mcnemar_p == pytest.approx(scipy.stats.binomtest(0, 10).pvalue)
    assert (found.better_on, found.worse_on, found.sign_p) == (2, 0, 0.5)
    # An example that one pair gains and another loses counts as neither.
    found = compare([outcome(1, 5), outcome(5)], [outcome(2, 5), outcome(1, 7)])
    assert (found.better_on, found.worse_on) == (2, 1)  # better on 2 and 7, worse on 5, even on 1
    assert found.sign_p == 1


# --- the folder ------------------------------------------------------------------------------


def test_errors_of_the_model_are_counted_by_class(tmp_path: Path) -> None:
    """A network that always predicts "no" is right 19 times out of 20."""
    path = tmp_path / "fraud.csv"
    rows = [f"{at * 7919 % 101},{'yes' if at % 20 == 0 else 'no'}" for at in range(200)]
    path.write_text("\n".join(["amount,fraud", *rows]))
    data, encoder = open_data(str(path), target="fraud")
    recipe = MLPRecipe(data.name, (4,), batch_size=32, max_epochs=5)
    protocol = Protocol(recipe, ks=(1.0,), initial_rate=0.1, repetitions=1, retrainings=2)
    study = study_of(data, encoder, protocol, tmp_path / "run")
    found = tune(study, data, encoder, Fleet(data, keep_parameters=True).run)
    assert isinstance(found, Result)
    model, _ = load_model(tmp_path / "run")
    answers = model.probabilities(data.features[data.train_size :]).argmax(1)
    assert set(answers.tolist()) == {0}
    assessment = read_assessment(study)
    assert assessment is not None
    counts = [(one["label"], one["count"], one["wrong"]) for one in assessment["by_class"]]
    assert counts == [("no", 38, 0), ("yes", 2, 2)]


def test_the_sessions_that_ran_trials_are_credited(tmp_path: Path) -> None:
    study = Study(tmp_path / "run", Protocol(RECIPE, initial_rate=0.1))
    with pytest.raises(ValueError, match="never started"):
        _ = study.about
    with pytest.raises(ValueError, match="a study in memory records no sessions"):
        _ = Study(None, study.protocol).about
    for command, device, commit, trials in (
        ("looked first", "cpu", "c0", 0),
        ("began", "cuda:0", "c1", 7),
        ("went on", "cpu", "c2", 9),
        ("began", "cuda:0", "c1", 2),
        ("looked again", "mps", "c3", 0),
    ):
        with study.session(command, []):
            noted = study.sessions[-1]
            noted |= {"devices": [device], "commit": commit, "hardware": f"of {device}"}
            noted |= {"trials": trials, "versions": {"pseudograd": "0.1.0", "torch": f"2.{trials}"}}
            noted |= {"started": f"2026-01-0{len(study.sessions)}T12:00:00+00:00"}
    about = Study.open(tmp_path / "run").about
    assert about["command"] == "began\nwent on"
    assert about["commit"] == "c1, c2"
    assert about["hardware"] == "of cuda:0; of cpu"
    assert about["devices"] == ["cuda:0", "cpu"]
    assert about["versions"] == {"pseudograd": "0.1.0", "torch": "2.7 and 2.9 and 2.2"}
    assert about["started"] == "2026-01-01T12:00:00+00:00"
    assert about["seconds"] == pytest.approx(sum(one["seconds"] for one in study.sessions))


def test_a_session_of_another_process_is_not_forgotten(tmp_path: Path) -> None:
    study, other = (Study(tmp_path / "run", Protocol(RECIPE, initial_rate=0.1)) for _ in range(2))
    with other.session("first", []):
        other.tell(TRIAL, made_up(TRIAL))
    with study.session("second", []):
        assert TRIAL in study.ledger
    told = [(one["command"], one["trials"]) for one in Study.open(tmp_path / "run").sessions]
    assert told == [("first", 1), ("second", 0)]


# --- the ledger ------------------------------------------------------------------------------


def test_outcomes_survive_the_ledger_unchanged(tmp_path: Path) -> None:
    outcomes = [
        made_up(replace(TRIAL, k=1 / 16, split=Split(1, 2, retrain=True))),
        replace(made_up(replace(TRIAL, k=3.3)), cross_entropy=math.inf, stopped_by="diverged"),
    ]
    ledger = Ledger(tmp_path / "runs" / "ledger.jsonl", [RECIPE])
    for outcome in outcomes:
        ledger.append(outcome)
    again = Ledger(ledger.path, [RECIPE])
    assert list(again.values()) == outcomes == list(ledger.values())
    assert not again.set_aside


def test_torn_and_foreign_lines_are_reported_and_skipped(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path, [RECIPE])
    ledger.append(made_up(replace(TRIAL, k=2.0)))
    with path.open("ab") as file:
        file.write(b'{"foreign": 1}\n\xff\xfe\n{"trial": {"recipe": "dig\n')
        file.write(b'{"fingerprint": [], "recipe": 1}\n' + b"[" * 100_000 + b"\n")
    Ledger(path, [RECIPE]).append(made_up(replace(TRIAL, k=4.0)))
    again = Ledger(path, [RECIPE])
    assert {trial.k for trial in again} == {2.0, 4.0}
    assert len(again.set_aside) == 4
    assert "not the outcome" in again.set_aside[0]
    assert b'{"foreign": 1}' in path.read_bytes()


@pytest.mark.parametrize("lines", [0, 2])
@pytest.mark.parametrize("rest", [b'{"trial": {"data": "dig', b"\0" * 500, b"\xff", b"{"])
def test_a_truncated_line_is_removed_by_the_next_append(
    lines: int, rest: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "ledger.jsonl"
    outcomes = [made_up(replace(TRIAL, k=k)) for k in (2.0, 4.0, 8.0)]
    head = json.dumps({"fingerprint": RECIPE.fingerprint, "recipe": RECIPE.to_json()})
    whole = "".join(f"{line}\n" for line in [head, *map(line_of, outcomes[:lines])]).encode()
    path.write_bytes(whole + rest)
    ledger = Ledger(path, [RECIPE])
    assert len(ledger) == lines
    assert path.read_bytes() == whole + rest  # reading leaves it unchanged
    ledger.append(outcomes[2])
    assert path.read_bytes() == whole + line_of(outcomes[2]).encode() + b"\n"
    assert len(Ledger(path, [RECIPE])) == len(pandas.read_json(path, lines=True)) - 1 == lines + 1
    assert not Ledger(path, [RECIPE]).set_aside


@pytest.mark.parametrize("last", [line_of(made_up(TRIAL)), '{"of": "a later version"}'])
def test_a_last_line_that_is_whole_stays(last: str, tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_text(last)
    outcome = made_up(replace(TRIAL, k=4.0))
    Ledger(path, [RECIPE]).append(outcome)
    first, head, second = path.read_text().splitlines()
    assert (first, second) == (last, line_of(outcome))
    assert json.loads(head)["recipe"] == {"kind": "mlp", **RECIPE.fields()}


def test_outcomes_of_another_recipe_or_search_are_set_aside(tmp_path: Path) -> None:
    protocol = Protocol(RECIPE, initial_rate=0.1)
    mine, *_, other = protocol.wanted({})
    of_other_k = replace(mine, k=3.0)  # a later range may include it
    path = tmp_path / "ledger.jsonl"
    recipes = [replace(RECIPE, **change) for change in OTHER_RECIPES]
    for trial in (
        mine,
        other,
        of_other_k,
        replace(mine, split=Split(plan=7)),
        *(replace(mine, recipe=recipe) for recipe in recipes),
    ):
        Ledger(path, [RECIPE, *recipes]).append(made_up(trial))
    ledger = Ledger(path, protocol.recipes, protocol.admits)
    assert set(ledger) == {mine, other, of_other_k}
    assert not protocol.covers(of_other_k)
    told = ledger.set_aside
    assert "another search" in told[0]
    assert told[1].endswith(f"a trial with another recipe, {recipes[0].fingerprint}")
    assert len(told) == 1 + len(recipes)
    assert len(Ledger(path, [RECIPE, *recipes])) == 4 + len(recipes)
    for trial in [*Protocol(RECIPE).wanted({}), *protocol.retrainings_of(0.5, 0.1)]:
        assert Protocol(RECIPE).covers(trial)


OTHER_RECIPES: list[dict[str, Any]] = [
    {"momentum": 0.5},
    {"data": "other"},
    {"data_hash": "0123456789abcdef"},
    {"stratified": True},
    {"clip": 100.0},
    {"optimizer": "adam"},
    {"optimizer": "adam", "weight_decay": 0.1},
    {"schedule": "cosine"},
    {"stop_by": "error and cross-entropy"},
    {"bins": 16},
    {"sample": 1000},
]


def test_a_recipe_is_written_once(tmp_path: Path) -> None:
    protocol = Protocol(RECIPE, repetitions=1, retrainings=1)
    path = tmp_path / "run" / "ledger.jsonl"
    finished(protocol, path.parent)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    heads = [line for line in lines if "recipe" in line]
    assert [line["fingerprint"] for line in heads] == [
        recipe.fingerprint for recipe in protocol.recipes
    ]
    assert lines[0] == heads[0]
    assert {line["trial"]["recipe"] for line in lines if "trial" in line} == {
        line["fingerprint"] for line in heads
    }


def test_settings_as_by_default_are_not_in_a_fingerprint() -> None:
    """So a setting added later does not change the recipes of committed ledgers."""
    assert RECIPE.fingerprint == "9c6dd9058aeb"
    assert MLPRecipe("digits", (400,), optimizer="sgd", clip=None) == RECIPE
    committed = MLPRecipe(
        "cifar10", (400,), "679a0a54bc26fa54", momentum=0.5, activation="tanh", patience=5,
        max_epochs=5,
    )  # fmt: skip
    assert committed.fingerprint == "e64271fc7e7b"
    different = {replace(RECIPE, **change).fingerprint for change in OTHER_RECIPES}
    assert len(different | {RECIPE.fingerprint}) == 1 + len(OTHER_RECIPES)


@pytest.mark.parametrize("change", [{"error": None}, {"epochs": "7"}, {"stop_error": 1.5}])
def test_lines_with_impossible_figures_are_set_aside(change: dict[str, object]) -> None:
    line = outcome_to_json(made_up(TRIAL))
    with pytest.raises(ValueError, match="not the outcome of a trial"):
        outcome_from_json(line | change, RECIPES)


def test_a_ledger_is_kept_to_one_process(tmp_path: Path) -> None:
    pytest.importorskip("fcntl", reason="needs POSIX's locks")
    path = tmp_path / "ledger.jsonl"
    busy = pytest.raises(BlockingIOError, match="another process is using")
    with locked(path), busy, locked(path):
        pass
    with locked(path):
        pass


def test_ledgers_are_merged_by_concatenation(tmp_path: Path) -> None:
    parts = []
    for name, k in (("a", 2.0), ("b", 4.0)):
        Ledger(tmp_path / name, [RECIPE]).append(made_up(replace(TRIAL, k=k)))
        parts.append((tmp_path / name).read_bytes())
    (tmp_path / "both").write_bytes(b"".join(parts))
    both = Ledger(tmp_path / "both", [RECIPE])
    assert {trial.k for trial in both} == {2.0, 4.0}
    assert not both.set_aside


def test_finished_trials_are_not_run_again(tmp_path: Path) -> None:
    protocol = Protocol(RECIPE, initial_rate=0.1, repetitions=3)
    whole = finished(protocol)
    asked: list[Trial] = []

    def stops_after(count: int) -> Callable[[Trial], Outcome]:
        def outcome_of(trial: Trial) -> Outcome:
            if len(asked) == count:
                raise KeyboardInterrupt
            asked.append(trial)
            return made_up(trial)

        return outcome_of

    with pytest.raises(KeyboardInterrupt):
        Study(tmp_path / "run", protocol).run(a_runner(stops_after(50)))
    study = finished(protocol, tmp_path / "run", stops_after(10**6))
    assert len(asked) == len(set(asked)) == len(whole.ledger)
    assert study.result == whole.result == Study.open(tmp_path / "run").result


# --- the loop --------------------------------------------------------------------------------


def test_a_study_stops_on_request(tmp_path: Path) -> None:
    protocol = Protocol(RECIPE, initial_rate=0.1, repetitions=3)
    study = Study(tmp_path / "run", protocol)
    assert not study.run(a_runner(made_up), stop=lambda: len(study.ledger) >= 40)
    assert len(study.ledger) == 40
    assert not study.finished
    assert study.sessions[-1]["trials"] == 40
    assert Study(tmp_path / "run", protocol).run(a_runner(made_up))


def test_new_trials_join_the_queue_while_a_runner_works() -> None:
    """A k whose rates must be extended does not wait for the others."""
    seen: list[Progress] = []
    runs = []

    def runner(trials: deque[Trial], stop: Stop) -> Iterator[Outcome]:
        runs.append(len(trials))
        for trial in taken(trials, stop):
            yield made_up(trial, best_rate=1.6)

    study = Study(None, Protocol(RECIPE, initial_rate=0.1, repetitions=2, retrainings=3))
    study.run(runner, watch=seen.append)
    assert runs == [7 * 3 * 2, 2 * 3]  # one queue for the search, and one for the retraining
    assert [progress.done for progress in seen] == [*range(1, len(study.ledger) + 1)]
    assert seen[-1].total == len(study.ledger)
    assert {progress.stage for progress in seen} == {"search", "retraining"}


def test_ask_and_tell(tmp_path: Path) -> None:
    recipe = OwnRecipe("a network of mine")
    protocol = Protocol(recipe, initial_rate=0.1, repetitions=2, retrainings=2)
    study = Study(tmp_path / "run", protocol)
    for done, trial in enumerate(study):
        study.tell(trial, error=made_up(trial).error)
        if done == 30:
            break
    again = Study(tmp_path / "run", protocol)
    for trial in again:
        assert trial not in study.ledger
        again.tell(trial, error=made_up(trial).error, wrong=made_up(trial).wrong)
    found = again.result
    assert (found.chosen.k, found.chosen.learning_rate) == (0.5, 0.1)
    assert math.isnan(found.comparison.cross_entropy.mean)
    assert [one["trials"] for one in again.sessions] == [31, len(again.ledger) - 31]
    assert Study.open(tmp_path / "run").result.chosen == found.chosen


def test_asked_trials_are_all_different_and_must_be_told() -> None:
    study = Study(None, Protocol(OwnRecipe("mine"), ks=(1.0,), initial_rate=0.1, repetitions=2))
    asked = [study.ask() for _ in range(7)]
    assert len(set(asked)) == 7
    assert asked[-1] is None
    with pytest.raises(RuntimeError, match="6 trials ended without an outcome"):
        list(study)


@pytest.mark.parametrize("error", [None, math.nan, -0.1, 3.2])
def test_errors_must_be_fractions(error: float | None) -> None:
    study = Study(None, Protocol(OwnRecipe("mine"), initial_rate=0.1))
    with pytest.raises(ValueError, match=r"error must be a fraction in \[0, 1\]"):
        study.tell(TRIAL, error=error)


def test_values_that_no_training_gives_are_refused() -> None:
    study = Study(None, Protocol(OwnRecipe("mine"), initial_rate=0.1))
    with pytest.raises(ValueError, match=r"not '0\.3'"):
        study.tell(TRIAL, error="0.3")  # type: ignore[arg-type]
    for no_indices in ([0.5], 5, torch.tensor(5)):
        with pytest.raises(ValueError, match="wrong must hold indices of test examples, whole"):
            study.tell(TRIAL, error=0.3, wrong=no_indices)  # type: ignore[arg-type]
    for mask in ([True, False], torch.tensor([True, False]), np.array([True, False])):
        with pytest.raises(ValueError, match="not booleans: use torch"):
            study.tell(TRIAL, error=0.3, wrong=mask)
    with pytest.raises(ValueError, match="wrong must hold the index of a test example once"):
        study.tell(TRIAL, error=0.3, wrong=[2, 5, 2])
    with pytest.raises(ValueError, match=r"error must be a fraction .*, not array\(\[0"):
        study.tell(TRIAL, error=np.array([0.1, 0.2]))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"outcome must be an Outcome, not 0\.3: give error="):
        study.tell(TRIAL, 0.3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"trial must be one that ask\(\) returned, not 'x'"):
        study.tell("x", error=0.3)  # type: ignore[arg-type]


def test_untold_trials_are_offered_again() -> None:
    study = Study(None, Protocol(OwnRecipe("mine"), ks=(1.0,), initial_rate=0.1, repetitions=2))
    for trial in study:
        left = trial
        break
    asked = []
    for trial in study:
        asked.append(trial)
        study.tell(trial, error=made_up(trial).error, epochs=np.int64(3))  # type: ignore[arg-type]
    assert left in asked
    assert study.finished


def test_a_study_may_end_with_its_choice() -> None:
    study = finished(Protocol(RECIPE, ks=(2.0, 0.5), initial_rate=0.1, retrainings=0))
    assert (study.best.k, study.best.learning_rate) == (0.5, 0.1)
    with pytest.raises(ValueError, match=r"retrainings=0 compares nothing: read study\.best"):
        _ = study.result
    with pytest.raises(ValueError, match="has all its trials yet"):
        _ = Study(None, Protocol(RECIPE)).best


def test_every_trial_that_is_wanted_belongs_to_the_study() -> None:
    protocol = Protocol(RECIPE, ks=(2.0,), repetitions=1, retrainings=0)
    outcomes: dict[Trial, Outcome] = {}
    while wanted := protocol.wanted(outcomes):
        assert all(map(protocol.covers, wanted))
        outcomes |= {trial: made_up(trial) for trial in wanted}


def test_equal_settings_have_equal_fingerprints() -> None:
    whole: dict[str, Any] = {"clip": 1, "feature_range": (0, 1), "momentum": 0}
    assert replace(RECIPE, **whole) == replace(RECIPE, clip=1.0, feature_range=(0.0, 1.0))


def test_no_test_over_examples_without_their_mistakes() -> None:
    found = compare([replace(made_up(TRIAL), wrong=None)], [made_up(TRIAL)])
    assert math.isnan(found.mcnemar_p)
    assert math.isnan(found.sign_p)


def test_only_trials_of_the_study_are_told() -> None:
    study = Study(None, Protocol(OwnRecipe("mine"), initial_rate=0.1))
    with pytest.raises(ValueError, match="trial must be one that this study asks for"):
        study.tell(TRIAL, error=0.1)
    asked = study.ask()
    assert asked is not None
    with pytest.raises(ValueError, match="outcome must be that of Trial"):
        study.tell(asked, made_up(TRIAL))


def test_a_trial_is_told_once(tmp_path: Path) -> None:
    protocol = Protocol(OwnRecipe("mine"), initial_rate=0.1)
    for folder in (None, tmp_path / "run"):
        study = Study(folder, protocol)
        trial = study.ask()
        assert trial is not None
        study.tell(trial, error=0.1)
        with pytest.raises(ValueError, match=r"^trial must be one without an outcome"):
            study.tell(trial, error=0.2)
        assert [outcome.error for outcome in study.ledger.values()] == [0.1]


def test_own_training_needs_learning_rates() -> None:
    with pytest.raises(ValueError, match="initial_rate or learning_rates must be given"):
        Protocol(OwnRecipe("mine"))


def test_a_folder_of_another_study_is_refused(tmp_path: Path) -> None:
    first = Study(tmp_path / "run", Protocol(RECIPE, initial_rate=0.2), {"name": "mine"})
    first = Study(tmp_path / "run", Protocol(RECIPE, initial_rate=0.1), {"name": "mine"})
    with first.session("", []):  # until its first trial, it may still be changed
        pass
    refused: list[tuple[MLPRecipe, dict[str, Any], dict[str, str], str]] = [
        (replace(RECIPE, momentum=0.5), {}, {"name": "mine"}, "momentum was 0.0, is now 0.5"),
        (RECIPE, {"seed": 1}, {"name": "mine"}, "seed was 0, is now 1"),
        (RECIPE, {}, {"name": "other"}, "a run on other data, called 'mine'"),
    ]
    for recipe, settings, data, said in refused:
        with pytest.raises(ValueError, match=said):
            Study(tmp_path / "run", Protocol(recipe, initial_rate=0.1, **settings), data)


def test_a_run_resumes_if_only_notes_on_columns_changed(tmp_path: Path) -> None:
    protocol = Protocol(RECIPE, initial_rate=0.1)
    data = {"name": "mine", "sha256": "ab", "columns": "of old", "notes": {"columns": []}}
    first = Study(tmp_path / "run", protocol, data)
    with first.session("", []):
        pass
    again = Study(tmp_path / "run", protocol, data | {"columns": "of new", "notes": {}})
    assert again.sessions
    assert again.fingerprint == first.fingerprint  # a finished run keeps its model
    with pytest.raises(ValueError, match="other data"):
        Study(tmp_path / "run", protocol, data | {"sha256": "cd"})
