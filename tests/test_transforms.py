"""The pseudo-gradient is right under every PyTorch transform; second derivatives raise."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tempfile
import unittest.mock
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.compiled_autograd import _enable
from torch._dynamo.testing import CompileCounterWithBackend
from torch._functorch._aot_autograd.utils import make_boxed_compiler, make_boxed_func
from torch._functorch.compilers import nop
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.multiprocessing.spawn import spawn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import reference
from covering import PATHS, covering
from kernels import needs_kernels
from pseudograd import (
    RuleCrossEntropyLoss,
    TunableCrossEntropyLoss,
    TunableLinearCrossEntropyLoss,
    tunable_binary_cross_entropy_with_logits,
    tunable_cross_entropy,
    tunable_linear_cross_entropy,
)
from pseudograd.loss import cpu
from pseudograd.rules import focal, from_bias, tunable

CLASSES = 5
pytestmark = pytest.mark.usefixtures("one_thread")

Loss = Callable[..., Any]  # of logits, target and sometimes k
Route = Callable[..., Any]

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++", "c++"))),
    reason="inductor needs a C++ compiler",
)
BACKENDS = ("aot_eager", pytest.param("inductor", marks=needs_compiler))


def examples(count: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(count)
    logits = 2 * torch.randn(count, CLASSES, generator=generator)
    return logits, torch.randint(CLASSES, (count,), generator=generator)


def differentiate(loss: Loss, logits: Tensor, *others: Any) -> Tensor:
    leaf = logits.detach().clone().requires_grad_()
    (result,) = torch.autograd.grad(loss(leaf, *others).sum(), leaf)
    return result


def compiled(function: Loss, backend: str) -> Loss:
    torch.compiler.reset()
    return torch.compile(function, fullgraph=True, backend=backend)


def assert_two_graphs_serve_every_k(loss: Loss) -> None:
    """One for the first number, one for any other; each has the pseudo-gradient."""
    logits, target = examples()
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    step = torch.compile(loss, fullgraph=True, backend=counter)
    for k in (0.5, 2.0, 0.25, 3.0):
        assert_right(differentiate(step, logits, target, k), logits, target, k)
    assert counter.frame_count == 2


def over_examples(others: tuple[Any, ...]) -> tuple[int | None, ...]:
    """Return what vmap maps over: everything but numbers."""
    return (0, *(0 if isinstance(other, Tensor) else None for other in others))


# Each returns the gradient of the sum of ``loss`` over the rows, for every row of the logits.
def eager(loss: Loss, others: tuple[Any, ...], logits: Tensor) -> Any:
    return differentiate(loss, logits, *others)


def of_grad(loss: Loss, others: tuple[Any, ...], logits: Tensor) -> Any:
    return grad(lambda z, *rest: loss(z, *rest).sum())(logits, *others)


def of_vmap(loss: Loss, others: tuple[Any, ...], logits: Tensor) -> Any:
    return differentiate(vmap(loss, over_examples(others)), logits, *others)


def of_vmap_of_grad(loss: Loss, others: tuple[Any, ...], logits: Tensor) -> Any:
    return vmap(grad(loss), over_examples(others))(logits, *others)


def of_jacrev(loss: Loss, others: tuple[Any, ...], logits: Tensor) -> Any:
    rows = jacrev(vmap(loss, over_examples(others)))(logits, *others)
    return rows.sum(0)


def of_compile(loss: Loss, others: tuple[Any, ...], logits: Tensor, backend: str) -> Any:
    return differentiate(compiled(lambda *args: loss(*args).sum(), backend), logits, *others)


def of_compile_of_vmap(loss: Loss, others: tuple[Any, ...], logits: Tensor, backend: str) -> Any:
    mapped = vmap(loss, over_examples(others))
    return differentiate(compiled(lambda *args: mapped(*args).sum(), backend), logits, *others)


def of_compile_of_vmap_of_grad(
    loss: Loss, others: tuple[Any, ...], logits: Tensor, backend: str
) -> Any:
    mapped = vmap(grad(loss), over_examples(others))
    return compiled(lambda *args: mapped(*args), backend)(logits, *others)


def of_compile_of_grad(loss: Loss, others: tuple[Any, ...], logits: Tensor, backend: str) -> Any:
    return compiled(grad(lambda *args: loss(*args).sum()), backend)(logits, *others)


DIRECT: dict[str, Route] = {
    "eager": eager,
    "grad": of_grad,
    "vmap": of_vmap,
    "vmap(grad)": of_vmap_of_grad,
    "jacrev(vmap)": of_jacrev,
}
COMPILED: dict[str, Route] = {
    "compile": of_compile,
    "compile(vmap)": of_compile_of_vmap,
    "compile(vmap(grad))": of_compile_of_vmap_of_grad,
    "compile(grad)": of_compile_of_grad,
}
# Every route with the cheap backend, and inductor, which generates C++, on the usual one.
on_compilers = pytest.mark.parametrize(
    ("route", "backend"),
    [
        *((route, "aot_eager") for route in COMPILED),
        pytest.param("compile", "inductor", marks=needs_compiler),
    ],
)
K: dict[str, float | Tensor] = {
    "k=0.5": 0.5,
    "k=2": 2.0,
    "k per example": torch.tensor([0.25, 0.5, 2.0, 4.0]),
}


def assert_right(gradient: Tensor, logits: Tensor, target: Tensor, k: float | Tensor) -> None:
    """Assert the pseudo-gradient of the sum, not cross-entropy's gradient."""
    _, true = reference.loss(logits, target, k, reduction="sum")
    torch.testing.assert_close(gradient.double(), true, rtol=1e-5, atol=1e-8)
    plain = differentiate(partial(F.cross_entropy, reduction="sum"), logits, target)
    assert not torch.allclose(gradient, plain, rtol=0.1, atol=0.01)


