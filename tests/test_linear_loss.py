"""The fused linear loss equals a linear layer followed by the loss, in chunks."""

from __future__ import annotations

import copy
import functools
import itertools
import math
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.func import grad, vmap
from torch.nn import functional as F

import reference
import test_transforms as transforms
from covering import covering
from kernels import needs_kernels
from pseudograd import tunable_cross_entropy
from pseudograd.loss import (
    TunableLinearCrossEntropyLoss,
    chunks,
    linear,
    tunable_linear_cross_entropy,
)

TOKENS, WIDTH, CLASSES = (3, 4), 6, 9
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning"),
]


IMPLEMENTATIONS = ("auto", "torch", "triton")
ROUTES = ("eager", "compile", "export")
REDUCTIONS = ("mean", "sum", "none")


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request: pytest.FixtureRequest) -> str:
    """The CPU's kernels, PyTorch's operations, the GPU's kernels."""
    chosen: str = request.param
    if chosen == "triton":
        pytest.importorskip("triton")
        if torch.cuda.is_available():
            pytest.skip("tensors here are on the CPU")
    return chosen


def layer_and_data(dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], Tensor]:
    """Return hidden, weight and bias, which require gradients, and labels, some of them ignored."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((*TOKENS, WIDTH), (CLASSES, WIDTH), (CLASSES,))
    tensors = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    target = torch.randint(CLASSES, TOKENS, generator=generator)
    target[0, 1] = target[2, 3] = -100
    return [tensor.requires_grad_() for tensor in tensors], target


def in_two_steps(tensors: list[Tensor], target: Tensor, k: Any, **settings: Any) -> Tensor:
    """Return the loss in float64 by functions that are tested elsewhere."""
    hidden, weight, bias = (tensor.double() for tensor in tensors)
    if (class_weight := settings.pop("class_weight", None)) is not None:
        settings["weight"] = class_weight.double()
    k = k.double() if isinstance(k, Tensor) else k
    logits = F.linear(hidden, weight, bias)
    return tunable_cross_entropy(logits.movedim(-1, 1), target, k=k, **settings)


def gradients(value: Tensor, tensors: list[Tensor], **options: Any) -> tuple[Tensor, ...]:
    upstream = torch.linspace(1, 1.5, value.numel()).reshape(value.shape).to(value)
    return torch.autograd.grad(value, tensors, upstream, **options)


KS: dict[str, float | Tensor] = {
    "k=1": 1.0,
    "k=1/2": 0.5,
    "k per token": torch.linspace(0.25, 3, 12).reshape(TOKENS),
}
on_all = functools.partial(covering, indirect=["implementation"], implementation=IMPLEMENTATIONS)


@on_all(3, k=KS, reduction=REDUCTIONS, smoothing=(0.0, 0.2), weighted=(False, True))
def test_equals_a_linear_layer_followed_by_the_loss(
    implementation: str, reduction: str, smoothing: float, weighted: bool, k: str
) -> None:
    tensors, target = layer_and_data()
    given = [tensor.detach().clone() for tensor in tensors]
    settings: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing}
    if weighted:
        settings["class_weight"] = torch.linspace(0.5, 2, CLASSES)
    hidden, weight, bias = tensors
    value = tunable_linear_cross_entropy(
        hidden, weight, target, k=KS[k], bias=bias, **settings, chunk_rows=5,
        implementation=implementation,
    )  # fmt: skip
    expected = in_two_steps(tensors, target, KS[k], **settings)
    torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(gradients(value, tensors), gradients(expected, tensors), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert all(map(torch.equal, tensors, given))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_cpu_kernels_are_used(
    dtype: torch.dtype, smoothing: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_kernels()
    monkeypatch.setitem(chunks._ROUTES, "torch", None)
    (hidden, weight, bias), target = layer_and_data(dtype)
    tunable_linear_cross_entropy(
        hidden, weight, target, k=0.5, bias=bias, label_smoothing=smoothing
    ).backward()
    assert weight.grad is not None


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_batched_upstream_gradients_of_one_graph(implementation: str, reduction: str) -> None:
    tensors, target = layer_and_data()
    hidden, weight, bias = tensors
    value = tunable_linear_cross_entropy(
        hidden, weight, target, k=0.5, bias=bias, reduction=reduction, implementation=implementation
    )
    upstream = torch.stack([torch.ones_like(value), 3 * torch.ones_like(value)])
    both = torch.autograd.grad(value, tensors, upstream, True, is_grads_batched=True)
    once = torch.autograd.grad(value, tensors, torch.ones_like(value))
    for ours, theirs in zip(both, once, strict=True):
        torch.testing.assert_close(ours, torch.stack([theirs, 3 * theirs]))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_one_example_can_be_exported(reduction: str) -> None:
    (hidden, weight, bias), target = layer_and_data()
    criterion = TunableLinearCrossEntropyLoss(k=0.5, reduction=reduction)
    given = (hidden[0, 0].detach(), weight, target[0, 0], bias)
    value = torch.export.export(criterion, given).module()(*given)
    expected = criterion(*given)
    torch.testing.assert_close(value, expected)
    assert value.shape == ()
    for ours, theirs in zip(
        torch.autograd.grad(value, (weight, bias)),
        torch.autograd.grad(expected, (weight, bias)),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


def test_gradient_is_the_rule_and_not_that_of_cross_entropy() -> None:
    """Eq. 3, by the 50-digit reference."""
    tensors, target = layer_and_data()
    hidden, weight, bias = tensors
    loss = tunable_linear_cross_entropy(hidden, weight, target, k=0.5, bias=bias)
    of_hidden, of_weight, of_bias = torch.autograd.grad(loss, tensors)
    logits = F.linear(hidden, weight, bias).flatten(0, 1)
    _, f = reference.loss(logits, target.flatten(), 0.5)
    torch.testing.assert_close(of_bias.double(), f.sum(0), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(
        of_weight.double(), f.T @ hidden.double().flatten(0, 1), rtol=1e-4, atol=1e-6
    )
    torch.testing.assert_close(
        of_hidden.double().flatten(0, 1), f @ weight.double(), rtol=1e-4, atol=1e-6
    )
    plain = F.cross_entropy(logits, target.flatten())
    assert not torch.allclose(of_weight, torch.autograd.grad(plain, weight)[0], rtol=0.1)


def test_chunks_make_no_difference(implementation: str, subtests: pytest.Subtests) -> None:
    tensors, target = layer_and_data(torch.float64 if implementation == "torch" else torch.float32)
    hidden, weight, bias = tensors
    expected = gradients(in_two_steps(tensors, target, 0.5), tensors)
    for chunk_rows in (1, 2, 5, 11, 12, 100, None):
        with subtests.test(chunk_rows=chunk_rows):
            value = tunable_linear_cross_entropy(
                hidden, weight, target, k=0.5, bias=bias, chunk_rows=chunk_rows,
                implementation=implementation,
            )  # fmt: skip
            for ours, theirs in zip(gradients(value, tensors), expected, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_chunks_are_few_and_small() -> None:
    """At most half of the rows, in multiples that suit matrix products; few rows are one chunk."""
    row = 131072 * 2
    assert linear._chunk_rows(8192, 4096, row) == 4096  # chunk logits as large as the weight
    assert linear._chunk_rows(8192, 8192, row) == 4096  # never all of them
    assert linear._chunk_rows(8192, 1024, row) == 2048  # nor many chunks
    assert linear._chunk_rows(100_000, 4096, row) % 128 == 0
    assert linear._chunk_rows(100_000, 4096, row) <= 100_000 / 4 + 128
    assert 4 * linear._chunk_rows(8193, 1024, row) >= 8193  # no fifth chunk for one row
    assert linear._chunk_rows(8192, 2048, 32000 * 2) == 8192  # of 524 MB
    assert linear._chunk_rows(8192, 2048, 32000 * 4) == 4096
    assert linear._chunk_rows(64, 10, 1000) >= 64
    assert linear._chunk_rows(0, 0, 1000) == 128


class Watch(torch.utils._python_dispatch.TorchDispatchMode):
    """Record the largest tensor created."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (list, tuple)) else (result,):
            if isinstance(tensor, Tensor):
                self.largest = max(self.largest, tensor.numel())
        return result


