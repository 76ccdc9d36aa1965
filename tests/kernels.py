"""Skip tests of kernels that are not available."""

from __future__ import annotations

import pytest

from pseudograd.loss import cpu

NO_KERNELS = "the CPU kernels have not been built: there was no C++ compiler"


def needs_kernels() -> None:
    """Skip a test where the CPU kernels have not been built."""
    if cpu.kernels() is None:
        pytest.skip(NO_KERNELS)


def needs(implementation: str) -> None:
    """Skip a test if an implementation is missing or falls back to another one."""
    if implementation == "auto":
        needs_kernels()
    elif implementation == "triton":
        pytest.importorskip("triton")
