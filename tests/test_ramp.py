"""A k that changes over a training: a value, its text, and its way through a search."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pseudograd.fleet import MLPRecipe, Outcome, Ramp, Trial, k_at
from pseudograd.fleet.ramp import as_k, by_level, level
from pseudograd.search import Ledger
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


@pytest.mark.parametrize(
    ("ramp", "text", "shown"),
    [
        (Ramp(0.5, 2), "0.5→2", "1/2→2"),
        (Ramp(0.1, 1e-20), "0.1→1e-20", "1/10→1/1e+20"),
        (Ramp(1 / 3, math.pi), "0.3333333333333333→3.141592653589793", "1/3→3.14159"),
        (Ramp(2.0**-100, 2.0**100), None, None),
        (Ramp(0.1 + 0.2, 0.3), "0.30000000000000004→0.3", "0.3→0.3"),
    ],
)
def test_the_text_of_a_ramp_is_exact(ramp: Ramp, text: str | None, shown: str | None) -> None:
    assert Ramp.parse(str(ramp)) == ramp
    assert text is None or str(ramp) == text
    assert shown is None or fraction(ramp) == shown


@pytest.mark.parametrize("text", ["0.5→2", "0.5->2", " 0.5 → 2 ", "1/2→2", "5e-1->2.0"])
def test_ways_to_write_a_ramp(text: str) -> None:
    assert Ramp.parse(text) == Ramp(0.5, 2.0) == as_k(text)


@pytest.mark.parametrize("text", ["", "0.5", "→", "0.5→", "1→2→3", "a→b", "1/0→2", "0.5-2", 0.5])
def test_other_texts_are_no_ramp(text: Any) -> None:
    with pytest.raises(ValueError, match=r"must be two numbers like '0.5→2' or '0.5->2', not"):
        Ramp.parse(text)


@pytest.mark.parametrize("end", [0, -1, math.nan, math.inf, 1e-46, 1e39, 10**400])
def test_both_ends_are_ks(end: float) -> None:
    for ends, name in (((1, end), "end"), ((end, 1), "start")):
        with pytest.raises(ValueError, match=f"^{name} of a ramp must be a finite number above 0"):
            Ramp(*ends)


@pytest.mark.parametrize("end", [None, "2", True, [2]])
def test_both_ends_are_numbers(end: Any) -> None:
    with pytest.raises(TypeError, match=r"^end of a ramp must be a number, not"):
        Ramp(1, end)


def test_a_flat_ramp_is_a_number() -> None:
    """Ramp(1, 1) would be trained as k = 1, but would not count as it."""
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


def test_lines_of_constant_k_are_as_they_were() -> None:
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
