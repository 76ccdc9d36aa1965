"""Rules that multiply cross-entropy's gradient by a function of the cross-entropy.

A loss g(CE) of the cross-entropy CE = -log p_y has the gradient g'(CE) · ε. So the rule is the
bias ε times one factor g'(CE) per example, and every implementation of cross-entropy (C++, Triton,
compiled, exported) can compute it: multiply the upstream gradient of each example by its factor.
With three or more classes the paper's rule is not of this kind for k ≠ 1 (Lemma 1).
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any, Concatenate, Generic, ParamSpec

import torch
from torch import Tensor

from pseudograd.rules import paper
from pseudograd.rules.checks import check_k, check_labels, check_parameter, holds_numbers

P = ParamSpec("P")

# Factors that grow without bound as p_y tends to 1 stop growing here, so that float32 can hold
# them even if the loss is scaled by 2^24.
_LEAST_SURPRISE = 2.0**-100


class Reweighted(Generic[P]):
    """A rule that multiplies cross-entropy's gradient by a factor, as a decorator of that factor.

    The decorated function becomes a rule of (logits, target, parameters...). In
    `RuleCrossEntropyLoss` it runs on the same fast routes as cross-entropy, on CPUs and GPUs.

    Args:
        factor: Maps the cross-entropies -log p_y (float64, any shape, 0 to infinity) and optional
            parameters to the factors, of the same shape and finite everywhere. Parameters may be
            tensors that broadcast against the cross-entropies.

    Example:
        >>> import torch
        >>> @Reweighted
        ... def at_least(cross_entropy, threshold=0.5):  # ignore examples already learned
        ...     return (cross_entropy > threshold).to(cross_entropy)
        >>> z, y = torch.tensor([[2.0, 1.0, 0.0], [0.0, 1.0, 2.0]]), torch.tensor([0, 0])
        >>> at_least(z, y, threshold=1.0)
        tensor([[-0.0000,  0.0000,  0.0000],
                [-0.9100,  0.2447,  0.6652]])

    """

    def __init__(self, factor: Callable[Concatenate[Tensor, P], Tensor]) -> None:
        if not callable(factor):
            raise TypeError(f"factor must be a function of the cross-entropies, not {factor!r}")
        self.factor = factor
        self.__doc__ = factor.__doc__
        self.__module__ = getattr(factor, "__module__", type(self).__module__)

    def __call__(self, logits: Tensor, target: Tensor, *args: P.args, **kwargs: P.kwargs) -> Tensor:
        """Return the pseudo-gradient at the logits (..., C) for labels (...)."""
        check_labels(logits, target)
        z = paper.in_working_precision(logits)
        top, margin = paper.top_and_margin(z, target)
        cross_entropy = paper.cross_entropy(margin).squeeze(-1)
        factor = checked_factors(self.factor(cross_entropy, *args, **kwargs), cross_entropy)
        scale = factor.unsqueeze(-1) * paper.strength(margin, 1.0)
        return paper.push(z, target, 1.0, top, scale).to(logits.dtype)

    def __reduce__(self) -> str | tuple[Any, ...]:
        # After decoration the function's name is this object's, and pickle finds it by that name.
        name = getattr(self.factor, "__qualname__", "")
        found = getattr(sys.modules.get(self.__module__), name, None)
        return name if found is self else (Reweighted, (self.factor,))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Reweighted) and self.factor == other.factor

    def __hash__(self) -> int:
        return hash(self.factor)

    def __repr__(self) -> str:
        return f"Reweighted({getattr(self.factor, '__qualname__', self.factor)})"


def checked_factors(factors: Tensor, cross_entropy: Tensor) -> Tensor:
    """Return the factors of a `Reweighted` rule; raise unless there is one for each example."""
    if not isinstance(factors, Tensor) or factors.shape != cross_entropy.shape:
        shape, given = tuple(cross_entropy.shape), type(factors).__name__
        if isinstance(factors, Tensor):
            given = f"a tensor of shape {tuple(factors.shape)}"
        raise ValueError(
            "the factor of a Reweighted rule must return a tensor of the cross-entropies' shape, "
            f"{shape}, not {given}"
        )
    return factors


def factor_of(rule: object) -> Callable[[Tensor], Tensor] | None:
    """Return the factor of a `Reweighted` rule or a `functools.partial` of one, or None."""
    if isinstance(rule, functools.partial) and isinstance(rule.func, Reweighted) and not rule.args:
        return functools.partial(rule.func.factor, **rule.keywords)
    return rule.factor if isinstance(rule, Reweighted) else None


def reweighted(name: str) -> Reweighted[...]:
    """Return the `Reweighted` rule of a name, as recipes and ledgers store it.

    Args:
        name: A rule of `pseudograd.rules`, such as "focal", or "module:rule" for your own.

    Example:
        >>> reweighted("focal")
        Reweighted(focal)

    """
    module, _, attribute = str(name).rpartition(":")
    try:
        found = getattr(importlib.import_module(module or "pseudograd.rules"), attribute, None)
    except ImportError:
        found = None
    if not isinstance(found, Reweighted):
        raise ValueError(
            "rule must be 'tunable' or name a Reweighted rule, such as 'focal' or "
            f"'my_module:my_rule', not {name!r}"
        )
    return found


@Reweighted
def power_of_log(cross_entropy: Tensor, k: paper.Sensitivity = 1.0) -> Tensor:
    """Return the gradient of |log p_y|^k, the first naive alternative of Section 3.

    The factor is k |log p_y|^(k-1). For k < 1 it grows without bound as p_y tends to 1 (here up to
    |log p_y| = 2^-100), and for a given p_y it is not monotone in k, which is the paper's argument
    against it.

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
    check_k(k, values=isinstance(k, Tensor) and holds_numbers(k))
    return k * _bounded(cross_entropy) ** (k - 1)


