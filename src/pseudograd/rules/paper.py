"""The paper's rule (Eq. 5) and its extension to soft targets, in log space.

With ``L`` the log-sum-exp of the logits and ``L'`` the same over the classes other than the label
y, Eq. 5 is exactly

    f_y = -A,   f_j = A · S_j  (j ≠ y),   A = (1 - p_y)^k = exp(k (L' - L)),

where ``S`` is the softmax of ``k · z`` over the classes other than y. In this form nothing
underflows before the final rounding. The printed formula loses all digits once the logits are about
20 apart.

The same formula is in `loss/cpp` (C++), `pseudograd.loss.triton.eq5` (Triton) and `pseudograd.jax`.

Equations 2 to 5 are eqCE, eqF, eqConstraint and eqChoice in the paper's LaTeX source.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from pseudograd.rules.checks import (
    GREATEST_K,
    LEAST_K,
    check_k,
    check_labels,
    check_logits,
    holds_numbers,
)

Sensitivity: TypeAlias = float | Tensor

# A positive logarithm below this counts as log 1: it is a rounding error.
ROUNDING = 1e-9
# With more classes, rounding errors of `softmax`'s own sum show, so we divide by the sum again.
_MANY_CLASSES = 1024


def tunable(logits: Tensor, target: Tensor, k: Sensitivity = 1.0) -> Tensor:
    """Return the pseudo-gradient of Eq. 5 at the logits.

    Args:
        logits: Scores of shape (..., C).
        target: The labels, shape (...), each in [0, C).
        k: The sensitivity to large errors, above 0: a number, or one per example, shape (...).

    Returns:
        A tensor like ``logits`` whose rows sum to zero (Eq. 4). Half types are computed in float32
        and rounded once.

    Example:
        >>> z, y = torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([0])
        >>> tunable(z, y, k=1.0)  # cross-entropy's gradient, softmax(z) - onehot(y)
        tensor([[-0.3348,  0.2447,  0.0900]])
        >>> tunable(z, y, k=0.5)  # the same example gets a larger gradient
        tensor([[-0.5786,  0.3601,  0.2184]])

    """
    check_labels(logits, target)
    z = in_working_precision(logits)
    sensitivity = per_row(k, z)
    top, margin = top_and_margin(z, target)
    return push(z, target, sensitivity, top, strength(margin, sensitivity)).to(logits.dtype)


def soft_tunable(logits: Tensor, target: Tensor, k: Sensitivity = 1.0) -> Tensor:
    """Return the pseudo-gradient for targets that are class probabilities.

    With ε = p - q and S = Σ_{ε_j > 0} ε_j, each side of zero shares the strength S^k among its
    classes in proportion to |ε_j|^k:

        f_j = sign(ε_j) · S^k · |ε_j|^k / Σ_{i: sign ε_i = sign ε_j} |ε_i|^k

    This is Eq. 5 for a one-hot q, and ε itself at k = 1. A target with sum W ≠ 1 (class weights
    times probabilities) gives W · f(p - q / W), as PyTorch's weighted cross-entropy does.

    Args:
        logits: Scores of shape (..., C).
        target: Class probabilities (or weighted ones), shape (..., C).
        k: The sensitivity to large errors, above 0: a number, or one per example, shape (...).

    Returns:
        A tensor like ``logits`` whose rows sum to zero.

    Example:
        >>> z, q = torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([[0.8, 0.1, 0.1]])
        >>> soft_tunable(z, q, k=1.0)  # softmax(z) - q
        tensor([[-0.1348,  0.1447, -0.0100]])
        >>> soft_tunable(z, q, k=0.5)
        tensor([[-0.2991,  0.3804, -0.0813]])

    """
    check_logits(logits, target)
    if target.shape != logits.shape:
        raise ValueError(
            f"target must hold class probabilities of the shape of the logits, "
            f"{tuple(logits.shape)}, not {tuple(target.shape)}"
        )
    z = in_working_precision(logits)
    return soft_push(z, target.to(z.dtype), per_row(k, z)).to(logits.dtype)


def in_working_precision(logits: Tensor) -> Tensor:
    """Return half types as float32, other dtypes unchanged."""
    return logits.to(working_dtype(logits))


def working_dtype(logits: Tensor) -> torch.dtype:
    """Return the dtype the rule is computed in."""
    return torch.float32 if logits.dtype in (torch.float16, torch.bfloat16) else logits.dtype


def per_row(k: Sensitivity, z: Tensor) -> Sensitivity:
    """Return ``k`` as a number, or as a column beside the rows of ``z``; raise if it is invalid."""
    check_k(k, values=isinstance(k, Tensor) and holds_numbers(k))
    k = column("k", k, z)
    if not isinstance(k, Tensor):
        return k
    # On a device an invalid k becomes NaN, because raising an error would need a sync.
    return torch.where((k >= LEAST_K) & (k <= GREATEST_K), k, torch.nan)


def column(name: str, value: Sensitivity, z: Tensor) -> Sensitivity:
    """Return a number unchanged, and a tensor with one value for each row of ``z`` as a column."""
    if not isinstance(value, Tensor) or value.dim() == 0:
        return value
    if value.shape != z.shape[:-1]:
        raise ValueError(
            f"{name} must be a number or have one value for each row of the logits, shape "
            f"{tuple(z.shape[:-1])}, not {tuple(value.shape)}"
        )
    return value.to(z).unsqueeze(-1)


def top_and_margin(z: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest logit z_j with j ≠ y, and the margin z_y - L', both as columns.

    Everything follows from the margin: cross-entropy is softplus(-margin) and 1 - p_y is
    exp(-softplus(margin)), neither with any cancellation. The margin itself is a difference of
    large numbers, and k multiplies its rounding error, so it is computed in float64.
    """
    y = target.unsqueeze(-1)
    # The lowest finite number, not -inf: if no other class is left (C = 1, or all others are -inf),
    # the difference to the top is then 0 and not -inf + inf.
    others, z_y = z.scatter(-1, y, torch.finfo(z.dtype).min), z.gather(-1, y)
    top = others.amax(-1, keepdim=True)
    powers = (others - top).exp().scatter(-1, y, 0)
    total = powers.sum(-1, keepdim=True, dtype=wide_dtype(z))
    return top, margin_of(wide(z_y), wide(top), total)


