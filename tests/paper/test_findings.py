"""What is read from ledgers."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from made_up_results import BEST_K, BEST_RATE, made_up, search, write

from paper.findings import (
    Finding,
    apart_from_1,
    cross_entropies,
    error_against_k,
    read,
    side,
    stability,
)
from paper.rows import Experiment, experiments, rows
from paper.run import ledger_of
from paper.toy import ToyRun, write_csv
from pseudograd.fleet import Outcome, Trial
from pseudograd.search import Cell, Protocol, Result, compare

CIFAR = Experiment(rows("table3", "cifar10 3x400*")[0])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("findings") / "results"
    write(found, [CIFAR])
    return found


def finding_with(*cells: Cell, chosen: Cell, experiment: Experiment = CIFAR) -> Finding:
    """A search that tried these cells, and retrained networks that do not matter."""
    outcome = made_up(Trial("cifar10", (400,) * 3, k=1, learning_rate=0.1))
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
    protocol, ledger = CIFAR.protocol(), ledger_of(folder, CIFAR.network)
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
    lines = ledger_of(folder, CIFAR.network).path.read_text("utf-8").splitlines(keepends=True)
    ledger_of(tmp_path, CIFAR.network).path.write_text("".join(lines[:-1]), "utf-8")
    other = Experiment(rows("supplement", "cifar10 3x400 m0.9")[0])
    found = read([CIFAR, other], tmp_path)
    assert found.found == {CIFAR: None, other: None}
    assert found.begun == {CIFAR}
    assert found.finished == []
    [effort] = found.efforts
    assert (effort.experiment, effort.trials, effort.seconds) == (CIFAR, len(lines) - 1, 0)
    assert math.isnan(effort.trials_per_hour)


def test_runs_in_small_are_not_taken_for_whole_ones(tmp_path: Path) -> None:
    write(tmp_path, [CIFAR], smoke=True)
    assert read([CIFAR], tmp_path).found == {CIFAR: None}
    assert read([CIFAR], tmp_path).begun == frozenset()
    assert read([CIFAR], tmp_path, smoke=True).found[CIFAR] is not None


def test_effort(folder: Path) -> None:
    [effort] = read([CIFAR], folder).efforts
    ledger = ledger_of(folder, CIFAR.network)
    final = sum(trial.split.retrain for trial in ledger)
    assert final == 5  # k = 1 is the choice
    # 30,000 examples an epoch in steps of 128, in the final training 40,000; two epochs each.
    assert effort.steps == 2 * (235 * (len(ledger) - final) + 313 * final)
    assert effort.epochs == 2 * len(ledger)
    assert effort.trials_per_hour == pytest.approx(100 * len(ledger))
    assert read([CIFAR], folder).sessions[0]["hardware"] == "a <GPU> & more"


def test_rows_of_a_network_share_its_time_by_steps(tmp_path: Path) -> None:
    group = [Experiment(row) for row in rows("all", "svhn 1x400*")]
    write(tmp_path, group)
    efforts = read(group, tmp_path).efforts
    assert [effort.experiment for effort in efforts] == group
    assert sum(effort.seconds for effort in efforts) == pytest.approx(36)
    assert sum(effort.trials for effort in efforts) == len(ledger_of(tmp_path, group[0].network))
    paces = [effort.seconds / effort.steps for effort in efforts]
    assert paces == pytest.approx([paces[0]] * 3)
    # Of some rows alone it is the same.
    assert read(group[1:2], tmp_path).efforts == (efforts[1],)


def test_lines_that_cannot_be_read_are_counted(folder: Path, tmp_path: Path) -> None:
    text = ledger_of(folder, CIFAR.network).path.read_text("utf-8")
    ledger_of(tmp_path, CIFAR.network).path.write_text(text + "{cut off\n", "utf-8")
    found = read([CIFAR], tmp_path)
    assert found.unread == 1
    assert found.found[CIFAR] is not None


def test_experiments_keep_their_order(tmp_path: Path) -> None:
    wanted = experiments(rows("all", "mnist *x400 m0.*"))
    assert list(read(wanted, tmp_path).found) == wanted


def test_a_network_that_diverged_has_no_cross_entropy(tmp_path: Path) -> None:
    protocol, outcomes = CIFAR.protocol(), dict[Trial, Outcome]()
    search(protocol, outcomes)
    ledger = ledger_of(tmp_path, CIFAR.network)
    lost = protocol.retrainings_of(1.0, BEST_RATE)[0]
    for trial, outcome in outcomes.items():
        ledger.append(replace(outcome, cross_entropy=math.inf) if trial == lost else outcome)
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
    assert found.same_k == found.shares[chosen.k]
    same_side = [k for k in found.shares if side(k) == side(chosen.k)]
    assert found.same_side == pytest.approx(sum(found.shares[k] for k in same_side))
    assert 0 < found.same_k < found.same_side < 1


def test_ties_go_to_the_k_nearest_1() -> None:
    # The sums of mistakes are equal in every resample.
    equal = (0.3, 0.1, 0.2)
    cells = [Cell(k, 0.1, equal) for k in (4.0, 0.5, 1.0, 2.0)]
    assert stability(finding_with(*cells, chosen=cells[2])).shares == {1.0: 1.0}


def test_a_selection_that_hangs_on_one_repetition() -> None:
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
