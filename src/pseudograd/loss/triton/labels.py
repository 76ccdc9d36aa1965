"""The kernels for class indices: values and Eq. 5 of short rows (`tile`) and of long ones (`row`).

- `tile` computes several short rows at once; each is read once and kept on-chip.
- `row` computes one long row: a pass for the top and the sums, then a pass for the gradient, which
  reads most logits from the L2 cache.

Arithmetic is in float32, except that the last steps of Σ exp(z - top) are in float64: k multiplies
the rounding error of the margin. See `eq5` for the formula, and `launch.launch` for the arguments.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from pseudograd.loss.triton.eq5 import (
    LN_2,
    LOWEST,
    at_least_1,
    power_of,
    powers,
    value_and_strength,
    whole_powers,
)
from pseudograd.loss.triton.layout import (
    beside,
    columns_of,
    factor_of,
    is_done,
    keep,
    kept,
    max_of_rows,
    sensitivity_of,
    store_sum,
    sum_in_float64,
    sum_of_pairs,
    sum_of_rows,
    weight_of,
)


@triton.jit
def _load_kept(given, grad, grad_stride, row, mask):
    """Load a row's top, share and scale, times the upstream gradient; zeros for ignored rows."""
    top, share, scale = kept(given, row, mask)
    if grad is not None:
        factor = tl.load(grad + row * grad_stride, mask=mask, other=0.0).to(tl.float32)
        share *= factor
        scale = tl.where(factor == 0, 0.0, scale * factor)
    return top, share, scale


