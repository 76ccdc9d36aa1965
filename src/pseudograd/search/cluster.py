"""Trials on a Ray cluster: one fleet per task; if a worker is lost, its trials are retried."""

from __future__ import annotations

import contextlib
import pickle
import sys
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Self

import numpy as np
import torch

from pseudograd.data import Dataset
from pseudograd.fleet import Fleet, Outcome, Stop, Trial, never
from pseudograd.fleet.modules.examples import Examples, read_only
from pseudograd.fleet.modules.fleet import ModuleFleet
from pseudograd.fleet.modules.processes import pickled
from pseudograd.fleet.modules.training import Training
from pseudograd.search.connection import connection
from pseudograd.words import last_line

_RESOURCE = {"cuda": "GPU", "cpu": "CPU"}

# Give up when a trial's worker has died this often without yielding an outcome.
_MOST_LOSSES = 3

_LOOK_AROUND = 1.0  # seconds between polls of `stop` and of the cluster's size


class _Tasks:
    """Trains trials in tasks of a Ray cluster; subclasses define the task.

    Args:
        task: A generator function that trains trials in a worker, given the trials, the data, the
            device and the `_settings`.
        address: As for a `RayRunner`.
        device: As for a `RayRunner`.

    """

    most_trials: ClassVar[Mapping[str, int]]  # per task, by device

    def __init__(self, task: Any, address: str | None, device: str | None) -> None:
        if device not in (None, *_RESOURCE):
            raise ValueError(f"device must be one of {tuple(_RESOURCE)}, not {device!r}")
        self._until_closed = contextlib.ExitStack()
        self.ray = self._until_closed.enter_context(connection(address))
        try:
            self.device = device or ("cuda" if self._places("cuda") else "cpu")
            if not self._places(self.device):
                raise ValueError(
                    f"device {self.device!r} needs a {_RESOURCE[self.device]}, but the Ray cluster "
                    "has none: start a node with one"
                )
            self.task = self.ray.remote(
                num_cpus=1,
                num_gpus=int(self.device == "cuda"),
                max_retries=0,  # Ray's retries would repeat finished trials too
            )(task)
            self.data = self.ray.put(self._packed())
        except BaseException:
            self.close()
            raise

    def _packed(self) -> Any:
        """Return the data sent to every machine once: arrays, which its workers share."""
        raise NotImplementedError

    def _settings(self) -> tuple[Any, ...]:
        """Return further arguments of the task."""
        return ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Disconnect, and shut the cluster down if it was started here."""
        self._until_closed.close()

    def __call__(self, trials: Iterable[Trial], stop: Stop = never) -> Iterator[Outcome]:
        """Train the trials, without duplicates, and yield each outcome as it arrives.

        Args:
            trials: The trials. A deque is emptied at the start; trials appended later remain in it.
            stop: Called about once a second. When it returns True, running tasks are cancelled.

        """
        wanted = list(dict.fromkeys(trials))
        if isinstance(trials, deque):
            trials.clear()
        places = max(1, self._places(self.device))  # an autoscaler may not have started any yet
        waiting = deque(_cut(wanted, places, self.most_trials[self.device]))
        running: dict[Any, _Task] = {}
        losses: Counter[Trial] = Counter()
        try:
            while (waiting or running) and not stop():
                # Submit one more than can run: no slot idles, and an autoscaler sees the demand.
                while waiting and len(running) <= self._places(self.device):
                    task = _Task(waiting.popleft())
                    running[self._start(task.trials)] = task
                for stream in self._ready(list(running)):
                    task = running.pop(stream)
                    try:
                        outcome = self._next(stream)
                    except _Lost as loss:
                        self._cancel(stream)
                        task.count_loss(losses, loss)
                        if task.missing:
                            waiting.appendleft(list(task.missing))
                        continue
                    if outcome is None:
                        continue
                    running[stream] = task  # moves to the end, so that streams take turns
                    if outcome.trial in task.missing:
                        del task.missing[outcome.trial]
                        yield outcome
        finally:
            for stream in running:
                self._cancel(stream)

    # --- calls to Ray ----------------------------------------------------------------------------

    def _places(self, device: str) -> int:
        """Return how many tasks the cluster can currently run at once."""
        return int(self.ray.cluster_resources().get(_RESOURCE[device], 0))

    def _start(self, trials: list[Trial]) -> Any:
        return self.task.remote(trials, self.data, self.device, *self._settings())

    def _ready(self, streams: list[Any]) -> list[Any]:
        """Wait briefly for streams that have an outcome or an error, or have ended."""
        ready: list[Any] = self.ray.wait(streams, timeout=_LOOK_AROUND)[0]
        return ready

    def _next(self, stream: Any) -> Outcome | None:
        """Return the stream's next outcome, or None at its end."""
        exceptions = self.ray.exceptions
        try:
            outcome: Outcome = self.ray.get(next(stream))
            return outcome
        except StopIteration:
            return None
        except exceptions.RayTaskError as error:
            if isinstance(error.cause, exceptions.ObjectLostError):
                raise _Lost from error.cause
            if isinstance(error.cause, exceptions.RaySystemError):
                raise ImportError(
                    f"a worker of the Ray cluster cannot read its task ({last_line(error.cause)})"
                    ": install this version of pseudograd on all machines of the cluster"
                ) from error
            raise error.cause from error  # raised by the task itself, not by Ray
        except exceptions.RayError as error:
            raise _Lost from error

    def _cancel(self, stream: Any) -> None:
        if self.ray.is_initialized():
            # Without force, Ray raises KeyboardInterrupt, which a worker in native code ignores.
            self.ray.cancel(stream, force=True)


