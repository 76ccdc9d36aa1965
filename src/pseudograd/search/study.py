"""A study: a protocol, the ledger of its outcomes, and the loop that runs trials.

`pseudograd tune`, the scikit-learn estimator, the paper's experiments, and your own training loop
with ``ask`` and ``tell`` all use this loop.
"""

from __future__ import annotations

import math
import operator
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, SupportsFloat

from torch import distributed

from pseudograd.fleet import Outcome, Stop, Trial, never
from pseudograd.search.comparison import Comparison, Result, result
from pseudograd.search.folder import StoredStudy, protocol_in, read_run
from pseudograd.search.ledger import Ledger
from pseudograd.search.protocol import Cell
from pseudograd.words import counted

Runner = Callable[[deque[Trial], Stop], Iterable[Outcome]]
"""Pops trials from the left of a deque, trains them and yields their outcomes in any order.

It returns when no trial is left or ``stop`` returns True. The deque may grow meanwhile; the study
calls the runner again while trials are left.
"""

_SECONDS_BETWEEN_NOTES = 5.0
_SHORTEST_WAIT, _LONGEST_WAIT = 0.05, 1.0  # seconds between polls for a free trial


@dataclass(frozen=True)
class Progress:
    """The progress of a study after a trial.

    Attributes:
        stage: "sweep", "search" or "retraining".
        done: The number of trials finished since the run started.
        total: The expected total, including the finished ones.
        outcome: The latest outcome.

    """

    stage: str
    done: int
    total: int
    outcome: Outcome


