"""Cross-entropy with any rule as its backward pass, as a module."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.nn._reduction import legacy_get_string

from pseudograd.loss.autograd import constant, rows_of, zero_with_gradient
from pseudograd.loss.checks import (
    check_arguments,
    check_factors,
    check_implementation,
    check_settings,
    python_number,
)
from pseudograd.loss.functional import (
    as_rows,
    chosen_route,
    class_index_loss,
    cross_entropy_rows,
    loss_dtype,
)
from pseudograd.loss.modes import keep_whole, prepare_tracing
from pseudograd.loss.rows import ByRule
from pseudograd.loss.targets import checked_weights, weighted_reduction
from pseudograd.rules.checks import is_eager
from pseudograd.rules.framework import Rule, takes_two
from pseudograd.rules.paper import Sensitivity, wide
from pseudograd.rules.reweighted import checked_factors, factor_of

# A name for each rule, shared by all losses of that rule.
_NUMBERS = itertools.count()
_NAMES: WeakKeyDictionary[Rule, str] = WeakKeyDictionary()


class RuleCrossEntropyLoss(nn.CrossEntropyLoss):
    """Cross-entropy with any rule f as its backward pass (Eq. 3), for experiments with other rules.

    This is a subclass of `torch.nn.CrossEntropyLoss`. After the rule, positional arguments are in
    the same order. There is no label smoothing.

    Args:
        rule: Maps logits (R, C) and labels (R) to the pseudo-gradient (R, C): one from
            `pseudograd.rules`, or your own. It must not modify the logits. A
            `pseudograd.rules.Reweighted` rule, or a `functools.partial` of one, runs as fast as
            cross-entropy and can be exported. You may replace the rule during training.
            `torch.compile` traces it once: numbers it reads from outside become constants.
        weight: A weight for each class.
        size_average: Deprecated in PyTorch; use ``reduction``.
        ignore_index: Examples with this class index contribute nothing.
        reduce: Deprecated in PyTorch; use ``reduction``.
        reduction: "mean", "sum" or "none".
        implementation: "auto", "triton" or "torch"; rules other than `Reweighted` ones always use
            PyTorch operations.

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
        rule: Rule,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        *,
        implementation: str = "auto",
    ) -> None:
        super().__init__()
        if size_average is not None or reduce is not None:
            reduction = legacy_get_string(size_average, reduce)
        check_settings(ignore_index, reduction, label_smoothing=0.0)
        check_implementation(implementation)
        check_factors("weight", weight)
        self.rule = rule
        self.register_buffer("weight", weight)
        self.ignore_index = python_number(ignore_index)
        self.reduction = reduction
        self.implementation = implementation

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "rule":
            if not takes_two(value):
                raise TypeError(
                    f"rule must be a function of logits and labels, not {value!r}; to turn "
                    "a function of the bias into a rule, use `pseudograd.rules.from_bias`"
                )
            # `torch.compile` identifies functions by their code, which is the same for all rules.
            # The name as a dictionary key makes it compile a graph for each rule.
            self._name = _name_of(value)
            self._reweights = factor_of(value) is not None
            self._rows = {self._name: _rows_of_rule(value)}
            self._modules.pop(name, None)  # a function may replace a module
        super().__setattr__(name, value)

    def forward(self, input: Tensor, target: Tensor, sample_weight: Tensor | None = None) -> Tensor:
        """Return the loss of logits for class indices."""
        prepare_tracing()
        check_arguments(
            input, target, self.weight, self.ignore_index, self.reduction, label_smoothing=0.0
        )
        if target.is_floating_point():
            raise TypeError("target must hold class indices: a rule is a function of labels")
        rows, route, dtype = self._rows[self._name], "torch", loss_dtype(input, target)
        if self._reweights:
            route = chosen_route(input, target, self.implementation)
            rows = functools.partial(rows, route=route, eager=is_eager())
        z = as_rows(input if route == "triton" else input.to(dtype))
        labels, weight, per_example = target.flatten(), self.weight, None
        if sample_weight is not None:
            per_example = checked_weights(sample_weight, target.shape, input.device)
        inner = self.reduction if per_example is None else "none"
        loss = class_index_loss(z, labels, 1.0, weight, self.ignore_index, inner, rows=rows)
        if per_example is not None:
            loss = weighted_reduction(
                loss, per_example, labels, z, weight, self.ignore_index, self.reduction
            )
        return (loss.reshape(target.shape) if self.reduction == "none" else loss).to(dtype)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_rows"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.rule = self.rule

    def extra_repr(self) -> str:
        """Return the settings."""
        return f"rule={self.rule!r}, reduction={self.reduction!r}"


def _rows_of_rule(rule: Rule) -> Callable[..., Tensor]:
    """Return the row function of a rule; that of a `Reweighted` one also takes the route."""
    factor = factor_of(rule)
    if factor is None:
        return rows_of(ByRule(rule))

    def rows(z: Tensor, y: Tensor, k: Sensitivity, route: str, eager: bool) -> Tensor:
        value = cross_entropy_rows(z, y, route, eager)
        surprise = constant(value)
        surprises = wide(surprise)
        slope = checked_factors(factor(surprises), surprises).to(value.dtype)
        # The value of cross-entropy, and its gradient times the slope.
        zero = zero_with_gradient(value.unsqueeze(-1), slope.unsqueeze(-1), surprise)
        return surprise + zero

    keep_whole(rows)
    return rows


def _name_of(rule: Rule) -> str:
    name = f"rule {next(_NUMBERS)}"
    try:
        return _NAMES.setdefault(rule, name)
    except TypeError:  # not hashable
        return name
