"""The paper's rule (Eq. 5), and its extension to soft targets, in log space.

With ``L`` the log-sum-exp of the logits and ``L'`` the same over the classes other than the label
y, Eq. 5 is exactly

    f_y = -A,   f_j = A · S_j  (j ≠ y),   A = (1 - p_y)^k = exp(k (L' - L)),

where ``S`` is the softmax of ``k · z`` over the classes other than y. Written so, nothing
underflows before the last rounding; taken literally, the formula is lost beyond a gap of about 20
between the logits.

Equations are cited as 2 to 5 for eqCE, eqF, eqConstraint and eqChoice, their labels in the paper's
LaTeX source (which, set by itself, counts from 1).
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from pseudograd.rules.checks import check_number

Sensitivity: TypeAlias = float | Tensor
# Beyond these, where k has long ceased to matter, products with it would leave float32's range.
LEAST_K, GREATEST_K = 2.0**-100, 2.0**100

# A logarithm of so little is one of 1 that has been rounded.
ROUNDING = 1e-9
# With more, the rounding of the sum within `softmax` shows: shares are divided by their own sum.
_MANY_CLASSES = 1024


def tunable(logits: Tensor, target: Tensor, k: Sensitivity = 1.0) -> Tensor:
    """Give the pseudo-gradient of Eq. 5 at the logits, one row an example.

    Args:
        logits: Scores of shape (..., C).
        target: The labels, shape (...), each in [0, C).
        k: The sensitivity to large errors, above 0: a number, or one value an example, shape (...).

    Returns:
        A tensor of the shape and dtype of ``logits``; each row sums to zero (Eq. 4). Half types are
        computed in float32 and rounded once.

    Example:
        >>> z, y = torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([0])
        >>> tunable(z, y, k=1.0)  # cross-entropy's gradient, softmax(z) - onehot(y)
        tensor([[-0.3348,  0.2447,  0.0900]])
        >>> tunable(z, y, k=0.5)  # a milder slope: the same example pulls harder
        tensor([[-0.5786,  0.3601,  0.2184]])

    """
    check_sensitivity(k, values=False)
    z = in_working_precision(logits)
    sensitivity = per_row(k, z)
    top, margin = top_and_margin(z, target)
    return push(z, target, sensitivity, top, strength(margin, sensitivity)).to(logits.dtype)


def soft_tunable(logits: Tensor, target: Tensor, k: Sensitivity = 1.0) -> Tensor:
    """Give the pseudo-gradient for targets that are probabilities of the classes.

    With ε = p - q and S = Σ_{ε_j > 0} ε_j, each side of zero shares the strength S^k among its
    classes in proportion to |ε_j|^k:

        f_j = sign(ε_j) · S^k · |ε_j|^k / Σ_{i: sign ε_i = sign ε_j} |ε_i|^k

    which is Eq. 5 where q is one-hot, and ε itself at k = 1. A target with sum W ≠ 1 (class weights
    times probabilities) gives W · f(p - q / W), as for PyTorch's weighted cross-entropy.

    Args:
        logits: Scores of shape (..., C).
        target: Class probabilities (or weighted ones), shape (..., C).
        k: The sensitivity to large errors, above 0: a number, or one value an example, shape (...).

    Returns:
        A tensor of the shape and dtype of ``logits``; each row sums to zero.

    Example:
        >>> z, q = torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([[0.8, 0.1, 0.1]])
        >>> soft_tunable(z, q, k=1.0)  # softmax(z) - q
        tensor([[-0.1348,  0.1447, -0.0100]])
        >>> soft_tunable(z, q, k=0.5)
        tensor([[-0.2991,  0.3804, -0.0813]])

    """
    check_sensitivity(k, values=False)
    z = in_working_precision(logits)
    return soft_push(z, target.to(z.dtype), per_row(k, z)).to(logits.dtype)


def check_sensitivity(k: Sensitivity, values: bool) -> None:
    """Refuse a k that is not positive; of a tensor only if its ``values`` can be looked at."""
    if not isinstance(k, Tensor):
        wanted = "a finite number above 0 (2^-100 to 2^100)"
        check_number("k", k, LEAST_K, GREATEST_K, wanted)
    elif values and k.numel():
        least, greatest = k.aminmax()  # both are NaN if any k is
        if not LEAST_K <= least.item() <= greatest.item() <= GREATEST_K:
            raise ValueError("k must be finite and above 0 (2^-100 to 2^100) for every example")


def in_working_precision(logits: Tensor) -> Tensor:
    """Half types in float32, all others as they are."""
    return logits.to(working_dtype(logits))


def working_dtype(logits: Tensor) -> torch.dtype:
    """The dtype that the rule is computed in."""
    return torch.float32 if logits.dtype in (torch.float16, torch.bfloat16) else logits.dtype


def per_row(k: Sensitivity, z: Tensor) -> Sensitivity:
    """``k`` as it multiplies rows: a number, or a column in the precision of ``z``."""
    return k.to(z).unsqueeze(-1) if isinstance(k, Tensor) and k.dim() > 0 else k


def top_and_margin(z: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The largest logit z_j with j ≠ y, and the margin z_y - L', both as columns.

    All of cross-entropy follows from the margin: its value is softplus(-margin), and 1 - p_y is
    exp(-softplus(margin)), neither with any cancellation. The margin is the difference of two
    large numbers, and k multiplies its rounding, so it is in float64.
    """
    y = target.unsqueeze(-1)
    # The lowest finite number, not -inf: with no other class left (C = 1, or all others masked by
    # -inf) the difference to the top is then 0, not -inf + inf.
    others, z_y = z.scatter(-1, y, torch.finfo(z.dtype).min), z.gather(-1, y)
    top = others.amax(-1, keepdim=True)
    powers = (others - top).exp().scatter(-1, y, 0)
    total = powers.sum(-1, keepdim=True, dtype=wide_dtype(z))
    return top, margin_of(wide(z_y), wide(top), total)


