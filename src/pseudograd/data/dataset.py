"""A data set in memory, split into a training and a test set."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pseudograd.extras import needed_for

if TYPE_CHECKING:
    from pandas import DataFrame

FOLDS = 5  # of cross-validation


@dataclass(frozen=True, eq=False)
class Dataset:
    """Examples of a classification problem, the training ones first.

    Attributes:
        name: The name that recipes refer to.
        features: One row per example, uint8 (pixels) or floating point.
        labels: Class indices, int64.
        train_size: The number of training examples; the rest is the test set.
        value_range: The smallest and largest possible value of a feature, which a recipe maps to
            its ``feature_range``.
        weights: Positive sample weights; only their ratios matter. None if all are equal.
        rows: The row of the file that each example comes from, counted from 1; None without a file.
        pieces_of: For each example, the index of the original example that it is a piece of. Pieces
            of one example have the same label, and stratified splits put them into different folds.
            None if no example was split.
        groups: The group index of each example. A group is never split between folds. -1 in a test
            set with unknown groups; None if there are no groups.
        frame: The first columns of the file that the training examples come from, to show examples
            as they are there; None without a file.

    Example:
        >>> data = Dataset("two", torch.tensor([[0], [9], [5]]).byte(), torch.tensor([0, 1, 1]), 2,
        ...                value_range=(0, 9))
        >>> data.classes, data.test_size
        (2, 1)

    """

    name: str
    features: Tensor
    labels: Tensor
    train_size: int
    value_range: tuple[float, float] = (0.0, 255.0)
    weights: Tensor | None = None
    rows: Tensor | None = None
    pieces_of: Tensor | None = None
    groups: Tensor | None = None
    frame: DataFrame | None = None

    def __post_init__(self) -> None:
        if self.features.dim() != 2 or len(self.features) != len(self.labels):
            raise ValueError(
                "features must have one row for each label, shape (examples, features); got "
                f"{tuple(self.features.shape)} for {len(self.labels)} labels"
            )
        if self.labels.dtype != torch.int64 or not (self.labels >= 0).all():
            raise ValueError("labels must be class indices, int64 and counted from 0")
        if not 0 < self.train_size <= len(self.labels):
            raise ValueError(
                f"train_size must lie in [1, {len(self.labels)}], not {self.train_size}"
            )
        if not self.value_range[0] < self.value_range[1]:
            raise ValueError(f"value_range must be (least, greatest), not {self.value_range}")
        if self.weights is not None:
            _check_weights(self.weights, len(self.labels))
        for name in ("rows", "pieces_of", "groups"):
            numbers = getattr(self, name)
            if numbers is not None and numbers.shape != self.labels.shape:
                raise ValueError(
                    f"{name} must be one number for each of the {len(self.labels)} examples"
                )

    @property
    def classes(self) -> int:
        """The number of classes."""
        return int(self.labels.max()) + 1

    @property
    def test_size(self) -> int:
        """The number of test examples."""
        return len(self.labels) - self.train_size

    def scaling(self, feature_range: tuple[float, float]) -> tuple[float, float]:
        """Return the factor and the offset that map features linearly to ``feature_range``."""
        low, high = feature_range
        least, greatest = self.value_range
        factor = (high - low) / (greatest - least)
        return factor, low - factor * least

    @functools.cached_property
    def sha256(self) -> str:
        """The SHA-256 of the features, the labels, and the weights, pieces and groups if any."""
        digest = hashlib.sha256()
        for tensor in (self.features, self.labels, self.weights, self.pieces_of, self.groups):
            if tensor is not None:
                digest.update(tensor.cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()


def memory() -> int:
    """Return the size of this machine's memory in bytes; 1 TiB if the system does not report it."""
    with contextlib.suppress(AttributeError, OSError, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return 2**40


def check_size(place: str, size: float, what: str) -> None:
    """Raise if the features or images of a data set need more than half of the memory."""
    if size > memory() / 2:
        raise ValueError(
            f"{place} has {what} that take {size / 2**30:,.1f} GB, more than half of the memory "
            f"({memory() / 2**30:,.1f} GB): take a sample of the rows, or fewer columns"
        )


def _check_weights(weights: Tensor, examples: int) -> None:
    if weights.shape != (examples,) or not weights.is_floating_point():
        raise ValueError(
            f"weights must be one floating-point number for each of the {examples} examples; got "
            f"{weights.dtype} of shape {tuple(weights.shape)}"
        )
    if not (weights > 0).all() or not weights.double().sum().isfinite():
        raise ValueError(
            "weights must be finite and above 0: remove examples that should not count"
        )


def digits(test_size: int = 360) -> Dataset:
    """Load scikit-learn's 1,797 handwritten digits of 8×8 pixels, which need no download.

    Args:
        test_size: How many examples to hold out; their order is fixed.

    Example:
        >>> data = digits()
        >>> data.features.shape, data.classes, data.train_size
        (torch.Size([1797, 64]), 10, 1437)

    """
    with needed_for("data 'digits'"):
        from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return Dataset(
        name="digits",
        features=torch.from_numpy(pixels).byte()[order],
        labels=torch.from_numpy(labels).long()[order],
        train_size=len(labels) - test_size,
        value_range=(0.0, 16.0),
    )
