"""A k that changes during training: its value and text, and how a search handles it."""

from __future__ import annotations

import io
import json
import math
import re
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from sklearn.base import clone
from sklearn.datasets import load_iris

from pseudograd.cli import main
from pseudograd.data import digits, open_data
from pseudograd.estimator import TunableMLPClassifier
from pseudograd.fleet import Fleet, MLPRecipe, Outcome, Ramp, Stop, Trial, k_at
from pseudograd.fleet.ramp import as_k, by_level, level
from pseudograd.report.summary import line_of_run, summary
from pseudograd.search import (
    Bagging,
    Cell,
    Ledger,
    Protocol,
    Study,
    load_model,
    read_assessment,
    study_of,
    tune,
)
from pseudograd.search.display import Display
from pseudograd.search.examples import difficulty
from pseudograd.search.ledger import outcome_from_json, outcome_to_json, trial_to_json
from pseudograd.words import fraction

RECIPE = MLPRecipe("digits", (400,))
TRIAL = Trial(RECIPE, k=1, learning_rate=0.1)


def outcome_of(trial: Trial) -> Outcome:
    return Outcome(trial, 0.02, 12, 0.03, 0.1, 27, "patience", (0.5, 0.1))


# --- the value -------------------------------------------------------------------------------


def test_k_goes_linearly_from_start_to_end() -> None:
    ramp = Ramp(4, 0.1)
    assert (ramp.at(0), ramp.at(1)) == (4.0, 0.1)  # exactly
    assert [ramp.at(step / 4) for step in (1, 2, 3)] == pytest.approx([3.025, 2.05, 1.075])
    assert k_at(0.3, 0.9) == 0.3


@pytest.mark.parametrize("progress", [-0.01, 1.01, math.nan])
def test_progress_is_a_share(progress: float) -> None:
    with pytest.raises(ValueError, match="progress must be a number from 0 to 1, not"):
        Ramp(1, 2).at(progress)


def test_the_text_of_a_ramp_is_exact(subtests: pytest.Subtests) -> None:
    cases: list[tuple[Ramp, str | None, str | None]] = [
        (Ramp(0.5, 2), "0.5→2", "1/2→2"),
        (Ramp(0.1, 1e-20), "0.1→1e-20", "1/10→1/1e+20"),
        (Ramp(1 / 3, math.pi), "0.3333333333333333→3.141592653589793", "1/3→3.14159"),
        (Ramp(2.0**-100, 2.0**100), None, None),
        (Ramp(0.1 + 0.2, 0.3), "0.30000000000000004→0.3", "0.3→0.3"),
    ]
    for ramp, text, shown in cases:
        with subtests.test(ramp=ramp, text=text, shown=shown):
            assert Ramp.parse(str(ramp)) == ramp
            assert text is None or str(ramp) == text
            assert shown is None or fraction(ramp) == shown


def test_ways_to_write_a_ramp(subtests: pytest.Subtests) -> None:
    for text in ("0.5→2", "0.5->2", " 0.5 → 2 ", "1/2→2", "5e-1->2.0"):
        with subtests.test(text=text):
            assert Ramp.parse(text) == Ramp(0.5, 2.0) == as_k(text)


def test_invalid_ramp_strings(subtests: pytest.Subtests) -> None:
    cases: list[Any] = ["", "0.5", "→", "0.5→", "1→2→3", "a→b", "1/0→2", "0.5-2", 0.5]
    for text in cases:
        said = r"must be two numbers like '0.5→2' or '0.5->2', not"
        with subtests.test(text=text), pytest.raises(ValueError, match=said):
            Ramp.parse(text)


def test_both_ends_must_be_valid_k(subtests: pytest.Subtests) -> None:
    for end in (0, -1, math.nan, math.inf, 1e-46, 1e39, 10**400):
        with subtests.test(end=end):
            for ends, name in (((1, end), "end"), ((end, 1), "start")):
                with pytest.raises(
                    ValueError, match=f"^{name} of a ramp must be a finite number above 0"
                ):
                    Ramp(*ends)


@pytest.mark.parametrize("end", [None, "2", True, [2]])
def test_both_ends_are_numbers(end: Any) -> None:
    with pytest.raises(TypeError, match=r"^end of a ramp must be a number, not"):
        Ramp(1, end)


def test_a_flat_ramp_is_a_number() -> None:
    """Ramp(1, 1) would be trained like k = 1, but not counted as k = 1."""
    with pytest.raises(ValueError, match=r"give the number 1 instead of 1→1$"):
        Ramp(1, 1.0)


