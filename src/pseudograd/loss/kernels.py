"""Eq. 5 on the GPU, as Triton kernels.

All are the formula of `pseudograd.rules.paper` again: of the classes other than the label y they
need the largest logit (``top``), Σ exp(z - top) and Σ exp(k (z - top)). The first sum gives the
margin, and so the value and the strength A; the second turns powers into shares of A.

- `tile` takes several short rows at once, each read once and kept on the chip.
- `row` takes one long row: a pass for the top and the sums, and a pass for the gradient, whose
  logits then mostly come from the L2 cache.
- `soft_tile` and `soft_row` are the same for soft targets: probabilities, and smoothed labels.
- `count_labels` and `sum_values` are the sums of a reduction: of weights, and of values.
- `rescale` multiplies what `pseudograd.loss.linear` has computed.

Arithmetic is float32, except that of labels Σ exp(z - top) is a float64 number in the end: k
multiplies the rounding of the margin. So it is for the value of long rows of soft targets. Where
two threads could add in different orders, none of them does: results do not change from run to run.

A pointer that is None is a constant to the compiler, which leaves out what depends on it.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from pseudograd.rules.paper import GREATEST_K, LEAST_K

PARTS = 32
_PARTS = tl.constexpr(PARTS)
_LEAST_K, _GREATEST_K = tl.constexpr(LEAST_K), tl.constexpr(GREATEST_K)
_LOG2_E = tl.constexpr(1.4426950408889634)
_LOG2_E_LOW = tl.constexpr(1.9259629911266175e-08)  # what float32 rounds off
# ln 2 in two parts: the first has few digits, so that its products with small integers are exact.
_LN_2_HIGH = tl.constexpr(0.693145751953125)
_LN_2_LOW = tl.constexpr(1.428606820309417e-06)
_LN_2 = tl.constexpr(0.6931471805599453)
# Not -inf: where no class is left, the difference to the top is then no NaN.
_LOWEST = tl.constexpr(-3.4028234663852886e38)
# One over it is still a number.
_LEAST_TARGET = tl.constexpr(1e-37)
_LEAST_NORMAL = tl.constexpr(1.1754943508222875e-38)
_LEAST_BIAS = tl.constexpr(2**-24)  # the least that p - 1 can be in float32, unless it is 0
# A tile of rows has three dimensions: rows, the pieces of each, and a piece's columns, which come
# last. Threads have to be dealt out over columns first and rows next. After the last dimension the
# compiler goes on with the one before it, up to Triton 3.6 with the first: so pieces are the other.
_PIECES = tl.constexpr(1 if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7) else 0)


@triton.jit
def _powers(d, k, special: tl.constexpr):
    """exp(d), what has been rounded off (over ln 2), and exp(k d), for d ≤ 0.

    Exponentials are dear, so where one will do there is one. What they round off is the same for
    equal logits, so that their sum has all of it, and a large k multiplies that; for k = ½, 1 and 2
    it is left at that.
    """
    lost = 0.0
    if special == "1":
        e = tl.exp2(d * _LOG2_E)
        power = e
    elif special == "1/2":
        power = tl.exp2(d * (0.5 * _LOG2_E))
        e = power * power
    elif special == "2":
        e = tl.exp2(d * _LOG2_E)
        power = e * e
    else:
        power = tl.exp2(d * (k * _LOG2_E))
        d = tl.maximum(d, -1e30, propagate_nan=tl.PropagateNan.ALL)  # of -inf nothing is lost
        x = d * _LOG2_E
        e = tl.exp2(x)
        lost = e * tl.fma(d, _LOG2_E_LOW, tl.fma(d, _LOG2_E, -x))
    return e, lost, power


@triton.jit
def _whole_powers(d, k, special: tl.constexpr):
    """exp(d) and exp(k d), with what is rounded off put back into the first."""
    e, lost, power = _powers(d, k, special)
    if special == "any":
        e += lost * _LN_2
    return e, power


@triton.jit
def _power(d, k, special: tl.constexpr):
    """exp(k d) alone."""
    if special == "1":
        factor = _LOG2_E
    elif special == "1/2":
        factor = 0.5 * _LOG2_E
    elif special == "2":
        factor = 2 * _LOG2_E
    else:
        factor = k * _LOG2_E
    return tl.exp2(d * factor)


@triton.jit
def _at_least_1(total):
    """The sum, which has a term of 1 unless there is no term at all. NaN stays NaN."""
    return tl.where(total < 1, 1.0, total)


# All threads of a row compute its few numbers. In float64, with functions of a hundred instructions
# each, that would take longer than the row; so what the margin is made of is kept in two parts.


@triton.jit
def _difference(a, b):
    """a - b, and what it has rounded off."""
    difference = a - b
    back = difference - a
    lost = (a - (difference - back)) - (b + back)
    return difference, tl.where(tl.abs(difference) < float("inf"), lost, 0.0)


@triton.jit
def _exp(x):
    """exp(x) for x ≤ 0, where `tl.exp` loses some of a large x, and what it has rounded off."""
    x = tl.where(x < -200.0, -200.0, x)
    n = tl.floor(x * _LOG2_E + 0.5)
    r = (x - n * _LN_2_HIGH) - n * _LN_2_LOW
    q = 1 / 120 + r * (1 / 720 + r * (1 / 5040))
    q = r * (1 + r * (1 / 2 + r * (1 / 6 + r * (1 / 24 + r * q))))
    p, scale = 1 + q, tl.exp2(n)
    return p * scale, (q - (p - 1)) * scale


@triton.jit
def _log_of_float32(x):
    """n, f and s, with log(x) = n ln 2 + f + s: n and f exact, and s small."""
    bits = x.to(tl.int32, bitcast=True)
    n = (bits - 0x3F3504F3) >> 23  # what is left is between √½ and √2
    f = (bits - (n << 23)).to(tl.float32, bitcast=True) - 1
    # The polynomial that is nearest to (log(1 + f) - f + f²/2) / f³ there: within 1.8e-7.
    p = 0.126223192 + f * -0.0790274367
    p = -0.166412815 + f * (0.142144963 + f * (-0.129981831 + f * p))
    p = 0.333333313 + f * (-0.25000307 + f * (0.200010449 + f * p))
    return n.to(tl.float32), f, f * f * (f * p - 0.5)


@triton.jit
def _log(x):
    """The same for x ≥ 1 in float64."""
    near = x.to(tl.float32)
    n, f, s = _log_of_float32(near)
    return n, f, s + (x - near).to(tl.float32) / near


@triton.jit
def _outcome(z_y, top, total, k):
    """-log p_y and A = (1 - p_y)^k, from the numbers of a row."""
    n, f, s = _log(_at_least_1(total))
    # The margin can be much smaller than what it is made of: z_y - top - n ln 2 - f - s.
    margin, lost_1 = _difference(z_y, top)
    margin, lost_2 = _difference(margin, n * _LN_2_HIGH)
    margin, lost_3 = _difference(margin, f)
    margin, lost = _difference(margin, s + n * _LN_2_LOW - lost_1 - lost_2 - lost_3)
    # Where logits say nothing, as in PyTorch: z_y is +inf, or no logit is above -inf.
    nothing = (z_y == float("inf")) | ((z_y == float("-inf")) & (total == 0))
    margin = tl.where(nothing, float("nan"), margin)
    # With no other class left the label is certain, even if its logit is as low as the top.
    margin = tl.where((total == 0) & (tl.abs(z_y) < float("inf")), float("inf"), margin)
    x, x_lost = _exp(-tl.abs(margin))
    x_lost -= x * tl.where(margin > 0, lost, -lost)
    near = 1 + x
    n, f, s = _log_of_float32(near)
    small = s + n * _LN_2_LOW + (x - (near - 1) + x_lost) / near
    tail = (n * _LN_2_HIGH + f) + small  # log(1 + x)
    tail_lost = small - (tail - (n * _LN_2_HIGH + f))
    value = tail - tl.minimum(margin, 0.0)
    log_doubt, lost_here = _difference(-tail, tl.maximum(margin, 0.0))
    lost = lost_here - tail_lost - tl.where(margin > 0, lost, 0.0)
    return value, _to_the_power(log_doubt, lost, k)


@triton.jit
def _to_the_power(logarithm, lost, k):
    """exp(k (logarithm + lost)) for a logarithm ≤ 0: k multiplies all that is rounded off."""
    exponent = k * logarithm
    lost = tl.fma(k, logarithm, -exponent) + k * lost
    power, _ = _exp(exponent)
    return power + power * tl.where(exponent > -200.0, lost, 0.0)


@triton.jit
def _sensitivity(k, ks, k_stride, row, mask):
    """k as a number, or that of the row: NaN, to be seen, if it is not above 0 and finite."""
    if ks is not None:
        k = tl.load(ks + row * k_stride, mask=mask, other=1.0).to(tl.float32)
    return tl.where((k >= _LEAST_K) & (k <= _GREATEST_K), k, float("nan"))


@triton.jit
def _weight_of(weight, y, labelled):
    """The label's class weight. An index out of range has none, and will be NaN."""
    if weight is not None:
        w = tl.load(weight + y, mask=labelled, other=float("nan")).to(tl.float32)
    else:
        w = tl.where(labelled, 1.0, float("nan"))
    return w


