"""Trials on a GPU: slots with captured CUDA graphs, each on its own stream.

Small networks are bound by launch overhead: a step is many short kernels. A graph launches a whole
step at once, and the graphs of several slots fill the GPU. Everything that changes from step to
step (examples, learning rate, k) is read from tables on the device, indexed by a counter on the
device. So a step needs nothing from the host, and the next trial needs only new tables and weights.
"""

from __future__ import annotations

import contextlib
import inspect
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from pseudograd.fleet import randomness
from pseudograd.fleet.course import Course, Judged
from pseudograd.fleet.modules.examples import prepared
from pseudograd.fleet.modules.feeds import Taker
from pseudograd.fleet.modules.loop import NOISE, batches, is_finite, sensitivities, watched_rows
from pseudograd.fleet.modules.training import Training
from pseudograd.fleet.recipe import ModuleRecipe
from pseudograd.fleet.splits import Parts
from pseudograd.fleet.trial import Outcome, Trial

_STEPS_AT_ONCE = 4  # steps that a slot launches before the next slot's turn
_STEPS_AHEAD = 16  # steps that the host may run ahead of the GPU, bounded so that it can stop
_WARM_UPS = 3  # steps before capture, in which libraries select and compile their kernels
_EVALUATED = 4  # training batches per evaluation batch

# Optimizers whose state starts as zeros, so that zeroing it resets them.
_RESETTABLE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.RMSprop,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adadelta,
)


class Uncapturable(Exception):
    """Raised with the reason if a training cannot be captured as a CUDA graph."""


