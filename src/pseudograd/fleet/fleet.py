"""Trials in, outcomes out: slots filled, trained epoch by epoch, stopped early and refilled."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import itertools
import math
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pseudograd.data import Dataset
from pseudograd.fleet import randomness
from pseudograd.fleet.splits import Parts, parts
from pseudograd.fleet.stack import Examples, Settings, Stack, launching
from pseudograd.fleet.trial import Outcome, Split, Trial

# With weights beyond this and predictions no better than chance, nothing good can follow.
_EXPLODED = 1e4

# With more, the kernel that holds all classes of a batch at once is slow to compile, or does not.
_MOST_FUSED_CLASSES = 256

# For a worker on the CPU: more models at once gain nothing, and outgrow the cache.
_SLOTS_ON_CPU = 8
_MOST_SLOTS = 256
_LOOK = 0.1  # seconds after which to see whether all workers have ended

PRECISIONS = ("tf32", "float32", "float64")


@dataclass
class _Run:
    """A trial under way."""

    trial: Trial
    epoch: int = 0
    best_error: float = math.inf
    best_epoch: int = 0
    since: int = 0  # the first epoch that had the best error
    curve: list[float] = field(default_factory=list)

    def stopped_by(self, diverged: bool) -> str | None:
        if diverged:
            return "diverged"
        if self.epoch - self.since >= self.trial.patience:
            return "patience"
        return "limit" if self.epoch >= self.trial.max_epochs else None


class Fleet:
    """Trains any number of trials of one architecture together on one device, or on several.

    Every trial has a slot with its own k, learning rate, momentum, seed, split and early stopping;
    a slot whose trial has ended takes the next one. An outcome depends on its trial alone.

    Args:
        data: The data set of the trials.
        device: Where to train: "cpu", "cuda", ..., or several of these, which share the trials.
        slots: How many trials at once on a GPU, or for each thread on a CPU; planned unless given.
        precision: "tf32": where it can, products of numbers with 11 bits, summed in float32, and
            kernels of our own; "float32" or "float64": plain PyTorch operations throughout.
        keep_parameters: Whether outcomes carry the best weights.

    Example:
        >>> from dataclasses import replace
        >>> from pseudograd.data import digits
        >>> trial = Trial("digits", (16,), k=1, learning_rate=0.1, max_epochs=2)
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
        if slots is not None and slots < 1:
            raise ValueError(f"slots must be 1 or more, not {slots}")
        self.data = data
        several = [device] if isinstance(device, str | torch.device) else device
        self.devices = tuple(torch.device(one) for one in several)
        if not self.devices:
            raise ValueError("device must name at least one device, such as 'cpu'")
        self.slots = slots
        self.precision = precision
        self.dtype = torch.float64 if precision == "float64" else torch.float32
        self.keep_parameters = keep_parameters

    def run(self, trials: Iterable[Trial]) -> Iterator[Outcome]:
        """Train the trials; give each one's outcome as it ends.

        Args:
            trials: All of one architecture. A deque is taken from as slots become free, and may be
                added to meanwhile. On a CPU or several devices a worker ends when it finds the
                deque empty, and there are no more workers than trials at the start: what is added
                later may be left in it. Run again while it has some. Its length is asked for
                after every epoch, and what that raises ends the run.

        """
        pending = trials if isinstance(trials, deque) else deque(trials)
        if not pending:
            return
        first = pending[0]
        for trial in pending:
            _check_alike(first, trial)
        if first.data != self.data.name:
            raise ValueError(f"trials are of data {first.data!r}, the fleet has {self.data.name!r}")
        workers = self._workers()[: len(pending)]
        share = -(-len(pending) // len(workers))
        works = []
        for device in workers:
            most = self.slots or self._planned_slots(first, device)
            works.append(functools.partial(self._work, first, device, most, share, pending))
        if workers[0].type != "cpu" and len(works) == 1:
            yield from works[0](threading.Event())
        else:  # a single one on a CPU too: products round by the number of threads
            yield from _side_by_side(works)

    def _workers(self) -> list[torch.device]:
        """One for each GPU, and one for each of PyTorch's threads on a CPU, where they wait less
        for each other than a product's threads do.
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
        stop: threading.Event,
    ) -> Iterator[Outcome]:
        """Work on the pending trials until there are none, or until told to stop."""
        while pending and not stop.is_set():
            crew = None
            slots = min(most, share)
            try:
                crew = _Crew(self, first, device, slots, most)
                yield from crew.through(pending, stop)
            except torch.OutOfMemoryError:
                if most == 1:
                    raise
                # What had ended has been given out; the rest starts again, in half the slots.
                runs = crew.runs if crew else [None] * slots
                pending.extendleft(run.trial for run in reversed(runs) if run)
                most = max(1, len(runs) // 2)
            with launching:
                del crew  # and with it its graph and memory, now that no traceback refers to it
                if pending:
                    torch.cuda.empty_cache()

    def _planned_slots(self, trial: Trial, device: torch.device) -> int:
        """As many as fit into nine tenths of the free memory."""
        if device.type != "cuda":
            return _SLOTS_ON_CPU
        sizes = self._layer_sizes(trial)
        parameters = sum((inputs + 1) * outputs for inputs, outputs in itertools.pairwise(sizes))
        # Weights, two moments, gradient, best version, and half precision or what is on the way;
        # activations and errors, twice; the order of the examples while it is sorted.
        numbers = 6 * parameters + 4 * trial.batch_size * sum(sizes)
        needed = self.dtype.itemsize * numbers + 64 * self.data.train_size
        free, _ = torch.cuda.mem_get_info(device)
        # What PyTorch has taken from the device and not given out is free too.
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return max(1, min(_MOST_SLOTS, int(0.9 * free / needed)))

    def _layer_sizes(self, trial: Trial) -> tuple[int, ...]:
        return self.data.features.shape[1], *trial.hidden_layer_sizes, self.data.classes


def _check_alike(first: Trial, trial: Trial) -> None:
    if trial.architecture != first.architecture:
        raise ValueError(
            "trials of one fleet must share data, hidden_layer_sizes, optimizer, activation, "
            "feature_range, batch_size, whether they clip and whether they retrain; "
            f"these do not:\n  {first}\n  {trial}"
        )


def _stack(examples: Examples, fleet: Fleet, trial: Trial, slots: int) -> Stack:
    """The fastest stack that does what is asked."""
    sizes = fleet._layer_sizes(trial)
    fusible = (
        trial.optimizer == "sgd"
        and trial.batch_size <= 128
        and sizes[-1] <= _MOST_FUSED_CLASSES
        and fleet.precision == "tf32"
        and examples.weights is None
    )
    if fusible and examples.labels.device.type == "cuda" and importlib.util.find_spec("triton"):
        from pseudograd.fleet.fused import FusedStack

        return FusedStack(examples, sizes, trial.activation, slots)
    return Stack(examples, sizes, trial.activation, trial.optimizer, slots, fleet.dtype)


def _current(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Triton launches its kernels on the current device, and on no other."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _relative_weights(data: Dataset, device: torch.device) -> Tensor | None:
    """The examples' weights, 1 on average over those that may be trained on."""
    if data.weights is None:
        return None
    weights = data.weights.double()
    return (weights / weights[: data.train_size].mean()).to(device)


def _parts_on(device: torch.device, data: Dataset, split: Split) -> Parts:
    cut = parts(data, split)
    return Parts(cut.train.to(device), cut.stop.to(device), cut.judge.to(device))


class _MatmulPrecision:
    """What PyTorch's own products may round to: a global setting, restored by the last to leave.

    Of what several ask for at once, the strictest holds.
    """

    def __init__(self) -> None:
        self.lock, self.before = threading.Lock(), ""
        self.asked_for: list[str] = []

    @contextlib.contextmanager
    def __call__(self, precision: str) -> Iterator[None]:
        with self.lock:
            if not self.asked_for:
                self.before = torch.get_float32_matmul_precision()
            self.asked_for.append(precision)
            self._set()
        try:
            yield
        finally:
            with self.lock:
                self.asked_for.remove(precision)
                self._set()

    def _set(self) -> None:
        strictest = "highest" if "highest" in self.asked_for else "high"
        torch.set_float32_matmul_precision(strictest if self.asked_for else self.before)


_matmul_precision = _MatmulPrecision()


_Work = Callable[[threading.Event], Iterator[Outcome]]


def _side_by_side(works: Sequence[_Work]) -> Iterator[Outcome]:
    """What several workers give out, as it comes; all stop if one fails or nobody asks any more.

    Each stops after its epoch, and what ends with that is given out before the failure is raised.
    """
    given: queue.SimpleQueue[Outcome | BaseException | None] = queue.SimpleQueue()
    stop = threading.Event()

    def run(work: _Work) -> None:
        torch.set_num_threads(1)  # of this worker's operations
        try:
            for outcome in work(stop):
                given.put(outcome)
        except BaseException as error:
            given.put(error)
        given.put(None)

    before = torch.get_num_threads()
    # `cli.main` knows them by their name.
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
                # An interrupt may swallow what a worker says at its end, so they are looked after,
                # and before the queue is: what those gave that have ended is in it by now.
                ended = not any(thread.is_alive() for thread in threads)
                item = given.get(timeout=0 if ended else _LOOK)
            except queue.Empty:
                if ended:
                    break
                continue
            except KeyboardInterrupt as interrupt:
                if failure:  # the second time nobody waits for them
                    threads.clear()
                    raise
                item = interrupt
            if isinstance(item, BaseException):
                failure = failure or item
                stop.set()
            elif item is None:
                running -= 1
            else:
                yield item
        if failure:
            raise failure
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        torch.set_num_threads(before)


class _Crew:
    """The slots: trials under way, and the stack of their networks."""

    def __init__(
        self, fleet: Fleet, trial: Trial, device: torch.device, slots: int, most: int
    ) -> None:
        self.fleet, self.trial, self.device, self.most = fleet, trial, device, most
        self.runs: list[_Run | None] = [None] * slots
        # Of no method: it would hold the crew, and so its memory, until a garbage collection.
        self.parts = functools.cache(functools.partial(_parts_on, device, fleet.data))
        data = fleet.data
        factor, offset = data.scaling(trial.feature_range)
        examples = Examples(
            features=data.features.to(device).contiguous(),
            labels=data.labels.to(device).contiguous(),
            factor=factor,
            offset=offset,
            weights=_relative_weights(data, device),
        )
        self.stack = _stack(examples, fleet, trial, slots)
        on_gpu = device.type == "cuda"
        self.products = "high" if on_gpu and fleet.precision == "tf32" else "highest"
        trained = slice(data.train_size)
        weights = None if data.weights is None else data.weights[trained]
        votes = data.labels[trained].bincount(weights)
        self.majority = float(votes.max() / votes.sum())

    def through(self, pending: deque[Trial], stop: threading.Event) -> Iterator[Outcome]:
        """Work through the pending trials, and give out what comes of them."""
        while not stop.is_set():
            self._fill(pending)
            if not any(self.runs):
                return
            with _matmul_precision(self.products), _current(self.device):
                self._train_an_epoch()
                outcomes = self._end_trials(self._judge_the_epoch())
            yield from outcomes
            self._resize(len(pending))

    def _fill(self, pending: deque[Trial]) -> None:
        free = []
        for slot, run in enumerate(self.runs):
            if run is None:
                try:
                    trial = pending.popleft()
                except IndexError:  # another worker was faster
                    break
                _check_alike(self.trial, trial)
                self.runs[slot] = _Run(trial)
                free.append(slot)
        if not free:
            return
        self.stack.start(self._tensor(free), self._tensor([self._run(s).trial.seed for s in free]))
        self._assign()

    def _assign(self) -> None:
        """Lay out what the trials in the slots have of their own. An empty slot idles as a copy."""
        stand_in = next(run for run in self.runs if run)
        trials = [(run or stand_in).trial for run in self.runs]
        cuts = [self.parts(trial.split) for trial in trials]
        self.seeds = self._tensor([trial.seed for trial in trials])
        self.train_parts = torch.stack([cut.train for cut in cuts])
        self.stop_parts = torch.stack([cut.stop for cut in cuts])

        def column(values: Iterable[float]) -> Tensor:
            values = torch.tensor(list(values), dtype=self.fleet.dtype, device=self.device)
            return values.reshape(-1, 1, 1)

        clips = [trial.clip for trial in trials]
        self.settings = Settings(
            k=column(trial.k for trial in trials),
            learning_rate=column(trial.learning_rate for trial in trials),
            momentum=column(trial.momentum for trial in trials),
            clip=None if None in clips else column(clip for clip in clips if clip is not None),
        )

    def _train_an_epoch(self) -> None:
        epochs = self._tensor([run.epoch if run else 0 for run in self.runs])
        order = randomness.order(self.seeds, epochs, self.train_parts.shape[1])
        self.stack.train(self.train_parts.gather(1, order), self.trial.batch_size, self.settings)

    def _judge_the_epoch(self) -> dict[int, str]:
        """Note the errors on the early-stopping parts; give the slots to end, and why."""
        errors, values = self.stack.evaluate(self.stop_parts)
        weights = self.stack.largest_weight()
        measured = torch.stack((errors, values, weights.double())).T.tolist()
        better, ended = [], {}
        for slot, (run, (error, value, weight)) in enumerate(zip(self.runs, measured, strict=True)):
            if run is None:
                continue
            run.epoch += 1
            run.curve.append(error)
            if error < run.best_error:
                run.best_error, run.since = error, run.epoch
            if run.since == run.epoch or (error == run.best_error and run.trial.ties == "last"):
                run.best_epoch = run.epoch
                better.append(slot)
            lost = not weight < _EXPLODED and error > 0.99 * (1 - self.majority)
            reason = run.stopped_by(diverged=lost or not math.isfinite(value + weight))
            if reason:
                ended[slot] = reason
        if better:
            self.stack.keep(self._tensor(better))
        return ended

    def _end_trials(self, ended: dict[int, str]) -> list[Outcome]:
        """Judge the networks that have ended: on validation parts, and on the test set."""
        groups: dict[bool, dict[int, str]] = {}
        for slot, reason in ended.items():
            groups.setdefault(self._run(slot).trial.split.test, {})[slot] = reason
        outcomes = [outcome for group in groups.values() for outcome in self._judge(group)]
        for slot in ended:  # only now: what runs out of memory before is trained again
            self.runs[slot] = None
        return outcomes

    def _judge(self, ended: dict[int, str]) -> list[Outcome]:
        slots = self._tensor(list(ended))
        judged = torch.stack([self.parts(self._run(slot).trial.split).judge for slot in ended])
        errors, values = (figures.tolist() for figures in self.stack.evaluate(judged, slots))
        wrong = self.stack.mistakes(judged, slots) if self.trial.split.retrain else None
        outcomes = []
        for at, (slot, reason) in enumerate(ended.items()):
            run = self._run(slot)
            outcomes.append(
                Outcome(
                    trial=run.trial,
                    stop_error=run.best_error,
                    best_epoch=run.best_epoch,
                    error=errors[at],
                    cross_entropy=values[at],
                    epochs=run.epoch,
                    stopped_by=reason,
                    curve=tuple(run.curve),
                    wrong=None if wrong is None else tuple(wrong[at].nonzero()[:, 0].tolist()),
                    parameters=self.stack.best_of(slot) if self.fleet.keep_parameters else None,
                )
            )
        return outcomes

    def _resize(self, pending: int) -> None:
        """Double the slots if there is work for as many; halve them if there is none."""
        busy = [slot for slot, run in enumerate(self.runs) if run]
        wanted = min(self.most, len(busy) + pending)
        slots = len(self.runs)
        more = wanted > slots and wanted >= min(2 * slots, self.most)
        fewer = not pending and 0 < len(busy) <= slots // 2
        if not more and not fewer:
            return
        idle = wanted - len(busy)
        self.runs = [self.runs[slot] for slot in busy] + [None] * idle
        # A new slot is a copy of some network until a trial fills it.
        self.stack.select(self._tensor(busy + [0] * idle))
        if busy:
            self._assign()

    def _run(self, slot: int) -> _Run:
        run = self.runs[slot]
        assert run is not None
        return run

    def _tensor(self, integers: list[int]) -> Tensor:
        return torch.tensor(integers, dtype=torch.int64, device=self.device)
