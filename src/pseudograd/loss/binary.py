"""`torch.nn.functional.binary_cross_entropy_with_logits` with one more argument, k.

Each output is a two-class problem with the logits (0, z), for which Eq. 5 has a short form: with
the prediction bias ε = σ(z) - t, the pseudo-gradient at z is sign(ε) |ε|^k.

Eager calls run one kernel, on CPUs and on GPUs. Other calls use elementwise PyTorch operations,
which `torch.compile` fuses.
"""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn._reduction import legacy_get_string

from pseudograd.loss import cpu
from pseudograd.loss.autograd import (
    are_hooked,
    rows_of,
    zero_if_ignored,
    zero_with_gradient,
)
from pseudograd.loss.checks import (
    check_constant,
    check_dense,
    check_device,
    check_dtype,
    check_reduction,
    checked_k,
)
from pseudograd.loss.functional import (
    ON_GPU,
    PRECISE,
    check_values,
    chosen_route,
    kernels_run,
    loss_dtype,
    may_need_gradient,
)
from pseudograd.loss.modes import prepare_tracing
from pseudograd.loss.modules import TunableModule, check_convertible
from pseudograd.loss.usual import is_usual_binary
from pseudograd.rules import paper
from pseudograd.rules.checks import GREATEST_K, LEAST_K, holds_numbers, is_eager
from pseudograd.rules.paper import Sensitivity


def tunable_binary_cross_entropy_with_logits(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    pos_weight: Tensor | None = None,
    *,
    k: Sensitivity = 1.0,
) -> Tensor:
    """Return the binary cross-entropy, with Eq. 5 for two classes as its backward pass.

    Use it for one yes-or-no question per example, or for several (multi-label classification). The
    value equals `torch.nn.functional.binary_cross_entropy_with_logits` for every k; at k = 1 the
    gradient does, too. Positional arguments are in PyTorch's order.

    Args:
        input: Logits of any shape.
        target: The probability of "yes" for each logit, in [0, 1]: 0 and 1 are labels, anything
            between is a soft target. If it requires a gradient, it gets binary cross-entropy's.
        weight: A weight for each loss; its shape must broadcast to that of ``input``.
        size_average: Deprecated in PyTorch; use ``reduction``.
        reduce: Deprecated in PyTorch; use ``reduction``.
        reduction: "mean" (over all outputs, whatever their weights), "sum" or "none".
        pos_weight: A weight for the "yes" part of each target; its shape must broadcast to that of
            ``input``, such as (C) for one per class.
        k: The sensitivity to large errors, above 0. Below 1, hard and mislabelled examples count
            less; above 1, more. A number, or a tensor whose shape broadcasts to that of
            ``input``, such as (C) for one per class.

    Returns:
        The loss: one number, or one per logit if ``reduction`` is "none".

    Example:
        Two examples have three labels each, and one label contradicts its logit, 6. At k = 1 its
        gradient is 2 to 20 times as large as the others; at k = ½ they catch up:

        >>> logits = torch.tensor([[2.0, -1.0, 0.0], [6.0, 3.0, -2.0]], requires_grad=True)
        >>> labels = torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 0.0]])
        >>> for k in (1.0, 0.5):
        ...     loss = tunable_binary_cross_entropy_with_logits(
        ...         logits, labels, reduction="sum", k=k
        ...     )
        ...     print(*torch.autograd.grad(loss, logits))
        tensor([[-0.1192,  0.2689, -0.5000],
                [ 0.9975, -0.0474,  0.1192]])
        tensor([[-0.3453,  0.5186, -0.7071],
                [ 0.9988, -0.2178,  0.3453]])

        If the labels of the third class are unreliable, give that class a smaller k:

        >>> per_class = torch.tensor([1.0, 1.0, 0.25])
        >>> tunable_binary_cross_entropy_with_logits(logits, labels, k=per_class)
        tensor(1.2186, grad_fn=...)

    """
    prepare_tracing()
    if (
        weight is None
        and pos_weight is None
        and size_average is None
        and reduce is None
        and is_usual_binary(input, target, reduction, k)
    ):
        k = k if isinstance(k, Tensor) else float(k)
        loss = _usual_loss(input, target, k, reduction)
        if loss is not None:
            return loss
    if size_average is not None or reduce is not None:
        reduction = legacy_get_string(size_average, reduce)
    _check_arguments(input, target, weight, reduction, pos_weight)
    k = checked_k(k)
    if isinstance(k, Tensor):
        _check_spreads("k", k, input)
    dtype = loss_dtype(input, target)
    route = chosen_route(input, target, "auto", weight, pos_weight, k)
    learns = may_need_gradient(target, route)
    settings = (target, k, weight, pos_weight, reduction)
    # One kernel where there is one.
    if route == "cpu" and dtype.itemsize >= 4 and not (learns or are_hooked()):
        return cpu.fused_binary(input.to(dtype), *settings)
    if route == "triton" and is_eager() and not learns and input.numel():
        from pseudograd.loss.triton.binary import fused_binary

        return fused_binary(input, *settings, dtype)
    return _loss_in_torch(input, *settings, dtype, learns)


