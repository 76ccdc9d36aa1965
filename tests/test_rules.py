"""The framework of Eq. 2 and 3, and the alternatives that the paper rejects."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from pseudograd import RuleCrossEntropyLoss, rules
from pseudograd.rules import Rule
from pseudograd.rules.properties import finite, random_examples

Loss = Callable[[Tensor], Tensor]  # of log p_y


def gradient(loss: Loss, logits: Tensor, label: Tensor) -> Tensor:
    """Autograd's gradient of a loss that is a function of log p_y."""
    logits = logits.clone().requires_grad_()
    log_p = logits.log_softmax(-1).gather(-1, label.unsqueeze(-1))
    (result,) = torch.autograd.grad(loss(log_p).sum(), logits)
    return result


def focal_loss(gamma: float) -> Loss:
    return lambda log_p: -((-log_p.expm1()) ** gamma) * log_p


def power_of_log_loss(k: float) -> Loss:
    return lambda log_p: (-log_p) ** k


def log_of_power_loss(k: float) -> Loss:
    return lambda log_p: -k * log_p


def generalized_loss(q: float) -> Loss:
    return lambda log_p: (1 - (q * log_p).exp()) / q


FAMILIES: dict[str, tuple[Callable[..., Tensor], Callable[[float], Loss], tuple[float, ...]]] = {
    "power_of_log": (rules.power_of_log, power_of_log_loss, (0.25, 1.0, 4.0)),
    "log_of_power": (rules.log_of_power, log_of_power_loss, (0.25, 1.0, 4.0)),
    "focal": (rules.focal, focal_loss, (0.0, 0.5, 2.0, 5.0)),
    "generalized_cross_entropy": (
        rules.generalized_cross_entropy,
        generalized_loss,
        (0.1, 0.7, 1.0),
    ),
}


def with_parameter(rule: Callable[..., Tensor], value: float) -> Rule:
    return lambda logits, label: rule(logits, label, value)


RULES_AND_LOSSES: dict[str, tuple[Rule, Loss]] = {
    "cross_entropy": (rules.cross_entropy, log_of_power_loss(1.0)),
    "bias": (rules.bias, log_of_power_loss(1.0)),
    "from_bias": (rules.from_bias(lambda bias, y: bias), log_of_power_loss(1.0)),
    **{
        f"{name} {value}": (with_parameter(rule, value), loss(value))
        for name, (rule, loss, values) in FAMILIES.items()
        for value in values
    },
}
LIMITS: dict[str, Rule] = {
    "power_of_log k=1": partial(rules.power_of_log, k=1.0),
    "log_of_power k=1": partial(rules.log_of_power, k=1.0),
    "focal gamma=0": partial(rules.focal, gamma=0.0),
    "generalized_cross_entropy q=0": partial(rules.generalized_cross_entropy, q=0.0),
    "tunable k=1": partial(rules.tunable, k=1.0),
}
NOT_ABOVE_0 = (0.0, -1.0, math.nan, math.inf)
OUT_OF_RANGE: dict[str, tuple[Callable[..., Tensor], str, tuple[float, ...]]] = {
    "tunable": (rules.tunable, "k", NOT_ABOVE_0),
    "soft_tunable": (rules.soft_tunable, "k", NOT_ABOVE_0),
    "power_of_log": (rules.power_of_log, "k", NOT_ABOVE_0),
    "log_of_power": (rules.log_of_power, "k", NOT_ABOVE_0),
    "focal": (rules.focal, "gamma", (-3.0, math.nan, math.inf)),
    "generalized_cross_entropy": (rules.generalized_cross_entropy, "q", (-1.0, 1.1, math.nan)),
}
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
EXTREMES = [
    [1e4, -1e4, 0.0],
    [-1e4, 1e4, 1e4],
    [1e4, 1e4, 1e4],
    [5.0, -math.inf, -math.inf],
    [5.0, -math.inf, 4.0],
    [-math.inf, 1.0, 2.0],
    [60.0, 0.0, -60.0],
    [-60.0, 0.0, 60.0],
]


@pytest.mark.parametrize("name", OUT_OF_RANGE)
def test_numbers_out_of_range_are_refused(name: str) -> None:
    rule, argument, values = OUT_OF_RANGE[name]
    target = torch.full((2, 3), 1 / 3) if name == "soft_tunable" else torch.tensor([0, 1])
    for value in values:
        with pytest.raises(ValueError, match=f"^{argument} must be a .*number.*, not {value}$"):
            rule(torch.zeros(2, 3), target, value)
        with pytest.raises(ValueError, match=f"^{argument} must be"):
            torch.func.vmap(lambda z, t, v=value: rule(z, t, v))(torch.zeros(2, 3), target)
    for wrong in ("1", None, True):
        with pytest.raises(TypeError, match=f"^{argument} must be a number or a tensor, not"):
            rule(torch.zeros(2, 3), target, wrong)


