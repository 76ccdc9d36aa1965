"""Targets, per-example k and weights, and reductions, for all routes of the loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pseudograd.loss.checks import check_class_k, check_class_k_values, check_sample_weight
from pseudograd.rules.checks import holds_numbers
from pseudograd.rules.paper import Sensitivity, wide, working_dtype

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def k_of_examples(
    k: Sensitivity,
    class_k: Tensor,
    target: Tensor,
    classes: int,
    process_group: ProcessGroup | None,
) -> Tensor:
    """Return k times the ``class_k`` of each example's label; any value for ignored examples."""
    check_class_k(class_k, k, classes, target.device, process_group is not None)
    if holds_numbers(class_k):
        check_class_k_values(class_k)
    if target.is_floating_point():
        q = target.detach().movedim(min(target.dim() - 1, 1), -1).to(class_k.dtype)
        total = q.sum(-1)
        chosen = torch.where(total == 0, 1, (q * class_k).sum(-1) / total)
    else:
        y = target.long().flatten().clamp(0, classes - 1)  # invalid labels are reported later
        chosen = class_k[y].reshape(target.shape)
    return torch.mul(chosen, k)


def checked_weights(sample_weight: Tensor, shape: torch.Size, device: torch.device) -> Tensor:
    """Return the weight of each example, flattened; raise if one is invalid."""
    check_sample_weight(sample_weight, shape, device)
    if holds_numbers(sample_weight) and not bool((sample_weight >= 0).all()):
        raise ValueError("sample_weight must be 0 or more for every example")
    return sample_weight.flatten()


def times_weights(value: Tensor, per_example: Tensor) -> Tensor:
    """Return each example's value times its weight; a weight of 0 gives 0 even for NaN."""
    return torch.where(per_example == 0, 0, value * per_example)


def weighted_reduction(
    value: Tensor, per_example: Tensor, target: Tensor, z: Tensor, weight: Tensor | None,
    ignore_index: int, reduction: str,
) -> Tensor:  # fmt: skip
    """Apply sample weights to the class-weighted values of rows ``z``, and reduce them."""
    total = per_example.to(value.dtype)
    if not target.is_floating_point():  # for probabilities, a mean ignores class weights
        counted, y, _ = known_labels(target.long(), z.shape[1], ignore_index)
        total = torch.where(counted, total if weight is None else total * weight[y], 0)
    return reduced(times_weights(value, per_example), total.sum(), reduction)


def known_labels(target: Tensor, classes: int, ignore_index: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return which labels count, labels safe to index with, and 1, or NaN for invalid labels.

    On a device invalid labels become NaN, because raising an error would need a sync.
    """
    counted = target != ignore_index
    y = torch.where(counted, target, 0)
    known = (y >= 0) & (y < classes)
    return counted, torch.where(known, y, 0), torch.where(known, 1.0, torch.nan)


# Both compute in float64, because rounding errors of q would show in p - q.
def smoothed(q: Tensor, label_smoothing: float) -> Tensor:
    """Spread a share of the target evenly over all classes."""
    return wide(q) * (1 - label_smoothing) + label_smoothing / q.shape[-1] if label_smoothing else q


def weighted(q: Tensor, weight: Tensor | None) -> Tensor:
    """Multiply the target by the class weights."""
    return q if weight is None else wide(q) * weight


def smoothed_labels(z: Tensor, y: Tensor, label_smoothing: float, weight: Tensor | None) -> Tensor:
    """Return labels as targets for the rows ``z``, smoothed and weighted."""
    one_hot = torch.zeros_like(z, dtype=working_dtype(z)).scatter(-1, y.unsqueeze(-1), 1)
    return weighted(smoothed(one_hot, label_smoothing), weight)


def reduced(value: Tensor, total: int | Tensor, reduction: str) -> Tensor:
    """Return the values, their sum, or their sum divided by ``total``."""
    if reduction == "none":
        return value
    if reduction == "sum":
        return value.sum()
    if not isinstance(total, Tensor):
        return value.sum() / total
    # If all weights are 0, the mean is NaN and its gradient 0.
    mean = value.sum() / torch.where(total == 0, 1, total)
    return torch.where(total == 0, torch.nan, mean)
