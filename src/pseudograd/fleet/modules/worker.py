"""The slots of a GPU: each is captured while others train, and then runs trial after trial."""

from __future__ import annotations

import functools
import os
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice

import torch
from torch import Tensor, nn

from pseudograd.fleet.modules.examples import Examples, prepared
from pseudograd.fleet.modules.feeds import Streamed, Taker, fits
from pseudograd.fleet.modules.graphs import Slot, Uncapturable
from pseudograd.fleet.modules.loop import allows_tf32
from pseudograd.fleet.modules.training import Training
from pseudograd.fleet.precision import precision
from pseudograd.fleet.randomness import seeded
from pseudograd.fleet.recipe import ModuleRecipe
from pseudograd.fleet.trial import Outcome, Stop, Trial
from pseudograd.words import counted, first_line

_SLOTS = 8  # more are no faster on an H200, even for small networks
_NAP = 5e-5  # seconds to sleep while all slots wait for the GPU
_REASON = 200  # maximum length of an error message shown to the user
_TRIED = 4  # examples of the step that is tried first
_SHARE = 0.8  # fraction of the free memory that slots may use


def draws_on_host(training: Training, examples: Examples, device: torch.device) -> bool:
    """Return whether a step on a GPU draws random numbers from the CPU's generator."""
    module = training.module(0).train()
    # cuDNN's dropout takes its seed from the CPU, but has a state of its own on the GPU.
    has_own = any(isinstance(one, nn.RNNBase) and one.dropout for one in module.modules())
    rows = torch.arange(min(_TRIED, examples.train_size))
    gpus = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(gpus, device_type="cuda"), torch.no_grad():
        inputs = prepared(tuple(one.to(device) for one in examples.batch(rows)))
        before = torch.get_rng_state()
        inputs, _ = training.augmented(inputs, examples.labels[rows].to(device))
        if not has_own:
            training.logits(module.to(device), inputs)
        return not torch.equal(before, torch.get_rng_state())


class GraphWorker:
    """The slots of one device, and the trials in them.

    Args:
        training: The network and how it is trained.
        examples: The data.
        recipe: The recipe of the trials.
        device: The GPU.
        slots: The maximum number of trials at once.
        keep_parameters: Whether outcomes of retraining carry the weights.

    """

    def __init__(
        self,
        training: Training,
        examples: Examples,
        recipe: ModuleRecipe,
        device: torch.device,
        slots: int | None,
        keep_parameters: bool,
    ) -> None:
        self.training, self.examples, self.recipe, self.device = training, examples, recipe, device
        self.most, self.keep_parameters = slots or _SLOTS, keep_parameters
        self.tell: Callable[[str], None] = lambda _: None
        self.slots: list[Slot] = []
        self._drawn: dict[int, Future[list[Tensor]]] = {}  # initial weights of coming trials
        # The default of 8 hardware queues is too few; must be set before CUDA initializes.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        self.compiled = training.compile
        self._not_compiled = ""  # why

    def through(self, pending: deque[Trial], stop: Stop) -> Iterator[Outcome]:
        """Train the pending trials, and yield each outcome when its trial ends."""
        with (
            torch.cuda.device(self.device),
            precision(tf32=allows_tf32(self.recipe, self.device)),
            ThreadPoolExecutor(1) as self._drawing,
        ):
            if self.device.type == "cuda" and draws_on_host(
                self.training, self.examples, self.device
            ):
                raise Uncapturable(
                    "augment or the network draws random numbers on the CPU, which a graph would "
                    "repeat in every step; draw them with device=x.device"
                )
            torch.cuda.empty_cache()
            source = self._source()
            self._free = torch.cuda.mem_get_info(self.device)[0]
            running: dict[Slot, Generator[bool, None, Outcome]] = {}
            while not stop():
                for slot in self.slots:
                    if slot not in running and pending:
                        trial = pending.popleft()
                        cut = self.examples.parts(self.recipe, trial.split)
                        keep = self.keep_parameters and trial.split.may_be_kept
                        initial = self._initial([trial, *islice(pending, self.most)])
                        running[slot] = slot.run(trial, cut, initial, keep)
                idle = True
                for slot, steps in list(running.items()):
                    with torch.cuda.stream(slot.stream):
                        try:
                            idle = not next(steps) and idle
                        except StopIteration as ended:
                            del running[slot]
                            yield ended.value
                            idle = False
                # The host is idle, so use the time to capture another slot.
                if idle and pending and len(self.slots) < self.most:
                    self._add_slot(source, pending[0])
                elif not running and not pending:
                    return
                elif idle:
                    time.sleep(_NAP)

    def _initial(self, coming: list[Trial]) -> list[Tensor]:
        """Return the first trial's initial weights; a thread draws those of the others ahead."""
        seeds = dict.fromkeys(trial.seed for trial in coming)
        self._drawn = {
            seed: self._drawn.get(seed) or self._drawing.submit(self._draw, seed) for seed in seeds
        }
        return self._drawn[coming[0].seed].result()

    def _draw(self, seed: int) -> list[Tensor]:
        fresh = self.training.module(seed)
        return [one.detach().pin_memory() for one in (*fresh.parameters(), *fresh.buffers())]

    def _source(self) -> Callable[[int], Taker]:
        if not fits(self.examples, self.device):
            return functools.partial(Streamed, self.examples, device=self.device)
        taker = Taker(self.examples, self.device)
        return lambda _: taker

    def _add_slot(self, source: Callable[[int], Taker], trial: Trial) -> None:
        """Capture a slot for trials like this one, if there is memory for it."""
        cut = self.examples.parts(self.recipe, trial.split)
        try:
            with seeded(0):  # keeps `_draw` from using the CPU generator during compilation
                slot = Slot(
                    self.training, source, self.recipe, cut, self.device, self.compiled,
                    lean=not self.slots,
                )  # fmt: skip
        except Uncapturable:
            raise
        except Exception as problem:
            reason = first_line(problem)[:_REASON]
            if self.slots:
                self.most = len(self.slots)
                torch.cuda.empty_cache()
                if not isinstance(problem, torch.OutOfMemoryError):
                    self.tell(f"only {counted(self.most, 'trial')} at once: {reason}")
                return
            if isinstance(problem, torch.OutOfMemoryError):
                raise
            if not self.compiled:
                raise Uncapturable(reason) from problem
            self.compiled, self._not_compiled = False, reason
            return
        if self._not_compiled and not self.slots:  # otherwise, compilation was not the problem
            self.tell(f"the network is not compiled: {self._not_compiled}")
        self.slots.append(slot)
        taken = (self._free - torch.cuda.mem_get_info(self.device)[0]) / len(self.slots)
        self.most = min(self.most, max(1, int(_SHARE * self._free / max(1, taken))))
