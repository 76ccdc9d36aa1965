"""Eq. 5 and the rule for soft targets on the CPU, compiled by numba.

PyTorch's operations each read and write all of the logits; fused by hand they are read once forward
and once backward, and only the result is written. Numba brings its own compiler, so none is needed
on the machine; without numba the same mathematics runs in `pseudograd.rules.paper`.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor
from torch.autograd import Function

from pseudograd.loss.autograd import (
    final,
    graph_is_kept,
    is_batch,
    refuse_forward_mode,
    times_each,
)
from pseudograd.loss.checks import check_k, refuse_class_index
from pseudograd.rules.paper import GREATEST_K, LEAST_K, ROUNDING, Sensitivity

f32, f64, i32, u64 = np.float32, np.float64, np.int32, np.uint64

# Reordering sums lets the loops run on vector registers; NaN and infinity keep their meaning.
_FLAGS = {"contract", "nsz", "reassoc"}

# In float32; the sum of more would be rounded so that it is seen.
_SUMMED_AT_ONCE = 1024
# Inputs smaller than this are done sooner by one thread than shared among several.
_WORTH_SHARING = 1 << 15


def _bitcast(source: Any, destination: Any, llvm_type: Any) -> Any:
    @intrinsic
    def cast(typing_context: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.bitcast(arguments[0], llvm_type)

        return destination(source), generate

    return cast


_bits_of = _bitcast(types.float32, types.int32, ir.IntType(32))
_from_bits = _bitcast(types.int32, types.float32, ir.FloatType())

_wide_bits_of = _bitcast(types.float64, types.uint64, ir.IntType(64))
_from_wide_bits = _bitcast(types.uint64, types.float64, ir.DoubleType())

_LOG2_E = f32(1.4426950408889634)
_LN2_HIGH, _LN2_LOW = f32(0.693359375), f32(-2.12194440e-4)
_ROUND = f32(1.5 * 2**23)  # added and taken away again, this rounds to the nearest whole number
# Minimax polynomial of (exp(r) - 1 - r) / r² on |r| ≤ ln(2) / 2 (Cephes' expf coefficients).
_P = tuple(map(f32, (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2,
                     1.6666665459e-1, 5.0000001201e-1)))  # fmt: skip


# For loops over a row. If numba looked for divisions by 0, there would be no vector code.
_loop = numba.njit(fastmath=_FLAGS, error_model="numpy")
# For functions in which sums must not be reordered; left unsaid, the caller's flags would hold.
_in_order = numba.njit(fastmath=_FLAGS - {"reassoc"}, error_model="numpy")


# Reordered, the rounding constant would be taken away again.
@_in_order
def _exp(x):  # type: ignore[no-untyped-def]
    """exp(x) for x ≤ 0 to an ulp, and 0 below -88; a form that compilers turn into vector code."""
    x = f32(-88.0) if x < f32(-88.0) else x
    n = (x * _LOG2_E + _ROUND) - _ROUND
    r = (x - n * _LN2_HIGH) - n * _LN2_LOW
    p = _P[0]
    p = p * r + _P[1]
    p = p * r + _P[2]
    p = p * r + _P[3]
    p = p * r + _P[4]
    p = p * r + _P[5]
    return (p * r * r + r + f32(1)) * _from_bits((i32(n) + i32(127)) << i32(23))


@numba.njit
def _flipped(bits):  # type: ignore[no-untyped-def]
    return i32(bits ^ (i32(bits >> i32(31)) & i32(0x7FFFFFFF)))


@numba.njit
def _ordered(x):  # type: ignore[no-untyped-def]
    """A float as an integer of the same order: unlike floats, integers have a vector maximum."""
    return _flipped(_bits_of(x))


# Reordered, logits far from zero would swallow the logarithm.
@_in_order
def _log_odds(z_y, top, total):  # type: ignore[no-untyped-def]
    """-log p_y and log(1 - p_y) of a label's logit among others whose log-sum-exp is given."""
    margin = (f64(z_y) - f64(top)) - math.log(total) if z_y < np.inf else np.nan
    tail = math.log1p(math.exp(-abs(margin)))
    return tail - min(margin, 0.0), -tail - max(margin, 0.0)


