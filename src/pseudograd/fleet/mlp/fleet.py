"""Trials in, outcomes out: workers that share one queue of trials."""

from __future__ import annotations

import functools
import itertools
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from pseudograd.data import Dataset
from pseudograd.fleet.devices import checked_places
from pseudograd.fleet.mlp.bins import Bins
from pseudograd.fleet.mlp.crew import Crew, check_alike, mlp_recipe
from pseudograd.fleet.mlp.stack import Examples, launching
from pseudograd.fleet.recipe import MLPRecipe
from pseudograd.fleet.trial import Outcome, Stop, Trial, never

# Per worker on a CPU: more models at once gain nothing, and outgrow the cache.
_SLOTS_ON_CPU = 8
_LONG = 4e10  # parameters times examples of the epochs that run on a CPU at once
_MOST_SLOTS = 256
_SECONDS_BETWEEN_LOOKS = 0.1  # at whether all workers have ended

PRECISIONS = ("tf32", "float32", "float64")


class Fleet:
    """Trains any number of trials of one architecture together on one device, or on several.

    Every trial has a slot with its own k, learning rate, momentum, seed, split and early stopping;
    a slot whose trial has ended takes the next one. An outcome depends on its trial alone.

    Args:
        data: The data set of the trials.
        device: Where to train: "cpu", "cuda", ..., or several of these, which share the trials.
        slots: How many trials at once on a GPU, or per thread on a CPU; planned unless given.
        precision: "tf32": where it can, products of numbers with 11 bits, summed in float32, and
            fused kernels; "float32" or "float64": PyTorch operations throughout.
        keep_parameters: Whether outcomes carry the best weights.

    Example:
        >>> from dataclasses import replace
        >>> from pseudograd.data import digits
        >>> from pseudograd.fleet import MLPRecipe
        >>> trial = Trial(MLPRecipe("digits", (16,), max_epochs=2), k=1, learning_rate=0.1)
        >>> for outcome in Fleet(digits()).run([trial, replace(trial, seed=1)]):  # in any order
        ...     print(outcome.trial.k, outcome.epochs, outcome.stopped_by)
        1 2 limit
        1 2 limit

    """

    def __init__(
        self,
        data: Dataset,
        device: str | torch.device | Sequence[str | torch.device] = "cpu",
        slots: int | None = None,
        precision: str = "tf32",
        keep_parameters: bool = False,
    ) -> None:
        if precision not in PRECISIONS:
            raise ValueError(f"precision must be one of {PRECISIONS}, not {precision!r}")
        self.devices = checked_places(device, slots)
        self.data, self.slots = data, slots
        self.precision = precision
        self.dtype = torch.float64 if precision == "float64" else torch.float32
        self.keep_parameters = keep_parameters
        self._lock = threading.Lock()
        self._examples: dict[object, Examples] = {}

    def run(self, trials: Iterable[Trial], stop: Stop = never) -> Iterator[Outcome]:
        """Train the trials; yield each one's outcome as it ends.

        Args:
            trials: All of one architecture. A deque is taken from as slots become free, and may be
                added to meanwhile; what is added after a worker found it empty may be left in it.
            stop: Asked after every epoch. Once it says True, outcomes of trials that have ended
                are yielded, and those still under way are dropped.

        """
        pending = trials if isinstance(trials, deque) else deque(trials)
        if not pending:
            return
        first = pending[0]
        for trial in pending:
            check_alike(first, trial)
        recipe = mlp_recipe(first)
        self._check_data(recipe)
        workers = self._workers()[: len(pending)]
        share = -(-len(pending) // len(workers))
        works = []
        for device in workers:
            most = self.slots or self._planned_slots(recipe, device)
            works.append(functools.partial(self._work, first, device, most, share, pending))
        if workers[0].type != "cpu" and len(works) == 1:
            yield from works[0](stop)
        else:  # a single one on a CPU too: products round by the number of threads
            yield from side_by_side(works, stop)

    def _check_data(self, recipe: MLPRecipe) -> None:
        if recipe.data != self.data.name:
            raise ValueError(
                f"trials are of data {recipe.data!r}, the fleet has {self.data.name!r}"
            )
        if recipe.data_hash and not self.data.sha256.startswith(recipe.data_hash):
            raise ValueError(
                f"trials are of data {recipe.data!r} whose hash begins with {recipe.data_hash}, "
                f"the fleet's begins with {self.data.sha256[:16]}: use the same data"
            )

    def _workers(self) -> list[torch.device]:
        """Return a device per worker: one worker per GPU, one per PyTorch thread on a CPU.

        Workers wait less for each other than the threads of one small product do.
        """
        threads = torch.get_num_threads()
        return [
            device for device in self.devices for _ in range(threads if device.type == "cpu" else 1)
        ]

    def _work(
        self,
        first: Trial,
        device: torch.device,
        most: int,
        share: int,
        pending: deque[Trial],
        stop: Stop,
    ) -> Iterator[Outcome]:
        """Work on the pending trials until there are none, or until told to stop."""
        while pending and not stop():
            crew = None
            slots = min(most, share)
            try:
                crew = Crew(self, first, device, slots, most)
                yield from crew.through(pending, stop)
            except torch.OutOfMemoryError:
                if most == 1:
                    raise
                # Finished outcomes have been yielded; the rest starts again, in half the slots.
                runs = crew.runs if crew else [None] * slots
                pending.extendleft(run.trial for run in reversed(runs) if run)
                most = max(1, len(runs) // 2)
            with launching:
                del crew  # frees its graph and memory, now that no traceback refers to it
                if pending:
                    torch.cuda.empty_cache()

    def _planned_slots(self, recipe: MLPRecipe, device: torch.device) -> int:
        """Return how many fit into nine tenths of the free memory; on a CPU how many pay."""
        sizes = self.layer_sizes(recipe)
        parameters = sum((inputs + 1) * outputs for inputs, outputs in itertools.pairwise(sizes))
        if device.type != "cuda":
            # Long epochs gain nothing either, and one by one their outcomes show progress.
            return max(1, min(_SLOTS_ON_CPU, int(_LONG / (parameters * self.data.train_size))))
        # Weights, two moments, gradient, best version, and half-precision or temporary copies;
        # activations and errors, twice; the order of the examples while it is sorted.
        numbers = 6 * parameters + 4 * recipe.batch_size * sum(sizes)
        needed = self.dtype.itemsize * numbers + 64 * self.data.train_size
        free, _ = torch.cuda.mem_get_info(device)
        # What PyTorch has reserved and not handed out is free too.
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return max(1, min(_MOST_SLOTS, int(0.9 * free / needed)))

    def layer_sizes(self, recipe: MLPRecipe) -> tuple[int, ...]:
        """Return the widths of all layers, inputs and classes included."""
        bins = self.bins(recipe)
        inputs = self.data.features.shape[1] + (0 if bins is None else len(bins))
        return inputs, *recipe.hidden_layer_sizes, self.data.classes

    def bins(self, recipe: MLPRecipe) -> Bins | None:
        """Return the bins of the numeric features, if the recipe has any."""
        return Bins.fit(self.data, recipe.bins) if recipe.bins else None

    def examples(self, recipe: MLPRecipe, device: torch.device) -> Examples:
        """Return the data set on a device, shared by all workers there."""
        bins = self.bins(recipe)
        key = (device, recipe.feature_range, recipe.bins)
        with self._lock:
            if key not in self._examples:
                scaling = self.data.scaling(recipe.feature_range)
                self._examples = {key: Examples.of(self.data, device, scaling, bins)}
            return self._examples[key]


_Work = Callable[[Stop], Iterator[Outcome]]


def side_by_side(works: Sequence[_Work], asked: Stop) -> Iterator[Outcome]:
    """Yield what several workers yield, as it comes; all stop if one fails or nobody asks any more.

    Each stops after its epoch, and what ends with that is yielded before the failure is raised.
    """
    results: queue.SimpleQueue[Outcome | BaseException | None] = queue.SimpleQueue()
    stopped = threading.Event()

    def stop() -> bool:
        return stopped.is_set() or asked()

    def run(work: _Work) -> None:
        torch.set_num_threads(1)  # for this worker's operations
        try:
            for outcome in work(stop):
                results.put(outcome)
        except BaseException as error:
            results.put(error)
        results.put(None)

    before = torch.get_num_threads()
    # `cli.main` recognizes them by their name.
    threads = [
        threading.Thread(target=run, args=(work,), name=f"fleet-{at}", daemon=True)
        for at, work in enumerate(works)
    ]
    for thread in threads:
        thread.start()
    failure: BaseException | None = None
    try:
        running = len(threads)
        while running:
            try:
                # An interrupt may swallow a worker's last message, so look whether they are alive,
                # and do so before reading the queue: whatever ended workers sent is in it by then.
                ended = not any(thread.is_alive() for thread in threads)
                item = results.get(timeout=0 if ended else _SECONDS_BETWEEN_LOOKS)
            except queue.Empty:
                if ended:
                    break
                continue
            except KeyboardInterrupt as interrupt:
                if failure:  # the second time, nobody waits for them
                    threads.clear()
                    raise
                item = interrupt
            if isinstance(item, BaseException):
                failure = failure or item
                stopped.set()
            elif item is None:
                running -= 1
            else:
                yield item
        if failure:
            raise failure
    finally:
        stopped.set()
        for thread in threads:
            thread.join()
        torch.set_num_threads(before)
