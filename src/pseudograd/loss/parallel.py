"""The tunable loss of logits whose classes are split over the ranks of a process group.

Each rank holds a shard of the columns, in rank order. Two all-reduces combine the shards of a row:
one finds the largest logit, the other adds the sums, rescaled to it, and the label's logit (0 on
all ranks but one). Two small ones precede them: for the number of classes of each rank, and for the
labels' class weights if there are any. Smoothed labels use the rule for soft targets, with an
all-reduce for each of its sums.

Groups are passed by name and all-reduces are custom ops, so that `torch.compile` can trace both.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist

from pseudograd.loss.autograd import number_or_tensor, row_values
from pseudograd.loss.modes import keep_whole
from pseudograd.loss.rows import ClassProbabilities
from pseudograd.rules import paper
from pseudograd.rules.paper import Sensitivity

# In place of a column: the label belongs to another rank, or it is invalid.
ELSEWHERE, NOWHERE = -1, -2


class Whole(NamedTuple):
    """Statistics of complete rows, as columns in float64."""

    top: Tensor
    power_total: Tensor
    margin: Tensor


def ranks_of(group: str) -> dist.ProcessGroup:
    """Return the process group of that name."""
    resolve = getattr(dist.distributed_c10d, "_resolve_process_group")  # noqa: B009
    ranks: dist.ProcessGroup = resolve(group)
    return ranks


@torch.library.custom_op(
    "pseudograd::over_ranks",
    mutates_args=(),
    schema="(Tensor x, str group, bool largest) -> Tensor",
)
def _over_ranks(x: Tensor, group: str, largest: bool) -> Tensor:
    result = x.clone()
    operation = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
    dist.all_reduce(result, operation, ranks_of(group))
    return result


@_over_ranks.register_fake
def _(x: Tensor, group: str, largest: bool) -> Tensor:
    return torch.empty_like(x)


def total_over_ranks(x: Tensor, group: str) -> Tensor:
    """Return the sum of a tensor over the ranks."""
    total: Tensor = _over_ranks(x, group, False)
    return total


def largest_over_ranks(x: Tensor, group: str) -> Tensor:
    """Return the elementwise maximum of a tensor over the ranks."""
    largest: Tensor = _over_ranks(x, group, True)
    return largest


@torch.library.custom_op(
    "pseudograd::own_classes",
    mutates_args=(),
    schema="(Tensor like, SymInt classes, str group) -> Tensor",
)
def _own_classes(like: Tensor, classes: int, group: str) -> Tensor:
    ranks = ranks_of(group)
    sizes = like.new_zeros(ranks.size())
    sizes[ranks.rank()] = classes
    dist.all_reduce(sizes, group=ranks)
    return torch.stack((sizes[: ranks.rank()].sum(), sizes.sum()))


@_own_classes.register_fake
def _(like: Tensor, classes: int, group: str) -> Tensor:
    return like.new_empty(2)


def own_labels(target: Tensor, classes: int, group: str) -> Tensor:
    """Return each label as a column of this rank, `ELSEWHERE` or `NOWHERE`."""
    like = torch.empty(0, dtype=torch.long, device=target.device)
    first, total = _own_classes(like, classes, group)
    column = target - first
    others = torch.where((target >= 0) & (target < total), ELSEWHERE, NOWHERE)
    return torch.where((column >= 0) & (column < classes), column, others)


def label_weights(weight: Tensor, column: Tensor, group: str) -> Tensor:
    """Return the labels' class weights; each rank holds the weights of its own classes."""
    own = torch.where(column >= 0, weight[column.clamp(min=0)], 0)
    return total_over_ranks(torch.where(column == NOWHERE, torch.nan, own), group)


def whole_rows(z: Tensor, column: Tensor, k: Sensitivity, group: str, triton: bool) -> Whole:
    """Return the statistics of complete rows from the shards ``z`` (R, C of this rank)."""
    part = _part_by_kernel if triton else _part
    top, total, power_total, z_y = part(z, column, k).unsqueeze(-1)
    highest = largest_over_ranks(top, group)
    lower = top - highest
    column = column.unsqueeze(-1)
    # Invalid labels give NaN.
    z_y = torch.where(column == NOWHERE, torch.nan, torch.where(column == ELSEWHERE, 0, z_y))
    sums = torch.stack((total * lower.exp(), power_total * (k * lower).exp(), z_y))
    total, power_total, z_y = total_over_ranks(sums, group)
    margin = paper.margin_of(z_y, highest, total)
    return Whole(highest, torch.where(power_total < 1, 1, power_total), margin)


def _part_by_kernel(z: Tensor, column: Tensor, k: Sensitivity) -> Tensor:
    from pseudograd.loss.triton.operators import statistics_of_part

    statistics: Tensor = statistics_of_part(z, column, *number_or_tensor(k))
    return statistics


def _part(z: Tensor, column: Tensor, k: Sensitivity) -> Tensor:
    """Return the top, both sums and the label's logit of this shard of each row: (4, R)."""
    logits = paper.in_working_precision(z)
    y = column.clamp(min=0).unsqueeze(-1)
    lowest = torch.finfo(logits.dtype).min
    own = (column >= 0).unsqueeze(-1)
    others = logits.scatter(-1, y, torch.where(own, lowest, logits.gather(-1, y)))
    top = others.amax(-1, keepdim=True).clamp(min=lowest)
    gap = others - top
    powers = torch.stack((gap.exp(), (k * gap).exp()))
    keep = torch.where(own, 0, powers.gather(-1, y.expand(2, -1, -1)))
    sums = powers.scatter(-1, y.expand(2, -1, -1), keep).sum(-1, dtype=paper.wide_dtype(z))
    z_y = logits.gather(-1, y)
    return torch.stack((paper.wide(top.squeeze(-1)), *sums, paper.wide(z_y.squeeze(-1))))