def margin_of(z_y: Tensor, top: Tensor, total: Tensor) -> Tensor:
    """Return z_y - top - log(total), or NaN where cross-entropy is undefined, as in PyTorch.

    It is undefined if z_y is +inf or all logits are -inf. Without other classes the total is 0.
    """
    unknown = (z_y == torch.inf) | ((z_y == -torch.inf) & (total == 0))
    # Without other classes the top is the lowest finite number, and z_y may be that number too.
    z_y = torch.where((total == 0) & z_y.isfinite(), 0, z_y)
    return torch.where(unknown, torch.nan, z_y - top - total.clamp(min=1).log())


def wide(tensor: Tensor) -> Tensor:
    """Return a tensor in float64, if its device supports that."""
    return tensor.to(wide_dtype(tensor))


def wide_dtype(tensor: Tensor) -> torch.dtype:
    """Return the widest dtype of a tensor's device: float64, but not on MPS."""
    return tensor.dtype if tensor.device.type == "mps" else torch.float64


def strength(margin: Tensor, k: Sensitivity) -> Tensor:
    """Return A = (1 - p_y)^k = |f_y| from the margin."""
    return (k * log_strength(margin)).exp()


def log_strength(margin: Tensor) -> Tensor:
    """Return log(1 - p_y) from the margin."""
    return F.logsigmoid(-margin)


def cross_entropy(margin: Tensor) -> Tensor:
    """Return -log p_y from the margin."""
    return -F.logsigmoid(margin)


def push(z: Tensor, target: Tensor, k: Sensitivity, top: Tensor, scale: Tensor) -> Tensor:
    """Return ``scale`` times (S off the label, -1 on it): Eq. 5 if ``scale`` is A."""
    y = target.unsqueeze(-1)
    # Subtract the top before multiplying by k, so that large logits keep their differences.
    share = (k * (z - top)).scatter(-1, y, torch.finfo(z.dtype).min).softmax(-1)
    scale = scale.to(z.dtype)
    if z.shape[-1] > _MANY_CLASSES:
        share = share / share.sum(-1, keepdim=True, dtype=wide_dtype(z)).to(z.dtype)
    return (scale * share).scatter(-1, y, -scale)


