"""Reading results from studies."""

from __future__ import annotations

import math
import shutil
import statistics
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_up_results import BEST_K, BEST_RATE, SECONDS, change_sessions, made_up, write

from paper.findings import (
    Finding,
    apart_from_1,
    cross_entropies,
    error_against_k,
    read,
    side,
    stability,
)
from paper.protocol import PaperProtocol
from paper.rows import Experiment, experiments, rows
from paper.run import folder_of, study_of
from paper.toy import ToyRun, write_csv
from pseudograd.fleet import Outcome, Trial
from pseudograd.fleet.ramp import level
from pseudograd.search import Cell, Protocol, Result, compare
from trials import a_trial

CIFAR = Experiment(rows("table3", "cifar10 3x400*")[0])
PAIR = [Experiment(rows("table1", f"{data} 1x400*")[0]) for data in ("cifar10", "svhn")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("findings") / "results"
    write(found, [CIFAR])
    return found


def finding_with(*cells: Cell, chosen: Cell, experiment: Experiment = CIFAR) -> Finding:
    """Return a search that tried these cells; its retrained networks are arbitrary."""
    outcome = made_up(a_trial("cifar10", (400,) * 3, k=1, learning_rate=0.1))
    plain = min((cell for cell in cells if cell.k == 1), key=lambda cell: cell.error)
    best = {
        k: min((c for c in cells if c.k == k), key=lambda c: c.error) for k in {c.k for c in cells}
    }
    comparison = compare([outcome], [outcome])
    found = Result(cells, tuple(best.values()), chosen, plain, (), (), comparison)
    return Finding(experiment, found, ((outcome,), (outcome,)))


def test_a_finished_experiment(folder: Path) -> None:
    found = read([CIFAR], folder)
    finding = found.found[CIFAR]
    assert finding is not None
    assert found.finished == [finding]
    assert finding.k == BEST_K[3]
    assert finding.result.chosen.learning_rate == BEST_RATE
    study = study_of(CIFAR, folder)
    protocol, ledger = study.protocol, study.ledger
    assert isinstance(protocol, PaperProtocol)
    errors = [100 * ledger[t].error for t in protocol.retrainings_of(1.0, BEST_RATE)]
    assert finding.error_pct.mean == pytest.approx(statistics.fmean(errors))
    assert finding.error_pct.sd == pytest.approx(statistics.stdev(errors))
    assert finding.error_k1_pct == finding.error_pct
    assert cross_entropies(finding.result.comparison.chosen).mean == pytest.approx(1.005, abs=0.005)
    assert finding.tested[0] == tuple(ledger[t] for t in protocol.tested_of(1.0, BEST_RATE))
    assert len(finding.tested[1]) == 7
    assert all(outcome.trial.split.test for outcome in finding.tested[1])


def test_the_selected_k_is_set_apart_from_k_1(tmp_path: Path) -> None:
    shallow = Experiment(rows("table1", "svhn 1x400*")[0])
    write(tmp_path, [shallow])
    finding = read([shallow], tmp_path).found[shallow]
    assert finding is not None
    assert finding.k == 0.25
    assert finding.error_pct.mean < finding.error_k1_pct.mean
    assert (
        cross_entropies(finding.result.comparison.chosen).mean
        > 3.9
        > 1.1
        > cross_entropies(finding.result.comparison.plain).mean
    )
    assert {o.trial.k for o in finding.tested[0]} == {0.25}
    assert {o.trial.k for o in finding.tested[1]} == {1.0}


def test_what_is_not_finished(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    ledger = folder_of(CIFAR, tmp_path) / "ledger.jsonl"
    lines = ledger.read_text("utf-8").splitlines(keepends=True)
    ledger.write_text("".join(lines[:-1]), "utf-8")
    change_sessions(tmp_path, lambda described: described.update(sessions=[]))
    other = Experiment(rows("supplement", "cifar10 3x400 m0.9")[0])
    found = read([CIFAR, other], tmp_path)
    assert found.found == {CIFAR: None, other: None}
    assert found.begun == {CIFAR}
    assert found.finished == []
    [effort] = found.efforts
    assert (effort.experiment, effort.trials, effort.seconds) == (CIFAR, len(lines) - 1, 0)
    assert effort.untimed == effort.trials
    assert math.isnan(effort.trials_per_hour)


def test_runs_in_small_are_not_taken_for_whole_ones(tmp_path: Path) -> None:
    write(tmp_path, [CIFAR], smoke=True)
    with pytest.raises(ValueError, match="holds a run with other settings"):
        read([CIFAR], tmp_path)
    assert read([CIFAR], tmp_path, smoke=True).found[CIFAR] is not None


def test_effort(folder: Path) -> None:
    [effort] = read([CIFAR], folder).efforts
    ledger = study_of(CIFAR, folder).ledger
    final = sum(trial.split.retrain for trial in ledger)
    assert final == 5  # k = 1 is the choice
    # Two epochs of 30,000 examples, or 40,000 in the final training, in batches of 128.
    assert effort.steps == 2 * (235 * (len(ledger) - final) + 313 * final)
    assert effort.epochs == 2 * len(ledger)
    assert effort.trials_per_hour == pytest.approx(100 * len(ledger))
    assert effort.untimed == 0


def test_studies_side_by_side_share_the_time(tmp_path: Path) -> None:
    write(tmp_path, PAIR, smoke=True)

    def at_once(described: dict[str, Any]) -> None:
        described["sessions"][0] |= {"share": 0.25, "started": "2026-01-01T12:00:00+00:00"}

    change_sessions(tmp_path, at_once)
    found = read(PAIR, tmp_path, smoke=True)
    assert [effort.seconds for effort in found.efforts] == [SECONDS / 4] * 2
    (call,) = found.sessions
    assert call["seconds"] == SECONDS
    assert call["trials"] == sum(effort.trials for effort in found.efforts)
    # Reading only one of them gives the same.
    assert read(PAIR[1:], tmp_path, smoke=True).efforts == found.efforts[1:]


def test_studies_one_after_another_are_one_call(tmp_path: Path) -> None:
    write(tmp_path, PAIR, smoke=True)
    (call,) = read(PAIR, tmp_path, smoke=True).sessions
    assert call["seconds"] == 2 * SECONDS + 2  # including the time to read the second's data
    assert call["hardware"] == "a <GPU> & more"
    assert list(call["data"]) == ["cifar10", "svhn"]


@pytest.mark.parametrize(
    "other",
    [{"commit": "abcdef"}, {"hardware": "another"}, {"command": "python -m paper run table1"},
     {"started": "2026-01-02T12:00:00+00:00"},
     {"versions": {"pseudograd": "0.1.0", "torch": "2.12.0"}}],
)  # fmt: skip
def test_other_calls_are_told_apart(tmp_path: Path, other: dict[str, Any]) -> None:
    """Calls on two machines at the same time are two calls."""
    write(tmp_path, PAIR, smoke=True)

    def change(described: dict[str, Any]) -> None:
        (session,) = described["sessions"]
        described["sessions"].append(session | other)

    change_sessions(tmp_path, change)
    calls = read(PAIR, tmp_path, smoke=True).sessions
    assert len(calls) == 2
    (name,) = other
    assert {str(call[name]) for call in calls} >= {str(other[name])}
    assert calls[0]["trials"] == calls[1]["trials"]


def test_lines_that_cannot_be_read_are_counted(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    with (folder_of(CIFAR, tmp_path) / "ledger.jsonl").open("a") as file:
        file.write("{cut off\n")
    found = read([CIFAR], tmp_path)
    assert found.unread == 1
    assert found.found[CIFAR] is not None


def test_experiments_keep_their_order(tmp_path: Path) -> None:
    wanted = experiments(rows("all", "mnist *x400 m0.*"))
    assert list(read(wanted, tmp_path).found) == wanted


def test_a_network_that_diverged_has_no_cross_entropy(tmp_path: Path) -> None:
    def one_diverged(trial: Trial) -> Outcome:
        lost = trial.split.retrain and trial.split.repetition == 0
        return replace(made_up(trial), cross_entropy=math.inf) if lost else made_up(trial)

    write(tmp_path, [CIFAR], outcome_of=one_diverged)
    finding = read([CIFAR], tmp_path).found[CIFAR]
    assert finding is not None
    assert math.isinf(cross_entropies(finding.result.comparison.chosen).mean)
    assert math.isfinite(finding.error_pct.mean)


# --- the toy example's runs ----------------------------------------------------------------------


def test_toy_runs_are_read_as_they_were_written(tmp_path: Path) -> None:
    runs = [ToyRun(k, 3, 1, 0.95, 7000, 6.4, -0.3, 0.05, 4.9, 0.28) for k in (0.5, 1.0)]
    write_csv(runs, tmp_path / "toy.csv")
    assert read([CIFAR], tmp_path).toy == runs


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "toy.csv").write_text("k,error\n1,2\n", "utf-8")
    with pytest.raises(
        ValueError, match=r"toy\.csv is not what `python -m paper toy --csv` writes"
    ):
        read([CIFAR], tmp_path)


# --- resampling ----------------------------------------------------------------------------------


def test_stability_is_that_of_selecting_anew() -> None:
    generator = np.random.default_rng(1)
    cells = [
        Cell(k, rate, tuple((generator.integers(4700, 4800, 7) / 10_000).tolist()))
        for k in (4.0, 2.0, 1.0, 0.5)
        for rate in (0.1, 0.2, 0.4)
    ]
    chosen = Protocol.best(cells)
    found = stability(finding_with(*cells, chosen=chosen), resamples=500)
    drawn = np.random.default_rng(0).integers(7, size=(500, 7))
    again = Counter(
        Protocol.best(
            [replace(cell, errors=tuple(cell.errors[at] for at in sample)) for cell in cells]
        ).k
        for sample in drawn.tolist()
    )
    assert found.shares == {k: count / 500 for k, count in again.items()}
    assert list(found.shares.values()) == sorted(found.shares.values(), reverse=True)
    assert found.same_k == found.shares[level(chosen.k)]
    same_side = [k for k in found.shares if side(k) == side(level(chosen.k))]
    assert found.same_side == pytest.approx(sum(found.shares[k] for k in same_side))
    assert 0 < found.same_k < found.same_side < 1


def test_ties_go_to_the_k_nearest_1() -> None:
    # The sums of mistakes are equal in every resample.
    equal = (0.3, 0.1, 0.2)
    cells = [Cell(k, 0.1, equal) for k in (4.0, 0.5, 1.0, 2.0)]
    assert stability(finding_with(*cells, chosen=cells[2])).shares == {1.0: 1.0}


def test_a_selection_that_depends_on_one_repetition() -> None:
    half, one = Cell(0.5, 0.1, (0.1, 0.2, 0.2)), Cell(1.0, 0.1, (0.19, 0.2, 0.2))
    found = stability(finding_with(half, one, chosen=half))
    # A resample without the first repetition is a tie, which k = 1 wins.
    assert found.same_k == pytest.approx(1 - (2 / 3) ** 3, abs=0.02)


def test_error_against_k() -> None:
    first = finding_with(
        Cell(0.5, 0.1, (0.2, 0.4)),
        Cell(0.5, 0.2, (0.5, 0.5)),  # not the best rate
        Cell(1.0, 0.1, (0.4, 0.4)),
        chosen=Cell(0.5, 0.1, (0.2, 0.4)),
    )
    second = finding_with(
        Cell(0.5, 0.1, (0.5, 0.5)),
        Cell(1.0, 0.1, (0.4, 0.4)),
        chosen=Cell(1.0, 0.1, (0.4, 0.4)),
    )
    curve = error_against_k([first, second])
    assert list(curve) == [0.5, 1.0]
    assert curve[0.5].mean == pytest.approx(0)  # a quarter less, a quarter more
    assert curve[0.5].high == pytest.approx(12.706 * 25, rel=1e-3)  # t with one degree of freedom
    assert (curve[1.0].mean, curve[1.0].low, curve[1.0].high) == (0, 0, 0)


def test_rows_whose_rate_was_not_tried_at_k_1() -> None:
    half, one = Cell(0.5, 0.1, (0.2, 0.2)), Cell(1.0, 0.2, (0.4, 0.4))
    assert apart_from_1(finding_with(half, one, chosen=half))
    assert not apart_from_1(finding_with(half, one, Cell(1.0, 0.1, (0.5, 0.5)), chosen=half))
    assert not apart_from_1(finding_with(half, one, chosen=one))