def push(
    z: Tensor,
    column: Tensor,
    k: Sensitivity,
    whole: Whole,
    factor: Tensor,
    triton: bool,
    out: Tensor | None = None,
) -> Tensor:
    """Return this rank's columns of Eq. 5 times ``factor``, in ``out`` if it is given."""
    # Ignored rows may hold NaN, and NaN · 0 is NaN.
    scale = torch.where(factor == 0, 0, factor * paper.strength(whole.margin, k))
    share = scale / whole.power_total
    if triton:
        from pseudograd.loss.triton.launch import launch, rows_of_loss
        from pseudograd.loss.triton.operators import gradient_of_rows

        given = torch.cat((whole.top, share, scale), -1).float()
        if out is None:
            f: Tensor = gradient_of_rows(z, column, *number_or_tensor(k), None, given, 0.0)
            return f
        with torch.cuda.device_of(z):
            launch(rows_of_loss(z, column, k), None, out, given=given)
        return out
    logits = paper.in_working_precision(z)
    f = (k * (logits - whole.top.to(logits.dtype))).exp() * share.to(logits.dtype)
    y, own = column.clamp(min=0).unsqueeze(-1), (column >= 0).unsqueeze(-1)
    f = f.scatter(-1, y, torch.where(own, -scale.to(logits.dtype), f.gather(-1, y)))
    f = torch.where(scale == 0, 0, f).to(z.dtype)
    return f if out is None else out.copy_(f)


class SplitClassIndex:
    """Eq. 5 for split classes; labels are columns of this rank."""

    exported_as: str | None = None

    def __init__(self, group: str, triton: bool) -> None:
        self.group, self.triton = group, triton

    def forward(self, z: Tensor, target: Tensor, k: Sensitivity) -> tuple[Tensor, ...]:
        """Return -log p_y and the statistics of complete rows."""
        whole = whole_rows(z, target, k, self.group, self.triton)
        return paper.cross_entropy(whole.margin).squeeze(-1), *whole

    def backward(
        self, z: Tensor, target: Tensor, k: Sensitivity, grad: Tensor, *kept: Tensor
    ) -> Tensor:
        """Return this rank's columns of Eq. 5."""
        return push(z, target, k, Whole(*kept), grad, self.triton)


def smoothed_target(
    column: Tensor,
    classes: int,
    weight: Tensor | None,
    label_smoothing: float,
    group: str,
) -> Tensor:
    """Return this rank's columns of the smoothed labels ``column`` (R)."""
    count = torch.full((1,), float(classes), dtype=torch.float64, device=column.device)
    own = (column == torch.arange(classes, device=column.device).unsqueeze(-1)).mT
    q = own.double() * (1 - label_smoothing) + label_smoothing / total_over_ranks(count, group)
    q = torch.where((column == NOWHERE).unsqueeze(-1), torch.nan, q)
    return q if weight is None else q * weight


class SplitClasses(paper.Classes):
    """Reductions over the classes of all ranks; this rank holds a shard of the columns."""

    def __init__(self, group: str) -> None:
        self.group = group

    def largest(self, x: Tensor) -> Tensor:
        """Return the largest value of each row."""
        return largest_over_ranks(super().largest(x), self.group)

    def total(self, x: Tensor) -> Tensor:
        """Return the sum of each row."""
        return total_over_ranks(super().total(x), self.group)

    def log_softmax(self, x: Tensor) -> Tensor:
        """Return this rank's columns of x - log Σ exp(x)."""
        gap = x - self.largest(x)
        return gap - self.total(gap.exp()).log()


def _split_rows(z: Tensor, column: Tensor, k: Sensitivity, group: str, triton: bool) -> Tensor:
    return row_values(SplitClassIndex(group, triton), z, column, k)


def _split_soft_rows(z: Tensor, q: Tensor, k: Sensitivity, group: str) -> Tensor:
    return row_values(ClassProbabilities(SplitClasses(group)), z, q, k)


keep_whole(_split_rows)
keep_whole(_split_soft_rows)


def split_values(
    z: Tensor,
    target: Tensor,
    k: Sensitivity,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    group: str,
    triton: bool,
) -> tuple[Tensor, Tensor]:
    """Return the weighted loss of each row, and the weights to divide a mean by.

    ``z`` (R, C of this rank) and ``weight`` are this rank's shards. The labels ``target`` (R) are
    the same on all ranks, and index the classes of all ranks.
    """
    counted = target != ignore_index
    column = own_labels(torch.where(counted, target, 0), z.shape[1], group)
    example_weight = counted.to(paper.wide_dtype(z))
    if weight is not None:
        example_weight = example_weight * label_weights(weight, column, group)
    if label_smoothing:
        q = smoothed_target(column, z.shape[1], weight, label_smoothing, group)
        return torch.where(counted, _split_soft_rows(z, q, k, group), 0), example_weight
    value = _split_rows(z, column, k, group, triton)
    return torch.where(counted, value * example_weight, 0), example_weight
