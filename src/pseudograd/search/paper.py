"""The paper's settings by data set and depth: k grid, batch size, repetitions, clipping."""

from __future__ import annotations

import math

from pseudograd.search.protocol import DEEP_KS, SHALLOW_KS

CLIP = 100.0


def ks_for(hidden_layers: int) -> tuple[float, ...]:
    """Return the paper's k grid, which ends at 1/4 for several hidden layers.

    Example:
        >>> ks_for(3)
        (4.0, 2.0, 1.0, 0.5, 0.25)

    """
    return DEEP_KS if hidden_layers > 1 else SHALLOW_KS


def clip_for(hidden_layers: int) -> float | None:
    """Return the paper's gradient clipping norm: 100 for several hidden layers, else None.

    Example:
        >>> clip_for(1), clip_for(3)
        (None, 100.0)

    """
    return CLIP if hidden_layers > 1 else None


def repetitions_for(data: str) -> int:
    """Return the paper's number of repetitions: 10 for MNIST, 7 for other data sets.

    Example:
        >>> repetitions_for("mnist"), repetitions_for("digits")
        (10, 7)

    """
    return 10 if data == "mnist" else 7


def batch_size_for(train_size: int) -> int:
    """Return the paper's batch size, 128, or less on small data, so that an epoch has five steps.

    It is then the largest power of two that gives five steps per epoch in cross-validation, which
    trains on three fifths of the examples.

    Example:
        >>> [batch_size_for(size) for size in (60_000, 855, 850, 5)]
        [128, 128, 64, 1]

    """
    size, trained_on = 128, train_size // 5 * 3
    while size > 1 and math.ceil(trained_on / size) < 5:
        size //= 2
    return size
