"""The training of any module, and its description for a recipe."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pseudograd.fleet.modules.code import describe, describe_network
from pseudograd.fleet.randomness import seeded
from pseudograd.fleet.recipe import PRECISIONS, ModuleRecipe
from pseudograd.loss import RuleCrossEntropyLoss, tunable_cross_entropy
from pseudograd.rules import Rule
from pseudograd.rules.reweighted import factor_of
from pseudograd.words import raised, shown

Inputs = Tensor | tuple[Tensor, ...]
Augment = Callable[..., Any]
Schedule = Callable[[float], float]

# The learning rate's factor as a function of progress in [0, 1].
SCHEDULES: dict[str, Schedule] = {
    "constant": lambda _: 1.0,
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
    "linear": lambda progress: 1 - progress,
    # Linear warm-up over the first fifth, then linear decay to 0.
    "one-cycle": lambda progress: progress / 0.2 if progress < 0.2 else (1 - progress) / 0.8,
}


@dataclass(frozen=True)
class OtherRule:
    """A rule as a function of its first free parameter, in the form of `Training.rule`.

    Attributes:
        rule: A function of logits, labels and parameters, as in `pseudograd.rules`.

    Example:
        >>> from pseudograd.rules import generalized_cross_entropy, symmetric_cross_entropy
        >>> OtherRule(generalized_cross_entropy).parameter
        'q'
        >>> OtherRule(functools.partial(symmetric_cross_entropy, alpha=0.1)).parameter
        'beta'

    """

    rule: Callable[..., Tensor]

    def __call__(self, value: Any) -> Rule:
        """Return the rule with this value of the parameter."""
        return functools.partial(self.rule, **{self.parameter: value})

    @functools.cached_property
    def parameter(self) -> str:
        """The name of the parameter."""
        factor, bound = factor_of(self.rule), getattr(self.rule, "keywords", {})
        with contextlib.suppress(TypeError, ValueError):  # not a function, or without a signature
            given = [*inspect.signature(factor or self.rule).parameters.values()]
            for one in given[1 if factor else 2 :]:
                if one.name not in bound and one.kind.name[:3] != "VAR":
                    return one.name
        raise ValueError(
            "rule must be a function of logits, labels and the parameter to search, such as "
            f"pseudograd.rules.focal, not {shown(self.rule)}"
        )


@dataclass(frozen=True)
class Training:
    """A network and its training settings, all that a search does not vary.

    Attributes:
        network: Returns a new, untrained module. Its initial weights may depend on PyTorch's
            random numbers, but on nothing else that changes.
        optimizer: A class of `torch.optim`, or a function ``(parameters, lr=..., ...)`` that
            returns an optimizer.
        optimizer_settings: Keyword arguments of the optimizer, except the learning rate.
        epochs: The maximum number of epochs.
        batch_size: Examples per step. An incomplete last batch of an epoch is dropped.
        schedule: The learning rate's factor as a function of progress in [0, 1], or one of
            "constant", "cosine", "linear" and "one-cycle".
        clip: The largest norm of a step's gradient over all parameters; None for no limit.
        patience: Stop after this many epochs without a lower error, and keep the best epoch; None
            to train for all epochs and keep the last.
        validation: The fraction of the training examples to validate on, such as 0.1 (with
            patience, as many again for early stopping); None for the paper's five folds.
        augment: A function of a batch of inputs, or of inputs and labels that returns both, applied
            on the device in training. It may return probabilities (N, classes, ...) as labels.
        precision: "float32", "tf32", or "bf16" for autocast to bfloat16.
        label_smoothing: As for the loss.
        class_weights: A factor for each class, as for the loss.
        ignore_index: The label to ignore, as for the loss.
        compile: Whether to compile the network on a GPU.
        rule: A function that returns the rule for a value of k, which is then that rule's
            parameter, such as ``lambda gamma: functools.partial(pseudograd.rules.focal,
            gamma=gamma)``; None for the paper's rule. On a GPU, k is a tensor.

    """

    network: Callable[[], nn.Module]
    optimizer: Callable[..., Optimizer] = torch.optim.AdamW
    optimizer_settings: Mapping[str, Any] = field(default_factory=dict)
    epochs: int = 30
    batch_size: int = 128
    schedule: str | Schedule = "cosine"
    clip: float | None = None
    patience: int | None = None
    validation: float | None = None
    augment: Augment | None = None
    precision: str = "float32"
    label_smoothing: float = 0.0
    class_weights: tuple[float, ...] | None = None
    ignore_index: int = -100
    compile: bool = True
    rule: Callable[[Any], Rule] | None = None

    def recipe(self, data: str, data_hash: str = "") -> ModuleRecipe:
        """Return the description of this training on a data set."""
        return dataclasses.replace(self._described, data=data, data_hash=data_hash)

    @functools.cached_property
    def _described(self) -> ModuleRecipe:
        """The recipe without data; sent along to other processes, which cannot read the code."""
        for name, wanted in (
            ("network", "a function that returns a new module"),
            ("optimizer", "a class such as torch.optim.AdamW"),
        ):
            if not callable(getattr(self, name)):
                raise ValueError(f"{name} must be {wanted}, not {shown(getattr(self, name))}")
        if self.rule is not None and self.label_smoothing:
            raise ValueError("label_smoothing must be left out with a rule: it needs hard labels")
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision must be one of {PRECISIONS}, not {self.precision!r}")
        rule: Any = self.rule
        if isinstance(rule, OtherRule):
            rule = factor_of(rule.rule) or rule.rule
        return ModuleRecipe(
            network=describe_network(self.network),
            data="",
            optimizer=self._optimizer_description(),
            epochs=self.epochs,
            batch_size=self.batch_size,
            schedule=self._schedule_description(),
            clip=self.clip,
            patience=self.patience,
            validation=self.validation,
            augment=describe(self.augment) if self.augment else "",
            precision=self.precision,
            label_smoothing=self.label_smoothing,
            class_weights=self.class_weights or (),
            ignore_index=self.ignore_index,
            rule=describe(rule) if rule else "tunable",
        )

    def _optimizer_description(self) -> str:
        settings = [f"{name}={value!r}" for name, value in sorted(self.optimizer_settings.items())]
        return f"{describe(self.optimizer)}({', '.join(settings)})"

    def _schedule_description(self) -> str:
        if isinstance(self.schedule, str):
            if self.schedule not in SCHEDULES:
                raise ValueError(
                    f"schedule must be a function of progress in [0, 1] or one of "
                    f"{tuple(SCHEDULES)}, not {self.schedule!r}"
                )
            return self.schedule
        factors = self.factors(10)
        if _counts_epochs(self.schedule):
            raise ValueError(
                "schedule must be a function of progress in [0, 1], not of the epoch, but it "
                f"is always {factors[0]:g} there: multiply progress by the number of epochs"
            )
        return describe(self.schedule)

    def factors(self, steps: int) -> list[float]:
        """Return the learning rate factor of each step."""
        schedule = SCHEDULES[self.schedule] if isinstance(self.schedule, str) else self.schedule
        try:
            values = [float(schedule((step + 0.5) / steps)) for step in range(steps)]
        except Exception as problem:
            raise ValueError(
                f"schedule must be a function of progress in [0, 1] that returns a factor of the "
                f"learning rate, or one of {tuple(SCHEDULES)}, but it fails ({raised(problem)})"
            ) from problem
        if not all(0 <= value < math.inf for value in values):
            raise ValueError("schedule must return finite numbers of at least 0 for [0, 1]")
        return values

    def module(self, seed: int) -> nn.Module:
        """Return a new network whose initial weights depend only on the seed."""
        with seeded(seed):
            return self.network()

    def logits(self, module: Callable[..., Any], inputs: tuple[Tensor, ...]) -> Tensor:
        """Return the network's logits for a batch."""
        device = inputs[0].device.type
        with torch.autocast(device, torch.bfloat16, enabled=self.precision == "bf16"):
            logits: Tensor = logits_of(module(*inputs))
            return logits

    def loss(self, logits: Tensor, labels: Tensor, k: float | Tensor) -> Tensor:
        """Return the loss of a batch for class indices or probabilities."""
        weight = _on(logits.device, self.class_weights) if self.class_weights else None
        if self.rule is not None:
            criterion = RuleCrossEntropyLoss(self.rule(k), weight, ignore_index=self.ignore_index)
            return criterion.forward(logits, labels)
        return tunable_cross_entropy(
            logits,
            labels,
            k=k,
            weight=weight,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
        )

    def augmented(
        self, inputs: tuple[Tensor, ...], labels: Tensor
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        """Return a batch of training inputs and labels after augmentation."""
        if self.augment is None:
            return inputs, labels
        changed: Any = inputs[0] if len(inputs) == 1 else inputs
        if self._augments_labels:
            changed = self.augment(changed, labels)
            if not isinstance(changed, tuple | list) or len(changed) != 2:
                raise ValueError("augment must return both inputs and labels if it takes both")
            changed, labels = changed
        else:
            changed = self.augment(changed)
        return changed if isinstance(changed, tuple) else (changed,), labels

    @functools.cached_property
    def _augments_labels(self) -> bool:
        """Whether the augmentation has two required arguments, inputs and labels."""
        function: Any = getattr(self.augment, "forward", self.augment)  # of a module
        try:
            given = inspect.signature(function).parameters
        except (TypeError, ValueError):  # not a function, or without a signature
            return False
        needed = [one for one in given.values() if one.default is one.empty]
        return sum(one.kind.name.startswith("POSITIONAL") for one in needed) == 2


def logits_of(outputs: Any) -> Any:
    """Return the logits among a network's outputs, such as those of Hugging Face's models.

    Example:
        >>> logits_of({"loss": None, "logits": torch.zeros(2, 3)}).shape
        torch.Size([2, 3])

    """
    if isinstance(outputs, Mapping):
        return outputs.get("logits", outputs)
    return getattr(outputs, "logits", outputs)


def _counts_epochs(schedule: Schedule) -> bool:
    """Return whether a schedule is constant in [0, 1], but changes with the number of epochs."""
    with contextlib.suppress(Exception):  # outside [0, 1]
        inside = {float(schedule(tenth / 10)) for tenth in range(11)}
        return len(inside) == 1 and {float(schedule(10**power)) for power in (1, 2, 3)} != inside
    return False


@functools.cache  # a captured graph cannot copy them from the host
def _on(device: torch.device, weights: tuple[float, ...]) -> Tensor:
    return torch.tensor(weights, device=device)
