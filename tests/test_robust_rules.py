"""Rules for noisy labels, against the losses as their authors define them."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from pseudograd import RuleCrossEntropyLoss, rules
from pseudograd.rules import Rule, properties

Loss = Callable[[Tensor, Tensor], Tensor]


def one_hot(logits: Tensor, label: Tensor) -> Tensor:
    return torch.nn.functional.one_hot(label, logits.shape[-1]).to(logits)


def reverse(logits: Tensor, label: Tensor, log_zero: float = -4.0) -> Tensor:
    """RCE of Wang et al. (2019), Eq. 5: -Σ_j p_j log q_j, with log 0 = A."""
    logs = torch.where(one_hot(logits, label) == 1, 0.0, log_zero)
    return -(logits.softmax(-1) * logs).sum(-1)


def symmetric_loss(alpha: float, beta: float) -> Loss:
    plain = partial(torch.nn.functional.cross_entropy, reduction="none")
    return lambda z, y: alpha * plain(z, y) + beta * reverse(z, y)


def active_passive_loss(alpha: float, beta: float, log_zero: float) -> Loss:
    """NCE + RCE of Ma et al. (2020), Eq. 5: each class's loss divided by the sum over classes."""

    def loss(z: Tensor, y: Tensor) -> Tensor:
        log_p = z.log_softmax(-1)
        nce = (one_hot(z, y) * log_p).sum(-1) / log_p.sum(-1)
        return alpha * nce + beta * reverse(z, y, log_zero)

    return loss


def tempered_log(x: Tensor, t: float) -> Tensor:
    return (x ** (1 - t) - 1) / (1 - t)


def bi_tempered_loss(t1: float, t2: float) -> Loss:
    """The Bregman divergence of Amid et al. (2019), Eq. 6; λ by bisection, gradients through it."""

    def probabilities(z: Tensor) -> Tensor:
        low = z.detach().amax(-1, keepdim=True)  # there the largest class already has p = 1
        high = low + (float(z.shape[-1]) ** (t2 - 1) - 1) / (t2 - 1) + 1
        for _ in range(200):
            middle = (low + high) / 2
            total = ((1 + (1 - t2) * (z.detach() - middle)) ** (1 / (1 - t2))).sum(-1, True)
            low, high = torch.where(total > 1, middle, low), torch.where(total > 1, high, middle)
        # One Newton step from the root has the root's value and its gradient.
        powers = (1 + (1 - t2) * (z - low)) ** (1 / (1 - t2))
        slope = (powers.detach() ** t2).sum(-1, True)
        root = low + (powers.sum(-1, True) - 1) / slope
        return (1 + (1 - t2) * (z - root)) ** (1 / (1 - t2))

    def loss(z: Tensor, y: Tensor) -> Tensor:
        p, q = probabilities(z), one_hot(z, y)
        first = torch.where(q > 0, q * (0 - tempered_log(p, t1)), 0)
        return (first - (q ** (2 - t1) - p ** (2 - t1)) / (2 - t1)).sum(-1)

    return loss


DEFINED: dict[str, tuple[Rule, Loss]] = {
    "symmetric": (rules.symmetric_cross_entropy, symmetric_loss(0.1, 1.0)),
    "symmetric 6, 0.1": (
        partial(rules.symmetric_cross_entropy, alpha=6.0, beta=0.1),
        symmetric_loss(6.0, 0.1),
    ),
    "nce_rce": (rules.nce_rce, active_passive_loss(1.0, 1.0, -4.0)),
    "nce_rce 10, 0.1, log 1e-4": (
        partial(rules.nce_rce, alpha=10.0, beta=0.1, log_zero=math.log(1e-4)),
        active_passive_loss(10.0, 0.1, math.log(1e-4)),
    ),
    "bi_tempered": (rules.bi_tempered, bi_tempered_loss(0.8, 1.2)),
    "bi_tempered 0.4, 1.6": (
        partial(rules.bi_tempered, t1=0.4, t2=1.6),
        bi_tempered_loss(0.4, 1.6),
    ),
    "redescending k = 1": (  # the generalized cross-entropy
        partial(rules.redescending, q=0.7, k=1.0),
        lambda z, y: (1 - z.softmax(-1).gather(-1, y.unsqueeze(-1))[..., 0] ** 0.7) / 0.7,
    ),
}


