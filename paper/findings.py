"""The results of the experiments, read from their studies."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np

from paper.protocol import PaperProtocol
from paper.rows import Experiment, in_turn
from paper.run import device_seconds, study_of
from paper.toy import Spread, ToyRun, read_csv
from pseudograd.data.benchmarks import BENCHMARKS
from pseudograd.fleet import Outcome, Ramp
from pseudograd.fleet.ramp import level
from pseudograd.search import Cell, Difference, Result, Study, paired_difference, result

# The longest gap between two studies of one call: the time to read a data set.
_BETWEEN_STUDIES = timedelta(minutes=1)


@dataclass(frozen=True)
class Finding:
    """A finished experiment.

    Attributes:
        experiment: The experiment.
        result: The result of the search, with the retrained networks.
        tested: The cross-validation networks of the selected k and of k = 1, trained on three
            fifths of the examples and evaluated on the test set.
        control: k = 1 at the selected k's rate, where it was run because the search had not tried
            it: its validation errors, and the retrained networks.

    """

    experiment: Experiment
    result: Result
    tested: tuple[tuple[Outcome, ...], tuple[Outcome, ...]]
    control: tuple[Cell, tuple[Outcome, ...]] | None = None

    @property
    def k(self) -> float:
        """The selected k."""
        return level(self.result.chosen.k)

    @property
    def error_pct(self) -> Spread:
        """The test error of the retrained networks of the selected k, in percent."""
        return errors_pct(self.result.comparison.chosen)

    @property
    def error_k1_pct(self) -> Spread:
        """The same for k = 1."""
        return errors_pct(self.result.comparison.plain)


def errors_pct(outcomes: Iterable[Outcome]) -> Spread:
    """Return the mean and standard deviation of errors, in percent."""
    return Spread.of([100 * outcome.error for outcome in outcomes])


def cross_entropies(outcomes: Iterable[Outcome]) -> Spread:
    """Return the mean and standard deviation of cross-entropies."""
    values = [outcome.cross_entropy for outcome in outcomes]
    if not all(map(math.isfinite, values)):  # a network that diverged
        return Spread(math.inf, math.nan)
    return Spread.of(values)


def beside_the_papers(finding: Finding) -> Iterator[tuple[str, Spread, Spread, float]]:
    """Yield our test errors beside the paper's, in percent, where it prints them.

    Each item has "plain" (k = 1) or "chosen" (the selected k), the errors of the retrained
    networks, those of the networks trained on three fifths, and the paper's.
    """
    row, (chosen, plain) = finding.experiment.row, finding.tested
    if row.error_k1_pct is not None:
        yield "plain", finding.error_k1_pct, errors_pct(plain), row.error_k1_pct
    if row.error_selected_pct is not None:
        yield "chosen", finding.error_pct, errors_pct(chosen), row.error_selected_pct


@dataclass(frozen=True)
class Effort:
    """The cost of an experiment.

    Attributes:
        experiment: The experiment.
        trials: The number of networks trained.
        epochs: The sum of their epochs.
        steps: The sum of their steps.
        seconds: The device time, or the share of it; 0 if no session records it.
        untimed: The number of networks that no session records.

    """

    experiment: Experiment
    trials: int
    epochs: int
    steps: int
    seconds: float
    untimed: int = 0

    @property
    def trials_per_hour(self) -> float:
        """Networks trained in an hour; NaN if the time is unknown."""
        return 3600 * self.trials / self.seconds if self.seconds else math.nan


@dataclass(frozen=True)
class Reproduction:
    """The content of a folder of studies.

    Attributes:
        found: The finding of each experiment; None if it is not finished.
        efforts: The cost of each experiment that has trials, in the order of the runs.
        sessions: One record for each call of the command.
        toy: The runs of the toy example; none if there is no ``toy.csv``.
        unread: The number of lines of ledgers that could not be read.

    """

    found: dict[Experiment, Finding | None]
    efforts: tuple[Effort, ...]
    sessions: list[dict[str, Any]]
    toy: list[ToyRun]
    unread: int

    @property
    def begun(self) -> frozenset[Experiment]:
        """The experiments that have trials."""
        return frozenset(effort.experiment for effort in self.efforts)

    @property
    def finished(self) -> list[Finding]:
        """The experiments that are finished."""
        return [finding for finding in self.found.values() if finding]


def read(experiments: Sequence[Experiment], folder: Path, *, smoke: bool = False) -> Reproduction:
    """Read the results of some experiments from a folder.

    Args:
        experiments: The experiments.
        folder: Holds the studies and, as ``toy.csv``, the toy example's runs.
        smoke: Whether it was a smoke test.

    """
    studies = {one: study_of(one, folder, smoke=smoke) for one in experiments}
    toy = folder / "toy.csv"
    return Reproduction(
        found={one: _finding(one, study) for one, study in studies.items()},
        efforts=tuple(
            _effort(one, studies[one]) for one in in_turn(experiments) if studies[one].ledger
        ),
        sessions=_commands(studies.values()),
        toy=read_csv(toy) if toy.exists() else [],
        unread=sum(len(study.ledger.set_aside) for study in studies.values()),
    )


def _finding(experiment: Experiment, study: Study) -> Finding | None:
    protocol, ledger = study.protocol, dict(study.ledger)
    assert isinstance(protocol, PaperProtocol)
    if not ledger or not protocol.is_searched(ledger):
        return None
    search, control = result(protocol.searched, ledger), None
    controls = protocol.control_trials(ledger)
    if controls and all(trial in ledger for trial in controls):
        cell = protocol.control_cell(ledger)
        assert cell is not None
        control = cell, tuple(ledger[trial] for trial in controls if trial.split.retrain)
    tested = [
        tuple(ledger[trial] for trial in protocol.tested_of(cell.k, cell.learning_rate))
        for cell in (search.chosen, search.plain)
    ]
    return Finding(experiment, search, (tested[0], tested[1]), control)


def _commands(studies: Iterable[Study]) -> list[dict[str, Any]]:
    """Return the calls of the command that ran the studies, by merging their sessions."""
    sessions = [
        {**session, "data": {study.data["name"]: study.data["sha256"]}}
        for study in studies
        for session in study.sessions
    ]
    found: list[dict[str, Any]] = []
    latest: dict[tuple[str, ...], dict[str, Any]] = {}
    for session in sorted(sessions, key=lambda session: session["started"]):
        begin = datetime.fromisoformat(session["started"])
        end = begin + timedelta(seconds=session["seconds"])
        where = tuple(str(session[name]) for name in ("command", "hardware", "versions", "commit"))
        call = latest.get(where)
        if call is None or begin > call["end"] + _BETWEEN_STUDIES:
            latest[where] = {**session, "begin": begin, "end": end}
            found.append(latest[where])
            continue
        call["end"] = max(end, call["end"])
        call["seconds"] = (call["end"] - call["begin"]).total_seconds()
        call["data"] |= session["data"]
        call["trials"] += session["trials"]
    return found


def _effort(experiment: Experiment, study: Study) -> Effort:
    outcomes = list(study.ledger.values())
    # Networks train on three fifths of the examples, final ones on four.
    part = BENCHMARKS[experiment.row.data].train_size // 5
    whole, batch = BENCHMARKS[experiment.row.data].train_size - part, experiment.recipe().batch_size
    return Effort(
        experiment,
        trials=len(outcomes),
        epochs=sum(outcome.epochs for outcome in outcomes),
        steps=sum(
            outcome.epochs * math.ceil((whole if outcome.trial.split.retrain else 3 * part) / batch)
            for outcome in outcomes
        ),
        seconds=device_seconds(study),
        untimed=max(0, len(outcomes) - sum(session["trials"] for session in study.sessions)),
    )


# --- follow-up questions --------------------------------------------------------------------------


@dataclass(frozen=True)
class Stability:
    """How stable the selection is under resampling of the repetitions.

    Attributes:
        shares: How often each k was selected among resamples, the most frequent first.
        same_k: How often the selected k was.
        same_side: How often a k on the same side of 1 was (or 1 itself, if 1 was selected).

    """

    shares: dict[float, float]
    same_k: float
    same_side: float


def stability(finding: Finding, resamples: int = 10_000) -> Stability:
    """Resample the repetitions with replacement, and count which k is selected (bootstrap).

    A resample has the same repetitions for all pairs of k and rate. Rates are those that were
    tried: a resample does not extend them.
    """
    # In tie-breaking order, since argmin returns the first of equals.
    cells = sorted(
        finding.result.cells, key=lambda cell: (abs(math.log2(level(cell.k))), cell.learning_rate)
    )
    # Integer counts of mistakes, so that ties are exact on every machine.
    part = BENCHMARKS[finding.experiment.row.data].train_size // 5
    mistakes = np.rint(part * np.array([cell.errors for cell in cells])).astype(np.int64)
    repetitions = mistakes.shape[1]
    drawn = np.random.default_rng(0).integers(repetitions, size=(resamples, repetitions))
    times = (drawn[:, :, None] == np.arange(repetitions)).sum(1)
    best = np.bincount((times @ mistakes.T).argmin(1), minlength=len(cells))
    counts: dict[float, int] = {}
    for cell, count in zip(cells, best.tolist(), strict=True):
        counts[level(cell.k)] = counts.get(level(cell.k), 0) + count
    most_frequent_first = sorted(counts.items(), key=lambda item: -item[1])
    shares = {k: count / resamples for k, count in most_frequent_first if count}
    on_side = sum(count for k, count in counts.items() if side(k) == side(finding.k))
    return Stability(shares, shares.get(finding.k, 0.0), on_side / resamples)


def agreeing(pairs: Iterable[tuple[float, float]]) -> tuple[int, int]:
    """Count the pairs of k that are equal, and those on the same side of 1.

    >>> agreeing([(0.5, 0.5), (0.25, 0.5), (1.0, 2.0)])
    (1, 2)
    """
    pairs = list(pairs)
    return sum(a == b for a, b in pairs), sum(side(a) == side(b) for a, b in pairs)


def side(k: float) -> int:
    """Return -1 for a k below 1, 0 for 1 and 1 for a k above 1."""
    return (k > 1) - (k < 1)


def error_against_k(findings: Iterable[Finding]) -> dict[float, Difference]:
    """Average each k's validation error, relative to that of k = 1, over experiments.

    Args:
        findings: Experiments that tried the same k.

    Returns:
        By k, in ascending order: the mean of 100 (err_k / err_1 - 1), each k at its best rate, and
        its 95% interval over the experiments.

    """
    relative: dict[float, list[float]] = {}
    for finding in findings:
        plain = finding.result.plain.error
        for cell in finding.result.best_of_each_k:
            relative.setdefault(level(cell.k), []).append(100 * (cell.error / plain - 1))
    return {k: paired_difference(relative[k], [0.0] * len(relative[k])) for k in sorted(relative)}


def untried_rates(finding: Finding) -> dict[float, tuple[float, ...]]:
    """Return, for each k, its neighbours' best rates that were not tried with it.

    The search adds rates while the best one is the lowest or highest tried. Where the error has
    several minima along the rates, each k ends in the one where its search began.
    """
    best = sorted(finding.result.best_of_each_k, key=lambda cell: level(cell.k))
    tried = {(cell.k, cell.learning_rate) for cell in finding.result.cells}
    found = {
        level(cell.k): tuple(
            sorted({
                other.learning_rate
                for other in best[max(at - 1, 0) : at + 2]
                if (cell.k, other.learning_rate) not in tried
            })
        )
        for at, cell in enumerate(best)
    }  # fmt: skip
    return {k: rates for k, rates in found.items() if rates}


def rates_tried(finding: Finding, k: float | Ramp) -> list[float]:
    """Return the rates tried with a k."""
    return [cell.learning_rate for cell in finding.result.cells if cell.k == k]


def apart_from_1(finding: Finding) -> bool:
    """Return whether the search did not try k = 1 at the selected k's rate."""
    return finding.result.chosen.learning_rate not in rates_tried(finding, 1.0)


def may_be_the_rate(finding: Finding) -> bool:
    """Return whether the learning rate may explain part of the difference from k = 1.

    It may if the search did not try k = 1 at the selected k's rate, unless the control has since
    shown that k = 1 does no better there than at its own rate.
    """
    cleared = finding.control and finding.control[0].error >= finding.result.plain.error
    return apart_from_1(finding) and not cleared
