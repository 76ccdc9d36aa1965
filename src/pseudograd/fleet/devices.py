"""The devices of this machine, and checks of a fleet's device and slots arguments."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from pseudograd.fleet.recipe import is_whole
from pseudograd.words import first_line


def all_devices() -> tuple[str, ...]:
    """Return all GPUs, or the CPU if there is none."""
    return tuple(f"cuda:{at}" for at in range(torch.cuda.device_count())) or ("cpu",)


def check_device(device: str | torch.device) -> str:
    """Return the device's name, or raise ValueError with the reason if it cannot be used.

    Example:
        >>> check_device("cpu")
        'cpu'

    """
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as problem:
        reason = first_line(problem).partition(". ")[0]  # PyTorch's messages may be long
        raise ValueError(f"cannot be used here ({reason})") from problem
    return str(device)


def checked_places(
    device: str | torch.device | Sequence[str | torch.device], slots: int | None
) -> tuple[torch.device, ...]:
    """Return a fleet's devices, after checking them and the number of slots.

    Example:
        >>> checked_places("cpu", slots=None)
        (device(type='cpu'),)

    """
    if slots is not None and not is_whole(slots, 1, math.inf):
        raise ValueError(f"slots must be a whole number above 0, not {slots!r}")
    several = [device] if isinstance(device, str | torch.device) else device
    if not several:
        raise ValueError("device must name at least one device, such as 'cpu'")
    return tuple(torch.device(one) for one in several)
