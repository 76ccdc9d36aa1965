"""The loss in JAX: against 50 digits, against PyTorch's and optax's, and under JAX's transforms."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

import reference
from pseudograd import tunable_cross_entropy as torch_loss
from pseudograd.rules import soft_tunable, tunable
from test_paper_rule import (
    NEGLIGIBLE,
    TOLERANCE,
    assert_accurate,
    assert_sums_to_zero,
    assert_within_an_ulp,
    battery,
)

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402

from pseudograd.jax import (  # noqa: E402
    tunable_cross_entropy,
    tunable_cross_entropy_with_integer_labels,
)

pytestmark = pytest.mark.usefixtures("one_thread")
LOGITS = jnp.array([[2.0, 1.0, 0.0], [0.5, -1.0, 3.0]])
LABELS = jnp.array([0, 1])
SOFT = jnp.array([[0.8, 0.1, 0.1], [0.25, 0.0, 0.75]])


def in_float64() -> Any:
    """Return a context in which JAX has float64; older versions have it elsewhere."""
    experimental: Any = importlib.import_module("jax.experimental")
    return jax.enable_x64(True) if hasattr(jax, "enable_x64") else experimental.enable_x64()


def to_jax(tensor: Tensor) -> Any:
    if tensor.dtype == torch.bfloat16:
        return jnp.asarray(tensor.float().numpy(), jnp.bfloat16)
    return jnp.asarray(tensor.detach().numpy())


def to_torch(array: Any) -> Tensor:
    if array.dtype == jnp.bfloat16:
        return torch.tensor(np.asarray(array.astype(jnp.float32))).bfloat16()
    return torch.tensor(np.asarray(array))


@jax.jit
def value_and_gradient(logits: Any, labels: Any, k: Any) -> Any:
    value, pull = jax.vjp(lambda z: tunable_cross_entropy(z, labels, k=k), logits)
    return value, pull(jnp.ones_like(value))[0]


def computed(logits: Tensor, labels: Tensor, k: float | Tensor) -> tuple[Tensor, Tensor]:
    """Return the value and the gradient of each example, under `jit` with a traced k."""
    sensitivity = to_jax(k) if isinstance(k, Tensor) else k
    value, gradient = value_and_gradient(to_jax(logits), to_jax(labels), sensitivity)
    return to_torch(value), to_torch(gradient)


def from_torch(logits: Tensor, labels: Tensor, k: float | Tensor) -> tuple[Tensor, Tensor]:
    """Return PyTorch's value and gradient of each example."""
    leaf = logits.detach().requires_grad_()
    value = torch_loss(leaf, labels, k=k, reduction="none")
    return value.detach(), torch.autograd.grad(value.sum(), leaf)[0]


def total(logits: Any, labels: Any, k: Any = 0.5, **settings: Any) -> Any:
    return tunable_cross_entropy(logits, labels, k=k, **settings).sum()


gradient_of_total = jax.jit(jax.grad(total), static_argnames="axis")


# --- accuracy -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("classes", "count"), [(2, 42), (10, 70), (100, 14)])
def test_float32_without_float64(classes: int, count: int) -> None:
    """JAX has float64 only on request, so Eq. 5 must not need it."""
    rows = battery(torch.float32, classes, count)
    value, gradient = computed(*rows)
    true_value, true_gradient = reference.loss(*rows, reduction="none")
    assert gradient.dtype == value.dtype == torch.float32
    assert_accurate(value, true_value, TOLERANCE[torch.float32])
    assert_accurate(gradient, true_gradient, TOLERANCE[torch.float32])
    assert_sums_to_zero(gradient)


@pytest.mark.parametrize(("classes", "count"), [(10, 70)])
def test_float64(classes: int, count: int) -> None:
    rows = battery(torch.float64, classes, count)
    true_value, true_gradient = reference.loss(*rows, reduction="none")
    with in_float64():
        value, gradient = computed(*rows)
    assert gradient.dtype == value.dtype == torch.float64
    assert_accurate(value, true_value, TOLERANCE[torch.float64])
    assert_accurate(gradient, true_gradient, TOLERANCE[torch.float64])