@triton.jit
def _factor(w, parts, divisor, grad, grad_stride, row, mask):
    """What a row's pseudo-gradient is multiplied by: weight, mean, and the gradient from above."""
    if parts is not None:
        divisor = tl.sum(tl.load(parts + tl.arange(0, _PARTS)), 0)
    if divisor is not None:
        w = tl.where(w == 0, 0.0, w / divisor.to(tl.float32))
        w = tl.where(divisor == 0, 0.0, w)
    if grad is not None:
        above = tl.load(grad + row * grad_stride, mask=mask, other=0.0).to(tl.float32)
        w = tl.where(above == 0, 0.0, w * above)
    return w


@triton.jit
def _is_done(grad, scaled, skip: tl.constexpr):
    """Whether nothing is left to do: with ``skip``, where the gradient from above is 1.

    If the forward pass had expected something else of it, ``scaled`` takes what to expect. That is
    the processor's memory, and slow to write to, so else it is left alone.
    """
    is_1 = tl.load(grad).to(tl.float32) == 1.0
    unexpected = is_1 != skip
    tl.store(scaled, 1 if skip else 0, mask=unexpected & (tl.program_id(0) == 0))
    return is_1 & skip


@triton.jit
def _keep(found, row, mask, a, b, c):
    """Store the three numbers that a later backward pass needs of a row."""
    tl.store(found + 3 * row, a, mask=mask)
    tl.store(found + 3 * row + 1, b, mask=mask)
    tl.store(found + 3 * row + 2, c, mask=mask)


