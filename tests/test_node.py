"""The autograd node in C++, with a launcher in Python in place of CUDA's driver.

The fake kernels compute the loss of logits (R, C) at k = 1. Kernel 1 is the forward pass; kernel 2
is the backward pass, which does nothing if the upstream gradient is 1; kernel 3 is one that always
computes the gradient. Kernels 4 and 5 are the passes of a loss that is not reduced.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from pseudograd.loss import functional, tunable_cross_entropy
from pseudograd.loss.triton import PARTS as PARTS_IN_GRAPH
from pseudograd.loss.triton import node, plans
from pseudograd.loss.triton.launch import Launch

Z, TARGET, KS, VALUE, GRADIENT, PARTS, VALUES, FOUND, GRAD, FLAG = range(10)
ROWS, CLASSES = 3, 4
_LAUNCHER = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, *[ctypes.c_uint] * 7, ctypes.c_void_p,
    ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p,
)  # fmt: skip
_POINTER = ctypes.POINTER(ctypes.c_int64)
_SETTER = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
_STREAM = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p))


class Launched(NamedTuple):
    kernel: int
    programs: int
    threads: int
    shared: int
    stream: int
    k: float


def array(parameters: Any, at: int, count: int, kind: Any = ctypes.c_float) -> Any:
    """Return the array that the pointer at this position of the arguments points to."""
    address = ctypes.cast(parameters[at], ctypes.POINTER(ctypes.c_int64)).contents.value
    return np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(kind)), (count,))


class Gpu:
    """Kernels in Python, with a record of launches."""

    def __init__(self) -> None:
        self.launched: list[Launched] = []
        self.error = 0
        self.contexts: list[int] = []
        self.cuLaunchKernel = _LAUNCHER(self)
        self.cuCtxSetCurrent = _SETTER(self.set_context)

    def set_context(self, context: int) -> int:
        self.contexts.append(context)
        return 0

    def __call__(self, kernel: Any, *arguments: Any) -> int:
        programs, _, _, threads, _, _, shared, stream, parameters, _ = arguments
        k = ctypes.cast(parameters[4], ctypes.POINTER(ctypes.c_float)).contents.value
        self.launched.append(Launched(kernel, programs, threads, shared, stream or 0, k))
        z = torch.from_numpy(array(parameters, 0, ROWS * CLASSES).reshape(ROWS, CLASSES))
        target = torch.from_numpy(array(parameters, 1, ROWS, ctypes.c_int64))
        gradient = np.zeros((ROWS, CLASSES))
        if ctypes.cast(parameters[2], ctypes.POINTER(ctypes.c_int64)).contents.value:
            gradient = array(parameters, 2, ROWS * CLASSES).reshape(ROWS, CLASSES)
        result = array(parameters, 3, ROWS if kernel > 3 else 1)  # value or upstream gradient
        bias = z.softmax(1) - torch.nn.functional.one_hot(target, CLASSES)
        if kernel == 1:
            result[0] = torch.nn.functional.cross_entropy(z, target, reduction="sum")
            gradient[:] = bias
        elif kernel == 4:
            result[:] = torch.nn.functional.cross_entropy(z, target, reduction="none")
        elif kernel == 5:
            gradient[:] = bias * torch.from_numpy(result)[:, None]
        elif kernel == 3 or result[0] != 1:
            gradient[:] = bias * float(result[0])
        return self.error


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler")
    path = tmp_path_factory.mktemp("node") / "node.so"
    node.build(path, ["c++", "-O0"])
    return path


@pytest.fixture
def gpu(library: Path) -> tuple[Any, Any, Gpu]:
    """The module, a plan and the kernels."""
    kernels = Gpu()
    module = node.load(library, kernels)
    places = [(0, Z), (1, TARGET), (2, GRADIENT)]
    forward = module.Launch(1, 7, 64, 128, [0] * 5, [*places, (3, VALUE)], 4)
    backward = module.Launch(2, 5, 32, 0, [0] * 5, [*places, (3, GRAD)], 4)
    plan = module.Plan(42, [forward], [backward], torch.float32, torch.float32, 0, 0, 0, 0)
    return module, plan, kernels


def inputs() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(ROWS, CLASSES, requires_grad=True), torch.tensor([0, 3, 1])


def expected(z: Tensor, target: Tensor) -> Tensor:
    loss = torch.nn.functional.cross_entropy(z, target, reduction="sum")
    (gradient,) = torch.autograd.grad(loss, z)
    return gradient


def test_value_and_gradient(gpu: Any) -> None:
    module, plan, kernels = gpu
    z, target = inputs()
    loss = module.loss(plan, z, target, None, 0.5, None, 17)
    assert loss.item() == pytest.approx(
        torch.nn.functional.cross_entropy(z, target, reduction="sum").item()
    )
    loss.backward()
    torch.testing.assert_close(z.grad, expected(z, target))
    assert kernels.launched == [
        Launched(1, 7, 64, 128, 17, 0.5),
        Launched(2, 5, 32, 0, 17, 0.5),
    ]
    # The engine may run the backward pass in a thread that has no context yet.
    assert kernels.contexts == [42, 42]


def test_upstream_gradient(gpu: Any) -> None:
    module, plan, _ = gpu
    z, target = inputs()
    (3 * module.loss(plan, z, target, None, 1.0, None, 0)).backward()
    torch.testing.assert_close(z.grad, 3 * expected(z, target))


@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_a_gradient_that_is_left_to_the_backward_pass(gpu: Any, factor: float) -> None:
    module, _, kernels = gpu
    places = [(0, Z), (1, TARGET), (2, GRADIENT)]
    forward = module.Launch(1, 7, 64, 128, [0] * 5, [*places, (3, VALUE)], 4)
    backward = module.Launch(3, 5, 32, 0, [0] * 5, [*places, (3, GRAD)], 4)
    plan = module.Plan(42, [forward], [backward], torch.float32, None, 0, 0, 0, 0)
    z, target = inputs()
    loss = module.loss(plan, z, target, None, 1.0, None, 0)
    (both,) = torch.autograd.grad(
        loss, z, torch.tensor([1.0, 2.0]), is_grads_batched=True, retain_graph=True
    )
    torch.testing.assert_close(both[1], 2 * expected(z, target))
    (factor * loss).backward()
    torch.testing.assert_close(z.grad, factor * expected(z, target))
    assert [one.kernel for one in kernels.launched] == [1, 3, 3]


@pytest.mark.parametrize("how", ["mean", "weights", "batch"])
def test_a_loss_that_is_not_reduced(gpu: Any, how: str) -> None:
    module, _, _ = gpu
    places = [(0, Z), (1, TARGET)]
    forward = module.Launch(4, 7, 64, 128, [0] * 5, [*places, (3, VALUE)], 4)
    backward = module.Launch(5, 5, 32, 0, [0] * 5, [*places, (2, GRADIENT), (3, GRAD)], 4)
    plan = module.Plan(42, [forward], [backward], torch.float32, None, 0, 0, 0, 1)
    z, target = inputs()
    loss = module.loss(plan, z, target, None, 1.0, None, 0)
    each = torch.nn.functional.cross_entropy(z, target, reduction="none")
    torch.testing.assert_close(loss, each)
    upstream = {  # an expanded tensor, a strided one, and a vmapped batch
        "mean": torch.full((), 1 / ROWS).expand(ROWS),
        "weights": torch.tensor([[1.0, 9.0], [0.0, 9.0], [3.0, 9.0]])[:, 0],
        "batch": torch.tensor([[1.0, 0.0, 3.0], [2.0, 5.0, 0.5]]),
    }[how]
    batched = how == "batch"
    (found,) = torch.autograd.grad(loss, z, upstream, is_grads_batched=batched)
    (true,) = torch.autograd.grad(each, z, upstream, is_grads_batched=batched)
    torch.testing.assert_close(found, true)


def test_an_unaligned_upstream_gradient(gpu: Any) -> None:
    module, plan, _ = gpu
    z, target = inputs()
    upstream = torch.tensor([1.0, 3.0])[1]
    module.loss(plan, z, target, None, 1.0, None, 0).backward(upstream)
    torch.testing.assert_close(z.grad, 3 * expected(z, target))


def test_a_graph_that_is_kept(gpu: Any) -> None:
    module, plan, _ = gpu
    z, target = inputs()
    loss = module.loss(plan, z, target, None, 1.0, None, 0)
    (first,) = torch.autograd.grad(loss, z, retain_graph=True)
    first.zero_()  # it belongs to the caller
    (second,) = torch.autograd.grad(2 * loss, z, retain_graph=True)
    torch.testing.assert_close(second, 2 * expected(z, target))
    loss.backward()
    torch.testing.assert_close(z.grad, expected(z, target))
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_batched_upstream_gradients(gpu: Any) -> None:
    module, plan, _ = gpu
    z, target = inputs()
    loss = module.loss(plan, z, target, None, 1.0, None, 0)
    (both,) = torch.autograd.grad(loss, z, torch.tensor([1.0, 2.0]), is_grads_batched=True)
    torch.testing.assert_close(both[1], 2 * expected(z, target))


def test_second_derivatives_are_refused(gpu: Any) -> None:
    module, plan, _ = gpu
    z, target = inputs()
    loss = module.loss(plan, z, target, None, 1.0, None, 0)
    (gradient,) = torch.autograd.grad(loss, z, create_graph=True)
    torch.testing.assert_close(gradient.detach(), expected(z, target))
    with pytest.raises(RuntimeError, match="second derivative"):
        gradient.sum().backward()


def test_forward_mode_is_refused(gpu: Any) -> None:
    module, plan, _ = gpu
    z, target = inputs()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(z, torch.ones_like(z))
        with pytest.raises(RuntimeError, match="forward-mode"):
            module.loss(plan, dual, target, None, 1.0, None, 0)


def test_in_place_changes_of_logits_are_detected(gpu: Any) -> None:
    module, plan, _ = gpu
    z, target = inputs()
    logits = z * 1
    loss = module.loss(plan, logits, target, None, 1.0, None, 0)
    logits += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class Operators:
    """The operators of compiled graphs, run by the node on the CPU, and what they ask Python for.

    The plan leaves the gradient to the backward pass, as in a graph.
    """

    def __init__(self, module: Any, plan: Any) -> None:
        self.module, self.plan = module, plan
        self.asked: list[tuple[Any, ...]] = []
        self.stream = _STREAM(self.current_stream)
        address = node._address(self.stream)
        in_python = self.make_plan, self.loss, self.gradient
        module.run_operators("CPU", address, PARTS_IN_GRAPH, *in_python)

    def forward(self, z: Tensor, target: Tensor, k: float = 1.0, **settings: Any) -> Any:
        settings = {"ks": None, "reduction": "sum", "training": True} | settings
        return torch.ops.pseudograd.loss_on_gpu(
            z, target, k, ignore_index=-100, smoothing=0.0, **settings
        )

    def backward(
        self, z: Tensor, target: Tensor, kept: Any, grad: Tensor, k: float = 1.0, **settings: Any
    ) -> Any:
        settings = {"ks": None, "reduction": "sum"} | settings
        return torch.ops.pseudograd.gradient_on_gpu(
            z, target, k, parts=kept[0], found=kept[1], grad=grad, ignore_index=-100, smoothing=0.0,
            **settings,
        )  # fmt: skip

    def current_stream(self, device: int, stream: Any) -> int:
        stream[0] = 17
        return 0

    def make_plan(self, *call: Any) -> Any:
        self.asked.append(("plan", *call))
        return self.plan

    def loss(self, *call: Any) -> tuple[Tensor, Tensor, Tensor]:
        self.asked.append(("loss", *call))
        return torch.tensor(5.0), torch.ones(2), torch.ones(3)

    def gradient(self, *call: Any) -> Tensor:
        self.asked.append(("gradient", *call))
        return torch.full((2,), 7.0)


@pytest.fixture
def operators(gpu: Any) -> Iterator[tuple[Operators, Gpu]]:
    module, _, kernels = gpu
    forward = module.Launch(1, 7, 64, 128, [0] * 5, [(0, Z), (1, TARGET), (3, VALUE)], 4)
    backward = module.Launch(
        3, 5, 32, 0, [0] * 5, [(0, Z), (1, TARGET), (2, GRADIENT), (3, GRAD)], 4
    )
    plan = module.Plan(42, [forward], [backward], torch.float32, None, 0, 0, 0, 0)
    yield Operators(module, plan), kernels
    module.run_operators("", 0, 0, None, None, None)


def test_the_operators_for_graphs(operators: Any) -> None:
    run, kernels = operators
    z, target = inputs()
    for factor in (1, 3):
        logits, k = (z * factor).detach(), 7.0 * factor
        value, *kept = run.forward(logits, target, k)
        loss = torch.nn.functional.cross_entropy(logits, target, reduction="sum")
        assert value.item() == pytest.approx(loss.item())
        assert [len(one) for one in kept] == [PARTS_IN_GRAPH, 3 * ROWS]
        gradient = run.backward(logits, target, kept, torch.tensor(2.0), k)
        torch.testing.assert_close(gradient, 2 * expected(logits.requires_grad_(), target))
    # One plan for both passes, which are launched on the current stream with the k of the call.
    assert [one[0] for one in run.asked] == ["plan"]
    assert run.asked[0][3:] == (7.0, -100, "sum", 0.0, True)
    assert [(one.kernel, one.stream, one.k) for one in kernels.launched] == [
        (1, 17, 7.0), (3, 17, 7.0), (1, 17, 21.0), (3, 17, 21.0),
    ]  # fmt: skip


def test_what_a_plan_keeps_reaches_its_backward_pass(gpu: Any) -> None:
    """The buffers of the forward pass, in the sizes that the compiler was told."""
    module, _, _ = gpu
    seen: list[list[int]] = []

    class Kernels(Gpu):
        def __call__(self, kernel: Any, *arguments: Any) -> int:
            parameters = arguments[8]
            pointers = (
                ctypes.cast(parameters[at], ctypes.POINTER(ctypes.c_int64)) for at in (0, 1)
            )
            seen.append([kernel, *(pointer.contents.value for pointer in pointers)])
            return 0

    kernels = Kernels()
    module.prepare(node._address(kernels.cuLaunchKernel), node._address(kernels.cuCtxSetCurrent),
                   "", "")  # fmt: skip
    places = [(0, PARTS), (1, FOUND)]
    passes = ([module.Launch(kernel, 1, 32, 0, [0, 0], places, -1)] for kernel in (1, 2))
    plan = module.Plan(42, *passes, torch.float32, None, PARTS_IN_GRAPH, 0, 3 * ROWS, 0)
    run = Operators(module, plan)
    try:
        z, target = inputs()
        _, *kept = run.forward(z.detach(), target)
        run.backward(z.detach(), target, kept, torch.tensor(1.0))
    finally:
        module.run_operators("", 0, 0, None, None, None)
    addresses = [one.data_ptr() for one in kept]
    assert seen == [[1, *addresses], [2, *addresses]]
    assert [(len(one), one.dtype) for one in kept] == [
        (PARTS_IN_GRAPH, torch.float64), (3 * ROWS, torch.float32),
    ]  # fmt: skip


def test_each_layout_has_a_plan_of_its_own(operators: Any) -> None:
    run, _ = operators
    z, target = inputs()
    z = z.detach()
    calls: list[dict[str, Any]] = [
        {}, {"k": 0.5}, {"k": 7.0}, {"k": 8.0}, {"training": False}, {"reduction": "mean"},
        {"ks": torch.ones(ROWS)}, {"ks": torch.ones(ROWS, dtype=torch.float64)},
        {"ks": torch.ones(())},
    ]  # fmt: skip
    for _ in range(2):
        for call in calls:
            run.forward(z, target, **call)
        run.forward(z.t().contiguous().t(), target)
    assert [one[0] for one in run.asked] == ["plan"] * len(calls)  # k = 7 and 8 share one


def test_calls_that_the_operators_leave_to_python(operators: Any) -> None:
    run, kernels = operators
    z, target = inputs()
    z, grad = z.detach(), torch.tensor(1.0)
    unaligned = torch.zeros(ROWS * CLASSES + 1)[1:].reshape(ROWS, CLASSES)
    for logits, ks in ((unaligned, None), (z, torch.ones(ROWS + 1)[1:])):
        value, *kept = run.forward(logits, target, ks=ks)
        assert (value.item(), *map(len, kept)) == (5, 2, 3)
        assert run.backward(logits, target, kept, grad, ks=ks).tolist() == [7, 7]
    run.plan = None  # such as labels in another dtype
    run.forward(z, target)
    assert [one[0] for one in run.asked] == ["loss", "gradient"] * 2 + ["plan", "loss"]
    assert [len(one) for one in run.asked[1][4:6]] == [2, 3]
    assert run.asked[1][7:] == (-100, "sum", 0.0)
    assert kernels.launched == []


def test_without_training_the_operator_keeps_nothing(gpu: Any) -> None:
    module, _, _ = gpu
    forward = module.Launch(4, 7, 64, 128, [0] * 5, [(0, Z), (1, TARGET), (3, VALUE)], 4)
    plan = module.Plan(42, [forward], [], torch.float32, None, 0, 0, 0, 1)
    run = Operators(module, plan)
    try:
        value, *kept = run.forward(*inputs(), training=False)
    finally:
        module.run_operators("", 0, 0, None, None, None)
    assert value.shape == (ROWS,)
    assert [(one.shape, one.dtype) for one in kept] == [
        ((0,), torch.float64), ((0,), torch.float32),
    ]  # fmt: skip


def test_a_compiled_graph_calls_the_operators(operators: Any) -> None:
    _, kernels = operators
    z, target = inputs()

    def loss_of(z: Tensor) -> Tensor:
        return 2 * tunable_cross_entropy(z, target, reduction="sum", implementation="triton")

    compiled = torch.compile(loss_of, backend="aot_eager", fullgraph=True)
    loss = torch.nn.functional.cross_entropy(z, target, reduction="sum")
    for _ in range(2):
        value = compiled(z)
        assert value.item() == pytest.approx(2 * loss.item())
        (gradient,) = torch.autograd.grad(value, z)
        torch.testing.assert_close(gradient, 2 * expected(z, target))
    assert [one.kernel for one in kernels.launched] == [1, 3, 1, 3]


def test_the_node_takes_the_operators_over_during_a_call(
    gpu: Any, operators: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where the first call after the compilation loads the node."""
    run, kernels = operators
    module, plan, _ = gpu[0], run.plan, run.module.run_operators("", 0, 0, None, None, None)
    z, target = inputs()
    z, taken = z.detach(), []
    call = (z, target, 1.0, None, -100, "sum", 0.0, True)
    python = node.loss_in_graph

    def first(*asked: Any) -> tuple[Tensor, Tensor, Tensor]:
        taken.append(Operators(module, plan))
        return python(*asked)

    monkeypatch.setattr(node, "loss_in_graph", first)
    results = [torch.ops.pseudograd.loss_on_gpu(*call) for _ in range(3)]
    assert (len(taken), len(kernels.launched)) == (1, 2)
    module.run_operators("", 0, 0, None, None, None)
    monkeypatch.undo()
    results.append(torch.ops.pseudograd.loss_on_gpu(*call))  # in Python again
    assert len(kernels.launched) == 2
    for value, *_ in results:
        torch.testing.assert_close(value, results[0][0])