def test_all_logits_are_never_held_at_once() -> None:
    hidden = torch.randn(64, 4, requires_grad=True)
    weight = torch.randn(50, 4, requires_grad=True)
    target = torch.arange(64) % 50
    with Watch() as watch:
        tunable_linear_cross_entropy(hidden, weight, target, k=0.5, chunk_rows=8).backward()
    assert watch.largest <= 8 * 50


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_only_required_gradients_are_computed(reduction: str, subtests: pytest.Subtests) -> None:
    """A frozen layer, a frozen network below it, or neither."""
    tensors, target = layer_and_data()
    expected = gradients(in_two_steps(tensors, target, 0.5, reduction=reduction), tensors)
    for wanted in itertools.product((False, True), repeat=3):
        with subtests.test(wanted=wanted):
            for tensor, wants in zip(tensors, wanted, strict=True):
                tensor.grad = None
                tensor.requires_grad_(wants)
            hidden, weight, bias = tensors
            value = tunable_linear_cross_entropy(
                hidden, weight, target, k=0.5, bias=bias, reduction=reduction
            )
            assert value.requires_grad == any(wanted)
            if any(wanted):
                upstream = torch.linspace(1, 1.5, value.numel()).reshape(value.shape)
                value.backward(upstream)
            for tensor, wants, true in zip(tensors, wanted, expected, strict=True):
                assert (tensor.grad is not None) == wants
                if wants:
                    torch.testing.assert_close(tensor.grad, true, rtol=1e-4, atol=1e-5)