@pytest.mark.parametrize("classes", [30, 1000])
def test_float32_on_many_rows(classes: int) -> None:
    """The reference is the rule in float64, which other tests compare to 50 digits."""
    rows = battery(torch.float32, classes, count=300_000 // classes, seed=2)
    in_double = tunable(rows.logits.double(), rows.label, rows.k.double())
    assert_accurate(computed(*rows)[1], in_double, TOLERANCE[torch.float32])


@pytest.mark.parametrize("classes", [3, 1000])
def test_float32_where_errors_count_most(classes: int) -> None:
    """At even odds, k = 64 multiplies the error of log(1 - p_y), a sum of many terms."""
    generator = torch.Generator().manual_seed(classes)
    count = 600_000 // classes
    logits = torch.randn(count, classes, generator=generator)
    logits = logits * 3 * torch.rand(count, 1, generator=generator)
    logits = logits + 10 * torch.randn(count, 1, generator=generator)
    logits[:, 0] = logits[:, 1:].logsumexp(-1) + torch.randn(count, generator=generator)
    label, k = torch.zeros(count, dtype=torch.long), torch.full((count,), 64.0)
    in_double = tunable(logits.double(), label, k.double())
    assert_accurate(computed(logits, label, k)[1], in_double, TOLERANCE[torch.float32])


def test_equal_logits_of_many_classes() -> None:
    """Summing this many terms in float32 would fail the tolerance."""
    logits, label = torch.full((2, 40_000), -3.3), torch.tensor([0, 7])
    logits[:, 5] = 0
    for k in (0.5, 8.0):
        true = tunable(logits.double(), label, k)
        torch.testing.assert_close(computed(logits, label, k)[1].double(), true, rtol=2e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_are_float32_rounded_once(dtype: torch.dtype) -> None:
    logits, label, k = battery(torch.float32, 10, count=300, seed=3)
    logits = logits.clamp(max=torch.finfo(dtype).max).to(dtype)
    value, gradient = computed(logits, label, k)
    assert value.dtype == dtype
    assert_within_an_ulp(gradient, tunable(logits.float(), label, k).to(dtype))
    expected = torch_loss(logits.float(), label, reduction="none").to(dtype)
    assert_within_an_ulp(value, expected)


def soft_targets(kind: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    label = torch.randint(5, (8,), generator=generator)
    one_hot = torch.nn.functional.one_hot(label, 5).float()
    many = torch.rand(8, 5, generator=generator)
    targets = {
        "one-hot": one_hot,
        "few": 0.75 * one_hot + 0.25 * one_hot.roll(3, 1),
        "many": many / many.sum(1, keepdim=True),
        "weighted": many,
    }
    gaps = torch.tensor([0.01, 1.0, 10.0, 100.0]).repeat(2).unsqueeze(1)
    return gaps * torch.randn(8, 5, generator=generator), targets[kind]


@pytest.mark.parametrize("kind", ["one-hot", "few", "many", "weighted"])
def test_soft_targets(kind: str) -> None:
    """With float64, as exact as PyTorch; without it, up to the largest component's rounding."""
    logits, target = soft_targets(kind)
    for k in (1 / 64, 0.5, 1.0, 3.0, 64.0):
        true_value, true = reference.loss(logits, target, k, reduction="none")
        with in_float64():
            value, gradient = computed(logits, target, k)
        assert gradient.dtype == torch.float32
        torch.testing.assert_close(value.double(), true_value, rtol=1e-6, atol=1e-30)
        assert_accurate(gradient, true, TOLERANCE[torch.float32])
        value, gradient = computed(logits, target, k)
        torch.testing.assert_close(value.double(), true_value, rtol=1e-6, atol=1e-30)
        size = true.abs().amax(-1, keepdim=True).clamp(min=NEGLIGIBLE)
        assert ((gradient.double() - true).abs() <= 2e-5 * size).all()
        assert (gradient.sum(-1, keepdim=True).abs() <= 1e-6 * size).all()


def test_smoothed_labels_without_float64() -> None:
    """p - q cancels: docs/adoption.md promises this much."""
    generator = torch.Generator().manual_seed(0)
    label = torch.randint(10, (10_000,), generator=generator)
    one_hot = torch.nn.functional.one_hot(label, 10)
    logits = 2 * torch.randn(10_000, 10, generator=generator) + 4 * one_hot
    target = 0.9 * one_hot + 0.01
    far = (logits.double().softmax(-1) - target.double()).abs().amax(-1) > 0.01
    for k, tolerance in ((1 / 16, 1e-3), (0.5, 2e-4), (1.0, 2e-4), (8.0, 2e-4), (64.0, 2e-4)):
        true = soft_tunable(logits.double(), target.double(), k)[far]
        error = (computed(logits, target, k)[1][far].double() - true).abs()
        size = true.abs().amax(-1, keepdim=True).clamp(min=NEGLIGIBLE)
        assert (error <= tolerance * size).all()


def test_soft_targets_in_float64() -> None:
    logits, target = (tensor.double() for tensor in soft_targets("weighted"))
    for k in (1 / 64, 3.0):
        _, true = reference.loss(logits, target, k, reduction="none")
        with in_float64():
            assert_accurate(computed(logits, target, k)[1], true, 1e-10)


@pytest.mark.parametrize("soft", [False, True])
def test_it_is_the_loss_of_pytorch(soft: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(200, 7, generator=generator)
    target = torch.randint(7, (200,), generator=generator)
    if soft:
        target = torch.rand(200, 7, generator=generator)
        target = target / target.sum(-1, keepdim=True)
    for k in (0.25, 0.5, 1.0, 2.0, torch.linspace(0.25, 4, 200)):
        with in_float64() if soft else contextlib.nullcontext():
            ours = computed(logits, target, k)
        torch.testing.assert_close(ours, from_torch(logits, target, k), rtol=1e-6, atol=1e-6)


# --- extremes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        (torch.float32, torch.finfo(torch.float32).max),
        (torch.float16, torch.finfo(torch.float16).max),
        (torch.bfloat16, torch.finfo(torch.bfloat16).max),
        (torch.float64, torch.finfo(torch.float64).max / 4),
    ],
)
@pytest.mark.parametrize("soft", [False, True])
def test_never_nan_for_finite_logits(dtype: torch.dtype, size: float, soft: bool) -> None:
    logits = torch.tensor(list(itertools.product((-1, 0, 1), repeat=3)), dtype=dtype) * size
    target = torch.zeros(len(logits), dtype=torch.long)
    if soft:
        target = torch.tensor([[0.5, 0.5, 0.0]], dtype=dtype).repeat(len(logits), 1)
    with in_float64() if dtype == torch.float64 else contextlib.nullcontext():
        for k in (2.0**-99, 1 / 64, 1.0, 64.0, 2.0**99):
            value, gradient = computed(logits, target, k)
            assert gradient.isfinite().all()
            assert gradient.double().sum(-1).abs().max() <= 4 * torch.finfo(dtype).eps
            assert not value.isnan().any()
            # A difference of two such logits can be beyond the dtype: then the value is infinite.
            true = torch_loss(
                logits.double(), target.double() if soft else target, reduction="none"
            )
            assert (value.isfinite() | (true > 0.99 * torch.finfo(dtype).max)).all()


def test_extreme_k_of_ordinary_logits() -> None:
    """At its bounds, k gives the limits of the rule: all or nothing."""
    rows = torch.tensor([[2.0, 1.0, 0.0], [0.0, 0.0, 0.0], [-50.0, 0.0, 50.0]])
    label = torch.tensor([0, 1, 0])
    _, gradient = computed(rows, label, 2.0**-99)
    torch.testing.assert_close(gradient[0], torch.tensor([-1.0, 0.5, 0.5]))
    _, gradient = computed(rows, label, 2.0**99)
    torch.testing.assert_close(gradient[:2], torch.zeros(2, 3))
    torch.testing.assert_close(gradient[2], torch.tensor([-1.0, 0.0, 1.0]))


def test_masked_and_undefined_logits_are_as_in_pytorch() -> None:
    """-inf masks a class; NaN shows where cross-entropy is undefined."""
    inf, nan, lowest = math.inf, math.nan, torch.finfo(torch.float32).min
    rows = torch.tensor(
        [
            [1.0, -inf, 2.0], [1.0, -inf, -inf], [-inf, 1.0, 2.0], [-inf, -inf, 2.0],
            [inf, 1.0, 2.0], [1.0, inf, 2.0], [-inf, -inf, -inf], [1.0, nan, 2.0],
            [nan, 1.0, 2.0], [1.0, -inf, nan], [lowest, -inf, -inf], [lowest, lowest, lowest],
            [-inf, lowest, lowest],
        ]
    )  # fmt: skip
    label = torch.zeros(len(rows), dtype=torch.long)
    one_hot = torch.nn.functional.one_hot(label, 3).float()
    soft = torch.tensor([[0.25, 0.0, 0.75]]).repeat(len(rows), 1)
    for target, k in itertools.product((label, one_hot, soft), (0.5, 2.0)):
        value, gradient = computed(rows, target, k)
        expected, expected_gradient = from_torch(rows, target, k)
        torch.testing.assert_close(value, expected, equal_nan=True)
        assert (gradient.isnan().any(-1) == expected_gradient.isnan().any(-1)).all()
        known = ~expected_gradient.isnan().any(-1)
        torch.testing.assert_close(gradient[known], expected_gradient[known])


def test_one_class_and_empty_batches() -> None:
    for label in (jnp.zeros(2, jnp.int32), jnp.ones((2, 1))):
        value, gradient = value_and_gradient(jnp.full((2, 1), -7.5), label, 0.5)
        assert (value == 0).all()
        assert (gradient == 0).all()
    value, gradient = value_and_gradient(jnp.zeros((0, 3)), jnp.zeros(0, jnp.int32), 0.5)
    assert (value.shape, gradient.shape) == ((0,), (0, 3))


def test_labels_out_of_range_are_nan() -> None:
    """Like too large ones in optax, which counts negative ones from the end."""
    value, gradient = value_and_gradient(jnp.zeros((3, 3)), jnp.array([3, -1, 0]), 0.5)
    assert np.isnan(value).tolist() == [True, True, False]
    assert np.isnan(gradient).any(-1).tolist() == [True, True, False]


@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.uint32])
def test_labels_of_any_integer_type(dtype: Any) -> None:
    """With more classes than a byte can count."""
    logits, labels = jnp.sin(jnp.arange(900.0)).reshape(3, 300), jnp.array([100, 0, 1])
    expected = value_and_gradient(logits, labels, 0.5)
    for ours, same in zip(value_and_gradient(logits, labels.astype(dtype), 0.5), expected):  # noqa: B905
        assert (ours == same).all()


