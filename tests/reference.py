"""The reference for all tests: the paper's printed formulas in 50-digit arithmetic.

Slow and plain on purpose. Exponents of mpmath numbers are unbounded, so nothing underflows here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import mpmath as mp
import torch
from torch import Tensor

DIGITS = 50
Numbers = Sequence[float]


def softmax(logits: Numbers) -> list[mp.mpf]:
    top = mp.mpf(max(logits))
    powers = [mp.exp(mp.mpf(z) - top) for z in logits]
    total = mp.fsum(powers)
    return [power / total for power in powers]


def rule(logits: Numbers, y: int, k: float) -> list[float]:
    """Eq. 5, literally: -|ε_y|^k on the label, |ε_y|^k ε_j^k / Σ_{i≠y} ε_i^k elsewhere."""
    with mp.workdps(DIGITS):
        bias, exponent = softmax(logits), mp.mpf(k)
        # |ε_y| is 1 - p_y; 50 digits suffice if it is written as the sum of the others.
        size = mp.fsum(p for j, p in enumerate(bias) if j != y) ** exponent
        if size == 0:  # no other class has any probability
            return [0.0] * len(logits)
        power = [p**exponent for p in bias]
        normalizer = mp.fsum(p for j, p in enumerate(power) if j != y)
        return [float(-size if j == y else size / normalizer * p) for j, p in enumerate(power)]


def reweighted(logits: Numbers, y: int, factor: Callable[[mp.mpf], mp.mpf]) -> list[float]:
    """The bias ε times a factor of -log p_y."""
    with mp.workdps(DIGITS):
        by = factor(_surprise(logits, y))
        return [float(by * mp.mpf(e)) for e in rule(logits, y, 1.0)]


def soft_rule(logits: Numbers, target: Numbers, k: float) -> list[float]:
    """The rule for a target that sums to W: W times f at the bias ε = p - target / W.

    f_j = sign(ε_j) S^k |ε_j|^k / Σ |ε_i|^k over the i with the sign of ε_j, S the sum of all ε > 0.
    """
    finite = [z for z in logits if z > -math.inf]
    # p - q cancels: add the digits that the gap may cost.
    with mp.workdps(DIGITS + int((max(finite) - min(finite)) / 2)):
        total = mp.fsum(map(mp.mpf, target))
        if total == 0:
            return [0.0] * len(logits)
        bias = [p - mp.mpf(q) / total for p, q in zip(softmax(logits), target, strict=True)]
        # Treat what cancellation leaves of 0 as 0: no test input has a bias this small.
        bias = [mp.mpf(0) if abs(e) < mp.mpf(10) ** (5 - mp.mp.dps) else e for e in bias]
        exponent = mp.mpf(k)
        factor = {sign: _factor(bias, sign, exponent) for sign in (-1, 0, 1)}
        return [float(total * factor[int(mp.sign(e))] * abs(e) ** exponent) for e in bias]


def _factor(bias: list[mp.mpf], sign: int, k: mp.mpf) -> mp.mpf:
    """Return what |ε_j|^k is multiplied by for an ε_j of this sign."""
    same = [abs(e) for e in bias if mp.sign(e) == sign]
    if sign == 0 or not same:
        return mp.mpf(0)
    return sign * mp.fsum(same) ** k / mp.fsum(e**k for e in same)


def cross_entropy(logits: Numbers, target: Numbers) -> float:
    """-Σ q_j log p_j, where 0 log 0 is 0; q holds the class weights already."""
    with mp.workdps(DIGITS):
        wanted = [j for j, q in enumerate(target) if q != 0]
        if any(logits[j] == -math.inf for j in wanted):
            return math.inf
        return float(mp.fsum(mp.mpf(target[j]) * _surprise(logits, j) for j in wanted))


def _surprise(logits: Numbers, j: int) -> mp.mpf:
    """-log p_j as log(1 + Σ_{i≠j} exp(z_i - z_j)), exact to 50 digits for p_j near 1 too."""
    own = mp.mpf(logits[j])
    return mp.log1p(mp.fsum(mp.exp(mp.mpf(z) - own) for i, z in enumerate(logits) if i != j))


def binary(z: float, target: float, k: float, pos_weight: float = 1.0) -> tuple[float, float]:
    """Binary cross-entropy, and the rule of two classes at the logit z (the other one is 0)."""
    with mp.workdps(DIGITS):
        yes, no = mp.mpf(pos_weight) * mp.mpf(target), 1 - mp.mpf(target)
        value = 0
        for mass, own in ((yes, z), (no, -z)):
            value += mass * mp.log1p(mp.exp(-mp.mpf(own))) if mass else 0
        total = yes + no
        if total == 0:
            return 0.0, 0.0
        # W ε = W p - yes = no p - yes (1 - p); this form does not cancel for labels.
        bias = (no / (1 + mp.exp(-mp.mpf(z))) - yes / (1 + mp.exp(mp.mpf(z)))) / total
        return float(value), float(total * mp.sign(bias) * abs(bias) ** mp.mpf(k))


def loss(
    input: Tensor,
    target: Tensor,
    k: float | Tensor = 1.0,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    upstream: Tensor | None = None,
    sample_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The loss, and its pseudo-gradient for an ``upstream`` gradient of ones; both in float64."""
    class_dim = min(input.dim() - 1, 1)
    z = input.detach().double().movedim(class_dim, -1)
    classes, rows = z.shape[-1], z.reshape(-1, z.shape[-1]).tolist()
    w = [1.0] * classes if weight is None else weight.double().tolist()
    hard = not target.is_floating_point()
    labels = target.reshape(-1).tolist() if hard else []
    if hard:
        q = [[float(j == y) for j in range(classes)] for y in labels]
    else:
        q = target.double().movedim(class_dim, -1).reshape(-1, classes).tolist()
    q = [[(1 - label_smoothing) * p + label_smoothing / classes for p in row] for row in q]
    sensitivity = k.double().reshape(-1).tolist() if isinstance(k, Tensor) else [float(k)]
    sensitivity = sensitivity * len(rows) if len(sensitivity) == 1 else sensitivity
    s = [1.0] * len(rows) if sample_weight is None else sample_weight.double().flatten().tolist()

    values, gradients, divisor = [], [], 0.0
    for i, row in enumerate(rows):
        if hard and labels[i] == ignore_index:
            values.append(0.0)
            gradients.append([0.0] * classes)
            continue
        weighted = [a * b for a, b in zip(q[i], w, strict=True)]
        divisor += s[i] * (w[labels[i]] if hard else 1.0)
        values.append(s[i] * cross_entropy(row, weighted))
        if hard and label_smoothing == 0:
            f = [w[labels[i]] * part for part in rule(row, labels[i], sensitivity[i])]
        else:
            f = soft_rule(row, weighted, sensitivity[i])
        gradients.append([s[i] * part for part in f])

    value = torch.tensor(values, dtype=torch.float64)
    gradient = torch.tensor(gradients, dtype=torch.float64).reshape(len(rows), classes)
    if reduction == "none":
        value = value.reshape(z.shape[:-1])
    else:
        scale = 1.0 if reduction == "sum" else 1 / divisor if divisor else math.nan
        value = value.sum() * scale
        gradient = gradient * (scale if divisor else 0.0)
    if upstream is not None:
        flat = upstream.detach().double().reshape(-1, 1)
        gradient = gradient * flat
    return value, gradient.reshape(z.shape).movedim(-1, class_dim)