# Loops run over whole slices: only then does the compiler know that no index is negative, and makes
# vector code of them.
@_loop
def _highest(row):  # type: ignore[no-untyped-def]
    """The largest of `_ordered`; the lowest integer for an empty row."""
    highest = i32(-0x7FFFFFFF - 1)
    for j in range(len(row)):
        highest = max(highest, _ordered(row[j]))
    return highest


@_loop
def _sum_of_exp(row, top):  # type: ignore[no-untyped-def]
    """Σ exp(z - top) in float64, since k will multiply its rounding."""
    total = f64(0)
    for j in range(len(row)):
        total += _exp(row[j] - top)
    return total


@_loop
def _sum(row):  # type: ignore[no-untyped-def]
    total = f32(0)
    for j in range(len(row)):
        total += row[j]
    return total


# The two passes. ``k``, ``weight`` and ``grad`` have one entry for all, or one for each.
_pass = numba.njit(fastmath=_FLAGS, nogil=True, cache=True, error_model="numpy")


@_pass
def _forward(z, target, weight, ignore_index, value, kept, start, stop):  # type: ignore[no-untyped-def]
    """-w_y log p_y. Kept of each row: the largest other logit, log(1 - p_y), and w_y.

    Returns the sums of values and of weights, and the first row whose label is no class, or -1.
    """
    value_sum, weight_sum = 0.0, 0.0
    for i in range(start, stop):
        row, y = z[i], target[i]
        value[i], kept[i, 0], kept[i, 1], kept[i, 2] = 0.0, 0.0, -np.inf, 0.0
        if y == ignore_index:
            continue
        if y < 0 or y >= len(row):
            return value_sum, weight_sum, i
        kept[i, 2] = weight[min(y, len(weight) - 1)]
        weight_sum += kept[i, 2]
        before, after = row[:y], row[y + 1 :]
        top = _from_bits(_flipped(max(_highest(before), _highest(after))))
        if len(row) == 1 or top == -np.inf:  # no other class: p_y is 1
            known = row[y] - row[y] == 0  # else that is not to be known
            for j in range(len(row)):
                known &= row[j] == row[j]  # a negative NaN is below -inf in `_ordered`
            if not known:
                value[i], kept[i, 1] = np.nan, np.nan
                value_sum += value[i]
            continue
        total = _sum_of_exp(before, top) + _sum_of_exp(after, top)
        surprise, doubt = _log_odds(row[y], top, total)
        value[i] = kept[i, 2] * surprise
        value_sum += value[i]
        kept[i, 0], kept[i, 1] = top, doubt
    return value_sum, weight_sum, -1


@_pass
def _backward(z, target, k, grad, kept, result, start, stop):  # type: ignore[no-untyped-def]
    """Eq. 5, each row times its weight and its ``grad``. ``result`` may be ``z`` itself."""
    for i in range(start, stop):
        row, out = z[i], result[i]
        above = grad[min(i, len(grad) - 1)]
        # Of no weight, or certain: whatever its logits.
        if above == 0 or kept[i, 2] == 0 or kept[i, 1] == -np.inf:
            out[:] = f32(0)
            continue
        top, y, k_i = kept[i, 0], target[i], k[min(i, len(k) - 1)]
        if y < 0 or y >= len(row):  # NumPy may have changed it behind PyTorch's back
            out[:] = f32(np.nan)
            continue
        strength = math.exp(f64(k_i) * f64(kept[i, 1]))
        scale = f32(above * kept[i, 2] * strength)
        if z is result:  # under two names the compiler would not make vector code of it
            for j in range(len(out)):
                out[j] = _exp(min(k_i * (out[j] - top), f32(0)))
        else:
            for j in range(len(row)):
                out[j] = _exp(min(k_i * (row[j] - top), f32(0)))
        out[y] = f32(0)
        total = f64(0)
        for first in range(0, len(row), _SUMMED_AT_ONCE):
            total += _sum(out[first : first + _SUMMED_AT_ONCE])
        share = scale / f32(total) if len(row) > 1 else f32(0)
        for j in range(len(row)):
            out[j] *= share
        out[y] = -scale


