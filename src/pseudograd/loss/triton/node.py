"""The most common calls of the loss on a GPU, by an autograd node in C++ (node.cpp).

For a small loss, Python's launch overhead exceeds the time on the GPU. So the first call on a GPU
compiles node.cpp in the background, against the installed PyTorch, and caches the result on disk.
That needs a C++ compiler and takes half a minute. Until then, or if it fails, `operators` is the
fallback. `python -m pseudograd.loss.triton.node` compiles it in the foreground and shows errors.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.machinery
import importlib.util
import os
import shlex
import shutil
import struct
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pseudograd.loss.autograd import NO_FORWARD_MODE, NO_SECOND_DERIVATIVE, are_hooked
from pseudograd.loss.cpu import Call
from pseudograd.loss.triton import PARTS
from pseudograd.loss.triton.plans import Plan, Step, save_plan, saved_plan
from pseudograd.loss.triton.scaled import ScaledBefore
from pseudograd.rules.paper import Sensitivity

# Modules with kernels import Triton, so they are imported where there is no saved plan.
if TYPE_CHECKING:
    from pseudograd.loss.triton.launch import Launch, Rows

_NAME = "pseudograd_node"
_SOURCE = Path(__file__).with_suffix(".cpp")
# More layouts than a program should have; at this size the cache is cleared.
_MOST_PLANS = 4096


# --- calls ----------------------------------------------------------------------------------------


def loss_by_node(
    z: Tensor, call: Call, dtype: torch.dtype, scaled: ScaledBefore | None
) -> Tensor | None:
    """Return the loss of rows (R, C), or None if the node does not support the call."""
    target, k, _, *settings, smoothing = call
    module = compiled_node()
    if module is None or are_hooked() or not len(z):
        return None
    flag = None if scaled is None else scaled.flag()
    training = z.requires_grad and torch.is_grad_enabled()
    # If the last loss was scaled, the gradient is left to the backward pass.
    at_once = training and not (flag is not None and flag.item())
    results = (dtype, z.dtype if at_once else None, training, False)
    plan = _plan(module, z, target, k, (*settings, smoothing), results, flag)
    if plan is None:
        return None
    return _loss(module, plan, z, target, k, flag)


def binary_loss_by_node(
    z: Tensor, target: Tensor, k: Sensitivity, reduction: str, dtype: torch.dtype
) -> Tensor | None:
    """Return the binary loss of logits, or None if the node does not support the call.

    The targets, and k if it is a tensor, have the shape of the logits.
    """
    module = compiled_node()
    dense = z.is_contiguous() and target.is_contiguous()
    if module is None or are_hooked() or not (dense and z.numel()):
        return None
    if isinstance(k, Tensor) and not k.is_contiguous():
        return None
    training = z.requires_grad and torch.is_grad_enabled()
    settings = (reduction, dtype, training)
    plan = _remembered(
        module, (z, target, k), settings, lambda: _make_binary_plan(z, target, k, *settings)
    )
    return None if plan is None else _loss(module, plan, z, target, k, None)


def _loss(
    module: Any, plan: Any, z: Tensor, target: Tensor, k: Sensitivity, flag: Tensor | None
) -> Tensor:
    ks, number = (k, 1.0) if isinstance(k, Tensor) else (None, k)
    stream = torch._C._cuda_getCurrentRawStream(z.get_device())
    loss: Tensor = module.loss(plan, z, target, ks, number, flag, stream)
    return loss


def loss_in_graph(
    z: Tensor,
    target: Tensor,
    k: Sensitivity,
    ignore_index: int,
    reduction: str,
    smoothing: float,
    training: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the results of the operator `loss_on_gpu`; see `operators.loss_in_graph`.

    It runs until node.cpp is compiled, and later for calls that have no plan.
    """
    from pseudograd.loss.triton import operators

    if z.is_cuda:  # Triton's interpreter has no node
        compiled_node()
    rows = _rows_in_graph(z, target, k, ignore_index, smoothing)
    return operators.loss_in_graph(rows, reduction, training)


def gradient_in_graph(
    z: Tensor, target: Tensor, k: Sensitivity, parts: Tensor, found: Tensor, grad: Tensor,
    ignore_index: int, reduction: str, smoothing: float,
) -> Tensor:  # fmt: skip
    """Return the result of the operator `gradient_on_gpu`, where `loss_in_graph` runs."""
    from pseudograd.loss.triton import operators

    rows = _rows_in_graph(z, target, k, ignore_index, smoothing)
    return operators.gradient_in_graph(rows, parts, found, grad, reduction)


