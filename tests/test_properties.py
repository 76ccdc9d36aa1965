"""What the checks of a rule report, for rules that pass and rules that fail; Lemma 1."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from pseudograd.rules import (
    Reweighted,
    Rule,
    cross_entropy,
    focal,
    from_bias,
    generalized_cross_entropy,
    log_of_power,
    power_of_log,
    tunable,
)
from pseudograd.rules.properties import (
    Finding,
    finite,
    integrable,
    monotone,
    random_examples,
    sign,
    zero_sum,
)

SENSITIVITIES = (1 / 16, 0.5, 1.0, 2.0, 4.0)
PAPER_RULES: dict[str, Rule] = {f"k={k}": partial(tunable, k=k) for k in SENSITIVITIES}
LOSSES: dict[str, Rule] = {
    "cross_entropy": cross_entropy,
    "power_of_log": partial(power_of_log, k=0.5),
    "log_of_power": partial(log_of_power, k=3.0),
    "focal": focal,
    "generalized_cross_entropy": generalized_cross_entropy,
}


def example(logits: list[float], label: int) -> tuple[Tensor, Tensor]:
    return torch.tensor([logits], dtype=torch.float64), torch.tensor([label])


def of_bias(f: Tensor) -> Rule:
    """Return a rule that gives ``f`` for any logits."""
    return lambda logits, label: f.to(logits).expand_as(logits)


def assert_at(finding: Finding, logits: Tensor, label: int, classes: tuple[int, ...]) -> None:
    torch.testing.assert_close(finding.logits, logits)
    assert finding.label == label
    assert finding.classes == classes


def test_paper_rule_has_what_section_4_asks_for(subtests: pytest.Subtests) -> None:
    for classes in (2, 3, 10):
        for name in PAPER_RULES:
            with subtests.test(classes=classes, name=name):
                examples = random_examples(classes=classes)
                for check, title in (
                    (sign, "sign"),
                    (zero_sum, "zero sum"),
                    (monotone, "monotone"),
                ):
                    finding = check(PAPER_RULES[name], examples)
                    assert finding.holds, finding
                    assert finding.name == title
                    assert 0 <= finding.violation <= 1e-12


@pytest.mark.parametrize("check", [sign, zero_sum, monotone, finite])
def test_a_rule_is_judged_in_float64(check: Callable[..., Finding]) -> None:
    """Float32 examples are converted, so that rounding does not count."""
    z, y = random_examples(classes=10)
    finding = check(PAPER_RULES["k=0.5"], (z.float(), y))
    assert finding.holds
    assert finding.logits.dtype == torch.float64


@pytest.mark.parametrize("check", [sign, zero_sum, monotone, integrable, finite])
def test_a_rule_gives_a_number_for_each_class(check: Callable[..., Finding]) -> None:
    said = "rule must return a tensor of the shape of the logits, "
    with pytest.raises(TypeError, match=f"^{said}not NoneType"):
        check(lambda z, y: None)
    with pytest.raises(ValueError, match=rf"^{said}\(\d+, 5\), not \(\d+,\)"):
        check(lambda z, y: z.sum(-1))


def scaled(rule: Rule, scale: float, logits: Tensor, label: Tensor) -> Tensor:
    return scale * rule(logits, label)


def test_a_multiple_of_a_rule_is_judged_as_the_rule_is(subtests: pytest.Subtests) -> None:
    cubed = from_bias(lambda bias, y: bias**3)
    checks: tuple[Callable[..., Finding], ...] = (sign, zero_sum, monotone, integrable)
    for check, rule in itertools.product(checks, (*PAPER_RULES.values(), *LOSSES.values(), cubed)):
        holds = check(rule).holds
        for scale in (1e-200, 1e-12, 1e9, 1e200):
            with subtests.test(check=check.__name__, rule=rule, scale=scale):
                assert check(partial(scaled, rule, scale)).holds == holds


def plainly_written(z: Tensor, y: Tensor) -> Tensor:
    """Return cross-entropy's gradient, inexact where the label is almost certain."""
    return z.softmax(-1) - (torch.arange(z.shape[-1]) == y.unsqueeze(-1)).to(z)


@pytest.mark.parametrize("check", [monotone, integrable])
def test_rounding_is_no_violation(check: Callable[..., Finding]) -> None:
    assert check(plainly_written, random_examples(spread=10.0)).holds


