from __future__ import annotations

import os

import pytest
import torch

# Without a GPU Triton's interpreter runs the kernels; it must be asked for before they are loaded.
os.environ["TRITON_INTERPRET"] = str(int(not torch.cuda.is_available()))

from pseudograd.loss import functional


@pytest.fixture(params=["fused", "plain"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways through the loss on the CPU: the compiled kernel, and PyTorch's operations."""
    chosen: str = request.param
    if chosen == "plain":
        monkeypatch.setattr(functional, "_compiled_by_numba", lambda: None)
    else:
        pytest.importorskip("numba")
    return chosen
