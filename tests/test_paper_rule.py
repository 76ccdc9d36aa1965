"""Eq. 5 and its loss against 50-digit arithmetic, on a wide random battery."""

from __future__ import annotations

import functools
import itertools
import math
from typing import NamedTuple

import mpmath as mp
import pytest
import torch
from torch import Tensor

import reference
from covering import PATHS, covering
from pseudograd import tunable_cross_entropy
from pseudograd.rules import soft_tunable, tunable

NEGLIGIBLE, NEGLIGIBLE_ERROR = 1e-20, 1e-25
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}
pytestmark = pytest.mark.usefixtures("one_thread")
HALF_TYPES = (torch.float16, torch.bfloat16)
KINDS = ("spread", "confident right", "confident wrong", "even odds", "uniform", "masked")
EXAMPLES_OF_CLASSES = {2: 210, 3: 210, 10: 210, 100: 28, 1000: 14}  # 50 digits are slow


class Battery(NamedTuple):
    logits: Tensor
    label: Tensor
    k: Tensor


def battery(dtype: torch.dtype, classes: int, count: int, seed: int = 0) -> Battery:
    """Return rows of all kinds: gaps 1e-6 to 1e4, k 1/64 to 64, offsets of 0 or 10 gaps."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(count, generator=generator, dtype=torch.float64)

    gap = (10 ** uniform(-6, 4)).unsqueeze(-1)
    k = 2 ** uniform(-6, 6)
    k[::5], k[1::5] = 1 / 64, 64
    label = torch.randint(classes, (count,), generator=generator)
    noise = torch.randn(count, classes, generator=generator, dtype=torch.float64)
    kind = torch.arange(count).unsqueeze(-1) % 7 % len(KINDS)
    is_label = torch.arange(classes) == label.unsqueeze(-1)
    z = noise * torch.where(kind == KINDS.index("uniform"), 1e-6, gap / 3)
    others = z.masked_fill(is_label, -math.inf).amax(-1, keepdim=True)
    logsumexp = z.masked_fill(is_label, -math.inf).logsumexp(-1, keepdim=True)
    of_label = {
        "confident right": others + gap,
        "confident wrong": others - gap,
        "even odds": logsumexp + noise[:, :1],
    }
    for name, value in of_label.items():
        z = torch.where(is_label & (kind == KINDS.index(name)), value, z)
    hidden = (torch.rand(count, classes, generator=generator) < 0.5) & ~is_label
    z = z.masked_fill(hidden & (kind == KINDS.index("masked")), -math.inf)
    offset = torch.where(torch.arange(count) % 3 == 0, 0, 1).unsqueeze(-1) * 10 * gap
    return Battery((z + offset).to(dtype), label, k.to(dtype))


@functools.cache
def truth(dtype: torch.dtype, classes: int) -> tuple[Battery, Tensor, Tensor]:
    """Return a battery, its cross-entropies and its pseudo-gradients, to 50 digits."""
    rows = battery(dtype, classes, EXAMPLES_OF_CLASSES[classes])
    value, gradient = reference.loss(*rows, reduction="none")
    return rows, value, gradient


def assert_accurate(f: Tensor, true: Tensor, tolerance: float) -> None:
    error, size = (f.double() - true).abs(), true.abs()
    relative = torch.where(size >= NEGLIGIBLE, error / size, 0).amax()
    assert relative <= tolerance, f"relative error {relative:.2e}"
    absolute = torch.where(size < NEGLIGIBLE, error, 0).amax()
    assert absolute <= NEGLIGIBLE_ERROR, f"absolute error {absolute:.2e} of a negligible component"


@pytest.mark.parametrize("classes", [10, 1025])
def test_the_rule_itself_can_be_differentiated(classes: int) -> None:
    """As research on rules needs; only the loss refuses."""
    z = torch.linspace(-1, 1, classes).double().requires_grad_()
    jacobian = torch.func.jacrev(lambda z: tunable(z.unsqueeze(0), torch.tensor([0]), 2.0)[0])(z)
    step = torch.zeros_like(z)
    step[3] = 1e-6
    f = [tunable((z + sign * step).unsqueeze(0), torch.tensor([0]), 2.0)[0] for sign in (1, -1)]
    torch.testing.assert_close(jacobian[:, 3], (f[0] - f[1]) / 2e-6, rtol=1e-4, atol=1e-9)


def assert_sums_to_zero(f: Tensor) -> None:
    """Up to the rounding of the entries and of their normalizer."""
    number = torch.finfo(f.dtype)
    smallest = number.tiny * number.eps
    bound = 4 * number.eps * f.double().abs().sum(-1) + f.shape[-1] * smallest
    assert (f.double().sum(-1).abs() <= bound).all()


def gradient_of_loss(logits: Tensor, target: Tensor, k: float | Tensor) -> Tensor:
    logits = logits.clone().requires_grad_()
    tunable_cross_entropy(logits, target, k=k, reduction="sum").backward()
    assert logits.grad is not None
    return logits.grad


dtypes = pytest.mark.parametrize("dtype", TOLERANCE)
class_counts = pytest.mark.parametrize("classes", EXAMPLES_OF_CLASSES)


def test_the_reference_is_the_formula_of_the_paper() -> None:
    """As printed, with ε_y = p_y - 1; the soft rule with a one-hot target gives the same."""
    logits = [40.0, -3.0, 1.5]
    for label, k in itertools.product(range(3), (0.25, 1.0, 3.0)):
        with mp.workdps(100):
            p = reference.softmax(logits)
            bias = [p[j] - (j == label) for j in range(3)]
            normalizer = sum(bias[i] ** k for i in range(3) if i != label)
            literal = [
                float(-(abs(bias[label]) ** k))
                if j == label
                else float(abs(bias[label]) ** k / normalizer * bias[j] ** k)
                for j in range(3)
            ]
        one_hot = [float(j == label) for j in range(3)]
        assert reference.rule(logits, label, k) == pytest.approx(literal, rel=1e-15)
        assert reference.soft_rule(logits, one_hot, k) == pytest.approx(literal, rel=1e-15)


@dtypes
@class_counts
def test_rule(dtype: torch.dtype, classes: int) -> None:
    """With labels, and with one-hot targets."""
    rows, _, gradient = truth(dtype, classes)
    one_hot = torch.nn.functional.one_hot(rows.label, classes).to(dtype)
    for f in (tunable(*rows), soft_tunable(rows.logits, one_hot, rows.k)):
        assert f.dtype == dtype
        assert_accurate(f, gradient, TOLERANCE[dtype])
        assert_sums_to_zero(f)


@dtypes
@class_counts
@pytest.mark.usefixtures("path")
def test_loss(dtype: torch.dtype, classes: int) -> None:
    (logits, label, k), value, gradient = truth(dtype, classes)
    one_hot = torch.nn.functional.one_hot(label, classes).to(dtype)
    f = gradient_of_loss(logits, label, k)
    assert f.dtype == dtype
    assert_accurate(f, gradient, TOLERANCE[dtype])
    assert_sums_to_zero(f)
    for target in (label, one_hot):  # the same value, however close to 0
        computed = tunable_cross_entropy(logits, target, k=k, reduction="none")
        assert computed.dtype == dtype
        assert_accurate(computed, value, TOLERANCE[dtype])


@covering(dtype=TOLERANCE, classes=EXAMPLES_OF_CLASSES, path=PATHS)
@pytest.mark.usefixtures("path")
def test_value_of_loss_at_a_one_hot_target_in_a_graph(dtype: torch.dtype, classes: int) -> None:
    (logits, label, k), value, _ = truth(dtype, classes)
    one_hot = torch.nn.functional.one_hot(label, classes).to(dtype)
    torch.compiler.reset()
    loss = torch.compile(tunable_cross_entropy, fullgraph=True, backend="aot_eager")
    computed = loss(logits, one_hot, k=k, reduction="none")
    assert computed.dtype == dtype
    assert_accurate(computed, value, TOLERANCE[dtype])


@pytest.mark.parametrize("classes", [2, 5, 30])
@dtypes
def test_soft_rule(dtype: torch.dtype, classes: int, subtests: pytest.Subtests) -> None:
    for k, weighted in itertools.product((1 / 64, 0.5, 1.0, 3.3, 64.0), (False, True)):
        with subtests.test(k=k, weighted=weighted):
            assert_soft_rule(dtype, classes, weighted, k)


def assert_soft_rule(dtype: torch.dtype, classes: int, weighted: bool, k: float) -> None:
    """Some biases are differences of probabilities 10^4 times as large."""
    generator = torch.Generator().manual_seed(classes)
    logits = (3 * torch.randn(12, classes, generator=generator)).to(dtype)
    target = torch.rand(12, classes, generator=generator).pow(3).to(dtype)
    target[::3, 0] = 0
    target = target / target.sum(-1, keepdim=True)
    if weighted:
        target = target * (torch.rand(classes, generator=generator) + 0.1)
    true = [
        reference.soft_rule(z, q, k) for z, q in zip(logits.tolist(), target.tolist(), strict=True)
    ]
    f = soft_tunable(logits, target, k)
    assert f.dtype == dtype
    assert_accurate(f, torch.tensor(true, dtype=torch.float64), max(TOLERANCE[dtype], 1e-10))
    assert_sums_to_zero(f)


@covering(
    size=[1e-9, 1e-6, 1e-3], uniform=[True, False], classes=[3, 17], path=PATHS, dtype=TOLERANCE
)
@pytest.mark.usefixtures("path")
def test_soft_rule_where_it_is_almost_right(
    dtype: torch.dtype, classes: int, uniform: bool, size: float
) -> None:
    """The bias p - q is right to 1e-15, and k multiplies its relative error."""
    generator = torch.Generator().manual_seed(classes)
    noise = torch.randn(2, 4, classes, generator=generator, dtype=torch.float64)
    at = torch.zeros_like(noise[0]) if uniform else noise[0]
    q, logits = at.softmax(-1).to(dtype), (at + size * noise[1]).to(dtype)
    bias = reference.loss(logits, q, 1.0, reduction="sum")[1].abs()
    for k in (0.25, 1.0, 3.0, 10.0):
        _, true = reference.loss(logits, q, k, reduction="sum")
        error = (gradient_of_loss(logits, q, k).double() - true).abs()
        allowed = true.abs() * (max(k, 1) * 1e-15 / bias + torch.finfo(dtype).eps)
        assert (error <= allowed + NEGLIGIBLE_ERROR).all()


@dtypes
def test_soft_rule_where_it_is_right_already(dtype: torch.dtype) -> None:
    """The gradient is 0 at p = q; where rounding leaves some, its two signs balance."""
    even = soft_tunable(torch.zeros(2, 4, dtype=dtype), torch.full((2, 4), 0.25, dtype=dtype), 0.5)
    assert (even == 0).all()
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(500, 7, generator=generator, dtype=dtype)
    assert_sums_to_zero(soft_tunable(logits, logits.softmax(-1), 1 / 64))


@covering(k=[1 / 64, 0.1, 0.5, 1, 3.3, 64], dtype=TOLERANCE, path=PATHS)
@pytest.mark.usefixtures("path")
def test_one_k_for_all(dtype: torch.dtype, k: float) -> None:
    rows = battery(dtype, classes=10, count=40, seed=1)
    _, gradient = reference.loss(rows.logits, rows.label, k, reduction="sum")
    for sensitivity in (k, torch.tensor(k, dtype=torch.float64)):
        assert_accurate(tunable(rows.logits, rows.label, sensitivity), gradient, TOLERANCE[dtype])
        f = gradient_of_loss(rows.logits, rows.label, sensitivity)
        assert_accurate(f, gradient, TOLERANCE[dtype])


@pytest.mark.parametrize("classes", [2, 7, 50, 1000])
@pytest.mark.usefixtures("path")
def test_float32_on_many_rows(classes: int) -> None:
    """The reference is the rule in float64, which the tests above compare to 50 digits."""
    rows = battery(torch.float32, classes, count=1_000_000 // classes, seed=2)
    in_float64 = tunable(rows.logits.double(), rows.label, rows.k.double())
    for f in (tunable(*rows), gradient_of_loss(*rows)):
        assert_accurate(f, in_float64, TOLERANCE[torch.float32])
        assert_sums_to_zero(f)


@pytest.mark.parametrize("classes", [3, 10, 100, 1000])
@pytest.mark.usefixtures("path")
def test_float32_where_errors_count_most(classes: int) -> None:
    """At even odds, k = 64 multiplies the error of log(1 - p_y), a sum of many terms."""
    generator = torch.Generator().manual_seed(classes)
    count = 3_000_000 // classes
    logits = torch.randn(count, classes, generator=generator)
    logits = logits * 3 * torch.rand(count, 1, generator=generator)
    logits = logits + 10 * torch.randn(count, 1, generator=generator)
    odds = torch.randn(count, generator=generator)
    logits[:, 0] = logits[:, 1:].logsumexp(-1) + odds
    label, k = torch.zeros(count, dtype=torch.long), torch.full((count,), 64.0)
    in_float64 = tunable(logits.double(), label, k.double())
    for f in (tunable(logits, label, k), gradient_of_loss(logits, label, k)):
        assert_accurate(f, in_float64, TOLERANCE[torch.float32])


def assert_within_an_ulp(computed: Tensor, expected: Tensor) -> None:
    assert computed.dtype == expected.dtype
    bits = [half.view(torch.int16).int() for half in (computed, expected)]
    steps = [torch.where(number < 0, -(number & 0x7FFF), number) for number in bits]
    negligible = torch.maximum(computed.abs(), expected.abs()) < NEGLIGIBLE
    assert (((steps[0] - steps[1]).abs() <= 1) | negligible).all()


@covering(dtype=HALF_TYPES, classes=[2, 10, 1000], path=PATHS)
@pytest.mark.usefixtures("path")
def test_half_types_are_float32_rounded_once(dtype: torch.dtype, classes: int) -> None:
    logits, label, k = battery(torch.float32, classes, count=500, seed=3)
    logits = logits.clamp(max=torch.finfo(dtype).max).to(dtype)
    in_float32 = tunable(logits.float(), label, k).to(dtype)
    assert torch.equal(tunable(logits, label, k), in_float32)
    assert_within_an_ulp(gradient_of_loss(logits, label, k), in_float32)
    assert_within_an_ulp(in_float32, tunable(logits.double(), label, k.double()).to(dtype))


@dtypes
@pytest.mark.usefixtures("path")
def test_the_lowest_logit_is_right_where_there_is_no_other(dtype: torch.dtype) -> None:
    """The lowest finite number, with all other classes masked, is like any other number."""
    label = torch.tensor([0])
    for logit in (torch.finfo(dtype).min, 0.0):
        for row in ([logit], [logit, -math.inf]):
            logits = torch.tensor([row], dtype=dtype)
            assert tunable_cross_entropy(logits, label, k=0.5).item() == 0
            assert tunable(logits, label, 0.5).tolist() == [[0.0] * len(row)]


def test_battery_reaches_its_corners() -> None:
    """It contains both ends of every range that it promises."""
    for dtype, classes in itertools.product(TOLERANCE, EXAMPLES_OF_CLASSES):
        rows, value, gradient = truth(dtype, classes)
        assert rows.k.min() == 1 / 64
        assert rows.k.max() == 64
        assert rows.logits.isneginf().any()
        finite = rows.logits.masked_fill(rows.logits.isneginf(), 0)
        assert finite.abs().max() > 1e3
        assert value.max() > 100
        assert (value < 1e-3).any()
        assert (gradient.abs() < NEGLIGIBLE).any()
