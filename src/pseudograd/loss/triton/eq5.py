"""Eq. 5 in Triton: elementwise functions for the kernels of the loss and of the fleet.

A row needs three numbers of the classes other than the label y: the largest logit (``top``),
Σ exp(z - top) (``total``) and Σ exp(k (z - top)). They give

    margin m = z_y - top - log(total),   value -log p_y = softplus(-m),
    A = (1 - p_y)^k = exp(-k softplus(m)),   f_y = -A,   f_j = A exp(k (z_j - top)) / Σ exp(k ...).

Each kernel chooses its own layout of rows and does its own reductions.

The same formula is in `pseudograd.rules.paper` (PyTorch), `pseudograd.jax` (JAX) and
`loss/cpp/labels.h` (C++). The rule for soft targets on GPUs is in `pseudograd.loss.triton.soft`.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
_LOG2_E_LOW = tl.constexpr(1.9259629911266175e-08)  # the rounding error of LOG2_E in float32
LN_2 = tl.constexpr(0.6931471805599453)
# ln 2 in two parts: the first has few digits, so its products with small integers are exact.
LN_2_HIGH = tl.constexpr(0.693145751953125)
LN_2_LOW = tl.constexpr(1.428606820309417e-06)
# The top of a row without other classes. With -inf, differences to the top would be NaN.
LOWEST = tl.constexpr(-3.4028234663852886e38)


# --- powers of the logits: one element each -------------------------------------------------------


@triton.jit
def powers(d, k, special: tl.constexpr):
    """Return exp(d), its rounding error divided by ln 2, and exp(k d), for d ≤ 0.

    Each exponential costs one SFU op, so k = ½, 1 and 2 use a single one. Equal logits have equal
    rounding errors, which accumulate in their sum, and a large k multiplies the error of that sum.
    So for every other k the error is computed.
    """
    lost = 0.0
    if special == "1":
        e = tl.exp2(d * LOG2_E)
        power = e
    elif special == "1/2":
        power = tl.exp2(d * (0.5 * LOG2_E))
        e = power * power
    elif special == "2":
        e = tl.exp2(d * LOG2_E)
        power = e * e
    else:
        power = tl.exp2(d * (k * LOG2_E))
        d = tl.maximum(d, -1e30, propagate_nan=tl.PropagateNan.ALL)  # -inf has no rounding error
        x = d * LOG2_E
        e = tl.exp2(x)
        lost = e * tl.fma(d, _LOG2_E_LOW, tl.fma(d, LOG2_E, -x))
    return e, lost, power


@triton.jit
def whole_powers(d, k, special: tl.constexpr):
    """Return exp(d), corrected by its rounding error, and exp(k d)."""
    e, lost, power = powers(d, k, special)
    if special == "any":
        e += lost * LN_2
    return e, power


@triton.jit
def power_of(d, k, special: tl.constexpr):
    """Return exp(k d)."""
    if special == "1":
        factor = LOG2_E
    elif special == "1/2":
        factor = 0.5 * LOG2_E
    elif special == "2":
        factor = 2 * LOG2_E
    else:
        factor = k * LOG2_E
    return tl.exp2(d * factor)


@triton.jit
def at_least_1(total):
    """Return the sum, or 1 if it has no terms: the top contributes exactly 1. NaN stays NaN."""
    return tl.where(total < 1, 1.0, total)


# --- the strength in plain float32 ----------------------------------------------------------------

# For the fleet, whose matrix products of float16 numbers are far coarser than these logarithms.


@triton.jit
def margin_of(z_y, top, total):
    """Return the margin z_y - top - log(total)."""
    return z_y - top - tl.log(total)


@triton.jit
def log_strength(margin):
    """Return log(1 - p_y) = -softplus(margin)."""
    return -tl.maximum(margin, 0.0) - tl.log(1 + tl.exp(-tl.abs(margin)))


@triton.jit
def strength_of(margin, k):
    """Return A = (1 - p_y)^k."""
    return tl.exp(k * log_strength(margin))


# --- value and strength with compensated arithmetic -----------------------------------------------

# For the loss: k multiplies the error of the margin, and float32 is not enough for k = 64. Every
# thread of a row computes the row's numbers, and float64 functions take a hundred instructions,
# so they would take longer than the row itself. Instead, rounding errors are tracked explicitly.


@triton.jit
def value_and_strength(z_y, top, total, k):
    """Return -log p_y and A = (1 - p_y)^k; ``total`` is float64."""
    n, f, s = log_in_parts(at_least_1(total))
    # z_y - top - n ln 2 - f - s can be much smaller than its terms.
    margin, lost_1 = _difference(z_y, top)
    margin, lost_2 = _difference(margin, n * LN_2_HIGH)
    margin, lost_3 = _difference(margin, f)
    margin, lost = _difference(margin, s + n * LN_2_LOW - lost_1 - lost_2 - lost_3)
    # NaN as in PyTorch: z_y is +inf, or no logit is above -inf.
    nothing = (z_y == float("inf")) | ((z_y == float("-inf")) & (total == 0))
    margin = tl.where(nothing, float("nan"), margin)
    # Without other classes the label is certain, even if its logit is as low as the top.
    margin = tl.where((total == 0) & (tl.abs(z_y) < float("inf")), float("inf"), margin)
    x, x_lost = exp_and_error(-tl.abs(margin))
    x_lost -= x * tl.where(margin > 0, lost, -lost)
    near = 1 + x
    n, f, s = _log_of_float32(near)
    small = s + n * LN_2_LOW + (x - (near - 1) + x_lost) / near
    tail = (n * LN_2_HIGH + f) + small  # log(1 + x)
    tail_lost = small - (tail - (n * LN_2_HIGH + f))
    value = tail - tl.minimum(margin, 0.0)
    log_miss, lost_here = _difference(-tail, tl.maximum(margin, 0.0))  # log(1 - p_y)
    lost = lost_here - tail_lost - tl.where(margin > 0, lost, 0.0)
    return value, _to_the_power(log_miss, lost, k)


@triton.jit
def _to_the_power(logarithm, lost, k):
    """Return exp(k (logarithm + lost)) for a logarithm ≤ 0 with the rounding error ``lost``."""
    exponent = k * logarithm
    lost = tl.fma(k, logarithm, -exponent) + k * lost
    power, _ = exp_and_error(exponent)
    return power + power * tl.where(exponent > -200.0, lost, 0.0)


@triton.jit
def _difference(a, b):
    """Return a - b and its rounding error."""
    difference = a - b
    back = difference - a
    lost = (a - (difference - back)) - (b + back)
    return difference, tl.where(tl.abs(difference) < float("inf"), lost, 0.0)


@triton.jit
def exp_and_error(x):
    """Return exp(x) for x ≤ 0 and its rounding error. `tl.exp` is less exact for large |x|."""
    x = tl.where(x < -200.0, -200.0, x)
    n = tl.floor(x * LOG2_E + 0.5)
    r = (x - n * LN_2_HIGH) - n * LN_2_LOW
    q = 1 / 120 + r * (1 / 720 + r * (1 / 5040))
    q = r * (1 + r * (1 / 2 + r * (1 / 6 + r * (1 / 24 + r * q))))
    p, scale = 1 + q, tl.exp2(n)
    return p * scale, (q - (p - 1)) * scale


@triton.jit
def log_in_parts(x):
    """Return n, f and s with log(x) = n ln 2 + f + s for a float64 x ≥ 1; n and f are exact."""
    near = x.to(tl.float32)
    n, f, s = _log_of_float32(near)
    return n, f, s + (x - near).to(tl.float32) / near


@triton.jit
def _log_of_float32(x):
    bits = x.to(tl.int32, bitcast=True)
    n = (bits - 0x3F3504F3) >> 23  # leaves 1 + f between √½ and √2
    f = (bits - (n << 23)).to(tl.float32, bitcast=True) - 1
    # Minimax polynomial of (log(1 + f) - f + f²/2) / f³ there, within 1.8e-7.
    p = 0.126223192 + f * -0.0790274367
    p = -0.166412815 + f * (0.142144963 + f * (-0.129981831 + f * p))
    p = 0.333333313 + f * (-0.25000307 + f * (0.200010449 + f * p))
    return n.to(tl.float32), f, f * f * (f * p - 0.5)


INTERPRETED = not isinstance(powers, triton.JITFunction)