@pytest.mark.parametrize("check", [monotone, integrable, finite])
@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_nan_is_found(check: Callable[..., Finding], wrong: float) -> None:
    z, y = random_examples(count=3)

    def rule(logits: Tensor, label: Tensor) -> Tensor:
        there = (logits == z[1]).sum(-1, keepdim=True) >= 4  # even with its label raised
        return torch.where(there, wrong, 1.0) * cross_entropy(logits, label)

    finding = check(rule, (z, y))
    assert not finding.holds
    assert_at(finding, z[1], int(y[1]), finding.classes)


def test_a_rule_that_is_no_number_far_away_only() -> None:
    def rule(logits: Tensor, label: Tensor) -> Tensor:
        far = logits.amax(-1, keepdim=True) > 9
        return torch.where(far, math.nan, cross_entropy(logits, label))

    assert not monotone(rule, example([0.0, 1.0, 2.0], 0)).holds


class TestSign:
    def test_wrong_on_the_label(self) -> None:
        examples = torch.zeros(2, 3, dtype=torch.float64), torch.tensor([0, 2])
        finding = sign(of_bias(torch.tensor([-2.0, 1.0, 0.5])), examples)
        assert not finding.holds
        # Example 0 is right everywhere; example 1 has +0.5 on its label and -2 off it.
        assert finding.violation == 2.0
        assert_at(finding, examples[0][1], label=2, classes=(0,))

    def test_wrong_off_the_label(self) -> None:
        finding = sign(of_bias(torch.tensor([-1.0, 0.2, -0.7])), example([3.0, 2.0, 1.0], 0))
        assert not finding.holds
        assert finding.violation == pytest.approx(0.7)
        assert_at(finding, torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64), 0, (2,))

    def test_nan_is_no_sign(self) -> None:
        finding = sign(of_bias(torch.tensor([-1.0, math.nan, 1.0])), example([3.0, 2.0, 1.0], 0))
        assert not finding.holds
        assert finding.classes == (1,)


class TestZeroSum:
    def test_a_plain_power_violates_it(self) -> None:
        """The normalizer of Eq. 5 is there for this: |ε|^k alone does not sum to zero."""
        rule = from_bias(lambda bias, y: bias.sign() * bias.abs() ** 0.5)
        assert not zero_sum(rule).holds
        assert zero_sum(rule, random_examples(classes=2)).holds

    def test_reports_the_sum_relative_to_the_largest_entry(self) -> None:
        logits = torch.zeros(2, 3, dtype=torch.float64)
        logits[1] = 1.0

        def rule(z: Tensor, y: Tensor) -> Tensor:
            return torch.tensor([[-4.0, 2.0, 2.0], [-4.0, 1.0, 2.0]], dtype=z.dtype)

        finding = zero_sum(rule, (logits, torch.tensor([0, 0])))
        assert not finding.holds
        assert finding.violation == 0.25
        assert_at(finding, logits[1], label=0, classes=(0, 1, 2))

    def test_tolerance(self) -> None:
        almost = of_bias(torch.tensor([-1.0, 0.5, 0.499]))
        assert not zero_sum(almost, example([0.0] * 3, 0)).holds
        assert zero_sum(almost, example([0.0] * 3, 0), tolerance=0.01).holds


class TestMonotone:
    def test_within_an_example(self) -> None:
        """Class 1 has a smaller bias than class 2, but a larger f."""
        rule = of_bias(torch.tensor([-1.0, 0.7, 0.3]))
        finding = monotone(rule, example([0.0, 1.0, 2.0], 0))
        assert not finding.holds
        assert finding.violation == pytest.approx(0.4)
        assert_at(finding, torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64), 0, (1, 2))

    def test_across_examples(self) -> None:
        """Generalized cross-entropy gives up on the worst mistakes: |f_y| = p^q (1 - p)."""
        finding = monotone(partial(generalized_cross_entropy, q=1.0), example([0.0, 0.0], 0))
        assert not finding.holds
        assert finding.classes == (0,)
        assert finding.label == 0
        p, before = (
            (finding.logits - torch.tensor([step, 0.0])).softmax(-1)[0].item() for step in (0, 0.5)
        )
        largest = 0.25  # at p = 1/2
        grown = p * (1 - p) - before * (1 - before)
        assert finding.violation == pytest.approx(grown / largest)
        assert p < 0.5

    def test_rules_that_hold(self) -> None:
        for rule in (cross_entropy, partial(log_of_power, k=3.0), partial(power_of_log, k=2.0)):
            assert monotone(rule).holds