def test_without_gradients() -> None:
    tensors, target = layer_and_data()
    hidden, weight, bias = tensors
    with torch.no_grad():
        value = tunable_linear_cross_entropy(hidden, weight, target, k=0.5, bias=bias)
    assert not value.requires_grad
    torch.testing.assert_close(value.double(), in_two_steps(tensors, target, 0.5).detach())


@on_all(dtype=[torch.bfloat16, torch.float16], reduction=REDUCTIONS)
def test_half_types(implementation: str, dtype: torch.dtype, reduction: str) -> None:
    """Up to the rounding of the logits and of their gradient, as in two steps in this dtype."""
    tensors, target = layer_and_data(dtype)
    hidden, weight, bias = tensors
    value = tunable_linear_cross_entropy(
        hidden, weight, target, k=0.5, bias=bias, reduction=reduction, chunk_rows=5,
        implementation=implementation,
    )  # fmt: skip
    assert value.dtype == dtype
    expected = in_two_steps(tensors, target, 0.5, reduction=reduction)
    tolerance = 16 * torch.finfo(dtype).eps
    torch.testing.assert_close(value.double(), expected, rtol=tolerance, atol=tolerance)
    for ours, theirs in zip(gradients(value, tensors), gradients(expected, tensors), strict=True):
        assert ours.dtype == dtype
        size = theirs.abs().max().item()
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance * size)


def test_a_mean_over_many_in_float16_does_not_underflow() -> None:
    """A contribution of a millionth of the mean underflows float16."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(20_000, 2, generator=generator).half()
    weight = torch.randn(3, 2, generator=generator).half().requires_grad_()
    target = torch.randint(3, (20_000,), generator=generator)
    scale = 2.0**10  # as a GradScaler has it
    (
        tunable_linear_cross_entropy(hidden, weight, target, k=2.0, chunk_rows=2000) * scale
    ).backward()
    exact = weight.detach().double().requires_grad_()
    tunable_cross_entropy(hidden.double() @ exact.T, target, k=2.0).backward()
    assert weight.grad is not None
    assert exact.grad is not None
    torch.testing.assert_close(weight.grad.double() / scale, exact.grad, rtol=0.02, atol=1e-3)


def test_small_pushes_in_float16_are_not_lost() -> None:
    """In the mean, the gradient of one class in thousands would have few bits."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(4096, 4, generator=generator).half()
    weight = (2.5 * torch.randn(2048, 4, generator=generator)).half().requires_grad_()
    target = torch.randint(8, (4096,), generator=generator)
    target[::3] = -100
    scale = 2.0**12
    (
        tunable_linear_cross_entropy(hidden, weight, target, k=1.0, chunk_rows=1024) * scale
    ).backward()
    exact = weight.detach().double().requires_grad_()
    tunable_cross_entropy(hidden.double() @ exact.T, target, k=1.0).backward()
    assert weight.grad is not None
    assert exact.grad is not None
    never = slice(8, None)  # classes without a label
    error = (weight.grad.double() / scale - exact.grad)[never].norm(dim=1)
    assert (error / exact.grad[never].norm(dim=1)).max() < 0.01


def test_autocast() -> None:
    """The product in bfloat16, the loss in float32, gradients as the parameters are."""
    tensors, target = layer_and_data()
    hidden, weight, bias = tensors
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = tunable_linear_cross_entropy(hidden, weight, target, k=0.5, bias=bias)
        expected = tunable_cross_entropy(
            F.linear(hidden, weight, bias).movedim(-1, 1), target, k=0.5
        )
    assert value.dtype == torch.float32
    torch.testing.assert_close(value, expected, rtol=1e-5, atol=0)
    for ours, theirs in zip(
        torch.autograd.grad(value, tensors), torch.autograd.grad(expected, tensors), strict=True
    ):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, theirs, rtol=0.03, atol=0.01)


def test_autocast_leaves_float64_alone() -> None:
    tensors, target = layer_and_data()
    hidden, weight, bias = (tensor.detach().double() for tensor in tensors)
    value = tunable_linear_cross_entropy(hidden, weight, target, k=0.5, bias=bias)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(
            tunable_linear_cross_entropy(hidden, weight, target, k=0.5, bias=bias), value
        )


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_backward_again_and_again(implementation: str, reduction: str) -> None:
    tensors, target = layer_and_data()
    hidden, weight, bias = tensors
    value = tunable_linear_cross_entropy(
        hidden, weight, target, k=0.5, bias=bias, reduction=reduction, implementation=implementation
    )
    first = gradients(value, tensors, retain_graph=True)
    (3 * value).sum().backward(retain_graph=True)
    last = gradients(value, tensors)
    for a, b in zip(first, last, strict=True):
        assert torch.equal(a, b)
    with pytest.raises(RuntimeError, match="second time"):
        gradients(value, tensors)


