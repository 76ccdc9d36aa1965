"""The loss of a linear layer in chunks of rows, and the gradients of its input, weight and bias.

One buffer holds the logits of a chunk, and then their pseudo-gradients.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from pseudograd.loss.autograd import RowLoss
from pseudograd.loss.rows import ClassIndex, ClassProbabilities
from pseudograd.loss.targets import (
    known_labels,
    smoothed,
    smoothed_labels,
    times_weights,
    weighted,
)
from pseudograd.rules.paper import (
    ALL_CLASSES,
    Sensitivity,
    in_working_precision,
    wide,
    working_dtype,
)

Products = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


class _Settings(NamedTuple):
    """The arguments of `linear_products` that are the same for all chunks."""

    class_weight: Tensor | None
    ignore_index: int
    smoothing: float
    softcap: float
    z_factor: float | Tensor
    route: str
    group: str


_SCHEMA = """(
    Tensor hidden, Tensor weight, Tensor? bias, Tensor target, float k, Tensor? ks,
    Tensor? class_weight, Tensor? per_example, Tensor? factor, int ignore_index, float smoothing,
    float softcap, float z_loss, bool mean, bool later, str route, str group, SymInt chunk_rows,
    bool[] wanted
) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"""


@torch.library.custom_op("pseudograd::linear_products", mutates_args=(), schema=_SCHEMA)
def linear_products(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, k: float,
    ks: Tensor | None, class_weight: Tensor | None, per_example: Tensor | None,
    factor: Tensor | None, ignore_index: int, smoothing: float, softcap: float, z_loss: float,
    mean: bool, later: bool, route: str, group: str, chunk_rows: int, wanted: list[bool],
) -> Products:  # fmt: skip
    """Return the values of rows, two divisors, and the gradients of hidden, weight and bias.

    ``wanted`` selects the gradients. They are those of the mean or the sum, from pseudo-gradients
    times ``factor`` (one number, or one per row) and ``per_example``. The divisors are the sum of
    the weights and, if the mean is divided ``later``, the remaining divisor of the gradients.
    """
    counted = counted_rows(target, len(hidden), ignore_index)
    labels = _labels(target, counted, class_weight, len(weight), ignore_index, group)
    divisor = _times(labels.weight, per_example).sum()
    z_factor: float | Tensor = z_loss
    if z_loss and class_weight is not None and (mean or later):
        # The division by the sum of the weights then gives a mean without class weights.
        count = _times(counted, per_example).sum()
        z_factor = torch.where(divisor == 0, 0, z_loss * divisor / count)
    if factor is not None:
        factor = _times(factor, per_example)
        factor = torch.where(divisor == 0, 0, factor / divisor) if mean else factor
    settings = _Settings(class_weight, ignore_index, smoothing, softcap, z_factor, route, group)
    values = torch.empty(len(hidden), dtype=torch.float64, device=hidden.device)
    of_hidden, of_weight, of_bias = _buffers(hidden, weight, bias, factor, wanted)
    buffer = hidden.new_empty((min(chunk_rows, len(hidden)), len(weight)))
    unit = 2.0 ** -(len(hidden).bit_length() // 2) if later else 1.0
    if not len(hidden):
        of_weight.zero_()
    for start in range(0, len(hidden), chunk_rows):
        part = slice(start, min(start + chunk_rows, len(hidden)))
        x, logits = hidden[part], buffer[: part.stop - start]
        if bias is None:
            torch.mm(x, weight.t(), out=logits)
        else:
            torch.addmm(bias, x, weight.t(), out=logits)
        k_part: Sensitivity = k if ks is None else ks[part].unsqueeze(-1)
        factor_part = None
        if factor is not None:
            factor_part = (factor if len(factor) == 1 else factor[part]).expand(len(x))
        values[part] = _loss_of_chunk(logits, labels.rows(part), k_part, factor_part, settings)
        if factor is None:
            continue
        # The buffer now holds pseudo-gradients.
        if wanted[0]:
            of_hidden[part].addmm_(logits, weight, beta=0.0, alpha=unit)
        if wanted[1]:
            of_weight.addmm_(logits.t(), x, beta=float(start > 0), alpha=unit)
        if wanted[2]:
            of_bias += unit * logits.sum(0, dtype=of_bias.dtype)
    if group and wanted[0] and factor is not None:
        from pseudograd.loss.parallel import ranks_of

        torch.distributed.all_reduce(of_hidden, group=ranks_of(group))
    if per_example is not None:
        values = times_weights(values, per_example)
    divisors = torch.stack((divisor, unit * divisor))
    return values, divisors, of_hidden, of_weight, of_bias.to(hidden.dtype)


def _times(values: Tensor, per_example: Tensor | None) -> Tensor:
    return values if per_example is None else values * per_example


class _Labels(NamedTuple):
    """Targets of rows, which of them count, and their weights.

    With split classes, ``column`` holds the labels as columns of this rank.
    """

    target: Tensor
    column: Tensor
    counted: Tensor
    weight: Tensor

    def rows(self, part: slice) -> _Labels:
        return _Labels(*(tensor[part] for tensor in self))


def _labels(
    target: Tensor, counted: Tensor, class_weight: Tensor | None, classes: int, ignore_index: int,
    group: str,
) -> _Labels:  # fmt: skip
    column, weight = target, counted.double()
    if group:
        from pseudograd.loss.parallel import label_weights, own_labels

        column = own_labels(torch.where(counted, target, 0), classes, group)
        if class_weight is not None:
            weight = weight * label_weights(class_weight, column, group)
    elif class_weight is not None and not target.is_floating_point():
        _, y, known = known_labels(target, classes, ignore_index)
        weight = weight * known * class_weight[y]
    return _Labels(target, column, counted, weight)


def _loss_of_chunk(
    logits: Tensor, labels: _Labels, k: Sensitivity, factor: Tensor | None, settings: _Settings
) -> Tensor:
    """Return the values of rows; with a factor, overwrite the logits with the gradients."""
    slope = _cap(logits, settings.softcap, factor is not None) if settings.softcap else None
    squares = of_z_loss = None
    if isinstance(settings.z_factor, Tensor) or settings.z_factor:
        squares, of_z_loss = _z_loss(logits, labels.counted, factor, settings)
    if settings.group and settings.smoothing:
        values = _split_smoothed(logits, labels, k, factor, settings)
    elif settings.group:
        values = _split(logits, labels, k, factor, settings)
    else:
        values = _ROUTES[settings.route](logits, labels.target, k, factor, settings)
    if of_z_loss is not None:
        logits.add_(of_z_loss)
    if slope is not None:
        logits.mul_(slope)
    return values if squares is None else values + squares


@linear_products.register_fake
def _(hidden: Tensor, *arguments: Any) -> Products:
    weight, bias, wanted, factor = arguments[0], arguments[1], arguments[-1], arguments[7]
    values = hidden.new_empty(hidden.shape[0], dtype=torch.float64)  # `len` would fix the size
    of_hidden, of_weight, of_bias = _buffers(hidden, weight, bias, factor, wanted)
    return values, values.new_empty(2), of_hidden, of_weight, of_bias.to(hidden.dtype)


def _buffers(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, factor: Tensor | None, wanted: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return buffers for the products, empty for those that are not wanted."""

    def buffer(like: Tensor | None, wants: bool) -> Tensor:
        return hidden.new_empty(like.shape if wants and like is not None else 0)

    here = [wants and factor is not None for wants in wanted]
    of_bias = buffer(bias, here[2])
    # It is small, and a sum over all rows, so it is computed in float32.
    of_bias = torch.zeros_like(of_bias, dtype=working_dtype(hidden))
    return buffer(hidden, here[0]), buffer(weight, here[1]), of_bias


