"""The kernels for soft targets: class probabilities and smoothed labels.

With class weights w and smoothing s the target is t_j = w_j ((1 - s) q_j + s / C), where q is the
row of probabilities, or one-hot for a label. With W = Σ t and ε = p - t / W the rule is

    f_j = W sign(ε_j) S^k |ε_j|^k / Σ_{i: sign ε_i = sign ε_j} |ε_i|^k,   S = Σ_{ε_j > 0} ε_j.

It is Eq. 5 if the target is one-hot. The same rule is in `pseudograd.rules.paper` (PyTorch),
`loss/cpp/soft.h` (C++) and `pseudograd.jax` (JAX). Labels without smoothing are in `labels`.

- `soft_tile` computes several short rows at once; each is read once and kept on-chip.
- `soft_row` computes one long row, in two passes for k = 1 and otherwise in three.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from pseudograd.loss.triton.eq5 import (
    INTERPRETED,
    LN_2,
    LN_2_HIGH,
    LN_2_LOW,
    LOG2_E,
    LOWEST,
    at_least_1,
    exp_and_error,
    log_in_parts,
)
from pseudograd.loss.triton.layout import (
    beside,
    columns_of,
    factor_of,
    is_done,
    keep,
    kept,
    max_of_rows,
    min_of_rows,
    sensitivity_of,
    sum_of_rows,
)

_LEAST_TARGET = tl.constexpr(1e-37)  # smaller ones count as 0; its reciprocal is finite
_LEAST_NORMAL = tl.constexpr(1.1754943508222875e-38)
_LEAST_BIAS = tl.constexpr(2**-24)  # the smallest nonzero |p - 1| in float32
# Neither the interpreter nor AMD's compiler has the fast logarithm.
_APPROXIMATE = tl.constexpr(not (INTERPRETED or torch.version.hip))


# --- the rule's parts -----------------------------------------------------------------------------


@triton.jit
def _target(target, at, mask, y, column, weight, smoothing, classes, probabilities: tl.constexpr):
    """Return the target t in the given columns."""
    inside = column < classes
    if probabilities:
        t = tl.load(target + at, mask=mask, other=0.0).to(tl.float32)
    else:
        t = tl.where(column == y, 1.0, 0.0)
    if smoothing is not None:
        t = tl.where(inside, tl.fma(1 - smoothing, t, smoothing / classes), 0.0)
    if weight is not None:
        t *= tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    return t


@triton.jit
def _label_of(target, row, exists, classes, ignore_index):
    """Return whether a label counts, 1 (NaN if it is invalid), and the label."""
    y = tl.load(target + row, mask=exists, other=0).to(tl.int64)
    counted = exists & (y != ignore_index)
    known = tl.where((y >= 0) & (y < classes), 1.0, float("nan"))
    return counted, known, y.to(tl.int32)


@triton.jit
def _distance(t, d):
    """Return t d, where 0 · inf is 0."""
    return tl.where(t == 0, 0.0, t * d)


@triton.jit
def _soft_value(total, whole, distances):
    """Return -Σ t log p = W log Σ exp(z - top) - 2 D; ``distances`` is D = Σ t (z - top) / 2."""
    n, f, s = log_in_parts(at_least_1(total.to(tl.float64)))
    log_total = n * LN_2_HIGH + f + (s + n * LN_2_LOW)
    log_total = tl.where(total == 0, float("nan"), log_total)  # no logit is above -inf
    return tl.where(whole == 0, 0.0, whole * log_total) - 2 * distances  # 0 without a target


@triton.jit
def _log2(x):
    """Return log2(x) within 2^-22 in one GPU instruction; the exact function takes 25."""
    return libdevice.fast_log2f(x) if _APPROXIMATE else tl.log2(x)


# The sign of ε, and later of its power, records which side of its target a class is on. A boolean
# would take a predicate register for each element, and a thread has only seven.


@triton.jit
def _bias(p, t, whole):
    """Return ε = p - t / W, below 0 for a class that has the whole target.

    Such a class is alone on its side, so its ε must not be rounded to 0.
    """
    bias = tl.fma(-t, 1 / whole, p)
    below = tl.minimum(bias, -_LEAST_BIAS, propagate_nan=tl.PropagateNan.ALL)
    return tl.where(t == whole, below, bias)


@triton.jit
def _log_size(bias, t, log_p):
    """Return log2 |ε|; where the target is 0 that is log2 p, which does not underflow."""
    return tl.where(tl.abs(t) < _LEAST_TARGET, log_p, _log2(tl.abs(bias)))


@triton.jit
def _with_sign_of(bias, power):
    sign = bias.to(tl.int32, bitcast=True) & -0x80000000
    return (power.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def _root_or_square(x, special: tl.constexpr):
    """Return x^k for k = ½ and 2."""
    return tl.sqrt(x) if special == "1/2" else x * x


@triton.jit
def _scales(strength, above_power, below_power):
    """Return the factors of the powers on each side; 0 if one side is empty (Eq. 4)."""
    strength = tl.where(below_power == 0, 0.0, strength)
    above_scale = strength / tl.where(above_power == 0, 1.0, above_power)
    below_scale = strength / tl.where(below_power == 0, 1.0, below_power)
    return above_scale, below_scale


@triton.jit
def _soft_strength(top, total, k):
    """Return S^k for S = 2^top · total."""
    n, f, s = log_in_parts(at_least_1(total.to(tl.float64)))
    power, _ = exp_and_error(k * tl.minimum((top + n) * LN_2 + (f + s), 0.0))
    return power


# --- short rows -----------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["k", "rows", "ignore_index", "smoothing"])
def soft_tile(
    z, target, ks, k, weight, parts, grad, scaled, values, out,
    rows, stride, classes, k_stride, grad_stride, ignore_index, target_stride, smoothing,
    special: tl.constexpr, probabilities: tl.constexpr, reduced: tl.constexpr, skip: tl.constexpr,
    vector: tl.constexpr, tile_rows: tl.constexpr, outer: tl.constexpr, inner: tl.constexpr,
):  # fmt: skip
    """Compute the values and pseudo-gradients of short rows; arguments are as in `labels.tile`."""
    if skip or scaled is not None:  # noqa: SIM102 (the compiler would evaluate both conditions)
        if is_done(grad, scaled, skip):
            return
    first = tl.program_id(0).to(tl.int64) * tile_rows
    if skip:
        for begin in range(first, rows, tl.num_programs(0).to(tl.int64) * tile_rows):
            _soft_tile(z, target, ks, k, weight, parts, grad, values, out, begin, rows, stride,
                       classes, k_stride, grad_stride, ignore_index, target_stride, smoothing,
                       special, probabilities, reduced, vector, tile_rows, outer,
                       inner)  # fmt: skip
    else:
        _soft_tile(z, target, ks, k, weight, parts, grad, values, out, first, rows, stride,
                   classes, k_stride, grad_stride, ignore_index, target_stride, smoothing,
                   special, probabilities, reduced, vector, tile_rows, outer, inner)  # fmt: skip


@triton.jit
def _soft_tile(
    z, target, ks, k, weight, parts, grad, values, out, first, rows, stride,
    classes, k_stride, grad_stride, ignore_index, target_stride, smoothing,
    special: tl.constexpr, probabilities: tl.constexpr, reduced: tl.constexpr,
    vector: tl.constexpr, tile_rows: tl.constexpr, outer: tl.constexpr, inner: tl.constexpr,
):  # fmt: skip
    """Compute the tile that begins at row ``first``, laid out as in `labels._tile`."""
    classes *= vector
    row = first + tl.arange(0, tile_rows)
    column = columns_of(outer, inner)
    exists, inside = row < rows, column < classes
    counted, known, y = exists, 1.0, row  # probabilities have no label
    if not probabilities:
        counted, known, y = _label_of(target, row, exists, classes, ignore_index)
    k = tl.zeros((tile_rows,), tl.float32) + sensitivity_of(k, ks, k_stride, row, exists)
    at = beside(row * stride * vector) + column
    mask = beside(counted) & inside
    x = tl.load(z + at, mask=mask, other=float("-inf")).to(tl.float32)
    at = beside(row * target_stride * vector) + column
    t = _target(target, at, mask, beside(y), column, weight, smoothing, classes, probabilities)

    whole = tl.zeros((tile_rows,), tl.float32) + known  # smoothing alone leaves W = 1
    if probabilities or weight is not None:
        whole *= sum_of_rows(t)
    # Halved, because the difference of two extreme logits would overflow.
    half_top = 0.5 * tl.maximum(max_of_rows(x), LOWEST)
    d = tl.fma(x, 0.5, -beside(half_top))
    e = tl.exp2(d * (2 * LOG2_E))
    total = sum_of_rows(e)
    value = _soft_value(total, whole, sum_of_rows(_distance(t, d)))
    value = tl.where(counted, value, 0.0).to(tl.float64)
    if reduced:
        tl.store(values + first // tile_rows, tl.sum(value, 0))
    elif values is not None:
        tl.store(values + row, value, mask=exists)

    if out is not None:
        nothing = tl.abs(whole) < _LEAST_TARGET
        factor = tl.where(counted & (nothing == 0), whole, 0.0)
        factor = factor_of(factor, parts, None, grad, grad_stride, row, counted)
        whole = tl.where(nothing, 1.0, whole)
        f = _rule_of_tile(d, e, t, total, whole, factor, k, special)
        f = tl.where(beside(factor == 0), 0.0, f)
        at = beside(row * classes) + column
        tl.store(out + at, f.to(out.dtype.element_ty), mask=beside(exists) & inside)


@triton.jit
def _rule_of_tile(d, e, t, total, whole, factor, k, special: tl.constexpr):
    """Return the rule times each row's factor, from d = (z - top) / 2 and e = exp(z - top)."""
    if special == "1":
        f = tl.fma(-t, beside(1 / whole), e * beside(1 / total)) * beside(factor)
    else:
        bias = _bias(e * beside(1 / total), t, beside(whole))
        if special == "any":
            log_p = tl.fma(d, 2 * LOG2_E, -beside(tl.log2(total)))
            size = _log_size(bias, t, log_p)
            above_top = tl.maximum(max_of_rows(tl.where(bias < 0, LOWEST, size)), LOWEST)
            below_top = tl.log2(tl.maximum(-min_of_rows(bias), _LEAST_NORMAL))
            size -= tl.where(bias < 0, beside(below_top), beside(above_top))
            power = tl.exp2(beside(k) * size)
            above_total = sum_of_rows(tl.where(bias < 0, 0.0, tl.exp2(size)))
            strength = _soft_strength(above_top, above_total, k)
        else:
            power = _root_or_square(tl.abs(bias), special)
            strength = _root_or_square(sum_of_rows(tl.maximum(bias, 0.0)), special)
        power = _with_sign_of(bias, power)
        above_scale, below_scale = _scales(
            factor * strength,
            sum_of_rows(tl.maximum(power, 0.0)),
            -sum_of_rows(tl.minimum(power, 0.0)),
        )
        f = power * tl.where(power < 0, beside(below_scale), beside(above_scale))
    return f


