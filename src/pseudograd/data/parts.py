"""Split a table into training and test set, by class and by group; count duplicates in both."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pseudograd.data.dataset import FOLDS, Dataset
from pseudograd.data.encoder import Encoder
from pseudograd.data.features import Categories
from pseudograd.words import counted


def draw(
    classes: NDArray[np.intp],
    fraction: float,
    stratify: bool,
    seed: int,
    groups: NDArray[np.int64] | None = None,
) -> NDArray[np.bool_]:
    """Return which rows are the test set; only classes, groups and seed determine it.

    Args:
        classes: The class index of each row.
        fraction: The share of rows to draw.
        stratify: Whether to stratify by class.
        seed: The random seed.
        groups: The group index of each row, if groups must not be split.

    """
    if groups is not None:
        return _draw_groups(classes, fraction, stratify, seed, groups)
    shuffled = _shuffled(len(classes), seed)
    # The first example of each class stays in the training set.
    rest = np.delete(shuffled, np.unique(classes[shuffled], return_index=True)[1])
    count = min(len(rest), max(1, round(fraction * len(classes))))
    if stratify:
        # Sorted by class, every n-th example is a stratified sample.
        rest = rest[np.argsort(classes[rest], kind="stable")]
        rest = rest[((np.arange(count) + 0.5) * len(rest) / max(count, 1)).astype(int)]
    drawn = np.zeros(len(classes), bool)
    drawn[rest[:count]] = True
    return drawn


def check_fraction(test_fraction: float | None) -> None:
    """Raise unless a share of the examples can be held out as the test set."""
    if test_fraction is not None and not 0 < test_fraction < 1:
        raise ValueError(f"test_fraction must lie between 0 and 1, not {test_fraction}")


def _draw_groups(
    classes: NDArray[np.intp],
    fraction: float,
    stratify: bool,
    seed: int,
    groups: NDArray[np.int64],
) -> NDArray[np.bool_]:
    """Draw groups in random order, each if it brings the test set closer to the wanted shares.

    At least five groups stay in the training set if possible, one for each fold.
    """
    order = np.argsort(groups, kind="stable")
    members = np.split(order, np.flatnonzero(np.diff(groups[order])) + 1)
    drawn, left = np.zeros(len(classes), bool), np.bincount(classes)
    lacking = fraction * (left if stratify else left.sum(keepdims=True))
    shuffled = [members[at] for at in _shuffled(len(members), seed)]
    room = max(1, len(members) - FOLDS)
    for rows in shuffled:
        counts = np.bincount(classes[rows], minlength=len(left))
        more = counts if stratify else counts.sum(keepdims=True)
        closer = np.abs(lacking - more).sum() < np.abs(lacking).sum()
        # Each class keeps a training example.
        if room and closer and (left - counts >= 1).all():
            drawn[rows], room = True, room - 1
            left, lacking = left - counts, lacking - more
    if drawn.any():
        return drawn
    # Every group is larger than the test set should be: take the smallest possible.
    for rows in sorted(shuffled, key=len):
        if (left - np.bincount(classes[rows], minlength=len(left)) >= 1).all():
            drawn[rows] = True
            return drawn
    raise ValueError(
        f"'group' has {counted(len(members), 'group')}, none of which can be the test set: name a "
        "column with more groups, or give a test file"
    )


def _shuffled(count: int, seed: int) -> NDArray[np.int64]:
    shuffled: NDArray[np.int64] = torch.randperm(
        count, generator=torch.Generator().manual_seed(seed)
    ).numpy()
    return shuffled


def in_both_parts(data: Dataset, encoder: Encoder) -> int:
    """Return how many test examples equal a training example, including the label.

    Examples with a rare category are not counted, since they share a feature with other categories.
    """
    features, labels, count = data.features.numpy(), data.labels.numpy(), data.train_size
    ends = np.cumsum([column.width for column in encoder.columns])
    rare = [
        end - 1 - column.missing
        for column, end in zip(encoder.columns, ends, strict=True)
        if isinstance(column, Categories) and column.other
    ]
    known = ~features[count:, rare].any(1)
    test = features[count:][known], labels[count:][known]
    return count_copies(test, (features[:count], labels[:count]))


def count_copies(rows: Sequence[NDArray[Any]], others: Sequence[NDArray[Any]]) -> int:
    """Return how many rows are among the others, too.

    Args:
        rows: Arrays whose first dimension is the rows, such as features and labels.
        others: Arrays of the same types and row shapes, with at least one row.

    Example:
        >>> x, y = np.array([[1, 2], [3, 4], [5, 6]]), np.array([0, 1, 0])
        >>> count_copies((x, y), (x[1:], np.array([1, 1])))
        1

    """
    known = set(_hashes(others))
    return sum(found in known for found in _hashes(rows))


def _hashes(arrays: Sequence[NDArray[Any]]) -> Iterator[int]:
    for row in zip(*arrays, strict=True):
        yield hash(tuple(part.tobytes() for part in row))


def copies_in_words(count: int, of: int, what: str, among: str = "training") -> str:
    """Return a remark on test rows, or examples, that are among the training ones, or others.

    Example:
        >>> copies_in_words(1, 40, "row")
        '1 of 40 test rows is a copy of a training row: the test error may look too low'

    """
    copies = "is a copy" if count == 1 else "are copies"
    return (
        f"{count:,} of {of:,} test {what}s {copies} of a {among} {what}: the test error may look "
        "too low"
    )