@pytest.mark.parametrize("rule", [rules.tunable, rules.power_of_log, rules.log_of_power])
def test_values_of_a_tensor_k_are_not_read(rule: Callable[..., Tensor]) -> None:
    """It may be on a GPU, or being traced."""
    logits, label, ks = torch.zeros(2, 3), torch.tensor([0, 1]), torch.tensor([0.5, 2.0])
    assert rule(logits.to("meta"), label.to("meta"), torch.tensor(0.5, device="meta")).is_meta
    of_each = torch.func.vmap(rule)(logits, label, ks)
    assert torch.equal(of_each[1], rule(logits[1], label[1], 2.0))
    traced = make_fx(rule)(logits, label, torch.tensor(0.5))
    assert torch.equal(traced(logits, label, ks[1]), rule(logits, label, 2.0))
    compiled = torch.compile(rule, backend="eager", fullgraph=True)
    assert torch.equal(compiled(logits, label, ks[1]), rule(logits, label, 2.0))


@pytest.mark.parametrize("name", RULES_AND_LOSSES)
def test_rule_is_the_gradient_of_its_loss(name: str) -> None:
    rule, loss = RULES_AND_LOSSES[name]
    for classes in (2, 3, 20):
        logits, label = random_examples(count=100, classes=classes)
        torch.testing.assert_close(
            rule(logits, label), gradient(loss, logits, label), rtol=1e-9, atol=1e-14
        )


@pytest.mark.parametrize("name", RULES_AND_LOSSES)
def test_rule_is_finite(name: str) -> None:
    finding = finite(RULES_AND_LOSSES[name][0])
    assert finding.holds, finding


@pytest.mark.parametrize("name", LIMITS)
def test_limit_is_cross_entropy_exactly(name: str, subtests: pytest.Subtests) -> None:
    wide, label = random_examples(spread=20.0)
    wide = torch.cat((wide[:, :3], torch.tensor(EXTREMES, dtype=torch.float64)))
    label = torch.cat((label % 3, torch.zeros(len(EXTREMES), dtype=torch.long)))
    for dtype in DTYPES:
        with subtests.test(dtype=dtype):
            logits = wide.to(dtype)
            assert torch.equal(LIMITS[name](logits, label), rules.cross_entropy(logits, label))


@pytest.mark.parametrize("name", RULES_AND_LOSSES)
def test_finite_at_extreme_logits(name: str, subtests: pytest.Subtests) -> None:
    """Except where the true value is beyond the dtype's range, as |log p_y|^4 can be."""
    rule, _ = RULES_AND_LOSSES[name]
    label = torch.zeros(len(EXTREMES), dtype=torch.long)
    in_float64 = rule(torch.tensor(EXTREMES, dtype=torch.float64), label)
    assert in_float64.isfinite().all() or name == "power_of_log 4.0"
    for dtype in DTYPES:
        with subtests.test(dtype=dtype):
            f = rule(torch.tensor(EXTREMES, dtype=dtype), label)
            assert f.dtype == dtype
            assert not f.isnan().any()
            assert (f.isfinite() | (in_float64.abs() > torch.finfo(dtype).max)).all()


@pytest.mark.parametrize("name", RULES_AND_LOSSES)
def test_any_leading_shape(name: str) -> None:
    rule, _ = RULES_AND_LOSSES[name]
    logits, label = random_examples(count=24, classes=5)
    flat = rule(logits, label)
    assert torch.equal(rule(logits[0], label[0]), flat[0])
    assert torch.equal(
        rule(logits.reshape(2, 3, 4, 5), label.reshape(2, 3, 4)), flat.reshape(2, 3, 4, 5)
    )


def test_from_bias_hands_on_the_bias_and_the_label() -> None:
    logits, label = random_examples(count=10, classes=4)
    seen: list[Tensor] = []

    def f(bias: Tensor, y: Tensor) -> Tensor:
        seen.extend((bias, y))
        return 2 * bias.clamp(max=0)

    result = rules.from_bias(f)(logits, label)
    expected = logits.softmax(-1) - F.one_hot(label, 4)
    torch.testing.assert_close(seen[0], expected)
    assert torch.equal(seen[1], label)
    torch.testing.assert_close(result, 2 * expected.clamp(max=0))