def test_gradients_are_not_copied(implementation: str) -> None:
    """Leaves take them over, so the weight's gradient exists once."""
    tensors, target = layer_and_data()
    hidden, weight, bias = tensors
    value = tunable_linear_cross_entropy(
        hidden, weight, target, k=0.5, bias=bias, implementation=implementation
    )
    node: Any = value.grad_fn
    while not hasattr(node, "saved_tensors"):  # skip the dtype conversion
        node = node.next_functions[0][0]
    kept = [product.data_ptr() for product in node.saved_tensors[-3:]]
    del node
    value.backward()
    grads = [tensor.grad for tensor in (weight, bias)]
    assert [grad.data_ptr() for grad in grads if grad is not None] == kept[1:]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("tokens", ["none", "all ignored"])
def test_batches_without_examples_that_count(reduction: str, tokens: str) -> None:
    tensors, target = layer_and_data()
    _, weight, bias = tensors
    hidden = tensors[0] if tokens != "none" else torch.zeros(0, WIDTH, requires_grad=True)
    target = torch.full(hidden.shape[:-1], -100)
    value = tunable_linear_cross_entropy(
        hidden, weight, target, k=0.5, bias=bias, reduction=reduction
    )
    assert value.isnan() if reduction == "mean" else (value == 0).all()
    for gradient in torch.autograd.grad(value.sum(), (hidden, weight, bias)):
        assert (gradient == 0).all()


def summed(hidden: Tensor, target: Tensor, k: Any, weight: Tensor, **settings: Any) -> Tensor:
    return tunable_linear_cross_entropy(
        hidden, weight, target, k=k, reduction="sum", chunk_rows=3, **settings
    )


EYE = torch.eye(transforms.CLASSES)


@on_all(route=transforms.DIRECT, k=transforms.K)
def test_transforms(implementation: str, route: str, k: str) -> None:
    """With the identity as the weight, the gradient of the input is that of the logits."""
    logits, target = transforms.examples()
    loss = partial(summed, weight=EYE, implementation=implementation)
    gradient = transforms.DIRECT[route](loss, (target, transforms.K[k]), logits)
    transforms.assert_right(gradient, logits, target, transforms.K[k])


@pytest.mark.parametrize("route", transforms.COMPILED)
def test_transforms_compiled(implementation: str, route: str) -> None:
    logits, target = transforms.examples()
    loss = partial(summed, weight=EYE, implementation=implementation)
    gradient = transforms.COMPILED[route](loss, (target, 0.5), logits, "aot_eager")
    transforms.assert_right(gradient, logits, target, 0.5)


def test_compiled_for_any_number_of_rows(implementation: str) -> None:
    def loss(hidden: Tensor, target: Tensor) -> Tensor:
        return summed(hidden, target, 0.5, EYE, implementation=implementation)

    torch.compiler.reset()
    step = torch.compile(loss, fullgraph=True, dynamic=True, backend="aot_eager")
    for count in (4, 7, 9):
        logits, target = transforms.examples(count)
        gradient = transforms.differentiate(step, logits, target)
        transforms.assert_right(gradient, logits, target, 0.5)


@on_all(1, reduction=["mean", "none"], dtype=[torch.float32, torch.float16])
def test_two_graphs_serve_all_numbers_of_rows(
    implementation: str, dtype: torch.dtype, reduction: str
) -> None:
    weight = torch.ones(5, 2, dtype=dtype, requires_grad=True)

    def loss(hidden: Tensor, target: Tensor) -> Tensor:
        return tunable_linear_cross_entropy(
            hidden, weight, target, k=0.5, reduction=reduction, implementation=implementation
        )

    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    step = torch.compile(loss, fullgraph=True, backend=counter)
    for count in (4, 7, 130, 9, 300):
        hidden = torch.linspace(-1, 1, 2 * count, dtype=dtype).reshape(count, 2)
        target = torch.arange(count) % 5
        expected = transforms.differentiate(loss, hidden, target)
        torch.testing.assert_close(transforms.differentiate(step, hidden, target), expected)
    assert counter.frame_count == 2  # one for the first k, one for any other


def test_a_mean_is_as_exact_as_its_inputs(implementation: str) -> None:
    """Whatever the default dtype is."""
    generator = torch.Generator().manual_seed(0)
    for dtype, rtol in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        if implementation == "triton" and dtype == torch.float64:
            continue  # not supported by the kernels
        hidden = torch.randn(7, 3, generator=generator, dtype=dtype)
        weight = torch.randn(5, 3, generator=generator, dtype=dtype)
        target = torch.arange(7) % 5
        for default in (torch.float32, torch.bfloat16):
            before = torch.get_default_dtype()
            torch.set_default_dtype(default)
            try:
                gradient = transforms.differentiate(
                    partial(tunable_linear_cross_entropy, implementation=implementation),
                    hidden, weight, target,
                )  # fmt: skip
            finally:
                torch.set_default_dtype(before)
            logits = hidden.double() @ weight.double().T
            true = reference.loss(logits, target)[1] @ weight.double()
            torch.testing.assert_close(gradient.double(), true, rtol=rtol, atol=rtol / 100)


