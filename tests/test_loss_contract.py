"""The contract of `torch.nn.functional.cross_entropy`, with all settings combined and with k."""

from __future__ import annotations

import copy
import functools
import itertools
import math
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

import reference
from covering import PATHS, covering
from covering import rows as covering_rows
from kernels import needs_kernels
from pseudograd import RuleCrossEntropyLoss, TunableCrossEntropyLoss, tunable_cross_entropy
from pseudograd import tunable_binary_cross_entropy_with_logits as tunable_bce
from pseudograd.loss import (
    TunableLinearCrossEntropyLoss,
    modules,
    rows,
    tunable_linear_cross_entropy,
)
from pseudograd.rules import cross_entropy, focal, from_bias, soft_tunable, tunable

CLASSES = 4
SHAPES = ((CLASSES,), (6, CLASSES), (3, CLASSES, 2), (2, CLASSES, 3, 2))
REDUCTIONS = ("mean", "sum", "none")
FULL_TYPES = (torch.float32, torch.float64)
HALF_TYPES = (torch.float16, torch.bfloat16)
ALL_TYPES = FULL_TYPES + HALF_TYPES

pytestmark = pytest.mark.usefixtures("one_thread")


class Case(NamedTuple):
    """One combination of cross-entropy's settings."""

    shape: tuple[int, ...]
    target: str  # "index" or "probability"
    weighted: bool
    label_smoothing: float
    ignored: str  # "none", "some", "all", or "class 1": a non-default ignore_index
    reduction: str

    def __str__(self) -> str:
        parts = [
            "x".join(map(str, self.shape)),
            self.target,
            "weighted" * self.weighted,
            f"smoothing={self.label_smoothing}" * bool(self.label_smoothing),
            f"ignored={self.ignored}" * (self.ignored != "none"),
            self.reduction,
        ]
        return "-".join(filter(None, parts))

    @property
    def ignore_index(self) -> int:
        return 1 if self.ignored == "class 1" else -100

    def inputs(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Return logits, target, and the other arguments of the loss."""
        generator = torch.Generator().manual_seed(len(str(self)))
        logits = (2 * torch.randn(self.shape, generator=generator)).to(dtype)
        weight = torch.tensor([0.25, 2.0, 1.0, 0.75], dtype=dtype) if self.weighted else None
        arguments = {
            "weight": weight,
            "ignore_index": self.ignore_index,
            "reduction": self.reduction,
            "label_smoothing": self.label_smoothing,
        }
        if self.target == "probability":
            class_dim = min(len(self.shape) - 1, 1)
            target = torch.randn(self.shape, generator=generator).softmax(class_dim).to(dtype)
            return logits, target, arguments
        target = torch.randint(CLASSES, example_shape(self.shape), generator=generator)
        if self.ignored == "all":
            target = torch.full_like(target, self.ignore_index)
        elif self.ignored == "some":
            target.view(-1)[::2] = self.ignore_index
        elif self.ignored == "class 1":
            target.view(-1)[-1] = 1
        return logits, target, arguments


def example_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:1], *shape[2:]) if len(shape) > 1 else ()


def cases(**others: Any) -> list[Any]:
    """Return cases in which any three settings, ``others`` included, occur in all combinations."""
    kinds = [("index", ignored) for ignored in ("none", "some", "all", "class 1")]
    factors = {
        "shape": SHAPES,
        "kind": [("probability", "none"), *kinds],
        "weighted": (False, True),
        "label_smoothing": (0.0, 0.2),
        "reduction": REDUCTIONS,
    }
    found = []
    for row in covering_rows(3, factors | others):
        shape, (target, ignored), weighted, smoothing, reduction, *rest = row
        case = Case(shape, target, weighted, smoothing, ignored, reduction)
        found.append(pytest.param(case, *rest, id="-".join(map(str, (case, *rest)))))
    return found


CASES = tuple(case.values[0] for case in cases())
both_paths = pytest.mark.usefixtures("path")


def cases_of(dtypes: tuple[torch.dtype, ...]) -> pytest.MarkDecorator:
    arguments = ("case", "dtype", "path")
    return pytest.mark.parametrize(arguments, cases(dtype=dtypes, path=PATHS), indirect=["path"])


def value_and_gradient(
    loss: Any, logits: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """Return the value and gradient; the upstream gradient differs between examples."""
    logits = logits.detach().clone().requires_grad_()
    value = loss(logits, *args, **kwargs)
    (gradient,) = torch.autograd.grad((value * upstream_of(value)).sum(), logits)
    return value.detach(), gradient


def upstream_of(value: Tensor) -> Tensor:
    return torch.linspace(1, 1.5, value.numel()).to(value.dtype).reshape(value.shape)


def upstream(shape: tuple[int, ...], reduction: str) -> Tensor:
    return upstream_of(torch.zeros(example_shape(shape) if reduction == "none" else ()))


def assert_same(computed: Tensor, expected: Tensor) -> None:
    """Equal to a few units in the last place of a probability; NaN where PyTorch has NaN."""
    eps = torch.finfo(expected.dtype).eps
    torch.testing.assert_close(computed, expected, rtol=20 * eps, atol=4 * eps, equal_nan=True)


def assert_within_an_ulp(computed: Tensor, in_float32: Tensor, dtype: torch.dtype) -> None:
    """Within an ULP of the float32 result, rounded once; PyTorch also rounds log p, so is worse."""
    expected = in_float32.to(dtype)
    assert computed.dtype == dtype
    ulp = torch.finfo(dtype).eps * expected.abs().clamp(min=torch.finfo(dtype).tiny).float()
    off = (computed.float() - expected.float()).abs()
    assert ((off <= ulp) | (computed.isnan() & expected.isnan())).all()


def assert_value_for_every_k(value: Tensor, logits: Tensor, target: Tensor, **given: Any) -> None:
    for k in (1 / 64, 0.5, 2.0, 64.0):
        at_k = tunable_cross_entropy(logits, target, k=k, **given)
        torch.testing.assert_close(at_k, value, rtol=0, atol=0, equal_nan=True)


@cases_of(FULL_TYPES)
@both_paths
def test_value_is_pytorchs_and_at_k_1_the_gradient(case: Case, dtype: torch.dtype) -> None:
    logits, target, arguments = case.inputs(dtype)
    value, gradient = value_and_gradient(tunable_cross_entropy, logits, target, **arguments)
    expected, expected_gradient = value_and_gradient(F.cross_entropy, logits, target, **arguments)
    assert_same(value, expected)
    assert_same(gradient, expected_gradient)
    assert_value_for_every_k(value, logits, target, **arguments)


@cases_of(HALF_TYPES)
@both_paths
def test_value_and_gradient_of_half_types(case: Case, dtype: torch.dtype) -> None:
    logits, target, arguments = case.inputs(dtype)
    value, gradient = value_and_gradient(tunable_cross_entropy, logits, target, **arguments)
    as_float: dict[str, Any] = {
        name: value.float() if isinstance(value, Tensor) else value
        for name, value in arguments.items()
    }
    probabilities = target.float() if target.is_floating_point() else target
    wide = logits.float().requires_grad_()
    expected = F.cross_entropy(wide, probabilities, **as_float)
    (expected_gradient,) = torch.autograd.grad((expected * upstream_of(value).float()).sum(), wide)
    assert_within_an_ulp(value, expected.detach(), dtype)
    assert_within_an_ulp(gradient, expected_gradient, dtype)
    assert_value_for_every_k(value, logits, target, **arguments)


def sensitivities(case: Case) -> tuple[float | Tensor, ...]:
    """Return two k for all examples, and one with a value per example."""
    shape = example_shape(case.shape)
    return 0.5, 3.0, torch.linspace(0.25, 4, math.prod(shape)).reshape(shape)


@functools.cache
def true_gradients(case: Case) -> list[Tensor]:
    logits, target, arguments = case.inputs(torch.float32)
    return [
        reference.loss(
            logits, target, k, upstream=upstream(case.shape, case.reduction), **arguments
        )[1]
        for k in sensitivities(case)
    ]


@cases_of(FULL_TYPES)
@both_paths
def test_gradient_is_the_rule(case: Case, dtype: torch.dtype) -> None:
    logits, target, arguments = case.inputs(dtype)
    plain = value_and_gradient(F.cross_entropy, logits, target, **arguments)[1]
    for k, true in zip(sensitivities(case), true_gradients(case), strict=True):
        gradient = value_and_gradient(tunable_cross_entropy, logits, target, k=k, **arguments)[1]
        tolerance = 1e-5 if dtype == torch.float32 else 1e-12
        torch.testing.assert_close(gradient.double(), true, rtol=tolerance, atol=tolerance / 100)
        if case.ignored != "all" and len(case.shape) > 1:
            assert not torch.allclose(gradient, plain, rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize(
    "settings_", [{"label_smoothing": 0.1}, {"weight": torch.linspace(0.3, 2, 50)}]
)
@pytest.mark.parametrize("target_kind", ["index", "probability"])
@both_paths
def test_small_biases_are_not_rounded_away(settings_: dict[str, Any], target_kind: str) -> None:
    """Where p is near q, the rule needs a small difference, so q must not be rounded to float32."""
    generator = torch.Generator().manual_seed(0)
    label = torch.randint(50, (40,), generator=generator)
    target: Tensor = label
    q = F.one_hot(label, 50).double()
    if target_kind == "probability":
        target = torch.randn(40, 50, generator=generator).softmax(-1)
        q = target.double()
    q = q * (1 - (smoothing := settings_.get("label_smoothing", 0.0))) + smoothing / 50
    if "weight" in settings_:
        q = q * settings_["weight"].double()
    logits = q.log().clamp(min=-20) + 1e-3 * torch.randn(q.shape, generator=generator)
    _, gradient = value_and_gradient(
        tunable_cross_entropy, logits.float(), target, k=0.5, reduction="sum", **settings_
    )
    true = soft_tunable(logits.float().double(), q, 0.5)
    torch.testing.assert_close(gradient.double(), true, rtol=1e-5, atol=1e-12)


@covering(
    label_smoothing=[0.0, 0.5, 1.0],
    weight=[None, (0.0, 1.0, 1.0, 1.0), (0.0, 0.0, 0.0, 0.0)],
    target_kind=["index", "probability"],
    dtype=FULL_TYPES,
    path=PATHS,
)
@both_paths
def test_edge_cases_of_weight_and_smoothing(
    dtype: torch.dtype, target_kind: str, weight: tuple[float, ...] | None, label_smoothing: float
) -> None:
    """Classes of weight 0, and uniform targets."""
    for reduction in REDUCTIONS:
        case = Case((6, CLASSES), target_kind, False, label_smoothing, "none", reduction)
        logits, target, arguments = case.inputs(dtype)
        if weight is not None:
            arguments["weight"] = torch.tensor(weight, dtype=dtype)
        given = (logits, target)
        value, gradient = value_and_gradient(tunable_cross_entropy, *given, **arguments)
        expected, expected_gradient = value_and_gradient(F.cross_entropy, *given, **arguments)
        assert_same(value, expected)
        if expected.isfinite().all():
            assert_same(gradient, expected_gradient)


@both_paths
def test_upstream_gradients_may_be_views() -> None:
    """The upstream gradient of a sum is one expanded number."""
    logits, target, _ = CASES[0]._replace(shape=(6, CLASSES), target="index").inputs(torch.float32)
    leaf = logits.requires_grad_()
    per_example = tunable_cross_entropy(leaf, target, k=0.5, reduction="none")
    (of_sum,) = torch.autograd.grad(per_example.sum(), leaf, retain_graph=True)
    (strided,) = torch.autograd.grad(per_example, leaf, torch.arange(12.0)[::2])
    (expected,) = torch.autograd.grad(
        tunable_cross_entropy(leaf, target, k=0.5, reduction="sum"), leaf
    )
    assert torch.equal(of_sum, expected)
    torch.testing.assert_close(strided, expected * torch.arange(0.0, 12.0, 2).unsqueeze(-1))


LAYOUTS = {
    "channels last": lambda z: z.to(memory_format=torch.channels_last),
    "transposed": lambda z: z.transpose(2, 3).contiguous().transpose(2, 3),
    "classes first": lambda z: z.movedim(1, 0).contiguous().movedim(0, 1),
    "every other": lambda z: torch.stack((z, z + 1), -1).flatten(3)[..., ::2],
    "expanded": lambda z: z[:1].expand_as(z),
}


@covering(
    layout=LAYOUTS,
    target_kind=["index", "probability"],
    k=[1.0, 0.5],
    dtype=[torch.float32, torch.bfloat16],
    path=PATHS,
)
@both_paths
def test_layout_makes_no_difference(
    layout: str, target_kind: str, k: float, dtype: torch.dtype
) -> None:
    case = Case((2, CLASSES, 3, 2), target_kind, True, 0.0, "none", "mean")
    logits, target, arguments = case.inputs(dtype)
    strided = LAYOUTS[layout](logits)
    assert not strided.is_contiguous()
    strided_target = LAYOUTS[layout](target) if target_kind == "probability" else target
    leaf = strided.detach().requires_grad_()
    value = tunable_cross_entropy(leaf, strided_target, k=k, **arguments)
    (gradient,) = torch.autograd.grad(value, leaf)
    expected = value_and_gradient(
        tunable_cross_entropy, strided.contiguous(), strided_target.contiguous(), k=k, **arguments
    )
    torch.testing.assert_close(value.detach(), expected[0], rtol=0, atol=0)
    torch.testing.assert_close(gradient, expected[1], rtol=0, atol=0)


@covering(
    shape=[(2, CLASSES, 3), (2, CLASSES, 3, 4), (2, CLASSES, 3, 4, 5)],
    dtype=[torch.float32, torch.bfloat16, torch.float64],
    target_kind=["index", "probability"],
    path=PATHS,
)
@both_paths
def test_gradients_have_the_layout_of_the_logits(
    target_kind: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    """Otherwise a convolution below would get a gradient in another memory format."""
    logits, target, arguments = Case(shape, target_kind, True, 0.1, "none", "mean").inputs(dtype)
    layouts = [logits]
    if logits.dim() == 4:
        layouts.append(logits.to(memory_format=torch.channels_last))
    for leaf in layouts:
        leaf = leaf.detach().requires_grad_()
        loss = tunable_cross_entropy(leaf, target, k=0.5, **arguments)
        (gradient,) = torch.autograd.grad(loss, leaf, retain_graph=True)
        assert gradient.stride() == leaf.stride()
        (again,) = torch.autograd.grad(loss * 2, leaf)
        assert torch.equal(again, 2 * gradient)
    with torch.no_grad():
        tunable_cross_entropy(leaf, target, k=0.5, **arguments)


@pytest.mark.parametrize("rows", [(6, CLASSES), (CLASSES, 6)])
@both_paths
def test_transposed_matrix_and_strided_labels(rows: tuple[int, int]) -> None:
    logits = torch.randn(rows, generator=torch.Generator().manual_seed(0)).t()
    target = torch.arange(2 * len(logits)).remainder(logits.shape[1])[::2]
    k = torch.linspace(0.5, 2, 2 * len(logits))[::2]
    _, gradient = value_and_gradient(tunable_cross_entropy, logits, target, k=k)
    _, expected = reference.loss(logits, target, k)
    torch.testing.assert_close(gradient.double(), expected, rtol=1e-5, atol=1e-8)


@covering(
    target_kind=["index", "probability"],
    reduction=REDUCTIONS,
    shape=[(0, CLASSES), (0, CLASSES, 3), (2, CLASSES, 0), (2, CLASSES, 5, 0), (0, 4, 2, 3, 2, 3)],
    k=["one", "per example"],
    path=PATHS,
)
@both_paths
def test_empty_batch(shape: tuple[int, ...], reduction: str, target_kind: str, k: str) -> None:
    # Cut out of a larger tensor, with strides that differ from a new tensor's.
    logits = torch.zeros([size + 1 for size in shape])[tuple(map(slice, shape))]
    target = (
        torch.zeros(shape)
        if target_kind == "probability"
        else torch.zeros(example_shape(shape), dtype=torch.long)
    )
    sensitivity = 0.5 if k == "one" else torch.full(example_shape(shape), 0.5)
    value, gradient = value_and_gradient(
        tunable_cross_entropy, logits, target, k=sensitivity, reduction=reduction
    )
    expected = F.cross_entropy(logits, target, reduction=reduction)
    torch.testing.assert_close(value, expected, equal_nan=True)
    assert gradient.shape == shape


@covering(
    target_kind=["index", "probability"],
    dtype=ALL_TYPES,
    weighted=[False, True],
    k=[1.0, 0.5],
    path=PATHS,
)
@both_paths
def test_autocast(dtype: torch.dtype, target_kind: str, weighted: bool, k: float) -> None:
    """What autocast does for cross-entropy: half types in, float32 out, gradient in half types."""
    case = Case((6, CLASSES), target_kind, weighted, 0.1, "none", "mean")
    logits, target, arguments = case.inputs(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value, gradient = value_and_gradient(
            tunable_cross_entropy, logits, target, k=k, **arguments
        )
        torch_value, torch_gradient = value_and_gradient(
            F.cross_entropy, logits, target, **arguments
        )
    assert value.dtype == torch_value.dtype
    assert gradient.dtype == torch_gradient.dtype == dtype
    eps = torch.finfo(torch_value.dtype).eps
    torch.testing.assert_close(value, torch_value, rtol=20 * eps, atol=0)
    _, expected = reference.loss(logits, target, k, upstream=upstream_of(value), **arguments)
    rtol = max(torch.finfo(dtype).eps, 1e-6)
    torch.testing.assert_close(gradient.double(), expected, rtol=rtol, atol=1e-9)


@both_paths
def test_autocast_around_a_layer() -> None:
    """A bfloat16 layer feeds the loss; parameters get float32 gradients."""
    layer, x, y = nn.Linear(5, CLASSES), torch.ones(3, 5), torch.tensor([0, 1, 2])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = layer(x)
        loss = tunable_cross_entropy(logits, y, k=0.5)
    assert logits.dtype == torch.bfloat16
    assert loss.dtype == torch.float32
    loss.backward()
    _, gradient = reference.loss(logits, y, 0.5)
    torch.testing.assert_close(
        layer.bias.grad, gradient.to(torch.bfloat16).sum(0).float(), rtol=1e-2, atol=1e-2
    )
    assert layer.bias.grad is not None
    assert layer.bias.grad.dtype == torch.float32


@both_paths
def test_probabilities_of_another_dtype_than_the_logits(subtests: pytest.Subtests) -> None:
    z, q = torch.tensor([[1.0, 0.0, -1.0]]), torch.tensor([[0.25, 0.25, 0.5]])
    for input_type, target_type in itertools.product(ALL_TYPES, repeat=2):
        with subtests.test(input_type=input_type, target_type=target_type):
            logits, target = z.to(input_type), q.to(target_type)
            value, gradient = value_and_gradient(tunable_cross_entropy, logits, target, k=0.5)
            assert value.dtype == F.cross_entropy(logits, target).dtype
            assert gradient.dtype == input_type
            expected = F.cross_entropy(logits.double(), target.double())
            rtol = 4 * torch.finfo(value.dtype).eps
            torch.testing.assert_close(value.double(), expected, rtol=rtol, atol=0)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@both_paths
def test_integer_labels_of_any_type(label_smoothing: float, subtests: pytest.Subtests) -> None:
    """PyTorch takes int64 and uint8 only. As uint8, -100 is 156, which must not be ignored."""
    logits, target = torch.arange(600.0).sin().reshape(3, 200), torch.tensor([156, 0, 1])
    for ignore_index in (-100, 1):
        loss = functools.partial(
            tunable_cross_entropy, k=0.5, label_smoothing=label_smoothing, ignore_index=ignore_index
        )
        expected = value_and_gradient(loss, logits, target)
        for dtype in (torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint64):
            with subtests.test(dtype=dtype, ignore_index=ignore_index):
                computed = value_and_gradient(loss, logits, target.to(dtype))
                assert all(map(torch.equal, computed, expected))


class TestNeverNanOrInfinity:
    """For finite logits of any size, for masked classes, for one class and for two."""

    @covering(
        logit=[
            (torch.float32, 1e4),
            (torch.float32, torch.finfo(torch.float32).max),
            (torch.float64, 1e4),
            (torch.float64, torch.finfo(torch.float64).max / 4),
            (torch.float16, torch.finfo(torch.float16).max),
            (torch.bfloat16, torch.finfo(torch.bfloat16).max),
        ],
        target_kind=["index", "smoothed", "probability"],
        path=PATHS,
    )
    @both_paths
    def test_extreme_logits(self, logit: tuple[torch.dtype, float], target_kind: str) -> None:
        dtype, size = logit
        logits = torch.tensor(list(itertools.product((-1, 0, 1), repeat=3)), dtype=dtype) * size
        target = torch.zeros(len(logits), dtype=torch.long)
        if target_kind == "probability":
            target = torch.tensor([[0.5, 0.5, 0.0]], dtype=dtype).expand(len(logits), -1)
        smoothing = 0.1 if target_kind == "smoothed" else 0.0
        arguments: dict[str, Any] = {"label_smoothing": smoothing, "reduction": "none"}
        probabilities = target.double() if target_kind == "probability" else target
        true = F.cross_entropy(logits.double(), probabilities, **arguments)
        for k in (1 / 64, 0.5, 1.0, 2.0, 64.0):
            value, gradient = value_and_gradient(
                tunable_cross_entropy, logits, target, k=k, **arguments
            )
            assert gradient.isfinite().all(), k
            assert not value.isnan().any(), k
            # A difference of two such logits can be beyond the dtype: then the value is infinite.
            assert (value.isfinite() | (true.abs() > torch.finfo(dtype).max)).all(), k
            assert gradient.double().sum(-1).abs().max() <= 4 * torch.finfo(dtype).eps, k

    @covering(dtype=ALL_TYPES, k=[0.5, 1.0, 2.0], path=PATHS)
    @both_paths
    def test_masked_classes(self, dtype: torch.dtype, k: float) -> None:
        """Masked by -inf; the label is class 0, whose loss is infinite if it is masked."""
        masks = ([1], [1, 2], [0], [0, 1], [1, 2, 3])
        logits = torch.tensor([[1.0, 0.5, -1.0, 2.0]] * len(masks), dtype=dtype)
        for row, masked in zip(logits, masks, strict=True):
            row[masked] = -math.inf
        given: dict[str, Any] = {"k": k, "reduction": "none"}
        target = torch.zeros(len(masks), dtype=torch.long)
        value, gradient = value_and_gradient(tunable_cross_entropy, logits, target, **given)
        true, true_gradient = reference.loss(logits, target, upstream=upstream_of(value), **given)
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(value.double(), true, rtol=8 * eps, atol=eps)
        torch.testing.assert_close(gradient.double(), true_gradient, rtol=8 * eps, atol=eps)
        assert (gradient[:, 1:][logits[:, 1:].isneginf()] == 0).all()

    @covering(dtype=ALL_TYPES, k=[0.5, 1.0, 2.0], path=PATHS)
    @both_paths
    def test_masked_classes_of_probabilities(self, dtype: torch.dtype, k: float) -> None:
        """0 · log 0 is 0, unlike in PyTorch's own loss."""
        logits = torch.tensor([[1.0, -math.inf, 0.0], [2.0, -math.inf, -math.inf]], dtype=dtype)
        target = torch.tensor([[0.25, 0.0, 0.75], [1.0, 0.0, 0.0]], dtype=dtype)
        value, gradient = value_and_gradient(tunable_cross_entropy, logits, target, k=k)
        true, true_gradient = reference.loss(logits, target, k)
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(value.double(), true, rtol=8 * eps, atol=eps)
        torch.testing.assert_close(gradient.double(), true_gradient, rtol=8 * eps, atol=eps)

    @covering(dtype=ALL_TYPES, target_kind=["index", "smoothed", "probability"], path=PATHS)
    @both_paths
    def test_one_class(self, dtype: torch.dtype, target_kind: str) -> None:
        logits = torch.tensor([[0.0], [-7.5], [1e4]], dtype=dtype)
        target = torch.zeros(3, dtype=torch.long)
        if target_kind == "probability":
            target = torch.ones(3, 1, dtype=dtype)
        smoothing = 0.1 if target_kind == "smoothed" else 0.0
        for k in (0.5, 1.0, 2.0):
            value, gradient = value_and_gradient(
                tunable_cross_entropy, logits, target, k=k, label_smoothing=smoothing
            )
            assert value == 0
            assert (gradient == 0).all()

    @covering(dtype=ALL_TYPES, k=[1 / 64, 0.5, 1.0, 2.0], path=PATHS)
    @both_paths
    def test_two_classes(self, dtype: torch.dtype, k: float) -> None:
        """f_y = -(1 - p_y)^k, for any k: the other class takes all of it."""
        gaps = torch.tensor([0.0, 1e-3, 20.0, 120.0, 1e4], dtype=dtype)
        gaps = torch.cat((gaps, -gaps))
        logits, target = torch.stack((gaps, 0 * gaps), 1), torch.zeros(10, dtype=torch.long)
        _, gradient = value_and_gradient(
            tunable_cross_entropy, logits, target, k=k, reduction="sum"
        )
        size = (-gaps.double()).sigmoid() ** k
        eps = torch.finfo(dtype).eps
        expected = torch.stack((-size, size), -1)
        torch.testing.assert_close(gradient.double(), expected, rtol=200 * eps, atol=eps**2)

    @both_paths
    def test_equal_logits_are_uniform(self) -> None:
        """Of any size: masking with the lowest finite number is common."""
        fills = torch.tensor([0.0, 1e30, -1e30, torch.finfo(torch.float32).min])
        logits, target = fills[:, None].repeat(1, 3), torch.tensor([0, 1, 2, 0])
        leaf = logits.requires_grad_()
        value = tunable_cross_entropy(leaf, target, k=0.5, reduction="none")
        (gradient,) = torch.autograd.grad(value.sum(), leaf)
        torch.testing.assert_close(value.detach(), torch.full((4,), math.log(3)))
        expected = math.sqrt(2 / 3) * (0.5 - 1.5 * F.one_hot(target, 3))
        torch.testing.assert_close(gradient, expected)

    @given(
        st.lists(
            st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=6
        ),
        st.integers(0, 5),
        st.floats(1 / 64, 64),
    )
    @settings(max_examples=300, deadline=None, derandomize=True)
    def test_any_finite_logits(self, logits: list[float], label: int, k: float) -> None:
        target = torch.tensor([label % len(logits)])
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            z = torch.tensor([logits], dtype=dtype).clamp(
                torch.finfo(dtype).min, torch.finfo(dtype).max
            )
            value, gradient = value_and_gradient(tunable_cross_entropy, z, target, k=k)
            assert not value.isnan()
            assert gradient.isfinite().all()
            assert tunable(z, target, k).isfinite().all()
            assert gradient.double().abs().max() <= 1

    @covering(dtype=ALL_TYPES, path=PATHS)
    @both_paths
    def test_nan_is_not_hidden(self, dtype: torch.dtype) -> None:
        """A diverged network must give NaN."""
        for at, others in itertools.product((0, 1, 2), (0.0, -math.inf)):
            logits, target = torch.full((2, 3), others, dtype=dtype), torch.tensor([0, 0])
            logits[:, 0], logits[0, at] = 1.0, math.nan
            value, gradient = value_and_gradient(
                tunable_cross_entropy, logits, target, k=0.5, reduction="none"
            )
            assert value[0].isnan()
            assert gradient[0].isnan().any()
            assert not value[1].isnan()


@covering(smoothing=[0.0, 0.1], dtype=ALL_TYPES, path=PATHS)
@both_paths
def test_undefined_losses_are_nan(dtype: torch.dtype, smoothing: float) -> None:
    """In the value and the gradient, exactly where cross-entropy's are."""
    inf, nan = math.inf, math.nan
    rows = (
        [inf, 1, 2], [-inf, -inf, -inf], [1, -inf, nan], [1, -inf, -nan], [1, inf, 2],
        [1, -inf, -inf], [-inf, 1, 2], [-inf, torch.finfo(dtype).min], [inf], [-inf], [1],
    )  # fmt: skip
    for row in rows:
        logits, target = torch.tensor([row], dtype=dtype), torch.tensor([0])
        settings: dict[str, Any] = {"label_smoothing": smoothing}
        ours = value_and_gradient(tunable_cross_entropy, logits, target, k=0.5, **settings)
        theirs = value_and_gradient(F.cross_entropy, logits, target, **settings)
        for our, their in zip(ours, theirs, strict=True):
            assert (our.isnan() == their.isnan()).all(), row


@pytest.mark.parametrize("kind", ["one-hot", "few", "many", "smoothed", "weighted"])
@both_paths
def test_soft_targets_against_50_digits(kind: str, subtests: pytest.Subtests) -> None:
    """With logits near and far apart."""
    generator = torch.Generator().manual_seed(0)
    label = torch.randint(5, (8,), generator=generator)
    one_hot, many = F.one_hot(label, 5).float(), torch.rand(8, 5, generator=generator)
    targets: dict[str, tuple[Tensor, dict[str, Any]]] = {
        "one-hot": (one_hot, {}),
        "few": (0.75 * one_hot + 0.25 * one_hot.roll(3, 1), {}),
        "many": (many / many.sum(1, keepdim=True), {}),
        "smoothed": (label, {"label_smoothing": 0.1}),
        "weighted": (label, {"label_smoothing": 0.1, "weight": torch.linspace(0.3, 2, 5)}),
    }
    target, settings = targets[kind]
    gaps = torch.tensor([0.01, 1.0, 10.0, 100.0]).repeat(2).unsqueeze(1)
    logits = gaps * torch.randn(8, 5, generator=generator)
    for k in (1 / 64, 0.3, 0.5, 1.0, 2.0, 3.0, 64.0):
        with subtests.test(k=k):
            true_value, true = reference.loss(logits, target, k, reduction="none", **settings)
            leaf = logits.clone().requires_grad_()
            value = tunable_cross_entropy(leaf, target, k=k, reduction="none", **settings)
            (gradient,) = torch.autograd.grad(value.sum(), leaf)
            torch.testing.assert_close(value.detach().double(), true_value, rtol=1e-5, atol=1e-15)
            torch.testing.assert_close(gradient.double(), true, rtol=1e-5, atol=1e-25)


@pytest.mark.parametrize("k", [1 / 64, 0.5, 1.0, 2.0, 3.0])
@both_paths
def test_one_hot_probabilities_are_labels(k: float) -> None:
    """Even if probabilities underflow float64 but their small powers do not."""
    label = torch.tensor([1, 1, 1, 1])
    logits = torch.tensor(
        [[0.0, 30.0, 2.0], [0.0, 400.0, 2.0], [0.0, 800.0, -20.0], [-1e3, 1e3, -1e4]]
    )
    expected = value_and_gradient(tunable_cross_entropy, logits, label, k=k, reduction="none")
    one_hot = F.one_hot(label, 3).float()
    found = value_and_gradient(tunable_cross_entropy, logits, one_hot, k=k, reduction="none")
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-15)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-5, atol=1e-25)