# --- soft targets --------------------------------------------------------------------------------

# Where p and q agree their difference cancels, so all of this is in float64.
_WIDE_LOG2_E = 1.4426950408889634
_WIDE_LN2_HIGH, _WIDE_LN2_LOW = 6.93145751953125e-1, 1.42860682030941723212e-6
_WIDE_ROUND = 1.5 * 2**52  # as `_ROUND`; the whole number is then in the last bits
_EXP_SERIES = tuple(1 / math.factorial(n) for n in range(13, -1, -1))
_LOG_SERIES = tuple(2 / n for n in range(17, 0, -2))
_ONE_BITS, _EXPONENT = u64(0x3FF0000000000000), u64(52)
_SIGN_BIT = u64(1 << 63)
_ROOT_OF_HALF_BITS, _TWO_TO_52_BITS = u64(0x3FE6A09E667F3BCD), u64(0x4330000000000000)
_LEAST_NORMAL = 2.0**-1022
# With less in all, the sum of biases has lost some that its logarithm still has.
_LEAST_STRENGTH = 1e-290


@_in_order
def _wide_exp(x):  # type: ignore[no-untyped-def]
    """exp(x) for x ≤ 0 to 2e-16 of it; 3e-308, which is next to nothing, below -708."""
    x = -708.0 if x < -708.0 else x
    shifted = x * _WIDE_LOG2_E + _WIDE_ROUND
    n = shifted - _WIDE_ROUND
    r = (x - n * _WIDE_LN2_HIGH) - n * _WIDE_LN2_LOW
    p = 0.0
    for coefficient in numba.literal_unroll(_EXP_SERIES):
        p = p * r + coefficient
    return p * _from_wide_bits((_wide_bits_of(shifted) << _EXPONENT) + _ONE_BITS)


@_in_order
def _wide_log(x):  # type: ignore[no-untyped-def]
    """log(x) for normal x > 0 to 1e-15, by the series of log((1 + s) / (1 - s))."""
    bits = _wide_bits_of(x)
    n = (bits - _ROOT_OF_HALF_BITS + _ONE_BITS) >> _EXPONENT  # by 1023 more than the exponent
    m = _from_wide_bits(bits - (n << _EXPONENT) + _ONE_BITS)  # between √½ and √2
    s = (m - 1.0) / (m + 1.0)
    square, p = s * s, 0.0
    for coefficient in numba.literal_unroll(_LOG_SERIES):
        p = p * square + coefficient
    exponent = _from_wide_bits(n | _TWO_TO_52_BITS) - (2.0**52 + 1023.0)
    return exponent * _WIDE_LN2_HIGH + (exponent * _WIDE_LN2_LOW + s * p)


@_loop
def _make_target(t, q, y, weight, smoothing):  # type: ignore[no-untyped-def]
    """Write t_j = w_j ((1 - s) q_j + s / C), and give its sum W.

    Where q is empty, the label is y; where the weight has but one entry, there is none.
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


@_in_order
def _sum_less_one(count, rest):  # type: ignore[no-untyped-def]
    """The count and the rest, less 1: in this order, so that a small rest is not rounded off."""
    return (count - 1) + rest


@_loop
def _soft_sums(row, t, top):  # type: ignore[no-untyped-def]
    """Σ exp(z - top) - 1, and Σ t (z - top), in which 0 times infinity is 0."""
    rest, tops, distance = 0.0, 0.0, 0.0
    for j in range(len(row)):
        d = f64(row[j]) - top
        rest += _wide_exp(d) if d != 0 else 0.0  # by itself: beside 1 it would be rounded
        tops += 0.0 if d != 0 else 1.0
        distance += t[j] * d if t[j] != 0 else 0.0
    return _sum_less_one(tops, rest), distance


@_loop
def _make_bias(bias, row, t, top, total, whole):  # type: ignore[no-untyped-def]
    """Write p - t / W, -1 for a class that has all of the target; give the sum of those above 0.

    Such a class has its side of zero to itself, also where its bias has been rounded away.
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


