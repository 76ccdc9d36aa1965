"""Rules of the form factor(-log p_y) · ε: right on every route of the loss, and easy to add."""

from __future__ import annotations

import copy
import importlib
import math
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import mpmath as mp
import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap

import reference
from covering import covering
from kernels import needs
from pseudograd import RuleCrossEntropyLoss
from pseudograd.loss import cpu, functional
from pseudograd.rules import (
    Reweighted,
    Rule,
    focal,
    generalized_cross_entropy,
    log_of_power,
    power_of_log,
    properties,
    symmetric_cross_entropy,
)

pytestmark = pytest.mark.usefixtures("one_thread")
Route = Callable[[RuleCrossEntropyLoss, Tensor, Tensor], Tensor]


@Reweighted
def poly1(cross_entropy: Tensor, a: float | Tensor = 1.0) -> Tensor:
    """A rule as users would write it: PolyLoss (Leng et al., 2022), -log p_y + a (1 - p_y)."""
    return 1 + a * torch.exp(-cross_entropy)


def scaled(cross_entropy: Tensor) -> Tensor:
    return 3 * torch.ones_like(cross_entropy)


def focal_factor(c: mp.mpf, gamma: float) -> mp.mpf:
    rest, p = -mp.expm1(-c), mp.exp(-c)
    return rest**gamma + gamma * p * rest ** (gamma - 1) * c


IMPLEMENTATIONS = ("auto", "torch", "triton")
RULES: dict[str, tuple[Rule, Callable[[mp.mpf], mp.mpf]]] = {
    "focal": (focal, lambda c: focal_factor(c, 2)),
    "focal 0.5": (partial(focal, gamma=0.5), lambda c: focal_factor(c, 0.5)),
    "generalized": (generalized_cross_entropy, lambda c: mp.exp(-mp.mpf(0.7) * c)),
    "power of log 0.25": (partial(power_of_log, k=0.25), lambda c: 0.25 * c ** mp.mpf(-0.75)),
    "power of log 3": (partial(power_of_log, k=3), lambda c: 3 * c**2),
    "log of power": (partial(log_of_power, k=2.5), lambda c: mp.mpf(2.5)),
    "symmetric": (symmetric_cross_entropy, lambda c: mp.mpf("0.1") + 4 * mp.exp(-c)),
    "a user's": (partial(poly1, a=2.0), lambda c: 1 + 2 * mp.exp(-c)),
}


def examples() -> tuple[Tensor, Tensor]:
    """Return labels with probabilities from about 1 - e^-25 to e^-54."""
    generator = torch.Generator().manual_seed(0)
    gaps = torch.tensor([0.01, 1.0, 10.0, 30.0]).repeat(3).unsqueeze(1)
    logits = gaps * torch.randn(12, 5, generator=generator)
    target = torch.randint(5, (12,), generator=generator)
    logits[7, target[7]] += 20
    return logits, target


def differentiate(loss: Callable[..., Tensor], logits: Tensor, target: Tensor) -> Tensor:
    leaf = logits.detach().clone().requires_grad_()
    (result,) = torch.autograd.grad(loss(leaf, target).sum(), leaf)
    return result


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    torch.compiler.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def exported(criterion: RuleCrossEntropyLoss, logits: Tensor, target: Tensor) -> Tensor:
    module = torch.export.export(criterion, (logits, target)).module()
    return differentiate(module, logits, target)


ROUTES: dict[str, Route] = {
    "eager": differentiate,
    "vmap": lambda criterion, z, y: differentiate(vmap(criterion), z, y),
    "vmap(grad)": lambda criterion, z, y: vmap(grad(criterion))(z, y),
    "compile": lambda criterion, z, y: differentiate(compiled(criterion), z, y),
    "compile(vmap(grad))": lambda criterion, z, y: compiled(vmap(grad(criterion)))(z, y),
    "export": exported,
}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_every_rule(implementation: str, subtests: pytest.Subtests) -> None:
    needs(implementation)
    for rule in RULES:
        with subtests.test(rule):
            assert_right(rule, "eager", implementation)


@covering(rule=["focal", "symmetric", "a user's"], route=ROUTES, implementation=IMPLEMENTATIONS)
def test_every_route(rule: str, route: str, implementation: str) -> None:
    needs(implementation)
    assert_right(rule, route, implementation)


def assert_right(rule: str, route: str, implementation: str) -> None:
    logits, target = examples()
    function, factor = RULES[rule]
    criterion = RuleCrossEntropyLoss(function, reduction="sum", implementation=implementation)
    true = torch.tensor(
        [
            reference.reweighted(row, y, factor)
            for row, y in zip(logits.tolist(), target.tolist(), strict=True)
        ],
        dtype=torch.float64,
    )
    gradient = ROUTES[route](criterion, logits, target)
    torch.testing.assert_close(gradient.double(), true, rtol=1e-5, atol=1e-25)
    value = criterion(logits, target)
    torch.testing.assert_close(value, torch.nn.functional.cross_entropy(logits, target) * 12)


