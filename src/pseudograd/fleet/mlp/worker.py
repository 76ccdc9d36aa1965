"""The trials that one worker is training, epoch by epoch, with early stopping."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import math
from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pseudograd.data import Dataset
from pseudograd.fleet import randomness
from pseudograd.fleet.course import Course, Judged
from pseudograd.fleet.mlp.stack import Examples, Settings, Stack
from pseudograd.fleet.precision import precision
from pseudograd.fleet.ramp import Ramp, k_at
from pseudograd.fleet.recipe import MLPRecipe
from pseudograd.fleet.splits import Parts, parts
from pseudograd.fleet.trial import Outcome, Split, Stop, Trial, recipe_of

if TYPE_CHECKING:
    from pseudograd.fleet.mlp.fleet import Fleet

# A network with weights above this and predictions no better than chance has diverged.
_EXPLODED = 1e4

# The fused kernel holds all classes in one block; larger blocks compile slowly, or not at all.
_MOST_FUSED_CLASSES = 256


def check_alike(first: Trial, trial: Trial) -> None:
    """Raise ValueError unless both trials can be trained in one stack."""
    if _kind(trial) != _kind(first):
        raise ValueError(
            "trials of one fleet must share data, hidden_layer_sizes, optimizer, schedule, "
            "activation, feature_range, bins, sample, batch_size, stratified, rule, whether they "
            f"clip, decay weights, retrain and are bagged; these do not:\n  {first!r}\n  {trial!r}"
        )


def _kind(trial: Trial) -> tuple[object, ...]:
    return recipe_of(trial, MLPRecipe).architecture, trial.split.retrain, trial.split.bagged


def _stack(examples: Examples, fleet: Fleet, recipe: MLPRecipe, slots: int) -> Stack:
    """Return the fused stack if it supports the recipe, else the plain one."""
    sizes = fleet.layer_sizes(recipe)
    fusible = (
        recipe.optimizer == "sgd"
        and recipe.batch_size <= 128
        and sizes[-1] <= _MOST_FUSED_CLASSES
        and recipe.rule == "tunable"
        and fleet.precision == "tf32"
        and examples.weights is None
        and examples.bins is None
    )
    if fusible and examples.labels.device.type == "cuda" and importlib.util.find_spec("triton"):
        from pseudograd.fleet.mlp.fused import FusedStack

        return FusedStack(examples, sizes, recipe.activation, slots)
    return Stack(
        examples, sizes, recipe.activation, recipe.optimizer, slots, fleet.dtype, recipe.rule
    )


def _cosine_rate(run: Course) -> float:
    """Return the learning rate of this epoch, on a cosine from its full value to 0."""
    return run.trial.learning_rate * 0.5 * (1 + math.cos(math.pi * run.progress))


def _current(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Make the device current, since Triton launches kernels on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _sample(examples: Tensor, most: int) -> Tensor:
    """Return at most ``most`` of the examples, evenly spaced; all if it is 0."""
    if not most or len(examples) <= most:
        return examples
    return examples[torch.arange(most, device=examples.device) * len(examples) // most]


def _parts_on(device: torch.device, data: Dataset, stratified: bool, split: Split) -> Parts:
    cut = parts(data, split, stratified)
    return Parts(cut.train.to(device), cut.stop.to(device), cut.judge.to(device))


class StackWorker:
    """The slots of one device: the trials in training, and the stack of their networks."""

    def __init__(
        self, fleet: Fleet, trial: Trial, device: torch.device, slots: int, most: int
    ) -> None:
        self.fleet, self.trial, self.device, self.most = fleet, trial, device, most
        self.recipe = recipe = recipe_of(trial, MLPRecipe)
        self.runs: list[Course | None] = [None] * slots
        # A cached method would form a reference cycle and delay freeing the worker's memory.
        self.parts = functools.cache(
            functools.partial(_parts_on, device, fleet.data, recipe.stratified)
        )
        data, examples = fleet.data, fleet.examples(recipe, device)
        self.stack = _stack(examples, fleet, recipe, slots)
        on_gpu = device.type == "cuda"
        self.tf32 = on_gpu and fleet.precision == "tf32"
        trained = slice(data.train_size)
        weights = None if data.weights is None else data.weights[trained]
        votes = data.labels[trained].bincount(weights)
        self.majority = float(votes.max() / votes.sum())

    def through(self, pending: deque[Trial], stop: Stop) -> Iterator[Outcome]:
        """Train the pending trials, and yield each outcome when its trial ends."""
        while not stop():
            self._fill(pending)
            if not any(self.runs):
                return
            with precision(tf32=self.tf32), _current(self.device):
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
                except IndexError:  # another worker took the last one
                    break
                check_alike(self.trial, trial)
                self.runs[slot] = Course(trial, recipe_of(trial, MLPRecipe))
                free.append(slot)
        if not free:
            return
        self.stack.start(self._tensor(free), self._tensor([self._run(s).trial.seed for s in free]))
        self._assign()

    def _assign(self) -> None:
        """Fill the per-slot tensors; an empty slot gets the settings of another."""
        stand_in = next(run for run in self.runs if run)
        runs = [run or stand_in for run in self.runs]
        trials = [run.trial for run in runs]
        cuts = [self.parts(trial.split) for trial in trials]
        self.seeds = self._tensor([trial.seed for trial in trials])
        self.train_parts = torch.stack([_sample(cut.train, self.recipe.sample) for cut in cuts])
        self.stop_parts = torch.stack([cut.stop for cut in cuts])

        recipes = [recipe_of(trial, MLPRecipe) for trial in trials]
        clips = [recipe.clip for recipe in recipes]
        decays = [recipe.weight_decay for recipe in recipes]
        self.settings = Settings(
            k=self._column(k_at(run.trial.k, run.progress) for run in runs).unsqueeze(-1),
            learning_rate=self._column(trial.learning_rate for trial in trials),
            momentum=self._column(recipe.momentum for recipe in recipes),
            clip=None if None in clips else self._column(clip for clip in clips if clip),
            weight_decay=self._column(decays) if any(decays) else None,
            live=self._column(1.0 for _ in runs),
        )

    def _train_an_epoch(self) -> None:
        if self.recipe.schedule == "cosine":
            rates = self._column(_cosine_rate(run) if run else 0.0 for run in self.runs)
            self.settings.learning_rate.copy_(rates)
        if any(run and isinstance(run.trial.k, Ramp) for run in self.runs):
            ks = self._column(k_at(run.trial.k, run.progress) if run else 1.0 for run in self.runs)
            self.settings.k.copy_(ks.unsqueeze(-1))
        if None in self.runs and self.settings.live is not None:
            self.settings.live.copy_(self._column(1.0 if run else -1.0 for run in self.runs))
        epochs = self._tensor([run.epoch if run else 0 for run in self.runs])
        order = randomness.order(self.seeds, epochs, self.train_parts.shape[1])
        self.stack.train(self.train_parts.gather(1, order), self.recipe.batch_size, self.settings)

    def _judge_the_epoch(self) -> dict[int, str]:
        """Evaluate the early-stopping folds; return the slots whose trials end, with the reason."""
        errors, values = self.stack.evaluate(self.stop_parts)
        weights = self.stack.largest_weight()
        measured = torch.stack((errors, values, weights.double())).T.tolist()
        better, ended = [], {}
        for slot, (run, (error, value, weight)) in enumerate(zip(self.runs, measured, strict=True)):
            if run is None:
                continue
            if run.note(error, value):
                better.append(slot)
            lost = not weight < _EXPLODED and error > 0.99 * (1 - self.majority)
            reason = run.stopped_by(finite=math.isfinite(value + weight) and not lost)
            if reason:
                ended[slot] = reason
        if better:
            self.stack.keep(self._tensor(better))
        return ended

    def _end_trials(self, ended: dict[int, str]) -> list[Outcome]:
        """Evaluate the trials that have ended, on validation folds or the test set."""
        groups: dict[bool, dict[int, str]] = {}
        for slot, reason in ended.items():
            groups.setdefault(self._run(slot).trial.split.test, {})[slot] = reason
        outcomes = [outcome for group in groups.values() for outcome in self._judge(group)]
        for slot in ended:  # only now: if evaluation runs out of memory, the trial is retried
            self.runs[slot] = None
        return outcomes

    def _judge(self, ended: dict[int, str]) -> list[Outcome]:
        slots = self._tensor(list(ended))
        judged = torch.stack([self.parts(self._run(slot).trial.split).judge for slot in ended])
        errors, values = (figures.tolist() for figures in self.stack.evaluate(judged, slots))
        wrong = self.stack.mistakes(judged, slots) if self.trial.split.retrain else None
        masks = [None] * len(ended) if wrong is None else wrong
        return [
            self._run(slot).outcome(
                reason,
                Judged(error, value, mask),
                parameters=self.stack.best_of(slot) if self.fleet.keep_parameters else None,
            )
            for (slot, reason), error, value, mask in zip(
                ended.items(), errors, values, masks, strict=True
            )
        ]

    def _resize(self, pending: int) -> None:
        """Double the slots if enough trials are pending; halve them if half are idle."""
        busy = [slot for slot, run in enumerate(self.runs) if run]
        wanted = min(self.most, len(busy) + pending)
        slots = len(self.runs)
        more = wanted > slots and wanted >= min(2 * slots, self.most)
        fewer = not pending and 0 < len(busy) <= slots // 2
        if not more and not fewer:
            return
        idle = wanted - len(busy)
        self.runs = [self.runs[slot] for slot in busy] + [None] * idle
        # A new slot holds a copy of network 0 until a trial fills it.
        self.stack.select(self._tensor(busy + [0] * idle))
        if busy:
            self._assign()

    def _run(self, slot: int) -> Course:
        run = self.runs[slot]
        assert run is not None
        return run

    def _column(self, numbers: Iterable[float]) -> Tensor:
        values = torch.tensor(list(numbers), dtype=self.fleet.dtype, device=self.device)
        return values.unsqueeze(-1)

    def _tensor(self, integers: list[int]) -> Tensor:
        return torch.tensor(integers, dtype=torch.int64, device=self.device)
