"""Rules for noisy labels: three published ones, and one within the paper's framework.

A robust rule can give up on an example: its push falls to 0 as p_y does. Eq. 5 cannot, since its
push is (1 - p_y)^k. All of these sum to zero (Eq. 4). Parameters are numbers, or tensors with one
value per example.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from pseudograd.rules import paper
from pseudograd.rules.checks import check_labels, check_parameter
from pseudograd.rules.reweighted import Reweighted

_ITERATIONS = 20  # each one or two of this fixed-point iteration gain a digit


@Reweighted
def symmetric_cross_entropy(
    cross_entropy: Tensor,
    alpha: paper.Sensitivity = 0.1,
    beta: paper.Sensitivity = 1.0,
    log_zero: float = -4.0,
) -> Tensor:
    """Return the gradient of α CE + β RCE (Wang et al., 2019), which is (α + β |A| p_y) ε.

    The reverse cross-entropy RCE = -Σ_j p_j log q_j, with A for the logarithm of 0, is
    |A| (1 - p_y).

    Args:
        logits: Scores of shape (..., C).
        target: The labels, shape (...).
        alpha: The weight of cross-entropy, 0 or more.
        beta: The weight of reverse cross-entropy, 0 or more.
        log_zero: A; the authors' code has log 0.0001.

    Example:
        >>> symmetric_cross_entropy(torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([0]))
        tensor([[-0.9243,  0.6757,  0.2486]])

    """
    _check_weights(alpha=alpha, beta=beta)
    return alpha - log_zero * beta * torch.exp(-cross_entropy)


def nce_rce(
    logits: Tensor,
    target: Tensor,
    alpha: paper.Sensitivity = 1.0,
    beta: paper.Sensitivity = 1.0,
    log_zero: float = -4.0,
) -> Tensor:
    """Return the gradient of α NCE + β RCE (Ma et al., 2020).

    The normalized cross-entropy NCE is log p_y / Σ_j log p_j; RCE is as in
    `symmetric_cross_entropy`.

    Args:
        logits: Scores of shape (..., C).
        target: The labels, shape (...).
        alpha: The weight of NCE, 0 or more.
        beta: The weight of RCE, 0 or more.
        log_zero: The logarithm of 0 in RCE; the authors' code has log 0.0001.

    Example:
        >>> nce_rce(torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([0]))
        tensor([[-0.9928,  0.7152,  0.2776]])

    """
    check_labels(logits, target)
    _check_weights(alpha=alpha, beta=beta)
    z, y = paper.wide(logits), target.unsqueeze(-1)
    alpha, beta = paper.column("alpha", alpha, z), paper.column("beta", beta, z)
    log_p = z.log_softmax(-1)
    bias = paper.tunable(z, target)
    surprise, total = -log_p.gather(-1, y), -log_p.sum(-1, keepdim=True)
    nce = bias / total - surprise / total**2 * (z.shape[-1] * log_p.exp() - 1)
    return (alpha * nce - log_zero * beta * torch.exp(-surprise) * bias).to(logits.dtype)


def bi_tempered(
    logits: Tensor, target: Tensor, t1: paper.Sensitivity = 0.8, t2: paper.Sensitivity = 1.2
) -> Tensor:
    """Return the gradient of the bi-tempered logistic loss (Amid et al., 2019).

    With p the `tempered_softmax` and u_j = (p_j - q_j) p_j^(t2 - t1), it is u - e Σ_j u_j, where e
    is p^t2 divided by its sum.

    Args:
        logits: Scores of shape (..., C).
        target: The labels, shape (...).
        t1: The temperature of the logarithm, below 1 for a bounded loss.
        t2: The temperature of the softmax, above 1 for heavy tails.

    Example:
        >>> bi_tempered(torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([0]))
        tensor([[-0.2500,  0.1816,  0.0684]])

    """
    check_labels(logits, target)
    check_parameter("t1", t1, 0, 2, "a number in [0, 2]")
    p = tempered_softmax(paper.wide(logits), t2)
    t1, t2 = paper.column("t1", t1, p), paper.column("t2", t2, p)
    y = target.unsqueeze(-1)
    u = p ** (1 + t2 - t1)
    rest = (p.sum(-1, keepdim=True) - p.gather(-1, y)).clamp(min=0)  # 1 - p_y
    u = u.scatter(-1, y, -rest * p.gather(-1, y) ** (t2 - t1))
    escort = p**t2
    escort = escort / escort.sum(-1, keepdim=True)
    return (u - escort * u.sum(-1, keepdim=True)).to(logits.dtype)


def tempered_softmax(logits: Tensor, t: paper.Sensitivity = 1.2) -> Tensor:
    """Return the softmax with the tempered exponential, whose tails are heavy for t > 1.

    The probabilities are [1 + (1 - t) (z_j - λ)]^(1 / (1 - t)) with the λ that makes them sum to 1,
    found by the fixed point of Amid et al. (2019).

    Args:
        logits: Scores of shape (..., C).
        t: The temperature, above 1.

    Example:
        >>> tempered_softmax(torch.tensor([2.0, 1.0, 0.0]), t=1.2)
        tensor([0.6065, 0.2640, 0.1294])

    """
    check_parameter("t", t, 1 + 1e-6, 100, "a number above 1, up to 100")
    t = paper.column("t", t, logits)
    first = logits - logits.amax(-1, keepdim=True)
    scaled = first
    for _ in range(_ITERATIONS):
        scaled = first * _exp(scaled, t).sum(-1, keepdim=True) ** (1 - t)
    powers = _exp(scaled, t)
    return powers / powers.sum(-1, keepdim=True)


def _exp(x: Tensor, t: paper.Sensitivity) -> Tensor:
    """Return the tempered exponential of x ≤ 0."""
    return (1 + (1 - t) * x) ** (1 / (1 - t))


def redescending(
    logits: Tensor, target: Tensor, q: paper.Sensitivity = 0.7, k: paper.Sensitivity = 0.5
) -> Tensor:
    """Return p_y^q times the paper's rule, which gives up on examples that it cannot learn.

    The push -f_y = p_y^q (1 - p_y)^k is largest at p_y = q / (q + k), and 0 where p_y is 0 or 1. At
    k = 1 this is `generalized_cross_entropy`, at q = 0 it is `tunable`.

    Args:
        logits: Scores of shape (..., C).
        target: The labels, shape (...).
        q: How readily the rule gives up on an example, from 0 (never) to 1.
        k: The sensitivity to large errors, above 0, as for `tunable`.

    Example:
        >>> z, y = torch.tensor([[2.0, 0.0, 0.0], [-9.0, 0.0, 0.0]]), torch.tensor([0, 0])
        >>> redescending(z, y)  # the second label is probably wrong
        tensor([[-0.3903,  0.1951,  0.1951],
                [-0.0011,  0.0006,  0.0006]])

    """
    check_labels(logits, target)
    check_parameter("q", q, 0, 1, "a number in [0, 1]")
    z = paper.in_working_precision(logits)
    sensitivity = paper.per_row(k, z)
    top, margin = paper.top_and_margin(z, target)
    kept = torch.exp(-paper.column("q", q, z) * paper.cross_entropy(margin))
    scale = kept * paper.strength(margin, sensitivity)
    return paper.push(z, target, sensitivity, top, scale).to(logits.dtype)


def _check_weights(**weights: paper.Sensitivity) -> None:
    for name, weight in weights.items():
        check_parameter(name, weight, 0, sys.float_info.max, "a finite number, 0 or more")


# Doctests are collected only from functions and classes.
__test__ = {"symmetric_cross_entropy": symmetric_cross_entropy.__doc__}
