"""The paper's rows, run: a ledger for each network, and a manifest of when and where.

Rows that differ in the momentum alone share a network, a ledger and a fleet: all their trials are
trained together, and as soon as one row's outcomes ask for more, these join the others. Several
networks may be under way at once, so that the last trials of one leave no device idle.
"""

from __future__ import annotations

import json
import math
import re
import statistics
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paper.rows import Experiment, by_network
from pseudograd import environment
from pseudograd.data import Dataset
from pseudograd.data.registry import BENCHMARKS
from pseudograd.files import in_turn, locked, write_whole, writing
from pseudograd.fleet import Outcome, Trial
from pseudograd.search import Ledger, Protocol, Runner

_SECONDS_BETWEEN_NOTES = 5.0
_USUAL_EPOCHS = 60.0  # of a trial, where nothing like it has been run


def ledger_path(folder: Path, network: str) -> Path:
    """Say where the ledger of a network is.

    Args:
        folder: Of all ledgers.
        network: Its name, as `Experiment.network` has it.

    Example:
        >>> ledger_path(Path("results"), "mnist 1x400 tanh [0,1]").name
        'mnist-1x400-tanh-0-1.jsonl'

    """
    return folder / (re.sub(r"[^\w]+", "-", network).strip("-") + ".jsonl")


def ledger_of(folder: Path, network: str, data_hash: str | None = None) -> Ledger:
    """Open the ledger of a network, all of whose outcomes are on the same data.

    Args:
        folder: Of all ledgers.
        network: Its name, as `Experiment.network` has it.
        data_hash: Of the data set that more outcomes will be on.

    Raises:
        ValueError: If there are outcomes on other data.

    Example:
        >>> len(ledger_of(Path("nowhere"), "mnist 1x400"))
        0

    """
    ledger = Ledger(ledger_path(folder, network), data_hash)
    noted = sorted(ledger.data_hashes - {ledger.data_hash})
    if noted and data_hash:
        raise ValueError(
            f"{ledger.path} has outcomes on other data, whose hash begins with "
            f"{' or '.join(noted)}, and not with {ledger.data_hash}: use that data, or name "
            "another folder"
        )
    if len(noted) > 1:
        raise ValueError(
            f"{ledger.path} has outcomes on different data, whose hashes begin with "
            f"{' and '.join(noted)}: keep the lines of one of them"
        )
    return ledger


@dataclass(frozen=True)
class Step:
    """An outcome on the way.

    Attributes:
        experiment: Whose trial it was.
        outcome: What came of it.
        left: How many trials of this network are known to be left.

    Example:
        >>> from paper.rows import experiments, rows
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


class _Stopped(Exception):
    """Another network's thread has failed, or was interrupted, and says why."""


class Clock:
    """How much time is left, and how long trials take: none should be begun that cannot end.

    Args:
        seconds: The time there is; None if it does not matter.

    Attributes:
        stopped: Set it to end all that is under way after its current epoch.

    Example:
        >>> clock = Clock(60)
        >>> clock.note("mnist 1x400", 20.0)
        >>> clock.note("mnist 1x400", 30.0)
        >>> clock.suffices("mnist 1x400"), clock.suffices("mnist 3x800")  # six times the work
        (True, False)
        >>> clock.is_over()
        False

    """

    def __init__(self, seconds: float | None = None) -> None:
        self.end = math.inf if seconds is None else time.monotonic() + seconds
        self.stopped = threading.Event()
        self._took: dict[str, list[float]] = {}  # by network
        self._lock = threading.Lock()

    def note(self, network: str, seconds: float) -> None:
        """Note how long a trial of a network took, from being taken to its end."""
        with self._lock:
            self._took.setdefault(network, []).append(seconds)

    def suffices(self, network: str) -> bool:
        """Whether a trial of a network that is begun now ends in time, if it is like the others.

        While nothing is known, it does until the time is over.
        """
        with self._lock:
            means = {other: statistics.fmean(took) for other, took in self._took.items()}
        guesses = [_cost(network) / _cost(other) * mean for other, mean in means.items()]
        return time.monotonic() + means.get(network, max(guesses, default=0.0)) <= self.end

    def is_over(self) -> bool:
        """Whether no time is left."""
        return time.monotonic() > self.end


