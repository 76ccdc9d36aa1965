"""The general framework (Eq. 2 and 3): any function f of the prediction bias as a rule.

A rule is a function of logits (..., C) and labels (...) that gives a pseudo-gradient at the logits.
Here are the paper's competitors, each a multiple of the bias ε = p - onehot(y), and the bias itself
at one end of its parameter. The multiple is taken in log space, like the tunable rule.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from pseudograd.rules import paper
from pseudograd.rules.checks import check_number

Rule: TypeAlias = Callable[[Tensor, Tensor], Tensor]

_ALMOST_CERTAIN = 40.0  # a margin beyond which 1 - p_y, -log p_y and exp(-margin) are the same


def bias(logits: Tensor, target: Tensor) -> Tensor:
    """Give the prediction bias ε = p - onehot(y), without cancellation on the label.

    Args:
        logits: Scores of shape (..., C).
        target: The labels, shape (...).

    Example:
        >>> import torch
        >>> bias(torch.tensor([40.0, 0.0]), torch.tensor(0))  # softmax - 1 would be 0 here
        tensor([-4.2484e-18,  4.2484e-18])

    """
    return paper.tunable(logits, target, 1.0)


def from_bias(f: Callable[[Tensor, Tensor], Tensor]) -> Rule:
    """Make a rule of a function of (ε, y), as in Eq. 3.

    Args:
        f: A function of the biases (..., C) and the labels (...) that gives a tensor (..., C). Of
            half types it sees float32.

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
    """A rule that can be pickled where its function can, as a function inside another cannot."""

    f: Callable[[Tensor, Tensor], Tensor]

    def __call__(self, logits: Tensor, target: Tensor) -> Tensor:
        result = self.f(bias(paper.in_working_precision(logits), target), target)
        if not isinstance(result, Tensor):
            raise TypeError(
                f"f must give a tensor of the shape of the biases, not {type(result).__name__}"
            )
        return result.to(logits.dtype)

    def __repr__(self) -> str:
        return f"from_bias({getattr(self.f, '__qualname__', self.f)})"


def takes_two(function: object) -> bool:
    """Whether something can be called with two arguments, as far as Python can tell.

    Args:
        function: Anything.

    Example:
        >>> takes_two(bias), takes_two(lambda bias: bias), takes_two(3)
        (True, False, False)

    """
    if not callable(function):
        return False
    try:
        inspect.signature(function).bind(None, None)
    except TypeError:
        return False
    except ValueError:  # of some functions that are not Python's there is no signature
        pass
    return True