def _rows_in_graph(
    z: Tensor, target: Tensor, k: Sensitivity, ignore_index: int, smoothing: float
) -> Rows:
    from pseudograd.loss.triton.launch import rows_of_loss

    if isinstance(k, Tensor):
        k = k.to(z.device) if k.dim() or not k.is_cpu else k.item()
    return rows_of_loss(z.resolve_neg(), target.resolve_neg(), k, None, ignore_index, smoothing)


def plan_in_graph(
    z: Tensor,
    target: Tensor,
    k: Sensitivity,
    ignore_index: int,
    reduction: str,
    smoothing: float,
    training: bool,
) -> Any:
    """Return the plan of both passes in a graph, or None if the node does not support the call."""
    settings, results = (ignore_index, reduction, smoothing), (torch.float32, None, training, True)
    return _plan(compiled_node.module, z, target, k, settings, results, None)


_plans: dict[Any, Any] = {}


def _plan(
    module: Any, z: Tensor, target: Tensor, k: Sensitivity, settings: tuple[Any, ...],
    results: tuple[torch.dtype, torch.dtype | None, bool, bool],
    flag: Tensor | None,
) -> Any:  # fmt: skip
    """Return the plan for calls of this layout, or None if the node does not support them.

    Args:
        module: The compiled node.
        z: Logits (R, C).
        target: Labels (R) or probabilities (R, C).
        k: The sensitivity.
        settings: ``ignore_index``, ``reduction`` and ``label_smoothing``.
        results: The dtypes of the loss and of the gradient, None if the forward pass does not
            compute it; whether there is a backward pass; and whether it is for a graph.
        flag: Receives whether the loss was scaled.

    """

    def make() -> Plan | None:
        from pseudograd.loss.triton.launch import rows_of_loss

        ignore_index, reduction, smoothing = settings
        rows = rows_of_loss(z.detach(), target.detach(), k, None, ignore_index, smoothing)
        given = z.data_ptr(), target.data_ptr()
        as_they_are = (rows.z.data_ptr(), rows.target.data_ptr()) == given
        return _make_plan(rows, reduction, *results, flag) if as_they_are else None

    return _remembered(module, (z, target, k), (*settings, *results, flag is None), make)


def _remembered(
    module: Any, inputs: tuple[Tensor, Tensor, Sensitivity], settings: tuple[Any, ...],
    make: Callable[[], Plan | None],
) -> Any:  # fmt: skip
    """Return the plan for logits, targets and k of this layout; None where there can be none.

    It is remembered in this process, and on disk for others.
    """
    z, target, k = inputs
    device, address = z.get_device(), z.data_ptr() | target.data_ptr()
    if isinstance(k, Tensor):
        address |= k.data_ptr()
        sensitivity: Any = k.dtype, k.stride()
    else:
        sensitivity = k if k in (0.5, 1.0, 2.0) else None  # these have specialized kernels
    if address % 16 or device != torch._C._cuda_getDevice() or torch._C._len_torch_dispatch_stack():
        return None
    if z.is_neg() or target.is_neg():  # kernels read memory as it is
        return None
    layout = (
        (device, z.shape, z.stride(), z.dtype, target.dtype, target.stride(), sensitivity),
        settings,
    )
    if layout not in _plans:
        if len(_plans) >= _MOST_PLANS:
            _plans.clear()
        on_any_device = (layout[0][1:], settings)
        plan = saved_plan(on_any_device, device, _driver()) if _context() else None
        if plan is None:
            plan = make()
            if plan is not None:
                save_plan(on_any_device, device, plan)
        _plans[layout] = None if plan is None else _plan_of(module, plan)
    return _plans[layout]