@both_paths
def test_equal_logits_of_many_classes() -> None:
    """Summing this many terms in float32 would fail the tolerance."""
    logits, target = torch.full((2, 40_000), -3.3), torch.tensor([0, 7])
    logits[:, 5] = 0
    _, gradient = value_and_gradient(tunable_cross_entropy, logits, target, k=0.5, reduction="sum")
    true = tunable(logits.double(), target, 0.5)
    torch.testing.assert_close(gradient.double(), true, rtol=1e-6, atol=0)


def test_meta_tensors() -> None:
    logits = torch.zeros(2, 3, device="meta", requires_grad=True)
    loss = tunable_cross_entropy(logits, torch.zeros(2, dtype=torch.long, device="meta"), k=0.5)
    loss.backward()
    assert loss.shape == ()
    assert logits.grad is not None
    assert logits.grad.is_meta


class Labels(torch.Tensor):
    """A tensor subclass, as some libraries define."""


def test_wrong_labels_in_a_tensor_subclass_are_refused() -> None:
    logits, target = torch.zeros(2, 3), torch.tensor([0, 3]).as_subclass(Labels)
    for loss in (tunable_cross_entropy, F.cross_entropy):
        with pytest.raises(IndexError, match=r"out of (range|bounds)"):
            loss(logits.as_subclass(Labels), target)
    with pytest.raises(IndexError, match="out of range"):
        tunable_linear_cross_entropy(torch.zeros(2, 4), torch.zeros(3, 4), target)