# --- arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", [0, -2])
@pytest.mark.parametrize("soft", [False, True])
def test_axis(axis: int, soft: bool) -> None:
    rows = jnp.sin(jnp.arange(24.0)).reshape(2, 4, 3) * 3
    labels: Any = jax.nn.softmax(jnp.cos(jnp.arange(24.0).reshape(2, 4, 3)))
    labels = labels if soft else jnp.arange(8).reshape(2, 4) % 3
    k = jnp.linspace(0.5, 2, 8).reshape(2, 4)
    expected = gradient_of_total(rows, labels, k)
    moved = jnp.moveaxis(rows, -1, axis)
    moved_labels = jnp.moveaxis(labels, -1, axis) if soft else labels
    gradient = gradient_of_total(moved, moved_labels, k, axis=axis)
    np.testing.assert_allclose(jnp.moveaxis(gradient, axis, -1), expected, rtol=1e-6)


@pytest.mark.parametrize("mask", ["none", "examples", "logits"])
@pytest.mark.parametrize("soft", [False, True])
def test_values_are_those_of_optax(soft: bool, mask: str) -> None:
    """For every k; at k = 1 the gradients are too."""
    optax = pytest.importorskip("optax")
    labels = SOFT if soft else LABELS
    theirs = optax.softmax_cross_entropy
    if not soft:
        theirs = optax.softmax_cross_entropy_with_integer_labels
    where = {
        "none": None,
        "examples": jnp.array([True, False]),
        "logits": jnp.array([[True, True, False], [True, True, True]]),
    }[mask]
    expected = jax.jit(theirs)(LOGITS, labels, where=where)
    for k in (0.5, 1.0, 2.0):
        value = jax.jit(tunable_cross_entropy)(LOGITS, labels, k=k, where=where)
        np.testing.assert_allclose(value, expected, rtol=1e-6)
    gradient = gradient_of_total(LOGITS, labels, 1.0, where=where)
    expected = jax.jit(jax.grad(lambda z: theirs(z, labels, where=where).sum()))(LOGITS)
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-7)


