"""`torch.nn.functional.cross_entropy` with one more argument, k."""

from __future__ import annotations

import functools
import importlib.util
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn._reduction import legacy_get_string

from pseudograd.loss import cpu, graph
from pseudograd.loss.autograd import (
    RowFunction,
    RowLoss,
    row_values,
    zero_with_gradient,
)
from pseudograd.loss.checks import (
    autocast_is_on,
    check_arguments,
    check_class_indices,
    check_for_triton,
    check_implementation,
    checked_k,
    dtype_without_kernel,
    is_wrapper,
    name_of_group,
    python_number,
)
from pseudograd.loss.modes import (
    is_compiled,
    is_exporting,
    is_jit_traced,
    is_transformed,
    keep_whole,
    prepare_tracing,
)
from pseudograd.loss.rows import ClassIndex, ClassProbabilities
from pseudograd.loss.targets import (
    checked_weights,
    k_of_examples,
    known_labels,
    reduced,
    smoothed,
    smoothed_labels,
    times_weights,
    weighted,
    weighted_reduction,
)
from pseudograd.loss.usual import is_usual, is_usual_in_graph
from pseudograd.rules.checks import GREATEST_K, LEAST_K, check_k, holds_numbers, is_eager
from pseudograd.rules.paper import Sensitivity, in_working_precision, working_dtype

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from pseudograd.loss.triton.scaled import ScaledBefore


def _rows(z: Tensor, target: Tensor, k: Sensitivity) -> Tensor:
    """Return the cross-entropy of each row; its gradient is the rule for the row's target."""
    return row_values(_SOFT if target.is_floating_point() else _LABELS, z, target, k)


# Created once: `torch.jit.trace` traces twice and compares the graphs, which name these objects.
_LABELS: RowLoss = ClassIndex()
_SOFT: RowLoss = ClassProbabilities()
keep_whole(_rows)


