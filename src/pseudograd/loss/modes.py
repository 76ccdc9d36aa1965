"""What traces or transforms the current call: `torch.compile`, `torch.export`, `torch.func`, ...

The usual compiled call traces `is_exporting` and `prepare_tracing`. Both are here, because
`torch.compile` guards a global such as ``torch`` once more for each module that reads it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch

from pseudograd.rules.checks import PROXY

# Functions that `torch.compile` must not trace into.
whole_functions: WeakSet[Callable[..., Any]] = WeakSet()


def keep_whole(function: Callable[..., Any]) -> None:
    """Keep `torch.compile` from tracing into a function."""
    whole_functions.add(function)
    if "pseudograd.loss.tracing" in sys.modules:
        torch.compiler.allow_in_graph(function)


def prepare_tracing() -> bool:
    """Return whether `torch.compile` traces this call; register what it must not trace into.

    Registering those functions earlier would import the compiler, which takes a second. It executes
    import statements while tracing, so importing this module registers them just in time.
    """
    if torch.compiler.is_compiling():
        import pseudograd.loss.tracing  # noqa: F401

        return True
    return False


def is_traced() -> bool:
    """Return whether `torch.compile`, `torch.export` or `make_fx` is tracing this call."""
    if torch.compiler.is_compiling():  # the compiler cannot trace the next line
        return True
    return torch._C._get_dispatch_mode(PROXY) is not None


def is_jit_traced() -> bool:
    """Return whether `torch.jit.trace` is tracing this call."""
    if torch.compiler.is_compiling():  # as above
        return False
    return torch._C._is_tracing()


def is_exporting() -> bool:
    """Return whether `torch.export` is tracing this call."""
    # Before PyTorch 2.13, `torch.compiler.is_exporting()` is also True while `torch.compile`
    # traces (pytorch#176347). The underlying flag is not.
    return bool(torch.compiler._is_exporting_flag)


def is_kept_as_graph() -> bool:
    """Return whether `torch.export` or `make_fx` is tracing this call: autograd sees only a graph.

    `torch.compile` traces both passes, in its own context, and `torch.func` differentiates while
    it is traced.
    """
    if is_exporting():
        return True
    if torch.compiler.is_compiling() or torch._C._get_dispatch_mode(PROXY) is None:
        return False
    compiled = torch._guards.TracingContext.try_get() is not None
    return not (compiled or torch._C._are_functorch_transforms_active())


def is_compiled() -> bool:
    """Return whether `torch.compile` is tracing this call, outside of `torch.func`."""
    if is_exporting() or torch._C._are_functorch_transforms_active():
        return False
    return torch._guards.TracingContext.try_get() is not None


def is_transformed() -> bool:
    """Return whether `torch.func` transforms this call, outside of `torch.export`."""
    return torch._C._are_functorch_transforms_active() and not is_exporting()