def test_masked_values_do_not_matter() -> None:
    """Whatever their logits and labels."""
    logits = jnp.concatenate([LOGITS, jnp.full((1, 3), jnp.nan)])
    where = jnp.array([True, True, False])
    for labels in (jnp.array([0, 1, -100]), jnp.concatenate([SOFT, jnp.full((1, 3), jnp.nan)])):
        value, gradient = jax.jit(jax.value_and_grad(total))(logits, labels, where=where)
        expected = value_and_gradient(LOGITS, labels[:2], 0.5)
        np.testing.assert_allclose(value, expected[0].sum(), rtol=1e-6)
        np.testing.assert_allclose(gradient[:2], expected[1], rtol=1e-6)
        assert (gradient[2] == 0).all()
    # An excluded class has the logit -inf.
    where = jnp.array([[True, False, True], [True, True, False]])
    gradient = gradient_of_total(LOGITS, LABELS, where=where)
    masked = gradient_of_total(jnp.where(where, LOGITS, -jnp.inf), LABELS)
    np.testing.assert_allclose(gradient, masked, rtol=1e-6)


def test_soft_targets_get_the_gradient_of_cross_entropy() -> None:
    at_logits, at_labels = jax.jit(jax.grad(total, argnums=(0, 1)))(LOGITS, SOFT)
    np.testing.assert_allclose(at_labels, -jax.nn.log_softmax(LOGITS), rtol=1e-6)
    np.testing.assert_allclose(at_logits, gradient_of_total(LOGITS, SOFT), rtol=1e-6)


