"""What a loss module remembers from one step to the next: whether its loss was scaled."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes


class ScaledBefore:
    """Whether a module's last loss was scaled: its upstream gradient was not 1.

    It will probably be scaled again, by a GradScaler or a division for gradient accumulation, and
    then a gradient computed in the forward pass is useless. The backward kernel finds out, too late
    for its own step, and sets a flag in pinned host memory, which the host reads without waiting
    for the GPU. The flag decides which pass computes a gradient, never what it is.

    Copies and pickles start with a fresh flag.
    """

    def __init__(self) -> None:
        self._flag: Tensor | None = None

    def flag(self) -> Tensor:
        """Return the number that kernels write to, 0 at first."""
        if self._flag is None:
            with _disable_current_modes():  # a fake tensor would stay for good
                pinned = torch.cuda.is_available()
                self._flag = torch.zeros((), dtype=torch.int32, device="cpu", pin_memory=pinned)
        return self._flag

    def __reduce__(self) -> tuple[Any, ...]:
        return ScaledBefore, ()