class Shares:
    """How long each of several took: while n are under way, each of them has an nth of the time.

    Example:
        >>> shares = Shares()
        >>> shares.begin("mnist 1x400", now=0.0)
        >>> shares.begin("mnist 1x800", now=10.0)
        >>> shares.end("mnist 1x400", now=16.0)
        >>> shares.until(20.0)
        {'mnist 1x400': 13.0, 'mnist 1x800': 7.0}

    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._under_way: set[str] = set()
        self._now = 0.0

    def begin(self, name: str, now: float) -> None:
        """Note that one is under way from now on."""
        self.until(now)
        self._seconds.setdefault(name, 0.0)
        self._under_way.add(name)

    def end(self, name: str, now: float) -> None:
        """Note that one is no longer under way."""
        self.until(now)
        self._under_way.remove(name)

    def until(self, now: float) -> dict[str, float]:
        """Give the seconds of all that were begun."""
        for name in self._under_way:
            self._seconds[name] += (now - self._now) / len(self._under_way)
        self._now = now
        return self._seconds


class _Queue(deque[Trial]):
    """Trials for a runner: notes when each is taken, and stops the runner when it next asks how
    many are left. A fleet does so after every epoch, once it has given out what has ended.
    """

    def __init__(self, trials: Iterable[Trial], clock: Clock) -> None:
        super().__init__(trials)
        self.clock = clock
        self.taken: dict[Trial, float] = {}

    def __len__(self) -> int:
        if self.clock.stopped.is_set():
            raise _Stopped
        if self.clock.is_over():
            raise TimeIsUp
        return super().__len__()

    def popleft(self) -> Trial:
        trial = super().popleft()
        self.taken[trial] = time.monotonic()
        return trial


def run_network(
    protocols: dict[Experiment, Protocol], ledger: Ledger, run: Runner, clock: Clock | None = None
) -> Generator[Step, None, None]:
    """Run what the rows of one network want until they want nothing more.

    When the time is too short for one more trial, those under way are the last of the search; rows
    whose search is over are then finished as far as possible. What has not ended when the time is
    over is lost. A row's next trials go before what waits of others, so that rows end one after the
    other.

    Args:
        protocols: Of each row.
        ledger: What is known of all of them.
        run: Trains trials.
        clock: The time there is; unlimited unless given.

    Raises:
        TimeIsUp: If trials were left out, or not ended, for want of time.
        RuntimeError: If ``run`` gives no outcome of any trial.

    Example:
        >>> import tempfile
        >>> from paper.rows import experiments, rows
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
        some = (trial for trial in wanted if trial.split.retrain == retrain)
        queue, known = _Queue(some, clock), len(ledger)
        # No row asks for more before all trials of one of its k are done.
        under_way = Counter((wanted[trial], trial.k) for trial in queue)
        for outcome in run(queue):
            experiment = wanted[outcome.trial]
            ledger.append(_thinned(outcome))
            # By patience: trials of the sweep, which end by their limit, are too short to tell.
            if outcome.trial in queue.taken and outcome.stopped_by == "patience":
                clock.note(network, time.monotonic() - queue.taken[outcome.trial])
            under_way[experiment, outcome.trial.k] -= 1
            enough = enough and clock.suffices(network)
            if not enough:
                queue.clear()
            elif not under_way[experiment, outcome.trial.k]:
                more = [
                    trial
                    for trial in protocols[experiment].wanted(ledger)
                    if trial not in wanted and trial.split.retrain == retrain
                ]
                wanted |= dict.fromkeys(more, experiment)
                under_way.update((experiment, trial.k) for trial in more)
                queue.extendleft(reversed(more))
            yield Step(experiment, outcome, under_way.total())
        if len(ledger) == known:
            raise RuntimeError(f"run gave no outcome of the trials of {network}")


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
        round(error, 5)
        for epoch, error in enumerate(outcome.curve, 1)
        if whole or epoch.bit_count() == 1
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
    at_once: int = 1,
    workplace: Callable[[], AbstractContextManager[object]] = nullcontext,
    begin: Callable[[str, Ledger, int], None] = lambda *_: None,
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
        at_once: How many networks may be under way, each in a thread of its own.
        workplace: Makes what such a thread works in, such as a stream of its own on a GPU.
        begin: Called when a network begins, with its name, its ledger, and how many trials are
            wanted now.
        watch: Called after each trial, as ``begin`` by one thread at a time.

    Raises:
        TimeIsUp: If the time was over before the end.

    Example:
        >>> import tempfile
        >>> reproduce([], Path(tempfile.mkdtemp()), {}.get, lambda data: list)

    """
    if at_once < 1:
        raise ValueError(f"at_once must be 1 or more, not {at_once}")
    started, clock = time.monotonic(), Clock(time_limit)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    sessions(folder)  # if the manifest cannot be read, this is the time to say so
    session = {**environment.session(command, *devices), "at_once": at_once, "smoke": smoke}
    notes = _Notes(folder, session, started)

    def networks() -> Generator[tuple[str, dict[Experiment, Protocol], Dataset], None, None]:
        """What is left to run, each when its turn has come."""
        for network, group in by_network(experiments).items():
            protocols = {e: e.smoke() if smoke else e.protocol() for e in group}
            if not _wanted(protocols, ledger_of(folder, network)):
                continue
            if not clock.suffices(network):
                raise TimeIsUp
            yield network, protocols, open_data(group[0].row.data)

    left, turn = networks(), threading.Lock()
    reasons: list[BaseException] = []  # of threads that did not come to the end

    def work() -> None:
        """Run one network after the other."""
        try:
            with workplace():
                while True:
                    with turn:
                        network = next(left, None)
                    if network is None:
                        return
                    run(*network)
        except _Stopped:
            pass
        except BaseException as reason:
            reasons.append(reason)
            if not isinstance(reason, TimeIsUp):  # others know themselves what they have time for
                clock.stopped.set()
        finally:
            with turn:
                left.close()

    def run(network: str, protocols: dict[Experiment, Protocol], data: Dataset) -> None:
        with ExitStack() as until_its_end:
            until_its_end.enter_context(locked(ledger_path(folder, network)))
            ledger = ledger_of(folder, network, data.sha256)  # as it is now that it is ours
            log = until_its_end.enter_context(notes.of(network, data))
            steps = run_network(protocols, ledger, runner(data), clock)
            until_its_end.enter_context(closing(steps))
            with notes.lock:
                begin(network, ledger, len(_wanted(protocols, ledger)))
            for step in steps:
                with notes.lock:
                    log["trials"] += 1
                    log["epochs"] += step.outcome.epochs
                    watch(step)
                    if time.monotonic() - notes.written > _SECONDS_BETWEEN_NOTES:
                        notes.write()

    with ThreadPoolExecutor(at_once, "network") as pool:  # which is left when all have ended
        try:
            # This thread works too: it is the one that Ctrl-C interrupts.
            others = [pool.submit(work) for _ in range(at_once - 1)]
            work()
            wait(others)
        except BaseException:
            clock.stopped.set()
            raise
    if reasons:
        raise min(reasons, key=lambda reason: isinstance(reason, TimeIsUp))


class _Notes:
    """What is to be known of a session, noted by several threads, and written to the manifest."""

    def __init__(self, folder: Path, session: dict[str, Any], started: float) -> None:
        self.folder, self.session = folder, {**session, "data": {}, "networks": {}}
        self.started = self.written = started
        self.shares, self.lock = Shares(), threading.Lock()

    @contextmanager
    def of(self, network: str, data: Dataset) -> Iterator[dict[str, Any]]:
        """While a network is under way: what is noted of it."""
        with self.lock:
            self.session["data"][data.name] = data.sha256
            log = {"trials": 0, "epochs": 0, "seconds": 0.0}
            self.session["networks"][network] = log
            self.shares.begin(network, time.monotonic())
        try:
            yield log
        finally:
            with self.lock:
                self.shares.end(network, time.monotonic())
                self.write()

    def write(self) -> None:
        """Write down how far all are; after a kill, this is what is known of the time."""
        self.written = time.monotonic()
        for network, seconds in self.shares.until(self.written).items():
            self.session["networks"][network]["seconds"] = round(seconds, 2)
        self.session["seconds"] = round(self.written - self.started, 2)
        path, started = self.folder / "manifest.json", self.session["started"]
        with writing(path), in_turn(self.folder):  # others may be at work on other networks
            others = [other for other in _sessions_in(path) if other["started"] != started]
            write_whole(path, json.dumps([*others, self.session], indent=1) + "\n")


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
        >>> from paper.rows import experiments, rows
        >>> Status(experiments(rows("table1"))[0], 0, 340, None, None).left
        340

    """

    experiment: Experiment
    done: int
    left: int
    seconds: float | None
    selected_k: float | None


