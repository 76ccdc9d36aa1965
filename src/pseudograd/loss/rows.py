"""Both passes of the loss over rows, in PyTorch operations: labels, soft targets, any rule."""

from __future__ import annotations

import torch
from torch import Tensor

from pseudograd.loss.autograd import zero_if_ignored
from pseudograd.rules import paper
from pseudograd.rules.framework import Rule, checked
from pseudograd.rules.paper import Sensitivity


class ClassIndex:
    """Eq. 5 for labels. Keeps two numbers per row; PyTorch keeps all log-probabilities."""

    exported_as: str | None = "class indices"

    def forward(self, z: Tensor, target: Tensor, k: Sensitivity) -> tuple[Tensor, ...]:
        """Return -log p_y, the top and the margin."""
        top, margin = paper.top_and_margin(paper.in_working_precision(z), target)
        return paper.cross_entropy(margin).squeeze(-1), top, margin

    def backward(
        self, z: Tensor, target: Tensor, k: Sensitivity, grad: Tensor, *kept: Tensor
    ) -> Tensor:
        """Return Eq. 5."""
        top, margin = kept
        logits = paper.in_working_precision(z)
        f = paper.push(logits, target, k, top, paper.strength(margin, k) * grad)
        return zero_if_ignored(f, grad, z.dtype)


class ClassProbabilities:
    """The rule for soft targets."""

    def __init__(self, classes: paper.Classes = paper.ALL_CLASSES) -> None:
        self.classes = classes
        whole = classes is paper.ALL_CLASSES
        self.exported_as: str | None = "class probabilities" if whole else None

    def forward(self, z: Tensor, target: Tensor, k: Sensitivity) -> tuple[Tensor, ...]:
        """Return -Σ q log p, where 0 · log 0 is 0.

        With d = z - top it is W log(1 + rest) - Σ q d, where W = Σ q and rest = Σ exp(d) - 1. In
        log p itself, a small rest would be rounded away beside the 1.
        """
        z = paper.wide(paper.in_working_precision(z))
        classes, target = self.classes, target.to(z.dtype)
        distance = z - classes.largest(z)
        at_top = distance == 0
        others = classes.total(torch.where(at_top, 0, distance.exp()))
        rest = (classes.total(at_top.to(z.dtype)) - 1) + others
        whole = classes.total(target)
        value = torch.where(whole == 0, 0, whole * rest.log1p())
        value = value - classes.total(torch.where(target == 0, 0, target * distance))
        return (value.squeeze(-1),)

    def backward(
        self, z: Tensor, target: Tensor, k: Sensitivity, grad: Tensor, *kept: Tensor
    ) -> Tensor:
        """Return the rule for soft targets."""
        f = paper.soft_push(paper.in_working_precision(z), target, k, self.classes) * grad
        return zero_if_ignored(f, grad, z.dtype)


class ByRule:
    """Any rule for labels (Eq. 3); k is not used."""

    exported_as: str | None = None

    def __init__(self, rule: Rule) -> None:
        self.rule = rule

    def forward(self, z: Tensor, target: Tensor, k: Sensitivity) -> tuple[Tensor, ...]:
        """Return -log p_y."""
        _, margin = paper.top_and_margin(paper.in_working_precision(z), target)
        return (paper.cross_entropy(margin).squeeze(-1),)

    def backward(
        self, z: Tensor, target: Tensor, k: Sensitivity, grad: Tensor, *kept: Tensor
    ) -> Tensor:
        """Return the rule."""
        f = checked(self.rule, paper.in_working_precision(z), target)
        return zero_if_ignored(f * grad, grad, z.dtype)
