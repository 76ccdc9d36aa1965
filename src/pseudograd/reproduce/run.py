"""The paper's rows, run: a ledger for each network, and a manifest of when and where.

Rows that differ in the momentum alone share a network, a ledger and a fleet: all their trials are
trained together, and as soon as one row's outcomes ask for more, these join the others.
"""

from __future__ import annotations

import json
import math
import re
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pseudograd import environment
from pseudograd.data import Dataset
from pseudograd.files import write_whole
from pseudograd.fleet import Outcome, Trial
from pseudograd.reproduce.rows import Experiment, by_network
from pseudograd.search import Ledger, Protocol, Runner
from pseudograd.search.ledger import locked, writing

_SECONDS_BETWEEN_NOTES = 5.0


def ledger_of(folder: Path, network: str, data_hash: str | None = None) -> Ledger:
    """Open the ledger of a network.

    Args:
        folder: Of all ledgers.
        network: Its name, as `Experiment.network` has it.
        data_hash: Of its data set; lines of other data are set aside.

    Example:
        >>> ledger_of(Path("results"), "mnist 1x400 tanh [0,1]").path.name
        'mnist-1x400-tanh-0-1.jsonl'

    """
    name = re.sub(r"[^\w]+", "-", network).strip("-") + ".jsonl"
    return Ledger(folder / name, data_hash)


@dataclass(frozen=True)
class Step:
    """An outcome on the way.

    Attributes:
        experiment: Whose trial it was.
        outcome: What came of it.
        left: How many trials of this network are known to be left.

    Example:
        >>> from pseudograd.reproduce.rows import experiments, rows
        >>> trial = Trial("mnist", (400,), k=0.5, learning_rate=0.1)
        >>> outcome = Outcome(trial, 0.02, 12, 0.03, 0.1, 27, "patience", ())
        >>> Step(experiments(rows("table1"))[0], outcome, 209).left
        209

    """

    experiment: Experiment
    outcome: Outcome
    left: int


class TimeIsUp(Exception):
    """The time that was given is over; what is finished is kept.

    Example:
        >>> issubclass(TimeIsUp, Exception)
        True

    """


class Clock:
    """How much time is left, and how long trials take: none should be begun that cannot end.

    Args:
        seconds: The time there is; None if it does not matter.

    Example:
        >>> clock = Clock(60)
        >>> clock.took["mnist 1x400"] = [20.0, 30.0]
        >>> clock.suffices("mnist 1x400"), clock.suffices("mnist 3x800")  # six times the work
        (True, False)

    """

    def __init__(self, seconds: float | None = None) -> None:
        self.end = math.inf if seconds is None else time.monotonic() + seconds
        self.took: dict[str, list[float]] = {}  # by network, from taking a trial to its end

    def suffices(self, network: str) -> bool:
        """Whether a trial of a network that is begun now ends in time, if it is like the others.

        While nothing is known, it does.
        """
        means = {other: statistics.fmean(took) for other, took in self.took.items()}
        guesses = [_cost(network) / _cost(other) * mean for other, mean in means.items()]
        return time.monotonic() + means.get(network, max(guesses, default=-math.inf)) <= self.end


class _Queue(deque[Trial]):
    """Trials for a fleet, which notes when each of them is taken."""

    def __init__(self, trials: Iterable[Trial]) -> None:
        super().__init__(trials)
        self.taken: dict[Trial, float] = {}

    def popleft(self) -> Trial:
        trial = super().popleft()
        self.taken[trial] = time.monotonic()
        return trial