def some_logits(spread: float = 3.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = spread * torch.randn(200, 7, generator=generator, dtype=torch.float64)
    return logits, torch.randint(7, (200,), generator=generator)


@pytest.mark.parametrize("name", DEFINED)
def test_each_is_the_gradient_of_its_authors_loss(name: str) -> None:
    rule, loss = DEFINED[name]
    logits, label = some_logits()
    leaf = logits.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(leaf, label).sum(), leaf)
    torch.testing.assert_close(rule(logits, label), gradient, rtol=1e-7, atol=1e-8)


ALL: dict[str, Rule] = {**{name: rule for name, (rule, _) in DEFINED.items()}}
ALL["redescending"] = rules.redescending


@pytest.mark.parametrize("name", ALL)
def test_half_types_and_a_training_by_each(name: str) -> None:
    logits, label = some_logits()
    rounded = logits.bfloat16()
    f = ALL[name](rounded, label)
    assert f.dtype == torch.bfloat16
    torch.testing.assert_close(f, ALL[name](rounded.float(), label).bfloat16())
    leaf = logits.float().requires_grad_()
    RuleCrossEntropyLoss(ALL[name], reduction="sum")(leaf, label).backward()
    torch.testing.assert_close(leaf.grad, ALL[name](logits, label).float(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ALL)
def test_rows_sum_to_zero_and_extreme_logits_stay_finite(name: str) -> None:
    finding = properties.finite(ALL[name])
    assert finding.holds, finding
    for logits in (some_logits()[0].float(), some_logits(200.0)[0].float()):
        f = ALL[name](logits, some_logits()[1])
        assert f.isfinite().all()
        assert f.sum(-1).abs().max() < 1e-5 * f.abs().max()


def test_the_redescending_rule_is_of_the_papers_framework_and_gives_up() -> None:
    assert properties.sign(rules.redescending).holds
    assert properties.zero_sum(rules.redescending).holds
    margins = torch.tensor([[5.0, 0.0], [0.3, 0.0], [-5.0, 0.0], [-20.0, 0.0]])
    push = -rules.redescending(margins, torch.zeros(4, dtype=torch.int64))[:, 0]
    tunable = -rules.tunable(margins, torch.zeros(4, dtype=torch.int64), 0.5)[:, 0]
    assert push.argmax() == 1  # p_y = 0.7 / (0.7 + 0.5) = 0.58
    assert push[3] < 1e-5 < 0.99 < tunable[3]
    same = rules.redescending(margins, torch.zeros(4, dtype=torch.int64), q=0.0)
    assert torch.equal(same[:, 0], -tunable)


def test_wrong_parameters_are_refused() -> None:
    z, y = torch.zeros(2, 3), torch.tensor([0, 1])
    with pytest.raises(ValueError, match=r"^q must be a number in"):
        rules.redescending(z, y, q=1.5)
    with pytest.raises(ValueError, match=r"^t must be a number above 1"):
        rules.bi_tempered(z, y, t2=1.0)
    with pytest.raises(ValueError, match=r"^alpha must be a finite number"):
        rules.nce_rce(z, y, alpha=-1.0)
    with pytest.raises(ValueError, match=r"^beta must be a finite number"):
        rules.symmetric_cross_entropy(z, y, beta=-1.0)


PARAMETERS: dict[str, tuple[Callable[..., Tensor], dict[str, list[float]]]] = {
    "nce_rce": (rules.nce_rce, {"alpha": [1.0, 2.0, 0.5], "beta": [0.1, 1.0, 0.0]}),
    "bi_tempered": (rules.bi_tempered, {"t1": [0.2, 0.8, 1.0], "t2": [1.2, 2.0, 1.5]}),
    "redescending": (rules.redescending, {"q": [0.0, 0.7, 1.0], "k": [0.5, 1.0, 2.0]}),
    "symmetric": (rules.symmetric_cross_entropy, {"alpha": [1.0, 0.1, 0.0]}),
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_parameter_for_each_example(name: str) -> None:
    """With as many examples as classes, it used to be taken for one per class."""
    rule, parameters = PARAMETERS[name]
    z, y = properties.random_examples(count=3, classes=3)
    f = rule(z, y, **{key: torch.tensor(values).double() for key, values in parameters.items()})
    for row in range(3):
        of_row = {key: values[row] for key, values in parameters.items()}
        torch.testing.assert_close(
            f[row : row + 1], rule(z[row : row + 1], y[row : row + 1], **of_row)
        )


def test_a_parameter_of_another_shape_is_refused() -> None:
    z, y = properties.random_examples(count=2, classes=3)
    with pytest.raises(ValueError, match=r"^t1 must be a number or have one value for each row"):
        rules.bi_tempered(z, y, t1=torch.ones(3))
