"""PyTorch's random numbers on the CPU, seeded for the length of a block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock

import torch

_lock = RLock()  # PyTorch's default CPU generator is global


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed PyTorch's default CPU generator inside the block, and restore its state afterwards."""
    with _lock:
        before = torch.default_generator.get_state()
        torch.default_generator.manual_seed(seed)
        try:
            yield
        finally:
            torch.default_generator.set_state(before)