def tunable_cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    *,
    k: Sensitivity = 1.0,
    class_k: Tensor | None = None,
    sample_weight: Tensor | None = None,
    implementation: str = "auto",
    process_group: ProcessGroup | None = None,
    _scaled: ScaledBefore | None = None,
) -> Tensor:
    """Return the cross-entropy, with the paper's pseudo-gradient (Eq. 5) as its backward pass.

    The value equals `torch.nn.functional.cross_entropy` for every k, so loss curves stay
    comparable: k changes what the model learns, not the value you plot. At k = 1 the gradient is
    cross-entropy's as well. Positional arguments are in the order of
    `torch.nn.functional.cross_entropy`.

    Args:
        input: Logits of shape (C), (N, C) or (N, C, d1, ..., dK).
        target: Class indices of shape (), (N) or (N, d1, ..., dK), or class probabilities of the
            shape of ``input``. Probabilities that require a gradient get cross-entropy's, -log p.
        weight: A weight for each class, shape (C).
        size_average: Deprecated in PyTorch; use ``reduction``.
        ignore_index: Examples with this class index contribute nothing.
        reduce: Deprecated in PyTorch; use ``reduction``.
        reduction: "mean", "sum" or "none".
        label_smoothing: The share of each target that is spread evenly over all classes, in [0, 1].
        k: The sensitivity to large errors, above 0. Below 1, hard and mislabelled examples count
            less; above 1, more. A number, or a tensor with one value per example (the shape of
            class indices).
        class_k: A sensitivity for each class, shape (C); each example uses that of its label. Give
            classes with unreliable labels a smaller one. With class probabilities, an example uses
            the mean of ``class_k``, weighted by its target. If you also give k, it must be a
            number, and the two are multiplied.
        sample_weight: A weight of 0 or more for each example (the shape of class indices); an
            example of weight 2 counts twice. The mean divides by the sum of these weights or, with
            class weights, by the sum of the products of the two.
        implementation: "auto" picks the fastest: Triton kernels on CUDA devices, compiled kernels
            on CPUs. "triton" requires the kernels; "torch" uses PyTorch operations.
        process_group: The ranks that the classes are split over, in tensor-parallel training:
            ``input`` and ``weight`` hold this rank's shard of the classes, in rank order, and
            ``target`` indexes the classes of all ranks. Every rank gets the full loss, and the
            gradient of its shard.

    Returns:
        The loss: one number, or one per example if ``reduction`` is "none".

    Example:
        >>> logits = torch.tensor([[2.0, 1.0, 0.0]], requires_grad=True)
        >>> loss = tunable_cross_entropy(logits, torch.tensor([0]), k=0.5)
        >>> loss.backward()
        >>> loss, logits.grad
        (tensor(0.4076, grad_fn=...), tensor([[-0.5786,  0.3601,  0.2184]]))

        Labels of class 2 are often wrong, so that class gets a smaller k. The third example counts
        twice, the second one half:

        >>> logits = torch.tensor([[2.0, 1.0, 0.0]]).repeat(3, 1).requires_grad_()
        >>> loss = tunable_cross_entropy(
        ...     logits,
        ...     torch.tensor([0, 1, 2]),
        ...     class_k=torch.tensor([1.0, 1.0, 0.5]),
        ...     sample_weight=torch.tensor([1.0, 0.5, 2.0]),
        ... )
        >>> loss.backward()
        >>> logits.grad  # divided by the sum of the weights, 3.5
        tensor([[-0.0956,  0.0699,  0.0257],
                [ 0.0950, -0.1079,  0.0129],
                [ 0.3393,  0.2058, -0.5451]])

    """
    compiling = prepare_tracing()
    if (
        weight is None
        and class_k is None
        and sample_weight is None
        and process_group is None
        and size_average is None
        and reduce is None
        and implementation == "auto"
    ):
        settings = (ignore_index, reduction, label_smoothing)
        if compiling and is_usual_in_graph(input, target, *settings, k):
            return _loss_in_graph(input, target, k, None, *settings, False).to(input.dtype)
        if not compiling and is_usual(input, target, *settings, k):
            k = k if isinstance(k, Tensor) else float(k)
            call = (target, k, None, *settings)
            if input.is_cpu and input.dtype in PRECISE and cpu.kernels() is not None:
                return cpu.fused(input, call)
            if input.is_cuda and input.dtype in ON_GPU and input.dim() == 2 and kernels_run():
                dtype = torch.float32 if torch.is_autocast_enabled("cuda") else input.dtype
                return _usual_loss_on_gpu(input, call, dtype, _scaled)
    if size_average is not None or reduce is not None:
        reduction = legacy_get_string(size_average, reduce)
    shape = check_arguments(input, target, weight, ignore_index, reduction, label_smoothing)
    ignore_index, label_smoothing = python_number(ignore_index), python_number(label_smoothing)
    k = checked_k(k, shape)
    if class_k is not None:
        k = k_of_examples(k, class_k, target, input.shape[min(input.dim() - 1, 1)], process_group)
    per_example = None
    if sample_weight is not None:
        per_example = checked_weights(sample_weight, shape, input.device)
    return _routed_loss(
        input, target, weight, ignore_index, reduction, label_smoothing, k, per_example, shape,
        implementation, process_group, _scaled,
    )  # fmt: skip


# --- dispatch: kernels on CPU or GPU, or row functions that any transform can handle --------------