class RayRunner(_Tasks):
    """Trains trials on a Ray cluster and yields their outcomes as they arrive.

    A task runs a fleet on its own GPU, or on a CPU core if the cluster has no GPUs. If a worker or
    its machine is lost, the trials of its task that have no outcome yet are retried. A cluster
    started here is shut down at the end of the ``with`` block.

    Args:
        data: The data set of the trials, sent to every machine once.
        address: "host:port" of a cluster that this machine belongs to, "auto" to find it, "local"
            to start one here, or None to find one, or start one if there is none.
        device: "cuda" or "cpu"; by default "cuda" if the cluster has GPUs.
        precision: As for a `Fleet`.
        keep_parameters: Whether outcomes carry the best weights.

    Example:
        >>> from dataclasses import replace
        >>> from pseudograd.data import digits
        >>> from pseudograd.fleet import MLPRecipe
        >>> trial = Trial(MLPRecipe("digits", (16,), max_epochs=2), k=1, learning_rate=0.1)
        >>> with RayRunner(digits(), address="local") as run:
        ...     for outcome in run([trial, replace(trial, seed=1)]):  # in any order
        ...         print(outcome.trial.k, outcome.epochs, outcome.stopped_by)
        1 2 limit
        1 2 limit

    """

    # On a GPU, twice a fleet's slots, so that slots are refilled. On a CPU, small tasks let all
    # cores finish together, and cost little if lost.
    most_trials = {"cuda": 512, "cpu": 4}  # noqa: RUF012

    def __init__(
        self,
        data: Dataset,
        address: str | None = None,
        device: str | None = None,
        precision: str = "tf32",
        keep_parameters: bool = False,
    ) -> None:
        Fleet(data, precision=precision)  # check the arguments here, not in every worker
        self.precision, self.keep_parameters = precision, keep_parameters
        self._dataset = data
        super().__init__(_train, address, device)

    def _packed(self) -> dict[str, Any]:
        return _to_arrays(self._dataset)

    def _settings(self) -> tuple[Any, ...]:
        return self.precision, self.keep_parameters


class ModuleRunner(_Tasks):
    """Trains trials of any network on a Ray cluster, as a `RayRunner` does.

    A task runs a `ModuleFleet` on its own GPU, or on a CPU core if the cluster has no GPUs.
    Outcomes of retraining carry the weights.

    Args:
        training: The network and how it is trained. Code in the current folder is sent along; other
            packages that it needs must be installed on all machines.
        examples: The data. Tensors are sent to every machine once; if examples are read from a
            source, every machine must be able to read it.
        address: As for a `RayRunner`.
        device: As for a `RayRunner`.

    Example:
        >>> from torch import nn
        >>> x, y = torch.rand(60, 4), torch.arange(60) % 2
        >>> examples = Examples.of((x[:50], y[:50]), (x[50:], y[50:]))
        >>> training = Training(lambda: nn.Linear(4, 2), epochs=2, batch_size=10)
        >>> trial = Trial(training.recipe("data"), k=0.5, learning_rate=0.1)
        >>> with ModuleRunner(training, examples, address="local") as run:
        ...     [outcome.epochs for outcome in run([trial])]
        [2]

    """

    # On a GPU, eight times a fleet's slots, since each task compiles the network. On a CPU, a trial
    # takes long enough to be its own task.
    most_trials = {"cuda": 64, "cpu": 1}  # noqa: RUF012

    def __init__(
        self,
        training: Training,
        examples: Examples,
        address: str | None = None,
        device: str | None = None,
    ) -> None:
        self.training, self.examples = training, examples
        super().__init__(_train_modules, address, device)

    def _packed(self) -> dict[str, Any]:
        examples = self.examples
        self.training.recipe(examples.name)  # workers cannot read the code that it describes
        functions = _pickled(self.ray.cloudpickle, self.training, examples.source)
        return {
            "arrays": examples.arrays,
            "functions": functions,
            "known": examples.known,
        }


