"""The paper's rows and the trials they need."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paper.protocol import PaperProtocol
from paper.rows import Experiment, Row, experiments, in_turn, paper_rows, rows, select
from pseudograd.fleet import MLPRecipe, Outcome, Trial
from pseudograd.fleet.ramp import level
from pseudograd.search import DEEP_KS, SHALLOW_KS, Protocol


def test_the_papers_rows_are_all_there() -> None:
    printed = rows()
    assert len(printed) == 67
    assert len({row.name for row in paper_rows()}) == len(paper_rows()) == 94
    by_data = {data: sum(row.data == data for row in printed) for data in ("mnist", "cifar10")}
    assert by_data == {"mnist": 19, "cifar10": 17}
    assert {row.hidden_layers: row for row in printed}.keys() == {1, 3, 5}
    # The paper prints no figures exactly where it selects 1.
    assert all((row.selected_k == 1) == (row.error_k1_pct is None) for row in printed)


def test_the_papers_choices_in_the_documents_are_those_of_its_tables() -> None:
    page = Path(__file__).parents[2].joinpath("docs/when-k-helps.md").read_text(encoding="utf-8")
    shallow, deep = ([row.selected_k for row in rows() if row.hidden_layers == n] for n in (1, 5))
    below, above = sum(k < 1 for k in shallow), sum(k > 1 for k in deep)
    assert f"| 1 ({len(shallow)} experiments) | below 1 in {below}" in page
    assert f"| 5 ({len(deep)}) | above 1 in {above}" in page


def test_protocols_are_the_papers() -> None:
    (shallow,) = [Experiment(row) for row in rows("table1", "mnist 1x400*")]
    (deep,) = [Experiment(row) for row in rows("table4", "cifar100 5x800 m0.9")]
    protocol = shallow.protocol()
    assert (protocol.ks, protocol.repetitions, protocol.retrainings) == (SHALLOW_KS, 10, 5)
    assert protocol.recipe == MLPRecipe("mnist", (400,), momentum=0.5, batch_size=128, patience=15)
    protocol = deep.protocol()
    assert (protocol.ks, protocol.repetitions) == (DEEP_KS, 7)
    assert protocol.recipe == MLPRecipe("cifar100", (800,) * 5, momentum=0.9, clip=100.0)


def test_what_is_run_beside_the_rows() -> None:
    everything = experiments(rows())
    assert len({experiment.name for experiment in everything}) == len(everything) == 67 + 19 + 4
    for experiment in everything:
        recipe = experiment.recipe()
        assert recipe.feature_range[0] == (0 if "[0,1]" in experiment.name else -1)
        assert recipe.activation == ("tanh" if "tanh" in experiment.name else "relu")
    turns = [(one.row.data, not one.as_printed) for one in in_turn(everything)]
    assert [turn for turn, _ in itertools.groupby(turns)] == [
        ("mnist", False), ("cifar10", False), ("svhn", False), ("cifar100", False),
        ("mnist", True), ("cifar10", True),
    ]  # fmt: skip


def test_rows_that_differ_only_in_momentum_follow_each_other() -> None:
    turns = [
        network
        for network, _ in itertools.groupby(
            in_turn(experiments(rows())), key=lambda one: one.network
        )
    ]
    assert len(turns) == len(set(turns))


@pytest.mark.parametrize(("table", "pattern"), [("table2", "*"), ("table1", "mnist 7x7*")])
def test_unknown_rows_are_refused(table: str, pattern: str) -> None:
    with pytest.raises(ValueError, match=r"table must be one of|match no row"):
        rows(table, pattern)


def test_names_as_they_are_printed_select_one_experiment() -> None:
    everything = experiments(rows())
    for experiment in everything:
        assert select(everything, experiment.name) == [experiment]
    assert len(select(everything, "mnist 1x400 m0.5*")) == 3
    assert len(select(everything, "mnist*")) == 2 * 19 + 1
    with pytest.raises(ValueError, match=r"rows 'mnist 1x400 m0.5 sigmoid' match no row"):
        select(everything, "mnist 1x400 m0.5 sigmoid")


def test_patterns_of_what_is_run_beside() -> None:
    everything = experiments(rows())
    tanh, scaled = select(everything, "* tanh"), select(everything, "*[0,1]")
    assert (len(tanh), {experiment.activation for experiment in tanh}) == (4, {"tanh"})
    assert (len(scaled), {experiment.feature_range for experiment in scaled}) == (19, {(0, 1)})
    assert [e.name for e in select(everything, "mnist 1x400 m0.5 [0,1]*")] == [
        "mnist 1x400 m0.5 [0,1]"
    ]


@pytest.mark.parametrize("pattern", ["MNIST*", "mnist 1x400"])
def test_a_refusal_names_what_is_near(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"match no row .*: names are like 'mnist .* m0.*', and"):
        select(experiments(rows()), pattern)


def test_user_defined_rows() -> None:
    own = Experiment(Row("mine", "fashion-mnist", 2, 400, 0.5))
    assert (own.name, own.protocol().ks) == ("fashion-mnist 2x400 m0.5", DEEP_KS)
    as_printed = [one for one in in_turn([own, *experiments(rows())]) if one.as_printed]
    assert as_printed[-1] == own  # variants come after it
    with pytest.raises(ValueError, match=r"data must be one of mnist, .*, not 'iris'"):
        Row("mine", "iris", 1, 400, 0.5)


def test_smoke_is_small() -> None:
    for experiment in experiments(rows()):
        full, small = experiment.protocol(), experiment.smoke()
        assert isinstance(small.recipe, MLPRecipe)
        assert isinstance(full.recipe, MLPRecipe)
        same: dict[str, Any] = {"hidden_layer_sizes": (), "max_epochs": 1, "patience": 1}
        assert replace(small.recipe, **same) == replace(full.recipe, **same)
        assert max(small.recipe.hidden_layer_sizes) <= 44
        assert len(small.wanted({})) == 8


# --- the protocol ------------------------------------------------------------------------------

RECIPE = MLPRecipe("mnist", (400,))


def answered(protocol: Protocol, valley: float = 0.125) -> dict[Trial, Outcome]:
    """Return all outcomes if k = 2 is best at the rate 1, and other k at the rate ``valley``."""
    outcomes: dict[Trial, Outcome] = {}
    while wanted := protocol.wanted(outcomes):
        for trial in wanted:
            best = 1.0 if trial.k == 2 else valley
            distance = abs(trial.learning_rate / best - 1) + abs(level(trial.k) - 2)
            error = 0.02 + 0.01 * distance + 0.001 * trial.split.repetition
            outcomes[trial] = Outcome(trial, error, 1, error, 0.1, 2, "patience", ())
    return outcomes


def test_networks_of_the_choice_are_tested() -> None:
    protocol = PaperProtocol(RECIPE, initial_rate=0.1, repetitions=4)
    outcomes = answered(protocol)
    cells = protocol.chosen(outcomes)
    tested = {trial for trial in outcomes if trial.split.test}
    expected = [t for c in cells for t in protocol.tested_of(c.k, c.learning_rate)]
    assert tested == set(expected)
    assert len(expected) == 8
    for trial in expected:  # the same networks
        assert replace(trial, split=replace(trial.split, test=False)) in outcomes
    assert not any(trial.split.test for trial in answered(protocol.searched))


def test_k_1_is_tried_at_the_rate_of_the_choice_if_it_never_was() -> None:
    """Each k has its own valley, far from the other's."""
    protocol = PaperProtocol(RECIPE, ks=(2.0, 1.0), initial_rate=0.25, repetitions=2, retrainings=3)
    outcomes = answered(protocol, valley=0.0625)
    chosen, plain = protocol.chosen(outcomes)
    assert (chosen.k, chosen.learning_rate, plain.learning_rate) == (2.0, 1.0, 0.0625)
    controls = protocol.control_trials(outcomes)
    assert {(trial.k, trial.learning_rate) for trial in controls} == {(1.0, 1.0)}
    assert [trial.split.retrain for trial in controls] == [False] * 2 + [True] * 3
    assert list(outcomes)[-5:] == controls
    cell = protocol.control_cell(outcomes)
    assert cell is not None
    assert cell.errors == tuple(outcomes[trial].error for trial in controls[:2])
    assert cell not in protocol.cells(outcomes)  # it does not affect the choice
    without = {trial: outcomes[trial] for trial in outcomes if trial not in controls}
    assert protocol.is_searched(without)
    assert protocol.searched.chosen(without) == (chosen, plain)


def test_k_1_is_not_tried_twice_at_a_rate() -> None:
    protocol = PaperProtocol(RECIPE, initial_rate=1.0, repetitions=2)
    outcomes = answered(protocol, valley=1.0)
    assert protocol.control_trials(outcomes) == []