def tunable_loss(logits: Tensor, target: Tensor, k: float | Tensor, **settings: Any) -> Tensor:
    return tunable_cross_entropy(logits, target, k=k, reduction="sum", **settings)


@covering(route=DIRECT, k=K, target_kind=["index", "smoothed", "probability"], path=PATHS)
@pytest.mark.usefixtures("path")
def test_tunable_loss(route: str, k: str, target_kind: str) -> None:
    logits, target = examples()
    loss: Loss = tunable_loss
    true_target = target
    if target_kind == "smoothed":
        loss = partial(tunable_loss, label_smoothing=0.1)
        true_target = F.one_hot(target, CLASSES) * 0.9 + 0.1 / CLASSES
    elif target_kind == "probability":
        target = true_target = torch.flip(logits, (0,)).softmax(-1)
    assert_right(DIRECT[route](loss, (target, K[k]), logits), logits, true_target, K[k])


@pytest.mark.parametrize(
    ("backend", "route", "k"),
    [
        ("aot_eager", "compile", "k=2"),
        ("aot_eager", "compile(vmap)", "k=0.5"),
        ("aot_eager", "compile(vmap(grad))", "k per example"),
        ("aot_eager", "compile(grad)", "k per example"),
        pytest.param("inductor", "compile", "k per example", marks=needs_compiler),
        pytest.param("inductor", "compile(vmap(grad))", "k=0.5", marks=needs_compiler),
    ],
)
def test_tunable_loss_compiled(route: str, k: str, backend: str) -> None:
    logits, target = examples()
    gradient = COMPILED[route](tunable_loss, (target, K[k]), logits, backend)
    assert_right(gradient, logits, target, K[k])


def test_two_graphs_serve_every_k() -> None:
    assert_two_graphs_serve_every_k(tunable_loss)


@on_compilers
def test_soft_targets_compiled(route: str, backend: str) -> None:
    logits, _ = examples()
    target, k = torch.flip(logits, (0,)).softmax(-1), K["k per example"]
    assert_right(COMPILED[route](tunable_loss, (target, k), logits, backend), logits, target, k)


RULES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "tunable": partial(tunable, k=0.5),
    "focal": focal,
    "of the bias": from_bias(lambda bias, y: bias.clamp(-0.3, 0.3)),
}


@pytest.mark.parametrize("route", DIRECT)
def test_rule_loss(route: str, subtests: pytest.Subtests) -> None:
    logits, target = examples()
    for name, rule in RULES.items():
        with subtests.test(name):
            criterion = RuleCrossEntropyLoss(rule, reduction="sum")
            gradient = DIRECT[route](criterion, (target,), logits)
            torch.testing.assert_close(gradient, rule(logits, target))


@on_compilers
def test_rule_loss_compiled(route: str, backend: str) -> None:
    logits, target = examples()
    gradient = COMPILED[route](
        RuleCrossEntropyLoss(focal, reduction="sum"), (target,), logits, backend
    )
    torch.testing.assert_close(gradient, focal(logits, target))


def test_each_rule_has_a_graph_of_its_own() -> None:
    """The compiler identifies functions by code object, and the wrappers of all rules share one."""
    logits, target = examples()
    torch.compiler.reset()  # once, not between rules
    for rule in RULES.values():
        step = torch.compile(RuleCrossEntropyLoss(rule, reduction="sum"), backend="aot_eager")
        gradient = differentiate(step, logits, target)
        torch.testing.assert_close(gradient, rule(logits, target))
    criterion = RuleCrossEntropyLoss(focal, reduction="sum")
    changing = torch.compile(criterion, backend="aot_eager", fullgraph=True)
    for rule in (*RULES.values(), *RULES.values(), *RULES.values()):  # more than a limit of eight
        criterion.rule = rule
        torch.testing.assert_close(differentiate(changing, logits, target), rule(logits, target))


@pytest.mark.parametrize("backend", BACKENDS)
def test_changing_k_of_a_compiled_loss(backend: str) -> None:
    logits, target = examples()
    criterion = TunableCrossEntropyLoss(k=0.5, reduction="sum")
    step = compiled(criterion, backend)
    for k in (0.5, 2.0, 0.25, 3.0, 0.5):
        criterion.k = k
        assert_right(differentiate(step, logits, target), logits, target, k)