class _Lost(Exception):
    """Raised if the worker of a task died."""


class _Task:
    """Trials that run together, and those of them without an outcome yet."""

    def __init__(self, trials: list[Trial]) -> None:
        self.trials, self.missing = trials, dict.fromkeys(trials)

    def count_loss(self, losses: Counter[Trial], loss: _Lost) -> None:
        """Count a loss of the missing trials, unless the worker had finished others."""
        if len(self.missing) < len(self.trials):
            return
        losses.update(self.missing.keys())
        for trial in self.missing:
            if losses[trial] >= _MOST_LOSSES:
                raise ConnectionError(
                    f"a worker died {_MOST_LOSSES} times while training a trial, the last time "
                    f"with {type(loss.__cause__).__name__}: see Ray's logs for the reason, and "
                    f"check that there is enough memory for {trial}"
                ) from loss


def _cut(trials: list[Trial], places: int, most: int) -> list[list[Trial]]:
    """Split the trials into tasks of about equal size, equally many for each GPU or core."""
    rounds = -(-len(trials) // (places * most))
    tasks = min(len(trials), places * rounds)
    # Deal in turn: neighbours have the same k and rate, and take equally long.
    return [trials[at::tasks] for at in range(tasks)]


def _to_arrays(data: Dataset) -> dict[str, Any]:
    """Return the data set as arrays, which workers of a machine share in Ray's object store."""
    names = [field.name for field in fields(data) if field.name != "frame"]
    values = {name: getattr(data, name) for name in names}
    return {
        name: value.cpu().numpy() if isinstance(value, torch.Tensor) else value
        for name, value in values.items()
    }


def _from_arrays(arrays: dict[str, Any]) -> Dataset:
    shared = {name: value for name, value in arrays.items() if isinstance(value, np.ndarray)}
    tensors = dict(zip(shared, read_only(shared.values()), strict=True))
    return Dataset(**{**arrays, **tensors})


def _train(
    trials: list[Trial], data: dict[str, Any], device: str, precision: str, keep_parameters: bool
) -> Iterator[Outcome]:
    """Run a fleet in a worker."""
    if device == "cpu":
        torch.set_num_threads(1)
    fleet = Fleet(_from_arrays(data), device, None, precision, keep_parameters)
    for outcome in fleet.run(trials):  # noqa: UP028, Ray sends values, which a fleet does not take
        yield outcome


def _train_modules(trials: list[Trial], data: dict[str, Any], device: str) -> Iterator[Outcome]:
    """Run a fleet of any network in a worker."""
    try:
        training, source = pickle.loads(data["functions"])
    except (ImportError, AttributeError) as problem:
        raise ImportError(
            f"a machine of the Ray cluster cannot import the network ({problem}): install the "
            "packages it needs on all machines of the cluster"
        ) from problem
    examples = Examples.shared(source, data["arrays"], *data["known"])
    slots = 1 if device == "cpu" else None
    fleet = ModuleFleet(training, examples, device, slots, keep_parameters=True)
    for outcome in fleet.run(trials):  # noqa: UP028, Ray sends values, which a fleet does not take
        yield outcome


def _pickled(cloudpickle: Any, training: Training, source: Any) -> bytes:
    """Pickle a training and its Datasets.

    Modules in the current folder are pickled by value, since workers may not have them.
    """
    own = _own_modules()
    try:
        for module in own:
            cloudpickle.register_pickle_by_value(module)
        found: bytes = cloudpickle.dumps((training, source))
        return found
    except Exception:  # a module may hold objects that cannot be pickled, such as a lock
        pass
    finally:
        for module in own:
            cloudpickle.unregister_pickle_by_value(module)
    return pickled(cloudpickle.dumps, training, source)


def _own_modules() -> list[ModuleType]:
    """Return the modules in the current folder that are not installed packages."""
    here = Path.cwd()
    found = []
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not file or name == "__main__" or name.partition(".")[0] == "pseudograd":
            continue
        path = Path(file)
        if path.is_relative_to(here) and "site-packages" not in path.parts:
            found.append(module)
    return found
