"""The loss's Triton kernels against 50 digits, in every dtype, path and corner.

On a GPU if there is one; else in Triton's interpreter, on the CPU, with few rows.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import math
import os
import pickle
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton", reason="Triton is not installed")

import reference
import test_transforms as transforms
from covering import covering
from pseudograd import TunableCrossEntropyLoss, tunable_cross_entropy
from pseudograd.loss import functional, tunable_linear_cross_entropy
from pseudograd.loss.triton import eq5, launch, layout, operators, plans
from pseudograd.loss.triton.scaled import ScaledBefore
from pseudograd.rules import tunable
from pseudograd.rules.checks import GREATEST_K, LEAST_K
from test_paper_rule import (
    HALF_TYPES,
    assert_accurate,
    assert_sums_to_zero,
    assert_within_an_ulp,
    battery,
    truth,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FLOAT32 = 1e-5
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # Overflow and NaN are as on a GPU, where nothing warns of them.
    pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning"),
]


KERNELS = ("one tile", "tiles", "row")


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run both kernels at any number of classes, with several blocks and with few programs."""
    monkeypatch.setattr(launch, "FEW", 16384 if request.param == "one tile" else 0)
    monkeypatch.setattr(launch, "SKIPPING", 2)
    if request.param == "row":
        monkeypatch.setattr(launch, "LONGEST_TILE", 0)
        monkeypatch.setattr(launch, "ROW_BLOCK", 64)
    if request.param == "tiles" and eq5.INTERPRETED:  # as in other releases of Triton
        pieces = layout._PIECES.value
        monkeypatch.setattr(layout, "_PIECES", type(layout._PIECES)(1 - pieces))
    chosen: str = request.param
    return chosen


both_kernels = pytest.mark.usefixtures("kernel")


def by_kernel(input: Tensor, target: Tensor, k: float | Tensor = 1.0, **settings: Any) -> Tensor:
    return tunable_cross_entropy(input, target, k=k, implementation="triton", **settings)


def leaf_of(logits: Tensor) -> Tensor:
    return logits.detach().clone().to(DEVICE).requires_grad_()