class Slot:
    """A network, its optimizer and its captured steps, reused by one trial after another.

    Args:
        training: The network and how it is trained.
        source: Returns a `Taker` for a batch size.
        recipe: The recipe of the trials.
        cut: The examples by role; their numbers are the same for all trials.
        device: The GPU.
        compiled: Whether to compile the network.
        lean: Whether to empty the allocator's cache first, which synchronizes the GPU.

    """

    def __init__(
        self,
        training: Training,
        source: Callable[[int], Taker],
        recipe: ModuleRecipe,
        cut: Parts,
        device: torch.device,
        compiled: bool,
        lean: bool,
    ) -> None:
        self.training, self.recipe, self.device = training, recipe, device
        self.steps, self.size = batches(len(cut.train), recipe.batch_size)
        self.stream = torch.cuda.Stream(device)
        self.generator = torch.Generator(device)  # for dropout and augmentation
        with torch.cuda.device(device), torch.cuda.stream(self.stream):
            self._allocate(source, cut, compiled)
            with self._own_noise():
                self._capture(lean)
        self.stream.synchronize()

    def _allocate(self, source: Callable[[int], Taker], cut: Parts, compiled: bool) -> None:
        device, total = self.device, self.recipe.epochs * self.steps
        self.batch = source(self.size)
        self.module = self.training.module(0).to(device)
        if any(isinstance(one, nn.Conv2d) for one in self.module.modules()):
            # The faster layout for convolutions.
            self.module = self.module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.forward: Callable[..., Tensor] = (
            torch.compile(self.module) if compiled else self.module
        )
        # Learning rate and k of the current step: one row of the table.
        self.now = torch.zeros(1, 2, device=device)
        self.table = torch.tensor([0.0, 1.0], device=device).repeat(total, 1)
        # Steps so far, in the training and in the epoch.
        self.counters = torch.zeros(2, dtype=torch.int64, device=device)
        self.seed, self.epoch = torch.zeros(2, 1, dtype=torch.int64, device=device)
        self.order = torch.zeros(self.steps, self.size, dtype=torch.int64, device=device)
        self.train_rows = torch.zeros(len(cut.train), dtype=torch.int64, device=device)
        self.optimizer = capturable_optimizer(self.training, self.module, self.now[0, 0])
        # Evaluation: rows in batches; the last batch is padded with rows that do not count.
        most = max(len(cut.stop), len(cut.judge))
        self.evaluated = min(most, _EVALUATED * self.size)
        self.judged_batch = source(self.evaluated)
        rounds = -(-most // self.evaluated)
        self.rows = torch.zeros(rounds, self.evaluated, dtype=torch.int64, device=device)
        self.round = torch.zeros(1, dtype=torch.int64, device=device)
        self.matters = torch.zeros(rounds, self.evaluated, dtype=torch.bool, device=device)
        labels = self.judged_batch.take(self.rows[0])[1]
        self.wrong = torch.zeros(rounds, *labels.shape, dtype=torch.bool, device=device)
        # Number of labels that count, their cross-entropy, mistakes, and the last step's loss.
        self.sums = torch.zeros(4, dtype=torch.float64, device=device)
        self.best = [torch.empty_like(one) for one in self._state()]

    def _state(self) -> list[Tensor]:
        return [one.detach() for one in (*self.module.parameters(), *self.module.buffers())]

    # --- captured steps ----------------------------------------------------------------------

    def _capture(self, lean: bool) -> None:
        for _ in range(_WARM_UPS):
            self._step()
        self._evaluate_batch()
        self._shuffle()
        self.stream.synchronize()
        if lean:
            torch.cuda.empty_cache()
        self._graph = self._captured(self._step)
        self._evaluation = self._captured(self._evaluate_batch, self._graph.pool())
        self._shuffling = self._captured(self._shuffle, self._graph.pool())

    @contextmanager
    def _own_noise(self) -> Iterator[None]:
        """Make dropout and augmentation draw from the slot's generator, also in its graphs."""
        usual = torch.cuda.default_generators[self.device.index or 0]
        before = usual.graphsafe_get_state()
        usual.graphsafe_set_state(self.generator)
        try:
            yield
        finally:
            usual.graphsafe_set_state(before)

    def _captured(self, step: Callable[[], None], pool: Any = None) -> torch.cuda.CUDAGraph:
        self.optimizer.zero_grad(set_to_none=True)
        for counter in (self.counters, self.epoch, self.round):
            counter.zero_()
        graph = torch.cuda.CUDAGraph()
        # Captured on the slot's stream, so that no two graphs share a cuBLAS workspace, and without
        # the context manager torch.cuda.graph, which synchronizes the GPU.
        graph.capture_begin(pool, capture_error_mode="thread_local")
        try:
            step()
        except BaseException:
            with contextlib.suppress(RuntimeError):  # that the capture is invalid, not why
                graph.capture_end()
            raise
        graph.capture_end()
        return graph

    def _step(self) -> None:
        """Run one training step, as in `loop.train`."""
        torch.index_select(self.table, 0, self.counters[:1], out=self.now)
        rows = self.order.index_select(0, self.counters[1:])[0]
        inputs, labels = self.batch.take(rows)
        self.module.train()
        inputs, labels = self.training.augmented(prepared(inputs), labels)
        logits = self.training.logits(self.forward, _images_last(inputs))
        loss = self.training.loss(logits, labels, self.now[0, 1])
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if self.recipe.clip is not None:
            nn.utils.clip_grad_norm_(self.module.parameters(), self.recipe.clip)
        self.optimizer.step()
        self.sums[3].copy_(loss.detach())
        self.counters.add_(1)

    def _shuffle(self) -> None:
        """Shuffle the examples for an epoch, as in `loop.train`."""
        order = randomness.order(self.seed, self.epoch, len(self.train_rows))
        taken = self.train_rows[order[0, : self.steps * self.size]]
        self.order.copy_(taken.reshape(self.steps, self.size))
        self.counters[1].zero_()
        self.epoch.add_(1)

    @torch.no_grad()
    def _evaluate_batch(self) -> None:
        """Evaluate one batch, as in `loop.evaluate`."""
        rows = self.rows.index_select(0, self.round)[0]
        inputs, labels = self.judged_batch.take(rows)
        self.module.eval()
        logits = self.training.logits(self.module, _images_last(prepared(inputs))).float()
        ignored = self.training.ignore_index
        present = self.matters.index_select(0, self.round)[0]
        present = present.reshape(-1, *(1,) * (labels.dim() - 1)).expand_as(labels)
        counted = present & (labels != ignored)
        wrong = (logits.argmax(1) != labels) & counted
        self.wrong.index_copy_(0, self.round, wrong.unsqueeze(0))
        labels = torch.where(counted, labels, ignored)
        # Not reduction="sum", whose kernel for sequences adds in no fixed order.
        value = F.cross_entropy(logits, labels, ignore_index=ignored, reduction="none").sum()
        self.sums[:3].add_(
            torch.stack([one.double() for one in (counted.sum(), value, wrong.sum())])
        )
        self.round.add_(1)

    # --- a trial -----------------------------------------------------------------------------

    def run(
        self, trial: Trial, cut: Parts, initial: list[Tensor], keep_parameters: bool
    ) -> Generator[bool, None, Outcome]:
        """Train a trial; yield True after launching steps, and False while waiting for the GPU."""
        course = Course(trial, self.recipe)
        watched = watched_rows(cut, trial)
        self._begin(trial, cut, initial)
        self._watch(watched)
        while True:
            self._shuffling.replay()
            yield from self._replay(self._graph, self.steps, self.batch.feed(self.order))
            yield from self._evaluate()
            *sums, loss = (yield from self._read(self.sums)).tolist()
            error = Judged.of(None, *sums).error if len(watched) else None
            if course.note(error) and self.recipe.patience is not None:
                torch._foreach_copy_(self.best, self._state())
            if reason := course.stopped_by(is_finite(loss, self.module)):
                break
        last = None
        if self.recipe.patience is not None:
            last = self._on_cpu() if keep_parameters else None
            torch._foreach_copy_(self._state(), self.best)
        # Without patience the last epoch counts, which may already have been evaluated.
        if self.recipe.patience is not None or watched is not cut.judge:
            self._watch(cut.judge)
            yield from self._evaluate()
            *sums, _ = (yield from self._read(self.sums)).tolist()
        wrong = yield from self._read(self.wrong.flatten(0, 1)[: len(cut.judge)].flatten())
        final = Judged.of(wrong, *sums)
        return course.outcome(reason, final, self._on_cpu() if keep_parameters else None, last)

    def _on_cpu(self) -> dict[str, Tensor]:
        return {name: one.to("cpu", copy=True) for name, one in self.module.state_dict().items()}

    def _begin(self, trial: Trial, cut: Parts, initial: list[Tensor]) -> None:
        for mine, theirs in zip(self._state(), initial, strict=True):
            mine.copy_(theirs, non_blocking=True)
        for state in self.optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    value.zero_()
        self.generator.manual_seed((trial.seed + NOISE) % 2**63)
        total = self.recipe.epochs * self.steps
        rates = [trial.learning_rate * factor for factor in self.training.factors(total)]
        self.table.copy_(torch.tensor([rates, sensitivities(trial, total)]).T)
        self.train_rows.copy_(cut.train)
        self.seed.fill_(trial.seed)
        self.epoch.zero_()
        self.counters.zero_()

    def _watch(self, rows: Tensor) -> None:
        """Set the examples to evaluate."""
        count = len(rows)
        self.rounds = -(-count // self.evaluated)
        flat, mark = self.rows.reshape(-1), self.matters.reshape(-1)
        flat[:count] = rows.to(self.device)
        flat[count:] = flat[0]
        mark[:count] = True
        mark[count:] = False

    def _evaluate(self) -> Generator[bool, None, None]:
        """Evaluate the network on the watched examples; mask and sums stay on the device."""
        self.round.zero_()
        self.sums[:3].zero_()
        feed = self.judged_batch.feed(self.rows[: self.rounds])
        yield from self._replay(self._evaluation, self.rounds, feed)

    def _replay(
        self, graph: torch.cuda.CUDAGraph, times: int, feed: Iterator[None]
    ) -> Generator[bool, None, None]:
        """Replay a graph, without running too far ahead of the GPU."""
        behind: deque[torch.cuda.Event] = deque()
        for at in range(times):
            next(feed)
            graph.replay()
            if at % _STEPS_AT_ONCE == 0:
                yield True
            if at % (_STEPS_AHEAD // 2) == 0:
                behind.append(self.stream.record_event())
                if len(behind) > 2:
                    yield from _done(behind.popleft())

    def _read(self, tensor: Tensor) -> Generator[bool, None, Tensor]:
        """Copy a tensor to the host while other slots continue."""
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        copy.copy_(tensor, non_blocking=True)
        yield from _done(self.stream.record_event())
        return copy


def _done(event: torch.cuda.Event) -> Generator[bool, None, None]:
    """Yield False until the GPU has reached the event."""
    while not event.query():
        yield False


def _images_last(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(
        one.contiguous(memory_format=torch.channels_last) if one.dim() == 4 else one
        for one in inputs
    )


def capturable_optimizer(training: Training, module: nn.Module, rate: Tensor) -> Optimizer:
    """Return an optimizer whose steps can be captured, with a tensor as learning rate."""
    try:
        known = inspect.signature(training.optimizer).parameters
    except (TypeError, ValueError):
        known = {}  # type: ignore[assignment]
    wanted = {name: True for name in ("capturable", "fused") if name in known}
    settings = {**wanted, **training.optimizer_settings}
    if training.optimizer_settings.get("foreach"):
        settings.pop("fused", None)
    optimizer = training.optimizer(module.parameters(), lr=rate, **settings)
    if type(optimizer) not in _RESETTABLE:
        names = ", ".join(kind.__name__ for kind in _RESETTABLE)
        raise Uncapturable(f"{type(optimizer).__name__} is none of {names}")
    if any(group["lr"] is not rate for group in optimizer.param_groups):
        raise Uncapturable("parameter groups have their own learning rates")
    for group in optimizer.param_groups:  # a function of the user may not take these arguments
        if "capturable" in group:
            group["capturable"] = True
        if group.get("fused", False) is None and not group.get("foreach"):
            group["fused"] = True
    if any(group.get("dampening") for group in optimizer.param_groups):
        raise Uncapturable("with dampening, the first step differs from the others")
    return optimizer