def status(
    experiments: Sequence[Experiment],
    folder: Path,
    smoke: bool = False,
    opened: Callable[[Ledger], None] = lambda _: None,
) -> list[Status]:
    """Say how far each experiment is.

    Args:
        experiments: The experiments.
        folder: Of the ledgers.
        smoke: Whether they were run in small.
        opened: Called with each ledger, once.

    Example:
        >>> from paper.rows import experiments, rows
        >>> [state] = status(experiments(rows("table1", "svhn 1x400*")), Path("nowhere"))
        >>> state.done, state.left
        (0, 228)

    """
    logs = [log for session in sessions(folder, smoke) for log in session["networks"].items()]
    work = sum(_cost(network) * log["epochs"] for network, log in logs)
    pace = sum(log["seconds"] for _, log in logs) / work if work else None
    found = []
    for network, group in by_network(experiments).items():
        ledger = ledger_of(folder, network)
        opened(ledger)
        for experiment in group:
            protocol = experiment.smoke() if smoke else experiment.protocol()
            own = [outcome for trial, outcome in ledger.items() if protocol.covers(trial)]
            done, wanted = len(own), protocol.wanted(ledger)
            searching = bool(replace(protocol, control=False).wanted(ledger))
            # Four rates for each k, the sweep, and the networks judged on the test set.
            usual = 4 * len(protocol.ks) * protocol.repetitions + 8
            usual += 2 * (protocol.retrainings + protocol.repetitions)
            left = max(len(wanted), usual - done) if searching else len(wanted)
            epochs = _epochs(wanted, own) + _USUAL_EPOCHS * (left - len(wanted))
            seconds = None if pace is None else pace * _cost(network) * epochs
            k = None if searching else protocol.chosen(ledger)[0].k
            found.append(Status(experiment, done, left, seconds, k))
    return found