# --- short rows -----------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["k", "rows", "ignore_index"])
def tile(
    z, target, ks, k, weight, parts, grad, scaled, values, out, found, given,
    rows, stride, classes, k_stride, grad_stride, ignore_index,
    special: tl.constexpr, reduced: tl.constexpr, mean: tl.constexpr, skip: tl.constexpr,
    vector: tl.constexpr, tile_rows: tl.constexpr, outer: tl.constexpr, inner: tl.constexpr,
):  # fmt: skip
    """Compute the values and pseudo-gradients of short rows.

    ``stride`` and ``classes`` are in units of ``vector`` elements, which tells the compiler that it
    may load and store whole vectors. With ``mean``, one program has all rows, and computes
    the divisor itself. With ``skip``, the kernel returns at once if ``grad`` is 1, since ``out`` is
    already computed. So few programs are launched, and otherwise each loops over several tiles.

    ``found`` (rows, 3) receives the top, the share and the scale of each row. A later backward pass
    reads them from ``given`` and need not sum again.
    """
    if skip or scaled is not None:  # noqa: SIM102 (the compiler would evaluate both conditions)
        if is_done(grad, scaled, skip):
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
    """Compute the tile that begins at row ``first``.

    Every thread of a row computes the row's numbers, so a row should have few threads: it is laid
    out as ``outer`` pieces of ``inner`` columns, and its threads share each piece.
    """
    classes *= vector
    column = columns_of(outer, inner)
    inside = column < classes
    row = first + tl.arange(0, tile_rows)
    exists = row < rows
    y = tl.load(target + row, mask=exists, other=0).to(tl.int64)
    counted = exists & (y != ignore_index)
    labelled = counted & (y >= 0) & (y < classes)
    k = tl.zeros((tile_rows,), tl.float32) + sensitivity_of(k, ks, k_stride, row, exists)
    begin = row * stride * vector
    at = beside(begin) + column
    x = tl.load(z + at, mask=beside(counted) & inside, other=float("-inf")).to(tl.float32)
    on_label = column == beside(y.to(tl.int32))
    # If ``out`` is ``z``, each thread overwrites only elements that it has read itself.
    if given is not None:
        top, share, scale = _load_kept(given, grad, grad_stride, row, counted)
        power = power_of(x - beside(top), beside(k), special)
    else:
        z_y = tl.load(z + begin + y, mask=labelled, other=float("nan")).to(tl.float32)
        x = tl.where(on_label, float("-inf"), x)
        top = tl.maximum(max_of_rows(x), LOWEST)
        e, lost, power = powers(x - beside(top), beside(k), special)
        total = sum_in_float64(e)
        if special == "any":
            total += sum_of_rows(lost) * LN_2
        value, strength = value_and_strength(z_y, top, total, k)
        w = tl.where(counted, weight_of(weight, y, labelled), 0.0)
        divisor = None
        if mean:
            divisor = tl.sum(w.to(tl.float64), 0)
        value = tl.where(counted, w * value, 0.0)
        if reduced:
            value = tl.sum(value.to(tl.float64), 0)
            if mean:
                value /= divisor
            store_sum(values + first // tile_rows, value)
        elif values is not None:
            tl.store(values + row, value, mask=exists)
        power_total = total.to(tl.float32) if special == "1" else sum_of_rows(power)
        factor = factor_of(w, parts, divisor, grad, grad_stride, row, exists)
        scale = tl.where(counted & (factor != 0), factor * strength, 0.0)
        share = scale / at_least_1(power_total)
        if found is not None:
            keep(found, row, exists, top, share, scale)

    if out is not None:
        f = tl.where(on_label, -beside(scale), power * beside(share))
        # Ignored rows may hold anything; NaN times 0 would be NaN.
        f = tl.where(beside(scale == 0), 0.0, f)
        at = beside(row * classes) + column
        tl.store(out + at, f.to(out.dtype.element_ty), mask=beside(exists) & inside)


# --- long rows ------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["k", "ignore_index"])
def row(
    z, target, ks, k, weight, parts, grad, scaled, values, out, found, given, statistics,
    stride, classes, k_stride, grad_stride, ignore_index,
    special: tl.constexpr, skip: tl.constexpr, vector: tl.constexpr, lanes: tl.constexpr,
):  # fmt: skip
    """Compute the value and pseudo-gradient of a long row.

    The row is split into aligned vectors, read ``lanes`` at a time, and the few elements before and
    after them (the edges). Each lane keeps its own top and sums, so that lanes need not synchronize
    before the end of the row.

    ``skip``, ``found`` and ``given`` are as in `tile`. If the classes are split over several
    devices, ``statistics`` (4, rows) receives the numbers of this device's shard of the row, and
    ``given`` holds those derived from all shards.
    """
    if skip or scaled is not None:  # noqa: SIM102 (the compiler would evaluate both conditions)
        if is_done(grad, scaled, skip):
            return
    i = tl.program_id(0).to(tl.int64)
    y = tl.load(target + i).to(tl.int64)
    counted = y != ignore_index
    labelled = counted & (y >= 0) & (y < classes)
    k = sensitivity_of(k, ks, k_stride, i, counted)
    label = tl.where(labelled, y, -1).to(tl.int32)
    begin = i * stride
    aligned = (begin + vector - 1) // vector * vector
    head = (aligned - begin).to(tl.int32)
    vectors = (classes - head) // vector
    to_read = tl.where(counted, vectors, 0)  # ignored rows are not read
    lane, inner = tl.arange(0, lanes), tl.arange(0, vector)[None, :]
    # Each of the two edges gets ``vector`` elements, most of them masked.
    edge = tl.arange(0, 2 * vector)
    edge_column = tl.where(edge < vector, edge, classes - 2 * vector + edge)
    on_edge = tl.where(edge < vector, edge < head, edge_column >= head + vectors * vector)
    edge_to_read = on_edge & (edge < tl.where(counted, 2 * vector, 0))
    # Read before threads synchronize: later, if ``out`` is ``z``, others may overwrite it.
    z_y = tl.load(z + begin + y, mask=labelled, other=float("nan")).to(tl.float32)
    left = z_y
    if vector > 1:
        left = tl.load(z + begin + edge_column, mask=edge_to_read, other=float("-inf"))
        left = tl.where(edge_column == label, float("-inf"), left.to(tl.float32))

    if given is not None:
        top, share, scale = _load_kept(given, grad, grad_stride, i, counted)
    else:
        top, total, power_total = _numbers_of_row(z, aligned, left, label, head, to_read, lane,
                                                  inner, k, special, vector, lanes)  # fmt: skip
        if statistics is not None:
            rows = tl.num_programs(0).to(tl.int64)
            tl.store(statistics + i, top.to(tl.float64))
            tl.store(statistics + rows + i, total)
            tl.store(statistics + 2 * rows + i, power_total)
            tl.store(statistics + 3 * rows + i, z_y.to(tl.float64))
        value, strength = value_and_strength(z_y, top, total, k)
        w = tl.where(counted, weight_of(weight, y, labelled), 0.0)
        if values is not None:
            tl.store(values + i, tl.where(counted, w * value, 0.0))
        factor = factor_of(w, parts, None, grad, grad_stride, i, counted)
        scale = tl.where(counted & (factor != 0), factor * strength, 0.0)
        share = scale / at_least_1(power_total).to(tl.float32)
        if found is not None:
            keep(found, i, True, top, share, scale)

    if out is not None:
        _write_row(z, aligned, out, i * classes, left, edge_column, on_edge, label, head, vectors,
                   lane, inner, top, share, scale, k, special, vector, lanes)  # fmt: skip


@triton.jit
def _numbers_of_row(
    z, aligned, left, label, head, vectors, lane, inner, k,
    special: tl.constexpr, vector: tl.constexpr, lanes: tl.constexpr,
):  # fmt: skip
    """Return the top, Σ exp(z - top) and Σ exp(k (z - top)) over vectors and edges (``left``)."""
    lane_top = tl.full((lanes,), LOWEST, tl.float32)
    lane_total = tl.zeros((lanes,), tl.float32)
    lane_lost = tl.zeros((lanes,), tl.float32)
    lane_power = tl.zeros((lanes,), tl.float32)
    for start in tl.range(0, vectors, lanes, num_stages=1):
        at = (start + lane)[:, None] * vector + inner
        mask = (start + lane < vectors)[:, None]
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
        e, power = whole_powers(left - new, k, special)
        rescale, power_rescale = whole_powers(top - new, k, special)
        total = total * rescale + tl.sum(e.to(tl.float64), 0)
        power_total = power_total * power_rescale + tl.sum(power.to(tl.float64), 0)
        top = new
    return top, total, power_total


@triton.jit
def _take_in(x, top, total, lost, power_total, k, special: tl.constexpr):
    """Add more elements (lanes, n) to each lane's top and sums; lanes do not communicate.

    ``lost`` is the rounding error of the total, which equal logits accumulate.
    """
    new = tl.maximum(top, tl.max(x, 1))
    e, e_lost, power = powers(x - new[:, None], k, special)
    scale, power_scale = whole_powers(top - new, k, special)
    gain = _sum_of_vectors(e) if special == "any" else tl.sum(e, 1)
    before = total * scale
    total = before + gain
    if special == "any":
        lost = lost * scale + tl.sum(e_lost, 1) * LN_2 + (gain - (total - before))
    if special != "1":
        power_total = power_total * power_scale + tl.sum(power, 1)
    return new, total, lost, power_total


@triton.jit
def _sum_of_vectors(e):
    """Return the sums of (lanes, n), n up to 8; exact if the n are equal."""
    sums = tl.reshape(e, (e.shape[0], e.shape[1], 1))
    for _ in tl.static_range(3):
        sums = sum_of_pairs(sums, 1)
    return tl.reshape(sums, (e.shape[0],))


@triton.jit
def _join(top, total, lost, power_total, k, special: tl.constexpr):
    """Return the top and the sums of all lanes together."""
    highest = tl.max(top, 0)
    scale, power_scale = whole_powers(top - highest, k, special)
    power_total = power_total * power_scale if special != "1" else total * scale
    total = tl.sum((total * scale).to(tl.float64) + (lost * scale).to(tl.float64), 0)
    return highest, total, tl.sum(power_total.to(tl.float64), 0)


@triton.jit
def _write_row(
    z, aligned, out, out_begin, left, edge_column, on_edge, label, head, vectors, lane, inner,
    top, share, scale, k,
    special: tl.constexpr, vector: tl.constexpr, lanes: tl.constexpr,
):  # fmt: skip
    """Write the pseudo-gradient, from the end of the row, which is still cached, to its start."""
    out_aligned = (out_begin + vector - 1) // vector * vector
    # Ignored rows may hold anything, and NaN times 0 would be NaN: they are not read.
    share = tl.where(scale == 0, 0.0, share)
    top = tl.where(scale == 0, 0.0, top)
    k = tl.where(scale == 0, 1.0, k)
    to_read = tl.where(scale == 0, 0, vectors)
    last = (vectors - 1) // lanes * lanes
    for step in tl.range(0, vectors, lanes, num_stages=1):
        start = last - step
        at = (start + lane)[:, None] * vector + inner
        mask = (start + lane < to_read)[:, None]
        x = tl.load(z + aligned + at, mask=mask, other=float("-inf"),
                    eviction_policy="evict_first").to(tl.float32)  # fmt: skip
        f = power_of(x - top, k, special) * share
        if (label >= head + start * vector) & (label < head + (start + lanes) * vector):
            f = tl.where(head + at == label, -scale, f)
        mask = (start + lane < vectors)[:, None]
        tl.store(out + out_aligned + at, f.to(out.dtype.element_ty), mask=mask,
                 eviction_policy="evict_first")  # fmt: skip
    if vector > 1:
        left = tl.where(scale == 0, float("-inf"), left)
        edges = power_of(left - top, k, special) * share
        edges = tl.where(edge_column == label, -scale, edges)
        tl.store(out + out_begin + edge_column, edges.to(out.dtype.element_ty), mask=on_edge)
