"""The loss on the CPU, by the compiled kernels of `cpu.cpp`.

`hatch_build.py` compiles them when the package is built. Without them the same formulas run in
PyTorch operations (`pseudograd.rules.paper`), which take several times as long.

The gradient is computed together with the value, while the logits are in the processor's cache;
the backward pass has only to multiply it by the upstream gradient, which is usually 1.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import os
import struct
import warnings
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import Function

from pseudograd.loss.autograd import final, graph_is_kept, is_batch, refuse_forward_mode
from pseudograd.loss.checks import refuse_class_index
from pseudograd.rules.checks import check_k
from pseudograd.rules.paper import Sensitivity

_SOURCE = Path(__file__).with_suffix(".cpp")
_pack = struct.Struct("23q3d").pack  # the struct `Problem` of cpu.cpp
_top_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


@cache
def kernels() -> dict[torch.dtype, Any] | None:
    """Return the kernel for each dtype of logits, or None if they have not been built."""
    capability = torch.backends.cpu.get_cpu_capability()
    library = next(filter(Path.exists, map(library_path, (capability, "DEFAULT"))), None)
    if library is None:
        return None
    functions = ctypes.CDLL(str(library))
    functions.source.restype = ctypes.c_char_p
    if _SOURCE.exists() and functions.source() != source_hash(_SOURCE):
        warnings.warn(
            f"pseudograd: {library.name} was built from another cpu.cpp and is not used, so the "
            "loss is slower; install the package again",
            stacklevel=2,
        )
        return None
    found = {}
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        found[dtype] = getattr(functions, f"loss_{str(dtype).removeprefix('torch.')}")
        found[dtype].argtypes = (ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int64)
        found[dtype].restype = ctypes.c_int64
    return found


def library_path(capability: str) -> Path:
    """Return where the kernels for a kind of processor are, by PyTorch's name for it: AVX2, ..."""
    return _SOURCE.with_name(f"cpu_{capability}.so")


def source_hash(source: Path) -> bytes:
    """Return what `cpu.cpp` is compiled with, to tell builds apart."""
    return hashlib.sha256(source.read_bytes()).hexdigest().encode()


@cache
def _parallel() -> int:
    """Return the function that runs work on PyTorch's own threads, or 0 if there is none."""
    function = getattr(ctypes.CDLL(None), "GOMP_parallel", 0) if os.name == "posix" else 0
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def _threads() -> int:
    return 1 if _is_fork else torch.get_num_threads()


# In a forked child OpenMP hangs, so a child works alone.
_is_fork = False


def _note_fork() -> None:
    global _is_fork
    _is_fork = True


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_note_fork)


def fused_cross_entropy(
    z: Tensor,
    target: Tensor,
    k: Sensitivity,
    weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
) -> Tensor:
    """Return the loss of logits (C), (N, C) or (N, C, d1, ...), in float32 or float64.

    Targets are labels or probabilities. If ``reduction`` is "none", the loss has the shape of
    labels.
    """
    if isinstance(k, Tensor):
        check_k(k)
    value: Tensor = _Fused.apply(z, target, k, weight, ignore_index, reduction, label_smoothing)
    return value


class _Fused(Function):
    @staticmethod
    def forward(
        ctx: Any,
        z: Tensor,
        target: Tensor,
        k: Sensitivity,
        weight: Tensor | None,
        ignore_index: int,
        reduction: str,
        smoothing: float,
    ) -> Tensor:
        readable, gradient = _readable(z), None
        if ctx.needs_input_grad[0]:
            # A half type would round the gradient before it is scaled, and float16 would lose it.
            # Hooks on saved tensors, as of activation checkpointing, are there to save memory;
            # before PyTorch 2.8 they cannot be seen.
            hooked = _top_hooks is None or _top_hooks(False) is not None
            if z.dtype in (torch.float32, torch.float64) and not hooked:
                gradient = torch.empty_like(readable)
                ctx.save_for_backward(z)
            else:
                ks = k if isinstance(k, Tensor) else None
                ctx.save_for_backward(z, target, weight, ks)
                ctx.k, ctx.others = (
                    None if ks is not None else k,
                    (ignore_index, reduction, smoothing),
                )
        ctx.gradient = gradient
        return _run(readable, gradient, 1.0, target, k, weight, ignore_index, reduction, smoothing)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        grad, f, is_kept = grads[0], ctx.gradient, graph_is_kept()
        if f is None:
            z, *tensors = ctx.saved_tensors  # an error if the graph has been freed
            target, weight, ks = tensors
            z, several = _readable(z), is_batch(grad)
            f, k = torch.empty_like(z), ctx.k if ks is None else ks
            _run(z, f, 1.0 if several else grad, target, k, weight, *ctx.others)
            f = _times(f, grad, True) if several else f
        else:
            ctx.gradient = f if is_kept else None
            f = _times(f, grad, not is_kept)
        if torch.is_grad_enabled():
            f = final(f, ctx.saved_tensors[0])
        return f, None, None, None, None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        refuse_forward_mode()