def clamped(bias: Tensor, y: Tensor) -> Tensor:
    return bias.clamp(-0.3, 0.3)


def test_from_bias_can_be_pickled() -> None:
    """If its function has a name; so can a loss with this rule."""
    rule = rules.from_bias(clamped)
    assert repr(rule) == "from_bias(clamped)"
    logits, label = random_examples(count=10, classes=4)
    criterion = RuleCrossEntropyLoss(rule, reduction="sum")
    for other in (pickle.loads(pickle.dumps(criterion)), copy.deepcopy(criterion)):
        assert other.rule == rule  # so that `torch.compile` has one graph for both
        assert other._name == criterion._name
        assert torch.equal(other.rule(logits, label), rule(logits, label))
        leaf = logits.clone().requires_grad_()
        other(leaf, label).backward()
        assert leaf.grad is not None
        torch.testing.assert_close(leaf.grad, rule(logits, label))


def test_from_bias_is_of_a_function() -> None:
    said = "f must be a function of the biases and the labels, not "
    with pytest.raises(TypeError, match=said + "3"):
        rules.from_bias(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=said + "<function"):
        rules.from_bias(lambda bias: bias)  # type: ignore[arg-type, misc]
    rules.from_bias(torch.sub)  # its signature is unknown to Python


def test_paper_rule_is_a_function_of_the_bias() -> None:
    """Eq. 5, written by a user in the framework of Eq. 3."""

    def f(bias: Tensor, y: Tensor, k: float = 0.5) -> Tensor:
        off_label = bias.clamp(min=0) ** k
        size = bias.gather(-1, y.unsqueeze(-1)).abs() ** k
        return (size * off_label / off_label.sum(-1, keepdim=True)).scatter(
            -1, y.unsqueeze(-1), -size
        )

    logits, label = random_examples(spread=1.0)
    torch.testing.assert_close(
        rules.from_bias(f)(logits, label), rules.tunable(logits, label, 0.5), rtol=1e-9, atol=0
    )


def test_bias_keeps_what_softmax_minus_one_loses() -> None:
    logits, label = torch.tensor([[40.0, 0.0], [90.0, 0.0]]), torch.tensor([0, 0])
    f = rules.bias(logits, label)
    torch.testing.assert_close(f[:, 1], torch.tensor([-40.0, -90.0]).exp(), rtol=1e-5, atol=0)
    assert torch.equal(f[:, 0], -f[:, 1])


class TestTheArgumentAgainstTheNaiveAlternatives:
    """Section 3 of the paper; p_y is set by the logit of one of two classes."""

    sensitivities = (0.25, 0.5, 1.0, 2.0, 4.0)

    def sizes(self, rule: Callable[..., Tensor], p: float) -> list[float]:
        logits = torch.tensor([math.log(p / (1 - p)), 0.0], dtype=torch.float64)
        return [-float(rule(logits, torch.tensor(0), k)[0]) for k in self.sensitivities]

    @pytest.mark.parametrize("p", [0.5, 0.7, 0.9])
    def test_power_of_log_is_not_monotone_in_k_for_fixed_p(self, p: float) -> None:
        steps = torch.tensor(self.sizes(rules.power_of_log, p)).diff()
        assert (steps > 0).any()
        assert (steps < 0).any()

    @pytest.mark.parametrize("p", [0.01, 0.3, 0.5, 0.7, 0.99])
    def test_paper_rule_is(self, p: float) -> None:
        assert (torch.tensor(self.sizes(rules.tunable, p)).diff() < 0).all()

    def test_power_of_log_grows_without_bound_for_confident_right_examples(self) -> None:
        """For k < 1 an almost certain example pulls harder, per bias, than an unsure one."""
        almost, unsure = (self.sizes(rules.power_of_log, p)[0] for p in (1 - 1e-9, 0.5))
        relative_to_bias = (almost / 1e-9, unsure / 0.5)
        assert relative_to_bias[0] > 1e3 * relative_to_bias[1]

    def test_log_of_power_only_rescales(self) -> None:
        logits, label = random_examples()
        for k in self.sensitivities:
            expected = k * rules.cross_entropy(logits, label)
            torch.testing.assert_close(rules.log_of_power(logits, label, k), expected)
        ratio = torch.tensor([self.sizes(rules.log_of_power, p) for p in (0.1, 0.9)])
        assert torch.allclose(ratio[0] / ratio[1], torch.tensor(9.0))  # whatever k is

    def test_paper_rule_changes_the_ratio_of_large_to_small_errors(self) -> None:
        large, small = (torch.tensor(self.sizes(rules.tunable, p)) for p in (0.1, 0.9))
        expected = 9.0 ** torch.tensor(self.sensitivities)
        torch.testing.assert_close(large / small, expected)


