"""PyTorch's own test samples of cross-entropy, as function and as module, run on ours."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import reference
from pseudograd import TunableCrossEntropyLoss, tunable_cross_entropy
from test_target_gradient import gradients, samples_of

pytestmark = pytest.mark.usefixtures("one_thread")

both_paths = pytest.mark.usefixtures("path")
FULL_TYPES = (torch.float32, torch.float64)


def assert_same(computed: Any, expected: Any, dtype: torch.dtype) -> None:
    """Up to a few units in the last place of a probability times a class weight of up to 10."""
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(computed, expected, rtol=20 * eps, atol=100 * eps, equal_nan=True)


def assert_true(computed: Tensor, true: Tensor, dtype: torch.dtype) -> None:
    tolerance = 1e-5 if dtype == torch.float32 else 1e-10
    torch.testing.assert_close(
        computed.double(), true, rtol=tolerance, atol=tolerance / 100, equal_nan=True
    )


def upstream_of(value: Tensor) -> Tensor:
    return torch.linspace(1, 1.5, value.numel()).reshape(value.shape).to(value.dtype)


@pytest.mark.parametrize("dtype", FULL_TYPES)
@both_paths
def test_at_k_1_the_function_is_pytorchs(dtype: torch.dtype) -> None:
    for sample in samples_of()(dtype):
        computed = gradients(tunable_cross_entropy, sample, dtype)
        assert_same(computed, gradients(F.cross_entropy, sample, dtype), dtype)


@pytest.mark.parametrize("k", [0.25, 0.5, 2.0, 3.0])
@pytest.mark.parametrize("dtype", FULL_TYPES)
@both_paths
def test_at_another_k_the_function_has_the_rule(dtype: torch.dtype, k: float) -> None:
    count = 0
    for sample in samples_of()(dtype):
        logits, target = sample.input.detach().requires_grad_(), sample.args[0].detach()
        value = tunable_cross_entropy(logits, target, k=k, **sample.kwargs)
        assert_same(
            value.detach(), F.cross_entropy(logits, target, **sample.kwargs).detach(), dtype
        )
        upstream = upstream_of(value)
        (f,) = torch.autograd.grad(value, logits, upstream)
        _, true = reference.loss(logits, target, k, upstream=upstream, **sample.kwargs)
        assert_true(f, true, dtype)
        count += 1
    assert count >= 20


def modules(dtype: torch.dtype) -> Any:
    """Return PyTorch's samples of the module: the arguments of its constructor and of its calls."""
    samples_of()  # makes its test library importable
    from torch.testing._internal.common_modules import module_db

    torch.manual_seed(0)
    (info,) = (info for info in module_db if info.module_cls is nn.CrossEntropyLoss)
    return info.module_inputs_func(
        info, device="cpu", dtype=dtype, requires_grad=True, training=True
    )


def module_gradients(criterion: nn.Module, sample: Any) -> tuple[Tensor, Tensor]:
    logits, target = sample.forward_input.args
    leaf = logits.detach().clone().requires_grad_()
    value = criterion(leaf, target.detach())
    (gradient,) = torch.autograd.grad(value, leaf, upstream_of(value))
    return value.detach(), gradient


@pytest.mark.parametrize("dtype", FULL_TYPES)
@both_paths
def test_at_k_1_the_module_is_pytorchs(dtype: torch.dtype) -> None:
    """Also compared with PyTorch's own reference, if a sample has one."""
    count = 0
    for sample in modules(dtype):
        given = sample.constructor_input
        ours, theirs = (
            kind(*given.args, **given.kwargs)
            for kind in (TunableCrossEntropyLoss, nn.CrossEntropyLoss)
        )
        computed = module_gradients(ours, sample)
        assert_same(computed, module_gradients(theirs, sample), dtype)
        if sample.reference_fn is not None:
            inputs = (tensor.detach() for tensor in sample.forward_input.args)
            expected = sample.reference_fn(ours, *inputs)
            assert_same(computed[0], expected.detach().to(dtype), dtype)
        count += 1
    assert count >= 100


@pytest.mark.parametrize("dtype", FULL_TYPES)
@both_paths
def test_at_another_k_the_module_has_the_rule(dtype: torch.dtype) -> None:
    for sample in modules(dtype):
        logits, target = sample.forward_input.args
        if logits.numel() > 200:  # 50 digits are slow
            continue
        given = sample.constructor_input
        criterion = TunableCrossEntropyLoss(*given.args, **given.kwargs, k=0.5)
        value, gradient = module_gradients(criterion, sample)
        _, true = reference.loss(
            logits, target.detach(), 0.5, upstream=upstream_of(value), **given.kwargs
        )
        assert_true(gradient, true, dtype)
