"""What can be wrong with the numbers of a rule, with a sentence that names them."""

from __future__ import annotations

import numbers

import numpy as np
import torch
from torch import Tensor

_NUMBERS: tuple[type, ...] = (numbers.Real, torch.SymFloat, torch.SymInt)


def check_number(
    name: str, value: float | Tensor, least: float, greatest: float, wanted: str
) -> None:
    """Refuse what is no number from ``least`` to ``greatest``; tensors are passed over."""
    if isinstance(value, Tensor):
        return
    if isinstance(value, bool) or not isinstance(value, _NUMBERS):
        raise TypeError(f"{name} must be a number or a tensor, not {type(value).__name__}")
    # NumPy would make its half type, too, of what a number is compared with.
    number = float(value) if isinstance(value, np.generic) else value
    if not least <= number <= greatest:
        raise ValueError(f"{name} must be {wanted}, not {value}")
