from __future__ import annotations

import pytest

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
