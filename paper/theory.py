"""The toy example on an infinite sample: the supplement's analysis as code.

The input x is uniform on [-1, 1]; its class is +1 on [0, α] and -1 elsewhere. Only the difference
of the two logits matters, u = w x + b, with w = w₊ - w₋ and b = b₊ - b₋: the network predicts +1
where u > 0, which for w > 0 is beyond the threshold -b / w. With the class as a sign, s = ±1, an
example has the margin s u, and Eq. 5 is f = (-A, A) with A = σ(-s u)^k. So the
pseudo-gradient of Eq. 3 is

    g_w = -E[s A x],   g_b = -E[s A]

for the parameters of class +1, and its negative for those of class -1.

**A fixed point exists for every k > 0, and there is only one.** With two classes A depends on the
margin alone, so g is the gradient of a cost after all: E[ℓ(s u)], where ℓ' = -A. (Lemma 1 needs
three classes.) ℓ is convex, since A falls with the margin; it is bounded below, since A decays like
exp(-k margin); and it grows without bound for wrong answers. No threshold classifies everything
correctly, so the cost grows in all directions and its minimum is at finite (w, b), for small k too.
As k falls, w grows like 1 / k and the threshold settles: the distance over which correct examples
still pull is 1 / (k w), which converges. For α = 0.95 the limits are k w = 6.40 and 0.0261.

**The threshold is not 0 for any k.** At b = 0 the two halves of the line cancel except for the hard
examples of (α, 1], which leaves

    g_b(w, 0) = ½ ∫_α^1 (σ(w x)^k + σ(-w x)^k) dx > 0   for every w and every k > 0.

For k = 1 this is (1 - α) / 2 for every w. The supplement's proof multiplies its equation by w
and is left with w = 0, which it then excludes; the derivative does not vanish there either.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import log_expit

# The rule of each panel is exact for polynomials of degree 63, and panels are octaves at most.
_POINTS, _WEIGHTS = np.polynomial.legendre.leggauss(32)


@dataclass(frozen=True)
class FixedPoint:
    """Where descent along the pseudo-gradient comes to rest on an infinite sample.

    Attributes:
        k: The sensitivity to large errors.
        alpha: The end of class +1's interval.
        weight: w = w₊ - w₋.
        bias: b = b₊ - b₋.
        threshold: -b / w.
        error_pct: The share of examples on the wrong side of the threshold, in percent.
        cross_entropy: The expected cross-entropy.

    """

    k: float
    alpha: float
    weight: float
    bias: float
    threshold: float
    error_pct: float
    cross_entropy: float


def pseudo_gradient(w: float, b: float, k: float, alpha: float = 0.95) -> tuple[float, float]:
    """Return the expected pseudo-gradient (g_w, g_b) of class +1's parameters; class -1's is -g.

    >>> g_w, g_b = pseudo_gradient(0.0, 0.0, k=1.0)
    >>> round(g_w, 6), round(g_b, 6)  # -α² / 4, (1 - α) / 2
    (-0.225625, 0.025)
    """
    g_w, g_b, log_scale = _balance(w, b, k, alpha)
    return g_w * math.exp(log_scale), g_b * math.exp(log_scale)


@cache
def fixed_point(k: float, alpha: float = 0.95) -> FixedPoint:
    """Return the one (w, b) at which the expected pseudo-gradient is zero.

    Convexity makes two nested bisections safe: g_b rises with b, and g_w, at the b that makes
    g_b = 0, rises with w.

    >>> point = fixed_point(k=1.0)
    >>> round(point.weight, 3), round(point.threshold, 4), round(point.error_pct, 2)
    (5.809, 0.0503, 5.02)
    """

    def bias(w: float) -> float:
        # All of x is on one side at b = ±reach, and by enough for the larger class to lose on the
        # left: there the pulls compare like α exp(k (reach - |w|)) and 2 - α.
        reach = abs(w) + math.log((2 - alpha) / alpha) / k + 1
        return float(brentq(lambda b: _balance(w, b, k, alpha)[1], -reach, reach, xtol=1e-14 / k))

    def profile(w: float) -> float:
        return _balance(w, bias(w), k, alpha)[0]

    high = 1 / k
    while profile(high) < 0:
        high *= 2
    w = float(brentq(profile, 0.0, high, xtol=1e-14 / k))
    b = bias(w)
    return FixedPoint(
        k=k,
        alpha=alpha,
        weight=w,
        bias=b,
        threshold=-b / w,
        error_pct=error_pct(-b / w, alpha),
        cross_entropy=cross_entropy(w, b, alpha),
    )


def bias_pull(w: float, k: float, alpha: float = 0.95) -> float:
    """Return g_b at b = 0 by the proof's cancellation: only the hard examples of (α, 1] are left.

    It is ½ ∫_α^1 (σ(w x)^k + σ(-w x)^k) dx, above 0 for every w: b = 0 is never at rest. At k = 1
    it is the derivative of the expected cross-entropy with respect to the bias.

    >>> [round(bias_pull(w, k=1.0), 12) for w in (0.0, 1.0, 50.0)]  # (1 - α) / 2
    [0.025, 0.025, 0.025]
    """
    x, dx = _panels(np.array([alpha, 1.0]))
    integrand = np.exp(k * log_expit(w * x)) + np.exp(k * log_expit(-w * x))
    return float(integrand @ dx) / 2


def cross_entropy(w: float, b: float, alpha: float = 0.95) -> float:
    """Return the expected cross-entropy -E[log σ(s u)], the supplement's CE(w, b), in nats."""
    x, dx = _panels(_edges(w, b, alpha))
    return -float(log_expit(_sign(x, alpha) * (w * x + b)) @ dx) / 2


