"""Which devices this machine has, and whether one can be used."""

from __future__ import annotations

import torch

from pseudograd.words import first_line


def all_devices() -> tuple[str, ...]:
    """Return all GPUs, or the CPU if there is none."""
    return tuple(f"cuda:{at}" for at in range(torch.cuda.device_count())) or ("cpu",)


def check_device(device: str | torch.device) -> str:
    """Return the device's name if it can be used, and raise ValueError with the reason if not.

    Example:
        >>> check_device("cpu")
        'cpu'

    """
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as problem:
        raise ValueError(f"cannot be used here ({first_line(problem)})") from problem
    return str(device)
