"""The protocol, the ledger and the comparison, mostly in a made-up world without training."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterable, Iterator
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
from pseudograd.fleet import Fleet, Outcome, Split, Trial
from pseudograd.search import (
    DEEP_KS,
    SHALLOW_KS,
    Cell,
    Ledger,
    Protocol,
    Run,
    advance,
    compare,
    load_model,
    paired_difference,
    result,
    tune,
)
from pseudograd.search.comparison import ByClass
from pseudograd.search.ledger import from_line, to_line

TEMPLATE = Trial("digits", (400,), k=1, learning_rate=1)


def made_up(trial: Trial, best_k: float = 0.5, best_rate: float = 0.1) -> Outcome:
    """An error that grows with the distance from (best_k, best_rate), and with the repetition."""
    distance = abs(math.log2(trial.k / best_k)) + abs(math.log2(trial.learning_rate / best_rate))
    error = 0.01 * distance + 0.001 * trial.split.repetition + 0.02
    wrong = tuple(range(round(1000 * error))) if trial.split.retrain else None
    return Outcome(trial, error, 3, error, 2 * error, 18, "patience", (0.5, error), wrong)


def finished(protocol: Protocol, path: Path, **world: float) -> Ledger:
    ledger = Ledger(path)
    for _ in advance(protocol, ledger, lambda trials: (made_up(t, **world) for t in trials)):
        pass
    return ledger


def test_lines_are_short_and_complete() -> None:
    plain = Trial("mnist", (400,), k=0.5, learning_rate=0.1, seed=3)
    assert len(to_line(Outcome(plain, 0.02, 12, 0.03, 0.1, 27, "patience", ()))) < 250
    other = replace(plain, split=Split(2, 3, True, True), feature_range=(0.0, 1.0), clip=100.0)
    for trial in (plain, other, replace(other, split=Split(1, test=True), max_epochs=9)):
        for wrong in (None, (), (0,), (7, 8, 15, 16, 9999), tuple(range(0, 26_032, 3))):
            outcome = Outcome(trial, 0.02, 12, 0.03, 0.1, 27, "patience", (0.5, 0.25), wrong)
            assert from_line(to_line(outcome)) == (outcome, None)
    assert len(to_line(outcome)) < 5000


# --- the protocol ----------------------------------------------------------------------------


def test_lists_are_as_good_as_tuples() -> None:
    """Also when a run is resumed, which compares them."""
    expected = Protocol(TEMPLATE, ks=(1.0, 0.5), learning_rates=(0.1,))
    several: list[tuple[Any, Any]] = [([1, 0.5], [0.1]), (np.array([1, 0.5]), np.array([0.1]))]
    for ks, rates in several:
        listed = Protocol(TEMPLATE, ks=ks, learning_rates=rates)
        assert listed == expected
        assert {type(number) for number in listed.ks + listed.learning_rates} == {float}


def test_numbers_of_numpy_become_pythons() -> None:
    numpys: dict[str, Any] = {"initial_rate": np.float32(0.25), "repetitions": np.int64(3),
                              "seed": np.uint8(1)}  # fmt: skip
    protocol = Protocol(TEMPLATE, **numpys)
    assert protocol == Protocol(TEMPLATE, initial_rate=0.25, repetitions=3, seed=1)
    assert {type(getattr(protocol, name)) for name in numpys} == {float, int}


def test_the_papers_ks_follow_the_depth() -> None:
    assert Protocol(TEMPLATE).ks == SHALLOW_KS
    assert Protocol(replace(TEMPLATE, hidden_layer_sizes=(8, 8, 8))).ks == DEEP_KS


def test_first_round_is_three_rates_of_every_k_on_permuted_folds() -> None:
    protocol = Protocol(TEMPLATE, initial_rate=0.1, repetitions=10, seed=3)
    trials = protocol.wanted({})
    assert len(trials) == len(set(trials)) == 7 * 3 * 10
    assert {t.learning_rate for t in trials} == {0.05, 0.1, 0.2}
    assert {t.split for t in trials} == {Split(3, r) for r in range(10)}
    # Weights, order and folds are the same for every pair, so that differences are paired.
    assert len({(t.seed, t.split) for t in trials}) == 10


def test_rates_extend_for_every_k_until_the_best_is_inside(tmp_path: Path) -> None:
    protocol = Protocol(TEMPLATE, initial_rate=0.1, repetitions=2)
    ledger = finished(protocol, tmp_path / "ledger", best_rate=0.1 * 2**3)
    for k in protocol.ks:
        rates = protocol.rates(k, ledger)
        assert rates == [0.1 * 2.0**power for power in range(-1, 5)]
    assert not protocol.open_ks(ledger)
    assert protocol.chosen(ledger)[0].learning_rate == pytest.approx(0.8)


def test_given_rates_are_where_the_search_starts(tmp_path: Path) -> None:
    protocol = Protocol(TEMPLATE, learning_rates=(0.4, 0.1), repetitions=2)
    assert {trial.learning_rate for trial in protocol.wanted({})} == {0.1, 0.4}
    ledger = finished(protocol, tmp_path / "ledger", best_rate=0.4)
    assert protocol.rates(1.0, ledger) == [0.1, 0.4, 0.8]
    with pytest.raises(ValueError, match="initial_rate must be left out"):
        Protocol(TEMPLATE, learning_rates=(0.4,), initial_rate=0.1)
    with pytest.raises(ValueError, match="learning_rates must be different"):
        Protocol(TEMPLATE, learning_rates=(0.4, 0.4))


def test_networks_of_the_choice_are_tested_if_asked(tmp_path: Path) -> None:
    protocol = Protocol(TEMPLATE, initial_rate=0.1, repetitions=4, three_fifths=True)
    ledger = finished(protocol, tmp_path / "ledger")
    chosen, plain = protocol.chosen(ledger)
    tested = {trial for trial in ledger if trial.split.test}
    expected = [t for c in (chosen, plain) for t in protocol.tested_of(c.k, c.learning_rate)]
    assert tested == set(expected)
    assert len(expected) == 8
    for trial in expected:  # the same networks
        assert replace(trial, split=replace(trial.split, test=False)) in ledger
    assert not any(trial.split.test for trial in finished(Protocol(TEMPLATE), tmp_path / "other"))


def test_k_1_is_tried_at_the_rate_of_the_choice_if_it_never_was() -> None:
    """Where each k has a valley of its own, with its end far from the other's."""

    def valley(trial: Trial) -> Outcome:
        best_rate = 1.0 if trial.k == 2 else 0.0625
        return made_up(trial, best_k=2.0, best_rate=best_rate)

    protocol = Protocol(
        TEMPLATE, ks=(2.0, 1.0), initial_rate=0.25, repetitions=2, retrainings=3, control=True
    )
    outcomes: dict[Trial, Outcome] = {}
    rounds = []
    while wanted := protocol.wanted(outcomes):
        rounds.append(wanted)
        outcomes |= {trial: valley(trial) for trial in wanted}
    chosen, plain = protocol.chosen(outcomes)
    assert (chosen.k, chosen.learning_rate, plain.learning_rate) == (2.0, 1.0, 0.0625)
    assert rounds[-1] == protocol.control_trials(outcomes)
    assert {(trial.k, trial.learning_rate) for trial in rounds[-1]} == {(1.0, 1.0)}
    assert [trial.split.retrain for trial in rounds[-1]] == [False] * 2 + [True] * 3
    cell = protocol.control_cell(outcomes)
    assert cell is not None
    assert cell.error == pytest.approx(valley(rounds[-1][0]).error + 0.0005)
    assert cell not in protocol.cells(outcomes)  # it has no part in the choice
    without = replace(protocol, control=False)
    assert not without.control_trials(outcomes)
    assert without.chosen(outcomes) == (chosen, plain)