# --- long rows ------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["k", "ignore_index", "smoothing"])
def soft_row(
    z, target, ks, k, weight, parts, grad, values, out, found, given,
    stride, classes, k_stride, grad_stride, ignore_index, target_stride, smoothing,
    special: tl.constexpr, probabilities: tl.constexpr, lanes: tl.constexpr, vector: tl.constexpr,
):  # fmt: skip
    """Compute the value and pseudo-gradient of a long row.

    Passes alternate in direction, so that each starts with elements that are still cached. A row is
    too long to stay in the cache, so all but the first pass may be left to the backward pass at no
    cost: ``found`` and ``given`` are the top, Σ exp(z - top) and W.
    """
    i = tl.program_id(0).to(tl.int64)
    z += i * stride
    counted, known, y, to_read = True, 1.0, i, classes  # probabilities have no label
    if probabilities:
        target += i * target_stride
    else:
        y = tl.load(target + i).to(tl.int64)
        counted = y != ignore_index
        known = tl.where((y >= 0) & (y < classes), 1.0, float("nan"))
        y = y.to(tl.int32)
        to_read = tl.where(counted, classes, 0)
    k = sensitivity_of(k, ks, k_stride, i, counted)
    columns = tl.arange(0, lanes)[:, None] * vector + tl.arange(0, vector)[None, :]
    block: tl.constexpr = lanes * vector
    last = (classes - 1) // block * block

    if given is not None:
        top, total, whole = kept(given, i, counted)
    else:
        top, total, whole, distances = _first_pass(
            z, target, y, weight, smoothing, classes, columns, to_read, probabilities, lanes, block
        )
        whole = known * whole
        if values is not None:
            value = _soft_value(total, whole, distances)
            tl.store(values + i, tl.where(counted, value, 0.0))
        total = total.to(tl.float32)
        if found is not None:
            keep(found, i, True, top, total, whole)

    if out is not None:
        log_total = tl.log2(total)
        nothing = tl.abs(whole) < _LEAST_TARGET
        factor = tl.where(counted & (nothing == 0), whole, 0.0)
        factor = factor_of(factor, parts, None, grad, grad_stride, i, counted)
        whole = tl.where(nothing, 1.0, whole)
        above_top, below_top, above_scale, below_scale = top, top, factor, factor
        if special != "1":
            above_top, below_top, above_scale, below_scale = _sums_of_sides(
                z, target, y, weight, smoothing, classes, columns, to_read, last, top, log_total,
                whole, factor, k, special, probabilities, lanes, block,
            )  # fmt: skip
        _write_soft_row(
            z, target, out + i * classes, y, weight, smoothing, classes, columns, to_read, last,
            top, total, log_total, whole, factor, k, above_top, below_top, above_scale, below_scale,
            special, probabilities, block,
        )  # fmt: skip