@_loop
def _with_sign_of(x, size):  # type: ignore[no-untyped-def]
    return _from_wide_bits(_wide_bits_of(size) | (_wide_bits_of(x) & _SIGN_BIT))


# Conditions would keep sums from vector code; reordered, this would be rounded.
@_in_order
def _twice_if_above(x):  # type: ignore[no-untyped-def]
    """2 max(x, 0), exactly."""
    return abs(x) + x


@_loop
def _sums_of_sides(x):  # type: ignore[no-untyped-def]
    """The sum of those above 0, and that of the sizes of those below."""
    above, below = 0.0, 0.0
    for j in range(len(x)):
        above += _twice_if_above(x[j])
        below += _twice_if_above(-x[j])
    return above / 2, below / 2


@_loop
def _powers_of_roots_or_squares(bias, root):  # type: ignore[no-untyped-def]
    """Write |ε|^k with the sign of ε for k = ½ or 2; give the sums of both sides."""
    if root:
        for j in range(len(bias)):
            bias[j] = _with_sign_of(bias[j], math.sqrt(abs(bias[j])))
    else:
        for j in range(len(bias)):
            bias[j] = _with_sign_of(bias[j], bias[j] * bias[j])
    return _sums_of_sides(bias)


@_loop
def _to_sizes(t, bias, row, top, log_total):  # type: ignore[no-untyped-def]
    """Write log |ε| over t; off the target it is log p, however low."""
    for j in range(len(bias)):
        size = abs(bias[j])
        log = _wide_log(size if size > _LEAST_NORMAL else _LEAST_NORMAL)
        log = log if size > 0 else -np.inf
        t[j] = (f64(row[j]) - top) - log_total if t[j] == 0 else log


@numba.njit(fastmath=_FLAGS | {"nnan"})  # or there would be no vector code
def _extremes(bias):  # type: ignore[no-untyped-def]
    """The largest and the smallest bias."""
    largest, smallest = bias[0], bias[0]
    for j in range(len(bias)):
        largest = bias[j] if bias[j] > largest else largest
        smallest = bias[j] if bias[j] < smallest else smallest
    return largest, smallest


@_loop
def _log_sum_above(sizes, bias):  # type: ignore[no-untyped-def]
    """The largest log |ε| where ε is not below 0, and log Σ |ε| there."""
    top, total = -np.inf, 0.0
    for j in range(len(sizes)):
        top = max(top, sizes[j]) if bias[j] >= 0 else top
    for j in range(len(sizes)):
        total += _wide_exp(sizes[j] - top) if bias[j] >= 0 else 0.0
    return top, top + math.log(total)


@_loop
def _powers(bias, sizes, k, above_top, below_top):  # type: ignore[no-untyped-def]
    """Write exp(k (log |ε| - top of its side)) with the sign of ε; give the sums of both sides."""
    for j in range(len(bias)):
        exponent = k * (sizes[j] - (below_top if bias[j] < 0 else above_top))
        exponent = exponent if exponent < 0 else 0.0  # as a rounded top may be too low
        bias[j] = _with_sign_of(bias[j], _wide_exp(exponent))
    return _sums_of_sides(bias)


@_loop
def _powers_for_any_k(bias, t, row, top, total, strength, k):  # type: ignore[no-untyped-def]
    """Write |ε|^k over the bias, as a share of the largest of its side, with the sign of ε.

    Gives the sums of both sides, and S^k for the strength S. What was in t is lost.
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
    if log_strength < ROUNDING:  # a large k would make it infinite
        log_strength = min(log_strength, 0.0)
    return above, below, math.exp(k * log_strength)


@_loop
def _write(out, powers, above_scale, below_scale):  # type: ignore[no-untyped-def]
    for j in range(len(out)):
        out[j] = f32(powers[j] * (above_scale if powers[j] >= 0 else below_scale))


@_pass
def _soft_forward(z, labels, q, weight, ignore_index, smoothing, value, kept, start, stop):  # type: ignore[no-untyped-def]
    """-Σ t log p. Kept of each row: the largest logit, Σ exp(z - top), and W = Σ t.

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
        top = f64(_from_bits(_flipped(_highest(z[i]))))
        rest, distance = _soft_sums(z[i], t, top)
        value[i] = (whole * math.log1p(rest) if whole != 0 else 0.0) - distance
        value_sum += value[i]
        kept[i, 0], kept[i, 1], kept[i, 2] = top, 1 + rest, whole
    return value_sum, weight_sum, -1