def test_a_failed_launch(gpu: Any) -> None:
    module, plan, kernels = gpu
    kernels.error = 700
    with pytest.raises(RuntimeError, match="CUDA error 700"):
        module.loss(plan, *inputs(), None, 1.0, None, 0)


def test_arguments_of_a_kernel() -> None:
    """As Triton describes a compiled kernel: constants take no position."""

    class Compiled:
        class src:
            signature = {  # noqa: RUF012
                "z": "*fp32", "ks": "constexpr", "k": "fp32", "rows": "i32", "one": "constexpr",
                "share": "fp32", "special": "constexpr",
            }  # fmt: skip

        class metadata:
            name, num_warps, shared = "tile", 4, 96

            class target:
                warp_size = 32

        function, asm = 12345, {"cubin": b"code"}

    z = torch.zeros(2)
    launched = Launch(Compiled, (9,), (z, None, 0.5, 7, 1, 0.25))
    step = node._step(launched, {id(z): Z})
    share = int.from_bytes(np.float32(0.25).tobytes(), "little")
    half = int.from_bytes(np.float32(0.5).tobytes(), "little")
    assert step == (12345, 9, 128, 96, [0, half, 7, share, 0, 0], [(0, Z)], 1, "tile", b"code")


class Driver:
    """Loads the code of kernels, whose functions are numbers."""

    def __init__(self) -> None:
        self.loaded: list[bytes] = []
        self.error = 0

    def cuModuleLoadData(self, module: Any, code: bytes) -> int:
        self.loaded.append(code)
        module._obj.value = 7
        return self.error

    def cuModuleGetFunction(self, function: Any, module: Any, name: bytes) -> int:
        function._obj.value = 100 * module.value + len(name)
        return 0


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of the plans for a GPU."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    plans._folder.cache_clear()
    return plans._folder(0)