class Wrapper(torch.Tensor):
    """A tensor around another one, without memory of its own, as in distributed training."""

    content: Tensor

    @staticmethod
    def __new__(cls, content: Tensor) -> Any:
        wrapper: Any = torch.Tensor._make_wrapper_subclass(
            cls, content.shape, strides=content.stride(), dtype=content.dtype
        )
        wrapper.content = content
        return wrapper

    @classmethod  # PyTorch's stub lacks the function
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map_only(Wrapper, lambda wrapper: wrapper.content, (args, kwargs or {}))
        return func(*args, **kwargs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("loss", [tunable_cross_entropy, tunable_bce])
def test_wrapped_arguments(
    loss: Callable[..., Tensor], dtype: torch.dtype, subtests: pytest.Subtests
) -> None:
    """The kernels would read memory that does not exist."""
    logits = (2 * torch.eye(3, dtype=dtype)).requires_grad_()
    numbers = torch.tensor([0.5, 2, 3], dtype=dtype)
    arguments: dict[str, Any] = {"target": torch.tensor([2, 1, 0]), "weight": numbers, "k": numbers}
    if loss is tunable_bce:
        arguments |= {"target": torch.rand(3, 3, dtype=dtype), "pos_weight": numbers}
    value = loss(logits, reduction="none", **arguments)
    upstream = torch.rand_like(value)
    (expected,) = torch.autograd.grad(value, logits, upstream, retain_graph=True)
    for name, tensor in arguments.items():
        with subtests.test(name=name):
            wrapped = loss(logits, reduction="none", **{**arguments, name: Wrapper(tensor)})
            torch.testing.assert_close(wrapped, value)
            (found,) = torch.autograd.grad(wrapped, logits, upstream)
            torch.testing.assert_close(found, expected)
    (found,) = torch.autograd.grad(value, logits, Wrapper(upstream))
    torch.testing.assert_close(found, expected)


def test_fake_tensors() -> None:
    """Fake tensors, which memory planners use, have shapes but no values."""
    with FakeTensorMode():
        logits, target = torch.zeros(2, 3, requires_grad=True), torch.zeros(2, dtype=torch.long)
        weight, k = torch.zeros(5, 3), torch.ones(2)
        assert tunable_cross_entropy(logits, target, k=k).shape == ()
        tunable_linear_cross_entropy(logits, weight, target, k=k).backward()
        assert logits.grad is not None
        assert logits.grad.shape == (2, 3)


@pytest.mark.parametrize("arguments", [{}, {"weight": torch.ones(3)}, {"label_smoothing": 0.1}])
def test_a_wrong_label_that_needs_a_sync_to_check_gives_nan(arguments: dict[str, Any]) -> None:
    """Here because `grad` hides the values; on a GPU because reading them would synchronize."""

    def loss(logits: Tensor) -> Tensor:
        target = torch.tensor([0, 3, -100, -1])
        return tunable_cross_entropy(logits, target, k=0.5, reduction="sum", **arguments)

    gradient = torch.func.grad(loss)(torch.ones(4, 3))
    assert gradient.isnan().all(1).tolist() == [False, True, False, True]
    assert gradient[2].count_nonzero() == 0


def test_modules_pass_all_settings_on(monkeypatch: pytest.MonkeyPatch) -> None:
    criterion = TunableCrossEntropyLoss(k=0.5, label_smoothing=0.1, implementation="torch")
    assert repr(criterion) == (
        "TunableCrossEntropyLoss(k=0.5, reduction='mean', label_smoothing=0.1, "
        "implementation='torch')"
    )
    called: list[dict[str, Any]] = []
    for name in ("tunable_cross_entropy", "tunable_linear_cross_entropy"):
        monkeypatch.setattr(modules, name, lambda *_, **given: called.append(given))
    settings: dict[str, Any] = {"implementation": "torch", "process_group": "some ranks"}
    TunableCrossEntropyLoss(k=0.5, **settings)(*[torch.zeros(1)] * 2)
    of_linear = TunableLinearCrossEntropyLoss(k=0.5, chunk_rows=7, **settings)
    of_linear(*[torch.zeros(1)] * 3)
    assert all(given.items() >= settings.items() for given in called)
    assert called[1]["chunk_rows"] == 7
    assert "chunk_rows=7" in repr(of_linear)


def test_modules_refuse_what_functions_would() -> None:
    with pytest.raises(ValueError, match="implementation must be 'auto', 'triton' or 'torch'"):
        TunableCrossEntropyLoss(implementation="fast")
    with pytest.raises(ValueError, match="chunk_rows must be a whole number of 1 or more, not 'x'"):
        TunableLinearCrossEntropyLoss(chunk_rows="x")  # type: ignore[arg-type]


@covering(
    implementation=["auto", "torch"],
    dtype=[torch.float32, torch.float64],
    smoothing=[0.0, 0.1],
    path=PATHS,
)
@both_paths
def test_a_mean_with_zero_total_weight_has_gradient_0(
    implementation: str, dtype: torch.dtype, smoothing: float
) -> None:
    """If all weights are 0, the mean is NaN, as in PyTorch, and its gradient is 0."""
    logits = torch.tensor([[1.0, 2.0, 0.0], [0.0, 1.0, 3.0]], dtype=dtype, requires_grad=True)
    value = tunable_cross_entropy(
        logits, torch.tensor([0, 0]), k=0.5, weight=torch.tensor([0.0, 1.0, 1.0], dtype=dtype),
        label_smoothing=smoothing, implementation=implementation,
    )  # fmt: skip
    value.backward()
    assert value.isnan()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    assert smoothing or not logits.grad.any()


@both_paths
def test_ignored_examples_may_hold_anything() -> None:
    logits = torch.tensor([[1.0, 2.0], [math.nan, math.inf], [-math.inf, -math.inf]])
    for k in (1.0, 0.5):
        for smoothing in (0.0, 0.1):
            value, gradient = value_and_gradient(
                tunable_cross_entropy, logits, torch.tensor([0, -100, -100]), k=k,
                label_smoothing=smoothing,
            )  # fmt: skip
            alone, alone_gradient = value_and_gradient(
                tunable_cross_entropy, logits[:1], torch.tensor([0]), k=k, label_smoothing=smoothing
            )
            torch.testing.assert_close(value, alone)
            torch.testing.assert_close(gradient[:1], alone_gradient)
            assert (gradient[1:] == 0).all()


@pytest.mark.parametrize("form", ["logits", "linear"])
@both_paths
def test_examples_with_zero_upstream_gradient_may_hold_nan(form: str) -> None:
    """As when values are multiplied by a mask: masked ones have the gradient 0."""
    logits = torch.tensor([[1.0, 2.0], [math.nan, 1.0], [math.inf, 0.0]], requires_grad=True)
    target, mask = torch.tensor([0, 0, 0]), torch.tensor([1.0, 0.0, 0.0])
    if form == "linear":
        value = tunable_linear_cross_entropy(logits, torch.eye(2), target, k=0.5, reduction="none")
    else:
        value = tunable_cross_entropy(logits, target, k=0.5, reduction="none")
    (gradient,) = torch.autograd.grad(value, logits, mask)
    assert gradient[0].count_nonzero() == 2
    assert (gradient[1:] == 0).all()


@covering(label_smoothing=[0.0, 0.1], reduction=REDUCTIONS, path=PATHS)
@both_paths
def test_ignored_examples_get_no_gradient_for_any_upstream_gradient(
    reduction: str, label_smoothing: float
) -> None:
    """As from a loss whose scaling overflowed; the other examples show it."""
    settings: dict[str, Any] = {"reduction": reduction, "label_smoothing": label_smoothing}
    for dtype, (ignore_index, grad_output) in itertools.product(
        (torch.float32, torch.bfloat16), ((-100, math.inf), (-1, -math.inf), (10**9, math.nan))
    ):
        target = torch.tensor([0, ignore_index, 2, ignore_index])
        generator = torch.Generator().manual_seed(0)
        logits = torch.randn(4, 5, generator=generator).to(dtype).requires_grad_()
        value = tunable_cross_entropy(logits, target, k=0.5, ignore_index=ignore_index, **settings)
        (gradient,) = torch.autograd.grad(value, logits, torch.full_like(value, grad_output))
        assert (gradient[[1, 3]] == 0).all()
        assert not gradient[[0, 2]].isfinite().any()


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_labels_modified_through_numpy_are_checked(label_smoothing: float) -> None:
    """PyTorch cannot detect it, and the kernel must not write beyond the row."""
    needs_kernels()
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.randn(4, 5, dtype=dtype, requires_grad=True)
        target = torch.zeros(4, dtype=torch.long)
        value = tunable_cross_entropy(logits, target, k=0.5, label_smoothing=label_smoothing)
        target.numpy()[1:] = (10**9, -1, 5)
        if dtype == torch.float32:  # the gradient was computed in forward
            value.backward()
            assert logits.grad is not None
            assert logits.grad.isfinite().all()
        else:
            with pytest.raises(IndexError, match="class index 1000000000, which is out of range"):
                value.backward()


@pytest.mark.parametrize("k", [1e17, 3e18, 1e25])
@both_paths
def test_a_large_k_leaves_signs_and_sizes_alone(k: float) -> None:
    """Logarithms that differ only in their last digit are multiplied by k."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(200, 7, generator=generator)
    logits[:, 5:] = -2000.0
    target = torch.tensor([0, 0, 0, 0, 0, 0.3, 0.7]).expand(200, 7)
    _, gradient = value_and_gradient(tunable_cross_entropy, logits, target, k=k, reduction="sum")
    assert (gradient[:, :5] >= 0).all()
    assert (gradient[:, 5:] <= 0).all()
    assert (gradient.abs() <= 1).all()


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@both_paths
def test_large_inputs_use_several_threads(label_smoothing: float) -> None:
    """Each thread has its own rows, sums, and wrong labels to report."""
    torch.set_num_threads(3)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2001, 41, generator=generator)
    target = torch.randint(41, (2001,), generator=generator)
    target[5::7] = -100
    k = torch.rand(2001, generator=generator) + 0.5
    loss = functools.partial(tunable_cross_entropy, k=k, label_smoothing=label_smoothing)
    value, gradient = value_and_gradient(loss, logits, target)
    in_float64 = value_and_gradient(loss, logits.double(), target)
    torch.testing.assert_close(value.double(), in_float64[0], rtol=1e-6, atol=0)
    torch.testing.assert_close(gradient.double(), in_float64[1], rtol=1e-5, atol=1e-12)
    target[-1] = 41
    with pytest.raises(IndexError, match="41"):
        loss(logits, target)


@both_paths
def test_another_default_dtype() -> None:
    logits, target = torch.tensor([[1.0, 2.0, 0.0]], dtype=torch.float32), torch.tensor([0])
    expected = value_and_gradient(tunable_cross_entropy, logits, target, k=0.5)
    torch.set_default_dtype(torch.float64)
    try:
        computed = value_and_gradient(tunable_cross_entropy, logits, target, k=0.5)
    finally:
        torch.set_default_dtype(torch.float32)
    for a, b in zip(computed, expected, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


@both_paths
def test_without_gradients() -> None:
    logits, target = torch.tensor([[1.0, 2.0, 0.0]], requires_grad=True), torch.tensor([0])
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            value = tunable_cross_entropy(logits, target, k=0.5)
        assert not value.requires_grad
        torch.testing.assert_close(value, F.cross_entropy(logits, target).detach())


@both_paths
def test_accepted_types_of_k(subtests: pytest.Subtests) -> None:
    logits, target = torch.tensor([[1.0, 2.0, 0.0], [0.0, 1.0, 0.0]]), torch.tensor([0, 2])
    expected = value_and_gradient(tunable_cross_entropy, logits, target, k=2.0)
    kinds: list[Any] = [2, np.float32(2), np.float64(2), np.int64(2)]
    for k in (*kinds, torch.tensor(2.0), torch.tensor([2.0, 2.0])):
        with subtests.test(k=k):
            found = value_and_gradient(tunable_cross_entropy, logits, target, k=k)
            for a, b in zip(found, expected, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-6, atol=0)


@covering(dtype=ALL_TYPES, target_kind=["index", "probability"], path=PATHS)
@both_paths
def test_dtype_of_k_leaves_that_of_the_loss(
    dtype: torch.dtype, target_kind: str, subtests: pytest.Subtests
) -> None:
    case = Case((6, CLASSES), target_kind, False, 0.0, "none", "mean")
    logits, target, _ = case.inputs(dtype)
    ks = torch.tensor([0.25, 0.5, 1.0, 1.5, 2.0, 4.0])
    _, expected = reference.loss(logits, target, ks)
    rtol = max(2 * torch.finfo(dtype).eps, 1e-6)
    for k_type in ALL_TYPES:
        with subtests.test(k_type=k_type):
            value, gradient = value_and_gradient(
                tunable_cross_entropy, logits, target, k=ks.to(k_type)
            )
            assert value.dtype == gradient.dtype == dtype
            torch.testing.assert_close(gradient.double(), expected, rtol=rtol, atol=1e-7)


class Focal(nn.Module):
    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return focal(logits, target)


class TestModules:
    def test_module_is_the_function(self, subtests: pytest.Subtests) -> None:
        for case in CASES[::4]:
            with subtests.test(str(case)):
                logits, target, given = case.inputs(torch.float32)
                module = TunableCrossEntropyLoss(k=0.5, **given)
                computed = value_and_gradient(module, logits, target)
                expected = value_and_gradient(tunable_cross_entropy, logits, target, k=0.5, **given)
                for a, b in zip(computed, expected, strict=True):
                    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)

    @covering(1, case=[case for case in CASES if case.target == "index"][::6], dtype=ALL_TYPES)
    def test_rule_module(self, case: Case, dtype: torch.dtype) -> None:
        """With the paper's rule, it equals the tunable loss; with the bias, PyTorch's."""
        case = case._replace(label_smoothing=0.0)
        logits, target, arguments = case.inputs(dtype)
        settings_ = {k: v for k, v in arguments.items() if k != "label_smoothing"}
        rtol = max(torch.finfo(dtype).eps, 1e-6)
        for k, rule in ((0.5, lambda z, y: tunable(z, y, 0.5)), (1.0, cross_entropy)):
            module = RuleCrossEntropyLoss(rule, **settings_)
            computed = value_and_gradient(module, logits, target)
            expected = value_and_gradient(tunable_cross_entropy, logits, target, k=k, **settings_)
            for a, b in zip(computed, expected, strict=True):
                assert a.dtype == dtype
                torch.testing.assert_close(a, b, rtol=rtol, atol=1e-8, equal_nan=True)

    def test_rule_may_change_between_steps(self) -> None:
        logits, target = torch.tensor([[1.0, 2.0, 0.0]]), torch.tensor([0])
        module = RuleCrossEntropyLoss(cross_entropy)
        for k in (0.5, 2.0):
            module.rule = functools.partial(tunable, k=k)
            for each in (module, copy.deepcopy(module)):
                gradient = value_and_gradient(each, logits, target)[1]
                torch.testing.assert_close(gradient, tunable(logits, target, k))
            module.rule = Focal()
            gradient = value_and_gradient(module, logits, target)[1]
            torch.testing.assert_close(gradient, focal(logits, target))
        with pytest.raises(TypeError, match="rule must be a function of logits and labels"):
            module.rule = "tunable"  # type: ignore[assignment]
        gradient = value_and_gradient(module, logits, target)[1]
        torch.testing.assert_close(gradient, focal(logits, target))

    def test_rule_must_give_a_tensor(self) -> None:
        logits = torch.zeros(1, 3, requires_grad=True)
        no_tensor: Any = lambda z, y: None  # noqa: E731
        for rule, said in (
            (no_tensor, "rule must return a tensor of the shape of the logits, not NoneType"),
            (
                from_bias(no_tensor),
                "f must return a tensor of the shape of the biases, not NoneType",
            ),
        ):
            with pytest.raises(TypeError, match=said):
                RuleCrossEntropyLoss(rule)(logits, torch.tensor([0])).backward()

    def test_rule_module_under_autocast(self) -> None:
        logits = torch.randn(3, 4, dtype=torch.bfloat16, requires_grad=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            value = RuleCrossEntropyLoss(cross_entropy)(logits, torch.tensor([0, 1, 2]))
        assert value.dtype == torch.float32
        value.backward()
        assert logits.grad is not None
        assert logits.grad.dtype == torch.bfloat16

    def test_k_may_change_between_steps(self) -> None:
        logits, target = torch.tensor([[1.0, 2.0, 0.0]]), torch.tensor([0])
        module = TunableCrossEntropyLoss(k=0.5)
        for k in (0.5, 1.0, torch.tensor([2.0])):
            module.k = k
            _, expected = reference.loss(logits, target, k)
            gradient = value_and_gradient(module, logits, target)[1]
            torch.testing.assert_close(gradient.double(), expected, rtol=1e-5, atol=1e-8)

    @pytest.mark.parametrize(
        "module",
        [
            TunableCrossEntropyLoss(k=0.5, weight=torch.tensor([1.0, 2.0, 3.0])),
            RuleCrossEntropyLoss(cross_entropy, weight=torch.tensor([1.0, 2.0, 3.0])),
        ],
        ids=lambda module: type(module).__name__,
    )
    def test_pickle_deepcopy_and_device_moves(self, module: nn.Module) -> None:
        """Copies are equal; weights are moved and saved with the model, like PyTorch's."""
        logits, target = torch.tensor([[1.0, 2.0, 0.0]]), torch.tensor([0])
        expected = value_and_gradient(module, logits, target)
        for other in (pickle.loads(pickle.dumps(module)), copy.deepcopy(module)):
            for a, b in zip(value_and_gradient(other, logits, target), expected, strict=True):
                assert torch.equal(a, b)
        assert list(module.state_dict()) == list(nn.CrossEntropyLoss(torch.ones(3)).state_dict())
        assert copy.deepcopy(module).double().weight.dtype == torch.float64

    @pytest.mark.parametrize("kind", [TunableCrossEntropyLoss, TunableLinearCrossEntropyLoss])
    def test_k_survives_a_checkpoint_if_asked_to(self, kind: Any) -> None:
        """A schedule of k continues where it stopped."""
        saved: Any = nn.Sequential(nn.Linear(2, 3), kind(k=1.0, persistent=True))
        for k in (3, 0.1, torch.tensor([0.5, 2.0])):
            saved[1].k = k
            state = pickle.loads(pickle.dumps(saved.state_dict()))
            assert list(state) == ["0.weight", "0.bias", "1.k"]
            loaded: Any = nn.Sequential(nn.Linear(2, 3), kind(k=1.0, persistent=True))
            loaded.load_state_dict(state)
            assert np.array_equal(loaded[1].k, k)
            assert isinstance(loaded[1].k, Tensor) == isinstance(k, Tensor)
        assert "persistent=True" in repr(saved[1])
        loaded.load_state_dict({**state, "1.k": 0.25})  # written by hand
        assert loaded[1].k == 0.25

    def test_checkpoints_that_do_not_fit_are_refused(self) -> None:
        plain, persistent = (TunableCrossEntropyLoss(k=0.5, persistent=p) for p in (False, True))
        assert not plain.state_dict()
        plain.load_state_dict({})
        with pytest.raises(RuntimeError, match=r"Unexpected key\(s\) in state_dict: \"k\""):
            plain.load_state_dict({"k": torch.tensor(2.0)})
        with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict: \"k\""):
            persistent.load_state_dict({})
        for criterion, state in ((plain, {"k": torch.tensor(2.0)}), (persistent, {})):
            criterion.load_state_dict(state, strict=False)
            assert criterion.k == 0.5
        with pytest.raises(ValueError, match="k must be a finite number above 0"):
            persistent.load_state_dict({"k": torch.tensor(-1.0)})

    def test_setting_k_checks_it(self) -> None:
        criterion = TunableCrossEntropyLoss(k=0.5)
        for wrong in (0, -1.0, math.nan, torch.tensor([1.0, 0.0])):
            with pytest.raises(ValueError, match=r"^k must be"):
                criterion.k = wrong
        with pytest.raises(TypeError, match=r"^k must be a number or a tensor, not str"):
            criterion.k = "1"  # type: ignore[assignment]
        assert criterion.k == 0.5

    def test_representation_shows_the_setting(self) -> None:
        assert "k=0.5" in repr(TunableCrossEntropyLoss(k=0.5))
        assert "cross_entropy" in repr(RuleCrossEntropyLoss(cross_entropy))


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_a_kept_loss_frees_its_buffers_after_backward(
    label_smoothing: float,
) -> None:
    """As in a list of losses kept for a plot."""
    needs_kernels()
    logits, target = torch.randn(50, 7, requires_grad=True), torch.randint(7, (50,))
    loss = tunable_cross_entropy(logits, target, k=0.5, label_smoothing=label_smoothing)
    loss.backward()
    node: Any = loss.grad_fn
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        node.saved_tensors  # noqa: B018
    assert not [value for value in vars(node).values() if isinstance(value, Tensor | tuple)]