def test_k_1_is_not_tried_twice_at_a_rate(tmp_path: Path) -> None:
    protocol = Protocol(TEMPLATE, initial_rate=0.1, repetitions=2, control=True)
    outcomes = finished(protocol, tmp_path / "ledger")
    assert protocol.control_trials(outcomes) == []


def test_folds_are_stratified_where_the_template_says_so() -> None:
    template = replace(TEMPLATE, split=Split(plan=9, repetition=8, stratified=True))
    trials = Protocol(template, initial_rate=0.1, seed=3).wanted({})
    assert {trial.split for trial in trials} == {Split(3, r, stratified=True) for r in range(7)}


def test_nothing_is_known_before_the_sweep_is_over() -> None:
    protocol = Protocol(TEMPLATE)
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


def test_a_runner_without_outcomes_is_no_endless_loop(tmp_path: Path) -> None:
    protocol = Protocol(TEMPLATE, initial_rate=0.1)
    with pytest.raises(RuntimeError, match="run gave no outcome of 147 trials, such as Trial"):
        list(advance(protocol, Ledger(tmp_path / "ledger"), lambda trials: iter(())))


def test_a_ledger_holds_no_weights(tmp_path: Path) -> None:
    ledger, weights = Ledger(tmp_path / "ledger"), ((torch.zeros(2, 2), torch.zeros(2)),)
    ledger.append(replace(made_up(TEMPLATE), parameters=weights))
    assert ledger[TEMPLATE].parameters is None