def a_plan(**changes: Any) -> plans.Plan:
    step = plans.Step(5, 9, 128, 96, [0, 2**40, -1], [(0, Z), (2, VALUE)], 1, "tile", b"code")
    step = step._replace(**changes)
    backward = [step, step._replace(code=b"other", name="row", k_at=-1)]
    return plans.Plan([step], backward, torch.float32, torch.bfloat16, [1, 0, 3], 0)


LAYOUT = ((torch.Size([3, 4]), (4, 1), torch.float32, None), (-100, "mean", 0.1))


def test_what_changes_kernels_starts_a_new_folder(
    a_gpu: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes: list[tuple[Any, str, Any]] = [
        (torch, "__version__", "9.9"), (torch.cuda, "get_device_name", lambda device: "another"),
        (importlib.metadata, "version", lambda name: "9.9"), (plans, "GREATEST_K", 128.0),
    ]  # fmt: skip
    folders = {a_gpu}
    for change in changes:
        with monkeypatch.context() as patch:
            patch.setattr(*change)
            plans._folder.cache_clear()
            folders.add(plans._folder(0))
    plans._folder.cache_clear()
    assert len(folders) == 1 + len(changes)


def test_a_saved_plan(a_gpu: Path) -> None:
    driver = Driver()
    assert plans.saved_plan(LAYOUT, 0, driver) is None
    plan = a_plan()
    plans.save_plan(LAYOUT, 0, plan)
    again = plans.saved_plan(LAYOUT, 0, driver)
    first = plan.forward[0]._replace(function=704, code=None)
    backward = [first, first._replace(function=703, name="row", k_at=-1)]
    assert again == plan._replace(forward=[first], backward=backward)
    assert driver.loaded == [b"code", b"other"]  # each once
    assert plans.saved_plan((LAYOUT[0], (-100, "sum", 0.1)), 0, driver) is None
    plans.save_plan(LAYOUT, 0, plan._replace(gradient=None))
    without = plans.saved_plan(LAYOUT, 0, driver)
    assert without is not None
    assert without.gradient is None


def test_kernels_that_another_process_has_run(a_gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They run here, which is known without importing Triton."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert not plans.exist_for(0)
    plans.save_plan(LAYOUT, 0, a_plan())
    with monkeypatch.context() as patch:  # another machine with the same home
        patch.delenv("CC", raising=False)
        patch.setattr(shutil, "which", lambda name: None)
        assert not plans.exist_for(0)
    monkeypatch.setenv("CC", "cc")
    monkeypatch.setitem(sys.modules, "pseudograd.loss.triton.launch", None)  # cannot be imported
    functional.kernels_run.cache_clear()
    try:
        assert functional.kernels_run()
    finally:
        functional.kernels_run.cache_clear()


def test_plans_that_cannot_be_used(a_gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plans.save_plan(LAYOUT, 0, a_plan(code=None))
    plans.save_plan(LAYOUT, 0, a_plan(shared=50_000))
    assert not list(a_gpu.glob("*.json"))
    plans.save_plan(LAYOUT, 0, a_plan())
    failing = Driver()
    failing.error = 700
    assert plans.saved_plan(LAYOUT, 0, failing) is None
    (path,) = a_gpu.glob("*.json")
    text = path.read_text("utf-8")
    for broken in (text[:50], "[]", "{}", text.replace("-100", "-200"), text.replace("k_at", "k")):
        path.write_text(broken, "utf-8")
        assert plans.saved_plan(LAYOUT, 0, Driver()) is None, broken
    path.write_text(text, "utf-8")
    assert plans.saved_plan(LAYOUT, 0, Driver()) is not None
    for code in a_gpu.glob("*.cubin"):
        code.write_bytes(b"damaged")
    assert plans.saved_plan(LAYOUT, 0, Driver()) is None
    monkeypatch.setattr(plans, "_MOST_SAVED", 1)
    plans.save_plan(((), ()), 0, a_plan())
    assert list(a_gpu.glob("*.json")) == [path]


def test_a_plan_is_made_once_and_saved(
    gpu: Any, a_gpu: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process finds it; here the kernels of `Gpu` have the numbers that a driver gives."""
    module, _, kernels = gpu
    z, target = inputs()
    places = [(0, Z), (1, TARGET), (2, GRADIENT)]
    first = plans.Step(1, 7, 64, 128, [0] * 5, [*places, (3, VALUE)], 4, "f", b"forward")
    second = plans.Step(2, 5, 32, 0, [0] * 5, [*places, (3, GRAD)], 4, "b", b"backward")
    made = []

    def make() -> plans.Plan:
        made.append(1)
        return plans.Plan([first], [second], torch.float32, torch.float32, [0, 0, 0], 0)

    class Numbers(Driver):
        def cuModuleGetFunction(self, function: Any, module: Any, name: bytes) -> int:
            function._obj.value = {b"f": 1, b"b": 2}[name]
            return 0

    driver = Numbers()
    monkeypatch.setattr(node, "_driver", lambda: driver)
    monkeypatch.setattr(node, "_context", lambda: 42)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)
    for process in range(2):
        monkeypatch.setattr(node, "_plans", {})
        plan = node._remembered(module, (z, target, 0.5), ("mean",), make)
        z.grad = None
        module.loss(plan, z, target, None, 0.5, None, 17).backward()
        torch.testing.assert_close(z.grad, expected(z, target))
        assert (len(made), len(driver.loaded)) == (1, 2 * process)
    assert [one.kernel for one in kernels.launched] == [1, 2, 1, 2]


def test_the_node_does_not_import_triton() -> None:
    """Which takes longer than all of a first loss with saved plans."""
    code = "import sys, pseudograd.loss.triton.node; assert 'triton' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_threads_load_the_node_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading it again would free the operators that another thread may be running."""
    loaded, both = [], threading.Barrier(2)

    def load(path: Path) -> Path:
        loaded.append(path)
        time.sleep(0.2)  # as long as another thread takes to get here
        return path

    library = tmp_path / "node.so"
    library.touch()
    monkeypatch.setattr(node, "library_path", lambda: library)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(node, "load", load)
    monkeypatch.setattr(node, "_run_operators", lambda module: None)
    compiled, results = node._Build(), []

    def call() -> None:
        both.wait()
        results.append(compiled())

    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (loaded, results) == ([library], [library] * 2)


def test_no_node_while_it_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "node.so"
    done: list[bool] = []
    started: list[Any] = []

    class Process:
        def __init__(self, *arguments: Any, **options: Any) -> None:
            started.append(arguments)

        def poll(self) -> int | None:
            return 0 if done else None

    monkeypatch.setattr(node, "library_path", lambda: library)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(node, "_compiler", lambda: ["c++"])
    monkeypatch.setattr(subprocess, "Popen", Process)
    monkeypatch.setattr(node, "load", lambda path: path)
    compiled = node._Build()
    assert [compiled(), compiled(), len(started)] == [None, None, 1]
    done.append(True)
    library.touch()
    with monkeypatch.context() as patch:  # a CUDA graph goes on as it began
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert compiled() is None
    assert [compiled(), compiled(), len(started)] == [library, library, 1]
    library.unlink()
    failed = node._Build()
    assert [failed(), failed(), len(started)] == [None, None, 2]  # the compiler has failed
    monkeypatch.setattr(node, "_compiler", lambda: None)
    assert [node._Build()(), len(started)] == [None, 2]
