"""Sample weights: a factor for each example outside the power, on every route."""

from __future__ import annotations

import io
import itertools
import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.nn import functional as F

import reference
from covering import covering
from kernels import needs
from pseudograd import (
    RuleCrossEntropyLoss,
    TunableCrossEntropyLoss,
    TunableLinearCrossEntropyLoss,
    tunable_cross_entropy,
    tunable_linear_cross_entropy,
)
from pseudograd.rules import focal, from_bias
from test_transforms import compiled, differentiate

CLASSES = 5
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning"),
]


IMPLEMENTATIONS = ("auto", "torch", "triton")


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request: pytest.FixtureRequest) -> str:
    """The CPU's kernels, PyTorch's operations, the GPU's kernels."""
    chosen: str = request.param
    needs(chosen)
    return chosen


def examples(shape: tuple[int, ...] = (6,)) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits, labels, one of them ignored, and weights, one of them 0."""
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(shape[0], CLASSES, *shape[1:], generator=generator)
    target = torch.randint(CLASSES, shape, generator=generator)
    weights = torch.rand(shape, generator=generator) + 0.2
    target.view(-1)[1], weights.view(-1)[2] = -100, 0
    return logits, target, weights


@covering(
    indirect=["implementation"],
    implementation=IMPLEMENTATIONS,
    target_kind=["index", "smoothed", "probability"],
    reduction=["mean", "sum", "none"],
)
def test_loss(implementation: str, reduction: str, target_kind: str) -> None:
    for shape, weighted, k in itertools.product(((6,), (2, 3)), (False, True), (0.5, 1.0)):
        logits, target, weights = examples(shape)
        settings: dict[str, Any] = {"k": k, "reduction": reduction}
        if target_kind == "smoothed":
            settings["label_smoothing"] = 0.1
        if target_kind == "probability":
            target = torch.flip(logits, (0,)).softmax(1)
        if weighted:
            settings["weight"] = torch.linspace(0.5, 2, CLASSES)
        loss: Any = partial(
            tunable_cross_entropy, sample_weight=weights, implementation=implementation, **settings
        )
        value, gradient = reference.loss(logits, target, sample_weight=weights, **settings)
        ours = loss(logits, target)
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours.double(), value, rtol=1e-5, atol=1e-7)
        # The kernels compute the bias of soft targets in float32.
        rtol = 1e-4 if implementation == "triton" and target_kind != "index" else 1e-5
        f = differentiate(loss, logits, target)
        torch.testing.assert_close(f.double(), gradient, rtol=rtol, atol=1e-6)


@pytest.mark.parametrize("soft", [False, True])
def test_a_weight_of_zero_hides_nan(implementation: str, soft: bool) -> None:
    logits, target, weights = examples()
    if soft:
        target = logits.softmax(-1)
    logits[2] = math.nan
    loss = partial(
        tunable_cross_entropy, k=0.5, sample_weight=weights, implementation=implementation
    )
    assert loss(logits, target).isfinite()
    gradient = differentiate(loss, logits, target)
    assert gradient.isfinite().all()
    assert not gradient[2].any()


def test_without_any_weight_the_mean_is_nan_and_its_gradient_0(implementation: str) -> None:
    logits, target, weights = examples()
    loss = partial(
        tunable_cross_entropy, sample_weight=weights * 0, implementation=implementation, k=0.5
    )
    assert loss(logits, target).isnan()
    assert not differentiate(loss, logits, target).any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_are_rounded_once(implementation: str, dtype: torch.dtype) -> None:
    logits, target, weights = examples()
    loss = partial(tunable_cross_entropy, k=0.5, sample_weight=weights)
    ours = loss(logits.to(dtype), target, implementation=implementation)
    assert ours.dtype == dtype
    expected = loss(logits.to(dtype).float(), target, implementation="torch").to(dtype)
    assert abs(ours - expected) <= torch.finfo(dtype).eps * expected


def test_targets_that_require_a_gradient_get_weighted_gradients() -> None:
    logits, _, weights = examples()
    q = logits.flip(0).softmax(-1).requires_grad_()
    loss = tunable_cross_entropy(logits, q, sample_weight=weights, k=0.5)
    (ours,) = torch.autograd.grad(loss, q)
    plain = (F.cross_entropy(logits, q, reduction="none") * weights).sum() / weights.sum()
    torch.testing.assert_close(ours, torch.autograd.grad(plain, q)[0])


ROUTES = ("compile", "vmap(grad)", "compile(vmap(grad))", "export")


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("implementation", ["torch", "triton"])
def test_transforms(route: str, implementation: str) -> None:
    if implementation == "triton":
        pytest.importorskip("triton")
    logits, target, weights = examples()
    criterion = TunableCrossEntropyLoss(k=0.5, reduction="sum", implementation=implementation)
    _, f = reference.loss(logits, target, 0.5, reduction="sum", sample_weight=weights)
    each = vmap(grad(criterion))
    if route == "compile":
        gradient = differentiate(compiled(criterion, "aot_eager"), logits, target, weights)
    elif route == "export":
        program = torch.export.export(criterion, (logits, target, weights))
        file = io.BytesIO()
        torch.export.save(program, file)
        file.seek(0)
        gradient = differentiate(torch.export.load(file).module(), logits, target, weights)
    else:
        mapped = compiled(each, "aot_eager") if route.startswith("compile") else each
        gradient = mapped(logits, target, weights)
    torch.testing.assert_close(gradient.double(), f, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("rule", [focal, from_bias(lambda bias, y: bias.clamp(-0.3, 0.3))])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_rules(reduction: str, rule: Any) -> None:
    logits, target, weights = examples()
    class_weight = torch.linspace(0.5, 2, CLASSES)
    criterion = RuleCrossEntropyLoss(rule, class_weight, reduction=reduction)
    each = RuleCrossEntropyLoss(rule, class_weight, reduction="none")
    scale = weights
    if reduction == "mean":
        total = (weights * class_weight[target.clamp(min=0)] * (target != -100)).sum()
        scale = weights / total
    expected = differentiate(lambda z, y: each(z, y) * scale, logits, target)
    torch.testing.assert_close(differentiate(criterion, logits, target, weights), expected)


# --- the linear form ------------------------------------------------------------------------------


@covering(
    indirect=["implementation"],
    implementation=IMPLEMENTATIONS,
    reduction=["mean", "sum", "none"],
    route=["eager", "compile", "export"],
)
def test_linear_form(implementation: str, reduction: str, route: str) -> None:
    """Equals the two steps, chunk by chunk."""
    generator = torch.Generator().manual_seed(1)
    hidden, weight = (torch.randn(n, 4, generator=generator).requires_grad_() for n in (6, 5))
    _, target, weights = examples()
    for smoothing, class_weight in ((0.0, None), (0.1, torch.linspace(0.5, 2, CLASSES))):
        settings: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing}
        criterion: Any = TunableLinearCrossEntropyLoss(
            k=0.5, class_weight=class_weight, chunk_rows=4, implementation=implementation,
            **settings,
        )  # fmt: skip
        given = (hidden, weight, target, None, weights)
        if route == "compile":
            criterion = compiled(criterion, "aot_eager")
        elif route == "export":
            criterion = torch.export.export(criterion, given).module()
        value = criterion(*given)
        expected = tunable_cross_entropy(
            hidden @ weight.T, target, class_weight, k=0.5, sample_weight=weights, **settings
        )
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)
        upstream = torch.rand(value.shape, generator=generator)
        for ours, theirs in zip(
            torch.autograd.grad(value, (hidden, weight), upstream),
            torch.autograd.grad(expected, (hidden, weight), upstream),
            strict=True,
        ):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_linear_form_in_half() -> None:
    """Means of float16 are divided later."""
    _, target, weights = examples()
    hidden, weight = (torch.randn(n, 4).half().requires_grad_() for n in (6, 5))
    value = tunable_linear_cross_entropy(hidden, weight, target, k=0.5, sample_weight=weights)
    expected = tunable_cross_entropy(
        hidden.float() @ weight.float().T, target, k=0.5, sample_weight=weights
    )
    torch.testing.assert_close(value.float(), expected, rtol=1e-2, atol=1e-3)
    for ours, theirs in zip(
        torch.autograd.grad(value, (hidden, weight)),
        torch.autograd.grad(expected, (hidden, weight)),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-3)


# --- errors ---------------------------------------------------------------------------------------


def test_errors(subtests: pytest.Subtests) -> None:
    cases: list[tuple[Any, type[Exception], str]] = [
        (0.5, TypeError, "sample_weight must be a floating-point tensor with one weight"),
        (torch.ones(6).long(), TypeError, "sample_weight must be a floating-point tensor"),
        (torch.ones(5), ValueError, r"one weight for each example, shape \(6,\), not \(5,\)"),
        (-torch.ones(6), ValueError, "sample_weight must be 0 or more for every example"),
        (torch.full((6,), math.nan), ValueError, "sample_weight must be 0 or more"),
        (torch.ones(6).requires_grad_(), ValueError, r"use sample_weight.detach\(\)"),
    ]
    logits, target, _ = examples()
    for weights, error, message in cases:
        with subtests.test(message):
            with pytest.raises(error, match=message):
                tunable_cross_entropy(logits, target, sample_weight=weights)
            with pytest.raises(error, match=message):
                tunable_linear_cross_entropy(
                    logits, torch.eye(CLASSES), target, sample_weight=weights
                )