@_pass
def _soft_backward(z, labels, q, weight, smoothing, k, grad, kept, result, start, stop):  # type: ignore[no-untyped-def]
    """The rule for soft targets, each row times its ``grad``. ``result`` may be ``z`` itself."""
    t, bias = np.empty(z.shape[1], f64), np.empty(z.shape[1], f64)
    for i in range(start, stop):
        row, out = z[i], result[i]
        top, total, whole = kept[i, 0], kept[i, 1], kept[i, 2]
        above = f64(grad[min(i, len(grad) - 1)])
        if above == 0 or whole == 0:  # whatever its logits, and of an ignored label what is above
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


@numba.njit(cache=True)
def _are_positive(ks):  # type: ignore[no-untyped-def]
    positive = True
    for k in ks:
        positive &= LEAST_K <= k <= GREATEST_K
    return positive


def fused_cross_entropy(
    z: Tensor,
    target: Tensor,
    k: Sensitivity,
    weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
) -> Tensor:
    """Give the reduced loss, in float32, of rows ``z`` (R, C).

    Targets are labels (R) or probabilities (R, C).
    """
    if isinstance(k, Tensor):
        ks = np.array(_array(k.cpu()).reshape(-1), f32)
        if not _are_positive(ks):
            check_k(k)
    else:
        ks = np.array([k], f32)
    smoothing = float(label_smoothing)  # numba would compile once more for an integer
    value: Tensor = _Fused.apply(z, target, ks, weight, ignore_index, reduction, smoothing)
    return value


class _Fused(Function):
    @staticmethod
    def forward(
        ctx: Any,
        z: Tensor,
        target: Tensor,
        k: Any,
        weight: Tensor | None,
        ignore_index: int,
        reduction: str,
        smoothing: float,
    ) -> Tensor:
        value, ctx.kept, value_sum, weight_sum = _values(
            _array(z), target, weight, ignore_index, smoothing
        )
        # Of labels, the weights are kept with the rest.
        ctx.save_for_backward(z, target, weight if _is_soft(target, smoothing) else None)
        ctx.k, ctx.smoothing = k, smoothing
        ctx.divisor = weight_sum if reduction == "mean" else 1.0
        ctx.reduced = reduction != "none"
        if not ctx.reduced:
            return torch.from_numpy(value)
        # 0 / 0, when every row was ignored, is NaN, as in PyTorch.
        return torch.from_numpy(np.array(value_sum / (ctx.divisor or math.nan), f32))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        z, target, weight = ctx.saved_tensors
        grad = grads[0]
        several = is_batch(grad)  # which no loop can read
        above = torch.ones(() if ctx.reduced else len(z)) if several else grad
        if ctx.reduced:
            factor = np.array([above.item() / ctx.divisor if ctx.divisor else 0.0], f32)
        else:
            factor = _array(above)
        result = np.empty(z.shape, f32)
        _gradients(_array(z), target, ctx.k, weight, ctx.smoothing, factor, ctx.kept, result)
        if not graph_is_kept():  # autograd lets go of what it has saved, and so do we
            ctx.kept = None
        f = torch.from_numpy(result)
        f = times_each(f, grad) if several else f
        return final(f if z.dtype == torch.float32 else f.to(z.dtype), z), *[None] * 6

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        refuse_forward_mode()


