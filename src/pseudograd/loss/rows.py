"""Both passes of the loss over rows, in PyTorch operations: labels, soft targets, any rule."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pseudograd.loss.autograd import zero_if_ignored
from pseudograd.loss.checks import is_wrapper
from pseudograd.rules import paper
from pseudograd.rules.checks import is_eager
from pseudograd.rules.framework import Rule, checked
from pseudograd.rules.paper import Sensitivity

# Soft targets need ten float64 temporaries per logit, so rows are computed in blocks of this many
# logits: few enough for a CPU's cache, enough to keep a GPU busy.
CPU_BLOCK, GPU_BLOCK = 1 << 17, 1 << 24


def by_blocks(
    function: Callable[..., tuple[Tensor, ...]], z: Tensor, target: Tensor, k: Sensitivity,
    *others: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return ``function`` of all rows, computed in blocks if there are many.

    Traced calls are not split, since compilers fuse operations; nor are distributed tensors.
    """
    rows = max((CPU_BLOCK if z.is_cpu else GPU_BLOCK) // max(z.shape[-1], 1), 1)
    if is_wrapper(z) or not is_eager() or len(z) <= rows:
        return function(z, target, k, *others)
    whole: tuple[Tensor, ...] = ()
    for start in range(0, len(z), rows):
        part = slice(start, start + rows)
        k_part = k[part] if isinstance(k, Tensor) and k.dim() else k
        results = function(z[part], target[part], k_part, *(other[part] for other in others))
        if not whole:
            # Allocated once: results of blocks between their temporaries would fragment memory.
            whole = tuple(result.new_empty((len(z), *result.shape[1:])) for result in results)
        for tensor, result in zip(whole, results, strict=True):
            tensor[part] = result
    return whole


class ClassIndex:
    """Eq. 5 for labels. Saves two numbers per row, where PyTorch saves all log-probabilities."""

    exported_as: str | None = "class indices"

    def forward(self, z: Tensor, target: Tensor, k: Sensitivity) -> tuple[Tensor, ...]:
        """Return -log p_y, the top and the margin."""
        return by_blocks(self._values, z, target, k)

    def backward(
        self, z: Tensor, target: Tensor, k: Sensitivity, grad: Tensor, *kept: Tensor
    ) -> Tensor:
        """Return Eq. 5."""
        return by_blocks(self._push, z, target, k, grad, *kept)[0]

    @staticmethod
    def _values(z: Tensor, target: Tensor, k: Sensitivity) -> tuple[Tensor, ...]:
        top, margin = paper.top_and_margin(paper.in_working_precision(z), target)
        return paper.cross_entropy(margin).squeeze(-1), top, margin

    @staticmethod
    def _push(
        z: Tensor, target: Tensor, k: Sensitivity, grad: Tensor, top: Tensor, margin: Tensor
    ) -> tuple[Tensor]:
        logits = paper.in_working_precision(z)
        f = paper.push(logits, target, k, top, paper.strength(margin, k) * grad)
        return (zero_if_ignored(f, grad, z.dtype),)


class ClassProbabilities:
    """The rule for soft targets."""

    def __init__(self, classes: paper.Classes = paper.ALL_CLASSES) -> None:
        self.classes = classes
        self.whole = classes is paper.ALL_CLASSES
        self.exported_as: str | None = "class probabilities" if self.whole else None

    def forward(self, z: Tensor, target: Tensor, k: Sensitivity) -> tuple[Tensor, ...]:
        """Return -Σ q log p, where 0 · log 0 is 0."""
        if not self.whole:  # each block would need its own all-reduces
            return self._values(z, target, k)
        return by_blocks(self._values, z, target, k)

    def backward(
        self, z: Tensor, target: Tensor, k: Sensitivity, grad: Tensor, *kept: Tensor
    ) -> Tensor:
        """Return the rule for soft targets."""
        if not self.whole:
            return self._push(z, target, k, grad)[0]
        return by_blocks(self._push, z, target, k, grad)[0]

    def _values(self, z: Tensor, target: Tensor, k: Sensitivity) -> tuple[Tensor, ...]:
        """Return -Σ q log p.

        With d = z - top it is W log(1 + rest) - Σ q d, where W = Σ q and rest = Σ exp(d) - 1.
        Computing log p itself would round away a rest that is small compared to 1.
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

    def _push(self, z: Tensor, target: Tensor, k: Sensitivity, grad: Tensor) -> tuple[Tensor]:
        f = paper.soft_push(paper.in_working_precision(z), target, k, self.classes) * grad
        return (zero_if_ignored(f, grad, z.dtype),)


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