def error_pct(threshold: float, alpha: float = 0.95) -> float:
    """Return the share of examples that "+1 beyond the threshold" gets wrong, in percent.

    >>> [round(error_pct(t), 3) for t in (-1.0, 0.0, 0.05, 1.0)]  # least at 0: 50 (1 - α)
    [52.5, 2.5, 5.0, 47.5]
    """
    missed = min(max(threshold, 0.0), alpha)
    false_low = min(max(-threshold, 0.0), 1.0)
    false_high = 1.0 - min(max(threshold, alpha), 1.0)
    return 50 * (missed + false_low + false_high)


def _balance(w: float, b: float, k: float, alpha: float) -> tuple[float, float, float]:
    """g_w and g_b divided by the largest A, and log A: signs survive for any k."""
    x, dx = _panels(_edges(w, b, alpha))
    s = _sign(x, alpha)
    log_strength = k * log_expit(-s * (w * x + b))
    log_scale = float(log_strength.max())
    pull = s * np.exp(log_strength - log_scale) * dx / 2
    return -float(pull @ x), -float(pull.sum()), log_scale


def _edges(w: float, b: float, alpha: float) -> NDArray[np.float64]:
    """Edges of the panels: where the class changes, and octaves of distance from the threshold."""
    centre = min(max(-b / w, -1.0), 1.0) if w else 0.0
    # From a quarter of the transition's width up to the whole line.
    octaves = 2.0 ** np.arange(-2, 2 + max(0, math.frexp(w)[1])) / max(abs(w), 1.0)
    edges = np.concatenate([[-1, 0, alpha, 1, centre], centre - octaves, centre + octaves])
    return np.unique(edges.clip(-1, 1))


def _panels(edges: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Points and weights of the Gauss-Legendre rule on each panel, end to end."""
    middle, half = (edges[1:] + edges[:-1]) / 2, (edges[1:] - edges[:-1]) / 2
    x = middle[:, None] + half[:, None] * _POINTS
    return x.ravel(), (half[:, None] * _WEIGHTS).ravel()


def is_positive(x: NDArray[np.float64], alpha: float) -> NDArray[np.bool_]:
    """Return whether each x is of class +1, that is, in [0, α]."""
    return (x >= 0) & (x <= alpha)


def _sign(x: NDArray[np.float64], alpha: float) -> NDArray[np.float64]:
    """The class of each x, as ±1."""
    return np.where(is_positive(x, alpha), 1.0, -1.0)