def _make_plan(
    rows: Rows, reduction: str, dtype: torch.dtype, gradient: torch.dtype | None,
    differentiable: bool, in_graph: bool, flag: Tensor | None,
) -> Plan:  # fmt: skip
    """Launch the kernels of both passes once, to compile them and record their arguments."""
    from pseudograd.loss.triton.launch import launch
    from pseudograd.loss.triton.operators import (
        always_left,
        keeps_numbers,
        launch_forward,
        numbers_in_graph,
        room_for,
    )

    each = reduction == "none"
    left = (always_left(rows) or each) and differentiable
    gradient, flag = (None, None) if left else (gradient, flag)
    keeps = (rows.long or each) and keeps_numbers(rows)
    found = differentiable and (numbers_in_graph(rows, reduction) if in_graph else keeps)
    room = room_for(rows, reduction, dtype, gradient, found)
    if each:
        room = room._replace(value=room.value.to(dtype))  # rounded by the kernel
    forward, backward = launch_forward(rows, room, reduction), []
    grad = torch.ones_like(room.value)
    if differentiable:
        at_once = room.gradient is not None
        room = room if at_once else room._replace(gradient=torch.empty_like(rows.z))
        backward = [
            launch(
                rows, None, room.gradient, mean=reduction == "mean" and room.values is None,
                parts=room.parts, grad=grad, scaled=flag, skip=at_once, given=room.found,
            )
        ]  # fmt: skip
    tensors = (rows.z, rows.target, rows.ks, *room, grad, flag)
    return _recorded(forward, backward, tensors, gradient)


def _make_binary_plan(
    z: Tensor, target: Tensor, k: Sensitivity, reduction: str, dtype: torch.dtype,
    differentiable: bool,
) -> Plan:  # fmt: skip
    """Return the plan of a binary loss, as `_make_plan`."""
    from pseudograd.loss.triton import binary

    z, ks, number = z.detach(), None, 1.0
    if isinstance(k, Tensor):
        ks = k
    else:
        number = k
    arrays = (target, None, None, ks)
    room = binary.room_for(z, reduction, dtype, differentiable)
    forward = binary.launch_forward(z, arrays, number, reduction, room)
    backward, f, grad = [], room.gradient, torch.ones_like(room.value)
    if differentiable:
        f, skip = (torch.empty_like(z), False) if f is None else (f, True)
        backward = [binary.launch_backward(z, arrays, number, reduction, f, grad, skip)]
    tensors = (z, target, ks, room.value, f, None, room.sums, None, grad, None)
    gradient = None if room.gradient is None else z.dtype
    return _recorded(forward, backward, tensors, gradient)


def _recorded(
    forward: Sequence[Launch | None], backward: Sequence[Launch | None],
    tensors: tuple[Tensor | None, ...], gradient: torch.dtype | None,
) -> Plan:  # fmt: skip
    """Return a plan of these launches; the tensors are in the order of `Slot` in node.cpp."""
    slots = {id(tensor): at for at, tensor in enumerate(tensors) if tensor is not None}
    first, second = (
        [_step(launched, slots) for launched in launches if launched is not None]
        for launches in (forward, backward)
    )
    _, _, _, value, _, *buffers, _, _ = tensors
    sizes = [0 if buffer is None else buffer.numel() for buffer in buffers]
    assert value is not None
    return Plan(first, second, value.dtype, gradient, sizes, value.dim())


def _plan_of(module: Any, plan: Plan) -> Any:
    """Return a plan as an object of the compiled node."""
    passes = [
        [module.Launch(*step[:7]) for step in steps] for steps in (plan.forward, plan.backward)
    ]
    context = _context()
    assert context  # kernels have been launched or loaded
    return module.Plan(context, *passes, plan.dtype, plan.gradient, *plan.sizes, plan.dims)


def _step(launched: Launch, slots: dict[int, int]) -> Step:
    """Return a launch for node.cpp: arguments of 8 bytes each, and those that change."""
    compiled, (programs,), given = launched
    arguments: list[int] = []
    places, k_at = [], -1
    for (name, kind), argument in zip(compiled.src.signature.items(), given, strict=False):
        if kind == "constexpr":  # part of the compiled kernel
            continue
        if isinstance(argument, Tensor):
            places.append((len(arguments), slots[id(argument)]))
            argument = 0
        elif name == "k":
            k_at = len(arguments)
        if isinstance(argument, float):
            (argument,) = struct.unpack("q", struct.pack("fxxxx", argument))
        arguments.append(argument)
    arguments += [0, 0]  # scratch memory that these kernels do not use
    meta = compiled.metadata
    threads = meta.num_warps * meta.target.warp_size
    return Step(
        compiled.function, programs, threads, meta.shared, arguments, places, k_at,
        meta.name, compiled.asm.get("cubin"),
    )  # fmt: skip


# --- compiling ------------------------------------------------------------------------------------