def _loss_in_torch(
    input: Tensor, target: Tensor, k: Sensitivity, weight: Tensor | None,
    pos_weight: Tensor | None, reduction: str, dtype: torch.dtype, learns: bool,
) -> Tensor:  # fmt: skip
    """Return the loss in elementwise operations; ``learns`` if the target needs a gradient."""
    k = _column(k, input) if isinstance(k, Tensor) else k
    z = input.to(dtype).reshape(-1, 1)
    t = (target.detach() if learns else target).to(dtype).reshape(-1, 1)
    factor = None
    if pos_weight is not None:
        factor = pos_weight.to(z.device).expand(input.shape).reshape(-1, 1)
        t = torch.cat((t, factor), -1)  # in the wider of the two dtypes
    value = _rows(z, t, k)
    if learns:
        value = value + _target_term(z, target.reshape(-1, 1), factor)
    value = value.reshape(input.shape)
    if weight is not None:
        value = value * weight
    if reduction != "none":
        value = value.mean() if reduction == "mean" else value.sum()
    return value.to(dtype)


def _usual_loss(input: Tensor, target: Tensor, k: Sensitivity, reduction: str) -> Tensor | None:
    """Return the loss of a usual call by a kernel, or None if there is none for it."""
    if input.is_cpu and input.dtype in PRECISE and cpu.kernels() is not None and not are_hooked():
        return cpu.fused_binary(input, target, k, None, None, reduction)
    if input.is_cuda and input.dtype in ON_GPU and kernels_run():
        from pseudograd.loss.triton.node import binary_loss_by_node

        dtype = torch.float32 if torch.is_autocast_enabled("cuda") else input.dtype
        return binary_loss_by_node(input, target, k, reduction, dtype)
    return None


class Binary:
    """Both passes over a column of logits (R, 1), as a `pseudograd.loss.autograd.RowLoss`.

    The target is a column as well, and may have a second one for ``pos_weight``.
    """

    exported_as: str | None = "binary"

    def forward(self, z: Tensor, target: Tensor, k: Sensitivity) -> tuple[Tensor, ...]:
        """Return -(w t log σ(z) + (1 - t) log σ(-z)), where 0 · log 0 is 0."""
        z, target = paper.in_working_precision(z), paper.in_working_precision(target)
        positive, negative = _masses(target)
        if _are_labels(target):
            sign = 1 - 2 * target[..., :1]
            value = _times_log(positive + negative, F.logsigmoid(-sign * z))
        else:
            value = _times_log(positive, F.logsigmoid(z)) + _times_log(negative, F.logsigmoid(-z))
        return (-value.squeeze(-1),)

    def backward(
        self, z: Tensor, target: Tensor, k: Sensitivity, grad: Tensor, *kept: Tensor
    ) -> Tensor:
        """Return the rule for two classes."""
        if _are_labels(target):
            positive, negative = _masses(target)
            sign = 1 - 2 * target[..., :1]
            strength = paper.strength(-sign * paper.in_working_precision(z), k)
            f = strength * (sign * (positive + negative) * grad)
        else:
            f = paper.binary_push(z, *_masses(paper.wide(target)), k) * grad
        return zero_if_ignored(f, grad, z.dtype)


_rows = rows_of(Binary())


def _are_labels(target: Tensor) -> bool:
    """Return whether all targets are 0 or 1, if that can be checked without a device sync.

    Labels need neither float64 nor two logarithms.
    """
    t = target[..., :1]
    return holds_numbers(target) and torch.equal(t * t, t)


def _times_log(mass: Tensor, log_p: Tensor) -> Tensor:
    """Return ``mass`` times ``log_p``, where 0 · log 0 is 0."""
    return torch.where(mass == 0, 0, mass * log_p)


def _masses(target: Tensor) -> tuple[Tensor, Tensor]:
    """Return the target's masses on "yes", times ``pos_weight``, and on "no", as columns."""
    t = target[..., :1]
    return (t * target[..., 1:] if target.shape[-1] == 2 else t), 1 - t


def _target_term(z: Tensor, target: Tensor, factor: Tensor | None) -> Tensor:
    """Return zeros whose gradient for the target is binary cross-entropy's."""
    logits = paper.in_working_precision(z.detach())
    yes = F.logsigmoid(logits) * (1 if factor is None else factor)
    return zero_with_gradient(target, F.logsigmoid(-logits) - yes, z)


def _column(k: Tensor, input: Tensor) -> Tensor:
    """Return k as a column with one value per logit, NaN where it is out of bounds."""
    check_values(k)
    k = k.to(input.device).expand(input.shape).reshape(-1, 1)
    return torch.where((k >= LEAST_K) & (k <= GREATEST_K), k, torch.nan)