@covering(
    reduction=["mean", "sum", "none"],
    dtype=[torch.float32, torch.bfloat16, torch.float64],
    implementation=IMPLEMENTATIONS,
)
def test_weights_ignored_labels_and_shapes(
    reduction: str, dtype: torch.dtype, implementation: str
) -> None:
    """Equal to the same rule as a plain function."""
    if implementation == "triton":
        pytest.importorskip("triton")
        if dtype == torch.float64:
            pytest.skip("no kernel for float64")
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(2, 4, 3, generator=generator)).to(dtype)
    logits[1, :, 1] = math.nan
    target = torch.tensor([[0, 3, -100], [2, -100, 1]])
    settings: dict[str, Any] = {
        "weight": torch.linspace(0.5, 2, 4, dtype=dtype),
        "reduction": reduction,
    }
    fast = RuleCrossEntropyLoss(focal, implementation=implementation, **settings)
    plain = RuleCrossEntropyLoss(lambda z, y: focal(z, y), **settings)
    eps = torch.finfo(dtype).eps
    values = fast(logits, target), plain(logits, target)
    assert values[0].dtype == dtype
    torch.testing.assert_close(*values, rtol=4 * eps, atol=4 * eps)
    gradients = [differentiate(criterion, logits, target) for criterion in (fast, plain)]
    assert gradients[0].dtype == dtype
    torch.testing.assert_close(*gradients, rtol=4 * eps, atol=1e-7)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_never_nan(implementation: str, subtests: pytest.Subtests) -> None:
    """For logits of any size, masked classes and scaled losses."""
    needs(implementation)
    inf = math.inf
    rows = ([1e4, 0, 0], [-1e4, 0, 0], [90, 0, 0], [3e38, -3e38, 0], [1, -inf, -inf], [1, -inf, 0])
    logits = torch.tensor([[float(z) for z in row] for row in rows])
    target = torch.zeros(len(rows), dtype=torch.long)
    for name, (rule, _) in RULES.items():
        with subtests.test(name):
            criterion = RuleCrossEntropyLoss(rule, reduction="sum", implementation=implementation)
            leaf = logits.clone().requires_grad_()
            (2.0**24 * criterion(leaf, target)).backward()
            assert leaf.grad is not None
            assert leaf.grad.isfinite().all()


@pytest.mark.parametrize("name", RULES)
def test_the_rule_itself_is_finite(name: str) -> None:
    finding = properties.finite(RULES[name][0])
    assert finding.holds, finding


def test_a_parameter_for_each_model() -> None:
    """As the fleet calls it: a column of parameters with the cross-entropies of each model."""
    surprise = torch.rand(3, 5, dtype=torch.float64)
    for rule in (focal, generalized_cross_entropy, power_of_log, log_of_power, poly1):
        each = torch.tensor([[0.25], [0.5], [1.0]], dtype=torch.float64)
        together = rule.factor(surprise, each)
        for row, value, expected in zip(surprise, each, together, strict=True):
            torch.testing.assert_close(rule.factor(row, value.item()), expected)


def test_a_parameter_for_each_example() -> None:
    logits, target = examples()
    gammas = torch.linspace(0, 3, len(logits))
    together = focal(logits, target, gammas)
    for i, gamma in enumerate(gammas.tolist()):
        torch.testing.assert_close(focal(logits[i], target[i], gamma), together[i])


@pytest.mark.parametrize("rule", [focal, poly1, partial(poly1, a=0.5), Reweighted(scaled)])
def test_rules_can_be_pickled(rule: Rule) -> None:
    logits, target = examples()
    criterion = RuleCrossEntropyLoss(rule)
    for other in (pickle.loads(pickle.dumps(criterion)), copy.deepcopy(criterion)):
        assert torch.equal(other.rule(logits, target), rule(logits, target))
        expected = differentiate(criterion, logits, target)
        assert torch.equal(differentiate(other, logits, target), expected)


def test_names_and_errors() -> None:
    assert repr(poly1) == "Reweighted(poly1)"
    assert Reweighted(scaled) == Reweighted(scaled) != poly1
    with pytest.raises(TypeError, match="factor must be a function of the cross-entropies, not 2"):
        Reweighted(2)  # type: ignore[arg-type]
    logits, target = examples()
    with pytest.raises(ValueError, match=r"gamma must be a finite number, 0 or more, not -1"):
        RuleCrossEntropyLoss(partial(focal, gamma=-1.0))(logits, target)


@pytest.mark.parametrize("factor", [lambda ce: 2.0, lambda ce: ce[:1], lambda ce: ce.sum()])
def test_a_factor_for_each_example(factor: Any) -> None:
    """The loss used to notice a wrong one in the backward pass, if at all."""
    logits, target = examples()
    rule = Reweighted(factor)
    for call in (rule, RuleCrossEntropyLoss(rule)):
        with pytest.raises(ValueError, match=r"^the factor of a Reweighted rule must return a"):
            call(logits, target)


def test_the_fast_routes_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    needs("auto")
    needs("triton")
    called: list[str] = []

    def recorded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            called.append(name)
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(cpu, "_run", recorded("cpu", cpu._run))
    operators = importlib.import_module(functional._gpu_rows().__module__)
    monkeypatch.setattr(operators, "launch", recorded("triton", operators.launch))
    logits, target = examples()
    criterion = RuleCrossEntropyLoss(focal)
    differentiate(criterion, logits, target)
    assert called == ["cpu"]
    criterion.implementation = "triton"
    for route in ("eager", "compile", "export"):
        called.clear()
        ROUTES[route](criterion, logits, target)
        assert "triton" in called