@pytest.mark.parametrize(
    ("logits", "labels", "value"),
    [
        (jnp.float32, jnp.bfloat16, jnp.float32),
        (jnp.bfloat16, jnp.float32, jnp.float32),
        (jnp.bfloat16, jnp.bfloat16, jnp.bfloat16),
        (jnp.float16, jnp.int32, jnp.float16),
    ],
)
def test_dtypes(logits: Any, labels: Any, value: Any) -> None:
    z = LOGITS.astype(logits)
    target = LABELS if labels == jnp.int32 else SOFT.astype(labels)
    shapes = jax.eval_shape(value_and_gradient, z, target, 0.5)
    assert tuple(shape.dtype for shape in shapes) == (value, logits)


def test_numpy_arrays_and_numbers() -> None:
    expected = tunable_cross_entropy(LOGITS, LABELS, k=2.0)
    same: list[Any] = [
        2,
        np.float32(2),
        np.int64(2),
        np.array(2.0),
        np.full(2, 2.0),
        jnp.array(2.0),
    ]
    for k in same:
        value = tunable_cross_entropy_with_integer_labels(np.asarray(LOGITS), np.array([0, 1]), k=k)
        assert (value == expected).all()


def test_positional_arguments_are_optaxs() -> None:
    """An axis in optax's position used to be taken for k: a wrong loss without an error."""
    optax = pytest.importorskip("optax")
    logits, soft = jnp.sin(jnp.arange(24.0)).reshape(2, 3, 4), jnp.full((2, 3, 4), 1 / 3)
    labels, where = jnp.arange(8).reshape(2, 4) % 3, jnp.arange(24).reshape(2, 3, 4) % 5 > 0
    pairs: list[tuple[Any, Any, Any]] = [
        (tunable_cross_entropy, optax.softmax_cross_entropy, soft),
        (
            tunable_cross_entropy_with_integer_labels,
            optax.softmax_cross_entropy_with_integer_labels,
            labels,
        ),
    ]
    for ours, theirs, target in pairs:
        for rest in [(1,), (1, where)] if target is soft else [(1,)]:
            expected = theirs(logits, target, *rest)
            np.testing.assert_allclose(ours(logits, target, *rest, k=0.5), expected, rtol=1e-5)


class Bad(NamedTuple):
    """A call, and its expected error: the type, and words of it."""

    arguments: dict[str, Any]
    error: type[Exception]
    says: str