def _routed_loss(
    input: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, reduction: str,
    label_smoothing: float, k: Sensitivity, per_example: Tensor | None, shape: torch.Size,
    implementation: str, process_group: ProcessGroup | None, scaled: ScaledBefore | None,
) -> Tensor:  # fmt: skip
    """Return the loss of checked arguments, by the fastest route that supports them."""
    route = chosen_route(input, target, implementation, weight, k)
    dtype = loss_dtype(input, target)
    soft = target.is_floating_point()
    in_graph = torch.compiler.is_compiling() and implementation != "torch"
    in_graph = in_graph and (route == "triton" or input.is_cpu) and process_group is None
    learns = soft and not in_graph and may_need_gradient(target, route)
    reduced_later = per_example is not None and process_group is None
    inner = "none" if reduced_later else reduction
    settings = (k, weight, ignore_index, inner, label_smoothing)
    if in_graph or (route == "cpu" and process_group is None):
        logits = input.to(dtype) if dtype == torch.float64 else input
        if in_graph:
            loss = _loss_in_graph(logits, target, *settings, route == "triton")
        else:
            loss = cpu.fused_cross_entropy(logits, target.detach() if learns else target, *settings)
        if not (learns or reduced_later):
            return loss if loss.dtype == dtype else loss.to(dtype)
        loss = loss.flatten() if inner == "none" else loss
        z = as_rows(logits)
        labels = as_rows(target) if soft else target.flatten()
    else:
        # The kernels read float16 and bfloat16 directly.
        z = as_rows(input.to(dtype) if route == "torch" and input.dtype != dtype else input)
        labels = as_rows(target.detach() if learns else target) if soft else target.flatten()
        if process_group is not None:
            loss = _split_loss(z, labels, *settings, process_group, route == "triton", per_example)
        elif route == "triton" and is_eager():
            loss = _triton_loss(z, labels, *settings, dtype, scaled)
        else:
            loss = _loss_of_rows(z, labels, *settings, route == "triton")
    if learns:
        loss = loss + _target_term(z, as_rows(target), weight, inner, label_smoothing)
    if per_example is not None and reduced_later:
        loss = weighted_reduction(loss, per_example, labels, z, weight, ignore_index, reduction)
    return (loss.reshape(shape) if reduction == "none" else loss).to(dtype)


def _loss_in_graph(
    input: Tensor, target: Tensor, k: Sensitivity, weight: Tensor | None, ignore_index: int,
    reduction: str, label_smoothing: float, triton: bool,
) -> Tensor:  # fmt: skip
    """Return the loss in a graph of `torch.compile`, which does not trace this function."""
    settings = (k, weight, ignore_index, reduction, label_smoothing)
    soft = target.is_floating_point()
    # The tensors that Dynamo traces do not know whether they require a gradient; these do.
    learns = soft and torch.is_grad_enabled() and (target.requires_grad or is_transformed())
    fixed = target.detach() if learns else target
    examples = input.shape[:1] + input.shape[2:] if input.dim() > 1 else ()
    if is_compiled() and graph.takes(input, target, weight, triton):
        loss = graph.loss_in_graph(input, fixed, *settings, triton)
    else:
        labels = as_rows(fixed) if soft else fixed.flatten()
        loss = _loss_of_rows(as_rows(input), labels, *settings, triton)
        loss = loss.reshape(examples) if reduction == "none" else loss
    if learns:
        term = _target_term(as_rows(input), as_rows(target), weight, reduction, label_smoothing)
        loss = loss + (term.reshape(examples) if reduction == "none" else term)
    return loss


keep_whole(_loss_in_graph)


def _usual_loss_on_gpu(
    z: Tensor, call: cpu.Call, dtype: torch.dtype, scaled: ScaledBefore | None
) -> Tensor:
    from pseudograd.loss.triton.node import loss_by_node

    loss = loss_by_node(z, call, dtype, scaled)
    if loss is None:
        loss = _gpu().fused_cross_entropy(z, *call, dtype, scaled)
    return loss if loss.dtype is dtype else loss.to(dtype)


def _triton_loss(z: Tensor, target: Tensor, k: Sensitivity, *settings: Any) -> Tensor:
    check_values(k)
    loss: Tensor = _gpu().fused_cross_entropy(z, target, k, *settings)
    return loss


def _loss_of_rows(z: Tensor, target: Tensor, *settings: Any) -> Tensor:
    loss = _soft_loss if target.is_floating_point() else class_index_loss
    return loss(z, target, *settings)


def _soft_loss(
    z: Tensor, q: Tensor, k: Sensitivity, weight: Tensor | None, ignore_index: int, reduction: str,
    label_smoothing: float, triton: bool,
) -> Tensor:  # fmt: skip
    """Return the reduced loss of rows ``z`` (R, C) for class probabilities (R, C)."""
    rows: RowFunction = _gpu_rows() if triton else _rows
    q = weighted(smoothed(q if triton else q.to(working_dtype(z)), label_smoothing), weight)
    return reduced(rows(z, q, as_column(k, z)), z.shape[0], reduction)