def _cap(logits: Tensor, softcap: float, slope: bool) -> Tensor | None:
    """Overwrite logits z with softcap · tanh(z / softcap); return the derivative if ``slope``."""
    z = logits.to(working_dtype(logits)) / softcap
    # Not 1 - tanh², which cancels.
    derivative = z.cosh().pow_(-2).to(logits.dtype) if slope else None
    logits.copy_(z.tanh_().mul_(softcap))
    return derivative


def counted_rows(target: Tensor, rows: int, ignore_index: int) -> Tensor:
    """Return which rows are not ignored."""
    if target.is_floating_point():
        return target.new_ones(rows, dtype=torch.bool)
    return target != ignore_index


def _z_loss(
    logits: Tensor, counted: Tensor, factor: Tensor | None, settings: _Settings
) -> tuple[Tensor, Tensor | None]:
    """Return ``z_factor`` · L² of each row and, with a factor, its gradient times that factor.

    L is the log-sum-exp of the row's logits, and the gradient 2 · z_factor · L · softmax.
    """
    classes, z_factor = ALL_CLASSES, settings.z_factor
    if settings.group:
        from pseudograd.loss.parallel import SplitClasses

        classes = SplitClasses(settings.group)
    top = classes.largest(in_working_precision(logits.amax(-1, keepdim=True)))
    powers = (logits - top).exp_()  # half types are promoted to the top's dtype, float32
    total = wide(classes.total(powers))
    log_sum = wide(top) + total.log()
    values = torch.where(counted, z_factor * log_sum.square().squeeze(-1), 0)
    if factor is None:
        return values, None
    factor = (factor * counted).unsqueeze(-1)
    scale = (2 * z_factor * factor * log_sum / total).to(powers.dtype)
    # An infinite scale times a power of 0 would be NaN.
    greatest = torch.finfo(powers.dtype).max
    # Ignored rows may hold NaN, and NaN · 0 is NaN.
    return values, powers.mul_(scale.clamp_(-greatest, greatest)).masked_fill_(factor == 0, 0)


