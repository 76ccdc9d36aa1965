"""The node's plans on disk, for the first loss of a process.

A plan is what `node` reads off the launches of a layout, with the machine code of its kernels. A
process that finds it launches the same kernels without importing Triton, which takes about 0.4 s on
two cores. Plans are in a folder named after a hash of these sources, of the versions of PyTorch and
Triton, and of the GPU's name. Nothing else reads it, and it may be deleted at any time.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.metadata
import json
import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import torch

from pseudograd.rules.checks import GREATEST_K, LEAST_K

# More layouts than a program should have; those of variable lengths would fill the disk.
_MOST_SAVED = 512
# Kernels that need more shared memory than this have to ask the driver for it.
_SHARED_BYTES = 48 << 10


class Step(NamedTuple):
    """The launch of a kernel: its function, and the arguments of `Launch` in node.cpp."""

    function: int
    programs: int
    threads: int
    shared: int
    arguments: list[int]
    places: list[tuple[int, int]]
    k_at: int
    name: str
    code: bytes | None


class Plan(NamedTuple):
    """The launches of both passes, and the arguments of `Plan` in node.cpp."""

    forward: list[Step]
    backward: list[Step]
    dtype: torch.dtype
    gradient: torch.dtype | None
    sizes: list[int]
    dims: int


def exist_for(device: int) -> bool:
    """Return whether a process has saved a plan, so that the kernels of this code run here.

    Triton needs a C compiler for layouts without a plan. This machine may lack one that another
    machine with the same home has.
    """
    if not (os.environ.get("CC") or shutil.which("clang") or shutil.which("gcc")):
        return False
    try:
        return any(name.endswith(".json") for name in os.listdir(_folder(device)))
    except (OSError, ImportError, RuntimeError):  # such as no home directory
        return False


def saved_plan(layout: Any, device: int, driver: Any) -> Plan | None:
    """Return the plan that a process has saved for a layout, with its kernels on the device."""
    try:
        text = (_folder(device) / f"{_digest(repr(layout).encode())}.json").read_text("utf-8")
        found = json.loads(text)
        if found.pop("layout") != repr(layout):
            return None
        for name in _PASSES:
            found[name] = [_loaded(step, device, driver) for step in found[name]]
        for name in _DTYPES:
            found[name] = found[name] and getattr(torch, found[name])
        return Plan(**found)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ImportError, RuntimeError):
        return None  # none yet, or not as this version writes them


def save_plan(layout: Any, device: int, plan: Plan) -> None:
    """Save a plan, unless the disk has many or cannot be written to."""
    steps = [*plan.forward, *plan.backward]
    if any(step.code is None or step.shared > _SHARED_BYTES for step in steps):
        return
    try:
        folder = _folder(device)
        folder.mkdir(parents=True, exist_ok=True)
        if sum(name.endswith(".json") for name in os.listdir(folder)) >= _MOST_SAVED:
            return
        for code in {step.code for step in steps if step.code}:
            _write(folder / f"{_digest(code)}.cubin", code)
        text: dict[str, Any] = {**plan._asdict(), "layout": repr(layout)}
        for name in _PASSES:
            text[name] = [_as_json(step) for step in text[name]]
        for name in _DTYPES:
            text[name] = text[name] and str(text[name]).removeprefix("torch.")
        _write(folder / f"{_digest(repr(layout).encode())}.json", json.dumps(text).encode())
    except (OSError, ValueError, ImportError, RuntimeError):  # such as no home directory
        return


_PASSES, _DTYPES = ("forward", "backward"), ("dtype", "gradient")


def _as_json(step: Step) -> dict[str, Any]:
    assert step.code
    fields = {**step._asdict(), "code": _digest(step.code)}
    del fields["function"]
    return fields


def _loaded(step: dict[str, Any], device: int, driver: Any) -> Step:
    code = (_folder(device) / f"{step['code']}.cubin").read_bytes()
    if _digest(code) != step["code"]:
        raise ValueError("the machine code is not the one that was saved")
    places = [(at, slot) for at, slot in step["places"]]
    function = _function(device, code, step["name"], driver)
    return Step(**{**step, "places": places, "code": None, "function": function})


@functools.cache
def _function(device: int, code: bytes, name: str, driver: Any) -> int:
    """Load a kernel in the current context, and return its function."""
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    error = driver.cuModuleLoadData(ctypes.byref(module), code) or driver.cuModuleGetFunction(
        ctypes.byref(function), module, name.encode()
    )
    if error or not function.value:
        raise RuntimeError(f"CUDA error {error} while loading a kernel")
    return function.value


@functools.cache
def _folder(device: int) -> Path:
    """Return the folder for plans of this code on this device."""
    triton = importlib.metadata.version("triton")  # without importing it
    gpu = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    sources = sorted(path for path in Path(__file__).parent.iterdir() if path.is_file())
    texts = b"".join(path.read_bytes() for path in sources)
    bounds = LEAST_K, GREATEST_K  # constants of the kernels that are not in these sources
    versions = repr((torch.__version__, triton, torch.version.cuda, gpu, bounds)).encode()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "pseudograd" / f"plans_{_digest(texts + versions)}"


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:24]


def _write(path: Path, data: bytes) -> None:
    """Write a file, which other processes may write or read meanwhile."""
    part = path.with_name(f"{path.name}.{os.getpid()}")
    part.write_bytes(data)
    part.replace(path)