def class_index_loss(
    z: Tensor, target: Tensor, k: Sensitivity, weight: Tensor | None, ignore_index: int,
    reduction: str, label_smoothing: float = 0.0, triton: bool = False,
    rows: RowFunction | None = None,
) -> Tensor:  # fmt: skip
    """Return the reduced loss of rows ``z`` (R, C) for labels (R), by ``rows`` if it is given."""
    target = target.long()  # in uint8, -100 would be class 156
    if holds_numbers(target):
        check_class_indices(target, z.shape[1], ignore_index)
    counted, y, known = known_labels(target, z.shape[1], ignore_index)
    label_weight = known if weight is None else known * weight[y]
    example_weight = torch.where(counted, label_weight, 0).to(working_dtype(z))
    k = as_column(k, z)
    if label_smoothing and (weight is not None or not triton):
        soft_rows: RowFunction = _gpu_rows() if triton else _rows
        value = soft_rows(z, smoothed_labels(z, y, label_smoothing, weight), k) * known
    elif triton and rows is None:  # the kernels smooth labels themselves
        value = _gpu_rows()(z, y, k, smoothing=label_smoothing) * label_weight
    else:
        value = (rows or _rows)(z, y, k) * label_weight
    return reduced(torch.where(counted, value, 0), example_weight.sum(), reduction)


def cross_entropy_rows(z: Tensor, y: Tensor, route: str, eager: bool) -> Tensor:
    """Return -log p_y of each row, with the bias ε as its gradient; labels must be valid.

    The caller passes ``eager``: a function registered with `keep_whole` runs on fake tensors under
    `torch.compile` and cannot tell.
    """
    if route == "triton":
        settings = (None, -100, "none", 0.0, torch.float64)
        return _triton_loss(z, y, 1.0, *settings) if eager else _gpu_rows()(z, y, 1.0)
    if route == "cpu":
        return cpu.fused_cross_entropy(z, y, 1.0, None, -100, "none", 0.0)
    return _rows(z, y, 1.0)


def _split_loss(
    z: Tensor, target: Tensor, k: Sensitivity, weight: Tensor | None, ignore_index: int,
    reduction: str, label_smoothing: float, process_group: ProcessGroup, triton: bool,
    per_example: Tensor | None,
) -> Tensor:  # fmt: skip
    """Return the reduced loss of classes that are split over a process group."""
    from pseudograd.loss.parallel import split_values

    if target.is_floating_point():
        refuse_split_probabilities()
    value, example_weight = split_values(
        z, target.long(), as_column(k, z), weight, ignore_index, label_smoothing,
        name_of_group(process_group), triton,
    )  # fmt: skip
    if per_example is not None:
        value = times_weights(value, per_example)
        example_weight = example_weight * per_example
    return reduced(value, example_weight.sum(), reduction)


def refuse_split_probabilities() -> NoReturn:
    """Raise an error: split classes do not support class probabilities."""
    raise ValueError("target must hold class indices, not probabilities, with a process_group")


def may_need_gradient(target: Tensor, route: str) -> bool:
    """Return whether class probabilities require a gradient; True if that cannot be known yet."""
    # `requires_grad` is reliable in eager calls and under `torch.jit.trace`.
    if target.requires_grad or route == "cpu" or is_jit_traced():
        return target.requires_grad and torch.is_grad_enabled()
    # It is not inside `torch.func`, or in functions that the compiler may run there.
    return torch.is_grad_enabled() and not (is_eager() or is_exporting())


def _target_term(
    z: Tensor, q: Tensor, weight: Tensor | None, reduction: str, label_smoothing: float
) -> Tensor:
    """Return a reduced 0 whose gradient for the probabilities is cross-entropy's, -log p."""
    log_p = F.log_softmax(in_working_precision(z.detach()), -1)
    factor = torch.full_like(log_p[:1], label_smoothing - 1) * (1 if weight is None else weight)
    gradient = torch.where(factor == 0, 0, factor * log_p)  # log p may be infinite
    return reduced(zero_with_gradient(q, gradient, z), z.shape[0], reduction)


