"""Class probabilities that require a gradient get cross-entropy's, -log p, on every route."""

from __future__ import annotations

import math
import sys
import types
import unittest
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from covering import PATHS, covering
from pseudograd import TunableCrossEntropyLoss, tunable_cross_entropy

pytestmark = pytest.mark.usefixtures("one_thread")

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
Gradients = tuple[Tensor, Tensor, Tensor | None]


@cache
def samples_of() -> Any:
    """Return PyTorch's own sample inputs of cross-entropy, as a function of the dtype."""
    if "expecttest" not in sys.modules:  # a library for PyTorch's own tests
        stub: Any = types.ModuleType("expecttest")
        stub.TestCase = unittest.TestCase
        sys.modules["expecttest"] = stub
    from torch.testing._internal.common_methods_invocations import op_db

    (operator,) = (op for op in op_db if op.name == "nn.functional.cross_entropy")
    return lambda dtype: operator.sample_inputs("cpu", dtype, requires_grad=True)


def gradients(loss: Callable[..., Tensor], sample: Any, dtype: torch.dtype) -> Gradients:
    """Return the value and the gradients of the logits and, if required, of the target."""

    def converted(x: Any) -> Any:
        return x.detach().to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x

    logits, target = converted(sample.input).requires_grad_(), converted(sample.args[0])
    leaves = [logits]
    if sample.args[0].requires_grad:
        leaves.append(target.requires_grad_())
    settings = {name: converted(value) for name, value in sample.kwargs.items()}
    value = loss(logits, target, **settings)
    upstream = torch.linspace(1, 1.5, value.numel()).reshape(value.shape).to(value.dtype)
    found = torch.autograd.grad(value, leaves, upstream)
    return value.detach(), found[0], found[1] if len(found) > 1 else None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("implementation", ["auto", "torch", "triton"])
def test_at_k_1_every_sample_of_pytorch_agrees(dtype: torch.dtype, implementation: str) -> None:
    if implementation == "triton":
        pytest.importorskip("triton")
        if dtype == torch.float64:
            pytest.skip("no kernel for float64")
    wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    learned = 0
    for sample in samples_of()(dtype):
        # PyTorch rounds log p in half types, so its float32 result is the reference.
        expected = gradients(F.cross_entropy, sample, wide)
        loss = partial(tunable_cross_entropy, implementation=implementation)
        computed = gradients(loss, sample, dtype)
        eps = torch.finfo(dtype).eps
        for ours, theirs in zip(computed, expected, strict=True):
            assert (ours is None) == (theirs is None)
            if ours is not None and theirs is not None:
                assert ours.dtype == dtype
                torch.testing.assert_close(
                    ours.to(wide), theirs, rtol=20 * eps, atol=8 * eps, equal_nan=True
                )
        learned += computed[2] is not None
    assert learned == 10


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "weight and smoothing": {"weight": torch.tensor([0.5, 0.0, 2.0, 1.0]), "label_smoothing": 0.2},
    "sum": {"reduction": "sum", "label_smoothing": 0.2},
}


def example(*shape: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(shape, generator=generator)
    return logits, torch.randn(shape, generator=generator).softmax(1)


def of_both(loss: Callable[[Tensor, Tensor], Tensor], z: Tensor, q: Tensor) -> tuple[Tensor, ...]:
    z, q = z.clone().requires_grad_(), q.clone().requires_grad_()
    return torch.autograd.grad(loss(z, q).sum(), (z, q))


def compiled(function: Callable[..., Any], backend: str = "aot_eager") -> Callable[..., Any]:
    torch.compiler.reset()
    return torch.compile(function, fullgraph=True, backend=backend)


class Criterion(torch.nn.Module):
    def __init__(self, loss: Callable[..., Tensor]) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, z: Tensor, q: Tensor) -> Tensor:
        return self.loss(z, q)


def exported(loss: Callable[..., Tensor], z: Tensor, q: Tensor) -> tuple[Tensor, ...]:
    program = torch.export.export(Criterion(loss), (z, q.clone().requires_grad_()))
    return of_both(program.module(), z, q)


def of_each(loss: Callable[..., Tensor]) -> Callable[..., Any]:
    """Return the gradients of each example by itself, whose mean is over one."""
    return vmap(grad(loss, argnums=(0, 1)))


ROUTES: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    "eager": of_both,
    "grad": lambda loss, z, q: grad(loss, argnums=(0, 1))(z, q),
    "compile": lambda loss, z, q: of_both(compiled(loss), z, q),
    "compile(grad)": lambda loss, z, q: compiled(grad(loss, argnums=(0, 1)))(z, q),
    "export": exported,
}