def run_network(
    protocols: dict[Experiment, Protocol], ledger: Ledger, run: Runner, clock: Clock | None = None
) -> Generator[Step, None, None]:
    """Run what the rows of one network want until they want nothing more.

    When the time is too short for one more trial, those under way are the last of the search; rows
    whose search is over are then finished as far as possible. A row's next trials go before what
    waits of others, so that rows end one after the other.

    Args:
        protocols: Of each row.
        ledger: What is known of all of them.
        run: Trains trials.
        clock: The time there is; unlimited unless given.

    Raises:
        TimeIsUp: If trials were left out for want of time.

    Example:
        >>> import tempfile
        >>> from pseudograd.reproduce.rows import experiments, rows
        >>> def made_up(queue):
        ...     while queue:
        ...         trial = queue.popleft()
        ...         error = 0.01 + 0.001 * abs(trial.learning_rate - 0.25)
        ...         yield Outcome(trial, error, 1, error, 0.1, 2, "patience", (), wrong=())
        >>> some = experiments(rows("all", "svhn 1x400 m0*"))
        >>> protocols = {experiment: experiment.smoke() for experiment in some}
        >>> ledger = ledger_of(Path(tempfile.mkdtemp()), some[0].network)
        >>> sum(1 for _ in run_network(protocols, ledger, made_up)) == len(ledger)
        True

    """
    clock, network, enough = clock or Clock(), next(iter(protocols)).network, True
    while wanted := _wanted(protocols, ledger):
        # Networks that are trained on more examples make another fleet.
        retrain = next(iter(wanted)).split.retrain
        if not enough:
            retrain = any(trial.split.retrain for trial in wanted)
            if not retrain:
                raise TimeIsUp
        queue = _Queue(trial for trial in wanted if trial.split.retrain == retrain)
        asked = set(queue)
        # No row asks for more before all trials of one of its k are done.
        under_way = Counter((wanted[trial], trial.k) for trial in queue)
        for outcome in run(queue):
            experiment = wanted[outcome.trial]
            ledger.append(_thinned(outcome))
            if outcome.trial in queue.taken and outcome.stopped_by == "patience":
                took = time.monotonic() - queue.taken[outcome.trial]
                clock.took.setdefault(network, []).append(took)
            under_way[experiment, outcome.trial.k] -= 1
            enough = enough and clock.suffices(network)
            if not enough:
                queue.clear()
            elif not under_way[experiment, outcome.trial.k]:
                more = [
                    trial
                    for trial in protocols[experiment].wanted(ledger)
                    if trial not in asked and trial.split.retrain == retrain
                ]
                asked.update(more)
                wanted |= dict.fromkeys(more, experiment)
                under_way.update((experiment, trial.k) for trial in more)
                queue.extendleft(reversed(more))
            yield Step(experiment, outcome, under_way.total())


def _wanted(protocols: dict[Experiment, Protocol], ledger: Ledger) -> dict[Trial, Experiment]:
    return {
        trial: experiment
        for experiment, protocol in protocols.items()
        for trial in protocol.wanted(ledger)
    }


def _thinned(outcome: Outcome) -> Outcome:
    """An outcome as it is kept: its learning curve rounded, and only a final network's whole.

    Of others the epochs 1, 2, 4, 8, ... are kept.
    """
    whole = outcome.trial.split.retrain
    curve = tuple(
        round(error, 5) for at, error in enumerate(outcome.curve) if whole or not at & at + 1
    )
    return replace(outcome, curve=curve, parameters=None)


def reproduce(
    experiments: Sequence[Experiment],
    folder: Path,
    open_data: Callable[[str], Dataset],
    runner: Callable[[Dataset], Runner],
    *,
    command: str = "",
    devices: Sequence[str] = ("cpu",),
    smoke: bool = False,
    time_limit: float | None = None,
    watch: Callable[[Step], None] = lambda _: None,
) -> None:
    """Run some of the paper's experiments, or what is left of them.

    Args:
        experiments: The experiments.
        folder: Where the ledgers and the manifest are kept.
        open_data: Gives a data set by its name.
        runner: Makes what trains trials on a data set.
        command: What to write down as having been asked for.
        devices: What to write down as having been used.
        smoke: Whether to run all in small, to see that it runs.
        time_limit: Seconds after which to stop. Some time before, no more trials are begun, so
            that those under way can end; those that do not are lost.
        watch: Called after each trial.

    Raises:
        TimeIsUp: If the time was over before the end.

    Example:
        >>> import tempfile
        >>> reproduce([], Path(tempfile.mkdtemp()), {}.get, lambda data: list)

    """
    started, clock = time.monotonic(), Clock(time_limit)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    sessions(folder)  # if the manifest cannot be read, this is the time to say so
    session = {**environment.session(command, *devices), "data": {}, "networks": {}}
    for network, group in by_network(experiments).items():
        protocols = {e: e.smoke() if smoke else e.protocol() for e in group}
        if not _wanted(protocols, ledger_of(folder, network)):
            continue
        if not clock.suffices(network):
            raise TimeIsUp
        data = open_data(group[0].row.data)
        ledger = ledger_of(folder, network, data.sha256)
        session["data"][data.name] = data.sha256
        log = session["networks"].setdefault(network, {"trials": 0, "epochs": 0, "seconds": 0})
        begun = noted = time.monotonic()

        def note(log: dict[str, Any] = log, begun: float = begun) -> float:
            """Write down how far it is; after a kill, this is what is known of the time."""
            now = time.monotonic()
            log["seconds"] = round(now - begun, 2)
            session["seconds"] = round(now - started, 2)
            _note(folder, session)
            return now

        with locked(ledger.path):
            try:
                with closing(run_network(protocols, ledger, runner(data), clock)) as steps:
                    for step in steps:
                        log["trials"] += 1
                        log["epochs"] += step.outcome.epochs
                        watch(step)
                        now = time.monotonic()
                        if now > clock.end:
                            raise TimeIsUp
                        if now - noted > _SECONDS_BETWEEN_NOTES:
                            noted = note()
            finally:
                note()