# --- shapes and dtypes ----------------------------------------------------------------------------


def as_rows(tensor: Tensor) -> Tensor:
    """Reshape a tensor to (examples, C)."""
    if tensor.dim() == 2:
        return tensor
    if tensor.dim() < 2:
        return tensor.unsqueeze(0)
    if tensor.requires_grad and torch.is_grad_enabled() and is_eager() and tensor.is_contiguous():
        # Otherwise its gradient would be a non-contiguous view, with the classes last.
        tensor = tensor.view_as(tensor)
        tensor.register_hook(_contiguous)
    return tensor.movedim(1, -1).flatten(0, -2)


def _contiguous(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.contiguous()


def check_values(k: Sensitivity) -> None:
    """Raise if a tensor k is out of bounds, where that can be checked without a device sync."""
    if isinstance(k, Tensor) and holds_numbers(k):
        check_k(k)


def as_column(k: Sensitivity, z: Tensor) -> Sensitivity:
    """Return a number unchanged, and a tensor as a column with one value per row of ``z``."""
    if not isinstance(k, Tensor):
        return k
    check_values(k)
    k = k.to(z.device, working_dtype(z)).reshape(-1, 1)
    k = k.expand(z.shape[0], 1)  # `len(z)` would fix an exported graph's batch size
    # On a device an invalid k becomes NaN, because raising an error would need a sync.
    return torch.where((k >= LEAST_K) & (k <= GREATEST_K), k, torch.nan)


def loss_dtype(input: Tensor, target: Tensor) -> torch.dtype:
    """Return the dtype that `cross_entropy` would return, also under autocast."""
    dtype = working_dtype(input) if autocast_is_on(input) else input.dtype
    return torch.promote_types(dtype, target.dtype) if target.is_floating_point() else dtype


# --- which route ----------------------------------------------------------------------------------


def chosen_route(input: Tensor, target: Tensor, implementation: str, *others: object) -> str:
    """Return the route that computes the loss: "triton", "cpu" or "torch".

    ``others`` are further arguments that the kernels would read, if they are tensors.
    """
    check_implementation(implementation)
    if implementation == "triton":
        check_for_triton(input, target)
    if implementation != "auto":
        return implementation
    eager = is_eager()
    if _is_for_kernels(input) and dtype_without_kernel(input, target) is None:
        if not eager or (_are_plain(input, target, *others) and kernels_run()):
            return "triton"
    elif input.is_cpu and eager and cpu.kernels() and _are_plain(input, target, *others):
        return "cpu"
    return "torch"


def _are_plain(input: Tensor, *others: object) -> bool:
    """Return whether kernels can read these tensors: none is fake or distributed."""
    plain = type(input) in (Tensor, torch.nn.Parameter)
    return plain and not any(map(is_wrapper, others))


def _gpu_rows() -> Callable[..., Tensor]:
    rows: Callable[..., Tensor] = _gpu().gpu_rows
    return rows


def _gpu() -> Any:
    """Return the module with the kernels; imported lazily, because only GPUs need it."""
    from pseudograd.loss.triton import operators

    return operators


# Looked up at import, because `torch.compile` cannot trace `find_spec`.
_HAS_TRITON = importlib.util.find_spec("triton") is not None
PRECISE = (torch.float32, torch.float64)
ON_GPU = (torch.float32, torch.bfloat16, torch.float16)


def _is_for_kernels(input: Tensor) -> bool:
    return input.is_cuda and _HAS_TRITON


@functools.cache
def kernels_run() -> bool:
    """Return whether Triton works here: it needs a C compiler and a recent GPU."""
    if not _HAS_TRITON:
        return False
    from pseudograd.loss.triton import plans

    if plans.exist_for(torch.cuda.current_device()):  # then do not import Triton to find out
        return True
    from pseudograd.loss.triton.launch import rescale

    one = torch.ones(1, device="cuda")
    try:
        rescale(one, one)
    except Exception as error:
        warnings.warn(
            f"pseudograd: the Triton kernels do not run here, so the loss is slower ({error})",
            stacklevel=4,
        )
        return False
    return True