def test_labels_of_any_integer_type(implementation: str) -> None:
    hidden, weight = torch.eye(3), torch.ones(300, 3)
    labels = torch.tensor([0, 100, 120])
    settings: dict[str, Any] = {"implementation": implementation, "ignore_index": 200}
    expected = tunable_linear_cross_entropy(hidden, weight, labels, **settings)
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32):
        value = tunable_linear_cross_entropy(hidden, weight, labels.to(dtype), **settings)
        assert torch.equal(value, expected)
    wrong = torch.tensor([0, 1, 156], dtype=torch.uint8)
    with pytest.raises(IndexError, match="class index 156"):
        tunable_linear_cross_entropy(hidden, weight[:100], wrong, implementation=implementation)


def test_two_graphs_serve_every_k(implementation: str) -> None:
    transforms.assert_two_graphs_serve_every_k(
        partial(summed, weight=EYE, implementation=implementation)
    )


def test_layers_of_several_models() -> None:
    """vmap over models: weights, data and k all differ."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(3, 5, 2, generator=generator)
    x = torch.randn(3, 6, 2, generator=generator)
    y = torch.randint(5, (3, 6), generator=generator)
    k = torch.tensor([0.25, 1.0, 3.0])

    def loss(weight: Tensor, x: Tensor, y: Tensor, k: Tensor) -> Tensor:
        return tunable_linear_cross_entropy(x, weight, y, k=k)

    for i, gradient in enumerate(vmap(grad(loss))(weights, x, y, k)):
        _, at_logits = reference.loss(x[i] @ weights[i].T, y[i], k[i])
        expected = at_logits.T @ x[i].double()
        torch.testing.assert_close(gradient.double(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_second_derivatives_are_refused(reduction: str, subtests: pytest.Subtests) -> None:
    logits, target = transforms.examples()

    def loss(z: Tensor) -> Tensor:
        return tunable_linear_cross_entropy(z, EYE, target, k=0.5, reduction=reduction).sum()

    said = r"pseudograd: a (second|forward-mode) derivative"
    for way in ("create_graph", "grad(grad)", "jacrev(grad)", "hessian", "jvp",
                "autograd.functional.hvp"):  # fmt: skip
        with subtests.test(way), pytest.raises(RuntimeError, match=said):
            transforms.SECOND_DERIVATIVES[way](loss, logits)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_second_derivatives_are_refused_of_frozen_inputs(reduction: str) -> None:
    (hidden, weight, bias), target = layer_and_data()
    value = tunable_linear_cross_entropy(
        hidden.detach(), weight, target, k=0.5, bias=bias.detach(), reduction=reduction
    )
    (gradient,) = torch.autograd.grad(value.sum(), weight, create_graph=True)
    with pytest.raises(RuntimeError, match="pseudograd: a second derivative"):
        (gradient**2).sum().backward()


def test_invalid_values_that_need_a_sync_to_check_give_nan(implementation: str) -> None:
    """Here because `grad` hides the values; on a GPU because reading them would synchronize."""
    (hidden, weight, _), _ = layer_and_data()
    hidden, weight = hidden.detach().reshape(-1, hidden.shape[-1])[:3], weight.detach()

    def values(k: Tensor, target: Tensor, **settings: Any) -> Tensor:
        def loss(hidden: Tensor) -> Tensor:
            return tunable_linear_cross_entropy(
                hidden, weight, target, k=k, reduction="sum", implementation=implementation,
                **settings,
            )  # fmt: skip

        gradient: Tensor = torch.func.grad(loss)(hidden)
        return gradient.isnan().any(1)

    good = torch.tensor([0, 1, 2])
    assert values(torch.tensor([1.0, -1.0, 0.0]), good).tolist() == [False, True, True]
    assert values(torch.tensor(torch.inf), good).all()
    wrong = torch.tensor([0, len(weight), 2])
    class_weight = torch.linspace(0.5, 2, len(weight))
    for settings in ({}, {"class_weight": class_weight}, {"label_smoothing": 0.1}):
        assert values(torch.ones(3), wrong, **settings).tolist() == [False, True, False]


def test_module() -> None:
    tensors, target = layer_and_data()
    hidden, weight, bias = tensors
    class_weight = torch.linspace(0.5, 2, CLASSES)
    settings: dict[str, Any] = {"class_weight": class_weight, "label_smoothing": 0.1}
    module = TunableLinearCrossEntropyLoss(k=0.5, **settings)
    assert "k=0.5" in repr(module)
    expected = tunable_linear_cross_entropy(hidden, weight, target, k=0.5, bias=bias, **settings)
    for other in (module, pickle.loads(pickle.dumps(module)), copy.deepcopy(module)):
        torch.testing.assert_close(other(hidden, weight, target, bias), expected)


def bad(**changes: Any) -> Callable[[], Tensor]:
    arguments: dict[str, Any] = {
        "hidden": torch.zeros(2, 3), "weight": torch.zeros(4, 3), "target": torch.tensor([0, 1])
    }  # fmt: skip
    return lambda: tunable_linear_cross_entropy(**{**arguments, **changes})


BAD: dict[str, tuple[Callable[[], Tensor], type[Exception], str]] = {
    "hidden too wide": (bad(hidden=torch.zeros(2, 5)), ValueError, r"hidden .* \(\.\.\., 3\)"),
    "hidden of integers": (bad(hidden=torch.zeros(2, 3).long()), TypeError, "hidden must be"),
    "weight a row": (bad(weight=torch.zeros(3)), ValueError, r"weight must .*\(classes, H\)"),
    "bias too long": (bad(bias=torch.zeros(5)), ValueError, r"bias .* 4 classes"),
    "bias a list": (bad(bias=[0.0] * 4), TypeError, "bias must be a floating-point tensor"),
    "class weight short": (bad(class_weight=torch.ones(3)), ValueError, "class_weight .* 4"),
    "class weight to be learned": (
        bad(class_weight=torch.ones(4, requires_grad=True)), ValueError, r"class_weight\.detach"
    ),
    "too many labels": (bad(target=torch.zeros(3).long()), ValueError, r"target .* \(2,\)"),
    "probabilities": (
        bad(target=torch.zeros(2)), ValueError, r"must hold class probabilities of shape \(2, 4\)"
    ),
    "learned target": (
        bad(target=torch.zeros(2, 4).requires_grad_()), ValueError, r"use target.detach\(\), or"
    ),
    "ignored probabilities": (
        bad(target=torch.zeros(2, 4), ignore_index=1), ValueError, "ignore_index must be negative"
    ),
    "softcap": (bad(softcap=0.0), ValueError, "softcap must be a finite number above 0, or None"),
    "softcap text": (bad(softcap="30"), TypeError, "softcap must be a finite number"),
    "z-loss": (bad(z_loss=-1e-4), ValueError, "z_loss must be a finite number of 0 or more, not"),
    "z-loss text": (bad(z_loss="1e-4"), TypeError, "z_loss must be a finite number of 0"),
    "label too large": (bad(target=torch.tensor([0, 4])), IndexError, "target holds .* 4"),
    "elsewhere": (bad(weight=torch.zeros(4, 3, device="meta")), ValueError, "weight is on meta"),
    "another dtype": (bad(weight=torch.zeros(4, 3).half()), TypeError, "weight is .* convert one"),
    "no rows": (bad(chunk_rows=0), ValueError, "chunk_rows must be a whole number"),
    "negative k": (bad(k=-1.0), ValueError, "k must be a finite number above 0"),
    "k for each class": (bad(k=torch.ones(4)), ValueError, "k must be a number or have one value"),
    "zero in k": (bad(k=torch.tensor([1.0, 0.0])), ValueError, "k must be finite and above 0"),
    "reduction": (bad(reduction="average"), ValueError, "reduction must be"),
    "smoothing": (bad(label_smoothing=2.0), ValueError, "label_smoothing must be a number in"),
    "ignore_index": (bad(ignore_index=0.5), TypeError, "ignore_index must be a whole number"),
    "implementation": (bad(implementation="cuda"), ValueError, "implementation must be"),
}  # fmt: skip


def test_bad_input_is_named(subtests: pytest.Subtests) -> None:
    for name, (call, error, message) in BAD.items():
        with subtests.test(name), pytest.raises(error, match=message):
            call()


def test_a_causal_language_model_trains_identically() -> None:
    """Two copies of a small network, one with each form: the same steps."""
    torch.manual_seed(0)
    body, head = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 11)
    tokens = torch.randint(11, (4, 10))
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    finals = []
    for fused in (False, True):
        lower, last = copy.deepcopy((body, head))
        parameters = [*lower.parameters(), *last.parameters()]
        optimizer = torch.optim.SGD(parameters, lr=0.5)
        for _ in range(5):
            optimizer.zero_grad()
            hidden = lower(inputs)
            if fused:
                loss = tunable_linear_cross_entropy(
                    hidden, last.weight, labels, k=0.5, bias=last.bias, chunk_rows=7
                )
            else:
                loss = tunable_cross_entropy(last(hidden).movedim(-1, 1), labels, k=0.5)
            loss.backward()
            optimizer.step()
        finals.append(torch.cat([p.detach().flatten() for p in parameters]))
    torch.testing.assert_close(finals[0], finals[1], rtol=1e-4, atol=1e-6)


# --- soft targets and capped logits ---------------------------------------------------------------


def compare(
    criterion: Any, tensors: list[Tensor], target: Tensor, two_steps: Callable[..., Tensor]
) -> None:
    """Compare value and gradients of a linear form with those of two steps in float64."""
    hidden, weight, bias = tensors
    value = criterion(hidden, weight, target, bias)
    logits = F.linear(hidden.double(), weight.double(), bias.double())
    expected = two_steps(logits.movedim(-1, 1))
    torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(gradients(value, tensors), gradients(expected, tensors), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def on_route(criterion: Any, route: str, given: tuple[Any, ...]) -> Any:
    if route == "compile":
        torch.compiler.reset()
        return torch.compile(criterion, fullgraph=True, backend="aot_eager")
    if route == "export":
        return torch.export.export(criterion, given).module()
    return criterion


@on_all(route=ROUTES, reduction=REDUCTIONS, smoothing=(0.0, 0.2), weighted=(False, True))
def test_soft_targets(
    implementation: str, route: str, reduction: str, smoothing: float, weighted: bool
) -> None:
    """With a k per class and a weight per token, too."""
    tensors, labels = layer_and_data()
    target = torch.randn(*TOKENS, CLASSES, generator=torch.Generator().manual_seed(1)).softmax(-1)
    target[0, 0] = F.one_hot(labels[0, 0], CLASSES)
    class_k, weights = torch.linspace(0.5, 2, CLASSES), torch.linspace(0, 1, 12).reshape(TOKENS)
    class_weight = torch.linspace(0.5, 2, CLASSES) if weighted else None
    settings: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing}
    criterion = TunableLinearCrossEntropyLoss(
        class_k=class_k, class_weight=class_weight, chunk_rows=5, implementation=implementation,
        **settings,
    )  # fmt: skip
    given = (*tensors[:2], target, tensors[2], weights)
    on = on_route(criterion, route, given)
    compare(
        lambda *given: on(*given, weights), tensors, target,
        lambda logits: tunable_cross_entropy(
            logits, target.movedim(-1, 1).double(), class_weight, class_k=class_k,
            sample_weight=weights, **settings,
        ),
    )  # fmt: skip


@on_all(route=ROUTES, reduction=["mean", "none"], softcap=[0.5, 30])
def test_capped_logits(implementation: str, softcap: float, reduction: str, route: str) -> None:
    tensors, target = layer_and_data()
    criterion = TunableLinearCrossEntropyLoss(
        k=0.5, softcap=softcap, reduction=reduction, chunk_rows=5, implementation=implementation
    )
    assert f"softcap={softcap}" in repr(criterion)
    compare(
        on_route(criterion, route, (*tensors[:2], target, tensors[2])), tensors, target,
        lambda logits: tunable_cross_entropy(
            softcap * torch.tanh(logits / softcap), target, k=0.5, reduction=reduction
        ),
    )  # fmt: skip


def test_a_cap_far_below_the_logits_does_not_cancel() -> None:
    """1 - tanh² would be 0 in float32."""
    hidden = torch.tensor([[12.0, 0.0]], requires_grad=True)
    weight, target = torch.eye(2), torch.tensor([1])
    tunable_linear_cross_entropy(hidden, weight, target, k=0.5, softcap=1.0).backward()
    assert hidden.grad is not None
    p = torch.sigmoid(torch.tensor(1.0))
    expected = p.sqrt() / torch.tensor(12.0).cosh() ** 2
    torch.testing.assert_close(hidden.grad[0, 0], expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_soft_and_capped_in_half_types(dtype: torch.dtype) -> None:
    tensors, _ = layer_and_data(dtype)
    target = torch.randn(*TOKENS, CLASSES).softmax(-1).to(dtype)
    hidden, weight, bias = tensors
    value = tunable_linear_cross_entropy(hidden, weight, target, bias, k=0.5, softcap=5.0)
    assert value.dtype == dtype
    logits = F.linear(hidden.float(), weight.float(), bias.float())
    expected = tunable_cross_entropy(
        (5 * torch.tanh(logits / 5)).movedim(-1, 1), target.movedim(-1, 1).float(), k=0.5
    )
    torch.testing.assert_close(value.float(), expected, rtol=2e-2, atol=1e-2)
    for ours, theirs in zip(gradients(value, tensors), gradients(expected, tensors), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=5e-2, atol=1e-2)


# --- z-loss ---------------------------------------------------------------------------------------


def z_loss_in_two_steps(
    logits: Tensor, target: Tensor, z_loss: float, softcap: float | None = None,
    sample_weight: Tensor | None = None, reduction: str = "mean", **settings: Any,
) -> Tensor:  # fmt: skip
    """The loss and, with autograd's gradient, the z-loss of logits whose classes come last."""
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    loss = tunable_cross_entropy(
        logits.movedim(-1, 1), target, sample_weight=sample_weight, reduction=reduction, **settings
    )
    factors = (target != -100).double()
    factors = factors if sample_weight is None else factors * sample_weight
    squares = factors * logits.logsumexp(-1).square()
    if reduction == "none":
        return loss + z_loss * squares
    return loss + z_loss * squares.sum() / (factors.sum() if reduction == "mean" else 1)