@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("numbers", ["whole", "fractions", "both"])
def test_a_changing_k_does_not_recompile(numbers: str, linear: bool) -> None:
    """Not in 20 steps, and each step has the gradient of its k."""
    logits, target = examples()
    kind = TunableLinearCrossEntropyLoss if linear else TunableCrossEntropyLoss
    criterion: Any = kind(k=1, reduction="sum")

    def loss(logits: Tensor, target: Tensor) -> Tensor:
        value: Tensor = (
            criterion(logits, torch.eye(CLASSES), target) if linear else criterion(logits, target)
        )
        return value

    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    step = torch.compile(loss, fullgraph=True, backend=counter)
    for i in range(1, 21):
        k = {"whole": i, "fractions": 1 / i, "both": i if i % 2 else 1 / i}[numbers]
        criterion.k = k
        assert criterion.k == k
        gradient = differentiate(step, logits, target)
        _, true = reference.loss(logits, target, k, reduction="sum")
        torch.testing.assert_close(gradient.double(), true, rtol=1e-5, atol=1e-8)
    assert counter.frame_count == 1


def test_a_changing_k_does_not_recompile_in_older_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """There, code that the compiler traces sees itself as exported (pytorch#176347)."""
    logits, target = examples()
    criterion = TunableCrossEntropyLoss(k=1, reduction="sum")
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    step = torch.compile(criterion, fullgraph=True, backend=counter)
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: True)
    for k in range(2, 13):
        criterion.k = k
        assert_right(differentiate(step, logits, target), logits, target, k)
    assert counter.frame_count == 1


def test_compiled_probabilities_that_need_no_gradient_take_one_operator() -> None:
    """The loss adds nothing for a gradient that is not required."""
    needs_kernels()
    logits, target = examples()
    called: list[str] = []

    def note(graph: torch.fx.GraphModule, _: Any) -> Any:
        called.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return make_boxed_func(graph.forward)

    torch.compiler.reset()
    backend = aot_autograd(fw_compiler=note, bw_compiler=make_boxed_compiler(nop))
    step = torch.compile(tunable_cross_entropy, fullgraph=True, backend=backend)
    step(logits.requires_grad_(), F.one_hot(target, CLASSES).float())
    assert called[0] == "pseudograd.loss_on_cpu.default"
    assert set(called[1:]) == {"<built-in function getitem>"}


@pytest.mark.parametrize("mistake", [{"k": 0.0}, {"reduction": "all"}, {"label_smoothing": 2.0}])
def test_a_wrong_argument_is_refused_in_one_sentence_under_compile(mistake: Any) -> None:
    torch.compiler.reset()
    with pytest.raises(ValueError, match=f"^{next(iter(mistake))} must be"):
        torch.compile(tunable_cross_entropy, backend="eager")(*examples(), **mistake)


def test_on_a_gpu_k_is_a_constant_until_it_changes() -> None:
    """There ½, 1 and 2 have their own kernels: one graph for the first k, one for all others."""
    criterion = TunableCrossEntropyLoss(k=1.0)
    on_gpu = torch.zeros(2, 3, device="meta")
    seen: list[float | Tensor] = []

    def forward(z: Tensor) -> Tensor:
        seen.append(criterion._k_for(z))
        return z

    with (
        unittest.mock.patch.object(torch.compiler, "is_compiling", return_value=True),
        unittest.mock.patch.object(torch.Tensor, "is_cuda", True),
    ):
        forward(on_gpu)
        criterion.k = 2
        forward(on_gpu)
    assert seen[0] == 1.0
    assert not isinstance(seen[0], Tensor)
    assert isinstance(seen[1], Tensor)
    assert seen[1].item() == 2.0


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_k_keeps_its_precision_in_a_converted_module(dtype: torch.dtype) -> None:
    logits, target = examples()
    logits = logits.to(dtype)
    criterion = TunableCrossEntropyLoss(k=2.0**-99, reduction="sum").to(dtype)
    step = compiled(criterion, "aot_eager")
    for k in (2.0**-99, 0.3):
        criterion.k = k
        gradient = differentiate(step, logits, target)
        _, true = reference.loss(logits, target, k, reduction="sum")
        rtol = 2 * torch.finfo(dtype).eps + 1e-12
        torch.testing.assert_close(gradient.double(), true, rtol=rtol, atol=1e-12)