def _times(f: Tensor, grad: Tensor, in_place: bool) -> Tensor:
    """Return the gradient times the upstream one; 0 where either is 0, whatever the other."""
    grad = grad.unsqueeze(1) if grad.dim() else grad
    if not is_batch(grad):
        factor = grad.item() if grad.numel() == 1 else None
        if factor == 1:
            return f if in_place else f.clone()
        if bool((grad.isfinite() & (grad != 0)).all()) if factor is None else _is_usual(factor):
            return f.mul_(grad) if in_place else f * grad
    return torch.where((f == 0) | (grad == 0), 0, f * grad)


def _is_usual(factor: float) -> bool:
    return factor != 0 and math.isfinite(factor)


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
    gradient, above = (None, 1.0) if factor is None else (logits, factor)
    settings = (target, k, weight, ignore_index, "none", label_smoothing)
    return _run(logits, gradient, above, *settings)


def _run(
    z: Tensor,
    gradient: Tensor | None,
    factor: Sensitivity,
    target: Tensor,
    k: Sensitivity,
    weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    smoothing: float,
) -> Tensor:
    """Return the loss, and write its gradient times a factor, a number or one for each example."""
    dtype = z.dtype
    working = torch.float64 if dtype == torch.float64 else torch.float32
    positions, *of_z = _layout(z)
    of_gradient, of_target = of_z, [0, 0, 0]
    if gradient is not None and gradient.stride() != z.stride():
        of_gradient = [*_layout(gradient)[1:]]
    soft = target.is_floating_point()
    if soft:
        target = _readable(target.to(working))
        of_target = [*_layout(target)[1:]]
    elif target.dtype != torch.long or not target.is_contiguous():
        target = target.long().contiguous()
    classes = z.shape[min(z.dim() - 1, 1)]
    examples = z.numel() // classes
    whole = reduction != "none"
    result = torch.empty(() if whole else examples, dtype=working)
    # The kernels read these as float64. The arrays must live until they return.
    k_of_all, ks = _one_or_array(k)
    factor_of_all, factors = _one_or_array(factor)
    weights = None if weight is None else _doubles(weight)
    at_target, at_result = target.data_ptr(), result.data_ptr()
    problem = _pack(
        z.data_ptr(),
        0 if gradient is None else gradient.data_ptr(),
        0 if soft else at_target,
        at_target if soft else 0,
        0 if weights is None else weights.data_ptr(),
        0 if ks is None else ks.data_ptr(),
        0 if factors is None else factors.data_ptr(),
        0 if whole else at_result,
        at_result if whole else 0,
        reduction == "mean",
        ignore_index,
        examples,
        positions,
        classes,
        *of_z,
        *of_gradient,
        *of_target,
        k_of_all,
        factor_of_all,
        smoothing,
    )
    found = kernels()
    assert found is not None
    wrong = found[dtype](problem, _parallel(), _threads())
    if wrong == _NO_MEMORY:
        raise MemoryError("there is no memory left for the logits of one example")
    if wrong >= 0:
        refuse_class_index(int(target.view(-1)[wrong]), classes, ignore_index)
    if whole:
        return result
    return result.reshape(z.shape[:1] + z.shape[2:] if z.dim() > 1 else ())


_NO_MEMORY = -2


def _readable(tensor: Tensor) -> Tensor:
    """Return a tensor that the kernels can read: the same, or a copy."""
    return tensor if tensor.dim() <= 2 or _layout(tensor)[0] else tensor.contiguous()


def _layout(tensor: Tensor) -> tuple[int, int, int, int]:
    """Return how many examples an outer index has, and the strides of index, example and class.

    For (N, C, d1, ...) the outer index is that of N, and d1, ... must lie like one dimension; if
    they do not, the first number is 0.
    """
    strides = tensor.stride()
    if len(strides) == 2:
        return tensor.shape[0], 0, strides[0], strides[1]
    if len(strides) == 1:
        return 1, 0, 0, strides[0]
    positions, step = 1, 0
    for size, stride in zip(tensor.shape[:1:-1], strides[:1:-1], strict=True):
        if size == 1:
            continue
        if positions == 1:
            step = stride
        elif stride != step * positions:
            return 0, 0, 0, 0
        positions *= size
    return positions, strides[0], step, strides[1]


def _one_or_array(number: Sensitivity) -> tuple[float, Tensor | None]:
    """Return a number for all examples, or an array with one for each."""
    if not isinstance(number, Tensor):
        return number, None
    return (number.item(), None) if number.numel() == 1 else (1.0, _doubles(number))


def _doubles(tensor: Tensor) -> Tensor:
    return tensor.detach().double().contiguous()
