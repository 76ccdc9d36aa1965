"""The general framework (Eq. 2 and 3): any function f of the prediction bias as a rule.

A rule is a function of logits (..., C) and labels (...) that gives a pseudo-gradient at the logits.
Here are the paper's competitors, each a multiple of the bias ε = p - onehot(y), and the bias itself
at one end of its parameter. The multiple is taken in log space, like the tunable rule.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from torch import Tensor

from pseudograd.rules import paper

Rule: TypeAlias = Callable[[Tensor, Tensor], Tensor]


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
        f: A function of the biases (..., C) and the labels (...) that gives a tensor (..., C).

    Returns:
        The rule, a function of logits and labels.

    Example:
        >>> import torch
        >>> cubed = from_bias(lambda bias, y: bias**3)
        >>> cubed(torch.tensor([[1.0, 0.0]]), torch.tensor([0]))
        tensor([[-0.0195,  0.0195]])

    """

    def rule(logits: Tensor, target: Tensor) -> Tensor:
        return f(bias(logits, target), target)

    return rule


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
    log_of_surprise = paper.cross_entropy(_margin(logits, target)).log()
    return _multiple(logits, target, k * ((k - 1) * log_of_surprise).exp())


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
    return k * bias(logits, target)


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
    margin = _margin(logits, target)
    surprise = paper.cross_entropy(margin)  # -log p_y
    # (1-p)^γ + γ p (1-p)^(γ-1) (-log p), with the second power made a γ-th one: the ratio of
    # -log p to 1-p tends to 1, where the power itself would overflow for γ < 1.
    ratio = surprise / paper.strength(margin, 1.0)
    confidence = (-surprise).exp()
    factor = paper.strength(margin, gamma) * (1 + gamma * confidence * ratio.nan_to_num(1.0))
    return _multiple(logits, target, factor)


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
    return _multiple(logits, target, (-q * paper.cross_entropy(_margin(logits, target))).exp())


def _margin(logits: Tensor, target: Tensor) -> Tensor:
    return paper.top_and_margin(paper.in_working_precision(logits), target)[1]


def _multiple(logits: Tensor, target: Tensor, factor: Tensor) -> Tensor:
    """``factor`` (a column in the working precision) times the bias, rounded once."""
    z = paper.in_working_precision(logits)
    return (factor * bias(z, target)).to(logits.dtype)