def _check_arguments(
    input: Tensor, target: Tensor, weight: Tensor | None, reduction: str, pos_weight: Tensor | None
) -> None:
    """Raise where `torch.nn.functional.binary_cross_entropy_with_logits` would."""
    for name, tensor in (("input", input), ("target", target)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor, not {type(tensor).__name__}")
        check_dense(name, tensor)
        if not tensor.is_floating_point():
            raise TypeError(
                f"{name} must hold floating-point numbers, not {tensor.dtype}; use .float()"
            )
        check_dtype(name, tensor)
    check_reduction(reduction)
    if target.shape != input.shape:
        raise ValueError(
            f"target must have the shape of input, {tuple(input.shape)}, not {tuple(target.shape)}"
        )
    check_device("target", target, input.device)
    for name, factors in (("weight", weight), ("pos_weight", pos_weight)):
        if factors is None:
            continue
        _check_factors(name, factors)
        _check_spreads(name, factors, input)
        if factors.dim():
            check_device(name, factors, input.device)
        check_constant(name, factors)


def _check_factors(name: str, factors: Any) -> None:
    if factors is None:
        return
    if not isinstance(factors, Tensor) or not factors.is_floating_point():
        advice = "; pass k by keyword, k=..." if isinstance(factors, (int, float)) else ""
        raise TypeError(f"{name} must be a floating-point tensor{advice}")
    check_dtype(name, factors)
    check_dense(name, factors)


def _check_spreads(name: str, tensor: Tensor, input: Tensor) -> None:
    """Raise unless a tensor broadcasts to the shape of the logits."""
    own, shape = tensor.shape, input.shape
    pairs = zip(reversed(own), reversed(shape), strict=False)
    if len(own) > len(shape) or any(size not in (1, wanted) for size, wanted in pairs):
        raise ValueError(
            f"{name} must have a shape that broadcasts to that of input, {tuple(shape)}, not "
            f"{tuple(own)}"
        )


class TunableBCEWithLogitsLoss(TunableModule, nn.BCEWithLogitsLoss):
    """`torch.nn.BCEWithLogitsLoss` with one more argument, k.

    It is a subclass, and positional arguments are in PyTorch's order. You may set ``criterion.k``
    between steps, as for `TunableCrossEntropyLoss`, or use a schedule of `pseudograd.schedules`.

    Args:
        weight: A weight for each loss. `tunable_binary_cross_entropy_with_logits` explains all
            arguments in full.
        size_average: Deprecated in PyTorch; use ``reduction``.
        reduce: Deprecated in PyTorch; use ``reduction``.
        reduction: "mean", "sum" or "none".
        pos_weight: A weight for the "yes" part of each target.
        k: The sensitivity to large errors, above 0: a number, or a tensor such as one value per
            class.
        persistent: Whether k is in the ``state_dict``, so that a schedule of k survives a
            checkpoint.

    Example:
        >>> criterion = TunableBCEWithLogitsLoss(pos_weight=torch.tensor([3.0]), k=0.5)
        >>> logits = torch.tensor([[2.0], [-3.0]], requires_grad=True)
        >>> criterion(logits, torch.tensor([[0.0], [1.0]])).backward()
        >>> logits.grad  # of the mean; the second counts three times
        tensor([[ 0.4693],
                [-1.4640]])

    """

    def __init__(
        self,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        reduce: bool | None = None,
        reduction: str = "mean",
        pos_weight: Tensor | None = None,
        *,
        k: Sensitivity = 1.0,
        persistent: bool = False,
    ) -> None:
        super().__init__(k, persistent)
        if size_average is not None or reduce is not None:
            reduction = legacy_get_string(size_average, reduce)
        check_reduction(reduction)
        self.reduction = reduction
        for name, factors in (("weight", weight), ("pos_weight", pos_weight)):
            _check_factors(name, factors)
            self.register_buffer(name, factors)

    @classmethod
    def from_bce_with_logits(
        cls, criterion: nn.BCEWithLogitsLoss, *, k: Sensitivity = 1.0, persistent: bool = False
    ) -> Self:
        """Return a loss with the settings of an existing `torch.nn.BCEWithLogitsLoss`.

        Args:
            criterion: The loss to convert. Both losses then share its weights.
            k: The sensitivity to large errors, above 0.
            persistent: Whether k is in the ``state_dict``.

        Example:
            >>> criterion = nn.BCEWithLogitsLoss(reduction="sum")
            >>> TunableBCEWithLogitsLoss.from_bce_with_logits(criterion, k=0.5)
            TunableBCEWithLogitsLoss(k=0.5, reduction='sum')

        """
        check_convertible(criterion, nn.BCEWithLogitsLoss)
        converted = cls(
            criterion.weight,
            reduction=criterion.reduction,
            pos_weight=criterion.pos_weight,
            k=k,
            persistent=persistent,
        )
        return converted.train(criterion.training)

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Return the loss of logits for labels or probabilities of the same shape."""
        return tunable_binary_cross_entropy_with_logits(
            input,
            target,
            weight=self.weight,
            reduction=self.reduction,
            pos_weight=self.pos_weight,
            k=self._k_for(input),
        )
