"""`torch.nn.functional.cross_entropy` with one more argument, k."""

from __future__ import annotations

import functools
import importlib.util
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pseudograd.loss.autograd import (
    ClassIndex,
    ClassProbabilities,
    RowFunction,
    is_jit_traced,
    is_traced,
    prepare_tracing,
    rows_of,
)
from pseudograd.loss.checks import (
    as_sensitivity,
    autocast_is_on,
    check_arguments,
    check_class_indices,
    check_for_split,
    check_for_triton,
    check_implementation,
    check_k,
    dtype_without_kernel,
    example_shape,
    name_of_group,
)
from pseudograd.rules.paper import GREATEST_K, LEAST_K, Sensitivity, wide, working_dtype

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from pseudograd.loss.triton.scaled import ScaledBefore

_class_index_rows = rows_of(ClassIndex())
_class_probability_rows = rows_of(ClassProbabilities())


def tunable_cross_entropy(
    input: Tensor,
    target: Tensor,
    k: Sensitivity = 1.0,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    *,
    implementation: str = "auto",
    process_group: ProcessGroup | None = None,
    _scaled: ScaledBefore | None = None,
) -> Tensor:
    """Give the cross-entropy, with the paper's pseudo-gradient (Eq. 5) as its backward pass.

    The value is that of `torch.nn.functional.cross_entropy` for every k, so that curves stay
    comparable: k changes what is learned, not what is shown. At k = 1 the backward pass is
    cross-entropy's too.

    Args:
        input: Logits of shape (C), (N, C) or (N, C, d1, ..., dK).
        target: Class indices of shape (), (N) or (N, d1, ..., dK), or class probabilities of the
            shape of ``input``.
        k: The sensitivity to large errors, above 0. Below 1, hard and mislabelled examples count
            less; above 1, more. A number, or a tensor with one value for each example (the shape
            that class indices have).
        weight: A factor for each class, shape (C).
        ignore_index: Examples with this class index count for nothing.
        reduction: "mean", "sum" or "none".
        label_smoothing: The share of each target that is spread evenly over all classes, in [0, 1].
        implementation: "auto" takes what is fastest: on CUDA devices Triton kernels, on CPUs loops
            compiled by numba if it is installed. "triton" insists on the kernels; "torch" takes
            PyTorch's operations.
        process_group: The ranks that share the classes, in tensor-parallel training: ``input`` and
            ``weight`` are then this rank's part of them, in the order of the ranks, and ``target``
            counts the classes of all. Every rank gets the whole loss, and the gradient of its part.

    Returns:
        The loss: one number, or one for each example where ``reduction`` is "none".

    Example:
        >>> logits = torch.tensor([[2.0, 1.0, 0.0]], requires_grad=True)
        >>> loss = tunable_cross_entropy(logits, torch.tensor([0]), k=0.5)
        >>> loss.backward()
        >>> loss, logits.grad
        (tensor(0.4076, grad_fn=...), tensor([[-0.5786,  0.3601,  0.2184]]))

    """
    prepare_tracing()
    check_arguments(input, target, weight, ignore_index, reduction, label_smoothing)
    check_k(k, example_shape(input), values=False)
    k = as_sensitivity(k)
    way = chosen_way(input, target, implementation)
    way = "torch" if way == "numba" and process_group is not None else way
    dtype = loss_dtype(input, target)
    # The kernels read half types as they are.
    z = _rows(input if way == "triton" or input.dtype == dtype else input.to(dtype))
    if process_group is not None:
        check_for_split(target)
        from pseudograd.loss.parallel import split_values

        value, example_weight = split_values(
            z, target.flatten().long(), as_column(k, z), weight, ignore_index, label_smoothing,
            name_of_group(process_group), way == "triton",
        )  # fmt: skip
        reduced = _reduced(value, example_weight.sum(), reduction)
    elif way == "triton" and is_eager():
        from pseudograd.loss.triton.operators import fused_cross_entropy

        if isinstance(k, Tensor) and holds_numbers(k):
            check_k(k)
        reduced = fused_cross_entropy(
            z, _target_of_rows(target), k, weight, ignore_index, reduction, label_smoothing, dtype,
            _scaled,
        )  # fmt: skip
    elif way == "numba":
        fused = _compiled_by_numba()
        assert fused is not None
        reduced = fused(
            z, _target_of_rows(target), k, weight, ignore_index, reduction, label_smoothing
        )
    elif target.is_floating_point():
        q = _rows(target) if way == "triton" else _rows(target).to(working_dtype(z))
        q = weighted(smoothed(q, label_smoothing), weight)
        soft_rows = _gpu_rows() if way == "triton" else _class_probability_rows
        reduced = _reduced(soft_rows(z, q, as_column(k, z)), float(len(z)), reduction)
    else:
        rows, soft_rows, smoothing = _class_index_rows, _class_probability_rows, label_smoothing
        if way == "triton":
            rows = soft_rows = _gpu_rows()
            if weight is None:  # if weighted, smoothed labels are probabilities to the operators
                rows, smoothing = functools.partial(rows, smoothing=smoothing), 0.0
        reduced = class_index_loss(
            z, target.flatten(), as_column(k, z), rows, weight, ignore_index, reduction, smoothing,
            soft_rows,
        )  # fmt: skip
    if reduction == "none":
        reduced = reduced.reshape(example_shape(input))
    return reduced if reduced.dtype == dtype else reduced.to(dtype)