def test_k_may_change_in_inference_mode() -> None:
    """As when an evaluation steps a schedule."""
    logits, target = examples()
    criterion = TunableCrossEntropyLoss(k=1)
    with torch.inference_mode():
        criterion.k = 0.5
    leaf = logits.clone().requires_grad_()
    compiled(criterion, "aot_eager")(leaf, target).backward()
    assert leaf.grad is not None
    assert_right(len(logits) * leaf.grad, logits, target, 0.5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_with_everything(backend: str) -> None:
    """Weights, ignored examples, the mean, more dimensions and half types, in one graph."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, CLASSES, 3, generator=generator).to(torch.bfloat16)
    target = torch.tensor([[0, 1, -100], [4, 2, 1]])
    k, weight = torch.tensor([[0.25, 0.5, 1.0], [2.0, 3.0, 4.0]]), torch.arange(1.0, CLASSES + 1)

    def loss(logits: Tensor, target: Tensor, k: Tensor) -> Tensor:
        return tunable_cross_entropy(logits, target, weight, k=k)

    gradient = differentiate(compiled(loss, backend), logits, target, k)
    _, true = reference.loss(logits, target, k, weight=weight)
    assert gradient.dtype == torch.bfloat16
    torch.testing.assert_close(gradient.double(), true, rtol=2**-8, atol=1e-9)


def test_vmap_over_models_with_their_own_k() -> None:
    """vmap over models: parameters, data and k all differ."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(3, CLASSES, 2, generator=generator)
    x = torch.randn(3, 6, 2, generator=generator)
    y = torch.randint(CLASSES, (3, 6), generator=generator)
    k = torch.tensor([0.25, 1.0, 3.0])
    layer = nn.Linear(2, CLASSES, bias=False)

    def loss(weight: Tensor, x: Tensor, y: Tensor, k: Tensor) -> Tensor:
        return tunable_cross_entropy(functional_call(layer, {"weight": weight}, x), y, k=k)

    gradient = vmap(grad(loss))(weights, x, y, k)
    for i in range(3):
        _, at_logits = reference.loss(x[i] @ weights[i].T, y[i], k[i])
        expected = at_logits.T @ x[i].double()
        torch.testing.assert_close(gradient[i].double(), expected, rtol=1e-4, atol=1e-6)


def test_vmap_with_shared_inputs_and_nested() -> None:
    logits, target = examples()
    k = torch.tensor([0.5, 2.0])
    of_k = vmap(grad(tunable_loss), in_dims=(None, None, 0))(logits, target, k)
    for gradient, value in zip(of_k, k, strict=True):
        assert_right(gradient, logits, target, float(value))
    nested = vmap(vmap(grad(tunable_loss), (0, 0, None)), (None, None, 0))(logits, target, k)
    torch.testing.assert_close(nested, of_k)
    along_last = vmap(grad(tunable_loss), in_dims=(-1, 0, None), out_dims=-1)
    torch.testing.assert_close(along_last(logits.T, target, 0.5), of_k[0].T)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_batched_upstream_gradients_of_one_graph(reduction: str, path: str) -> None:
    logits, target = examples()
    leaf = logits.requires_grad_()
    value = tunable_cross_entropy(leaf, target, k=0.5, reduction=reduction)
    upstream = torch.stack([torch.ones_like(value), 3 * torch.ones_like(value)])
    (both,) = torch.autograd.grad(value, leaf, upstream, is_grads_batched=True)
    f = tunable(logits.detach(), target, 0.5) / (len(logits) if reduction == "mean" else 1)
    torch.testing.assert_close(both, torch.stack([f, 3 * f]))


def test_vmap_over_empty_batches() -> None:
    loss = vmap(lambda z, y: tunable_cross_entropy(z, y, k=0.5, reduction="none"))
    logits = torch.zeros(3, 0, CLASSES, requires_grad=True)
    value = loss(logits, torch.zeros(3, 0, dtype=torch.long))
    value.sum().backward()
    assert value.shape == (3, 0)
    assert logits.grad is not None


class TestTraining:
    """Typical training loops, with a layer below the loss."""

    k = 0.5

    def layer_and_data(self) -> tuple[nn.Linear, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1)
        layer = nn.Linear(3, CLASSES)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        x = torch.randn(8, 3, generator=generator)
        return layer, x, torch.randint(CLASSES, (8,), generator=generator)

    def true_gradient(self, layer: nn.Linear, x: Tensor, y: Tensor) -> Tensor:
        """Return Eq. 3: Σ ∂z_j/∂w f_j for each weight."""
        _, at_logits = reference.loss(layer(x), y, self.k)
        return (at_logits.T @ x.double()).float()

    def assert_right(self, layer: nn.Linear, x: Tensor, y: Tensor, scale: float = 1.0) -> None:
        assert layer.weight.grad is not None
        expected = scale * self.true_gradient(layer, x, y)
        torch.testing.assert_close(layer.weight.grad, expected, rtol=1e-4, atol=1e-6)
        plain = torch.autograd.grad(F.cross_entropy(layer(x), y), layer.weight)[0]
        assert not torch.allclose(layer.weight.grad, scale * plain, rtol=0.1)

    @pytest.mark.usefixtures("path")
    def test_gradient_accumulation(self) -> None:
        layer, x, y = self.layer_and_data()
        criterion = TunableCrossEntropyLoss(k=self.k)
        for part in range(4):
            rows = slice(2 * part, 2 * part + 2)
            (criterion(layer(x[rows]), y[rows]) / 4).backward()
        self.assert_right(layer, x, y)

    @pytest.mark.usefixtures("path")
    def test_grad_scaler(self) -> None:
        layer, x, y = self.layer_and_data()
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        before = layer.weight.detach().clone()
        scaler.scale(TunableCrossEntropyLoss(k=self.k)(layer(x), y)).backward()
        self.assert_right(layer, x, y, scale=1024.0)
        expected = before - 0.1 * self.true_gradient(layer, x, y)
        scaler.unscale_(optimizer)
        self.assert_right(layer, x, y)
        scaler.step(optimizer)
        torch.testing.assert_close(layer.weight.detach(), expected, rtol=1e-4, atol=1e-6)

    @pytest.mark.parametrize("use_reentrant", [True, False])
    @pytest.mark.usefixtures("path")
    def test_activation_checkpointing(self, use_reentrant: bool) -> None:
        layer, x, y = self.layer_and_data()
        x.requires_grad_()
        criterion = TunableCrossEntropyLoss(k=self.k)
        loss = checkpoint(lambda x: criterion(layer(x), y), x, use_reentrant=use_reentrant)
        loss.backward()
        self.assert_right(layer, x.detach(), y)

    @pytest.mark.usefixtures("path")
    def test_backward_twice_is_the_same(self) -> None:
        layer, x, y = self.layer_and_data()
        loss = TunableCrossEntropyLoss(k=self.k)(layer(x), y)
        first = torch.autograd.grad(loss, layer.weight, retain_graph=True)[0]
        loss.backward()
        assert layer.weight.grad is not None
        assert torch.equal(first, layer.weight.grad)
        self.assert_right(layer, x, y)

    @pytest.mark.usefixtures("path")
    def test_sum_of_two_losses(self) -> None:
        """One pseudo-gradient and one gradient meet at the same logits."""
        layer, x, y = self.layer_and_data()
        logits = layer(x).detach().requires_grad_()
        (tunable_cross_entropy(logits, y, k=0.5) + F.cross_entropy(logits, y)).backward()
        assert logits.grad is not None
        expected = reference.loss(logits, y, 0.5)[1] + reference.loss(logits, y, 1.0)[1]
        torch.testing.assert_close(logits.grad.double(), expected, rtol=1e-5, atol=1e-7)

    @pytest.mark.usefixtures("path")
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_in_place_changes_of_logits_are_detected(self, dtype: torch.dtype) -> None:
        logits, target = examples()
        leaf = logits.to(dtype).requires_grad_()
        z = leaf * 1
        loss = tunable_cross_entropy(z, target, k=0.5)
        with torch.no_grad():
            z.zero_()
        if dtype == torch.bfloat16 or cpu.kernels() is None:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
            return
        loss.backward()  # the gradient was computed together with the value
        again = torch.autograd.grad(tunable_cross_entropy(leaf * 1, target, k=0.5), leaf)[0]
        assert leaf.grad is not None
        assert torch.equal(leaf.grad, again)


@covering(
    target_kind=["index", "smoothed", "probability", "rule"],
    dtype=[torch.float32, torch.bfloat16, torch.float64],
    path=PATHS,
)
@pytest.mark.usefixtures("path")
def test_inputs_are_never_written_to(target_kind: str, dtype: torch.dtype) -> None:
    logits, target = examples()
    logits, k = logits.to(dtype), torch.tensor([0.25, 0.5, 2.0, 4.0])
    target = logits.softmax(-1) if target_kind == "probability" else target
    weight = torch.arange(1.0, CLASSES + 1)
    inputs = (logits, target, k, weight)
    before = [tensor.clone() for tensor in inputs]
    leaf = logits.detach().requires_grad_()  # the same memory
    if target_kind == "rule":
        loss = RuleCrossEntropyLoss(focal, weight=weight)(leaf, target)
    else:
        smoothing = 0.1 if target_kind == "smoothed" else 0.0
        loss = tunable_cross_entropy(leaf, target, k=k, weight=weight, label_smoothing=smoothing)
    loss.backward()
    for tensor, copy in zip(inputs, before, strict=True):
        assert torch.equal(tensor, copy)
    assert leaf.grad is not None
    assert leaf.grad.data_ptr() != leaf.data_ptr()


def distributed_worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2
    )
    setup = TestTraining()
    layer, x, y = setup.layer_and_data()
    model = nn.parallel.DistributedDataParallel(layer)
    rows = slice(4 * rank, 4 * rank + 4)
    criterion = TunableCrossEntropyLoss(k=setup.k)
    criterion(model(x[rows]), y[rows]).backward()
    torch.save(layer.weight.grad, f"{folder}/gradient{rank}.pt")
    torch.distributed.destroy_process_group()
    # At a normal exit, the interpreter and PyTorch's threads can deadlock.
    os._exit(0)


@pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()),
    reason="this PyTorch has no gloo",
)
def test_distributed_data_parallel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes, half of the batch each: both end with the gradient of the whole batch."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    with tempfile.TemporaryDirectory() as folder:
        spawn(distributed_worker, (folder,), nprocs=2)
        gradients = [torch.load(f"{folder}/gradient{rank}.pt") for rank in range(2)]
    setup = TestTraining()
    layer, x, y = setup.layer_and_data()
    for layer.weight.grad in gradients:
        setup.assert_right(layer, x, y)


FORK = """
import os, sys, torch
from pseudograd import tunable_cross_entropy

torch.set_num_threads(2)
logits, target = torch.randn(1000, 100, requires_grad=True), torch.arange(1000) % 100

def gradient():
    return torch.autograd.grad(tunable_cross_entropy(logits, target, k=0.5), logits)[0]

before = gradient()
child = os.fork()
if child == 0:
    found = gradient()
    torch.set_num_threads(1)  # PyTorch's own operators would hang
    os._exit(0 if bool((found == before).all()) else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_fork_after_use_does_not_hang() -> None:
    """The parent's threads do not exist in the child, such as a DataLoader worker."""
    needs_kernels()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", FORK], check=True, timeout=120, env=environment)


AT_THE_END = """
import atexit, sys, threading, torch
from pseudograd import tunable_cross_entropy, tunable_linear_cross_entropy

torch.set_num_threads(3)
logits, target = torch.randn(1000, 100, requires_grad=True), torch.arange(1000) % 100

def gradients():
    return [torch.autograd.grad(loss, logits)[0] for loss in (
        tunable_cross_entropy(logits, target, k=0.5),
        tunable_cross_entropy(logits, logits.detach().softmax(-1).flip(0), k=0.5),
        tunable_linear_cross_entropy(logits, torch.eye(100), target, k=0.5),
    )]

before = gradients() if sys.argv[1] == "used before" else None

def again():
    if sys.argv[2] == "thread":
        threading.main_thread().join()
    found = gradients()
    torch.set_num_threads(1)
    expected = before or gradients()
    print(sum(bool((a == b).all()) for a, b in zip(found, expected)), flush=True)

if sys.argv[2] == "atexit":
    atexit.register(again)
else:
    threading.Thread(target=again).start()
"""


