"""Checks of the numbers that rules and losses take."""

from __future__ import annotations

import numbers
from typing import Any

import numpy as np
import torch
from torch import Tensor

# Beyond these bounds a change of k has no effect, and products with k leave float32's range.
LEAST_K, GREATEST_K = 2.0**-100, 2.0**100

PROXY = torch._C._TorchDispatchModeKey.PROXY
_NUMBERS: tuple[type, ...] = (float, int, numbers.Real, torch.SymFloat, torch.SymInt)


def is_eager() -> bool:
    """Return whether this call is eager: nothing is traced, and `torch.func` is not active."""
    if torch.compiler.is_compiling():  # the compiler cannot trace the rest
        return False
    traced = torch._C._get_dispatch_mode(PROXY) is not None or torch._C._is_tracing()
    return not (traced or torch._C._are_functorch_transforms_active())


def holds_numbers(tensor: Tensor) -> bool:
    """Return whether a tensor's values can be read, and without a device sync."""
    kind: Any = type(tensor)
    # Fake and distributed tensors have their own ``__torch_dispatch__``.
    plain = kind.__torch_dispatch__ is Tensor.__torch_dispatch__
    return tensor.is_cpu and is_eager() and plain


def check_logits(logits: Tensor, target: Tensor) -> None:
    """Raise unless both are tensors, and the logits hold floating-point numbers."""
    for name, tensor in (("logits", logits), ("target", target)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor, not {type(tensor).__name__}")
    if not logits.is_floating_point():
        raise TypeError(f"logits must hold floating-point numbers, not {logits.dtype}")


def check_labels(logits: Tensor, target: Tensor) -> None:
    """Raise unless there is one valid class index for each row of the logits (..., C)."""
    check_logits(logits, target)
    if target.is_floating_point() or target.is_complex() or target.dtype == torch.bool:
        raise TypeError(f"target must hold class indices, not {target.dtype}")
    if logits.dim() == 0 or target.shape != logits.shape[:-1]:
        raise ValueError(
            f"target must have one label for each row of the logits, whose shape is "
            f"{tuple(logits.shape)}, not the shape {tuple(target.shape)}"
        )
    if target.numel() and holds_numbers(target):
        least, greatest = target.aminmax()
        classes = logits.shape[-1]
        if least < 0 or greatest >= classes:
            wrong = int(least if least < 0 else greatest)
            raise IndexError(
                f"target holds the class index {wrong}, which is out of range: there are {classes} "
                f"classes (0 to {classes - 1})"
            )


def check_parameter(
    name: str, value: float | Tensor, least: float, greatest: float, wanted: str
) -> None:
    """Raise unless a value is a tensor, or a number from ``least`` to ``greatest``."""
    if isinstance(value, Tensor):
        return
    if not _is_number(value):
        raise TypeError(f"{name} must be a number or a tensor, not {type(value).__name__}")
    check_number(name, value, least, greatest, wanted)


def check_number(name: str, value: float, least: float, greatest: float, wanted: str) -> None:
    """Raise unless a value is a number from ``least`` to ``greatest``."""
    if not _is_number(value):
        raise TypeError(f"{name} must be {wanted}, not {value!r}")
    # NumPy would convert the bounds to its own type, in which they may overflow.
    number = float(value) if isinstance(value, np.generic) else value
    if not least <= number <= greatest:
        raise ValueError(f"{name} must be {wanted}, not {value}")


def _is_number(value: object) -> bool:
    return isinstance(value, _NUMBERS) and not isinstance(value, bool)


def check_k(k: float | Tensor, values: bool = True) -> None:
    """Raise if k is out of bounds.

    Args:
        k: The sensitivity: a number, or a tensor of them.
        values: Whether to check a tensor's values. That needs a device sync, and is impossible
            while tracing.

    """
    if not isinstance(k, Tensor):
        check_parameter("k", k, LEAST_K, GREATEST_K, "a finite number above 0 (2^-100 to 2^100)")
    elif values and k.numel():
        least, greatest = k.aminmax()  # both are NaN if any k is
        if not LEAST_K <= least.item() <= greatest.item() <= GREATEST_K:
            raise ValueError("k must be finite and above 0 (2^-100 to 2^100) for every example")
