"""The general framework (Eq. 2 and 3): any function f of the prediction bias as a rule.

A rule maps logits (..., C) and labels (...) to a pseudo-gradient at the logits.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from pseudograd.rules import paper

Rule: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""A function of logits (..., C) and labels (...) that returns the pseudo-gradient, (..., C)."""


def bias(logits: Tensor, target: Tensor) -> Tensor:
    """Return the prediction bias ε = p - onehot(y), without cancellation on the label.

    Args:
        logits: Scores of shape (..., C).
        target: The labels, shape (...).

    Example:
        >>> import torch
        >>> bias(torch.tensor([40.0, 0.0]), torch.tensor(0))  # softmax - 1 would be 0 here
        tensor([-4.2484e-18,  4.2484e-18])

    """
    return paper.tunable(logits, target, 1.0)


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Return the gradient of -log p_y, which is the bias itself (Eq. 2).

    Args:
        logits: Scores of shape (..., C).
        target: The labels, shape (...).

    Example:
        >>> import torch
        >>> cross_entropy(torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([0]))
        tensor([[-0.3348,  0.2447,  0.0900]])

    """
    return bias(logits, target)


def from_bias(f: Callable[[Tensor, Tensor], Tensor]) -> Rule:
    """Return the rule given by a function f of (ε, y), as in Eq. 3.

    Args:
        f: Maps the biases (..., C) and the labels (...) to a tensor (..., C). For half types the
            biases are float32.

    Returns:
        The rule, a function of logits and labels. It can be pickled if ``f`` can.

    Example:
        >>> import torch
        >>> cubed = from_bias(lambda bias, y: bias**3)
        >>> cubed(torch.tensor([[1.0, 0.0]]), torch.tensor([0]))
        tensor([[-0.0195,  0.0195]])

    """
    if not takes_two(f):
        raise TypeError(f"f must be a function of the biases and the labels, not {f!r}")
    return _FromBias(f)


@dataclass(frozen=True, repr=False)
class _FromBias:
    """The rule as an object, because a closure could not be pickled."""

    f: Callable[[Tensor, Tensor], Tensor]

    def __call__(self, logits: Tensor, target: Tensor) -> Tensor:
        result = self.f(bias(paper.in_working_precision(logits), target), target)
        if not isinstance(result, Tensor):
            raise TypeError(
                f"f must return a tensor of the shape of the biases, not {type(result).__name__}"
            )
        return result.to(logits.dtype)

    def __repr__(self) -> str:
        return f"from_bias({getattr(self.f, '__qualname__', self.f)})"


def takes_two(function: object) -> bool:
    """Return whether something can be called with two arguments, as far as Python can tell."""
    if not callable(function):
        return False
    try:
        inspect.signature(function).bind(None, None)
    except TypeError:
        return False
    except ValueError:  # some built-in functions have no signature
        pass
    return True


def checked(rule: Rule, logits: Tensor, target: Tensor) -> Tensor:
    """Return the pseudo-gradient of a rule; raise if it is not a tensor shaped like the logits."""
    f = rule(logits, target)
    if not isinstance(f, Tensor):
        raise TypeError(
            f"rule must return a tensor of the shape of the logits, not {type(f).__name__}"
        )
    if f.shape != logits.shape:
        raise ValueError(
            f"rule must return a tensor of the shape of the logits, {tuple(logits.shape)}, not "
            f"{tuple(f.shape)}"
        )
    return f