def value_and_gradient(
    logits: Tensor, *args: Any, upstream: float | Tensor = 1.0, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    def there(argument: Any) -> Any:
        return argument.to(DEVICE) if isinstance(argument, Tensor) else argument

    leaf = leaf_of(logits)
    value = by_kernel(leaf, *map(there, args), **{key: there(a) for key, a in kwargs.items()})
    (gradient,) = torch.autograd.grad(
        value, leaf, torch.as_tensor(upstream).to(value).expand_as(value)
    )
    return value.detach().cpu(), gradient.cpu()


@pytest.mark.parametrize("classes", [2, 3, 10, 100, 1000])
def test_battery(kernel: str, classes: int) -> None:
    rows, value, gradient = truth(torch.float32, classes)
    if kernel == "row" and DEVICE == "cpu":
        kept = slice(0, 21 if classes < 100 else 7)  # all kinds of rows
        rows, value, gradient = type(rows)(*(t[kept] for t in rows)), value[kept], gradient[kept]
    computed, f = value_and_gradient(*rows, reduction="none")
    assert_accurate(computed, value, FLOAT32)
    _, at_once = value_and_gradient(*rows, reduction="sum")
    for result in (f, at_once):
        assert_accurate(result, gradient, FLOAT32)
        assert_sums_to_zero(result)


def test_one_k_for_all(kernel: str, subtests: pytest.Subtests) -> None:
    """Some values of k have specialized code."""
    count = 7 if kernel == "row" and DEVICE == "cpu" else 14
    rows = battery(torch.float32, classes=20, count=count, seed=1)
    for k in (1 / 64, 0.5, 1, 2, 3.3, 64):
        value, gradient = reference.loss(rows.logits, rows.label, k, reduction="sum")
        for sensitivity in (k, torch.tensor(float(k))) if kernel == "one tile" else (k,):
            for reduction in ("sum", "none"):
                with subtests.test(k=sensitivity, reduction=reduction):
                    computed, f = value_and_gradient(
                        rows.logits, rows.label, sensitivity, reduction=reduction
                    )
                    total = computed.double().sum().item()
                    assert total == pytest.approx(value.item(), rel=FLOAT32)
                    assert_accurate(f, gradient, FLOAT32)


@pytest.mark.parametrize("classes", [3, 10, 300])
def test_where_errors_count_most(classes: int) -> None:
    """At even odds, k = 64 multiplies the error of log(1 - p_y), a sum of many terms."""
    generator = torch.Generator().manual_seed(classes)
    count = min(1000, 60_000 // classes) if DEVICE == "cpu" else 3_000_000 // classes
    logits = torch.randn(count, classes, generator=generator)
    logits = logits * 3 * torch.rand(count, 1, generator=generator)
    logits = logits + 10 * torch.randn(count, 1, generator=generator)
    logits[:, 0] = logits[:, 1:].logsumexp(-1) + torch.randn(count, generator=generator)
    label, k = torch.zeros(count, dtype=torch.long), torch.full((count,), 64.0)
    in_float64 = tunable(logits.double(), label, k.double())
    _, f = value_and_gradient(logits, label, k, reduction="sum")
    assert_accurate(f, in_float64, FLOAT32)


@covering(dtype=HALF_TYPES, classes=[10, 200], kernel=KERNELS)
def test_half_types_are_float32_rounded_once(kernel: str, dtype: torch.dtype, classes: int) -> None:
    """For any upstream gradient: the pseudo-gradient is not rounded before the product."""
    count = 7 if kernel == "row" else 21 if DEVICE == "cpu" else 100
    logits, label, k = battery(torch.float32, classes, count, seed=3)
    logits = logits.clamp(max=torch.finfo(dtype).max).to(dtype)
    in_float64 = tunable(logits.double(), label, k.double())
    for upstream, reduction in ((1.0, "sum"), (1.75, "sum"), (1.75, "none")):
        value, f = value_and_gradient(logits, label, k, reduction=reduction, upstream=upstream)
        assert value.dtype == dtype
        assert_within_an_ulp(f, (in_float64 * upstream).to(dtype))


CLASSES = 21
HALVES = (slice(0, 2), slice(2, None))


@functools.cache
def case(weighted: bool, ignored: str) -> tuple[Tensor, Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(7)
    logits = 2 * torch.randn(5, CLASSES, generator=generator)
    target = torch.tensor([20, 0, 8, 3, 17])
    weight = torch.rand(CLASSES, generator=generator) + 0.1 if weighted else None
    if ignored == "all":
        target = torch.full_like(target, -100)
    elif ignored == "some":
        target[1::2] = -100
        logits[1] = math.nan
    return logits, target, weight


@functools.cache
def true_case(
    reduction: str, weighted: bool, smoothing: float, ignored: str, k: float | str
) -> tuple[Tensor, Tensor]:
    logits, target, weight = case(weighted, ignored)
    return reference.loss(logits, target, sensitivity(k), weight, -100, reduction, smoothing)


def sensitivity(k: float | str) -> float | Tensor:
    return torch.linspace(0.25, 4, 5) if isinstance(k, str) else k


@covering(
    reduction=("mean", "none"),
    weighted=(False, True),
    smoothing=(0.0, 0.2),
    ignored=("none", "some", "all"),
    kernel=KERNELS,
)
@both_kernels
def test_the_contract(reduction: str, weighted: bool, smoothing: float, ignored: str) -> None:
    logits, target, weight = case(weighted, ignored)
    for k in (1.0, "per example"):
        true, true_gradient = true_case(reduction, weighted, smoothing, ignored, k)
        value, f = value_and_gradient(
            logits, target, sensitivity(k), weight=weight, reduction=reduction,
            label_smoothing=smoothing, upstream=1.5,
        )  # fmt: skip
        # With label smoothing, the rule depends on a difference of float32 numbers.
        tolerance = FLOAT32 if smoothing == 0 else 1e-4
        torch.testing.assert_close(value.double(), true, rtol=FLOAT32, atol=1e-6, equal_nan=True)
        torch.testing.assert_close(
            f.double(), 1.5 * true_gradient, rtol=tolerance, atol=tolerance / 100
        )


@covering(
    smoothing=[0.2, 1.0],
    weight=["zero for the label", "zero but for the label", "zero"],
    kernel=KERNELS,
)
@both_kernels
def test_edge_cases_of_weight_and_smoothing(weight: str, smoothing: float) -> None:
    logits, target, _ = case(False, "none")
    target = torch.full_like(target, 8)
    weights = torch.zeros(CLASSES) if weight != "zero for the label" else torch.ones(CLASSES)
    weights[8] = {"zero for the label": 0.0, "zero but for the label": 2.0, "zero": 0.0}[weight]
    for k in (1.0, 0.5):
        settings: dict[str, Any] = {"reduction": "sum", "label_smoothing": smoothing}
        leaf = logits.double().requires_grad_()
        true = tunable_cross_entropy(leaf, target, k=k, weight=weights.double(), **settings)
        (true_gradient,) = torch.autograd.grad(true, leaf)
        value, f = value_and_gradient(logits, target, k, weight=weights, **settings)
        torch.testing.assert_close(value.double(), true.detach(), rtol=FLOAT32, atol=1e-6)
        torch.testing.assert_close(f.double(), true_gradient, rtol=1e-4, atol=1e-6)


# Probabilities: row 1 is one-hot, row 2 has two classes, row 3 does not sum to 1.
PROBABILITIES = torch.zeros(5, CLASSES)
PROBABILITIES[0, 3] = 1
PROBABILITIES[1, 4:6] = torch.tensor([0.3, 0.7])
PROBABILITIES[2:] = torch.linspace(-3, 3, 3 * CLASSES).sin().reshape(3, CLASSES).mul(3).softmax(-1)
PROBABILITIES[2] *= 2


@functools.cache
def true_probabilities(
    reduction: str, weighted: bool, smoothing: float, k: float | str
) -> tuple[Tensor, Tensor]:
    logits, _, weight = case(weighted, "none")
    return reference.loss(logits, PROBABILITIES, sensitivity(k), weight, -100, reduction, smoothing)


@covering(
    reduction=["mean", "sum", "none"], weighted=[False, True], smoothing=[0.0, 0.2], kernel=KERNELS
)
@both_kernels
def test_probabilities(reduction: str, weighted: bool, smoothing: float) -> None:
    logits, _, weight = case(weighted, "none")
    for k in (1.0, 0.5, 2.0, "per example"):
        true, true_gradient = true_probabilities(reduction, weighted, smoothing, k)
        value, f = value_and_gradient(
            logits, PROBABILITIES, sensitivity(k), weight=weight, reduction=reduction,
            label_smoothing=smoothing, upstream=1.5,
        )  # fmt: skip
        torch.testing.assert_close(value.double(), true, rtol=FLOAT32, atol=1e-6)
        torch.testing.assert_close(f.double(), 1.5 * true_gradient, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(f.double().sum(-1), torch.zeros(5).double(), rtol=0, atol=1e-6)


@covering(
    of_logits=[torch.half, torch.float32], of_target=[torch.half, torch.float32], kernel=KERNELS
)
@both_kernels
def test_probabilities_of_another_dtype(of_logits: torch.dtype, of_target: torch.dtype) -> None:
    logits, target = case(False, "none")[0].to(of_logits), PROBABILITIES.to(of_target)
    expected_dtype = F.cross_entropy(logits, target).dtype
    true, gradient = reference.loss(logits, target, 0.5, reduction="sum")
    value, f = value_and_gradient(logits, target, 0.5, reduction="sum")
    assert value.dtype == expected_dtype
    assert f.dtype == of_logits
    torch.testing.assert_close(value.double(), true, rtol=2**-10, atol=0)
    torch.testing.assert_close(f.double(), gradient, rtol=2**-10, atol=1e-6)


@pytest.mark.parametrize("shape", [(CLASSES,), (2, CLASSES, 2), (2, CLASSES, 0)])
@both_kernels
def test_probabilities_of_any_shape(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    logits, target = (torch.randn(shape, generator=generator) for _ in range(2))
    target = target.softmax(1 if len(shape) > 1 else 0)
    for reduction in ("mean", "none"):
        leaf = logits.double().requires_grad_()
        true = tunable_cross_entropy(leaf, target.double(), k=0.5, reduction=reduction)
        (gradient,) = torch.autograd.grad(true.sum(), leaf)
        value, f = value_and_gradient(logits, target, 0.5, reduction=reduction)
        torch.testing.assert_close(value.double(), true.detach(), equal_nan=True)
        torch.testing.assert_close(f.double(), gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("layout", ["rows apart by an element", "transposed", "expanded"])
@both_kernels
def test_layout_of_probabilities(layout: str) -> None:
    logits = case(False, "none")[0][:3]
    target = LAYOUTS[layout](PROBABILITIES[2:])
    _, f = value_and_gradient(logits, target, 0.5, reduction="sum")
    _, expected = value_and_gradient(logits, target.contiguous(), 0.5, reduction="sum")
    assert torch.equal(f, expected)


@both_kernels
def test_one_hot_probabilities_are_labels(subtests: pytest.Subtests) -> None:
    """Even where the probability of the right class rounds to 1."""
    logits = torch.tensor([[0.0, 30.0, 2.0], [0.0, -30.0, 2.0], [50.0, 90.0, -math.inf]])
    label = torch.tensor([1, 1, 1])
    for k in (0.5, 1.0, 2.0, 3.0):
        with subtests.test(k=k):
            value, f = value_and_gradient(logits, label, k, reduction="sum")
            soft, soft_f = value_and_gradient(
                logits, F.one_hot(label, 3).float(), k, reduction="sum"
            )
            torch.testing.assert_close(soft, value, rtol=FLOAT32, atol=1e-6)
            # At k = 1 it is the difference p - q, as in PyTorch's cross-entropy.
            torch.testing.assert_close(soft_f, f, rtol=1e-4, atol=1e-7 if k == 1 else 1e-25)


@both_kernels
def test_one_hot_probabilities_below_all_float32(subtests: pytest.Subtests) -> None:
    """A probability may underflow float32 while its powers do not; powers of 0 are 0."""
    label = torch.tensor([1, 1, 1, 1])
    logits = torch.tensor(
        [[0.0, 30.0, 2.0], [0.0, 100.0, 2.0], [0.0, 200.0, 2.0], [-1e3, 1e3, -1e4]]
    )
    for k in (0.003, 0.1, 0.3, 1.5):
        with subtests.test(k=k):
            _, f = value_and_gradient(logits, label, k, reduction="sum")
            _, soft_f = value_and_gradient(logits, F.one_hot(label, 3).float(), k, reduction="sum")
            torch.testing.assert_close(soft_f, f, rtol=1e-4, atol=1e-25)
            _, alone = value_and_gradient(torch.zeros(2, 1), torch.ones(2, 1), k, reduction="sum")
            assert (alone == 0).all()


@both_kernels
def test_all_but_one_hot_probabilities(subtests: pytest.Subtests) -> None:
    """In float32 the largest equals the sum, though other biases are below zero too."""
    logits, target = torch.full((2, 40), -26.0), torch.full((2, 40), 5e-10)
    logits[0, :2], logits[1, :4] = torch.zeros(2), torch.tensor([4.0, -25.0, 0.0, -1.0])
    target[0, :2], target[1] = torch.tensor([1.0, 0.0]), 0
    target[1, :2] = torch.tensor([1.0, 2.9e-8])
    for k in (0.4, 0.5, 2.0, 3.0):
        with subtests.test(k=k):
            _, true = reference.loss(logits, target, k, reduction="sum")
            _, f = value_and_gradient(logits, target, k, reduction="sum")
            largest = true.abs().amax(1, keepdim=True)
            assert ((f.double() - true).abs() <= 1e-5 * largest).all()


@both_kernels
def test_nan_probabilities_give_nan() -> None:
    logits, target = torch.zeros(3, 20), torch.full((3, 20), 0.05)
    logits[0, 7] = target[1, 19] = math.nan
    for k in (0.5, 1.0, 3.0):
        value, f = value_and_gradient(logits, target, k, reduction="none")
        assert value[:2].isnan().all(), k
        assert f[:2].isnan().any(-1).all(), k
        assert value[2].isfinite(), k
        assert f[2].isfinite().all(), k


@pytest.mark.parametrize("implementation", ["triton", "torch"])
@both_kernels
def test_rows_without_a_target_have_no_gradient(implementation: str) -> None:
    """Such a row may hold anything: this is a way to leave out a row."""
    logits, target = torch.randn(3, 20), torch.zeros(3, 20)
    logits[1, 3], logits[2] = math.nan, -math.inf
    for k in (0.5, 1.0, 3.0):
        leaf = leaf_of(logits)
        value = tunable_cross_entropy(
            leaf, target.to(DEVICE), k=k, reduction="none", implementation=implementation
        )
        value.sum().backward()
        assert leaf.grad is not None
        assert not value.any()
        assert not leaf.grad.any()


@both_kernels
def test_rows_with_a_tiny_target() -> None:
    target = torch.tensor([[1e-39, 1e-40, 0.0], [1e-30, 0.0, 0.0]])
    for k in (0.5, 1.0, 3.0):
        _, f = value_and_gradient(torch.zeros(2, 3), target, k, reduction="sum")
        torch.testing.assert_close(f[0], torch.zeros(3), rtol=0, atol=1e-38)
        assert f[1].isfinite().all()
        assert f[1, 0] < 0


@pytest.mark.parametrize("implementation", ["triton", "torch"])
@both_kernels
def test_no_mean_of_smoothed_labels_without_weight(implementation: str) -> None:
    leaf, target = leaf_of(torch.zeros(2, 3)), torch.zeros(2, dtype=torch.long, device=DEVICE)
    weight = torch.tensor([0.0, 1.0, 1.0], device=DEVICE)
    for k in (0.5, 1.0, 3.0):
        value = tunable_cross_entropy(
            leaf, target, k=k, weight=weight, label_smoothing=0.1, implementation=implementation
        )
        (f,) = torch.autograd.grad(value, leaf)
        assert value.isnan()
        assert not f.any()
        layer = torch.eye(3, device=DEVICE)
        whole = tunable_linear_cross_entropy(
            leaf, layer, target, k=k, class_weight=weight, label_smoothing=0.1,
            implementation=implementation,
        )  # fmt: skip
        (f,) = torch.autograd.grad(whole, leaf)
        assert whole.isnan()
        assert not f.any()


def test_fake_tensors_are_not_cached() -> None:
    logits, target, _ = case(False, "none")
    scaled = ScaledBefore()
    with FakeTensorMode(), contextlib.suppress(Exception):  # fake tensors have no values
        zeros = torch.zeros(2, 3, requires_grad=True)
        by_kernel(zeros, torch.zeros(2, dtype=torch.long), k=0.5, _scaled=scaled)
    _, f = value_and_gradient(logits, target, 0.5, reduction="sum", _scaled=scaled)
    torch.testing.assert_close(f.double(), expected_of(logits, target), rtol=FLOAT32, atol=1e-7)


SOFT: dict[str, dict[str, Any]] = {
    "labels": {},
    "smoothed": {"label_smoothing": 0.1},
    "probabilities": {"target": PROBABILITIES},
}


@pytest.mark.parametrize("kind", SOFT)
def test_when_a_gradient_is_computed_makes_no_difference(kernel: str, kind: str) -> None:
    """In the forward pass or, if the loss was scaled before, in the backward pass."""
    logits, target, weight = case(True, "some")
    settings = {"weight": weight, "target": target, **SOFT[kind]}
    settings_of_a_step = ((0.5, 1.75), (1.0, 1.0), (2.0, 1.75), (3.0, 1.0))
    for k, upstream in settings_of_a_step[:: 3 if kernel == "row" and DEVICE == "cpu" else 1]:
        results = []
        results.append(value_and_gradient(logits, k=k, upstream=upstream, **settings))
        for before in (False, True):
            scaled = ScaledBefore()
            scaled.flag().fill_(before)
            results.append(
                value_and_gradient(logits, k=k, upstream=upstream, _scaled=scaled, **settings)
            )
            always_left = kernel == "row" and kind != "labels"
            told = before if always_left else upstream != 1
            assert bool(scaled.flag()) == told, "for the next step"
        for at_once, *others in zip(*results, strict=True):
            for other in others:
                torch.testing.assert_close(other, at_once, rtol=0, atol=0, equal_nan=True)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Record whether each launch computes gradients."""
    launches: list[bool] = []

    def recorded(rows: Any, values: Any, out: Any, **settings: Any) -> None:
        launches.append(out is not None)
        launch.launch(rows, values, out, **settings)

    monkeypatch.setattr(operators, "launch", recorded)
    return launches


def step(loss: Any, upstream: float = 1.0, **settings: Any) -> None:
    logits, target, _ = case(False, "none")
    leaf = leaf_of(logits)
    (upstream * loss(leaf, target.to(DEVICE))).backward(**settings)


def test_no_unused_gradient_is_computed(computed: list[bool]) -> None:
    """A module whose loss is scaled computes it in the backward pass from the second step on."""
    loss = TunableCrossEntropyLoss(k=0.5, implementation="triton")
    for upstream in (1.0, 3.0, 3.0, 1.0, 1.0):
        step(loss, upstream)
    assert computed == [True, True, True, True, False, True, False, True, True, True]
    with mock.patch("torch.are_deterministic_algorithms_enabled", return_value=True):
        loss._scaled.flag().fill_(1)
        del computed[:]
        step(loss, 3.0)
        assert computed == [True, True], "as without the flag"
    loss._scaled.flag().zero_()
    # A retained graph says nothing about the next step.
    step(loss, 3.0, retain_graph=True)
    assert not loss._scaled.flag()


def test_a_scaled_loss_changes_no_other(computed: list[bool]) -> None:
    scaled, other = (TunableCrossEntropyLoss(k=0.5, implementation="triton") for _ in range(2))
    for _ in range(2):
        step(scaled, 3.0)
    del computed[:]
    step(other)
    step(by_kernel, 3.0)
    step(by_kernel, 3.0)
    step(copy.deepcopy(scaled))
    step(pickle.loads(pickle.dumps(scaled)))
    assert computed == [True] * 10
    step(scaled)
    assert computed[10:] == [False, True]
    assert not scaled.state_dict()


@covering(scaled=[False, True], smoothing=[0.0, 0.1], upstream=[1.0, 2.0])
def test_a_gradient_is_computed_again_only_if_scaled(
    kernel: str, upstream: float, smoothing: float, scaled: bool
) -> None:
    logits, target, _ = case(False, "none")
    rows = launch.rows_of_loss(logits.to(DEVICE), target.to(DEVICE), 0.5, smoothing=smoothing)
    out, grad = torch.full_like(rows.z, 7.0), torch.tensor(upstream, device=DEVICE)
    flag = ScaledBefore().flag() if scaled else None
    launch.launch(rows, None, out, grad=grad, scaled=flag, skip=True)
    left = upstream == 1 and not operators.always_left(rows)
    assert bool((out == 7).all()) == left


def test_checkpoints() -> None:
    """A recomputation must save the same tensors, even if losses in between were scaled."""
    logits, target, _ = case(False, "none")
    leaf = leaf_of(logits)
    loss = partial(checkpoint, by_kernel, use_reentrant=False)
    for _ in range(2):
        leaf.grad = None
        first, second = (loss(leaf[part], target[part].to(DEVICE), 0.5) for part in HALVES)
        (3 * (first + second)).backward()
    expected = torch.cat(
        [value_and_gradient(logits[part], target[part], 0.5, upstream=3.0)[1] for part in HALVES]
    )
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad.cpu(), expected, rtol=0, atol=0)


def expected_of(logits: Tensor, target: Tensor, k: float = 0.5) -> Tensor:
    return tunable(logits.double(), target, k)


# The interpreter truncates bfloat16 where GPUs round, so use float16, of the same size.
@pytest.mark.parametrize("dtype", [torch.float32, torch.half])
@both_kernels
def test_any_number_of_classes(dtype: torch.dtype, subtests: pytest.Subtests) -> None:
    """With whole vectors, and with remainders before and after them."""
    rtol = FLOAT32 if dtype == torch.float32 else 2**-10
    for classes in (1, 2, 3, 7, 8, 9, 15, 16, 17, 23, 64, 65, 130):
        with subtests.test(classes=classes):
            generator = torch.Generator().manual_seed(classes)
            logits = torch.randn(3, classes, generator=generator).to(dtype)
            target = torch.tensor([0, classes - 1, classes // 2])
            value, f = value_and_gradient(logits, target, 0.5, reduction="sum")
            expected = expected_of(logits, target)
            torch.testing.assert_close(f.double(), expected, rtol=rtol, atol=1e-7)
            true = F.cross_entropy(logits.double(), target, reduction="sum")
            torch.testing.assert_close(value.double(), true, rtol=rtol, atol=1e-6)


LAYOUTS = {
    "rows apart by a vector": lambda z: F.pad(z, (0, 8))[:, :-8],
    "rows apart by an element": lambda z: F.pad(z, (0, 1))[:, :-1],
    "beginning off a vector": lambda z: F.pad(z.flatten(), (1, 0))[1:].view_as(z),
    "rows apart and off": lambda z: F.pad(z, (3, 5))[:, 3:-5],
    "transposed": lambda z: z.t().contiguous().t(),
    "expanded": lambda z: z[:1].expand_as(z),
}


@pytest.mark.parametrize("classes", [24, 29])
@both_kernels
def test_layout_makes_no_difference(classes: int, subtests: pytest.Subtests) -> None:
    generator = torch.Generator().manual_seed(classes)
    z = torch.randn(3, classes, generator=generator).to(DEVICE, torch.half)
    target = torch.tensor([0, classes - 1, 9], device=DEVICE)
    for name, laid_out in LAYOUTS.items():
        with subtests.test(name):
            leaf = laid_out(z).detach().requires_grad_()
            (f,) = torch.autograd.grad(by_kernel(leaf, target, k=0.5, reduction="sum"), leaf)
            expected = expected_of(leaf.detach(), target)
            torch.testing.assert_close(f.double(), expected, rtol=2**-10, atol=1e-7)


def test_more_dimensions() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 4, 3, 2, generator=generator)
    target = torch.randint(4, (2, 3, 2), generator=generator)
    k = torch.linspace(0.5, 2, 12).reshape(2, 3, 2)
    for reduction in ("mean", "none"):
        value, f = value_and_gradient(logits, target, k, reduction=reduction)
        true, gradient = reference.loss(logits, target, k, reduction=reduction)
        torch.testing.assert_close(value.double(), true, rtol=FLOAT32, atol=0)
        torch.testing.assert_close(f.double(), gradient, rtol=FLOAT32, atol=1e-9)


@pytest.mark.parametrize("classes", [8193, 32000])
def test_many_classes(classes: int) -> None:
    """Even odds at a large k, which multiplies the rounding error of a long sum's logarithm."""
    logits = torch.zeros(1, classes)
    logits[0, 5] = math.log(classes - 1)
    value, f = value_and_gradient(logits, torch.tensor([5]), 60.0)
    # The logarithm of the other classes' number is rounded to float32, so odds are nearly even:
    odds = math.exp(float(logits[0, 5])) / (classes - 1)
    doubt = 1 / (1 + odds)
    assert value.item() == pytest.approx(-math.log1p(-doubt), rel=FLOAT32)
    assert f[0, 5].item() == pytest.approx(-(doubt**60), rel=FLOAT32)
    assert f[0, 6].item() == pytest.approx(doubt**60 / (classes - 1), rel=FLOAT32)


@both_kernels
@pytest.mark.parametrize(("classes", "d", "z_y"), [(100, -3.559382, 1.242732), (1000, -6.5, 0.9)])
def test_equal_logits(classes: int, d: float, z_y: float) -> None:
    """Their exponentials share a rounding error, which adds up and is multiplied by k."""
    logits = torch.full((1, classes), d)
    logits[0, :2] = torch.tensor([z_y, 0.0])
    _, f = value_and_gradient(logits, torch.tensor([0]), 64.0, reduction="sum")
    expected = tunable(logits.double(), torch.tensor([0]), 64.0)
    # The interpreter does not fuse multiply-adds as a GPU does.
    allowed = FLOAT32 if DEVICE == "cuda" else 2 * FLOAT32
    torch.testing.assert_close(f.double(), expected, rtol=allowed, atol=1e-25)


@both_kernels
@covering(
    upstream=[math.inf, math.nan],
    smoothing=[0.0, 0.1],
    reduction=["mean", "none"],
    dtype=[torch.float32, torch.bfloat16],
    kernel=KERNELS,
)
def test_ignored_rows_for_any_upstream_gradient(
    upstream: float, smoothing: float, reduction: str, dtype: torch.dtype
) -> None:
    """As in a step of GradScaler that overflows."""
    logits, target = torch.randn(2, 5).to(dtype), torch.tensor([0, -100])
    _, f = value_and_gradient(
        logits, target, 0.5, reduction=reduction, label_smoothing=smoothing, upstream=upstream
    )
    assert (f[1] == 0).all()
    assert not f[0].isfinite().any()


@both_kernels
@covering(reduction=["mean", "none"], dtype=[torch.float32, torch.bfloat16], kernel=KERNELS)
def test_rows_with_zero_upstream_gradient_may_hold_nan(reduction: str, dtype: torch.dtype) -> None:
    """They may also have invalid labels, since they do not affect training."""
    logits, target = torch.zeros(3, 5).to(dtype), torch.tensor([0, 7, 2])
    logits[2] = math.nan
    value = by_kernel(leaf := leaf_of(logits), target.to(DEVICE), k=0.5, reduction=reduction)
    value.backward(torch.zeros_like(value))
    assert leaf.grad is not None
    assert (leaf.grad == 0).all()


@both_kernels
def test_the_least_and_the_greatest_k() -> None:
    logits = torch.tensor([[1.0, 0.5, -math.inf, 2.0]]).repeat(2, 1)
    ks = torch.tensor([LEAST_K, GREATEST_K], dtype=torch.float64)
    _, f = value_and_gradient(logits, torch.tensor([0, 0]), ks, reduction="sum")
    torch.testing.assert_close(f, torch.tensor([[-1.0, 0.5, 0.0, 0.5], [0.0] * 4]))


@both_kernels
def test_an_invalid_k_gives_nan() -> None:
    """On a GPU, an error would need a sync."""
    leaf = leaf_of(torch.tensor([[1.0, 0.5, 2.0]]).repeat(5, 1))
    ks = torch.tensor([-1.0, 0.0, math.inf, math.nan, 1.0]).to(DEVICE)
    target = torch.zeros(5, dtype=torch.long, device=DEVICE)
    value = operators.fused_cross_entropy(leaf, target, ks, None, -100, "sum", 0.0, torch.float32)
    value.backward()
    assert leaf.grad is not None
    assert leaf.grad[:4].isnan().all()
    assert leaf.grad[4].isfinite().all()


@both_kernels
@covering(k=[1.0, 3.0], dtype=[torch.float32, *HALF_TYPES], kernel=KERNELS)
def test_undefined_losses_are_nan(dtype: torch.dtype, k: float) -> None:
    """As in PyTorch, so that divergence is noticed."""
    inf = math.inf
    logits = torch.tensor(
        [[inf, 1, 2], [-inf, -inf, -inf], [1, inf, 2], [1, -inf, -inf], [-inf, 1, 2],
         [-inf, -inf, torch.finfo(torch.float32).min]], dtype=torch.float32,
    ).to(dtype)  # fmt: skip
    target = torch.zeros(6, dtype=torch.long)
    value, f = value_and_gradient(logits, target, k, reduction="none")
    unknown = F.cross_entropy(logits, target, reduction="none").isnan()
    assert unknown[:5].tolist() == [True, True, True, False, False]
    assert (value.isnan() == unknown).all()
    assert (f.isnan().all(1) == unknown).all()
    assert value[3:5].tolist() == [0, inf]


@both_kernels
def test_equal_logits_of_a_large_k() -> None:
    """Their rounding errors are equal, add up, and are multiplied by k."""
    d = -torch.linspace(0, 12, 97).unsqueeze(1)
    logits = d.repeat(1, 33)
    logits[:, 1] = 0
    logits[:, 0] = logits[:, 1:].logsumexp(1) + 0.7 * d[:, 0] / 12
    target = torch.zeros(len(d), dtype=torch.long)
    _, f = value_and_gradient(logits, target, 64.0, reduction="sum")
    true = tunable(logits.double(), target, 64.0)
    seen = true.abs() > 1e-20
    assert ((f - true).abs() <= FLOAT32 / 2 * true.abs())[seen].all()


@both_kernels
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_batched_upstream_gradients_of_one_graph(reduction: str) -> None:
    logits, target, _ = case(False, "none")
    leaf = leaf_of(logits)
    value = by_kernel(leaf, target.to(DEVICE), k=0.5, reduction=reduction)
    upstream = torch.stack([torch.ones_like(value), 3 * torch.ones_like(value)])
    (both,) = torch.autograd.grad(value, leaf, upstream, is_grads_batched=True)
    _, f = value_and_gradient(logits, target, 0.5, reduction=reduction)
    torch.testing.assert_close(both, torch.stack([f, 3 * f]).to(both))


def test_compiled_code_finds_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """With "auto" on a (simulated) GPU, the graph has no break."""
    monkeypatch.setattr(functional, "_is_for_kernels", lambda input: True)
    monkeypatch.setattr(functional, "is_usual_in_graph", lambda *call: False)  # for CPUs only
    logits, target, _ = case(False, "none")
    logits, target = logits.to(DEVICE), target.to(DEVICE)
    program = torch.export.export(Loss("auto"), (logits, target))
    assert ", kernels, smoothing 0.0)" in str(program.graph)
    torch.compiler.reset()
    leaf = leaf_of(logits)
    torch.compile(tunable_cross_entropy, fullgraph=True, backend="aot_eager")(
        leaf, target, k=0.5
    ).backward()
    torch.testing.assert_close(leaf.grad, value_and_gradient(logits, target, 0.5)[1].to(leaf))


def test_without_a_working_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a compiler, or on an old GPU, the loss warns and falls back to PyTorch operations."""

    def broken(*arguments: Any) -> None:
        raise RuntimeError("no C compiler found")

    monkeypatch.setattr(launch, "rescale", broken)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(plans, "exist_for", lambda device: False)
    monkeypatch.setattr(torch, "ones", lambda size, device: torch.full((size,), 1.0))
    monkeypatch.setattr(functional, "_is_for_kernels", lambda input: True)
    functional.kernels_run.cache_clear()
    logits, target, _ = case(False, "none")
    with pytest.warns(UserWarning, match="slower .no C compiler found"):
        way = functional.chosen_route(logits, target, "auto")
    functional.kernels_run.cache_clear()
    assert way != "triton"


@both_kernels
def test_row_strides_beyond_32_bits() -> None:
    """The memory is reserved but hardly touched."""
    far = torch.empty(2**31 + 40, dtype=torch.half, device=DEVICE)
    logits = far.as_strided((2, 40), (2**31, 1))
    logits.copy_(torch.randn(2, 40, generator=torch.Generator().manual_seed(0)))
    target = torch.tensor([3, 39], device=DEVICE)
    leaf = logits.detach().requires_grad_()
    (f,) = torch.autograd.grad(by_kernel(leaf, target, k=0.5, reduction="sum"), leaf)
    torch.testing.assert_close(f.double(), expected_of(logits, target), rtol=2**-10, atol=1e-7)


class TestCorners:
    @pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
    @both_kernels
    def test_empty(self, reduction: str) -> None:
        logits, target = torch.zeros(0, 30), torch.zeros(0, dtype=torch.long)
        value, f = value_and_gradient(logits, target, 0.5, reduction=reduction)
        expected = F.cross_entropy(logits, target, reduction=reduction)
        torch.testing.assert_close(value, expected, equal_nan=True)
        assert f.shape == (0, 30)

    @pytest.mark.parametrize("k", [0.5, 1.0, 3.0])
    @both_kernels
    def test_masked_classes(self, k: float) -> None:
        masks = ([1], [1, 2], [0], [0, 1], [1, 2, 3])
        logits = torch.tensor([[1.0, 0.5, -1.0, 2.0]] * len(masks))
        for row, masked in zip(logits, masks, strict=True):
            row[masked] = -math.inf
        target = torch.zeros(len(masks), dtype=torch.long)
        value, f = value_and_gradient(logits, target, k, reduction="none")
        true, gradient = reference.loss(logits, target, k, reduction="none")
        torch.testing.assert_close(value.double(), true, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(f.double(), gradient, rtol=1e-6, atol=1e-7)

    @covering(
        dtype=[torch.float32, *HALF_TYPES], smoothing=[0.0, 0.1], k=[0.5, 1.0, 64.0], kernel=KERNELS
    )
    def test_extreme_logits(
        self, kernel: str, dtype: torch.dtype, smoothing: float, k: float
    ) -> None:
        corners = list(itertools.product((-1, 0, 1), repeat=3))[:: 1 if kernel == "one tile" else 4]
        logits = torch.tensor(corners, dtype=dtype) * torch.finfo(dtype).max
        target = torch.zeros(len(logits), dtype=torch.long)
        value, f = value_and_gradient(
            logits, target, k, reduction="none", label_smoothing=smoothing
        )
        assert f.isfinite().all()
        assert not value.isnan().any()
        assert f.double().sum(-1).abs().max() <= 4 * torch.finfo(dtype).eps

    @pytest.mark.parametrize("smoothing", [0.0, 0.1])
    @both_kernels
    def test_nan_is_not_hidden(self, smoothing: float) -> None:
        logits, target = torch.zeros(4, 20), torch.tensor([0, 0, 0, 0])
        logits[0, 0] = logits[1, 7] = logits[2, 19] = math.nan
        for k in (0.5, 1.0):
            value, f = value_and_gradient(
                logits, target, k, reduction="none", label_smoothing=smoothing
            )
            assert value[:3].isnan().all()
            assert f[:3].isnan().any(-1).all()
            assert not value[3].isnan()
            assert f[3].isfinite().all()

    @pytest.mark.parametrize("smoothing", [0.0, 0.1])
    @both_kernels
    def test_values_of_strange_logits_are_pytorchs(self, smoothing: float) -> None:
        inf, nan, most = math.inf, math.nan, torch.finfo(torch.float32).max
        logits = torch.tensor(
            [
                [inf, 1, 2], [1, inf, 2], [-inf, 1, 2], [-inf, nan, 1], [-inf, inf, 1],
                [-inf, -inf, -inf], [5e36, 5e36, 5e36], [-5e36, 5e36, 0],
            ]
        )  # fmt: skip
        alone = torch.tensor([[1.0, -inf, -inf], [-most, -inf, -inf]])
        masked = torch.tensor([[-most, 0, 0], [0, -most, -most], [-most, -inf, most]])
        logits = torch.cat((logits, masked))
        logits = logits if smoothing else torch.cat((logits, alone))
        target = torch.zeros(len(logits), dtype=torch.long)
        settings: dict[str, Any] = {"reduction": "none", "label_smoothing": smoothing}
        value, f = value_and_gradient(logits, target, 0.5, **settings)
        expected = F.cross_entropy(logits.double(), target, **settings)
        torch.testing.assert_close(value, expected.float(), rtol=1e-6, atol=1e-6, equal_nan=True)
        assert torch.equal(f.isnan().any(1), expected.isnan())

    @pytest.mark.parametrize("smoothing", [0.0, 0.1])
    @both_kernels
    def test_invalid_labels_give_nan(self, smoothing: float) -> None:
        """Raising an error would need a sync; nothing out of bounds is read."""
        logits = torch.zeros(4, 20)
        target = torch.tensor([20, -1, 2**40, 19])
        value, f = value_and_gradient(
            logits, target, 0.5, reduction="none", label_smoothing=smoothing
        )
        assert value[:3].isnan().all()
        assert f[:3].isnan().all()
        assert value[3].isfinite()
        assert value_and_gradient(logits, target, 0.5)[0].isnan()

    @both_kernels
    def test_huge_k(self) -> None:
        """Equal logits get equal shares, and lower ones nothing."""
        logits, target = torch.tensor([[0.0, 1.0, 1.0, -1.0]]), torch.tensor([0])
        for k in (GREATEST_K, torch.tensor([GREATEST_K])):
            _, f = value_and_gradient(logits, target, k)
            assert f.isfinite().all()
            assert f[0, 3] == 0
            assert f[0, 1] == f[0, 2]


@pytest.mark.parametrize("label_type", [torch.uint8, torch.int16, torch.int32])
def test_integer_labels_of_any_type(label_type: torch.dtype) -> None:
    logits, target = torch.arange(600.0).sin().reshape(3, 200), torch.tensor([156, 0, 1])
    computed = value_and_gradient(logits, target.to(label_type), 0.5)
    for a, b in zip(computed, value_and_gradient(logits, target, 0.5), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@both_kernels
def test_inputs_are_never_written_to(smoothing: float) -> None:
    logits, target, weight = case(True, "some")
    k = torch.linspace(0.25, 4, 5)
    inputs = [
        tensor.clone().to(DEVICE) for tensor in (logits, target, k, weight) if tensor is not None
    ]
    before = [tensor.clone() for tensor in inputs]
    leaf = inputs[0].detach().requires_grad_()  # the same memory
    value = by_kernel(leaf, inputs[1], inputs[2], weight=inputs[3], label_smoothing=smoothing)
    value.backward(torch.tensor(0.5, device=DEVICE))
    for tensor, original in zip(inputs, before, strict=True):
        torch.testing.assert_close(tensor, original, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@both_kernels
def test_backward_again_and_again(smoothing: float) -> None:
    """The gradient of the forward pass is handed over only if it cannot be requested again."""
    logits, target, _ = case(False, "none")
    leaf = leaf_of(logits)
    value = by_kernel(leaf, target.to(DEVICE), k=0.5, label_smoothing=smoothing)
    one = torch.ones_like(value)
    first, second, third = (
        torch.autograd.grad(value, leaf, scale * one, retain_graph=keep)[0]
        for scale, keep in ((1, True), (3, True), (1, False))
    )
    assert first.data_ptr() != third.data_ptr()
    assert torch.equal(first, third)
    torch.testing.assert_close(second, 3 * first, rtol=1e-6, atol=0)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(value, leaf)


def test_the_gradient_is_not_copied() -> None:
    """A leaf takes it over, so training holds one buffer of the size of the logits."""
    logits, target, _ = case(False, "none")
    leaf = leaf_of(logits)
    value = by_kernel(leaf, target.to(DEVICE), k=0.5)
    saved = value.grad_fn.saved_tensors  # type: ignore[union-attr]
    (_, kept) = (t.data_ptr() for t in saved if t is not None and t.shape == leaf.shape)
    del saved  # otherwise autograd would see another reference to it
    value.backward()
    assert leaf.grad is not None
    assert leaf.grad.data_ptr() == kept


@both_kernels
def test_in_place_changes_of_logits_are_detected() -> None:
    logits, target, _ = case(False, "none")
    z = leaf_of(logits) * 1
    value = by_kernel(z, target.to(DEVICE), k=0.5)
    with torch.no_grad():
        z.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()


def test_without_gradients() -> None:
    logits, target, _ = case(False, "none")
    leaf = leaf_of(logits)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            value = by_kernel(leaf, target.to(DEVICE), k=0.5)
        assert not value.requires_grad
        torch.testing.assert_close(value.cpu(), F.cross_entropy(logits, target))


def test_autocast() -> None:
    """Half types in, float32 out, and no copy of the logits in float32."""
    logits, target, _ = case(False, "none")
    leaf = leaf_of(logits.bfloat16())
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        value = by_kernel(leaf, target.to(DEVICE), k=0.5)
    assert value.dtype == torch.float32
    value.backward()
    true, gradient = reference.loss(logits.bfloat16(), target, 0.5)
    torch.testing.assert_close(value.detach().cpu().double(), true, rtol=FLOAT32, atol=0)
    assert leaf.grad is not None
    assert_within_an_ulp(leaf.grad.cpu(), gradient.bfloat16())


def test_runs_do_not_differ() -> None:
    logits = torch.randn(40, 300, generator=torch.Generator().manual_seed(0))
    target = torch.arange(40)
    first, second = (value_and_gradient(logits, target, 0.7) for _ in range(2))
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


def there(loss: Any) -> Any:
    """Move the routes' CPU tensors to the device and the loss back."""
    if DEVICE == "cpu":
        return loss
    return lambda *args: loss(*(a.cuda() if isinstance(a, Tensor) else a for a in args)).cpu()


by_kernel_summed = there(partial(by_kernel, reduction="sum"))


@covering(1, route=transforms.DIRECT, k=transforms.K)
def test_transforms(route: str, k: str) -> None:
    logits, target = transforms.examples()
    gradient = transforms.DIRECT[route](by_kernel_summed, (target, transforms.K[k]), logits)
    transforms.assert_right(gradient, logits, target, transforms.K[k])


@pytest.mark.parametrize("route", transforms.COMPILED)
def test_transforms_compiled(route: str) -> None:
    logits, target = transforms.examples()
    gradient = transforms.COMPILED[route](by_kernel_summed, (target, 0.5), logits, "aot_eager")
    transforms.assert_right(gradient, logits, target, 0.5)


@pytest.mark.parametrize("route", ["eager", "vmap(grad)", "jacrev(vmap)", "compile(vmap)"])
def test_transforms_of_long_rows(route: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long rows save statistics for the backward pass."""
    monkeypatch.setattr(launch, "LONGEST_TILE", 0)
    logits, target = transforms.examples()
    k = transforms.K["k per example"]
    given = (by_kernel_summed, (target, k), logits)
    if route in transforms.DIRECT:
        gradient = transforms.DIRECT[route](*given)
    else:
        gradient = transforms.COMPILED[route](*given, "aot_eager")
    transforms.assert_right(gradient, logits, target, k)


@covering(
    1,
    route=[*transforms.DIRECT, *transforms.COMPILED],
    kind=["smoothed", "smoothed and weighted", "probabilities"],
)
def test_soft_targets_in_transforms(route: str, kind: str) -> None:
    """Graphs and torch.func use kernels for them, too."""
    logits, target = transforms.examples()
    settings: dict[str, Any] = {"reduction": "sum"}
    if kind == "probabilities":
        target = logits.flip(0).softmax(-1)
    else:
        settings["label_smoothing"] = 0.1
    if kind == "smoothed and weighted":
        settings["weight"] = torch.linspace(0.5, 2, logits.shape[1])
    on_device = {key: a.to(DEVICE) if isinstance(a, Tensor) else a for key, a in settings.items()}
    loss = there(partial(by_kernel, **on_device))
    if route in transforms.DIRECT:
        gradient = transforms.DIRECT[route](loss, (target, 0.5), logits)
    else:
        gradient = transforms.COMPILED[route](loss, (target, 0.5), logits, "aot_eager")
    _, true = reference.loss(logits, target, 0.5, **settings)
    torch.testing.assert_close(gradient.double(), true, rtol=1e-4, atol=1e-5)


@covering(smoothing=[0.0, 0.1], weighted=[False, True], probabilities=[False, True])
def test_operators_in_a_compiled_graph(
    smoothing: float, weighted: bool, probabilities: bool
) -> None:
    logits, target, _ = case(False, "none")
    target = PROBABILITIES if probabilities else target
    weight = torch.linspace(0.5, 2, CLASSES, device=DEVICE) if weighted else None
    found: list[str] = []

    def keep(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        found.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    torch.compiler.reset()
    loss = partial(by_kernel, k=0.5, label_smoothing=smoothing, weight=weight)
    step = torch.compile(loss, fullgraph=True, backend=aot_autograd(fw_compiler=keep))
    leaf = leaf_of(logits)
    step(leaf, target.to(DEVICE)).backward()
    # With weights, the loss is composed of per-row operators; otherwise it is one operator.
    operators = ("value_of_rows", "gradient_of_rows") if weighted else ("loss_on_gpu",)
    for operator in operators:
        assert any(f"pseudograd.{operator}" in name for name in found)
    true = reference.loss(
        logits, target, 0.5, None if weight is None else weight.cpu(), label_smoothing=smoothing
    )
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad.cpu().double(), true[1], rtol=1e-4, atol=1e-6)


def test_two_graphs_serve_every_k() -> None:
    transforms.assert_two_graphs_serve_every_k(by_kernel_summed)


@covering(1, dtype=[torch.float32, torch.bfloat16], classes=[CLASSES, 9001], smoothing=[0.0, 0.1])
def test_ignored_rows_may_hold_anything_in_graphs(
    classes: int, smoothing: float, dtype: torch.dtype
) -> None:
    logits = torch.zeros(7, classes, dtype=dtype)
    logits[1:5] = torch.nan  # in rows that start at every offset within a vector
    logits[5, 0], logits[6, 1:] = torch.inf, -torch.inf
    target = torch.tensor([0, *[-100] * 6])
    loss = there(partial(by_kernel, reduction="sum", label_smoothing=smoothing))
    ks = torch.tensor([0.7, *[math.nan] * 6])
    for k in (0.5, 1.0, 2.0, 3.0, ks):
        step = transforms.compiled(loss, "aot_eager")
        gradient = transforms.differentiate(step, logits, target, k)
        assert torch.isfinite(gradient).all()
        assert (gradient[0] != 0).all()
        assert (gradient[1:] == 0).all()


def test_compiled_for_any_number_of_rows() -> None:
    def summed(logits: Tensor, target: Tensor) -> Any:
        return by_kernel_summed(logits, target, 0.5)

    torch.compiler.reset()
    step = torch.compile(summed, fullgraph=True, dynamic=True, backend="aot_eager")
    for count in (4, 7, 9):
        logits, target = transforms.examples(count)
        gradient = transforms.differentiate(step, logits, target)
        transforms.assert_right(gradient, logits, target, 0.5)


class Loss(nn.Module):
    def __init__(self, implementation: str) -> None:
        super().__init__()
        self.loss = partial(tunable_cross_entropy, k=0.5, implementation=implementation)

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return self.loss(logits, target)


@pytest.mark.parametrize("classes", [10, 9000])
def test_a_graph_for_any_number_of_classes(classes: int) -> None:
    """Some numbers of classes save statistics for the backward pass, others do not."""
    rows, of_classes = torch.export.Dim("rows", max=100), torch.export.Dim("classes", max=10**5)
    target = torch.tensor([0, 3, 9], device=DEVICE)
    program = torch.export.export(
        Loss("triton"),
        (torch.zeros(3, classes, device=DEVICE), target),
        dynamic_shapes=({0: rows, 1: of_classes}, {0: rows}),
    )
    for count in (10, 9500):
        logits = torch.linspace(-2, 2, 3 * count).reshape(3, count)
        leaf = leaf_of(logits)
        program.module()(leaf, target).backward()
        expected = tunable(logits.double(), target.cpu(), 0.5) / 3
        assert leaf.grad is not None
        torch.testing.assert_close(leaf.grad.cpu().double(), expected, rtol=1e-5, atol=1e-9)


def test_export() -> None:
    """The exported graph has the kernels and the rule."""
    logits, target, _ = case(False, "none")
    logits, target = logits.to(DEVICE), target.to(DEVICE)
    program = torch.export.export(Loss("triton"), (logits, target))
    assert ", kernels, smoothing 0.0)" in str(program.graph)
    leaf = leaf_of(logits)
    value = program.module()(leaf, target)
    torch.testing.assert_close(value, F.cross_entropy(leaf, target))
    value.backward()
    torch.testing.assert_close(leaf.grad, value_and_gradient(logits, target, 0.5)[1].to(leaf))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")
@pytest.mark.parametrize("implementation", ["auto", "torch", "triton"])
@pytest.mark.parametrize("form", ["logits", "linear"])
def test_traced(form: str, implementation: str) -> None:
    """By `torch.jit.trace`; the rule also holds on inputs that it was not traced with."""
    logits, target, _ = case(False, "none")
    eye = torch.eye(CLASSES).to(DEVICE)

    def loss(z: Tensor, target: Tensor) -> Tensor:
        if form == "linear":
            return tunable_linear_cross_entropy(
                z, eye, target, k=0.5, implementation=implementation
            )
        return tunable_cross_entropy(z, target, k=0.5, implementation=implementation)

    given = (logits.to(DEVICE), target.to(DEVICE))
    traced = torch.jit.trace(loss, given)
    other = logits.flip(1)
    leaf = leaf_of(other)
    traced(leaf, given[1]).backward()
    true, gradient = reference.loss(other, target, 0.5)
    assert leaf.grad is not None
    torch.testing.assert_close(traced(leaf, given[1]).cpu().double(), true, rtol=1e-5, atol=0)
    torch.testing.assert_close(leaf.grad.cpu().double(), gradient, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize(
    ("operator", "others"),
    [
        ("value_of_rows", (0.5, None, 0.0)),
        ("value_of_rows", (0.5, None, 0.1)),
        ("gradient_of_rows", (0.5, None, None, torch.ones(5, 3), 0.0)),
        ("gradient_of_rows", (0.5, None, torch.linspace(0, 1, 5), torch.ones(5, 3), 0.1)),
        ("statistics_of_part", (0.5, None)),
    ],
)
def test_operators_keep_their_promises(operator: str, others: tuple[Any, ...]) -> None:
    logits, target, _ = case(False, "none")
    targets = (target,) if operator == "statistics_of_part" else (target, PROBABILITIES)
    for target_of_call in targets:
        given = (logits, target_of_call, *others)
        torch.library.opcheck(
            getattr(operators, operator),
            tuple(a.to(DEVICE) if isinstance(a, Tensor) else a for a in given),
            test_utils=("test_schema", "test_faketensor"),
        )


SECOND = [way for way in transforms.SECOND_DERIVATIVES if way != "gradgradcheck"]


@pytest.mark.parametrize("way", SECOND)
def test_second_derivatives_are_refused(way: str) -> None:
    logits, target = transforms.examples()
    with pytest.raises(RuntimeError, match=r"pseudograd: a (second|forward-mode) derivative"):
        transforms.SECOND_DERIVATIVES[way](lambda z: by_kernel_summed(z, target, 0.5), logits)
    apart = logits.T.contiguous()  # its classes must first be made contiguous
    _, together = value_and_gradient(logits, target, 0.5, upstream=3.0)
    leaf = apart.to(DEVICE).requires_grad_()
    (3 * by_kernel(leaf.T, target.to(DEVICE), k=0.5)).backward()
    assert leaf.grad is not None
    assert torch.equal(leaf.grad.T.cpu(), together)
    with pytest.raises(RuntimeError, match=r"pseudograd: a (second|forward-mode) derivative"):
        transforms.SECOND_DERIVATIVES[way](lambda z: by_kernel_summed(z.T, target, 0.5), apart)


class TestChoice:
    def test_bad_arguments_are_refused(self) -> None:
        logits, target = torch.zeros(2, 3, device=DEVICE), torch.tensor([0, 1], device=DEVICE)
        with pytest.raises(ValueError, match=r"implementation must be 'auto', 'triton' or 'torch'"):
            tunable_cross_entropy(logits, target, implementation="cuda")
        with pytest.raises(ValueError, match=r"'triton' has no kernel for torch\.float64"):
            by_kernel(logits.double(), target)
        with pytest.raises(ValueError, match=r"'triton' has no kernel for torch\.float64"):
            by_kernel(logits, logits.double().softmax(-1))

    def test_without_a_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(eq5, "INTERPRETED", False)
        with pytest.raises(ValueError, match="needs logits on a CUDA device, not on cpu"):
            by_kernel(torch.zeros(2, 3), torch.tensor([0, 1]))

    def test_implementation_torch_avoids_the_kernels(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: Any) -> None:
            raise AssertionError

        monkeypatch.setattr("pseudograd.loss.cpu._run", fail)
        logits = torch.tensor([[1.0, 2.0]], requires_grad=True)
        tunable_cross_entropy(logits, torch.tensor([0]), k=0.5, implementation="torch").backward()
        assert logits.grad is not None


def test_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    """To machine code for an H100 or H200, even without one: a stronger check than interpreting."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path),
    }
    script = Path(__file__).parent / "compile_kernels.py"
    subprocess.run([sys.executable, str(script)], check=True, timeout=300, env=environment)
