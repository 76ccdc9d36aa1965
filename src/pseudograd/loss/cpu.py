"""The loss on the CPU, compiled by numba, and Eq. 5 for labels; `cpu_soft` has soft targets.

PyTorch's operations each read and write all the logits. These loops read them once forward and once
backward, and write only the result. numba brings its own compiler; without numba, the same formula
runs in `pseudograd.rules.paper`. In Triton it stands in `pseudograd.loss.triton.eq5`, in JAX in
`pseudograd.jax`.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NoReturn

import numba
import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function

from pseudograd.loss import cpu_soft
from pseudograd.loss.autograd import (
    final,
    graph_is_kept,
    is_batch,
    refuse_forward_mode,
    times_each,
)
from pseudograd.loss.checks import refuse_class_index
from pseudograd.loss.numba_tools import (
    f32,
    f64,
    from_bits,
    from_ordered,
    highest,
    i32,
    in_order,
    loop,
    over_rows,
)
from pseudograd.rules.checks import GREATEST_K, LEAST_K, check_k
from pseudograd.rules.paper import Sensitivity

# Elements summed in float32; the rounding error of a longer sum would show.
_SUMMED_AT_ONCE = 1024
# Smaller inputs are done sooner by one thread.
_WORTH_SHARING = 1 << 15

_LOG2_E = f32(1.4426950408889634)
_LN2_HIGH, _LN2_LOW = f32(0.693359375), f32(-2.12194440e-4)
_ROUND = f32(1.5 * 2**23)  # adding and subtracting it rounds to an integer
# Minimax polynomial of (exp(r) - 1 - r) / r² on |r| ≤ ln(2) / 2 (Cephes' expf coefficients).
_P = tuple(map(f32, (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2,
                     1.6666665459e-1, 5.0000001201e-1)))  # fmt: skip


# Reordered, the rounding constant would cancel.
@in_order
def _exp(x):  # type: ignore[no-untyped-def]
    """Return exp(x) for x ≤ 0 to an ulp, 0 below -88; in a form that compilers vectorize."""
    x = f32(-88.0) if x < f32(-88.0) else x
    n = (x * _LOG2_E + _ROUND) - _ROUND
    r = (x - n * _LN2_HIGH) - n * _LN2_LOW
    p = _P[0]
    p = p * r + _P[1]
    p = p * r + _P[2]
    p = p * r + _P[3]
    p = p * r + _P[4]
    p = p * r + _P[5]
    return (p * r * r + r + f32(1)) * from_bits((i32(n) + i32(127)) << i32(23))


# Reordered, logits far from zero would absorb the logarithm.
@in_order
def _log_odds(z_y, top, total):  # type: ignore[no-untyped-def]
    """Return -log p_y and log(1 - p_y), from the margin z_y - top - log(total)."""
    margin = (f64(z_y) - f64(top)) - math.log(total) if z_y < np.inf else np.nan
    tail = math.log1p(math.exp(-abs(margin)))
    return tail - min(margin, 0.0), -tail - max(margin, 0.0)


@loop
def _sum_of_exp(row, top):  # type: ignore[no-untyped-def]
    """Return Σ exp(z - top) in float64, since k multiplies its rounding error."""
    total = f64(0)
    for j in range(len(row)):
        total += _exp(row[j] - top)
    return total


@loop
def _sum(row):  # type: ignore[no-untyped-def]
    total = f32(0)
    for j in range(len(row)):
        total += row[j]
    return total


# The two passes. ``k``, ``weight`` and ``grad`` have one entry for all, or one for each.


@over_rows
def _forward(z, target, weight, ignore_index, value, kept, start, stop):  # type: ignore[no-untyped-def]
    """Compute -w_y log p_y; keep for each row the largest other logit, log(1 - p_y), and w_y.

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
        top = from_ordered(max(highest(before), highest(after)))
        if len(row) == 1 or top == -np.inf:  # no other class: p_y is 1
            known = row[y] - row[y] == 0  # otherwise the value is NaN
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


