"""The layout of tiles, and the loads and stores of a row, for all kernels of the loss.

A pointer argument of None is a compile-time constant: the compiler drops the code that uses it.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from pseudograd.loss.triton import PARTS
from pseudograd.rules.checks import GREATEST_K, LEAST_K

_PARTS = tl.constexpr(PARTS)
_LEAST_K, _GREATEST_K = tl.constexpr(LEAST_K), tl.constexpr(GREATEST_K)
# A tile has three dimensions: rows, pieces of a row, and the columns of a piece (last). Threads
# should be assigned to columns first and rows next. After the last dimension the compiler continues
# with the middle one, up to Triton 3.6 with the first. So rows take that one, and pieces the other.
_PIECES = tl.constexpr(1 if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7) else 0)


# --- tiles ----------------------------------------------------------------------------------------


@triton.jit
def beside(x):
    """Expand one number per row to broadcast against a tile."""
    return tl.expand_dims(tl.expand_dims(x, _PIECES), 2)


@triton.jit
def columns_of(outer: tl.constexpr, inner: tl.constexpr):
    """Return the columns of a tile: ``outer`` pieces of ``inner`` columns."""
    piece = tl.expand_dims(tl.expand_dims(tl.arange(0, outer), 1 - _PIECES), 2)
    return piece * inner + tl.arange(0, inner)[None, None, :]


@triton.jit
def max_of_rows(x):
    """Return the maximum of each row of a tile."""
    return tl.max(tl.max(x, _PIECES), 1)


@triton.jit
def min_of_rows(x):
    """Return the minimum of each row of a tile."""
    return tl.min(tl.min(x, _PIECES), 1)


@triton.jit
def sum_of_rows(x):
    """Return the sum of each row of a tile."""
    return tl.sum(tl.sum(x, _PIECES), 1)


@triton.jit
def sum_in_float64(e):
    """Return the sums of a tile's rows: groups of 8 in float32, the groups in float64.

    k multiplies the rounding error of this sum.
    """
    for _ in tl.static_range(3):
        e = sum_of_pairs(e, _PIECES)
    return sum_of_rows(e.to(tl.float64))


@triton.jit
def sum_of_pairs(e, axis: tl.constexpr):
    """Add neighbours along axis 0 or 1 of a 3D tile; sums of equal numbers are exact."""
    count: tl.constexpr = e.shape[axis]
    if count > 1:
        if axis == 0:
            e = tl.reshape(e, (count // 2, 2, e.shape[1], e.shape[2]))
        else:
            e = tl.reshape(e, (e.shape[0], count // 2, 2, e.shape[2]))
        e = tl.sum(e, axis + 1)
    return e


# --- the numbers of a row -------------------------------------------------------------------------


@triton.jit
def sensitivity_of(k, ks, k_stride, row, mask):
    """Return k, or the row's own k; NaN if it is out of bounds, so that the error is visible."""
    if ks is not None:
        k = tl.load(ks + row * k_stride, mask=mask, other=1.0).to(tl.float32)
    return tl.where((k >= _LEAST_K) & (k <= _GREATEST_K), k, float("nan"))


@triton.jit
def weight_of(weight, y, labelled):
    """Return the label's class weight; NaN for an index out of range."""
    if weight is not None:
        w = tl.load(weight + y, mask=labelled, other=float("nan")).to(tl.float32)
    else:
        w = tl.where(labelled, 1.0, float("nan"))
    return w


@triton.jit
def factor_of(w, parts, divisor, grad, grad_stride, row, mask):
    """Return the row's weight, divided if for a mean, times the upstream gradient."""
    if parts is not None:
        divisor = sum_of_parts(parts)
    if divisor is not None:
        w = tl.where(w == 0, 0.0, w / divisor.to(tl.float32))
        w = tl.where(divisor == 0, 0.0, w)
    if grad is not None:
        upstream = tl.load(grad + row * grad_stride, mask=mask, other=0.0).to(tl.float32)
        w = tl.where(upstream == 0, 0.0, w * upstream)
    return w


@triton.jit
def sum_of_parts(parts):
    """Return the total of the partial sums of `count_labels`."""
    return tl.sum(tl.load(parts + tl.arange(0, _PARTS)), 0)


@triton.jit
def is_done(grad, scaled, skip: tl.constexpr):
    """Return whether there is nothing to do: with ``skip``, if the upstream gradient is 1.

    If given, ``scaled`` receives whether it is not 1, for the next forward pass (see
    `scaled.ScaledBefore`). Host memory is slow to write, so the kernel writes only changes.
    """
    is_1 = tl.load(grad).to(tl.float32) == 1.0
    if scaled is not None:
        unexpected = is_1 != skip
        tl.store(scaled, 1 if skip else 0, mask=unexpected & (tl.program_id(0) == 0))
    return is_1 & skip


@triton.jit
def keep(found, row, mask, a, b, c):
    """Store the three numbers of a row that a later backward pass needs."""
    tl.store(found + 3 * row, a, mask=mask)
    tl.store(found + 3 * row + 1, b, mask=mask)
    tl.store(found + 3 * row + 2, c, mask=mask)


@triton.jit
def kept(given, row, mask):
    """Load the three numbers that `keep` stored; zeros for ignored rows."""
    a = tl.load(given + 3 * row, mask=mask, other=0.0)
    b = tl.load(given + 3 * row + 1, mask=mask, other=0.0)
    c = tl.load(given + 3 * row + 2, mask=mask, other=0.0)
    return a, b, c


@triton.jit
def store_sum(to, value):
    """Store a sum: rounded if it is the result, in float64 if it is a partial sum."""
    if to.dtype.element_ty != tl.float64:
        value = value.to(tl.float32)
    tl.store(to, value.to(to.dtype.element_ty))