Z_LOSSES: dict[str, dict[str, Any]] = {
    "alone": {},
    "softcap": {"softcap": 2.0},
    "smoothing": {"label_smoothing": 0.2},
    "weights": {
        "class_weight": torch.linspace(0.5, 2, CLASSES),
        "sample_weight": torch.linspace(0, 1, 12).reshape(TOKENS),
    },
}


@on_all(route=ROUTES, case=Z_LOSSES, reduction=REDUCTIONS)
def test_z_loss(implementation: str, route: str, case: str, reduction: str) -> None:
    tensors, target = layer_and_data()
    settings = dict(Z_LOSSES[case])
    weights = settings.pop("sample_weight", None)
    criterion = TunableLinearCrossEntropyLoss(
        k=0.5, z_loss=0.1, reduction=reduction, chunk_rows=5, implementation=implementation,
        **settings,
    )  # fmt: skip
    assert "z_loss=0.1" in repr(criterion)
    class_weight = settings.pop("class_weight", None)
    on = on_route(criterion, route, (*tensors[:2], target, tensors[2], weights))
    compare(
        lambda *given: on(*given, weights), tensors, target,
        lambda logits: z_loss_in_two_steps(
            logits.movedim(1, -1), target, 0.1, weight=class_weight, sample_weight=weights,
            k=0.5, reduction=reduction, **settings,
        ),
    )  # fmt: skip


