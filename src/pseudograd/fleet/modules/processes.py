"""Trials on a CPU: one process per core. If a process dies, only unfinished trials are retried."""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import signal
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, wait
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pseudograd.extras import needed_for
from pseudograd.fleet.modules.examples import Examples
from pseudograd.fleet.modules.loop import train
from pseudograd.fleet.modules.training import Training
from pseudograd.fleet.trial import Outcome, Stop, Trial
from pseudograd.words import last_line

_MOST_LOSSES = 3  # a run gives up when a trial's process has died this often
_LOOK_AROUND = 0.2  # seconds between polls of `stop` and of the parent process


class Processes:
    """A pool of worker processes that train trials.

    Functions are sent by cloudpickle, so lambdas and classes defined in a script work; tensors are
    shared as memory-mapped files.

    Args:
        training: The network and how it is trained.
        examples: The data.
        keep_parameters: Whether outcomes of retraining carry the weights.
        count: The number of processes.

    """

    def __init__(
        self, training: Training, examples: Examples, keep_parameters: bool, count: int
    ) -> None:
        with needed_for("training in several processes"):
            import loky  # noqa: F401, depends on cloudpickle
            from cloudpickle import dumps

        self.count = count
        functions = pickled(dumps, training, examples.source)
        self._until_closed = contextlib.ExitStack()
        folder = Path(self._until_closed.enter_context(tempfile.TemporaryDirectory()))
        files = [folder / f"{at}.npy" for at in range(len(examples.arrays))]
        for file, array in zip(files, examples.arrays, strict=True):
            np.save(file, array)
        self.folder = folder
        self.task = (functions, keep_parameters, files, *examples.known)
        self._executor: Any = None

    def close(self) -> None:
        """End the processes."""
        self._end()
        self._until_closed.close()

    def _end(self) -> None:
        if self._executor is not None:
            self._executor.shutdown(wait=True, kill_workers=True)
            self._executor = None

    def __call__(self, pending: deque[Trial], stop: Stop) -> Iterator[Outcome]:
        """Train the pending trials, and yield each outcome when its trial ends."""
        losses: Counter[Trial] = Counter()
        while pending and not stop():
            running: dict[Future[Outcome | None], Trial] = {}
            if self._executor is None:
                self._executor = self._started()
            try:
                yield from self._through(running, pending, stop)
            except BrokenExecutor as problem:
                for trial in running.values():
                    losses[trial] += 1
                    if losses[trial] >= _MOST_LOSSES:
                        raise ConnectionError(
                            f"a worker process died {_MOST_LOSSES} times while training a trial: "
                            f"check that there is enough memory for {trial}"
                        ) from problem
                pending.extendleft(running.values())
                self._end()
            except BaseException:
                self._end()
                raise
            else:
                if running:  # stopped
                    self._end()

    def _through(
        self,
        running: dict[Future[Outcome | None], Trial],
        pending: deque[Trial],
        stop: Stop,
    ) -> Iterator[Outcome]:
        while not stop():
            while pending and len(running) < self.count:
                trial = pending.popleft()
                running[self._executor.submit(_train, trial)] = trial
            if not running:
                return
            ended, _ = wait(running, _LOOK_AROUND, return_when=FIRST_COMPLETED)
            for future in ended:
                outcome = future.result()  # raises before it leaves `running` if its process died
                del running[future]
                if outcome is not None:
                    yield outcome

    def _started(self) -> Any:
        from loky import ProcessPoolExecutor

        return ProcessPoolExecutor(
            self.count,
            initializer=_begin,
            initargs=(self.task, os.getpid(), str(self.folder)),
            timeout=None,
        )


def pickled(dumps: Callable[[Any], bytes], training: Training, source: Any) -> bytes:
    """Pickle what trials need in other processes with cloudpickle's ``dumps``.

    Args:
        dumps: Pickles any value.
        training: The network and how it is trained.
        source: The Datasets that examples are read from; None if there are none.

    Raises:
        ValueError: If one of them holds something that cannot be pickled.

    """
    name = "the network and its training"
    try:
        dumps(training)
        name = "a Dataset of the study"
        return dumps((training, source))
    except Exception as problem:
        raise ValueError(
            f"{name} must be picklable to be sent to other processes ({last_line(problem)}): open "
            "files and the like where they are used"
        ) from problem


_worker: dict[str, Any] = {}


def _begin(task: tuple[Any, ...], parent: int, folder: str) -> None:
    """Initialize a worker process, which exits when its parent does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C, the parent stops the workers
    torch.set_num_threads(1)
    _worker.update(task=task)
    threading.Thread(target=_watch, args=(parent, folder), daemon=True).start()


def _watch(parent: int, folder: str) -> None:
    """Wait until the parent is gone, then remove the shared files and exit."""
    while os.getppid() == parent:
        time.sleep(_LOOK_AROUND)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def _train(trial: Trial) -> Outcome | None:
    """Train a trial in a worker process."""
    if "training" not in _worker:  # not in `_begin`, whose errors do not reach the parent
        _worker.update(_unpacked(*_worker["task"]))
    return train(
        _worker["training"],
        _worker["examples"],
        trial,
        torch.device("cpu"),
        keep_parameters=_worker["keep"] and trial.split.may_be_kept,
    )


def _unpacked(functions: bytes, keep: bool, files: list[Path], *known: Any) -> dict[str, Any]:
    training, source = pickle.loads(functions)
    arrays = [np.load(file, mmap_mode="r") for file in files]
    examples = Examples.shared(source, arrays, *known)
    return {"training": training, "examples": examples, "keep": keep}