def test_equal_errors_do_not_extend_the_rates(tmp_path: Path) -> None:
    """Where there are none: the smallest rate would otherwise be halved for ever."""
    protocol = Protocol(TEMPLATE, repetitions=3)

    def easy(trials: Iterable[Trial]) -> Iterator[Outcome]:
        for trial in trials:
            value = abs(trial.learning_rate - 0.25)
            yield replace(made_up(trial), stop_error=0.0, error=0.0, cross_entropy=value)

    ledger = Ledger(tmp_path / "ledger")
    list(advance(protocol, ledger, easy))
    assert {len(protocol.rates(k, ledger)) for k in protocol.ks} == {3}
    assert protocol.first_rate(ledger) == 0.25  # of equals, the one that learned most
    assert not protocol.open_ks(ledger)
    chosen, plain = protocol.chosen(ledger)
    assert chosen == plain
    assert chosen.learning_rate == 0.125
    assert len(protocol.ties(ledger)) == 20


def test_rates_go_down_where_nothing_was_learned(tmp_path: Path) -> None:
    """Networks that collapse make equal errors, too: those of always naming one class."""
    protocol = Protocol(TEMPLATE, initial_rate=0.4, repetitions=2)

    def fragile(trials: Iterable[Trial]) -> Iterator[Outcome]:
        for trial in trials:
            if trial.k == 0.25 and trial.learning_rate > 0.06:
                yield replace(made_up(trial), error=0.811, cross_entropy=2.2)
            else:
                yield made_up(trial, best_rate=0.4 if trial.k != 0.25 else 0.025)

    ledger = Ledger(tmp_path / "ledger")
    list(advance(protocol, ledger, fragile))
    assert protocol.rates(0.25, ledger) == pytest.approx([0.0125, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8])
    assert protocol.rates(1.0, ledger) == pytest.approx([0.2, 0.4, 0.8])


def test_rates_go_down_past_one_that_is_worse_than_nothing(tmp_path: Path) -> None:
    """Where the best networks still name one class alone, and one at a lower rate is no better."""
    protocol = Protocol(TEMPLATE, ks=(1.0,), initial_rate=0.4, repetitions=2)

    def fragile(trials: Iterable[Trial]) -> Iterator[Outcome]:
        for trial in trials:
            error = {0.2: 0.5, 0.4: 0.4, 0.8: 0.4}.get(trial.learning_rate, trial.learning_rate)
            yield replace(made_up(trial), error=error, cross_entropy=1.0)

    ledger = Ledger(tmp_path / "ledger")
    list(advance(protocol, ledger, fragile))
    assert len(protocol.rates(1.0, ledger)) == 3 + protocol.most_extensions
    assert protocol.chosen(ledger)[1].learning_rate < 0.2


def test_rates_go_down_where_the_lowest_is_among_the_best(tmp_path: Path) -> None:
    """It would be taken, and one below it may be better."""
    protocol = Protocol(TEMPLATE, ks=(1.0,), initial_rate=0.4, repetitions=2)

    def alike(trials: Iterable[Trial]) -> Iterator[Outcome]:
        for trial in trials:
            error = {0.05: 0.3, 0.1: 0.1, 0.8: 0.3}.get(trial.learning_rate, 0.2)
            yield replace(made_up(trial), error=error)

    ledger = Ledger(tmp_path / "ledger")
    list(advance(protocol, ledger, alike))
    assert protocol.rates(1.0, ledger) == [0.05, 0.1, 0.2, 0.4, 0.8]
    assert protocol.chosen(ledger)[1].learning_rate == 0.1