class Classes:
    """Reductions over the classes of each row; `loss.parallel` has those for split classes."""

    def largest(self, x: Tensor) -> Tensor:
        """Return the largest value of each row."""
        return x.amax(-1, keepdim=True)

    def total(self, x: Tensor) -> Tensor:
        """Return the sum of each row."""
        return x.sum(-1, keepdim=True)

    def log_softmax(self, x: Tensor) -> Tensor:
        """Return x - log Σ exp(x)."""
        return F.log_softmax(x, -1)


ALL_CLASSES = Classes()


def soft_push(z: Tensor, q: Tensor, k: Sensitivity, classes: Classes = ALL_CLASSES) -> Tensor:
    """Return the rule for soft targets, in float64 because p - q cancels where they agree."""
    z, q = wide(z), wide(q)
    total = classes.total(q)
    q = torch.where(total == 0, 0, q / total)
    log_p = classes.log_softmax(z)
    bias = log_p.exp() - q
    # Logarithms survive where the bias itself is rounded away: off the target the bias is p, and
    # the one class of a one-hot target has its side of zero to itself. NaN must stay visible.
    unknown = bias.isnan()
    off, sole = q == 0, (q == 1) & ~unknown
    log_bias = torch.where(off, log_p, torch.where(sole, 0, bias.abs().log()))
    above, below = (bias > 0) | off | unknown, (bias < 0) | sole
    # If rounding leaves one side empty, the other must not push alone (Eq. 4).
    balanced = classes.largest(below.to(z.dtype)) > 0
    above_top, above_share = _share(log_bias, above, k, classes)
    _, below_share = _share(log_bias, below, k, classes)
    sizes = torch.where(above, log_bias - above_top, -torch.inf).exp()
    log_strength = above_top + classes.total(sizes).log()
    # Rounding can put the strength above 1, which a large k would make infinite.
    log_strength = torch.where(log_strength < ROUNDING, log_strength.clamp(max=0), log_strength)
    f = total * balanced * (k * log_strength).exp() * (above_share - below_share)
    return torch.where(total == 0, 0, f)  # no target, no push, whatever the logits are


def _share(
    log_bias: Tensor, side: Tensor, k: Sensitivity, classes: Classes
) -> tuple[Tensor, Tensor]:
    """Return the largest log|ε| on one side of zero, and softmax(k · log|ε|) there, 0 elsewhere."""
    lowest = torch.finfo(log_bias.dtype).min
    log_bias = torch.where(side, log_bias, lowest)
    top = classes.largest(log_bias).clamp(min=lowest)
    return top, classes.log_softmax((log_bias - top) * k).exp() * side


def binary_push(z: Tensor, positive: Tensor, negative: Tensor, k: Sensitivity) -> Tensor:
    """Return the rule for two classes with the logits (0, z), at z and in float64.

    ``positive`` and ``negative`` are the masses of the target on the two classes. With their sum W
    and ε = σ(z) - positive / W, both classes share |ε|, and `soft_push` becomes
    W · sign(ε) · |ε|^k.
    """
    z, positive, negative = wide(z), wide(positive), wide(negative)
    total = positive + negative
    q, rest_of_q = (torch.where(total == 0, 0, mass / total) for mass in (positive, negative))
    # ε without the cancellation in 1 - q or 1 - p.
    bias = rest_of_q * torch.sigmoid(z) - q * torch.sigmoid(-z)
    up = ((bias > 0) | (q == 0)) & (rest_of_q > 0)
    away = torch.where(up, z, -z)  # |ε| grows with it, to 1 - (the target's mass on that side)
    missing = torch.sigmoid(-away) + torch.where(up, q, rest_of_q)  # 1 - |ε|
    log_bias = torch.where(missing < 0.5, torch.log1p(-missing), bias.abs().log())
    log_bias = torch.where((q == 0) | (rest_of_q == 0), F.logsigmoid(away), log_bias)
    f = total * torch.where(up, 1, -1) * (k * log_bias).exp()
    return torch.where(total == 0, 0, f)  # no target, no push, whatever the logits are
