"""The rule for soft targets on the CPU, compiled by numba.

With ε = p - t / W, for a target t with the sum W:

    f_j = W sign(ε_j) S^k |ε_j|^k / Σ_{i: sign ε_i = sign ε_j} |ε_i|^k,   S = Σ_{ε_j > 0} ε_j.

`pseudograd.rules.paper` has the same rule in PyTorch, `pseudograd.loss.triton.soft` in Triton,
`pseudograd.jax` in JAX; labels without smoothing are in `pseudograd.loss.cpu`, which also calls
these passes.
"""

from __future__ import annotations

import math

import numba
import numpy as np

from pseudograd.loss.numba_tools import (
    FLAGS,
    f32,
    f64,
    from_ordered,
    from_wide_bits,
    highest,
    in_order,
    loop,
    over_rows,
    u64,
    wide_bits_of,
)
from pseudograd.rules.paper import ROUNDING

# Where p and q agree their difference cancels, so everything is in float64.
_WIDE_LOG2_E = 1.4426950408889634
_WIDE_LN2_HIGH, _WIDE_LN2_LOW = 6.93145751953125e-1, 1.42860682030941723212e-6
_WIDE_ROUND = 1.5 * 2**52  # rounds to an integer, which is then in the last bits
_EXP_SERIES = tuple(1 / math.factorial(n) for n in range(13, -1, -1))
_LOG_SERIES = tuple(2 / n for n in range(17, 0, -2))
_ONE_BITS, _EXPONENT = u64(0x3FF0000000000000), u64(52)
_SIGN_BIT = u64(1 << 63)
_ROOT_OF_HALF_BITS, _TWO_TO_52_BITS = u64(0x3FE6A09E667F3BCD), u64(0x4330000000000000)
_LEAST_NORMAL = 2.0**-1022
# In a smaller sum some biases have underflowed; the sum of their logarithms still has them.
_LEAST_STRENGTH = 1e-290


@in_order
def _wide_exp(x):  # type: ignore[no-untyped-def]
    """Return exp(x) for x ≤ 0 to 2e-16 of it; below -708, a negligible 3e-308."""
    x = -708.0 if x < -708.0 else x
    shifted = x * _WIDE_LOG2_E + _WIDE_ROUND
    n = shifted - _WIDE_ROUND
    r = (x - n * _WIDE_LN2_HIGH) - n * _WIDE_LN2_LOW
    p = 0.0
    for coefficient in numba.literal_unroll(_EXP_SERIES):
        p = p * r + coefficient
    return p * from_wide_bits((wide_bits_of(shifted) << _EXPONENT) + _ONE_BITS)


@in_order
def _wide_log(x):  # type: ignore[no-untyped-def]
    """Return log(x) for normal x > 0 to 1e-15, by the series of log((1 + s) / (1 - s))."""
    bits = wide_bits_of(x)
    n = (bits - _ROOT_OF_HALF_BITS + _ONE_BITS) >> _EXPONENT  # the exponent plus 1023
    m = from_wide_bits(bits - (n << _EXPONENT) + _ONE_BITS)  # between √½ and √2
    s = (m - 1.0) / (m + 1.0)
    square, p = s * s, 0.0
    for coefficient in numba.literal_unroll(_LOG_SERIES):
        p = p * square + coefficient
    exponent = from_wide_bits(n | _TWO_TO_52_BITS) - (2.0**52 + 1023.0)
    return exponent * _WIDE_LN2_HIGH + (exponent * _WIDE_LN2_LOW + s * p)


@loop
def _make_target(t, q, y, weight, smoothing):  # type: ignore[no-untyped-def]
    """Write t_j = w_j ((1 - s) q_j + s / C), and return its sum W.

    An empty q stands for the label y, a weight with one entry for none.
    """
    spread, whole = smoothing / len(t), 0.0
    if len(q) == 0:
        t[:] = spread
        t[y] += 1 - smoothing
    else:
        for j in range(len(t)):
            t[j] = (1 - smoothing) * f64(q[j]) + spread
    if len(weight) == len(t):
        for j in range(len(t)):
            t[j] *= f64(weight[j])
    for j in range(len(t)):
        whole += t[j]
    return whole


@in_order
def _sum_less_one(count, rest):  # type: ignore[no-untyped-def]
    """Return count - 1 + rest, in the order that keeps a small rest."""
    return (count - 1) + rest