def test_equal_numbers_of_mistakes_are_equal_errors() -> None:
    """However they are spread: the floats of n/287 do not add up to the last bit."""
    chance = random.Random(0)
    for _ in range(200):
        mistakes = [chance.randrange(20) for _ in range(7)]
        first = Cell(1.0, 0.1, tuple(n / 287 for n in mistakes))
        chance.shuffle(mistakes)
        mistakes[0], mistakes[1] = mistakes[0] + 1, mistakes[1] - 1
        second = Cell(1.0, 0.1, tuple(n / 287 for n in mistakes))
        assert first.error == second.error


def test_the_sweep_keeps_to_the_limit_of_epochs() -> None:
    protocol = Protocol(replace(TEMPLATE, max_epochs=2))
    assert {trial.max_epochs for trial in protocol.wanted({})} == {2}
    assert {trial.max_epochs for trial in Protocol(TEMPLATE).wanted({})} == {5}
    with pytest.raises(ValueError, match="seed must be a whole number"):
        Protocol(TEMPLATE, seed=2**32)


def test_the_limit_of_extensions_is_kept_and_reported(tmp_path: Path) -> None:
    protocol = Protocol(TEMPLATE, initial_rate=0.1, repetitions=1, most_extensions=2)
    ledger = finished(protocol, tmp_path / "ledger", best_rate=1e-6)
    assert protocol.rates(1.0, ledger) == [0.0125, 0.025, 0.05, 0.1, 0.2]
    assert protocol.open_ks(ledger) == list(protocol.ks)


def test_the_sweep_finds_the_initial_rate_with_few_epochs(tmp_path: Path) -> None:
    protocol = Protocol(TEMPLATE, repetitions=1)
    sweep = protocol.wanted({})
    assert {t.k for t in sweep} == {1.0}
    assert max(t.max_epochs for t in sweep) == 5
    ledger = finished(protocol, tmp_path / "ledger", best_rate=0.06)
    assert protocol.first_rate(ledger) == 4.0**-2


def test_selection_is_the_argmin_of_the_mean_validation_error(tmp_path: Path) -> None:
    protocol = Protocol(TEMPLATE, initial_rate=0.1, repetitions=4)
    ledger = finished(protocol, tmp_path / "ledger", best_k=0.25, best_rate=0.1)
    best, plain = protocol.chosen(ledger)
    assert (best.k, best.learning_rate) == (0.25, 0.1)
    assert (plain.k, plain.learning_rate) == (1.0, 0.1)
    assert best.error == pytest.approx(0.02 + 0.001 * 1.5)
    assert best.standard_error == pytest.approx(scipy.stats.sem([0, 0.001, 0.002, 0.003]))


def test_ties_go_to_the_k_nearest_1_then_to_the_smaller_rate(tmp_path: Path) -> None:
    protocol = Protocol(TEMPLATE, initial_rate=0.1, repetitions=1)

    def level(trials: Iterable[Trial]) -> Iterator[Outcome]:
        for trial in trials:
            inside = trial.k in (0.5, 0.25) and trial.learning_rate in (0.1, 0.05)
            yield replace(made_up(trial), error=0.1 if inside else 0.2)

    ledger = Ledger(tmp_path / "ledger")
    list(advance(protocol, ledger, level))
    best, _ = protocol.chosen(ledger)
    assert (best.k, best.learning_rate) == (0.5, 0.05)
    assert {(c.k, c.learning_rate) for c in protocol.ties(ledger)} == {
        (0.5, 0.1), (0.25, 0.05), (0.25, 0.1)
    }  # fmt: skip