def test_numbers_of_numpy_make_the_same_ramp() -> None:
    ends: Any = np.float32(0.5), np.int64(2)
    ramp = Ramp(*ends)
    assert ramp == Ramp(0.5, 2)
    assert {type(ramp.start), type(ramp.end)} == {float}


def test_a_ramp_stands_at_its_geometric_mean() -> None:
    assert level(Ramp(0.5, 8)) == level(Ramp(8, 0.5)) == 2.0
    ks: list[float | Ramp] = [Ramp(4, 0.25), 1.0, Ramp(0.25, 4), 0.9, 1.1]
    assert sorted(ks, key=by_level) == [0.9, 1.0, Ramp(0.25, 4), Ramp(4, 0.25), 1.1]


# --- trials and ledgers ----------------------------------------------------------------------


def test_a_trial_takes_a_ramp() -> None:
    trial = replace(TRIAL, k=Ramp(0.5, 2))
    assert trial == replace(TRIAL, k=Ramp.parse("0.5->2"))
    assert len({trial, TRIAL, replace(TRIAL, k=Ramp(2, 0.5))}) == 3


@pytest.mark.parametrize("k", ["0.5→2", None, (0.5, 2)])
def test_a_trials_k_is_a_number_or_a_ramp(k: Any) -> None:
    with pytest.raises(ValueError, match="k must be a number or a Ramp, not"):
        replace(TRIAL, k=k)