@covering(implementation=["auto", "torch", "triton"], settings=SETTINGS, route=ROUTES, path=PATHS)
@pytest.mark.usefixtures("path")
def test_every_route(route: str, settings: str, implementation: str) -> None:
    """The target's gradient is that of cross-entropy for every k; the logits' gradient is not."""
    if implementation == "triton":
        pytest.importorskip("triton")
    z, q = example(3, 4, 2)
    loss: Any = partial(
        tunable_cross_entropy, k=0.5, implementation=implementation, **SETTINGS[settings]
    )
    at_logits, at_target = ROUTES[route](loss, z, q)
    plain, expected = of_both(partial(F.cross_entropy, **SETTINGS[settings]), z, q)
    torch.testing.assert_close(at_target, expected, rtol=1e-5, atol=1e-6)
    fixed = z.clone().requires_grad_()
    (without,) = torch.autograd.grad(loss(fixed, q), fixed)
    torch.testing.assert_close(at_logits, without, rtol=1e-4, atol=1e-6)
    assert not torch.allclose(at_logits, plain, rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("route", ["vmap", "vmap(grad)", "grad(vmap)", "compile(vmap(grad))"])
@pytest.mark.parametrize("settings", SETTINGS)
def test_under_vmap(route: str, settings: str) -> None:
    z, q = example(3, 4)
    loss: Any = partial(tunable_cross_entropy, k=0.5, **SETTINGS[settings])
    routes: dict[str, Callable[[], Any]] = {
        "vmap": lambda: of_both(vmap(loss), z, q),
        "vmap(grad)": lambda: of_each(loss)(z, q),
        "grad(vmap)": lambda: grad(lambda z, q: vmap(loss)(z, q).sum(), argnums=(0, 1))(z, q),
        "compile(vmap(grad))": lambda: compiled(of_each(loss))(z, q),
    }
    at_logits, at_target = routes[route]()
    for i in range(3):
        _, expected = of_both(partial(F.cross_entropy, **SETTINGS[settings]), z[i], q[i])
        torch.testing.assert_close(at_target[i], expected, rtol=1e-5, atol=1e-6)
        leaf = z[i].clone().requires_grad_()
        (without,) = torch.autograd.grad(loss(leaf, q[i]), leaf)
        torch.testing.assert_close(at_logits[i], without, rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("path")
def test_targets_made_by_a_network_learn() -> None:
    """As in distillation with a trainable teacher, even if only the target requires a gradient."""
    teacher = torch.nn.Linear(5, 4)
    x = torch.randn(6, 5)
    z, _ = example(6, 4)
    for logits in (z, z.clone().requires_grad_()):
        losses = (partial(tunable_cross_entropy, k=0.5), F.cross_entropy)
        ours, theirs = (
            torch.autograd.grad(loss(logits, teacher(x).softmax(-1)), teacher.weight)[0]
            for loss in losses
        )
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("path")
def test_masked_classes_and_no_weight_are_never_nan() -> None:
    z = torch.tensor([[1.0, -math.inf, 0.0], [2.0, -math.inf, -math.inf]])
    q = torch.tensor([[0.25, 0.0, 0.75], [1.0, 0.0, 0.0]], requires_grad=True)
    value = tunable_cross_entropy(z, q, k=0.5, reduction="none")
    assert value.isfinite().all()
    (gradient,) = torch.autograd.grad(value, q, torch.tensor([1.0, 0.0]))
    assert gradient[0].tolist() == pytest.approx([0.3132617, math.inf, 1.3132617])
    assert (gradient[1] == 0).all()
    weight = torch.tensor([1.0, 0.0, 1.0])
    (gradient,) = torch.autograd.grad(tunable_cross_entropy(z[:1], q[:1], weight=weight), q)
    assert gradient.isfinite().all()
    (gradient,) = torch.autograd.grad(tunable_cross_entropy(z, q, label_smoothing=1.0), q)
    assert (gradient == 0).all()


@pytest.mark.usefixtures("path")
def test_a_mixed_second_derivative_is_refused() -> None:
    z, q = (tensor.requires_grad_() for tensor in example(3, 4))
    (at_target,) = torch.autograd.grad(tunable_cross_entropy(z, q, k=0.5), q, create_graph=True)
    with pytest.raises(RuntimeError, match="a second derivative of a tunable loss"):
        torch.autograd.grad(at_target.square().sum(), z)


def test_a_module_within_functional_call() -> None:
    z, q = example(3, 4)
    criterion = TunableCrossEntropyLoss(k=0.5, weight=torch.ones(4))
    found = grad(lambda q: functional_call(criterion, {"weight": torch.ones(4)}, (z, q)))(q)
    torch.testing.assert_close(found, -F.log_softmax(z, -1) / 3)
