"""Schedules of k, modelled on `torch.optim.lr_scheduler`: construct one, then call ``step()``.

The constructor sets the criterion's first k, and each ``step()`` sets the next. A step may be an
optimizer step or an epoch: ``total_steps`` counts calls of ``step()``. A compiled criterion does
not recompile when k changes, except once on CUDA devices.
"""

from __future__ import annotations

import functools
import importlib
import math
import numbers
import sys
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor

from pseudograd.rules.checks import GREATEST_K, LEAST_K, check_number

__all__ = [
    "CosineK",
    "KSchedule",
    "LambdaK",
    "LinearK",
    "StepK",
    "lightning_callback",
    "trainer_callback",
]


class HasK(Protocol):
    """A criterion whose k can be set."""

    k: Any


class KSchedule:
    """Base class of all schedules of k; to write your own, subclass it and define ``k_of``.

    Args:
        criterion: The loss whose ``k`` is set: a `TunableCrossEntropyLoss`, a
            `TunableLinearCrossEntropyLoss`, or a module of your own with an attribute ``k``.

    Attributes:
        criterion: The same loss, without the wrapper of `torch.compile`.
        last_step: The number of calls of ``step()`` so far.
        last_k: The current k.

    Example:
        >>> from pseudograd import TunableCrossEntropyLoss
        >>> class Sawtooth(KSchedule):
        ...     def k_of(self, step):
        ...         return 0.5 + 0.25 * (step % 3)
        >>> criterion = TunableCrossEntropyLoss()
        >>> schedule = Sawtooth(criterion)
        >>> for _ in range(4):
        ...     print(criterion.k, end=" ")
        ...     schedule.step()
        0.5 0.75 1.0 0.5

    """

    def __init__(self, criterion: HasK) -> None:
        criterion = getattr(criterion, "_orig_mod", criterion)
        if not hasattr(criterion, "k"):
            raise TypeError(
                "criterion must have an attribute k, like TunableCrossEntropyLoss; "
                f"{type(criterion).__name__} has none"
            )
        self.criterion = criterion
        self._go_to(0)

    def k_of(self, step: int) -> float:
        """Return k after this many calls of ``step()``."""
        raise NotImplementedError(f"{type(self).__name__} must define k_of(step)")

    def step(self) -> None:
        """Set the next k. Call this after ``optimizer.step()``, or once per epoch."""
        self._go_to(self.last_step + 1)

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the schedule, for a checkpoint, without its settings.

        Example:
            >>> from pseudograd import TunableCrossEntropyLoss
            >>> schedule = LinearK(TunableCrossEntropyLoss(), 0.5, 2, total_steps=3)
            >>> schedule.step()
            >>> schedule.state_dict()
            {'last_step': 1}
            >>> resumed = LinearK(TunableCrossEntropyLoss(), 0.5, 2, total_steps=3)
            >>> resumed.load_state_dict(schedule.state_dict())
            >>> resumed.criterion.k
            1.0

        """
        return {"last_step": self.last_step}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go to the position that `state_dict` returned, and set the criterion's k to match."""
        step = state_dict.get("last_step")
        if isinstance(step, bool) or not isinstance(step, numbers.Integral) or step < 0:
            raise ValueError(
                "state_dict must come from a schedule of k, with a whole number as last_step, "
                f"not {dict(state_dict)!r}"
            )
        self._go_to(int(step))

    def _go_to(self, step: int) -> None:
        # Always a float, because the compiler would recompile for an int.
        self.last_k = _number(f"k of step {step}", self.k_of(step))
        self.last_step = step
        self.criterion.k = self.last_k

    def __repr__(self) -> str:
        hidden = ("criterion", "last_step", "last_k")
        settings = ", ".join(
            f"{name}={value!r}"
            for name, value in vars(self).items()
            if name not in hidden and not name.startswith("_")
        )
        return f"{type(self).__name__}({settings})"


class _FromTo(KSchedule):
    def __init__(self, criterion: HasK, start: float, end: float, total_steps: int) -> None:
        self.start, self.end = _number("start", start), _number("end", end)
        self.total_steps = _whole("total_steps", total_steps)
        super().__init__(criterion)