def margin_of(z_y: Tensor, top: Tensor, total: Tensor) -> Tensor:
    """z_y - top - log(total), and NaN where the logits say nothing, as in PyTorch.

    That is where z_y is +inf, or where no logit is above -inf. With no other class the total is 0.
    """
    unknown = (z_y == torch.inf) | ((z_y == -torch.inf) & (total == 0))
    # With no other class the top is the lowest number, and z_y may be that number itself.
    z_y = torch.where((total == 0) & z_y.isfinite(), 0, z_y)
    return torch.where(unknown, torch.nan, z_y - top - total.clamp(min=1).log())


def wide(tensor: Tensor) -> Tensor:
    """In float64, where the device has it."""
    return tensor.to(wide_dtype(tensor))


def wide_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype of what must not be rounded before the end."""
    return tensor.dtype if tensor.device.type == "mps" else torch.float64


def strength(margin: Tensor, k: Sensitivity) -> Tensor:
    """A = (1 - p_y)^k = |f_y|, from the margin."""
    return (k * log_strength(margin)).exp()


def log_strength(margin: Tensor) -> Tensor:
    """log(1 - p_y), from the margin."""
    return F.logsigmoid(-margin)


def cross_entropy(margin: Tensor) -> Tensor:
    """-log p_y, from the margin."""
    return -F.logsigmoid(margin)


def push(z: Tensor, target: Tensor, k: Sensitivity, top: Tensor, scale: Tensor) -> Tensor:
    """``scale`` times (S off the label, -1 on it): the shape of Eq. 5 with its strength."""
    y = target.unsqueeze(-1)
    # The top is subtracted before k multiplies, so that large logits keep their differences.
    share = (k * (z - top)).scatter(-1, y, torch.finfo(z.dtype).min).softmax(-1)
    scale = scale.to(z.dtype)
    if z.shape[-1] > _MANY_CLASSES:
        share = share / share.sum(-1, keepdim=True, dtype=wide_dtype(z)).to(z.dtype)
    return (scale * share).scatter(-1, y, -scale)


class Classes:
    """Reductions over the classes of each row; `loss.parallel` has those of split classes."""

    def largest(self, x: Tensor) -> Tensor:
        """Give the largest of each row."""
        return x.amax(-1, keepdim=True)

    def total(self, x: Tensor) -> Tensor:
        """Give the sum of each row."""
        return x.sum(-1, keepdim=True)

    def log_softmax(self, x: Tensor) -> Tensor:
        """Give x - log Σ exp(x)."""
        return F.log_softmax(x, -1)


ALL_CLASSES = Classes()


def soft_push(z: Tensor, q: Tensor, k: Sensitivity, classes: Classes = ALL_CLASSES) -> Tensor:
    """The soft rule, strength and shape together; in float64, as p - q cancels where they agree."""
    z, q = wide(z), wide(q)
    total = classes.total(q)
    q = torch.where(total == 0, 0, q / total)
    log_p = classes.log_softmax(z)
    bias = log_p.exp() - q
    # Logarithms reach where the bias itself has been rounded away: off the target it is p, and on
    # the one class of a one-hot target it has its side of zero to itself.
    # NaN is on no side of zero, and has to be seen.
    unknown = bias.isnan()
    off, sole = q == 0, (q == 1) & ~unknown
    log_bias = torch.where(off, log_p, torch.where(sole, 0, bias.abs().log()))
    above, below = (bias > 0) | off | unknown, (bias < 0) | sole
    # p = q up to rounding can leave one side empty; no side may then push alone (Eq. 4).
    balanced = classes.largest(below.to(z.dtype)) > 0
    above_top, above_share = _share(log_bias, above, k, classes)
    _, below_share = _share(log_bias, below, k, classes)
    sizes = torch.where(above, log_bias - above_top, -torch.inf).exp()
    log_strength = above_top + classes.total(sizes).log()
    # What rounding has put above 1, a large k would make infinite.
    log_strength = torch.where(log_strength < ROUNDING, log_strength.clamp(max=0), log_strength)
    f = total * balanced * (k * log_strength).exp() * (above_share - below_share)
    return torch.where(total == 0, 0, f)  # without a target, whatever the logits are


def _share(
    log_bias: Tensor, side: Tensor, k: Sensitivity, classes: Classes
) -> tuple[Tensor, Tensor]:
    """The largest log|ε| on one side of zero, and softmax of k · log|ε| there; zero elsewhere."""
    lowest = torch.finfo(log_bias.dtype).min
    log_bias = torch.where(side, log_bias, lowest)
    top = classes.largest(log_bias).clamp(min=lowest)
    return top, classes.log_softmax((log_bias - top) * k).exp() * side