def test_z_loss_in_float64() -> None:
    """With soft targets, by PyTorch alone: at k = 1 the whole gradient is a loss's."""
    tensors, labels = layer_and_data(torch.float64)
    target = F.one_hot(labels.clamp(min=0), CLASSES).double() * 0.7 + 0.3 / CLASSES
    hidden, weight, bias = tensors
    value = tunable_linear_cross_entropy(hidden, weight, target, bias, z_loss=0.1, chunk_rows=5)
    logits = F.linear(hidden, weight, bias).flatten(0, 1)
    expected = F.cross_entropy(logits, target.flatten(0, 1))
    expected = expected + 0.1 * logits.logsumexp(-1).square().mean()
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=0)
    for ours, theirs in zip(gradients(value, tensors), gradients(expected, tensors), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_z_loss_in_half_types(implementation: str, dtype: torch.dtype) -> None:
    """Means of float16 are divided later, also those of class weights."""
    tensors, target = layer_and_data(dtype)
    hidden, weight, bias = tensors
    class_weight = torch.linspace(0.5, 2, CLASSES)
    value = tunable_linear_cross_entropy(
        hidden, weight, target, bias, k=0.5, z_loss=0.1, class_weight=class_weight,
        implementation=implementation,
    )  # fmt: skip
    logits = F.linear(hidden.float(), weight.float(), bias.float())
    expected = z_loss_in_two_steps(logits, target, 0.1, weight=class_weight, k=0.5)
    torch.testing.assert_close(value.double(), expected, rtol=2e-2, atol=1e-2)
    for ours, theirs in zip(gradients(value, tensors), gradients(expected, tensors), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=5e-2, atol=1e-2)


def test_z_loss_is_never_nan(implementation: str) -> None:
    """For a masked class, the largest logits, and NaN in rows that are ignored or have weight 0."""
    hidden = torch.tensor([[3e38, 0.0, -3e38], [0.0, 0.0, 1.0], [torch.nan] * 3, [torch.nan] * 3])
    hidden.requires_grad_()
    value = tunable_linear_cross_entropy(
        hidden, torch.eye(3), torch.tensor([0, 2, -100, 1]), torch.tensor([0.0, -torch.inf, 0.0]),
        k=0.5, z_loss=2.0, sample_weight=torch.tensor([1.0, 1.0, 1.0, 0.0]), reduction="none",
        implementation=implementation,
    )  # fmt: skip
    value.sum().backward()
    of_two = 2 * math.log(1 + math.e) ** 2 + math.log(1 + math.exp(-1))
    assert value.tolist() == [torch.inf, pytest.approx(of_two), 0, 0]
    assert hidden.grad is not None
    assert not hidden.grad.isnan().any()
    assert not hidden.grad[2:].any()


def test_z_loss_leaves_a_mean_without_weight_alone(implementation: str) -> None:
    """It is 0/0, as without z-loss, and its gradient is 0."""
    (hidden, weight, _), target = layer_and_data()
    value = tunable_linear_cross_entropy(
        hidden, weight, target, z_loss=1.0, class_weight=torch.zeros(CLASSES),
        implementation=implementation,
    )  # fmt: skip
    value.backward()
    assert value.isnan()
    assert hidden.grad is not None
    assert not hidden.grad.any()
