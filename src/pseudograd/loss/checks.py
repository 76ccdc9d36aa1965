"""Argument checks of the losses; each error names the argument and the fix."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import numpy as np
import torch
from torch import Tensor

from pseudograd.rules.checks import check_k, check_number
from pseudograd.rules.paper import Sensitivity

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")

REDUCTIONS = ("mean", "sum", "none")
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_POSITIVE = math.ulp(0.0), sys.float_info.max
IMPLEMENTATIONS = ("auto", "triton", "torch")


def check_arguments(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
) -> torch.Size:
    """Return the shape of the examples; raise where `torch.nn.functional.cross_entropy` would."""
    if not isinstance(input, Tensor):
        raise TypeError(f"input must be a tensor of logits, not {type(input).__name__}")
    if not isinstance(target, Tensor):
        raise TypeError(f"target must be a tensor of labels, not {type(target).__name__}")
    check_settings(ignore_index, reduction, label_smoothing)
    check_dense("input", input)
    check_dense("target", target)
    if not input.is_floating_point():
        raise TypeError(f"input must hold floating-point logits, not {input.dtype}; use .float()")
    check_dtype("input", input)
    shape = input.shape
    if not shape:
        raise ValueError("input must have a class dimension: shape (C), (N, C) or (N, C, d1, ...)")
    classes = shape[min(len(shape) - 1, 1)]
    examples = shape[:1] + shape[2:] if len(shape) > 1 else shape[1:]
    if classes == 0:
        raise ValueError(f"input has no classes: its shape is {tuple(shape)}")
    if target.is_floating_point():
        check_dtype("target", target)
        if target.shape != shape:
            raise ValueError(
                "target holds floating-point numbers, so it must be class probabilities of the "
                f"shape of input, {tuple(shape)}, not {tuple(target.shape)}; for class indices "
                "use .long()"
            )
        check_nothing_ignored(ignore_index)
    elif target.is_complex() or target.dtype == torch.bool:
        raise TypeError(f"target must hold class indices or probabilities, not {target.dtype}")
    elif target.shape != examples:
        raise ValueError(
            f"target must hold class indices of shape {tuple(examples)} for an input "
            f"of shape {tuple(shape)}, not {tuple(target.shape)}"
        )
    check_device("target", target, input.device)
    if weight is not None:
        check_factors("weight", weight)
        check_class_factors("weight", weight, classes)
        check_device("weight", weight, input.device)
    return examples


def check_settings(ignore_index: int, reduction: str, label_smoothing: float) -> None:
    """Raise if an argument that is not a tensor is invalid."""
    if not _is_whole(ignore_index):
        raise TypeError(f"ignore_index must be a whole number, not {ignore_index!r}")
    if not -(2**63) <= ignore_index < 2**63:
        raise ValueError(f"ignore_index must fit in 64 bits, not {ignore_index}")
    check_reduction(reduction)
    check_number("label_smoothing", label_smoothing, 0, 1, "a number in [0, 1]")


def check_reduction(reduction: str) -> None:
    """Raise unless ``reduction`` is a known name."""
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be 'mean', 'sum' or 'none', not {reduction!r}")


def _is_whole(number: object) -> bool:
    return isinstance(number, (int, np.integer)) and not isinstance(number, bool)


def check_nothing_ignored(ignore_index: int) -> None:
    """Raise if there is an index to ignore although targets are probabilities."""
    if ignore_index >= 0:
        raise ValueError(
            f"ignore_index must be negative, not {ignore_index}, if target holds class "
            "probabilities, which have no index to ignore"
        )


def python_number(number: T) -> T:
    """Return a NumPy scalar as a Python number, and anything else unchanged."""
    return number.item() if isinstance(number, np.generic) else number


def _described(value: object) -> str:
    return f"a tensor of {value.dtype}" if isinstance(value, Tensor) else type(value).__name__


def check_dense(name: str, tensor: Tensor) -> None:
    """Raise unless a tensor is dense."""
    if tensor.layout != torch.strided:
        raise TypeError(f"{name} must be a dense tensor, not {tensor.layout}; use .to_dense()")


def check_dtype(name: str, tensor: Tensor) -> None:
    """Raise for dtypes such as float8, for which PyTorch has no cross-entropy either."""
    if tensor.dtype not in _FLOATS:
        raise TypeError(
            f"{name} must be float16, bfloat16, float32 or float64, not {tensor.dtype}; use "
            ".float()"
        )


def check_floats(name: str, tensor: object, content: str = "", advice: str = "") -> None:
    """Raise unless this is a dense tensor of a floating-point dtype that PyTorch has losses for."""
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        wanted = f"a floating-point tensor{content}"
        raise TypeError(f"{name} must be {wanted}, not {_described(tensor)}{advice}")
    check_dtype(name, tensor)
    check_dense(name, tensor)


def check_device(name: str, tensor: Tensor, device: torch.device, of: str = "input") -> None:
    """Raise unless a tensor is on the device of another one."""
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device} but {of} is on {device}")


def check_constant(name: str, tensor: Tensor) -> None:
    """Raise if a tensor requires a gradient, which the loss would not compute."""
    if tensor.requires_grad:
        raise ValueError(f"{name} must not require a gradient; use {name}.detach()")


def check_factors(name: str, factors: Tensor | None) -> None:
    """Raise unless per-class values are None or a dense floating-point tensor."""
    if factors is not None:
        # A k passed by position arrives as ``weight``.
        given: Any = factors
        is_k = name == "weight" and isinstance(given, (int, float))
        advice = "; pass k by keyword, k=..." if is_k else ""
        check_floats(name, factors, " with one value for each class", advice)


def check_class_factors(name: str, factors: Tensor, classes: int) -> None:
    """Raise unless a tensor has one value for each class, and no gradient."""
    if factors.shape != (classes,):
        raise ValueError(
            f"{name} must have one value for each of the {classes} classes, shape ({classes},), "
            f"not {tuple(factors.shape)}"
        )
    if name != "bias":
        check_constant(name, factors)


def check_linear(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    chunk_rows: int | None,
) -> None:
    """Raise unless the tensors of a linear layer and its loss fit together."""
    optional = {"bias": bias, "class_weight": class_weight}
    factors = {name: tensor for name, tensor in optional.items() if tensor is not None}
    for name, tensor in {"hidden": hidden, "weight": weight, **factors}.items():
        check_floats(name, tensor)
        if hasattr(tensor, "device_mesh"):
            raise TypeError(
                f"{name} is a distributed tensor; pass {name}.full_tensor(), or {name}.to_local() "
                "with the process_group that the classes are split over"
            )
        check_device(name, tensor, hidden.device, "hidden")
        same_dtype = name == "class_weight" or tensor.dtype == hidden.dtype
        if not (same_dtype or autocast_is_on(hidden)):
            raise TypeError(
                f"{name} is {tensor.dtype} but hidden is {hidden.dtype}; convert one of them"
            )
    if weight.dim() != 2 or weight.shape[0] == 0:
        raise ValueError(f"weight must have the shape (classes, H), not {tuple(weight.shape)}")
    if hidden.dim() == 0 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"hidden must have the shape (..., {weight.shape[1]}) for a weight of shape "
            f"{tuple(weight.shape)}, not {tuple(hidden.shape)}"
        )
    for name, tensor in factors.items():
        check_class_factors(name, tensor, len(weight))
    _check_linear_target(hidden, weight, target)
    check_chunk_rows(chunk_rows)


def _check_linear_target(hidden: Tensor, weight: Tensor, target: Tensor) -> None:
    if not isinstance(target, Tensor) or target.dtype == torch.bool or target.is_complex():
        raise TypeError("target must be a tensor of class indices or class probabilities")
    wanted, kind = tuple(hidden.shape[:-1]), "class indices"
    if target.is_floating_point():
        wanted, kind = (*wanted, weight.shape[0]), "class probabilities"
        check_dtype("target", target)
        if target.requires_grad:
            raise ValueError(
                "target must not require a gradient in the linear loss; use target.detach(), or "
                "call tunable_cross_entropy on the logits"
            )
    if tuple(target.shape) != wanted:
        raise ValueError(
            f"target must hold {kind} of shape {wanted} for hidden of "
            f"shape {tuple(hidden.shape)}, not {tuple(target.shape)}"
        )
    check_device("target", target, hidden.device, "hidden")


def check_softcap(softcap: float | None) -> None:
    """Raise unless ``softcap`` is a finite number above 0 or None."""
    if softcap is not None:
        check_number("softcap", softcap, *_POSITIVE, "a finite number above 0, or None")


def check_z_loss(z_loss: float) -> None:
    """Raise unless ``z_loss`` is a finite number of 0 or more."""
    check_number("z_loss", z_loss, 0, sys.float_info.max, "a finite number of 0 or more")


def check_chunk_rows(chunk_rows: int | None) -> None:
    """Raise unless ``chunk_rows`` is a number of rows or None."""
    if chunk_rows is None:
        return
    if not _is_whole(chunk_rows) or chunk_rows < 1:
        raise ValueError(f"chunk_rows must be a whole number of 1 or more, not {chunk_rows!r}")


def checked_k(k: Sensitivity, shape: torch.Size | None = None, values: bool = False) -> Sensitivity:
    """Return k as a Python float or a tensor; raise if it is neither, or invalid.

    Args:
        k: The sensitivity.
        shape: The shape of the examples; None if it is not known yet.
        values: Whether to check a tensor's values.

    """
    if not isinstance(k, Tensor):
        check_k(k)
        # NumPy scalars become Python floats; the compiler's symbolic numbers stay symbolic.
        number: Any = k
        return k if isinstance(number, (torch.SymFloat, torch.SymInt)) else float(k)
    check_dense("k", k)
    if not k.is_floating_point():
        raise TypeError(f"k must hold floating-point numbers, not {k.dtype}; use .float()")
    check_dtype("k", k)
    if k.requires_grad:
        raise ValueError(
            "k must not require a gradient, since the loss has no gradient for k; use k.detach()"
        )
    if shape is not None and k.dim() > 0 and k.shape != shape:
        advice = ""
        if k.shape == shape[:1]:  # one for each image, where each pixel is an example
            inner = ", None" * (len(shape) - 1)
            advice = f"; use k[:{inner}].expand{tuple(shape)} to repeat one value per batch element"
        elif k.dim() == 1:
            advice = "; for one value for each class, use class_k"
        raise ValueError(
            f"k must be a number or have one value for each example, shape {tuple(shape)}, "
            f"not {tuple(k.shape)}{advice}"
        )
    check_k(k, values)
    return k


def check_class_k(
    class_k: Tensor, k: Sensitivity, classes: int, device: torch.device, split: bool
) -> None:
    """Raise unless ``class_k`` has one value for each class, and k is a number."""
    check_factors("class_k", class_k)
    if split:
        raise ValueError(
            "class_k does not work with a process_group, since a rank holds only its shard of the "
            "classes; use k=class_k[target], with the class_k of all classes"
        )
    check_class_factors("class_k", class_k, classes)
    if isinstance(k, Tensor) and k.dim() > 0:
        raise ValueError("pass k for each example or class_k for each class, not both")
    check_device("class_k", class_k, device, "target")


def check_class_k_values(class_k: Tensor) -> None:
    """Raise if the sensitivity of a class is out of bounds."""
    try:
        check_k(class_k)
    except ValueError as error:
        raise ValueError(
            "class_k must be finite and above 0 (2^-100 to 2^100) for every class"
        ) from error


def check_sample_weight(sample_weight: Tensor, shape: torch.Size, device: torch.device) -> None:
    """Raise unless ``sample_weight`` has one weight for each example, and no gradient."""
    check_floats("sample_weight", sample_weight, " with one weight for each example")
    if sample_weight.shape != shape:
        raise ValueError(
            f"sample_weight must have one weight for each example, shape {tuple(shape)}, not "
            f"{tuple(sample_weight.shape)}"
        )
    check_device("sample_weight", sample_weight, device)
    check_constant("sample_weight", sample_weight)


def check_implementation(implementation: str) -> None:
    """Raise unless ``implementation`` is a known name."""
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation must be 'auto', 'triton' or 'torch', not {implementation!r}"
        )


def dtype_without_kernel(input: Tensor, target: Tensor) -> torch.dtype | None:
    """Return the dtype of logits or probabilities that has no Triton kernel, or None."""
    for tensor in (input, target):
        if tensor.is_floating_point() and tensor.dtype not in (
            torch.float32,
            torch.bfloat16,
            torch.float16,
        ):
            return tensor.dtype
    return None


def check_for_triton(input: Tensor, target: Tensor) -> None:
    """Raise if the Triton kernels do not support these tensors."""
    if (dtype := dtype_without_kernel(input, target)) is not None:
        raise ValueError(f"implementation 'triton' has no kernel for {dtype}; use 'auto'")
    try:
        from pseudograd.loss.triton.eq5 import INTERPRETED
    except ImportError as error:
        raise ImportError(
            "implementation 'triton' needs the package triton; install it, or use 'auto'"
        ) from error
    if not (input.is_cuda or INTERPRETED):
        raise ValueError(
            f"implementation 'triton' needs logits on a CUDA device, not on {input.device}; use "
            "'auto'"
        )


def name_of_group(process_group: ProcessGroup) -> str:
    """Return the name of a process group; raise for anything else."""
    # PyTorch may be built without distributed support.
    if not isinstance(process_group, getattr(torch.distributed, "ProcessGroup", ())):
        raise TypeError(
            "process_group must be a torch.distributed.ProcessGroup; for a DeviceMesh, use "
            "mesh.get_group()"
        )
    return process_group.group_name


def check_class_indices(target: Tensor, classes: int, ignore_index: int) -> None:
    """Raise if a label is outside [0, classes) and not ``ignore_index``."""
    wrong = (target != ignore_index) & ((target < 0) | (target >= classes))
    if bool(wrong.any()):
        refuse_class_index(int(target[wrong][0]), classes, ignore_index)


def refuse_class_index(index: int, classes: int, ignore_index: int) -> NoReturn:
    """Raise the error for a label that is out of range."""
    raise IndexError(
        f"target holds the class index {index}, which is out of range: there are {classes} classes "
        f"(0 to {classes - 1}), and ignore_index is {ignore_index}"
    )


def is_wrapper(value: object) -> bool:
    """Return whether this is a tensor that may have no memory: fake, distributed, ..."""
    kind: Any = type(value)
    return isinstance(value, Tensor) and kind.__torch_dispatch__ is not Tensor.__torch_dispatch__


def autocast_is_on(tensor: Tensor) -> bool:
    """Return whether autocast converts a tensor; never for float64 or the meta device."""
    if tensor.is_meta or tensor.dtype == torch.float64:
        return False
    return torch.is_autocast_enabled(tensor.device.type)