@loop
def _soft_sums(row, t, top):  # type: ignore[no-untyped-def]
    """Return Σ exp(z - top) - 1 and Σ t (z - top), where 0 times infinity is 0."""
    rest, tops, distance = 0.0, 0.0, 0.0
    for j in range(len(row)):
        d = f64(row[j]) - top
        rest += _wide_exp(d) if d != 0 else 0.0  # apart: beside 1 it would be rounded
        tops += 0.0 if d != 0 else 1.0
        distance += t[j] * d if t[j] != 0 else 0.0
    return _sum_less_one(tops, rest), distance


@loop
def _make_bias(bias, row, t, top, total, whole):  # type: ignore[no-untyped-def]
    """Write ε = p - t / W, and return S, the sum of those above 0.

    A class with the whole target gets -1: it has its side of zero to itself, even if its ε has
    been rounded to 0.
    """
    strength, alone = 0.0, 0
    for j in range(len(row)):
        q = t[j] / whole
        bias[j] = _wide_exp(f64(row[j]) - top) / total - q
        strength += bias[j] if bias[j] > 0 else 0.0
        alone += q == 1
    if alone:
        for j in range(len(row)):
            if t[j] / whole == 1:
                bias[j] = -1.0
    return strength


@loop
def _with_sign_of(x, size):  # type: ignore[no-untyped-def]
    return from_wide_bits(wide_bits_of(size) | (wide_bits_of(x) & _SIGN_BIT))


# Conditions would prevent vector code; reordered, this would be rounded.
@in_order
def _twice_if_above(x):  # type: ignore[no-untyped-def]
    """Return 2 max(x, 0), exactly."""
    return abs(x) + x


@loop
def _sums_of_sides(x):  # type: ignore[no-untyped-def]
    """Return Σ x over x > 0, and Σ |x| over x < 0."""
    above, below = 0.0, 0.0
    for j in range(len(x)):
        above += _twice_if_above(x[j])
        below += _twice_if_above(-x[j])
    return above / 2, below / 2


@loop
def _powers_of_roots_or_squares(bias, root):  # type: ignore[no-untyped-def]
    """Write |ε|^k with the sign of ε for k = ½ or 2; return the sums of both sides."""
    if root:
        for j in range(len(bias)):
            bias[j] = _with_sign_of(bias[j], math.sqrt(abs(bias[j])))
    else:
        for j in range(len(bias)):
            bias[j] = _with_sign_of(bias[j], bias[j] * bias[j])
    return _sums_of_sides(bias)


@loop
def _to_sizes(t, bias, row, top, log_total):  # type: ignore[no-untyped-def]
    """Write log |ε| over t; off the target that is log p, which does not underflow."""
    for j in range(len(bias)):
        size = abs(bias[j])
        log = _wide_log(size if size > _LEAST_NORMAL else _LEAST_NORMAL)
        log = log if size > 0 else -np.inf
        t[j] = (f64(row[j]) - top) - log_total if t[j] == 0 else log


@numba.njit(fastmath=FLAGS | {"nnan"})  # otherwise it would not vectorize
def _extremes(bias):  # type: ignore[no-untyped-def]
    """Return the largest and the smallest ε."""
    largest, smallest = bias[0], bias[0]
    for j in range(len(bias)):
        largest = bias[j] if bias[j] > largest else largest
        smallest = bias[j] if bias[j] < smallest else smallest
    return largest, smallest


@loop
def _log_sum_above(sizes, bias):  # type: ignore[no-untyped-def]
    """Return the largest log |ε| over ε ≥ 0, and log Σ |ε| there."""
    top, total = -np.inf, 0.0
    for j in range(len(sizes)):
        top = max(top, sizes[j]) if bias[j] >= 0 else top
    for j in range(len(sizes)):
        total += _wide_exp(sizes[j] - top) if bias[j] >= 0 else 0.0
    return top, top + math.log(total)


@loop
def _powers(bias, sizes, k, above_top, below_top):  # type: ignore[no-untyped-def]
    """Write exp(k (log |ε| - top of its side)) with the sign of ε; return both sides' sums."""
    for j in range(len(bias)):
        exponent = k * (sizes[j] - (below_top if bias[j] < 0 else above_top))
        exponent = exponent if exponent < 0 else 0.0  # a rounded top may be too low
        bias[j] = _with_sign_of(bias[j], _wide_exp(exponent))
    return _sums_of_sides(bias)