BAD = {
    "zero k": Bad({"k": 0}, ValueError, "k must be finite and above 0"),
    "infinite k": Bad({"k": math.inf}, ValueError, "k must be finite and above 0"),
    "negative array": Bad({"k": jnp.array(-1.0)}, ValueError, "k must be finite and above 0"),
    "NaN in k": Bad({"k": np.array([1, math.nan])}, ValueError, "above 0 (2^-100 to 2^100) for"),
    "text for k": Bad({"k": "0.5"}, TypeError, "k must be a number or an array, not str"),
    "truth for k": Bad({"k": True}, TypeError, "k must be a number or an array, not bool"),
    "integers in k": Bad({"k": jnp.array([1, 2])}, TypeError, "k must hold floating-point"),
    "k a column": Bad({"k": jnp.ones((2, 1))}, ValueError, "shape (2,), not (2, 1)"),
    "list of logits": Bad({"logits": [[1.0]]}, TypeError, "logits must be an array of"),
    "tensor": Bad({"logits": torch.ones(2, 3)}, TypeError, "not Tensor; use jnp.asarray"),
    "integer logits": Bad({"logits": jnp.ones((2, 3), int)}, TypeError, "logits must hold"),
    "no dimension": Bad({"logits": jnp.array(1.0)}, ValueError, "axis -1 does not exist"),
    "no classes": Bad({"logits": jnp.ones((2, 0))}, ValueError, "logits have no classes"),
    "wrong axis": Bad({"axis": 2}, ValueError, "axis 2 does not exist in logits of shape (2, 3)"),
    "two axes": Bad({"axis": (0, 1)}, TypeError, "axis must be a whole number, not (0, 1)"),
    "k by position": Bad({"axis": 0.5}, TypeError, "pass k by keyword, k=..."),
    "float labels": Bad(
        {"labels": jnp.array([0.0, 1.0])}, ValueError, "for class indices use .astype(jnp.int32)"
    ),
    "one-hot integers": Bad(
        {"labels": jnp.eye(2, 3, dtype=int)}, ValueError, "one-hot labels use .astype(jnp.float32)"
    ),
    "few labels": Bad({"labels": jnp.array([0])}, ValueError, "class indices of shape (2,)"),
    "truths for labels": Bad({"labels": jnp.array([True, False])}, TypeError, "labels must hold"),
    "no labels": Bad({"labels": None}, TypeError, "labels must be an array of class indices"),
    "numbers for where": Bad({"where": jnp.ones(2)}, TypeError, "where must hold booleans, not"),
    "where of 3": Bad({"where": jnp.ones(3, bool)}, ValueError, "shape (2,), or for each logit"),
}


def test_bad_arguments_are_named(subtests: pytest.Subtests) -> None:
    for case in BAD:
        with subtests.test(case=case):
            bad = BAD[case]
            arguments = {"logits": LOGITS, "labels": LABELS, **bad.arguments}
            with pytest.raises(bad.error) as caught:
                tunable_cross_entropy(**arguments)
            assert bad.says in str(caught.value)
            assert "\n" not in str(caught.value)


def test_integer_labels_only() -> None:
    with pytest.raises(TypeError, match="for class probabilities use tunable_cross_entropy"):
        tunable_cross_entropy_with_integer_labels(LOGITS, SOFT)


# --- transforms -----------------------------------------------------------------------------------


def each(function: Callable[..., Any]) -> Callable[..., Any]:
    return jax.vmap(function, in_axes=(0, 0, None))  # type: ignore[no-any-return]


def in_a_loop(z: Any, y: Any, k: Any) -> Any:
    def step(value: Any, row: Any) -> Any:
        return value + total(row[0], row[1], k), None

    return jax.lax.scan(step, 0.0, (z, y))[0]


TRANSFORMS: dict[str, Callable[..., Any]] = {
    "grad": jax.grad(total),
    "jit(grad)": gradient_of_total,
    "grad(jit)": jax.grad(jax.jit(total)),
    "jit(vmap(grad))": jax.jit(each(jax.grad(total))),
    "jit(grad(vmap))": jax.jit(jax.grad(lambda *args: each(total)(*args).sum())),
    "jit(jacrev)": jax.jit(
        lambda z, y, k: jax.jacrev(lambda z: tunable_cross_entropy(z, y, k=k))(z).sum(0)
    ),
    "jit(grad(checkpoint))": jax.jit(jax.grad(jax.checkpoint(total))),
    "grad(scan)": jax.grad(in_a_loop),
    # In nested derivatives JAX differentiates the forward pass.
    "grad(vjp)": jax.jit(jax.grad(lambda z, y, k: jax.vjp(lambda z: total(z, y, k), z)[0])),
}


