"""The fleet of any module: CUDA graphs on GPUs, processes on CPUs."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Self

import torch

from pseudograd.fleet.devices import checked_places
from pseudograd.fleet.mlp.fleet import side_by_side
from pseudograd.fleet.modules.examples import Examples
from pseudograd.fleet.modules.loop import train
from pseudograd.fleet.modules.training import Training
from pseudograd.fleet.recipe import ModuleRecipe, check_data
from pseudograd.fleet.trial import Outcome, Stop, Trial, never, recipe_of

if TYPE_CHECKING:
    from pseudograd.fleet.modules.processes import Processes


_START_UP = 4.0  # seconds that worker processes take to start
_SHORT = 0.5  # seconds of a trial for which none are started


class ModuleFleet:
    """Trains trials of any network, several at once.

    On a GPU, trials run as CUDA graphs, each on its own stream; on a CPU, in processes. An outcome
    depends only on its trial: bit for bit on a CPU, and on a GPU as far as the kernels that PyTorch
    picks are deterministic. In a ``with`` block, processes are reused from one run to the next.

    Args:
        training: The network and how it is trained.
        examples: The data.
        device: Where to train: "cpu", "cuda", ..., or several of these, which share the trials.
        slots: How many trials to train at once on each GPU (by default 8, or as many as fit), or
            processes on a CPU (by default one per PyTorch thread, unless trials are short).
        keep_parameters: Whether outcomes of retraining, and of bagged splits, carry the weights.

    Attributes:
        notes: Remarks for the user on how the trials are run.

    Example:
        >>> from torch import nn
        >>> x, y = torch.rand(60, 4), torch.arange(60) % 2
        >>> examples = Examples.of((x[:50], y[:50]), (x[50:], y[50:]))
        >>> training = Training(lambda: nn.Linear(4, 2), epochs=2, batch_size=10)
        >>> trial = Trial(training.recipe("data"), k=0.5, learning_rate=0.1)
        >>> [outcome.epochs for outcome in ModuleFleet(training, examples).run([trial])]
        [2]

    """

    def __init__(
        self,
        training: Training,
        examples: Examples,
        device: str | torch.device | Sequence[str | torch.device] = "cpu",
        slots: int | None = None,
        keep_parameters: bool = False,
    ) -> None:
        self.devices = checked_places(device, slots)
        self.training, self.examples = training, examples
        self.slots, self.keep_parameters = slots, keep_parameters
        self.notes: list[str] = list(examples.notes)
        self._processes: Processes | None = None
        self._spent = 0.0  # seconds of trials in this process before others are started
        self._stays_open = False
        self.tell: Callable[[str], None] = lambda _: None  # called with each new note

    def __enter__(self) -> Self:
        self._stays_open = True
        return self

    def __exit__(self, *_: object) -> None:
        self._stays_open = False
        self._close()

    def _close(self) -> None:
        if self._processes is not None:
            self._processes.close()
            self._processes = None

    def run(self, trials: Iterable[Trial], stop: Stop = never) -> Iterator[Outcome]:
        """Train the trials, and yield each outcome when its trial ends.

        Args:
            trials: Trials of one recipe. If it is a deque, trials are popped from it as slots
                become free, and you may append more.
            stop: Called between steps or epochs. Once it returns True, unfinished trials are
                dropped.

        """
        pending = trials if isinstance(trials, deque) else deque(trials)
        if not pending:
            return
        recipe = self._recipe(pending)
        if all(device.type == "cpu" for device in self.devices):
            yield from self._on_cpu(pending, stop)
            return
        works = [
            functools.partial(self._on_gpu, recipe, device, pending) for device in self.devices
        ]
        if len(works) == 1:
            yield from works[0](stop)
        else:
            yield from side_by_side(works[: len(pending)], stop)

    def _recipe(self, pending: deque[Trial]) -> ModuleRecipe:
        """Return the recipe that all trials share, after comparing it with training and data."""
        recipe = recipe_of(pending[0], ModuleRecipe)
        if any(trial.recipe != recipe for trial in pending):
            raise ValueError("trials of one fleet must share a recipe")
        ours = self.training.recipe(recipe.data, recipe.data_hash)
        ours = dataclasses.replace(
            ours,
            epochs=recipe.epochs,
            patience=recipe.patience,
            validation=self.examples.validation_size or ours.validation,
        )
        for field in dataclasses.fields(recipe):
            theirs, mine = getattr(recipe, field.name), getattr(ours, field.name)
            if theirs != mine:
                raise ValueError(
                    f"trials belong to another training: their {field.name} is {theirs!r}, but the "
                    f"fleet's is {mine!r}"
                )
        check_data(recipe, self.examples)
        return recipe

    def _on_gpu(
        self, recipe: ModuleRecipe, device: torch.device, pending: deque[Trial], stop: Stop
    ) -> Iterator[Outcome]:
        if device.type == "cuda":
            from pseudograd.fleet.modules.graphs import Uncapturable
            from pseudograd.fleet.modules.worker import GraphWorker

            index = torch.cuda.current_device() if device.index is None else device.index
            device = torch.device("cuda", index)
            worker = GraphWorker(
                self.training, self.examples, recipe, device, self.slots, self.keep_parameters
            )
            worker.tell = self._note
            try:
                yield from worker.through(pending, stop)
                return
            except Uncapturable as reason:
                self._note(f"trained step by step, since no CUDA graph can be captured: {reason}")
        yield from self._one_by_one(device, pending, stop)

    def _one_by_one(
        self, device: torch.device, pending: deque[Trial], stop: Stop
    ) -> Iterator[Outcome]:
        while pending and not stop():
            outcome = self._trained(device, pending.popleft(), stop)
            if outcome is not None:
                yield outcome

    def _trained(self, device: torch.device, trial: Trial, stop: Stop) -> Outcome | None:
        keep = self.keep_parameters and trial.split.may_be_kept
        return train(self.training, self.examples, trial, device, stop=stop, keep_parameters=keep)

    def _on_cpu(self, pending: deque[Trial], stop: Stop) -> Iterator[Outcome]:
        count = self.slots or torch.get_num_threads()
        if count > 1 and (len(pending) > 1 or self._processes):
            from pseudograd.fleet.modules.processes import Processes

            if self.slots is None and self._processes is None:
                yield from self._while_short(pending, stop)
            if not pending or stop():
                return
            if self._processes is None:
                self._processes = Processes(
                    self.training, self.examples, self.keep_parameters, count
                )
            try:
                yield from self._processes(pending, stop)
            finally:
                if not self._stays_open:
                    self._close()
            return
        with _one_thread():
            yield from self._one_by_one(torch.device("cpu"), pending, stop)

    def _while_short(self, pending: deque[Trial], stop: Stop) -> Iterator[Outcome]:
        """Train short trials in this process, in the time that it takes to start others."""
        while pending and self._spent < _START_UP and not stop():
            trial, began = pending.popleft(), time.monotonic()
            over = functools.partial(_is_over, stop, began + _SHORT)
            with _one_thread():
                outcome = self._trained(torch.device("cpu"), trial, over)
            self._spent += time.monotonic() - began
            if outcome is not None:
                yield outcome
            elif not stop():  # it takes long
                self._spent = _START_UP
                pending.appendleft(trial)

    def _note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)
            self.tell(note)


def _is_over(stop: Stop, end: float) -> bool:
    return stop() or time.monotonic() > end


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Let PyTorch use one thread inside the block, since rounding depends on their number."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