def values_and_gradients(
    logits: Tensor,
    target: Tensor,
    k: Sensitivity,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    factor: Tensor | None,
) -> Tensor:
    """Give the values of rows; if there is a factor, write the gradient over their logits.

    That is Eq. 5, or the rule for smoothed labels, each row times its weight and its factor.
    """
    z = _array(logits)
    value, kept, _, _ = _values(z, target, weight, ignore_index, label_smoothing)
    if factor is not None:
        ks = _array(k).reshape(-1) if isinstance(k, Tensor) else np.array([k], f32)
        _gradients(z, target, ks, weight, label_smoothing, _array(factor), kept, z)
        if logits.dtype != torch.float32:
            logits.copy_(torch.from_numpy(z))
    return torch.from_numpy(value)


def _values(
    z: Any, target: Tensor, weight: Tensor | None, ignore_index: int, smoothing: float
) -> tuple[Any, ...]:
    """The values of rows, what is kept of them, and the sums of values and of weights."""
    weights, value = _weights(weight), np.empty(len(z), f32)
    labels, q = _labels_and_probabilities(target)
    if _is_soft(target, smoothing):
        kept = np.empty((len(z), 3), f64)
        parts = _shared(_soft_forward, z, labels, q, weights, ignore_index, smoothing, value, kept)
    else:
        kept = np.empty((len(z), 3), f32)
        parts = _shared(_forward, z, labels, weights, ignore_index, value, kept)
    # Each row of probabilities counts as one, whatever its weights.
    value_sum, weight_sum = 0.0, 0.0 if len(labels) else float(len(z))
    for part_sum, part_weight, wrong in parts:
        if wrong >= 0:
            refuse_class_index(int(labels[wrong]), z.shape[1], ignore_index)
        value_sum, weight_sum = value_sum + part_sum, weight_sum + part_weight
    return value, kept, value_sum, weight_sum


def _gradients(
    z: Any,
    target: Tensor,
    k: Any,
    weight: Tensor | None,
    smoothing: float,
    factor: Any,
    kept: Any,
    result: Any,
) -> None:
    """Write the pseudo-gradients of rows, each times its weight and its factor."""
    labels, q = _labels_and_probabilities(target)
    if _is_soft(target, smoothing):
        weights = _weights(weight)
        _shared(_soft_backward, z, labels, q, weights, smoothing, k, factor, kept, result)
    else:
        _shared(_backward, z, labels, k, factor, kept, result)


def _is_soft(target: Tensor, smoothing: float) -> bool:
    """Whether the target is not a label alone."""
    return smoothing > 0 or target.dim() > 1


def _labels_and_probabilities(target: Tensor) -> tuple[Any, Any]:
    """Labels and nothing, or nothing and probabilities."""
    if target.dim() > 1:
        return _NO_LABELS, _array(target)
    if target.dtype != torch.long or not target.is_contiguous():
        target = target.long().contiguous()
    return target.numpy(), _NO_PROBABILITIES


def _weights(weight: Tensor | None) -> Any:
    return _ONE if weight is None else _array(weight)


_NO_LABELS, _NO_PROBABILITIES = np.empty(0, np.int64), np.empty((1, 0), f32)
_ONE = np.ones(1, f32)


def _array(tensor: Tensor) -> Any:
    # To convert what needs no conversion takes as long as all the rest.
    if tensor.dtype != torch.float32 or not tensor.is_contiguous():
        tensor = tensor.float().contiguous()
    return tensor.numpy(force=True)


def _shared(kernel: Any, z: Any, *arguments: Any) -> list[Any]:
    """Run the kernel over all rows of ``z``, large inputs on as many threads as PyTorch uses."""
    rows, workers = len(z), min(torch.get_num_threads(), len(z))
    if z.size < _WORTH_SHARING or workers == 1:
        return [kernel(z, *arguments, 0, rows)]
    bounds = [rows * worker // workers for worker in range(workers + 1)]
    others = [
        _threads().submit(kernel, *(z, *arguments, start, stop))
        for start, stop in itertools.pairwise(bounds[1:])
    ]
    return [kernel(z, *arguments, 0, bounds[1]), *(other.result() for other in others)]


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(thread_name_prefix="pseudograd")


# Threads do not survive a fork; the child starts its own. Windows has no forks.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_threads.cache_clear)