# Each function below returns the values of a chunk's rows and, with a factor, overwrites the logits
# with the pseudo-gradients.


def _by_triton(
    logits: Tensor, target: Tensor, k: Sensitivity, factor: Tensor | None, settings: _Settings
) -> Tensor:
    from pseudograd.loss.triton.launch import launch, rows_of_loss

    values = logits.new_empty(len(logits), dtype=torch.float64)
    class_weight, ignore_index, smoothing, *_ = settings
    rows = rows_of_loss(logits, target, k, class_weight, ignore_index, smoothing)
    with torch.cuda.device_of(logits):
        launch(rows, values, None if factor is None else logits, grad=factor)
    return values


def _by_cpu(
    logits: Tensor, target: Tensor, k: Sensitivity, factor: Tensor | None, settings: _Settings
) -> Tensor:
    from pseudograd.loss.cpu import values_and_gradients

    class_weight, ignore_index, smoothing, *_ = settings
    return values_and_gradients(logits, target, k, class_weight, ignore_index, smoothing, factor)


def _by_torch(
    logits: Tensor, target: Tensor, k: Sensitivity, factor: Tensor | None, settings: _Settings
) -> Tensor:
    class_weight, ignore_index, smoothing, *_ = settings
    if target.is_floating_point():
        q = weighted(smoothed(target.to(working_dtype(logits)), smoothing), class_weight)
        ones = torch.ones_like(q[:, 0], dtype=working_dtype(logits))
        return _by_rows(ClassProbabilities(), logits, q, k, ones, factor)
    counted, y, known = known_labels(target, logits.shape[1], ignore_index)
    loss: RowLoss = ClassIndex()
    row_weight = (counted * known).to(working_dtype(logits))
    if smoothing:
        y = smoothed_labels(logits, y, smoothing, class_weight)
        loss = ClassProbabilities()
    elif class_weight is not None:
        row_weight = row_weight * class_weight[y]
    return _by_rows(loss, logits, y, k, row_weight, factor)


_ROUTES = {"triton": _by_triton, "cpu": _by_cpu, "torch": _by_torch}


def _by_rows(
    loss: RowLoss, logits: Tensor, y: Tensor, k: Sensitivity, row_weight: Tensor,
    factor: Tensor | None,
) -> Tensor:  # fmt: skip
    values, *kept = loss.forward(logits, y, k)
    if factor is not None:
        grad = (factor * row_weight).unsqueeze(-1)
        logits.copy_(loss.backward(logits, y, k, grad, *kept))
    return torch.where(row_weight == 0, 0, values * row_weight)


def _split_smoothed(
    logits: Tensor, labels: _Labels, k: Sensitivity, factor: Tensor | None, settings: _Settings
) -> Tensor:
    from pseudograd.loss.parallel import SplitClasses, smoothed_target

    group, smoothing = settings.group, settings.smoothing
    q = smoothed_target(labels.column, logits.shape[1], settings.class_weight, smoothing, group)
    row_weight = labels.counted.to(working_dtype(logits))
    return _by_rows(ClassProbabilities(SplitClasses(group)), logits, q, k, row_weight, factor)


def _split(
    logits: Tensor, labels: _Labels, k: Sensitivity, factor: Tensor | None, settings: _Settings
) -> Tensor:
    from pseudograd.loss.parallel import push, whole_rows
    from pseudograd.rules import paper

    column, row_weight = labels.column, labels.weight
    triton = settings.route == "triton"
    whole = whole_rows(logits, column, k, settings.group, triton)
    if factor is not None:
        push(logits, column, k, whole, (factor * row_weight).unsqueeze(-1), triton, out=logits)
    value = paper.cross_entropy(whole.margin).squeeze(-1)
    return torch.where(row_weight == 0, 0, value * row_weight)
