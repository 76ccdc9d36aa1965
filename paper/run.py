"""Run the paper's experiments: one study each, several side by side."""

from __future__ import annotations

import functools
import json
import math
import re
import statistics
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from paper.protocol import PaperProtocol
from paper.rows import Experiment, in_turn
from pseudograd.data import Dataset
from pseudograd.data.benchmarks import BENCHMARKS
from pseudograd.fleet import Outcome, Stop, Trial, never
from pseudograd.fleet.ramp import level
from pseudograd.search import Progress, Runner, Study

_USUAL_EPOCHS = 60.0  # of a trial, if nothing like it has been run


def folder_of(experiment: Experiment, folder: Path) -> Path:
    """Return the folder of an experiment's study.

    Example:
        >>> from paper.rows import experiments, rows
        >>> folder_of(experiments(rows("table1"))[1], Path("results")).name
        'mnist-1x400-m0.5-0-1'

    """
    return folder / re.sub(r"[^\w.]+", "-", experiment.name).strip("-")


def study_of(
    experiment: Experiment, folder: Path, *, smoke: bool = False, data: Dataset | None = None
) -> Study:
    """Return an experiment's study: with data to run it, without to read it.

    Args:
        experiment: The experiment.
        folder: The folder of all studies.
        smoke: Whether it is a smoke test.
        data: Its data set.

    Raises:
        ValueError: If there are outcomes on other data.

    """
    own = folder_of(experiment, folder)
    data_hash = _noted_hash(own / "run.json")
    if data is not None:
        if data_hash and not data.sha256.startswith(data_hash):
            raise ValueError(
                f"{own} has outcomes on other data, whose hash begins with {data_hash} and not "
                f"with {data.sha256[:16]}: use that data, or name another folder"
            )
        data_hash = data.sha256[:16]
    protocol = experiment.smoke(data_hash) if smoke else experiment.protocol(data_hash)
    if data is None and not data_hash:
        return Study(None, protocol)  # not begun
    facts = None if data is None else {"name": data.name, "sha256": data.sha256}
    try:
        return Study(own, protocol, facts)
    except ValueError as problem:
        if smoke or "other settings" not in str(problem):
            raise
        raise ValueError(f"{problem}; if it was run with --smoke, give that here, too") from None


def _noted_hash(path: Path) -> str:
    if not path.exists():
        return ""
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["recipe"]["data_hash"])
    except (ValueError, KeyError, TypeError) as problem:
        raise ValueError(f"{path} is not the description of a study ({problem!r})") from problem


def run(
    experiments: Sequence[Experiment],
    folder: Path,
    open_data: Callable[[str], Dataset],
    runner: Callable[[Dataset], Runner],
    *,
    command: str = "",
    devices: Sequence[str] = ("cpu",),
    smoke: bool = False,
    stop: Stop = never,
    at_once: int = 1,
    workplace: Callable[[], AbstractContextManager[object]] = nullcontext,
    watch: Callable[[Experiment, Study], Callable[[Progress], None]] = lambda *_: lambda _: None,
) -> bool:
    """Run or resume some of the paper's experiments.

    Args:
        experiments: The experiments; the paper's own rows come first.
        folder: The folder of their studies.
        open_data: Returns a data set by name; called once for each.
        runner: Returns the runner of trials on a data set.
        command: The command line to record.
        devices: The devices to record.
        smoke: Whether it is a smoke test.
        stop: Called between epochs; once it returns True, trials under way are dropped.
        at_once: The number of concurrent studies, each in its own thread.
        workplace: Returns the context of such a thread, such as a CUDA stream.
        watch: Called when a study begins; its result is called after each trial.

    Returns:
        Whether all are finished.

    """
    failed, turn, load = threading.Event(), threading.Lock(), functools.cache(open_data)

    def stopped() -> bool:
        return failed.is_set() or stop()

    def work(experiment: Experiment) -> bool:
        with turn:
            if stopped():
                return False
            if study_of(experiment, folder, smoke=smoke).finished:
                return True
            data = load(experiment.row.data)
            study = study_of(experiment, folder, smoke=smoke, data=data)
            show = watch(experiment, study)
        train = _thinning(runner(data))
        try:
            with workplace():
                return study.run(
                    train, stop=stopped, command=command, devices=devices, share=1 / at_once,
                    watch=show,
                )  # fmt: skip
        except BaseException:
            failed.set()  # the others stop after their epoch
            raise

    return _all(work, in_turn(experiments), at_once, failed)


