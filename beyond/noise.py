"""Label noise: symmetric, asymmetric (similar classes), or human."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pseudograd.fleet import randomness

Labels = NDArray[np.int64]

# CIFAR-10: truck to automobile, bird to airplane, deer to horse, and cat and dog to each other.
SIMILAR = {9: 1, 2: 0, 4: 7, 3: 5, 5: 3}
HUMAN = {"aggregate": "cifar10-aggregate", "worst": "cifar10-worst", "human": "cifar100-fine"}
_VARIABLE = "PSEUDOGRAD_CIFAR_N"


def symmetric(labels: Labels, share: float, classes: int, seed: int = 0) -> Labels:
    """Return labels of which exactly this share (rounded) is moved to another class.

    Example:
        >>> clean = np.arange(1000) % 10
        >>> noisy = symmetric(clean, 0.4, 10)
        >>> int((noisy != clean).sum()), int(noisy.min()), int(noisy.max())
        (400, 0, 9)

    """
    chosen, other = _drawn(len(labels), share, classes - 1, seed)
    noisy = labels.copy()
    noisy[chosen] = (labels[chosen] + 1 + other) % classes
    return noisy


def asymmetric(labels: Labels, share: float, seed: int = 0) -> Labels:
    """Return CIFAR-10's labels with this share of each `SIMILAR` class moved to its counterpart.

    Example:
        >>> clean = np.arange(1000) % 10
        >>> noisy = asymmetric(clean, 0.4)
        >>> int((noisy != clean).sum()), set(noisy[clean == 3].tolist())
        (200, {3, 5})

    """
    noisy = labels.copy()
    for one, like in SIMILAR.items():
        of_class = np.flatnonzero(labels == one)
        chosen, _ = _drawn(len(of_class), share, 1, seed + one)
        noisy[of_class[chosen]] = like
    return noisy


def human(kind: str, clean: Labels, folder: str | os.PathLike[str] | None = None) -> Labels:
    """Return the human labels of CIFAR's training images (Wei et al., 2022).

    Args:
        kind: "aggregate" or "worst" of CIFAR-10N, or "human" of CIFAR-100N.
        clean: The true labels, one per image.
        folder: The folder of the files, such as ``cifar10-worst.npy``; by default the environment
            variable PSEUDOGRAD_CIFAR_N.

    """
    where = folder or os.environ.get(_VARIABLE)
    if not where:
        raise ValueError(
            f"give the folder with {HUMAN[kind]}.npy (human labels) by --cifar-n or the variable "
            f"{_VARIABLE}"
        )
    path = Path(where) / f"{HUMAN[kind]}.npy"
    found: Labels = np.load(path, allow_pickle=False).astype(np.int64)
    if found.shape != clean.shape or found.min() < 0 or found.max() > clean.max():
        raise ValueError(f"{path} must hold a label for each of the {len(clean)} training images")
    return found


def _drawn(count: int, share: float, others: int, seed: int) -> tuple[Labels, Labels]:
    """Return the indices of wrong labels, and the number of the other class for each."""
    order = randomness.folds(1 << 20 | seed, count).numpy()
    other = randomness.folds(1 << 21 | seed, count).numpy() % others
    chosen = order[: round(share * count)]
    return chosen, other[chosen]