@pytest.mark.parametrize(
    ("transform", "soft"),
    [*((name, False) for name in TRANSFORMS), ("jit(vmap(grad))", True), ("grad(vjp)", True)],
)
def test_transforms(transform: str, soft: bool) -> None:
    labels = SOFT if soft else LABELS
    gradient = TRANSFORMS[transform](LOGITS, labels, 0.5)
    _, expected = reference.loss(
        to_torch(LOGITS),
        to_torch(labels) if soft else to_torch(labels).long(),
        0.5,
        reduction="sum",
    )
    np.testing.assert_allclose(gradient, expected.numpy(), rtol=1e-4 if soft else 1e-5)
    plain = gradient_of_total(LOGITS, labels, 1.0)
    assert not np.allclose(gradient, plain, rtol=1e-2)


def test_a_traced_k_does_not_recompile() -> None:
    traces = []

    @jax.jit
    def gradient(k: Any) -> Any:
        traces.append(k)
        return jax.grad(total)(LOGITS, LABELS, k)

    for k in (0.25, 0.5, 2.0, 4.0):
        _, expected = from_torch(to_torch(LOGITS), to_torch(LABELS).long(), k)
        np.testing.assert_allclose(gradient(k), expected, rtol=1e-6)
    assert len(traces) == 1


def test_one_k_for_each_example() -> None:
    ks = jnp.array([0.5, 2.0])
    _, expected = from_torch(to_torch(LOGITS), to_torch(LABELS).long(), to_torch(ks))
    np.testing.assert_allclose(gradient_of_total(LOGITS, LABELS, ks), expected, rtol=1e-6)
    mapped = jax.jit(jax.vmap(jax.grad(total)))(LOGITS, LABELS, ks)
    np.testing.assert_allclose(mapped, expected, rtol=1e-6)


def test_k_has_no_gradient_and_says_so() -> None:
    for labels in (LABELS, SOFT):
        for transform in (jax.grad, lambda f, at: jax.jit(jax.grad(f, at))):
            with pytest.raises(ValueError, match=r"use jax\.lax\.stop_gradient\(k\)"):
                transform(total, 2)(LOGITS, labels, 0.5)
    stopped = jax.grad(lambda k: total(LOGITS * k, LABELS, jax.lax.stop_gradient(k)))(0.5)
    assert jnp.isfinite(stopped)


def test_a_traced_k_out_of_bounds_gives_nan() -> None:
    for k in (0.0, -1.0, math.nan, math.inf):
        for labels in (LABELS, SOFT):
            value, gradient = value_and_gradient(LOGITS, labels, k)
            assert jnp.isfinite(value).all()
            assert jnp.isnan(gradient).all()


@pytest.mark.parametrize("soft", [False, True])
def test_second_derivatives_are_refused(soft: bool) -> None:
    labels = SOFT if soft else LABELS
    gradient = jax.grad(total)
    for again in (
        lambda: jax.grad(lambda z: gradient(z, labels)[0, 0])(LOGITS),
        lambda: jax.grad(lambda z: jax.value_and_grad(total)(z, labels)[0])(LOGITS),
        lambda: jax.jit(jax.jacfwd(lambda z: gradient(z, labels)))(LOGITS),
        lambda: jax.jvp(lambda z: gradient(z, labels), (LOGITS,), (LOGITS,)),
    ):
        with pytest.raises(TypeError, match=r"a second derivative|forward-mode"):
            again()
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda z: total(z, labels), (LOGITS,), (LOGITS,))
    if soft:
        at_labels = jax.grad(total, argnums=1)
        with pytest.raises(TypeError, match="a second derivative"):
            jax.grad(lambda z: at_labels(z, labels).sum())(LOGITS)
    # The gradient is linear in the upstream gradient, and that has a derivative.
    slope = jax.grad(lambda w: jax.grad(lambda z: w * total(z, labels))(LOGITS)[0, 0])(2.0)
    np.testing.assert_allclose(slope, gradient(LOGITS, labels)[0, 0], rtol=1e-6)