def _all(
    work: Callable[[Experiment], bool],
    experiments: Sequence[Experiment],
    at_once: int,
    failed: threading.Event,
) -> bool:
    """Work on all experiments, several at once; return whether all are finished."""
    if at_once < 1:
        raise ValueError(f"at_once must be 1 or more, not {at_once}")
    if at_once == 1:
        return all(list(map(work, experiments)))
    with ThreadPoolExecutor(at_once) as threads:
        try:
            return all(list(threads.map(work, experiments)))
        except BaseException:
            failed.set()
            raise


def _thinning(runner: Runner) -> Runner:
    return lambda trials, stop: map(_thinned, runner(trials, stop))


def _thinned(outcome: Outcome) -> Outcome:
    """Return an outcome with its learning curve rounded, and thinned unless it is a final one.

    Thinned curves keep the epochs 1, 2, 4, 8, ...
    """
    whole = outcome.trial.split.retrain
    curve = tuple(
        round(error, 5)
        for epoch, error in enumerate(outcome.curve, 1)
        if whole or epoch.bit_count() == 1
    )
    return replace(outcome, curve=curve, parameters=None)


# --- progress ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Status:
    """The progress of an experiment.

    Attributes:
        experiment: The experiment.
        done: The number of trials with an outcome.
        left: About how many are left.
        seconds: About how long these take on the same hardware; None if unknown.
        k: The selected k, if the search is over.

    """

    experiment: Experiment
    done: int
    left: int
    seconds: float | None
    k: float | None


def status(
    experiments: Sequence[Experiment],
    folder: Path,
    *,
    smoke: bool = False,
    opened: Callable[[Study], None] = lambda _: None,
) -> list[Status]:
    """Return the progress of each experiment, and about how long the rest takes.

    Args:
        experiments: The experiments.
        folder: The folder of their studies.
        smoke: Whether it is a smoke test.
        opened: Called with each study, once.

    Example:
        >>> from paper.rows import experiments, rows
        >>> [state] = status(experiments(rows("table1", "svhn 1x400*")), Path("nowhere"))
        >>> state.done, state.left
        (0, 228)

    """
    studies = {one: study_of(one, folder, smoke=smoke) for one in experiments}
    seconds = work = 0.0
    for experiment, study in studies.items():
        opened(study)
        seconds += device_seconds(study)
        work += _cost(experiment) * sum(outcome.epochs for outcome in study.ledger.values())
    pace = seconds / work if seconds and work else None
    return [_status(experiment, study, pace) for experiment, study in studies.items()]


def _status(experiment: Experiment, study: Study, pace: float | None) -> Status:
    protocol, ledger = study.protocol, study.ledger
    assert isinstance(protocol, PaperProtocol)
    wanted = protocol.wanted(ledger)
    searched = not wanted or protocol.is_searched(ledger)
    # Four rates for each k, the sweep, and the networks judged on the test set.
    usual = 4 * len(protocol.ks) * protocol.repetitions + 8
    usual += 2 * (protocol.retrainings + protocol.repetitions)
    left = len(wanted) if searched else max(len(wanted), usual - len(ledger))
    epochs = _epochs(wanted, list(ledger.values())) + _USUAL_EPOCHS * (left - len(wanted))
    return Status(
        experiment,
        done=len(ledger),
        left=left,
        seconds=None if pace is None else pace * _cost(experiment) * epochs,
        k=level(protocol.chosen(ledger)[0].k) if searched else None,
    )


def device_seconds(study: Study) -> float:
    """Return the device time of a study, or its share if several ran at once."""
    return float(sum(one["seconds"] * one.get("share", 1.0) for one in study.sessions))


def _epochs(trials: Sequence[Trial], done: Sequence[Outcome]) -> float:
    """Return about how many epochs trials take: more at lower rates."""
    seen: dict[float, list[int]] = {}
    for outcome in done:
        if outcome.stopped_by == "patience":  # excludes the short trials of the sweep
            seen.setdefault(outcome.trial.learning_rate, []).append(outcome.epochs)

    def expected(trial: Trial) -> float:
        if not seen:
            return _USUAL_EPOCHS
        nearest = min(seen, key=lambda rate: abs(math.log(rate / trial.learning_rate)))
        return statistics.fmean(seen[nearest]) * max(1.0, nearest / trial.learning_rate)

    return sum(map(expected, trials))


def _cost(experiment: Experiment) -> float:
    """Return the relative cost of an epoch: weights times examples."""
    row = experiment.row
    inputs = math.prod(BENCHMARKS[row.data].shape)
    weights = inputs * row.width + (row.hidden_layers - 1) * row.width**2
    return float(weights * BENCHMARKS[row.data].train_size)