@triton.jit
def _kept(given, row, mask):
    """Load them; of what is ignored, nothing."""
    a = tl.load(given + 3 * row, mask=mask, other=0.0)
    b = tl.load(given + 3 * row + 1, mask=mask, other=0.0)
    c = tl.load(given + 3 * row + 2, mask=mask, other=0.0)
    return a, b, c


@triton.jit
def _load_kept(given, grad, grad_stride, row, mask):
    """The same again, times the gradient from above; of what is ignored, nothing."""
    top, share, scale = _kept(given, row, mask)
    if grad is not None:
        factor = tl.load(grad + row * grad_stride, mask=mask, other=0.0).to(tl.float32)
        share *= factor
        scale = tl.where(factor == 0, 0.0, scale * factor)
    return top, share, scale


@triton.jit
def _beside(x):
    """One number for each row, beside a tile of rows."""
    return tl.expand_dims(tl.expand_dims(x, _PIECES), 2)


@triton.jit
def _columns(outer: tl.constexpr, inner: tl.constexpr):
    """The columns of a tile of rows: ``outer`` pieces of ``inner`` columns."""
    piece = tl.expand_dims(tl.expand_dims(tl.arange(0, outer), 1 - _PIECES), 2)
    return piece * inner + tl.arange(0, inner)[None, None, :]


@triton.jit
def _max_of_rows(x):
    return tl.max(tl.max(x, _PIECES), 1)


@triton.jit
def _min_of_rows(x):
    return tl.min(tl.min(x, _PIECES), 1)


@triton.jit
def _sum_of_rows(x):
    return tl.sum(tl.sum(x, _PIECES), 1)