class LinearK(_FromTo):
    """Change k linearly from ``start`` to ``end`` in ``total_steps`` steps, then keep it.

    Args:
        criterion: The loss whose ``k`` is set.
        start: The first k.
        end: The k after ``total_steps`` calls of ``step()``, and from then on.
        total_steps: The length of the schedule, in calls of ``step()``.

    Example:
        Large errors count little at first and more later:

        >>> from pseudograd import TunableCrossEntropyLoss
        >>> criterion = TunableCrossEntropyLoss()
        >>> schedule = LinearK(criterion, start=0.5, end=2, total_steps=3)
        >>> for batch in range(5):  # optimizer.step() comes before schedule.step()
        ...     print(criterion.k, end=" ")
        ...     schedule.step()
        0.5 1.0 1.5 2.0 2.0

    """

    def k_of(self, step: int) -> float:
        """Return k after this many calls of ``step()``."""
        progress = min(step, self.total_steps) / self.total_steps
        return (1 - progress) * self.start + progress * self.end


class CosineK(_FromTo):
    """Change k from ``start`` to ``end`` along half a cosine: slowly at both ends.

    Args:
        criterion: The loss whose ``k`` is set.
        start: The first k.
        end: The k after ``total_steps`` calls of ``step()``, and from then on.
        total_steps: The length of the schedule, in calls of ``step()``.

    Example:
        >>> from pseudograd import TunableCrossEntropyLoss
        >>> criterion = TunableCrossEntropyLoss()
        >>> schedule = CosineK(criterion, start=2, end=1, total_steps=4)
        >>> for epoch in range(6):
        ...     print(f"{criterion.k:.3f}", end=" ")
        ...     schedule.step()
        2.000 1.854 1.500 1.146 1.000 1.000

    """

    def k_of(self, step: int) -> float:
        """Return k after this many calls of ``step()``."""
        share = (1 + math.cos(math.pi * min(step, self.total_steps) / self.total_steps)) / 2
        return share * self.start + (1 - share) * self.end


class StepK(KSchedule):
    """Multiply k by ``gamma`` after every ``step_size`` steps.

    This is `torch.optim.lr_scheduler.StepLR` for k. k stays between 2^-100 and 2^100.

    Args:
        criterion: The loss whose ``k`` is set.
        start: The first k.
        step_size: How many calls of ``step()`` each k lasts.
        gamma: The factor between one k and the next.

    Example:
        >>> from pseudograd import TunableCrossEntropyLoss
        >>> criterion = TunableCrossEntropyLoss()
        >>> schedule = StepK(criterion, start=0.25, step_size=2, gamma=2)
        >>> for epoch in range(6):
        ...     print(criterion.k, end=" ")
        ...     schedule.step()
        0.25 0.25 0.5 0.5 1.0 1.0

    """

    def __init__(self, criterion: HasK, start: float, step_size: int, gamma: float) -> None:
        self.start, self.gamma = _number("start", start), _number("gamma", gamma)
        self.step_size = _whole("step_size", step_size)
        super().__init__(criterion)

    def k_of(self, step: int) -> float:
        """Return k after this many calls of ``step()``."""
        power = step // self.step_size
        exponent = math.log2(self.start) + power * math.log2(self.gamma)
        if abs(exponent) > 101:  # the power itself could overflow
            return GREATEST_K if exponent > 0 else LEAST_K
        return min(max(self.start * self.gamma**power, LEAST_K), GREATEST_K)


class LambdaK(KSchedule):
    """Set k to a function of the number of steps.

    Args:
        criterion: The loss whose ``k`` is set.
        k_lambda: Maps the number of calls of ``step()``, from 0, to k itself, not to a factor as in
            `torch.optim.lr_scheduler.LambdaLR`. It is not saved by ``state_dict()``.

    Example:
        Cross-entropy for two epochs of warm-up, then k = 1/2:

        >>> from pseudograd import TunableCrossEntropyLoss
        >>> criterion = TunableCrossEntropyLoss()
        >>> schedule = LambdaK(criterion, lambda epoch: 1 if epoch < 2 else 0.5)
        >>> for epoch in range(4):
        ...     print(criterion.k, end=" ")
        ...     schedule.step()
        1.0 1.0 0.5 0.5

    """

    def __init__(self, criterion: HasK, k_lambda: Callable[[int], float]) -> None:
        if not callable(k_lambda):
            raise TypeError(f"k_lambda must be a function of the step, not {k_lambda!r}")
        self.k_lambda = k_lambda
        super().__init__(criterion)

    def k_of(self, step: int) -> float:
        """Return k after this many calls of ``step()``."""
        return self.k_lambda(step)