@pytest.mark.parametrize(("when", "where"), [("used before", "thread"), ("first use", "atexit")])
def test_the_loss_works_after_the_main_thread_ends(when: str, where: str) -> None:
    """Python then starts no threads, so a loss that needs one would raise."""
    needs_kernels()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", AT_THE_END, when, where]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=environment, check=False
    )
    assert done.stdout.split() == ["3"], done.stderr


def gradient_norm(loss: Loss) -> Loss:
    return lambda z: grad(loss)(z).square().sum()


def double_backward(loss: Loss, logits: Tensor) -> Tensor:
    leaf = logits.clone().requires_grad_()
    (first,) = torch.autograd.grad(loss(leaf), leaf, create_graph=True)
    return torch.autograd.grad(first.square().sum(), leaf)[0]


SECOND_DERIVATIVES: dict[str, Callable[[Loss, Tensor], Any]] = {
    "create_graph": double_backward,
    "grad(grad)": lambda loss, z: grad(gradient_norm(loss))(z),
    "jacrev(jacrev)": lambda loss, z: jacrev(jacrev(loss))(z),
    "jacrev(grad)": lambda loss, z: jacrev(grad(loss))(z),
    "jacfwd(grad)": lambda loss, z: jacfwd(grad(loss))(z),
    "hessian": lambda loss, z: hessian(loss)(z),
    "jvp": lambda loss, z: jvp(loss, (z,), (z,)),
    "autograd.functional.hessian": lambda loss, z: torch.autograd.functional.hessian(loss, z),
    "autograd.functional.hvp": lambda loss, z: torch.autograd.functional.hvp(loss, z, z),
    "gradgradcheck": lambda loss, z: torch.autograd.gradgradcheck(
        loss, z.double().requires_grad_()
    ),
    "vmap(hessian)": lambda loss, z: vmap(hessian(loss))(z.unsqueeze(0)),
}
_, TARGET = examples()
ONCE_ONLY: dict[str, Loss] = {
    "index": lambda z: tunable_cross_entropy(z, TARGET, k=0.5),
    "k = 1": lambda z: tunable_cross_entropy(z, TARGET),
    "smoothed": lambda z: tunable_cross_entropy(z, TARGET, k=0.5, label_smoothing=0.1),
    "probability": lambda z: tunable_cross_entropy(z, torch.eye(CLASSES)[TARGET], k=0.5),
    "rule": lambda z: RuleCrossEntropyLoss(focal)(z, TARGET),
}


@pytest.mark.parametrize("loss", ONCE_ONLY)
@pytest.mark.usefixtures("path")
def test_second_derivatives_are_refused(loss: str, subtests: pytest.Subtests) -> None:
    logits, _ = examples()
    said = r"pseudograd: a (second|forward-mode) derivative"
    for way, derivative in SECOND_DERIVATIVES.items():
        with subtests.test(way), pytest.raises(RuntimeError, match=said):
            derivative(ONCE_ONLY[loss], logits)


COMPILED_SECOND_DERIVATIVES: dict[str, Callable[[Loss, Tensor], Any]] = {
    "compile(grad(grad))": lambda loss, z: compiled(grad(gradient_norm(loss)), "aot_eager")(z),
    "compile(hessian)": lambda loss, z: compiled(hessian(loss), "aot_eager")(z),
    "create_graph": lambda loss, z: double_backward(compiled(loss, "aot_eager"), z),
}


@pytest.mark.parametrize("way", COMPILED_SECOND_DERIVATIVES)
@pytest.mark.parametrize("loss", ["index", "probability"])
def test_second_derivatives_are_refused_when_compiled(way: str, loss: str) -> None:
    """Sometimes by the compiler's own error, but never with a number."""
    logits, _ = examples()
    with pytest.raises(
        RuntimeError,
        match=r"(second|forward-mode) derivative|double backward|have been used|not require grad",
    ):
        COMPILED_SECOND_DERIVATIVES[way](ONCE_ONLY[loss], logits)