@triton.jit
def _half_and_target(
    z, target, column, mask, y, weight, smoothing, classes, probabilities: tl.constexpr
):
    """Return half the logits in the given columns (so that differences stay finite), and t."""
    x = 0.5 * tl.load(z + column, mask=mask, other=float("-inf")).to(tl.float32)
    t = _target(target, column, mask, y, column, weight, smoothing, classes, probabilities)
    return x, t


@triton.jit
def _first_pass(
    z, target, y, weight, smoothing, classes, columns, to_read,
    probabilities: tl.constexpr, lanes: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Return half the top, Σ exp(z - top), W and Σ t (z - top) / 2; sums in float64, W rounded."""
    lane_top = tl.full((lanes,), 0.5 * LOWEST, tl.float32)
    lane_total = tl.zeros((lanes,), tl.float32)
    lane_whole = tl.zeros((lanes,), tl.float32)
    lane_distance = tl.zeros((lanes,), tl.float32)
    for start in range(0, to_read, block):
        column = start + columns
        mask = column < classes
        x, t = _half_and_target(z, target, column, mask, y, weight, smoothing, classes,
                                probabilities)  # fmt: skip
        new = tl.maximum(lane_top, tl.max(x, 1))
        d = x - new[:, None]
        lane_distance += _distance(lane_whole, lane_top - new) + tl.sum(_distance(t, d), 1)
        lane_whole -= tl.sum(-t, 1)  # Triton 3.6 fails to compile the sum of a bare load
        lane_total *= tl.exp2((lane_top - new) * (2 * LOG2_E))
        lane_total += tl.sum(tl.exp2(d * (2 * LOG2_E)), 1)
        lane_top = new
    top = tl.max(lane_top, 0)
    lane_total *= tl.exp2((lane_top - top) * (2 * LOG2_E))
    lane_distance += _distance(lane_whole, lane_top - top)
    total = tl.sum(lane_total.to(tl.float64), 0)
    whole = tl.sum(lane_whole.to(tl.float64), 0).to(tl.float32)
    return top, total, whole, tl.sum(lane_distance.to(tl.float64), 0)


@triton.jit
def _sums_of_sides(
    z, target, y, weight, smoothing, classes, columns, to_read, last, top, log_total, whole, factor,
    k, special: tl.constexpr, probabilities: tl.constexpr, lanes: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Return the largest log2 |ε| above and below 0 (if ``special`` is "any"), and the scales."""
    above_top = tl.full((lanes,), LOWEST, tl.float32)
    above_total = tl.zeros((lanes,), tl.float32)
    above_power = tl.zeros((lanes,), tl.float32)
    below_top = tl.full((lanes,), LOWEST, tl.float32)
    below_power = tl.zeros((lanes,), tl.float32)
    for step in range(0, to_read, block):
        column = last - step + columns
        mask = column < classes
        x, t = _half_and_target(z, target, column, mask, y, weight, smoothing, classes,
                                probabilities)  # fmt: skip
        log_p = (x - top) * (2 * LOG2_E) - log_total
        bias = _bias(tl.exp2(log_p), t, whole)
        if special == "any":
            size = _log_size(bias, t, log_p)
            new = tl.maximum(above_top, tl.max(tl.where(bias < 0, LOWEST, size), 1))
            above_total *= tl.exp2(above_top - new)
            above_power *= tl.exp2(k * (above_top - new))
            above_top = new
            new = tl.log2(tl.maximum(-tl.min(bias, 1), _LEAST_NORMAL))
            new = tl.maximum(below_top, new)
            below_power *= tl.exp2(k * (below_top - new))
            below_top = new
            size -= tl.where(bias < 0, below_top[:, None], above_top[:, None])
            power = tl.exp2(k * size)
            above_total += tl.sum(tl.where(bias < 0, 0.0, tl.exp2(size)), 1)
        else:
            power = _root_or_square(tl.abs(bias), special)
            above_total += tl.sum(tl.maximum(bias, 0.0), 1)
        power = _with_sign_of(bias, power)
        above_power += tl.sum(tl.maximum(power, 0.0), 1)
        below_power -= tl.sum(tl.minimum(power, 0.0), 1)
    of_above, of_below = top, top  # placeholders unless ``special`` is "any"
    if special == "any":
        _, sum_above = _join_side(above_top, above_total, 1.0)
        of_above, power_above = _join_side(above_top, above_power, k)
        of_below, power_below = _join_side(below_top, below_power, k)
        strength = _soft_strength(of_above, sum_above, k)
    else:
        power_above, power_below = tl.sum(above_power, 0), tl.sum(below_power, 0)
        strength = _root_or_square(tl.sum(above_total, 0), special)
    above_scale, below_scale = _scales(factor * strength, power_above, power_below)
    return of_above, of_below, above_scale, below_scale


@triton.jit
def _join_side(top, power_total, k):
    highest = tl.max(top, 0)
    total = tl.sum((power_total * tl.exp2(k * (top - highest))).to(tl.float64), 0)
    return highest, total.to(tl.float32)


@triton.jit
def _write_soft_row(
    z, target, out, y, weight, smoothing, classes, columns, to_read, last, top, total, log_total,
    whole, factor, k, above_top, below_top, above_scale, below_scale,
    special: tl.constexpr, probabilities: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Write the pseudo-gradient, in the direction opposite to the previous pass."""
    for step in range(0, classes, block):
        start = last - step if special == "1" else step
        column = start + columns
        inside, mask = column < classes, column < to_read
        x, t = _half_and_target(z, target, column, mask, y, weight, smoothing, classes,
                                probabilities)  # fmt: skip
        if special == "1":
            p = tl.exp2((x - top) * (2 * LOG2_E)) * (1 / total)
            f = (p - t * (1 / whole)) * factor
        else:
            log_p = (x - top) * (2 * LOG2_E) - log_total
            bias = _bias(tl.exp2(log_p), t, whole)
            if special == "any":
                size = _log_size(bias, t, log_p)
                power = tl.exp2(k * (size - tl.where(bias < 0, below_top, above_top)))
            else:
                power = _root_or_square(tl.abs(bias), special)
            f = power * tl.where(bias < 0, -below_scale, above_scale)
        f = tl.where(factor == 0, 0.0, f)
        tl.store(out + column, f.to(out.dtype.element_ty), mask=inside)