def test_ledgers_keep_ramps(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    ramps = [Ramp(0.5, 2), Ramp(2, 0.5), Ramp(1 / 3, 0.1 + 0.2)]
    outcomes = [outcome_of(replace(TRIAL, k=ramp)) for ramp in ramps]
    ledger = Ledger(path, [RECIPE])
    for outcome in outcomes:
        ledger.append(outcome)
    assert [json.loads(line)["trial"]["k"] for line in path.read_text().splitlines()[1:]] == [
        "0.5→2", "2→0.5", "0.3333333333333333→0.30000000000000004",
    ]  # fmt: skip
    again = Ledger(path, [RECIPE])
    assert list(again.values()) == outcomes
    assert not again.set_aside


def test_ledger_lines_of_constant_k_are_unchanged() -> None:
    """Committed ledgers, and names of networks' files, depend on every byte."""
    written = '{"recipe": "9c6dd9058aeb", "k": 0.5, "learning_rate": 0.1, "seed": 3}'
    assert json.dumps(trial_to_json(replace(TRIAL, k=0.5, seed=3))) == written
    assert '"k": 1,' in json.dumps(trial_to_json(TRIAL))


@pytest.mark.parametrize("k", ["0.5", "1→1", "0→1", "x", [0.5, 2], None])
def test_a_line_with_another_k_is_set_aside(k: Any) -> None:
    line = outcome_to_json(outcome_of(TRIAL))
    line["trial"]["k"] = k
    with pytest.raises(ValueError, match="not the outcome of a trial"):
        outcome_from_json(line, {RECIPE.fingerprint: RECIPE})


# --- searches --------------------------------------------------------------------------------

RAMP = Ramp(0.5, 2)
KS: Any = (1, 0.5, "0.5→2")


def in_favour_of(best: float | Ramp) -> Callable[[deque[Trial], Stop], Iterator[Outcome]]:
    """Return a runner that does not train, in which one k is better than the others."""

    def run(trials: deque[Trial], stop: Stop) -> Iterator[Outcome]:
        while trials:
            trial = trials.popleft()
            error = (
                0.1 + 0.05 * (trial.k != best) + 0.02 * abs(math.log2(trial.learning_rate / 0.1))
            )
            wrong = (1,) if trial.split.retrain else None
            yield Outcome(trial, error, 3, error, 2 * error, 18, "patience", (0.5, error), wrong)

    return run


@pytest.mark.parametrize("kind", [Protocol, Bagging])
def test_a_protocol_takes_ramps_and_their_texts(kind: type[Protocol]) -> None:
    protocol = kind(RECIPE, ks=KS, learning_rates=(0.1,))
    assert protocol.ks == (1.0, 0.5, RAMP) == kind(RECIPE, ks=(1.0, 0.5, RAMP)).ks
    settings = json.loads(json.dumps(protocol.settings()))
    assert settings["ks"] == [1.0, 0.5, "0.5→2"]
    wanted = {trial.k for trial in protocol.wanted({})}
    assert wanted == {1.0, 0.5, RAMP}
    assert all(protocol.covers(trial) for trial in protocol.wanted({}))
    assert not protocol.covers(replace(protocol.wanted({})[0], k=Ramp(0.5, 4)))


def test_other_ks_are_refused(subtests: pytest.Subtests) -> None:
    cases: list[tuple[Any, str]] = [
        ((1, "0.5→2", "1/2->2"), "ks must be distinct numbers, or ramps like '0.5→2', not"),
        ("0.5→2", "ks must be distinct numbers, or ramps"),
        ((1, "0.5"), "ks must be distinct numbers, or ramps"),
        ((1, "0.5→x"), "a ramp must be two numbers like"),
        ((1, "1→1"), "give the number 1 instead of 1→1"),
        (("0.5→2",), "ks must contain 1"),
    ]
    for ks, says in cases:
        with subtests.test(says=says), pytest.raises(ValueError, match=re.escape(says)):
            Protocol(RECIPE, ks=ks, initial_rate=0.1)


def test_ties_go_to_the_constant_k_and_then_to_the_nearer_level() -> None:
    cells = [Cell(k, 0.1, (0.02,)) for k in (Ramp(1, 4), RAMP, 1.0, 4.0)]
    assert Protocol.best(cells).k == 1.0
    assert Protocol.best([cells[0], cells[1], cells[3]]).k == RAMP
    assert Protocol.best([cells[0], cells[3]]).k == Ramp(1, 4)
    assert Protocol.best([*cells, Cell(RAMP, 0.1, (0.01,))]).k == RAMP  # no tie


def test_a_study_with_a_ramp_is_opened_again(tmp_path: Path) -> None:
    protocol = Protocol(RECIPE, ks=KS, initial_rate=0.1, repetitions=2, retrainings=2)
    study = Study(tmp_path / "run", protocol)
    for _ in range(9):
        trial = study.ask()
        assert trial is not None
        study.tell(trial, error=0.3)
    again = Study.open(tmp_path / "run")
    assert again.protocol == protocol
    assert len(again.ledger) == 9
    assert not again.ledger.set_aside
    study = Study(tmp_path / "other", protocol)
    assert study.run(in_favour_of(RAMP))
    found = Study.open(tmp_path / "other").result
    assert (found.chosen.k, found.plain.k) == (RAMP, 1.0)
    assert {outcome.trial.k for outcome in found.comparison.chosen} == {RAMP}
    other = Study(tmp_path / "other", replace(protocol, ks=(1.0, 0.5, Ramp(0.5, 4))))
    assert {trial.k for trial in other.protocol.wanted(other.ledger)} == {Ramp(0.5, 4)}


def test_progress_and_summary_of_a_ramp() -> None:
    protocol = Protocol(RECIPE, ks=(1, 4, "0.5→2", "1/16->1/2"), initial_rate=0.1, repetitions=2)  # type: ignore[arg-type]
    study, shown = Study(None, protocol), io.StringIO()
    with Display(protocol, {}, shown) as display:
        assert study.run(in_favour_of(RAMP), watch=display.show)
        table = Console(file=io.StringIO(), width=80)
        with table.capture() as captured:
            table.print(display._table())
    assert "best so far k = 1/2→2, 10.00%" in shown.getvalue()
    ks = ["4", "1/2→2", "1", "1/16→1/2"]
    assert [line.split()[0] for line in captured.get().splitlines()[-4:]] == ks
    told = summary(study.result)
    assert told.isascii() or set(told) - set(map(chr, range(128))) <= {"±"}
    start = told.splitlines().index(next(line for line in told.splitlines() if "best rate" in line))
    rows = told.splitlines()[start : start + 5]
    assert [row.split()[0] for row in rows] == ["k", "4", "1/2->2", "1", "1/16->1/2"]
    assert len({row.index(row.split()[1]) + len(row.split()[1]) for row in rows[1:]}) == 1
    assert rows[2].endswith("chosen")
    assert "chosen: k = 1/2->2, learning rate 0.1" in told


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Study]:
    """Return trained studies of both protocols, with the ramp made the best k."""
    data, encoder = open_data("digits")
    fleet = Fleet(data, keep_parameters=True)

    def runner(trials: deque[Trial], stop: Stop) -> Iterator[Outcome]:
        for outcome in fleet.run(trials, stop):
            if not outcome.trial.split.retrain:
                found = 0.1 if outcome.trial.k == RAMP else 0.2
                outcome = replace(outcome, error=found, cross_entropy=found)
            yield outcome

    recipe = MLPRecipe("digits", (8,), max_epochs=3, batch_size=64, momentum=0.9)
    studies = {}
    for protocol in (
        Protocol(recipe, ks=KS, learning_rates=(0.1, 0.2), repetitions=1, retrainings=2,
                 most_extensions=0),
        Bagging(recipe, ks=KS, learning_rates=(0.1,), most_extensions=0),
    ):  # fmt: skip
        folder = tmp_path_factory.mktemp("runs") / protocol.kind
        study = studies[protocol.kind] = study_of(data, encoder, protocol, folder)
        assert tune(study, data, encoder, runner) is not None
    return studies