def test_first_derivatives_with_a_graph_are_fine() -> None:
    """create_graph alone needs no second derivative."""
    logits, target = examples()
    leaf = logits.requires_grad_()
    (gradient,) = torch.autograd.grad(tunable_loss(leaf, target, 0.5), leaf, create_graph=True)
    assert_right(gradient.detach(), logits.detach(), target, 0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_compiled_autograd(dtype: torch.dtype) -> None:
    """The backward pass of an eager loss, compiled: its temporary arrays must live long enough."""
    logits, target = examples()
    leaf = logits.to(dtype).requires_grad_()
    ks = torch.tensor([0.25, 0.5, 2.0, 4.0], dtype=torch.float16)
    weight = torch.linspace(0.5, 2, CLASSES)
    loss = tunable_cross_entropy(leaf, target, weight, k=ks, reduction="none")
    upstream = torch.linspace(1, 2, len(loss), dtype=dtype)
    (expected,) = torch.autograd.grad(loss, leaf, upstream, retain_graph=True)
    with _enable(torch.compile(backend="eager")):
        loss.backward(upstream)
    torch.testing.assert_close(leaf.grad, expected)


EXPORTED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "index": partial(tunable_cross_entropy, k=0.5),
    "k per example": partial(tunable_cross_entropy, k=torch.tensor([0.25, 0.5, 2.0, 4.0])),
    "weight": partial(
        tunable_cross_entropy, k=0.5, weight=torch.linspace(0.5, 2, CLASSES), ignore_index=1
    ),
    "smoothed": partial(tunable_cross_entropy, k=2.0, label_smoothing=0.1),
    "probability": lambda z, y: tunable_cross_entropy(z, F.one_hot(y, CLASSES).float(), k=0.5),
    "linear": lambda z, y: tunable_linear_cross_entropy(z, torch.eye(CLASSES), y, k=0.5),
}


class Criterion(nn.Module):
    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return self.loss(logits, target)


def saved_and_loaded(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file)


@covering(1, strict=[True, False], loss=EXPORTED)
def test_exported(loss: str, strict: bool) -> None:
    """The graph's own derivative would be plain cross-entropy's."""
    logits, target = examples()
    program = torch.export.export(Criterion(EXPORTED[loss]), (logits, target), strict=strict)
    other = logits.flip(0)
    expected = differentiate(EXPORTED[loss], other, target)
    for again in (program, program.run_decompositions(), saved_and_loaded(program)):
        value = again.module()(other, target)
        torch.testing.assert_close(value, EXPORTED[loss](other, target))
        torch.testing.assert_close(differentiate(again.module(), other, target), expected)


