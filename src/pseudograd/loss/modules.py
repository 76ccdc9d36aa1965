"""The losses as modules."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from pseudograd.loss.autograd import ByRule, prepare_tracing, rows_of
from pseudograd.loss.checks import (
    as_sensitivity,
    check_arguments,
    check_factors,
    check_implementation,
    check_k,
    check_settings,
    example_shape,
)
from pseudograd.loss.functional import (
    _rows,
    class_index_loss,
    loss_dtype,
    tunable_cross_entropy,
)
from pseudograd.loss.triton.scaled import ScaledBefore
from pseudograd.rules.framework import takes_two
from pseudograd.rules.paper import Sensitivity

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Names for rules, the same for all losses of a rule.
_NUMBERS = itertools.count()
_NAMES: WeakKeyDictionary[Callable[..., Tensor], str] = WeakKeyDictionary()


class TunableLoss(nn.Module):
    """What losses with a k have in common."""

    def __init__(
        self,
        k: Sensitivity,
        ignore_index: int,
        reduction: str,
        label_smoothing: float,
        implementation: str,
        process_group: ProcessGroup | None,
    ) -> None:
        super().__init__()
        check_k(k)
        check_settings(ignore_index, reduction, label_smoothing)
        check_implementation(implementation)
        self.k = as_sensitivity(k)
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.label_smoothing = label_smoothing
        self.implementation = implementation
        self.process_group = process_group

    # Shown only where it is another.
    _usual: ClassVar[dict[str, Any]] = {
        "ignore_index": -100,
        "label_smoothing": 0.0,
        "implementation": "auto",
    }

    def extra_repr(self) -> str:
        """Show what was set."""
        others = [
            f", {name}={getattr(self, name)!r}"
            for name, value in self._usual.items()
            if getattr(self, name) != value
        ]
        return f"k={self.k}, reduction={self.reduction!r}{''.join(others)}"


class TunableCrossEntropyLoss(TunableLoss):
    """`torch.nn.CrossEntropyLoss` with one more argument, k.

    Args:
        k: The sensitivity to large errors, above 0; it may be changed during training. See
            `tunable_cross_entropy`, as for all the others.
        weight: A factor for each class.
        ignore_index: Examples with this class index count for nothing.
        reduction: "mean", "sum" or "none".
        label_smoothing: The share of each target that is spread evenly over all classes.
        implementation: "auto", "triton" or "torch".
        process_group: The ranks that share the classes.

    Example:
        >>> import torch
        >>> criterion = TunableCrossEntropyLoss(k=0.5)
        >>> logits = torch.tensor([[2.0, 1.0, 0.0]], requires_grad=True)
        >>> criterion(logits, torch.tensor([0])).backward()
        >>> logits.grad
        tensor([[-0.5786,  0.3601,  0.2184]])

    """

    weight: Tensor | None

    def __init__(
        self,
        k: Sensitivity = 1.0,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        *,
        implementation: str = "auto",
        process_group: ProcessGroup | None = None,
    ) -> None:
        super().__init__(k, ignore_index, reduction, label_smoothing, implementation, process_group)
        check_factors("weight", weight)
        self.register_buffer("weight", weight)
        self._scaled = ScaledBefore()

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Give the loss of logits for class indices or class probabilities."""
        return tunable_cross_entropy(
            input,
            target,
            self.k,
            weight=self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
            implementation=self.implementation,
            process_group=self.process_group,
            _scaled=self._scaled,
        )


class RuleCrossEntropyLoss(nn.Module):
    """Cross-entropy with any rule f as its backward pass (Eq. 3): a place for new ideas.

    Args:
        rule: A function of logits (R, C) and labels (R) that gives the pseudo-gradient (R, C): one
            from `pseudograd.rules`, or your own. It must not write into the logits. It may be
            replaced during training; `torch.compile` traces it once, with the numbers that it then
            reads from elsewhere.
        weight: A factor for each class.
        ignore_index: Examples with this class index count for nothing.
        reduction: "mean", "sum" or "none".

    Example:
        >>> import torch
        >>> from pseudograd.rules import from_bias
        >>> criterion = RuleCrossEntropyLoss(from_bias(lambda bias, y: bias.clamp(-0.3, 0.3)))
        >>> logits = torch.tensor([[2.0, 1.0, 0.0]], requires_grad=True)
        >>> criterion(logits, torch.tensor([0])).backward()
        >>> logits.grad
        tensor([[-0.3000,  0.2447,  0.0900]])

    """

    weight: Tensor | None

    def __init__(
        self,
        rule: Callable[[Tensor, Tensor], Tensor],
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
    ) -> None:
        super().__init__()
        check_settings(ignore_index, reduction, label_smoothing=0.0)
        check_factors("weight", weight)
        self.rule = rule
        self.register_buffer("weight", weight)
        self.ignore_index = ignore_index
        self.reduction = reduction

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "rule":
            if not takes_two(value):
                raise TypeError(
                    f"rule must be a function of logits and labels, not {value!r}; one of the bias "
                    "is made a rule by `pseudograd.rules.from_bias`"
                )
            # `torch.compile` knows functions by their code, which all rules share. A text it looks
            # at, so that each rule has a graph of its own.
            self._name = _name_of(value)
            self._value_of_rows = {self._name: rows_of(ByRule(value))}
            self._modules.pop(name, None)  # a function may take the place of a module
        super().__setattr__(name, value)

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Give the loss of logits for class indices."""
        prepare_tracing()
        check_arguments(
            input, target, self.weight, self.ignore_index, self.reduction, label_smoothing=0.0
        )
        if target.is_floating_point():
            raise TypeError("target must hold class indices: rules are functions of a label")
        input = input.to(loss_dtype(input, target))
        value = class_index_loss(
            _rows(input), target.reshape(-1), 1.0, self._value_of_rows[self._name], self.weight,
            self.ignore_index, self.reduction,
        )  # fmt: skip
        if self.reduction == "none":
            value = value.reshape(example_shape(input))
        return value.to(input.dtype)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_value_of_rows"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.rule = self.rule

    def extra_repr(self) -> str:
        """Show what was set."""
        return f"rule={self.rule!r}, reduction={self.reduction!r}"


def _name_of(rule: Callable[..., Tensor]) -> str:
    name = f"rule {next(_NUMBERS)}"
    try:
        return _NAMES.setdefault(rule, name)
    except TypeError:  # it cannot be a key
        return name