@triton.jit
def _sum_of_pairs(e, axis: tl.constexpr):
    """Sums of neighbours along one of the first two of three dimensions, exact for equal ones."""
    count: tl.constexpr = e.shape[axis]
    if count > 1:
        if axis == 0:
            e = tl.reshape(e, (count // 2, 2, e.shape[1], e.shape[2]))
        else:
            e = tl.reshape(e, (e.shape[0], count // 2, 2, e.shape[2]))
        e = tl.sum(e, axis + 1)
    return e


@triton.jit
def _sum_in_float64(e):
    """Sums of a tile of rows, groups of 8 in float32: k will multiply the rounding."""
    for _ in tl.static_range(3):
        e = _sum_of_pairs(e, _PIECES)
    return _sum_of_rows(e.to(tl.float64))


@triton.jit(do_not_specialize=["k", "rows", "ignore_index"])
def tile(
    z, target, ks, k, weight, parts, grad, scaled, values, out, found, given,
    rows, stride, classes, k_stride, grad_stride, ignore_index,
    special: tl.constexpr, reduced: tl.constexpr, mean: tl.constexpr, skip: tl.constexpr,
    vector: tl.constexpr, tile_rows: tl.constexpr, outer: tl.constexpr, inner: tl.constexpr,
):  # fmt: skip
    """Values and pseudo-gradients of short rows.

    ``stride`` and ``classes`` are given in vectors of so many elements, which tells the compiler
    that it may load and store whole vectors. With ``mean``, one program has all rows, and counts
    and divides by itself. With ``skip``, nothing is done where ``grad`` is 1: ``out`` then has been
    computed already. So few programs are launched, and if need be they go on to further rows. Of
    ``scaled`` see `_is_done`.

    A backward pass that comes later need not sum again: ``found`` (rows, 3) takes what it needs of
    each row, the top, the share and the scale, and ``given`` has it.
    """
    if scaled is not None:  # noqa: SIM102 (the compiler would look at both conditions)
        if _is_done(grad, scaled, skip):
            return
    first = tl.program_id(0).to(tl.int64) * tile_rows
    if skip:
        for begin in range(first, rows, tl.num_programs(0).to(tl.int64) * tile_rows):
            _tile(z, target, ks, k, weight, parts, grad, values, out, found, given, begin,
                  rows, stride, classes, k_stride, grad_stride, ignore_index,
                  special, reduced, mean, vector, tile_rows, outer, inner)  # fmt: skip
    else:
        _tile(z, target, ks, k, weight, parts, grad, values, out, found, given, first,
              rows, stride, classes, k_stride, grad_stride, ignore_index,
              special, reduced, mean, vector, tile_rows, outer, inner)  # fmt: skip


@triton.jit
def _tile(
    z, target, ks, k, weight, parts, grad, values, out, found, given, first,
    rows, stride, classes, k_stride, grad_stride, ignore_index,
    special: tl.constexpr, reduced: tl.constexpr, mean: tl.constexpr, vector: tl.constexpr,
    tile_rows: tl.constexpr, outer: tl.constexpr, inner: tl.constexpr,
):  # fmt: skip
    """The rows from ``first`` on.

    All threads of a row compute its numbers, so there should be few of them. A row is laid out as
    ``outer`` pieces of ``inner`` columns: threads share a piece, and have all pieces.
    """
    classes *= vector
    column = _columns(outer, inner)
    inside = column < classes
    row = first + tl.arange(0, tile_rows)
    exists = row < rows
    y = tl.load(target + row, mask=exists, other=0).to(tl.int64)
    counted = exists & (y != ignore_index)
    labelled = counted & (y >= 0) & (y < classes)
    k = tl.zeros((tile_rows,), tl.float32) + _sensitivity(k, ks, k_stride, row, exists)
    begin = row * stride * vector
    at = _beside(begin) + column
    x = tl.load(z + at, mask=_beside(counted) & inside, other=float("-inf")).to(tl.float32)
    on_label = column == _beside(y.to(tl.int32))
    # Where ``out`` is ``z``, a thread writes over no element but those that it has read itself.
    if given is not None:
        top, share, scale = _load_kept(given, grad, grad_stride, row, counted)
        power = _power(x - _beside(top), _beside(k), special)
    else:
        z_y = tl.load(z + begin + y, mask=labelled, other=float("nan")).to(tl.float32)
        x = tl.where(on_label, float("-inf"), x)
        top = tl.maximum(_max_of_rows(x), _LOWEST)
        e, lost, power = _powers(x - _beside(top), _beside(k), special)
        total = _sum_in_float64(e)
        if special == "any":
            total += _sum_of_rows(lost) * _LN_2
        value, strength = _outcome(z_y, top, total, k)
        w = tl.where(counted, _weight_of(weight, y, labelled), 0.0)
        divisor = None
        if mean:
            divisor = tl.sum(w.to(tl.float64), 0)
        value = tl.where(counted, w * value, 0.0)
        if reduced:
            value = tl.sum(value.to(tl.float64), 0)
            if mean:
                value /= divisor
            _store_sum(values + first // tile_rows, value)
        elif values is not None:
            tl.store(values + row, value, mask=exists)
        power_total = total.to(tl.float32) if special == "1" else _sum_of_rows(power)
        factor = _factor(w, parts, divisor, grad, grad_stride, row, exists)
        scale = tl.where(counted & (factor != 0), factor * strength, 0.0)
        share = scale / _at_least_1(power_total)
        if found is not None:
            _keep(found, row, exists, top, share, scale)

    if out is not None:
        f = tl.where(on_label, -_beside(scale), power * _beside(share))
        # Ignored rows may hold anything; NaN times 0 would be NaN.
        f = tl.where(_beside(scale == 0), 0.0, f)
        at = _beside(row * classes) + column
        tl.store(out + at, f.to(out.dtype.element_ty), mask=_beside(exists) & inside)


@triton.jit
def _store_sum(to, value):
    """Store a sum, in float64 if it is but a part of one."""
    if to.dtype.element_ty != tl.float64:
        value = value.to(tl.float32)
    tl.store(to, value.to(to.dtype.element_ty))


@triton.jit
def _sum_of_vectors(e):
    """Sums of (lanes, n), n up to 8, exact where the n are equal."""
    sums = tl.reshape(e, (e.shape[0], e.shape[1], 1))
    for _ in tl.static_range(3):
        sums = _sum_of_pairs(sums, 1)
    return tl.reshape(sums, (e.shape[0],))


@triton.jit
def _take_in(x, top, total, lost, power_total, k, special: tl.constexpr):
    """More elements (lanes, n) for each lane's top and sums, with no word to other lanes.

    ``lost`` is what the total has rounded off, of which too equal logits have the same again.
    """
    new = tl.maximum(top, tl.max(x, 1))
    e, e_lost, power = _powers(x - new[:, None], k, special)
    scale, power_scale = _whole_powers(top - new, k, special)
    gain = _sum_of_vectors(e) if special == "any" else tl.sum(e, 1)
    before = total * scale
    total = before + gain
    if special == "any":
        lost = lost * scale + tl.sum(e_lost, 1) * _LN_2 + (gain - (total - before))
    if special != "1":
        power_total = power_total * power_scale + tl.sum(power, 1)
    return new, total, lost, power_total


@triton.jit
def _join(top, total, lost, power_total, k, special: tl.constexpr):
    """The top and the sums of all lanes."""
    highest = tl.max(top, 0)
    scale, power_scale = _whole_powers(top - highest, k, special)
    power_total = power_total * power_scale if special != "1" else total * scale
    total = tl.sum((total * scale).to(tl.float64) + (lost * scale).to(tl.float64), 0)
    return highest, total, tl.sum(power_total.to(tl.float64), 0)


@triton.jit(do_not_specialize=["k", "ignore_index"])
def row(
    z, target, ks, k, weight, parts, grad, scaled, values, out, found, given, statistics,
    stride, classes, k_stride, grad_stride, ignore_index,
    special: tl.constexpr, skip: tl.constexpr, vector: tl.constexpr, lanes: tl.constexpr,
):  # fmt: skip
    """Value and pseudo-gradient of a long row; ``skip``, ``found`` and ``given`` are as in `tile`.

    The row is taken as whole aligned vectors, ``lanes`` of them at a time, and the few elements
    before and after them. Each lane has a top and sums of its own, so that lanes need not wait for
    each other before the end of the row.

    Where the classes are split among several devices, ``statistics`` (4, rows) takes the numbers of
    this part of the row, and ``given`` has what follows from those of all parts.
    """
    if scaled is not None:  # noqa: SIM102 (the compiler would look at both conditions)
        if _is_done(grad, scaled, skip):
            return
    i = tl.program_id(0).to(tl.int64)
    y = tl.load(target + i).to(tl.int64)
    counted = y != ignore_index
    labelled = counted & (y >= 0) & (y < classes)
    k = _sensitivity(k, ks, k_stride, i, counted)
    label = tl.where(labelled, y, -1).to(tl.int32)
    begin = i * stride
    aligned = (begin + vector - 1) // vector * vector
    head = (aligned - begin).to(tl.int32)
    vectors = (classes - head) // vector
    to_read = tl.where(counted, vectors, 0)  # of what is ignored, nothing
    lane, inner = tl.arange(0, lanes), tl.arange(0, vector)[None, :]
    # The elements outside whole vectors: as many lanes before and after, most of them empty.
    edge = tl.arange(0, 2 * vector)
    edge_column = tl.where(edge < vector, edge, classes - 2 * vector + edge)
    on_edge = tl.where(edge < vector, edge < head, edge_column >= head + vectors * vector)
    edge_to_read = on_edge & (edge < tl.where(counted, 2 * vector, 0))
    # Before threads meet: after that, where ``out`` is ``z``, some of them may have written.
    z_y = tl.load(z + begin + y, mask=labelled, other=float("nan")).to(tl.float32)
    if vector > 1:
        left = tl.load(z + begin + edge_column, mask=edge_to_read, other=float("-inf"))
        left = tl.where(edge_column == label, float("-inf"), left.to(tl.float32))

    if given is not None:
        top, share, scale = _load_kept(given, grad, grad_stride, i, counted)
    else:
        lane_top = tl.full((lanes,), _LOWEST, tl.float32)
        lane_total = tl.zeros((lanes,), tl.float32)
        lane_lost = tl.zeros((lanes,), tl.float32)
        lane_power = tl.zeros((lanes,), tl.float32)
        for start in tl.range(0, to_read, lanes, num_stages=1):
            at = (start + lane)[:, None] * vector + inner
            mask = (start + lane < to_read)[:, None]
            x = tl.load(z + aligned + at, mask=mask, other=float("-inf"),
                        eviction_policy="evict_last").to(tl.float32)  # fmt: skip
            if (label >= head + start * vector) & (label < head + (start + lanes) * vector):
                x = tl.where(head + at == label, float("-inf"), x)
            lane_top, lane_total, lane_lost, lane_power = _take_in(
                x, lane_top, lane_total, lane_lost, lane_power, k, special
            )
        top, total, power_total = _join(lane_top, lane_total, lane_lost, lane_power, k, special)
        if vector > 1:
            new = tl.maximum(top, tl.max(left, 0))
            e, power = _whole_powers(left - new, k, special)
            rescale, power_rescale = _whole_powers(top - new, k, special)
            total = total * rescale + tl.sum(e.to(tl.float64), 0)
            power_total = power_total * power_rescale + tl.sum(power.to(tl.float64), 0)
            top = new
        if statistics is not None:
            rows = tl.num_programs(0).to(tl.int64)
            tl.store(statistics + i, top.to(tl.float64))
            tl.store(statistics + rows + i, total)
            tl.store(statistics + 2 * rows + i, power_total)
            tl.store(statistics + 3 * rows + i, z_y.to(tl.float64))
        value, strength = _outcome(z_y, top, total, k)
        w = tl.where(counted, _weight_of(weight, y, labelled), 0.0)
        if values is not None:
            tl.store(values + i, tl.where(counted, w * value, 0.0))
        factor = _factor(w, parts, None, grad, grad_stride, i, counted)
        scale = tl.where(counted & (factor != 0), factor * strength, 0.0)
        share = scale / _at_least_1(power_total).to(tl.float32)
        if found is not None:
            _keep(found, i, True, top, share, scale)

    if out is not None:
        out_begin = i * classes
        out_aligned = (out_begin + vector - 1) // vector * vector
        # Ignored rows may hold anything, and NaN times 0 would be NaN: they are not looked at.
        share = tl.where(scale == 0, 0.0, share)
        top = tl.where(scale == 0, 0.0, top)
        k = tl.where(scale == 0, 1.0, k)
        to_read = tl.where(scale == 0, 0, vectors)
        # From the end of the row, which is still in the cache, to its beginning.
        last = (vectors - 1) // lanes * lanes
        for step in tl.range(0, vectors, lanes, num_stages=1):
            start = last - step
            at = (start + lane)[:, None] * vector + inner
            mask = (start + lane < to_read)[:, None]
            x = tl.load(z + aligned + at, mask=mask, other=float("-inf"),
                        eviction_policy="evict_first").to(tl.float32)  # fmt: skip
            f = _power(x - top, k, special) * share
            if (label >= head + start * vector) & (label < head + (start + lanes) * vector):
                f = tl.where(head + at == label, -scale, f)
            mask = (start + lane < vectors)[:, None]
            tl.store(out + out_aligned + at, f.to(out.dtype.element_ty), mask=mask,
                     eviction_policy="evict_first")  # fmt: skip
        if vector > 1:
            left = tl.where(scale == 0, float("-inf"), left)
            edges = _power(left - top, k, special) * share
            edges = tl.where(edge_column == label, -scale, edges)
            tl.store(out + out_begin + edge_column, edges.to(out.dtype.element_ty), mask=on_edge)


# Soft targets: probabilities q, or a label (q = 1 there). With class weights w and smoothing s the
# target is t_j = w_j ((1 - s) q_j + s / C), W is its sum, and the rule is W f(p - t / W).


@triton.jit
def _target(target, at, mask, y, column, weight, smoothing, classes, probabilities: tl.constexpr):
    """t of some columns."""
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
def _distance(t, d):
    """t d, where 0 times infinity is 0."""
    return tl.where(t == 0, 0.0, t * d)


@triton.jit
def _soft_value(total, whole, distances):
    """-Σ t log p = W log Σ exp(z - top) - Σ t (z - top), of which the latter is given as halves."""
    n, f, s = _log(_at_least_1(total.to(tl.float64)))
    log_total = n * _LN_2_HIGH + f + (s + n * _LN_2_LOW)
    log_total = tl.where(total == 0, float("nan"), log_total)  # no logit is above -inf
    return tl.where(whole == 0, 0.0, whole * log_total) - 2 * distances  # without a target, 0


INTERPRETED = not isinstance(_powers, triton.JITFunction)
# Neither the interpreter nor AMD's compiler has that logarithm.
_APPROXIMATE = tl.constexpr(not (INTERPRETED or torch.version.hip))


@triton.jit
def _log2(x):
    """The GPU's own logarithm, within 2^-22; the exact one has 25 instructions."""
    return libdevice.fast_log2f(x) if _APPROXIMATE else tl.log2(x)


# Which side of its target a class is on, above or below, is the sign of its bias, and then of its
# power. Kept apart it would be a bit for each element, and a thread has places for seven.


@triton.jit
def _bias(p, t, whole):
    """p - t / W.

    A class that has all of the target is below in any case, and if it is alone there has all of
    that side's strength: its bias must not be 0, as one may be that has been rounded.
    """
    bias = tl.fma(-t, 1 / whole, p)
    below = tl.minimum(bias, -_LEAST_BIAS, propagate_nan=tl.PropagateNan.ALL)
    return tl.where(t == whole, below, bias)


@triton.jit
def _log_size(bias, t, log_p):
    """The logarithm of |p - t / W| to the base 2. Without a target it is that of p, however low."""
    return tl.where(tl.abs(t) < _LEAST_TARGET, log_p, _log2(tl.abs(bias)))


@triton.jit
def _with_sign_of(bias, power):
    sign = bias.to(tl.int32, bitcast=True) & -0x80000000
    return (power.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def _root_or_square(x, special: tl.constexpr):
    """x^k for k = ½ and 2."""
    return tl.sqrt(x) if special == "1/2" else x * x


@triton.jit
def _scales(strength, above_power, below_power):
    """What the powers of either side are multiplied by. No side pushes alone (Eq. 4)."""
    strength = tl.where(below_power == 0, 0.0, strength)
    above_scale = strength / tl.where(above_power == 0, 1.0, above_power)
    below_scale = strength / tl.where(below_power == 0, 1.0, below_power)
    return above_scale, below_scale


@triton.jit
def _soft_strength(top, total, k):
    """S^k, where S is 2^top times the total."""
    n, f, s = _log(_at_least_1(total.to(tl.float64)))
    power, _ = _exp(k * tl.minimum((top + n) * _LN_2 + (f + s), 0.0))
    return power


@triton.jit(do_not_specialize=["k", "rows", "ignore_index", "smoothing"])
def soft_tile(
    z, target, ks, k, weight, parts, grad, scaled, values, out,
    rows, stride, classes, k_stride, grad_stride, ignore_index, target_stride, smoothing,
    special: tl.constexpr, probabilities: tl.constexpr, reduced: tl.constexpr, skip: tl.constexpr,
    vector: tl.constexpr, tile_rows: tl.constexpr, outer: tl.constexpr, inner: tl.constexpr,
):  # fmt: skip
    """As `tile`, for smoothed labels and for probabilities."""
    if scaled is not None:  # noqa: SIM102 (the compiler would look at both conditions)
        if _is_done(grad, scaled, skip):
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
    """The rows from ``first`` on, laid out as in `_tile`."""
    classes *= vector
    row = first + tl.arange(0, tile_rows)
    column = _columns(outer, inner)
    exists, inside = row < rows, column < classes
    counted, known, y = exists, 1.0, row  # probabilities have no label to look at
    if not probabilities:
        y = tl.load(target + row, mask=exists, other=0).to(tl.int64)
        counted = exists & (y != ignore_index)
        known = tl.where((y >= 0) & (y < classes), 1.0, float("nan"))
        y = y.to(tl.int32)
    k = tl.zeros((tile_rows,), tl.float32) + _sensitivity(k, ks, k_stride, row, exists)
    at = _beside(row * stride * vector) + column
    mask = _beside(counted) & inside
    x = tl.load(z + at, mask=mask, other=float("-inf")).to(tl.float32)
    at = _beside(row * target_stride * vector) + column
    t = _target(target, at, mask, _beside(y), column, weight, smoothing, classes, probabilities)

    whole = tl.zeros((tile_rows,), tl.float32) + known  # as smoothing only spreads what there is
    if probabilities or weight is not None:
        whole *= _sum_of_rows(t)
    # Halves, since the difference of two extreme logits would be infinite.
    half_top = 0.5 * tl.maximum(_max_of_rows(x), _LOWEST)
    d = tl.fma(x, 0.5, -_beside(half_top))
    e = tl.exp2(d * (2 * _LOG2_E))
    total = _sum_of_rows(e)
    value = _soft_value(total, whole, _sum_of_rows(_distance(t, d)))
    value = tl.where(counted, value, 0.0).to(tl.float64)
    if reduced:
        tl.store(values + first // tile_rows, tl.sum(value, 0))
    elif values is not None:
        tl.store(values + row, value, mask=exists)

    if out is not None:
        nothing = tl.abs(whole) < _LEAST_TARGET
        factor = tl.where(counted & (nothing == 0), whole, 0.0)
        factor = _factor(factor, parts, None, grad, grad_stride, row, counted)
        whole = tl.where(nothing, 1.0, whole)
        if special == "1":
            f = tl.fma(-t, _beside(1 / whole), e * _beside(1 / total)) * _beside(factor)
        else:
            bias = _bias(e * _beside(1 / total), t, _beside(whole))
            if special == "any":
                log_p = tl.fma(d, 2 * _LOG2_E, -_beside(tl.log2(total)))
                size = _log_size(bias, t, log_p)
                above_top = tl.maximum(_max_of_rows(tl.where(bias < 0, _LOWEST, size)), _LOWEST)
                below_top = tl.log2(tl.maximum(-_min_of_rows(bias), _LEAST_NORMAL))
                size -= tl.where(bias < 0, _beside(below_top), _beside(above_top))
                power = tl.exp2(_beside(k) * size)
                above_total = _sum_of_rows(tl.where(bias < 0, 0.0, tl.exp2(size)))
                strength = _soft_strength(above_top, above_total, k)
            else:
                power = _root_or_square(tl.abs(bias), special)
                strength = _root_or_square(_sum_of_rows(tl.maximum(bias, 0.0)), special)
            power = _with_sign_of(bias, power)
            above_scale, below_scale = _scales(
                factor * strength,
                _sum_of_rows(tl.maximum(power, 0.0)),
                -_sum_of_rows(tl.minimum(power, 0.0)),
            )
            f = power * tl.where(power < 0, _beside(below_scale), _beside(above_scale))
        f = tl.where(_beside(factor == 0), 0.0, f)
        at = _beside(row * classes) + column
        tl.store(out + at, f.to(out.dtype.element_ty), mask=_beside(exists) & inside)


@triton.jit
def _join_side(top, power_total, k):
    highest = tl.max(top, 0)
    total = tl.sum((power_total * tl.exp2(k * (top - highest))).to(tl.float64), 0)
    return highest, total.to(tl.float32)


@triton.jit
def _half_and_target(
    z, target, column, mask, y, weight, smoothing, classes, probabilities: tl.constexpr
):
    """Halves of some columns' logits, as the difference of two extreme ones is infinite, and t."""
    x = 0.5 * tl.load(z + column, mask=mask, other=float("-inf")).to(tl.float32)
    t = _target(target, column, mask, y, column, weight, smoothing, classes, probabilities)
    return x, t


@triton.jit(do_not_specialize=["k", "ignore_index", "smoothing"])
def soft_row(
    z, target, ks, k, weight, parts, grad, values, out, found, given,
    stride, classes, k_stride, grad_stride, ignore_index, target_stride, smoothing,
    special: tl.constexpr, probabilities: tl.constexpr, lanes: tl.constexpr, vector: tl.constexpr,
):  # fmt: skip
    """As `row`, for such targets. For k ≠ 1 one more pass sums the powers on either side.

    Each pass goes the other way than the one before it, and begins with what is in the cache. A
    row is too long to stay there, so that nothing is lost if all but the first pass come later:
    ``found`` and ``given`` are the top, Σ exp(z - top) and W.
    """
    i = tl.program_id(0).to(tl.int64)
    z += i * stride
    counted, known, y, to_read = True, 1.0, i, classes  # probabilities have no label to look at
    if probabilities:
        target += i * target_stride
    else:
        y = tl.load(target + i).to(tl.int64)
        counted = y != ignore_index
        known = tl.where((y >= 0) & (y < classes), 1.0, float("nan"))
        y = y.to(tl.int32)
        to_read = tl.where(counted, classes, 0)
    k = _sensitivity(k, ks, k_stride, i, counted)
    columns = tl.arange(0, lanes)[:, None] * vector + tl.arange(0, vector)[None, :]
    block: tl.constexpr = lanes * vector
    last = (classes - 1) // block * block

    if given is not None:
        top, total, whole = _kept(given, i, counted)
    else:
        lane_top = tl.full((lanes,), 0.5 * _LOWEST, tl.float32)
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
            lane_whole -= tl.sum(-t, 1)  # Triton 3.6 fails at a sum of what is loaded, and no more
            lane_total *= tl.exp2((lane_top - new) * (2 * _LOG2_E))
            lane_total += tl.sum(tl.exp2(d * (2 * _LOG2_E)), 1)
            lane_top = new
        top = tl.max(lane_top, 0)
        lane_total *= tl.exp2((lane_top - top) * (2 * _LOG2_E))
        lane_distance += _distance(lane_whole, lane_top - top)
        total = tl.sum(lane_total.to(tl.float64), 0)
        whole = known * tl.sum(lane_whole.to(tl.float64), 0).to(tl.float32)
        if values is not None:
            value = _soft_value(total, whole, tl.sum(lane_distance.to(tl.float64), 0))
            tl.store(values + i, tl.where(counted, value, 0.0))
        total = total.to(tl.float32)
        if found is not None:
            _keep(found, i, True, top, total, whole)

    if out is not None:
        log_total = tl.log2(total)
        nothing = tl.abs(whole) < _LEAST_TARGET
        factor = tl.where(counted & (nothing == 0), whole, 0.0)
        factor = _factor(factor, parts, None, grad, grad_stride, i, counted)
        whole = tl.where(nothing, 1.0, whole)
        if special != "1":
            above_top = tl.full((lanes,), _LOWEST, tl.float32)
            above_total = tl.zeros((lanes,), tl.float32)
            above_power = tl.zeros((lanes,), tl.float32)
            below_top = tl.full((lanes,), _LOWEST, tl.float32)
            below_power = tl.zeros((lanes,), tl.float32)
            for step in range(0, to_read, block):
                column = last - step + columns
                mask = column < classes
                x, t = _half_and_target(z, target, column, mask, y, weight, smoothing, classes,
                                        probabilities)  # fmt: skip
                log_p = (x - top) * (2 * _LOG2_E) - log_total
                bias = _bias(tl.exp2(log_p), t, whole)
                if special == "any":
                    size = _log_size(bias, t, log_p)
                    new = tl.maximum(above_top, tl.max(tl.where(bias < 0, _LOWEST, size), 1))
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
            if special == "any":
                _, sum_above = _join_side(above_top, above_total, 1.0)
                of_above, power_above = _join_side(above_top, above_power, k)
                of_below, power_below = _join_side(below_top, below_power, k)
                strength = _soft_strength(of_above, sum_above, k)
            else:
                power_above, power_below = tl.sum(above_power, 0), tl.sum(below_power, 0)
                strength = _root_or_square(tl.sum(above_total, 0), special)
            above_scale, below_scale = _scales(factor * strength, power_above, power_below)
        out += i * classes
        for step in range(0, classes, block):
            start = last - step if special == "1" else step
            column = start + columns
            inside, mask = column < classes, column < to_read
            x, t = _half_and_target(z, target, column, mask, y, weight, smoothing, classes,
                                    probabilities)  # fmt: skip
            if special == "1":
                p = tl.exp2((x - top) * (2 * _LOG2_E)) * (1 / total)
                f = (p - t * (1 / whole)) * factor
            else:
                log_p = (x - top) * (2 * _LOG2_E) - log_total
                bias = _bias(tl.exp2(log_p), t, whole)
                if special == "any":
                    size = _log_size(bias, t, log_p)
                    power = tl.exp2(k * (size - tl.where(bias < 0, of_below, of_above)))
                else:
                    power = _root_or_square(tl.abs(bias), special)
                f = power * tl.where(bias < 0, -below_scale, above_scale)
            f = tl.where(factor == 0, 0.0, f)
            tl.store(out + column, f.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "ignore_index"])
def count_labels(target, weight, parts, rows, classes, ignore_index, block: tl.constexpr):
    """The sum of the weights of the labels that are not ignored, in ``PARTS`` parts."""
    part = tl.program_id(0)
    at = tl.arange(0, block).to(tl.int64)
    sums = tl.zeros((block,), tl.float64)
    for start in range(part * block, rows, _PARTS * block):
        exists = start + at < rows
        y = tl.load(target + start + at, mask=exists, other=0).to(tl.int64)
        counted = exists & (y != ignore_index)
        labelled = counted & (y >= 0) & (y < classes)
        sums += tl.where(counted, _weight_of(weight, y, labelled), 0.0)
    tl.store(parts + part, tl.sum(sums, 0))


@triton.jit(do_not_specialize=["count"])
def sum_values(values, parts, out, count, block: tl.constexpr):
    """The sum of the values, or with ``parts`` their mean."""
    at = tl.arange(0, block)
    sums = tl.zeros((block,), tl.float64)
    for start in range(0, count, block):
        sums += tl.load(values + start + at, mask=start + at < count, other=0.0)
    result = tl.sum(sums, 0)
    if parts is not None:
        divisor = tl.sum(tl.load(parts + tl.arange(0, _PARTS)), 0)
        # Smoothed labels have values even where their weights, by which they count, are all 0.
        result = tl.where(divisor == 0, float("nan"), result / divisor)
    _store_sum(out, result)


@triton.jit(do_not_specialize=["count"])
def rescale(x, factor, count, block: tl.constexpr):
    """Multiply in place; by 1, without a look at what is multiplied."""
    by = tl.load(factor).to(tl.float32)
    if by == 1.0:
        return
    start = tl.program_id(0).to(tl.int64) * block
    step = tl.num_programs(0).to(tl.int64) * block
    for begin in range(start, count, step):
        at = begin + tl.arange(0, block)
        inside = at < count
        scaled = tl.load(x + at, mask=inside).to(tl.float32) * by
        tl.store(x + at, scaled.to(x.dtype.element_ty), mask=inside)