class Whole(nn.Module):
    """A model and its loss, with targets and k among the inputs."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.layer, self.loss = nn.Linear(CLASSES, CLASSES), loss
        with torch.no_grad():
            self.layer.weight.copy_(torch.linspace(-1, 1, CLASSES**2).reshape(CLASSES, CLASSES))

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        value: Tensor = self.loss(self.layer(x), *others)
        return value


def with_any_k(logits: Tensor, target: Tensor, k: float | Tensor = 0.5, **settings: Any) -> Tensor:
    return tunable_cross_entropy(logits, target, k=k, **settings)


DYNAMIC: dict[str, tuple[Loss, tuple[Tensor, ...]]] = {
    "index": (with_any_k, (torch.tensor([0, 1, 4]),)),
    "smoothed": (partial(with_any_k, label_smoothing=0.1), (torch.tensor([0, 1, 4]),)),
    "k per example": (with_any_k, (torch.tensor([0, 1, 4]), torch.tensor([0.25, 0.5, 2.0]))),
    "probability": (with_any_k, (torch.eye(CLASSES)[1:4],)),
    "probability, k per example": (
        with_any_k, (torch.eye(CLASSES)[1:4], torch.tensor([0.25, 0.5, 2.0]))
    ),
    "linear": (
        lambda x, y, k: tunable_linear_cross_entropy(x, torch.eye(CLASSES), y, k=k),
        (torch.tensor([0, 1, 4]), torch.tensor([0.25, 0.5, 2.0])),
    ),
    "linear, z-loss": (
        lambda x, y: tunable_linear_cross_entropy(
            x, torch.eye(CLASSES), y, k=0.5, softcap=5.0, z_loss=0.1
        ),
        (torch.tensor([0, 1, 4]),),
    ),
    "linear, probability": (
        lambda x, q: tunable_linear_cross_entropy(x, torch.eye(CLASSES), q, k=0.5, z_loss=0.1),
        (torch.eye(CLASSES)[1:4],),
    ),
    "k per class, sample weights": (
        lambda z, q, w: tunable_cross_entropy(
            z, q, class_k=torch.linspace(0.5, 2, CLASSES), sample_weight=w
        ),
        (torch.eye(CLASSES)[1:4], torch.tensor([1.0, 0.0, 2.0])),
    ),
    "binary": (
        lambda z, t, k: tunable_binary_cross_entropy_with_logits(z, t, k=k),
        (torch.eye(CLASSES)[1:4], torch.full((3, CLASSES), 0.5)),
    ),
    "rule": (RuleCrossEntropyLoss(focal), (torch.tensor([0, 1, 4]),)),
}  # fmt: skip


@covering(1, strict=[True, False], name=DYNAMIC)
def test_exported_for_any_batch(name: str, strict: bool) -> None:
    loss, others = DYNAMIC[name]
    model, inputs = Whole(loss), (torch.randn(3, CLASSES), *others)
    batch = torch.export.Dim("batch", min=2, max=64)
    shapes = {"x": {0: batch}, "others": tuple({0: batch} for _ in others)}
    program = torch.export.export(model, inputs, dynamic_shapes=shapes, strict=strict)
    larger = [torch.cat([tensor, tensor, tensor[:1]]) for tensor in inputs]
    expected = differentiate(model, *larger)
    torch.testing.assert_close(differentiate(program.module(), *larger), expected)


def test_second_derivatives_of_an_exported_loss_are_refused() -> None:
    logits, target = examples()
    module = torch.export.export(Criterion(EXPORTED["index"]), (logits, target)).module()
    with pytest.raises(RuntimeError, match="a second derivative of a tunable loss"):
        double_backward(lambda z: module(z, target), logits)


@pytest.mark.parametrize("strict", [True, False])
def test_a_custom_rule_is_exported_without_a_derivative(strict: bool) -> None:
    logits, target = examples()
    criterion = RuleCrossEntropyLoss(from_bias(lambda bias, y: bias.clamp(-0.3, 0.3)))
    module = torch.export.export(criterion, (logits, target), strict=strict).module()
    torch.testing.assert_close(module(logits, target), criterion(logits, target))
    with pytest.raises(RuntimeError, match="is Python code that a graph"):
        differentiate(module, logits, target)


def test_compiled_loss_with_parameters_that_require_a_gradient() -> None:
    """The compiler then also traces their derivative, though it is not used."""
    logits, target = examples()
    leaf = logits.clone().requires_grad_()
    torch.compiler.reset()
    rows = compiled(vmap(grad(partial(tunable_cross_entropy, k=0.5))), "aot_eager")(leaf, target)
    assert_right(rows.detach(), logits, target, 0.5)
    with pytest.raises(RuntimeError, match="a second derivative of a tunable loss"):
        rows.square().sum().backward()


TRACED: dict[str, Loss] = {
    **EXPORTED,
    "probability": lambda z, y: tunable_cross_entropy(z, torch.eye(CLASSES)[y], k=0.5),
    "reweighted rule": RuleCrossEntropyLoss(focal),
}


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_a_make_fx_graph_of_the_value_has_the_pseudo_gradient(
    mode: Any, subtests: pytest.Subtests
) -> None:
    """The graph's own derivative would be plain cross-entropy's."""
    logits, target = examples()
    other = logits.flip(0)
    for name, loss in TRACED.items():
        with subtests.test(name):
            graph = make_fx(loss, tracing_mode=mode, _allow_non_fake_inputs=True)(logits, target)
            torch.testing.assert_close(graph(other, target), loss(other, target))
            expected = differentiate(loss, other, target)
            torch.testing.assert_close(differentiate(graph, other, target), expected)


def test_a_make_fx_graph_of_a_custom_rule_has_no_derivative() -> None:
    logits, target = examples()
    graph = make_fx(RuleCrossEntropyLoss(RULES["of the bias"]))(logits, target)
    torch.testing.assert_close(graph(logits, target), F.cross_entropy(logits, target))
    with pytest.raises(RuntimeError, match="is Python code that a graph"):
        differentiate(graph, logits, target)


@pytest.mark.parametrize("mode", ["real", "symbolic"])
def test_a_make_fx_graph_of_the_gradient_is_the_pseudo_gradient(mode: Any) -> None:
    logits, target = examples()

    def by_autograd(logits: Tensor, target: Tensor) -> Tensor:
        return differentiate(tunable_loss, logits, target, 0.5)

    for function in (by_autograd, lambda z, y: grad(tunable_loss)(z, y, 0.5)):
        graph = make_fx(function, tracing_mode=mode)(logits.flip(0), target)
        assert_right(graph(logits, target), logits, target, 0.5)


# A value is the same for every k, so one kind of k is enough here.
ONNX = [
    *("index", "smoothed", "probability, k per example", "linear, z-loss"),
    *("k per class, sample weights", "binary", "rule"),
]


@pytest.mark.parametrize("name", ONNX)
def test_onnx(name: str) -> None:
    """An ONNX graph has no derivative: it computes only the value, in ONNX operators."""
    pytest.importorskip("onnxscript")
    loss, others = DYNAMIC[name]
    model, inputs = Whole(loss), (torch.randn(3, CLASSES), *others)
    batch = torch.export.Dim("batch", min=2, max=64)
    shapes = {"x": {0: batch}, "others": tuple({0: batch} for _ in others)}
    program = torch.onnx.export(model, inputs, dynamo=True, dynamic_shapes=shapes, verbose=False)
    assert program is not None
    domains = {node.domain for node in program.model.graph}
    assert not any("pseudograd" in domain for domain in domains)
    onnxruntime = pytest.importorskip("onnxruntime")
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString())
    larger = [torch.cat([tensor, tensor, tensor[:1]]) for tensor in inputs]
    names = [given.name for given in session.get_inputs()]
    given = {key: tensor.numpy() for key, tensor in zip(names, larger, strict=True)}
    (value,) = session.run(None, given)
    torch.testing.assert_close(torch.from_numpy(value), model(*larger).detach())
