"""Eq. 5 on the CPU in two passes over the logits, compiled by numba.

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
from pseudograd.rules.paper import GREATEST_K, LEAST_K, Sensitivity

f32, f64, i32 = np.float32, np.float64, np.int32

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

_LOG2_E = f32(1.4426950408889634)
_LN2_HIGH, _LN2_LOW = f32(0.693359375), f32(-2.12194440e-4)
_ROUND = f32(1.5 * 2**23)  # added and taken away again, this rounds to the nearest whole number
# Minimax polynomial of (exp(r) - 1 - r) / r² on |r| ≤ ln(2) / 2 (Cephes' expf coefficients).
_P = tuple(map(f32, (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2,
                     1.6666665459e-1, 5.0000001201e-1)))  # fmt: skip


# For functions in which sums must not be reordered; left unsaid, the caller's flags would hold.
_in_order = numba.njit(fastmath=_FLAGS - {"reassoc"})


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
@numba.njit(fastmath=_FLAGS)
def _highest(row):  # type: ignore[no-untyped-def]
    """The largest of `_ordered`; the lowest integer for an empty row."""
    highest = i32(-0x7FFFFFFF - 1)
    for j in range(len(row)):
        highest = max(highest, _ordered(row[j]))
    return highest


@numba.njit(fastmath=_FLAGS)
def _sum_of_exp(row, top):  # type: ignore[no-untyped-def]
    """Σ exp(z - top) in float64, since k will multiply its rounding."""
    total = f64(0)
    for j in range(len(row)):
        total += _exp(row[j] - top)
    return total


@numba.njit(fastmath=_FLAGS)
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
) -> Tensor:
    """Give the reduced loss, in float32, of rows ``z`` (R, C) for labels (R)."""
    if isinstance(k, Tensor):
        ks = np.array(_array(k.cpu()).reshape(-1), f32)
        if not _are_positive(ks):
            check_k(k)
    else:
        ks = np.array([k], f32)
    value: Tensor = _Fused.apply(z, target, ks, weight, ignore_index, reduction)
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
    ) -> Tensor:
        value, kept, value_sum, weight_sum = _values(
            _array(z), _labels(target), weight, ignore_index
        )
        ctx.save_for_backward(z, target)
        ctx.k, ctx.kept = k, kept
        # 0 / 0, when every row was ignored, is NaN, as in PyTorch.
        ctx.divisor = (weight_sum or math.nan) if reduction == "mean" else 1.0
        ctx.reduced = reduction != "none"
        return torch.from_numpy(np.array(value_sum / ctx.divisor, f32) if ctx.reduced else value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        z, target = ctx.saved_tensors
        grad = grads[0]
        several = is_batch(grad)  # which no loop can read
        above = torch.ones(() if ctx.reduced else len(z)) if several else grad
        result = np.empty(z.shape, f32)
        logits, labels = _array(z), _labels(target)
        _shared(
            _backward,
            logits,
            labels,
            ctx.k,
            np.array([above.item() / ctx.divisor], f32) if ctx.reduced else _array(above),
            ctx.kept,
            result,
        )
        if not graph_is_kept():  # autograd lets go of what it has saved, and so do we
            ctx.kept = None
        f = torch.from_numpy(result)
        f = times_each(f, grad) if several else f
        return final(f if z.dtype == torch.float32 else f.to(z.dtype), z), *[None] * 5

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        refuse_forward_mode()


def values_and_gradients(
    logits: Tensor,
    target: Tensor,
    k: Sensitivity,
    weight: Tensor | None,
    ignore_index: int,
    factor: Tensor | None,
) -> Tensor:
    """Give the values of rows; if there is a factor, write the gradient over their logits.

    That is Eq. 5, each row times its weight and its factor.
    """
    z, labels = _array(logits), _labels(target)
    value, kept, _, _ = _values(z, labels, weight, ignore_index)
    if factor is not None:
        ks = _array(k).reshape(-1) if isinstance(k, Tensor) else np.array([k], f32)
        _shared(_backward, z, labels, ks, _array(factor), kept, z)
        if logits.dtype != torch.float32:
            logits.copy_(torch.from_numpy(z))
    return torch.from_numpy(value)


def _values(z: Any, labels: Any, weight: Tensor | None, ignore_index: int) -> tuple[Any, ...]:
    """The values of rows, what is kept of them, and the sums of values and of weights."""
    weights = _ONE if weight is None else _array(weight)
    value, kept = np.empty(len(z), f32), np.empty((len(z), 3), f32)
    value_sum = weight_sum = 0.0
    parts = _shared(_forward, z, labels, weights, ignore_index, value, kept)
    for part_sum, part_weight, wrong in parts:
        if wrong >= 0:
            refuse_class_index(int(labels[wrong]), z.shape[1], ignore_index)
        value_sum, weight_sum = value_sum + part_sum, weight_sum + part_weight
    return value, kept, value_sum, weight_sum


_ONE = np.ones(1, f32)


def _array(tensor: Tensor) -> Any:
    # To convert what needs no conversion takes as long as all the rest.
    if tensor.dtype != torch.float32 or not tensor.is_contiguous():
        tensor = tensor.float().contiguous()
    return tensor.numpy(force=True)


def _labels(target: Tensor) -> Any:
    if target.dtype != torch.long or not target.is_contiguous():
        target = target.long().contiguous()
    return target.numpy()


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
