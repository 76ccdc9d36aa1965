"""The fleet of fully connected networks: workers that share one queue of trials."""

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
from pseudograd.fleet.mlp.stack import Examples, launching
from pseudograd.fleet.mlp.worker import StackWorker, check_alike
from pseudograd.fleet.recipe import MLPRecipe, check_data
from pseudograd.fleet.trial import Outcome, Stop, Trial, never, recipe_of

_SLOTS_ON_CPU = 8  # per worker: more are no faster, and outgrow the cache
_LONG = 4e10  # parameters × examples of an epoch of all slots of a CPU worker, at most
_MOST_SLOTS = 256
_SECONDS_BETWEEN_LOOKS = 0.1  # how often to check whether the workers are alive

PRECISIONS = ("tf32", "float32", "float64")


class Fleet:
    """Trains many trials of one architecture at once, on one or several devices.

    Every trial has a slot with its own k, learning rate, momentum, seed, split and early stopping;
    a slot whose trial has ended takes the next one. An outcome depends only on its trial.

    Args:
        data: The data set of the trials.
        device: Where to train: "cpu", "cuda", ..., or several of these, which share the trials.
        slots: How many trials to train at once on each GPU, or per thread on a CPU; by default as
            many as fit and pay off.
        precision: "tf32" allows products with 11-bit mantissas, summed in float32, and fused
            kernels; "float32" and "float64" use PyTorch operations throughout.
        keep_parameters: Whether outcomes carry the best weights.
        memory: The part of a GPU's memory that this fleet plans its slots for; give each of n
            fleets that share a GPU 1/n.

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
        memory: float = 1.0,
    ) -> None:
        if precision not in PRECISIONS:
            raise ValueError(f"precision must be one of {PRECISIONS}, not {precision!r}")
        if not 0 < memory <= 1:
            raise ValueError(f"memory must be above 0 and at most 1, not {memory!r}")
        self.devices = checked_places(device, slots)
        self.data, self.slots = data, slots
        self.precision = precision
        self.dtype = torch.float64 if precision == "float64" else torch.float32
        self.keep_parameters, self.memory = keep_parameters, memory
        self._lock = threading.Lock()
        self._examples: dict[object, Examples] = {}

    def run(self, trials: Iterable[Trial], stop: Stop = never) -> Iterator[Outcome]:
        """Train the trials, and yield each outcome when its trial ends.

        Args:
            trials: Trials of one architecture. If it is a deque, trials are popped from it as slots
                become free, and you may append more; those appended after a worker has found it
                empty may remain in it.
            stop: Called after every epoch. Once it returns True, the outcomes of finished trials
                are yielded, and unfinished trials are dropped.

        """
        pending = trials if isinstance(trials, deque) else deque(trials)
        if not pending:
            return
        first = pending[0]
        for trial in pending:
            check_alike(first, trial)
        recipe = recipe_of(first, MLPRecipe)
        check_data(recipe, self.data)
        workers = self._workers()[: len(pending)]
        share = -(-len(pending) // len(workers))
        works = []
        for device in workers:
            most = self.slots or self._planned_slots(recipe, device)
            works.append(functools.partial(self._work, first, device, most, share, pending))
        if workers[0].type != "cpu" and len(works) == 1:
            yield from works[0](stop)
        else:  # even a single CPU worker: rounding of products depends on the number of threads
            yield from side_by_side(works, stop)

    def _workers(self) -> list[torch.device]:
        """Return the device of each worker: one worker per GPU, one per PyTorch thread on a CPU.

        Independent workers synchronize less than the threads of one small matrix product.
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
        """Train pending trials until none is left or ``stop`` returns True."""
        while pending and not stop():
            worker = None
            slots = min(most, share)
            try:
                worker = StackWorker(self, first, device, slots, most)
                yield from worker.through(pending, stop)
            except torch.OutOfMemoryError:
                if most == 1:
                    raise
                # Finished outcomes have been yielded; restart the rest in half the slots.
                runs = worker.runs if worker else [None] * slots
                pending.extendleft(run.trial for run in reversed(runs) if run)
                most = max(1, len(runs) // 2)
            with launching:
                del worker  # frees its CUDA graph and memory; no traceback refers to it any more
                if pending:
                    torch.cuda.empty_cache()

    def _planned_slots(self, recipe: MLPRecipe, device: torch.device) -> int:
        """Return how many slots fit into 90% of the GPU memory, or are worthwhile on a CPU."""
        if device.type != "cuda":
            # Long epochs gain nothing from more slots, and with fewer, outcomes arrive earlier.
            work = self._parameters(recipe) * self.data.train_size
            return max(1, min(_SLOTS_ON_CPU, int(_LONG / work)))
        free, total = torch.cuda.mem_get_info(device)
        # Memory that PyTorch's allocator has cached is available too.
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        own = min(free, self.memory * total)
        return max(1, min(_MOST_SLOTS, int(0.9 * own / self._bytes_of_a_slot(recipe))))

    def _bytes_of_a_slot(self, recipe: MLPRecipe) -> int:
        """Return the GPU memory that a slot needs, at most."""
        # Weights, two moments, gradient, best version, and float16 or temporary copies. The fused
        # stack has fewer of these, but needs as much while the number of its slots doubles.
        # Then activations and errors, twice; the shuffled order of examples while it is sorted.
        numbers = 6 * self._parameters(recipe)
        numbers += 4 * recipe.batch_size * sum(self.layer_sizes(recipe))
        return self.dtype.itemsize * numbers + 64 * self.data.train_size

    def _parameters(self, recipe: MLPRecipe) -> int:
        pairs = itertools.pairwise(self.layer_sizes(recipe))
        return sum((inputs + 1) * outputs for inputs, outputs in pairs)

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
    """Yield the outcomes of several worker threads as they arrive.

    All workers stop if one fails or the caller closes the generator. Each stops after its current
    epoch, and outcomes of that epoch are yielded before the failure is raised.
    """
    results: queue.SimpleQueue[Outcome | BaseException | None] = queue.SimpleQueue()
    stopped = threading.Event()

    def stop() -> bool:
        return stopped.is_set() or asked()

    def run(work: _Work) -> None:
        torch.set_num_threads(1)  # for operations of this thread
        try:
            for outcome in work(stop):
                results.put(outcome)
        except BaseException as error:
            results.put(error)
        results.put(None)

    before = torch.get_num_threads()
    # `cli.main` recognizes the threads by this name.
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
                # An interrupt may lose a worker's last message, so check whether workers are alive;
                # check before reading the queue, which then holds everything that they sent.
                ended = not any(thread.is_alive() for thread in threads)
                item = results.get(timeout=0 if ended else _SECONDS_BETWEEN_LOOKS)
            except queue.Empty:
                if ended:
                    break
                continue
            except KeyboardInterrupt as interrupt:
                if failure:  # on a second interrupt, do not wait for the workers
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