class TestIntegrable:
    def test_gradients_are(self, subtests: pytest.Subtests) -> None:
        for classes in (2, 3, 10):
            for name in LOSSES:
                with subtests.test(classes=classes, name=name):
                    finding = integrable(LOSSES[name], random_examples(classes=classes))
                    assert finding.name == "integrable"
                    assert finding.holds, finding

    def test_a_rotation_is_not(self) -> None:
        """f = (z_1, -z_0, 0): ∂f_0/∂z_1 - ∂f_1/∂z_0 = 2 everywhere, between classes 0 and 1."""

        def rotation(z: Tensor, y: Tensor) -> Tensor:
            return torch.stack((z[:, 1], -z[:, 0], torch.zeros_like(z[:, 0])), -1)

        finding = integrable(rotation, example([1.0, 2.0, 3.0], 1))
        assert not finding.holds
        assert finding.violation == pytest.approx(2.0)
        assert finding.classes == (0, 1)

    def test_a_rule_may_use_all_of_pytorch(self) -> None:
        """`torch.func.vmap` supports neither `one_hot` nor a value that Python reads."""

        def plain(z: Tensor, y: Tensor) -> Tensor:
            scale = 2.0 if z.max() > 0 else 1.0
            return scale * (z.softmax(-1) - torch.nn.functional.one_hot(y, z.shape[-1]))

        assert integrable(plain).holds
        assert not integrable(lambda z, y: plain(z, y) ** 3).holds
        with torch.no_grad():
            assert integrable(plain).holds


@Reweighted
def jensen_shannon(cross_entropy: Tensor) -> Tensor:
    """The factor of the Jensen-Shannon divergence, as one would first write it."""
    p = torch.exp(-cross_entropy)
    return p / 2 * torch.log((1 + p) / p)


class TestFinite:
    @pytest.mark.parametrize("name", PAPER_RULES | LOSSES)
    def test_rules_that_are(self, name: str) -> None:
        finding = finite((PAPER_RULES | LOSSES)[name])
        assert finding.holds, finding
        assert finding.name == "finite"
        assert finding.violation == 0

    def test_a_factor_that_is_nan_where_the_label_is_hopeless(self) -> None:
        """It has all other properties on examples that are not extreme."""
        for check in (sign, zero_sum, integrable):
            assert check(jensen_shannon).holds
        finding = finite(jensen_shannon)
        assert not finding.holds
        assert math.isnan(finding.violation)
        assert finding.logits.softmax(-1)[finding.label] == 0

    def test_a_mask(self) -> None:
        """A sum over classes meets the infinite logit of a masked one."""
        finding = finite(lambda z, y: cross_entropy(z, y) * z.mean(-1, keepdim=True))
        assert not finding.holds
        assert finding.logits.isinf().any()

    def test_overflow_in_float32_alone(self) -> None:
        def rule(z: Tensor, y: Tensor) -> Tensor:
            powers = (z / 2).exp()
            return powers / powers.sum(-1, keepdim=True)

        assert rule(torch.tensor([[1000.0, 0.0]]).double(), torch.tensor([0])).isfinite().all()
        finding = finite(rule, example([1000.0, 0.0], 0))
        assert not finding.holds
        assert_at(finding, torch.tensor([1000.0, 0.0], dtype=torch.float64), 0, (0,))