@pytest.mark.skipif(len(jax.devices("cpu")) < 2, reason="XLA_FLAGS sets one device")
@pytest.mark.parametrize("axis", ["examples", "classes"])
def test_sharded_arrays(axis: str) -> None:
    """With the examples or the classes sharded over two devices."""
    mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:2]), ("part",))

    def share(x: Any, *axes: str | None) -> Any:
        spec = jax.sharding.PartitionSpec(*axes)
        return jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))

    z = 3 * jnp.sin(jnp.arange(96.0)).reshape(8, 12)
    y, k = jnp.arange(8) % 5, jnp.linspace(0.5, 2, 8)
    whole = gradient_of_total(z, y, k)
    if axis == "examples":
        parts = gradient_of_total(share(z, "part"), share(y, "part"), share(k, "part"))
        assert not parts.sharding.is_fully_replicated
    else:
        parts = gradient_of_total(share(z, None, "part"), share(y), share(k))
    assert len(parts.sharding.device_set) == 2
    np.testing.assert_allclose(parts, whole, rtol=1e-6)


# --- training -------------------------------------------------------------------------------------


def three_clouds() -> tuple[Any, Any]:
    numbers = np.random.default_rng(0)
    label = np.arange(150) % 3
    centre = np.array([[2.0, 0.0], [-1.0, 2.0], [-1.0, -2.0]], dtype=np.float32)
    return centre[label] + numbers.normal(size=(150, 2)).astype(np.float32), label


def network(parameters: Any, x: Any) -> Any:
    return jnp.tanh(x @ parameters["hidden"]) @ parameters["out"]


def initial() -> dict[str, Any]:
    numbers = np.random.default_rng(1)
    return {
        "hidden": numbers.normal(size=(2, 16)).astype(np.float32),
        "out": 0.1 * numbers.normal(size=(16, 3)).astype(np.float32),
    }


def test_a_network_trains_as_in_pytorch() -> None:
    """The same steps of SGD, with k on a schedule, end at the same weights."""
    x, y = three_clouds()

    @jax.jit
    def step(parameters: Any, k: Any) -> Any:
        def loss(parameters: Any) -> Any:
            return tunable_cross_entropy(network(parameters, x), y, k=k).mean()

        gradient = jax.grad(loss)(parameters)
        return jax.tree_util.tree_map(lambda p, g: p - 0.5 * g, parameters, gradient)

    parameters: Any = initial()
    same = {name: torch.tensor(value, requires_grad=True) for name, value in initial().items()}
    optimizer = torch.optim.SGD(same.values(), lr=0.5)
    for k in np.geomspace(0.25, 2, 60):
        parameters = step(parameters, k)
        optimizer.zero_grad()
        logits = (torch.tensor(x) @ same["hidden"]).tanh() @ same["out"]
        torch_loss(logits, torch.tensor(y), k=float(k)).backward()
        optimizer.step()
    for name, value in same.items():
        np.testing.assert_allclose(parameters[name], value.detach().numpy(), rtol=1e-3, atol=1e-4)
    assert (network(parameters, x).argmax(-1) == y).mean() > 0.9


def test_a_network_trains_with_optax() -> None:
    optax = pytest.importorskip("optax")
    x, y = three_clouds()
    optimizer = optax.adam(0.05)

    @jax.jit
    def step(parameters: Any, state: Any) -> Any:
        def loss(parameters: Any) -> Any:
            smoothed = optax.smooth_labels(jax.nn.one_hot(y, 3), 0.1)
            return tunable_cross_entropy(network(parameters, x), smoothed, k=0.5).mean()

        value, gradient = jax.value_and_grad(loss)(parameters)
        updates, state = optimizer.update(gradient, state)
        return optax.apply_updates(parameters, updates), state, value

    parameters: Any = jax.tree_util.tree_map(jnp.asarray, initial())
    state, values = optimizer.init(parameters), []
    for _ in range(60):
        parameters, state, value = step(parameters, state)
        values.append(float(value))
    assert values[-1] < 0.6 * values[0]
    assert (network(parameters, x).argmax(-1) == y).mean() > 0.9
