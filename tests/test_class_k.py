"""A k for each class, chosen by an example's label, on every route."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.func import grad, vmap

import reference
from covering import covering
from kernels import needs
from pseudograd import (
    TunableCrossEntropyLoss,
    TunableLinearCrossEntropyLoss,
    tunable_cross_entropy,
    tunable_linear_cross_entropy,
)
from test_transforms import compiled, differentiate

CLASSES = 5
CLASS_K = torch.tensor([0.25, 0.5, 1.0, 2.0, 4.0])
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning"),
]


def examples(shape: tuple[int, ...] = (CLASSES,)) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits, labels, one of them ignored, and each example's k; N == C by default."""
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(shape[0], CLASSES, *shape[1:], generator=generator)
    target = torch.randint(CLASSES, shape, generator=generator)
    target.view(-1)[1] = -100
    return logits, target, CLASS_K[target.clamp(min=0)]


@covering(
    implementation=["auto", "torch", "triton"], smoothing=[0.0, 0.1], shape=[(CLASSES,), (2, 3)]
)
def test_class_k_follows_the_label(
    shape: tuple[int, ...], smoothing: float, implementation: str
) -> None:
    needs(implementation)
    logits, target, k = examples(shape)
    loss = partial(tunable_cross_entropy, label_smoothing=smoothing, implementation=implementation)
    gradient = differentiate(partial(loss, class_k=CLASS_K), logits, target)
    _, f = reference.loss(logits, target, k, label_smoothing=smoothing)
    rtol = 1e-4 if implementation == "triton" and smoothing else 1e-5
    torch.testing.assert_close(gradient.double(), f, rtol=rtol, atol=1e-6)
    twice = differentiate(partial(loss, class_k=CLASS_K, k=2.0), logits, target)
    _, f = reference.loss(logits, target, 2 * k, label_smoothing=smoothing)
    torch.testing.assert_close(twice.double(), f, rtol=rtol, atol=1e-6)


def test_another_ignore_index() -> None:
    """An ignored class, and uint8 labels."""
    logits, target, k = examples()
    target[1] = 3
    expected = differentiate(partial(tunable_cross_entropy, k=k, ignore_index=3), logits, target)
    loss = partial(tunable_cross_entropy, class_k=CLASS_K, ignore_index=3)
    assert torch.equal(differentiate(loss, logits, target), expected)
    assert torch.equal(differentiate(loss, logits, target.byte()), expected)


def test_one_example_without_a_batch() -> None:
    logits, target, k = examples()
    ours = differentiate(partial(tunable_cross_entropy, class_k=CLASS_K), logits[0], target[0])
    _, f = reference.loss(logits[0], target[0], k[0])
    torch.testing.assert_close(ours.double(), f, rtol=1e-5, atol=1e-8)


def test_probabilities_average_class_k() -> None:
    """Weighted by the target; for one-hot targets, this is the label's k."""
    logits, _, _ = examples((2, 3))
    q = logits.flip(0).softmax(1)
    ours = differentiate(partial(tunable_cross_entropy, class_k=CLASS_K), logits, q)
    k = (q * CLASS_K[:, None]).sum(1)
    _, f = reference.loss(logits, q, k)
    torch.testing.assert_close(ours.double(), f, rtol=1e-4, atol=1e-7)
    target = torch.tensor([[0, 1, 2], [3, 4, 0]])
    one_hot = torch.nn.functional.one_hot(target, CLASSES).movedim(-1, 1).float()
    torch.testing.assert_close(
        differentiate(partial(tunable_cross_entropy, class_k=CLASS_K), logits, one_hot),
        differentiate(partial(tunable_cross_entropy, class_k=CLASS_K), logits, target),
    )
    nothing = differentiate(partial(tunable_cross_entropy, class_k=CLASS_K), logits, 0 * q)
    assert not nothing.any()


