"""What a loss module keeps from one step to the next: whether its loss was scaled."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes


class ScaledBefore:
    """Whether a module's last loss was scaled: its upstream gradient was not 1.

    Then the next one will probably be scaled as well, by a GradScaler or a division for gradient
    accumulation, and a gradient computed in the forward pass would be useless. The backward kernel
    sets a flag for the next step, in pinned host memory, which the host reads without a sync. The
    flag decides which pass computes the gradient, never its value.

    Copies and pickles start with a fresh flag.
    """

    def __init__(self) -> None:
        self._flag: Tensor | None = None

    def flag(self) -> Tensor:
        """Return the flag that kernels write to, initially 0."""
        if self._flag is None:
            with _disable_current_modes():  # so that it never caches a fake tensor
                pinned = torch.cuda.is_available()
                self._flag = torch.zeros((), dtype=torch.int32, device="cpu", pin_memory=pinned)
        return self._flag

    def __reduce__(self) -> tuple[Any, ...]:
        return ScaledBefore, ()