@over_rows
def _backward(z, target, k, grad, kept, result, start, stop):  # type: ignore[no-untyped-def]
    """Compute Eq. 5, each row times its weight and ``grad``. ``result`` may be ``z`` itself."""
    for i in range(start, stop):
        row, out = z[i], result[i]
        above = grad[min(i, len(grad) - 1)]
        # No weight, or a certain label: 0 whatever the logits.
        if above == 0 or kept[i, 2] == 0 or kept[i, 1] == -np.inf:
            out[:] = f32(0)
            continue
        top, y, k_i = kept[i, 0], target[i], k[min(i, len(k) - 1)]
        if y < 0 or y >= len(row):  # changed through NumPy, unseen by PyTorch
            out[:] = f32(np.nan)
            continue
        strength = math.exp(f64(k_i) * f64(kept[i, 1]))
        scale = f32(above * kept[i, 2] * strength)
        if z is result:  # under two names the compiler would not vectorize it
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
    label_smoothing: float,
) -> Tensor:
    """Return the reduced loss, in float32, of rows ``z`` (R, C).

    Targets are labels (R) or probabilities (R, C).
    """
    if isinstance(k, Tensor):
        ks = np.array(_array(k.cpu()).reshape(-1), f32)
        if not _are_positive(ks):
            check_k(k)
    else:
        ks = np.array([k], f32)
    smoothing = float(label_smoothing)  # an integer would be compiled for again
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
        # For labels, ``kept`` includes the weights.
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
        several = is_batch(grad)  # the loops cannot read a batch
        above = torch.ones(() if ctx.reduced else len(z)) if several else grad
        if ctx.reduced:
            factor = np.array([above.item() / ctx.divisor if ctx.divisor else 0.0], f32)
        else:
            factor = _array(above)
        logits = _array(z)
        # A copy of the logits is overwritten by their gradient.
        result = np.empty(z.shape, f32) if _is_array(z) else logits
        _gradients(logits, target, ctx.k, weight, ctx.smoothing, factor, ctx.kept, result)
        if not graph_is_kept():  # autograd frees its saved tensors, and so do we
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
    """Return the values of rows; with a factor, overwrite their logits by the gradient.

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
    """Return the values of rows, the numbers kept of them, and the sums of values and weights."""
    weights, value = _weights(weight), np.empty(len(z), f32)
    labels, q = _labels_and_probabilities(target)
    if _is_soft(target, smoothing):
        kept = np.empty((len(z), 3), f64)
        parts = _shared(
            cpu_soft.forward, z, labels, q, weights, ignore_index, smoothing, value, kept
        )
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
        _shared(cpu_soft.backward, z, labels, q, weights, smoothing, k, factor, kept, result)
    else:
        _shared(_backward, z, labels, k, factor, kept, result)


def _is_soft(target: Tensor, smoothing: float) -> bool:
    """Return whether targets are soft: probabilities or smoothed labels."""
    return smoothing > 0 or target.dim() > 1


def _labels_and_probabilities(target: Tensor) -> tuple[Any, Any]:
    """Return labels or probabilities, with an empty array for the other."""
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
    # Converting without need would take as long as all the rest.
    if not _is_array(tensor):
        tensor = tensor.float().contiguous()
    return tensor.numpy(force=True)


def _is_array(tensor: Tensor) -> bool:
    """Return whether `_array` is the tensor itself, not a copy."""
    return tensor.dtype == torch.float32 and tensor.is_contiguous()


def _shared(kernel: Any, z: Any, *arguments: Any) -> list[Any]:
    """Run the pass over all rows of ``z``, large inputs on as many threads as PyTorch uses."""
    rows, workers = len(z), min(torch.get_num_threads(), len(z))
    if z.size < _WORTH_SHARING or workers == 1:
        return [kernel(z, *arguments, 0, rows)]
    bounds = [rows * worker // workers for worker in range(workers + 1)]
    others: list[Future[Any]] = []
    left = bounds[1]
    try:
        for left, stop in itertools.pairwise(bounds[1:]):
            others.append(_threads().submit(kernel, *(z, *arguments, left, stop)))
        left = rows
    except RuntimeError as error:
        # Once the main thread has ended, Python starts no more threads: this one does the rest.
        if "cannot schedule new futures" not in str(error):
            raise
    parts = [kernel(z, *arguments, 0, bounds[1]), *(other.result() for other in others)]
    return parts if left == rows else [*parts, kernel(z, *arguments, left, rows)]


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(thread_name_prefix="pseudograd")


# Threads do not survive a fork; the child starts its own. Windows has no forks.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_threads.cache_clear)