def _epochs(trials: Sequence[Trial], done: Sequence[Outcome]) -> float:
    """About how many epochs trials take: the more, the lower their rate is."""
    seen: dict[float, list[int]] = {}
    for outcome in done:
        if outcome.stopped_by == "patience":  # not the short ones of the sweep
            seen.setdefault(outcome.trial.learning_rate, []).append(outcome.epochs)

    def expected(trial: Trial) -> float:
        if not seen:
            return min(_USUAL_EPOCHS, trial.max_epochs)
        nearest = min(seen, key=lambda rate: abs(math.log(rate / trial.learning_rate)))
        epochs = statistics.fmean(seen[nearest]) * max(1.0, nearest / trial.learning_rate)
        return min(epochs, trial.max_epochs)

    return sum(map(expected, trials))


def _cost(network: str) -> float:
    """About how long an epoch takes, in units of its own: weights times examples."""
    data, layers, *_ = network.split()
    depth, width = map(int, layers.split("x"))
    inputs = math.prod(BENCHMARKS[data].shape)
    return float((inputs * width + (depth - 1) * width**2) * BENCHMARKS[data].train_size)


def sessions(folder: Path, smoke: bool = False) -> list[dict[str, Any]]:
    """Read the manifests: when and where the rows were run, in order of time.

    What is written is ``manifest.json``; those of other machines are kept beside it by names such
    as ``manifest-2.json``. A session that several of them have is given once.

    Args:
        folder: Of the ledgers.
        smoke: Whether to give those that ran rows in small, which tell nothing of whole ones.

    Example:
        >>> sessions(Path("nowhere"))
        []

    """
    found = [session for path in folder.glob("manifest*.json") for session in _sessions_in(path)]
    found.sort(key=lambda session: (session["started"], session["seconds"]))
    once = {session["started"]: session for session in found}.values()
    return [session for session in once if session.get("smoke", False) == smoke]


def _sessions_in(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    try:
        found: Any = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as problem:
        raise ValueError(f"{path} is not a manifest ({problem})") from problem
    needed = {"started", "seconds", "hardware", "versions", "commit", "data", "networks"}
    if not isinstance(found, list) or not all(
        isinstance(session, dict) and session.keys() >= needed for session in found
    ):
        raise ValueError(f"{path} is not a manifest (it is JSON, but not a list of sessions)")
    return found