class Study(StoredStudy):
    """A search for the best k and learning rate, kept in a folder.

    The folder holds ``run.json`` (recipe, protocol, data, and when and where it ran) and
    ``ledger.jsonl`` (the outcomes). Creating the same study again resumes it. If several processes
    loop over the same folder, each trial goes to one of them, and if a process is killed, its
    trials go to the others.

    `pseudograd.Study` is the subclass that has a network and trains it. This class knows only
    trials and outcomes; studies opened for reading and those of your own training loop have it.

    Args:
        folder: Where to keep it; None keeps it in memory.
        protocol: The protocol of the search.
        data: Facts about the data, in a form that JSON can hold, kept with the study. A study
            cannot be resumed on data with other facts; None skips this check.

    Example:
        Your own training loop, here replaced by a formula that is best at k = 1/2, rate 0.1:

        >>> from math import log2
        >>> from pseudograd.fleet import OwnRecipe
        >>> from pseudograd.search import Protocol
        >>> recipe = OwnRecipe("ResNet-18, AdamW, 30 epochs")
        >>> study = Study(None, Protocol(recipe, ks=(2, 1, 0.5, 0.25), initial_rate=0.1))
        >>> for trial in study:
        ...     error = 0.1 + 0.02 * abs(log2(2 * trial.k)) + 0.01 * abs(trial.learning_rate - 0.1)
        ...     study.tell(trial, error=error)
        >>> study.result.chosen.k, study.result.chosen.learning_rate
        (0.5, 0.1)

        To share the work, start this program several times with the same folder instead of None,
        in processes of one machine or of several machines with a common file system.

    """

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> Study:
        """Open the study in a folder."""
        folder = Path(folder)
        written = read_run(folder)
        return cls(folder, protocol_in(folder), written["data"])

    # --- the loop ----------------------------------------------------------------------------

    def ask(self) -> Trial | None:
        """Return the next trial to run, or None if there is none at the moment.

        After None, telling outcomes may lead to further trials, until the study is finished. If the
        study has a folder, the trial is claimed: no other process gets it until this one has told
        its outcome, released it or ended.

        The ranks of a `torch.distributed` job train one network together, so they must call this
        together. Rank 0 asks, and all get its trial.

        Raises:
            BlockingIOError: If a fleet is using the folder.

        Example:
            >>> from pseudograd import Study
            >>> study = Study.own_training("mine", k=[1], learning_rates=[0.1], repetitions=2)
            >>> first, second = study.ask(), study.ask()
            >>> study.ask() is None  # the next trials depend on the outcomes of these
            True

        """
        ranks = distributed.is_available() and distributed.is_initialized()
        if ranks and distributed.get_world_size() > 1:
            return self._ask_rank_0()
        return self._ask()

    def _ask_rank_0(self) -> Trial | None:
        """Return the trial that rank 0 gets; take over the outcomes and sessions it knows."""
        leads = distributed.get_rank() == 0
        found: list[Any] = [None] * 4
        trial: Trial | None
        if leads:
            try:
                trial = self._ask()
                found = [None, trial, list(self.ledger.values()), self.sessions]
            except Exception as problem:  # raised in all ranks, which would otherwise wait forever
                found[0] = problem
        distributed.broadcast_object_list(found)
        failure, trial, outcomes, sessions = found
        if failure is not None:
            raise failure
        if not leads:
            self.ledger = Ledger(None, self.protocol.recipes)
            for outcome in outcomes:
                self.ledger.append(outcome)
            self.sessions[:] = sessions
            if trial is not None:
                self._led.add(trial)
        return trial

    def _ask(self) -> Trial | None:
        if not self._shares:
            for trial in self.protocol.wanted(self.ledger):
                if trial not in self._asked:
                    self._asked.add(trial)
                    return trial
            return None
        with self._sharing():
            wanted = self.protocol.wanted(self.ledger)
            return next((trial for trial in wanted if self._claims.take(trial)), None)

    def release(self, *trials: Trial) -> None:
        """Return trials without an outcome, so that `ask` offers them again.

        A loop over the study does this when it ends, whether by ``break``, an exception or Ctrl-C,
        and the operating system does when the process ends.

        Args:
            trials: The trials to return; by default all that have no outcome.

        Example:
            >>> from pseudograd import Study
            >>> study = Study.own_training("mine", learning_rates=[0.1])
            >>> trial = study.ask()
            >>> study.release(trial)
            >>> study.ask() == trial
            True

        """
        if not self._shares:
            untold = [trial for trial in self._asked if trial not in self.ledger]
            self._asked.difference_update(trials or untold)
            return
        self._notice_fork()
        with self._guard():
            for trial in trials or self._claims.trials:
                self._claims.release(trial)

    def tell(
        self,
        trial: Trial,
        outcome: Outcome | None = None,
        *,
        error: float | None = None,
        cross_entropy: float = math.nan,
        epochs: int = 0,
        wrong: Iterable[int] | None = None,
    ) -> None:
        """Record the outcome of a trial; it is on disk when this returns.

        In a `torch.distributed` job, only rank 0 records it.

        Args:
            trial: The trial, from this or another process.
            outcome: Its outcome, as a fleet returns it; or give the following values.
            error: The error on the split's validation fold, or on the test set if
                ``trial.split.retrain``: a fraction.
            cross_entropy: The mean cross-entropy there.
            epochs: How many epochs were run.
            wrong: The indices of the test examples that the network got wrong, if ``retrain``.

        Raises:
            BlockingIOError: If another process is running this trial, or a fleet is using the
                folder.

        Example:
            >>> from pseudograd import Study
            >>> study = Study.own_training("mine", learning_rates=[0.1])
            >>> trial = study.ask()
            >>> study.tell(trial, error=0.08, epochs=30)  # 8% of the validation fold
            >>> study.ledger[trial].error
            0.08

        """
        if not isinstance(trial, Trial):
            raise TypeError(f"trial must be one that ask() returned, not {trial!r}")
        if trial in self._led:
            return
        if outcome is None:
            outcome = _outcome(trial, error, cross_entropy, epochs, wrong)
        if not isinstance(outcome, Outcome):
            raise TypeError(f"outcome must be an Outcome, not {outcome!r}: give error=... by name")
        if outcome.trial != trial:
            raise ValueError(f"outcome must be that of {trial}, not of {outcome.trial}")
        if not self.protocol.covers(trial):
            raise ValueError(f"trial must be one that this study asks for, not {trial}")
        if not self._shares:
            if trial in self.ledger:
                raise _told(trial)
            self.ledger.append(outcome)
            if self._in_session:
                self.sessions[-1]["trials"] += 1
            return
        with self._sharing():
            if trial in self._claims.trials:
                if trial in self.ledger:  # the file system lost our lock, and another was faster
                    self._claims.release(trial)
                    return
            elif trial in self.ledger:
                raise _told(trial)
            elif not self._claims.take(trial):
                advice = "tell only trials that this process has asked for"
                raise BlockingIOError(f"another process is running {trial}: {advice}")
            self.ledger.append(outcome)
            self._claims.release(trial)
            if self._place is not None:
                self.sessions[self._place]["trials"] += 1
            if not self._loops or time.monotonic() - self._noted > _SECONDS_BETWEEN_NOTES:
                self._note_time()

    def __iter__(self) -> Iterator[Trial]:
        """Yield trials to run until the study is finished; call `tell` for each.

        Several processes may loop over one folder. If all trials are claimed, a loop waits: their
        outcomes may lead to more trials, or their process may end without an outcome.

        Raises:
            BlockingIOError: If a fleet is using the folder.
            RuntimeError: If a trial was not told and no other trial is left.

        """
        if self._shares:
            yield from self._shared_trials()
            return
        # Offer trials again that an earlier loop never told.
        self._asked = {trial for trial in self._asked if trial in self.ledger}
        while (trial := self.ask()) is not None:
            yield trial
        if left := len(self.protocol.wanted(self.ledger)):
            raise _untold(left)

    def _shared_trials(self) -> Iterator[Trial]:
        self._notice_fork()
        if not self._loops:
            self.release()  # trials that an earlier loop never told
            self._place = None  # each loop is a new session
        process, asked = os.getpid(), list[Trial]()
        with self._guard():
            self._loops += 1
        try:
            wait = _SHORTEST_WAIT
            while True:
                if (trial := self.ask()) is not None:
                    asked.append(trial)
                    yield trial
                    wait = _SHORTEST_WAIT
                # Otherwise two loops could wait for each other's untold trials forever.
                elif left := sum(trial not in self.ledger for trial in asked):
                    raise _untold(left)
                elif self.finished:
                    return
                else:
                    time.sleep(wait)
                    wait = min(2 * wait, _LONGEST_WAIT)
        finally:
            if process == os.getpid():  # not in a forked child
                with self._guard():
                    for trial in asked:
                        self._claims.release(trial)
                    self._loops -= 1
                    if not self._loops and self._place is not None:
                        self._note_time()
                        self._place = None
                        self._claims.others()  # removes those of killed processes

    def run(
        self,
        runner: Runner,
        *,
        stop: Stop = never,
        command: str = "",
        devices: Sequence[str] = ("cpu",),
        share: float = 1.0,
        watch: Callable[[Progress], None] = lambda _: None,
    ) -> bool:
        """Run trials until the study is finished or ``stop`` returns True.

        Args:
            runner: Trains trials, for example the ``run`` method of a `Fleet`.
            stop: Called between epochs; once it returns True, unfinished trials are dropped.
            command: The command line to record.
            devices: The devices to record.
            share: This study's share of the devices, if several studies run side by side.
            watch: Called after each trial.

        Returns:
            Whether the study is finished.

        Raises:
            RuntimeError: If the runner yields no outcome.

        """
        done = 0
        with self.session(command, devices, share):
            foretold = self.protocol.foretold - len(self.ledger)
            noted = -math.inf  # so that the first trial is recorded at once
            while not stop() and (wanted := self.protocol.wanted(self.ledger)):
                group = _group(wanted[0])
                queue = deque(trial for trial in wanted if _group(trial) == group)
                handed_out = set(queue)
                left = Counter(trial.k for trial in queue)
                known = len(self.ledger)
                for outcome in runner(queue, stop):
                    self.tell(outcome.trial, outcome)
                    done += 1
                    left[outcome.trial.k] -= 1
                    if not left[outcome.trial.k]:  # a k extends its rates once its trials are done
                        more = [t for t in self.protocol.wanted(self.ledger) if t not in handed_out]
                        more = [trial for trial in more if _group(trial) == group]
                        queue.extend(more)
                        handed_out.update(more)
                        left.update(trial.k for trial in more)
                    if time.monotonic() - noted > _SECONDS_BETWEEN_NOTES:
                        self._note_time()
                        noted = time.monotonic()
                    # Fewer trials than expected may have been needed.
                    ended = not left.total() and self.finished
                    total = done if ended else max(done + left.total(), foretold)
                    watch(Progress(self.protocol.stage_of(outcome.trial), done, total, outcome))
                if len(self.ledger) == known and not stop():
                    raise RuntimeError(
                        f"runner returned no outcome for {len(wanted)} trials, such as {wanted[0]}"
                    )
        return self.finished

    # --- what was found ----------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        """Whether no trial is left to run."""
        return not self.protocol.wanted(self.ledger)

    @property
    def best(self) -> Cell:
        """The pair of k and learning rate with the lowest validation error so far."""
        cells = self.protocol.cells(self.ledger)
        if not cells:
            raise ValueError("no pair of k and learning rate has all its trials yet")
        return self.protocol.best(cells, self.protocol.baseline)

    @property
    def result(self) -> Result:
        """The result of the finished study."""
        return result(self.protocol, self.ledger, self.data.get("positions", 1))

    @property
    def comparison(self) -> Comparison:
        """The comparison of the chosen k with k = 1 on the test set, once the study is finished."""
        return self.result.comparison

    def summary(self) -> str:
        """Return a summary of the study in a few lines; before its end, the best pairs so far.

        Example:
            >>> from pseudograd import Study
            >>> study = Study.own_training("mine", k=[1, 2], learning_rates=[0.1])
            >>> for trial in study:
            ...     study.tell(trial, error=0.1 * trial.k)
            >>> print(study.summary().splitlines()[0])
            does k matter? k = 1, plain cross-entropy, was chosen, so there is nothing to compare

        """
        from pseudograd.report.summary import study_summary

        return study_summary(self)

    def report(self) -> Path:
        """Write the study's page, ``report.html`` in its folder, and return its path."""
        from pseudograd.report.page import write_page

        return write_page(self)