def _number(name: str, value: Any) -> float:
    if isinstance(value, Tensor):
        raise TypeError(f"{name} must be a number, not a tensor; use .item()")
    check_number(name, value, LEAST_K, GREATEST_K, "a finite number above 0 (2^-100 to 2^100)")
    return float(value)


def _whole(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, not {value!r}")
    return int(value)


# --- callbacks of trainers -----------------------------------------------------------------------


def lightning_callback(schedule: KSchedule, name: str = "k") -> Any:
    """Return a Lightning callback that steps a schedule after every optimizer step.

    Batches whose gradients are accumulated count as one step. The position in the schedule is saved
    with Lightning's checkpoints and restored from them.

    Args:
        schedule: The schedule of your module's criterion.
        name: The name in checkpoints, which must be unique if there are several schedules.

    Example:
        ``Trainer(callbacks=[lightning_callback(LinearK(module.criterion, 0.5, 2, 10_000))])``

    """
    return _lightning_class()(_checked(schedule), name)


def trainer_callback(schedule: KSchedule) -> Any:
    """Return a callback that steps a schedule after every step of transformers' ``Trainer``.

    The callback starts from the Trainer's ``global_step``, so a run that is resumed from a
    checkpoint continues its schedule.

    Args:
        schedule: The schedule of the criterion that your ``compute_loss_func`` calls.

    Example:
        ``Trainer(..., callbacks=[trainer_callback(LinearK(criterion, 0.5, 2, 10_000))])``

    """
    checked = _checked(schedule)  # before the import of transformers, which may fail
    return _trainer_class()(checked)


def _checked(schedule: Any) -> KSchedule:
    if not isinstance(schedule, KSchedule):
        raise TypeError(f"schedule must be a schedule of k, such as LinearK, not {schedule!r}")
    return schedule


@functools.cache
def _lightning_class() -> Any:
    """Return the class of the callback; Lightning has two names on PyPI."""
    names = ("lightning.pytorch", "pytorch_lightning")
    base: Any = None
    for module in sorted(names, key=lambda name: name not in sys.modules):
        try:
            base = importlib.import_module(module).Callback
            break
        except ImportError:
            continue
    if base is None:
        raise ImportError("lightning_callback needs Lightning: pip install lightning")

    class KScheduleCallback(base):  # type: ignore[misc]
        """Steps a schedule of k with the optimizer."""

        def __init__(self, schedule: KSchedule, name: str) -> None:
            self.schedule, self.name, self.seen = schedule, name, 0

        @property
        def state_key(self) -> str:
            return f"pseudograd.schedules: {self.name}"

        def on_train_start(self, trainer: Any, module: Any) -> None:
            self.seen = trainer.global_step

        def on_train_batch_end(self, trainer: Any, module: Any, *batch: Any) -> None:
            if trainer.global_step != self.seen:
                self.seen = trainer.global_step
                self.schedule.step()

        def state_dict(self) -> dict[str, Any]:
            return self.schedule.state_dict()

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.schedule.load_state_dict(state_dict)

        def __reduce__(self) -> Any:  # for strategies that start processes
            return lightning_callback, (self.schedule, self.name)

    return KScheduleCallback


@functools.cache
def _trainer_class() -> Any:
    try:
        base: Any = importlib.import_module("transformers").TrainerCallback
    except ImportError as problem:
        raise ImportError(
            "trainer_callback needs transformers: pip install 'transformers[torch]'"
        ) from problem

    class KScheduleCallback(base):  # type: ignore[misc]
        """Steps a schedule of k with the optimizer."""

        def __init__(self, schedule: KSchedule) -> None:
            self.schedule = schedule

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.schedule.load_state_dict({"last_step": state.global_step})

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.schedule.step()

    return KScheduleCallback