class _Build:
    """Compiles the node in the background; a call returns the node once it is ready."""

    def __init__(self) -> None:
        self.module: Any = None
        self.process: subprocess.Popen[bytes] | None = None
        self.is_over = False  # loaded, or failed for good
        self.lock = threading.Lock()

    def __call__(self) -> Any:
        """Return the compiled node, or None while there is none."""
        if not self.is_over:
            with self.lock:
                self._go_on()
        return self.module

    def _go_on(self) -> None:
        """Load the node or start to compile it, unless that has been done."""
        if self.is_over or (self.process is not None and self.process.poll() is None):
            return
        if torch.cuda.is_current_stream_capturing():  # the node's plans may need new kernels
            return
        try:
            if library_path().exists():
                self.module = load(library_path())
                _run_operators(self.module)
                self.is_over = True
            elif self.process is None and _compiler() is not None:
                null = subprocess.DEVNULL
                command = [sys.executable, "-m", __name__]
                self.process = subprocess.Popen(command, stdin=null, stdout=null, stderr=null)
            else:
                self.is_over = True
        except (ImportError, OSError, RuntimeError):  # such as no home directory for the cache
            self.is_over = True


compiled_node = _Build()


@functools.cache
def library_path() -> Path:
    """Return the path of the compiled node for this PyTorch and Python."""
    versions = f"{torch.__version__} {sys.implementation.cache_tag} {sysconfig.get_platform()}"
    digest = hashlib.sha256(_SOURCE.read_bytes() + versions.encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "pseudograd" / f"node_{digest}.so"


def _compiler() -> list[str] | None:
    # Where Python is embedded, this would start the embedding program again.
    is_python = "python" in Path(sys.executable or "").name
    if torch.version.cuda is None or os.name != "posix" or not is_python:
        return None
    command = shlex.split(os.environ.get("CXX") or "c++")
    return command if shutil.which(command[0]) else None


def build(library: Path, compiler: list[str]) -> None:
    """Compile node.cpp, unless another process has."""
    import fcntl

    from torch.utils import cpp_extension

    library.parent.mkdir(parents=True, exist_ok=True)
    with library.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if library.exists():
            return
        part = library.with_suffix(".part")
        includes = [*cpp_extension.include_paths(), sysconfig.get_path("include")]
        subprocess.run(
            [
                *compiler,
                *("-std=c++20", "-O2", "-shared", "-fPIC", "-fvisibility=hidden"),
                f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
                f"-DTORCH_EXTENSION_NAME={_NAME}",
                *(f"-I{folder}" for folder in includes),
                str(_SOURCE),
                *(f"-L{folder}" for folder in cpp_extension.library_paths()),
                *("-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python", "-o", str(part)),
            ],
            check=True,
        )
        part.replace(library)


def load(library: Path, driver: Any = None) -> Any:
    """Return the compiled module; tests replace the driver's cuLaunchKernel and cuCtxSetCurrent."""
    loader = importlib.machinery.ExtensionFileLoader(_NAME, str(library))
    spec = importlib.util.spec_from_loader(_NAME, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    driver = _driver() if driver is None else driver
    addresses = map(_address, (driver.cuLaunchKernel, driver.cuCtxSetCurrent))
    module.prepare(*addresses, NO_SECOND_DERIVATIVE, NO_FORWARD_MODE)
    return module


def _run_operators(module: Any) -> None:
    """Make the compiled node run the operators of graphs, instead of this module."""
    library = Path(torch.__file__).parent / "lib/libtorch_cuda.so"
    try:
        current_stream = ctypes.CDLL(str(library)).aoti_torch_get_current_cuda_stream
    except (OSError, AttributeError):
        return
    in_python = plan_in_graph, loss_in_graph, gradient_in_graph
    module.run_operators("CUDA", _address(current_stream), PARTS, *in_python)


def _address(function: Any) -> int | None:
    return ctypes.cast(function, ctypes.c_void_p).value


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _context() -> int:
    """Return the CUDA context of this thread, or 0 if it has none yet."""
    context = ctypes.c_void_p()
    error = _driver().cuCtxGetCurrent(ctypes.byref(context))
    assert not error
    return context.value or 0


if __name__ == "__main__":
    os.nice(10)
    found = _compiler()
    if found is None:
        sys.exit("the node needs PyTorch for CUDA and a C++ compiler; set CXX to choose one")
    build(library_path(), found)
    print(library_path())