@dataclass(frozen=True)
class Status:
    """How far an experiment is.

    Attributes:
        experiment: Which.
        done: Trials that have an outcome.
        left: About how many have none: those wanted now, and as many more as rows usually need.
        seconds: About how long these take; None if nothing like it has been run.
        selected_k: The k that was selected; None before the end.

    Example:
        >>> from pseudograd.reproduce.rows import experiments, rows
        >>> Status(experiments(rows("table1"))[0], 0, 340, None, None).left
        340

    """

    experiment: Experiment
    done: int
    left: int
    seconds: float | None
    selected_k: float | None


def status(experiments: Sequence[Experiment], folder: Path) -> list[Status]:
    """Say how far each experiment is.

    Args:
        experiments: The experiments.
        folder: Of the ledgers.

    Example:
        >>> from pseudograd.reproduce.rows import experiments, rows
        >>> [state] = status(experiments(rows("table1", "svhn 1x400*")), Path("nowhere"))
        >>> state.done, state.left
        (0, 228)

    """
    logs = [log for session in sessions(folder) for log in session["networks"].items()]
    speeds = [(_cost(network), log["trials"], log["seconds"]) for network, log in logs]
    work = sum(cost * trials for cost, trials, _ in speeds)
    rate = sum(seconds for *_, seconds in speeds) / work if work else None
    found = []
    for network, group in by_network(experiments).items():
        ledger = ledger_of(folder, network)
        for experiment in group:
            protocol = experiment.protocol()
            done = sum(trial.momentum == experiment.row.momentum for trial in ledger)
            wanted = len(protocol.wanted(ledger))
            # Four rates for each k, the sweep, and the networks judged on the test set.
            usual = 4 * len(protocol.ks) * protocol.repetitions + 8
            usual += 2 * (protocol.retrainings + protocol.repetitions)
            left = max(wanted, usual - done) if wanted else 0
            seconds = None if rate is None else rate * _cost(network) * left
            k = None if wanted else protocol.chosen(ledger)[0].k
            found.append(Status(experiment, done, left, seconds, k))
    return found


def _cost(network: str) -> float:
    """About how long a trial takes, in units of its own: its weights times its examples."""
    data, layers, *_ = network.split()
    depth, width = map(int, layers.split("x"))
    inputs, examples = {"mnist": (784, 60_000), "svhn": (3072, 73_257)}.get(data, (3072, 50_000))
    return float((inputs * width + (depth - 1) * width**2) * examples)


def sessions(folder: Path) -> list[dict[str, Any]]:
    """Read the manifest: when and where the rows were run.

    Args:
        folder: Of the ledgers.

    Example:
        >>> sessions(Path("nowhere"))
        []

    """
    path = folder / "manifest.json"
    if not path.exists():
        return []
    try:
        found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as problem:
        raise ValueError(f"{path} is not a manifest ({problem})") from problem
    return found


def _note(folder: Path, session: dict[str, Any]) -> None:
    """Put a session into the manifest, in the place of what it had there, or not at all."""
    path = folder / "manifest.json"
    others = [other for other in sessions(folder) if other["started"] != session["started"]]
    with writing(path):
        write_whole(path, json.dumps([*others, session], indent=1) + "\n")
