"""Small kernels around the loss: the sums of a reduction, and scaling by the upstream gradient.

No kernel uses atomics, so results are the same in every run.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from pseudograd.loss.triton import PARTS
from pseudograd.loss.triton.layout import store_sum, sum_of_parts, weight_of

_PARTS = tl.constexpr(PARTS)


@triton.jit(do_not_specialize=["rows", "ignore_index"])
def count_labels(target, weight, parts, rows, classes, ignore_index, block: tl.constexpr):
    """Store ``PARTS`` partial sums of the weights of the labels that are not ignored.

    Without a ``target``, each row counts as one.
    """
    part = tl.program_id(0)
    if target is None:
        total = rows.to(tl.float64) / _PARTS
    else:
        at = tl.arange(0, block).to(tl.int64)
        sums = tl.zeros((block,), tl.float64)
        for start in range(part * block, rows, _PARTS * block):
            exists = start + at < rows
            y = tl.load(target + start + at, mask=exists, other=0).to(tl.int64)
            counted = exists & (y != ignore_index)
            labelled = counted & (y >= 0) & (y < classes)
            sums += tl.where(counted, weight_of(weight, y, labelled), 0.0)
        total = tl.sum(sums, 0)
    tl.store(parts + part, total)


@triton.jit(do_not_specialize=["count"])
def sum_values(values, parts, out, count, block: tl.constexpr):
    """Store the sum of the values; with ``parts``, their mean."""
    at = tl.arange(0, block)
    sums = tl.zeros((block,), tl.float64)
    for start in range(0, count, block):
        sums += tl.load(values + start + at, mask=start + at < count, other=0.0)
    result = tl.sum(sums, 0)
    if parts is not None:
        divisor = sum_of_parts(parts)
        # Smoothed labels have nonzero values even if all the labels' own weights are 0.
        result = tl.where(divisor == 0, float("nan"), result / divisor)
    store_sum(out, result)


@triton.jit(do_not_specialize=["count"])
def rescale(x, factor, count, block: tl.constexpr):
    """Multiply in place; return at once if the factor is 1."""
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