def test_the_test_set_is_read_by_the_final_trials_alone(tmp_path: Path) -> None:
    protocol = Protocol(TEMPLATE, initial_rate=0.1, repetitions=2, retrainings=3)
    ledger = finished(protocol, tmp_path / "ledger")
    final = [trial for trial in ledger if trial.split.retrain]
    assert len(final) == 2 * 3
    assert {(t.k, t.learning_rate) for t in final} == {(0.5, 0.1), (1.0, 0.1)}
    found = result(protocol, ledger)
    assert [o.trial.k for o in found.comparison.chosen] == [0.5] * 3


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"ks": (2.0, 0.5)}, "ks"),
        ({"ks": (1.0, 1.0)}, "ks"),
        ({"repetitions": 0}, "repetitions"),
        ({"retrainings": 0}, "retrainings"),
        ({"repetitions": 2.5}, "repetitions must be a whole number, not 2.5"),
        ({"seed": 1.5}, "seed must be a whole number, not 1.5"),
    ],
)
def test_bad_settings_are_named(change: dict[str, object], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        Protocol(TEMPLATE, **change)  # type: ignore[arg-type]


def test_an_unfinished_search_has_no_result(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not finished"):
        result(Protocol(TEMPLATE, initial_rate=0.1), Ledger(tmp_path / "ledger"))


# --- the comparison --------------------------------------------------------------------------


def test_paired_difference_is_students() -> None:
    first, second = [0.1, 0.13, 0.12, 0.18], [0.12, 0.13, 0.15, 0.19]
    found = paired_difference(first, second)
    expected = scipy.stats.ttest_rel(first, second).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))


def test_mcnemar_counts_predictions_that_only_one_got_right() -> None:
    def outcome(wrong: set[int]) -> Outcome:
        return replace(made_up(replace(TEMPLATE, split=Split(retrain=True))), wrong=tuple(wrong))

    found = compare(
        [outcome({1, 2, 3}), outcome({9})], [outcome({3, 4, 5, 6, 7}), outcome({9, 10, 11})]
    )
    assert (found.only_plain_right, found.only_chosen_right) == (2, 6)
    assert found.mcnemar_p == pytest.approx(scipy.stats.binomtest(2, 8).pvalue)


def test_an_example_counts_once_in_the_sign_test() -> None:
    def outcome(*wrong: int) -> Outcome:
        return replace(made_up(replace(TEMPLATE, split=Split(retrain=True))), wrong=wrong)

    # Five pairs that all differ on the same two examples are no more than one such pair.
    found = compare([outcome(1)] * 5, [outcome(1, 2, 3)] * 5)
    assert found.mcnemar_p == pytest.approx(scipy.stats.binomtest(0, 10).pvalue)
    assert (found.better_on, found.worse_on, found.sign_p) == (2, 0, 0.5)
    # What one pair gains and another loses is neither.
    found = compare([outcome(1, 5), outcome(5)], [outcome(2, 5), outcome(1, 7)])
    assert (found.better_on, found.worse_on) == (2, 1)  # 2 and 7; 5; and 1 is even
    assert found.sign_p == 1


# --- the folder ------------------------------------------------------------------------------


def test_errors_of_the_model_are_counted_by_class(tmp_path: Path) -> None:
    """A network that answers "no" to everything, which is right 19 times of 20."""
    path = tmp_path / "fraud.csv"
    rows = [f"{at * 7919 % 101},{'yes' if at % 20 == 0 else 'no'}" for at in range(200)]
    path.write_text("\n".join(["amount,fraud", *rows]))
    data, encoder = open_data(str(path), target="fraud")
    template = Trial(data.name, (4,), k=1, learning_rate=1, batch_size=32, max_epochs=5)
    protocol = Protocol(template, ks=(1.0,), initial_rate=0.1, repetitions=1, retrainings=2)
    run = Run.prepare(tmp_path / "run", protocol, data, encoder)
    found = tune(run, data, encoder, Fleet(data, keep_parameters=True).run)
    network, _ = load_model(run.folder)
    answers = network.logits(data.features[data.train_size :]).argmax(1)
    assert set(answers.tolist()) == {0}
    assert found.comparison.by_class == (ByClass("no", 38, 0), ByClass("yes", 2, 2))
    assert run.examples is not None
    assert [ByClass(**one) for one in run.examples["by_class"]] == [*found.comparison.by_class]