class TestLemma1:
    """Three classes, the label the first: the counter-example of the proof."""

    logits = (0.3, 1.1, -0.4)

    def sides(self, k: float) -> tuple[float, float]:
        """Return the derivatives that the proof compares, for h(1) = 1: ∂f_1/∂z_2, ∂f_2/∂z_1."""
        p1, p2, p3 = torch.tensor(self.logits, dtype=torch.float64).softmax(-1).tolist()
        left = -k * (1 - p1) ** (k - 1) * p1 * p2
        right = -k * p1 * p2**k * (1 - p1) ** k / (p2**k + p3**k)
        return left, right

    def condition(self, k: float) -> float:
        p1, p2, p3 = torch.tensor(self.logits, dtype=torch.float64).softmax(-1).tolist()
        return float(p2 ** (k - 1) * (1 - p1) / (p2**k + p3**k))

    def jacobian(self, k: float) -> Tensor:
        z, y = example(list(self.logits), 0)
        jacobian: Tensor = torch.func.jacrev(lambda row: tunable(row, y[0], k))(z[0])
        return jacobian

    def test_derivatives_are_those_of_the_proof(self, subtests: pytest.Subtests) -> None:
        for k in SENSITIVITIES:
            with subtests.test(k=k):
                left, right = self.sides(k)
                jacobian = self.jacobian(k)
                # ∂f_1/∂z_2 is minus the derivative of (1 - p_1)^k, in the proof as here.
                assert jacobian[0, 1].item() == pytest.approx(left, rel=1e-12)
                assert jacobian[1, 0].item() == pytest.approx(right, rel=1e-12)

    def test_no_loss_otherwise(self, subtests: pytest.Subtests) -> None:
        for k in [k for k in SENSITIVITIES if k != 1]:
            with subtests.test(k=k):
                left, right = self.sides(k)
                assert abs(self.condition(k) - 1) > 0.01
                assert right / left == pytest.approx(self.condition(k), rel=1e-12)
                finding = integrable(partial(tunable, k=k), example(list(self.logits), 0))
                assert not finding.holds
                antisymmetric = self.jacobian(k) - self.jacobian(k).T
                assert abs(antisymmetric[0, 1].item()) == pytest.approx(
                    abs(left - right), rel=1e-10
                )
                violation = finding.violation * self.jacobian(k).abs().max().item()
                assert violation == pytest.approx(antisymmetric.abs().max().item(), rel=1e-12)
                i, j = finding.classes
                assert abs(antisymmetric[i, j].item()) == pytest.approx(violation, rel=1e-12)

    def test_cross_entropy_at_k_1(self) -> None:
        assert self.condition(1.0) == pytest.approx(1.0, rel=1e-15)
        finding = integrable(partial(tunable, k=1.0), example(list(self.logits), 0))
        assert finding.holds
        assert finding.violation < 1e-15

    def test_two_classes_have_a_loss_for_every_k(self, subtests: pytest.Subtests) -> None:
        for k in SENSITIVITIES:
            with subtests.test(k=k):
                finding = integrable(partial(tunable, k=k), random_examples(classes=2))
                assert finding.holds
                assert finding.violation < 1e-13


def test_random_examples() -> None:
    logits, label = random_examples(count=1000, classes=4, spread=2.0, seed=7)
    assert logits.shape == (1000, 4)
    assert logits.dtype == torch.float64
    assert logits.std().item() == pytest.approx(2.0, rel=0.1)
    assert set(label.tolist()) == {0, 1, 2, 3}
    again, other = (random_examples(count=1000, classes=4, spread=2.0, seed=s)[0] for s in (7, 8))
    assert torch.equal(logits, again)
    assert not torch.equal(logits, other)


def test_uninformative_examples_are_refused(subtests: pytest.Subtests) -> None:
    for check in (sign, zero_sum, monotone, integrable, finite):
        for shape in ((3, 1), (0, 4), (4,), (2, 3, 4)):
            with subtests.test(check=check, shape=shape):
                examples = torch.zeros(shape), torch.zeros(shape[:-1], dtype=torch.long)
                with pytest.raises(
                    ValueError, match=r"^examples must be logits \(R, C\) of one or more"
                ):
                    check(cross_entropy, examples)


def test_examples_with_too_few_labels_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^target must have one label for each row"):
        sign(cross_entropy, (torch.zeros(3, 4), torch.tensor([0, 1])))


def test_examples_without_labels_are_refused() -> None:
    with pytest.raises(TypeError, match=r"^examples must be a pair of tensors"):
        sign(cross_entropy, torch.zeros(2, 4))  # type: ignore[arg-type]


DETACHED: dict[str, Rule] = {
    "whole": lambda z, y: tunable(z, y, 0.5).detach(),
    "logits": lambda z, y: tunable(z.detach(), y, 0.5),
    "a factor": lambda z, y: cross_entropy(z, y) * cross_entropy(z, y).abs().detach(),
}


@pytest.mark.parametrize("rule", DETACHED)
def test_a_detached_rule_raises(rule: str) -> None:
    """Its Jacobian is partly or entirely 0, so it may be symmetric by accident."""
    with pytest.raises(ValueError, match=r"^rule must consist of differentiable operations"):
        integrable(DETACHED[rule])


def test_constants_and_kinks_are_differentiable() -> None:
    assert integrable(lambda z, y: torch.ones_like(z)).holds
    assert not integrable(from_bias(lambda bias, y: bias.clamp(-0.3, 0.3))).holds
