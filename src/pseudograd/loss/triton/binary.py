"""The binary loss on a GPU: one elementwise kernel for its value and its gradient.

Labels use the compensated float32 arithmetic of `eq5`. Blocks with soft targets are computed in
float64, because their bias σ(z) - t cancels where the network is right.

The same formula is in `pseudograd.rules.paper.binary_push` and in `loss/cpp/binary.h`.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from typing import Any, NamedTuple, NoReturn

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function

from pseudograd.loss.autograd import final, graph_is_kept, is_batch, refuse_forward_mode
from pseudograd.loss.triton.eq5 import value_and_strength
from pseudograd.loss.triton.launch import Launch, start_kernel
from pseudograd.loss.triton.layout import is_done, sensitivity_of
from pseudograd.loss.triton.reduction import sum_values
from pseudograd.rules.paper import Sensitivity

BLOCK, WARPS = 512, 8
MOST_PROGRAMS = 2048
_GREATEST = tl.constexpr(3.4028234663852886e38)


def fused_binary(
    z: Tensor,
    target: Tensor,
    k: Sensitivity,
    weight: Tensor | None,
    pos_weight: Tensor | None,
    reduction: str,
    dtype: torch.dtype,
) -> Tensor:
    """Return the binary loss, in ``dtype``, of one or more logits of any shape."""
    given = (target, pos_weight, weight, k if isinstance(k, Tensor) else None)
    arrays = tuple(None if array is None else _repeating(array.detach(), z) for array in given)
    number = 1.0 if isinstance(k, Tensor) else k
    value: Tensor = _Fused.apply(z.contiguous(), arrays, number, reduction, dtype)
    return value


def _repeating(array: Tensor, z: Tensor) -> Tensor:
    """Return an array to repeat along the flattened logits: one value, one per class, or all."""
    while array.dim() and array.shape[0] == 1:
        array = array[0]
    if array.shape != z.shape[z.dim() - array.dim() :]:
        array = array.expand(z.shape)
    return array.to(z.device).contiguous()


class Room(NamedTuple):
    """Buffers for the results of a forward pass."""

    value: Tensor
    gradient: Tensor | None
    sums: Tensor | None  # partial sums of a reduction


def room_for(z: Tensor, reduction: str, dtype: torch.dtype, training: bool) -> Room:
    """Allocate the buffers of a forward pass; a reduced loss computes its gradient at once."""
    if reduction == "none":
        return Room(z.new_empty(z.shape, dtype=dtype), None, None)
    sums = z.new_empty(_programs(z), dtype=torch.float64)
    return Room(z.new_empty((), dtype=dtype), torch.empty_like(z) if training else None, sums)


def launch_forward(z: Tensor, arrays: Any, k: float, reduction: str, room: Room) -> list[Launch]:
    """Launch the kernels of a forward pass."""
    value, gradient, sums = room
    if sums is None:
        return [_launch(z, arrays, k, reduction, value, False, None)]
    return [
        _launch(z, arrays, k, reduction, sums, True, gradient),
        start_kernel(
            sum_values, (1,), sums, None, value, len(sums), block=MOST_PROGRAMS, num_warps=8
        ),
    ]


def launch_backward(
    z: Tensor, arrays: Any, k: float, reduction: str, out: Tensor, grad: Tensor | None, skip: bool
) -> Launch:
    """Launch the kernel of a backward pass; with ``skip`` it does nothing if ``grad`` is 1."""
    return _launch(z, arrays, k, reduction, None, False, out, grad, skip)


class _Fused(Function):
    @staticmethod
    def forward(
        ctx: Any, z: Tensor, arrays: Any, k: float, reduction: str, dtype: torch.dtype
    ) -> Tensor:
        ctx.k, ctx.reduction = k, reduction
        room = room_for(z, reduction, dtype, ctx.needs_input_grad[0])
        with torch.cuda.device_of(z):
            launch_forward(z, arrays, k, reduction, room)
        ctx.save_for_backward(z, *arrays, room.gradient)
        return room.value

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        z, *arrays, gradient = ctx.saved_tensors
        (grad,) = grads
        several = is_batch(grad)  # kernels cannot read a vmapped batch
        reuse = gradient is not None and not several and not graph_is_kept()
        out = gradient if reuse else torch.empty_like(z)
        with torch.cuda.device_of(z):
            upstream = None if several else grad if _is_one(grad) else grad.contiguous()
            launch_backward(z.detach(), arrays, ctx.k, ctx.reduction, out, upstream, reuse)
        if several:
            out = torch.where((out == 0) | (grad == 0), 0, out * grad).to(out.dtype)
        return final(out, z), *[None] * 4

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        refuse_forward_mode()


def _is_one(grad: Tensor) -> bool:
    """Return whether a gradient is one number, possibly expanded."""
    return not any(grad.stride())


def _programs(z: Tensor) -> int:
    return min(MOST_PROGRAMS, -(-z.numel() // BLOCK))


def _launch(
    z: Tensor, arrays: Any, k: float, reduction: str, values: Tensor | None, summed: bool,
    out: Tensor | None, grad: Tensor | None = None, skip: bool = False,
) -> Launch:  # fmt: skip
    """Write the values or partial sums of them, and the gradient times ``grad``."""
    target, *factors = arrays
    scale = 1 / z.numel() if reduction == "mean" else 1.0
    sizes = (1 if array is None else array.numel() for array in factors)
    return start_kernel(
        binary, (_programs(z),), z, target, *factors, *sizes,
        grad, 0 if grad is None or _is_one(grad) else 1, values, out, z.numel(), k, scale,
        summed=summed, skip=skip, block=BLOCK, num_warps=WARPS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["k", "scale"])
def binary(
    z, target, pos_weight, weight, ks, pos_weights, weights, count_of_ks, grad, grad_stride, values,
    out, count, k, scale, summed: tl.constexpr, skip: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Compute a value and a gradient for each logit; with ``skip`` only if ``grad`` is not 1."""
    if skip:  # noqa: SIM102 (the compiler would evaluate both conditions)
        if is_done(grad, None, skip):
            return
    total = tl.zeros((block,), tl.float64)
    step = tl.num_programs(0).to(tl.int64) * block
    for start in range(tl.program_id(0).to(tl.int64) * block, count, step):
        at = start + tl.arange(0, block)
        inside = at < count
        logit = tl.load(z + at, mask=inside, other=0.0).to(tl.float32)
        t = tl.load(target + at, mask=inside, other=0.0).to(tl.float32)
        of_positive = _factor(pos_weight, pos_weights, at, inside)
        positive = t * of_positive
        factor = _factor(weight, weights, at, inside)
        sensitivity = sensitivity_of(k, ks, 1, at % count_of_ks, inside)
        soft = (positive != 0) & (t != 1)
        if tl.max(soft.to(tl.int32), 0) > 0:
            exact = t.to(tl.float64)
            value, f = _of_probability(logit, exact * of_positive, 1 - exact, sensitivity)
        else:
            value, f = _of_label(logit, positive, 1 - t, sensitivity)
        value *= factor
        if summed:
            total += tl.where(inside, value, 0.0)
        elif values is not None:
            tl.store(values + at, value.to(values.dtype.element_ty), mask=inside)
        if out is not None:
            factor *= scale
            if grad is not None:
                factor *= tl.load(grad + at * grad_stride, mask=inside, other=0.0).to(tl.float32)
            f = tl.where(factor == 0, 0.0, f * factor)
            tl.store(out + at, f.to(out.dtype.element_ty), mask=inside)
    if summed:
        tl.store(values + tl.program_id(0), tl.sum(total, 0) * scale)