def _outcome(
    trial: Trial,
    error: float | None,
    cross_entropy: float,
    epochs: int,
    wrong: Iterable[int] | None,
) -> Outcome:
    """Return the outcome of a user's own training, after checking the values."""
    if not _is_fraction(error):
        raise ValueError(
            f"error must be a fraction in [0, 1], not {error!r}: divide a percentage by 100, and "
            "tell 1 for a training that diverged"
        )
    try:
        given = [] if wrong is None else [*wrong]
        if given and str(getattr(given[0], "dtype", type(given[0]).__name__)).endswith("bool"):
            raise ValueError(
                "wrong must hold indices of test examples, not booleans: use torch.nonzero or "
                "numpy.flatnonzero"
            )
        mistakes = None if wrong is None else tuple(sorted(map(operator.index, given)))
    except TypeError as problem:
        raise ValueError("wrong must hold indices of test examples, whole numbers") from problem
    if mistakes and mistakes[0] < 0:
        raise ValueError(f"wrong must hold indices of test examples, not {mistakes[0]}")
    if mistakes and len(set(mistakes)) < len(mistakes):
        raise ValueError("wrong must hold the index of a test example once, not several times")
    assert error is not None
    figures = float(error), 0, float(error), float(cross_entropy), int(epochs)
    return Outcome(trial, *figures, "", (), mistakes)


def _is_fraction(value: object) -> bool:
    """Return whether a value is a number in [0, 1], or a tensor or array of one such number."""
    try:
        return isinstance(value, SupportsFloat) and 0 <= float(value) <= 1
    except (TypeError, ValueError):
        return False


def _told(trial: Trial) -> ValueError:
    return ValueError(f"trial must be one without an outcome, but it was told before: {trial}")


def _untold(count: int) -> RuntimeError:
    return RuntimeError(
        f"{counted(count, 'trial')} ended without an outcome: call study.tell for each trial"
    )


def _group(trial: Trial) -> tuple[object, ...]:
    """Return the settings that trials must share to be trained from one queue."""
    return trial.recipe.architecture, trial.split.retrain