@covering(
    target_kind=["index", "probability"],
    k=["one", "per example"],
    block=[1, 3 * CLASSES, 5 * CLASSES],
)
def test_blocks_of_rows_make_no_difference(
    block: int, k: str, target_kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bitwise, strides included, for blocks of one, three and five of six rows."""
    logits, target, _ = Case((6, CLASSES), target_kind, False, 0.0, "none", "none").inputs(
        torch.float32
    )
    sensitivity = 0.5 if k == "one" else torch.linspace(0.25, 4, 6)
    all_rows = rows.CPU_BLOCK
    for layout in (logits, logits.T.contiguous().T):
        leaf = layout.clone().requires_grad_()
        found = []
        for size in (all_rows, block):
            monkeypatch.setattr(rows, "CPU_BLOCK", size)
            value = tunable_cross_entropy(
                leaf, target, k=sensitivity, reduction="none", implementation="torch"
            )
            (gradient,) = torch.autograd.grad(value, leaf, upstream_of(value))
            found.append((value.detach(), gradient))
        for whole, cut in zip(*found, strict=True):
            assert torch.equal(whole, cut)
            assert whole.stride() == cut.stride()


MEMORY = """
import torch
from pseudograd import tunable_cross_entropy

def kilobytes(of):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(of))

def step(rows, dtype, soft, implementation):
    logits = torch.ones(rows, 16384, dtype=dtype).requires_grad_()
    target = torch.full_like(logits, 1 / 16384).detach() if soft else torch.arange(rows)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # resets the peak
    before = kilobytes("VmRSS:")
    tunable_cross_entropy(logits, target, k=0.5, implementation=implementation).backward()
    return 1024 * (kilobytes("VmHWM:") - before) / (logits.numel() * logits.element_size())

torch.set_num_threads(2)
for implementation in ("auto", "torch"):
    for dtype in (torch.float32, torch.bfloat16):
        for soft in (False, True):
            step(4, dtype, soft, implementation)
            print(step(1024, dtype, soft, implementation))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the memory in use from /proc")
def test_memory_of_both_passes() -> None:
    """In multiples of the logits' memory, not counting logits and targets."""
    needs_kernels()
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_WAIT_POLICY": "passive"
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", MEMORY], capture_output=True, text=True, env=environment, check=True
    )
    used = [float(line) for line in done.stdout.splitlines()]
    most = [1, 1, 1, 1, 1, 1, 1, 3.5]  # soft targets in bfloat16, by PyTorch operations
    assert all(one < limit + 0.5 for one, limit in zip(used, most, strict=True)), used
