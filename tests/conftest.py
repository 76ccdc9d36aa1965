from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

# Without a GPU Triton's interpreter runs the kernels; it must be asked for before they are loaded.
os.environ["TRITON_INTERPRET"] = str(int(not torch.cuda.is_available()))

from pseudograd.loss import functional


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Small tensors are done soonest by a single thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=["fused", "plain"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways through the loss on the CPU: the compiled kernel, and PyTorch's operations."""
    chosen: str = request.param
    if chosen == "plain":
        monkeypatch.setattr(functional, "_compiled_by_numba", lambda: None)
    else:
        pytest.importorskip("numba")
    return chosen