def checked(rule: Rule, logits: Tensor, target: Tensor) -> Tensor:
    """Give what a rule gives, if that is one number for each logit.

    Args:
        rule: The rule.
        logits: Scores of shape (..., C).
        target: The labels, shape (...).

    Example:
        >>> import torch
        >>> checked(lambda z, y: z.sum(-1), torch.zeros(2, 3), torch.tensor([0, 1]))
        Traceback (most recent call last):
        ...
        ValueError: rule must give a tensor of the shape of the logits, (2, 3), not (2,)

    """
    f = rule(logits, target)
    if not isinstance(f, Tensor):
        raise TypeError(
            f"rule must give a tensor of the shape of the logits, not {type(f).__name__}"
        )
    if f.shape != logits.shape:
        raise ValueError(
            f"rule must give a tensor of the shape of the logits, {tuple(logits.shape)}, not "
            f"{tuple(f.shape)}"
        )
    return f


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Give the gradient of -log p_y: the bias itself (Eq. 2).

    Args:
        logits: Scores of shape (..., C).
        target: The labels, shape (...).

    Example:
        >>> import torch
        >>> cross_entropy(torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([0]))
        tensor([[-0.3348,  0.2447,  0.0900]])

    """
    return bias(logits, target)


def power_of_log(logits: Tensor, target: Tensor, k: float = 1.0) -> Tensor:
    """Give the gradient of |log p_y|^k, the first naive alternative of Section 3.

    It is k |log p_y|^(k-1) ε: for k < 1 the factor grows without bound as p_y tends to 1, and for a
    given p_y it is not monotone in k, which is the paper's argument against it.

    Args:
        logits: Scores of shape (..., C).
        target: The labels, shape (...).
        k: The exponent, above 0; at 1 this is cross-entropy.

    Example:
        >>> import torch
        >>> z, y = torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([0])
        >>> [round(-power_of_log(z, y, k)[0, 0].item(), 3) for k in (0.25, 1, 4)]
        [0.164, 0.335, 0.091]

    """
    paper.check_sensitivity(k, values=False)

    def strength(margin: Tensor) -> Tensor:
        # Where p_y is so near 1 that -log p_y has no digits left, it is exp(-margin).
        near = margin.clamp(max=_ALMOST_CERTAIN)
        log_surprise = paper.cross_entropy(near).log() - (margin - near)
        return k * ((k - 1) * log_surprise + paper.log_strength(margin)).exp()

    return _with_strength(strength, logits, target)


def log_of_power(logits: Tensor, target: Tensor, k: float = 1.0) -> Tensor:
    """Give the gradient of -log p_y^k, the second naive alternative of Section 3: merely k ε.

    Args:
        logits: Scores of shape (..., C).
        target: The labels, shape (...).
        k: The exponent, above 0; at 1 this is cross-entropy.

    Example:
        >>> import torch
        >>> log_of_power(torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([0]), k=2.0)
        tensor([[-0.6695,  0.4895,  0.1801]])

    """
    paper.check_sensitivity(k, values=False)
    return _with_strength(lambda margin: k * paper.strength(margin, 1.0), logits, target)


def focal(logits: Tensor, target: Tensor, gamma: float = 2.0) -> Tensor:
    """Give the gradient of focal loss, -(1 - p_y)^γ log p_y (Lin et al., 2017).

    Args:
        logits: Scores of shape (..., C).
        target: The labels, shape (...).
        gamma: How much well-classified examples are held back, 0 or more; at 0 this is
            cross-entropy.

    Example:
        >>> import torch
        >>> focal(torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([0]), gamma=2.0)
        tensor([[-0.0983,  0.0719,  0.0264]])

    """
    check_number("gamma", gamma, 0, sys.float_info.max, "a finite number, 0 or more")

    def strength(margin: Tensor) -> Tensor:
        # (1-p)^γ + γ p (1-p)^(γ-1) (-log p), with the second power made a γ-th one: the ratio of
        # -log p to 1-p tends to 1, where the power itself would overflow for γ < 1.
        near = margin.clamp(max=_ALMOST_CERTAIN)
        surprise = paper.cross_entropy(near)  # -log p_y
        ratio = surprise / paper.strength(near, 1.0)
        factor = 1 + gamma * (-surprise).exp() * ratio
        return paper.strength(margin, gamma + 1) * factor

    return _with_strength(strength, logits, target)


def generalized_cross_entropy(logits: Tensor, target: Tensor, q: float = 0.7) -> Tensor:
    """Give the gradient of (1 - p_y^q) / q (Zhang and Sabuncu, 2018), which is p_y^q ε.

    Args:
        logits: Scores of shape (..., C).
        target: The labels, shape (...).
        q: Between 0, where this is cross-entropy, and 1, where it is the mean absolute error.

    Example:
        >>> import torch
        >>> generalized_cross_entropy(torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([0]), q=0.7)
        tensor([[-0.2517,  0.1840,  0.0677]])

    """
    check_number("q", q, 0, 1, "a number in [0, 1]")

    def strength(margin: Tensor) -> Tensor:
        return (-q * paper.cross_entropy(margin) + paper.log_strength(margin)).exp()

    return _with_strength(strength, logits, target)


def _with_strength(strength: Callable[[Tensor], Tensor], logits: Tensor, target: Tensor) -> Tensor:
    """The multiple of the bias whose |f_y| is a function of the margin."""
    z = paper.in_working_precision(logits)
    top, margin = paper.top_and_margin(z, target)
    margin = margin.clamp(min=torch.finfo(margin.dtype).min)  # for a label masked by -inf
    return paper.push(z, target, 1.0, top, strength(margin)).to(logits.dtype)