def test_the_sessions_that_ran_trials_are_credited(tmp_path: Path) -> None:
    data, encoder = open_data("digits")
    run = Run.prepare(tmp_path / "run", Protocol(TEMPLATE, initial_rate=0.1), data, encoder)
    with pytest.raises(ValueError, match="never started"):
        _ = run.about
    for command, device, commit, trials in (
        ("looked first", "cpu", "c0", 0),
        ("began", "cuda:0", "c1", 7),
        ("went on", "cpu", "c2", 9),
        ("began", "cuda:0", "c1", 2),
        ("looked again", "mps", "c3", 0),
    ):
        with run.session(command, []) as noted:
            noted |= {"devices": [device], "commit": commit, "hardware": f"of {device}"}
            noted |= {"trials": trials, "versions": {"pseudograd": "0.1.0", "torch": f"2.{trials}"}}
            noted |= {"started": f"2026-01-0{len(run.sessions)}T12:00:00+00:00"}
    about = Run.open(run.folder).about
    assert about["command"] == "began\nwent on"
    assert about["commit"] == "c1, c2"
    assert about["hardware"] == "of cuda:0; of cpu"
    assert about["devices"] == ["cuda:0", "cpu"]
    assert about["versions"] == {"pseudograd": "0.1.0", "torch": "2.7 and 2.9 and 2.2"}
    assert about["started"] == "2026-01-01T12:00:00+00:00"
    assert about["seconds"] == pytest.approx(sum(one["seconds"] for one in run.sessions))


def test_a_session_of_another_process_is_not_forgotten(tmp_path: Path) -> None:
    data, encoder = open_data("digits")
    run, other = (
        Run.prepare(tmp_path / "run", Protocol(TEMPLATE, initial_rate=0.1), data, encoder)
        for _ in range(2)
    )
    with other.session("first", []) as noted:
        noted["trials"] = 7
    with run.session("second", []):
        pass
    told = [(one["command"], one["trials"]) for one in Run.open(run.folder).sessions]
    assert told == [("first", 7), ("second", 0)]


# --- the ledger ------------------------------------------------------------------------------


def test_outcomes_come_back_as_they_were(tmp_path: Path) -> None:
    outcomes = [
        made_up(replace(TEMPLATE, k=1 / 16, split=Split(1, 2, retrain=True), clip=100.0)),
        replace(made_up(replace(TEMPLATE, k=3.3)), cross_entropy=math.inf, stopped_by="diverged"),
    ]
    ledger = Ledger(tmp_path / "runs" / "ledger.jsonl")
    for outcome in outcomes:
        ledger.append(outcome)
    again = Ledger(ledger.path)
    assert list(again.values()) == outcomes == list(ledger.values())
    assert not again.set_aside


