"""The loss on CPUs, computed by the compiled kernels in `cpp/`.

`hatch_build.py` compiles them when the package is built. Without them, the loss falls back to
PyTorch operations (`pseudograd.rules.paper`), which take several times as long.

The gradient is computed together with the value, while the logits are in the processor's cache.
The backward pass only multiplies it by the upstream gradient, which is usually 1.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import os
import struct
import warnings
from functools import cache, lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import Function

from pseudograd.loss.autograd import (
    are_hooked,
    final,
    graph_is_kept,
    is_batch,
    refuse_forward_mode,
)
from pseudograd.loss.checks import is_wrapper, refuse_class_index
from pseudograd.rules.checks import check_k
from pseudograd.rules.paper import Sensitivity

_SOURCE = Path(__file__).with_name("cpp")
# The struct `Problem` of cpp/tiles.h in three parts, and `BinaryProblem` of cpp/binary.h.
_pack_pointers, _pack_sizes = struct.Struct("9q").pack, struct.Struct("30q").pack
_pack_numbers, _pack_binary = struct.Struct("3d").pack, struct.Struct("10qd").pack
_WORKING = (torch.float32, torch.float64)


@cache
def kernels() -> dict[Any, Any] | None:
    """Return the kernel for each dtype of logits, or None if they have not been built.

    Kernels of the binary loss have the keys ("binary", dtype).
    """
    capability = torch.backends.cpu.get_cpu_capability()
    library = next(filter(Path.exists, map(library_path, (capability, "DEFAULT"))), None)
    if library is None:
        return None
    functions = ctypes.CDLL(str(library))
    functions.source.restype = ctypes.c_char_p
    if _SOURCE.exists() and functions.source() != source_hash(_SOURCE):
        warnings.warn(
            f"pseudograd: {library.name} was built from other sources and is not used, so the "
            "loss is slower; reinstall the package",
            stacklevel=2,
        )
        return None
    found: dict[Any, Any] = {}
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        found[dtype] = getattr(functions, f"loss_{name}")
        if dtype in _WORKING:
            found["binary", dtype] = getattr(functions, f"binary_{name}")
    for function in found.values():
        function.argtypes = (ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int64)
        function.restype = ctypes.c_int64
    return found


def library_path(capability: str) -> Path:
    """Return the path of the kernels for a CPU capability, by PyTorch's name: AVX2, ..."""
    return _SOURCE.with_name(f"cpu_{capability}.so")


def source_hash(source: Path) -> bytes:
    """Return the hash of the sources in a folder, which is compiled in to detect stale builds."""
    files = sorted(source.iterdir())
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest().encode()


@cache
def _parallel() -> int:
    """Return the address of the OpenMP function that uses PyTorch's threads, or 0."""
    function = getattr(ctypes.CDLL(None), "GOMP_parallel", 0) if os.name == "posix" else 0
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def _threads() -> int:
    return 1 if _is_fork else torch.get_num_threads()


# OpenMP hangs in a forked child, so a child uses one thread.
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
    return fused(z, (target, k, weight, ignore_index, reduction, label_smoothing))


Call = tuple[Tensor, Sensitivity, Tensor | None, int, str, float]


class _Fused(Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, call: Call) -> Tensor:
        gradient = None
        readable = _readable(z)
        if ctx.needs_input_grad[0]:
            # Half types would round the gradient before it is scaled, and float16 would underflow.
            # Saved-tensor hooks, as of activation checkpointing, are there to save memory.
            if z.dtype in _WORKING and not are_hooked():
                gradient = _writable(torch.empty_like(readable))
                ctx.save_for_backward(z)
            else:
                target, k, weight, *ctx.others = call
                ctx.k, ks = (None, k) if isinstance(k, Tensor) else (k, None)
                ctx.save_for_backward(z, target, weight, ks)
        ctx.gradient = gradient
        return _run(readable, gradient, 1.0, *call)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,), f, is_kept = grads, ctx.gradient, graph_is_kept()
        if f is None:
            z, *tensors = ctx.saved_tensors  # raises if the graph has been freed
            target, weight, ks = tensors
            z, unreadable = _readable(z), is_batch(grad) or is_wrapper(grad)
            f, k = _writable(torch.empty_like(z)), ctx.k if ks is None else ks
            _run(z, f, 1.0 if unreadable else grad, target, k, weight, *ctx.others)
            f = _times(f, grad, True) if unreadable else f
        else:
            ctx.gradient = f if is_kept else None
            f = _times(f, grad, not is_kept)
        return final(f, ctx.saved_tensors[0]) if torch.is_grad_enabled() else f, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        refuse_forward_mode()


def fused(z: Tensor, call: Call) -> Tensor:
    """Return the loss; see `fused_cross_entropy`."""
    # With grad mode off, ``needs_input_grad`` would still be True and the gradient computed.
    value: Tensor = _Fused.apply(z if torch.is_grad_enabled() else z.detach(), call)
    return value


