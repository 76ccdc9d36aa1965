from __future__ import annotations

import functools
import importlib.util
import inspect
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from covering import PATHS
from kernels import NO_KERNELS
from pseudograd.loss import cpu

# Without a GPU, Triton's interpreter runs the kernels; enable it before they are loaded.
os.environ["TRITON_INTERPRET"] = str(int(not torch.cuda.is_available()))
# Give JAX two devices, to shard arrays; it reads this when first used.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")


if os.environ["TRITON_INTERPRET"] == "1" and importlib.util.find_spec("triton"):
    from triton.language.core import is_builtin
    from triton.runtime import interpreter

    # At each call the interpreter searches all of Triton's language for functions to replace, which
    # takes a third of its time; search once.
    @functools.cache
    def builtins_of(package: Any) -> list[str]:
        return [name for name, member in inspect.getmembers(package) if is_builtin(member)]

    def patch_builtins(package: Any, *others: Any) -> None:
        for name in builtins_of(package):
            if is_builtin(member := getattr(package, name)):  # not replaced yet
                interpreter._patch_attr(package, name, member, *others)

    interpreter._patch_builtin = patch_builtins

# A shell's background jobs ignore Ctrl-C, and the processes that tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Use a single thread, which is fastest for small tensors."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run on both CPU paths of the loss: the compiled kernel, and PyTorch operations."""
    chosen: str = request.param
    if chosen == "plain":
        monkeypatch.setattr(cpu, "kernels", lambda: None)
    elif cpu.kernels() is None:
        pytest.skip(NO_KERNELS)
    return chosen


@pytest.fixture(autouse=True)
def _ctrl_c_works() -> Iterator[None]:
    """Restore the handler of Ctrl-C after a test: Ray Tune leaves its own behind."""
    before = signal.getsignal(signal.SIGINT)
    yield
    if signal.getsignal(signal.SIGINT) is not before:
        signal.signal(signal.SIGINT, before)