def test_torn_and_foreign_lines_are_reported_and_cost_nobody_else(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    ledger.append(made_up(replace(TEMPLATE, k=2.0)))
    with path.open("ab") as file:
        file.write(b'{"foreign": 1}\n\xff\xfe\n{"trial": {"data": "dig\n')
    Ledger(path).append(made_up(replace(TEMPLATE, k=4.0)))
    again = Ledger(path)
    assert {trial.k for trial in again} == {2.0, 4.0}
    assert [line.number for line in again.set_aside] == [2, 3, 4]
    assert "not the outcome" in str(again.set_aside[0])
    assert b'{"foreign": 1}' in path.read_bytes()


@pytest.mark.parametrize("lines", [0, 2])
@pytest.mark.parametrize("rest", [b'{"trial": {"data": "dig', b"\0" * 500, b"\xff", b"{"])
def test_what_was_cut_off_goes_when_the_next_line_is_written(
    lines: int, rest: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "ledger.jsonl"
    outcomes = [made_up(replace(TEMPLATE, k=k)) for k in (2.0, 4.0, 8.0)]
    whole = "".join(f"{to_line(outcome)}\n" for outcome in outcomes[:lines]).encode()
    path.write_bytes(whole + rest)
    ledger = Ledger(path)
    assert [line.number for line in ledger.set_aside] == [lines + 1]
    assert path.read_bytes() == whole + rest  # to read it is to leave it alone
    ledger.append(outcomes[2])
    assert path.read_bytes() == whole + to_line(outcomes[2]).encode() + b"\n"
    assert len(Ledger(path)) == len(pandas.read_json(path, lines=True)) == lines + 1
    assert not Ledger(path).set_aside


@pytest.mark.parametrize("last", [to_line(made_up(TEMPLATE)), '{"of": "a later version"}'])
def test_a_last_line_that_is_whole_stays(last: str, tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_text(last)
    outcome = made_up(replace(TEMPLATE, k=4.0))
    Ledger(path).append(outcome)
    assert path.read_text() == f"{last}\n{to_line(outcome)}\n"


def test_lines_of_other_data_or_of_another_search_are_set_aside(tmp_path: Path) -> None:
    protocol = Protocol(TEMPLATE, initial_rate=0.1)
    mine, *_, other = protocol.wanted({})
    path = tmp_path / "ledger.jsonl"
    Ledger(path, "a" * 64).append(made_up(mine))
    Ledger(path, "b" * 64).append(made_up(other))
    Ledger(path).append(made_up(other))
    for foreign in (
        replace(mine, momentum=0.5),
        replace(mine, k=3.0),
        replace(mine, data="other"),
        replace(mine, split=Split(plan=7)),
        replace(mine, split=Split(stratified=True)),
    ):
        Ledger(path, "a" * 64).append(made_up(foreign))
    ledger = Ledger(path, "a" * 64, protocol.covers)
    assert set(ledger) == {mine, other}
    told = [str(line) for line in ledger.set_aside]
    assert told[0] == "line 2 is set aside: it is of other data, whose hash begins with " + "b" * 16
    assert [line.number for line in ledger.set_aside[1:]] == [4, 5, 6, 7, 8]
    assert all("another search" in line for line in told[1:])
    assert len(Ledger(path)) == 7  # without anything to compare with, all are taken
    for trial in [*Protocol(TEMPLATE).wanted({}), *protocol.retrainings_of(0.5, 0.1)]:
        assert protocol.covers(trial)


@pytest.mark.parametrize("change", [{"error": None}, {"epochs": "7"}, {"stop_error": 1.5}])
def test_lines_with_impossible_figures_are_set_aside(change: dict[str, object]) -> None:
    line = json.loads(to_line(made_up(TEMPLATE)))
    with pytest.raises(ValueError, match="not the outcome of a trial"):
        from_line(json.dumps(line | change))


def test_a_ledger_is_kept_to_one_process(tmp_path: Path) -> None:
    pytest.importorskip("fcntl", reason="needs POSIX's locks")
    path = tmp_path / "ledger.jsonl"
    busy = pytest.raises(BlockingIOError, match="another process is at work on")
    with locked(path), busy, locked(path):
        pass
    with locked(path):
        pass


def test_ledgers_are_merged_by_concatenation(tmp_path: Path) -> None:
    parts = []
    for name, k in (("a", 2.0), ("b", 4.0)):
        ledger = Ledger(tmp_path / name)
        ledger.append(made_up(replace(TEMPLATE, k=k)))
        parts.append(ledger.path.read_bytes())
    (tmp_path / "both").write_bytes(b"".join(parts))
    assert {trial.k for trial in Ledger(tmp_path / "both")} == {2.0, 4.0}


def test_what_is_known_is_not_run_again(tmp_path: Path) -> None:
    protocol = Protocol(TEMPLATE, initial_rate=0.1, repetitions=3)
    whole = finished(protocol, tmp_path / "whole")
    asked: list[Trial] = []

    def stops_after(count: int) -> Callable[[Iterable[Trial]], Iterator[Outcome]]:
        def run(trials: Iterable[Trial]) -> Iterator[Outcome]:
            for trial in trials:
                if len(asked) == count:
                    raise KeyboardInterrupt
                asked.append(trial)
                yield made_up(trial)

        return run

    path = tmp_path / "interrupted"
    with pytest.raises(KeyboardInterrupt):
        list(advance(protocol, Ledger(path), stops_after(50)))
    list(advance(protocol, Ledger(path), stops_after(10**6)))
    assert len(asked) == len(set(asked)) == len(whole)
    assert result(protocol, Ledger(path)) == result(protocol, whole)