def _times(f: Tensor, grad: Tensor, in_place: bool) -> Tensor:
    """Return ``f`` times the upstream gradient; 0 where either is 0, even if the other is NaN."""
    if not is_batch(grad):
        if grad.numel() == 1 and grad.item() == 1:
            return f if in_place else f.clone()
        grad = grad.unsqueeze(1) if 0 < grad.dim() < f.dim() else grad
        finite, ignored = grad.isfinite(), grad == 0
        if bool((finite & ~ignored).all()):
            return f.mul_(grad) if in_place else f * grad
        if bool(finite.all()):
            product = f.mul_(grad) if in_place else f * grad
            # Only 0 times NaN or infinity needs the mask, and a sum is much faster than a mask.
            return product if product.sum().isfinite() else product.masked_fill_(ignored, 0)
    elif 0 < grad.dim() < f.dim():
        grad = grad.unsqueeze(1)
    return torch.where((f == 0) | (grad == 0), 0, f * grad)


def loss_and_gradient(z: Tensor, call: Call, training: bool) -> tuple[Tensor, Tensor]:
    """Return the loss in full precision and, if training, its gradient with the strides of z."""
    z = z if z.dtype in _WORKING else z.float()  # half types would round it before it is scaled
    readable = _readable(z)
    if not training:
        return _run(readable, None, 1.0, *call), z.new_empty(0)
    gradient = torch.empty_like(z)
    written = _writable(gradient)
    value = _run(readable, written, 1.0, *call)
    return value, gradient if written is gradient else gradient.copy_(written)


def values_and_gradients(
    logits: Tensor,
    target: Tensor,
    k: Sensitivity,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    factor: Tensor | None,
) -> Tensor:
    """Return the values of rows; with a factor, overwrite the logits with the gradient.

    The gradient is Eq. 5, or the rule for soft targets, times each row's weight and factor.
    """
    gradient, scale = (None, 1.0) if factor is None else (logits, factor)
    settings = (target, k, weight, ignore_index, "none", label_smoothing)
    return _run(logits, gradient, scale, *settings)


# --- two classes ----------------------------------------------------------------------------------


def fused_binary(
    z: Tensor,
    target: Tensor,
    k: Sensitivity,
    weight: Tensor | None,
    pos_weight: Tensor | None,
    reduction: str,
) -> Tensor:
    """Return the binary loss of float32 or float64 logits of any shape."""
    z = z if torch.is_grad_enabled() else z.detach()
    value: Tensor = _FusedBinary.apply(z, (target, k, weight, pos_weight, reduction))
    return value


class _FusedBinary(_Fused):
    @staticmethod
    def forward(ctx: Any, z: Tensor, call: Any) -> Tensor:
        target, k, weight, pos_weight, reduction = call
        dense = _spread(z, z)
        gradient = torch.empty_like(dense) if ctx.needs_input_grad[0] else None
        ctx.gradient = gradient
        ctx.save_for_backward(z)
        # These references keep the arrays alive until the kernel returns.
        labels = _spread(target, z)
        positives = None if pos_weight is None else _spread(pos_weight, z)
        weights = None if weight is None else _spread(weight, z)
        k_of_all, ks = (1.0, _spread(k, z)) if isinstance(k, Tensor) else (k, None)
        whole = reduction != "none"
        result = torch.empty_like(_ONE_NUMBER[z.dtype]) if whole else z.new_empty(z.shape)
        problem = _pack_binary(
            dense.data_ptr(),
            0 if gradient is None else gradient.data_ptr(),
            labels.data_ptr(),
            0 if positives is None else positives.data_ptr(),
            0 if weights is None else weights.data_ptr(),
            0 if ks is None else ks.data_ptr(),
            0 if whole else result.data_ptr(),
            result.data_ptr() if whole else 0,
            z.numel(),
            reduction == "mean",
            k_of_all,
        )
        found = kernels()
        assert found is not None
        if found["binary", z.dtype](problem, _parallel(), _threads()) == _WRONG_K:
            check_k(k)  # raises
        return result


def _spread(array: Tensor, z: Tensor) -> Tensor:
    """Return an array expanded to the shape of the logits, contiguous and of their dtype."""
    if array.dtype is z.dtype and array.shape == z.shape and array.is_contiguous():
        return array.resolve_neg() if array.is_neg() else array
    return array.detach().to(z).expand(z.shape).resolve_neg().contiguous()