def test_the_model_of_a_ramp_is_saved_and_loaded(tuned: dict[str, Study]) -> None:
    folder = tuned["paper"].folder
    assert folder is not None
    assert json.loads((folder / "model.json").read_text())["k"] == "0.5→2"
    model, _ = load_model(folder)
    plain, _ = load_model(folder, 1)
    rows = digits().features[:50]
    for k in (RAMP, "0.5→2", "0.5->2"):
        again, _ = load_model(folder, k)
        assert again.probabilities(rows).equal(model.probabilities(rows))
    assert not plain.probabilities(rows).equal(model.probabilities(rows))
    for other in (2.0, Ramp(0.5, 4)):
        with pytest.raises(ValueError, match=r"has no model of k = .*: give 0\.5→2 or 1$"):
            load_model(folder, other)


def test_the_ensemble_names_its_ramps(tuned: dict[str, Study]) -> None:
    known = read_assessment(tuned["bagging"])
    assert known is not None
    ks = {as_k(k) for k, _ in known["members"]["ks"]}
    assert ks <= {1.0, 0.5, RAMP}
    assert {as_k(k) for k, *_ in known["members"]["pairs"]} == ks
    assert line_of_run(tuned["paper"]).split()[3] == "1/2->2"


@pytest.mark.parametrize("kind", ["paper", "bagging"])
def test_the_page_shows_ramps(kind: str, tuned: dict[str, Study]) -> None:
    text = tuned[kind].report().read_text("utf-8")
    assert "nan" not in re.sub("<script>.*?</script>", "", text, flags=re.DOTALL)
    assert "The slider starts at 2, where the ramp k\xa0=\xa01/2→2 ends." in text
    assert "(the last k of a ramp)" in text
    # In the figure the ramp has its own position, to the right of all constants.
    figure = text[text.index("<h2>Error against k</h2>") :]
    labels = re.findall(r'<text[^>]* x="([\d.]+)"[^>]*>(1/2|1|1/2→2)</text>', figure)[:3]
    places = {name: float(x) for x, name in labels}
    assert places["1/2"] < places["1"] < places["1/2→2"] - 30
    assert "k in 1, 1/2, 1/2→2" in text


def test_which_examples_drive_a_ramp_goes_by_its_last_k(tuned: dict[str, Study]) -> None:
    data, encoder = open_data("digits")
    network = load_model(tuned["paper"].folder or "")[0].networks[0]
    ramp, last = (difficulty({"plain": (k, network)}, data, encoder) for k in (RAMP, 2.0))
    assert ramp["networks"]["plain"]["k"] == "0.5→2"
    assert ramp["networks"]["plain"]["bins"] == last["networks"]["plain"]["bins"]


def test_the_command_line_takes_ramps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    command = "tune digits --k 1 0.5->2 --learning-rates 0.03 --epochs 2 --hidden 8 --out run"
    assert main(command.split()) == 0
    assert Study.open("run").protocol.ks == (1.0, RAMP)
    capsys.readouterr()
    assert main(["runs", "."]) == 0
    for k, says in (
        (
            "1→1",
            "argument --k: start and end of a ramp must differ: give the number 1",
        ),
        ("0.5→x", "argument --k: a ramp must be two numbers like '0.5→2' or '0.5->2', not '0.5→x'"),
    ):
        with pytest.raises(SystemExit):
            main(["tune", "digits", "--k", "1", k])
        assert says in capsys.readouterr().err
    assert main(["tune", "digits", "--k", "0.5→2"]) != 0
    assert "--k must include 1" in capsys.readouterr().err


def test_the_classifier_takes_ramps() -> None:
    X, y = load_iris(return_X_y=True)
    settings: dict[str, Any] = {"max_iter": 4, "learning_rate": 0.1, "random_state": 0}
    model = clone(TunableMLPClassifier((8,), k="0.5→2", **settings)).fit(X, y)
    assert model.k_ == RAMP
    same = TunableMLPClassifier((8,), k=RAMP, **settings).fit(X, y)
    flat = TunableMLPClassifier((8,), k=0.5, **settings).fit(X, y)
    assert np.array_equal(model.predict_proba(X), same.predict_proba(X))
    assert not np.array_equal(model.predict_proba(X), flat.predict_proba(X))
    mixed = TunableMLPClassifier((8,), ks=(1, "0.5->2"), **settings).fit(X, y)
    assert set(mixed.cv_results_["param_k"]) == {1.0, RAMP}
    with pytest.raises(ValueError, match=r"^k must be a number or a Ramp, not 'best'"):
        TunableMLPClassifier(k="best").fit(X, y)