@Reweighted
def log_of_power(cross_entropy: Tensor, k: paper.Sensitivity = 1.0) -> Tensor:
    """Return the gradient of -log p_y^k, the second naive alternative of Section 3: merely k ε.

    Args:
        logits: Scores of shape (..., C).
        target: The labels, shape (...).
        k: The exponent, above 0; at 1 this is cross-entropy.

    Example:
        >>> import torch
        >>> log_of_power(torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([0]), k=2.0)
        tensor([[-0.6695,  0.4895,  0.1801]])

    """
    check_k(k, values=isinstance(k, Tensor) and holds_numbers(k))
    return k * torch.ones_like(cross_entropy)


@Reweighted
def focal(cross_entropy: Tensor, gamma: paper.Sensitivity = 2.0) -> Tensor:
    """Return the gradient of focal loss, -(1 - p_y)^γ log p_y (Lin et al., 2017).

    Args:
        logits: Scores of shape (..., C).
        target: The labels, shape (...).
        gamma: How much to down-weight well-classified examples, 0 or more; at 0 this is
            cross-entropy.

    Example:
        >>> import torch
        >>> focal(torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([0]), gamma=2.0)
        tensor([[-0.0983,  0.0719,  0.0264]])

    """
    check_parameter("gamma", gamma, 0, sys.float_info.max, "a finite number, 0 or more")
    # (1-p)^γ + γ p (1-p)^(γ-1) (-log p) as a multiple of (1-p)^γ: the ratio of -log p to 1-p tends
    # to 1 where (1-p)^(γ-1) would overflow.
    surprise = _bounded(cross_entropy)
    rest = -torch.expm1(-surprise)  # 1 - p_y
    return rest**gamma * (1 + gamma * torch.exp(-surprise) * (surprise / rest))


@Reweighted
def generalized_cross_entropy(cross_entropy: Tensor, q: paper.Sensitivity = 0.7) -> Tensor:
    """Return the gradient of (1 - p_y^q) / q (Zhang and Sabuncu, 2018), which is p_y^q ε.

    Args:
        logits: Scores of shape (..., C).
        target: The labels, shape (...).
        q: From 0, which is cross-entropy, to 1, which is the mean absolute error.

    Example:
        >>> import torch
        >>> generalized_cross_entropy(torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([0]), q=0.7)
        tensor([[-0.2517,  0.1840,  0.0677]])

    """
    check_parameter("q", q, 0, 1, "a number in [0, 1]")
    return torch.exp(-q * _bounded(cross_entropy))


def _bounded(cross_entropy: Tensor) -> Tensor:
    """Avoid 0 / 0 where p_y is 1, and infinity times 0 where the label is masked by -inf."""
    return cross_entropy.clamp(_LEAST_SURPRISE, torch.finfo(cross_entropy.dtype).max)


# Doctests are collected only from functions and classes.
__test__ = {
    rule.factor.__name__: rule.__doc__
    for rule in (power_of_log, log_of_power, focal, generalized_cross_entropy)
}