@pytest.mark.parametrize("route", ["compile", "vmap(grad)", "compile(vmap(grad))", "export"])
def test_transforms(route: str) -> None:
    logits, target, k = examples()
    criterion = TunableCrossEntropyLoss(class_k=CLASS_K, reduction="sum")
    if route == "compile":
        gradient = differentiate(compiled(criterion, "aot_eager"), logits, target)
    elif route == "export":
        exported = torch.export.export(criterion, (logits, target)).module()
        gradient = differentiate(exported, logits, target)
    else:
        each = vmap(grad(criterion))
        gradient = (compiled(each, "aot_eager") if "compile" in route else each)(logits, target)
    _, f = reference.loss(logits, target, k, reduction="sum")
    torch.testing.assert_close(gradient.double(), f, rtol=1e-5, atol=1e-7)


def test_a_schedule_multiplies_it_and_does_not_recompile() -> None:
    logits, target, k = examples()
    criterion = TunableCrossEntropyLoss(class_k=CLASS_K, reduction="sum")
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    step = torch.compile(criterion, fullgraph=True, backend=counter)
    for factor in (1, 2, 0.5, 0.25):
        criterion.k = factor
        _, f = reference.loss(logits, target, factor * k, reduction="sum")
        gradient = differentiate(step, logits, target)
        torch.testing.assert_close(gradient.double(), f, rtol=1e-5, atol=1e-7)
    assert counter.frame_count == 1


@pytest.mark.parametrize("implementation", ["auto", "torch", "triton"])
def test_linear_form(implementation: str) -> None:
    if implementation == "triton":
        pytest.importorskip("triton")
    logits, target, k = examples()
    weight = torch.eye(CLASSES)
    criterion = TunableLinearCrossEntropyLoss(class_k=CLASS_K, implementation=implementation)
    gradient = differentiate(lambda z: criterion(z, weight, target), logits)
    _, f = reference.loss(logits, target, k)
    torch.testing.assert_close(gradient.double(), f, rtol=1e-5, atol=1e-7)


def test_module() -> None:
    logits, target, _ = examples()
    criterion = TunableCrossEntropyLoss(class_k=CLASS_K)
    assert not criterion.state_dict()
    expected = criterion(logits, target)
    assert torch.equal(copy.deepcopy(criterion)(logits, target), expected)
    converted = criterion.bfloat16()
    assert converted.class_k is not None
    assert torch.equal(converted.class_k, CLASS_K)
    with torch.device("meta"):
        without_memory = TunableCrossEntropyLoss(class_k=torch.ones(CLASSES))
    allocated = without_memory.bfloat16().to_empty(device="cpu").class_k
    assert allocated is not None
    assert (allocated.dtype, allocated.device.type) == (torch.float32, "cpu")
    kept = TunableCrossEntropyLoss(class_k=CLASS_K, persistent=True)
    other = TunableCrossEntropyLoss(class_k=torch.ones(CLASSES), persistent=True)
    other.load_state_dict(kept.state_dict())
    assert other.class_k is not None
    assert torch.equal(other.class_k, CLASS_K)


def test_errors(subtests: pytest.Subtests) -> None:
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"class_k": torch.ones(3)}, ValueError, "class_k must have one value for each of the 5"),
        ({"class_k": 0.5}, TypeError, "class_k must be a floating-point tensor"),
        ({"class_k": CLASS_K, "k": CLASS_K}, ValueError, "pass k for each example or class_k"),
        ({"class_k": CLASS_K - 1}, ValueError, "class_k must be finite and above 0 .* every class"),
        ({"class_k": CLASS_K.clone().requires_grad_()}, ValueError, r"use class_k.detach\(\)"),
    ]
    for arguments, error, message in cases:
        with subtests.test(message=message):
            logits, target, _ = examples()
            with pytest.raises(error, match=message):
                tunable_cross_entropy(logits, target, **arguments)
            with pytest.raises(error, match=message):
                tunable_linear_cross_entropy(logits, torch.eye(CLASSES), target, **arguments)


def test_wrong_labels_are_still_named() -> None:
    logits, target, _ = examples()
    target[0] = 7
    with pytest.raises(IndexError, match="class index 7, which is out of range"):
        tunable_cross_entropy(logits, target, class_k=CLASS_K)