@loop
def _powers_for_any_k(bias, t, row, top, total, strength, k):  # type: ignore[no-untyped-def]
    """Write |ε|^k relative to the largest of its side, with the sign of ε, over ε.

    Returns the sums of both sides, and S^k for the strength S. Overwrites t.
    """
    _to_sizes(t, bias, row, top, math.log(total))
    sizes = t
    largest, smallest = _extremes(bias)
    above_top, log_strength = math.log(largest), math.log(strength)
    if strength < _LEAST_STRENGTH:
        above_top, log_strength = _log_sum_above(sizes, bias)
    if smallest >= 0 or above_top == -np.inf:
        return 0.0, 0.0, 0.0
    above, below = _powers(bias, sizes, k, above_top, math.log(-smallest))
    if log_strength < ROUNDING:  # rounded above 0, a large k would make it infinite
        log_strength = min(log_strength, 0.0)
    return above, below, math.exp(k * log_strength)


@loop
def _write(out, powers, above_scale, below_scale):  # type: ignore[no-untyped-def]
    for j in range(len(out)):
        out[j] = f32(powers[j] * (above_scale if powers[j] >= 0 else below_scale))


@over_rows
def forward(z, labels, q, weight, ignore_index, smoothing, value, kept, start, stop):  # type: ignore[no-untyped-def]
    """Compute -Σ t log p; keep for each row the largest logit, Σ exp(z - top), and W = Σ t.

    Returns the sums of values and of weights, and the first row whose label is no class, or -1.
    """
    value_sum, weight_sum, y = 0.0, 0.0, 0
    t = np.empty(z.shape[1], f64)
    for i in range(start, stop):
        value[i], kept[i, 0], kept[i, 1], kept[i, 2] = 0.0, 0.0, 1.0, 0.0
        if len(labels):
            y = labels[i]
            if y == ignore_index:
                continue
            if y < 0 or y >= len(t):
                return value_sum, weight_sum, i
            weight_sum += weight[min(y, len(weight) - 1)]
        whole = _make_target(t, q[min(i, len(q) - 1)], y, weight, smoothing)
        top = f64(from_ordered(highest(z[i])))
        rest, distance = _soft_sums(z[i], t, top)
        value[i] = (whole * math.log1p(rest) if whole != 0 else 0.0) - distance
        value_sum += value[i]
        kept[i, 0], kept[i, 1], kept[i, 2] = top, 1 + rest, whole
    return value_sum, weight_sum, -1


@over_rows
def backward(z, labels, q, weight, smoothing, k, grad, kept, result, start, stop):  # type: ignore[no-untyped-def]
    """Compute the rule, each row times its ``grad``. ``result`` may be ``z`` itself."""
    t, bias = np.empty(z.shape[1], f64), np.empty(z.shape[1], f64)
    for i in range(start, stop):
        row, out = z[i], result[i]
        top, total, whole = kept[i, 0], kept[i, 1], kept[i, 2]
        above = f64(grad[min(i, len(grad) - 1)])
        if above == 0 or whole == 0:  # whatever the logits; an ignored label, whatever ``grad``
            out[:] = f32(0)
            continue
        y = labels[i] if len(labels) else 0
        if y < 0 or y >= len(row) or not total + abs(whole) < np.inf:
            out[:] = f32(np.nan)
            continue
        _make_target(t, q[min(i, len(q) - 1)], y, weight, smoothing)
        strength = _make_bias(bias, row, t, top, total, whole)
        k_i = f64(k[min(i, len(k) - 1)])
        if k_i == 1:
            of_above, of_below = _sums_of_sides(bias)
        elif k_i == 0.5 or k_i == 2:
            of_above, of_below = _powers_of_roots_or_squares(bias, k_i == 0.5)
            strength = math.sqrt(strength) if k_i == 0.5 else strength * strength
        else:
            of_above, of_below, strength = _powers_for_any_k(
                bias, t, row, top, total, strength, k_i
            )
        if of_above == 0 or of_below == 0:  # no side pushes alone (Eq. 4)
            out[:] = f32(0)
            continue
        scale = above * whole * strength
        _write(out, bias, scale / of_above, scale / of_below)