# --- the call of a kernel -------------------------------------------------------------------------


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
    """Return the loss; write its gradient times ``factor``, a number or one per example."""
    labels: Tensor | None = None
    probabilities: Tensor | None = None
    half, of_target = False, None
    if target.is_floating_point():
        same = target.dtype is z.dtype
        half = same and z.dtype not in _WORKING
        probabilities = _readable(target if same else target.to(_working(z)))
        of_target = probabilities.stride()
    elif target.dtype is torch.long and target.is_contiguous():
        labels = target
    else:
        labels = target.long().contiguous()
    whole = reduction != "none"
    value = None if whole else z.new_empty(_examples(z), dtype=_working(z))
    reduced = torch.empty_like(_ONE_NUMBER[z.dtype]) if whole else None
    k_of_all, ks = (k, None) if type(k) is float else _one_or_array(k)
    factor_of_all, factors = (factor, None) if type(factor) is float else _one_or_array(factor)
    factors = None if factors is None else factors.double()
    weights = None if weight is None else _doubles(weight)
    pointers = _pack_pointers(
        z.data_ptr(),
        0 if gradient is None else gradient.data_ptr(),
        0 if labels is None else labels.data_ptr(),
        0 if probabilities is None else probabilities.data_ptr(),
        0 if weights is None else weights.data_ptr(),
        0 if ks is None else ks.data_ptr(),
        0 if factors is None else factors.data_ptr(),
        0 if value is None else value.data_ptr(),
        0 if reduced is None else reduced.data_ptr(),
    )
    sizes = _sizes(
        z.shape, z.stride(), None if gradient is None else gradient.stride(), of_target,
        reduction == "mean", ignore_index, half, ks is not None and ks.dtype is torch.float64,
    )  # fmt: skip
    problem = pointers + sizes + _pack_numbers(k_of_all, factor_of_all, smoothing)
    found = kernels()
    assert found is not None
    wrong = found[z.dtype](problem, _parallel(), _threads())
    # Until here these references keep the arrays alive. Compiled autograd, which runs this function
    # in pieces, would drop them earlier if nothing followed.
    del labels, probabilities, weights, ks, factors
    if wrong == _NO_MEMORY:
        raise MemoryError("there is not enough memory for the logits of one example")
    if wrong == _WRONG_K:
        check_k(k)  # raises
    if wrong >= 0:
        refuse_class_index(int(target.flatten()[wrong]), z.shape[min(z.dim() - 1, 1)], ignore_index)
    if reduced is not None:
        return reduced
    assert value is not None
    return value


_NO_MEMORY, _WRONG_K = -2, -3
_MOST_DIMENSIONS = 5  # that the kernels can read at any strides
_ONE_NUMBER = {
    dtype: torch.zeros(
        (), dtype=torch.float64 if dtype == torch.float64 else torch.float32, device="cpu"
    )
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)
}


def _working(z: Tensor) -> torch.dtype:
    return _ONE_NUMBER[z.dtype].dtype


def _examples(z: Tensor) -> torch.Size:
    return z.shape[:1] + z.shape[2:] if z.dim() > 1 else torch.Size()


def _readable(tensor: Tensor) -> Tensor:
    """Return a tensor that the kernels can read: the given one, or a copy."""
    if tensor.is_neg():  # e.g. the imaginary part of a conjugate: PyTorch negates lazily
        tensor = tensor.resolve_neg()
    return tensor if tensor.dim() <= _MOST_DIMENSIONS else tensor.contiguous()


def _writable(empty: Tensor) -> Tensor:
    """Return a buffer that the kernels can write: the given one, or another of its shape."""
    return empty if empty.dim() <= _MOST_DIMENSIONS else empty.new_empty(empty.shape)


@lru_cache(maxsize=1024)
def _sizes(
    shape: torch.Size,
    of_z: tuple[int, ...],
    of_gradient: tuple[int, ...] | None,
    of_target: tuple[int, ...] | None,
    *flags: int,
) -> bytes:
    """Return the fields of a problem between its pointers and its numbers.

    They are cached by shape, because Python overhead dominates the time of a small loss.
    """
    rank, axis = len(shape), min(len(shape) - 1, 1)
    strides = (of_z, of_gradient or of_z, of_target or (0,) * rank)
    dimensions, examples = [], 1
    for other in range(rank - 1, -1, -1):
        size = shape[other]
        if other != axis and size != 1:
            dimensions.append((size, *(of[other] for of in strides), examples))
            examples *= size
    of_classes = (shape[axis], *(of[axis] for of in strides), 0)
    # Without examples, strides are arbitrary and may not merge.
    merged = _merged(dimensions if examples else [])
    return _pack_sizes(*flags, examples, *of_classes, *chain(*merged))


def _merged(dimensions: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return four dimensions of the examples, each a size and the strides of the arrays.

    Those that are one dimension to all arrays are merged. The last one has the smallest stride of
    the logits, because the vectors lie along it.
    """
    merged: list[tuple[int, ...]] = []
    for size, *steps in sorted(dimensions, key=lambda one: one[1] or math.inf, reverse=True):
        if merged and merged[-1][1:] == tuple(size * step for step in steps):
            size *= merged.pop()[0]
        merged.append((size, *steps))
    return [(1, 0, 0, 0, 0)] * (4 - len(merged)) + merged


def _one_or_array(number: Sensitivity) -> tuple[float, Tensor | None]:
    """Return one number for all examples, or an array with one for each."""
    if not isinstance(number, Tensor):
        return number, None
    if number.numel() == 1:
        return number.item(), None
    number = number.detach().resolve_neg().contiguous()
    return 1.0, number if number.dtype in _WORKING else number.float()


def _doubles(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_neg().double().contiguous()