@triton.jit
def _factor(array, size, at, inside):
    """Return the factors of some elements, from an array that repeats."""
    factor = 1.0
    if array is not None:
        factor = tl.load(array + at % size, mask=inside, other=0.0).to(tl.float32)
    return factor


@triton.jit
def _of_label(z, positive, negative, k):
    """Return the value and the rule of a target with all its mass on one class."""
    margin = tl.where(positive == 0, -z, z)
    finite = tl.where(margin > _GREATEST, _GREATEST, margin)
    finite = tl.where(finite < -_GREATEST, -_GREATEST, finite)
    zero = tl.zeros_like(z)
    value, strength = value_and_strength(finite, zero, zero.to(tl.float64) + 1, k)
    value = tl.where(margin == -float("inf"), float("inf"), value)
    mass = positive + negative
    f = mass * tl.where(positive == 0, strength, -strength)
    return tl.where(mass == 0, 0.0, mass * value), tl.where(mass == 0, 0.0, f)


@triton.jit
def _of_probability(z, positive, negative, k):
    """Return the value and the rule of any target, computed in float64."""
    z, k = z.to(tl.float64), k.to(tl.float64)
    tail = _log1p(tl.exp(-tl.abs(z)))
    log_yes, log_no = tl.where(z < 0, z, 0.0) - tail, tl.where(z > 0, -z, 0.0) - tail
    value = tl.where(positive == 0, 0.0, -positive * log_yes)
    value += tl.where(negative == 0, 0.0, -negative * log_no)
    mass = positive + negative
    yes, no = positive / mass, negative / mass
    bias = no * tl.exp(log_yes) - yes * tl.exp(log_no)
    up = ((bias > 0) | (yes == 0)) & (no > 0)
    missing = tl.exp(tl.where(up, log_no, log_yes)) + tl.where(up, yes, no)  # 1 - |ε|
    log_bias = tl.where(missing < 0.5, _log1p(-missing), tl.log(tl.abs(bias)))
    log_bias = tl.where((yes == 0) | (no == 0), tl.where(up, log_yes, log_no), log_bias)
    f = mass * tl.where(up, 1.0, -1.0) * tl.exp(k * log_bias)
    return value.to(tl.float32), tl.where(mass == 0, 0.0, f).to(tl.float32)


@triton.jit
def _log1p(x):
    """Return log(1 + x) without the rounding of 1 + x."""
    near = 1 + x
    return tl.where(near == 1, x, tl.log(near) * (x / (near - 1)))