@pytest.mark.parametrize("name", RULES_AND_LOSSES)
def test_half_types_are_float32_rounded_once(name: str) -> None:
    rule, _ = RULES_AND_LOSSES[name]
    wide, label = random_examples(count=200, classes=6)
    for logits in (wide.half(), wide.bfloat16()):
        rounded = rule(logits.float(), label).to(logits.dtype)
        assert torch.equal(rule(logits, label), rounded)


ALL_RULES: dict[str, Callable[..., Tensor]] = {
    "tunable": rules.tunable,
    "bias": rules.bias,
    "cross_entropy": rules.cross_entropy,
    "focal": rules.focal,
    "power_of_log": rules.power_of_log,
    "of the bias": rules.from_bias(lambda bias, y: bias**3),
}
WRONG_LABELS = {
    "too few": torch.tensor([0, 1]),
    "too many": torch.tensor([0, 1, 2, 0]),
    "a column": torch.tensor([[0], [1], [2]]),
    "one": torch.tensor(0),
}


@pytest.mark.parametrize("rule", ALL_RULES)
def test_labels_of_another_shape_are_refused(rule: str, subtests: pytest.Subtests) -> None:
    """Too few used to be taken for the first rows, which left the others without a label."""
    said = r"^target must have one label for each row"
    for name, labels in WRONG_LABELS.items():
        with subtests.test(name), pytest.raises(ValueError, match=said):
            ALL_RULES[rule](torch.zeros(3, 4), labels)


def test_invalid_labels_are_refused() -> None:
    with pytest.raises(TypeError, match=r"^target must hold class indices, not torch.float32"):
        rules.tunable(torch.zeros(3, 4), torch.zeros(3))
    with pytest.raises(ValueError, match=r"^target must hold class probabilities of the shape"):
        rules.soft_tunable(torch.zeros(3, 4), torch.zeros(2, 4))


@pytest.mark.parametrize("rule", ALL_RULES)
def test_labels_out_of_range_are_refused(rule: str) -> None:
    for label in (-1, 4):
        said = f"^target holds the class index {label}, .* 4 classes"
        with pytest.raises(IndexError, match=said):
            ALL_RULES[rule](torch.zeros(3, 4), torch.tensor([0, label, 1]))


def test_logits_that_are_not_floating_point_are_refused() -> None:
    """Integer logits with class probabilities used to give zeros."""
    y, q = torch.tensor([0, 1, 2]), torch.full((3, 4), 0.25)
    for rule, target in ((rules.tunable, y), (rules.focal, y), (rules.soft_tunable, q)):
        whole: Any = torch.zeros(3, 4, dtype=torch.long)
        with pytest.raises(TypeError, match=r"^logits must hold floating-point numbers, not"):
            rule(whole, target)
        with pytest.raises(TypeError, match=r"^logits must be a tensor, not list"):
            rule(whole.tolist(), target)


@pytest.mark.parametrize("name", ["tunable", "soft_tunable", "power_of_log", "log_of_power"])
def test_a_wrong_tensor_k_is_refused(name: str, subtests: pytest.Subtests) -> None:
    z, y = torch.zeros(3, 4), torch.tensor([0, 1, 2])
    target = z.softmax(-1) if name == "soft_tunable" else y
    for number in NOT_ABOVE_0:
        for k in (torch.tensor(number), torch.tensor([1.0, number, 1.0])):
            with (
                subtests.test(k=k),
                pytest.raises(ValueError, match=r"^k must be finite and above 0"),
            ):
                getattr(rules, name)(z, target, k)


def test_a_wrong_k_is_nan_where_it_cannot_be_read() -> None:
    f = torch.func.vmap(lambda z, y, k: rules.tunable(z, y, k))(
        torch.zeros(2, 4), torch.tensor([0, 1]), torch.tensor([0.5, -1.0])
    )
    assert f[0].isfinite().all()
    assert f[1].isnan().all()


def test_k_of_another_shape_is_refused() -> None:
    """One per class, with a single row, would give one row per class."""
    with pytest.raises(ValueError, match=r"^k must be a number or have one value for each row"):
        rules.tunable(torch.zeros(1, 4), torch.tensor([0]), torch.ones(4))
