"""Cases of cross-entropy in PyTorch's test/test_nn.py that our other tests lack.

They are inputs of up to six dimensions, targets and weights of any sign, means over many pixels, an
`ignore_index` that is no class, and invalid input. Each is compared with PyTorch itself.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from covering import PATHS, covering
from pseudograd import TunableCrossEntropyLoss, tunable_cross_entropy

pytestmark = pytest.mark.usefixtures("one_thread")

both_paths = pytest.mark.usefixtures("path")
N, C = 5, 4
INNER: tuple[tuple[int, ...], ...] = ((), (3,), (2, 3), (2, 1, 3), (3, 2, 1, 2))
REDUCTIONS = ("none", "mean", "sum")
KS = (0.25, 0.5, 1.0, 3.0)


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def labels(*shape: int) -> Tensor:
    return torch.randint(C, shape, generator=torch.Generator().manual_seed(len(shape)))


def assert_pytorchs(logits: Tensor, target: Tensor, **settings: Any) -> None:
    """Assert PyTorch's value at every k, and its gradient at k = 1."""
    logits = logits.detach().requires_grad_()
    expected = F.cross_entropy(logits, target, **settings)
    upstream = torch.linspace(1, 1.5, expected.numel()).reshape(expected.shape)
    (gradient,) = torch.autograd.grad(expected, logits, upstream)
    for k in KS:
        value = tunable_cross_entropy(logits, target, k=k, **settings)
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=2e-6, equal_nan=True)
        (ours,) = torch.autograd.grad(value, logits, upstream)
        assert torch.allclose(ours, gradient, rtol=1e-5, atol=2e-6) == (k == 1 or not ours.any())


@covering(inner=INNER, reduction=REDUCTIONS, weighted=(False, True), path=PATHS)
@both_paths
def test_targets_and_weights_of_any_sign(
    inner: tuple[int, ...], reduction: str, weighted: bool
) -> None:
    """Like PyTorch, we accept any numbers as probabilities."""
    settings = {"reduction": reduction, "weight": random(C) if weighted else None}
    assert_pytorchs(random(N, C, *inner), 2 * random(N, C, *inner).flip(0), **settings)
    assert_pytorchs(random(N, C, *inner), labels(N, *inner), **settings)


@covering(ignore_index=[0, 255, -1], inner=INNER, path=PATHS)
@both_paths
def test_any_index_can_be_ignored(inner: tuple[int, ...], ignore_index: int) -> None:
    """A class, a number too large, or a negative one: ignored examples count as left out."""
    logits, target = random(N, C, *inner), labels(N, *inner)
    target[1:3] = ignore_index
    settings: dict[str, Any] = {"weight": random(C).abs(), "label_smoothing": 0.1}
    for reduction in REDUCTIONS:
        assert_pytorchs(logits, target, ignore_index=ignore_index, reduction=reduction, **settings)
    rows, y = logits.movedim(1, -1).reshape(-1, C), target.flatten()
    kept = y != ignore_index
    for k in KS:
        leaves = logits.clone().requires_grad_(), rows[kept].clone().requires_grad_()
        whole = tunable_cross_entropy(leaves[0], target, k=k, ignore_index=ignore_index, **settings)
        few = tunable_cross_entropy(leaves[1], y[kept], k=k, **settings)
        torch.testing.assert_close(whole, few)
        (of_whole,) = torch.autograd.grad(whole, leaves[0])
        (of_few,) = torch.autograd.grad(few, leaves[1])
        torch.testing.assert_close(of_whole.movedim(1, -1).reshape(-1, C)[kept], of_few)


@pytest.mark.parametrize("inner", INNER[2:])
@both_paths
def test_nothing_counts(inner: tuple[int, ...]) -> None:
    """All examples have a class that has weight 0 or is ignored."""
    logits, target = torch.ones(2, C, *inner), torch.zeros(2, *inner, dtype=torch.long)
    reasons: tuple[dict[str, Any], ...] = ({"weight": torch.zeros(C)}, {"ignore_index": 0})
    for reduction, settings in itertools.product(REDUCTIONS, reasons):
        value = tunable_cross_entropy(logits, target, k=0.5, reduction=reduction, **settings)
        expected = F.cross_entropy(logits, target, reduction=reduction, **settings)
        assert value.isnan() if reduction == "mean" else not value.any()
        torch.testing.assert_close(value, expected, equal_nan=True)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@both_paths
def test_a_mean_over_many_pixels_is_exact(smoothing: float) -> None:
    """Up to the last place of float32."""
    logits, target = random(2, 2, 512, 512), labels(2, 512, 512) % 2
    expected = F.cross_entropy(logits.double(), target, label_smoothing=smoothing)
    for k in (0.5, 1.0):
        value = tunable_cross_entropy(logits, target, k=k, label_smoothing=smoothing)
        torch.testing.assert_close(value.double(), expected, rtol=1e-7, atol=0)


ERRORS = (RuntimeError, ValueError, IndexError)
REFUSED: dict[str, tuple[Tensor, Tensor, dict[str, Any]]] = {
    "smoothing of labels": (random(N, C), labels(N), {"label_smoothing": 1.2}),
    "smoothing of probabilities": (random(N, C), random(N, C), {"label_smoothing": 1.2}),
    "another batch size": (random(N, C), labels(N + 1), {}),
    "another image size": (random(N, C, 3, 3), labels(N, 3, 2), {}),
    "a label too large": (random(N, C), torch.full((N,), C), {}),
    "a label below 0": (random(N, C), torch.full((N,), -1), {}),
    "a pixel beside ignored ones": (
        random(1, C, 2, 2), torch.tensor([[[0, 255], [254, 1]]]), {"ignore_index": 255}
    ),
    "labels of two dimensions": (random(N, C), labels(N, 2), {}),
    "labels as floats": (random(N, C), labels(N).float(), {}),
    "probabilities of fewer classes": (random(N, C), random(N, C - 1), {}),
    "a weight too many": (random(N, C), labels(N), {"weight": torch.ones(C + 1)}),
    "weights in a row": (random(N, C), labels(N), {"weight": torch.ones(1, C)}),
    "probabilities to ignore": (random(N, C), random(N, C), {"ignore_index": 1}),
    "logits without a dimension": (torch.tensor(1.0), torch.tensor(0), {}),
    "reduction": (random(N, C), labels(N), {"reduction": "total"}),
}  # fmt: skip


def test_what_pytorch_refuses_is_refused(subtests: pytest.Subtests) -> None:
    """In both forms. We raise ValueError or IndexError, PyTorch often RuntimeError."""
    for name, (logits, target, settings) in REFUSED.items():
        for function in (F.cross_entropy, tunable_cross_entropy):
            with subtests.test(name, function=function), pytest.raises(ERRORS):
                function(logits, target, **settings)
        for module in (nn.CrossEntropyLoss, TunableCrossEntropyLoss):
            with subtests.test(name, module=module), pytest.raises(ERRORS):
                module(**settings)(logits, target)