def class_index_loss(
    z: Tensor,
    target: Tensor,
    k: Sensitivity,
    rows: RowFunction,
    weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float = 0.0,
    soft_rows: RowFunction = _class_probability_rows,
) -> Tensor:
    """Give the loss of rows ``z`` (R, C) for labels (R) by the row function ``rows``, reduced.

    Smoothed labels are probabilities, and go by ``soft_rows``.
    """
    target = target.long()  # among bytes, -100 would be class 156
    if holds_numbers(target):
        check_class_indices(target, z.shape[1], ignore_index)
    counted, y, known = known_labels(target, z.shape[1], ignore_index)
    label_weight = known if weight is None else known * weight[y]
    example_weight = torch.where(counted, label_weight, 0).to(working_dtype(z))
    if label_smoothing:
        q = smoothed_labels(z, y, label_smoothing, weight)
        value = soft_rows(z, q, k) * known
    else:
        value = rows(z, y, k) * label_weight
    return _reduced(torch.where(counted, value, 0), example_weight.sum(), reduction)


def known_labels(target: Tensor, classes: int, ignore_index: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tell which labels count; give labels that can be looked up, and 1, or NaN for wrong ones.

    Where wrong labels cannot be refused without waiting for a device, NaN is there to be seen.
    """
    counted = target != ignore_index
    y = torch.where(counted, target, 0)
    known = (y >= 0) & (y < classes)
    return counted, torch.where(known, y, 0), torch.where(known, 1.0, torch.nan)


def loss_dtype(input: Tensor, target: Tensor) -> torch.dtype:
    """The dtype of the loss; under autocast float32 for half types, as for `cross_entropy`."""
    dtype = input.dtype
    if autocast_is_on(input):
        dtype = working_dtype(input)
    return torch.promote_types(dtype, target.dtype) if target.is_floating_point() else dtype


def _rows(tensor: Tensor) -> Tensor:
    """Classes last, all examples in one dimension."""
    if tensor.dim() == 2:
        return tensor
    return tensor.movedim(1, -1).flatten(0, -2) if tensor.dim() > 2 else tensor.unsqueeze(0)


def _target_of_rows(target: Tensor) -> Tensor:
    return _rows(target) if target.is_floating_point() else target.flatten()


def as_column(k: Sensitivity, z: Tensor) -> Sensitivity:
    """A number as it is, a tensor as a column beside the rows."""
    if not isinstance(k, Tensor):
        return k
    if holds_numbers(k):
        check_k(k)
    k = k.to(z.device, working_dtype(z)).reshape(-1, 1).expand(len(z), 1)
    # Elsewhere what is wrong cannot be told without waiting, and is NaN to be seen.
    return torch.where((k >= LEAST_K) & (k <= GREATEST_K), k, torch.nan)


# Both in float64: the rule is of the difference p - q, in which a rounded q would be seen.
def smoothed(q: Tensor, label_smoothing: float) -> Tensor:
    """Spread a share of the target evenly over all classes."""
    return wide(q) * (1 - label_smoothing) + label_smoothing / q.shape[-1] if label_smoothing else q


def weighted(q: Tensor, weight: Tensor | None) -> Tensor:
    """Multiply the target by the class weights."""
    return q if weight is None else wide(q) * weight


def smoothed_labels(z: Tensor, y: Tensor, label_smoothing: float, weight: Tensor | None) -> Tensor:
    """Give labels as targets for the rows ``z``, smoothed and weighted."""
    one_hot = torch.zeros_like(z, dtype=working_dtype(z)).scatter(-1, y.unsqueeze(-1), 1)
    return weighted(smoothed(one_hot, label_smoothing), weight)


def _reduced(value: Tensor, total: float | Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return value
    if reduction == "sum":
        return value.sum()
    if not isinstance(total, Tensor):
        return value.sum() / total
    # Where all weights are 0 there is no mean, and nothing that pulls: its gradient is 0.
    mean = value.sum() / torch.where(total == 0, 1, total)
    return torch.where(total == 0, torch.nan, mean)


def is_eager() -> bool:
    """Whether tensors hold numbers now: no graph is made, and torch.func is not at work."""
    graph = is_traced() or is_jit_traced()
    return not (graph or torch._C._are_functorch_transforms_active())


def holds_numbers(tensor: Tensor) -> bool:
    """Whether values can be looked at without waiting for a device."""
    kind: Any = type(tensor)
    # Fake and distributed tensors, which may have none, bring a dispatch of their own.
    plain = kind.__torch_dispatch__ is Tensor.__torch_dispatch__
    return tensor.is_cpu and is_eager() and plain


def chosen_way(input: Tensor, target: Tensor, implementation: str) -> str:
    """What computes the loss: "triton", "numba" or "torch"."""
    check_implementation(implementation)
    if implementation == "triton":
        check_for_triton(input, target)
    if implementation != "auto":
        return implementation
    if dtype_without_kernel(input, target) is not None:
        return "torch"
    eager = is_eager()
    plain = type(input) in (Tensor, torch.nn.Parameter)  # not a fake or a distributed tensor
    if _is_for_kernels(input) and (not eager or (plain and _kernels_run())):
        return "triton"
    numba = input.is_cpu and plain and eager
    return "numba" if numba and _compiled_by_numba() is not None else "torch"


def _gpu_rows() -> Callable[..., Tensor]:
    from pseudograd.loss.triton.operators import gpu_rows

    return gpu_rows


# Known beforehand, since torch.compile could not trace how it is found out.
_HAS_TRITON = importlib.util.find_spec("triton") is not None


def _is_for_kernels(input: Tensor) -> bool:
    return input.is_cuda and _HAS_TRITON


@functools.cache
def _kernels_run() -> bool:
    """Whether Triton works here: it needs a C compiler, and a GPU that is not too old."""
    from pseudograd.loss.triton.launch import rescale

    one = torch.ones(1, device="cuda")
    try:
        rescale(one, one)
    except Exception as error:
        warnings.warn(
            f"pseudograd: Triton's kernels cannot be used, so the loss is slower ({error})",
            stacklevel=4,
        )
        return False
    return True


@functools.cache
def _compiled_by_numba() -> Callable[..., Tensor] | None:
    try:
        import numba

        from pseudograd.loss.cpu import fused_cross_entropy
    except (ImportError, RuntimeError):  # not installed, or nowhere to keep what it compiles
        return None
    return None if getattr(numba.config, "DISABLE_JIT", False) else fused_cross_entropy
