"""Fast checks of the most common calls, which then skip the full argument checks.

Python overhead dominates the time of a small loss. So these checks read only cheap attributes of
tensors, and the rest is cached by shapes and settings.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from pseudograd.loss.checks import REDUCTIONS
from pseudograd.rules.checks import GREATEST_K, LEAST_K, is_eager
from pseudograd.rules.paper import Sensitivity

_PLAIN = (Tensor, Parameter)
_PRECISE = (torch.float32, torch.float64)
_DENSE, _LABEL = torch.strided, torch.long


def is_usual(
    input: Tensor,
    target: Tensor,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    k: Sensitivity,
) -> bool:
    """Return whether a call is eager, uses plain tensors on one device, and passes all checks."""
    if type(input) not in _PLAIN or type(target) is not Tensor or not is_eager():
        return False
    if type(k) is Tensor:
        if not _is_plain_k(k, input):
            return False
        number, ks = 1.0, k.shape  # the kernels check each value
    elif type(k) is float or type(k) is int:
        number, ks = k, None
    else:
        return False
    dtype = target.dtype
    return (
        (dtype is torch.long or (dtype is input.dtype and not target.requires_grad))
        and input.layout is torch.strided is target.layout
        and input.device == target.device
        and type(ignore_index) is int
        and type(reduction) is str
        and type(label_smoothing) is float
        and _passed(
            input.shape, target.shape, dtype, ks, number, ignore_index, reduction, label_smoothing
        )
    )


def is_usual_in_graph(
    input: Any,
    target: Any,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    k: Any,
) -> bool:
    """Return whether a call that `torch.compile` traces is on a CPU and passes all checks.

    Every global read here adds a guard, which is checked at each call of the graph, so there are
    few. None is read through a second module as well: Dynamo compares the two by a guard in Python,
    which takes longer than all others together.
    """
    if not (isinstance(input, Tensor) and isinstance(target, Tensor)):
        return False
    number, ks = k, None
    if isinstance(k, Tensor):
        if k.requires_grad or not (k.is_cpu and k.layout is _DENSE and k.dtype in _PRECISE):
            return False
        number, ks = 1.0, k.shape if k.dim() else None
    elif type(k) is not float and type(k) is not int:
        return False
    dtype = target.dtype
    return bool(
        input.is_cpu
        and target.is_cpu
        and input.layout is _DENSE is target.layout
        and input.dtype in _PRECISE
        and (dtype is _LABEL or dtype is input.dtype)
        and type(ignore_index) is int
        and type(reduction) is str
        and type(label_smoothing) is float
        and _passes(
            input.shape, target.shape, dtype, ks, number, ignore_index, reduction, label_smoothing
        )
    )


def is_usual_binary(input: Tensor, target: Tensor, reduction: str, k: Sensitivity) -> bool:
    """Return whether a binary loss is eager, uses plain tensors, and passes all checks."""
    if type(input) not in _PLAIN or type(target) is not Tensor or not is_eager():
        return False
    if type(k) is Tensor:
        right = _is_plain_k(k, input) and k.shape == input.shape
    else:
        right = (type(k) is float or type(k) is int) and LEAST_K <= k <= GREATEST_K
    return (
        right
        and input.device == target.device
        and input.is_floating_point()
        and target.dtype is input.dtype
        and target.shape == input.shape
        and input.layout is torch.strided is target.layout
        and not target.requires_grad
        and reduction in REDUCTIONS
    )


def _is_plain_k(k: Tensor, input: Tensor) -> bool:
    precise = k.dtype in _PRECISE and k.layout is torch.strided
    return precise and not k.requires_grad and k.device == input.device


def _passes(
    shape: torch.Size,
    target: torch.Size,
    dtype: torch.dtype,
    ks: torch.Size | None,
    k: float,
    ignore_index: int,
    reduction: str,
    smoothing: float,
) -> bool:
    if len(shape) < 2 or not shape[1]:
        return False
    examples, is_label = shape[:1] + shape[2:], dtype is _LABEL
    return (
        target == (examples if is_label else shape)
        and (is_label or ignore_index < 0)  # probabilities have no index to ignore
        and (ks is None or ks == examples)
        and abs(ignore_index) < 2**63
        and reduction in REDUCTIONS
        and 0 <= smoothing <= 1
        and LEAST_K <= k <= GREATEST_K
    )


_passed = lru_cache(maxsize=1024)(_passes)  # the compiler cannot trace it
